//! `make demo`: moves a Linux guest that runs and writes memory between two unmodified QEMUs with Vamoose, over a link of
//! 1 Gbit/s, and proves that the guest lost nothing. Then moves the same guest in other ways and compares.
//!
//! ```text
//!   namespace A                                    namespace B
//!   source QEMU ─unix─> vamoose migrate ──TCP──> vamoose serve ─unix─> destination QEMU     with Vamoose
//!   source QEMU ──────────────────────────TCP────────────────────────> destination QEMU     stock
//! ```
//!
//! Where network namespaces cannot be made (not root, a restricted container) both ends talk over loopback.

mod cpu;
mod guard;
mod network;
mod proof;
mod run;
mod screen;
mod stage;
mod witness;

use std::fmt;
use std::process::ExitCode;

use anyhow::Result;

use guard::Guard;
use run::Run;
use screen::{say, step};
use stage::Stage;

/// The first one is the one that is told at length.
const WAYS: [Way; 4] = [
    Way::Vamoose("zstd"),
    Way::Vamoose("zlib"),
    Way::Stock("zstd"),
    Way::Stock("zlib"),
];

/// Who moves the guest, and how pages are encoded on the link.
#[derive(Clone, Copy, Debug)]
enum Way {
    Vamoose(&'static str),
    Stock(&'static str),
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vamoose(method) => write!(f, "vamoose {method}"),
            Self::Stock(method) => write!(f, "stock {method}"),
        }
    }
}

fn main() -> ExitCode {
    let guard = match Guard::new() {
        Ok(guard) => guard,
        Err(error) => return lab::exit_code("demo", Err(error)),
    };
    let told = story(&guard);
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
fn story(guard: &Guard) -> Result<()> {
    say("Vamoose: a running guest moves between two unmodified QEMUs");

    step(1, "Set the stage");
    let stage = Stage::set(guard)?;

    step(2, "Move a running guest with Vamoose");
    let [told, others @ ..] = WAYS;
    let first = stage.run(told)?;

    step(3, "Prove that the guest lost nothing");
    proof::show(&first)?;

    step(
        4,
        "Move the same guest in other ways, freshly booted each time",
    );
    let mut runs = vec![first];
    for way in others {
        let run = stage.run(way)?;
        proof::check(&run)?;
        runs.push(run);
    }

    step(5, "Compare");
    screen::table(&runs, stage.network.describe_measuring());
    conclude(&runs);
    Ok(())
}

fn conclude(runs: &[Run]) {
    let by_vamoose = |run: &&Run| matches!(run.way, Way::Vamoose(_));
    let moves = runs.iter().filter(by_vamoose);
    let longest = moves.clone().map(|run| run.life.continuity.gap()).max();
    say(format!(
        "\nProved: {} times Vamoose moved a running guest between unmodified QEMUs. No tick was lost or doubled, the\n\
         longest silence was {} ms, all memory arrived intact, and no source ran on.",
        moves.count(),
        longest.unwrap_or_default().as_millis(),
    ));
}
