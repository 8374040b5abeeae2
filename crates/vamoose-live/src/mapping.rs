//! What kind of memory a RAM block is, as the kernel sees it.
//!
//! Two things depend on the kind of memory, and go wrong without an error: whether a page without an entry in the page tables
//! holds zeros, and which advice of madvise(2) makes memory zero. The address and the file that the VMM
//! names do not determine the kind: memory may be shared without a file, a file may be mapped privately, pages may be huge, and a
//! userfaultfd may fill pages from a snapshot.

use std::{fs, io, ops::Range};

use rustix::fs::{FsWord, fstat, fstatfs, major, minor};
use vm_memory::FileOffset;

use crate::{
    Ram, RamBlock,
    sys::{procmap::Procmap, userfaultfd::Userfaultfd},
};

/// The content of pages that are not in the page tables, and how memory is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// Private memory without a file: a page without an entry holds zeros and belongs to this process alone.
    Anonymous {
        /// Bytes in a page, more than the system's in hugetlb.
        page_size: usize,
    },
    /// The block's file, in tmpfs, mapped shared: writes go to the file.
    SharedFile,
    /// Memory as in tmpfs, for which the VMM has named no file: shared without a file, or the file is closed.
    SharedMemory,
    /// hugetlbfs, mapped shared.
    SharedHuge {
        /// Bytes in a huge page.
        page_size: usize,
    },
    /// Anything else or unknown: a private mapping of a file, a file on a disk, memory that is filled when it is touched, several
    /// of these.
    Other,
}

/// The backing of each block of `ram`. To be called before a dirty log starts, once per migration.
///
/// Memory in pages of the base size is recognised at once (Linux 6.11 with userfaultfd). For anything else there is smaps, for
/// which the kernel visits every page of this process: 50 ns for each one of 4 KiB that is there, so 13 ms
/// per GiB, and next to nothing for huge ones.
pub(crate) fn backings(ram: &Ram) -> Vec<Backing> {
    let mappings = Mappings::in_base_pages(ram)
        .inspect_err(|error| tracing::debug!(%error, "memory is looked up in smaps"))
        .or_else(|_| Mappings::read("/proc/self/smaps"))
        .unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot tell what kind of memory the guest has: all of it is read");
            Mappings::default()
        });
    let blocks = ram.blocks().iter();
    blocks.map(|block| mappings.backing(block)).collect()
}

/// Whether a block is private memory without a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anonymous {
    /// Not all of it.
    No,
    /// In pages of the base size, that the kernel may join and split.
    BasePages,
    /// At least some of it in huge pages of a fixed size.
    HugePages,
}

/// Whether `block` is private memory without a file. Does not depend on what fills it, and costs little.
pub(crate) fn anonymous(block: &RamBlock) -> io::Result<Anonymous> {
    let mappings = Mappings::read("/proc/self/maps")?;
    let parts = mappings.of(&block.addresses()).unwrap_or_default();
    let anonymous = |part: &Mapping| part.kind == Kind::Anonymous;
    if block.file().is_some() || parts.is_empty() || !parts.iter().all(anonymous) {
        return Ok(Anonymous::No);
    }
    // Private memory of huge pages has a file inside of the kernel.
    let has_file = |part: &Mapping| part.file != (0, 0, 0);
    Ok(match parts.iter().any(has_file) {
        true => Anonymous::HugePages,
        false => Anonymous::BasePages,
    })
}

/// Mappings of this process, in the order of their addresses.
#[derive(Default)]
struct Mappings(Vec<Mapping>);

struct Mapping {
    start: usize,
    end: usize,
    /// Where in its file it begins.
    offset: u64,
    file: FileId,
    kind: Kind,
    /// Details that only smaps has.
    details: Details,
}

