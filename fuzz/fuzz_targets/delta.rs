//! Packets with differences from a peer: each is refused, or leaves slots from which the next ones are restored. Any pages are
//! kept: that their checksum is right is not what is looked for here.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vamoose_fuzz::{LAYOUT, packets};
use vamoose_link::delta_testing::receive;

fuzz_target!(|input: &[u8]| {
    let packets = packets(input);
    let packets: Vec<_> = packets
        .iter()
        .map(|packet| (packet.pages, packet.payload))
        .collect();
    receive(LAYOUT, &packets);
});
