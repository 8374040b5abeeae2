//! What the figures have to be.

use serde::Serialize;

use crate::links;
use crate::live;
use crate::options::Options;
use crate::or_dash;
use crate::report::Figures;
use crate::still::{self, Cost};

/// A demand and whether it is met. `None` when the cases it needs were not measured.
#[derive(Serialize)]
pub(crate) struct Verdict {
    pub(crate) demand: String,
    pub(crate) pass: Option<bool>,
    /// The numbers.
    pub(crate) found: Option<String>,
}

/// Whether what was measured meets the demand, and the numbers.
pub(crate) type Found = (bool, String);

impl Verdict {
    pub(crate) fn new(demand: impl Into<String>, found: Option<Found>) -> Self {
        let (pass, found) = found.unzip();
        Self {
            demand: demand.into(),
            pass,
            found,
        }
    }
}

/// Judges all that was measured.
pub(crate) fn judge(figures: &Figures, options: &Options) -> Vec<Verdict> {
    let Figures {
        still,
        running,
        live,
        links,
    } = figures;
    let cost = |name: &str| {
        let case = still.iter().find(|measured| measured.case.name == name);
        case.map(still::Measured::cost)
    };
    let pause = |name: String| {
        let case = running.iter().find(|measured| measured.case.name == name);
        case.map(|measured| measured.pause().downtime)
    };
    let gib = options.ram as f64 / f64::from(1 << 30);
    let ratio = |ours, stock, limits: Limits| {
        let found = cost(ours).zip(cost(stock));
        found.map(|(ours, stock)| limits.judge(&ours, &stock))
    };
    let cpu = |cpu| Limits { cpu, wire: None };
    let mut verdicts = vec![
        Verdict::new(
            "relay none to none: at most 0.3 CPU-s per GiB in the relay",
            cost("cpu/relay-none").and_then(|relay| pass_on(&relay, gib)),
        ),
        Verdict::new(
            "relay to a stock zlib destination: at most 1/3 of stock zlib's CPU at the source, and no more bytes",
            cost("cpu/relay-zlib")
                .zip(cost("cpu/direct-zlib"))
                .map(|(ours, stock)| third_of_zlib(&ours, &stock)),
        ),
        Verdict::new(
            "relay to a stock zstd destination: total CPU at most 10 % above direct zstd's",
            ratio("cpu/relay-zstd", "cpu/direct-zstd", cpu(1.1)),
        ),
        Verdict::new(
            "lz4 through two relays: total CPU at most 85 % of direct zstd's",
            ratio("cpu/pair-lz4", "cpu/direct-zstd", cpu(0.85)),
        ),
        Verdict::new(
            "lz4 at acceleration 8 through two relays: total CPU at most 60 % of direct zstd's",
            ratio("cpu/pair-lz4-8", "cpu/direct-zstd", cpu(0.6)),
        ),
        Verdict::new(
            "live, none: no more CPU than QEMU's none",
            ratio("live/none", "live/qemu-none", cpu(1.0)),
        ),
        Verdict::new(
            "live, none: CPU within 15 % of as many bytes through bare sockets (iperf3)",
            ratio("live/none", "live/sockets", cpu(1.15)),
        ),
        Verdict::new(
            "live, zstd: at most 85 % of QEMU's zstd, and no more bytes",
            ratio(
                "live/zstd",
                "live/qemu-zstd",
                Limits {
                    cpu: 0.85,
                    wire: Some(1.0),
                },
            ),
        ),
        Verdict::new(
            "live, zlib: at most 25 % of QEMU's zlib",
            ratio("live/zlib", "live/qemu-zlib", cpu(0.25)),
        ),
        Verdict::new(
            "live, memory that was never touched: at most 20 ms",
            cost("live/untouched").map(|ours| {
                let stock = cost("live/qemu-untouched").map(|stock| stock.time * 1e3);
                let stock = or_dash(stock, 0);
                (
                    ours.time <= 0.02,
                    format!("{:.0} ms; QEMU {stock} ms", ours.time * 1e3),
                )
            }),
        ),
        Verdict::new(
            "live, zero pages that are there: at most 0.1 CPU-s per GiB",
            cost("live/zeros").map(|ours| {
                let stock = cost("live/qemu-zeros").map(|stock| stock.total() / gib);
                let (ours, stock) = (ours.total() / gib, or_dash(stock, 3));
                (
                    ours <= 0.1,
                    format!("{ours:.3} CPU-s per GiB; QEMU {stock}"),
                )
            }),
        ),
    ];
    verdicts.extend(still.iter().filter_map(memory));
    for method in ["none", "zstd"] {
        for (way, what) in [("relays", "two relays"), ("migrate", "serve and migrate")] {
            let ours = pause(format!("downtime/{way}-{method}"));
            let direct = pause(format!("downtime/direct-{method}"));
            verdicts.push(Verdict::new(
                format!("downtime through {what}, {method}: at most 15 % + 10 ms above direct {method}'s"),
                ours.zip(direct).map(downtime),
            ));
        }
    }
    verdicts.extend(live.iter().map(of_live));
    verdicts.extend(links::judge(links));
    verdicts
}

