//! One end of a stream: what its user is told when it ends, and how much it may have on its way.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use vamoose_session::{
    frame::{HEADER_LEN, Header, Kind},
    stream::{
        ACKNOWLEDGE_IDLE, Bounds, ConnectionId, FrameEvent, StreamError, StreamState, Timeouts,
    },
    window::Sums,
};

const TIMEOUTS: Timeouts = Timeouts {
    reconnect: Duration::from_secs(30),
    stall: Duration::from_secs(30),
};

/// A stream that is up.
fn up(now: Instant) -> (StreamState, ConnectionId) {
    let mut state = StreamState::new(0, TIMEOUTS, now);
    assert!(state.begin_attach(now));
    let connection = state.on_connection().unwrap();
    state.end_attach();
    (state, connection)
}

fn acknowledge(state: &mut StreamState, connection: ConnectionId, received: u64, now: Instant) {
    let header = Header::empty(Kind::Acknowledge, 0, received).encode();
    let came = state.on_header(connection, &header, "a path", now);
    assert_eq!(came, FrameEvent::Acknowledgement);
}

/// All frames that are to be sent: so many.
fn send_all(state: &mut StreamState, connection: ConnectionId) -> Vec<[u8; HEADER_LEN]> {
    let mut sent = Vec::new();
    while let Some(transmit) = state.poll_transmit(connection) {
        sent.extend(transmit.frames().map(|(header, _)| header));
        state.on_transmitted(transmit, true);
    }
    sent
}

#[test]
fn finished_stream_that_is_lost_is_undelivered() {
    let now = Instant::now();
    let lost_with = |is_finished, is_acknowledged, reason: StreamError| {
        let (mut state, connection) = up(now);
        state.write_copy(b"bytes", Sums::default()).unwrap();
        if is_finished {
            state.finish().unwrap();
        }
        send_all(&mut state, connection);
        if is_acknowledged {
            acknowledge(&mut state, connection, 6, now);
        }
        state.close(reason);
        assert!(state.take_effects().ended);
        state.is_undelivered()
    };
    let lost = || StreamError::Lost {
        cause: "a cable".into(),
        seconds: 30,
    };
    assert!(lost_with(true, false, lost()));
    assert!(lost_with(true, false, StreamError::Stalled { seconds: 30 }));
    assert!(!lost_with(true, true, lost()));
    // Nobody was promised that these arrive.
    assert!(!lost_with(false, false, lost()));
    assert!(!lost_with(true, false, StreamError::ShutDown));
    assert!(!lost_with(true, false, StreamError::Aborted));
}

/// Without a connection it is lost after the reconnect timeout, but not while another one takes the place of one that works.
#[test]
fn replacing_a_connection_takes_no_reconnect_timeout() {
    let now = Instant::now();
    let timeouts = Timeouts {
        reconnect: Duration::ZERO,
        ..TIMEOUTS
    };
    let mut state = StreamState::new(0, timeouts, now);
    assert!(state.begin_attach(now));
    let old = state.on_connection().unwrap();
    state.end_attach();
    assert!(state.begin_attach(now));
    // A thread of the old one is late.
    state.on_connection_lost(old, "it was closed", now);
    state.on_timeout(now + Duration::from_secs(1), None);
    assert!(state.on_connection().is_some());
    state.end_attach();
    assert!(!state.is_closed());

    assert!(state.begin_attach(now));
    // Two attempts: the first that ends does not end the patience of the other one.
    assert!(state.begin_attach(now));
    state.end_attach();
    state.on_timeout(now, None);
    assert!(!state.is_closed());
    state.end_attach();
    state.on_timeout(now, None);
    assert!(state.is_closed());
}

#[test]
fn reported_wait_reaches_the_peer_with_every_frame() {
    let now = Instant::now();
    for (share, expected) in [
        (0.0, 0.0),
        (0.5, 0.5),
        (1.0, 1.0),
        (7.0, 1.0),
        (f64::NAN, 0.0),
    ] {
        let (mut near, connection) = up(now);
        let (mut far, far_connection) = up(now);
        assert_eq!(far.peer_wait(), None);
        near.report_wait(share);
        near.write_copy(b"x", Sums::default()).unwrap();
        for frame in send_all(&mut near, connection) {
            let _ = far.on_header(far_connection, &frame, "a path", now);
        }
        let found = far.peer_wait().unwrap_or_default();
        assert!((found - expected).abs() < 0.01, "{share}: {found}");
    }
}

