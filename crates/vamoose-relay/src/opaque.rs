//! Forwards connections as bytes: a migration without multifd or with QEMU's TLS, and all other protocols at a gateway. Between two
//! relays the bytes travel in blocks, compressed ([`ByteWriter`](vamoose_link::ByteWriter)), unless it is QEMU's TLS.
//!
//! Each connection of the source becomes one connection to the destination. With TLS, the client sends first, and the destination
//! is dialled then. All other connections are dialled at once, one after the other, because a QEMU takes the first connection for
//! the main stream. A connection that follows the main stream (postcopy preemption) may be idle for long. It is closed if it
//! begins a migration of its own, or if the destination does not accept it.

use std::{
    mem,
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use multifd::MAIN_MAGIC;
use tracing::{Span, debug, info, warn};
use vamoose_link::{Pacer, Stream};

use crate::{
    Milestone, Outcome, Relay, RelayError, Summary, chain,
    first_bytes::{
        Arrivals, BLOCKS_MAGIC, FirstBytes, UnclassifiedConnection, classify, may_be_post_copy,
    },
    main_stream::{ByteEnd, MainState, NoWitness, ReturnWitness, Witness, Write, forward},
};

/// The kind of connections that are forwarded as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opaque {
    /// A migration with QEMU's TLS.
    Tls,
    /// A migration without channels.
    Single,
    /// A migration without channels, or whose channels are late.
    PerhapsSingle,
    /// Post-copy that is resumed: the first connection goes on with the main stream, without its magic.
    Resumed,
    /// Unknown. One connection may fail without the others.
    Bytes,
}

impl Opaque {
    /// Whether bytes travel in blocks between two relays. TLS does not: a relay must see what it is.
    fn is_in_blocks(self) -> bool {
        self != Self::Tls
    }

    /// Whether connections beside the main stream are for pages that a guest waits for under post-copy.
    fn has_urgent_pages(self) -> bool {
        matches!(self, Self::Single | Self::PerhapsSingle | Self::Resumed)
    }
}

/// Interval at which the threads' reports are read while no connection arrives.
const TICK: Duration = Duration::from_millis(50);

enum Report {
    /// A connection ended without an error.
    Ended,
    Failed(RelayError),
    /// The destination has loaded the guest.
    Loaded,
}

/// Forwards connections of this kind, of which none has come yet, until all have ended and there are `no_more`.
pub(crate) fn pass_bytes(
    relay: &Relay<'_>,
    kind: Opaque,
    no_more: &mut dyn FnMut() -> bool,
) -> Result<Summary, RelayError> {
    pass(relay, None, Vec::new(), kind, Instant::now(), no_more)
}

