//! The handshake: rustls' part of a connection.
//!
//! The handshake is read record by record and never past its end: [`Opener`] reads what follows the server's confirmation. One
//! deadline and one limit of bytes apply to the whole handshake. An end that refuses its peer sends an alert and keeps reading for
//! a moment: closing a socket with unread bytes would destroy the alert.

use std::{
    fmt,
    io::{self, Read as _, Write},
    time::{Duration, Instant},
};

use rustix::net::sockopt::{self, Timeout};
use rustls::{CipherSuite, Connection, ExtractedSecrets, pki_types::CertificateDer};

use super::{
    Opener, Refusal, Sealer, TlsError,
    error::{End, Shown},
    keys::PublicKey,
    names,
    record::{HEADER_LEN, MAX_BODY, RecordKey, is_tls_header},
};
use crate::{Socket, left, socket::is_transient, timeouts::LINGER};

/// A connection whose ends have authenticated each other.
pub(crate) struct Secured {
    /// Seals what is sent.
    pub(crate) sealer: Sealer,
    /// Opens what is received.
    pub(crate) opener: Opener,
    /// Channel binding: a secret of this connection's ends, unique to the connection (RFC 9266).
    pub(crate) binding: [u8; 32],
    /// A name in the peer's certificate, or its key.
    pub(crate) peer: String,
    /// The negotiated cipher.
    pub(crate) cipher: &'static str,
}

/// Name of the application protocol.
pub(super) const ALPN: &[u8] = b"vamoose";

/// Bytes that a peer may send before the end of the handshake. Chains of certificates are the largest part.
pub(super) const MAX_HANDSHAKE: usize = 64 << 10;

const BINDING_LABEL: &[u8] = b"EXPORTER-vamoose";

/// What the server sends when it has accepted the client.
const CONFIRMATION: u8 = 1;

/// Runs the handshake of `connection` on `socket`. The timeouts of the socket are restored at the end.
pub(super) fn run(
    connection: Connection,
    socket: &Socket,
    timeout: Duration,
) -> Result<Secured, Fault> {
    let timeouts = SocketTimeouts::save(socket)?;
    let mut handshake = Handshake {
        connection,
        socket,
        deadline: Instant::now() + timeout,
        received: 0,
        record: Vec::new(),
    };
    let done = handshake.run();
    if matches!(done, Err(Fault::Tls(_) | Fault::OtherProtocol)) {
        socket.linger(handshake.deadline.min(Instant::now() + LINGER));
    }
    done?;
    let connection = handshake.connection;
    timeouts.restore()?;
    secured(connection).map_err(Fault::Tls)
}

/// Why a handshake failed; [`Fault::of`] explains it to the user.
#[derive(Debug)]
pub(super) enum Fault {
    Tls(rustls::Error),
    Socket(io::Error),
    NotTls,
    OtherProtocol,
    TimedOut,
    TooLong,
    Closed,
}

impl Fault {
    pub(super) fn of(
        self,
        peer: End,
        timeout: Duration,
        refusal: Option<Refusal>,
        shown: &Shown,
    ) -> TlsError {
        match self {
            Self::Tls(error) => TlsError::of(error, peer, refusal, shown),
            Self::Socket(source) => TlsError::Socket { peer, source },
            Self::NotTls => TlsError::NotTls { peer },
            Self::OtherProtocol => TlsError::OtherProtocol { peer },
            Self::TimedOut => TlsError::TimedOut { peer, timeout },
            Self::TooLong => TlsError::TooLong {
                peer,
                limit: MAX_HANDSHAKE,
            },
            Self::Closed => TlsError::Closed { peer },
        }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::TimedOut,
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Socket(error),
        }
    }
}

struct Handshake<'a> {
    connection: Connection,
    socket: &'a Socket,
    deadline: Instant,
    /// Bytes of all records so far.
    received: usize,
    record: Vec<u8>,
}

