//! Earlier attempts of the same QEMU. An unfinished one is finished first. One that has taken the guest away is reported.

use std::time::Instant;

use handover::{DestinationMessage, FoundGuest, GuestLocation, SourceMessage, SourceState};
use tracing::info;

use super::{
    Cause, Ended, Failure, Migration, Moved, News, SourceQemu, at_source,
    hand_over::{Attempt, HandOver, stands_still},
    span,
};
use crate::{
    Instance, Journal, JournalError, chain,
    control::{ControlError, ask},
    journal::{AtSource, Record},
    qemu::QemuError,
    settle::is_by_hand,
};

impl Migration<'_> {
    /// Finishes an unfinished attempt of this QEMU, or reports what became of a guest that has left. `None` when the guest is
    /// here and a new attempt may begin.
    pub(super) fn finish_earlier(
        &self,
        journal: &Journal,
        source: &mut SourceQemu,
        observe: &mut dyn FnMut(News<'_>),
    ) -> Result<Option<Moved>, Failure> {
        let known = journal.records::<AtSource>().map_err(at_source)?;
        let of_this = |record: &&Record<AtSource>| record.qemu.is_same(&source.instance);
        let known: Vec<_> = known.iter().filter(of_this).collect();
        if let Some(unfinished) = known.iter().find(|record| !record.is_over()) {
            match self.go_on(journal, unfinished, Some(source), observe) {
                Err(failure) if failure.guest == GuestLocation::Source && !self.is_cancelled() => {
                    let now = journal.find::<AtSource>(unfinished.attempt);
                    if !now.map_err(at_source)?.is_some_and(|now| now.is_over()) {
                        return Err(failure);
                    }
                    info!("an earlier attempt is over: {}", chain(&failure));
                }
                ended => return ended.map(Some),
            }
            source.look().map_err(at_source)?;
            return Ok(None);
        }
        let last = known.last().copied();
        source.look().map_err(|error| by_the_journal(last, error))?;
        let has_sent = source.qemu.has_sent_its_guest();
        let of_paused = last.filter(|_| !source.is_wanted);
        if !has_sent.map_err(|error| by_the_journal(of_paused, error))? {
            return Ok(None);
        }
        match last {
            Some(record) if record.state.guest() != GuestLocation::Source => {
                self.after(journal, record).map(Some)
            }
            // The guest came back, paused as its owner had it.
            Some(record) if !record.side.resume => Err(at_source(QemuError::SentBefore)),
            _ => Err(Failure {
                cause: Cause::NotInJournal,
                guest: GuestLocation::Gone,
                is_running: false,
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
        observe: &mut dyn FnMut(News<'_>),
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
                source.is_held = entry.record.side.held;
                let is_here = match entry.record.state {
                    SourceState::Committing { .. } | SourceState::Supplying => {
                        source.has_come_back()
                    }
                    ref state => {
                        // QEMU may be past the switch to post-copy, and not say so yet. Before it, no `commit` has been sent.
                        let may_switch = matches!(state, SourceState::Switching { .. });
                        let cancel = (!may_switch).then_some(self.cancel);
                        source.wait_until_ended(cancel).map(|completed| !completed)
                    }
                };
                match is_here.map_err(|error| unfinished(error.into(), guest))? {
                    true => FoundGuest::Here,
                    false => FoundGuest::Sent { confirmed },
                }
            }
        };
        let attempt = Attempt::new(entry, &to, self.downtime_max, self.cancel);
        let mut attempt = HandOver::take_up(attempt, found);
        let decision = match attempt.is_under_post_copy() && source.is_some() {
            // The memory first: the destination's QEMU may not answer without it.
            true => attempt.decision(),
            false => attempt.drive(source.as_deref_mut()),
        };
        self.conclude(attempt, decision, source, Ended::default(), start, observe)
    }

    /// What became of a guest that has left this QEMU.
    fn after(&self, journal: &Journal, record: &Record<AtSource>) -> Result<Moved, Failure> {
        let failure = |cause, guest| Failure::of(record.attempt, cause, guest);
        let SourceState::Over { guest, cause } = record.state.clone() else {
            return Err(failure(Cause::NotInJournal, GuestLocation::InDoubt));
        };
        let before = |now: String| Cause::moved_before(record, now);
        match (guest, cause) {
            // It may lack memory for good.
            (GuestLocation::Destination, Some(cause)) if !is_by_hand(&cause) => {
                return Err(failure(Cause::broken(cause), guest));
            }
            (GuestLocation::Gone | GuestLocation::Lost, cause) => {
                return Err(failure(Cause::broken(cause.unwrap_or_default()), guest));
            }
            (GuestLocation::Destination, _) if self.is_asked_for(record) => {}
            (_, cause) => return Err(failure(before(cause.unwrap_or_default()), guest)),
        }
        let entry = journal.claim(record.clone());
        let entry = entry.map_err(|error| failure(error.into(), guest))?;
        let (now, guest) = match self.ask_after(&entry.record) {
            Ok(DestinationMessage::Running { state })
                if record.side.resume && stands_still(&state) =>
            {
                return Err(failure(Cause::StandsStill(state), guest));
            }
            Ok(DestinationMessage::Running { state }) => {
                info!(
                    "{}: attempt {} has moved the guest to {}, where it is {state}",
                    record.name, record.attempt, record.side.to
                );
                return Ok(Moved {
                    attempt: Some(record.attempt),
                    is_running: record.side.resume,
                    ..Moved::default()
                });
            }
            Ok(DestinationMessage::Ended { cause }) => (cause, GuestLocation::Lost),
            Ok(DestinationMessage::MovedOn) => (String::new(), GuestLocation::MovedOn),
            Ok(answer) => (format!("the destination answers {answer:?} now"), guest),
            Err(error) => {
                let now = format!("the destination cannot be asked now: {}", chain(&error));
                (now, guest)
            }
        };
        Err(failure(before(now), guest))
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

    /// Handles a source QEMU that cannot be reached: it may have ended during an attempt, or after one. The attempts of an ended
    /// QEMU say nothing about another QEMU that has taken over its monitor's path.
    pub(super) fn without_source(
        &self,
        journal: &Journal,
        error: QemuError,
    ) -> Result<Moved, Failure> {
        let known = journal.records::<AtSource>().map_err(at_source)?;
        let monitor_is_closed = error.is_monitor_closed();
        let last = |is_wanted: fn(&Instance) -> bool| {
            let mut records = known.iter();
            records.rfind(|record| record.qemu.monitor == self.qmp && is_wanted(&record.qemu))
        };
        let ended = last(Instance::has_ended);
        match ended.filter(|record| monitor_is_closed || record.qemu.has_its_place()) {
            Some(record) if !record.is_over() => self.go_on(journal, record, None, &mut |_| ()),
            Some(record) if record.state.guest() != GuestLocation::Source => {
                self.after(journal, record)
            }
            _ => Err(by_the_journal(last(Instance::has_its_place), error)),
        }
    }

    /// Reports earlier failed attempts to this destination. It could not be reached then, and may still hold a guest for them.
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
                    // The destination cannot be reached. The new attempt will report that.
                    break;
                }
                info!("attempt {id} is known to have failed there");
            }
        }
        Ok(())
    }
}

/// The failure for a source that cannot be asked: the guest is where the last attempt of this QEMU left it.
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use handover::AttemptId;

    use super::*;

    #[test]
    fn journal_locates_the_guest_of_an_unreachable_source() {
        let over = |guest| SourceState::Over { guest, cause: None };
        let committing = SourceState::Committing {
            incarnation: None,
            guest_died: false,
            post_copy: false,
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
                held: false,
                confirmed: false,
            },
            state,
        }
    }
}
