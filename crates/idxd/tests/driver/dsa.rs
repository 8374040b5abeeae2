use std::num::NonZeroU32;

use super::expected;
use idxd::{
    Capabilities, Kind, Limits, Mode, Operations,
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
        .with_cache_control(Capabilities::FIRST_DSA)
        .with_strict_ordering()
        .with_destination_readback()
        .descriptor();
    assert_eq!(all.bytes()[4..8], [0x0f, 0x61, 0x00, 0x03]);
    let not = memmove(A, B, SIZE, RECORD_ADDRESS)
        .blocking_on_fault(false)
        .with_cache_control(Capabilities::default());
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
        capabilities: Capabilities::FIRST_DSA,
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
            .with_cache_control(Capabilities::FIRST_DSA)
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

    // What result is expected only matters with a flag, and of a comparison only bit 0 does; the rest is ignored
    // (DSA 3.0, 8.3.6).
    let control = Descriptor::control_of(0x06, compare.flags().with(Flags::CHECK_RESULT));
    for control in [compare.control, control] {
        for expected in [1, 0xff] {
            let expecting = Descriptor {
                operands: [expected, 0, 0],
                control,
                ..compare
            };
            assert_eq!(checked(expecting), Ok(()));
        }
    }

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
    let mut single = limits();
    single.capabilities = Capabilities(1 << 52);
    let one = batch(64, 1, 0x20).into();
    assert_eq!(check(&one, &single, Place::Queue), Ok(()));
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
    assert_eq!(with(|delta| delta.size = 12), Err(V::Alignment));
    assert_eq!(with(|delta| delta.max_delta_size = 70), Err(V::DeltaSize));
    assert_eq!(with(|delta| delta.max_delta_size = 85), Err(V::DeltaSize));
    // More than the queue takes: 2 MiB are not a multiple of 10.
    assert_eq!(
        with(|delta| delta.max_delta_size = 2 << 20),
        Err(V::DeltaSize)
    );
    assert_eq!(
        with(|delta| delta.max_delta_size = 2_097_160),
        Err(V::DeltaSize)
    );
    assert_eq!(with(|delta| delta.original += 4), Err(V::Alignment));
    assert_eq!(with(|delta| delta.modified += 4), Err(V::Alignment));
    // The delta record itself may lie anywhere: it is gone on with at multiples of 10.
    assert_eq!(with(|delta| delta.delta += 10), Ok(()));
    // The delta record, as large as it may become, and each of the sources.
    assert_eq!(
        with(|delta| delta.delta = delta.original - 72),
        Err(V::Overlap)
    );
    assert_eq!(with(|delta| delta.delta = delta.original - 80), Ok(()));
    assert_eq!(
        with(|delta| delta.delta = delta.modified + 0x7_fff8),
        Err(V::Overlap)
    );
    assert_eq!(
        with(|delta| delta.delta = delta.modified + 0x8_0000),
        Ok(())
    );

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
    // Where a page fault had interrupted it.
    assert_eq!(apply(0x1002, 10, 0x2000), Ok(()));
    assert_eq!(apply(0x1000, 10, 0x2004), Err(V::Alignment));
    assert_eq!(apply(0x100_0000, 2_097_160, 0x2000), Err(V::DeltaSize));
}

/// `descriptor` with these flags and no others.
fn flagged(descriptor: impl Into<Descriptor>, flags: Flags) -> Descriptor {
    let descriptor = descriptor.into();
    Descriptor {
        control: Descriptor::control_of(descriptor.opcode(), flags),
        ..descriptor
    }
}

#[test]
fn an_interrupt_handle_needs_its_flag() {
    let with = |flags: Flags| Descriptor {
        interrupt: 5,
        ..flagged(memmove(0x1000, 0x2000, 8, 0x20), flags)
    };
    let record = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
    let checked = |flags| check(&with(flags), &limits(), Place::Queue);
    assert_eq!(checked(record), Err(Violation::Reserved));
    assert_eq!(checked(record.with(Flags::INTERRUPT)), Ok(()));
}

#[test]
fn what_has_a_result_needs_a_record() {
    use Violation as V;
    let create = CreateDelta {
        original: 0x1000,
        modified: 0x2000,
        size: 8,
        delta: 0x3000,
        max_delta_size: 80,
    };
    let copied = CopyCrc {
        source: 0x1000,
        destination: 0x2000,
        size: 4,
        seed: 0,
    };
    let checked = |descriptor: Descriptor| check(&descriptor, &limits(), Place::Queue);
    for operation in [
        compare(0x1000, 0x2000, 8, 0x20).descriptor(),
        compare_pattern(0x1000, 8, 0, 0x20).descriptor(),
        create_delta(create, 0x20).descriptor(),
        crc(0x1000, 4, 0, 0x20).descriptor(),
        copy_crc(copied, 0x20).descriptor(),
    ] {
        let unasked = flagged(operation, Flags::RECORD_VALID);
        assert_eq!(checked(unasked), Err(V::Flags(Flags::RECORD_REQUESTED)));
        let without = flagged(operation, Flags::default());
        assert!(matches!(checked(without), Err(V::Flags(_))));
    }
    for operation in [memmove(0x1000, 0x2000, 8, 0x20), fill(0, 0x2000, 8, 0x20)] {
        assert_eq!(checked(flagged(operation, Flags::RECORD_VALID)), Ok(()));
        // The address of a record that is not valid has to be zero.
        let without = flagged(operation, Flags::default());
        assert_eq!(checked(without), Err(V::Reserved));
        assert_eq!(
            checked(Descriptor {
                record: 0,
                ..without
            }),
            Ok(())
        );
        let unasked = flagged(operation, Flags::RECORD_REQUESTED);
        assert_eq!(checked(unasked), Err(V::Flags(Flags::RECORD_REQUESTED)));
    }
    // A drain says somehow that it is complete.
    let either = Flags::RECORD_REQUESTED.with(Flags::INTERRUPT);
    let silent = flagged(drain(0x20), Flags::RECORD_VALID);
    assert_eq!(checked(silent), Err(V::Flags(either)));
    let interrupts = flagged(drain(0x20), Flags::RECORD_VALID.with(Flags::INTERRUPT));
    assert_eq!(checked(interrupts), Ok(()));
}

