//! Pages to measure encoders with, made up: text, records with pointers, tables of small numbers,
//! sparse pages and noise, in about the shares that make a guest's memory compress by two to three.

use multifd::Layout;

/// What the sample is, printed with every number that comes from it.
pub(super) const DESCRIPTION: &str = "synthetic pages (text, records, tables, sparse, noise), none of them zero: \
     real guests differ";

/// 32 MiB: more than any window, and than most caches hold.
const PACKETS: usize = 64;

/// Packets full of pages of all kinds.
pub(super) fn packets(layout: Layout) -> Vec<Vec<u8>> {
    let mut random = Random(0x5eed);
    (0..PACKETS)
        .map(|_| {
            let mut packet = Vec::with_capacity(layout.packet_bytes());
            // Pages of one kind come in runs, as allocators hand them out.
            while packet.len() < layout.packet_bytes() {
                let run = (1 + random.below(16)) * layout.page_size();
                let end = layout.packet_bytes().min(packet.len() + run);
                match random.below(100) {
                    0..30 => text(&mut packet, end, &mut random),
                    30..60 => records(&mut packet, end, &mut random),
                    60..75 => tables(&mut packet, end, &mut random),
                    75..87 => sparse(&mut packet, end, &mut random),
                    _ => noise(&mut packet, end, &mut random),
                }
            }
            packet
        })
        .collect()
}

/// Words, few of them frequent.
fn text(out: &mut Vec<u8>, end: usize, random: &mut Random) {
    while out.len() < end {
        let rarest = 1 + random.below(3000);
        let mut word = Random(random.below(rarest) as u64);
        for _ in 0..2 + word.below(9) {
            out.push(b'a' + word.byte() % 26);
        }
        out.push(b' ');
    }
    out.truncate(end);
}

/// Objects of a heap: a type's address, neighbours, a counter, flags.
fn records(out: &mut Vec<u8>, end: usize, random: &mut Random) {
    let heap = 0x7f3a_0000_0000 + ((random.next() & 0xffff) << 16);
    while out.len() < end {
        for word in [
            heap + (random.next() & 7) * 0x60,
            heap + (random.next() & 0xf_ffc0),
            heap + (random.next() & 0xf_ffc0),
            random.next() & 0xff,
            0,
            0x1_0000_0001,
        ] {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
    out.truncate(end);
}

/// 32-bit numbers that grow slowly.
fn tables(out: &mut Vec<u8>, end: usize, random: &mut Random) {
    let mut value = 0u32;
    while out.len() < end {
        value = value.wrapping_add(u32::from(random.byte()) % 50);
        out.extend_from_slice(&value.to_le_bytes());
    }
    out.truncate(end);
}

/// Mostly zeros.
fn sparse(out: &mut Vec<u8>, end: usize, random: &mut Random) {
    while out.len() < end {
        out.extend_from_slice(&random.next().to_le_bytes());
        let gap = out.len() + 100 + random.below(400);
        out.resize(gap, 0);
    }
    out.truncate(end);
}

/// What is compressed or encrypted already.
fn noise(out: &mut Vec<u8>, end: usize, random: &mut Random) {
    while out.len() < end {
        out.extend_from_slice(&random.next().to_le_bytes());
    }
    out.truncate(end);
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // A state of 0 would stay one.
        self.0 |= u64::from(self.0 == 0);
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }

    fn below(&mut self, limit: usize) -> usize {
        let [high, low, ..] = self.next().to_be_bytes();
        usize::from(u16::from_be_bytes([high, low])) % limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_full_different_and_without_zero_pages() {
        let packets = packets(Layout::X86);
        assert_eq!(packets.len(), PACKETS);
        for packet in &packets {
            assert_eq!(packet.len(), Layout::X86.packet_bytes());
            for page in packet.chunks(4096) {
                assert!(page.iter().any(|byte| *byte != 0));
            }
        }
        assert_ne!(packets[0], packets[1]);
    }
}
