//! What the public specification of IAA says about records, AECS, sizes and flags.

use super::*;

#[test]
fn success_counts_no_input() {
    let (_, stream) = compressed(b"abc");
    for mut job in [
        Job::compress(b"abc", WHOLE_BLOCK),
        Job::compress(b"abc", 1),
        Job::decompress(&stream, 3),
        Job::crc64(b"abc"),
    ] {
        let record = job.execute();
        let opcode = job.descriptor.opcode();
        assert_eq!((record.status(), record.completed()), (1, 0), "{opcode:#x}");
    }
}

#[test]
fn the_toggle_selects_what_is_only_read_or_only_written() {
    let garbage = vec![0xee; AECS_SIZE as usize];
    for (toggle, copies) in [
        (false, [fixed_aecs(), garbage.clone()]),
        (true, [garbage, fixed_aecs()]),
    ] {
        let mut job = Job::compress(b"abc", WHOLE_BLOCK);
        job.memory.regions.insert(AECS, copies.concat());
        if toggle {
            job.add(Flags::AECS_TOGGLE);
        }
        assert_eq!(job.execute().status(), 1, "{toggle}");

        let mut job = Job::compress(b"abc", WHOLE_BLOCK);
        job.memory.regions.insert(AECS, fixed_aecs().repeat(2));
        job.add(Flags::WRITE_AECS);
        if toggle {
            job.add(Flags::AECS_TOGGLE);
        }
        assert_eq!(job.execute().status(), 1);
        let (first, second) = job.memory.regions[&AECS].split_at(AECS_SIZE as usize);
        let crc = crc32_by_zlib(b"abc").to_le_bytes();
        let (written, left) = if toggle {
            (first, second)
        } else {
            (second, first)
        };
        assert_eq!(written[..4], crc, "{toggle}");
        assert_eq!(left[..4], [0; 4]);
    }
}

#[test]
fn compression_writes_no_tables_back() {
    let mut job = Job::compress(b"abc", WHOLE_BLOCK);
    let copies = [fixed_aecs(), vec![0xee; AECS_SIZE as usize]].concat();
    job.memory.regions.insert(AECS, copies);
    job.add(Flags::WRITE_AECS);
    assert_eq!(job.execute().status(), 1);
    let copy = &job.memory.regions[&AECS][AECS_SIZE as usize..];
    let kept = copy.iter().rev().take_while(|byte| **byte == 0xee).count();
    assert_eq!(copy.len() - kept, 64);
}

#[test]
fn either_size_may_be_zero_but_not_both() {
    let mut job = Job::compress(b"", WHOLE_BLOCK);
    assert_eq!(job.execute().status(), 1);
    // A header, and the end of its block.
    let mut job = Job::decompress(&[3, 0], 0);
    assert_eq!(job.execute().status(), 1);
    for mut job in [
        Job::compress(b"", WHOLE_BLOCK),
        Job::decompress(&[], 0),
        Job::crc64(b""),
    ] {
        job.limit(0);
        if job.descriptor.opcode() == opcode::CRC64 {
            job.descriptor.operands[1] = 0;
        }
        assert_eq!(job.execute().status(), 0x13);
    }
}

#[test]
fn only_a_stop_ends_at_the_last_block() {
    let both = [&compressed(b"ab").1[..], &compressed(b"cd").1].concat();
    let stored = [&deflated_by_zlib(b"ab", 0)[..], &deflated_by_zlib(b"cd", 0)].concat();
    for (stream, flags, expected) in [
        (&stored, 0x1f, &b"ab"[..]),
        (&stored, 0x0b, b"abcd"),
        (&stored, 0x03, b"abcd"),
        (&both, 0x1f, b"ab"),
        (&both, 0x07, b"ab"),
    ] {
        let mut job = Job::decompress(stream, 16);
        job.descriptor.operation_flags = flags;
        let record = job.execute();
        assert_eq!((record.status(), record.result()), (1, 0), "{flags:#x}");
        assert_eq!(job.output(&record), expected, "{flags:#x}");
    }
}

#[test]
fn an_input_may_end_within_a_header() {
    // A header of a dynamic block, cut. Only a check for the end of a block minds.
    let cut = bits(&[(1, 1), (2, 2), (0, 13)]);
    for (flags, outcome) in [(0x03, (1, 0)), (0x1f, (0x0a, 15)), (0x0b, (0x0a, 15))] {
        let mut job = Job::decompress(&cut, 16);
        job.descriptor.operation_flags = flags;
        let record = job.execute();
        assert_eq!((record.status(), record.result()), outcome, "{flags:#x}");
    }
}