#[test]
fn flags_without_a_meaning_are_refused() {
    let record = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
    let every = [
        noop(0x20).descriptor(),
        batch(64, 2, 0x20).descriptor(),
        drain(0x20).descriptor(),
    ]
    .into_iter()
    .chain(good());
    for descriptor in every {
        for bit in [5, 6, 15, 20, 23] {
            let odd = flagged(descriptor, record.with(Flags(1 << bit)));
            let checked = check(&odd, &limits(), Place::Queue);
            assert_eq!(checked, Err(Violation::Flags(Flags(1 << bit))), "{odd:x?}");
        }
    }
    // Traffic classes are of addresses that are there.
    let fill = fill(0, 0x2000, 8, 0x20);
    let pattern = compare_pattern(0x1000, 8, 0, 0x20).descriptor();
    for (descriptor, bit) in [(fill.descriptor(), 9), (pattern, 10)] {
        let odd = flagged(descriptor, record.with(Flags(1 << bit)));
        let checked = check(&odd, &limits(), Place::Queue);
        assert_eq!(checked, Err(Violation::Flags(Flags(1 << bit))));
    }
}

#[test]
fn what_a_device_lacks_is_refused() {
    use Violation as V;
    let with = |capabilities: u64, version: u32| Limits {
        capabilities: Capabilities(capabilities),
        version,
        ..limits()
    };
    let (one, two, three) = (Flags::CACHE, Flags::DESTINATION_READBACK, Flags(1 << 5));
    let both = one.with(two);
    let (cache, durable, readback) = (1 << 2, 1 << 5, 1 << 8);
    let record = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
    for (capabilities, version, flags, invalid) in [
        (0, 0x100, one, one.0),
        (cache, 0x100, one, 0),
        (cache, 0x100, both, two.0),
        (readback, 0x100, both, one.0),
        (cache | readback, 0x100, both, 0),
        (durable | readback, 0x200, three, three.0),
        (readback, 0x300, three, three.0),
        (durable, 0x300, three, 0),
        (durable, 0x300, three.with(two), three.with(two).0),
        (readback, 0x300, three.with(two), 0),
        (
            cache | durable | readback,
            0x300,
            three.with(one),
            three.with(one).0,
        ),
        (
            cache | durable | readback,
            0x300,
            three.with(both),
            three.with(both).0,
        ),
    ] {
        let copy = flagged(memmove(0x1000, 0x2000, 8, 0x20), record.with(flags));
        let checked = check(&copy, &with(capabilities, version), Place::Queue);
        let wanted = match invalid {
            0 => Ok(()),
            _ => Err(V::Flags(Flags(invalid))),
        };
        assert_eq!(checked, wanted, "{capabilities:#x} {version:#x} {flags:x?}");
    }
    // Not even the newest controls the cache where nothing is written.
    let comparison = flagged(compare_pattern(0, 8, 0, 0x20), record.with(three));
    assert_eq!(
        check(&comparison, &with(!0, 0x300), Place::Queue),
        Err(V::Flags(three))
    );

    let ordered = memmove(0x1000, 0x2000, 8, 0x20)
        .with_strict_ordering()
        .into();
    assert_eq!(
        check(&ordered, &with(1 << 53, 0x100), Place::Queue),
        Err(V::Flags(Flags::STRICT_ORDERING))
    );
    let overlapping = memmove(0x1000, 0x1004, 8, 0x20).into();
    assert_eq!(
        check(&overlapping, &with(0, 0x100), Place::Queue),
        Err(V::Overlap)
    );
    assert_eq!(
        check(&overlapping, &with(1 << 1, 0x100), Place::Queue),
        Ok(())
    );

    let back = Flags(1 << 16);
    let drains = Descriptor {
        address_1: 0x1000,
        ..flagged(drain(0x20), record.with(back))
    };
    assert_eq!(
        check(&drains, &with(0, 0x100), Place::Queue),
        Err(V::Flags(back))
    );
    assert_eq!(check(&drains, &with(1 << 9, 0x100), Place::Queue), Ok(()));
    let unflagged = flagged(drains, record);
    assert_eq!(
        check(&unflagged, &with(1 << 9, 0x100), Place::Queue),
        Err(V::Reserved)
    );
}

#[test]
fn a_seed_stands_in_one_place() {
    use Violation as V;
    let record = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
    let seeded = |flags: u32, operands| Descriptor {
        operands,
        ..flagged(crc(0x1000, 8, 0, 0x20), record.with(Flags(flags)))
    };
    let (in_memory, traffic) = (1 << 16, 1 << 11);
    for (flags, operands, wanted) in [
        (0, [7, 0, 0], Ok(())),
        (0, [0, 0x2000, 0], Err(V::Reserved)),
        (in_memory, [0, 0x2000, 0], Ok(())),
        (in_memory, [7, 0x2000, 0], Err(V::Reserved)),
        (in_memory, [0, 0x2002, 0], Err(V::Alignment)),
        (in_memory | traffic, [0, 0x2000, 0], Ok(())),
        (traffic, [7, 0, 0], Err(V::Flags(Flags(traffic)))),
    ] {
        let checked = check(&seeded(flags, operands), &limits(), Place::Queue);
        assert_eq!(checked, wanted, "{flags:#x} {operands:x?}");
    }
}
