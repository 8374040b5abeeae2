//! Batches.

use super::{
    Check, Ended, Verdict,
    dsa::{failing, holds, noise, size},
    is_so,
    rig::{Batch, BatchAnswer, Hole, PAGE, Rig, flagged, plain},
    same, skipped,
};
use idxd::{Descriptor, Flags, Kind, RecordImage, dsa, opcode};

const fn check(number: u32, name: &'static str, what: &'static str, run: super::Run) -> Check {
    Check::new(number, name, what, run)
        .of(Kind::Dsa)
        .needs(&[opcode::BATCH, opcode::NOOP])
}

pub(super) const CHECKS: &[Check] = &[
    check(50, "batch-of-two", "a batch of two is done", two),
    check(51, "batch-of-one", "a batch of one is status 0x14", one),
    check(52, "batch-of-most", "the largest batch is done", most),
    check(
        53,
        "batch-too-large",
        "a batch of one more than the largest is status 0x14",
        too_large,
    ),
    check(
        54,
        "batch-list-misaligned",
        "a list at an address that is no multiple of 64 is status 0x18",
        misaligned,
    ),
    check(
        55,
        "batch-in-batch",
        "a batch or a drain inside of a batch is status 0x10",
        nested,
    )
    .settles(&[8])
    .open(),
    check(
        56,
        "batch-member-fails",
        "a member that fails makes its batch 0x05, and the others are done",
        member_fails,
    ),
    check(
        57,
        "batch-predicate-false",
        "a member whose result is not the expected one (0x02) makes its batch 0x05",
        predicate_false,
    )
    .settles(&[7])
    .open()
    .needs(&[opcode::BATCH, opcode::COMPARE_PATTERN]),
    check(
        58,
        "fence-waits",
        "a member with a fence sees what those before it have written",
        fence_waits,
    )
    .needs(&[opcode::BATCH, opcode::MEMMOVE]),
    check(
        59,
        "fence-abandons",
        "a fence after a failure abandons that member and all after it: no records, and the batch counts those before",
        fence_abandons,
    )
    .settles(&[6])
    .open(),
    check(
        60,
        "batch-last",
        "the record of a batch is there only when those of all its members are",
        last,
    )
    .settles(&[9])
    .open()
    .needs(&[opcode::BATCH, opcode::COMPARE_PATTERN]),
    check(
        61,
        "batch-list-read-late",
        "the list is read as engines become free: a change after submission is seen",
        read_late,
    )
    .settles(&[16])
    .open()
    .needs(&[opcode::BATCH, opcode::COMPARE_PATTERN]),
    check(
        62,
        "batch-list-fault",
        "a page missing under the list is status 0x06, with the members before it and its address",
        list_fault,
    ),
    check(
        63,
        "batch-list-missing",
        "where all of the list is missing, no member is done",
        list_missing,
    ),
];

fn noop() -> Descriptor {
    plain(opcode::NOOP)
}

fn two(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let answer = rig.ask_batch(Batch::of(vec![noop(); 2]))?;
    all_done(&answer, 2)
}

fn one(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let answer = rig.ask_batch(Batch::of(vec![noop()]))?;
    same("status 0x14", answer.parent.to_string())?;
    Ok(Verdict::Holds)
}

fn most(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let most = largest(rig)?;
    let answer = rig.ask_batch(Batch::of(vec![noop(); most]))?;
    all_done(&answer, most)
}

fn too_large(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let more = largest(rig)? + 1;
    let answer = rig.ask_batch(Batch::of(vec![noop(); more]))?;
    same("status 0x14", answer.parent.to_string())?;
    let done = answer.members.iter().flatten().count();
    same(
        "no member done",
        match done {
            0 => "no member done".to_owned(),
            done => format!("{done} members done"),
        },
    )?;
    Ok(Verdict::Holds)
}

fn misaligned(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let answer = rig.ask_batch(Batch {
        list: Some((rig.pages(1)?, 32)),
        ..Batch::of(vec![noop(); 2])
    })?;
    same("status 0x18", answer.parent.to_string())?;
    Ok(Verdict::Holds)
}

fn nested(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let inner = rig.pages(1)?;
    let batch = Descriptor {
        address_1: inner.address(0),
        size: 2,
        ..plain(opcode::BATCH)
    };
    for (name, member) in [("batch", batch), ("drain", plain(opcode::DRAIN))] {
        let answer = rig.ask_batch(Batch::of(vec![noop(), member]))?;
        same(
            format!("0x05, 2 completed, members 0x01 0x10 with a {name} inside"),
            format!("{} with a {name} inside", summary(&answer)?),
        )?;
    }
    Ok(Verdict::Holds)
}

fn member_fails(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let members = vec![noop(), failing(), noop(), noop()];
    let answer = rig.ask_batch(Batch::of(members))?;
    same(
        "0x05, 4 completed, members 0x01 0x10 0x01 0x01",
        summary(&answer)?,
    )?;
    Ok(Verdict::Holds)
}

