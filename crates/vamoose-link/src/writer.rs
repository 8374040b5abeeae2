//! The sending end of a data channel: packets to encoded bytes.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use multifd::{Layout, Method, PacketError, RamHeader};
use thiserror::Error;
use vamoose_codec::{EncodeError, Encoder};
use vm_memory::VolatileSlice;

use crate::{
    Pacer, Packet, Stats, Stream, ZeroCopyError, is_stall, memory,
    packet::Content,
    stats::cpu_timed,
    zero_copy::{self, ZeroCopy},
};

/// Encodes packets and sends them on one channel, in the order in which they are given: whole packets
/// ([`write`](ChannelWriter::write)), or pages straight from guest memory
/// ([`write_memory`](ChannelWriter::write_memory)).
///
/// Where the packets of the method are independent of each other, several writers may share a
/// channel, each with an encoder of its own: see [`ChannelWriter::sibling`].
pub struct ChannelWriter {
    outlet: Outlet,
    encoder: Box<dyn Encoder>,
    sync: RamHeader,
    header: Vec<u8>,
    /// Room for a payload.
    room: Box<[u8]>,
    /// Of the guest's pages, to be encoded. Empty until it is needed.
    copy: Vec<u8>,
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
    /// The memory for a packet is not what its header names.
    #[error("{given} bytes of memory were given for a packet whose pages are {expected} bytes")]
    Pages {
        /// Bytes in the slices.
        given: usize,
        /// Bytes in the header's normal pages.
        expected: usize,
    },
    /// Sends without a copy were not acknowledged for the stall timeout: the kernel has not let go of their
    /// pages.
    #[error(
        "the peer has stopped reading: the kernel still holds the pages of {sends} zero-copy sends"
    )]
    Held {
        /// How many sends.
        sends: u32,
    },
}

