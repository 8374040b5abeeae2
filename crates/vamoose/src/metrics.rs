//! Metrics of a gateway or a server, for Prometheus. docs/metrics.md describes them for operators.
//!
//! Each migration has its own counters. [`Counts`] observes when migrations begin and end. For each request (`responder`), it adds
//! the counters of migrations under way to the totals of those that have ended.

mod responder;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
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
use vamoose_link::{Address, Counters, Limit, LinkFaults, PageStore, StoreUse, lock};
use vamoose_relay::{End, EndKind, Observed, Observer, Role};

pub use responder::Responder;

/// Metrics option of the gateway and the server.
#[derive(Args, Debug)]
pub struct MetricsOption {
    /// Address at which to serve metrics for Prometheus: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    pub metrics: Option<Address>,
}

/// The migrations of this process, by direction and peer.
#[derive(Debug, Default)]
pub struct Counts {
    hosts: Mutex<BTreeMap<Host, Count>>,
    /// Complete guests whose sources are silent: of a server.
    orphaned: OnceLock<AtomicUsize>,
}

/// Direction of migrations, and the name of the peer.
type Host = (Role, String);

#[derive(Debug)]
struct Count {
    live: Vec<Arc<Observed>>,
    /// Values of migrations that have ended.
    done: Values,
    ends: [u64; EndKind::ALL.len()],
    duration: Histogram,
    switchover: Histogram,
}

/// The bandwidth limits of this process, by direction of migrations.
#[derive(Debug)]
struct Limits(Vec<(Role, Limit)>);

/// The page store of this process.
#[derive(Debug)]
struct Store(PageStore);

/// Serves metrics at `address` until the responder is dropped.
///
/// # Errors
/// If the address is in use, or is not an address of this host.
pub fn serve(
    address: &Address,
    counts: &Arc<Counts>,
    limits: Vec<(Role, Limit)>,
    store: Option<&PageStore>,
) -> Result<Responder> {
    let mut registry = Registry::default();
    registry.register(
        "vamoose_build",
        "The version of vamoose",
        Info::new([("version", env!("CARGO_PKG_VERSION"))]),
    );
    registry.register_collector(Box::new(counts.clone()));
    registry.register_collector(Box::new(Limits(limits)));
    if let Some(store) = store {
        registry.register_collector(Box::new(Store(store.clone())));
    }
    let responder = Responder::start(address, move || {
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    })?;
    info!("metrics at {}", responder.address());
    Ok(responder)
}

impl Counts {
    /// Adds zero counters for these peers, so that a first failure is seen as an increase.
    pub fn expect<'a>(&self, peers: impl IntoIterator<Item = &'a str>) {
        let mut counts = lock(&self.hosts);
        for peer in peers {
            for role in [Role::Source, Role::Destination] {
                counts.entry((role, peer.to_owned())).or_default();
            }
        }
    }
}

impl Observer for Counts {
    fn begun(&self, migration: &Arc<Observed>) {
        let mut counts = lock(&self.hosts);
        let count = counts.entry(host(migration)).or_default();
        count.live.push(migration.clone());
    }

