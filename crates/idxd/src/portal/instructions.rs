//! The instructions that submit descriptors to a device. Module [`cpu`](crate::cpu) has whether the processor supports them.
//!
//! Source: Intel's instruction set reference.

use std::arch::asm;

use crate::Descriptor;

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

/// SFENCE: earlier stores become visible before later ones. ENQCMD is a weakly ordered one.
pub(super) fn sfence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() }
}
