//! What earlier attempts of the same QEMU mean for a command: one that is not over is finished first, one that has
//! taken the guest away is reported.

use std::time::{Duration, Instant};

use handover::{DestinationMessage, FoundGuest, GuestLocation, SourceMessage, SourceState};
use serde_json::Value;
use tracing::info;
use vamoose_link::Snapshot;

use super::{
    Cause, Ended, Failure, Migration, Moved, SourceQemu, at_source,
    hand_over::{Attempt, HandOver, stands_still},
    span,
};
use crate::{
    Journal, JournalError, chain,
    control::{ControlError, ask},
    journal::{AtSource, Record},
    qemu::QemuError,
};

impl Migration<'_> {
    /// Finishes an attempt of this QEMU that is not over, or reports what became of one whose guest has left. `None` when
    /// the guest is here and free to go.
    pub(super) fn finish_earlier(
        &self,
        journal: &Journal,
        source: &mut SourceQemu,
    ) -> Result<Option<Result<Moved, Failure>>, Failure> {
        let known = journal.records::<AtSource>().map_err(at_source)?;
        let of_this = |record: &&Record<AtSource>| record.qemu.is_same(&source.instance);
        let known: Vec<_> = known.iter().filter(of_this).collect();
        if let Some(unfinished) = known.iter().find(|record| !record.is_over()) {
            return match self.go_on(journal, unfinished, Some(source)) {
                Err(failure) if failure.guest == GuestLocation::Source && !self.is_cancelled() => {
                    let now = journal.find::<AtSource>(unfinished.attempt);
                    if !now.map_err(at_source)?.is_some_and(|now| now.is_over()) {
                        return Ok(Some(Err(failure)));
                    }
                    info!("an earlier attempt is over: {}", chain(&failure));
                    Ok(None)
                }
                ended => Ok(Some(ended)),
            };
        }
        let has_sent = source.qemu.has_sent_its_guest();
        let last = known.last().copied().filter(|_| !source.was_running);
        if !has_sent.map_err(|error| by_the_journal(last, error))? {
            return Ok(None);
        }
        match known.last() {
            Some(record) if record.state.guest() != GuestLocation::Source => {
                Ok(Some(self.after(journal, record)))
            }
            // It came back, paused as its owner had it.
            Some(record) if !record.side.resume => Err(at_source(QemuError::SentBefore)),
            _ => Err(Failure {
                cause: Cause::NotInJournal,
                guest: GuestLocation::Gone,
                attempt: None,
            }),
        }
    }

    /// Finishes an attempt that another process has begun.
    fn go_on(
        &self,
        journal: &Journal,
        record: &Record<AtSource>,
        mut source: Option<&mut SourceQemu>,
    ) -> Result<Moved, Failure> {
        let start = Instant::now();
        let _span = span(record.attempt).entered();
        info!(
            "finishing attempt {} to {} ({}), which an earlier process has begun",
            record.attempt, record.side.to, record.name
        );
        let unfinished = |cause, guest| Failure::of(record.attempt, cause, guest);
        let guest = record.state.guest();
        let entry = journal.claim(record.clone());
        let entry = entry.map_err(|error| unfinished(error.into(), guest))?;
        let to = self.to.at(&entry.record.side.to);
        let to = to.map_err(|error| unfinished(Cause::broken(chain(&error)), guest))?;
        // A QEMU that has sent the guest may have done so for another tool, after the guest had gone on.
        let confirmed = self.confirm == Some(record.attempt);
        let found = match source.as_deref_mut() {
            None => FoundGuest::Ended,
            Some(source) => {
                let is_here = match entry.record.state {
                    SourceState::Committing { .. } => source.has_come_back(),
                    _ => source.wait_until_ended().map(|completed| !completed),
                };
                match is_here.map_err(|error| unfinished(error.into(), guest))? {
                    true => FoundGuest::Here,
                    false => FoundGuest::Sent { confirmed },
                }
            }
        };
        let attempt = Attempt::new(entry, &to, self.downtime_max, self.cancel);
        let mut attempt = HandOver::take_up(attempt, found);
        let decision = attempt.drive(source.as_deref_mut());
        self.conclude(attempt, decision, source, Ended::default(), start)
    }

    /// What became of a guest that has left this QEMU.
    fn after(&self, journal: &Journal, record: &Record<AtSource>) -> Result<Moved, Failure> {
        let failure = |cause, guest| Failure::of(record.attempt, cause, guest);
        let SourceState::Over { guest, cause } = &record.state else {
            return Err(failure(Cause::NotInJournal, GuestLocation::InDoubt));
        };
        let before = |now: String| Cause::moved_before(record, now);
        if matches!(guest, GuestLocation::Gone | GuestLocation::Lost) {
            return Err(failure(
                Cause::broken(cause.clone().unwrap_or_default()),
                *guest,
            ));
        }
        if *guest != GuestLocation::Destination || !self.is_asked_for(record) {
            return Err(failure(before(cause.clone().unwrap_or_default()), *guest));
        }
        let entry = journal.claim(record.clone());
        let entry = entry.map_err(|error| failure(error.into(), *guest))?;
        Err(match self.ask_after(&entry.record) {
            Ok(DestinationMessage::Running { state })
                if record.side.resume && stands_still(&state) =>
            {
                failure(Cause::StandsStill(state), *guest)
            }
            Ok(DestinationMessage::Running { state }) => {
                info!(
                    "{}: attempt {} has moved the guest to {}, where it is {state}",
                    record.name, record.attempt, record.side.to
                );
                return Ok(Moved {
                    source: Value::Null,
                    moved: Snapshot::default(),
                    downtime: None,
                    downtime_parts: None,
                    total_time: Duration::ZERO,
                });
            }
            Ok(DestinationMessage::Ended { cause }) => failure(before(cause), GuestLocation::Lost),
            Ok(DestinationMessage::MovedOn) => {
                failure(before(String::new()), GuestLocation::MovedOn)
            }
            Ok(answer) => failure(
                before(format!("the destination answers {answer:?} now")),
                *guest,
            ),
            Err(error) => failure(
                before(format!(
                    "the destination cannot be asked now: {}",
                    chain(&error)
                )),
                *guest,
            ),
        })
    }

    /// Asks the destination of an attempt that went through how the guest is.
    fn ask_after(&self, record: &Record<AtSource>) -> Result<DestinationMessage, ControlError> {
        let commit = SourceMessage::Commit {
            resume: record.side.resume,
        };
        let timeout = self.config.stall_timeout;
        let (answer, control) = ask(self.to, record.attempt, &commit, timeout)?;
        // Best effort: a destination that does not receive it remembers the attempt for longer.
        let _ = control.send(&SourceMessage::Settled);
        Ok(answer)
    }

    /// A QEMU that cannot be reached may have ended in the middle of an attempt, or after it. Not so if another one has its
    /// place, which the attempts of the first one say nothing about.
    pub(super) fn without_source(
        &self,
        journal: &Journal,
        error: QemuError,
    ) -> Result<Moved, Failure> {
        let known = journal.records::<AtSource>().map_err(at_source)?;
        let nobody_listens = error.is_nobody_there();
        let last = known
            .iter()
            .rfind(|record| record.qemu.monitor == self.qmp && record.qemu.has_ended());
        match last.filter(|record| nobody_listens || record.qemu.has_its_place()) {
            Some(record) if !record.is_over() => self.go_on(journal, record, None),
            Some(record) if has_left(record) => self.after(journal, record),
            _ => {
                let of_this = |record: &&Record<AtSource>| {
                    record.qemu.monitor == self.qmp && record.qemu.has_its_place()
                };
                Err(by_the_journal(known.iter().rfind(of_this), error))
            }
        }
    }

    /// Tells the destination of earlier attempts which failed, and which it may still hold a guest for, as it could not be
    /// reached then.
    pub(super) fn notify_earlier(&self, journal: &Journal) -> Result<(), JournalError> {
        let address = self.to.address();
        for record in journal.records::<AtSource>()? {
            let is_open = !record.side.confirmed && record.side.to == address;
            let SourceState::Over {
                guest: GuestLocation::Source,
                cause,
            } = record.state.clone()
            else {
                continue;
            };
            if let (true, Ok(entry)) = (is_open, journal.claim(record)) {
                let id = entry.record.attempt;
                let earlier = Attempt::new(entry, self.to, self.downtime_max, self.cancel);
                if !earlier.notify(cause.unwrap_or_default()) {
                    // It cannot be reached, which the attempt itself will find out.
                    break;
                }
                info!("attempt {id} is known to have failed there");
            }
        }
        Ok(())
    }
}

