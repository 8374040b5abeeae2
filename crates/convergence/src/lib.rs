//! The policy of pre-copy: how much may be left when a guest is paused, how far it is slowed down, and what becomes of one that
//! has not moved in time. No clock and no I/O: figures of rounds in, decisions out.
//!
//! ```text
//!  rest, ms   the time that the link needs for what is dirty when a round begins
//!   900 │█
//!   210 │█ █ · · · · · · · · · · · · most: what the downtime limit leaves for the rest
//!    40 │█ █ █     █       █
//!    30 │█ █ █ █ █ █ █ █ █ █
//!     5 │─ ─ ─ ─ ─ ─┐ allowed: begins low, and is raised to the best of the last rounds when rounds no longer get shorter
//!       └───────────────────────
//! ```
//!
//! Pages that were written during a round make the next one. So rounds get shorter as long as pages move faster than the guest
//! writes them, and a further round shortens the downtime. When rounds get no shorter, a guest that is paused later is not paused
//! for less, except at a minimum of its writing. So the guest is paused when the rest is near the least of the last rounds. A guest
//! that could have been paused is not kept waiting for long: after two more rounds, or a tenth of the time so far, any rest
//! within the limit will do.

#![forbid(unsafe_code)]

use std::{collections::VecDeque, fmt, time::Duration};

/// What a migration may cost its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Longest downtime that is accepted.
    pub downtime_limit: Duration,
    /// The limit instead, if [`OnTimeout::Force`] is taken.
    pub downtime_max: Duration,
    /// What to do with a guest that has not been paused after this time.
    pub timeout: Option<(Duration, OnTimeout)>,
    /// Whether and how far a guest is slowed down that writes too fast; with [`OnTimeout::Throttle`] only after the timeout, and in
    /// the default steps if there are no others.
    pub auto_converge: Option<AutoConverge>,
}

/// What to do with a guest that has not been paused in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnTimeout {
    /// Give up. The guest stays where it is.
    Abort,
    /// Slow the guest down from then on.
    Throttle,
    /// Pause the guest and send the rest, however long that takes.
    Pause,
    /// Accept any downtime up to the longest.
    Force,
}

impl fmt::Display for OnTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Abort => "abort",
            Self::Throttle => "throttle",
            Self::Pause => "pause",
            Self::Force => "force",
        })
    }
}

/// Steps of the throttle, in percent of the time for which the guest's CPUs are stopped. The defaults are QEMU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoConverge {
    /// The first.
    pub initial: u8,
    /// What each further one adds.
    pub increment: u8,
    /// The highest, at most 99.
    pub max: u8,
}

impl Default for AutoConverge {
    fn default() -> Self {
        Self {
            initial: 20,
            increment: 10,
            max: 99,
        }
    }
}

impl AutoConverge {
    /// Whether the steps go up, to at most 99 %.
    pub fn is_valid(&self) -> bool {
        self.max <= 99 && self.initial <= self.max && self.increment > 0
    }
}

/// The state of one migration's pre-copy.
#[derive(Clone, Debug)]
pub struct Convergence {
    policy: Policy,
    is_late: bool,
    allowed: Duration,
    /// The rests of the last rounds.
    recent: VecDeque<Duration>,
    chance: Option<Chance>,
    throttle: u8,
}

/// The guest could have been paused.
#[derive(Clone, Copy, Debug)]
struct Chance {
    /// At this time for the first time.
    since: Duration,
    rounds: u32,
}

/// The rest that is allowed at first: a switchover takes longer than this anyway.
const LEAST: Duration = Duration::from_millis(5);

/// A round shorter than this share of the one before it makes hope for a still shorter one.
const SHORTER: f64 = 0.75;

/// How far above the best of the last rounds the rest may be: a guest does not write the same amount in every round.
const NEAR: f64 = 1.25;

/// At least how much more is allowed when rounds get no shorter.
const STEP: f64 = 1.5;

/// Number of rounds in which a minimum is looked for.
const RECENT: usize = 4;

/// What a guest that could be paused may be kept waiting for a shorter downtime: this many rounds, and this part of the time so far.
const FURTHER_ROUNDS: u32 = 2;
const FURTHER_TIME: u32 = 10;

