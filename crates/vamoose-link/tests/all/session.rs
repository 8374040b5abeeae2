//! Streams of a session over connections that break in every way.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

use lab::middlebox::{Admission, Change, Direction, Flow, Mark, Middlebox, Which};
use multifd::{BlockName, Method, PacketKind};
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_link::{
    Address, ChannelReader, ChannelWriter, Introduced, Keys, LinkFaults, Listener, Packet,
    Received, Remote, Route, Security, Session, SessionConfig, Sessions, Stream,
};
use vamoose_session::handshake::{ATTACH_LEN, Attach, HELLO_LEN};

use crate::channel::{LAYOUT, METHODS};

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

    fn path(&self) -> Route {
        path_to(&self.middlebox)
    }

    fn next(&self) -> Introduced {
        self.sessions.next(LIMIT).expect("a stream")
    }
}

/// The link answers no connection before all have sent their messages. If streams were opened one after the other, the first
/// would never be answered. Under load a client may give a connection up and dial again.
#[test]
fn streams_are_opened_side_by_side() {
    const STREAMS: usize = 4;
    let config = config(Security::Insecure);
    let bench = Bench::new(&config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = bench.server;
    thread::spawn(move || {
        let hellos = Arc::new(Meeting::of(STREAMS));
        let attaches = Arc::new(Meeting::of(STREAMS - 1));
        for client in listener.incoming() {
            let client = client.unwrap();
            let (hellos, attaches) = (hellos.clone(), attaches.clone());
            thread::spawn(move || pass(&client, server, &hellos, &attaches));
        }
    });
    let remote = Remote {
        paths: vec![format!("tcp:{address}").parse::<Address>().unwrap().into()],
        config,
    };
    let (session, first) = remote.dial_for(STREAMS).unwrap();
    let opening = session.open_ahead(STREAMS - 1);
    // The server ends a session whose first bytes do not come.
    (&first).write_all(b"here").unwrap();
    let others = opening.into_iter().map(|opening| opening.wait().unwrap());
    let others: Vec<_> = others
        .inspect(|mut it| it.write_all(b"here").unwrap())
        .collect();
    for _ in 0..=others.len() {
        let there = bench.next().stream;
        (&there).read_exact(&mut [0; 4]).unwrap();
    }
}

/// Connects `client` to the server. Passes its first two messages on when those of other connections have come as well.
fn pass(
    mut client: &TcpStream,
    server: SocketAddr,
    hellos: &Meeting,
    attaches: &Meeting,
) -> io::Result<()> {
    let mut server = TcpStream::connect(server)?;
    let mut hello = [0; HELLO_LEN];
    client.read_exact(&mut hello)?;
    hellos.wait(client)?;
    server.write_all(&hello)?;
    server.read_exact(&mut hello)?;
    client.write_all(&hello)?;
    let mut attach = [0; ATTACH_LEN];
    client.read_exact(&mut attach)?;
    let (mut from_server, mut to_client) = (server.try_clone()?, client.try_clone()?);
    thread::spawn(move || io::copy(&mut from_server, &mut to_client));
    // The first one begins the session, without which the others cannot attach.
    if Attach::decode(&attach).unwrap().stream > 0 {
        attaches.wait(client)?;
    }
    server.write_all(&attach)?;
    io::copy(&mut client, &mut server).map(drop)
}

/// Connections that wait for each other.
struct Meeting {
    size: usize,
    waiting: Mutex<usize>,
    changed: Condvar,
}

impl Meeting {
    fn of(size: usize) -> Self {
        let (waiting, changed) = Default::default();
        Self {
            size,
            waiting,
            changed,
        }
    }

    /// Waits until enough connections have waited at one time.
    ///
    /// # Errors
    /// `client` gave its connection up meanwhile.
    fn wait(&self, client: &TcpStream) -> io::Result<()> {
        let mut waiting = self.waiting.lock().unwrap();
        *waiting += 1;
        self.changed.notify_all();
        while *waiting < self.size {
            let tick = Duration::from_millis(100);
            waiting = self.changed.wait_timeout(waiting, tick).unwrap().0;
            if *waiting < self.size && is_closed(client)? {
                *waiting -= 1;
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
        Ok(())
    }
}

fn is_closed(client: &TcpStream) -> io::Result<bool> {
    client.set_nonblocking(true)?;
    let peeked = client.peek(&mut [0]);
    client.set_nonblocking(false)?;
    match peeked {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        peeked => peeked.map(|len| len == 0),
    }
}

fn path_to(middlebox: &Middlebox) -> Route {
    let address = middlebox.address();
    Route::from(format!("tcp:{address}").parse::<Address>().unwrap())
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
        trusted: Some(vec![key]),
    };
    transfers_by(&config(Security::Keys(keys)), len, &meanwhile);
}

fn transfers_by(config: &SessionConfig, len: usize, meanwhile: &(impl Fn(&Bench) + Send + Sync)) {
    transfers_prepared(config, len, |_| (), meanwhile);
}

fn transfers_prepared(
    config: &SessionConfig,
    len: usize,
    prepare: impl FnOnce(&Middlebox),
    meanwhile: &(impl Fn(&Bench) + Send + Sync),
) -> LinkFaults {
    let bench = Bench::new(config);
    prepare(&bench.middlebox);
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
    session.faults()
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
        assert!(TcpStream::connect(middlebox.address()).is_err());
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

/// It has the whole stall timeout once there is a connection again, however long that took.
#[test]
fn a_peer_without_a_connection_has_not_stalled() {
    const STALL: Duration = Duration::from_secs(5);
    let config = config(Security::Insecure);
    let bench = Bench::new(&config);
    let (session, stream) = bench.dial(&config);
    (&stream).write_all(b"a").unwrap();
    let there = bench.next().stream;
    there.set_stall_timeout(STALL).unwrap();
    let mut byte = [0];
    (&there).read_exact(&mut byte).unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| there.read_full(&mut [0]));
        bench.middlebox.admit(Admission::Refuse).unwrap();
        bench.middlebox.apply(Which::All, Change::Reset);
        thread::sleep(STALL + Duration::from_secs(1));
        bench.middlebox.admit(Admission::Pass).unwrap();
        while session.reconnects() == 0 {
            thread::yield_now();
        }
        // Longer than a reader waits before it looks around.
        thread::sleep(Duration::from_secs(1));
        (&stream).write_all(b"b").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), 1);
    });
}

