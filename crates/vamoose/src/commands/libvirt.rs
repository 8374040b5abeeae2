//! `vamoose libvirt`: migrations of libvirt through Vamoose.

mod migrate;
mod receive;
mod setup;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Set libvirt up for a gateway, or migrate one of its guests without set-up
#[derive(Args, Debug)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    Setup(setup::Options),
    Migrate(Box<migrate::Options>),
    #[command(hide = true)]
    Receive,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    match &options.action {
        Action::Setup(options) => setup::run(options),
        Action::Migrate(options) => migrate::run(options),
        Action::Receive => receive::run(),
    }
}
