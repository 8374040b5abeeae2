//! Accepts and identifies connections, and receives the messages of control connections, for the duration of an
//! attempt.

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::SyncSender,
    },
    thread::{self, Scope},
    time::{Duration, Instant},
};

use handover::SourceMessage;
use rustix::event::{PollFd, PollFlags};
use tracing::warn;
use vamoose_link::{Conversation, ConversationError, Hangup, wait_until};

use super::{Acceptor, Connection, Event};
use crate::{
    DestinationError, chain,
    protocol::{Purpose, UnknownConnection},
    spans::in_span,
};

/// Most unidentified connections at a time.
const MAX_UNIDENTIFIED: usize = 256;

/// How long to wait when no connection can be accepted: the system is out of descriptors or memory.
const BACK_OFF: Duration = Duration::from_millis(100);

/// Shared by the threads of all connections.
#[derive(Clone)]
pub(super) struct Connections {
    pub(super) events: SyncSender<Event>,
    /// Most bytes of device state.
    pub(super) max_state: u64,
    pub(super) stall_timeout: Duration,
    pub(super) unidentified: Arc<AtomicUsize>,
}

/// Accepts connections until `hangup` ends the attempt, or `closing` all attempts.
pub(super) fn run<'scope, 'env: 'scope>(
    acceptor: &'env Acceptor,
    hangup: &'env Hangup,
    closing: &Hangup,
    connections: &Connections,
    scope: &'scope Scope<'scope, 'env>,
) {
    let (mut cancelled, mut backs_off, mut number) = (false, false, 0);
    loop {
        let mut fds = vec![PollFd::from_borrowed_fd(hangup.as_fd(), PollFlags::IN)];
        if !backs_off {
            fds.push(PollFd::from_borrowed_fd(acceptor.as_fd(), PollFlags::IN));
        }
        if !cancelled {
            fds.push(PollFd::from_borrowed_fd(closing.as_fd(), PollFlags::IN));
        }
        // A failed wait is treated like a timeout.
        let _ = wait_until(&mut fds, backs_off.then(|| Instant::now() + BACK_OFF));
        if hangup.is_hung_up() {
            return;
        }
        if !cancelled && closing.is_hung_up() {
            cancelled = true;
            let _ = connections.events.send(Event::Cancelled);
            // If the guest already runs here, its source still has to be answered.
            continue;
        }
        match acceptor.try_accept() {
            Ok(Some((stream, session))) => {
                number += 1;
                let stream = Arc::new(stream);
                let connection = Connection { stream, session };
                identify(connection, number, hangup, connections, scope);
                backs_off = false;
            }
            Ok(None) => backs_off = false,
            // Waiting connections are accepted later. A guest is in doubt until its source is answered.
            Err(error) => {
                if !backs_off {
                    warn!("{}: trying again", chain(&error));
                }
                backs_off = true;
            }
        }
    }
}

/// Receives from a connection on a separate thread, so that an idle peer delays no other.
fn identify<'scope>(
    connection: Connection,
    number: u64,
    hangup: &Hangup,
    connections: &Connections,
    scope: &'scope Scope<'scope, '_>,
) {
    if connections.unidentified.fetch_add(1, Ordering::Relaxed) >= MAX_UNIDENTIFIED {
        connections.unidentified.fetch_sub(1, Ordering::Relaxed);
        warn!("too many connections without a first message: one is refused");
        return;
    }
    hangup.register(&connection.stream);
    let serve = {
        let connections = connections.clone();
        in_span(move || connections.serve(connection, number))
    };
    if let Err(error) = thread::Builder::new().spawn_scoped(scope, serve) {
        connections.unidentified.fetch_sub(1, Ordering::Relaxed);
        warn!("a connection was refused: {}", chain(&error));
    }
}

impl Connections {
    fn serve(&self, connection: Connection, number: u64) {
        let opened = self.open(connection, number);
        self.unidentified.fetch_sub(1, Ordering::Relaxed);
        match opened {
            Err(error) => warn!("a connection was ignored: {}", chain(&error)),
            Ok((event, control)) => {
                // The coordinator is gone when the attempt is over.
                if self.events.send(event).is_ok()
                    && let Some(control) = control
                {
                    self.receive(number, control);
                }
            }
        }
    }

    /// Reads a connection's first bytes, and the first message of a control connection.
    fn open(
        &self,
        connection: Connection,
        number: u64,
    ) -> Result<(Event, Option<Conversation>), UnknownConnection> {
        let stall_timeout = connection.stream.set_stall_timeout(self.stall_timeout);
        stall_timeout.map_err(ConversationError::from)?;
        let mut control = Conversation::new(connection.stream.clone());
        match Purpose::read(&mut control)? {
            Purpose::Channel(initial) => Ok((Event::Channel(initial, connection), None)),
            Purpose::Control(attempt) => {
                let message = control.receive_soon()?;
                let event = Event::Connected {
                    number,
                    attempt,
                    message,
                    connection,
                };
                Ok((event, Some(control)))
            }
        }
    }

    /// Receives a source's messages, until the connection ends.
    fn receive(&self, number: u64, mut control: Conversation) {
        let mut left = self.max_state;
        let mut bytes = |control: &mut Conversation, len: u64| {
            let max = self.max_state;
            let within = left.checked_sub(len).zip(usize::try_from(len).ok());
            let (rest, len) = within.ok_or(DestinationError::StateLength { len, max })?;
            left = rest;
            Ok(control.receive_bytes(len)?)
        };
        loop {
            let event = match control.receive() {
                Ok(SourceMessage::State { len }) => {
                    bytes(&mut control, len).map(|state| Event::State(number, state))
                }
                Ok(SourceMessage::StatePart { len }) => {
                    bytes(&mut control, len).map(|part| Event::Part(number, part))
                }
                Ok(message) => Ok(Event::Message(number, message)),
                Err(error) => Err(DestinationError::from(error)),
            };
            let event = event.unwrap_or_else(|error| Event::Disconnected(number, error));
            let last = matches!(event, Event::Disconnected(..));
            if self.events.send(event).is_err() || last {
                return;
            }
        }
    }
}
