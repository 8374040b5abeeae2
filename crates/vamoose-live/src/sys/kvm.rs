//! The dirty logs of a KVM virtual machine, by file descriptors that belong to a VMM.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use kvm_bindings::{
    kvm_clear_dirty_log, kvm_dirty_log, kvm_enable_cap, kvm_userspace_memory_region,
};
use rustix::ioctl::{Opcode, opcode};

const KVMIO: u8 = 0xae;
const KVM_CHECK_EXTENSION: Opcode = opcode::none(KVMIO, 0x03);
const KVM_GET_DIRTY_LOG: Opcode = opcode::write::<kvm_dirty_log>(KVMIO, 0x42);
const KVM_SET_USER_MEMORY_REGION: Opcode =
    opcode::write::<kvm_userspace_memory_region>(KVMIO, 0x46);
const KVM_ENABLE_CAP: Opcode = opcode::write::<kvm_enable_cap>(KVMIO, 0xa3);
const KVM_CLEAR_DIRTY_LOG: Opcode = opcode::read_write::<kvm_clear_dirty_log>(KVMIO, 0xc0);

/// A virtual machine.
#[derive(Clone, Debug)]
pub(crate) struct Vm(Arc<OwnedFd>);

/// A virtual machine whose slots are known.
#[derive(Debug)]
pub(crate) struct VmWithSlots(Vm);

impl Vm {
    pub(crate) fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self(Arc::new(fd.try_clone_to_owned()?)))
    }

    /// KVM's answer about `capability`; 0 if it does not have it.
    pub(crate) fn check_extension(&self, capability: u32) -> io::Result<u32> {
        let (fd, argument) = (self.0.as_raw_fd(), libc::c_ulong::from(capability));
        // SAFETY: the request takes a number, and touches no memory of this process.
        let result = unsafe { libc::ioctl(fd, KVM_CHECK_EXTENSION as libc::Ioctl, argument) };
        u32::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Sets `capability`, one whose only argument is a number, to `argument`.
    pub(crate) fn enable_capability(&self, capability: u32, argument: u64) -> io::Result<()> {
        let mut enable = kvm_enable_cap {
            cap: capability,
            args: [argument, 0, 0, 0],
            ..kvm_enable_cap::default()
        };
        // SAFETY: the request takes this argument. The capabilities of the dirty logs are about what KVM records.
        unsafe { super::ioctl(self.0.as_fd(), KVM_ENABLE_CAP, &mut enable) }.map(drop)
    }
}

impl VmWithSlots {
    /// # Safety
    /// Every slot passed to a method must be one that the VM has: with exactly the address, length and guest address that are given,
    /// or with as many pages as the bitmap has bits, rounded up to whole words.
    pub(crate) unsafe fn new(vm: Vm) -> Self {
        Self(vm)
    }

    pub(crate) fn vm(&self) -> &Vm {
        &self.0
    }

    /// Sets the flags of an existing slot. KVM refuses another userspace address, or another length but 0.
    pub(crate) fn set_slot(&self, slot: &kvm_userspace_memory_region) -> io::Result<()> {
        let mut slot = *slot;
        // SAFETY: the request takes this argument. The guest gets no memory that it did not have before, since the VM
        // has the slot, as the caller of `new` has promised.
        unsafe { super::ioctl(self.fd(), KVM_SET_USER_MEMORY_REGION, &mut slot) }.map(drop)
    }

    /// Fills `bitmap`, which has a bit for each page of `slot`.
    pub(crate) fn dirty_log(&self, slot: u32, bitmap: &mut [u64]) -> io::Result<()> {
        let mut log = kvm_dirty_log {
            slot,
            ..kvm_dirty_log::default()
        };
        log.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
        // SAFETY: the request takes this argument. KVM writes a bit for each page of the slot, rounded up to whole
        // words, which is the length of the bitmap; it is borrowed exclusively.
        unsafe { super::ioctl(self.fd(), KVM_GET_DIRTY_LOG, &mut log) }.map(drop)
    }

    /// Clears the pages of `slot` that are set in `bitmap`, which is about the `pages` pages from `first` on.
    ///
    /// # Errors
    /// If `bitmap` has too few bits for `pages`; and if `first` is not a multiple of 64, or `pages` is neither a multiple of 64 nor
    /// reaches exactly to the end of the slot.
    pub(crate) fn clear_dirty_log(
        &self,
        slot: u32,
        first: u64,
        pages: u32,
        bitmap: &[u64],
    ) -> io::Result<()> {
        if bitmap.len() < (pages as usize).div_ceil(64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut log = kvm_clear_dirty_log {
            slot,
            num_pages: pages,
            first_page: first,
            ..kvm_clear_dirty_log::default()
        };
        log.__bindgen_anon_1.dirty_bitmap = bitmap.as_ptr().cast_mut().cast();
        // SAFETY: the request takes this argument. KVM only reads the bitmap: a bit for each of the pages,
        // rounded up to whole words, which are there.
        unsafe { super::ioctl(self.fd(), KVM_CLEAR_DIRTY_LOG, &mut log) }.map(drop)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}
