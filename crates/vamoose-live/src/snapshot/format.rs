//! The file format: what is where, and how it is checked. No I/O.
//!
//! ```text
//!  records   encoded pages of a packet each, and the device state
//!  index     JSON: RAM blocks, and where each record is; of each packet also its method and pages
//!  trailer   64 bytes: magic and version, sizes of pages and packets, salt, where the index is
//! ```
//! Each record, and the index as well, ends with its check: a CRC-32C, or the tag of AES-256-GCM if the file is sealed. A record's
//! check is also about its number, the index's about the trailer, so that no part can be exchanged. Numbers are little-endian.
//!
//! A page that is in no packet is zero. One that is in several has the content of the last.

use std::{io, ops::Range};

use multifd::Method;
use serde::{Deserialize, Serialize};
use vamoose_link::FileCipher;

use super::SnapshotError;
use crate::protocol::BlockShape;

pub(super) const TRAILER_LEN: usize = 64;

const MAGIC: [u8; 8] = *b"VMOOSNAP";
const VERSION: u32 = 1;

/// Numbers of the records that are no packets.
const INDEX: u64 = u64::MAX;
pub(super) const STATE: u64 = u64::MAX - 1;

/// The methods, by their numbers in a file. All have packets that are independent of each other.
const METHODS: [Method; 5] = [
    Method::None,
    Method::Lz4,
    Method::ZstdFrames,
    Method::Qpl,
    Method::Qatzip,
];

/// The last bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trailer {
    pub(super) is_sealed: bool,
    pub(super) page_size: u32,
    pub(super) packet_bytes: u32,
    pub(super) salt: [u8; 16],
    pub(super) index: Range<u64>,
}

/// What a snapshot holds.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Index {
    pub(super) blocks: Vec<BlockShape>,
    /// Where the device state is, behind its parts that go ahead.
    pub(super) state: Range<u64>,
    /// The lengths of these parts.
    #[serde(default)]
    pub(super) parts: Vec<u64>,
    /// As the source describes the guest.
    #[serde(default)]
    pub(super) description: Vec<u8>,
    pub(super) packets: Vec<Packet>,
}

/// Pages of a block, in a record.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Packet {
    pub(super) block: usize,
    /// The number of its method. `None`: its pages are zero, and there is no record.
    pub(super) method: Option<usize>,
    /// Where the record is, with its check.
    pub(super) place: Range<u64>,
    /// The pages, in ascending order.
    pub(super) runs: Vec<Range<u32>>,
}

/// How records are checked.
pub(super) enum Check {
    Sum,
    Seal(FileCipher),
}

const SUM_LEN: usize = 4;

impl Check {
    /// Bytes that it adds to a record.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Sum => SUM_LEN,
            Self::Seal(_) => FileCipher::TAG_LEN,
        }
    }

    /// Adds the check to record `number`, which it may encrypt, and to `about`.
    pub(super) fn add(&self, number: u64, about: &[u8], record: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Self::Sum => record.extend(sum(number, about, record).to_le_bytes()),
            Self::Seal(cipher) => cipher.seal(number, about, record)?,
        }
        Ok(())
    }

    /// The content of record `number`, if it is right.
    pub(super) fn content<'a>(
        &self,
        number: u64,
        about: &[u8],
        record: &'a mut [u8],
    ) -> Option<&'a [u8]> {
        match self {
            Self::Sum => {
                let (content, found) = record.split_last_chunk::<SUM_LEN>()?;
                let found = u32::from_le_bytes(*found);
                (sum(number, about, content) == found).then_some(content)
            }
            Self::Seal(cipher) => cipher.open(number, about, record),
        }
    }
}

fn sum(number: u64, about: &[u8], content: &[u8]) -> u32 {
    let sum = crc32c::crc32c_append(crc32c::crc32c(&number.to_le_bytes()), about);
    crc32c::crc32c_append(sum, content)
}

impl Trailer {
    pub(super) fn to_bytes(&self) -> [u8; TRAILER_LEN] {
        let parts: [&[u8]; 8] = [
            &MAGIC,
            &VERSION.to_le_bytes(),
            &u32::from(self.is_sealed).to_le_bytes(),
            &self.page_size.to_le_bytes(),
            &self.packet_bytes.to_le_bytes(),
            &self.salt,
            &self.index.start.to_le_bytes(),
            &self.index.end.to_le_bytes(),
        ];
        let (mut bytes, parts) = ([0; TRAILER_LEN], parts.concat());
        bytes[..parts.len()].copy_from_slice(&parts);
        bytes
    }

    /// The trailer of a file of `len` bytes.
    pub(super) fn parse(bytes: &[u8; TRAILER_LEN], len: u64) -> Result<Self, SnapshotError> {
        let u32_at = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let mut salt = [0; 16];
        salt.copy_from_slice(&bytes[24..40]);
        let trailer = Self {
            is_sealed: u32_at(12) != 0,
            page_size: u32_at(16),
            packet_bytes: u32_at(20),
            salt,
            index: u64_at(40)..u64_at(48),
        };
        let version = u32_at(8);
        if bytes.starts_with(&MAGIC) && version != VERSION {
            return Err(SnapshotError::Version { version });
        }
        let end = trailer.index.end.checked_add(TRAILER_LEN as u64);
        let is_whole = trailer.index.start <= trailer.index.end && end == Some(len);
        // One form of each, so that no change goes unnoticed.
        match is_whole && trailer.to_bytes() == *bytes {
            true => Ok(trailer),
            false => Err(SnapshotError::NotASnapshot),
        }
    }
}

