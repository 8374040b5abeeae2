//! Guest memory at the destination: the place of each page, and which pages were written.

use std::ops::Range;

use multifd::RamHeader;
use vm_memory::{Bytes, VolatileSlice};

use super::make_zero::Progress;
use crate::{
    Ram, RamBlock, RamError,
    dirty::{Bitmap, pages_in},
    error::ChannelError,
    mapping::backings,
    memory::RamInUse,
    missing::AtomicPages,
    parallel,
    present::Touched,
    sys::memory::{Punch, is_zero},
};

/// The memory that all channels write. Every page is either zero or marked as written.
pub(super) struct GuestRam {
    pub(super) ram: Ram,
    _in_use: RamInUse,
    /// Written as normal pages.
    written: AtomicPages,
    /// How memory of each block is given back to the system, if allowed.
    punches: Vec<Option<Punch>>,
    touched: Touched,
}

/// Shortest run of bytes that is given back to the system when it becomes zero.
const MIN_HOLE: usize = 256 << 10;

/// Bytes that a thread searches at a time.
const PART: usize = 256 << 20;

/// Pages between two reports of progress: often enough even for memory that is swapped out.
const STEP: usize = 4096;

impl GuestRam {
    pub(super) fn new(ram: &Ram, punch_holes: bool) -> Result<Self, RamError> {
        let in_use = ram.hold()?;
        let backings = backings(ram);
        let punches = backings.iter();
        let punches = punches.map(|backing| Punch::of(*backing).filter(|_| punch_holes));
        Ok(Self {
            ram: ram.clone(),
            _in_use: in_use,
            written: AtomicPages::new(&Bitmap::for_blocks(ram)),
            punches: punches.collect(),
            touched: Touched::new(backings),
        })
    }

    /// Makes all memory read as zeros, on all processors and without touching untouched memory. Stops when `progress` says
    /// that this is no longer needed.
    pub(super) fn make_zero(&self, progress: &Progress) {
        let blocks = 0..self.punches.len();
        let parts = blocks.flat_map(|index| self.parts(index).map(move |pages| (index, pages)));
        // A failure: the rest is not needed.
        let _ = parallel::each(parts.collect(), parallel::processors(), &|(
            index,
            pages,
        )| {
            self.make_part_zero(index, pages, progress).ok_or(())
        });
    }

    /// The pages of block `index` in ranges that do not share huge pages, so that huge pages can be given back.
    fn parts(&self, index: usize) -> impl Iterator<Item = Range<usize>> {
        let (block, page_size) = (&self.ram.blocks()[index], self.page_size());
        let size = self.punches[index].map_or(0, Punch::unit).max(PART);
        let first = block.address();
        let pages = move |part: Range<usize>| {
            (part.start - first) / page_size..(part.end - first) / page_size
        };
        parallel::aligned_parts(block.addresses(), size).map(pages)
    }

    /// `None` when the rest is not needed.
    fn make_part_zero(&self, index: usize, pages: Range<usize>, progress: &Progress) -> Option<()> {
        progress.step().then_some(())?;
        let touched = self.touched.find(&self.ram, index, pages.clone());
        let (memory, page_size) = (self.ram.blocks()[index].memory(), self.page_size());
        let mut run = 0..0;
        for (nth, page) in pages_in(pages.start, &touched).enumerate() {
            if nth % STEP == STEP - 1 {
                progress.step().then_some(())?;
            }
            let offset = page * page_size;
            let Ok(slice) = memory.subslice(offset, page_size) else {
                break;
            };
            if !is_zero(&slice) {
                self.extend(index, &mut run, offset);
            }
        }
        self.clear(index, &run);
        Some(())
    }

    /// Finds the memory of a packet's normal pages, into `pages`, and checks its zero pages. Returns the block's index.
    ///
    /// # Errors
    /// When there is no such block, or a page is outside of it.
    pub(super) fn resolve<'a>(
        &'a self,
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

    /// Marks normal pages of a packet that was [resolved](GuestRam::resolve).
    pub(super) fn written(&self, block: usize, offsets: &[u64]) {
        for offset in offsets {
            self.written.set(block, self.page(*offset));
        }
    }

