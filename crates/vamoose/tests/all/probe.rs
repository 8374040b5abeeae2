//! `vamoose probe` on the machine that runs the tests, whatever that is.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use multifd::Method;
use serde_json::Value;
use vamoose_codec::{Registry, Settings};

#[test]
fn the_advice_follows_from_its_numbers() {
    for cores in [1.0, 16.0] {
        let probe = json(&["--cores", &cores.to_string()]);
        has_its_keys(&probe);
        let advice = &probe["advice"];
        assert_eq!(number(advice, "cores"), cores);
        let links = list(advice, "links");
        let gbits: Vec<_> = links
            .iter()
            .map(|link| number(link, "gbit-per-second"))
            .collect();
        assert_eq!(gbits, [1.0, 10.0, 25.0, 100.0]);
        for link in links {
            times_follow_the_rule(link, advice, cores);
            let all = list(link, "candidates");
            let any_qemu = ["none", "zlib", "zstd"];
            let stock = all
                .iter()
                .filter(|one| any_qemu.contains(&text(one, "method")));
            is_best(link, all.iter());
            is_best(&link["stock"], stock);
        }
    }
}

#[test]
fn the_text_says_what_the_json_says() {
    let output = probe(&["--cores", "2"]);
    let shown = String::from_utf8(output.stdout).unwrap();
    let json = json(&["--cores", "2"]);
    assert!(shown.contains("synthetic"), "{shown}");

    let engines = block(&shown, "engine");
    for (line, engine) in engines.iter().zip(list(&json, "engines")) {
        let presence = match engine["present"] == true {
            true => "present",
            false => "absent",
        };
        let words: Vec<_> = line.split_ascii_whitespace().take(3).collect();
        let (name, method) = (text(engine, "name"), text(engine, "method"));
        assert_eq!(words, [name, method, presence], "{shown}");
        assert!(line.contains(text(engine, "reason")), "{line}");
    }
    assert_eq!(engines.len(), list(&json, "engines").len(), "{shown}");

    // Two runs measure two speeds, but the same methods.
    let methods = list(&json["advice"], "methods");
    for name in ["one core", "s per GiB"] {
        let lines = block(&shown, name);
        assert_eq!(lines.len(), 1 + methods.len(), "{shown}");
        for (line, method) in lines[1..].iter().zip(methods) {
            assert!(line.starts_with(&label(method)), "{line}: {method}");
        }
    }
    the_text_follows_from_its_numbers(&shown);
}

/// With the real libqatzip, and most likely without a device.
#[test]
fn the_library_of_qat_is_named_and_does_not_print() {
    let Some(folder) = lab::qatzip::folder_or_skip().unwrap() else {
        return;
    };
    let file = folder.join("libqatzip.so.3").canonicalize().unwrap();
    for arguments in [&["probe"][..], &["probe", "--json"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_vamoose"))
            .args(arguments)
            .env("LD_LIBRARY_PATH", &folder)
            .output()
            .unwrap();
        assert!(output.status.success());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("qatzip.c"), "{said}");
        // Where there are devices for virtual machines and none is a QAT, qatlib says so.
        if !Path::new("/dev/vfio").exists() {
            assert_eq!(said, "");
        }
        let shown = String::from_utf8(output.stdout).unwrap();
        if arguments.len() == 1 {
            let line = shown
                .lines()
                .find(|line| line.contains(" qatzip "))
                .unwrap();
            assert!(line.contains(file.to_str().unwrap()), "{line}");
            continue;
        }
        let probe: Value = serde_json::from_str(&shown).unwrap();
        let mut engines = list(&probe, "engines").iter();
        let qat = engines.find(|engine| engine["name"] == "qat").unwrap();
        assert_eq!(text(qat, "library"), file.to_str().unwrap());
        let reason = text(qat, "reason");
        assert!(reason.contains("QAT device"), "{reason}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_vamoose"))
        .arg("probe")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}

fn has_its_keys(probe: &Value) {
    for key in [
        "kernel",
        "cpu",
        "numa-nodes",
        "memlock",
        "kvm",
        "userfaultfd",
        "zero-copy",
        "kernel-tls",
        "devices",
        "offload",
        "engines",
        "qemus",
        "advice",
    ] {
        assert!(probe.get(key).is_some(), "{key} is missing in {probe:#}");
    }
    assert!(probe["cpu"]["usable-cores"].as_u64().unwrap() > 0);
    every_engine_is_listed(probe);
    every_method_is_measured(&probe["advice"]);
}

fn every_engine_is_listed(probe: &Value) {
    let (engines, rows) = (list(probe, "engines"), Registry::new().engines());
    assert_eq!(engines.len(), rows.len());
    for (engine, row) in engines.iter().zip(rows) {
        assert_eq!(text(engine, "name"), row.name);
        assert_eq!(text(engine, "method"), row.method.name());
        assert_eq!(engine["present"], row.absent.is_none(), "{engine}");
        assert_eq!(engine["hardware"], row.hardware, "{engine}");
        let reason = text(engine, "reason");
        assert!(!reason.is_empty(), "{engine}");
        assert!(reason.contains(&row.absent.unwrap_or_default()), "{engine}");
        assert_eq!(engine["library"].is_null(), row.library.is_none());
        let levels = &engine["levels"];
        assert_eq!(levels.is_null(), row.levels.is_none(), "{engine}");
        if let Some(range) = row.levels {
            assert_eq!(levels["min"], *range.start());
            assert_eq!(levels["max"], *range.end());
        }
    }
    let has_qat = list(probe, "devices")
        .iter()
        .any(|device| device["kind"] == "qat");
    let qat = engines.iter().find(|engine| engine["name"] == "qat");
    let says_none = text(qat.unwrap(), "reason").contains("no QAT device found");
    assert_eq!(says_none, !has_qat);
}