/// Forwards the connections of a migration, until all have ended and there are `no_more`.
pub(crate) fn pass(
    relay: &Relay<'_>,
    main: Option<Arc<Stream>>,
    others: Vec<UnclassifiedConnection>,
    kind: Opaque,
    start: Instant,
    no_more: &mut dyn FnMut() -> bool,
) -> Result<Summary, RelayError> {
    let (report, reports) = channel();
    let (mut open, mut loaded, mut failed) = (0, false, None);
    let mut arrivals = Arrivals::new(relay.accept, relay.hangup, others);
    let mut setup_time = None;
    let pacer = relay.pacer();
    (relay.reached)(Milestone::Last);
    let outcome = thread::scope(|scope| {
        let begin = |stream, first: Vec<u8>, is_main, is_urgent| {
            let connection = Connection {
                relay,
                pacer: pacer.clone(),
                near: near_end(stream, &first, kind, is_main),
                first,
                kind,
                is_main,
                is_urgent,
                report: report.clone(),
            };
            let far = connection.dial();
            let span = Span::current();
            scope.spawn(move || span.in_scope(|| connection.run(far)));
        };
        let run = || -> Result<Outcome, RelayError> {
            if let Some(main) = main {
                open += 1;
                let first = MAIN_MAGIC.to_be_bytes().to_vec();
                begin(main, first, kind != Opaque::Tls, false);
            }
            loop {
                arrivals.accept_all()?;
                for mut connection in mem::take(&mut arrivals.unclassified) {
                    if relay.hangup.is_hung_up() {
                        return Err(RelayError::Cancelled);
                    }
                    match client_begins(&mut connection, kind, relay.accept.is_shared()) {
                        Some(true) => {
                            open += 1;
                            let first = connection.bytes().to_vec();
                            let follows_main = open > 1 && kind.has_urgent_pages();
                            begin(connection.stream, first, false, follows_main);
                        }
                        Some(false) => {}
                        None => arrivals.unclassified.push(connection),
                    }
                }
                setup_time.get_or_insert_with(|| start.elapsed());
                for end in reports.try_iter() {
                    match end {
                        Report::Ended => open -= 1,
                        Report::Failed(error) if loaded => {
                            let error = chain(&error);
                            debug!("a connection broke after the guest had been loaded: {error}");
                            open -= 1;
                        }
                        Report::Failed(error) if kind == Opaque::Bytes => {
                            info!("a connection broke: {}", chain(&error));
                            failed.get_or_insert(error);
                            open -= 1;
                        }
                        Report::Failed(error) => return Err(error),
                        Report::Loaded => {
                            loaded = true;
                            (relay.reached)(Milestone::Loaded);
                        }
                    }
                }
                if relay.hangup.is_hung_up() {
                    // The migration may have ended because of that.
                    let lost = failed.take().filter(|it| it.lost_connection().is_some());
                    return Err(lost.unwrap_or(RelayError::Cancelled));
                }
                let is_undecided = kind != Opaque::Tls && !arrivals.unclassified.is_empty();
                if open == 0 && !is_undecided && no_more() {
                    return match kind {
                        _ if loaded => Ok(Outcome::Loaded),
                        Opaque::Bytes => failed.take().map_or(Ok(Outcome::Unseen), Err),
                        Opaque::Tls | Opaque::Resumed => Ok(Outcome::Unseen),
                        Opaque::Single | Opaque::PerhapsSingle => Ok(Outcome::Unconfirmed),
                    };
                }
                arrivals.wait(Some(Instant::now() + TICK))?;
            }
        };
        let outcome = run();
        relay.hangup.hang_up();
        pacer.close();
        outcome
    })?;
    Ok(Summary {
        outcome,
        incoming_channels: 0,
        outgoing_channels: 0,
        setup_time: setup_time.unwrap_or_default(),
        total_time: start.elapsed(),
        switchover: None,
    })
}

/// Whether to forward a connection; `None` if that is not known yet.
fn client_begins(
    connection: &mut UnclassifiedConnection,
    kind: Opaque,
    is_shared: bool,
) -> Option<bool> {
    match kind {
        Opaque::Tls => begins_tls(connection),
        _ if is_shared && connection.bytes().is_empty() => belongs(connection, kind),
        _ => Some(true),
    }
}

/// Whether a connection of a migration with TLS begins with a handshake.
fn begins_tls(connection: &mut UnclassifiedConnection) -> Option<bool> {
    if connection.first() == Some(FirstBytes::Tls) {
        return Some(true);
    }
    if !connection.read() {
        debug!("a connection was closed before its first bytes");
        return Some(false);
    }
    let is_tls = connection.first()? == FirstBytes::Tls;
    if !is_tls {
        warn!("turning away a connection: the migration uses TLS and this connection does not");
    }
    Some(is_tls)
}

