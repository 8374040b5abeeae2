//! The receiving end of a data channel: reads, checks and decodes packets.

use std::{
    fmt,
    io::{self, Read as _},
    mem,
    sync::Arc,
};

use multifd::{
    DEVICE_STATE_HEADER_LEN, DeviceStateHeader, Layout, Method, PRELUDE_LEN, PacketError,
    PacketKind, Prelude, RamHeader,
};
use thiserror::Error;
use vamoose_codec::{DecodeError, Decoder, Framing, checks_itself};
use vm_memory::VolatileSlice;

use crate::{
    DeltaError, DeltaReceiver, Packet, Stats, StoreLister, Stream,
    adaptive::meter::{Activity, WaitMeter},
    delta::{Incoming, Versions},
    is_stall, memory,
    page_store::{Parts, StoreReader},
    pages::{PageSink, copy_to_guest},
    socket::is_transient,
    stats::cpu_timed,
};

/// Reads and decodes the packets of one channel, in order. Each packet names its method, so a sender may change the method at any
/// time.
///
/// [`read`](ChannelReader::read) reads whole packets. To read pages into guest memory, read the header first
/// ([`read_header`](ChannelReader::read_header), or [`read_start`](ChannelReader::read_start) where device state may
/// arrive), look up where the pages belong, and read them there ([`read_pages`](ChannelReader::read_pages)).
pub struct ChannelReader {
    stream: Arc<Stream>,
    stats: Arc<Stats>,
    layout: Layout,
    decoder: Decoder,
    delta: Option<Incoming>,
    store: Option<StoreReader>,
    /// Pages encoded in a packet of method shared, before the pages of the store are added.
    rest: Vec<u8>,
    /// That packet's bases: pages of the store that its encoder referred to.
    earlier: Vec<u8>,
    /// All pages of that packet, before they are copied to guest memory.
    joined: Vec<u8>,
    header: Vec<u8>,
    payload: Box<[u8]>,
    /// Measures waits, to be reported to the sender over a session.
    meter: Option<WaitMeter>,
}

/// What [`ChannelReader::read`] and [`ChannelReader::read_header`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A packet.
    Packet,
    /// The sender closed the channel between two packets.
    End,
}

/// Why a channel cannot be read any further.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ReadError {
    #[error("cannot read")]
    Io(#[from] io::Error),
    #[error("the stream ended in the middle of a packet's {part}, after {got} of {wanted} bytes")]
    Truncated {
        part: &'static str,
        got: usize,
        wanted: usize,
    },
    /// No bytes for the stall timeout, in the middle of a packet.
    #[error("timed out after {seconds} s reading a packet's {part}")]
    TimedOut { part: &'static str, seconds: u64 },
    /// A header that no correct sender sends.
    #[error("bad packet")]
    Packet(#[from] PacketError),
    #[error("bad payload of {packet}")]
    Payload {
        packet: PacketName,
        #[source]
        fault: PayloadFault,
    },
    /// Device state on a channel for pages.
    #[error("a packet of device state came on a channel for pages only")]
    DeviceState,
    #[error("{given} bytes of memory were given for a packet whose pages are {expected} bytes")]
    Pages { given: usize, expected: usize },
}

/// Why a payload does not become the pages that were sent.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum PayloadFault {
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Differences that cannot be restored.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// References to a page store that this end does not have.
    #[error("it refers to a page store, and this end has offered none")]
    NoStore,
    /// The link changed the bytes, more than once.
    #[error("it cannot be read")]
    Corrupt(#[source] io::Error),
    /// All bytes arrived unchanged, but the decoded pages are not the ones sent.
    #[error(
        "its pages are not those that were sent: their CRC-32C is {found:#010x} after decoding and was {sent:#010x} before \
         encoding, though {path} carried the bytes between unchanged; the memory or a processor of one of the hosts is broken"
    )]
    Changed { path: String, found: u32, sent: u32 },
}

/// The packet an error is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketName {
    /// Its number, counted over all channels.
    pub packet_num: u64,
    /// Its RAM block.
    pub block: String,
    /// The first and the last offset of its normal pages in the RAM block, in bytes.
    pub offsets: Option<(u64, u64)>,
}

