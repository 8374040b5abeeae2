//! Accepts the source's connections and identifies them.
//!
//! A source QEMU connects its main stream first, may send its header at once (7.2 does so before it
//! has all channels), and sends the section `ram` only when a SYNC has been sent on every
//! channel. Another relay sends on the main stream first, because a destination QEMU demands it, and
//! announces in each channel's first packet how many there will be. So the rule is:
//!
//! ```text
//! number of channels known (configured or announced):  done when main and all of them are there
//! unknown, channels there when `ram` is on the main:    done when the backlog is empty
//! unknown, no channel when `ram` is on the main:        a migration without multifd, if the source is on this host
//! unknown, no channel a second after main came:        perhaps one: a channel from another host may be late. If the source is on
//!                                                      this host, half of the timeout, for mains in which `ram` is not found
//! first bytes 0x16 0x03 (TLS) on any connection:        everything is forwarded as bytes
//! main from another relay that knows it has none:       a migration without multifd, in blocks
//! ```
//!
//! A connection that is silent when `ram` is on the main stream is not a channel, because a channel has sent its SYNC by then. It
//! may be the post-copy connection, which sources of machine types before 8.0 open at the beginning. That connection stays silent
//! until the destination requests a page.
//!
//! Foreign clients may connect as well: port scanners, a client with the wrong address. **Until a main stream or a channel is
//! identified by its first bytes, any other connection is closed**, and the relay keeps waiting. A silent connection is closed
//! after a timeout. Once a source has begun, a protocol error ends the migration, unless other clients may connect to the same
//! socket ([`Accept::is_shared`]).

use std::{
    collections::BTreeMap,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use multifd::Initial;
use tracing::{debug, info, warn};
use vamoose_link::{Hangup, Peer, Stream, all_has_come, peer_of};

use crate::{
    Accept, RelayError, chain,
    first_bytes::{Arrivals, BLOCKS_MAGIC, FirstBytes, UnclassifiedConnection, peek},
    opaque::Opaque,
};

/// The connections that the source opened.
pub(crate) enum Arrival {
    /// A multifd migration: main stream (its magic has been read) and the channels by their ids.
    Multifd {
        source: Connections,
        uuid: [u8; 16],
        /// Connections that have sent nothing: one may be for post-copy.
        silent: Vec<UnclassifiedConnection>,
    },
    /// A migration whose bytes can only be passed on.
    Opaque {
        why: &'static str,
        /// The main stream in plain text, whose magic has been read.
        main: Option<Arc<Stream>>,
        /// The other connections, in the order in which they came.
        others: Vec<UnclassifiedConnection>,
        kind: Opaque,
    },
}

/// The connections of a multifd migration to one of its sides.
pub(crate) struct Connections {
    pub(crate) main: Arc<Stream>,
    /// By their ids.
    pub(crate) channels: Vec<Arc<Stream>>,
}

/// Waits for the source's connections: for the first one as long as it takes, then for all the
/// others within `timeout`.
pub(crate) fn gather(
    accept: &dyn Accept,
    expected: Option<usize>,
    timeout: Duration,
    hangup: &Hangup,
) -> Result<Arrival, RelayError> {
    let mut gathering = Gathering {
        arrivals: Arrivals::new(accept, hangup, Vec::new()),
        is_shared: accept.is_shared(),
        expected,
        timeout,
        main: None,
        ram_seen: None,
        channels: BTreeMap::new(),
        uuid: None,
        began: None,
    };
    loop {
        gathering.arrivals.accept_all()?;
        // Before waiting: streams of a session come with their first bytes.
        gathering.read_all()?;
        let mut firsts = gathering.arrivals.unclassified.iter();
        if firsts.any(|it| it.first() == Some(FirstBytes::Tls)) {
            return Ok(gathering.into_opaque("it is TLS", Opaque::Tls));
        }
        if gathering.main.as_ref().is_some_and(|main| main.in_blocks) {
            let why = "the other relay has a single main connection";
            return Ok(gathering.into_opaque(why, Opaque::Single));
        }
        let now = Instant::now();
        // Before `complete`: it may find further channels.
        let is_settled = gathering.is_settled(now)?;
        if is_settled && gathering.has_no_channels() {
            let why = "the source uses a single main connection";
            return Ok(gathering.into_opaque(why, Opaque::Single));
        }
        if let Some(main) = gathering.complete(is_settled)? {
            return Ok(gathering.into_multifd(main));
        }
        if gathering.plain_at().is_some_and(|at| now >= at) {
            let why = "no channel has come beside the main connection";
            return Ok(gathering.into_opaque(why, Opaque::PerhapsSingle));
        }
        gathering.end_waiting(now)?;
        gathering.wait(now)?;
    }
}

/// How long to wait for a first channel from another host after the main stream's first bytes, if the number of channels is
/// unknown.
const PLAIN_AFTER: Duration = Duration::from_secs(1);

/// How long to wait for a channel's first bytes after the section `ram`, if the system cannot tell whether any are in transit. The
/// source sent them long before.
const SILENT_AFTER: Duration = Duration::from_secs(1);

/// Interval at which the main stream is searched for its section `ram`, which follows within milliseconds.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The section's name on a main stream, after its length.
const RAM_SECTION: &[u8] = b"\x03ram";

struct Gathering<'a> {
    arrivals: Arrivals<'a>,
    /// Whether foreign connections are rejected even after the source has begun.
    is_shared: bool,
    expected: Option<usize>,
    timeout: Duration,
    main: Option<Main>,
    /// When the section `ram` was first seen on the main stream.
    ram_seen: Option<Instant>,
    channels: BTreeMap<u8, Arc<Stream>>,
    uuid: Option<[u8; 16]>,
    /// When the first of the source's connections introduced itself.
    began: Option<Instant>,
}

