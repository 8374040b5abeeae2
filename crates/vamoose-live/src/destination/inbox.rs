//! Events of the current attempt, and its control connections. What belongs to other attempts is answered here.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use handover::{AttemptId, DestinationMessage, Prepare, SourceMessage};
use tracing::warn;
use vamoose_link::{Stream, receive_until};

use super::{Event, past_attempts::PastAttempts, receiving::refuse_channel};
use crate::{DestinationError, chain, protocol::send};

pub(super) struct Inbox<'env> {
    events: Receiver<Event>,
    /// The control connections of the current attempt: one, and more if it was lost.
    controls: HashMap<u64, Arc<Stream>>,
    pub(super) past: &'env mut PastAttempts,
}

impl<'env> Inbox<'env> {
    pub(super) fn new(events: Receiver<Event>, past: &'env mut PastAttempts) -> Self {
        let controls = HashMap::new();
        Self {
            events,
            controls,
            past,
        }
    }

    /// The first source that offers its guest.
    ///
    /// # Errors
    /// When the VMM has cancelled.
    pub(super) fn wait_for_source(&mut self) -> Result<(AttemptId, Prepare), DestinationError> {
        loop {
            match self.wait(None)? {
                Some(Event::Connected {
                    number,
                    attempt,
                    message: SourceMessage::Prepare(prepare),
                    stream,
                }) if !self.past.knows(attempt) => {
                    self.controls.insert(number, stream);
                    return Ok((attempt, prepare));
                }
                Some(Event::Connected {
                    attempt,
                    message,
                    stream,
                    ..
                }) => self.answer(attempt, message, &stream),
                Some(Event::Channel(_, stream)) => refuse_channel(&stream),
                Some(Event::Cancelled) => return Err(DestinationError::Cancelled),
                _ => {}
            }
        }
    }

    /// The next event of `current`; `None` when `deadline` has passed.
    pub(super) fn next(
        &mut self,
        current: AttemptId,
        deadline: Option<Instant>,
    ) -> Result<Option<Event>, DestinationError> {
        loop {
            match self.wait(deadline)? {
                Some(Event::Connected {
                    number,
                    attempt,
                    message,
                    stream,
                }) => {
                    if attempt == current {
                        self.controls.insert(number, stream);
                        return Ok(Some(Event::Message(number, message)));
                    }
                    self.answer(attempt, message, &stream);
                }
                Some(Event::Channel(initial, stream)) if initial.uuid() != current.0 => {
                    refuse_channel(&stream);
                }
                Some(
                    Event::Message(number, _)
                    | Event::State(number, _)
                    | Event::Disconnected(number, _),
                ) if !self.controls.contains_key(&number) => {}
                event => return Ok(event),
            }
        }
    }

    /// Sends `message` on all control connections of the attempt. If it does not arrive, the source asks again.
    pub(super) fn send(&self, message: &DestinationMessage) {
        for control in self.controls.values() {
            if let Err(error) = send(control, message) {
                warn!("cannot send {message:?} to the source: {}", chain(&error));
                // Its thread reports that it has ended.
                control.shut_down();
            }
        }
    }

    /// Forgets a control connection that has ended.
    pub(super) fn forget(&mut self, number: u64) {
        self.controls.remove(&number);
    }

    /// What is sent from now on fails after `timeout`.
    pub(super) fn limit_sending(&self, timeout: Duration) {
        for control in self.controls.values() {
            let _ = control.set_stall_timeout(timeout);
        }
    }

    /// Answers for an attempt that is not the current one, once for each connection.
    fn answer(&mut self, attempt: AttemptId, message: SourceMessage, stream: &Stream) {
        if let Some(answer) = self.past.answer(attempt, message)
            && let Err(error) = send(stream, &answer)
        {
            warn!("cannot answer for attempt {attempt}: {}", chain(&error));
        }
        stream.shut_down();
    }

    /// The next event of any attempt; `None` when `deadline` has passed.
    fn wait(&self, deadline: Option<Instant>) -> Result<Option<Event>, DestinationError> {
        match receive_until(&self.events, deadline) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(io::Error::from(io::ErrorKind::BrokenPipe).into())
            }
        }
    }
}
