//! How fast one core encodes and decodes by each method, in this build and on this host.
//!
//! Software is timed in processor time, which a busy host distorts little. A device works while its thread waits, so it is timed
//! in wall-clock time.

use std::{
    fs::File,
    hint::black_box,
    io::{BufReader, Read as _},
    sync::Arc,
    time::Duration,
};

use anyhow::{Result, ensure};
use multifd::{Layout, Method};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tracing::warn;
use vamoose_codec::{Accel, DecodedBy, Engines, Registry, Settings, Verify, info};

use super::Lines;

/// Speed of every method.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Speeds {
    /// Description of the pages.
    sample: &'static str,
    methods: Vec<Measured>,
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
    /// Destinations that can decode the method.
    understood_by: &'static str,
}

const LAYOUT: Layout = Layout::X86;

/// Time for all methods together.
const TIME: Duration = Duration::from_millis(1700);

const SAMPLE: &str = "pages of this program's file, none of them zero: real guests differ";

/// 32 MiB: more than any window, and than most caches hold.
const PACKETS: usize = 64;

impl Speeds {
    /// Measures every method that this build can encode; none without pages to measure with.
    pub(super) fn measure(registry: &Arc<Registry>) -> Self {
        let settings = Method::ALL.into_iter().flat_map(|method| {
            let levels = levels(method).iter();
            levels.filter_map(move |level| Settings::new(method, *level).ok())
        });
        let engines = settings.map(|it| registry.choose(it, Accel::Auto, Verify::Sample));
        let engines: Vec<_> = engines.flatten().collect();
        let packets = sample().unwrap_or_else(|error| {
            warn!("cannot measure any method: cannot read this program's file: {error:#}");
            Vec::new()
        });
        let share = TIME.div_f64((engines.len() as f64).max(1.0));
        let mut methods = Vec::new();
        for engines in engines.iter().filter(|_| !packets.is_empty()) {
            let method = label(
                engines.settings().method().name(),
                engines.settings().level(),
            );
            match measure(engines, &packets, share) {
                Ok(measured) => methods.push(measured),
                Err(error) => warn!("cannot measure {method}: {error:#}"),
            }
        }
        Self {
            sample: SAMPLE,
            methods,
        }
    }

    pub(super) fn describe(&self, lines: &mut Lines) {
        const NAME: &str = "one core";
        lines.put("sample", self.sample);
        lines.put(
            NAME,
            "method        engine          encodes     decodes  ratio  destination",
        );
        for measured in &self.methods {
            let fallbacks = match measured.fallbacks {
                0 => String::new(),
                packets => format!(", {packets} packets encoded in software"),
            };
            lines.put(
                NAME,
                format_args!(
                    "{:<14}{:<11}{:>7.0} MB/s{:>7.0} MB/s{:>7.2}  {}{fallbacks}",
                    label(measured.method, measured.level),
                    measured.engine,
                    measured.bytes_per_second / 1e6,
                    measured.decoded_bytes_per_second / 1e6,
                    measured.ratio,
                    measured.understood_by,
                ),
            );
        }
    }
}

fn label(method: &str, level: Option<i32>) -> String {
    match level {
        Some(level) => format!("{method} {level}"),
        None => method.to_owned(),
    }
}

/// Levels worth choosing; `None` is the method's default.
fn levels(method: Method) -> &'static [Option<i32>] {
    match method {
        Method::Zstd => &[Some(1), Some(-5)],
        Method::Lz4 => &[Some(1), Some(8)],
        Method::Qpl => &[Some(0), Some(1)],
        _ => &[None],
    }
}

/// Packets full of pages: code, tables and text, which compress about as the memory of many guests.
fn sample() -> Result<Vec<Vec<u8>>> {
    let mut file = BufReader::new(File::open("/proc/self/exe")?);
    let mut pages = Vec::new();
    let mut page = vec![0; LAYOUT.page_size()];
    while pages.len() < PACKETS * LAYOUT.packet_bytes() && file.read_exact(&mut page).is_ok() {
        if page.iter().any(|byte| *byte != 0) {
            pages.extend_from_slice(&page);
        }
    }
    let packets = pages.chunks_exact(LAYOUT.packet_bytes());
    ensure!(packets.len() > 0, "too short");
    Ok(packets.map(<[u8]>::to_vec).collect())
}

fn measure(engines: &Engines, packets: &[Vec<u8>], share: Duration) -> Result<Measured> {
    let settings = engines.settings();
    let clock = match engines.name() == settings.engine() {
        true => ClockId::ThreadCPUTime,
        false => ClockId::Monotonic,
    };
    let now = || Duration::try_from(clock_gettime(clock)).unwrap_or_default();
    let health = Arc::default();
    let mut encoder = engines.encoder(LAYOUT, &health)?;
    let mut decoder = engines.decoder(LAYOUT, &health);
    let mut out = vec![0; LAYOUT.max_payload()];
    let mut socket = out.clone();
    let mut pages = vec![0; LAYOUT.packet_bytes()];
    let (mut encoding, mut decoding) = (Duration::ZERO, Duration::ZERO);
    let (mut page_bytes, mut payload_bytes) = (0, 0);
    for (number, packet) in packets.iter().cycle().enumerate() {
        let start = now();
        let encoded = encoder.encode(packet, &mut out)?;
        // The copy that a socket makes is all that method none costs.
        socket[..encoded.payload.len()].copy_from_slice(encoded.payload);
        black_box(&mut socket);
        let middle = now();
        decoder.decode(encoded.method, encoded.payload, &mut pages)?;
        let end = now();
        ensure!(pages == *packet, "the packet decodes to other pages");
        // The first packet pays for tables and page faults.
        if number > 0 {
            encoding += middle.saturating_sub(start);
            decoding += end.saturating_sub(middle);
            page_bytes += packet.len();
            payload_bytes += encoded.payload.len();
        }
        if number > 0 && encoding + decoding >= share {
            break;
        }
    }
    let tally = health.tally();
    let rate = |time: Duration| page_bytes as f64 / time.as_secs_f64().max(1e-9);
    Ok(Measured {
        method: settings.method().name(),
        level: settings.level(),
        // A device that is there and did nothing was not what was measured.
        engine: match tally.accelerated {
            0 => settings.engine(),
            _ => engines.name(),
        },
        fallbacks: tally.fallbacks,
        bytes_per_second: rate(encoding),
        decoded_bytes_per_second: rate(decoding),
        ratio: page_bytes as f64 / (payload_bytes as f64).max(1.0),
        understood_by: understood_by(settings.method()),
    })
}

/// Distributions build only the libraries of zlib and zstd into QEMU.
fn understood_by(method: Method) -> &'static str {
    match info(method).map(|info| info.decoded_by) {
        Some(DecodedBy::AnyQemu) => "any QEMU",
        Some(DecodedBy::SomeQemu) | None => "QEMUs built with it",
        Some(DecodedBy::Vamoose) => "vamoose only",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_of_this_build_is_measured_both_ways() {
        let measured = Speeds::measure(&Arc::new(Registry::new())).methods;
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
    fn distributions_build_only_what_needs_no_accelerator() {
        assert_eq!(understood_by(Method::Zstd), "any QEMU");
        assert_eq!(understood_by(Method::Qatzip), "QEMUs built with it");
        assert_eq!(understood_by(Method::Lz4), "vamoose only");
    }
}
