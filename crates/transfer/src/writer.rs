//! The sending end of a data channel: packets to encoded bytes.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use codec::{EncodeError, Encoder};
use multifd::{Layout, PacketError, RamHeader};
use thiserror::Error;

use crate::{Pacer, Packet, Stats, Stream, is_stall, packet::Content, stats::cpu_timed};

/// Encodes packets and sends them on one channel, in the order in which they are given.
///
/// Where the packets of the method are independent of each other, several writers may share a
/// channel, each with an encoder of its own: see [`ChannelWriter::sibling`].
pub struct ChannelWriter {
    channel: Arc<Channel>,
    stats: Arc<Stats>,
    pacer: Option<Arc<Pacer>>,
    layout: Layout,
    encoder: Box<dyn Encoder>,
    sync: RamHeader,
    header: Vec<u8>,
    /// Room for a payload.
    room: Box<[u8]>,
}

/// A channel that cannot be written on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The connection broke.
    #[error("cannot write: {0}")]
    Io(io::Error),
    /// The peer took nothing for the stall timeout.
    #[error("the peer has stopped reading")]
    Stalled,
    /// Our encoder failed.
    #[error("cannot encode: {0}")]
    Encode(#[from] EncodeError),
    /// What we built is no packet.
    #[error("cannot build the packet: {0}")]
    Packet(#[from] PacketError),
}

impl ChannelWriter {
    /// A writer on `stream`, on which the initial packet has been sent already.
    pub fn new(
        stream: Arc<Stream>,
        layout: Layout,
        encoder: Box<dyn Encoder>,
        pacer: Option<Arc<Pacer>>,
        stats: Arc<Stats>,
    ) -> Self {
        let turn = Mutex::default();
        let channel = Arc::new(Channel { stream, turn });
        Self::on(channel, layout, encoder, pacer, stats)
    }

    /// Another writer on the same channel. The packets of both go out whole, in any order; who sends a
    /// SYNC has to see to it that the packets that belong before it are out.
    pub fn sibling(&self, encoder: Box<dyn Encoder>) -> Self {
        let (channel, pacer, stats) = (&self.channel, &self.pacer, &self.stats);
        Self::on(
            channel.clone(),
            self.layout,
            encoder,
            pacer.clone(),
            stats.clone(),
        )
    }

    fn on(
        channel: Arc<Channel>,
        layout: Layout,
        encoder: Box<dyn Encoder>,
        pacer: Option<Arc<Pacer>>,
        stats: Arc<Stats>,
    ) -> Self {
        Self {
            channel,
            stats,
            pacer,
            layout,
            encoder,
            sync: RamHeader::new(layout),
            header: Vec::with_capacity(layout.ram_header_len()),
            room: vec![0; layout.max_payload()].into(),
        }
    }

    /// Encodes and sends one packet; its header becomes the one sent.
    ///
    /// # Errors
    /// When the connection breaks, or the peer stops reading for the stall timeout. The channel is
    /// of no use any more then.
    pub fn write(&mut self, packet: &mut Packet) -> Result<(), WriteError> {
        match packet.content() {
            Content::Ram => self.write_ram(packet),
            Content::DeviceState(header) => {
                let bytes = header.as_bytes().len() + packet.state().len();
                pace(self.pacer.as_deref(), bytes);
                self.channel.send(header.as_bytes(), packet.state())?;
                self.stats.add_sent(bytes);
                Ok(())
            }
        }
    }

    /// Sends a SYNC without pages.
    ///
    /// # Errors
    /// As [`ChannelWriter::write`].
    pub fn write_sync(&mut self, packet_num: u64) -> Result<(), WriteError> {
        self.sync.sync = true;
        self.sync.packet_num = packet_num;
        self.header.clear();
        self.sync.write(self.layout, &mut self.header);
        self.channel.send(&self.header, &[])?;
        self.stats.add_sent(self.header.len());
        Ok(())
    }

    /// Says that no more packets will come, if this is the channel's last writer.
    pub fn finish(self) {
        if let Some(channel) = Arc::into_inner(self.channel) {
            channel.stream.finish();
        }
    }

    fn write_ram(&mut self, packet: &mut Packet) -> Result<(), WriteError> {
        let (header, pages) = packet.ram_parts();
        // What was received as one packet, pages and SYNC, leaves as two.
        header.sync = false;
        let payload = if pages.is_empty() {
            header.method = self.encoder.method();
            pages
        } else {
            let (encoded, time) = cpu_timed(|| self.encoder.encode(pages, &mut self.room));
            self.stats.add_encode(time);
            let encoded = encoded?;
            header.method = encoded.method;
            encoded.payload
        };
        header.set_payload_len(payload.len(), self.layout)?;
        self.header.clear();
        header.write(self.layout, &mut self.header);
        let bytes = self.header.len() + payload.len();
        pace(self.pacer.as_deref(), bytes);
        self.channel.send(&self.header, payload)?;
        self.stats.add_sent(bytes);
        self.stats.add_packet(
            header.normal_offsets().len(),
            header.zero_offsets().len(),
            pages.len(),
        );
        Ok(())
    }
}

fn pace(pacer: Option<&Pacer>, bytes: usize) {
    if let Some(pacer) = pacer {
        pacer.wait_for(bytes);
    }
}

/// What the writers of a channel share.
struct Channel {
    stream: Arc<Stream>,
    /// Held while a packet goes out. Nobody else wants it on a channel with one writer.
    turn: Mutex<()>,
}

impl Channel {
    fn send(&self, header: &[u8], payload: &[u8]) -> Result<(), WriteError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.stream
            .write_both(header, payload)
            .map_err(|error| match error {
                error if is_stall(&error) => WriteError::Stalled,
                error => WriteError::Io(error),
            })
    }
}
