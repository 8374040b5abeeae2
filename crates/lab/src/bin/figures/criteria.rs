//! What the figures have to be.

use crate::live;
use crate::options::Options;
use crate::report::Figures;
use crate::running::Pause;
use crate::still::{self, Cost};

/// A demand and whether it is met.
pub(crate) struct Verdict {
    /// The demand.
    pub(crate) demand: String,
    /// What was measured; `None` when the cases it needs were not.
    pub(crate) found: Option<Found>,
}

/// What was measured.
pub(crate) struct Found {
    /// Whether it meets the demand.
    pub(crate) pass: bool,
    /// The numbers.
    pub(crate) numbers: String,
}

/// Judges all that was measured.
pub(crate) fn judge(figures: &Figures, options: &Options) -> Vec<Verdict> {
    let Figures {
        still,
        running,
        live,
    } = figures;
    let cost = |name: &str| {
        let case = still.iter().find(|measured| measured.case.name == name);
        case.map(|measured| &measured.cost)
    };
    let pause = |name: &str| {
        let name = format!("downtime/{name}");
        let case = running.iter().find(|measured| measured.case.name == name);
        case.map(|measured| &measured.pause)
    };
    let gib = options.ram as f64 / f64::from(1 << 30);
    let mut verdicts = vec![
        Verdict {
            demand: "relay none to none: at most 0.3 CPU-s per GiB in the relay".to_owned(),
            found: cost("cpu/relay-none").and_then(|relay| pass_on(relay, gib)),
        },
        Verdict {
            demand: "relay to a stock zlib destination: at most 1/3 of stock zlib's CPU at the source, and no more bytes".to_owned(),
            found: pair(cost("cpu/relay-zlib"), cost("cpu/direct-zlib")).map(third_of_zlib),
        },
        Verdict {
            demand: "relay to a stock zstd destination: total CPU at most 10 % above direct zstd's".to_owned(),
            found: pair(cost("cpu/relay-zstd"), cost("cpu/direct-zstd")).map(total_of_zstd),
        },
        Verdict {
            demand: "lz4 through two relays: total CPU at most 85 % of direct zstd's".to_owned(),
            found: pair(cost("cpu/pair-lz4"), cost("cpu/direct-zstd")).map(|costs| share(costs, 0.85)),
        },
        Verdict {
            demand: "lz4 at acceleration 8 through two relays: total CPU at most 60 % of direct zstd's".to_owned(),
            found: pair(cost("cpu/pair-lz4-8"), cost("cpu/direct-zstd")).map(|costs| share(costs, 0.6)),
        },
        Verdict {
            demand: "live, none: no more CPU than QEMU's none".to_owned(),
            found: pair(cost("live/none"), cost("live/qemu-none")).map(|costs| share(costs, 1.0)),
        },
        Verdict {
            demand: "live, none: CPU within 15 % of as many bytes through bare sockets (iperf3)".to_owned(),
            found: pair(cost("live/none"), cost("live/sockets")).map(|costs| share(costs, 1.15)),
        },
        Verdict {
            demand: "live, zstd: at most 85 % of QEMU's zstd, and no more bytes".to_owned(),
            found: pair(cost("live/zstd"), cost("live/qemu-zstd")).map(|costs| cheaper(costs, 0.85)),
        },
        Verdict {
            demand: "live, zlib: at most 25 % of QEMU's zlib".to_owned(),
            found: pair(cost("live/zlib"), cost("live/qemu-zlib")).map(|costs| share(costs, 0.25)),
        },
        Verdict {
            demand: "live, memory that was never touched: at most 20 ms".to_owned(),
            found: cost("live/untouched").map(|ours| Found {
                pass: ours.time <= 0.02,
                numbers: format!(
                    "{:.0} ms; QEMU {}",
                    ours.time * 1e3,
                    cost("live/qemu-untouched")
                        .map_or("not measured".to_owned(), |qemu| format!("{:.0} ms", qemu.time * 1e3)),
                ),
            }),
        },
        Verdict {
            demand: "live, zero pages that are there: at most 0.1 CPU-s per GiB".to_owned(),
            found: cost("live/zeros").map(|ours| Found {
                pass: ours.total() / gib <= 0.1,
                numbers: format!(
                    "{:.3} CPU-s per GiB; QEMU {}",
                    ours.total() / gib,
                    cost("live/qemu-zeros")
                        .map_or("not measured".to_owned(), |qemu| format!("{:.3}", qemu.total() / gib)),
                ),
            }),
        },
    ];
    verdicts.extend(still.iter().filter_map(memory));
    for method in ["none", "zstd"] {
        for (way, what) in [("relays", "two relays"), ("migrate", "serve and migrate")] {
            let found = pair(
                pause(&format!("{way}-{method}")),
                pause(&format!("direct-{method}")),
            );
            verdicts.push(Verdict {
                demand: format!(
                    "downtime through {what}, {method}: at most 15 % + 10 ms above direct {method}'s"
                ),
                found: found.map(downtime),
            });
        }
    }
    verdicts.extend(live.iter().map(of_live));
    verdicts
}

