//! Both ends of a stream, as [`StreamState`] has them, over connections that are cut behind any byte, and whose bits flip: each end
//! reads what the other one wrote, once and in order, and after the last cut all of it.

#![no_main]

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use libfuzzer_sys::fuzz_target;
use vamoose_session::{
    frame::HEADER_LEN,
    stream::{ConnectionId, FrameEvent, Link, StreamError, StreamState, Timeouts, Transmit},
    window::{Buffer, Sums},
};

fuzz_target!(|input: &[u8]| {
    let now = Instant::now();
    let mut ends = [End::new(now), End::new(now)];
    connect(&mut ends, now);
    for step in input.chunks_exact(2) {
        let (what, number) = (step[0], usize::from(step[1]));
        let at = usize::from(what & 1);
        let (near, far) = pair(&mut ends, at);
        match what / 2 % 8 {
            0 => near.write(number, false),
            1 => near.write(number, true),
            2 => near.hold(),
            3 => near.finish(),
            4 => near.flip(number * 37),
            5 => far.take(&mut near.wire, number * 3, now),
            6 => far.take(&mut near.wire, number, now),
            _ => connect(&mut ends, now),
        }
        // A system call that has begun is over in the next step.
        if what / 2 % 8 != 2 {
            ends.iter_mut().for_each(End::send);
        }
        // A frame that is corrupt twice ends the stream.
        if ends.iter().any(End::is_corrupt) {
            return;
        }
        if ends
            .iter()
            .any(|end| matches!(end.state.link(), Link::Down { .. }))
        {
            connect(&mut ends, now);
        }
    }
    for end in &mut ends {
        end.finish();
    }
    // What is on its way may be wrong, what comes instead is not.
    connect(&mut ends, now);
    for _ in 0..3 {
        for at in 0..2 {
            let (near, far) = pair(&mut ends, at);
            near.send();
            far.take(&mut near.wire, usize::MAX, now);
            far.send();
        }
    }
    for at in 0..2 {
        let (near, far) = pair(&mut ends, at);
        assert!(matches!(near.state.link(), Link::Up(_)));
        assert!(far.state.has_peer_ended() && near.state.is_done());
        assert_eq!(far.read, near.written);
    }
});

/// One end, and what it has sent that has not arrived.
struct End {
    state: StreamState,
    connection: Option<ConnectionId>,
    /// Frames in a system call.
    lent: Option<Transmit>,
    written: usize,
    wire: VecDeque<u8>,
    /// What has come of a header, or of the bytes behind one.
    partial: Vec<u8>,
    /// How many bytes have been read: they are what they should be.
    read: usize,
}

impl End {
    fn new(now: Instant) -> Self {
        let timeouts = Timeouts {
            reconnect: Duration::MAX,
            stall: Duration::MAX,
        };
        Self {
            state: StreamState::new(0, timeouts, now),
            connection: None,
            lent: None,
            written: 0,
            wire: VecDeque::new(),
            partial: Vec::new(),
            read: 0,
        }
    }

    fn is_corrupt(&self) -> bool {
        matches!(self.state.link(), Link::Closed(StreamError::Corrupt { .. }))
    }

    fn write(&mut self, len: usize, is_packet: bool) {
        let bytes: Vec<u8> = (self.written..self.written + len).map(byte).collect();
        let sums = Sums::of(&bytes, true);
        let written = match is_packet {
            true => {
                let mut buffer: Buffer = [&bytes[..], &[0; 16]].concat().into();
                self.state.write_buffer(&mut buffer, len, sums)
            }
            false => self.state.write_copy(&bytes, sums),
        };
        if written.is_ok() {
            self.written += len;
        }
    }

    fn finish(&mut self) {
        let _ = self.state.finish();
    }

    /// A system call has begun, and is not over.
    fn hold(&mut self) {
        if let Some(connection) = self.connection
            && self.lent.is_none()
        {
            self.lent = self.state.poll_transmit(connection);
            put(&mut self.wire, self.lent.as_ref());
        }
    }

    /// It is over, and all that is left is sent.
    fn send(&mut self) {
        let Some(connection) = self.connection else {
            return;
        };
        if let Some(lent) = self.lent.take() {
            self.state.on_transmitted(lent, true);
        }
        while let Some(transmit) = self.state.poll_transmit(connection) {
            put(&mut self.wire, Some(&transmit));
            self.state.on_transmitted(transmit, true);
        }
    }

    /// Flips a bit of what is on its way.
    fn flip(&mut self, bit: usize) {
        if let Some(byte) = self.wire.get_mut(bit / 8) {
            *byte ^= 1 << (bit % 8);
        }
    }

    /// Takes bytes of a wire.
    fn take(&mut self, wire: &mut VecDeque<u8>, most: usize, now: Instant) {
        let len = most.min(wire.len());
        self.partial.extend(wire.drain(..len));
        let Some(connection) = self.connection else {
            return;
        };
        while self.state.is_carried_by(connection) {
            if let Some(header) = self.state.announced() {
                if self.partial.len() < header.len {
                    return;
                }
                let bytes: Vec<u8> = self.partial.drain(..header.len).collect();
                let sum = crc32c::crc32c(&bytes);
                if self.state.on_data(connection, sum, "a path", now) {
                    for found in bytes {
                        assert_eq!(found, byte(self.read), "once and in order");
                        self.read += 1;
                    }
                }
                continue;
            }
            let Some((header, _)) = self.partial.split_first_chunk::<HEADER_LEN>() else {
                return;
            };
            let header = *header;
            self.partial.drain(..HEADER_LEN);
            match self.state.on_header(connection, &header, "a path", now) {
                // A right peer sends no other header that is of no use.
                FrameEvent::Nothing => assert!(!self.state.is_closed() || self.is_corrupt()),
                FrameEvent::Data(_) | FrameEvent::Acknowledgement | FrameEvent::End => {}
            }
        }
    }
}

/// The next connection: each tells what it has, and sends again what the other one has not.
fn connect(ends: &mut [End; 2], now: Instant) {
    for end in ends.iter_mut() {
        if let Some(lent) = end.lent.take() {
            end.state.on_transmitted(lent, false);
        }
        end.wire.clear();
        end.partial.clear();
        assert!(end.state.begin_attach(now));
    }
    for at in 0..2 {
        let (near, far) = pair(ends, at);
        let accepted = near.state.on_resume_offset(far.state.received());
        accepted.expect("a right peer has what it says");
        near.connection = near.state.on_connection();
        near.state.end_attach();
    }
}

fn put(wire: &mut VecDeque<u8>, transmit: Option<&Transmit>) {
    for (header, bytes) in transmit.into_iter().flat_map(Transmit::frames) {
        wire.extend(header);
        wire.extend(bytes);
    }
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
