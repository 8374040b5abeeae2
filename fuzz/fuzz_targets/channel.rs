//! A whole data channel from behind its first 64 bytes on, over a socket: packets until an error or
//! the end, whatever the peer sends.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use multifd::{PacketKind, RamHeader};
use vamoose_codec::Decoder;
use vamoose_fuzz::{LAYOUT, hear};
use vamoose_link::{ChannelReader, Packet, Received, Stats, Stream};
use vm_memory::VolatileSlice;

fuzz_target!(|input: &[u8]| {
    hear(input, |stream| read(stream, input.len()));
    hear(input, read_memory);
});

fn read(stream: Arc<Stream>, len: usize) {
    let stats = Arc::new(Stats::default());
    let mut reader = ChannelReader::new(stream, LAYOUT, Decoder::new(LAYOUT), stats.clone());
    let mut packet = Packet::new(LAYOUT);
    let mut packets = 0;
    while let Ok(Received::Packet) = reader.read(&mut packet) {
        packets += 1;
        match packet.kind() {
            PacketKind::Ram => {
                let normal = packet.ram().normal_offsets().len();
                assert_eq!(packet.pages().len(), normal * LAYOUT.page_size());
            }
            PacketKind::DeviceState => assert!(packet.state().len() <= len),
        }
        // The smallest packet is device state without any.
        assert!(packets * 276 <= len, "more packets than bytes for them");
    }
}

/// As the crate `live` does it: into memory that the header's reader has looked up.
fn read_memory(stream: Arc<Stream>) {
    let stats = Arc::new(Stats::default());
    let mut reader = ChannelReader::new(stream, LAYOUT, Decoder::new(LAYOUT), stats);
    let mut memory = vec![0; LAYOUT.packet_bytes()];
    let memory = VolatileSlice::from(&mut memory[..]);
    let mut header = RamHeader::new(LAYOUT);
    while let Ok(Received::Packet) = reader.read_header(&mut header) {
        let pages = (0..header.normal_offsets().len()).map(|page| {
            memory
                .subslice(page * LAYOUT.page_size(), LAYOUT.page_size())
                .expect("a packet has no more pages")
        });
        if reader
            .read_pages(&header, &pages.collect::<Vec<_>>())
            .is_err()
        {
            break;
        }
    }
}