/// A source that cannot be asked: its guest is where the last attempt of this QEMU has left it.
fn by_the_journal(last: Option<&Record<AtSource>>, error: QemuError) -> Failure {
    let Some(record) = last.filter(|record| record.state.guest() != GuestLocation::Source) else {
        return at_source(error);
    };
    let guest = record.state.guest();
    let cause = match guest {
        GuestLocation::Destination => Cause::moved_before(record, chain(&error)),
        _ => error.into(),
    };
    Failure::of(record.attempt, cause, guest)
}

/// Whether the guest was handed over, or has ended.
fn has_left(record: &Record<AtSource>) -> bool {
    record.is_over() && record.state.guest() != GuestLocation::Source
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use handover::AttemptId;

    use super::*;
    use crate::Instance;

    #[test]
    fn a_source_that_cannot_be_asked_has_its_guest_where_the_journal_says() {
        let over = |guest| SourceState::Over { guest, cause: None };
        let committing = SourceState::Committing {
            incarnation: None,
            guest_died: false,
        };
        let moving = SourceState::Moving { incarnation: None };
        for (state, guest) in [
            (moving, GuestLocation::Source),
            (over(GuestLocation::Source), GuestLocation::Source),
            (committing, GuestLocation::InDoubt),
            (over(GuestLocation::Destination), GuestLocation::Destination),
            (over(GuestLocation::Gone), GuestLocation::Gone),
        ] {
            let record = record(state);
            let failure = by_the_journal(Some(&record), QemuError::Replaced);
            assert_eq!(failure.guest, guest);
            let named = (guest != GuestLocation::Source).then_some(record.attempt);
            assert_eq!(failure.attempt, named);
            // It need not be the destination of the command that asks.
            let names_it = failure
                .to_string()
                .contains("the guest has left for host:1");
            assert_eq!(names_it, guest == GuestLocation::Destination, "{failure}");
        }
        let failure = by_the_journal(None, QemuError::Replaced);
        assert_eq!(failure.guest, GuestLocation::Source);
    }

    fn record(state: SourceState) -> Record<AtSource> {
        Record {
            attempt: AttemptId([1; 16]),
            began: 0,
            name: "guest".to_owned(),
            qemu: Instance::unknown(Path::new("/nowhere")),
            side: AtSource {
                to: "host:1".to_owned(),
                resume: true,
                confirmed: false,
            },
            state,
        }
    }
}