impl PacketName {
    fn of(header: &RamHeader) -> Self {
        let offsets = header.normal_offsets().iter().copied();
        Self {
            packet_num: header.packet_num,
            block: header.block.to_string(),
            offsets: offsets.clone().min().zip(offsets.max()),
        }
    }
}

impl fmt::Display for PacketName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "packet {} (RAM block {}", self.packet_num, self.block)?;
        if let Some((first, last)) = self.offsets {
            write!(f, ", pages at {first:#x} to {last:#x}")?;
        }
        f.write_str(")")
    }
}

impl ChannelReader {
    /// A reader of `stream`, whose initial packet has been read.
    pub fn new(stream: Arc<Stream>, layout: Layout, decoder: Decoder, stats: Arc<Stats>) -> Self {
        let meter = stream.socket().is_none().then(WaitMeter::of_receiver);
        Self {
            stream,
            stats,
            layout,
            decoder,
            delta: None,
            store: None,
            rest: Vec::new(),
            earlier: Vec::new(),
            joined: Vec::new(),
            header: vec![0; layout.ram_header_len().max(DEVICE_STATE_HEADER_LEN)],
            payload: vec![0; layout.max_payload()].into(),
            meter,
        }
    }

    /// Accepts differences to pages in `slots`, which all channels of a migration share.
    pub fn take_differences(&mut self, slots: Arc<DeltaReceiver>) {
        self.delta = Some(Incoming::new(Versions::Slots(slots), self.layout));
    }

    /// Keeps pages in the store of `lister`, and accepts references to it.
    pub fn share_pages(&mut self, lister: &StoreLister) {
        self.store = lister.reader(&self.stream, self.layout);
    }

    /// Accepts differences to the pages in guest memory, where their pages go
    /// ([`read_pages`](Self::read_pages)). Nothing else may write there.
    pub fn take_differences_in_place(&mut self) {
        self.delta = Some(Incoming::new(Versions::Memory, self.layout));
    }

    /// Reads the next packet into `packet`. Waits for its beginning without limit, and for the rest within the stall timeout.
    ///
    /// # Errors
    /// When the connection breaks or stalls in mid-packet, or the sender's bytes are wrong. The channel is unusable then, and
    /// the content of `packet` undefined.
    pub fn read(&mut self, packet: &mut Packet) -> Result<Received, ReadError> {
        let received = self.read_start(packet)?;
        if received == Received::Packet && packet.kind() == PacketKind::Ram {
            self.read_rest(packet)?;
        }
        Ok(received)
    }

    /// As [`ChannelReader::read`], but reads only the header of a RAM packet. If the header has normal pages,
    /// [`ChannelReader::read_rest`] or [`ChannelReader::read_pages`] must be called next.
    ///
    /// # Errors
    /// As [`ChannelReader::read`].
    pub fn read_start(&mut self, packet: &mut Packet) -> Result<Received, ReadError> {
        // No packet of either kind is shorter.
        let shortest = DEVICE_STATE_HEADER_LEN.min(self.layout.ram_header_len());
        let Some((prelude, got)) = self.begin(shortest)? else {
            return Ok(Received::End);
        };
        match prelude.kind() {
            PacketKind::Ram => {
                packet.device_state = None;
                self.finish_header(prelude, got, packet.ram_mut())?;
            }
            PacketKind::DeviceState => self.read_device_state(prelude, got, packet)?,
        }
        Ok(Received::Packet)
    }

    /// Reads the pages of the packet whose header was read last into `packet`.
    ///
    /// # Errors
    /// As [`ChannelReader::read`].
    pub fn read_rest(&mut self, packet: &mut Packet) -> Result<(), ReadError> {
        if packet.ram().method == Method::Shared {
            return self.read_shared(packet, false).map(drop);
        }
        let (header, pages) = packet.ram_parts();
        self.read_payload(header, PageSink::Own(pages))
    }

