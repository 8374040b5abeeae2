//! The codes that compression reads from memory: here always the fixed ones of DEFLATE (RFC 1951, 3.2.6).
//!
//! ```text
//!    0     4     8           28       32            288             1432      1440          1560
//!   ┌─────┬─────┬───────────┬────────┬─────────────┬───────────────┬─────────┬─────────────┬─────────┐
//!   │ CRC │ XOR │ reserved  │ number │ bits before │ 286 codes of  │reserved │ 30 codes of │reserved │
//!   │     │     │           │ of bits│ the data    │ literals      │         │ distances   │         │
//!   └─────┴─────┴───────────┴────────┴─────────────┴───────────────┴─────────┴─────────────┴─────────┘
//!   code: bits 14:0 as a number, bits 18:15 its length
//! ```
//! Sources: `struct aecs_comp_table_record` of the kernel's `iaa_crypto`, and Intel's QPL.

use zerocopy::{FromZeros, Immutable, IntoBytes};

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
    literals: [u32; 286],
    reserved_after_literals: [u32; 2],
    distances: [u32; 30],
    reserved_after_distances: [u32; 2],
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<CompressAecs>() == CompressAecs::SIZE as usize);
    assert!(offset_of!(CompressAecs, accumulated_bits) == 28);
    assert!(offset_of!(CompressAecs, accumulator) == 32);
    assert!(offset_of!(CompressAecs, literals) == 288);
    assert!(offset_of!(CompressAecs, distances) == 1440);
};

impl CompressAecs {
    /// Size in bytes.
    pub const SIZE: u32 = 0x620;

    /// For a stream of one block with the fixed codes of the format.
    pub fn fixed() -> Self {
        let mut fixed = Self::new_zeroed();
        // The header of a last block with fixed codes.
        fixed.accumulated_bits = 3;
        fixed.accumulator[0] = 0b011;
        for (code, symbol) in fixed.literals.iter_mut().zip(0..) {
            *code = match symbol {
                0..144 => packed(0x30 + symbol, 8),
                144..256 => packed(0x190 + symbol - 144, 9),
                256..280 => packed(symbol - 256, 7),
                _ => packed(0xc0 + symbol - 280, 8),
            };
        }
        for (code, symbol) in fixed.distances.iter_mut().zip(0..) {
            *code = packed(symbol, 5);
        }
        fixed
    }

    /// The address for a descriptor.
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }

    /// The bytes in memory.
    pub fn to_bytes(&self) -> [u8; Self::SIZE as usize] {
        zerocopy::transmute!(self.clone())
    }
}

const fn packed(bits: u32, len: u32) -> u32 {
    bits | len << 15
}
