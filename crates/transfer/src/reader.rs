//! The receiving end of a data channel: bytes to checked, decoded packets.

use std::{io, sync::Arc};

use codec::{DecodeError, Decoder};
use multifd::{
    DEVICE_STATE_HEADER_LEN, DeviceStateHeader, Layout, Method, PRELUDE_LEN, PacketError,
    PacketKind, Prelude,
};
use thiserror::Error;

use crate::{Packet, Stats, Stream, is_stall, stats::cpu_timed};

/// Reads the packets of one channel, in their order, and decodes them. The method is taken from
/// each packet, so a sender may change it at any time.
pub struct ChannelReader {
    stream: Arc<Stream>,
    stats: Arc<Stats>,
    layout: Layout,
    decoder: Decoder,
    header: Vec<u8>,
    payload: Vec<u8>,
}

/// What [`ChannelReader::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A packet.
    Packet,
    /// The sender closed the channel between two packets.
    End,
}

/// A channel that cannot be read on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The connection broke.
    #[error("cannot read: {0}")]
    Io(#[from] io::Error),
    /// The connection ended within a packet.
    #[error("the stream ended in the middle of a packet's {part}, after {got} of {wanted} bytes")]
    Truncated {
        /// Which part of the packet.
        part: &'static str,
        /// Bytes that came.
        got: usize,
        /// Bytes that were announced.
        wanted: usize,
    },
    /// Nothing came for the stall timeout within a packet.
    #[error("nothing came for too long in the middle of a packet's {part}")]
    Stalled {
        /// Which part of the packet.
        part: &'static str,
    },
    /// A header that no correct sender sends.
    #[error("bad packet: {0}")]
    Packet(#[from] PacketError),
    /// A payload that does not decode to its pages.
    #[error("bad payload of packet {packet_num} (RAM block {block}): {error}")]
    Decode {
        /// The sender's number of the packet.
        packet_num: u64,
        /// The RAM block.
        block: String,
        /// What is wrong.
        error: DecodeError,
    },
}

impl ChannelReader {
    /// A reader of `stream`, from behind the initial packet on.
    pub fn new(stream: Arc<Stream>, layout: Layout, decoder: Decoder, stats: Arc<Stats>) -> Self {
        Self {
            stream,
            stats,
            layout,
            decoder,
            header: vec![0; layout.ram_header_len().max(DEVICE_STATE_HEADER_LEN)],
            payload: vec![0; layout.max_payload()],
        }
    }

    /// Reads the next packet into `packet`, waiting for it as long as it takes; once it has begun
    /// it must go on within the stall timeout.
    ///
    /// # Errors
    /// When the connection breaks or stalls in mid-packet, or the sender's bytes are wrong. The
    /// channel is of no use any more then, and the content of `packet` undefined.
    pub fn read(&mut self, packet: &mut Packet) -> Result<Received, ReadError> {
        let mut prelude = [0; PRELUDE_LEN];
        if !self.wait_for(&mut prelude[..1])? {
            return Ok(Received::End);
        }
        read_part(&self.stream, &mut prelude[1..], "header")?;
        let prelude = Prelude::parse(&prelude)?;
        let payload_len = match prelude.kind() {
            PacketKind::Ram => self.read_ram(prelude, packet)?,
            PacketKind::DeviceState => self.read_device_state(prelude, packet)?,
        };
        self.stats.add_received(payload_len);
        Ok(Received::Packet)
    }

    /// Waits for the first byte of a packet; false when the stream ends instead.
    fn wait_for(&self, byte: &mut [u8]) -> Result<bool, ReadError> {
        loop {
            match self.stream.read_full(byte) {
                Ok(read) => return Ok(read > 0),
                // Between two packets a sender may be silent: it is paced, or its guest is idle.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn read_ram(&mut self, prelude: Prelude, packet: &mut Packet) -> Result<usize, ReadError> {
        let header_len = self.layout.ram_header_len();
        let rest = &mut self.header[..header_len - PRELUDE_LEN];
        read_part(&self.stream, rest, "header")?;
        packet.set_ram();
        packet.ram_mut().parse(prelude, rest, self.layout)?;
        let payload_len = packet.ram().payload_len();
        if packet.ram().method == Method::None {
            // The header's check made the payload exactly as long as the pages.
            read_part(&self.stream, packet.pages_mut(), "payload")?;
        } else {
            let payload = &mut self.payload[..payload_len];
            read_part(&self.stream, payload, "payload")?;
            let method = packet.ram().method;
            let decoder = &mut self.decoder;
            let (decoded, time) = cpu_timed(|| decoder.decode(method, payload, packet.pages_mut()));
            decoded.map_err(|error| ReadError::Decode {
                packet_num: packet.ram().packet_num,
                block: packet.ram().block.to_string(),
                error,
            })?;
            self.stats.add_decode(time);
        }
        Ok(header_len + payload_len)
    }

    fn read_device_state(
        &mut self,
        prelude: Prelude,
        packet: &mut Packet,
    ) -> Result<usize, ReadError> {
        let mut rest = [0; DEVICE_STATE_HEADER_LEN - PRELUDE_LEN];
        read_part(&self.stream, &mut rest, "header")?;
        let header = DeviceStateHeader::parse(prelude, &rest)?;
        let payload_len = header.payload_len();
        let state = packet.set_device_state(header);
        // The length is the peer's word: the buffer grows with the bytes that really come.
        while state.len() < payload_len {
            let start = state.len();
            state.resize(payload_len.min(start + self.layout.packet_bytes()), 0);
            read_part(&self.stream, &mut state[start..], "device state")?;
        }
        Ok(DEVICE_STATE_HEADER_LEN + payload_len)
    }
}

/// Fills `buffer` with bytes that must come now.
fn read_part(stream: &Stream, buffer: &mut [u8], part: &'static str) -> Result<(), ReadError> {
    match stream.read_full(buffer) {
        Ok(got) if got == buffer.len() => Ok(()),
        Ok(got) => Err(ReadError::Truncated {
            part,
            got,
            wanted: buffer.len(),
        }),
        Err(error) if is_stall(&error) => Err(ReadError::Stalled { part }),
        Err(error) => Err(error.into()),
    }
}
