//! What Vamoose's programs share: options, progress, reports and hints. It changes with them, and is no API for others.

#![deny(unsafe_code)]
#![allow(
    missing_docs,
    reason = "no API for others: documented where names do not suffice"
)]

pub mod devices;
pub mod hints;
pub mod link;
pub mod options;
pub mod progress;
pub mod report;
pub mod security;
pub mod watchable;

use std::{io::IsTerminal as _, process::ExitCode};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

/// Runs the program `name`. Its log goes to standard error (`VAMOOSE_LOG` filters it), and so does its error: all causes on one
/// line, then what can be done about it.
pub fn program(name: &str, run: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    let filter = EnvFilter::builder()
        .with_env_var("VAMOOSE_LOG")
        .with_default_directive(LevelFilter::INFO.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    let Err(error) = run() else {
        return ExitCode::SUCCESS;
    };
    eprintln!("{name}: {error:#}");
    if let Some(hint) = hints::of(&error) {
        eprintln!("  hint: {hint}");
    }
    ExitCode::FAILURE
}
