//! The server of sessions: accepts connections, and attaches each to its stream.
//!
//! ```text
//! listener ─> admission ─> pace ─> TLS ─> Hello, Attach ─┬─ new stream ──> first bytes ─> PollQueue
//!             (how many)  (rate)   (who)   (which stream) └─ known stream: goes on
//! ```
//!
//! Until it has proved that it belongs to a session, a connection costs a thread and a few KiB, for a limited time, and
//! there are [`STRANGERS`] at most, [`OF_ONE_ADDRESS`] of them from one address. Those that are not admitted, send nothing or
//! close at once take no turn of the rate: nobody waits behind them.

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, Weak, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd},
    net::{RecvFlags, recv},
};
use thiserror::Error;
use tracing::{debug, info, warn};
use vamoose_session::handshake::{
    ATTACH_LEN, Answer, Attach, HELLO_LEN, HandshakeError, Hello, Intent, Refusal, SessionId,
    Target, Transcript, Welcome,
};

use super::{
    Role, Session, SessionConfig, Shared, StreamError,
    connection::NewConnection,
    dialer::nonce,
    resumable::{Carried, Resumable},
};
use crate::{
    Address, Listener, PollQueue, Security, Socket, Stream, TlsError, chain, left, lock,
    tls::ServerTerms, wait_for, wait_until,
};

/// Accepts sessions on listeners of its own, until it is dropped. Its file descriptor is readable while a stream waits
/// to be taken.
pub struct Sessions {
    server: Arc<Server>,
    acceptor: Option<JoinHandle<()>>,
}

/// A stream that a client has opened, and on which something has come.
pub struct Introduced {
    /// The stream.
    pub stream: Stream,
    /// The session that it belongs to.
    pub session: Session,
}

/// What the threads share.
struct Server {
    addresses: Vec<Address>,
    config: SessionConfig,
    /// Of the next connections.
    security: Mutex<Security>,
    sessions: Mutex<HashMap<SessionId, Weak<Shared>>>,
    strangers: Mutex<HashMap<Option<IpAddr>, usize>>,
    introduced: PollQueue<Introduced>,
    pace: Pace,
    /// Since when warnings are counted, and how many there were.
    warned: Mutex<(Instant, u32)>,
    end: OwnedFd,
}

/// How many connections may be in their handshake at once.
const STRANGERS: usize = 512;

/// How many of them from one address, so that one host alone does not keep the others out.
const OF_ONE_ADDRESS: usize = 256;

/// Handshakes a second, once as many have gone without a pause as a migration needs.
const RATE: u32 = 256;
const BURST: u32 = 128;

/// How many sessions there may be.
const SESSIONS: usize = 1024;

/// How many of them with one peer, so that it alone does not keep the others out.
const OF_ONE_PEER: usize = 512;

/// How many streams a session may have, and all together.
const STREAMS: u32 = 512;
const ALL_STREAMS: usize = 4096;

/// How long a handshake may take, and then a stream's first bytes.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// How long a client that is refused may take to read why.
const LINGER: Duration = Duration::from_secs(1);

/// Warnings a second about who is turned away: anyone can be.
const WARNINGS: u32 = 10;

impl Sessions {
    /// Accepts sessions on `listeners`.
    ///
    /// # Errors
    /// When certificates or keys cannot be used, or the system is out of file descriptors or threads.
    pub fn new(listeners: Vec<Listener>, config: SessionConfig) -> Result<Self, SessionsError> {
        let server = Arc::new(Server {
            addresses: listeners.iter().map(|it| it.address().clone()).collect(),
            security: Mutex::new(config.security.clone()),
            config,
            sessions: Mutex::default(),
            strangers: Mutex::default(),
            introduced: PollQueue::new()?,
            pace: Pace::new(),
            warned: Mutex::new((Instant::now(), 0)),
            end: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(io::Error::from)?,
        });
        // Better now than when the first client comes.
        server.terms()?;
        let acceptor = thread::Builder::new().spawn({
            let server = server.clone();
            // Handshakes may outlive the listeners.
            move || server.accept(&listeners)
        })?;
        Ok(Self {
            server,
            acceptor: Some(acceptor),
        })
    }

