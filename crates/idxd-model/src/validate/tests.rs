//! Every field of a descriptor is checked, with the code that belongs to it; and the two tables of rules agree.

use idxd::{
    Descriptor, Flags, Kind, Limits, Record, opcode,
    rules::{Place, check},
};
use proptest::prelude::*;

use super::{Invalid, validate};
use crate::Config;

fn limits(kind: Kind) -> Limits {
    let mut config = Config::devices(kind, 1);
    config.limits_mut(0, 0).unwrap().clone()
}

fn status(descriptor: &Descriptor) -> u8 {
    validate(descriptor, &limits(Kind::Dsa), false).map_or_else(|invalid| invalid.status, |()| 1)
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

#[test]
fn every_flag_is_allowed_or_reported() {
    let allowed = [
        ("noop", 0x103c),
        ("drain", 0x163c),
        ("batch", 0x123c),
        ("memmove", 0xf73c),
        ("fill", 0xf73c),
        ("compare", 0x16bc),
        ("compare pattern", 0x16bc),
        ("create delta", 0xffbc),
        ("apply delta", 0xf73c),
        ("crc", 0x7_1e3c),
        ("copy crc", 0x7_ff3c),
    ];
    for (descriptor, (name, allowed)) in valid().into_iter().zip(allowed) {
        assert_eq!(status(&descriptor), 1, "{name}");
        for bit in (0..24).map(|bit| 1 << bit) {
            let flagged = with(descriptor, Flags(bit));
            let expected = match allowed & bit {
                0 => Err(Invalid {
                    status: 0x11,
                    flags: bit,
                }),
                _ => Ok(()),
            };
            assert_eq!(
                validate(&flagged, &limits(Kind::Dsa), false),
                expected,
                "{name} {bit:x}"
            );
        }
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
fn a_record_is_requested_only_with_an_address() {
    let record = Record::default();
    let without = Descriptor {
        control: Descriptor::control_of(0, Flags::RECORD_REQUESTED),
        ..noop(&record)
    };
    assert_eq!(
        validate(&without, &limits(Kind::Dsa), false),
        Err(Invalid {
            status: 0x11,
            flags: 8
        })
    );
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
        assert_eq!(
            status(&Descriptor {
                interrupt: 1,
                ..good
            }),
            0x19
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
    for size in [0, 70, 81, 90] {
        assert_eq!(status(&sized(size)), if size == 90 { 1 } else { 0x15 });
    }
    assert_eq!(
        status(&Descriptor {
            size: 4097,
            ..create
        }),
        0x13
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
    assert_eq!(
        status(&Descriptor {
            address_2: 0x30008,
            ..create
        }),
        0x16
    );
    assert_eq!(
        status(&Descriptor {
            operands: [81, 0, 0],
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
fn an_iaa_has_no_batches() {
    let record = Record::default();
    let batch = Descriptor {
        size: 2,
        ..descriptor(opcode::BATCH, &record)
    };
    let invalid = validate(&batch, &limits(Kind::Iaa), false).unwrap_err();
    assert_eq!(invalid.status, 0x10);
}

proptest! {
    #[test]
    fn two_tables_of_rules_agree(
        opcode in prop_oneof![0u8..0x12, Just(0x42), Just(0x44)],
        // A few flags at a time, rarely odd ones.
        flags in proptest::collection::vec(0u32..24, 0..3),
        sizes in proptest::collection::vec(prop_oneof![Just(0u32), Just(1), Just(2), Just(80), Just(4096), Just(4 << 20)], 2),
        addresses in proptest::collection::vec(prop_oneof![Just(0u64), Just(64), Just(0x10000), Just(0x20000), Just(0x20800), Just(0x30004)], 3),
        expected in 0u64..2,
        block: bool,
        member: bool,
    ) {
        let mut limits = Config::dsa().limits_mut(0, 0).unwrap().clone();
        prop_assume!(limits.kind == Kind::Dsa);
        limits.block_on_fault = block;
        let flags = flags.iter().fold(Flags::RECORD_VALID, |all, bit| all.with(Flags(1 << bit)));
        let descriptor = Descriptor {
            control: Descriptor::control_of(opcode, flags),
            record: 64,
            address_1: addresses[0],
            address_2: addresses[1],
            size: sizes[0],
            operands: [addresses[2], u64::from(sizes[1]), expected],
            ..Descriptor::default()
        };
        let place = if member { Place::Batch } else { Place::Queue };
        let ours = validate(&descriptor, &limits, member).map_err(|invalid| invalid.status);
        let theirs = check(&descriptor, &limits, place).map_err(|violation| violation.code());
        prop_assert_eq!(ours.is_ok(), theirs.is_ok(), "{:?} {:?} {:?}", ours, theirs, descriptor);
    }
}
