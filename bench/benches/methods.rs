//! Every method and level, over real data: bytes of pages per second of CPU time, and the ratio.
//!
//! ```text
//! VAMOOSE_CORPUS=dir[:dir…] cargo bench --manifest-path bench/Cargo.toml --bench methods    # files of each dir, plain or .zst
//! VAMOOSE_TABLE=1 VAMOOSE_CORPUS=target/corpus/silesia:target/corpus/memory cargo bench --manifest-path bench/Cargo.toml --bench methods
//! ```
//! The last is for documents: a Markdown table in place of criterion's statistics, with what the
//! C zlib does at level 1, which is QEMU's, and zstd when it is called as QEMU calls it. Its speed tells how fast the machine was, so what can be
//! compared with other machines' tables is how many times as fast the others are.
//!
//! Directories are relative to the workspace. Without any the recorded guest's RAM is used, which is
//! small and kind: good for comparing two builds, not for choosing a method. Pages of zeros are left
//! out, as migrations do.
//!
//! All methods get packets of 128 pages, and each is what it is on the wire: zlib and zstd one stream over
//! all packets, lz4 a block for each packet, qatzip a gzip member for every 16 pages, qpl each page alone.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    missing_docs,
    reason = "a benchmark fails by panicking, prints rounded numbers, and macros make its functions public"
)]

use std::{env, hint::black_box, time::Duration};

use criterion::{
    Criterion, Throughput, criterion_group,
    measurement::{Measurement, ValueFormatter, WallTime},
};
use multifd::Method;
use rustix::time::{ClockId, clock_gettime};
use vamoose_codec::{Decoder, Settings, encoder};

#[path = "common/c_zlib.rs"]
mod c_zlib;
#[path = "common/corpus.rs"]
mod corpus;
#[path = "common/paged_zstd.rs"]
mod paged_zstd;

use corpus::{Corpus, LAYOUT, corpora};

const CASES: &[(Method, &[i32])] = &[
    (Method::Zlib, &[0, 1, 2, 3, 6]),
    (Method::Zstd, &[-5, -1, 1, 3]),
    (Method::Lz4, &[1, 8]),
    (Method::ZstdFrames, &[-5, -1, 1, 3, 6, 9]),
    (Method::Qpl, &[0, 1, 6]),
    (Method::Qatzip, &[1, 4, 9]),
];

fn main() {
    if env::var_os("VAMOOSE_TABLE").is_some_and(|value| value == "1") {
        return table();
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(CpuTime).without_plots();
    targets = methods
}

fn methods(criterion: &mut Criterion<CpuTime>) {
    // Enough for stable numbers, little enough for the slow levels.
    for corpus in corpora(64) {
        let mut group = criterion.benchmark_group(&corpus.name);
        group.throughput(Throughput::BytesDecimal(corpus.bytes() as u64));
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(300));
        group.measurement_time(Duration::from_secs(2));
        for case in Case::all() {
            let payloads = case.payloads(&corpus);
            let (name, engine) = (case.name(), case.engine());
            let ratio = corpus.ratio(&payloads);
            println!("{}, {name} ({engine}): {ratio:.3} : 1", corpus.name);

            let name = |what| format!("{}/{what}", name.replace(' ', "-"));
            group.bench_function(name("encode"), |bencher| {
                let mut out = vec![0; LAYOUT.max_payload()];
                bencher.iter(|| case.encode(&corpus, &mut out));
            });
            group.bench_function(name("decode"), |bencher| {
                let mut pages = vec![0; LAYOUT.packet_bytes()];
                bencher.iter(|| case.decode(&payloads, &mut pages));
            });
        }
        group.finish();
    }
}

/// Prints a row for each case, and two columns for each corpus.
fn table() {
    let cases = Case::all();
    let corpora = corpora(24);
    let columns: Vec<_> = corpora.iter().map(|of| measure(of, &cases)).collect();

    print!("\n| method, level | engine |");
    for corpus in &corpora {
        print!(
            " {}: MB/s encoded / decoded, ratio | × C zlib |",
            corpus.name
        );
    }
    println!("\n|---|---|{}", "---|---|".repeat(corpora.len()));
    for (row, case) in cases.iter().enumerate() {
        print!("| {} | {} |", case.name(), case.engine());
        for column in &columns {
            // The first row's case is the C zlib.
            let (own, reference) = (&column[row], &column[0]);
            print!(
                " {:.0} / {:.0} / {:.3} | {:.1} / {:.1} |",
                own.encode,
                own.decode,
                own.ratio,
                own.encode / reference.encode,
                own.decode / reference.decode
            );
        }
        println!();
    }
}

/// Speeds in MB/s.
struct Measured {
    encode: f64,
    decode: f64,
    ratio: f64,
}

/// Medians of rounds in which each case has its turn, so that a slow moment of the machine does not
/// hit one case only.
fn measure(corpus: &Corpus, cases: &[Case]) -> Vec<Measured> {
    const ROUNDS: usize = 3;
    let payloads: Vec<_> = cases.iter().map(|case| case.payloads(corpus)).collect();
    let mut out = vec![0; LAYOUT.max_payload()];
    let mut pages = vec![0; LAYOUT.packet_bytes()];
    let mut speeds = vec![[[0.0; ROUNDS]; 2]; cases.len()];
    for round in 0..ROUNDS {
        for ((case, payloads), [encode, decode]) in cases.iter().zip(&payloads).zip(&mut speeds) {
            encode[round] = corpus.speed(|| case.encode(corpus, &mut out));
            decode[round] = corpus.speed(|| case.decode(payloads, &mut pages));
        }
    }
    let median = |mut speeds: [f64; ROUNDS]| {
        speeds.sort_by(f64::total_cmp);
        speeds[ROUNDS / 2]
    };
    let measured = speeds.into_iter().zip(&payloads);
    measured
        .map(|([encode, decode], payloads)| Measured {
            encode: median(encode),
            decode: median(decode),
            ratio: corpus.ratio(payloads),
        })
        .collect()
}