/// Receives frames of 1 KiB, and says after how many KiB the peer is told.
fn told_after(kibibytes: u64, is_idle: bool) -> Vec<u64> {
    let now = Instant::now();
    let (mut state, connection) = up(now);
    assert_eq!(send_all(&mut state, connection).len(), 1);
    let mut told = Vec::new();
    for at in 0..kibibytes {
        let header = Header {
            len: 1 << 10,
            ..Header::empty(Kind::Data, at << 10, 0)
        };
        let came = state.on_header(connection, &header.encode(), "a path", now);
        assert_eq!(came, FrameEvent::Data(header));
        assert!(state.on_data(connection, 0, "a path", now));
        if is_idle {
            state.on_idle();
        }
        if !send_all(&mut state, connection).is_empty() {
            told.push(at + 1);
        }
    }
    told
}

/// Its window may be as small as its part of one that many streams share.
#[test]
fn peer_that_waits_is_told_early() {
    assert_eq!(told_after(600, false), [256, 512]);
    assert_eq!(told_after(10, true), [4, 8]);
}

/// An idle peer does not acknowledge the end of a packet if it is short: the next packet waits for no heartbeat.
#[test]
fn window_smaller_than_a_packet_waits_for_no_heartbeat() {
    const BOUNDS: Bounds = Bounds {
        usual: 64 << 10,
        most: 64 << 10,
    };
    const PACKET: usize = 512 << 10;
    let now = Instant::now();
    let (mut state, connection) = up(now);
    assert!(state.has_room(PACKET, BOUNDS));
    state.write_copy(&[0; 1344], Sums::default()).unwrap();
    state.write_copy(&vec![0; PACKET], Sums::default()).unwrap();
    state.write_copy(&[0; 1344], Sums::default()).unwrap();
    send_all(&mut state, connection);
    assert!(!state.has_room(1, BOUNDS));
    let idle = usize::try_from(ACKNOWLEDGE_IDLE).unwrap();
    acknowledge(&mut state, connection, 1344 + PACKET as u64, now);
    assert!(state.unacknowledged() > 0 && state.unacknowledged() < idle);
    assert!(state.has_room(PACKET, BOUNDS));
}

#[test]
fn window_follows_what_is_delivered_in_a_round_trip() {
    const TRIP: Duration = Duration::from_millis(50);
    const BOUNDS: Bounds = Bounds {
        usual: 4 << 20,
        most: 64 << 20,
    };
    let mut now = Instant::now();
    let (mut state, connection) = up(now);
    let has_room = |state: &StreamState, len| state.has_room(len, BOUNDS);
    let frame = vec![0; 1 << 20];
    state.write_copy(&frame, Sums::default()).unwrap();
    send_all(&mut state, connection);
    assert!(has_room(&state, 3 << 20) && !has_room(&state, (3 << 20) + 1));

    // A link of 8 Gbit/s that is full all the time: 100 MiB in 100 ms, of which 50 MiB are on their way.
    let mut deliver = |state: &mut StreamState, mebibytes: u64| {
        for _ in 0..5 {
            state.on_round_trip(TRIP, now);
            for _ in 0..mebibytes {
                state.write_copy(&frame, Sums::default()).unwrap();
                send_all(state, connection);
                acknowledge(state, connection, state.acknowledged() + (1 << 20), now);
            }
            now += Duration::from_millis(100);
        }
        state.on_round_trip(TRIP, now);
    };
    // 20 MiB in a trip: twice as much may be on its way, of which a frame is.
    deliver(&mut state, 40);
    assert!(has_room(&state, 39 << 20) && !has_room(&state, (39 << 20) + 1));
    // All streams together have no more than the session's window.
    deliver(&mut state, 100);
    assert!(has_room(&state, 63 << 20) && !has_room(&state, (63 << 20) + 1));
    // A link that is slow for a moment keeps most of it.
    deliver(&mut state, 1);
    assert!(has_room(&state, 40 << 20));
    for _ in 0..20 {
        deliver(&mut state, 1);
    }
    assert!(has_room(&state, 3 << 20) && !has_room(&state, (3 << 20) + 1));
    // More streams share the window.
    let shared = Bounds {
        usual: 1 << 20,
        most: 1 << 20,
    };
    assert!(!state.has_room(1, shared));
}
