//! A peer that acknowledges nothing: what is kept for it stays under its bound. What is counted is the process's memory, so
//! this test has one to itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    alloc::{GlobalAlloc, Layout as Allocation, System},
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use multifd::{BlockName, Layout, Method};
use vamoose_codec::{Settings, encoder};
use vamoose_link::{
    Address, ChannelWriter, Packet, Security, Session, SessionConfig, Stats, Stream, chain,
};
use vamoose_session::{
    frame::{HEADER_LEN, Header, Kind},
    handshake::{
        ATTACH_LEN, Answer, Attach, HELLO_LEN, Hello, Secret, Target, Transcript, Welcome,
    },
};

/// Counts what is allocated.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code, reason = "the trait is unsafe; all is the system's")]
// SAFETY: passes everything on to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Allocation) -> *mut u8 {
        let now = ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Allocation) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LAYOUT: Layout = Layout::X86;
const WINDOW: usize = 32 << 20;
const STREAMS: usize = 16;

/// What a stream has beside: the next packet waits in a buffer of its own.
const BESIDE: usize = STREAMS << 20;

#[test]
fn what_is_not_acknowledged_stays_under_the_window() {
    // A buffer that is full by half is kept and not copied.
    for (method, filled, room) in [
        (Method::None, 4096, 1),
        (Method::ZstdFrames, 1100, 2),
        (Method::ZstdFrames, 4096, 2),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address: Address = format!("tcp:{}", listener.local_addr().unwrap())
            .parse()
            .unwrap();
        thread::spawn(move || {
            let mut secret = None;
            for _ in 0..STREAMS {
                let (socket, _) = listener.accept().unwrap();
                secret = Some(welcome(&socket, secret));
                thread::spawn(move || swallow(socket));
            }
        });
        let config = SessionConfig {
            window: WINDOW,
            stall_timeout: Duration::from_secs(2),
            ..SessionConfig::new(Security::Insecure)
        };
        let (session, first) = Session::dial(vec![address.into()], config).unwrap();
        let mut streams = vec![first];
        streams.extend((1..STREAMS).map(|_| session.open().unwrap()));
        let together = Arc::new(Barrier::new(STREAMS + 1));
        let (sent, before) = thread::scope(|scope| {
            let writing: Vec<_> = streams
                .into_iter()
                .map(|stream| {
                    let together = together.clone();
                    scope.spawn(move || write_until_it_stalls(stream, method, filled, &together))
                })
                .collect();
            // All have their packets and encoders.
            together.wait();
            let before = ALLOCATED.load(Ordering::Relaxed);
            MOST.store(before, Ordering::Relaxed);
            together.wait();
            let sent: u64 = writing.into_iter().map(|it| it.join().unwrap()).sum();
            (sent, before)
        });
        let most = MOST.load(Ordering::Relaxed) - before;
        println!("{method}: {sent} bytes sent, {most} bytes of memory at most");
        assert!(sent > WINDOW as u64 / 2, "{method}: {sent}");
        assert!(sent <= WINDOW as u64, "{method}: {sent}");
        assert!(most <= WINDOW * room + BESIDE, "{method}: {most}");
    }
}

/// Writes packets until the stream fails; returns the bytes of those that were taken.
fn write_until_it_stalls(stream: Stream, method: Method, filled: usize, together: &Barrier) -> u64 {
    let settings = Settings::new(method, None).unwrap();
    let stats = Arc::new(Stats::default());
    let encoder = encoder(&settings, LAYOUT).unwrap();
    let mut writer = ChannelWriter::new(Arc::new(stream), LAYOUT, encoder, None, stats.clone());
    let mut packet = Packet::new(LAYOUT);
    let offsets: Vec<u64> = (0..LAYOUT.page_count() as u64)
        .map(|page| page * 4096)
        .collect();
    for number in 0.. {
        let header = packet.ram_mut();
        header.clear();
        header.block = BlockName::new(b"pc.ram").unwrap();
        header.set_pages(&offsets, &[], LAYOUT).unwrap();
        let mut noise = fastrand::Rng::with_seed(1);
        for page in packet.pages_mut().chunks_mut(4096) {
            page.fill(0);
            noise.fill(&mut page[..filled]);
        }
        let taken = stats.snapshot().wire_bytes;
        if let Err(error) = writer.write(&mut packet) {
            let text = chain(&error).to_string();
            assert!(text.contains("timed out after 2 s"), "{text}");
            return taken;
        }
        if number == 0 {
            together.wait();
            together.wait();
        }
    }
    0
}

/// The handshake of a server, with the session that the first connection has begun.
fn welcome(mut socket: &TcpStream, secret: Option<Secret>) -> Secret {
    let mut hello = [0; HELLO_LEN];
    socket.read_exact(&mut hello).unwrap();
    let hello = Hello::decode(&hello).unwrap();
    let answer = Answer::to(&hello, [4; 32]);
    socket.write_all(&answer.encode()).unwrap();
    let transcript = Transcript::new(&hello, &answer, [0; 32]);
    let mut attach = [0; ATTACH_LEN];
    socket.read_exact(&mut attach).unwrap();
    let is_new = Attach::decode(&attach).unwrap().target == Target::New;
    let secret = secret
        .filter(|_| !is_new)
        .unwrap_or_else(|| transcript.secret());
    let welcome = Welcome { outcome: Ok(0) }.encode(&transcript, &attach, Some(&secret));
    socket.write_all(&welcome).unwrap();
    secret
}

/// Reads all that comes, lives, and has never received anything.
fn swallow(mut socket: TcpStream) {
    let timeout = Some(Duration::from_millis(500));
    socket.set_read_timeout(timeout).unwrap();
    let mut bytes = vec![0; 1 << 16];
    let heartbeat: [u8; HEADER_LEN] = Header::empty(Kind::Acknowledge, 0, 0).encode();
    loop {
        match socket.read(&mut bytes) {
            Ok(0) => return,
            Ok(_) => {}
            Err(_) if socket.write_all(&heartbeat).is_ok() => {}
            Err(_) => return,
        }
    }
}
