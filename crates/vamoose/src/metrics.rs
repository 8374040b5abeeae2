//! Metrics of a gateway or a server, for Prometheus. docs/metrics.md describes them for operators.
//!
//! Each migration has its own counters. [`Counts`] is an observer of their beginnings and ends; for each request (`responder`),
//! it adds the counters of migrations under way to the totals of those that have ended.

mod responder;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex},
};

use anyhow::Result;
use clap::Args;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, text::encode},
    metrics::{
        MetricType,
        counter::ConstCounter,
        gauge::ConstGauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::{Registry, Unit},
};
use tracing::info;
use vamoose_link::{Address, LinkFaults, Snapshot, lock};
use vamoose_relay::{End, EndKind, Observed, Observer, Role};

pub use responder::Responder;

/// Option of the servers.
#[derive(Args, Debug)]
pub struct MetricsOption {
    /// Address at which to serve metrics for Prometheus: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    pub metrics: Option<Address>,
}

/// The migrations of this process, by direction and other host.
#[derive(Debug, Default)]
pub struct Counts(Mutex<BTreeMap<Host, Count>>);

/// Direction of migrations, and the other host.
type Host = (Role, String);

#[derive(Debug)]
struct Count {
    live: Vec<Arc<Observed>>,
    /// Values of [`COUNTERS`], of migrations that have ended.
    done: [f64; COUNTERS.len()],
    ends: [u64; EndKind::ALL.len()],
    duration: Histogram,
    switchover: Histogram,
}

/// Serves metrics at `address` until the responder is dropped.
///
/// # Errors
/// When the address is taken or not this host's.
pub fn serve(address: &Address, counts: &Arc<Counts>) -> Result<Responder> {
    let mut registry = Registry::default();
    registry.register(
        "vamoose_build",
        "The version of vamoose",
        Info::new([("version", env!("CARGO_PKG_VERSION"))]),
    );
    registry.register_collector(Box::new(counts.clone()));
    let responder = Responder::start(address, move || {
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    })?;
    info!("metrics at {}", responder.address());
    Ok(responder)
}

impl Counts {
    /// Adds counters of zero for these hosts, so that a first failure is an increase.
    pub fn expect<'a>(&self, peers: impl IntoIterator<Item = &'a str>) {
        let mut counts = lock(&self.0);
        for peer in peers {
            for role in [Role::Source, Role::Destination] {
                counts.entry((role, peer.to_owned())).or_default();
            }
        }
    }
}

impl Observer for Counts {
    fn begun(&self, migration: &Arc<Observed>) {
        let mut counts = lock(&self.0);
        let count = counts.entry(host(migration)).or_default();
        count.live.push(migration.clone());
    }

    fn ended(&self, migration: &Arc<Observed>, end: End) {
        let mut counts = lock(&self.0);
        let count = counts.entry(host(migration)).or_default();
        count.live.retain(|other| !Arc::ptr_eq(other, migration));
        add(&mut count.done, migration, &end.faults);
        count.ends[end.kind as usize] += 1;
        if end.kind != EndKind::Refused {
            let took = migration.began.elapsed();
            count.duration.observe(took.as_secs_f64());
        }
        if let Some(seen) = end.switchover {
            let took = seen.loaded.saturating_duration_since(seen.last_sync);
            count.switchover.observe(took.as_secs_f64());
        }
    }
}

fn host(migration: &Observed) -> Host {
    (migration.role, migration.peer.clone())
}

fn add(values: &mut [f64], migration: &Observed, faults: &LinkFaults) {
    let snapshot = migration.stats.snapshot();
    for (value, counter) in values.iter_mut().zip(&COUNTERS) {
        *value += (counter.of)(migration.role, &snapshot, faults);
    }
}

impl Default for Count {
    fn default() -> Self {
        Self {
            live: Vec::new(),
            done: [0.0; COUNTERS.len()],
            ends: Default::default(),
            // Half a second to a bit more than an hour, and 2 ms to 16 s.
            duration: Histogram::new(exponential_buckets(0.5, 2.0, 14)),
            switchover: Histogram::new(exponential_buckets(0.002, 2.0, 14)),
        }
    }
}

/// A counter of migrations.
struct Counter {
    name: &'static str,
    help: &'static str,
    unit: Option<&'static Unit>,
    /// The label besides those of [`Host`].
    label: Option<Label>,
    /// Value that a migration has reached.
    of: fn(Role, &Snapshot, &LinkFaults) -> f64,
}

type Label = (&'static str, &'static str);

