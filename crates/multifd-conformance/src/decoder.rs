//! The suite's own decoder, written from docs/wire.md: it judges what encoders send. It is strict, and not fast.

use anyhow::{Context as _, Result, bail, ensure};
use flate2::{Crc, Decompress, FlushDecompress, Status};
use zstd_safe::{DCtx, InBuffer, OutBuffer};

use crate::{Block, Memory, PACKET_PAGES, PAGE};

const MAGIC: u32 = 0x1122_3344;
const INITIAL: usize = 64;
const MAX_PAYLOAD: usize = 1 << 20;

const SYNC: u32 = 1;
const ZLIB: u32 = 2;
const ZSTD: u32 = 4;
const QPL: u32 = 8;
const QATZIP: u32 = 0x20;
const DEVICE_STATE: u32 = 0x40;

/// Whose rules apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// What a decoder must accept.
    Decoder,
    /// What an encoder may send, so that every known decoder understands it.
    Encoder,
}

/// The memory that the streams of all channels make of zeros.
///
/// # Errors
/// When a rule is broken.
pub fn decode(role: Role, method: &str, blocks: &[Block], streams: &[Vec<u8>]) -> Result<Memory> {
    let set = match method {
        "none" => 0,
        "zlib" => ZLIB,
        "zstd" => ZSTD,
        "qpl" => QPL,
        "qatzip" => QATZIP,
        _ => bail!("unknown method {method}"),
    };
    let mut channels: Vec<Option<Vec<Packet>>> = streams.iter().map(|_| None).collect();
    for stream in streams {
        let mut reader = Reader { rest: stream };
        let id = reader.initial().context("the first 64 bytes")?;
        let free = channels.get_mut(usize::from(id));
        let free = free.with_context(|| format!("channel {id} of {}", streams.len()))?;
        ensure!(free.is_none(), "channel {id} comes twice");
        let mut payloads = Payloads::default();
        let mut packets = Vec::new();
        while !reader.rest.is_empty() {
            let packet = reader.packet(role, set, blocks, &mut payloads);
            packets
                .push(packet.with_context(|| format!("channel {id}, packet {}", packets.len()))?);
        }
        *free = Some(packets);
    }
    let channels: Vec<_> = channels.into_iter().flatten().collect();
    let syncs = |packets: &Vec<Packet>| packets.iter().filter(|packet| packet.sync).count();
    let rounds = channels.first().map_or(0, syncs);
    ensure!(
        channels.iter().all(|it| syncs(it) == rounds),
        "the channels differ in their SYNCs"
    );
    let mut memory: Memory = blocks.iter().map(|block| vec![0; block.len]).collect();
    let mut channels: Vec<_> = channels.into_iter().map(Vec::into_iter).collect();
    for round in 0..=rounds {
        let mut written = Vec::new();
        for packets in &mut channels {
            for packet in packets {
                for (block, offset, page) in packet.pages {
                    ensure!(round < rounds, "a page behind the last SYNC");
                    memory[block][offset..offset + PAGE].copy_from_slice(&page);
                    written.push((block, offset));
                }
                if packet.sync {
                    break;
                }
            }
        }
        let all = written.len();
        written.sort_unstable();
        written.dedup();
        if role == Role::Encoder {
            ensure!(round > 0 || all == 0, "a page before the first SYNC");
            ensure!(written.len() == all, "a page twice between two SYNCs");
        }
    }
    Ok(memory)
}

