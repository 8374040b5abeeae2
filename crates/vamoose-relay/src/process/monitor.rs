//! The file of a monitor's socket, and the process that listens on it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs, io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use rustix::{
    fd::{AsFd as _, AsRawFd as _, OwnedFd},
    fs::{AtFlags, CWD, Mode, OFlags, fstat, open, statat},
    io::Errno,
    process::geteuid,
};

use super::lookup::{entry, in_root};

const ROOT: u32 = 0;

/// The file of a monitor's socket, held open: its path may lead elsewhere later.
#[derive(Debug)]
pub(crate) struct Monitor {
    pub(super) path: PathBuf,
    /// The path with links resolved.
    resolved: PathBuf,
    file: OwnedFd,
    /// The owners of the file, and of the link that leads to it.
    owners: BTreeSet<u32>,
}

impl Monitor {
    /// The socket at `path`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let link = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?;
        let file = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let mut monitor = Self {
            path: path.to_owned(),
            resolved: PathBuf::new(),
            owners: BTreeSet::from([link.st_uid, fstat(&file)?.st_uid]),
            file,
        };
        monitor.resolved = fs::read_link(monitor.address())?;
        Ok(monitor)
    }

    /// A path to this very file, and a short one, as the paths of sockets are limited.
    pub(crate) fn address(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    pub(super) fn name(&self) -> &OsStr {
        self.resolved.file_name().unwrap_or_default()
    }

    /// An owner of the monitor other than root, this process's user and `user`, the user of the server.
    pub(super) fn foreign_owner(&self, user: u32) -> Option<u32> {
        let trusted = [ROOT, geteuid().as_raw(), user];
        let mut owners = self.owners.iter().copied();
        owners.find(|owner| !trusted.contains(owner))
    }

    /// Whether process `pid` holds one of the `listening` sockets at this file.
    pub(super) fn is_served_by(&self, pid: u32, listening: &BTreeMap<u64, PathBuf>) -> bool {
        // This process is not a QEMU, and must not be killed as one.
        if listening.is_empty() || pid == std::process::id() {
            return false;
        }
        let paths = sockets(pid).into_iter().filter_map(|at| listening.get(&at));
        // Several descriptors may be of one socket.
        let paths = paths.collect::<BTreeSet<_>>();
        paths.into_iter().any(|path| self.is_at(pid, path))
    }

    /// Whether `path` leads to this file for the process. With different roots, one path may lead to
    /// different files.
    fn is_at(&self, pid: u32, path: &Path) -> bool {
        let seen = if path.is_absolute() {
            let root = directory(&format!("/proc/{pid}/root"));
            root.and_then(|root| in_root(root.as_fd(), path))
        } else {
            directory(&format!("/proc/{pid}/cwd")).and_then(|here| entry(here, path))
        };
        let seen = match seen {
            // The process may have changed its root after opening the monitor.
            Err(Errno::NOENT) => entry(CWD, path),
            seen => seen,
        };
        let identity = |file: &OwnedFd| fstat(file).map(|stat| (stat.st_dev, stat.st_ino));
        match (seen.and_then(|seen| identity(&seen)), identity(&self.file)) {
            (Ok(seen), Ok(this)) => seen == this,
            _ => false,
        }
    }
}

fn directory(path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    open(path, flags, Mode::empty())
}

/// Sockets that listen on a path with this file name, in the network namespaces of these processes:
/// inode to path. The path is the one given to `bind`.
pub(super) fn listening(pids: &[u32], name: &OsStr) -> BTreeMap<u64, PathBuf> {
    let mut namespaces = BTreeSet::new();
    let mut sockets = BTreeMap::new();
    for pid in pids {
        // Ended processes, and those of other users, have no visible namespace.
        let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/net")) else {
            continue;
        };
        if namespaces.contains(&namespace) {
            continue;
        }
        if let Ok(table) = fs::read(format!("/proc/{pid}/net/unix")) {
            namespaces.insert(namespace);
            sockets.extend(
                table
                    .split(|byte| *byte == b'\n')
                    .filter_map(parse_listening),
            );
        }
    }
    sockets.retain(|_, path| path.file_name() == Some(name));
    sockets
}

/// Inode and path from a line of /proc/net/unix, if that socket listens:
/// `Num: RefCount Protocol Flags Type St Inode Path`.
fn parse_listening(line: &[u8]) -> Option<(u64, PathBuf)> {
    /// The kernel's flag of a socket that accepts connections.
    const ACCEPTS: u32 = 0x10000;
    let mut rest = line;
    let mut field = || {
        let text = rest.trim_ascii_start();
        let end = text.iter().position(u8::is_ascii_whitespace);
        let (field, left) = text.split_at(end.unwrap_or(text.len()));
        rest = left;
        str::from_utf8(field).ok()
    };
    let flags = u32::from_str_radix(field().and(field()).and(field()).and(field())?, 16).ok()?;
    let inode = field().and(field()).and(field())?.parse().ok()?;
    // One space, then all the rest.
    let path = rest.get(1..)?;
    (flags & ACCEPTS != 0).then(|| (inode, PathBuf::from(OsStr::from_bytes(path))))
}

/// Inodes of a process's sockets. Empty if the process cannot be inspected.
pub(crate) fn sockets(pid: u32) -> Vec<u64> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"));
    let links = entries
        .into_iter()
        .flatten()
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links
        .filter_map(|link| parse_socket(link.to_str()?))
        .collect()
}

fn parse_socket(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_that_listen_count() {
        let parse = |line: &str| parse_listening(line.as_bytes());
        let listens = "0000000010c26305: 00000002 00000000 00010000 0001 01  1590 /run/a b/qmp";
        assert_eq!(parse(listens), Some((1590, "/run/a b/qmp".into())));
        let connected = "0000000010c26305: 00000003 00000000 00000000 0001 03 1590 /run/a";
        assert_eq!(parse(connected), None);
        let nameless = "0000000010c26305: 00000003 00000000 00010000 0001 03 1590";
        assert_eq!(parse(nameless), None);
        assert_eq!(
            parse("Num       RefCount Protocol Flags    Type St Inode Path"),
            None
        );
        assert_eq!(parse(""), None);
        assert_eq!(parse_socket("socket:[1590]"), Some(1590));
        assert_eq!(parse_socket("/dev/null"), None);
    }
}
