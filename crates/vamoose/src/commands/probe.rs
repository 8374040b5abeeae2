//! `vamoose probe`: this host's hardware and software for migrations.
//!
//! The files of the system are read below a [`Root`], which tests replace. Absence is not an error: the output states the
//! reason.

mod engines;
mod system;

use std::{collections::BTreeMap, fmt::Display, fs, path::PathBuf};

use anyhow::Result;
use clap::Args;
use idxd::discovery::{self, Root};
use vamoose::{options::JsonReport, report};
use vamoose_codec::Registry;

use self::engines::Accelerator;

/// Show this host's hardware and software for migrations
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The report has the lines of the text, as arrays by their names.
    #[command(flatten)]
    json: JsonReport,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let lines = probe(&Root::default());
    match options.json.is_wanted() {
        true => options.json.write(&lines.by_name()),
        false => report::print(&lines.text()),
    }
}

/// Everything that is printed.
fn probe(root: &Root) -> Lines {
    let accelerators = engines::accelerators(root);
    let mut lines = host(root, &accelerators);
    let mut advice = ADVICE.map(str::to_owned).to_vec();
    for engine in Registry::new().engines() {
        lines.put("engine", engines::describe(&engine, &accelerators));
        let fits_hardware = engine.hardware && engine.absent.is_none();
        advice.extend(fits_hardware.then(|| {
            format!(
                "{}: has hardware here, and saves CPU time on slow links",
                engine.method
            )
        }));
    }
    for line in advice {
        lines.put("method", line);
    }
    lines
}

/// As docs/choosing.md has it.
const ADVICE: [&str; 2] = [
    "auto: between two Vamooses, on every link; it is the default there",
    "zstd: to a stock QEMU, if the link is slower than zstd on the cores that can be spared",
];

/// All lines but those about engines.
fn host(root: &Root, accelerators: &[Accelerator]) -> Lines {
    let mut lines = Lines::default();
    let kernel = read(root.proc.join("sys/kernel/osrelease"));
    lines.put("kernel", kernel.as_deref().unwrap_or("unknown"));
    system::describe_cpu(root, &mut lines);
    lines.put("memlock", system::memlock());
    lines.put("kvm", system::kvm(root));
    let may_trace = system::may_trace();
    lines.put("userfaultfd", system::userfaultfd(root, may_trace));
    if accelerators.is_empty() {
        lines.put("accelerators", NO_DEVICES);
    }
    for accelerator in accelerators {
        lines.put("accelerator", &accelerator.description);
    }
    describe_queues(root, &mut lines);
    lines
}

/// The lines about this host, without engines, for reports: values by name.
pub(super) fn describe_host(root: &Root) -> BTreeMap<String, Vec<String>> {
    host(root, &engines::accelerators(root)).by_name()
}

const NO_DEVICES: &str = "no QAT, DSA or IAA on PCI";

/// The work queues of DSAs and IAAs, and what prevents their use.
fn describe_queues(root: &Root, lines: &mut Lines) {
    const NAME: &str = "dsa and iaa";
    let devices = discovery::scan(root);
    for device in &devices {
        for line in device.to_string().lines() {
            lines.put(NAME, line);
        }
    }
    for missing in discovery::missing(root, &devices) {
        lines.put(NAME, format_args!("missing: {missing}"));
    }
    let mut queues = devices.iter().flat_map(|device| &device.queues);
    if !queues.any(|queue| queue.usable().is_ok()) {
        lines.put(NAME, "how to set up a work queue: docs/accelerators.md");
    }
}

/// Names with values, in the order of the output. A name may repeat.
#[derive(Default)]
struct Lines(Vec<(String, String)>);

impl Lines {
    fn put(&mut self, name: &str, value: impl Display) {
        self.0.push((name.to_owned(), value.to_string()));
    }

    /// `name  value`, aligned. A name that repeats is printed once.
    fn text(&self) -> String {
        let mut last = "";
        let lines = self.0.iter().map(|(name, value)| {
            let shown = if last == name { "" } else { name };
            last = name;
            format!("{shown:<16}{value}\n")
        });
        lines.collect()
    }

    fn by_name(self) -> BTreeMap<String, Vec<String>> {
        let mut values: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in self.0 {
            values.entry(name).or_default().push(value);
        }
        values
    }
}

/// The trimmed text of a file of the system, if it can be read.
fn read(file: PathBuf) -> Option<String> {
    let bytes = fs::read(file).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

#[cfg(test)]
mod fake {
    //! Another system's files, in a folder.

    use super::*;

    /// A root with `files`, removed when the folder is dropped.
    pub(super) fn root(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = Root::under(folder.path());
        (folder, root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_without_anything_is_described_too() {
        let (_folder, root) = fake::root(&[]);
        let shown = probe(&root).text();
        for line in [
            "kernel          unknown",
            "kvm             absent: ",
            "userfaultfd     absent: ",
            NO_DEVICES,
            "no DSA or IAA on the PCI bus",
            "method          auto: between two Vamooses",
        ] {
            assert!(shown.contains(line), "{shown}");
        }
        // There is nothing for the driver to drive.
        assert!(!shown.contains("modprobe"), "{shown}");
    }

    fn queues(root: &Root) -> String {
        let mut lines = Lines::default();
        describe_queues(root, &mut lines);
        lines.text()
    }

    #[test]
    fn an_unconfigured_device_comes_with_its_problem_and_the_page_about_set_up() {
        let (_folder, root) = dsa0(&[]);
        let shown = queues(&root);
        for part in [
            "dsa0/wq0.0 cannot be used: its device is disabled",
            "docs/accelerators.md",
        ] {
            assert!(shown.contains(part), "{shown}");
        }
    }

    #[test]
    fn a_queue_without_page_requests_is_marked() {
        let (_folder, root) = dsa0(&[("wq0.0/prs_disable", "1")]);
        assert!(queues(&root).contains("prs_disable"));
    }

    /// A DSA with a work queue that has not been set up, and `more` files.
    fn dsa0(more: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let device = "sys/bus/dsa/devices/dsa0";
        let files: Vec<(String, &str)> = [
            ("version", "0x100"),
            ("state", "disabled"),
            ("numa_node", "1"),
            ("max_groups", "4"),
            ("max_engines", "4"),
            ("max_work_queues", "8"),
            ("max_work_queues_size", "128"),
            ("max_batch_size", "1024"),
            ("max_transfer_size", "2147483648"),
            ("op_cap", "001f03ff"),
            ("pasid_enabled", "1"),
            ("group0.0/engines", ""),
            ("engine0.0/group_id", "-1"),
            ("wq0.0/state", "disabled"),
            ("wq0.0/type", "none"),
            ("wq0.0/mode", "shared"),
            ("wq0.0/size", "0"),
            ("wq0.0/max_transfer_size", "2097152"),
            ("wq0.0/max_batch_size", "32"),
        ]
        .iter()
        .chain(more)
        .map(|(file, text)| (format!("{device}/{file}"), *text))
        .collect();
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(file, text)| (file.as_str(), *text))
            .collect();
        fake::root(&files)
    }
}
