//! Payloads that no correct peer sends: an error that states why, never a panic, never a byte
//! outside the slices (for the latter see `bounds.rs`).

use flate2::{Compress, Compression, FlushCompress};
use multifd::{Layout, Method};
use proptest::{collection::vec, prelude::*, sample::select};
use vamoose_codec::{DecodeError, Decoder, Settings, encoder};
use zstd_safe::{CCtx, InBuffer, OutBuffer, zstd_sys::ZSTD_EndDirective};

use crate::common::pages::{self, Kind, PAGE};

const LAYOUT: Layout = Layout::X86;
const STREAMS: [Method; 2] = [Method::Zlib, Method::Zstd];

/// Payloads of a packet of 8 pages for each kind.
fn payloads(method: Method, level: i32) -> Vec<Vec<u8>> {
    let settings = Settings::new(method, Some(level)).unwrap();
    let mut encoder = encoder(&settings, LAYOUT).unwrap();
    let mut out = vec![0; LAYOUT.max_payload()];
    Kind::ALL
        .map(|kind| {
            encoder
                .encode(&pages::pages(kind, 1, 8), &mut out)
                .unwrap()
                .payload
                .to_vec()
        })
        .to_vec()
}

/// Decodes packets of 8 pages until one fails.
fn decode(method: Method, payloads: &[Vec<u8>]) -> Result<(), DecodeError> {
    let mut decoder = Decoder::new(LAYOUT);
    let mut pages = vec![0; 8 * PAGE];
    for payload in payloads {
        if let Err(error) = decoder.decode(method, payload, &mut pages) {
            let again = decoder.decode(method, payload, &mut pages);
            assert_eq!(again, Err(DecodeError::AfterError));
            return Err(error);
        }
    }
    Ok(())
}

#[test]
fn a_payload_cut_short_is_an_error_by_the_next_packet_at_the_latest() {
    for method in STREAMS {
        let whole = payloads(method, 1);
        assert_eq!(decode(method, &whole), Ok(()));
        for packet in 0..2 {
            let len = whole[packet].len();
            for kept in (0..64).chain((64..len).step_by(97)).chain(len - 12..len) {
                let mut cut = whole.clone();
                cut[packet].truncate(kept);
                // A zlib stream lacks nothing without an empty block of its own bytes.
                let harmless = whole[packet][kept..] == [0, 0, 0, 0xff, 0xff];
                assert!(
                    decode(method, &cut).is_err() || harmless,
                    "{method} packet {packet} cut to {kept} of {len} bytes"
                );
            }
        }
    }
}

#[test]
fn an_empty_payload_is_too_short() {
    let (found, expected, payload) = (0, 8 * PAGE, 0);
    for method in STREAMS {
        let mut cut = payloads(method, 1);
        cut[1].clear();
        assert_eq!(
            decode(method, &cut),
            Err(DecodeError::TooShort {
                method,
                payload,
                found,
                expected
            })
        );
        assert!(decode(method, &[vec![]]).is_err());
    }
}

#[test]
fn too_little_and_too_much_are_told_apart() {
    for method in STREAMS {
        let whole = payloads(method, 1);
        let payload = whole[0].len();
        for pages in [1, 7, 9, 128] {
            let expected = pages * PAGE;
            let error = Decoder::new(LAYOUT)
                .decode(method, &whole[0], &mut vec![0; expected])
                .unwrap_err();
            let right = match pages {
                ..8 => DecodeError::TooLong {
                    method,
                    payload,
                    expected,
                },
                _ => DecodeError::TooShort {
                    method,
                    payload,
                    found: 8 * PAGE,
                    expected,
                },
            };
            assert_eq!(error, right);
        }
        // By a single byte, and with two packets in one.
        for expected in [8 * PAGE - 1, 8 * PAGE + 1] {
            assert!(
                Decoder::new(LAYOUT)
                    .decode(method, &whole[0], &mut vec![0; expected])
                    .is_err()
            );
        }
        let both = whole[..2].concat();
        assert_eq!(
            decode(method, std::slice::from_ref(&both)),
            Err(DecodeError::TooLong {
                method,
                payload: both.len(),
                expected: 8 * PAGE
            })
        );
    }
}

#[test]
fn a_payload_without_pages_is_trailing_input() {
    for method in STREAMS {
        assert_eq!(
            Decoder::new(LAYOUT).decode(method, &[1, 2, 3], &mut []),
            Err(DecodeError::TrailingInput {
                method,
                left: 3,
                expected: 0
            })
        );
    }
}

