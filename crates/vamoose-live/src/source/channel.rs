//! A channel's thread: sends pages of guest memory in packets.
//!
//! ```text
//!   chunks ── collect pages ──> [filling] ── full: start the scan ──> [scanned] ── finish the scan ──> encode, send
//! ```
//! The scan for zero pages of a packet is under way while the packet before it is encoded and sent: a device that scans
//! has that time. At a SYNC no page is left in either batch.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use multifd::{Layout, PacketError, RamHeader};
use vamoose_link::ChannelWriter;
use vm_memory::VolatileSlice;

use super::{
    Source, SourceConfig, ZeroPageDetection,
    round::{Chunk, Round},
};
use crate::{
    Ram, SourceError,
    dirty::DirtyLog,
    missing::AtomicPages,
    offload::{DsaScan, ZeroScan},
    protocol::LAST_SYNC,
};

/// Sends a channel's share of every round.
pub(super) struct Channel<'a> {
    number: usize,
    layout: Layout,
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
    /// Which pages of the next packet are zero, the offsets of its pages, and its header. The vectors are as long as a packet from
    /// the beginning.
    verdicts: Vec<bool>,
    normal: Vec<u64>,
    zero: Vec<u64>,
    header: RamHeader,
    /// Pages that are sent elsewhere.
    skipped: Option<Arc<AtomicPages>>,
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
        let pages = layout.page_count();
        Self {
            number,
            layout,
            ram: &source.ram,
            log: source.log.as_ref(),
            writer,
            packets: &source.packets,
            scan: zero_scan(layout, config),
            filling: Batch::new(layout),
            scanned: Batch::new(layout),
            verdicts: Vec::with_capacity(pages),
            normal: Vec::with_capacity(pages),
            zero: Vec::with_capacity(pages),
            header: RamHeader::new(layout),
            skipped: None,
        }
    }

    /// Does not send pages that are set in `skipped` by then.
    pub(super) fn skip(&mut self, skipped: Arc<AtomicPages>) {
        self.skipped = Some(skipped);
    }

    /// Sends one page, at once.
    ///
    /// # Errors
    /// Also when the guest has no such page.
    pub(super) fn send_page(&mut self, block: usize, page: usize) -> Result<(), SourceError> {
        self.filling.block = block;
        if block >= self.ram.blocks().len() || !self.push(block, page)? {
            let message =
                format!("page {page} of RAM block {block}, which the guest does not have");
            return Err(SourceError::OutOfTurn { message });
        }
        self.turn_over()?;
        self.send_scanned()
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
        for page in chunk.pages() {
            let skipped = self.skipped.as_ref();
            if skipped.is_some_and(|skipped| skipped.get(chunk.block, page)) {
                continue;
            }
            // The bitmaps have no bits beyond the block's end.
            if !self.push(chunk.block, page)? {
                break;
            }
        }
        Ok(())
    }

    /// Adds a page to the batch of its block. False if the block has no such page.
    fn push(&mut self, block: usize, page: usize) -> Result<bool, SourceError> {
        let size = self.ram.page_size();
        let offset = page.saturating_mul(size);
        let Ok(slice) = self.ram.blocks()[block].memory().subslice(offset, size) else {
            return Ok(false);
        };
        self.filling.offsets.push(offset as u64);
        self.filling.slices.push(slice);
        if self.filling.slices.len() == self.layout.page_count() {
            self.turn_over()?;
        }
        Ok(true)
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
        let (channel, pages) = (self.number, self.scanned.slices.len());
        if pages == 0 {
            return Ok(());
        }
        self.verdicts.clear();
        self.verdicts.resize(pages, false);
        if let Some(scan) = &mut self.scan {
            scan.finish(&self.scanned.slices, &mut self.verdicts)?;
        }
        self.pack()
            .map_err(|source| SourceError::Packet { channel, source })?;
        self.writer
            .write_memory(&mut self.header, &self.scanned.slices)
            .map_err(|source| SourceError::Channel { channel, source })?;
        self.scanned.offsets.clear();
        self.scanned.slices.clear();
        Ok(())
    }

    /// Makes the header of the scanned pages. Of their memory, only that of the normal pages is kept.
    fn pack(&mut self) -> Result<(), PacketError> {
        let batch = &mut self.scanned;
        self.normal.clear();
        self.zero.clear();
        for (index, (offset, is_zero)) in batch.offsets.iter().zip(&self.verdicts).enumerate() {
            if *is_zero {
                self.zero.push(*offset);
            } else {
                batch.slices.swap(self.normal.len(), index);
                self.normal.push(*offset);
            }
        }
        batch.slices.truncate(self.normal.len());
        self.header.clear();
        self.header.block = self.ram.blocks()[batch.block].name();
        self.header.packet_num = self.packets.fetch_add(1, Ordering::Relaxed);
        self.header.set_pages(&self.normal, &self.zero, self.layout)
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
}
