//! `vamoose bench demo`, `make demo`: Vamoose moves a running Linux guest, which writes memory, between two unmodified QEMUs over a
//! link of 1 Gbit/s. During the move the cable is pulled; the demo proves that the guest lost nothing. Then the guest moves back and
//! forth over intact links, with Vamoose and without, always encrypted, and the demo compares these moves.
//!
//! ```text
//!   namespace A                                    namespace B
//!   source QEMU ─unix─> vamoose migrate ──TLS──> vamoose serve ─unix─> destination QEMU     with Vamoose
//!   source QEMU ──────────────────────────TLS────────────────────────> destination QEMU     stock
//! ```
//!
//! Where no network namespaces can be made (not root, a restricted container), both ends use loopback.

mod content;
mod cut;
mod guard;
mod network;
mod proof;
mod run;
mod screen;
mod setup;

use std::fmt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::scenario::Rate;
use guard::Guard;
use run::Travel;
use screen::{Comparison, note, say, step};
use setup::Setup;

/// A way to move the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Vamoose; the cable is pulled during the move.
    Cut,
    /// Vamoose, with its defaults.
    Vamoose,
    /// QEMU to QEMU, with this compression.
    Stock(&'static str),
}

/// What is compared; Vamoose is the last.
const CONTENDERS: [Variant; 3] = [
    Variant::Stock("none"),
    Variant::Stock("zstd"),
    Variant::Vamoose,
];

/// Moves of each contender over each link.
const ROUNDS: usize = 3;

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cut => f.write_str("Vamoose, TLS, cut"),
            Self::Vamoose => f.write_str("Vamoose, TLS"),
            Self::Stock(method) => write!(f, "stock QEMU, TLS, {method}"),
        }
    }
}

/// Runs the demo, with this `vamoose` or the one beside this program.
pub(crate) fn run(vamoose: Option<&Path>) -> ExitCode {
    let guard = match Guard::new() {
        Ok(guard) => guard,
        Err(error) => return lab::exit_code("demo", Err(error)),
    };
    let ended = demonstrate(&guard, vamoose);
    guard.sweep();
    match ended {
        Err(_) if guard.interrupted() => {
            say("\nInterrupted. All processes, files and networks were removed.");
            // The exit code of a program that SIGINT has ended, as shells report it.
            ExitCode::from(130)
        }
        ended => lab::exit_code("\ndemo", ended),
    }
}

/// Removes everything that it started or made before it returns.
fn demonstrate(guard: &Guard, vamoose: Option<&Path>) -> Result<()> {
    say("Vamoose: a running guest moves between two unmodified QEMUs");

    step(1, "Prepare the hosts and the guest");
    let setup = Setup::new(guard, vamoose)?;
    let mut travel = Travel::begin(&setup)?;

    step(
        2,
        "Move the running guest with Vamoose, and pull the cable in the middle",
    );
    let rates = setup.network.rates();
    let cut = travel.go(Variant::Cut, rates[0])?;

    step(3, "Prove that the guest lost nothing");
    travel.verify()?;
    proof::show(&cut, setup.load.fill).context("the proof failed")?;

    step(
        4,
        "Move the guest back and forth, with Vamoose and with stock QEMU's own TLS",
    );
    let mut silences = vec![proof::silence(&cut)];
    let compared = rates
        .iter()
        .map(|rate| compare(&mut travel, *rate, &mut silences));
    let compared: Vec<_> = compared.collect::<Result<_>>()?;
    travel.verify()?;

    step(
        5,
        "Compare: both encrypt, and both ends authenticate each other",
    );
    for comparison in &compared {
        say("");
        comparison
            .table()
            .iter()
            .for_each(|line| say(format!("   {line}")));
    }
    say("");
    note(screen::legend(setup.network.describe_measuring()));
    conclude(&silences);
    Ok(())
}

/// Moves the guest over one link in all ways, in turn; adds how long the guest was silent in Vamoose's moves.
fn compare(
    travel: &mut Travel<'_>,
    rate: Rate,
    silences: &mut Vec<Duration>,
) -> Result<Comparison> {
    let link = travel.setup.network.set(rate)?;
    say(format!("   {link}"));
    let mut moves = CONTENDERS.map(|variant| (variant, Vec::new()));
    for _ in 0..ROUNDS {
        for (variant, moves) in &mut moves {
            let run = travel.go(*variant, rate)?;
            if *variant == Variant::Vamoose {
                silences.push(proof::silence(&run));
            }
            moves.push(run.measured);
        }
    }
    Ok(Comparison::of(link, &moves))
}

fn conclude(silences: &[Duration]) {
    let longest = silences.iter().max().copied().unwrap_or_default();
    say("");
    screen::wrap(format!(
        "Proved: Vamoose moved a running guest between unmodified QEMUs {} times, once with the cable pulled for {} s. \
         No tick was lost or repeated, the longest silence was {} ms, the guest found all of its content intact, and no source kept running.",
        silences.len(),
        cut::LASTS.as_secs(),
        longest.as_millis(),
    ));
}
