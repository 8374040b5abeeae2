//! The file behind a table: found or made, checked, mapped, and locked byte by byte.
//!
//! Making it needs no lock and has no half-made state: its length is set, which is idempotent, and all zeros is an
//! empty table that has no name yet. A process that finds a zero where the name belongs puts it there, in one
//! compare-exchange.

use std::{
    fmt, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, Stat},
    io::Errno,
    mm::{MapFlags, ProtFlags},
};

use super::SharesError;

/// Length of the file, in words of eight bytes.
pub(super) const WORDS: usize = 512;
const LENGTH: usize = WORDS * size_of::<AtomicU64>();

/// The word that names the file: what it is, and in its last byte the version.
const NAME: usize = 0;
const VERSION: u8 = 1;
const MAGIC: u64 = u64::from_le_bytes([b'i', b'd', b'x', b'd', b'/', b's', b'h', VERSION]);

/// The mapped file of one work queue.
pub(super) struct File {
    fd: OwnedFd,
    words: NonNull<[AtomicU64; WORDS]>,
    path: PathBuf,
}

// SAFETY: the mapping belongs to no thread, and it is only accessed as atomics.
unsafe impl Send for File {}
// SAFETY: as above.
unsafe impl Sync for File {}

impl File {
    pub(super) fn open(directory: &Path, queue: &str) -> Result<Self, SharesError> {
        let letters = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if queue.is_empty() || queue.len() > 64 || !queue.bytes().all(letters) {
            return Err(SharesError::Queue { name: queue.into() });
        }
        let name = format!("idxd-shares.{queue}");
        let path = directory.join(&name);
        match find_or_make(directory, &name, &path).and_then(|fd| map(fd, &path)) {
            Ok(file) => file.named(),
            Err(Failure::System(errno)) => Err(system(&path, errno)),
            Err(Failure::Shares(error)) => Err(error),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: `words` is the start of a mapping of just this length, page-aligned, that lives as long as `self`.
        // Other processes change it meanwhile, which atomics allow.
        unsafe { self.words.as_ref() }
    }

    /// Whether the file is still the one that others will open, and as long as the mapping.
    pub(super) fn check(&self) -> Result<(), SharesError> {
        let stat = rustix::fs::fstat(&self.fd).map_err(|errno| system(&self.path, errno))?;
        if stat.st_nlink == 0 {
            return Err(SharesError::Removed {
                path: self.path.clone(),
            });
        }
        whole(&stat, &self.path)
    }

    /// Locks a word's bytes, if no other open file has; whether it did. The kernel lets go of the lock when the
    /// last descriptor of this open file is gone, however that comes about.
    ///
    /// The lock is the open file's: to lock what `self` has locked succeeds.
    pub(super) fn lock(&self, word: usize) -> Result<bool, SharesError> {
        match self.fcntl(libc::F_OFD_SETLK, libc::F_WRLCK, word, 1) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(self.unlockable(error)),
        }
    }

    pub(super) fn unlock(&self, word: usize) -> Result<(), SharesError> {
        let unlocked = self.fcntl(libc::F_OFD_SETLK, libc::F_UNLCK, word, 1);
        unlocked.map(drop).map_err(|error| self.unlockable(error))
    }

    /// Whether another open file has locked any of `count` words from `first` on.
    pub(super) fn locked(&self, first: usize, count: usize) -> Result<bool, SharesError> {
        let found = self.fcntl(libc::F_OFD_GETLK, libc::F_WRLCK, first, count);
        found
            .map(|kind| kind != libc::F_UNLCK)
            .map_err(|error| self.unlockable(error))
    }

    /// Puts the file's name in place, or reads it.
    fn named(self) -> Result<Self, SharesError> {
        let place = &self.words()[NAME];
        match place.compare_exchange(0, MAGIC, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(MAGIC) => Ok(self),
            Err(found) => {
                let [found @ .., version] = found.to_le_bytes();
                let [magic @ .., _] = MAGIC.to_le_bytes();
                Err(if found == magic {
                    SharesError::Version {
                        path: self.path.clone(),
                        version,
                    }
                } else {
                    SharesError::NotATable {
                        path: self.path.clone(),
                    }
                })
            }
        }
    }

    /// The kind of lock that the kernel reports.
    fn fcntl(&self, command: i32, kind: i32, word: usize, words: usize) -> io::Result<i32> {
        let range = |words: usize| {
            libc::off_t::try_from(words * size_of::<AtomicU64>()).map_err(io::Error::other)
        };
        let short = |number: i32| libc::c_short::try_from(number).map_err(io::Error::other);
        let mut lock = libc::flock {
            l_type: short(kind)?,
            l_whence: short(libc::SEEK_SET)?,
            l_start: range(word)?,
            l_len: range(words)?,
            // Has to be zero: the lock is the open file's and no process's.
            l_pid: 0,
        };
        // SAFETY: both commands take a `struct flock`, which `lock` is; it outlives the call.
        let result = unsafe { libc::fcntl(self.fd.as_raw_fd(), command, &raw mut lock) };
        if result == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(i32::from(lock.l_type))
    }

