//! Every field of a descriptor is checked, with the code that belongs to it; and the two tables of rules agree.

use idxd::{
    Capabilities, Descriptor, Flags, Kind, Limits, Record, opcode,
    rules::{Place, check},
};
use proptest::prelude::*;

use super::{Invalid, TRANSLATION_FETCH, validate};
use crate::{
    Config,
    memory::{Fault, Memory},
};

fn limits(kind: Kind) -> Limits {
    let mut config = Config::devices(kind, 1);
    config.limits_mut(0, 0).unwrap().clone()
}

fn status(descriptor: &Descriptor) -> u8 {
    status_for(&limits(Kind::Dsa), descriptor)
}

fn status_for(limits: &Limits, descriptor: &Descriptor) -> u8 {
    validate(descriptor, limits, false).map_or_else(|invalid| invalid.status, |()| 1)
}

fn invalid(flags: u32) -> Result<(), Invalid> {
    Err(Invalid {
        status: 0x11,
        flags,
    })
}

fn descriptor(opcode: u8, record: &Record) -> Descriptor {
    let flags = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
    Descriptor {
        control: Descriptor::control_of(opcode, flags),
        record: record.address(),
        ..Descriptor::default()
    }
}

fn noop(record: &Record) -> Descriptor {
    descriptor(opcode::NOOP, record)
}

fn with(descriptor: Descriptor, flags: Flags) -> Descriptor {
    Descriptor {
        control: descriptor.control | flags.0,
        ..descriptor
    }
}

/// A valid descriptor of each operation of DSA.
fn valid() -> Vec<Descriptor> {
    let record = Record::default();
    let of = |opcode| Descriptor {
        size: 4096,
        ..descriptor(opcode, &record)
    };
    let two = |opcode| Descriptor {
        address_1: 0x10000,
        address_2: 0x20000,
        ..of(opcode)
    };
    vec![
        noop(&record),
        descriptor(opcode::DRAIN, &record),
        Descriptor {
            size: 2,
            address_1: 0x40,
            ..descriptor(opcode::BATCH, &record)
        },
        two(opcode::MEMMOVE),
        two(opcode::FILL),
        two(opcode::COMPARE),
        two(opcode::COMPARE_PATTERN),
        Descriptor {
            operands: [0x30000, 80, 0],
            ..two(opcode::CREATE_DELTA)
        },
        Descriptor {
            operands: [80, 0, 0],
            ..two(opcode::APPLY_DELTA)
        },
        Descriptor {
            address_2: 0,
            ..two(opcode::CRC)
        },
        two(opcode::COPY_CRC),
    ]
}

/// The flags that each operation of DSA allows, as `limits` have it.
fn allowed(limits: &Limits) -> Vec<u32> {
    let flags = |descriptor: Descriptor| {
        let bits = (0..24).map(|bit| 1 << bit);
        let allowed = bits.filter(|bit| {
            let flagged = with(descriptor, Flags(*bit));
            match validate(&flagged, limits, false) {
                Ok(()) => true,
                // The flag is, but no handle is valid.
                Err(refused) if refused.status == 0x19 => true,
                refused => {
                    assert_eq!(refused, invalid(*bit), "{descriptor:?}");
                    false
                }
            }
        });
        allowed.fold(0, |all, bit| all | bit)
    };
    valid().into_iter().map(flags).collect()
}

#[test]
fn every_flag_is_allowed_or_reported() {
    let first = [
        ("noop", 0x101c),
        ("drain", 0xc_101c),
        ("batch", 0x121c),
        ("memmove", 0x771c),
        ("fill", 0x751c),
        ("compare", 0x169c),
        ("compare pattern", 0x129c),
        ("create delta", 0x7f9c),
        ("apply delta", 0x771c),
        ("crc", 0x7_121c),
        ("copy crc", 0x7_771c),
    ];
    let found = allowed(&limits(Kind::Dsa));
    for ((name, expected), found) in first.into_iter().zip(found) {
        assert_eq!(found, expected, "{name}: {found:x}");
    }
}

