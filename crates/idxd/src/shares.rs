//! Divides a work queue fairly among its users on a host.
//!
//! A shared work queue is first come, first served: the process that submits most gets most, and the others find the
//! queue full. With a table of shares, cooperating processes divide the entries. Each process has a row in a small file
//! that all of them map, and computes from the rows, without asking the others, how many descriptors it may have in
//! flight. Beyond that it uses the processor instead of waiting.
//!
//! ```text
//!   DIRECTORY/idxd-shares.wq0.1         4096 bytes of little-endian words
//!
//!   word 0         1          2             3                  64      65      66             319
//!       ┌─────────┬──────────┬─────────────┬────────┬─ … ─────┬───────┬───────┬────── … ─────┬───────┐
//!       │ name,   │ entries  │ generation: │ turn   │ zero    │ row 0 │ row 1 │              │ row   │
//!       │ version │          │ rows changed│        │         │       │       │              │ 255   │
//!       └─────────┴──────────┴─────────────┴────────┴─────────┴───────┴───────┴──────────────┴───────┘
//!                                                               │
//!       bits 3:0 weight, 0: free    8: active    63:16 beat ────┘    locked (OFD lock on its bytes) by its owner
//!
//!   join      lock a row ── write it ── generation + 1
//!   entries   generation as before? then as before: else read all rows, divide
//!   refresh   own row: beat + 1          others: beat the same for long? ── lock goes? owner dead: free the row
//!                                                                       └── locked?    owner stuck: mark as idle
//!             more members than entries, for a while? turn + 1
//!   leave     zero the row ── generation + 1 ── unlock
//! ```
//!
//! **Death.** A row is held by a lock of its owner's open file on the row's bytes. The kernel takes it away when
//! the process dies, in whatever way; process ids, which are reused and differ between containers, play no part.
//! A member that joins, or refreshes a second after the owner's last beat, takes the row back.
//!
//! **Races.** A row is one word, so it is never seen half written, and no member waits for another: there is no lock that has
//! to be released first. Only a row's owner writes to it, but for clearing what a dead owner left, under its lock, and
//! marking a stale one idle, by a compare-exchange that fails if there is a new beat. A member that changes a row
//! increments the generation afterwards; so a member that divided before or while the row changed divides again.
//! One that dies in between is made up for by each member's next [`refresh`](Share::refresh), which always divides.
//! Until all have seen a change, they may have more than the queue's entries in flight together, or less. Then the
//! queue refuses some, as it does whenever a process uses it that is not in the table; a bounded number of retries and
//! then the CPU is the answer to both. Once all have seen the same rows, the shares add up to the queue's entries.
//!
//! **Idle members** do not count, and the others have their entries ([`Share::set_active`]).
//!
//! **More members than entries.** Then members take turns, each in proportion to its weight, and have no entry
//! meanwhile; see [`divide`]. A turn ends when a member refreshes that has seen it for [`TURN`]. The queues of a host are
//! out of step, so that a process that uses several has entries of some at any time.
//!
//! **Fork.** A child has the parent's open file, and so its locks, until it closes it or executes another program
//! (the file is close-on-exec). It cannot use or harm the parent's share: all but reading [`Share::entries`] does
//! nothing or is an error there. If the parent dies before such a child, its row stays locked, but with no more beats it
//! is marked idle after [`SILENCE`], and takes no entries from others.
//!
//! **Trust.** A process that may write the file can take entries away from others, and can crash them by making the file
//! shorter. A world-writable file is not used, and neither is another user's (but root's) in a world-writable
//! directory. In such a directory (`/dev/shm`) the file is made for its owner alone (0600). For several
//! users, make them a directory of their own group, with the set-group-id bit, on a tmpfs (`/run/…`): there the file
//! is made for owner and group (0660). What stands in the rows is checked at every use: garbage cannot do worse than
//! a wrong share. The file is never removed, as there is no moment when no process may be about to join.

mod divide;
mod file;