    /// As [`ChannelReader::read_rest`], but a zstd frame with a checksum of its pages stays encoded, for a receiver that decodes it
    /// and compares the checksum. Then returns true, and [`ChannelWriter::write_frame`](crate::ChannelWriter::write_frame) must be
    /// called next. The frame's bytes have arrived as they were sent, unless the stream is a plain connection.
    ///
    /// # Errors
    /// As [`ChannelReader::read`].
    pub fn read_frame(&mut self, packet: &mut Packet) -> Result<bool, ReadError> {
        if packet.ram().method == Method::Shared {
            return self.read_shared(packet, true);
        }
        let (header, pages) = packet.ram_parts();
        let pages_len = pages.len();
        let mut sink = PageSink::Own(pages);
        let received = self.receive_timed(header, &mut sink)?;
        if let Some(len) = received
            && header.method == Method::ZstdFrames
            && checks_itself(&self.payload[..len], pages_len)
        {
            mem::swap(&mut packet.pages, &mut self.payload);
            self.turn_to(Activity::Output);
            return Ok(true);
        }
        self.finish_payload(header, header.method, sink, received)?;
        Ok(false)
    }

    /// Reads the pages of a packet of method shared. Pages that the store does not have are removed from the packet; the source sends
    /// them again. A packet that needs no page of the store can stay encoded, as in [`read_frame`](Self::read_frame).
    fn read_shared(&mut self, packet: &mut Packet, may_stay: bool) -> Result<bool, ReadError> {
        let (header, pages) = packet.ram_parts();
        let parts = self.open_shared(header)?;
        header.method = parts.method;
        header.set_payload_len(parts.len, self.layout)?;
        let is_frame = parts.method == Method::ZstdFrames && !parts.needs_store;
        if may_stay && is_frame && checks_itself(&self.payload[..parts.len], pages.len()) {
            if let Some(store) = &mut self.store {
                store.keep(parts.method, &self.payload[..parts.len]);
            }
            mem::swap(&mut packet.pages, &mut self.payload);
            self.turn_to(Activity::Output);
            return Ok(true);
        }
        let missing = self.join_shared(header, parts, pages)?;
        packet.remove_pages(&missing);
        Ok(false)
    }

    /// Reads the payload of a packet of method shared, and the table in it.
    fn open_shared(&mut self, header: &RamHeader) -> Result<Parts, ReadError> {
        let len = self.receive_timed(header, &mut PageSink::Own(&mut []))?;
        let payload = &self.payload[..len.unwrap_or_default()];
        let store = self.store.as_mut();
        let store = store.ok_or_else(|| payload_error(header, PayloadFault::NoStore))?;
        let parts = store.open(payload, header.normal_offsets().len());
        parts.map_err(|error| payload_error(header, error))
    }

    /// Puts the pages of an opened packet together: those that are encoded in it, and those of the store. Returns the indices of pages
    /// that the store does not have; they are zero.
    fn join_shared(
        &mut self,
        header: &RamHeader,
        parts: Parts,
        pages: &mut [u8],
    ) -> Result<Vec<usize>, ReadError> {
        let encoded = pages.len() - parts.references * self.layout.page_size();
        let mut rest = mem::take(&mut self.rest);
        let to = match parts.needs_store {
            false => &mut *pages,
            true => {
                rest.resize(self.layout.packet_bytes(), 0);
                &mut rest[..encoded]
            }
        };
        let store = self.store.as_mut();
        let is_whole = store.is_some_and(|store| store.find_bases(&mut self.earlier));
        if encoded > 0 && is_whole {
            self.finish_payload(header, parts.method, PageSink::Own(to), Some(parts.len))?;
        }
        self.earlier.clear();
        let mut missing = Vec::new();
        if let Some(store) = &mut self.store {
            if is_whole {
                store.keep(parts.method, &self.payload[..parts.len]);
            }
            if parts.needs_store {
                missing = store.join(is_whole.then(|| &rest[..encoded]), pages)?;
            }
        }
        self.rest = rest;
        self.turn_to(Activity::Output);
        Ok(missing)
    }

    /// Reads the header of the next packet, waiting for it as [`ChannelReader::read`] does. If the header has normal pages,
    /// [`ChannelReader::read_pages`] must be called next.
    ///
    /// # Errors
    /// As [`ChannelReader::read`], and when the packet holds device state.
    pub fn read_header(&mut self, header: &mut RamHeader) -> Result<Received, ReadError> {
        let Some((prelude, got)) = self.begin(self.layout.ram_header_len())? else {
            return Ok(Received::End);
        };
        match prelude.kind() {
            PacketKind::Ram => {
                self.finish_header(prelude, got, header)?;
                Ok(Received::Packet)
            }
            PacketKind::DeviceState => Err(ReadError::DeviceState),
        }
    }

