//! Which method migrates memory fastest over which link, by measuring the engines on this host.
//!
//! A migration is as fast as the slower of its two stages: the link carries `link x ratio`, and the cores of the source's host
//! encode and pass on what they can, both counted in page bytes:
//!
//! ```text
//!  time = max(bytes / ratio / link, bytes x CPU time / cores)
//!  CPU time of a byte = QEMU to vamoose + encoding + sending / ratio
//! ```
//! QEMU's socket and the sending are measured on this host, too: see [`hops`].
//!
//! Times within 15 % of the best count as equal, as measurements and guests differ by as much: of
//! those the method that takes the least CPU time is advised. Dirty rounds, zero pages and
//! the far side's decoding (as fast as encoding or faster; its cores are not known here) are left out.

mod hops;
mod measure;
mod sample;

use std::sync::Arc;

use serde::Serialize;
use vamoose_codec::Registry;

use self::{
    hops::Hops,
    measure::{FarSide, Measured, Unmeasured},
};
use super::Lines;

/// The measured methods and the best of them for each link.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Advice {
    /// What the pages were.
    sample: &'static str,
    /// Cores that the advice counts on.
    cores: usize,
    hops: Hops,
    methods: Vec<Measured>,
    unmeasured: Vec<Unmeasured>,
    links: Vec<Link>,
}

/// What this host has for a migration beside the engines.
#[derive(Clone, Copy)]
struct Host {
    cores: usize,
    hops: Hops,
}

/// What to use on a link.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Link {
    gbit_per_second: u32,
    /// Between two vamooses.
    #[serde(flatten)]
    best: Candidate,
    /// Where the far side is a QEMU as distributions build it.
    stock: Option<Candidate>,
    /// All methods, the soonest first.
    candidates: Vec<Candidate>,
}

/// A method on a link. Times are for a gigabyte (2^30 bytes) of pages that are not zero.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Candidate {
    method: &'static str,
    level: Option<i32>,
    seconds_per_gib: f64,
    seconds_on_link: f64,
    seconds_on_cores: f64,
    /// `link` or `cores`.
    limited_by: &'static str,
}

/// In Gbit/s.
const LINKS: [u32; 4] = [1, 10, 25, 100];

/// Times that differ by less are equal.
const TIE: f64 = 1.15;

impl Advice {
    /// Measures the engines, and advises for `cores` at work.
    pub(super) fn measure(registry: &Arc<Registry>, cores: usize) -> Self {
        let (methods, unmeasured) = measure::measure_all(registry);
        let hops = Hops::measure();
        let host = Host { cores, hops };
        Self {
            sample: sample::DESCRIPTION,
            cores,
            hops,
            links: LINKS
                .into_iter()
                .filter_map(|gbits| Link::new(&methods, gbits, host))
                .collect(),
            methods,
            unmeasured,
        }
    }

    pub(super) fn describe(&self, lines: &mut Lines) {
        lines.put("sample", self.sample);
        self.describe_methods(lines);
        lines.put("sockets", self.hops);
        self.describe_times(lines);
        lines.put(
            "rule",
            "time = max(bytes / ratio / link, CPU time / cores); within 15 %, the method with less CPU time",
        );
        lines.put(
            "rule",
            "CPU time = QEMU to vamoose + encoding + sending / ratio",
        );
        for link in &self.links {
            link.describe(lines);
        }
    }

    fn host(&self) -> Host {
        Host {
            cores: self.cores,
            hops: self.hops,
        }
    }

    fn describe_methods(&self, lines: &mut Lines) {
        const NAME: &str = "one core";
        lines.put(
            NAME,
            format_args!(
                "{:<12}{:<11}{:>12}{:>12}{:>7}  {}",
                "method", "engine", "encodes", "decodes", "ratio", "destination"
            ),
        );
        for measured in &self.methods {
            let fell_back = match measured.fallbacks {
                0 => String::new(),
                packets => format!(", {packets} packets encoded in software"),
            };
            lines.put(
                NAME,
                format_args!(
                    "{:<12}{:<11}{:>7.0} MB/s{:>7.0} MB/s{:>7.2}  {}{fell_back}",
                    label(measured.method, measured.level),
                    measured.engine,
                    measured.bytes_per_second / 1e6,
                    measured.decoded_bytes_per_second / 1e6,
                    measured.ratio,
                    measured.understood_by,
                ),
            );
        }
        for Unmeasured {
            method,
            level,
            reason,
        } in &self.unmeasured
        {
            let label = label(method, *level);
            lines.put(NAME, format_args!("{label:<12}not measured: {reason}"));
        }
    }

