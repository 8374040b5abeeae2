//! A channel's thread: sends pages of guest memory in packets.
//!
//! ```text
//!   chunks ── collect pages ──> [filling] ── full: start the scan ──> [scanned] ── finish the scan ──> encode, send
//! ```
//! The scan for zero pages of a packet is under way while the packet before it is encoded and sent: a device that scans
//! has that time. At a SYNC no page is left in either batch.

use std::{
    mem,
    sync::atomic::{AtomicU64, Ordering},
};

use multifd::{Layout, PacketError, RamHeader};
use vamoose_link::ChannelWriter;
use vm_memory::VolatileSlice;

use super::{
    Source, SourceConfig, ZeroPageDetection,
    round::{Chunk, Round},
};
use crate::{
    DirtyLog, Ram, SourceError,
    offload::{DsaScan, ZeroScan},
    protocol::LAST_SYNC,
};

/// Sends a channel's share of every round.
pub(super) struct Channel<'a> {
    number: usize,
    ram: &'a Ram,
    log: &'a dyn DirtyLog,
    writer: ChannelWriter,
    /// Numbers the packets of all channels.
    packets: &'a AtomicU64,
    scan: Option<ZeroScan>,
    /// The pages of the packet after the next.
    filling: Batch<'a>,
    /// The pages of the next packet, whose scan has been started.
    scanned: Batch<'a>,
    packer: Packer,
}

/// Pages of a packet, all of one block. Its vectors are as long as a packet from the beginning.
struct Batch<'a> {
    block: usize,
    offsets: Vec<u64>,
    slices: Vec<VolatileSlice<'a>>,
}

impl<'a> Channel<'a> {
    /// Channel `number` of a migration, on the thread that runs it.
    pub(super) fn new(source: &'a Source, number: usize, writer: ChannelWriter) -> Self {
        let (layout, config) = (source.layout, &source.config);
        Self {
            number,
            ram: &source.ram,
            log: source.log.as_ref(),
            writer,
            packets: &source.packets,
            scan: zero_scan(layout, config),
            filling: Batch::new(layout),
            scanned: Batch::new(layout),
            packer: Packer::new(layout),
        }
    }

    /// Sends this channel's share of `round`, and the SYNC behind it.
    pub(super) fn send(&mut self, round: &Round) -> Result<(), SourceError> {
        let mut share = round.share(self.ram, self.log);
        while let Some(chunk) = share.next()? {
            self.send_chunk(chunk)?;
        }
        self.turn_over()?;
        self.send_scanned()?;
        let channel = self.number;
        self.writer
            .write_sync(round.number)
            .map_err(|source| SourceError::Channel { channel, source })
    }

    /// Sends the last SYNC. A channel that ends without it has been cut.
    pub(super) fn finish(mut self) -> Result<(), SourceError> {
        let channel = self.number;
        self.writer
            .write_sync(LAST_SYNC)
            .map_err(|source| SourceError::Channel { channel, source })?;
        self.writer.finish();
        Ok(())
    }

    fn send_chunk(&mut self, chunk: Chunk<'_>) -> Result<(), SourceError> {
        if self.filling.block != chunk.block {
            self.turn_over()?;
            self.filling.block = chunk.block;
        }
        let size = self.ram.page_size();
        let memory = self.ram.blocks()[chunk.block].memory();
        for page in chunk.pages() {
            let offset = page * size;
            // The bitmaps have no bits beyond the block's end, so there is a slice for each page.
            let Ok(slice) = memory.subslice(offset, size) else {
                break;
            };
            self.filling.offsets.push(offset as u64);
            self.filling.slices.push(slice);
            if self.filling.is_full(self.packer.layout) {
                self.turn_over()?;
            }
        }
        Ok(())
    }

