//! One connection of a session: a socket, with or without TLS, whose two directions are used by different threads.

use std::{
    io::{self, IoSlice, Read as _},
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use vamoose_session::{
    frame::HEADER_LEN,
    handshake::Binding,
    stream::{ConnectionId, SILENCE, Seen, Transmit},
};

use crate::{
    Socket,
    backlog::Backlog,
    memory::{self, Left},
    socket::is_transient,
    timeouts::LOOK,
    tls::{Opener, Sealer, Secured},
    wait_for,
};

/// State shared by both directions.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Number of the connection, by which its stream's state knows it.
    pub(crate) id: ConnectionId,
    socket: Arc<Socket>,
    /// Number of the client's path; 0 at the server.
    pub(crate) path: usize,
    /// Name for messages.
    pub(crate) name: String,
    since: Instant,
    /// Time of the last receive and the last send, in milliseconds from `since`.
    heard: AtomicU64,
    sent: AtomicU64,
    /// A key has been used for most of its records.
    is_worn: AtomicBool,
}

/// A connection in the session's handshake.
pub(crate) struct NewConnection {
    socket: Arc<Socket>,
    /// `None` without TLS.
    secured: Option<Secured>,
    deadline: Instant,
}

/// The direction to the peer.
pub(crate) struct Sender {
    connection: Arc<Connection>,
    sealer: Option<Sealer>,
    backlog: Backlog,
}

/// The direction from the peer.
pub(crate) struct Receiver {
    connection: Arc<Connection>,
    opener: Option<Opener>,
    /// Bytes read ahead, so that a frame's header and the bytes after it take one system call.
    ahead: Box<[u8; AHEAD]>,
    from: usize,
    to: usize,
}

/// Holds a packet's header, and the headers of the frames before and after it.
const AHEAD: usize = 2048;

impl Connection {
    /// Ends both directions, for all threads.
    pub(crate) fn shut_down(&self) {
        self.socket.shut_down();
    }

    /// Round-trip time of a TCP connection, if known.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.socket.round_trip()
    }

    /// Ends the direction from the peer without its notice.
    pub(crate) fn stop_reading(&self) {
        self.socket.stop_reading();
    }

    /// State of the connection, for its stream.
    pub(crate) fn seen(&self) -> Seen {
        let silent_for = self.passed_since(&self.heard);
        Seen {
            connection: self.id,
            silent_for,
            idle_for: self.passed_since(&self.sent),
            has_unread: silent_for > SILENCE && self.is_readable(Duration::ZERO),
        }
    }

    /// Whether it should be replaced before its keys are used up.
    pub(crate) fn is_worn(&self) -> bool {
        self.is_worn.load(Ordering::Relaxed)
    }

    /// Whether the kernel has bytes of the peer within `timeout`.
    pub(crate) fn is_readable(&self, timeout: Duration) -> bool {
        self.polls(PollFlags::IN, timeout)
    }

    /// Whether the kernel takes a small frame at once.
    pub(crate) fn is_writable(&self) -> bool {
        self.polls(PollFlags::OUT, Duration::ZERO)
    }

    fn polls(&self, flags: PollFlags, timeout: Duration) -> bool {
        wait_for(&mut [PollFd::new(&*self.socket, flags)], timeout).unwrap_or(false)
    }

    fn passed_since(&self, last: &AtomicU64) -> Duration {
        let last = Duration::from_millis(last.load(Ordering::Relaxed));
        self.since.elapsed().saturating_sub(last)
    }

    fn note(&self, last: &AtomicU64) {
        let now = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        last.store(now, Ordering::Relaxed);
    }
}

impl NewConnection {
    /// A connection whose handshake must end by `deadline`; `secured` with TLS.
    pub(crate) fn new(
        socket: impl Into<Arc<Socket>>,
        secured: Option<Secured>,
        deadline: Instant,
    ) -> Self {
        Self {
            socket: socket.into(),
            secured,
            deadline,
        }
    }

    /// Channel binding of the TLS handshake; zeros without TLS.
    pub(crate) fn binding(&self) -> Binding {
        self.secured.as_ref().map_or([0; 32], |it| it.binding)
    }

    /// The authenticated peer.
    pub(crate) fn peer(&self) -> Option<&str> {
        self.secured.as_ref().map(|it| &*it.peer)
    }

