//! A driver of Vamoose's crates (`multifd`, `vamoose-codec`, `vamoose-link`), which can be broken on purpose.
//!
//! ```sh
//! cargo build -p multifd-conformance --bins --examples
//! target/debug/multifd-conformance target/debug/examples/multifd-vamoose
//! target/debug/multifd-conformance target/debug/examples/multifd-vamoose --broken no-barrier
//! ```

use std::{
    io::{Read as _, Write as _, stdin, stdout},
    os::unix::net::UnixStream,
    sync::Arc,
    thread,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use multifd::{BlockName, INITIAL_LEN, Initial, Layout, Method, PacketKind};
use multifd_conformance::{Block, Memory, PACKET_PAGES, PAGE, Reply, Request, Work};
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_link::{ChannelReader, ChannelWriter, Packet, ReadError, Received, Stream};
use vm_memory::VolatileSlice;

#[derive(Parser)]
struct Options {
    /// Decode with this fault.
    #[arg(long)]
    broken: Option<Fault>,
}

/// Faults of decoders, each of which at least one case must find.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Fault {
    /// Zero pages are taken to come first in the table.
    ZeroPagesFirst,
    /// Zero pages that were written before stay as they are.
    ZeroPagesStay,
    /// The last bytes of an offset are taken to be the first ones.
    LittleEndian,
    /// The table of offsets is taken to have 64 entries.
    PageCount,
    /// A channel does not wait for the SYNCs of the others.
    NoBarrier,
    /// Pages behind the last multiple of 8 are lost.
    LastGroup,
    /// The pages of a SYNC are lost.
    SyncPages,
    /// A channel begins with any magic.
    AnyMagic,
    /// Channels have any number.
    AnyNumber,
    /// A page behind the end of a RAM block is written elsewhere in it.
    BeyondTheBlock,
    /// An unknown RAM block is taken to be the first one.
    AnyBlock,
    /// Payloads that are no pages are not noticed.
    AnyPayload,
    /// A stream may end within a packet.
    EndsAnywhere,
    /// The streams of zlib and zstd begin again behind each SYNC.
    NoHistory,
}

fn main() -> Result<()> {
    let fault = Options::parse().broken;
    let Request {
        method,
        blocks,
        work,
    } = Request::read(stdin().lock())?;
    let reply = match work {
        Work::Decode(streams) => match decode(&blocks, &streams, fault) {
            Ok(memory) => Reply::Accepted(memory),
            Err(why) => Reply::Refused(format!("{why:#}")),
        },
        Work::Encode { channels, rounds } => {
            Reply::Encoded(encode(&method, &blocks, channels, &rounds)?)
        }
    };
    reply.write(stdout().lock())
}

fn decode(blocks: &[Block], streams: &[Vec<u8>], fault: Option<Fault>) -> Result<Memory> {
    let mut memory: Memory = blocks.iter().map(|block| vec![0; block.len]).collect();
    thread::scope(|scope| {
        let mut guest = Guest {
            blocks: blocks
                .iter()
                .zip(&mut memory)
                .map(|(block, memory)| {
                    (block.name.as_bytes(), VolatileSlice::from(&mut memory[..]))
                })
                .collect(),
            fault,
        };
        let mut channels: Vec<Option<Channel>> = streams.iter().map(|_| None).collect();
        for (connection, bytes) in streams.iter().enumerate() {
            let (near, mut far) = UnixStream::pair()?;
            // The reader ends early when it refuses.
            scope.spawn(move || far.write_all(bytes));
            let (number, channel) = Channel::open(near, fault)?;
            let number = if fault == Some(Fault::AnyNumber) {
                connection
            } else {
                number
            };
            let free = channels
                .get_mut(number)
                .context("a number beyond the channels")?;
            ensure!(
                free.replace(channel).is_none(),
                "channel {number} comes twice"
            );
        }
        let mut channels: Vec<_> = channels.into_iter().flatten().collect();
        if fault == Some(Fault::NoBarrier) {
            for channel in &mut channels {
                while channel.read_round(&mut guest)? {}
            }
            return Ok(());
        }
        loop {
            let synced = channels
                .iter_mut()
                .map(|channel| channel.read_round(&mut guest));
            let synced = synced.collect::<Result<Vec<_>>>()?;
            if synced.iter().all(|synced| !synced) {
                return Ok(());
            }
            ensure!(
                synced.iter().all(|synced| *synced),
                "a channel ends before the others' SYNC"
            );
        }
    })?;
    Ok(memory)
}

