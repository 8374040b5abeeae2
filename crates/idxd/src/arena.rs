//! The memory that a device reads lists from and writes records to, for one work queue.
//!
//! ```text
//!   slot 0                                                     slot 1              buffers of slot 0, 1, …
//!  ┌─────────┬──────────────────┬─────────┬──────────────────┬──────── … ─────┬──────────── … ────────────┐
//!  │ heads   │ list of members  │ heads'  │ members' records │                │ page aligned              │
//!  │ (to     │ (what a batch    │ records │                  │                │                           │
//!  │ submit) │ points to)       │         │                  │                │                           │
//!  └─────────┴──────────────────┴─────────┴──────────────────┴──────── … ─────┴──────────── … ────────────┘
//! ```
//! A device that cannot write a record loses it without a notice. So all of this memory is populated from the beginning,
//! locked where the process is allowed to, and stays mapped as long as the device may write to it.
//!
//! A forked child does not get this memory (`MADV_DONTFORK`): with copy-on-write, the device could end up writing to the
//! child's pages instead of the parent's. A [`Mark`] distinguishes the two processes.

use std::{ptr::NonNull, slice};

use rustix::{
    io::Errno,
    mm::{Advice, mlock},
    param::page_size,
};

use crate::{
    Descriptor, Record,
    fork::{Mapping, Mark},
};

/// Slots of the same size in one mapping.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Mapping,
    mark: Mark,
    layout: Layout,
    slots: u32,
}

/// The parts of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Descriptors that are submitted; each may point to a part of the list.
    pub(crate) heads: u32,
    /// Descriptors of the list.
    pub(crate) members: u32,
    /// Bytes of the buffer.
    pub(crate) buffer: usize,
}

impl Arena {
    /// Maps `slots` slots; everything in them is zero.
    pub(crate) fn new(slots: u32, layout: Layout) -> Result<Self, Errno> {
        let bytes = layout.bytes(slots).ok_or(Errno::NOMEM)?;
        let mark = Mark::new()?;
        let memory = Mapping::new(bytes, Advice::LinuxDontFork)?;
        // If this fails, the kernel may swap pages out, which only costs faults.
        // SAFETY: the range is the mapping's own.
        let _ = unsafe { mlock(memory.start.as_ptr().cast(), memory.bytes) };
        Ok(Self {
            memory,
            mark,
            layout,
            slots,
        })
    }

    /// Whether this is the process that created the arena. A forked child does not have the memory.
    pub(crate) fn is_here(&self) -> bool {
        !self.mark.is_in_child()
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Records of the heads of `slot`; none in a child.
    pub(crate) fn head_records(&self, slot: u32) -> &[Record] {
        self.records(slot, self.layout.head_records(), self.layout.heads)
    }

    /// Records of the members of `slot`; none in a child.
    pub(crate) fn member_records(&self, slot: u32) -> &[Record] {
        self.records(slot, self.layout.member_records(), self.layout.members)
    }

    /// Descriptors to submit for `slot`; none in a child.
    ///
    /// # Safety
    /// The caller is the only one to use this part of `slot`.
    #[allow(
        clippy::mut_from_ref,
        reason = "slots are handed out, and their owners borrow"
    )]
    pub(crate) unsafe fn heads(&self, slot: u32) -> &mut [Descriptor] {
        // SAFETY: as the caller promises.
        unsafe { self.descriptors(slot, 0, self.layout.heads) }
    }

    /// The list of `slot`; empty in a child.
    ///
    /// # Safety
    /// The caller is the only one to use this part of `slot`, and no device reads it.
    #[allow(
        clippy::mut_from_ref,
        reason = "slots are handed out, and their owners borrow"
    )]
    pub(crate) unsafe fn list(&self, slot: u32) -> &mut [Descriptor] {
        // SAFETY: as the caller promises.
        unsafe { self.descriptors(slot, self.layout.list(), self.layout.members) }
    }

    /// Address and length of the buffer of `slot`; empty in a child, and if slots have no buffer. The slot's owner decides
    /// who may access it.
    pub(crate) fn buffer(&self, slot: u32) -> NonNull<[u8]> {
        if !self.is_here() || slot >= self.slots {
            return NonNull::slice_from_raw_parts(NonNull::dangling(), 0);
        }
        let before =
            self.layout.all_slots(self.slots) + self.layout.buffer_stride() * slot as usize;
        NonNull::slice_from_raw_parts(self.at(before), self.layout.buffer)
    }

    fn records(&self, slot: u32, offset: usize, count: u32) -> &[Record] {
        if !self.is_here() || slot >= self.slots {
            return &[];
        }
        let start = self.at(self.layout.slot() * slot as usize + offset);
        // SAFETY: the layout puts `count` records there, within the mapping, which lives as long as `self`. It is
        // a multiple of 64 from the start of a page, any bytes are a record, and records are atomics, so concurrent
        // writes by the device are allowed.
        unsafe { slice::from_raw_parts(start.cast().as_ptr(), count as usize) }
    }

    /// # Safety
    /// The caller is the only one to use these descriptors.
    #[allow(
        clippy::mut_from_ref,
        reason = "slots are handed out, and their owners borrow"
    )]
    unsafe fn descriptors(&self, slot: u32, offset: usize, count: u32) -> &mut [Descriptor] {
        if !self.is_here() || slot >= self.slots {
            return &mut [];
        }
        let start = self.at(self.layout.slot() * slot as usize + offset);
        // SAFETY: the layout puts `count` descriptors there, as for records; any bytes are a descriptor, and
        // no other thread uses them, as the caller promises.
        unsafe { slice::from_raw_parts_mut(start.cast().as_ptr(), count as usize) }
    }

    fn at(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset <= self.memory.bytes);
        // SAFETY: offsets come from the layout by which the mapping was sized.
        unsafe { self.memory.start.add(offset) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // In a child something else may be mapped at the address of the parent's arena.
        if self.is_here() {
            self.memory.unmap();
        }
    }
}

