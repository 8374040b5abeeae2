//! A migration from this host: what connects to one place, from the first connection to the last one's end.
//!
//! ```text
//!  sort        what the connections are                        (module sorting)
//!  announce    to the peer's gateway, when that is known; it dials the waiting QEMU, or says why not
//!  move        a relay to the peer's gateway, or bytes as they are
//!  goodbye     each gateway says how its side ended; one line in the journal
//! ```

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};
use tracing::{debug, info, warn};
use vamoose_link::{
    Hangup, LinkFaults, PollQueue, Session, SocketError, Stats, Stream, lock, wait_for,
};

use super::{
    GatewayPeer,
    account::{Account, Ending},
    announce::{AnnounceError, Conversation, MIGRATION, Message, OPAQUE, announce},
    front::Rounds,
    guest,
    place::Place,
    slots::{Slot, Slots},
    sorting::{Action, Carries, Event},
};
use crate::{
    Accept, Config, Dialer, Observer, Relay, RelayError, Role, UnderWay, Way,
    first_bytes::{FirstBytes, MAGIC_LEN, classify, peek},
    observer::Observation,
    opaque::pass_bytes,
};

/// What connects to one place: a port of a peer's alias, or a stream's socket.
pub(super) struct Door {
    peer: Arc<GatewayPeer>,
    at: Place,
    config: Config,
    slots: Arc<Slots>,
    observer: Arc<dyn Observer>,
    /// Of those who accept what comes here, and how many were done when it was first asked whether that is all.
    rounds: Arc<Rounds>,
    asked: OnceLock<u64>,
    came: PollQueue<(Arc<Stream>, FirstBytes)>,
    /// How many of them there are.
    waiting: AtomicUsize,
    carries: Mutex<Carries>,
    /// Those that wait until it is known what they are, or for the relay.
    held: Mutex<VecDeque<Arc<Stream>>>,
    announced: Mutex<Option<Announced>>,
    guest: Mutex<Option<String>>,
    began: Instant,
    stats: Arc<Stats>,
    hangup: Hangup,
}

/// The peer's gateway expects the migration.
struct Announced {
    session: Session,
    conversation: Conversation,
    _slot: Slot,
}

/// How often the conversation with the peer's gateway is looked at while nothing else happens.
const TICK: Duration = Duration::from_millis(20);

/// How long the peer may take to acknowledge the last bytes.
const DRAIN: Duration = Duration::from_secs(5);

/// Connections that may wait at once: more than a migration has.
const MOST_WAITING: usize = 512;

impl Door {
    pub(super) fn new(
        peer: Arc<GatewayPeer>,
        at: Place,
        mut config: Config,
        slots: Arc<Slots>,
        observer: Arc<dyn Observer>,
        rounds: Arc<Rounds>,
    ) -> io::Result<Self> {
        config.max_bandwidth = peer.max_bandwidth.or(config.max_bandwidth);
        Ok(Self {
            peer,
            at,
            config,
            slots,
            observer,
            rounds,
            asked: OnceLock::new(),
            came: PollQueue::new()?,
            waiting: AtomicUsize::new(0),
            carries: Mutex::default(),
            held: Mutex::default(),
            announced: Mutex::default(),
            guest: Mutex::default(),
            began: Instant::now(),
            stats: Arc::default(),
            hangup: Hangup::new()?,
        })
    }

    /// A connection has come.
    pub(super) fn push(&self, stream: Arc<Stream>, first: FirstBytes) {
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= MOST_WAITING {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return debug!("{MOST_WAITING} connections wait already: one is closed");
        }
        self.came.push((stream, first));
    }

    fn pop(&self) -> Option<(Arc<Stream>, FirstBytes)> {
        let popped = self.came.pop()?;
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(popped)
    }

    pub(super) fn hang_up(&self) {
        self.hangup.hang_up();
    }

