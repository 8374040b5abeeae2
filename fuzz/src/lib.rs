//! What the fuzz targets share.
//!
//! Inputs of the decoder targets are packets back to back, each one byte for its number of pages
//! (minus one, the upper bit ignored), two for the length of its payload (big endian, cut to what is
//! there), and the payload. `examples/seeds.rs` writes the same.

use std::{io::Write as _, os::unix::net::UnixStream, sync::Arc, thread, time::Duration};

use multifd::{Layout, Method};
use vamoose_codec::Decoder;
use vamoose_link::Stream;

/// Page size of the guests of all targets but `packet`.
pub const LAYOUT: Layout = Layout::X86;

/// A packet for a decoder.
pub struct Encoded<'a> {
    /// From 1 to as many as a packet holds.
    pub pages: usize,
    pub payload: &'a [u8],
}

/// The packets of an input.
pub fn packets(mut input: &[u8]) -> Vec<Encoded<'_>> {
    let mut packets = Vec::new();
    while let Some(([pages, high, low], rest)) = input.split_first_chunk() {
        let len = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (payload, rest) = rest.split_at(len);
        input = rest;
        packets.push(Encoded {
            pages: 1 + usize::from(*pages) % LAYOUT.page_count(),
            payload,
        });
    }
    packets
}

/// The input of a packet.
pub fn write_packet(pages: usize, payload: &[u8], input: &mut Vec<u8>) {
    let count = u8::try_from(pages - 1).expect("at most 128 pages");
    let len = u16::try_from(payload.len()).expect("seeds are small");
    input.push(count);
    input.extend_from_slice(&len.to_be_bytes());
    input.extend_from_slice(payload);
}

/// Decodes a channel until a packet is refused; returns the pages of those that are not.
///
/// Guard bytes stand around the pages: the libraries are C and assembly, in which the sanitizer does
/// not see a stray write.
pub fn decode(method: Method, packets: &[Encoded<'_>]) -> Vec<Vec<u8>> {
    let mut decoder = Decoder::new(LAYOUT);
    let mut decoded = Vec::new();
    for packet in packets {
        let len = packet.pages * LAYOUT.page_size();
        let mut room = vec![GUARD; len + 2 * GUARDS];
        let pages = &mut room[GUARDS..][..len];
        let result = decoder.decode(method, packet.payload, pages);
        assert!(
            room[..GUARDS].iter().all(|byte| *byte == GUARD),
            "written before the pages"
        );
        assert!(
            room[GUARDS + len..].iter().all(|byte| *byte == GUARD),
            "written behind the pages"
        );
        if result.is_err() {
            let again = decoder.decode(method, packet.payload, &mut vec![0; len]);
            assert!(again.is_err(), "used again after an error");
            break;
        }
        decoded.push(room[GUARDS..][..len].to_vec());
    }
    decoded
}

const GUARD: u8 = 0xa5;
const GUARDS: usize = 256;

/// Lets `read` receive from a peer that sends `input` and closes.
pub fn hear(input: &[u8], read: impl FnOnce(Arc<Stream>)) {
    let (mut peer, ours) = UnixStream::pair().expect("there are descriptors");
    // The peer always closes, so a wait would be a bug.
    ours.set_read_timeout(Some(Duration::from_secs(20)))
        .expect("a time that is not zero");
    thread::scope(|scope| {
        scope.spawn(move || {
            // Fails when the reader has refused something and left.
            let _ = peer.write_all(input);
        });
        let stream = Arc::new(Stream::from(ours));
        read(stream.clone());
        stream.shut_down();
    });
}
