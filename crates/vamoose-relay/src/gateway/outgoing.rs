//! A migration from this host: the connections to one endpoint, from the first until all have ended.
//!
//! ```text
//!              main stream, or a channel
//!  undecided ────────────────────────────────> migration   a relay to the peer's gateway; strangers are turned away
//!   │ silent: the peer's gateway is asked, and may
//!   │ report that the destination speaks first
//!   └────────────────────────────────────────> opaque      every connection passes as bytes
//!               TLS, other bytes, the destination spoke
//! ```
//!
//! The decision is final. Then the migration is announced to the peer's gateway, unless it has been already. That gateway dials
//! the waiting QEMU, or refuses with a reason. At the end both gateways exchange their errors and log the migration.

use std::{
    collections::VecDeque,
    io, iter,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex},
    time::Instant,
};

use multifd::Method;
use tracing::{debug, info, warn};
use vamoose_link::{
    Hangup, MethodChoice, Peer, Peers, Session, SocketError, Stats, Stream, lock, peer_of,
};

use super::{
    GatewayConfig, GatewayPeer,
    account::{Account, MigrationEnd},
    announce::{AnnounceError, Conversation, MIGRATION, Message, OPAQUE, TICK, announce},
    endpoint::Endpoint,
    guest,
    listeners::EndpointListener,
    slots::{Slot, Slots},
};
use crate::{
    Accept, Config, Dialer, Observer, Relay, RelayError, Role, UnderWay, chain,
    first_bytes::{Arrivals, Closes, FirstBytes, MOST_UNCLASSIFIED, UnclassifiedConnection},
    observer::Observation,
    opaque::{Opaque, pass_bytes},
};

/// The connections to one endpoint.
pub(super) struct OutgoingMigration {
    peer: Arc<GatewayPeer>,
    listener: Arc<EndpointListener>,
    users: Peers,
    config: Config,
    slots: Arc<Slots>,
    observer: Arc<dyn Observer>,
    content: Mutex<Content>,
    /// Accepted connections that have not been read yet.
    held: Mutex<VecDeque<Arc<Stream>>>,
    announced: Mutex<Option<Announced>>,
    guest: Mutex<Option<String>>,
    began: Instant,
    stats: Arc<Stats>,
    hangup: Hangup,
}

/// Content of the connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Content {
    #[default]
    Undecided,
    /// A migration in plain text.
    Migration,
    /// Anything else, which is forwarded as bytes, and the reason.
    Opaque(&'static str),
}

/// A migration that the peer's gateway has accepted.
struct Announced {
    session: Session,
    conversation: Conversation,
    _slot: Slot,
}

impl OutgoingMigration {
    pub(super) fn new(
        peer: Arc<GatewayPeer>,
        listener: Arc<EndpointListener>,
        gateway: &GatewayConfig,
        slots: Arc<Slots>,
        observer: Arc<dyn Observer>,
        held: VecDeque<Arc<Stream>>,
    ) -> io::Result<Self> {
        let mut config = gateway.outgoing.clone();
        config.max_bandwidth = peer.max_bandwidth.or(config.max_bandwidth);
        Ok(Self {
            peer,
            listener,
            users: gateway.users.clone(),
            config,
            slots,
            observer,
            content: Mutex::default(),
            held: Mutex::new(held),
            announced: Mutex::default(),
            guest: Mutex::default(),
            began: Instant::now(),
            stats: Arc::default(),
            hangup: Hangup::new()?,
        })
    }

    pub(super) fn hang_up(&self) {
        self.hangup.hang_up();
    }

    pub(super) fn stats(&self) -> &Stats {
        &self.stats
    }

    pub(super) fn under_way(&self) -> UnderWay {
        let peer = self.peer.name.clone();
        let moved = self.stats.snapshot();
        let content = *lock(&self.content);
        let method = self.config.method.name();
        let method = match content {
            Content::Undecided => None,
            Content::Opaque(_) if method != Method::None.name() => Some(MethodChoice::ADAPTIVE),
            Content::Migration | Content::Opaque(_) => Some(method),
        };
        UnderWay {
            name: lock(&self.guest).clone(),
            target: Some(self.listener.at.target().to_string()),
            method: method.map(str::to_owned),
            is_bytes: matches!(content, Content::Opaque(_)),
            ..UnderWay::new("gateway", Role::Source, peer, self.began, &moved)
        }
    }

