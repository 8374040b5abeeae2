//! How many instructions a packet costs: its header, the search for zero pages, and its pages through
//! every method.
//!
//! ```text
//! bench/run                                                     # compares with the run before
//! bench/run --save-baseline=main                                # on one version ...
//! bench/run --baseline=main --callgrind-limits='ir=1%'          # ... and on the next: fails if one grew
//! ```
//! Valgrind counts, so the numbers are the same on a busy machine and an idle one, and a change of
//! 1 % is a change of the program. They are not times: a multiplication counts as much as a cache
//! miss. Nor are they those of the widest machine: Valgrind has AVX2, but no AVX-512. For times see
//! `cargo bench -p codec`.
//!
//! What a channel pays once is not counted: each encoder and decoder has seen a packet before the one
//! that is.

use std::hint::black_box;

use codec::{Decoder, Encoder, Settings, encoder, is_zero};
use gungraun::prelude::*;
use multifd::{BlockName, Layout, Method, PRELUDE_LEN, Prelude, RamHeader};
use vamoose_bench::{PAGE, Page, pages};

const LAYOUT: Layout = Layout::X86;

#[library_benchmark]
#[bench::full(setup = full_header)]
fn header_parse(mut header: Box<Header>) -> Box<Header> {
    let Header { parsed, bytes } = &mut *header;
    let (prelude, rest) = black_box(bytes.split_first_chunk::<PRELUDE_LEN>()).expect("a header");
    let prelude = Prelude::parse(prelude).expect("a right prelude");
    parsed.parse(prelude, rest, LAYOUT).expect("a right header");
    black_box(header)
}

#[library_benchmark]
#[bench::full(setup = full_header)]
fn header_build(mut header: Box<Header>) -> Box<Header> {
    let Header { parsed, bytes } = &mut *header;
    bytes.clear();
    black_box(parsed).write(LAYOUT, bytes);
    black_box(header)
}

/// A header in both its forms. Boxed, so that no moves of it are counted.
struct Header {
    parsed: RamHeader,
    bytes: Vec<u8>,
}

/// The header of a packet of 128 normal pages, parsed and built once already.
fn full_header() -> Box<Header> {
    let offsets: Vec<_> = (0..).step_by(PAGE).take(LAYOUT.page_count()).collect();
    let mut parsed = RamHeader::new(LAYOUT);
    parsed.method = Method::Zlib;
    parsed.block = BlockName::new(b"pc.ram").expect("a name");
    parsed.set_pages(&offsets, &[], LAYOUT).expect("pages");
    parsed.set_payload_len(200_000, LAYOUT).expect("a length");
    let mut bytes = Vec::new();
    parsed.write(LAYOUT, &mut bytes);
    header_parse(Box::new(Header { parsed, bytes }))
}

#[library_benchmark]
#[bench::zero(args = (None), setup = Page::zero_but_for)]
#[bench::first_byte_differs(args = (Some(0)), setup = Page::zero_but_for)]
#[bench::last_byte_differs(args = (Some(PAGE - 1)), setup = Page::zero_but_for)]
fn zero_scan(page: Box<Page>) -> (bool, Box<Page>) {
    (black_box(is_zero(black_box(&page.0))), page)
}

#[library_benchmark]
#[bench::zlib(args = (Method::Zlib, None), setup = encoding)]
#[bench::zstd(args = (Method::Zstd, None), setup = encoding)]
#[bench::lz4(args = (Method::Lz4, None), setup = encoding)]
#[bench::lz4_8(args = (Method::Lz4, Some(8)), setup = encoding)]
#[bench::qpl(args = (Method::Qpl, None), setup = encoding)]
#[bench::qpl_0(args = (Method::Qpl, Some(0)), setup = encoding)]
#[bench::qatzip(args = (Method::Qatzip, None), setup = encoding)]
fn encode(mut encoding: Encoding) -> Encoding {
    let pages = black_box(&encoding.pages);
    let encoded = encoding.encoder.encode(pages, &mut encoding.room);
    black_box(encoded.expect("a payload"));
    encoding
}

struct Encoding {
    encoder: Box<dyn Encoder>,
    pages: Vec<u8>,
    room: Vec<u8>,
}

/// An encoder that has seen a packet, and a different one that it has not.
fn encoding(method: Method, level: Option<i32>) -> Encoding {
    let settings = Settings::new(method, level).expect("a level of the method");
    encode(Encoding {
        encoder: encoder(&settings, LAYOUT).expect("an encoder"),
        pages: packet(0),
        room: vec![0; LAYOUT.max_payload()],
    })
    .with(packet(1))
}

impl Encoding {
    fn with(self, pages: Vec<u8>) -> Self {
        Self { pages, ..self }
    }
}

#[library_benchmark]
#[bench::zlib(args = (Method::Zlib, None), setup = decoding)]
#[bench::zstd(args = (Method::Zstd, None), setup = decoding)]
#[bench::lz4(args = (Method::Lz4, None), setup = decoding)]
#[bench::lz4_8(args = (Method::Lz4, Some(8)), setup = decoding)]
#[bench::qpl(args = (Method::Qpl, None), setup = decoding)]
#[bench::qpl_0(args = (Method::Qpl, Some(0)), setup = decoding)]
#[bench::qatzip(args = (Method::Qatzip, None), setup = decoding)]
fn decode(mut decoding: Box<Decoding>) -> Box<Decoding> {
    let Decoding {
        decoder,
        method,
        payload,
        pages,
    } = &mut *decoding;
    let decoded = decoder.decode(*method, black_box(payload), pages);
    decoded.expect("pages");
    black_box(decoding)
}

/// Boxed for the same reason as [`Header`].
struct Decoding {
    decoder: Decoder,
    method: Method,
    payload: Vec<u8>,
    pages: Vec<u8>,
}

/// A decoder that has seen a packet, and the next one.
fn decoding(method: Method, level: Option<i32>) -> Box<Decoding> {
    let settings = Settings::new(method, level).expect("a level of the method");
    let mut encoder = encoder(&settings, LAYOUT).expect("an encoder");
    let mut room = vec![0; LAYOUT.max_payload()];
    let mut payload = |seed| {
        let pages = packet(seed);
        let encoded = encoder.encode(&pages, &mut room).expect("a payload");
        encoded.payload.to_vec()
    };
    let (first, second) = (payload(0), payload(1));
    let mut decoding = decode(Box::new(Decoding {
        decoder: Decoder::new(LAYOUT),
        method,
        payload: first,
        pages: vec![0; LAYOUT.packet_bytes()],
    }));
    assert!(decoding.pages == packet(0), "decoded to something else");
    decoding.payload = second;
    decoding
}

fn packet(seed: u64) -> Vec<u8> {
    pages(seed, LAYOUT.page_count())
}

library_benchmark_group!(name = header, benchmarks = [header_parse, header_build]);
library_benchmark_group!(name = zero, benchmarks = zero_scan);
library_benchmark_group!(name = methods, benchmarks = [encode, decode]);

main!(library_benchmark_groups = [header, zero, methods]);