use std::{
    io,
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::process::{Pid, getpid};
use thiserror::Error;

pub use divide::divide;
use file::{File, WORDS};

/// Capacity of a table, in members.
pub const MEMBERS: usize = 256;
/// Where there are more members than entries: how long a turn takes at least.
pub const TURN: Duration = Duration::from_millis(100);
/// A member without a beat for so long may be dead, and is looked after.
pub const SUSPICION: Duration = Duration::from_secs(1);
/// A member that lives, but has had no beat for so long, counts as idle until it has one.
pub const SILENCE: Duration = Duration::from_secs(10);

const ENTRIES: usize = 1;
const GENERATION: usize = 2;
const TURNS: usize = 3;
const ROWS: usize = 64;
const _: () = assert!(ROWS + MEMBERS <= WORDS);

/// What one member is worth, compared with others: 1 to 15.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u8);

impl Weight {
    /// The least.
    pub const MIN: Self = Self(1);
    /// The default.
    pub const NORMAL: Self = Self(4);
    /// The most.
    pub const MAX: Self = Self(15);

    /// `weight`, or the nearest that there is.
    pub const fn new(weight: u8) -> Self {
        match weight {
            0 => Self::MIN,
            1..=15 => Self(weight),
            _ => Self::MAX,
        }
    }

    /// As a number.
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// Why there is no share. None of these is a reason not to use the queue: with the few entries of a process that
/// does not know of the others, and the CPU for what the queue refuses.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SharesError {
    /// The queue's name cannot be part of a file's name.
    #[error("`{name}` is not the name of a work queue")]
    Queue {
        /// That name.
        name: String,
    },
    /// The file cannot be opened, made, mapped or locked.
    #[error("cannot use {}, the table of the work queue's shares", path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file may be written by any user.
    #[error(
        "{} is not to be trusted: it belongs to user {owner} and has mode {mode:o}. Remove it, or use a directory \
         that only the queue's users may write",
        path.display()
    )]
    Untrusted {
        /// The file.
        path: PathBuf,
        /// Its owner's user id.
        owner: u32,
        /// Its permissions.
        mode: u32,
    },
    /// Something else has the file's name, or the file is damaged.
    #[error("{} is not a table of a work queue's shares, or is damaged: remove it", path.display())]
    NotATable {
        /// The file.
        path: PathBuf,
    },
    /// The table is of another version of this crate.
    #[error("{} has version {version}: all users of the queue need the same", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u8,
    },
    /// The queue has another number of entries than its present users think.
    #[error(
        "the users of {} divide {theirs} entries, but the work queue has {ours}: let those finish that opened it \
         when it was configured differently",
        path.display()
    )]
    Entries {
        /// The file.
        path: PathBuf,
        /// Entries that they know of.
        theirs: u64,
        /// Entries that the table was opened for.
        ours: u32,
    },
    /// All rows are in use.
    #[error("{} is full: the work queue has no share for another process", path.display())]
    Full {
        /// The file.
        path: PathBuf,
    },
    /// Others will not find the members of this table any more.
    #[error("{} has been removed: open it again", path.display())]
    Removed {
        /// The file.
        path: PathBuf,
    },
    /// The table was opened by the process that this one is a fork of.
    #[error("{} was opened by the process that this one was forked from: open it again", path.display())]
    Forked {
        /// The file.
        path: PathBuf,
    },
}

/// The table of one work queue.
#[derive(Clone, Debug)]
pub struct Table {
    shared: Arc<Shared>,
}

impl Table {
    /// Opens the table of `queue` (`wq0.1`, as sysfs has it) in `directory`, which has to be the same for all
    /// users of the host, and local; makes it if there is none. `entries` are what is to be divided: what a
    /// process's portal may fill ([`Limits::threshold`](crate::Limits::threshold)).
    pub fn open(directory: &Path, queue: &str, entries: NonZeroU32) -> Result<Self, SharesError> {
        let shared = Shared {
            file: File::open(directory, queue)?,
            entries,
            phase: phase(queue),
            process: getpid(),
            local: Mutex::new(Local {
                held: [false; MEMBERS],
                seen: [Seen::default(); MEMBERS],
                turn: None,
            }),
        };
        shared.agree_on_entries()?;
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Becomes a member: active, until it declares otherwise. The table may be dropped before the share.
    pub fn join(&self, weight: Weight) -> Result<Share, SharesError> {
        let shared = &self.shared;
        shared.check()?;
        shared.agree_on_entries()?;
        let mut local = shared.local();
        for row in 0..MEMBERS {
            if !local.held[row] && shared.file.lock(ROWS + row)? {
                local.held[row] = true;
                // From any number, so that the row does not look like its last owner's.
                let word = row_word(
                    weight,
                    true,
                    shared.word(GENERATION).load(Ordering::Relaxed),
                );
                shared.write_row(row, word);
                return Ok(Share {
                    divided: AtomicU64::new(shared.divide_now(row)),
                    shared: Arc::clone(shared),
                    row,
                    own: Mutex::new(word),
                });
            }
        }
        Err(SharesError::Full {
            path: shared.path(),
        })
    }

    /// Members now, idle ones too, and those that have died but have not been noticed.
    pub fn members(&self) -> usize {
        self.shared
            .rows()
            .filter(|&word| weight_of(word) != 0)
            .count()
    }
}

/// What one member may have of a work queue. Dropping it leaves.
#[derive(Debug)]
pub struct Share {
    shared: Arc<Shared>,
    row: usize,
    /// The row as this member last wrote it.
    own: Mutex<u64>,
    /// Bits 63:32 are the low half of the generation at which bits 31:0 are the share.
    divided: AtomicU64,
}

impl Share {
    /// How many descriptors this member may have in flight now. May be none, of an active member too, while there
    /// are more members than entries. No system call; two loads, unless there were changes.
    pub fn entries(&self) -> u32 {
        let divided = self.divided.load(Ordering::Relaxed);
        let generation = self.shared.word(GENERATION).load(Ordering::Acquire);
        if divided >> 32 == low(generation) {
            share_of(divided)
        } else {
            self.divide()
        }
    }

