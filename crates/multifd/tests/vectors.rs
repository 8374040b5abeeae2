//! Streams recorded from stock QEMUs (`testdata/vectors`): every packet parses, and what is built
//! from the parsed packet is what QEMU sent, but for the fields that carry no meaning.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::path::Path;

use multifd::{INITIAL_LEN, Initial, Layout, Method, PRELUDE_LEN, PacketKind, Prelude, RamHeader};

const LAYOUT: Layout = Layout::X86;

struct Summary {
    normal: usize,
    zero: usize,
    syncs: usize,
    syncs_with_pages: usize,
}

fn read(file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/vectors")
        .join(file);
    let packed = std::fs::read(path).unwrap();
    let mut bytes = Vec::with_capacity(8 << 20);
    zstd_safe::decompress(&mut bytes, &packed).unwrap();
    bytes
}

fn walk(folder: &str, method: Method) -> Summary {
    let mut summary = Summary {
        normal: 0,
        zero: 0,
        syncs: 0,
        syncs_with_pages: 0,
    };
    for channel in 0..2u8 {
        let stream = read(&format!("{folder}/channel{channel}.bin.zst"));
        let (initial, mut packets) = stream.split_first_chunk::<INITIAL_LEN>().unwrap();
        let initial = Initial::parse(initial).unwrap();
        assert_eq!(initial.channel(), channel);
        assert_eq!(initial.announced_channels(), None);
        let mut header = RamHeader::new(LAYOUT);
        while !packets.is_empty() {
            let prelude = Prelude::parse(packets.first_chunk().unwrap()).unwrap();
            assert_eq!(prelude.kind(), PacketKind::Ram);
            let (sent, payload) = packets.split_at(LAYOUT.ram_header_len());
            header.parse(prelude, &sent[PRELUDE_LEN..], LAYOUT).unwrap();
            if !header.is_empty() {
                assert_eq!(header.method, method);
                assert_eq!(header.block.as_bytes(), b"mem");
            }
            let mut built = Vec::new();
            header.write(LAYOUT, &mut built);
            // flags and pages are QEMU's to the byte.
            let offsets = header.normal_offsets().len() + header.zero_offsets().len();
            if offsets > 0 {
                assert_eq!(built[..12], sent[..12]);
                assert_eq!(built[16..20], sent[16..20]);
                assert_eq!(built[24..320], sent[24..320]);
                assert_eq!(built[320..320 + 8 * offsets], sent[320..320 + 8 * offsets]);
            }
            summary.normal += header.normal_offsets().len();
            summary.zero += header.zero_offsets().len();
            summary.syncs += usize::from(header.sync);
            summary.syncs_with_pages += usize::from(header.sync && !header.is_empty());
            packets = &payload[header.payload_len()..];
        }
    }
    summary
}

#[test]
fn qemu_10_sends_zero_pages_in_packets_and_empty_syncs() {
    for method in [
        Method::None,
        Method::Zlib,
        Method::Zstd,
        Method::Qpl,
        Method::Qatzip,
    ] {
        let summary = walk(&format!("qemu-10.0.2-{method}"), method);
        assert_eq!(summary.normal + summary.zero, 1024, "{method}");
        assert!(summary.zero > 0 && summary.syncs >= 4, "{method}");
        assert_eq!(summary.syncs_with_pages, 0, "{method}");
    }
}

#[test]
fn qemu_7_2_sends_pages_inside_syncs_and_no_zero_pages() {
    for method in [Method::None, Method::Zlib, Method::Zstd] {
        let summary = walk(&format!("qemu-7.2.22-{method}"), method);
        assert_eq!(summary.zero, 0, "{method}");
        assert!(
            summary.normal > 0 && summary.syncs_with_pages > 0,
            "{method}"
        );
    }
}
