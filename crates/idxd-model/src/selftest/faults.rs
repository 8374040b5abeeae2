//! Pages that are not there.

use std::rc::Rc;

use super::{
    Check, Ended, Verdict,
    dsa::{holds, noise, size},
    is_so,
    rig::{Area, Hole, PAGE, Rig, flagged},
    same, skipped,
};
use idxd::{Descriptor, Flags, Kind, RecordImage, dsa, iaa, opcode};

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        40,
        "fault-on-read",
        "a page that may not be read is status 0x03, with the bytes before it and its address",
        on_read,
    )
    .of(Kind::Dsa)
    .settles(&[13])
    .needs(&[opcode::COMPARE_PATTERN]),
    Check::new(
        41,
        "fault-at-once",
        "nothing is completed where the first byte is missing, and the address is that byte's",
        at_once,
    )
    .of(Kind::Dsa)
    .settles(&[13])
    .open()
    .needs(&[opcode::COMPARE_PATTERN]),
    Check::new(
        42,
        "fault-on-write",
        "a page that may not be written is status 0x83, and what comes before it has been written",
        on_write,
    )
    .of(Kind::Dsa)
    .settles(&[13])
    .needs(&[opcode::MEMMOVE]),
    Check::new(
        43,
        "fault-read-only",
        "filling a page that may only be read is status 0x83",
        read_only,
    )
    .of(Kind::Dsa)
    .settles(&[13])
    .needs(&[opcode::FILL]),
    Check::new(
        44,
        "fault-overlap",
        "a move to a higher, overlapping address runs from its end, and says so (result 1) when it stops early",
        overlap,
    )
    .of(Kind::Dsa)
    .settles(&[15])
    .open()
    .needs(&[opcode::MEMMOVE]),
    Check::new(
        45,
        "fault-blocked",
        "a page that may not be read is status 0x04 where faults are waited for, of a write 0x84",
        blocked,
    )
    .of(Kind::Dsa)
    .settles(&[12])
    .open()
    .needs(&[opcode::COMPARE_PATTERN, opcode::FILL]),
    Check::new(
        46,
        "untouched-page",
        "a page that was never touched: it may be zero or missing",
        untouched,
    )
    .of(Kind::Dsa)
    .open()
    .needs(&[opcode::COMPARE_PATTERN]),
    Check::new(
        47,
        "untouched-page-blocked",
        "a page that was never touched, where faults are waited for: open",
        untouched_blocked,
    )
    .of(Kind::Dsa)
    .open()
    .needs(&[opcode::COMPARE_PATTERN]),
    Check::new(
        48,
        "iaa-fault-on-read",
        "a page that may not be read is status 0x03, with its address",
        iaa_on_read,
    )
    .of(Kind::Iaa)
    .settles(&[13])
    .needs(&[opcode::DECOMPRESS]),
    Check::new(
        49,
        "iaa-fault-on-write",
        "a page that may not be written is status 0x83, with its address",
        iaa_on_write,
    )
    .of(Kind::Iaa)
    .settles(&[13])
    .needs(&[opcode::DECOMPRESS]),
];

fn on_read(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    for (offset, length) in [
        (0, 2 * PAGE),
        (100, 2 * PAGE),
        (PAGE - 8, 16),
        (1, 3 * PAGE - 1),
    ] {
        let area = rig.before_hole(1, Hole::Missing)?;
        let descriptor = dsa::compare_pattern(area.address(offset), size(length), 0, 0);
        fault(
            rig,
            descriptor.into(),
            &area,
            &expected(0x03, PAGE - offset, PAGE),
        )?;
    }
    Ok(Verdict::Holds)
}

fn at_once(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    for offset in [PAGE, PAGE + 100] {
        let area = rig.before_hole(1, Hole::Missing)?;
        let descriptor = dsa::compare_pattern(area.address(offset), 64, 0, 0);
        fault(rig, descriptor.into(), &area, &expected(0x03, 0, offset))?;
    }
    Ok(Verdict::Holds)
}

fn on_write(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let source = rig.holding(&noise(2 * PAGE))?;
    for (offset, hole) in [
        (0, Hole::Missing),
        (72, Hole::ReadOnly),
        (PAGE - 8, Hole::Missing),
    ] {
        let area = rig.before_hole(1, hole)?;
        let descriptor = dsa::memmove(source.address(0), area.address(offset), size(PAGE + 64), 0);
        let done = PAGE - offset;
        fault(rig, descriptor.into(), &area, &expected(0x83, done, PAGE))?;
        let mut whole = vec![0; PAGE];
        whole[offset..].copy_from_slice(&source.read(0, done));
        holds(&area, &whole)?;
    }
    Ok(Verdict::Holds)
}

fn read_only(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.before_hole(1, Hole::ReadOnly)?;
    let descriptor = dsa::fill(!0, area.address(0), size(2 * PAGE), 0);
    fault(rig, descriptor.into(), &area, &expected(0x83, PAGE, PAGE))?;
    holds(&area, &[0xff; PAGE])?;
    Ok(Verdict::Holds)
}

