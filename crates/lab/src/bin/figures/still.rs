//! A guest that does not run: what it costs in CPU time, bytes and memory to move its whole RAM.
//!
//! ```text
//!  direct        source QEMU ───────────────────────tcp──────────────────────> destination QEMU
//!  relay         source QEMU ──unix──> relay A ──────tcp─────────────────────> destination QEMU
//!  pair          source QEMU ──unix──> relay A ──────tcp──────> relay B ─unix─> destination QEMU
//!  placed        the same, and relay B writes the pages into the memory of the destination QEMU
//!  live          vamoose-demo, source ───────────────tcp──────> vamoose-demo, destination; plain, or over a session
//!  sockets       iperf3, client ─────────────────────tcp──────> iperf3, server: what the kernel takes for as many bytes
//! ```
//!
//! Both QEMUs have touched all their memory before: the source as a guest that has run for a while, the destination as
//! any that is meant to take a guest fast. After each migration the whole RAM of both is compared.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use lab::cpu::Meter;
use lab::median;
use lab::proc;
use lab::process::Child;
use lab::qemu::{Binary, Builder, Qemu};
use lab::ram::{self, Fill};
use lab::vamoose::Vamoose;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::interleaved;
use crate::options::{Corpus, Options};

/// One way to move the guest.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    /// For `--only` and the tables.
    pub(crate) name: &'static str,
    /// Between QEMUs, or between Vamoose and who decodes.
    pub(crate) method: &'static str,
    /// Level of the method, where Vamoose encodes.
    level: u32,
    /// Data channels, all the way.
    pub(crate) channels: u8,
    /// Bytes of RAM.
    pub(crate) ram: u64,
    between: Between,
    content: Content,
}

/// What is between the QEMUs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Between {
    Direct,
    Relay,
    Pair,
    Placed,
    /// No QEMU: the crate `live` on both sides, over plain connections as QEMUs have them.
    Live,
    /// The same over a session, which checks and keeps what it sends, without TLS.
    LiveSession,
    /// No migration: bytes through as many sockets.
    Sockets,
}

/// What is in the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    /// The files of the corpus.
    Corpus,
    /// Zeros that were written.
    Zeros,
    /// Nothing: it was never touched, neither here nor there.
    Untouched,
}

/// What one migration cost.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cost {
    /// CPU seconds of the source QEMU.
    pub(crate) source: f64,
    /// CPU seconds of the relay beside it.
    pub(crate) relay_a: Option<f64>,
    /// CPU seconds of the relay beside the destination.
    pub(crate) relay_b: Option<f64>,
    /// CPU seconds of the destination QEMU.
    pub(crate) destination: f64,
    /// Seconds, as the source QEMU counts them.
    pub(crate) time: f64,
    /// Bytes between the hosts.
    pub(crate) wire: f64,
    /// The most memory that relay A had, in bytes.
    pub(crate) peak_a: Option<f64>,
    /// The most memory that relay B had, in bytes.
    pub(crate) peak_b: Option<f64>,
}

pub(crate) type Measured = crate::Measured<Case, Cost>;

/// Channels where the case's name does not say otherwise.
const CHANNELS: u8 = 2;

/// The same content in all cases.
const SEED: u64 = 1;

const SMALL: u64 = 256 << 20;
const LIMIT: Duration = Duration::from_secs(600);

