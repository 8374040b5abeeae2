//! How a source reaches its destination: over a session, or over plain connections.

use std::{net::SocketAddr, time::Duration};

use vamoose_link::{Address, Remote, Session, Socket, Stream, dial};

use crate::SourceError;

/// How a [`Source`](crate::Source) reaches its [`Destination`](crate::Destination), which has to expect the same.
#[derive(Clone, Debug)]
pub enum Transport {
    /// Over a session: authenticated, encrypted and checked as it says, and it survives the loss of its connections.
    Session(Remote),
    /// Over plain connections, which nobody authenticates, encrypts or checks, and of which none may be lost. Only they can
    /// send without copies.
    Plain(Address),
}

impl Transport {
    /// The first connection to the destination, and how to open others to the same one.
    pub(super) fn begin(&self, timeout: Duration) -> Result<(Way, Stream), SourceError> {
        match self {
            Self::Session(remote) => {
                let (session, stream) = remote.dial()?;
                Ok((Way::Session(session, remote.clone()), stream))
            }
            Self::Plain(address) => {
                let socket = dial(address, timeout)?;
                // An error: the connection was closed.
                let peer = peer_address(&socket, address).map_err(|_| SourceError::Unanswered)?;
                Ok((Way::Plain(peer), socket.into()))
            }
        }
    }
}

/// How to open more connections to a destination that was reached once.
pub(super) enum Way {
    Session(Session, Remote),
    /// The address of the first connection's peer: a name may be resolved to another one the next time.
    Plain(Address),
}

impl Way {
    /// Another connection.
    pub(super) fn open(&self, timeout: Duration) -> Result<Stream, SourceError> {
        match self {
            Self::Session(session, _) => Ok(session.open()?),
            Self::Plain(address) => Ok(dial(address, timeout)?.into()),
        }
    }

    /// Another connection, which is lost after `timeout`: of another session, as this one may be what has failed.
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

    /// How much longer an answer may take, as it waits for a connection.
    pub(super) fn reconnect_timeout(&self) -> Duration {
        match self {
            Self::Session(session, _) => session.reconnect_timeout(),
            Self::Plain(_) => Duration::ZERO,
        }
    }
}

/// That of the addresses of `destination` to which `socket` is connected.
fn peer_address(socket: &Socket, destination: &Address) -> std::io::Result<Address> {
    let Socket::Tcp(stream) = socket else {
        return Ok(destination.clone());
    };
    let peer = stream.peer_addr()?;
    let host = match peer {
        SocketAddr::V6(peer) if peer.scope_id() != 0 => {
            format!("{}%{}", peer.ip(), peer.scope_id())
        }
        peer => peer.ip().to_string(),
    };
    let port = peer.port();
    Ok(Address::Tcp { host, port })
}
