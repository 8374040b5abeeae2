//! The command on machines whose work queues cannot all be opened. Models are behind those that can.

mod report;

use std::{fs, os::unix::fs::symlink, path::Path};

use idxd_model::{Config, Model};
use serde_json::Value;

use super::*;

/// A machine whose DSA has four work queues: two that look usable, one that is off, and one of the kernel's.
fn machine(folder: &Path) -> Root {
    report::machine(folder);
    let device = folder.join("sys/bus/dsa/devices/dsa0");
    for number in 1..4 {
        let queue = device.join(format!("wq0.{number}"));
        fs::create_dir(&queue).unwrap();
        for attribute in fs::read_dir(device.join("wq0.0")).unwrap() {
            let attribute = attribute.unwrap();
            fs::copy(attribute.path(), queue.join(attribute.file_name())).unwrap();
        }
    }
    fs::write(device.join("wq0.2/state"), "disabled").unwrap();
    fs::write(device.join("wq0.3/type"), "kernel").unwrap();
    let nodes = folder.join("dev/dsa");
    fs::create_dir_all(&nodes).unwrap();
    for number in 0..4 {
        symlink("/dev/null", nodes.join(format!("wq0.{number}"))).unwrap();
    }
    Root::under(folder)
}

fn options(path: Option<&str>) -> Options {
    Options {
        hw: true,
        path: path.unwrap_or("auto").parse().unwrap(),
        json: None,
    }
}

/// Opens all queues but those with these numbers.
fn all_but(refused: &[u32]) -> impl Fn(&WorkQueue) -> Result<Opened, OpenError> {
    |queue| {
        if refused.contains(&queue.name.queue) {
            return Err(OpenError::NoAnswer(queue.name));
        }
        let model = Model::deterministic(&Config::dsa());
        Ok((model.queue(0, 0, PortalKind::Enqcmd), Access::Mapped))
    }
}

#[test]
fn a_queue_that_cannot_be_opened_is_reported_and_the_others_are_tested() {
    let folder = tempfile::tempdir().unwrap();
    let root = machine(folder.path());
    for refused in [0, 1] {
        let report = report(&options(None), &root, all_but(&[refused])).unwrap();
        let (refused, opened) = (
            format!("dsa0/wq0.{refused}"),
            format!("dsa0/wq0.{}", 1 - refused),
        );
        let failure = format!(
            "work queue {refused} could not be opened: work queue {refused} does not answer"
        );
        assert_eq!(report.failures, [failure]);

        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["passed"], false);
        let tested = json["queues"].as_array().unwrap();
        assert_eq!(tested.len(), 1);
        assert_eq!(tested[0]["queue"], format!("{opened}, mapped"));
        assert!(tested[0]["checks"].as_array().unwrap().len() > 8);
        let untested = |queue: &str| {
            let rows = json["untested"].as_array().unwrap();
            let row = rows.iter().find(|row| row["queue"] == queue).unwrap();
            (row["why"].clone(), row["is-failure"].clone())
        };
        let row = |why: &str, is_failure| (Value::from(why), Value::from(is_failure));
        let why = format!("work queue {refused} does not answer");
        assert_eq!(untested(&refused), row(&why, true));
        assert_eq!(
            untested("dsa0/wq0.2"),
            row("it is disabled; it has to be enabled", false)
        );
        let kernel = row("its type is kernel; it has to be user", false);
        assert_eq!(untested("dsa0/wq0.3"), kernel);
        assert_eq!(json["untested"].as_array().unwrap().len(), 3);

        let text = report.text();
        assert!(
            text.contains(&format!("{refused}\n  not tested: {why}\n")),
            "{text}"
        );
    }
}

#[test]
fn a_report_is_written_even_if_no_queue_can_be_opened() {
    let folder = tempfile::tempdir().unwrap();
    let root = machine(folder.path());
    let report = report(&options(None), &root, all_but(&[0, 1])).unwrap();
    assert_eq!(report.failures.len(), 2);
    assert!(report.queues.is_empty() && report.host.is_some());
}

#[test]
fn a_queue_that_was_asked_for_has_to_be_tested() {
    let folder = tempfile::tempdir().unwrap();
    let root = machine(folder.path());
    let report = report(&options(Some("wq0.2,wq0.1")), &root, |queue| {
        match queue.usable() {
            Ok(_) => all_but(&[])(queue),
            Err(problem) => Err(OpenError::Unusable {
                queue: queue.name,
                problem,
            }),
        }
    });
    let report = report.unwrap();
    let failure = "work queue dsa0/wq0.2 could not be opened: work queue dsa0/wq0.2 cannot be used: it is disabled; it has to be enabled";
    assert_eq!(report.failures, [failure]);
    assert_eq!((report.queues.len(), report.untested.len()), (1, 1));
}
