//! Guest memory at the destination: where pages belong, and which of them hold something.

use std::sync::atomic::{AtomicU64, Ordering};

use codec::CpuScan;
use multifd::RamHeader;
use vm_memory::{Bytes, VolatileSlice};

use crate::{ChannelError, Ram, RamBlock, present::present, sys};

/// The memory that all channels write. Every page of it is either zero or marked as written.
pub(super) struct Place<'a> {
    ram: &'a Ram,
    /// Bit by bit the pages of each block that were written as normal pages.
    written: Vec<Box<[AtomicU64]>>,
    punch_holes: bool,
}

/// Runs of at least so many bytes that become zero are given back to the system.
const LEAST_HOLE: usize = 256 << 10;

impl<'a> Place<'a> {
    pub(super) fn new(ram: &'a Ram, punch_holes: bool) -> Self {
        let words = |block| ram.pages(block).div_ceil(64);
        let written = (0..ram.blocks().len())
            .map(|block| (0..words(block)).map(|_| AtomicU64::new(0)).collect());
        Self {
            ram,
            written: written.collect(),
            punch_holes,
        }
    }

    /// Makes all memory read as zeros, without touching what was never touched. Calls `progress` while that goes on.
    pub(super) fn make_zero(&self, progress: &dyn Fn()) {
        let page_size = self.page_size();
        for block in self.ram.blocks() {
            let memory = block.memory();
            let mut run = Run::default();
            for page in present(block, page_size).iter() {
                let offset = page * page_size;
                let Ok(slice) = memory.subslice(offset, page_size) else {
                    break;
                };
                if !CpuScan::is_zero(&slice) {
                    self.extend(block, &mut run, offset);
                }
            }
            self.clear(block, &run);
            progress();
        }
    }

    /// Finds the memory of a packet's normal pages, into `pages`, and checks its zero pages; returns the block's index.
    ///
    /// # Errors
    /// When there is no such block, or a page is outside of it.
    pub(super) fn resolve(
        &self,
        header: &RamHeader,
        pages: &mut Vec<VolatileSlice<'a>>,
    ) -> Result<usize, ChannelError> {
        let blocks = self.ram.blocks();
        let found = blocks.iter().position(|block| block.name() == header.block);
        let index = found.ok_or_else(|| ChannelError::Block {
            block: header.block.to_string(),
        })?;
        let block = &blocks[index];
        let memory = block.memory();
        let page_at = |offset: u64| {
            let start = usize::try_from(offset).ok();
            let page = start.and_then(|start| memory.subslice(start, self.page_size()).ok());
            page.ok_or_else(|| ChannelError::Offset {
                offset,
                block: block.name().to_string(),
                len: block.len(),
            })
        };
        pages.clear();
        for offset in header.normal_offsets() {
            pages.push(page_at(*offset)?);
        }
        for offset in header.zero_offsets() {
            page_at(*offset)?;
        }
        Ok(index)
    }

    /// Marks normal pages of a packet that was [resolved](Place::resolve).
    pub(super) fn written(&self, block: usize, offsets: &[u64]) {
        for offset in offsets {
            let (word, bit) = self.bit(block, *offset);
            // The pages' bytes are ordered by the SYNC, through the coordinator: this counts bits only.
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Makes zero pages of a packet that was [resolved](Place::resolve) zero: those that were never written are.
    pub(super) fn zero(&self, block: usize, offsets: &[u64]) {
        let memory = &self.ram.blocks()[block];
        let mut run = Run::default();
        for offset in offsets {
            let (word, bit) = self.bit(block, *offset);
            if word.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
                // Checked when it was resolved, so it fits.
                self.extend(
                    memory,
                    &mut run,
                    usize::try_from(*offset).unwrap_or(usize::MAX),
                );
            }
        }
        self.clear(memory, &run);
    }

    /// Adds the page at `offset` to `run`, or clears that and begins another one.
    fn extend(&self, block: &RamBlock, run: &mut Run, offset: usize) {
        if run.start + run.len != offset {
            self.clear(block, run);
            *run = Run {
                start: offset,
                len: 0,
            };
        }
        run.len += self.page_size();
    }

    fn clear(&self, block: &RamBlock, run: &Run) {
        let Ok(memory) = block.memory().subslice(run.start, run.len) else {
            return;
        };
        if self.punch_holes && run.len >= LEAST_HOLE && sys::memory::punch(block, memory).is_ok() {
            return;
        }
        for start in (0..run.len).step_by(ZEROS.len()) {
            let zeros = &ZEROS[..ZEROS.len().min(run.len - start)];
            // Within the run, which is within the block.
            let _ = memory.write_slice(zeros, start);
        }
    }

    fn bit(&self, block: usize, offset: u64) -> (&AtomicU64, u64) {
        // Checked when it was resolved, so it fits.
        let page = usize::try_from(offset).unwrap_or(usize::MAX) / self.page_size();
        (&self.written[block][page / 64], 1 << (page % 64))
    }

    fn page_size(&self) -> usize {
        self.ram.page_size()
    }
}

/// Neighbouring pages, in bytes of their block.
#[derive(Default)]
struct Run {
    start: usize,
    len: usize,
}

const ZEROS: [u8; 4096] = [0; 4096];

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use multifd::Layout;
    use vm_memory::MmapRegion;

