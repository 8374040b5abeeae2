//! Writes `seeds/TARGET/`: small inputs to start from, made of what stock QEMUs sent
//! (`testdata/vectors`): headers as they are, pages re-encoded a few at a time, as whole packets
//! would be too long to mutate well.
//!
//! `cargo run --manifest-path fuzz/Cargo.toml --example seeds`

use std::{fs, path::Path};

use handover::{
    AttemptId, ConnectionKind, DestinationMessage, Details, Incarnation, Preamble, Prepare,
    SourceMessage, encode as line, to_details,
};
use multifd::{INITIAL_LEN, Layout, Method, PRELUDE_LEN, Prelude, RamHeader};
use vamoose_codec::{
    Settings, encoder,
    shared::{Reference, Table},
};
use vamoose_fuzz::{LAYOUT, write_packet};
use vamoose_live::protocol::{BlockShape, PrepareDetails};

const FOLDERS: [&str; 8] = [
    "qemu-10.0.2-none",
    "qemu-10.0.2-zlib",
    "qemu-10.0.2-zstd",
    "qemu-10.0.2-qpl",
    "qemu-10.0.2-qatzip",
    "qemu-7.2.22-none",
    "qemu-7.2.22-zlib",
    "qemu-7.2.22-zstd",
];

fn main() {
    headers();
    decoders();
    round_trips();
    channels();
    page_stores();
    conversations();
}

/// The introduction and every differing sort of packet of each recording, after a byte for 4 KiB
/// pages. A header's empty tail is left out: the target fills it up.
fn headers() {
    for folder in FOLDERS {
        let stream = read(&format!("{folder}/channel1.bin.zst"));
        let (initial, mut packets) = stream.split_at(INITIAL_LEN);
        seed(
            "packet",
            &format!("{folder}-initial"),
            &[&[2], initial].concat(),
        );
        let mut header = RamHeader::new(LAYOUT);
        let mut seen = Vec::new();
        while let Some((prelude, rest)) = packets.split_first_chunk::<PRELUDE_LEN>() {
            let prelude = Prelude::parse(prelude).expect("QEMU's");
            let (table, rest) = rest.split_at(LAYOUT.ram_header_len() - PRELUDE_LEN);
            header.parse(prelude, table, LAYOUT).expect("QEMU's");
            let sort = (
                header.sync,
                header.normal_offsets().is_empty(),
                header.zero_offsets().is_empty(),
            );
            if !seen.contains(&sort) {
                let bytes = &packets[..LAYOUT.ram_header_len()];
                let used = bytes.iter().rposition(|byte| *byte != 0).unwrap_or(0) + 1;
                let name = format!("{folder}-{}", seen.len());
                seed("packet", &name, &[&[2], &bytes[..used]].concat());
                seen.push(sort);
            }
            packets = &rest[header.payload_len()..];
        }
    }
    let device = device_state(b"");
    seed("packet", "device-state", &[&[2], &device[..]].concat());
}

fn decoders() {
    for (target, method, levels) in [
        ("zlib_decoder", Method::Zlib, &[0, 1, 6][..]),
        ("zstd_decoder", Method::Zstd, &[-5, 1, 9]),
        ("lz4_decoder", Method::Lz4, &[1, 8]),
        ("zstd_frames_decoder", Method::ZstdFrames, &[-5, 1, 9]),
        ("qpl_decoder", Method::Qpl, &[0, 1]),
        ("qatzip_decoder", Method::Qatzip, &[1, 4]),
    ] {
        for level in levels {
            let settings = Settings::new(method, Some(*level)).expect("a level");
            let mut encoder = encoder(&settings, LAYOUT).expect("memory");
            let (mut input, mut out) = (Vec::new(), vec![0; LAYOUT.max_payload()]);
            if method == Method::Qatzip {
                // Packets as they are.
                input.push(0);
            }
            for pages in samples() {
                let payload = encoder.encode(&pages, &mut out).expect("encodable").payload;
                if payload.len() < 5000 {
                    write_packet(pages.len() / LAYOUT.page_size(), payload, &mut input);
                } else {
                    // Stored blocks: the start will do.
                    write_packet(
                        pages.len() / LAYOUT.page_size(),
                        &payload[..3000],
                        &mut input,
                    );
                    break;
                }
            }
            seed(target, &format!("level{level}"), &input);
        }
    }
}

