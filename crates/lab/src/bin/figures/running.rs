//! A guest that runs: how long it stands still when it moves, over links from 10 Mbit/s to one that only the CPU limits.
//!
//! ```text
//!       namespace here                                                namespace there
//!  direct   source QEMU ───────────────────the link───────────────────> destination QEMU
//!  relay    source QEMU ─unix─> vamoose relay ────────────────────────> destination QEMU, which decodes
//!  relays   source QEMU ─unix─> vamoose relay ───────> vamoose relay ─unix─> destination QEMU
//!  migrate  source QEMU ─unix─> vamoose migrate ─────> vamoose serve ─unix─> destination QEMU
//! ```
//!
//! The downtime is what a guest's users see: from the source QEMU's event STOP to the destination's RESUME, both stamped by
//! the same clock. With `direct` and `relays` the destination starts the guest by itself; `migrate` makes it wait for
//! its word. One guest serves for all cases of a link: it moves on from case to case, to and fro, and checks its memory after each.
//! Vamoose, too, speaks without TLS here (`--insecure`), as the QEMUs do; the session's checksums are on.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lab::guest::{Guest, Image, Load};
use lab::median;
use lab::net::{Link, Namespace};
use lab::qemu::{Binary, Builder};
use lab::vamoose::{Server, Vamoose};
use serde::Serialize;
use serde_json::{Value, json};

use crate::interleaved;
use crate::options::Options;

/// One way to move the guest.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    /// For `--only` and the tables.
    pub(crate) name: &'static str,
    method: &'static str,
    between: Between,
    link: Speed,
}

/// How fast the link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Speed {
    M10,
    M100,
    G1,
    Open,
}

/// What is between the QEMUs.
#[derive(Clone, Copy)]
enum Between {
    Direct,
    Relay,
    Relays,
    Migrate,
}

/// How one migration went; times in milliseconds.
#[derive(Clone, Copy, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Pause {
    /// From STOP at the source to RESUME at the destination.
    pub(crate) downtime: f64,
    /// What the source QEMU says it was.
    pub(crate) downtime_reported: f64,
    /// What the source QEMU last expected it to be.
    pub(crate) downtime_expected: f64,
    /// What `vamoose migrate` says it was.
    pub(crate) downtime_vamoose: Option<f64>,
    /// Of the whole migration.
    pub(crate) total_time: f64,
    /// Rounds over the guest's memory.
    pub(crate) dirty_sync_count: f64,
    /// Bytes over the link, headers included.
    pub(crate) link_bytes: f64,
}

pub(crate) type Measured = crate::Measured<Case, Pause>;

impl Speed {
    const ALL: [Self; 4] = [Self::M10, Self::M100, Self::G1, Self::Open];

    /// Bits per second, if anything but the CPU is the limit.
    fn rate(self) -> Option<u64> {
        match self {
            Self::M10 => Some(10_000_000),
            Self::M100 => Some(100_000_000),
            Self::G1 => Some(1_000_000_000),
            Self::Open => None,
        }
    }

    /// The guest's memory, in bytes.
    fn ram(self) -> u64 {
        match self {
            Self::M10 => 128 << 20,
            Self::M100 => 256 << 20,
            Self::G1 | Self::Open => 512 << 20,
        }
    }

    /// What the guest does. Its hot part is more than the link carries within the downtime limit, so that the limit decides when
    /// the source stops it: whatever falsifies the source's idea of its bandwidth shows.
    fn load(self, options: &Options) -> Load {
        let (fill, hot, rate) = match self {
            Self::M10 => (16, 8, 120),
            Self::M100 => (64, 24, 1200),
            Self::G1 | Self::Open => (300, 64, options.dirty_rate),
        };
        Load { fill, hot, rate }
    }
}

/// Milliseconds.
const DOWNTIME_LIMIT: u64 = 300;

const CHANNELS: u8 = 2;
const LIMIT: Duration = Duration::from_secs(300);

