//! What is in the report, and what is not.

use std::{fs, path::Path, time::Duration};

use idxd::discovery::Root;
use idxd_model::{Config, Model, PortalKind};
use serde_json::Value;

use super::super::report::*;

/// A machine with one DSA, whose names must not get into a report.
pub(super) fn machine(folder: &Path) -> Host {
    for (file, text) in [
        ("proc/sys/kernel/osrelease", "6.12.9-amd64\n"),
        ("proc/sys/kernel/hostname", "secret-host\n"),
        (
            "proc/cpuinfo",
            "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: enqcmd\n",
        ),
        ("version", "0x100"),
        ("state", "enabled"),
        ("numa_node", "0"),
        ("gen_cap", "0x40915f0107"),
        ("op_cap", "00000001,003f03ff"),
        ("max_batch_size", "1024"),
        ("max_transfer_size", "2147483648"),
        ("pasid_enabled", "1"),
        ("engine0.0/group_id", "0"),
        ("wq0.0/state", "enabled"),
        ("wq0.0/type", "user"),
        ("wq0.0/name", "secret-label"),
        ("wq0.0/mode", "shared"),
        ("wq0.0/size", "16"),
        ("wq0.0/threshold", "12"),
        ("wq0.0/group_id", "0"),
        ("wq0.0/priority", "10"),
        ("wq0.0/block_on_fault", "0"),
        ("wq0.0/prs_disable", "1"),
        ("wq0.0/max_transfer_size", "2097152"),
        ("wq0.0/max_batch_size", "32"),
    ] {
        let path = match file.starts_with("proc") {
            true => folder.join(file),
            false => folder.join("sys/bus/dsa/devices/dsa0").join(file),
        };
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    Host::of(&Root::under(folder))
}

fn tested(config: &Config, queue: &str) -> Tested {
    let queue_of_model = Model::deterministic(config).queue(0, 0, PortalKind::Enqcmd);
    Tested::run(
        queue.to_owned(),
        Some("mapped"),
        queue_of_model,
        Duration::from_millis(200),
    )
}

/// What `--hw` writes, of models in the place of hardware.
fn report(folder: &Path) -> String {
    let tested_queues = vec![
        tested(&Config::dsa(), "dsa0/wq0.0"),
        tested(&Config::iaa(), "iax1/wq1.0"),
    ];
    let report = Report::new(tested_queues, Vec::new(), Some(machine(folder)));
    serde_json::to_string_pretty(&report).unwrap()
}

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn the_report_says_what_was_tested_and_what_was_found() {
    let folder = tempfile::tempdir().unwrap();
    let text = report(folder.path());
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["report-version"], 4);
    assert_eq!(json["program-version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(json["model-version"], idxd_model::VERSION);
    assert_eq!(json["hardware"], true);

    let host = &json["host"];
    assert_eq!(host["kernel"][0], "6.12.9-amd64");
    let cpu = host["cpu"][0].as_str().unwrap();
    assert!(cpu.starts_with("Intel(R) Xeon(R) ("), "{cpu}");
    let device = &host["devices"]["dsa0"];
    for (key, value) in [
        ("version", "0x100"),
        ("gen_cap", "0x40915f0107"),
        ("op_cap", "00000001,003f03ff"),
    ] {
        assert_eq!(device[key], value, "{key}");
    }
    let queue = &host["devices"]["dsa0/wq0.0"];
    for (key, value) in [
        ("mode", "shared"),
        ("threshold", "12"),
        ("prs_disable", "1"),
    ] {
        assert_eq!(queue[key], value, "{key}");
    }

    for (queue, bytes) in [(0, 32), (1, 64)] {
        let queue = &json["queues"][queue];
        assert_eq!(queue["portal"], "mapped");
        let checks = queue["checks"].as_array().unwrap();
        assert!(checks.len() > 8);
        for check in checks {
            assert_eq!(
                keys(check),
                [
                    "name", "open", "record", "result", "section", "verdict", "what"
                ]
            );
            if let Some(record) = check["record"].as_str() {
                assert_eq!(record.len(), 2 * bytes, "{check}");
                assert!(record.bytes().all(|digit| digit.is_ascii_hexdigit()));
            }
        }
        let noop = &checks[0];
        assert_eq!(
            (&noop["name"], &noop["result"]),
            (&"noop".into(), &"holds".into())
        );
        assert!(noop["section"].as_str().unwrap().contains("8.3.1"));
        assert!(noop["record"].as_str().unwrap().starts_with("01"));
    }
}

#[test]
fn the_report_names_neither_the_host_nor_its_users() {
    let folder = tempfile::tempdir().unwrap();
    let text = report(folder.path());
    assert!(!text.contains("secret"), "{text}");
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        keys(&json["host"]),
        [
            "accelerators",
            "cpu",
            "devices",
            "dsa and iaa",
            "features",
            "kernel",
            "kvm",
            "memlock",
            "userfaultfd",
        ]
    );
}
