//! The faults of a migration, and when they strike.

use std::fmt;
use std::time::Duration;

use crate::campaign::link::Point;
use crate::campaign::random::Random;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Kill(Role),
    /// SIGSTOP.
    Freeze(Role),
    Interrupt,
    Cut,
    Reset,
    /// All connections are reset, every [`RESET_EVERY`](crate::campaign::injector::RESET_EVERY).
    ResetAgain,
    Silence,
    /// Bytes of one direction vanish; the connections are reset at the end.
    BlackHole,
    /// Like a NAT that has lost its table: existing connections lose bytes and never pass any again; new ones pass at the end.
    DeadConnections,
    Refuse,
    Delay,
    Duplicate,
    Flip,
    /// The disk of a host's journal is full.
    DiskFull(Role),
    /// A process gets no more file descriptors.
    Files(Role),
    SameAgain,
    OtherHost,
}

/// A process that takes part in a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    Source,
    Destination,
    Migrate,
    Serve,
}

impl Kind {
    /// Whether the fault is one of the link between the hosts.
    pub(crate) fn is_of_link(self) -> bool {
        matches!(
            self,
            Self::Cut
                | Self::Reset
                | Self::ResetAgain
                | Self::Silence
                | Self::BlackHole
                | Self::DeadConnections
                | Self::Refuse
                | Self::Delay
                | Self::Duplicate
        )
    }

    /// Whether the fault breaks anything; the others are actions of users.
    pub(crate) fn breaks(self) -> bool {
        !matches!(self, Self::Interrupt | Self::SameAgain | Self::OtherHost)
    }

    /// Whether the fault is over at once, so that there is nothing to repair.
    pub(crate) fn is_instant(self) -> bool {
        matches!(
            self,
            Self::Kill(Role::Source | Role::Destination | Role::Migrate)
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

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Kill(role) => format!("kill {role}"),
            Self::Freeze(role) => format!("stop {role}"),
            Self::DiskFull(role) => format!("disk full, {role}"),
            Self::Files(role) => format!("no files, {role}"),
            Self::Interrupt => "cancel".to_owned(),
            Self::Cut => "cut (FIN)".to_owned(),
            Self::Reset => "cut (RST)".to_owned(),
            Self::ResetAgain => "repeated cuts (RST)".to_owned(),
            Self::DeadConnections => "dead connections".to_owned(),
            Self::Silence => "silence".to_owned(),
            Self::BlackHole => "black hole".to_owned(),
            Self::Refuse => "refuse".to_owned(),
            Self::Delay => "delay".to_owned(),
            Self::Duplicate => "duplicate".to_owned(),
            Self::Flip => "flipped bit".to_owned(),
            Self::SameAgain => "same command twice".to_owned(),
            Self::OtherHost => "two destinations".to_owned(),
        };
        f.pad(&name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Migrate => "migrate",
            Self::Serve => "serve",
        })
    }
}

/// When a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// After this many thousandths of the time of an undisturbed migration.
    Time(u64),
    /// At this point of the link's traffic.
    At(Point),
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time(part) => write!(f, "after {}.{} % of the time", part / 10, part % 10),
            Self::At(Point::Bytes(bytes)) => write!(f, "after {bytes} bytes of pages"),
            Self::At(Point::Before(word)) => write!(f, "before `{word}`"),
            Self::At(Point::After(word)) => write!(f, "after `{word}`"),
        }
    }
}

/// One fault of an experiment.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) moment: Moment,
    /// The duration, unless the fault is over at once.
    pub(crate) lasts: Option<Duration>,
    /// A random number for everything else: which connection, which direction, how many.
    pub(crate) detail: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.moment)?;
        if let Some(lasts) = self.lasts {
            write!(f, " for {lasts:?}")?;
        }
        write!(f, " [{}]", self.detail)
    }
}

