//! Checks of the results of DSA's operations.

use super::{
    Check, Ended, Verdict, is_so,
    queue::UNKNOWN,
    rig::{Area, PAGE, Rig, flagged},
    same,
};
use idxd::{Descriptor, Flags, Kind, RecordImage, dsa, opcode};

const fn check(number: u32, name: &'static str, what: &'static str, run: super::Run) -> Check {
    Check::new(number, name, what, run).of(Kind::Dsa)
}

pub(super) const CHECKS: &[Check] = &[
    check(
        10,
        "compare-pattern-zero",
        "zeros are equal to a pattern of zero, at any offset and of any length",
        zeros,
    )
    .by("DSA 3.0, 8.3.7")
    .needs(&[opcode::COMPARE_PATTERN]),
    check(
        11,
        "compare-pattern-differs",
        "a single bit is found, wherever it is, and what lies around the area is not",
        single_bits,
    )
    .by("DSA 3.0, 8.3.7")
    .needs(&[opcode::COMPARE_PATTERN]),
    check(
        12,
        "compare-pattern-completed",
        "a comparison with a pattern counts no byte beyond the first difference, and none where all are equal",
        completed,
    )
    .by("DSA 3.0, 8.2.4 and 8.3.7")
    .needs(&[opcode::COMPARE_PATTERN]),
    check(
        13,
        "compare-pattern-repeats",
        "a pattern is compared again and again from its first byte, whatever the length",
        repeats,
    )
    .by("DSA 3.0, 8.3.7")
    .needs(&[opcode::COMPARE_PATTERN]),
    check(
        14,
        "compare-expected",
        "a comparison with another result than the expected one is status 0x02",
        expected_value,
    )
    .by("DSA 3.0, 8.3.6 and 8.3.7")
    .needs(&[opcode::COMPARE_PATTERN]),
    check(
        16,
        "memmove",
        "copies are right at any offset and of any length, and nothing else is written",
        memmove,
    )
    .by("DSA 3.0, 8.3.4")
    .needs(&[opcode::MEMMOVE]),
    check(
        17,
        "memmove-overlap",
        "overlapping areas are copied as if by way of a third one, or are status 0x16 where the device cannot do that",
        memmove_overlap,
    )
    .by("DSA 3.0, 8.3.4 and 9.2.2")
    .needs(&[opcode::MEMMOVE]),
    check(
        18,
        "fill",
        "the pattern is written again and again, and nothing behind it",
        fill,
    )
    .by("DSA 3.0, 8.3.5")
    .needs(&[opcode::FILL]),
];

/// Offsets and lengths that are none of a cache line's, a word's or a page's.
const ODD: &[(usize, usize)] = &[
    (0, 4096),
    (1, 4095),
    (3, 1),
    (7, 8),
    (8, 7),
    (63, 65),
    (64, 63),
    (4095, 2),
    (4093, 4099),
    (5, 8187),
];

fn zeros(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(2)?;
    // Ones all around.
    for (offset, length) in ODD {
        area.write(0, &[0xff; 2 * PAGE]);
        area.write(*offset, &vec![0; *length]);
        let descriptor = dsa::compare_pattern(area.address(*offset), size(*length), 0, 0);
        same(
            at("0x01, result 0", *offset, *length),
            at(&compared(rig, descriptor)?, *offset, *length),
        )?;
    }
    Ok(Verdict::Holds)
}

fn single_bits(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(2)?;
    for (offset, length) in ODD {
        for byte in [0, length / 2, length - 1] {
            area.write(0, &[0; 2 * PAGE]);
            area.write(offset + byte, &[0x10]);
            let descriptor = dsa::compare_pattern(area.address(*offset), size(*length), 0, 0);
            same(
                at("0x01, result 1", *offset, *length),
                at(&compared(rig, descriptor)?, *offset, *length),
            )?;
        }
    }
    Ok(Verdict::Holds)
}

fn completed(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(2)?;
    let descriptor = dsa::compare_pattern(area.address(0), size(2 * PAGE), 0, 0);
    let image = rig.ask(descriptor)?.image("a result")?;
    same(
        "0x01, result 0, 0 bytes completed",
        format!(
            "{}, {} bytes completed",
            comparison(&image),
            image.completed()
        ),
    )?;
    let mut found = Vec::new();
    let mut is_expected = true;
    for byte in [0, 7, 8, 100, 4095, 4096, 5001] {
        area.write(0, &[0; 2 * PAGE]);
        area.write(byte, &[1]);
        let image = rig.ask(descriptor)?.image("0x01, result 1")?;
        same("0x01, result 1", comparison(&image))?;
        is_expected &= image.completed() as usize <= byte;
        found.push(format!("{} for byte {byte}", image.completed()));
    }
    is_so(
        is_expected,
        "no more than the first difference's offset",
        found.join(", "),
    )?;
    Ok(Verdict::Holds)
}