/// A packet, decoded.
struct Packet {
    sync: bool,
    /// RAM block, offset, content.
    pages: Vec<(usize, usize, Vec<u8>)>,
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let parts = self.rest.split_at_checked(len);
        let (taken, rest) = parts.with_context(|| format!("{} of {len} bytes", self.rest.len()))?;
        self.rest = rest;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32> {
        let bytes = self.take(4)?;
        Ok(bytes
            .iter()
            .fold(0, |value, byte| value << 8 | u32::from(*byte)))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from(self.u32()?) << 32 | u64::from(self.u32()?))
    }

    fn magic_and_version(&mut self) -> Result<()> {
        let (magic, version) = (self.u32()?, self.u32()?);
        ensure!(magic == MAGIC, "magic {magic:#x}");
        ensure!(version == 1, "version {version}");
        Ok(())
    }

    /// The channel's id.
    fn initial(&mut self) -> Result<u8> {
        let mut initial = Reader {
            rest: self.take(INITIAL)?,
        };
        initial.magic_and_version()?;
        ensure!(
            initial.take(16)?.iter().all(|byte| *byte == 0),
            "another guest's uuid"
        );
        Ok(initial.take(1)?[0])
    }

    fn packet(
        &mut self,
        role: Role,
        set: u32,
        blocks: &[Block],
        payloads: &mut Payloads,
    ) -> Result<Packet> {
        self.magic_and_version()?;
        let flags = self.u32()?;
        if flags == DEVICE_STATE {
            self.take(256 + 4)?;
            let len = self.u32()?;
            self.take(usize::try_from(len)?)?;
            return Ok(Packet {
                sync: false,
                pages: Vec::new(),
            });
        }
        let (sync, method) = (flags & SYNC != 0, flags & !SYNC);
        ensure!(
            [0, ZLIB, ZSTD, QPL, QATZIP].contains(&method),
            "flags {flags:#x}"
        );
        let pages_alloc = usize::try_from(self.u32()?)?;
        let normal = usize::try_from(self.u32()?)?;
        let size = usize::try_from(self.u32()?)?;
        self.u64()?;
        let zero = usize::try_from(self.u32()?)?;
        self.take(4 + 3 * 8)?;
        let name = self.take(256)?;
        let mut table = Reader {
            rest: self.take(8 * PACKET_PAGES)?,
        };
        let name = name.split(|byte| *byte == 0).next().unwrap_or(name);
        ensure!(name.len() < 256, "a name without an end");
        let pages = normal.saturating_add(zero);
        ensure!(pages <= PACKET_PAGES, "{normal} + {zero} pages");
        if role == Role::Encoder {
            ensure!(
                pages == 0 || method == set,
                "flags {flags:#x} of another method"
            );
            ensure!(
                pages <= pages_alloc,
                "pages_alloc {pages_alloc} of {pages} pages"
            );
            ensure!(normal > 0 || size == 0, "{size} bytes for no normal pages");
        }
        let size = if normal == 0 { 0 } else { size };
        ensure!(size <= MAX_PAYLOAD, "a payload of {size} bytes");
        let payload = self.take(size)?;
        if pages == 0 {
            return Ok(Packet {
                sync,
                pages: Vec::new(),
            });
        }
        let block = blocks
            .iter()
            .position(|block| block.name.as_bytes() == name);
        let block = block.with_context(|| format!("RAM block {}", name.escape_ascii()))?;
        let mut decoded = match normal {
            0 => Vec::new(),
            _ => payloads.decode(method, payload, normal * PAGE)?,
        };
        decoded.resize(pages * PAGE, 0);
        if role == Role::Encoder && method == ZLIB && normal > 0 {
            ensure!(
                payload.ends_with(&[0, 0, 0xff, 0xff]),
                "a zlib payload without a flush"
            );
        }
        let pages = decoded.chunks_exact(PAGE).map(|page| {
            let offset = usize::try_from(table.u64()?)?;
            let fits = offset.is_multiple_of(PAGE) && offset < blocks[block].len;
            ensure!(fits, "offset {offset:#x}");
            Ok((block, offset, page.to_vec()))
        });
        Ok(Packet {
            sync,
            pages: pages.collect::<Result<_>>()?,
        })
    }
}

/// The state of a channel's payloads.
#[derive(Default)]
struct Payloads {
    zlib: Option<Decompress>,
    zstd: Option<DCtx<'static>>,
}

impl Payloads {
    fn decode(&mut self, method: u32, payload: &[u8], len: usize) -> Result<Vec<u8>> {
        let pages = match method {
            ZLIB => {
                let stream = self.zlib.get_or_insert_with(|| Decompress::new(true));
                let (pages, used, ended) = inflate(stream, payload, len)?;
                ensure!(!ended, "the zlib stream has ended");
                ensure!(used == payload.len(), "bytes behind the flush");
                pages
            }
            ZSTD => unzstd(self.zstd.get_or_insert_with(DCtx::create), payload, len)?,
            QPL => qpl(payload, len / PAGE)?,
            QATZIP => qatzip(payload)?,
            _ => payload.to_vec(),
        };
        ensure!(
            pages.len() == len,
            "{} bytes of pages, expected {len}",
            pages.len()
        );
        Ok(pages)
    }
}

