//! The hand-over of a live migration: which host has the guest. Two state machines without I/O, clocks or threads.
//!
//! A migration moves memory, and then ownership. Moving memory may fail at any time and does no harm. Moving ownership must
//! never leave two guests running, or none. This crate moves ownership, for every engine that moves memory. It defines
//! messages and their framing, the identity of attempts, what a journal has to remember, and what every answer,
//! lost connection, crash and repeated command means for the guest.
//!
//! ```text
//!  source                                                          destination
//!     ── prepare (versions, what is migrated) ──────────────────────>
//!     <──────────── preparing ... prepared (version, incarnation) ──   or refused (why)
//!     ══ memory, device state, on other connections ═══════════════>
//!     <──────────────────────────────────────────────────── loaded ──  or by the return path
//!  the guest has stopped for good           journal: committing
//!     ── commit (shall it run) ─────────────────────────────────────>  journal: starting
//!     <────────────────────────────────────────────────── starting ──
//!     <─────────────────────────────────────────────────── running ──  journal: running
//!     ── settled ───────────────────────────────────────────────────>  it will not ask again
//! ```
//!
//! # Rules
//! - **Until the source has sent `commit` the guest is the source's**: whatever fails, it runs there. From then on
//!   only the destination's `aborted` gives it back.
//! - **An attempt answers for itself.** Its random [`AttemptId`] names it on both sides. A destination answers only for
//!   attempts that it knows, by memory or journal, and answers [`unknown`](DestinationMessage::Unknown) otherwise; its
//!   [`Incarnation`], given with `prepared`, is repeated in `aborted`, so that another process at the same address cannot
//!   abort in its place.
//! - **Only a `commit` that was sent puts the guest in doubt.** A guest that was paused, whose VMM has ended, or that
//!   cannot be continued stays where it was. A process may find a guest sent that it has not seen being sent. Then [a person has
//!   to confirm](GuestLocation::Unconfirmed) that no other tool has moved the guest.
//! - **The guest goes on as its owner left it**, running or paused, on either host, and with its disks.
//! - **The absence of an answer is no answer.** A closed connection, a refused connection and a timeout leave the
//!   guest [in doubt](GuestLocation::InDoubt), unless the embedding program declares that the two processes are
//!   connected [directly](Source::direct).
//! - **The journal comes first.** [`SourceAction::Persist`] and [`DestinationAction::Persist`] precede the
//!   message or the command that depends on them. A restarted process restores its machines and continues.
//! - **Behind post-copy's switch there is no way back.** The source writes down that it asks its VMM to switch. The `commit` follows, as
//!   the destination's VMM does not start by itself, and the attempt is over when all memory has been sent. Until then the guest is the
//!   destination's, and both VMMs are needed.
//! - **`running` is an observation**, made anew for each answer: the guest has been continued, or was to stay paused, and is
//!   here, in whatever state. A request to run is not an observation.
//!
//! # Use
//! [`Source`] and [`Destination`] take events and return actions. A [`Driver`] carries the actions out through the embedding
//! program's [`SourceHost`] or [`DestinationHost`]. All of them are plain values: the model in `tests/model.rs` explores
//! the same drivers with every loss, duplicate, crash and repeated command.
//!
//! # Versions
//! A source offers a range of versions with `prepare`, and the destination [chooses](negotiate). Version 1 begins with the first
//! release.

#![forbid(unsafe_code)]

mod destination;
mod drive;
mod frame;
mod id;
mod location;
mod message;
mod preamble;
mod source;

pub use destination::{Destination, DestinationAction, DestinationEvent, DestinationState};
pub use drive::{
    DestinationDriver, DestinationHost, Driver, FoundGuest, SourceDriver, SourceHost, Step,
};
pub use frame::{FrameError, Lines, MAX_LINE, encode};
pub use id::{AttemptId, IdError, Incarnation};
pub use location::{Decision, GuestLocation};
pub use message::{
    DestinationMessage, Details, OLDEST_VERSION, Prepare, SourceMessage, VERSION, VersionMismatch,
    from_details, negotiate, to_details,
};
pub use preamble::{ConnectionKind, PREAMBLE_LEN, PREAMBLE_MAGIC, Preamble};
pub use source::{LastSeen, Source, SourceAction, SourceEvent, SourceState};
