//! Metrics of a gateway or a server, for Prometheus. docs/metrics.md describes them for operators.
//!
//! The migrations themselves count. [`Counts`] is told when they begin and end; for each request (`responder`) the counters of
//! migrations under way are added to the totals of those that have ended.

mod classic;
mod process;
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
    encoding::{
        DescriptorEncoder, EncodeCounterValue, EncodeLabelSet, EncodeMetric as _, text::encode,
    },
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
use vamoose_link::{Address, Snapshot, lock};
use vamoose_relay::{End, EndKind, Observed, Observer, Way};

use classic::classic;
use responder::Format;
pub use responder::Responder;

/// For commands that run long.
#[derive(Args, Debug)]
pub struct MetricsOption {
    /// Address at which to answer with metrics for Prometheus: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    pub metrics: Option<Address>,
}

/// What the migrations of this process have come to.
#[derive(Debug, Default)]
pub struct Counts(Mutex<BTreeMap<Host, Count>>);

/// Migrations one way, with one other host.
type Host = (Way, String);

#[derive(Debug)]
struct Count {
    live: Vec<Arc<Observed>>,
    done: Moved,
    ends: [u64; EndKind::ALL.len()],
    reconnects: u64,
    corrupt_frames: u64,
    duration: Histogram,
    switchover: Histogram,
}

/// What was moved: sums of the counters of migrations.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    received_bytes: u64,
    sent_bytes: u64,
    normal_pages: u64,
    zero_pages: u64,
    difference_pages: u64,
    syncs: u64,
    encode_seconds: f64,
    decode_seconds: f64,
    accelerated: u64,
    fallbacks: u64,
    wrong: u64,
    changed_packets: u64,
}

/// Answers at `address` from now on.
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
    registry.register_collector(Box::new(process::Process));
    let responder = Responder::start(address, move |format| {
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(match format {
            Format::Open => text,
            Format::Classic => classic(&text),
        })
    })?;
    info!("metrics at {}", responder.address());
    Ok(responder)
}