fn every_method_is_measured(advice: &Value) {
    assert!(text(advice, "sample").contains("synthetic"));
    assert_eq!(list(advice, "unmeasured").len(), 0, "{advice:#}");
    let methods = list(advice, "methods");
    for method in Method::ALL {
        let found = methods.iter().any(|one| one["method"] == method.name());
        assert_eq!(found, Settings::new(method, None).is_ok(), "{method}");
    }
    for method in methods {
        let expected = match text(method, "method") {
            "none" => 0.99..1.01,
            _ => 1.2..10.0,
        };
        assert!(expected.contains(&number(method, "ratio")), "{method}");
        assert!(number(method, "bytes-per-second") > 1e6, "{method}");
        assert!(number(method, "decoded-bytes-per-second") > 1e6, "{method}");
    }
}

/// time = max(bytes / ratio / link, CPU time / cores), CPU time = QEMU to vamoose + encoding + sending / ratio
fn times_follow_the_rule(link: &Value, advice: &Value, cores: f64) {
    let methods = list(advice, "methods");
    let candidates = list(link, "candidates");
    assert_eq!(candidates.len(), methods.len());
    for one in candidates {
        let of = methods.iter().find(|of| label(of) == label(one)).unwrap();
        let bytes_on_link = GIB / number(of, "ratio");
        let on_link = bytes_on_link / (number(link, "gbit-per-second") * 125e6);
        let hops = number(&advice["hops"], "from-qemu")
            + number(&advice["hops"], "sending") / number(of, "ratio");
        let on_cores = (hops + GIB / number(of, "bytes-per-second")) / cores;
        assert!(near(number(one, "seconds-on-link"), on_link), "{one}");
        assert!(near(number(one, "seconds-on-cores"), on_cores), "{one}");
        let time = number(one, "seconds-per-gib");
        assert!(near(time, on_link.max(on_cores)), "{one}");
        let limit = match on_link >= on_cores {
            true => "link",
            false => "cores",
        };
        assert_eq!(one["limited-by"], limit, "{one}");
    }
    let times = candidates.iter().map(|one| number(one, "seconds-per-gib"));
    assert!(times.is_sorted(), "{link:#}");
}

/// Among those within 15 % of the soonest it is the one with least work.
fn is_best<'a>(chosen: &Value, candidates: impl Iterator<Item = &'a Value> + Clone) {
    let times = candidates.clone().map(|one| number(one, "seconds-per-gib"));
    let soonest = times.reduce(f64::min).unwrap();
    let ties = candidates.filter(|one| number(one, "seconds-per-gib") <= 1.15 * soonest);
    let work = ties.map(|one| number(one, "seconds-on-cores"));
    assert!(number(chosen, "seconds-per-gib") <= 1.15 * soonest);
    assert_eq!(
        number(chosen, "seconds-on-cores"),
        work.reduce(f64::min).unwrap()
    );
}

/// Each line of advice repeats the two times of the method's row and of the link's column.
fn the_text_follows_from_its_numbers(shown: &str) {
    let rows = block(shown, "s per GiB");
    let advised = block(shown, "advises");
    let links = advised.iter().filter(|line| line.contains(" Gbit/s: "));
    for (column, line) in links.enumerate() {
        let (_, advice) = line.split_once(": ").unwrap();
        let method = advice[..12].trim();
        let row = rows.iter().find(|row| row[..12].trim() == method).unwrap();
        let times: Vec<_> = row[12..].split_ascii_whitespace().collect();
        let (on_cores, on_link) = (times[0], times[1 + column]);
        let both = format!("(link {on_link} s, cores {on_cores} s)");
        assert!(advice.contains(&both), "{both} is not in {advice}");
    }
    assert!(advised.len() >= 4, "a link is without advice:\n{shown}");
}

/// The values of the lines called `name`.
fn block<'a>(shown: &'a str, name: &str) -> Vec<&'a str> {
    const COLUMN: usize = 16;
    let first = |line: &&str| {
        line.split_at_checked(COLUMN)
            .is_some_and(|(n, _)| n.trim() == name)
    };
    let mut lines = shown.lines().skip_while(|line| !first(line));
    let mut values: Vec<_> = lines.next().into_iter().collect();
    values.extend(lines.take_while(|line| line.starts_with(&" ".repeat(COLUMN))));
    values.into_iter().map(|line| &line[COLUMN..]).collect()
}

fn label(method: &Value) -> String {
    match method["level"].as_i64() {
        Some(level) => format!("{} {level}", text(method, "method")),
        None => text(method, "method").to_owned(),
    }
}

fn list<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key].as_array().unwrap()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap()
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap()
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

const GIB: f64 = (1u64 << 30) as f64;

fn json(arguments: &[&str]) -> Value {
    let output = probe(&[&["--json"], arguments].concat());
    serde_json::from_slice(&output.stdout).unwrap()
}

fn probe(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_vamoose"))
        .arg("probe")
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}
