//! What DSA's operations compute.

use super::{
    Check, Ended, Verdict, is_so,
    queue::UNKNOWN,
    rig::{Area, PAGE, Rig, flagged},
    same,
};
use idxd::{
    Descriptor, Flags, Kind, RecordImage,
    dsa::{self, ApplyDelta, CopyCrc, CreateDelta},
    opcode,
    status::DsaOutcome,
};

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
    .settles(&[10])
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
        15,
        "compare",
        "two areas are equal, or differ at the byte that the record counts to",
        compare,
    )
    .by("DSA 3.0, 8.2.4 and 8.3.6")
    .needs(&[opcode::COMPARE]),
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
    check(
        19,
        "crc",
        "CRC-32C of \"123456789\" is 0xe3069283, and the result of one piece is the seed of the next",
        crc,
    )
    .by("DSA 3.0, 8.3.12")
    .settles(&[18])
    .needs(&[opcode::CRC]),
    check(
        20,
        "copy-crc",
        "a copy with CRC-32C does both",
        copy_crc,
    )
    .by("DSA 3.0, 8.3.13")
    .settles(&[18])
    .needs(&[opcode::COPY_CRC]),
    check(
        21,
        "delta",
        "a delta that is created and applied makes one area of the other",
        delta,
    )
    .by("DSA 3.0, 8.3.8 and 8.3.9")
    .needs(&[opcode::CREATE_DELTA, opcode::APPLY_DELTA]),
    check(
        22,
        "delta-results",
        "CREATE_DELTA's result is 0 for equal areas, 1 with a delta, 2 if that does not fit",
        delta_results,
    )
    .by("DSA 3.0, 8.3.8")
    .needs(&[opcode::CREATE_DELTA]),
    check(
        23,
        "delta-expected",
        "the expected result of CREATE_DELTA is a mask of results, those of comparisons are values",
        delta_expected,
    )
    .by("DSA 3.0, 8.3.6 and 8.3.8")
    .settles(&[11])
    .needs(&[opcode::CREATE_DELTA, opcode::COMPARE_PATTERN]),
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
            at(&compared(rig, descriptor.into())?, *offset, *length),
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
                at(&compared(rig, descriptor.into())?, *offset, *length),
            )?;
        }
    }
    Ok(Verdict::Holds)
}

fn completed(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(2)?;
    let descriptor = dsa::compare_pattern(area.address(0), size(2 * PAGE), 0, 0);
    same(
        "0x01, result 0, 0 bytes completed",
        counted(rig, descriptor.into())?,
    )?;
    let mut found = Vec::new();
    let mut is_expected = true;
    for byte in [0, 7, 8, 100, 4095, 4096, 5001] {
        area.write(0, &[0; 2 * PAGE]);
        area.write(byte, &[1]);
        let image = rig.ask(descriptor.into())?.image("0x01, result 1")?;
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
            at(&compared(rig, descriptor.into())?, *offset, *length),
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
            ..flagged(descriptor.into(), Flags::CHECK_RESULT)
        };
        same(wanted, compared(rig, descriptor)?)?;
    }
    Ok(Verdict::Holds)
}

fn compare(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (one, two) = (
        rig.holding(&noise(2 * PAGE))?,
        rig.holding(&noise(2 * PAGE))?,
    );
    let ask = |offset: usize, length: usize| {
        let (first, second) = (one.address(offset), two.address(offset));
        compared(rig, dsa::compare(first, second, size(length), 0).into())
    };
    for (offset, length) in ODD {
        same(
            at("0x01, result 0", *offset, *length),
            at(&ask(*offset, *length)?, *offset, *length),
        )?;
    }
    let (first, second) = (one.address(0), two.address(0));
    for byte in [0, 7, 100, 4096, 5001] {
        let was = two.read(byte, 1)[0];
        two.write(byte, &[!was]);
        same(
            format!("0x01, result 1, {byte} bytes completed"),
            counted(rig, dsa::compare(first, second, size(2 * PAGE), 0).into())?,
        )?;
        if byte > 0 {
            same("0x01, result 0", ask(0, byte)?)?;
        }
        two.write(byte, &[was]);
    }
    same(
        "0x01, result 0, 0 bytes completed",
        counted(rig, dsa::compare(first, second, size(2 * PAGE), 0).into())?,
    )?;
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
        same("status 0x01", rig.ask(descriptor.into())?.to_string())?;
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
        same(status, rig.ask(descriptor.into())?.to_string())?;
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
        same("status 0x01", rig.ask(descriptor.into())?.to_string())?;
        let mut expected = vec![0; 2 * PAGE];
        let bytes = pattern.to_le_bytes().into_iter().cycle();
        for (place, byte) in expected[*offset..offset + length].iter_mut().zip(bytes) {
            *place = byte;
        }
        holds(&area, &expected)?;
    }
    Ok(Verdict::Holds)
}

/// The usual check value of CRCs, and its CRC-32C.
const DIGITS: &[u8] = b"123456789";
const CRC_OF_DIGITS: u32 = 0xe306_9283;

