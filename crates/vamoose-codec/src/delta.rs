//! Method delta: pages encoded after earlier versions of some of them, which the receiver has.
//!
//! A payload is a table, with a mark for each of the packet's normal pages, and the pages, encoded by another method:
//!
//! ```text
//!   0       method of the pages: 0 none, 1 zstd-frames
//!   1..4    zero
//!   4..     for each page 8 bytes, big endian:
//!             where    0 no version of the page is used or kept
//!                      1 the receiver's version of the page is used
//!                      2 · slot + 2   the page is kept in the slot
//!                      2 · slot + 3   the version in the slot is used, then replaced by the page
//!             version  what the slot must have; it has the next one then. 0 without a slot
//!   …       the pages, back to back, encoded after all versions used, back to back in the order of their pages
//! ```
//!
//! The versions are zstd's prefix. What a slot is, and who has which versions, is for the layers above.

use multifd::Method;

use crate::DecodeError;

/// The form of a page in a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mark {
    /// No version of the page is used or kept.
    #[default]
    Plain,
    /// The slot holds this page from now on.
    Store(Touch),
    /// The page is encoded after the version in the slot, which holds this page from now on.
    Difference(Touch),
    /// The page is encoded after the receiver's version of it.
    InPlace,
}

/// A slot, and the version that it must have before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// At most [`MAX_SLOT`].
    pub slot: u32,
    /// Counts what was stored in the slot, from 0 and round again.
    pub version: u32,
}

/// The highest number of a slot.
pub const MAX_SLOT: u32 = u32::MAX / 2 - 2;

/// Bytes of the table of a packet with `pages` normal pages.
pub const fn table_len(pages: usize) -> usize {
    HEAD + pages * MARK
}

/// Writes the table to the beginning of `out`, which has at least [`table_len`] bytes. `method` encodes the pages.
///
/// # Errors
/// When the pages cannot be encoded by this method here.
pub fn write_table(
    marks: &[Mark],
    method: Method,
    out: &mut [u8],
) -> Result<(), crate::EncodeError> {
    let Some((code, _)) = (0..).zip(INNER).find(|(_, known)| *known == method) else {
        return Err(crate::EncodeError::Engine {
            method,
            engine: "delta",
            reason: "it does not encode differences",
        });
    };
    let (head, table) = out.split_at_mut(HEAD);
    head.copy_from_slice(&[code, 0, 0, 0]);
    for (mark, bytes) in marks.iter().zip(table.as_chunks_mut::<MARK>().0) {
        *bytes = mark.encode();
    }
    Ok(())
}

/// Reads the table of a packet with as many normal pages as there are `marks`, which it fills. Returns the method of the
/// pages, and their payload.
///
/// # Errors
/// If the payload does not start with a table for this number of pages.
pub fn read_table<'a>(
    payload: &'a [u8],
    marks: &mut [Mark],
) -> Result<(Method, &'a [u8]), DecodeError> {
    let Some((table, pages)) = payload.split_at_checked(table_len(marks.len())) else {
        return Err(corrupt("it is shorter than its table"));
    };
    let (head, table) = table.split_at(HEAD);
    let method = match head {
        [code, 0, 0, 0] => INNER.get(usize::from(*code)).copied(),
        _ => None,
    };
    let method = method.ok_or(corrupt("its first bytes name no method"))?;
    for (mark, bytes) in marks.iter_mut().zip(table.as_chunks::<MARK>().0) {
        *mark = Mark::decode(*bytes)?;
    }
    Ok((method, pages))
}

/// Bytes before the marks, and of each.
const HEAD: usize = 4;
const MARK: usize = 8;

/// The methods of the pages, by their codes.
const INNER: [Method; 2] = [Method::None, Method::ZstdFrames];

impl Mark {
    /// Whether an earlier version of the page is used.
    pub fn is_difference(self) -> bool {
        matches!(self, Self::Difference(_) | Self::InPlace)
    }

