//! `vamoose`: fast live migration of virtual machines, between unmodified QEMUs.
//!
//! Commands, progress and reports; the crates below do the work.

#![deny(unsafe_code)]

mod commands;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use vamoose::log::LogOptions;

/// Fast live migration of virtual machines, between unmodified QEMUs.
#[derive(Parser)]
#[command(version, propagate_version = true, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    log: LogOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Migrate(commands::migrate::Options),
    Predict(commands::predict::Options),
    Serve(commands::serve::Options),
    Keys(commands::keys::Options),
    Attempts(commands::attempts::Options),
    Settle(commands::settle::Options),
    Libvirt(commands::libvirt::Options),
    Gateway(commands::gateway::Options),
    Evacuate(commands::evacuate::Options),
    Relay(commands::relay::Options),
    Probe(commands::probe::Options),
    Selftest(commands::selftest::Options),
    Bench(commands::bench::BenchOptions),
    Completions(commands::completions::Options),
    #[command(hide = true)]
    Pages(commands::pages::Options),
}

fn main() -> ExitCode {
    let mut cli = Cli::parse();
    cli.log.is_brief = matches!(
        cli.command,
        Command::Migrate(_) | Command::Predict(_) | Command::Libvirt(_) | Command::Evacuate(_)
    );
    vamoose::program("vamoose", &cli.log, || match cli.command {
        Command::Relay(options) => commands::relay::run(&options),
        Command::Serve(options) => commands::serve::run(&options),
        Command::Migrate(options) => commands::migrate::run(&options),
        Command::Predict(options) => commands::predict::run(options),
        Command::Gateway(options) => commands::gateway::run(&options),
        Command::Libvirt(options) => commands::libvirt::run(&options),
        Command::Evacuate(options) => commands::evacuate::run(&options),
        Command::Attempts(options) => commands::attempts::run(&options),
        Command::Settle(options) => commands::settle::run(&options),
        Command::Keys(options) => commands::keys::run(&options),
        Command::Probe(options) => commands::probe::run(&options),
        Command::Selftest(options) => commands::selftest::run(&options),
        Command::Bench(options) => commands::bench::bench(&options),
        Command::Completions(options) => commands::completions::run(&options, Cli::command()),
        Command::Pages(options) => commands::pages::run(&options, Cli::command()),
    })
}
