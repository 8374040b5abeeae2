//! Method qpl: every page by itself, as Intel's In-Memory Analytics Accelerator (IAA) works.
//!
//! ```text
//!  │ length 1 │ length 2 │ … │ length n │ page 1 … │ page 2 … │ … │ page n … │
//!  └────── u32 big endian, bytes ───────┘└─ a raw deflate stream (RFC 1951), or, if the length is
//!                                           the page size, the page as it is
//! ```
//!
//! IAA's window is 4 KiB. Within a page of 4096 bytes, no distance is longer. Larger pages could have longer distances, so this
//! method does not encode them. It decodes larger pages, whose peers do not have that limit.
//!
//! # Engines
//! Level 0 is for links that are faster than processors: ISA-L's level 0, one pass over each page, with the fixed Huffman code
//! of deflate, as IAA does it. Levels 1 to 12 are those of libdeflate, which does level 0 as its level 1 where the feature
//! `isal` is missing. libdeflate also decodes.
//!
//! MB/s of pages encoded / decoded, and ratio; packets of 128 pages from Silesia and from memory of processes
//! (`scripts/corpus`), CPU time of one thread on a busy machine, so only compare:
//!
//! | method and level | Silesia            | memory             |
//! |------------------|--------------------|--------------------|
//! | zlib 1           | 388 / 623 / 3.455  | 385 / 480 / 2.539  |
//! | lz4 1            | 460 / 2404 / 2.569 | 470 / 2362 / 2.201 |
//! | qpl 1            | 124 / 421 / 2.708  | 109 / 383 / 2.297  |
//! | qpl 6            | 71 / 427 / 2.814   | 62 / 389 / 2.374   |
//! | qpl 12           | 4 / 331 / 2.875    | 3 / 318 / 2.411    |
//!
//! - Level 0 beside level 1, on memory of redis, a JVM and PostgreSQL: 721 / 878 / 2.133 and 164 / 463 / 2.475. With a code that
//!   is learned from every 16th page of the packet, level 0 has 432 / 466 / 2.228: 4 % fewer bytes for 1.7 times the time.
//! - ISA-L decodes level 0 at half the speed of libdeflate or less: it takes longer to prepare for a
//!   code than to decode a page with it. It is slower on libdeflate's and QPL's streams too.

use std::{mem, ops::RangeInclusive, slice};

use multifd::{Layout, Method};

#[cfg(feature = "isal")]
use crate::ffi::isal;
use crate::{
    DecodeError,
    engine::{Compress, CompressError, Software, Unpack},
    ffi::libdeflate::{self, Failure, Inflate, Inflated},
};

pub(crate) const LEVELS: RangeInclusive<i32> = 0..=12;

/// The engines, the better one first.
pub(crate) const ENGINES: &[Software] = &[
    #[cfg(feature = "isal")]
    Software {
        name: isal::NAME,
        levels: 0..=0,
        compressor: Packer::compressor,
    },
    Software {
        name: libdeflate::NAME,
        levels: LEVELS,
        compressor: Packer::compressor,
    },
];

/// The page size that can be encoded: IAA's window.
pub(crate) const PAGE_SIZE: usize = 4096;

/// Writes a packet's streams, one for each page, by the library that serves `level`.
pub(crate) fn deflate(level: i32) -> Result<Box<dyn Compress>, &'static str> {
    #[cfg(feature = "isal")]
    if level == 0 {
        return Ok(Box::new(isal::OneShot::new(isal::Level::FIXED)));
    }
    // libdeflate's own level 0 only copies.
    Ok(Box::new(libdeflate::Deflate::new(level.max(1))?))
}

struct Packer {
    deflate: Box<dyn Compress>,
}

impl Packer {
    fn compressor(level: i32) -> Result<Box<dyn Compress>, &'static str> {
        let deflate = deflate(level)?;
        Ok(Box::new(Self { deflate }))
    }
}

impl Compress for Packer {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let mut payload = Payload::new(pages.len(), out)?;
        for page in pages.chunks_exact(PAGE_SIZE) {
            payload.page(page, |room| self.deflate.compress(page, room))?;
        }
        Ok(payload.written)
    }
}