/// Bytes that choose methods, levels and contents; the fuzzer does the rest.
fn round_trips() {
    let sample = &samples()[0];
    for (index, chunk) in sample.chunks(512).take(8).enumerate() {
        seed("round_trip", &format!("{index}"), chunk);
    }
}

/// SYNC, pages, SYNC with pages, device state, SYNC, for each method.
fn channels() {
    for method in Method::ALL {
        if vamoose_codec::info(method).is_none() {
            continue;
        }
        let settings = Settings::new(method, None).expect("a default level");
        let mut encoder = encoder(&settings, LAYOUT).expect("memory");
        let mut input = ram(&[], &[], Method::None, &[], true);
        let mut out = vec![0; LAYOUT.max_payload()];
        for (pages, sync) in samples().iter().take(2).zip([false, true]) {
            let pages = &pages[..LAYOUT.page_size()];
            let encoded = encoder.encode(pages, &mut out).expect("encodable");
            let header = (&[0x5000][..], &[0x7000][..]);
            input.extend(ram(
                header.0,
                header.1,
                encoded.method,
                encoded.payload,
                sync,
            ));
        }
        input.extend(device_state(b"state"));
        input.extend(ram(&[], &[], Method::None, &[], true));
        seed("channel", method.name(), &input);
    }
}

/// A page, and a reference to it; keys, a list and a verdict.
fn page_stores() {
    let page = &samples()[0][..LAYOUT.page_size()];
    let settings = Settings::new(Method::ZstdFrames, None).expect("a default level");
    let (mut encoder, mut out) = (encoder(&settings, LAYOUT), vec![0; LAYOUT.max_payload()]);
    let encoder = encoder.as_mut().expect("memory");
    let encoded = encoder.encode(page, &mut out).expect("encodable");
    let with_table = |method, pages: &[u8], references| {
        let fingerprints = vec![7];
        let table = Table {
            fingerprints,
            references,
        };
        let mut payload = pages.to_vec();
        payload.resize(pages.len() + table.len(), 0);
        assert!(table.write(method, &mut payload[pages.len()..]));
        ram(&[0x5000], &[], Method::Shared, &payload, false)
    };
    let reference = Reference {
        page: 0,
        hash: [9; 16],
    };
    let packets = [
        with_table(encoded.method, encoded.payload, Vec::new()),
        with_table(Method::None, &[], vec![reference]),
    ];
    seed("page_store", "packets", &packets.concat());
    let keys = [&[1, 0, 48][..], &[7; 48]].concat();
    let (list, verdict) = (&[2, 0, 1, 0, 0, 0, 7][..], &[3, 0, 1, 0, 0][..]);
    seed("page_store", "way-back", &[&keys, list, verdict].concat());
}