impl Convergence {
    /// Before the first round.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            is_late: false,
            allowed: LEAST,
            recent: VecDeque::with_capacity(RECENT),
            chance: None,
            throttle: 0,
        }
    }

    /// Changes the longest downtime that is accepted.
    pub fn set_downtime_limit(&mut self, limit: Duration) {
        self.policy.downtime_limit = limit;
    }

    /// Longest downtime that is accepted now.
    pub fn limit(&self) -> Duration {
        match self.policy.timeout {
            Some((_, OnTimeout::Pause)) if self.is_late => Duration::MAX,
            Some((_, OnTimeout::Force)) if self.is_late => self.policy.downtime_max,
            _ => self.policy.downtime_limit,
        }
    }

    /// A guest is paused if the link needs at most this time for what is left, of which the downtime limit leaves room for `most`.
    pub fn allowed(&self, most: Duration) -> Duration {
        match self.limit() {
            Duration::MAX => Duration::MAX,
            _ => self.allowed.min(most),
        }
    }

    /// A round begins, at this time since the migration's beginning. The link needs the time `rest` for its pages, and the downtime
    /// limit leaves room for `most`.
    pub fn round_begins(&mut self, rest: Duration, most: Duration, elapsed: Duration) {
        let before = self.recent.back().copied();
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(rest);
        let best = self.recent.iter().min().copied().unwrap_or(rest);
        if best > most {
            return;
        }
        let chance = self.chance.get_or_insert(Chance {
            since: elapsed,
            rounds: 0,
        });
        let waited = elapsed.saturating_sub(chance.since);
        if chance.rounds >= FURTHER_ROUNDS && waited >= chance.since / FURTHER_TIME {
            self.allowed = self.allowed.max(most);
        } else if before.is_some_and(|before| rest > scaled(before, SHORTER)) {
            let raised = scaled(self.allowed, STEP).max(scaled(best, NEAR));
            self.allowed = raised.max(self.allowed).min(most);
        }
        chance.rounds += 1;
    }

    /// What is to be done now, at this time since the migration's beginning, about a guest that has not been paused. Once.
    pub fn action(&mut self, elapsed: Duration) -> Option<OnTimeout> {
        let (after, action) = self.policy.timeout?;
        if self.is_late || elapsed < after {
            return None;
        }
        self.is_late = true;
        Some(action)
    }

    /// The steps of the throttle, if a guest that writes too fast is to be slowed down now.
    pub fn auto_converge(&self) -> Option<AutoConverge> {
        match self.policy.timeout {
            Some((_, OnTimeout::Throttle)) => {
                let steps = self.policy.auto_converge.unwrap_or_default();
                self.is_late.then_some(steps)
            }
            _ => self.policy.auto_converge,
        }
    }

    /// The next throttle of a guest that has written `dirty` pages in a round of `sent`, if that is more than half of them.
    pub fn next_throttle(&mut self, dirty: u64, sent: u64) -> Option<u8> {
        let steps = self.auto_converge()?;
        if dirty <= sent / 2 || self.throttle >= steps.max {
            return None;
        }
        self.throttle = match self.throttle {
            0 => steps.initial,
            now => now.saturating_add(steps.increment).min(steps.max),
        };
        Some(self.throttle)
    }

    /// The guest's present throttle, in percent.
    pub fn throttle(&self) -> u8 {
        self.throttle
    }

    /// Ends the throttle. Returns whether the guest was throttled.
    pub fn end_throttle(&mut self) -> bool {
        std::mem::take(&mut self.throttle) > 0
    }
}