/// The distribution of faults.
#[derive(Clone, Debug)]
pub(crate) struct Choices {
    /// The messages of a migration without faults.
    messages: Vec<&'static str>,
    /// The kinds with their weights.
    kinds: Vec<(u64, Kind)>,
    /// A limit below the bytes of pages that are sent.
    bytes: u64,
    /// The percentage of experiments with two faults.
    two: u64,
}

/// Messages at which faults strike.
const MESSAGES: [&str; 14] = [
    "request:hello",
    "request:prepare",
    "request:state",
    "request:commit",
    "request:settled",
    "answer:accepted",
    "answer:preparing",
    "answer:prepared",
    "answer:synced",
    "answer:loaded",
    "answer:receiving",
    "answer:starting",
    "answer:running",
    "answer:unclear",
];
/// Messages that follow only after a fault.
const AFTER_A_FAULT: [&str; 2] = ["request:abort", "answer:aborted"];

impl Choices {
    /// A distribution over all messages that a migration may have.
    pub(crate) fn new(kinds: Vec<(u64, Kind)>, bytes: u64, two: u64) -> Self {
        Self {
            messages: MESSAGES.to_vec(),
            kinds,
            bytes,
            two,
        }
    }

    /// Limits the messages to those of an observed migration.
    pub(crate) fn keep(&mut self, names: &[String]) {
        self.messages
            .retain(|known| names.iter().any(|name| name == known));
    }

    /// Draws the faults of an experiment.
    pub(crate) fn draw(&self, random: &mut Random) -> Vec<Fault> {
        let mut faults = vec![self.draw_one(random, &self.messages)];
        if random.percent(self.two) {
            let messages = [&self.messages[..], &AFTER_A_FAULT].concat();
            faults.push(self.draw_one(random, &messages));
        }
        faults
    }

    fn draw_one(&self, random: &mut Random, messages: &[&'static str]) -> Fault {
        let kind = random.weighted(&self.kinds);
        let message = random.choose(messages);
        let moment = match random.below(10) {
            0..3 => Moment::At(Point::Before(message)),
            3..6 => Moment::At(Point::After(message)),
            6..8 => Moment::At(Point::Bytes(random.below(self.bytes))),
            _ => Moment::Time(random.below(1100)),
        };
        let lasts = draw_time(random);
        Fault {
            kind,
            moment,
            lasts: (!kind.is_instant()).then_some(lasts),
            detail: random.below(1 << 16),
        }
    }
}

/// The faults of a plan as text.
pub(crate) fn list(faults: &[Fault]) -> String {
    let faults: Vec<_> = faults.iter().map(Fault::to_string).collect();
    faults.join("; ")
}

/// Mostly short, sometimes longer than a timeout.
fn draw_time(random: &mut Random) -> Duration {
    match random.below(100) {
        0..55 => random.millis(1..400),
        55..85 => random.millis(400..2500),
        85..98 => random.millis(2500..8000),
        // Longer than the timeout of a QEMU's monitor.
        _ => random.millis(20_500..24_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_drawn_again_from_the_same_seed() {
        let kinds = vec![(1, Kind::Kill(Role::Source)), (1, Kind::Silence)];
        let mut choices = Choices::new(kinds, 1000, 25);
        choices.keep(&["request:commit".to_owned(), "unknown".to_owned()]);
        let draw = |number| choices.draw(&mut Random::of_experiment(3, number));
        let first = |number| draw(number)[0].to_string();
        assert_eq!(first(1), first(1));
        let all: std::collections::BTreeSet<_> = (0..50).map(first).collect();
        assert!(all.len() > 20);
        assert!(
            all.iter()
                .any(|fault| fault.starts_with("silence") && fault.contains(" for "))
        );
        assert!(
            !all.iter()
                .any(|fault| fault.starts_with("kill") && fault.contains(" for "))
        );
        let two = (0..100).filter(|number| draw(*number).len() == 2);
        assert!((10..40).contains(&two.count()));
    }
}