    /// Starts the scan of the pages that have been collected, and sends those before them.
    fn turn_over(&mut self) -> Result<(), SourceError> {
        if self.filling.slices.is_empty() {
            return Ok(());
        }
        if let Some(scan) = &mut self.scan {
            scan.start(&self.filling.slices);
        }
        self.send_scanned()?;
        self.scanned.block = self.filling.block;
        mem::swap(&mut self.filling, &mut self.scanned);
        Ok(())
    }

    fn send_scanned(&mut self) -> Result<(), SourceError> {
        let batch = &mut self.scanned;
        if batch.slices.is_empty() {
            return Ok(());
        }
        let channel = self.number;
        let number = self.packets.fetch_add(1, Ordering::Relaxed);
        let verdicts = self.packer.no_verdicts(batch.slices.len());
        if let Some(scan) = &mut self.scan {
            scan.finish(&batch.slices, verdicts)?;
        }
        let header = self
            .packer
            .pack(self.ram, batch, number)
            .map_err(|source| SourceError::Packet { channel, source })?;
        self.writer
            .write_memory(header, &batch.slices)
            .map_err(|source| SourceError::Channel { channel, source })?;
        batch.clear();
        Ok(())
    }
}

/// The scan that `config` asks for.
fn zero_scan(layout: Layout, config: &SourceConfig) -> Option<ZeroScan> {
    match &config.zero_page_detection {
        ZeroPageDetection::None => None,
        ZeroPageDetection::Cpu => Some(ZeroScan::Cpu),
        ZeroPageDetection::Dsa(dsa) => {
            let size = u32::try_from(layout.page_size()).unwrap_or(u32::MAX);
            let devices = dsa.devices.clone();
            let scan = DsaScan::new(devices, size, layout.page_count(), dsa.verify);
            Some(ZeroScan::Dsa(scan))
        }
    }
}

impl Batch<'_> {
    fn new(layout: Layout) -> Self {
        Self {
            block: 0,
            offsets: Vec::with_capacity(layout.page_count()),
            slices: Vec::with_capacity(layout.page_count()),
        }
    }

    fn is_full(&self, layout: Layout) -> bool {
        self.slices.len() == layout.page_count()
    }

    fn clear(&mut self) {
        self.offsets.clear();
        self.slices.clear();
    }
}

/// Makes packets of pages. Its vectors are as long as a packet from the beginning.
struct Packer {
    layout: Layout,
    verdicts: Vec<bool>,
    normal: Vec<u64>,
    zero: Vec<u64>,
    header: RamHeader,
}

impl Packer {
    fn new(layout: Layout) -> Self {
        let count = layout.page_count();
        Self {
            layout,
            verdicts: Vec::with_capacity(count),
            normal: Vec::with_capacity(count),
            zero: Vec::with_capacity(count),
            header: RamHeader::new(layout),
        }
    }

    /// A buffer for the verdicts on the next `count` pages, all of them "not zero".
    fn no_verdicts(&mut self, count: usize) -> &mut [bool] {
        self.verdicts.clear();
        self.verdicts.resize(count, false);
        &mut self.verdicts
    }

    /// The header of the packet of `batch`, on which there are verdicts. The batch keeps the memory of the normal pages
    /// only.
    fn pack(
        &mut self,
        ram: &Ram,
        batch: &mut Batch<'_>,
        number: u64,
    ) -> Result<&mut RamHeader, PacketError> {
        self.normal.clear();
        self.zero.clear();
        let mut kept = 0;
        for (index, offset) in batch.offsets.iter().enumerate() {
            if self.verdicts[index] {
                self.zero.push(*offset);
            } else {
                self.normal.push(*offset);
                batch.slices.swap(kept, index);
                kept += 1;
            }
        }
        batch.slices.truncate(kept);
        self.header.clear();
        self.header.block = ram.blocks()[batch.block].name();
        self.header.packet_num = number;
        self.header
            .set_pages(&self.normal, &self.zero, self.layout)?;
        Ok(&mut self.header)
    }
}
