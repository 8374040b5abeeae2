//! A KVM guest whose vCPUs store what the test requests.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    sync::Arc,
};

use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::param::page_size;
use vamoose_live::{
    Ram,
    dirty::{DirtyLog, KvmDirtyLog, KvmSlot},
};
use vm_memory::Bytes;

use crate::model::{Fixture, Place, Write, offset_in_page};

/// Block 0 has the guest's code and page tables; the others are for the vCPUs to write.
pub(crate) const BOOT_PAGES: usize = 16;

// The guest's first GiB, mapped one to one in pages of 2 MiB.
const PML4: usize = 0x1000;
const PDPT: usize = 0x2000;
const PD: usize = 0x3000;
const CODE: usize = 0x4000;
const PRESENT_WRITABLE: u64 = 0b11;
const PAGE_2M: u64 = 1 << 7;

/// mov [rdi], rcx; out 0x10, al
const PROGRAM: [u8; 5] = [0x48, 0x89, 0x0f, 0xe6, 0x10];

/// A VM with the memory `ram`, and no vCPUs yet.
pub(crate) struct Guest {
    kvm: Kvm,
    vm: VmFd,
    pub(crate) ram: Ram,
    slots: Vec<KvmSlot>,
}

impl Guest {
    /// Shows each block at a guest address of its own. The second is shown by two slots, of which the latter begins in the
    /// middle of a word of its bitmap, somewhere else in the guest.
    pub(crate) fn new(kvm: Kvm, ram: Ram) -> Self {
        let vm = kvm.create_vm().unwrap();
        let mut slots = Vec::new();
        for (block, memory) in ram.blocks().iter().enumerate() {
            let len = memory.len() as u64;
            let cut = if block == 1 {
                100 * page_size() as u64
            } else {
                len
            };
            for (offset, len) in [(0, cut), (cut, len - cut)] {
                let slot = slots.len() as u32;
                let guest_phys_addr = u64::from(slot) << 24;
                if len > 0 {
                    slots.push(KvmSlot {
                        slot,
                        flags: 0,
                        guest_phys_addr,
                        block,
                        offset,
                        len,
                    });
                }
            }
        }
        for slot in &slots {
            let region = kvm_userspace_memory_region {
                slot: slot.slot,
                flags: slot.flags,
                guest_phys_addr: slot.guest_phys_addr,
                memory_size: slot.len,
                userspace_addr: ram.blocks()[slot.block].address() as u64 + slot.offset,
            };
            // SAFETY: the memory stays mapped as long as `ram`, which goes with the VM.
            unsafe { vm.set_user_memory_region(region) }.unwrap();
        }
        let boot = ram.blocks()[0].memory();
        boot.write_obj(PDPT as u64 | PRESENT_WRITABLE, PML4)
            .unwrap();
        boot.write_obj(PD as u64 | PRESENT_WRITABLE, PDPT).unwrap();
        for index in 0..512_usize {
            let entry = (index as u64) << 21 | PRESENT_WRITABLE | PAGE_2M;
            boot.write_obj(entry, PD + index * 8).unwrap();
        }
        boot.write_slice(&PROGRAM, CODE).unwrap();
        Self {
            kvm,
            vm,
            ram,
            slots,
        }
    }

    pub(crate) fn vm(&self) -> BorrowedFd<'_> {
        borrowed(&self.vm)
    }

    pub(crate) fn has_manual_protection(&self) -> bool {
        self.kvm
            .check_extension_raw(u64::from(kvm_bindings::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2))
            > 0
    }

    /// KVM's bitmap of it.
    pub(crate) fn bitmap(&self) -> Arc<KvmDirtyLog> {
        // SAFETY: these are the VM's slots.
        let log = unsafe { KvmDirtyLog::new(&self.vm(), self.slots.clone(), &self.ram) };
        Arc::new(log.unwrap())
    }

    /// Two vCPUs.
    pub(crate) fn with_log(self, log: Arc<dyn DirtyLog>) -> Fixture {
        let vcpus = [0, 1].map(|id| self.vcpu(id));
        let writers = vcpus.map(|vcpu| self.writer(vcpu));
        Fixture::new(self.ram, log, writers.into()).writing_from_block(1)
    }

    fn vcpu(&self, id: u64) -> VcpuFd {
        let vcpu = self.vm.create_vcpu(id).unwrap();
        let mut registers = vcpu.get_sregs().unwrap();
        let flat = kvm_segment {
            limit: u32::MAX,
            present: 1,
            s: 1,
            g: 1,
            ..kvm_segment::default()
        };
        registers.cs = kvm_segment {
            type_: 11,
            l: 1,
            selector: 8,
            ..flat
        };
        let data = kvm_segment {
            type_: 3,
            db: 1,
            selector: 16,
            ..flat
        };
        (registers.ds, registers.es, registers.ss) = (data, data, data);
        registers.cr3 = PML4 as u64;
        registers.cr4 = 1 << 5; // PAE
        registers.cr0 = 1 << 31 | 1 << 16 | 1; // paging, write protection, protected mode
        registers.efer = 1 << 10 | 1 << 8; // long mode, active
        vcpu.set_sregs(&registers).unwrap();
        vcpu
    }

    fn writer(&self, mut vcpu: VcpuFd) -> Write {
        let slots = self.slots.clone();
        Box::new(move |place, stamp| {
            vcpu.set_regs(&kvm_regs {
                rip: CODE as u64,
                rflags: 2,
                rdi: guest_address(&slots, place, stamp),
                rcx: stamp,
                ..kvm_regs::default()
            })
            .unwrap();
            match vcpu.run().unwrap() {
                VcpuExit::IoOut(0x10, _) => {}
                exit => panic!("the guest did not write: {exit:?}"),
            }
        })
    }
}

fn guest_address(slots: &[KvmSlot], place: Place, stamp: u64) -> u64 {
    let offset = (place.page * page_size() + offset_in_page(page_size(), stamp)) as u64;
    let shows = |slot: &&KvmSlot| {
        slot.block == place.block && (slot.offset..slot.offset + slot.len).contains(&offset)
    };
    let slot = slots.iter().find(shows).unwrap();
    slot.guest_phys_addr + offset - slot.offset
}

fn borrowed<T: AsRawFd>(fd: &T) -> BorrowedFd<'_> {
    // SAFETY: it is open for as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}
