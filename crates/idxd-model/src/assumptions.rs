//! What the model assumed of the hardware at first, and what Intel's specifications have to say of it: those of DSA,
//! 341204-006, revision 3.0, and of IAA, revision 2.1, by section.

use Standing::{Confirmed, Corrected, Open};

/// Version of the model: grows when its devices behave differently.
pub const VERSION: u32 = 3;

/// One thing that the model takes for granted of the hardware, to be compared with it on first contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assumption {
    /// Its number, which stays.
    pub number: u32,
    /// How the model behaves.
    pub what: &'static str,
    /// Whether a document states it.
    pub standing: Standing,
    /// Where in the model.
    pub where_used: &'static str,
}

/// What is known of an [`Assumption`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// This document states it.
    Confirmed(&'static str),
    /// This document states something else than was assumed at first; the model keeps to the document.
    Corrected(&'static str),
    /// No public document was found that states it.
    Open,
}

const fn assume(
    number: u32,
    standing: Standing,
    what: &'static str,
    where_used: &'static str,
) -> Assumption {
    Assumption {
        number,
        what,
        standing,
        where_used,
    }
}

/// Everything that the model takes for granted.
pub const ASSUMPTIONS: &[Assumption] = &[
    assume(
        1,
        Open,
        "an entry of a work queue is free when an engine has fetched its descriptor, not when that completes",
        "machine: start",
    ),
    assume(
        2,
        Corrected("DSA 3.0, 3.15 and 5.3"),
        "a disable completes what is outstanding; after a reset, which may abandon or complete, it is never \
         recorded; then shared queues are full, by ENQCMD and by write, and dedicated ones ignore what comes",
        "driver: disable, machine: reset, admit",
    ),
    assume(
        3,
        Confirmed("DSA 3.0, 5.3"),
        "ENQCMD to a dedicated queue is never accepted, MOVDIR64B to a shared one is ignored",
        "machine: admit",
    ),
    assume(
        4,
        Confirmed("DSA 3.0, 5.5"),
        "BLOCK_ON_FAULT on a queue that does not block on faults is status 0x11",
        "validate: flags",
    ),
    assume(
        5,
        Confirmed("DSA 3.0, 5.4"),
        "a transfer of no bytes is status 0x13",
        "validate: sizes",
    ),
    assume(
        6,
        Confirmed("DSA 3.0, 3.9"),
        "when a fence finds an earlier failure, that member and all after it are abandoned, their records untouched, \
         and the batch counts the members before it",
        "machine: next_member",
    ),
    assume(
        7,
        Confirmed("DSA 3.0, 8.3.2"),
        "a member whose predicate is false (0x02) makes its batch 0x05",
        "machine: account",
    ),
    assume(
        8,
        Confirmed("DSA 3.0, 5.4"),
        "a BATCH or DRAIN inside of a batch is status 0x10",
        "validate",
    ),
    assume(
        9,
        Confirmed("DSA 3.0, 3.8"),
        "the record of a batch is written after those of all its members (unless InjectedFault::BatchFirst)",
        "machine: check_batch",
    ),
    assume(
        10,
        Corrected("DSA 3.0, 8.3.6"),
        "a comparison that differs counts the bytes before the first that differs, one that does not differ counts 0",
        "dsa: compared",
    ),
    assume(
        11,
        Confirmed("DSA 3.0, 8.3.6 and 8.3.8"),
        "the expected result of CREATE_DELTA is a mask of results; those of the comparisons are values",
        "dsa: checked",
    ),
    assume(
        12,
        Confirmed("DSA 3.0, 3.13.2 and 8.2.1"),
        "a page request that is refused is status 0x04, with bit 7 for a write",
        "machine: Workshop::work",
    ),
    assume(
        13,
        Corrected("DSA 3.0, 8.2.5"),
        "the fault address is that of the first byte that is missing, or of its page",
        "memory: View, machine: poisoned",
    ),
    assume(
        14,
        Corrected("DSA 3.0, 5.4 and 8.2; IAA 2.1, 6.2"),
        "the bytes completed are 0 where all is done and where a check fails; they, the fault address and all other \
         bytes are noise where no status defines them",
        "machine: poisoned",
    ),
    assume(
        15,
        Confirmed("DSA 3.0, 8.3.4"),
        "an overlapping move to a higher address runs from its end, and says so (result 1) when it stops early",
        "dsa: copy",
    ),
    assume(
        16,
        Open,
        "a batch's list is read member by member, as engines become free (a list can be read in part, status 0x06; \
         DSA 3.0, 3.8, does not say when)",
        "machine: next_member",
    ),
    assume(
        17,
        Confirmed("DSA 3.0, 5.8.1"),
        "without a valid record address errors go to the device's error register only",
        "machine: write",
    ),
    assume(
        18,
        Confirmed("DSA 3.0, 8.3.12"),
        "CRC-32C: seed and result are inverted and reflected unless the descriptor says otherwise, so that the \
         result of one piece is the seed of the next",
        "dsa: crc",
    ),
    assume(
        19,
        Confirmed("DSA 3.0, 5.5"),
        "RECORD_REQUESTED without RECORD_VALID is status 0x11",
        "validate: flags",
    ),
    assume(
        20,
        Corrected("DSA 3.0, 3.12"),
        "a DRAIN waits for what was submitted before it to its work queue: of a shared one by its own process, of a \
         dedicated one for everything",
        "machine: check_drains",
    ),
    assume(
        21,
        Corrected("DSA 3.0, 4.4"),
        "an engine has several batches in progress (how many, ENGCAP says: four here); one more keeps its entry \
         until then",
        "machine: takes_batch",
    ),
    assume(
        22,
        Corrected("DSA 3.0, 8.1.3 and appendix F"),
        "flags 6 and 15 are reserved; flag 5 is further cache control from version 3.0 of DSA on, and reserved \
         elsewhere",
        "validate: cache_control",
    ),
    assume(
        23,
        Confirmed("DSA 3.0, 8.3.6 and 8.3.8"),
        "of an expected result, the bits beyond those of the results are not looked at (as those without \
         CHECK_RESULT)",
        "validate: reserved, dsa: checked",
    ),
    assume(
        24,
        Corrected("DSA 3.0, 8.3.3"),
        "the addresses and traffic classes of a DRAIN are reserved without its flags for them, which need GENCAP's \
         bit 9; what is read back is always there",
        "validate: rules",
    ),
    assume(
        25,
        Confirmed("IAA 2.1, 6.1.7"),
        "an IAA with nothing to read and nothing to write, of which each alone is allowed, is status 0x13",
        "validate: sizes",
    ),
    assume(
        26,
        Confirmed("DSA 3.0, 5.4"),
        "a flag that is required and missing is status 0x11, and in the record's mask of flags",
        "validate: flags",
    ),
    assume(
        27,
        Corrected("DSA 3.0, 8.3.11"),
        "TRANSL_FETCH ends with a page fault as a read of its pages would, without a number of bytes; its stride \
         needs GENCAP's bit 7 and a flag, and is a power of two; without ATS it is status 0x10",
        "dsa: fetch, validate: rules, machine: start",
    ),
    assume(
        28,
        Corrected("DSA 3.0, 3.13.1 and 5.8.1"),
        "without ATS every write that faults is lost and reported as done (which may be), and a read that faults is \
         status 0x20",
        "memory: View, machine: Workshop::work",
    ),
    assume(
        29,
        Open,
        "the size of a delta record, which should be a multiple of 10 (DSA 3.0, 8.3.8), is status 0x15 if it is not",
        "validate: sizes",
    ),
    assume(
        30,
        Open,
        "an interrupt that a process asks for is status 0x19, whatever the handle: no entry of the interrupt table \
         has its address space (DSA 3.0, 5.4; where interrupts of processes are disabled it is 0x11)",
        "validate",
    ),
    assume(
        31,
        Open,
        "TRANSL_FETCH of an area that wraps around, which DSA 3.0, 5.4, forbids, is status 0x13",
        "validate: sizes",
    ),
];