    fn encode(self) -> [u8; MARK] {
        let (place, version) = match self {
            Self::Plain => (0, 0),
            Self::InPlace => (1, 0),
            Self::Store(touch) => (2 * touch.slot.min(MAX_SLOT) + 2, touch.version),
            Self::Difference(touch) => (2 * touch.slot.min(MAX_SLOT) + 3, touch.version),
        };
        (u64::from(place) << 32 | u64::from(version)).to_be_bytes()
    }

    fn decode(bytes: [u8; MARK]) -> Result<Self, DecodeError> {
        let [a, b, c, d, version @ ..] = bytes;
        let place = u32::from_be_bytes([a, b, c, d]);
        let version = u32::from_be_bytes(version);
        let Some(place) = place.checked_sub(2) else {
            return match (place, version) {
                (0, 0) => Ok(Self::Plain),
                (1, 0) => Ok(Self::InPlace),
                _ => Err(corrupt("a page without a slot has a version")),
            };
        };
        let slot = place / 2;
        if slot > MAX_SLOT {
            return Err(corrupt("a slot's number is too high"));
        }
        let touch = Touch { slot, version };
        Ok(match place % 2 {
            0 => Self::Store(touch),
            _ => Self::Difference(touch),
        })
    }
}

fn corrupt(reason: &'static str) -> DecodeError {
    let method = Method::Delta;
    DecodeError::Corrupt { method, reason }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn marks() -> impl Strategy<Value = Vec<Mark>> {
        let touch =
            (0..=MAX_SLOT, any::<u32>()).prop_map(|(slot, version)| Touch { slot, version });
        let mark = prop_oneof![
            Just(Mark::Plain),
            Just(Mark::InPlace),
            touch.clone().prop_map(Mark::Store),
            touch.prop_map(Mark::Difference),
        ];
        vec(mark, 1..128)
    }

    proptest! {
        #[test]
        fn tables_round_trip(marks in marks(), inner in 0..INNER.len(), rest in vec(any::<u8>(), 0..40)) {
            let len = table_len(marks.len());
            let mut payload = vec![0xee; len];
            write_table(&marks, INNER[inner], &mut payload).unwrap();
            payload.extend_from_slice(&rest);
            let mut read = vec![Mark::Plain; marks.len()];
            let (method, pages) = read_table(&payload, &mut read).unwrap();
            prop_assert_eq!((method, pages), (INNER[inner], &rest[..]));
            prop_assert_eq!(read, marks);
            for cut in 0..len {
                prop_assert!(read_table(&payload[..cut], &mut vec![Mark::Plain; (len - HEAD) / MARK]).is_err());
            }
        }

        /// What is read is what would be written: no two tables mean the same.
        #[test]
        fn any_bytes_are_a_table_or_an_error(
            head in prop_oneof![Just(vec![1, 0, 0, 0]), vec(any::<u8>(), 4)],
            places in vec((prop_oneof![0..9_u32, any::<u32>()], 0..2_u32), 1..20),
        ) {
            let mut payload = head;
            for (place, version) in &places {
                payload.extend_from_slice(&place.to_be_bytes());
                payload.extend_from_slice(&version.to_be_bytes());
            }
            let mut marks = vec![Mark::Plain; places.len()];
            if let Ok((method, pages)) = read_table(&payload, &mut marks) {
                prop_assert!(pages.is_empty());
                let mut written = vec![0; payload.len()];
                write_table(&marks, method, &mut written).unwrap();
                prop_assert_eq!(written, payload);
            }
        }
    }

    #[test]
    fn only_methods_that_encode_packets_by_themselves_are_inside() {
        for method in Method::ALL {
            let written = write_table(&[Mark::Plain], method, &mut [0; 12]);
            assert_eq!(written.is_ok(), INNER.contains(&method), "{method}");
        }
    }
}
