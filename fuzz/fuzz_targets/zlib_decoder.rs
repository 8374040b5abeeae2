//! Payloads of a zlib channel: refused, or decoded as another implementation does.

#![no_main]

use flate2::{Decompress, FlushDecompress};
use libfuzzer_sys::fuzz_target;
use multifd::Method;
use vamoose_fuzz::{decode, packets};

fuzz_target!(|input: &[u8]| {
    let packets = packets(input);
    let decoded = decode(Method::Zlib, &packets);
    let mut oracle = Decompress::new(true);
    for (packet, pages) in packets.iter().zip(&decoded) {
        let mut expected = vec![0; pages.len()];
        if !fill(&mut oracle, packet.payload, &mut expected) {
            return;
        }
        assert!(*pages == expected, "zlib-rs decodes to other pages");
    }
});

/// Fills `pages` from `payload`, and feeds the rest of it; false when zlib-rs refuses what codec has
/// taken, and the two cannot be compared any further.
///
/// That happens on payloads that no encoder makes. ISA-L checks a block's header when it has all of
/// it, which may be a packet later, and takes some incomplete codes that zlib refuses. And where a
/// payload stops in the middle of a block, without a flush, it keeps the last symbols back until
/// there is more input, so that a byte too much shows one packet later.
fn fill(oracle: &mut Decompress, payload: &[u8], pages: &mut [u8]) -> bool {
    let (start_in, start_out) = (oracle.total_in(), oracle.total_out());
    loop {
        let input = usize::try_from(oracle.total_in() - start_in).expect("of this payload");
        let output = usize::try_from(oracle.total_out() - start_out).expect("of these pages");
        let (payload, pages) = (&payload[input..], &mut pages[output..]);
        if oracle
            .decompress(payload, pages, FlushDecompress::Sync)
            .is_err()
        {
            return false;
        }
        let progress = oracle.total_in() - start_in > input as u64
            || oracle.total_out() - start_out > output as u64;
        if !progress {
            assert!(pages.is_empty(), "codec has decoded more than zlib-rs");
            return payload.is_empty();
        }
    }
}
