//! Pages like those of a guest, reproducible from a seed.

pub(crate) const PAGE: usize = 4096;

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Repeated,
    Random,
    Zero,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::Text, Self::Repeated, Self::Random, Self::Zero];
}

/// `count` pages of a kind, one text or one pattern throughout.
pub(crate) fn pages(kind: Kind, seed: u64, count: usize) -> Vec<u8> {
    let len = count * PAGE;
    let mut random = Random(seed);
    let mut bytes = Vec::with_capacity(len + 16);
    match kind {
        Kind::Zero => bytes.resize(len, 0),
        Kind::Random => bytes.resize_with(len, || random.byte()),
        Kind::Repeated => {
            let period = 1 + random.below(300);
            let pattern: Vec<u8> = (0..period).map(|_| random.byte()).collect();
            bytes.extend(pattern.iter().cycle().take(len));
        }
        Kind::Text => {
            while bytes.len() < len {
                // Few words are frequent and most are rare, as in any language.
                let rarest = 1 + random.below(4000);
                let rank = random.below(rarest);
                let mut word = Random(rank as u64);
                for _ in 0..2 + word.below(9) {
                    bytes.push(b'a' + word.byte() % 26);
                }
                bytes.push(if random.below(9) == 0 { b'\n' } else { b' ' });
            }
            bytes.truncate(len);
        }
    }
    bytes
}

/// SplitMix64: small, seedable, good enough to be incompressible.
pub(crate) struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[7]
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() >> 32).unwrap() % limit
    }
}
