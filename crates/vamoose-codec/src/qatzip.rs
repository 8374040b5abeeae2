//! Method qatzip: a packet is one or more gzip members (RFC 1952), in the form of Intel's QATzip.
//!
//! ```text
//!  │ 1f 8b 08 04 │ 0 0 0 0 │ 00 ff │ 0c 00 │ 'Q' 'Z' 08 00 │ source size │ deflate size │ raw deflate … │ CRC-32 │ source size │
//!  │ gzip, FEXTRA  no time  xfl, os  XLEN       subfield          all sizes and sums u32 LE               └──── trailer ─────┘
//! ```
//!
//! QAT hardware requires exactly this header and at most 64 KiB of source in a member, so a full packet is sent as eight
//! members. QEMU's software path writes one member per packet and accepts any gzip. This decoder accepts members of any
//! size, with any of the fields that RFC 1952 allows, and checks every sum and size that a payload states.
//!
//! # Engines
//! Level 1 is encoded by ISA-L at its level 1, in one call per member; levels 2 to 9, and level 1
//! without the feature `isal`, by libdeflate at its levels. Whatever the level and the features,
//! libdeflate decodes.
//!
//! Measured (packets of 128 pages from all over the Silesia files and from memory of processes, one
//! thread, best of 6, CPU time, on a busy Xeon of 2.5 GHz with AVX-512, where C zlib's level 1 does
//! 59 and 51 MB/s at ratios of 3.393 and 2.610): MB/s of pages encoded / decoded, and ratio.
//!
//! | level          | Silesia           | memory            |
//! |----------------|-------------------|-------------------|
//! | 1 (ISA-L)      | 353 / 595 / 3.336 | 350 / 562 / 2.528 |
//! | 2 (libdeflate) |  88 / 649 / 3.587 |  90 / 548 / 2.710 |
//! | 3              |  83 / 636 / 3.633 |  71 / 498 / 2.736 |
//! | 6              |  45 / 701 / 3.811 |  39 / 520 / 2.807 |
//! | 9              |  21 / 698 / 3.864 |  21 / 589 / 2.844 |
//!
//! So level 1 has six times the speed of C zlib's for 2 to 3 % more bytes, which is what the members
//! cost: each starts without a history. It is 8 to 10 % slower than method zlib's level 1, which
//! does 382 and 378 MB/s there. ISA-L's level 2 would be 1 to 2 % smaller and 2 to 5 % slower than
//! its level 1. A level buffer of another size, or the streaming calls with a reset for
//! each member, change nothing. libdeflate decodes in 0.5 to 0.95 of the time that ISA-L takes, and
//! its CRC-32 (7 GB/s on this machine) in 0.85 of ISA-L's.

use std::ops::RangeInclusive;

use multifd::Method;

use self::member::{Header, LEAST_SOURCE, MOST_SOURCE};
#[cfg(feature = "isal")]
use crate::ffi::isal;
use crate::{
    DecodeError,
    engine::{Compress, CompressError, Software, Unpack},
    ffi::libdeflate::{self, Failure, Inflate, Inflated},
};

mod member;

pub(crate) const LEVELS: RangeInclusive<i32> = 1..=9;

/// The engines, the better one first.
pub(crate) const ENGINES: &[Software] = &[
    #[cfg(feature = "isal")]
    Software {
        name: isal::NAME,
        levels: 1..=1,
        compressor: |level| {
            let level = isal::Level::of_zlib(level)?;
            let engine = isal::OneShot::new(level);
            Ok(Box::new(Members { engine }))
        },
    },
    Software {
        name: libdeflate::NAME,
        levels: LEVELS,
        compressor: |level| {
            let engine = libdeflate::Deflate::new(level)?;
            Ok(Box::new(Members { engine }))
        },
    },
];

/// Makes a packet of members out of what makes a stream of raw deflate.
struct Members<E> {
    engine: E,
}

impl<E: Compress> Compress for Members<E> {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let mut written = 0;
        for source in pages.chunks(MOST_SOURCE) {
            written += self.member(source, &mut out[written..])?;
        }
        Ok(written)
    }
}

