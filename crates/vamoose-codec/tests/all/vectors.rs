//! Recorded migrations of real QEMUs: we decode them to the source's RAM, and stock decoders decode
//! what we make of them.

use std::{fs, path::PathBuf, sync::Arc};

use multifd::{INITIAL_LEN, Layout, Method, PRELUDE_LEN, Prelude, RamHeader};
use vamoose_codec::{Decoder, Health, Settings, Verify, encoder};

use crate::{common::oracle, qat::StandIn};

const LAYOUT: Layout = Layout::X86;
const RAM_LEN: usize = 4 << 20;
const FOLDERS: [(&str, Method); 8] = [
    ("qemu-10.0.2-qpl", Method::Qpl),
    ("qemu-10.0.2-qatzip", Method::Qatzip),
    ("qemu-10.0.2-none", Method::None),
    ("qemu-10.0.2-zlib", Method::Zlib),
    ("qemu-10.0.2-zstd", Method::Zstd),
    ("qemu-7.2.22-none", Method::None),
    ("qemu-7.2.22-zlib", Method::Zlib),
    ("qemu-7.2.22-zstd", Method::Zstd),
];

#[test]
fn every_recorded_migration_decodes_to_the_sources_ram() {
    let image = read("ram.img");
    for (folder, method) in FOLDERS {
        let mut decoders = [(); 2].map(|()| Decoder::new(LAYOUT));
        let mut methods_seen = 0;
        let ram = replay(folder, |channel, packet, pages| {
            assert_eq!(packet.header.method, method, "{folder}");
            methods_seen += 1;
            decoders[channel]
                .decode(packet.header.method, &packet.payload, pages)
                .unwrap_or_else(|error| panic!("{folder} channel {channel}: {error}"));
        });
        assert!(methods_seen > 0, "{folder} holds no pages");
        assert!(ram == image, "{folder}: RAM differs");
    }
}

/// The QEMU that was recorded had no QAT: hardware refuses what its QATzip wrote, and is not asked.
#[test]
fn a_qat_is_spared_what_qatzips_software_has_written() {
    let Some(stand_in) = StandIn::with(&[("strict", 1)]) else {
        return;
    };
    let engines = stand_in.choose(1, Verify::Off).unwrap();
    let health = Arc::new(Health::default());
    let mut decoders = [(); 2].map(|()| engines.decoder(LAYOUT, &health));
    let mut packets = 0;
    let ram = replay("qemu-10.0.2-qatzip", |channel, packet, pages| {
        packets += 1;
        decoders[channel]
            .decode(packet.header.method, &packet.payload, pages)
            .unwrap();
    });
    assert!(ram == read("ram.img"));
    assert_eq!(stand_in.get("qzDecompress_calls"), 0);
    let tally = health.tally();
    assert_eq!((tally.accelerated, tally.fallbacks), (0, packets));
}

#[test]
fn stock_libraries_decode_our_payloads() {
    let image = read("ram.img");
    for (method, level) in [
        (Method::None, None),
        (Method::Zlib, Some(0)),
        (Method::Zlib, Some(1)),
        (Method::Zlib, Some(2)),
        (Method::Zlib, Some(3)),
        (Method::Zlib, Some(6)),
        (Method::Zlib, Some(9)),
        (Method::Zstd, Some(-7)),
        (Method::Zstd, Some(1)),
        (Method::Zstd, Some(3)),
        (Method::Zstd, Some(12)),
        (Method::Qpl, Some(0)),
        (Method::Qpl, Some(1)),
        (Method::Qpl, Some(12)),
    ] {
        let settings = Settings::new(method, level).unwrap();
        let mut channels = [(); 2].map(|()| {
            let encoder = encoder(&settings, LAYOUT).unwrap();
            (Decoder::new(LAYOUT), encoder, oracle::Oracle::new(method))
        });
        let mut out = vec![0; LAYOUT.max_payload()];
        let ram = replay("qemu-10.0.2-zlib", |channel, packet, pages| {
            let (decoder, encoder, oracle) = &mut channels[channel];
            decoder
                .decode(packet.header.method, &packet.payload, pages)
                .unwrap();
            let sent = pages.to_vec();
            pages.fill(0xee);
            oracle.decode(encoder.encode(&sent, &mut out).unwrap().payload, pages);
        });
        assert!(ram == image, "{method} {level:?}: RAM differs");
    }
}