    /// Declares whether this member has work. While it has none, its share is zero and the others have its entries. Each change makes all members divide again, so this is for pauses of milliseconds and more.
    pub fn set_active(&self, active: bool) {
        self.update(|word| row_word(Weight(weight_of(word)), active, beat_of(word)));
    }

    /// Changes what the member is worth.
    pub fn set_weight(&self, weight: Weight) {
        self.update(|word| row_word(weight, is_active(word), beat_of(word)));
    }

    /// Shows that this member is alive, and looks after the others: due about every 100 ms, and not much less often
    /// than every second. `now` is from any monotonic clock, the same for all shares of a table. After an
    /// error the share is as it was, and may be wrong from now on; after [`SharesError::Removed`] it is.
    pub fn refresh(&self, now: Duration) -> Result<(), SharesError> {
        let shared = &self.shared;
        shared.check()?;
        {
            let mut own = lock(&self.own);
            let next = row_word(
                Weight(weight_of(*own)),
                is_active(*own),
                beat_of(*own).wrapping_add(1),
            );
            // Marked as idle meanwhile, or damaged.
            let restored = shared.row(self.row).swap(next, Ordering::AcqRel) != *own;
            *own = next;
            if restored {
                shared.changed();
            }
        }
        let looked = shared.look_after_others(now);
        self.divide();
        looked
    }

    fn update(&self, change: impl FnOnce(u64) -> u64) {
        if self.shared.is_forked() {
            return;
        }
        let mut own = lock(&self.own);
        let next = change(*own);
        if next != *own {
            *own = next;
            self.shared.write_row(self.row, next);
        }
    }

    fn divide(&self) -> u32 {
        let divided = self.shared.divide_now(self.row);
        self.divided.store(divided, Ordering::Relaxed);
        share_of(divided)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            return;
        }
        let mut local = self.shared.local();
        self.shared.write_row(self.row, 0);
        // If it fails, the row stays this open file's, and free for its next join.
        let _ = self.shared.file.unlock(ROWS + self.row);
        local.held[self.row] = false;
    }
}

/// What the shares of one opened table have in common.
#[derive(Debug)]
struct Shared {
    file: File,
    entries: NonZeroU32,
    /// Where the turns begin; another number for each queue.
    phase: u64,
    /// The process that opened it.
    process: Pid,
    local: Mutex<Local>,
}

/// What one process knows of the rows.
#[derive(Debug)]
struct Local {
    /// Rows of this open file. The kernel would let it lock them again.
    held: [bool; MEMBERS],
    seen: [Seen; MEMBERS],
    /// The turn, and when it was first seen.
    turn: Option<(u64, Duration)>,
}

/// A row, and since when it has not changed. Each process has its own clock.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    word: u64,
    since: Duration,
    /// When it was last asked whether the owner is alive.
    asked: Duration,
}

impl Shared {
    /// Makes the table's entries the queue's, unless a member uses it with another number.
    fn agree_on_entries(&self) -> Result<(), SharesError> {
        let (place, ours) = (self.word(ENTRIES), u64::from(self.entries.get()));
        let mut expected = 0;
        loop {
            match place.compare_exchange(expected, ours, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(()),
                Err(theirs) if theirs == ours => return Ok(()),
                // What another process has just written holds, even if none has joined yet.
                Err(theirs) if expected != 0 || self.is_used()? => {
                    return Err(SharesError::Entries {
                        path: self.path(),
                        theirs,
                        ours: self.entries.get(),
                    });
                }
                Err(theirs) => expected = theirs,
            }
        }
    }

    /// Whether there is a live member.
    fn is_used(&self) -> Result<bool, SharesError> {
        let local = self.local();
        Ok(local.held.contains(&true) || self.file.locked(ROWS, MEMBERS)?)
    }

