//! Checks of DSA: comparisons, batches, and pages that are not there.

use super::{
    Check, UNKNOWN, Verdict, expect, expect_equal,
    rig::{Area, PAGE, Rig},
    size,
};
use idxd::{Descriptor, dsa, opcode};

const COMPARE: &[u8] = &[opcode::COMPARE_PATTERN];
const BATCH: &[u8] = &[opcode::BATCH, opcode::COMPARE_PATTERN];

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
        name: "fault-on-read",
        what: "a page that may not be read is status 0x03, with no more bytes than lie before it",
        section: Some("DSA 3.0, 5.8.1 and 8.2.4"),
        needs: COMPARE,
        run: fault_on_read,
    },
    Check {
        name: "untouched-page",
        what: "a page that was never touched is zero, and not missing",
        section: None,
        needs: COMPARE,
        run: |rig| compared(rig, rig.untouched()?, (0, PAGE), 0),
    },
    Check {
        name: "batch-of-most",
        what: "the largest batch is done, and when its record is there, those of all its members are",
        section: Some("DSA 3.0, 3.8"),
        needs: BATCH,
        run: batch_of_most,
    },
    Check {
        name: "batch-member-fails",
        what: "members of a batch that fail have their own statuses, and the others are done",
        section: Some("DSA 3.0, 5.8.1 and 8.3.2"),
        needs: BATCH,
        run: member_fails,
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
        compared(rig, area, (*offset, *length), 0)?;
    }
    Ok(())
}

fn single_bits(rig: &Rig) -> Result<(), Verdict> {
    let area = rig.pages(2)?;
    for (offset, length) in ODD {
        for byte in [0, length / 2, length - 1] {
            area.write(0, &[0; 2 * PAGE]);
            area.write(offset + byte, &[0x10]);
            compared(rig, area, (*offset, *length), 1)?;
        }
    }
    Ok(())
}

/// Compares a part of `area`, offset and length, with zeros, and expects this result.
fn compared(
    rig: &Rig,
    area: Area,
    (offset, length): (usize, usize),
    result: u8,
) -> Result<(), Verdict> {
    let image = rig.ask(is_zero(area, offset, length))?;
    let describe = |status: u8, result: u8| {
        format!("{status:#04x}, result {result} for {length} bytes at {offset}")
    };
    expect_equal(
        describe(0x01, result),
        describe(image.status(), image.result()),
    )
}

fn fault_on_read(rig: &Rig) -> Result<(), Verdict> {
    for offset in [0, 100, PAGE - 8, PAGE] {
        let image = rig.ask(is_zero(rig.before_hole()?, offset, 2 * PAGE - offset))?;
        let (status, done, most) = (image.status(), image.completed() as usize, PAGE - offset);
        expect(
            status == 0x03 && done <= most,
            format!("0x03, at most {most} bytes completed"),
            format!("{status:#04x}, {done} bytes completed"),
        )?;
    }
    Ok(())
}

fn batch_of_most(rig: &Rig) -> Result<(), Verdict> {
    let most = match rig.limits().max_batch {
        Some(most) => most.get() as usize,
        None => return Err(Verdict::Skipped("the queue accepts no batches".to_owned())),
    };
    let compare = is_zero(rig.pages(16)?, 0, 16 * PAGE);
    let outcome = rig.ask_batch(&vec![compare; most])?;
    let done = (0..most).filter(|index| outcome.status_and_result(*index) == (1, 0));
    expect_equal(
        format!("{most} members done with it"),
        format!("{} members done with it", done.count()),
    )
}

fn member_fails(rig: &Rig) -> Result<(), Verdict> {
    let (zero, other) = (rig.pages(1)?, rig.holding(&[1])?);
    let members = [
        is_zero(zero, 0, PAGE),
        Descriptor::new(UNKNOWN, 0),
        is_zero(rig.before_hole()?, PAGE, PAGE),
        is_zero(other, 0, PAGE),
    ];
    let outcome = rig.ask_batch(&members)?;
    let found = [0, 1, 2, 3].map(|index| {
        let (status, result) = outcome.status_and_result(index);
        format!("{status:#04x}/{result}")
    });
    let failed = [1, 2].map(|index| outcome.status_and_result(index).0);
    expect(
        found[0] == "0x01/0" && found[3] == "0x01/1" && failed == [0x10, 0x03],
        "0x01/0, 0x10, 0x03, 0x01/1",
        found.join(", "),
    )
}

fn is_zero(area: Area, offset: usize, length: usize) -> Descriptor {
    dsa::compare_pattern(area.address(offset), size(length), 0, 0)
}
