//! What the public specification of IAA says about records, AECS, sizes and flags.

use super::*;

#[test]
fn success_counts_no_input() {
    let (_, stream) = compressed(b"abc");
    for mut job in [
        Job::compress(b"abc", WHOLE_BLOCK),
        Job::decompress(&stream, 3),
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
    for mut job in [Job::compress(b"", WHOLE_BLOCK), Job::decompress(&[], 0)] {
        job.limit(0);
        assert_eq!(job.execute().status(), 0x13);
    }
}

#[test]
fn flags_that_this_operation_does_not_have_are_named() {
    type Make = fn() -> Job;
    let compress: Make = || Job::compress(b"abc", WHOLE_BLOCK);
    let decompress: Make = || Job::decompress(&[3, 0], 16);
    let cases: [(Make, &[u32]); 2] = [
        (compress, &[0, 5, 6, 7, 9, 13, 14, 18, 20, 22, 23]),
        (decompress, &[0, 5, 6, 7, 9, 13, 14, 16, 18, 20, 22, 23]),
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
