//! Tests the report of an example: times of `links` as they were measured once, and a running guest.
//!
//! `REPORT_EXAMPLE=DIR cargo test -p vamoose-bench example` leaves the report in DIR.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the figures of an example are small"
)]

use std::collections::BTreeMap;

use proptest::prelude::*;
use tempfile::TempDir;

use super::results::Results;
use super::*;
use crate::record::{Cell, Cpu, Figures, Machine, Outcome, Record, Service, Services};

/// Contender; then for 100 Mbit/s, 1 Gbit/s, 10 Gbit/s and the open link: median, least, most, CPU seconds, downtime.
const LINKS: &[(&str, [[f64; 5]; 4])] = &[
    (
        "qemu none",
        [
            [30.38, 30.38, 30.38, 0.6, 454.0],
            [8.10, 8.10, 8.11, 0.6, 269.0],
            [0.81, 0.81, 0.81, 1.0, 242.0],
            [0.38, 0.37, 0.43, 0.6, 264.0],
        ],
    ),
    (
        "qemu zlib",
        [
            [8.94, 8.94, 8.98, 4.2, 209.0],
            [5.66, 5.15, 5.70, 10.9, 65.0],
            [5.44, 5.28, 5.50, 10.6, 50.0],
            [5.30, 5.22, 5.68, 10.3, 73.0],
        ],
    ),
    (
        "qemu zstd",
        [
            [7.94, 7.94, 7.95, 1.3, 151.0],
            [2.09, 2.09, 2.11, 3.2, 66.0],
            [1.54, 1.47, 1.62, 3.0, 36.0],
            [1.56, 1.52, 1.62, 3.0, 26.0],
        ],
    ),
    (
        "migrate none",
        [
            [30.39, 30.39, 30.39, 1.2, 349.0],
            [8.11, 8.11, 8.11, 1.6, 285.0],
            [0.82, 0.82, 0.83, 1.5, 258.0],
            [0.63, 0.52, 0.66, 1.2, 264.0],
        ],
    ),
    (
        "migrate lz4",
        [
            [11.88, 11.88, 11.88, 1.5, 222.0],
            [3.12, 3.12, 3.13, 3.0, 241.0],
            [1.25, 1.21, 1.38, 2.5, 240.0],
            [1.33, 1.25, 1.35, 2.6, 260.0],
        ],
    ),
    (
        "migrate zstd",
        [
            [7.98, 7.98, 7.99, 1.8, 1135.0],
            [2.11, 2.11, 2.12, 3.7, 241.0],
            [1.72, 1.63, 1.81, 3.4, 233.0],
            [1.71, 1.64, 1.79, 3.4, 239.0],
        ],
    ),
    (
        "migrate auto",
        [
            [7.55, 7.51, 7.59, 2.3, 278.0],
            [2.23, 2.18, 2.33, 3.9, 210.0],
            [0.83, 0.82, 0.84, 1.6, 211.0],
            [0.66, 0.65, 0.71, 1.3, 193.0],
        ],
    ),
];

fn cell(scenario: &str, guest: &str, link: &str, channels: u8, contender: &str) -> Cell {
    Cell {
        scenario: scenario.to_owned(),
        guest: guest.parse().unwrap(),
        link: link.parse().unwrap(),
        channels,
        contender: contender.parse().unwrap(),
        ram: 1 << 30,
        downtime_limit: 300,
        timeout: 120,
    }
}

fn links() -> Vec<Record> {
    let mut records = Vec::new();
    for (link, name) in ["100M", "1G", "10G", "open"].into_iter().enumerate() {
        for (contender, cells) in LINKS {
            let [median, least, most, cpu, downtime] = cells[link];
            for (round, seconds) in (1..).zip([median, least, most]) {
                records.push(Record {
                    cell: cell("links", "silesia", name, 2, contender),
                    round,
                    outcome: Outcome::Equal,
                    figures: Figures {
                        seconds,
                        downtime_reported: Some(downtime),
                        rounds: Some(2),
                        wire_bytes: Some(250_000_000),
                        link_bytes: Some(262_000_000),
                        normal_pages: Some(235_930),
                        zero_pages: Some(26_214),
                        cpu: Cpu {
                            source: cpu * 0.2,
                            sender: cpu * 0.5,
                            receiver: cpu * 0.2,
                            destination: cpu * 0.1,
                        },
                        ..Figures::default()
                    },
                    service: None,
                });
            }
        }
    }
    records
}