    pub(super) fn under_way(&self) -> UnderWay {
        let peer = self.peer.name.clone();
        let moved = self.stats.snapshot();
        let carries = *lock(&self.carries);
        UnderWay {
            name: lock(&self.guest).clone(),
            target: Some(self.at.target().to_string()),
            method: (carries == Carries::Migration).then(|| self.config.method.name().to_owned()),
            ..UnderWay::new("gateway", Role::Source, peer, self.began, &moved)
        }
    }

    /// Connections that came too late for what the port carried: those of what it carries next, if that has begun.
    pub(super) fn leftover(&self) -> Vec<(Arc<Stream>, FirstBytes)> {
        let is_migration = *lock(&self.carries) == Carries::Migration;
        let late = std::iter::from_fn(|| self.pop());
        late.skip_while(|(_, first)| is_migration && *first != FirstBytes::Main)
            .collect()
    }

    /// Runs to the end of what the port carries.
    pub(super) fn run(self: &Arc<Self>) -> Closing {
        let sorted = self.sort();
        let begin = || {
            let (peer, stats) = (&*self.peer.name, self.stats.clone());
            Observation::begin(&self.observer, Way::To, peer, self.began, stats)
        };
        let ended = match sorted {
            Ok(Carries::Opaque(why)) => {
                let (peer, target) = (&self.peer.name, self.at.target());
                info!("to {peer}, {target}: passing bytes through as they are, encrypted: {why}");
                Some((begin(), self.pass(OPAQUE)))
            }
            Ok(Carries::Migration) => Some((begin(), self.pass(MIGRATION))),
            Ok(Carries::Undecided) => None,
            Err(error) => Some((begin(), Ending::of(Err(error)))),
        };
        self.hangup.hang_up();
        lock(&self.held).clear();
        Closing {
            announced: lock(&self.announced).take(),
            ended: ended.map(|(observation, ending)| {
                let account = Account {
                    observation,
                    target: self.at.target(),
                    guest: lock(&self.guest).take(),
                };
                (account, ending)
            }),
        }
    }

    /// Finds out what the port carries: still undecided when all who came have gone again without a byte.
    fn sort(&self) -> Result<Carries, RelayError> {
        loop {
            if let Some(event) = self.next_event()? {
                match self.decide(event) {
                    Action::Begin => return Ok(*lock(&self.carries)),
                    // Somebody is silent: whoever waits for the connection may be the first to send.
                    Action::Hold => drop(self.announce()?),
                    Action::Take | Action::TurnAway | Action::Nothing => {}
                }
                continue;
            }
            if lock(&self.held).is_empty() {
                return Ok(Carries::Undecided);
            }
            self.wait(TICK)?;
        }
    }

    fn decide(&self, event: Event) -> Action {
        let mut carries = lock(&self.carries);
        let action;
        (*carries, action) = carries.after(event);
        action
    }

    /// What has happened while nobody has sent anything.
    fn next_event(&self) -> Result<Option<Event>, RelayError> {
        if let Some((stream, first)) = self.pop() {
            self.hold(stream);
            return Ok(Some(Event::Came(first)));
        }
        let mut held = lock(&self.held);
        let mut begun = None;
        held.retain(|stream| {
            let mut bytes = [0; MAGIC_LEN];
            let peeked = stream.socket().map(|socket| peek(socket, &mut bytes));
            let Some(Some(length)) = peeked else {
                return false;
            };
            let first = classify(&bytes[..length], true);
            if let Some(first) = first.filter(|it| *it != FirstBytes::Silent) {
                begun.get_or_insert(Event::Came(first));
            }
            true
        });
        drop(held);
        if begun.is_some() {
            return Ok(begun);
        }
        let mut announced = lock(&self.announced);
        let Some(it) = &mut *announced else {
            return Ok(None);
        };
        let peer = || self.peer.name.clone();
        let polled = it.conversation.poll();
        let message = polled.map_err(|source| AnnounceError::Conversation {
            peer: peer(),
            source,
        })?;
        Ok(matches!(message, Some(Message::Spoke)).then_some(Event::DestinationSpoke))
    }