fn crc(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.holding(DIGITS)?;
    let ask = |offset: usize, length: usize, seed| {
        let descriptor = dsa::crc(area.address(offset), size(length), seed, 0);
        let answer = rig.ask(descriptor.into())?;
        let image = answer.image("a CRC")?;
        same("status 0x01", answer.to_string())?;
        Ok(DsaOutcome::of(&image).map_or(0, |outcome| outcome.crc()))
    };
    let whole = ask(0, 9, 0)?;
    same(format!("{CRC_OF_DIGITS:#010x}"), format!("{whole:#010x}"))?;
    let pieces = ask(4, 5, ask(0, 4, 0)?)?;
    same(
        format!("{CRC_OF_DIGITS:#010x} of two pieces"),
        format!("{pieces:#010x} of two pieces"),
    )?;
    Ok(Verdict::Holds)
}

fn copy_crc(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (source, target) = (rig.holding(DIGITS)?, rig.pages(1)?);
    let copy = CopyCrc {
        source: source.address(0),
        destination: target.address(1),
        size: 9,
        seed: 0,
    };
    let answer = rig.ask(dsa::copy_crc(copy, 0).into())?;
    let image = answer.image("a CRC")?;
    same("status 0x01", answer.to_string())?;
    let found = DsaOutcome::of(&image).map_or(0, |outcome| outcome.crc());
    same(format!("{CRC_OF_DIGITS:#010x}"), format!("{found:#010x}"))?;
    let mut expected = vec![0; PAGE];
    expected[1..10].copy_from_slice(DIGITS);
    holds(&target, &expected)?;
    Ok(Verdict::Holds)
}

/// Two areas of a page, the second of which differs in so many words, and a buffer for a delta.
struct Two {
    original: std::rc::Rc<Area>,
    modified: std::rc::Rc<Area>,
    delta: std::rc::Rc<Area>,
}

impl Two {
    fn of(rig: &Rig<'_>, words: usize) -> Result<Self, Ended> {
        let (original, modified) = (rig.holding(&noise(PAGE))?, rig.holding(&noise(PAGE))?);
        for word in 0..words {
            let at = (word * 24 + 3) % PAGE;
            modified.write(at, &[!modified.read(at, 1)[0]]);
        }
        Ok(Self {
            original,
            modified,
            delta: rig.pages(2)?,
        })
    }

    fn create(&self, most: u32) -> Descriptor {
        let create = CreateDelta {
            original: self.original.address(0),
            modified: self.modified.address(0),
            size: size(PAGE),
            delta: self.delta.address(0),
            max_delta_size: most,
        };
        dsa::create_delta(create, 0).into()
    }
}

fn delta(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let two = Two::of(rig, 9)?;
    let answer = rig.ask(two.create(160))?;
    let image = answer.image("a delta")?;
    let bytes = DsaOutcome::of(&image).map_or(0, |outcome| outcome.delta_size());
    same(
        "0x01, result 1, 90 bytes",
        format!("{}, {bytes} bytes", comparison(&image)),
    )?;
    let apply = ApplyDelta {
        delta: two.delta.address(0),
        delta_size: bytes,
        destination: two.original.address(0),
        size: size(PAGE),
    };
    let answer = rig.ask(dsa::apply_delta(apply, 0).into())?;
    same("status 0x01", answer.to_string())?;
    holds(&two.original, &two.modified.read(0, PAGE))?;
    Ok(Verdict::Holds)
}

fn delta_results(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    for (words, expected) in [(0, 0), (8, 1), (9, 2)] {
        let image = rig
            .ask(Two::of(rig, words)?.create(80))?
            .image("a result")?;
        same(
            format!("0x01, result {expected} for {words} words in a buffer for 8"),
            format!("{} for {words} words in a buffer for 8", comparison(&image)),
        )?;
    }
    Ok(Verdict::Holds)
}

fn delta_expected(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let two = Two::of(rig, 1)?;
    // As a mask 2 allows result 1 alone, as a value it does not.
    for (mask, wanted) in [(0b10, "0x01, result 1"), (0b01, "0x02, result 1")] {
        let create = two.create(80);
        let descriptor = Descriptor {
            operands: [create.operands[0], create.operands[1], mask],
            ..flagged(create, Flags::CHECK_RESULT)
        };
        same(
            format!("{wanted} where {mask:#b} is expected"),
            format!("{} where {mask:#b} is expected", compared(rig, descriptor)?),
        )?;
    }
    expected_value(rig)
}

/// Status and result of an operation.
fn compared(rig: &Rig<'_>, descriptor: Descriptor) -> Result<String, Ended> {
    let image = rig.ask(descriptor)?.image("a result")?;
    Ok(comparison(&image))
}

/// The same, and the bytes that were completed.
fn counted(rig: &Rig<'_>, descriptor: Descriptor) -> Result<String, Ended> {
    let image = rig.ask(descriptor)?.image("a result")?;
    Ok(format!(
        "{}, {} bytes completed",
        comparison(&image),
        image.completed()
    ))
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
