//! What the checks found, for people and for programs.

use idxd::{Kind, RecordImage};
use idxd_model::selftest::{Finding, Verdict};
use serde::Serialize;

use super::host::{self, Host};

/// Everything that is printed.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) hardware: bool,
    pub(super) seed: u64,
    pub(super) tested: Vec<Tested>,
    /// Work queues of the machine that were not tested.
    pub(super) untested: Vec<Untested>,
    /// The same checks against models, where the tested ones are none.
    pub(super) modelled: Vec<Tested>,
    /// The machine whose devices were tested; none for models.
    pub(super) host: Option<Host>,
}

/// One work queue and what was found.
#[derive(Debug)]
pub(super) struct Tested {
    pub(super) queue: String,
    /// How descriptors got to the device: `mapped` or `written`; of models their names say it.
    pub(super) portal: Option<&'static str>,
    pub(super) kind: Kind,
    pub(super) findings: Vec<Finding>,
}

/// A work queue without findings.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Untested {
    pub(super) queue: String,
    pub(super) why: String,
    /// It should have been tested.
    pub(super) is_failure: bool,
}

impl Report {
    /// What makes the run a failure.
    pub(super) fn failures(&self) -> Vec<String> {
        let findings = self
            .tested
            .iter()
            .flat_map(|tested| tested.findings.iter().map(move |finding| (tested, finding)));
        let mut failures: Vec<String> = findings
            .filter(|(_, finding)| finding.is_failure())
            .map(|(tested, finding)| format!("{} of {}", finding.check.name, tested.queue))
            .collect();
        let unopened = self.untested.iter().filter(|queue| queue.is_failure);
        failures.extend(unopened.map(|Untested { queue, why, .. }| {
            format!("work queue {queue} could not be opened: {why}")
        }));
        failures
    }

    /// Where a real queue returned something that no model of its kind did.
    fn differences(&self) -> Vec<Difference> {
        let mut differences = Vec::new();
        for tested in self.tested.iter().filter(|_| self.hardware) {
            for finding in &tested.findings {
                if matches!(finding.verdict, Verdict::Skipped { .. }) {
                    continue;
                }
                let of_models: Vec<&Verdict> = self
                    .modelled
                    .iter()
                    .filter(|modelled| modelled.kind == tested.kind)
                    .flat_map(|modelled| &modelled.findings)
                    .filter(|other| other.check.number == finding.check.number)
                    .map(|other| &other.verdict)
                    .filter(|verdict| !matches!(verdict, Verdict::Skipped { .. }))
                    .collect();
                if let Some(model) = of_models.first()
                    && !of_models.contains(&&finding.verdict)
                {
                    differences.push(Difference {
                        queue: tested.queue.clone(),
                        check: finding.check.name,
                        hardware: finding.verdict.to_string(),
                        model: model.to_string(),
                    });
                }
            }
        }
        differences
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for tested in &self.tested {
            text.push_str(&format!("{}\n", tested.queue));
            for Finding { check, verdict, .. } in &tested.findings {
                let open = if check.is_open { "?" } else { " " };
                text.push_str(&format!(
                    "  {:>3}{open} {:<26} {verdict}\n",
                    check.number, check.name
                ));
                if !matches!(verdict, Verdict::Holds) {
                    let section = check.section.map_or(String::new(), |it| format!("; {it}"));
                    text.push_str(&format!("{:33}({}{section})\n", "", check.what));
                }
            }
            text.push('\n');
        }
        for Untested { queue, why, .. } in &self.untested {
            text.push_str(&format!("{queue}\n  not tested: {why}\n\n"));
        }
        text.push_str("? no document promises the expected answer: another one is no failure\n");
        if self.hardware {
            text.push_str("\nwhere the hardware differs from the model\n");
            let differences = self.differences();
            if differences.is_empty() {
                text.push_str("  nowhere, as far as the checks go\n");
            }
            for it in differences {
                let Difference {
                    queue,
                    check,
                    hardware,
                    model,
                } = it;
                text.push_str(&format!(
                    "  {queue}, {check}: {hardware}; the model: {model}\n"
                ));
            }
        }
        text
    }

    /// Everything, for one file.
    pub(super) fn json(&self) -> impl Serialize {
        Json {
            report_version: REPORT_VERSION,
            program_version: env!("CARGO_PKG_VERSION"),
            model_version: idxd_model::VERSION,
            hardware: self.hardware,
            host: self.host.as_ref(),
            seed: self.seed,
            passed: self.failures().is_empty(),
            failures: self.failures(),
            queues: self
                .tested
                .iter()
                .map(|tested| JsonQueue::of(tested, self.hardware))
                .collect(),
            untested: &self.untested,
            differences: self.differences(),
        }
    }
}

/// Grows when a key changes its meaning or goes; new ones may come without that.
const REPORT_VERSION: u32 = 1;

/// A check that came out otherwise with hardware than with a model.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Difference {
    queue: String,
    check: &'static str,
    hardware: String,
    model: String,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Json<'a> {
    report_version: u32,
    program_version: &'static str,
    model_version: u32,
    hardware: bool,
    host: Option<&'a Host>,
    seed: u64,
    passed: bool,
    failures: Vec<String>,
    queues: Vec<JsonQueue>,
    untested: &'a [Untested],
    differences: Vec<Difference>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct JsonQueue {
    queue: String,
    portal: Option<&'static str>,
    kind: &'static str,
    checks: Vec<JsonCheck>,
}

