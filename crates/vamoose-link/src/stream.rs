//! A stream of bytes over a connection or a session, for readers and writers of packets and messages.

use std::{
    io::{self, IoSlice, Read, Write},
    iter,
    net::TcpStream,
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use vm_memory::VolatileSlice;

use crate::{Resumable, Session, Socket, StreamError, memory::Left, socket::uninterrupted};

/// Bytes in both directions. Reads and writes go through a shared reference, so that one thread may read while
/// another writes and a third one ends the stream.
#[derive(Debug)]
pub enum Stream {
    /// One connection: of a QEMU, or of a program on this host.
    Socket(Socket),
    /// A stream of a session.
    Resumable(Resumable),
}

/// What a peer has received.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Delivery {
    /// Bytes of all streams of the session.
    pub(crate) arrived: u64,
    /// Bytes of this stream that it has not acknowledged.
    pub(crate) unacknowledged: usize,
    /// Of this stream.
    pub(crate) round_trip: Duration,
}

impl Stream {
    /// Reports to the peer that this end's reader waits for the network for this share of its time. Without effect on a socket.
    pub(crate) fn report_wait(&self, share: f64) {
        if let Self::Resumable(stream) = self {
            stream.stream().report_wait(share);
        }
    }

    /// The share of its time that the peer's reader waits for the network, if the peer reports it.
    pub(crate) fn peer_wait(&self) -> Option<f64> {
        self.resumable()?.stream().peer_wait()
    }

    /// What the peer has received. `None` for a socket, and at the server of a session.
    pub(crate) fn delivery(&self) -> Option<Delivery> {
        self.resumable()?.stream().delivery()
    }

    /// Ends both directions: calls that read or write this stream return at once.
    pub fn shut_down(&self) {
        match self {
            Self::Socket(socket) => socket.shut_down(),
            Self::Resumable(stream) => stream.stream().close(StreamError::ShutDown),
        }
    }

    /// Lets a TCP connection end with a reset, also when this process is killed, so that its peer knows that bytes are missing.
    /// `false` takes that back: call it when both directions have ended. Has no effect on other streams; one of a session is always
    /// either ended or given up.
    pub fn reset_at_end(&self, resets: bool) {
        if let Self::Socket(socket) = self {
            socket.reset_at_end(resets);
        }
    }

    /// Ends the direction to the peer; what has been written still arrives.
    pub fn finish(&self) {
        match self {
            Self::Socket(socket) => socket.finish(),
            Self::Resumable(stream) => stream.stream().finish(),
        }
    }

    /// In a session, waits until the peer has received all written bytes: ending the stream before would lose them. False after
    /// `timeout`.
    pub fn drain(&self, timeout: Duration) -> bool {
        self.resumable().is_none_or(|it| it.stream().drain(timeout))
    }