#[test]
fn flags_that_this_operation_does_not_have_are_named() {
    type Make = fn() -> Job;
    let compress: Make = || Job::compress(b"abc", WHOLE_BLOCK);
    let decompress: Make = || Job::decompress(&[3, 0], 16);
    let crc64: Make = || Job::crc64(b"abc");
    let noop: Make = || Job::new(opcode::NOOP, Descriptor::default());
    let cases: [(Make, &[u32]); 4] = [
        (compress, &[0, 5, 6, 7, 15, 20, 23]),
        (decompress, &[0, 5, 6, 7, 15, 20, 23]),
        (crc64, &[0, 5, 6, 7, 8, 10, 11, 13, 14, 15, 16, 20, 21]),
        (noop, &[0, 1, 5, 8, 9, 10, 11, 13, 14, 15, 16, 20]),
    ];
    for (make, wrong) in cases {
        for bit in wrong {
            let mut job = make();
            job.add(Flags(1 << bit));
            let record = job.execute();
            let opcode = job.descriptor.opcode();
            assert_eq!(record.status(), 0x11, "{opcode:#x}, {bit}");
            assert_eq!(record.words[2], 1 << bit, "{opcode:#x}, {bit}");
        }
    }
    // The record's own traffic class.
    let mut job = noop();
    job.add(Flags(1 << 12));
    assert_eq!(job.execute().status(), 1);
}

#[test]
fn compression_needs_its_tables_and_statistics_do_not() {
    for (flags, status) in [(WHOLE_BLOCK, 0x11), (1, 1)] {
        let mut job = Job::compress(b"abc", flags);
        job.descriptor.control &= !Flags::READ_AECS.0;
        job.aecs(0, 0);
        assert_eq!(job.execute().status(), status);
    }
}

#[test]
fn an_aecs_overlaps_with_nothing_else() {
    let aecs = u64::from(AECS_SIZE);
    for (place, status) in [
        (DESTINATION - aecs, 1),
        (DESTINATION - aecs + 32, 0x16),
        (DESTINATION + 1024, 0x16),
    ] {
        let mut job = Job::compress(b"abc", WHOLE_BLOCK);
        job.memory.regions.insert(place, fixed_aecs());
        job.aecs(place, AECS_SIZE);
        job.limit(1056);
        assert_eq!(job.execute().status(), status, "{place:#x}");
    }
    // Not with the input either, even if it is only read.
    for (flags, status) in [(Flags::default(), 0x16), (Flags::WRITE_AECS, 0x16)] {
        let mut job = Job::compress(&fixed_aecs().repeat(2), WHOLE_BLOCK);
        job.aecs(SOURCE, AECS_SIZE);
        job.add(flags);
        assert_eq!(job.execute().status(), status);
    }
}

#[test]
fn second_flags_of_compression_have_a_status_of_their_own() {
    for (flags, status) in [
        (1, 0x31),
        (2, 0x31),
        (4, 0x31),
        (1 << 31, 0x31),
        (1 << 32, 0x12),
    ] {
        let mut job = Job::compress(b"abc", WHOLE_BLOCK);
        job.descriptor.operands[2] = flags;
        assert_eq!(job.execute().status(), status);
    }
}

#[test]
fn an_aecs_of_decompression_has_any_size_and_default_values_beyond() {
    let (_, stream) = compressed(b"abc");
    for (size, status) in [
        (0, 0x13),
        (32, 1),
        (0x440, 1),
        (0x1500, 1),
        (64 << 10, 1),
        ((64 << 10) + 32, 0x13),
    ] {
        let mut job = Job::decompress(&stream, 3);
        let mut aecs = vec![0; 65 << 10];
        aecs[0x434] = 1;
        job.memory.regions.insert(AECS, aecs);
        job.add(Flags::READ_AECS);
        job.aecs(AECS, size);
        let record = job.execute();
        assert_eq!(record.status(), status, "{size:#x}");
    }
}

#[test]
fn an_inconsistent_aecs_of_decompression_is_an_error() {
    let checked = |changes: &[(usize, u8)], size| {
        let mut job = Job::decompress(&[3, 0], 16);
        let mut aecs = vec![0; 0x1500];
        aecs[0x434] = 1;
        for (at, byte) in changes {
            aecs[*at] = *byte;
        }
        job.memory.regions.insert(AECS, aecs);
        job.add(Flags::READ_AECS);
        job.aecs(AECS, size);
        let record = job.execute();
        (record.status(), record.result())
    };
    let (good, bad) = ((1, 0), (0x0a, 0x16));
    for (name, changes, size, expected) in [
        ("any header", &[(0x434, 7)][..], 0x1500, good),
        ("nothing left of a stored block", &[(0x434, 2)], 0x1500, bad),
        ("a gap in the input", &[(441, 8)], 0x1500, bad),
        ("history that is read", &[(0x4e4, 24)], 0x500, good),
        ("history that is not read", &[(0x4e4, 25)], 0x500, bad),
        ("all of the history", &[(0x4e5, 0x80)], 0x14e0, bad),
        ("a pointer at the end", &[(0x4e5, 0x10)], 0x1500, bad),
    ] {
        assert_eq!(checked(changes, size), expected, "{name}");
    }
    // More bits are to be ignored than there are.
    let mut job = Job::decompress(&[], 16);
    job.descriptor.operation_flags = 0x03 | 1 << 6;
    let record = job.execute();
    assert_eq!((record.status(), record.result()), bad);
}
