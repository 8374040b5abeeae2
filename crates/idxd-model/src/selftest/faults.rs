//! Pages that are not there.

use std::rc::Rc;

use super::{
    Check, Ended, Verdict,
    dsa::{OVERLAPPING_COPY, holds, noise, size},
    is_so,
    rig::{Area, Hole, PAGE, Rig, flagged},
    skipped,
};
use idxd::{Descriptor, Flags, Kind, RecordImage, dsa, iaa, opcode};

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        40,
        "fault-on-read",
        "a page that may not be read is status 0x03, with no more bytes than lie before it and its address",
        on_read,
    )
    .by("DSA 3.0, 5.8.1, 8.2.4 and 8.2.5")
    .of(Kind::Dsa)
    .needs(&[opcode::COMPARE_PATTERN]),
    Check::new(
        41,
        "fault-at-once",
        "nothing is completed where the first byte is missing; the address may be that byte's or its page's",
        at_once,
    )
    .by("DSA 3.0, 5.8.1, 8.2.4 and 8.2.5")
    .of(Kind::Dsa)
    .needs(&[opcode::COMPARE_PATTERN]),
    Check::new(
        42,
        "fault-on-write",
        "a page that may not be written is status 0x83, and the bytes that are completed have been written",
        on_write,
    )
    .by("DSA 3.0, 3.13, 8.2.4 and 8.3.4")
    .of(Kind::Dsa)
    .needs(&[opcode::MEMMOVE]),
    Check::new(
        43,
        "fault-read-only",
        "filling a page that may only be read is status 0x83",
        read_only,
    )
    .by("DSA 3.0, 3.13 and 8.3.5")
    .of(Kind::Dsa)
    .needs(&[opcode::FILL]),
    Check::new(
        44,
        "fault-overlap",
        "a move to a higher, overlapping address says from which end it ran (result 1: the last) when it stops early",
        overlap,
    )
    .by("DSA 3.0, 8.3.4")
    .of(Kind::Dsa)
    .needs(&[opcode::MEMMOVE]),
    Check::new(
        45,
        "fault-blocked",
        "where faults are waited for, a page that the kernel does not make present is status 0x04, of a write 0x84",
        blocked,
    )
    .by("DSA 3.0, 3.13.2 and 5.8.1")
    .of(Kind::Dsa)
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
    .by("IAA 2.1, 4.4.1 and 6.2.5")
    .of(Kind::Iaa)
    .needs(&[opcode::DECOMPRESS]),
    Check::new(
        49,
        "iaa-fault-on-write",
        "a page that may not be written is status 0x03, with or without the bit for a write, with its address",
        iaa_on_write,
    )
    .by("IAA 2.1, 4.4.1, 6.2.1 and 6.2.5")
    .of(Kind::Iaa)
    .needs(&[opcode::DECOMPRESS]),
];

fn on_read(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    for (offset, length) in [(0, 2 * PAGE), (100, 2 * PAGE - 100), (PAGE - 8, 16)] {
        let area = rig.before_hole(1, Hole::Missing)?;
        let descriptor = dsa::compare_pattern(area.address(offset), size(length), 0, 0);
        fault(rig, descriptor, &area, 0x03, PAGE - offset)?;
    }
    Ok(Verdict::Holds)
}

fn at_once(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let mut is_exact = true;
    for offset in [PAGE, PAGE + 100] {
        let area = rig.before_hole(1, Hole::Missing)?;
        let descriptor = dsa::compare_pattern(area.address(offset), 64, 0, 0);
        let image = fault(rig, descriptor, &area, 0x03, 0)?;
        is_exact &= area.offset_of(image.fault_address()) == offset as i128;
    }
    Ok(match is_exact {
        true => Verdict::Holds,
        false => Verdict::Found("the address is the page's".to_owned()),
    })
}

fn on_write(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let source = rig.holding(&noise(2 * PAGE))?;
    for (offset, hole) in [
        (0, Hole::Missing),
        (72, Hole::ReadOnly),
        (PAGE - 8, Hole::Missing),
    ] {
        let area = rig.before_hole(1, hole)?;
        let length = 2 * PAGE - offset;
        let descriptor = dsa::memmove(source.address(0), area.address(offset), size(length), 0);
        let image = fault(rig, descriptor, &area, 0x83, PAGE - offset)?;
        let done = image.completed() as usize;
        let mut written = vec![0; offset + done];
        written[offset..].copy_from_slice(&source.read(0, done));
        holds(&area, &written)?;
    }
    Ok(Verdict::Holds)
}

fn read_only(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.before_hole(1, Hole::ReadOnly)?;
    let descriptor = dsa::fill(!0, area.address(0), size(2 * PAGE), 0);
    let image = fault(rig, descriptor, &area, 0x83, PAGE)?;
    holds(&area, &vec![0xff; image.completed() as usize])?;
    Ok(Verdict::Holds)
}

fn overlap(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    const SHIFT: usize = 64;
    const LENGTH: usize = 4 * PAGE;
    if !rig.limits().capabilities.has(OVERLAPPING_COPY) {
        return Err(skipped(
            "the device copies no overlapping areas (GENCAP bit 1)",
        ));
    }
    // The source's first page is missing, the destination's is not.
    let area = rig.behind_hole(5)?;
    area.write(PAGE, &noise(5 * PAGE));
    let before = area.read(0, 6 * PAGE);
    let (from, to) = (PAGE - SHIFT, PAGE);
    let descriptor = dsa::memmove(area.address(from), area.address(to), size(LENGTH), 0);
    let image = rig.ask(descriptor)?.image("a page fault")?;
    let (done, result) = (image.completed() as usize, image.result());
    // From the start not one byte can be read, from the end all but the first ones.
    let most = if result == 0 { 0 } else { LENGTH - SHIFT };
    is_so(
        image.status() == 0x03 && result <= 1 && done <= most,
        "0x03, result 0 and 0 bytes completed, or result 1 and less than all",
        format!(
            "{:#04x}, result {result}, {done} bytes of {LENGTH} completed",
            image.status()
        ),
    )?;
    let last = LENGTH - done..LENGTH;
    let moved = area.read(to + last.start, done);
    is_so(
        moved == before[from + last.start..from + last.end],
        "the last bytes, as many as are completed, to be moved",
        "others",
    )?;
    Ok(match result {
        0 => Verdict::Found("it ran from the start".to_owned()),
        _ => Verdict::Holds,
    })
}

