//! Snapshots: a guest that goes to a file, and comes from one.
//!
//! Memory is found, searched for zeros, encoded and checked as in a migration. A snapshot is written under a temporary name and gets its
//! own only when it is complete and on the disk, so an interrupted write leaves an older snapshot of the same name whole; writing
//! begins anew then. It is restored at once, or on demand: then the guest runs before its memory is there, as in a post-copy, and each
//! page is read when it is touched, or in the background behind that.
//!
//! Whatever is damaged in a file is found. [`Snapshot::open`] checks that the file is complete and what it holds;
//! [`Snapshot::restore`] checks all pages before the guest runs. [`Snapshot::restore_on_demand`] checks a page when it is needed, so that
//! damage is found while the guest runs: [`Snapshot::verify`] finds it before. With a [`FileKey`], the file is also encrypted, and cannot
//! be changed or exchanged in parts without the key.
//!
//! ```
//! # use std::sync::Arc;
//! # use vamoose_live::{DestinationGuest, GuestError, Ram, RamBlock, SourceGuest, snapshot::{Snapshot, SnapshotOptions}};
//! # struct Vm;
//! # impl SourceGuest for Vm {
//! #     fn pause(&mut self) -> Result<(), GuestError> { Ok(()) }
//! #     fn resume(&mut self) -> Result<(), GuestError> { Ok(()) }
//! #     fn save(&mut self) -> Result<Vec<u8>, GuestError> { Ok(vec![1]) }
//! # }
//! # impl DestinationGuest for Vm {
//! #     fn load(&mut self, _: &[u8]) -> Result<(), GuestError> { Ok(()) }
//! #     fn resume(&mut self) -> Result<(), GuestError> { Ok(()) }
//! # }
//! # fn ram() -> Result<Ram, GuestError> {
//! #     let memory = Arc::new(vm_memory::MmapRegion::<()>::new(1 << 20)?);
//! #     Ok(Ram::new(vec![RamBlock::new("ram", memory)?])?)
//! # }
//! # fn main() -> Result<(), GuestError> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("guest");
//! # let (mut vm, mut other_vm) = (Vm, Vm);
//! Snapshot::write(&path, &ram()?, &mut vm, &SnapshotOptions::default())?;
//! Snapshot::open(&path, None)?.restore(&ram()?, &mut other_vm)?;
//! # Ok(())
//! # }
//! ```

mod format;
mod restore;
mod write;

use std::{
    fs::File,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use handover::GuestLocation;
use multifd::{LayoutError, Method};
use thiserror::Error;
use vamoose_codec::{DecodeError, EncodeError, Engines, Settings};
use vamoose_link::FileKey;

use crate::{
    GuestError, Ram, RamError, SourceGuest,
    dirty::{DirtyLog, DirtyLogError},
    error::Mismatch,
    missing::MissingPagesError,
};
pub use restore::Snapshot;

/// How a [`Snapshot`] is written.
#[derive(Clone)]
pub struct SnapshotOptions {
    /// How pages are encoded: by zstd-frames, lz4, qpl, qatzip or none.
    pub engines: Engines,
    /// Encrypts the file.
    pub key: Option<FileKey>,
    /// Finds the pages that the guest writes, so that it runs while most of its memory is written. Without, it is paused for
    /// all of it.
    pub log: Option<Arc<dyn DirtyLog>>,
    /// Whether the guest goes on. It stays paused otherwise, to be ended. It goes on after a failure in any case, unless it was
    /// [paused](SourceGuest::is_running) before.
    pub resume: bool,
}

impl Default for SnapshotOptions {
    /// By zstd-frames, not encrypted, of a guest that is paused meanwhile and goes on.
    fn default() -> Self {
        Self {
            engines: Engines::software(Settings::new(Method::ZstdFrames, None).unwrap_or_default()),
            key: None,
            log: None,
            resume: true,
        }
    }
}

/// What became of a snapshot that was written.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Written {
    /// Length of the file.
    pub bytes: u64,
    /// How long the guest was paused.
    pub downtime: Duration,
}

