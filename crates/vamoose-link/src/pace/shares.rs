//! How migrations share a bandwidth limit, without a clock or a lock.
//!
//! Each migration is a *flow*. It reserves the bytes that it is about to pass on, and passes them on when its share has come up to
//! them. The shares are computed anew several times a second, and when something changes:
//!
//! - A flow that begins or changes its urgency wants as much as it can get, one that was held up several times its share, another one
//!   a little more than it uses, an idle one nothing.
//! - Each active flow gets what it wants, or at least a fair part of the limit, by its weight. The weight follows from the urgency:
//!   a paused guest gets nearly all, and no guest nothing.
//! - What is left goes to those who want more, or else to all: the shares of the active flows are always the whole limit.

use std::{
    collections::BTreeMap,
    num::NonZeroU64,
    time::{Duration, Instant},
};

use crate::session::Urgency;

/// The flows of one limit.
#[derive(Debug)]
pub(super) struct Shares {
    /// Time whose unused bytes are kept, in seconds.
    burst: f64,
    /// In bytes per second.
    rate: Option<NonZeroU64>,
    flows: BTreeMap<u64, Flow>,
    next: u64,
    /// Until when the flows have received their shares.
    accrued: Instant,
    divided: Instant,
}

/// Counters are in bytes, rates in bytes per second.
#[derive(Debug, Default)]
struct Flow {
    urgency: Urgency,
    share: f64,
    allowed: f64,
    reserved: f64,
    /// What was reserved at the last division, and how much is reserved in a second, lately and in the last interval.
    counted: f64,
    used: f64,
    used_last: f64,
    was_held_up: bool,
    /// Its use has not been measured.
    is_new: bool,
    last: Option<Instant>,
}

/// Time between two divisions.
const INTERVAL: Duration = Duration::from_millis(100);

/// Time over which the use is averaged, and without bytes after which a flow is idle.
const IDLE: Duration = Duration::from_secs(1);

/// Part of its share from which a flow's use counts as all of it.
const FULL: f64 = 0.875;

/// How much more than its share a flow wants that was held up.
const GROWTH: f64 = 4.0;

/// Room for an increase, of a flow that does not use its share: a factor of its use, and a part of its fair share.
const ROOM: f64 = 1.25;
const LEAST: f64 = 1.0 / 16.0;

impl Shares {
    pub(super) fn new(burst: f64, now: Instant) -> Self {
        Self {
            burst,
            rate: None,
            flows: BTreeMap::new(),
            next: 0,
            accrued: now,
            divided: now,
        }
    }

    pub(super) fn rate(&self) -> Option<NonZeroU64> {
        self.rate
    }

    pub(super) fn set_rate(&mut self, rate: Option<NonZeroU64>, now: Instant) {
        self.accrue(now);
        self.rate = rate;
        self.divide(now);
    }

    pub(super) fn join(&mut self, now: Instant) -> u64 {
        self.accrue(now);
        self.next += 1;
        self.flows.insert(self.next, Flow::default());
        self.divide(now);
        self.next
    }

    pub(super) fn leave(&mut self, flow: u64, now: Instant) {
        self.accrue(now);
        self.flows.remove(&flow);
        self.divide(now);
    }

    pub(super) fn set_urgency(&mut self, flow: u64, urgency: Urgency, now: Instant) {
        self.accrue(now);
        let flow = self.flows.entry(flow).or_default();
        (flow.urgency, flow.is_new) = (urgency, true);
        self.divide(now);
    }

    /// Reserves bytes. They may pass once the flow's [`wait`](Self::wait) for the result is over.
    pub(super) fn reserve(&mut self, flow: u64, bytes: usize, now: Instant) -> f64 {
        self.accrue(now);
        let flow = self.flows.entry(flow).or_default();
        let (before, was_active) = (flow.reserved, flow.is_active(now));
        flow.reserved += bytes as f64;
        flow.last = Some(now);
        if !was_active {
            flow.is_new = true;
            self.divide(now);
        }
        before
    }

    /// How long a reservation has to wait at least, before this is to be asked again.
    pub(super) fn wait(&mut self, flow: u64, reserved: f64, now: Instant) -> Option<Duration> {
        let share = self.share(flow, now)?;
        let flow = self.flows.get_mut(&flow)?;
        let missing = reserved - flow.allowed;
        if missing < 1.0 {
            return None;
        }
        flow.was_held_up = true;
        let wait = (missing / share).min(INTERVAL.as_secs_f64());
        Some(Duration::from_secs_f64(wait))
    }

