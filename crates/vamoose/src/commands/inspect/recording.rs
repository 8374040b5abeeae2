//! A recorded channel. The reader of live channels reads it, from a socket that a thread copies the file into.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result, ensure};
use multifd::{DEVICE_STATE_HEADER_LEN, INITIAL_LEN, Initial, Layout, PacketKind};
use vamoose_codec::Decoder;
use vamoose_link::{ChannelReader, Packet, Received, Stats, Stream};

/// A channel's stream, read from behind its initial packet on.
pub(super) struct Recording {
    path: PathBuf,
    stream: Arc<Stream>,
    reader: ChannelReader,
    copying: Option<JoinHandle<io::Result<u64>>>,
    layout: Layout,
    pub(super) initial: Initial,
    /// Offset in the decompressed stream.
    pub(super) at: u64,
    pub(super) ended: bool,
    pub(super) syncs: u64,
}

impl Recording {
    /// Opens the recording of a channel; `None` for that of a main stream.
    pub(super) fn open(path: &Path, layout: Layout) -> Result<Option<Self>> {
        let context = || format!("cannot read {}", path.display());
        let file = File::open(path).with_context(context)?;
        let (near, far) = UnixStream::pair()?;
        let stream = Arc::new(Stream::from(near));
        let reader = ChannelReader::new(
            stream.clone(),
            layout,
            Decoder::new(layout),
            Arc::new(Stats::default()),
        );
        let mut recording = Self {
            path: path.to_owned(),
            stream,
            reader,
            copying: Some(thread::spawn(move || copy(file, far))),
            layout,
            initial: Initial::new([0; 16], 0, 1)?,
            at: 0,
            ended: false,
            syncs: 0,
        };
        let mut first = [0; INITIAL_LEN];
        let got = recording.stream.read_full(&mut first)?;
        if got < INITIAL_LEN {
            recording.finish_copy()?;
        }
        // A main stream may be shorter than a channel's initial packet.
        if first[..got].starts_with(b"QEVM") {
            return Ok(None);
        }
        let place = recording.place();
        ensure!(
            got == INITIAL_LEN,
            "{place}: the initial packet is incomplete"
        );
        recording.initial = Initial::parse(&first)
            .context("not the recording of a multifd channel")
            .context(place)?;
        recording.at = INITIAL_LEN as u64;
        Ok(Some(recording))
    }

    /// The present offset in the stream, for messages.
    pub(super) fn place(&self) -> String {
        format!("{}: byte {}", self.path.display(), self.at)
    }

    /// Reads the next packet; false at the end of the stream.
    pub(super) fn next(&mut self, packet: &mut Packet) -> Result<bool> {
        let received = self.reader.read(packet);
        if !matches!(received, Ok(Received::Packet)) {
            self.finish_copy()?;
        }
        self.ended = received.with_context(|| self.place())? == Received::End;
        if !self.ended {
            self.syncs += u64::from(packet.ram().sync);
        }
        Ok(!self.ended)
    }

    /// Moves on behind the packet that was read last.
    pub(super) fn advance(&mut self, packet: &Packet) {
        let len = match packet.kind() {
            PacketKind::Ram => self.layout.ram_header_len() + packet.ram().payload_len(),
            PacketKind::DeviceState => DEVICE_STATE_HEADER_LEN + packet.state().len(),
        };
        self.at += len as u64;
    }

    /// Reports an error of the file rather than that the stream has ended.
    fn finish_copy(&mut self) -> Result<()> {
        self.stream.shut_down();
        match self.copying.take().map(JoinHandle::join) {
            Some(Ok(Err(error))) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(error).with_context(|| format!("cannot read {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Copies a file, decompressed if it is zstd's.
fn copy(file: File, mut to: UnixStream) -> io::Result<u64> {
    let mut file = BufReader::with_capacity(128 << 10, file);
    match file.fill_buf()?.starts_with(&ZSTD_MAGIC) {
        true => io::copy(&mut zstd::Decoder::with_buffer(file)?, &mut to),
        false => io::copy(&mut file, &mut to),
    }
}

/// First bytes of a zstd file.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