/// The guest's memory.
struct Guest<'a> {
    blocks: Vec<(&'a [u8], VolatileSlice<'a>)>,
    fault: Option<Fault>,
}

struct Channel {
    stream: Arc<Stream>,
    reader: ChannelReader,
    layout: Layout,
    packet: Packet,
}

impl Channel {
    fn open(mut socket: UnixStream, fault: Option<Fault>) -> Result<(usize, Self)> {
        let mut initial = [0; INITIAL_LEN];
        socket.read_exact(&mut initial)?;
        if fault == Some(Fault::AnyMagic) {
            initial[..4].copy_from_slice(&multifd::MAGIC.to_be_bytes());
        }
        let initial = Initial::parse(&initial)?;
        ensure!(initial.uuid() == [0; 16], "another guest's uuid");
        let layout = match fault {
            Some(Fault::PageCount) => Layout::X86.with_packet_bytes(multifd::PACKET_BYTES / 2)?,
            _ => Layout::X86,
        };
        let stream = Arc::new(Stream::from(socket));
        let reader = reader(&stream, layout);
        let packet = Packet::new(layout);
        Ok((
            initial.channel().into(),
            Self {
                stream,
                reader,
                layout,
                packet,
            },
        ))
    }

    /// Reads up to the next SYNC; false if the channel has ended.
    fn read_round(&mut self, guest: &mut Guest<'_>) -> Result<bool> {
        let mut pages = 0;
        loop {
            match self.reader.read_start(&mut self.packet) {
                Ok(Received::Packet) => {}
                Ok(Received::End) => {
                    ensure!(pages == 0, "pages behind the last SYNC");
                    return Ok(false);
                }
                Err(ReadError::Truncated { .. }) if guest.fault == Some(Fault::EndsAnywhere) => {
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
            if self.packet.kind() == PacketKind::DeviceState {
                continue;
            }
            let header = self.packet.ram();
            if !header.is_empty() {
                pages += 1;
                guest.receive(&mut self.reader, header)?;
            }
            if header.sync {
                if guest.fault == Some(Fault::NoHistory) {
                    self.reader = reader(&self.stream, self.layout);
                }
                return Ok(true);
            }
        }
    }
}

fn reader(stream: &Arc<Stream>, layout: Layout) -> ChannelReader {
    ChannelReader::new(stream.clone(), layout, Decoder::new(layout), Arc::default())
}

impl Guest<'_> {
    fn receive(&mut self, reader: &mut ChannelReader, header: &multifd::RamHeader) -> Result<()> {
        let name = header.block.as_bytes();
        let found = self.blocks.iter().find(|(known, _)| *known == name);
        let found = match self.fault {
            Some(Fault::AnyBlock) => found.or(self.blocks.first()),
            _ => found,
        };
        let (_, memory) = found.with_context(|| format!("RAM block {}", header.block))?;
        let page = |offset: &u64| {
            let mut offset = *offset;
            match self.fault {
                Some(Fault::LittleEndian) => offset = offset.swap_bytes(),
                Some(Fault::BeyondTheBlock) => offset %= memory.len() as u64,
                _ => {}
            }
            let slice = memory.subslice(usize::try_from(offset)?, PAGE);
            slice.with_context(|| format!("offset {offset:#x}"))
        };
        let mut offsets = [header.normal_offsets(), header.zero_offsets()].concat();
        if self.fault == Some(Fault::ZeroPagesFirst) {
            offsets.rotate_left(header.zero_offsets().len());
        }
        let pages = offsets.iter().map(page).collect::<Result<Vec<_>>>()?;
        let (normal, zero) = pages.split_at(header.normal_offsets().len());
        let mut lost = vec![0; normal.len() * PAGE];
        let kept = match self.fault {
            Some(Fault::SyncPages) if header.sync => 0,
            Some(Fault::LastGroup) => normal.len() / 8 * 8,
            _ => normal.len(),
        };
        let lost: Vec<_> = lost
            .chunks_exact_mut(PAGE)
            .map(VolatileSlice::from)
            .collect();
        let normal = [&normal[..kept], &lost[kept..]].concat();
        if !normal.is_empty() {
            match reader.read_pages(header, &normal) {
                Err(ReadError::Payload { .. }) if self.fault == Some(Fault::AnyPayload) => {}
                read => read?,
            }
        }
        for page in zero {
            if self.fault != Some(Fault::ZeroPagesStay) {
                page.copy_from(&[0u8; PAGE]);
            }
        }
        Ok(())
    }
}

fn encode(method: &str, blocks: &[Block], channels: u8, rounds: &[Memory]) -> Result<Vec<Vec<u8>>> {
    let layout = Layout::X86;
    let Some(method) = Method::ALL.into_iter().find(|known| known.name() == method) else {
        bail!("unknown method {method}");
    };
    let settings = Settings::new(method, None)?;
    thread::scope(|scope| {
        let (mut writers, mut readers) = (Vec::new(), Vec::new());
        for channel in 0..channels {
            let (mut near, mut far) = UnixStream::pair()?;
            readers.push(scope.spawn(move || {
                let mut bytes = Vec::new();
                far.read_to_end(&mut bytes).map(|_| bytes)
            }));
            near.write_all(&Initial::new([0; 16], channel, channels.into())?.to_bytes())?;
            let (stream, encoder) = (Arc::new(Stream::from(near)), encoder(&settings, layout)?);
            writers.push(ChannelWriter::new(
                stream,
                layout,
                encoder,
                None,
                Arc::default(),
            ));
        }
        let mut packet = Packet::new(layout);
        let (mut turn, mut before) = (0, None);
        sync(&mut writers, 0)?;
        for (number, memory) in (1..).zip(rounds) {
            for (index, block) in blocks.iter().enumerate() {
                // All of memory first, then the pages that changed.
                let page = |offset: &usize| *offset..*offset + PAGE;
                let changed = |offset: &usize| {
                    before.is_none_or(|before: &Memory| {
                        before[index][page(offset)] != memory[index][page(offset)]
                    })
                };
                let offsets: Vec<_> = (0..block.len).step_by(PAGE).filter(changed).collect();
                for offsets in offsets.chunks(PACKET_PAGES) {
                    let header = packet.ram_mut();
                    header.clear();
                    header.block = BlockName::new(block.name.as_bytes())?;
                    let numbers: Vec<_> = offsets.iter().map(|offset| *offset as u64).collect();
                    header.set_pages(&numbers, &[], layout)?;
                    for (to, offset) in packet.pages_mut().chunks_exact_mut(PAGE).zip(offsets) {
                        to.copy_from_slice(&memory[index][page(offset)]);
                    }
                    packet.detect_zero_pages();
                    let channel = turn % writers.len();
                    writers[channel].write(&mut packet)?;
                    turn += 1;
                }
            }
            sync(&mut writers, number)?;
            before = Some(memory);
        }
        writers.into_iter().for_each(ChannelWriter::finish);
        let streams = readers.into_iter().map(|reader| match reader.join() {
            Ok(bytes) => Ok(bytes?),
            Err(_) => bail!("a reader failed"),
        });
        streams.collect()
    })
}

fn sync(writers: &mut [ChannelWriter], number: u64) -> Result<()> {
    Ok(writers
        .iter_mut()
        .try_for_each(|writer| writer.write_sync(number))?)
}
