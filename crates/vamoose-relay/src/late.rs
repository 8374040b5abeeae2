//! Handles connections that arrive during a multifd migration.
//!
//! ```text
//!  another migration's (main stream, channel, TLS):  closed at once, so that its QEMU does not wait
//!  a channel for post-copy (QEMU 10.1 and later):    forwarded in both directions
//!  other bytes:                                      closed
//!  nothing yet:                                      kept until bytes arrive
//! ```
//! A post-copy channel may be silent until the destination misses a page. It is dialled with its first bytes, so that the
//! destination never receives a foreign connection.

use std::{
    sync::Arc,
    thread::{self, Scope},
};

use tracing::{Span, debug, info, warn};
use vamoose_link::Stream;

use crate::{
    Relay, RelayError, chain,
    first_bytes::{Arrivals, Closes, FirstBytes, UnclassifiedConnection, may_be_post_copy},
    main_stream::{ByteEnd, NoWitness, forward},
};

/// Limit of silent connections. A source opens one.
const MOST_SILENT: usize = 16;

/// Handles new connections, and those in `silent`, until the migration ends.
pub(crate) fn attend(relay: &Relay<'_>, silent: Vec<UnclassifiedConnection>) {
    let mut arrivals = Arrivals::new(relay.accept, relay.hangup, silent);
    arrivals.closes = Closes::Newest;
    thread::scope(|scope| {
        while !relay.hangup.is_hung_up() {
            if let Err(error) = arrivals.accept_all() {
                warn!("no further connections: {}", chain(&error));
                return;
            }
            let unclassified = &mut arrivals.unclassified;
            unclassified.retain_mut(|connection| is_unclassified(scope, relay, connection));
            if unclassified.len() > MOST_SILENT {
                warn!("turning away a connection: {MOST_SILENT} others are silent");
                unclassified.truncate(MOST_SILENT);
            }
            if arrivals.wait(None).is_err() {
                return;
            }
        }
    });
}

/// Reads the bytes that have arrived, and handles the connection once it is classified. Returns whether it is still unclassified.
fn is_unclassified<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    relay: &'env Relay<'env>,
    connection: &mut UnclassifiedConnection,
) -> bool {
    if !connection.read() {
        debug!("a connection ended before its first bytes");
        return false;
    }
    let magic = match connection.first() {
        None => return true,
        Some(FirstBytes::Other) => connection.magic(),
        Some(_) => None,
    };
    match magic {
        Some(first) if may_be_post_copy(&first) => {
            let stream = connection.stream.clone();
            let span = Span::current();
            scope.spawn(move || span.in_scope(|| pass(relay, &stream, first)));
        }
        Some(magic) => {
            let error = RelayError::Garbage(magic);
            warn!("turning away a stranger: {}", chain(&error));
        }
        None => warn!("turning away a connection: {}", chain(&RelayError::Busy)),
    }
    false
}

/// Forwards a channel for post-copy until it ends. The QEMUs notice when it breaks, and recover by themselves.
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
    let settings = (&relay.config.method, relay.stats, None);
    let (near, far) = (ByteEnd::plain(near.clone()), ByteEnd::plain(far));
    if let Err(error) = forward(&near, &far, &[], settings, NoWitness, NoWitness) {
        debug!("a channel for post-copy broke: {}", chain(&error));
    }
}
