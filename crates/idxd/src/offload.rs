//! Page operations on devices: find zero pages, compress, decompress.
//!
//! ```text
//!  caller ── start ──> [ZeroScanner] ── a batch from the last page on ──> Devices ── round robin ──> Queue
//!    │  encodes the                                                                                    │
//!    │  previous batch                                                                                 ▼
//!    └── finish ─────> verdicts <── records, as far as they are there; the processor does the rest <── device
//! ```
//! Every page is processed once and correctly, whatever the devices do: the processor does what a queue rejects, and what a
//! device does not do or does too late, by a closure of the caller. No call waits for a device much longer than the
//! processor would take for the work. No thread polls: the caller works, and reads results when it needs them. A work queue that rejects submissions, or answers too
//! late, is skipped and tried again from time to time.

mod backoff;
mod compress;
mod decompress;
mod devices;
mod open;

mod zero;

pub use compress::{ByProcessor, Compressor};
pub use decompress::Decompressor;
pub use devices::{Devices, OffloadCounters};
pub use open::{Choice, DevicesError, Options};
pub use zero::{Batch, WrongVerdict, ZeroScanner};