type FileId = (u32, u32, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Anonymous,
    /// Of a file in the kernel's own tmpfs.
    SharedMemory,
    /// Of any other file.
    SharedFile,
    Other,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Details {
    page_size: usize,
    /// Whether the flags were there at all.
    known: bool,
    huge: bool,
    /// A userfaultfd is asked about pages that are touched for the first time.
    filled_lazily: bool,
}

impl Mappings {
    /// The mappings that `ram` is in, without a visit to their pages.
    ///
    /// # Errors
    /// Where some of it is in huge pages or registered with a userfaultfd, or the kernel cannot say.
    fn in_base_pages(ram: &Ram) -> io::Result<Self> {
        let mut mappings = Self::read("/proc/self/maps")?;
        let procmap = Procmap::open()?;
        let userfaultfd = Userfaultfd::open()?;
        userfaultfd.choose_async_write_protection()?;
        for block in ram.blocks() {
            let addresses = block.addresses();
            let within = mappings.within(&addresses);
            for mapping in &mut mappings.0[within] {
                let page_size = procmap.page_size(mapping.start)?;
                if page_size != ram.page_size() as u64 {
                    return Err(io::Error::other("pages of another size"));
                }
                // The kernel registers a mapping with one userfaultfd only, so it refuses a mapping that another one has.
                let start = mapping.start.max(addresses.start);
                let end = mapping.end.min(addresses.end);
                let probe = start..end.min((start / PROBE + 1) * PROBE);
                userfaultfd.register(probe.clone())?;
                userfaultfd.unregister(probe)?;
                mapping.details = Details {
                    page_size: ram.page_size(),
                    known: true,
                    ..Details::default()
                };
            }
        }
        Ok(mappings)
    }

    fn read(path: &str) -> io::Result<Self> {
        // The names of files need not be text.
        let text = fs::read(path)?;
        Self::parse(&String::from_utf8_lossy(&text)).ok_or_else(|| {
            let reason = format!("{path} is not understood");
            io::Error::new(io::ErrorKind::InvalidData, reason)
        })
    }

    /// `maps` has a line for each mapping, `smaps` has lines of details after each of these.
    fn parse(text: &str) -> Option<Self> {
        let mut mappings: Vec<Mapping> = Vec::new();
        for line in text.lines() {
            match line.split_once(':') {
                Some((key, value)) if !key.contains(char::is_whitespace) => {
                    mappings.last_mut()?.details.add(key, value);
                }
                _ => mappings.push(Mapping::parse(line)?),
            }
        }
        Some(Self(mappings))
    }

    fn backing(&self, block: &RamBlock) -> Backing {
        if block.is_filled_lazily() {
            return Backing::Other;
        }
        let file = block.file().and_then(|file| TmpfsFile::of(file).ok()?);
        let mappings = self.of(&block.addresses()).unwrap_or_default();
        let mut backings = mappings.iter().map(|mapping| {
            let is_at = |file: &TmpfsFile| file.is_at(mapping, block.address());
            mapping.backing(file.as_ref().is_some_and(is_at))
        });
        match backings.next() {
            Some(first) if backings.all(|backing| backing == first) => first,
            _ => Backing::Other,
        }
    }

    /// The mappings of `addresses`, if they cover all of it.
    fn of(&self, addresses: &Range<usize>) -> Option<&[Mapping]> {
        let parts = self.0.get(self.within(addresses))?;
        let whole = parts.first()?.start <= addresses.start && parts.last()?.end >= addresses.end;
        let joined = parts.windows(2).all(|pair| pair[0].end == pair[1].start);
        (whole && joined).then_some(parts)
    }

    /// Indices of the mappings that overlap `addresses`.
    fn within(&self, addresses: &Range<usize>) -> Range<usize> {
        let first = self
            .0
            .partition_point(|mapping| mapping.end <= addresses.start);
        let after = self
            .0
            .partition_point(|mapping| mapping.start < addresses.end);
        first..after.max(first)
    }
}

/// A part of a mapping that is registered briefly, up to a multiple of this, so that no transparent huge page is split.
const PROBE: usize = 2 << 20;

impl Mapping {
    /// `7f0c00000000-7f0c00021000 rw-p 00000000 00:00 0    [name]`
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (permissions, offset) = (fields.next()?, fields.next()?);
        let (major, minor) = fields.next()?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let file = (
            u32::from_str_radix(major, 16).ok()?,
            u32::from_str_radix(minor, 16).ok()?,
            inode,
        );
        let kind = match permissions.as_bytes().last()? {
            b's' => shared(file, fields),
            b'p' if inode == 0 || fields.next() == Some("/anon_hugepage") => Kind::Anonymous,
            _ => Kind::Other,
        };
        Some(Self {
            start: usize::from_str_radix(start, 16).ok()?,
            end: usize::from_str_radix(end, 16).ok()?,
            offset: u64::from_str_radix(offset, 16).ok()?,
            file,
            kind,
            details: Details::default(),
        })
    }

    /// `names_file`: whether the VMM has named the file that is mapped here, and the file is in tmpfs.
    fn backing(&self, names_file: bool) -> Backing {
        let Details {
            page_size,
            known,
            huge,
            filled_lazily,
        } = self.details;
        if !known || filled_lazily || page_size == 0 {
            return Backing::Other;
        }
        match self.kind {
            Kind::Anonymous => Backing::Anonymous { page_size },
            Kind::SharedFile | Kind::SharedMemory if huge => Backing::SharedHuge { page_size },
            Kind::SharedFile | Kind::SharedMemory if names_file => Backing::SharedFile,
            Kind::SharedMemory => Backing::SharedMemory,
            Kind::SharedFile | Kind::Other => Backing::Other,
        }
    }
}

