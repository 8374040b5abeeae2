//! Finds the devices and work queues of this host in the sysfs of the kernel's driver `idxd`.
//!
//! ```text
//!   /sys/bus/dsa/devices/ ─┬─ dsa0/ ─┬─ version, op_cap …            Device
//!                          │         └─ wq0.0/ ── size, mode …       WorkQueue ─ usable? ─> portal::open
//!                          └─ iax1/ ── …                                │
//!   /dev/dsa/wq0.0, /dev/iax/wq1.0 ─── may this process open it? ───────┘
//! ```
//! The scan does not trust sysfs: if a required attribute is missing or malformed, the device or queue has a [`Problem`], and
//! the scan continues. Source of the attributes: the kernel's `Documentation/ABI/stable/sysfs-driver-dma-idxd`.

mod attributes;
mod host;
mod name;
mod problem;

use std::{
    fmt, fs, io,
    num::NonZeroU32,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use self::attributes::{Attributes, flag, node_number, number, operations, small, text, word};
use crate::{Capabilities, Kind, Limits, opcode};

pub use host::{identify, missing, pci_devices};
pub use name::{DeviceName, NameError, QueueName};
pub use problem::Problem;

/// Where sysfs, the devices and procfs are. Tests replace these directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// `/sys`.
    pub sys: PathBuf,
    /// `/dev`.
    pub dev: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
}

impl Default for Root {
    fn default() -> Self {
        Self::under(Path::new("/"))
    }
}

impl Root {
    /// `sys`, `dev` and `proc` in `directory`.
    pub fn under(directory: &Path) -> Self {
        Self {
            sys: directory.join("sys"),
            dev: directory.join("dev"),
            proc: directory.join("proc"),
        }
    }

    /// The directory of all devices, of both kinds.
    pub(crate) fn devices(&self) -> PathBuf {
        self.sys.join("bus/dsa/devices")
    }
}

/// One device. Attributes that are missing or malformed are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// `dsa0`, `iax1`.
    pub name: DeviceName,
    /// 0x100 is the first: Sapphire and Emerald Rapids.
    pub version: Option<u32>,
    /// `enabled`, `disabled`, or another word of the driver.
    pub state: Option<String>,
    /// NUMA node of the device.
    pub numa_node: Option<u32>,
    /// Whether the device can use a process's addresses. On Linux 5.19 to 6.5 this is about the kernel's own address space,
    /// so `false` is not reliable; only opening a queue shows it.
    pub pasid_enabled: Option<bool>,
    /// Work queues, by their numbers.
    pub queues: Vec<WorkQueue>,
    /// The first attribute that is missing or malformed.
    pub problem: Option<Problem>,
}

/// One work queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkQueue {
    /// `dsa0/wq0.1`.
    pub name: QueueName,
    /// Page requests (PRS) are disabled: the queue does not wait for a page, but reports a fault.
    pub prs_disabled: bool,
    usable: Result<Limits, Problem>,
    /// Possible paths of the character device, the usual one first.
    nodes: Vec<PathBuf>,
    /// Number of the character device, major and minor, if known.
    number: Option<(u32, u32)>,
    /// The kernel hides the opcode BATCH, because batches are not safe through write(2).
    hides_batch: bool,
}

/// All DSA and IAA devices with their work queues, by number. Empty without the driver; [`missing`] then says why.
pub fn scan(root: &Root) -> Vec<Device> {
    let mut names: Vec<DeviceName> = entries(&root.devices())
        .filter_map(|entry| DeviceName::parse(&entry))
        .collect();
    names.sort_by_key(|name| (name.number, name.kind.record_alignment()));
    names.into_iter().map(|name| device(root, name)).collect()
}

/// Finds a queue by name.
pub fn find<'a>(devices: &'a [Device], name: &QueueName) -> Option<(&'a Device, &'a WorkQueue)> {
    devices.iter().find_map(|device| {
        let queue = device.queues.iter().find(|queue| queue.name.is(name))?;
        Some((device, queue))
    })
}

impl WorkQueue {
    /// Limits of the queue if this process can open it, or else the first problem.
    ///
    /// The queue may have changed since the scan; only [`open`](crate::portal::open) shows it.
    pub fn usable(&self) -> Result<&Limits, Problem> {
        self.usable.as_ref().map_err(Problem::clone)
    }

    /// Limits of a mapped portal. They include batches where the kernel hides the opcode BATCH only because of write(2)
    /// (the driver's `op_cap_show_common`). The kernel then also hides whether the administrator has excluded that opcode,
    /// so the portal has to try a batch.
    pub(crate) fn limits_mapped(&self, mut limits: Limits) -> Limits {
        if self.hides_batch && limits.max_batch.is_some() {
            limits.operations = limits.operations.with(opcode::BATCH);
        }
        if !limits.operations.has(opcode::BATCH) {
            limits.max_batch = None;
        }
        limits
    }

