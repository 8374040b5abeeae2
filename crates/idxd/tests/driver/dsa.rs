use std::num::NonZeroU32;

use super::expected;
use idxd::{
    Kind, Limits, Mode, Operations,
    rules::{Place, Violation, check},
};
use idxd::{dsa::*, operation::*, *};

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
    let cases: [(Descriptor, [u8; 64]); 11] = [
        (noop(record).into(), expected(&[(4, &head(0x00))])),
        (
            batch(A, 0x80, record).into(),
            expected(&[(4, &head(0x01)), (16, A_BYTES), (32, &[0x80])]),
        ),
        (drain(record).into(), expected(&[(4, &head(0x02))])),
        (memmove(A, B, SIZE, record).into(), whole(0x03, &[])),
        (fill(A, B, SIZE, record).into(), whole(0x04, &[])),
        (compare(A, B, SIZE, record).into(), whole(0x05, &[])),
        (compare_pattern(A, SIZE, B, record).into(), whole(0x06, &[])),
        (
            create_delta(
                CreateDelta {
                    original: A,
                    modified: B,
                    size: SIZE,
                    delta: 0x0102_0304_0506_0708,
                    max_delta_size: 0x0a0b_0c0d,
                },
                record,
            )
            .into(),
            whole(
                0x07,
                &[
                    (40, &[8, 7, 6, 5, 4, 3, 2, 1]),
                    (48, &[0x0d, 0x0c, 0x0b, 0x0a]),
                ],
            ),
        ),
        (
            apply_delta(
                ApplyDelta {
                    delta: A,
                    delta_size: 0x0a0b_0c0d,
                    destination: B,
                    size: SIZE,
                },
                record,
            )
            .into(),
            whole(0x08, &[(40, &[0x0d, 0x0c, 0x0b, 0x0a])]),
        ),
        (
            crc(A, SIZE, 0x0a0b_0c0d, record).into(),
            expected(&[
                (4, &head(0x10)),
                (16, A_BYTES),
                (32, SIZE_BYTES),
                (40, &[0x0d, 0x0c, 0x0b, 0x0a]),
            ]),
        ),
        (
            copy_crc(
                CopyCrc {
                    source: A,
                    destination: B,
                    size: SIZE,
                    seed: 0x0a0b_0c0d,
                },
                record,
            )
            .into(),
            whole(0x11, &[(40, &[0x0d, 0x0c, 0x0b, 0x0a])]),
        ),
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
    let all = memmove(A, B, SIZE, RECORD_ADDRESS)
        .with_fence()
        .blocking_on_fault(true)
        .with_cache_control()
        .with_strict_ordering()
        .with_destination_readback()
        .descriptor();
    assert_eq!(all.bytes()[4..8], [0x0f, 0x61, 0x00, 0x03]);
    let not = memmove(A, B, SIZE, RECORD_ADDRESS).blocking_on_fault(false);
    assert_eq!(not, memmove(A, B, SIZE, RECORD_ADDRESS));
}

fn limits() -> Limits {
    let opcodes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 0x10, 0x11];
    Limits {
        kind: Kind::Dsa,
        mode: Mode::Shared,
        size: 16,
        threshold: 16,
        max_batch: NonZeroU32::new(32),
        max_transfer: 2 << 20,
        block_on_fault: true,
        operations: opcodes
            .into_iter()
            .fold(Operations::default(), |all, opcode| all.with(opcode)),
        version: 0x100,
        numa_node: None,
    }
}

/// One good descriptor per operation, with every flag that its type has.
fn good() -> Vec<Descriptor> {
    let record = 0x20;
    fn reads(operation: Operation<Reads>) -> Descriptor {
        operation.with_fence().blocking_on_fault(true).into()
    }
    fn writes(operation: Operation<Writes>) -> Descriptor {
        operation
            .with_fence()
            .blocking_on_fault(true)
            .with_cache_control()
            .with_strict_ordering()
            .with_destination_readback()
            .into()
    }
    vec![
        noop(record).with_fence().into(),
        reads(compare(1, 1, 3, record)),
        reads(compare_pattern(1, 3, !0, record)),
        reads(crc(1, 3, !0, record)),
        writes(memmove(1, 2, 300, record)),
        writes(fill(!0, 2, 300, record)),
        writes(create_delta(
            CreateDelta {
                original: 0x1000,
                modified: 0x2000,
                size: 4096,
                delta: 0x3008,
                max_delta_size: 80,
            },
            record,
        )),
        writes(apply_delta(
            ApplyDelta {
                delta: 0x1008,
                delta_size: 10,
                destination: 0x2000,
                size: 4096,
            },
            record,
        )),
        writes(copy_crc(
            CopyCrc {
                source: 1,
                destination: 5,
                size: 4,
                seed: !0,
            },
            record,
        )),
    ]
}

