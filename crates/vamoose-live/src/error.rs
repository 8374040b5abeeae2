//! How a migration fails, and where the guest is then.

use std::{io, time::Duration};

use handover::{GuestLocation, VersionMismatch};
use multifd::{InitialError, LayoutError, PacketError};
use thiserror::Error;
use vamoose_codec::EncodeError;
use vamoose_link::{
    AddressError, ConversationError, DialError, ReadError, SessionsError, SocketError, WriteError,
    ZeroCopyError, chain,
};

use crate::{
    GuestError, RamError, dirty::DirtyLogError, missing::MissingPagesError, offload::WrongVerdict,
};

/// A migration that failed at the source. [`SourceError::guest`] returns where the guest is.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SourceError {
    #[error("{0}")]
    Config(String),
    #[error("the guest's memory")]
    Ram(#[from] RamError),
    #[error("invalid packet size")]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    ZeroCopy(#[from] ZeroCopyError),
    #[error("the source's host is out of a resource")]
    System(#[from] io::Error),
    /// The compression library.
    #[error("cannot create an encoder")]
    Encoder(#[from] EncodeError),
    #[error("cannot reach the destination")]
    Dial(#[from] SocketError),
    #[error("no session with the destination")]
    Session(#[from] DialError),
    #[error("cannot open a channel")]
    Channels(#[from] InitialError),
    #[error("the destination refuses the guest: {cause}")]
    Refused { cause: String },
    /// The destination has failed, with the cause that it sent.
    #[error("the destination has failed: {cause}")]
    Destination { cause: String },
    #[error(
        "the destination has closed the control connection without an answer: it has ended, or expects a session"
    )]
    Unanswered,
    #[error("the destination answers as one that expects a session, not plain connections")]
    SessionExpected,
    #[error(
        "the destination does not begin a session: it has ended, or expects plain connections, or other security"
    )]
    OtherTransport(#[source] DialError),
    #[error("the destination has chosen a version of the protocol that was not offered")]
    Version(#[from] VersionMismatch),
    #[error("unexpected message from the destination: {message}")]
    OutOfTurn { message: String },
    #[error("control connection to the destination")]
    Control(#[from] ConversationError),
    #[error("channel {channel} to the destination")]
    Channel { channel: usize, source: WriteError },
    #[error("cannot build a packet for channel {channel}")]
    Packet { channel: usize, source: PacketError },
    /// The dirty log has failed: pages may have been missed.
    #[error(transparent)]
    Log(#[from] DirtyLogError),
    /// A device calls pages zero that are not: the memory at the destination is wrong.
    #[error(
        "zero pages: a device is wrong; migrate again with the processor looking for zero pages"
    )]
    ZeroPages(#[from] WrongVerdict),
    /// The VMM could not do `what` to the guest.
    #[error("cannot {what} the guest")]
    Guest {
        what: &'static str,
        source: GuestError,
    },
    /// In a post-copy the guest has been handed over, and pages that it has at the source alone cannot be sent any more. The guest
    /// belongs to the destination, where it stops at the first page that is missing. It stays paused here, and must not
    /// be resumed: it has run there.
    #[error(
        "the guest runs at the destination and has lost memory that was still at the source: it has to be ended there"
    )]
    PagesLost { source: Box<SourceError> },
    /// Memory was written behind [`pause`](crate::SourceGuest::pause) and [`save`](crate::SourceGuest::save), so the destination
    /// would have missed it. Found only with [`SourceConfig::check_pause`](crate::SourceConfig::check_pause).
    #[error(
        "page {page} of RAM block `{block}` was written while the guest was paused: the VMM has to stop all that writes guest memory"
    )]
    WrittenWhilePaused { block: String, page: usize },
    #[error(
        "not converged within {time:?}: {remaining} bytes are dirty, and the guest dirties {dirty_rate} bytes/s where {bandwidth} bytes/s are moved"
    )]
    TimedOut {
        time: Duration,
        remaining: u64,
        dirty_rate: u64,
        bandwidth: u64,
    },
    #[error("the destination has not {what} within {time:?}")]
    NoAnswer { what: &'static str, time: Duration },
    /// The longest downtime is over, and not all of the guest is at the destination.
    #[error("the destination has not received all of the guest within {max:?} of downtime")]
    DowntimeExceeded { max: Duration },
    #[error("cancelled")]
    Cancelled,
    /// The guest ran at the destination, and the destination's process has ended. The guest is paused at the source; its progress
    /// at the destination is lost.
    #[error("{cause}: the guest is lost, or to be resumed here by hand at the state before")]
    Lost { cause: String },
    /// The destination was requested to run the guest, and it is not known whether it did. The guest is paused here and
    /// may run there: look there before it is resumed by hand.
    #[error(
        "the destination was told to run the guest, and it is not known whether it did ({cause}): the guest is paused here and may run there"
    )]
    InDoubt { cause: String },
    /// The migration failed, which is the source of this error, and the guest cannot be resumed.
    #[error("cannot resume the guest ({}) after a failed migration", chain(&**error))]
    NotResumed {
        source: Box<SourceError>,
        error: GuestError,
    },
}