fn predicate_false(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(1)?;
    let zero = dsa::compare_pattern(area.address(0), size(PAGE), 0, 0).descriptor();
    let differs = Descriptor {
        operands: [1, 0, 0],
        ..flagged(zero, Flags::CHECK_RESULT)
    };
    let answer = rig.ask_batch(Batch::of(vec![zero, differs]))?;
    same("0x05, 2 completed, members 0x01 0x02", summary(&answer)?)?;
    Ok(Verdict::Holds)
}

fn fence_waits(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (first, second, third) = (rig.holding(&noise(4 * PAGE))?, rig.pages(4)?, rig.pages(4)?);
    let members = vec![
        dsa::memmove(first.address(0), second.address(0), size(4 * PAGE), 0).into(),
        dsa::memmove(second.address(0), third.address(0), size(4 * PAGE), 0)
            .with_fence()
            .into(),
    ];
    let answer = rig.ask_batch(Batch::of(members))?;
    same("0x01, 2 completed, members 0x01 0x01", summary(&answer)?)?;
    holds(&third, &first.read(0, 4 * PAGE))?;
    Ok(Verdict::Holds)
}

fn fence_abandons(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let members = vec![noop(), failing(), flagged(noop(), Flags::FENCE), noop()];
    let answer = rig.ask_batch(Batch::of(members))?;
    same(
        "0x05, 2 completed, members 0x01 0x10 0x00 0x00",
        summary(&answer)?,
    )?;
    Ok(Verdict::Holds)
}

fn last(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(16)?;
    let compare = dsa::compare_pattern(area.address(0), size(16 * PAGE), 0, 0).descriptor();
    for _ in 0..16 {
        let count = largest(rig)?.min(16);
        let answer = rig.ask_batch(Batch::of(vec![compare; count]))?;
        all_done(&answer, count)?;
    }
    Ok(Verdict::Holds)
}

fn read_late(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (area, list, count) = (rig.pages(16)?, rig.pages(16)?, largest(rig)?.min(1024));
    let slow = dsa::compare_pattern(area.address(0), size(16 * PAGE), 0, 0).descriptor();
    let records = (0..count)
        .map(|_| rig.record())
        .collect::<Result<Vec<_>, _>>()?;
    for (index, record) in records.iter().enumerate() {
        let member = Descriptor {
            record: record.address(),
            ..slow
        };
        list.write(index * 64, &member.bytes());
    }
    let parent = rig.record()?;
    let batch = Descriptor {
        record: parent.address(),
        address_1: list.address(0),
        size: size(count),
        ..plain(opcode::BATCH)
    };
    if let Err(refusal) = rig.offer(&batch) {
        return Err(skipped(format!(
            "it was {}",
            super::rig::Answer::Refused(refusal)
        )));
    }
    // The operation code of the last one becomes an unknown one: a single byte, so that it is the one or the other.
    list.write((count - 1) * 64 + 7, &[super::queue::UNKNOWN]);
    rig.wait(parent).image("the batch's record")?;
    let summary = records.last().map_or(0, |record| record.status());
    Ok(match summary {
        0x10 => Verdict::Holds,
        other => Verdict::Found(format!(
            "read before: the last member's status is {other:#04x}"
        )),
    })
}

fn list_fault(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    for before in [1, 2, 5] {
        let area = rig.before_hole(1, Hole::Missing)?;
        let offset = PAGE - before * 64;
        let answer = rig.ask_batch(Batch {
            list: Some((area.clone(), offset)),
            ..Batch::of(vec![noop(); before + 3])
        })?;
        let image = answer.parent.image("0x06")?;
        let found = format!(
            "{}, fault at {:+}",
            parent(&image),
            area.offset_of(image.fault_address())
        );
        same(format!("0x06, {before} completed, fault at +4096"), found)?;
    }
    Ok(Verdict::Holds)
}

fn list_missing(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.before_hole(1, Hole::Missing)?;
    let answer = rig.ask_batch(Batch {
        list: Some((area, PAGE)),
        ..Batch::of(vec![noop(); 2])
    })?;
    same("0x06, 0 completed", parent(&answer.parent.image("0x06")?))?;
    Ok(Verdict::Holds)
}

fn largest(rig: &Rig<'_>) -> Result<usize, Ended> {
    match rig.limits().max_batch {
        Some(most) => Ok(most.get() as usize),
        None => Err(skipped("the queue takes no batches")),
    }
}

fn all_done(answer: &BatchAnswer, count: usize) -> Result<Verdict, Ended> {
    same(
        format!("0x01, {count} completed"),
        parent(&answer.parent.image("0x01")?),
    )?;
    let done = answer
        .members
        .iter()
        .flatten()
        .filter(|member| member.status() == 1)
        .count();
    is_so(
        done == count,
        format!("{count} members done with it"),
        format!("{done} members done with it"),
    )?;
    Ok(Verdict::Holds)
}

fn parent(image: &RecordImage) -> String {
    format!("{:#04x}, {} completed", image.status(), image.completed())
}

/// What a batch and its members report.
fn summary(answer: &BatchAnswer) -> Result<String, Ended> {
    let mut summary = format!(
        "{}, members",
        parent(&answer.parent.image("a batch's record")?)
    );
    for member in &answer.members {
        let status = member.map_or(0, |image| image.status());
        summary.push_str(&format!(" {status:#04x}"));
    }
    Ok(summary)
}
