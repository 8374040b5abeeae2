//! Sessions between two Vamooses: streams that survive the loss of the connections that carry them.
//!
//! The protocol is [`vamoose_session`]'s. Here are its connections, clocks and threads:
//!
//! ```text
//!  client                                    server
//!  Session::dial ── Paths ── connection ──>  Sessions (accepts, authenticates, attaches)
//!     open ───────────────── connection ──>     └─ Introduced: a stream of a session
//!     └ a thread for each stream that is being dialled again; one for each session that looks after its streams
//! ```

mod admission;
mod connection;
mod dialer;
mod incoming;
mod keeper;
mod resumable;
mod server;
#[cfg(feature = "fuzzing")]
pub mod testing;

use std::{
    collections::{BTreeSet, HashMap},
    fmt, io,
    net::IpAddr,
    ptr,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use vamoose_session::{
    frame::Report,
    handshake::{Offer, Secret, SessionId},
    stream::Bounds,
};

pub(crate) use vamoose_session::frame::{MAX_LEN, Urgency};
pub use vamoose_session::stream::StreamError;

use self::{dialer::Paths, keeper::Keeper, resumable::ResumableStream};
pub use self::{
    dialer::{DialError, Opening},
    resumable::Resumable,
    server::{Introduced, Sessions, SessionsError},
};

use crate::{
    Address, AddressError, Cipher, End, Limit, PageCaches, PageStore, Security, Stream, TlsError,
    delta::Share,
    lock, millis,
    pace::Member,
    threads,
    timeouts::{self, LOOK},
};

/// How sessions behave.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// How the ends authenticate each other.
    pub security: Security,
    /// Cipher that the client prefers; the server accepts it.
    pub cipher: Cipher,
    /// Whether frames carry checksums of their bytes. Headers always do.
    pub check: bool,
    /// How long a stream may be without progress before it is lost.
    pub reconnect_timeout: Duration,
    /// How long a peer may leave bytes unread.
    pub stall_timeout: Duration,
    /// Limit for the unacknowledged bytes of all streams of a session together.
    pub window: usize,
    /// Limit for the memory of page versions, to which differences refer, in bytes; 0 turns differences off.
    pub page_cache: usize,
    /// Source of that memory, which may grant less.
    pub page_caches: PageCaches,
    /// Limit of what all sessions of a server receive together.
    pub limit: Limit,
    /// Pages of the guests that come and go. A server tells its clients what is in it.
    pub page_store: Option<PageStore>,
    /// Whether a client uses its server's page store: each channel must then [listen](crate::StoreListener).
    pub takes_store: bool,
}

impl SessionConfig {
    /// Defaults, with ends that authenticate each other by `security`.
    pub fn new(security: Security) -> Self {
        if security != Security::Insecure {
            // Seeds the generator, which takes 20 ms, beside what is done before the first handshake. The next use waits for it, and
            // reports a failure.
            let _ = threads::spawn(|| aws_lc_rs::rand::fill(&mut [0]));
        }
        Self {
            security,
            cipher: Cipher::default(),
            check: true,
            reconnect_timeout: timeouts::RECONNECT,
            stall_timeout: timeouts::STALL,
            window: 64 << 20,
            page_cache: 256 << 20,
            page_caches: PageCaches::default(),
            limit: Limit::default(),
            page_store: None,
            takes_store: false,
        }
    }

    /// Checks whether this `end` can use its certificates or keys.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check(&self, end: End) -> Result<(), TlsError> {
        match end {
            End::Client => self.security.client_terms(self.cipher).map(drop),
            End::Server => self.security.server_terms(self.cipher).map(drop),
        }
    }
}

/// A path to the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Address of the peer.
    pub to: Address,
    /// Local address; `None` for any.
    pub bind: Option<IpAddr>,
}

impl From<Address> for Route {
    fn from(to: Address) -> Self {
        Self { to, bind: None }
    }
}

/// Another Vamoose: its paths, and the configuration of sessions with it.
#[derive(Clone, Debug)]
pub struct Remote {
    /// Paths to it; at least one.
    pub paths: Vec<Route>,
    /// Configuration of its sessions.
    pub config: SessionConfig,
}

