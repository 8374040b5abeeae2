//! The sender's cache: which page is in which slot, and the version sent last. Module [`delta`](super) explains touches and epochs.

use std::{
    collections::HashMap,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use multifd::{Layout, RamHeader};
use vamoose_codec::delta::{Mark, Touch, table_len};

use super::{Share, outgoing::MOST_CHECKED, sent::Sent, slots};
use crate::{Session, lock};

/// The pages that one end of a session has sent and keeps, shared by all channels of a migration.
pub struct DeltaSender {
    page_size: usize,
    limit: usize,
    holds: Holds,
    index: Mutex<Index>,
    /// By slot.
    contents: OnceLock<Box<[Mutex<Content>]>>,
    kept: AtomicU64,
    /// Share of the memory of all caches.
    _share: Option<Share>,
}

/// The page in a slot. Empty until the first touch.
type Content = Box<[u8]>;

/// Where the receiver has earlier versions of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    /// The one in the same slot of its own cache.
    Slots,
    /// The one sent last, which is in the guest's memory.
    Memory,
}

/// A touch planned for one page of a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    /// Index among the packet's normal pages.
    page: usize,
    touch: Touch,
    /// The slot holds a version of this page.
    has_version: bool,
}

/// Maps pages to slots and back.
#[derive(Default)]
struct Index {
    sent: Sent,
    slot_of: HashMap<Page, u32>,
    slots: Vec<Slot>,
    /// Slots without a page.
    free: Vec<u32>,
    /// Where the search for a slot begins.
    hand: usize,
    /// Counts the guest's rounds, roughly: a round ends when a page touched in it is touched again.
    round: u64,
    /// Pages that found no slot in this round.
    misses: usize,
}

/// Number of the RAM block, and of the page in it.
type Page = (u32, u64);

struct Slot {
    page: Page,
    version: u32,
    /// Epoch and round of the last touch.
    epoch: u64,
    round: u64,
    /// A packet that touches the slot is being built.
    is_busy: bool,
}

/// Slots examined in search of one whose page has not been sent for a while.
const EXAMINED: usize = 4;

/// Rounds for which a page keeps its slot without being sent. So where more pages change than there are slots, the slots keep
/// their pages.
const KEPT_ROUNDS: u64 = 2;

/// A new round also starts after this many misses per slot.
const MISSES: usize = 8;

impl DeltaSender {
    /// A cache of `bytes`. The receiver's must not be smaller.
    pub fn new(bytes: usize, layout: Layout) -> Self {
        Self::of(Holds::Slots, bytes, layout, None)
    }

    /// A cache of `bytes` for a receiver with the pages in guest memory.
    pub fn in_place(bytes: usize, layout: Layout) -> Self {
        Self::of(Holds::Memory, bytes, layout, None)
    }

    /// The cache for `session`; `None` unless its server takes differences and both ends keep pages.
    pub fn over(session: &Session, layout: Layout) -> Option<Self> {
        let share = session.config().page_caches.take(session.page_cache()?);
        let bytes = share.bytes();
        let longest = table_len(layout.page_count()) + layout.packet_bytes();
        let is_of_use = slots(bytes, layout) > 0 && longest <= MOST_CHECKED;
        is_of_use.then(|| Self::of(Holds::Slots, bytes, layout, Some(share)))
    }

    /// The cache for `session` and a receiver with the pages in guest memory. Such a receiver keeps nothing, so the memory of all
    /// caches is not shared out.
    pub fn in_place_over(session: &Session, layout: Layout) -> Option<Self> {
        session.page_cache()?;
        let bytes = session.config().page_cache;
        (slots(bytes, layout) > 0).then(|| Self::in_place(bytes, layout))
    }

    fn of(holds: Holds, bytes: usize, layout: Layout, share: Option<Share>) -> Self {
        Self {
            page_size: layout.page_size(),
            limit: slots(bytes, layout),
            holds,
            index: Mutex::default(),
            contents: OnceLock::new(),
            kept: AtomicU64::new(0),
            _share: share,
        }
    }

    /// Bytes of pages in the cache.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// Plans the touches of a packet in the `epoch` of its channel. If there are some, its pages must be
    /// [prepared](Self::prepare).
    pub(crate) fn plan(&self, header: &RamHeader, epoch: u64, plan: &mut Vec<Planned>) {
        plan.clear();
        let mut index = lock(&self.index);
        let Some(block) = index.sent.block(&header.block) else {
            return;
        };
        if self.holds == Holds::Memory {
            for offset in header.zero_offsets() {
                index.forget((block, offset / self.page_size as u64));
            }
        }
        for (number, offset) in header.normal_offsets().iter().enumerate() {
            let page = (block, offset / self.page_size as u64);
            // Most pages are sent once.
            if !index.sent.insert(page.0, page.1) {
                continue;
            }
            match index.touch(page, epoch, self.limit) {
                Some((touch, has_version)) => plan.push(Planned {
                    page: number,
                    touch,
                    has_version,
                }),
                None if self.holds == Holds::Memory => index.forget(page),
                None => {}
            }
        }
    }

