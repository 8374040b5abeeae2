//! What a migration will take: measures guest and link, and changes nothing. `model` predicts from what was measured.
//!
//! ```text
//!  QEMU     compares checksums of pages over 3 s ──────────────────────> over 1 s ──>
//!  memory   a sample ── encoded ── again after 1 s ── and after 3 s
//!  link                                └ data streams that the server discards
//! ```

mod model;
mod sample;

use std::{
    fs, io, thread,
    time::{Duration, Instant},
};

use handover::AttemptId;
use tracing::debug;
use vamoose_link::{EncodingCost, left};

use super::{
    Migration, SourceQemu,
    link::{self, LinkSpeed},
    preflight::Inspected,
};
use crate::{chain, qemu::QemuError};
use model::whole;
pub use model::{Inputs, Prediction, Remedies, Writes};
use sample::Memory;

/// What was measured, and what follows from it.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Bytes of RAM.
    pub ram: u64,
    /// Bytes of pages that are not zero, as far as is known.
    pub used: u64,
    /// How the guest writes; `None` if that is not known.
    pub writes: Option<Writes>,
    /// The link; `None` if it was not measured.
    pub link: Option<LinkSpeed>,
    /// What could not be measured, and what is assumed instead.
    pub unknown: Vec<String>,
    /// `None` without a link.
    pub prediction: Option<Prediction>,
}

/// Times after which written pages are counted; the last only if the migration will take long.
const SHORT: u64 = 1;
const LONG: u64 = 3;
const LONGER: u64 = 9;
/// Most bytes of rewritten pages to be encoded.
const ENCODED: usize = 4 << 20;
/// Fewer pages do not tell what the others shrink to.
const FEW: usize = 16;
/// QEMU's own default.
const DOWNTIME_LIMIT: Duration = Duration::from_millis(300);
/// From this rate on, QEMU's whole MiB are exact enough.
const EXACT: f64 = 8e6;

impl Migration<'_> {
    pub(super) fn forecast(
        &self,
        attempt: AttemptId,
        source: &mut SourceQemu,
        inspected: &Inspected,
    ) -> Result<Forecast, QemuError> {
        let mut unknown = Vec::new();
        let ram = source.qemu.ram()?;
        let began = Instant::now();
        let by_qemu = source
            .is_wanted
            .then(|| source.qemu.begin_dirty_rate(LONG, ram));
        let page_size = self.config.layout.page_size();
        let process = source.instance.process;
        let memory = process.map_or(
            Err(io::Error::from(io::ErrorKind::PermissionDenied)),
            |process| {
                let memory = Memory::open(process, ram)?;
                let sample = memory.sample(page_size)?;
                Ok((memory, sample))
            },
        );
        let again = |seconds| {
            thread::sleep(left(began + Duration::from_secs(seconds)));
            let (memory, sample) = memory.as_ref().ok()?;
            Some(sample.changed(&memory.sample(page_size).ok()?))
        };
        let content = memory
            .as_ref()
            .ok()
            .and_then(|(memory, sample)| memory.runs(sample).ok());
        let encodings = content.and_then(|pages| self.encodings(&pages));
        let mut changed = [None, None];
        if source.is_wanted {
            changed[0] = again(SHORT);
        }
        let link = self.link(attempt, inspected);
        let link = link.map_err(|reason| unknown.push(format!("link not measured: {reason}")));
        if source.is_wanted {
            changed[1] = again(LONG);
        }
        let mut writes = match by_qemu {
            None => Some(Writes::default()),
            Some(begun) => {
                let rates = begun.and_then(|()| {
                    let long = source.qemu.dirty_rate(LONG)?;
                    source.qemu.begin_dirty_rate(SHORT, ram)?;
                    Ok((source.qemu.dirty_rate(SHORT)?, long))
                });
                let shares = [&changed[0], &changed[1]].map(|it| Some(it.as_ref()?.0 * ram as f64));
                writes(rates.map_err(|error| chain(&error)), shares, &mut unknown)
            }
        };
        let used = match &memory {
            Ok((_, sample)) => sample.used() * ram as f64,
            Err(reason) => {
                unknown.push(format!(
                    "its pages cannot be read ({reason}): taken as not compressible"
                ));
                resident(source).map_or(ram as f64, |bytes| bytes.min(ram as f64))
            }
        };
        let [_, last] = changed;
        let set = source.qemu.parameter("downtime-limit");
        let set = set.map_or(DOWNTIME_LIMIT, Duration::from_millis);
        let packets = f64::from(self.channels) + 1.0;
        let mut inputs = link.ok().map(|link| Inputs {
            ram: ram as f64,
            used,
            encodings: encodings.unwrap_or_else(|| vec![EncodingCost::RAW]),
            rewritten: last
                .as_ref()
                .and_then(|(_, [_, pages])| self.encodings(&pages[..pages.len().min(ENCODED)]))
                .unwrap_or_default(),
            differences: last
                .as_ref()
                .and_then(|(_, pages)| self.differences(inspected, pages)),
            writes: writes.unwrap_or_default(),
            link: link.rate.max(1.0),
            round_trip: link.round_trip,
            encoders: self.encoders(),
            under_way: packets * self.config.layout.packet_bytes() as f64,
            downtime_limit: self.downtime_limit.unwrap_or(set),
        });
        // Rounds of a slow link are long enough to show a large working set.
        if let Some(inputs) = &mut inputs
            && inputs.writes.rate > 0.0
            && inputs.writes.working_set.is_infinite()
            && inputs.predict().total_time > Duration::from_secs(LONGER)
            && let (Some((share, _)), Some((later, _))) = (last, again(LONGER))
        {
            let time = Duration::from_secs(LONG);
            let changed = [share, later].map(|share| share * ram as f64);
            inputs.writes = Writes::measured(time, changed[0], changed[1]);
            writes = Some(inputs.writes);
        }
        debug!("{inputs:?}");
        Ok(Forecast {
            ram,
            used: whole(used),
            writes,
            link: link.ok(),
            unknown,
            prediction: inputs.map(|inputs| inputs.predict()),
        })
    }

    /// What the method makes of pages, if these are enough to tell.
    fn encodings(&self, pages: &[u8]) -> Option<Vec<EncodingCost>> {
        let layout = self.config.layout;
        let few = FEW * layout.page_size();
        (pages.len() >= few).then(|| self.config.method.costs(layout, pages).ok())?
    }

    /// The differences between the versions of rewritten pages, if they are sent.
    fn differences(
        &self,
        inspected: &Inspected,
        [before, after]: &[Vec<u8>; 2],
    ) -> Option<(EncodingCost, f64)> {
        let cache = inspected.control.stream().session()?.page_cache()?;
        if !self.config.delta || after.is_empty() {
            return None;
        }
        let most = after.len().min(ENCODED);
        let cost =
            EncodingCost::of_differences(self.config.layout, &before[..most], &after[..most]);
        Some((cost.ok()?, cache as f64))
    }

    fn link(&self, attempt: AttemptId, inspected: &Inspected) -> Result<LinkSpeed, String> {
        let session = inspected.control.stream().session();
        let session = session.filter(|_| inspected.measures);
        let session = session.ok_or_else(|| format!("serve on {} is older", self.host))?;
        let limit = self.config.max_bandwidth;
        let link = link::measure(&session, attempt, self.channels, limit);
        let link = link.map_err(|error| chain(&error))?;
        link.ok_or_else(|| format!("serve on {} accepts nothing", self.host))
    }
}

