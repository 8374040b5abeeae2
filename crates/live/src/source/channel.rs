//! A channel's thread: pages out of guest memory, into packets, onto the socket.

use std::sync::atomic::{AtomicU64, Ordering};

use codec::{CpuScan, ZeroScan};
use multifd::{Layout, RamHeader};
use transfer::ChannelWriter;
use vm_memory::VolatileSlice;

use super::{
    Source, SourceConfig, ZeroPageDetection,
    round::{Chunk, Round},
};
use crate::{DirtyLog, Ram, SourceError, protocol::LAST_SYNC};

/// Sends a channel's share of every round.
pub(super) struct Channel<'a> {
    number: usize,
    ram: &'a Ram,
    log: &'a dyn DirtyLog,
    writer: ChannelWriter,
    /// Numbers the packets of all channels.
    packets: &'a AtomicU64,
    packer: Packer<'a>,
}

impl<'a> Channel<'a> {
    /// Channel `number` of a migration, on the thread that runs it.
    pub(super) fn new(source: &'a Source, number: usize, writer: ChannelWriter) -> Self {
        Self {
            number,
            ram: &source.ram,
            log: source.log.as_ref(),
            writer,
            packets: &source.packets,
            packer: Packer::new(source.layout, &source.config),
        }
    }

    /// Sends what this channel gets of `round`, and the SYNC behind it.
    pub(super) fn send(&mut self, round: &Round) -> Result<(), SourceError> {
        while let Some(chunk) = round.take() {
            // Before any of the pages is read: what is written from now on shows again.
            self.log.clear(chunk.block, chunk.first_page, chunk.words)?;
            self.send_chunk(chunk)?;
        }
        self.send_packet()?;
        let channel = self.number;
        self.writer
            .write_sync(round.number)
            .map_err(|error| SourceError::Channel { channel, error })
    }

    /// Says that no more will come. A channel that ends without that word has been cut.
    pub(super) fn finish(mut self) -> Result<(), SourceError> {
        let channel = self.number;
        self.writer
            .write_sync(LAST_SYNC)
            .map_err(|error| SourceError::Channel { channel, error })?;
        self.writer.finish();
        Ok(())
    }

    fn send_chunk(&mut self, chunk: Chunk<'_>) -> Result<(), SourceError> {
        if self.packer.block != chunk.block {
            self.send_packet()?;
            self.packer.block = chunk.block;
        }
        for page in chunk.pages() {
            self.packer.pages.push(page);
            if self.packer.is_full() {
                self.send_packet()?;
            }
        }
        Ok(())
    }

    fn send_packet(&mut self) -> Result<(), SourceError> {
        if self.packer.pages.is_empty() {
            return Ok(());
        }
        let channel = self.number;
        let number = self.packets.fetch_add(1, Ordering::Relaxed);
        let (header, pages) = self
            .packer
            .pack(self.ram, number)
            .map_err(|error| SourceError::Packet { channel, error })?;
        self.writer
            .write_memory(header, pages)
            .map_err(|error| SourceError::Channel { channel, error })?;
        self.packer.pages.clear();
        Ok(())
    }
}

/// Makes packets of pages. Its vectors are as long as a packet from the beginning.
struct Packer<'a> {
    layout: Layout,
    scan: Option<Box<dyn ZeroScan>>,
    ratio: NormalPageRatio,
    block: usize,
    /// The pages of the next packet, all of `block`.
    pages: Vec<usize>,
    slices: Vec<VolatileSlice<'a>>,
    verdicts: Vec<bool>,
    normal: Vec<u64>,
    zero: Vec<u64>,
    header: RamHeader,
}

impl<'a> Packer<'a> {
    fn new(layout: Layout, config: &SourceConfig) -> Self {
        let count = layout.page_count();
        let scan = match config.zero_page_detection {
            ZeroPageDetection::None => None,
            ZeroPageDetection::Cpu => Some(Box::new(CpuScan) as _),
        };
        Self {
            layout,
            scan,
            ratio: NormalPageRatio {
                percent: config.normal_page_ratio,
                account: 0,
            },
            block: 0,
            pages: Vec::with_capacity(count),
            slices: Vec::with_capacity(count),
            verdicts: Vec::with_capacity(count),
            normal: Vec::with_capacity(count),
            zero: Vec::with_capacity(count),
            header: RamHeader::new(layout),
        }
    }

    fn is_full(&self) -> bool {
        self.pages.len() == self.layout.page_count()
    }

    /// The packet of `pages`: its header, and its normal pages' memory.
    fn pack(
        &mut self,
        ram: &'a Ram,
        number: u64,
    ) -> Result<(&mut RamHeader, &[VolatileSlice<'a>]), multifd::PacketError> {
        let size = self.layout.page_size();
        let block = &ram.blocks()[self.block];
        let memory = block.memory();
        self.slices.clear();
        // The bitmaps have no bits beyond the block's end, so there is a slice for each page.
        let slices = self.pages.iter();
        self.slices
            .extend(slices.filter_map(|page| memory.subslice(page * size, size).ok()));
        self.verdicts.clear();
        self.verdicts.resize(self.slices.len(), false);
        if let Some(scan) = &mut self.scan {
            scan.scan(&self.slices, &mut self.verdicts);
        }
        self.normal.clear();
        self.zero.clear();
        let mut kept = 0;
        for (index, page) in self.pages.iter().enumerate() {
            let offset = (page * size) as u64;
            if self.verdicts[index] && !self.ratio.makes_normal() {
                self.zero.push(offset);
            } else {
                self.normal.push(offset);
                self.slices.swap(kept, index);
                kept += 1;
            }
        }
        self.slices.truncate(kept);
        self.header.clear();
        self.header.block = block.name();
        self.header.packet_num = number;
        self.header
            .set_pages(&self.normal, &self.zero, self.layout)?;
        Ok((&mut self.header, &self.slices))
    }
}

/// Evenly takes a percentage of the zero pages for normal ones.
struct NormalPageRatio {
    percent: u8,
    account: u8,
}

impl NormalPageRatio {
    fn makes_normal(&mut self) -> bool {
        self.account += self.percent;
        let normal = self.account >= 100;
        if normal {
            self.account -= 100;
        }
        normal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_kept_evenly() {
        for percent in [0, 1, 33, 50, 99, 100] {
            let mut ratio = NormalPageRatio {
                percent,
                account: 0,
            };
            let normal = (0..1000).filter(|_| ratio.makes_normal()).count();
            assert_eq!(normal, usize::from(percent) * 10);
        }
    }
}
