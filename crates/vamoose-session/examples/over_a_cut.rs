//! Two ends of a stream in memory. The connection is cut in the middle of a transfer; the stream goes on over the next one.
//!
//! A connection here is a queue of frames. Over a network, each end writes the frames of [`Transmit`] to its socket, reads headers
//! and payloads from it, and learns from the handshake what its peer has received.
//!
//! [`Transmit`]: vamoose_session::stream::Transmit

use std::{
    collections::VecDeque,
    error::Error,
    time::{Duration, Instant},
};

use vamoose_session::{
    frame::HEADER_LEN,
    stream::{ConnectionId, FrameEvent, StreamState, Timeouts},
    window::Sums,
};

const TIMEOUTS: Timeouts = Timeouts {
    reconnect: Duration::from_secs(30),
    stall: Duration::from_secs(30),
};

/// Headers, each with its payload.
type Wire = VecDeque<([u8; HEADER_LEN], Vec<u8>)>;

fn main() -> Result<(), Box<dyn Error>> {
    let now = Instant::now();
    let mut sender = StreamState::new(0, TIMEOUTS, now);
    let mut receiver = StreamState::new(0, TIMEOUTS, now);
    let text = b"a stream survives its connections";

    let (near, far) = connect(&mut sender, &mut receiver, now)?;
    for word in text.chunks(8) {
        sender.write_copy(word, Sums::of(word, true))?;
    }
    sender.finish()?;

    // Two frames are on their way when the connection breaks. One arrives.
    let mut wire = Wire::new();
    send(&mut sender, near, &mut wire);
    let mut received = Vec::new();
    if let Some(frame) = wire.pop_front() {
        receive(&mut receiver, far, frame, &mut received, now);
    }
    sender.on_connection_lost(near, "the cable was pulled", now);
    receiver.on_connection_lost(far, "the cable was pulled", now);
    println!("cut after {} bytes", received.len());
    assert!(sender.take_effects().reconnect);

    // The frames that did not arrive are sent again.
    let (near, far) = connect(&mut sender, &mut receiver, now)?;
    while !sender.is_done() {
        let (mut forth, mut back) = (Wire::new(), Wire::new());
        send(&mut sender, near, &mut forth);
        for frame in forth {
            receive(&mut receiver, far, frame, &mut received, now);
        }
        send(&mut receiver, far, &mut back);
        for frame in back {
            receive(&mut sender, near, frame, &mut Vec::new(), now);
        }
    }
    println!("{}", String::from_utf8_lossy(&received));
    assert_eq!(received, text);
    Ok(())
}

/// Attaches a connection to both ends. Each tells the other how much it has received, as the handshake does.
fn connect(
    near: &mut StreamState,
    far: &mut StreamState,
    now: Instant,
) -> Result<(ConnectionId, ConnectionId), Box<dyn Error>> {
    let (near_has, far_has) = (near.received(), far.received());
    let attach = |end: &mut StreamState, peer_has| {
        end.begin_attach(now);
        end.on_resume_offset(peer_has)?;
        let connection = end.on_connection().ok_or("the stream has ended")?;
        end.end_attach();
        Ok::<_, Box<dyn Error>>(connection)
    };
    Ok((attach(near, far_has)?, attach(far, near_has)?))
}

/// Sends all frames that are due, and acknowledgements.
fn send(end: &mut StreamState, connection: ConnectionId, wire: &mut Wire) {
    while let Some(transmit) = end.poll_transmit(connection) {
        for (header, payload) in transmit.frames() {
            wire.push_back((header, payload.to_vec()));
        }
        end.on_transmitted(transmit, true);
    }
}

/// Receives a frame. Its payload counts only if its checksum is right.
fn receive(
    end: &mut StreamState,
    connection: ConnectionId,
    (header, payload): ([u8; HEADER_LEN], Vec<u8>),
    received: &mut Vec<u8>,
    now: Instant,
) {
    if let FrameEvent::Data(_) = end.on_header(connection, &header, "memory", now)
        && end.on_data(connection, crc32c::crc32c(&payload), "memory", now)
    {
        received.extend(payload);
    }
}
