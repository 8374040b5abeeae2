//! A person's word on an attempt whose outcome nothing else can decide.
//!
//! Whoever settles an attempt has looked at the destination. What can be asked is asked all the same: a destination that
//! answers is believed more than a person.

use std::{path::PathBuf, time::Duration};

use handover::{
    AttemptId, Destination, DestinationMessage, DestinationState, GuestLocation, SourceEvent,
    SourceMessage, SourceState,
};
use thiserror::Error;
use tracing::info;
use vamoose_link::Address;

use crate::{
    DestinationRecord, Journal, JournalError, SourceRecord,
    control::{Control, ControlError},
    journal::Entry,
    migrate::SourceQemu,
    qemu::QemuError,
    serve::{DestinationQemu, Job},
};

/// What became of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is the destination's.
    RunningThere,
    /// It has never run at the destination.
    NeverRan,
}

/// An attempt to be settled, and how.
pub struct Settlement {
    attempt: AttemptId,
    verdict: Verdict,
    source: Option<Entry<SourceRecord>>,
    destination: Option<Side>,
}

/// The destination's side on this host.
enum Side {
    /// A server looks after it: at this address.
    Served(DestinationRecord, Address),
    /// Nobody does.
    Free(Entry<DestinationRecord>),
}

/// An attempt that cannot be settled.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SettleError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// It is not in the journal.
    #[error("attempt {attempt} is not in this journal")]
    Unknown {
        /// The attempt.
        attempt: AttemptId,
    },
    /// It needs no settling.
    #[error("attempt {attempt} is over: {guest}")]
    Over {
        /// The attempt.
        attempt: AttemptId,
        /// Where the guest is.
        guest: GuestLocation,
    },
    /// The destination contradicts.
    #[error("the destination answers `{answer}`: it decides, run the migration's command again")]
    Contradicted {
        /// Its answer.
        answer: String,
    },
    /// The source's QEMU.
    #[error("the source's QEMU ({}): {source}", monitor.display())]
    Qemu {
        /// Its monitor.
        monitor: PathBuf,
        /// What is wrong.
        source: QemuError,
    },
    /// It is another one.
    #[error("{} belongs to another QEMU than the attempt's", monitor.display())]
    OtherQemu {
        /// The monitor.
        monitor: PathBuf,
    },
    /// The server on this host could not be talked to.
    #[error("the server at {address}: {source}")]
    Server {
        /// Its address.
        address: String,
        /// What is wrong.
        source: ControlError,
    },
    /// The guest is not as it was to be.
    #[error("the guest could not be settled: {0}")]
    Failed(String),
}

/// How long a destination may take to contradict.
const ASKING: Duration = Duration::from_secs(5);
/// How long a server may take to end its QEMU, or to let it go on.
const SETTLING: Duration = Duration::from_secs(60);

impl Settlement {
    /// Looks what there is to settle. Nothing is done yet.
    ///
    /// # Errors
    /// When nothing is to be settled, or a process still works at it.
    pub fn plan(
        journal: &Journal,
        attempt: AttemptId,
        verdict: Verdict,
    ) -> Result<Self, SettleError> {
        let source = journal.find::<SourceRecord>(attempt)?;
        let destination = journal.find::<DestinationRecord>(attempt)?;
        if source.is_none() && destination.is_none() {
            return Err(SettleError::Unknown { attempt });
        }
        let mut over = None;
        let source = source
            .filter(|record| {
                if let SourceState::Over { guest, .. } = &record.state {
                    over = Some(*guest);
                }
                over.is_none()
            })
            .map(|record| journal.claim(record))
            .transpose()?;
        let destination = destination
            .filter(|record| match &record.state {
                DestinationState::Running => {
                    over = Some(GuestLocation::Destination);
                    false
                }
                DestinationState::Ended { .. } => {
                    over = Some(GuestLocation::Lost);
                    false
                }
                DestinationState::Aborted { .. } => {
                    over = Some(GuestLocation::Source);
                    false
                }
                _ => true,
            })
            .map(|record| Side::of(journal, record))
            .transpose()?;
        match over {
            Some(guest) if source.is_none() && destination.is_none() => {
                Err(SettleError::Over { attempt, guest })
            }
            _ => Ok(Self {
                attempt,
                verdict,
                source,
                destination,
            }),
        }
    }

    /// What will be done, a sentence each.
    pub fn steps(&self) -> Vec<String> {
        let mut steps = Vec::new();
        match (self.verdict, &self.source, &self.destination) {
            (Verdict::NeverRan, source, destination) => {
                if let Some(entry) = source {
                    let SourceRecord { to, name, qemu, .. } = &entry.record;
                    steps.push(format!(
                        "tell the destination {to} ({name}), if it can be reached, that the guest stays here; stop if \
                         it has run there"
                    ));
                    let what = if entry.record.resume {
                        "continue the guest"
                    } else {
                        "leave the guest, which was paused before,"
                    };
                    steps.push(format!("{what} at {}", qemu.monitor.display()));
                }
                if let Some(side) = destination {
                    let record = side.record();
                    let monitor = record.qemu.monitor.display();
                    steps.push(format!("end the QEMU at {monitor}, which holds the guest"));
                }
            }
            (Verdict::RunningThere, source, destination) => {
                if let Some(entry) = source {
                    let monitor = entry.record.qemu.monitor.display();
                    steps.push(format!(
                        "leave the guest's copy at {monitor} paused for good, to be ended by hand"
                    ));
                }
                if let Some(side) = destination {
                    let monitor = side.record().qemu.monitor.display();
                    steps.push(format!("continue the guest at {monitor}"));
                }
            }
        }
        steps
    }

