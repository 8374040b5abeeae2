//! KVM's dirty bitmap: what the guest wrote.
//!
//! With KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 (Linux 5.1), `collect` reads the bitmap and leaves it as it is, and
//! `clear` clears and write-protects the pages that are about to be sent. A page that is written ten times
//! before its turn comes is sent once and faults once. Without it, KVM reads, clears and protects all at once
//! in `collect`.
//!
//! KVM_DIRTY_LOG_INITIALLY_SET is left alone: in its first bitmap everything is dirty, which the
//! migration knows, and pages that were never touched would count as written.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    sync::Mutex,
};

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
    KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region,
};
use vamoose_link::lock;

use super::{Bitmap, DirtyLog, DirtyLogError};
use crate::{
    Ram,
    sys::kvm::{Vm, VmWithSlots},
};

/// A memory slot of a VM: where a part of a RAM block is in the guest. What the VMM once gave to
/// `KVM_SET_USER_MEMORY_REGION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmSlot {
    /// Its number, with the address space in the upper 16 bits.
    pub slot: u32,
    /// Its flags, `KVM_MEM_READONLY` or none. The log adds `KVM_MEM_LOG_DIRTY_PAGES` while it runs.
    pub flags: u32,
    /// Where it begins in the guest's physical memory, in bytes.
    pub guest_phys_addr: u64,
    /// The RAM block that it shows, by its index in [`Ram`].
    pub block: usize,
    /// Where in the block it begins, in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub len: u64,
}

/// Logs what a KVM guest writes, in KVM's bitmap.
///
/// It sees what vCPUs write. Not what the VMM's device emulation writes, nor vhost, VFIO and other processes:
/// the VMM marks that in a [`SharedBitmap`](super::SharedBitmap), and makes one log of both with
/// [`Merged`](super::Merged).
///
/// It is in charge of the slots' `KVM_MEM_LOG_DIRTY_PAGES` and of the VM's `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`,
/// both of which [`stop`](DirtyLog::stop) leaves off. Not for a VM with dirty rings, see
/// [`KvmDirtyRing`](super::KvmDirtyRing).
#[derive(Debug)]
pub struct KvmDirtyLog {
    slots: Slots,
    /// A bitmap for each slot, to read from KVM and to pass to it.
    bitmaps: Vec<Mutex<Vec<u64>>>,
    manual: bool,
}

pub(super) const LOG: &str = "KVM";

impl KvmDirtyLog {
    /// A log for the guest's memory `ram` in `vm`, the file descriptor of a KVM VM, which is duplicated.
    /// `slots` are the VM's slots that show it, in any order; a block may be shown by several, but has to be
    /// shown whole.
    ///
    /// # Safety
    /// The VM has to have these slots, each with this length and guest address and at the block's address in this
    /// process, for as long as the log is used.
    ///
    /// # Errors
    /// [`DirtyLogError::Setup`] if `slots` do not fit `ram`, [`DirtyLogError::System`] if `vm` is not a VM.
    #[allow(unsafe_code, reason = "declares what only the VMM can know")]
    pub unsafe fn new(
        vm: impl AsFd,
        slots: Vec<KvmSlot>,
        ram: &Ram,
    ) -> Result<Self, DirtyLogError> {
        let vm = open(vm.as_fd())?;
        let capability = vm
            .check_extension(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)
            .map_err(failed("KVM_CHECK_EXTENSION"))?;
        // SAFETY: the caller promises the same.
        let slots = unsafe { Slots::new(vm, slots, ram) }?;
        let bitmap = |slot: &Slot| Mutex::new(vec![0; slot.pages.len().div_ceil(64)]);
        Ok(Self {
            bitmaps: slots.slots.iter().map(bitmap).collect(),
            slots,
            manual: capability & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0,
        })
    }

    /// The same, but pages are cleared when they are collected, as where KVM cannot do otherwise.
    #[must_use]
    pub fn clearing_in_collect(self) -> Self {
        Self {
            manual: false,
            ..self
        }
    }

    /// Whether pages stay dirty until [`clear`](DirtyLog::clear), which is what KVM does since Linux 5.1.
    pub fn clears_manually(&self) -> bool {
        self.manual
    }

    fn set_manual(&self, on: bool) -> Result<(), DirtyLogError> {
        if !self.manual {
            return Ok(());
        }
        let flags = if on {
            KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE
        } else {
            0
        };
        let vm = self.slots.vm.vm();
        vm.enable_capability(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, flags.into())
            .map_err(failed("KVM_ENABLE_CAP"))
    }
}

impl DirtyLog for KvmDirtyLog {
    fn start(&self) -> Result<(), DirtyLogError> {
        self.set_manual(true)?;
        // Off first: a bitmap that the VMM or an earlier attempt has left goes away with it.
        self.slots.set_logging(false)?;
        self.slots.set_logging(true)
    }

    fn collect(&self, block: usize, dirty: &mut Bitmap) -> Result<(), DirtyLogError> {
        for (slot, bitmap) in self.slots.slots.iter().zip(&self.bitmaps) {
            if slot.block != block {
                continue;
            }
            let mut bitmap = lock(bitmap);
            let read = self.slots.vm.dirty_log(slot.region.slot, &mut bitmap);
            read.map_err(failed("KVM_GET_DIRTY_LOG"))?;
            let shift = slot.pages.start % 64;
            if shift == 0 {
                dirty.add_words(slot.pages.start, &bitmap);
                continue;
            }
            for (index, &word) in bitmap.iter().enumerate().filter(|&(_, &word)| word != 0) {
                let first = slot.pages.start - shift + index * 64;
                dirty.add_words(first, &[word << shift, word >> (64 - shift)]);
            }
        }
        Ok(())
    }

    fn clear(&self, block: usize, first_page: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        if !self.manual {
            return Ok(());
        }
        for (slot, bitmap) in self.slots.slots.iter().zip(&self.bitmaps) {
            let wanted = first_page.max(slot.pages.start)
                ..(first_page + words.len() * 64).min(slot.pages.end);
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
            for (index, word) in cleared.iter_mut().enumerate() {
                let page = slot.pages.start + first + index * 64;
                *word = window(words, first_page, page);
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
        self.slots.set_logging(false).and(self.set_manual(false))
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

/// The slots of a VM that show its RAM.
#[derive(Debug)]
pub(super) struct Slots {
    pub(super) vm: VmWithSlots,
    pub(super) slots: Vec<Slot>,
    /// What the slots point to.
    _ram: Ram,
}

#[derive(Debug)]
pub(super) struct Slot {
    /// As the VMM has it, without logging.
    pub(super) region: kvm_userspace_memory_region,
    pub(super) block: usize,
    /// The pages of the block that it shows.
    pub(super) pages: Range<usize>,
}

impl Slots {
    /// # Safety
    /// As of [`KvmDirtyLog::new`].
    #[allow(unsafe_code, reason = "declares what only the VMM can know")]
    pub(super) unsafe fn new(
        vm: Vm,
        slots: Vec<KvmSlot>,
        ram: &Ram,
    ) -> Result<Self, DirtyLogError> {
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
    pub(super) fn set_logging(&self, on: bool) -> Result<(), DirtyLogError> {
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

pub(super) fn open(vm: BorrowedFd<'_>) -> Result<Vm, DirtyLogError> {
    Vm::new(vm).map_err(failed("fcntl(F_DUPFD_CLOEXEC)"))
}

pub(super) fn failed(call: &'static str) -> impl FnOnce(io::Error) -> DirtyLogError {
    move |source| DirtyLogError::System {
        log: LOG,
        call,
        source,
    }
}