impl SourceError {
    /// Where the guest is. In doubt and lost it is paused at the source, for the VMM to decide: the error states what
    /// is known. It is paused there, too, if it could not be [resumed](Self::NotResumed), but runs nowhere else.
    pub fn guest(&self) -> GuestLocation {
        match self {
            Self::InDoubt { .. } => GuestLocation::InDoubt,
            Self::Lost { .. } => GuestLocation::Lost,
            Self::PagesLost { .. } => GuestLocation::Destination,
            _ => GuestLocation::Source,
        }
    }
}

/// A destination that did not receive a guest, or not all of it. If [the guest is not here](DestinationError::guest), the content of
/// the memory is undefined, and it can be used for another attempt.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum DestinationError {
    #[error("the destination's host is out of a resource")]
    System(#[from] io::Error),
    #[error("the guest's memory")]
    Ram(#[from] RamError),
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("cannot accept sessions")]
    Sessions(#[from] SessionsError),
    #[error("a guest has arrived here already")]
    AlreadyArrived,
    /// The source supports other versions.
    #[error(transparent)]
    Version(#[from] VersionMismatch),
    #[error("guest configuration mismatch")]
    Mismatch(#[from] Mismatch),
    #[error("unexpected message from the source: {message}")]
    OutOfTurn { message: String },
    #[error("control connection from the source")]
    Control(#[from] ConversationError),
    #[error("only {arrived} of {channels} channels connected within {} s", .time.as_secs())]
    Channels {
        arrived: usize,
        channels: usize,
        time: Duration,
    },
    #[error("the source's channel {channel} was not announced, or connected twice")]
    ChannelNumber { channel: u8 },
    #[error("channel {channel} from the source")]
    Channel {
        channel: usize,
        source: ChannelError,
    },
    /// A device state that is longer than [`DestinationConfig::max_state`](crate::DestinationConfig::max_state).
    #[error("the source announces {len} bytes of device state, more than the limit of {max}")]
    StateLength { len: u64, max: u64 },
    /// The VMM could not do `what` to the guest.
    #[error("cannot {what} the guest")]
    Guest {
        what: &'static str,
        source: GuestError,
    },
    /// The guest stays at the source, for the cause that it sent.
    #[error("the source has given up: {cause}")]
    Aborted { cause: String },
    #[error("the source has not handed the guest over within {time:?}: it stays there")]
    NotCommitted { time: Duration },
    #[error("a guest cannot be received by post-copy here")]
    PostCopy(#[from] MissingPagesError),
    #[error(
        "the source's pages that are missing, before the device state, are not those of this guest"
    )]
    MissingPages,
    /// In a post-copy the guest runs here, and pages of it do not come any more. Threads that touch one wait until the process
    /// ends. The guest is not at the source: it has to be ended.
    #[error("the guest runs here, and {pages} pages of its memory are lost: it has to be ended")]
    PagesLost {
        pages: usize,
        source: Box<DestinationError>,
    },
    #[error("cancelled")]
    Cancelled,
}

impl DestinationError {
    /// Where the guest is: here only with [`PagesLost`](Self::PagesLost).
    pub fn guest(&self) -> GuestLocation {
        match self {
            Self::PagesLost { .. } => GuestLocation::Destination,
            _ => GuestLocation::Source,
        }
    }
}

/// A difference between the source's guest and the destination's.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Mismatch {
    #[error("the source's pages have {theirs} bytes, the destination's {ours}")]
    PageSize { theirs: u32, ours: usize },
    #[error("the source announces {0} channels")]
    Channels(u8),
    #[error("the source's RAM block `{name}` has {theirs} bytes, the destination's {ours}")]
    BlockLen {
        name: String,
        theirs: u64,
        ours: u64,
    },
    #[error("the source has no RAM block `{0}`")]
    BlockMissing(String),
    #[error("the source has several RAM blocks `{0}`")]
    BlockTwice(String),
    #[error("the source has a RAM block `{0}` that the destination does not have")]
    BlockUnknown(String),
    #[error("the source's packet size is invalid")]
    Layout(#[from] LayoutError),
}

/// A violation of the protocol by a source on a channel.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ChannelError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("pages of RAM block `{block}`, which this guest does not have")]
    Block { block: String },
    #[error("offset {offset:#x} is outside of RAM block `{block}` of {len} bytes")]
    Offset {
        offset: u64,
        block: String,
        len: usize,
    },
    #[error("a missing page cannot be filled")]
    Fill(#[source] io::Error),
    /// Pages behind the last round.
    #[error("pages that belong to no round")]
    PagesAfterSync,
    #[error("a packet behind the channel's last SYNC")]
    AfterTheLast,
    /// It ended without its last SYNC.
    #[error("the channel ended too early")]
    Ended,
}
