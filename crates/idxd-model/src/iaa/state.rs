//! The AECS of DECOMPRESS: a stream that can be gone on with, as bytes.
//!
//! ```text
//!  0     4     24         168      440   472    480     808     1076  1080      1252    1256      5352
//! ┌─────┬─────┬──────────┬────────┬─────┬──────┬───────┬───────┬─────┬─────────┬───────┬─────────┬─────┐
//! │ CRC │ XOR │ filters  │ input  │its  │format│ codes │ codes │place│stored   │write  │ history │     │
//! │     │     │          │ bits   │sizes│      │       │       │     │bytes    │pointer│ (4 KiB) │     │
//! └─────┴─────┴──────────┴────────┴─────┴──────┴───────┴───────┴─────┴─────────┴───────┴─────────┴─────┘
//! ```
//! Where these stand, and what of it is refused, is in IAA 2.1, 4.3 and 6.4.1. What a descriptor's size leaves out has
//! default values (6.4.1.2). The codes the device writes as tables of its own (6.4.1.1), and of what is left of a copy
//! nothing is said; no driver needs to know, as it hands back what the device has written. The model writes them, in a
//! way of its own, in place of those tables (560 to 807): lengths of codes, two to a byte, and then the copy's length
//! and distance.

use std::ops::RangeInclusive;

use super::inflate::{CodeLengths, MOST_BITS, Place, State};
use super::symbols::WINDOW;

/// Sizes that an AECS of DECOMPRESS can have, in steps of 32 bytes (IAA 2.1, 6.1.11).
pub(super) const SIZES: RangeInclusive<u32> = 32..=64 << 10;

/// What an AECS says.
pub(super) struct Saved {
    pub(super) crc: u32,
    pub(super) xor: u16,
    pub(super) state: State,
}

impl Saved {
    /// Before the first bit, without an AECS.
    pub(super) const fn new() -> Self {
        Self {
            crc: 0,
            xor: 0,
            state: State::new(),
        }
    }

    /// From the first bytes of an AECS; `None` if they do not make sense, or only to a device of another generation or
    /// that does more than DEFLATE.
    pub(super) fn of(read: &[u8]) -> Option<Self> {
        let mut bytes = [0; WHOLE];
        put(&mut bytes, PLACE, &HEADER.to_le_bytes());
        let size = read.len().min(WHOLE);
        bytes[..size].copy_from_slice(&read[..size]);
        let bytes = &bytes;
        let is_plain = [DROPPED_BYTES, OUTPUT_BITS, DROPPED_BITS_AND_FORMAT]
            .into_iter()
            .all(|at| word(bytes, at) == 0);
        if !is_plain {
            return None;
        }
        Some(Self {
            crc: word(bytes, CRC),
            xor: half(bytes, XOR),
            state: State {
                place: place(bytes)?,
                lengths: lengths(bytes),
                copy: (half(bytes, COPY).into(), half(bytes, COPY + 2).into()),
                bits: bits(bytes)?,
                history: history(bytes, size)?,
            },
        })
    }

    /// As the `size` bytes of an AECS. What they have no place for is lost.
    pub(super) fn bytes(&self, size: u32) -> Vec<u8> {
        let mut bytes = vec![0; WHOLE];
        put(&mut bytes, CRC, &self.crc.to_le_bytes());
        put(&mut bytes, XOR, &self.xor.to_le_bytes());
        let state = &self.state;
        for (index, bits) in state.bits.chunks(64).enumerate() {
            let value = bits.iter().rfold(0, |all, bit| all << 1 | u64::from(*bit));
            put(&mut bytes, INPUT + 8 * index, &value.to_le_bytes());
            bytes[INPUT_SIZES + index] = u8::try_from(bits.len()).unwrap_or(64);
        }
        for (place, two) in bytes[LENGTHS..].iter_mut().zip(state.lengths.chunks(2)) {
            *place = two[0] | two[1] << 4;
        }
        let (length, distance) = state.copy;
        put(&mut bytes, COPY, &low_16(length).to_le_bytes());
        put(&mut bytes, COPY + 2, &low_16(distance).to_le_bytes());
        let (place, left) = match state.place {
            Place::Header => (HEADER, 0),
            Place::Tokens { last } => (if last { LAST } else { 0 }, 0),
            Place::Stored { last, left } => (STORED | if last { LAST } else { 0 }, left),
            Place::Ended => (ENDED, 0),
        };
        put(&mut bytes, PLACE, &place.to_le_bytes());
        put(&mut bytes, STORED_LEFT, &left.to_le_bytes());
        put(&mut bytes, HISTORY, &state.history);
        let pointer = match state.history.len() {
            WINDOW => WRAPPED,
            written => low_16(written),
        };
        put(&mut bytes, HISTORY_POINTER, &pointer.to_le_bytes());
        bytes.truncate(size as usize);
        bytes
    }
}

