//! A guest that does not run, over links of given rates: what each way to move it takes when QEMUs, relays and the link share
//! the processors of one machine.
//!
//! ```text
//!       namespace here                                              namespace there
//!  stock    source QEMU ───────────────────────link──────────────────> destination QEMU
//!  pair     source QEMU ─unix─> vamoose relay ═══link══> vamoose relay ─unix─> destination QEMU
//!  migrate  source QEMU ─unix─> vamoose migrate ═link══> vamoose serve ─unix─> destination QEMU
//! ```
//!
//! A case is called `links/RATE/DATA/WAY`. The guest is the smaller the slower the link is, and the whole RAM of both ends is compared
//! after each migration. The two Vamooses have a session, with its checksums and without TLS.

mod criteria;
mod ways;

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use lab::cpu::Meter;
use lab::median;
use lab::net::Link;
use lab::qemu::{Binary, Builder};
use lab::ram::{self, Fill};
use serde::Serialize;

use crate::interleaved;
use crate::options::{Corpus, Options};
pub(crate) use criteria::judge;
use ways::Ends;

/// One way to move the guest.
pub(crate) struct Case {
    /// For `--only` and the tables.
    pub(crate) name: String,
    rate: Rate,
    data: Data,
    way: Way,
    /// Bytes of RAM.
    ram: u64,
}

/// What the link carries.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rate {
    /// So many bits a second.
    Constant(u64),
    /// What the kernel can.
    Open,
    /// 100 Mbit/s, then 1 Gbit/s for a while, then 100 Mbit/s again.
    Changing,
}

/// What is in the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    /// The corpus, and a tenth of zero pages.
    Corpus,
    /// The corpus, and half of the pages zero.
    HalfZero,
    Random,
}

/// Who moves it, by which method.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Stock(&'static str),
    Pair(&'static str),
    /// With the program's defaults.
    Migrate,
}

/// What one migration took.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Move {
    /// Seconds, as the source QEMU counts them.
    seconds: f64,
    /// CPU seconds of all processes.
    cpu_seconds: f64,
    /// Bytes over the link, headers included.
    link_bytes: f64,
    /// Milliseconds, as the source QEMU reports it.
    downtime: f64,
}

pub(crate) type Measured = crate::Measured<Case, Move>;

const RATES: [(&str, Rate); 6] = [
    ("10m", Rate::Constant(10_000_000)),
    ("100m", Rate::Constant(100_000_000)),
    ("1g", Rate::Constant(1_000_000_000)),
    ("10g", Rate::Constant(10_000_000_000)),
    ("open", Rate::Open),
    ("changing", Rate::Changing),
];

const WAYS: [(&str, Way); 8] = [
    ("stock-none", Way::Stock("none")),
    ("stock-zlib", Way::Stock("zlib")),
    ("stock-zstd", Way::Stock("zstd")),
    ("none", Way::Pair("none")),
    ("lz4", Way::Pair("lz4")),
    ("zstd", Way::Pair("zstd")),
    ("auto", Way::Pair("auto")),
    ("migrate", Way::Migrate),
];

const SEED: u64 = 1;
const LIMIT: Duration = Duration::from_secs(900);

/// The cases that are named. All of them take half an hour a round, so they are no part of a run without `--only`.
pub(crate) fn cases(options: &Options) -> Vec<Case> {
    let kinds = [
        (options.content_name(), Data::Corpus),
        ("half-zero", Data::HalfZero),
        ("random", Data::Random),
    ];
    let mut cases = Vec::new();
    for (rate_name, rate) in RATES {
        for (data_name, data) in kinds {
            cases.extend(WAYS.map(|(way_name, way)| Case {
                name: format!("links/{rate_name}/{data_name}/{way_name}"),
                rate,
                data,
                way,
                ram: rate.ram(options.ram),
            }));
        }
    }
    cases.retain(|case| options.names(&case.name));
    cases
}

/// Measures the cases.
pub(crate) fn measure(
    cases: Vec<Case>,
    options: &Options,
    qemu: &Binary,
    corpus: &Corpus,
    vamoose: &Path,
) -> Result<Vec<Measured>> {
    let corpus = Fill::Files(corpus.files.clone());
    interleaved(
        cases,
        options.runs.get(),
        |case| &case.name,
        |case| case.run(qemu, &corpus, vamoose),
    )
}

