//! The simulator: hosts, QEMUs, links, processes and people in virtual time, with the shipped code in the middle of it.
//!
//! ```text
//!   people ── migrate, cancel, settle, run it again ──┐              seed ─> options: what there is, and every fault
//!  ┌───────────── host ─────────────┐                 │   ┌───────────── host ─────────────┐
//!  │ QEMU ── relay ── migrate       │    sessions     │   │ serve ── relay ── QEMU         │
//!  │   ▲     policy   source of the │ ═══ streams ════════│ destination of      │          │
//!  │ disks            hand-over     │   connections   │   │ the hand-over      disks       │
//!  │          journal               │   links, paths  │   │         journal                │
//!  └────────────────────────────────┘                 │   └────────────────────────────────┘
//! ```
//!
//! | shipped | model, which follows the code of the crate named |
//! |---|---|
//! | `handover`: both machines and drivers, messages, framing, states in journals | `vamoose-relay`: what drives QEMUs, what commands do with earlier attempts ([`source`], [`destination`]) |
//! | `vamoose-session`: handshake with its proofs, frames, windows, streams | `vamoose-link`: dialling, which connection is which stream's ([`session`]) |
//! | `convergence`: when a guest is paused | QEMU's rules, the truth about guests, disks ([`qemu`]) |
//! | `evacuation`: plan and schedule | links ([`net`]), people ([`people`]), processes and journals ([`world`]) |
//!
//! A seed decides everything, also on another machine: the same seed has the same trace, which ends with its hash. What goes wrong
//! is told with its seed and the fewest faults with which it still does.
//!
//! # What never happens
//! - Two QEMUs run a guest or have its disks; one continues memory that is not what the guest last had.
//! - A QEMU is ended that has the guest or its last copy. A command reports a guest where it is not, or in doubt without a commit. An
//!   evacuation moves a guest again that has moved.
//! - A stream delivers other bytes than were written, keeps more than its bounds, or ends though nothing was broken for long.
//!
//! # What always happens
//! When faults have stopped, every command ends, no attempt stays open, no guest stays in doubt whose destination knows, and every
//! guest of which a copy is left runs, or is paused, as its owner wants it.
//!
//! # Not simulated
//! Code with sockets, threads and clocks in it, above all the drivers on the right of the table; TLS; copies of disks; post-copy;
//! gateways; VMMs with `vamoose-live`; the store of pages and the coding of packets.
//!
//! `make simulate` runs seeds for five minutes; SECONDS and SEED choose. SECONDS=0 only prints the hash of the first seeds' traces,
//! to compare machines.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "what is encoded here decodes, and a test fails by panicking"
)]

mod destination;
mod mutants;
mod net;
mod options;
mod people;
mod qemu;
mod random;
mod session;
mod shrink;
mod source;
mod trace;
mod world;

use std::{
    env,
    str::FromStr,
    time::{Duration, Instant},
};

use mutants::Mutant;
use options::Options;
use world::{Counts, World};

/// How a run ended.
struct Run {
    hash: u64,
    wrong: Option<String>,
    counts: Counts,
    time: Duration,
    lines: Vec<String>,
}

fn run(options: &Options, is_told: bool) -> Run {
    let fleet = people::fleet(options.hosts, options.guests);
    let mut world = World::new(options, is_told);
    if options.evacuates {
        world.evacuate(&fleet);
    }
    world.run();
    Run {
        hash: world.trace.hash,
        wrong: world.wrong,
        counts: world.counts,
        time: world.now,
        lines: world.trace.lines.unwrap_or_default(),
    }
}

/// Runs a seed; what goes wrong is told in full.
fn never_goes_wrong(seed: u64) -> Run {
    let options = Options::of(seed);
    let ran = run(&options, false);
    if let Some(wrong) = &ran.wrong {
        let (least, ran) = shrink::shrink(&options, wrong);
        let tail = ran.lines.len().saturating_sub(150);
        panic!(
            "SEED={seed}: {wrong}\n{}\n{least:#?}\nSEED={seed}: {wrong}",
            ran.lines[tail..].join("\n")
        );
    }
    ran
}

#[test]
fn nothing_goes_wrong() {
    for seed in 0..setting("SEEDS", 3) {
        never_goes_wrong(seed);
    }
}

#[test]
fn same_seed_has_the_same_trace() {
    for seed in 0..2 {
        let options = Options::of(seed);
        let [one, other] = [run(&options, true), run(&options, true)];
        assert_eq!(one.lines, other.lines, "SEED={seed}");
        assert_eq!(one.hash, other.hash, "SEED={seed}");
    }
}

/// `make simulate`.
#[test]
#[ignore = "takes minutes"]
fn many_seeds() {
    let limit = Duration::from_secs(setting("SECONDS", 300));
    let first = setting("SEED", 1_000_000);
    if env::var("SEED").is_ok() && env::var("SECONDS").is_err() {
        let ran = run(&Options::of(first), true);
        println!("{}", ran.lines.join("\n"));
        println!("SEED={first}: hash {:016x}", ran.hash);
        never_goes_wrong(first);
        return;
    }
    // The same on every machine.
    let hash = (0..20).fold(0_u64, |hash, seed| {
        hash.rotate_left(1) ^ never_goes_wrong(seed).hash
    });
    println!("seeds 0 to 19: traces' hash {hash:016x}");
    let (mut seed, mut all, mut time) = (first, Counts::default(), Duration::ZERO);
    let began = Instant::now();
    while began.elapsed() < limit {
        let ran = never_goes_wrong(seed);
        seed += 1;
        time += ran.time;
        all.add(&ran.counts);
    }
    let hours = time.as_secs_f64() / 3600.0;
    let speed = time.as_secs_f64() / began.elapsed().as_secs_f64();
    println!(
        "{} seeds from {first}: {hours:.0} simulated hours, {speed:.0} an hour",
        seed - first
    );
    println!("{all:#?}");
}

/// Each defect that is put back is found. The table of docs/results.
#[test]
#[ignore = "takes minutes"]
fn every_mutant_is_found() {
    let limit = Duration::from_secs(setting("SECONDS", 60));
    let only = env::var("MUTANT").ok();
    let mut missed = Vec::new();
    for mutant in Mutant::ALL.iter().copied() {
        if only
            .as_ref()
            .is_some_and(|only| !only.contains(&format!("{mutant:?}")))
        {
            continue;
        }
        match find(mutant, limit) {
            Some((seeds, time, wrong)) => {
                println!(
                    "| {mutant:?} | {seeds} | {:.1} | {wrong} |",
                    time.as_secs_f64()
                );
            }
            None => missed.push(mutant),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}

/// The number of seeds and the time until a defect was found, and as what.
fn find(mutant: Mutant, limit: Duration) -> Option<(u64, Duration, String)> {
    let began = Instant::now();
    for seed in 0.. {
        let options = Options {
            mutant: Some(mutant),
            ..Options::of(seed)
        };
        // And would not be wrong without the defect.
        if let Some(wrong) = run(&options, false).wrong
            && run(&Options::of(seed), false).wrong.is_none()
        {
            return Some((seed + 1, began.elapsed(), wrong));
        }
        if began.elapsed() > limit {
            return None;
        }
    }
    None
}

fn setting<T: FromStr>(name: &str, usual: T) -> T {
    let chosen = env::var(name).ok();
    chosen.map_or(usual, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name}={text}"))
    })
}
