//! The command line, and the data that guests are filled with.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use lab::ram;
use lab::vamoose::program;
use tempfile::TempDir;
use zstd_safe::get_error_name;

/// Measure what Vamoose costs beside stock QEMU, and check the project's criteria
#[derive(Parser, Debug)]
#[command(name = "figures", max_term_width = 100)]
pub(crate) struct Options {
    /// Memory of the large guest that does not run; a third of it and less on links
    #[arg(long, value_name = "SIZE", default_value = "3G", value_parser = size)]
    pub(crate) ram: u64,
    /// Number of rounds, in each of which every case runs once; twice as many and one more for downtimes
    #[arg(long, value_name = "N", default_value = "3")]
    pub(crate) runs: NonZeroUsize,
    /// Pages that the guest that runs rewrites per second
    #[arg(long, value_name = "N", default_value_t = 4000)]
    pub(crate) dirty_rate: u32,
    /// Write the figures as JSON too
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Program to measure, with the vamoose-demo beside it [default: those beside this program]
    #[arg(long, value_name = "PROGRAM")]
    vamoose: Option<PathBuf>,
    /// Files that fill the guest, plain or .zst, such as the Silesia corpus [default: files of this host]
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    /// Only cases whose name contains this, such as cpu/ or downtime/direct-none (repeatable)
    ///
    /// Cases links/... run only when they are named.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
}

/// The files that guests are filled with.
pub(crate) struct Corpus {
    /// All of them, uncompressed.
    pub(crate) files: Vec<PathBuf>,
    _unpacked: TempDir,
}

impl Options {
    /// The program to measure.
    pub(crate) fn vamoose(&self) -> Result<PathBuf> {
        program(self.vamoose.as_deref(), "vamoose")
    }

    /// The demo beside it.
    pub(crate) fn demo(&self, vamoose: &Path) -> Result<PathBuf> {
        program(
            Some(&vamoose.with_file_name("vamoose-demo")),
            "vamoose-demo",
        )
    }

    /// Whether a case is wanted.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| name.contains(only))
    }

    /// Whether a case that takes long is wanted.
    pub(crate) fn names(&self, name: &str) -> bool {
        !self.only.is_empty() && self.wants(name)
    }

    /// What the guests' content is called in names of cases.
    pub(crate) fn content_name(&self) -> &str {
        let folder = self.corpus.as_deref().and_then(Path::file_name);
        folder.and_then(|name| name.to_str()).unwrap_or("files")
    }

    /// Whether only some cases are wanted.
    pub(crate) fn is_choosy(&self) -> bool {
        !self.only.is_empty()
    }

    /// Where the guests' content comes from, for the report.
    pub(crate) fn corpus_name(&self) -> String {
        match &self.corpus {
            Some(dir) => dir.display().to_string(),
            None => "files of this host".to_owned(),
        }
    }

    /// Unpacks the files for the guests.
    pub(crate) fn corpus(&self) -> Result<Corpus> {
        let unpacked = TempDir::new().context("creating a temporary directory")?;
        let files = match &self.corpus {
            Some(dir) => unpack(dir, unpacked.path())?,
            None => ram::host_files(256 << 20)?,
        };
        Ok(Corpus {
            files,
            _unpacked: unpacked,
        })
    }
}

/// The files in `dir`, those that are compressed as copies in `to`.
fn unpack(dir: &Path, to: &Path) -> Result<Vec<PathBuf>> {
    let context = || format!("reading {}", dir.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).with_context(context)? {
        let path = entry.with_context(context)?.path();
        if path.extension().is_some_and(|extension| extension == "zst") {
            let name = path.file_stem().with_context(context)?;
            let plain = to.join(name);
            let packed = fs::read(&path).with_context(context)?;
            let content = decompress(&packed).with_context(|| path.display().to_string())?;
            fs::write(&plain, content).context("writing the unpacked corpus")?;
            files.push(plain);
        } else if path.is_file() {
            files.push(path);
        }
    }
    ensure!(!files.is_empty(), "{} has no files", dir.display());
    // The order decides what is in which page.
    files.sort();
    Ok(files)
}

fn decompress(packed: &[u8]) -> Result<Vec<u8>> {
    let size = zstd_safe::get_frame_content_size(packed).ok().flatten();
    let size = size.context("not a zstd file that tells its size")?;
    let mut content = Vec::with_capacity(usize::try_from(size)?);
    match zstd_safe::decompress(&mut content, packed) {
        Ok(_) => Ok(content),
        Err(code) => bail!("{}", get_error_name(code)),
    }
}

/// The memory of a guest: a number of bytes with k, M or G.
fn size(text: &str) -> Result<u64> {
    /// Less is a forgotten unit.
    const MIN: u64 = 1 << 20;
    let units = [("k", 10), ("M", 20), ("G", 30)];
    let with_unit = |(unit, shift)| Some((text.strip_suffix(unit)?, shift));
    let (digits, shift) = units.into_iter().find_map(with_unit).unwrap_or((text, 0));
    let number: u64 = digits
        .parse()
        .with_context(|| format!("`{text}` is not a size such as 512M"))?;
    let size = number
        .checked_mul(1 << shift)
        .with_context(|| format!("{text} is too large"))?;
    ensure!(
        size >= MIN,
        "{size} bytes are too small for a guest: append a unit, as in 512M or 3G"
    );
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("3G").unwrap(), 3 << 30);
        assert_eq!(size("256M").unwrap(), 256 << 20);
        assert_eq!(size("1048576").unwrap(), 1 << 20);
        for bad in ["", "2048", "G", "1.5G", "3g", "99999999999G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_corpus_may_be_packed_in_part() {
        let (dir, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let mut packed = Vec::with_capacity(1000);
        zstd_safe::compress(&mut packed, b"packed", 1).unwrap();
        fs::write(dir.path().join("a.zst"), packed).unwrap();
        fs::write(dir.path().join("b"), "plain").unwrap();
        let files = unpack(dir.path(), to.path()).unwrap();
        let contents = files.iter().map(|file| fs::read(file).unwrap());
        let mut contents: Vec<_> = contents.collect();
        contents.sort();
        assert_eq!(contents, [b"packed".to_vec(), b"plain".to_vec()]);
    }
}
