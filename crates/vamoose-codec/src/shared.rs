//! Method shared: pages encoded by another method, without those that the receiver has in its page store.
//!
//! A payload is the encoded pages, and a table behind them:
//!
//! ```text
//!   …       the pages that are not references, back to back, encoded by another method
//!   4 · n   for each of the n normal pages its fingerprint, by which the receiver finds it later; 0 for none
//!   18 · r  for each reference, in ascending order: index of the page, 2 bytes, and its hash, 16 bytes
//!   20 · b  for each base its fingerprint, 4 bytes, and its hash, 16 bytes
//!   4       method of the pages: 0 none, 1 zstd-frames, 2 lz4; number b of bases; number r of references, 2 bytes
//! ```
//!
//! A base is a page that the receiver has, and that resembles encoded ones: these are encoded after all bases, back to back, which are
//! zstd's prefix.
//!
//! Numbers are big endian. The table is behind the pages, so that a payload without references is that of the other method, with
//! some bytes to cut off. Without any page that is encoded, the method is none. What a fingerprint and a hash are, and who has which
//! pages, is for the layers above.

use multifd::Method;

use crate::DecodeError;

/// Finds a page in a store. Different pages may have the same; 0 is no fingerprint.
pub type Fingerprint = u32;

/// Identifies the content of a page.
pub type PageHash = [u8; 16];

/// A page that the receiver has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Index among the packet's normal pages.
    pub page: usize,
    /// Of its content.
    pub hash: PageHash,
}

/// A page that the receiver has, after which others are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// Finds it.
    pub fingerprint: Fingerprint,
    /// Of its content.
    pub hash: PageHash,
}

/// The most bases of a packet.
pub const MOST_BASES: usize = 255;

/// The table of a packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Of each normal page.
    pub fingerprints: Vec<Fingerprint>,
    /// The pages that are not encoded.
    pub references: Vec<Reference>,
    /// At most [`MOST_BASES`], and one for each encoded page, and only with method zstd-frames.
    pub bases: Vec<Base>,
}

const FINGERPRINT: usize = 4;
const REFERENCE: usize = 18;
const BASE: usize = 20;
const FOOT: usize = 4;

/// The methods of the pages, by their codes.
const INNER: [Method; 3] = [Method::None, Method::ZstdFrames, Method::Lz4];

impl Table {
    /// Bytes of the table.
    pub fn len(&self) -> usize {
        FINGERPRINT * self.fingerprints.len()
            + REFERENCE * self.references.len()
            + BASE * self.bases.len()
            + FOOT
    }

    /// Whether pages of the packet need pages that the receiver has.
    pub fn needs_store(&self) -> bool {
        !(self.references.is_empty() && self.bases.is_empty())
    }

    /// Whether the packet has no normal pages.
    pub fn is_empty(&self) -> bool {
        self.fingerprints.is_empty()
    }

    /// Writes the table to the beginning of `out`, which has at least [`len`](Self::len) bytes. False if `method` cannot encode the
    /// pages of such packets.
    pub fn write(&self, method: Method, out: &mut [u8]) -> bool {
        let code = (0..).zip(INNER).find(|(_, known)| *known == method);
        let count = u16::try_from(self.references.len());
        let bases = u8::try_from(self.bases.len());
        let (Some((code, _)), Ok(count), Ok(bases)) = (code, count, bases) else {
            return false;
        };
        if bases > 0 && method != Method::ZstdFrames {
            return false;
        }
        let (fingerprints, rest) = out.split_at_mut(FINGERPRINT * self.fingerprints.len());
        let places = fingerprints.as_chunks_mut().0;
        for (fingerprint, place) in self.fingerprints.iter().zip(places) {
            *place = fingerprint.to_be_bytes();
        }
        let (references, rest) = rest.split_at_mut(REFERENCE * self.references.len());
        let places = references.chunks_exact_mut(REFERENCE);
        for (reference, place) in self.references.iter().zip(places) {
            let Ok(page) = u16::try_from(reference.page) else {
                return false;
            };
            place[..2].copy_from_slice(&page.to_be_bytes());
            place[2..].copy_from_slice(&reference.hash);
        }
        let (places, foot) = rest.split_at_mut(BASE * self.bases.len());
        for (base, place) in self.bases.iter().zip(places.chunks_exact_mut(BASE)) {
            place[..FINGERPRINT].copy_from_slice(&base.fingerprint.to_be_bytes());
            place[FINGERPRINT..].copy_from_slice(&base.hash);
        }
        let [high, low] = count.to_be_bytes();
        foot[..FOOT].copy_from_slice(&[code, bases, high, low]);
        true
    }