    /// Late connections, from the first one of the next migration on. Closes this migration's.
    pub(super) fn leftover(&self) -> VecDeque<Arc<Stream>> {
        lock(&self.held).clear();
        let accept = || {
            self.accept()
                .inspect_err(|it| warn!("{}: {}", self.listener.at, chain(it)))
        };
        let came = iter::from_fn(|| accept().ok().flatten()).map(UnclassifiedConnection::new);
        let came: Vec<_> = came.take(MOST_UNCLASSIFIED).collect();
        let is_migration = *lock(&self.content) == Content::Migration;
        let is_next = |connection: &UnclassifiedConnection| {
            !is_migration || matches!(connection.look(), Some((None | Some(FirstBytes::Main), _)))
        };
        let left = came.into_iter().skip_while(|it| !is_next(it));
        left.map(|connection| connection.stream).collect()
    }

    /// Runs to the end of the last connection.
    pub(super) fn run(self: &Arc<Self>) -> Closing {
        let decided = self.decide();
        let begin = || {
            let (peer, stats) = (&*self.peer.name, self.stats.clone());
            Observation::begin(&self.observer, Role::Source, peer, self.began, stats)
        };
        if let Ok(content) = decided {
            *lock(&self.content) = content;
        }
        let ended = match decided {
            Ok(Content::Opaque(why)) => {
                let (peer, target) = (&self.peer.name, self.listener.at.target());
                info!(
                    "to {peer}, {target}: passing bytes through, compressed and encrypted: {why}"
                );
                Some((begin(), self.pass(OPAQUE)))
            }
            Ok(Content::Migration) => Some((begin(), self.pass(MIGRATION))),
            Ok(Content::Undecided) => None,
            Err(error) => Some((begin(), MigrationEnd::of(&Err(error)))),
        };
        self.hangup.hang_up();
        Closing {
            announced: lock(&self.announced).take(),
            ended: ended.map(|(observation, ending)| {
                let account = Account {
                    observation,
                    target: self.listener.at.target(),
                    guest: lock(&self.guest).take(),
                    is_bytes: matches!(*lock(&self.content), Content::Opaque(_)),
                };
                (account, ending)
            }),
        }
    }

    /// Waits until the content is known. Undecided if all connections have ended without a byte.
    fn decide(&self) -> Result<Content, RelayError> {
        let mut arrivals = Arrivals::new(self, &self.hangup, Vec::new());
        arrivals.closes = Closes::Newest;
        let content = loop {
            let known = arrivals.unclassified.len();
            arrivals.accept_all()?;
            for connection in &arrivals.unclassified[known..] {
                self.look_for_guest(&connection.stream);
            }
            let mut firsts = Vec::new();
            arrivals.unclassified.retain(|connection| {
                let look = connection.look();
                let goes_on = look.is_some();
                firsts.extend(look.and_then(|(first, _)| first));
                goes_on
            });
            let begun = firsts.iter().find(|it| **it != FirstBytes::Silent);
            match begun.or(firsts.first()) {
                Some(FirstBytes::Main | FirstBytes::Channel) => break Content::Migration,
                Some(FirstBytes::Tls) => break Content::Opaque("it is TLS"),
                Some(FirstBytes::Other) => {
                    break Content::Opaque("it does not begin like a migration of QEMU");
                }
                Some(FirstBytes::Silent) => {
                    self.announce()?;
                    if self.has_destination_spoken()? {
                        break Content::Opaque("the destination speaks first");
                    }
                }
                None if arrivals.unclassified.is_empty() && !arrivals.is_pausing() => {
                    break Content::Undecided;
                }
                None => {}
            }
            arrivals.wait(Some(Instant::now() + TICK))?;
        };
        let streams = arrivals.unclassified.into_iter().map(|it| it.stream);
        lock(&self.held).extend(streams);
        Ok(content)
    }

    /// Whether the destination has sent something while the source has not.
    fn has_destination_spoken(&self) -> Result<bool, RelayError> {
        let mut announced = lock(&self.announced);
        let Some(announced) = &mut *announced else {
            return Ok(false);
        };
        let polled = announced.conversation.poll();
        let message = polled.map_err(|source| AnnounceError::Conversation {
            peer: self.peer.name.clone(),
            source,
        })?;
        Ok(matches!(message, Some(Message::Spoke)))
    }

