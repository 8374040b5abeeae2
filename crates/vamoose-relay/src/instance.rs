//! The identity of a QEMU, in a form that a journal can keep.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    process::ProcessId,
    qemu::{Qemu, QemuError},
};

/// One QEMU process, from start to end. A QEMU that is started later with the same monitor path is a different one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Instance {
    /// Path of the monitor.
    pub monitor: PathBuf,
    /// The process; `None` if it is unknown, as in another pid namespace.
    pub process: Option<ProcessId>,
    /// The guest's uuid; all zeros if none was given.
    pub uuid: String,
    /// The file of the monitor's socket, which QEMU creates at start.
    socket: Option<SocketFile>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SocketFile {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Instance {
    /// The QEMU whose monitor is at `path`.
    pub(crate) fn of(qemu: &mut Qemu, path: &Path) -> Result<Self, QemuError> {
        Ok(Self {
            monitor: path.to_owned(),
            process: qemu.identity().ok(),
            uuid: qemu.uuid()?,
            socket: SocketFile::at(path),
        })
    }

    /// Whether both are the same QEMU. False if in doubt.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self.process, other.process) {
            (Some(this), Some(other)) => this == other,
            _ => self.socket.is_some() && self.socket == other.socket,
        }
    }

    /// Whether its monitor is at `path`, which may be a link to it.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        self.monitor == path || (self.socket.is_some() && self.socket == SocketFile::at(path))
    }

    /// Whether the process has provably ended.
    pub fn has_ended(&self) -> bool {
        let alive = self.process.map(ProcessId::is_alive);
        matches!(alive, Some(Ok(false)))
    }

    /// Whether the QEMU can no longer be reached: its process has ended or, if the process is unknown, its monitor is gone. This is
    /// no proof of its end.
    pub(crate) fn is_gone(&self) -> bool {
        match self.process {
            Some(_) => self.has_ended(),
            None => self.socket.is_none() || self.socket != SocketFile::at(&self.monitor),
        }
    }

    /// Whether no other process has taken over the monitor's path: it holds the socket that this QEMU created, or nothing.
    pub(crate) fn has_its_place(&self) -> bool {
        SocketFile::at(&self.monitor).is_none_or(|file| self.socket == Some(file))
    }
}

impl SocketFile {
    fn at(path: &Path) -> Option<Self> {
        let file = fs::metadata(path).ok()?;
        Some(Self {
            device: file.dev(),
            inode: file.ino(),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    impl Instance {
        pub(crate) fn unknown(path: &Path) -> Self {
            Self {
                monitor: path.to_owned(),
                process: None,
                uuid: String::new(),
                socket: None,
            }
        }
    }

    fn at(path: &Path, process: Option<ProcessId>) -> Instance {
        Instance {
            process,
            socket: SocketFile::at(path),
            ..Instance::unknown(path)
        }
    }

    #[test]
    fn recreated_socket_is_another_qemu() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let first = at(&path, None);
        assert!(first.is_same(&at(&path, None)) && first.has_its_place());
        drop(listener);
        fs::remove_file(&path).unwrap();
        assert!(first.has_its_place());
        assert!(!first.is_same(&at(&path, None)) && !at(&path, None).is_same(&at(&path, None)));
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(!first.is_same(&at(&path, None)) && !first.has_its_place());
    }

    #[test]
    fn process_counts_more_than_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let _listener = UnixListener::bind(&path).unwrap();
        let process = |pid| {
            let start_time = 1;
            at(&path, Some(ProcessId { pid, start_time }))
        };
        assert!(process(1).is_same(&process(1)) && !process(1).is_same(&process(2)));
        // No process has ever started that early.
        assert!(process(1).has_ended() && !at(&path, None).has_ended());
    }
}
