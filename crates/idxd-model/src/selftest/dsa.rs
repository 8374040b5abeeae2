//! Checks of DSA: comparisons, copies, batches, and pages that are not there.

use super::{
    Check, Verdict, expect, expect_equal, noise,
    queue::UNKNOWN,
    rig::{Area, BatchAnswer, Hole, PAGE, Rig, plain},
    size,
};
use idxd::{Descriptor, RecordImage, dsa, opcode};

const COMPARE: &[u8] = &[opcode::COMPARE_PATTERN];
const MOVE: &[u8] = &[opcode::MEMMOVE];
const BATCH: &[u8] = &[opcode::BATCH, opcode::NOOP];
const COMPARE_BATCH: &[u8] = &[opcode::BATCH, opcode::COMPARE_PATTERN];

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "compare-pattern-zero",
        what: "zeros are equal to a pattern of zero, at any offset and of any length",
        section: Some("DSA 3.0, 8.3.7"),
        needs: COMPARE,
        run: zeros,
    },
    Check {
        name: "compare-pattern-differs",
        what: "a single bit is found, wherever it is, and what lies around the area is not",
        section: Some("DSA 3.0, 8.3.7"),
        needs: COMPARE,
        run: single_bits,
    },
    Check {
        name: "memmove",
        what: "copies are right at any offset and of any length, and nothing else is written",
        section: Some("DSA 3.0, 8.3.4"),
        needs: MOVE,
        run: memmove,
    },
    Check {
        name: "fault-on-read",
        what: "a page that may not be read is status 0x03, with no more bytes than lie before it",
        section: Some("DSA 3.0, 5.8.1 and 8.2.4"),
        needs: COMPARE,
        run: fault_on_read,
    },
    Check {
        name: "fault-on-write",
        what: "a page that may not be written is status 0x83, and the bytes that are completed have been written",
        section: Some("DSA 3.0, 3.13, 8.2.4 and 8.3.4"),
        needs: MOVE,
        run: fault_on_write,
    },
    Check {
        name: "untouched-page",
        what: "a page that was never touched is zero, and not missing",
        section: None,
        needs: COMPARE,
        run: untouched,
    },
    Check {
        name: "batch-of-most",
        what: "the largest batch is done",
        section: Some("DSA 3.0, 3.8"),
        needs: BATCH,
        run: |rig| {
            let most = largest(rig)?;
            all_done(&rig.ask_batch(vec![noop(); most], None)?, most)
        },
    },
    Check {
        name: "batch-member-fails",
        what: "a member that fails makes its batch 0x05, and the others are done",
        section: Some("DSA 3.0, 5.8.1 and 8.3.2"),
        needs: BATCH,
        run: member_fails,
    },
    Check {
        name: "batch-last",
        what: "the record of a batch is there only when those of all its members are",
        section: Some("DSA 3.0, 3.8"),
        needs: COMPARE_BATCH,
        run: last,
    },
    Check {
        name: "batch-list-read-late",
        what: "the list is read as engines become free: a change after submission is seen",
        section: None,
        needs: COMPARE_BATCH,
        run: read_late,
    },
    Check {
        name: "batch-list-fault",
        what: "a page missing under the list is status 0x06, and counts the members that were processed",
        section: Some("DSA 3.0, 5.8.1 and 8.3.2"),
        needs: BATCH,
        run: list_fault,
    },
];

/// Offsets and lengths that are none of a cache line's, a word's or a page's.
const ODD: &[(usize, usize)] = &[
    (0, 4096),
    (1, 4095),
    (3, 1),
    (7, 8),
    (63, 65),
    (4095, 2),
    (4093, 4099),
    (5, 8187),
];

fn zeros(rig: &Rig) -> Result<(), Verdict> {
    let area = rig.pages(2)?;
    for (offset, length) in ODD {
        // Ones all around.
        area.write(0, &[0xff; 2 * PAGE]);
        area.write(*offset, &vec![0; *length]);
        compared(rig, &area, (*offset, *length), 0)?;
    }
    Ok(())
}