struct Main {
    stream: Arc<Stream>,
    /// When it connected, and when its first bytes arrived. Other connections may arrive in between.
    connected: Instant,
    began: Instant,
    /// Whether the source is on this host.
    is_near: bool,
    /// Whether blocks follow instead of QEMU's bytes.
    in_blocks: bool,
}

impl Gathering<'_> {
    /// The main stream, once all channels have arrived.
    fn complete(&self, is_settled: bool) -> Result<Option<Arc<Stream>>, RelayError> {
        if let Some(expected) = self.expected
            && let Some(id) = self
                .channels
                .keys()
                .find(|id| usize::from(**id) >= expected)
        {
            let problem = format!("id {id}, but there are {expected} channels");
            return Err(RelayError::ChannelIds(problem));
        }
        let main = self.main.as_ref().map(|main| main.stream.clone());
        let Some(main) = main.filter(|_| !self.channels.is_empty()) else {
            return Ok(None);
        };
        let is_complete = match self.expected {
            Some(expected) => self.channels.len() == expected,
            None => is_settled && self.ids_are_contiguous(),
        };
        Ok(is_complete.then_some(main))
    }

    /// Whether all channels have arrived, if their number is unknown: `ram` is on the main stream, all connections that came
    /// before that have been accepted, and no unclassified one can be a channel.
    fn is_settled(&mut self, now: Instant) -> Result<bool, RelayError> {
        let has_begun = |main: &&Main| main.is_near || !self.channels.is_empty();
        let main = self.main.as_ref().filter(has_begun);
        let main = main.filter(|_| self.expected.is_none());
        // Before accepting: connections made before `ram` was sent are waiting by now.
        if !main.is_some_and(|main| has_ram(&main.stream)) {
            return Ok(false);
        }
        self.arrivals.accept_all()?;
        // Without file descriptors, some connections may not have been accepted.
        if self.arrivals.is_pausing() {
            return Ok(false);
        }
        let seen = *self.ram_seen.get_or_insert(now);
        let has_come = |connection: &UnclassifiedConnection| {
            let socket = connection.stream.socket();
            socket.is_some_and(|socket| all_has_come(socket).unwrap_or(false))
        };
        if now < seen + SILENT_AFTER && !self.arrivals.unclassified.iter().all(has_come) {
            return Ok(false);
        }
        // Bytes may have come since they were last read.
        self.read_all()?;
        let mut unclassified = self.arrivals.unclassified.iter();
        Ok(unclassified.all(|connection| connection.bytes().is_empty()))
    }

    fn ids_are_contiguous(&self) -> bool {
        let highest = self.channels.last_key_value();
        highest.is_some_and(|(id, _)| usize::from(*id) + 1 == self.channels.len())
    }

    /// Whether the source opens no channels, once the connections have settled. Channels from another host may arrive later.
    fn has_no_channels(&self) -> bool {
        let is_near = self.main.as_ref().is_some_and(|main| main.is_near);
        is_near && self.expected.is_none() && self.channels.is_empty()
    }

    /// When to assume a migration without multifd, unless a channel arrives first.
    fn plain_at(&self) -> Option<Instant> {
        // Another relay says so.
        let main = self
            .main
            .as_ref()
            .filter(|main| main.stream.session().is_none())?;
        let after = match main.is_near {
            // `ram` decides, unless too many bytes precede it. On a busy host a second is not enough.
            true => PLAIN_AFTER.max(self.timeout / 2),
            false => PLAIN_AFTER,
        };
        (self.expected.is_none() && self.channels.is_empty()).then(|| main.began + after)
    }

    /// Closes connections that have been silent for too long, and limits the wait for a source that has begun.
    fn end_waiting(&mut self, now: Instant) -> Result<(), RelayError> {
        if let Some(began) = self.began {
            if now >= began + self.timeout {
                return Err(self.incomplete());
            }
            return Ok(());
        }
        let timeout = self.timeout;
        self.arrivals.unclassified.retain(|connection| {
            let stays = now < connection.since + timeout;
            if !stays {
                warn!("turning away a connection that has not introduced itself");
            }
            stays
        });
        Ok(())
    }

    /// Waits until something happens, or the next deadline.
    fn wait(&self, now: Instant) -> Result<(), RelayError> {
        let unclassified = self.arrivals.unclassified.iter();
        let oldest = unclassified.map(|connection| connection.since).min();
        let incomplete_at = self.began.or(oldest).map(|since| since + self.timeout);
        // The main stream is readable all the time, so it cannot be polled for more.
        let looks_at_main = self.main.is_some() && self.expected.is_none();
        let look_at = looks_at_main.then(|| now + LOOK_EVERY);
        let next = [incomplete_at, self.plain_at(), look_at];
        self.arrivals.wait(next.into_iter().flatten().min())
    }

    /// Reads the bytes available on unclassified connections.
    fn read_all(&mut self) -> Result<(), RelayError> {
        for mut connection in mem::take(&mut self.arrivals.unclassified) {
            if !connection.read() {
                self.closed(&connection)?;
                continue;
            }
            let is_of_relay = connection.stream.session().is_some();
            if is_of_relay && connection.magic() == Some(BLOCKS_MAGIC) {
                self.add_main(connection, true)?;
                continue;
            }
            match connection.first() {
                Some(FirstBytes::Main) => self.add_main(connection, false)?,
                Some(FirstBytes::Channel) => match connection.initial() {
                    Some(initial) => {
                        let initial = Initial::parse(initial)?;
                        self.add_channel(&initial, connection.stream)?;
                    }
                    None => self.arrivals.unclassified.push(connection),
                },
                Some(FirstBytes::Tls) if !self.is_shared => {
                    self.arrivals.unclassified.push(connection);
                }
                Some(FirstBytes::Tls | FirstBytes::Other) => {
                    let magic = connection.magic().unwrap_or_default();
                    self.turn_away(RelayError::Garbage(magic))?;
                }
                Some(FirstBytes::Silent) | None => {
                    self.arrivals.unclassified.push(connection);
                }
            }
        }
        Ok(())
    }

    /// Handles a connection that ended before it was classified.
    fn closed(&self, connection: &UnclassifiedConnection) -> Result<(), RelayError> {
        let got = connection.bytes().len();
        let wanted = connection.wanted();
        let closed = RelayError::ClosedEarly { got, wanted };
        if got == 0 {
            info!("a connection was closed before its first byte");
            return Ok(());
        }
        match connection.first() {
            Some(FirstBytes::Channel) => Err(closed),
            _ => self.turn_away(closed),
        }
    }

    /// Rejects a connection that cannot be the source's. After the source has begun, this is an error unless the socket is shared.
    fn turn_away(&self, error: RelayError) -> Result<(), RelayError> {
        if self.began.is_some() && !self.is_shared {
            return Err(error);
        }
        warn!("turning away a stranger: {}", chain(&error));
        Ok(())
    }

    fn add_main(
        &mut self,
        connection: UnclassifiedConnection,
        in_blocks: bool,
    ) -> Result<(), RelayError> {
        if self.main.is_some() {
            let problem = "there are two main streams".to_owned();
            return Err(RelayError::ChannelIds(problem));
        }
        debug!("the main stream has come");
        let now = Instant::now();
        self.began.get_or_insert(now);
        self.main = Some(Main {
            is_near: is_near(&connection.stream),
            stream: connection.stream,
            connected: connection.since,
            began: now,
            in_blocks,
        });
        Ok(())
    }

    fn add_channel(&mut self, initial: &Initial, stream: Arc<Stream>) -> Result<(), RelayError> {
        if *self.uuid.get_or_insert(initial.uuid()) != initial.uuid() {
            let problem = "the channels belong to guests with different uuids";
            return Err(RelayError::ChannelIds(problem.to_owned()));
        }
        if self.expected.is_none() {
            self.expected = initial.announced_channels().map(usize::from);
        }
        let id = initial.channel();
        debug!("channel {id} has come");
        self.began.get_or_insert_with(Instant::now);
        match self.channels.insert(id, stream) {
            None => Ok(()),
            Some(_) => Err(RelayError::ChannelIds(format!("id {id} came twice"))),
        }
    }

    fn incomplete(&self) -> RelayError {
        let ids = self.channels.keys().map(u8::to_string).collect::<Vec<_>>();
        let expected = match self.expected {
            Some(number) => number.to_string(),
            None => "an unknown number".to_owned(),
        };
        let missing = format!(
            "main stream {}; channels [{}] of {expected}; {} connections have not introduced themselves",
            if self.main.is_some() {
                "is there"
            } else {
                "is missing"
            },
            ids.join(", "),
            self.arrivals.unclassified.len(),
        );
        RelayError::Incomplete {
            waited: self.timeout,
            missing,
        }
    }

    fn into_multifd(self, main: Arc<Stream>) -> Arrival {
        Arrival::Multifd {
            source: Connections {
                main,
                // The ids are distinct and below the number of channels, so their order is that of the ids.
                channels: self.channels.into_values().collect(),
            },
            uuid: self.uuid.unwrap_or_default(),
            silent: self.arrivals.unclassified,
        }
    }

    /// Drops silent connections that are older than a main stream in plain text: the migration's own follow the main stream, but
    /// streams of a session may overtake each other. With TLS, silent connections may be about to send.
    fn into_opaque(self, why: &'static str, kind: Opaque) -> Arrival {
        let connected = self.main.as_ref().map(|main| main.connected);
        let mut others = self.arrivals.unclassified;
        others.retain(|connection| {
            let is_stranger = connection.bytes().is_empty()
                && connection.stream.session().is_none()
                && connected.is_some_and(|at| connection.since < at);
            if is_stranger {
                warn!("turning away a connection that has not introduced itself");
            }
            !is_stranger
        });
        Arrival::Opaque {
            why,
            main: self.main.map(|main| main.stream),
            others,
            kind,
        }
    }
}