#[test]
fn capabilities_allow_flags() {
    let without = |bit: u32| Limits {
        capabilities: Capabilities(Capabilities::FIRST_DSA.0 & !(1 << bit)),
        ..limits(Kind::Dsa)
    };
    let both = allowed(&limits(Kind::Dsa)).into_iter();
    let (no_cache, no_readback) = (allowed(&without(2)), allowed(&without(8)));
    for ((both, no_cache), no_readback) in both.zip(no_cache).zip(no_readback) {
        assert_eq!(no_cache, both & !Flags::CACHE.0);
        assert_eq!(no_readback, both & !Flags::DESTINATION_READBACK.0);
    }
    let readback = Limits {
        capabilities: Capabilities(1 << 9),
        ..limits(Kind::Dsa)
    };
    assert_eq!(allowed(&readback)[1], 0xf_101c);
    let unordered = Limits {
        capabilities: Capabilities(Capabilities::FIRST_DSA.0 | 1 << 53),
        ..limits(Kind::Dsa)
    };
    let all = allowed(&limits(Kind::Dsa)).into_iter();
    for (all, unordered) in all.zip(allowed(&unordered)) {
        assert_eq!(unordered, all & !Flags::STRICT_ORDERING.0);
    }
}

#[test]
fn a_drain_has_addresses_by_its_flags() {
    let drain = valid()[1];
    let readback = Limits {
        capabilities: Capabilities(1 << 9),
        ..limits(Kind::Dsa)
    };
    for (flags, addresses, status) in [
        (0, [0, 0], 1),
        (0, [64, 0], 0x12),
        (0, [0, 64], 0x12),
        (1 << 16 | 1 << 9, [64, 0], 1),
        (1 << 17 | 1 << 10, [0, 64], 1),
        (1 << 16, [0, 64], 0x12),
        (1 << 17 | 1 << 9, [0, 64], 0x11),
        (1 << 16 | 1 << 10, [64, 0], 0x11),
    ] {
        let [address_1, address_2] = addresses;
        let drain = Descriptor {
            address_1,
            address_2,
            ..with(drain, Flags(flags))
        };
        assert_eq!(status_for(&readback, &drain), status, "{flags:x}");
        let without = if flags == 0 { status } else { 0x11 };
        assert_eq!(self::status(&drain), without, "{flags:x}");
    }
}

#[test]
fn a_crc_has_one_seed() {
    for good in [valid()[9], valid()[10]] {
        for (flags, operands, status) in [
            (0, [7, 0, 0], 1),
            (0, [1 << 32, 0, 0], 0x12),
            (0, [0, 64, 0], 0x12),
            (1 << 16, [0, 64, 0], 1),
            (1 << 16, [7, 64, 0], 0x12),
            (1 << 16, [0, 66, 0], 0x1c),
            (1 << 16 | 1 << 11, [0, 64, 0], 1),
            (1 << 11, [0, 0, 0], 0x11),
        ] {
            let seeded = Descriptor {
                operands,
                ..with(good, Flags(flags))
            };
            assert_eq!(self::status(&seeded), status, "{flags:x} {operands:x?}");
        }
    }
}

#[test]
fn a_record_is_aligned_and_asked_for_only_where_it_is_valid() {
    let noop = noop(&Record::default());
    let flagged = |flags: u32, record| {
        let control = Descriptor::control_of(opcode::NOOP, Flags(flags));
        let noop = Descriptor {
            control,
            record,
            ..noop
        };
        status(&noop)
    };
    for (flags, record, expected) in [
        (0x0, 0, 1),
        (0x0, 64, 0x12),
        (0x8, 0, 0x11),
        (0x1000, 0, 0x11),
        (0x4, 64, 1),
        (0x1004, 64, 1),
        (0x4, 16, 0x1b),
    ] {
        assert_eq!(flagged(flags, record), expected, "{flags:x}");
    }
}

#[test]
fn a_batch_of_one_is_for_devices_that_can() {
    let one = Descriptor {
        size: 1,
        ..valid()[2]
    };
    let none = Descriptor { size: 0, ..one };
    let single = Limits {
        capabilities: Capabilities(1 << 52),
        ..limits(Kind::Dsa)
    };
    assert_eq!((status(&one), status_for(&single, &one)), (0x14, 1));
    assert_eq!(status_for(&single, &none), 0x14);
}