    /// The share of a flow, or the one that it would have if it began. `None` without a limit.
    pub(super) fn share(&mut self, flow: u64, now: Instant) -> Option<f64> {
        self.rate?;
        self.accrue(now);
        if now.saturating_duration_since(self.divided) >= INTERVAL {
            self.divide(now);
        }
        Some(self.flows.get(&flow)?.share)
    }

    /// Gives the flows what their shares have come to.
    fn accrue(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.accrued).as_secs_f64();
        self.accrued = self.accrued.max(now);
        for flow in self.flows.values_mut() {
            let kept = if flow.is_active(now) { self.burst } else { 0.0 };
            let most = flow.reserved + flow.share * kept;
            flow.allowed = match self.rate {
                Some(_) => most.min(flow.allowed + flow.share * passed),
                None => flow.reserved,
            };
        }
    }

    fn divide(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.divided).as_secs_f64();
        self.divided = self.divided.max(now);
        let Some(rate) = self.rate.map(|rate| rate.get() as f64) else {
            return;
        };
        let flows = self.flows.values_mut().map(|flow| flow.count(passed));
        let (active, idle): (Vec<_>, Vec<_>) = flows.partition(|flow| flow.is_active(now));
        let weights: f64 = active.iter().map(|flow| flow.weight()).sum();
        for flow in idle {
            flow.share = rate * flow.weight() / (weights + flow.weight());
        }
        let mut wants = Vec::with_capacity(active.len());
        for flow in &active {
            wants.push(flow.want(rate / weights));
        }
        for (flow, share) in active.into_iter().zip(shares(rate, &wants)) {
            flow.share = share;
            (flow.was_held_up, flow.is_new) = (false, false);
        }
    }
}

impl Flow {
    fn is_active(&self, now: Instant) -> bool {
        let is_recent = |last| now.saturating_duration_since(last) < IDLE;
        self.reserved > self.allowed || self.last.is_some_and(is_recent)
    }

    fn weight(&self) -> f64 {
        match self.urgency {
            Urgency::Filling => 1.0,
            Urgency::Finishing => 4.0,
            Urgency::Paused => 256.0,
        }
    }

    /// Measures the use of the time since the last division.
    fn count(&mut self, passed: f64) -> &mut Self {
        let weight = (passed / IDLE.as_secs_f64()).min(1.0);
        if passed > 0.0 {
            let used = (self.reserved - self.counted) / passed;
            self.used += (used - self.used) * weight;
            self.used_last = if passed >= INTERVAL.as_secs_f64() {
                used
            } else {
                self.used
            };
            self.counted = self.reserved;
        }
        self
    }

    fn want(&self, fair_by_weight: f64) -> Want {
        let is_full = self.was_held_up || self.used >= FULL * self.share;
        let least = LEAST * fair_by_weight * self.weight();
        let more = match is_full {
            true => GROWTH * self.share,
            false => ROOM * self.used.max(self.used_last),
        };
        Want {
            weight: self.weight(),
            most: (!self.is_new).then_some(least.max(more)),
        }
    }
}

/// What an active flow wants.
#[derive(Clone, Copy, Debug)]
struct Want {
    weight: f64,
    /// `None` for as much as it can get.
    most: Option<f64>,
}

