//! `vamoose probe`: this host's hardware and software for migrations, and the speed of each method.
//!
//! The system's files are read below a [`Root`], which tests replace. Something absent is not an error: the output states why.

mod engines;
mod offload;
mod speeds;
mod system;

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use clap::Args;
use serde::Serialize;
use vamoose_codec::Registry;

use self::{
    engines::{Device, Engine},
    offload::Offload,
    speeds::Speeds,
    system::{Cpu, Memlock, Presence},
};

/// Show this host's hardware and software for migrations, and the speed of each method
///
/// Encoders and decoders are measured for about two seconds.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let probe = Probe::new(&Root::system());
    let text = if options.json {
        serde_json::to_string_pretty(&probe).context("cannot write the result as JSON")? + "\n"
    } else {
        probe.text()
    };
    match io::stdout().write_all(text.as_bytes()) {
        // `| head` has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}

/// Everything that is printed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Probe {
    kernel: Option<String>,
    cpu: Cpu,
    memlock: Memlock,
    kvm: Presence,
    userfaultfd: Presence,
    devices: Vec<Device>,
    /// Reason if there are none.
    devices_reason: Option<&'static str>,
    offload: Offload,
    engines: Vec<Engine>,
    speeds: Speeds,
}

impl Probe {
    fn new(root: &Root) -> Self {
        let registry = Arc::new(Registry::new());
        let devices = engines::devices(root);
        Self {
            kernel: root.read("proc/sys/kernel/osrelease"),
            cpu: Cpu::probe(root),
            memlock: Memlock::probe(),
            kvm: system::kvm(root),
            userfaultfd: system::userfaultfd(root),
            engines: engines::engines(&registry, &devices),
            speeds: Speeds::measure(&registry),
            devices_reason: devices.is_empty().then_some(NO_DEVICES),
            devices,
            offload: Offload::probe(root),
        }
    }

    fn text(&self) -> String {
        let mut lines = Lines::default();
        lines.put("kernel", self.kernel.as_deref().unwrap_or("unknown"));
        self.cpu.describe(&mut lines);
        lines.put("memlock", &self.memlock);
        lines.put("kvm", &self.kvm);
        lines.put("userfaultfd", &self.userfaultfd);
        if let Some(reason) = self.devices_reason {
            lines.put("accelerators", reason);
        }
        for device in &self.devices {
            lines.put("accelerator", device);
        }
        self.offload.describe(&mut lines);
        for engine in &self.engines {
            lines.put("engine", engine);
        }
        self.speeds.describe(&mut lines);
        lines.0
    }
}

/// Reason if the bus has no accelerator.
const NO_DEVICES: &str = "no QAT, DSA or IAA on PCI";

/// Lines of `name  value`, aligned. A name that repeats is printed once.
#[derive(Default)]
struct Lines(String, String);

impl Lines {
    fn put(&mut self, name: &str, value: impl std::fmt::Display) {
        let shown = if self.1 == name { "" } else { name };
        self.0.push_str(&format!("{shown:<16}{value}\n"));
        name.clone_into(&mut self.1);
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
    fn of_idxd(&self) -> idxd::discovery::Root {
        idxd::discovery::Root::under(&self.0)
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
        let probe = Probe::new(&root);
        assert_eq!(probe.kernel, None);
        assert!(!probe.kvm.present && !probe.userfaultfd.present);
        assert!(probe.devices.is_empty());
        let text = probe.text();
        for line in ["kernel          unknown", "no QAT, DSA or IAA on PCI"] {
            assert!(text.contains(line), "{text}");
        }
        let json = serde_json::to_value(&probe).unwrap();
        for part in [&json, &json["offload"]] {
            assert_eq!(part["devices"], serde_json::json!([]));
        }
        assert_eq!(json["devices-reason"], NO_DEVICES);
        let reason = json["offload"]["devices-reason"].as_str().unwrap();
        assert!(reason.contains("no DSA or IAA on the PCI bus"), "{reason}");
    }
}
