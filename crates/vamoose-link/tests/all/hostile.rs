//! Peers that do what no Vamoose does. Each is refused with its reason, and costs nobody else anything.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
    sync::atomic::{AtomicU8, Ordering},
    thread,
    time::Duration,
};

use lab::middlebox::{Direction, Middlebox};
use rustix::net::{AddressFamily, Shutdown, SocketType, bind, connect, ipproto, shutdown, socket};
use vamoose_link::{
    Address, DialError, Introduced, Listener, Route, Security, Session, SessionConfig, Sessions,
    Stream, StreamError, chain,
};
use vamoose_session::{
    frame::{HEADER_LEN, Header, Kind},
    handshake::{
        ATTACH_LEN, Answer, Attach, HELLO_LEN, HandshakeError, Hello, Intent, Refusal, Secret,
        SessionId, Target, Transcript, VERSION, Welcome,
    },
};

use crate::log;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_connection_that_is_played_again_is_refused() {
    let bench = Bench::new();
    let middlebox = Middlebox::new(bench.address).unwrap();
    middlebox.record();
    let (session, first) = bench.dial(middlebox.address()).unwrap();
    let second = session.open().unwrap();
    let there = [&first, &second].map(|stream| {
        (&*stream).write_all(b"once").unwrap();
        stream.finish();
        let there = bench.next();
        assert_eq!(there.stream.read_full(&mut [0; 5]).unwrap(), 4);
        there
    });
    assert!(session.drain(LIMIT));
    for connection in 0..2 {
        let mut stranger = bench.stranger();
        let recorded = middlebox.recorded(connection, Direction::ToListener);
        assert!(recorded.len() > HELLO_LEN + ATTACH_LEN + HEADER_LEN);
        stranger.socket.write_all(&recorded).unwrap();
        let answer = Answer::decode(&stranger.read()).unwrap();
        assert_eq!(answer.accepted(), Ok(VERSION));
        assert_eq!(stranger.outcome(), Err(Refusal::Proof));
        stranger.is_turned_away(
            "refused: the connection does not prove that it belongs to the session",
        );
    }
    assert!(bench.sessions.try_next().is_none());
    // The answers of the right ones still arrive.
    for (mut stream, there) in [&first, &second].into_iter().zip(&there) {
        (&there.stream).write_all(b"answer").unwrap();
        stream.read_exact(&mut [0; 6]).unwrap();
    }
    bench.is_unharmed();
}

#[test]
fn a_session_is_joined_by_nobody_else() {
    let bench = Bench::new();
    let middlebox = Middlebox::new(bench.address).unwrap();
    middlebox.record();
    let (session, stream) = bench.dial(middlebox.address()).unwrap();
    let other = session.open().unwrap();
    let streams = [stream, other].map(|stream| (bench.introduces(&stream), stream));
    // The id of the session goes over the network.
    let attach = middlebox.recorded(1, Direction::ToListener);
    let id: SessionId = attach[HELLO_LEN..][..16].try_into().unwrap();

    let (own, _) = bench.stranger().begin();
    for secret in [Some(&own), None] {
        for intent in [Intent::Open, Intent::Resume, Intent::Abort] {
            let stranger = bench.stranger().greet();
            let secret = secret.cloned().unwrap_or_else(|| stranger.1.secret());
            let (stranger, outcome) = stranger.attach(&secret, attach_to(id, 0, intent, 0));
            assert_eq!(outcome, Err(Refusal::Proof));
            stranger.is_turned_away("the connection does not prove that it belongs");
        }
    }
    let stranger = bench.stranger().greet();
    let unknown = attach_to([9; 16], 0, Intent::Resume, 0);
    let (stranger, outcome) = stranger.attach(&own, unknown);
    assert_eq!(outcome, Err(Refusal::UnknownSession));
    stranger.is_turned_away("it does not know the session");
    for (there, here) in &streams {
        talk(here, there);
    }
    assert_eq!(session.reconnects(), 0);
    bench.is_unharmed();
}

