//! Method qpl: what we write is read by zlib as well, what others write is read by us, and what none
//! should write is refused.

use flate2::{Compress, Compression, FlushCompress, Status};
use multifd::{Layout, Method};
use proptest::{collection::vec, prelude::*, sample::select};
use vamoose_codec::{DecodeError, Decoder, EncodeError, Encoder, Settings, encoder};

use crate::common::oracle::Oracle;
use crate::common::pages::{self, Kind, PAGE};

const LAYOUT: Layout = Layout::X86;
const METHOD: Method = Method::Qpl;

fn new_encoder(level: i32) -> Encoder {
    encoder(&Settings::new(METHOD, Some(level)).unwrap(), LAYOUT).unwrap()
}

fn encode(level: i32, pages: &[u8]) -> Vec<u8> {
    let mut out = vec![0; LAYOUT.max_payload()];
    let mut encoder = new_encoder(level);
    encoder.encode(pages, &mut out).unwrap().payload.to_vec()
}

fn decode(payload: &[u8], pages: usize) -> Result<Vec<u8>, DecodeError> {
    let mut decoded = vec![0xee; pages * PAGE];
    let mut decoder = Decoder::new(LAYOUT);
    decoder.decode(METHOD, payload, &mut decoded)?;
    Ok(decoded)
}

