//! Written and unacknowledged bytes of one direction of a stream. They are sent again on the next connection.

use std::{collections::VecDeque, mem};

use thiserror::Error;

use crate::frame::{Header, Kind, MAX_LEN};

/// A buffer for a packet's payload. A writer gives it to the window and gets it back once it is acknowledged, so that the payload
/// need not be copied.
pub type Buffer = Box<[u8]>;

/// Frames from the first that is not acknowledged to the last that was written.
#[derive(Debug, Default)]
pub struct Window {
    frames: VecDeque<Frame>,
    /// Offset of the first frame: the peer has received everything before it.
    acknowledged: u64,
    /// Offset of the first frame that has not been lent for the current connection.
    unsent: u64,
    /// Offset of the next frame.
    next: u64,
    /// Whether the stream has ended.
    has_ended: bool,
    /// Buffers for the next packets. The one used last comes first: its bytes may still be in a cache.
    free: Vec<Buffer>,
    /// Buffers for the next copies, and their total capacity: at most [`MAX_SPARE`].
    spare: Vec<Vec<u8>>,
    spare_bytes: usize,
}

/// Limit for the capacity of buffers that are kept for reuse.
const MAX_SPARE: usize = 4 << 20;

/// One frame that can be sent again.
#[derive(Debug)]
pub struct Frame {
    /// Its header. `received` is 0: it is filled in when the frame is sent.
    pub header: Header,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Copy(Vec<u8>),
    /// The first bytes of a packet's buffer.
    Packet(Buffer),
    None,
    /// A sender has them.
    Lent,
}

/// Frames that are being sent, without a lock. [`Window::give_back`] takes them back.
#[derive(Debug, Default)]
pub struct Loan {
    frames: [Option<Frame>; 2],
}

impl Loan {
    /// The frames, in order.
    pub fn frames(&self) -> impl Iterator<Item = &Frame> {
        self.frames.iter().flatten()
    }
}

/// Bytes that cannot be written.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum PushError {
    #[error("a frame has 1 to {MAX_LEN} bytes, not {0}")]
    Length(usize),
    #[error("the stream has been ended")]
    Ended,
    #[error("a stream has at most 2^64 - 1 bytes")]
    TooLong,
}

/// A peer acknowledges bytes that it cannot have.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "the peer acknowledges byte {received}, which is not the end of a frame between {acknowledged} and {next}"
)]
pub struct AcknowledgeError {
    received: u64,
    acknowledged: u64,
    next: u64,
}

impl Window {
    /// A window whose stream begins at offset `first`.
    pub fn new(first: u64) -> Self {
        Self {
            acknowledged: first,
            unsent: first,
            next: first,
            ..Self::default()
        }
    }

    /// Number of unacknowledged bytes; the stream's end counts as one.
    pub fn unacknowledged(&self) -> usize {
        // A window is never larger than memory.
        usize::try_from(self.next - self.acknowledged).unwrap_or(usize::MAX)
    }

    /// Whether everything written has been acknowledged, including the stream's end.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Offset of the next frame.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Whether the stream's end was written.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Offset up to which everything has been acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Offset of the first frame that has not been lent for the current connection.
    pub fn unsent(&self) -> u64 {
        self.unsent
    }

    /// Makes all unacknowledged frames due again, for a new connection.
    pub fn rewind(&mut self) {
        self.unsent = self.acknowledged;
    }

    /// The next frames that have not been sent on the current connection, two at most; `None` if there are none, or a sender still
    /// has the next one.
    pub fn lend(&mut self) -> Option<Loan> {
        if self.unsent == self.next {
            return None;
        }
        let unsent = self.unsent;
        let first = self
            .frames
            .partition_point(|frame| frame.header.offset < unsent);
        let mut loan = Loan::default();
        let next = self.frames.range_mut(first..);
        let here = next.take_while(|frame| !matches!(frame.bytes, Bytes::Lent));
        for (lent, frame) in loan.frames.iter_mut().zip(here) {
            self.unsent = frame.header.end();
            *lent = Some(Frame {
                header: frame.header,
                bytes: mem::replace(&mut frame.bytes, Bytes::Lent),
            });
        }
        loan.frames().next()?;
        Some(loan)
    }

