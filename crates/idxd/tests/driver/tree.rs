//! A Sapphire Rapids machine's sysfs and /dev, in a directory, for tests to spoil.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use idxd::{
    Kind,
    discovery::{DeviceName, Root},
};

/// The tree; it goes with this value.
pub(crate) struct Tree {
    directory: tempfile::TempDir,
}

/// Attributes of a device, of both kinds.
const DEVICE: &[(&str, &str)] = &[
    ("version", "0x100"),
    ("state", "enabled"),
    ("numa_node", "0"),
    ("max_work_queues_size", "128"),
    ("max_transfer_size", "2147483648"),
    ("max_read_buffers", "96"),
    ("gen_cap", "0x40915f0107"),
    ("pasid_enabled", "1"),
    ("configurable", "1"),
    ("cdev_major", "1"),
];

/// Attributes of a work queue for processes; of its character device there is /dev/null, 1:3.
const QUEUE: &[(&str, &str)] = &[
    ("state", "enabled"),
    ("type", "user"),
    ("name", "offload"),
    ("driver_name", "user"),
    ("mode", "shared"),
    ("size", "16"),
    ("threshold", "12"),
    ("group_id", "0"),
    ("priority", "10"),
    ("block_on_fault", "0"),
    ("max_transfer_size", "2097152"),
    ("cdev_minor", "3"),
];

const DSA_OPERATIONS: &str =
    "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03ff";
const IAA_OPERATIONS: &str =
    "00000000,00000000,00000000,00000000,00000000,007f331c,00000000,0000000d";

impl Tree {
    /// Devices 0, 1 and so on of these kinds. Each has three queues for processes.
    pub(crate) fn of(kinds: &[Kind]) -> Self {
        let tree = Self {
            directory: tempfile::tempdir().unwrap(),
        };
        for (number, kind) in (0..).zip(kinds) {
            tree.add(DeviceName {
                kind: *kind,
                number,
            });
        }
        tree
    }

    pub(crate) fn root(&self) -> Root {
        Root::under(self.directory.path())
    }

    /// `path` among the devices.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root().sys.join("bus/dsa/devices").join(path)
    }

    /// Any file of the tree.
    pub(crate) fn file(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    pub(crate) fn set(&self, path: &str, value: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, value).unwrap();
    }

    pub(crate) fn remove(&self, path: &str) {
        fs::remove_file(self.path(path)).unwrap();
    }

    /// What `queue` of `/dev` leads to.
    pub(crate) fn link(&self, queue: &str, target: &str) {
        let path = self.file("dev").join(queue);
        let _ = fs::remove_file(&path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    fn add(&self, name: DeviceName) {
        let DeviceName { kind, number } = name;
        for (attribute, value) in DEVICE {
            self.set(&format!("{name}/{attribute}"), format!("{value}\n"));
        }
        let (operations, engines) = match kind {
            Kind::Dsa => (DSA_OPERATIONS, 4),
            Kind::Iaa => (IAA_OPERATIONS, 8),
        };
        self.set(&format!("{name}/op_cap"), operations);
        self.set(&format!("{name}/max_engines"), engines.to_string());
        if kind == Kind::Dsa {
            self.set(&format!("{name}/max_batch_size"), "1024\n");
        }
        for part in 0..4 {
            self.set(&format!("{name}/group{number}.{part}/engines"), "\n");
        }
        for part in 0..engines {
            self.set(&format!("{name}/engine{number}.{part}/group_id"), "0\n");
        }
        for part in 0..3 {
            let queue = format!("{name}/wq{number}.{part}");
            for (attribute, value) in QUEUE {
                self.set(&format!("{queue}/{attribute}"), format!("{value}\n"));
            }
            self.set(&format!("{queue}/op_config"), operations);
            if kind == Kind::Dsa {
                self.set(&format!("{queue}/max_batch_size"), "32\n");
            }
            let device = match kind {
                Kind::Dsa => "dsa",
                Kind::Iaa => "iax",
            };
            self.link(&format!("{device}/wq{number}.{part}"), "/dev/null");
        }
    }
}
