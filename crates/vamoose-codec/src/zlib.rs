//! Method zlib: one zlib stream (RFC 1950) per channel, sync-flushed after every packet.
//!
//! ```text
//!  78 01 │ deflate blocks of packet 1 … 00 00 ff ff │ blocks of packet 2 … 00 00 ff ff │ …
//!  header                               sync marker
//! ```
//!
//! The stream never ends, so its Adler-32 trailer is never sent. That is why the two bytes of
//! header are written and read here and the engines see raw deflate: none of them spends time on a
//! checksum that is never compared, and no peer reaches an engine's parser of wrappers.
//!
//! # Engines
//! Levels 1 to 3 are encoded by ISA-L at its levels 1 to 3, all others by zlib-rs. Whatever the
//! level, ISA-L decodes. Without the feature `isal` zlib-rs does everything.
//!
//! Measured by `cargo bench` in `bench/` (52 packets of 128 pages from all over the Silesia files in
//! one stream, one thread, CPU time, Zen 4 with AVX-512): MB/s of pages encoded / decoded, and ratio.
//!
//! | level | ISA-L              | zlib-rs            |
//! |-------|--------------------|--------------------|
//! | 0     | –                  | copies             |
//! | 1     | 763 / 1214 / 3.455 | 364 / 880 / 2.746  |
//! | 2     | 738 / 1249 / 3.544 | 220 / 861 / 3.582  |
//! | 3     | 459 / 1343 / 3.610 | 178 / 940 / 3.781  |
//! | 6     | – / 1386 / –       | 100 / 960 / 4.023  |
//!
//! So ISA-L is not only faster at level 1, it is also smaller. Its level 2 costs 3 % of the speed
//! for 3 % of ratio and has the ratio of zlib-rs's at three times the speed. Level 3 is the weakest
//! step: it pays less than the next one up, but 2.6 times the speed for 4.5 % of ratio is what a
//! live migration wants, and each level still compresses better than the one below it: raising the level
//! never gives more bytes. A larger or smaller level buffer than ISA-L advises changes
//! ratios by 0.3 % and is not faster.
//!
//! ISA-L keeps 421 KiB per encoding and 86 KiB per decoding channel.

use std::ops::RangeInclusive;

use multifd::Method;

use crate::{
    DecodeError,
    engine::{Compress, CompressError, Software, Unpack},
    stream::{Stream, unpack},
};

mod pure;

#[cfg(feature = "isal")]
use crate::ffi::isal;

pub(crate) const LEVELS: RangeInclusive<i32> = 0..=9;

/// The engines, the better one first.
pub(crate) const ENGINES: &[Software] = &[
    #[cfg(feature = "isal")]
    Software {
        name: isal::NAME,
        levels: 1..=3,
        compressor: |level| {
            let level = isal::Level::of_zlib(level)?;
            Ok(Box::new(WithHeader::new(isal::Deflate::new(level))))
        },
    },
    Software {
        name: pure::NAME,
        levels: LEVELS,
        compressor: |level| Ok(Box::new(WithHeader::new(pure::Deflate::new(level)))),
    },
];

/// Deflate, 32 KiB window, no dictionary. The two bits about the level are informative only; they
/// mean "fastest", as zlib's level 1 does.
const HEADER: [u8; 2] = [0x78, 0x01];

/// Puts the zlib header before a raw deflate stream.
struct WithHeader<E> {
    engine: E,
    written: bool,
}

impl<E> WithHeader<E> {
    fn new(engine: E) -> Self {
        Self {
            engine,
            written: false,
        }
    }
}

impl<E: Compress> Compress for WithHeader<E> {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        if self.written {
            return self.engine.compress(pages, out);
        }
        let (header, rest) = out
            .split_first_chunk_mut()
            .ok_or(CompressError::OutputFull)?;
        *header = HEADER;
        self.written = true;
        Ok(HEADER.len() + self.engine.compress(pages, rest)?)
    }
}

#[cfg(feature = "isal")]
type Engine = isal::Inflate;
#[cfg(not(feature = "isal"))]
type Engine = pure::Inflate;

/// The decoding side of a channel.
pub(crate) struct Unpacker<I = Engine> {
    inflate: I,
    header_read: bool,
}

impl Unpacker {
    pub(crate) fn new() -> Self {
        Self::by(Engine::new())
    }
}

impl<I: Stream> Unpacker<I> {
    fn by(inflate: I) -> Self {
        Self {
            inflate,
            header_read: false,
        }
    }

    /// Bytes of header before the raw deflate data in `payload`.
    fn head(&mut self, payload: &[u8]) -> Result<usize, &'static str> {
        if self.header_read {
            return Ok(0);
        }
        // The first packet has pages, so it holds the whole header and more.
        let header = payload.first_chunk().ok_or("the header is cut short")?;
        check_header(*header)?;
        self.header_read = true;
        Ok(header.len())
    }
}

impl<I: Stream> Unpack for Unpacker<I> {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        let method = Method::Zlib;
        let head = self.head(payload);
        let head = head.map_err(|reason| DecodeError::Corrupt { method, reason })?;
        unpack(method, &mut self.inflate, payload, head, pages)
    }
}

