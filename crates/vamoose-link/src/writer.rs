//! The sending end of a data channel: encodes and sends packets.

use std::{
    io, mem, ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use multifd::{Layout, Method, PacketError, RamHeader};
use thiserror::Error;
use vamoose_codec::{EncodeError, Engines, RAW_FRAME_LEN, Settings, raw_frame};
use vm_memory::VolatileSlice;

use crate::{
    DeltaSender, Pacer, Packet, PacketEncoder, Stats, StoreListener, StoreSender, Stream,
    ZeroCopyError,
    adaptive::FarEnd,
    backlog::Backlog,
    delta::Outgoing,
    is_stall, memory,
    page_store::{MANY_UNDECIDED, StoreWriter},
    pages::{PageSource, copy_from_guest},
    stats::cpu_timed,
    zero_copy::{self, ZeroCopy},
};

/// Encodes packets and sends them on one channel, in the order given: whole packets
/// ([`write`](ChannelWriter::write)), or pages straight from guest memory
/// ([`write_memory`](ChannelWriter::write_memory)).
pub struct ChannelWriter {
    sender: Sender,
    /// Number of SYNCs written.
    epoch: u64,
    encoder: PacketEncoder,
    delta: Option<Outgoing>,
    store: Option<StoreWriter>,
    /// The first pages decide the encoder, see [`ChannelWriter::restore`].
    restores: bool,
    /// What makes a page a zstd frame, for a receiver that decodes nothing else: see [`ChannelWriter::send_frames`].
    frame: Option<[u8; RAW_FRAME_LEN]>,
    /// Packets of zstd-frames have their own checksum, see [`ChannelWriter::add_checksums`].
    has_checksums: bool,
    sync: RamHeader,
    header: Vec<u8>,
    /// An encoded payload.
    payload: Box<[u8]>,
    /// Copy of guest pages, to be encoded. Grows when needed.
    copy: Vec<u8>,
}

/// Why a channel cannot be written any further.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WriteError {
    #[error("cannot write")]
    Io(#[source] io::Error),
    /// The peer accepted no bytes for the stall timeout.
    #[error("timed out after {seconds} s: the peer has stopped reading")]
    TimedOut { seconds: u64 },
    #[error("cannot encode")]
    Encode(#[from] EncodeError),
    #[error("cannot build the packet")]
    Packet(#[from] PacketError),
    #[error("{given} bytes of memory were given for a packet whose pages are {expected} bytes")]
    Pages { given: usize, expected: usize },
    #[error(
        "timed out after {seconds} s: the peer has stopped reading, the kernel holds the pages of {sends} zero-copy sends"
    )]
    Held { sends: u32, seconds: u64 },
}

impl WriteError {
    /// Interprets the error of a send, on a socket with this stall timeout.
    pub(crate) fn of(error: io::Error, stall_timeout: Duration) -> Self {
        if is_stall(&error) {
            let seconds = stall_timeout.as_secs();
            Self::TimedOut { seconds }
        } else {
            Self::Io(error)
        }
    }
}

impl ChannelWriter {
    /// A writer on `stream`, whose initial packet has been sent.
    pub fn new(
        stream: Arc<Stream>,
        layout: Layout,
        encoder: impl Into<PacketEncoder>,
        pacer: Option<Arc<Pacer>>,
        stats: Arc<Stats>,
    ) -> Self {
        let sender = Sender {
            stream,
            backlog: Backlog::default(),
            zero_copy: None,
            stats,
            pacer,
            layout,
        };
        let mut sync = RamHeader::new(layout);
        sync.sync = true;
        Self {
            sender,
            epoch: 0,
            encoder: encoder.into(),
            delta: None,
            store: None,
            restores: false,
            frame: None,
            has_checksums: false,
            sync,
            header: Vec::with_capacity(layout.ram_header_len()),
            payload: vec![0; layout.max_payload()].into(),
            copy: Vec::new(),
        }
    }

    /// Makes [`write_memory`](ChannelWriter::write_memory) send pages without a copy on this channel.
    /// [`check_locked_memory`](crate::check_locked_memory) checks the limit that this needs.
    ///
    /// # Errors
    /// When the channel is not TCP, the method is not none, or the kernel does not support it.
    pub fn enable_zero_copy(&mut self) -> Result<(), ZeroCopyError> {
        let method = self.encoder.method();
        if method != Method::None {
            return Err(ZeroCopyError::Method { method });
        }
        if self.sender.zero_copy.is_none() {
            let socket = self.sender.stream.socket();
            let zero_copy = zero_copy::enable(socket.ok_or(ZeroCopyError::Session)?)?;
            self.sender.zero_copy = Some(zero_copy);
        }
        Ok(())
    }

    /// Encodes pages after their versions in `cache`. All writers of a migration need the
    /// same cache, and the receiver its own ([`ChannelReader::take_differences`](crate::ChannelReader::take_differences)).
    ///
    /// # Errors
    /// When there is no memory for the encoder.
    pub fn send_differences(&mut self, cache: Arc<DeltaSender>) -> Result<(), EncodeError> {
        self.delta = Some(Outgoing::new(cache, self.sender.layout)?);
        Ok(())
    }

    /// Sends references to pages that the destination's store has. The writer must be on a stream of a session. Returns what
    /// reads the destination's messages on the channel, which must run.
    pub fn share_pages(&mut self, sender: Arc<StoreSender>) -> StoreListener {
        let (stream, layout) = (self.sender.stream.clone(), self.sender.layout);
        let (store, listener) = StoreWriter::new(sender, stream, layout);
        self.store = Some(store);
        if let PacketEncoder::Adaptive(adaptive) = &mut self.encoder {
            // The store keeps encoded pages only, and what is alike today saves bytes of the next guest.
            adaptive.avoid_raw();
        }
        listener
    }

    /// Lets method auto begin with raw packets, because the link is known to be fast. Has no effect on another method.
    pub fn start_raw(&mut self) {
        if let PacketEncoder::Adaptive(adaptive) = &mut self.encoder {
            adaptive.start_raw();
        }
    }

    /// Sends pages by the method that the source's QEMU used, if the first packet tells it (over a session), instead of the
    /// encoder's: zstd as [`send_frames`](Self::send_frames) does.
    pub fn restore(&mut self) {
        self.restores = true;
    }

    /// Sends to a QEMU that is set up for method zstd, without encoding: packets of zstd-frames as they were read
    /// ([`write_frame`](Self::write_frame)), and all other pages raw, each within a zstd frame. False if pages are too long.
    pub fn send_frames(&mut self) -> bool {
        self.frame = raw_frame(self.sender.layout.page_size());
        self.frame.is_some()
    }

    /// Lets packets of zstd-frames have zstd's checksum of their pages instead of the session's. Whoever decodes them compares it,
    /// also a QEMU. Has no effect on a stream without checksums.
    ///
    /// # Errors
    /// When the encoder refuses.
    pub fn add_checksums(&mut self) -> Result<(), EncodeError> {
        self.has_checksums = self.sender.stream.checks_pages();
        match self.has_checksums {
            true => self.encoder.add_checksums(),
            false => Ok(()),
        }
    }

    /// Encodes and sends one packet. Its header becomes the one sent, and its pages become undefined.
    ///
    /// # Errors
    /// When the connection breaks, or the peer stops reading for the stall timeout. The channel is unusable then.
    pub fn write(&mut self, packet: &mut Packet) -> Result<(), WriteError> {
        if let Some(header) = &packet.device_state {
            let (header, state) = (header.as_bytes(), Payload::Borrowed(packet.state()));
            return self.sender.send(header, state);
        }
        let len = packet.pages_len();
        self.write_ram(&mut packet.ram, PageSource::Own(&mut packet.pages, len))
    }

    /// Whether a packet with this header can be sent as
    /// [`ChannelReader::read_frame`](crate::ChannelReader::read_frame) reads it.
    ///
    /// # Errors
    /// When there is no memory for the encoder.
    pub fn takes_frame(&mut self, header: &mut RamHeader) -> Result<bool, WriteError> {
        if !header.is_empty() {
            self.follow_origin(header)?;
        }
        Ok(self.frame.is_some())
    }

    /// Sends one packet as it was read by [`ChannelReader::read_frame`](crate::ChannelReader::read_frame), without its SYNC.
    ///
    /// # Errors
    /// As [`ChannelWriter::write`].
    pub fn write_frame(&mut self, packet: &mut Packet) -> Result<(), WriteError> {
        let header = &mut packet.ram;
        let payload = &packet.pages[..header.payload_len()];
        header.sync = false;
        header.method = Method::Zstd;
        self.header.clear();
        header.write(self.sender.layout, &mut self.header);
        self.sender.send(&self.header, Payload::Borrowed(payload))?;
        self.sender.count(header);
        Ok(())
    }

    /// Encodes and sends one packet whose normal pages are `pages`, back to back in the order of the header's
    /// offsets; `header` becomes the one sent. A slice may be a page or any run of bytes.
    ///
    /// The guest may keep writing. Raw pages are sent directly from its memory and may be torn; pages to be encoded are copied
    /// first, since an encoder must not see them change.
    ///
    /// With [`enable_zero_copy`](ChannelWriter::enable_zero_copy) the kernel may hold the pages until
    /// [`flush`](ChannelWriter::flush) has returned. Until then they may be written and even be unmapped, but the same page must
    /// not be sent on another channel.
    ///
    /// # Errors
    /// As [`ChannelWriter::write`]. If `pages` does not have the length in `header`, nothing has been sent and the channel
    /// remains usable.
    pub fn write_memory(
        &mut self,
        header: &mut RamHeader,
        pages: &[VolatileSlice<'_>],
    ) -> Result<(), WriteError> {
        let expected = header.normal_offsets().len() * self.sender.layout.page_size();
        let given = memory::total_len(pages);
        if given != expected || given > self.sender.layout.packet_bytes() {
            return Err(WriteError::Pages { given, expected });
        }
        self.write_ram(header, PageSource::Guest(pages))
    }

    /// Sends a SYNC without pages, then waits until the kernel has released all pages sent before it. The SYNC is sent first, so
    /// the peer need not wait.
    ///
    /// # Errors
    /// As [`ChannelWriter::write`] and [`ChannelWriter::flush`].
    pub fn write_sync(&mut self, packet_num: u64) -> Result<(), WriteError> {
        self.send_missing(0)?;
        self.sync.packet_num = packet_num;
        self.header.clear();
        self.sync.write(self.sender.layout, &mut self.header);
        // Without waiting for the pacer: all channels wait for a SYNC.
        self.sender.send_now(&self.header, Payload::Borrowed(&[]))?;
        self.epoch += 1;
        self.flush()
    }

    /// Tells the pacer that a round has ended, with the SYNC that was written last.
    pub fn end_round(&self) {
        if let Some(pacer) = &self.sender.pacer {
            pacer.end_round(self.sender.stats.snapshot().wire_bytes);
        }
    }

    /// Waits until the kernel has released all pages sent without a copy: the peer's kernel has their bytes, or this one
    /// has made a copy after all. Returns at once if no page was sent that way.
    ///
    /// # Errors
    /// When the connection breaks, is shut down, or acknowledges nothing for the stall timeout. The migration has failed then,
    /// and the kernel may hold pages for as long as it tries to deliver them.
    pub fn flush(&mut self) -> Result<(), WriteError> {
        let sender = &mut self.sender;
        match (&mut sender.zero_copy, sender.stream.socket()) {
            (Some(zero_copy), Some(socket)) => zero_copy.flush(socket, &sender.stats),
            _ => Ok(()),
        }
    }

    /// Ends the channel. Does not [`flush`](ChannelWriter::flush).
    pub fn finish(self) {
        self.sender.stream.finish();
    }

    fn write_ram(
        &mut self,
        header: &mut RamHeader,
        mut pages: PageSource<'_>,
    ) -> Result<(), WriteError> {
        self.send_missing(MANY_UNDECIDED)?;
        // A packet received with pages and a SYNC is sent as two.
        header.sync = false;
        if !header.is_empty() {
            self.follow_origin(header)?;
        }
        let page_bytes = pages.len();
        let takes_raw = self.store.as_ref().is_some_and(StoreWriter::takes_raw);
        let is_raw =
            page_bytes == 0 || self.frame.is_some() || !takes_raw && self.encoder.next_is_raw();
        let delta = match &mut self.delta {
            Some(delta) if is_raw && (page_bytes == 0 || !self.encoder.prefers_differences()) => {
                delta.pass_by(header);
                None
            }
            Some(delta) => delta.plan(header, self.epoch).then_some(delta),
            None => None,
        };
        let is_raw = is_raw && delta.is_none();
        let mut encoded_bytes = page_bytes;
        let payload = if is_raw {
            header.method = match self.frame {
                Some(_) => Method::Zstd,
                None => self.encoder.method(),
            };
            match pages {
                PageSource::Own(buffer, len) => match &self.frame {
                    Some(frame) => {
                        Payload::Framed(frame, &buffer[..len], self.sender.layout.page_size())
                    }
                    None => Payload::Buffer(buffer, len, None),
                },
                // A session may send the packet again, with the same bytes.
                PageSource::Guest(slices) if self.sender.stream.socket().is_none() => {
                    let len = copy_from_guest(slices, &mut self.payload).len();
                    Payload::Buffer(&mut self.payload, len, None)
                }
                PageSource::Guest(slices) => Payload::Guest(slices),
            }
        } else {
            let checks = Checks {
                pages: self.sender.stream.checks_pages(),
                frames: self.has_checksums,
            };
            let buffers = (&mut self.copy, &mut *self.payload);
            let stats = &self.sender.stats;
            if let Some(delta) = &delta {
                stats.delta_cache_bytes.set(delta.kept_bytes());
            }
            self.encoder.begin_encode();
            let versions = (delta, self.store.as_mut());
            let encode = || {
                encode(
                    &mut self.encoder,
                    versions,
                    header,
                    &mut pages,
                    checks,
                    buffers,
                )
            };
            let (encoded, time) = cpu_timed(encode);
            stats.add_encode(time);
            let encoded = encoded?;
            encoded_bytes -= encoded.references * self.sender.layout.page_size();
            if encoded.method == Method::Delta {
                let payload_len = encoded.len.unwrap_or(page_bytes);
                stats.add_differences(encoded.differences, page_bytes, payload_len);
            }
            header.method = encoded.method;
            match (encoded.len, pages) {
                (Some(len), _) => Payload::Buffer(&mut self.payload, len, encoded.sum),
                // Pages that do not shrink are sent as they are.
                (None, PageSource::Own(buffer, len)) => Payload::Buffer(buffer, len, None),
                (None, PageSource::Guest(_)) => Payload::Borrowed(&self.copy[..page_bytes]),
            }
        };
        header.set_payload_len(payload.len(), self.sender.layout)?;
        self.header.clear();
        header.write(self.sender.layout, &mut self.header);
        if let PacketEncoder::Adaptive(adaptive) = &mut self.encoder {
            adaptive.begin_send();
        }
        let wire_bytes = self.header.len() + payload.len();
        self.sender.send(&self.header, payload)?;
        self.sender.count(header);
        if let PacketEncoder::Adaptive(adaptive) = &mut self.encoder {
            let Sender { stats, stream, .. } = &self.sender;
            adaptive.end_send(encoded_bytes, wire_bytes, || {
                FarEnd::of(stream, Some(stats))
            });
        }
        Ok(())
    }
}

impl ChannelWriter {
    /// Sends the pages that the destination has not found in its store. Waits until at most so many bytes of pages have no verdict.
    fn send_missing(&mut self, most: usize) -> Result<(), WriteError> {
        let Some(mut store) = self.store.take_if(|store| store.has_undecided()) else {
            return Ok(());
        };
        let stream = self.sender.stream.clone();
        let reconnect = stream.session().map(|it| it.config().reconnect_timeout);
        let patience = stream.stall_timeout() + reconnect.unwrap_or_default();
        let deadline = Instant::now() + patience;
        let failed = |error| WriteError::of(error, patience);
        while let Some(missing) = store.next_missing(most, deadline).map_err(failed)? {
            let layout = self.sender.layout;
            let mut packet = Packet::new(layout);
            packet.ram_mut().block = missing.block;
            packet.ram_mut().set_pages(&missing.offsets, &[], layout)?;
            packet.pages_mut().copy_from_slice(&missing.pages);
            self.write(&mut packet)?;
        }
        self.store = Some(store);
        Ok(())
    }

    /// Over a session, keeps the method of the source's QEMU in the header. With [`restore`](Self::restore), the first packet's
    /// method replaces the encoder, if software can encode it.
    fn follow_origin(&mut self, header: &mut RamHeader) -> Result<(), WriteError> {
        let origin = header.origin.take();
        if self.sender.stream.socket().is_none() {
            let came = Some(header.method).filter(|method| method.is_stock());
            header.origin = origin.or(came);
        }
        if !mem::take(&mut self.restores) {
            return Ok(());
        }
        if origin == Some(Method::Zstd) && self.send_frames() {
            return Ok(());
        }
        let settings = origin.and_then(|origin| Settings::new(origin, None).ok());
        if let Some(settings) = settings {
            let (layout, health) = (self.sender.layout, self.sender.stats.health());
            self.encoder = Engines::software(settings).encoder(layout, health)?.into();
        }
        Ok(())
    }
}

/// The result of encoding a packet's pages.
#[derive(Default)]
struct Encoded {
    method: Method,
    /// Length of the payload in its buffer; `None` if the pages are the payload.
    len: Option<usize>,
    /// CRC-32C of the pages, if requested.
    sum: Option<u32>,
    /// Number of pages sent as differences.
    differences: usize,
    /// Number of pages sent as references to the receiver's store.
    references: usize,
}

/// Where checksums of pages go.
#[derive(Clone, Copy)]
struct Checks {
    /// With each encoded packet.
    pages: bool,
    /// But zstd frames have theirs.
    frames: bool,
}

/// Encodes `pages` into the second buffer, as differences where `delta` has planned some, or without those that the receiver's store
/// has. Guest memory is copied first, to the first buffer.
fn encode(
    encoder: &mut PacketEncoder,
    (delta, store): (Option<&mut Outgoing>, Option<&mut StoreWriter>),
    header: &RamHeader,
    pages: &mut PageSource<'_>,
    checks: Checks,
    (copy, out): (&mut Vec<u8>, &mut [u8]),
) -> Result<Encoded, EncodeError> {
    let pages = pages.gather(copy);
    if let Some(delta) = delta
        && let Some(made) = delta.encode(pages, out)?
    {
        return Ok(Encoded {
            method: Method::Delta,
            len: Some(made.len),
            sum: Some(crc32c::crc32c(pages)),
            differences: made.differences,
            ..Encoded::default()
        });
    }
    if let Some(store) = store
        && store.plan(pages, encoder.saves_bytes())
    {
        return encode_shared(encoder, store, header, pages, checks, out);
    }
    encode_all(encoder, pages, checks, out)
}

fn encode_all(
    encoder: &mut PacketEncoder,
    pages: &[u8],
    checks: Checks,
    out: &mut [u8],
) -> Result<Encoded, EncodeError> {
    let encoded = encoder.encode(pages, out)?;
    let is_encoded = !ptr::eq(encoded.payload.as_ptr(), pages.as_ptr());
    let is_summed = checks.pages && !(checks.frames && encoded.method == Method::ZstdFrames);
    Ok(Encoded {
        method: encoded.method,
        len: is_encoded.then_some(encoded.payload.len()),
        sum: is_summed.then(|| crc32c::crc32c(pages)),
        ..Encoded::default()
    })
}

/// Encodes the pages that are no references, and adds the table of the planned packet.
fn encode_shared(
    encoder: &mut PacketEncoder,
    store: &mut StoreWriter,
    header: &RamHeader,
    pages: &[u8],
    checks: Checks,
    out: &mut [u8],
) -> Result<Encoded, EncodeError> {
    let rest = store.rest(pages);
    let to_encode = rest.as_deref().unwrap_or(pages);
    let mut encoded = match (to_encode, store.encode(to_encode, out)?) {
        ([], _) => Encoded {
            len: Some(0),
            ..Encoded::default()
        },
        (_, Some(len)) => Encoded {
            method: Method::ZstdFrames,
            len: Some(len),
            sum: checks.pages.then(|| crc32c::crc32c(to_encode)),
            ..Encoded::default()
        },
        (_, None) => encode_all(encoder, to_encode, checks, out)?,
    };
    let len = match encoded.len {
        Some(len) => len,
        None if rest.is_none() && !store.takes_raw() => return Ok(encoded),
        None => {
            out[..to_encode.len()].copy_from_slice(to_encode);
            to_encode.len()
        }
    };
    let (payload, room) = out.split_at_mut(len);
    let table = store.table();
    if room.len() < table.len() || !table.write(encoded.method, room) {
        return match table.needs_store() {
            false => Ok(encoded),
            // No method of such a packet is unknown to its table, and each reference is shorter than its page.
            true => encode_all(encoder, pages, checks, out),
        };
    }
    (encoded.len, encoded.references) = (Some(len + table.len()), table.references.len());
    store.note(header, pages, rest, (encoded.method, payload));
    encoded.method = Method::Shared;
    Ok(encoded)
}

/// The payload of a packet.
enum Payload<'a> {
    Borrowed(&'a [u8]),
    /// The first bytes of a buffer that may be exchanged for another, and the checksum of the pages they encode.
    Buffer(&'a mut Box<[u8]>, usize, Option<u32>),
    /// Pages of this size, each with the same bytes before it.
    Framed(&'a [u8], &'a [u8], usize),
    /// Guest memory.
    Guest(&'a [VolatileSlice<'a>]),
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Borrowed(bytes) => bytes.len(),
            Self::Buffer(_, len, _) => *len,
            Self::Framed(frame, pages, page_size) => {
                pages.len() + pages.len() / page_size * frame.len()
            }
            Self::Guest(slices) => memory::total_len(slices),
        }
    }
}

