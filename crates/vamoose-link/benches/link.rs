//! What the link costs: packets of method none over a plain connection and over sessions, and TLS against the bare cipher.
//!
//! ```text
//! cargo bench -p vamoose-link --bench link [-- GIB]
//! ```
//! Packets of 512 KiB on one connection over loopback TCP, with a thread at either end. The figures are seconds of CPU for a
//! GiB, each the median and the lowest of rounds that take turns. `packets` go from a writer of packets to a reader, as they do
//! between relays: first without a session. What TLS adds to them is to be compared with what `cipher` takes for the same
//! records in place. `TLS` is the records alone, behind heads of 64 bytes, to be compared with the bare socket.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    reason = "a benchmark fails by panicking and prints rounded figures"
)]

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::Duration,
};

use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, Algorithm, LessSafeKey, Nonce, UnboundKey};
use multifd::{BlockName, Layout, Method};
use rustix::time::{ClockId, clock_gettime};
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_link::{
    ChannelReader, ChannelWriter, Cipher, Keys, Listener, Packet, Received, Security, Session,
    SessionConfig, Sessions, Socket, Stats, Stream,
    tls_testing::{MAX_CONTENT, Opening, Sealing},
};

const LAYOUT: Layout = Layout::X86;
const PACKET: usize = 512 << 10;
const HEAD: usize = 64;
const ROUNDS: usize = 7;
/// What a sealer writes at once.
const BATCH: usize = 128 << 10;

#[derive(Clone, Copy)]
enum What {
    Socket,
    Cipher(&'static Algorithm),
    Tls(Cipher),
    Packets(Link),
}

/// What carries packets.
#[derive(Clone, Copy)]
enum Link {
    Connection,
    Session { cipher: Option<Cipher>, check: bool },
}

/// Seconds of CPU of both ends.
type Cost = [f64; 2];

fn main() {
    let mut numbers = std::env::args().filter_map(|word| word.parse::<usize>().ok());
    let packets = numbers.next().unwrap_or(1) * (1 << 30) / PACKET;
    let session = |cipher, check| What::Packets(Link::Session { cipher, check });
    let (aes_128, aes_256) = (Some(Cipher::Aes128Gcm), Some(Cipher::Aes256Gcm));
    let cases = [
        ("packets, no session", What::Packets(Link::Connection)),
        ("packets, plain", session(None, false)),
        ("packets, plain, checked", session(None, true)),
        ("packets, AES-128-GCM", session(aes_128, false)),
        ("packets, 128, checked", session(aes_128, true)),
        ("packets, AES-256-GCM", session(aes_256, false)),
        ("packets, 256, checked", session(aes_256, true)),
        ("bare socket", What::Socket),
        ("cipher AES-128-GCM", What::Cipher(&AES_128_GCM)),
        ("TLS AES-128-GCM", What::Tls(Cipher::Aes128Gcm)),
        ("cipher AES-256-GCM", What::Cipher(&AES_256_GCM)),
        ("TLS AES-256-GCM", What::Tls(Cipher::Aes256Gcm)),
    ];
    let mut costs = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for ((_, what), costs) in cases.iter().zip(&mut costs) {
            costs.push(run(*what, packets));
        }
    }
    println!("CPU seconds per GiB             median                      lowest");
    println!("                          send  receive      sum      send  receive      sum");
    let gib = (packets * PACKET) as f64 / f64::from(1 << 30);
    for ((name, _), costs) in cases.iter().zip(&costs) {
        let column = |of: fn(&Cost) -> f64| {
            let mut values: Vec<f64> = costs.iter().map(|cost| of(cost) / gib).collect();
            values.sort_by(f64::total_cmp);
            (values[ROUNDS / 2], values[0])
        };
        let columns = [
            column(|cost| cost[0]),
            column(|cost| cost[1]),
            column(|cost| cost[0] + cost[1]),
        ];
        let [send, receive, sum] = columns;
        println!(
            "{name:<23} {:>6.3}   {:>6.3}   {:>6.3}    {:>6.3}   {:>6.3}   {:>6.3}",
            send.0, receive.0, sum.0, send.1, receive.1, sum.1
        );
    }
}

fn run(what: What, packets: usize) -> Cost {
    match what {
        What::Socket => over_socket(
            move |mut stream| {
                let packet = vec![1; PACKET];
                for _ in 0..packets {
                    for batch in packet.chunks(BATCH) {
                        stream.write_all(batch).expect("it is read");
                    }
                }
            },
            |mut stream| {
                let mut buffer = vec![0; 2 * BATCH];
                while stream.read(&mut buffer).expect("it is written") > 0 {}
            },
        ),
        What::Cipher(algorithm) => bare_cipher(algorithm, packets),
        What::Packets(Link::Connection) => over_socket(
            move |stream| send_packets(stream.into(), packets),
            receive_packets,
        ),
        What::Packets(Link::Session { cipher, check }) => over_session(cipher, check, packets),
        What::Tls(cipher) => over_socket(
            move |stream| {
                let socket = Socket::Tcp(stream);
                let mut sealing = Sealing::new(cipher).expect("a key");
                let (head, packet) = ([1; HEAD], vec![1; PACKET]);
                for _ in 0..packets {
                    sealing
                        .send(&socket, &[&head, &packet])
                        .expect("it is read");
                }
            },
            move |stream| {
                let socket = Socket::Tcp(stream);
                let mut opening = Opening::new(cipher).expect("a key");
                let (mut head, mut packet) = ([0; HEAD], vec![0; PACKET]);
                for _ in 0..packets {
                    read_full(&mut opening, &socket, &mut head);
                    read_full(&mut opening, &socket, &mut packet);
                }
            },
        ),
    }
}

