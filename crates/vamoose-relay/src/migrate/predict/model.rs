//! What a pre-copy migration takes, by what was measured of guest, host and link. No clock, no QEMU.
//!
//! ```text
//!  round 0  all memory that is not zero, at the pace of link and encoder
//!  round n  what the guest has written during round n-1; from the third time on, pages go as differences
//!  end      a round that fits into the downtime limit: the guest stops, and the round is sent
//! ```
//!
//! A guest that writes 100 MB/s to 50 MB leaves less to send than one that writes them all over its memory: see [`Writes`].

use std::time::Duration;

use vamoose_link::EncodingCost;

/// What is known before a migration.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Bytes of memory.
    pub ram: f64,
    /// Bytes of pages that are not zero.
    pub used: f64,
    /// Encodings of these pages, the lightest first. Several with method auto. Not empty.
    pub encodings: Vec<EncodingCost>,
    /// The same of pages that the guest rewrites; empty if these are like the others.
    pub rewritten: Vec<EncodingCost>,
    /// Encoding of rewritten pages as differences, and bytes of pages of which the receiver keeps a version.
    pub differences: Option<(EncodingCost, f64)>,
    /// How the guest writes.
    pub writes: Writes,
    /// What the link carries, in bytes per second.
    pub link: f64,
    /// Round-trip time of the link.
    pub round_trip: Duration,
    /// Threads that encode at once.
    pub encoders: f64,
    /// Most bytes of pages on their way through QEMU and its relay.
    pub under_way: f64,
    /// Longest downtime to aim at.
    pub downtime_limit: Duration,
}

/// How a guest writes: `rate` bytes per second of pages, spread over a working set.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Writes {
    /// Bytes per second.
    pub rate: f64,
    /// Bytes; infinite if the guest seems to write everywhere.
    pub working_set: f64,
}

/// The future of a migration.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// What helps, if it would never end.
    pub remedies: Option<Remedies>,
    /// From the command to the guest's first instruction at the destination. Of what does not converge: until it is certain.
    pub total_time: Duration,
    /// Likely downtime.
    pub downtime: Duration,
    /// Bytes on the link.
    pub wire_bytes: u64,
    /// Rounds, as QEMU counts them.
    pub rounds: u32,
    /// The encoding of most pages.
    pub encoding: EncodingCost,
    /// Bytes of pages per second.
    pub pace: f64,
}

/// What lets a guest arrive that writes too much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Remedies {
    /// Downtime limit with which the migration converges.
    pub downtime_limit: Option<Duration>,
    /// Share of its speed that the guest has to lose.
    pub slowdown: Option<f64>,
}

/// Connections, checks, and setting up both QEMUs.
const SETUP: f64 = 0.25;
/// Bytes of zero pages that a QEMU finds per second.
const ZERO_PACE: f64 = 3e9;
/// CPU time of a channel beside encoding: seconds per byte of pages.
const PASSING: f64 = 0.8e-9;
/// Headers, per byte of pages.
const HEADERS: f64 = 0.004;
/// Bytes for a zero page of 4 KiB.
const ZERO_PAGE: f64 = 8.0 / 4096.0;
/// Parts of the downtime limit that `remainder` reserves: for what waits in sockets, device state, load and commit. Least share of the
/// limit for pages.
const RESERVED: f64 = 0.05;
const LEAST_SHARE: f64 = 0.25;
/// What these parts take, and how full packets under way are.
const ENDING: f64 = 0.03;
const FULL: f64 = 0.3;
/// How far a guest is kept for a shorter rest.
const FURTHER_ROUNDS: usize = 2;
const SHORTER: f64 = 0.75;
const LEAST: f64 = 0.005;
/// A round counts as no progress if it takes this share of the one before.
const STUCK: f64 = 0.97;
/// A core has to save this share of the bytes (method auto).
const PRICE: f64 = 0.4;
/// Longest downtime limit that is worth a proposal.
const MOST_DOWNTIME: f64 = 10.0;

