//! What differences save and cost on the memory of real processes: two files with the same pages, back to back, at two
//! moments.
//!
//! ```text
//! cargo bench -p vamoose-link --bench delta -- BEFORE AFTER
//! ```
//! For each method, the payload in percent of the pages and CPU time at both ends in nanoseconds per byte of pages, of
//! pages as they are and of what a cache makes of them.
#![allow(clippy::expect_used, clippy::panic, reason = "a measurement")]

use std::{fs, time::Duration};

use multifd::{Layout, Method};
use rustix::time::{ClockId, clock_gettime};
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_link::delta_testing::Pair;

const LAYOUT: Layout = Layout::X86;

fn main() {
    let files: Vec<_> = std::env::args()
        .skip(1)
        .filter(|name| !name.starts_with('-'))
        .collect();
    let [before, after] = &files[..] else {
        println!("delta: needs two files of pages, before and after");
        return;
    };
    let read = |name: &String| fs::read(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let (before, after) = (read(before), read(after));
    let mebibytes = after.len() >> 20;
    println!(
        "{mebibytes} MiB of pages\nmethod level   plain %  ns/B   cache %  ns/B   differences"
    );
    let (cached, differences) = cached(&before, &after);
    for (method, level) in [
        (Method::Lz4, 1),
        (Method::ZstdFrames, 1),
        (Method::ZstdFrames, 3),
    ] {
        let settings = Settings::new(method, Some(level)).expect("a level of the method");
        let plain = plain(&settings, &after);
        let show = |(bytes, time): (usize, Duration)| {
            let pages = after.len() as f64;
            format!(
                "{:7.1} {:6.2}",
                100.0 * bytes as f64 / pages,
                time.as_nanos() as f64 / pages
            )
        };
        println!(
            "{method:11} {level} {}  {} {differences:9} of {}",
            show(plain),
            show(cached),
            after.len() / 4096
        );
    }
}

/// Every packet by itself.
fn plain(settings: &Settings, after: &[u8]) -> (usize, Duration) {
    let mut encoder = encoder(settings, LAYOUT).expect("memory");
    let mut decoder = Decoder::new(LAYOUT);
    let mut out = vec![0; LAYOUT.max_payload()];
    let mut back = vec![0; LAYOUT.packet_bytes()];
    let (mut bytes, start) = (0, cpu());
    for pages in after.chunks(LAYOUT.packet_bytes()) {
        // As the link has it: of the pages before and after.
        let sum = crc32c::crc32c(pages);
        let encoded = encoder.encode(pages, &mut out).expect("it encodes");
        bytes += encoded.payload.len();
        let back = &mut back[..pages.len()];
        decoder
            .decode(encoded.method, encoded.payload, back)
            .expect("it decodes");
        assert_eq!(crc32c::crc32c(back), sum);
    }
    (bytes, cpu() - start)
}

/// The third time that the pages are sent; the first two they were as before.
fn cached(before: &[u8], after: &[u8]) -> ((usize, Duration), usize) {
    let mut pair = Pair::new(after.len() * 2, LAYOUT);
    pair.send(before);
    pair.send(before);
    let start = cpu();
    let (bytes, differences) = pair.send(after);
    ((bytes, cpu() - start), differences)
}

fn cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