fn single_bits(rig: &Rig) -> Result<(), Verdict> {
    let area = rig.pages(2)?;
    for (offset, length) in ODD {
        for byte in [0, length / 2, length - 1] {
            area.write(0, &[0; 2 * PAGE]);
            area.write(offset + byte, &[0x10]);
            compared(rig, &area, (*offset, *length), 1)?;
        }
    }
    Ok(())
}

/// Compares a part of `area`, offset and length, with zeros, and expects this result.
fn compared(
    rig: &Rig,
    area: &Area,
    (offset, length): (usize, usize),
    result: u8,
) -> Result<(), Verdict> {
    let descriptor = dsa::compare_pattern(area.address(offset), size(length), 0, 0);
    let image = rig.ask(descriptor)?.image("a result")?;
    let describe = |status: u8, result: u8| {
        format!("{status:#04x}, result {result} for {length} bytes at {offset}")
    };
    expect_equal(
        describe(0x01, result),
        describe(image.status(), image.result()),
    )
}

fn memmove(rig: &Rig) -> Result<(), Verdict> {
    let source = rig.holding(&noise(2 * PAGE))?;
    let target = rig.pages(2)?;
    for (offset, length) in ODD {
        target.write(0, &[0; 2 * PAGE]);
        // To another offset than from.
        let to = (2 * PAGE - length) / 2;
        let (from_address, to_address) = (source.address(*offset), target.address(to));
        let descriptor = dsa::memmove(from_address, to_address, size(*length), 0);
        expect_equal("status 0x01", rig.ask(descriptor)?.to_string())?;
        let mut expected = vec![0; 2 * PAGE];
        expected[to..to + length].copy_from_slice(&source.read(*offset, *length));
        target.holds(&expected)?;
    }
    Ok(())
}

fn fault_on_read(rig: &Rig) -> Result<(), Verdict> {
    for offset in [0, 100, PAGE - 8, PAGE] {
        let area = rig.before_hole(Hole::Missing)?;
        let length = size(2 * PAGE - offset);
        let descriptor = dsa::compare_pattern(area.address(offset), length, 0, 0);
        fault(rig, descriptor, 0x03, PAGE - offset)?;
    }
    Ok(())
}

fn fault_on_write(rig: &Rig) -> Result<(), Verdict> {
    let source = rig.holding(&noise(2 * PAGE))?;
    for (offset, hole) in [
        (0, Hole::Missing),
        (72, Hole::ReadOnly),
        (PAGE - 8, Hole::Missing),
    ] {
        let area = rig.before_hole(hole)?;
        let length = size(2 * PAGE - offset);
        let descriptor = dsa::memmove(source.address(0), area.address(offset), length, 0);
        let done = fault(rig, descriptor, 0x83, PAGE - offset)?;
        let mut written = vec![0; offset + done];
        written[offset..].copy_from_slice(&source.read(0, done));
        area.holds(&written)?;
    }
    Ok(())
}

/// Asks for an operation that a fault ends, with this status and at most so many bytes completed. Returns how many.
fn fault(rig: &Rig, descriptor: Descriptor, status: u8, most: usize) -> Result<usize, Verdict> {
    let expected = format!("{status:#04x}, at most {most} bytes completed");
    let image = rig.ask(descriptor)?.image(&expected)?;
    let done = image.completed() as usize;
    let is_partial = image.status() == status && done <= most;
    let found = format!("{:#04x}, {done} bytes completed", image.status());
    expect(is_partial, expected, found)?;
    Ok(done)
}

fn untouched(rig: &Rig) -> Result<(), Verdict> {
    let descriptor = dsa::compare_pattern(rig.untouched()?.address(0), size(PAGE), 0, 0);
    let image = rig.ask(descriptor)?.image("a status")?;
    let found = format!("{:#04x}, result {}", image.status(), image.result());
    expect_equal("0x01, result 0", found)
}