/// QPL writes one block per page in the format's built-in code; its IAA would do the same.
#[test]
fn our_qpl_payloads_are_much_smaller_than_qpls_own() {
    let settings = Settings::new(Method::Qpl, None).unwrap();
    let mut encoder = encoder(&settings, LAYOUT).unwrap();
    let mut decoder = Decoder::new(LAYOUT);
    let (mut theirs, mut ours) = (0, 0);
    let mut out = vec![0; LAYOUT.max_payload()];
    replay("qemu-10.0.2-qpl", |_, packet, pages| {
        let method = packet.header.method;
        decoder.decode(method, &packet.payload, pages).unwrap();
        theirs += packet.payload.len();
        ours += encoder.encode(pages, &mut out).unwrap().payload.len();
    });
    assert!(theirs * 100 >= ours * 125, "{theirs} by QPL, {ours} by us");
}

/// The destination's RAM after the migration in `folder`; `decode` is called with the channel,
/// the packet and room for its normal pages.
fn replay(folder: &str, mut decode: impl FnMut(usize, &Packet, &mut [u8])) -> Vec<u8> {
    let mut channels = [0, 1].map(|channel| packets(folder, channel).into_iter());
    let mut ram = vec![0; RAM_LEN];
    let mut pages = vec![0; LAYOUT.packet_bytes()];
    let size = LAYOUT.page_size();
    // Everything up to the SYNC of all channels comes before anything after it on any.
    while channels.iter().any(|channel| channel.len() > 0) {
        for (id, channel) in channels.iter_mut().enumerate() {
            for packet in channel {
                let normal = packet.header.normal_offsets();
                let pages = &mut pages[..normal.len() * size];
                if !pages.is_empty() {
                    decode(id, &packet, pages);
                }
                for (offset, page) in normal.iter().zip(pages.chunks_exact(size)) {
                    ram_page(&mut ram, *offset).copy_from_slice(page);
                }
                for offset in packet.header.zero_offsets() {
                    ram_page(&mut ram, *offset).fill(0);
                }
                if packet.header.sync {
                    break;
                }
            }
        }
    }
    ram
}

fn ram_page(ram: &mut [u8], offset: u64) -> &mut [u8] {
    &mut ram[usize::try_from(offset).unwrap()..][..LAYOUT.page_size()]
}

struct Packet {
    header: RamHeader,
    payload: Vec<u8>,
}

fn packets(folder: &str, channel: usize) -> Vec<Packet> {
    let stream = read(&format!("{folder}/channel{channel}.bin"));
    let mut rest = &stream[INITIAL_LEN..];
    let mut take = |len: usize| {
        let (taken, left) = rest.split_at(len);
        rest = left;
        taken
    };
    let mut packets = Vec::new();
    let mut left = stream.len() - INITIAL_LEN;
    while left > 0 {
        let prelude = Prelude::parse(take(PRELUDE_LEN).try_into().unwrap()).unwrap();
        let mut header = RamHeader::new(LAYOUT);
        let header_rest = take(LAYOUT.ram_header_len() - PRELUDE_LEN);
        header.parse(prelude, header_rest, LAYOUT).unwrap();
        let payload = take(header.payload_len()).to_vec();
        left -= LAYOUT.ram_header_len() + payload.len();
        packets.push(Packet { header, payload });
    }
    packets
}

/// A file of the vectors, without its `.zst`.
fn read(name: &str) -> Vec<u8> {
    let vectors = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/vectors");
    let path = vectors.join(format!("{name}.zst"));
    let packed = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut plain = Vec::with_capacity(16 << 20);
    zstd_safe::decompress(&mut plain, &packed).unwrap();
    plain
}
