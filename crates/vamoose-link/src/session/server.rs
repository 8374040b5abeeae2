//! The server of sessions: accepts connections, and attaches each to its stream.
//!
//! ```text
//! listener ─> admission ─> rate ─> TLS ─> Hello, Attach ─┬─ new stream ──> first bytes ─> PollQueue
//!             (how many)  (rate)   (who)   (which stream) └─ known stream: goes on
//! ```
//!
//! Streams travel over connections of their own, and may overtake each other. They are passed on in the order in which the client has
//! opened them: a QEMU takes the first connection of a recovery for the main stream.
//!
//! Until a connection has proved that it belongs to a session, it costs a thread and a few KiB for a limited time. At most
//! [`STRANGERS`] are admitted (`admission.rs` says which one is evicted for a newcomer). Connections that are not admitted, send
//! nothing or close at once do not count against the rate.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Condvar, Mutex, PoisonError, Weak, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd},
    net::{RecvFlags, recv},
};
use thiserror::Error;
use tracing::{debug, warn};
use vamoose_session::{
    handshake::{
        ATTACH_LEN, Answer, Attach, HELLO_LEN, HandshakeError, Hello, Intent, Offer, Refusal,
        SessionId, Target, Transcript, Welcome,
    },
    stream::StreamError,
};

use super::{
    Role, Session, SessionConfig, Shared,
    admission::{Admission, State, network},
    connection::NewConnection,
    resumable::{OldConnection, Resumable, ResumableStream},
};
use crate::{
    Address, Listener, PollQueue, Security, Socket, Stream, TlsError, chain,
    delta::Share,
    left, lock, random_id, threads,
    timeouts::{ACCEPT_PAUSE, HANDSHAKE, LINGER},
    tls::ServerTerms,
    wait_for, wait_until,
};

/// Accepts sessions on listeners of its own, until it is dropped. Its file descriptor is readable while a stream waits
/// to be taken.
pub struct Sessions {
    server: Arc<Server>,
    acceptor: Option<JoinHandle<()>>,
}

/// A stream that a client has opened, with its first bytes received.
pub struct Introduced {
    /// The stream.
    pub stream: Stream,
    /// The session that it belongs to.
    pub session: Session,
}

/// A session, and a stream's number in it.
type StreamKey = (SessionId, u32);

/// What the threads share.
struct Server {
    addresses: Vec<Address>,
    config: SessionConfig,
    limits: Limits,
    /// Certificates or keys for the next connections.
    security: Mutex<Security>,
    sessions: Mutex<HashMap<SessionId, Weak<Shared>>>,
    strangers: Mutex<Admission<Arc<Socket>>>,
    /// A stranger has left.
    stranger_left: Condvar,
    /// The new streams of all sessions by number, until they are passed on; `None` before the first bytes.
    opening: Mutex<BTreeMap<StreamKey, Option<Arc<ResumableStream>>>>,
    introduced: PollQueue<Introduced>,
    rate: HandshakeRate,
    /// Start of the current second, the number of warnings in it, and the last one.
    warned: Mutex<(Instant, u32, String)>,
    end: OwnedFd,
}

/// Limit for concurrent handshakes.
const STRANGERS: usize = 512;

/// Handshakes per second, after a burst as large as a migration needs.
const RATE: u32 = 256;
const BURST: u32 = 128;

/// Limit for the streams of a session.
const STREAMS: u32 = 512;

/// Limits of sessions and of streams in all sessions. [`has_share`] limits the share of one peer.
#[derive(Clone, Copy)]
struct Limits {
    sessions: usize,
    streams: usize,
}

const LIMITS: Limits = Limits {
    sessions: 1024,
    streams: 4096,
};

/// Limit for warnings per second about refused connections, which any host can cause.
const WARNINGS: u32 = 10;

impl Sessions {
    /// Accepts sessions on `listeners`.
    ///
    /// # Errors
    /// When certificates or keys cannot be used, or the system is out of file descriptors or threads.
    pub fn new(listeners: Vec<Listener>, config: SessionConfig) -> Result<Self, SessionsError> {
        Self::limited(listeners, config, LIMITS)
    }

