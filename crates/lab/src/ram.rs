//! Guest memory images: files of a given kind of content, and the comparison of two of them.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Bytes in a page of guest memory.
pub const PAGE: usize = 4096;

/// What to fill an image with.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Nothing: a sparse file.
    Zero,
    /// Noise that no method can compress.
    Random,
    /// Every kind of page in turn, in an order drawn from the seed: zero, text-like, noise, one byte repeated, half noise.
    Mixed,
    /// The contents of these files, over and over, each time round from another place in them.
    Files(Vec<PathBuf>),
}

/// Writes an image of `size` bytes; the same seed gives the same image. An existing file is replaced in place.
pub fn write(path: &Path, size: u64, fill: &Fill, seed: u64) -> Result<()> {
    let context = || format!("writing the memory image {}", path.display());
    let mut options = OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .with_context(context)?;
    file.set_len(size).with_context(context)?;
    let mut out = Image { file, left: size };
    match fill {
        Fill::Zero => Ok(()),
        Fill::Random => out
            .pages(&mut Noise::new(seed), |noise, page| noise.fill(page))
            .with_context(context),
        Fill::Mixed => out
            .pages(&mut Noise::new(seed), mixed_page)
            .with_context(context),
        Fill::Files(paths) => out.files(paths, seed).with_context(context),
    }
}

/// Files of this machine with realistic content (libraries, programs, texts), about `total` bytes of them in all, in the
/// same order every time.
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

/// How two images differ.
#[derive(Debug)]
pub enum Mismatch {
    /// Their sizes, in bytes.
    Size(u64, u64),
    /// Their contents.
    Pages {
        /// The number of the first page that differs.
        first: u64,
        /// How many pages differ.
        different: u64,
        /// How many pages there are.
        total: u64,
    },
    /// One of them could not be read.
    Unreadable(PathBuf, io::Error),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(a, b) => write!(f, "the memory images have {a} and {b} bytes"),
            Self::Pages {
                first,
                different,
                total,
            } => {
                let offset = first * PAGE as u64;
                write!(
                    f,
                    "{different} of {total} pages differ, the first is page {first} (offset {offset:#x})"
                )
            }
            Self::Unreadable(path, error) => write!(f, "reading {}: {error}", path.display()),
        }
    }
}

impl std::error::Error for Mismatch {}

/// Compares two whole images.
pub fn compare(a: &Path, b: &Path) -> Result<(), Mismatch> {
    let (mut a, mut b) = (Reader::open(a)?, Reader::open(b)?);
    if a.size != b.size {
        return Err(Mismatch::Size(a.size, b.size));
    }
    let total = a.size.div_ceil(PAGE as u64);
    let (mut page, mut first, mut different) = (0, None, 0);
    while page < total {
        let (left, right) = (a.next()?, b.next()?);
        if left == right {
            page += left.len().div_ceil(PAGE) as u64;
            continue;
        }
        for (left, right) in left.chunks(PAGE).zip(right.chunks(PAGE)) {
            if left != right {
                first.get_or_insert(page);
                different += 1;
            }
            page += 1;
        }
    }
    first.map_or(Ok(()), |first| {
        Err(Mismatch::Pages {
            first,
            different,
            total,
        })
    })
}

/// An image being written.
struct Image {
    file: File,
    left: u64,
}

impl Image {
    fn pages(&mut self, noise: &mut Noise, make: impl Fn(&mut Noise, &mut [u8])) -> Result<()> {
        let mut buffer = vec![0; BUFFER];
        while self.left > 0 {
            buffer.fill(0);
            buffer.chunks_mut(PAGE).for_each(|page| make(noise, page));
            self.put(&buffer)?;
        }
        Ok(())
    }

    fn files(&mut self, paths: &[PathBuf], seed: u64) -> Result<()> {
        let mut noise = Noise::new(seed);
        let mut buffer = vec![0; BUFFER];
        while self.left > 0 {
            let before = self.left;
            for path in paths {
                let context = || format!("reading {}", path.display());
                let mut file = File::open(path).with_context(context)?;
                let length = file.metadata().with_context(context)?.len();
                // The first half of the file at least is always taken.
                file.seek(SeekFrom::Start(noise.next() % (length / 2 + 1)))
                    .with_context(context)?;
                while self.left > 0 {
                    let read = file.read(&mut buffer).with_context(context)?;
                    if read == 0 {
                        break;
                    }
                    self.put(&buffer[..read])?;
                }
            }
            if self.left == before {
                bail!("there is nothing in the files to fill memory with");
            }
        }
        Ok(())
    }

    /// Writes these bytes, or as many of them as are still missing.
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let count = usize::try_from(self.left).map_or(bytes.len(), |left| left.min(bytes.len()));
        self.file.write_all(&bytes[..count])?;
        self.left -= count as u64;
        Ok(())
    }
}

fn mixed_page(noise: &mut Noise, page: &mut [u8]) {
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
    match noise.next() % 5 {
        0 => {}
        1 => {
            let mut rest = page;
            while !rest.is_empty() {
                let [choice, ..] = noise.next().to_le_bytes();
                let word = WORDS[usize::from(choice) % WORDS.len()];
                let count = word.len().min(rest.len());
                rest[..count].copy_from_slice(&word[..count]);
                rest = &mut rest[count..];
            }
        }
        2 => noise.fill(page),
        3 => {
            let [byte, ..] = noise.next().to_le_bytes();
            page.fill(byte);
        }
        _ => noise.fill(&mut page[PAGE / 2..]),
    }
}

/// Reproducible noise (the splitmix64 sequence).
struct Noise(u64);

impl Noise {
    fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes()[..word.len()]);
        }
    }
}

/// An image being read, a buffer at a time.
struct Reader {
    path: PathBuf,
    file: File,
    size: u64,
    buffer: Vec<u8>,
}

const BUFFER: usize = 1 << 20;

impl Reader {
    fn open(path: &Path) -> Result<Self, Mismatch> {
        let unreadable = |error| Mismatch::Unreadable(path.to_owned(), error);
        let file = File::open(path).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        Ok(Self {
            path: path.to_owned(),
            file,
            size,
            buffer: Vec::with_capacity(BUFFER),
        })
    }

    fn next(&mut self) -> Result<&[u8], Mismatch> {
        self.buffer.clear();
        let mut part = (&mut self.file).take(BUFFER as u64);
        match part.read_to_end(&mut self.buffer) {
            Ok(0) => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            other => other,
        }
        .map_err(|error| Mismatch::Unreadable(self.path.clone(), error))?;
        Ok(&self.buffer)
    }
}

/// The files below a directory that are neither tiny nor huge, with their sizes, in order of their paths. No links are
/// followed, what cannot be read is left out, and large trees are cut short.
fn files_below(root: &Path) -> Vec<(PathBuf, u64)> {
    const SIZES: std::ops::RangeInclusive<u64> = 4 << 10..=4 << 20;
    const ENOUGH: usize = 2000;
    let mut found = Vec::new();
    // A stack whose top is the next path in order.
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
    fn the_first_different_page_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let a = image(dir.path(), "a", &Fill::Random, 1);
        let b = image(dir.path(), "b", &Fill::Zero, 1);
        fs::copy(&a, &b).unwrap();
        compare(&a, &b).unwrap();
        let mut file = OpenOptions::new().write(true).open(&b).unwrap();
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