/// The cases that are wanted.
pub(crate) fn cases(options: &Options) -> Vec<Case> {
    let case = |name, between, method| Case {
        name,
        method,
        level: 1,
        channels: CHANNELS,
        ram: options.ram,
        between,
        content: Content::Corpus,
    };
    let of = |content, case| Case { content, ..case };
    let all = [
        case("cpu/direct-none", Between::Direct, "none"),
        case("cpu/relay-none", Between::Relay, "none"),
        case("cpu/direct-zstd", Between::Direct, "zstd"),
        case("cpu/relay-zstd", Between::Relay, "zstd"),
        case("cpu/pair-zstd", Between::Pair, "zstd"),
        case("cpu/pair-lz4", Between::Pair, "lz4"),
        Case {
            level: 8,
            ..case("cpu/pair-lz4-8", Between::Pair, "lz4")
        },
        case("cpu/pair-qpl", Between::Pair, "qpl"),
        case("cpu/pair-qatzip", Between::Pair, "qatzip"),
        case("cpu/direct-zlib", Between::Direct, "zlib"),
        case("cpu/relay-zlib", Between::Relay, "zlib"),
        Case {
            ram: SMALL,
            ..case("memory/small-pair-zstd", Between::Pair, "zstd")
        },
        Case {
            ram: SMALL,
            channels: 16,
            ..case("memory/small-pair-zstd-16ch", Between::Pair, "zstd")
        },
        Case {
            channels: 16,
            ..case("memory/pair-zstd-16ch", Between::Pair, "zstd")
        },
        case("placement/sent-none", Between::Pair, "none"),
        case("placement/placed-none", Between::Placed, "none"),
        case("placement/sent-lz4", Between::Pair, "lz4"),
        case("placement/placed-lz4", Between::Placed, "lz4"),
        case("placement/sent-zstd", Between::Pair, "zstd"),
        case("placement/placed-zstd", Between::Placed, "zstd"),
        of(
            Content::Zeros,
            case("placement/sent-zeros", Between::Pair, "none"),
        ),
        of(
            Content::Zeros,
            case("placement/placed-zeros", Between::Placed, "none"),
        ),
        case("live/sockets", Between::Sockets, "none"),
        case("live/qemu-none", Between::Direct, "none"),
        case("live/none", Between::Live, "none"),
        case("live/session-none", Between::LiveSession, "none"),
        case("live/qemu-zstd", Between::Direct, "zstd"),
        case("live/zstd", Between::Live, "zstd"),
        case("live/qemu-zlib", Between::Direct, "zlib"),
        case("live/zlib", Between::Live, "zlib"),
        of(
            Content::Zeros,
            case("live/qemu-zeros", Between::Direct, "none"),
        ),
        of(Content::Zeros, case("live/zeros", Between::Live, "none")),
        of(
            Content::Untouched,
            case("live/qemu-untouched", Between::Direct, "none"),
        ),
        of(
            Content::Untouched,
            case("live/untouched", Between::Live, "none"),
        ),
    ];
    all.into_iter()
        .filter(|case| options.wants(case.name))
        .collect()
}

/// Refuses to begin what would fail for want of a program.
pub(crate) fn check(cases: &[Case]) -> Result<()> {
    let Some(case) = cases.iter().find(|case| case.between == Between::Sockets) else {
        return Ok(());
    };
    let found = Command::new("iperf3").arg("--version").output();
    found.map(drop).with_context(|| {
        format!(
            "case {} needs iperf3: install the package iperf3, or choose other cases with --only; nothing was measured",
            case.name
        )
    })
}

/// Measures the cases.
pub(crate) fn measure(
    cases: Vec<Case>,
    options: &Options,
    qemu: &Binary,
    corpus: &Corpus,
    vamoose: &Path,
    demo: &Path,
) -> Result<Vec<Measured>> {
    let corpus = Fill::Files(corpus.files.clone());
    let run = |case: &Case| match case.between {
        Between::Live => case.run_live(&corpus, demo, "--plain"),
        Between::LiveSession => case.run_live(&corpus, demo, "--insecure"),
        Between::Sockets => case.run_sockets(),
        Between::Direct | Between::Relay | Between::Pair | Between::Placed => {
            case.run(qemu, &corpus, vamoose)
        }
    };
    interleaved(cases, options.runs.get(), |case| case.name, run)
}

impl Cost {
    /// CPU seconds on the source's host.
    pub(crate) fn source_side(&self) -> f64 {
        self.source + self.relay_a.unwrap_or(0.0)
    }

    /// CPU seconds of all processes.
    pub(crate) fn total(&self) -> f64 {
        self.source_side() + self.relay_b.unwrap_or(0.0) + self.destination
    }
}

