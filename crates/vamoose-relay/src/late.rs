//! Connections that come when a multifd migration is under way.
//!
//! ```text
//!  another migration's (main stream, channel, TLS):  turned away at once, so that its QEMU need not wait
//!  a channel for post-copy (QEMU 10.1 and later):    passed on, both ways; it has no magic, but begins with the
//!                                                    offset of a page, whose highest two bytes are zero
//!  anything else, or nothing:                        turned away, or waited for
//! ```
//! A post-copy channel may be silent until the destination misses a page. It is dialled with its first bytes, so that the
//! destination is not given what is none.

use std::{
    sync::Arc,
    thread::{self, Scope},
    time::{Duration, Instant},
};

use multifd::{MAGIC, MAIN_MAGIC};
use rustix::event::{PollFd, PollFlags};
use tracing::{Span, debug, info, warn};
use vamoose_link::{Stream, wait_until};

use crate::{
    Relay, RelayError, accept::Acceptor, chain, gather::opening::Opening,
    main_stream::pass_both_ways,
};

/// Attends to them, and to those that were there before and have sent nothing, until the migration ends.
pub(crate) fn attend(relay: &Relay<'_>, mut opening: Vec<Opening>) {
    let mut acceptor = Acceptor::new(relay.accept);
    thread::scope(|scope| {
        while !relay.hangup.is_hung_up() {
            if let Err(error) = accept_all(relay, &mut acceptor, &mut opening) {
                warn!("no further connections: {}", chain(&error));
                return;
            }
            opening.retain_mut(|connection| is_waited_for(scope, relay, connection));
            if wait(relay, &acceptor, &opening).is_err() {
                return;
            }
        }
    });
}

/// How many may be silent at once: a source opens one.
const SILENT: usize = 16;

/// How often streams of a session are looked at, which cannot be polled.
const LOOK_EVERY: Duration = Duration::from_millis(5);

fn accept_all(
    relay: &Relay<'_>,
    acceptor: &mut Acceptor<'_>,
    opening: &mut Vec<Opening>,
) -> Result<(), RelayError> {
    while let Some(stream) = acceptor.next()? {
        if opening.len() >= SILENT {
            warn!("turning away a connection: {SILENT} others have not introduced themselves");
            continue;
        }
        relay.hangup.register(&stream);
        opening.push(Opening::new(stream));
    }
    Ok(())
}

fn wait(
    relay: &Relay<'_>,
    acceptor: &Acceptor<'_>,
    opening: &[Opening],
) -> Result<(), std::io::Error> {
    let mut fds = vec![PollFd::new(relay.hangup, PollFlags::IN)];
    fds.extend(acceptor.poll_fd());
    let sockets = opening.iter().map(|it| it.stream.socket());
    let is_looked_at = sockets.clone().any(|socket| socket.is_none());
    fds.extend(
        sockets
            .flatten()
            .map(|socket| PollFd::new(socket, PollFlags::IN)),
    );
    let look_at = is_looked_at.then(|| Instant::now() + LOOK_EVERY);
    wait_until(
        &mut fds,
        look_at.into_iter().chain(acceptor.again_at()).min(),
    )
    .map(drop)
}

/// Reads what has come. Whether it is still unknown what the connection is.
fn is_waited_for<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    relay: &'env Relay<'env>,
    connection: &mut Opening,
) -> bool {
    let magic = match connection.read() {
        Ok(true) if connection.is_tls() => None,
        Ok(true) => match connection.magic() {
            None => return true,
            magic => magic,
        },
        Ok(false) | Err(_) => {
            debug!("a connection ended before its first bytes");
            return false;
        }
    };
    match magic {
        Some(first @ [0, 0, ..]) => {
            let stream = connection.stream.clone();
            let span = Span::current();
            scope.spawn(move || span.in_scope(|| pass(relay, &stream, first)));
        }
        Some(magic) if !is_beginning(magic) => {
            warn!(
                "turning away a stranger: {}",
                chain(&RelayError::Garbage(magic))
            );
        }
        _ => warn!("turning away a connection: {}", chain(&RelayError::Busy)),
    }
    // A clone keeps the one that is passed on.
    false
}

fn is_beginning(magic: [u8; 4]) -> bool {
    [MAGIC, MAIN_MAGIC].contains(&u32::from_be_bytes(magic))
}

/// Passes a channel for post-copy on until it ends. If it breaks, the QEMUs notice, which know how to go on then.
fn pass(relay: &Relay<'_>, near: &Arc<Stream>, first: [u8; 4]) {
    let far = match relay.dial_one(&first) {
        Ok(far) => far,
        Err(error) => {
            warn!("turning away a connection: {}", chain(&error));
            near.shut_down();
            return;
        }
    };
    info!("passing a channel for post-copy on");
    relay.stats.add_received(first.len());
    relay.stats.add_sent(first.len());
    let stall_timeout = relay.config.stall_timeout;
    if let Err(error) = pass_both_ways(near, &far, relay.stats, stall_timeout) {
        debug!("a channel for post-copy broke: {}", chain(&error));
    }
}