impl JsonQueue {
    fn of(tested: &Tested, hardware: bool) -> Self {
        // Those of models have addresses in them, and a seed is to say the same again.
        let record = |image| hardware.then(|| bytes(image, tested.kind));
        Self {
            queue: tested.queue.clone(),
            portal: tested.portal,
            kind: host::kind(tested.kind),
            checks: tested
                .findings
                .iter()
                .map(|finding| JsonCheck::of(finding, finding.record.and_then(record)))
                .collect(),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct JsonCheck {
    number: u32,
    name: &'static str,
    what: &'static str,
    section: Option<&'static str>,
    open: bool,
    result: &'static str,
    expected: Option<String>,
    found: Option<String>,
    why: Option<String>,
    record: Option<String>,
}

impl JsonCheck {
    fn of(finding: &Finding, record: Option<String>) -> Self {
        let Finding { check, verdict, .. } = finding;
        let (result, expected, found, why) = match verdict {
            Verdict::Holds => ("holds", None, None, None),
            Verdict::Differs { expected, found } => {
                ("differs", Some(expected.clone()), Some(found.clone()), None)
            }
            Verdict::Found(found) => ("found", None, Some(found.clone()), None),
            Verdict::Skipped { why } => ("skipped", None, None, Some(why.clone())),
        };
        Self {
            number: check.number,
            name: check.name,
            what: check.what,
            section: check.section,
            open: check.is_open,
            result,
            expected,
            found,
            why,
            record,
        }
    }
}

/// A record's bytes as they stand in memory, in hexadecimal.
fn bytes(image: RecordImage, kind: Kind) -> String {
    let words = match kind {
        Kind::Dsa => &image.words[..4],
        Kind::Iaa => &image.words[..],
    };
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    bytes.map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use std::{fs, path::Path, time::Duration};

    use idxd::discovery::Root;
    use idxd_model::{Config, Model, PortalKind, selftest};
    use serde_json::Value;

    use super::*;

    /// A machine with one DSA, whose names must not get into a report.
    pub(in super::super) fn machine(folder: &Path) -> Host {
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
        let model = Model::deterministic(config);
        let options = selftest::Options {
            timeout: Duration::from_millis(200),
            hazards: false,
        };
        Tested {
            queue: queue.to_owned(),
            portal: Some("mapped"),
            kind: config.devices[0].kind,
            findings: selftest::run(model.queue(0, 0, PortalKind::Enqcmd), &options),
        }
    }

    /// What `--hw` writes, of models in the place of hardware.
    fn report(folder: &Path) -> String {
        let report = Report {
            hardware: true,
            seed: 7,
            tested: vec![
                tested(&Config::dsa(), "dsa0/wq0.0"),
                tested(&Config::iaa(), "iax1/wq1.0"),
            ],
            modelled: vec![tested(&Config::dsa(), "DSA model, ENQCMD")],
            untested: Vec::new(),
            host: Some(machine(folder)),
        };
        serde_json::to_string_pretty(&report.json()).unwrap()
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
        assert_eq!(json["report-version"], 1);
        assert_eq!(json["program-version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(json["model-version"], idxd_model::VERSION);
        assert_eq!(
            (&json["seed"], &json["hardware"]),
            (&7.into(), &true.into())
        );

        let host = &json["host"];
        assert_eq!(host["kernel"], "6.12.9-amd64");
        assert_eq!(host["cpu"], "Intel(R) Xeon(R)");
        let device = &host["devices"][0];
        for (key, value) in [
            ("name", "dsa0"),
            ("kind", "dsa"),
            ("version", "0x100"),
            ("gen-cap", "0x40915f0107"),
        ] {
            assert_eq!(device[key], value, "{key}");
        }
        assert!(device["op-cap"].as_str().unwrap().ends_with("1003f03ff"));
        let queue = &device["queues"][0];
        for (key, value) in [
            ("mode", "shared".into()),
            ("size", 16.into()),
            ("threshold", 12.into()),
            ("max-batch", 32.into()),
            ("max-transfer", (2_u64 << 20).into()),
            ("block-on-fault", false.into()),
            ("prs-disable", true.into()),
            ("ats-disable", Value::Null),
        ] {
            assert_eq!(queue[key], value, "{key}");
        }

        for (queue, bytes) in [(0, 32), (1, 64)] {
            let queue = &json["queues"][queue];
            assert_eq!(queue["portal"], "mapped");
            let checks = queue["checks"].as_array().unwrap();
            assert!(checks.len() > 15);
            for check in checks {
                assert_eq!(
                    keys(check),
                    [
                        "expected", "found", "name", "number", "open", "record", "result",
                        "section", "what", "why",
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
                "cpu",
                "devices",
                "enqcmd",
                "enqcmd-enabled",
                "kernel",
                "missing",
                "movdir64b",
                "raw-io",
                "waitpkg",
            ]
        );
    }
}
