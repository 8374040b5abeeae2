//! Payloads of a zstd channel: refused, or decoded, within the pages.

#![no_main]

use libfuzzer_sys::fuzz_target;
use multifd::Method;
use vamoose_fuzz::{decode, packets};

fuzz_target!(|input: &[u8]| {
    decode(Method::Zstd, &packets(input));
});