fn place(bytes: &[u8]) -> Option<Place> {
    let place = half(bytes, PLACE);
    let last = place & LAST != 0;
    let left = half(bytes, STORED_LEFT);
    Some(match place {
        16.. => return None,
        _ if place & ENDED != 0 => Place::Ended,
        _ if place & HEADER != 0 => Place::Header,
        _ if place & STORED == 0 => Place::Tokens { last },
        _ if left == 0 => return None,
        _ => Place::Stored { last, left },
    })
}

fn lengths(bytes: &[u8]) -> CodeLengths {
    let mut lengths = [0; _];
    for (two, byte) in lengths.chunks_mut(2).zip(&bytes[LENGTHS..]) {
        two.copy_from_slice(&[byte & 15, byte >> 4]);
    }
    lengths
}

/// Up to the first word that has none, after which none may have any.
fn bits(bytes: &[u8]) -> Option<Vec<bool>> {
    let sizes = &bytes[INPUT_SIZES..INPUT_SIZES + MOST_BITS / 64];
    let used = sizes
        .iter()
        .position(|size| *size == 0)
        .unwrap_or(sizes.len());
    let (sizes, rest) = sizes.split_at(used);
    if sizes.iter().any(|size| *size > 64) || rest.iter().any(|size| *size != 0) {
        return None;
    }
    let mut all = Vec::new();
    for (index, size) in sizes.iter().enumerate() {
        let at = INPUT + 8 * index;
        let value = u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32;
        all.extend((0..*size).map(|bit| value >> bit & 1 == 1));
    }
    Some(all)
}

/// A ring: once it has wrapped, the oldest byte stands where the next one goes. All that is in it must be among the
/// first `size` bytes, which were read.
fn history(bytes: &[u8], size: usize) -> Option<Vec<u8>> {
    let pointer = half(bytes, HISTORY_POINTER);
    let (at, has_wrapped) = (usize::from(pointer & !WRAPPED), pointer & WRAPPED != 0);
    let filled = if has_wrapped { WINDOW } else { at };
    if at >= WINDOW || filled > 0 && size < HISTORY + filled {
        return None;
    }
    let (new, old) = bytes[HISTORY..HISTORY + WINDOW].split_at(at);
    let old = if has_wrapped { old } else { &[] };
    Some([old, new].concat())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from(half(bytes, at)) | u32::from(half(bytes, at + 2)) << 16
}

fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Of a length that a window bounds.
fn low_16(length: usize) -> u16 {
    u16::try_from(length).unwrap_or(u16::MAX)
}

const WHOLE: usize = 0x1500;
const CRC: usize = 0;
const XOR: usize = 4;
/// Bytes of output that are left out: for filters.
const DROPPED_BYTES: usize = 20;
/// Bits of output that were not written, and, in bit 0, the format.
const OUTPUT_BITS: usize = 176;
const INPUT: usize = 184;
const INPUT_SIZES: usize = 440;
/// Bits of input that are left out, and the format again.
const DROPPED_BITS_AND_FORMAT: usize = 476;
const LENGTHS: usize = 560;
const COPY: usize = 720;
const PLACE: usize = 1076;
const STORED_LEFT: usize = 1080;
const HISTORY_POINTER: usize = 1252;
const HISTORY: usize = 1256;
/// Beside the pointer's 15 bits: the ring is full.
const WRAPPED: u16 = 1 << 15;

// Values of the place; that of tokens is zero.
const HEADER: u16 = 1;
const STORED: u16 = 2;
const LAST: u16 = 4;
const ENDED: u16 = 8;
