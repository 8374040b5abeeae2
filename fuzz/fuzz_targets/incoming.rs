//! The receiving half of a stream, on connections of a peer that sends frames as it likes: right ones, corrupt ones, again,
//! too early, behind the end, and cut off anywhere. What is read is what an independent reading of the same bytes gives.

#![no_main]

use std::{io::Write as _, os::unix::net::UnixStream};

use libfuzzer_sys::fuzz_target;
use vamoose_link::{
    Socket,
    session_testing::{Came, Receiving, Wanted},
};
use vamoose_session::frame::{FrameError, HEADER_LEN, Header, Kind};
use vm_memory::VolatileSlice;

fuzz_target!(|input: &[u8]| {
    let Some((first, mut script)) = input.split_first() else {
        return;
    };
    // Streams begin at 0; the last offsets are worth a look, too.
    let first = match first % 4 {
        0 => u64::MAX - u64::from(first / 4) * 5,
        _ => 0,
    };
    let mut receiving = Receiving::new(first);
    let mut sizes = script.to_vec().into_iter().cycle();
    let (mut expected, mut read) = (Vec::new(), Vec::new());
    let mut has_ended = false;
    // Where a frame was corrupt last: the second time ends the stream.
    let mut corrupt_at = None;
    while let Some((reads, rest)) = script.split_first() {
        let start = receiving.received().0;
        let wire = connection(rest, &mut script, first, start);
        let meant = Meant::of(&wire, first, start, has_ended);
        receiving.attach(socket(&wire)).expect("a socket");
        let is_cut = reads % 4 == 0;
        let reads = if is_cut {
            usize::from(*reads) / 4
        } else {
            usize::MAX
        };
        let fails = (0..reads).find_map(|_| step(&mut receiving, &mut sizes, &mut read));
        let (received, waiting) = receiving.received();
        assert!(meant.ends.contains(&received), "in the middle of a frame");
        has_ended |= meant.ended_at == Some(received);
        let end = u64::from(meant.ended_at == Some(received) && received != start);
        let len = usize::try_from(received - start - end).expect("as many as came");
        expected.extend_from_slice(&meant.bytes[..len]);
        assert!(expected.starts_with(&read));
        assert_eq!(expected.len(), read.len() + waiting);
        if let Some(came) = fails {
            assert_eq!(Some(&received), meant.ends.last());
            let is_aborted = meant.fault == Some(Fault::Abort);
            assert_eq!(came == Ok(Came::Abort), is_aborted, "{came:?}");
            let is_closed = match meant.fault {
                Some(Fault::Corrupt(at)) => corrupt_at.replace(at) == Some(at),
                Some(Fault::Abort | Fault::Violation) => true,
                None => false,
            };
            assert_eq!(receiving.is_closed(), is_closed, "{came:?}");
        }
        if receiving.is_closed() {
            return;
        }
    }
});

/// Reads once; why it was the last time, if it was.
fn step(
    receiving: &mut Receiving,
    sizes: &mut impl Iterator<Item = u8>,
    read: &mut Vec<u8>,
) -> Option<Result<Came, String>> {
    let size = sizes.next().map_or(1, usize::from);
    let mut out = vec![0; 1 + size / 2 * 3];
    let came = match size % 2 {
        0 => receiving.receive(Wanted::Own(&mut out)),
        _ => {
            let half = out.len() / 2;
            let (low, high) = out.split_at_mut(half);
            let pages = [VolatileSlice::from(low), VolatileSlice::from(high)];
            receiving.receive(Wanted::Guest(&pages))
        }
    };
    match came {
        Ok(Came::Bytes(len)) => read.extend_from_slice(&out[..len]),
        Ok(Came::Header | Came::End) => {}
        came => return Some(came),
    }
    None
}