impl WriteError {
    /// What a send's error means.
    pub(crate) fn of(error: io::Error) -> Self {
        if is_stall(&error) {
            Self::Stalled
        } else {
            Self::Io(error)
        }
    }
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
        let outlet = Outlet {
            channel: Arc::new(Channel { stream, turn }),
            stats,
            pacer,
            layout,
        };
        Self::on(outlet, encoder)
    }

    /// Another writer on the same channel. The packets of both go out whole, in any order; who sends a
    /// SYNC has to see to it that the packets that belong before it are out.
    pub fn sibling(&self, encoder: Box<dyn Encoder>) -> Self {
        Self::on(self.outlet.clone(), encoder)
    }

    fn on(outlet: Outlet, encoder: Box<dyn Encoder>) -> Self {
        let layout = outlet.layout;
        Self {
            outlet,
            encoder,
            sync: RamHeader::new(layout),
            header: Vec::with_capacity(layout.ram_header_len()),
            room: vec![0; layout.max_payload()].into(),
            copy: Vec::new(),
        }
    }

    /// Lets [`write_memory`](ChannelWriter::write_memory) send pages from where they are, on this channel and
    /// from now on. [`check_locked_memory`](crate::check_locked_memory) tells whether there is room for it.
    ///
    /// # Errors
    /// When the channel is not TCP, the encoder is not of method none, or the kernel cannot.
    pub fn enable_zero_copy(&mut self) -> Result<(), ZeroCopyError> {
        let method = self.encoder.method();
        if method != Method::None {
            return Err(ZeroCopyError::Method { method });
        }
        let mut turn = self.outlet.channel.turn();
        if turn.is_none() {
            *turn = Some(zero_copy::enable(&self.outlet.channel.stream)?);
        }
        Ok(())
    }

    /// Encodes and sends one packet; its header becomes the one sent.
    ///
    /// # Errors
    /// When the connection breaks, or the peer stops reading for the stall timeout. The channel is
    /// of no use any more then.
    pub fn write(&mut self, packet: &mut Packet) -> Result<(), WriteError> {
        match packet.content() {
            Content::Ram => {
                let (header, pages) = packet.ram_parts();
                self.write_ram(header, Bytes::Ours(pages))
            }
            Content::DeviceState(header) => {
                let (header, state) = (header.as_bytes(), Bytes::Ours(packet.state()));
                self.outlet.send(header, state).map(drop)
            }
        }
    }

    /// Encodes and sends one packet whose normal pages are `pages`, back to back in the order of the header's
    /// offsets; `header` becomes the one sent. A slice may be a page or any run of bytes.
    ///
    /// The guest may go on writing: pages that go as they are leave straight from its memory, torn perhaps,
    /// and those that are encoded are copied first, since an encoder must not see them change.
    ///
    /// With [`enable_zero_copy`](ChannelWriter::enable_zero_copy) the kernel may hold the pages from here on,
    /// until [`flush`](ChannelWriter::flush) has returned. Until then they may be written and even be unmapped,
    /// but the same page must not go out on another channel.
    ///
    /// # Errors
    /// As [`ChannelWriter::write`]. Only when `pages` are not as long as `header` says, nothing has been sent and
    /// the channel can be used on.
    pub fn write_memory(
        &mut self,
        header: &mut RamHeader,
        pages: &[VolatileSlice<'_>],
    ) -> Result<(), WriteError> {
        let expected = header.normal_offsets().len() * self.outlet.layout.page_size();
        let given = memory::total_len(pages);
        if given != expected || given > self.outlet.layout.packet_bytes() {
            return Err(WriteError::Pages { given, expected });
        }
        self.write_ram(header, Bytes::Guests(pages))
    }

    /// Sends a SYNC without pages, and waits until the kernel has let go of all pages that were sent
    /// before it. The SYNC goes first, so that the peer need not wait too.
    ///
    /// # Errors
    /// As [`ChannelWriter::write`] and [`ChannelWriter::flush`].
    pub fn write_sync(&mut self, packet_num: u64) -> Result<(), WriteError> {
        self.sync.sync = true;
        self.sync.packet_num = packet_num;
        self.header.clear();
        self.sync.write(self.outlet.layout, &mut self.header);
        // The pacer lets a SYNC through: others wait for it.
        self.outlet.send_now(&self.header, Bytes::Ours(&[]))?;
        self.flush()
    }

    /// Waits until the kernel has let go of all pages that were sent without a copy: the peer's kernel has
    /// their bytes, or ours has made a copy after all. Returns at once where nothing was sent like that.
    ///
    /// # Errors
    /// When the connection breaks, is shut down, or acknowledges nothing for the stall timeout. The kernel may
    /// then hold pages for as long as it tries to deliver them, and the migration has failed.
    pub fn flush(&mut self) -> Result<(), WriteError> {
        let channel = &self.outlet.channel;
        match channel.turn().as_mut() {
            Some(zero_copy) => zero_copy.flush(&*channel.stream, &self.outlet.stats),
            None => Ok(()),
        }
    }

    /// Says that no more packets will come, if this is the channel's last writer. Does not
    /// [`flush`](ChannelWriter::flush).
    pub fn finish(self) {
        if let Some(channel) = Arc::into_inner(self.outlet.channel) {
            channel.stream.finish();
        }
    }

    fn write_ram(&mut self, header: &mut RamHeader, pages: Bytes<'_>) -> Result<(), WriteError> {
        // What was received as one packet, pages and SYNC, leaves as two.
        header.sync = false;
        let page_bytes = pages.len();
        let payload = if page_bytes == 0 {
            header.method = self.encoder.method();
            pages
        } else if self.encoder.next_is_raw() {
            header.method = Method::None;
            pages
        } else {
            let (encoded, time) = cpu_timed(|| {
                let pages = match pages {
                    Bytes::Ours(pages) => pages,
                    Bytes::Guests(slices) => {
                        if let Some(room) = self.encoder.room() {
                            let len = gather(slices, room).len();
                            return self.encoder.encode_room(len, &mut self.room);
                        }
                        self.copy.resize(self.outlet.layout.packet_bytes(), 0);
                        gather(slices, &mut self.copy)
                    }
                };
                self.encoder.encode(pages, &mut self.room)
            });
            let stats = &self.outlet.stats;
            stats.add_encode(time);
            let encoded = encoded?;
            header.method = encoded.method;
            Bytes::Ours(encoded.payload)
        };
        header.set_payload_len(payload.len(), self.outlet.layout)?;
        self.header.clear();
        header.write(self.outlet.layout, &mut self.header);
        let (wire_bytes, took) = self.outlet.send(&self.header, payload)?;
        self.outlet.stats.add_packet(
            header.normal_offsets().len(),
            header.zero_offsets().len(),
            page_bytes,
        );
        let queued = || self.outlet.queued();
        self.encoder.sent(wire_bytes, page_bytes, took, &queued);
        Ok(())
    }
}