fn read_full(opening: &mut Opening, socket: &Socket, mut out: &mut [u8]) {
    while !out.is_empty() {
        let read = opening.read(socket, out).expect("it is written");
        out = &mut out[read..];
    }
}

fn over_session(cipher: Option<Cipher>, check: bool, packets: usize) -> Cost {
    let directory = tempfile::tempdir().expect("a directory");
    let security = match cipher {
        None => Security::Insecure,
        Some(_) => {
            let directory = directory.path().to_owned();
            let key = Keys::generate(&directory).expect("a key");
            let trusted = vec![key];
            Security::Keys(Keys {
                directory,
                trusted: Some(trusted),
            })
        }
    };
    let config = SessionConfig {
        cipher: cipher.unwrap_or_default(),
        check,
        ..SessionConfig::new(security)
    };
    let address = "tcp:127.0.0.1:0".parse().expect("an address");
    let listener = Listener::bind(&address, config.stall_timeout).expect("a port");
    let path = listener.address().clone().into();
    let sessions = Sessions::new(vec![listener], config.clone()).expect("it listens");
    thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let (session, stream) = Session::dial(vec![path], config.clone()).expect("it listens");
            let cost = cpu_time_of(|| send_packets(stream, packets));
            session.drain(config.stall_timeout);
            cost
        });
        let receiver = scope.spawn(|| {
            let stream = sessions.next(Duration::from_secs(30)).expect("it dials");
            cpu_time_of(|| receive_packets(stream.stream))
        });
        [sender, receiver].map(|thread| thread.join().expect("it works").as_secs_f64())
    })
}

fn send_packets(stream: Stream, packets: usize) {
    let settings = Settings::new(Method::None, None).expect("it has no level");
    let encoder = encoder(&settings, LAYOUT).expect("it needs nothing");
    let stats = Arc::new(Stats::default());
    let mut writer = ChannelWriter::new(Arc::new(stream), LAYOUT, encoder, None, stats);
    let offsets: Vec<_> = (0..PACKET as u64).step_by(LAYOUT.page_size()).collect();
    let mut packet = Packet::new(LAYOUT);
    packet.ram_mut().block = BlockName::new(b"pc.ram").expect("it is short");
    packet
        .ram_mut()
        .set_pages(&offsets, &[], LAYOUT)
        .expect("they fit");
    for _ in 0..packets {
        packet.pages_mut()[0] = 1;
        writer.write(&mut packet).expect("it is read");
    }
    writer.finish();
}

fn receive_packets(stream: impl Into<Stream>) {
    let stats = Arc::new(Stats::default());
    let stream = Arc::new(stream.into());
    let mut reader = ChannelReader::new(stream, LAYOUT, Decoder::new(LAYOUT), stats);
    let mut packet = Packet::new(LAYOUT);
    while reader.read(&mut packet).expect("it is written") == Received::Packet {}
}

fn over_socket(
    send: impl FnOnce(TcpStream) + Send,
    receive: impl FnOnce(TcpStream) + Send,
) -> Cost {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = TcpStream::connect(listener.local_addr().expect("a port")).expect("it listens");
    let (far, _) = listener.accept().expect("it has connected");
    near.set_nodelay(true).expect("it is TCP");
    thread::scope(|scope| {
        let sender = scope.spawn(|| cpu_time_of(|| send(near)));
        let receiver = scope.spawn(|| cpu_time_of(|| receive(far)));
        [sender, receiver].map(|thread| thread.join().expect("it works").as_secs_f64())
    })
}

/// The records of so many packets, sealed and opened where they are.
fn bare_cipher(algorithm: &'static Algorithm, packets: usize) -> Cost {
    let key = || {
        let key = UnboundKey::new(algorithm, &[1; 32][..algorithm.key_len()]);
        LessSafeKey::new(key.expect("a key"))
    };
    let (sealing, opening) = (key(), key());
    // As many as a sealer has in its batch.
    let mut records = vec![vec![1; MAX_CONTENT + 1]; 8];
    let mut tags = Vec::new();
    let mut number = 0_u64;
    let nonce = |number: u64| {
        let mut nonce = [2; 12];
        nonce[4..].copy_from_slice(&number.to_be_bytes());
        Nonce::assume_unique_for_key(nonce)
    };
    let mut cost = [Duration::ZERO; 2];
    for _ in 0..packets * PACKET / MAX_CONTENT / records.len() {
        let first = number;
        cost[0] += cpu_time_of(|| {
            for record in &mut records {
                let sealed =
                    sealing.seal_in_place_separate_tag(nonce(number), Aad::from([3; 5]), record);
                tags.push(sealed.expect("it works"));
                number += 1;
            }
        });
        cost[1] += cpu_time_of(|| {
            for ((record, tag), number) in records.iter_mut().zip(tags.drain(..)).zip(first..) {
                opening
                    .open_in_place_separate_tag(
                        nonce(number),
                        Aad::from([3; 5]),
                        tag.as_ref(),
                        record,
                    )
                    .expect("it was sealed");
            }
        });
    }
    cost.map(|cost| cost.as_secs_f64())
}

fn cpu_time_of(work: impl FnOnce()) -> Duration {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let nanos = u32::try_from(time.tv_nsec).expect("less than a second");
        Duration::new(u64::try_from(time.tv_sec).expect("after the start"), nanos)
    };
    let start = now();
    work();
    now() - start
}
