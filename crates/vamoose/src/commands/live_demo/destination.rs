//! The demo's other process: takes the guest, and tells what has arrived.
//!
//! The engine's `resume` does not let the guest run yet: first its memory is read, as it came. So the downtime that the
//! source reports is the engine's, without the reading, and without waking the vCPUs, which takes microseconds.

use std::{
    io::{self, Write as _},
    process, thread,
};

use anyhow::{Context as _, Result};
use clap::Args;
use testguest::{Fill, Guest, fill};
use tracing::warn;
use vamoose_codec::Settings;
use vamoose_live::{Destination, DestinationConfig, DestinationGuest, GuestError};

use super::{
    cpu::CpuTime,
    digest::Digest,
    dsa::Queues,
    shape::{go_on, ram_of},
    talk::{Arrived, Order, Said, WentOn},
};

/// The destination of a `vamoose live-demo`, which starts it and tells it everything else
#[derive(Args, Debug)]
#[command(hide = true)]
pub(crate) struct Options {}

pub(crate) fn run(_: &Options) -> Result<()> {
    let mut line = String::new();
    io::stdin()
        .read_line(&mut line)
        .context("cannot read what to do")?;
    let order = serde_json::from_str(&line)
        .context("this command is started by `vamoose live-demo`, not by hand")?;
    end_with_the_source();
    match take_guest(&order) {
        Ok(()) => Ok(()),
        // The source tells the user.
        Err(error) => say(&Said::Failed {
            cause: crate::one_line(&error),
        }),
    }
}

/// Whatever becomes of the source, killed or gone with its host: nobody needs this process any more.
fn end_with_the_source() {
    thread::spawn(|| {
        // An error is the end, too.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        process::exit(1);
    });
}

fn take_guest(order: &Order) -> Result<()> {
    let memory = order.shape.memory()?;
    if order.prealloc {
        fill(&memory, &Fill::Zero).context("cannot populate the memory")?;
    }
    let ram = ram_of(&memory)?;
    let guest = Guest::incoming(&order.shape.config(memory)?)?;
    let engines = order.hardware.engines(Settings::default())?;
    let mut config = DestinationConfig::new(engines);
    // It was mapped just now. A KVM guest has its image there, which the source's has in the same place:
    // no page of it is ever sent as zeros.
    config.memory_is_zero = true;
    config.copy = Queues::copy(order.copy.as_ref(), &order.hardware)?;
    let mut destination = Destination::bind(&order.listen.parse()?, ram.clone(), config)?;
    say(&Said::Listening {
        address: destination.address().to_string(),
    })?;

    let before = CpuTime::now();
    let arrival = destination.run(&mut Incoming(&guest))?;
    let cpu_seconds = CpuTime::now().without_vcpus(before).as_secs_f64();
    if !arrival.settled {
        warn!("the source has not acknowledged that the guest is here");
    }
    say(&Said::Arrived(Arrived {
        checksum: guest
            .verify()
            .map(Into::into)
            .map_err(|error| error.to_string()),
        digest: Digest::of(&ram)?,
        cpu_seconds,
        decode_seconds: arrival.moved.decode_time.as_secs_f64(),
        copy: arrival.copy,
    }))?;
    let writes = go_on(&guest, order.shape.rate)?;
    let failure = guest.verify().err().map(|error| error.to_string());
    say(&Said::WentOn(WentOn { writes, failure }))
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

fn say(said: &Said) -> Result<()> {
    let mut line = serde_json::to_string(said)?;
    line.push('\n');
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(line.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot tell the source")
}
