//! Finds the shared memory of a QEMU:
//!
//! ```text
//!  monitor: RAM block, address ── /proc/PID/maps ─> shared mapping of a file, at an offset
//!                                                    │ device and inode
//!  /proc/PID/fd/N ─────────── is the same file as ───┘ ── opened anew
//! ```
//!
//! So names are not relied upon, and the mapping includes a backend's `offset=`.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::Path,
    sync::RwLock,
    time::SystemTime,
};

use multifd::{BlockName, Layout};
use rustix::fs::{Mode, OFlags, major, minor};
use thiserror::Error;
use tracing::debug;

use super::{Placement, PlacementMode, block::Block};
use crate::{
    chain,
    process::ProcessError,
    qemu::{Qemu, QemuError, RamBlock},
};

/// Why pages are not placed into a QEMU's memory.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum NotPlaced {
    #[error(transparent)]
    Qemu(#[from] QemuError),
    #[error("cannot look at the process: {0}")]
    Process(String),
    #[error("cannot read the mappings of the process")]
    Mappings(#[source] io::Error),
    #[error("this QEMU does not report where its memory is (from 8.0 on it does)")]
    NoAddresses,
    #[error("the guest's pages are smaller than this host's")]
    PageSize,
    #[error("its capability `{0}` is on")]
    Capability(String),
    #[error("it is not set up yet (its capability `multifd` is off)")]
    NotSetUp,
    #[error("none of its memory is shared (share=on)")]
    NotShared,
    #[error("its memory (RAM block {block}) cannot be opened")]
    Refused {
        block: String,
        #[source]
        error: io::Error,
    },
    #[error(
        "its memory is not preallocated and would count as that of this process's control group"
    )]
    ControlGroup,
}

impl From<ProcessError> for NotPlaced {
    fn from(error: ProcessError) -> Self {
        Self::Process(chain(&error))
    }
}

/// Capabilities with which QEMU tracks received pages, or does not take pages from channels.
const NOT_WITH: [&str; 4] = ["postcopy-ram", "x-colo", "x-ignore-shared", "mapped-ram"];

impl Placement {
    pub(super) fn find(
        qemu: &mut Qemu,
        mode: PlacementMode,
        layout: Layout,
    ) -> Result<Self, NotPlaced> {
        if let Some(name) = qemu.first_capability_on(&NOT_WITH)? {
            return Err(NotPlaced::Capability(name.to_owned()));
        }
        if qemu.first_capability_on(&["multifd"])?.is_none() {
            return Err(NotPlaced::NotSetUp);
        }
        if layout.page_size() < rustix::param::page_size() {
            return Err(NotPlaced::PageSize);
        }
        let listed = qemu.ram_blocks()?;
        if listed.is_empty() {
            return Err(NotPlaced::NoAddresses);
        }
        let process = qemu.identity()?;
        let since = process.started();
        let blocks =
            qemu.look_at_process(|process| shared_blocks(process, &listed, mode, layout, since))??;
        if blocks.is_empty() {
            return Err(NotPlaced::NotShared);
        }
        Ok(Self {
            process,
            blocks,
            is_demanded: mode == PlacementMode::On,
            closed: RwLock::new(false),
        })
    }
}

/// The listed blocks whose memory is shared. `since` is the start of QEMU's process.
fn shared_blocks(
    process: &Path,
    listed: &[RamBlock],
    mode: PlacementMode,
    layout: Layout,
    since: Option<SystemTime>,
) -> Result<Vec<Block>, NotPlaced> {
    let maps = fs::read_to_string(process.join("maps")).map_err(NotPlaced::Mappings)?;
    let mappings = maps.lines().filter_map(Mapping::parse).collect::<Vec<_>>();
    let counts_as_ours = mode == PlacementMode::Auto && is_in_another_group(process);
    let mut blocks = Vec::new();
    for block in listed {
        let (Some(memory), Ok(name)) = (
            Mapping::of(&mappings, block),
            BlockName::new(block.name.as_bytes()),
        ) else {
            debug!("RAM block {}: not shared, or not whole", block.name);
            continue;
        };
        let refused = |error| NotPlaced::Refused {
            block: block.name.clone(),
            error,
        };
        let file = memory.open(process).map_err(refused)?;
        let len =
            usize::try_from(block.total).map_err(|_| refused(io::ErrorKind::InvalidData.into()))?;
        let is_fresh = is_fresh(&file, since).map_err(refused)?;
        let block = Block::open(name, file, memory.offset, len, layout);
        let block = block.map_err(refused)?.fresh(is_fresh);
        if counts_as_ours && !block.is_preallocated().map_err(refused)? {
            return Err(NotPlaced::ControlGroup);
        }
        blocks.push(block);
    }
    Ok(blocks)
}

/// A shared mapping of a file that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    /// Offset in the file.
    offset: u64,
    device: (u32, u32),
    inode: u64,
}

