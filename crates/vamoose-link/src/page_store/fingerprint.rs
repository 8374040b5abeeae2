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

/// Words of a page that its fingerprint covers.
const WORDS: usize = 32;

/// With more zero words than this a page has no fingerprint: it is short anyway, and alike others that differ elsewhere.
const MOST_ZEROS: usize = WORDS - 3;

/// Words that are mixed side by side, which the processor does at once.
const LANES: usize = 4;

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

    /// Fingerprint of a page, from words spread over it. 0 for a page that is nearly all zeros, or too short.
    pub(super) fn fingerprint(&self, page: &[u8]) -> Fingerprint {
        let (words, step) = (page.as_chunks::<8>().0, page.len() / 8 / WORDS);
        if step == 0 {
            return 0;
        }
        let [start, factor] = [0, 8].map(|at| word(self.fingerprint[at..].first_chunk()));
        let (mut lanes, mut zeros) = ([start; LANES], 0);
        for number in 0..WORDS {
            // Not always at the same place of its part: many pages are tables with rows as long as a part.
            let word = word(words.get(number * step + number * 5 % step));
            zeros += usize::from(word == 0);
            let lane = &mut lanes[number % LANES];
            *lane = (lane.rotate_left(23) ^ word).wrapping_mul(factor | 1);
        }
        if zeros > MOST_ZEROS {
            return 0;
        }
        let sum = lanes.into_iter().fold(start, |sum, lane| {
            (sum.rotate_left(29) ^ lane).wrapping_mul(factor | 1)
        });
        let folded = (sum ^ sum >> 32) & u64::from(u32::MAX);
        u32::try_from(folded).unwrap_or_default().max(1)
    }

    /// Hash of a page's content.
    pub(super) fn hash(&self, page: &[u8]) -> PageHash {
        let mut hash = PageHash::default();
        let len = hash.len();
        hash.copy_from_slice(&blake3::keyed_hash(&self.hash, page).as_bytes()[..len]);
        hash
    }
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
    fn pages_that_are_nearly_empty_have_no_fingerprint() {
        let keys = Keys::decode(&KEYS);
        let mut page = vec![0; 4096];
        assert_eq!(keys.fingerprint(&page), 0);
        page[..16].fill(1);
        page[4088..].fill(1);
        assert_eq!(keys.fingerprint(&page), 0);
        assert_eq!(keys.fingerprint(&[1; 100]), 0);
        assert_ne!(keys.fingerprint(&[1; 4096]), 0);
        assert_ne!(keys.fingerprint(&vec![1; 1 << 16]), 0);
    }
}