/// Who changes the versions on their way gets no session with them.
#[test]
fn a_version_that_was_changed_on_its_way_is_noticed() {
    let bench = Bench::new();
    for (number, field, value, told, there) in [
        // The server would speak the version of the future that the client seems to offer, if it knew one.
        (
            0,
            11,
            9,
            "the peer refuses: the connection does not prove that it belongs",
            Some("refused: the connection does not prove"),
        ),
        (
            0,
            9,
            9,
            "broke off",
            Some("the peer's handshake is malformed: its versions"),
        ),
        (1, 9, 0, "the peer's handshake is malformed", None),
        (
            1,
            9,
            FUTURE,
            "the peer's handshake is malformed: its version",
            None,
        ),
        (
            1,
            20,
            77,
            "the peer refuses: the connection does not prove that it belongs",
            Some("refused: the connection does not prove"),
        ),
        (
            3,
            15,
            8,
            "the peer does not prove that it knows the session",
            None,
        ),
    ] {
        let from = unused_address();
        let meddler = Meddler::start(bench.address, from, number, field, value);
        let error = bench.dial(meddler.address).unwrap_err();
        let text = chain(&error).to_string();
        let is_right = match told {
            "broke off" => matches!(error, DialError::Io { .. }),
            told => matches!(error, DialError::Handshake { .. }) && text.contains(told),
        };
        assert!(is_right, "{number}, {field}: {text}");
        if let Some(there) = there {
            turned_away(from, there);
        }
    }
    assert!(bench.sessions.try_next().is_none());
    bench.is_unharmed();
}

#[test]
fn a_client_of_another_version_is_told_so() {
    let bench = Bench::new();
    let mut stranger = bench.stranger();
    let mut hello = Hello::new([1; 32]).encode();
    // Of the future only.
    (hello[9], hello[11]) = (FUTURE, FUTURE + 1);
    stranger.socket.write_all(&hello).unwrap();
    let answer = Answer::decode(&stranger.read()).unwrap();
    assert_eq!(
        answer.accepted(),
        Err(HandshakeError::Refused(Refusal::Version))
    );
    stranger.is_turned_away("it speaks no version of the protocol that this end speaks");
    bench.is_unharmed();
}

/// A version that this program does not speak.
const FUTURE: u8 = VERSION.to_be_bytes()[1] + 1;

/// Where a peer says that it has bytes which were not sent, or not any more, or half a frame.
const FALSE: [(&str, u64); 3] = [("beyond", 1 << 40), ("within", 25), ("backwards", 10)];

#[test]
fn a_client_that_acknowledges_what_it_does_not_have_is_refused() {
    for (name, received) in FALSE {
        let bench = Bench::new();
        let (mut stranger, stream) = bench.introduced_stranger();
        for _ in 0..3 {
            (&stream).write_all(&[1; 10]).unwrap();
        }
        stranger.acknowledges_20(&stream, 4);
        stranger.send(&Header::empty(Kind::Acknowledge, 5, received), &[]);
        let error = writes_until_it_fails(&stream);
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}");
        is_acknowledge(&error, received);
        stranger.is_closed();
        bench.is_unharmed();
    }
}

#[test]
fn a_server_that_acknowledges_what_it_does_not_have_is_refused() {
    for (name, received) in FALSE {
        let impostor = Impostor::new();
        thread::scope(|scope| {
            let accepting = scope.spawn(|| impostor.accept(0, None));
            let (_session, stream) = dial(impostor.address, config()).unwrap();
            let (mut peer, _) = accepting.join().unwrap();
            for _ in 0..3 {
                (&stream).write_all(&[1; 10]).unwrap();
            }
            peer.acknowledges_20(&stream, 0);
            peer.send(&Header::empty(Kind::Acknowledge, 1, received), &[]);
            let error = writes_until_it_fails(&stream);
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}");
            is_acknowledge(&error, received);
            peer.is_closed();
        });
    }
}

