//! The work queue itself: alive, in order where that is asked for, and full.

use super::{
    Check, Ended, Verdict, is_so,
    rig::{Answer, Hole, PAGE, Rig, plain},
    same, skipped,
};
use idxd::{Descriptor, Flags, Kind, Mode, Record, Refusal, dsa, iaa, opcode};

pub(super) const CHECKS: &[Check] = &[
    Check::new(1, "noop", "a NOOP is done", noop)
        .by("DSA 3.0, 8.3.1; IAA 2.1, 6.3.1")
        .needs(&[opcode::NOOP]),
    Check::new(2, "drain", "a DRAIN is done", drain)
        .by("DSA 3.0, 8.3.3; IAA 2.1, 6.3.1")
        .needs(&[opcode::DRAIN]),
    Check::new(
        3,
        "drain-waits",
        "when a DRAIN is done, so is everything that this process submitted before it to the same queue",
        drain_waits,
    )
    .by("DSA 3.0, 3.12; IAA 2.1, 6.3.1")
    .needs(&[opcode::DRAIN]),
    Check::new(
        4,
        "record-on-error",
        "where a record is wanted for errors alone, there is none of a success and one of an error",
        record_on_error,
    )
    .by("DSA 3.0, 8.1.3 and 8.1.4; IAA 2.1, 6.1.4")
    .needs(&[opcode::NOOP, opcode::DRAIN]),
    Check::new(
        5,
        "queue-full",
        "a full shared queue refuses, and takes more when it has free entries again",
        queue_full,
    )
    .by("DSA 3.0, 3.3.1"),
    Check::new(
        6,
        "freed-at-fetch",
        "more descriptors are in flight than the queue has entries",
        freed_at_fetch,
    )
    .open(),
];

pub(super) const LAST: &[Check] = &[
    Check::new(
        90,
        "record-misaligned",
        "a descriptor with a misaligned record is refused by write(2), and ends in no record through a portal",
        record_misaligned,
    )
    .by("DSA 3.0, 5.4 and 5.8.1; IAA 2.1, 4.4.1")
    .hazard(),
    Check::new(
        91,
        "error-without-record",
        "an error of a descriptor without a valid record address is recorded nowhere in memory",
        error_without_record,
    )
    .by("DSA 3.0, 5.4 and 5.8.1; IAA 2.1, 4.4.1")
    .hazard(),
    Check::new(
        92,
        "record-read-only",
        "a record that cannot be written is lost, and the queue goes on",
        record_read_only,
    )
    .by("DSA 3.0, 3.13.3 and 5.8.1; IAA 2.1, 4.4.1")
    .hazard(),
];

fn noop(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    done(&rig.ask(plain(opcode::NOOP))?)
}

fn drain(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    done(&rig.ask(plain(opcode::DRAIN))?)
}

fn done(answer: &Answer) -> Result<Verdict, Ended> {
    same("status 0x01", answer.to_string())?;
    Ok(Verdict::Holds)
}

fn drain_waits(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let slow = slow(rig)?;
    let mut records = Vec::new();
    for _ in 0..8 {
        let record = rig.record()?;
        let offered = rig.offer(&with_record(slow, record));
        offered.map_err(|refusal| differs("eight operations taken", refusal))?;
        records.push(record);
    }
    same("status 0x01", rig.ask(plain(opcode::DRAIN))?.to_string())?;
    let done = records.iter().filter(|record| record.status() != 0).count();
    same("8 done before", format!("{done} done before"))?;
    Ok(Verdict::Holds)
}

fn record_on_error(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let on_error = |flags| Descriptor {
        control: Descriptor::control_of(opcode::NOOP, Flags::RECORD_VALID.with(flags)),
        ..Descriptor::default()
    };
    let record = rig.record()?;
    rig.offer(&with_record(on_error(Flags::default()), record))
        .map_err(|refusal| differs("a NOOP taken", refusal))?;
    same("status 0x01", rig.ask(plain(opcode::DRAIN))?.to_string())?;
    same("status 0x00", format!("status {:#04x}", record.status()))?;
    // Outside of a batch there is no fence: the only mistake, as a NOOP needs no record.
    same("status 0x11", rig.ask(on_error(Flags::FENCE))?.to_string())?;
    Ok(Verdict::Holds)
}

fn queue_full(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let flood = flood(rig)?;
    match flood.refusal {
        None => {
            return Ok(Verdict::Found(format!(
                "never full: {} accepted in a row",
                flood.accepted
            )));
        }
        Some(Refusal::Full) => {}
        Some(other) => return Err(differs("refused as full", other)),
    }
    same("status 0x01", rig.ask(plain(opcode::NOOP))?.to_string())?;
    Ok(Verdict::Holds)
}

fn freed_at_fetch(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let flood = flood(rig)?;
    let threshold = rig.limits().threshold as usize;
    Ok(match flood.most_in_flight > threshold {
        true => Verdict::Holds,
        false => Verdict::Found(format!(
            "at most {} in flight, of {threshold} entries",
            flood.most_in_flight
        )),
    })
}