/// Guests that run; the last contender never gets its guest moved.
fn running() -> Vec<Record> {
    let contenders = [
        ("qemu none", 14.2, 297.0, 499.0),
        ("qemu zstd", 6.8, 129.0, 171.0),
        ("qemu auto-converge", 21.0, 301.0, 640.0),
        ("migrate none", 13.9, 230.0, 498.0),
        ("migrate lz4", 7.4, 140.0, 260.0),
        ("migrate auto", 6.4, 126.0, 169.0),
        ("migrate auto --delta off", 6.6, 131.0, 172.0),
        ("qemu xbzrle", 60.0, 0.0, 0.0),
    ];
    let mut records = Vec::new();
    for channels in [2, 4] {
        for (contender, seconds, downtime, megabytes) in contenders {
            for round in 1..=3 {
                let is_moved = contender != "qemu xbzrle";
                let seconds =
                    seconds * (1.0 + f64::from(round) / 60.0) / f64::from(channels).powf(0.2);
                let vamoose = contender.starts_with("migrate");
                let parts = [
                    ("commit", 8.0),
                    ("load", 25.0),
                    ("last-round", downtime - 45.0),
                    ("device-state", 12.0),
                ];
                let parts = parts.map(|(name, part)| (name.to_owned(), part));
                records.push(Record {
                    cell: cell("redis", "redis-b", "1G", channels, contender),
                    round,
                    outcome: if is_moved {
                        Outcome::Served
                    } else {
                        Outcome::Cancelled
                    },
                    figures: Figures {
                        seconds,
                        downtime: is_moved.then_some(downtime + f64::from(round)),
                        // Of some it is not known, as of all that were measured earlier.
                        stopped: (is_moved && vamoose).then_some(seconds * 1e3 - downtime - 2.0),
                        downtime_reported: is_moved.then_some(downtime),
                        downtime_parts: if vamoose {
                            parts.into()
                        } else {
                            BTreeMap::new()
                        },
                        rounds: Some(5),
                        link_bytes: Some((megabytes * 1e6) as u64),
                        wire_bytes: Some((megabytes * 0.97e6) as u64),
                        cpu: Cpu {
                            source: 1.2,
                            sender: if vamoose { 2.6 } else { 0.0 },
                            receiver: 0.8,
                            destination: 0.6,
                        },
                        dirty_rate: Some(62),
                        ..Figures::default()
                    },
                    service: Some(services(downtime)),
                });
            }
        }
    }
    records
}

fn services(downtime: f64) -> Services {
    let service = |rate, p99, longest| Service {
        rate,
        p50: Some(0.4),
        p99: Some(p99),
        longest: Some(longest),
    };
    Services {
        before: service(21_400.0, 1.3, 4.0),
        during: service(14_100.0, 5.2, downtime + 12.0),
    }
}

fn machine() -> Machine {
    Machine {
        processor: "Intel(R) Xeon(R) & <others>".to_owned(),
        processors: 2,
        memory: 8 << 30,
        kernel: "6.18.0".to_owned(),
        qemu: "11.1.3".to_owned(),
        vamoose: "0.1.0".to_owned(),
        corpus: "Silesia".to_owned(),
        command: "vamoose bench links redis --out example".to_owned(),
        date: "2026-11-25".to_owned(),
        load: "0.10 0.20 0.30".to_owned(),
    }
}

/// Leaves a run in `dir`, as the measuring part does.
fn run(dir: &Path, records: &[Record]) {
    let lines = records
        .iter()
        .map(|record| serde_json::to_string(record).unwrap() + "\n");
    fs::write(dir.join("results.jsonl"), lines.collect::<String>()).unwrap();
    fs::write(
        dir.join("machine.json"),
        serde_json::to_string(&machine()).unwrap(),
    )
    .unwrap();
}

#[test]
fn the_report_of_an_example_is_complete() {
    let folder = TempDir::new().unwrap();
    let wanted = std::env::var_os("REPORT_EXAMPLE").map(std::path::PathBuf::from);
    let dir = wanted.as_deref().unwrap_or(folder.path());
    let records: Vec<_> = links().into_iter().chain(running()).collect();
    run(dir, &records);
    write(dir).unwrap();

    let text = fs::read_to_string(dir.join("report.md")).unwrap();
    let has = |line: &str| assert!(text.contains(line), "{line} is not in\n{text}");
    has("vamoose bench links redis --out example");
    has("Intel(R) Xeon(R) \\& \\<others>");
    has("### silesia, 1024 MiB, over 1 Gbit/s\n");
    has("| **migrate auto** | 2 | 2.23 (2.18–2.33) |");
    has("| qemu xbzrle | 2 | > ");
    has("cancelled 3 of 3");
    // The default beside stock QEMU's fastest method, a line for each group.
    has(
        "| links | silesia, 1024 MiB, over 1 Gbit/s | neither | qemu zstd | migrate auto | 2.09 → 2.23 | 1.07 | 66.0 → 210 | 3.20 → 3.90 |",
    );
    has(
        "| redis | redis-b, 1024 MiB, over 1 Gbit/s, downtime limit 300 ms | neither | qemu zstd, 4 ch | migrate auto, 4 ch |",
    );
}