    /// Reads until `buffer` is full, or the peer has ended the stream. Returns the bytes read.
    ///
    /// # Errors
    /// The system's; see [`is_stall`](crate::is_stall) for a peer that sent nothing for the stall timeout.
    pub fn read_full(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match uninterrupted(|| (&mut &*self).read(&mut buffer[filled..]))? {
                0 => break,
                read => filled += read,
            }
        }
        Ok(filled)
    }

    /// Reads available bytes: at least one, or 0 if the peer has ended the stream. `None` if nothing arrives by `deadline`.
    ///
    /// # Errors
    /// The system's, or why the stream is lost.
    pub fn read_until(
        &self,
        out: &mut [u8],
        deadline: Option<Instant>,
    ) -> io::Result<Option<usize>> {
        match self {
            Self::Socket(socket) => socket.read_until(out, deadline),
            Self::Resumable(stream) => stream.stream().read_until(out, deadline),
        }
    }

    /// Writes `head` and then `tail`.
    ///
    /// # Errors
    /// The system's; see [`is_stall`](crate::is_stall) for a peer that took nothing for the stall timeout.
    pub fn write_both(&self, head: &[u8], tail: &[u8]) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.write_both(head, tail),
            Self::Resumable(stream) => stream.stream().write_both(head, tail),
        }
    }

    /// Writes a packet: `head`, and the first `len` bytes of `payload`, which may be exchanged for another buffer of the same
    /// length. `pages` is the checksum of the pages (CRC-32C), where the payload encodes them and
    /// [`checks_pages`](Self::checks_pages).
    ///
    /// # Errors
    /// As [`Stream::write_both`].
    pub(crate) fn write_packet(
        &self,
        head: &[u8],
        payload: &mut Box<[u8]>,
        len: usize,
        pages: Option<u32>,
    ) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.write_both(head, &payload[..len]),
            Self::Resumable(stream) => stream.stream().write_packet(head, payload, len, pages),
        }
    }

    /// Writes `head`, and each page of `pages` after `frame`.
    ///
    /// # Errors
    /// As [`Stream::write_both`].
    pub(crate) fn write_framed(
        &self,
        head: &[u8],
        frame: &[u8],
        pages: &[u8],
        page_size: usize,
    ) -> io::Result<()> {
        // A packet of 4 KiB pages; the kernel takes 1024 slices.
        const MOST_PAGES: usize = 128;
        let (mut head, mut rest) = (head, pages);
        loop {
            let (pages, later) = rest.split_at(rest.len().min(MOST_PAGES * page_size));
            let mut slices = [IoSlice::new(&[]); 1 + 2 * MOST_PAGES];
            let framed = pages.chunks(page_size).flat_map(|page| [frame, page]);
            for (slice, piece) in slices.iter_mut().zip(iter::once(head).chain(framed)) {
                *slice = IoSlice::new(piece);
            }
            match self {
                Self::Socket(socket) => socket.write_slices(&mut slices)?,
                Self::Resumable(_) => slices
                    .iter()
                    .try_for_each(|piece| self.write_both(piece, &[]))?,
            }
            if later.is_empty() {
                return Ok(());
            }
            (head, rest) = (&[], later);
        }
    }

    /// Whether packets go with a checksum of the pages that they encode.
    pub(crate) fn checks_pages(&self) -> bool {
        self.resumable().is_some_and(|it| it.stream().is_checked())
    }

    /// The checksum of pages that came with the bytes read last.
    pub(crate) fn pages_sum(&self) -> Option<u32> {
        self.resumable()?.stream().pages()
    }

    /// Name of the connection, for messages.
    pub(crate) fn connection_name(&self) -> String {
        match self {
            Self::Socket(_) => "a connection".to_owned(),
            Self::Resumable(stream) => stream.stream().connection_name(),
        }
    }

    /// Writes `header` and then `pages`, straight from guest memory. If the guest writes meanwhile, the peer
    /// receives a mixture of old and new bytes.
    ///
    /// # Errors
    /// As [`Stream::write_both`].
    pub fn send_memory(&self, header: &[u8], pages: &[VolatileSlice<'_>]) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.send_memory(header, pages),
            Self::Resumable(stream) => stream.stream().send_memory(header, pages),
        }
    }

    /// Reads straight into guest memory until `pages` are full, or the peer has ended the stream. Returns the
    /// bytes read.
    ///
    /// # Errors
    /// As [`Stream::read_full`].
    pub fn receive_memory(&self, pages: &[VolatileSlice<'_>]) -> io::Result<usize> {
        let mut left = Left::new(&[], pages);
        let wanted = left.bytes();
        while left.bytes() > 0 {
            let read = match self {
                Self::Socket(socket) => socket.receive_memory(&mut left)?,
                Self::Resumable(stream) => stream.stream().receive_memory(&mut left)?,
            };
            if read == 0 {
                break;
            }
        }
        Ok(wanted - left.bytes())
    }

    /// Sets the stall timeout: how long a read or write waits for the peer.
    ///
    /// # Errors
    /// When `timeout` is zero.
    pub fn set_stall_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.set_stall_timeout(timeout),
            Self::Resumable(stream) => {
                stream.stream().set_stall_timeout(timeout);
                Ok(())
            }
        }
    }

    /// The stall timeout; zero if there is none.
    pub fn stall_timeout(&self) -> Duration {
        match self {
            Self::Socket(socket) => socket.stall_timeout(),
            Self::Resumable(stream) => stream.stream().stall_timeout(),
        }
    }

    /// The session this stream belongs to.
    pub fn session(&self) -> Option<Session> {
        self.resumable().map(Session::of)
    }

    pub(crate) fn resumable(&self) -> Option<&Resumable> {
        match self {
            Self::Socket(_) => None,
            Self::Resumable(stream) => Some(stream),
        }
    }

    /// The connection, if the stream is one.
    pub fn socket(&self) -> Option<&Socket> {
        match self {
            Self::Socket(socket) => Some(socket),
            Self::Resumable(_) => None,
        }
    }
}

impl From<Socket> for Stream {
    fn from(socket: Socket) -> Self {
        Self::Socket(socket)
    }
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Self {
        Self::Socket(Socket::Tcp(stream))
    }
}

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Self {
        Self::Socket(Socket::Unix(stream))
    }
}

impl Read for &Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => (&mut &*socket).read(buffer),
            Stream::Resumable(stream) => stream.stream().read(buffer),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => (&mut &*socket).write(buffer),
            Stream::Resumable(stream) => {
                stream.stream().write_both(buffer, &[])?;
                Ok(buffer.len())
            }
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => (&mut &*socket).write_vectored(slices),
            Stream::Resumable(_) => {
                let first = slices.iter().find(|slice| !slice.is_empty());
                first.map_or(Ok(0), |slice| self.write(slice))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
