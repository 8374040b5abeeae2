//! A person's decision on an attempt that nothing else can decide.
//!
//! The person has looked at the destination. The destination is asked all the same, and its answer counts more. A refusal or
//! silence is no answer. Only a person can declare that no destination is left to be asked.

use std::{path::PathBuf, time::Duration};

use handover::{
    AttemptId, DestinationMessage, GuestLocation, SourceEvent, SourceMessage, SourceState,
};
use thiserror::Error;
use tracing::info;
use vamoose_link::{AddressError, Remote, Security, SessionConfig};

use crate::{
    Journal, JournalError,
    control::{ControlError, ask},
    journal::{AtDestination, AtSource, Entry, Record},
    migrate::SourceQemu,
    qemu::{MigrationStatus, QemuError, is_switchover},
    qmp::ANSWER_WITHIN,
    serve::Job,
};

/// What became of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is the destination's.
    RunningThere,
    /// It has never run at the destination.
    NeverRan,
    /// Another tool has moved it from the source.
    MovedElsewhere,
}

/// An attempt to be settled, and how.
pub struct Settlement {
    attempt: AttemptId,
    verdict: Verdict,
    source: Option<Entry<AtSource>>,
    destination: Option<Side>,
    config: Option<SessionConfig>,
}

/// The destination's side on this host.
enum Side {
    /// A server looks after it, which is asked on this host.
    Served(Record<AtDestination>, Remote),
    /// No process drives it.
    Free(Entry<AtDestination>),
}

