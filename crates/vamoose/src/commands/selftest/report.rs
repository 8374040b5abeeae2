//! The results of the checks, as text and as JSON.

use std::{collections::BTreeMap, fs, path::Path, sync::Arc, time::Duration};

use idxd::{
    Kind, RecordImage, Submit,
    discovery::{self, Root},
};
use idxd_model::selftest::{self, Verdict};
use serde::Serialize;

use crate::commands::probe;

/// Everything that is printed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Report {
    /// Incremented when a key changes its meaning or is removed.
    report_version: u32,
    program_version: &'static str,
    model_version: u32,
    hardware: bool,
    /// The machine whose devices were tested; none for models.
    pub(super) host: Option<Host>,
    passed: bool,
    /// Reasons why the run is a failure.
    pub(super) failures: Vec<String>,
    pub(super) queues: Vec<Tested>,
    /// Work queues of the machine that were not tested.
    pub(super) untested: Vec<Untested>,
    /// Where a real queue did not answer as the model does, which answers as each check expects.
    differences: Vec<String>,
}

/// One work queue and its results.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Tested {
    queue: String,
    /// How descriptors got to the device: `mapped` or `written`; null for models, whose names contain it.
    portal: Option<&'static str>,
    checks: Vec<Checked>,
}

/// A check and its result.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Checked {
    name: &'static str,
    what: &'static str,
    section: Option<&'static str>,
    open: bool,
    /// In one word: `holds`, `differs` or `skipped`.
    result: &'static str,
    verdict: String,
    /// The last record in hexadecimal, as it stands in memory. None of models: those contain addresses.
    record: Option<String>,
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
    /// Report about `queues`, which are those of `host` or else models.
    pub(super) fn new(queues: Vec<Tested>, untested: Vec<Untested>, host: Option<Host>) -> Self {
        let (mut failures, mut differences) = (Vec::new(), Vec::new());
        for Tested { queue, checks, .. } in &queues {
            for check in checks.iter().filter(|check| check.result == "differs") {
                differences.push(format!("{queue}, {}: {}", check.name, check.verdict));
                if !check.open {
                    failures.push(format!("{} of {queue}", check.name));
                }
            }
        }
        let unopened = untested.iter().filter(|queue| queue.is_failure);
        failures.extend(unopened.map(|Untested { queue, why, .. }| {
            format!("work queue {queue} could not be opened: {why}")
        }));
        Self {
            report_version: 4,
            program_version: env!("CARGO_PKG_VERSION"),
            model_version: idxd_model::VERSION,
            hardware: host.is_some(),
            passed: failures.is_empty(),
            failures,
            differences,
            host,
            queues,
            untested,
        }
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for Tested { queue, checks, .. } in &self.queues {
            text += &format!("{queue}\n");
            for check in checks {
                let open = if check.open { "?" } else { " " };
                text += &format!("  {open} {:<26} {}\n", check.name, check.verdict);
                if check.result != "holds" {
                    let section = check.section.map_or(String::new(), |it| format!("; {it}"));
                    text += &format!("{:31}({}{section})\n", "", check.what);
                }
            }
            text.push('\n');
        }
        for Untested { queue, why, .. } in &self.untested {
            text += &format!("{queue}\n  not tested: {why}\n\n");
        }
        text += "? no document promises the expected answer: another one is no failure\n";
        if self.hardware {
            text += "\nwhere the hardware differs from the model\n";
            if self.differences.is_empty() {
                text += "  nowhere, as far as the checks go\n";
            }
            for difference in &self.differences {
                text += &format!("  {difference}\n");
            }
        }
        text
    }
}

impl Tested {
    /// Checks a queue and closes it. A descriptor may take as long as `timeout`.
    pub(super) fn run(
        queue: String,
        portal: Option<&'static str>,
        submit: Arc<dyn Submit>,
        timeout: Duration,
    ) -> Self {
        let kind = submit.limits().kind;
        let findings = selftest::run(submit, timeout).into_iter();
        let checks = findings.map(|finding| Checked {
            name: finding.check.name,
            what: finding.check.what,
            section: finding.check.section,
            open: finding.check.is_open(),
            result: match finding.verdict {
                Verdict::Holds => "holds",
                Verdict::Differs { .. } => "differs",
                Verdict::Skipped(_) => "skipped",
            },
            verdict: finding.verdict.to_string(),
            record: portal.and(finding.record).map(|image| bytes(image, kind)),
        });
        Self {
            checks: checks.collect(),
            queue,
            portal,
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

/// A machine with its devices: everything that determines the answers, but no names of the host or its users.
#[derive(Debug, Serialize)]
pub(super) struct Host {
    /// The lines of `vamoose probe`, without engines.
    #[serde(flatten)]
    probe: BTreeMap<String, Vec<String>>,
    /// The attributes of each device and each work queue as sysfs has them.
    devices: BTreeMap<String, Attributes>,
}

type Attributes = BTreeMap<String, String>;

impl Host {
    pub(super) fn of(root: &Root) -> Self {
        let folder = root.sys.join("bus/dsa/devices");
        let devices = discovery::scan(root);
        let names = devices.iter().flat_map(|device| {
            let queues = device.queues.iter().map(|queue| queue.name.to_string());
            [device.name.to_string()].into_iter().chain(queues)
        });
        Self {
            probe: probe::describe_host(root),
            devices: names
                .map(|name| (name.clone(), attributes(&folder.join(name))))
                .collect(),
        }
    }
}

/// All attributes but the name, which the administrator chose.
fn attributes(folder: &Path) -> Attributes {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    files
        .filter_map(|file| {
            let name = file.file_name().into_string().ok()?;
            let text = fs::read_to_string(file.path()).ok()?;
            (name != "name").then(|| (name, text.trim().to_owned()))
        })
        .collect()
}