/// Whether the other end is on this host.
fn is_near(main: &Stream) -> bool {
    let peer = main.socket().map(peer_of);
    peer.is_some_and(|peer| peer.is_ok_and(|peer| peer != Peer::Remote))
}

/// Whether the source has begun to send its section `ram` on the main stream.
fn has_ram(main: &Stream) -> bool {
    // The channels of a session are always announced.
    let Some(main) = main.socket() else {
        return false;
    };
    // Large enough for the setup of devices that come before it.
    let mut bytes = vec![0; 64 * 1024];
    // The end of the stream is noticed when it is read.
    let length = peek(main, &mut bytes).unwrap_or(0);
    let mut seen = bytes[..length].windows(RAM_SECTION.len());
    seen.any(|window| window == RAM_SECTION)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        os::{
            fd::{AsFd, BorrowedFd},
            unix::net::UnixStream,
        },
        sync::{
            Mutex,
            atomic::{AtomicUsize, Ordering},
            mpsc::{self, RecvTimeoutError},
        },
        thread,
    };

    use multifd::{MAGIC, MAIN_MAGIC};
    use vamoose_link::{Socket, SocketError, lock};

    use super::*;

    /// All connections are waiting. The `held` part of their first bytes is sent when the relay looks for connections the second
    /// time, which it does after seeing `ram`.
    struct Slow {
        looks: AtomicUsize,
        waiting: Mutex<Vec<Arc<Stream>>>,
        held: Mutex<Vec<(UnixStream, Vec<u8>)>>,
        never_readable: UnixStream,
    }

    impl AsFd for Slow {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.never_readable.as_fd()
        }
    }

    impl Accept for Slow {
        fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
            let next = lock(&self.waiting).pop();
            if next.is_none() && self.looks.fetch_add(1, Ordering::Relaxed) == 1 {
                for (connection, bytes) in &mut *lock(&self.held) {
                    connection.write_all(bytes).unwrap();
                }
            }
            Ok(next)
        }

        fn is_shared(&self) -> bool {
            true
        }
    }

    #[test]
    fn channels_are_complete_when_they_come_during_the_last_look() {
        let pair = || {
            let (theirs, ours) = UnixStream::pair().unwrap();
            (theirs, Arc::new(Stream::Socket(Socket::Unix(ours))))
        };
        let (mut main, main_stream) = pair();
        let begins = [&MAIN_MAGIC.to_be_bytes(), RAM_SECTION].concat();
        main.write_all(&begins).unwrap();
        let (held, channels): (Vec<_>, Vec<_>) = (0..2)
            .map(|id| {
                let (mut channel, stream) = pair();
                let initial = Initial::new([0; 16], id, 2).unwrap().to_bytes();
                let (there, held) = initial.split_at(size_of_val(&MAGIC));
                channel.write_all(there).unwrap();
                ((channel, held.to_vec()), stream)
            })
            .unzip();
        // They are accepted last, after the source has begun.
        let (ends, strangers): (Vec<_>, Vec<_>) = [&b"GET "[..], &[0x16, 3, 1, 0]]
            .into_iter()
            .map(|first| {
                let (mut stranger, stream) = pair();
                stranger.write_all(first).unwrap();
                (stranger, stream)
            })
            .unzip();
        let (never_readable, _open) = UnixStream::pair().unwrap();
        let accept = Slow {
            looks: AtomicUsize::new(0),
            waiting: Mutex::new([strangers, vec![main_stream], channels].concat()),
            held: Mutex::new(held),
            never_readable,
        };
        let hangup = Arc::new(Hangup::new().unwrap());
        // Ends a relay that waits although all connections are there.
        let (done, is_done) = mpsc::channel::<()>();
        let alarm = thread::spawn({
            let hangup = hangup.clone();
            move || {
                if is_done.recv_timeout(Duration::from_secs(10)) == Err(RecvTimeoutError::Timeout) {
                    hangup.hang_up();
                }
            }
        });
        let arrival = gather(&accept, None, Duration::from_secs(3600), &hangup).unwrap();
        drop(done);
        alarm.join().unwrap();
        let Arrival::Multifd { source, .. } = arrival else {
            panic!("not taken for a multifd migration");
        };
        assert_eq!(source.channels.len(), 2);
        drop(accept);
        for mut stranger in ends {
            assert!(!matches!(stranger.read(&mut [0]), Ok(1..)));
        }
    }
}
