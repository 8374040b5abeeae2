//! Streams of a session over connections that break in every way.

use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use lab::middlebox::{Admission, Change, Direction, Flow, Mark, Middlebox, Which};
use vamoose_link::{
    Address, Introduced, Keys, Listener, Path, Security, Session, SessionConfig, Sessions, Stream,
};

const LIMIT: Duration = Duration::from_secs(120);

fn config(security: Security) -> SessionConfig {
    SessionConfig {
        stall_timeout: LIMIT,
        reconnect_timeout: LIMIT,
        ..SessionConfig::new(security)
    }
}

/// A server, and a middlebox before it.
struct Bench {
    sessions: Sessions,
    server: SocketAddr,
    middlebox: Middlebox,
}

impl Bench {
    fn new(config: &SessionConfig) -> Self {
        let address = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::bind(&address, LIMIT).unwrap();
        let Address::Tcp { port, .. } = listener.address() else {
            unreachable!()
        };
        let server = SocketAddr::from(([127, 0, 0, 1], *port));
        let middlebox = Middlebox::new(server).unwrap();
        let sessions = Sessions::new(vec![listener], config.clone()).unwrap();
        Self {
            sessions,
            server,
            middlebox,
        }
    }

    fn dial(&self, config: &SessionConfig) -> (Session, Stream) {
        Session::dial(vec![self.path()], config.clone()).unwrap()
    }

    fn path(&self) -> Path {
        path_to(&self.middlebox)
    }

    fn next(&self) -> Introduced {
        self.sessions.next(LIMIT).expect("a stream")
    }
}

fn path_to(middlebox: &Middlebox) -> Path {
    let address = middlebox.address();
    Path::from(format!("tcp:{address}").parse::<Address>().unwrap())
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Sends `len` bytes in pieces of all sizes while `meanwhile` breaks the link, and compares what comes: without TLS and
/// with it.
fn transfers(len: usize, meanwhile: impl Fn(&Bench) + Send + Sync) {
    transfers_by(&config(Security::Insecure), len, &meanwhile);
    let directory = tempfile::tempdir().unwrap();
    let key = Keys::generate(directory.path()).unwrap();
    let keys = Keys {
        directory: directory.path().to_owned(),
        trusted: vec![key],
    };
    transfers_by(&config(Security::Keys(keys)), len, &meanwhile);
}

fn transfers_by(config: &SessionConfig, len: usize, meanwhile: &(impl Fn(&Bench) + Send + Sync)) {
    let bench = Bench::new(config);
    let sent = bytes(len, 1);
    let (session, stream) = bench.dial(config);
    thread::scope(|scope| {
        scope.spawn(|| meanwhile(&bench));
        scope.spawn(|| {
            let mut sizes = fastrand::Rng::with_seed(2);
            let mut rest = &sent[..];
            while !rest.is_empty() {
                let (piece, behind) = rest.split_at(sizes.usize(1..300_000).min(rest.len()));
                stream
                    .write_both(&piece[..piece.len() / 3], &piece[piece.len() / 3..])
                    .unwrap();
                rest = behind;
            }
            stream.finish();
        });
        let introduced = bench.next();
        let mut received = Vec::new();
        let mut sizes = fastrand::Rng::with_seed(3);
        let mut buffer = vec![0; 700_000];
        loop {
            let wanted = sizes.usize(1..buffer.len());
            match introduced.stream.read_full(&mut buffer[..wanted]).unwrap() {
                0 => break,
                read => received.extend_from_slice(&buffer[..read]),
            }
        }
        assert!(received == sent);
        // The other way goes on.
        (&introduced.stream).write_all(b"all there").unwrap();
        let mut answer = [0; 9];
        (&stream).read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"all there");
    });
    assert!(session.drain(LIMIT));
}

#[test]
fn bytes_arrive() {
    transfers(20 << 20, |_| ());
}