/// What is demanded of a guest that writes while `live` moves it.
fn of_live(measured: &live::Measured) -> Verdict {
    let name = measured.case.name;
    let moves = &measured.moves;
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
    let mut found: Vec<_> = moves.iter().map(|one| one.status.as_str()).collect();
    found.dedup();
    Verdict {
        demand: format!("{name}: {demand}"),
        found: Some(Found {
            pass,
            numbers: format!(
                "{} runs, {}; worst downtime {}",
                moves.len(),
                found.join(", "),
                measured
                    .worst()
                    .map_or("-".to_owned(), |worst| format!("{worst:.0} ms")),
            ),
        }),
    }
}

fn pair<T>(ours: Option<T>, stock: Option<T>) -> Option<(T, T)> {
    Some((ours?, stock?))
}

fn pass_on(relay: &Cost, gib: f64) -> Option<Found> {
    let per_gib = relay.relay_a? / gib;
    Some(Found {
        pass: per_gib <= 0.3,
        numbers: format!("{per_gib:.3} CPU-s per GiB"),
    })
}

fn third_of_zlib((ours, stock): (&Cost, &Cost)) -> Found {
    let (cpu, bytes) = (
        ours.source_side() / stock.source_side(),
        ours.wire / stock.wire,
    );
    Found {
        pass: cpu <= 1.0 / 3.0 && bytes <= 1.0,
        numbers: format!(
            "{:.2} of {:.2} CPU-s, {cpu:.3} of it; {bytes:.3} of the bytes",
            ours.source_side(),
            stock.source_side()
        ),
    }
}

fn total_of_zstd((ours, stock): (&Cost, &Cost)) -> Found {
    let ratio = ours.total() / stock.total();
    Found {
        pass: ratio <= 1.1,
        numbers: format!(
            "{:.2} and {:.2} CPU-s, {:+.1} %; {:.3} of the bytes",
            ours.total(),
            stock.total(),
            (ratio - 1.0) * 100.0,
            ours.wire / stock.wire
        ),
    }
}

fn cheaper((ours, stock): (&Cost, &Cost), most: f64) -> Found {
    let found = share((ours, stock), most);
    Found {
        pass: found.pass && ours.wire <= stock.wire,
        ..found
    }
}

fn share((ours, stock): (&Cost, &Cost), most: f64) -> Found {
    let ratio = ours.total() / stock.total();
    Found {
        pass: ratio <= most,
        numbers: format!(
            "{:.2} of {:.2} CPU-s, {:.1} %; {:.3} of the bytes",
            ours.total(),
            stock.total(),
            ratio * 100.0,
            ours.wire / stock.wire
        ),
    }
}

fn memory(measured: &still::Measured) -> Option<Verdict> {
    const MIB: f64 = 1_048_576.0;
    let (case, cost) = (&measured.case, &measured.cost);
    let peak = [cost.peak_a, cost.peak_b].into_iter().flatten();
    let peak = peak.reduce(f64::max)? / MIB;
    let limit = 64 + 4 * u32::from(case.channels);
    Some(Verdict {
        demand: format!(
            "memory of each relay, {}: less than {limit} MiB (64 and 4 per channel)",
            case.name
        ),
        found: Some(Found {
            pass: peak < f64::from(limit),
            numbers: format!("{peak:.1} MiB at most"),
        }),
    })
}

fn downtime((ours, direct): (&Pause, &Pause)) -> Found {
    let limit = direct.real * 1.15 + 10.0;
    Found {
        pass: ours.real <= limit,
        numbers: format!(
            "{:.0} ms; direct {:.0} ms, so at most {limit:.0} ms",
            ours.real, direct.real
        ),
    }
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
        let passes = |found: Option<Found>| found.unwrap().pass;
        assert!(passes(pass_on(&relay(0.9), 3.0)));
        assert!(!passes(pass_on(&relay(0.91), 3.0)));

        let cost = |source, wire| Cost {
            source,
            wire,
            ..Cost::default()
        };
        assert!(third_of_zlib((&cost(1.0, 9.0), &cost(3.0, 9.0))).pass);
        assert!(!third_of_zlib((&cost(1.1, 9.0), &cost(3.0, 9.0))).pass);
        assert!(!third_of_zlib((&cost(1.0, 9.1), &cost(3.0, 9.0))).pass);
        assert!(!total_of_zstd((&cost(1.2, 1.0), &cost(1.0, 1.0))).pass);
        assert!(share((&cost(0.85, 2.0), &cost(1.0, 1.0)), 0.85).pass);
        assert!(!share((&cost(0.86, 1.0), &cost(1.0, 1.0)), 0.85).pass);

        let pause = |real| Pause {
            real,
            ..Pause::default()
        };
        assert!(downtime((&pause(124.0), &pause(100.0))).pass);
        assert!(!downtime((&pause(126.0), &pause(100.0))).pass);
    }
}
