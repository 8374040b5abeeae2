//! Tracks the submitted operations of a slot, and how many of them are complete.

use std::ops::Range;

use super::Unanswered;
use crate::{Descriptor, Flags, Record, arena::Arena, dsa, status::SUCCESS};

/// The submitted operations of a slot, and how many of them are known to be complete.
///
/// ```text
///   batch = 4      members (of those asked for)          batch = 1
///   entry 0   ┌─ head ─▶ 0  1  2  3                      entry 0 ─ 0
///   entry 1   ├─ head ─▶ 4  5  6  7                      entry 1 ─ 1
///   entry 2   └───────── 8 (alone: no batch)             …
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flight {
    /// Operations that the caller wanted to submit.
    pub(super) asked: u32,
    /// Operations that were submitted.
    pub(super) members: u32,
    /// Most members of an entry.
    pub(super) batch: u32,
    /// Descriptors that the device has.
    pub(super) entries: u32,
    /// Number of entries that may be incomplete; all after them are complete. Counted from the end, because the last entry
    /// is likely to be the last one done, so that the caller waits for fewer records.
    left: u32,
    /// An examined operation has another status than success.
    pub(super) flawed: bool,
    /// An examined operation was done, but has no record.
    pub(super) lost: bool,
}

impl Flight {
    /// As many of `asked` operations as fit into `entries` entries.
    pub(super) fn new(asked: u32, batch: u32, entries: u32) -> Self {
        let mut flight = Self {
            asked,
            members: asked,
            batch,
            ..Self::default()
        };
        flight.keep(asked.div_ceil(batch).min(entries));
        flight
    }

    /// Reduces the submission to its first `entries` entries.
    pub(super) fn keep(&mut self, entries: u32) {
        self.members = self.members.min(entries.saturating_mul(self.batch));
        self.entries = entries;
        self.left = entries;
    }

    /// The same submission, with nothing known to be complete.
    pub(super) fn afresh(self) -> Self {
        Self {
            left: self.entries,
            flawed: false,
            lost: false,
            ..self
        }
    }

    /// Operations of `entry`.
    pub(super) fn range(&self, entry: u32) -> Range<usize> {
        let start = entry * self.batch;
        let end = start.saturating_add(self.batch).min(self.members);
        start as usize..end as usize
    }

    /// Entries that are batches: all but the last have several members, if any has.
    pub(super) fn batches(&self) -> u32 {
        match self.batch {
            0 | 1 => 0,
            _ => self.entries - u32::from(self.range(self.entries - 1).len() == 1),
        }
    }

    /// The descriptors to submit for the operations in `list`.
    pub(super) fn prepare<'a>(
        &self,
        arena: &'a Arena,
        slot: u32,
        list: &'a [Descriptor],
    ) -> &'a [Descriptor] {
        if self.batch == 1 || self.members == 1 {
            return &list[..self.members as usize];
        }
        let records = arena.head_records(slot);
        // SAFETY: the slot is being submitted by its only owner, who does not use its heads but here.
        let heads = unsafe { arena.heads(slot) };
        for entry in 0..self.entries {
            let range = self.range(entry);
            let (head, record) = (&mut heads[entry as usize], &records[entry as usize]);
            if let [single] = &list[range.clone()] {
                *head = *single;
            } else {
                record.clear();
                *head = batch(&list[range], record);
            }
        }
        &heads[..self.entries as usize]
    }

    /// A record that is still missing, or `None` if the submission is complete.
    ///
    /// If the record of a batch reports success, each member has a record, which may become visible a little later. In a
    /// failed batch, members that the device did not process have no record. A processed member without a record has lost
    /// it, or the kernel delivers the record at any later time.
    pub(super) fn look<'a>(
        &mut self,
        arena: &'a Arena,
        slot: u32,
    ) -> Result<Option<&'a Record>, Unanswered> {
        if self.left == 0 {
            return Ok(None);
        }
        if !arena.is_here() {
            return Err(Unanswered::Forked);
        }
        let (heads, records) = (arena.head_records(slot), arena.member_records(slot));
        while self.left > 0 {
            let entry = self.left - 1;
            let members = &records[self.range(entry)];
            let head = match members {
                [_] => None,
                _ => Some(&heads[entry as usize]),
            };
            let begun = match head.map(|head| (head, head.image())) {
                None => members.len(),
                Some((head, None)) => return Ok(Some(head)),
                Some((_, Some(image))) if image.status() == SUCCESS => members.len(),
                Some((_, Some(image))) => {
                    self.flawed = true;
                    let begun = members.iter().take(image.completed() as usize);
                    self.lost |= begun.clone().any(|record| record.status() == 0);
                    0
                }
            };
            for record in &members[..begun] {
                let status = record.status();
                if status == 0 {
                    return Ok(Some(record));
                }
                self.flawed |= status != SUCCESS;
            }
            self.left -= 1;
        }
        Ok(None)
    }
}

/// The descriptor of a batch of the operations in `list`.
fn batch(list: &[Descriptor], record: &Record) -> Descriptor {
    // At most as many as the limits, which have 32 bits.
    let count = u32::try_from(list.len()).unwrap_or(u32::MAX);
    let list = list.as_ptr().expose_provenance() as u64;
    dsa::batch(list, count, record.address())
}

/// Every operation has a record, also for success.
pub(super) const RECORD: Flags = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