/// A payload that is being written, page by page.
pub(crate) struct Payload<'a> {
    lengths: slice::IterMut<'a, [u8; 4]>,
    room: &'a mut [u8],
    /// Bytes so far, the whole table of lengths included.
    pub(crate) written: usize,
}

impl<'a> Payload<'a> {
    /// For `pages_len` bytes of pages, at the start of `out`.
    pub(crate) fn new(pages_len: usize, out: &'a mut [u8]) -> Result<Self, CompressError> {
        if !pages_len.is_multiple_of(PAGE_SIZE) {
            return Err(CompressError::Refused(
                "these are not whole pages of 4096 bytes",
            ));
        }
        let table = pages_len / PAGE_SIZE * size_of::<u32>();
        let (lengths, room) = out
            .split_at_mut_checked(table)
            .ok_or(CompressError::OutputFull)?;
        Ok(Self {
            lengths: lengths.as_chunks_mut().0.iter_mut(),
            room,
            written: table,
        })
    }

    /// Adds a page: the stream that `encode` writes to the buffer that it is given, and whose length it returns, or the page as
    /// it is if the buffer is too small.
    pub(crate) fn page(
        &mut self,
        page: &[u8],
        encode: impl FnOnce(&mut [u8]) -> Result<usize, CompressError>,
    ) -> Result<(), CompressError> {
        let length = self.lengths.next().ok_or(CompressError::OutputFull)?;
        let shorter = self.room.len().min(PAGE_SIZE - 1);
        let len = match encode(&mut self.room[..shorter]) {
            Err(CompressError::OutputFull) => {
                let raw = self
                    .room
                    .get_mut(..PAGE_SIZE)
                    .ok_or(CompressError::OutputFull)?;
                raw.copy_from_slice(page);
                PAGE_SIZE
            }
            result => result?,
        };
        *length = u32::try_from(len)
            .map_err(|_| CompressError::Refused("a page of more than 4 GiB"))?
            .to_be_bytes();
        self.room = &mut mem::take(&mut self.room)[len..];
        self.written += len;
        Ok(())
    }
}

pub(crate) struct Unpacker {
    page_size: usize,
    inflate: Inflate,
}

impl Unpacker {
    pub(crate) fn new(layout: Layout) -> Result<Self, DecodeError> {
        Ok(Self {
            page_size: layout.page_size(),
            inflate: Inflate::new(Method::Qpl)?,
        })
    }
}

impl Unpack for Unpacker {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        let method = Method::Qpl;
        let encoded = Encoded::parse(payload, pages.len(), self.page_size)?;
        let mut pages = pages
            .chunks_exact_mut(self.page_size)
            .zip(encoded.streams());
        pages.try_for_each(|(page, stream)| {
            read(&mut self.inflate, stream, page)
                .map_err(|reason| DecodeError::Corrupt { method, reason })
        })
    }

    fn has_shape(&self, payload: &[u8], pages_len: usize) -> bool {
        Encoded::parse(payload, pages_len, self.page_size).is_ok()
    }
}

/// A payload whose lengths are right.
pub(crate) struct Encoded<'a> {
    lengths: &'a [[u8; 4]],
    pub(crate) streams: &'a [u8],
}

impl<'a> Encoded<'a> {
    pub(crate) fn parse(
        payload: &'a [u8],
        pages_len: usize,
        page_size: usize,
    ) -> Result<Self, DecodeError> {
        let method = Method::Qpl;
        let corrupt = |reason| DecodeError::Corrupt { method, reason };
        if !pages_len.is_multiple_of(page_size) {
            return Err(corrupt("it stands for pages that are not whole"));
        }
        let table = pages_len / page_size * size_of::<u32>();
        let (lengths, streams) = payload
            .split_at_checked(table)
            .ok_or(corrupt("its table of lengths is cut short"))?;
        let (lengths, _) = lengths.as_chunks();
        let mut sum = 0;
        for length in lengths {
            let len = to_len(*length);
            if len > page_size {
                return Err(corrupt("a page is encoded in more bytes than it has"));
            }
            sum += len;
        }
        match streams.len().checked_sub(sum) {
            Some(0) => Ok(Self { lengths, streams }),
            Some(left) => Err(DecodeError::trailing(method, left, pages_len)),
            None => Err(corrupt(
                "its table of lengths names more bytes than there are",
            )),
        }
    }

