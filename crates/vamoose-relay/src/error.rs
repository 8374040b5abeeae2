//! Why a relay ended without a migrated guest: who is at fault, on which connection.

use std::{fmt, io, time::Duration};

use multifd::InitialError;
use thiserror::Error;
use vamoose_link::{ReadError, SocketError, WriteError};

/// Which way the bytes of a connection go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the source to the destination.
    Forward,
    /// From the destination to the source: the return path.
    Back,
}

impl Direction {
    /// Who sends in this direction.
    pub(crate) fn sender(self) -> &'static str {
        match self {
            Self::Forward => "source",
            Self::Back => "destination",
        }
    }

    /// Who receives in this direction.
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
pub enum RelayError {
    /// The user has asked for it.
    #[error("the migration was cancelled")]
    Cancelled,
    /// The system refused something that every relay needs.
    #[error("cannot set up the relay")]
    SetUp(#[source] io::Error),
    /// A socket could not be opened.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// An encoder could not be made.
    #[error(transparent)]
    Codec(#[from] vamoose_codec::EncodeError),
    /// The source's first bytes are those of nothing that migrates.
    #[error(
        "the source opened a connection with {0:02x?}, which begins neither a main stream nor a multifd channel"
    )]
    Garbage([u8; 4]),
    /// The source's connection ended before it was known what it is.
    #[error("the source closed a connection before its first {wanted} bytes (got {got})")]
    ClosedEarly {
        /// Bytes that came.
        got: usize,
        /// Bytes needed.
        wanted: usize,
    },
    /// Reading the first bytes of a connection failed.
    #[error("cannot read the first bytes of a connection from the source")]
    Opening(#[source] io::Error),
    /// The first 64 bytes of a channel are wrong.
    #[error("bad first packet from the source")]
    Initial(#[from] InitialError),
    /// The source's channels and their ids do not fit together.
    #[error("the source's channel ids do not fit: {0}")]
    ChannelIds(String),
    /// Not all connections came.
    #[error("the source did not open all its connections in {} s: {missing}", waited.as_secs_f32())]
    Incomplete {
        /// How long they were waited for.
        waited: Duration,
        /// What came and what is missing.
        missing: String,
    },
    /// A channel of the source could not be read on.
    #[error("source, channel {0}")]
    SourceChannel(usize, #[source] ReadError),
    /// A channel to the destination could not be written on.
    #[error("destination, channel {0}")]
    DestinationChannel(usize, #[source] WriteError),
    /// The source ended a channel while the migration went on.
    #[error("the source closed channel {0} while its main stream goes on")]
    ChannelClosed(usize),
    /// The main stream could not be read on.
    #[error("main stream, {}: cannot read from the {}", .0, .0.sender())]
    MainRead(Direction, #[source] io::Error),
    /// The main stream could not be written on.
    #[error("main stream, {}: cannot write to the {}", .0, .0.receiver())]
    MainWrite(Direction, #[source] io::Error),
    /// The receiver of the main stream took no byte for the stall timeout.
    #[error("main stream, {}: the {} has stopped reading for {} s", .0, .0.receiver(), .1.as_secs_f32())]
    MainStalled(Direction, Duration),
    /// The main stream ended too early.
    #[error("the {} closed the main stream before the destination had loaded the guest", .0.sender())]
    MainClosed(Direction),
    /// The destination reported that it could not load the guest, with QEMU's code.
    #[error("the destination reports that loading the guest failed (code {0})")]
    Refused(u32),
    /// Nothing came from either side after the main stream's end.
    #[error("the destination did not finish within {} s after the source had sent everything", .0.as_secs_f32())]
    NeverFinished(Duration),
    /// A multifd channel came in what seemed a migration without multifd: the number of channels must be configured.
    #[error("a multifd channel came after the migration had been taken for one without multifd")]
    LateChannel,
}
