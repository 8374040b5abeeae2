//! The devices behind simple calls: which of these pages are zero, compress these, decompress these, copy this.
//!
//! ```text
//!  caller ── start ──> [ZeroScanner] ── a batch from the last page on ──> Devices ── round robin ──> Queue
//!    │  encodes the                                                                                    │
//!    │  previous batch                                                                                 ▼
//!    └── finish ─────> verdicts <── records, as far as they are there; the processor does the rest <── device
//! ```
//! Whatever devices do, every page is done once and right: what is refused, fails, faults or comes too late the
//! processor does, by a closure of the caller's. No call waits for a device for longer than about what the processor
//! would take to do the work, but where a device may still write to the caller's memory ([`Copier`]). There is no
//! thread that polls: the caller that needs a result looks for it, and works meanwhile. A work queue that refuses, or whose
//! answers come too late, is left alone, and tried now and then.

mod backoff;
mod compress;
mod copy;
mod decompress;
mod devices;
mod near;
mod open;

mod zero;

pub use compress::{ByProcessor, Compressor, Tables};
pub use copy::{Copier, Move};
pub use decompress::Decompressor;
pub use devices::{Devices, OffloadCounters};
pub use open::{Choice, DevicesError, Options};
pub use zero::{Batch, WrongVerdict, ZeroScanner};
