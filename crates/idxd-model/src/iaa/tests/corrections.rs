//! What the public specification of IAA says about records, AECS, sizes and flags.

use super::*;

#[test]
fn success_counts_no_input() {
    let (_, stream) = compressed(b"abc");
    for mut job in [
        Job::compress(b"abc", WHOLE_BLOCK),
        Job::statistics(b"abc"),
        Job::decompress(&stream, 3),
        Job::crc64(b"abc"),
    ] {
        let record = job.execute();
        let opcode = job.descriptor.opcode();
        assert_eq!((record.status(), record.completed()), (1, 0), "{opcode:#x}");
    }
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
fn flags_that_this_operation_does_not_have_are_named() {
    type Make = fn() -> Job;
    let compress: Make = || Job::compress(b"abc", WHOLE_BLOCK);
    let decompress: Make = || Job::decompress(&[3, 0], 16);
    let crc64: Make = || Job::crc64(b"abc");
    let cases: [(Make, &[u32]); 3] = [
        (compress, &[0, 5, 6, 7, 9, 13, 14, 18, 20, 22, 23]),
        (decompress, &[0, 5, 6, 7, 9, 13, 14, 16, 18, 20, 22, 23]),
        (crc64, &[0, 5, 6, 7, 8, 9, 10, 13, 14, 15, 16, 20, 21]),
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
    // Not with the input either, though it is only read.
    let mut job = Job::compress(&fixed_aecs().repeat(2), WHOLE_BLOCK);
    job.aecs(SOURCE, AECS_SIZE);
    assert_eq!(job.execute().status(), 0x16);
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
fn compression_needs_its_tables() {
    let mut job = Job::compress(b"abc", WHOLE_BLOCK);
    job.descriptor.control &= !Flags::READ_AECS.0;
    job.aecs(0, 0);
    assert_eq!(job.execute().status(), 0x11);
}

#[test]
fn decompression_ends_at_the_last_block() {
    let both = [&deflated_by_zlib(b"ab", 0)[..], &deflated_by_zlib(b"cd", 0)].concat();
    let mut job = Job::decompress(&both, 16);
    let record = job.execute();
    assert_eq!((record.status(), record.result()), (1, 0));
    assert_eq!(job.output(&record), b"ab");
    // A header of a dynamic block, cut.
    let record = Job::decompress(&bits(&[(1, 1), (2, 2), (0, 13)]), 16).execute();
    assert_eq!((record.status(), record.result()), (0x0a, 15));
}
