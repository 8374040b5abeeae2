//! Classifies connections by their first bytes, and keeps unclassified connections.

use std::{
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use multifd::{INITIAL_LEN, MAGIC, MAIN_MAGIC};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::{RecvFlags, recv},
};
use tracing::{debug, warn};
use vamoose_link::{Hangup, SocketError, Stream, wait_until};

use crate::{Accept, RelayError, accept::PAUSE, chain};

/// What a connection begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstBytes {
    /// The main stream of a migration.
    Main,
    /// One of multifd's channels.
    Channel,
    /// QEMU's own TLS.
    Tls,
    /// Anything else.
    Other,
    /// No byte has arrived in time: the server may speak first.
    Silent,
}

/// Between two relays, in place of the magic of a main stream: the migration has no channels, and blocks follow
/// ([`ByteReader`](vamoose_link::ByteReader)).
pub(crate) const BLOCKS_MAGIC: [u8; MAGIC_LEN] = *b"VMBL";

/// The length of the magic that main streams and channels begin with.
const MAGIC_LEN: usize = 4;

/// The beginning of a TLS handshake, in all versions in use.
const TLS: [u8; 2] = [0x16, 3];

/// Classifies a connection by the bytes that have arrived. `None` if more bytes are needed, which are not expected if it `is_late`.
pub(crate) fn classify(bytes: &[u8], is_late: bool) -> Option<FirstBytes> {
    let known = [
        (&MAIN_MAGIC.to_be_bytes()[..], FirstBytes::Main),
        (&MAGIC.to_be_bytes(), FirstBytes::Channel),
        (&TLS, FirstBytes::Tls),
    ];
    if bytes.is_empty() {
        return is_late.then_some(FirstBytes::Silent);
    }
    let found = known.iter().find(|(magic, _)| bytes.starts_with(magic));
    let may_be_known = known.iter().any(|(magic, _)| magic.starts_with(bytes));
    match found {
        Some((_, first)) => Some(*first),
        None if may_be_known && !is_late => None,
        None => Some(FirstBytes::Other),
    }
}

/// Whether a connection with these first bytes may be a channel for post-copy (QEMU 10.1 and later). Such a channel has no magic.
/// It begins with the offset of a page, whose highest two bytes are zero.
pub(crate) fn may_be_post_copy(bytes: &[u8]) -> bool {
    bytes.iter().take(2).all(|byte| *byte == 0)
}

/// Peeks at the bytes that have arrived, as many as fit, and returns their number. `None` if the connection has ended.
pub(crate) fn peek(socket: impl AsFd, bytes: &mut [u8]) -> Option<usize> {
    match recv(socket, &mut *bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => None,
        Ok((_, length)) => Some(length.min(bytes.len())),
        Err(Errno::AGAIN | Errno::INTR) => Some(0),
        Err(_) => None,
    }
}

/// How long a connection may be silent before the server is assumed to speak first.
const SILENCE: Duration = Duration::from_millis(50);

/// An unclassified connection, and the bytes that have been read from it.
pub(crate) struct UnclassifiedConnection {
    pub(crate) stream: Arc<Stream>,
    bytes: [u8; INITIAL_LEN],
    got: usize,
    pub(crate) since: Instant,
}

impl UnclassifiedConnection {
    pub(crate) fn new(stream: Arc<Stream>) -> Self {
        Self {
            stream,
            bytes: [0; INITIAL_LEN],
            got: 0,
            since: Instant::now(),
        }
    }

    /// Peeks at the first bytes, and classifies them if possible. `None` if the connection has ended.
    pub(crate) fn look(&self) -> Option<(Option<FirstBytes>, Vec<u8>)> {
        let mut bytes = [0; MAGIC_LEN];
        let length = peek(self.stream.socket()?, &mut bytes)?;
        let bytes = bytes[..length].to_vec();
        Some((classify(&bytes, self.since.elapsed() >= SILENCE), bytes))
    }

    /// Reads the bytes that have arrived. False if the connection has ended.
    pub(crate) fn read(&mut self) -> bool {
        let wanted = self.wanted();
        let missing = &mut self.bytes[self.got..wanted];
        if missing.is_empty() {
            return true;
        }
        match self.stream.read_until(missing, Some(Instant::now())) {
            Ok(Some(0)) => return false,
            Ok(Some(read)) => self.got += read,
            Ok(None) => {}
            Err(error) => {
                debug!("a connection failed: {error}");
                return false;
            }
        }
        true
    }

    /// Whether no byte has arrived.
    fn is_silent(&self) -> bool {
        let arrived = self.stream.socket().and_then(|it| peek(it, &mut [0]));
        self.got == 0 && arrived.unwrap_or(0) == 0
    }

    /// The bytes that have been read.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.got]
    }

    /// The first four bytes.
    pub(crate) fn magic(&self) -> Option<[u8; MAGIC_LEN]> {
        self.bytes().first_chunk().copied()
    }

    /// Its classification. `None` while fewer than four bytes have arrived, except for TLS.
    pub(crate) fn first(&self) -> Option<FirstBytes> {
        let first = classify(self.bytes(), false);
        first.filter(|first| *first == FirstBytes::Tls || self.got >= MAGIC_LEN)
    }

    /// A channel's first packet, once it is complete.
    pub(crate) fn initial(&self) -> Option<&[u8; INITIAL_LEN]> {
        (self.got == INITIAL_LEN).then_some(&self.bytes)
    }

    /// Number of bytes that classify it.
    pub(crate) fn wanted(&self) -> usize {
        match self.first() {
            Some(FirstBytes::Channel) => INITIAL_LEN,
            _ => MAGIC_LEN,
        }
    }
}