    /// Does it.
    ///
    /// # Errors
    /// What could not be done. The attempt may be settled again.
    pub fn carry_out(self) -> Result<(), SettleError> {
        let Self {
            attempt,
            verdict,
            source,
            destination,
        } = self;
        match verdict {
            // The guest must be gone there before it goes on here.
            Verdict::NeverRan => {
                if let Some(side) = destination {
                    let cause = "settled by hand: it never ran here".to_owned();
                    side.request(attempt, SourceMessage::Abort { cause })?;
                }
                source.map_or(Ok(()), take_back)
            }
            Verdict::RunningThere => {
                source.map_or(Ok(()), give_away)?;
                match destination {
                    Some(side) => side.request(attempt, SourceMessage::Commit { resume: true }),
                    None => Ok(()),
                }
            }
        }
    }
}

impl Side {
    fn of(journal: &Journal, record: DestinationRecord) -> Result<Self, SettleError> {
        match journal.claim(record.clone()) {
            Ok(entry) => Ok(Self::Free(entry)),
            Err(JournalError::Driven { .. }) => {
                let address = record.server.parse().map_err(|error| {
                    SettleError::Failed(format!("the server's address in the journal: {error}"))
                })?;
                Ok(Self::Served(record, address))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn record(&self) -> &DestinationRecord {
        match self {
            Self::Served(record, _) => record,
            Self::Free(entry) => &entry.record,
        }
    }

    /// Has the destination do what a source would ask for.
    fn request(self, attempt: AttemptId, message: SourceMessage) -> Result<(), SettleError> {
        let is_commit = matches!(message, SourceMessage::Commit { .. });
        match self {
            Self::Served(_, address) => {
                let answer = ask(&address, attempt, &message, SETTLING);
                let answer = answer.map_err(|source| SettleError::Server {
                    address: address.to_string(),
                    source,
                })?;
                match (is_commit, answer) {
                    (true, DestinationMessage::Running { .. })
                    | (false, DestinationMessage::Aborted { .. }) => Ok(()),
                    (_, answer) => Err(SettleError::Failed(format!("{answer:?}"))),
                }
            }
            Self::Free(entry) => {
                let record = &entry.record;
                let machine = Destination::restore(record.incarnation, record.state.clone());
                let qemu = DestinationQemu::new(record.qemu.clone(), None);
                let job = Job::new(machine, entry, qemu, None);
                job.request(message);
                match (is_commit, job.state()) {
                    (true, DestinationState::Running)
                    | (false, DestinationState::Aborted { .. }) => Ok(()),
                    (_, state) => Err(SettleError::Failed(format!("{state:?}"))),
                }
            }
        }
    }
}

/// Continues the guest at the source.
fn take_back(mut entry: Entry<SourceRecord>) -> Result<(), SettleError> {
    let record = &entry.record;
    let monitor = record.qemu.monitor.clone();
    if let Ok(to) = record.to.parse() {
        let cause = "settled by hand: the guest stays at the source".to_owned();
        match ask(&to, record.attempt, &SourceMessage::Abort { cause }, ASKING) {
            Ok(
                answer @ (DestinationMessage::Running { .. }
                | DestinationMessage::MovedOn
                | DestinationMessage::Ended { .. }
                | DestinationMessage::Unclear { .. }),
            ) => {
                let answer = format!("{answer:?}");
                return Err(SettleError::Contradicted { answer });
            }
            Ok(answer) => info!("the destination answers {answer:?}"),
            Err(error) => info!("the destination cannot be asked: {error}"),
        }
    }
    let qemu = |source| SettleError::Qemu {
        monitor: monitor.clone(),
        source,
    };
    let mut source = SourceQemu::connect(&monitor).map_err(qemu)?;
    if !source.instance.is_same(&record.qemu) {
        return Err(SettleError::OtherQemu { monitor });
    }
    match source.resume(record.resume) {
        SourceEvent::Resumed => {}
        event => return Err(SettleError::Failed(format!("{event:?}"))),
    }
    entry.record.state = SourceState::Over {
        guest: GuestLocation::Source,
        cause: Some("settled by hand: it never ran at the destination".to_owned()),
    };
    Ok(entry.write()?)
}

/// The guest is the destination's.
fn give_away(mut entry: Entry<SourceRecord>) -> Result<(), SettleError> {
    let record = &entry.record;
    let monitor = record.qemu.monitor.clone();
    // A QEMU that runs the guest itself has the last word.
    if let Ok(source) = SourceQemu::connect(&monitor)
        && source.instance.is_same(&record.qemu)
        && source.was_running
    {
        let reason = format!("the guest runs at {}", monitor.display());
        return Err(SettleError::Failed(reason));
    }
    entry.record.state = SourceState::Over {
        guest: GuestLocation::Destination,
        cause: Some("settled by hand: it runs at the destination".to_owned()),
    };
    Ok(entry.write()?)
}

fn ask(
    address: &Address,
    attempt: AttemptId,
    message: &SourceMessage,
    within: Duration,
) -> Result<DestinationMessage, ControlError> {
    let mut control = Control::connect(address, attempt, ASKING)?;
    control.send(message)?;
    loop {
        match control.receive(within)? {
            DestinationMessage::Starting | DestinationMessage::Receiving => {}
            answer => return Ok(answer),
        }
    }
}