/// Checks a header by RFC 1950; windows smaller than ours are fine.
fn check_header([cmf, flg]: [u8; 2]) -> Result<(), &'static str> {
    if cmf & 0x0f != 8 {
        return Err("the header names another method than deflate");
    }
    if cmf >> 4 > 7 {
        return Err("the header asks for a window of more than 32 KiB");
    }
    if !u16::from_be_bytes([cmf, flg]).is_multiple_of(31) {
        return Err("the header's check bits are wrong");
    }
    if flg & 0x20 != 0 {
        return Err("the header asks for a preset dictionary");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::Step;

    #[test]
    fn only_headers_of_rfc_1950_without_dictionary_are_taken() {
        let taken = (0..=u16::MAX)
            .filter(|header| check_header(header.to_be_bytes()).is_ok())
            .count();
        // 8 windows x 4 levels: the check bits leave one header each.
        assert_eq!(taken, 32);
        for header in [
            HEADER,
            [0x78, 0x5e],
            [0x78, 0x9c],
            [0x78, 0xda],
            [0x18, 0x19],
        ] {
            assert_eq!(check_header(header), Ok(()), "{header:x?}");
        }
    }

    #[test]
    fn every_engine_reads_what_every_engine_writes() {
        // Changes from page to page, and takes up what the page before had.
        let page = |number: usize| -> Vec<u8> {
            let bytes = (0..4096 * (1 + number % 20)).map(|at| at * at / (7 + number) + number);
            bytes.map(|byte| byte.to_le_bytes()[0]).collect()
        };
        for level in LEVELS {
            for engine in ENGINES
                .iter()
                .filter(|engine| engine.levels.contains(&level))
            {
                let mut writer = (engine.compressor)(level).unwrap();
                let mut readers: [Box<dyn Stream>; 2] =
                    [Box::new(Engine::new()), Box::new(pure::Inflate::new())];
                for number in 0..40 {
                    let packet = page(number);
                    let mut out = vec![0; 1 << 20];
                    let len = writer.compress(&packet, &mut out).unwrap();
                    let header = if number == 0 { HEADER.len() } else { 0 };
                    let payload = &out[header..len];
                    for (index, reader) in readers.iter_mut().enumerate() {
                        let mut pages = vec![0xee; packet.len()];
                        read(reader.as_mut(), payload, &mut pages);
                        assert!(
                            pages == packet,
                            "{} level {level} packet {number} by reader {index}",
                            engine.name
                        );
                    }
                }
            }
        }
    }

    /// Steps of every size, until the payload is used up.
    fn read(reader: &mut dyn Stream, payload: &[u8], pages: &mut [u8]) {
        let (mut input, mut found, mut size) = (payload, 0, 1);
        while !input.is_empty() {
            let given = &input[..input.len().min(size + 1)];
            let room = (pages.len() - found).min(size);
            let mut spare = [0];
            let output = if room == 0 {
                &mut spare[..]
            } else {
                &mut pages[found..][..room]
            };
            let step = reader.step(given, output).unwrap();
            assert!(room > 0 || step.produced == 0, "more than the packet");
            input = &input[step.consumed..];
            found += step.produced;
            size = size * 5 / 3 + 1;
        }
        // What the engine may still hold.
        while found < pages.len() {
            let step = reader.step(&[], &mut pages[found..]).unwrap();
            assert!(step.produced > 0, "pages missing");
            found += step.produced;
        }
    }

    /// A stream whose steps are given.
    struct Scripted(Vec<Result<Step, &'static str>>);

    impl Stream for Scripted {
        fn step(&mut self, _input: &[u8], _output: &mut [u8]) -> Result<Step, &'static str> {
            self.0.remove(0)
        }
    }

    fn step(consumed: usize, produced: usize) -> Result<Step, &'static str> {
        Ok(Step {
            consumed,
            produced,
            ended: false,
        })
    }

    fn run(steps: &[Result<Step, &'static str>]) -> Result<(), DecodeError> {
        let mut unpacker = Unpacker {
            inflate: Scripted(steps.to_vec()),
            header_read: true,
        };
        let result = unpacker.unpack(&[0; 10], &mut [0; 4096]);
        let left = unpacker.inflate.0.len();
        assert!(left == 0, "{left} steps left");
        result
    }

    #[test]
    fn the_flush_after_the_last_page_is_fed_to_the_stream() {
        assert_eq!(
            run(&[step(3, 96), step(2, 4000), step(4, 0), step(1, 0)]),
            Ok(())
        );
        assert_eq!(run(&[step(10, 4096), step(0, 0)]), Ok(()));
    }

    #[test]
    fn every_other_outcome_has_its_own_error() {
        let (method, payload, expected) = (Method::Zlib, 10, 4096);
        let ended = Ok(Step {
            consumed: 10,
            produced: 4096,
            ended: true,
        });
        for (steps, error) in [
            (
                &[step(10, 4095), step(0, 0)][..],
                DecodeError::TooShort {
                    method,
                    payload,
                    found: 4095,
                    expected,
                },
            ),
            (
                &[step(5, 4096), step(5, 1)],
                DecodeError::TooLong {
                    method,
                    payload,
                    expected,
                },
            ),
            (
                &[step(5, 4096), step(1, 0), step(0, 0)],
                DecodeError::TrailingInput {
                    method,
                    left: 4,
                    expected,
                },
            ),
            (
                &[step(5, 1), step(0, 0)],
                DecodeError::Corrupt {
                    method,
                    reason: "decoding makes no progress",
                },
            ),
            (&[ended], DecodeError::Ended { method }),
            (
                &[Err("bad block")],
                DecodeError::Corrupt {
                    method,
                    reason: "bad block",
                },
            ),
        ] {
            assert_eq!(run(steps), Err(error));
        }
    }
}