#[test]
fn the_third_flag_for_cache_control_came_with_version_three() {
    let device = |version, bits| Limits {
        version,
        capabilities: Capabilities(bits),
        ..limits(Kind::Dsa)
    };
    let (cache, durable, readback) = (1 << 2, 1 << 5, 1 << 8);
    let all = cache | durable | readback;
    let first = allowed(&device(0x100, all));
    assert_eq!(allowed(&device(0x200, all)), first);
    for (first, third) in first.into_iter().zip(allowed(&device(0x300, all))) {
        let is_written = first & Flags::CACHE.0 != 0;
        assert_eq!(third, first | if is_written { 0x20 } else { 0 });
    }
    for (bits, flags, status) in [
        (durable, 0x20, 1),
        (cache | readback, 0x20, 0x11),
        (readback, 0x4020, 1),
        (cache | durable, 0x4020, 0x11),
        (all, 0x120, 0x11),
        (all, 0x4120, 0x11),
    ] {
        let copy = with(valid()[3], Flags(flags));
        assert_eq!(status_for(&device(0x300, bits), &copy), status, "{flags:x}");
    }
}

#[test]
fn a_result_needs_its_record() {
    let results = [
        opcode::COMPARE,
        opcode::COMPARE_PATTERN,
        opcode::CREATE_DELTA,
        opcode::CRC,
        opcode::COPY_CRC,
    ];
    for good in valid() {
        let flagged = |flags: Flags| {
            let control = Descriptor::control_of(good.opcode(), flags);
            let record = if flags.has(Flags::RECORD_VALID) {
                64
            } else {
                0
            };
            let flagged = Descriptor {
                control,
                record,
                ..good
            };
            validate(&flagged, &limits(Kind::Dsa), false)
        };
        let (none, valid) = match good.opcode() {
            code if results.contains(&code) => (invalid(0xc), invalid(8)),
            opcode::DRAIN => (invalid(8), invalid(8)),
            _ => (Ok(()), Ok(())),
        };
        assert_eq!(flagged(Flags(0)), none, "{good:?}");
        assert_eq!(flagged(Flags::RECORD_VALID), valid, "{good:?}");
    }
    let interrupting = Descriptor::control_of(opcode::DRAIN, Flags::INTERRUPT);
    let drain = Descriptor {
        control: interrupting,
        ..Descriptor::default()
    };
    for kind in [Kind::Dsa, Kind::Iaa] {
        assert_eq!(status_for(&limits(kind), &drain), 0x19);
    }
    for good in &valid_for_iaa()[2..] {
        let flags = good.flags().0 & !Flags::RECORD_REQUESTED.0;
        let unasked = Descriptor {
            control: Descriptor::control_of(good.opcode(), Flags(flags)),
            ..*good
        };
        assert_eq!(validate(&unasked, &limits(Kind::Iaa), false), invalid(8));
    }
}

#[test]
fn an_interrupt_handle_is_reserved_or_invalid() {
    for good in valid() {
        let handle = Descriptor {
            interrupt: 1,
            ..good
        };
        assert_eq!(status(&handle), 0x12);
        for good in [good, handle] {
            assert_eq!(status(&with(good, Flags::INTERRUPT)), 0x19);
        }
    }
}

#[test]
fn an_expected_result_is_only_looked_at_if_it_is_checked() {
    let all = valid();
    for (good, operand) in [(all[5], 0), (all[6], 0), (all[7], 2)] {
        let mut expecting = good;
        expecting.operands[operand] |= 0xff;
        for flags in [Flags(0), Flags::CHECK_RESULT] {
            assert_eq!(status(&with(expecting, flags)), 1, "{good:?}");
        }
        expecting.operands[operand] = good.operands[operand] | 1 << 60;
        assert_eq!(status(&expecting), 0x12, "{good:?}");
    }
}

