//! Errors of a relay: which side is at fault, on which connection.

use std::{error::Error as StdError, fmt, io, sync::Arc, time::Duration};

use multifd::InitialError;
use thiserror::Error;
use vamoose_link::{DialError, ReadError, SocketError, StreamError, WriteError};

use crate::gateway::AnnounceError;

/// The direction of bytes on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the source to the destination.
    Forward,
    /// From the destination to the source: the return path.
    Back,
}

impl Direction {
    /// The side that sends in this direction.
    pub(crate) fn sender(self) -> &'static str {
        match self {
            Self::Forward => "source",
            Self::Back => "destination",
        }
    }

    /// The side that receives in this direction.
    pub(crate) fn receiver(self) -> &'static str {
        match self {
            Self::Forward => "destination",
            Self::Back => "source",
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.sender(), self.receiver())
    }
}

/// A relay that failed. The guest keeps running at the source, unless the message states otherwise.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum RelayError {
    #[error("the migration was cancelled")]
    Cancelled,
    #[error("cannot set up the relay")]
    SetUp(#[source] io::Error),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Session(#[from] DialError),
    #[error(transparent)]
    Announce(#[from] AnnounceError),
    #[error(transparent)]
    Codec(#[from] vamoose_codec::EncodeError),
    #[error(
        "the source opened a connection with {0:02x?}, which begins neither a main stream nor a multifd channel"
    )]
    Garbage([u8; 4]),
    #[error("the source closed a connection before its first {wanted} bytes (got {got})")]
    ClosedEarly { got: usize, wanted: usize },
    #[error("cannot read the first bytes of a connection from the source")]
    Opening(#[source] io::Error),
    /// The first 64 bytes of a channel are wrong.
    #[error("bad first packet from the source")]
    Initial(#[from] InitialError),
    #[error("the source's channel ids do not fit: {0}")]
    ChannelIds(String),
    #[error("the source did not open all its connections in {} s: {missing}", waited.as_secs_f32())]
    Incomplete { waited: Duration, missing: String },
    #[error("source, channel {0}")]
    SourceChannel(usize, #[source] ReadError),
    #[error("destination, channel {0}")]
    DestinationChannel(usize, #[source] WriteError),
    #[error("the source closed channel {0} while its main stream goes on")]
    ChannelClosed(usize),
    #[error("main stream, {}: cannot read from the {}", .0, .0.sender())]
    MainRead(Direction, #[source] io::Error),
    #[error("main stream, {}: cannot write to the {}", .0, .0.receiver())]
    MainWrite(Direction, #[source] io::Error),
    #[error("main stream, {}: the {} has stopped reading for {} s", .0, .0.receiver(), .1.as_secs_f32())]
    MainStalled(Direction, Duration),
    #[error("the {} closed the main stream before the destination had loaded the guest", .0.sender())]
    MainClosed(Direction),
    #[error("the destination reports that loading the guest failed (code {0})")]
    Refused(u32),
    /// Neither side sent anything after the end of the main stream.
    #[error("the destination did not finish within {} s after the source had sent everything", .0.as_secs_f32())]
    NeverFinished(Duration),
    /// The number of channels must be configured.
    #[error("a multifd channel came after the migration had been taken for one without multifd")]
    LateChannel,
    /// A connection of another migration.
    #[error("rejected: a migration is already running")]
    Busy,
}

impl RelayError {
    /// For how many seconds there was no connection to the other Vamoose, and why, if that ended the migration.
    pub(crate) fn lost_connection(&self) -> Option<(u64, Arc<str>)> {
        let mut next: Option<&(dyn StdError + 'static)> = Some(self);
        while let Some(error) = next {
            let io = error.downcast_ref::<io::Error>();
            let stream = io.and_then(|error| error.get_ref()?.downcast_ref());
            if let Some(StreamError::Lost { seconds, cause }) = stream {
                return Some((*seconds, cause.clone()));
            }
            next = error.source();
        }
        None
    }

    /// Whether the source has closed its connections before the end, as it does when it is cancelled.
    pub(crate) fn is_end_by_source(&self) -> bool {
        let is_end = matches!(
            self,
            Self::ChannelClosed(_)
                | Self::MainClosed(Direction::Forward)
                | Self::MainRead(Direction::Forward, _)
                | Self::SourceChannel(_, ReadError::Io(_) | ReadError::Truncated { .. })
        );
        is_end && self.lost_connection().is_none()
    }

    /// Whether it was noticed on a connection to the destination.
    pub(crate) fn is_of_destination(&self) -> bool {
        use Direction::{Back, Forward};
        matches!(
            self,
            // Only the destination's connections are dialled.
            Self::Socket(_)
                | Self::DestinationChannel(..)
                | Self::MainWrite(Forward, _)
                | Self::MainStalled(Forward, _)
                | Self::MainRead(Back, _)
                | Self::MainClosed(Back)
                | Self::Refused(_)
                | Self::NeverFinished(_)
        )
    }
}