#[test]
fn flipped_bits_come_again() {
    transfers(32 << 20, |bench| {
        let middlebox = &bench.middlebox;
        for mebibytes in [2, 5, 9] {
            middlebox
                .wait_for_bytes(Direction::ToListener, mebibytes << 20, LIMIT)
                .unwrap();
            let connections = middlebox.connections();
            let connection = connections.len() - 1;
            let mark = Mark {
                connection,
                direction: Direction::ToListener,
                bytes: connections[connection].to_listener.passed + (1 << 20) + 1,
            };
            middlebox.flip_at(mark, 3);
        }
    });
}

/// The other end of a channel sends nothing but acknowledgements: its offset stays the same.
#[test]
fn acknowledgements_that_are_changed_now_and_then_are_no_reason_to_end() {
    let config = config(Security::Insecure);
    let faults = transfers_prepared(
        &config,
        32 << 20,
        |middlebox| {
            for connection in 0..5 {
                let mark = Mark {
                    connection,
                    direction: Direction::ToDialler,
                    // The third frame behind the handshake.
                    bytes: 112 + 2 * 40 + 20,
                };
                middlebox.flip_at(mark, 1);
            }
        },
        &|_| (),
    );
    assert!((1..=5).contains(&faults.corrupt_frames), "{faults:?}");
}