    /// Clears the zero pages of a packet that was [resolved](GuestRam::resolve). Pages that were never written are zero already.
    pub(super) fn zero(&self, block: usize, offsets: &[u64]) {
        let mut run = 0..0;
        for offset in offsets {
            let page = self.page(*offset);
            if self.written.unset(block, page) {
                self.extend(block, &mut run, page * self.page_size());
            }
        }
        self.clear(block, &run);
    }

    /// Adds the page at `offset` to `run`, bytes of block `index` that become zero, or clears that and begins
    /// another one.
    fn extend(&self, index: usize, run: &mut Range<usize>, offset: usize) {
        if run.end != offset {
            self.clear(index, run);
            *run = offset..offset;
        }
        run.end += self.page_size();
    }

    fn clear(&self, index: usize, run: &Range<usize>) {
        let block = &self.ram.blocks()[index];
        let hole = self.give_back(index, run);
        write_zeros(block, run.start..hole.start);
        write_zeros(block, hole.end..run.end);
    }

    /// Gives a part of `run` back to the system, if the part is long enough; returns the part.
    fn give_back(&self, index: usize, run: &Range<usize>) -> Range<usize> {
        let (block, nothing) = (&self.ram.blocks()[index], run.start..run.start);
        let Some(punch) = self.punches[index] else {
            return nothing;
        };
        let address = block.address();
        let units = punch.whole_units(&(address + run.start..address + run.end));
        if units.len() < MIN_HOLE {
            return nothing;
        }
        let hole = units.start - address..units.end - address;
        let memory = block.memory().subslice(hole.start, hole.len());
        match memory.map(|memory| punch.punch(memory)) {
            Ok(Ok(())) => hole,
            _ => nothing,
        }
    }

    fn page(&self, offset: u64) -> usize {
        // Checked when it was resolved, so it fits.
        usize::try_from(offset).unwrap_or(usize::MAX) / self.page_size()
    }

    fn page_size(&self) -> usize {
        self.ram.page_size()
    }
}

fn write_zeros(block: &RamBlock, bytes: Range<usize>) {
    let Ok(memory) = block.memory().subslice(bytes.start, bytes.len()) else {
        return;
    };
    for start in (0..memory.len()).step_by(ZEROS.len()) {
        let zeros = &ZEROS[..ZEROS.len().min(memory.len() - start)];
        // Within the memory.
        let _ = memory.write_slice(zeros, start);
    }
}

const ZEROS: [u8; 4096] = [0; 4096];

#[cfg(test)]
mod tests {
    use multifd::Layout;

    use super::*;
    use crate::test_ram;

    const PAGE: usize = 4096;

