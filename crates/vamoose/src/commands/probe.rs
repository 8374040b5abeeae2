//! `vamoose probe`: this host's hardware and software for migrations.
//!
//! The system's files are read below a [`Root`], which tests replace. Something absent is not an error: the output states why.

mod engines;
mod system;

use std::{
    collections::BTreeMap,
    fmt::Display,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use clap::Args;
use idxd::discovery;
use vamoose_codec::Registry;

/// Show this host's hardware and software for migrations
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Print a JSON object: the lines of the text, as arrays by their names
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let lines = probe(&Root::system());
    let shown = match options.json {
        true => lines.json()?,
        false => lines.text(),
    };
    match io::stdout().write_all(shown.as_bytes()) {
        // `| head` has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}

/// Everything that is printed.
fn probe(root: &Root) -> Lines {
    let mut lines = Lines::default();
    let kernel = root.read("proc/sys/kernel/osrelease");
    lines.put("kernel", kernel.as_deref().unwrap_or("unknown"));
    system::describe_cpu(root, &mut lines);
    lines.put("memlock", system::memlock());
    lines.put("kvm", system::kvm(root));
    lines.put("userfaultfd", system::userfaultfd(root));
    let devices = engines::devices(root);
    if devices.is_empty() {
        lines.put("accelerators", NO_DEVICES);
    }
    for device in &devices {
        lines.put("accelerator", device);
    }
    describe_queues(root, &mut lines);
    for engine in engines::engines(&Registry::new(), &devices) {
        lines.put("engine", engine);
    }
    lines
}

const NO_DEVICES: &str = "no QAT, DSA or IAA on PCI";

/// The work queues of DSAs and IAAs, and what prevents their use.
fn describe_queues(root: &Root, lines: &mut Lines) {
    const NAME: &str = "dsa and iaa";
    let report = discovery::report(&root.of_idxd());
    for device in &report.devices {
        for line in device.to_string().lines() {
            lines.put(NAME, line);
        }
    }
    for missing in &report.missing {
        lines.put(NAME, format_args!("missing: {missing}"));
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

    fn json(&self) -> Result<String> {
        let mut values: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, value) in &self.0 {
            values.entry(name).or_default().push(value);
        }
        Ok(serde_json::to_string_pretty(&values)? + "\n")
    }
}

/// Root of the system's files: `/`, or a folder of fake files in tests.
struct Root(PathBuf);

impl Root {
    fn system() -> Self {
        Self(PathBuf::from("/"))
    }

    /// The path of a system file, given without its leading `/`.
    fn path(&self, file: impl AsRef<Path>) -> PathBuf {
        self.0.join(file)
    }

    /// The same root for idxd.
    fn of_idxd(&self) -> discovery::Root {
        discovery::Root::under(&self.0)
    }

    /// The trimmed text of a system file, where it can be read.
    fn read(&self, file: impl AsRef<Path>) -> Option<String> {
        let bytes = fs::read(self.path(file)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }
}

#[cfg(test)]
mod fake {
    //! Another system's files, in a folder.

    use super::*;

    /// A root with `files`, removed when the folder is dropped.
    pub(super) fn root(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        let root = Root(folder.path().to_owned());
        for (file, text) in files {
            let path = root.path(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
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
            "modprobe idxd",
        ] {
            assert!(shown.contains(line), "{shown}");
        }
    }

    fn queues(root: &Root) -> String {
        let mut lines = Lines::default();
        describe_queues(root, &mut lines);
        lines.text()
    }

    #[test]
    fn an_unconfigured_device_comes_with_its_commands() {
        let (_folder, root) = dsa0(&[]);
        let shown = queues(&root);
        for part in [
            "dsa0",
            "accel-config config-wq",
            "accel-config enable-wq dsa0/wq0.0",
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
