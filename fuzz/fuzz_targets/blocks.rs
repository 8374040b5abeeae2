//! Blocks of bytes on a session's stream, until an error or the end, whatever the peer sends.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vamoose_fuzz::hear;
use vamoose_link::ByteReader;

fuzz_target!(|input: &[u8]| {
    hear(input, |stream| {
        let mut reader = ByteReader::blocks(stream, Vec::new(), None);
        while let Ok(Some(bytes)) = reader.read() {
            assert!(bytes.len() <= 512 * 1024);
        }
    });
});