impl Counts {
    /// Has these hosts in the answers before there is a migration with them, so that its first failure is an increase.
    pub fn expect<'a>(&self, peers: impl IntoIterator<Item = &'a str>) {
        let mut counts = lock(&self.0);
        for peer in peers {
            for way in [Way::To, Way::From] {
                counts.entry((way, peer.to_owned())).or_default();
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
        count.done.add(&migration.stats.snapshot());
        count.ends[end.kind as usize] += 1;
        count.reconnects += end.faults.reconnects;
        count.corrupt_frames += end.faults.corrupt_frames;
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
    (migration.way, migration.peer.clone())
}

impl Default for Count {
    fn default() -> Self {
        Self {
            live: Vec::new(),
            done: Moved::default(),
            ends: Default::default(),
            reconnects: 0,
            corrupt_frames: 0,
            // Half a second to a bit more than an hour, and 2 ms to 16 s.
            duration: Histogram::new(exponential_buckets(0.5, 2.0, 14)),
            switchover: Histogram::new(exponential_buckets(0.002, 2.0, 14)),
        }
    }
}

impl Moved {
    fn add(&mut self, snapshot: &Snapshot) {
        self.received_bytes += snapshot.received_bytes;
        self.sent_bytes += snapshot.wire_bytes;
        self.normal_pages += snapshot.normal_pages;
        self.zero_pages += snapshot.zero_pages;
        self.difference_pages += snapshot.delta_pages;
        self.syncs += snapshot.syncs;
        self.encode_seconds += snapshot.encode_time.as_secs_f64();
        self.decode_seconds += snapshot.decode_time.as_secs_f64();
        self.accelerated += snapshot.engines.accelerated;
        self.fallbacks += snapshot.engines.fallbacks;
        self.wrong += snapshot.engines.wrong;
        self.changed_packets += snapshot.changed_packets;
    }
}

impl Collector for Counts {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = lock(&self.0);
        let moved = counts.iter().map(|(host, count)| {
            let mut moved = count.done;
            for migration in &count.live {
                moved.add(&migration.stats.snapshot());
            }
            (host, moved)
        });
        let moved: Vec<_> = moved.collect();
        // Every value of a counter that is part of what was moved, with a label of its own if there are several.
        let of = |values: &dyn Fn(Way, &Moved) -> Values| {
            let each = moved.iter().flat_map(|(host, moved)| {
                let values = values(host.0, moved);
                values
                    .into_iter()
                    .map(|(more, it)| (labels(host, more), it))
            });
            each.collect::<Vec<_>>()
        };
        let mut out = Out(encoder);
        let label = |name, value| Some((name, value));

        out.counter(
            "vamoose_migrations",
            "Migrations that have ended",
            None,
            counts.iter().flat_map(|(host, count)| {
                let ends = EndKind::ALL.iter().zip(count.ends);
                ends.map(|(kind, ends)| (labels(host, label("outcome", kind.name())), ends))
            }),
        )?;
        out.gauge(
            "vamoose_migrations_in_flight",
            "Migrations under way",
            counts
                .iter()
                .map(|(host, count)| (labels(host, None), count.live.len())),
        )?;
        out.counter(
            "vamoose_migration_guest",
            "Bytes between this process and QEMUs, before encoding and after decoding",
            Some(Unit::Bytes),
            of(&|way, moved| match way {
                Way::To => vec![(None, moved.received_bytes as f64)],
                Way::From => vec![(None, moved.sent_bytes as f64)],
            }),
        )?;
        out.counter(
            "vamoose_migration_link",
            "Bytes between this process and the other host's, encoded, without the overhead of TLS",
            Some(Unit::Bytes),
            of(&|way, moved| match way {
                Way::To => vec![(None, moved.sent_bytes as f64)],
                Way::From => vec![(None, moved.received_bytes as f64)],
            }),
        )?;
        out.counter(
            "vamoose_migration_pages",
            "Pages passed on: as their content, or as the mere fact that they are zero",
            None,
            of(&|_, moved| {
                vec![
                    (label("kind", "normal"), moved.normal_pages as f64),
                    (label("kind", "zero"), moved.zero_pages as f64),
                ]
            }),
        )?;
        out.counter(
            "vamoose_migration_difference_pages",
            "Normal pages sent as the difference to an earlier version",
            None,
            of(&|_, moved| vec![(None, moved.difference_pages as f64)]),
        )?;
        out.counter(
            "vamoose_migration_syncs",
            "SYNCs passed on, one for each round",
            None,
            of(&|_, moved| vec![(None, moved.syncs as f64)]),
        )?;
        out.counter(
            "vamoose_migration_cpu",
            "CPU time of encoding and decoding",
            Some(Unit::Seconds),
            of(&|_, moved| {
                vec![
                    (label("stage", "encode"), moved.encode_seconds),
                    (label("stage", "decode"), moved.decode_seconds),
                ]
            }),
        )?;
        out.counter(
            "vamoose_engine_operations",
            "Operations for which there is a device, by what became of them",
            None,
            of(&|_, moved| {
                vec![
                    (label("result", "accelerated"), moved.accelerated as f64),
                    (label("result", "fallback"), moved.fallbacks as f64),
                    (label("result", "wrong"), moved.wrong as f64),
                ]
            }),
        )?;
        out.counter(
            "vamoose_session_reconnects",
            "Connections to the other host that were replaced, of migrations that have ended",
            None,
            counts
                .iter()
                .map(|(host, count)| (labels(host, None), count.reconnects)),
        )?;
        out.counter(
            "vamoose_session_check_failures",
            "What did not have the checksum that was sent with it",
            None,
            moved.iter().flat_map(|(host, moved)| {
                let frames = counts.get(host).map_or(0, |count| count.corrupt_frames);
                [
                    (labels(host, label("check", "frame")), frames),
                    (labels(host, label("check", "pages")), moved.changed_packets),
                ]
            }),
        )?;
        out.histogram(
            "vamoose_migration_duration",
            "From the first connection to the end, of migrations that were not refused",
            counts
                .iter()
                .map(|(host, count)| (labels(host, None), &count.duration)),
        )?;
        out.histogram(
            "vamoose_migration_switchover",
            "From the last page to the message that the guest is loaded, where both were seen",
            counts
                .iter()
                .map(|(host, count)| (labels(host, None), &count.switchover)),
        )
    }
}

type Label = (&'static str, &'static str);

/// Of one metric: with a further label, if there are several.
type Values = Vec<(Option<Label>, f64)>;

fn labels((way, peer): &Host, more: Option<Label>) -> Vec<(&'static str, String)> {
    let direction = match way {
        Way::To => "outgoing",
        Way::From => "incoming",
    };
    let mut labels = vec![("direction", direction.to_owned()), ("peer", peer.clone())];
    labels.extend(more.map(|(name, value)| (name, value.to_owned())));
    labels
}

/// Writes families of metrics.
struct Out<'a>(DescriptorEncoder<'a>);

impl Out<'_> {
    fn counter<N, V>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        values: V,
    ) -> fmt::Result
    where
        N: EncodeCounterValue,
        V: IntoIterator<Item = (Vec<(&'static str, String)>, N)>,
    {
        let kind = MetricType::Counter;
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, value) in values {
            let one = family.encode_family(&labels)?;
            ConstCounter::new(value).encode(one)?;
        }
        Ok(())
    }

    fn gauge<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, usize)>,
    ) -> fmt::Result {
        let mut family = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in values {
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// Of seconds.
    fn histogram<'h, L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, &'h Histogram)>,
    ) -> fmt::Result {
        let (unit, kind) = (Unit::Seconds, MetricType::Histogram);
        let mut family = self.0.encode_descriptor(name, help, Some(&unit), kind)?;
        for (labels, histogram) in values {
            histogram.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
