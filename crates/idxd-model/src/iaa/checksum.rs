//! The checksums that IAA writes into its completion records.

/// CRC-32, that of zlib.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// XOR of the 16-bit words, the last one padded with zero, as QPL's software path does it.
pub(super) fn xor16(bytes: &[u8]) -> u16 {
    let (words, rest) = bytes.as_chunks::<2>();
    let last = rest.first().map_or(0, |byte| u16::from(*byte));
    words
        .iter()
        .fold(last, |xor, word| xor ^ u16::from_le_bytes(*word))
}

/// CRC-64 by any normal `polynomial`, neither reflected nor inverted.
pub(super) fn crc64(polynomial: u64, bytes: &[u8]) -> u64 {
    let mut table = [0; 256];
    for (byte, entry) in (0_u64..).zip(&mut table) {
        *entry = (0..8).fold(byte << 56, |crc, _| (crc << 1) ^ (polynomial * (crc >> 63)));
    }
    bytes.iter().fold(0, |crc, byte| {
        (crc << 8) ^ table[usize::from((crc >> 56) as u8 ^ byte)]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check values of the catalogue of CRC algorithms.
    #[test]
    fn check_values_are_right() {
        let nine = b"123456789";
        assert_eq!(crc32(nine), 0xcbf4_3926);
        assert_eq!(crc64(0x42f0_e1eb_a9ea_3693, nine), 0x6c40_df5f_0b49_7347);
        assert_eq!(crc64(0, nine), 0);
        assert_eq!(xor16(&[0x12, 0x34, 0x56]), 0x3412 ^ 0x0056);
    }
}
