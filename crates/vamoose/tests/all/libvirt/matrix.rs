//! `make libvirt`: moves guests between two hosts with `virsh migrate`, in every way that administrators do, and prints how each
//! migration ended. `cases` runs the matrix, `times` and `disks` measure migrations, `evacuation` moves many guests.
//!
//! The guest ticks, checks its memory ([`lab::guest`]), and writes to a disk that both hosts reach, or that is copied. After each
//! migration:
//!
//! - the guest is on exactly one of the hosts, the one that the case says;
//! - it ticks there, no tick is missing or doubled, and all of its memory is as it wrote it;
//! - all that it has written is on its disk, nothing twice, and neither host has the image locked;
//! - `virsh` has ended, and where the guest stayed, the next migration succeeds.

mod case;
mod disks;
mod evacuate;
mod migration;
mod times;

use std::env;

use anyhow::{Context as _, Result, ensure};
use lab::{guest::Image, vamoose::Keys};

use self::case::{CASES, Case};
use super::hosts::{self, Domain, Generation, Hosts, Passage, Storage, Way};
use crate::common::{number, vamoose};

/// Bits a second between the hosts.
const RATE: u64 = 1_000_000_000;

const WAYS: [Way; 3] = [Way::Direct, Way::Relays, Way::Gateways];

/// LIBVIRT_VERSIONS, LIBVIRT_WAYS and LIBVIRT_CASES choose some of them, separated by commas: a case by a part of its name.
/// LIBVIRT_REPEAT is how often each one runs.
#[test]
#[ignore = "half an hour, as root"]
fn cases() -> Result<()> {
    let repeat = number("LIBVIRT_REPEAT", 1)?;
    let (image, keys) = (Image::build(16)?, Keys::make(vamoose())?);
    let mut wrong = 0;
    println!("| libvirt | way | case | virsh | guest |\n|---|---|---|---|---|");
    for generation in generations()? {
        for way in WAYS
            .into_iter()
            .filter(|way| is_chosen("LIBVIRT_WAYS", &way.to_string()))
        {
            let cases = CASES.iter().filter(|case| is_wanted(case));
            for case in cases.filter(|case| case.suits(&generation, way)) {
                for _ in 0..repeat {
                    let found = migration::run(&generation, way, case, &image, &keys);
                    print!("| {} | {way} | {} | ", generation.version, case.name);
                    match found {
                        Ok(found) => println!("{} | {} |", found.ended, found.guest),
                        Err(error) => {
                            wrong += 1;
                            let error = format!("{error:#}").replace(['\n', '|'], " ");
                            println!("**WRONG**: {error} | |");
                        }
                    }
                }
            }
        }
    }
    ensure!(wrong == 0, "{wrong} cases went wrong");
    Ok(())
}

/// Moves one guest again and again, through gateways that stay, in cases that `choose` picks, until that picks none. `moved` gets
/// each case's name.
pub(crate) fn moves_on(
    generation: &Generation,
    mut choose: impl FnMut(usize) -> Option<usize>,
    mut moved: impl FnMut(&str),
) -> Result<()> {
    let (image, keys) = (Image::build(16)?, Keys::make(vamoose())?);
    let hosts = Hosts::start(generation, Way::Gateways, &image, RATE)?;
    let mut passage = Passage::new(&hosts, &keys)?;
    let busy = &migration::BUSY;
    let mut domain = Domain::start(&hosts, &image, migration::RAM, busy, Storage::Shared)?;
    let suits = |case: &&Case| {
        let is_plain = case.storage == Storage::Shared && !case.flags.contains(&"--tls");
        is_plain && !case.is_by_name && case.suits(generation, Way::Gateways)
    };
    let cases: Vec<_> = CASES.iter().filter(suits).collect();
    while let Some(number) = choose(cases.len()) {
        let case = cases[number];
        let found = migration::migrate(&hosts, &mut domain, &mut passage, case);
        found.with_context(|| format!("{}; {}", case.name, migration::said(&hosts)))?;
        moved(case.name);
    }
    domain.ends_well()
}

fn generations() -> Result<Vec<Generation>> {
    let mut found = hosts::available_or_skip()?;
    found.retain(|it| is_chosen("LIBVIRT_VERSIONS", it.version));
    ensure!(
        !found.is_empty(),
        "no such libvirt: run scripts/setup libvirt, as root"
    );
    Ok(found)
}

fn is_wanted(case: &Case) -> bool {
    match env::var("LIBVIRT_CASES") {
        Ok(_) => is_chosen("LIBVIRT_CASES", case.name),
        Err(_) => !case.is_by_name,
    }
}

/// Whether a name contains one of those in an environment variable, if it is set.
fn is_chosen(variable: &str, name: &str) -> bool {
    let chosen = env::var(variable);
    chosen.map_or(true, |chosen| {
        chosen.split(',').any(|text| name.contains(text))
    })
}