    /// Path of the character device, if this process seems to be allowed to open it.
    pub(crate) fn node(&self) -> Result<&Path, Problem> {
        for path in &self.nodes {
            let refused = |error: io::Error| match error.kind() {
                io::ErrorKind::PermissionDenied => Problem::Denied(path.clone()),
                kind => Problem::Node {
                    path: path.clone(),
                    kind,
                },
            };
            let metadata = match fs::metadata(path) {
                Ok(metadata) => metadata,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(refused(error)),
            };
            if !self.is_node(&metadata) {
                return Err(Problem::OtherNode(path.clone()));
            }
            let both = Access::READ_OK | Access::WRITE_OK;
            accessat(CWD, path, both, AtFlags::EACCESS).map_err(|error| refused(error.into()))?;
            return Ok(path);
        }
        Err(Problem::NoNode(self.nodes.clone()))
    }

    /// Whether a file is the queue's character device.
    pub(crate) fn is_node(&self, metadata: &fs::Metadata) -> bool {
        let device = metadata.rdev();
        let number = (rustix::fs::major(device), rustix::fs::minor(device));
        metadata.file_type().is_char_device() && self.number.is_none_or(|wanted| wanted == number)
    }
}

fn device(root: &Root, name: DeviceName) -> Device {
    let attributes = Attributes::of(root.devices().join(name.to_string()));
    let version = attributes.need("version", small);
    let state = attributes.need("state", word);
    let mut queues: Vec<QueueName> = entries(&attributes.path)
        .filter_map(|entry| entry.parse::<QueueName>().ok())
        .filter(|queue| queue.device == name.number)
        .map(|queue| name.queue(queue.queue))
        .collect();
    queues.sort_by_key(|queue| queue.queue);
    Device {
        name,
        problem: version.as_ref().err().or(state.as_ref().err()).cloned(),
        version: version.ok(),
        state: state.ok(),
        numa_node: attributes.may("numa_node", node_number).flatten(),
        pasid_enabled: attributes.may("pasid_enabled", flag),
        queues: queues
            .into_iter()
            .map(|queue| work_queue(root, name.kind, &attributes, queue))
            .collect(),
    }
}

fn work_queue(root: &Root, kind: Kind, device: &Attributes, name: QueueName) -> WorkQueue {
    let file_name = format!("wq{}.{}", name.device, name.queue);
    let attributes = Attributes::of(device.path.join(&file_name));
    let number = device
        .may("cdev_major", small)
        .zip(attributes.may("cdev_minor", small));
    let by_name = root.dev.join(name::directory(kind)).join(file_name);
    let by_number = number.map(|(major, minor)| root.dev.join(format!("char/{major}:{minor}")));
    let mut queue = WorkQueue {
        name,
        prs_disabled: attributes.may("prs_disable", flag) == Some(true),
        usable: examine(device, &attributes, kind),
        nodes: [by_name].into_iter().chain(by_number).collect(),
        number,
        hides_batch: device
            .may("op_cap", operations)
            .is_some_and(|operations| !operations.has(opcode::BATCH)),
    };
    if queue.usable.is_ok()
        && let Err(problem) = queue.node()
    {
        queue.usable = Err(problem);
    }
    if queue.usable.is_err() && is_gone(&attributes.path) {
        queue.usable = Err(Problem::Gone);
    }
    queue
}

