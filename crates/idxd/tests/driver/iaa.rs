use proptest::prelude::*;

use super::expected;
use idxd::{
    Capabilities, Kind, Limits, Mode, Operations,
    rules::{Place, Violation, check},
};
use idxd::{iaa::*, operation::*, *};

const COMPRESS: Compress = Compress {
    source: 0x1122_3344_5566_7788,
    size: 0x0002_1000,
    destination: 0x99aa_bbcc_ddee_ff00,
    destination_size: 0x0001_0fff,
    aecs: 0x0102_0304_0506_0720,
    end: End::Block,
};
const DECOMPRESS: Decompress = Decompress {
    source: COMPRESS.source,
    size: COMPRESS.size,
    destination: COMPRESS.destination,
    destination_size: COMPRESS.destination_size,
};
const CRC: Crc64 = Crc64 {
    source: COMPRESS.source,
    size: COMPRESS.size,
    polynomial: 0x0102_0304_0506_0708,
    inverted: false,
    reflected: false,
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
    let cases: [(Descriptor, [u8; 64]); 6] = [
        (
            noop(RECORD).into(),
            expected(&[(4, &[0x0c, 0, 0, 0x00]), (8, RECORD_BYTES)]),
        ),
        (
            drain(RECORD).into(),
            expected(&[(4, &[0x0c, 0, 0, 0x02]), (8, RECORD_BYTES)]),
        ),
        (
            compress(COMPRESS, RECORD).into(),
            transfer(&[
                (4, &[0x0c, 0x00, 0x01, 0x43]),
                (38, &[0x06, 0x00]),
                (40, &[0x20, 7, 6, 5, 4, 3, 2, 1]),
                (48, &[0xff, 0x0f, 0x01, 0x00]),
                (52, &[0x20, 0x06, 0x00, 0x00]),
            ]),
        ),
        (
            statistics(COMPRESS.source, COMPRESS.size, COMPRESS.destination, RECORD).into(),
            transfer(&[
                (4, &[0x0c, 0x00, 0x00, 0x43]),
                (38, &[0x01, 0x00]),
                (48, &[0x00, 0x05, 0x00, 0x00]),
            ]),
        ),
        (
            decompress(DECOMPRESS, RECORD).into(),
            transfer(&[
                (4, &[0x0c, 0x00, 0x00, 0x42]),
                (38, &[0x1f, 0x00]),
                (48, &[0xff, 0x0f, 0x01, 0x00]),
            ]),
        ),
        (
            crc64(CRC, RECORD).into(),
            expected(&[
                (4, &[0x0c, 0x00, 0x00, 0x44]),
                (8, RECORD_BYTES),
                (16, SOURCE),
                (32, SIZE),
                (56, &[8, 7, 6, 5, 4, 3, 2, 1]),
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
    let flags = |end| {
        let compress = compress(Compress { end, ..COMPRESS }, RECORD);
        compress.descriptor().operation_flags
    };
    assert_eq!(flags(End::EmptyStored), 0x0a);
    assert_eq!(flags(End::FinalStored), 0x0e);

    let crc = Crc64 {
        inverted: true,
        reflected: true,
        ..CRC
    };
    assert_eq!(crc64(crc, RECORD).descriptor().operation_flags, 0xc000);

    let all = compress(COMPRESS, RECORD)
        .blocking_on_fault(true)
        .with_cache_control(Capabilities::FIRST_IAA)
        .descriptor();
    assert_eq!(all.bytes()[4..8], [0x0e, 0x01, 0x01, 0x43]);
}

fn limits() -> Limits {
    let opcodes = [0, 2, 0x42, 0x43, 0x44];
    Limits {
        kind: Kind::Iaa,
        mode: Mode::Shared,
        size: 16,
        threshold: 16,
        max_batch: None,
        max_transfer: 2 << 20,
        block_on_fault: true,
        operations: opcodes
            .into_iter()
            .fold(Operations::default(), |all, opcode| all.with(opcode)),
        version: 0x100,
        capabilities: Capabilities::FIRST_IAA,
        numa_node: None,
    }
}

#[test]
fn what_the_types_allow_the_rules_allow() {
    fn produces(operation: Operation<Produces>) -> Descriptor {
        operation
            .blocking_on_fault(true)
            .with_cache_control(Capabilities::FIRST_IAA)
            .into()
    }
    let good = [
        noop(0x40).into(),
        drain(0x40).into(),
        produces(compress(COMPRESS, 0x40)),
        produces(statistics(0x1000, 4096, 0x2000, 0x40)),
        produces(decompress(DECOMPRESS, 0x40)),
        crc64(CRC, 0x40).blocking_on_fault(true).into(),
    ];
    for descriptor in good {
        let checked = check(&descriptor, &limits(), Place::Queue);
        assert_eq!(checked, Ok(()), "{descriptor:x?}");
        // There are no batches.
        let checked = check(&descriptor, &limits(), Place::Batch);
        assert_eq!(checked, Err(Violation::Opcode));
    }
}

#[test]
fn every_violation_is_found() {
    use Violation as V;
    let checked = |descriptor: Descriptor| check(&descriptor, &limits(), Place::Queue);
    let good = compress(COMPRESS, 0x40).descriptor();

    let with = |flags: Flags| Descriptor {
        control: Descriptor::control_of(good.opcode(), good.flags().with(flags)),
        ..good
    };
    assert_eq!(checked(with(Flags::FENCE)), Err(V::Flags(Flags::FENCE)));
    assert_eq!(checked(with(Flags::AECS_TOGGLE)), Ok(()));
    let operation_flags = 0x0206;
    let unknown_flag = Descriptor {
        operation_flags,
        ..good
    };
    assert_eq!(checked(unknown_flag), Err(V::OperationFlags(0x0200)));
    assert_eq!(V::OperationFlags(0x0200).code(), 0x30);

    let mut odd = good;
    odd.operands[2] = 1;
    assert_eq!(checked(odd), Err(V::SecondFlags(1)));
    assert_eq!(V::SecondFlags(1).code(), 0x31);
    odd.operands[2] = 1 << 32;
    assert_eq!(checked(odd), Err(V::Reserved));
    let mut inflating = decompress(DECOMPRESS, 0x40).descriptor();
    inflating.operands[2] = 1;
    assert_eq!(checked(inflating), Err(V::Reserved));
    inflating = decompress(DECOMPRESS, 0x40).descriptor();
    inflating.operation_flags &= !1;
    assert_eq!(checked(inflating), Err(V::OperationFlags(1)));
    // An index takes the place of the output.
    for (flags, wanted) in [(1 << 9, Ok(())), (0, Err(V::OperationFlags(1 << 10)))] {
        inflating.operation_flags = 1 | 1 << 10 | flags;
        assert_eq!(checked(inflating), wanted);
    }
    // Where an operation has no flags, they are reserved.
    let odd = Descriptor {
        operation_flags: 1,
        ..noop(0x40).descriptor()
    };
    assert_eq!(checked(odd), Err(V::Reserved));
    assert_eq!(
        checked(Descriptor { record: 32, ..good }),
        Err(V::RecordAlignment)
    );

    let misplaced = Compress {
        aecs: COMPRESS.aecs + 16,
        ..COMPRESS
    };
    assert_eq!(checked(compress(misplaced, 0x40).into()), Err(V::Alignment));
    let mut short = good;
    short.operands[1] -= 16 << 32;
    assert_eq!(checked(short), Err(V::Alignment));

    // The output's size counts, not the input's.
    let apart = Decompress {
        source: 0x1000,
        size: 0x100,
        destination: 0x0800,
        destination_size: 0x0800,
    };
    assert_eq!(checked(decompress(apart, 0x40).into()), Ok(()));
    let overlapping = Decompress {
        destination_size: 0x0801,
        ..apart
    };
    assert_eq!(
        checked(decompress(overlapping, 0x40).into()),
        Err(V::Overlap)
    );
}

fn flagged(descriptor: impl Into<Descriptor>, flags: Flags) -> Descriptor {
    let descriptor = descriptor.into();
    Descriptor {
        control: Descriptor::control_of(descriptor.opcode(), flags),
        ..descriptor
    }
}

const RECORD_FLAGS: Flags = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
const READ: Flags = Flags::READ_AECS;
const WRITE: Flags = Flags::WRITE_AECS;
const WRITE_ON_OVERFLOW: Flags = Flags(1 << 19);
const TOGGLE: Flags = Flags::AECS_TOGGLE;

#[test]
fn flags_without_a_meaning_are_refused() {
    let checked = |descriptor: Descriptor| check(&descriptor, &limits(), Place::Queue);
    let with = |descriptor: Descriptor, bit: u32| {
        checked(flagged(
            descriptor,
            descriptor.flags().with(Flags(1 << bit)),
        ))
    };
    for descriptor in [
        noop(0x40).descriptor(),
        drain(0x40).descriptor(),
        compress(COMPRESS, 0x40).descriptor(),
        statistics(0x1000, 4096, 0x2000, 0x40).descriptor(),
        decompress(DECOMPRESS, 0x40).descriptor(),
        crc64(CRC, 0x40).descriptor(),
    ] {
        for bit in [0, 5, 6, 7, 15, 17, 20, 23] {
            let wanted = Err(Violation::Flags(Flags(1 << bit)));
            assert_eq!(with(descriptor, bit), wanted, "{descriptor:x?}");
        }
    }
    // A NOOP has no address but its record's, a checksum neither destination nor AECS.
    for (descriptor, bits) in [
        (noop(0x40).descriptor(), &[9, 10, 11][..]),
        (
            crc64(CRC, 0x40).descriptor(),
            &[8, 10, 11, 13, 14, 16, 18, 21, 22],
        ),
    ] {
        assert_eq!(with(descriptor, 12), Ok(()));
        for bit in bits {
            let wanted = Err(Violation::Flags(Flags(1 << bit)));
            assert_eq!(with(descriptor, *bit), wanted);
        }
    }
}

#[test]
fn what_has_a_result_needs_a_record() {
    for descriptor in [
        compress(COMPRESS, 0x40).descriptor(),
        statistics(0x1000, 4096, 0x2000, 0x40).descriptor(),
        decompress(DECOMPRESS, 0x40).descriptor(),
        crc64(CRC, 0x40).descriptor(),
    ] {
        let flags = Flags(descriptor.flags().0 & !Flags::RECORD_REQUESTED.0);
        let checked = check(&flagged(descriptor, flags), &limits(), Place::Queue);
        assert_eq!(checked, Err(Violation::Flags(Flags::RECORD_REQUESTED)));
    }
    let unasked = flagged(noop(0x40), Flags::RECORD_VALID);
    assert_eq!(check(&unasked, &limits(), Place::Queue), Ok(()));
}

#[test]
fn sizes_may_be_zero_one_at_a_time() {
    use Violation as V;
    let sized = |size, destination_size| {
        let decompress = decompress(
            Decompress {
                source: 0x10_0000,
                size,
                destination: 0x80_0000,
                destination_size,
            },
            0x40,
        );
        check(&decompress.into(), &limits(), Place::Queue)
    };
    assert_eq!(sized(0, 1), Ok(()));
    assert_eq!(sized(1, 0), Ok(()));
    assert_eq!(sized(0, 0), Err(V::Size));
    assert_eq!(sized(2 << 20, 2 << 20), Ok(()));
    assert_eq!(sized((2 << 20) + 1, 1), Err(V::Size));
    assert_eq!(sized(1, (2 << 20) + 1), Err(V::Size));
    // Checksums are of something.
    let empty = crc64(Crc64 { size: 0, ..CRC }, 0x40).into();
    assert_eq!(check(&empty, &limits(), Place::Queue), Err(V::Size));
    // The AECS counts too.
    let mut less = limits();
    less.max_transfer = 1024;
    let compress = compress(
        Compress {
            size: 1024,
            destination_size: 1024,
            ..COMPRESS
        },
        0x40,
    );
    assert_eq!(check(&compress.into(), &less, Place::Queue), Err(V::Size));
}

#[test]
fn compression_reads_an_aecs_and_statistics_do_not() {
    use Violation as V;
    let checked = |descriptor: Descriptor| check(&descriptor, &limits(), Place::Queue);
    let good = compress(COMPRESS, 0x40).descriptor();
    assert_eq!(checked(flagged(good, RECORD_FLAGS)), Err(V::Flags(READ)));
    assert_eq!(checked(flagged(good, good.flags().with(WRITE))), Ok(()));
    let on_overflow = good.flags().with(WRITE_ON_OVERFLOW);
    assert_eq!(
        checked(flagged(good, on_overflow)),
        Err(V::Flags(WRITE_ON_OVERFLOW))
    );
    let mut long = good;
    long.operands[1] += 32 << 32;
    assert_eq!(checked(long), Err(V::Size));

    let counting = statistics(0x1000, 4096, 0x4000, 0x40).descriptor();
    for flag in [READ, WRITE, TOGGLE, Flags(1 << 11)] {
        let odd = flagged(counting, RECORD_FLAGS.with(flag));
        assert_eq!(checked(odd), Err(V::Flags(flag)));
    }
    let mut odd = counting;
    odd.operands[0] = 0x8000;
    assert_eq!(checked(odd), Err(V::Reserved));
}

#[test]
fn an_aecs_of_decompression_needs_a_flag_and_a_size() {
    use Violation as V;
    let with = |flags: Flags, address: u64, size: u64| {
        let plain = decompress(DECOMPRESS, 0x40).descriptor();
        let descriptor = Descriptor {
            operands: [address, plain.operands[1] | size << 32, 0],
            ..flagged(plain, RECORD_FLAGS.with(flags))
        };
        check(&descriptor, &limits(), Place::Queue)
    };
    assert_eq!(with(Flags::default(), 0x8000, 0), Err(V::Reserved));
    assert_eq!(with(TOGGLE, 0, 0), Err(V::Flags(TOGGLE)));
    let both = WRITE.with(WRITE_ON_OVERFLOW);
    assert_eq!(with(both, 0x8000, 0x1500), Err(V::Flags(WRITE_ON_OVERFLOW)));
    for flags in [
        READ,
        WRITE,
        WRITE_ON_OVERFLOW,
        READ.with(WRITE).with(TOGGLE),
    ] {
        assert_eq!(with(flags, 0x8000, 0x1500), Ok(()));
        assert_eq!(with(flags, 0x8010, 0x1500), Err(V::Alignment));
        assert_eq!(with(flags, 0x8000, 0x1510), Err(V::Alignment));
        assert_eq!(with(flags, 0x8000, 0), Err(V::Size));
        assert_eq!(with(flags, 0x8000, 0x1_0020), Err(V::Size));
    }
}

#[test]
fn an_aecs_is_apart_from_the_rest() {
    // Sizes of the AECS before a source of 0x100 bytes; what is accessed of it depends on the flags.
    let overlaps = |flags: Flags, aecs: u64| {
        let plain = decompress(
            Decompress {
                source: 0x10000,
                size: 0x100,
                destination: 0x20000,
                destination_size: 0x100,
            },
            0x40,
        )
        .descriptor();
        let descriptor = Descriptor {
            operands: [aecs, plain.operands[1] | 0x100 << 32, 0],
            ..flagged(plain, RECORD_FLAGS.with(flags))
        };
        match check(&descriptor, &limits(), Place::Queue) {
            Err(Violation::Overlap) => true,
            Ok(()) => false,
            other => panic!("{other:?}"),
        }
    };
    for area in [0x10000, 0x20000] {
        // The first half alone, the second alone, both.
        for (flags, first, second) in [
            (READ, true, false),
            (READ.with(TOGGLE), false, true),
            (WRITE, false, true),
            (WRITE.with(TOGGLE), true, false),
            (READ.with(WRITE), true, true),
            (READ.with(WRITE).with(TOGGLE), true, true),
        ] {
            assert_eq!(overlaps(flags, area), first, "{flags:?}");
            assert_eq!(overlaps(flags, area - 0x100), second, "{flags:?}");
            assert!(!overlaps(flags, area - 0x200) && !overlaps(flags, area + 0x100));
        }
    }
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

#[test]
fn a_dynamic_aecs_begins_with_its_header_and_a_canned_one_with_nothing() {
    let mut histogram = Histogram::new();
    histogram.literals[..100].fill(9);
    histogram.distances[3] = 1;
    let codes = Codes::of(&histogram);
    for last in [false, true] {
        let header = codes.header(last);
        let bytes = CompressAecs::dynamic(&histogram, last).to_bytes();
        assert_eq!(bytes[28..32], u32::from(header.bits()).to_le_bytes());
        assert_eq!(bytes[32..32 + header.bytes().len()], *header.bytes());
        assert_eq!(bytes[32] & 7, u8::from(last) | 0b100);
    }
    let dynamic = CompressAecs::dynamic(&histogram, true).to_bytes();
    let canned = CompressAecs::canned(&codes).to_bytes();
    assert!(canned[..288].iter().all(|byte| *byte == 0));
    assert_eq!(canned[288..], dynamic[288..]);
}

proptest! {
    #[test]
    fn a_histogram_and_its_bytes_are_a_pair(
        literals in prop::collection::vec(any::<u32>(), LITERALS),
        distances in prop::collection::vec(any::<u32>(), DISTANCES),
    ) {
        let mut histogram = Histogram::new();
        histogram.literals.copy_from_slice(&literals);
        histogram.distances.copy_from_slice(&distances);
        let bytes = histogram.to_bytes();
        prop_assert_eq!(&bytes[0..4], &literals[0].to_le_bytes());
        prop_assert_eq!(&bytes[1144..1152], &[0; 8]);
        prop_assert_eq!(&bytes[1152..1156], &distances[0].to_le_bytes());
        prop_assert_eq!(Histogram::from_bytes(&bytes), histogram.clone());

        let mut twice = histogram.clone();
        twice.add(&histogram);
        prop_assert_eq!(twice.literals[0], literals[0].saturating_mul(2));
        prop_assert!(histogram.covering().distances.iter().all(|count| *count > 0));
    }
}

#[test]
fn decompression_with_an_aecs_keeps_to_the_rules() {
    let header = Codes::fixed().header(true);
    let aecs = COMPRESS.aecs;
    for operation in [
        load_codes(&header, aecs, 0x40),
        decompress_canned(DECOMPRESS, aecs, 0x40),
        decompress_piece(DECOMPRESS, aecs, 0, 0x40),
        decompress_piece(DECOMPRESS, aecs, 1, 0x40),
        decompress_piece(DECOMPRESS, aecs, 2, 0x40),
    ] {
        let descriptor = operation.into();
        assert_eq!(check(&descriptor, &limits(), Place::Queue), Ok(()));
    }
}

#[test]
fn only_a_full_output_leaves_a_rest() {
    let rest = |status: u64, completed: u64| {
        let mut image = RecordImage::default();
        image.words[0] = status | completed << 32;
        let outcome = status::IaaOutcome::of(&image).unwrap();
        DECOMPRESS.rest(&outcome, 0x2000, 4096)
    };
    let expected = Decompress {
        source: DECOMPRESS.source + 0x1000,
        size: DECOMPRESS.size - 0x1000,
        destination: 0x2000,
        destination_size: 4096,
    };
    assert_eq!(rest(0x0b, 0x1000), Some(expected));
    let all = rest(0x0b, DECOMPRESS.size.into()).unwrap();
    assert_eq!(all.size, 0);
    // A device that claims more than there was is not believed.
    assert_eq!(rest(0x0b, u64::from(DECOMPRESS.size) + 1), None);
    assert_eq!(rest(0x01, 0), None);
    assert_eq!(rest(0x0a, 0x1000), None);
}