    /// Reads the normal pages of the packet whose header was read last, into `pages`, back to back in the
    /// order of its offsets. A slice may be a page or any run of bytes.
    ///
    /// # Errors
    /// As [`ChannelReader::read`]; the content of `pages` is undefined then. If `pages` does not have the length in `header`,
    /// nothing has been read.
    pub fn read_pages(
        &mut self,
        header: &RamHeader,
        pages: &[VolatileSlice<'_>],
    ) -> Result<(), ReadError> {
        let expected = header.normal_offsets().len() * self.layout.page_size();
        let given = memory::total_len(pages);
        if given != expected || given > self.layout.packet_bytes() {
            return Err(ReadError::Pages { given, expected });
        }
        if header.method == Method::Shared {
            let parts = self.open_shared(header)?;
            let mut joined = mem::take(&mut self.joined);
            joined.resize(expected, 0);
            // Missing pages come before the SYNC.
            self.join_shared(header, parts, &mut joined)?;
            copy_to_guest(&joined, pages);
            self.joined = joined;
            return Ok(());
        }
        self.read_payload(header, PageSink::Guest(pages))
    }

    /// Reads the payload of a RAM packet and decodes it into the sink, which is as long as the packet's pages.
    fn read_payload(
        &mut self,
        header: &RamHeader,
        mut sink: PageSink<'_>,
    ) -> Result<(), ReadError> {
        let received = self.receive_timed(header, &mut sink)?;
        self.finish_payload(header, header.method, sink, received)
    }

    fn receive_timed(
        &mut self,
        header: &RamHeader,
        sink: &mut PageSink<'_>,
    ) -> Result<Option<usize>, ReadError> {
        self.turn_to(Activity::Input);
        let received = self.receive_payload(header, sink);
        self.turn_to(Activity::Work);
        received.map_err(|error| match error {
            ReadError::Io(error) if error.kind() == io::ErrorKind::InvalidData => {
                payload_error(header, PayloadFault::Corrupt(error))
            }
            error => error,
        })
    }

    /// Decodes the first `received` bytes of the buffer, if there is anything to decode, and checks the pages.
    fn finish_payload(
        &mut self,
        header: &RamHeader,
        method: Method,
        mut sink: PageSink<'_>,
        received: Option<usize>,
    ) -> Result<(), ReadError> {
        let decoded = match received {
            None => Ok(()),
            Some(len) if method == Method::Delta => self.restore(len, &mut sink),
            Some(len) => self.decode_checked(method, len, &mut sink),
        };
        self.turn_to(Activity::Output);
        let shares = self.meter.as_mut().and_then(WaitMeter::shares);
        if let Some(shares) = shares {
            self.stream.report_wait(shares.input);
        }
        decoded.map_err(|fault| payload_error(header, fault))
    }

    /// Counts the time from now on as `activity`.
    fn turn_to(&mut self, activity: Activity) {
        if let Some(meter) = &mut self.meter {
            meter.switch_to(activity);
        }
    }

    fn decode_checked(
        &mut self,
        method: Method,
        len: usize,
        sink: &mut PageSink<'_>,
    ) -> Result<(), PayloadFault> {
        self.decode(method, len, sink)?;
        let Some(sent) = self.stream.pages_sum() else {
            return Ok(());
        };
        if sink.sum() == sent {
            return Ok(());
        }
        // Decode again, unless the decoder has moved on in its stream.
        let is_independent =
            vamoose_codec::info(method).is_some_and(|info| info.framing == Framing::Packet);
        if is_independent {
            self.decode(method, len, sink)?;
        }
        self.compare(sink.sum(), sent)
    }

    /// Compares the checksum of a packet's pages with the one sent.
    fn compare(&self, found: u32, sent: u32) -> Result<(), PayloadFault> {
        if found == sent {
            return Ok(());
        }
        self.stats.changed_packets.add(1);
        let path = self.stream.connection_name();
        Err(PayloadFault::Changed { path, found, sent })
    }

    /// Decodes the first `len` bytes of the buffer, which hold differences, into the sink.
    fn restore(&mut self, len: usize, sink: &mut PageSink<'_>) -> Result<(), PayloadFault> {
        let delta = self.delta.as_mut().ok_or(DeltaError::Unexpected)?;
        let sent = self.stream.pages_sum().ok_or(DeltaError::Unchecked)?;
        let (decoder, payload) = (&mut self.decoder, &self.payload[..len]);
        let (restored, time) = cpu_timed(|| delta.decode(decoder, payload, sink, sent));
        self.stats.add_decode(time);
        let found = restored?;
        if found != sent {
            return self.compare(found, sent);
        }
        for _ in 0..ATTEMPTS {
            match sink {
                PageSink::Own(_) => return Ok(()),
                PageSink::Guest(pages) => copy_to_guest(delta.decoded(), pages),
            }
            if sink.sum() == sent {
                return Ok(());
            }
        }
        self.compare(sink.sum(), sent)
    }

    /// Reads the payload of a RAM packet: pages of method none into the sink, an encoded payload into the buffer. Returns the
    /// length of an encoded payload.
    fn receive_payload(
        &mut self,
        header: &RamHeader,
        sink: &mut PageSink<'_>,
    ) -> Result<Option<usize>, ReadError> {
        if header.method == Method::None {
            // The header was checked: the payload is exactly as long as the pages.
            let wanted = sink.len();
            let got = match sink {
                PageSink::Own(pages) => self.stream.read_full(pages),
                PageSink::Guest(pages) => self.stream.receive_memory(pages),
            };
            check_complete(&self.stream, got, wanted, "payload")?;
            self.stats.add_received(wanted);
            return Ok(None);
        }
        let (len, max) = (header.payload_len(), self.payload.len());
        let payload = self.payload.get_mut(..len).ok_or_else(|| {
            // The header is of another layout than this reader's.
            let len = u32::try_from(len).unwrap_or(u32::MAX);
            PacketError::PayloadTooLong { len, max }
        })?;
        read_part(&self.stream, payload, "payload")?;
        self.stats.add_received(len);
        Ok(Some(len))
    }

    /// Decodes the first `len` bytes of the buffer into the sink.
    fn decode(
        &mut self,
        method: Method,
        len: usize,
        sink: &mut PageSink<'_>,
    ) -> Result<(), DecodeError> {
        let (decoder, payload) = (&mut self.decoder, &self.payload[..len]);
        let (result, time) = cpu_timed(|| match sink {
            PageSink::Own(pages) => decoder.decode_after(method, payload, &self.earlier, pages),
            PageSink::Guest(pages) => {
                let len = memory::total_len(pages);
                copy_to_guest(decoder.decode_borrowed(method, payload, len)?, pages);
                Ok(())
            }
        });
        self.stats.add_decode(time);
        result
    }

    /// Waits for a packet and reads its first bytes, 12 to `at_most`, into the header buffer. Returns their number; `None` when
    /// the stream ends instead.
    fn begin(&mut self, at_most: usize) -> Result<Option<(Prelude, usize)>, ReadError> {
        self.turn_to(Activity::Input);
        let mut got = loop {
            match (&*self.stream).read(&mut self.header[..at_most]) {
                Ok(0) => return Ok(None),
                Ok(got) => break got,
                // A sender may be silent between packets: it is paced, or its guest is idle.
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error.into()),
            }
        };
        if got < PRELUDE_LEN {
            read_part(&self.stream, &mut self.header[got..PRELUDE_LEN], "header")?;
            got = PRELUDE_LEN;
        }
        let mut prelude = [0; PRELUDE_LEN];
        prelude.copy_from_slice(&self.header[..PRELUDE_LEN]);
        Ok(Some((Prelude::parse(&prelude)?, got)))
    }

