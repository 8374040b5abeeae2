//! KVM's dirty rings: the pages that the guest wrote, in a ring per vCPU.
//!
//! ```text
//!        KVM, for the vCPU ──> │ dirty │ dirty │ dirty │       │ <── KVM continues here
//!                                  ^ next to harvest
//!   harvest:  note the page; dirty -> reset; next        (acquire, release)
//!   then:     KVM_RESET_DIRTY_RINGS  protects the pages again, reset -> free
//! ```
//!
//! A page is only reported once it is protected again. Otherwise a write between reading the page and the reset would be in no
//! ring. So harvesting and taking pages happen under one lock.

use std::{
    ops::Range,
    os::fd::AsFd,
    sync::{Mutex, atomic::Ordering},
};

use kvm_bindings::{KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_DIRTY_GFN_F_MASK};
use vamoose_link::lock;

use super::{
    Bitmap, DirtyLog, DirtyLogError,
    kvm::{KvmSlot, Slots, failed, open},
};
use crate::{
    Ram,
    sys::kvm::{RingEntry, RingMemory, Vm},
};

/// A VM with dirty rings, and their length.
#[derive(Debug)]
pub struct KvmRings {
    vm: Vm,
    entries: usize,
}

/// Logs the pages that a KVM guest writes, by KVM's rings (Linux 5.11).
///
/// KVM's bitmap costs a scan over every page of the guest in each round. The rings cost time for written pages only. A
/// vCPU whose ring is full stops until it is [harvested](Self::harvest), which also slows
/// down a guest that writes faster than it can be sent. Sees the same writes as
/// [`KvmDirtyLog`](super::KvmDirtyLog).
///
/// For x86 only: on other architectures KVM also writes guest memory without a vCPU (the interrupt tables of arm64), and no ring
/// records that.
#[derive(Debug)]
pub struct KvmDirtyRing {
    slots: Slots,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    rings: Vec<Ring>,
    /// The pages of each block that were harvested and not collected.
    dirty: Vec<Bitmap>,
}

#[derive(Debug)]
struct Ring {
    memory: RingMemory,
    next: usize,
}

const LOG: &str = "KVM ring";

/// `KVM_DIRTY_GFN_F_DIRTY`: the entry names a page.
const DIRTY: u32 = 1 << 0;
/// `KVM_DIRTY_GFN_F_RESET`: it was harvested.
const RESET: u32 = 1 << 1;

impl KvmRings {
    /// Gives the vCPUs that will be made in `vm` dirty rings of `entries` entries each, a power of two. 4096 is
    /// a common choice; the least is 1024 with hardware that batches (Intel's PML).
    ///
    /// # Errors
    /// [`DirtyLogError::Unsupported`] if KVM has none, [`DirtyLogError::Setup`] if it has none that long,
    /// [`DirtyLogError::System`] also if the VM has vCPUs already.
    pub fn enable(vm: impl AsFd, entries: u32) -> Result<Self, DirtyLogError> {
        let vm = open(vm.as_fd())?;
        let bytes = u64::from(entries) * size_of::<RingEntry>() as u64;
        for capability in [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING] {
            let most = vm
                .check_extension(capability)
                .map_err(failed("KVM_CHECK_EXTENSION"))?;
            if most == 0 {
                continue;
            }
            if bytes > most.into() || !entries.is_power_of_two() {
                let most = most as usize / size_of::<RingEntry>();
                return Err(DirtyLogError::Setup {
                    log: LOG,
                    reason: format!("{entries} entries are no power of two up to {most}"),
                });
            }
            vm.enable_capability(capability, bytes)
                .map_err(failed("KVM_ENABLE_CAP (KVM_CAP_DIRTY_LOG_RING)"))?;
            return Ok(Self {
                vm,
                entries: entries as usize,
            });
        }
        Err(DirtyLogError::Unsupported {
            log: LOG,
            reason: "this KVM has no dirty rings".into(),
        })
    }
}

