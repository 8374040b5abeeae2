//! The hand-over: carries out the decisions of [`handover::Source`], from the moment that the guest has stopped or the migration
//! has failed, until it is decided where the guest is.

use std::{
    io, mem, thread,
    time::{Duration, Instant},
};

use handover::{
    Decision, DestinationMessage, SourceDriver, SourceEvent, SourceHost, SourceMessage,
};
use tracing::warn;
use vamoose_link::{Conversation, ConversationError, SocketError, left};

use super::{Attempt, link::Link};
use crate::{SourceError, chain};

/// Timeout for an answer of the destination. The guest is paused meanwhile, and asking again does no harm.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

const ASK_INTERVAL: Duration = Duration::from_millis(200);

pub(super) struct HandOver<'l, 'scope, 'a> {
    attempt: &'l mut Attempt<'a>,
    link: &'l Link<'scope, 'a>,
    /// Replaces the link's control connection after that was lost.
    redialled: Option<Conversation>,
    dials: u32,
    /// How often `commit` was sent on the current connection.
    commits: u32,
    /// The destination has answered, but has not told where the guest is.
    ask_again: bool,
    deadline: Instant,
    /// The last event, for messages.
    last: String,
}

impl<'l, 'scope, 'a> HandOver<'l, 'scope, 'a> {
    pub(super) fn new(attempt: &'l mut Attempt<'a>, link: &'l Link<'scope, 'a>) -> Self {
        let deadline = Instant::now() + attempt.source.config.settle_time;
        Self {
            attempt,
            link,
            redialled: None,
            dials: 0,
            commits: 0,
            ask_again: false,
            deadline,
            last: "it does not answer".to_owned(),
        }
    }

    /// Carries out pending actions until it is decided where the guest is. Also returns the control connection, if it is not the
    /// link's.
    pub(super) fn run(mut self, driver: &mut SourceDriver) -> (Decision, Option<Conversation>) {
        let decision = driver.drive(&mut self, |host, _| host.receive());
        (decision, self.redialled)
    }

    fn receive(&mut self) -> SourceEvent {
        let Some(left) = self.time_left() else {
            return self.gave_up();
        };
        if mem::take(&mut self.ask_again) {
            thread::sleep(ASK_INTERVAL.min(left));
            return SourceEvent::AskAgain;
        }
        let received = match &mut self.redialled {
            None => self.link.receive("answered", left.min(ANSWER_TIMEOUT)),
            Some(control) => control.receive_soon().map_err(SourceError::from),
        };
        match received {
            Ok(message) => {
                self.ask_again = message != DestinationMessage::Starting;
                self.last = format!("it answered {message:?}");
                SourceEvent::Message(message)
            }
            Err(error) => {
                let complete = was_closed(&error, self.commits);
                self.last = chain(&error);
                SourceEvent::Closed { complete }
            }
        }
    }

    /// `None` when the settle time is over.
    fn time_left(&self) -> Option<Duration> {
        let left = left(self.deadline);
        (left > Duration::from_millis(1)).then_some(left)
    }

    fn gave_up(&self) -> SourceEvent {
        let settle_time = self.attempt.source.config.settle_time;
        let last = &self.last;
        SourceEvent::GaveUp {
            cause: format!("no decisive answer within {settle_time:?}, last: {last}"),
        }
    }
}

/// There is no journal: this process has the guest, which ends with it.
impl SourceHost for HandOver<'_, '_, '_> {
    /// Ignores errors: only an answer counts.
    fn send(&mut self, message: &SourceMessage) -> Option<SourceEvent> {
        self.commits += u32::from(matches!(message, SourceMessage::Commit { .. }));
        let _ = match (&self.redialled, message) {
            (Some(control), _) => control.send(message).map_err(SourceError::from),
            (None, SourceMessage::Abort { .. }) => self.link.abort(message),
            (None, _) => self.link.send(message),
        };
        None
    }

    /// Connects again, at once the first time.
    fn dial(&mut self, _: &handover::Source) -> Option<SourceEvent> {
        let Some(left) = self.time_left() else {
            return Some(self.gave_up());
        };
        if self.dials == 0 {
            warn!(
                "the destination has not confirmed that the guest runs ({}): asking again",
                self.last
            );
        } else {
            thread::sleep(ASK_INTERVAL.min(left));
        }
        self.dials += 1;
        Some(match self.link.dial_again(left.min(ANSWER_TIMEOUT)) {
            Ok(control) => {
                self.redialled = Some(control);
                self.commits = 0;
                SourceEvent::Connected
            }
            Err(SourceError::Dial(SocketError { source, .. })) if is_refused(&source) => {
                self.last = "connection refused".to_owned();
                SourceEvent::ConnectionRefused
            }
            Err(error) => {
                self.last = chain(&error);
                // Nothing was asked on this connection, so no answer can have been lost.
                SourceEvent::Closed { complete: true }
            }
        })
    }

    fn resume(&mut self, _: &handover::Source) -> Option<SourceEvent> {
        Some(self.attempt.resume())
    }
}

/// Whether the destination's system has closed the connection, behind all messages that the destination had sent on it.
///
/// An end of file arrives in order. A reset can overtake messages that were lost on the way. But the system also resets a
/// connection on which the destination has left data unread. If that was the only `commit`, there was no
/// answer to it. Without an end or a reset it cannot be known.
fn was_closed(error: &SourceError, commits: u32) -> bool {
    match error {
        SourceError::Control(ConversationError::Closed | ConversationError::Cut) => true,
        SourceError::Control(error) => commits <= 1 && error.is_reset(),
        _ => false,
    }
}

/// Whether the error means that no process listens there.
fn is_refused(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        // The second one: a unix socket's file that was removed.
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
    )
}