    fn ram(pages: usize) -> Ram {
        test_ram::anonymous(pages * PAGE)
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

    fn touched(guest_ram: &GuestRam) -> usize {
        let words = guest_ram
            .touched
            .find(&guest_ram.ram, 0, 0..guest_ram.ram.pages(0));
        pages_in(0, &words).count()
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
            GuestRam::new(&ram, punch_holes)
                .unwrap()
                .make_zero(&Progress::default());
            assert!(bytes(&ram).iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn a_zero_page_is_cleared_only_where_something_was_written() {
        for punch_holes in [false, true] {
            let ram = ram(200);
            let guest_ram = GuestRam::new(&ram, punch_holes).unwrap();
            let offsets: Vec<u64> = (0..128).map(|page| page * PAGE as u64).collect();
            guest_ram.zero(0, &offsets);
            assert_eq!(touched(&guest_ram), 0);
            for page in 0..128 {
                fill(&ram, page, 7);
            }
            guest_ram.written(0, &offsets);
            guest_ram.zero(0, &offsets[..1]);
            guest_ram.zero(0, &offsets[2..]);
            let bytes = bytes(&ram);
            assert!(bytes[PAGE..2 * PAGE].iter().all(|byte| *byte == 7));
            assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), PAGE);
        }
    }

    #[test]
    fn memory_becomes_zero_in_parts() {
        let ram = ram(3 * PART / PAGE);
        let pages = ram.pages(0);
        let guest_ram = GuestRam::new(&ram, true).unwrap();
        for filled in [
            vec![],
            vec![0, pages / 2, pages - 1],
            (0..2 * STEP).collect(),
        ] {
            filled.iter().for_each(|page| fill(&ram, *page, 7));
            guest_ram.make_zero(&Progress::default());
            for page in filled {
                let memory = ram.blocks()[0]
                    .memory()
                    .subslice(page * PAGE, PAGE)
                    .unwrap();
                assert!(is_zero(&memory), "page {page}");
            }
        }
    }

    #[test]
    fn parts_are_the_whole_block() {
        for len in [1, PART / PAGE, 3 * PART / PAGE + 5] {
            let ram = ram(len);
            let guest_ram = GuestRam::new(&ram, true).unwrap();
            let mut next = 0;
            for pages in guest_ram.parts(0) {
                assert!(
                    pages.start == next && pages.len() <= PART / PAGE,
                    "{pages:?}"
                );
                next = pages.end;
            }
            assert_eq!(next, len);
        }
    }

    #[test]
    fn whole_huge_pages_are_given_back() {
        for ram in test_ram::in_huge_pages(2 * test_ram::HUGE_PAGE) {
            (0..1024).for_each(|page| fill(&ram, page, 7));
            assert_eq!(huge_pages(&ram), 2);
            GuestRam::new(&ram, true)
                .unwrap()
                .make_zero(&Progress::default());
            assert_eq!(huge_pages(&ram), 0, "{ram:?}");
        }
    }

    /// How many of the block are there.
    fn huge_pages(ram: &Ram) -> usize {
        match ram.blocks()[0].file() {
            Some(file) => {
                let blocks = rustix::fs::fstat(file.file()).unwrap().st_blocks;
                usize::try_from(blocks).unwrap() * 512 / test_ram::HUGE_PAGE
            }
            None => touched(&GuestRam::new(ram, true).unwrap()) * PAGE / test_ram::HUGE_PAGE,
        }
    }

    /// Parts of huge pages, and a whole one from page 1024 on.
    const RUNS: [Range<usize>; 3] = [0..100, 400..700, 900..1600];

    /// The kernel gives back whole huge pages only: a part that it passes over must be written, and what is
    /// beside it must stay.
    #[test]
    fn a_part_of_a_huge_page_becomes_zero() {
        for ram in test_ram::in_huge_pages(4 * test_ram::HUGE_PAGE) {
            expect_exactly_the_runs_become_zero(&ram);
            expect_an_earlier_attempt_to_be_forgotten(&ram);
        }
    }

    /// madvise succeeds on all of these, and on none of them does MADV_DONTNEED make zeros.
    #[test]
    fn memory_that_cannot_be_given_back_becomes_zero() {
        let len = 2048 * PAGE;
        for ram in [
            test_ram::shared_anonymous(len),
            test_ram::closed_memfd(len),
            test_ram::private_file(len, false),
            test_ram::private_file(len, true),
        ] {
            expect_exactly_the_runs_become_zero(&ram);
            expect_an_earlier_attempt_to_be_forgotten(&ram);
        }
    }

    fn expect_exactly_the_runs_become_zero(ram: &Ram) {
        let guest_ram = GuestRam::new(ram, true).unwrap();
        let pages = ram.pages(0);
        let offsets: Vec<u64> = (0..pages).map(|page| (page * PAGE) as u64).collect();
        (0..pages).for_each(|page| fill(ram, page, 7));
        guest_ram.written(0, &offsets);
        for run in RUNS {
            guest_ram.zero(0, &offsets[run]);
        }
        for (page, bytes) in bytes(ram).chunks(PAGE).enumerate() {
            let zero = RUNS.iter().any(|run| run.contains(&page));
            let expected = if zero { 0 } else { 7 };
            assert!(
                bytes.iter().all(|byte| *byte == expected),
                "page {page} of {:?} is {:#x}, not {expected:#x}",
                ram.blocks()[0],
                bytes[0]
            );
        }
    }

    fn expect_an_earlier_attempt_to_be_forgotten(ram: &Ram) {
        for page in RUNS.into_iter().flatten() {
            fill(ram, page, 9);
        }
        GuestRam::new(ram, true)
            .unwrap()
            .make_zero(&Progress::default());
        let stale = bytes(ram).iter().position(|byte| *byte != 0);
        assert_eq!(stale.map(|at| at / PAGE), None, "a page is not zero");
    }

    #[test]
    fn only_pages_of_the_guest_are_resolved() {
        let ram = ram(4);
        let guest_ram = GuestRam::new(&ram, true).unwrap();
        let mut pages = Vec::new();
        let mut resolve = |header: &RamHeader| guest_ram.resolve(header, &mut pages);
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