#[test]
fn translations_are_fetched_from_version_two_on() {
    let record = Record::default();
    let mut second = Limits {
        version: 0x200,
        ..limits(Kind::Dsa)
    };
    second.operations = second.operations.with(TRANSLATION_FETCH);
    let first = Limits {
        version: 0x100,
        ..second.clone()
    };
    let fetch = Descriptor {
        size: 4096,
        address_1: 0x10001,
        ..descriptor(TRANSLATION_FETCH, &record)
    };
    assert_eq!(
        (status_for(&first, &fetch), status_for(&second, &fetch)),
        (0x10, 1)
    );
    let beyond = Descriptor {
        address_1: u64::MAX - 4094,
        ..fetch
    };
    for (wrong, status) in [
        (Descriptor { size: 0, ..fetch }, 0x13),
        (beyond, 0x13),
        (with(fetch, Flags(1 << 9)), 0x11),
        (with(fetch, Flags(1 << 16)), 0x11),
        (
            Descriptor {
                address_2: 64,
                ..fetch
            },
            0x12,
        ),
        (
            Descriptor {
                operands: [0, 4096, 0],
                ..fetch
            },
            0x12,
        ),
    ] {
        assert_eq!(status_for(&second, &wrong), status, "{wrong:x?}");
    }
    // With a stride of its own, where the device has that.
    second.capabilities.0 |= 1 << 7;
    for (stride, status) in [
        (0, 0x1c),
        (2048, 0x1c),
        (4096, 1),
        (4097, 0x1c),
        (1 << 31, 1),
    ] {
        let fetch = Descriptor {
            operands: [0, stride, 0],
            ..with(fetch, Flags(1 << 16))
        };
        assert_eq!(status_for(&second, &fetch), status, "{stride}");
    }
}

#[test]
fn fences_are_for_members() {
    let record = Record::default();
    let fenced = with(noop(&record), Flags::FENCE);
    assert_eq!(validate(&fenced, &limits(Kind::Dsa), true), Ok(()));
    assert_eq!(status(&fenced), 0x11);
}

#[test]
fn unknown_and_forbidden_operations_are_unsupported() {
    let record = Record::default();
    for code in [0x09, 0x0a, 0x12, 0x20, 0x42, 0xff] {
        assert_eq!(status(&descriptor(code, &record)), 0x10);
    }
    let mut limits = limits(Kind::Dsa);
    limits.operations = limits.operations.without(opcode::FILL);
    for descriptor in valid() {
        let expected = if descriptor.opcode() == opcode::FILL {
            0x10
        } else {
            1
        };
        let status = validate(&descriptor, &limits, false).map_or_else(|it| it.status, |()| 1);
        assert_eq!(status, expected);
    }
}

#[test]
fn reserved_fields_have_to_be_zero() {
    for good in valid() {
        assert_eq!(
            status(&Descriptor {
                operation_flags: 1,
                ..good
            }),
            0x12
        );
        assert_eq!(
            status(&Descriptor {
                pasid: 1 << 20,
                ..good
            }),
            0x12
        );
        let mut last = good;
        last.operands[2] |= 1 << 63;
        assert_eq!(status(&last), 0x12);
        if matches!(good.opcode(), opcode::NOOP | opcode::DRAIN) {
            assert_eq!(status(&Descriptor { size: 1, ..good }), 0x12);
        }
        if matches!(good.opcode(), opcode::NOOP | opcode::BATCH | opcode::CRC) {
            assert_eq!(
                status(&Descriptor {
                    address_2: 64,
                    ..good
                }),
                0x12
            );
        }
    }
}

#[test]
fn transfers_have_a_size_within_the_queues_limit() {
    for good in valid().into_iter().skip(3) {
        assert_eq!(status(&Descriptor { size: 0, ..good }), 0x13);
        assert_eq!(
            status(&Descriptor {
                size: (2 << 20) + 1,
                ..good
            }),
            0x13
        );
    }
    let copy = Descriptor {
        size: 2 << 20,
        ..valid()[3]
    };
    assert_eq!(status(&copy), 1);
}

