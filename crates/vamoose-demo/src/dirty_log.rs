//! The dirty log, which tells the source which pages its guest has written.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde::Serialize;
use testguest::{Guest, Slot};
use vamoose_live::{DirtyLog, KvmDirtyLog, KvmSlot, Ram, UserfaultLog};

/// A dirty log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LogName {
    /// KVM's bitmap, for a KVM guest
    Kvm,
    /// Write protection of this process's page tables, for any guest
    Userfaultfd,
}

/// Opens the log `name` of the writes of `guest` to its memory `ram`.
pub(crate) fn open(name: LogName, guest: &Guest, ram: &Ram) -> Result<Arc<dyn DirtyLog>> {
    Ok(match name {
        LogName::Kvm => Arc::new(kvm_log(guest, ram)?),
        LogName::Userfaultfd => Arc::new(UserfaultLog::new(ram)?),
    })
}

#[allow(
    unsafe_code,
    reason = "the log has to be told which memory the VM's slots show"
)]
fn kvm_log(guest: &Guest, ram: &Ram) -> Result<KvmDirtyLog> {
    let vm = guest
        .vm_fd()
        .context("--dirty-log kvm: the guest does not run under KVM")?;
    let slots = guest.slots().iter().map(slot).collect();
    // SAFETY: a `Guest` never changes its slots, which it describes itself: each shows a whole
    // block of its memory, and `ram` has the same mappings in the same order. The log keeps `ram`, and its mappings with it.
    Ok(unsafe { KvmDirtyLog::new(vm, slots, ram) }?)
}

fn slot(slot: &Slot) -> KvmSlot {
    KvmSlot {
        slot: slot.slot,
        flags: slot.flags,
        guest_phys_addr: slot.guest_address,
        block: slot.block,
        offset: slot.offset,
        len: slot.len,
    }
}
