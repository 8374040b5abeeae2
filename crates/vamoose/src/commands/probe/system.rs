//! The processor and the kernel's features.

use std::{fmt, fs::File, io, thread};

use rustix::process::{Resource, getrlimit};

use super::{Lines, Root};

/// Names as in `/proc/cpuinfo`: vectors (zero scan, ISA-L), carry-less multiplication (checksums), then what drives DSA and IAA
/// from user space: work submission to shared and dedicated queues, and sleeping until a descriptor is done.
const FEATURES: [&str; 8] = [
    "sse4_2",
    "avx2",
    "avx512f",
    "avx512bw",
    "pclmulqdq",
    "enqcmd",
    "movdir64b",
    "waitpkg",
];

pub(super) fn describe_cpu(root: &Root, lines: &mut Lines) {
    let info = root.read("proc/cpuinfo").unwrap_or_default();
    // The first value of a key.
    let value = |key: &str| {
        let mut pairs = info.lines().filter_map(|line| line.split_once(':'));
        let (_, value) = pairs.find(|(name, _)| name.trim() == key)?;
        Some(value.trim())
    };
    let model = value("model name").unwrap_or("unknown model");
    let architecture = std::env::consts::ARCH;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    lines.put(
        "cpu",
        format_args!("{model} ({architecture}), {cores} cores for this process"),
    );
    let flags: Vec<_> = value("flags").unwrap_or_default().split(' ').collect();
    let (present, absent): (Vec<_>, Vec<_>) =
        FEATURES.into_iter().partition(|name| flags.contains(name));
    for (heading, names) in [("present", present), ("absent", absent)] {
        lines.put("features", format_args!("{heading}: {}", names.join(" ")));
    }
}

/// Whether something is there and usable, and why or why not.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Presence {
    present: bool,
    usable: bool,
    reason: String,
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

/// KVM, as far as opening its device shows. On some hosts the device is there, but stock guests do not run.
pub(super) fn kvm(root: &Root) -> Presence {
    let opened = open(root, "dev/kvm");
    Presence {
        present: is_there(&opened),
        usable: opened.is_ok(),
        reason: match opened {
            Ok(_) => "/dev/kvm can be opened (running a guest was not tried)".to_owned(),
            Err(error) => format!("/dev/kvm: {error}"),
        },
    }
}

/// Whether this process may use userfaultfd for the faults of kernel code too, as vhost and KVM cause them.
pub(super) fn userfaultfd(root: &Root) -> Presence {
    let opened = open(root, "dev/userfaultfd");
    // In every kernel since 5.2 that is built with userfaultfd.
    let sysctl = root.read("proc/sys/vm/unprivileged_userfaultfd");
    let may_trace = may_trace(root);
    let is_allowed = sysctl.as_deref().is_some_and(|it| it == "1" || may_trace);
    Presence {
        present: is_there(&opened) || sysctl.is_some(),
        usable: opened.is_ok() || is_allowed,
        reason: format!(
            "/dev/userfaultfd {}, vm.unprivileged_userfaultfd is {}{}",
            opened.map_or_else(|error| error.to_string(), |_| "can be opened".to_owned()),
            sysctl.as_deref().unwrap_or("absent"),
            if may_trace {
                ", this process has CAP_SYS_PTRACE"
            } else {
                ""
            },
        ),
    }
}

/// Whether this process has CAP_SYS_PTRACE, which allows userfaultfd whatever the sysctl says.
fn may_trace(root: &Root) -> bool {
    const CAP_SYS_PTRACE: u32 = 19;
    let status = root.read("proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    let effective = lines.find_map(|line| line.strip_prefix("CapEff:"));
    let set = effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set >> CAP_SYS_PTRACE & 1 == 1)
}

fn open(root: &Root, device: &str) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).open(root.path(device))
}

fn is_there(opened: &io::Result<File>) -> bool {
    !matches!(opened, Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// Limits of the memory that this process may lock.
pub(super) fn memlock() -> String {
    let limit = getrlimit(Resource::Memlock);
    let [soft, hard] = [limit.current, limit.maximum].map(|limit| match limit {
        Some(bytes) => format!("{} KiB", bytes / 1024),
        None => "unlimited".to_owned(),
    });
    format!("{soft} (hard limit: {hard})")
}

#[cfg(test)]
mod tests {
    use super::{super::fake, *};

    #[test]
    fn features_are_those_of_the_kernels_list() {
        let info = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu enqcmd movdir64b\n\n\
                    processor\t: 1\nmodel name\t: Some Xeon\nflags\t\t: fpu enqcmd movdir64b\n";
        let (_folder, root) = fake::root(&[("proc/cpuinfo", info)]);
        let mut lines = Lines::default();
        describe_cpu(&root, &mut lines);
        let shown = lines.text();
        for part in ["Some Xeon (", "present: enqcmd movdir64b\n", " waitpkg\n"] {
            assert!(shown.contains(part), "{shown}");
        }
    }

    #[test]
    fn userfaultfd_is_usable_by_sysctl_capability_or_device() {
        let sysctl = "proc/sys/vm/unprivileged_userfaultfd";
        let status = "proc/self/status";
        for (files, present, usable) in [
            (&[][..], false, false),
            (&[(sysctl, "0")], true, false),
            (&[(sysctl, "1")], true, true),
            (&[(sysctl, "0"), ("dev/userfaultfd", "")], true, true),
            (
                &[(sysctl, "0"), (status, "CapEff:\t0000000000080000\n")],
                true,
                true,
            ),
            (
                &[(sysctl, "0"), (status, "CapEff:\t0000000000040000\n")],
                true,
                false,
            ),
        ] {
            let (_folder, root) = fake::root(files);
            let found = userfaultfd(&root);
            let expected = (present, usable);
            assert_eq!(
                (found.present, found.usable),
                expected,
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
}
