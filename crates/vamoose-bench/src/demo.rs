//! `vamoose bench demo`, `make demo`: moves a Linux guest that runs and writes memory between two unmodified QEMUs with Vamoose, over a link of
//! 1 Gbit/s whose cable is pulled in the middle, and proves that the guest lost nothing. Then moves the same guest over
//! the whole link, with Vamoose and without, and compares these.
//!
//! ```text
//!   namespace A                                    namespace B
//!   source QEMU ─unix─> vamoose migrate ──TLS──> vamoose serve ─unix─> destination QEMU     with Vamoose
//!   source QEMU ──────────────────────────TCP────────────────────────> destination QEMU     stock
//! ```
//!
//! Where network namespaces cannot be made (not root, a restricted container) both ends talk over loopback.

mod cut;
mod guard;
pub(crate) mod hold;
mod network;
mod proof;
mod run;
mod screen;
mod setup;
mod witness;

use std::fmt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use guard::Guard;
use run::Run;
use screen::{say, step};
use setup::Setup;

/// Who moves the guest, and over what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Vamoose over TLS, and the cable is pulled meanwhile.
    Cut,
    /// Vamoose over TLS.
    Tls,
    /// Vamoose with neither authentication nor encryption, as stock QEMU.
    Plain,
    /// QEMU to QEMU over TCP.
    Stock,
}

/// How a stock QEMU encodes pages: its best. Vamoose has its default.
const METHOD: &str = "zstd";

impl Variant {
    /// As it is told.
    fn security(self) -> &'static str {
        match self {
            Self::Cut | Self::Tls => "--keys DIR",
            Self::Plain | Self::Stock => "--insecure",
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cut => "vamoose, TLS, cut",
            Self::Tls => "vamoose, TLS",
            Self::Plain => "vamoose, plain",
            Self::Stock => "stock, plain",
        })
    }
}

/// Tells the story, with this `vamoose` or the one beside this program.
pub(crate) fn run(vamoose: Option<&Path>) -> ExitCode {
    let guard = match Guard::new() {
        Ok(guard) => guard,
        Err(error) => return lab::exit_code("demo", Err(error)),
    };
    let told = story(&guard, vamoose);
    guard.sweep();
    match told {
        Err(_) if guard.interrupted() => {
            say("\nInterrupted. Ended what ran and removed what was made.");
            // What shells give for a program that SIGINT has ended.
            ExitCode::from(130)
        }
        told => lab::exit_code("\ndemo", told),
    }
}

/// Everything that the story starts and makes is removed when this returns, however it does.
fn story(guard: &Guard, vamoose: Option<&Path>) -> Result<()> {
    say("Vamoose: a running guest moves between two unmodified QEMUs");

    step(1, "Set the stage");
    let setup = Setup::new(guard, vamoose)?;

    step(
        2,
        "Move a running guest with Vamoose over TLS, and pull the cable in the middle",
    );
    let cut = setup.run(Variant::Cut)?;

    step(3, "Prove that the guest lost nothing");
    proof::show(&cut)?;

    step(
        4,
        "Move the same guest in other ways, freshly booted each time; the cable stays plugged",
    );
    let mut runs = Vec::new();
    for variant in [Variant::Tls, Variant::Plain, Variant::Stock] {
        let run = setup.run(variant)?;
        proof::check(&run)?;
        runs.push(run);
    }

    step(5, "Compare those whose cable stayed plugged");
    screen::table(&runs, setup.network.describe_measuring());
    runs.push(cut);
    conclude(&runs);
    Ok(())
}

fn conclude(runs: &[Run]) {
    let moves = runs.iter().filter(|run| run.variant != Variant::Stock);
    let silence = |run: &Run| run.life.continuity.gap().saturating_sub(run.held);
    let longest = moves.clone().map(silence).max();
    say(format!(
        "\nProved: {} times Vamoose moved a running guest between unmodified QEMUs, once with the cable pulled for {} s.\n\
         No tick was lost or doubled, the longest silence was {} ms, all memory arrived intact, and no source ran on.",
        moves.count(),
        cut::LASTS.as_secs(),
        longest.unwrap_or_default().as_millis(),
    ));
}