    fn limited(
        listeners: Vec<Listener>,
        config: SessionConfig,
        limits: Limits,
    ) -> Result<Self, SessionsError> {
        let server = Arc::new(Server {
            addresses: listeners.iter().map(|it| it.address().clone()).collect(),
            security: Mutex::new(config.security.clone()),
            config,
            limits,
            sessions: Mutex::default(),
            strangers: Mutex::new(Admission::new(STRANGERS)),
            stranger_left: Condvar::new(),
            opening: Mutex::default(),
            introduced: PollQueue::new()?,
            rate: HandshakeRate(Mutex::new(Instant::now())),
            warned: Mutex::new((Instant::now(), 0, String::new())),
            end: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(io::Error::from)?,
        });
        // Reports errors now rather than at the first connection.
        server.terms()?;
        let acceptor = threads::spawn({
            let server = server.clone();
            // Handshakes may outlive the listeners.
            move || server.accept(&listeners)
        })?;
        Ok(Self {
            server,
            acceptor: Some(acceptor),
        })
    }

    /// The addresses of the listeners.
    pub fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.server.addresses.iter()
    }

    /// Replaces the certificates or keys. Running sessions continue if their next connections are accepted.
    ///
    /// # Errors
    /// When certificates or keys cannot be used; then nothing changes.
    pub fn set_security(&self, security: Security) -> Result<(), SessionsError> {
        security.server_terms(self.server.config.cipher)?;
        *lock(&self.server.security) = security;
        Ok(())
    }

    /// The next opened stream, if one waits.
    pub fn try_next(&self) -> Option<Introduced> {
        self.server.introduced.pop()
    }

    /// Waits for the next opened stream; `None` after `timeout`.
    pub fn next(&self, timeout: Duration) -> Option<Introduced> {
        let mut fds = [PollFd::new(&self.server.introduced, PollFlags::IN)];
        wait_for(&mut fds, timeout).ok()?;
        self.try_next()
    }

    /// Waits until the clients have received all finished streams; false after `timeout`.
    pub fn drain(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        // Not locked while waiting: a reconnecting client must find its session.
        let sessions: Vec<_> = lock(&self.server.sessions)
            .values()
            .filter_map(Weak::upgrade)
            .collect();
        // All of them, even after the timeout: the last may be drained already.
        let drained = sessions
            .into_iter()
            .map(|it| Session(it).drain(left(deadline)));
        drained.filter(|is_drained| !is_drained).count() == 0
    }
}

impl AsFd for Sessions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.server.introduced.as_fd()
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        // Fails only if the counter is full; then the thread is awake.
        let _ = rustix::io::write(&self.server.end, &1u64.to_ne_bytes());
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

