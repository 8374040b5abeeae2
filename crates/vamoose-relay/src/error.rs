//! Why a relay ended without a migrated guest: who is at fault, on which connection.

use std::{error::Error as StdError, fmt, io};

use multifd::InitialError;
use thiserror::Error;
use vamoose_link::{ReadError, SocketError, WriteError, is_stall};

/// An error and its causes on one line, for a log, a journal or a peer.
pub fn chain(error: &dyn StdError) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        line.push_str(&format!(": {cause}"));
        next = cause.source();
    }
    line
}

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

/// A relay that failed. The guest runs on at the source, unless the message says otherwise.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RelayError {
    /// Somebody asked for the end.
    #[error("the migration was cancelled")]
    Cancelled,
    /// The system refused something that every relay needs.
    #[error("cannot set up the relay: {0}")]
    SetUp(#[source] io::Error),
    /// A socket could not be opened.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// An encoder could not be made.
    #[error(transparent)]
    Codec(#[from] vamoose_codec::EncodeError),
    /// The source's first bytes are those of nothing that migrates.
    #[error(
        "the source opened a connection with {found:02x?}, which begins neither a main stream \
         nor a multifd channel"
    )]
    Garbage {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// The source's connection ended before it said what it is.
    #[error("the source closed a connection before its first {wanted} bytes (got {got})")]
    ClosedEarly {
        /// Bytes that came.
        got: usize,
        /// Bytes needed.
        wanted: usize,
    },
    /// Reading the first bytes of a connection failed.
    #[error("cannot read the first bytes of a connection from the source: {0}")]
    Opening(#[source] io::Error),
    /// The first 64 bytes of a channel are wrong.
    #[error("bad first packet from the source: {0}")]
    Initial(#[from] InitialError),
    /// The source's channels and their ids do not fit together.
    #[error("the source's channel ids do not fit: {problem}")]
    ChannelIds {
        /// What is wrong.
        problem: String,
    },
    /// Not all connections came.
    #[error("the source did not open all its connections in time: {missing}")]
    Incomplete {
        /// What came and what is missing.
        missing: String,
    },
    /// A channel of the source could not be read on.
    #[error("source, channel {channel}: {error}")]
    SourceChannel {
        /// The channel's id.
        channel: usize,
        /// Why.
        #[source]
        error: ReadError,
    },
    /// A channel to the destination could not be written on.
    #[error("destination, channel {channel}: {error}")]
    DestinationChannel {
        /// The channel's id.
        channel: usize,
        /// Why.
        #[source]
        error: WriteError,
    },
    /// The source ended a channel while the migration went on.
    #[error("the source closed channel {channel} while its main stream goes on")]
    ChannelClosed {
        /// The channel's id.
        channel: usize,
    },
    /// The main stream could not be read on.
    #[error("main stream, {direction}: cannot read from the {}: {error}", direction.sender())]
    MainRead {
        /// Which way.
        direction: Direction,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The main stream could not be written on.
    #[error(
        "main stream, {direction}: cannot write to the {}: {}", direction.receiver(),
        stalled_or(error)
    )]
    MainWrite {
        /// Which way.
        direction: Direction,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The main stream ended too early.
    #[error("the {} closed the main stream before the destination had loaded the guest", direction.sender())]
    MainClosed {
        /// Who closed it.
        direction: Direction,
    },
    /// The destination said that it could not load the guest.
    #[error("the destination reports that loading the guest failed (code {code})")]
    Refused {
        /// QEMU's code.
        code: u32,
    },
    /// Both sides fell silent after the main stream's end.
    #[error("the destination did not finish after the source had sent everything")]
    NeverFinished,
    /// A multifd channel turned up in what seemed a plain migration.
    #[error(
        "a multifd channel came after the migration had been taken for one without; start the \
         relay with the number of channels that the source opens (--incoming-channels)"
    )]
    LateChannel,
}

fn stalled_or(error: &io::Error) -> String {
    if is_stall(error) {
        "it has stopped reading".to_owned()
    } else {
        error.to_string()
    }
}
