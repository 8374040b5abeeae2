//! Descriptors that public programs build, byte by byte against ours.
//!
//! Each row has the 64 bytes that the named function of the named program writes for the arguments at the top (and
//! nothing else; memory that it does not write is zero), worked out by hand from its source. Where it sets a bit that
//! we do not, or the other way round, the row says which and why that is right. Not here, because this crate has no
//! builder for them: FILL, CRC64, DUALCAST, CFLUSH, DIF and the filters.
//!
//! | short         | what                                                                                          |
//! |---------------|-----------------------------------------------------------------------------------------------|
//! | accel-config  | intel/idxd-config, `test/dsa_prep.c`, `dsa.c`, `iaa_prep.c` and `iaa.c`; work queue without BOF |
//! | QPL           | intel/qpl, `sources/core-iaa/sources/descriptors` and their callers in `sources/middle-layer` |
//! | `iaa_crypto`  | torvalds/linux, `drivers/crypto/intel/iaa/iaa_crypto_main.c`                                  |

use idxd::{Descriptor, dsa, iaa};

const A: u64 = 0x1111_2222_3333_4440;
const B: u64 = 0x5555_6666_7777_8880;
const C: u64 = 0x0102_0304_0506_0700;
const RECORD: u64 = 0x9999_aaaa_bbbb_ccc0;
const SIZE: u32 = 0x0001_2340;
const PATTERN: u64 = 0x0123_4567_89ab_cdef;

struct Row {
    what: &'static str,
    source: &'static str,
    /// In the order of memory: space and privilege, flags and opcode, record, addresses, size, interrupt and flags of
    /// the operation, and three words.
    theirs: &'static str,
    ours: Descriptor,
    /// Bits of flags and of the operation's flags that only they set, and that only we do.
    difference: [(u32, u16); 2],
    why: &'static str,
}

const SAME: [(u32, u16); 2] = [(0, 0), (0, 0)];
const CACHE: u32 = 1 << 8;
const WHOSE_CACHE: &str = "cache control is set by the caller, where the device has it";

fn rows() -> Vec<Row> {
    let same = |what, source, theirs, ours| Row {
        what,
        source,
        theirs,
        ours,
        difference: SAME,
        why: "",
    };
    let compress = iaa::Compress {
        source: A,
        size: SIZE,
        destination: B,
        destination_size: 0x0fff,
        aecs: C,
    };
    let decompress = iaa::Decompress {
        source: A,
        size: SIZE,
        destination: B,
        destination_size: 0x1000,
    };
    vec![
        same(
            "NOOP",
            "accel-config, dsa_prep_noop",
            "00000000 0c000000 c0ccbbbbaaaa9999 0000000000000000 0000000000000000 00000000 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::noop(RECORD),
        ),
        same(
            "DRAIN",
            "accel-config, dsa_prep_drain",
            "00000000 0c000002 c0ccbbbbaaaa9999 0000000000000000 0000000000000000 00000000 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::drain(RECORD),
        ),
        same(
            "BATCH of 16",
            "accel-config, dsa_prep_batch",
            "00000000 0c000001 c0ccbbbbaaaa9999 4044333322221111 0000000000000000 10000000 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::batch(A, 16, RECORD),
        ),
        same(
            "COMPVAL",
            "accel-config, dsa_prep_compval",
            "00000000 0c000006 c0ccbbbbaaaa9999 4044333322221111 efcdab8967452301 40230100 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::compare_pattern(A, SIZE, PATTERN, RECORD),
        ),
        same(
            "IAA NOOP",
            "accel-config, iaa_prep_noop",
            "00000000 0c000000 c0ccbbbbaaaa9999 0000000000000000 0000000000000000 00000000 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::noop(RECORD),
        ),
        Row {
            difference: [(CACHE, 0), (0, 0)],
            why: WHOSE_CACHE,
            ..same(
                "COMPRESS",
                "iaa_crypto, iaa_compress",
                "00000000 0c010143 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 0600 \
                 0007060504030201 ff0f0000 20060000 0000000000000000",
                iaa::compress(compress, RECORD),
            )
        },
        same(
            "DECOMPRESS",
            "accel-config, iaa_decompress_multi_task_nodes",
            "00000000 0c000042 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 1f00 \
             0000000000000000 00100000 00000000 0000000000000000",
            iaa::decompress(decompress, RECORD),
        ),
        Row {
            difference: [(CACHE, 0), (0, 1 << 4)],
            why: "they stop at the end of any block, but a stream of several blocks ends with its last; and cache \
                  control is set by the caller, where the device has it",
            ..same(
                "DECOMPRESS",
                "iaa_crypto, iaa_decompress",
                "00000000 0c010042 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 0f00 \
                 0000000000000000 00100000 00000000 0000000000000000",
                iaa::decompress(decompress, RECORD),
            )
        },
    ]
}

#[test]
fn descriptors_are_those_of_public_programs() {
    for row in rows() {
        check(&row);
    }
}

fn check(row: &Row) {
    let mut theirs = bytes(row.theirs);
    let mut ours = row.ours.bytes();
    let [(only_theirs, operation_theirs), (only_ours, operation_ours)] = row.difference;
    assert_eq!(row.difference == SAME, row.why.is_empty());
    for (bytes, (flags, operation)) in [
        (&mut theirs, (only_theirs, operation_theirs)),
        (&mut ours, (only_ours, operation_ours)),
    ] {
        let bits = flags.to_le_bytes().into_iter();
        let bits = (4..).zip(bits).chain((38..).zip(operation.to_le_bytes()));
        for (at, bits) in bits {
            assert_eq!(bytes[at] & bits, bits, "{}: {}", row.what, row.source);
            bytes[at] &= !bits;
        }
    }
    assert_eq!(ours, theirs, "{}: {}", row.what, row.source);
}

fn bytes(hex: &str) -> [u8; 64] {
    let digits: Vec<u8> = hex
        .chars()
        .filter_map(|digit| digit.to_digit(16))
        .map(|digit| digit.try_into().unwrap())
        .collect();
    let bytes: Vec<u8> = digits.chunks(2).map(|two| two[0] << 4 | two[1]).collect();
    bytes.try_into().unwrap()
}

/// `fixed_ll_sym` and `fixed_d_sym` of `iaa_crypto_comp_fixed.c` (`iaa_crypto`) and `iaa_compress_aecs` of accel-config's
/// `test/algorithms/iaa_compress.h`, which are the same words: runs of first word and number.
#[test]
fn the_fixed_aecs_is_that_of_public_programs() {
    let literals = [(0x40030, 144), (0x48190, 112), (0x38000, 24), (0x400c0, 6)];
    let distances = [(0x28000, 30)];
    let runs = |runs: &[(u32, u32)]| {
        let words = runs.iter().flat_map(|(first, count)| *first..first + count);
        words.flat_map(u32::to_le_bytes).collect::<Vec<_>>()
    };
    // Sums, reserved; three valid bits, which are BFINAL and BTYPE 1.
    let mut expected = vec![0; 28];
    expected.extend(3_u32.to_le_bytes());
    expected.extend(3_u32.to_le_bytes());
    expected.resize(288, 0);
    expected.extend(runs(&literals));
    expected.extend([0; 8]);
    expected.extend(runs(&distances));
    expected.extend([0; 8]);
    let ours = iaa::CompressAecs::fixed().to_bytes();
    assert_eq!(ours[..], expected[..]);
}