    fn look_after_others(&self, now: Duration) -> Result<(), SharesError> {
        let mut local = self.local();
        let Local { held, seen, turn } = &mut *local;
        for (row, seen) in seen.iter_mut().enumerate() {
            let word = self.row(row).load(Ordering::Acquire);
            if word != seen.word {
                *seen = Seen {
                    word,
                    since: now,
                    asked: now,
                };
            } else if word != 0 && !held[row] && now.saturating_sub(seen.asked) >= SUSPICION {
                seen.asked = now;
                if self.file.lock(ROWS + row)? {
                    self.write_row(row, 0);
                    self.file.unlock(ROWS + row)?;
                } else if now.saturating_sub(seen.since) >= SILENCE && is_active(word) {
                    self.mark_idle(row, word);
                }
            }
        }
        if self.rows().filter(|&word| is_active(word)).count() as u64 <= self.divisible().into() {
            *turn = None;
            return Ok(());
        }
        let current = self.word(TURNS).load(Ordering::Acquire);
        match *turn {
            Some((seen, since)) if seen == current => {
                if now.saturating_sub(since) >= TURN {
                    let next = current.wrapping_add(1);
                    let place = self.word(TURNS);
                    // Otherwise another member did.
                    if place
                        .compare_exchange(current, next, Ordering::AcqRel, Ordering::Relaxed)
                        .is_ok()
                    {
                        self.changed();
                    }
                    *turn = Some((next, now));
                }
            }
            _ => *turn = Some((current, now)),
        }
        Ok(())
    }

    fn mark_idle(&self, row: usize, word: u64) {
        let idle = row_word(Weight(weight_of(word)), false, beat_of(word));
        if self
            .row(row)
            .compare_exchange(word, idle, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            self.changed();
        }
    }

    /// The share of `row`, in the form of [`Share::divided`].
    fn divide_now(&self, row: usize) -> u64 {
        // First of all: what changes from here on has another generation.
        let generation = self.word(GENERATION).load(Ordering::Acquire);
        let turn = self.word(TURNS).load(Ordering::Acquire);
        let turn = turn.wrapping_add(self.phase);
        let mut weights = [0; MEMBERS];
        for (weight, word) in weights.iter_mut().zip(self.rows()) {
            *weight = if is_active(word) { weight_of(word) } else { 0 };
        }
        let mut shares = [0; MEMBERS];
        divide(self.divisible(), turn, &weights, &mut shares);
        low(generation) << 32 | u64::from(shares[row])
    }

    /// What all members divide; never more than the queue has.
    fn divisible(&self) -> u32 {
        let entries = self.word(ENTRIES).load(Ordering::Relaxed);
        u32::try_from(entries)
            .unwrap_or(u32::MAX)
            .min(self.entries.get())
    }

    fn write_row(&self, row: usize, word: u64) {
        self.row(row).store(word, Ordering::Release);
        self.changed();
    }

    fn changed(&self) {
        self.word(GENERATION).fetch_add(1, Ordering::AcqRel);
    }

    fn check(&self) -> Result<(), SharesError> {
        if self.is_forked() {
            return Err(SharesError::Forked { path: self.path() });
        }
        self.file.check()
    }

    fn is_forked(&self) -> bool {
        getpid() != self.process
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.file.words()[index]
    }

    fn row(&self, row: usize) -> &AtomicU64 {
        self.word(ROWS + row)
    }

    fn rows(&self) -> impl Iterator<Item = u64> {
        self.file.words()[ROWS..ROWS + MEMBERS]
            .iter()
            .map(|row| row.load(Ordering::Acquire))
    }

    fn local(&self) -> MutexGuard<'_, Local> {
        lock(&self.local)
    }

    fn path(&self) -> PathBuf {
        self.file.path().into()
    }
}

/// A number that the name of a queue decides (FNV-1a).
fn phase(queue: &str) -> u64 {
    queue.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

const ACTIVE: u64 = 1 << 8;
const BEAT: u32 = 16;

fn row_word(weight: Weight, active: bool, beat: u64) -> u64 {
    u64::from(weight.0) | if active { ACTIVE } else { 0 } | beat << BEAT
}

/// Whatever stands in the row: 0 to 15.
fn weight_of(word: u64) -> u8 {
    (word & 0xf) as u8
}

fn is_active(word: u64) -> bool {
    word & ACTIVE != 0 && weight_of(word) != 0
}

fn beat_of(word: u64) -> u64 {
    word >> BEAT
}

fn low(generation: u64) -> u64 {
    generation & 0xffff_ffff
}

fn share_of(divided: u64) -> u32 {
    (divided & 0xffff_ffff) as u32
}

/// No code that holds one of these locks can panic half way through a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
