//! Checks of the work queue itself: it answers, drains, and refuses when it is full.

use super::{
    Check, Verdict, dsa, expect, expect_equal, iaa,
    rig::{Answer, Rig, plain},
};
use idxd::{Descriptor, Kind, Mode, Record, Refusal, opcode};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "noop",
        what: "a NOOP is done",
        section: Some("DSA 3.0, 8.3.1; IAA 2.1, 6.3.1"),
        needs: &[opcode::NOOP],
        run: |rig| expect_equal("status 0x01", rig.ask(plain(opcode::NOOP))?.to_string()),
    },
    Check {
        name: "drain-waits",
        what: "when a DRAIN is done, so is everything that this process submitted before it to the same queue",
        section: Some("DSA 3.0, 3.12; IAA 2.1, 6.3.1"),
        needs: &[opcode::DRAIN],
        run: drain_waits,
    },
    Check {
        name: "opcode-unknown",
        what: "an unknown opcode is status 0x10",
        section: Some("DSA 3.0, 5.8.1; IAA 2.1, 4.4.1"),
        needs: &[],
        run: |rig| expect_equal("status 0x10", rig.ask(plain(UNKNOWN))?.to_string()),
    },
    Check {
        name: "queue-full",
        what: "a full shared queue refuses, and takes more when it has free entries again",
        section: Some("DSA 3.0, 3.3.1"),
        needs: &[opcode::NOOP],
        run: queue_full,
    },
    Check {
        name: "freed-at-fetch",
        what: "more descriptors are in flight than the queue has entries",
        section: None,
        needs: &[],
        run: freed_at_fetch,
    },
];

fn drain_waits(rig: &Rig) -> Result<(), Verdict> {
    let slow = slow(rig)?;
    let mut records = Vec::new();
    for _ in 0..8 {
        let record = rig.record()?;
        let offered = rig.offer(&with_record(slow, record));
        offered.map_err(|refusal| differs("eight operations taken", refusal))?;
        records.push(record);
    }
    expect_equal("status 0x01", rig.ask(plain(opcode::DRAIN))?.to_string())?;
    let done = records.iter().filter(|record| record.status() != 0).count();
    expect_equal("8 done before", format!("{done} done before"))
}

fn queue_full(rig: &Rig) -> Result<(), Verdict> {
    let flood = flood(rig)?;
    match flood.refusal {
        Some(Refusal::Full) => {
            expect_equal("status 0x01", rig.ask(plain(opcode::NOOP))?.to_string())
        }
        Some(other) => Err(differs("refused as full", other)),
        None => Err(Verdict::Skipped(format!(
            "the queue was never full: {} accepted in a row",
            flood.accepted
        ))),
    }
}

fn freed_at_fetch(rig: &Rig) -> Result<(), Verdict> {
    let most = flood(rig)?.most_in_flight;
    let threshold = rig.limits().threshold as usize;
    expect(
        most > threshold,
        format!("more than {threshold} in flight"),
        format!("at most {most}"),
    )
}

/// Result of submitting more operations than the queue has entries.
#[derive(Default)]
struct Flood {
    accepted: usize,
    most_in_flight: usize,
    refusal: Option<Refusal>,
}

/// Number of tries when the queue is full.
const TRIES: usize = 64;

fn flood(rig: &Rig) -> Result<Flood, Verdict> {
    if rig.limits().mode == Mode::Dedicated {
        let why = "a dedicated queue loses what does not fit";
        return Err(Verdict::Skipped(why.to_owned()));
    }
    let slow = slow(rig)?;
    let threshold = rig.limits().threshold as usize;
    let most = threshold.min(1024) + TRIES;
    let records = (0..most).map(|_| rig.record());
    let records: Vec<&Record> = records.collect::<Result<_, _>>()?;
    let (mut flood, mut refused) = (Flood::default(), 0);
    while flood.accepted < most && refused < TRIES {
        match rig.try_once(&with_record(slow, records[flood.accepted])) {
            Ok(()) => flood.accepted += 1,
            Err(refusal) => {
                let is_full = matches!(refusal, Refusal::Full);
                flood.refusal = Some(refusal);
                if !is_full {
                    break;
                }
                refused += 1;
            }
        }
        // The first ones are submitted without looking at the records, which takes time.
        if flood.accepted > threshold / 2 {
            let accepted = records[..flood.accepted].iter();
            let in_flight = accepted.filter(|record| record.status() == 0).count();
            flood.most_in_flight = flood.most_in_flight.max(in_flight);
        }
    }
    for record in &records[..flood.accepted] {
        rig.wait(record).image("all of them done")?;
    }
    Ok(flood)
}

/// An operation that takes a device some microseconds.
fn slow(rig: &Rig) -> Result<Descriptor, Verdict> {
    let descriptor = match rig.limits().kind {
        Kind::Dsa => dsa::slow(rig)?,
        Kind::Iaa => iaa::slow(rig)?,
    };
    match rig.limits().operations.has(descriptor.opcode()) {
        true => Ok(descriptor),
        false => Err(Verdict::Skipped("the queue has no slow operation".into())),
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

/// An operation code that no device has.
pub(super) const UNKNOWN: u8 = 0x3f;