#[test]
fn deltas_are_aligned_sized_and_apart() {
    let all = valid();
    let (create, apply) = (all[7], all[8]);
    let sized = |size| Descriptor {
        operands: [0x30000, size, 0],
        ..create
    };
    // The queue's most is 2 MiB, which is no multiple of 10.
    for size in [0, 70, 81, 2_097_160] {
        assert_eq!(status(&sized(size)), 0x15);
    }
    for size in [80, 90, 2_097_150] {
        let far = Descriptor {
            address_1: 0x100_0000,
            address_2: 0x200_0000,
            ..sized(size)
        };
        assert_eq!(status(&far), 1);
    }
    assert_eq!(
        status(&Descriptor {
            size: 4100,
            ..create
        }),
        0x1c
    );
    assert_eq!(
        status(&Descriptor {
            size: (512 << 10) + 8,
            ..create
        }),
        0x13
    );
    assert_eq!(
        status(&Descriptor {
            address_1: 0x10004,
            ..create
        }),
        0x1c
    );
    for overlapping in [
        Descriptor {
            address_1: 0x30008,
            ..create
        },
        Descriptor {
            address_2: 0x30008,
            ..create
        },
    ] {
        assert_eq!(status(&overlapping), 0x16);
    }
    assert_eq!(
        status(&Descriptor {
            operands: [81, 0, 0],
            ..apply
        }),
        0x15
    );
    assert_eq!(
        status(&Descriptor {
            size: 4100,
            ..apply
        }),
        0x1c
    );
    assert_eq!(
        status(&Descriptor {
            operands: [2_097_160, 0, 0],
            ..apply
        }),
        0x15
    );
    assert_eq!(
        status(&Descriptor {
            address_2: 0x10008,
            ..apply
        }),
        0x16
    );
}

#[test]
fn a_copy_with_crc_does_not_overlap_but_a_move_may() {
    let (copy_crc, copy) = (valid()[10], valid()[3]);
    assert_eq!(
        status(&Descriptor {
            address_2: 0x10fff,
            ..copy_crc
        }),
        0x16
    );
    assert_eq!(
        status(&Descriptor {
            address_2: 0x11000,
            ..copy_crc
        }),
        1
    );
    assert_eq!(
        status(&Descriptor {
            address_2: 0x10fff,
            ..copy
        }),
        1
    );
}

#[test]
fn a_move_overlaps_only_where_the_device_can() {
    let cannot = Limits {
        capabilities: Capabilities(Capabilities::FIRST_DSA.0 & !0b10),
        ..limits(Kind::Dsa)
    };
    let moved = |address_2| Descriptor {
        address_2,
        ..valid()[3]
    };
    assert_eq!(status_for(&cannot, &moved(0x10fff)), 0x16);
    assert_eq!(status_for(&cannot, &moved(0x11000)), 1);
    let fill = Descriptor {
        address_2: 0x10000,
        ..valid()[4]
    };
    assert_eq!(status_for(&cannot, &fill), 1);
}

/// Valid descriptors of IAA: NOOP, DRAIN, DECOMPRESS, COMPRESS, CRC64.
fn valid_for_iaa() -> [Descriptor; 5] {
    let record = Record::default();
    let stream = |opcode, operation_flags| Descriptor {
        address_1: 0x10000,
        address_2: 0x20000,
        size: 4096,
        operation_flags,
        operands: [0, 4096, 0],
        ..descriptor(opcode, &record)
    };
    let compress = Descriptor {
        operands: [0x30000, 4096 | 1568 << 32, 0],
        ..with(stream(opcode::COMPRESS, 0x6), Flags::READ_AECS)
    };
    [
        noop(&record),
        descriptor(opcode::DRAIN, &record),
        stream(opcode::DECOMPRESS, 0x1f),
        compress,
        Descriptor {
            address_1: 0x10000,
            size: 4096,
            operands: [0, 0, 7],
            ..descriptor(opcode::CRC64, &record)
        },
    ]
}

#[test]
fn an_iaa_allows_its_flags_whatever_its_version() {
    let allowed = [
        ("noop", 0x101c),
        ("drain", 0xc_101c),
        // What is about an AECS needs one.
        ("decompress", 0x2d_771c),
        ("compress", 0x65_7f1c),
        ("crc64", 0x121c),
    ];
    for version in [0x100, 0x200] {
        let limits = Limits {
            version,
            ..limits(Kind::Iaa)
        };
        for (good, (name, allowed)) in valid_for_iaa().into_iter().zip(allowed) {
            for bit in (0..24).map(|bit| 1 << bit) {
                let expected = match allowed & bit {
                    0 => invalid(bit),
                    _ if bit == Flags::INTERRUPT.0 => Err(Invalid {
                        status: 0x19,
                        flags: 0,
                    }),
                    _ => Ok(()),
                };
                let flagged = with(good, Flags(bit));
                assert_eq!(
                    validate(&flagged, &limits, false),
                    expected,
                    "{name} {bit:x}"
                );
            }
        }
    }
}

