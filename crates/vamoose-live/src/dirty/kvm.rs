//! KVM's dirty bitmap: the pages that the guest wrote.
//!
//! By KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 (Linux 5.1), `collect` reads the bitmap without changing it, and
//! `clear` clears and write-protects the pages that are about to be sent. A page that is written ten times
//! before it is sent is sent once and faults once.
//!
//! With KVM_DIRTY_LOG_INITIALLY_SET (Linux 5.7), `start` protects nothing: in KVM's bitmap every page is dirty, and
//! `watch` clears and protects window by window. Without it, KVM protects all of the guest's memory in `start`, under the lock
//! that the guest's own page faults take: seconds per TiB.

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd},
    sync::Mutex,
};

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region,
};
use vamoose_link::lock;

use super::{DirtyLog, DirtyLogError, set_pages};
use crate::{
    Ram,
    sys::kvm::{Vm, VmWithSlots},
};

/// A memory slot of a VM, which places a part of a RAM block in the guest. As passed to
/// `KVM_SET_USER_MEMORY_REGION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmSlot {
    /// Number of the slot, with the address space in the upper 16 bits.
    pub slot: u32,
    /// `KVM_MEM_READONLY` or no flags. The log adds `KVM_MEM_LOG_DIRTY_PAGES` while it runs.
    pub flags: u32,
    /// Start in the guest's physical memory, in bytes.
    pub guest_phys_addr: u64,
    /// Index in [`Ram`] of the RAM block.
    pub block: usize,
    /// Offset in the block, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Logs the pages that a KVM guest writes, by KVM's bitmap.
///
/// It sees the writes of vCPUs, but not those of the VMM's device emulation, vhost, VFIO and other processes.
/// The VMM marks those in a [`SharedBitmap`](super::SharedBitmap), and combines both logs with
/// [`Merged`](super::Merged).
///
/// It controls the slots' `KVM_MEM_LOG_DIRTY_PAGES` and the VM's `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`.
/// [`stop`](DirtyLog::stop) switches both off. Not for a VM with dirty rings.
#[derive(Debug)]
pub struct KvmDirtyLog {
    slots: Slots,
    /// A bitmap per slot, as a buffer for KVM.
    bitmaps: Vec<Mutex<Vec<u64>>>,
    /// Flags of KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 that are enabled while the log runs.
    manual: u32,
}

const LOG: &str = "KVM";

impl KvmDirtyLog {
    /// A log for the guest's memory `ram` in `vm`, the file descriptor of a KVM VM, which is duplicated.
    /// `slots` are the VM's slots that map it, in any order. A block may be mapped by several slots, but all of it has to be
    /// mapped.
    ///
    /// # Safety
    /// `vm` has to own its file descriptor, as kvm-ioctls' `VmFd` does: it stays open during this call. The VM has to have these
    /// slots, each with this length and guest address and at the block's address in this process, for as long as the log is used.
    ///
    /// # Errors
    /// [`DirtyLogError::Setup`] if `slots` do not fit `ram`, [`DirtyLogError::System`] if `vm` is not a VM,
    /// [`DirtyLogError::Unsupported`] before Linux 5.1.
    #[allow(unsafe_code, reason = "declares what only the VMM can know")]
    pub unsafe fn new(
        vm: &impl AsRawFd,
        slots: Vec<KvmSlot>,
        ram: &Ram,
    ) -> Result<Self, DirtyLogError> {
        // SAFETY: it is open while `vm` is borrowed, as the caller promises.
        let vm = open(unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) })?;
        let capability = vm
            .check_extension(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)
            .map_err(failed("KVM_CHECK_EXTENSION"))?;
        if capability & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE == 0 {
            return Err(DirtyLogError::Unsupported {
                log: LOG,
                reason: "this KVM has no manual protection: it takes Linux 5.1 or later".into(),
            });
        }
        // SAFETY: the caller promises the same.
        let slots = unsafe { Slots::new(vm, slots, ram) }?;
        let bitmap = |slot: &Slot| Mutex::new(vec![0; slot.pages.len().div_ceil(64)]);
        Ok(Self {
            bitmaps: slots.slots.iter().map(bitmap).collect(),
            slots,
            manual: capability
                & (KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET),
        })
    }

    fn set_manual(&self, flags: u32) -> Result<(), DirtyLogError> {
        let vm = self.slots.vm.vm();
        vm.enable_capability(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, flags.into())
            .map_err(failed("KVM_ENABLE_CAP"))
    }
}