impl Inputs {
    /// Predicts a migration.
    pub fn predict(&self) -> Prediction {
        let run = self.precopy(self.downtime_limit.as_secs_f64(), 1.0);
        Prediction {
            remedies: (!run.converges).then(|| self.remedies(&run)),
            total_time: seconds(run.time),
            downtime: seconds(run.downtime),
            wire_bytes: whole(run.wire),
            rounds: run.rounds,
            encoding: run.pace.encoding,
            pace: run.pace.rate,
        }
    }

    /// Sends the memory of a guest that writes at this share of its speed.
    fn precopy(&self, downtime_limit: f64, speed: f64) -> Run {
        let pace = self.pace(&self.encodings);
        let again = match &*self.rewritten {
            [] => pace,
            encodings => self.pace(encodings),
        };
        let zeros = (self.ram - self.used).max(0.0);
        let mut last = zeros / ZERO_PACE + self.used / pace.rate;
        let mut run = Run {
            converges: false,
            time: SETUP + last,
            wire: self.used * pace.wire + zeros * ZERO_PAGE,
            rounds: 1,
            downtime: 0.0,
            pace,
            again,
        };
        let round_trip = self.round_trip.as_secs_f64();
        let under_way = self.under_way.min(self.used) / pace.rate;
        let fixed = RESERVED + round_trip + under_way;
        let allowed = (downtime_limit - fixed).max(LEAST_SHARE * downtime_limit);
        let mut before = f64::INFINITY;
        loop {
            // A round takes at least as long as pages are under way, however few it has.
            let round = last.max(under_way);
            let written = self.writes.within(round * speed).min(self.used);
            let (time, wire) = self.rewritten(written, run.rounds, again);
            run.rounds += 1;
            let next = time.max(f64::MIN_POSITIVE);
            run.converges = next <= allowed;
            if run.converges {
                run.wire += wire;
                let rest = self.shortest(next, under_way, speed, &mut run);
                run.downtime = ENDING + round_trip + FULL * under_way + rest;
                run.time += run.downtime;
                return run;
            }
            if run.rounds > 3 && next >= STUCK * before {
                run.downtime = fixed + next;
                return run;
            }
            run.time += next;
            run.wire += wire;
            (last, before) = (next, next);
        }
    }

    /// The rest with which a guest is paused that could be paused with `rest`: for a shorter one it is kept for further rounds (crate
    /// `convergence`).
    fn shortest(&self, mut rest: f64, under_way: f64, speed: f64, run: &mut Run) -> f64 {
        for _ in 0..FURTHER_ROUNDS {
            let written = self.writes.within(rest.max(under_way) * speed);
            let (next, wire) = self.rewritten(written.min(self.used), run.rounds, run.again);
            if rest <= LEAST || next >= SHORTER * rest {
                break;
            }
            run.time += rest;
            run.wire += wire;
            run.rounds += 1;
            rest = next;
        }
        rest.max(LEAST)
    }

    /// Time and bytes on the link for pages that were sent before.
    fn rewritten(&self, bytes: f64, rounds: u32, pace: Pace) -> (f64, f64) {
        let as_before = (bytes / pace.rate, bytes * pace.wire);
        // A version is kept when a page is sent for the second time.
        match self.differences {
            Some((cost, kept)) if rounds > 1 && cost.size < pace.encoding.size => {
                let short = bytes.min(kept);
                let difference = self.alone(cost);
                let rest = bytes - short;
                (
                    short / difference.rate + rest / pace.rate,
                    short * difference.wire + rest * pace.wire,
                )
            }
            _ => as_before,
        }
    }

    fn remedies(&self, stuck: &Run) -> Remedies {
        let limit = (stuck.downtime * 1.2 * 10.0).ceil() / 10.0;
        let helps = limit <= MOST_DOWNTIME && self.precopy(limit, 1.0).converges;
        let limit_now = self.downtime_limit.as_secs_f64();
        let mut slowdowns = (1..=19).map(|step| f64::from(step) * 0.05);
        Remedies {
            downtime_limit: helps.then(|| seconds(limit)),
            slowdown: slowdowns.find(|lost| self.precopy(limit_now, 1.0 - lost).converges),
        }
    }