    use super::*;

    const PAGE: usize = 4096;

    fn ram(pages: usize) -> Ram {
        let region = Arc::new(MmapRegion::<()>::new(pages * PAGE).unwrap());
        Ram::new(vec![RamBlock::new("ram", region).unwrap()]).unwrap()
    }

    fn fill(ram: &Ram, page: usize, byte: u8) {
        let memory = ram.blocks()[0].memory();
        memory.write_slice(&[byte; PAGE], page * PAGE).unwrap();
    }

    fn bytes(ram: &Ram) -> Vec<u8> {
        let memory = ram.blocks()[0].memory();
        let mut bytes = vec![0xee; memory.len()];
        memory.read_slice(&mut bytes, 0).unwrap();
        bytes
    }

    fn header(block: &str, normal: &[u64], zero: &[u64]) -> RamHeader {
        let mut header = RamHeader::new(Layout::X86);
        header.block = multifd::BlockName::new(block.as_bytes()).unwrap();
        header.set_pages(normal, zero, Layout::X86).unwrap();
        header
    }

    #[test]
    fn memory_of_an_earlier_attempt_becomes_zero() {
        for punch_holes in [false, true] {
            let ram = ram(1000);
            for page in (3..300).chain([500, 999]) {
                fill(&ram, page, 7);
            }
            Place::new(&ram, punch_holes).make_zero(&|| {});
            assert!(bytes(&ram).iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn a_zero_page_is_cleared_only_where_something_was_written() {
        for punch_holes in [false, true] {
            let ram = ram(200);
            let place = Place::new(&ram, punch_holes);
            let offsets: Vec<u64> = (0..128).map(|page| page * PAGE as u64).collect();
            place.zero(0, &offsets);
            assert_eq!(present(&ram.blocks()[0], PAGE).count(), 0);
            for page in 0..128 {
                fill(&ram, page, 7);
            }
            place.written(0, &offsets);
            place.zero(0, &offsets[..1]);
            place.zero(0, &offsets[2..]);
            let bytes = bytes(&ram);
            assert!(bytes[PAGE..2 * PAGE].iter().all(|byte| *byte == 7));
            assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), PAGE);
        }
    }

    #[test]
    fn only_pages_of_the_guest_are_resolved() {
        let ram = ram(4);
        let place = Place::new(&ram, true);
        let mut pages = Vec::new();
        let mut resolve = |header: &RamHeader| place.resolve(header, &mut pages);
        assert_eq!(resolve(&header("ram", &[0, 0x3000], &[0x1000])).unwrap(), 0);
        let foreign = resolve(&header("rom", &[0], &[]));
        assert!(matches!(foreign, Err(ChannelError::Block { block }) if block == "rom"));
        for (normal, zero) in [([0x4000], []), ([u64::MAX - 0xfff], [])] {
            let outside = resolve(&header("ram", &normal, &zero));
            assert!(
                matches!(outside, Err(ChannelError::Offset { offset, len: 0x4000, .. }) if offset == normal[0])
            );
        }
        let outside = resolve(&header("ram", &[], &[0x8000]));
        assert!(matches!(
            outside,
            Err(ChannelError::Offset { offset: 0x8000, .. })
        ));
    }
}