/// At most `len + 1` bytes from `payload`, how many bytes of it they took, and whether the stream has ended.
fn inflate(stream: &mut Decompress, payload: &[u8], len: usize) -> Result<(Vec<u8>, usize, bool)> {
    let (mut out, before) = (vec![0; len + 1], (stream.total_in(), stream.total_out()));
    loop {
        let used = usize::try_from(stream.total_in() - before.0)?;
        let got = usize::try_from(stream.total_out() - before.1)?;
        let status = stream.decompress(&payload[used..], &mut out[got..], FlushDecompress::Sync)?;
        let now = (stream.total_in(), stream.total_out());
        let ended = status == Status::StreamEnd;
        if ended || now == (before.0 + used as u64, before.1 + got as u64) {
            out.truncate(usize::try_from(now.1 - before.1)?);
            return Ok((out, usize::try_from(now.0 - before.0)?, ended));
        }
    }
}

fn unzstd(stream: &mut DCtx<'static>, payload: &[u8], len: usize) -> Result<Vec<u8>> {
    let mut pages = vec![0; len + 1];
    let (mut input, mut output) = (InBuffer::around(payload), OutBuffer::around(&mut pages[..]));
    loop {
        let before = (input.pos(), output.pos());
        let hint = stream.decompress_stream(&mut output, &mut input);
        let hint = hint.map_err(|code| anyhow::anyhow!(zstd_safe::get_error_name(code)))?;
        ensure!(hint != 0, "the zstd frame has ended");
        if before == (input.pos(), output.pos()) {
            break;
        }
    }
    ensure!(input.pos() == payload.len(), "bytes behind the flush");
    let len = output.pos();
    pages.truncate(len);
    Ok(pages)
}

fn qpl(payload: &[u8], pages: usize) -> Result<Vec<u8>> {
    let mut reader = Reader { rest: payload };
    let lens: Vec<usize> = (0..pages)
        .map(|_| Ok(usize::try_from(reader.u32()?)?))
        .collect::<Result<_>>()?;
    let mut out = Vec::new();
    for len in lens {
        ensure!(len <= PAGE, "a page of {len} bytes");
        let page = reader.take(len)?;
        if len == PAGE {
            out.extend_from_slice(page);
            continue;
        }
        let (page, used, ended) = inflate(&mut Decompress::new(false), page, PAGE)?;
        ensure!(
            ended && used == len && page.len() == PAGE,
            "a page that is none"
        );
        out.extend(page);
    }
    ensure!(reader.rest.is_empty(), "bytes behind the pages");
    Ok(out)
}

fn qatzip(payload: &[u8]) -> Result<Vec<u8>> {
    const EXTRA: u8 = 4;
    let (mut reader, mut out) = (Reader { rest: payload }, Vec::new());
    while !reader.rest.is_empty() {
        let fixed = reader.take(10)?;
        ensure!(fixed[..3] == [0x1f, 0x8b, 8], "not a gzip member");
        ensure!(fixed[3] & !EXTRA == 0, "gzip flags {:#x}", fixed[3]);
        if fixed[3] & EXTRA != 0 {
            let len = reader.take(2)?;
            reader.take(usize::from(u16::from_le_bytes([len[0], len[1]])))?;
        }
        let (page, used, ended) = inflate(&mut Decompress::new(false), reader.rest, MAX_PAYLOAD)?;
        ensure!(ended, "a gzip member without an end");
        reader.take(used)?;
        let mut crc = Crc::new();
        crc.update(&page);
        let check = [crc.sum().to_le_bytes(), crc.amount().to_le_bytes()].concat();
        ensure!(reader.take(8)? == check, "the check of a gzip member");
        out.extend(page);
    }
    Ok(out)
}
