//! How fast one core encodes and decodes by each method, in this build and on this host.
//!
//! Software is timed in processor time, which a busy host distorts little. A device works while its thread waits, so it is timed
//! in wall-clock time.

use std::{fmt, hint::black_box, sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use multifd::{Layout, Method};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use vamoose_codec::{Accel, DecodedBy, Engines, Health, Registry, Settings, Verify, info};

use super::{Lines, sample};

/// Speed of every method.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Speeds {
    /// What the pages were.
    sample: &'static str,
    methods: Vec<Measured>,
    unmeasured: Vec<Unmeasured>,
}

/// Speed of one core with a method and its engine.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Measured {
    method: &'static str,
    level: Option<i32>,
    /// The engine that encodes: a library, or the device that takes its place.
    engine: &'static str,
    /// Packets that software encoded although there is a device.
    fallbacks: u64,
    /// Page bytes encoded per second of a core.
    bytes_per_second: f64,
    /// Page bytes decoded per second of a core.
    decoded_bytes_per_second: f64,
    /// Page bytes per byte of payload.
    ratio: f64,
    understood_by: FarSide,
}

/// A method that an engine of this host failed at.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Unmeasured {
    method: &'static str,
    level: Option<i32>,
    reason: String,
}

/// Destinations that can decode a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FarSide {
    /// QEMU as distributions build it.
    AnyQemu,
    /// QEMU built with the method's library, which distributions leave out.
    SomeQemu,
    /// Another vamoose only.
    Vamoose,
}

impl Speeds {
    pub(super) fn measure(registry: &Arc<Registry>) -> Self {
        let (methods, unmeasured) = measure_all(registry);
        Self {
            sample: sample::DESCRIPTION,
            methods,
            unmeasured,
        }
    }

    pub(super) fn describe(&self, lines: &mut Lines) {
        const NAME: &str = "one core";
        lines.put("sample", self.sample);
        lines.put(
            NAME,
            format_args!(
                "{:<14}{:<11}{:>12}{:>12}{:>7}  {}",
                "method", "engine", "encodes", "decodes", "ratio", "destination"
            ),
        );
        for measured in &self.methods {
            lines.put(NAME, measured);
        }
        for unmeasured in &self.unmeasured {
            let label = label(unmeasured.method, unmeasured.level);
            let reason = &unmeasured.reason;
            lines.put(NAME, format_args!("{label:<14}not measured: {reason}"));
        }
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<14}{:<11}{:>7.0} MB/s{:>7.0} MB/s{:>7.2}  {}",
            label(self.method, self.level),
            self.engine,
            self.bytes_per_second / 1e6,
            self.decoded_bytes_per_second / 1e6,
            self.ratio,
            self.understood_by,
        )?;
        match self.fallbacks {
            0 => Ok(()),
            packets => write!(f, ", {packets} packets encoded in software"),
        }
    }
}

fn label(method: &str, level: Option<i32>) -> String {
    match level {
        Some(level) => format!("{method} {level}"),
        None => method.to_owned(),
    }
}

/// Measures every method that this build can encode.
fn measure_all(registry: &Arc<Registry>) -> (Vec<Measured>, Vec<Unmeasured>) {
    let all: Vec<Engines> = Method::ALL
        .into_iter()
        .flat_map(|method| {
            levels(method)
                .iter()
                .map(move |level| Settings::new(method, *level))
        })
        .flatten()
        .filter_map(|settings| {
            let engines = registry.choose(settings, Accel::Auto, Verify::Sample);
            engines.ok()
        })
        .collect();
    let packets = sample::packets(LAYOUT);
    let share = CPU_TIME.div_f64((all.len() as f64).max(1.0));
    let (mut measured, mut unmeasured) = (Vec::new(), Vec::new());
    for engines in all {
        match measure(&engines, &packets, share) {
            Ok(found) => measured.push(found),
            Err(error) => unmeasured.push(Unmeasured {
                method: engines.settings().method().name(),
                level: engines.settings().level(),
                reason: format!("{error:#}"),
            }),
        }
    }
    (measured, unmeasured)
}

