//! What the plan will take: bytes by the memory that each QEMU has in use, and time by the bandwidth limit, as libvirt cannot measure
//! the link. QEMU measures how fast the guests write.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use evacuation::Plan;
use tracing::warn;
use vamoose_link::{EncodingCost, millis};
use vamoose_relay::{Inputs, Writes};

use super::{
    Options,
    libvirt::{Domain, LibvirtHost, State},
    summary::Report,
    survey::Survey,
};

/// QEMU's and libvirt's default.
const DOWNTIME_LIMIT: Duration = Duration::from_millis(300);
/// How long QEMU may take to measure for a second.
const MEASURED_WITHIN: Duration = Duration::from_secs(10);

/// Adds a prediction to the planned guests of `report`. Returns all of them in words.
pub(super) fn add(options: &Options, survey: &Survey, plan: &Plan, report: &mut Report) -> String {
    let domains = || plan.moves.iter().map(|step| survey.domain(step.guest));
    let running = domains().filter(|domain| domain.state == State::Running);
    let begun = running
        .map(|domain| survey.source.begin_dirty_rate(&domain.uuid))
        .collect::<Result<Vec<_>>>();
    if let Err(error) = &begun {
        warn!("how the guests write is not known: {error:#}");
    }
    let (mut bytes, mut time, mut longest) = (0, Duration::ZERO, Duration::ZERO);
    for (step, domain) in plan.moves.iter().zip(domains()) {
        let rate = match domain.state {
            State::Running if begun.is_err() => None,
            State::Running => dirty_rate(&survey.source, &domain.uuid),
            _ => Some(0.0),
        };
        let guest = report.guest(step.guest);
        guest.bytes = domain.resident;
        if let Some(link) = options.rate_of_each() {
            let prediction = inputs(options, domain, rate.unwrap_or(0.0), link).predict();
            guest.converges = rate.map(|_| prediction.remedies.is_none());
            guest.bytes = prediction.wire_bytes;
            guest.total_time = millis(prediction.total_time);
            time += prediction.total_time;
            longest = longest.max(prediction.total_time);
        }
        bytes += guest.bytes;
    }
    let at_once = u32::try_from(options.parallel.get()).unwrap_or(u32::MAX);
    let time = (time / at_once).max(longest);
    report.total_time = millis(time);
    match options.max_bandwidth {
        Some(_) => format!(
            "all: about {} MiB in {:.0} s",
            bytes >> 20,
            time.as_secs_f64()
        ),
        None => format!(
            "all: about {} MiB; --max-bandwidth tells how fast, and lets the time be predicted",
            bytes >> 20
        ),
    }
}

/// In bytes per second; `None` if it is not known in time.
fn dirty_rate(host: &LibvirtHost, uuid: &str) -> Option<f64> {
    let deadline = Instant::now() + MEASURED_WITHIN;
    while Instant::now() < deadline {
        match host.dirty_rate(uuid) {
            Ok(Some(mib)) => return Some(mib as f64 * 1_048_576.0),
            Ok(None) => thread::sleep(Duration::from_millis(100)),
            Err(error) => {
                warn!("{error:#}");
                break;
            }
        }
    }
    None
}

fn inputs(options: &Options, domain: &Domain, rate: f64, link: u64) -> Inputs {
    Inputs {
        ram: domain.memory as f64,
        used: domain.resident as f64,
        encodings: vec![EncodingCost::RAW],
        rewritten: Vec::new(),
        differences: None,
        writes: Writes::everywhere(rate),
        link: link as f64,
        round_trip: Duration::ZERO,
        encoders: f64::from(options.channels),
        under_way: 0.0,
        downtime_limit: DOWNTIME_LIMIT,
    }
}