#[test]
fn an_iaa_compresses_with_codes_and_counts_without() {
    let limits = limits(Kind::Iaa);
    let compress = valid_for_iaa()[3];
    let without = Descriptor {
        control: compress.control & !Flags::READ_AECS.0,
        operands: [0, 4096, 0],
        ..compress
    };
    assert_eq!(validate(&without, &limits, false), invalid(1 << 16));
    let statistics = Descriptor {
        operation_flags: 1,
        ..without
    };
    assert_eq!(status_for(&limits, &statistics), 1);
}

#[test]
fn an_iaas_sizes_are_the_queues_or_zero_but_not_both() {
    let limits = limits(Kind::Iaa);
    let [_, _, decompress, compress, _] = valid_for_iaa();
    let sized = |of: Descriptor, source, output, aecs: u64| {
        let operands = [of.operands[0], output | aecs << 32, 0];
        status_for(
            &limits,
            &Descriptor {
                size: source,
                operands,
                ..of
            },
        )
    };
    for of in [decompress, compress] {
        assert_eq!(sized(of, 0, 4096, 0), 1);
        assert_eq!(sized(of, 4096, 0, 0), 1);
        assert_eq!(sized(of, 0, 0, 0), 0x13);
        assert_eq!(sized(of, 2 << 20, 2 << 20, 2 << 20), 1);
        for (source, output, aecs) in [(1, 0, 0), (0, 1, 0), (0, 0, 1)] {
            let most = 2 << 20;
            let size = u32::try_from(most + source).unwrap();
            assert_eq!(sized(of, size, most + output, most + aecs), 0x13);
        }
    }
}

#[test]
fn an_iaa_has_no_batches() {
    let record = Record::default();
    let batch = Descriptor {
        size: 2,
        ..descriptor(opcode::BATCH, &record)
    };
    let invalid = validate(&batch, &limits(Kind::Iaa), false).unwrap_err();
    assert_eq!(invalid.status, 0x10);
}

/// Sizes and addresses around every border that a rule has.
fn sizes() -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(0u32),
        1u32..4,
        prop::sample::select(vec![8, 10, 64, 79, 80, 90, 1568, 4096, 0x440, 0x1500]),
        prop::sample::select(vec![
            512 << 10,
            (512 << 10) + 8,
            2 << 20,
            (2 << 20) + 8,
            4 << 20
        ]),
    ]
}

fn addresses() -> impl Strategy<Value = u64> {
    let bases = prop::sample::select(vec![0x10_0000u64, 0x10_0800, 0x80_0000, 0x100_0000]);
    let offsets = prop::sample::select(vec![0u64, 2, 4, 8, 32, 64]);
    prop_oneof![
        1 => Just(0u64),
        4 => (bases, offsets).prop_map(|(base, offset)| base + offset),
    ]
}

/// A queue of any device: what it can do, its version, and whether it waits for faults.
fn any_limits() -> impl Strategy<Value = Limits> {
    let kind = prop_oneof![Just(Kind::Dsa), Just(Kind::Iaa)];
    let version = prop::sample::select(vec![0x100, 0x200, 0x300]);
    let bits = [1, 2, 5, 8, 9, 52, 53];
    let capabilities = prop::sample::subsequence(bits.to_vec(), 0..=bits.len());
    (kind, version, capabilities, any::<bool>()).prop_map(|(kind, version, bits, block)| Limits {
        version,
        capabilities: Capabilities(bits.into_iter().fold(0, |all, bit: u64| all | 1 << bit)),
        block_on_fault: block,
        ..limits(kind)
    })
}

