//! The client of a session: connects new streams, and streams that lost their connection, over the session's paths.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use thiserror::Error;
use tracing::{debug, info, warn};
use vamoose_session::{
    handshake::{
        ATTACH_LEN, Answer, Attach, HELLO_LEN, HandshakeError, Hello, Intent, Offer, Refusal,
        Secret, Target, Transcript, Welcome,
    },
    stream::StreamError,
    window::AcknowledgeError,
};

use super::{
    PathStatus, Role, Route, Session, SessionConfig, Shared,
    connection::NewConnection,
    keeper,
    resumable::{OldConnection, Resumable, ResumableStream},
};
use crate::{
    Address, Socket, SocketError, Stream, TlsError, chain,
    dial::Destination,
    is_stall, left, lock, random_id, threads,
    timeouts::{ATTEMPT, HANDSHAKE, LAST_ATTEMPT, RETRY_PAUSES, SHUN},
    tls::ClientTerms,
};

/// A connection of a session could not be made.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say it")]
#[non_exhaustive]
pub enum DialError {
    #[error("a session needs a path")]
    NoPath,
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("cannot speak with {address}")]
    Io {
        address: Address,
        #[source]
        source: io::Error,
    },
    #[error("cannot speak with {address}")]
    Handshake {
        address: Address,
        #[source]
        source: HandshakeError,
    },
    #[error("cannot resume with {address}")]
    Acknowledge {
        address: Address,
        #[source]
        source: AcknowledgeError,
    },
    #[error("cannot set up TLS")]
    Security(#[source] TlsError),
    #[error("cannot speak with {address}")]
    Tls {
        address: Address,
        #[source]
        source: TlsError,
    },
    #[error("the system refused a thread")]
    System(#[source] io::Error),
    #[error("the stream has ended")]
    Ended,
    #[error("no connection within {seconds} s")]
    TimedOut { seconds: u64 },
}

impl DialError {
    /// Whether the peer's host refused the connection: there is no listener.
    pub fn is_connection_refused(&self) -> bool {
        matches!(self, Self::Socket(error) if error.source.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// Whether the peer did not answer in time.
    fn is_timeout(&self) -> bool {
        self.of_connection().is_some_and(is_stall)
    }

    /// Whether the peer closed the connection before sending anything: it may have been evicted for another connection.
    fn is_closed(&self) -> bool {
        self.of_connection().is_some_and(|error| {
            matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
            )
        })
    }

    /// Whether it looks as if one end used TLS and the other did not.
    pub fn is_about_tls(&self) -> bool {
        let is_tls = matches!(self, Self::Tls { .. });
        self.refusal() == Some(Refusal::Insecure) || is_tls && self.is_closed()
    }

    /// Whether it looks as if the peer was not Vamoose.
    pub fn is_about_port(&self) -> bool {
        match self {
            Self::Io { .. } => self.is_closed(),
            Self::Handshake { source, .. } => !matches!(source, HandshakeError::Refused(_)),
            _ => false,
        }
    }

    /// Whether the peer may be reachable soon: it is being started, or its network is not up yet.
    fn may_pass(&self) -> bool {
        let is_soon = |error: &SocketError| {
            !error.is_unknown_name()
                && matches!(
                    error.source.kind(),
                    io::ErrorKind::ConnectionRefused
                        | io::ErrorKind::HostUnreachable
                        | io::ErrorKind::NetworkUnreachable
                        | io::ErrorKind::NotFound
                )
        };
        self.is_timeout()
            || self.is_closed()
            || matches!(self, Self::Socket(error) if is_soon(error))
    }

    /// The connection's error, if the connection failed.
    fn of_connection(&self) -> Option<&io::Error> {
        match self {
            Self::Socket(SocketError { source, .. })
            | Self::Io { source, .. }
            | Self::Tls {
                source: TlsError::Handshake { source, .. },
                ..
            } => Some(source),
            _ => None,
        }
    }

    fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::Handshake {
                source: HandshakeError::Refused(refusal),
                ..
            } => Some(*refusal),
            _ => None,
        }
    }
}

