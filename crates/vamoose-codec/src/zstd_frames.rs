//! Method zstd-frames: one complete zstd frame per packet, between two Vamooses.
//!
//! What zstd finds, in packets that are independent of each other: their levels may differ, and a
//! channel may have several streams. The price is the history of earlier packets: half a percent of the bytes at level 1, and
//! two at level 3 (docs/results/parts.md). A frame states how many bytes of pages it holds and has no checksum. A packet in
//! which zstd finds next to nothing is sent raw, as method none.
//!
//! # Memory
//! Both sides work from slice to slice, without a window of their own. An encoder's tables are no
//! larger than its packets, or [`MAX_WINDOW_LOG`], call for: 1 MiB up to level 2, 4 MiB up to level 6,
//! 12 MiB up to level 12 and 20 MiB above. A decoder has 0.2 MiB, whatever its peer sends.

use std::num::NonZeroU32;

use multifd::Method;
use zstd_safe::{
    CCtx, CParameter, DCtx, find_frame_compressed_size, get_dict_id_from_frame, get_error_name,
    get_frame_content_size,
};

use crate::{
    DecodeError,
    engine::{Compress, CompressError, Software, Unpack, most_worth_sending},
    ffi::zstd::NO_ROOM,
};

pub(crate) const ENGINES: &[Software] = &[Software {
    name: "zstd",
    levels: i32::MIN..=i32::MAX,
    compressor: |level| Ok(Box::new(Compressor::new(level)?)),
}];

/// Log of the largest window, and with it of the largest tables: 1 MiB, as in [`zstd`]. Only packets of
/// more than that could use more.
const MAX_WINDOW_LOG: u32 = 20;

struct Compressor {
    context: CCtx<'static>,
}

impl Compressor {
    fn new(level: i32) -> Result<Self, &'static str> {
        let mut context = CCtx::try_create().ok_or("no memory for a context")?;
        let mut set = |parameter| context.set_parameter(parameter).map_err(get_error_name);
        set(CParameter::WindowLog(MAX_WINDOW_LOG))?;
        set(CParameter::CompressionLevel(level))?;
        Ok(Self { context })
    }
}

impl Compress for Compressor {
    fn name(&self) -> &'static str {
        "zstd"
    }

    /// Finds no room where too little would be saved.
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let room = most_worth_sending(pages.len()).min(out.len());
        self.context
            .compress2(&mut out[..room], pages)
            .map_err(|code| match code {
                NO_ROOM => CompressError::OutputFull,
                code => CompressError::Refused(get_error_name(code)),
            })
    }
}

pub(crate) struct Unpacker {
    context: DCtx<'static>,
}

impl Unpacker {
    pub(crate) fn new() -> Result<Self, DecodeError> {
        let context = DCtx::try_create().ok_or(DecodeError::Engine {
            method: Method::ZstdFrames,
            reason: "no memory for a context",
        })?;
        Ok(Self { context })
    }
}

impl Unpack for Unpacker {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        check(payload, pages.len())?;
        let found = self
            .context
            .decompress(pages, payload)
            .map_err(|code| corrupt(get_error_name(code)))?;
        DecodeError::check_len(Method::ZstdFrames, payload.len(), found, pages.len())
    }
}

/// Checks that `payload` is one frame, by itself, that announces `expected` bytes: zstd would also take
/// none, several, and frames that are to be skipped.
fn check(payload: &[u8], expected: usize) -> Result<(), DecodeError> {
    if !payload.starts_with(&MAGIC) {
        return Err(corrupt("it does not start with a zstd frame"));
    }
    let frame =
        find_frame_compressed_size(payload).map_err(|code| corrupt(get_error_name(code)))?;
    let left = payload.len().saturating_sub(frame);
    if left > 0 {
        let method = Method::ZstdFrames;
        return Err(DecodeError::TrailingInput {
            method,
            left,
            expected,
        });
    }
    if get_dict_id_from_frame(payload).map_or(0, NonZeroU32::get) != 0 {
        return Err(corrupt("the frame asks for a dictionary"));
    }
    match get_frame_content_size(payload) {
        Ok(Some(found)) => {
            let found = usize::try_from(found).unwrap_or(usize::MAX);
            DecodeError::check_len(Method::ZstdFrames, payload.len(), found, expected)
        }
        _ => Err(corrupt("the frame does not say how much it holds")),
    }
}

