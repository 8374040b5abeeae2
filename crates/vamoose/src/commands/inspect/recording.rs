//! A recorded channel: the bytes of a file to checked, decoded packets.

use std::{
    fmt,
    fs::File,
    io::{self, BufRead as _, BufReader, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use multifd::{
    DEVICE_STATE_HEADER_LEN, DeviceStateHeader, INITIAL_LEN, Initial, Layout, PRELUDE_LEN,
    PacketKind, Prelude, RamHeader,
};
use tracing::warn;
use vamoose_codec::{DecodeError, Decoder};

/// A channel's stream, read from behind its initial packet on.
pub(super) struct Recording {
    input: Input,
    initial: Initial,
    layout: Layout,
    decoder: Decoder,
    pub(super) ended: bool,
    pub(super) syncs: u64,
}

/// A packet, reused for each packet of all recordings.
pub(super) struct Packet {
    /// Offset of the packet in the decompressed stream.
    pub(super) at: u64,
    pub(super) payload: Vec<u8>,
    /// Without pages and SYNC for device state.
    pub(super) ram: RamHeader,
    device_state: Option<Box<DeviceStateHeader>>,
    /// The decoded normal pages, back to back; `None` if the method is not built in.
    pub(super) pages: Option<Vec<u8>>,
}

impl Recording {
    pub(super) fn open(path: &Path, layout: Layout) -> Result<Self> {
        let mut input = Input::open(path)?;
        let mut first = [0; INITIAL_LEN];
        input.fill(&mut first, "initial packet")?;
        let initial = Initial::parse(&first)
            .context("not the recording of a multifd channel")
            .with_context(|| input.place(0))?;
        Ok(Self {
            input,
            initial,
            layout,
            decoder: Decoder::new(layout),
            ended: false,
            syncs: 0,
        })
    }

    pub(super) fn channel(&self) -> u8 {
        self.initial.channel()
    }

    pub(super) fn announced_channels(&self) -> Option<u8> {
        self.initial.announced_channels()
    }

    /// An offset in the stream, for messages.
    pub(super) fn place(&self, at: u64) -> String {
        self.input.place(at)
    }

    /// Reads the next packet; false at the end of the stream.
    pub(super) fn next(&mut self, packet: &mut Packet) -> Result<bool> {
        packet.at = self.input.at;
        self.ended = !self.input.has_more()?;
        if self.ended {
            return Ok(false);
        }
        let mut prelude = [0; PRELUDE_LEN];
        self.input.fill(&mut prelude, "header")?;
        let prelude = Prelude::parse(&prelude).with_context(|| self.place(packet.at))?;
        match prelude.kind() {
            PacketKind::Ram => self.next_ram(prelude, packet)?,
            PacketKind::DeviceState => self.next_device_state(prelude, packet)?,
        }
        self.syncs += u64::from(packet.ram.sync);
        Ok(true)
    }

    fn next_ram(&mut self, prelude: Prelude, packet: &mut Packet) -> Result<()> {
        packet.device_state = None;
        let mut rest = vec![0; self.layout.ram_header_len() - PRELUDE_LEN];
        self.input.fill(&mut rest, "header")?;
        let parsed = packet.ram.parse(prelude, &rest, self.layout);
        parsed.with_context(|| self.place(packet.at))?;
        // The header was checked: at most the layout's largest payload.
        packet.payload.resize(packet.ram.payload_len(), 0);
        self.input.fill(&mut packet.payload, "payload")?;
        let mut pages = packet.pages.take().unwrap_or_default();
        let pages_len = packet.ram.normal_offsets().len() * self.layout.page_size();
        pages.resize(pages_len, 0);
        let method = packet.ram.method;
        match self.decoder.decode(method, &packet.payload, &mut pages) {
            Ok(()) => packet.pages = Some(pages),
            Err(error @ DecodeError::NotBuilt { .. }) => {
                warn!("{}: payload not checked: {error}", self.place(packet.at));
                // A decoder that has failed decodes nothing more.
                self.decoder = Decoder::new(self.layout);
            }
            Err(error) => {
                let number = packet.ram.packet_num;
                let place = self.place(packet.at);
                return Err(error).with_context(|| format!("{place}: payload of packet {number}"));
            }
        }
        Ok(())
    }

    fn next_device_state(&mut self, prelude: Prelude, packet: &mut Packet) -> Result<()> {
        let mut rest = [0; DEVICE_STATE_HEADER_LEN - PRELUDE_LEN];
        self.input.fill(&mut rest, "header")?;
        let header = DeviceStateHeader::parse(prelude, &rest);
        let header = header.with_context(|| self.place(packet.at))?;
        packet.payload.resize(header.payload_len(), 0);
        self.input.fill(&mut packet.payload, "device state")?;
        packet.device_state = Some(Box::new(header));
        packet.ram.clear();
        Ok(())
    }
}

impl Packet {
    pub(super) fn new(layout: Layout) -> Self {
        Self {
            at: 0,
            payload: Vec::new(),
            ram: RamHeader::new(layout),
            device_state: None,
            pages: None,
        }
    }
}

/// A line of the table, without the channel.
impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (at, payload, ram) = (self.at, self.payload.len(), &self.ram);
        if let Some(header) = &self.device_state {
            let (id, instance) = (header.id().escape_ascii(), header.instance());
            return write!(
                f,
                "{at:>12} {:>10} DEVICE {:<7} {:>6} {:>6} {payload:>8} {id} instance {instance}",
                "-", "-", "-", "-"
            );
        }
        let (method, block) = match ram.is_empty() {
            true => ("-", "-".to_owned()),
            false => (ram.method.name(), ram.block.to_string()),
        };
        let flags = if ram.sync { "SYNC" } else { "-" };
        let (number, normal) = (ram.packet_num, ram.normal_offsets().len());
        let zero = ram.zero_offsets().len();
        write!(
            f,
            "{at:>12} {number:>10} {flags:<6} {method:<7} {normal:>6} {zero:>6} {payload:>8} {block}"
        )
    }
}

/// The bytes of a file, decompressed if they are zstd's.
struct Input {
    path: PathBuf,
    bytes: BufReader<Box<dyn Read>>,
    at: u64,
}

impl Input {
    fn open(path: &Path) -> Result<Self> {
        let open = || -> io::Result<Box<dyn Read>> {
            let mut file = BufReader::new(File::open(path)?);
            Ok(match file.fill_buf()?.starts_with(&ZSTD_MAGIC) {
                true => Box::new(zstd::Decoder::with_buffer(file)?),
                false => Box::new(file),
            })
        };
        let bytes = open().with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self {
            path: path.to_owned(),
            bytes: BufReader::new(bytes),
            at: 0,
        })
    }

    fn has_more(&mut self) -> Result<bool> {
        match self.bytes.fill_buf() {
            Ok(left) => Ok(!left.is_empty()),
            Err(error) => Err(error).with_context(|| self.place(self.at)),
        }
    }

    fn fill(&mut self, buffer: &mut [u8], part: &str) -> Result<()> {
        let read = self.bytes.read_exact(buffer);
        read.with_context(|| format!("{}: {part}", self.place(self.at)))?;
        self.at += buffer.len() as u64;
        Ok(())
    }

    fn place(&self, at: u64) -> String {
        format!("{}: byte {at}", self.path.display())
    }
}

/// First bytes of a zstd file.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
