//! When each copy of a guest ran, and whether that can have been one guest.

use std::fmt;
use std::time::Duration;

use lab::qmp::Event;

/// The life of one QEMU or VMM that has, had, or may get the guest. Times are since 1970.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub(crate) name: String,
    /// From when to when it ran; `None` for as long as we looked.
    pub(crate) runs: Vec<(Duration, Option<Duration>)>,
}

impl Life {
    /// Of a QEMU that has not run.
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            runs: Vec::new(),
        }
    }

    /// From what a QEMU has told; `ended` is when its process was found dead.
    pub(crate) fn of_events(name: &str, events: &[Event], ended: Option<Duration>) -> Self {
        let mut life = Self::new(name);
        for event in events {
            match event.name.as_str() {
                "RESUME" => life.starts(event.timestamp),
                "STOP" => life.stops(event.timestamp),
                _ => {}
            }
        }
        if let Some(ended) = ended {
            life.stops(ended);
        }
        life
    }

    pub(crate) fn starts(&mut self, at: Duration) {
        if !self.runs_now() {
            self.runs.push((at, None));
        }
    }

    pub(crate) fn stops(&mut self, at: Duration) {
        if let Some((_, end @ None)) = self.runs.last_mut() {
            *end = Some(at);
        }
    }

    pub(crate) fn runs_now(&self) -> bool {
        self.runs.last().is_some_and(|(_, end)| end.is_none())
    }

    /// Whether it had begun to run by then.
    pub(crate) fn has_run_by(&self, at: Duration) -> bool {
        self.runs.first().is_some_and(|(start, _)| *start <= at)
    }

    /// Whether it ran at that time, or until shortly before.
    pub(crate) fn runs_at(&self, at: Duration, shortly: Duration) -> bool {
        let covers = |run: &(Duration, Option<Duration>)| {
            run.0 <= at && run.1.is_none_or(|end| end + shortly > at)
        };
        self.runs.iter().any(covers)
    }

    pub(crate) fn has_run(&self) -> bool {
        !self.runs.is_empty()
    }
}

/// A guest that was two, at some time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Doubled {
    /// Both ran.
    AtOnce {
        first: String,
        second: String,
        since: Duration,
    },
    /// It went on with memory from before another one ran.
    Stale {
        ran: String,
        then: String,
        since: Duration,
    },
}

impl fmt::Display for Doubled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtOnce {
                first,
                second,
                since,
            } => {
                write!(
                    f,
                    "{second} began to run at {} while {first} ran",
                    clock(*since)
                )
            }
            Self::Stale { ran, then, since } => write!(
                f,
                "{then} went on at {} with the memory of before {ran} ran",
                clock(*since)
            ),
        }
    }
}

/// Seconds, of which the first digits do not matter.
pub(crate) fn clock(at: Duration) -> String {
    format!("{:03}.{:06}", at.as_secs() % 1000, at.subsec_micros())
}

/// Finds a guest that ran twice. A QEMU does not get the guest twice: one that runs again has the memory that it had.
pub(crate) fn doubled(lives: &[Life]) -> Option<Doubled> {
    let mut runs: Vec<_> = lives
        .iter()
        .flat_map(|life| life.runs.iter().map(move |run| (run.0, run.1, &life.name)))
        .collect();
    runs.sort();
    for (index, (start, _, name)) in runs.iter().enumerate() {
        for (_, before_end, before) in runs[..index].iter().filter(|run| run.2 != *name) {
            if before_end.is_none_or(|end| end > *start) {
                return Some(Doubled::AtOnce {
                    first: (*before).clone(),
                    second: (*name).clone(),
                    since: *start,
                });
            }
        }
        let ran_before = runs[..index].iter().any(|run| run.2 == *name);
        let last = runs[..index].last().filter(|run| run.2 != *name);
        if let (true, Some((_, _, other))) = (ran_before, last) {
            return Some(Doubled::Stale {
                ran: (*other).clone(),
                then: (*name).clone(),
                since: *start,
            });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(name: &str, runs: &[(u64, Option<u64>)]) -> Life {
        let at = Duration::from_millis;
        Life {
            name: name.to_owned(),
            runs: runs
                .iter()
                .map(|(start, end)| (at(*start), end.map(at)))
                .collect(),
        }
    }

    #[test]
    fn one_guest_may_stop_and_move() {
        let lives = [
            life("A", &[(1, Some(2)), (3, Some(4))]),
            life("B", &[(4, Some(6)), (7, None)]),
            life("C", &[]),
        ];
        assert_eq!(doubled(&lives), None);
    }

    #[test]
    fn two_that_run_at_once() {
        let lives = [life("A", &[(1, Some(5))]), life("B", &[(4, None)])];
        assert!(matches!(doubled(&lives), Some(Doubled::AtOnce { second, .. }) if second == "B"));
        let lives = [life("A", &[(1, None)]), life("B", &[(4, Some(5))])];
        assert!(matches!(doubled(&lives), Some(Doubled::AtOnce { .. })));
    }

    #[test]
    fn one_that_comes_back_with_old_memory() {
        let lives = [
            life("A", &[(1, Some(2)), (5, None)]),
            life("B", &[(3, Some(4))]),
        ];
        let found = doubled(&lives);
        assert!(
            matches!(found, Some(Doubled::Stale { ran, then, .. }) if ran == "B" && then == "A")
        );
    }
}