/// Sends a writer's packets on its channel.
struct Sender {
    stream: Arc<Stream>,
    backlog: Backlog,
    /// Once zero-copy sends are enabled.
    zero_copy: Option<ZeroCopy>,
    stats: Arc<Stats>,
    pacer: Option<Arc<Pacer>>,
    layout: Layout,
}

impl Sender {
    /// Sends when the pacer allows it.
    fn send(&mut self, header: &[u8], payload: Payload<'_>) -> Result<(), WriteError> {
        if let Some(pacer) = &self.pacer {
            pacer.wait_for(header.len() + payload.len());
        }
        self.send_now(header, payload)
    }

    /// Counts a packet of pages that was sent.
    fn count(&self, header: &RamHeader) {
        let (normal, zero) = (header.normal_offsets().len(), header.zero_offsets().len());
        let page_bytes = normal * self.layout.page_size();
        self.stats.add_packet(normal, zero, page_bytes);
        if normal > 0 {
            self.stats.add_method(header.method);
        }
    }

    fn send_now(&mut self, header: &[u8], payload: Payload<'_>) -> Result<(), WriteError> {
        let stream = &*self.stream;
        let failed = |error| WriteError::of(error, stream.stall_timeout());
        let bytes = header.len() + payload.len();
        let socket = stream.socket();
        if let Some(socket) = socket {
            self.backlog.bound(socket);
        }
        match (payload, self.zero_copy.as_mut().zip(socket)) {
            (Payload::Guest(pages), Some((zero_copy, socket)))
                if zero_copy::is_worth_it(memory::total_len(pages)) =>
            {
                zero_copy.send(socket, header, pages, &self.stats)?;
            }
            (Payload::Guest(pages), _) => {
                stream.send_memory(header, pages).map_err(failed)?;
            }
            (Payload::Borrowed(bytes), _) => {
                stream.write_both(header, bytes).map_err(failed)?;
            }
            (Payload::Framed(frame, pages, page_size), _) => {
                let sent = stream.write_framed(header, frame, pages, page_size);
                sent.map_err(failed)?;
            }
            (Payload::Buffer(buffer, len, pages), _) => {
                let sent = stream.write_packet(header, buffer, len, pages);
                sent.map_err(failed)?;
            }
        }
        self.stats.add_sent(bytes);
        Ok(())
    }
}
