//! Descriptors that public programs build, byte by byte against ours.
//!
//! Each row has the 64 bytes that the named function of the named program writes for the arguments at the top (and
//! nothing else; memory that it does not write is zero), worked out by hand from its source. Where it sets a bit that
//! we do not, or the other way round, the row says which and why that is right. Not here, because this crate has no
//! builder for them: DUALCAST, CFLUSH, DIF and the filters.
//!
//! | short         | what                                                                                          |
//! |---------------|-----------------------------------------------------------------------------------------------|
//! | accel-config  | intel/idxd-config, `test/dsa_prep.c`, `dsa.c`, `iaa_prep.c` and `iaa.c`; work queue without BOF |
//! | QPL           | intel/qpl, `sources/core-iaa/sources/descriptors` and their callers in `sources/middle-layer` |
//! | `iaa_crypto`  | torvalds/linux, `drivers/crypto/intel/iaa/iaa_crypto_main.c`                                  |
//! | canned patch  | linux-crypto, 28 March 2024, "crypto: iaa - Add deflate-canned compression algorithm"         |

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
        end: iaa::End::Block,
    };
    let decompress = iaa::Decompress {
        source: A,
        size: SIZE,
        destination: B,
        destination_size: 0x1000,
    };
    let crc64 = |reflected, inverted| iaa::Crc64 {
        source: A,
        size: SIZE,
        polynomial: 0x42f0_e1eb_a9ea_3693,
        inverted,
        reflected,
    };
    vec![
        same(
            "NOOP",
            "accel-config, dsa_prep_noop",
            "00000000 0c000000 c0ccbbbbaaaa9999 0000000000000000 0000000000000000 00000000 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::noop(RECORD).into(),
        ),
        same(
            "DRAIN",
            "accel-config, dsa_prep_drain",
            "00000000 0c000002 c0ccbbbbaaaa9999 0000000000000000 0000000000000000 00000000 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::drain(RECORD).into(),
        ),
        same(
            "BATCH of 16",
            "accel-config, dsa_prep_batch",
            "00000000 0c000001 c0ccbbbbaaaa9999 4044333322221111 0000000000000000 10000000 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::batch(A, 16, RECORD).into(),
        ),
        same(
            "MEMMOVE",
            "accel-config, dsa_prep_memcpy",
            "00000000 0c000003 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::memmove(A, B, SIZE, RECORD).into(),
        ),
        same(
            "FILL",
            "accel-config, dsa_prep_memfill",
            "00000000 0c000004 c0ccbbbbaaaa9999 efcdab8967452301 8088777766665555 40230100 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::fill(PATTERN, B, SIZE, RECORD).into(),
        ),
        same(
            "COMPARE (they name the second source first)",
            "accel-config, dsa_prep_compare",
            "00000000 0c000005 c0ccbbbbaaaa9999 8088777766665555 4044333322221111 40230100 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::compare(B, A, SIZE, RECORD).into(),
        ),
        same(
            "COMPVAL",
            "accel-config, dsa_prep_compval",
            "00000000 0c000006 c0ccbbbbaaaa9999 4044333322221111 efcdab8967452301 40230100 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            dsa::compare_pattern(A, SIZE, PATTERN, RECORD).into(),
        ),
        same(
            "CREATE_DELTA (its record twice as long as the data)",
            "accel-config, dsa_prep_cr_delta",
            "00000000 0c000007 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 0000 \
             0007060504030201 80460200 00000000 0000000000000000",
            dsa::create_delta(
                dsa::CreateDelta {
                    original: A,
                    modified: B,
                    size: SIZE,
                    delta: C,
                    max_delta_size: 2 * SIZE,
                },
                RECORD,
            )
            .into(),
        ),
        same(
            "APPLY_DELTA",
            "accel-config, dsa_prep_ap_delta",
            "00000000 0c000008 c0ccbbbbaaaa9999 0007060504030201 8088777766665555 40230100 0000 0000 \
             50000000 00000000 0000000000000000 0000000000000000",
            dsa::apply_delta(
                dsa::ApplyDelta {
                    delta: C,
                    delta_size: 80,
                    destination: B,
                    size: SIZE,
                },
                RECORD,
            )
            .into(),
        ),
        same(
            "CRCGEN",
            "accel-config, dsa_prep_crcgen, init_crcgen",
            "00000000 0c000010 c0ccbbbbaaaa9999 4044333322221111 0000000000000000 40230100 0000 0000 \
             78563412 00000000 0000000000000000 0000000000000000",
            dsa::crc(A, SIZE, 0x1234_5678, RECORD).into(),
        ),
        same(
            "COPY_CRC",
            "accel-config, dsa_prep_crc_copy, init_copy_crc",
            "00000000 0c000011 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 0000 \
             78563412 00000000 0000000000000000 0000000000000000",
            dsa::copy_crc(
                dsa::CopyCrc {
                    source: A,
                    destination: B,
                    size: SIZE,
                    seed: 0x1234_5678,
                },
                RECORD,
            )
            .into(),
        ),
        same(
            "IAA NOOP",
            "accel-config, iaa_prep_noop",
            "00000000 0c000000 c0ccbbbbaaaa9999 0000000000000000 0000000000000000 00000000 0000 0000 \
             0000000000000000 0000000000000000 0000000000000000",
            iaa::noop(RECORD).into(),
        ),
        same(
            "CRC64, reflected",
            "accel-config, iaa_prep_crc64 with IAA_CRC64_EXTRA_FLAGS_BIT_ORDER",
            "00000000 0c000044 c0ccbbbbaaaa9999 4044333322221111 0000000000000000 40230100 0000 0080 \
             0000000000000000 0000000000000000 9336eaa9ebe1f042",
            iaa::crc64(crc64(true, false), RECORD).into(),
        ),
        same(
            "CRC64, inverted",
            "QPL, hw_iaa_descriptor_init_crc64",
            "00000000 0c000044 c0ccbbbbaaaa9999 4044333322221111 0000000000000000 40230100 0000 0040 \
             0000000000000000 0000000000000000 9336eaa9ebe1f042",
            iaa::crc64(crc64(false, true), RECORD).into(),
        ),
        Row {
            difference: [(CACHE, 0), (0, 0)],
            why: WHOSE_CACHE,
            ..same(
                "COMPRESS",
                "iaa_crypto, iaa_compress",
                "00000000 0c010143 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 0600 \
                 0007060504030201 ff0f0000 20060000 0000000000000000",
                iaa::compress(compress, RECORD).into(),
            )
        },
        same(
            "COMPRESS for statistics",
            "QPL, hw_iaa_descriptor_init_statistic_collector",
            "00000000 0c000043 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 0100 \
             0000000000000000 00050000 00000000 0000000000000000",
            iaa::statistics(A, SIZE, B, RECORD).into(),
        ),
        same(
            "DECOMPRESS",
            "accel-config, iaa_decompress_multi_task_nodes",
            "00000000 0c000042 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 1f00 \
             0000000000000000 00100000 00000000 0000000000000000",
            iaa::decompress(decompress, RECORD).into(),
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
                iaa::decompress(decompress, RECORD).into(),
            )
        },
        same(
            "DECOMPRESS that can be gone on with",
            "QPL, inflate_state::build_descriptor<inflate_default>, single chunk",
            "00000000 0c000842 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 1f00 \
             0007060504030201 00100000 00150000 0000000000000000",
            iaa::decompress_piece(decompress, C, 0, RECORD).into(),
        ),
        same(
            "DECOMPRESS that goes on, with the second copy",
            "QPL, inflate_state::build_descriptor<inflate_default>, last chunk, aecs_index 1",
            "00000000 0c004942 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 1f00 \
             0007060504030201 00100000 00150000 0000000000000000",
            iaa::decompress_piece(decompress, C, 1, RECORD).into(),
        ),
        Row {
            difference: [(0, 0), (0, 1 << 3)],
            why: "a canned stream that is cut is no success",
            ..same(
                "DECOMPRESS of a canned stream",
                "QPL, hw_iaa_descriptor_init_inflate_body",
                "00000000 0c000142 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 0700 \
                 0007060504030201 00100000 e0040000 0000000000000000",
                iaa::decompress_canned(decompress, C, RECORD).into(),
            )
        },
        Row {
            difference: [(CACHE, 0), (0, 0)],
            why: WHOSE_CACHE,
            ..same(
                "DECOMPRESS of a canned stream",
                "canned patch, iaa_decompress, AECS of format 2",
                "00000000 0c010142 c0ccbbbbaaaa9999 4044333322221111 8088777766665555 40230100 0000 0f00 \
                 0007060504030201 00100000 e0040000 0000000000000000",
                iaa::decompress_canned(decompress, C, RECORD).into(),
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

/// The header is our own, so its address and size are taken from ours: of fixed codes, three bits.
#[test]
fn codes_are_loaded_as_by_public_programs() {
    let header = iaa::Codes::fixed().header(true);
    let ours: Descriptor = iaa::load_codes(&header, C, RECORD).into();
    assert_eq!(ours.size, 1);
    let ours = Descriptor {
        address_1: A,
        ..ours
    };
    for (source, theirs, difference, why) in [
        (
            "QPL, hw_iaa_descriptor_init_inflate_header",
            "00000000 0c004442 c0ccbbbbaaaa9999 4044333322221111 0000000000000000 01000000 0000 4103 \
             0007060504030201 00000000 e0040000 0000000000000000",
            SAME,
            "",
        ),
        (
            "canned patch, decompress_header, AECS of format 2",
            "00000000 0c014442 c0ccbbbbaaaa9999 4044333322221111 0000000000000000 01000000 0000 4103 \
             0007060504030201 00000000 e0040000 0000000000000000",
            [(CACHE, 0), (0, 0)],
            WHOSE_CACHE,
        ),
    ] {
        check(&Row {
            what: "DECOMPRESS of a header",
            source,
            theirs,
            ours,
            difference,
            why,
        });
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

/// `hw_aecs_at_start_block_header` of QPL at the place of `decompress_state` in `hw_iaa_aecs_analytic`; the sizes are
/// those of `hw_aecs_api.h`, and the smaller one also `DECOMP_INT_STATE_FMT2_LEN` of the canned patch.
#[test]
fn a_new_decompress_aecs_is_that_of_qpl() {
    let mut expected = [0; 0x1500];
    expected[0x434] = 1;
    assert_eq!(*iaa::DecompressAecs::new().bytes(), expected);
    assert_eq!(iaa::DecompressAecs::SIZE, 5376);
    assert_eq!(iaa::DecompressAecs::SIZE_WITHOUT_HISTORY, 1248);
}
