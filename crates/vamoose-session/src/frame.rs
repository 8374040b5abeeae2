//! Frames: the units of a session's connection after its handshake.
//!
//! ```text
//!  0  kind     u8    Data, Acknowledge, End, Abort
//!  1  flags    u8    bit 0: `check` is present, bit 1: `pages` is present
//!  2  waited   u8    share of its time that the sender's reader waits for the network: 1 none, 255 all, 0 unknown
//!  3  urgency  u8    of the guest whose bytes the sender sends: 0 filling, 1 finishing, 2 paused
//!  4  length   u32   length of the payload: 1 to 1 MiB for Data, 0 for the others
//!  8  offset   u64   offset of the payload in the stream; for End, the stream's length
//! 16  received u64   bytes that the sender of the frame has received in the other direction
//! 24  pages    u32   CRC-32C of the guest's pages that the payload encodes
//! 28  check    u32   CRC-32C of the payload
//! 32  share    u32   KiB per second at most that the sender wants to receive on all streams of the session; 0 for any
//! 36  header   u32   CRC-32C of the preceding 36 bytes
//! ```
//!
//! Numbers are big-endian. Fields listed as 0 must be 0. Frames follow each other without a gap. `End` counts as one byte, so that
//! it is acknowledged like data. `Acknowledge` carries only `received`, as every frame does: it is the heartbeat of a connection
//! that has nothing to send.

use std::ops::Range;

use thiserror::Error;

use crate::fields::{by_code, put, take};

/// Length of a frame's header.
pub const HEADER_LEN: usize = 40;

/// Limit of a frame's payload.
pub const MAX_LEN: usize = 1 << 20;

/// The header of one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the frame.
    pub kind: Kind,
    /// Length of the payload.
    pub len: usize,
    /// Offset of the payload in the stream.
    pub offset: u64,
    /// Offset up to which the sender has received the other direction.
    pub received: u64,
    /// What the sender reports.
    pub report: Report,
    /// CRC-32C of the payload, if payloads are checked.
    pub check: Option<u32>,
    /// CRC-32C of the pages that the payload encodes, if it encodes pages.
    pub pages: Option<u32>,
}

/// What an end of a stream reports about itself, in every frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Share of its time that its reader waits for the network: 1 none, 255 all, 0 unknown.
    pub waited: u8,
    /// Urgency of the guest whose bytes it sends.
    pub urgency: Urgency,
    /// KiB per second at most that it wants to receive on all streams of the session; 0 for any.
    pub share: u32,
}

/// How far the migration of a guest is. The higher ones go first where guests share a bandwidth limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Much of its memory is to be sent.
    #[default]
    Filling,
    /// It sends few bytes in a round.
    Finishing,
    /// It is paused for the switchover.
    Paused,
}

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes of the stream.
    Data = 1,
    /// Acknowledges received bytes, and nothing else.
    Acknowledge,
    /// End of the stream in this direction.
    End,
    /// The sender has given up the stream, in both directions.
    Abort,
}

/// A header that no correct sender sends, or that was changed in transit.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum FrameError {
    #[error(
        "a frame's header was changed in transit: its checksum is {found:#010x}, not {expected:#010x}"
    )]
    Header { found: u32, expected: u32 },
    #[error("no frame is of kind {0}")]
    Kind(u8),
    #[error("a frame has unknown flags: {0:#04x}")]
    Flags(u8),
    #[error("no guest has urgency {0}")]
    Urgency(u8),
    #[error("bytes of a frame's header that must be 0 are not")]
    Reserved,
    #[error("a frame has a payload of {0} bytes")]
    Length(usize),
    #[error("a frame ends after the last offset")]
    Offset,
}

impl Header {
    /// Header of a frame without payload.
    pub fn empty(kind: Kind, offset: u64, received: u64) -> Self {
        Self {
            kind,
            len: 0,
            offset,
            received,
            report: Report::default(),
            check: None,
            pages: None,
        }
    }

