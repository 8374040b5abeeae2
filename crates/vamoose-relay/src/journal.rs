//! This host's record of migration attempts, from which a restarted process continues them.
//!
//! ```text
//!  STATE-DIR/source-ID.json          one attempt of which this host is the source
//!  STATE-DIR/destination-ID.json     one attempt of which this host is the destination
//!  STATE-DIR/*.lock                  held by the process that drives the attempt
//!  STATE-DIR/.*                      left by a process that was killed while it wrote an entry; ignored
//! ```
//!
//! An entry is replaced as a whole and is on disk when [`Entry::write`] returns. The folder belongs to one user, and
//! no other user may look into it: anyone who knows an attempt's id can end the attempt. By default it is in /run, which is
//! cleared at boot, as the guests are.

mod record;

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use handover::AttemptId;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use thiserror::Error;
use tracing::debug;
use vamoose_link::{NewFile, millis};

pub(crate) use record::{AtDestination, AtSource, Record, Side};

/// The attempts of one host.
#[derive(Clone, Debug)]
pub struct Journal {
    dir: PathBuf,
}

/// The journal cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum JournalError {
    #[error("cannot use the state folder {}", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    /// Other users could read or change what is in it.
    #[error(
        "the state folder {} belongs to user {owner} with mode {mode:03o}: it must belong to user {user} with mode 700",
        dir.display()
    )]
    Permissions {
        dir: PathBuf,
        owner: u32,
        mode: u32,
        user: u32,
    },
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    #[error("cannot write {}", .0.display())]
    Write(PathBuf, #[source] io::Error),
    #[error("{} is not an entry of this release; move it away if its attempt is settled", .0.display())]
    Malformed(PathBuf, #[source] serde_json::Error),
    #[error("attempt {0} is being driven by another process")]
    Driven(AttemptId),
}

/// An attempt that this process drives.
#[derive(Debug)]
pub(crate) struct Entry<S: Side> {
    /// The record to be written by [`Entry::write`].
    pub(crate) record: Record<S>,
    path: PathBuf,
    /// Keeps other processes from driving the attempt.
    _lock: File,
}

/// How long, in milliseconds, a finished attempt is remembered after its QEMU has ended, for late commands: a day.
const REMEMBERED_MS: u64 = 24 * 3600 * 1000;

impl Journal {
    /// Uses the folder `dir`, and creates it if necessary.
    ///
    /// # Errors
    /// When it cannot be used, or is open to other users.
    pub fn open(dir: &Path) -> Result<Self, JournalError> {
        let folder = |error| JournalError::Folder(dir.to_owned(), error);
        let mut builder = fs::DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(folder)?;
        let found = fs::symlink_metadata(dir).map_err(folder)?;
        if !found.is_dir() {
            return Err(folder(io::ErrorKind::NotADirectory.into()));
        }
        let (owner, mode) = (found.uid(), found.mode() & 0o777);
        let user = rustix::process::geteuid().as_raw();
        if owner != user || mode & 0o077 != 0 {
            return Err(JournalError::Permissions {
                dir: dir.to_owned(),
                owner,
                mode,
                user,
            });
        }
        Ok(Self {
            dir: dir.to_owned(),
        })
    }

    /// All attempts of a role, the oldest first. Fails if any cannot be read: it may be the one that matters.
    pub(crate) fn records<S: Side>(&self) -> Result<Vec<Record<S>>, JournalError> {
        let folder = |error| JournalError::Folder(self.dir.clone(), error);
        let mut records = Vec::new();
        for file in fs::read_dir(&self.dir).map_err(folder)? {
            let path = file.map_err(folder)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(S::ROLE)
                && name.ends_with(".json")
                && let Some(record) = read::<S>(&path)?
            {
                records.push(record);
            }
        }
        records.sort_by_key(|record| (record.began, record.attempt));
        Ok(records)
    }

    /// The attempt with this id, if it is in the journal.
    pub(crate) fn find<S: Side>(
        &self,
        attempt: AttemptId,
    ) -> Result<Option<Record<S>>, JournalError> {
        read(&self.path::<S>(attempt))
    }

    /// Takes an attempt for this process to drive, a new or a recorded one. Nothing is written yet. A recorded attempt is
    /// read again, as another process may have changed it before.
    pub(crate) fn claim<S: Side>(&self, record: Record<S>) -> Result<Entry<S>, JournalError> {
        let path = self.path::<S>(record.attempt);
        let lock_path = path.with_extension("lock");
        let failed = |error| JournalError::Write(lock_path.clone(), error);
        let mut options = File::options();
        options.write(true).create(true).truncate(false).mode(0o600);
        let lock = options.open(&lock_path).map_err(failed)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(JournalError::Driven(record.attempt)),
            Err(error) => return Err(failed(error.into())),
        }
        let record = read(&path)?.unwrap_or(record);
        Ok(Entry {
            record,
            path,
            _lock: lock,
        })
    }

    /// Whether some process drives this attempt.
    pub(crate) fn is_driven<S: Side>(&self, attempt: AttemptId) -> bool {
        let path = self.path::<S>(attempt).with_extension("lock");
        let lock = File::open(path);
        lock.is_ok_and(|lock| {
            flock(&lock, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
        })
    }

    /// Removes attempts that began over a day ago, are over, and whose QEMU has ended.
    pub(crate) fn clean_up<S: Side>(&self) {
        let Ok(records) = self.records::<S>() else {
            return;
        };
        let long_ago = now().saturating_sub(REMEMBERED_MS);
        for record in records {
            if record.is_over() && record.began < long_ago && record.qemu.is_gone() {
                let path = self.path::<S>(record.attempt);
                debug!("forgetting attempt {}", record.attempt);
                // A failure is retried the next time.
                let _ = fs::remove_file(&path);
                let _ = fs::remove_file(path.with_extension("lock"));
            }
        }
    }

    fn path<S: Side>(&self, attempt: AttemptId) -> PathBuf {
        self.dir.join(format!("{}-{attempt}.json", S::ROLE))
    }
}

impl<S: Side> Entry<S> {
    /// Writes the record. When this returns, the record survives a crash of the process and of the host, as far as the
    /// folder's file system does. On failure, the earlier record remains.
    pub(crate) fn write(&self) -> Result<(), JournalError> {
        let failed = |error| JournalError::Write(self.path.clone(), error);
        self.replace().map_err(failed)
    }

    fn replace(&self) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(&self.record)?;
        text.push(b'\n');
        let new = NewFile::create(&self.path)?;
        new.file().write_all(&text)?;
        new.replace()
    }
}

