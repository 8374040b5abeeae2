//! Where the AECS of a descriptor is, and the one of COMPRESS.

use std::ops::RangeInclusive;

use super::{Failure, check_reserved, deflate::Codes, status};
use idxd::{Descriptor, Flags};

/// Flags of the second source: whether it is read and written, and which of its copies.
pub(super) const FLAGS: u32 = READ_MASK | WRITE_MASK | Flags::AECS_TOGGLE.0;

/// Of whether the second source is read.
pub(super) const READ_MASK: u32 = 3 << 16;
const WRITE_MASK: u32 = 3 << 18;

/// Where the AECS is. There are two copies: the first is read and the second written, or by the toggle the other way
/// round. That holds as well where it is only read or only written (IAA 2.1, 3.2).
pub(super) struct Aecs {
    pub(super) size: u32,
    pub(super) read: Option<u64>,
    pub(super) write: Option<(u64, WriteBack)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteBack {
    Always,
    OnOverflow,
}

impl Aecs {
    /// As `descriptor` names it, of one of `sizes`.
    pub(super) fn of(
        descriptor: &Descriptor,
        sizes: &RangeInclusive<u32>,
    ) -> Result<Self, Failure> {
        let flags = descriptor.flags();
        let reads = match flags.0 & READ_MASK {
            0 => false,
            read if read == Flags::READ_AECS.0 => true,
            // A second input is not theirs.
            wrong => return Err(Failure::Flags(wrong)),
        };
        let back = match (flags.0 & WRITE_MASK) >> 18 {
            0 => None,
            1 => Some(WriteBack::Always),
            2 => Some(WriteBack::OnOverflow),
            _ => return Err(Failure::Flags(WRITE_MASK)),
        };
        let (first, size) = (descriptor.operands[0], descriptor.high(1));
        if !reads && back.is_none() {
            check_reserved(first | u64::from(size))?;
            return Ok(Self {
                size,
                read: None,
                write: None,
            });
        }
        if !first.is_multiple_of(32) || !size.is_multiple_of(32) {
            return Err(Failure::Refused(status::ALIGNMENT));
        }
        if !sizes.contains(&size) {
            return Err(Failure::Refused(status::SIZE));
        }
        let second = first.wrapping_add(size.into());
        let (read, write) = match flags.has(Flags::AECS_TOGGLE) {
            false => (first, second),
            true => (second, first),
        };
        let aecs = Self {
            size,
            read: reads.then_some(read),
            write: back.map(|back| (write, back)),
        };
        aecs.check_overlap(descriptor)?;
        Ok(aecs)
    }

    /// It overlaps with neither source nor destination (IAA 2.1, 4.1 and 7.1; 6.1.9 says so only of one that is
    /// written). Assumed: that of the two copies only those count that are used.
    fn check_overlap(&self, descriptor: &Descriptor) -> Result<(), Failure> {
        let source = (descriptor.address_1, descriptor.size);
        let destination = (descriptor.address_2, descriptor.low(1));
        let written = self.write.map(|(address, _)| (address, self.size));
        let read = self.read.map(|address| (address, self.size));
        let mut areas = read.into_iter().chain(written);
        if areas.any(|area| overlap(area, source) || overlap(area, destination)) {
            return Err(Failure::Refused(status::OVERLAP));
        }
        Ok(())
    }
}

/// Whether two areas, of an address and a size each, have a byte in common.
pub(super) fn overlap(one: (u64, u32), other: (u64, u32)) -> bool {
    let end = |(address, size): (u64, u32)| address.saturating_add(size.into());
    let first = one.0.max(other.0);
    first < end(one) && first < end(other)
}

/// A COMPRESS AECS.
///
/// ```text
///  0     4     8          28              32            288              1440        1560
/// ┌─────┬─────┬──────────┬───────────────┬─────────────┬────────────────┬───────────┬─────┐
/// │ CRC │ XOR │ reserved │ bits that are │ accumulator │ literals' and  │ distances'│     │
/// │     │     │          │ accumulated   │ (256 bytes) │ lengths' codes │ codes     │     │
/// └─────┴─────┴──────────┴───────────────┴─────────────┴────────────────┴───────────┴─────┘
/// ```
pub(super) struct CompressState(pub(super) Vec<u8>);

impl CompressState {
    pub(super) const SIZES: RangeInclusive<u32> = 1568..=1568;
    const XOR: usize = 4;
    const BITS: usize = 28;
    const ACCUMULATOR: std::ops::Range<usize> = 32..288;
    const LITERALS: usize = 288;
    const DISTANCES: usize = 1440;

    pub(super) fn empty() -> Self {
        Self(vec![0; 1568])
    }

    fn word(&self, at: usize) -> u32 {
        let word = self.0.get(at..).and_then(|bytes| bytes.first_chunk());
        word.map_or(0, |word| u32::from_le_bytes(*word))
    }

    fn set_word(&mut self, at: usize, word: u32) {
        if let Some(place) = self.0[at..].first_chunk_mut() {
            *place = word.to_le_bytes();
        }
    }

    pub(super) fn crc(&self) -> u32 {
        self.word(0)
    }

    pub(super) fn xor(&self) -> u16 {
        (self.word(Self::XOR) & 0xffff) as u16
    }

    pub(super) fn set_checksums(&mut self, crc: u32, xor: u16) {
        self.set_word(0, crc);
        self.set_word(Self::XOR, xor.into());
    }

    /// What comes before the data, and how many bits of it; unless those are more than fit.
    pub(super) fn accumulator(&self) -> Option<(&[u8], u32)> {
        let bits = self.word(Self::BITS);
        let accumulator = &self.0[Self::ACCUMULATOR];
        (bits as usize <= 8 * accumulator.len()).then_some((accumulator, bits))
    }

    pub(super) fn set_accumulator(&mut self, (byte, bits): (u8, u32)) {
        self.set_word(Self::BITS, bits);
        let accumulator = &mut self.0[Self::ACCUMULATOR];
        accumulator.fill(0);
        accumulator[0] = byte;
    }

    pub(super) fn codes(&self) -> Codes {
        let words = |from: usize| (from..).step_by(4).map(|at| self.word(at));
        Codes::new(words(Self::LITERALS), words(Self::DISTANCES))
    }

    /// What is written back: not the codes, which have not changed (IAA 2.1, 3.2).
    pub(super) fn written(&self) -> &[u8] {
        &self.0[..64]
    }
}