#[test]
fn an_ended_stream_is_refused_wherever_it_ends() {
    let text = pages::pages(Kind::Text, 1, 8);
    let room = || Vec::with_capacity(LAYOUT.max_payload());

    let mut zlib = Compress::new(Compression::new(1), true);
    let (mut first, mut second) = (room(), room());
    zlib.compress_vec(&text, &mut first, FlushCompress::Sync)
        .unwrap();
    zlib.compress_vec(&text, &mut second, FlushCompress::Finish)
        .unwrap();

    let mut zstd = CCtx::create();
    let mut ended = room();
    let mut output = OutBuffer::around(&mut ended);
    let mut input = InBuffer::around(&text);
    let left = zstd.compress_stream2(&mut output, &mut input, ZSTD_EndDirective::ZSTD_e_end);
    assert_eq!(left, Ok(0));

    for (method, stream) in [
        (Method::Zlib, vec![first, second.clone()]),
        (Method::Zlib, vec![[&[0x78, 0x01][..], &[3, 0]].concat()]),
        (Method::Zstd, vec![ended]),
        // A skippable frame.
        (
            Method::Zstd,
            vec![vec![0x50, 0x2a, 0x4d, 0x18, 1, 0, 0, 0, 7]],
        ),
    ] {
        assert_eq!(decode(method, &stream), Err(DecodeError::Ended { method }));
    }
}

#[test]
fn a_zstd_window_beyond_stock_qemus_is_refused() {
    for (window_log, taken) in [(27_u8, true), (28, false)] {
        // Magic, no flags, window descriptor, one raw block of a page.
        let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0, (window_log - 10) << 3];
        frame.extend_from_slice(&(4096_u32 << 3).to_le_bytes()[..3]);
        frame.extend_from_slice(&[7; 4096]);
        let result = Decoder::new(LAYOUT).decode(Method::Zstd, &frame, &mut [0; 4096]);
        assert_eq!(result.is_ok(), taken, "window log {window_log}: {result:?}");
    }
}

#[test]
fn bad_zlib_headers_and_blocks_are_named() {
    let reason =
        |payload: &[u8]| match Decoder::new(LAYOUT).decode(Method::Zlib, payload, &mut [0; 4096]) {
            Err(DecodeError::Corrupt { reason, .. }) => reason,
            other => panic!("{payload:x?}: {other:?}"),
        };
    assert_eq!(reason(&[0x78]), "the header is cut short");
    assert_eq!(
        reason(&[0x79, 0x01]),
        "the header names another method than deflate"
    );
    assert_eq!(
        reason(&[0x88, 0x1c]),
        "the header asks for a window of more than 32 KiB"
    );
    assert_eq!(reason(&[0x78, 0x02]), "the header's check bits are wrong");
    assert_eq!(
        reason(&[0x78, 0x20]),
        "the header asks for a preset dictionary"
    );
    // Block type 3; a stored block whose length and its complement disagree; a match that reaches
    // back to before the stream.
    for blocks in [
        &[7, 0, 0, 0, 0, 0][..],
        &[0, 1, 0, 0, 0, 0],
        &[0x03, 0x02, 0, 0, 0, 0],
    ] {
        reason(&[&[0x78, 0x01], blocks].concat());
    }
}

fn garbage() -> impl Strategy<Value = Vec<u8>> {
    const STARTS: [&[u8]; 3] = [&[], &[0x78, 0x01], &[0x28, 0xb5, 0x2f, 0xfd, 0, 0x48]];
    let start = select(&STARTS[..]);
    (start, vec(any::<u8>(), 0..3000)).prop_map(|(start, rest)| [start, &rest].concat())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 512,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Neither method has a checksum, so a flipped bit may also give wrong pages.
    #[test]
    fn flipped_bits_do_no_harm(
        method in select(&STREAMS[..]),
        level in select(&[0, 1, 6][..]),
        flips in vec((0..4_usize, any::<prop::sample::Index>(), 0..8), 1..4),
    ) {
        let mut payloads = payloads(method, level);
        for (packet, at, bit) in flips {
            let at = at.index(payloads[packet].len());
            payloads[packet][at] ^= 1_u8 << bit;
        }
        let _ = decode(method, &payloads);
    }

    #[test]
    fn garbage_does_no_harm(
        method in select(&STREAMS[..]),
        payload in garbage(),
        after in 0..3_usize,
        len in 1..=20_000_usize,
    ) {
        let mut decoder = Decoder::new(LAYOUT);
        for good in &payloads(method, 1)[..after] {
            decoder.decode(method, good, &mut vec![0; 8 * PAGE]).unwrap();
        }
        let _ = decoder.decode(method, &payload, &mut vec![0; len]);
    }
}
