//! What the demo's two processes say to each other besides the migration: lines of JSON over the destination's standard
//! input and output.
//!
//! ```text
//!  source                                            destination
//!     ── order (the guest's shape, where to listen) ──> makes memory and guest
//!     <───────────────────────── listening (address) ──
//!     ══ the migration, over the network ════════════>  the guest is loaded, and not let run yet
//!     <── arrived (checksum, digest of all memory, CPU time)
//!     <── went on (its writes) ───────────────────────  it has run, was paused and verified again
//! ```
//!
//! `failed` may come in the place of any of them, and is the last one. The end of its standard input ends the
//! destination: the source is gone.

use serde::{Deserialize, Serialize};
use testguest::Proof;
use vamoose_live::OffloadCounters;

use super::{dsa::Queues, shape::Shape};
use crate::options::Hardware;

/// What the destination is to do.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Order {
    pub(super) shape: Shape,
    /// Whether its memory is populated before the migration.
    pub(super) prealloc: bool,
    /// What may help to decode.
    pub(super) hardware: Hardware,
    /// What copies decoded pages besides the processor.
    pub(super) copy: Option<Queues>,
    pub(super) listen: String,
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub(super) enum Said {
    Listening { address: String },
    Arrived(Arrived),
    WentOn(WentOn),
    Failed { cause: String },
}

/// The guest as it came, before it has run.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arrived {
    /// What the guest proves, or why it cannot.
    pub(super) checksum: Result<Checksum, String>,
    pub(super) digest: super::digest::Digest,
    /// Of the whole process, from before the first connection until the guest was handed over.
    pub(super) cpu_seconds: f64,
    /// The decoders' part of it.
    pub(super) decode_seconds: f64,
    /// What devices have done of the copies.
    pub(super) copy: Option<OffloadCounters>,
}

/// The guest after it has run at the destination.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct WentOn {
    /// What it has written there.
    pub(super) writes: u64,
    /// Why it cannot prove its memory any more.
    pub(super) failure: Option<String>,
}

/// What a guest's memory was proven to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Checksum {
    /// Writes since it began.
    pub(super) writes: u64,
    /// Each vCPU's sum over its words.
    pub(super) sums: Vec<u64>,
}

impl From<Proof> for Checksum {
    fn from(proof: Proof) -> Self {
        Self {
            writes: proof.writes,
            sums: proof.vcpus.iter().map(|vcpu| vcpu.sum).collect(),
        }
    }
}
