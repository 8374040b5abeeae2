//! The destination: receives a guest's memory and state, and runs the guest once the source has handed it over.
//!
//! ```text
//!  Destination::run     wait for a source ─> receive ─> load ─> wait for commit ─> run, answer the source
//!    (coordinator)                              ▲ synced, ended
//!                                               │
//!  channel threads           header, check, pages into guest memory              one for each channel
//! ```
//!
//! The coordinator is the caller's thread, and the only one that calls the VMM. Channels, control connections and
//! the listener send it an [`Event`] each. Hanging up ends a call that blocks. [`handover::Destination`] decides where the
//! guest is, one for each attempt.

mod accept;
mod acceptor;
mod channel;
mod coordinator;
mod guest_ram;
mod inbox;
mod make_zero;
mod past_attempts;
mod post_copy;
mod receiving;

use std::{
    sync::{Arc, Mutex, OnceLock, atomic::AtomicUsize, mpsc},
    thread,
    time::Duration,
};

use handover::{AttemptId, Incarnation, SourceMessage};
use multifd::Initial;
use tracing::field;
use vamoose_codec::{Engines, Settings};
use vamoose_link::{Address, Counters, Hangup, Session, Stats, Stream, lock, random_id};

use crate::{
    DestinationError, DestinationGuest, Ram, config::options, error::ChannelError, spans::in_span,
};
use accept::Connections;
pub use acceptor::{Accepted, Acceptor};
use coordinator::Coordinator;
use guest_ram::GuestRam;
use inbox::Inbox;
use past_attempts::PastAttempts;

/// Waits for a guest.
pub struct Destination {
    acceptor: Acceptor,
    /// `None`: the guest builds it.
    ram: Option<Ram>,
    config: DestinationConfig,
    handle: DestinationHandle,
    past: PastAttempts,
    /// A guest has arrived in this memory.
    arrived: bool,
}

options! {
    /// The options of a [`Destination`].
    #[derive(Clone)]
    #[non_exhaustive]
    pub struct DestinationConfig {
        /// How pages are decoded: which hardware may help.
        pub engines: Engines,
        /// How long the source may stop in the middle of a message or packet.
        pub stall_timeout: Duration,
        /// Most bytes of device state, with all its parts; in a post-copy it comes with a bit for each page of memory.
        pub max_state: u64,
        /// The VMM guarantees that guest memory reads as zeros (it has just been mapped), so that it need not be searched.
        pub memory_is_zero: bool,
        /// Whether large runs of pages that become zero are given back to the system. Not for memory that is
        /// pinned for devices.
        pub punch_holes: bool,
    }
}

impl DestinationConfig {
    /// Decodes with `engines`, everything else by default.
    pub fn new(engines: Engines) -> Self {
        Self {
            engines,
            stall_timeout: Duration::from_secs(15),
            max_state: 1 << 30,
            memory_is_zero: false,
            punch_holes: true,
        }
    }
}

impl Default for DestinationConfig {
    /// Decodes in software.
    fn default() -> Self {
        Self::new(Engines::software(Settings::default()))
    }
}

/// Watches and ends a destination from another thread.
#[derive(Clone)]
pub struct DestinationHandle(Arc<Mutex<Current>>);

/// The call of [`Destination::run`] that is under way, or the next one.
struct Current {
    cancel: Arc<Hangup>,
    stats: Arc<Stats>,
}

impl DestinationHandle {
    /// Stops waiting for a guest, or releases one that does not run here yet: it stays at the source. Without
    /// effect on one that runs. Ends one call of [`Destination::run`]: the one that is under way, or the next.
    pub fn cancel(&self) {
        lock(&self.0).cancel.hang_up();
    }

    /// Counters of what the current call of [`Destination::run`] has received, or the last one.
    pub fn moved(&self) -> Counters {
        lock(&self.0).stats.snapshot()
    }
}

/// A guest that has arrived.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Arrival {
    /// Counters of the received data: bytes, packets, pages, SYNCs, and the time of the decoders.
    pub moved: Counters,
    /// From the source's first message to the running guest.
    pub total_time: Duration,
    /// Whether it was resumed: a guest that was paused at the source stays so.
    pub running: bool,
    /// Whether the source has acknowledged it. If not, it was out of reach for the settle time.
    pub settled: bool,
}

/// Events that may wait for the coordinator.
const QUEUE: usize = 64;

impl Destination {
    /// Waits at `address` for a guest, over sessions with the default options. The guest gets the memory `ram`; or `None`: then it
    /// gets what [`DestinationGuest::prepare`] builds.
    ///
    /// # Errors
    /// When `address` is malformed or in use, keys or certificates cannot be used, or the system is out of a resource.
    #[cfg(feature = "_tls")]
    pub fn listen(
        address: &str,
        security: impl Into<vamoose_link::Security>,
        ram: impl Into<Option<Ram>>,
    ) -> Result<Self, DestinationError> {
        let config = vamoose_link::SessionConfig::new(security.into());
        let listener = vamoose_link::Listener::bind(&address.parse()?, config.stall_timeout)?;
        let sessions = vamoose_link::Sessions::new(vec![listener], config)?;
        Self::new(
            Acceptor::Sessions(sessions),
            ram,
            DestinationConfig::default(),
        )
    }