    fn ended(&self, migration: &Arc<Observed>, end: End) {
        let mut counts = lock(&self.hosts);
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

    fn orphaned(&self, guests: usize) {
        let orphaned = self.orphaned.get_or_init(AtomicUsize::default);
        orphaned.store(guests, Ordering::Relaxed);
    }
}

fn host(migration: &Observed) -> Host {
    (migration.role, migration.peer.clone())
}

fn add(values: &mut Values, migration: &Observed, faults: &LinkFaults) {
    let snapshot = migration.stats.snapshot();
    for (values, metric) in values.iter_mut().zip(&METRICS) {
        for (value, (_, counter)) in values.iter_mut().zip(metric.counters) {
            *value += counter(migration.role, &snapshot, faults);
        }
    }
}

impl Default for Count {
    fn default() -> Self {
        Self {
            live: Vec::new(),
            done: Values::default(),
            ends: Default::default(),
            // From 0.5 s to slightly more than an hour, and from 2 ms to 16 s.
            duration: Histogram::new(exponential_buckets(0.5, 2.0, 14)),
            switchover: Histogram::new(exponential_buckets(0.002, 2.0, 14)),
        }
    }
}

/// A metric with the counters of migrations.
struct Metric {
    name: &'static str,
    help: &'static str,
    unit: Option<&'static Unit>,
    /// Counters; if there are several, each has a label.
    counters: &'static [(Option<Label>, Counter)],
}

type Label = (&'static str, &'static str);

/// Value of a counter for one migration.
type Counter = fn(Role, &Counters, &LinkFaults) -> f64;

/// Values of all counters, by metric.
type Values = [[f64; MOST]; METRICS.len()];

/// Most counters of a metric.
const MOST: usize = 3;

const METRICS: [Metric; 10] = [
    Metric {
        name: "vamoose_migration_guest",
        help: "Bytes between this process and QEMUs, before encoding and after decoding",
        unit: Some(&Unit::Bytes),
        counters: &[(None, |role, moved, _| match role {
            Role::Source => moved.received_bytes as f64,
            Role::Destination => moved.wire_bytes as f64,
        })],
    },
    Metric {
        name: "vamoose_migration_link",
        help: "Bytes between this process and the other host's, encoded, without the overhead of TLS",
        unit: Some(&Unit::Bytes),
        counters: &[(None, |role, moved, _| match role {
            Role::Source => moved.wire_bytes as f64,
            Role::Destination => moved.received_bytes as f64,
        })],
    },
    Metric {
        name: "vamoose_migration_pages",
        help: "Pages passed on: with their content, or as the mere fact that they are zero",
        unit: None,
        counters: &[
            (Some(("kind", "normal")), |_, moved, _| {
                moved.normal_pages as f64
            }),
            (Some(("kind", "zero")), |_, moved, _| {
                moved.zero_pages as f64
            }),
        ],
    },
    Metric {
        name: "vamoose_migration_difference_pages",
        help: "Normal pages sent as the difference to an earlier version",
        unit: None,
        counters: &[(None, |_, moved, _| moved.delta_pages as f64)],
    },
    Metric {
        name: "vamoose_migration_shared_pages",
        help: "Pages that the destination's page store was expected to have",
        unit: None,
        counters: &[
            (Some(("result", "found")), |_, moved, _| {
                moved.shared_pages as f64
            }),
            (Some(("result", "missed")), |_, moved, _| {
                moved.missed_pages as f64
            }),
        ],
    },
    Metric {
        name: "vamoose_migration_syncs",
        help: "SYNCs passed on, one for each round",
        unit: None,
        counters: &[(None, |_, moved, _| moved.syncs as f64)],
    },
    Metric {
        name: "vamoose_migration_cpu",
        help: "CPU time of encoding and decoding",
        unit: Some(&Unit::Seconds),
        counters: &[
            (Some(("stage", "encode")), |_, moved, _| {
                moved.encode_time.as_secs_f64()
            }),
            (Some(("stage", "decode")), |_, moved, _| {
                moved.decode_time.as_secs_f64()
            }),
        ],
    },
    Metric {
        name: "vamoose_engine_operations",
        help: "Operations for which there is a device, by their result",
        unit: None,
        counters: &[
            (Some(("result", "accelerated")), |_, moved, _| {
                moved.engines.accelerated as f64
            }),
            (Some(("result", "fallback")), |_, moved, _| {
                moved.engines.fallbacks as f64
            }),
            (Some(("result", "wrong")), |_, moved, _| {
                moved.engines.wrong as f64
            }),
        ],
    },
    Metric {
        name: "vamoose_session_reconnects",
        help: "Connections to the other host that were replaced, of migrations that have ended",
        unit: None,
        counters: &[(None, |_, _, faults| faults.reconnects as f64)],
    },
    Metric {
        name: "vamoose_session_check_failures",
        help: "Checksum mismatches",
        unit: None,
        counters: &[
            (Some(("check", "frame")), |_, _, faults| {
                faults.corrupt_frames as f64
            }),
            (Some(("check", "pages")), |_, moved, _| {
                moved.changed_packets as f64
            }),
        ],
    },
];

impl Collector for Counts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = lock(&self.hosts);
        let ended = counts.iter().flat_map(|(host, count)| {
            let ends = EndKind::ALL.iter().zip(count.ends);
            ends.map(|(kind, ends)| {
                let labels = labels(host, Some(("outcome", kind.name())));
                (labels, ConstCounter::new(ends))
            })
        });
        let (name, help) = ("vamoose_migrations", "Migrations that have ended");
        family(&mut encoder, name, help, None, MetricType::Counter, ended)?;
        let live = counts.iter().map(|(host, count)| {
            let live = ConstGauge::new(count.live.len());
            (labels(host, None), live)
        });
        let (name, help) = ("vamoose_migrations_in_flight", "Migrations under way");
        family(&mut encoder, name, help, None, MetricType::Gauge, live)?;
        if let Some(orphaned) = self.orphaned.get() {
            let name = "vamoose_guests_orphaned";
            let help = "Complete guests that are paused here, and whose sources are silent";
            let value = ConstGauge::new(orphaned.load(Ordering::Relaxed));
            value.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let moved = counts.iter().map(|(host, count)| {
            let mut values = count.done;
            for migration in &count.live {
                add(&mut values, migration, &LinkFaults::default());
            }
            (host, values)
        });
        let moved: Vec<(_, Values)> = moved.collect();
        for (at, metric) in METRICS.iter().enumerate() {
            let values = moved.iter().flat_map(|(host, values)| {
                let values = metric.counters.iter().zip(values[at]);
                values.map(|((label, _), value)| (labels(host, *label), ConstCounter::new(value)))
            });
            let (name, help, kind) = (metric.name, metric.help, MetricType::Counter);
            family(&mut encoder, name, help, metric.unit, kind, values)?;
        }
        let times = |of: fn(&Count) -> &Histogram| {
            let all = counts.iter();
            all.map(move |(host, count)| (labels(host, None), of(count).clone()))
        };
        family(
            &mut encoder,
            "vamoose_migration_duration",
            "From the first connection to the end, of migrations that were not refused",
            Some(&Unit::Seconds),
            MetricType::Histogram,
            times(|count| &count.duration),
        )?;
        family(
            &mut encoder,
            "vamoose_migration_switchover",
            "From the last page to the message that the guest is loaded, where both were seen",
            Some(&Unit::Seconds),
            MetricType::Histogram,
            times(|count| &count.switchover),
        )
    }
}