/// What one connection brings: frames by `script`, of which the rest is left for the next one.
fn connection<'a>(mut script: &'a [u8], left: &mut &'a [u8], first: u64, start: u64) -> Vec<u8> {
    let (mut wire, mut next) = (Vec::new(), start);
    while let Some(([what, number], rest)) = script.split_first_chunk() {
        script = rest;
        let len = usize::from(*number);
        let mut frame = |kind, offset: u64, len: usize| {
            let bytes: Vec<u8> = (0..len).map(|at| number.wrapping_add(at as u8)).collect();
            // Nothing was sent to the peer: most of the time it says so.
            let received = first.wrapping_add(u64::from(what & 0x70 == 0x70));
            let mut header = Header::empty(kind, offset, received);
            header.len = len;
            if kind == Kind::Data {
                header.check = Some(crc32c::crc32c(&bytes));
                header.pages = (what & 0x80 != 0).then_some(7);
            }
            wire.extend_from_slice(&header.encode());
            wire.extend_from_slice(&bytes);
            header.end()
        };
        match what % 16 {
            0..4 if len > 0 => next = frame(Kind::Data, next, len),
            // As long as a reader's buffers do not take it, and the socket does.
            4 => next = frame(Kind::Data, next, 1 + len * 300),
            5 => drop(frame(Kind::Acknowledge, next, 0)),
            6 => next = frame(Kind::End, next, 0),
            7 => drop(frame(Kind::Abort, next, 0)),
            // Again, or too early.
            8 if len > 0 => drop(frame(
                Kind::Data,
                next.wrapping_add_signed(i64::from(*number as i8)),
                9,
            )),
            9 => drop(frame(
                Kind::End,
                next.wrapping_add_signed(i64::from(*number as i8)),
                0,
            )),
            10 => flip(&mut wire, len),
            11 => flip(&mut wire, len * 8),
            // Any header, whose checksum is right.
            12 => {
                let taken = script.len().min(HEADER_LEN - 4);
                let mut header = [0; HEADER_LEN];
                header[..taken].copy_from_slice(&script[..taken]);
                script = &script[taken..];
                let sum = crc32c::crc32c(&header[..HEADER_LEN - 4]);
                header[HEADER_LEN - 4..].copy_from_slice(&sum.to_be_bytes());
                wire.extend_from_slice(&header);
            }
            13 => {
                let taken = script.len().min(len);
                wire.extend_from_slice(&script[..taken]);
                script = &script[taken..];
            }
            // It breaks off.
            14 => wire.truncate(wire.len().saturating_sub(len)),
            _ => break,
        }
        // No more than the socket holds, as nobody reads meanwhile.
        if wire.len() > 100_000 {
            wire.truncate(100_000);
            break;
        }
    }
    *left = script;
    wire
}

/// Flips one of the last bits.
fn flip(wire: &mut [u8], bit: usize) {
    let at = wire.len().checked_sub(1 + bit / 8);
    if let Some(byte) = at.and_then(|at| wire.get_mut(at)) {
        *byte ^= 1 << (bit % 8);
    }
}

/// What a connection's bytes say.
#[derive(Default)]
struct Meant {
    bytes: Vec<u8>,
    /// The offsets up to which all may have been received, in their order.
    ends: Vec<u64>,
    ended_at: Option<u64>,
    /// What comes behind that.
    fault: Option<Fault>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    Abort,
    /// With what had been received, and acknowledged by the peer.
    Corrupt((u64, u64)),
    Violation,
}

impl Meant {
    /// `first` is what a peer that was sent nothing has received.
    fn of(mut wire: &[u8], first: u64, start: u64, had_ended: bool) -> Self {
        let mut meant = Self {
            ends: vec![start],
            ended_at: had_ended.then_some(start),
            ..Self::default()
        };
        let mut next = start;
        while let Some((header, rest)) = wire.split_first_chunk::<HEADER_LEN>() {
            let header = match Header::decode(header) {
                Ok(header) => header,
                Err(FrameError::Header { .. }) => {
                    meant.fault = Some(Fault::Corrupt((next, first)));
                    break;
                }
                Err(_) => {
                    meant.fault = Some(Fault::Violation);
                    break;
                }
            };
            if header.kind == Kind::Abort {
                meant.fault = Some(Fault::Abort);
                break;
            }
            let is_next = header.offset == next && meant.ended_at.is_none();
            if header.received != first || !(is_next || header.kind == Kind::Acknowledge) {
                meant.fault = Some(Fault::Violation);
                break;
            }
            let Some((bytes, behind)) = rest.split_at_checked(header.len) else {
                break;
            };
            if header.check.is_some_and(|it| it != crc32c::crc32c(bytes)) {
                meant.fault = Some(Fault::Corrupt((next, 0)));
                break;
            }
            if header.kind != Kind::Acknowledge {
                next = header.end();
                meant.bytes.extend_from_slice(bytes);
                meant.ends.push(next);
                meant.ended_at = (header.kind == Kind::End).then_some(next);
            }
            wire = behind;
        }
        meant
    }
}

fn socket(wire: &[u8]) -> Socket {
    let (near, far) = UnixStream::pair().expect("sockets");
    (&near).write_all(wire).expect("the socket holds it");
    Socket::Unix(far)
}
