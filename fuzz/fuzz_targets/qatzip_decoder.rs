//! Payloads of a qatzip channel: refused, or decoded as another implementation does.
//!
//! Payloads come as they are, which hardly ever get past a checksum, and as members whose sizes and
//! sums are put right, so that the deflate data and the fields of the header are what decides.

#![no_main]

use std::io::Read;

use arbitrary::{Arbitrary, Unstructured};
use flate2::{Crc, Decompress, FlushDecompress, Status, bufread::MultiGzDecoder};
use libfuzzer_sys::fuzz_target;
use multifd::Method;
use vamoose_fuzz::{Encoded, LAYOUT, decode, packets};

fuzz_target!(|input: &[u8]| {
    match input.split_first() {
        Some((mode, rest)) if mode & 1 != 0 => {
            let mut rest = Unstructured::new(rest);
            if let Ok(members) = rest.arbitrary_iter().and_then(Iterator::collect) {
                check_repaired(members);
            }
        }
        Some((_, rest)) => {
            for packet in packets(rest) {
                check(&packet);
            }
        }
        None => {}
    }
});

/// A member, but for its sizes and sums.
#[derive(Arbitrary)]
struct Member<'a> {
    /// Whether it has a QZ subfield.
    qz: bool,
    flags: u8,
    other_fields: &'a [u8],
    data: &'a [u8],
    /// Whether one of the numbers that are put right is made wrong again, and which.
    wrong: Option<(u8, u8)>,
}

/// Fills whole pages up with one more member, as a packet must have them.
fn check_repaired(members: Vec<Member<'_>>) {
    let (mut payload, mut len) = (Vec::new(), 0);
    for member in members {
        let repaired = repair(&member);
        len += repaired.source.len();
        payload.extend_from_slice(&repaired.bytes);
        if len > LAYOUT.packet_bytes() || payload.len() > LAYOUT.max_payload() {
            return;
        }
    }
    let pages = len.div_ceil(LAYOUT.page_size()).max(1);
    let padding = vec![0; pages * LAYOUT.page_size() - len];
    // Stored blocks are at most 64 KiB - 1 long: less than a page does.
    let size = u16::try_from(padding.len())
        .expect("less than two pages")
        .to_le_bytes();
    payload.extend_from_slice(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3]);
    payload.extend_from_slice(&[1, size[0], size[1], !size[0], !size[1]]);
    payload.extend_from_slice(&padding);
    payload.extend_from_slice(&trailer(&padding));
    check(&Encoded {
        pages,
        payload: &payload,
    });
}

struct Repaired {
    bytes: Vec<u8>,
    source: Vec<u8>,
}

fn repair(member: &Member<'_>) -> Repaired {
    let (deflate, source) = inflate(member.data);
    let mut bytes = vec![0x1f, 0x8b, 8, member.flags, 1, 2, 3, 4, 5, 6];
    if member.qz {
        bytes[3] |= 4;
        bytes.extend_from_slice(&[12, 0, b'Q', b'Z', 8, 0]);
        bytes.extend_from_slice(&number(source.len()));
        bytes.extend_from_slice(&number(deflate.len()));
    }
    bytes.extend_from_slice(member.other_fields);
    if member.flags & 2 != 0 {
        bytes.extend_from_slice(&crc(&bytes)[..2]);
    }
    bytes.extend_from_slice(deflate);
    bytes.extend_from_slice(&trailer(&source));
    if let Some((at, bits)) = member.wrong {
        let sizes = 16..24;
        let at = usize::from(at) % 16;
        let at = match at {
            ..8 if member.qz => sizes.start + at,
            _ => bytes.len() - 1 - at % 8,
        };
        bytes[at] ^= bits;
    }
    Repaired { bytes, source }
}

/// The stream at the start of `data`, and what it holds; all of it when it is none.
fn inflate(data: &[u8]) -> (&[u8], Vec<u8>) {
    let mut source = Vec::with_capacity(LAYOUT.packet_bytes());
    let mut inflate = Decompress::new(false);
    match inflate.decompress_vec(data, &mut source, FlushDecompress::Finish) {
        Ok(Status::StreamEnd) => {
            let len = usize::try_from(inflate.total_in()).expect("of this data");
            (&data[..len], source)
        }
        _ => (data, Vec::new()),
    }
}

fn trailer(source: &[u8]) -> [u8; 8] {
    let [crc, len] = [crc(source), number(source.len())];
    std::array::from_fn(|at| if at < 4 { crc[at] } else { len[at - 4] })
}

fn crc(bytes: &[u8]) -> [u8; 4] {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum().to_le_bytes()
}

fn number(len: usize) -> [u8; 4] {
    u32::try_from(len).expect("small").to_le_bytes()
}

/// Where codec decodes, zlib-rs has to get the same pages, or refuse: it checks some code lengths
/// more strictly than libdeflate.
fn check(packet: &Encoded<'_>) {
    let packet = Encoded {
        pages: packet.pages,
        payload: packet.payload,
    };
    let payload = packet.payload;
    let Some(pages) = decode(Method::Qatzip, &[packet]).pop() else {
        return;
    };
    let mut expected = Vec::with_capacity(pages.len() + 1);
    if MultiGzDecoder::new(payload)
        .read_to_end(&mut expected)
        .is_ok()
    {
        assert!(pages == expected, "zlib-rs decodes to other pages");
    }
}