fn blocked(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    blocks(rig)?;
    let area = rig.before_hole(1, Hole::Missing)?;
    let reads = dsa::compare_pattern(area.address(0), size(2 * PAGE), 0, 0);
    let writes = dsa::fill(0, area.address(0), size(2 * PAGE), 0);
    for (descriptor, status) in [
        (reads.with(Flags::BLOCK_ON_FAULT), 0x04),
        (writes.with(Flags::BLOCK_ON_FAULT), 0x84),
    ] {
        fault(rig, descriptor, &area, status, PAGE)?;
    }
    Ok(Verdict::Holds)
}

fn untouched(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.untouched(1)?;
    let descriptor = dsa::compare_pattern(area.address(0), size(PAGE), 0, 0);
    found(rig, descriptor, &area)
}

fn untouched_blocked(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    blocks(rig)?;
    let area = rig.untouched(1)?;
    let descriptor = dsa::compare_pattern(area.address(0), size(PAGE), 0, 0);
    found(rig, flagged(descriptor, Flags::BLOCK_ON_FAULT), &area)
}

fn iaa_on_read(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (area, output) = (rig.before_hole(1, Hole::Missing)?, rig.pages(1)?);
    // A valid stream as far as it can be read, and as long as the rest of it: a page's end lies within its block.
    let (start, length) = (PAGE - STORED.len(), 64);
    area.write(start, &stored_header(length - HEADER));
    let descriptor = decompress(&area, start, length, &output, 0);
    iaa_fault(rig, descriptor, &area, &[0x03])
}

fn iaa_on_write(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (area, input) = (rig.before_hole(1, Hole::Missing)?, rig.holding(STORED)?);
    let descriptor = decompress(&input, 0, STORED.len(), &area, PAGE - 4);
    // The bit for a write is defined for other statuses only.
    iaa_fault(rig, descriptor, &area, &[0x83, 0x03])
}

/// Eight bytes, in a stored block that is the last one.
const STORED: &[u8] = &[1, 8, 0, 0xf7, 0xff, 1, 2, 3, 4, 5, 6, 7, 8];

/// Bytes of a stored block before its data.
const HEADER: usize = 5;

/// The header of a stored block that is the last one, for up to 255 bytes.
fn stored_header(bytes: usize) -> [u8; HEADER] {
    let length = u8::try_from(bytes).unwrap_or(u8::MAX);
    [1, length, 0, !length, 0xff]
}

fn decompress(from: &Area, offset: usize, length: usize, to: &Area, at: usize) -> Descriptor {
    let decompress = iaa::Decompress {
        source: from.address(offset),
        size: size(length),
        destination: to.address(at),
        destination_size: size(PAGE / 2),
    };
    iaa::decompress(decompress, 0)
}

fn iaa_fault(
    rig: &Rig<'_>,
    descriptor: Descriptor,
    area: &Area,
    statuses: &[u8],
) -> Result<Verdict, Ended> {
    let expected = |status: &u8| format!("{status:#04x}, fault in page {PAGE:+}");
    let expected: Vec<String> = statuses.iter().map(expected).collect();
    let image = rig.ask(descriptor)?.image(&expected[0])?;
    is_so(
        statuses.contains(&image.status()) && is_in_hole(rig, &image, area),
        expected.join(" or "),
        described(&image, area),
    )?;
    Ok(Verdict::Holds)
}

fn blocks(rig: &Rig<'_>) -> Result<(), Ended> {
    match rig.limits().block_on_fault {
        true => Ok(()),
        false => Err(skipped("the queue does not block on faults")),
    }
}

/// Asks for an operation that stops at the page behind `area`'s first: with this status, at most so many bytes
/// completed, and that page's address.
fn fault(
    rig: &Rig<'_>,
    descriptor: Descriptor,
    area: &Rc<Area>,
    status: u8,
    most: usize,
) -> Result<RecordImage, Ended> {
    let expected = match most {
        0 => format!("{status:#04x}, 0 bytes completed, fault in page {PAGE:+}"),
        _ => format!("{status:#04x}, at most {most} bytes completed, fault in page {PAGE:+}"),
    };
    let image = rig.ask(descriptor)?.image(&expected)?;
    let is_partial = image.status() == status && image.completed() as usize <= most;
    is_so(
        is_partial && is_in_hole(rig, &image, area),
        expected,
        described(&image, area),
    )?;
    Ok(image)
}

/// Whether a record's fault address lies in the page behind `area`'s first, as far as the device says it: bits 11 to 0
/// may be 0, and all of it may be hidden (DSA 3.0, 8.2.3 and 8.2.5; IAA 2.1, 6.2.5).
pub(super) fn is_in_hole(rig: &Rig<'_>, image: &RecordImage, area: &Area) -> bool {
    // GENCAP: the third byte is information about the fault.
    let has_info = rig.limits().capabilities.has(12);
    let is_hidden = has_info && image.words[0] >> 16 & 1 == 1;
    let page = image.fault_address() & !(PAGE as u64 - 1);
    is_hidden || area.offset_of(page) == PAGE as i128
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