/// The same in the handshake of the next connection.
#[test]
fn a_client_that_resumes_from_where_it_cannot_be_is_refused() {
    for (_, received) in FALSE.into_iter().chain([("the last", u64::MAX)]) {
        let bench = Bench::new();
        let (mut stranger, stream) = bench.introduced_stranger();
        for _ in 0..3 {
            (&stream).write_all(&[1; 10]).unwrap();
        }
        stranger.acknowledges_20(&stream, 4);
        let secret = stranger.secret.clone().unwrap();
        let next = bench.stranger().greet();
        let attach = attach_to(secret.id(), 0, Intent::Resume, received);
        let (next, outcome) = next.attach(&secret, attach);
        assert_eq!(outcome, Err(Refusal::Offset), "{received}");
        next.is_turned_away("the received offset is not one that it has sent");
        // The right one still gets through.
        let next = bench.stranger().greet();
        let attach = attach_to(secret.id(), 0, Intent::Resume, 20);
        let (mut next, outcome) = next.attach(&secret, attach);
        assert_eq!(outcome, Ok(5));
        let again = next.frame();
        assert_eq!((again.0.offset, again.1), (20, vec![1; 10]));
        bench.is_unharmed();
    }
}

#[test]
fn a_server_that_resumes_from_where_it_cannot_be_is_left() {
    for (_, received) in FALSE.into_iter().chain([("the last", u64::MAX)]) {
        let impostor = Impostor::new();
        thread::scope(|scope| {
            let accepting = scope.spawn(|| impostor.accept(0, None));
            let (_session, stream) = dial(impostor.address, config()).unwrap();
            let (mut peer, _) = accepting.join().unwrap();
            for _ in 0..3 {
                (&stream).write_all(&[1; 10]).unwrap();
            }
            peer.acknowledges_20(&stream, 0);
            let secret = peer.secret.clone();
            drop(peer);
            let (next, attach) = impostor.accept(received, secret.as_ref());
            assert_eq!((attach.intent, attach.received), (Intent::Resume, 1));
            let error = (&stream).read(&mut [0; 1]).unwrap_err();
            is_acknowledge(&error, received);
            next.is_closed();
        });
    }
}

/// Whoever takes the server's address later, and was not there when the session began.
#[test]
fn a_server_that_does_not_know_the_session_is_not_believed() {
    let impostor = Impostor::new();
    let config = SessionConfig {
        reconnect_timeout: Duration::from_secs(1),
        ..config()
    };
    let (session, stream, peer) = thread::scope(|scope| {
        let accepting = scope.spawn(|| impostor.accept(0, None));
        let (session, stream) = dial(impostor.address, config).unwrap();
        (session, stream, accepting.join().unwrap().0)
    });
    let hello = Hello::new([5; 32]);
    let other = Transcript::new(&hello, &Answer::to(&hello, [6; 32]), [0; 32]).secret();
    drop(peer);
    let (next, _) = impostor.accept(0, Some(&other));
    next.is_closed();
    // The right one might come back, and does not.
    drop(impostor);
    let error = (&stream).read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    let found = stream_error(&error);
    assert!(
        matches!(found, StreamError::Lost { seconds: 1, .. }),
        "{found:?}"
    );
    assert_eq!(session.reconnects(), 0);
}

