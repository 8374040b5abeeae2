//! The kernel's counters of faults on completion records, which nothing else reports.
//!
//! ```text
//!   dsa0/event_log_size                                       entries of the device's event log
//!   dsa0/wq0.0/dsa!wq0.0/file3/{pid, cr_faults, cr_fault_failures}    one open file of the work queue
//! ```
//! A device that cannot write a record puts it into its event log, and the kernel copies it from there (`cr_faults`).
//! Where that fails too (`cr_fault_failures`), the process waits for a record that never comes. All of it exists since
//! Linux 6.4 (`Documentation/ABI/stable/sysfs-driver-dma-idxd`). The directory's name is that of the driver's
//! `idxd_wq_add_cdev`; the documentation has the device's number in it, `dsa0!wq0.0`.

use std::{fmt, path::Path};

use super::{
    Device, Root, WorkQueue,
    attributes::{Attributes, number, small},
    entries,
};
use crate::Capabilities;

/// One open file of a work queue's character device. What this kernel does not show is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// Its number among all open files of the driver.
    pub number: u32,
    /// The process that opened it.
    pub pid: Option<u32>,
    /// Records of this process that faulted and were written by the kernel or lost.
    pub record_faults: Option<u64>,
    /// Those that were lost: their address could not be written.
    pub record_fault_failures: Option<u64>,
}

/// The log in memory into which a device writes what it cannot report otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventLog {
    /// Bytes of an entry: 64, 128 or 256 (GENCAP bits 14:13; DSA 3.0, 9.2.2).
    pub entry_bytes: u32,
    /// How many entries it has; `None` where the kernel does not use it.
    pub entries: Option<u32>,
}

impl fmt::Display for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.entries {
            Some(entries) => write!(
                f,
                "event log of {entries} entries, {} bytes each",
                self.entry_bytes
            ),
            None => f.write_str("event log, which the kernel does not use"),
        }
    }
}

/// The open files of a work queue, by their numbers.
pub(super) fn open_files(root: &Root, queue: &WorkQueue) -> Vec<OpenFile> {
    let name = queue.file_name();
    let path = root.devices().join(queue.device.to_string()).join(&name);
    let suffix = format!("!{name}");
    let mut files: Vec<OpenFile> = entries(&path)
        .filter(|entry| entry.ends_with(&suffix))
        .flat_map(|entry| {
            let path = path.join(entry);
            let files: Vec<_> = entries(&path)
                .filter_map(|file| open_file(&path, &file))
                .collect();
            files
        })
        .collect();
    files.sort_by_key(|file| file.number);
    files
}

/// The event log of a device that has one.
pub(super) fn event_log(root: &Root, device: &Device) -> Option<EventLog> {
    let gen_cap = Capabilities(device.gen_cap?);
    let entry_bytes = match (gen_cap.has(14), gen_cap.has(13)) {
        (false, false) => return None,
        (false, true) => 64,
        (true, false) => 128,
        (true, true) => 256,
    };
    let path = root.devices().join(device.name.to_string());
    Some(EventLog {
        entry_bytes,
        entries: Attributes::of(&path).may("event_log_size", small),
    })
}

fn open_file(path: &Path, name: &str) -> Option<OpenFile> {
    let file: u32 = name.strip_prefix("file")?.parse().ok()?;
    let path = path.join(name);
    let attributes = Attributes::of(&path);
    Some(OpenFile {
        number: file,
        pid: attributes.may("pid", small),
        record_faults: attributes.may("cr_faults", number),
        record_fault_failures: attributes.may("cr_fault_failures", number),
    })
}