    /// Encodes the header. The payload of data must have 1 to [`MAX_LEN`] bytes; other frames have none.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let flag = |is_there, flag| if is_there { flag } else { 0 };
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = self.kind as u8;
        bytes[1] = flag(self.check.is_some(), CHECK) | flag(self.pages.is_some(), PAGES);
        bytes[2] = self.report.waited;
        bytes[3] = self.report.urgency as u8;
        // At most MAX_LEN.
        let len = u32::try_from(self.len).unwrap_or(u32::MAX);
        put(&mut bytes, LEN, len.to_be_bytes());
        put(&mut bytes, OFFSET, self.offset.to_be_bytes());
        put(&mut bytes, RECEIVED, self.received.to_be_bytes());
        put(&mut bytes, PAGES_CRC, self.pages.unwrap_or(0).to_be_bytes());
        put(&mut bytes, BYTES_CRC, self.check.unwrap_or(0).to_be_bytes());
        put(&mut bytes, SHARE, self.report.share.to_be_bytes());
        let crc = crc32c::crc32c(&bytes[..HEADER_CRC.start]);
        put(&mut bytes, HEADER_CRC, crc.to_be_bytes());
        bytes
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// [`FrameError::Header`] when its checksum is wrong, any other when no correct peer sends it.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, FrameError> {
        let expected = crc32c::crc32c(&bytes[..HEADER_CRC.start]);
        let found = u32::from_be_bytes(take(bytes, HEADER_CRC));
        if found != expected {
            return Err(FrameError::Header { found, expected });
        }
        let kinds = [Kind::Data, Kind::Acknowledge, Kind::End, Kind::Abort];
        let kind = by_code(&kinds, 1, bytes[0]).ok_or(FrameError::Kind(bytes[0]))?;
        let flags = bytes[1];
        if flags & !(CHECK | PAGES) != 0 {
            return Err(FrameError::Flags(flags));
        }
        let urgencies = [Urgency::Filling, Urgency::Finishing, Urgency::Paused];
        let urgency = by_code(&urgencies, 0, bytes[3]).ok_or(FrameError::Urgency(bytes[3]))?;
        let sum = |field, flag| {
            let value = u32::from_be_bytes(take(bytes, field));
            match (flags & flag != 0, value) {
                (true, _) => Ok(Some(value)),
                (false, 0) => Ok(None),
                (false, _) => Err(FrameError::Reserved),
            }
        };
        let len = u32::from_be_bytes(take(bytes, LEN));
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let fits = match kind {
            Kind::Data => (1..=MAX_LEN).contains(&len),
            _ => len == 0 && flags == 0,
        };
        if !fits {
            return Err(FrameError::Length(len));
        }
        let offset = u64::from_be_bytes(take(bytes, OFFSET));
        let header = Self {
            kind,
            len,
            offset,
            received: u64::from_be_bytes(take(bytes, RECEIVED)),
            report: Report {
                waited: bytes[2],
                urgency,
                share: u32::from_be_bytes(take(bytes, SHARE)),
            },
            check: sum(BYTES_CRC, CHECK)?,
            pages: sum(PAGES_CRC, PAGES)?,
        };
        match offset.checked_add(header.span()) {
            Some(_) => Ok(header),
            None => Err(FrameError::Offset),
        }
    }

    /// Offset of the next frame.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.span())
    }

    /// Length of the frame in its stream.
    fn span(&self) -> u64 {
        match self.kind {
            Kind::Data => self.len as u64,
            Kind::End => 1,
            Kind::Acknowledge | Kind::Abort => 0,
        }
    }
}

const CHECK: u8 = 1;
const PAGES: u8 = 2;

const LEN: Range<usize> = 4..8;
const OFFSET: Range<usize> = 8..16;
const RECEIVED: Range<usize> = 16..24;
const PAGES_CRC: Range<usize> = 24..28;
const BYTES_CRC: Range<usize> = 28..32;
const SHARE: Range<usize> = 32..36;
const HEADER_CRC: Range<usize> = 36..40;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reports() -> impl Strategy<Value = Report> {
        let urgency = prop_oneof![
            Just(Urgency::Filling),
            Just(Urgency::Finishing),
            Just(Urgency::Paused)
        ];
        (any::<u8>(), urgency, any::<u32>()).prop_map(|(waited, urgency, share)| Report {
            waited,
            urgency,
            share,
        })
    }

    fn headers() -> impl Strategy<Value = Header> {
        let data = (
            1..=MAX_LEN,
            0..u64::MAX - (MAX_LEN as u64),
            any::<u64>(),
            reports(),
            any::<[Option<u32>; 2]>(),
        );
        let data = data.prop_map(|(len, offset, received, report, [check, pages])| Header {
            kind: Kind::Data,
            len,
            offset,
            received,
            report,
            check,
            pages,
        });
        let kinds = prop_oneof![Just(Kind::Acknowledge), Just(Kind::End), Just(Kind::Abort)];
        let empty = (kinds, 0..u64::MAX, any::<u64>(), reports());
        prop_oneof![
            data,
            empty.prop_map(|(kind, offset, received, report)| Header {
                report,
                ..Header::empty(kind, offset, received)
            })
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes(header in headers()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn what_decodes_is_encoded_the_same(bytes in any::<[u8; HEADER_LEN]>()) {
            let mut bytes = bytes;
            let crc = crc32c::crc32c(&bytes[..36]);
            bytes[36..].copy_from_slice(&crc.to_be_bytes());
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn every_flipped_bit_is_noticed(header in headers(), bit in 0..HEADER_LEN * 8) {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let is_noticed = matches!(Header::decode(&bytes), Err(FrameError::Header { .. }));
            prop_assert!(is_noticed);
        }
    }

    #[test]
    fn rules_are_checked_behind_a_right_checksum() {
        let change = |at: usize, value: u8| {
            let mut bytes = Header {
                kind: Kind::Data,
                len: 1,
                offset: 0,
                received: 0,
                report: Report::default(),
                check: None,
                pages: None,
            }
            .encode();
            bytes[at] = value;
            let crc = crc32c::crc32c(&bytes[..36]);
            bytes[36..].copy_from_slice(&crc.to_be_bytes());
            Header::decode(&bytes)
        };
        assert_eq!(change(0, 0), Err(FrameError::Kind(0)));
        assert_eq!(change(0, 5), Err(FrameError::Kind(5)));
        assert_eq!(change(0, 2), Err(FrameError::Length(1)));
        assert_eq!(change(1, 4), Err(FrameError::Flags(4)));
        assert_eq!(change(3, 3), Err(FrameError::Urgency(3)));
        assert_eq!(change(31, 1), Err(FrameError::Reserved));
        assert_eq!(change(7, 0), Err(FrameError::Length(0)));
        assert_eq!(change(5, 0x20), Err(FrameError::Length((0x20 << 16) + 1)));
    }

    #[test]
    fn a_frame_may_end_at_the_last_offset_and_not_behind() {
        let frame = |len| Header {
            kind: Kind::Data,
            len,
            offset: u64::MAX - 8,
            received: u64::MAX,
            report: Report::default(),
            check: Some(0),
            pages: None,
        };
        assert_eq!(Header::decode(&frame(8).encode()), Ok(frame(8)));
        assert_eq!(Header::decode(&frame(9).encode()), Err(FrameError::Offset));
    }
}