/// The paths of a session and their recent failures.
pub(crate) struct Paths {
    list: Vec<KnownPath>,
    /// `None` without TLS.
    terms: Option<ClientTerms>,
    takes_store: bool,
    /// Connections of streams that are to be opened, in their handshake or after its first two messages.
    ahead: Mutex<HashMap<u32, GreetingThread>>,
}

type GreetingThread = JoinHandle<Result<Greeted, DialError>>;

struct KnownPath {
    path: Route,
    destination: Destination,
    delivered: AtomicU64,
    failures: AtomicU64,
    /// The last attempt was refused by the peer's host.
    is_refused: AtomicBool,
    shunned: Mutex<Option<Shunned>>,
}

/// A failed path: it is tried last for a while.
#[derive(Clone, Copy)]
struct Shunned {
    since: Instant,
    time: Duration,
}

impl Shunned {
    fn is_over(&self) -> bool {
        self.since.elapsed() >= self.time
    }
}

impl Paths {
    fn new(list: Vec<Route>, config: &SessionConfig) -> Result<Self, DialError> {
        let terms = config.security.client_terms(config.cipher);
        let terms = terms.map_err(DialError::Security)?;
        let list = list.into_iter().map(|path| KnownPath {
            destination: Destination::new(path.to.clone()),
            path,
            delivered: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            is_refused: AtomicBool::new(false),
            shunned: Mutex::default(),
        });
        Ok(Self {
            list: list.collect(),
            terms,
            takes_store: config.takes_store,
            ahead: Mutex::default(),
        })
    }

    /// Begins the handshakes of all but the first of a session's `streams`.
    fn greet_ahead(self: &Arc<Self>, streams: usize) {
        let streams = u32::try_from(streams).unwrap_or(u32::MAX);
        let mut ahead = lock(&self.ahead);
        for stream in 1..streams {
            let paths = self.clone();
            let own = keeper::own_path(stream, self.list.len());
            let greet = move || Greeted::new(&paths, own, ATTEMPT);
            // Without a thread, the connection is made when the stream is opened.
            if let Ok(greeting) = threads::spawn(greet) {
                ahead.insert(stream, greeting);
            }
        }
    }

    /// The connection that was made ahead for `stream`.
    fn take_ahead(&self, stream: u32) -> Option<Result<Greeted, DialError>> {
        let greeting = lock(&self.ahead).remove(&stream);
        greeting.and_then(|greeting| greeting.join().ok())
    }

    /// Greets the server on one of the paths, for a session that is to have this number of `streams` soon.
    fn greet(self: &Arc<Self>, streams: usize, timeout: Duration) -> Result<Greeted, DialError> {
        let mut last = DialError::NoPath;
        for path in self.order(0) {
            let greeted = Dialled::new(self, path, timeout).and_then(|dialled| {
                // Not before there is a listener. The first connection is one step ahead, so the server's memory for versions of
                // pages goes to it.
                self.greet_ahead(streams);
                dialled.greet(self)
            });
            let error = match greeted {
                Ok(greeted) => return Ok(greeted),
                Err(error) => error,
            };
            debug!("{}", chain(&error));
            self.failed(path);
            // There is no listener only if all paths refuse.
            let may_be_replaced = matches!(last, DialError::NoPath) || last.is_connection_refused();
            if may_be_replaced || error.may_pass() && !last.may_pass() {
                last = error;
            }
        }
        Err(last)
    }

    pub(crate) fn status(&self, streams: &[Arc<ResumableStream>]) -> Vec<PathStatus> {
        let status = self.list.iter().map(|known| PathStatus {
            path: known.path.clone(),
            streams: 0,
            delivered: known.delivered.load(Ordering::Relaxed),
            failures: known.failures.load(Ordering::Relaxed),
        });
        let mut status: Vec<_> = status.collect();
        for path in streams.iter().filter_map(|stream| stream.path()) {
            if let Some(status) = status.get_mut(path) {
                status.streams += 1;
            }
        }
        status
    }