    /// The cipher of the connection.
    pub(crate) fn cipher(&self) -> Option<&'static str> {
        self.secured.as_ref().map(|it| it.cipher)
    }

    pub(crate) fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.socket.set_deadline(self.deadline)?;
        let mut stalled = |_| Err(io::ErrorKind::TimedOut.into());
        match &mut self.secured {
            None => self
                .socket
                .write_all(&mut [IoSlice::new(message)], &mut stalled),
            Some(it) => it.sealer.send(&self.socket, &[message], &mut stalled),
        }
    }

    pub(crate) fn read_exactly(&mut self, message: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < message.len() {
            self.socket.set_deadline(self.deadline)?;
            let rest = &mut message[filled..];
            let read = match &mut self.secured {
                None => (&*self.socket).read(rest),
                Some(it) => it.opener.read(&self.socket, rest),
            };
            match read {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => filled += read,
                // Only the deadline ends the wait.
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends the handshake. From now on, reads and writes return after [`LOOK`] at the latest, so that silence is noticed.
    pub(crate) fn end_handshake(&self) -> io::Result<()> {
        self.socket.set_patience(LOOK)
    }

    /// The two directions, for a stream.
    pub(crate) fn split(self, id: ConnectionId, path: usize, name: String) -> (Receiver, Sender) {
        let connection = Arc::new(Connection {
            id,
            socket: self.socket,
            path,
            name,
            since: Instant::now(),
            heard: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            is_worn: AtomicBool::new(false),
        });
        let tls = self.secured.map(|it| (it.sealer, it.opener));
        let (sealer, opener) = tls.unzip();
        let receiver = Receiver {
            connection: connection.clone(),
            opener,
            ahead: Box::new([0; AHEAD]),
            from: 0,
            to: 0,
        };
        let sender = Sender {
            connection,
            sealer,
            backlog: Backlog::default(),
        };
        (receiver, sender)
    }
}

impl Sender {
    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Sends one or two frames in as few system calls as possible. `stalled` is called each time the kernel has not taken
    /// everything for a while.
    pub(crate) fn send(
        &mut self,
        transmit: &Transmit,
        stalled: &mut dyn FnMut(usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut headers, mut bytes) = ([[0; HEADER_LEN]; 2], [[].as_slice(); 2]);
        let mut count = 0;
        for (header, behind) in transmit.frames().take(2) {
            headers[count] = header;
            bytes[count] = behind;
            count += 1;
        }
        let pieces = [&headers[0], bytes[0], &headers[1], bytes[1]];
        self.send_pieces(&pieces[..count * 2], stalled)
    }

    /// Ends the direction to the peer after the sent bytes.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        let socket = &*self.connection.socket;
        if let Some(sealer) = &mut self.sealer {
            sealer.close(socket, &mut |_| Err(io::ErrorKind::TimedOut.into()))?;
        }
        socket.finish();
        Ok(())
    }

    /// Lowers the key's limit of records.
    #[cfg(test)]
    pub(crate) fn limit_records(&mut self, max_records: u64) {
        if let Some(sealer) = &mut self.sealer {
            sealer.limit_records(max_records);
        }
    }

    /// Sends parts of frames: at most four.
    pub(crate) fn send_pieces(
        &mut self,
        pieces: &[&[u8]],
        stalled: &mut dyn FnMut(usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let socket = &*self.connection.socket;
        self.backlog.bound(socket);
        match &mut self.sealer {
            Some(sealer) => {
                sealer.send(socket, pieces, stalled)?;
                if sealer.is_worn() {
                    self.connection.is_worn.store(true, Ordering::Relaxed);
                }
            }
            None => {
                let mut slices = [IoSlice::new(&[]); 4];
                for (slice, piece) in slices.iter_mut().zip(pieces) {
                    *slice = IoSlice::new(piece);
                }
                let len = pieces.len().min(slices.len());
                socket.write_all(&mut slices[..len], stalled)?;
            }
        }
        self.connection.note(&self.connection.sent);
        Ok(())
    }
}

impl Receiver {
    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Whether there are bytes within `timeout`, without reading them.
    pub(crate) fn has_bytes(&self, timeout: Duration) -> bool {
        self.from < self.to
            || self.opener.as_ref().is_some_and(Opener::buffered)
            || self.connection.is_readable(timeout)
    }

    /// Reads available bytes: at least one, or 0 if the peer has closed the connection.
    pub(crate) fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.from == self.to && out.len() < AHEAD {
            self.to = read(&self.connection, self.opener.as_mut(), &mut self.ahead[..])?;
            self.from = 0;
        }
        if self.from == self.to && out.len() >= AHEAD {
            return read(&self.connection, self.opener.as_mut(), out);
        }
        let len = out.len().min(self.to - self.from);
        out[..len].copy_from_slice(&self.ahead[self.from..self.from + len]);
        self.from += len;
        Ok(len)
    }

    /// Whether the connection is without TLS, so that the kernel can write to guest memory.
    pub(crate) fn is_plain(&self) -> bool {
        self.opener.is_none()
    }

    /// As [`Receiver::read`], into guest memory, on a plain connection.
    pub(crate) fn read_memory(&mut self, left: &Left<'_>) -> io::Result<usize> {
        if self.from < self.to {
            let copied = left.fill(&self.ahead[self.from..self.to]);
            self.from += copied;
            return Ok(copied);
        }
        let read = memory::receive(self.connection.socket.as_fd(), left)?;
        self.connection.note(&self.connection.heard);
        Ok(read)
    }
}

fn read(connection: &Connection, opener: Option<&mut Opener>, out: &mut [u8]) -> io::Result<usize> {
    let read = match opener {
        Some(opener) => {
            let read = opener.read(&connection.socket, out);
            if opener.is_worn() {
                connection.is_worn.store(true, Ordering::Relaxed);
            }
            read
        }
        None => (&*connection.socket).read(out),
    }?;
    connection.note(&connection.heard);
    Ok(read)
}
