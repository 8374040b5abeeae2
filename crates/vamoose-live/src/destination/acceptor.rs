//! Accepts a destination's connections.

use std::os::fd::{AsFd, BorrowedFd};

use vamoose_link::{Address, Introduced, Listener, Session, Sessions, SocketError, Stream};

/// Accepts the connections of a [`Destination`](crate::Destination). Its sources have to use the same kind of
/// [`Transport`](crate::Transport).
pub enum Acceptor {
    /// Streams of sessions with trusted sources.
    Sessions(Sessions),
    /// Plain connections from anyone.
    Plain(Listener),
}

impl Acceptor {
    /// A waiting connection, and its session.
    pub(super) fn try_accept(&self) -> Result<Option<(Stream, Option<Session>)>, SocketError> {
        Ok(match self {
            Self::Sessions(sessions) => sessions
                .try_next()
                .map(|Introduced { stream, session }| (stream, Some(session))),
            Self::Plain(listener) => listener.try_accept()?.map(|socket| (socket.into(), None)),
        })
    }

    pub(super) fn addresses(&self) -> Vec<&Address> {
        match self {
            Self::Sessions(sessions) => sessions.addresses().collect(),
            Self::Plain(listener) => vec![listener.address()],
        }
    }
}

impl AsFd for Acceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Sessions(sessions) => sessions.as_fd(),
            Self::Plain(listener) => listener.as_fd(),
        }
    }
}
