//! Fingerprints and hashes of pages, under the keys of a store.

use std::io;

use vamoose_codec::shared::{Fingerprint, PageHash};

/// The keys of a store: bytes that only the two hosts of a session know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    fingerprint: [u8; 16],
    hash: [u8; 32],
}

/// Bytes of encoded [`Keys`].
pub(super) const KEYS_LEN: usize = 48;

/// With no more than this part of its words that are not zero a page has no fingerprint: it is short anyway, and many are alike.
const NOT_ZERO: usize = 10;

/// Parts of a page, by which similar pages are found: pages that have one of them in common. 0 for a part of zeros.
pub(super) type Sketch = [Fingerprint; 2];

/// Bytes of such a part. With four parts, pages of siblings take 1 to 3 % fewer bytes; with longer ones, 2 to 7 % more.
const PART: usize = 32;

/// Words that are mixed side by side, which the processor does at once.
const LANES: usize = 8;

impl Keys {
    pub(super) fn random() -> io::Result<Self> {
        let mut bytes = [0; KEYS_LEN];
        let filled = aws_lc_rs::rand::fill(&mut bytes);
        filled.map_err(|_| io::Error::other("the system has no random numbers"))?;
        Ok(Self::decode(&bytes))
    }

    pub(super) fn encode(&self) -> [u8; KEYS_LEN] {
        let mut bytes = [0; KEYS_LEN];
        bytes[..16].copy_from_slice(&self.fingerprint);
        bytes[16..].copy_from_slice(&self.hash);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; KEYS_LEN]) -> Self {
        let (mut fingerprint, mut hash) = ([0; 16], [0; 32]);
        fingerprint.copy_from_slice(&bytes[..16]);
        hash.copy_from_slice(&bytes[16..]);
        Self { fingerprint, hash }
    }

    /// Fingerprint of a page, from all of it: pages of databases differ in a few words. 0 for a page that is nearly all zeros.
    pub(super) fn fingerprint(&self, page: &[u8]) -> Fingerprint {
        let words = page.as_chunks::<8>().0.as_chunks::<LANES>().0;
        let [start, factor] = [0, 8].map(|at| word(self.fingerprint[at..].first_chunk()));
        let (mut lanes, mut zeros) = ([start; LANES], 0);
        for (number, words) in words.iter().enumerate() {
            // Looks at one of them, not always at the same place: many pages are tables.
            zeros += usize::from(words[number * 5 % LANES] == [0; 8]);
            for (lane, word) in lanes.iter_mut().zip(words) {
                *lane = mix(*lane, word, factor);
            }
        }
        if words.len() - zeros <= words.len() / NOT_ZERO {
            return 0;
        }
        let sum = lanes.into_iter().fold(start, |sum, lane| {
            (sum.rotate_left(29) ^ lane).wrapping_mul(factor | 1)
        });
        fold(sum)
    }

    /// From the middle of each half of a page.
    pub(super) fn sketch(&self, page: &[u8]) -> Sketch {
        let [start, factor] = [0, 8].map(|at| word(self.fingerprint[at..].first_chunk()));
        [page.len() / 4, page.len() / 4 * 3].map(|at| {
            let part = page.get(at..at + PART).unwrap_or_default();
            let words = part.as_chunks::<8>().0;
            if words.iter().all(|word| *word == [0; 8]) {
                return 0;
            }
            let start = start ^ at as u64;
            let sum = words.iter().fold(start, |sum, word| mix(sum, word, factor));
            fold(sum)
        })
    }

    /// Hash of a page's content.
    pub(super) fn hash(&self, page: &[u8]) -> PageHash {
        let mut hash = PageHash::default();
        let len = hash.len();
        hash.copy_from_slice(&blake3::keyed_hash(&self.hash, page).as_bytes()[..len]);
        hash
    }
}

fn mix(sum: u64, word: &[u8; 8], factor: u64) -> u64 {
    (sum.rotate_left(23) ^ u64::from_le_bytes(*word)).wrapping_mul(factor | 1)
}

fn fold(sum: u64) -> Fingerprint {
    let folded = (sum ^ sum >> 32) & u64::from(u32::MAX);
    u32::try_from(folded).unwrap_or_default().max(1)
}

fn word(bytes: Option<&[u8; 8]>) -> u64 {
    bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const KEYS: [u8; KEYS_LEN] = [7; KEYS_LEN];

    fn noise(seed: u64) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..4096).map(|_| random.u8(..)).collect()
    }

    #[test]
    fn pages_are_told_apart_under_each_key() {
        let keys = Keys::decode(&KEYS);
        let others = Keys::random().unwrap();
        assert_eq!(Keys::decode(&others.encode()), others);
        let pages: Vec<_> = (0..2000).map(noise).collect();
        let all: HashSet<_> = pages.iter().map(|page| keys.fingerprint(page)).collect();
        assert!(all.len() >= 1999 && !all.contains(&0));
        let same = pages
            .iter()
            .filter(|page| keys.fingerprint(page) == others.fingerprint(page));
        assert_eq!(same.count(), 0);
        let hashes: HashSet<_> = pages.iter().map(|page| keys.hash(page)).collect();
        assert_eq!(hashes.len(), 2000);
        assert_ne!(keys.hash(&pages[0]), others.hash(&pages[0]));
    }

    #[test]
    fn every_bit_counts() {
        let keys = Keys::random().unwrap();
        let mut page = noise(1);
        let mut all = HashSet::from([keys.fingerprint(&page)]);
        for bit in (0..8 * page.len()).step_by(31) {
            page[bit / 8] ^= 1 << (bit % 8);
            all.insert(keys.fingerprint(&page));
            page[bit / 8] ^= 1 << (bit % 8);
        }
        // Of a thousand, hardly two are the same by chance.
        assert!(all.len() >= 8 * page.len() / 31, "{}", all.len());
    }

    #[test]
    fn pages_that_are_nearly_empty_have_no_fingerprint() {
        let keys = Keys::decode(&KEYS);
        let mut page = vec![0; 4096];
        assert_eq!(keys.fingerprint(&page), 0);
        page[..16].fill(1);
        page[4088..].fill(1);
        assert_eq!(keys.fingerprint(&page), 0);
        assert_eq!(keys.fingerprint(&[]), 0);
        assert_ne!(keys.fingerprint(&[1; 4096]), 0);
        assert_ne!(keys.fingerprint(&vec![1; 1 << 16]), 0);
    }
}
