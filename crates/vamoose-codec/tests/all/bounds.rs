//! Decoders in C stay within the slices they are given, hostile input or not: both slices end where
//! memory that faults begins, or begin where it ends.

use multifd::{Layout, Method};
use proptest::{collection::vec, prelude::*, sample::select};
use vamoose_codec::{Decoder, Settings, encoder};

use crate::common::guarded::Guarded;
use crate::common::pages::{self, Kind};

const LAYOUT: Layout = Layout::X86;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_codec_leaves_its_slices(
        (method, level) in select(&[
            (Method::Zlib, 0),
            (Method::Zlib, 1),
            (Method::Zlib, 3),
            (Method::Zlib, 6),
            (Method::Zstd, -5),
            (Method::Zstd, 1),
            (Method::ZstdFrames, -1),
            (Method::ZstdFrames, 3),
            (Method::Qpl, 0),
            (Method::Qpl, 1),
        ][..]),
        packets in vec((select(&Kind::ALL[..]), any::<u64>(), 1..=40_usize), 1..5),
        flips in vec((0..5_usize, any::<prop::sample::Index>(), any::<u8>()), 0..3),
        extra in select(&[0, 0, 0, -5000, -1, 1, 5000_isize][..]),
        at_end in any::<bool>(),
    ) {
        let (mut input, mut output) = (Guarded::new(), Guarded::new());
        let settings = Settings::new(method, Some(level)).unwrap();
        let mut encoder = encoder(&settings, LAYOUT).unwrap();
        let mut decoder = Decoder::new(LAYOUT);
        let mut out = vec![0; LAYOUT.max_payload()];
        for (number, (kind, seed, count)) in packets.into_iter().enumerate() {
            let sent = pages::pages(kind, seed, count);
            let pages = input.slice(sent.len(), at_end);
            pages.copy_from_slice(&sent);
            let encoded = encoder.encode(pages, &mut out).unwrap();
            let (method, mut payload) = (encoded.method, encoded.payload.to_vec());
            for (_, at, bits) in flips.iter().filter(|(packet, ..)| *packet == number) {
                let at = at.index(payload.len());
                payload[at] ^= *bits;
            }
            let given = input.slice(payload.len(), at_end);
            given.copy_from_slice(&payload);
            let room = sent.len().saturating_add_signed(extra);
            if decoder.decode(method, given, output.slice(room, at_end)).is_err() {
                break;
            }
        }
    }
}