fn is_gone(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Limits of a queue if its attributes and those of its device allow this process to use it.
fn examine(device: &Attributes, queue: &Attributes, kind: Kind) -> Result<Limits, Problem> {
    let device_state = device.need("state", word)?;
    if device_state != "enabled" {
        return Err(Problem::DeviceState(device_state));
    }
    let state = queue.need("state", word)?;
    let users = queue.need("type", word)?;
    if users != "user" {
        return Err(Problem::Type(users));
    }
    // Kernels before 6.7 do not have the attribute.
    if let Some(driver) = queue.may("driver_name", text).flatten()
        && driver != "user"
    {
        return Err(Problem::Driver(driver));
    }
    if state != "enabled" {
        return Err(Problem::QueueState(state));
    }
    if queue.may("ats_disable", flag) == Some(true) {
        return Err(Problem::AtsDisabled);
    }
    limits(device, queue, kind)
}

/// Limits of a queue by its attributes and those of its device.
fn limits(device: &Attributes, queue: &Attributes, kind: Kind) -> Result<Limits, Problem> {
    let mode = queue.need("mode", word)?;
    if mode != "shared" {
        return Err(Problem::Mode(mode));
    }
    let size = queue.need("size", |text| small(text).filter(|size| *size > 0))?;
    let threshold = queue.may("threshold", small);
    let transfer = queue.need("max_transfer_size", number)?;
    let device_transfer = device.may("max_transfer_size", number);
    let max_batch = match kind {
        Kind::Dsa => queue
            .may("max_batch_size", small)
            .map(|most| most.min(device.may("max_batch_size", small).unwrap_or(most))),
        Kind::Iaa => None,
    };
    let operations = match queue.need("op_config", operations) {
        // Not all kernels have the attribute.
        Err(missing @ Problem::Missing { .. }) => {
            device.may("op_cap", operations).ok_or(missing)?
        }
        result => result?,
    };
    Ok(Limits {
        kind,
        size,
        threshold: threshold.map_or(size, |threshold| match threshold {
            0 => size,
            threshold => threshold.min(size),
        }),
        // A single descriptor is no batch.
        max_batch: max_batch.filter(|most| *most > 1).and_then(NonZeroU32::new),
        max_transfer: transfer.min(device_transfer.unwrap_or(transfer)),
        operations,
        version: device.need("version", small)?,
        capabilities: Capabilities(device.may("gen_cap", number).unwrap_or(0)),
    })
}

/// Names in a directory; none if it cannot be read.
fn entries(path: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        if let Some(version) = self.version {
            write!(f, ", version {version:#x}")?;
        }
        if let Some(state) = &self.state {
            write!(f, ", {state}")?;
        }
        if let Some(node) = self.numa_node {
            write!(f, ", NUMA node {node}")?;
        }
        if let Some(problem) = &self.problem {
            write!(f, ": {problem}")?;
        }
        for queue in &self.queues {
            match &queue.usable {
                Ok(_) => write!(f, "\n  {} can be used", queue.name)?,
                Err(problem) => write!(f, "\n  {} cannot be used: {problem}", queue.name)?,
            }
            if queue.prs_disabled {
                write!(
                    f,
                    "; without page requests (prs_disable), a missing page is a fault"
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU32, os::unix::fs::PermissionsExt as _, thread};

    use super::*;
    use crate::{opcode, tree::Tree};

    #[test]
    fn a_queue_that_is_gone_says_so() {
        let tree = Tree::of(&[Kind::Dsa]);
        let root = tree.root();
        let device = Attributes::of(tree.path("dsa0"));
        let gone = work_queue(&root, Kind::Dsa, &device, "dsa0/wq0.9".parse().unwrap());
        assert_eq!(gone.usable(), Err(Problem::Gone));
    }

    #[test]
    fn only_a_mapped_portal_gets_a_hidden_batch_opcode_back() {
        let tree = Tree::of(&[Kind::Dsa, Kind::Iaa]);
        hide_batch(&tree, "dsa0");
        let mapped = |name: &str| {
            let devices = scan(&tree.root());
            let (_, queue) = find(&devices, &name.parse().unwrap()).unwrap();
            assert!(!queue.usable().unwrap().operations.has(opcode::BATCH));
            queue.limits_mapped(queue.usable().unwrap().clone())
        };
        let limits = mapped("wq0.0");
        assert_eq!(
            (limits.operations.has(opcode::BATCH), limits.max_batch),
            (true, NonZeroU32::new(32))
        );
        let limits = mapped("wq1.0");
        assert_eq!(
            (limits.operations.has(opcode::BATCH), limits.max_batch),
            (false, None)
        );
        // Of one queue alone, its administrator took it.
        tree.set("dsa0/op_cap", "1003f03ff");
        let limits = mapped("wq0.0");
        assert_eq!(
            (limits.operations.has(opcode::BATCH), limits.max_batch),
            (false, None)
        );
    }

    #[test]
    fn a_denied_device_node_is_a_problem() {
        let tree = Tree::of(&[Kind::Dsa]);
        let mode = |path: &str, mode| {
            fs::set_permissions(tree.file(path), fs::Permissions::from_mode(mode)).unwrap()
        };
        let devices = scan(&tree.root());
        let (_, queue) = find(&devices, &"wq0.0".parse().unwrap()).unwrap();
        queue.node().unwrap();
        mode("dev/dsa", 0);
        let denied = thread::scope(|scope| {
            let thread = scope.spawn(|| {
                as_nobody();
                queue.node().unwrap_err()
            });
            thread.join().unwrap()
        });
        mode("dev/dsa", 0o755);
        assert_eq!(denied, Problem::Denied(tree.file("dev/dsa/wq0.0")));
    }

    /// Root is denied nothing, so this thread, which ends soon, becomes another user; the kernel's credentials are a
    /// thread's.
    fn as_nobody() {
        if rustix::process::geteuid().is_root() {
            let (uid, gid) = (
                rustix::process::Uid::from_raw(65534),
                rustix::process::Gid::from_raw(65534),
            );
            rustix::thread::set_thread_groups(&[]).unwrap();
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        }
    }

    /// What the kernel reports where it lets processes submit no batches.
    fn hide_batch(tree: &Tree, device: &str) {
        tree.set(&format!("{device}/op_cap"), DSA_SAFE_OPERATIONS);
        for queue in scan(&tree.root()).iter().flat_map(|device| &device.queues) {
            if queue.name.to_string().starts_with(device) {
                tree.set(&format!("{}/op_config", queue.name), DSA_SAFE_OPERATIONS);
            }
        }
    }

    const DSA_SAFE_OPERATIONS: &str =
        "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03fd";
}
