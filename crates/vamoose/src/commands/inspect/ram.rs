//! The RAM file that packets are applied to.

use std::{fs::File, os::unix::fs::FileExt as _, path::Path};

use anyhow::{Context as _, Result, bail, ensure};
use multifd::{BlockName, Layout};

use vamoose::options::Size;
use vamoose_link::Packet;

/// A file that becomes the memory of one RAM block.
pub(super) struct RamFile {
    file: File,
    size: u64,
    wanted: Option<BlockName>,
    /// The block of the pages written so far.
    written: Option<BlockName>,
}

impl RamFile {
    /// Creates the file with `size` zero bytes.
    pub(super) fn create(path: &Path, size: Size, block: Option<&str>) -> Result<Self> {
        let wanted = block.map(|name| BlockName::new(name.as_bytes()));
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .and_then(|file| file.set_len(size.0).map(|()| file));
        Ok(Self {
            file: file.with_context(|| {
                format!("--ram: cannot create {} with {size} bytes", path.display())
            })?,
            size: size.0,
            wanted: wanted.transpose().context("--block")?,
            written: None,
        })
    }

    /// Writes the pages of a packet, if they are the block's.
    pub(super) fn apply(&mut self, packet: &Packet, layout: Layout) -> Result<()> {
        let ram = packet.ram();
        if ram.is_empty() || self.wanted.is_some_and(|wanted| wanted != ram.block) {
            return Ok(());
        }
        let block = *self.written.get_or_insert(ram.block);
        ensure!(
            block == ram.block,
            "the streams hold pages of the RAM blocks {block} and {}: choose one with --block",
            ram.block
        );
        let normal = ram.normal_offsets().iter();
        for (offset, page) in normal.zip(packet.pages().chunks_exact(layout.page_size())) {
            self.check(*offset, ram.block, layout)?;
            self.file.write_all_at(page, *offset)?;
        }
        let mut page = vec![0; layout.page_size()];
        for offset in ram.zero_offsets() {
            self.check(*offset, ram.block, layout)?;
            self.file.read_exact_at(&mut page, *offset)?;
            // A hole in the file stays one.
            if page.iter().any(|byte| *byte != 0) {
                page.fill(0);
                self.file.write_all_at(&page, *offset)?;
            }
        }
        Ok(())
    }

    /// Whether the streams had the block that was asked for.
    pub(super) fn finish(&self) -> Result<()> {
        match (self.wanted, self.written) {
            (Some(wanted), None) => bail!("--block {wanted}: the streams hold no page of it"),
            _ => Ok(()),
        }
    }

    fn check(&self, offset: u64, block: BlockName, layout: Layout) -> Result<()> {
        let end = offset.saturating_add(layout.page_size() as u64);
        ensure!(
            end <= self.size,
            "the page at {offset:#x} of RAM block {block} is beyond --size {}: the block is larger",
            self.size
        );
        Ok(())
    }
}