impl Remote {
    /// The Vamoose at `address`, with the default options of sessions.
    ///
    /// # Errors
    /// When `address` is malformed.
    pub fn new(address: &str, security: impl Into<Security>) -> Result<Self, AddressError> {
        Ok(Self {
            paths: vec![address.parse::<Address>()?.into()],
            config: SessionConfig::new(security.into()),
        })
    }

    /// Begins a session.
    ///
    /// # Errors
    /// As [`Session::dial`].
    pub fn dial(&self) -> Result<(Session, Stream), DialError> {
        self.dial_for(1)
    }

    /// Begins a session that is to have this number of `streams` soon: the handshakes of their connections run side by side.
    ///
    /// # Errors
    /// As [`Session::dial`].
    pub fn dial_for(&self, streams: usize) -> Result<(Session, Stream), DialError> {
        dialer::begin(self.paths.clone(), self.config.clone(), streams)
    }

    /// As [`Remote::dial_for`]. A server that cannot be reached yet is dialled again for as long as `limit`.
    ///
    /// # Errors
    /// As [`Session::dial`].
    pub fn reach(&self, streams: usize, limit: Duration) -> Result<(Session, Stream), DialError> {
        dialer::reach(self.paths.clone(), &self.config, streams, limit)
    }

    /// The first path's address: it names the Vamoose. Empty if there is none.
    pub fn address(&self) -> String {
        self.paths
            .first()
            .map_or_else(String::new, |path| path.to.to_string())
    }

    /// The Vamoose at `address`: this one, or another one with the same configuration.
    ///
    /// # Errors
    /// When `address` is malformed.
    pub fn at(&self, address: &str) -> Result<Self, AddressError> {
        if address == self.address() {
            return Ok(self.clone());
        }
        Ok(Self {
            paths: vec![address.parse::<Address>()?.into()],
            config: self.config.clone(),
        })
    }
}

/// Statistics of a session's path.
#[derive(Clone, Debug)]
pub struct PathStatus {
    /// The path.
    pub path: Route,
    /// Number of streams on it now.
    pub streams: usize,
    /// Bytes that the peer has received over the path.
    pub delivered: u64,
    /// Lost connections and failed attempts to connect.
    pub failures: u64,
}

/// One end of a session.
#[derive(Clone)]
pub struct Session(Arc<Shared>);

/// State shared by the streams of a session.
pub(crate) struct Shared {
    secret: Secret,
    config: SessionConfig,
    peer: String,
    /// Authenticated identity of the peer.
    identity: Option<String>,
    cipher: Option<&'static str>,
    /// What the server has for the client's pages.
    offer: Offer,
    streams: Mutex<HashMap<u32, Arc<ResumableStream>>>,
    /// Number of streams: writers need it for every packet.
    count: AtomicUsize,
    /// Number of the next stream, at the client.
    next: AtomicU32,
    /// Numbers of all streams so far, at the server: a stream that has ended is not opened again.
    opened: Mutex<BTreeSet<u32>>,
    reconnects: AtomicU64,
    corrupt_frames: AtomicU64,
    /// A finished stream was lost before the peer had all of it.
    is_undelivered: AtomicBool,
    /// How urgent the guest is whose bytes are sent.
    is_paused: AtomicBool,
    is_finishing: AtomicBool,
    /// What the peer wants to receive at most, as in [`Report::share`].
    reported_share: AtomicU32,
    /// What is received.
    arrivals: Member,
    /// How long a stream may be without a connection.
    reconnect_millis: AtomicU64,
    role: Role,
}

/// Faults of the link that a session has survived.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkFaults {
    /// Number of times that a stream continued over another connection.
    pub reconnects: u64,
    /// Frames with a wrong checksum.
    pub corrupt_frames: u64,
}

enum Role {
    Client(Arc<Paths>),
    /// Memory for versions of received pages.
    Server(Share),
}

impl Session {
    /// Begins a session with the server at the paths, which are tried in order.
    ///
    /// # Errors
    /// When no path leads to a Vamoose that accepts this end.
    pub fn dial(paths: Vec<Route>, config: SessionConfig) -> Result<(Self, Stream), DialError> {
        dialer::begin(paths, config, 1)
    }

