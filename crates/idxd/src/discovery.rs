//! Finds the devices and work queues of this host in the idxd driver's sysfs.
//!
//! ```text
//!   /sys/bus/dsa/devices/ ─┬─ dsa0/ ─┬─ version, op_cap …            Device
//!                          │         ├─ group0.0/  engine0.0/
//!                          │         └─ wq0.0/ ── size, mode …       WorkQueue ─ usable? ─> portal::open
//!                          └─ iax1/ ── …                                │
//!   /dev/dsa/wq0.0, /dev/iax/wq1.0 ─── may this process open it? ───────┘
//! ```
//! Sysfs is not trusted: a required attribute that is missing or malformed is a [`Problem`] of its queue or device, and
//! the scan continues. Source of the attributes: the kernel's
//! `Documentation/ABI/stable/sysfs-driver-dma-idxd`.

mod attributes;
mod name;
mod problem;
mod report;
mod setup;

use std::{
    fs, io,
    num::NonZeroU32,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use self::attributes::{Attributes, flag, number, operations, or_none, small, text, word};
use crate::{Capabilities, Kind, Limits, Mode, Operations, opcode};

pub use name::{DeviceName, NameError, QueueName};
pub use problem::Problem;
pub use report::{DeviceReport, Hardware, QueueReport, Report, hardware, report};
pub use setup::setup_commands;

/// Where sysfs, the devices and procfs are. Tests, and tools that look at another machine's tree, replace them.
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

    /// Where the devices are listed: of DSA and of IAA.
    pub(crate) fn devices(&self) -> PathBuf {
        self.sys.join("bus/dsa/devices")
    }

    pub(crate) fn cpuinfo(&self) -> PathBuf {
        self.proc.join("cpuinfo")
    }
}

/// One device. Attributes that this kernel does not have, or that make no sense, are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// `dsa0`, `iax1`.
    pub name: DeviceName,
    /// 0x100 is the first: Sapphire and Emerald Rapids.
    pub version: Option<u32>,
    /// `enabled`, `disabled`, or another word of the driver.
    pub state: Option<String>,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
    /// Entries of all work queues together.
    pub max_work_queues_size: Option<u32>,
    /// Most descriptors of a batch. IAA has no batches.
    pub max_batch_size: Option<u32>,
    /// Most bytes of a descriptor.
    pub max_transfer_size: Option<u64>,
    /// Opcodes. If submission from processes is not safe, the kernel leaves BATCH out.
    pub op_cap: Option<Operations>,
    /// General capabilities, GENCAP.
    pub gen_cap: Option<u64>,
    /// Whether it can use a process's addresses. On Linux 5.19 to 6.5 this is about the kernel's own address space, so
    /// `false` is not reliable; only opening a queue shows it.
    pub pasid_enabled: Option<bool>,
    /// Major number of its queues' character devices.
    pub cdev_major: Option<u32>,
    /// Number of users of its work queues.
    pub clients: Option<u32>,
    /// Numbers of its engines.
    pub engines: Vec<u32>,
    /// Its work queues, by their numbers.
    pub queues: Vec<WorkQueue>,
    /// The first attribute that is missing or malformed.
    pub problem: Option<Problem>,
}

/// One work queue. Attributes that this kernel does not have, or that make no sense, are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkQueue {
    /// `dsa0/wq0.1`.
    pub name: QueueName,
    /// `dsa0`.
    pub device: DeviceName,
    /// `enabled`, `disabled`, or another word of the driver.
    pub state: Option<String>,
    /// Its intended users: `user` for processes, `kernel`, `none`.
    pub kind: Option<String>,
    /// Name that its administrator chose.
    pub label: Option<String>,
    /// Number of entries.
    pub size: Option<u32>,
    /// Its group.
    pub group: Option<u32>,
    /// The driver it is bound to, `user` for processes. Kernels before 6.7 do not report it.
    pub driver_name: Option<String>,
    /// Number of users.
    pub clients: Option<u32>,
    /// Whether address translation (ATS) is disabled: then the queue can report success although a write faulted.
    pub ats_disable: Option<bool>,
    /// Whether page requests (PRS) are disabled: then the queue waits for no page fault.
    pub prs_disable: Option<bool>,
    /// Possible paths of its character device, the usual one first.
    pub nodes: Vec<PathBuf>,
    limits: Option<Limits>,
    problem: Option<Problem>,
    /// The kernel has the attribute `driver_name`, whatever its value.
    has_driver_name: bool,
    /// The character device's number, where both parts are known.
    number: Option<(u32, u32)>,
    /// The kernel hides the opcode BATCH, because batches are not safe through write(2).
    hides_batch: bool,
}

