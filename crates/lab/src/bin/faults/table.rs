//! The table of cuts: faults of the link in every phase of a migration, of every kind and several lengths.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;

use crate::fault::{Fault, Kind, Moment};
use crate::link::Point;
use crate::report::{Broken, Ended, Report};

/// The size of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Table {
    /// Every phase and every kind of cut, none for longer than a second
    Quick,
    /// Every phase with every kind, length and number of paths
    Full,
}

/// One cut. Its name is its `Display`.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    phase: Phase,
    pub(crate) fault: Fault,
}

/// When the link is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    FirstConnection,
    FirstRound,
    LaterRound,
    Switchover,
    HandOver,
}

/// Shorter than a heartbeat, about as long, noticeable for users, and close to the limit of a reconnect.
const LENGTHS: [Duration; 4] = [
    Duration::from_millis(100),
    QUICK,
    Duration::from_secs(5),
    Duration::from_secs(25),
];
const QUICK: Duration = Duration::from_secs(1);
/// Longer than any timeout.
const MINUTE: Duration = Duration::from_secs(60);

impl Table {
    /// All cuts, always in the same order.
    pub(crate) fn rows(self) -> Vec<Row> {
        match self {
            Self::Full => Phase::ALL.into_iter().flat_map(all_of).collect(),
            Self::Quick => {
                let each = Phase::ALL.map(|phase| Row::new(phase, RESET, false));
                let quick = cuts(&[QUICK]).into_iter().filter(|cut| *cut != RESET);
                let phases = Phase::ALL.into_iter().cycle();
                let others = quick.zip(phases).enumerate();
                let others =
                    others.map(|(number, (cut, phase))| Row::new(phase, cut, number % 2 == 0));
                each.into_iter().chain(others).collect()
            }
        }
    }
}

/// A kind with its detail and duration.
type Cut = (Kind, u64, Option<Duration>);

/// Resets all connections once.
const RESET: Cut = (Kind::Reset, 0, None);

fn cuts(lengths: &[Duration]) -> Vec<Cut> {
    let one_of_data = 3;
    let instant = [
        RESET,
        (Kind::Reset, one_of_data, None),
        (Kind::Cut, 0, None),
    ];
    let lasting = [
        (Kind::ResetAgain, 0),
        (Kind::Refuse, 0),
        (Kind::Silence, 0),
        (Kind::DeadConnections, 0),
        (Kind::DeadConnections, 1),
        (Kind::DeadConnections, 2),
    ];
    let lasting = lengths
        .iter()
        .flat_map(|length| lasting.map(|(kind, detail)| (kind, detail, Some(*length))));
    instant.into_iter().chain(lasting).collect()
}

fn all_of(phase: Phase) -> impl Iterator<Item = Row> {
    let cuts = [cuts(&LENGTHS), vec![(Kind::ResetAgain, 0, Some(MINUTE))]].concat();
    cuts.into_iter()
        .flat_map(move |cut| [true, false].map(|one_path| Row::new(phase, cut, one_path)))
}

impl Row {
    fn new(phase: Phase, (kind, detail, lasts): Cut, one_path: bool) -> Self {
        let moment = match phase {
            Phase::FirstConnection => Moment::Time(0),
            Phase::FirstRound => Moment::At(Point::Bytes(1 << 20)),
            Phase::LaterRound => Moment::Round(2),
            Phase::Switchover => Moment::Paused,
            Phase::HandOver => Moment::At(Point::Before("request:commit")),
        };
        let fault = Fault {
            kind,
            moment,
            lasts,
            detail,
            one_path,
        };
        Self { phase, fault }
    }

    /// Whether the migration stays in its round until the cut is over.
    pub(crate) fn holds_round(&self) -> bool {
        matches!(self.phase, Phase::FirstRound | Phase::LaterRound)
    }

    pub(crate) fn is_in_later_round(&self) -> bool {
        self.phase == Phase::LaterRound
    }

