//! Accepts a destination's connections.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use vamoose_link::{
    Address, Introduced, Listener, PollQueue, Session, Sessions, Socket, SocketError, Stream,
};

/// Accepts the connections of a [`Destination`](crate::Destination). Its sources have to use the same kind of
/// [`Transport`](crate::Transport).
#[non_exhaustive]
pub enum Acceptor {
    /// Streams of sessions with trusted sources.
    Sessions(Sessions),
    /// Plain connections from anyone.
    Plain(Listener),
    /// Plain connections that the VMM has accepted.
    Own(Accepted),
}

/// Connections that the VMM accepts, in the order in which it [adds](Self::add) them. Clones are the same queue.
#[derive(Clone, Debug)]
pub struct Accepted(Arc<PollQueue<Socket>>);

impl Accepted {
    /// No connections yet.
    ///
    /// # Errors
    /// When the system is out of file descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(PollQueue::new()?)))
    }

    /// Adds a connected stream socket: TCP, unix, vsock, or a descriptor that was handed over.
    ///
    /// # Errors
    /// When it is something else.
    pub fn add(&self, socket: impl Into<OwnedFd>) -> io::Result<()> {
        self.0.push(Socket::try_from(socket.into())?);
        Ok(())
    }
}

impl Acceptor {
    /// A waiting connection, and its session.
    pub(super) fn try_accept(&self) -> Result<Option<(Stream, Option<Session>)>, SocketError> {
        Ok(match self {
            Self::Sessions(sessions) => sessions
                .try_next()
                .map(|Introduced { stream, session }| (stream, Some(session))),
            Self::Plain(listener) => listener.try_accept()?.map(|socket| (socket.into(), None)),
            Self::Own(accepted) => accepted.0.pop().map(|socket| (socket.into(), None)),
        })
    }

    pub(super) fn addresses(&self) -> Vec<&Address> {
        match self {
            Self::Sessions(sessions) => sessions.addresses().collect(),
            Self::Plain(listener) => vec![listener.address()],
            Self::Own(_) => Vec::new(),
        }
    }
}

impl AsFd for Acceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Sessions(sessions) => sessions.as_fd(),
            Self::Plain(listener) => listener.as_fd(),
            Self::Own(accepted) => accepted.0.as_fd(),
        }
    }
}