/// `time` times `factor`, or the longest time there is.
fn scaled(time: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(time.as_secs_f64() * factor).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_millis(210);

    fn policy(timeout: Option<(Duration, OnTimeout)>) -> Policy {
        Policy {
            downtime_limit: Duration::from_millis(300),
            downtime_max: Duration::from_secs(10),
            timeout,
            auto_converge: None,
        }
    }

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// The number of the round before which the guest is paused, and the rest then, of a migration with these rests. Each round
    /// takes as long as its rest.
    fn paused(
        convergence: &mut Convergence,
        rests: &[u64],
        most: Duration,
    ) -> Option<(usize, u64)> {
        let mut elapsed = Duration::ZERO;
        rests.iter().enumerate().find_map(|(number, rest)| {
            convergence.round_begins(millis(*rest), most, elapsed);
            elapsed += millis(*rest);
            (millis(*rest) <= convergence.allowed(most)).then_some((number, *rest))
        })
    }

    #[test]
    fn a_guest_is_paused_for_as_short_as_its_writing_allows() {
        for (what, rests, expected) in [
            ("idle", &[9000, 260, 4][..], Some((2, 4))),
            (
                "idle, over a slow link",
                &[90_000, 900, 20, 18, 17],
                Some((3, 18)),
            ),
            (
                "half as fast as the link",
                &[9000, 4500, 2250, 1125, 560, 280, 140, 70, 35, 17, 8, 4],
                Some((11, 4)),
            ),
            (
                "so fast that rounds get no shorter",
                &[9000, 200, 190],
                Some((2, 190)),
            ),
            ("in waves", &[9000, 400, 100, 400, 100], Some((4, 100))),
            (
                "in waves that fit",
                &[9000, 200, 20, 200, 21],
                Some((4, 21)),
            ),
            (
                "once less than usual",
                &[9000, 190, 20, 190, 180, 170, 175],
                Some((6, 175)),
            ),
            ("too fast", &[9000, 8000, 8100, 7900, 8000, 8000], None),
        ] {
            let mut convergence = Convergence::new(policy(None));
            assert_eq!(paused(&mut convergence, rests, MOST), expected, "{what}");
        }
    }

    #[test]
    fn a_guest_that_could_be_paused_is_not_kept_waiting() {
        // Each round is a little shorter than the one before it.
        let mut rests = vec![2000, 1500];
        while rests[rests.len() - 1] > 5 {
            rests.push(rests[rests.len() - 1] * 7 / 10);
        }
        let first = rests.iter().position(|rest| millis(*rest) <= MOST).unwrap();
        let mut convergence = Convergence::new(policy(None));
        let (number, _) = paused(&mut convergence, &rests, MOST).unwrap();
        let waited: u64 = rests[first..number].iter().sum();
        let before: u64 = rests[..first].iter().sum();
        let within = waited - rests[number - 1] <= before / 10;
        assert!(number <= first + 2 || within, "{number}, {waited} ms");
    }

    #[test]
    fn no_more_is_allowed_than_the_limit_leaves_room_for() {
        let mut convergence = Convergence::new(policy(None));
        assert_eq!(convergence.allowed(millis(3)), millis(3));
        assert_eq!(convergence.allowed(MOST), LEAST);
        let rests = [9000, 205, 206, 205];
        assert_eq!(
            paused(&mut convergence, &rests, millis(208)),
            Some((2, 206))
        );
        assert_eq!(convergence.allowed(MOST), millis(208));
        assert_eq!(convergence.allowed(millis(100)), millis(100));
        // No time is too long for a sum.
        convergence.round_begins(Duration::MAX, MOST, Duration::MAX);
        convergence.round_begins(Duration::MAX, Duration::MAX, Duration::MAX);
    }

    #[test]
    fn an_action_comes_once_and_changes_what_is_allowed() {
        use OnTimeout::{Abort, Force, Pause, Throttle};
        let limit = millis(300);
        for (action, limit_then, allowed) in [
            (Abort, limit, LEAST),
            (Throttle, limit, LEAST),
            (Pause, Duration::MAX, Duration::MAX),
            (Force, Duration::from_secs(10), LEAST),
        ] {
            let mut convergence = Convergence::new(policy(Some((millis(500), action))));
            assert_eq!(convergence.action(millis(499)), None);
            assert_eq!(
                (convergence.limit(), convergence.allowed(MOST)),
                (limit, LEAST)
            );
            assert_eq!(convergence.action(millis(500)), Some(action));
            assert_eq!(convergence.action(millis(501)), None);
            assert_eq!(convergence.limit(), limit_then, "{action:?}");
            assert_eq!(convergence.allowed(MOST), allowed, "{action:?}");
        }
        assert_eq!(Convergence::new(policy(None)).action(Duration::MAX), None);
    }

    #[test]
    fn force_takes_the_least_of_what_is_needed() {
        let mut convergence = Convergence::new(policy(Some((millis(20_000), OnTimeout::Force))));
        let rests = [9000, 3000, 3100, 2900];
        assert_eq!(paused(&mut convergence, &rests, MOST), None);
        convergence.action(millis(20_000));
        let most = millis(9900);
        assert_eq!(
            paused(&mut convergence, &[3000, 2950], most),
            Some((0, 3000))
        );
        let mut faster_than_the_longest =
            Convergence::new(policy(Some((millis(0), OnTimeout::Force))));
        faster_than_the_longest.action(millis(0));
        assert_eq!(paused(&mut faster_than_the_longest, &[9950; 9], most), None);
    }

    #[test]
    fn a_guest_that_writes_more_than_half_of_a_round_is_throttled_in_steps() {
        let steps = |initial, increment, max| AutoConverge {
            initial,
            increment,
            max,
        };
        for (auto_converge, timeout, dirty, expected) in [
            (None, None, 2441, [None; 3]),
            (Some(steps(20, 10, 99)), None, 1220, [None; 3]),
            (
                Some(steps(20, 10, 99)),
                None,
                1221,
                [Some(20), Some(30), Some(40)],
            ),
            (
                Some(steps(50, 60, 99)),
                None,
                2441,
                [Some(50), Some(99), None],
            ),
            (Some(steps(30, 10, 30)), None, 2441, [Some(30), None, None]),
            // Only after the timeout, or in other steps than the default.
            (Some(steps(30, 10, 30)), Some(9), 2441, [None; 3]),
            (None, Some(0), 2441, [Some(20), Some(30), Some(40)]),
            (
                Some(steps(30, 10, 40)),
                Some(0),
                2441,
                [Some(30), Some(40), None],
            ),
        ] {
            let timeout = timeout.map(|after| (millis(after), OnTimeout::Throttle));
            let mut convergence = Convergence::new(Policy {
                auto_converge,
                ..policy(timeout)
            });
            convergence.action(millis(1));
            let throttles = expected.map(|_| convergence.next_throttle(dirty, 2441));
            assert_eq!(throttles, expected, "{auto_converge:?}, {timeout:?}");
            assert_eq!(convergence.end_throttle(), expected[0].is_some());
            assert_eq!(convergence.throttle(), 0);
        }
        let falls = [steps(50, 10, 40), steps(20, 0, 90), steps(20, 10, 100)];
        assert!(!falls.iter().any(AutoConverge::is_valid));
        assert!(AutoConverge::default().is_valid());
    }
}