    /// The time of each stage; of a method on a link the longer one counts.
    fn describe_times(&self, lines: &mut Lines) {
        const NAME: &str = "s per GiB";
        let cores = match self.cores {
            1 => "1 core".to_owned(),
            cores => format!("{cores} cores"),
        };
        let links: String = LINKS.map(|gbits| format!("{gbits:>6} Gbit/s")).concat();
        lines.put(NAME, format_args!("{:<12}{cores:>11}{links}", "method"));
        for measured in &self.methods {
            let times: String = LINKS
                .map(|gbits| format!("{:>13.3}", seconds_on_link(measured, gbits)))
                .concat();
            lines.put(
                NAME,
                format_args!(
                    "{:<12}{:>11.3}{times}",
                    label(measured.method, measured.level),
                    seconds_on_cores(measured, self.host()),
                ),
            );
        }
    }
}

impl Link {
    /// `None` without methods.
    fn new(methods: &[Measured], gbit_per_second: u32, host: Host) -> Option<Self> {
        let candidate = |measured: &Measured| Candidate::new(measured, gbit_per_second, host);
        let stock: Vec<_> = methods
            .iter()
            .filter(|measured| measured.understood_by == FarSide::AnyQemu)
            .map(candidate)
            .collect();
        let mut candidates: Vec<_> = methods.iter().map(candidate).collect();
        candidates.sort_by(|a, b| a.seconds_per_gib.total_cmp(&b.seconds_per_gib));
        Some(Self {
            gbit_per_second,
            best: best(&candidates)?.clone(),
            stock: best(&stock).cloned(),
            candidates,
        })
    }

    fn describe(&self, lines: &mut Lines) {
        const NAME: &str = "advises";
        let gbits = self.gbit_per_second;
        lines.put(
            NAME,
            format_args!("{gbits:>3} Gbit/s: {}", self.best.text()),
        );
        if let Some(next) = self.candidates.iter().find(|other| **other != self.best) {
            let tie = match next.seconds_per_gib < self.best.seconds_per_gib {
                true => "; equal, but more CPU time",
                false => "",
            };
            lines.put(NAME, format_args!("{:>12} {}{tie}", "next:", next.text()));
        }
        match &self.stock {
            Some(stock) if *stock != self.best => {
                lines.put(NAME, format_args!("{:>12} {}", "stock QEMU:", stock.text()));
            }
            _ => {}
        }
    }
}

impl Candidate {
    fn new(measured: &Measured, gbit_per_second: u32, host: Host) -> Self {
        let seconds_on_link = seconds_on_link(measured, gbit_per_second);
        let seconds_on_cores = seconds_on_cores(measured, host);
        Self {
            method: measured.method,
            level: measured.level,
            seconds_per_gib: seconds_on_link.max(seconds_on_cores),
            seconds_on_link,
            seconds_on_cores,
            limited_by: match seconds_on_link >= seconds_on_cores {
                true => "link",
                false => "cores",
            },
        }
    }

    fn text(&self) -> String {
        format!(
            "{:<12}{:>7.3} s (link {:.3} s, cores {:.3} s), limited by the {}",
            label(self.method, self.level),
            self.seconds_per_gib,
            self.seconds_on_link,
            self.seconds_on_cores,
            self.limited_by
        )
    }
}

/// The soonest, or what is equal to it and costs less.
fn best(candidates: &[Candidate]) -> Option<&Candidate> {
    let times = candidates.iter().map(|candidate| candidate.seconds_per_gib);
    let soonest = times.min_by(f64::total_cmp)?;
    candidates
        .iter()
        .filter(|candidate| candidate.seconds_per_gib <= soonest * TIE)
        .min_by(|a, b| a.seconds_on_cores.total_cmp(&b.seconds_on_cores))
}

fn seconds_on_link(measured: &Measured, gbit_per_second: u32) -> f64 {
    GIB / measured.ratio / (f64::from(gbit_per_second) * 1e9 / 8.0)
}

fn seconds_on_cores(measured: &Measured, host: Host) -> f64 {
    let encoding = GIB / measured.bytes_per_second;
    (host.hops.seconds_per_gib(measured.ratio) + encoding) / host.cores as f64
}

const GIB: f64 = (1u64 << 30) as f64;