impl Index {
    /// The record of the index at `trailer.index.start`, whose end this sets.
    pub(super) fn to_record(
        &self,
        trailer: &mut Trailer,
        check: &Check,
    ) -> Result<Vec<u8>, io::Error> {
        let mut record = serde_json::to_vec(self)?;
        let len = record.len() + check.len();
        trailer.index.end = trailer.index.start + len as u64;
        check.add(INDEX, &trailer.to_bytes(), &mut record)?;
        Ok(record)
    }

    /// Parses the index's `record`. Every packet is one that can be read: among the records, at most `max_len` bytes and
    /// `max_pages` pages long, with pages that its block has.
    pub(super) fn parse(
        record: &mut [u8],
        trailer: &Trailer,
        check: &Check,
        (max_len, max_pages): (usize, usize),
    ) -> Option<Self> {
        let content = check.content(INDEX, &trailer.to_bytes(), record)?;
        let index: Self = serde_json::from_slice(content).ok()?;
        let is_record =
            |place: &Range<u64>| place.start <= place.end && place.end <= trailer.index.start;
        let fits = |packet: &Packet| {
            let pages = index.blocks.get(packet.block);
            let pages = pages.map_or(0, |block| block.len / u64::from(trailer.page_size));
            let ends = [0].into_iter().chain(packet.runs.iter().map(|run| run.end));
            let ascends =
                |(run, before): (&Range<u32>, u32)| before <= run.start && run.start < run.end;
            packet.runs.iter().zip(ends).all(ascends)
                && packet
                    .runs
                    .last()
                    .is_some_and(|run| u64::from(run.end) <= pages)
                && packet.pages().take(max_pages + 1).count() <= max_pages
                && packet.method.is_none_or(|method| method < METHODS.len())
                && is_record(&packet.place)
                && packet.place.end - packet.place.start <= max_len as u64
        };
        let is_right = is_record(&index.state) && index.packets.iter().all(fits);
        is_right.then_some(index)
    }
}

impl Packet {
    pub(super) fn new(block: usize, method: Option<Method>, pages: &[u32]) -> Self {
        let mut runs: Vec<Range<u32>> = Vec::new();
        for page in pages {
            match runs.last_mut() {
                Some(run) if run.end == *page => run.end += 1,
                _ => runs.push(*page..page + 1),
            }
        }
        Self {
            block,
            method: method.and_then(number),
            place: 0..0,
            runs,
        }
    }

    /// `None` for zeros.
    pub(super) fn method(&self) -> Option<Method> {
        METHODS.get(self.method?).copied()
    }

    /// Its pages, in ascending order.
    pub(super) fn pages(&self) -> impl Iterator<Item = u32> {
        self.runs.iter().cloned().flatten()
    }
}

/// The number of `method`, if a file can hold its packets.
pub(super) fn number(method: Method) -> Option<usize> {
    METHODS.iter().position(|known| *known == method)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDS: u64 = 1000;

    /// A block of ten pages, and one packet.
    fn index(edit: impl FnOnce(&mut Packet)) -> Index {
        let mut packet = Packet::new(0, Some(Method::Lz4), &[1, 2, 3, 7]);
        packet.place = 100..200;
        edit(&mut packet);
        let (name, len) = ("ram".to_owned(), 10 * 4096);
        Index {
            blocks: vec![BlockShape { name, len }],
            state: 900..RECORDS,
            parts: Vec::new(),
            description: Vec::new(),
            packets: vec![packet],
        }
    }

    fn parsed(index: &Index) -> Option<Index> {
        let mut trailer = Trailer {
            is_sealed: false,
            page_size: 4096,
            packet_bytes: 4 * 4096,
            salt: [7; 16],
            index: RECORDS..RECORDS,
        };
        let mut record = index.to_record(&mut trailer, &Check::Sum).unwrap();
        let len = RECORDS + record.len() as u64 + TRAILER_LEN as u64;
        let parsed = Trailer::parse(&trailer.to_bytes(), len).unwrap();
        assert_eq!(parsed, trailer);
        assert!(Trailer::parse(&trailer.to_bytes(), len - 1).is_err());
        Index::parse(&mut record, &parsed, &Check::Sum, (100, 4))
    }

    #[test]
    fn runs_are_the_pages() {
        let parsed = parsed(&index(|_| ())).unwrap();
        assert_eq!(parsed.packets[0].runs, [1..4, 7..8]);
        assert!(parsed.packets[0].pages().eq([1, 2, 3, 7]));
        assert_eq!(parsed.packets[0].method(), Some(Method::Lz4));
    }

    #[test]
    #[allow(
        clippy::reversed_empty_ranges,
        clippy::single_range_in_vec_init,
        reason = "a file may hold anything"
    )]
    fn a_packet_that_cannot_be_read_is_refused_before_anything_is() {
        type Edit = fn(&mut Packet);
        let edits: [Edit; 10] = [
            |packet| packet.block = 1,
            |packet| packet.method = Some(METHODS.len()),
            |packet| packet.place = 100..201,
            |packet| packet.place = 950..1001,
            |packet| packet.place = 200..100,
            |packet| packet.runs = Vec::new(),
            |packet| packet.runs = vec![7..8, 1..4],
            |packet| packet.runs = vec![1..4, 3..4],
            |packet| packet.runs = vec![9..11],
            |packet| packet.runs = vec![0..5],
        ];
        for (number, edit) in edits.into_iter().enumerate() {
            assert!(parsed(&index(edit)).is_none(), "edit {number}");
        }
        let mut outside = index(|_| ());
        outside.state = 900..1001;
        assert!(parsed(&outside).is_none());
    }
}
