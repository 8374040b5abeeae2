//! Whatever the pages and however they are split into packets, they arrive: at our decoder, at
//! stock ones, and from encoders that are not ours.

use flate2::{Compress, Compression, FlushCompress};
use multifd::{Layout, Method};
use proptest::{collection::vec, prelude::*, sample::select};
use vamoose_codec::{Decoder, Encoder, Settings, encoder};

use crate::common::oracle::Oracle;
use crate::common::pages::{self, Kind, PAGE};

const LAYOUT: Layout = Layout::X86;

fn new_encoder(method: Method, level: Option<i32>) -> Encoder {
    encoder(&Settings::new(method, level).unwrap(), LAYOUT).unwrap()
}

/// Up to six packets of 1 to 128 pages, in runs of one kind.
fn packets() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let run = (select(&Kind::ALL[..]), any::<u64>(), 1..=43_usize)
        .prop_map(|(kind, seed, count)| pages::pages(kind, seed, count));
    let packet = vec(run, 1..=3).prop_map(|mut runs| {
        let mut packet = runs.remove(0);
        runs.iter().for_each(|run| packet.extend_from_slice(run));
        packet.truncate(LAYOUT.packet_bytes());
        packet
    });
    let short =
        (select(&Kind::ALL[..]), any::<u64>()).prop_map(|(kind, seed)| pages::pages(kind, seed, 1));
    vec(prop_oneof![3 => packet, 1 => short], 1..=6)
}