    /// The pace of pages of these encodings: by the one that method auto settles at.
    fn pace(&self, encodings: &[EncodingCost]) -> Pace {
        let mut best = self.alone(encodings[0]);
        for pair in encodings.windows(2) {
            let (lighter, denser) = (pair[0], pair[1]);
            let cpu = (denser.cpu - lighter.cpu).max(0.0);
            let saved = 1.0 - denser.size / lighter.size.max(f64::MIN_POSITIVE);
            let is_worth_it =
                lighter.cpu == 0.0 || saved >= PRICE * cpu * best.rate / self.encoders;
            if !best.is_link || !is_worth_it || saved <= 0.0 {
                break;
            }
            let next = self.mixed(lighter, denser);
            if next.rate <= best.rate {
                break;
            }
            best = next;
        }
        best
    }

    /// Packets of two encodings, in the share that uses link and cores best.
    fn mixed(&self, lighter: EncodingCost, denser: EncodingCost) -> Pace {
        let [light, dense] = [lighter, denser].map(|cost| self.alone(cost));
        // Where both take as long: link time of a byte, and CPU time of a byte.
        let link = [light, dense].map(|pace| pace.wire / self.link);
        let cpu = [lighter, denser].map(|cost| (cost.cpu + PASSING) / self.encoders);
        let share = (link[0] - cpu[0]) / ((link[0] - cpu[0]) + (cpu[1] - link[1]));
        if dense.is_link || !(0.0..1.0).contains(&share) {
            return dense;
        }
        let wire = light.wire + share * (dense.wire - light.wire);
        Pace {
            rate: self.link / wire,
            wire,
            is_link: false,
            encoding: if share < 0.5 { lighter } else { denser },
        }
    }

    fn alone(&self, encoding: EncodingCost) -> Pace {
        let wire = encoding.size + HEADERS;
        let (link, cpu) = (self.link / wire, self.encoders / (encoding.cpu + PASSING));
        Pace {
            rate: link.min(cpu),
            wire,
            is_link: link < cpu,
            encoding,
        }
    }
}

impl Writes {
    /// From the bytes that differ after a time, and after three times as long.
    ///
    /// Pages written at random within a working set W at a rate w differ after t: W (1 - e^(-wt/W)). With x = e^(-wt/W), the quotient
    /// of both is 1 + x + x².
    pub fn measured(time: Duration, short: f64, long: f64) -> Self {
        let time = time.as_secs_f64();
        if short <= 0.0 {
            // Less than can be seen in the short time.
            return Self::everywhere(long.max(0.0) / (3.0 * time));
        }
        let quotient = (long / short).clamp(1.0, 3.0);
        let x = ((4.0 * quotient - 3.0).sqrt() - 1.0) / 2.0;
        if x > MOST_LEFT {
            return Self::everywhere(short / time);
        }
        let x = x.max(LEAST_LEFT);
        let working_set = short / (1.0 - x);
        Self {
            rate: -x.ln() * working_set / time,
            working_set,
        }
    }

    /// Writes without a working set that could be seen.
    pub fn everywhere(rate: f64) -> Self {
        Self {
            rate,
            working_set: f64::INFINITY,
        }
    }

    /// Bytes of pages that differ after some seconds.
    pub fn within(&self, seconds: f64) -> f64 {
        match self.rate > 0.0 && self.working_set.is_finite() {
            true => self.working_set * -(-self.rate * seconds / self.working_set).exp_m1(),
            false => self.rate * seconds,
        }
    }
}

/// The share of a working set that was not written in the short time: a larger one cannot be told from all of memory, a smaller one
/// not from nothing.
const MOST_LEFT: f64 = 0.95;
const LEAST_LEFT: f64 = 0.02;

