//! The free slots of a queue.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A lock-free stack of slot numbers. The slot used last comes first, as its memory is still in the cache.
///
/// The head consists of the top slot and a tag that every change increments, by which a thread notices that the stack has
/// changed between its read and its swap (the ABA problem).
#[derive(Debug)]
pub(super) struct FreeList {
    head: AtomicU64,
    below: Box<[AtomicU32]>,
}

/// Number below the lowest slot.
const NONE: u32 = u32::MAX;

impl FreeList {
    /// Slots 0 to `slots`, all free.
    pub(super) fn full(slots: u32) -> Self {
        let list = Self {
            head: AtomicU64::new(head(0, NONE)),
            below: (0..slots).map(|_| AtomicU32::new(NONE)).collect(),
        };
        (0..slots).rev().for_each(|slot| list.push(slot));
        list
    }

    pub(super) fn pop(&self) -> Option<u32> {
        let mut seen = self.head.load(Ordering::Acquire);
        loop {
            let (tag, top) = parts(seen);
            // May be stale, but then the tag has changed.
            let below = self.below.get(top as usize)?.load(Ordering::Relaxed);
            let new = head(tag.wrapping_add(1), below);
            match self.swap(seen, new) {
                Ok(()) => return Some(top),
                Err(now) => seen = now,
            }
        }
    }

    /// Puts back a popped slot.
    pub(super) fn push(&self, slot: u32) {
        let Some(below) = self.below.get(slot as usize) else {
            return;
        };
        let mut seen = self.head.load(Ordering::Relaxed);
        loop {
            let (tag, top) = parts(seen);
            below.store(top, Ordering::Relaxed);
            match self.swap(seen, head(tag.wrapping_add(1), slot)) {
                Ok(()) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// A thread that pops a slot sees the changes of the thread that pushed it.
    fn swap(&self, seen: u64, new: u64) -> Result<(), u64> {
        self.head
            .compare_exchange_weak(seen, new, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
    }
}

fn head(tag: u32, top: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(top)
}

fn parts(head: u64) -> (u32, u32) {
    let [t0, t1, t2, t3, g0, g1, g2, g3] = head.to_le_bytes();
    (
        u32::from_le_bytes([g0, g1, g2, g3]),
        u32::from_le_bytes([t0, t1, t2, t3]),
    )
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicBool, thread};

    use super::*;

    #[test]
    fn slots_come_out_once_and_the_last_one_in_comes_first() {
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
