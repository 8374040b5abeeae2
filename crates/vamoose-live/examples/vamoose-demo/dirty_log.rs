//! The dirty log of the source's guest.

use std::sync::Arc;

use anyhow::Result;
use testguest::Guest;
use vamoose_live::{
    Ram,
    dirty::{DirtyLog, KvmDirtyLog, KvmSlot, UserfaultLog},
};

/// Opens a log of the writes of `guest` to its memory `ram`: KVM's for a KVM guest, that of this process's page tables otherwise.
#[allow(
    unsafe_code,
    reason = "the log has to be told which memory the VM's slots show"
)]
pub(crate) fn open(guest: &Guest, ram: &Ram) -> Result<Arc<dyn DirtyLog>> {
    let Some(vm) = guest.vm_fd() else {
        return Ok(Arc::new(UserfaultLog::new(ram)?));
    };
    let slots = guest.slots().iter().map(|slot| KvmSlot {
        slot: slot.slot,
        flags: slot.flags,
        guest_phys_addr: slot.guest_address,
        block: slot.block,
        offset: slot.offset,
        len: slot.len,
    });
    // SAFETY: a `Guest` never changes its slots, which it describes itself: each shows a whole
    // block of its memory, and `ram` has the same mappings in the same order. The log keeps `ram`, and its mappings with it.
    Ok(Arc::new(unsafe {
        KvmDirtyLog::new(&vm, slots.collect(), ram)
    }?))
}