/// A pre-copy migration, in seconds and bytes.
#[derive(Clone, Copy)]
struct Run {
    converges: bool,
    time: f64,
    wire: f64,
    rounds: u32,
    downtime: f64,
    /// Of pages that are sent for the first time, and of rewritten ones.
    pace: Pace,
    again: Pace,
}

#[derive(Clone, Copy)]
struct Pace {
    /// Bytes of pages per second.
    rate: f64,
    /// Bytes on the link, per byte of pages.
    wire: f64,
    /// The link limits, not the cores.
    is_link: bool,
    encoding: EncodingCost,
}

/// Bytes, which are not negative.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates"
)]
pub(super) fn whole(bytes: f64) -> u64 {
    bytes as u64
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: f64 = 1e6;
    const GB: f64 = 1e9;

    fn cost(size: f64, cpu: f64) -> EncodingCost {
        EncodingCost {
            method: "none",
            level: None,
            size,
            cpu,
        }
    }

    /// 1 GB of raw pages at 100 MB/s.
    fn inputs(writes: Writes) -> Inputs {
        Inputs {
            ram: GB,
            used: GB,
            encodings: vec![cost(1.0, 0.0)],
            rewritten: Vec::new(),
            differences: None,
            writes,
            link: 100.0 * MB,
            round_trip: Duration::ZERO,
            encoders: 2.0,
            under_way: 1.5 * MB,
            downtime_limit: Duration::from_millis(300),
        }
    }

    fn writes(rate: f64, working_set: f64) -> Writes {
        Writes {
            rate: rate * MB,
            working_set: working_set * MB,
        }
    }

    fn is_near(is: f64, expected: f64) -> bool {
        (is - expected).abs() <= 0.1 * expected
    }

    #[test]
    fn working_sets_are_found_by_two_looks() {
        for written in [
            writes(100.0, 50.0),
            writes(100.0, 200.0),
            writes(5.0, 10.0),
            writes(1000.0, 600.0),
        ] {
            let second = Duration::from_secs(1);
            let found = Writes::measured(second, written.within(1.0), written.within(3.0));
            assert!(is_near(found.rate, written.rate), "{found:?}");
            assert!(is_near(found.working_set, written.working_set), "{found:?}");
        }
        let second = Duration::from_secs(1);
        for (short, long) in [(MB, 3.0 * MB), (MB, 4.0 * MB), (0.0, 3.0 * MB)] {
            assert_eq!(
                Writes::measured(second, short, long),
                Writes::everywhere(MB)
            );
        }
        assert_eq!(Writes::measured(second, 0.0, 0.0), Writes::everywhere(0.0));
        // It was written several times over in the first second.
        let small = Writes::measured(second, 50.0 * MB, 49.0 * MB);
        assert!(is_near(small.working_set, 50.0 * MB) && small.rate > 100.0 * MB);
    }

    #[test]
    fn what_converges_and_in_which_time() {
        for (written, converges, time) in [
            (Writes::default(), true, 10.3),
            // 10 s, 5 s, 2.5 s, ...
            (Writes::everywhere(50.0 * MB), true, 20.0),
            (Writes::everywhere(120.0 * MB), false, 0.0),
            // A small working set fits into the limit however often it is written.
            (writes(1000.0, 15.0), true, 10.5),
            (writes(1000.0, 200.0), false, 0.0),
            (writes(50.0, 200.0), true, 14.0),
        ] {
            let prediction = inputs(written).predict();
            assert_eq!(prediction.remedies.is_none(), converges, "{prediction:?}");
            let total = prediction.total_time.as_secs_f64();
            assert!(!converges || is_near(total, time), "{written:?}: {total}");
            let downtime = prediction.downtime.as_secs_f64();
            assert!(!converges || downtime <= 0.31, "{written:?}: {downtime}");
        }
    }

    #[test]
    fn remedies_help() {
        let stuck = inputs(writes(1000.0, 80.0));
        let remedies = stuck.predict().remedies.unwrap();
        let limit = remedies.downtime_limit.unwrap();
        let with_limit = Inputs {
            downtime_limit: limit,
            ..stuck.clone()
        };
        assert!(with_limit.predict().remedies.is_none() && limit < Duration::from_secs(2));
        let slow = 1.0 - remedies.slowdown.unwrap();
        let slower = Writes {
            rate: slow * stuck.writes.rate,
            ..stuck.writes
        };
        assert!(inputs(slower).predict().remedies.is_none());
        // No downtime that a guest could bear.
        let everywhere = inputs(Writes::everywhere(500.0 * MB)).predict();
        assert_eq!(everywhere.remedies.unwrap().downtime_limit, None);
    }

    #[test]
    fn differences_let_a_guest_converge() {
        let stuck = inputs(writes(300.0, 300.0));
        assert!(stuck.predict().remedies.is_some());
        let with = |kept| Inputs {
            differences: Some((cost(0.02, 2e-9), kept)),
            ..stuck.clone()
        };
        assert!(with(256.0 * MB).predict().remedies.is_none());
        assert!(with(10.0 * MB).predict().remedies.is_some());
    }

    /// As measured: 12 MB/s of noise, among pages that shrink to a third.
    #[test]
    fn rewritten_pages_shrink_less_than_others() {
        let alike = Inputs {
            encodings: vec![cost(0.34, 1e-9)],
            link: 6.2 * MB,
            ..inputs(writes(12.0, 48.0))
        };
        assert!(alike.predict().remedies.is_none());
        let noise = Inputs {
            rewritten: vec![cost(1.0, 1e-9)],
            ..alike
        };
        assert!(noise.predict().remedies.is_some());
    }

    #[test]
    fn denser_rungs_are_for_slow_links() {
        let rungs = [(1.0, 0.0), (0.4, 1.6e-9), (0.35, 2.2e-9), (0.3, 6e-9)];
        let by = |link: f64, used| {
            let encodings = rungs.map(|(size, cpu)| cost(size, cpu)).to_vec();
            let all = inputs(Writes::default());
            Inputs {
                encodings,
                link,
                used,
                ..all
            }
            .predict()
        };
        assert_eq!(by(10.0 * MB, GB).encoding.size, 0.3);
        assert_eq!(by(10.0 * GB, GB).encoding.size, 1.0);
        // Both rungs are mixed, and the mix is faster than either.
        let middle = by(GB, GB).pace;
        assert!(middle > GB / 1.004 && middle < GB / 0.4, "{middle}");
        // A guest of zeros.
        let empty = by(10.0 * MB, 0.0);
        assert!(empty.total_time < Duration::from_secs(1) && empty.wire_bytes < 3_000_000);
    }

    /// As measured: 4 MB/s to 16 MB, at 5.8 MB/s. Each round was 0.3 s long, and the guest had written too much meanwhile.
    #[test]
    fn pages_under_way_keep_a_slow_link_from_converging() {
        let busy = Inputs {
            link: 5.8 * MB,
            ..inputs(writes(5.0, 16.0))
        };
        let remedies = busy.predict().remedies.unwrap();
        let limit = remedies.downtime_limit.unwrap();
        assert!(limit < Duration::from_secs(2), "{limit:?}");
        let few = Inputs {
            under_way: 0.1 * MB,
            ..busy
        };
        assert!(few.predict().remedies.is_none());
    }

    #[test]
    fn slow_link_ends_all_the_same() {
        let slow = Inputs {
            link: 1.0 * MB,
            round_trip: Duration::from_millis(200),
            ..inputs(writes(0.01, 1.0))
        };
        let prediction = slow.predict();
        assert!(prediction.remedies.is_none(), "{prediction:?}");
        assert!(is_near(prediction.total_time.as_secs_f64(), 1005.0));
    }
}
