//! The protocol of the demo's two processes besides the migration: lines of JSON over the destination's standard input and
//! output.
//!
//! ```text
//!  source                                            destination
//!     ── Order (the guest's shape, where to listen, ──> makes memory and guest
//!              its keys)
//!     <──────────────── the address, with its port ──
//!     ══ the migration, over the network ════════════>  the guest is loaded, but does not run yet
//!     <── Arrived (checksum, digest of all memory, CPU time)
//!     <── its writes ─────────────────────────────────  it has run, was paused and verified again
//! ```
//!
//! Each line of the destination is a `Result`; an error is the last line. When the source ends, the destination reads end of file
//! from standard input, and ends too.

use serde::{Deserialize, Serialize};
use testguest::Proof;
use vamoose::options::Hardware;
use vamoose_live::OffloadCounters;

use crate::{digest::Digest, dsa::Queues, guest::Shape, link::Link};

/// The order for the destination.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) shape: Shape,
    /// Whether the destination's memory is populated before the migration.
    pub(crate) prealloc: bool,
    /// Hardware for decoding.
    pub(crate) hardware: Hardware,
    /// Queues that copy decoded pages; `None` for the CPU.
    pub(crate) copy: Option<Queues>,
    pub(crate) listen: String,
    pub(crate) link: Link,
}

/// The guest as it arrived, before it runs.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Arrived {
    /// The guest's proof, or why the guest has none.
    pub(crate) checksum: Result<Proof, String>,
    pub(crate) digest: Digest,
    /// CPU time of the process, from before the first connection until the guest was handed over.
    pub(crate) cpu_seconds: f64,
    /// Share of the decoders in the CPU time.
    pub(crate) decode_seconds: f64,
    /// Counts of copies by devices.
    pub(crate) copy: Option<OffloadCounters>,
}
