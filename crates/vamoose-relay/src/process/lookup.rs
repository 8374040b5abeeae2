//! Resolves paths as another process does.
//!
//! openat2 with `RESOLVE_IN_ROOT` could do this, but systemd's RestrictSUIDSGID= forbids it: a filter of system calls cannot see
//! the mode passed to openat2.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::Path,
};

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{FileType, Mode, OFlags, fstat, openat, readlinkat},
    io::Errno,
};

/// The kernel's limit.
const MOST_LINKS: usize = 40;

/// The file that an absolute `path` leads to for a process with this `root`. Links are followed within `root` and never lead
/// out of it. The last part is not followed, as a bound socket is not a link.
pub(super) fn in_root(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Errno> {
    // The folders from the root to the present position.
    let mut folders = Vec::new();
    let mut ahead = Vec::new();
    push_parts(&mut ahead, path);
    let mut links = 0;
    while let Some(part) = ahead.pop() {
        match part.as_bytes() {
            b"/" => folders.clear(),
            // The root's parent is the root.
            b".." => drop(folders.pop()),
            b"." => {}
            _ => {
                let file = entry(folders.last().map_or(root, OwnedFd::as_fd), &part)?;
                let is_link = FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::Symlink;
                if !is_link || ahead.is_empty() {
                    folders.push(file);
                    continue;
                }
                links += 1;
                if links > MOST_LINKS {
                    return Err(Errno::LOOP);
                }
                let target = OsString::from_vec(readlinkat(&file, "", Vec::new())?.into_bytes());
                push_parts(&mut ahead, Path::new(&target));
            }
        }
    }
    folders.pop().ok_or(Errno::INVAL)
}

/// Pushes the parts of `path` so that the first is on top.
fn push_parts(ahead: &mut Vec<OsString>, path: &Path) {
    ahead.extend(path.iter().rev().map(OsStr::to_owned));
}

/// Opens a file of this folder, without following a link.
pub(super) fn entry(folder: impl AsFd, name: impl AsRef<Path>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(folder, name.as_ref(), flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt as _, symlink},
    };

    use rustix::fs::open;

    use super::*;

    /// What `path` leads to in a root whose folder `vms` has a file `qmp`, and whose parent has another one.
    fn look(links: &[(&str, &str)], path: &str) -> Result<&'static str, Errno> {
        let outside = tempfile::tempdir().unwrap();
        let root = outside.path().join("root");
        for (folder, name) in [(outside.path(), "outside"), (&root, "inside")] {
            fs::create_dir_all(folder.join("vms")).unwrap();
            fs::write(folder.join("vms/qmp"), name).unwrap();
        }
        for (at, to) in links {
            // What leads to the root of all leads out of this one.
            let to = to.replace("OUTSIDE", outside.path().to_str().unwrap());
            symlink(to, root.join(at)).unwrap();
        }
        let root = open(&root, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let found = fstat(in_root(root.as_fd(), Path::new(path))?).unwrap();
        let is = |name: &str| {
            let file = fs::metadata(outside.path().join(name)).unwrap();
            (file.dev(), file.ino()) == (found.st_dev, found.st_ino)
        };
        Ok(match (is("root/vms/qmp"), is("vms/qmp")) {
            (true, _) => "inside",
            (_, true) => "outside",
            _ => "another",
        })
    }

    #[test]
    fn no_path_leads_out_of_the_root() {
        assert_eq!(look(&[], "/vms/qmp"), Ok("inside"));
        assert_eq!(look(&[], "/vms/../../vms/./qmp"), Ok("inside"));
        assert_eq!(look(&[("run", "/vms")], "/run/qmp"), Ok("inside"));
        assert_eq!(look(&[("run", "../vms")], "/run/qmp"), Ok("inside"));
        let chain = [("a", "vms/../b"), ("b", "/vms/.")];
        assert_eq!(look(&chain, "/a/qmp"), Ok("inside"));
        let out = look(&[("run", "OUTSIDE/vms")], "/run/qmp");
        assert_eq!(out, Err(Errno::NOENT));
    }

    #[test]
    fn the_last_part_is_not_followed() {
        assert_eq!(look(&[("link", "vms/qmp")], "/link"), Ok("another"));
    }

    #[test]
    fn path_to_nowhere_is_an_error() {
        assert_eq!(look(&[("a", "b"), ("b", "a")], "/a/qmp"), Err(Errno::LOOP));
        assert_eq!(look(&[], "/vms/qmp/qmp"), Err(Errno::NOTDIR));
        assert_eq!(look(&[], "/vms/none"), Err(Errno::NOENT));
        assert_eq!(look(&[], "/"), Err(Errno::INVAL));
    }
}
