//! Input for the benchmarks: the same bytes in every run, on every machine.

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// A page where it is in a guest: at a multiple of its size. How far a compare or a copy gets per
/// instruction depends on that.
#[repr(align(4096))]
pub struct Page(pub [u8; PAGE]);

impl Page {
    /// A page of zeros, but for the byte at `dirty`.
    pub fn zero_but_for(dirty: Option<usize>) -> Box<Self> {
        let mut page = Box::new(Self([0; PAGE]));
        if let Some(at) = dirty {
            page.0[at] = 1;
        }
        page
    }
}

/// `count` pages back to back: of eight, about five are like text, two repeat a pattern and one is random.
///
/// The kinds follow each other in no order, because a method that takes samples takes pages at equal distances.
pub fn pages(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut pages = Vec::with_capacity(count * PAGE);
    while pages.len() < count * PAGE {
        match random.below(8) {
            0..5 => text(&mut random, &mut pages),
            5..7 => repeated(&mut random, &mut pages),
            _ => pages.extend((0..PAGE).map(|_| random.byte())),
        }
    }
    pages
}

/// Few words are frequent and most are rare, as in any language.
fn text(random: &mut Random, pages: &mut Vec<u8>) {
    let end = pages.len() + PAGE;
    while pages.len() < end {
        let rarest = 1 + random.below(4000);
        let mut word = Random(random.below(rarest));
        let letters = 2 + word.below(9);
        pages.extend((0..letters).map(|_| b'a' + word.byte() % 26));
        pages.push(b' ');
    }
    pages.truncate(end);
}

fn repeated(random: &mut Random, pages: &mut Vec<u8>) {
    let period = 1 + random.below(300);
    let pattern: Vec<u8> = (0..period).map(|_| random.byte()).collect();
    pages.extend(pattern.iter().cycle().take(PAGE));
}

/// SplitMix64: small, seedable, and random enough not to compress.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
