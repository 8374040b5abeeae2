//! Events of the current attempt, and its control connections. Messages of other attempts are answered here.

use std::{
    collections::HashMap,
    sync::mpsc::Receiver,
    time::{Duration, Instant},
};

use handover::{AttemptId, DestinationMessage, Prepare, SourceMessage};
use tracing::warn;
use vamoose_link::{Session, Stream, receive_until, send_message};

use super::{Connection, Event, past_attempts::PastAttempts, receiving::refuse_channel};
use crate::{DestinationError, chain};

pub(super) struct Inbox<'env> {
    events: Receiver<Event>,
    /// The control connections of the current attempt: several if one was lost.
    controls: HashMap<u64, Connection>,
    /// The session of the first control connection.
    session: Option<Session>,
    pub(super) past: &'env mut PastAttempts,
}

impl<'env> Inbox<'env> {
    pub(super) fn new(events: Receiver<Event>, past: &'env mut PastAttempts) -> Self {
        let controls = HashMap::new();
        Self {
            events,
            controls,
            session: None,
            past,
        }
    }

    /// Waits for the first source that offers its guest.
    ///
    /// # Errors
    /// When the VMM has cancelled.
    pub(super) fn wait_for_source(&mut self) -> Result<(AttemptId, Prepare), DestinationError> {
        loop {
            match self.wait(None) {
                Some(Event::Connected {
                    number,
                    attempt,
                    message: SourceMessage::Prepare(prepare),
                    connection,
                }) if !self.past.knows(attempt) => {
                    self.session.clone_from(&connection.session);
                    self.controls.insert(number, connection);
                    return Ok((attempt, prepare));
                }
                Some(Event::Connected {
                    attempt,
                    message,
                    connection,
                    ..
                }) => self.answer(attempt, message, &connection.stream),
                Some(Event::Channel(_, connection)) => refuse_channel(&connection.stream),
                Some(Event::Cancelled) => return Err(DestinationError::Cancelled),
                _ => {}
            }
        }
    }

    /// The next event of `current`; `None` when `deadline` has passed.
    pub(super) fn next(&mut self, current: AttemptId, deadline: Option<Instant>) -> Option<Event> {
        loop {
            match self.wait(deadline) {
                Some(Event::Connected {
                    number,
                    attempt,
                    message,
                    connection,
                }) => {
                    if attempt != current {
                        self.answer(attempt, message, &connection.stream);
                    } else if self.is_of_source(&connection) {
                        self.controls.insert(number, connection);
                        return Some(Event::Message(number, message));
                    } else {
                        warn!("refusing another peer than the source of attempt {current}");
                        connection.stream.shut_down();
                    }
                }
                Some(Event::Channel(initial, connection))
                    if initial.uuid() != current.0 || !self.is_in_session(&connection) =>
                {
                    refuse_channel(&connection.stream);
                }
                Some(
                    Event::Message(number, _)
                    | Event::State(number, _)
                    | Event::Part(number, _)
                    | Event::Disconnected(number, _),
                ) if !self.controls.contains_key(&number) => {}
                event => return event,
            }
        }
    }

    /// Sends `message` on all control connections of the attempt. If it is lost, the source asks again.
    pub(super) fn send(&self, message: &DestinationMessage) {
        for Connection { stream, .. } in self.controls.values() {
            if let Err(error) = send_message(stream, message) {
                warn!("cannot send {message:?} to the source: {}", chain(&error));
                // The connection's thread reports the end.
                stream.shut_down();
            }
        }
    }

    /// How much longer a message of the source may take, while a lost connection comes back.
    pub(super) fn reconnect_timeout(&self) -> Duration {
        let session = self.session.as_ref();
        session.map_or(Duration::ZERO, Session::reconnect_timeout)
    }

    /// Whether the connection's peer may decide about the guest. With authentication, only the peer that offered it may.
    fn is_of_source(&self, connection: &Connection) -> bool {
        let source = self.session.as_ref().and_then(Session::identity);
        let peer = connection.session.as_ref().and_then(Session::identity);
        source == peer
    }

    /// Whether the connection belongs to the session in which the guest was offered.
    fn is_in_session(&self, connection: &Connection) -> bool {
        match (&self.session, &connection.session) {
            (Some(session), Some(other)) => session.is(other),
            (session, other) => session.is_none() && other.is_none(),
        }
    }

    /// Forgets a control connection that has ended.
    pub(super) fn forget(&mut self, number: u64) {
        self.controls.remove(&number);
    }

    /// Makes further sends fail after `timeout`.
    pub(super) fn limit_sending(&self, timeout: Duration) {
        for Connection { stream, .. } in self.controls.values() {
            let _ = stream.set_stall_timeout(timeout);
        }
    }

    /// Answers for an attempt that is not the current one, once for each connection.
    fn answer(&mut self, attempt: AttemptId, message: SourceMessage, stream: &Stream) {
        if let Some(answer) = self.past.answer(attempt, message)
            && let Err(error) = send_message(stream, &answer)
        {
            warn!("cannot answer for attempt {attempt}: {}", chain(&error));
        }
        stream.shut_down();
    }

    /// The next event of any attempt; `None` when `deadline` has passed. The coordinator itself has a sender, so the channel is
    /// never disconnected.
    fn wait(&self, deadline: Option<Instant>) -> Option<Event> {
        receive_until(&self.events, deadline).ok()
    }
}