fn noop() -> Descriptor {
    plain(opcode::NOOP)
}

fn member_fails(rig: &Rig) -> Result<(), Verdict> {
    let members = vec![noop(), plain(UNKNOWN), noop(), noop()];
    let answer = rig.ask_batch(members, None)?;
    let parent = parent(&answer.parent.image("0x05")?);
    expect_equal(
        "0x05, 4 completed, members 0x01 0x10 0x01 0x01",
        answer
            .statuses()
            .fold(format!("{parent}, members"), |all, status| {
                format!("{all} {status:#04x}")
            }),
    )
}

fn last(rig: &Rig) -> Result<(), Verdict> {
    let compare = slow(rig)?;
    let count = largest(rig)?.min(16);
    for _ in 0..16 {
        all_done(&rig.ask_batch(vec![compare; count], None)?, count)?;
    }
    Ok(())
}

fn read_late(rig: &Rig) -> Result<(), Verdict> {
    let (slow, count) = (slow(rig)?, largest(rig)?.min(1024));
    let list = rig.pages(16)?;
    let records: Vec<_> = (0..count).map(|_| rig.record()).collect::<Result<_, _>>()?;
    for (index, record) in records.iter().enumerate() {
        let member = Descriptor {
            record: record.address(),
            ..slow
        };
        list.write(index * 64, &member.bytes());
    }
    let parent = rig.record()?;
    let batch = dsa::batch(list.address(0), size(count), parent.address());
    if let Err(refusal) = rig.offer(&batch) {
        return Err(Verdict::Skipped(format!("it was refused: {refusal}")));
    }
    // The opcode of the last one becomes an unknown one: a single byte, which the device sees changed or not.
    list.write((count - 1) * 64 + 7, &[UNKNOWN]);
    rig.wait(parent).image("the batch's record")?;
    let last = records.last().map_or(0, |record| record.status());
    expect_equal(
        "status 0x10 of the last member",
        format!("status {last:#04x} of the last member"),
    )
}

fn list_fault(rig: &Rig) -> Result<(), Verdict> {
    for before in [0, 1, 5] {
        let area = rig.before_hole(Hole::Missing)?;
        let list = (area, PAGE - before * 64);
        let answer = rig.ask_batch(vec![noop(); before + 3], Some(list))?;
        let image = answer.parent.image("0x06")?;
        let done = answer.statuses().filter(|status| *status != 0).count();
        let completed = image.completed() as usize;
        expect(
            image.status() == 0x06 && completed == done && completed <= before,
            format!("0x06, at most {before} completed, as many records"),
            format!("{}, {done} records", parent(&image)),
        )?;
    }
    Ok(())
}

/// A comparison of some pages.
pub(super) fn slow(rig: &Rig) -> Result<Descriptor, Verdict> {
    const PAGES: usize = 64;
    let bytes = ((PAGES * PAGE) as u64).min(rig.limits().max_transfer);
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    Ok(dsa::compare_pattern(
        rig.pages(PAGES)?.address(0),
        bytes,
        0,
        0,
    ))
}

fn largest(rig: &Rig) -> Result<usize, Verdict> {
    match rig.limits().max_batch {
        Some(most) => Ok(most.get() as usize),
        None => Err(Verdict::Skipped("the queue accepts no batches".to_owned())),
    }
}

fn all_done(answer: &BatchAnswer, count: usize) -> Result<(), Verdict> {
    let expected = format!("0x01, {count} completed");
    expect_equal(&expected, parent(&answer.parent.image(&expected)?))?;
    let done = answer.statuses().filter(|status| *status == 1).count();
    expect_equal(
        format!("{count} members done with it"),
        format!("{done} members done with it"),
    )
}

fn parent(image: &RecordImage) -> String {
    format!("{:#04x}, {} completed", image.status(), image.completed())
}
