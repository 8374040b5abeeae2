//! The machine of a report: everything that determines its devices' answers, but no names of the host or its users.

use std::{collections::BTreeMap, fs, path::Path};

use idxd::{
    cpu::Features,
    discovery::{self, Root},
};
use rustix::thread::{CapabilitySet, capabilities};
use serde::Serialize;

/// A machine with its devices.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Host {
    /// The kernel's release.
    kernel: Option<String>,
    /// The processor's model.
    cpu: Option<String>,
    waitpkg: bool,
    /// This process has CAP_SYS_RAWIO, without which kernels may let it submit through write(2) alone.
    raw_io: bool,
    missing: Vec<&'static str>,
    /// The attributes of each device and each work queue as sysfs has them.
    devices: BTreeMap<String, Attributes>,
}

type Attributes = BTreeMap<String, String>;

impl Host {
    pub(super) fn of(root: &Root) -> Self {
        let devices = discovery::scan(root);
        let text = |file: &str| fs::read_to_string(root.proc.join(file)).ok();
        let cpuinfo = text("cpuinfo").unwrap_or_default();
        let mut lines = cpuinfo.lines();
        let model = lines.find_map(|line| line.strip_prefix("model name"));
        let names = devices.iter().flat_map(|device| {
            let queues = device.queues.iter().map(|queue| queue.name.to_string());
            [device.name.to_string()].into_iter().chain(queues)
        });
        let folder = root.sys.join("bus/dsa/devices");
        Self {
            kernel: text("sys/kernel/osrelease").map(|release| release.trim().to_owned()),
            cpu: model.map(|model| model.trim_matches([' ', '\t', ':']).to_owned()),
            waitpkg: Features::of_file(&root.proc.join("cpuinfo")).waitpkg,
            raw_io: capabilities(None)
                .is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_RAWIO)),
            missing: discovery::missing(root, &devices),
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