/// What is measured.
#[derive(Clone, Copy)]
enum Case {
    CZlib,
    PagedZstd,
    Ours(Settings),
}

/// A packet as it goes over the wire.
type Payload = (Method, Vec<u8>);

impl Case {
    fn all() -> Vec<Self> {
        let ours = CASES.iter().flat_map(|(method, levels)| {
            let settings = levels
                .iter()
                .map(|level| Settings::new(*method, Some(*level)));
            settings.map(|settings| Self::Ours(settings.expect("a level of the method")))
        });
        let stock = [Self::CZlib, Self::PagedZstd];
        stock.into_iter().chain(ours).collect()
    }

    fn name(self) -> String {
        match self {
            Self::CZlib => format!("C zlib {}", c_zlib::LEVEL),
            Self::PagedZstd => format!("paged zstd {}", paged_zstd::LEVEL),
            Self::Ours(settings) => {
                let level = settings.level().expect("a method with levels");
                format!("{} {level}", settings.method())
            }
        }
    }

    fn engine(self) -> String {
        match self {
            Self::CZlib => format!("zlib {}", c_zlib::version()),
            Self::PagedZstd => format!("zstd {}", zstd_safe::version_string()),
            Self::Ours(settings) => settings.engine().to_owned(),
        }
    }

    /// The packets of `corpus`, encoded, once it is sure that they can be decoded.
    fn payloads(self, corpus: &Corpus) -> Vec<Payload> {
        let mut out = vec![0; LAYOUT.max_payload()];
        let mut payloads = Vec::new();
        self.each_payload(corpus, &mut out, |method, payload| {
            payloads.push((method, payload.to_vec()));
        });
        let mut pages = vec![0; LAYOUT.packet_bytes()];
        let mut packets = corpus.packets.iter();
        self.each_packet(&payloads, &mut pages, |pages| {
            assert!(packets.next().is_some_and(|packet| packet == pages));
        });
        payloads
    }

    fn encode(self, corpus: &Corpus, out: &mut [u8]) {
        self.each_payload(corpus, out, |method, payload| {
            black_box((method, payload));
        });
    }

    fn decode(self, payloads: &[Payload], pages: &mut [u8]) {
        self.each_packet(payloads, pages, |pages| {
            black_box(pages);
        });
    }

    fn each_payload(self, corpus: &Corpus, out: &mut [u8], mut take: impl FnMut(Method, &[u8])) {
        match self {
            Self::CZlib => {
                let mut stream = c_zlib::Deflate::new();
                for packet in &corpus.packets {
                    let len = stream.encode(packet, out);
                    take(Method::Zlib, &out[..len]);
                }
            }
            Self::PagedZstd => {
                let mut stream = paged_zstd::Compress::new();
                for packet in &corpus.packets {
                    let len = stream.encode(packet, LAYOUT.page_size(), out);
                    take(Method::Zstd, &out[..len]);
                }
            }
            Self::Ours(settings) => {
                let mut encoder = encoder(&settings, LAYOUT).expect("an encoder");
                for packet in &corpus.packets {
                    let encoded = encoder.encode(packet, out).expect("a payload");
                    take(encoded.method, encoded.payload);
                }
            }
        }
    }

    fn each_packet(self, payloads: &[Payload], pages: &mut [u8], mut take: impl FnMut(&[u8])) {
        match self {
            Self::CZlib => {
                let mut stream = c_zlib::Inflate::new();
                for (_, payload) in payloads {
                    stream.decode(payload, pages);
                    take(pages);
                }
            }
            Self::PagedZstd => {
                let mut stream = paged_zstd::Decompress::new();
                for (_, payload) in payloads {
                    stream.decode(payload, LAYOUT.page_size(), pages);
                    take(pages);
                }
            }
            Self::Ours(_) => {
                let mut decoder = Decoder::new(LAYOUT);
                for (method, payload) in payloads {
                    decoder.decode(*method, payload, pages).expect("pages");
                    take(pages);
                }
            }
        }
    }
}

impl Corpus {
    fn ratio(&self, payloads: &[Payload]) -> f64 {
        let encoded: usize = payloads.iter().map(|(_, payload)| payload.len()).sum();
        self.bytes() as f64 / encoded as f64
    }

    /// MB/s of CPU time with which `pass` gets through the corpus.
    fn speed(&self, mut pass: impl FnMut()) -> f64 {
        // Single passes of the fast cases are too short for the clock.
        const LEAST: Duration = Duration::from_millis(100);
        let start = CpuTime.start();
        let (mut bytes, mut elapsed) = (0, Duration::ZERO);
        while elapsed < LEAST {
            pass();
            bytes += self.bytes();
            elapsed = CpuTime.end(start);
        }
        bytes as f64 / 1e6 / elapsed.as_secs_f64()
    }
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
