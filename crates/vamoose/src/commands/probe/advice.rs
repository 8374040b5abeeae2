//! Which method moves memory soonest over which link, by what the encoders do on this processor.
//!
//! A migration is as fast as the slower of its two stages: bytes leave the link at
//! `link x ratio` and the encoders at `cores x speed`, both counted in page bytes. Dirty rounds,
//! zero pages and the far side's decoding (several times faster than encoding) are left out.

mod sample;

use std::{hint::black_box, time::Duration};

use anyhow::{Context as _, Result};
use codec::{Settings, encoder};
use multifd::{Layout, Method};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::Lines;

/// The measured methods and the best of them for each link.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Advice {
    /// What the pages were.
    sample: &'static str,
    /// Cores that the advice counts on.
    cores: usize,
    methods: Vec<Measured>,
    links: Vec<Link>,
}

/// What one core does.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Measured {
    method: &'static str,
    level: Option<i32>,
    engine: &'static str,
    /// Page bytes per second of CPU time.
    bytes_per_second: f64,
    /// Page bytes per byte of payload.
    ratio: f64,
}

/// The method to use on a link.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Link {
    gbit_per_second: u32,
    method: &'static str,
    level: Option<i32>,
    /// For a gigabyte (2^30 bytes) of pages that are not zero.
    seconds_per_gib: f64,
    /// `link` or `cores`.
    limited_by: &'static str,
}

/// In Gbit/s.
const LINKS: [u32; 4] = [1, 10, 25, 100];

/// Encoders to choose from: no work, the method every QEMU has, and zstd slow and fast.
const CANDIDATES: [(Method, Option<i32>); 4] = [
    (Method::None, None),
    (Method::Zlib, Some(1)),
    (Method::Zstd, Some(1)),
    (Method::Zstd, Some(-5)),
];

/// For each candidate; together with the sample's generation about a second.
const CPU_TIME: Duration = Duration::from_millis(200);

impl Advice {
    /// Measures the encoders, and advises for `cores` of them at work.
    pub(super) fn measure(cores: usize) -> Result<Self> {
        let packets = sample::packets(Layout::X86);
        let methods = CANDIDATES
            .into_iter()
            .map(|(method, level)| measure(method, level, &packets))
            .collect::<Result<Vec<_>>>()?;
        let links = LINKS
            .into_iter()
            .filter_map(|gbits| best(&methods, gbits, cores))
            .collect();
        Ok(Self {
            sample: sample::DESCRIPTION,
            cores,
            methods,
            links,
        })
    }

    pub(super) fn describe(&self, lines: &mut Lines) {
        lines.put("sample", self.sample);
        for measured in &self.methods {
            lines.put(
                "one core",
                format_args!(
                    "{:<8} {:<8} {:>8.0} MB/s, ratio {:.2}",
                    label(measured.method, measured.level),
                    measured.engine,
                    measured.bytes_per_second / 1e6,
                    measured.ratio
                ),
            );
        }
        for link in &self.links {
            lines.put(
                "advises",
                format_args!(
                    "{:>3} Gbit/s, {} cores: {:<8} {:>7.3} s per GiB of non-zero pages, limited by the {}",
                    link.gbit_per_second,
                    self.cores,
                    label(link.method, link.level),
                    link.seconds_per_gib,
                    link.limited_by
                ),
            );
        }
    }
}

fn measure(method: Method, level: Option<i32>, packets: &[Vec<u8>]) -> Result<Measured> {
    let settings = Settings::new(method, level)?;
    let context = || format!("cannot measure {}", label(method.name(), level));
    let mut encoder = encoder(&settings, Layout::X86).with_context(context)?;
    let (mut out, mut copy) = (
        vec![0; Layout::X86.max_payload()],
        vec![0; Layout::X86.packet_bytes()],
    );
    let (mut page_bytes, mut payload_bytes) = (0, 0);
    // The first packet pays for tables and page faults.
    encoder.encode(packets.first().map_or(&[], Vec::as_slice), &mut out)?;
    let start = cpu_time();
    let mut time = Duration::ZERO;
    for packet in packets.iter().cycle() {
        let payload = encoder
            .encode(packet, &mut out)
            .with_context(context)?
            .payload;
        if method == Method::None {
            // The encoder hands its input on; what such a page costs is the socket's copy.
            copy[..payload.len()].copy_from_slice(payload);
            black_box(&mut copy);
        }
        page_bytes += packet.len();
        payload_bytes += payload.len();
        time = cpu_time().saturating_sub(start);
        if time >= CPU_TIME {
            break;
        }
    }
    Ok(Measured {
        method: method.name(),
        level,
        engine: encoder.engine(),
        bytes_per_second: page_bytes as f64 / time.as_secs_f64().max(1e-9),
        ratio: page_bytes as f64 / (payload_bytes as f64).max(1.0),
    })
}

/// The method that is through first; of equals the first, which costs least.
fn best(methods: &[Measured], gbit_per_second: u32, cores: usize) -> Option<Link> {
    const GIB: f64 = (1u64 << 30) as f64;
    let link_rate = f64::from(gbit_per_second) * 1e9 / 8.0;
    methods
        .iter()
        .map(|measured| {
            let on_link = GIB / measured.ratio / link_rate;
            let on_cores = GIB / (cores as f64 * measured.bytes_per_second);
            Link {
                gbit_per_second,
                method: measured.method,
                level: measured.level,
                seconds_per_gib: on_link.max(on_cores),
                limited_by: if on_link >= on_cores { "link" } else { "cores" },
            }
        })
        .min_by(|a, b| a.seconds_per_gib.total_cmp(&b.seconds_per_gib))
}

fn label(method: &str, level: Option<i32>) -> String {
    match level {
        Some(level) => format!("{method} {level}"),
        None => method.to_owned(),
    }
}

fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(method: &'static str, mb_per_second: f64, ratio: f64) -> Measured {
        Measured {
            method,
            level: None,
            engine: "",
            bytes_per_second: mb_per_second * 1e6,
            ratio,
        }
    }

    #[test]
    fn slow_links_get_the_best_ratio_and_fast_ones_the_fastest_encoder() {
        let methods = [
            measured("none", 10_000.0, 1.0),
            measured("dense", 100.0, 4.0),
            measured("quick", 1000.0, 2.0),
        ];
        let pick = |gbits, cores| {
            let link = best(&methods, gbits, cores).unwrap();
            (link.method, link.limited_by)
        };
        // 125 MB/s x 4 = 500 MB/s, which 10 cores encode and 2 do not.
        assert_eq!(pick(1, 10), ("dense", "link"));
        assert_eq!(pick(1, 2), ("quick", "link"));
        // 1250 MB/s uncompressed, or 1000 MB/s of one quick core.
        assert_eq!(pick(10, 1), ("none", "link"));
        assert_eq!(pick(10, 2), ("quick", "cores"));
        assert_eq!(pick(100, 2), ("none", "link"));
        assert_eq!(pick(100, 1), ("none", "cores"));
        assert_eq!(best(&[], 1, 1), None);
    }

    #[test]
    fn the_time_is_that_of_the_slower_stage() {
        let link = best(&[measured("none", 1000.0, 1.0)], 1, 1).unwrap();
        assert!((link.seconds_per_gib - 1.073_741_824 * 8.0).abs() < 1e-9);
    }
}
