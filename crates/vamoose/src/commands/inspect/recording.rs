//! One recorded channel: a file's bytes to checked, decoded packets.

use std::{
    fmt,
    fs::File,
    io::{self, BufReader, Cursor, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use multifd::{
    DEVICE_STATE_HEADER_LEN, DeviceStateHeader, INITIAL_LEN, Initial, Layout, MAIN_MAGIC,
    PRELUDE_LEN, PacketKind, Prelude, RamHeader,
};
use tracing::warn;
use vamoose_codec::{DecodeError, Decoder};

use super::unzstd::{self, Unzstd};

/// A channel's stream, read from behind its first 64 bytes on.
pub(super) struct Recording {
    bytes: Bytes,
    initial: Initial,
    layout: Layout,
    decoder: Decoder,
    /// False from the first packet on whose method is not built in.
    decodes: bool,
    ended: bool,
    syncs: u64,
    header: Vec<u8>,
    payload: Vec<u8>,
}

/// What a file turned out to be.
pub(super) enum Opened {
    /// A data channel.
    Channel(Box<Recording>),
    /// The main stream of a migration.
    Main,
}

/// One packet, reused from packet to packet.
pub(super) struct Packet {
    pub(super) content: Content,
    /// Where it starts in the decompressed stream.
    pub(super) at: u64,
    /// Bytes of header and payload.
    pub(super) wire_len: usize,
    pub(super) payload_len: usize,
    pub(super) ram: RamHeader,
    /// Room for the normal pages of a whole packet.
    pages: Vec<u8>,
    pages_len: usize,
}

/// What a packet holds.
pub(super) enum Content {
    /// Pages, decoded, and perhaps a SYNC.
    Ram,
    /// Pages by a method that is not built in: their places are known, not their content.
    Undecoded,
    DeviceState(Box<DeviceStateHeader>),
}

impl Packet {
    pub(super) fn new(layout: Layout) -> Self {
        Self {
            content: Content::Ram,
            at: 0,
            wire_len: 0,
            payload_len: 0,
            ram: RamHeader::new(layout),
            pages: vec![0; layout.packet_bytes()],
            pages_len: 0,
        }
    }

    /// The normal pages, back to back.
    pub(super) fn pages(&self) -> &[u8] {
        &self.pages[..self.pages_len]
    }

    pub(super) fn is_sync(&self) -> bool {
        !matches!(self.content, Content::DeviceState(_)) && self.ram.sync
    }
}

impl Recording {
    /// Opens the stream in `path` and reads its introduction.
    pub(super) fn open(path: &Path, layout: Layout) -> Result<Opened> {
        let mut bytes = Bytes::open(path)?;
        let mut first = [0; INITIAL_LEN];
        // A main stream may be shorter than a channel's introduction.
        let (magic, rest) = first.split_at_mut(size_of::<u32>());
        bytes.fill(magic, &INTRODUCTION)?;
        if *magic == MAIN_MAGIC.to_be_bytes() {
            return Ok(Opened::Main);
        }
        bytes.fill(rest, &INTRODUCTION)?;
        let initial = Initial::parse(&first)
            .context("not the recording of a multifd channel")
            .with_context(|| bytes.place(0))?;
        Ok(Opened::Channel(Box::new(Self {
            bytes,
            initial,
            layout,
            decoder: Decoder::new(layout),
            decodes: true,
            ended: false,
            syncs: 0,
            header: vec![0; layout.ram_header_len()],
            payload: Vec::new(),
        })))
    }

    pub(super) fn channel(&self) -> u8 {
        self.initial.channel()
    }

    pub(super) fn announced_channels(&self) -> Option<u8> {
        self.initial.announced_channels()
    }

    /// The file, for messages.
    pub(super) fn name(&self) -> String {
        self.bytes.path.display().to_string()
    }

    /// A place in the stream, for messages.
    pub(super) fn place(&self, at: u64) -> String {
        self.bytes.place(at)
    }

    /// Where the stream ended, for messages.
    pub(super) fn place_of_end(&self) -> String {
        format!("{} ends at byte {}", self.name(), self.bytes.at)
    }

    /// Whether the last packet has been read.
    pub(super) fn at_end(&self) -> bool {
        self.ended
    }

    /// SYNCs read so far.
    pub(super) fn syncs(&self) -> u64 {
        self.syncs
    }

    /// Reads and decodes the next packet; false when there is none.
    pub(super) fn next(&mut self, packet: &mut Packet) -> Result<bool> {
        packet.at = self.bytes.at;
        let mut prelude = [0; PRELUDE_LEN];
        if !self
            .bytes
            .fill_or_end(&mut prelude, &Part("header", packet.at))?
        {
            self.ended = true;
            return Ok(false);
        }
        let prelude = Prelude::parse(&prelude).with_context(|| self.bytes.place(packet.at))?;
        let header_len = match prelude.kind() {
            PacketKind::Ram => self.next_ram(prelude, packet)?,
            PacketKind::DeviceState => self.next_device_state(prelude, packet)?,
        };
        packet.wire_len = header_len + packet.payload_len;
        self.syncs += u64::from(packet.is_sync());
        Ok(true)
    }

    fn next_ram(&mut self, prelude: Prelude, packet: &mut Packet) -> Result<usize> {
        let rest = &mut self.header[PRELUDE_LEN..];
        self.bytes.fill(rest, &Part("header", packet.at))?;
        packet
            .ram
            .parse(prelude, rest, self.layout)
            .with_context(|| self.bytes.place(packet.at))?;
        packet.payload_len = packet.ram.payload_len();
        packet.pages_len = packet.ram.normal_offsets().len() * self.layout.page_size();
        let payload_at = self.bytes.at;
        // Checked above: at most the layout's largest payload.
        self.payload.resize(packet.payload_len, 0);
        self.bytes
            .fill(&mut self.payload, &Part("payload", packet.at))?;
        packet.content = self.decode(packet).with_context(|| {
            let place = self.bytes.place(payload_at);
            format!("{place} (payload of packet {})", packet.ram.packet_num)
        })?;
        Ok(self.layout.ram_header_len())
    }

    fn decode(&mut self, packet: &mut Packet) -> Result<Content> {
        let pages = &mut packet.pages[..packet.pages_len];
        if pages.is_empty() {
            return Ok(Content::Ram);
        }
        if !self.decodes {
            return Ok(Content::Undecoded);
        }
        match self.decoder.decode(packet.ram.method, &self.payload, pages) {
            Ok(()) => Ok(Content::Ram),
            Err(DecodeError::NotBuilt { method }) => {
                // The headers can still be shown, which is what inspect is mostly for.
                warn!(
                    "{}: method {method} is not built into this vamoose: its payloads are not checked",
                    self.bytes.path.display()
                );
                self.decodes = false;
                Ok(Content::Undecoded)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn next_device_state(&mut self, prelude: Prelude, packet: &mut Packet) -> Result<usize> {
        let mut rest = [0; DEVICE_STATE_HEADER_LEN - PRELUDE_LEN];
        self.bytes.fill(&mut rest, &Part("header", packet.at))?;
        let header = DeviceStateHeader::parse(prelude, &rest)
            .with_context(|| self.bytes.place(packet.at))?;
        packet.payload_len = header.payload_len();
        packet.pages_len = 0;
        self.payload.resize(packet.payload_len, 0);
        self.bytes
            .fill(&mut self.payload, &Part("device state", packet.at))?;
        packet.content = Content::DeviceState(Box::new(header));
        Ok(DEVICE_STATE_HEADER_LEN)
    }
}

/// A file's bytes, decompressed if need be, and how far they have been read.
struct Bytes {
    path: PathBuf,
    input: Box<dyn Read>,
    at: u64,
}

impl Bytes {
    fn open(path: &Path) -> Result<Self> {
        let open = || -> io::Result<Box<dyn Read>> {
            let mut file = File::open(path)?;
            let mut first = Vec::new();
            file.by_ref()
                .take(unzstd::MAGIC.len() as u64)
                .read_to_end(&mut first)?;
            let packed = first == unzstd::MAGIC;
            let whole = BufReader::with_capacity(BUFFER, Cursor::new(first).chain(file));
            Ok(if packed {
                Box::new(Unzstd::new(whole)?)
            } else {
                Box::new(whole)
            })
        };
        let input = open().with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self {
            path: path.to_owned(),
            input,
            at: 0,
        })
    }

    /// Fills `buffer`, which must not go beyond the end of the stream.
    fn fill(&mut self, buffer: &mut [u8], part: &dyn fmt::Display) -> Result<()> {
        if buffer.is_empty() || self.fill_or_end(buffer, part)? {
            return Ok(());
        }
        bail!("{}: the stream ends before {part}", self.place(self.at))
    }

    /// Fills `buffer`; false when the stream ends before its first byte.
    fn fill_or_end(&mut self, buffer: &mut [u8], part: &dyn fmt::Display) -> Result<bool> {
        let mut got = 0;
        while got < buffer.len() {
            match self.input.read(&mut buffer[got..]) {
                Ok(0) => break,
                Ok(bytes) => {
                    got += bytes;
                    self.at += bytes as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).with_context(|| self.place(self.at)),
            }
        }
        if got > 0 && got < buffer.len() {
            bail!("{}: the stream ends within {part}", self.place(self.at));
        }
        Ok(got == buffer.len())
    }

    fn place(&self, at: u64) -> String {
        format!("{}: byte {at}", self.path.display())
    }
}

/// What was being read when the stream ended: part of the packet that starts at a byte.
struct Part(&'static str, u64);

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} of the packet at byte {}", self.0, self.1)
    }
}

const INTRODUCTION: &str = "the 64 bytes that introduce a channel";
const BUFFER: usize = 128 * 1024;