impl KvmDirtyRing {
    /// A log for the guest's memory `ram`, shown by `slots` as in
    /// [`KvmDirtyLog::new`](super::KvmDirtyLog::new). `vcpus` are the file descriptors of **all** vCPUs of the
    /// VM.
    ///
    /// # Safety
    /// As of [`KvmDirtyLog::new`](super::KvmDirtyLog::new).
    ///
    /// # Errors
    /// [`DirtyLogError::Setup`] if `slots` do not fit `ram`, [`DirtyLogError::System`] if a vCPU has no ring.
    #[allow(unsafe_code, reason = "declares what only the VMM can know")]
    pub unsafe fn new(
        rings: &KvmRings,
        vcpus: impl IntoIterator<Item = impl AsFd>,
        slots: Vec<KvmSlot>,
        ram: &Ram,
    ) -> Result<Self, DirtyLogError> {
        // SAFETY: the caller promises the same.
        let slots = unsafe { Slots::new(rings.vm.clone(), slots, ram) }?;
        let ring = |vcpu: &dyn AsFd| {
            let memory = RingMemory::map(vcpu.as_fd(), rings.entries);
            memory.map(|memory| Ring { memory, next: 0 })
        };
        let rings = vcpus.into_iter().map(|vcpu| ring(&vcpu));
        let rings = rings.collect::<Result<_, _>>();
        let state = State {
            rings: rings.map_err(failed("mmap of a vCPU's dirty ring"))?,
            dirty: Bitmap::for_blocks(ram),
        };
        Ok(Self {
            slots,
            state: Mutex::new(state),
        })
    }

    /// Empties the rings of all vCPUs. To be called by a vCPU's thread on `KVM_EXIT_DIRTY_RING_FULL`, before it
    /// lets the vCPU run again. The pages are kept for [`collect`](DirtyLog::collect). Any thread may call this
    /// at any time.
    ///
    /// # Errors
    /// When KVM fails. The migration has to end.
    pub fn harvest(&self) -> Result<(), DirtyLogError> {
        self.harvest_into(&mut lock(&self.state))
    }

    fn harvest_into(&self, state: &mut State) -> Result<(), DirtyLogError> {
        let State { rings, dirty } = state;
        let mut harvested = 0;
        for ring in rings {
            harvested += walk(ring.memory.entries(), &mut ring.next, |slot, page| {
                if let Some((block, pages)) = self.pages_of(slot)
                    && let Some(page) = pages.clone().nth(page)
                {
                    dirty[block].set(page);
                }
            });
        }
        if harvested == 0 {
            return Ok(());
        }
        let reset = self.slots.vm.vm().reset_dirty_rings();
        reset.map_err(failed("KVM_RESET_DIRTY_RINGS"))
    }

    fn pages_of(&self, number: u32) -> Option<(usize, &Range<usize>)> {
        let mut slots = self.slots.slots.iter();
        let slot = slots.find(|slot| slot.region.slot == number)?;
        Some((slot.block, &slot.pages))
    }
}

impl DirtyLog for KvmDirtyRing {
    fn start(&self) -> Result<(), DirtyLogError> {
        self.stop()?;
        self.slots.set_logging(true)
    }

    fn collect(
        &self,
        block: usize,
        first_page: usize,
        dirty: &mut [u64],
    ) -> Result<(), DirtyLogError> {
        let mut state = lock(&self.state);
        self.harvest_into(&mut state)?;
        if let Some(harvested) = state.dirty.get_mut(block) {
            harvested.change(|harvested| {
                let harvested = harvested.iter_mut().skip(first_page / 64);
                for (dirty, harvested) in dirty.iter_mut().zip(harvested) {
                    *dirty |= std::mem::take(harvested);
                }
            });
        }
        Ok(())
    }

