//! A whole data channel from behind its first 64 bytes on, over a socket: packets until an error or
//! the end, whatever the peer sends.

#![no_main]

use std::{io::Write as _, os::unix::net::UnixStream, sync::Arc, thread, time::Duration};

use codec::Decoder;
use libfuzzer_sys::fuzz_target;
use multifd::PacketKind;
use transfer::{ChannelReader, Packet, Received, Stats, Stream};
use vamoose_fuzz::LAYOUT;

fuzz_target!(|input: &[u8]| {
    let (mut peer, ours) = UnixStream::pair().expect("there are descriptors");
    // The peer always closes, so a wait would be a bug.
    ours.set_read_timeout(Some(Duration::from_secs(20)))
        .expect("a time that is not zero");
    thread::scope(|scope| {
        scope.spawn(move || {
            // Fails when the reader has refused a packet and left.
            let _ = peer.write_all(input);
        });
        let stream = Arc::new(Stream::Unix(ours));
        read(stream.clone(), input.len());
        stream.shut_down();
    });
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
