//! One direction of a stream, as it comes in: frames to bytes. No byte is given to a reader before its frame's
//! checksum fits; what a broken connection leaves of a frame is forgotten, and comes again.
//!
//! A frame that fits into the reader's buffer is received there; another one in a buffer of its own first.

use std::{io, time::Duration};

use vamoose_session::frame::{FrameError, HEADER_LEN, Header, Kind};

use super::connection::Receiver;
use crate::memory::Left;

/// The receiving state of a stream.
pub(crate) struct Incoming {
    /// `None` while there is no connection.
    pub(crate) receiver: Option<Receiver>,
    /// All bytes before this offset have come, and were right.
    received: u64,
    header: PartialHeader,
    /// A frame of data whose header has come, and whose bytes nobody has asked for yet.
    announced: Option<Header>,
    /// Bytes of a frame that was right, to be read from `at` on.
    whole: Vec<u8>,
    at: usize,
    /// The checksum of pages that came with the last frame of data.
    pages: Option<u32>,
    /// What the peer has received, by the last header.
    peer_has: u64,
    has_ended: bool,
}

/// Where a reader wants bytes.
pub(crate) enum Target<'a, 'b> {
    Own(&'a mut [u8]),
    /// In the guest's memory.
    Guest(&'a mut Left<'b>),
}

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// So many bytes are in the reader's buffer.
    Bytes(usize),
    /// A header: of a frame without bytes, or of one whose bytes are next.
    Header,
    /// The stream's end.
    End,
    /// The peer has given the stream up.
    Abort,
}

/// Why nothing came.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The connection is of no use any more.
    Connection(io::Error),
    /// A frame was changed on its way.
    Corrupt(Corruption),
    /// The peer breaks the protocol.
    Protocol(Violation),
    /// There is no connection.
    Absent,
    /// Nothing came for a while.
    Stalled,
}

/// A frame that was changed on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Corruption {
    #[error("{0}")]
    Header(FrameError),
    #[error(
        "{len} bytes at offset {offset} were changed on their way: their checksum is {found:#010x}, not {expected:#010x}"
    )]
    Bytes {
        offset: u64,
        len: usize,
        found: u32,
        expected: u32,
    },
}

/// What a correct peer does not send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Violation {
    #[error("{0}")]
    Frame(FrameError),
    #[error("a frame at offset {found} where {expected} comes next")]
    Gap { found: u64, expected: u64 },
    #[error("data behind the end of the stream")]
    BehindEnd,
}

#[derive(Default)]
struct PartialHeader {
    bytes: Vec<u8>,
}

impl Incoming {
    /// A stream that begins at offset `first`.
    pub(crate) fn new(first: u64) -> Self {
        Self {
            receiver: None,
            received: first,
            header: PartialHeader::default(),
            announced: None,
            whole: Vec::new(),
            at: 0,
            pages: None,
            peer_has: 0,
            has_ended: false,
        }
    }

