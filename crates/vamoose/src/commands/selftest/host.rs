//! The machine of a report: everything that determines its devices' answers, but no names of the host or its users.

use std::{collections::BTreeMap, fs, path::Path};

use idxd::discovery::{self, Root};
use serde::Serialize;

use crate::commands::probe;

/// A machine with its devices.
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