    /// Reads the rest of a RAM packet's header, of which `got` bytes are in the buffer.
    fn finish_header(
        &mut self,
        prelude: Prelude,
        got: usize,
        header: &mut RamHeader,
    ) -> Result<(), ReadError> {
        let bytes = &mut self.header[..self.layout.ram_header_len()];
        read_part(&self.stream, &mut bytes[got..], "header")?;
        header.parse(prelude, &bytes[PRELUDE_LEN..], self.layout)?;
        self.stats.add_received(bytes.len());
        self.turn_to(Activity::Output);
        if let Some(delta) = &self.delta {
            delta.note_arrival();
        }
        Ok(())
    }

    fn read_device_state(
        &mut self,
        prelude: Prelude,
        got: usize,
        packet: &mut Packet,
    ) -> Result<(), ReadError> {
        let mut rest = [0; DEVICE_STATE_HEADER_LEN - PRELUDE_LEN];
        let (there, missing) = rest.split_at_mut(got - PRELUDE_LEN);
        there.copy_from_slice(&self.header[PRELUDE_LEN..got]);
        read_part(&self.stream, missing, "header")?;
        let header = DeviceStateHeader::parse(prelude, &rest)?;
        let payload_len = header.payload_len();
        let state = packet.set_device_state(header);
        // The peer chooses the length, so the buffer grows only with the bytes that arrive.
        while state.len() < payload_len {
            let start = state.len();
            state.resize(payload_len.min(start + self.layout.packet_bytes()), 0);
            read_part(&self.stream, &mut state[start..], "device state")?;
        }
        self.stats
            .add_received(DEVICE_STATE_HEADER_LEN + payload_len);
        Ok(())
    }
}

