//! The handshake: rustls' part of a connection.
//!
//! The handshake is read record by record and never past its end: [`Opener`] reads what follows the server's confirmation. One
//! deadline and one limit of bytes apply to the whole handshake. An end that refuses its peer sends an alert and keeps reading for
//! a moment: closing a socket with unread bytes would destroy the alert.

use std::{
    io::{self, Read as _, Write},
    time::{Duration, Instant},
};

use rustls::{CipherSuite, Connection, ExtractedSecrets, pki_types::CertificateDer};

use super::{
    End, Opener, Sealer, TlsError,
    keys::PublicKey,
    names,
    record::{HEADER_LEN, MAX_BODY, RecordKey, is_tls_header},
};
use crate::{Socket, is_stall, socket::is_transient, timeouts::LINGER};

/// A connection whose ends have authenticated each other.
pub(crate) struct Secured {
    /// Seals sent records.
    pub(crate) sealer: Sealer,
    /// Opens received records.
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

/// Sent by the server when it has accepted the client.
const CONFIRMATION: u8 = 1;

/// Runs the handshake of `connection` on `socket`, with a `peer` of the other role. `explain` explains errors of rustls. The
/// socket's timeouts are changed. A client sends the bytes of `first` behind its part of the handshake.
pub(super) fn run(
    connection: Connection,
    socket: &Socket,
    first: &[u8],
    timeout: Duration,
    peer: End,
    explain: &dyn Fn(rustls::Error) -> TlsError,
) -> Result<Secured, TlsError> {
    let mut handshake = Handshake {
        connection,
        socket,
        first,
        peer,
        explain,
        timeout,
        deadline: Instant::now() + timeout,
        received: 0,
        record: Vec::new(),
    };
    handshake.run()?;
    secured(handshake.connection).map_err(explain)
}

struct Handshake<'a> {
    connection: Connection,
    socket: &'a Socket,
    first: &'a [u8],
    /// The other end.
    peer: End,
    explain: &'a dyn Fn(rustls::Error) -> TlsError,
    timeout: Duration,
    deadline: Instant,
    /// Bytes of all records so far.
    received: usize,
    record: Vec<u8>,
}

impl Handshake<'_> {
    fn run(&mut self) -> Result<(), TlsError> {
        self.send()?;
        while self.connection.is_handshaking() {
            self.receive()?;
            self.send()?;
        }
        let is_ours = self.connection.alpn_protocol() == Some(ALPN);
        match &mut self.connection {
            Connection::Server(server) if is_ours => {
                let confirmed = server.writer().write_all(&[CONFIRMATION]);
                confirmed.map_err(|error| self.failed(error))?;
            }
            Connection::Server(server) => server.send_close_notify(),
            // The server is authenticated and the bytes are encrypted, so they need not wait for the confirmation.
            Connection::Client(client) if is_ours => {
                let sent = client.writer().write_all(self.first);
                sent.map_err(|error| self.failed(error))?;
                self.send()?;
                self.await_confirmation()?;
            }
            Connection::Client(_) => {}
        }
        self.send()?;
        match is_ours {
            true => Ok(()),
            false => Err(self.refuse(TlsError::OtherProtocol { peer: self.peer })),
        }
    }

    /// Waits until the server has accepted the client.
    fn await_confirmation(&mut self) -> Result<(), TlsError> {
        let peer = self.peer;
        let mut confirmation = [0];
        loop {
            match self.connection.reader().read(&mut confirmation) {
                Ok(0) => return Err(self.closed()),
                Ok(_) if confirmation == [CONFIRMATION] => return Ok(()),
                Ok(_) => return Err(self.refuse(TlsError::OtherProtocol { peer })),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.receive()?,
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    /// Processes one record. Sends an alert if it is refused.
    fn receive(&mut self) -> Result<(), TlsError> {
        self.read_record()?;
        let mut rest = &self.record[..];
        while !rest.is_empty() {
            let read = self.connection.read_tls(&mut rest);
            if read.map_err(|error| self.failed(error))? == 0 {
                return Err(self.too_long());
            }
            if let Err(error) = self.connection.process_new_packets() {
                // The error matters more than whether the peer can still be told.
                let _ = self.send();
                return Err(self.refuse((self.explain)(error)));
            }
        }
        Ok(())
    }

    fn read_record(&mut self) -> Result<(), TlsError> {
        let mut header = [0; HEADER_LEN];
        self.read_exact(&mut header)?;
        if !is_tls_header(&header) {
            return Err(TlsError::NotTls { peer: self.peer });
        }
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        self.received += HEADER_LEN + len;
        if len > MAX_BODY || self.received > MAX_HANDSHAKE {
            return Err(self.too_long());
        }
        let mut record = std::mem::take(&mut self.record);
        record.clear();
        record.extend_from_slice(&header);
        record.resize(HEADER_LEN + len, 0);
        let read = self.read_exact(&mut record[HEADER_LEN..]);
        self.record = record;
        read
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), TlsError> {
        let mut read = 0;
        while read < buffer.len() {
            self.limit()?;
            match (&mut &*self.socket).read(&mut buffer[read..]) {
                Ok(0) => return Err(self.closed()),
                Ok(bytes) => read += bytes,
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    /// Sends everything rustls has queued.
    fn send(&mut self) -> Result<(), TlsError> {
        while self.connection.wants_write() {
            self.limit()?;
            match self.connection.write_tls(&mut &*self.socket) {
                Ok(0) => return Err(self.closed()),
                Ok(_) => {}
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    /// Limits the next read or write to the deadline.
    fn limit(&self) -> Result<(), TlsError> {
        let limited = self.socket.set_deadline(self.deadline);
        limited.map_err(|error| self.failed(error))
    }

    /// Gives the refused peer time to read why.
    fn refuse(&self, reason: TlsError) -> TlsError {
        self.socket
            .linger(self.deadline.min(Instant::now() + LINGER));
        reason
    }

    fn failed(&self, error: io::Error) -> TlsError {
        let (peer, timeout) = (self.peer, self.timeout);
        let source = match is_stall(&error) {
            true => {
                let problem = format!("it did not end within {} s", timeout.as_secs_f32());
                io::Error::new(io::ErrorKind::TimedOut, problem)
            }
            false => error,
        };
        TlsError::Handshake { peer, source }
    }

    fn closed(&self) -> TlsError {
        let problem = "the connection was closed";
        self.failed(io::Error::new(io::ErrorKind::UnexpectedEof, problem))
    }

    fn too_long(&self) -> TlsError {
        let problem = format!("more than {MAX_HANDSHAKE} bytes came before its end");
        self.failed(io::Error::new(io::ErrorKind::InvalidData, problem))
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