/// Milliseconds since the epoch.
pub(crate) fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    millis(now.unwrap_or_default())
}

fn read<S: Side>(path: &Path) -> Result<Option<Record<S>>, JournalError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(JournalError::Read(path.to_owned(), error)),
    };
    let malformed = |error| JournalError::Malformed(path.to_owned(), error);
    serde_json::from_slice(&text).map(Some).map_err(malformed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use handover::{Incarnation, SourceState};

    use super::*;
    use crate::Instance;

    fn record(byte: u8, began: u64) -> Record<AtSource> {
        Record {
            attempt: AttemptId([byte; 16]),
            began,
            name: "vm".to_owned(),
            qemu: Instance::unknown(Path::new("/nowhere")),
            side: AtSource {
                to: "tcp:there:4440".to_owned(),
                resume: true,
                held: false,
                confirmed: false,
            },
            state: SourceState::Moving {
                incarnation: Some(Incarnation([7; 16])),
            },
        }
    }

    fn journal() -> (tempfile::TempDir, Journal) {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(&dir.path().join("state")).unwrap();
        (dir, journal)
    }

    #[test]
    fn written_entries_are_read_back() {
        let (_dir, journal) = journal();
        for (byte, began) in [(2, 5), (1, 9), (3, 1)] {
            let mut entry = journal.claim(record(byte, began)).unwrap();
            entry.write().unwrap();
            entry.record.state = SourceState::Over {
                guest: handover::GuestLocation::Source,
                cause: Some("no".to_owned()),
            };
            entry.write().unwrap();
        }
        let records: Vec<Record<AtSource>> = journal.records().unwrap();
        let began: Vec<u64> = records.iter().map(|record| record.began).collect();
        assert_eq!(began, [1, 5, 9]);
        assert!(records.iter().all(Record::is_over));
        assert!(journal.records::<AtDestination>().unwrap().is_empty());
        let found: Record<AtSource> = journal.find(AttemptId([2; 16])).unwrap().unwrap();
        assert_eq!(found.began, 5);
    }

    #[test]
    fn format_of_an_entry_does_not_change() {
        let id = "01".repeat(16);
        let text = format!(
            r#"{{"attempt":"{id}","began":1,"name":"vm","to":"tcp:there:4440","qemu":{{"monitor":"/nowhere",
            "process":null,"uuid":"","socket":null}},"resume":true,"confirmed":false,"phase":"moving",
            "incarnation":"{}"}}"#,
            "07".repeat(16)
        );
        let found: Record<AtSource> = serde_json::from_str(&text).unwrap();
        assert_eq!(found, record(1, 1));
        let old: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_value(&found).unwrap(), old);
    }

    #[test]
    fn only_one_process_drives_an_attempt() {
        let (_dir, journal) = journal();
        let id = AttemptId([1; 16]);
        assert!(!journal.is_driven::<AtSource>(id));
        let mut entry = journal.claim(record(1, 1)).unwrap();
        entry.record.side.confirmed = true;
        entry.write().unwrap();
        assert!(journal.is_driven::<AtSource>(id));
        let again = journal.claim(record(1, 1));
        assert!(
            matches!(again, Err(JournalError::Driven(attempt)) if attempt == id),
            "{again:?}"
        );
        drop(entry);
        // A child that another test starts at this moment has the lock too, until it runs its program.
        while journal.is_driven::<AtSource>(id) {
            std::thread::yield_now();
        }
        // What another process wrote before counts.
        assert!(journal.claim(record(1, 1)).unwrap().record.side.confirmed);
    }

    #[test]
    fn folder_open_to_other_users_is_refused() {
        let (dir, _) = journal();
        let state = dir.path().join("state");
        let mode = fs::metadata(&state).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        for mode in [0o701, 0o770, 0o755] {
            fs::set_permissions(&state, fs::Permissions::from_mode(mode)).unwrap();
            let refused = Journal::open(&state);
            assert!(matches!(refused, Err(JournalError::Permissions { .. })));
        }
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&state, &link).unwrap();
        assert!(matches!(
            Journal::open(&link),
            Err(JournalError::Folder(..))
        ));
    }

    #[test]
    fn malformed_entry_is_an_error() {
        let (dir, journal) = journal();
        let path = dir.path().join("state/source-00.json");
        fs::write(&path, "{}").unwrap();
        let records = journal.records::<AtSource>();
        assert!(matches!(records, Err(JournalError::Malformed(..))));
    }

    #[test]
    fn clean_up_removes_only_old_finished_attempts() {
        let (_dir, journal) = journal();
        let over = |mut record: Record<AtSource>| {
            record.state = SourceState::Over {
                guest: handover::GuestLocation::Destination,
                cause: None,
            };
            record
        };
        for record in [over(record(1, 1)), over(record(2, now())), record(3, 1)] {
            journal.claim(record).unwrap().write().unwrap();
        }
        journal.clean_up::<AtSource>();
        let left: Vec<Record<AtSource>> = journal.records().unwrap();
        let left: Vec<u8> = left.iter().map(|record| record.attempt.0[0]).collect();
        assert_eq!(left, [3, 2]);
    }
}