fn label(method: &str, level: Option<i32>) -> String {
    match level {
        Some(level) => format!("{method} {level}"),
        None => method.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(method: &'static str, mb_per_second: f64, ratio: f64) -> Measured {
        Measured {
            method,
            level: None,
            engine: "",
            fallbacks: 0,
            bytes_per_second: mb_per_second * 1e6,
            decoded_bytes_per_second: mb_per_second * 1e6,
            ratio,
            understood_by: match method {
                "none" | "dense" => FarSide::AnyQemu,
                _ => FarSide::Vamoose,
            },
        }
    }

    /// Sockets cost nothing.
    fn host(cores: usize) -> Host {
        let hops = Hops::default();
        Host { cores, hops }
    }

    fn methods() -> [Measured; 3] {
        [
            measured("none", 10_000.0, 1.0),
            measured("dense", 100.0, 4.0),
            measured("quick", 1000.0, 2.0),
        ]
    }

    #[test]
    fn slow_links_get_the_best_ratio_and_fast_ones_the_fastest_encoder() {
        let pick = |gbits, cores| {
            let link = Link::new(&methods(), gbits, host(cores)).unwrap();
            (link.best.method, link.best.limited_by)
        };
        // 125 MB/s x 4 = 500 MB/s, which 10 cores encode and 2 do not.
        assert_eq!(pick(1, 10), ("dense", "link"));
        assert_eq!(pick(1, 2), ("quick", "link"));
        // 1250 MB/s uncompressed, or 1000 MB/s of one quick core.
        assert_eq!(pick(10, 1), ("none", "link"));
        assert_eq!(pick(10, 2), ("quick", "cores"));
        assert_eq!(pick(100, 2), ("none", "link"));
        assert_eq!(pick(100, 1), ("none", "cores"));
        assert!(Link::new(&[], 1, host(1)).is_none());
    }

    #[test]
    fn the_time_is_that_of_the_slower_stage() {
        let link = Link::new(&[measured("none", 1000.0, 1.0)], 1, host(1)).unwrap();
        assert!((link.best.seconds_on_link - 1.073_741_824 * 8.0).abs() < 1e-9);
        assert!((link.best.seconds_on_cores - 1.073_741_824).abs() < 1e-9);
        assert_eq!(link.best.seconds_per_gib, link.best.seconds_on_link);
    }

    #[test]
    fn sockets_take_the_cores_too() {
        let hops = Hops {
            from_qemu: Some(0.5),
            sending: Some(0.4),
        };
        let host = Host { cores: 2, hops };
        let seconds = |ratio| seconds_on_cores(&measured("quick", 1_073.741_824, ratio), host);
        assert!((seconds(1.0) - 0.95).abs() < 1e-9);
        assert!((seconds(2.0) - 0.85).abs() < 1e-9);
    }

    #[test]
    fn equal_times_go_to_the_method_that_costs_less() {
        let pick = |ratio| {
            let methods = [measured("dense", 500.0, ratio), methods()[2].clone()];
            Link::new(&methods, 1, host(2)).unwrap().best.method
        };
        assert_eq!(pick(2.29), "quick");
        assert_eq!(pick(2.31), "dense");
    }

    #[test]
    fn what_only_vamoose_understands_has_a_stock_alternative() {
        let link = Link::new(&methods(), 10, host(2)).unwrap();
        assert_eq!(link.best.method, "quick");
        assert_eq!(link.stock.as_ref().unwrap().method, "none");
        let mut lines = Lines::default();
        link.describe(&mut lines);
        assert!(lines.0.contains("stock QEMU: none"), "{}", lines.0);
        // The same one is not printed twice.
        let mut lines = Lines::default();
        Link::new(&methods(), 100, host(2))
            .unwrap()
            .describe(&mut lines);
        assert!(!lines.0.contains("stock QEMU"), "{}", lines.0);
    }

    #[test]
    fn what_could_not_be_measured_is_said() {
        let mut lines = Lines::default();
        let advice = Advice {
            sample: "",
            cores: 1,
            hops: Hops::default(),
            methods: Vec::new(),
            unmeasured: vec![Unmeasured {
                method: "qatzip",
                level: Some(1),
                reason: "it lies".to_owned(),
            }],
            links: Vec::new(),
        };
        advice.describe(&mut lines);
        assert!(
            lines.0.contains("qatzip 1    not measured: it lies"),
            "{}",
            lines.0
        );
    }
}
