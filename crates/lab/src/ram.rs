//! Images of guest memory: creation with given content, and comparison.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use thiserror::Error;

/// The size of a page of guest memory.
pub const PAGE: usize = 4096;

/// The content of an image.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Zeros, in a sparse file.
    Zero,
    /// Incompressible noise.
    Random,
    /// Pages of all kinds in a random order: zero, text-like, noise, one repeated byte, half noise.
    Mixed,
    /// The contents of these files, repeatedly, each time from another offset.
    Files(Vec<PathBuf>),
    /// A copy of this image, which has the same size.
    Image(PathBuf),
    /// Another content with this percentage of zero pages, in evenly spread runs of 256 KiB.
    WithZeros(u8, Box<Fill>),
}

/// Writes an image of `size` bytes. The same seed gives the same image. An existing file is overwritten.
pub fn write(path: &Path, size: u64, fill: &Fill, seed: u64) -> Result<()> {
    try_write(path, size, fill, seed)
        .with_context(|| format!("writing the memory image {}", path.display()))
}

fn try_write(path: &Path, size: u64, fill: &Fill, seed: u64) -> Result<()> {
    if let Fill::Image(image) = fill {
        let copied =
            fs::copy(image, path).with_context(|| format!("reading {}", image.display()))?;
        ensure!(copied == size, "{} has {copied} bytes", image.display());
        return Ok(());
    }
    let file = File::create(path)?;
    let mut random = Rng::with_seed(seed);
    match fill {
        Fill::Zero | Fill::Image(_) => {}
        Fill::Random => pages(&file, size, |page| random.fill(page))?,
        Fill::Mixed => pages(&file, size, |page| mixed_page(&mut random, page))?,
        Fill::Files(paths) => files(&file, size, paths, &mut random)?,
        Fill::WithZeros(percent, of) => {
            try_write(path, size, of, seed)?;
            zero_runs(&file, size, *percent)?;
        }
    }
    Ok(file.set_len(size)?)
}

/// Overwrites this percentage of an image with zeros.
fn zero_runs(image: &File, size: u64, percent: u8) -> io::Result<()> {
    const RUN: usize = 256 << 10;
    let due = |runs: u64| runs * u64::from(percent.min(100)) / 100;
    let mut runs = (0..size.div_ceil(RUN as u64)).filter(|&run| due(run + 1) > due(run));
    runs.try_for_each(|run| image.write_all_at(&[0; RUN], run * RUN as u64))
}

/// Files of this machine with realistic content (libraries, programs, texts), about `total` bytes in all, always in the same order.
pub fn host_files(total: u64) -> Result<Vec<PathBuf>> {
    let roots = ["/usr/lib/x86_64-linux-gnu", "/usr/bin", "/usr/share"];
    let mut lists: Vec<_> = roots
        .iter()
        .map(|root| files_below(Path::new(root)).into_iter())
        .collect();
    let (mut chosen, mut bytes) = (Vec::new(), 0);
    while bytes < total {
        let before = bytes;
        for (path, size) in lists.iter_mut().filter_map(Iterator::next) {
            if bytes < total {
                bytes += size;
                chosen.push(path);
            }
        }
        if bytes == before {
            break;
        }
    }
    if chosen.is_empty() {
        bail!("no files to fill memory with in {}", roots.join(", "));
    }
    Ok(chosen)
}

/// Why two images are not equal.
#[derive(Debug, Error)]
pub enum Mismatch {
    /// Different sizes, in bytes.
    #[error("the memory images have {0} and {1} bytes")]
    Size(u64, u64),
    /// Different contents.
    #[error(
        "{different} of {total} pages differ, the first is page {first} (offset {:#x})",
        first * PAGE as u64
    )]
    Pages {
        /// The number of the first page that differs.
        first: u64,
        /// The number of pages that differ.
        different: u64,
        /// The number of all pages.
        total: u64,
    },
    /// An image could not be read.
    #[error("reading {}", .0.display())]
    Unreadable(PathBuf, #[source] io::Error),
}

/// Compares two images.
pub fn compare(a: &Path, b: &Path) -> Result<(), Mismatch> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |error| Mismatch::Unreadable(path.clone(), error)
    };
    let (of_a, of_b) = (unreadable(a), unreadable(b));
    let (a, b) = (File::open(a).map_err(&of_a)?, File::open(b).map_err(&of_b)?);
    let size = a.metadata().map_err(&of_a)?.len();
    let other = b.metadata().map_err(&of_b)?.len();
    if size != other {
        return Err(Mismatch::Size(size, other));
    }
    let mut a = BufReader::with_capacity(BUFFER, a);
    let mut b = BufReader::with_capacity(BUFFER, b);
    let (mut left, mut right) = ([0; PAGE], [0; PAGE]);
    let total = size / PAGE as u64;
    let (mut first, mut different) = (None, 0);
    for page in 0..total {
        a.read_exact(&mut left).map_err(&of_a)?;
        b.read_exact(&mut right).map_err(&of_b)?;
        if left != right {
            first.get_or_insert(page);
            different += 1;
        }
    }
    match first {
        None => Ok(()),
        Some(first) => Err(Mismatch::Pages {
            first,
            different,
            total,
        }),
    }
}

const BUFFER: usize = 1 << 20;

/// Writes pages until there are `size` bytes.
fn pages(image: &File, size: u64, mut make: impl FnMut(&mut [u8])) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER, image);
    for _ in 0..size.div_ceil(PAGE as u64) {
        let mut page = [0; PAGE];
        make(&mut page);
        out.write_all(&page)?;
    }
    out.flush()
}

