//! The free slots of a queue.

use std::sync::atomic::{AtomicU64, Ordering};

/// A bit for each slot, set while the slot is free. The first free slots are used again first, as their memory is still in the cache.
#[derive(Debug)]
pub(super) struct FreeList(Box<[AtomicU64]>);

impl FreeList {
    /// Slots 0 to `slots`, all free.
    pub(super) fn full(slots: u32) -> Self {
        let list = Self((0..slots.div_ceil(64)).map(|_| AtomicU64::new(0)).collect());
        (0..slots).for_each(|slot| list.push(slot));
        list
    }

    /// A thread that pops a slot sees the changes of the thread that pushed it.
    pub(super) fn pop(&self) -> Option<u32> {
        for (word, first) in self.0.iter().zip((0..).step_by(64)) {
            let mut free = word.load(Ordering::Relaxed);
            while free != 0 {
                let bit = free.trailing_zeros();
                let before = word.fetch_and(!(1 << bit), Ordering::AcqRel);
                if before >> bit & 1 == 1 {
                    return Some(first + bit);
                }
                free = before;
            }
        }
        None
    }

    /// Puts back a popped slot.
    pub(super) fn push(&self, slot: u32) {
        if let Some(word) = self.0.get(slot as usize / 64) {
            word.fetch_or(1 << (slot % 64), Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicBool, thread};

    use super::*;

    #[test]
    fn slots_come_out_once_and_the_first_one_first() {
        let list = FreeList::full(3);
        assert_eq!(
            [list.pop(), list.pop(), list.pop(), list.pop()],
            [Some(0), Some(1), Some(2), None]
        );
        list.push(1);
        list.push(0);
        assert_eq!(
            [list.pop(), list.pop(), list.pop()],
            [Some(0), Some(1), None]
        );
    }

    #[test]
    fn threads_never_hold_the_same_slot() {
        let list = FreeList::full(3);
        let held = [const { AtomicBool::new(false) }; 3];
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let Some(slot) = list.pop() else { continue };
                        assert!(!held[slot as usize].swap(true, Ordering::Relaxed));
                        held[slot as usize].store(false, Ordering::Relaxed);
                        list.push(slot);
                    }
                });
            }
        });
        assert_eq!((0..4).filter_map(|_| list.pop()).count(), 3);
    }
}
