//! The ways to move a guest.

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use lab::guest::Guest;
use lab::net::Namespace;
use lab::vamoose::{Server, Vamoose};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Conditions;

/// A way to move a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Contender {
    /// Stock QEMU, multifd, not compressed
    StockNone,
    /// Stock QEMU, multifd with zstd
    StockZstd,
    /// Stock QEMU, one channel with XBZRLE
    StockXbzrle,
    /// Stock QEMU, multifd, not compressed, with auto-converge
    StockConverge,
    /// `vamoose migrate` without differences
    VamooseNoDelta,
    /// `vamoose migrate` with differences, as by default
    Vamoose,
}

const CHANNELS: u8 = 2;
/// As large as Vamoose's page cache is by default.
const XBZRLE_CACHE: u64 = 256 << 20;

impl Contender {
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Starts a migration of the guest at the source to the other QEMU, which waits for it.
    pub(crate) fn start(
        self,
        [source, destination]: [&mut Guest; 2],
        [here, there]: [&Namespace; 2],
        conditions: &Conditions,
    ) -> Result<Helpers> {
        // Whatever the migration before has left.
        for guest in [&mut *source, &mut *destination] {
            self.set_up(guest, conditions)?;
        }
        let delta = match self {
            Self::VamooseNoDelta => "off",
            Self::Vamoose => "on",
            _ => {
                let address = there.address();
                let qmp = &mut destination.qemu.qmp;
                qmp.migrate_incoming(&format!("tcp:{address}:0"))?;
                let port = qmp.incoming_port()?;
                source.qemu.qmp.migrate(&format!("tcp:{address}:{port}"))?;
                return Ok(Helpers::None);
            }
        };
        Helpers::commands([source, destination], [here, there], conditions, delta)
    }

    fn set_up(self, guest: &mut Guest, conditions: &Conditions) -> Result<()> {
        let is_xbzrle = self == Self::StockXbzrle;
        let qmp = &mut guest.qemu.qmp;
        // In one command: QEMU has multifd and XBZRLE only one at a time.
        qmp.set_capabilities(&[
            ("events", true),
            ("return-path", true),
            ("multifd", !is_xbzrle),
            ("xbzrle", is_xbzrle),
            ("auto-converge", self == Self::StockConverge),
        ])?;
        let compression = match self {
            Self::StockZstd => "zstd",
            _ => "none",
        };
        qmp.set_parameters(json!({
            "max-bandwidth": 1_u64 << 40,
            "multifd-channels": CHANNELS,
            "multifd-compression": compression,
            "multifd-zstd-level": 1,
            "xbzrle-cache-size": XBZRLE_CACHE,
            "downtime-limit": conditions.terms.downtime_limit,
        }))
    }
}

/// What runs beside the QEMUs.
pub(crate) enum Helpers {
    None,
    Commands(Box<Commands>),
}

pub(crate) struct Commands {
    migrate: Vamoose,
    server: Server,
}

const LIMIT: Duration = Duration::from_secs(60);

impl Helpers {
    fn commands(
        [source, destination]: [&mut Guest; 2],
        [here, there]: [&Namespace; 2],
        conditions: &Conditions,
        delta: &str,
    ) -> Result<Self> {
        let terms = &conditions.terms;
        let server = Server::start(&conditions.vamoose, there, &destination.qemu)?;
        let mut migrate = server.migrate(&conditions.vamoose, here, &source.qemu);
        migrate.args(["--json", "-", "--channels", &CHANNELS.to_string()]);
        migrate.args(["--downtime-limit", &terms.downtime_limit.to_string()]);
        migrate.args(["--method", &terms.method, "--delta", delta]);
        if let Some(size) = &terms.page_cache {
            migrate.args(["--page-cache", size]);
        }
        Ok(Self::Commands(Box::new(Commands {
            migrate: Vamoose::start(&mut migrate)?,
            server,
        })))
    }

    /// Gives the migration up.
    pub(crate) fn cancel(self, source: &mut Guest) -> Result<()> {
        match self {
            Self::None => source.qemu.qmp.migrate_cancel()?,
            Self::Commands(commands) => {
                commands.migrate.signal(Signal::INT)?;
                commands.migrate.finish(LIMIT)?;
            }
        }
        source.qemu.qmp.wait_idle(LIMIT)
    }

    /// Whether one has ended that should not before the migration has.
    pub(crate) fn have_ended(&self) -> Result<bool> {
        match self {
            Self::None => Ok(false),
            Self::Commands(commands) => commands.migrate.has_ended(),
        }
    }

    /// Waits until they have done everything; gives the report, if there is one.
    pub(crate) fn finish(self) -> Result<Option<Value>> {
        match self {
            Self::None => Ok(None),
            Self::Commands(commands) => {
                let ended = commands.migrate.finish(LIMIT)?.success()?;
                Ok(Some(serde_json::from_str(&ended.stdout)?))
            }
        }
    }

    /// For error messages.
    pub(crate) fn said(&self) -> String {
        match self {
            Self::None => String::new(),
            Self::Commands(commands) => {
                let said = [&commands.migrate, commands.server.process()].map(Vamoose::stderr);
                format!("vamoose says:\n{}", said.join("\n--\n"))
            }
        }
    }
}