/// A descriptor that is right but for few mistakes: an operation's own fields, some of which something else replaces.
fn nearly_valid(kind: Kind) -> impl Strategy<Value = Descriptor> {
    let good = match kind {
        Kind::Dsa => valid(),
        Kind::Iaa => valid_for_iaa().to_vec(),
    };
    let flips = proptest::collection::vec(0u32..24, 0..4);
    let requests = prop::sample::select(vec![0u32, 0, 0, 4, 8, 12]);
    let mistakes = proptest::collection::vec((0usize..15, addresses(), sizes()), 0..3);
    (prop::sample::select(good), flips, requests, mistakes).prop_map(
        |(mut descriptor, flips, requests, mistakes)| {
            descriptor.record = 64;
            for bit in flips {
                descriptor.control ^= 1 << bit;
            }
            descriptor.control ^= requests;
            for (field, address, size) in mistakes {
                put(&mut descriptor, field, address, size);
            }
            descriptor
        },
    )
}

fn put(descriptor: &mut Descriptor, field: usize, address: u64, size: u32) {
    let of_operand = |operand: u64| operand & !0xffff_ffff | u64::from(size);
    let high = |operand: u64| operand & 0xffff_ffff | u64::from(size) << 32;
    let operands = &mut descriptor.operands;
    match field {
        0 => descriptor.address_1 = address,
        1 => descriptor.address_2 = address,
        2 => descriptor.size = size,
        3 => descriptor.record = address,
        4 => descriptor.interrupt = (size & 3) as u16,
        5 => operands[0] = address,
        6 => operands[1] = address,
        7 => operands[2] = address,
        8 => operands[0] = of_operand(operands[0]),
        9 => operands[1] = of_operand(operands[1]),
        10 => operands[1] = high(operands[1]),
        11 => operands[2] = of_operand(operands[2]),
        // One byte of the operands, somewhere.
        12 => operands[(address >> 3) as usize % 3] ^= 1 << (size % 64),
        13 => descriptor.operation_flags ^= 1 << (size % 16),
        _ => descriptor.control ^= 0x0100_0000 << (size % 8),
    }
}

/// Memory without faults, full of zeros.
struct Zeros;

impl Memory for Zeros {
    fn read(&mut self, _: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        buffer.fill(0);
        Ok(())
    }

    fn write(&mut self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Ok(())
    }
}

/// With which status the model refuses it, before work or, for IAA, at its begin.
fn refused_by_model(descriptor: &Descriptor, limits: &Limits, member: bool) -> Option<u8> {
    if let Err(invalid) = validate(descriptor, limits, member) {
        return Some(invalid.status);
    }
    let is_work = !matches!(descriptor.opcode(), opcode::NOOP | opcode::DRAIN);
    if limits.kind == Kind::Dsa || !is_work {
        return None;
    }
    let status = crate::iaa::execute(descriptor, &mut Zeros).status();
    (0x10..=0x31).contains(&status).then_some(status)
}

/// What the model leaves out of an IAA of the first generation, and answers with 0x30: words of 16 bits, mini-blocks.
fn is_left_out(descriptor: &Descriptor) -> bool {
    let left_out = match descriptor.opcode() {
        opcode::COMPRESS => 0xf << 5,
        opcode::DECOMPRESS => 1 << 5 | 7 << 10,
        _ => 0,
    };
    descriptor.operation_flags & left_out != 0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn two_tables_of_rules_agree(
        (limits, descriptor) in any_limits().prop_flat_map(|limits| {
            let descriptor = nearly_valid(limits.kind);
            (Just(limits), descriptor)
        }),
        member: bool,
    ) {
        prop_assume!(limits.kind == Kind::Dsa || !is_left_out(&descriptor));
        // An IAA has no batches.
        let member = member && limits.kind == Kind::Dsa;
        let place = if member { Place::Batch } else { Place::Queue };
        let ours = refused_by_model(&descriptor, &limits, member);
        let theirs = check(&descriptor, &limits, place).err().map(|violation| violation.code());
        // Whether an interrupt handle is one, only the device knows.
        prop_assume!(ours != Some(0x19));
        // Of two mistakes either may be reported, so only whether there is one is compared.
        prop_assert_eq!(ours.is_some(), theirs.is_some(), "{:x?} {:x?} {:x?} {:x?}", ours, theirs, descriptor, limits);
    }
}