    /// A packet is sent without [`prepare`](Self::prepare).
    pub(crate) fn pass_by(&self, header: &RamHeader) {
        let mut index = lock(&self.index);
        let Some(block) = index.sent.block(&header.block) else {
            return;
        };
        let offsets = [header.normal_offsets(), header.zero_offsets()];
        for offset in offsets.into_iter().flatten() {
            let page = (block, offset / self.page_size as u64);
            if self.holds == Holds::Memory {
                index.forget(page);
            }
        }
        for offset in header.normal_offsets() {
            index.sent.insert(block, offset / self.page_size as u64);
        }
    }

    /// Carries out the planned touches. `earlier` becomes the versions that the receiver has of these pages, back to back, and
    /// `marks` what each page is.
    pub(crate) fn prepare(
        &self,
        plan: &[Planned],
        pages: &[u8],
        earlier: &mut Vec<u8>,
        marks: &mut Vec<Mark>,
    ) {
        earlier.clear();
        marks.clear();
        marks.resize(pages.len() / self.page_size, Mark::Plain);
        for planned in plan {
            let start = planned.page * self.page_size;
            let page = &pages[start..start + self.page_size];
            let mut kept = lock(self.content(planned.touch.slot));
            marks[planned.page] = match (planned.has_version && !kept.is_empty(), self.holds) {
                (true, Holds::Slots) => Mark::Difference(planned.touch),
                (true, Holds::Memory) => Mark::InPlace,
                (false, Holds::Slots) => Mark::Store(planned.touch),
                (false, Holds::Memory) => Mark::Plain,
            };
            if marks[planned.page].is_difference() {
                earlier.extend_from_slice(&kept);
            }
            if kept.is_empty() {
                *kept = page.into();
                self.kept.fetch_add(page.len() as u64, Ordering::Relaxed);
            } else {
                kept.copy_from_slice(page);
            }
        }
    }

    /// The packet is built: others may touch its slots.
    pub(crate) fn finish(&self, plan: &[Planned]) {
        let mut index = lock(&self.index);
        for planned in plan {
            index.slot(planned.touch.slot).is_busy = false;
        }
    }

    /// The page in a slot. Uncontended: one packet at a time touches a slot.
    fn content(&self, slot: u32) -> &Mutex<Content> {
        let contents = self
            .contents
            .get_or_init(|| (0..self.limit).map(|_| Mutex::default()).collect());
        &contents[slot as usize]
    }
}

impl Index {
    /// Touches the slot of a page, after finding one for a new page; returns whether the slot has a version of the page. `None` if
    /// the slot may not be touched now, or no slot was found.
    fn touch(&mut self, page: Page, epoch: u64, limit: usize) -> Option<(Touch, bool)> {
        let known = self.slot_of.get(&page).copied();
        let number = match known {
            Some(number) => number,
            None => self.slot_for(page, epoch, limit)?,
        };
        if known.is_some() {
            let slot = &self.slots[number as usize];
            if slot.is_busy || slot.epoch >= epoch {
                return None;
            }
            if slot.round == self.round {
                self.next_round();
            }
        }
        let round = self.round;
        let slot = self.slot(number);
        let version = slot.version;
        slot.version = version.wrapping_add(1);
        slot.is_busy = true;
        (slot.epoch, slot.round) = (epoch, round);
        let slot = number;
        Some((Touch { slot, version }, known.is_some()))
    }

    /// Finds a slot for a page without one.
    fn slot_for(&mut self, page: Page, epoch: u64, limit: usize) -> Option<u32> {
        let number = if let Some(number) = self.free(epoch) {
            number
        } else if self.slots.len() < limit {
            self.slots.push(Slot {
                page,
                version: 0,
                epoch,
                round: self.round,
                is_busy: false,
            });
            u32::try_from(self.slots.len() - 1).ok()?
        } else {
            let number = self.unused(epoch)?;
            let before = self.slot(number).page;
            self.slot_of.remove(&before);
            number
        };
        self.slot(number).page = page;
        self.slot_of.insert(page, number);
        Some(number)
    }

    /// Takes a slot without a page.
    fn free(&mut self, epoch: u64) -> Option<u32> {
        let last = self.free.len().saturating_sub(EXAMINED);
        let found = self.free[last..].iter().position(|free| {
            let slot = &self.slots[*free as usize];
            !slot.is_busy && slot.epoch < epoch
        })?;
        Some(self.free.swap_remove(last + found))
    }