    /// The session of a stream.
    pub(crate) fn of(stream: &Resumable) -> Self {
        Self(stream.stream().session().clone())
    }

    /// Opens another stream. The server learns of it with the stream's first bytes.
    ///
    /// # Errors
    /// When the session's peer cannot be reached within the reconnect timeout, or refuses.
    pub fn open(&self) -> Result<Stream, DialError> {
        dialer::open(&self.0, self.0.next_number())
    }

    /// Begins to open streams, side by side.
    pub fn open_ahead(&self, streams: usize) -> Vec<Opening> {
        (0..streams).map(|_| Opening::begin(self)).collect()
    }

    /// The peer's name or key, or its address without authentication.
    pub fn peer(&self) -> &str {
        &self.0.peer
    }

    /// The peer's key, or the first name in its certificate; `None` without authentication.
    pub fn identity(&self) -> Option<&str> {
        self.0.identity.as_deref()
    }

    /// Cipher of the connections; `None` without TLS.
    pub fn cipher(&self) -> Option<&'static str> {
        self.0.cipher
    }

    /// Whether payloads carry checksums.
    pub fn is_checked(&self) -> bool {
        self.0.config.check
    }

    /// The memory for versions of pages that both ends have; `None` at the server, which sends no differences to them, and without
    /// checksums.
    pub fn page_cache(&self) -> Option<usize> {
        let is_sender = matches!(self.0.role, Role::Client(_));
        let offered = usize::from(self.0.offer.page_cache) << 20;
        let both = self.0.config.page_cache.min(offered);
        (is_sender && self.0.config.check).then_some(both)
    }

    /// Whether the server has a page store, and the client uses it.
    pub fn has_store(&self) -> bool {
        self.0.offer.has_store
    }

    /// Memory for versions of received pages.
    pub(crate) fn kept_pages(&self) -> usize {
        match &self.0.role {
            Role::Client(_) => self.0.config.page_cache,
            Role::Server(share) => share.bytes(),
        }
    }

    /// Configuration of the session.
    pub fn config(&self) -> &SessionConfig {
        &self.0.config
    }

    /// Statistics of the paths, at the client.
    pub fn paths(&self) -> Vec<PathStatus> {
        match &self.0.role {
            Role::Client(paths) => paths.status(&self.0.streams()),
            Role::Server(_) => Vec::new(),
        }
    }

    /// Longest round-trip time of the connections, measured by TCP; zero if unknown.
    pub fn round_trip(&self) -> Duration {
        let streams = self.0.streams();
        let trips = streams.iter().filter_map(|stream| stream.round_trip());
        trips.max().unwrap_or_default()
    }

    /// Number of times that a stream continued over another connection.
    pub fn reconnects(&self) -> u64 {
        self.0.reconnects.load(Ordering::Relaxed)
    }

    /// Faults of the link so far.
    pub fn faults(&self) -> LinkFaults {
        LinkFaults {
            reconnects: self.reconnects(),
            corrupt_frames: self.0.corrupt_frames.load(Ordering::Relaxed),
        }
    }

    /// For how long a stream has made no progress because it has no connection: the longest time of all streams.
    pub fn disconnected(&self) -> Option<Duration> {
        let streams = self.0.streams();
        let troubles = streams.iter().filter_map(|stream| stream.trouble());
        troubles.map(|(_, since)| since.elapsed()).max()
    }

    /// Whether a stream has a connection.
    pub fn is_connected(&self) -> bool {
        (self.0.streams().iter()).any(|stream| stream.path().is_some())
    }

    /// Time that a stream may be without a connection.
    pub fn reconnect_timeout(&self) -> Duration {
        self.0.reconnect_timeout()
    }

    /// Lets all streams be without a connection for at least `timeout`, from now on.
    pub fn keep_trying(&self, timeout: Duration) {
        // No stream is created meanwhile with the old timeout.
        let streams = lock(&self.0.streams);
        let timeout = timeout.max(self.0.reconnect_timeout());
        let millis = millis(timeout);
        self.0.reconnect_millis.store(millis, Ordering::Release);
        let all: Vec<_> = streams.values().cloned().collect();
        drop(streams);
        for stream in all {
            stream.set_reconnect_timeout(timeout);
        }
    }

    /// Whether both are ends of one session on this host.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Sets whether the guest is paused for its switchover: it goes first where guests share a limit, and working streams stay on
    /// their paths, as a move interrupts a stream. Streams whose path fails are moved all the same.
    pub fn set_paused(&self, is_paused: bool) {
        if self.0.is_paused.swap(is_paused, Ordering::AcqRel) != is_paused {
            self.0.hurry_report();
        }
    }

    /// Sets whether the guest sends few bytes in a round.
    pub(crate) fn set_finishing(&self, is_finishing: bool) {
        if self.0.is_finishing.swap(is_finishing, Ordering::AcqRel) != is_finishing {
            self.0.hurry_report();
        }
    }

    /// How urgent the guest is whose bytes are sent.
    pub(crate) fn urgency(&self) -> Urgency {
        self.0.urgency()
    }

    /// What the peer wants to receive at most: KiB per second, or 0 for any.
    pub(crate) fn reported_share(&self) -> u32 {
        self.0.reported_share.load(Ordering::Relaxed)
    }

    /// Gives up all streams.
    pub fn shut_down(&self) {
        for stream in self.0.streams() {
            stream.close(StreamError::ShutDown);
        }
    }

    /// Gives up all streams but `spared`.
    pub fn shut_down_but(&self, spared: &Stream) {
        let is_spared =
            |stream| (spared.resumable()).is_some_and(|it| Arc::ptr_eq(it.stream(), stream));
        for stream in self.0.streams().iter().filter(|it| !is_spared(it)) {
            stream.close(StreamError::ShutDown);
        }
    }

    /// For how long the peer's host has refused the connections of a stream that lost its own, on all paths, at the client: no process
    /// listens there.
    pub fn refused(&self) -> Option<Duration> {
        match &self.0.role {
            Role::Client(paths) if paths.all_refuse() => self.disconnected(),
            _ => None,
        }
    }

    /// Waits until the peer has received all finished streams. False after `timeout`, or if a finished stream was lost.
    pub fn drain(&self, timeout: Duration) -> bool {
        let began = Instant::now();
        let streams = self.0.streams();
        let left = || timeout.saturating_sub(began.elapsed());
        // A stream that has ended meanwhile has nothing left to wait for, but may have been lost with bytes.
        let is_drained = |stream: &Arc<ResumableStream>| {
            stream.drain(left()) || stream.is_closed() && !stream.is_undelivered()
        };
        streams.iter().all(is_drained) && !self.0.is_undelivered.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session with {}", self.0.peer)
    }
}

