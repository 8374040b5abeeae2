//! What was measured: a line of JSON for each migration, in `results.jsonl`, and the machine in `machine.json` beside it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::scenario::{Contender, Guest, Rate};

/// What is compared: everything that a migration's figures depend on, but the round.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Cell {
    /// Of which scenario it is a part.
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
    /// What went on meanwhile.
    #[serde(default)]
    pub(crate) timeline: Vec<Moment>,
    /// What the guest's clients noticed.
    #[serde(default)]
    pub(crate) service: Option<Services>,
}

/// How it ended. A migration that failed, or whose memory was not what it was, is an error of the whole run instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    /// The whole RAM of both ends was compared, and is equal.
    Equal,
    /// The guest, which runs on, has checked its memory, and it is right.
    Checked,
    /// A real program went on in the guest, and its clients had no wrong answer.
    Served,
    /// It was cancelled, as it took too long; the guest runs at the source.
    Cancelled,
    /// No migration: bytes that went through sockets.
    Bytes,
}

/// What it took. Absent is what cannot be known of this contender.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Figures {
    pub(crate) seconds: f64,
    /// From the guest's stop to its start at the destination, both by one clock, in milliseconds; only of guests that run.
    pub(crate) downtime: Option<f64>,
    /// When the guest stopped, in milliseconds since the beginning.
    pub(crate) stopped: Option<f64>,
    /// What the source QEMU reports, in milliseconds.
    pub(crate) downtime_reported: Option<f64>,
    /// What Vamoose says that it consists of, in milliseconds.
    pub(crate) downtime_parts: BTreeMap<String, f64>,
    /// Rounds over memory.
    pub(crate) rounds: Option<u64>,
    /// Bytes between the hosts, as the sender counts them.
    pub(crate) wire_bytes: Option<u64>,
    /// Bytes over the link, headers of TCP and IP included.
    pub(crate) link_bytes: Option<u64>,
    /// Pages that were not zero, and zero pages.
    pub(crate) normal_pages: Option<u64>,
    pub(crate) zero_pages: Option<u64>,
    pub(crate) cpu: Cpu,
    /// The most memory of Vamoose, in bytes.
    pub(crate) peak_sender: Option<u64>,
    pub(crate) peak_receiver: Option<u64>,
    /// The most by which auto-converge throttled the guest, in percent.
    pub(crate) throttle: Option<u64>,
    /// MiB of memory that the guest changed in a second, before.
    pub(crate) dirty_rate: Option<u64>,
}

/// CPU seconds, user and system, without those of a guest that runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Cpu {
    /// The source QEMU.
    pub(crate) source: f64,
    /// Vamoose beside it.
    pub(crate) sender: f64,
    /// Vamoose beside the destination QEMU.
    pub(crate) receiver: f64,
    /// The destination QEMU.
    pub(crate) destination: f64,
}

/// What a look at a migration that is under way has shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Moment {
    /// Since the beginning.
    pub(crate) milliseconds: u64,
    /// So far, over the link or, where that is not known, as the sender counts them.
    pub(crate) sent_bytes: u64,
    /// Guest memory that is still to be sent, as the source QEMU sees it.
    pub(crate) remaining_bytes: u64,
    /// Rounds over memory so far.
    pub(crate) rounds: u64,
    /// Pages a second that the guest changes, as the source QEMU has counted them.
    pub(crate) dirty_pages_rate: u64,
}

/// How the guest served its clients: before the migration, and until shortly after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Services {
    /// What is counted, such as `requests`.
    pub(crate) unit: String,
    pub(crate) before: Service,
    pub(crate) during: Service,
    /// When they were answered, in milliseconds since the migration began (before it: negative), and the latency.
    #[serde(default)]
    pub(crate) latencies: Vec<Latency>,
}

/// Over a while.
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

/// Answers within some milliseconds: the longest latency of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Latency {
    pub(crate) at: i64,
    pub(crate) milliseconds: f64,
}

/// What was measured on. Results of another machine, or another program, are not continued.
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
    /// What fills memory where a scenario says `silesia`.
    pub(crate) corpus: String,
    /// The command that was given.
    pub(crate) command: String,
    /// `YYYY-MM-DD`, of the first migration.
    pub(crate) date: String,
    /// Load average when it began.
    pub(crate) load: String,
}

impl Cpu {
    /// Of the source's host.
    pub(crate) fn sending(&self) -> f64 {
        self.source + self.sender
    }

    /// Of the destination's host.
    pub(crate) fn receiving(&self) -> f64 {
        self.receiver + self.destination
    }

    pub(crate) fn total(&self) -> f64 {
        self.sending() + self.receiving()
    }
}

impl Outcome {
    /// Whether the guest is at the destination.
    pub(crate) fn is_moved(self) -> bool {
        !matches!(self, Self::Cancelled)
    }
}