    /// Takes lent frames back. They may have been acknowledged meanwhile.
    pub fn give_back(&mut self, loan: Loan) {
        for lent in loan.frames.into_iter().flatten() {
            let offset = lent.header.offset;
            let found = (self.frames).binary_search_by_key(&offset, |frame| frame.header.offset);
            match found.ok().and_then(|at| self.frames.get_mut(at)) {
                Some(frame) => frame.bytes = lent.bytes,
                None => self.recycle(lent.bytes),
            }
        }
    }

    fn recycle(&mut self, bytes: Bytes) {
        match bytes {
            Bytes::Packet(buffer) => self.free.push(buffer),
            Bytes::Copy(copy) if self.spare_bytes + copy.capacity() <= MAX_SPARE => {
                self.spare_bytes += copy.capacity();
                self.spare.push(copy);
            }
            Bytes::Copy(_) | Bytes::None | Bytes::Lent => {}
        }
    }

    /// All frames.
    pub fn frames(&self) -> impl Iterator<Item = &Frame> {
        self.frames.iter()
    }

    /// Adds a frame with a copy of `bytes`, at least 1 and at most [`MAX_LEN`].
    ///
    /// # Errors
    /// When the length is wrong, or the stream has been ended; nothing is added then.
    pub fn push_copy(&mut self, bytes: &[u8], sums: Sums) -> Result<(), PushError> {
        let header = self.header(Kind::Data, bytes.len())?;
        let mut copy = self.spare.pop().unwrap_or_default();
        self.spare_bytes -= copy.capacity();
        copy.clear();
        copy.extend_from_slice(bytes);
        self.push(sums.on(header), Bytes::Copy(copy));
        Ok(())
    }

    /// Adds a frame with the first `len` bytes of `buffer`, and replaces `buffer` by another one of the same size.
    ///
    /// # Errors
    /// As [`Window::push_copy`]; `buffer` is unchanged then.
    pub fn push_buffer(
        &mut self,
        buffer: &mut Buffer,
        len: usize,
        sums: Sums,
    ) -> Result<(), PushError> {
        if len > buffer.len() {
            return Err(PushError::Length(len));
        }
        let header = self.header(Kind::Data, len)?;
        let free = match self.free.pop() {
            Some(free) if free.len() == buffer.len() => free,
            // No buffer has come back yet, or it is of another layout.
            _ => vec![0; buffer.len()].into(),
        };
        let full = mem::replace(buffer, free);
        self.push(sums.on(header), Bytes::Packet(full));
        Ok(())
    }

    /// Adds the stream's end.
    ///
    /// # Errors
    /// When it has been ended already.
    pub fn push_end(&mut self) -> Result<(), PushError> {
        let header = self.header(Kind::End, 0)?;
        self.has_ended = true;
        self.push(header, Bytes::None);
        Ok(())
    }

    /// Releases everything before `received`. Returns whether anything was released.
    ///
    /// # Errors
    /// When `received` is neither the end of a frame in the window nor what was acknowledged last.
    pub fn acknowledge(&mut self, received: u64) -> Result<bool, AcknowledgeError> {
        if received == self.acknowledged {
            return Ok(false);
        }
        let found = (self.frames).binary_search_by_key(&received, |frame| frame.header.end());
        let last = found.map_err(|_| AcknowledgeError {
            received,
            acknowledged: self.acknowledged,
            next: self.next,
        })?;
        for _ in 0..=last {
            if let Some(frame) = self.frames.pop_front() {
                self.recycle(frame.bytes);
            }
        }
        self.acknowledged = received;
        self.unsent = self.unsent.max(received);
        Ok(true)
    }

    /// The header of the next frame.
    fn header(&self, kind: Kind, len: usize) -> Result<Header, PushError> {
        if self.has_ended {
            return Err(PushError::Ended);
        }
        if kind == Kind::Data && !(1..=MAX_LEN).contains(&len) {
            return Err(PushError::Length(len));
        }
        let mut header = Header::empty(kind, self.next, 0);
        header.len = len;
        // One more byte, for the end.
        match self.next.checked_add(len as u64 + 1) {
            Some(_) => Ok(header),
            None => Err(PushError::TooLong),
        }
    }

    fn push(&mut self, header: Header, bytes: Bytes) {
        self.next = header.end();
        self.frames.push_back(Frame { header, bytes });
    }
}

