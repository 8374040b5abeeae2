//! Divides the entries of a shared work queue among the processes that use it.
//!
//! A shared work queue serves descriptors in order of arrival: the process that submits most gets most, and the others
//! find the queue full. Cooperating processes divide the entries. The members of a queue are found in the byte locks of
//! an empty file; nothing is ever written to the file.
//!
//! ```text
//!   DIRECTORY/idxd-shares.wq0.1
//!
//!   byte  0               16              32              48
//!        ├───────────────┼───────────────┼───────────────┼──── … 256 rows
//!        │####           │               │########       │        # locked
//!         member of                       member of
//!         weight 4                        weight 8
//! ```
//! A member locks as many bytes of its row as its weight is. [`Share::part`] sums up the locks of all members and
//! returns this member's part by weight: the parts add up to the queue's entries, and each is at least one.
//!
//! **Death.** The locks belong to the member's open file (open file description locks). The kernel releases them when
//! the process ends, for whatever reason, and the others get its entries when they read the locks again. A child that was forked
//! keeps the locks until it ends or executes another program.
//!
//! **Races.** The locks are read one by one while members come and go, and with more members than entries the parts add
//! up to more than the queue has. In both cases the queue refuses some descriptors, as it does when a process uses it
//! without a share. The answer is always the same: another queue, or the processor, does the work.
//!
//! **Trust.** A process that may write the file can reduce the others to one entry each, keep them from joining, and make
//! reading the locks slower; it cannot do more. For several users, make a directory of their own group with the set-group-id
//! bit on a tmpfs (`/run/…`). The file is never removed: a process may be about to join at any moment.

use std::{
    fs::File,
    io,
    num::NonZeroU32,
    ops::Range,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use libc::off_t;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use thiserror::Error;

use crate::discovery::QueueName;

/// Most members of a queue.
pub const MEMBERS: u16 = 256;

/// Bytes of a row: one more than the largest weight.
const ROW: off_t = 16;

/// End of the rows.
const END: off_t = MEMBERS as off_t * ROW;

/// Weight of a member compared with others: 1 to 15.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u8);

impl Weight {
    /// `weight`, or the nearest possible weight.
    pub fn new(weight: u8) -> Self {
        Self(weight.clamp(1, 15))
    }
}

/// Why a process cannot join the members of a queue.
#[derive(Debug, Error)]
pub enum SharesError {
    /// The file cannot be opened, created or locked.
    #[error("cannot use {}, the file by which processes divide the work queue", path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// All rows are in use.
    #[error("{} has no room for another process", .0.display())]
    Full(PathBuf),
}

/// The part of a member, computed from the locks of all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Entries that this member may fill now; at least one.
    pub entries: u32,
    /// Other members, at most 255. Computing the part takes two system calls for each of them.
    pub others: u32,
}

/// Membership of one process in one queue. Dropping it ends the membership.
#[derive(Debug)]
pub struct Share {
    file: File,
    /// The locked bytes.
    own: Range<off_t>,
    entries: NonZeroU32,
}

impl Share {
    /// Joins the members of `queue`. `directory` must be local and the same for all processes of the host. `entries`
    /// are the entries to be divided: those that a process may fill ([`Limits::threshold`](crate::Limits::threshold)).
    pub fn join(
        directory: &Path,
        queue: QueueName,
        entries: NonZeroU32,
        weight: Weight,
    ) -> Result<Self, SharesError> {
        let name = format!("idxd-shares.wq{}.{}", queue.device, queue.queue);
        let path = directory.join(name);
        let lock_row = || {
            let file = open(&path)?;
            for row in 0..MEMBERS {
                let start = off_t::from(row) * ROW;
                let own = start..start + off_t::from(weight.0);
                if try_lock(&file, &own)? {
                    return Ok(Some(Self { file, own, entries }));
                }
            }
            Ok(None)
        };
        match lock_row() {
            Ok(Some(share)) => Ok(share),
            Ok(None) => Err(SharesError::Full(path)),
            Err(source) => Err(SharesError::System { path, source }),
        }
    }

    /// The current part of this member.
    pub fn part(&self) -> io::Result<Part> {
        // Other locks in the own row are no member's.
        let (before, after) = (0..self.own.start, self.own.start + ROW..END);
        let (before, after) = (self.locked(before)?, self.locked(after)?);
        let own = weight(&self.own);
        let total = before.weight + own + after.weight;
        Ok(Part {
            entries: part(self.entries.get(), before.weight, own, total),
            others: before.members + after.members,
        })
    }