    /// The addresses that it listens on.
    pub fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.server.addresses.iter()
    }

    /// Authenticates by this from now on. Sessions that have begun go on, if their connections still fit.
    ///
    /// # Errors
    /// When certificates or keys cannot be used; then nothing changes.
    pub fn set_security(&self, security: Security) -> Result<(), SessionsError> {
        if security != Security::Insecure {
            security.server_terms(self.server.config.cipher)?;
        }
        *lock(&self.server.security) = security;
        Ok(())
    }

    /// A stream that was opened, if one waits.
    pub fn try_next(&self) -> Option<Introduced> {
        self.server.introduced.pop()
    }

    /// The next stream that is opened; `None` after `timeout`.
    pub fn next(&self, timeout: Duration) -> Option<Introduced> {
        let mut fds = [PollFd::new(&self.server.introduced, PollFlags::IN)];
        wait_for(&mut fds, timeout).ok()?;
        self.try_next()
    }
}

impl Sessions {
    /// Waits until the clients have all that was written on streams that were finished; false if that takes too long.
    pub fn drain(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        // Not locked while waiting: who has lost its connection must find its session.
        let sessions: Vec<_> = lock(&self.server.sessions)
            .values()
            .filter_map(Weak::upgrade)
            .collect();
        // All of them: the last may need no time.
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
        // Can only fail when the counter is full, and then it is awake.
        let _ = rustix::io::write(&self.server.end, &1u64.to_ne_bytes());
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

/// Sessions cannot be served.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SessionsError {
    #[error(transparent)]
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
                        thread::sleep(Duration::from_millis(100));
                    }
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, socket: Socket) {
        let address = socket.peer_ip();
        let Some(stranger) = Stranger::admit(self, address) else {
            self.warn(&"too many connections are in their handshake", address);
            return;
        };
        let greet = move || {
            let done = stranger.server.shake_hands(socket);
            let server = stranger.server.clone();
            drop(stranger);
            match done {
                Ok(Some(opened)) => server.introduce(opened),
                Ok(None) => {}
                Err(error) => server.warn(&chain(&error), address),
            }
        };
        if let Err(error) = thread::Builder::new().spawn(greet) {
            self.warn(&error, address);
        }
    }

    fn shake_hands(&self, socket: Socket) -> Result<Option<Arc<Carried>>, TurnedAway> {
        let deadline = Instant::now() + HANDSHAKE;
        let address = socket.peer_ip();
        wait_for_client(&socket, deadline)?;
        self.pace.keep();
        let terms = self.terms()?;
        let secured = terms.map(|terms| terms.accept(&socket, left(deadline)));
        let secured = secured.transpose().inspect_err(|error| {
            if matches!(error, TlsError::NotTls { .. }) {
                refuse_plain(&socket);
            }
        })?;
        let mut connection = NewConnection::new(socket, secured, deadline);
        let mut bytes = [0; HELLO_LEN];
        connection.read_exactly(&mut bytes)?;
        let hello = Hello::decode(&bytes)?;
        let answer = Answer::to(&hello, nonce()?).with_page_cache(self.page_cache());
        connection.send(&answer.encode())?;
        answer.accepted()?;
        let transcript = Transcript::new(&hello, &answer, connection.binding);
        let mut bytes = [0; ATTACH_LEN];
        connection.read_exactly(&mut bytes)?;
        let attach = Attach::decode(&bytes)?;
        let peer = connection.peer.clone().unwrap_or_else(|| shown(address));
        let peer = (&*peer, connection.cipher);
        let found = self.find(&attach, &bytes, &transcript, peer);
        let (stream, is_new) = match found {
            Ok(found) => found,
            Err(refusal) => return Err(refuse(connection, &transcript, &bytes, refusal)),
        };
        let session = stream.session().clone();
        let attaching = stream.attach();
        let fits = match &attaching {
            None => Err(Refusal::Ended),
            Some(it) => it.accepts(attach.received).map_err(|_| Refusal::Offset),
        };
        let Some(attaching) = attaching.filter(|_| fits.is_ok()) else {
            let refusal = fits.err().unwrap_or(Refusal::Ended);
            return Err(refuse(connection, &transcript, &bytes, refusal));
        };
        let outcome = Ok(attaching.received);
        let welcome = Welcome { outcome }.encode(&transcript, &bytes, Some(&session.secret));
        connection.send(&welcome)?;
        let name = format!("a connection of {}", session.peer);
        let (receiver, sender) = connection.split(0, name)?;
        if !is_new {
            session.reconnects.fetch_add(1, Ordering::Relaxed);
        }
        attaching.go_on(receiver, sender);
        Ok(is_new.then_some(stream))
    }

    /// The stream that a connection is for, and whether it is new.
    fn find(
        &self,
        attach: &Attach,
        bytes: &[u8; ATTACH_LEN],
        transcript: &Transcript,
        peer: (&str, Option<&'static str>),
    ) -> Result<(Arc<Carried>, bool), Refusal> {
        let session = match attach.target {
            Target::New => self.begin(transcript, peer)?,
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
        let _turn = lock(&session.opening);
        match (session.find(attach.stream), attach.intent) {
            (Some(stream), Intent::Open | Intent::Resume) => Ok((stream, false)),
            (Some(stream), Intent::Abort) => {
                stream.close(StreamError::Aborted);
                Err(Refusal::Ended)
            }
            (None, Intent::Open) => {
                // Numbers go up, so that one which has ended is not opened again.
                let next = session.next.load(Ordering::Relaxed);
                if !(next..STREAMS).contains(&attach.stream) {
                    return Err(Refusal::Ended);
                }
                if self.streams() >= ALL_STREAMS {
                    return Err(Refusal::Busy);
                }
                session.next.store(attach.stream + 1, Ordering::Relaxed);
                Ok((session.add(attach.stream), true))
            }
            (None, _) => Err(Refusal::Ended),
        }
    }

    fn begin(
        &self,
        transcript: &Transcript,
        (peer, cipher): (&str, Option<&'static str>),
    ) -> Result<Arc<Shared>, Refusal> {
        let mut sessions = lock(&self.sessions);
        sessions.retain(|_, known| known.strong_count() > 0);
        let known = sessions.values().filter_map(Weak::upgrade);
        let of_peer = known.filter(|session| session.peer == peer).count();
        if sessions.len() >= SESSIONS || of_peer >= OF_ONE_PEER {
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
            (Role::Server, None),
        );
        // There is no thread for it.
        let session = session.map_err(|_| Refusal::Busy)?;
        sessions.insert(session.id(), Arc::downgrade(&session));
        Ok(session)
    }

    /// In MiB.
    fn page_cache(&self) -> u16 {
        u16::try_from(self.config.page_cache >> 20).unwrap_or(u16::MAX)
    }

    fn streams(&self) -> usize {
        let sessions = lock(&self.sessions);
        let sessions = sessions.values().filter_map(Weak::upgrade);
        sessions.map(|session| session.streams().len()).sum()
    }

    /// Passes a new stream on when its first bytes are there.
    fn introduce(&self, stream: Arc<Carried>) {
        let session = Session(stream.session().clone());
        stream.set_stall_timeout(HANDSHAKE);
        match stream.wait_for_first() {
            Ok(()) => {
                stream.set_stall_timeout(self.config.stall_timeout);
                let stream = Stream::Resumable(Resumable::new(stream));
                self.introduced.push(Introduced { stream, session });
            }
            Err(error) => {
                debug!("stream {}: nothing came: {error}", stream.number);
                stream.close(StreamError::ShutDown);
            }
        }
    }

    /// Certificates and keys as they are now, so that those which are replaced count at once.
    fn terms(&self) -> Result<Option<ServerTerms>, TlsError> {
        let security = lock(&self.security).clone();
        match security {
            Security::Insecure => Ok(None),
            security => security.server_terms(self.config.cipher).map(Some),
        }
    }

    fn warn(&self, problem: &dyn std::fmt::Display, address: Option<IpAddr>) {
        let from = shown(address);
        let mut warned = lock(&self.warned);
        if warned.0.elapsed() > Duration::from_secs(1) {
            *warned = (Instant::now(), 0);
        }
        warned.1 += 1;
        if warned.1 > WARNINGS {
            debug!("turning away a connection from {from}: {problem}");
            return;
        }
        warn!("turning away a connection from {from}: {problem}");
    }
}

/// Waits until the client has sent something: only then does its handshake cost more than waiting.
fn wait_for_client(socket: &Socket, deadline: Instant) -> io::Result<()> {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    if !wait_until(&mut fds, Some(deadline))? {
        return Err(io::ErrorKind::TimedOut.into());
    }
    match recv(socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT)? {
        (_, 0) => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

/// Tells the client why its connection goes no further.
fn refuse(
    mut connection: NewConnection,
    transcript: &Transcript,
    attach: &[u8; ATTACH_LEN],
    refusal: Refusal,
) -> TurnedAway {
    let outcome = Err(refusal);
    // It may have gone already.
    let _ = connection.send(&Welcome { outcome }.encode(transcript, attach, None));
    info!("refused: {refusal}");
    TurnedAway::Refused(refusal)
}

/// Tells a client that speaks without TLS, in case it is a Vamoose.
fn refuse_plain(socket: &Socket) {
    let answer = Answer::refuse(Refusal::Insecure).encode();
    // It may have gone, or be something else that does not care.
    if socket.set_patience(LINGER).is_ok() && socket.write_both(&answer, &[]).is_ok() {
        socket.finish();
        // Closing a socket with unread bytes would destroy the answer.
        let end = Instant::now() + LINGER;
        while let Ok(Some(1..)) = socket.read_until(&mut [0; 4096], Some(end))
            && Instant::now() < end
        {}
    }
}

fn shown(address: Option<IpAddr>) -> String {
    address.map_or_else(|| "this host".to_owned(), |address| address.to_string())
}

/// A connection that has not proved anything yet.
struct Stranger {
    server: Arc<Server>,
    address: Option<IpAddr>,
}

impl Stranger {
    fn admit(server: &Arc<Server>, address: Option<IpAddr>) -> Option<Self> {
        let mut strangers = lock(&server.strangers);
        let all: usize = strangers.values().sum();
        let of_address = strangers.entry(address).or_default();
        if all >= STRANGERS || *of_address >= OF_ONE_ADDRESS {
            return None;
        }
        *of_address += 1;
        let server = server.clone();
        Some(Self { server, address })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut strangers = lock(&self.server.strangers);
        if let Some(count) = strangers.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                strangers.remove(&self.address);
            }
        }
    }
}

/// Keeps handshakes at their rate.
struct Pace {
    due: Mutex<Instant>,
}

impl Pace {
    fn new() -> Self {
        let due = Mutex::new(Instant::now());
        Self { due }
    }

    /// Waits until the next handshake may begin.
    fn keep(&self) {
        let gap = Duration::from_secs(1) / RATE;
        let now = Instant::now();
        let ahead = {
            let mut due = lock(&self.due);
            *due = due.max(now) + gap;
            due.duration_since(now)
        };
        thread::sleep(ahead.saturating_sub(gap * BURST));
    }
}

/// Why a connection was turned away.
#[derive(Debug, Error)]
enum TurnedAway {
    #[error("it broke off")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("it was told: {0}")]
    Refused(Refusal),
}
