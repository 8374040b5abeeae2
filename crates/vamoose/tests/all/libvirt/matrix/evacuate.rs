//! `vamoose evacuate` of a host with many guests, through gateways, over a link of 1 Gbit/s.

use std::{collections::BTreeSet, fs, time::Duration};

use anyhow::{Context, Result, ensure};
use lab::{
    median,
    vamoose::{Keys, Vamoose},
};
use serde_json::Value;

use super::{RATE, generations};
use crate::{
    common::{number, vamoose},
    libvirt::hosts::{Crowd, Generation, Member, Passage, Way, Where},
};

/// Bytes of each guest's memory that do not compress.
const CONTENT: u64 = 16 << 20;

/// Concurrent migrations.
const PARALLEL: &str = "4";

const LIMIT: Duration = Duration::from_secs(1800);

/// LIBVIRT_GUESTS is the number of guests.
#[test]
#[ignore = "minutes, as root"]
fn evacuation() -> Result<()> {
    let guests = number("LIBVIRT_GUESTS", 100)?;
    let keys = Keys::make(vamoose())?;
    println!(
        "| libvirt | guests | took, s | each migration, s | downtime, ms | tries |\n|---|---|---|---|---|---|"
    );
    for generation in generations()? {
        let context = || format!("libvirt {}", generation.version);
        let line = evacuate(&generation, &keys, guests).with_context(context)?;
        println!("| {} | {guests} | {line} |", generation.version);
    }
    Ok(())
}

fn evacuate(generation: &Generation, keys: &Keys, guests: u32) -> Result<String> {
    let crowd = Crowd::hosts(generation, Way::Gateways, CONTENT, RATE)?;
    let mut passage = Passage::new(&crowd.hosts, keys)?;
    passage.prepare(Where::First)?;
    let mut names = BTreeSet::new();
    for number in 0..guests {
        let name = format!("web{number}");
        crowd.start(&Member {
            is_persistent: number % 2 == 0,
            ..Member::plain(&name)
        })?;
        names.insert(name);
    }
    crowd.expect(Where::First, &names)?;
    let host = Where::First.of(&crowd.hosts);
    let program = vamoose().to_str().context("the name of a folder")?;
    let mut command = host.command(program);
    command.args(["evacuate", "localhost", "--to", "qemu+tcp://host2/system"]);
    command.args(["--parallel", PARALLEL, "--json", "/etc/host/report"]);
    Vamoose::start(&mut command)?.finish(LIMIT)?.success()?;
    crowd.expect(Where::First, &BTreeSet::new())?;
    crowd.expect(Where::Second, &names)?;
    let report = fs::read_to_string(host.path("etc/host/report"))?;
    let report: Value = serde_json::from_str(&report)?;
    let all = report["guests"].as_array().context("no guests")?;
    ensure!(
        all.len() == names.len(),
        "{} guests are reported",
        all.len()
    );
    let values = |key: &str| all.iter().filter_map(|guest| guest[key].as_f64()).collect();
    let spread = |key: &str, unit: f64, digits: usize| {
        let values: Vec<f64> = values(key);
        let most = values.iter().copied().fold(0.0, f64::max) / unit;
        let middle = median(values).unwrap_or(f64::NAN) / unit;
        format!("{middle:.digits$} (at most {most:.digits$})")
    };
    let took = report["total-time"].as_f64().context("no total-time")? / 1e3;
    let tries: f64 = values("tries").iter().sum();
    Ok(format!(
        "{took:.1} | {} | {} | {tries:.0}",
        spread("total-time", 1e3, 2),
        spread("downtime", 1.0, 0),
    ))
}