impl<E: Compress> Members<E> {
    fn member(&mut self, source: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let (header, rest) = out
            .split_first_chunk_mut()
            .ok_or(CompressError::OutputFull)?;
        let len = self.engine.compress(source, rest)?;
        let trailer = rest.get_mut(len..).and_then(<[u8]>::first_chunk_mut);
        let trailer = trailer.ok_or(CompressError::OutputFull)?;
        let size = |len| u32::try_from(len).map_err(|_| CompressError::Refused("more than 4 GiB"));
        *header = member::header(size(source.len())?, size(len)?);
        *trailer = member::trailer(libdeflater::crc32(source), size(source.len())?);
        Ok(header.len() + len + trailer.len())
    }
}

pub(crate) struct Unpacker(Inflate);

impl Unpacker {
    pub(crate) fn new() -> Result<Self, DecodeError> {
        Inflate::new(Method::Qatzip).map(Self)
    }
}

impl Unpack for Unpacker {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        let (method, expected) = (Method::Qatzip, pages.len());
        let (mut rest, mut found) = (payload, 0);
        while !rest.is_empty() {
            if found == expected && !member::begins(rest) {
                return Err(DecodeError::trailing(method, rest.len(), expected));
            }
            let member =
                read(&mut self.0, rest, &mut pages[found..]).map_err(|wrong| match wrong {
                    Wrong::TooLong => DecodeError::too_long(method, payload.len(), expected),
                    Wrong::Corrupt(reason) => DecodeError::Corrupt { method, reason },
                })?;
            rest = &rest[member.consumed..];
            found += member.produced;
        }
        DecodeError::check_len(method, payload.len(), found, expected)
    }

    /// Whether hardware can have written it, and therefore read it: it follows the members by the sizes that they state.
    fn has_shape(&self, payload: &[u8], pages_len: usize) -> bool {
        let (mut rest, mut left) = (payload, pages_len);
        while left > 0 {
            let Some((source, after)) = member::skip(rest) else {
                return false;
            };
            if !(LEAST_SOURCE..=left.min(MOST_SOURCE)).contains(&source) {
                return false;
            }
            left -= source;
            rest = after;
        }
        rest.is_empty()
    }
}

/// The error in a member.
enum Wrong {
    TooLong,
    Corrupt(&'static str),
}

impl From<&'static str> for Wrong {
    fn from(reason: &'static str) -> Self {
        Self::Corrupt(reason)
    }
}

