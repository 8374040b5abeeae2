//! Moves the bytes of frames from a connection to a reader; [`StreamState`](vamoose_session::stream::StreamState) interprets them.
//! No byte is delivered before its frame's checksum has been verified. A partial frame of a broken connection is discarded; the
//! peer sends it again.
//!
//! A frame that fits into the reader's buffer is received directly into it, any other into an own buffer first.

use std::{io, sync::Arc, time::Duration};

use vamoose_session::frame::{HEADER_LEN, Header};

use super::connection::{Connection, Receiver};
use crate::{memory::Left, pace::Member};

/// The receiving half of a stream.
#[derive(Default)]
pub(crate) struct Incoming {
    /// `None` while there is no connection.
    receiver: Option<Receiver>,
    /// The beginning of the next header.
    header: Vec<u8>,
    /// Payload of an intact frame, to be read from `at` on.
    whole: Vec<u8>,
    at: usize,
    /// Checksum of pages from the last data frame.
    pages: Option<u32>,
    /// Reservation of the next payload, under a limit.
    reserved: Option<f64>,
}

/// Destination of received bytes.
pub(crate) enum Target<'a, 'b> {
    Own(&'a mut [u8]),
    /// In the guest's memory.
    Guest(&'a mut Left<'b>),
}

/// A received payload whose checksum has not been verified.
pub(crate) struct Unverified {
    pub(crate) sum: u32,
    /// Whether they are in the reader's buffer already.
    is_direct: bool,
}

/// Why nothing was received.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The connection has failed.
    Connection(io::Error),
    /// There is no connection.
    Absent,
    /// Nothing was received for a while.
    Stalled,
    /// The bandwidth limit allows the next payload after this time.
    HeldUp(Duration),
}

impl Incoming {
    /// Checksum of pages from the frame read last.
    pub(crate) fn pages(&self) -> Option<u32> {
        self.pages
    }

    /// The current connection.
    pub(crate) fn connection(&self) -> Option<Arc<Connection>> {
        Some(self.receiver.as_ref()?.connection().clone())
    }

    /// Verified bytes that wait for a reader.
    pub(crate) fn waiting(&self) -> &[u8] {
        &self.whole[self.at..]
    }

    /// Replaces the connection. A partial frame is discarded.
    pub(crate) fn replace(&mut self, receiver: Option<Receiver>) {
        self.receiver = receiver;
        self.header.clear();
    }

    /// Waits up to `timeout` for received bytes, without reading them.
    pub(crate) fn has_bytes(&self, timeout: Duration) -> bool {
        let receiver = self.receiver.as_ref();
        receiver.is_some_and(|receiver| receiver.has_bytes(timeout))
    }

    /// Delivers verified bytes.
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

    /// Reads the next header. `stalled` is called whenever nothing was received for a while; its error ends the wait.
    pub(crate) fn read_header(
        &mut self,
        stalled: &mut dyn FnMut() -> Result<(), Failure>,
    ) -> Result<[u8; HEADER_LEN], Failure> {
        let receiver = self.receiver.as_mut().ok_or(Failure::Absent)?;
        while self.header.len() < HEADER_LEN {
            let mut piece = [0; HEADER_LEN];
            let wanted = HEADER_LEN - self.header.len();
            let read = again(stalled, || receiver.read(&mut piece[..wanted]))?;
            self.header.extend_from_slice(&piece[..read]);
        }
        let mut bytes = [0; HEADER_LEN];
        bytes.copy_from_slice(&self.header);
        self.header.clear();
        Ok(bytes)
    }

    /// Keeps to the limit of what is received, with the payload of `header`. Requests and answers are counted, and do not wait.
    pub(crate) fn keep_to(&mut self, arrivals: &Member, header: &Header) -> Result<(), Failure> {
        if !arrivals.is_limited() {
            self.reserved = None;
            return Ok(());
        }
        let reserved = *self
            .reserved
            .get_or_insert_with(|| arrivals.reserve(header.len));
        match arrivals.wait(reserved).filter(|_| header.len > SHORT) {
            Some(wait) => Err(Failure::HeldUp(wait)),
            None => {
                self.reserved = None;
                Ok(())
            }
        }
    }

    /// Reads the payload of `header`, directly into the target if it fits. The caller must accept or discard the payload.
    pub(crate) fn read_data(
        &mut self,
        header: &Header,
        target: &mut Target<'_, '_>,
        stalled: &mut dyn FnMut() -> Result<(), Failure>,
    ) -> Result<Unverified, Failure> {
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
            // Only if both are equally long: a system call fills all that is left of the memory.
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
                // The buffer grows with the received bytes: the length is not trusted.
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
        Ok(Unverified { sum, is_direct })
    }

    /// Delivers a verified payload.
    pub(crate) fn accept(
        &mut self,
        header: &Header,
        unverified: &Unverified,
        target: &mut Target<'_, '_>,
    ) -> usize {
        self.pages = header.pages;
        if !unverified.is_direct {
            return self.deliver(target);
        }
        if let Target::Guest(left) = target {
            left.advance(header.len);
        }
        header.len
    }

    /// Drops a payload, with what was left of the one before.
    pub(crate) fn discard(&mut self) {
        self.whole.clear();
        self.at = 0;
    }
}

/// Longest payload that does not wait for a limit.
const SHORT: usize = 8 << 10;

/// Step by which the buffer grows.
const GROW: usize = 128 << 10;

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

/// Reads at least one byte.
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