fn methods() -> impl Strategy<Value = (Method, Option<i32>)> {
    prop_oneof![
        Just((Method::None, None)),
        select(&[0, 1, 1, 1, 2, 3, 4, 6, 9][..]).prop_map(|level| (Method::Zlib, Some(level))),
        select(&[-100, -7, -1, 1, 1, 2, 3, 6, 12][..])
            .prop_map(|level| (Method::Zstd, Some(level))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn pages_arrive_at_our_decoder_and_at_stock_ones(
        (method, level) in methods(),
        packets in packets(),
        borrowed in any::<bool>(),
    ) {
        let mut encoder = new_encoder(method, level);
        let mut decoder = Decoder::new(LAYOUT);
        let mut oracle = Oracle::new(method);
        let (mut out, mut pages) = (vec![0; LAYOUT.max_payload()], Vec::new());
        for packet in &packets {
            let payload = encoder.encode(packet, &mut out).unwrap().payload;
            for by_us in [true, false] {
                pages.clear();
                pages.resize(packet.len(), 0xee);
                if by_us && borrowed {
                    let here = decoder.decode_borrowed(method, payload, packet.len()).unwrap();
                    pages.copy_from_slice(here);
                } else if by_us {
                    decoder.decode(method, payload, &mut pages).unwrap();
                } else {
                    oracle.decode(payload, &mut pages);
                }
                prop_assert!(&pages == packet, "{method} {level:?}, by us: {by_us}");
            }
        }
    }

    #[test]
    fn pages_arrive_from_a_sender_that_feeds_them_one_by_one(level in 0..=9_u32, packets in packets()) {
        // As QEMU does: no flush but after the last page of a packet.
        let mut sender = Compress::new(Compression::new(level), true);
        let mut decoder = Decoder::new(LAYOUT);
        for packet in &packets {
            let mut payload = Vec::with_capacity(2 * LAYOUT.packet_bytes());
            let mut fed = packet.chunks_exact(PAGE).peekable();
            while let Some(page) = fed.next() {
                let flush = if fed.peek().is_some() { FlushCompress::None } else { FlushCompress::Sync };
                let before = sender.total_in();
                sender.compress_vec(page, &mut payload, flush).unwrap();
                prop_assert_eq!(sender.total_in() - before, PAGE as u64);
            }
            let mut pages = vec![0xee; packet.len()];
            decoder.decode(Method::Zlib, &payload, &mut pages).unwrap();
            prop_assert!(&pages == packet);
        }
    }
}

#[test]
fn methods_may_change_from_packet_to_packet_and_keep_their_history() {
    let methods = [Method::Zlib, Method::Zstd, Method::None];
    let mut encoders = methods.map(|method| new_encoder(method, None));
    let mut decoder = Decoder::new(LAYOUT);
    let packet = pages::pages(Kind::Random, 1, 1);
    let (mut out, mut pages) = (vec![0; LAYOUT.max_payload()], vec![0; packet.len()]);
    for round in 0..3 {
        for (encoder, method) in encoders.iter_mut().zip(methods) {
            let payload = encoder.encode(&packet, &mut out).unwrap().payload;
            if round > 0 && method != Method::None {
                assert!(payload.len() < PAGE / 16, "{method} forgot the last round");
            }
            pages.fill(0);
            decoder.decode(method, payload, &mut pages).unwrap();
            assert!(pages == packet);
        }
    }
}

#[test]
fn a_level_that_is_set_is_the_level_that_acts() {
    let text = pages::pages(Kind::Text, 1, 128);
    let len = |method, level| {
        let mut out = vec![0; LAYOUT.max_payload()];
        let mut encoder = new_encoder(method, level);
        // Three packets: some levels differ only once there is history.
        let total: usize = (0..3)
            .map(|_| encoder.encode(&text, &mut out).unwrap().payload.len())
            .sum();
        total
    };
    for (method, levels) in [
        (Method::Zlib, &[0, 1, 2, 3, 4, 5, 7][..]),
        (Method::Zstd, &[-131_072, -20, -5, -1, 1, 3, 5, 9, 16, 22]),
    ] {
        let lens: Vec<_> = levels
            .iter()
            .map(|level| len(method, Some(*level)))
            .collect();
        assert!(
            lens.is_sorted_by(|low, high| low > high),
            "{method} levels {levels:?} give {lens:?} bytes"
        );
        assert_eq!(
            len(method, None),
            len(method, Some(1)),
            "{method}'s default is 1"
        );
    }
    assert_eq!(len(Method::Zstd, Some(0)), len(Method::Zstd, Some(3)));
}

#[test]
fn no_level_exceeds_the_receivers_buffer() {
    let incompressible = pages::pages(Kind::Random, 1, 128);
    let zstd = [-131_072, -1000, -50].into_iter().chain(-7..=22);
    for (method, level) in (0..=9)
        .map(|level| (Method::Zlib, level))
        .chain(zstd.map(|level| (Method::Zstd, level)))
    {
        let mut encoder = new_encoder(method, Some(level));
        let mut out = vec![0; LAYOUT.max_payload()];
        let payload = encoder.encode(&incompressible, &mut out).unwrap().payload;
        let growth = payload.len() as f64 / incompressible.len() as f64;
        // Far from the limit of 2: there is no input that comes near it.
        assert!(growth < 1.15, "{method} level {level}: {growth}");
    }
}

#[test]
fn zlib_payloads_begin_and_end_as_receivers_expect() {
    for level in 0..=9 {
        let mut encoder = new_encoder(Method::Zlib, Some(level));
        let mut out = vec![0; LAYOUT.max_payload()];
        for (packet, kind) in Kind::ALL.into_iter().enumerate() {
            let page = pages::pages(kind, 1, 1);
            let payload = encoder.encode(&page, &mut out).unwrap().payload;
            assert_eq!(
                payload.starts_with(&[0x78, 0x01]),
                packet == 0,
                "level {level}"
            );
            assert!(payload.ends_with(&[0, 0, 0xff, 0xff]), "level {level}");
        }
    }
}

#[test]
fn engines_are_named() {
    let engine = |method, level| Settings::new(method, level).unwrap().engine();
    assert_eq!(engine(Method::None, None), "copy");
    assert_eq!(engine(Method::Zstd, None), "zstd");
    assert_eq!(engine(Method::Zlib, Some(0)), "zlib-rs");
    assert_eq!(engine(Method::Zlib, Some(9)), "zlib-rs");
    let fast = if cfg!(feature = "isal") {
        "isa-l"
    } else {
        "zlib-rs"
    };
    assert_eq!(engine(Method::Zlib, None), fast);
}

/// Full packets, several times as many as a codec keeps for its history, which matches reach back to.
#[test]
fn history_is_kept_where_older_history_was() {
    for level in [-5, 1, 3] {
        let mut encoder = new_encoder(Method::Zstd, Some(level));
        let mut decoder = Decoder::new(LAYOUT);
        let mut oracle = Oracle::new(Method::Zstd);
        let mut out = vec![0; LAYOUT.max_payload()];
        for number in 0..24 {
            // The end of a packet is the beginning of the next one; packets differ in length.
            let kinds = [Kind::Text, Kind::Repeated, Kind::Text];
            let runs = (number..).zip(kinds).map(|(seed, kind)| {
                let count = 40 - usize::from(seed % 3 == 0);
                pages::pages(kind, seed, count)
            });
            let packet = runs.collect::<Vec<_>>().concat();
            let payload = encoder.encode(&packet, &mut out).unwrap().payload;
            let here = decoder.decode_borrowed(Method::Zstd, payload, packet.len());
            assert!(here.unwrap() == packet, "level {level} packet {number}");
            let mut pages = vec![0xee; packet.len()];
            oracle.decode(payload, &mut pages);
            assert!(pages == packet, "level {level} packet {number}, stock");
        }
    }
}

/// 32-bit counters inside the libraries wrap here.
#[test]
#[ignore = "half a minute of CPU time: 4.5 GiB through each encoder and two decoders"]
fn streams_go_on_past_four_gibibytes() {
    for (method, level) in [(Method::Zlib, 1), (Method::Zlib, 6), (Method::Zstd, -5)] {
        let mut encoder = new_encoder(method, Some(level));
        let mut decoder = Decoder::new(LAYOUT);
        let mut oracle = Oracle::new(method);
        let packets: Vec<_> = (0..7)
            .map(|seed| {
                let mut packet = pages::pages(Kind::Repeated, seed, 124);
                packet.extend(pages::pages(Kind::Text, seed, 4));
                packet
            })
            .collect();
        let (mut out, mut pages) = (
            vec![0; LAYOUT.max_payload()],
            vec![0; LAYOUT.packet_bytes()],
        );
        for number in 0..(9_usize << 29) / LAYOUT.packet_bytes() {
            let packet = &packets[number % packets.len()];
            let payload = encoder.encode(packet, &mut out).unwrap().payload;
            pages.fill(0xee);
            decoder.decode(method, payload, &mut pages).unwrap();
            assert!(&pages == packet, "{method} {level} packet {number}, by us");
            pages.fill(0xee);
            oracle.decode(payload, &mut pages);
            assert!(
                &pages == packet,
                "{method} {level} packet {number}, by a stock library"
            );
        }
    }
}