impl Case {
    fn run(&self, qemu: &Binary, corpus: &Fill, vamoose: &Path) -> Result<Cost> {
        let mut bare = Builder::bare(qemu, self.ram);
        if self.content != Content::Untouched {
            bare = bare.preallocate();
        }
        let mut destination = bare.clone().incoming().start()?;
        if self.content == Content::Corpus {
            bare = bare.content(corpus.clone(), SEED);
        }
        let mut source = bare.start()?;

        // What the QEMUs encode and decode themselves.
        let (encoded, decoded) = match self.between {
            Between::Direct => (self.method, self.method),
            Between::Pair | Between::Placed => ("none", "none"),
            _ => ("none", self.method),
        };
        set_up(&mut source, self.channels, encoded)?;
        set_up(&mut destination, self.channels, decoded)?;
        let relays = self.relays(&source, &mut destination, vamoose)?;

        let meter = Meter::start(&[source.pid(), destination.pid()])?;
        source.qmp.migrate(&relays.address)?;
        let account = source
            .qmp
            .wait_migration(&["completed"], LIMIT)
            .and_then(|account| {
                destination.qmp.wait_migration(&["completed"], LIMIT)?;
                Ok(account)
            })
            .with_context(|| relays.said())?;
        let cpu = meter.read()?;
        let near = relays.near.map(Watched::finish).transpose()?;
        let far = relays.far.map(Watched::finish).transpose()?;
        ram::compare(source.ram(), destination.ram())
            .map_err(|mismatch| anyhow!("the memory is not what it was: {mismatch}"))?;

        let wire = match &near {
            Some(near) => near.report["wire-bytes"].as_f64(),
            None => account["ram"]["transferred"].as_f64(),
        };
        Ok(Cost {
            source: cpu[0],
            relay_a: near.as_ref().map(|relay| relay.cpu),
            relay_b: far.as_ref().map(|relay| relay.cpu),
            destination: cpu[1],
            time: account["total-time"].as_f64().context("no total-time")? / 1000.0,
            wire: wire.context("the bytes were not counted")?,
            peak_a: near.as_ref().map(|relay| relay.peak),
            peak_b: far.as_ref().map(|relay| relay.peak),
        })
    }

    /// A guest of the crate `live`, with the same bytes in its memory, which it hardly writes.
    fn run_live(&self, corpus: &Fill, demo: &Path, link: &str) -> Result<Cost> {
        let folder = TempDir::new_in("/dev/shm").context("a folder for the memory image")?;
        let image = folder.path().join("ram");
        let fill = match self.content {
            Content::Corpus => {
                ram::write(&image, self.ram, corpus, SEED)?;
                image.as_os_str()
            }
            Content::Zeros => OsStr::new("zero"),
            Content::Untouched => OsStr::new("untouched"),
        };
        let mut command = Command::new(demo);
        command
            .args(["--guest", "threads", "--rate", "1", "--json", "-"])
            .arg(link)
            .args(["--method", self.method, "--ram", &self.ram.to_string()])
            .args(["--channels", &self.channels.to_string()])
            .arg("--fill")
            .arg(fill);
        if self.method != "none" {
            command.args(["--level", &self.level.to_string()]);
        }
        if self.content != Content::Untouched {
            command.arg("--prealloc");
        }
        let ended = Vamoose::start(&mut command)?.finish(LIMIT)?.success()?;
        let report: Value = serde_json::from_str(&ended.stdout).context("vamoose-demo's report")?;
        ensure!(
            report["memory-equal"] == true,
            "the memory is not what it was: {report}"
        );
        let number = |value: &Value| {
            let number = value.as_f64();
            number.with_context(|| format!("missing in {report}"))
        };
        Ok(Cost {
            source: number(&report["cpu-seconds"]["source"])?,
            destination: number(&report["cpu-seconds"]["destination"])?,
            time: number(&report["total-time"])? / 1000.0,
            wire: number(&report["wire-bytes"])?,
            ..Cost::default()
        })
    }

    /// As many bytes as the guest has, from nowhere to nowhere.
    fn run_sockets(&self) -> Result<Cost> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let iperf3 = || {
            let mut command = Command::new("iperf3");
            command.args(["--port", &port.to_string()]);
            command
        };
        let mut command = iperf3();
        command.args(["--server", "--one-off", "--forceflush"]);
        let mut server = Child::start(command.stdout(Stdio::piped()))?;
        let said = server.pipes.stdout.take();
        let mut said = BufReader::new(said.context("its output is a pipe")?).lines();
        let listens = |line: &io::Result<String>| {
            line.as_ref()
                .map_or(true, |line| line.contains("listening"))
        };
        said.find(listens)
            .context("the iperf3 server has ended")??;
        // What it says besides is of no interest, but has to go somewhere.
        let rest = thread::spawn(move || said.count());
        let (bytes, channels) = (self.ram.to_string(), self.channels.to_string());
        let mut command = iperf3();
        command.args(["--client", "127.0.0.1", "--bytes", &bytes]);
        command
            .args(["--parallel", &channels])
            .stdout(Stdio::null());
        let (status, source) = Child::start(&mut command)?.finish(LIMIT)?;
        ensure!(status.success(), "iperf3 failed: {status}");
        let (_, destination) = server.finish(LIMIT)?;
        ensure!(rest.join().is_ok(), "iperf3's output could not be read");
        Ok(Cost {
            source,
            destination,
            time: f64::NAN,
            wire: self.ram as f64,
            ..Cost::default()
        })
    }

    /// Starts what is between the QEMUs, from the destination on.
    fn relays(&self, source: &Qemu, destination: &mut Qemu, vamoose: &Path) -> Result<Relays> {
        let mut relays = Relays {
            near: None,
            far: None,
            address: String::new(),
        };
        if matches!(self.between, Between::Pair | Between::Placed) {
            let inside = format!("unix:{}", destination.socket("in").display());
            destination.qmp.migrate_incoming(&inside)?;
            let qmp = destination.qmp_socket();
            let qmp = qmp.to_str().context("a path in another encoding")?;
            let placement: &[_] = match self.between {
                Between::Placed => &["--qmp", qmp, "--placement", "on"],
                _ => &[],
            };
            let (far, address) = Watched::start(vamoose, "tcp:127.0.0.1:0", &inside, placement)?;
            relays.far = Some(far);
            relays.address = address;
        } else {
            destination.qmp.migrate_incoming("tcp:127.0.0.1:0")?;
            relays.address = format!("tcp:127.0.0.1:{}", destination.qmp.incoming_port()?);
        }
        if !matches!(self.between, Between::Direct) {
            let listen = format!("unix:{}", source.socket("out").display());
            let level = self.level.to_string();
            let mut options = vec!["--method", self.method];
            if self.method != "none" {
                options.extend(["--level", &level]);
            }
            let (near, address) = Watched::start(vamoose, &listen, &relays.address, &options)?;
            relays.near = Some(near);
            relays.address = address;
        }
        Ok(relays)
    }
}

