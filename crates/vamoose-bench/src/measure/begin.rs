//! Starts a migration, with the Vamoose processes between its QEMUs.

use std::path::Path;

use anyhow::{Context, Result};
use lab::middlebox::Middlebox;
use lab::net::Namespace;
use lab::proc;
use lab::qemu::Qemu;
use lab::vamoose::{Keys, Server, Vamoose};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::MOMENTS;
use super::tls::{self, Certificates};
use crate::record::Cell;
use crate::scenario::Who;

/// The two ends of a migration.
pub(crate) struct Ends<'a> {
    pub(crate) source: &'a mut Qemu,
    pub(crate) destination: &'a mut Qemu,
    pub(crate) here: &'a Namespace,
    pub(crate) there: &'a Namespace,
    pub(crate) vamoose: &'a Path,
    /// What `migrate` connects to, in place of its server.
    pub(crate) proxy: Option<&'a Middlebox>,
}

/// The Vamoose processes of a migration.
#[derive(Default)]
pub(super) struct Helpers {
    /// At the source; ends with the migration.
    near: Option<Vamoose>,
    /// At the destination.
    server: Option<Server>,
    /// Read again for each session.
    _keys: Option<Keys>,
}

/// Figures of the Vamoose processes after their end.
pub(super) struct Finished {
    /// CPU seconds at the source and at the destination.
    pub(super) cpu: [f64; 2],
    /// Report of the Vamoose at the source.
    pub(super) report: Option<Value>,
}

/// Default size of Vamoose's page cache.
const XBZRLE_CACHE: u64 = 256 << 20;

impl Ends<'_> {
    /// Sets up both ends, and starts the migration.
    pub(super) fn begin(&mut self, cell: &Cell) -> Result<Helpers> {
        tls::forget(self.source)?;
        match cell.contender.who {
            Who::Migrate => self.migrate(cell),
            Who::Qemu => self.stock(cell),
        }
    }

    fn stock(&mut self, cell: &Cell) -> Result<Helpers> {
        self.set_up(cell)?;
        // QEMU reads the files when it gets their object.
        if cell.contender.tls {
            Certificates::make()?.use_in(self.source, self.destination)?;
        }
        let address = self.listen_openly()?;
        self.source.qmp.migrate(&address)?;
        Ok(Helpers::default())
    }

    fn migrate(&mut self, cell: &Cell) -> Result<Helpers> {
        let contender = &cell.contender;
        let keys = contender.tls.then(|| Keys::make(self.vamoose));
        let keys = keys.transpose()?;
        let [mut options, mut far_options] = keys.as_ref().map(Keys::options).unwrap_or_default();
        options.extend(contender.options.clone());
        far_options.extend(contender.far_options.clone());
        let monitor = self.destination.qmp_socket();
        let mut server = Server::start(self.vamoose, self.there, &monitor, &far_options)?;
        if let Some(proxy) = self.proxy {
            let address = server.address.trim_start_matches("tcp:").parse();
            proxy.lead_to(address.context("the server's address")?);
            server.address = format!("tcp:{}", proxy.address());
        }
        let mut command = server.migrate(self.vamoose, self.here, self.source, &options);
        command.args(["--json", "-", "--method", &contender.method]);
        command.args(["--channels", &cell.channels.to_string()]);
        command.args(["--downtime-limit", &cell.downtime_limit.to_string()]);
        Ok(Helpers {
            near: Some(Vamoose::start(&mut command)?),
            server: Some(server),
            _keys: keys,
        })
    }

    /// Makes the destination QEMU listen on the link; returns its address.
    fn listen_openly(&mut self) -> Result<String> {
        let address = self.there.address();
        let qmp = &mut self.destination.qmp;
        qmp.migrate_incoming(&format!("tcp:{address}:0"))?;
        Ok(format!("tcp:{address}:{}", qmp.incoming_port()?))
    }

    /// Configures both QEMUs as `vamoose migrate` does by itself.
    fn set_up(&mut self, cell: &Cell) -> Result<()> {
        let method = &*cell.contender.method;
        for qemu in [&mut *self.source, self.destination] {
            let is_xbzrle = method == "xbzrle";
            // In one command: QEMU has either multifd or XBZRLE.
            qemu.qmp.set_capabilities(&[
                ("events", true),
                ("return-path", true),
                ("multifd", !is_xbzrle),
                ("xbzrle", is_xbzrle),
                ("auto-converge", method == "auto-converge"),
            ])?;
            let compression = match method {
                "zlib" | "zstd" => method,
                _ => "none",
            };
            qemu.qmp.set_parameters(json!({
                "max-bandwidth": 1_u64 << 40,
                "multifd-channels": cell.channels,
                "multifd-compression": compression,
                "multifd-zlib-level": 1,
                "multifd-zstd-level": 1,
                "xbzrle-cache-size": XBZRLE_CACHE,
                "downtime-limit": cell.downtime_limit,
            }))?;
        }
        Ok(())
    }
}

impl Helpers {
    /// Whether the Vamoose at the source has ended.
    pub(super) fn have_ended(&self) -> Result<bool> {
        let near = self.near.as_ref();
        near.map_or(Ok(false), Vamoose::has_ended)
    }

    /// Waits until the processes have ended.
    pub(super) fn finish(self) -> Result<Finished> {
        let near = self.near.map(|near| near.finish(MOMENTS)?.success());
        let near = near.transpose()?;
        let server = self.server.as_ref();
        let far = server.map(|server| proc::cpu_seconds(server.process().pid()));
        let cpu = [
            near.as_ref().map_or(0.0, |near| near.cpu_seconds),
            far.transpose()?.unwrap_or(0.0),
        ];
        let report = near.filter(|near| !near.stdout.is_empty());
        let report = report.map(|near| serde_json::from_str(&near.stdout));
        Ok(Finished {
            cpu,
            report: report.transpose().context("Vamoose's report")?,
        })
    }

    /// Cancels the migration; the guest stays at the source.
    pub(super) fn cancel(self, source: &mut Qemu) -> Result<()> {
        match (&self.server, self.near) {
            (Some(_), Some(migrate)) => {
                migrate.signal(Signal::INT)?;
                migrate.finish(MOMENTS)?;
            }
            _ => source.qmp.migrate_cancel()?,
        }
        source.qmp.wait_idle(MOMENTS)
    }

    /// Standard error of the processes, for error messages.
    pub(super) fn said(&self) -> String {
        let server = self.server.as_ref().map(Server::process);
        let all = self.near.iter().chain(server);
        let said: Vec<_> = all.map(Vamoose::stderr).collect();
        format!("vamoose says:\n{}", said.join("\n--\n"))
    }
}