    fn hold(&self, stream: Arc<Stream>) {
        self.hangup.register(&stream);
        let mut guest = lock(&self.guest);
        if guest.is_none() {
            *guest = guest::name_of(&stream);
        }
        drop(guest);
        lock(&self.held).push_back(stream);
    }

    fn wait(&self, time: Duration) -> Result<(), RelayError> {
        let held: Vec<_> = lock(&self.held).iter().cloned().collect();
        let mut fds = vec![
            PollFd::new(&self.hangup, PollFlags::IN),
            PollFd::new(&self.came, PollFlags::IN),
        ];
        let sockets = held.iter().filter_map(|stream| stream.socket());
        fds.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
        wait_for(&mut fds, time).map_err(RelayError::SetUp)?;
        match self.hangup.is_hung_up() {
            true => Err(RelayError::Cancelled),
            false => Ok(()),
        }
    }

    /// Asks the peer's gateway, once.
    fn announce(&self) -> Result<Session, RelayError> {
        let mut announced = lock(&self.announced);
        if let Some(announced) = &*announced {
            return Ok(announced.session.clone());
        }
        let peer = &self.peer;
        let slot = self.slots.take(Way::To, &peer.name, peer.migrations);
        let slot = slot.ok_or_else(|| AnnounceError::Busy {
            peer: peer.name.clone(),
            most: peer.migrations,
        })?;
        let guest = lock(&self.guest).clone();
        let (session, conversation) = announce(peer, &self.at.target(), guest)?;
        *announced = Some(Announced {
            session: session.clone(),
            conversation,
            _slot: slot,
        });
        Ok(session)
    }

    /// Moves what the port carries to the peer's gateway, by streams of this kind.
    fn pass(self: &Arc<Self>, kind: u8) -> Ending {
        let door = self.clone();
        let dialer = Dialer::announced(Box::new(move || door.announce()), &[kind]);
        let relay = Relay {
            accept: &**self,
            dialer: &dialer,
            config: &self.config,
            hangup: &self.hangup,
            stats: &self.stats,
            on_loaded: &|| (),
        };
        Ending::of(match kind {
            MIGRATION => relay.relay(),
            _ => pass_bytes(&relay, &mut || true),
        })
    }
}

/// The connections of what the port carries, for a relay.
impl Accept for Door {
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        if let Some(stream) = lock(&self.held).pop_front() {
            return Ok(Some(stream));
        }
        while let Some((stream, first)) = self.pop() {
            if self.decide(Event::Came(first)) == Action::Take {
                self.hangup.register(&stream);
                return Ok(Some(stream));
            }
            warn!("turning away a connection that is none of the migration's");
        }
        Ok(None)
    }

    fn is_settled(&self) -> bool {
        let asked = *self.asked.get_or_init(|| self.rounds.done());
        self.rounds.have_passed(asked, &self.at)
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.came.as_fd()
    }
}

/// A migration whose connections have ended: what is left to be said.
pub(super) struct Closing {
    announced: Option<Announced>,
    ended: Option<(Account, Ending)>,
}

impl Closing {
    /// Exchanges the last words with the peer's gateway, and writes the line in the journal.
    pub(super) fn finish(self) {
        let ending = self.ended.as_ref().map(|(_, ending)| ending);
        let (error, mut faults) = (ending.and_then(Ending::error), LinkFaults::default());
        let theirs = self.announced.and_then(|mut announced| {
            let theirs = announced.conversation.end(error);
            if !announced.session.drain(DRAIN) {
                warn!("the other gateway has not acknowledged the end");
            }
            faults = announced.session.faults();
            announced.session.shut_down();
            theirs
        });
        if let Some((account, ending)) = self.ended {
            account.write(&ending.with_peers(theirs), faults);
        }
    }
}
