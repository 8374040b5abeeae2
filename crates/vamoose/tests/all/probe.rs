//! `vamoose probe` on the machine that runs the tests, whatever that is.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use vamoose_codec::Registry;

#[test]
fn everything_has_its_lines() {
    let shown = probe();
    for name in [
        "kernel",
        "cpu",
        "features",
        "memlock",
        "kvm",
        "userfaultfd",
        "dsa and iaa",
    ] {
        assert!(!block(&shown, name).is_empty(), "{name}: {shown}");
    }
    assert!(shown.contains("\naccelerator"), "{shown}");
}

#[test]
fn every_engine_is_listed() {
    let shown = probe();
    let (engines, rows) = (block(&shown, "engine"), Registry::new().engines());
    assert_eq!(engines.len(), rows.len(), "{shown}");
    for (line, row) in engines.iter().zip(rows) {
        let presence = match row.absent.is_none() {
            true => "present",
            false => "absent",
        };
        let words: Vec<_> = line.split_ascii_whitespace().take(3).collect();
        assert_eq!(words, [row.name, row.method.name(), presence], "{shown}");
        assert!(line.contains(&row.absent.unwrap_or_default()), "{line}");
        if let Some(file) = row.library {
            assert!(line.contains(file.to_str().unwrap()), "{line}");
        }
        if let Some(levels) = row.levels.filter(|_| !row.hardware) {
            let levels = format!("levels {} to {}", levels.start(), levels.end());
            assert!(line.ends_with(&levels), "{line}");
        }
        if row.name == "qat" {
            let says_none = line.contains("no QAT device found");
            assert_eq!(says_none, !shown.contains("QAT 4"), "{shown}");
        }
    }
}

#[test]
fn json_has_the_lines_of_the_text() {
    let output = Command::new(env!("CARGO_BIN_EXE_vamoose"))
        .args(["probe", "--json"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let lines: BTreeMap<String, Vec<String>> = serde_json::from_slice(&output.stdout).unwrap();
    let shown = probe();
    for (name, lines) in &lines {
        assert_eq!(block(&shown, name), *lines, "{name}");
    }
    let count: usize = lines.values().map(Vec::len).sum();
    assert_eq!(count, shown.lines().count());
}

/// With the real libqatzip, and most likely without a device.
#[test]
fn the_library_of_qat_is_named_and_does_not_print() {
    let Some(folder) = lab::qatzip::folder_or_skip().unwrap() else {
        return;
    };
    let file = folder.join("libqatzip.so.3").canonicalize().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_vamoose"))
        .arg("probe")
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
    let engines = block(&shown, "engine");
    let qat = engines
        .iter()
        .find(|line| line.starts_with("qat "))
        .unwrap();
    assert!(qat.contains(file.to_str().unwrap()), "{qat}");
    assert!(qat.contains("QAT device"), "{qat}");
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

fn probe() -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_vamoose"))
        .arg("probe")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}
