//! Kernel features: KVM, userfaultfd, locked memory, NUMA.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use super::{Root, read};

/// Whether something is there and usable, and why or why not.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Presence {
    pub(super) present: bool,
    pub(super) usable: bool,
    reason: String,
}

/// The kernel's release.
pub(super) fn kernel(root: &Root) -> Option<String> {
    root.read("proc/sys/kernel/osrelease")
}

/// KVM, as far as opening its device shows. Some hosts offer one on which stock guests do not run.
pub(super) fn kvm(root: &Root) -> Presence {
    match openable(&root.path("dev/kvm")) {
        Ok(()) => Presence {
            present: true,
            usable: true,
            reason: "/dev/kvm can be opened (running a guest was not tried)".to_owned(),
        },
        Err(error) => Presence {
            present: error.kind() != io::ErrorKind::NotFound,
            usable: false,
            reason: format!("/dev/kvm: {error}"),
        },
    }
}

/// userfaultfd, and whether this process may use it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Userfaultfd {
    /// The kernel has it.
    pub(super) kernel: bool,
    /// This process may take the faults of kernel code too, as vhost and KVM make them.
    usable: bool,
    /// `/dev/userfaultfd` can be opened.
    device: bool,
    /// The sysctl `vm.unprivileged_userfaultfd`.
    unprivileged: Option<bool>,
    /// This process has CAP_SYS_PTRACE, to which the system call is never refused.
    privileged: bool,
}

impl Userfaultfd {
    pub(super) fn probe(root: &Root) -> Self {
        let device = openable(&root.path("dev/userfaultfd")).is_ok();
        let unprivileged = root
            .read("proc/sys/vm/unprivileged_userfaultfd")
            .map(|text| text != "0");
        let privileged = has_capability(root, CAP_SYS_PTRACE);
        // The sysctl exists in every kernel since 5.2 that is built with userfaultfd.
        let kernel = device || unprivileged.is_some();
        Self {
            kernel,
            usable: device || kernel && (privileged || unprivileged == Some(true)),
            device,
            unprivileged,
            privileged,
        }
    }
}

impl fmt::Display for Userfaultfd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.kernel {
            return write!(f, "absent: neither /dev/userfaultfd nor its sysctl");
        }
        let usable = if self.usable { "usable" } else { "not usable" };
        write!(
            f,
            "{usable}: /dev/userfaultfd {}, vm.unprivileged_userfaultfd {}, CAP_SYS_PTRACE {}",
            if self.device {
                "opens"
            } else {
                "does not open"
            },
            match self.unprivileged {
                Some(true) => "1",
                Some(false) => "0",
                None => "unknown",
            },
            if self.privileged { "yes" } else { "no" },
        )
    }
}

/// Memory that this process may lock, in bytes; nothing means without limit.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Memlock {
    soft: Option<u64>,
    hard: Option<u64>,
}

impl Memlock {
    pub(super) fn probe() -> Self {
        let limit = getrlimit(Resource::Memlock);
        Self {
            soft: limit.current,
            hard: limit.maximum,
        }
    }
}

impl fmt::Display for Memlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |limit: Option<u64>| match limit {
            Some(bytes) => format!("{} KiB", bytes / 1024),
            None => "unlimited".to_owned(),
        };
        write!(f, "{} (hard limit: {})", bytes(self.soft), bytes(self.hard))
    }
}

/// A NUMA node.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Node {
    node: u32,
    /// As the kernel writes sets: `0-3,8`.
    cpus: String,
    memory: Option<u64>,
}

/// The NUMA nodes; none where the kernel does not know of them.
pub(super) fn nodes(root: &Root) -> Vec<Node> {
    let mut nodes: Vec<_> = root
        .list("sys/devices/system/node")
        .into_iter()
        .filter_map(|(name, folder)| {
            Some(Node {
                node: name.strip_prefix("node")?.parse().ok()?,
                cpus: read(&folder.join("cpulist")).unwrap_or_default(),
                memory: memory(&folder),
            })
        })
        .collect();
    nodes.sort_by_key(|node| node.node);
    nodes
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpus = if self.cpus.is_empty() {
            "none"
        } else {
            &self.cpus
        };
        write!(f, "{}: cpus {cpus}", self.node)?;
        match self.memory {
            Some(bytes) => write!(f, ", {} MiB", bytes >> 20),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.present, self.usable) {
            (_, true) => "usable",
            (true, false) => "present, not usable",
            (false, false) => "absent",
        };
        write!(f, "{state}: {}", self.reason)
    }
}

/// Its number among the capabilities.
const CAP_SYS_PTRACE: u32 = 19;

fn openable(path: &Path) -> io::Result<()> {
    fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .map(drop)
}

fn has_capability(root: &Root, number: u32) -> bool {
    root.read("proc/self/status")
        .and_then(|status| {
            let set = status
                .lines()
                .find_map(|line| line.strip_prefix("CapEff:"))?;
            u64::from_str_radix(set.trim(), 16).ok()
        })
        .is_some_and(|set| set & (1 << number) != 0)
}

/// `Node 0 MemTotal:  16303400 kB`
fn memory(node: &Path) -> Option<u64> {
    let path: PathBuf = node.join("meminfo");
    let text = read(&path)?;
    let line = text.lines().find(|line| line.contains("MemTotal:"))?;
    let kib: u64 = line.split_ascii_whitespace().nth(3)?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::{super::fake, *};

    #[test]
    fn userfaultfd_is_usable_by_sysctl_capability_or_device() {
        let sysctl = "proc/sys/vm/unprivileged_userfaultfd";
        let status = "proc/self/status";
        let no_cap = (status, "Name:\tx\nCapEff:\t0000000000000000\n");
        let cap = (status, "Name:\tx\nCapEff:\t0000000000080000\n");
        for (files, kernel, usable) in [
            (&[no_cap][..], false, false),
            (&[cap], false, false),
            (&[no_cap, (sysctl, "0")], true, false),
            (&[no_cap, (sysctl, "1")], true, true),
            (&[cap, (sysctl, "0")], true, true),
            (
                &[no_cap, (sysctl, "0"), ("dev/userfaultfd", "")],
                true,
                true,
            ),
        ] {
            let (_folder, root) = fake::root(files);
            let found = Userfaultfd::probe(&root);
            assert_eq!(
                (found.kernel, found.usable),
                (kernel, usable),
                "{files:?}: {found}"
            );
        }
    }

    #[test]
    fn a_missing_kvm_is_no_error() {
        let (_folder, root) = fake::root(&[]);
        let absent = kvm(&root);
        assert!(!absent.present && !absent.usable, "{absent}");
        let (_folder, root) = fake::root(&[("dev/kvm", "")]);
        assert!(kvm(&root).usable);
        // A folder can be seen and not opened for writing, even by root.
        let (_folder, root) = fake::root(&[("dev/kvm/x", "")]);
        let unusable = kvm(&root);
        assert!(unusable.present && !unusable.usable, "{unusable}");
    }

    #[test]
    fn nodes_come_in_order_of_their_numbers() {
        let folder = "sys/devices/system/node";
        let (_folder, root) = fake::root(&[
            (&format!("{folder}/node10/cpulist"), "\n"),
            (&format!("{folder}/node2/cpulist"), "8-15\n"),
            (
                &format!("{folder}/node2/meminfo"),
                "\nNode 2 MemTotal:       2048 kB\nNode 2 MemFree: 1 kB\n",
            ),
            (&format!("{folder}/online"), "2,10\n"),
        ]);
        let shown: Vec<_> = nodes(&root).iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["2: cpus 8-15, 2 MiB", "10: cpus none"]);
    }
}