/// Two seconds, together with making the sample.
const CPU_TIME: Duration = Duration::from_millis(1700);

const LAYOUT: Layout = Layout::X86;

/// Levels worth choosing; `None` is the method's default.
fn levels(method: Method) -> &'static [Option<i32>] {
    match method {
        Method::Zstd => &[Some(1), Some(-5)],
        Method::Lz4 => &[Some(1), Some(8)],
        Method::Qpl => &[Some(0), Some(1)],
        _ => &[None],
    }
}

fn measure(engines: &Engines, packets: &[Vec<u8>], share: Duration) -> Result<Measured> {
    let settings = engines.settings();
    let software = settings.engine();
    let clock = match engines.name() == software {
        true => Clock::Processor,
        false => Clock::Wall,
    };
    let bench = Bench {
        engines,
        packets,
        clock,
        health: Arc::default(),
    };
    // Encoding is usually the bottleneck.
    let encoded = bench.encode(share.mul_f64(2.0 / 3.0))?;
    let decoded = bench.decode(&encoded.payloads, share.mul_f64(1.0 / 3.0))?;
    let tally = bench.health.tally();
    Ok(Measured {
        method: settings.method().name(),
        level: settings.level(),
        // A device that is there and did nothing was not what was measured.
        engine: match tally.accelerated {
            0 => software,
            _ => engines.name(),
        },
        fallbacks: tally.fallbacks,
        bytes_per_second: encoded.meter.bytes_per_second(),
        decoded_bytes_per_second: decoded.bytes_per_second(),
        ratio: encoded.ratio,
        understood_by: FarSide::of(settings.method()),
    })
}

struct Bench<'a> {
    engines: &'a Engines,
    packets: &'a [Vec<u8>],
    clock: Clock,
    health: Arc<Health>,
}

/// What encoding gave.
struct Encoded {
    meter: Meter,
    ratio: f64,
    /// Of a channel's first packets, in their order, for the decoder.
    payloads: Vec<(Method, Vec<u8>)>,
}

/// Passes over the sample that suffice for fast methods.
const MOST_PASSES: usize = 4;

impl Bench<'_> {
    fn encode(&self, time: Duration) -> Result<Encoded> {
        let mut encoder = self.engines.encoder(LAYOUT, &self.health)?;
        let mut out = vec![0; LAYOUT.max_payload()];
        let mut socket = out.clone();
        let mut meter = Meter::default();
        let (mut page_bytes, mut payload_bytes) = (0, 0);
        let mut payloads = Vec::new();
        let most = MOST_PASSES * self.packets.len();
        for (number, packet) in self.packets.iter().cycle().take(most).enumerate() {
            let start = self.clock.now();
            let encoded = encoder.encode(packet, &mut out)?;
            // The copy that a socket makes: it is all that method none costs.
            socket[..encoded.payload.len()].copy_from_slice(encoded.payload);
            black_box(&mut socket);
            let spent = self.clock.now().saturating_sub(start);
            if number < self.packets.len() {
                page_bytes += packet.len();
                payload_bytes += encoded.payload.len();
                payloads.push((encoded.method, encoded.payload.to_vec()));
            }
            // The first packet pays for tables and page faults.
            if number > 0 && meter.add(packet.len(), spent) >= time {
                break;
            }
        }
        Ok(Encoded {
            meter,
            ratio: page_bytes as f64 / (payload_bytes as f64).max(1.0),
            payloads,
        })
    }

    /// Decodes the first packets of a channel again and again.
    fn decode(&self, payloads: &[(Method, Vec<u8>)], time: Duration) -> Result<Meter> {
        let mut pages = vec![0; LAYOUT.packet_bytes()];
        let mut meter = Meter::default();
        for _ in 0..MOST_PASSES {
            let mut decoder = self.engines.decoder(LAYOUT, &self.health);
            for (number, (packet, (method, payload))) in
                self.packets.iter().zip(payloads).enumerate()
            {
                let start = self.clock.now();
                decoder.decode(*method, payload, &mut pages)?;
                let spent = self.clock.now().saturating_sub(start);
                ensure!(pages == *packet, "it decodes to other pages");
                // As for encoding.
                if number > 0 && meter.add(packet.len(), spent) >= time {
                    return Ok(meter);
                }
            }
        }
        Ok(meter)
    }
}