    /// Bytes that the server has received over all paths.
    pub(crate) fn delivered_bytes(&self) -> u64 {
        let of_path = |known: &KnownPath| known.delivered.load(Ordering::Relaxed);
        self.list.iter().map(of_path).sum()
    }

    pub(crate) fn delivered(&self, path: usize, bytes: u64) {
        if let Some(known) = self.list.get(path) {
            known.delivered.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(crate) fn failed(&self, path: usize) {
        let Some(known) = self.list.get(path) else {
            return;
        };
        known.failures.fetch_add(1, Ordering::Relaxed);
        let mut shunned = lock(&known.shunned);
        let time = match *shunned {
            // The same failure, seen by another stream.
            Some(before) if !before.is_over() => return,
            // Failed again soon: a path that accepts connections and carries nothing must not stop streams often.
            Some(before) if before.since.elapsed() < 3 * before.time => 2 * before.time,
            _ => SHUN[0],
        };
        *shunned = Some(Shunned {
            since: Instant::now(),
            time: time.min(SHUN[1]),
        });
    }

    /// Notes whether an attempt on a path was refused by the peer's host.
    fn note_refusal(&self, path: usize, is_refused: bool) {
        if let Some(known) = self.list.get(path) {
            known.is_refused.store(is_refused, Ordering::Relaxed);
        }
    }

    /// Whether the last attempt on each path was refused.
    pub(crate) fn all_refuse(&self) -> bool {
        let mut paths = self.list.iter();
        paths.all(|known| known.is_refused.load(Ordering::Relaxed))
    }

    /// For each path, whether it has not failed recently.
    pub(crate) fn usable(&self) -> Vec<bool> {
        let usable = |known: &KnownPath| lock(&known.shunned).is_none_or(|it| it.is_over());
        self.list.iter().map(usable).collect()
    }

    /// All paths in the order in which a stream tries them: its own first, recently failed ones last.
    pub(crate) fn order(&self, stream: u32) -> Vec<usize> {
        let count = self.list.len();
        let own = keeper::own_path(stream, count);
        let mut order: Vec<_> = (0..count).map(|at| (own + at) % count).collect();
        let usable = self.usable();
        order.sort_by_key(|path| !usable[*path]);
        order
    }
}

/// Begins a session over the first path on which a server answers. If that fails by timeouts or closed connections, all paths are tried
/// once more, with more time for each.
pub(crate) fn begin(
    list: Vec<Route>,
    config: SessionConfig,
    streams: usize,
) -> Result<(Session, Stream), DialError> {
    let paths = Arc::new(Paths::new(list, &config)?);
    let greeted = match paths.greet(streams, ATTEMPT) {
        Err(error) if error.is_timeout() || error.is_closed() => paths.greet(streams, LAST_ATTEMPT),
        greeted => greeted,
    };
    greeted?.begin(paths, config)
}

/// As [`begin`], and tries again for as long as `limit` if the server may be reachable soon.
pub(crate) fn reach(
    list: Vec<Route>,
    config: &SessionConfig,
    streams: usize,
    limit: Duration,
) -> Result<(Session, Stream), DialError> {
    let paths = Arc::new(Paths::new(list, config)?);
    let deadline = Instant::now() + limit;
    let mut timeout = ATTEMPT.min(limit);
    let mut pause = RETRY_PAUSES[0];
    let mut is_told = false;
    loop {
        let greeted = paths.greet(streams, timeout);
        let begun = greeted.and_then(|greeted| greeted.begin(paths.clone(), config.clone()));
        let time = left(deadline).saturating_sub(pause);
        match begun {
            Err(error) if error.may_pass() && !time.is_zero() => {
                if !is_told {
                    let seconds = time.as_secs_f64().round();
                    warn!("{}; trying again for {seconds} s", chain(&error));
                    is_told = true;
                }
            }
            begun => return begun,
        }
        thread::sleep(pause);
        pause = (pause * 2).min(RETRY_PAUSES[1]);
        timeout = LAST_ATTEMPT.min(time);
    }
}

/// A stream that is being opened.
pub struct Opening {
    session: Session,
    began: Instant,
    stream: Option<Stream>,
    /// Opens the stream; `None` if it is open, or the system refused a thread.
    thread: Option<JoinHandle<Result<Stream, DialError>>>,
}

impl Opening {
    pub(super) fn begin(session: &Session) -> Self {
        let shared = session.0.clone();
        // Here, because a server passes streams on in the order of their numbers.
        let number = shared.next_number();
        Self {
            session: session.clone(),
            began: Instant::now(),
            stream: None,
            thread: threads::spawn(move || open(&shared, number)).ok(),
        }
    }

    /// A stream that is open already.
    pub fn opened(session: &Session, stream: Stream) -> Self {
        Self {
            session: session.clone(),
            began: Instant::now(),
            stream: Some(stream),
            thread: None,
        }
    }

    /// The stream, once it is open.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn wait(self) -> Result<Stream, DialError> {
        let join = || self.thread?.join().ok();
        let opened = self.stream.map(Ok).or_else(join);
        match opened {
            // The server ends a stream whose first bytes do not come.
            Some(Ok(_)) if self.began.elapsed() >= HANDSHAKE / 2 => self.session.open(),
            Some(opened) => opened,
            None => self.session.open(),
        }
    }
}

pub(crate) fn open(session: &Arc<Shared>, number: u32) -> Result<Stream, DialError> {
    let stream = session.add(number);
    match connect(&stream, Intent::Open) {
        Ok(()) => Ok(Stream::Resumable(Resumable::new(stream))),
        Err(error) => {
            stream.close(StreamError::ShutDown);
            Err(error)
        }
    }
}

/// Finds another connection for a stream that lost its own, or ends the stream.
pub(crate) fn resume(stream: &Arc<ResumableStream>) {
    let Some((cause, _)) = stream.trouble() else {
        return;
    };
    match connect(stream, Intent::Resume) {
        Ok(()) => {
            stream.session().reconnects.fetch_add(1, Ordering::Relaxed);
        }
        Err(DialError::Ended) => give_up(stream),
        Err(error) => {
            debug!("stream {}: {}", stream.number, chain(&error));
            let seconds = stream.session().reconnect_timeout().as_secs();
            stream.close(match (error.refusal(), error) {
                (Some(refusal), _) => StreamError::Refused { cause, refusal },
                (_, DialError::Acknowledge { source, .. }) => StreamError::Acknowledge(source),
                _ => StreamError::Lost { cause, seconds },
            });
        }
    }
}

/// Tells the peer that a stream without a connection was given up: one attempt on each path.
fn give_up(stream: &ResumableStream) {
    let session = stream.session();
    let Role::Client(paths) = &session.role else {
        return;
    };
    for path in paths.order(stream.number) {
        let told = Greeted::new(paths, path, ATTEMPT).and_then(|greeted| greeted.abort(stream));
        match told {
            Ok(()) => return,
            Err(error) => debug!("stream {}: {}", stream.number, chain(&error)),
        }
    }
}

/// Begins to replace a working connection by one over the first of these paths that leads to the peer.
pub(super) fn replace(stream: &Arc<ResumableStream>, paths: Vec<usize>) {
    if !stream.claim_replacement() {
        return;
    }
    let replaced = stream.clone();
    let thread = threads::spawn(move || {
        paths.into_iter().any(|path| move_to(&replaced, path));
        replaced.replaced();
    });
    if let Err(error) = thread {
        warn!("stream {}: no thread: {error}", stream.number);
        stream.replaced();
    }
}

/// Moves a stream to this path. If the path does not lead to the peer, nothing changes.
pub(super) fn move_to(stream: &Arc<ResumableStream>, path: usize) -> bool {
    let session = stream.session();
    let Role::Client(paths) = &session.role else {
        return false;
    };
    let greeted = match Greeted::new(paths, path, ATTEMPT) {
        Ok(greeted) => greeted,
        Err(error) => {
            debug!("stream {}: {}", stream.number, chain(&error));
            paths.failed(path);
            return false;
        }
    };
    // A stream without a connection is being dialled already.
    if stream.path().is_none() {
        return false;
    }
    let target = Target::Known(session.id());
    if let Err(error) = greeted.attach(stream, Intent::Resume, target, OldConnection::Working) {
        debug!("stream {}: {}", stream.number, chain(&error));
        paths.failed(path);
        resume(stream);
    }
    true
}

/// Tries all paths repeatedly for as long as the stream may be without a connection.
fn connect(stream: &Arc<ResumableStream>, intent: Intent) -> Result<(), DialError> {
    let session = stream.session();
    let Role::Client(paths) = &session.role else {
        return Err(DialError::NoPath);
    };
    let began = stream
        .trouble()
        .map_or_else(Instant::now, |(_, since)| since);
    let mut pause = RETRY_PAUSES[0];
    let mut ahead = match intent {
        Intent::Open => paths.take_ahead(stream.number),
        Intent::Resume | Intent::Abort => None,
    };
    loop {
        for path in paths.order(stream.number) {
            if stream.is_closed() {
                return Err(DialError::Ended);
            }
            let target = Target::Known(session.id());
            let greeted = (ahead.take()).unwrap_or_else(|| Greeted::new(paths, path, ATTEMPT));
            let attached = greeted
                .and_then(|greeted| greeted.attach(stream, intent, target, OldConnection::Lost));
            let refused = attached.as_ref().err();
            let refused = refused.is_some_and(DialError::is_connection_refused);
            paths.note_refusal(path, refused);
            match attached {
                Ok(()) => return Ok(()),
                Err(error) if error.refusal().is_some_and(|refusal| !refusal.may_pass()) => {
                    return Err(error);
                }
                Err(error @ (DialError::Ended | DialError::Acknowledge { .. })) => {
                    return Err(error);
                }
                Err(error) => {
                    debug!("stream {}: {}", stream.number, chain(&error));
                    paths.failed(path);
                }
            }
        }
        let limit = session.reconnect_timeout();
        if began.elapsed() + pause > limit {
            return Err(DialError::TimedOut {
                seconds: limit.as_secs(),
            });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(RETRY_PAUSES[1]);
    }
}

/// A connection on which the first two messages have been exchanged.
struct Greeted {
    connection: NewConnection,
    transcript: Transcript,
    address: Address,
    path: usize,
    /// What the server has for pages.
    offer: Offer,
}

/// A connection before its first message.
struct Dialled {
    socket: Socket,
    address: Address,
    path: usize,
    deadline: Instant,
}

impl Dialled {
    fn new(paths: &Paths, number: usize, timeout: Duration) -> Result<Self, DialError> {
        let KnownPath {
            path, destination, ..
        } = &paths.list[number];
        let deadline = Instant::now() + timeout;
        Ok(Self {
            socket: destination.dial(path.bind, timeout)?,
            address: path.to.clone(),
            path: number,
            deadline,
        })
    }

    fn greet(self, paths: &Paths) -> Result<Greeted, DialError> {
        let Self {
            socket,
            address,
            path,
            deadline,
        } = self;
        let failed = |source| DialError::Io {
            address: address.clone(),
            source,
        };
        let mut hello = Hello::new(random_id().map_err(failed)?);
        hello.takes_store = paths.takes_store;
        let secured = paths.terms.as_ref().map(|terms| {
            let host = match &address {
                Address::Tcp { host, .. } => host,
                Address::Unix(_) => "localhost",
            };
            terms.connect(&socket, host, &hello.encode(), left(deadline))
        });
        let secured = secured.transpose().map_err(|source| DialError::Tls {
            address: address.clone(),
            source,
        })?;
        let is_greeted = secured.is_some();
        let mut connection = NewConnection::new(socket, secured, deadline);
        if !is_greeted {
            connection.send(&hello.encode()).map_err(failed)?;
        }
        let mut bytes = [0; HELLO_LEN];
        connection.read_exactly(&mut bytes).map_err(failed)?;
        let answer = Answer::decode(&bytes).and_then(|answer| answer.accepted().map(|_| answer));
        let answer = answer.map_err(|source| DialError::Handshake {
            address: address.clone(),
            source,
        })?;
        let transcript = Transcript::new(&hello, &answer, connection.binding());
        Ok(Greeted {
            connection,
            transcript,
            address,
            path,
            offer: answer.offer,
        })
    }
}

impl Greeted {
    fn new(paths: &Paths, number: usize, timeout: Duration) -> Result<Self, DialError> {
        Dialled::new(paths, number, timeout)?.greet(paths)
    }

    /// Begins a session, with the first stream on this connection.
    fn begin(
        self,
        paths: Arc<Paths>,
        config: SessionConfig,
    ) -> Result<(Session, Stream), DialError> {
        let identity = self.connection.peer().map(str::to_owned);
        let address = &self.address;
        let peer = match &identity {
            Some(name) => format!("{name} at {address}"),
            None => address.to_string(),
        };
        let session = Shared::new(
            self.transcript.secret(),
            config,
            (peer, identity),
            self.connection.cipher(),
            (Role::Client(paths), self.offer),
        );
        let session = session.map_err(DialError::System)?;
        let stream = session.add(0);
        self.attach(&stream, Intent::Open, Target::New, OldConnection::Lost)?;
        session.next.store(1, Ordering::Relaxed);
        let stream = Stream::Resumable(Resumable::new(stream));
        Ok((Session(session), stream))
    }

    /// Tells the peer that `stream` was given up. The answer is a refusal either way.
    fn abort(mut self, stream: &ResumableStream) -> Result<(), DialError> {
        let session = stream.session();
        let attach = Attach {
            target: Target::Known(session.id()),
            stream: stream.number,
            intent: Intent::Abort,
            received: 0,
        };
        let sent = attach.encode(&self.transcript, &session.secret);
        let mut told = self.connection.send(&sent);
        told = told.and_then(|()| self.connection.read_exactly(&mut [0; ATTACH_LEN]));
        let address = self.address;
        told.map_err(|source| DialError::Io { address, source })
    }

    /// Attaches the connection to `stream`.
    fn attach(
        mut self,
        stream: &Arc<ResumableStream>,
        intent: Intent,
        target: Target,
        old: OldConnection,
    ) -> Result<(), DialError> {
        let address = self.address;
        let secret: &Secret = &stream.session().secret;
        let attaching = stream.attach(old).ok_or(DialError::Ended)?;
        let attach = Attach {
            target,
            stream: stream.number,
            intent,
            received: attaching.received,
        };
        let sent = attach.encode(&self.transcript, secret);
        let failed = |source| DialError::Io {
            address: address.clone(),
            source,
        };
        self.connection.send(&sent).map_err(failed)?;
        let mut bytes = [0; ATTACH_LEN];
        self.connection.read_exactly(&mut bytes).map_err(failed)?;
        let welcome = Welcome::decode(&bytes, &self.transcript, &sent, secret);
        let peer_has = welcome.map_err(|source| DialError::Handshake {
            address: address.clone(),
            source,
        })?;
        let accepted = attaching.accepts(peer_has);
        let attaching = accepted.map_err(|source| DialError::Acknowledge {
            address: address.clone(),
            source,
        })?;
        info!("stream {}: carried by {address}", stream.number);
        let name = address.to_string();
        attaching
            .go_on(self.connection, self.path, name)
            .map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        error::Error,
        io::Write as _,
        net::{SocketAddr, TcpListener, TcpStream},
        os::fd::OwnedFd,
    };

    use rustix::net::listen;

    use super::*;
    use crate::{Keys, Listener, Security, Sessions};

    const LIMIT: Duration = Duration::from_secs(60);

    /// It is reset, and reset again, until the server's host is ready. An answer that is none ends the attempts.
    #[test]
    fn first_connection_is_tried_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let to: Address = format!("tcp:{address}").parse().unwrap();
        let server = thread::spawn(move || {
            for _ in 0..5 {
                drop(listener.accept().unwrap());
            }
            let (mut connection, _) = listener.accept().unwrap();
            connection.write_all(&[0; HELLO_LEN]).unwrap();
            connection
        });
        let config = SessionConfig::new(Security::Insecure);
        let begun = reach(vec![to.into()], &config, 1, LIMIT);
        assert!(matches!(begun, Err(DialError::Handshake { .. })));
        server.join().unwrap();
    }

    #[test]
    fn unknown_name_is_not_tried_again() {
        let error = io::Error::new(io::ErrorKind::NotFound, "no such name");
        let address = "tcp:nowhere:4440".parse().unwrap();
        assert!(!DialError::from(SocketError::dial(&address, error)).may_pass());
    }

    #[test]
    fn connection_closed_before_its_handshake_is_tried_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let path = Route {
            to: format!("tcp:{}", listener.local_addr().unwrap())
                .parse()
                .unwrap(),
            bind: None,
        };
        let closing = thread::spawn(move || {
            for _ in 0..2 {
                drop(listener.accept().unwrap());
            }
        });
        let began = begin(vec![path], SessionConfig::new(Security::Insecure), 1);
        assert!(began.is_err_and(|error| error.is_closed()));
        closing.join().unwrap();
    }