impl DirtyLog for KvmDirtyLog {
    fn start(&self) -> Result<(), DirtyLogError> {
        self.set_manual(self.manual)?;
        // Off first: a bitmap that the VMM or an earlier attempt has left goes away with it.
        self.slots.set_logging(false)?;
        self.slots.set_logging(true)
    }

    fn watch(&self, block: usize, pages: Range<usize>) -> Result<(), DirtyLogError> {
        let mut words = vec![0; pages.len().div_ceil(64)];
        set_pages(&mut words, 0..pages.len());
        self.clear(block, pages.start, &words)
    }

    fn collect(
        &self,
        block: usize,
        first_page: usize,
        dirty: &mut [u64],
    ) -> Result<(), DirtyLogError> {
        for (slot, bitmap) in self.slots.slots.iter().zip(&self.bitmaps) {
            if slot.block != block {
                continue;
            }
            let mut bitmap = lock(bitmap);
            let read = self.slots.vm.dirty_log(slot.region.slot, &mut bitmap);
            read.map_err(failed("KVM_GET_DIRTY_LOG"))?;
            for (index, &word) in bitmap.iter().enumerate().filter(|&(_, &word)| word != 0) {
                add(dirty, first_page, slot.pages.start + index * 64, word);
            }
        }
        Ok(())
    }

    fn clear(&self, block: usize, first_page: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        let pages = first_page..first_page + words.len() * 64;
        for (slot, bitmap) in self.slots.slots.iter().zip(&self.bitmaps) {
            let wanted = pages.start.max(slot.pages.start)..pages.end.min(slot.pages.end);
            if slot.block != block || wanted.is_empty() {
                continue;
            }
            // KVM takes whole words of the slot's own bitmap. Pages that were not asked for are 0 in them and stay as
            // they are.
            let first = (wanted.start - slot.pages.start) / 64 * 64;
            let end = (wanted.end - slot.pages.start)
                .next_multiple_of(64)
                .min(slot.pages.len());
            let mut bitmap = lock(bitmap);
            let cleared = &mut bitmap[..(end - first).div_ceil(64)];
            for (index, cleared) in cleared.iter_mut().enumerate() {
                *cleared = window(words, first_page, slot.pages.start + first + index * 64);
            }
            if cleared.iter().all(|&word| word == 0) {
                continue;
            }
            let pages = u32::try_from(end - first).map_err(|_| DirtyLogError::Setup {
                log: LOG,
                reason: format!("{} pages are too many to clear at once", end - first),
            })?;
            let vm = &self.slots.vm;
            vm.clear_dirty_log(slot.region.slot, first as u64, pages, cleared)
                .map_err(failed("KVM_CLEAR_DIRTY_LOG"))?;
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.slots.set_logging(false).and(self.set_manual(0))
    }
}

/// Sets in `dirty`, whose first bit is page `first`, a multiple of 64, the bits of `word`, which has the 64 pages from `page` on.
/// Pages outside of it are ignored.
fn add(dirty: &mut [u64], first: usize, page: usize, word: u64) {
    let shift = page % 64;
    let mut set = |index: Option<usize>, bits: u64| {
        if let Some(dirty) = index.and_then(|index| dirty.get_mut(index)) {
            *dirty |= bits;
        }
    };
    let index = (page / 64).checked_sub(first / 64);
    set(index, word << shift);
    if shift > 0 {
        set(
            (page / 64 + 1).checked_sub(first / 64),
            word >> (64 - shift),
        );
    }
}

/// The 64 pages from `page` on, out of `words` that begin with page `first`; pages outside of them are 0.
fn window(words: &[u64], first: usize, page: usize) -> u64 {
    let word = |index| words.get(index).copied().unwrap_or(0);
    if page < first {
        let missing = first - page;
        return if missing < 64 { word(0) << missing } else { 0 };
    }
    let (index, shift) = ((page - first) / 64, (page - first) % 64);
    match shift {
        0 => word(index),
        _ => word(index) >> shift | word(index + 1) << (64 - shift),
    }
}

/// The slots of a VM that map its RAM.
#[derive(Debug)]
struct Slots {
    vm: VmWithSlots,
    slots: Vec<Slot>,
    /// Keeps the slots' memory mapped.
    _ram: Ram,
}

#[derive(Debug)]
struct Slot {
    /// The slot as the VMM has set it, without logging.
    region: kvm_userspace_memory_region,
    block: usize,
    /// The pages of the block that the slot maps.
    pages: Range<usize>,
}

impl Slots {
    /// # Safety
    /// As of [`KvmDirtyLog::new`].
    #[allow(unsafe_code, reason = "declares what only the VMM can know")]
    unsafe fn new(vm: Vm, slots: Vec<KvmSlot>, ram: &Ram) -> Result<Self, DirtyLogError> {
        let slots =
            check(&slots, ram).map_err(|reason| DirtyLogError::Setup { log: LOG, reason })?;
        Ok(Self {
            // SAFETY: the slots named to it are those of this list, which the VM has, as the caller promises;
            // bitmaps are made as long as a slot has pages.
            vm: unsafe { VmWithSlots::new(vm) },
            slots,
            _ram: ram.clone(),
        })
    }

