//! Empties a rack of a thousand hosts, and then all racks one after the other, in virtual time, and prints how long that takes
//! and how long the decisions take on this machine:
//!
//! ```text
//! cargo run --release -p evacuation --example evacuate
//! ```

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a simulation that goes wrong panics"
)]

mod simulator;

use simulator::{Found, GIB, MIB, Scenario};

const SCENARIO: Scenario = Scenario {
    hosts: 1000,
    rack: 20,
    guests: 30,
    parallel: 4,
    // 100 Gbit/s, less what others need.
    bandwidth: 11_000 * MIB,
    failures: 10,
};

const SEED: u64 = 1;

fn main() {
    println!(
        "| emptied | guests | tries | memory, GiB | memory/limit, s | sent, GiB | sent/limit, s | took, s | plan, ms | decisions, ms |\n\
         |---|---|---|---|---|---|---|---|---|---|"
    );
    print("20 of 1,000 hosts", &SCENARIO.empty_one_rack(SEED));
    print("1,000 hosts, 20 at once", &SCENARIO.empty_all(SEED));
}

fn print(name: &str, found: &Found) {
    assert_eq!(found.moved, found.guests, "guests were left");
    let sent_in = found.sent / SCENARIO.bandwidth as f64;
    println!(
        "| {name} | {} | {} | {} | {:.0} | {:.0} | {sent_in:.0} | {:.0} | {:.0} | {:.0} |",
        found.guests,
        found.tries,
        found.memory / GIB,
        found.bound.as_secs_f64(),
        found.sent / GIB as f64,
        found.took.as_secs_f64(),
        found.planning.as_secs_f64() * 1e3,
        found.scheduling.as_secs_f64() * 1e3,
    );
}