impl Handshake<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        self.send()?;
        while self.connection.is_handshaking() {
            self.receive()?;
            self.send()?;
        }
        let is_ours = self.connection.alpn_protocol() == Some(ALPN);
        match &mut self.connection {
            Connection::Server(server) if is_ours => {
                server.writer().write_all(&[CONFIRMATION])?;
            }
            Connection::Server(server) => server.send_close_notify(),
            Connection::Client(_) if is_ours => self.await_confirmation()?,
            Connection::Client(_) => {}
        }
        self.send()?;
        if is_ours {
            Ok(())
        } else {
            Err(Fault::OtherProtocol)
        }
    }

    /// Waits until the server has accepted the client.
    fn await_confirmation(&mut self) -> Result<(), Fault> {
        let mut confirmation = [0];
        loop {
            match self.connection.reader().read(&mut confirmation) {
                Ok(0) => return Err(Fault::Closed),
                Ok(_) if confirmation == [CONFIRMATION] => return Ok(()),
                Ok(_) => return Err(Fault::OtherProtocol),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.receive()?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Processes one record. Sends an alert if it is refused.
    fn receive(&mut self) -> Result<(), Fault> {
        self.read_record()?;
        let mut rest = &self.record[..];
        while !rest.is_empty() {
            if self.connection.read_tls(&mut rest)? == 0 {
                return Err(Fault::TooLong);
            }
            if let Err(error) = self.connection.process_new_packets() {
                // The error matters more than whether the peer can still be told.
                let _ = self.send();
                return Err(Fault::Tls(error));
            }
        }
        Ok(())
    }

    fn read_record(&mut self) -> Result<(), Fault> {
        let mut header = [0; HEADER_LEN];
        self.read_exact(&mut header)?;
        if !is_tls_header(&header) {
            return Err(Fault::NotTls);
        }
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        self.received += HEADER_LEN + len;
        if len > MAX_BODY || self.received > MAX_HANDSHAKE {
            return Err(Fault::TooLong);
        }
        let mut record = std::mem::take(&mut self.record);
        record.clear();
        record.extend_from_slice(&header);
        record.resize(HEADER_LEN + len, 0);
        let read = self.read_exact(&mut record[HEADER_LEN..]);
        self.record = record;
        read
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), Fault> {
        let mut read = 0;
        while read < buffer.len() {
            self.limit(Timeout::Recv)?;
            match (&mut &*self.socket).read(&mut buffer[read..]) {
                Ok(0) => return Err(Fault::Closed),
                Ok(bytes) => read += bytes,
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends everything rustls has queued.
    fn send(&mut self) -> Result<(), Fault> {
        while self.connection.wants_write() {
            self.limit(Timeout::Send)?;
            match self.connection.write_tls(&mut &*self.socket) {
                Ok(0) => return Err(Fault::Closed),
                Ok(_) => {}
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Limits the next read or write to the deadline.
    fn limit(&self, which: Timeout) -> Result<(), Fault> {
        let rest = left(self.deadline);
        if rest.is_zero() {
            return Err(Fault::TimedOut);
        }
        let rest = rest.max(Duration::from_millis(1));
        sockopt::set_socket_timeout(self.socket, which, Some(rest)).map_err(io::Error::from)?;
        Ok(())
    }
}

/// Extracts the secrets from a connection after its handshake.
fn secured(connection: Connection) -> Result<Secured, rustls::Error> {
    let mut binding = [0; 32];
    connection.export_keying_material(&mut binding, BINDING_LABEL, None)?;
    let peer = connection
        .peer_certificates()
        .and_then(<[_]>::first)
        .map(peer_name)
        .unwrap_or_default();
    let cipher = match connection.negotiated_cipher_suite().map(|s| s.suite()) {
        Some(CipherSuite::TLS13_AES_128_GCM_SHA256) => "AES-128-GCM",
        Some(CipherSuite::TLS13_AES_256_GCM_SHA384) => "AES-256-GCM",
        Some(CipherSuite::TLS13_CHACHA20_POLY1305_SHA256) => "ChaCha20-Poly1305",
        _ => return Err(rustls::Error::HandshakeNotComplete),
    };
    let ExtractedSecrets { tx, rx } = connection.dangerous_extract_secrets()?;
    Ok(Secured {
        sealer: Sealer::new(RecordKey::new(tx)?),
        opener: Opener::new(RecordKey::new(rx)?),
        binding,
        peer,
        cipher,
    })
}

fn peer_name(shown: &CertificateDer<'_>) -> String {
    if let Some(key) = PublicKey::from_spki(shown) {
        return key.to_string();
    }
    let name = names::of(shown).into_iter().next();
    name.unwrap_or_else(|| "a certificate without a name".to_owned())
}

impl fmt::Debug for Secured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secured")
            .field("peer", &self.peer)
            .field("cipher", &self.cipher)
            .finish_non_exhaustive()
    }
}

/// Timeouts of a socket before the handshake.
struct SocketTimeouts<'a> {
    socket: &'a Socket,
    receive: Option<Duration>,
    send: Option<Duration>,
}

impl<'a> SocketTimeouts<'a> {
    fn save(socket: &'a Socket) -> io::Result<Self> {
        Ok(Self {
            socket,
            receive: sockopt::socket_timeout(socket, Timeout::Recv)?,
            send: sockopt::socket_timeout(socket, Timeout::Send)?,
        })
    }

    fn restore(self) -> io::Result<()> {
        sockopt::set_socket_timeout(self.socket, Timeout::Recv, self.receive)?;
        sockopt::set_socket_timeout(self.socket, Timeout::Send, self.send)?;
        Ok(())
    }
}