    /// Finds a slot whose page has not been sent for some rounds.
    fn unused(&mut self, epoch: u64) -> Option<u32> {
        let round = self.round;
        for _ in 0..EXAMINED.min(self.slots.len()) {
            let number = self.hand;
            self.hand = (number + 1) % self.slots.len();
            let slot = &self.slots[number];
            let number = u32::try_from(number).ok()?;
            // Slots without a page are in `free`.
            let has_page = self.slot_of.get(&slot.page) == Some(&number);
            if has_page && !slot.is_busy && slot.epoch < epoch && slot.round + KEPT_ROUNDS <= round
            {
                return Some(number);
            }
        }
        self.misses += 1;
        if self.misses > MISSES * self.slots.len() {
            self.next_round();
        }
        None
    }

    fn next_round(&mut self) {
        self.round += 1;
        self.misses = 0;
    }

    /// Drops the version of a page.
    fn forget(&mut self, page: Page) {
        if let Some(number) = self.slot_of.remove(&page) {
            self.free.push(number);
        }
    }

    fn slot(&mut self, number: u32) -> &mut Slot {
        &mut self.slots[number as usize]
    }
}

#[cfg(test)]
mod tests {
    use multifd::BlockName;

    use super::*;

    impl DeltaSender {
        /// Version and content of all slots in use.
        pub(in crate::delta) fn all(&self) -> Vec<(u32, Vec<u8>)> {
            let index = lock(&self.index);
            let slots = (0..).zip(&index.slots);
            let content = |slot| lock(self.content(slot)).to_vec();
            slots
                .map(|(number, slot)| (slot.version, content(number)))
                .collect()
        }
    }

    const PAGE: usize = 4096;

    fn header(pages: &[usize], zero: &[usize]) -> RamHeader {
        let mut header = RamHeader::new(Layout::X86);
        header.block = BlockName::new(b"ram").unwrap();
        let offsets = |pages: &[usize]| pages.iter().map(|page| (page * PAGE) as u64).collect();
        let [normal, zero]: [Vec<u64>; 2] = [offsets(pages), offsets(zero)];
        header.set_pages(&normal, &zero, Layout::X86).unwrap();
        header
    }

    /// A sender, and the memory of a receiver that restores pages in place.
    struct InPlace {
        sender: DeltaSender,
        received: Vec<Vec<u8>>,
    }

    impl InPlace {
        /// Sends pages as a writer does, and checks what the receiver has.
        fn send(&mut self, now: &[Vec<u8>], epoch: u64, pages: &[usize]) {
            let (mut plan, mut marks, mut earlier) = (Vec::new(), Vec::new(), Vec::new());
            self.sender.plan(&header(pages, &[]), epoch, &mut plan);
            let bytes = pages
                .iter()
                .map(|page| &now[*page][..])
                .collect::<Vec<_>>()
                .concat();
            self.sender.prepare(&plan, &bytes, &mut earlier, &mut marks);
            self.sender.finish(&plan);
            let mut earlier = earlier.chunks(PAGE);
            for (page, mark) in pages.iter().zip(&marks) {
                let received = &mut self.received[*page];
                if *mark == Mark::InPlace {
                    assert!(
                        earlier.next() == Some(received),
                        "page {page} in epoch {epoch}"
                    );
                }
                received.clone_from(&now[*page]);
            }
            assert!(earlier.next().is_none());
        }
    }

    /// Also when pages are sent twice in an epoch, so that free slots cannot be used yet.
    #[test]
    fn a_slot_belongs_to_one_page() {
        let bytes = 6 * (PAGE + super::super::SLOT_OVERHEAD);
        let mut ends = InPlace {
            sender: DeltaSender::in_place(bytes, Layout::X86),
            received: vec![vec![0; PAGE]; 20],
        };
        let mut now: Vec<_> = (0..20).map(|page| vec![page; PAGE]).collect();
        ends.send(&now, 0, &(0..20).collect::<Vec<_>>());
        ends.send(&now, 1, &[0, 1, 2, 3, 4, 5]);
        // The slot of page 0 is free.
        ends.sender.plan(&header(&[], &[0]), 2, &mut Vec::new());
        ends.received[0].fill(0);
        ends.send(&now, 80, &[1, 2, 3, 4]);
        // So are the slots of these.
        ends.send(&now, 80, &[1, 2, 3, 4]);
        ends.send(&now, 80, &[10]);
        ends.send(&now, 81, &[11, 12, 13, 14, 15]);
        for page in &mut now[10..16] {
            page[7] += 1;
        }
        ends.send(&now, 82, &[10, 11, 12, 13, 14, 15]);
    }
}
