//! What can be done to a migration, and when.

use std::fmt;
use std::time::Duration;

use crate::random::Random;

/// A fault of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    KillSource,
    KillDestination,
    KillMigrate,
    KillServe,
    FreezeSource,
    FreezeDestination,
    FreezeMigrate,
    FreezeServe,
    Interrupt,
    Cut,
    Reset,
    Silence,
    BlackHole,
    Refuse,
    Delay,
    Duplicate,
    Flip,
    DiskFullSource,
    DiskFullDestination,
    FilesMigrate,
    FilesServe,
    FilesSource,
    FilesDestination,
    RestartDestination,
    SameAgain,
    OtherHost,
}

impl Kind {
    /// As the table has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::KillSource => "kill source",
            Self::KillDestination => "kill destination",
            Self::KillMigrate => "kill migrate",
            Self::KillServe => "kill serve",
            Self::FreezeSource => "stop source",
            Self::FreezeDestination => "stop destination",
            Self::FreezeMigrate => "stop migrate",
            Self::FreezeServe => "stop serve",
            Self::Interrupt => "cancel",
            Self::Cut => "cut (FIN)",
            Self::Reset => "cut (RST)",
            Self::Silence => "silence",
            Self::BlackHole => "black hole",
            Self::Refuse => "refuse",
            Self::Delay => "delay",
            Self::Duplicate => "duplicate",
            Self::Flip => "flipped bit",
            Self::DiskFullSource => "disk full, source",
            Self::DiskFullDestination => "disk full, dest.",
            Self::FilesMigrate => "no files, migrate",
            Self::FilesServe => "no files, serve",
            Self::FilesSource => "no files, source",
            Self::FilesDestination => "no files, dest.",
            Self::RestartDestination => "another destination",
            Self::SameAgain => "same command twice",
            Self::OtherHost => "two destinations",
        }
    }

    /// Whether it harms the link between the hosts.
    pub(crate) fn is_of_link(self) -> bool {
        matches!(
            self,
            Self::Cut
                | Self::Reset
                | Self::Silence
                | Self::BlackHole
                | Self::Refuse
                | Self::Delay
                | Self::Duplicate
        )
    }

    /// Whether it breaks anything; the others are what users do.
    pub(crate) fn breaks(self) -> bool {
        !matches!(self, Self::Interrupt | Self::SameAgain | Self::OtherHost)
    }

    /// Whether it needs a disk that can be full.
    pub(crate) fn is_of_disk(self) -> bool {
        matches!(self, Self::DiskFullSource | Self::DiskFullDestination)
    }

    /// Whether it is over as soon as it is done, so that there is nothing to repair.
    fn is_instant(self) -> bool {
        matches!(
            self,
            Self::KillSource
                | Self::KillDestination
                | Self::KillMigrate
                | Self::Interrupt
                | Self::Cut
                | Self::Reset
                | Self::Duplicate
                | Self::Flip
                | Self::SameAgain
                | Self::OtherHost
        )
    }
}

/// When a fault strikes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// After this part of the time that a migration takes undisturbed, in thousandths.
    Time(u64),
    /// When so many bytes of pages have gone to the destination.
    Bytes(u64),
    /// When a message of the control connection has come and has not been passed on.
    Before(&'static str),
    /// When it has been passed on.
    After(&'static str),
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time(part) => write!(f, "after {}.{} % of the time", part / 10, part % 10),
            Self::Bytes(bytes) => write!(f, "after {bytes} bytes of pages"),
            Self::Before(word) => write!(f, "before `{word}`"),
            Self::After(word) => write!(f, "after `{word}`"),
        }
    }
}

/// One fault of an experiment.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) moment: Moment,
    /// How long it lasts, if it does.
    pub(crate) lasts: Option<Duration>,
    /// What else has to be decided: which connection, which direction, how many.
    pub(crate) detail: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), self.moment)?;
        if let Some(lasts) = self.lasts {
            write!(f, " for {lasts:?}")?;
        }
        write!(f, " [{}]", self.detail)
    }
}

impl Fault {
    /// Draws one of `kinds`, with moments among the messages in `words` and `bytes` of pages.
    pub(crate) fn draw(
        random: &mut Random,
        kinds: &[(u64, Kind)],
        words: &[&'static str],
        bytes: u64,
    ) -> Self {
        let kind = random.weighted(kinds);
        let word = random.choose(words);
        let moment = match random.below(10) {
            0..3 => Moment::Before(word),
            3..6 => Moment::After(word),
            6..8 => Moment::Bytes(random.below(bytes)),
            _ => Moment::Time(random.below(1100)),
        };
        let lasts = draw_time(random);
        Self {
            kind,
            moment,
            lasts: (!kind.is_instant()).then_some(lasts),
            detail: random.below(1 << 16),
        }
    }
}

/// Mostly short; now and then longer than a timeout.
fn draw_time(random: &mut Random) -> Duration {
    match random.below(100) {
        0..55 => random.millis(1..400),
        55..85 => random.millis(400..2500),
        85..98 => random.millis(2500..8000),
        // Longer than the timeout with a QEMU's monitor.
        _ => random.millis(20_500..24_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_drawn_again_from_the_same_seed() {
        let draw = |number| {
            let mut random = Random::of_experiment(3, number);
            let kinds = [(1, Kind::KillSource), (1, Kind::Silence)];
            Fault::draw(&mut random, &kinds, &["request:commit"], 1000).to_string()
        };
        assert_eq!(draw(1), draw(1));
        let all: std::collections::BTreeSet<_> = (0..50).map(draw).collect();
        assert!(all.len() > 20);
        assert!(
            all.iter()
                .any(|fault| fault.starts_with("silence") && fault.contains(" for "))
        );
        assert!(
            !all.iter()
                .any(|fault| fault.starts_with("kill") && fault.contains(" for "))
        );
    }
}