/// Both halves of a migration's control connection, and a source that has given up.
fn conversations() {
    let details = PrepareDetails {
        blocks: vec![BlockShape {
            name: "ram".to_owned(),
            len: 1 << 30,
        }],
        page_size: 4096,
        packet_bytes: 512 << 10,
        channels: 2,
        settle_ms: 60_000,
        post_copy: false,
        description: Vec::new(),
    };
    let (kind, attempt) = (ConnectionKind::Control, AttemptId(*b"some migration's"));
    let preamble = Preamble { kind, attempt }.to_bytes();
    let from_source = |messages: &[SourceMessage]| {
        let lines = messages.iter().map(|message| line(message).expect("short"));
        [&preamble[..], &lines.collect::<Vec<_>>().concat()].concat()
    };
    let prepare = Prepare::new(to_details(&details).expect("they can be written"));
    let source = [
        SourceMessage::Prepare(prepare),
        SourceMessage::StatePart { len: 0 },
        SourceMessage::State { len: 0 },
        SourceMessage::Commit { resume: true },
        SourceMessage::Settled,
    ];
    seed("control", "source", &from_source(&source));
    let cause = "cancelled".to_owned();
    let abort = SourceMessage::Abort { cause };
    seed("control", "abort", &from_source(&[abort]));
    let incarnation = Incarnation([7; 16]);
    let state = "running".to_owned();
    let (cause, reason) = ("no CPU".to_owned(), "never seen".to_owned());
    let destination = [
        DestinationMessage::Preparing,
        DestinationMessage::Prepared {
            protocol: 2,
            incarnation,
            details: Details::new(),
        },
        DestinationMessage::Synced { round: 1 },
        DestinationMessage::Loaded,
        DestinationMessage::Starting,
        DestinationMessage::Running { state },
        DestinationMessage::Aborted { incarnation, cause },
        DestinationMessage::Unknown {
            incarnation,
            reason,
        },
    ];
    // The target has messages begin behind as many bytes as a preamble has.
    let mut answers = vec![b'\n'; preamble.len()];
    for message in &destination {
        answers.extend(line(message).expect("short"));
    }
    seed("control", "destination", &answers);
}

fn ram(normal: &[u64], zero: &[u64], method: Method, payload: &[u8], sync: bool) -> Vec<u8> {
    let mut header = RamHeader::new(LAYOUT);
    header.block = multifd::BlockName::new(b"mem").expect("a name");
    header.method = method;
    header.sync = sync;
    header.set_pages(normal, zero, LAYOUT).expect("few pages");
    header
        .set_payload_len(payload.len(), Layout::X86)
        .expect("a small payload");
    let mut bytes = Vec::new();
    header.write(LAYOUT, &mut bytes);
    bytes.extend_from_slice(payload);
    bytes
}

fn device_state(state: &[u8]) -> Vec<u8> {
    let words = |words: [u32; 3]| words.map(u32::to_be_bytes).concat();
    let mut bytes = words([multifd::MAGIC, multifd::VERSION, 0x40]);
    bytes.extend_from_slice(b"0000:00:03.0/vfio");
    bytes.resize(PRELUDE_LEN + 256, 0);
    let len = u32::try_from(state.len()).expect("a small state");
    bytes.extend_from_slice(&words([1, len, 0])[..8]);
    bytes.extend_from_slice(state);
    bytes
}

/// A few runs of pages of the guest, the best compressible first.
fn samples() -> Vec<Vec<u8>> {
    let ram = read("ram.img.zst");
    let mut pages: Vec<&[u8]> = ram
        .chunks_exact(LAYOUT.page_size())
        .filter(|page| page.iter().any(|byte| *byte != 0))
        .collect();
    let cost = |page: &&[u8]| {
        let mut out = Vec::with_capacity(2 * page.len());
        zstd_safe::compress(&mut out, page, 1).expect("room")
    };
    pages.sort_by_key(cost);
    let (first, rest) = pages.split_at(pages.len() / 10);
    vec![
        first[0].to_vec(),
        first[first.len() / 2..][..3].concat(),
        first[first.len() - 4..].concat(),
        rest[rest.len() / 2].to_vec(),
        first[1].to_vec(),
        rest[rest.len() - 1].to_vec(),
    ]
}

fn read(file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../testdata/vectors")
        .join(file);
    let packed = fs::read(path).expect("testdata is in the repository");
    let mut bytes = Vec::with_capacity(8 << 20);
    zstd_safe::decompress(&mut bytes, &packed).expect("testdata is whole");
    bytes
}

fn seed(target: &str, name: &str, bytes: &[u8]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("seeds")
        .join(target);
    fs::create_dir_all(&folder).expect("a writable checkout");
    fs::write(folder.join(name), bytes).expect("a writable checkout");
}
