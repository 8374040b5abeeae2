//! Payloads of a zstd-frames channel: refused, or decoded, within the pages.

#![no_main]

use libfuzzer_sys::fuzz_target;
use multifd::Method;
use vamoose_fuzz::{decode, packets};

fuzz_target!(|input: &[u8]| {
    // Each packet by itself: an error ends a channel.
    for packet in packets(input) {
        decode(Method::ZstdFrames, &[packet]);
    }
});