/// A packet of 1 to 128 pages, in runs of one kind; some bytes are written over here and there.
fn packet() -> impl Strategy<Value = Vec<u8>> {
    let run = (select(&Kind::ALL[..]), any::<u64>(), 1..=43_usize)
        .prop_map(|(kind, seed, count)| pages::pages(kind, seed, count));
    let writes = vec((any::<prop::sample::Index>(), any::<u8>()), 0..40);
    (vec(run, 1..=3), writes).prop_map(|(runs, writes)| {
        let mut packet = runs.concat();
        packet.truncate(LAYOUT.packet_bytes());
        for (at, byte) in writes {
            let at = at.index(packet.len());
            packet[at] = byte;
        }
        packet
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 128,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn pages_arrive_at_our_decoder_and_at_zlib(
        level in select(&[0, 0, 0, 1, 1, 3, 6, 12][..]),
        packets in vec(packet(), 1..=3),
    ) {
        let mut encoder = new_encoder(level);
        let mut decoder = Decoder::new(LAYOUT);
        let mut zlib = Oracle::new(METHOD);
        let (mut out, mut pages) = (vec![0; LAYOUT.max_payload()], Vec::new());
        for packet in &packets {
            let encoded = encoder.encode(packet, &mut out).unwrap();
            prop_assert_eq!(encoded.method, METHOD);
            for by_us in [true, false] {
                pages.clear();
                pages.resize(packet.len(), 0xee);
                if by_us {
                    decoder.decode(METHOD, encoded.payload, &mut pages).unwrap();
                } else {
                    zlib.decode(encoded.payload, &mut pages);
                }
                prop_assert!(&pages == packet, "level {level}, by us: {by_us}");
            }
        }
    }

    /// Stored, built-in and dynamic blocks, more than one of them in a page.
    #[test]
    fn pages_arrive_from_a_sender_of_any_blocks(
        level in 0..=9_u32,
        packet in packet(),
        parts in vec(1..=PAGE, 1..4),
    ) {
        let (mut table, mut streams) = (Vec::new(), Vec::new());
        for page in packet.chunks_exact(PAGE) {
            let mut stream = Vec::with_capacity(2 * PAGE);
            let mut sender = Compress::new(Compression::new(level), false);
            let mut rest = page;
            for part in &parts {
                let (now, later) = rest.split_at(*part.min(&rest.len()));
                sender.compress_vec(now, &mut stream, FlushCompress::Full).unwrap();
                rest = later;
            }
            let ended = sender.compress_vec(rest, &mut stream, FlushCompress::Finish);
            prop_assert_eq!(ended.unwrap(), Status::StreamEnd);
            let encoded = if stream.len() < PAGE { &stream[..] } else { page };
            table.extend_from_slice(&u32::try_from(encoded.len()).unwrap().to_be_bytes());
            streams.extend_from_slice(encoded);
        }
        let payload = [table, streams].concat();
        prop_assert!(decode(&payload, packet.len() / PAGE).unwrap() == packet);
    }

    /// There is no checksum, so a flipped bit may also give wrong pages.
    #[test]
    fn flipped_bits_and_bytes_do_no_harm(
        level in select(&[0, 1][..]),
        packet in packet(),
        flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        in_table in any::<bool>(),
    ) {
        let mut payload = encode(level, &packet);
        let count = packet.len() / PAGE;
        let len = if in_table { 4 * count } else { payload.len() };
        for (at, bits) in flips {
            payload[at.index(len)] ^= bits;
        }
        let _ = decode(&payload, count);
    }

    #[test]
    fn garbage_does_no_harm(
        mut payload in vec(any::<u8>(), 0..3000),
        lens in vec(0..1500_u16, 0..4),
        count in 1..=128_usize,
        fits in any::<bool>(),
    ) {
        for (entry, len) in payload.chunks_exact_mut(4).zip(&lens) {
            entry.copy_from_slice(&u32::from(*len).to_be_bytes());
        }
        let count = if fits { lens.len().max(1) } else { count };
        let total: usize = lens.iter().map(|len| usize::from(*len)).sum();
        payload.resize(4 * count + total, 0x55);
        let _ = decode(&payload, count);
    }
}

#[test]
fn every_truncation_and_every_wrong_sum_is_an_error() {
    for level in [0, 1] {
        let packet = Kind::ALL.map(|kind| pages::pages(kind, 1, 1)).concat();
        let payload = encode(level, &packet);
        assert!(decode(&payload, 4).unwrap() == packet);
        for kept in 0..payload.len() {
            assert!(decode(&payload[..kept], 4).is_err(), "cut to {kept}");
        }
        assert!(decode(&[&payload[..], &[0]].concat(), 4).is_err());
        for pages in [1, 3, 5, 128] {
            assert!(decode(&payload, pages).is_err(), "{pages} pages");
        }
        for entry in 0..4 {
            for change in [-1, 1] {
                let mut wrong = payload.clone();
                let length = &mut wrong[4 * entry..][..4];
                let len = u32::from_be_bytes((*length).try_into().unwrap());
                let len = len.wrapping_add_signed(change);
                length.copy_from_slice(&len.to_be_bytes());
                assert!(decode(&wrong, 4).is_err(), "page {entry} {change}");
            }
            // The sum stays right, two neighbours do not.
            let mut wrong = payload.clone();
            let mut len = [0, 1].map(|next| {
                let at = 4 * ((entry + next) % 4);
                u32::from_be_bytes(payload[at..][..4].try_into().unwrap())
            });
            len[0] = len[0].wrapping_sub(1);
            len[1] += 1;
            for (next, len) in [0, 1].into_iter().zip(len) {
                let at = 4 * ((entry + next) % 4);
                wrong[at..][..4].copy_from_slice(&len.to_be_bytes());
            }
            assert!(decode(&wrong, 4).is_err(), "pages {entry} and the next");
        }
    }
}

#[test]
fn levels_act_and_the_default_is_the_first_dense_one() {
    let text = pages::pages(Kind::Text, 1, 64);
    let lens = [0, 1, 4, 6, 9, 12].map(|level| encode(level, &text).len());
    assert!(lens[1..].is_sorted_by(|low, high| low > high), "{lens:?}");
    assert!(lens[0] >= lens[1], "{lens:?}");
    let settings = Settings::new(METHOD, None).unwrap();
    assert_eq!(settings.level(), Some(1));
    for level in [-1, 13] {
        let error = Settings::new(METHOD, Some(level)).unwrap_err().to_string();
        assert_eq!(error, format!("qpl has no level {level}, only 0 to 12"));
    }
    let fast = if cfg!(feature = "isal") {
        "isa-l"
    } else {
        "libdeflate"
    };
    let engine = |level| Settings::new(METHOD, Some(level)).unwrap().engine();
    assert_eq!((engine(0), engine(1)), (fast, "libdeflate"));
}

#[test]
fn incompressible_pages_cost_their_length_and_no_more() {
    for level in [0, 1, 12] {
        let noise = pages::pages(Kind::Random, 1, 128);
        assert_eq!(encode(level, &noise).len(), 128 * (PAGE + 4));
    }
}

#[test]
fn only_pages_as_large_as_iaas_window_are_encoded() {
    for page_size in [1024, 2048, 8192, 16_384, 65_536] {
        let layout = Layout::new(page_size).unwrap();
        let settings = Settings::new(METHOD, None).unwrap();
        let Err(error) = encoder(&settings, layout) else {
            panic!("{page_size}");
        };
        let (page_size, only) = (layout.page_size(), 4096);
        assert_eq!(
            error,
            EncodeError::PageSize {
                method: METHOD,
                page_size,
                only
            }
        );
    }
}

#[test]
fn a_payload_without_pages_is_trailing_input() {
    assert_eq!(
        decode(&[1, 2, 3], 0),
        Err(DecodeError::TrailingInput {
            method: METHOD,
            left: 3,
            expected: 0
        })
    );
    assert_eq!(decode(&[], 0), Ok(Vec::new()));
}
