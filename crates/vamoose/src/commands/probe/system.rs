//! The processor and the kernel's features.

use std::{fs::File, io, path::Path, thread};

use idxd::discovery::Root;
use rustix::{
    process::{Resource, getrlimit},
    thread::{CapabilitySet, capabilities},
};

use super::{Lines, read};

/// Names as in `/proc/cpuinfo`: vectors (zero scan, ISA-L), carry-less multiplication (checksums), then what drives DSA and IAA
/// from user space.
const FEATURES: [&str; 6] = [
    "sse4_2",
    "avx2",
    "avx512f",
    "avx512bw",
    "pclmulqdq",
    "enqcmd",
];

pub(super) fn describe_cpu(root: &Root, lines: &mut Lines) {
    let info = read(root.proc.join("cpuinfo")).unwrap_or_default();
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

/// KVM, as far as opening its device shows. On some hosts the device is there, but stock guests do not run.
pub(super) fn kvm(root: &Root) -> String {
    let opened = open(&root.dev.join("kvm"));
    let (present, usable) = (is_there(&opened), opened.is_ok());
    let reason = match opened {
        Ok(_) => "/dev/kvm can be opened (running a guest was not tried)".to_owned(),
        Err(error) => format!("/dev/kvm: {error}"),
    };
    describe(present, usable, &reason)
}

/// Whether this process may use userfaultfd for faults of kernel code too, which vhost and KVM cause. A process that
/// `may_trace` may, whatever the sysctl says.
pub(super) fn userfaultfd(root: &Root, may_trace: bool) -> String {
    let opened = open(&root.dev.join("userfaultfd"));
    // In every kernel since 5.2 that is built with userfaultfd.
    let sysctl = read(root.proc.join("sys/vm/unprivileged_userfaultfd"));
    let is_allowed = sysctl.as_deref().is_some_and(|it| it == "1" || may_trace);
    let (present, usable) = (
        is_there(&opened) || sysctl.is_some(),
        opened.is_ok() || is_allowed,
    );
    let trace = match may_trace {
        true => ", this process has CAP_SYS_PTRACE",
        false => "",
    };
    let reason = format!(
        "/dev/userfaultfd {}, vm.unprivileged_userfaultfd is {}{}",
        opened.map_or_else(|error| error.to_string(), |_| "can be opened".to_owned()),
        sysctl.as_deref().unwrap_or("absent"),
        trace,
    );
    describe(present, usable, &reason)
}

/// Whether this process has CAP_SYS_PTRACE.
pub(super) fn may_trace() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_PTRACE))
}

fn describe(present: bool, usable: bool, reason: &str) -> String {
    let state = match (present, usable) {
        (_, true) => "usable",
        (true, false) => "present, not usable",
        (false, false) => "absent",
    };
    format!("{state}: {reason}")
}

fn open(device: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(device)
}

fn is_there(opened: &io::Result<File>) -> bool {
    !matches!(opened, Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// Limits of the memory that this process may lock.
pub(super) fn memlock() -> String {
    let limit = getrlimit(Resource::Memlock);
    let kib = |limit: Option<u64>| match limit {
        Some(bytes) => format!("{} KiB", bytes / 1024),
        None => "unlimited".to_owned(),
    };
    format!(
        "{} (hard limit: {})",
        kib(limit.current),
        kib(limit.maximum)
    )
}

#[cfg(test)]
mod tests {
    use super::{super::fake, *};

    #[test]
    fn features_are_those_of_the_kernels_list() {
        let info = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu enqcmd\n\n\
                    processor\t: 1\nmodel name\t: Some Xeon\nflags\t\t: fpu enqcmd\n";
        let (_folder, root) = fake::root(&[("proc/cpuinfo", info)]);
        let mut lines = Lines::default();
        describe_cpu(&root, &mut lines);
        let shown = lines.text();
        for part in ["Some Xeon (", "present: enqcmd\n", "absent: sse4_2 "] {
            assert!(shown.contains(part), "{shown}");
        }
    }

    #[test]
    fn userfaultfd_is_usable_by_sysctl_capability_or_device() {
        let sysctl = "proc/sys/vm/unprivileged_userfaultfd";
        for (files, may_trace, state) in [
            (&[][..], false, "absent: "),
            (&[], true, "absent: "),
            (&[(sysctl, "0")], false, "present, not usable: "),
            (&[(sysctl, "1")], false, "usable: "),
            (&[(sysctl, "0"), ("dev/userfaultfd", "")], false, "usable: "),
            (&[(sysctl, "0")], true, "usable: "),
        ] {
            let (_folder, root) = fake::root(files);
            let found = userfaultfd(&root, may_trace);
            assert!(found.starts_with(state), "{files:?}: {found}");
        }
    }

    #[test]
    fn the_state_of_kvm_is_described() {
        // A folder can be seen and not opened for writing, even by root.
        for (files, state) in [
            (&[][..], "absent: "),
            (&[("dev/kvm", "")], "usable: "),
            (&[("dev/kvm/x", "")], "present, not usable: "),
        ] {
            let (_folder, root) = fake::root(files);
            let found = kvm(&root);
            assert!(found.starts_with(state), "{found}");
        }
    }
}