/// What no correct peer sends behind its handshake. No frame can come near the last offset by right: these begin there.
#[test]
fn frames_that_break_the_protocol_end_their_stream() {
    type Breach = (&'static str, Vec<u8>);
    let header = |header: Header| header.encode().to_vec();
    let with = |at: usize, value: u8| {
        let mut bytes = data(4, b"x", 0).encode();
        bytes[at] = value;
        let sum = crc32c::crc32c(&bytes[..HEADER_LEN - 4]);
        bytes[HEADER_LEN - 4..].copy_from_slice(&sum.to_be_bytes());
        bytes.to_vec()
    };
    let breaches: [Breach; 10] = [
        (
            "a frame at offset 0 where 4 comes next",
            header(data(0, b"again", 0)),
        ),
        (
            "a frame at offset 5 where 4 comes next",
            header(data(5, b"gap", 0)),
        ),
        (
            "a frame at offset 18446744073709551610 where 4 comes next",
            header(data(u64::MAX - 5, b"x", 0)),
        ),
        (
            "a frame at offset 18446744073709551614 where 4 comes next",
            header(Header::empty(Kind::End, u64::MAX - 1, 0)),
        ),
        (
            "a frame ends after the last offset",
            header(data(u64::MAX - 5, b"too long", 0)),
        ),
        ("no frame is of kind 9", with(0, 9)),
        ("a frame has unknown flags: 0x81", with(1, 0x81)),
        (
            "bytes of a frame's header that must be 0 are not",
            with(27, 1),
        ),
        ("a frame has a payload of 2097153 bytes", with(5, 0x20)),
        (
            "data after the end of the stream",
            [
                header(Header::empty(Kind::End, 4, 0)),
                header(data(5, b"x", 0)),
            ]
            .concat(),
        ),
    ];
    let bench = Bench::new();
    for (told, bytes) in breaches {
        let (mut stranger, stream) = bench.introduced_stranger();
        stranger.socket.write_all(&bytes).unwrap();
        let error = match stream.read_until(&mut [0; 8], None) {
            Ok(Some(0)) => writes_until_it_fails(&stream),
            Ok(read) => panic!("{told}: {read:?}"),
            Err(error) => error,
        };
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{told}: {error}");
        let found = stream_error(&error);
        assert!(matches!(found, StreamError::Violation(_)), "{found:?}");
        assert_eq!(
            error.to_string(),
            format!("the peer breaks the protocol: {told}")
        );
        stranger.is_closed();
    }
    bench.is_unharmed();
}

#[test]
fn a_session_has_no_more_streams_than_it_may() {
    let bench = Bench::new();
    let (secret, _first) = bench.stranger().begin();
    let open = |number| {
        let stranger = bench.stranger().greet();
        stranger.attach(&secret, attach_to(secret.id(), number, Intent::Open, 0))
    };
    for number in [512, u32::MAX] {
        let (stranger, outcome) = open(number);
        assert_eq!(outcome, Err(Refusal::Ended));
        stranger.is_turned_away("the session's stream has ended there");
    }
    // Streams that are opened side by side come in any order.
    let (_last, outcome) = open(511);
    assert_eq!(outcome, Ok(0));
    let (_, outcome) = open(7);
    assert_eq!(outcome, Ok(0));
    // None is opened again when it has ended.
    let stranger = bench.stranger().greet();
    let (_, outcome) = stranger.attach(&secret, attach_to(secret.id(), 7, Intent::Abort, 0));
    assert_eq!(outcome, Err(Refusal::Ended));
    let (_, outcome) = open(7);
    assert_eq!(outcome, Err(Refusal::Ended));
    bench.is_unharmed();
}

/// Connections that do not get on with their handshake keep nobody else out, and no session that is there: those that send
/// nothing, wherever they are from, and those of one address whatever they send.
#[test]
fn strangers_keep_nobody_out() {
    const MANY: usize = 600;
    let bench = Bench::new();
    let crowd = [unused_address(), unused_address(), unused_address()];
    let silent: Vec<_> = (0..MANY)
        .map(|number| bench.stranger_from(crowd[number % crowd.len()]))
        .collect();
    // Whoever is new gets in, in the place of the first.
    for _ in 0..3 {
        let (_session, stream) = bench.dial(bench.address).unwrap();
        talk(&stream, &bench.introduces(&stream));
    }
    silent[0].is_closed();
    turned_away(crowd[0], "another connection has taken its place");

    let babbling: Vec<_> = (0..MANY)
        .map(|_| {
            let mut stranger = bench.stranger_from(crowd[0]);
            // It may have been turned away.
            let _ = stranger.socket.write_all(b"V");
            stranger
        })
        .collect();
    // One address has all places, and no more.
    babbling[MANY - 1].is_closed();
    for _ in 0..3 {
        let from = Route {
            to: tcp(bench.address),
            bind: Some(unused_address().into()),
        };
        let (_session, stream) = Session::dial(vec![from], config()).unwrap();
        talk(&stream, &bench.introduces(&stream));
    }
    bench.is_unharmed();
    drop((silent, babbling));
}

/// A server with a session that has nothing to do with what a test does.
struct Bench {
    sessions: Sessions,
    address: SocketAddr,
    bystander: (Session, Stream, Introduced),
}

impl Bench {
    fn new() -> Self {
        log::keep();
        let listener = Listener::bind(&tcp(SocketAddr::from(([127, 0, 0, 1], 0))), LIMIT).unwrap();
        let Address::Tcp { port, .. } = listener.address() else {
            unreachable!()
        };
        let address = SocketAddr::from(([127, 0, 0, 1], *port));
        let sessions = Sessions::new(vec![listener], config()).unwrap();
        let (session, stream) = dial(address, config()).unwrap();
        (&stream).write_all(b"here").unwrap();
        let introduced = sessions.next(LIMIT).unwrap();
        (&introduced.stream).read_exact(&mut [0; 4]).unwrap();
        Self {
            sessions,
            address,
            bystander: (session, stream, introduced),
        }
    }

    fn dial(&self, address: SocketAddr) -> Result<(Session, Stream), DialError> {
        dial(address, config())
    }

    fn next(&self) -> Introduced {
        self.sessions.next(LIMIT).expect("a stream")
    }

    /// The server's end of a new stream.
    fn introduces(&self, mut stream: &Stream) -> Stream {
        stream.write_all(b"here").unwrap();
        let there = self.next().stream;
        (&there).read_exact(&mut [0; 4]).unwrap();
        there
    }

    fn stranger(&self) -> Stranger {
        self.stranger_from(unused_address())
    }

    fn stranger_from(&self, from: Ipv4Addr) -> Stranger {
        Stranger::new(connect_from(from, self.address), from)
    }

    /// A peer that has a session and a stream like others, so far: it has sent 4 bytes, which have been read.
    fn introduced_stranger(&self) -> (Stranger, Stream) {
        let (_, mut stranger) = self.stranger().begin();
        stranger.send(&data(0, b"here", 0), b"here");
        let stream = self.next().stream;
        (&stream).read_exact(&mut [0; 4]).unwrap();
        (stranger, stream)
    }

    /// The session that was there before goes on, over the same connection.
    fn is_unharmed(&self) {
        let (session, here, introduced) = &self.bystander;
        talk(here, &introduced.stream);
        assert_eq!(session.reconnects(), 0);
    }
}

/// A peer that is no Vamoose.
struct Stranger {
    socket: TcpStream,
    from: Ipv4Addr,
    secret: Option<Secret>,
}

impl Stranger {
    fn new(socket: TcpStream, from: Ipv4Addr) -> Self {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self {
            socket,
            from,
            secret: None,
        }
    }

    fn read<const LEN: usize>(&mut self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        self.socket.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// The first two messages.
    fn greet(mut self) -> Greeted {
        let hello = Hello::new([3; 32]);
        self.socket.write_all(&hello.encode()).unwrap();
        let answer = Answer::decode(&self.read()).unwrap();
        let transcript = Transcript::new(&hello, &answer, [0; 32]);
        Greeted(self, transcript)
    }

    /// A session of its own.
    fn begin(self) -> (Secret, Self) {
        let greeted = self.greet();
        let secret = greeted.1.secret();
        let attach = Attach {
            target: Target::New,
            stream: 0,
            intent: Intent::Open,
            received: 0,
        };
        let (mut stranger, outcome) = greeted.attach(&secret, attach);
        assert_eq!(outcome, Ok(0));
        stranger.secret = Some(secret.clone());
        (secret, stranger)
    }

    /// What the server says to an attachment, whoever it is from.
    fn outcome(&mut self) -> Result<u64, Refusal> {
        let bytes: [u8; ATTACH_LEN] = self.read();
        let hello = Hello::new([0; 32]);
        let transcript = Transcript::new(&hello, &Answer::to(&hello, [0; 32]), [0; 32]);
        match Welcome::decode(&bytes, &transcript, &[0; ATTACH_LEN], &transcript.secret()) {
            Err(HandshakeError::Refused(refusal)) => Err(refusal),
            _ => Ok(u64::from_be_bytes(bytes[8..16].try_into().unwrap())),
        }
    }

    fn send(&mut self, header: &Header, bytes: &[u8]) {
        let frame = [&header.encode(), bytes].concat();
        // The other end may have seen enough.
        let _ = self.socket.write_all(&frame);
    }

    /// Acknowledges, by a byte at `offset`, two of three frames of 10 bytes, and `stream` knows that when this returns.
    fn acknowledges_20(&mut self, mut stream: &Stream, offset: u64) {
        self.send(&data(offset, b"x", 20), b"x");
        stream.read_exact(&mut [0; 1]).unwrap();
        // The window is looked at when something is written.
        stream.write_all(&[1; 10]).unwrap();
    }

    /// The next frame with bytes.
    fn frame(&mut self) -> (Header, Vec<u8>) {
        loop {
            let header = Header::decode(&self.read()).unwrap();
            let mut bytes = vec![0; header.len];
            self.socket.read_exact(&mut bytes).unwrap();
            if header.kind == Kind::Data {
                return (header, bytes);
            }
        }
    }

    /// The server has refused it with this reason, and closed its connection.
    fn is_turned_away(&self, reason: &str) {
        self.is_closed();
        turned_away(self.from, reason);
    }

    fn is_closed(&self) {
        let mut rest = [0; 4096];
        loop {
            match (&self.socket).read(&mut rest) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
                    return;
                }
            }
        }
    }
}