/// Decodes the member at the start of `input` to the start of `room`.
fn read(inflate: &mut Inflate, input: &[u8], room: &mut [u8]) -> Result<Inflated, Wrong> {
    let Header { len, stated } = Header::parse(input)?;
    let body = &input[len..];
    let deflate = match stated {
        None => body,
        Some(sizes) => body
            .get(..sizes.deflate)
            .ok_or("a member is shorter than its QZ subfield states")?,
    };
    let done = inflate
        .inflate(deflate, room)
        .map_err(|failure| match failure {
            Failure::Data => Wrong::Corrupt("invalid deflate data, or cut short"),
            Failure::Room => Wrong::TooLong,
        })?;
    if let Some(sizes) = stated
        && (sizes.source, sizes.deflate) != (done.produced, done.consumed)
    {
        return Err(Wrong::Corrupt("a member's QZ subfield states wrong sizes"));
    }
    let (trailer, _) = body[done.consumed..]
        .split_first_chunk()
        .ok_or("a member's trailer is cut short")?;
    member::check_trailer(*trailer, &room[..done.produced])?;
    Ok(Inflated {
        consumed: len + done.consumed + trailer.len(),
        produced: done.produced,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Payload of one packet by the engine that serves `level`.
    fn payload(level: i32, pages: &[u8]) -> Vec<u8> {
        let engine = ENGINES.iter().find(|engine| engine.levels.contains(&level));
        let mut writer = (engine.unwrap().compressor)(level).unwrap();
        let mut out = vec![0; 1 << 20];
        let len = writer.compress(pages, &mut out).unwrap();
        out.truncate(len);
        out
    }

    fn pages(len: usize) -> Vec<u8> {
        let bytes = (0..len).map(|at| (at * at) >> 7);
        bytes.map(|byte| byte.to_le_bytes()[0]).collect()
    }

    #[test]
    fn every_level_has_an_engine_and_none_else() {
        for engine in ENGINES {
            for level in [*engine.levels.start(), *engine.levels.end()] {
                assert!((engine.compressor)(level).is_ok());
            }
        }
        for level in [-1, 13] {
            for engine in ENGINES {
                assert!((engine.compressor)(level).is_err());
            }
        }
    }

    #[test]
    fn too_little_room_is_a_fault_and_nothing_is_lost() {
        let pages = pages(3 * MOST_SOURCE + 4096);
        for level in [1, 2] {
            for engine in ENGINES.iter().filter(|e| e.levels.contains(&level)) {
                let mut writer = (engine.compressor)(level).unwrap();
                let mut out = vec![0; 1 << 20];
                let len = writer.compress(&pages, &mut out).unwrap();
                let whole = out[..len].to_vec();
                for room in (0..60).chain((60..len).step_by(1009)).chain(len - 8..len) {
                    let fault = writer.compress(&pages, &mut out[..room]);
                    assert_eq!(
                        fault,
                        Err(CompressError::OutputFull),
                        "{} {room}",
                        engine.name
                    );
                }
                assert_eq!(writer.compress(&pages, &mut out), Ok(len));
                assert!(out[..len] == whole);
            }
        }
    }

    #[test]
    fn shapes_are_those_that_hardware_writes() {
        let unpacker = Unpacker::new().unwrap();
        let len = 2 * MOST_SOURCE + 4096;
        let good = payload(1, &pages(len));
        assert!(unpacker.has_shape(&good, len));
        for wrong in [0, 1, 4096, len - 4096, len - 1, len + 1, len + 4096] {
            assert!(!unpacker.has_shape(&good, wrong), "{wrong}");
        }
        for cut in 0..good.len() {
            assert!(!unpacker.has_shape(&good[..cut], len), "{cut}");
        }
        assert!(!unpacker.has_shape(&[&good[..], &[0]].concat(), len));
        // Any bit of a header or of the size in the trailer; the rest is not looked at.
        for at in (0..24).chain(good.len() - 4..good.len()) {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                assert!(!unpacker.has_shape(&bad, len), "{at} {bit}");
            }
        }
        // A member of more than 64 KiB, or of nothing.
        let member = |source: u32| {
            let stream = [&member::header(source, 2)[..], &[3, 0]].concat();
            [&stream[..], &member::trailer(0, source)].concat()
        };
        assert!(unpacker.has_shape(&member(65_536), 65_536));
        assert!(!unpacker.has_shape(&member(65_537), 65_537));
        assert!(!unpacker.has_shape(&member(0), 0));
        for little in [0, 1023] {
            let padded = [member(little), member(4096)].concat();
            assert!(!unpacker.has_shape(&padded, 4096 + little as usize));
        }
        // More deflated data than QATzip has room for: empty blocks that are not the last.
        for (len, fits) in [(74_752, true), (74_753, false)] {
            let size = u32::try_from(len).unwrap();
            let stream = [&member::header(4096, size)[..], &vec![0; len]].concat();
            let stream = [&stream[..], &member::trailer(0, 4096)].concat();
            assert_eq!(unpacker.has_shape(&stream, 4096), fits);
        }
    }

    #[test]
    fn empty_members_are_members() {
        let page = pages(4096);
        let nothing = [&member::header(0, 2)[..], &[3, 0], &member::trailer(0, 0)].concat();
        let good = payload(1, &page);
        let mut unpacker = Unpacker::new().unwrap();
        for payload in [
            [&nothing[..], &good].concat(),
            [&good[..], &nothing, &nothing].concat(),
        ] {
            let mut found = vec![0; page.len()];
            assert_eq!(unpacker.unpack(&payload, &mut found), Ok(()));
            assert!(found == page);
        }
        let expected = 4096;
        assert_eq!(
            unpacker.unpack(&nothing, &mut vec![0; expected]),
            Err(DecodeError::TooShort {
                method: Method::Qatzip,
                payload: nothing.len(),
                found: 0,
                expected
            })
        );
    }
}