#[test]
fn a_stream_survives_resets() {
    transfers(64 << 20, |bench| {
        for connection in 0..8 {
            let mark = Mark {
                connection,
                direction: Direction::ToListener,
                bytes: 1_000_003 * (connection as u64 + 1),
            };
            bench.middlebox.apply_at(mark, Which::All, Change::Reset);
        }
        bench.middlebox.wait_for_changes(LIMIT).unwrap();
    });
}

#[test]
fn a_stream_survives_ends_and_refusals() {
    transfers(32 << 20, |bench| {
        let middlebox = &bench.middlebox;
        middlebox
            .wait_for_bytes(Direction::ToListener, 3 << 20, LIMIT)
            .unwrap();
        middlebox.admit(Admission::Refuse).unwrap();
        middlebox.apply(Which::All, Change::Close);
        assert!(std::net::TcpStream::connect(middlebox.address()).is_err());
        middlebox.admit(Admission::Pass).unwrap();
    });
}

#[test]
fn a_stream_survives_silence() {
    transfers(32 << 20, |bench| {
        let middlebox = &bench.middlebox;
        middlebox
            .wait_for_bytes(Direction::ToListener, 3 << 20, LIMIT)
            .unwrap();
        middlebox.apply(Which::All, Change::Flow(Flow::Drop));
    });
}

#[test]
fn a_stream_survives_half_open_connections() {
    for direction in Direction::BOTH {
        transfers(16 << 20, |bench| {
            let middlebox = &bench.middlebox;
            middlebox
                .wait_for_bytes(Direction::ToListener, 3 << 20, LIMIT)
                .unwrap();
            middlebox.apply(Which::All, Change::OneWay(direction, Flow::Drop));
        });
    }
}

#[test]
fn flipped_bits_come_again() {
    transfers(32 << 20, |bench| {
        let middlebox = &bench.middlebox;
        for mebibytes in [2, 5, 9] {
            middlebox
                .wait_for_bytes(Direction::ToListener, mebibytes << 20, LIMIT)
                .unwrap();
            let last = middlebox.connections().len() - 1;
            let _ = middlebox.flip(last, Direction::ToListener, 70_001, 3);
        }
    });
}

#[test]
fn streams_leave_a_path_that_fails_and_come_back_to_it() {
    let config = config(Security::Insecure);
    let bench = Bench::new(&config);
    let other = Middlebox::new(bench.server).unwrap();
    let paths = vec![bench.path(), path_to(&other)];
    let (session, first) = Session::dial(paths, config).unwrap();
    let more = (0..3).map(|_| session.open().unwrap());
    let near: Vec<_> = [first].into_iter().chain(more).collect();
    let mut far: Vec<Introduced> = Vec::new();
    let mut all_carry = |text: &[u8; 4]| {
        for near in &near {
            (&*near).write_all(text).unwrap();
        }
        while far.len() < near.len() {
            far.push(bench.next());
        }
        for far in &far {
            let mut read = [0; 4];
            (&far.stream).read_exact(&mut read).unwrap();
            assert_eq!(&read, text);
        }
    };
    all_carry(b"both");
    wait_for_streams(&session, [2, 2]);
    other.admit(Admission::Refuse).unwrap();
    other.apply(Which::All, Change::Close);
    wait_for_streams(&session, [4, 0]);
    all_carry(b"one.");
    other.admit(Admission::Pass).unwrap();
    wait_for_streams(&session, [2, 2]);
    all_carry(b"back");
    assert!(session.paths()[1].failures > 0);
}

/// Waits until each path carries so many streams.
fn wait_for_streams(session: &Session, expected: [usize; 2]) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let streams: Vec<_> = session.paths().iter().map(|path| path.streams).collect();
        if streams == expected {
            return;
        }
        assert!(Instant::now() < deadline, "{streams:?}, not {expected:?}");
        thread::sleep(Duration::from_millis(10));
    }
}
