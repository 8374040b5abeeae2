//! The journal's line about a migration through a gateway.

use std::{fmt, time::Duration};

use tracing::{info, warn};

use vamoose_link::LinkFaults;

use super::endpoint::Target;
use crate::{EndKind, Outcome, RelayError, Summary, Switchover, Way, chain, observer::Observation};

/// A migration, as its line describes it.
pub(super) struct Account {
    pub(super) observation: Observation,
    pub(super) target: Target,
    /// The guest's name, where it is known.
    pub(super) guest: Option<String>,
}

/// How a migration ended, with the reason.
#[derive(Debug)]
pub(super) enum MigrationEnd {
    /// The destination has confirmed that it has loaded the guest.
    Loaded(Option<Switchover>),
    /// Everything was delivered, without a confirmation.
    Unconfirmed,
    /// Its connections ended in good order; what they were is not known here.
    Passed,
    /// Before any of its bytes were taken.
    Refused(String),
    Failed(String),
}

impl Account {
    /// `faults` are those of its session.
    pub(super) fn write(self, ending: &MigrationEnd, faults: LinkFaults) {
        let line = self.line(ending);
        let (guest, migration) = (self.guest.as_deref(), self.observation.migration.clone());
        let switchover = match ending {
            MigrationEnd::Loaded(switchover) => *switchover,
            _ => None,
        };
        // A reader of the line finds the migration counted.
        self.observation.end(ending.kind(), switchover, faults);
        let (peer, outcome) = (&*migration.peer, ending.kind().name());
        match ending {
            MigrationEnd::Refused(_) | MigrationEnd::Failed(_) => {
                warn!(guest, peer, outcome, "{line}")
            }
            _ => info!(guest, peer, outcome, "{line}"),
        }
    }

    fn line(&self, ending: &MigrationEnd) -> String {
        let guest = match &self.guest {
            Some(name) => format!("guest {name}"),
            None => "guest of unknown name".to_owned(),
        };
        let migration = &self.observation.migration;
        let moved = migration.stats.snapshot();
        let [before, after] = [moved.received_bytes, moved.wire_bytes].map(Size);
        let took = Seconds(migration.began.elapsed());
        let (peer, target) = (&migration.peer, &self.target);
        let way = match migration.way {
            Way::To => "to",
            Way::From => "from",
        };
        format!("{guest} {way} {peer}, {target}: {ending}; {before} as {after} in {took}")
    }
}

impl MigrationEnd {
    pub(super) fn of(result: Result<Summary, RelayError>) -> Self {
        match result {
            Ok(summary) => match summary.outcome {
                Outcome::Loaded => Self::Loaded(summary.switchover),
                Outcome::Unconfirmed => Self::Unconfirmed,
                Outcome::Unseen => Self::Passed,
            },
            Err(RelayError::Announce(error)) => Self::Refused(chain(&error)),
            Err(error) => Self::Failed(chain(&error)),
        }
    }

    fn kind(&self) -> EndKind {
        match self {
            Self::Loaded(_) => EndKind::Loaded,
            Self::Unconfirmed => EndKind::Unconfirmed,
            Self::Passed => EndKind::Passed,
            Self::Refused(_) => EndKind::Refused,
            Self::Failed(_) => EndKind::Failed,
        }
    }

    /// The error to report to the other gateway.
    pub(super) fn error(&self) -> Option<String> {
        match self {
            Self::Loaded(_) | Self::Unconfirmed | Self::Passed => None,
            Self::Refused(reason) | Self::Failed(reason) => Some(reason.clone()),
        }
    }

    /// Adds the other gateway's error, which is often the reason.
    pub(super) fn with_peers(self, theirs: Option<String>) -> Self {
        match (self, theirs) {
            (Self::Failed(ours), Some(theirs)) => {
                Self::Failed(format!("{ours}; the other gateway: {theirs}"))
            }
            (ending, _) => ending,
        }
    }
}

impl fmt::Display for MigrationEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loaded(_) => write!(f, "loaded"),
            Self::Unconfirmed => write!(f, "delivered, without a confirmation"),
            Self::Passed => write!(f, "passed through to its end"),
            Self::Refused(reason) => write!(f, "refused: {reason}"),
            Self::Failed(reason) => write!(f, "failed: {reason}"),
        }
    }
}

struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MiB", self.0 as f64 / f64::from(1 << 20))
    }
}

struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} s", self.0.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Instant};

    use vamoose_link::Stats;

    use super::*;
    use crate::Observer;

    #[test]
    fn a_line_says_who_where_how_and_how_much() {
        let (observer, stats): (Arc<dyn Observer>, _) = (Arc::new(()), Arc::<Stats>::default());
        stats.add_received(3 << 20);
        stats.add_sent(1 << 19);
        let account = Account {
            observation: Observation::begin(&observer, Way::To, "kvm2", Instant::now(), stats),
            target: Target::Port(49_152),
            guest: Some("web1".to_owned()),
        };
        let failed = MigrationEnd::Failed("cut".to_owned()).with_peers(Some("no QEMU".to_owned()));
        for (ending, text) in [
            (MigrationEnd::Loaded(None), "loaded"),
            (failed, "failed: cut; the other gateway: no QEMU"),
            (MigrationEnd::Refused("full".to_owned()), "refused: full"),
            (
                MigrationEnd::Passed.with_peers(Some("x".to_owned())),
                "passed through to its end",
            ),
        ] {
            let line = account.line(&ending);
            let expected =
                format!("guest web1 to kvm2, port 49152: {text}; 3.0 MiB as 0.5 MiB in ");
            assert!(line.starts_with(&expected), "{line}");
        }
    }
}