/// Behind the first two messages.
struct Greeted(Stranger, Transcript);

impl Greeted {
    fn attach(mut self, secret: &Secret, attach: Attach) -> (Stranger, Result<u64, Refusal>) {
        let sent = attach.encode(&self.1, secret);
        self.0.socket.write_all(&sent).unwrap();
        let outcome = self.0.outcome();
        (self.0, outcome)
    }
}

/// A server that is no Vamoose.
struct Impostor {
    listener: TcpListener,
    address: SocketAddr,
}

impl Impostor {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        Self { listener, address }
    }

    /// Accepts a connection and says what it has received: of a session of its own, or one whose secret it has.
    fn accept(&self, received: u64, secret: Option<&Secret>) -> (Stranger, Attach) {
        let (socket, _) = self.listener.accept().unwrap();
        let mut peer = Stranger::new(socket, Ipv4Addr::LOCALHOST);
        let hello = Hello::decode(&peer.read()).unwrap();
        let answer = Answer::to(&hello, [4; 32]);
        peer.socket.write_all(&answer.encode()).unwrap();
        let transcript = Transcript::new(&hello, &answer, [0; 32]);
        let secret = secret.cloned().unwrap_or_else(|| transcript.secret());
        let bytes = peer.read();
        let attach = Attach::decode(&bytes).unwrap();
        let outcome = Ok(received);
        let welcome = Welcome { outcome }.encode(&transcript, &bytes, Some(&secret));
        peer.socket.write_all(&welcome).unwrap();
        peer.secret = Some(secret);
        (peer, attach)
    }
}

