//! Completion records, by which a device reports the end of an operation.
//!
//! ```text
//!        0        1        2          4                8                16                          64
//!       ┌────────┬────────┬──────────┬────────────────┬────────────────┬────────────── … ──────────┐
//!  DSA  │ status │ result │          │ bytes (or mem- │ fault address  │ flags, size, CRC: to 32    │
//!  IAA  │ status │ error  │          │ bers) completed│                │ output size, CRC …: to 64  │
//!       └────────┴────────┴──────────┴────────────────┴────────────────┴────────────── … ──────────┘
//! ```
//! Sources: DSA 3.0, 8.2; IAA 2.1, 6.2; `linux/idxd.h` (`struct dsa_completion_record`, `struct
//! iax_completion_record`).

use std::sync::atomic::{AtomicU64, Ordering};

/// Memory for one completion record of either kind of device. The device writes it concurrently, in one aligned write, so
/// the program reads it as atomics, status first.
///
/// DSA writes 32 of the 64 bytes. The size gives each record a cache line of its own.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Record {
    words: [AtomicU64; 8],
}

const _: () = assert!(size_of::<Record>() == 64 && align_of::<Record>() == 64);

impl Record {
    /// Address for a descriptor.
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }

    /// Clears the status before a submission.
    pub fn clear(&self) {
        self.words[0].store(0, Ordering::Relaxed);
    }

    /// Byte 0: zero until the device is done. Output that the device wrote before can be read afterwards.
    pub fn status(&self) -> u8 {
        (self.words[0].load(Ordering::Acquire) & 0xff) as u8
    }

    /// Bytes 0 and 1, in one load: status and result, zero until the device is done.
    pub fn status_and_result(&self) -> (u8, u8) {
        let [status, result, ..] = self.words[0].load(Ordering::Acquire).to_le_bytes();
        (status, result)
    }

    /// The whole record, if the device is done.
    pub fn image(&self) -> Option<RecordImage> {
        let first = self.words[0].load(Ordering::Acquire);
        if first & 0xff == 0 {
            return None;
        }
        let mut words = [first; 8];
        for (word, place) in words.iter_mut().zip(&self.words).skip(1) {
            *word = place.load(Ordering::Relaxed);
        }
        Some(RecordImage { words })
    }
}

/// The contents of a [`Record`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordImage {
    /// The record's 64 bytes as little-endian words; DSA's records have four.
    pub words: [u64; 8],
}

impl RecordImage {
    /// Byte 0, including the bit for a fault on a write.
    pub const fn status(&self) -> u8 {
        (self.words[0] & 0xff) as u8
    }

    /// Byte 1: DSA's result, IAA's error code.
    pub const fn result(&self) -> u8 {
        (self.words[0] >> 8 & 0xff) as u8
    }

    /// Bytes completed of an operation that a fault ended, or members of a batch that were processed. A comparison that
    /// found a difference counts the bytes before it, or fewer (DSA 3.0, 8.2.4 and 8.3.7).
    pub const fn completed(&self) -> u32 {
        (self.words[0] >> 32) as u32
    }

    /// Address of a page fault.
    pub const fn fault_address(&self) -> u64 {
        self.words[1]
    }
}