impl Shared {
    fn new(
        secret: Secret,
        config: SessionConfig,
        (peer, identity): (String, Option<String>),
        cipher: Option<&'static str>,
        (role, offer): (Role, Offer),
    ) -> io::Result<Arc<Self>> {
        let arrivals = config.limit.join();
        let shared = Arc::new(Self {
            secret,
            reconnect_millis: AtomicU64::new(millis(config.reconnect_timeout)),
            config,
            peer,
            identity,
            cipher,
            offer,
            streams: Mutex::default(),
            count: AtomicUsize::new(0),
            next: AtomicU32::new(0),
            opened: Mutex::default(),
            reconnects: AtomicU64::new(0),
            corrupt_frames: AtomicU64::new(0),
            is_undelivered: AtomicBool::new(false),
            is_paused: AtomicBool::new(false),
            is_finishing: AtomicBool::new(false),
            reported_share: AtomicU32::new(0),
            arrivals,
            role,
        });
        let watched = Arc::downgrade(&shared);
        threads::spawn(move || look_after(&watched))?;
        Ok(shared)
    }

    fn urgency(&self) -> Urgency {
        let is = |flag: &AtomicBool| flag.load(Ordering::Acquire);
        match (is(&self.is_paused), is(&self.is_finishing)) {
            (true, _) => Urgency::Paused,
            (false, true) => Urgency::Finishing,
            (false, false) => Urgency::Filling,
        }
    }

    /// What this end reports now: the urgency, to a peer with a limit, and the share.
    fn report(&self) -> (Urgency, u32) {
        let has_limit = self.reported_share.load(Ordering::Relaxed) != 0;
        let urgency = has_limit.then(|| self.urgency());
        (urgency.unwrap_or_default(), self.arrivals.reported())
    }

