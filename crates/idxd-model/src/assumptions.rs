//! What the model assumes without a document that states it.

/// Version of the model: grows when its devices behave differently.
pub const VERSION: u32 = 1;

/// One thing that the model assumes of the hardware, to be compared with it on first contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assumption {
    /// Its number, which stays.
    pub number: u32,
    /// What is assumed.
    pub what: &'static str,
    /// Where in the model.
    pub where_used: &'static str,
}

const fn assume(number: u32, what: &'static str, where_used: &'static str) -> Assumption {
    Assumption {
        number,
        what,
        where_used,
    }
}

/// Everything that the model assumes.
pub const ASSUMPTIONS: &[Assumption] = &[
    assume(
        1,
        "an entry of a work queue is free when an engine has fetched its descriptor, not when that completes",
        "machine: start",
    ),
    assume(
        2,
        "after a disable or reset nothing outstanding is recorded; ENQCMD answers as if full, write fails with ENODEV",
        "machine: reset, admit",
    ),
    assume(
        3,
        "ENQCMD to a dedicated queue is never accepted, MOVDIR64B to a shared one is dropped",
        "machine: admit",
    ),
    assume(
        4,
        "BLOCK_ON_FAULT on a queue that does not block on faults is status 0x11",
        "validate: flags",
    ),
    assume(
        5,
        "a transfer of no bytes is status 0x13",
        "validate: sizes",
    ),
    assume(
        6,
        "when a fence finds an earlier failure, that member and all after it are abandoned, their records untouched, \
         and the batch counts the members before it",
        "machine: next_member",
    ),
    assume(
        7,
        "a member whose predicate is false (0x02) makes its batch 0x05",
        "machine: account",
    ),
    assume(
        8,
        "a BATCH or DRAIN inside of a batch is status 0x10",
        "validate",
    ),
    assume(
        9,
        "the record of a batch is written after those of all its members (unless InjectedFault::BatchFirst)",
        "machine: check_batch",
    ),
    assume(
        10,
        "a comparison that differs counts the bytes before the difference, in eights; of one that does not differ \
         the count means nothing",
        "dsa: compare, machine: poisoned",
    ),
    assume(
        11,
        "the expected result of CREATE_DELTA is a mask of results; those of the comparisons are values",
        "dsa: checked",
    ),
    assume(
        12,
        "a page request that is refused is status 0x04, with bit 7 for a write",
        "machine: Workshop::work",
    ),
    assume(
        13,
        "the fault address is the first byte that is missing",
        "memory: View",
    ),
    assume(
        14,
        "the bytes completed, the fault address and all reserved bytes are noise where no status defines them",
        "machine: poisoned",
    ),
    assume(
        15,
        "an overlapping move to a higher address runs from its end, and says so (result 1) when it stops early",
        "dsa: copy",
    ),
    assume(
        16,
        "a batch's list is read member by member, as engines become free",
        "machine: next_member",
    ),
    assume(
        17,
        "without a valid record address errors go to the device's error register only",
        "machine: write",
    ),
    assume(
        18,
        "CRC-32C: seed and result are inverted and reflected unless the descriptor says otherwise, so that the result \
         of one piece is the seed of the next",
        "dsa: crc",
    ),
    assume(
        19,
        "RECORD_REQUESTED without RECORD_VALID is status 0x11",
        "validate: flags",
    ),
    assume(
        20,
        "a DRAIN waits for everything submitted before it to its work queue, by any process",
        "machine: check_drains",
    ),
    assume(
        21,
        "each engine reads the list of one batch at a time; a batch keeps its entry until an engine can begin it",
        "machine: takes_batch",
    ),
];
