//! Passes a migration through unchanged: without multifd, or behind TLS.
//!
//! Each connection of the source becomes one to the destination. A connection of a TLS migration always sends
//! first and is dialled then. Plain ones are dialled at once, one after the other, because a QEMU takes the first to come for the main stream:
//! one that comes behind that (postcopy preemption) may stay idle for long; if it begins a migration
//! of its own, or the destination does not take it, it is turned away.

use std::{
    io::Read,
    mem,
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use multifd::{MAGIC, MAIN_MAGIC};
use rustix::event::{PollFd, PollFlags};
use tracing::{Span, debug, warn};
use vamoose_link::{Stream, wait_for};

use crate::{
    Direction, Outcome, Relay, RelayError, Summary,
    accept::Acceptor,
    chain,
    gather::Opaque,
    main_stream::{MainState, Pump, ReturnWitness, Witness, is_transient},
};

/// Runs the migration to its end: when every connection has ended.
pub(crate) fn pass_through(
    relay: &Relay<'_>,
    opened: Vec<(Arc<Stream>, Vec<u8>)>,
    kind: Opaque,
    start: Instant,
) -> Result<Summary, RelayError> {
    let is_tls = kind == Opaque::Tls;
    let (report, reports) = channel();
    let mut open = 0;
    let mut loaded = false;
    let mut setup_time = None;
    let outcome = thread::scope(|scope| {
        let run = || -> Result<Outcome, RelayError> {
            let mut opened = opened;
            let mut acceptor = Acceptor::new(relay.accept);
            loop {
                for (number, (stream, first)) in opened.drain(..).enumerate() {
                    let is_first = setup_time.is_none() && number == 0;
                    // An idle one may be none of the source's: it is not waited for.
                    open += usize::from(!first.is_empty() || !is_tls);
                    let connection = Connection {
                        relay,
                        stream,
                        first,
                        kind,
                        is_first,
                        report: report.clone(),
                    };
                    let far = (!is_tls).then(|| connection.dial());
                    let span = Span::current();
                    scope.spawn(move || span.in_scope(|| connection.run(far)));
                }
                setup_time.get_or_insert_with(|| start.elapsed());
                for end in reports.try_iter() {
                    match end {
                        Report::Began => open += 1,
                        Report::Ended => open -= 1,
                        Report::Loaded => {
                            loaded = true;
                            (relay.on_loaded)();
                        }
                        Report::MainEnded(verdict) if !loaded => {
                            verdict?;
                        }
                        Report::MainEnded(_) => {}
                        Report::Failed(error) if loaded => {
                            debug!(
                                "a connection ended out of order after loading: {}",
                                chain(&error)
                            );
                            open -= 1;
                        }
                        Report::Failed(error) => return Err(error),
                    }
                }
                if relay.hangup.is_hung_up() {
                    return Err(RelayError::Cancelled);
                }
                if open == 0 {
                    return Ok(match loaded {
                        true => Outcome::Loaded,
                        false if is_tls => Outcome::Unseen,
                        false => Outcome::Unconfirmed,
                    });
                }
                wait_for_connection(relay, &acceptor);
                while let Some(stream) = acceptor.next()? {
                    relay.hangup.register(&stream);
                    opened.push((stream, Vec::new()));
                }
            }
        };
        let outcome = run();
        relay.hangup.hang_up();
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

/// The first byte of a TLS connection.
const TLS_HANDSHAKE: u8 = 0x16;

/// How often the threads' reports are looked at while no connection comes.
const TICK: Duration = Duration::from_millis(50);

enum Report {
    /// A connection that had been idle has sent its first bytes.
    Began,
    /// A connection ended in good order.
    Ended,
    /// The destination has loaded the guest.
    Loaded,
    /// The main stream ended; this is what its end means for the migration.
    MainEnded(Result<Outcome, RelayError>),
    Failed(RelayError),
}

struct Connection<'a> {
    relay: &'a Relay<'a>,
    stream: Arc<Stream>,
    first: Vec<u8>,
    kind: Opaque,
    /// In plain text it is the main stream, on whose return path the destination sends.
    is_first: bool,
    report: Sender<Report>,
}

impl Connection<'_> {
    /// `far` is its connection to the destination, if it has been dialled.
    fn run(mut self, far: Option<Result<Arc<Stream>, RelayError>>) {
        if self.first.is_empty() && self.kind == Opaque::Tls {
            match self.read_first() {
                Ok(first) => self.first = first,
                Err(stranger) => {
                    if !self.relay.hangup.is_hung_up() {
                        warn!("turning away a connection: {stranger}");
                    }
                    return;
                }
            }
            self.report(Report::Began);
        }
        let far = far.unwrap_or_else(|| self.dial());
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

    /// Whether a connection that fails like this is none of the migration's.
    fn is_foreign(&self, error: &RelayError) -> bool {
        let is_refused = matches!(error, RelayError::Socket(_) | RelayError::Session(_));
        let is_late = !self.is_first && self.kind != Opaque::Tls;
        matches!(error, RelayError::Busy) || is_late && is_refused
    }

    fn is_main(&self) -> bool {
        self.is_first && self.kind != Opaque::Tls
    }

    fn dial(&self) -> Result<Arc<Stream>, RelayError> {
        let far = self.relay.dial_one(&self.first)?;
        self.relay.stats.add_sent(self.first.len());
        Ok(far)
    }

    fn pass(&self, far: &Arc<Stream>) -> Result<(), RelayError> {
        let main = MainState::default();
        let forward_witness = Opened {
            main: &main,
            kind: self.kind,
            at_start: self.first.is_empty(),
        };
        let return_witness = ReturnWitness::new(&main, |code| match code {
            _ if !self.is_main() => {}
            0 => self.report(Report::Loaded),
            code => self.report(Report::Failed(RelayError::Refused(code))),
        });
        let span = Span::current();
        thread::scope(|scope| {
            let pump = self.pump(Direction::Back, far, &self.stream);
            let back = scope.spawn(move || span.in_scope(|| pump.run(return_witness)));
            let pump = self.pump(Direction::Forward, &self.stream, far);
            let forward = pump.run(forward_witness);
            if forward.is_err() {
                far.shut_down();
                self.stream.shut_down();
            }
            // A thread that panicked has no verdict to add.
            forward.and(back.join().unwrap_or(Ok(())))
        })?;
        if self.is_main() {
            self.report(Report::MainEnded(main.verdict()));
        }
        Ok(())
    }

    fn pump(&self, direction: Direction, from: &Arc<Stream>, to: &Arc<Stream>) -> Pump<'_> {
        Pump {
            direction,
            from: from.clone(),
            to: to.clone(),
            stats: self.relay.stats,
            pacer: None,
            stall_timeout: self.relay.config.stall_timeout,
        }
    }

    fn report(&self, report: Report) {
        // The receiver may have seen enough and be gone.
        let _ = self.report.send(report);
    }

    /// Waits for the first bytes, without a limit. An error if they are not TLS: the connection is not the source's.
    fn read_first(&self) -> Result<Vec<u8>, &'static str> {
        let mut first = [0; 4];
        let read = loop {
            match (&*self.stream).read(&mut first) {
                Ok(read) => break read,
                Err(error) if is_transient(&error) => {}
                Err(_) => return Err("it failed before its first byte"),
            }
        };
        match &first[..read] {
            [] => Err("it was closed before its first byte"),
            first @ [TLS_HANDSHAKE, ..] => Ok(first.to_vec()),
            _ => Err("the migration uses TLS and this connection does not"),
        }
    }
}

/// Looks at how a connection goes forward.
struct Opened<'a> {
    main: &'a MainState,
    kind: Opaque,
    at_start: bool,
}

impl Witness for Opened<'_> {
    fn received(&mut self, piece: &[u8]) {
        self.main.received(piece);
    }

    fn pass(
        &mut self,
        piece: &[u8],
        write: &dyn Fn(&[u8]) -> Result<(), RelayError>,
    ) -> Result<(), RelayError> {
        if mem::take(&mut self.at_start) {
            let is_channel = piece.starts_with(&MAGIC.to_be_bytes());
            match self.kind {
                Opaque::PerhapsSingle if is_channel => return Err(RelayError::LateChannel),
                _ if is_channel || piece.starts_with(&MAIN_MAGIC.to_be_bytes()) => {
                    return Err(RelayError::Busy);
                }
                _ => {}
            }
        }
        write(piece)
    }
}

fn wait_for_connection(relay: &Relay<'_>, acceptor: &Acceptor<'_>) {
    let mut fds = vec![PollFd::new(relay.hangup, PollFlags::IN)];
    fds.extend(acceptor.poll_fd());
    // A wait that failed is as good as one that timed out.
    let _ = wait_for(&mut fds, TICK);
}