    /// All before this offset has come.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// The peer has received all before this offset, by what it has said last.
    pub(crate) fn peer_has(&self) -> u64 {
        self.peer_has
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// The checksum of pages that came with the frame which was read last.
    pub(crate) fn pages(&self) -> Option<u32> {
        self.pages
    }

    /// Whether a frame of data waits for a reader: nothing behind it can be seen before it is read.
    pub(crate) fn is_announced(&self) -> bool {
        self.announced.is_some()
    }

    /// Whole bytes that wait for a reader.
    pub(crate) fn waiting(&self) -> &[u8] {
        &self.whole[self.at..]
    }

    /// Puts another connection in the place of the last, if there is one. What has come of a frame is forgotten.
    pub(crate) fn replace(&mut self, receiver: Option<Receiver>) {
        self.receiver = receiver;
        self.header.bytes.clear();
        self.announced = None;
        self.peer_has = 0;
    }

    /// Whether something comes within `timeout`, as far as can be told without reading.
    pub(crate) fn has_bytes(&self, timeout: Duration) -> bool {
        self.receiver
            .as_ref()
            .is_some_and(|receiver| receiver.has_bytes(timeout))
    }

    /// Bytes that have come already.
    pub(crate) fn deliver(&mut self, target: &mut Target<'_, '_>) -> usize {
        let waiting = &self.whole[self.at..];
        let taken = match target {
            Target::Own(out) => {
                let len = out.len().min(waiting.len());
                out[..len].copy_from_slice(&waiting[..len]);
                len
            }
            Target::Guest(left) => {
                let len = left.fill(waiting);
                left.advance(len);
                len
            }
        };
        self.at += taken;
        if self.at == self.whole.len() {
            self.whole.clear();
            self.at = 0;
        }
        taken
    }

    /// Receives the next header, or the bytes that the last one has announced, if a `target` is given for them.
    /// `stalled` is asked whenever nothing has come for a while; its failure ends the wait.
    pub(crate) fn receive(
        &mut self,
        target: Option<&mut Target<'_, '_>>,
        stalled: &mut dyn FnMut() -> Result<(), Failure>,
    ) -> Result<Event, Failure> {
        if let Some(header) = self.announced {
            return match target {
                Some(target) => self.receive_data(header, target, stalled).map(Event::Bytes),
                None => Ok(Event::Header),
            };
        }
        let receiver = self.receiver.as_mut().ok_or(Failure::Absent)?;
        let header = self.header.read(receiver, stalled)?;
        self.peer_has = header.received;
        match header.kind {
            Kind::Data | Kind::End if self.has_ended => {
                Err(Failure::Protocol(Violation::BehindEnd))
            }
            Kind::Data | Kind::End if header.offset != self.received => {
                let (found, expected) = (header.offset, self.received);
                Err(Failure::Protocol(Violation::Gap { found, expected }))
            }
            Kind::Data => {
                self.announced = Some(header);
                Ok(Event::Header)
            }
            Kind::Acknowledge => Ok(Event::Header),
            Kind::End => {
                self.has_ended = true;
                self.received = header.end();
                Ok(Event::End)
            }
            Kind::Abort => Ok(Event::Abort),
        }
    }

    /// Receives the bytes behind `header`, which has come, and gives them to the reader if they are right.
    fn receive_data(
        &mut self,
        header: Header,
        target: &mut Target<'_, '_>,
        stalled: &mut dyn FnMut() -> Result<(), Failure>,
    ) -> Result<usize, Failure> {
        let receiver = self.receiver.as_mut().ok_or(Failure::Absent)?;
        let is_checked = header.check.is_some();
        let mut sum = 0;
        let is_direct = match target {
            Target::Own(out) if out.len() >= header.len => {
                let out = &mut out[..header.len];
                fill(receiver, out, stalled, &mut |bytes| {
                    sum = add(sum, bytes, is_checked)
                })?;
                true
            }
            // Exactly: a system call fills all of what is left.
            Target::Guest(left) if receiver.is_plain() && left.bytes() == header.len => {
                let mut rest = **left;
                while rest.bytes() > 0 {
                    let read = again(stalled, || receiver.read_memory(&rest))?;
                    if is_checked {
                        rest.for_each(read, &mut |bytes| sum = add(sum, bytes, true));
                    }
                    rest.advance(read);
                }
                true
            }
            _ => {
                self.whole.clear();
                self.at = 0;
                // The buffer grows with the bytes that really come.
                while self.whole.len() < header.len {
                    let start = self.whole.len();
                    self.whole.resize(header.len.min(start + GROW), 0);
                    let piece = &mut self.whole[start..];
                    let filled = fill(receiver, piece, stalled, &mut |bytes| {
                        sum = add(sum, bytes, is_checked);
                    });
                    if filled.is_err() {
                        self.whole.clear();
                    }
                    filled?;
                }
                false
            }
        };
        if let Some(expected) = header.check
            && sum != expected
        {
            self.whole.clear();
            return Err(Failure::Corrupt(Corruption::Bytes {
                offset: header.offset,
                len: header.len,
                found: sum,
                expected,
            }));
        }
        self.announced = None;
        self.pages = header.pages;
        self.received = header.end();
        if !is_direct {
            return Ok(self.deliver(target));
        }
        if let Target::Guest(left) = target {
            left.advance(header.len);
        }
        Ok(header.len)
    }
}

/// What a frame's own buffer grows by.
const GROW: usize = 128 << 10;

impl PartialHeader {
    fn read(
        &mut self,
        receiver: &mut Receiver,
        stalled: &mut dyn FnMut() -> Result<(), Failure>,
    ) -> Result<Header, Failure> {
        while self.bytes.len() < HEADER_LEN {
            let mut piece = [0; HEADER_LEN];
            let wanted = HEADER_LEN - self.bytes.len();
            let read = again(stalled, || receiver.read(&mut piece[..wanted]))?;
            self.bytes.extend_from_slice(&piece[..read]);
        }
        let mut bytes = [0; HEADER_LEN];
        bytes.copy_from_slice(&self.bytes);
        self.bytes.clear();
        Header::decode(&bytes).map_err(|error| match error {
            FrameError::Header { .. } => Failure::Corrupt(Corruption::Header(error)),
            error => Failure::Protocol(Violation::Frame(error)),
        })
    }
}

fn fill(
    receiver: &mut Receiver,
    out: &mut [u8],
    stalled: &mut dyn FnMut() -> Result<(), Failure>,
    each: &mut dyn FnMut(&[u8]),
) -> Result<(), Failure> {
    let mut filled = 0;
    while filled < out.len() {
        let read = again(stalled, || receiver.read(&mut out[filled..]))?;
        each(&out[filled..filled + read]);
        filled += read;
    }
    Ok(())
}

/// Reads until something has come.
fn again(
    stalled: &mut dyn FnMut() -> Result<(), Failure>,
    mut read: impl FnMut() -> io::Result<usize>,
) -> Result<usize, Failure> {
    loop {
        match read() {
            Ok(0) => return Err(Failure::Connection(io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => return Ok(read),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stalled()?,
            Err(error) => return Err(Failure::Connection(error)),
        }
    }
}

fn add(sum: u32, bytes: &[u8], is_checked: bool) -> u32 {
    match is_checked {
        true => crc32c::crc32c_append(sum, bytes),
        false => sum,
    }
}