/// What became of a snapshot that was restored.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Restored {
    /// Until the guest ran.
    pub resumed_after: Duration,
    /// Until all of its memory was there.
    pub total_time: Duration,
}

/// A snapshot that was not written, or not restored.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SnapshotError {
    #[error("the host is out of a resource")]
    System(#[from] io::Error),
    #[error("the guest's memory")]
    Ram(#[from] RamError),
    #[error("snapshot {}: {what} failed", path.display())]
    File {
        path: PathBuf,
        what: &'static str,
        source: io::Error,
    },
    #[error("the snapshot cannot be read")]
    Read(#[source] io::Error),
    #[error("the file is no snapshot of a guest, or it was cut short")]
    NotASnapshot,
    #[error("the snapshot has version {version} of the format, which this release does not read")]
    Version { version: u32 },
    #[error("the snapshot was cut short")]
    Truncated,
    #[error("the snapshot is encrypted: it takes its key")]
    KeyNeeded,
    #[error("the snapshot is not encrypted, so it is not one that was made with this key")]
    NotEncrypted,
    #[error("the snapshot is damaged, or encrypted with another key: its index is not right")]
    Index,
    #[error("the snapshot is damaged: its device state is not right")]
    State,
    #[error("the snapshot is damaged: its record {packet}, bytes {place:?}, is not right")]
    Record { packet: usize, place: Range<u64> },
    #[error("record {packet} of the snapshot cannot be decoded")]
    Decode { packet: usize, source: DecodeError },
    #[error("snapshot and guest are not of one configuration (the snapshot is the source)")]
    Mismatch(#[from] Mismatch),
    #[error("invalid sizes of pages or packets")]
    Layout(#[from] LayoutError),
    #[error("packets of method {method} are not independent: use zstd-frames, lz4 or none")]
    Method { method: Method },
    #[error("RAM block `{block}` is longer than a snapshot can hold")]
    Block { block: String },
    #[error("cannot encode pages")]
    Encode(#[from] EncodeError),
    #[error(transparent)]
    Log(#[from] DirtyLogError),
    /// The VMM could not do `what` to the guest.
    #[error("cannot {what} the guest")]
    Guest {
        what: &'static str,
        source: GuestError,
    },
    #[error("the guest cannot be restored on demand")]
    OnDemand(#[from] MissingPagesError),
    /// The guest runs, and pages of it cannot be read. Threads that touch one wait until the process ends: the guest has to be
    /// ended.
    #[error("the guest runs, and {pages} pages of its memory cannot be read: it has to be ended")]
    PagesLost {
        pages: usize,
        source: Box<SnapshotError>,
    },
}

impl SnapshotError {
    /// Whether the guest has run, and cannot go on: [`GuestLocation::Lost`] only with [`PagesLost`](Self::PagesLost).
    pub fn guest(&self) -> GuestLocation {
        match self {
            Self::PagesLost { .. } => GuestLocation::Lost,
            _ => GuestLocation::Source,
        }
    }

    fn file(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, what, source }
    }

    fn guest_call(what: &'static str) -> impl FnOnce(GuestError) -> Self {
        move |source| Self::Guest { what, source }
    }
}

impl Snapshot {
    /// Writes the memory `ram` and the device state of `guest` to the file `path`, which is replaced when the snapshot is complete.
    ///
    /// # Errors
    /// The guest goes on then, unless it cannot be resumed or was paused before, and the file `path` is as before.
    pub fn write(
        path: &Path,
        ram: &Ram,
        guest: &mut dyn SourceGuest,
        options: &SnapshotOptions,
    ) -> Result<Written, SnapshotError> {
        write::write(path, ram, guest, options)
    }

    /// Opens the snapshot `path`, which takes its `key` if it is encrypted.
    ///
    /// # Errors
    /// When the file is not a whole snapshot, or made with another key.
    pub fn open(path: &Path, key: Option<&FileKey>) -> Result<Self, SnapshotError> {
        let file = File::open(path).map_err(SnapshotError::file(path, "opening it"))?;
        Self::of_file(file, key)
    }
}
