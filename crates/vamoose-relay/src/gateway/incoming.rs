//! A migration to this host: a session that another gateway begins with an announcement.
//!
//! The waiting QEMU is dialled before the announcement is accepted. This connection becomes the migration's first, because a
//! QEMU treats a connection that closes without data as a failed migration.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};
use tracing::{info, warn};
use vamoose_link::{
    Address, Hangup, PollQueue, Session, Socket, SocketError, Stats, Stream, dial, lock, wait_for,
};

use super::{
    GatewayConfig,
    account::{Account, MigrationEnd},
    announce::{Conversation, DRAIN, MIGRATION, Message, OPAQUE, TICK, VERSION, printable},
    endpoint::Target,
    slots::{Slot, Slots},
};
use crate::{
    Accept, Config, Dialer, Observer, Relay, RelayError, Role, UnderWay,
    accept::kind_of,
    chain,
    first_bytes::peek,
    observer::Observation,
    opaque::{Opaque, pass_bytes},
    service::Draining,
};

/// A migration that another gateway has begun.
pub(super) struct IncomingMigration {
    session: Session,
    streams: PollQueue<Arc<Stream>>,
    /// The first stream after the announcement, until the relay accepts it.
    first: Mutex<Option<Arc<Stream>>>,
    /// Once the migration has been admitted.
    account: Mutex<Option<Account>>,
    stats: Arc<Stats>,
    hangup: Hangup,
    observer: Arc<dyn Observer>,
}

/// An announced migration that has been admitted.
struct Admitted {
    from: String,
    target: Target,
    guest: Option<String>,
    at: Address,
    qemu: Socket,
    _slot: Slot,
}

/// Time limit for the announcement.
const ANNOUNCEMENT: Duration = Duration::from_secs(10);

/// Time limit for the connection to the waiting QEMU.
const DIAL: Duration = Duration::from_secs(3);

impl IncomingMigration {
    pub(super) fn new(session: Session, observer: Arc<dyn Observer>) -> io::Result<Self> {
        Ok(Self {
            session,
            streams: PollQueue::new()?,
            first: Mutex::default(),
            account: Mutex::default(),
            stats: Arc::default(),
            hangup: Hangup::new()?,
            observer,
        })
    }

    pub(super) fn stats(&self) -> &Stats {
        &self.stats
    }

    pub(super) fn under_way(&self) -> Option<UnderWay> {
        lock(&self.account).as_ref().map(Account::under_way)
    }

    /// Whether streams of `session` belong to this migration.
    pub(super) fn has_session(&self, session: &Session) -> bool {
        self.session.is(session)
    }

    /// Adds a stream of the session.
    pub(super) fn push(&self, stream: Arc<Stream>) {
        self.hangup.register(&stream);
        self.streams.push(stream);
    }

    /// The next stream, and its kind.
    fn pop(&self) -> Option<(Arc<Stream>, u8)> {
        while let Some(stream) = self.streams.pop() {
            match kind_of(&stream) {
                Some(kind @ (MIGRATION | OPAQUE)) => return Some((stream, kind)),
                _ => warn!(
                    "{}: closing a stream of an unknown kind",
                    self.session.peer()
                ),
            }
        }
        None
    }

    pub(super) fn hang_up(&self) {
        self.hangup.hang_up();
    }

    /// Receives the migration that the first stream announces.
    pub(super) fn run(
        &self,
        first: Arc<Stream>,
        config: &GatewayConfig,
        slots: &Slots,
        draining: &Draining,
    ) {
        let mut conversation = Conversation::new(first);
        let announced = match conversation.receive(ANNOUNCEMENT) {
            Ok(announced) => announced,
            Err(error) => {
                let peer = self.session.peer();
                warn!("{peer}: no announcement: {}", chain(&error));
                return self.session.shut_down();
            }
        };
        match self.admit(announced, config, slots, draining) {
            Ok(admitted) => {
                let config = Config {
                    guest: admitted.guest.clone(),
                    ..config.incoming.clone()
                };
                self.receive(conversation, admitted, &config);
            }
            Err(reason) => {
                let peer = config.identify(self.session.identity(), self.session.peer());
                let peer = peer.map_or("", |peer| &peer.name);
                Observation::refused(&self.observer, Role::Destination, peer);
                // The peer may be gone.
                let _ = conversation.send(&Message::Refused { reason });
                self.session.drain(DRAIN);
                self.session.shut_down();
            }
        }
    }

