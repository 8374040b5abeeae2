//! Every method and level, over real data: bytes of pages per second of CPU time, and the ratio.
//!
//! ```text
//! VAMOOSE_CORPUS=dir cargo bench -p codec               # files of dir, plain or .zst
//! cargo bench -p codec --no-default-features -- zlib    # the pure-Rust engine
//! ```
//! Without a corpus the recorded guest's RAM is used, which is small and kind: good for comparing
//! two builds, not for choosing a method. Pages of zeros are left out, as migrations do.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    missing_docs,
    reason = "a benchmark fails by panicking, prints rounded ratios, and macros make its functions public"
)]

use std::{env, fs, hint::black_box, path::Path, time::Duration};

use codec::{Decoder, Settings, encoder};
use criterion::{
    Criterion, Throughput, criterion_group, criterion_main,
    measurement::{Measurement, ValueFormatter, WallTime},
};
use multifd::{Layout, Method};
use rustix::time::{ClockId, clock_gettime};

const LAYOUT: Layout = Layout::X86;

/// Enough for stable numbers, little enough for the slow levels.
const MOST_PACKETS: usize = 64;

const CASES: &[(Method, &[i32])] = &[
    (Method::Zlib, &[0, 1, 2, 3, 6]),
    (Method::Zstd, &[-5, -1, 1, 3]),
];

fn methods(criterion: &mut Criterion<CpuTime>) {
    let packets = corpus();
    let bytes: usize = packets.iter().map(Vec::len).sum();
    for (method, levels) in CASES {
        for level in *levels {
            let settings = Settings::new(*method, Some(*level)).expect("a level of the method");
            let (engine, payloads) = encode(&settings, &packets);
            let encoded: usize = payloads.iter().map(Vec::len).sum();
            let ratio = bytes as f64 / encoded as f64;
            println!("{method} {level} ({engine}): {bytes} -> {encoded} bytes, {ratio:.3} : 1");

            let mut group = criterion.benchmark_group("methods");
            group.throughput(Throughput::BytesDecimal(bytes as u64));
            group
                .sample_size(10)
                .warm_up_time(Duration::from_millis(300));
            group.measurement_time(Duration::from_secs(2));
            let name = |what| format!("{method}-{level}/{what}");
            group.bench_function(name("encode"), |bencher| {
                let mut out = vec![0; LAYOUT.max_payload()];
                bencher.iter(|| {
                    let mut encoder = encoder(&settings, LAYOUT).expect("an encoder");
                    for packet in &packets {
                        black_box(encoder.encode(packet, &mut out).expect("a payload"));
                    }
                });
            });
            group.bench_function(name("decode"), |bencher| {
                let mut pages = vec![0; LAYOUT.packet_bytes()];
                bencher.iter(|| {
                    let mut decoder = Decoder::new(LAYOUT);
                    for (payload, packet) in payloads.iter().zip(&packets) {
                        let pages = &mut pages[..packet.len()];
                        decoder.decode(*method, payload, pages).expect("pages");
                        black_box(pages);
                    }
                });
            });
            group.finish();
        }
    }
}

fn encode(settings: &Settings, packets: &[Vec<u8>]) -> (&'static str, Vec<Vec<u8>>) {
    let mut encoder = encoder(settings, LAYOUT).expect("an encoder");
    let mut out = vec![0; LAYOUT.max_payload()];
    let payloads = packets
        .iter()
        .map(|packet| {
            encoder
                .encode(packet, &mut out)
                .expect("a payload")
                .payload
                .to_vec()
        })
        .collect();
    (encoder.engine(), payloads)
}

/// At most [`MOST_PACKETS`] full packets, from all over the corpus.
fn corpus() -> Vec<Vec<u8>> {
    let ram = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/vectors/ram.img.zst");
    let mut files = match env::var_os("VAMOOSE_CORPUS") {
        None => vec![ram],
        Some(dir) => fs::read_dir(dir)
            .expect("VAMOOSE_CORPUS is a directory")
            .map(|entry| entry.expect("its entries can be read").path())
            .filter(|path| path.is_file())
            .collect(),
    };
    files.sort();
    let mut bytes = Vec::new();
    for file in files {
        for page in read(&file).chunks_exact(LAYOUT.page_size()) {
            if page.iter().any(|byte| *byte != 0) {
                bytes.extend_from_slice(page);
            }
        }
    }
    let packets: Vec<_> = bytes.chunks_exact(LAYOUT.packet_bytes()).collect();
    let step = packets.len().div_ceil(MOST_PACKETS).max(1);
    packets
        .iter()
        .step_by(step)
        .map(|packet| packet.to_vec())
        .collect()
}

fn read(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).expect("a file of the corpus");
    if path.extension().is_none_or(|extension| extension != "zst") {
        return bytes;
    }
    let len = zstd_safe::get_frame_content_size(&bytes).expect("a zstd file");
    let len = len.expect("a zstd file that knows its size");
    let mut plain = Vec::with_capacity(usize::try_from(len).expect("a file that fits"));
    zstd_safe::decompress(&mut plain, &bytes).expect("a whole zstd file");
    plain
}

/// CPU time of the thread: wall clocks of shared machines lie.
struct CpuTime;

impl Measurement for CpuTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::try_from(now).expect("a time after the thread's start")
    }

    fn end(&self, start: Duration) -> Duration {
        self.start() - start
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        WallTime.to_f64(value)
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(CpuTime).without_plots();
    targets = methods
}
criterion_main!(benches);
