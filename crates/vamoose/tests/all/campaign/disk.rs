//! Disks for journals, which can become full.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use lab::run;
use tempfile::TempDir;

use crate::campaign::sandbox;

/// The folder of a journal: if possible a separate file system, which can become full.
#[derive(Clone)]
pub(crate) struct Disk(Arc<TempDir>);

/// Enough for the journals of all experiments, and filled quickly.
const SIZE: &str = "16M";
const FILLING: &str = "filling";

impl Disk {
    pub(crate) fn new() -> Result<Self> {
        let dir = TempDir::new().context("creating a folder for a journal")?;
        if sandbox::has_namespaces() {
            // Unmounted with the namespace.
            let options = format!("size={SIZE},mode=700");
            let mut mount = Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", &options, "faults"]);
            run(mount.arg(dir.path()))?;
        }
        Ok(Self(Arc::new(dir)))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Fills the disk except for `pages` pages. Does nothing without a separate file system.
    pub(crate) fn fill(&self, pages: u64) -> Result<()> {
        if !sandbox::has_namespaces() {
            return Ok(());
        }
        let stat = rustix::fs::statvfs(self.path()).context("asking for the room on a disk")?;
        let bytes = stat.f_bavail.saturating_sub(pages) * stat.f_frsize;
        let file = File::create(self.path().join(FILLING)).context("filling a disk")?;
        let flags = rustix::fs::FallocateFlags::empty();
        if bytes > 0 {
            rustix::fs::fallocate(&file, flags, 0, bytes).context("filling a disk")?;
        }
        Ok(())
    }

    /// Undoes [`Disk::fill`].
    pub(crate) fn free(&self) {
        // The disk may not be full.
        let _ = fs::remove_file(self.path().join(FILLING));
    }
}
