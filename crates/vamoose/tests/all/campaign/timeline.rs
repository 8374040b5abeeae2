//! When each copy of a guest ran, and whether these can have been one guest.

use std::time::Duration;

/// When the guest ran in a QEMU. Times are since 1970.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub(crate) name: String,
    /// The start and end of each run; an end of `None` means that it still ran.
    pub(crate) runs: Vec<(Duration, Option<Duration>)>,
}

impl Life {
    /// From the events of a QEMU with their times; `ended` is when its process was found dead.
    pub(crate) fn of<'a>(
        name: &str,
        told: impl Iterator<Item = (&'a str, Duration)>,
        ended: Option<Duration>,
    ) -> Self {
        let mut life = Self {
            name: name.to_owned(),
            runs: Vec::new(),
        };
        for (what, at) in told {
            match what {
                "RESUME" if !life.runs_now() => life.runs.push((at, None)),
                "STOP" => life.stops(at),
                _ => {}
            }
        }
        ended.into_iter().for_each(|ended| life.stops(ended));
        life
    }

    fn stops(&mut self, at: Duration) {
        if let Some((_, end @ None)) = self.runs.last_mut() {
            *end = Some(at);
        }
    }

    pub(crate) fn runs_now(&self) -> bool {
        self.runs.last().is_some_and(|(_, end)| end.is_none())
    }

    /// Whether it had started to run by then.
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

/// The last three digits of the seconds, with microseconds.
pub(crate) fn clock(at: Duration) -> String {
    format!("{:03}.{:06}", at.as_secs() % 1000, at.subsec_micros())
}

/// Finds a guest that ran twice: in two places at once, or in one with memory from before it ran in another. A QEMU never receives
/// the guest twice, so one that runs again has its old memory.
pub(crate) fn doubled(lives: &[Life]) -> Option<String> {
    let mut runs: Vec<_> = lives
        .iter()
        .flat_map(|life| life.runs.iter().map(move |run| (run.0, run.1, &life.name)))
        .collect();
    runs.sort();
    for (index, (start, _, name)) in runs.iter().enumerate() {
        let (earlier, since) = (&runs[..index], clock(*start));
        for (_, end, other) in earlier.iter().filter(|run| run.2 != *name) {
            if end.is_none_or(|end| end > *start) {
                return Some(format!("{name} began to run at {since} while {other} ran"));
            }
        }
        let ran_before = earlier.iter().any(|run| run.2 == *name);
        let last = earlier.last().filter(|run| run.2 != *name);
        if let (true, Some((_, _, other))) = (ran_before, last) {
            return Some(format!(
                "{name} went on at {since} with the memory of before {other} ran"
            ));
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
        let found = doubled(&lives).unwrap();
        assert!(found.starts_with("B began to run at ") && found.ends_with(" while A ran"));
        let lives = [life("A", &[(1, None)]), life("B", &[(4, Some(5))])];
        assert!(doubled(&lives).unwrap().contains("while A ran"));
    }

    #[test]
    fn one_that_comes_back_with_old_memory() {
        let lives = [
            life("A", &[(1, Some(2)), (5, None)]),
            life("B", &[(3, Some(4))]),
        ];
        let found = doubled(&lives).unwrap();
        assert!(found.starts_with("A went on at ") && found.ends_with("of before B ran"));
    }
}
