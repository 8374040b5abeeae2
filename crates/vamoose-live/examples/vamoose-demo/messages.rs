//! The protocol of the demo's two processes besides the migration: JSON in the destination's command line, and lines of JSON on
//! its standard output.
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

use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};
use testguest::Proof;
use vamoose::options::Hardware;

use crate::{guest::Shape, link::Link};

/// The order for the destination.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) shape: Shape,
    /// Whether the destination's memory is populated before the migration.
    pub(crate) prealloc: bool,
    /// Hardware for decoding.
    pub(crate) hardware: Hardware,
    pub(crate) listen: String,
    pub(crate) link: Link,
}

/// The guest as it arrived, before it runs.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Arrived {
    /// The guest's proof, or why the guest has none.
    pub(crate) checksum: Result<Proof, String>,
    pub(crate) digest: String,
    /// CPU time of the process, from before the first connection until the guest was handed over.
    pub(crate) cpu_seconds: f64,
    /// Share of the decoders in the CPU time.
    pub(crate) decode_seconds: f64,
}

impl Arrived {
    /// Whether this is the guest that was sent, which has this `checksum`, and memory with this `digest`.
    pub(crate) fn check(&self, checksum: &Proof, digest: &str) -> Result<()> {
        match &self.checksum {
            Ok(there) => ensure!(
                there == checksum,
                "the guest that arrived ({there:?}) is not the one that was sent ({checksum:?})"
            ),
            Err(error) => bail!("the checksum does not hold: {error}"),
        }
        ensure!(self.digest == digest, "the memory is not equal");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(sum: u64) -> Proof {
        Proof {
            writes: 7,
            sums: vec![sum],
        }
    }

    #[test]
    fn each_defect_is_reported() {
        for (there, digest, told) in [
            (Ok(1), "a", None),
            (Ok(1), "b", Some("is not equal")),
            (Ok(2), "a", Some("is not the one that was sent")),
            (Err("page 3"), "a", Some("does not hold: page 3")),
        ] {
            let arrived = Arrived {
                checksum: there.map(checksum).map_err(str::to_owned),
                digest: digest.to_owned(),
                cpu_seconds: 0.0,
                decode_seconds: 0.0,
            };
            let verdict = arrived.check(&checksum(1), "a");
            let said = verdict.err().map(|error| error.to_string());
            assert_eq!(said.is_some(), told.is_some());
            assert!(said.unwrap_or_default().contains(told.unwrap_or_default()));
        }
    }
}
