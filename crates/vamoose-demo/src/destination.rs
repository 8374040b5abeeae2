//! The demo's destination process: receives the guest, and reports what has arrived.
//!
//! The engine's `resume` does not resume the guest yet: first, its memory is read as it arrived. So the downtime that the source
//! reports excludes this reading, and waking the vCPUs, which takes microseconds.

use std::io::{self, Write as _};

use anyhow::{Context as _, Result};
use serde::Serialize;
use testguest::{Fill, Guest, fill};
use tracing::warn;
use vamoose_live::{Destination, DestinationConfig, DestinationGuest, GuestError, Settings};

use crate::{
    cpu::CpuTime,
    digest::Digest,
    dsa::Queues,
    guest::{ram_of, run_briefly},
    link::{OwnKey, end_with_the_source},
    messages::{Arrived, Order, Resumed},
};

pub(crate) fn run() -> Result<()> {
    let mut line = String::new();
    io::stdin()
        .read_line(&mut line)
        .context("cannot read the order")?;
    let order: Order = serde_json::from_str(&line)
        .context("this command is started by vamoose-demo, not by hand")?;
    let own_key = order.link.own_key()?;
    end_with_the_source(own_key.as_ref());
    // The source prints an error for the user.
    receive_guest(&order, own_key.as_ref()).or_else(|error| send::<()>(Err(format!("{error:#}"))))
}

fn receive_guest(order: &Order, own_key: Option<&OwnKey>) -> Result<()> {
    let memory = order.shape.memory()?;
    if order.prealloc {
        fill(&memory, &Fill::Zero).context("cannot populate the memory")?;
    }
    let ram = ram_of(&memory)?;
    let guest = Guest::incoming(&order.shape.config(memory)?)?;
    let engines = order.hardware.engines(Settings::default())?;
    let mut config = DestinationConfig::new(engines);
    // It has just been mapped. A KVM guest's image is there, and equals the source's image in the same place: no page of it is ever
    // sent as zeros.
    config.memory_is_zero = true;
    config.copy = Queues::copy(order.copy.as_ref(), &order.hardware)?;
    let (acceptor, listening) = order
        .link
        .listen(&order.listen, own_key, config.stall_timeout)?;
    let mut destination = Destination::new(acceptor, ram.clone(), config)?;
    send(Ok(listening))?;

    let before = CpuTime::now();
    let arrival = destination.run(&mut Incoming(&guest))?;
    let cpu_seconds = CpuTime::now().without_vcpus(before).as_secs_f64();
    if !arrival.settled {
        warn!("the source has not acknowledged that the guest is here");
    }
    let checksum = guest.verify();
    send(Ok(Arrived {
        checksum: checksum.map_err(|error| vamoose_live::chain(&error)),
        digest: Digest::of(&ram)?,
        cpu_seconds,
        decode_seconds: arrival.moved.decode_time.as_secs_f64(),
        copy: arrival.copy,
    }))?;
    let writes = run_briefly(&guest, order.shape.rate)?;
    let failure = guest.verify().err();
    let failure = failure.map(|error| vamoose_live::chain(&error));
    send(Ok(Resumed { writes, failure }))
}

/// The guest as the engine sees it.
struct Incoming<'a>(&'a Guest);

impl DestinationGuest for Incoming<'_> {
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        Ok(self.0.load(state)?)
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
}

fn send<T: Serialize>(message: Result<T, String>) -> Result<()> {
    let line = serde_json::to_string(&message)?;
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")
        .and_then(|()| stdout.flush())
        .context("cannot write to the source")
}
