//! The RAM file that packets are applied to.

use std::{
    collections::{BTreeSet, HashSet},
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow, bail};
use multifd::{BlockName, Layout};

use super::recording::{Content, Packet};
use vamoose::options::Size;

/// A file that becomes the memory of one RAM block.
pub(super) struct Target {
    path: PathBuf,
    file: File,
    size: u64,
    wanted: Option<BlockName>,
    /// Every block that packets have named.
    blocks: BTreeSet<String>,
    /// The block that is being written, once there is one.
    block: Option<BlockName>,
    /// Pages with content. The others are holes, which a zero page need not fill.
    written: HashSet<u64>,
    applied_packets: u64,
    rounds: u64,
}

impl Target {
    /// Creates the file, or empties it, with `size` zero bytes.
    pub(super) fn create(path: &Path, size: Size, block: Option<&str>) -> Result<Self> {
        let wanted = block
            .map(|name| BlockName::new(name.as_bytes()))
            .transpose()
            .context("--block")?;
        let file = File::create(path)
            .and_then(|file| file.set_len(size.0).map(|()| file))
            .with_context(|| {
                format!("--ram: cannot create {} with {size} bytes", path.display())
            })?;
        Ok(Self {
            path: path.to_owned(),
            file,
            size: size.0,
            wanted,
            blocks: BTreeSet::new(),
            block: wanted,
            written: HashSet::new(),
            applied_packets: 0,
            rounds: 0,
        })
    }

    /// Applies the packet, if it has pages of the block.
    ///
    /// Pages of a second block, where none was chosen, stop the writing and not the walk: the error
    /// at the end can then name all of them.
    pub(super) fn apply(&mut self, packet: &Packet, layout: Layout) -> Result<()> {
        let ram = &packet.ram;
        if matches!(packet.content, Content::DeviceState(_)) || ram.is_empty() {
            return Ok(());
        }
        self.blocks.insert(ram.block.to_string());
        let block = *self.block.get_or_insert(ram.block);
        if ram.block != block || self.is_ambiguous() {
            return Ok(());
        }
        if matches!(packet.content, Content::Undecoded) {
            bail!(
                "method {} is not built into this vamoose, so its pages cannot go to --ram",
                ram.method
            );
        }
        let pages = packet.pages().chunks_exact(layout.page_size());
        for (offset, page) in ram.normal_offsets().iter().zip(pages) {
            self.write(*offset, page, block)?;
            self.written.insert(*offset);
        }
        let zero = vec![0; layout.page_size()];
        for offset in ram.zero_offsets() {
            if self.written.remove(offset) {
                self.write(*offset, &zero, block)?;
            } else {
                self.check(*offset, zero.len(), block)?;
            }
        }
        self.applied_packets += 1;
        Ok(())
    }

    /// Notes that the first `rounds` rounds are complete on all channels.
    pub(super) fn barrier(&mut self, rounds: u64) {
        self.rounds = rounds;
    }

    /// Says whether the file is what was asked for.
    pub(super) fn finish(&self) -> Result<()> {
        let names = || {
            let names: Vec<_> = self.blocks.iter().map(String::as_str).collect();
            names.join(", ")
        };
        if self.is_ambiguous() {
            bail!(
                "the streams hold pages of {} RAM blocks: choose one of {} with --block",
                self.blocks.len(),
                names()
            );
        }
        match self.wanted {
            Some(wanted) if !self.blocks.contains(&wanted.to_string()) => bail!(
                "--block {wanted}: the streams hold no page of it, only of: {}",
                names()
            ),
            _ => Ok(()),
        }
    }

    /// `error`, and what it means for the file.
    pub(super) fn blame(&self, error: &anyhow::Error) -> anyhow::Error {
        anyhow!(
            "{error:#}; {} is INCOMPLETE: packets with pages applied: {}, rounds complete on all \
             channels (SYNCs): {}",
            self.path.display(),
            self.applied_packets,
            self.rounds
        )
    }

    fn is_ambiguous(&self) -> bool {
        self.wanted.is_none() && self.blocks.len() > 1
    }

    fn write(&self, offset: u64, page: &[u8], block: BlockName) -> Result<()> {
        self.check(offset, page.len(), block)?;
        self.file
            .write_all_at(page, offset)
            .with_context(|| format!("cannot write to {}", self.path.display()))
    }

    fn check(&self, offset: u64, len: usize, block: BlockName) -> Result<()> {
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| end > self.size) {
            bail!(
                "the page at {offset:#x} of RAM block {block} is beyond --size {}: the block is larger",
                self.size
            );
        }
        Ok(())
    }
}
