//! The socket between the source QEMU and its relay.

use std::{
    ffi::OsString,
    fs, io,
    os::{
        fd::AsRawFd as _,
        unix::{ffi::OsStrExt as _, fs::MetadataExt as _, fs::PermissionsExt as _},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, chownat, fstat, open},
    process::geteuid,
};
use transfer::{Address, Listener};

use super::Cause;

/// Listens where the source QEMU can reach it: beside its monitor.
pub(super) struct Socket {
    pub(super) listener: Listener,
    pub(super) path: PathBuf,
}

impl Socket {
    pub(super) fn beside(monitor: &Path, stall_timeout: Duration) -> Result<Self, Cause> {
        let path = path_beside(monitor);
        let listener = Listener::bind(&Address::Unix(path.clone()), stall_timeout)?;
        let owner = fs::metadata(monitor)?;
        give_to(&path, owner.uid(), owner.gid())?;
        Ok(Self { listener, path })
    }
}

/// `NAME.outgoing` beside `NAME.qmp`.
fn path_beside(monitor: &Path) -> PathBuf {
    let name = monitor.file_name().unwrap_or_default();
    let name = name
        .as_bytes()
        .strip_suffix(b".qmp")
        .unwrap_or(name.as_bytes());
    let mut outgoing = OsString::from(std::ffi::OsStr::from_bytes(name));
    outgoing.push(".outgoing");
    monitor.with_file_name(outgoing)
}

/// Makes the socket at `path` one that this user alone can connect to. QEMU often runs as another user than we do,
/// and that user may write the folder: what is found at `path` need not be what was put there. So the file is opened
/// first, without following links, and what was opened is given away only if it is a socket of our own.
fn give_to(path: &Path, user: u32, group: u32) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = open(path, flags, Mode::empty())?;
    let found = fstat(&file)?;
    let is_ours = FileType::from_raw_mode(found.st_mode) == FileType::Socket
        && found.st_uid == geteuid().as_raw()
        && found.st_nlink == 1;
    if !is_ours {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} was replaced by somebody else's file", path.display()),
        ));
    }
    let handle = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::set_permissions(handle, fs::Permissions::from_mode(0o600))?;
    if found.st_uid != user {
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        chownat(&file, "", Some(user), Some(group), AtFlags::EMPTY_PATH)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    #[test]
    fn names_with_dots_have_sockets_of_their_own() {
        for (monitor, socket) in [
            ("/run/vms/web1.qmp", "/run/vms/web1.outgoing"),
            ("/run/vms/web.1.qmp", "/run/vms/web.1.outgoing"),
            ("/run/vms/web.2", "/run/vms/web.2.outgoing"),
        ] {
            assert_eq!(path_beside(Path::new(monitor)), Path::new(socket));
        }
    }

    #[test]
    fn only_our_own_socket_is_given_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let user = geteuid().as_raw();
        give_to(&path, user, 0).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);

        let canary = dir.path().join("canary");
        fs::write(&canary, "").unwrap();
        let before = fs::metadata(&canary).unwrap();
        let link = dir.path().join("link");
        for target in [&canary, &path] {
            symlink(target, &link).unwrap();
            let refused = give_to(&link, 1, 1).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            fs::remove_file(&link).unwrap();
        }
        assert!(give_to(&canary, 1, 1).is_err());
        let after = fs::metadata(&canary).unwrap();
        assert_eq!((before.uid(), before.mode()), (after.uid(), after.mode()));
    }
}