/// All DSA and IAA devices with their work queues, by number. Empty without the driver; [`report`] then says what is
/// missing.
pub fn scan(root: &Root) -> Vec<Device> {
    let devices = root.devices();
    let mut names: Vec<DeviceName> = entries(&devices)
        .filter_map(|entry| DeviceName::parse(&entry))
        .collect();
    names.sort_by_key(|name| (name.number, name.kind.record_alignment()));
    names
        .into_iter()
        .map(|name| device(root, &devices.join(name.to_string()), name))
        .collect()
}

/// Finds a queue by name.
pub fn find<'a>(devices: &'a [Device], name: &QueueName) -> Option<(&'a Device, &'a WorkQueue)> {
    devices.iter().find_map(|device| {
        let queue = device.queues.iter().find(|queue| queue.name.is(name))?;
        Some((device, queue))
    })
}

impl WorkQueue {
    /// Limits of the queue if this process can open it, or else the first obstacle.
    ///
    /// The queue may have changed since the scan; only [`open`](crate::portal::open) shows it.
    pub fn usable(&self) -> Result<&Limits, Problem> {
        match (&self.problem, &self.limits) {
            (None, Some(limits)) => Ok(limits),
            (Some(problem), _) => Err(problem.clone()),
            (None, None) => Err(Problem::Gone),
        }
    }

