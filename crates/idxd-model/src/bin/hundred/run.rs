//! Scenarios, and what comes out of them.

use std::{cmp::Reverse, collections::BinaryHeap, sync::Arc};

use anyhow::{Context, Result};
use idxd::shares::Weight;

use crate::{
    guest::{Content, Guest, Plan, scatter},
    host::Host,
    parameters::{BATCH, MILLI, PAGE, Parameters, Picos, SECOND},
};

/// Who scans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// The processor alone.
    Processor,
    /// Devices too; each takes what there is.
    Devices,
    /// Devices too; fair shares of the queues.
    Shares,
}

/// What happens at once.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) host: Parameters,
    pub(crate) who: Who,
    pub(crate) guests: usize,
    pub(crate) zero_in_1000: u64,
    /// Whether the guests also send, over the host's link.
    pub(crate) sends: bool,
    /// Pages of each guest, in batches.
    pub(crate) batches: u64,
    /// So many of the first guests have another plan: they have so many batches out at once, and that weight.
    pub(crate) others: Option<(usize, usize, Weight)>,
    /// Batches that the rest have out at once, and their weight.
    pub(crate) depth: usize,
    pub(crate) weight: Weight,
    /// So many devices whose queues are kept full by a client without a share.
    pub(crate) flooded: usize,
    pub(crate) seed: u64,
}

impl Scenario {
    /// The question's: nothing but scanning, on the default host.
    pub(crate) fn of(who: Who, guests: usize, zero_in_1000: u64) -> Self {
        Self {
            host: Parameters::default(),
            who,
            guests,
            zero_in_1000,
            sends: false,
            batches: 512,
            others: None,
            depth: 1,
            weight: Weight::NORMAL,
            flooded: 0,
            seed: 1,
        }
    }
}

/// What came of a scenario.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// Pages with a wrong verdict, or without one.
    pub(crate) wrong: u64,
    /// Seconds of CPU for scanning, of all guests together.
    pub(crate) cpu: f64,
    /// The same for each GiB.
    pub(crate) cpu_per_gib: f64,
    /// Milliseconds that each guest's scans took, in order.
    pub(crate) scans: Vec<f64>,
    /// Microseconds that each batch's scan took, in order.
    pub(crate) batches: Vec<f64>,
    /// Parts of all pages: judged by a device; given to one in vain.
    pub(crate) by_device: f64,
    pub(crate) in_vain: f64,
    /// Part of the time that devices transferred, while all guests ran.
    pub(crate) busy: f64,
    /// Submissions that a queue refused, of all.
    pub(crate) refused: f64,
    /// Jain's index of the pages that devices judged for each guest: 1 where all have the same.
    pub(crate) fairness: f64,
    /// Pages that devices judged, of the guests with another plan, and of the rest, as part of their own.
    pub(crate) by_device_of: (f64, f64),
    /// Scan time of the guests with another plan, and of the rest: means, in ms.
    pub(crate) scan_of: (f64, f64),
    /// How many times longer memory took, at the end.
    pub(crate) slowdown: f64,
}

/// Runs `scenario`, one guest at a time: always the one whose clock is behind all others.
pub(crate) fn run(scenario: &Scenario) -> Result<Outcome> {
    let parameters = scenario.host;
    let host = Arc::new(Host::new(parameters));
    let directory = tempfile::tempdir().context("a directory for the tables of shares")?;
    let shares = (scenario.who == Who::Shares).then_some(directory.path());
    let devices = match scenario.who {
        Who::Processor => 0,
        Who::Devices | Who::Shares => parameters.devices,
    };
    let plan = Plan {
        batches: scenario.batches,
        depth: scenario.depth,
        link: scenario
            .sends
            .then(|| parameters.link / scenario.guests as u64),
        weight: scenario.weight,
    };
    let content = Content {
        zero_in_1000: scenario.zero_in_1000,
    };
    let (others, other_plan) = match scenario.others {
        None => (0, plan),
        Some((count, depth, weight)) => (
            count,
            Plan {
                depth,
                weight,
                ..plan
            },
        ),
    };
    let guests = (0..scenario.guests).map(|number| {
        let begin = scatter(scenario.seed << 32 | number as u64) % MILLI;
        let plan = if number < others { other_plan } else { plan };
        Guest::new(&host, number as u64, begin, content, plan, devices, shares)
    });
    let mut guests: Vec<Guest> = guests.collect::<Result<_>>()?;

    let mut turns: BinaryHeap<_> = guests
        .iter()
        .enumerate()
        .map(|(number, guest)| Reverse((guest.now(), number)))
        .chain((0..scenario.flooded).map(|device| Reverse((0, scenario.guests + device))))
        .collect();
    let mut running = guests.len();
    let mut slowdown = 1.0;
    let (mut busy, mut all_until) = (0, 0);
    while running > 0 {
        let Some(Reverse((now, number))) = turns.pop() else {
            break;
        };
        host.advance(now);
        let Some(guest) = guests.get_mut(number) else {
            let next = host.flood(number - scenario.guests, now, BATCH as u64);
            turns.push(Reverse((next, number)));
            continue;
        };
        if guest.step() {
            turns.push(Reverse((guest.now(), number)));
            continue;
        }
        if running == scenario.guests {
            busy = host.uses().iter().map(|done| done.busy).sum::<u64>();
            all_until = guest.now();
            slowdown = host.slowdown();
        }
        running -= 1;
    }
    Ok(Outcome {
        busy: fraction(busy, all_until * parameters.devices as u64),
        slowdown,
        ..summary(&host, &guests, others)
    })
}

