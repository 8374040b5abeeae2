//! How a migration begins, and what is between its QEMUs.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use lab::net::Link;
use lab::qemu::Qemu;
use lab::vamoose::{Server, Vamoose};
use serde_json::json;

use super::Way;
use crate::running::listening;

/// One migration's two ends.
pub(super) struct Ends<'a> {
    pub(super) source: &'a mut Qemu,
    pub(super) destination: &'a mut Qemu,
    pub(super) link: &'a Link,
    pub(super) vamoose: &'a Path,
}

/// The Vamooses of one migration.
#[derive(Default)]
pub(super) struct Helpers {
    /// Those that end with it.
    ending: Vec<Vamoose>,
    server: Option<Server>,
}

const CHANNELS: u8 = 2;
const LIMIT: Duration = Duration::from_secs(60);

impl Ends<'_> {
    /// Sets up what there is, and starts to move the guest.
    pub(super) fn begin(mut self, way: Way) -> Result<Helpers> {
        match way {
            Way::Stock(method) => self.stock(method),
            Way::Pair(method) => self.pair(method),
            Way::Migrate => self.migrate(),
        }
    }

    fn stock(&mut self, method: &str) -> Result<Helpers> {
        self.set_up_both(method)?;
        let address = self.link.destination.address();
        let destination = &mut self.destination.qmp;
        destination.migrate_incoming(&format!("tcp:{address}:0"))?;
        let port = destination.incoming_port()?;
        self.source.qmp.migrate(&format!("tcp:{address}:{port}"))?;
        Ok(Helpers::default())
    }

    fn pair(&mut self, method: &str) -> Result<Helpers> {
        self.set_up_both("none")?;
        let inside = format!("unix:{}", self.destination.socket("in").display());
        self.destination.qmp.migrate_incoming(&inside)?;
        let relay = |command: &mut Command| {
            command.args(["relay", "--insecure"]);
        };
        let mut far = self.link.destination.command(self.vamoose);
        relay(&mut far);
        far.args(["--session", "listen", "--connect", &inside]);
        let listen = format!("tcp:{}:0", self.link.destination.address());
        let (far, address) = listening(far.args(["--listen", &listen]), "listening on ")?;
        let mut near = self.link.source.command(self.vamoose);
        relay(&mut near);
        near.args(["--session", "connect", "--connect", &address]);
        let listen = format!("unix:{}", self.source.socket("out").display());
        near.args(["--listen", &listen, "--method", method]);
        let (near, address) = listening(&mut near, "listening on ")?;
        self.source.qmp.migrate(&address)?;
        Ok(Helpers {
            ending: vec![near, far],
            ..Helpers::default()
        })
    }

    fn migrate(&mut self) -> Result<Helpers> {
        let there = &self.link.destination;
        let server = Server::start(self.vamoose, there, self.destination)?;
        let mut command = server.migrate(self.vamoose, &self.link.source, self.source);
        Ok(Helpers {
            ending: vec![Vamoose::start(&mut command)?],
            server: Some(server),
        })
    }

    /// What `vamoose migrate` does by itself.
    fn set_up_both(&mut self, method: &str) -> Result<()> {
        for qmp in [&mut self.source.qmp, &mut self.destination.qmp] {
            qmp.use_multifd(CHANNELS)?;
            qmp.set_parameters(json!({
                "multifd-compression": method,
                "multifd-zlib-level": 1,
                "multifd-zstd-level": 1,
            }))?;
        }
        Ok(())
    }
}

impl Helpers {
    pub(super) fn said(&self) -> String {
        let all = self
            .ending
            .iter()
            .chain(self.server.as_ref().map(Server::process));
        let said: Vec<_> = all.map(Vamoose::stderr).collect();
        format!("vamoose says:\n{}", said.join("\n--\n"))
    }

    /// Waits for their ends; gives the CPU seconds that all of them have used.
    pub(super) fn finish(self) -> Result<f64> {
        let mut seconds = 0.0;
        for vamoose in self.ending {
            seconds += vamoose.finish(LIMIT)?.success()?.cpu_seconds;
        }
        if let Some(server) = self.server {
            seconds += lab::proc::cpu_seconds(server.process().pid())?;
        }
        Ok(seconds)
    }
}