    /// The members whose locks are in `rows`, a range of whole rows. One lock counts for each row, however many there are.
    fn locked(&self, mut rows: Range<off_t>) -> io::Result<Locked> {
        let mut sum = Locked::default();
        // The kernel finds the locks in any order. The shorter rest is looked at by recursion, so its depth is at most 8.
        while !rows.is_empty()
            && let Some(found) = find_lock(&self.file, &rows)?
        {
            sum.weight += weight(&found);
            sum.members += 1;
            let before = rows.start..found.start - found.start % ROW;
            let after = (found.end + ROW - 1) / ROW * ROW..rows.end;
            let (shorter, longer) = match weight(&before) < weight(&after) {
                true => (before, after),
                false => (after, before),
            };
            let more = self.locked(shorter)?;
            sum.weight += more.weight;
            sum.members += more.members;
            rows = longer;
        }
        Ok(sum)
    }
}

/// What other members have locked.
#[derive(Default)]
struct Locked {
    weight: u64,
    members: u32,
}

/// Part of a member of `own` weight, where members of weight `before` come before it and all have weight `total`.
fn part(entries: u32, before: u64, own: u64, total: u64) -> u32 {
    let end = |weight: u64| weight * u64::from(entries) / total.max(1);
    let part = end(before + own) - end(before);
    u32::try_from(part).unwrap_or(entries).max(1)
}

fn weight(range: &Range<off_t>) -> u64 {
    u64::try_from(range.end - range.start).unwrap_or(0)
}

/// Opens the file, which is created for owner and group.
fn open(path: &Path) -> io::Result<File> {
    // Not through a link, which might lead anywhere.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mode = Mode::from(0o660);
    // Without O_CREAT first: with it, the kernel may refuse files of others in sticky directories
    // (fs.protected_regular).
    match rustix::fs::open(path, flags, mode) {
        Err(Errno::NOENT) => {}
        result => return Ok(result?.into()),
    }
    let file = rustix::fs::open(path, flags | OFlags::CREATE, mode)?;
    // Whatever the umask is. Fails if another user was faster: then the mode is that user's affair.
    let _ = rustix::fs::fchmod(&file, mode);
    Ok(file.into())
}

/// Locks `range` unless another open file has locked a part of it.
fn try_lock(file: &File, range: &Range<off_t>) -> io::Result<bool> {
    match fcntl(file, libc::F_OFD_SETLK, range) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// The part of `range` that is covered by one lock of another open file.
fn find_lock(file: &File, range: &Range<off_t>) -> io::Result<Option<Range<off_t>>> {
    let lock = fcntl(file, libc::F_OFD_GETLK, range)?;
    if i32::from(lock.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    // A length of zero is a lock to the end of the file, wherever that is.
    let end = match lock.l_len {
        0 => off_t::MAX,
        length => lock.l_start.saturating_add(length),
    };
    Ok(Some(lock.l_start.max(range.start)..end.min(range.end)))
}

fn fcntl(file: &File, command: i32, range: &Range<off_t>) -> io::Result<libc::flock> {
    let short = |number: i32| libc::c_short::try_from(number).map_err(io::Error::other);
    let mut lock = libc::flock {
        l_type: short(libc::F_WRLCK)?,
        l_whence: short(libc::SEEK_SET)?,
        l_start: range.start,
        l_len: range.end - range.start,
        // Has to be zero for the locks of an open file.
        l_pid: 0,
    };
    // SAFETY: both commands take a pointer to a `struct flock`, which `lock` is; it outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_are_by_weight_and_add_up(weights in prop::collection::vec(1..16_u64, 1..100), entries in 1..300_u32) {
            let total: u64 = weights.iter().sum();
            let mut before = 0;
            let mut sum = 0;
            for own in &weights {
                let got = part(entries, before, *own, total);
                let exact = u64::from(entries) * own / total;
                prop_assert!((exact.max(1)..=exact + 1).contains(&u64::from(got)));
                before += own;
                sum += got;
            }
            let members = u32::try_from(weights.len()).unwrap();
            prop_assert!(sum >= entries && sum < entries + members);
        }
    }
}
