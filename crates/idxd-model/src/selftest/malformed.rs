//! Checks of malformed descriptors: each mistake has a status of its own, and nothing is executed.

use super::{
    Check, Ended, Verdict,
    dsa::{failing, holds, noise, size},
    is_so,
    queue::POLYNOMIAL,
    rig::{PAGE, Rig, flagged, plain},
    same, skipped,
};
use idxd::{Descriptor, Flags, Kind, RecordImage, dsa, iaa, opcode};

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        30,
        "opcode-unknown",
        "an unknown opcode is status 0x10",
        unknown,
    )
    .by("DSA 3.0, 5.8.1; IAA 2.1, 4.4.1"),
    Check::new(
        31,
        "flags-invalid",
        "flags that the operation does not have are status 0x11, and the record names one of them and no other",
        flags,
    )
    .by("DSA 3.0, 5.5 and 8.2.6; IAA 2.1, 6.1.3 and 6.2.6"),
    Check::new(
        32,
        "block-on-fault-refused",
        "asking a queue to block on faults that does not is status 0x11, with that flag",
        block_on_fault,
    )
    .by("DSA 3.0, 5.5; IAA 2.1, 6.1.3"),
    Check::new(
        33,
        "reserved-not-zero",
        "a reserved field that is not zero is status 0x12, where the device looks at it",
        reserved,
    )
    .by("DSA 3.0, 5.4 and 5.5; IAA 2.1, 4.2"),
    Check::new(
        34,
        "size-zero",
        "a transfer of no bytes is status 0x13",
        size_zero,
    )
    .by("DSA 3.0, 5.8.1; IAA 2.1, 6.1.7"),
    Check::new(
        35,
        "size-too-large",
        "a transfer of more bytes than the queue takes is status 0x13",
        size_too_large,
    )
    .by("DSA 3.0, 5.8.1; IAA 2.1, 4.4.1"),
    Check::new(
        36,
        "interrupt-handle",
        "an interrupt handle without a request for an interrupt is status 0x12, where the device looks at it",
        interrupt,
    )
    .by("DSA 3.0, 5.5 and 8.1.8; IAA 2.1, 6.1.8"),
    Check::new(
        39,
        "cache-control",
        "a copy to the cache is done where the device has cache control",
        cache_control,
    )
    .by("DSA 3.0, 8.1.3.1 and 9.2.2")
    .of(Kind::Dsa)
    .needs(&[opcode::MEMMOVE]),
];

fn unknown(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    same("0x10", asked(rig, failing())?)?;
    Ok(Verdict::Holds)
}

fn flags(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    // These are about a destination or a result, of which a NOOP has none.
    let wrong = [
        ("CACHE", Flags::CACHE),
        ("CHECK_RESULT", Flags::CHECK_RESULT),
        (
            "CHECK_RESULT and CACHE",
            Flags::CACHE.with(Flags::CHECK_RESULT),
        ),
    ];
    for (name, flags) in wrong {
        let image = rig
            .ask(flagged(plain(opcode::NOOP), flags))?
            .image("0x11")?;
        let mask = mask(&image);
        is_so(
            image.status() == 0x11 && mask != 0 && mask & !flags.0 == 0,
            format!("0x11, mask of one or more of {:#08x} for {name}", flags.0),
            format!("{} for {name}", with_mask(&image)),
        )?;
    }
    Ok(Verdict::Holds)
}

fn block_on_fault(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    if rig.limits().block_on_fault {
        return Err(skipped("the queue blocks on faults"));
    }
    let image = rig
        .ask(flagged(harmless(rig)?, Flags::BLOCK_ON_FAULT))?
        .image("0x11")?;
    same("0x11, mask 0x000002", with_mask(&image))?;
    Ok(Verdict::Holds)
}

fn reserved(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let mut descriptor = harmless(rig)?;
    match rig.limits().kind {
        // The last eight bytes, which a comparison does not use.
        Kind::Dsa => descriptor.operands[2] = 1 << 40,
        // The output's most bytes, of an operation without output.
        Kind::Iaa => descriptor.operands[1] = 1,
    }
    reserved_field(rig, descriptor)
}

fn size_zero(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let descriptor = Descriptor {
        size: 0,
        ..harmless(rig)?
    };
    same("0x13", asked(rig, descriptor)?)?;
    Ok(Verdict::Holds)
}

fn size_too_large(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let Ok(most) = u32::try_from(rig.limits().max_transfer.saturating_add(1)) else {
        return Err(skipped("the queue takes any size that can be written"));
    };
    let descriptor = Descriptor {
        size: most,
        ..harmless(rig)?
    };
    same("0x13", asked(rig, descriptor)?)?;
    Ok(Verdict::Holds)
}

fn interrupt(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let descriptor = Descriptor {
        interrupt: 0x7ff,
        ..plain(opcode::NOOP)
    };
    reserved_field(rig, descriptor)
}

fn cache_control(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    if !rig.limits().capabilities.cache_control() {
        return Err(skipped("the device has no cache control (GENCAP bit 2)"));
    }
    let (source, target) = (rig.holding(&noise(PAGE))?, rig.pages(1)?);
    let copy = dsa::memmove(source.address(0), target.address(0), size(PAGE), 0);
    let answer = rig.ask(flagged(copy, Flags::CACHE))?;
    same("status 0x01", answer.to_string())?;
    holds(&target, &source.read(0, PAGE))?;
    Ok(Verdict::Holds)
}

/// Not every device looks at all fields that have to be zero.
fn reserved_field(rig: &Rig<'_>, descriptor: Descriptor) -> Result<Verdict, Ended> {
    match asked(rig, descriptor)?.as_str() {
        "0x12" => Ok(Verdict::Holds),
        "0x01" => Ok(Verdict::Found("the field is not looked at".to_owned())),
        other => Err(Verdict::Differs {
            expected: "0x12, or 0x01 from a device that does not look at the field".to_owned(),
            found: other.to_owned(),
        }),
    }
}

/// An operation of a page that reads only, and is right as it is.
fn harmless(rig: &Rig<'_>) -> Result<Descriptor, Ended> {
    let source = rig.pages(1)?.address(0);
    let descriptor = match rig.limits().kind {
        Kind::Dsa => dsa::compare_pattern(source, size(PAGE), 0, 0),
        Kind::Iaa => iaa::crc64(source, size(PAGE), POLYNOMIAL, 0),
    };
    match rig.limits().operations.has(descriptor.opcode()) {
        true => Ok(descriptor),
        false => Err(skipped("the queue has no operation that only reads")),
    }
}

fn asked(rig: &Rig<'_>, descriptor: Descriptor) -> Result<String, Ended> {
    let image = rig.ask(descriptor)?.image("a status")?;
    Ok(format!("{:#04x}", image.status()))
}

fn with_mask(image: &RecordImage) -> String {
    format!("{:#04x}, mask {:#08x}", image.status(), mask(image))
}

/// The flags that a record calls invalid.
fn mask(image: &RecordImage) -> u32 {
    (image.words[2] & 0x00ff_ffff) as u32
}
