use super::expected;
use idxd::{Capabilities, iaa::*, *};

const COMPRESS: Compress = Compress {
    source: 0x1122_3344_5566_7788,
    size: 0x0002_1000,
    destination: 0x99aa_bbcc_ddee_ff00,
    destination_size: 0x0001_0fff,
    aecs: 0x0102_0304_0506_0720,
};
const DECOMPRESS: Decompress = Decompress {
    source: COMPRESS.source,
    size: COMPRESS.size,
    destination: COMPRESS.destination,
    destination_size: COMPRESS.destination_size,
};
const RECORD: u64 = 0x0000_7f01_0203_0440;
const RECORD_BYTES: &[u8] = &[0x40, 0x04, 0x03, 0x02, 0x01, 0x7f, 0, 0];
const SOURCE: &[u8] = &[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11];
const DESTINATION: &[u8] = &[0x00, 0xff, 0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x99];
const SIZE: &[u8] = &[0x00, 0x10, 0x02, 0x00];

#[test]
fn builders_write_the_bytes_of_the_header_file() {
    let source_and_destination: [(usize, &[u8]); 4] = [
        (8, RECORD_BYTES),
        (16, SOURCE),
        (24, DESTINATION),
        (32, SIZE),
    ];
    let transfer = |rest: &[(usize, &[u8])]| {
        let mut parts = source_and_destination.to_vec();
        parts.extend_from_slice(rest);
        expected(&parts)
    };
    let cases: [(Descriptor, [u8; 64]); 2] = [
        (
            compress(COMPRESS, RECORD),
            transfer(&[
                (4, &[0x0c, 0x00, 0x01, 0x43]),
                (38, &[0x06, 0x00]),
                (40, &[0x20, 7, 6, 5, 4, 3, 2, 1]),
                (48, &[0xff, 0x0f, 0x01, 0x00]),
                (52, &[0x20, 0x06, 0x00, 0x00]),
            ]),
        ),
        (
            decompress(DECOMPRESS, RECORD),
            transfer(&[
                (4, &[0x0c, 0x00, 0x00, 0x42]),
                (38, &[0x1f, 0x00]),
                (48, &[0xff, 0x0f, 0x01, 0x00]),
            ]),
        ),
    ];
    for (descriptor, expected) in cases {
        assert_eq!(
            descriptor.bytes(),
            expected,
            "opcode {:#x}",
            descriptor.opcode()
        );
    }
}

#[test]
fn flags_stand_at_their_bits() {
    let all = compress(COMPRESS, RECORD).with(Capabilities::FIRST_IAA.cache_flag());
    assert_eq!(all.bytes()[4..8], [0x0c, 0x01, 0x01, 0x43]);
}

#[test]
fn a_fixed_aecs_is_as_the_kernel_and_qpl_have_it() {
    let aecs = CompressAecs::fixed();
    assert_eq!(aecs.address() % 32, 0);
    let bytes = aecs.to_bytes();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert!(bytes[..28].iter().all(|byte| *byte == 0));
    assert_eq!(word(28), 3);
    assert_eq!(word(32), 3);
    assert!(bytes[36..288].iter().all(|byte| *byte == 0));
    assert_eq!(word(288), 8 << 15 | 0x30);
    assert_eq!(word(288 + 4 * 144), 9 << 15 | 0x190);
    assert_eq!(word(288 + 4 * 256), 7 << 15);
    assert_eq!(word(288 + 4 * 285), 8 << 15 | 0xc5);
    assert_eq!((word(1432), word(1436)), (0, 0));
    assert_eq!(word(1440), 5 << 15);
    assert_eq!(word(1440 + 4 * 29), 5 << 15 | 29);
    assert_eq!((word(1560), word(1564)), (0, 0));
}