    /// Reports to a peer with a limit at once.
    fn hurry_report(&self) {
        if self.reported_share.load(Ordering::Relaxed) != 0 {
            self.streams().iter().for_each(|stream| stream.report_now());
        }
    }

    /// Takes in what the peer has reported. Returns whether it waits for an answer.
    fn on_report(&self, report: Report) -> bool {
        self.reported_share.store(report.share, Ordering::Relaxed);
        self.arrivals.set_urgency(report.urgency)
    }

    fn reconnect_timeout(&self) -> Duration {
        Duration::from_millis(self.reconnect_millis.load(Ordering::Acquire))
    }

    fn id(&self) -> SessionId {
        self.secret.id()
    }

    fn add(self: &Arc<Self>, number: u32) -> Arc<ResumableStream> {
        let stream = Arc::new(ResumableStream::new(
            number,
            self.clone(),
            self.config.stall_timeout,
        ));
        let mut streams = lock(&self.streams);
        streams.insert(number, stream.clone());
        self.count.store(streams.len(), Ordering::Relaxed);
        drop(streams);
        stream
    }

    /// Number of the next stream that this client opens.
    fn next_number(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn find(&self, number: u32) -> Option<Arc<ResumableStream>> {
        lock(&self.streams).get(&number).cloned()
    }

    /// A stream has ended; `is_undelivered` if it was lost before the peer had all that was finished.
    fn ended(&self, stream: &ResumableStream, is_undelivered: bool) {
        if is_undelivered {
            self.is_undelivered.store(true, Ordering::Release);
        }
        let mut streams = lock(&self.streams);
        let found = streams.get(&stream.number);
        if found.is_some_and(|found| ptr::eq(&**found, stream)) {
            streams.remove(&stream.number);
        }
        self.count.store(streams.len(), Ordering::Relaxed);
    }

    fn streams(&self) -> Vec<Arc<ResumableStream>> {
        lock(&self.streams).values().cloned().collect()
    }

    /// Limits of one stream's unacknowledged bytes: all streams together stay within the window.
    fn bounds(&self) -> Bounds {
        let streams = self.count.load(Ordering::Relaxed);
        Bounds {
            usual: self.config.window / streams.max(FEW_STREAMS),
            most: self.config.window / streams.max(1),
        }
    }

    /// Bytes that the peer has received over all paths; `None` at the server.
    pub(crate) fn delivered_bytes(&self) -> Option<u64> {
        match &self.role {
            Role::Client(paths) => Some(paths.delivered_bytes()),
            Role::Server(_) => None,
        }
    }

    /// Counts bytes that the peer has received over a path.
    fn delivered(&self, path: usize, bytes: u64) {
        if let Role::Client(paths) = &self.role {
            paths.delivered(path, bytes);
        }
    }

    fn lost(&self, stream: &Arc<ResumableStream>, path: usize) {
        if let Role::Client(paths) = &self.role {
            paths.failed(path);
            let lost = stream.clone();
            let dials = threads::spawn(move || dialer::resume(&lost));
            if let Err(error) = dials {
                stream.close(StreamError::NoThread {
                    error: error.kind(),
                });
            }
        }
    }
}

/// Number of streams among which the window is divided at least, unless the link is fast and long.
const FEW_STREAMS: usize = 16;

/// Watches the streams of a session until the session is gone.
fn look_after(session: &Weak<Shared>) {
    let mut keeper = Keeper::default();
    loop {
        thread::sleep(LOOK);
        let Some(session) = session.upgrade() else {
            return;
        };
        let streams = session.streams();
        for stream in &streams {
            stream.look_after();
        }
        let Role::Client(paths) = &session.role else {
            continue;
        };
        for stream in streams.iter().filter(|stream| stream.is_worn()) {
            dialer::replace(stream, paths.order(stream.number));
        }
        let holds = session.is_paused.load(Ordering::Acquire);
        if let Some((stream, path)) = keeper.watch(&streams, &paths.usable(), holds) {
            dialer::replace(stream, vec![path]);
        }
    }
}