/// What is demanded of a guest that writes while `live` moves it.
fn of_live(measured: &live::Measured) -> Verdict {
    let name = measured.case.name;
    let moves = &measured.rounds;
    let here = |at| moves.iter().all(|one| one.at == at);
    let (demand, pass) = match name {
        "live-downtime/20-percent" => (
            "every downtime is below the limit",
            measured.worst().is_some_and(|worst| worst <= live::LIMIT),
        ),
        "live-downtime/3x-timeout" => (
            "gives up, and the guest goes on at the source",
            here("source"),
        ),
        _ => (
            "converges, or gives up cleanly",
            here("destination") || here("source"),
        ),
    };
    let mut ends: Vec<_> = moves.iter().map(|one| one.status.as_str()).collect();
    ends.dedup();
    let numbers = format!(
        "{} runs, {}; worst downtime {} ms",
        moves.len(),
        ends.join(", "),
        or_dash(measured.worst(), 0)
    );
    Verdict::new(format!("{name}: {demand}"), Some((pass, numbers)))
}

fn pass_on(relay: &Cost, gib: f64) -> Option<Found> {
    let per_gib = relay.relay_a? / gib;
    Some((per_gib <= 0.3, format!("{per_gib:.3} CPU-s per GiB")))
}

fn third_of_zlib(ours: &Cost, stock: &Cost) -> Found {
    let cpu = ours.source_side() / stock.source_side();
    let bytes = ours.wire / stock.wire;
    let numbers = format!(
        "{:.2} of {:.2} CPU-s, {cpu:.3} of it; {bytes:.3} of the bytes",
        ours.source_side(),
        stock.source_side()
    );
    (cpu <= 1.0 / 3.0 && bytes <= 1.0, numbers)
}

/// The most that we may use, as a part of what stock uses.
struct Limits {
    cpu: f64,
    wire: Option<f64>,
}

impl Limits {
    fn judge(&self, ours: &Cost, stock: &Cost) -> Found {
        let (cpu, wire) = (ours.total() / stock.total(), ours.wire / stock.wire);
        let numbers = format!(
            "{:.2} of {:.2} CPU-s, {:.1} %; {wire:.3} of the bytes",
            ours.total(),
            stock.total(),
            cpu * 100.0,
        );
        let pass = cpu <= self.cpu && self.wire.is_none_or(|most| wire <= most);
        (pass, numbers)
    }
}

fn memory(measured: &still::Measured) -> Option<Verdict> {
    const MIB: f64 = 1_048_576.0;
    let (case, cost) = (&measured.case, measured.cost());
    let peak = [cost.peak_a, cost.peak_b].into_iter().flatten();
    let peak = peak.reduce(f64::max)? / MIB;
    let limit = 64 + 4 * u32::from(case.channels);
    let name = case.name;
    Some(Verdict::new(
        format!("memory of each relay, {name}: less than {limit} MiB (64 and 4 per channel)"),
        Some((peak < f64::from(limit), format!("{peak:.1} MiB at most"))),
    ))
}

fn downtime((ours, direct): (f64, f64)) -> Found {
    let limit = direct * 1.15 + 10.0;
    let numbers = format!("{ours:.0} ms; direct {direct:.0} ms, so at most {limit:.0} ms");
    (ours <= limit, numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_where_they_should_be() {
        let relay = |cpu| Cost {
            relay_a: Some(cpu),
            ..Cost::default()
        };
        assert!(pass_on(&relay(0.9), 3.0).unwrap().0);
        assert!(!pass_on(&relay(0.91), 3.0).unwrap().0);

        let cost = |source, wire| Cost {
            source,
            wire,
            ..Cost::default()
        };
        assert!(third_of_zlib(&cost(1.0, 9.0), &cost(3.0, 9.0)).0);
        assert!(!third_of_zlib(&cost(1.1, 9.0), &cost(3.0, 9.0)).0);
        assert!(!third_of_zlib(&cost(1.0, 9.1), &cost(3.0, 9.0)).0);
        let (cpu, wire) = (0.85, None);
        assert!(
            Limits { cpu, wire }
                .judge(&cost(0.85, 2.0), &cost(1.0, 1.0))
                .0
        );
        assert!(
            !Limits { cpu, wire }
                .judge(&cost(0.86, 1.0), &cost(1.0, 1.0))
                .0
        );
        let wire = Some(1.0);
        assert!(
            Limits { cpu, wire }
                .judge(&cost(0.85, 1.0), &cost(1.0, 1.0))
                .0
        );
        assert!(
            !Limits { cpu, wire }
                .judge(&cost(0.85, 1.1), &cost(1.0, 1.0))
                .0
        );

        assert!(downtime((124.0, 100.0)).0);
        assert!(!downtime((126.0, 100.0)).0);
    }
}