/// Offsets and sizes, in bytes. [`Layout::bytes`] has seen that none of them overflows.
impl Layout {
    const UNIT: usize = size_of::<Descriptor>();

    fn bytes(self, slots: u32) -> Option<usize> {
        let page = page_size();
        let each = (self.heads as usize).checked_add(self.members as usize)?;
        let slot = each.checked_mul(2 * Self::UNIT)?;
        let all = slot
            .checked_mul(slots as usize)?
            .checked_next_multiple_of(page)?;
        let buffer = self.buffer.checked_next_multiple_of(page)?;
        all.checked_add(buffer.checked_mul(slots as usize)?)
    }

    fn list(self) -> usize {
        self.heads as usize * Self::UNIT
    }

    fn head_records(self) -> usize {
        self.list() + self.members as usize * Self::UNIT
    }

    fn member_records(self) -> usize {
        self.head_records() + self.heads as usize * Self::UNIT
    }

    fn slot(self) -> usize {
        self.member_records() + self.members as usize * Self::UNIT
    }

    fn all_slots(self, slots: u32) -> usize {
        (self.slot() * slots as usize).next_multiple_of(page_size())
    }

    fn buffer_stride(self) -> usize {
        self.buffer.next_multiple_of(page_size())
    }
}

const _: () = assert!(size_of::<Descriptor>() == size_of::<Record>());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_slots_do_not_overlap_and_are_aligned() {
        let layout = Layout {
            heads: 2,
            members: 5,
            buffer: 5000,
        };
        let arena = Arena::new(3, layout).unwrap();
        let mut parts: Vec<(usize, usize)> = Vec::new();
        for slot in 0..arena.slots {
            // SAFETY: no other thread is here.
            let (heads, list) = unsafe { (arena.heads(slot), arena.list(slot)) };
            let (of_heads, of_members) = (arena.head_records(slot), arena.member_records(slot));
            assert_eq!((heads.len(), list.len()), (2, 5));
            assert_eq!((of_heads.len(), of_members.len()), (2, 5));
            let buffer = arena.buffer(slot);
            assert!(buffer.cast::<u8>().addr().get().is_multiple_of(page_size()));
            parts.extend([
                (heads.as_ptr().addr(), size_of_val(heads)),
                (list.as_ptr().addr(), size_of_val(list)),
                (of_heads.as_ptr().addr(), size_of_val(of_heads)),
                (of_members.as_ptr().addr(), size_of_val(of_members)),
                (buffer.cast::<u8>().addr().get(), buffer.len()),
            ]);
        }
        parts.sort_unstable();
        assert!(parts.iter().all(|(start, _)| start.is_multiple_of(64)));
        assert!(parts.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0));
        let start = arena.memory.start.addr().get();
        let last = parts.last().unwrap();
        assert!(parts[0].0 >= start && last.0 + last.1 <= start + arena.memory.bytes);
    }

    #[test]
    fn a_shape_too_large_for_memory_is_refused() {
        let layout = Layout {
            heads: 0,
            members: 1,
            buffer: usize::MAX / 2,
        };
        assert_eq!(Arena::new(3, layout).unwrap_err(), Errno::NOMEM);
    }

    #[test]
    fn there_are_no_slots_beyond_the_last() {
        let layout = Layout {
            heads: 1,
            members: 1,
            buffer: 1,
        };
        let arena = Arena::new(1, layout).unwrap();
        assert!(arena.member_records(1).is_empty() && arena.head_records(1).is_empty());
        assert!(arena.buffer(1).is_empty());
    }
}