impl Collector for Limits {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let rates = self.0.iter().filter_map(|(role, limit)| {
            let rate = limit.rate()?.get() as f64;
            Some((vec![direction(*role)], ConstGauge::new(rate)))
        });
        let name = "vamoose_bandwidth_limit_bytes_per_second";
        let help = "What all migrations may send or receive together; absent without a limit";
        family(&mut encoder, name, help, None, MetricType::Gauge, rates)
    }
}

impl Collector for Store {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let StoreUse {
            bytes,
            pages,
            hits,
            evictions,
        } = self.0.usage();
        for (name, help, unit, value) in [
            (
                "used",
                "Memory of the page store",
                Some(&Unit::Bytes),
                bytes,
            ),
            ("pages", "Pages in the page store", None, pages),
        ] {
            let name = format!("vamoose_page_store_{name}");
            let value = ConstGauge::new(value as f64);
            value.encode(encoder.encode_descriptor(&name, help, unit, MetricType::Gauge)?)?;
        }
        for (name, help, value) in [
            (
                "hits",
                "Pages found in the page store for references to it",
                hits,
            ),
            ("evictions", "Pages that the page store evicted", evictions),
        ] {
            let name = format!("vamoose_page_store_{name}");
            let value = ConstCounter::new(value);
            value.encode(encoder.encode_descriptor(&name, help, None, MetricType::Counter)?)?;
        }
        Ok(())
    }
}

fn direction(role: Role) -> (&'static str, String) {
    let direction = match role {
        Role::Source => "outgoing",
        Role::Destination => "incoming",
    };
    ("direction", direction.to_owned())
}

fn labels((role, peer): &Host, more: Option<Label>) -> Vec<(&'static str, String)> {
    let mut labels = vec![direction(*role), ("peer", peer.clone())];
    labels.extend(more.map(|(name, value)| (name, value.to_owned())));
    labels
}

/// Writes a metric with a value for each set of labels. `kind` is a parameter because there may be no values yet.
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