    /// A connection from a permitted user.
    fn accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        while let Some(socket) = self.listener.listener.try_accept()? {
            if is_welcome(&self.listener.at, &self.users, peer_of(&socket)) {
                return Ok(Some(Arc::new(socket.into())));
            }
        }
        Ok(None)
    }

    /// Looks for the guest's name, unless it is known. This scans /proc, so no lock may be held.
    fn look_for_guest(&self, stream: &Stream) {
        let is_known = lock(&self.guest).is_some();
        if let Some(name) = (!is_known).then(|| guest::name_of(stream)).flatten() {
            *lock(&self.guest) = Some(name);
        }
    }

    /// Announces the migration to the peer's gateway, once.
    fn announce(&self) -> Result<Session, RelayError> {
        let mut announced = lock(&self.announced);
        if let Some(announced) = &*announced {
            return Ok(announced.session.clone());
        }
        let peer = &self.peer;
        let slot = self.slots.take(Role::Source, &peer.name, peer.migrations);
        let slot = slot.ok_or_else(|| AnnounceError::Busy {
            peer: peer.name.clone(),
            most: peer.migrations,
        })?;
        let guest = lock(&self.guest).clone();
        let (session, conversation) = announce(peer, &self.listener.at.target(), guest)?;
        *announced = Some(Announced {
            session: session.clone(),
            conversation,
            _slot: slot,
        });
        Ok(session)
    }

    /// Forwards the connections to the peer's gateway, over streams of this kind.
    fn pass(self: &Arc<Self>, kind: u8) -> MigrationEnd {
        let migration = self.clone();
        let dialer = Dialer::session(move |_| Ok((migration.announce()?, Vec::new())), &[kind]);
        let config = Config {
            guest: lock(&self.guest).clone(),
            ..self.config.clone()
        };
        let relay = Relay {
            accept: &**self,
            dialer: &dialer,
            config: &config,
            hangup: &self.hangup,
            stats: &self.stats,
            reached: &|_| (),
        };
        MigrationEnd::of(&match kind {
            MIGRATION => relay.relay(),
            // Announced before the first connection is dialled, so that a silent peer delays the migration only once.
            _ => self
                .announce()
                .and_then(|_| pass_bytes(&relay, Opaque::Bytes, &mut || true)),
        })
    }
}

/// Whether a connection comes from this host, and from one of `users`.
fn is_welcome(at: &Endpoint, users: &Peers, peer: io::Result<Peer>) -> bool {
    match peer {
        Ok(Peer::Remote) => {
            warn!("{at}: turning away another host: only this one's QEMUs connect here")
        }
        Ok(peer) if users.allow(peer) => return true,
        Ok(Peer::Uid(uid)) => warn!("{at}: turning away user {uid}, who is not in `users`"),
        // It has usually been closed already.
        Ok(Peer::Unknown) => debug!("{at}: turning away a connection: no process has it open"),
        Err(error) => {
            warn!("{at}: turning away a connection: cannot tell whose it is: {error}")
        }
    }
    false
}

/// Provides the connections to a relay.
impl Accept for OutgoingMigration {
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        match lock(&self.held).pop_front() {
            Some(stream) => Ok(Some(stream)),
            None => self.accept(),
        }
    }

    fn is_shared(&self) -> bool {
        true
    }
}

impl AsFd for OutgoingMigration {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.listener.as_fd()
    }
}

/// A migration whose connections have ended, before the goodbye to the other gateway.
pub(super) struct Closing {
    announced: Option<Announced>,
    ended: Option<(Account, MigrationEnd)>,
}

impl Closing {
    /// Exchanges errors with the peer's gateway, and logs the migration.
    pub(super) fn finish(self) {
        let ending = self.ended.as_ref().map(|(_, ending)| ending);
        let error = ending.and_then(MigrationEnd::error);
        let ended = self
            .announced
            .map(|mut it| it.conversation.end_session(&it.session, error));
        let (theirs, faults) = ended.unwrap_or_default();
        if let Some((account, ending)) = self.ended {
            account.write(&ending.with_peers(theirs), faults);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_users_of_this_host_are_welcome() {
        let at = Endpoint::Port(([127, 0, 0, 2], 1).into());
        let is_welcome = |peer| is_welcome(&at, &Peers::own_and([4711]), peer);
        assert!(is_welcome(Ok(Peer::Uid(4711))));
        assert!(!is_welcome(Ok(Peer::Uid(4712))));
        assert!(!is_welcome(Ok(Peer::Remote)));
        assert!(!is_welcome(Ok(Peer::Unknown)));
        assert!(!is_welcome(Err(io::ErrorKind::Unsupported.into())));
    }
}
