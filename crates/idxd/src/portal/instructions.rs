//! The instructions that submit descriptors to a device and that wait for it. [`Features`](crate::cpu::Features) has whether
//! the processor supports them.
//!
//! Source: Intel's instruction set reference.

use std::arch::asm;

use crate::{Descriptor, Record};

/// ENQCMD: submits `descriptor` to the shared work queue behind `portal`, with the PASID of this process. Returns whether the
/// queue accepted it.
///
/// # Safety
/// The processor has the instruction and the kernel has enabled it. `portal` is within a mapped portal and aligned
/// to 64 bytes. The device may do what the descriptor specifies.
pub(super) unsafe fn enqcmd(portal: *mut u8, descriptor: &Descriptor) -> bool {
    let refused: u8;
    // SAFETY: the caller's promise; it reads the descriptor's 64 bytes and writes nothing but to the portal.
    unsafe {
        asm!(
            "enqcmd {portal}, [{descriptor}]",
            "setz {refused}",
            portal = in(reg) portal,
            descriptor = in(reg) std::ptr::from_ref(descriptor),
            refused = out(reg_byte) refused,
            options(nostack),
        );
    }
    refused == 0
}

/// MOVDIR64B: writes `descriptor` to the dedicated work queue behind `portal`, atomically. A full queue drops it without a
/// notice.
///
/// # Safety
/// The processor has the instruction. `portal` is within a mapped portal and aligned to 64 bytes. The device may do
/// what the descriptor specifies.
pub(super) unsafe fn movdir64b(portal: *mut u8, descriptor: &Descriptor) {
    // SAFETY: the caller's promise; it reads the descriptor's 64 bytes and writes nothing but to the portal.
    unsafe {
        asm!(
            "movdir64b {portal}, [{descriptor}]",
            portal = in(reg) portal,
            descriptor = in(reg) std::ptr::from_ref(descriptor),
            options(nostack, preserves_flags),
        );
    }
}

/// SFENCE: earlier stores become visible before later ones. Both instructions above are weakly ordered stores.
pub(super) fn sfence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

/// UMONITOR: monitors the cache line of `record` for the next [`umwait`].
///
/// # Safety
/// The processor has the instruction (WAITPKG).
pub(crate) unsafe fn umonitor(record: &Record) {
    // SAFETY: the caller's promise; the address is that of mapped memory.
    unsafe {
        asm!("umonitor {record}", record = in(reg) std::ptr::from_ref(record), options(nostack, preserves_flags));
    }
}

/// UMWAIT: sleeps in the deeper of its two states until the monitored line is written, the time stamp counter reaches
/// `deadline`, the kernel's limit is reached, or another event occurs.
///
/// # Safety
/// The processor has the instruction (WAITPKG).
pub(crate) unsafe fn umwait(deadline: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "umwait {state:e}",
            state = in(reg) 0_u32,
            in("eax") (deadline & 0xffff_ffff) as u32,
            in("edx") (deadline >> 32) as u32,
            options(nostack),
        );
    }
}

/// RDTSC: the time stamp counter.
pub(crate) fn time_stamp() -> u64 {
    // SAFETY: part of x86-64; Linux lets processes use it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// What the instructions do, on processors that have them. ENQCMD needs a work queue.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Features;

    fn features() -> Features {
        Features::of_host()
    }

    #[test]
    fn movdir64b_writes_a_whole_descriptor() {
        if !features().movdir64b {
            return;
        }
        let descriptor = Descriptor {
            record: 0x0123_4567_89ab_cdef,
            operands: [1, 2, u64::MAX],
            ..Descriptor::default()
        };
        let mut place = Descriptor::default();
        // SAFETY: the processor has the instruction; the place is 64 aligned bytes of ordinary memory.
        unsafe { movdir64b(std::ptr::from_mut(&mut place).cast(), &descriptor) };
        sfence();
        assert_eq!(place, descriptor);
    }

    #[test]
    fn umwait_ends_at_its_deadline() {
        if !features().waitpkg {
            return;
        }
        let record = Record::default();
        let deadline = time_stamp() + 1000;
        // It may wake for any reason.
        while time_stamp() < deadline {
            // SAFETY: the processor has the instructions.
            unsafe {
                umonitor(&record);
                umwait(deadline);
            }
        }
        assert_eq!(record.status(), 0);
    }
}