/// Divides `rate` completely. A flow gets what it wants, or at least the part of its weight.
fn shares(rate: f64, wants: &[Want]) -> Vec<f64> {
    let mut shares = vec![0.0; wants.len()];
    let (mut left, mut open): (f64, Vec<usize>) = (rate, (0..wants.len()).collect());
    loop {
        let weights: f64 = open.iter().map(|at| wants[*at].weight).sum();
        let fair = |at: &usize| left * wants[*at].weight / weights;
        let is_little = |at: &usize| wants[*at].most.is_some_and(|most| most <= fair(at));
        let (little, more): (Vec<usize>, Vec<usize>) = open.iter().partition(|at| is_little(at));
        if little.is_empty() {
            for at in open {
                shares[at] = fair(&at);
            }
            break;
        }
        for at in little {
            shares[at] = wants[at].most.unwrap_or_default();
            left -= shares[at];
        }
        open = more;
        if open.is_empty() {
            let weights: f64 = wants.iter().map(|want| want.weight).sum();
            for (share, want) in shares.iter_mut().zip(wants) {
                *share += left * want.weight / weights;
            }
            break;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BURST: f64 = 0.02;

    fn want(weight: f64, most: Option<f64>) -> Want {
        Want { weight, most }
    }

    #[test]
    fn rate_is_divided_by_weight_and_want() {
        let all = None;
        let table: &[(&[Want], &[f64])] = &[
            (&[], &[]),
            (&[want(1.0, all)], &[120.0]),
            // Alone, it may grow.
            (&[want(1.0, Some(5.0))], &[120.0]),
            (&[want(1.0, all), want(1.0, all)], &[60.0, 60.0]),
            (&[want(1.0, Some(20.0)), want(1.0, all)], &[20.0, 100.0]),
            (&[want(1.0, Some(80.0)), want(1.0, all)], &[60.0, 60.0]),
            (&[want(1.0, all), want(3.0, all)], &[30.0, 90.0]),
            (&[want(1.0, all), want(3.0, Some(15.0))], &[105.0, 15.0]),
            // What the first leaves makes the second want less than its part.
            (
                &[want(1.0, Some(10.0)), want(1.0, Some(50.0)), want(1.0, all)],
                &[10.0, 50.0, 60.0],
            ),
            (
                &[want(1.0, Some(10.0)), want(1.0, Some(30.0))],
                &[50.0, 70.0],
            ),
        ];
        for (wants, expected) in table {
            assert_eq!(shares(120.0, wants), *expected, "{wants:?}");
        }
    }

    /// One migration of the simulation.
    #[derive(Clone, Copy, Debug)]
    struct Source {
        urgency: Urgency,
        packet: usize,
        /// Bytes per second that it has to send; `None` for as many as it can.
        load: Option<usize>,
    }

    fn greedy(urgency: Urgency) -> Source {
        Source {
            urgency,
            packet: 64 << 10,
            load: None,
        }
    }

    const STEP: Duration = Duration::from_millis(1);

    /// Flows in virtual time.
    struct Simulation {
        sources: Vec<Source>,
        shares: Shares,
        ids: Vec<u64>,
        waiting: Vec<Option<f64>>,
        reserved: Vec<usize>,
        passed: Vec<usize>,
        now: Instant,
        steps: u32,
    }

    impl Simulation {
        fn new(rate: u64, sources: &[Source]) -> Self {
            let now = Instant::now();
            let mut shares = Shares::new(BURST, now);
            shares.set_rate(NonZeroU64::new(rate), now);
            let ids: Vec<_> = sources.iter().map(|_| shares.join(now)).collect();
            for (id, source) in ids.iter().zip(sources) {
                shares.set_urgency(*id, source.urgency, now);
            }
            Self {
                sources: sources.to_vec(),
                shares,
                ids,
                waiting: vec![None; sources.len()],
                reserved: vec![0; sources.len()],
                passed: vec![0; sources.len()],
                now,
                steps: 0,
            }
        }

        /// Passes what may pass, for `time`. Calls `after` at the end of each step, with the bytes that have passed so far.
        fn run(&mut self, time: Duration, mut after: impl FnMut(usize)) {
            for _ in 0..time.as_millis() {
                for at in 0..self.sources.len() {
                    while self.pass(at) {}
                }
                after(self.passed.iter().sum());
                self.now += STEP;
                self.steps += 1;
            }
        }

        fn pass(&mut self, at: usize) -> bool {
            let (source, id) = (self.sources[at], self.ids[at]);
            if self.waiting[at].is_none() {
                let due = source.load.map(|load| load * self.steps as usize / 1000);
                if due.is_some_and(|due| self.reserved[at] + source.packet > due) {
                    return false;
                }
                self.reserved[at] += source.packet;
                self.waiting[at] = Some(self.shares.reserve(id, source.packet, self.now));
            }
            let reserved = self.waiting[at].unwrap();
            if self.shares.wait(id, reserved, self.now).is_some() {
                return false;
            }
            self.waiting[at] = None;
            self.passed[at] += source.packet;
            true
        }
    }

    const RATE: u64 = 60_000_000;

    #[test]
    fn guests_share_equally() {
        let mut simulation = Simulation::new(RATE, &[greedy(Urgency::Filling); 8]);
        // The first one has everything until the others have grown.
        simulation.run(Duration::from_secs(1), |_| {});
        let before = simulation.passed.clone();
        simulation.run(Duration::from_secs(10), |_| {});
        let each = RATE as f64 * 10.0 / 8.0;
        for (passed, before) in simulation.passed.iter().zip(before) {
            let part = (passed - before) as f64 / each;
            assert!((0.97..1.03).contains(&part), "{part}");
        }
    }

    #[test]
    fn paused_guest_goes_first_and_the_others_go_on() {
        let mut simulation = Simulation::new(RATE, &[greedy(Urgency::Filling); 8]);
        simulation.run(Duration::from_secs(2), |_| {});
        let before = simulation.passed.clone();
        let (paused, now) = (simulation.ids[3], simulation.now);
        simulation.shares.set_urgency(paused, Urgency::Paused, now);
        simulation.run(Duration::from_secs(1), |_| {});
        let gained: Vec<_> = (simulation.passed.iter().zip(&before))
            .map(|(now, before)| now - before)
            .collect();
        assert!(gained[3] as f64 > 0.95 * RATE as f64, "{gained:?}");
        assert!(gained.iter().all(|gained| *gained > 0), "{gained:?}");
    }

    #[test]
    fn finishing_guest_gets_several_times_as_much() {
        let sources = [greedy(Urgency::Finishing), greedy(Urgency::Filling)];
        let mut simulation = Simulation::new(RATE, &sources);
        simulation.run(Duration::from_secs(10), |_| {});
        let times = simulation.passed[0] as f64 / simulation.passed[1] as f64;
        assert!((3.8..4.2).contains(&times), "{times}");
    }

    #[test]
    fn unused_share_goes_to_others_and_comes_back() {
        let light = Source {
            load: Some(3_000_000),
            ..greedy(Urgency::Filling)
        };
        let mut simulation = Simulation::new(RATE, &[light, greedy(Urgency::Filling)]);
        simulation.run(Duration::from_secs(10), |_| {});
        let all = RATE as f64 * 10.0;
        assert!(simulation.passed[0] >= 29_800_000);
        assert!(simulation.passed[1] as f64 > 0.9 * all - 30e6);
        // Now it has as much to send as the other one.
        simulation.sources[0].load = None;
        let before = simulation.passed[0];
        simulation.run(Duration::from_secs(10), |_| {});
        let part = (simulation.passed[0] - before) as f64 / all;
        assert!((0.48..0.52).contains(&part), "{part}");
    }

    #[test]
    fn limit_is_changed_lifted_and_set_meanwhile() {
        let mut simulation = Simulation::new(RATE, &[greedy(Urgency::Filling); 3]);
        let second = Duration::from_secs(1);
        for rate in [RATE, RATE / 3, RATE * 2] {
            let now = simulation.now;
            simulation.shares.set_rate(NonZeroU64::new(rate), now);
            let before: usize = simulation.passed.iter().sum();
            simulation.run(5 * second, |_| {});
            let passed = simulation.passed.iter().sum::<usize>() - before;
            let part = passed as f64 / (5 * rate) as f64;
            assert!((0.97..1.03).contains(&part), "{part}");
        }
        let flow = simulation.ids[0];
        let waiting = simulation.waiting[0].unwrap();
        let now = simulation.now;
        assert!(simulation.shares.wait(flow, waiting, now).is_some());
        simulation.shares.set_rate(None, now);
        assert_eq!(simulation.shares.wait(flow, waiting, now), None);
        assert_eq!(simulation.shares.share(flow, now), None);
        // Nothing is owed or saved from before.
        simulation.shares.set_rate(NonZeroU64::new(1000), now);
        assert_eq!(simulation.shares.wait(flow, waiting, now), None);
        let next = simulation.shares.reserve(flow, 1000, now);
        assert_eq!(simulation.shares.wait(flow, next, now), None);
        let next = simulation.shares.reserve(flow, 1000, now);
        assert!(simulation.shares.wait(flow, next, now).is_some());
        assert_eq!(simulation.shares.wait(flow, next, now + 5 * second), None);
    }

    /// It is reported before the first byte comes.
    #[test]
    fn idle_guest_has_the_share_that_it_would_get() {
        let now = Instant::now();
        let mut shares = Shares::new(BURST, now);
        shares.set_rate(NonZeroU64::new(RATE), now);
        let first = shares.join(now);
        assert_eq!(shares.share(first, now), Some(RATE as f64));
        shares.reserve(first, 1, now);
        let second = shares.join(now);
        assert_eq!(shares.share(second, now), Some(RATE as f64 / 2.0));
        assert_eq!(shares.share(first, now), Some(RATE as f64));
    }

    #[test]
    fn share_of_a_guest_that_leaves_goes_to_the_others() {
        let mut simulation = Simulation::new(RATE, &[greedy(Urgency::Filling); 2]);
        simulation.run(Duration::from_secs(1), |_| {});
        let [stays, leaves] = simulation.ids[..] else {
            unreachable!()
        };
        let now = simulation.now;
        assert_eq!(simulation.shares.share(stays, now), Some(RATE as f64 / 2.0));
        simulation.shares.leave(leaves, now);
        assert_eq!(simulation.shares.share(stays, now), Some(RATE as f64));
    }

    fn sources() -> impl Strategy<Value = Vec<Source>> {
        let urgency = prop_oneof![
            Just(Urgency::Filling),
            Just(Urgency::Finishing),
            Just(Urgency::Paused)
        ];
        let load = proptest::option::of(0..20_000_000_usize);
        let source = (urgency, 1000..600_000_usize, load);
        let source = source.prop_map(|(urgency, packet, load)| Source {
            urgency,
            packet,
            load,
        });
        prop::collection::vec(source, 1..10)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn all_of_the_rate_is_divided(wants in prop::collection::vec(
            (prop_oneof![Just(1.0), Just(4.0), Just(256.0)], proptest::option::of(0.0..2e9)),
            1..40,
        )) {
            let wants: Vec<_> = wants.into_iter().map(|(weight, most)| want(weight, most)).collect();
            let shares = shares(1e9, &wants);
            let weights: f64 = wants.iter().map(|want| want.weight).sum();
            prop_assert!((shares.iter().sum::<f64>() - 1e9).abs() < 1.0);
            for (want, share) in wants.iter().zip(&shares) {
                let fair = 1e9 * want.weight / weights;
                prop_assert!(*share >= want.most.unwrap_or(fair).min(fair) - 1.0);
            }
            // Those who get as much as they want leave more than their part to those who do not.
            let unsatisfied = wants.iter().zip(&shares).filter(|(want, share)| {
                want.most.is_none_or(|most| most > **share + 1.0)
            });
            let parts: Vec<_> = unsatisfied.map(|(want, share)| share / want.weight).collect();
            let spread = |part: &f64| (part - parts[0]).abs() < 1.0;
            prop_assert!(parts.iter().all(spread), "{parts:?}");
        }

        /// Whoever sends how much, and whoever becomes urgent: no window of time has more than the limit, a burst, and the packet
        /// that each migration may begin.
        #[test]
        fn no_window_of_time_has_more_than_the_limit(
            sources in sources(),
            changes in prop::collection::vec((0..10_usize, 0..3_u8, 1..400_u64), 0..12),
        ) {
            let mut simulation = Simulation::new(RATE, &sources);
            let packets: usize = sources.iter().map(|it| it.packet).sum();
            let slack = RATE as f64 * BURST + packets as f64;
            let (mut time, mut lowest) = (0.0, 0.0_f64);
            let mut worst = 0.0_f64;
            for (flow, urgency, pause) in changes.into_iter().chain([(0, 0, 2000)]) {
                let urgency = match urgency {
                    0 => Urgency::Filling,
                    1 => Urgency::Finishing,
                    _ => Urgency::Paused,
                };
                let flow = simulation.ids[flow % simulation.ids.len()];
                let now = simulation.now;
                simulation.shares.set_urgency(flow, urgency, now);
                simulation.run(Duration::from_millis(pause), |passed| {
                    let above = passed as f64 - time * RATE as f64;
                    worst = worst.max(above - lowest);
                    lowest = lowest.min(above);
                    time += STEP.as_secs_f64();
                });
            }
            prop_assert!(worst <= slack, "{worst} of {slack}");
        }

        /// Who has enough to send gets the part of its weight at least, whatever the others do, and most of the limit is used
        /// while shares follow what changes.
        #[test]
        fn nobody_starves_and_most_of_the_limit_is_used(sources in sources()) {
            let mut sources = sources;
            sources.push(greedy(Urgency::Filling));
            let mut simulation = Simulation::new(RATE, &sources);
            let time = Duration::from_secs(10);
            simulation.run(time, |_| {});
            let all = RATE as f64 * time.as_secs_f64();
            let weight = |source: &Source| match source.urgency {
                Urgency::Filling => 1.0,
                Urgency::Finishing => 4.0,
                Urgency::Paused => 256.0,
            };
            let weights: f64 = sources.iter().map(weight).sum();
            for (source, passed) in sources.iter().zip(&simulation.passed) {
                let fair = all * weight(source) / weights;
                let wanted = source.load.map_or(f64::MAX, |load| load as f64 * time.as_secs_f64());
                let least = 0.9 * fair.min(wanted) - source.packet as f64;
                prop_assert!(*passed as f64 >= least, "{source:?}: {passed} of {least}");
            }
            let passed: usize = simulation.passed.iter().sum();
            prop_assert!(passed as f64 > 0.75 * all, "{}", passed as f64 / all);
        }
    }
}