    /// The invariant that this result of the row violates.
    pub(crate) fn violation(&self, report: &Report) -> Option<Broken> {
        match report.ended {
            Ended::Source if report.missed > 0 => Some(Broken::NeverCut),
            Ended::Source if self.must_move() => Some(Broken::Stayed),
            _ => None,
        }
    }

    /// Whether the guest has to move, as the cut is shorter than the timeouts: 30 s for the link, and 10 s of downtime. The latter
    /// counts in rounds, too, as the source of a small guest may send everything during a cut and pause the guest.
    fn must_move(&self) -> bool {
        let lasts = self.fault.lasts.unwrap_or_default();
        match self.phase {
            // Each path is dialled once.
            Phase::FirstConnection => false,
            Phase::FirstRound | Phase::LaterRound => lasts <= Duration::from_secs(10),
            Phase::Switchover | Phase::HandOver => lasts <= QUICK,
        }
    }
}

impl Phase {
    const ALL: [Self; 5] = [
        Self::FirstConnection,
        Self::FirstRound,
        Self::LaterRound,
        Self::Switchover,
        Self::HandOver,
    ];
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = match self.phase {
            Phase::FirstConnection => "first connection",
            Phase::FirstRound => "first round",
            Phase::LaterRound => "later round",
            Phase::Switchover => "switchover",
            Phase::HandOver => "hand-over",
        };
        let scope = match (self.fault.kind, self.fault.detail) {
            (Kind::Reset, 3) => ", one connection",
            (Kind::DeadConnections, 1) => ", back",
            (Kind::DeadConnections, 2) => ", there",
            _ => "",
        };
        write!(f, "{phase} | {}{scope}", self.fault.kind)?;
        if let Some(lasts) = self.fault.lasts {
            write!(f, " for {} s", lasts.as_secs_f64())?;
        }
        let paths = if self.fault.one_path {
            "one path"
        } else {
            "both paths"
        };
        write!(f, " | {paths}")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn full_table_is_complete_with_unique_names() {
        let rows = Table::Full.rows();
        assert_eq!(rows.len(), 5 * (3 + 4 * 6 + 1) * 2);
        let names: BTreeSet<_> = rows.iter().map(Row::to_string).collect();
        assert_eq!(names.len(), rows.len());
        assert!(names.contains("switchover | silence for 0.1 s | one path"));
        assert!(names.contains("hand-over | cut (RST) | both paths"));
    }

    #[test]
    fn guest_may_stay_only_if_it_was_cut_and_for_long() {
        let report = |ended, missed| Report {
            struck: Vec::new(),
            missed,
            ended,
            in_doubt: false,
            messages: Vec::new(),
            took: Duration::ZERO,
            downtime: None,
        };
        let long = (Kind::Silence, 0, Some(MINUTE));
        for (cut, ended, missed, expected) in [
            (RESET, Ended::Source, 1, Some(Broken::NeverCut)),
            (long, Ended::Source, 1, Some(Broken::NeverCut)),
            (RESET, Ended::Source, 0, Some(Broken::Stayed)),
            (long, Ended::Source, 0, None),
            // It was over before.
            (RESET, Ended::Destination, 1, None),
        ] {
            let row = Row::new(Phase::LaterRound, cut, false);
            let found = row.violation(&report(ended.clone(), missed));
            assert_eq!(found, expected, "{row}: {ended}, {missed}");
        }
    }

    #[test]
    fn quick_table_has_every_phase_and_kind() {
        let rows = Table::Quick.rows();
        assert_eq!(rows.len(), 5 + 8);
        for phase in Phase::ALL {
            assert!(rows.iter().any(|row| row.phase == phase));
        }
        let kinds: BTreeSet<_> = rows
            .iter()
            .map(|row| (row.fault.kind, row.fault.detail))
            .collect();
        assert_eq!(kinds.len(), 9);
        assert!(
            rows.iter()
                .all(|row| row.fault.lasts.is_none_or(|lasts| lasts <= QUICK))
        );
    }
}