#[test]
fn a_table_has_only_columns_with_a_value() {
    let columns = |records: Vec<Record>| {
        let results = Results::new(machine(), records);
        let table = table::of(&results.scenarios[0].groups[0]).markdown();
        table.lines().next().unwrap().to_owned()
    };
    assert_eq!(
        columns(links()),
        "| contender | channels | seconds | downtime, ms | rounds | link, MB | CPU, s/GiB | proof |"
    );
    let running = columns(running());
    assert!(running.contains("| answers/s | p99, ms |"), "{running}");
}

#[test]
fn a_default_that_was_cancelled_more_often_is_not_the_fastest() {
    let mut records = running();
    let is_default = |record: &Record, channels| {
        record.cell.contender.is_default() && record.cell.channels == channels
    };
    // With 4 channels it is faster.
    let mut fast = records.iter_mut().filter(|record| is_default(record, 4));
    fast.next().unwrap().outcome = Outcome::Cancelled;
    let results = Results::new(machine(), records);
    let default = results.groups().next().unwrap().default().unwrap();
    assert_eq!(default.cell.channels, 2);
}

#[test]
fn comparison_is_on_equal_terms() {
    let mut records = running();
    // Both also encrypt, which takes longer.
    for record in records.clone() {
        let contender = record.cell.contender.to_string();
        let mut encrypted = record;
        encrypted.cell.contender = format!("{contender} --tls").parse().unwrap();
        encrypted.figures.seconds *= 2.0;
        records.push(encrypted);
    }
    let results = Results::new(machine(), records);
    for group in results.groups() {
        let compared = [group.default(), group.fastest_stock()].map(Option::unwrap);
        assert!(compared.iter().all(|row| row.cell.contender.tls));
    }
}

#[test]
fn unreadable_results_are_named() {
    let dir = TempDir::new().unwrap();
    let error = |dir: &Path| format!("{:#}", write(dir).unwrap_err());
    assert!(error(dir.path()).contains("machine.json: is this the folder of a run?"));
    run(dir.path(), &running());
    let file = dir.path().join("results.jsonl");
    let lines = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("{}\n{{\n", lines.lines().next().unwrap())).unwrap();
    assert!(error(dir.path()).contains("line 2 is not a result"));
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), 0.0..1e3f64, 0.0..1e12f64]
}

fn any_record() -> impl Strategy<Value = Record> {
    let contenders = proptest::sample::select(vec![
        "qemu none",
        "qemu zstd",
        "migrate auto",
        "migrate lz4",
        "migrate none --<&\"x",
    ]);
    let outcomes = [
        Outcome::Equal,
        Outcome::Checked,
        Outcome::Served,
        Outcome::Cancelled,
    ];
    let options = (
        contenders,
        1..4u8,
        any::<String>(),
        proptest::sample::select(outcomes.to_vec()),
    );
    let figures = (
        number(),
        proptest::option::of(number()),
        proptest::option::of(0..1_u64 << 50),
        number(),
        number(),
    );
    (options, figures).prop_map(|(options, figures)| {
        let (contender, channels, scenario, outcome) = options;
        let (seconds, downtime, bytes, cpu, rate) = figures;
        let service = Service {
            rate,
            p50: downtime,
            p99: downtime,
            longest: None,
        };
        Record {
            cell: cell(&scenario, "dirty-7", "10M", channels, contender),
            round: 1,
            outcome,
            figures: Figures {
                seconds,
                downtime,
                downtime_parts: [(scenario.clone(), rate)].into(),
                wire_bytes: bytes,
                zero_pages: bytes,
                cpu: Cpu {
                    source: cpu,
                    receiver: rate,
                    ..Cpu::default()
                },
                ..Figures::default()
            },
            service: Some(Services {
                before: service,
                during: service,
            }),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_report_of_any_results_is_well_formed(records in proptest::collection::vec(any_record(), 0..12)) {
        let results = Results::new(machine(), records);
        let markdown = markdown::of(&results);
        prop_assert!(!markdown.contains("NaN") && !markdown.contains("| inf"));
        // A table's lines have as many cells as its head.
        let cells = |line: &str| line.replace("\\|", "").matches('|').count();
        let lines: Vec<_> = markdown.lines().collect();
        for pair in lines.windows(2).filter(|pair| pair.iter().all(|line| line.starts_with("| "))) {
            prop_assert_eq!(cells(pair[0]), cells(pair[1]), "{}", pair[1]);
        }
    }
}
