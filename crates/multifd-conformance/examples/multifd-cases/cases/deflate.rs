//! Deflate and zstd written by hand, so that the cases have exactly the blocks that they are about and never change.

use flate2::Crc;

/// A stream of deflate blocks.
pub(super) struct Deflate {
    out: Vec<u8>,
    bits: u32,
    count: u32,
}

impl Deflate {
    /// A stream behind this header.
    pub(super) fn after(header: &[u8]) -> Self {
        Self {
            out: header.to_vec(),
            bits: 0,
            count: 0,
        }
    }

    /// A zlib stream with a window of 32 KiB.
    pub(super) fn zlib() -> Self {
        Self::after(&[0x78, 0x01])
    }

    /// Appends `count` low bits, the lowest first.
    fn put(&mut self, bits: u32, count: u32) {
        self.bits |= bits << self.count;
        self.count += count;
        while self.count >= 8 {
            self.out.push(self.bits.to_le_bytes()[0]);
            self.bits >>= 8;
            self.count -= 8;
        }
    }

    /// Appends a Huffman code, whose highest bit comes first.
    fn code(&mut self, code: u32, count: u32) {
        self.put(code.reverse_bits() >> (32 - count), count);
    }

    /// A literal, the end of a block (256) or a length, in the fixed code.
    fn symbol(&mut self, symbol: u32) {
        match symbol {
            0..144 => self.code(0x30 + symbol, 8),
            144..256 => self.code(0x190 + symbol - 144, 9),
            256..280 => self.code(symbol - 256, 7),
            _ => self.code(0xc0 + symbol - 280, 8),
        }
    }

    /// A block in the fixed code: these literals, then `len` bytes from `distance` back.
    pub(super) fn fixed(mut self, literals: &[u8], distance: u32, len: u32) -> Self {
        self.put(0b010, 3);
        for literal in literals {
            self.symbol((*literal).into());
        }
        let mut left = len;
        while left > 0 {
            // The longest match, unless what is left then would be too short for one.
            let part = if left > 258 && left < 261 {
                left - 3
            } else {
                left.min(258)
            };
            self.length(part);
            self.distance(distance);
            left -= part;
        }
        self.symbol(256);
        self
    }

    fn length(&mut self, len: u32) {
        if len == 258 {
            return self.symbol(285);
        }
        let more = len - 3;
        let bits = more.max(4).ilog2() - 2;
        self.symbol(257 + 4 * bits + (more >> bits));
        self.put(more & ((1 << bits) - 1), bits);
    }

    fn distance(&mut self, distance: u32) {
        let back = distance - 1;
        let bits = back.max(2).ilog2() - 1;
        self.code(2 * bits + (back >> bits), 5);
        self.put(back & ((1 << bits) - 1), bits);
    }

    /// A page of one byte.
    pub(super) fn page(self, byte: u8) -> Self {
        self.fixed(&[byte], 1, 4095)
    }

    /// A stored block.
    pub(super) fn stored(mut self, bytes: &[u8]) -> Self {
        self.put(0, 3);
        self.align();
        let len = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        self.out.extend(len.to_le_bytes());
        self.out.extend((!len).to_le_bytes());
        self.out.extend(bytes);
        self
    }

    /// The [`ruler`] in a block with a code of its own, as zlib encodes it, and a sync flush.
    pub(super) fn dynamic(mut self) -> Self {
        self.align();
        self.out.extend(DYNAMIC);
        self
    }

    /// A sync flush: an empty stored block.
    pub(super) fn flush(self) -> Self {
        self.stored(&[])
    }

    /// A last block, which is empty.
    pub(super) fn end(mut self) -> Self {
        self.put(0b011, 3);
        self.symbol(256);
        self.align();
        self
    }

    /// The end, with zlib's check of all bytes.
    pub(super) fn end_with(self, check: &[u8]) -> Self {
        let mut ended = self.end();
        ended.out.extend(check);
        ended
    }

    fn align(&mut self) {
        let missing = (8 - self.count) % 8;
        self.put(0, missing);
    }

    /// The bytes since the last call; at a byte's end.
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }
}

/// The page in a block with a code of its own.
pub(super) fn ruler() -> Vec<u8> {
    let mark = |at: u32| 98 + at.trailing_zeros().to_le_bytes()[0];
    (1..=4096).map(mark).collect()
}

const DYNAMIC: [u8; 80] = [
    0xec, 0x95, 0x2b, 0x0e, 0xc0, 0x30, 0x0c, 0xc5, 0xee, 0xea, 0xee, 0xd7, 0xf5, 0x73, 0x7f, 0x58,
    0x50, 0x34, 0x52, 0x52, 0x30, 0x10, 0xa3, 0x28, 0x8a, 0xa2, 0xc8, 0xb2, 0x9e, 0x42, 0xe2, 0x20,
    0x71, 0x32, 0xeb, 0xc5, 0xb7, 0xbf, 0x59, 0xcf, 0x1f, 0xf6, 0xf6, 0x33, 0xff, 0xde, 0x7f, 0x89,
    0xcd, 0x5f, 0xd0, 0x7f, 0x64, 0xfe, 0xaa, 0x7f, 0xf3, 0xaf, 0xff, 0xb0, 0xfc, 0x4d, 0xff, 0xe6,
    0x5f, 0xff, 0xfe, 0x7f, 0xfd, 0x9b, 0x7f, 0xfd, 0x87, 0xe3, 0xef, 0x03, 0x00, 0x00, 0xff, 0xff,
];

/// The payload of method qpl: lengths, then the pages.
pub(super) fn qpl(pages: &[Vec<u8>]) -> Vec<u8> {
    let len = |page: &Vec<u8>| u32::try_from(page.len()).unwrap_or(u32::MAX).to_be_bytes();
    let lens = pages.iter().flat_map(len);
    lens.chain(pages.iter().flatten().copied()).collect()
}

/// A gzip member with QATzip's extra field.
pub(super) fn member(deflate: &[u8], plain: &[u8]) -> Vec<u8> {
    let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
    let extra = [&[12, 0, b'Q', b'Z', 8, 0][..], &len(plain), &len(deflate)].concat();
    gzip(4, &extra, deflate, plain)
}

/// A gzip member.
pub(super) fn gzip(flags: u8, extra: &[u8], deflate: &[u8], plain: &[u8]) -> Vec<u8> {
    let mut crc = Crc::new();
    crc.update(plain);
    let header = [0x1f, 0x8b, 8, flags, 0, 0, 0, 0, 0, 0xff];
    let check = [crc.sum().to_le_bytes(), crc.amount().to_le_bytes()].concat();
    [&header, extra, deflate, &check].concat()
}

/// The beginning of a zstd frame with a window of `1 << log` bytes.
pub(super) fn zstd(log: u8) -> Vec<u8> {
    vec![0x28, 0xb5, 0x2f, 0xfd, 0, (log - 10) << 3]
}

/// A zstd block: 0 raw, 1 repeated, 2 compressed, 3 reserved; of `len` bytes. The last one if it is `last`.
pub(super) fn zstd_block(last: bool, kind: u32, len: u32, bytes: &[u8]) -> Vec<u8> {
    let header = u32::from(last) | kind << 1 | len << 3;
    [&header.to_le_bytes()[..3], bytes].concat()
}
