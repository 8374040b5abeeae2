//! Guests that are alike, to a server and a gateway with a page store: pages that the destination has are not sent again.

use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
};
use serde_json::Value;

use crate::{
    common::{Host, LIMIT, MIB},
    gateway::metrics::wait_until,
};

/// A machine that was never started, with memory that shrinks: method auto would send noise as it is, which no store keeps.
fn machine(binary: &Binary, to: &Binary, seed: u64) -> Result<Qemu> {
    Builder::bare(binary, 32 * MIB)
        .content(Fill::Files(ram::host_files(32 * MIB)?), seed)
        .peer(to.version)
        .start()
}

/// Moves a guest, compares its memory, and returns the report.
fn move_to(host: &Host, name: &str, from: &Binary, to: &Binary, seed: u64) -> Result<Value> {
    let source = machine(from, to, seed)?;
    let destination = Builder::bare(to, 32 * MIB)
        .peer(from.version)
        .incoming()
        .start()?;
    host.knows(name, &destination)?;
    let ended = host
        .migrate(&source, name, &["--method", "zstd-frames"])?
        .finish(LIMIT)?;
    let ended = ended.success().with_context(|| host.server.stderr())?;
    ram::compare(source.ram(), destination.ram()).with_context(|| name.to_owned())?;
    Ok(serde_json::from_str(&ended.stdout)?)
}

#[test]
fn guests_that_are_alike_are_sent_once() -> Result<()> {
    let host = Host::start(&["--page-store", "256M", "--metrics", "tcp:127.0.0.1:0"])?;
    let mut shared = 0;
    for (number, (from, to)) in qemu::pairs_or_skip()?.into_iter().enumerate() {
        let report = move_to(&host, &format!("vm{number}"), &from, &to, 1)?;
        let (found, all) = (&report["shared"]["pages"], &report["ram"]["normal"]);
        let (found, all) = (found.as_u64().unwrap_or(0), all.as_u64().unwrap_or(0));
        if number > 0 {
            ensure!(
                found > all / 2,
                "{} to {}: {report}",
                from.version,
                to.version
            );
        }
        shared += found;
    }
    let at = host.server.wait_for("metrics at tcp:", LIMIT)?;
    let is = |name: &str, is_it: &dyn Fn(f64) -> bool| {
        wait_until(at.trim(), &format!("vamoose_page_store_{name} "), is_it)
    };
    is("hits_total", &|hits| hits == shared as f64)?;
    is("used_bytes", &|bytes| {
        bytes > 0.0 && bytes <= (256 * MIB) as f64
    })?;
    is("pages", &|pages| pages > 0.0)?;
    is("evictions_total", &|pages| pages == 0.0)
}

#[test]
fn groups_keep_guests_apart() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let options = ["--page-store", "256M", "--page-store-group", "web*"];
    let host = Host::start(&options)?;
    for (name, shares) in [("web1", false), ("db1", false), ("web2", true)] {
        let report = move_to(&host, name, &binary, &binary, 1)?;
        let (found, all) = (&report["shared"]["pages"], &report["ram"]["normal"]);
        ensure!(
            (found.as_u64() > all.as_u64().map(|all| all / 2)) == shares,
            "{name}: {report}"
        );
    }
    Ok(())
}
