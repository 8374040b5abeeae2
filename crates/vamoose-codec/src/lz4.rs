//! Method lz4: one LZ4 block per packet, between two Vamooses.
//!
//! For links that are faster than the processors that feed them. The level is LZ4's acceleration:
//! 1 finds the most, every step up makes it faster and finds less. A packet in which LZ4 finds next
//! to nothing goes raw, as method none, which its receiver need not decode.

use std::ops::RangeInclusive;

use lz4::block::{CompressionMode, compress_to_buffer, decompress_to_buffer};
use multifd::Method;

use crate::{
    DecodeError,
    engine::{Compress, CompressError, Software, Unpack, most_worth_sending},
};

/// The levels that can be set: LZ4's accelerations.
pub(crate) const LEVELS: RangeInclusive<i32> = 1..=65_537;

pub(crate) const ENGINES: &[Software] = &[Software {
    name: "lz4",
    levels: LEVELS,
    compressor: |acceleration| Ok(Box::new(Compressor { acceleration })),
}];

struct Compressor {
    acceleration: i32,
}

impl Compress for Compressor {
    /// Finds no room where too little would be saved: LZ4 stops at once then.
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let room = most_worth_sending(pages.len()).min(out.len());
        let mode = CompressionMode::FAST(self.acceleration);
        // Its only other error is an input of more than 2 GiB.
        compress_to_buffer(pages, Some(mode), false, &mut out[..room])
            .map_err(|_| CompressError::OutputFull)
    }
}

pub(crate) struct Unpacker;

impl Unpack for Unpacker {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        let method = Method::Lz4;
        let expected = pages.len();
        let room = i32::try_from(expected).map_err(|_| DecodeError::Output {
            len: expected,
            max: i32::MAX as usize,
        })?;
        let found =
            decompress_to_buffer(payload, Some(room), pages).map_err(|_| DecodeError::Corrupt {
                method,
                reason: "invalid LZ4 data, or more than the packet's pages",
            })?;
        DecodeError::check_len(method, payload.len(), found, expected)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    /// Pages of runs: of one byte, of few different bytes, of noise.
    fn pages() -> impl Strategy<Value = Vec<u8>> {
        let run = (0..3_u8, any::<u64>(), 1..40_usize).prop_map(|(kind, seed, kib)| {
            let mut state = seed;
            let mut noise = || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                state.to_be_bytes()[0]
            };
            let bytes = (0..kib * 1024).map(|_| match kind {
                0 => seed.to_be_bytes()[0],
                1 => noise() % 5,
                _ => noise(),
            });
            bytes.collect::<Vec<_>>()
        });
        vec(run, 1..6).prop_map(|runs| runs.concat())
    }

    fn encode(acceleration: i32, pages: &[u8]) -> Result<Vec<u8>, CompressError> {
        let mut compressor = (ENGINES[0].compressor)(acceleration).unwrap();
        let mut out = vec![0; 1 << 20];
        let len = compressor.compress(pages, &mut out)?;
        out.truncate(len);
        Ok(out)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn pages_arrive_or_go_raw(pages in pages(), acceleration in select(&[1, 2, 8, 100, 65_537][..])) {
            match encode(acceleration, &pages) {
                Ok(payload) => {
                    prop_assert!(payload.len() <= most_worth_sending(pages.len()));
                    let mut back = vec![0xee; pages.len()];
                    prop_assert_eq!(Unpacker.unpack(&payload, &mut back), Ok(()));
                    prop_assert!(back == pages);
                }
                Err(fault) => prop_assert_eq!(fault, CompressError::OutputFull),
            }
        }

        #[test]
        fn any_bytes_are_pages_or_an_error(payload in vec(any::<u8>(), 0..2000), len in 1..5000_usize) {
            let mut pages = vec![0; len];
            if Unpacker.unpack(&payload, &mut pages).is_ok() {
                prop_assert!(Unpacker.has_shape(&payload, len));
            }
        }
    }

    #[test]
    fn noise_goes_raw_and_text_does_not() {
        let mut state = 1_u64;
        let noise = std::iter::repeat_with(|| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state.to_be_bytes()[0]
        });
        let noise: Vec<_> = noise.take(8192).collect();
        assert_eq!(encode(1, &noise), Err(CompressError::OutputFull));
        assert!(encode(1, &b"dirty pages ".repeat(600)).unwrap().len() < 200);
    }

    #[test]
    fn more_or_fewer_pages_than_expected_are_errors() {
        let pages = b"migration".repeat(1000);
        let payload = encode(1, &pages).unwrap();
        let (method, expected) = (Method::Lz4, pages.len() + 1);
        assert_eq!(
            Unpacker.unpack(&payload, &mut vec![0; expected]),
            Err(DecodeError::TooShort {
                method,
                payload: payload.len(),
                found: pages.len(),
                expected,
            })
        );
        for len in [pages.len() - 1, 1] {
            let result = Unpacker.unpack(&payload, &mut vec![0; len]);
            assert!(matches!(result, Err(DecodeError::Corrupt { .. })), "{len}");
        }
        for cut in 0..payload.len() {
            let result = Unpacker.unpack(&payload[..cut], &mut vec![0; pages.len()]);
            assert!(result.is_err(), "{cut}");
        }
    }
}
