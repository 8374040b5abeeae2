//! Sources of a relay's incoming connections: a listening socket, a session, or another thread.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use tracing::warn;
use vamoose_link::{Listener, PollQueue, Sessions, SocketError, Stream};

use crate::config::{BYTES, RELAYED};

/// A source of connections that can be polled.
pub trait Accept: AsFd + Sync {
    /// Returns a waiting connection. The file descriptor is readable while there may be one.
    ///
    /// # Errors
    /// When the system refuses.
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError>;

    /// Whether foreign clients may connect to the same socket. Their connections are closed even after the source has begun.
    fn is_shared(&self) -> bool {
        false
    }

    /// Waits until the peer has received everything that the end of this process would lose.
    fn drain(&self, _timeout: Duration) {}
}

impl Accept for Listener {
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        Ok(Listener::try_accept(self)?.map(|socket| Arc::new(socket.into())))
    }
}

/// Pause while the system has no file descriptors. A full queue keeps the listener readable, so polling would be a busy wait.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// The first byte of a stream that another Vamoose has opened, which is the stream's kind.
pub(crate) fn kind_of(stream: &Stream) -> Option<u8> {
    first_of(stream).map(|[kind]| kind)
}

/// The first bytes of a stream that another Vamoose has opened.
pub(crate) fn first_of<const LEN: usize>(stream: &Stream) -> Option<[u8; LEN]> {
    let (mut bytes, mut got) = ([0; LEN], 0);
    // Sessions introduce a stream after its first byte, and a client sends all of these together, so this does not wait.
    let deadline = Some(Instant::now() + PAUSE);
    while got < LEN {
        match stream.read_until(&mut bytes[got..], deadline) {
            Ok(Some(read @ 1..)) => got += read,
            _ => return None,
        }
    }
    Some(bytes)
}

const UNKNOWN_KIND: &str = "turning away a stream that was not opened by a relay of this version";

/// Streams of another relay's session.
impl Accept for Sessions {
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        while let Some(introduced) = self.try_next() {
            let stream = introduced.stream;
            match kind_of(&stream) {
                Some(RELAYED) => return Ok(Some(Arc::new(stream))),
                _ => warn!("{UNKNOWN_KIND}"),
            }
        }
        Ok(None)
    }

    fn drain(&self, timeout: Duration) {
        if !Sessions::drain(self, timeout) {
            warn!("the other relay has not acknowledged the end");
        }
    }
}

/// Streams of another relay's sessions, sorted: those of a migration are accepted here, those for [`Relay::pass_bytes`] are queued.
///
/// [`Relay::pass_bytes`]: crate::Relay::pass_bytes
pub struct SortedStreams {
    sessions: Sessions,
    /// The streams for `pass_bytes`, once a relay of a migration has polled these sessions.
    pub bytes: PollQueue<Arc<Stream>>,
}

impl SortedStreams {
    /// The streams of `sessions`.
    ///
    /// # Errors
    /// When the system is out of file descriptors.
    pub fn new(sessions: Sessions) -> io::Result<Self> {
        let bytes = PollQueue::new()?;
        Ok(Self { sessions, bytes })
    }
}

impl Accept for SortedStreams {
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        while let Some(introduced) = self.sessions.try_next() {
            let stream = Arc::new(introduced.stream);
            match kind_of(&stream) {
                Some(RELAYED) => return Ok(Some(stream)),
                Some(BYTES) => self.bytes.push(stream),
                _ => warn!("{UNKNOWN_KIND}"),
            }
        }
        Ok(None)
    }

    fn drain(&self, timeout: Duration) {
        Accept::drain(&self.sessions, timeout);
    }
}

impl AsFd for SortedStreams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sessions.as_fd()
    }
}

/// Connections that another thread has accepted.
impl Accept for PollQueue<Arc<Stream>> {
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        Ok(self.pop())
    }
}