    /// Limits of the queue, whether or not it can be opened; `None` if attributes are missing or malformed.
    pub fn limits(&self) -> Option<&Limits> {
        self.limits.as_ref()
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

    /// Major and minor number of its character device, if sysfs has them.
    pub(crate) fn node_number(&self) -> Option<(u32, u32)> {
        self.number
    }

    /// Whether it is set up for processes and only has to be enabled.
    fn is_configured(&self) -> bool {
        let is_for_users = self.kind.as_deref() == Some("user")
            && self.driver_name.as_deref().is_none_or(|it| it == "user");
        is_for_users
            && self.label.is_some()
            && self.group.is_some()
            && self.size.is_some_and(|size| size > 0)
    }

    fn file_name(&self) -> String {
        format!("wq{}.{}", self.name.device, self.name.queue)
    }
}

fn device(root: &Root, path: &Path, name: DeviceName) -> Device {
    let mut attributes = Attributes::of(path);
    let a = &mut attributes;
    let mut device = Device {
        name,
        version: a.need("version", small),
        state: a.need("state", word),
        numa_node: a.may("numa_node", or_none).flatten(),
        max_work_queues_size: a.may("max_work_queues_size", small),
        max_batch_size: a.may("max_batch_size", small),
        max_transfer_size: a.may("max_transfer_size", number),
        op_cap: a.may("op_cap", operations),
        gen_cap: a.may("gen_cap", number),
        pasid_enabled: a.may("pasid_enabled", flag),
        cdev_major: a.may("cdev_major", small),
        clients: a.may("clients", small),
        engines: parts(path, "engine", name),
        queues: Vec::new(),
        problem: None,
    };
    device.problem = attributes.problem;
    let queues = parts(path, "wq", name).into_iter();
    device.queues = queues
        .map(|number| queue(root, path, &device, number))
        .collect();
    device
}

fn queue(root: &Root, parent: &Path, device: &Device, number: u32) -> WorkQueue {
    let file_name = format!("wq{}.{number}", device.name.number);
    let path = parent.join(&file_name);
    let mut attributes = Attributes::of(&path);
    let a = &mut attributes;
    let minor = a.may("cdev_minor", small);
    let cdev = device.cdev_major.zip(minor);
    let driver_name = a.may("driver_name", text);
    let mut queue = WorkQueue {
        name: device.name.queue(number),
        device: device.name,
        state: a.need("state", word),
        kind: a.need("type", word),
        label: a.may("name", text).flatten(),
        size: a.need("size", small),
        group: a.may("group_id", or_none).flatten(),
        has_driver_name: driver_name.is_some(),
        driver_name: driver_name.flatten(),
        clients: a.may("clients", small),
        ats_disable: a.may("ats_disable", flag),
        prs_disable: a.may("prs_disable", flag),
        nodes: nodes(root, device.name.kind, &file_name, cdev),
        limits: limits(a, device),
        problem: None,
        number: cdev,
        hides_batch: device
            .op_cap
            .is_some_and(|operations| !operations.has(opcode::BATCH)),
    };
    queue.problem = match attributes.problem {
        Some(_) if is_gone(&path) => Some(Problem::Gone),
        Some(problem) => Some(problem),
        None => obstacle(device, &queue),
    };
    queue
}

fn is_gone(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Limits of a queue by its attributes and those of its device.
fn limits(a: &mut Attributes<'_>, device: &Device) -> Option<Limits> {
    let mode: Option<Mode> = a.need("mode", |text| match text {
        "shared" => Some(Mode::Shared),
        "dedicated" => Some(Mode::Dedicated),
        _ => None,
    });
    let size = a.need("size", small);
    let threshold = a.may("threshold", small);
    let transfer = a.need("max_transfer_size", number);
    let batch = a.may("max_batch_size", small);
    let configured = a.need_if_there("op_config", operations);
    if configured.is_none() && device.op_cap.is_none() {
        a.problem.get_or_insert(Problem::Missing {
            attribute: "op_config",
        });
    }
    if device.version.is_none() {
        let problem = device.problem.clone().unwrap_or(Problem::Missing {
            attribute: "version",
        });
        a.problem.get_or_insert(problem);
    }
    let (mode, size) = (mode?, size?);
    let kind = device.name.kind;
    let batch = match kind {
        Kind::Dsa => batch.map(|most| most.min(device.max_batch_size.unwrap_or(most))),
        Kind::Iaa => None,
    };
    Some(Limits {
        kind,
        mode,
        size,
        threshold: match (mode, threshold) {
            (Mode::Shared, Some(threshold)) if threshold > 0 => threshold.min(size),
            _ => size,
        },
        // A single descriptor is no batch.
        max_batch: batch.filter(|most| *most > 1).and_then(NonZeroU32::new),
        max_transfer: transfer.map(|most| most.min(device.max_transfer_size.unwrap_or(most)))?,
        operations: configured.or(device.op_cap)?,
        version: device.version?,
        capabilities: Capabilities(device.gen_cap.unwrap_or(0)),
        numa_node: device.numa_node,
    })
}

/// The first reason why this process cannot use a queue whose attributes are valid.
fn obstacle(device: &Device, queue: &WorkQueue) -> Option<Problem> {
    match device.state.as_deref() {
        Some("enabled") => {}
        Some(other) => return Some(Problem::DeviceState(other.to_owned())),
        None => {
            return device
                .problem
                .clone()
                .or(Some(Problem::Missing { attribute: "state" }));
        }
    }
    match queue.kind.as_deref() {
        Some("user") => {}
        Some(other) => return Some(Problem::Type(other.to_owned())),
        None => return Some(Problem::Missing { attribute: "type" }),
    }
    if let Some(driver) = queue
        .driver_name
        .as_ref()
        .filter(|driver| *driver != "user")
    {
        return Some(Problem::Driver(driver.clone()));
    }
    match queue.state.as_deref() {
        Some("enabled") => {}
        Some(other) => return Some(Problem::QueueState(other.to_owned())),
        None => return Some(Problem::Missing { attribute: "state" }),
    }
    if queue.ats_disable == Some(true) {
        return Some(Problem::AtsDisabled);
    }
    let is_dedicated = queue
        .limits
        .as_ref()
        .is_some_and(|limits| limits.mode == Mode::Dedicated);
    if is_dedicated && queue.clients.is_some_and(|clients| clients > 0) {
        return Some(Problem::InUse);
    }
    node(queue).err()
}

/// The character device of a queue, if this process seems to be allowed to open it.
pub(crate) fn node(queue: &WorkQueue) -> Result<&Path, Problem> {
    for path in &queue.nodes {
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(refused(path, error.kind())),
        };
        if !is_node_of(queue, &metadata) {
            return Err(Problem::OtherNode(path.clone()));
        }
        accessat(
            CWD,
            path,
            Access::READ_OK | Access::WRITE_OK,
            AtFlags::EACCESS,
        )
        .map_err(|error| refused(path, io::Error::from(error).kind()))?;
        return Ok(path);
    }
    Err(Problem::NoNode(queue.nodes.clone()))
}

/// Whether a file is a queue's character device.
pub(crate) fn is_node_of(queue: &WorkQueue, metadata: &fs::Metadata) -> bool {
    let device = metadata.rdev();
    let number = (rustix::fs::major(device), rustix::fs::minor(device));
    metadata.file_type().is_char_device()
        && queue.node_number().is_none_or(|wanted| wanted == number)
}

fn refused(path: &Path, kind: io::ErrorKind) -> Problem {
    let path = path.to_path_buf();
    match kind {
        io::ErrorKind::PermissionDenied => Problem::Denied(path),
        kind => Problem::Node { path, kind },
    }
}

fn nodes(root: &Root, kind: Kind, file_name: &str, cdev: Option<(u32, u32)>) -> Vec<PathBuf> {
    let by_name = root.dev.join(name::directory(kind)).join(file_name);
    let by_number = cdev.map(|(major, minor)| root.dev.join(format!("char/{major}:{minor}")));
    [by_name].into_iter().chain(by_number).collect()
}

/// Numbers of a device's parts, for example 3 for `engine0.3`. Entries with other names are ignored.
fn parts(path: &Path, prefix: &str, device: DeviceName) -> Vec<u32> {
    let prefix = format!("{prefix}{}.", device.number);
    let mut numbers: Vec<u32> = entries(path)
        .filter_map(|entry| {
            let number: u32 = entry.strip_prefix(&prefix)?.parse().ok()?;
            (entry == format!("{prefix}{number}")).then_some(number)
        })
        .collect();
    numbers.sort_unstable();
    numbers
}

/// Names in a directory; none if it cannot be read.
fn entries(path: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
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
        let mut device = scan(&root).remove(0);
        device.queues.clear();
        let gone = queue(&root, &tree.path("dsa0"), &device, 9);
        assert_eq!(gone.usable(), Err(Problem::Gone));
    }

