//! The demo's destination process: receives the guest, and reports its state on arrival.
//!
//! When the engine calls `resume`, the guest does not resume yet: its memory is read first, as it arrived. The downtime that the
//! source reports therefore excludes this reading, and also the microseconds for waking the vCPUs.

use std::{
    io::{self, Write as _},
    process, thread,
};

use anyhow::{Context as _, Result};
use serde::Serialize;
use testguest::{Fill, Guest, fill};
use tracing::warn;
use vamoose::report::process_cpu_time;
use vamoose_live::{
    Destination, DestinationConfig, DestinationGuest, GuestError, compression::Settings,
};

use crate::{
    digest::digest,
    guest::{ram_of, run_briefly},
    messages::{Arrived, Order},
};

pub(crate) fn run(order: &str) -> Result<()> {
    let order: Order = serde_json::from_str(order).context("not an order of vamoose-demo")?;
    end_with_the_source();
    // The source prints the error for the user.
    receive_guest(&order).or_else(|error| send::<()>(Err(format!("{error:#}"))))
}

/// Ends this process when the source ends, however that happens.
fn end_with_the_source() {
    thread::spawn(|| {
        // A read error also means that the source has ended.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        process::exit(1);
    });
}

fn receive_guest(order: &Order) -> Result<()> {
    let memory = order.shape.memory()?;
    if order.prealloc {
        fill(&memory, Fill::Zero);
    }
    let ram = ram_of(&memory)?;
    let guest = Guest::incoming(&order.shape.config(memory))?;
    let engines = order.hardware.engines(Settings::default())?;
    let mut config = DestinationConfig::new(engines);
    // The memory has just been mapped. A KVM guest's image is already in it, but the source has the same image in the same place,
    // so that none of its pages is ever sent as zeros.
    config.memory_is_zero = true;
    let (acceptor, address) = order.link.listen(&order.listen, config.stall_timeout)?;
    let mut destination = Destination::new(acceptor, ram.clone(), config)?;
    send(Ok(address))?;

    let before = process_cpu_time();
    let arrival = destination.run(&mut Incoming(&guest))?;
    let cpu_seconds = process_cpu_time().saturating_sub(before).as_secs_f64();
    if !arrival.settled {
        warn!("the source has not acknowledged that the guest is here");
    }
    let checksum = guest.verify();
    send(Ok(Arrived {
        checksum: checksum.map_err(|error| format!("{error:#}")),
        digest: digest(&ram)?,
        cpu_seconds,
        decode_seconds: arrival.moved.decode_time.as_secs_f64(),
    }))?;
    let writes = run_briefly(&guest, order.shape.rate)?;
    let proof = guest.verify();
    proof.context("the checksum does not hold after the guest resumed")?;
    send(Ok(writes))
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