/// Changes a byte of one of the four messages of each handshake between two right ends.
struct Meddler {
    address: SocketAddr,
    listener: TcpListener,
}

impl Meddler {
    fn start(server: SocketAddr, from: Ipv4Addr, number: usize, at: usize, value: u8) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = listener.try_clone().unwrap();
        thread::spawn(move || {
            // A client whose connection was closed tries once more.
            while let Ok((client, _)) = accepting.accept() {
                let server = connect_from(from, server);
                meddle(&client, &server, number, at, value);
            }
        });
        Self { address, listener }
    }
}

impl Drop for Meddler {
    fn drop(&mut self) {
        // Ends the thread's wait for a client.
        let _ = shutdown(&self.listener, Shutdown::Both);
    }
}

fn meddle(client: &TcpStream, server: &TcpStream, number: usize, at: usize, value: u8) {
    let lens = [HELLO_LEN, HELLO_LEN, ATTACH_LEN, ATTACH_LEN];
    for (message, len) in lens.into_iter().enumerate() {
        let (mut from, mut to) = match message % 2 {
            0 => (client, server),
            _ => (server, client),
        };
        let mut bytes = vec![0; len];
        // One of them may have left.
        if from.read_exact(&mut bytes).is_err() {
            return;
        }
        if message == number {
            bytes[at] = value;
        }
        if to.write_all(&bytes).is_err() {
            return;
        }
    }
}

