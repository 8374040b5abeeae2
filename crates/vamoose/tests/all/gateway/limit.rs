//! One bandwidth limit over all migrations of a gateway: what passes between two gateways.

use std::{net::SocketAddr, time::Instant};

use anyhow::{Context as _, Result, ensure};
use lab::{
    middlebox::{Direction, Middlebox},
    qemu::{self, Builder},
    ram::Fill,
};
use rustix::process::Signal;

use super::{Hosts, PORTS, metrics};
use crate::common::{LIMIT, MIB, set_up};

const RAM: u64 = 16 * MIB;

/// What may be on its way when a limit is set.
const UNDER_WAY: u64 = 4 * MIB;

#[test]
fn guests_share_the_limit_of_a_gateway_and_its_change() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let lines = format!(
        "method = \"none\"\nmax-bandwidth = \"100Mbit\"\n{}",
        metrics::WITH_METRICS
    );
    let mut made = None;
    let hosts = Hosts::through(&lines, "", &[], |to| {
        let made = made.insert(Middlebox::new(to.parse::<SocketAddr>()?)?);
        Ok(made.address().to_string())
    })?;
    let link = made.context("no middlebox")?;
    let passed = || -> u64 {
        let all = link.connections();
        all.iter().map(|it| it.to_listener.passed).sum()
    };
    let at = metrics::address(&hosts)?;
    let limit = "vamoose_bandwidth_limit_bytes_per_second{direction=\"outgoing\"}";
    metrics::wait_for(&at, limit, 12_500_000.0)?;
    let mut guests = Vec::new();
    for port in PORTS {
        let content = Builder::bare(&qemu, RAM).content(Fill::Random, port.into());
        let mut source = content.start()?;
        let mut destination = Builder::bare(&qemu, RAM).incoming().start()?;
        for qemu in [&mut source, &mut destination] {
            set_up(qemu, 2, "none")?;
        }
        hosts.far.receives(&mut destination, port)?;
        guests.push((port, source, destination));
    }
    let keeps_to = |rate: u64, before: u64, began: Instant| {
        let (bytes, seconds) = (passed() - before, began.elapsed().as_secs_f64());
        let most = rate as f64 * seconds * 1.1 + UNDER_WAY as f64;
        println!("limit {rate} B/s: {bytes} bytes in {seconds:.2} s");
        ensure!((bytes as f64) < most, "{bytes} bytes in {seconds} s");
        Ok(())
    };
    let (before, began) = (passed(), Instant::now());
    for (port, source, _) in &mut guests {
        hosts.near.sends(source, *port)?;
    }
    link.wait_for_bytes(Direction::ToListener, 2 * RAM / 3, LIMIT)?;
    keeps_to(12_500_000, before, began)?;
    let setting = &hosts.near.setting;
    setting.write(&setting.text.replace("100Mbit", "60Mbit"))?;
    hosts.near.gateway.signal(Signal::HUP)?;
    hosts.near.says("the configuration has been read again")?;
    metrics::wait_for(&at, limit, 7_500_000.0)?;
    let (before, began) = (passed(), Instant::now());
    for (_, source, destination) in &mut guests {
        hosts.expect_moved(source, destination)?;
    }
    keeps_to(7_500_000, before, began)
}
