//! `vamoose probe` on the machine that runs the tests, whatever that is.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use multifd::Method;
use serde_json::Value;
use vamoose_codec::{Registry, Settings};

#[test]
fn everything_is_in_the_json() {
    has_its_keys(&json());
}

#[test]
fn the_text_says_what_the_json_says() {
    let output = probe(&[]);
    let shown = String::from_utf8(output.stdout).unwrap();
    let json = json();
    assert!(shown.contains("real guests differ"), "{shown}");

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
    let methods = list(&json["speeds"], "methods");
    let lines = block(&shown, "one core");
    assert_eq!(lines.len(), 1 + methods.len(), "{shown}");
    for (line, method) in lines[1..].iter().zip(methods) {
        assert!(line.starts_with(&label(method)), "{line}: {method}");
    }
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
        "memlock",
        "kvm",
        "userfaultfd",
        "devices",
        "offload",
        "engines",
        "speeds",
    ] {
        assert!(probe.get(key).is_some(), "{key} is missing in {probe:#}");
    }
    assert!(probe["cpu"]["usable-cores"].as_u64().unwrap() > 0);
    every_engine_is_listed(probe);
    every_method_is_measured(&probe["speeds"]);
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

fn every_method_is_measured(speeds: &Value) {
    assert!(text(speeds, "sample").contains("real guests differ"));
    let methods = list(speeds, "methods");
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

fn json() -> Value {
    serde_json::from_slice(&probe(&["--json"]).stdout).unwrap()
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
