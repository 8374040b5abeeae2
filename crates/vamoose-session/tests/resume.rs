//! Both ends of a stream over a network that cuts connections anywhere and flips bits: what is read is what was written.

use proptest::prelude::*;
use vamoose_session::{
    frame::{HEADER_LEN, Header, Kind},
    handshake::{ATTACH_LEN, Answer, Attach, HELLO_LEN, Hello, Transcript, Welcome},
    window::{Buffer, Sums, Window},
};

/// One connection, and what becomes of it.
#[derive(Clone, Debug)]
struct Connection {
    /// Written while it is there: each a frame, of a packet's buffer or copied.
    writes: Vec<(Vec<u8>, bool)>,
    /// It breaks behind so many bytes, ...
    passes: usize,
    /// ... and one bit of them may change.
    flip: Option<usize>,
    /// Whether the reader's last acknowledgement still arrives.
    acknowledged: bool,
}

fn connections() -> impl Strategy<Value = Vec<Connection>> {
    let write = (prop::collection::vec(any::<u8>(), 1..40), any::<bool>());
    let connection = (
        prop::collection::vec(write, 0..4),
        0..400usize,
        prop::option::weighted(0.3, 0..3200usize),
        any::<bool>(),
    );
    let connection = connection.prop_map(|(writes, passes, flip, acknowledged)| Connection {
        writes,
        passes,
        flip,
        acknowledged,
    });
    prop::collection::vec(connection, 0..12)
}

/// A reader as the protocol asks for: whole, right frames in their order, or nothing.
#[derive(Default)]
struct Reader {
    bytes: Vec<u8>,
    received: u64,
    has_ended: bool,
}

impl Reader {
    /// Takes what one connection brings, up to the first thing that is wrong; false if there was one.
    fn take(&mut self, mut wire: &[u8]) -> bool {
        while let Some((header, rest)) = wire.split_first_chunk::<HEADER_LEN>() {
            let Ok(header) = Header::decode(header) else {
                return false;
            };
            assert_eq!(
                header.offset, self.received,
                "a gap behind a right checksum"
            );
            assert!(!self.has_ended);
            let Some((bytes, rest)) = rest.split_at_checked(header.len) else {
                return true;
            };
            if header
                .check
                .is_some_and(|check| check != crc32c::crc32c(bytes))
            {
                return false;
            }
            self.bytes.extend_from_slice(bytes);
            self.received = header.end();
            self.has_ended = header.kind == Kind::End;
            wire = rest;
        }
        true
    }
}

/// All frames of the window, as a new connection sends them.
fn wire(window: &Window) -> Vec<u8> {
    let mut wire = Vec::new();
    for frame in window.frames() {
        wire.extend_from_slice(&frame.header.encode());
        wire.extend_from_slice(frame.bytes());
    }
    wire
}

proptest! {
    #[test]
    fn what_is_read_is_what_was_written(connections in connections()) {
        let (mut window, mut reader, mut written) = (Window::new(0), Reader::default(), Vec::new());
        for connection in connections {
            // The next connection begins with what the reader has.
            window.acknowledge(reader.received).unwrap();
            for (bytes, is_packet) in connection.writes {
                if is_packet {
                    let mut buffer: Buffer = bytes.clone().into();
                    let check = Some(crc32c::crc32c(&bytes));
                    window.push_buffer(&mut buffer, bytes.len(), Sums { check, pages: None }).unwrap();
                } else {
                    window.push_copy(&bytes, Sums::of(&bytes, true)).unwrap();
                }
                written.extend_from_slice(&bytes);
            }
            let mut wire = wire(&window);
            wire.truncate(connection.passes);
            let mut is_changed = false;
            if let Some(bit) = connection.flip && let Some(byte) = wire.get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
                is_changed = true;
            }
            let was_right = reader.take(&wire);
            prop_assert!(was_right || is_changed);
            prop_assert!(written.starts_with(&reader.bytes));
            if connection.acknowledged {
                window.acknowledge(reader.received).unwrap();
            }
        }
        window.acknowledge(reader.received).unwrap();
        window.push_end().unwrap();
        prop_assert!(reader.take(&wire(&window)));
        prop_assert!(reader.has_ended);
        prop_assert_eq!(reader.bytes, written);
        window.acknowledge(reader.received).unwrap();
        prop_assert!(window.is_empty());
    }

    /// Whatever a peer sends is read or refused, and what is read is encoded to the same bytes.
    #[test]
    fn handshakes_of_any_bytes_are_read_or_refused(
        hello in any::<[u8; HELLO_LEN]>(),
        attach in any::<[u8; ATTACH_LEN]>(),
        like_ours in any::<bool>(),
    ) {
        let ours = Hello::new([7; 32]);
        let mut hello = hello;
        if like_ours {
            hello[..8].copy_from_slice(&ours.encode()[..8]);
        }
        if let Ok(read) = Hello::decode(&hello) {
            prop_assert_eq!(read.encode(), hello);
        }
        if let Ok(read) = Answer::decode(&hello) && read.accepted().is_ok() {
            prop_assert_eq!(read.encode(), hello);
        }
        let transcript = Transcript::new(&ours, &Answer::to(&ours, [8; 32]), [9; 32]);
        let secret = transcript.secret();
        if let Ok(read) = Attach::decode(&attach) {
            prop_assert_eq!(&read.encode(&transcript, &secret)[..32], &attach[..32]);
        }
        prop_assert!(!Attach::is_proved(&attach, &transcript, &secret));
        let sent = [0; ATTACH_LEN];
        prop_assert!(Welcome::decode(&attach, &transcript, &sent, &secret).is_err());
    }
}