/// Whether to forward a connection at a shared socket. One that ends at once is not forwarded; beside a main stream, only a channel
/// for post-copy is.
fn belongs(connection: &UnclassifiedConnection, kind: Opaque) -> Option<bool> {
    let Some((first, bytes)) = connection.look() else {
        debug!("a connection was closed before its first bytes");
        return Some(false);
    };
    let is_foreign = match first? {
        _ if kind == Opaque::Bytes => false,
        FirstBytes::Tls => true,
        FirstBytes::Other => !may_be_post_copy(&bytes),
        FirstBytes::Main | FirstBytes::Channel | FirstBytes::Silent => false,
    };
    if is_foreign {
        warn!("turning away a stranger: its first bytes are {bytes:02x?}");
    }
    Some(!is_foreign)
}

/// The end at the source, of whose bytes `first` have been read.
fn near_end(stream: Arc<Stream>, first: &[u8], kind: Opaque, is_main: bool) -> ByteEnd {
    let in_blocks = kind.is_in_blocks() && stream.session().is_some();
    ByteEnd {
        stream,
        in_blocks,
        // Of a main stream, the magic is no block.
        before: match in_blocks && !is_main {
            true => first.to_vec(),
            false => Vec::new(),
        },
    }
}

struct Connection<'a> {
    relay: &'a Relay<'a>,
    /// Shared by all connections.
    pacer: Arc<Pacer>,
    near: ByteEnd,
    /// What has been read from the source: bytes of the program, unless the source's end is in blocks.
    first: Vec<u8>,
    kind: Opaque,
    /// Whether this is a main stream in plain text, with a return path.
    is_main: bool,
    /// Whether it is for pages that a guest waits for, which do not wait for the bandwidth limit.
    is_urgent: bool,
    report: Sender<Report>,
}

impl Connection<'_> {
    /// Opens the connection to the destination, with the first bytes, if these are not sent as a block.
    fn dial(&self) -> Result<ByteEnd, RelayError> {
        let in_blocks = self.kind.is_in_blocks() && !self.relay.dialer.is_to_qemu();
        let first = match (in_blocks, self.is_main) {
            (true, true) => &BLOCKS_MAGIC[..],
            (true, false) => &[],
            (false, true) => &MAIN_MAGIC.to_be_bytes(),
            (false, false) => self.first_bytes(),
        };
        let stream = self.relay.dial_one(first)?;
        if let Some(session) = self.relay.dialer.with() {
            self.pacer.follow(session);
        }
        Ok(ByteEnd {
            stream,
            in_blocks,
            before: Vec::new(),
        })
    }

    /// The program's bytes that have been read, without a main stream's magic.
    fn first_bytes(&self) -> &[u8] {
        match self.is_main || self.near.in_blocks {
            true => &[],
            false => &self.first,
        }
    }

    /// Forwards to `far`, the connection to the destination.
    fn run(self, far: Result<ByteEnd, RelayError>) {
        let end = match far.and_then(|far| self.pass(&far)) {
            Ok(()) => Report::Ended,
            Err(error) if self.is_foreign(&error) => {
                warn!("turning away a connection: {}", chain(&error));
                Report::Ended
            }
            Err(error) => Report::Failed(error),
        };
        self.report(end);
    }

    /// Whether this failure shows that the connection does not belong to the migration.
    fn is_foreign(&self, error: &RelayError) -> bool {
        let is_refused = matches!(error, RelayError::Socket(_) | RelayError::Session(_));
        let follows_main = !self.is_main && self.follows_main();
        matches!(error, RelayError::Busy) || follows_main && is_refused
    }

    /// Whether there is a main stream in plain text.
    fn follows_main(&self) -> bool {
        matches!(self.kind, Opaque::Single | Opaque::PerhapsSingle)
    }

    fn pass(&self, far: &ByteEnd) -> Result<(), RelayError> {
        let (config, stats) = (self.relay.config, self.relay.stats);
        let pacer = (!self.is_urgent).then_some(&self.pacer);
        let settings = (&config.method, stats, pacer);
        // Otherwise the connection was opened with these.
        let first = match far.in_blocks {
            true => self.first_bytes(),
            false => &[],
        };
        if !self.follows_main() {
            self.reset_at_end(far, true);
            forward(&self.near, far, first, settings, NoWitness, NoWitness)?;
            self.reset_at_end(far, false);
            return Ok(());
        }
        let main = MainState::default();
        let there = FirstPiece {
            main: &main,
            kind: self.kind,
            at_start: !self.is_main && self.first_bytes().is_empty(),
        };
        let ends = [&*self.near.stream, &*far.stream];
        let back = ReturnWitness::new(&main, ends, stats, |code| match code {
            _ if !self.is_main => {}
            0 => self.report(Report::Loaded),
            code => self.report(Report::Failed(RelayError::Refused(code))),
        });
        forward(&self.near, far, first, settings, there, back)?;
        if self.is_main {
            main.verdict()?;
        }
        Ok(())
    }

    /// Lets a program of an unknown protocol tell a failure from the end of the bytes: to Cloud Hypervisor, an orderly end within
    /// memory is no end at all.
    fn reset_at_end(&self, far: &ByteEnd, resets: bool) {
        if self.kind == Opaque::Bytes {
            self.near.stream.reset_at_end(resets);
            far.stream.reset_at_end(resets);
        }
    }

    fn report(&self, report: Report) {
        // The receiver may have returned already.
        let _ = self.report.send(report);
    }
}