/// The cases that are wanted; those of a link of 10 Mbit/s, which take minutes each, only by their name.
pub(crate) fn cases(options: &Options) -> Vec<Case> {
    let case = |link, name, between, method| Case {
        name,
        method,
        between,
        link,
    };
    let (direct, relay) = (Between::Direct, Between::Relay);
    let (relays, migrate) = (Between::Relays, Between::Migrate);
    let all = [
        case(Speed::M10, "downtime-10M/direct-none", direct, "none"),
        case(Speed::M10, "downtime-10M/migrate-none", migrate, "none"),
        case(Speed::M10, "downtime-10M/direct-zstd", direct, "zstd"),
        case(Speed::M10, "downtime-10M/relay-zstd", relay, "zstd"),
        case(Speed::M10, "downtime-10M/relays-zstd", relays, "zstd"),
        case(Speed::M10, "downtime-10M/migrate-zstd", migrate, "zstd"),
        case(Speed::M10, "downtime-10M/relays-auto", relays, "auto"),
        case(Speed::M10, "downtime-10M/migrate-auto", migrate, "auto"),
        case(Speed::M100, "downtime-100M/direct-none", direct, "none"),
        case(Speed::M100, "downtime-100M/relays-none", relays, "none"),
        case(Speed::M100, "downtime-100M/migrate-none", migrate, "none"),
        case(Speed::M100, "downtime-100M/direct-zstd", direct, "zstd"),
        case(Speed::M100, "downtime-100M/relay-zstd", relay, "zstd"),
        case(Speed::M100, "downtime-100M/relays-zstd", relays, "zstd"),
        case(Speed::M100, "downtime-100M/migrate-zstd", migrate, "zstd"),
        case(Speed::M100, "downtime-100M/relays-auto", relays, "auto"),
        case(Speed::M100, "downtime-100M/migrate-auto", migrate, "auto"),
        case(Speed::G1, "downtime/direct-none", direct, "none"),
        case(Speed::G1, "downtime/relays-none", relays, "none"),
        case(Speed::G1, "downtime/migrate-none", migrate, "none"),
        case(Speed::G1, "downtime/direct-zstd", direct, "zstd"),
        case(Speed::G1, "downtime/relay-zstd", relay, "zstd"),
        case(Speed::G1, "downtime/relays-zstd", relays, "zstd"),
        case(Speed::G1, "downtime/migrate-zstd", migrate, "zstd"),
        case(Speed::G1, "downtime/relays-auto", relays, "auto"),
        case(Speed::G1, "downtime/migrate-auto", migrate, "auto"),
        case(Speed::Open, "downtime-open/direct-none", direct, "none"),
        case(Speed::Open, "downtime-open/relays-none", relays, "none"),
        case(Speed::Open, "downtime-open/migrate-none", migrate, "none"),
        case(Speed::Open, "downtime-open/relays-zstd", relays, "zstd"),
        case(Speed::Open, "downtime-open/migrate-auto", migrate, "auto"),
    ];
    let is_wanted =
        |case: &Case| options.wants(case.name) && (case.link != Speed::M10 || options.is_choosy());
    all.into_iter().filter(is_wanted).collect()
}

/// More than for guests that do not run: a downtime depends on when in its round the source QEMU finds that little enough is
/// left, and one round over memory more or less is 50 ms.
pub(crate) fn rounds(options: &Options) -> usize {
    2 * options.runs.get() + 1
}

/// Measures the cases.
pub(crate) fn measure(
    cases: Vec<Case>,
    options: &Options,
    qemu: &Binary,
    vamoose: &Path,
) -> Result<Vec<Measured>> {
    let mut measured = Vec::new();
    for link in Speed::ALL {
        let of_link = |case: &&Case| case.link == link;
        let cases: Vec<_> = cases.iter().filter(of_link).copied().collect();
        if cases.is_empty() {
            continue;
        }
        let mut lab = Lab::new(qemu, link, options, vamoose)?;
        measured.extend(interleaved(
            cases,
            rounds(options),
            |case| case.name,
            |case| lab.run(case),
        )?);
    }
    Ok(measured)
}

/// Two hosts and the guest, wherever it is.
struct Lab<'a> {
    // Before the link: what runs on it ends first.
    guest: Option<Guest>,
    machine: Builder,
    vamoose: &'a Path,
    at_second: bool,
    link: Link,
    _image: Image,
}

impl<'a> Lab<'a> {
    fn new(qemu: &Binary, speed: Speed, options: &Options, vamoose: &'a Path) -> Result<Self> {
        let link = Link::new(speed.rate())?;
        let image = Image::build(16)?;
        let machine = image.machine(qemu, speed.ram(), &speed.load(options));
        let machine = machine.preallocate();
        let guest = Guest::start(&machine.clone().namespace(link.source.name()))?;
        guest.wait_ready(LIMIT)?;
        Ok(Self {
            guest: Some(guest),
            machine,
            vamoose,
            at_second: false,
            link,
            _image: image,
        })
    }