    /// Connects to the waiting QEMU, or returns the reason for a refusal.
    fn admit(
        &self,
        announced: Message,
        config: &GatewayConfig,
        slots: &Slots,
        draining: &Draining,
    ) -> Result<Admitted, String> {
        let shown_peer = self.session.peer();
        let Message::Announce {
            version,
            port,
            stream,
            guest,
        } = announced
        else {
            return Err("nothing was announced".to_owned());
        };
        let target = Target::announced(port, stream.as_deref());
        let refused = |reason: String| {
            warn!("{shown_peer}, {target}: refused: {reason}");
            reason
        };
        if version < VERSION {
            return Err(refused(format!(
                "version {version} of the protocol is too old"
            )));
        }
        if draining.has_begun() {
            return Err(refused("this gateway is about to end".to_owned()));
        }
        let peer = config.identify(self.session.identity(), shown_peer);
        let peer =
            peer.ok_or_else(|| refused(format!("{shown_peer} is not a peer of this gateway")))?;
        let at = config.address_of(&target, &peer.name).map_err(refused)?;
        let slot = slots.take(Role::Destination, &peer.name, peer.migrations);
        let slot = slot.ok_or_else(|| {
            let most = peer.migrations;
            refused(format!(
                "there are {most} migrations from there already, as many as its `migrations` allows"
            ))
        })?;
        let qemu = dial(&at, DIAL).and_then(|qemu| {
            let patience = qemu.set_stall_timeout(config.incoming.stall_timeout);
            patience.map_err(|source| SocketError::dial(&at, source))?;
            Ok(qemu)
        });
        let qemu = qemu.map_err(|error| refused(chain(&error)))?;
        Ok(Admitted {
            from: peer.name.clone(),
            target,
            guest: guest.as_deref().map(printable),
            at,
            qemu,
            _slot: slot,
        })
    }

    fn receive(&self, mut conversation: Conversation, admitted: Admitted, config: &Config) {
        let (began, stats) = (Instant::now(), self.stats.clone());
        let from = &*admitted.from;
        let account = Account {
            observation: Observation::begin(&self.observer, Role::Destination, from, began, stats),
            target: admitted.target.clone(),
            guest: admitted.guest.clone(),
            is_bytes: false,
        };
        *lock(&self.account) = Some(account);
        let ending = match self.begin(&mut conversation, &admitted.qemu) {
            Ok(kind) => self.pass(kind, &mut conversation, admitted, config),
            Err(reason) => MigrationEnd::failed(reason),
        };
        self.hangup.hang_up();
        let (theirs, faults) = conversation.end_session(&self.session, ending.error());
        let account = lock(&self.account).take();
        if let Some(account) = account {
            account.write(&ending.with_peers(theirs), faults);
        }
    }

    /// Accepts the announcement, and waits for the first stream. Returns its kind.
    fn begin(&self, conversation: &mut Conversation, qemu: &Socket) -> Result<u8, String> {
        let broke = |error| format!("nothing was sent: {}", chain(&error));
        conversation.send(&Message::Accepted).map_err(broke)?;
        let mut has_spoken = false;
        loop {
            if let Some((stream, kind)) = self.pop() {
                *lock(&self.first) = Some(stream);
                return Ok(kind);
            }
            match peek(qemu, &mut [0]) {
                None => return Err("the waiting QEMU has closed the connection".to_owned()),
                Some(1) if !has_spoken => {
                    has_spoken = true;
                    conversation.send(&Message::Spoke).map_err(broke)?;
                }
                Some(_) => {}
            }
            conversation.poll().map_err(broke)?;
            let mut fds = [self.streams.as_fd(), self.hangup.as_fd(), qemu.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            // The bytes are only peeked at, so the socket stays readable.
            let polled = if has_spoken { 2 } else { 3 };
            wait_for(&mut fds[..polled], TICK).map_err(|error| error.to_string())?;
            if self.hangup.is_hung_up() {
                return Err(RelayError::Cancelled.to_string());
            }
        }
    }

    /// Forwards streams of this kind to the QEMU.
    fn pass(
        &self,
        kind: u8,
        conversation: &mut Conversation,
        admitted: Admitted,
        config: &Config,
    ) -> MigrationEnd {
        let relay = Relay {
            accept: self,
            dialer: &Dialer::dialled(admitted.at, Some(admitted.qemu)),
            config,
            hangup: &self.hangup,
            stats: &self.stats,
            reached: &|_| (),
        };
        if kind == MIGRATION {
            return MigrationEnd::of(&relay.relay());
        }
        if let Some(account) = &mut *lock(&self.account) {
            account.is_bytes = true;
        }
        let (from, target) = (&admitted.from, &admitted.target);
        info!("from {from}, {target}: passing bytes through");
        // An error means that no further stream will come: the other gateway has ended the migration, or is gone.
        MigrationEnd::of(&pass_bytes(&relay, Opaque::Bytes, &mut || {
            conversation.poll().is_err()
        }))
    }
}

/// Provides the streams to a relay.
impl Accept for IncomingMigration {
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        if let Some(first) = lock(&self.first).take() {
            return Ok(Some(first));
        }
        Ok(self.pop().map(|(stream, _)| stream))
    }
}

impl AsFd for IncomingMigration {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.streams.as_fd()
    }
}
