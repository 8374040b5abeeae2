//! The codes that compression reads from memory, and the counts that statistics write.
//!
//! ```text
//!    0     4     8           28       32            288             1432      1440          1560
//!   ┌─────┬─────┬───────────┬────────┬─────────────┬───────────────┬─────────┬─────────────┬─────────┐
//!   │ CRC │ XOR │ reserved  │ number │ bits before │ 286 codes of  │reserved │ 30 codes of │reserved │
//!   │     │     │           │ of bits│ the data    │ literals      │         │ distances   │         │
//!   └─────┴─────┴───────────┴────────┴─────────────┴───────────────┴─────────┴─────────────┴─────────┘
//!   code: bits 14:0 as a number, bits 18:15 its length
//! ```
//! A [`Histogram`] has the layout of the last four fields, with numbers of occurrences.
//!
//! Sources: `struct aecs_comp_table_record` of the kernel's `iaa_crypto`, and Intel's QPL.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::huffman::{Code, Codes, DISTANCES, Header, LITERALS};

/// Configuration and state of the engine for compression. The device reads it in place, so it must not be moved or changed
/// while a descriptor refers to it. Any number of descriptors can share it.
#[derive(Clone, Debug, PartialEq, Eq, FromZeros, Immutable, IntoBytes)]
#[repr(C, align(32))]
pub struct CompressAecs {
    crc: u32,
    xor: u32,
    reserved: [u32; 5],
    accumulated_bits: u32,
    accumulator: [u8; 256],
    literals: [u32; LITERALS],
    reserved_after_literals: [u32; 2],
    distances: [u32; DISTANCES],
    reserved_after_distances: [u32; 2],
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<CompressAecs>() == CompressAecs::SIZE as usize);
    assert!(offset_of!(CompressAecs, accumulated_bits) == 28);
    assert!(offset_of!(CompressAecs, accumulator) == 32);
    assert!(offset_of!(CompressAecs, literals) == 288);
    assert!(offset_of!(CompressAecs, distances) == 1440);
    assert!(size_of::<Histogram>() == Histogram::SIZE as usize);
    assert!(offset_of!(Histogram, distances) == 1440 - 288);
};

impl CompressAecs {
    /// Size in bytes.
    pub const SIZE: u32 = 0x620;

    /// For a stream of one block with the fixed codes of the format.
    pub fn fixed() -> Self {
        let codes = Codes::fixed();
        Self::with(&codes.header(true), &codes)
    }

    /// For one block with the best codes for `histogram`, which must count the data to be compressed. `last` marks the
    /// stream's last block.
    pub fn dynamic(histogram: &Histogram, last: bool) -> Self {
        let codes = Codes::of(histogram);
        Self::with(&codes.header(last), &codes)
    }

    /// The address for a descriptor.
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }

    /// The bytes in memory.
    pub fn to_bytes(&self) -> [u8; Self::SIZE as usize] {
        zerocopy::transmute!(self.clone())
    }

    fn with(header: &Header, codes: &Codes) -> Self {
        let mut accumulator = [0; 256];
        accumulator[..header.bytes().len()].copy_from_slice(header.bytes());
        Self {
            accumulated_bits: u32::from(header.bits()),
            accumulator,
            literals: codes.literals().map(packed),
            distances: codes.distances().map(packed),
            ..Self::new_zeroed()
        }
    }
}

/// Number of occurrences of each symbol of DEFLATE, as [`statistics`](super::statistics) writes it.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes)]
#[repr(C, align(64))]
pub struct Histogram {
    /// Literals, end of block (which the device may not have counted), and lengths of matches.
    pub literals: [u32; LITERALS],
    reserved_after_literals: [u32; 2],
    /// Distances of matches.
    pub distances: [u32; DISTANCES],
    reserved_after_distances: [u32; 2],
}

impl Histogram {
    /// Size in bytes.
    pub const SIZE: u32 = 1280;

    /// With all counts zero.
    pub fn new() -> Self {
        Self::new_zeroed()
    }

    /// From the bytes that the device wrote.
    pub fn from_bytes(bytes: &[u8; Self::SIZE as usize]) -> Self {
        zerocopy::transmute!(*bytes)
    }

    /// The same, with every symbol counted at least once: codes from it can compress any data.
    #[must_use]
    pub fn covering(&self) -> Self {
        Self {
            literals: self.literals.map(|count| count.max(1)),
            distances: self.distances.map(|count| count.max(1)),
            ..self.clone()
        }
    }

    /// Adds what `other` counted.
    pub fn add(&mut self, other: &Self) {
        let all = self.literals.iter_mut().chain(&mut self.distances);
        for (count, more) in all.zip(other.literals.iter().chain(&other.distances)) {
            *count = count.saturating_add(*more);
        }
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

fn packed(code: Code) -> u32 {
    u32::from(code.bits) | u32::from(code.len) << 15
}