/// How often pages are copied to guest memory before a wrong checksum is an error.
const ATTEMPTS: usize = 2;

fn payload_error(header: &RamHeader, fault: impl Into<PayloadFault>) -> ReadError {
    ReadError::Payload {
        packet: PacketName::of(header),
        fault: fault.into(),
    }
}

/// Fills `buffer` within the stall timeout.
fn read_part(stream: &Stream, buffer: &mut [u8], part: &'static str) -> Result<(), ReadError> {
    check_complete(stream, stream.read_full(buffer), buffer.len(), part)
}

/// Checks that a part was read completely.
fn check_complete(
    stream: &Stream,
    got: io::Result<usize>,
    wanted: usize,
    part: &'static str,
) -> Result<(), ReadError> {
    match got {
        Ok(got) if got == wanted => Ok(()),
        Ok(got) => Err(ReadError::Truncated { part, got, wanted }),
        Err(error) if is_stall(&error) => Err(ReadError::TimedOut {
            part,
            seconds: stream.stall_timeout().as_secs(),
        }),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use multifd::BlockName;
    use vamoose_codec::{Settings, encoder};

    use super::*;
    use crate::{Listener, Security, Session, SessionConfig, Sessions};

    const LAYOUT: Layout = Layout::X86;

    /// A stream of a session, and the server that accepts it.
    fn dial() -> (Session, Stream, Sessions) {
        let config = SessionConfig::new(Security::Insecure);
        let address = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::bind(&address, config.stall_timeout).unwrap();
        let path = listener.address().clone().into();
        let sessions = Sessions::new(vec![listener], config.clone()).unwrap();
        let (session, near) = Session::dial(vec![path], config.clone()).unwrap();
        (session, near, sessions)
    }

    fn reader(sessions: &Sessions) -> ChannelReader {
        let stream = sessions.next(Duration::from_secs(60)).unwrap().stream;
        let (stream, stats) = (Arc::new(stream), Arc::default());
        ChannelReader::new(stream, LAYOUT, Decoder::new(LAYOUT), stats)
    }

    /// Sends three pages by `method` with a wrong checksum.
    fn send_changed(stream: &Stream, method: Method) {
        let mut header = RamHeader::new(LAYOUT);
        header.packet_num = 7;
        header.block = BlockName::new(b"pc.ram").unwrap();
        header.method = method;
        header
            .set_pages(&[0x5000, 0x3000, 0x9000], &[], LAYOUT)
            .unwrap();
        let pages = vec![3; 3 * LAYOUT.page_size()];
        let settings = Settings::new(method, None).unwrap();
        let mut payload: Box<[u8]> = vec![0; LAYOUT.max_payload()].into();
        let mut encoder = encoder(&settings, LAYOUT).unwrap();
        let len = encoder.encode(&pages, &mut payload).unwrap().payload.len();
        header.set_payload_len(len, LAYOUT).unwrap();
        let mut bytes = Vec::new();
        header.write(LAYOUT, &mut bytes);
        let changed = crc32c::crc32c(&pages) ^ 1;
        stream
            .write_packet(&bytes, &mut payload, len, Some(changed))
            .unwrap();
    }

    /// A sender that sends now and then learns that its receiver waits for the network.
    #[test]
    fn waits_for_the_network_are_reported() {
        let (_session, near, sessions) = dial();
        let near = Arc::new(near);
        let mut header = RamHeader::new(LAYOUT);
        header.block = BlockName::new(b"pc.ram").unwrap();
        let offsets: Vec<_> = (0..128).map(|page| page << 12).collect();
        header.set_pages(&offsets, &[], LAYOUT).unwrap();
        let settings = Settings::new(Method::None, None).unwrap();
        let encoder = encoder(&settings, LAYOUT).unwrap();
        let mut writer =
            crate::ChannelWriter::new(near.clone(), LAYOUT, encoder, None, Arc::default());
        let mut memory = vec![7; 128 * LAYOUT.page_size()];
        let slices = [VolatileSlice::from(&mut memory[..])];
        // A packet that fits into the socket: nothing reads before the stream is accepted.
        writer.write_sync(0).unwrap();
        let mut reader = reader(&sessions);
        let received = std::thread::spawn(move || {
            let mut packet = Packet::new(LAYOUT);
            while reader.read(&mut packet).unwrap() == Received::Packet {}
        });
        assert_eq!(near.peer_wait(), None);
        let start = std::time::Instant::now();
        while near.peer_wait().is_none_or(|share| share < 0.3) {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{:?}",
                near.peer_wait()
            );
            std::thread::sleep(Duration::from_millis(10));
            writer.write_memory(&mut header, &slices).unwrap();
        }
        writer.finish();
        received.join().unwrap();
    }

    #[test]
    fn changed_pages_are_named() {
        // A method that is decoded again, and one whose decoder has moved on.
        for method in [Method::Lz4, Method::Zstd] {
            let (_session, near, sessions) = dial();
            send_changed(&near, method);
            let mut reader = reader(&sessions);
            let error = reader.read(&mut Packet::new(LAYOUT)).unwrap_err();
            let ReadError::Payload { packet, fault } = &error else {
                panic!("{error:?}");
            };
            let PayloadFault::Changed { path, .. } = fault else {
                panic!("{error:?}");
            };
            assert_eq!(packet.packet_num, 7);
            assert_eq!(packet.offsets, Some((0x3000, 0x9000)));
            assert!(path.contains("127.0.0.1"), "{path}");
            let text = error.to_string();
            assert!(
                text.contains("packet 7 (RAM block pc.ram, pages at 0x3000 to 0x9000)"),
                "{text}"
            );
        }
    }

    #[test]
    fn pages_are_checked_in_guest_memory() {
        let (_session, near, sessions) = dial();
        send_changed(&near, Method::Lz4);
        let mut reader = reader(&sessions);
        let mut header = RamHeader::new(LAYOUT);
        assert_eq!(reader.read_header(&mut header).unwrap(), Received::Packet);
        let mut memory = vec![0; 3 * LAYOUT.page_size()];
        let slices = [VolatileSlice::from(&mut memory[..])];
        let error = reader.read_pages(&header, &slices).unwrap_err();
        let ReadError::Payload { fault, .. } = &error else {
            panic!("{error:?}");
        };
        assert!(matches!(fault, PayloadFault::Changed { .. }), "{error:?}");
    }

    #[test]
    fn packets_without_differences_count_as_arrivals() {
        let (_session, near, sessions) = dial();
        send_changed(&near, Method::Lz4);
        let mut reader = reader(&sessions);
        let slots = Arc::new(DeltaReceiver::new(1 << 20, LAYOUT, Duration::ZERO));
        reader.take_differences(slots.clone());
        // A packet without differences.
        reader.read_start(&mut Packet::new(LAYOUT)).unwrap();
        assert_eq!(slots.arrived(), 1);
    }
}
