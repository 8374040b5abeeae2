//! The checksums that IAA writes into its completion records.

/// CRC-32 (zlib's), or CRC-32C where the descriptor asks for it, of what came before and `bytes`. `seed` is the
/// checksum of what came before: zero at the beginning.
pub(super) fn crc32(castagnoli: bool, seed: u32, bytes: &[u8]) -> u32 {
    let tables = if castagnoli { &CRC32C } else { &CRC32 };
    let mut crc = !seed;
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let word = (u64::from_le_bytes(*word) ^ u64::from(crc)).to_le_bytes();
        crc = 0;
        for (table, byte) in tables.iter().rev().zip(word) {
            crc ^= table[usize::from(byte)];
        }
    }
    for byte in rest {
        crc = (crc >> 8) ^ tables[0][usize::from((crc & 0xff) as u8 ^ byte)];
    }
    !crc
}

/// XOR of the 16-bit words, the last one filled up with a zero, as QPL's software path does it.
pub(super) fn xor16(seed: u16, bytes: &[u8]) -> u16 {
    let (words, rest) = bytes.as_chunks::<2>();
    let last = rest.first().map_or(0, |byte| u16::from(*byte));
    words
        .iter()
        .fold(seed ^ last, |xor, word| xor ^ u16::from_le_bytes(*word))
}

/// CRC-64 by any `polynomial`, which is left-aligned if it has a lower degree: inversion is of its own bits only.
/// What `reflected` and `inverted` mean is what accel-config's test of this operation computes.
pub(super) fn crc64(polynomial: u64, reflected: bool, inverted: bool, bytes: &[u8]) -> u64 {
    let own_bits = u64::MAX
        .checked_shl(polynomial.trailing_zeros())
        .unwrap_or(0);
    let inversion = match (inverted, reflected) {
        (false, _) => 0,
        (true, false) => own_bits,
        (true, true) => own_bits.reverse_bits(),
    };
    let mut table = [0; 256];
    for (byte, entry) in (0_u64..).zip(&mut table) {
        *entry = (0..8).fold(
            if reflected { byte } else { byte << 56 },
            |crc, _| match reflected {
                true => (crc >> 1) ^ (polynomial.reverse_bits() * (crc & 1)),
                false => (crc << 1) ^ (polynomial * (crc >> 63)),
            },
        );
    }
    let crc = bytes.iter().fold(inversion, |crc, byte| match reflected {
        true => (crc >> 8) ^ table[usize::from((crc & 0xff) as u8 ^ byte)],
        false => (crc << 8) ^ table[usize::from((crc >> 56) as u8 ^ byte)],
    });
    crc ^ inversion
}

static CRC32: [[u32; 256]; 8] = crc32_tables(0xedb8_8320);
static CRC32C: [[u32; 256]; 8] = crc32_tables(0x82f6_3b78);

/// Table N is of a byte that N zero bytes follow, so that eight bytes need eight independent look-ups.
const fn crc32_tables(reflected_polynomial: u32) -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0_u32;
    while byte < 256 {
        let mut crc = byte;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (reflected_polynomial * (crc & 1));
            bit += 1;
        }
        tables[0][byte as usize] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let shorter = tables[table - 1][byte];
            tables[table][byte] = (shorter >> 8) ^ tables[0][(shorter & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check values of the catalogue of CRC algorithms.
    #[test]
    fn the_check_values_are_right() {
        let nine = b"123456789";
        assert_eq!(crc32(false, 0, nine), 0xcbf4_3926);
        assert_eq!(crc32(true, 0, nine), 0xe306_9283);
        let ecma = 0x42f0_e1eb_a9ea_3693;
        assert_eq!(crc64(ecma, false, false, nine), 0x6c40_df5f_0b49_7347);
        assert_eq!(crc64(ecma, false, true, nine), 0x62ec_59e3_f1a4_f00a);
        assert_eq!(crc64(ecma, true, true, nine), 0x995d_c9bb_df19_39fa);
        // CRC-32/BZIP2 in the upper half: a lower degree inverts only its own bits.
        let bzip2 = 0x04c1_1db7_0000_0000;
        assert_eq!(crc64(bzip2, false, true, nine), 0xfc89_1918_0000_0000);
        assert_eq!(crc64(0, false, true, nine), 0);
    }

    #[test]
    fn checksums_go_on_from_a_seed() {
        let bytes: Vec<u8> = (0..=255).cycle().take(1001).collect();
        for at in [0, 2, 8, 500, 1000] {
            let (first, second) = bytes.split_at(at);
            let whole = crc32(false, 0, &bytes);
            assert_eq!(crc32(false, crc32(false, 0, first), second), whole);
            assert_eq!(xor16(xor16(0, first), second), xor16(0, &bytes));
        }
        assert_eq!(xor16(0, &[0x12, 0x34, 0x56]), 0x3412 ^ 0x0056);
    }
}
