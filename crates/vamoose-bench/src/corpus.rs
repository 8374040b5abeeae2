//! Files that fill the memory of guests.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use lab::ram::{self, Fill};
use tempfile::TempDir;
use zstd_safe::get_error_name;

use crate::scenario::Content;

/// Files to fill guests with.
pub(crate) struct Corpus {
    /// Description for the report.
    pub(crate) name: String,
    /// Paths, all uncompressed.
    files: Vec<PathBuf>,
    _unpacked: Option<TempDir>,
}

/// Bytes of this host's files, where there is no corpus.
const SAMPLE: u64 = 256 << 20;

impl Corpus {
    /// The files in a folder, plain or .zst; without a folder, Silesia if `scripts/corpus` has fetched it, else files of this
    /// host.
    pub(crate) fn open(folder: Option<&Path>) -> Result<Self> {
        let silesia = lab::target_dir().join("corpus/silesia");
        let (folder, name) = match folder {
            Some(folder) => (folder.to_owned(), folder.display().to_string()),
            None if silesia.is_dir() => (silesia, "files of the Silesia corpus".to_owned()),
            None => {
                return Ok(Self {
                    name: "files of this host, as there is no Silesia corpus".to_owned(),
                    files: ram::host_files(SAMPLE)?,
                    _unpacked: None,
                });
            }
        };
        let unpacked = TempDir::new().context("creating a temporary directory")?;
        Ok(Self {
            name,
            files: unpack(&folder, unpacked.path())?,
            _unpacked: Some(unpacked),
        })
    }

    /// What to fill a guest's memory with; `None` for nothing.
    pub(crate) fn fill(&self, content: Content) -> Option<Fill> {
        let files = || Box::new(Fill::Files(self.files.clone()));
        Some(match content {
            Content::Silesia => Fill::WithZeros(10, files()),
            Content::HalfZero => Fill::WithZeros(50, files()),
            Content::Random => Fill::Random,
            Content::Zero | Content::Untouched => return None,
        })
    }
}

/// The files in `dir`; compressed ones are unpacked into `to`.
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
    let size = size.context("not a zstd file with its size in the header")?;
    let mut content = Vec::with_capacity(usize::try_from(size)?);
    match zstd_safe::decompress(&mut content, packed) {
        Ok(_) => Ok(content),
        Err(code) => bail!("{}", get_error_name(code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
