//! Cuts of a link in a phase of a migration: what is cut, and for how long.

use std::{
    fmt, iter, thread,
    time::{Duration, Instant},
};

use lab::{
    middlebox::{Admission, Change, Direction, Flow, Mark, Middlebox, Status, Which},
    watched::Watched,
};

/// One cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) phase: Phase,
    kind: Kind,
}

/// When the link is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    FirstRound,
    LaterRound,
    /// The guest has been paused.
    Switchover,
    /// The state has been sent, and the two sides agree on who has the guest.
    HandOver,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The newest connection is reset.
    ResetOne,
    /// Every second connection is reset.
    ResetSome,
    ResetAll,
    /// All connections are reset, every 300 ms until the end.
    ResetAgain,
    /// All connections are reset, and new ones refused until the end.
    Refused,
    /// Connections that exist lose these bytes for good; new ones get no answer until the end.
    Silent(&'static [Direction]),
}

/// How long cuts last that are not over at once.
const LASTS: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(300);

/// A cut of a middlebox while a migration runs.
pub(crate) struct Experiment<'a> {
    cut: Cut,
    middlebox: &'a Middlebox,
    state: Watched<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    was_cut: bool,
    is_over: bool,
}

impl Cut {
    /// Each phase with each kind.
    pub(crate) fn all() -> Vec<Self> {
        let phases = [
            Phase::FirstRound,
            Phase::LaterRound,
            Phase::Switchover,
            Phase::HandOver,
        ];
        let kinds = [
            Kind::ResetOne,
            Kind::ResetSome,
            Kind::ResetAll,
            Kind::ResetAgain,
            Kind::Refused,
            Kind::Silent(&Direction::BOTH),
            Kind::Silent(&[Direction::ToListener]),
            Kind::Silent(&[Direction::ToDialler]),
        ];
        let each = |phase| kinds.into_iter().map(move |kind| Self { phase, kind });
        phases.into_iter().flat_map(each).collect()
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, {:?}", self.phase, self.kind)
    }
}

/// Runs a migration that reports its phases, and returns its result and whether the link was cut. The link is repaired in time, at
/// the latest when the migration has ended.
pub(crate) fn run<T>(
    cut: Cut,
    middlebox: &Middlebox,
    migration: impl FnOnce(&Experiment<'_>) -> T,
) -> (T, bool) {
    let experiment = Experiment {
        cut,
        middlebox,
        state: Watched::default(),
    };
    let result = thread::scope(|scope| {
        scope.spawn(|| experiment.repair_in_time());
        let _over = Over(&experiment);
        migration(&experiment)
    });
    (result, experiment.state.lock().was_cut)
}

/// Ends the cut, also when the migration panics.
struct Over<'a, 'b>(&'a Experiment<'b>);

impl Drop for Over<'_, '_> {
    fn drop(&mut self) {
        self.0.state.update(|state| state.is_over = true);
    }
}

impl Experiment<'_> {
    /// Reports a phase. If it is the phase of the cut, the link has been cut when this returns; the first time only.
    pub(crate) fn reached(&self, phase: Phase) {
        if phase == self.cut.phase && !self.state.lock().was_cut {
            self.cut();
            self.state.update(|state| state.was_cut = true);
        }
    }

    fn cut(&self) {
        match self.cut.kind {
            Kind::ResetOne => self.reset(|open| open.last().copied().into_iter().collect()),
            Kind::ResetSome => self.reset(|open| open.iter().step_by(2).copied().collect()),
            Kind::ResetAll => self.reset(<[usize]>::to_vec),
            Kind::ResetAgain => drop(self.middlebox.apply(Which::All, Change::Reset)),
            Kind::Refused => {
                self.middlebox.admit(Admission::Refuse).unwrap();
                self.middlebox.apply(Which::All, Change::Reset);
            }
            Kind::Silent(directions) => {
                self.middlebox.admit(Admission::Silence).unwrap();
                for direction in directions {
                    let lost = Change::OneWay(*direction, Flow::Drop);
                    self.middlebox.apply(Which::All, lost);
                }
            }
        }
    }

    /// Resets some of the open connections. If there are none, the next one is reset behind its first byte.
    fn reset(&self, choose: impl Fn(&[usize]) -> Vec<usize>) {
        let all = self.middlebox.connections();
        let is_open = |it: &usize| matches!(all[*it].status, Status::Open | Status::Dialling);
        let open: Vec<_> = (0..all.len()).filter(is_open).collect();
        let reset = |number| self.middlebox.apply(Which::One(number), Change::Reset);
        if choose(&open).into_iter().map(reset).sum::<usize>() == 0 {
            let mark = Mark {
                connection: all.len(),
                direction: Direction::ToListener,
                bytes: 1,
            };
            self.middlebox.apply_at(mark, Which::All, Change::Reset);
        }
    }

    fn repair_in_time(&self) {
        let is_cut = |state: &State| (state.was_cut || state.is_over).then_some(());
        while self.state.wait(Duration::from_secs(60), is_cut).is_none() {}
        let begin = Instant::now();
        let left = || LASTS.checked_sub(begin.elapsed());
        let step = match self.cut.kind {
            Kind::ResetAgain => AGAIN,
            _ => LASTS,
        };
        for left in iter::from_fn(left) {
            let is_over = |state: &State| state.is_over.then_some(());
            if self.state.wait(step.min(left), is_over).is_some() {
                break;
            }
            if self.cut.kind == Kind::ResetAgain {
                self.cut();
            }
        }
        self.middlebox.admit(Admission::Pass).unwrap();
    }
}