/// Records the state of the main stream, and rejects a later connection that begins another migration.
struct FirstPiece<'a> {
    main: &'a MainState,
    kind: Opaque,
    at_start: bool,
}

impl Witness for FirstPiece<'_> {
    fn pass(&mut self, piece: &[u8], write: Write<'_>) -> Result<(), RelayError> {
        self.main.received(piece);
        if mem::take(&mut self.at_start) {
            match classify(piece, true) {
                Some(FirstBytes::Channel) if self.kind == Opaque::PerhapsSingle => {
                    return Err(RelayError::LateChannel);
                }
                Some(FirstBytes::Main | FirstBytes::Channel) => return Err(RelayError::Busy),
                _ => {}
            }
        }
        write(piece)
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::net::UnixStream};

    use vamoose_link::Socket;

    use super::*;

    /// The decision on a connection that was accepted `ago` and has sent `bytes`, or has ended if `None`.
    fn begins(bytes: Option<&[u8]>, ago: Duration, kind: Opaque, is_shared: bool) -> Option<bool> {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        let stream = Arc::new(Stream::Socket(Socket::Unix(ours)));
        let mut connection = UnclassifiedConnection::new(stream);
        connection.since -= ago;
        match bytes {
            Some(bytes) => theirs.write_all(bytes).unwrap(),
            None => theirs.shutdown(std::net::Shutdown::Both).unwrap(),
        }
        client_begins(&mut connection, kind, is_shared)
    }

    #[test]
    fn foreign_connection_to_shared_socket_is_not_forwarded() {
        use Opaque::{Bytes, PerhapsSingle, Single};
        let (now, ago) = (Duration::ZERO, Duration::from_secs(1));
        for kind in [Single, PerhapsSingle, Bytes] {
            // A port scanner, a silent connection, and a connection whose server speaks first.
            assert_eq!(begins(None, now, kind, true), Some(false));
            assert_eq!(begins(Some(b""), now, kind, true), None);
            assert_eq!(begins(Some(b""), ago, kind, true), Some(true));
            assert_eq!(begins(Some(&[0, 0, 1, 0]), now, kind, true), Some(true));
            for stranger in [&b"GET / HTTP/1.1"[..], &[0x16, 3, 1]] {
                let begun = begins(Some(stranger), now, kind, true);
                assert_eq!(begun, Some(kind == Bytes), "{kind:?} {stranger:?}");
            }
            // At the migration's own socket, connections are dialled in the order in which they arrive.
            assert_eq!(begins(Some(b""), now, kind, false), Some(true));
        }
    }
}