/// Writes parts of the files until there are `size` bytes.
fn files(mut image: &File, size: u64, paths: &[PathBuf], random: &mut Rng) -> Result<()> {
    let mut left = size;
    while left > 0 {
        let before = left;
        for path in paths {
            let context = || format!("reading {}", path.display());
            let mut file = File::open(path).with_context(context)?;
            let length = file.metadata().with_context(context)?.len();
            // At least the first half of the file is used.
            file.seek(SeekFrom::Start(random.u64(..=length / 2)))
                .with_context(context)?;
            left -= io::copy(&mut file.take(left), &mut image).with_context(context)?;
        }
        if left == before {
            bail!("there is nothing in the files to fill memory with");
        }
    }
    Ok(())
}

fn mixed_page(random: &mut Rng, page: &mut [u8]) {
    const WORDS: [&[u8]; 8] = [
        b"guest ",
        b"memory ",
        b"moves ",
        b"from ",
        b"one ",
        b"host ",
        b"to another, ",
        b"and nobody notices.\n",
    ];
    match random.u8(..5) {
        0 => {}
        1 => {
            let mut rest = page;
            while !rest.is_empty() {
                let word = WORDS[random.usize(..WORDS.len())];
                let count = word.len().min(rest.len());
                rest[..count].copy_from_slice(&word[..count]);
                rest = &mut rest[count..];
            }
        }
        2 => random.fill(page),
        3 => page.fill(random.u8(..)),
        _ => random.fill(&mut page[PAGE / 2..]),
    }
}

/// The files below a directory that are neither tiny nor huge, with their sizes, sorted by path. Does not follow links, skips
/// unreadable files, and truncates large trees.
fn files_below(root: &Path) -> Vec<(PathBuf, u64)> {
    const SIZES: std::ops::RangeInclusive<u64> = 4 << 10..=4 << 20;
    const ENOUGH: usize = 2000;
    let mut found = Vec::new();
    // A stack with the next path on top.
    let mut pending = vec![root.to_owned()];
    while let Some(path) = pending.pop() {
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        if metadata.is_dir() {
            let entries = fs::read_dir(&path).into_iter().flatten().flatten();
            let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
            paths.sort_unstable_by(|a, b| b.cmp(a));
            pending.append(&mut paths);
        } else if metadata.is_file() && SIZES.contains(&metadata.len()) && File::open(&path).is_ok()
        {
            found.push((path, metadata.len()));
            if found.len() == ENOUGH {
                break;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 3 << 20;

    fn image(dir: &Path, name: &str, fill: &Fill, seed: u64) -> PathBuf {
        let path = dir.join(name);
        write(&path, SIZE, fill, seed).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), SIZE);
        path
    }

    #[test]
    fn a_seed_gives_the_same_image_again() {
        let dir = tempfile::tempdir().unwrap();
        let files = Fill::Files(host_files(1 << 20).unwrap());
        for fill in [Fill::Random, Fill::Mixed, files] {
            let a = image(dir.path(), "a", &fill, 1);
            let b = image(dir.path(), "b", &fill, 1);
            let c = image(dir.path(), "c", &fill, 2);
            compare(&a, &b).unwrap();
            assert!(
                matches!(compare(&a, &c), Err(Mismatch::Pages { .. })),
                "{fill:?}"
            );
        }
    }

    #[test]
    fn an_image_is_copied_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let a = image(dir.path(), "a", &Fill::Mixed, 1);
        let copy = Fill::Image(a.clone());
        compare(&a, &image(dir.path(), "b", &copy, 2)).unwrap();
        let error = write(&dir.path().join("c"), SIZE / 2, &copy, 2).unwrap_err();
        assert!(
            format!("{error:#}").contains("has 3145728 bytes"),
            "{error:#}"
        );
    }

    #[test]
    fn mixed_images_have_zero_pages_and_others() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = fs::read(image(dir.path(), "a", &Fill::Mixed, 7)).unwrap();
        let zero = bytes
            .chunks(PAGE)
            .filter(|page| page.iter().all(|&byte| byte == 0))
            .count();
        assert!(zero > 100 && zero < 300, "{zero} of 768");
    }

    #[test]
    fn so_many_percent_of_the_pages_are_zero() {
        let dir = tempfile::tempdir().unwrap();
        for percent in [0, 10, 50, 100] {
            let fill = Fill::WithZeros(percent, Box::new(Fill::Random));
            let path = dir.path().join("a");
            write(&path, 100 << 20, &fill, 1).unwrap();
            let bytes = fs::read(&path).unwrap();
            let pages = bytes.chunks(PAGE);
            let zero = pages
                .filter(|page| page.iter().all(|&byte| byte == 0))
                .count();
            assert_eq!(zero, 25600 * usize::from(percent) / 100);
        }
    }

    #[test]
    fn the_first_different_page_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let a = image(dir.path(), "a", &Fill::Random, 1);
        let b = image(dir.path(), "b", &Fill::Zero, 1);
        fs::copy(&a, &b).unwrap();
        compare(&a, &b).unwrap();
        let mut file = File::options().write(true).open(&b).unwrap();
        for page in [300, 301, 767] {
            file.seek(SeekFrom::Start(page * PAGE as u64 + 17)).unwrap();
            file.write_all(&[1, 2, 3]).unwrap();
        }
        let Err(Mismatch::Pages {
            first,
            different,
            total,
        }) = compare(&a, &b)
        else {
            panic!("not found")
        };
        assert_eq!((first, different, total), (300, 3, 768));
    }

    #[test]
    fn sizes_and_missing_files_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let a = image(dir.path(), "a", &Fill::Zero, 1);
        let b = dir.path().join("b");
        assert!(matches!(compare(&a, &b), Err(Mismatch::Unreadable(path, _)) if path == b));
        write(&b, SIZE + 1, &Fill::Zero, 1).unwrap();
        assert!(matches!(compare(&a, &b), Err(Mismatch::Size(..))));
    }
}