fn summary(host: &Host, guests: &[Guest], others: usize) -> Outcome {
    let sorted = |values: Vec<Picos>, unit: Picos| {
        let mut values: Vec<f64> = values.iter().map(|time| fraction(*time, unit)).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let pages_of = |guest: &Guest| (guest.scans.len() * BATCH) as u64;
    let by_device: Vec<u64> = guests.iter().map(|guest| guest.work().by_device).collect();
    let pages: u64 = guests.iter().map(pages_of).sum();
    let cpu: Picos = guests.iter().map(Guest::cpu).sum();
    let uses = host.uses();
    let total = |what: fn(&crate::host::Use) -> u64| uses.iter().map(what).sum::<u64>();
    let (first, rest) = guests.split_at(others);
    let part = |guests: &[Guest]| {
        let done: u64 = guests.iter().map(|guest| guest.work().by_device).sum();
        fraction(done, guests.iter().map(pages_of).sum())
    };
    let mean_scan = |guests: &[Guest]| {
        let cpu: Picos = guests.iter().map(Guest::cpu).sum();
        fraction(cpu, guests.len() as u64 * MILLI)
    };
    let failed: u64 = guests
        .iter()
        .flat_map(|guest| guest.devices().statistics())
        .map(|queue| queue.timed_out + queue.faults)
        .sum();
    Outcome {
        wrong: guests.iter().map(|guest| guest.wrong).sum::<u64>() + failed,
        cpu: fraction(cpu, SECOND),
        cpu_per_gib: fraction(cpu, SECOND) / fraction(pages * PAGE, 1 << 30),
        scans: sorted(guests.iter().map(Guest::cpu).collect(), MILLI),
        batches: sorted(
            guests
                .iter()
                .flat_map(|guest| guest.scans.iter().copied())
                .collect(),
            MILLI / 1000,
        ),
        by_device: fraction(by_device.iter().sum(), pages),
        in_vain: fraction(
            total(|done| done.pages).saturating_sub(by_device.iter().sum()),
            pages,
        ),
        refused: fraction(
            total(|done| done.refused),
            total(|done| done.refused + done.taken),
        ),
        fairness: jain(&by_device),
        by_device_of: (part(first), part(rest)),
        scan_of: (mean_scan(first), mean_scan(rest)),
        ..Outcome::default()
    }
}

/// (Σx)² / nΣx² (Jain, Chiu, Hawe, 1984).
fn jain(values: &[u64]) -> f64 {
    let sum: u64 = values.iter().sum();
    let squares: u64 = values.iter().map(|value| value * value).sum();
    fraction(sum * sum, values.len() as u64 * squares)
}

/// `part` of `whole`; none of nothing.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
pub(crate) fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    part as f64 / whole as f64
}

/// The value below which `part` of the sorted `values` are.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index"
)]
pub(crate) fn quantile(values: &[f64], part: f64) -> f64 {
    let index = (values.len() as f64 * part).ceil() as usize;
    values
        .get(index.saturating_sub(1).min(values.len().saturating_sub(1)))
        .copied()
        .unwrap_or(0.0)
}

/// The mean; zero of nothing.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(who: Who, zero_in_1000: u64, sends: bool, flooded: usize) -> Outcome {
        let mut scenario = Scenario::of(who, 10, zero_in_1000);
        // Time to learn that queues are full: each is asked by itself.
        scenario.batches = if flooded > 0 { 256 } else { 64 };
        (scenario.sends, scenario.flooded) = (sends, flooded);
        scenario.host.memory = None;
        let outcome = run(&scenario).unwrap();
        assert_eq!(outcome, run(&scenario).unwrap(), "the same each time");
        outcome
    }

    #[test]
    fn no_guest_fails_or_is_much_slower_than_the_processor_alone() {
        for zero in [1000, 500, 100] {
            for (sends, flooded) in [(false, 0), (true, 0), (false, 8), (true, 8)] {
                let alone = short(Who::Processor, zero, sends, flooded);
                for who in [Who::Devices, Who::Shares] {
                    let with = short(who, zero, sends, flooded);
                    assert_eq!((with.wrong, alone.wrong), (0, 0));
                    let most = 1.05 * quantile(&alone.scans, 1.0);
                    assert!(
                        quantile(&with.scans, 1.0) < most,
                        "{zero} {sends} {flooded}: {with:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_processor_has_less_to_do_while_it_sends() {
        let alone = short(Who::Processor, 500, true, 0);
        let with = short(Who::Shares, 500, true, 0);
        assert!(2.0 * with.cpu < alone.cpu);
        assert!(with.by_device > 0.5 && with.fairness > 0.9);
    }

    #[test]
    fn quantiles_and_jain() {
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0], 0.5), 2.0);
        assert_eq!(quantile(&[1.0, 2.0], 1.0), 2.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
        assert_eq!((jain(&[3, 3]), jain(&[4, 0])), (1.0, 0.5));
    }
}