    fn unlockable(&self, source: io::Error) -> SharesError {
        SharesError::System {
            path: self.path.clone(),
            source,
        }
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: a mapping of this length, made by `map`; references to it cannot outlive `self`. It fails only for
        // arguments that are not a mapping's.
        let _ = unsafe { rustix::mm::munmap(self.words.as_ptr().cast(), LENGTH) };
    }
}

enum Failure {
    System(Errno),
    Shares(SharesError),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

/// An open file that may be trusted, of the right length.
fn find_or_make(directory: &Path, name: &str, path: &Path) -> Result<OwnedFd, Failure> {
    // A link in the place of the file might lead anywhere.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let directory_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, directory_flags, Mode::empty())?;
    let public = rustix::fs::fstat(&directory)?.st_mode & Mode::WOTH.bits() != 0;
    loop {
        // Without O_CREAT first: with it, the kernel may refuse files of others in sticky directories
        // (fs.protected_regular).
        match rustix::fs::openat(&directory, name, flags, Mode::empty()) {
            Ok(fd) => {
                let stat = rustix::fs::fstat(&fd)?;
                trusted(&stat, public, path).map_err(Failure::Shares)?;
                if stat.st_size == 0 {
                    // Just being made, perhaps by a process that died meanwhile.
                    set_length(&fd)?;
                }
                return Ok(fd);
            }
            // What O_NOFOLLOW returns for a link; opening a directory for writing gives the other.
            Err(Errno::LOOP | Errno::ISDIR) => {
                return Err(Failure::Shares(SharesError::NotATable {
                    path: path.into(),
                }));
            }
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mode = if public {
            Mode::from(0o600)
        } else {
            Mode::from(0o660)
        };
        match rustix::fs::openat(
            &directory,
            name,
            flags | OFlags::CREATE | OFlags::EXCL,
            mode,
        ) {
            Ok(fd) => {
                let made = rustix::fs::fchmod(&fd, mode).and_then(|()| set_length(&fd));
                if let Err(errno) = made {
                    // It is of no use; the original error is more useful than a failed removal.
                    let _ = rustix::fs::unlinkat(&directory, name, AtFlags::empty());
                    return Err(errno.into());
                }
                return Ok(fd);
            }
            // Another process was faster.
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Reserves the bytes, so that touching the mapping cannot fail for want of memory or space. Never shortens.
fn set_length(fd: impl AsFd) -> rustix::io::Result<()> {
    rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, LENGTH as u64)
}

/// Whether all who can write or shorten the file have been allowed to.
fn trusted(stat: &Stat, public: bool, path: &Path) -> Result<(), SharesError> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(SharesError::NotATable { path: path.into() });
    }
    let ours = stat.st_uid == 0 || stat.st_uid == rustix::process::geteuid().as_raw();
    let everyones = stat.st_mode & Mode::WOTH.bits() != 0;
    if everyones || (public && !ours) {
        return Err(SharesError::Untrusted {
            path: path.into(),
            owner: stat.st_uid,
            mode: stat.st_mode & 0o7777,
        });
    }
    Ok(())
}

fn whole(stat: &Stat, path: &Path) -> Result<(), SharesError> {
    if usize::try_from(stat.st_size) == Ok(LENGTH) {
        Ok(())
    } else {
        Err(SharesError::NotATable { path: path.into() })
    }
}

fn map(fd: OwnedFd, path: &Path) -> Result<File, Failure> {
    whole(&rustix::fs::fstat(&fd)?, path).map_err(Failure::Shares)?;
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice, of a file that is as long.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LENGTH, access, flags, &fd, 0) }?;
    // The kernel does not map at address zero by itself.
    let words = NonNull::new(start.cast()).ok_or(Errno::INVAL)?;
    Ok(File {
        fd,
        words,
        path: path.into(),
    })
}

fn system(path: &Path, errno: Errno) -> SharesError {
    SharesError::System {
        path: path.into(),
        source: errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_strangers_are_trusted_where_strangers_cannot_make_any() {
        let file = tempfile::tempfile().unwrap();
        let mut stat = rustix::fs::fstat(&file).unwrap();
        let trusted = |stat: &Stat, public| trusted(stat, public, Path::new("table"));
        assert!(trusted(&stat, true).is_ok());
        stat.st_uid = 0;
        assert!(trusted(&stat, true).is_ok());
        stat.st_uid = rustix::process::geteuid().as_raw().wrapping_add(1).max(1);
        assert!(trusted(&stat, false).is_ok());
        assert!(matches!(
            trusted(&stat, true),
            Err(SharesError::Untrusted { .. })
        ));
        stat.st_mode |= 0o002;
        assert!(matches!(
            trusted(&stat, false),
            Err(SharesError::Untrusted { .. })
        ));
    }
}
