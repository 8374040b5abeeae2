//! Files that fill the memory of guests.

use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use lab::qemu::Binary;
use lab::ram::{self, Fill};

use crate::scenario::Guest;

/// Files to fill guests with.
pub(crate) struct Corpus {
    /// Description for the report.
    pub(crate) name: String,
    files: Vec<PathBuf>,
}

/// Bytes of this host's files, where there is no corpus.
const SAMPLE: u64 = 256 << 20;

impl Corpus {
    /// Opens a folder; without one, the Silesia corpus if `scripts/corpus` has fetched it, else files of this host.
    pub(crate) fn open(folder: Option<&Path>) -> Result<Self> {
        let silesia = lab::target_dir().join("corpus/silesia");
        let (name, files) = match folder {
            Some(folder) => (folder.display().to_string(), files_in(folder)?),
            None if silesia.is_dir() => {
                let name = "files of the Silesia corpus".to_owned();
                (name, files_in(&silesia)?)
            }
            None => {
                let name = "files of this host, as there is no Silesia corpus".to_owned();
                (name, ram::host_files(SAMPLE)?)
            }
        };
        Ok(Self { name, files })
    }

    /// Content for this guest's memory of `ram` bytes; `None` for nothing. `qemu` runs a real guest, if that
    /// has not been done before.
    pub(crate) fn fill(&self, guest: Guest, qemu: &Binary, ram: u64) -> Result<Option<Fill>> {
        if let Some(real) = guest.real() {
            return Ok(Some(Fill::Image(real.memory(qemu, ram)?)));
        }
        let files = || Box::new(Fill::Files(self.files.clone()));
        Ok(Some(match guest {
            Guest::Silesia => Fill::WithZeros(10, files()),
            Guest::HalfZero => Fill::WithZeros(50, files()),
            Guest::Random => Fill::Random,
            _ => return Ok(None),
        }))
    }
}

fn files_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> io::Result<Vec<PathBuf>> {
        let entries = fs::read_dir(dir)?.map(|entry| Ok(entry?.path()));
        entries.collect()
    };
    let mut files = read().with_context(|| format!("reading {}", dir.display()))?;
    files.retain(|path| path.is_file());
    ensure!(!files.is_empty(), "{} has no files", dir.display());
    // The order determines the content of each page.
    files.sort();
    Ok(files)
}
