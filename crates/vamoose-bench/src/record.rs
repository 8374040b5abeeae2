//! Measurements: a line of JSON for each migration in `results.jsonl`, and the machine in `machine.json`.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::scenario::{Contender, Guest, Rate};

/// Everything, except the round, that the figures of a migration depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Cell {
    /// Name of the scenario.
    pub(crate) scenario: String,
    pub(crate) guest: Guest,
    pub(crate) link: Rate,
    /// Data channels.
    pub(crate) channels: u8,
    pub(crate) contender: Contender,
    /// Bytes of the guest's memory.
    pub(crate) ram: u64,
    /// Milliseconds.
    pub(crate) downtime_limit: u64,
    /// Seconds after which the migration is cancelled.
    pub(crate) timeout: u64,
}

/// One migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Record {
    pub(crate) cell: Cell,
    /// Counted from 1.
    pub(crate) round: u32,
    pub(crate) outcome: Outcome,
    pub(crate) figures: Figures,
    /// Service of the guest's clients.
    #[serde(default)]
    pub(crate) service: Option<Services>,
}

/// How a migration ended. A failed migration, or one after which the memory differs, is an error of the run instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    /// The whole RAM of both ends was compared, and is equal.
    Equal,
    /// The running guest has verified its memory.
    Checked,
    /// A real program continued to run in the guest, and gave its clients no wrong answer.
    Served,
    /// Cancelled after the timeout; the guest runs at the source.
    Cancelled,
}

/// Figures of a migration. A figure that is unknown for a contender is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Figures {
    pub(crate) seconds: f64,
    /// From the guest's stop to its start at the destination, by one clock, in milliseconds. Running guests only.
    pub(crate) downtime: Option<f64>,
    /// When the guest stopped, in milliseconds since the beginning.
    pub(crate) stopped: Option<f64>,
    /// Downtime that the source QEMU reports, in milliseconds.
    pub(crate) downtime_reported: Option<f64>,
    /// Parts of the downtime as Vamoose reports them, in milliseconds.
    pub(crate) downtime_parts: BTreeMap<String, f64>,
    /// Rounds over memory.
    pub(crate) rounds: Option<u64>,
    /// Bytes between the hosts, as the sender counts them.
    pub(crate) wire_bytes: Option<u64>,
    /// Bytes over the link, headers of TCP and IP included.
    pub(crate) link_bytes: Option<u64>,
    /// Pages sent with their content.
    pub(crate) normal_pages: Option<u64>,
    pub(crate) zero_pages: Option<u64>,
    pub(crate) cpu: Cpu,
    /// MiB that the guest changed in a second before the migration.
    pub(crate) dirty_rate: Option<u64>,
}

/// CPU seconds, user and system, without those of a running guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Cpu {
    /// The source QEMU.
    pub(crate) source: f64,
    /// Vamoose beside the source QEMU.
    pub(crate) sender: f64,
    /// Vamoose beside the destination QEMU.
    pub(crate) receiver: f64,
    /// The destination QEMU.
    pub(crate) destination: f64,
}

/// Service of the guest's clients: before the migration, and from its start until shortly after its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Services {
    pub(crate) before: Service,
    pub(crate) during: Service,
}

/// Service over a span of time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Service {
    /// Answers a second.
    pub(crate) rate: f64,
    /// Latencies, in milliseconds.
    pub(crate) p50: Option<f64>,
    pub(crate) p99: Option<f64>,
    pub(crate) longest: Option<f64>,
}

/// The machine and the programs. A run does not continue the results of another machine or program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) processors: usize,
    /// Bytes.
    pub(crate) memory: u64,
    pub(crate) kernel: String,
    pub(crate) qemu: String,
    pub(crate) vamoose: String,
    /// Files that fill memory where a scenario says `silesia`.
    pub(crate) corpus: String,
    /// Command of the user.
    pub(crate) command: String,
    /// `YYYY-MM-DD`, of the first migration.
    pub(crate) date: String,
    /// Load average at the start.
    pub(crate) load: String,
}

impl Cpu {
    pub(crate) fn total(&self) -> f64 {
        self.source + self.sender + self.receiver + self.destination
    }
}

impl Record {
    /// A record of a guest without clients.
    pub(crate) fn new(cell: &Cell, round: u32, outcome: Outcome, figures: Figures) -> Self {
        Self {
            cell: cell.clone(),
            round,
            outcome,
            figures,
            service: None,
        }
    }
}

/// For progress and errors.
impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            scenario,
            guest,
            link,
            channels,
            contender,
            ..
        } = self;
        write!(
            f,
            "{scenario}, {guest} over {link}, {channels} channels, {contender}"
        )
    }
}
