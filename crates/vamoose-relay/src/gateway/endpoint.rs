//! Endpoints, at which migrations enter the source's gateway, and targets, which they reach at the destination.

use std::{fmt, net::SocketAddr, sync::Arc};

use super::announce::printable;

/// Where sources of migrations connect.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Endpoint {
    /// A port of a peer's alias.
    Port(SocketAddr),
    /// The socket of a stream, by the stream's name.
    Stream(Arc<str>),
}

/// Destination of a migration, in terms that both hosts know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// The QEMU that waits at this port.
    Port(u16),
    /// The destination's socket of this stream.
    Stream(Arc<str>),
}

impl Endpoint {
    pub(super) fn target(&self) -> Target {
        match self {
            Self::Port(at) => Target::Port(at.port()),
            Self::Stream(name) => Target::Stream(name.clone()),
        }
    }
}

impl Target {
    /// From another gateway's announcement.
    pub(super) fn announced(port: u16, stream: Option<&str>) -> Self {
        match stream {
            Some(name) => Self::Stream(printable(name).into()),
            None => Self::Port(port),
        }
    }

    /// Port and stream, for an announcement.
    pub(super) fn to_announce(&self) -> (u16, Option<String>) {
        match self {
            Self::Port(port) => (*port, None),
            Self::Stream(name) => (0, Some(name.to_string())),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(at) => at.fmt(f),
            Self::Stream(name) => write!(f, "stream {name}"),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => write!(f, "port {port}"),
            Self::Stream(name) => write!(f, "stream {name}"),
        }
    }
}