impl Rate {
    /// Bytes of RAM beside a large guest that has so many: seconds to half a minute for what is not encoded.
    fn ram(self, large: u64) -> u64 {
        let part = match self {
            Self::Constant(..50_000_000) => 48,
            Self::Constant(..500_000_000) => 8,
            Self::Changing => 4,
            Self::Constant(_) | Self::Open => 3,
        };
        (large / part).next_multiple_of(1 << 20)
    }

    /// What the link carries first.
    fn first(self) -> Option<u64> {
        match self {
            Self::Constant(rate) => Some(rate),
            Self::Open => None,
            Self::Changing => Some(SLOW),
        }
    }
}

/// The rates of a link that changes, and how long it keeps the first two.
const SLOW: u64 = 100_000_000;
const FAST: u64 = 1_000_000_000;
const CHANGES: [(Duration, u64); 2] = [
    (Duration::from_secs(3), FAST),
    (Duration::from_millis(1500), SLOW),
];

impl Data {
    fn fill(self, corpus: &Fill) -> Fill {
        let with_zeros = |percent| Fill::WithZeros(percent, Box::new(corpus.clone()));
        match self {
            Self::Corpus => with_zeros(10),
            Self::HalfZero => with_zeros(50),
            Self::Random => Fill::Random,
        }
    }
}

impl Case {
    fn run(&self, qemu: &Binary, corpus: &Fill, vamoose: &Path) -> Result<Move> {
        let link = Link::new(self.rate.first())?;
        let bare = Builder::bare(qemu, self.ram).preallocate();
        let incoming = bare.clone().incoming().namespace(link.destination.name());
        let mut destination = incoming.start()?;
        let bare = bare.content(self.data.fill(corpus), SEED);
        let mut source = bare.namespace(link.source.name()).start()?;

        let meter = Meter::start(&[source.pid(), destination.pid()])?;
        let sent_before = link.source.traffic()?.sent;
        let ends = Ends {
            source: &mut source,
            destination: &mut destination,
            link: &link,
            vamoose,
        };
        let helpers = ends.begin(self.way)?;
        let account = thread::scope(|scope| {
            let (over, is_over) = mpsc::channel::<()>();
            if self.rate == Rate::Changing {
                scope.spawn(|| change(&link, is_over));
            }
            let account = source.qmp.wait_migration(&["completed"], LIMIT);
            drop(over);
            account
        });
        let account = account
            .and_then(|account| {
                destination.qmp.wait_migration(&["completed"], LIMIT)?;
                Ok(account)
            })
            .with_context(|| helpers.said())?;
        let qemus: f64 = meter.read()?.iter().sum();
        let helpers = helpers.finish()?;
        let link_bytes = link.source.traffic()?.sent - sent_before;
        ram::compare(source.ram(), destination.ram())
            .map_err(|mismatch| anyhow!("the memory is not what it was: {mismatch}"))?;
        let millis = |name: &str| {
            let value = account[name].as_f64();
            value.with_context(|| format!("the source QEMU tells no {name}: {account}"))
        };
        Ok(Move {
            seconds: millis("total-time")? / 1e3,
            cpu_seconds: qemus + helpers,
            link_bytes: link_bytes as f64,
            downtime: millis("downtime")?,
        })
    }
}

/// Changes the link as time goes by, until the migration is over.
fn change(link: &Link, is_over: mpsc::Receiver<()>) {
    for (after, rate) in CHANGES {
        let timed_out = is_over.recv_timeout(after) == Err(RecvTimeoutError::Timeout);
        if !timed_out {
            return;
        }
        if let Err(error) = link.set_rate(rate) {
            eprintln!("figures: {error:#}");
        }
    }
}

/// The table's.
pub(crate) const HEADER: &str = "\n| case | seconds, median (least-most) | CPU-s | MB on the link | downtime ms |\n|---|---|---|---|---|\n";

impl Measured {
    fn median(&self, of: fn(&Move) -> f64) -> f64 {
        median(self.rounds.iter().map(of)).unwrap_or(f64::NAN)
    }

    /// A line of the table.
    pub(crate) fn row(&self) -> String {
        let seconds = self.rounds.iter().map(|one| one.seconds);
        let least = seconds.clone().fold(f64::INFINITY, f64::min);
        let most = seconds.fold(0.0, f64::max);
        format!(
            "| {} | **{:.2}** ({least:.2}-{most:.2}) | {:.1} | {:.1} | {:.0} |\n",
            self.case.name,
            self.median(|one| one.seconds),
            self.median(|one| one.cpu_seconds),
            self.median(|one| one.link_bytes) / 1e6,
            self.median(|one| one.downtime),
        )
    }
}