fn set_up(qemu: &mut Qemu, channels: u8, method: &str) -> Result<()> {
    qemu.qmp.use_multifd(channels)?;
    qemu.qmp.set_parameters(json!({
        "multifd-compression": method,
        "multifd-zlib-level": 1,
        "multifd-zstd-level": 1,
    }))
}

struct Relays {
    near: Option<Watched>,
    far: Option<Watched>,
    /// Where the source is to migrate to.
    address: String,
}

impl Relays {
    fn said(&self) -> String {
        let relays = self.near.iter().chain(&self.far);
        let said = relays.map(|relay| relay.vamoose.stderr());
        format!("relays:\n{}", said.collect::<Vec<_>>().join("\n--\n"))
    }
}

/// A relay whose memory is looked at all the time: afterwards it is too late.
struct Watched {
    vamoose: Vamoose,
    peak: JoinHandle<u64>,
}

struct EndedRelay {
    cpu: f64,
    peak: f64,
    report: Value,
}

impl Watched {
    fn start(
        vamoose: &Path,
        listen: &str,
        connect: &str,
        options: &[&str],
    ) -> Result<(Self, String)> {
        let options = [options, &["--json", "-"]].concat();
        let (vamoose, address) = Vamoose::relay(vamoose, listen, connect, &options)?;
        let pid = vamoose.pid();
        let peak = thread::spawn(move || {
            let mut peak = 0;
            // Ends with the process: a zombie has no memory.
            while let Ok(memory) = proc::memory(pid) {
                peak = memory.peak;
                thread::sleep(Duration::from_millis(5));
            }
            peak
        });
        Ok((Self { vamoose, peak }, address))
    }

    fn finish(self) -> Result<EndedRelay> {
        let ended = self.vamoose.finish(LIMIT)?.success()?;
        let peak = self.peak.join();
        let peak = peak.map_err(|_| anyhow!("who watched the relay's memory failed"))?;
        Ok(EndedRelay {
            cpu: ended.cpu_seconds,
            peak: peak as f64,
            report: serde_json::from_str(&ended.stdout).context("the relay's report")?,
        })
    }
}

impl Measured {
    /// The medians of its rounds.
    pub(crate) fn cost(&self) -> Cost {
        let rounds = &self.rounds;
        let of = |field: fn(&Cost) -> f64| median(rounds.iter().map(field)).unwrap_or(f64::NAN);
        let maybe = |field: fn(&Cost) -> Option<f64>| median(rounds.iter().filter_map(field));
        // Of memory the worst counts.
        let most = |field: fn(&Cost) -> Option<f64>| {
            let values = rounds.iter().filter_map(field);
            values.reduce(f64::max)
        };
        Cost {
            source: of(|cost| cost.source),
            relay_a: maybe(|cost| cost.relay_a),
            relay_b: maybe(|cost| cost.relay_b),
            destination: of(|cost| cost.destination),
            time: of(|cost| cost.time),
            wire: of(|cost| cost.wire),
            peak_a: most(|cost| cost.peak_a),
            peak_b: most(|cost| cost.peak_b),
        }
    }
}
