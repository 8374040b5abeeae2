//! Page caches: both ends of a session keep earlier versions of pages, and encode pages after these.
//!
//! A guest that updates its memory in place sends the same pages in each round, with few bytes changed. Where the receiver
//! has an earlier version of a page, zstd finds what has not changed there (`vamoose_codec::delta` has the format). Such a page
//! is called a difference. Both ends of a session keep the same versions in a cache of **slots**. The sender makes all decisions and states them
//! in each packet:
//!
//! ```text
//!  sender                                             receiver
//!   page sent for the second time: takes a slot
//!     ── the page; slot 7, version 0 ───────────────>  keeps it: version 1
//!   sent again
//!     ── the difference; slot 7, version 1 ─────────>  waits for version 1, decodes the page, keeps it: version 2
//!   slot 7 for another page
//!     ── the page; slot 7, version 2 ───────────────>  waits for version 2, keeps it: version 3
//! ```
//!
//! A page is not kept when it is sent for the first time: only a bit records that it was sent. The version in a slot need not be
//! the one sent last: a page may be sent in any other way at any time, and both caches stay as they are.
//!
//! A server offers the memory of its slots when a session begins. The destination of a VMM needs no slots, because the versions are
//! in the guest's memory (**in place**). The offer does not cover this case: a source sends such differences only to a destination
//! that has accepted its guest in the VMMs' own protocol, and no server with slots speaks that protocol.
//!
//! # Why both caches are the same
//! A **touch** stores a page in a slot, and the version of a slot is the number of its touches. The sender touches a
//! slot under its lock, for one packet at a time, and the packet states the version that the touch replaced. The receiver
//! carries out a touch when the slot has exactly that version. So the n-th touch stores the same page at both ends. A version that
//! has passed is an error of the peer. Packets with differences carry a checksum of the decoded pages.
//!
//! # Why no reader waits for ever
//! A packet may overtake another packet on another channel, so the receiver waits for versions. The **epoch** of a channel is the
//! number of SYNCs written on it. The sender touches a slot only in a later epoch than the last time; in the same or an older
//! epoch, the page is sent as it is. So a packet of epoch `e` waits only for packets of epochs before `e`:
//!
//! - those on the same channel were sent before it, since a SYNC follows all packets of its epoch, and were carried out before
//!   it was read;
//! - those on another channel are carried out by a reader at an earlier epoch. A reader at the earliest epoch of all waits for no
//!   version, and passes its packets on as if there were no cache. It comes to the next epoch, or ends, and then the migration
//!   ends.
//!
//! A waiting reader holds a packet and no lock. Its wait also ends with the migration, or when no packet has arrived on any
//! channel for a long time.

mod caches;
mod incoming;
mod outgoing;
mod receiver;
mod sender;
mod sent;
#[cfg(feature = "fuzzing")]
pub mod testing;

use multifd::Layout;

pub use self::{
    caches::PageCaches,
    receiver::{DeltaError, DeltaReceiver},
    sender::DeltaSender,
};
pub(crate) use self::{
    caches::Share,
    incoming::{Incoming, Versions},
    outgoing::Outgoing,
};

/// Bytes that a slot takes beside its page: the indices at both ends.
const SLOT_OVERHEAD: usize = 192;

/// Number of slots in a cache of `bytes`, overhead included.
fn slots(bytes: usize, layout: Layout) -> usize {
    let most = usize::try_from(vamoose_codec::delta::MAX_SLOT).unwrap_or(usize::MAX);
    (bytes / (layout.page_size() + SLOT_OVERHEAD)).min(most)
}

#[cfg(test)]
mod tests {
    mod model;
}
