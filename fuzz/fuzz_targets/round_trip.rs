//! Any pages, in any packets, by any method at any level: decoded they are the same.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::{Corpus, fuzz_target};
use multifd::Method;
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_fuzz::LAYOUT;

#[derive(Arbitrary, Debug)]
struct Input {
    method: MethodAndLevel,
    packets: Vec<Vec<Run>>,
}

#[derive(Arbitrary, Debug)]
enum MethodAndLevel {
    None,
    Zlib(u8),
    Zstd(i8),
    /// Far beyond the levels that anybody names.
    FastZstd(u32),
    Lz4(u8),
    ZstdFrames(i8),
    Qpl(u8),
    Qatzip(u8),
}

/// Some pages alike.
#[derive(Arbitrary, Debug)]
struct Run {
    pages: u8,
    content: Content,
}

#[derive(Arbitrary, Debug)]
enum Content {
    /// A pattern, over and over, with a byte that counts.
    Repeated(Vec<u8>),
    Random(u64),
    /// Random bytes out of a few, as many as bits are set.
    Few(u64, u8),
    /// Zeros, with random bytes at random places.
    Sparse(u64),
}

/// High levels take 100 times as long as low ones.
const MAX_PAGES: usize = 300;
const MAX_PAGES_AT_HIGH_LEVEL: usize = 24;

fuzz_target!(|input: Input| -> Corpus {
    let (method, level) = match input.method {
        MethodAndLevel::None => (Method::None, None),
        MethodAndLevel::Zlib(level) => (Method::Zlib, Some(i32::from(level % 10))),
        // -22 to 22.
        MethodAndLevel::Zstd(level) => (Method::Zstd, Some(i32::from(level) % 23)),
        MethodAndLevel::FastZstd(level) => {
            let level = i32::try_from(level % 131_073).expect("small");
            (Method::Zstd, Some(-level))
        }
        MethodAndLevel::Lz4(level) => (Method::Lz4, Some(1 + i32::from(level))),
        MethodAndLevel::ZstdFrames(level) => (Method::ZstdFrames, Some(i32::from(level) % 23)),
        MethodAndLevel::Qpl(level) => (Method::Qpl, Some(i32::from(level % 13))),
        MethodAndLevel::Qatzip(level) => (Method::Qatzip, Some(1 + i32::from(level % 9))),
    };
    let max = match level {
        Some(10..) => MAX_PAGES_AT_HIGH_LEVEL,
        _ => MAX_PAGES,
    };
    let settings = Settings::new(method, level).expect("all of these levels exist");
    let mut encoder = encoder(&settings, LAYOUT).expect("there is memory");
    let mut decoder = Decoder::new(LAYOUT);
    let mut out = vec![0; LAYOUT.max_payload()];
    let mut total = 0;
    for runs in &input.packets {
        let pages = pages(runs, (max - total).min(LAYOUT.page_count()));
        total += pages.len() / LAYOUT.page_size();
        let encoded = encoder.encode(&pages, &mut out).expect("it is encodable");
        let payload = encoded.payload;
        assert!(payload.len() <= LAYOUT.max_payload());
        assert_eq!(payload.is_empty(), pages.is_empty());
        let mut decoded = vec![0xee; pages.len()];
        decoder
            .decode(encoded.method, payload, &mut decoded)
            .expect("what was encoded is decodable");
        assert!(decoded == pages, "other pages after {method} {level:?}");
    }
    if total == 0 {
        Corpus::Reject
    } else {
        Corpus::Keep
    }
});

/// The pages of a packet, at most `max`.
fn pages(runs: &[Run], max: usize) -> Vec<u8> {
    let mut pages = Vec::new();
    for run in runs {
        let left = max * LAYOUT.page_size() - pages.len();
        let len = left.min(usize::from(run.pages) * LAYOUT.page_size());
        pages.extend(content(&run.content, len));
    }
    pages
}

fn content(content: &Content, len: usize) -> Vec<u8> {
    match content {
        Content::Repeated(pattern) => {
            let mut bytes = Vec::with_capacity(len + pattern.len() + 1);
            let mut count = 0u8;
            while bytes.len() < len {
                bytes.extend_from_slice(pattern);
                bytes.push(count);
                count = count.wrapping_add(1);
            }
            bytes.truncate(len);
            bytes
        }
        Content::Random(seed) => Random(*seed).take(len).collect(),
        Content::Few(seed, mask) => Random(*seed).map(|byte| byte & mask).take(len).collect(),
        Content::Sparse(seed) => {
            let mut bytes = vec![0; len];
            let mut random = Random(*seed);
            let mut at = 0;
            while let (Some(gap), Some(value)) = (random.next(), random.next()) {
                at += 1 + 7 * usize::from(gap);
                match bytes.get_mut(at) {
                    Some(byte) => *byte = value,
                    None => break,
                }
            }
            bytes
        }
    }
}

/// A linear congruential generator, whose upper bits are good enough not to compress.
struct Random(u64);

impl Iterator for Random {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        Some(self.0.to_be_bytes()[0])
    }
}
