//! A source's connections to its destination: over a session, or plain.

use std::{fmt, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use vamoose_link::{Address, DialError, Remote, Session, Socket, Stream, dial};

use crate::SourceError;

/// How a [`Source`](crate::Source) reaches its [`Destination`](crate::Destination), which has to expect the same.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Transport {
    /// Over a session: authenticated, encrypted and checked as the [`Remote`] says. It survives the loss of connections.
    Session(Remote),
    /// Over plain connections, without authentication, encryption or checks. The loss of a connection is an error. Only
    /// plain connections support zero-copy send.
    Plain(Address),
    /// Over plain connections that the VMM makes.
    Own(OwnConnections),
}

/// Connects to the destination: called for the control connection, for each channel, and again for a control connection that was lost.
#[derive(Clone)]
pub struct OwnConnections(Arc<dyn Fn() -> io::Result<OwnedFd> + Send + Sync>);

impl fmt::Debug for OwnConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("own connections")
    }
}

impl From<Remote> for Transport {
    fn from(remote: Remote) -> Self {
        Self::Session(remote)
    }
}

impl From<Address> for Transport {
    fn from(address: Address) -> Self {
        Self::Plain(address)
    }
}

impl From<&Transport> for Transport {
    fn from(transport: &Transport) -> Self {
        transport.clone()
    }
}

impl Transport {
    /// Over connected stream sockets that `connect` returns: TCP, unix, vsock, or descriptors that were handed over.
    pub fn own<S: Into<OwnedFd>>(
        connect: impl Fn() -> io::Result<S> + Send + Sync + 'static,
    ) -> Self {
        Self::Own(OwnConnections(Arc::new(move || Ok(connect()?.into()))))
    }

    /// The first connection to the destination, and how to open others to the same one.
    pub(super) fn begin(&self, timeout: Duration) -> Result<(Redialer, Stream), SourceError> {
        match self {
            Self::Session(remote) => {
                let (session, stream) = remote.dial().map_err(or_other_transport)?;
                Ok((Redialer::Session(session, remote.clone()), stream))
            }
            Self::Own(own) => Ok((Redialer::Own(own.clone()), own.connect(timeout)?)),
            Self::Plain(address) => {
                let socket = dial(address, timeout)?;
                // An error: the connection was closed.
                let peer = peer_address(&socket, address).map_err(|_| SourceError::Unanswered)?;
                Ok((Redialer::Plain(peer), socket.into()))
            }
        }
    }
}

/// Opens more connections to a destination that was reached before.
#[derive(Clone)]
pub(super) enum Redialer {
    Session(Session, Remote),
    /// The address of the first connection's peer. A host name may resolve to another address the next time.
    Plain(Address),
    Own(OwnConnections),
}

impl OwnConnections {
    fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        let socket = Socket::try_from((self.0)()?)?;
        socket.set_stall_timeout(timeout)?;
        Ok(socket.into())
    }
}

/// The error for a destination that does not know the session's first bytes.
fn or_other_transport(error: DialError) -> SourceError {
    match error.is_about_tls() || error.is_about_port() {
        true => SourceError::OtherTransport(error),
        false => error.into(),
    }
}

impl Redialer {
    /// Another connection.
    pub(super) fn open(&self, timeout: Duration) -> Result<Stream, SourceError> {
        match self {
            Self::Session(session, _) => Ok(session.open()?),
            Self::Plain(address) => Ok(dial(address, timeout)?.into()),
            Self::Own(own) => Ok(own.connect(timeout)?),
        }
    }

    /// Another connection, lost after `timeout`. It belongs to another session, as the first session may have failed.
    pub(super) fn open_anew(&self, timeout: Duration) -> Result<Stream, SourceError> {
        let Self::Session(_, remote) = self else {
            return self.open(timeout);
        };
        let mut remote = remote.clone();
        let reconnect_timeout = &mut remote.config.reconnect_timeout;
        *reconnect_timeout = timeout.min(*reconnect_timeout);
        let (_, stream) = remote.dial()?;
        Ok(stream)
    }

    /// How much longer an answer may take, while a lost connection comes back.
    pub(super) fn reconnect_timeout(&self) -> Duration {
        match self {
            Self::Session(session, _) => session.reconnect_timeout(),
            Self::Plain(_) | Self::Own(_) => Duration::ZERO,
        }
    }
}

/// The address of `destination` that `socket` is connected to.
fn peer_address(socket: &Socket, destination: &Address) -> io::Result<Address> {
    let Socket::Tcp(stream) = socket else {
        return Ok(destination.clone());
    };
    let peer = stream.peer_addr()?;
    format!("tcp:{peer}").parse().map_err(io::Error::other)
}