/// Bytes of pages, and the time they took.
#[derive(Default)]
struct Meter {
    bytes: usize,
    time: Duration,
}

impl Meter {
    /// Returns the time so far.
    fn add(&mut self, bytes: usize, time: Duration) -> Duration {
        self.bytes += bytes;
        self.time += time;
        self.time
    }

    fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.time.as_secs_f64().max(1e-9)
    }
}

#[derive(Clone, Copy)]
enum Clock {
    /// Time that this thread had of a core.
    Processor,
    Wall,
}

impl Clock {
    fn now(self) -> Duration {
        let id = match self {
            Self::Processor => ClockId::ThreadCPUTime,
            Self::Wall => ClockId::Monotonic,
        };
        Duration::try_from(clock_gettime(id)).unwrap_or_default()
    }
}

impl FarSide {
    fn of(method: Method) -> Self {
        match info(method).map(|info| info.decoded_by) {
            Some(DecodedBy::AnyQemu) => Self::AnyQemu,
            Some(DecodedBy::SomeQemu) | None => Self::SomeQemu,
            Some(DecodedBy::Vamoose) => Self::Vamoose,
        }
    }
}

impl fmt::Display for FarSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AnyQemu => "any QEMU",
            Self::SomeQemu => "QEMUs built with it",
            Self::Vamoose => "vamoose only",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_of_this_build_is_measured_both_ways() {
        let (measured, unmeasured) = measure_all(&Arc::new(Registry::new()));
        assert!(unmeasured.is_empty(), "{unmeasured:?}");
        for method in Method::ALL {
            let found = measured.iter().any(|m| m.method == method.name());
            assert_eq!(found, Settings::new(method, None).is_ok(), "{method}");
        }
        for one in measured {
            let speeds = [one.bytes_per_second, one.decoded_bytes_per_second];
            assert!(speeds.iter().all(|speed| *speed > 1e6), "{one:?}");
            assert_eq!(one.ratio > 1.2, one.method != "none", "{one:?}");
        }
    }

    #[test]
    fn a_method_that_failed_is_listed_with_its_reason() {
        let mut lines = Lines::default();
        let speeds = Speeds {
            sample: "",
            methods: Vec::new(),
            unmeasured: vec![Unmeasured {
                method: "qatzip",
                level: Some(1),
                reason: "it lies".to_owned(),
            }],
        };
        speeds.describe(&mut lines);
        assert!(
            lines.0.contains("qatzip 1      not measured: it lies"),
            "{}",
            lines.0
        );
    }

    #[test]
    fn distributions_build_only_what_needs_no_accelerator() {
        assert_eq!(FarSide::of(Method::Zstd), FarSide::AnyQemu);
        assert_eq!(FarSide::of(Method::Qatzip), FarSide::SomeQemu);
        assert_eq!(FarSide::of(Method::Lz4), FarSide::Vamoose);
    }

    #[test]
    fn other_pages_than_were_encoded_are_an_error() {
        let engines = Engines::software(Settings::new(Method::None, None).unwrap());
        let bench = Bench {
            engines: &engines,
            packets: &[vec![1; LAYOUT.packet_bytes()]],
            clock: Clock::Wall,
            health: Arc::default(),
        };
        let payloads = [(Method::None, vec![2; LAYOUT.packet_bytes()])];
        let error = bench.decode(&payloads, Duration::ZERO).err().unwrap();
        assert_eq!(error.to_string(), "it decodes to other pages");
    }
}
