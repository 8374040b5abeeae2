//! Checks of batches.

use super::{
    Check, Ended, Verdict,
    dsa::{failing, holds, noise, size},
    faults::is_in_hole,
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
    check(50, "batch-of-two", "a batch of two is done", two).by("DSA 3.0, 8.3.2"),
    check(
        51,
        "batch-of-one",
        "a batch of one is status 0x14, and done where the device takes such batches",
        one,
    )
    .by("DSA 3.0, 5.8.1 and 9.2.2"),
    check(52, "batch-of-most", "the largest batch is done", most).by("DSA 3.0, 3.8"),
    check(
        53,
        "batch-too-large",
        "a batch of one more than the largest is status 0x14",
        too_large,
    )
    .by("DSA 3.0, 5.8.1"),
    check(
        54,
        "batch-list-misaligned",
        "a list at an address that is no multiple of 64 is status 0x18",
        misaligned,
    )
    .by("DSA 3.0, 5.8.1 and 8.3.2"),
    check(
        55,
        "batch-in-batch",
        "a drain inside of a batch is status 0x10, and a batch is not done there",
        nested,
    )
    .by("DSA 3.0, 3.8 and 8.3.3"),
    check(
        56,
        "batch-member-fails",
        "a member that fails makes its batch 0x05, and the others are done",
        member_fails,
    )
    .by("DSA 3.0, 5.8.1 and 8.3.2"),
    check(
        57,
        "batch-predicate-false",
        "a member whose result is not the expected one (0x02) makes its batch 0x05",
        predicate_false,
    )
    .by("DSA 3.0, 5.8.1, 8.3.2 and 8.3.6")
    .needs(&[opcode::BATCH, opcode::COMPARE_PATTERN]),
    check(
        58,
        "fence-waits",
        "a member with a fence sees what those before it have written",
        fence_waits,
    )
    .by("DSA 3.0, 3.9")
    .needs(&[opcode::BATCH, opcode::MEMMOVE]),
    check(
        59,
        "fence-abandons",
        "a fence after a failure abandons that member and all after it, and the batch counts those before",
        fence_abandons,
    )
    .by("DSA 3.0, 3.9 and 8.1.3"),
    check(
        60,
        "batch-last",
        "the record of a batch is there only when those of all its members are",
        last,
    )
    .by("DSA 3.0, 3.8")
    .needs(&[opcode::BATCH, opcode::COMPARE_PATTERN]),
    check(
        61,
        "batch-list-read-late",
        "the list is read as engines become free: a change after submission is seen",
        read_late,
    )
    .open()
    .needs(&[opcode::BATCH, opcode::COMPARE_PATTERN]),
    check(
        62,
        "batch-list-fault",
        "a page missing under the list is status 0x06, with its address, and counts the members that were processed",
        list_fault,
    )
    .by("DSA 3.0, 5.8.1, 8.2.5 and 8.3.2"),
    check(
        63,
        "batch-list-missing",
        "where all of the list is missing, no member is done",
        list_missing,
    )
    .by("DSA 3.0, 5.8.1 and 8.3.2"),
    check(
        64,
        "batch-result",
        "a batch says in its result whether a member failed, where the device can continue batches",
        result,
    )
    .by("DSA 3.0, 8.3.2 and 9.2.2"),
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
    // GENCAP: a batch may have a single member.
    if rig.limits().capabilities.has(52) {
        return all_done(&answer, 1);
    }
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
    let answer = rig.ask_batch(Batch::of(vec![noop(), plain(opcode::DRAIN)]))?;
    same(
        "0x05, 2 completed, members 0x01 0x10 with a drain inside",
        format!("{} with a drain inside", summary(&answer)?),
    )?;
    // That it fails is promised, but not how.
    let answer = rig.ask_batch(Batch::of(vec![noop(), batch]))?;
    let found = summary(&answer)?;
    is_so(
        parent(&answer.parent.image("0x05")?) == "0x05, 2 completed"
            && statuses(&answer)[0] == 0x01
            && statuses(&answer)[1] > 0x01,
        "0x05, 2 completed, members 0x01 0x10 with a batch inside",
        format!("{found} with a batch inside"),
    )?;
    Ok(match statuses(&answer)[1] {
        0x10 => Verdict::Holds,
        _ => Verdict::Found(found),
    })
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
    let zero = dsa::compare_pattern(area.address(0), size(PAGE), 0, 0);
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
        dsa::memmove(first.address(0), second.address(0), size(4 * PAGE), 0),
        dsa::memmove(second.address(0), third.address(0), size(4 * PAGE), 0).with(Flags::FENCE),
    ];
    let answer = rig.ask_batch(Batch::of(members))?;
    same("0x01, 2 completed, members 0x01 0x01", summary(&answer)?)?;
    holds(&third, &first.read(0, 4 * PAGE))?;
    Ok(Verdict::Holds)
}

fn fence_abandons(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let members = vec![noop(), failing(), flagged(noop(), Flags::FENCE), noop()];
    let answer = rig.ask_batch(Batch::of(members))?;
    let (found, statuses) = (summary(&answer)?, statuses(&answer));
    is_so(
        parent(&answer.parent.image("0x05")?) == "0x05, 2 completed"
            && statuses[..2] == [0x01, 0x10]
            && !statuses[2..].contains(&0x01),
        "0x05, 2 completed, members 0x01 0x10 0x00 0x00",
        &found,
    )?;
    Ok(match statuses[2..] == [0, 0] {
        true => Verdict::Holds,
        false => Verdict::Found(found),
    })
}

fn last(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(16)?;
    let compare = dsa::compare_pattern(area.address(0), size(16 * PAGE), 0, 0);
    for _ in 0..16 {
        let count = largest(rig)?.min(16);
        let answer = rig.ask_batch(Batch::of(vec![compare; count]))?;
        all_done(&answer, count)?;
    }
    Ok(Verdict::Holds)
}

fn read_late(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (area, list, count) = (rig.pages(16)?, rig.pages(16)?, largest(rig)?.min(1024));
    let slow = dsa::compare_pattern(area.address(0), size(16 * PAGE), 0, 0);
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
        let done = statuses(&answer).into_iter().filter(|status| *status != 0);
        let (done, completed) = (done.count(), image.completed() as usize);
        is_so(
            image.status() == 0x06
                && completed == done
                && completed <= before
                && is_in_hole(rig, &image, &area),
            format!("0x06, at most {before} completed, as many records, fault in page {PAGE:+}"),
            format!(
                "{}, {done} records, fault at {:+}",
                parent(&image),
                area.offset_of(image.fault_address())
            ),
        )?;
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

fn result(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    if !rig.limits().capabilities.has(15) {
        return Err(skipped(
            "the device cannot continue batches (GENCAP bit 15)",
        ));
    }
    for (members, expected) in [
        (vec![noop(); 2], "0x01, 2 completed, result 0"),
        (vec![noop(), failing()], "0x05, 2 completed, result 1"),
    ] {
        let answer = rig.ask_batch(Batch::of(members))?;
        let image = answer.parent.image(expected)?;
        same(
            expected,
            format!("{}, result {}", parent(&image), image.result()),
        )?;
    }
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
    for status in statuses(answer) {
        summary.push_str(&format!(" {status:#04x}"));
    }
    Ok(summary)
}

/// The members' statuses, 0 where there is no record.
fn statuses(answer: &BatchAnswer) -> Vec<u8> {
    let members = answer.members.iter();
    members
        .map(|member| member.map_or(0, |image| image.status()))
        .collect()
}
