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
//! bench `methods`.
//!
//! What a channel pays once is not counted: each encoder and decoder has seen a packet before the one
//! that is.

use std::hint::black_box;

use gungraun::{Callgrind, prelude::*};
use multifd::{BlockName, Layout, Method, PRELUDE_LEN, Prelude, RamHeader};
use vamoose_bench::{PAGE, Page, pages};
use vamoose_codec::{Decoder, Encoder, Settings, encoder, is_zero};

const LAYOUT: Layout = Layout::X86;

#[library_benchmark]
#[bench::full(setup = full_header)]
fn header_parse(mut header: Box<Header>) -> Box<Header> {
    header.parse();
    black_box(header)
}

#[library_benchmark]
#[bench::full(setup = full_header)]
fn header_build(mut header: Box<Header>) -> Box<Header> {
    header.build();
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
    let bytes = Vec::new();
    let mut header = Box::new(Header { parsed, bytes });
    header.build();
    header.parse();
    header
}

impl Header {
    fn parse(&mut self) {
        let split = black_box(&self.bytes).split_first_chunk::<PRELUDE_LEN>();
        let (prelude, rest) = split.expect("a header");
        let prelude = Prelude::parse(prelude).expect("a right prelude");
        let parsed = self.parsed.parse(prelude, rest, LAYOUT);
        parsed.expect("a right header");
    }

    fn build(&mut self) {
        self.bytes.clear();
        black_box(&self.parsed).write(LAYOUT, &mut self.bytes);
    }
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
fn encode(mut encoding: Box<Encoding>) -> Box<Encoding> {
    encoding.encode();
    black_box(encoding)
}

struct Encoding {
    encoder: Encoder,
    pages: Vec<u8>,
    out: Vec<u8>,
}

/// An encoder that has seen a packet, and the next one.
fn encoding(method: Method, level: Option<i32>) -> Box<Encoding> {
    let settings = Settings::new(method, level).expect("a level of the method");
    let mut encoding = Box::new(Encoding {
        encoder: encoder(&settings, LAYOUT).expect("an encoder"),
        pages: packet(0),
        out: vec![0; LAYOUT.max_payload()],
    });
    encoding.encode();
    encoding.pages = packet(1);
    encoding
}

impl Encoding {
    fn encode(&mut self) {
        let encoded = self.encoder.encode(black_box(&self.pages), &mut self.out);
        black_box(encoded.expect("a payload"));
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
    decoding.decode();
    black_box(decoding)
}

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
    let mut out = vec![0; LAYOUT.max_payload()];
    let mut payload = |pages: &[u8]| {
        let encoded = encoder.encode(pages, &mut out).expect("a payload");
        assert_eq!(encoded.method, method, "nothing was saved");
        encoded.payload.to_vec()
    };
    let (first, second) = (packet(0), packet(1));
    let mut decoding = Box::new(Decoding {
        decoder: Decoder::new(LAYOUT),
        method,
        payload: payload(&first),
        pages: vec![0; LAYOUT.packet_bytes()],
    });
    decoding.decode();
    assert!(decoding.pages == first, "decoded to something else");
    decoding.payload = payload(&second);
    decoding
}

impl Decoding {
    fn decode(&mut self) {
        let payload = black_box(&self.payload);
        let decoded = self.decoder.decode(self.method, payload, &mut self.pages);
        decoded.expect("pages");
    }
}

fn packet(seed: u64) -> Vec<u8> {
    pages(seed, LAYOUT.page_count())
}

library_benchmark_group!(name = header, benchmarks = [header_parse, header_build]);
library_benchmark_group!(name = zero, benchmarks = zero_scan);
library_benchmark_group!(name = methods, benchmarks = [encode, decode]);

main!(
    // Models of caches take half the time, and predict little about a real one.
    config = LibraryBenchmarkConfig::default().tool(Callgrind::with_args(["--cache-sim=no"])),
    library_benchmark_groups = [header, zero, methods]
);