/// A shared mapping of `file`, which is called `name`.
fn shared<'a>((major, _, _): FileId, mut name: impl Iterator<Item = &'a str>) -> Kind {
    let (first, last) = (name.next().unwrap_or_default(), name.last());
    // Memfds, memory that is shared without a file, System V's. They have no path, and no device that is a disk.
    let deleted = ["/memfd:", "/dev/zero", "/SYSV"]
        .iter()
        .any(|prefix| first.starts_with(prefix))
        && last == Some("(deleted)");
    // Memory that is shared without a file may have been given a name.
    if major == 0 && (deleted || first.starts_with("[anon_shmem:")) {
        Kind::SharedMemory
    } else {
        Kind::SharedFile
    }
}

impl Details {
    fn add(&mut self, key: &str, value: &str) {
        let mut words = value.split_ascii_whitespace();
        match key {
            // A number and `kB`.
            "KernelPageSize" => {
                let kib: Option<usize> = words.next().and_then(|number| number.parse().ok());
                self.page_size = kib.and_then(|kib| kib.checked_mul(1024)).unwrap_or(0);
            }
            // Two letters each.
            "VmFlags" => {
                self.known = true;
                for flag in words {
                    self.huge |= flag == "ht";
                    // Missing pages, and pages that are only missing from the page tables.
                    self.filled_lazily |= flag == "um" || flag == "ui";
                }
            }
            _ => {}
        }
    }
}

/// The file of a block, which is in tmpfs.
struct TmpfsFile {
    id: FileId,
    start: u64,
}

impl TmpfsFile {
    /// `None` for a file that is elsewhere.
    fn of(file: &FileOffset) -> io::Result<Option<Self>> {
        if fstatfs(file.file())?.f_type != TMPFS_MAGIC {
            return Ok(None);
        }
        let stat = fstat(file.file())?;
        Ok(Some(Self {
            id: (major(stat.st_dev), minor(stat.st_dev), stat.st_ino),
            start: file.start(),
        }))
    }

    /// Whether `mapping` maps this file, as a part of a block at `address`.
    fn is_at(&self, mapping: &Mapping, address: usize) -> bool {
        let of_block = i128::from(self.start) - address as i128;
        let of_mapping = i128::from(mapping.offset) - mapping.start as i128;
        self.id == mapping.file && of_block == of_mapping
    }
}

