//! Reports the migrations of a gateway or a server to an observer, which counts them.
//!
//! An observer may read the counters of the data path at any time. Only the beginning and the end of a migration wait for it.

use std::{sync::Arc, time::Instant};

use vamoose_link::{LinkFaults, Stats};

use crate::{Outcome, RelayError, Role, Summary, Switchover};

/// Receives the beginning and the end of every migration. `()` ignores them.
pub trait Observer: Send + Sync {
    /// A migration has begun.
    fn begun(&self, migration: &Arc<Observed>);
    /// A migration has ended.
    fn ended(&self, migration: &Arc<Observed>, end: End);
    /// A server holds this many complete guests whose sources are silent, paused. Told every second.
    fn orphaned(&self, guests: usize) {
        let _ = guests;
    }
}

/// A migration.
#[derive(Debug)]
pub struct Observed {
    /// Whether the guest leaves this host or arrives.
    pub role: Role,
    /// The other host: its name in the configuration, or its authenticated identity. Empty if neither is known.
    pub peer: String,
    /// When its first connection came.
    pub began: Instant,
    /// Its counters.
    pub stats: Arc<Stats>,
}

/// How a migration ended.
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// The outcome.
    pub kind: EndKind,
    /// When the steps of the switchover were done, if the relay saw them.
    pub switchover: Option<Switchover>,
    /// What went wrong on the link to the other host.
    pub faults: LinkFaults,
}

/// The outcome of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndKind {
    /// The destination has confirmed that it has loaded the guest.
    Loaded,
    /// Everything was delivered, without a confirmation.
    Unconfirmed,
    /// Its connections ended without an error. Their content is unknown.
    Passed,
    /// Refused before any of its bytes were taken.
    Refused,
    /// Failed after some bytes were taken.
    Failed,
    /// Ended by the source before it was complete: cancelled there, or the source has failed.
    Stopped,
}

impl EndKind {
    /// All outcomes.
    pub const ALL: [Self; 6] = [
        Self::Loaded,
        Self::Unconfirmed,
        Self::Passed,
        Self::Refused,
        Self::Failed,
        Self::Stopped,
    ];

    /// The outcome's name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loaded => "loaded",
            Self::Unconfirmed => "unconfirmed",
            Self::Passed => "passed",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
        }
    }

    pub(crate) fn of(result: &Result<Summary, RelayError>) -> Self {
        match result {
            Ok(summary) => match summary.outcome {
                Outcome::Loaded => Self::Loaded,
                Outcome::Unconfirmed => Self::Unconfirmed,
                Outcome::Unseen => Self::Passed,
            },
            Err(RelayError::Announce(_)) => Self::Refused,
            Err(error) if error.is_end_by_source() => Self::Stopped,
            Err(_) => Self::Failed,
        }
    }
}

impl Observer for () {
    fn begun(&self, _: &Arc<Observed>) {}
    fn ended(&self, _: &Arc<Observed>, _: End) {}
}

/// A migration whose beginning has been reported.
pub(crate) struct Observation {
    pub(crate) migration: Arc<Observed>,
    observer: Arc<dyn Observer>,
}

impl Observation {
    pub(crate) fn begin(
        observer: &Arc<dyn Observer>,
        role: Role,
        peer: impl Into<String>,
        began: Instant,
        stats: Arc<Stats>,
    ) -> Self {
        let peer = peer.into();
        let migration = Arc::new(Observed {
            role,
            peer,
            began,
            stats,
        });
        observer.begun(&migration);
        let observer = observer.clone();
        Self {
            migration,
            observer,
        }
    }

    /// Reports a migration that is refused at once.
    pub(crate) fn refused(observer: &Arc<dyn Observer>, role: Role, peer: impl Into<String>) {
        let observation = Self::begin(observer, role, peer, Instant::now(), Arc::default());
        observation.end(EndKind::Refused, None, LinkFaults::default());
    }

    pub(crate) fn end(self, kind: EndKind, switchover: Option<Switchover>, faults: LinkFaults) {
        let end = End {
            kind,
            switchover,
            faults,
        };
        self.observer.ended(&self.migration, end);
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use vamoose_link::ReadError;

    use super::*;
    use crate::Direction::{Back, Forward};

    #[test]
    fn a_migration_that_its_source_ends_has_not_failed() {
        let reset = || io::Error::from(io::ErrorKind::ConnectionReset);
        let stall = ReadError::TimedOut {
            part: "header",
            seconds: 15,
        };
        for (error, kind) in [
            (RelayError::MainClosed(Forward), EndKind::Stopped),
            (RelayError::MainRead(Forward, reset()), EndKind::Stopped),
            (RelayError::ChannelClosed(1), EndKind::Stopped),
            (
                RelayError::SourceChannel(0, reset().into()),
                EndKind::Stopped,
            ),
            (RelayError::SourceChannel(0, stall), EndKind::Failed),
            (RelayError::MainClosed(Back), EndKind::Failed),
            (RelayError::MainWrite(Forward, reset()), EndKind::Failed),
            (RelayError::Cancelled, EndKind::Failed),
        ] {
            let text = format!("{error:?}");
            assert_eq!(EndKind::of(&Err(error)), kind, "{text}");
        }
    }
}