/// What a frame starts with.
const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

fn corrupt(reason: &'static str) -> DecodeError {
    let method = Method::ZstdFrames;
    DecodeError::Corrupt { method, reason }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    const METHOD: Method = Method::ZstdFrames;

    /// Pages of runs: of one byte, of few different bytes, of noise.
    fn pages() -> impl Strategy<Value = Vec<u8>> {
        let run = (0..3_u8, any::<u64>(), 1..40_usize).prop_map(|(kind, seed, kib)| {
            let mut noise = noise(seed);
            let bytes = (0..kib * 1024).map(|_| match kind {
                0 => seed.to_be_bytes()[0],
                1 => noise.next().unwrap() % 5,
                _ => noise.next().unwrap(),
            });
            bytes.collect::<Vec<_>>()
        });
        vec(run, 1..6).prop_map(|runs| runs.concat())
    }

    fn noise(mut state: u64) -> impl Iterator<Item = u8> {
        std::iter::repeat_with(move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state.to_be_bytes()[0]
        })
    }

    fn encode(compressor: &mut Compressor, pages: &[u8]) -> Result<Vec<u8>, CompressError> {
        let mut out = vec![0; 1 << 20];
        let len = compressor.compress(pages, &mut out)?;
        out.truncate(len);
        Ok(out)
    }

    fn frame(pages: &[u8]) -> Vec<u8> {
        encode(&mut Compressor::new(1).unwrap(), pages).unwrap()
    }

    fn unpack(payload: &[u8], len: usize) -> Result<Vec<u8>, DecodeError> {
        let mut pages = vec![0xee; len];
        let mut unpacker = Unpacker::new().unwrap();
        unpacker.unpack(payload, &mut pages).map(|()| pages)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// One decoder, and another level for each packet.
        #[test]
        fn pages_arrive_or_go_raw(
            packets in vec((pages(), select(&[-100, -5, -1, 1, 3, 6, 9, 19][..])), 1..4),
        ) {
            let mut unpacker = Unpacker::new().unwrap();
            for (pages, level) in packets {
                let mut compressor = Compressor::new(level).unwrap();
                match encode(&mut compressor, &pages) {
                    Ok(payload) => {
                        prop_assert!(payload.len() <= most_worth_sending(pages.len()));
                        let mut back = vec![0xee; pages.len()];
                        prop_assert_eq!(unpacker.unpack(&payload, &mut back), Ok(()));
                        prop_assert!(back == pages);
                    }
                    Err(fault) => prop_assert_eq!(fault, CompressError::OutputFull),
                }
            }
        }

        #[test]
        fn any_bytes_are_pages_or_an_error(
            start in select(vec![vec![], MAGIC.to_vec(), [&MAGIC[..], &[0x60]].concat()]),
            rest in vec(any::<u8>(), 0..2000),
            len in 1..5000_usize,
        ) {
            let _ = unpack(&[start, rest].concat(), len);
        }

        #[test]
        fn flipped_bits_do_no_harm(
            pages in pages(),
            flips in vec((any::<prop::sample::Index>(), 0..8), 1..4),
        ) {
            if let Ok(mut payload) = encode(&mut Compressor::new(3).unwrap(), &pages) {
                for (at, bit) in flips {
                    let at = at.index(payload.len());
                    payload[at] ^= 1_u8 << bit;
                }
                let _ = unpack(&payload, pages.len());
            }
        }
    }

    #[test]
    fn noise_goes_raw_and_text_does_not() {
        let mut compressor = Compressor::new(1).unwrap();
        let noise: Vec<_> = noise(1).take(8192).collect();
        assert_eq!(
            encode(&mut compressor, &noise),
            Err(CompressError::OutputFull)
        );
        let text = b"dirty pages ".repeat(600);
        assert!(encode(&mut compressor, &text).unwrap().len() < 200);
    }

    #[test]
    fn more_or_fewer_pages_than_expected_are_errors() {
        let pages = b"migration".repeat(1000);
        let payload = frame(&pages);
        assert_eq!(
            unpack(&payload, pages.len() + 1),
            Err(DecodeError::TooShort {
                method: METHOD,
                payload: payload.len(),
                found: pages.len(),
                expected: pages.len() + 1,
            })
        );
        for len in [pages.len() - 1, 1] {
            assert_eq!(
                unpack(&payload, len),
                Err(DecodeError::TooLong {
                    method: METHOD,
                    payload: payload.len(),
                    expected: len,
                })
            );
        }
        for cut in 0..payload.len() {
            assert!(unpack(&payload[..cut], pages.len()).is_err(), "{cut}");
        }
    }

    /// A frame that lies about what it holds is found out by decoding it.
    #[test]
    fn the_announced_size_is_not_believed() {
        let pages = b"downtime".repeat(512);
        let payload = frame(&pages);
        // One segment, a size of two bytes from 256 on.
        assert_eq!(payload[4] & 0xe0, 0x60);
        for (announced, expected) in [(4097_u16, 4097), (4095, 4095), (256, 256)] {
            let mut lie = payload.clone();
            lie[5..7].copy_from_slice(&(announced - 256).to_le_bytes());
            let error = unpack(&lie, expected).unwrap_err();
            assert!(matches!(error, DecodeError::Corrupt { .. }), "{error}");
        }
        // Eight bytes: nearly all the memory that there could be.
        let mut lie = [&MAGIC[..], &[0xe0]].concat();
        lie.extend_from_slice(&(u64::MAX - 2).to_le_bytes());
        lie.extend_from_slice(&payload[7..]);
        let error = unpack(&lie, 4096).unwrap_err();
        assert!(matches!(error, DecodeError::TooLong { .. }), "{error}");
    }

    #[test]
    fn anything_but_one_frame_by_itself_is_refused() {
        let pages = b"page table".repeat(500);
        let payload = frame(&pages);
        let skippable = [0x50, 0x2a, 0x4d, 0x18, 1, 0, 0, 0, 7];
        let trailing = |more: &[u8]| {
            let error = DecodeError::TrailingInput {
                method: METHOD,
                left: more.len(),
                expected: pages.len(),
            };
            ([&payload, more].concat(), error)
        };
        // The same frame with an id of a dictionary, and with a window instead of its size.
        let dictionary = [&MAGIC[..], &[payload[4] | 1], &[9], &payload[5..]].concat();
        let unsized_frame = [&MAGIC[..], &[0, 0x48], &payload[7..]].concat();
        for (payload, error) in [
            trailing(&[0]),
            trailing(&payload),
            trailing(&skippable),
            (
                [&skippable[..], &payload].concat(),
                corrupt("it does not start with a zstd frame"),
            ),
            (dictionary, corrupt("the frame asks for a dictionary")),
            (
                unsized_frame,
                corrupt("the frame does not say how much it holds"),
            ),
        ] {
            assert_eq!(unpack(&payload, pages.len()), Err(error));
        }
    }

    #[test]
    fn memory_is_what_the_module_says() {
        for (levels, most) in [
            (-9..=-1, 1),
            (1..=2, 1),
            (3..=6, 4),
            (7..=12, 12),
            (13..=22, 20),
        ] {
            for level in levels {
                for len in [64 << 10, 512 << 10, 4 << 20] {
                    // The high levels take minutes for anything else.
                    let pages = vec![7; len];
                    let mut compressor = Compressor::new(level).unwrap();
                    let mut out = vec![0; len];
                    let len = compressor.compress(&pages, &mut out).unwrap();
                    let size = compressor.context.sizeof();
                    assert!(size <= most << 20, "level {level}: {size} bytes");

                    let mut unpacker = Unpacker::new().unwrap();
                    let mut back = vec![0; pages.len()];
                    unpacker.unpack(&out[..len], &mut back).unwrap();
                    assert!(unpacker.context.sizeof() < 200 << 10, "level {level}");
                }
            }
        }
    }
}
