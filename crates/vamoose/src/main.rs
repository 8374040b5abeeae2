//! `vamoose`: fast live migration of virtual machines, between unmodified QEMUs.
//!
//! Commands, progress and reports; what they do is in the crates below.

#![deny(unsafe_code)]

mod commands;
mod devices;
mod options;
mod progress;
mod report;

use std::{io::IsTerminal as _, process::ExitCode};

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Fast live migration of virtual machines, between unmodified QEMUs.
#[derive(Parser)]
#[command(version, propagate_version = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Relay(commands::relay::Options),
    Serve(commands::serve::Options),
    Migrate(commands::migrate::Options),
    Attempts(commands::attempts::Options),
    Settle(commands::settle::Options),
    Inspect(commands::inspect::Options),
    Probe(commands::probe::Options),
    Selftest(commands::selftest::Options),
    #[cfg(target_arch = "x86_64")]
    LiveDemo(commands::live_demo::Options),
    #[cfg(target_arch = "x86_64")]
    LiveDemoDestination(commands::live_demo::destination::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::builder()
        .with_env_var("VAMOOSE_LOG")
        .with_default_directive(tracing::level_filters::LevelFilter::INFO.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    let result = match cli.command {
        Command::Relay(options) => commands::relay::run(&options),
        Command::Serve(options) => commands::serve::run(&options),
        Command::Migrate(options) => commands::migrate::run(&options),
        Command::Attempts(options) => commands::attempts::run(&options),
        Command::Settle(options) => commands::settle::run(&options),
        Command::Inspect(options) => commands::inspect::run(&options),
        Command::Probe(options) => commands::probe::run(&options),
        Command::Selftest(options) => commands::selftest::run(&options),
        #[cfg(target_arch = "x86_64")]
        Command::LiveDemo(options) => commands::live_demo::run(&options),
        #[cfg(target_arch = "x86_64")]
        Command::LiveDemoDestination(options) => commands::live_demo::destination::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vamoose: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes on one line. Most of our errors name their cause in their own text: it is
/// not said twice.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}