#[test]
fn what_the_types_allow_the_rules_allow() {
    for descriptor in good() {
        assert_eq!(
            check(&descriptor, &limits(), Place::Batch),
            Ok(()),
            "{descriptor:x?}"
        );
        assert_eq!(
            check(&descriptor, &limits(), Place::Queue),
            Err(Violation::Flags(Flags::FENCE))
        );
    }
    for descriptor in [batch(64, 2, 0x20), batch(64, 32, 0x20), drain(0x20)] {
        let descriptor = descriptor.descriptor();
        assert_eq!(check(&descriptor, &limits(), Place::Queue), Ok(()));
        assert_eq!(
            check(&descriptor, &limits(), Place::Batch),
            Err(Violation::Opcode)
        );
    }
}

#[test]
fn every_violation_is_found() {
    use Violation as V;
    let checked = |descriptor: Descriptor| check(&descriptor, &limits(), Place::Queue);
    let compare = compare_pattern(0x1000, 4096, 0, 0x20).descriptor();

    // Cache control on a comparison is the classic.
    let flags = compare.flags().with(Flags::CACHE);
    let control = Descriptor::control_of(compare.opcode(), flags);
    assert_eq!(
        checked(Descriptor { control, ..compare }),
        Err(V::Flags(Flags::CACHE))
    );
    let control = Descriptor::control_of(0x42, compare.flags());
    assert_eq!(checked(Descriptor { control, ..compare }), Err(V::Opcode));

    // An expected result needs its flag.
    let operands = [1, 0, 0];
    assert_eq!(
        checked(Descriptor {
            operands,
            ..compare
        }),
        Err(V::Reserved)
    );
    let control = Descriptor::control_of(0x06, compare.flags().with(Flags::CHECK_RESULT));
    let expecting = Descriptor {
        operands,
        control,
        ..compare
    };
    assert_eq!(checked(expecting), Ok(()));

    for bad in [
        Descriptor {
            pasid: 1,
            ..compare
        },
        Descriptor {
            interrupt: 1,
            ..compare
        },
        Descriptor {
            operation_flags: 1,
            ..compare
        },
        Descriptor {
            operands: [0, 0, 1 << 63],
            ..compare
        },
        Descriptor {
            size: 1,
            ..noop(0x20).descriptor()
        },
    ] {
        assert_eq!(checked(bad), Err(V::Reserved), "{bad:x?}");
    }

    for size in [0, (2 << 20) + 1] {
        assert_eq!(
            checked(compare_pattern(0, size, 0, 0x20).into()),
            Err(V::Size)
        );
    }
    for count in [0, 1, 33] {
        assert_eq!(checked(batch(64, count, 0x20).into()), Err(V::Count));
    }
    assert_eq!(checked(batch(32, 2, 0x20).into()), Err(V::ListAlignment));
    assert_eq!(checked(noop(0x30).into()), Err(V::RecordAlignment));

    let mut less = limits();
    less.block_on_fault = false;
    less.operations = less.operations.without(opcode::CRC);
    let waits = compare_pattern(0, 8, 0, 0x20)
        .blocking_on_fault(true)
        .into();
    assert_eq!(
        check(&waits, &less, Place::Queue),
        Err(V::Flags(Flags::BLOCK_ON_FAULT))
    );
    let unknown = crc(0, 8, 0, 0x20).into();
    assert_eq!(check(&unknown, &less, Place::Queue), Err(V::Opcode));
}

#[test]
fn deltas_have_rules_of_their_own() {
    use Violation as V;
    let checked =
        |operation: Operation<Writes>| check(&operation.descriptor(), &limits(), Place::Queue);
    let create = CreateDelta {
        original: 0x10_0000,
        modified: 0x20_0000,
        size: 512 << 10,
        delta: 0x30_0000,
        max_delta_size: 80,
    };
    let with = |change: fn(&mut CreateDelta)| {
        let mut create = create;
        change(&mut create);
        checked(create_delta(create, 0x20))
    };
    assert_eq!(with(|_| ()), Ok(()));
    assert_eq!(with(|delta| delta.size += 8), Err(V::Size));
    assert_eq!(with(|delta| delta.size = 12), Err(V::Size));
    assert_eq!(with(|delta| delta.max_delta_size = 70), Err(V::DeltaSize));
    assert_eq!(with(|delta| delta.max_delta_size = 85), Err(V::DeltaSize));
    assert_eq!(with(|delta| delta.original += 4), Err(V::Alignment));
    assert_eq!(with(|delta| delta.modified += 4), Err(V::Alignment));
    assert_eq!(with(|delta| delta.delta += 4), Err(V::Alignment));

    let apply = |delta, delta_size, destination| {
        let apply = ApplyDelta {
            delta,
            delta_size,
            destination,
            size: 4096,
        };
        checked(apply_delta(apply, 0x20))
    };
    assert_eq!(apply(0x1000, 10, 0x2000), Ok(()));
    assert_eq!(apply(0x1000, 0, 0x2000), Err(V::DeltaSize));
    assert_eq!(apply(0x1ff8, 10, 0x2000), Err(V::Overlap));
    assert_eq!(apply(0x3000, 10, 0x2000), Ok(()));
    assert_eq!(apply(0x2ff8, 10, 0x2000), Err(V::Overlap));
    assert_eq!(apply(0x1004, 10, 0x2000), Err(V::Alignment));
}
