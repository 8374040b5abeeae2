//! How a migration fails, and where the guest is then.

use std::{io, time::Duration};

use handover::{GuestLocation, VersionMismatch};
use multifd::{InitialError, LayoutError, PacketError};
use thiserror::Error;
use vamoose_link::{ReadError, SocketError, WriteError, ZeroCopyError};

use crate::{DirtyLogError, GuestError, ProtocolError, RamError};

/// A source that did not get rid of its guest. [`SourceError::guest`] says where the guest is.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    /// Options that exclude each other or are out of range.
    #[error("{0}")]
    Config(String),
    /// The packet size.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The memory.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// Zero-copy send cannot be had.
    #[error(transparent)]
    ZeroCopy(#[from] ZeroCopyError),
    /// The system is out of something.
    #[error("this host: {0}")]
    System(#[from] io::Error),
    /// The compression library.
    #[error("cannot encode: {0}")]
    Encoder(#[from] vamoose_codec::EncodeError),
    /// The destination cannot be reached.
    #[error("cannot reach the destination: {0}")]
    Dial(#[from] SocketError),
    /// Our own channel introduction.
    #[error("cannot open channels: {0}")]
    Channels(#[from] InitialError),
    /// The destination will not have this guest.
    #[error("the destination refuses the guest: {cause}")]
    Refused {
        /// Its words.
        cause: String,
    },
    /// The destination has failed.
    #[error("the destination has failed: {cause}")]
    Destination {
        /// Its words.
        cause: String,
    },
    /// The destination has closed the connection in the place of its first message.
    #[error(
        "the destination has closed the control connection without an answer: it has ended, or is of an older release (install the same release of vamoose on both hosts)"
    )]
    Unanswered,
    /// The destination speaks another version.
    #[error("the destination has chosen a version of the protocol that was not offered: {0}")]
    Version(#[from] VersionMismatch),
    /// The destination does not follow the protocol.
    #[error("unexpected message from the destination: {message}")]
    OutOfTurn {
        /// The message.
        message: String,
    },
    /// The control connection.
    #[error("control connection to the destination: {0}")]
    Control(#[from] ProtocolError),
    /// The destination closed the control connection.
    #[error("the destination has closed the control connection")]
    ControlEnded,
    /// A channel.
    #[error("channel {channel} to the destination: {error}")]
    Channel {
        /// Its number.
        channel: usize,
        /// What happened.
        error: WriteError,
    },
    /// A packet that cannot be built.
    #[error("channel {channel}: {error}")]
    Packet {
        /// Its number.
        channel: usize,
        /// What is wrong.
        error: PacketError,
    },
    /// The dirty log has failed: pages may have been missed.
    #[error(transparent)]
    Log(#[from] DirtyLogError),
    /// A device calls pages zero that are not: what is at the destination is not the guest.
    #[error("{0}; migrate again with the processor looking for zero pages")]
    ZeroPages(#[from] idxd::offload::WrongVerdict),
    /// The VMM could not do what was asked of it.
    #[error("cannot {what} the guest: {error}")]
    Guest {
        /// What was asked.
        what: &'static str,
        /// The VMM's words.
        error: GuestError,
    },
    /// The time is over.
    #[error(
        "not converged within {seconds} s: {remaining} bytes are dirty, and the guest dirties {dirty_rate} bytes/s where {bandwidth} bytes/s are moved"
    )]
    TimedOut {
        /// The time that was given.
        seconds: u64,
        /// Bytes of pages left.
        remaining: u64,
        /// Bytes per second that the guest dirties.
        dirty_rate: u64,
        /// Bytes per second of pages that were moved.
        bandwidth: u64,
    },
    /// The destination does not answer.
    #[error("the destination has not {what} within {seconds} s")]
    NoAnswer {
        /// What it should have done.
        what: &'static str,
        /// For how long it was waited for.
        seconds: u64,
    },
    /// The guest was paused for as long as it may be, and not all of it was at the destination.
    #[error("the destination has not got all of the guest within {max:?} of downtime")]
    DowntimeExceeded {
        /// The longest downtime.
        max: Duration,
    },
    /// Somebody cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The guest ran at the destination, and the destination's process is gone. The guest is paused at the
    /// source, but what it did at the destination in between is not known here.
    #[error("{cause}: the guest is lost, or to be resumed here by hand at the state before")]
    Lost {
        /// What is known of the end.
        cause: String,
    },
    /// The destination was told to run the guest, and it cannot be told whether it did. The guest is paused here and
    /// may run there: look there before it is resumed by hand.
    #[error(
        "the destination was told to run the guest, and it is not known whether it did ({cause}): the guest is paused here and may run there"
    )]
    InDoubt {
        /// What happened last.
        cause: String,
    },
    /// The migration failed and the guest cannot be resumed.
    #[error("cannot resume the guest after a failed migration ({cause}): {error}")]
    NotResumed {
        /// Why the migration failed.
        cause: Box<SourceError>,
        /// The VMM's words.
        error: GuestError,
    },
}

impl SourceError {
    /// Where the guest is. In doubt and lost it is paused at the source, for the VMM to decide: the error says what
    /// is known.
    pub fn guest(&self) -> GuestLocation {
        match self {
            Self::InDoubt { .. } | Self::NotResumed { .. } => GuestLocation::InDoubt,
            Self::Lost { .. } => GuestLocation::Lost,
            _ => GuestLocation::Source,
        }
    }
}

/// A destination that did not get a guest. Its memory may hold anything; it can be used for another
/// attempt.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DestinationError {
    /// The system is out of something.
    #[error("this host: {0}")]
    System(#[from] io::Error),
    /// The listener.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A guest has arrived: its memory is in use.
    #[error("a guest has arrived here already")]
    AlreadyArrived,
    /// The source speaks another version.
    #[error(transparent)]
    Version(#[from] VersionMismatch),
    /// The source's guest has another shape than ours.
    #[error("guest configuration mismatch: {0}")]
    Mismatch(String),
    /// The source does not follow the protocol.
    #[error("unexpected message from the source: {message}")]
    OutOfTurn {
        /// The message.
        message: String,
    },
    /// The control connection.
    #[error("control connection from the source: {0}")]
    Control(#[from] ProtocolError),
    /// The source closed a connection.
    #[error("the source has closed the control connection")]
    ControlEnded,
    /// Not all channels came.
    #[error("only {arrived} of {channels} channels came within {seconds} s")]
    Channels {
        /// Those that came.
        arrived: usize,
        /// Those that were announced.
        channels: usize,
        /// For how long they were waited for.
        seconds: u64,
    },
    /// Two channels of one number, or one that was not announced.
    #[error("channel {channel} was not announced, or came twice")]
    ChannelNumber {
        /// The number.
        channel: u8,
    },
    /// A channel.
    #[error("channel {channel} from the source: {error}")]
    Channel {
        /// Its number.
        channel: usize,
        /// What happened.
        error: ChannelError,
    },
    /// A device state that nobody has room for.
    #[error("the source announces {len} bytes of device state, at most {max} are taken")]
    StateLength {
        /// The announced length.
        len: u64,
        /// The limit.
        max: u64,
    },
    /// The VMM could not do what was asked of it.
    #[error("cannot {what} the guest: {error}")]
    Guest {
        /// What was asked.
        what: &'static str,
        /// The VMM's words.
        error: GuestError,
    },
    /// The guest stays at the source.
    #[error("the source has given up: {cause}")]
    Aborted {
        /// Its words.
        cause: String,
    },
    /// The source is silent, with the guest loaded and not handed over.
    #[error("the source has not handed the guest over within {seconds} s: it stays there")]
    NotCommitted {
        /// For how long it was waited for.
        seconds: u64,
    },
    /// Somebody cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// What a source can do wrong on a channel.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A RAM block that this guest does not have.
    #[error("pages of RAM block `{block}`, which this guest does not have")]
    Block {
        /// Its name.
        block: String,
    },
    /// A page behind the end of its block.
    #[error("offset {offset:#x} is outside of RAM block `{block}` of {len} bytes")]
    Offset {
        /// The offset.
        offset: u64,
        /// The block.
        block: String,
        /// Its length.
        len: usize,
    },
    /// Pages that nobody would have waited for.
    #[error("pages that belong to no round")]
    PagesAfterSync,
    /// A packet behind the last one.
    #[error("a packet behind the channel's last SYNC")]
    AfterTheLast,
    /// It ended without its last SYNC.
    #[error("the channel ended too early")]
    Ended,
}