    /// Switches the logging of all slots, and reports the first failure.
    fn set_logging(&self, on: bool) -> Result<(), DirtyLogError> {
        let mut result = Ok(());
        for slot in &self.slots {
            let mut region = slot.region;
            if on {
                region.flags |= KVM_MEM_LOG_DIRTY_PAGES;
            }
            result = result.and(self.vm.set_slot(&region));
        }
        result.map_err(failed("KVM_SET_USER_MEMORY_REGION"))
    }
}

fn check(slots: &[KvmSlot], ram: &Ram) -> Result<Vec<Slot>, String> {
    let checked = slots.iter().enumerate().map(|(index, slot)| {
        let number = slot.slot;
        if slots[..index].iter().any(|other| other.slot == number) {
            return Err(format!("two slots have the number {number}"));
        }
        let Some(block) = ram.blocks().get(slot.block) else {
            return Err(format!(
                "slot {number} is of block {}, which is not there",
                slot.block
            ));
        };
        let page_size = ram.page_size();
        let (offset, len) = (usize::try_from(slot.offset), usize::try_from(slot.len));
        let range = offset.ok().zip(len.ok()).and_then(|(offset, len)| {
            let end = offset.checked_add(len)?;
            let whole = offset.is_multiple_of(page_size) && len.is_multiple_of(page_size);
            (whole && len > 0 && end <= block.len()).then_some(offset..end)
        });
        let Some(range) = range else {
            return Err(format!(
                "slot {number} ({} bytes from {} on) is not made of whole pages of block {block:?}",
                slot.len, slot.offset
            ));
        };
        Ok(Slot {
            region: kvm_userspace_memory_region {
                slot: number,
                flags: slot.flags & !KVM_MEM_LOG_DIRTY_PAGES,
                guest_phys_addr: slot.guest_phys_addr,
                memory_size: slot.len,
                userspace_addr: (block.address() + range.start) as u64,
            },
            block: slot.block,
            pages: range.start / page_size..range.end / page_size,
        })
    });
    let mut checked = checked.collect::<Result<Vec<_>, _>>()?;
    checked.sort_by_key(|slot| (slot.block, slot.pages.start));
    for (index, block) in ram.blocks().iter().enumerate() {
        let mut covered = 0;
        for slot in checked.iter().filter(|slot| slot.block == index) {
            if slot.pages.start > covered {
                break;
            }
            covered = covered.max(slot.pages.end);
        }
        if covered < ram.pages(index) {
            return Err(format!("page {covered} of block {block:?} is in no slot"));
        }
    }
    Ok(checked)
}

fn open(vm: BorrowedFd<'_>) -> Result<Vm, DirtyLogError> {
    Vm::new(vm).map_err(failed("fcntl(F_DUPFD_CLOEXEC)"))
}

fn failed(call: &'static str) -> impl FnOnce(io::Error) -> DirtyLogError {
    super::failed(LOG, call)
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::dirty::pages_in;

    proptest! {
        /// A slot's words and a block's lie apart by any number of pages.
        #[test]
        fn words_are_moved_between_slot_and_block(
            words in vec(any::<u64>(), 0..6),
            first_word in 0..4_usize,
            slot in 0..300_usize,
        ) {
            let first = first_word * 64;
            // Of the block, as the slot sees it.
            for page in (slot..600).step_by(64) {
                let mut expected = pages_in(first, &words)
                    .filter_map(|set| set.checked_sub(page).filter(|bit| *bit < 64));
                prop_assert!(pages_in(0, &[window(&words, first, page)]).eq(expected.by_ref()));
            }
            // Of the slot, as the block has it.
            let mut dirty = [0; 8];
            for (index, word) in words.iter().enumerate() {
                add(&mut dirty, first, slot + index * 64, *word);
            }
            let expected = pages_in(slot, &words).filter(|page| (first..first + 8 * 64).contains(page));
            prop_assert!(pages_in(first, &dirty).eq(expected));
        }
    }
}