fn repeats(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(2)?;
    let pattern = 0x0123_4567_89ab_cdef_u64;
    for (offset, length) in ODD {
        area.write(0, &[0; 2 * PAGE]);
        let bytes: Vec<u8> = pattern
            .to_le_bytes()
            .into_iter()
            .cycle()
            .take(*length)
            .collect();
        area.write(*offset, &bytes);
        let descriptor = dsa::compare_pattern(area.address(*offset), size(*length), pattern, 0);
        same(
            at("0x01, result 0", *offset, *length),
            at(&compared(rig, descriptor)?, *offset, *length),
        )?;
    }
    Ok(Verdict::Holds)
}

fn expected_value(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(1)?;
    for (expected, wanted) in [(0, "0x01, result 0"), (1, "0x02, result 0")] {
        let descriptor = dsa::compare_pattern(area.address(0), size(PAGE), 0, 0);
        let descriptor = Descriptor {
            operands: [expected, 0, 0],
            ..flagged(descriptor, Flags::CHECK_RESULT)
        };
        same(wanted, compared(rig, descriptor)?)?;
    }
    Ok(Verdict::Holds)
}

fn memmove(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let source = rig.holding(&noise(2 * PAGE))?;
    let target = rig.pages(2)?;
    for (offset, length) in ODD {
        target.write(0, &[0; 2 * PAGE]);
        // To another offset than from.
        let to = (2 * PAGE - length) / 2;
        let descriptor = dsa::memmove(
            source.address(*offset),
            target.address(to),
            size(*length),
            0,
        );
        same("status 0x01", rig.ask(descriptor)?.to_string())?;
        let mut expected = vec![0; 2 * PAGE];
        expected[to..to + length].copy_from_slice(&source.read(*offset, *length));
        holds(&target, &expected)?;
    }
    Ok(Verdict::Holds)
}

fn memmove_overlap(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let is_supported = rig.limits().capabilities.has(OVERLAPPING_COPY);
    for (from, to) in [(0, 100), (100, 0), (0, 4096), (4096, 0)] {
        let (area, length) = (rig.holding(&noise(4 * PAGE))?, 2 * PAGE + 11);
        let descriptor = dsa::memmove(area.address(from), area.address(to), size(length), 0);
        let mut expected = area.read(0, 4 * PAGE);
        let status = match is_supported {
            true => {
                expected.copy_within(from..from + length, to);
                "status 0x01"
            }
            false => "status 0x16",
        };
        same(status, rig.ask(descriptor)?.to_string())?;
        holds(&area, &expected)?;
    }
    Ok(Verdict::Holds)
}

/// Bit of GENCAP: a MEMMOVE may have areas that overlap (DSA 3.0, 9.2.2).
pub(super) const OVERLAPPING_COPY: u32 = 1;

fn fill(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (area, pattern) = (rig.pages(2)?, 0x0102_0304_0506_0708_u64);
    for (offset, length) in ODD {
        area.write(0, &[0; 2 * PAGE]);
        let descriptor = dsa::fill(pattern, area.address(*offset), size(*length), 0);
        same("status 0x01", rig.ask(descriptor)?.to_string())?;
        let mut expected = vec![0; 2 * PAGE];
        let bytes = pattern.to_le_bytes().into_iter().cycle();
        for (place, byte) in expected[*offset..offset + length].iter_mut().zip(bytes) {
            *place = byte;
        }
        holds(&area, &expected)?;
    }
    Ok(Verdict::Holds)
}

/// Status and result of an operation.
fn compared(rig: &Rig<'_>, descriptor: Descriptor) -> Result<String, Ended> {
    let image = rig.ask(descriptor)?.image("a result")?;
    Ok(comparison(&image))
}

pub(super) fn comparison(image: &RecordImage) -> String {
    format!("{:#04x}, result {}", image.status(), image.result())
}

fn at(found: &str, offset: usize, length: usize) -> String {
    format!("{found} for {length} bytes at {offset}")
}

/// Whether an area has these bytes, from its start.
pub(super) fn holds(area: &Area, expected: &[u8]) -> Result<(), Ended> {
    let found = area.read(0, expected.len());
    match found
        .iter()
        .zip(expected)
        .position(|(one, other)| one != other)
    {
        None => Ok(()),
        Some(at) => Err(Verdict::Differs {
            expected: format!("byte {at} to be {:#04x}", expected[at]),
            found: format!("{:#04x}", found[at]),
        }),
    }
}

pub(super) fn size(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Bytes without a pattern, always the same.
pub(super) fn noise(length: usize) -> Vec<u8> {
    let mut random = crate::random::Random::new(length as u64);
    (0..length)
        .map(|_| random.next().to_le_bytes()[0])
        .collect()
}

/// An operation that fails at once.
pub(super) fn failing() -> Descriptor {
    super::rig::plain(UNKNOWN)
}
