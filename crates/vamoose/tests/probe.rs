//! `vamoose probe` on the machine that runs the tests, whatever that is.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::process::{Command, Output, Stdio};

use serde_json::Value;

#[test]
fn the_json_has_its_keys_and_plausible_numbers() {
    let output = probe(&["--json", "--cores", "3"]);
    let probe: Value = serde_json::from_slice(&output.stdout).unwrap();
    for key in [
        "kernel",
        "cpu",
        "numa-nodes",
        "memlock",
        "kvm",
        "userfaultfd",
        "zero-copy",
        "devices",
        "engines",
        "qemus",
        "advice",
    ] {
        assert!(probe.get(key).is_some(), "{key} is missing in {probe:#}");
    }
    assert!(probe["cpu"]["usable-cores"].as_u64().unwrap() > 0);
    let engines = probe["engines"].as_array().unwrap();
    let engine = |name: &str| engines.iter().find(|e| e["name"] == name).unwrap();
    assert_eq!(engine("zstd")["present"], true);
    assert_eq!(engine("qat")["present"], false);
    let reason = engine("qat")["reason"].as_str().unwrap();
    assert!(reason.contains("no driver in this build"), "{reason}");

    let advice = &probe["advice"];
    assert_eq!(advice["cores"], 3);
    assert!(advice["sample"].as_str().unwrap().contains("synthetic"));
    let methods = advice["methods"].as_array().unwrap();
    let names: Vec<_> = methods
        .iter()
        .map(|m| m["method"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["none", "zlib", "zstd", "zstd"]);
    for method in methods {
        let ratio = method["ratio"].as_f64().unwrap();
        let expected = if method["method"] == "none" {
            1.0..1.01
        } else {
            1.2..10.0
        };
        assert!(expected.contains(&ratio), "{method}");
        assert!(
            method["bytes-per-second"].as_f64().unwrap() > 1e6,
            "{method}"
        );
    }
    let links = advice["links"].as_array().unwrap();
    let gbits: Vec<_> = links
        .iter()
        .map(|l| l["gbit-per-second"].as_u64().unwrap())
        .collect();
    assert_eq!(gbits, [1, 10, 25, 100]);
    // 2^30 bytes at 1 Gbit/s take 8.6 s as they are.
    assert!((0.5..8.6).contains(&links[0]["seconds-per-gib"].as_f64().unwrap()));
}

#[test]
fn the_text_says_that_the_sample_is_made_up() {
    let output = probe(&[]);
    let text = String::from_utf8(output.stdout).unwrap();
    for line in ["kernel ", "cpu ", "engine ", "advises ", "synthetic"] {
        assert!(text.contains(line), "{line} is missing in:\n{text}");
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

fn probe(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_vamoose"))
        .arg("probe")
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}