    fn run(&mut self, case: &Case) -> Result<Pause> {
        let mut source = self.guest.take().context("the guest is lost")?;
        let (here, there) = if self.at_second {
            (&self.link.destination, &self.link.source)
        } else {
            (&self.link.source, &self.link.destination)
        };
        let incoming = self.machine.clone().incoming().namespace(there.name());
        let mut destination = Guest::start(&incoming)?;
        let ends = Ends {
            source: &mut source,
            destination: &mut destination,
            here,
            there,
            vamoose: self.vamoose,
        };
        let pause = ends.migrate(case)?;
        // It has survived, and settles down for the next time.
        destination.wait_rounds(1, LIMIT)?;
        destination.log().check()?;
        self.guest = Some(destination);
        self.at_second = !self.at_second;
        Ok(pause)
    }
}

/// One migration's two ends.
struct Ends<'a> {
    source: &'a mut Guest,
    destination: &'a mut Guest,
    here: &'a Namespace,
    there: &'a Namespace,
    vamoose: &'a Path,
}

impl Ends<'_> {
    fn migrate(mut self, case: &Case) -> Result<Pause> {
        let sent_before = self.here.traffic()?.sent;
        self.source.qemu.qmp.take_events();
        let helpers = match case.between {
            Between::Direct => self.direct(case.method)?,
            Between::Relay => self.relay(case.method)?,
            Between::Relays => self.relays(case.method)?,
            Between::Migrate => self.commands(case.method)?,
        };
        let mut pause = self.watch().with_context(|| helpers.said())?;
        pause.downtime_vamoose = helpers.finish()?;
        pause.link_bytes = (self.here.traffic()?.sent - sent_before) as f64;
        Ok(pause)
    }

    fn direct(&mut self, method: &str) -> Result<Helpers> {
        self.set_up_both(method)?;
        let address = self.there.address();
        let destination = &mut self.destination.qemu.qmp;
        destination.migrate_incoming(&format!("tcp:{address}:0"))?;
        let port = destination.incoming_port()?;
        let source = &mut self.source.qemu.qmp;
        source.migrate(&format!("tcp:{address}:{port}"))?;
        Ok(Helpers::default())
    }

    fn relay(&mut self, method: &str) -> Result<Helpers> {
        self.set_up_both("none")?;
        let destination = &mut self.destination.qemu.qmp;
        destination.set_parameters(json!({ "multifd-compression": method }))?;
        let address = self.there.address();
        destination.migrate_incoming(&format!("tcp:{address}:0"))?;
        let port = destination.incoming_port()?;
        let (near, address) = {
            let listen = format!("unix:{}", self.source.qemu.socket("out").display());
            let mut command = self.here.command(self.vamoose);
            command.args(["relay", "--method", method, "--listen", &listen]);
            let to = format!("tcp:{address}:{port}");
            listening(command.args(["--connect", &to]), "listening on ")?
        };
        self.source.qemu.qmp.migrate(&address)?;
        Ok(Helpers {
            ending: vec![near],
            ..Helpers::default()
        })
    }

    fn relays(&mut self, method: &str) -> Result<Helpers> {
        self.set_up_both("none")?;
        let inside = format!("unix:{}", self.destination.qemu.socket("in").display());
        self.destination.qemu.qmp.migrate_incoming(&inside)?;
        let (far, address) = {
            let listen = format!("tcp:{}:0", self.there.address());
            let mut command = self.there.command(self.vamoose);
            command.args(["relay", "--insecure", "--listen", &listen]);
            listening(command.args(["--connect", &inside]), "listening on ")?
        };
        let (near, address) = {
            let listen = format!("unix:{}", self.source.qemu.socket("out").display());
            let mut command = self.here.command(self.vamoose);
            command.args(["relay", "--method", method, "--listen", &listen]);
            listening(command.args(["--connect", &address]), "listening on ")?
        };
        self.source.qemu.qmp.migrate(&address)?;
        Ok(Helpers {
            ending: vec![near, far],
            ..Helpers::default()
        })
    }

    fn commands(&mut self, method: &str) -> Result<Helpers> {
        let server = Server::start(self.vamoose, self.there, &self.destination.qemu)?;
        let mut command = server.migrate(self.vamoose, self.here, &self.source.qemu);
        command.args(["--json", "-", "--method", method]);
        command.args(["--zero-page-detection", "multifd"]);
        command.args(["--downtime-limit", &DOWNTIME_LIMIT.to_string()]);
        command.args(["--channels", &CHANNELS.to_string()]);
        let migration = Vamoose::start(&mut command)?;
        Ok(Helpers {
            ending: vec![migration],
            server: Some(server),
        })
    }

    /// What `vamoose migrate` does by itself.
    fn set_up_both(&mut self, method: &str) -> Result<()> {
        for guest in [&mut *self.source, &mut *self.destination] {
            let qmp = &mut guest.qemu.qmp;
            qmp.use_multifd(CHANNELS)?;
            // Both ends are stock QEMUs of one version, so all cases may find zero pages in the same way.
            qmp.set_parameters(json!({
                "multifd-compression": method,
                "multifd-zstd-level": 1,
                "downtime-limit": DOWNTIME_LIMIT,
                "zero-page-detection": "multifd",
            }))?;
        }
        Ok(())
    }

    /// Waits for the end and puts together what both QEMUs say.
    fn watch(&mut self) -> Result<Pause> {
        let deadline = Instant::now() + LIMIT;
        let source = &mut self.source.qemu.qmp;
        let mut expected = 0.0;
        let account = loop {
            let account = source.query_migrate()?;
            if let Some(now) = account["expected-downtime"].as_f64() {
                expected = now;
            }
            match account["status"].as_str() {
                // Without a downtime it is the one that the guest came with: the next has not begun.
                Some("completed") if account["downtime"].is_u64() => break account,
                Some("failed" | "cancelled") => bail!("the migration failed: {account}"),
                _ if Instant::now() > deadline => bail!("it takes too long: {account}"),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        let stop = source.wait_event("STOP", |_| true, LIMIT)?;
        let resume = self
            .destination
            .qemu
            .qmp
            .wait_event("RESUME", |_| true, LIMIT)?;
        let real = resume.timestamp.saturating_sub(stop.timestamp);
        let number = |value: &Value, name| {
            value
                .as_f64()
                .with_context(|| format!("the source QEMU tells no {name}: {account}"))
        };
        Ok(Pause {
            downtime: real.as_secs_f64() * 1e3,
            downtime_reported: number(&account["downtime"], "downtime")?,
            downtime_expected: expected,
            total_time: number(&account["total-time"], "total-time")?,
            dirty_sync_count: number(&account["ram"]["dirty-sync-count"], "dirty-sync-count")?,
            ..Pause::default()
        })
    }
}

/// The Vamooses of one migration.
#[derive(Default)]
struct Helpers {
    /// Those that end with it, the one that reports first.
    ending: Vec<Vamoose>,
    server: Option<Server>,
}

impl Helpers {
    fn said(&self) -> String {
        let all = self
            .ending
            .iter()
            .chain(self.server.as_ref().map(Server::process));
        let said: Vec<_> = all.map(Vamoose::stderr).collect();
        format!("vamoose says:\n{}", said.join("\n--\n"))
    }

    /// Waits for their ends; gives the downtime that one of them reports.
    fn finish(self) -> Result<Option<f64>> {
        let mut downtime = None;
        for vamoose in self.ending {
            let ended = vamoose.finish(LIMIT)?.success()?;
            if !ended.stdout.is_empty() {
                let report: Value = serde_json::from_str(&ended.stdout)?;
                downtime = downtime.or(report["downtime"].as_f64());
            }
        }
        Ok(downtime)
    }
}

/// Starts a `vamoose` that says where it listens.
pub(crate) fn listening(command: &mut Command, announcement: &str) -> Result<(Vamoose, String)> {
    let vamoose = Vamoose::start(command)?;
    let address = vamoose.wait_for(announcement, LIMIT)?;
    Ok((vamoose, address))
}

impl Measured {
    /// The medians of its rounds.
    pub(crate) fn pause(&self) -> Pause {
        let rounds = &self.rounds;
        let of = |field: fn(&Pause) -> f64| median(rounds.iter().map(field)).unwrap_or(f64::NAN);
        Pause {
            downtime: of(|pause| pause.downtime),
            downtime_reported: of(|pause| pause.downtime_reported),
            downtime_expected: of(|pause| pause.downtime_expected),
            downtime_vamoose: median(rounds.iter().filter_map(|pause| pause.downtime_vamoose)),
            total_time: of(|pause| pause.total_time),
            dirty_sync_count: of(|pause| pause.dirty_sync_count),
            link_bytes: of(|pause| pause.link_bytes),
        }
    }
}
