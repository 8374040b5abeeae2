//! As many bytes as the guest has, from nowhere to nowhere: what the kernel takes for them.

use std::io::{self, BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lab::net::Namespace;
use lab::process::Child;

use super::{Host, MOMENTS};
use crate::record::{Cell, Cpu, Figures, Outcome, Record};

/// Nobody else is in the namespace. On a host without links it is iperf3's own.
const PORT: &str = "5201";

pub(super) fn measure(host: &Host, cell: &Cell, round: u32) -> Result<Record> {
    let link = host.link(cell.link)?;
    let iperf3 = |namespace: &Namespace, arguments: &[&str]| -> Command {
        let mut command = namespace.command("iperf3");
        command.args(["--port", PORT]).args(arguments);
        command
    };
    let mut command = iperf3(
        &link.destination,
        &["--server", "--one-off", "--forceflush"],
    );
    let mut server = Child::start(command.stdout(Stdio::piped()))?;
    let said = server.pipes.stdout.take();
    let mut said = BufReader::new(said.context("its output is a pipe")?).lines();
    let listens = |line: &io::Result<String>| {
        line.as_ref()
            .map_or(true, |line| line.contains("listening"))
    };
    said.find(listens)
        .context("the iperf3 server has ended")??;
    // What it says besides is of no interest, but has to go somewhere.
    let rest = thread::spawn(move || said.count());
    let address = link.destination.address().to_string();
    let (bytes, channels) = (cell.ram.to_string(), cell.channels.to_string());
    let mut command = iperf3(
        &link.source,
        &[
            "--client",
            &address,
            "--bytes",
            &bytes,
            "--parallel",
            &channels,
        ],
    );
    let start = Instant::now();
    let (status, sender) = Child::start(command.stdout(Stdio::null()))?.finish(MOMENTS)?;
    let seconds = start.elapsed().as_secs_f64();
    ensure!(status.success(), "iperf3 failed: {status}");
    let (_, receiver) = server.finish(MOMENTS)?;
    ensure!(rest.join().is_ok(), "iperf3's output could not be read");
    Ok(Record {
        cell: cell.clone(),
        round,
        outcome: Outcome::Bytes,
        figures: Figures {
            seconds,
            wire_bytes: Some(cell.ram),
            cpu: Cpu {
                sender,
                receiver,
                ..Cpu::default()
            },
            ..Figures::default()
        },
        timeline: Vec::new(),
        service: None,
    })
}