    /// Waits at `acceptor` for a guest, as [`listen`](Self::listen).
    ///
    /// # Errors
    /// When the system is out of a resource.
    pub fn new(
        acceptor: Acceptor,
        ram: impl Into<Option<Ram>>,
        config: DestinationConfig,
    ) -> Result<Self, DestinationError> {
        Ok(Self {
            acceptor,
            ram: ram.into(),
            config,
            handle: DestinationHandle(Arc::new(Mutex::new(Current {
                cancel: Arc::new(Hangup::new()?),
                stats: Arc::default(),
            }))),
            past: PastAttempts::new(Incarnation(random_id()?)),
            arrived: false,
        })
    }

    /// Where it listens, with the ports that the system chose.
    pub fn addresses(&self) -> Vec<&Address> {
        self.acceptor.addresses()
    }

    /// A handle that ends this destination from another thread.
    pub fn handle(&self) -> DestinationHandle {
        self.handle.clone()
    }

    /// Waits for a source, receives its guest and resumes `guest`. Guest memory belongs to the migration from here on: it is
    /// made zero while this waits. Returns when the source has acknowledged that the guest runs. Call this on a separate thread,
    /// and keep the process until it returns.
    ///
    /// # Errors
    /// After any error, the guest has never run here, and the source knows that or will find out. The content of guest memory is
    /// undefined. `run` may be called again for another attempt, but not after a guest has arrived.
    pub fn run(&mut self, guest: &mut dyn DestinationGuest) -> Result<Arrival, DestinationError> {
        if self.arrived {
            return Err(DestinationError::AlreadyArrived);
        }
        let span = tracing::error_span!("migration", role = "destination", attempt = field::Empty);
        let _entered = span.enter();
        let (hangup, next) = (Hangup::new()?, Arc::new(Hangup::new()?));
        let stats = Arc::<Stats>::default();
        let closing = {
            let mut current = lock(&self.handle.0);
            current.stats = stats.clone();
            current.cancel.clone()
        };
        let memory = OnceLock::new();
        if let Some(ram) = &self.ram {
            let ram = GuestRam::new(ram, self.config.punch_holes)?;
            memory.get_or_init(|| ram);
        }
        let (events_in, events) = mpsc::sync_channel(QUEUE);
        let connections = Connections {
            events: events_in.clone(),
            max_state: self.config.max_state,
            stall_timeout: self.config.stall_timeout,
            unidentified: Arc::new(AtomicUsize::new(0)),
        };
        let result = thread::scope(|scope| {
            let mut coordinator = Coordinator {
                config: &self.config,
                memory: &memory,
                arrived: &mut self.arrived,
                make_zero: None,
                inbox: Inbox::new(events, &mut self.past),
                events_in,
                scope,
                stats,
            };
            // Also when the VMM panics: the scope waits for its threads.
            let _hang_up = hangup.guard();
            let (acceptor, hangup, closing) = (&self.acceptor, &hangup, &closing);
            scope.spawn(in_span(move || {
                accept::run(acceptor, hangup, closing, &connections, scope);
            }));
            coordinator.begin_making_zero();
            coordinator.run(guest)
        });
        if closing.is_hung_up() {
            lock(&self.handle.0).cancel = next;
        }
        result
    }
}

/// Makes all memory of `ram` read as zeros, without touching untouched memory.
#[cfg(feature = "_tls")]
pub(crate) fn make_zero(ram: &Ram) -> Result<(), crate::RamError> {
    GuestRam::new(ram, true)?.make_zero(&make_zero::Progress::default());
    Ok(())
}

/// A connection of a source.
#[derive(Clone)]
struct Connection {
    stream: Arc<Stream>,
    /// The session that the stream belongs to.
    session: Option<Session>,
}

/// An event for the coordinator. Control connections have numbers.
enum Event {
    /// A control connection, and the first message on it.
    Connected {
        number: u64,
        attempt: AttemptId,
        message: SourceMessage,
        connection: Connection,
    },
    Channel(Initial, Connection),
    Message(u64, SourceMessage),
    State(u64, Vec<u8>),
    /// A part of the device state that goes ahead.
    Part(u64, Vec<u8>),
    /// A control connection has ended.
    Disconnected(u64, DestinationError),
    /// A channel has written all its pages of this round.
    Synced(usize, u64),
    /// A channel has ended.
    Ended(usize, Result<(), ChannelError>),
    /// Something may have become of the missing pages.
    PostCopy,
    Cancelled,
}