/// Checksums of a frame.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// Checksum of its payload.
    pub check: Option<u32>,
    /// Checksum of the pages that it encodes.
    pub pages: Option<u32>,
}

impl Sums {
    /// Checksum of bytes that are not pages, if payloads are checked.
    pub fn of(bytes: &[u8], is_checked: bool) -> Self {
        Self {
            check: is_checked.then(|| crc32c::crc32c(bytes)),
            pages: None,
        }
    }

    fn on(self, header: Header) -> Header {
        Header {
            check: self.check,
            pages: self.pages,
            ..header
        }
    }
}

impl Frame {
    /// The payload.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Copy(bytes) => bytes,
            Bytes::Packet(buffer) => &buffer[..self.header.len.min(buffer.len())],
            Bytes::None | Bytes::Lent => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Copy(Vec<u8>),
        Packet(usize),
        Acknowledge(usize),
        End,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let bytes = prop::collection::vec(any::<u8>(), 1..50);
        let step = prop_oneof![
            bytes.prop_map(Step::Copy),
            (1..100usize).prop_map(Step::Packet),
            (0..6usize).prop_map(Step::Acknowledge),
            Just(Step::End),
        ];
        prop::collection::vec(step, 0..40)
    }

    proptest! {
        /// What is kept is what was written and not acknowledged, in order, and nothing else is accepted.
        #[test]
        fn a_window_keeps_what_is_not_acknowledged(first in 0u64..1000, steps in steps()) {
            let mut window = Window::new(first);
            let mut model: VecDeque<(u64, Vec<u8>)> = VecDeque::new();
            let (mut next, mut fill) = (first, 0u8);
            for step in steps {
                if window.has_ended() && !matches!(step, Step::Acknowledge(_)) {
                    continue;
                }
                match step {
                    Step::Copy(bytes) => {
                        window.push_copy(&bytes, Sums::of(&bytes, true)).unwrap();
                        next += bytes.len() as u64;
                        model.push_back((next, bytes));
                    }
                    Step::Packet(len) => {
                        fill = fill.wrapping_add(1);
                        let mut buffer: Buffer = vec![fill; 100].into();
                        window.push_buffer(&mut buffer, len, Sums::default()).unwrap();
                        prop_assert_eq!(buffer.len(), 100);
                        next += len as u64;
                        model.push_back((next, vec![fill; len]));
                    }
                    Step::Acknowledge(count) => {
                        let count = count.min(model.len());
                        let gone: Vec<_> = model.drain(..count).collect();
                        if let Some((end, bytes)) = gone.last() {
                            if bytes.len() > 1 {
                                prop_assert!(window.acknowledge(end - 1).is_err());
                            }
                            prop_assert_eq!(window.acknowledge(*end), Ok(true));
                            prop_assert_eq!(window.acknowledge(*end), Ok(false));
                        }
                    }
                    Step::End => {
                        window.push_end().unwrap();
                        next += 1;
                        model.push_back((next, Vec::new()));
                    }
                }
                prop_assert!(window.acknowledge(next + 1).is_err());
                let kept: Vec<_> = window.frames().map(|frame| (frame.header.end(), frame.bytes().to_vec())).collect();
                prop_assert_eq!(kept, Vec::from(model.clone()));
                prop_assert_eq!(window.is_empty(), model.is_empty());
                prop_assert_eq!(window.next(), next);
            }
        }
    }

    #[test]
    fn buffers_come_back_when_they_are_acknowledged() {
        let mut window = Window::new(0);
        let mut buffer: Buffer = vec![1; 8].into();
        let first = buffer.as_ptr();
        window.push_buffer(&mut buffer, 8, Sums::default()).unwrap();
        assert_ne!(buffer.as_ptr(), first);
        window.acknowledge(8).unwrap();
        window.push_buffer(&mut buffer, 8, Sums::default()).unwrap();
        assert_eq!(buffer.as_ptr(), first);
    }

    #[test]
    fn lent_frames_come_back_into_their_places() {
        let mut window = Window::new(0);
        let mut buffer: Buffer = vec![1; 8].into();
        let packet = buffer.as_ptr();
        window.push_copy(&[1; 4], Sums::default()).unwrap();
        window.push_buffer(&mut buffer, 8, Sums::default()).unwrap();
        window.push_copy(&[3; 2], Sums::default()).unwrap();
        let (first, second) = (window.lend().unwrap(), window.lend().unwrap());
        assert_eq!(first.frames().map(|it| it.header.len).sum::<usize>(), 12);
        assert_eq!(second.frames().count(), 1);
        assert!(window.lend().is_none());
        // The peer is faster than the system call.
        window.acknowledge(12).unwrap();
        window.give_back(first);
        window.give_back(second);
        window.rewind();
        let again = window.lend().unwrap();
        assert_eq!(again.frames().next().unwrap().bytes(), [3; 2]);
        window.give_back(again);
        // Its buffer is free again.
        window.push_buffer(&mut buffer, 8, Sums::default()).unwrap();
        assert_eq!(buffer.as_ptr(), packet);
    }

    /// A new connection must not carry a frame without its bytes.
    #[test]
    fn frames_that_a_sender_has_are_not_lent_again() {
        let mut window = Window::new(0);
        window.push_copy(&[1; 4], Sums::default()).unwrap();
        let away = window.lend().unwrap();
        window.push_copy(&[2; 4], Sums::default()).unwrap();
        window.rewind();
        assert!(window.lend().is_none());
        window.give_back(away);
        let both = window.lend().unwrap();
        let bytes: Vec<_> = both.frames().map(Frame::bytes).collect();
        assert_eq!(bytes, [[1; 4], [2; 4]]);
    }

    #[test]
    fn what_was_acknowledged_is_not_taken_back() {
        let mut window = Window::new(0);
        window.push_copy(&[1; 4], Sums::default()).unwrap();
        window.push_copy(&[1; 4], Sums::default()).unwrap();
        window.acknowledge(8).unwrap();
        assert!(window.acknowledge(4).is_err());
        assert_eq!(window.acknowledge(8), Ok(false));
    }

    #[test]
    fn what_no_frame_can_hold_is_not_written() {
        let mut window = Window::new(0);
        let mut buffer: Buffer = vec![1; 8].into();
        assert_eq!(
            window.push_copy(&[], Sums::default()),
            Err(PushError::Length(0))
        );
        let long = vec![0; MAX_LEN + 1];
        assert_eq!(
            window.push_copy(&long, Sums::default()),
            Err(PushError::Length(MAX_LEN + 1))
        );
        let pushed = window.push_buffer(&mut buffer, 9, Sums::default());
        assert_eq!(pushed, Err(PushError::Length(9)));
        assert_eq!(*buffer, [1; 8]);
        assert!(window.is_empty());
        window.push_end().unwrap();
        assert_eq!(
            window.push_copy(&[1], Sums::default()),
            Err(PushError::Ended)
        );
        assert_eq!(window.push_end(), Err(PushError::Ended));
    }

    /// The offsets' last values: nothing wraps, and the end still fits.
    #[test]
    fn a_stream_ends_before_its_offsets_do() {
        let mut window = Window::new(u64::MAX - 9);
        window.push_copy(&[1; 8], Sums::default()).unwrap();
        assert_eq!(window.next(), u64::MAX - 1);
        assert_eq!(
            window.push_copy(&[1], Sums::default()),
            Err(PushError::TooLong)
        );
        window.push_end().unwrap();
        for frame in window.frames() {
            assert_eq!(Header::decode(&frame.header.encode()), Ok(frame.header));
        }
        assert_eq!(window.acknowledge(u64::MAX), Ok(true));
        assert!(window.is_empty());
        assert_eq!(window.unacknowledged(), 0);
    }

    #[test]
    fn checksums_are_of_what_was_written() {
        let mut window = Window::new(0);
        window
            .push_copy(b"123456789", Sums::of(b"123456789", true))
            .unwrap();
        let mut buffer: Buffer = (*b"12345678").into();
        let sums = Sums {
            check: Some(1),
            pages: Some(2),
        };
        window.push_buffer(&mut buffer, 4, sums).unwrap();
        let frames: Vec<_> = window.frames().collect();
        // The check value of CRC-32C (RFC 3720, appendix B.4, and the catalogue of CRCs).
        assert_eq!(frames[0].header.check, Some(0xe306_9283));
        assert_eq!(
            (frames[1].header.check, frames[1].header.pages),
            (Some(1), Some(2))
        );
        assert_eq!(frames[1].bytes(), b"1234");
    }
}
