//! Takes connections and finds out what they are, for as long as an attempt lasts.

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::Sender,
    },
    thread::Scope,
};

use rustix::event::{PollFd, PollFlags, poll};
use tracing::warn;
use transfer::{Hangup, Listener, Stream};

use super::Event;
use crate::{DestinationError, protocol::Opening};

/// Most connections that may be opened at once and have not said what they are.
const MOST_UNKNOWN: usize = 256;

/// Accepts connections until `hangup` ends the attempt, or `closing` all attempts.
pub(super) fn run<'scope, 'env: 'scope>(
    listener: &'env Listener,
    hangup: &'env Hangup,
    closing: &Hangup,
    events: &Sender<Event>,
    scope: &'scope Scope<'scope, 'env>,
) {
    let unknown = Arc::new(AtomicUsize::new(0));
    let mut cancelled = false;
    loop {
        let mut fds = vec![
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(hangup.as_fd(), PollFlags::IN),
        ];
        if !cancelled {
            fds.push(PollFd::from_borrowed_fd(closing.as_fd(), PollFlags::IN));
        }
        // Interrupted: look again.
        let _ = poll(&mut fds, None);
        if hangup.is_hung_up() {
            return;
        }
        if !cancelled && closing.is_hung_up() {
            cancelled = true;
            let _ = events.send(Event::Cancelled);
            // A guest that runs here already has to be answered for.
            continue;
        }
        match listener.try_accept() {
            Ok(Some(stream)) => greet(Arc::new(stream), &unknown, hangup, events, scope),
            Ok(None) => {}
            Err(error) => {
                let _ = events.send(Event::Deaf(DestinationError::Socket(error)));
                return;
            }
        }
    }
}

/// Hears the first bytes of a connection, on a thread of its own: a peer that says nothing holds up nobody.
fn greet<'scope>(
    stream: Arc<Stream>,
    unknown: &Arc<AtomicUsize>,
    hangup: &Hangup,
    events: &Sender<Event>,
    scope: &'scope Scope<'scope, '_>,
) {
    if unknown.fetch_add(1, Ordering::Relaxed) >= MOST_UNKNOWN {
        unknown.fetch_sub(1, Ordering::Relaxed);
        warn!("too many connections that say nothing: one is refused");
        return;
    }
    hangup.register(&stream);
    let (unknown, events) = (unknown.clone(), events.clone());
    scope.spawn(move || {
        let opening = Opening::read(&stream);
        unknown.fetch_sub(1, Ordering::Relaxed);
        match opening {
            // Nobody listens any more when the attempt is over.
            Ok(opening) => drop(events.send(Event::Opened(opening, stream))),
            Err(error) => warn!("a connection was ignored: {error}"),
        }
    });
}