/// Bytes that the QEMU has in memory, which every user may know.
fn resident(source: &SourceQemu) -> Option<f64> {
    let status = format!("/proc/{}/status", source.instance.process?.pid);
    let status = fs::read_to_string(status).ok()?;
    let size = status.lines().find_map(|it| it.strip_prefix("VmRSS:"))?;
    let kib: f64 = size.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024.0)
}

/// How the guest writes, by QEMU's rates over the short and the long time, and by the bytes that changed of this process's own sample
/// meanwhile. QEMU's rates are less exact for a guest that writes little, and know nothing of small RAM blocks.
fn writes(
    rates: Result<(f64, f64), String>,
    changed: [Option<f64>; 2],
    unknown: &mut Vec<String>,
) -> Option<Writes> {
    let (short, long) = (Duration::from_secs(SHORT), LONG as f64);
    match (rates, changed) {
        (Ok((rate, later)), _) if later >= EXACT => {
            Some(Writes::measured(short, rate, later * long))
        }
        (_, [Some(first), Some(last)]) => Some(Writes::measured(short, first, last)),
        (Ok((rate, later)), _) => Some(Writes::measured(short, rate, later * long)),
        (Err(reason), _) => {
            unknown.push(format!(
                "how the guest writes is not known ({reason}): taken as idle"
            ));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_exact_of_two_measurements_counts() {
        let mib = 1_048_576.0;
        let own = [Some(3.0 * mib), Some(9.0 * mib)];
        for (rates, own, rate) in [
            (Ok((100.0 * mib, 100.0 * mib)), own, Some(100.0 * mib)),
            (Ok((2.0 * mib, 2.0 * mib)), own, Some(3.0 * mib)),
            (Ok((2.0 * mib, 2.0 * mib)), [None, None], Some(2.0 * mib)),
            (Err("no".to_owned()), own, Some(3.0 * mib)),
            (Err("no".to_owned()), [None, None], None),
        ] {
            let mut unknown = Vec::new();
            let found = writes(rates, own, &mut unknown);
            assert_eq!(found.map(|it| it.rate), rate);
            assert_eq!(unknown.is_empty(), rate.is_some());
        }
    }
}
