//! Code shared by Vamoose's programs: options, progress, reports and hints. Not an API for other programs.

#![deny(unsafe_code)]
#![allow(
    missing_docs,
    reason = "not a public API: documented where names do not suffice"
)]

pub mod devices;
pub mod exit;
pub mod hints;
pub mod hosts;
pub mod link;
pub mod log;
pub mod metrics;
pub mod options;
pub mod progress;
pub mod report;
pub mod security;
pub mod timeline;
pub mod values;
pub mod watchable;

use std::{
    fmt::Display,
    io::{self, Write as _},
    process::ExitCode,
};

use self::{exit::Exit, log::LogFormat};

/// Runs the program `name`, with its log in `format`. An error goes to standard error: all causes on one line, then a hint.
pub fn program(
    name: &str,
    format: Option<LogFormat>,
    run: impl FnOnce() -> anyhow::Result<()>,
) -> ExitCode {
    let Err(error) = log::start(format).and_then(|()| run()) else {
        return ExitCode::SUCCESS;
    };
    say(format_args!("{name}: {error:#}"));
    if let Some(hint) = hints::of(&error) {
        say(format_args!("  hint: {hint}"));
    }
    Exit::of(&error).into()
}

/// Writes a line to standard error. Unlike `eprintln`, ignores a closed terminal or pipe.
pub fn say(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}