impl Mapping {
    /// From a line of /proc/PID/maps: `START-END rw-s OFFSET MAJOR:MINOR INODE PATH`.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let access = fields.next()?.as_bytes();
        let offset = fields.next()?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let long = |text| u64::from_str_radix(text, 16).ok();
        let short = |text| u32::from_str_radix(text, 16).ok();
        let mapping = Self {
            start: long(start)?,
            end: long(end)?,
            offset: long(offset)?,
            device: (short(major)?, short(minor)?),
            inode,
        };
        let is_shared = matches!(access, [b'r', b'w', _, b's']);
        (is_shared && inode != 0 && mapping.start < mapping.end).then_some(mapping)
    }

    /// The mapping of the whole block, possibly in several pieces. `None` if the block is not shared as a whole.
    fn of(mappings: &[Self], block: &RamBlock) -> Option<Self> {
        let end = block.address.checked_add(block.total)?;
        if !block.writable || block.used != block.total || block.total == 0 {
            return None;
        }
        let at = |address| {
            let mut mappings = mappings.iter().copied();
            mappings.find(|mapping| (mapping.start..mapping.end).contains(&address))
        };
        let mut whole = at(block.address)?.from(block.address);
        while whole.end < end {
            let next = at(whole.end)?;
            let is_same = (next.device, next.inode) == (whole.device, whole.inode);
            let follows = next.from(whole.end).offset == whole.offset + (whole.end - whole.start);
            if !is_same || !follows {
                return None;
            }
            whole.end = next.end;
        }
        Some(Self { end, ..whole })
    }

    /// The part from `address` on.
    fn from(self, address: u64) -> Self {
        Self {
            start: address,
            offset: self.offset + (address - self.start),
            ..self
        }
    }

    /// Opens the mapped file through a descriptor of the process.
    fn open(self, process: &Path) -> io::Result<File> {
        for entry in fs::read_dir(process.join("fd"))? {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            // Closed meanwhile, or not a file.
            let Ok(found) = rustix::fs::open(entry?.path(), flags, Mode::empty()) else {
                continue;
            };
            // The process may replace the descriptor at any time, so the file that was checked is opened.
            let found = File::from(found);
            let file = found.metadata()?;
            let device = (major(file.dev()), minor(file.dev()));
            if file.is_file() && (device, file.ino()) == (self.device, self.inode) {
                let path = format!("/proc/self/fd/{}", found.as_raw_fd());
                return OpenOptions::new().read(true).write(true).open(path);
            }
        }
        Err(io::Error::new(
            io::ErrorKind::NotFound,
            "no descriptor of the process leads to the file",
        ))
    }
}

/// Whether the process that started at `since` created the file, which was zeros then: the file has no name (a memfd), or is
/// younger than the process.
fn is_fresh(file: &File, since: Option<SystemTime>) -> io::Result<bool> {
    let file = file.metadata()?;
    let is_younger = since.is_some_and(|since| file.created().is_ok_and(|made| made > since));
    Ok(file.nlink() == 0 || is_younger)
}

/// Whether this process is in another control group than QEMU, so that memory counts as this process's. True if in doubt.
fn is_in_another_group(process: &Path) -> bool {
    let group = |process: &Path| fs::read(process.join("cgroup")).ok();
    let own = group(Path::new("/proc/self"));
    own.is_none() || own != group(process)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MAPS: &str = "\
7f1edb000000-7f1edb001000 rw-p 00000000 00:00 0 
7f1edbfff000-7f1eddfff000 rw-s 00001000 00:01 1055                       /memfd:memory-backend-memfd (deleted)
7f1eddfff000-7f1edffff000 rw-s 02001000 00:01 1055                       /memfd:memory-backend-memfd (deleted)
7f1edffff000-7f1ee0fff000 rw-s 00000000 00:01 1056                       /memfd:memory-backend-memfd (deleted)
7f1f24600000-7f1f24640000 rw-p 00000000 00:00 0 
7f1f25000000-7f1f25100000 r--s 00000000 00:1b 7                          /dev/shm/rom
7f1f26000000-7f1f26100000 rw-p 00000000 00:1b 8                          /dev/shm/private
";

    fn found(address: u64, len: u64) -> Option<Mapping> {
        let mappings = MAPS.lines().filter_map(Mapping::parse).collect::<Vec<_>>();
        let block = RamBlock {
            name: "mem".to_owned(),
            used: len,
            total: len,
            address,
            writable: true,
        };
        Mapping::of(&mappings, &block)
    }

    #[test]
    fn unnamed_or_younger_file_is_fresh() {
        let since = SystemTime::now().checked_sub(Duration::from_secs(1));
        let young = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        assert!(is_fresh(young.as_file(), since).unwrap());
        // The process began later, or its start is unknown.
        assert!(!is_fresh(young.as_file(), Some(SystemTime::now())).unwrap());
        assert!(!is_fresh(young.as_file(), None).unwrap());
        let nameless = tempfile::tempfile_in("/dev/shm").unwrap();
        assert!(is_fresh(&nameless, None).unwrap());
    }

    #[test]
    fn contiguous_mappings_of_a_block_become_one() {
        let whole = found(0x7f1e_dbff_f000, 64 << 20).unwrap();
        assert_eq!(
            (whole.device, whole.inode, whole.offset),
            ((0, 1), 1055, 0x1000)
        );
        let part = found(0x7f1e_dbff_f000 + 0x3000, 0x5000).unwrap();
        assert_eq!((part.offset, part.end - part.start), (0x4000, 0x5000));
    }

    #[test]
    fn partly_shared_block_is_not_found() {
        // Private memory, before and after; two files; read-only; a private mapping of a file; nothing.
        for (address, len) in [
            (0x7f1e_db00_0000, 0x1000),
            (0x7f1e_dbff_f000, 65 << 20),
            (0x7f1e_ddff_f000, 48 << 20),
            (0x7f1f_2500_0000, 0x1000),
            (0x7f1f_2600_0000, 0x1000),
            (0x7f1f_2700_0000, 0x1000),
            (u64::MAX, 0x1000),
            (0x7f1e_dbff_f000, 0),
        ] {
            assert_eq!(found(address, len), None, "{address:#x}, {len:#x}");
        }
    }
}
