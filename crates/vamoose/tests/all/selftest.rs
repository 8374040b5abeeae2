//! `vamoose selftest`, against models, and against the work queues of a machine that has none.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

#[test]
fn models_do_what_is_expected_of_them() {
    let output = selftest(&[]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "DSA model, ENQCMD",
        "IAA model, write(2)",
        "compare-pattern-zero       holds",
        "no document promises the expected answer",
    ] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
    assert!(!text.contains("  differs"), "{text}");
}

#[test]
fn the_json_has_its_keys() {
    let json = json(&[]);
    assert_eq!(json["passed"], true);
    assert_eq!(json["hardware"], false);
    for key in [
        "report-version",
        "program-version",
        "model-version",
        "failures",
        "differences",
    ] {
        assert!(json.get(key).is_some(), "{key}");
    }
    assert_eq!(json["host"], Value::Null);
    let queues = json["queues"].as_array().unwrap();
    assert_eq!(queues.len(), 4);
    for check in queues
        .iter()
        .flat_map(|queue| queue["checks"].as_array().unwrap())
    {
        for key in [
            "name", "what", "section", "open", "result", "verdict", "record",
        ] {
            assert!(check.get(key).is_some(), "{key} in {check}");
        }
        let result = check["result"].as_str().unwrap();
        assert!(["holds", "skipped"].contains(&result), "{check}");
    }
}

#[test]
fn the_json_goes_to_a_file_beside_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("selftest.json");
    let output = selftest(&["--json", path.to_str().unwrap()]);
    assert!(output.status.success() && !output.stdout.is_empty());
    let json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    assert_eq!(json["passed"], true);
}

#[test]
fn a_host_without_work_queues_says_what_is_missing() {
    if Path::new("/sys/bus/dsa/devices").is_dir() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = selftest(&["--hw", "--json", path.to_str().unwrap()]);
    assert!(!output.status.success());
    // There is nothing to be sent.
    assert!(!path.exists());
    let said = String::from_utf8(output.stderr).unwrap();
    for part in [
        "no work queue of a DSA or an IAA",
        "on this host: ",
        "vamoose probe",
    ] {
        assert!(said.contains(part), "{said}");
    }
    let output = selftest(&["--hw", "--path", "wq0.0"]);
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("no work queue wq0.0"), "{said}");
}

#[test]
fn wrong_options_are_refused() {
    for arguments in [&["--path", "wq0.0"][..], &["--hw", "--path", "wq"]] {
        assert_eq!(selftest(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

fn json(arguments: &[&str]) -> Value {
    let output = selftest(&[arguments, &["--json", "-"]].concat());
    serde_json::from_slice(&output.stdout).unwrap()
}

fn selftest(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vamoose"))
        .arg("selftest")
        .args(arguments)
        .output()
        .unwrap()
}