/// Nobody writes, and no connection lives until a heartbeat is due: that each is welcomed and brings a frame is progress.
#[test]
fn an_idle_stream_survives_resets_for_longer_than_the_reconnect_timeout() {
    let config = SessionConfig {
        reconnect_timeout: Duration::from_secs(2),
        ..config(Security::Insecure)
    };
    let bench = Bench::new(&config);
    let (_session, stream) = bench.dial(&config);
    (&stream).write_all(b"x").unwrap();
    let there = bench.next();
    (&there.stream).read_exact(&mut [0; 1]).unwrap();
    thread::scope(|scope| {
        let reading = [&stream, &there.stream].map(|mut end| {
            scope.spawn(move || {
                let mut read = [0; 5];
                end.read_exact(&mut read).map(|()| read)
            })
        });
        // The pace of the experiment, less than that of heartbeats.
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(300));
            bench.middlebox.apply(Which::All, Change::Reset);
        }
        for mut end in [&stream, &there.stream] {
            end.write_all(b"there").unwrap();
        }
        for read in reading {
            assert_eq!(&read.join().unwrap().unwrap(), b"there");
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

/// Packets of every method, with device state and SYNCs between them.
#[test]
fn packets_of_every_method_survive_resets() {
    const PACKETS: u64 = 60;
    for method in METHODS {
        let config = config(Security::Insecure);
        let bench = Bench::new(&config);
        for connection in 0..6 {
            let mark = Mark {
                connection,
                direction: Direction::ToListener,
                bytes: 150_001 * (connection as u64 + 1),
            };
            bench.middlebox.apply_at(mark, Which::All, Change::Reset);
        }
        let (session, near) = bench.dial(&config);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut writer = writer(Arc::new(near), method);
                let (mut packet, mut state) = (Packet::new(LAYOUT), device_state());
                for number in 0..PACKETS {
                    fill(&mut packet, number);
                    writer.write(&mut packet).unwrap();
                    if number % 7 == 0 {
                        writer.write(&mut state).unwrap();
                        writer.write_sync(number).unwrap();
                    }
                }
                writer.finish();
            });
            let mut reader = reader(bench.next().stream);
            let (mut packet, mut expected) = (Packet::new(LAYOUT), Packet::new(LAYOUT));
            for number in 0..PACKETS {
                assert_eq!(reader.read(&mut packet).unwrap(), Received::Packet);
                fill(&mut expected, number);
                assert!(packet.pages() == expected.pages(), "{method}: {number}");
                if number % 7 == 0 {
                    assert_eq!(reader.read(&mut packet).unwrap(), Received::Packet);
                    assert_eq!(packet.kind(), PacketKind::DeviceState);
                    assert!(packet.state() == device_state().state());
                    assert_eq!(reader.read(&mut packet).unwrap(), Received::Packet);
                    assert!(packet.ram().sync && packet.ram().packet_num == number);
                }
            }
            assert_eq!(reader.read(&mut packet).unwrap(), Received::End);
        });
        assert!(session.drain(LIMIT));
        assert!(session.reconnects() >= 3, "{method}");
    }
}

fn writer(stream: Arc<Stream>, method: Method) -> ChannelWriter {
    let settings = Settings::new(method, None).unwrap();
    let encoder = encoder(&settings, LAYOUT).unwrap();
    ChannelWriter::new(stream, LAYOUT, encoder, None, Arc::default())
}

fn reader(stream: impl Into<Stream>) -> ChannelReader {
    let stream = Arc::new(stream.into());
    ChannelReader::new(stream, LAYOUT, Decoder::new(LAYOUT), Arc::default())
}

/// Pages of noise and of zeros, differently many for each number.
fn fill(packet: &mut Packet, number: u64) {
    let offsets: Vec<_> = (0..1 + number % 128).map(|page| page << 12).collect();
    let header = packet.ram_mut();
    header.block = BlockName::new(b"pc.ram").unwrap();
    header.packet_num = number;
    header.set_pages(&offsets, &[], LAYOUT).unwrap();
    let mut noise = fastrand::Rng::with_seed(number);
    for page in packet.pages_mut().chunks_mut(4096) {
        let (first, second) = page.split_at_mut(2048);
        noise.fill(first);
        second.fill(0);
    }
}

/// A packet of device state, as it comes from a QEMU.
fn device_state() -> Packet {
    let mut bytes = vec![b'd'; 276 + 300_000];
    bytes[..12].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1, 0, 0, 0, 0x40]);
    bytes[272..276].copy_from_slice(&300_000_u32.to_be_bytes());
    let (mut near, far) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| near.write_all(&bytes).unwrap());
        let mut packet = Packet::new(LAYOUT);
        assert_eq!(reader(far).read(&mut packet).unwrap(), Received::Packet);
        packet
    })
}