fn overlap(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    const SHIFT: usize = 64;
    const LENGTH: usize = 4 * PAGE;
    // The source's first page is missing, the destination's is not.
    let area = rig.behind_hole(5)?;
    area.write(PAGE, &noise(5 * PAGE));
    let before = area.read(0, 6 * PAGE);
    let (from, to) = (PAGE - SHIFT, PAGE);
    let descriptor = dsa::memmove(area.address(from), area.address(to), size(LENGTH), 0);
    let image = rig.ask(descriptor.into())?.image("a page fault")?;
    same(
        "0x03, result 1",
        format!("{:#04x}, result {}", image.status(), image.result()),
    )?;
    let done = image.completed() as usize;
    is_so(
        done <= LENGTH - SHIFT,
        "less than all completed",
        format!("{done} bytes of {LENGTH} completed"),
    )?;
    let mut expected = before.clone();
    expected[to + LENGTH - done..to + LENGTH]
        .copy_from_slice(&before[from + LENGTH - done..from + LENGTH]);
    let found = area.read(0, 6 * PAGE);
    is_so(
        found[to + LENGTH - done..] == expected[to + LENGTH - done..],
        "the last bytes, as many as are completed, to be moved",
        "others",
    )?;
    Ok(Verdict::Holds)
}

fn blocked(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    blocks(rig)?;
    let area = rig.before_hole(1, Hole::Missing)?;
    let reads = dsa::compare_pattern(area.address(0), size(2 * PAGE), 0, 0);
    let writes = dsa::fill(0, area.address(0), size(2 * PAGE), 0);
    for (descriptor, status) in [
        (reads.blocking_on_fault(true).descriptor(), 0x04),
        (writes.blocking_on_fault(true).descriptor(), 0x84),
    ] {
        fault(rig, descriptor, &area, &expected(status, PAGE, PAGE))?;
    }
    Ok(Verdict::Holds)
}

fn untouched(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.untouched(1)?;
    let descriptor = dsa::compare_pattern(area.address(0), size(PAGE), 0, 0);
    found(rig, descriptor.into(), &area)
}

fn untouched_blocked(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    blocks(rig)?;
    let area = rig.untouched(1)?;
    let descriptor = dsa::compare_pattern(area.address(0), size(PAGE), 0, 0);
    found(
        rig,
        flagged(descriptor.into(), Flags::BLOCK_ON_FAULT),
        &area,
    )
}

fn iaa_on_read(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (area, output) = (rig.before_hole(1, Hole::Missing)?, rig.pages(1)?);
    let descriptor = decompress(&area, PAGE - 16, 64, &output, 0);
    iaa_fault(rig, descriptor, &area, "0x03 at +4096")
}

fn iaa_on_write(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (area, input) = (rig.before_hole(1, Hole::Missing)?, rig.holding(STORED)?);
    let descriptor = decompress(&input, 0, STORED.len(), &area, PAGE - 4);
    iaa_fault(rig, descriptor, &area, "0x83 at +4096")
}

/// Eight bytes, in a stored block that is the last one.
const STORED: &[u8] = &[1, 8, 0, 0xf7, 0xff, 1, 2, 3, 4, 5, 6, 7, 8];

fn decompress(from: &Area, offset: usize, length: usize, to: &Area, at: usize) -> Descriptor {
    let decompress = iaa::Decompress {
        source: from.address(offset),
        size: size(length),
        destination: to.address(at),
        destination_size: size(PAGE / 2),
    };
    iaa::decompress(decompress, 0).descriptor()
}

fn iaa_fault(
    rig: &Rig<'_>,
    descriptor: Descriptor,
    area: &Area,
    expected: &str,
) -> Result<Verdict, Ended> {
    let image = rig.ask(descriptor)?.image(expected)?;
    // Address and not page, or the other way round: only the page is promised.
    let page = image.fault_address() & !(PAGE as u64 - 1);
    let found = format!("{:#04x} at {:+}", image.status(), area.offset_of(page));
    same(expected, found)?;
    Ok(Verdict::Holds)
}

fn blocks(rig: &Rig<'_>) -> Result<(), Ended> {
    match rig.limits().block_on_fault {
        true => Ok(()),
        false => Err(skipped("the queue does not block on faults")),
    }
}

fn expected(status: u8, completed: usize, address: usize) -> String {
    format!("{status:#04x}, {completed} bytes completed, fault at {address:+}")
}

fn fault(
    rig: &Rig<'_>,
    descriptor: Descriptor,
    area: &Rc<Area>,
    expected: &str,
) -> Result<(), Ended> {
    let image = rig.ask(descriptor)?.image(expected)?;
    same(expected, described(&image, area))
}

fn described(image: &RecordImage, area: &Area) -> String {
    format!(
        "{:#04x}, {} bytes completed, fault at {:+}",
        image.status(),
        image.completed(),
        area.offset_of(image.fault_address())
    )
}

fn found(rig: &Rig<'_>, descriptor: Descriptor, area: &Area) -> Result<Verdict, Ended> {
    let image = rig.ask(descriptor)?.image("a status")?;
    Ok(Verdict::Found(match image.status() {
        1 => format!("0x01, result {}", image.result()),
        _ => described(&image, area),
    }))
}