/// What came of more operations than a queue has entries.
struct Flood {
    accepted: usize,
    most_in_flight: usize,
    refusal: Option<Refusal>,
}

/// How often a queue that is full is tried again.
const TRIES: usize = 64;

fn flood(rig: &Rig<'_>) -> Result<Flood, Ended> {
    if rig.limits().mode == Mode::Dedicated {
        return Err(skipped("a dedicated queue would lose what is too much"));
    }
    let slow = slow(rig)?;
    let most = (rig.limits().threshold as usize).min(1024) + TRIES;
    let mut records: Vec<&Record> = Vec::new();
    let mut flood = Flood {
        accepted: 0,
        most_in_flight: 0,
        refusal: None,
    };
    let mut refused = 0;
    while flood.accepted < most && refused < TRIES {
        let record = rig.record()?;
        match rig.try_once(&with_record(slow, record)) {
            Ok(()) => {
                records.push(record);
                flood.accepted += 1;
            }
            Err(refusal @ Refusal::Full) => {
                refused += 1;
                flood.refusal = Some(refusal);
            }
            Err(other) => {
                flood.refusal = Some(other);
                break;
            }
        }
        // Without looking at the records, which would slow down what is to be fast, for the first ones.
        if flood.accepted > rig.limits().threshold as usize / 2 {
            let in_flight = records.iter().filter(|record| record.status() == 0).count();
            flood.most_in_flight = flood.most_in_flight.max(in_flight);
        }
    }
    for record in records {
        rig.wait(record).image("all of them done")?;
    }
    Ok(flood)
}

fn record_misaligned(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (place, unrelated) = (rig.pages(1)?, rig.record()?);
    let offset = match rig.limits().kind {
        Kind::Dsa => 16,
        Kind::Iaa => 32,
    };
    let descriptor = Descriptor {
        record: place.address(offset),
        ..plain(opcode::NOOP)
    };
    if let Answer::Refused(refusal) = rig.ask_with(descriptor, unrelated) {
        return match refusal {
            Refusal::Invalid => Ok(Verdict::Holds),
            other => Err(differs("no record, or refused as invalid", other)),
        };
    }
    let written = place.read(0, PAGE);
    match written.iter().position(|byte| *byte != 0) {
        None => Ok(Verdict::Holds),
        Some(at) => Err(Verdict::Differs {
            expected: "no record".to_owned(),
            found: format!(
                "{:#04x} written at byte {at} of a page, record at {offset}",
                written[at]
            ),
        }),
    }
}

fn error_without_record(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let record = rig.record()?;
    let descriptor = Descriptor {
        control: Descriptor::control_of(UNKNOWN, Flags::default()),
        record: record.address(),
        ..Descriptor::default()
    };
    match rig.ask_with(descriptor, record) {
        Answer::None => Ok(Verdict::Holds),
        Answer::Done(_) => Err(Verdict::Differs {
            expected: "no record".to_owned(),
            found: "a record".to_owned(),
        }),
        Answer::Refused(refusal) => Err(differs("taken", refusal)),
    }
}

fn record_read_only(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (area, unrelated) = (rig.before_hole(1, Hole::ReadOnly)?, rig.record()?);
    let descriptor = Descriptor {
        record: area.address(PAGE),
        ..plain(opcode::NOOP)
    };
    if let Answer::Refused(refusal) = rig.ask_with(descriptor, unrelated) {
        return Err(differs("taken", refusal));
    }
    is_so(rig.is_alive(), "a NOOP done afterwards", "no answer")?;
    Ok(Verdict::Holds)
}

/// An operation that takes a device some microseconds, and writes to nothing but its record.
fn slow(rig: &Rig<'_>) -> Result<Descriptor, Ended> {
    const PAGES: usize = 64;
    let limits = rig.limits();
    let area = rig.pages(PAGES)?;
    let bytes = ((PAGES * PAGE) as u64).min(limits.max_transfer);
    let size = u32::try_from(bytes).unwrap_or(u32::MAX);
    let descriptor = match limits.kind {
        Kind::Dsa => dsa::compare_pattern(area.address(0), size, 0, 0),
        Kind::Iaa => iaa::crc64(area.address(0), size, POLYNOMIAL, 0),
    };
    match limits.operations.has(descriptor.opcode()) {
        true => Ok(descriptor),
        false => Err(skipped("the queue has no slow operation to fill it with")),
    }
}

fn with_record(descriptor: Descriptor, record: &Record) -> Descriptor {
    Descriptor {
        record: record.address(),
        ..descriptor
    }
}

fn differs(expected: &str, refusal: Refusal) -> Verdict {
    Verdict::Differs {
        expected: expected.to_owned(),
        found: Answer::Refused(refusal).to_string(),
    }
}

/// The polynomial of ECMA-182, for a CRC whose result does not matter.
pub(super) const POLYNOMIAL: u64 = 0x42f0_e1eb_a9ea_3693;

/// An operation code that no device has.
pub(super) const UNKNOWN: u8 = 0x3f;