/// Accepts connections and keeps those that are unclassified. Pauses while the system has no file descriptors left.
pub(crate) struct Arrivals<'a> {
    accept: &'a dyn Accept,
    /// When the pause ends.
    again_at: Option<Instant>,
    hangup: &'a Hangup,
    pub(crate) unclassified: Vec<UnclassifiedConnection>,
    /// Limit of unclassified connections.
    most: usize,
    /// Which connection is closed at the limit.
    pub(crate) closes: Closes,
}

/// Which of too many unclassified connections is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closes {
    /// The one that has been silent for the longest time: a source sends its first bytes soon.
    OldestSilent,
    /// The newest one: the oldest silent connection may be the channel for post-copy.
    Newest,
}

/// Limit of unclassified connections: more than a migration has.
pub(crate) const MOST_UNCLASSIFIED: usize = 512;

/// Interval at which streams of a session are read: they cannot be polled.
const READ_EVERY: Duration = Duration::from_millis(5);

impl<'a> Arrivals<'a> {
    pub(crate) fn new(
        accept: &'a dyn Accept,
        hangup: &'a Hangup,
        unclassified: Vec<UnclassifiedConnection>,
    ) -> Self {
        Self {
            accept,
            again_at: None,
            hangup,
            unclassified,
            most: MOST_UNCLASSIFIED,
            closes: Closes::OldestSilent,
        }
    }

    pub(crate) fn accept_all(&mut self) -> Result<(), SocketError> {
        while let Some(stream) = self.next()? {
            self.hangup.register(&stream);
            if self.unclassified.len() >= self.most {
                debug!("{} connections wait already: one is closed", self.most);
                let mut waiting = self.unclassified.iter();
                match waiting.position(UnclassifiedConnection::is_silent) {
                    Some(oldest) if self.closes == Closes::OldestSilent => {
                        self.unclassified.remove(oldest);
                    }
                    _ => continue,
                }
            }
            self.unclassified.push(UnclassifiedConnection::new(stream));
        }
        Ok(())
    }

    /// A waiting connection, except during a pause.
    fn next(&mut self) -> Result<Option<Arc<Stream>>, SocketError> {
        if self.again_at.is_some_and(|again| Instant::now() < again) {
            return Ok(None);
        }
        let has_paused = self.again_at.take().is_some();
        match self.accept.try_accept() {
            Err(error) if error.is_exhaustion() => {
                if !has_paused {
                    warn!("{}; trying again", chain(&error));
                }
                self.again_at = Some(Instant::now() + PAUSE);
                Ok(None)
            }
            accepted => accepted,
        }
    }

    /// Whether connections may be waiting that could not be accepted.
    pub(crate) fn is_pausing(&self) -> bool {
        self.again_at.is_some()
    }

    /// Waits for a connection or for bytes, until `deadline`.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Result<(), RelayError> {
        let mut fds = vec![PollFd::new(self.hangup, PollFlags::IN)];
        if !self.is_pausing() {
            fds.push(PollFd::from_borrowed_fd(self.accept.as_fd(), PollFlags::IN));
        }
        let mut read_at = None;
        for connection in &self.unclassified {
            match connection.stream.socket() {
                Some(socket) => fds.push(PollFd::new(socket, PollFlags::IN)),
                None => read_at = Some(Instant::now() + READ_EVERY),
            }
        }
        let deadlines = [deadline, read_at, self.again_at];
        let next = deadlines.into_iter().flatten().min();
        wait_until(&mut fds, next).map_err(RelayError::SetUp)?;
        match self.hangup.is_hung_up() {
            true => Err(RelayError::Cancelled),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::net::UnixStream};

    use vamoose_link::{PollQueue, Socket};

    use super::*;

    /// The first bytes of the connections that are left at a limit of two, when four have come.
    fn left_at_limit(closes: Closes) -> Vec<Vec<u8>> {
        let (accept, hangup) = (PollQueue::new().unwrap(), Hangup::new().unwrap());
        let mut arrivals = Arrivals::new(&accept, &hangup, Vec::new());
        (arrivals.most, arrivals.closes) = (2, closes);
        let sources = [&b"a"[..], b"", b"", b"d"].map(|bytes| {
            let (mut source, stream) = UnixStream::pair().unwrap();
            source.write_all(bytes).unwrap();
            accept.push(Arc::new(Stream::Socket(Socket::Unix(stream))));
            source
        });
        arrivals.accept_all().unwrap();
        drop(sources);
        let left = arrivals.unclassified.iter_mut().map(|connection| {
            connection.read();
            connection.bytes().to_vec()
        });
        left.collect()
    }

    #[test]
    fn silent_connections_are_limited() {
        assert_eq!(left_at_limit(Closes::OldestSilent), [b"a", b"d"]);
        assert_eq!(left_at_limit(Closes::Newest), [&b"a"[..], b""]);
    }

    #[test]
    fn connections_are_classified_by_first_bytes() {
        use FirstBytes::{Channel, Main, Other, Silent, Tls};
        let (main, channel) = (MAIN_MAGIC.to_be_bytes(), MAGIC.to_be_bytes());
        for (bytes, early, late) in [
            (&b""[..], None, Silent),
            (&main, Some(Main), Main),
            (&main[..3], None, Other),
            (&channel, Some(Channel), Channel),
            (&channel[..1], None, Other),
            (&[0x16, 3, 1, 2], Some(Tls), Tls),
            (&[0x16, 3], Some(Tls), Tls),
            (&[0x16], None, Other),
            (b"G", Some(Other), Other),
            (b"GET ", Some(Other), Other),
        ] {
            assert_eq!(classify(bytes, false), early, "{bytes:x?}");
            assert_eq!(classify(bytes, true), Some(late), "{bytes:x?}");
        }
    }
}