fn config() -> SessionConfig {
    SessionConfig {
        reconnect_timeout: LIMIT,
        stall_timeout: LIMIT,
        ..SessionConfig::new(Security::Insecure)
    }
}

fn dial(address: SocketAddr, config: SessionConfig) -> Result<(Session, Stream), DialError> {
    Session::dial(vec![tcp(address).into()], config)
}

fn tcp(address: SocketAddr) -> Address {
    format!("tcp:{address}").parse().unwrap()
}

/// Both directions of a stream work.
fn talk(mut here: &Stream, mut there: &Stream) {
    here.write_all(b"over").unwrap();
    let mut read = [0; 4];
    there.read_exact(&mut read).unwrap();
    there.write_all(&read).unwrap();
    here.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"over");
}

fn data(offset: u64, bytes: &[u8], received: u64) -> Header {
    let mut header = Header::empty(Kind::Data, offset, received);
    header.len = bytes.len();
    header.check = Some(crc32c::crc32c(bytes));
    header
}

fn attach_to(id: SessionId, stream: u32, intent: Intent, received: u64) -> Attach {
    Attach {
        target: Target::Known(id),
        stream,
        intent,
        received,
    }
}

/// What is wrong with an acknowledgement shows when the window is looked at.
fn writes_until_it_fails(mut stream: &Stream) -> io::Error {
    loop {
        if let Err(error) = stream.write_all(b"still there?") {
            return error;
        }
    }
}

fn stream_error(error: &io::Error) -> &StreamError {
    let source = error.get_ref().expect("an error of a stream");
    source.downcast_ref().expect("an error of a stream")
}

fn is_acknowledge(error: &io::Error, received: u64) {
    let found = stream_error(error);
    assert!(matches!(found, StreamError::Acknowledge(_)), "{found:?}");
    let told = format!(
        "the peer breaks the protocol: the peer acknowledges byte {received}, which is not the end of a frame between"
    );
    assert!(error.to_string().starts_with(&told), "{error}");
}

/// An address of this host that no other test uses: the server's messages name it.
fn unused_address() -> Ipv4Addr {
    static LAST: AtomicU8 = AtomicU8::new(0);
    let last = LAST.fetch_add(1, Ordering::Relaxed);
    Ipv4Addr::new(127, 77, last / 200, 1 + last % 200)
}

fn connect_from(from: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let tcp = Some(ipproto::TCP);
    let socket = socket(AddressFamily::INET, SocketType::STREAM, tcp).unwrap();
    bind(&socket, &SocketAddrV4::new(from, 0)).unwrap();
    connect(&socket, &to).unwrap();
    socket.into()
}

/// The server has said so of a connection from there.
fn turned_away(from: Ipv4Addr, reason: &str) {
    log::wait_for(&format!("turning away a connection from {from}: "), reason);
}
