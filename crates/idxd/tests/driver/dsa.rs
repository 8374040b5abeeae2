use super::expected;
use idxd::{Capabilities, dsa::*, *};

const RECORD_ADDRESS: u64 = 0x0000_7f01_0203_0440;
/// Flags, opcode and record, as every builder writes them.
fn head(opcode: u8) -> [u8; 12] {
    [0x0c, 0, 0, opcode, 0x40, 0x04, 0x03, 0x02, 0x01, 0x7f, 0, 0]
}
const A: u64 = 0x1122_3344_5566_7788;
const A_BYTES: &[u8] = &[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11];
const B: u64 = 0x99aa_bbcc_ddee_ff00;
const B_BYTES: &[u8] = &[0x00, 0xff, 0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x99];
const SIZE: u32 = 0x0002_1000;
const SIZE_BYTES: &[u8] = &[0x00, 0x10, 0x02, 0x00];

#[test]
fn builders_write_the_bytes_of_the_header_file() {
    let record = RECORD_ADDRESS;
    let transfer = |opcode: u8| (head(opcode), A_BYTES, B_BYTES, SIZE_BYTES);
    let whole = |opcode: u8, tail: &[(usize, &[u8])]| {
        let (head, a, b, size) = transfer(opcode);
        let mut parts = vec![(4, &head[..]), (16, a), (24, b), (32, size)];
        parts.extend_from_slice(tail);
        expected(&parts)
    };
    let cases: [(Descriptor, [u8; 64]); 4] = [
        (noop(record), expected(&[(4, &head(0x00))])),
        (
            batch(A, 0x80, record),
            expected(&[(4, &head(0x01)), (16, A_BYTES), (32, &[0x80])]),
        ),
        (drain(record), expected(&[(4, &head(0x02))])),
        (compare_pattern(A, SIZE, B, record), whole(0x06, &[])),
    ];
    for (descriptor, expected) in cases {
        assert_eq!(
            descriptor.bytes(),
            expected,
            "opcode {}",
            descriptor.opcode()
        );
    }
}

#[test]
fn flags_stand_at_their_bits() {
    let compare = compare_pattern(A, SIZE, B, RECORD_ADDRESS);
    let all = compare.with(Capabilities::FIRST_DSA.cache_flag());
    assert_eq!(all.bytes()[4..8], [0x0c, 0x01, 0x00, 0x06]);
    assert_eq!(compare.with(Capabilities::default().cache_flag()), compare);
}