/// Failure to serve sessions.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SessionsError {
    #[error("cannot set up TLS")]
    Security(#[from] TlsError),
    #[error("the system refused a thread or a file descriptor")]
    System(#[from] io::Error),
}

impl Server {
    fn accept(self: &Arc<Self>, listeners: &[Listener]) {
        loop {
            let mut fds = vec![PollFd::new(&self.end, PollFlags::IN)];
            let polled = listeners.iter();
            fds.extend(polled.map(|listener| PollFd::new(listener, PollFlags::IN)));
            if wait_until(&mut fds, None).is_err() || fds[0].revents().contains(PollFlags::IN) {
                return;
            }
            for listener in listeners {
                match listener.try_accept() {
                    Ok(Some(socket)) => self.admit(socket),
                    Ok(None) => {}
                    Err(error) => {
                        warn!("{}; trying again", chain(&error));
                        thread::sleep(ACCEPT_PAUSE);
                    }
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, socket: Socket) {
        let address = socket.peer_ip();
        let socket = Arc::new(socket);
        let Some(stranger) = Stranger::admit(self, &socket) else {
            self.warn(&"too many connections are in their handshake", address);
            return;
        };
        let greet = move || {
            let done = stranger.server.shake_hands(&stranger, socket);
            let server = stranger.server.clone();
            let is_evicted = stranger.is_evicted();
            drop(stranger);
            match done {
                Ok(Some(opened)) => server.introduce(opened),
                Ok(None) => {}
                Err(_) if is_evicted => {
                    server.warn(&"another connection has taken its place", address)
                }
                Err(error) => server.warn(&chain(&error), address),
            }
        };
        if let Err(error) = threads::spawn(greet) {
            self.warn(&error, address);
        }
    }

    fn shake_hands(
        &self,
        stranger: &Stranger,
        socket: Arc<Socket>,
    ) -> Result<Option<Arc<ResumableStream>>, TurnedAway> {
        let deadline = Instant::now() + HANDSHAKE;
        let address = socket.peer_ip();
        wait_for_client(&socket, deadline)?;
        stranger.advance(State::HasSpoken);
        self.rate.wait_for_turn(&socket)?;
        let terms = self.terms()?;
        let secured = terms.map(|terms| terms.accept(&socket, left(deadline)));
        let secured = secured.transpose().inspect_err(|error| {
            if matches!(error, TlsError::NotTls { .. }) {
                refuse_plain(&socket);
            }
        })?;
        if secured.is_some() {
            stranger.advance(State::IsKnown);
        }
        let mut connection = NewConnection::new(socket, secured, deadline);
        let mut bytes = [0; HELLO_LEN];
        connection.read_exactly(&mut bytes)?;
        let hello = Hello::decode(&bytes)?;
        // Returned at the end unless this connection begins a session.
        let share = self.config.page_caches.take(self.config.page_cache);
        let answer = Answer::to(&hello, random_id()?).offering(Offer {
            page_cache: u16::try_from(share.bytes() >> 20).unwrap_or(u16::MAX),
            has_store: hello.takes_store && self.config.page_store.is_some(),
        });
        connection.send(&answer.encode())?;
        answer.accepted()?;
        let transcript = Transcript::new(&hello, &answer, connection.binding());
        let mut bytes = [0; ATTACH_LEN];
        connection.read_exactly(&mut bytes)?;
        let attach = Attach::decode(&bytes)?;
        let peer = (connection.peer()).map_or_else(|| shown(address), str::to_owned);
        let peer = (&*peer, connection.cipher());
        let offer = (share, answer.offer);
        let found = self.find(&attach, &bytes, &transcript, peer, offer);
        let stream = match found {
            Ok(found) => found,
            Err(refusal) => return Err(refuse(connection, &transcript, &bytes, refusal)),
        };
        stranger.advance(State::IsKnown);
        let session = stream.session().clone();
        let attaching = match stream
            .attach(OldConnection::Lost)
            .ok_or(Refusal::Ended)
            .and_then(|it| it.accepts(attach.received).map_err(|_| Refusal::Offset))
        {
            Ok(attaching) => attaching,
            Err(refusal) => return Err(refuse(connection, &transcript, &bytes, refusal)),
        };
        let outcome = Ok(attaching.received);
        let welcome = Welcome { outcome }.encode(&transcript, &bytes, Some(&session.secret));
        // Before the client opens the next one.
        let opens = !stream.is_introduced();
        if opens {
            lock(&self.opening).entry(key(&stream)).or_default();
        }
        let name = format!("a connection of {}", session.peer);
        let welcomed = connection
            .send(&welcome)
            .map_err(TurnedAway::from)
            .and_then(|()| Ok(attaching.go_on(connection, 0, name)?));
        // The connection that opened the stream may have been lost before its client was welcomed.
        let is_new = welcomed.is_ok() && stream.claim_introduction();
        if opens && !is_new {
            self.pass_on(&stream, false);
        }
        welcomed?;
        if !is_new {
            session.reconnects.fetch_add(1, Ordering::Relaxed);
        }
        Ok(is_new.then_some(stream))
    }

    /// Finds or opens the stream of a connection.
    fn find(
        &self,
        attach: &Attach,
        bytes: &[u8; ATTACH_LEN],
        transcript: &Transcript,
        peer: (&str, Option<&'static str>),
        offer: (Share, Offer),
    ) -> Result<Arc<ResumableStream>, Refusal> {
        let session = match attach.target {
            Target::New => self.begin(transcript, peer, offer)?,
            Target::Known(id) => {
                let known = lock(&self.sessions).get(&id).and_then(Weak::upgrade);
                known.ok_or(Refusal::UnknownSession)?
            }
        };
        if !Attach::is_proved(bytes, transcript, &session.secret) {
            return Err(Refusal::Proof);
        }
        // Without TLS a peer has no name: it may come from another address.
        if session.config.security != Security::Insecure && session.peer != peer.0 {
            return Err(Refusal::OtherPeer);
        }
        let mut opened = lock(&session.opened);
        match (session.find(attach.stream), attach.intent) {
            (Some(stream), Intent::Open | Intent::Resume) => Ok(stream),
            (Some(stream), Intent::Abort) => {
                stream.close(StreamError::Aborted);
                Err(Refusal::Ended)
            }
            (None, Intent::Open) => {
                if attach.stream >= STREAMS || opened.contains(&attach.stream) {
                    return Err(Refusal::Ended);
                }
                let stream = self.add(&session, attach.stream)?;
                opened.insert(attach.stream);
                Ok(stream)
            }
            (None, _) => Err(Refusal::Ended),
        }
    }

    /// Adds a stream to `session` unless the peer has used its share.
    fn add(&self, session: &Arc<Shared>, number: u32) -> Result<Arc<ResumableStream>, Refusal> {
        let sessions = lock(&self.sessions);
        let (mut all, mut of_peer) = (0, 0);
        for other in sessions.values().filter_map(Weak::upgrade) {
            let count = other.streams().len();
            all += count;
            if other.peer == session.peer {
                of_peer += count;
            }
        }
        match has_share(of_peer, all, self.limits.streams) {
            true => Ok(session.add(number)),
            false => Err(Refusal::Busy),
        }
    }

    fn begin(
        &self,
        transcript: &Transcript,
        (peer, cipher): (&str, Option<&'static str>),
        (share, offer): (Share, Offer),
    ) -> Result<Arc<Shared>, Refusal> {
        let mut sessions = lock(&self.sessions);
        sessions.retain(|_, known| known.strong_count() > 0);
        let known = sessions.values().filter_map(Weak::upgrade);
        let of_peer = known.filter(|session| session.peer == peer).count();
        if !has_share(of_peer, sessions.len(), self.limits.sessions) {
            return Err(Refusal::Busy);
        }
        let config = SessionConfig {
            security: lock(&self.security).clone(),
            ..self.config.clone()
        };
        let secret = transcript.secret();
        let is_proved = config.security != Security::Insecure;
        let identity = is_proved.then(|| peer.to_owned());
        let session = Shared::new(
            secret,
            config,
            (peer.to_owned(), identity),
            cipher,
            (Role::Server(share), offer),
        );
        // The system has no thread for the session.
        let session = session.map_err(|_| Refusal::Busy)?;
        sessions.insert(session.id(), Arc::downgrade(&session));
        Ok(session)
    }

    /// Passes a new stream on once its first bytes have arrived.
    fn introduce(&self, stream: Arc<ResumableStream>) {
        stream.set_stall_timeout(HANDSHAKE);
        let first = stream.wait_for_first();
        match &first {
            Ok(()) => stream.set_stall_timeout(self.config.stall_timeout),
            Err(error) => {
                debug!("stream {}: nothing came: {error}", stream.number);
                stream.close(StreamError::ShutDown);
            }
        }
        self.pass_on(&stream, first.is_ok());
    }

    /// Passes on all streams of a session that wait for no earlier one, when `stream` `is_ready` or is not waited for any longer.
    fn pass_on(&self, stream: &Arc<ResumableStream>, is_ready: bool) {
        let at = key(stream);
        let mut opening = lock(&self.opening);
        if is_ready {
            opening.insert(at, Some(stream.clone()));
        } else if opening.get(&at).is_some_and(Option::is_none) {
            opening.remove(&at);
        }
        while let Some(first) = opening.range_mut((at.0, 0)..=(at.0, u32::MAX)).next() {
            let (at, Some(stream)) = (*first.0, first.1.take()) else {
                return;
            };
            opening.remove(&at);
            let session = Session(stream.session().clone());
            let stream = Stream::Resumable(Resumable::new(stream));
            self.introduced.push(Introduced { stream, session });
        }
    }

    /// Reads certificates and keys anew, so that replaced files take effect at once.
    fn terms(&self) -> Result<Option<ServerTerms>, TlsError> {
        let security = lock(&self.security).clone();
        security.server_terms(self.config.cipher)
    }

    fn warn(&self, problem: &dyn std::fmt::Display, address: Option<IpAddr>) {
        let from = shown(address);
        let problem = format!("turning away a connection from {from}: {problem}");
        let mut warned = lock(&self.warned);
        if warned.0.elapsed() > Duration::from_secs(1) {
            *warned = (Instant::now(), 0, String::new());
        }
        // A client makes the connections of a session side by side, and all are refused for one reason.
        if warned.1 >= WARNINGS || warned.2 == problem {
            debug!("{problem}");
            return;
        }
        warn!("{problem}");
        *warned = (warned.0, warned.1 + 1, problem);
    }
}

fn key(stream: &ResumableStream) -> StreamKey {
    (stream.session().id(), stream.number)
}

/// Whether a peer with `of_peer` of `all` may have one more: at most as many as are free. So no peer gets more than half, and some
/// are always left for the next peer.
fn has_share(of_peer: usize, all: usize, limit: usize) -> bool {
    of_peer < limit.saturating_sub(all)
}

/// Waits until the client has sent something. Only then does its handshake cost more than waiting.
fn wait_for_client(socket: &Socket, deadline: Instant) -> io::Result<()> {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    if !wait_until(&mut fds, Some(deadline))? {
        return Err(io::ErrorKind::TimedOut.into());
    }
    match has_sent(socket)? {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Whether received bytes wait; false at the end of the connection.
fn has_sent(socket: &Socket) -> io::Result<bool> {
    let (_, len) = recv(socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    Ok(len > 0)
}

/// Tells the client why its connection is refused.
fn refuse(
    mut connection: NewConnection,
    transcript: &Transcript,
    attach: &[u8; ATTACH_LEN],
    refusal: Refusal,
) -> TurnedAway {
    let outcome = Err(refusal);
    // The client may have gone already.
    let _ = connection.send(&Welcome { outcome }.encode(transcript, attach, None));
    TurnedAway::Refused(refusal)
}

/// Tells a client without TLS why it is refused, in case it is a Vamoose.
fn refuse_plain(socket: &Socket) {
    let answer = Answer::refuse(Refusal::Insecure).encode();
    // The client may have gone, or be another program.
    if socket.set_patience(LINGER).is_ok() && socket.write_both(&answer, &[]).is_ok() {
        socket.linger(Instant::now() + LINGER);
    }
}

fn shown(address: Option<IpAddr>) -> String {
    address.map_or_else(|| "this host".to_owned(), |address| address.to_string())
}

/// A connection that has not proved yet that it belongs to a session. It holds a place in [`Admission`] until it is dropped.
struct Stranger {
    server: Arc<Server>,
    number: u64,
}

impl Stranger {
    /// Takes a free place, or that of a connection that can be evicted.
    fn admit(server: &Arc<Server>, socket: &Arc<Socket>) -> Option<Self> {
        let from = network(socket.peer_ip());
        let has_spoken = |socket: &Arc<Socket>| has_sent(socket).unwrap_or(false);
        let strangers = lock(&server.strangers);
        // Evicted connections leave at once, if their threads get to run.
        let waited = server
            .stranger_left
            .wait_timeout_while(strangers, LINGER, |it| it.is_crowded());
        let mut strangers = waited.unwrap_or_else(PoisonError::into_inner).0;
        let admitted = strangers.admit(from, socket.clone(), Instant::now(), has_spoken)?;
        drop(strangers);
        if let Some(evicted) = admitted.evicted {
            evicted.shut_down();
        }
        let server = server.clone();
        let number = admitted.number;
        Some(Self { server, number })
    }

    fn advance(&self, state: State) {
        lock(&self.server.strangers).advance(self.number, state);
    }

    fn is_evicted(&self) -> bool {
        lock(&self.server.strangers).is_evicted(self.number)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        lock(&self.server.strangers).leave(self.number);
        self.server.stranger_left.notify_one();
    }
}

/// Limits the rate of handshakes: when the next one is due.
struct HandshakeRate(Mutex<Instant>);

impl HandshakeRate {
    /// Waits for the turn of `socket`'s handshake. If the socket is shut down meanwhile, another connection gets the turn.
    fn wait_for_turn(&self, socket: &Socket) -> io::Result<()> {
        let gap = Duration::from_secs(1) / RATE;
        let turn = {
            let mut due = lock(&self.0);
            *due = due.max(Instant::now()) + gap;
            *due
        };
        let begin = turn.checked_sub(gap * BURST).unwrap_or(turn);
        if wait_until(&mut [PollFd::new(socket, PollFlags::empty())], Some(begin))? {
            *lock(&self.0) -= gap;
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }
}

/// Why a connection was refused.
#[derive(Debug, Error)]
enum TurnedAway {
    #[error("the connection broke")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("refused: {0}")]
    Refused(Refusal),
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::Shutdown,
        os::unix::net::UnixStream,
    };

    use vamoose_session::frame::{Header, Kind};

    use super::*;
    use crate::{DialError, session::Route};

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn shares_of_a_limit() {
        for (of_peer, all, limit, expected) in [
            (0, 0, 8, true),
            (3, 3, 8, true),
            (4, 4, 8, false),
            // A peer that comes later.
            (0, 4, 8, true),
            (1, 5, 8, true),
            (2, 6, 8, false),
            (0, 7, 8, true),
            (0, 8, 8, false),
            (0, 9, 8, false),
        ] {
            assert_eq!(
                has_share(of_peer, all, limit),
                expected,
                "{of_peer} of {all}"
            );
        }
    }

    #[test]
    fn one_peer_does_not_take_all_streams() {
        let limits = Limits {
            sessions: 8,
            streams: 8,
        };
        let config = SessionConfig {
            stall_timeout: LIMIT,
            // A refusal is final.
            reconnect_timeout: Duration::ZERO,
            ..SessionConfig::new(Security::Insecure)
        };
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), LIMIT).unwrap();
        let to = listener.address().clone();
        let sessions = Sessions::limited(vec![listener], config.clone(), limits).unwrap();
        let mut all = Vec::new();
        // Without keys a peer is known by its address.
        let mut opened = |last: u8| {
            let bind = Some(IpAddr::from([127, 0, 0, last]));
            let to = to.clone();
            let (session, first) = Session::dial(vec![Route { to, bind }], config.clone())?;
            (&first).write_all(b"here").unwrap();
            all.push((session.clone(), first, sessions.next(LIMIT).unwrap()));
            let mut count = 1;
            while let Ok(stream) = session.open() {
                (&stream).write_all(b"here").unwrap();
                all.push((session.clone(), stream, sessions.next(LIMIT).unwrap()));
                count += 1;
            }
            Ok::<_, DialError>(count)
        };
        assert_eq!(opened(1).unwrap(), 4);
        let error = opened(1).unwrap_err();
        let busy = matches!(
            error,
            DialError::Handshake {
                source: HandshakeError::Refused(Refusal::Busy),
                ..
            }
        );
        assert!(busy, "{error:?}");
        // Streams are left for other peers.
        assert_eq!(opened(2).unwrap(), 2);
        assert_eq!(opened(3).unwrap(), 1);
    }

    /// The client receives no answer on the connection that opens its stream, and opens the stream again on the next one.
    #[test]
    fn stream_whose_first_connection_is_lost_in_the_handshake_is_introduced() {
        let directory = std::env::temp_dir();
        let path = directory.join(format!("vamoose-introduced-{}", std::process::id()));
        let address: Address = format!("unix:{}", path.display()).parse().unwrap();
        let listener = Listener::bind(&address, LIMIT).unwrap();
        let config = SessionConfig::new(Security::Insecure);
        let sessions = Sessions::new(vec![listener], config).unwrap();

        let connect = || UnixStream::connect(&path).unwrap();
        let first = connect();
        let transcript = greet(&first);
        let secret = transcript.secret();
        let attach = |transcript: &Transcript, target, stream| {
            let attach = Attach {
                target,
                stream,
                intent: Intent::Open,
                received: 0,
            };
            attach.encode(transcript, &secret)
        };
        let sent = attach(&transcript, Target::New, 0);
        (&first).write_all(&sent).unwrap();
        (&first).read_exact(&mut [0; ATTACH_LEN]).unwrap();

        let known = Target::Known(secret.id());
        let lost = connect();
        let transcript = greet(&lost);
        // From here on the server cannot send.
        lost.shutdown(Shutdown::Read).unwrap();
        (&lost).write_all(&attach(&transcript, known, 1)).unwrap();
        // Unless the server has found the stream, this connection would be the one that opens it.
        let session = lock(&sessions.server.sessions)
            .get(&secret.id())
            .and_then(Weak::upgrade);
        let session = session.unwrap();
        while session.find(1).is_none() {
            thread::yield_now();
        }

        let second = connect();
        let transcript = greet(&second);
        (&second).write_all(&attach(&transcript, known, 1)).unwrap();
        (&second).read_exact(&mut [0; ATTACH_LEN]).unwrap();
        let header = Header {
            len: 1,
            ..Header::empty(Kind::Data, 0, 0)
        };
        for mut socket in [&first, &second] {
            socket.write_all(&header.encode()).unwrap();
            socket.write_all(b"x").unwrap();
        }
        let _earlier = sessions.next(Duration::from_secs(20)).unwrap();
        let introduced = sessions.next(Duration::from_secs(20));
        let _ = std::fs::remove_file(&path);
        let mut byte = [0; 1];
        (&introduced.expect("the stream").stream)
            .read_exact(&mut byte)
            .unwrap();
        assert_eq!(&byte, b"x");
    }

    /// The first two messages of a connection.
    fn greet(mut socket: &UnixStream) -> Transcript {
        let hello = Hello::new([1; 32]);
        socket.write_all(&hello.encode()).unwrap();
        let mut answer = [0; HELLO_LEN];
        socket.read_exact(&mut answer).unwrap();
        Transcript::new(&hello, &Answer::decode(&answer).unwrap(), [0; 32])
    }

    /// The first bytes of a stream may come before those of one that was opened earlier.
    #[test]
    fn streams_are_passed_on_in_the_order_of_their_opening() {
        let config = SessionConfig::new(Security::Insecure);
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), LIMIT).unwrap();
        let to = listener.address().clone();
        let sessions = Sessions::new(vec![listener], config.clone()).unwrap();
        let (session, first) = Session::dial(vec![to.into()], config).unwrap();
        let rest: [_; 4] = std::array::from_fn(|_| session.open().unwrap());
        let [second, given_up, fourth, fifth] = rest;
        for (number, stream) in [(4, &fifth), (3, &fourth), (1, &second)] {
            stream.write_both(&[number], &[]).unwrap();
        }
        assert!(sessions.next(Duration::from_millis(300)).is_none());
        let next = || {
            let mut byte = [0];
            let introduced = sessions.next(Duration::from_secs(20)).unwrap();
            (&introduced.stream).read_exact(&mut byte).unwrap();
            byte[0]
        };
        first.write_both(&[0], &[]).unwrap();
        assert_eq!([next(), next()], [0, 1]);
        assert!(sessions.try_next().is_none());
        drop(given_up);
        assert_eq!([next(), next()], [3, 4]);
    }

    #[test]
    fn drain_of_a_lost_stream_fails() {
        let config = SessionConfig {
            reconnect_timeout: Duration::ZERO,
            ..SessionConfig::new(Security::Insecure)
        };
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), LIMIT).unwrap();
        let to = listener.address().clone();
        let sessions = Sessions::new(vec![listener], config.clone()).unwrap();
        let (_session, stream) = Session::dial(vec![to.into()], config).unwrap();
        // The server's user does not read it, so it is not acknowledged.
        stream.write_both(b"here", &[]).unwrap();
        let there = sessions.next(LIMIT).unwrap();
        stream.write_both(b"more", &[]).unwrap();
        stream.finish();
        there.stream.shut_down();
        assert!(!stream.drain(Duration::from_secs(20)));
    }
}