    #[test]
    fn a_hidden_batch_is_given_back_to_a_portal_alone() {
        let tree = Tree::of(&[Kind::Dsa, Kind::Iaa]);
        hide_batch(&tree, "dsa0");
        let mapped = |name: &str| {
            let devices = scan(&tree.root());
            let (_, queue) = find(&devices, &name.parse().unwrap()).unwrap();
            assert!(!queue.limits().unwrap().operations.has(opcode::BATCH));
            queue.limits_mapped(queue.limits().cloned().unwrap())
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
    fn permission_is_missed() {
        let tree = Tree::of(&[Kind::Dsa]);
        let mode = |path: &str, mode| {
            fs::set_permissions(tree.file(path), fs::Permissions::from_mode(mode)).unwrap()
        };
        let devices = scan(&tree.root());
        let (_, queue) = find(&devices, &"wq0.0".parse().unwrap()).unwrap();
        node(queue).unwrap();
        mode("dev/dsa", 0);
        let denied = thread::scope(|scope| {
            let thread = scope.spawn(|| {
                as_nobody();
                node(queue).unwrap_err()
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
            if queue.device.to_string() == device {
                tree.set(&format!("{}/op_config", queue.name), DSA_SAFE_OPERATIONS);
            }
        }
    }

    const DSA_SAFE_OPERATIONS: &str =
        "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03fd";
}
