//! Differences to pages that were sent before: what both ends keep for them.
//!
//! A guest that updates its memory in place sends the same pages in each round, with few bytes changed. Where the receiver
//! has an earlier version, a page goes as the XOR with it, which compresses to little (`vamoose_codec::delta` is the
//! format). Both ends of a session keep the same versions in a cache of **slots**; the sender decides everything and says it
//! in each packet:
//!
//! ```text
//!  sender                                             receiver
//!   page sent for the second time: takes a slot
//!     ── the page; slot 7, version 0 ───────────────>  keeps it: version 1
//!   sent again
//!     ── the difference; slot 7, version 1 ─────────>  waits for version 1, restores the page, keeps it: version 2
//!   slot 7 for another page
//!     ── the page; slot 7, version 2 ───────────────>  waits for version 2, keeps it: version 3
//! ```
//!
//! The first time a page is sent it is not kept: a bit remembers that it was. What is kept need not be what was sent
//! last: a page may go any other way at any time, and both caches stay as they are.
//!
//! A server offers the memory of its slots when a session begins. A VMM's destination needs none, it has the versions in the
//! guest's memory (**in place**). That is not part of the offer: a source sends such differences only to a destination that
//! has accepted its guest in the VMMs' own protocol, which nobody with slots speaks.
//!
//! # Why both have the same
//! A **touch** is a page that is put into a slot, and a slot's version is the number of its touches. The sender touches a
//! slot under its lock, one packet at a time, and the packet says on which version it did. The receiver carries a touch
//! out when the slot has exactly that version. So the n-th touch is the same page at both ends. A version that has
//! passed is an error of the peer, and the checksum of a packet's pages, without which there are no differences, is that
//! of the restored pages.
//!
//! # Why nobody waits for ever
//! A packet may overtake another one on another channel, so the receiver waits for versions. A channel's **epoch** is the
//! number of SYNCs that were written on it. The sender touches a slot only in a later epoch than the last time; in an
//! older or the same one, the page goes plainly. So a packet of epoch `e` waits only for packets of epochs before `e`:
//!
//! - on the same channel, they were sent before it, since a SYNC is behind all packets of its epoch, and they have been
//!   carried out before it was read;
//! - on another channel, the reader that will carry them out is at an earlier epoch. Of all readers one at the
//!   earliest epoch waits for nobody, and passes its packets on as without a cache. It comes to the next epoch, or ends and
//!   with it the migration.
//!
//! A reader that waits holds a packet, as one that waits for its socket does, and no lock. What ends its wait otherwise
//! is the end of the migration, or that no packet at all came for long, on any channel.

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
    incoming::{Failure, Incoming},
    outgoing::Outgoing,
};

/// What is kept of a page, and what it takes to find it.
const SLOT_OVERHEAD: usize = 192;

/// How many slots a cache of `bytes` has, with all that belongs to them.
fn slots(bytes: usize, layout: Layout) -> usize {
    let most = usize::try_from(vamoose_codec::delta::MAX_SLOT).unwrap_or(usize::MAX);
    (bytes / (layout.page_size() + SLOT_OVERHEAD)).min(most)
}

#[cfg(test)]
mod tests {
    mod model;
}