    /// Reads the table of a packet with this number of normal `pages`. Returns the method of the encoded pages, and the length of
    /// their payload.
    ///
    /// # Errors
    /// If the payload does not end with a table for this number of pages.
    pub fn read(&mut self, payload: &[u8], pages: usize) -> Result<(Method, usize), DecodeError> {
        let Some((rest, &[code, bases, high, low])) = payload.split_last_chunk::<FOOT>() else {
            return Err(corrupt("it does not end with a table"));
        };
        let method = INNER.get(usize::from(code)).copied();
        let method = method.ok_or(corrupt("its table names no method"))?;
        let count = usize::from(u16::from_be_bytes([high, low]));
        let bases = usize::from(bases);
        let table = FINGERPRINT * pages + REFERENCE * count + BASE * bases;
        let Some(len) = rest.len().checked_sub(table) else {
            return Err(corrupt("it is shorter than its table"));
        };
        if bases > 0 && (method != Method::ZstdFrames || bases + count > pages) {
            return Err(corrupt("it has bases that its pages cannot use"));
        }
        let (fingerprints, rest) = rest[len..].split_at(FINGERPRINT * pages);
        let (references, bases) = rest.split_at(REFERENCE * count);
        let fingerprints = fingerprints.as_chunks().0.iter();
        self.fingerprints.clear();
        self.fingerprints
            .extend(fingerprints.map(|it| u32::from_be_bytes(*it)));
        self.references.clear();
        for reference in references.as_chunks::<REFERENCE>().0 {
            let [high, low, hash @ ..] = *reference;
            let page = usize::from(u16::from_be_bytes([high, low]));
            let last = self.references.last();
            if page >= pages || last.is_some_and(|last| last.page >= page) {
                return Err(corrupt("its references are not in order"));
            }
            self.references.push(Reference { page, hash });
        }
        let bases = bases.as_chunks::<BASE>().0.iter();
        self.bases.clear();
        self.bases.extend(bases.map(|base| {
            let [a, b, c, d, hash @ ..] = *base;
            let fingerprint = u32::from_be_bytes([a, b, c, d]);
            Base { fingerprint, hash }
        }));
        if count == pages && (method, len) != (Method::None, 0) {
            return Err(corrupt("it has pages though all are references"));
        }
        Ok((method, len))
    }
}

fn corrupt(reason: &'static str) -> DecodeError {
    let method = Method::Shared;
    DecodeError::Corrupt { method, reason }
}

#[cfg(test)]
mod tests {
    use proptest::{
        collection::{btree_map, vec},
        prelude::*,
    };

    use super::*;

    proptest! {
        #[test]
        fn tables_round_trip(
            fingerprints in vec(any::<u32>(), 1..128),
            referenced in btree_map(0..128_usize, any::<PageHash>(), 0..20),
            based in vec((any::<u32>(), any::<PageHash>()), 0..4),
            inner in 0..INNER.len(),
            pages in vec(any::<u8>(), 0..40),
        ) {
            let references: Vec<_> = referenced
                .into_iter()
                .filter(|(page, _)| *page < fingerprints.len())
                .map(|(page, hash)| Reference { page, hash })
                .collect();
            let all = references.len() == fingerprints.len();
            let (inner, pages) = if all { (0, vec![]) } else { (inner, pages) };
            let count = fingerprints.len();
            let mut bases: Vec<_> = based
                .into_iter()
                .map(|(fingerprint, hash)| Base { fingerprint, hash })
                .collect();
            let encoded = fingerprints.len() - references.len();
            bases.truncate(if INNER[inner] == Method::ZstdFrames { encoded } else { 0 });
            let table = Table { fingerprints, references, bases };
            let mut payload = pages.clone();
            payload.resize(pages.len() + table.len(), 0xee);
            prop_assert!(table.write(INNER[inner], &mut payload[pages.len()..]));
            let mut read = Table::default();
            prop_assert_eq!(read.read(&payload, count), Ok((INNER[inner], pages.len())));
            prop_assert_eq!(&read, &table);
            for cut in payload.len() - table.len()..payload.len() {
                if let Ok((method, len)) = read.read(&payload[..cut], count) {
                    prop_assert!((method, len) != (INNER[inner], pages.len()) || read != table);
                }
            }
        }

        /// What is read is what would be written: no two tables mean the same.
        #[test]
        fn any_bytes_are_a_table_or_an_error(
            head in vec(any::<u8>(), 0..60),
            references in vec((0..6_u16, any::<PageHash>()), 0..3),
            bases in 0..2_u8,
            code in 0..4_u8,
        ) {
            let mut payload = head;
            for (page, hash) in &references {
                payload.extend_from_slice(&page.to_be_bytes());
                payload.extend_from_slice(hash);
            }
            let count = u8::try_from(references.len()).unwrap();
            payload.resize(payload.len() + BASE * usize::from(bases), 3);
            payload.extend_from_slice(&[code, bases, 0, count]);
            let mut table = Table::default();
            if let Ok((method, len)) = table.read(&payload, 4) {
                let mut written = payload[..len].to_vec();
                written.resize(len + table.len(), 0);
                prop_assert!(table.write(method, &mut written[len..]));
                prop_assert_eq!(written, payload);
            }
        }
    }

    #[test]
    fn only_methods_that_encode_packets_by_themselves_are_inside() {
        let table = Table::default();
        for method in Method::ALL {
            assert_eq!(
                table.write(method, &mut [0; FOOT]),
                INNER.contains(&method),
                "{method}"
            );
        }
    }
}
