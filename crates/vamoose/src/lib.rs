//! Code shared by Vamoose's programs: options, progress, reports and hints. Not an API for other programs.

#![deny(unsafe_code)]
#![allow(
    missing_docs,
    reason = "not a public API: documented where names do not suffice"
)]

pub mod devices;
pub mod exit;
pub mod forecast;
pub mod hints;
pub mod hosts;
pub mod link;
pub mod log;
pub mod metrics;
pub mod options;
pub mod outcome;
pub mod progress;
pub mod report;
pub mod sample;
pub mod security;
pub mod terminal;
pub mod values;
pub mod watchable;

use std::process::ExitCode;

pub use self::terminal::say;
use self::{exit::Exit, log::LogOptions, outcome::NotMoved};

/// Runs the program `name`, with its log as `options` say. An error goes to standard error: all causes on one line, then a hint.
/// If a guest was not moved, where it is comes first.
pub fn program(
    name: &str,
    options: &LogOptions,
    run: impl FnOnce() -> anyhow::Result<()>,
) -> ExitCode {
    let Err(error) = log::start(options).and_then(|()| run()) else {
        return ExitCode::SUCCESS;
    };
    match error.downcast_ref::<NotMoved>() {
        Some(not_moved) => {
            say(not_moved);
            if let Some(why) = not_moved.why() {
                say(format_args!("  why: {why}"));
            }
        }
        None => say(format_args!("{name}: {error:#}")),
    }
    if let Some(hint) = hints::of(&error) {
        say(format_args!("  hint: {hint}"));
    }
    Exit::of(&error).into()
}
