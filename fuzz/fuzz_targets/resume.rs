//! Both ends of a stream over connections that are cut behind any byte, and whose bits flip: each end reads what the
//! other one wrote, once and in order, and after the last cut all of it.

#![no_main]

use std::collections::VecDeque;

use libfuzzer_sys::fuzz_target;
use vamoose_session::{
    frame::{HEADER_LEN, Header, Kind},
    window::{Buffer, Frame, Sums, Window},
};

fuzz_target!(|input: &[u8]| {
    let mut ends = [End::new(), End::new()];
    for step in input.chunks_exact(2) {
        let (what, number) = (step[0], usize::from(step[1]));
        let at = usize::from(what & 1);
        let (near, far) = pair(&mut ends, at);
        match what / 2 % 8 {
            0 => near.write(number, false),
            1 => near.write(number, true),
            2 => near.tell(),
            3 => near.finish(),
            4 => near.flip(number * 37),
            5 => drop(far.take(&mut near.wire, number * 3)),
            6 => drop(far.take(&mut near.wire, number)),
            _ => connect(&mut ends),
        }
        if ends.iter().any(|end| end.is_corrupt) {
            connect(&mut ends);
        }
    }
    for end in &mut ends {
        end.finish();
    }
    // What is on its way may be wrong, what comes instead is not.
    connect(&mut ends);
    for _ in 0..2 {
        for at in 0..2 {
            let (near, far) = pair(&mut ends, at);
            far.take(&mut near.wire, usize::MAX).expect("it is right");
            far.tell();
        }
    }
    for at in 0..2 {
        let (near, far) = pair(&mut ends, at);
        assert!(far.has_ended && near.window.is_empty());
        assert_eq!(far.read, near.written);
    }
});

/// One end, and what it has sent that has not arrived.
struct End {
    window: Window,
    written: usize,
    wire: VecDeque<u8>,
    /// What has come of a frame.
    partial: Vec<u8>,
    /// How many bytes have been read: they are what they should be.
    read: usize,
    received: u64,
    has_ended: bool,
    is_corrupt: bool,
}

impl End {
    fn new() -> Self {
        Self {
            window: Window::new(0),
            written: 0,
            wire: VecDeque::new(),
            partial: Vec::new(),
            read: 0,
            received: 0,
            has_ended: false,
            is_corrupt: false,
        }
    }

    fn write(&mut self, len: usize, is_packet: bool) {
        let bytes: Vec<u8> = (self.written..self.written + len).map(byte).collect();
        let sums = Sums::of(&bytes, true);
        let pushed = match is_packet {
            true => {
                let mut buffer: Buffer = [&bytes[..], &[0; 16]].concat().into();
                self.window.push_buffer(&mut buffer, len, sums)
            }
            false => self.window.push_copy(&bytes, sums),
        };
        assert_eq!(pushed.is_ok(), len > 0 && !self.window.has_ended());
        if pushed.is_ok() {
            self.written += len;
            self.send_last();
        }
    }

    fn finish(&mut self) {
        if self.window.push_end().is_ok() {
            self.send_last();
        }
    }

    fn send_last(&mut self) {
        let frame = self.window.last(1).next().expect("it was pushed");
        send(&mut self.wire, frame, self.received);
    }

    /// Sends what it has received.
    fn tell(&mut self) {
        let header = Header::empty(Kind::Acknowledge, self.window.next(), self.received);
        self.wire.extend(header.encode());
    }

    /// Flips a bit of what is on its way.
    fn flip(&mut self, bit: usize) {
        if let Some(byte) = self.wire.get_mut(bit / 8) {
            *byte ^= 1 << (bit % 8);
        }
    }

    /// Takes bytes of a wire, up to the first frame that is wrong; `None` if there is one.
    fn take(&mut self, wire: &mut VecDeque<u8>, most: usize) -> Option<()> {
        let len = most.min(wire.len());
        self.partial.extend(wire.drain(..len));
        while let Some((header, rest)) = self.partial.split_first_chunk::<HEADER_LEN>() {
            let Ok(header) = Header::decode(header) else {
                self.is_corrupt = true;
                return None;
            };
            if rest.len() < header.len {
                break;
            }
            let bytes = &rest[..header.len];
            let is_right = |check| check == crc32c::crc32c(bytes);
            if !header.check.is_none_or(is_right) {
                self.is_corrupt = true;
                return None;
            }
            if matches!(header.kind, Kind::Data | Kind::End) {
                assert_eq!(header.offset, self.received, "once and in order");
                assert!(!self.has_ended);
                for found in bytes {
                    assert_eq!(*found, byte(self.read));
                    self.read += 1;
                }
                self.received = header.end();
                self.has_ended = header.kind == Kind::End;
            }
            let acknowledged = self.window.acknowledge(header.received);
            acknowledged.expect("a right peer acknowledges what it has");
            self.partial.drain(..HEADER_LEN + header.len);
        }
        Some(())
    }
}

/// The next connection: each tells what it has, and sends again what the other one has not.
fn connect(ends: &mut [End; 2]) {
    for at in 0..2 {
        let (near, far) = pair(ends, at);
        near.wire.clear();
        near.partial.clear();
        near.is_corrupt = false;
        let accepted = near.window.acknowledge(far.received);
        accepted.expect("a right peer has what it says");
        for frame in near.window.frames() {
            send(&mut near.wire, frame, near.received);
        }
    }
}

fn send(wire: &mut VecDeque<u8>, frame: &Frame, received: u64) {
    let mut header = frame.header;
    header.received = received;
    wire.extend(header.encode());
    wire.extend(frame.bytes());
}

fn pair(ends: &mut [End; 2], at: usize) -> (&mut End, &mut End) {
    let [first, second] = ends;
    match at {
        0 => (first, second),
        _ => (second, first),
    }
}

/// What a stream has at an offset: not again soon.
fn byte(offset: usize) -> u8 {
    (offset.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0]
}