    /// The stream of each page.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &'a [u8]> {
        let mut rest = self.streams;
        self.lengths.iter().map(move |length| {
            let stream;
            // They fit: their sum was checked.
            (stream, rest) = rest.split_at_checked(to_len(*length)).unwrap_or_default();
            stream
        })
    }
}

/// What does not fit is too long in any case.
fn to_len(length: [u8; 4]) -> usize {
    usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX)
}

/// Fills `page` from a stream and nothing else, or from the page as it is.
pub(crate) fn read(
    inflate: &mut Inflate,
    stream: &[u8],
    page: &mut [u8],
) -> Result<(), &'static str> {
    if stream.len() == page.len() {
        page.copy_from_slice(stream);
        return Ok(());
    }
    let Inflated { consumed, produced } =
        inflate
            .inflate(stream, page)
            .map_err(|failure| match failure {
                Failure::Data => "invalid deflate data, or cut short",
                Failure::Room => "the deflate data of a page holds more than a page",
            })?;
    if produced < page.len() {
        return Err("the deflate data of a page holds less than a page");
    }
    if consumed < stream.len() {
        return Err("the deflate data of a page ends before it should");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const METHOD: Method = Method::Qpl;

    fn pages(count: usize) -> Vec<u8> {
        let bytes = (0..count * PAGE_SIZE).map(|at| (at * at) >> (5 + at / PAGE_SIZE));
        bytes.map(|byte| byte.to_le_bytes()[0] % 21).collect()
    }

    fn noise(count: usize) -> Vec<u8> {
        let words = (1..=count as u64 * PAGE_SIZE as u64 / 4)
            .map(|at| at.wrapping_mul(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32);
        words
            .flat_map(|word| word.to_le_bytes().into_iter().take(4))
            .collect()
    }

    /// A payload by every engine, at its lowest level.
    fn payloads(pages: &[u8]) -> Vec<Vec<u8>> {
        let payload = |engine: &Software| {
            let mut writer = (engine.compressor)(*engine.levels.start()).unwrap();
            let mut out = vec![0; 1 << 20];
            let len = writer.compress(pages, &mut out).unwrap();
            out.truncate(len);
            out
        };
        ENGINES.iter().map(payload).collect()
    }

    fn unpack(payload: &[u8], pages_len: usize) -> Result<Vec<u8>, DecodeError> {
        let mut unpacker = Unpacker::new(Layout::X86).unwrap();
        let mut pages = vec![0xee; pages_len];
        let result = unpacker.unpack(payload, &mut pages);
        let shaped = unpacker.has_shape(payload, pages_len);
        assert!(shaped || result.is_err());
        result.map(|()| pages)
    }

    #[test]
    fn every_level_has_an_engine_and_none_else() {
        for level in LEVELS {
            let engine = ENGINES.iter().find(|engine| engine.levels.contains(&level));
            let engine = engine.unwrap();
            assert!((engine.compressor)(level).is_ok());
        }
        let libdeflate = &ENGINES[ENGINES.len() - 1];
        assert!((libdeflate.compressor)(13).is_err());
    }

    #[test]
    fn pages_that_do_not_shrink_go_raw() {
        let sent = [pages(1), noise(2), pages(1)].concat();
        for payload in payloads(&sent) {
            let table: Vec<[u8; 4]> = payload[..16].as_chunks().0.to_vec();
            let lens = table.iter().map(|length| to_len(*length));
            let lens: Vec<_> = lens.collect();
            assert!(lens[0] < PAGE_SIZE && lens[3] < PAGE_SIZE, "{lens:?}");
            assert_eq!(lens[1..3], [PAGE_SIZE; 2]);
            assert_eq!(payload.len(), 16 + lens.iter().sum::<usize>());
            assert!(unpack(&payload, sent.len()).unwrap() == sent);
        }
    }

    #[test]
    fn too_little_room_is_a_fault_and_nothing_is_lost() {
        let sent = [noise(1), pages(3)].concat();
        for engine in ENGINES {
            let mut writer = (engine.compressor)(*engine.levels.start()).unwrap();
            let mut out = vec![0; 1 << 20];
            let len = writer.compress(&sent, &mut out).unwrap();
            let whole = out[..len].to_vec();
            for room in (0..60).chain((60..len).step_by(61)).chain(len - 60..len) {
                let fault = writer.compress(&sent, &mut out[..room]);
                assert_eq!(
                    fault,
                    Err(CompressError::OutputFull),
                    "{} {room}",
                    engine.name
                );
            }
            assert_eq!(writer.compress(&sent, &mut out), Ok(len));
            assert!(out[..len] == whole);
            assert!(writer.compress(&sent[1..], &mut out).is_err());
        }
    }

    #[test]
    fn malformed_payload_is_described() {
        let reason = |payload: &[u8]| match unpack(payload, 2 * PAGE_SIZE) {
            Err(DecodeError::Corrupt { reason, .. }) => reason,
            other => panic!("{other:?}"),
        };
        let payload = |lens: [u32; 2], streams: &[u8]| {
            let [first, second] = lens.map(u32::to_be_bytes);
            [&first[..], &second, streams].concat()
        };
        // A block of one literal and a match of the rest; a block of nothing.
        let mut zeros = vec![0; 100];
        let mut engine = libdeflate::Deflate::new(1).unwrap();
        let len = engine.compress(&[0; PAGE_SIZE], &mut zeros).unwrap();
        zeros.truncate(len);
        let len = u32::try_from(len).unwrap();
        let good = payload([len; 2], &[&zeros[..], &zeros].concat());
        assert_eq!(unpack(&good, 2 * PAGE_SIZE), Ok(vec![0; 2 * PAGE_SIZE]));

        assert_eq!(reason(&good[..7]), "its table of lengths is cut short");
        assert_eq!(
            reason(&good[..good.len() - 1]),
            "its table of lengths names more bytes than there are"
        );
        assert_eq!(
            reason(&payload([4097, 0], &[0; 4097])),
            "a page is encoded in more bytes than it has"
        );
        assert_eq!(
            reason(&payload([u32::MAX; 2], &[0; 4097])),
            "a page is encoded in more bytes than it has"
        );
        assert_eq!(
            unpack(&[&good[..], &[7]].concat(), 2 * PAGE_SIZE),
            Err(DecodeError::TrailingInput {
                method: METHOD,
                left: 1,
                expected: 2 * PAGE_SIZE
            })
        );
        assert_eq!(
            reason(&payload(
                [len, len - 1],
                &[&zeros[..], &zeros[1..]].concat()
            )),
            "invalid deflate data, or cut short"
        );
        assert_eq!(
            reason(&payload([0, len], &zeros)),
            "invalid deflate data, or cut short"
        );
        assert_eq!(
            reason(&payload([len, 2], &[&zeros[..], &[3, 0]].concat())),
            "the deflate data of a page holds less than a page"
        );
        assert_eq!(
            reason(&payload(
                [len, len + 1],
                &[&zeros[..], &zeros, &[0]].concat()
            )),
            "the deflate data of a page ends before it should"
        );
        let mut more = vec![0; 100];
        let more_len = engine.compress(&[0; PAGE_SIZE + 1], &mut more).unwrap();
        let more = payload(
            [len, u32::try_from(more_len).unwrap()],
            &[&zeros[..], &more[..more_len]].concat(),
        );
        assert_eq!(
            reason(&more),
            "the deflate data of a page holds more than a page"
        );
        assert_eq!(
            unpack(&good, 2 * PAGE_SIZE - 1),
            Err(DecodeError::Corrupt {
                method: METHOD,
                reason: "it stands for pages that are not whole"
            })
        );
    }

    #[test]
    fn larger_pages_are_decoded_and_may_look_back_further() {
        let layout = Layout::new(16_384).unwrap();
        let part = noise(2);
        let page = [&part[..], &part].concat();
        let mut stream = vec![0; 16_384];
        let len = libdeflater::Compressor::new(libdeflater::CompressionLvl::new(6).unwrap())
            .deflate_compress(&page, &mut stream)
            .unwrap();
        assert!(len < 3 * PAGE_SIZE);
        let length = u32::try_from(len).unwrap().to_be_bytes();
        let payload = [&length[..], &stream[..len]].concat();
        let mut pages = vec![0; page.len()];
        let mut unpacker = Unpacker::new(layout).unwrap();
        assert_eq!(unpacker.unpack(&payload, &mut pages), Ok(()));
        assert!(pages == page);
    }
}
