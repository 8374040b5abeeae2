//! Every field of a descriptor is checked, with the code that belongs to it; and the driver's builders pass the checks.

use idxd::{
    Capabilities, Descriptor, Flags, Kind, Limits, Record, dsa,
    iaa::{self, Compress, CompressAecs, Decompress},
    opcode,
};

use super::validate;
use crate::{Config, dsa::Outcome};

fn limits(kind: Kind) -> Limits {
    let config = Config::devices(kind, 1);
    config.devices[0].queues[0].clone()
}

fn status(descriptor: &Descriptor) -> u8 {
    status_for(&limits(Kind::Dsa), descriptor)
}

fn status_for(limits: &Limits, descriptor: &Descriptor) -> u8 {
    validate(descriptor, limits, false).map_or_else(|invalid| invalid.status, |()| 1)
}

fn invalid(flags: u32) -> Result<(), Outcome> {
    Err(Outcome {
        flags,
        ..Outcome::status(0x11)
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
        two(opcode::COMPARE_PATTERN),
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
        ("noop", 0xc),
        ("drain", 0xc),
        ("batch", 0xc),
        ("memmove", 0x10c),
        ("compare pattern", 0xc),
    ];
    let found = allowed(&limits(Kind::Dsa));
    for ((name, expected), found) in first.into_iter().zip(found) {
        assert_eq!(found, expected, "{name}: {found:x}");
    }
}

#[test]
fn cache_control_is_for_devices_that_have_it() {
    let without = Limits {
        capabilities: Capabilities(Capabilities::FIRST_DSA.0 & !(1 << 2)),
        ..limits(Kind::Dsa)
    };
    let both = allowed(&limits(Kind::Dsa)).into_iter();
    for (with, without) in both.zip(allowed(&without)) {
        assert_eq!(without, with & !Flags::CACHE.0);
    }
}

/// Each with every flag that the operation has.
#[test]
fn the_drivers_builders_pass_the_checks() {
    let (record, cache) = (64, Flags::CACHE);
    let (source, size, destination, destination_size) = (0x10000, 4096, 0x20000, 4095);
    let aecs = CompressAecs::fixed();
    let compress = Compress {
        source,
        size,
        destination,
        destination_size,
        aecs: aecs.address(),
    };
    let decompress = Decompress {
        source,
        size,
        destination,
        destination_size,
    };
    for (kind, descriptor) in [
        (Kind::Dsa, dsa::noop(record)),
        (Kind::Dsa, dsa::drain(record)),
        (Kind::Dsa, dsa::batch(64, 2, record)),
        (Kind::Dsa, dsa::compare_pattern(1, 3, !0, record)),
        (Kind::Iaa, dsa::noop(record)),
        (Kind::Iaa, dsa::drain(record)),
        (Kind::Iaa, iaa::compress(compress, record).with(cache)),
        (Kind::Iaa, iaa::decompress(decompress, record).with(cache)),
    ] {
        let limits = limits(kind);
        let checked = validate(&descriptor, &limits, false);
        assert_eq!(checked, Ok(()), "{kind:?} {descriptor:x?}");
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
        (0x4, 64, 1),
        (0x1004, 64, 0x11),
        (0x4, 16, 0x1b),
    ] {
        assert_eq!(flagged(flags, record), expected, "{flags:x}");
    }
}

#[test]
fn a_result_needs_its_record() {
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
            opcode::COMPARE_PATTERN => (invalid(0xc), invalid(8)),
            opcode::DRAIN => (invalid(8), invalid(8)),
            _ => (Ok(()), Ok(())),
        };
        assert_eq!(flagged(Flags(0)), none, "{good:?}");
        assert_eq!(flagged(Flags::RECORD_VALID), valid, "{good:?}");
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
fn unknown_and_forbidden_operations_are_unsupported() {
    let record = Record::default();
    for code in [0x09, 0x0a, 0x12, 0x20, 0x42, 0xff] {
        assert_eq!(status(&descriptor(code, &record)), 0x10);
    }
    let mut limits = limits(Kind::Dsa);
    limits.operations = limits.operations.without(opcode::MEMMOVE);
    for descriptor in valid() {
        let expected = if descriptor.opcode() == opcode::MEMMOVE {
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
        if matches!(good.opcode(), opcode::NOOP | opcode::BATCH) {
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
fn a_move_does_not_overlap() {
    let moved = |address_2| Descriptor {
        address_2,
        ..valid()[3]
    };
    assert_eq!(status(&moved(0x10fff)), 0x16);
    assert_eq!(status(&moved(0x11000)), 1);
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
    let compare = Descriptor {
        size: 2 << 20,
        ..valid()[4]
    };
    assert_eq!(status(&compare), 1);
}

/// Valid descriptors of IAA: NOOP, DRAIN, DECOMPRESS, COMPRESS.
fn valid_for_iaa() -> [Descriptor; 4] {
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
    ]
}

#[test]
fn an_iaa_allows_its_flags_whatever_its_version() {
    let allowed = [
        ("noop", 0xc),
        ("drain", 0xc),
        ("decompress", 0x10c),
        ("compress", 0x1_010c),
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
fn an_iaa_compresses_with_codes_alone() {
    let limits = limits(Kind::Iaa);
    let compress = valid_for_iaa()[3];
    let without = Descriptor {
        control: compress.control & !Flags::READ_AECS.0,
        operands: [0, 4096, 0],
        ..compress
    };
    assert_eq!(validate(&without, &limits, false), invalid(1 << 16));
}

#[test]
fn an_iaas_sizes_are_the_queues_or_zero_but_not_both() {
    let limits = limits(Kind::Iaa);
    let [_, _, decompress, compress] = valid_for_iaa();
    let sized = |of: Descriptor, source, output, aecs: u64| {
        let operands = [of.operands[0], output | aecs << 32, 0];
        status_for(
            &limits,
            &Descriptor {
                address_2: 0x100_0000,
                size: source,
                operands,
                ..of
            },
        )
    };
    for (of, has_aecs) in [(decompress, false), (compress, true)] {
        assert_eq!(sized(of, 0, 4096, 0), 1);
        assert_eq!(sized(of, 4096, 0, 0), 1);
        assert_eq!(sized(of, 0, 0, 0), 0x13);
        let most = 2 << 20;
        let aecs = if has_aecs { most } else { 0 };
        assert_eq!(sized(of, 2 << 20, most, aecs), 1);
        assert_eq!(sized(of, (2 << 20) + 1, most, 0), 0x13);
        assert_eq!(sized(of, 2 << 20, most + 1, 0), 0x13);
    }
    assert_eq!(sized(compress, 64, 64, (2 << 20) + 1), 0x13);
}

#[test]
fn an_iaas_input_and_output_do_not_overlap() {
    let limits = limits(Kind::Iaa);
    let [_, _, decompress, ..] = valid_for_iaa();
    // The output's size counts, not the input's.
    for (output, status) in [(0x800, 1), (0x801, 0x16)] {
        let apart = Descriptor {
            address_1: 0x1000,
            size: 0x100,
            address_2: 0x800,
            operands: [0, output, 0],
            ..decompress
        };
        assert_eq!(status_for(&limits, &apart), status);
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