/// The bytes behind a header.
#[derive(Clone, Copy)]
enum Bytes<'a> {
    Ours(&'a [u8]),
    /// Pages in the guest's memory.
    Guests(&'a [VolatileSlice<'a>]),
}

impl Bytes<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Ours(bytes) => bytes.len(),
            Self::Guests(slices) => memory::total_len(slices),
        }
    }
}

/// Copies `slices`, back to back, to the beginning of `copy`, which must be long enough.
fn gather<'a>(slices: &[VolatileSlice<'_>], copy: &'a mut [u8]) -> &'a [u8] {
    let mut end = 0;
    for slice in slices {
        end += slice.copy_to(&mut copy[end..]);
    }
    &copy[..end]
}

/// Where a writer's packets go.
#[derive(Clone)]
struct Outlet {
    channel: Arc<Channel>,
    stats: Arc<Stats>,
    pacer: Option<Arc<Pacer>>,
    layout: Layout,
}

impl Outlet {
    /// Sends when the pacer allows it. Returns the number of bytes and how long it took, the pacer included.
    fn send(&self, header: &[u8], payload: Bytes<'_>) -> Result<(usize, Duration), WriteError> {
        let start = Instant::now();
        let bytes = header.len() + payload.len();
        if let Some(pacer) = &self.pacer {
            pacer.wait_for(bytes);
        }
        self.send_now(header, payload)?;
        Ok((bytes, start.elapsed()))
    }

    /// Bytes that the socket still holds, if they are all of one writer.
    fn queued(&self) -> Option<usize> {
        let is_alone = Arc::strong_count(&self.channel) == 1;
        is_alone.then(|| self.channel.stream.queued())?
    }

    fn send_now(&self, header: &[u8], payload: Bytes<'_>) -> Result<(), WriteError> {
        let mut turn = self.channel.turn();
        let stream = &*self.channel.stream;
        match (payload, turn.as_mut()) {
            (Bytes::Guests(pages), Some(zero_copy)) if zero_copy::is_worth_it(payload.len()) => {
                zero_copy.send(stream, header, pages, &self.stats)?;
            }
            (Bytes::Guests(pages), _) => {
                stream.send_memory(header, pages).map_err(WriteError::of)?;
            }
            (Bytes::Ours(bytes), _) => {
                stream.write_both(header, bytes).map_err(WriteError::of)?;
            }
        }
        self.stats.add_sent(header.len() + payload.len());
        Ok(())
    }
}

/// What the writers of a channel share.
struct Channel {
    stream: Arc<Stream>,
    /// Held while a packet goes out: nobody else wants it on a channel with one writer. With it goes what is
    /// known of zero-copy sends, once they are enabled.
    turn: Mutex<Option<ZeroCopy>>,
}

impl Channel {
    fn turn(&self) -> MutexGuard<'_, Option<ZeroCopy>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
