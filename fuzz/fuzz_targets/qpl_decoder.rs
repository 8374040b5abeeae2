//! Payloads of qpl packets: refused, or decoded as another implementation does.

#![no_main]

use flate2::{Decompress, FlushDecompress, Status};
use libfuzzer_sys::fuzz_target;
use multifd::Method;
use vamoose_fuzz::{LAYOUT, decode, packets};

fuzz_target!(|input: &[u8]| {
    let size = LAYOUT.page_size();
    let packets = packets(input);
    let decoded = decode(Method::Qpl, &packets);
    let mut oracle = Decompress::new(false);
    let mut expected = vec![0; size];
    for (packet, pages) in packets.iter().zip(&decoded) {
        let (table, mut rest) = packet.payload.split_at(4 * packet.pages);
        for (page, length) in pages.chunks_exact(size).zip(table.chunks_exact(4)) {
            let len = u32::from_be_bytes(length.try_into().expect("four bytes"));
            let stream;
            (stream, rest) = rest.split_at(len.try_into().expect("codec has checked it"));
            if stream.len() == size {
                assert!(page == stream, "a raw page is not what was sent");
                continue;
            }
            assert!(stream.len() < size, "longer than a page");
            oracle.reset(false);
            let status = oracle.decompress(stream, &mut expected, FlushDecompress::Finish);
            // Where libraries differ in what they take, there is nothing to compare.
            if let Ok(Status::StreamEnd) = status {
                let sizes = (oracle.total_in(), oracle.total_out());
                assert_eq!(sizes, (stream.len() as u64, size as u64), "other sizes");
                assert!(page == expected, "zlib-rs decodes to another page");
            }
        }
        assert!(rest.is_empty(), "payload left");
    }
});