/// An attempt that cannot be settled.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SettleError {
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("attempt {0} is not in this journal")]
    Unknown(AttemptId),
    #[error("attempt {0} is over: {1}")]
    Over(AttemptId, GuestLocation),
    #[error(
        "the destination answers `{0}`, and its answer decides: run the migration's command again"
    )]
    Contradicted(String),
    /// It may be a destination that knows nothing of the attempt.
    #[error(
        "the destination answers `{0}`, which does not prove that the guest has never run there"
    )]
    NoProof(String),
    /// It may run the guest.
    #[error("the destination {0} cannot be asked whether it has the guest")]
    NotAsked(String, #[source] ControlError),
    #[error("the source's QEMU at {}", .0.display())]
    Qemu(PathBuf, #[source] QemuError),
    #[error("{} belongs to another QEMU than the attempt's", .0.display())]
    OtherQemu(PathBuf),
    #[error("the server's address in the journal")]
    Address(#[from] AddressError),
    #[error("the server at {0}")]
    Server(String, #[source] ControlError),
    #[error("the guest could not be settled: {0}")]
    Failed(String),
}

/// How long a server may take to end its QEMU, or to continue it.
const SETTLING: Duration = Duration::from_secs(60);

impl Settlement {
    /// Finds the open sides of the attempt, and changes nothing yet. Before a guest resumes at this host, its destination is asked
    /// over a session with `config`. Without `config` the destination is gone for good and is not asked.
    ///
    /// # Errors
    /// When nothing is to be settled, or a process still works at it.
    pub fn plan(
        journal: &Journal,
        attempt: AttemptId,
        verdict: Verdict,
        config: Option<SessionConfig>,
    ) -> Result<Self, SettleError> {
        let source = journal.find::<AtSource>(attempt)?;
        let destination = journal.find::<AtDestination>(attempt)?;
        let over_at_source = source.as_ref().and_then(Record::outcome);
        let over_at_destination = destination.as_ref().and_then(Record::outcome);
        let source = source.filter(|_| over_at_source.is_none());
        let destination = destination.filter(|_| over_at_destination.is_none());
        if source.is_none() && destination.is_none() {
            return Err(match over_at_destination.or(over_at_source) {
                Some(guest) => SettleError::Over(attempt, guest),
                None => SettleError::Unknown(attempt),
            });
        }
        Ok(Self {
            attempt,
            verdict,
            source: source.map(|record| journal.claim(record)).transpose()?,
            destination: destination
                .map(|record| Side::of(journal, record))
                .transpose()?,
            config,
        })
    }

    /// Whether a destination on another host is to be asked.
    pub fn asks(&self) -> bool {
        let source = self.source.as_ref().map(|entry| &entry.record.qemu);
        self.verdict == Verdict::NeverRan && source.is_some_and(|qemu| !qemu.has_ended())
    }

    /// The steps that [`Settlement::carry_out`] takes, one sentence each.
    pub fn steps(&self) -> Vec<String> {
        let source = self.source.as_ref().map(|entry| &entry.record);
        let destination = self.destination.as_ref().map(Side::record);
        let there = destination.map(|record| record.qemu.monitor.display());
        let mut steps = Vec::new();
        match (self.verdict, source) {
            (Verdict::NeverRan, Some(record)) if record.qemu.has_ended() => {
                let monitor = record.qemu.monitor.display();
                steps.push(format!(
                    "record that the guest has ended with the QEMU at {monitor}"
                ));
            }
            (Verdict::NeverRan, Some(record)) => {
                if self.config.is_some() {
                    steps.push(format!(
                        "tell the destination {} ({}) that the guest stays here; stop if it has run there, or \
                         does not answer",
                        record.side.to, record.name
                    ));
                }
                let what = match record.side.resume {
                    true => "continue the guest",
                    false => "leave the guest, which was paused before,",
                };
                steps.push(format!("{what} at {}", record.qemu.monitor.display()));
            }
            (Verdict::RunningThere | Verdict::MovedElsewhere, Some(record)) => {
                let monitor = record.qemu.monitor.display();
                steps.push(format!(
                    "leave the guest's copy at {monitor} paused for good, to be ended by hand"
                ));
            }
            (_, None) => {}
        }
        steps.extend(there.map(|there| match self.verdict {
            Verdict::NeverRan => format!("end the QEMU at {there}, which holds the guest"),
            Verdict::MovedElsewhere => format!("end the QEMU at {there}, which holds an old copy"),
            Verdict::RunningThere => format!("continue the guest at {there}"),
        }));
        steps
    }

    /// Carries the decision out.
    ///
    /// # Errors
    /// What could not be done. The attempt may be settled again.
    pub fn carry_out(self) -> Result<(), SettleError> {
        let Self {
            source,
            destination,
            config,
            ..
        } = self;
        let request = |message, wanted| match destination {
            Some(side) => side.request(self.attempt, message, wanted),
            None => Ok(()),
        };
        let abort = |reason| SourceMessage::Abort {
            cause: by_hand(reason),
        };
        match self.verdict {
            // The guest must be gone there before it resumes here.
            Verdict::NeverRan => {
                request(abort("it never ran here"), GuestLocation::Source)?;
                source.map_or(Ok(()), |entry| take_back(entry, config))
            }
            // The source must have given the guest up before the destination acts.
            Verdict::RunningThere => {
                let guest = GuestLocation::Destination;
                give_away(source, guest, "it runs at the destination")?;
                request(SourceMessage::Commit { resume: true }, guest)
            }
            Verdict::MovedElsewhere => {
                let reason = "another tool has moved it";
                give_away(source, GuestLocation::Gone, reason)?;
                request(abort(reason), GuestLocation::Source)
            }
        }
    }
}

impl Side {
    fn of(journal: &Journal, record: Record<AtDestination>) -> Result<Self, SettleError> {
        match journal.claim(record.clone()) {
            Ok(entry) => Ok(Self::Free(entry)),
            Err(JournalError::Driven(_)) => {
                let server = remote(&record.side.server, SessionConfig::new(Security::Insecure))?;
                Ok(Self::Served(record, server))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn record(&self) -> &Record<AtDestination> {
        match self {
            Self::Served(record, _) => record,
            Self::Free(entry) => &entry.record,
        }
    }

    /// Sends the destination a message of a source, and requires that the guest is at `wanted` afterwards.
    fn request(
        self,
        attempt: AttemptId,
        message: SourceMessage,
        wanted: GuestLocation,
    ) -> Result<(), SettleError> {
        let (guest, result) = match self {
            Self::Served(_, server) => {
                let answer = ask(&server, attempt, &message, SETTLING);
                let at = |error| SettleError::Server(server.address(), error);
                let (answer, _) = answer.map_err(at)?;
                let guest = match answer {
                    DestinationMessage::Running { .. } => Some(GuestLocation::Destination),
                    DestinationMessage::Aborted { .. } => Some(GuestLocation::Source),
                    _ => None,
                };
                (guest, format!("{answer:?}"))
            }
            Self::Free(entry) => {
                let job = Job::restore(entry);
                job.request(message);
                let state = job.state();
                (state.outcome(), format!("{state:?}"))
            }
        };
        match guest == Some(wanted) {
            true => Ok(()),
            false => Err(SettleError::Failed(result)),
        }
    }
}

/// Continues the guest at the source.
fn take_back(entry: Entry<AtSource>, config: Option<SessionConfig>) -> Result<(), SettleError> {
    let record = &entry.record;
    if record.qemu.has_ended() {
        // Its only copy may be the destination's, which is left alone.
        return settle(
            entry,
            GuestLocation::Lost,
            "it never ran at the destination, and the source's QEMU has ended",
        );
    }
    if let Some(config) = config {
        confirm_that_it_never_ran(record, config)?;
    }
    let monitor = record.qemu.monitor.clone();
    let mut source = SourceQemu::connect(&monitor, ANSWER_WITHIN)
        .map_err(|error| SettleError::Qemu(monitor.clone(), error))?;
    if !source.instance.is_same(&record.qemu) {
        return Err(SettleError::OtherQemu(monitor));
    }
    match source.resume(record.side.resume) {
        SourceEvent::Resumed => {}
        event => return Err(SettleError::Failed(format!("{event:?}"))),
    }
    settle(
        entry,
        GuestLocation::Source,
        "it never ran at the destination",
    )
}

/// Tells the destination that the guest stays here, and requires its answer that the guest has never run there.
fn confirm_that_it_never_ran(
    record: &Record<AtSource>,
    config: SessionConfig,
) -> Result<(), SettleError> {
    let to = remote(&record.side.to, config)?;
    let cause = by_hand("the guest stays at the source");
    let abort = SourceMessage::Abort { cause };
    let answer = ask(&to, record.attempt, &abort, SETTLING);
    let not_asked = |error| SettleError::NotAsked(record.side.to.clone(), error);
    match answer.map_err(not_asked)?.0 {
        DestinationMessage::Aborted { incarnation, .. }
            if record.state.accepts_abort_of(incarnation) =>
        {
            info!("the destination confirms that the guest has never run there");
            Ok(())
        }
        answer @ (DestinationMessage::Running { .. }
        | DestinationMessage::MovedOn
        | DestinationMessage::Ended { .. }) => {
            Err(SettleError::Contradicted(format!("{answer:?}")))
        }
        answer => Err(SettleError::NoProof(format!("{answer:?}"))),
    }
}

/// Records that the source has lost the guest to `guest`, unless the source QEMU's state proves the contrary.
fn give_away(
    entry: Option<Entry<AtSource>>,
    guest: GuestLocation,
    decision: &str,
) -> Result<(), SettleError> {
    let Some(entry) = entry else {
        return Ok(());
    };
    let qemu = &entry.record.qemu;
    if let Ok(mut source) = SourceQemu::connect(&qemu.monitor, ANSWER_WITHIN)
        && source.instance.is_same(qemu)
    {
        if let Ok(MigrationStatus::Switched) = source.qemu.migration_status() {
            let reason = "the guest is under post-copy and needs the memory that is here: run the same `vamoose migrate` again";
            return Err(SettleError::Failed(reason.to_owned()));
        }
        // A QEMU that has not sent the guest, or has run it since, is proof of the contrary.
        if let Ok(state) = source.qemu.state()
            && !is_switchover(&state)
        {
            let at = qemu.monitor.display();
            let reason = format!("the guest is at {at}, in the state `{state}`");
            return Err(SettleError::Failed(reason));
        }
    }
    settle(entry, guest, decision)
}

fn settle(
    mut entry: Entry<AtSource>,
    guest: GuestLocation,
    decision: &str,
) -> Result<(), SettleError> {
    entry.record.state = SourceState::Over {
        guest,
        cause: Some(by_hand(decision)),
    };
    Ok(entry.write()?)
}

fn by_hand(reason: &str) -> String {
    format!("{BY_HAND}{reason}")
}

/// Whether this is the cause of an attempt that was settled.
pub(crate) fn is_by_hand(cause: &str) -> bool {
    cause.starts_with(BY_HAND)
}

const BY_HAND: &str = "settled by hand: ";

fn remote(address: &str, config: SessionConfig) -> Result<Remote, AddressError> {
    Remote {
        paths: Vec::new(),
        config,
    }
    .at(address)
}