    /// The server has ended it, as its first bytes did not come in time.
    #[test]
    fn stream_that_was_opened_long_ahead_is_opened_anew() {
        let config = SessionConfig::new(Security::Insecure);
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), LIMIT).unwrap();
        let to = listener.address().clone();
        let _sessions = Sessions::new(vec![listener], config.clone()).unwrap();
        let (session, _first) = Session::dial(vec![to.into()], config).unwrap();
        for (age, expected) in [(Duration::ZERO, 1), (HANDSHAKE, 3)] {
            let mut opening = session.open_ahead(1).remove(0);
            opening.began = opening.began.checked_sub(age).unwrap();
            let Stream::Resumable(stream) = opening.wait().unwrap() else {
                panic!("it is of a session");
            };
            assert_eq!(stream.stream().number, expected);
        }
    }

    /// The program looks for a [`TlsError`] among the causes, to give its hint.
    #[test]
    fn tls_error_is_a_cause_of_its_own() {
        let config = SessionConfig::new(Security::Keys(Keys {
            directory: "/nowhere".into(),
            trusted: None,
        }));
        let path = Address::Unix("/nowhere/socket".into()).into();
        let dialled = Session::dial(vec![path], config.clone()).err().unwrap();
        let served = Sessions::new(Vec::new(), config).err().unwrap();
        for error in [&dialled as &dyn Error, &served] {
            assert!(error.source().is_some_and(|cause| cause.is::<TlsError>()));
        }
    }

    /// The name has a dead address and one with a server.
    #[test]
    fn handshake_has_time_after_a_dead_address() {
        let config = SessionConfig::new(Security::Insecure);
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), LIMIT).unwrap();
        let Address::Tcp { port, .. } = *listener.address() else {
            panic!("it is TCP");
        };
        let _sessions = Sessions::new(vec![listener], config.clone()).unwrap();
        let dead = TcpListener::bind("127.0.0.1:0").unwrap();
        listen(&dead, 0).unwrap();
        let first = dead.local_addr().unwrap();
        let mut queue: Vec<OwnedFd> = Vec::new();
        while let Ok(socket) = TcpStream::connect_timeout(&first, Duration::from_millis(300)) {
            queue.push(socket.into());
        }

        let name: Address = "tcp:somewhere:4440".parse().unwrap();
        let second = SocketAddr::from(([127, 0, 0, 1], port));
        let mut paths = Paths::new(vec![name.clone().into()], &config).unwrap();
        paths.list[0].destination = Destination::by(name, move |_, _| Ok(vec![first, second]));
        let greeted = Greeted::new(&paths, 0, ATTEMPT);
        assert!(greeted.is_ok(), "{:?}", greeted.err());
    }
}
