//! What decompression can begin with beside its descriptor, and go on with.
//!
//! ```text
//!    0     4             168          1076        1088        1248   1252      1256      5352   5376
//!   ┌─────┬─────┬───────┬────────────┬───────────┬───────────┬──────┬─────────┬─────────┬──────┐
//!   │ CRC │ XOR │filters│ input left,│ what comes│ format 1  │ f. 2 │ pointer │ history │ pad  │
//!   │     │     │       │ codes      │ next      │ ends here │ ends │         │ (4 KiB) │      │
//!   └─────┴─────┴───────┴────────────┴───────────┴───────────┴──────┴─────────┴─────────┴──────┘
//! ```
//! The device fills it in: with the codes of a block's header ([`load_codes`](super::load_codes)), or with all that it
//! needs where the output was full ([`decompress_piece`](super::decompress_piece)). What it writes differs between the
//! two formats that there are (IAACAP bit 0) and is only handed back, so a driver has to know its sizes and little
//! else.
//!
//! Sources: IAA 2.1, 3.2 and 6.4.1; `hw_iaa_aecs_analytic` of Intel's QPL (`hw_aecs_api.h`); for the sizes without
//! history also the canned mode of the kernel's `iaa_crypto`.

/// Configuration and state of the engine for decompression.
///
/// The device reads and writes it where it lies: while a descriptor names it, it must stay there, and nothing else may
/// write it, nor read it while the device may write. One with [loaded codes](super::load_codes) is only read any more,
/// and may serve any number of descriptors at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[repr(C, align(32))]
pub struct DecompressAecs {
    bytes: [u8; Self::SIZE as usize],
}

const _: () = assert!(size_of::<DecompressAecs>() == DecompressAecs::SIZE as usize);

impl DecompressAecs {
    /// Its bytes.
    pub const SIZE: u32 = 0x1500;

    /// Bytes of the part without history, of either format: all that is needed where a stream begins.
    pub const SIZE_WITHOUT_HISTORY: u32 = 0x4e0;

    /// Before the header of a stream's first block, with no history and all sums zero.
    pub const fn new() -> Self {
        let mut bytes = [0; Self::SIZE as usize];
        bytes[PLACE] = BLOCK_HEADER;
        Self { bytes }
    }

    /// The address for a descriptor.
    pub fn address(&mut self) -> u64 {
        std::ptr::from_mut(self) as u64
    }

    /// As it stands in memory.
    pub const fn bytes(&self) -> &[u8; Self::SIZE as usize] {
        &self.bytes
    }
}

impl Default for DecompressAecs {
    fn default() -> Self {
        Self::new()
    }
}

/// Where it says what comes next in the stream, and that this is the header of a block.
const PLACE: usize = 0x434;
const BLOCK_HEADER: u8 = 1;