/// Counters of one name follow each other.
const COUNTERS: [Counter; 14] = [
    Counter {
        name: "vamoose_migration_guest",
        help: "Bytes between this process and QEMUs, before encoding and after decoding",
        unit: Some(&Unit::Bytes),
        label: None,
        of: |role, moved, _| match role {
            Role::Source => moved.received_bytes as f64,
            Role::Destination => moved.wire_bytes as f64,
        },
    },
    Counter {
        name: "vamoose_migration_link",
        help: "Bytes between this process and the other host's, encoded, without the overhead of TLS",
        unit: Some(&Unit::Bytes),
        label: None,
        of: |role, moved, _| match role {
            Role::Source => moved.wire_bytes as f64,
            Role::Destination => moved.received_bytes as f64,
        },
    },
    Counter {
        label: Some(("kind", "normal")),
        of: |_, moved, _| moved.normal_pages as f64,
        ..PAGES
    },
    Counter {
        label: Some(("kind", "zero")),
        of: |_, moved, _| moved.zero_pages as f64,
        ..PAGES
    },
    Counter {
        name: "vamoose_migration_difference_pages",
        help: "Normal pages sent as the difference to an earlier version",
        unit: None,
        label: None,
        of: |_, moved, _| moved.delta_pages as f64,
    },
    Counter {
        name: "vamoose_migration_syncs",
        help: "SYNCs passed on, one for each round",
        unit: None,
        label: None,
        of: |_, moved, _| moved.syncs as f64,
    },
    Counter {
        label: Some(("stage", "encode")),
        of: |_, moved, _| moved.encode_time.as_secs_f64(),
        ..CPU
    },
    Counter {
        label: Some(("stage", "decode")),
        of: |_, moved, _| moved.decode_time.as_secs_f64(),
        ..CPU
    },
    Counter {
        label: Some(("result", "accelerated")),
        of: |_, moved, _| moved.engines.accelerated as f64,
        ..OPERATIONS
    },
    Counter {
        label: Some(("result", "fallback")),
        of: |_, moved, _| moved.engines.fallbacks as f64,
        ..OPERATIONS
    },
    Counter {
        label: Some(("result", "wrong")),
        of: |_, moved, _| moved.engines.wrong as f64,
        ..OPERATIONS
    },
    Counter {
        name: "vamoose_session_reconnects",
        help: "Connections to the other host that were replaced, of migrations that have ended",
        unit: None,
        label: None,
        of: |_, _, faults| faults.reconnects as f64,
    },
    Counter {
        label: Some(("check", "frame")),
        of: |_, _, faults| faults.corrupt_frames as f64,
        ..CHECKS
    },
    Counter {
        label: Some(("check", "pages")),
        of: |_, moved, _| moved.changed_packets as f64,
        ..CHECKS
    },
];

const PAGES: Counter = Counter {
    name: "vamoose_migration_pages",
    help: "Pages passed on: with their content, or as the mere fact that they are zero",
    unit: None,
    label: None,
    of: |_, _, _| 0.0,
};

const CPU: Counter = Counter {
    name: "vamoose_migration_cpu",
    help: "CPU time of encoding and decoding",
    unit: Some(&Unit::Seconds),
    ..PAGES
};

const OPERATIONS: Counter = Counter {
    name: "vamoose_engine_operations",
    help: "Operations for which there is a device, by their result",
    ..PAGES
};

const CHECKS: Counter = Counter {
    name: "vamoose_session_check_failures",
    help: "Checksum mismatches",
    ..PAGES
};

impl Collector for Counts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = lock(&self.0);
        let ended = counts.iter().flat_map(|(host, count)| {
            let ends = EndKind::ALL.iter().zip(count.ends);
            ends.map(|(kind, ends)| {
                let labels = labels(host, Some(("outcome", kind.name())));
                (labels, ConstCounter::new(ends))
            })
        });
        let help = "Migrations that have ended";
        family(
            &mut encoder,
            "vamoose_migrations",
            help,
            None,
            MetricType::Counter,
            ended,
        )?;
        let live = counts.iter().map(|(host, count)| {
            let live = ConstGauge::new(count.live.len());
            (labels(host, None), live)
        });
        let (name, help) = ("vamoose_migrations_in_flight", "Migrations under way");
        family(&mut encoder, name, help, None, MetricType::Gauge, live)?;
        let moved = counts.iter().map(|(host, count)| {
            let mut values = count.done;
            for migration in &count.live {
                add(&mut values, migration, &LinkFaults::default());
            }
            (host, values)
        });
        let moved: Vec<_> = moved.collect();
        let mut at = 0;
        for counters in COUNTERS.chunk_by(|one, other| one.name == other.name) {
            let values = moved.iter().flat_map(|(host, values)| {
                let values = counters.iter().zip(&values[at..]);
                values.map(|(counter, value)| {
                    (labels(host, counter.label), ConstCounter::new(*value))
                })
            });
            let Counter {
                name, help, unit, ..
            } = &counters[0];
            family(&mut encoder, name, help, *unit, MetricType::Counter, values)?;
            at += counters.len();
        }
        let seconds = Some(&Unit::Seconds);
        let durations = counts.iter();
        let durations = durations.map(|(host, count)| (labels(host, None), count.duration.clone()));
        family(
            &mut encoder,
            "vamoose_migration_duration",
            "From the first connection to the end, of migrations that were not refused",
            seconds,
            MetricType::Histogram,
            durations,
        )?;
        let times = counts.iter();
        let times = times.map(|(host, count)| (labels(host, None), count.switchover.clone()));
        family(
            &mut encoder,
            "vamoose_migration_switchover",
            "From the last page to the message that the guest is loaded, where both were seen",
            seconds,
            MetricType::Histogram,
            times,
        )
    }
}

fn labels((role, peer): &Host, more: Option<Label>) -> Vec<(&'static str, String)> {
    let direction = match role {
        Role::Source => "outgoing",
        Role::Destination => "incoming",
    };
    let mut labels = vec![("direction", direction.to_owned()), ("peer", peer.clone())];
    labels.extend(more.map(|(name, value)| (name, value.to_owned())));
    labels
}

/// Writes a metric with a value for each set of labels. The type is given, as there may be no values yet.
fn family<M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    kind: MetricType,
    values: impl IntoIterator<Item = (Vec<(&'static str, String)>, M)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, unit, kind)?;
    for (labels, value) in values {
        value.encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}