/// `f_type` of tmpfs, which is also where memfds are.
const TMPFS_MAGIC: FsWord = 0x0102_1994;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        sys::faults::Faults,
        test_ram::{self, HUGE_PAGE},
    };

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0
3000-4000 r--p 00000000 00:00 0 [anon: guest]
4000-5000 rw-s 00000000 00:01 4711 /memfd:ram (deleted)
6000-8000 rw-s 00002000 00:01 4711 /memfd:with spaces: and more (deleted)
8000-9000 rw-p 00000000 fd:00 17 /var/lib/image with spaces
9000-a000 rw-p 00000000 00:0f 99 /anon_hugepage (deleted)
a000-b000 rw-s 00000000 00:01 4712 /dev/zero (deleted)
b000-c000 rw-s 00000000 00:01 4713 /SYSV00000000 (deleted)
c000-d000 rw-s 00000000 fd:00 18 /memfd:a file of this name (deleted)
d000-e000 rw-s 00000000 00:1a 5 /dev/shm/ram
e000-f000 rw-s 00000000 00:01 4714 [anon_shmem:guest]
";

    #[test]
    fn a_mapping_is_private_or_shared_memory_or_a_file() {
        use Kind::{Anonymous, Other, SharedFile, SharedMemory};
        let mappings = Mappings::parse(MAPS).unwrap();
        let kinds: Vec<_> = mappings.0.iter().map(|mapping| mapping.kind).collect();
        let expected = [
            Anonymous,
            Anonymous,
            SharedMemory,
            SharedMemory,
            Other,
            Anonymous,
            SharedMemory,
            SharedMemory,
            SharedFile,
            SharedFile,
            SharedMemory,
        ];
        assert_eq!(kinds, expected);
        let third = &mappings.0[3];
        assert_eq!((third.offset, third.file), (0x2000, (0, 1, 4711)));
    }

    #[test]
    fn mappings_of_a_block_have_no_gap() {
        let mappings = Mappings::parse(MAPS).unwrap();
        for (start, end, expected) in [
            (0x1000, 0x3000, Some(1)),
            (0x2000, 0x4000, Some(2)),
            (0x2000, 0x5000, Some(3)),
            (0x4000, 0x6000, None),
            (0x4000, 0x7000, None),
            (0x7000, 0x8000, Some(1)),
            (0xe000, 0x10000, None),
            (0x0000, 0x2000, None),
            (0xf000, 0x10000, None),
        ] {
            let parts = mappings.of(&(start..end)).map(<[_]>::len);
            assert_eq!(parts, expected, "{start:#x} to {end:#x}");
        }
    }

    #[test]
    fn details_decide_what_is_known_of_a_mapping() {
        use Backing::{Anonymous, Other, SharedFile, SharedHuge, SharedMemory};
        let backing = |line: &str, details: &str, names_file| {
            let text = format!("1000-3000 {line}\nSize: 8 kB\n{details}");
            Mappings::parse(&text).unwrap().0[0].backing(names_file)
        };
        let (private, memfd) = (
            "rw-p 00000000 00:00 0",
            "rw-s 00000000 00:01 47 /memfd:ram (deleted)",
        );
        let image = "rw-s 00000000 00:1a 17 /image";
        let (small, huge) = ("KernelPageSize: 4 kB\n", "KernelPageSize: 2048 kB\n");
        let page_size = 4096;
        for (line, size, flags, names_file, expected) in [
            (
                private,
                small,
                "VmFlags: rd wr",
                false,
                Anonymous { page_size },
            ),
            (private, small, "VmFlags: rd um", false, Other),
            (private, small, "", false, Other),
            (private, "", "VmFlags: rd", false, Other),
            (memfd, small, "VmFlags: rd sh uw", true, SharedFile),
            (memfd, small, "VmFlags: rd sh", false, SharedMemory),
            (memfd, small, "VmFlags: rd sh ui", true, Other),
            (image, small, "VmFlags: rd sh", true, SharedFile),
            (image, small, "VmFlags: rd sh", false, Other),
            (
                memfd,
                huge,
                "VmFlags: rd sh ht",
                false,
                SharedHuge {
                    page_size: HUGE_PAGE,
                },
            ),
        ] {
            let details = format!("{size}{flags}");
            assert_eq!(
                backing(line, &details, names_file),
                expected,
                "{line} {flags}"
            );
        }
    }

    #[test]
    fn the_kernel_is_understood() {
        let len = 16 * 4096;
        let page_size = rustix::param::page_size();
        let mut expected = vec![
            (test_ram::anonymous(len), Backing::Anonymous { page_size }),
            (test_ram::memfd(len), Backing::SharedFile),
            (test_ram::closed_memfd(len), Backing::SharedMemory),
            (test_ram::shared_anonymous(len), Backing::SharedMemory),
            (test_ram::private_file(len, true), Backing::Other),
            (test_ram::private_file(len, false), Backing::Other),
        ];
        let page_size = HUGE_PAGE;
        expected.extend(test_ram::in_huge_pages(HUGE_PAGE).into_iter().zip([
            Backing::Anonymous { page_size },
            Backing::SharedHuge { page_size },
        ]));
        for (ram, expected) in expected {
            assert_eq!(backings(&ram), [expected], "{ram:?}");
            let smaps = Mappings::read("/proc/self/smaps").unwrap();
            assert_eq!(smaps.backing(&ram.blocks()[0]), expected, "{ram:?}");
            let anonymity = match expected {
                Backing::Anonymous {
                    page_size: HUGE_PAGE,
                } => Anonymous::HugePages,
                Backing::Anonymous { .. } => Anonymous::BasePages,
                _ => Anonymous::No,
            };
            assert_eq!(anonymous(&ram.blocks()[0]).unwrap(), anonymity, "{ram:?}");
        }
    }

    #[test]
    fn memory_of_another_userfaultfd_is_looked_up_in_smaps() {
        let opened = Faults::open().and_then(|faults| {
            Procmap::open()?.page_size(MAPS.as_ptr().addr())?;
            Ok(faults)
        });
        let faults = match opened {
            Ok(faults) => faults,
            Err(error) => {
                return lab::skipped(&format!("userfaultfd, Linux 6.11: {error}")).unwrap();
            }
        };
        for ram in [test_ram::anonymous(HUGE_PAGE), test_ram::memfd(HUGE_PAGE)] {
            let block = &ram.blocks()[0];
            // It leaves no registration behind.
            Mappings::in_base_pages(&ram).unwrap();
            Mappings::in_base_pages(&ram).unwrap();
            // The last page only: a mapping of its own.
            let end = block.address() + block.len();
            faults.register(&(end - 4096..end)).unwrap();
            assert!(Mappings::in_base_pages(&ram).is_err());
            assert_eq!(backings(&ram), [Backing::Other]);
        }
        for ram in test_ram::in_huge_pages(HUGE_PAGE) {
            assert!(Mappings::in_base_pages(&ram).is_err());
        }
    }
}