    /// Also empties the rings, so that no vCPU is left waiting for a harvest.
    fn stop(&self) -> Result<(), DirtyLogError> {
        let switched = self.slots.set_logging(false);
        let mut state = lock(&self.state);
        let harvested = self.harvest_into(&mut state);
        state.dirty.iter_mut().for_each(Bitmap::clear);
        switched.and(harvested)
    }
}

/// Calls `each` with slot and page of every dirty entry from `next` on, at most once around, and marks them as
/// harvested. Returns their number.
fn walk(entries: &[RingEntry], next: &mut usize, mut each: impl FnMut(u32, usize)) -> usize {
    for harvested in 0..entries.len() {
        let entry = &entries[*next];
        // Acquire: KVM sets the flag after the rest.
        if entry.flags.load(Ordering::Acquire) & KVM_DIRTY_GFN_F_MASK != DIRTY {
            return harvested;
        }
        let page = entry.offset.load(Ordering::Relaxed);
        each(
            entry.slot.load(Ordering::Relaxed),
            usize::try_from(page).unwrap_or(usize::MAX),
        );
        // Release: KVM uses the entry again only after it was read.
        entry.flags.store(RESET, Ordering::Release);
        *next = (*next + 1) % entries.len();
    }
    entries.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring in plain memory, and KVM's side of it.
    struct Fake {
        entries: Vec<RingEntry>,
        pushed: usize,
        reset: usize,
    }

    impl Fake {
        fn new(len: usize) -> Self {
            let entries = (0..len).map(|_| RingEntry::default()).collect();
            Self {
                entries,
                pushed: 0,
                reset: 0,
            }
        }

        fn push(&mut self, slot: u32, page: u64) {
            let entry = &self.entries[self.pushed % self.entries.len()];
            assert_eq!(entry.flags.load(Ordering::Relaxed), 0, "not free");
            entry.slot.store(slot, Ordering::Relaxed);
            entry.offset.store(page, Ordering::Relaxed);
            entry.flags.store(DIRTY, Ordering::Release);
            self.pushed += 1;
        }

        fn reset(&mut self) -> usize {
            let before = self.reset;
            loop {
                let entry = &self.entries[self.reset % self.entries.len()];
                if entry.flags.load(Ordering::Acquire) & RESET == 0 {
                    return self.reset - before;
                }
                entry.flags.store(0, Ordering::Release);
                self.reset += 1;
            }
        }
    }

    fn walked(fake: &Fake, next: &mut usize) -> Vec<(u32, usize)> {
        let mut found = Vec::new();
        let count = walk(&fake.entries, next, |slot, page| found.push((slot, page)));
        assert_eq!(count, found.len());
        found
    }

    #[test]
    fn a_ring_is_walked_around_and_around() {
        let (mut fake, mut next, mut page) = (Fake::new(8), 0, 0);
        // Every filling from none to full, from every place in the ring.
        for (slot, count) in (1 << 16..).zip((0..=8).cycle().take(200)) {
            for page in page..page + count {
                fake.push(slot, page as u64);
            }
            let pushed = (page..page + count).map(|page| (slot, page));
            assert!(walked(&fake, &mut next).into_iter().eq(pushed));
            assert_eq!(walked(&fake, &mut next), [], "harvested and not reset");
            assert_eq!(fake.reset(), count);
            page += count;
        }
    }

    #[test]
    fn entries_that_come_while_others_wait_for_their_reset_are_found() {
        let (mut fake, mut next) = (Fake::new(4), 0);
        fake.push(0, 10);
        assert_eq!(walked(&fake, &mut next), [(0, 10)]);
        fake.push(0, 11);
        fake.push(7, u64::MAX);
        assert_eq!(walked(&fake, &mut next), [(0, 11), (7, usize::MAX)]);
        fake.push(0, 12);
        assert_eq!(walked(&fake, &mut next), [(0, 12)]);
        // All harvested, none reset: going around again finds nothing.
        assert_eq!(walked(&fake, &mut next), []);
        assert_eq!(fake.reset(), 4);
        assert_eq!(walked(&fake, &mut next), []);
    }
}
