//! A channel's thread: reads packets from the socket into guest memory.

use multifd::{Layout, RamHeader};
use vamoose_link::{ChannelReader, Received, Stats};
use vm_memory::VolatileSlice;

use super::guest_ram::GuestRam;
use crate::{error::ChannelError, protocol::LAST_SYNC};

/// Receives the packets of a channel until it ends. `synced` is called with each SYNC's number when every page
/// before it has been written.
///
/// # Errors
/// When the channel breaks, its packets name memory that is not the guest's, or it does not end as it should.
pub(super) fn receive(
    mut reader: ChannelReader,
    layout: Layout,
    memory: &GuestRam,
    stats: &Stats,
    synced: impl Fn(u64),
) -> Result<(), ChannelError> {
    let mut header = RamHeader::new(layout);
    let mut pages: Vec<VolatileSlice<'_>> = Vec::with_capacity(layout.page_count());
    let (mut unsynced, mut last) = (false, false);
    while reader.read_header(&mut header)? == Received::Packet {
        if last {
            return Err(ChannelError::AfterTheLast);
        }
        if !header.is_empty() {
            let block = memory.resolve(&header, &mut pages)?;
            reader.read_pages(&header, &pages)?;
            memory.written(block, header.normal_offsets());
            memory.zero(block, header.zero_offsets());
            let (normal, zero) = (header.normal_offsets().len(), header.zero_offsets().len());
            stats.add_packet(normal, zero, normal * layout.page_size());
            unsynced = true;
        }
        last = header.sync && header.packet_num == LAST_SYNC;
        if last && unsynced {
            return Err(ChannelError::PagesAfterSync);
        }
        if header.sync && !last {
            unsynced = false;
            synced(header.packet_num);
        }
    }
    if last {
        Ok(())
    } else {
        Err(ChannelError::Ended)
    }
}
