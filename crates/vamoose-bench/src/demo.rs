//! `vamoose bench demo`, `make demo`: Vamoose moves a running Linux guest, which writes memory, between two unmodified QEMUs over a
//! link of 1 Gbit/s. During the move the cable is pulled; the demo proves that the guest lost nothing. Then the same guest moves
//! over the intact link, with Vamoose and without, and the demo compares these moves.
//!
//! ```text
//!   namespace A                                    namespace B
//!   source QEMU ─unix─> vamoose migrate ──TLS──> vamoose serve ─unix─> destination QEMU     with Vamoose
//!   source QEMU ──────────────────────────TCP────────────────────────> destination QEMU     stock
//! ```
//!
//! Where no network namespaces can be made (not root, a restricted container), both ends use loopback.

mod cut;
mod guard;
pub(crate) mod hold;
mod network;
mod proof;
mod run;
mod screen;
mod setup;

use std::fmt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use guard::Guard;
use run::Run;
use screen::{say, step};
use setup::Setup;

/// A way to move the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Vamoose over TLS; the cable is pulled during the move.
    Cut,
    /// Vamoose over TLS.
    Tls,
    /// Vamoose with neither authentication nor encryption, like stock QEMU.
    Plain,
    /// QEMU to QEMU over TCP.
    Stock,
}

/// Stock QEMU's best method. Vamoose uses its default.
const METHOD: &str = "zstd";

impl Variant {
    /// Vamoose's security option.
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
            say(
                "\nInterrupted. All processes were ended, and all files and networks were removed.",
            );
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

    step(
        2,
        "Move a running guest with Vamoose over TLS, and pull the cable in the middle",
    );
    let cut = setup.run(Variant::Cut)?;

    step(3, "Prove that the guest lost nothing");
    proof::show(&cut)?;

    step(
        4,
        "Move the same guest in other ways, freshly booted each time; the cable stays plugged in",
    );
    let mut runs = Vec::new();
    for variant in [Variant::Tls, Variant::Plain, Variant::Stock] {
        let run = setup.run(variant)?;
        proof::check(&run)?;
        runs.push(run);
    }

    step(5, "Compare the moves whose cable stayed plugged in");
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
        "\nProved: Vamoose moved a running guest between unmodified QEMUs {} times, once with the cable pulled for {} s.\n\
         No tick was lost or repeated, the longest silence was {} ms, all memory arrived intact, and no source kept running.",
        moves.count(),
        cut::LASTS.as_secs(),
        longest.unwrap_or_default().as_millis(),
    ));
}
