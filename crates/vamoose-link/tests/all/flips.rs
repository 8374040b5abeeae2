//! Bits that flip on the way between two ends without TLS: in data, headers, acknowledgements and handshakes, one in each
//! connection. No byte that was changed reaches a reader, and nobody waits for ever.

use std::{
    collections::BTreeMap,
    error::Error as _,
    io::{self, Write as _},
    iter,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use fastrand::Rng;
use lab::middlebox::{Direction, Flipped, Mark, Middlebox};
use multifd::{BlockName, Layout, Method};
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_link::{
    Address, ChannelReader, ChannelWriter, Listener, Packet, Received, Security, Session,
    SessionConfig, Sessions, Stats, Stream, chain,
};
use vamoose_session::{
    frame::{HEADER_LEN, Header, Kind},
    handshake::{ATTACH_LEN, HELLO_LEN},
};

use crate::{
    channel::{Sent, build, page},
    log,
};

/// What streams carry here.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// Bytes in both directions.
    Bytes,
    /// Packets of a method; the other direction acknowledges.
    Packets(Method),
}

const LOADS: [Load; 8] = [
    Load::Bytes,
    Load::Packets(Method::None),
    Load::Packets(Method::Zlib),
    Load::Packets(Method::Zstd),
    Load::Packets(Method::Lz4),
    Load::Packets(Method::ZstdFrames),
    Load::Packets(Method::Qpl),
    Load::Packets(Method::Qatzip),
];

#[test]
fn no_flipped_bit_goes_unnoticed() {
    campaign(200, 1);
}

/// `make flips`: FLIPS of them, from FLIPS_SEED on.
#[test]
#[ignore = "minutes"]
fn no_flipped_bit_goes_unnoticed_among_many() {
    let number = |name, default| {
        let text = std::env::var(name).ok();
        text.map_or(default, |text| text.parse().expect("a number"))
    };
    campaign(number("FLIPS", 10_000), number("FLIPS_SEED", 1));
}

/// Makes `flips`, in experiments of some, and prints in what and how they were noticed.
fn campaign(flips: u64, seed: u64) {
    const EACH: u64 = 25;
    let mut table = BTreeMap::<(&str, &str), usize>::new();
    let (experiments, results) = (flips.div_ceil(EACH), mpsc::channel());
    let next = Arc::new(AtomicU64::new(0));
    let workers: Vec<_> = (0..LOADS.len())
        .map(|_| {
            let (next, done) = (next.clone(), results.0.clone());
            thread::spawn(move || {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= experiments {
                        return;
                    }
                    let load = LOADS[usize::try_from(number).unwrap() % LOADS.len()];
                    let found = Experiment::new(load, seed + number).run(EACH as usize);
                    if done.send(found).is_err() {
                        return;
                    }
                }
            })
        })
        .collect();
    drop(results.0);
    for _ in 0..experiments {
        // A worker that panics ends the sender; one that hangs, this wait.
        let found = results.1.recv_timeout(LIMIT).expect("an experiment");
        for cell in found {
            *table.entry(cell).or_default() += 1;
        }
    }
    for worker in workers {
        worker.join().expect("no flip goes unnoticed");
    }
    let made: usize = table.values().sum();
    let mut lines = format!("\n{made} bits flipped, seed {seed}; 0 unnoticed\n");
    for ((place, fate), count) in &table {
        lines += &format!("| {place} | {fate} | {count} |\n");
    }
    println!("{lines}");
    assert!(made as u64 >= flips);
    for place in [
        "handshake",
        "header of data",
        "acknowledgement",
        "bytes of a stream",
        "packet header",
        "packet payload",
    ] {
        let noticed = table.keys().any(|key| key.0 == place && key.1 != UNREAD);
        assert!(noticed, "no flip was noticed in: {place}");
    }
}

const LIMIT: Duration = Duration::from_secs(300);
const LAYOUT: Layout = Layout::X86;

/// What happens to a flip that nobody could notice: its connection ended before the frame was read as a whole.
const UNREAD: &str = "not read: the connection had ended";

struct Experiment {
    load: Load,
    seed: u64,
    sessions: Sessions,
    middlebox: Middlebox,
}

impl Experiment {
    fn new(load: Load, seed: u64) -> Self {
        log::keep();
        let address = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::bind(&address, LIMIT).unwrap();
        let Address::Tcp { port, .. } = *listener.address() else {
            unreachable!()
        };
        let sessions = Sessions::new(vec![listener], config()).unwrap();
        let middlebox = Middlebox::new(SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
        middlebox.record();
        Self {
            load,
            seed,
            sessions,
            middlebox,
        }
    }

    /// Transfers until so many bits have been flipped, and says where each fell and how it was noticed.
    fn run(&self, flips: usize) -> Vec<(&'static str, &'static str)> {
        let mut rng = Rng::with_seed(self.seed);
        // More than there will be connections.
        for connection in 0..flips * 20 {
            self.plan(connection, &mut rng);
        }
        let mut errors = Vec::new();
        let mut attempt = 0;
        while self.middlebox.flips().len() < flips {
            attempt += 1;
            errors.extend(self.transfer(flips, self.seed ^ (attempt << 32)));
        }
        let flips = self.middlebox.flips();
        flips.iter().map(|flip| self.judge(flip, &errors)).collect()
    }

    /// Decides what is flipped in a connection: in the handshake, at once behind it, or later.
    fn plan(&self, connection: usize, rng: &mut Rng) {
        let direction = Direction::BOTH[rng.usize(..2)];
        let handshake = (HELLO_LEN + ATTACH_LEN) as u64;
        let far = match (self.load, direction) {
            // What only acknowledges sends little.
            (Load::Packets(_), Direction::ToDialler) => 4 * HEADER_LEN as u64,
            _ => 60_000,
        };
        let bytes = match rng.u8(..8) {
            0 => rng.u64(..handshake),
            1 => handshake + rng.u64(..200),
            _ => handshake + rng.u64(..far),
        };
        let mark = Mark {
            connection,
            direction,
            bytes,
        };
        self.middlebox.flip_at(mark, rng.u8(..8));
    }

    /// One session, until enough has been flipped or a stream of it fails. What is read is what was written, or its
    /// beginning. Returns the errors.
    fn transfer(&self, flips: usize, seed: u64) -> Vec<String> {
        let path: Address = format!("tcp:{}", self.middlebox.address()).parse().unwrap();
        let (session, here) = match Session::dial(vec![path.into()], config()) {
            Ok(dialled) => dialled,
            Err(error) => return vec![chain(&error).to_string()],
        };
        let (here, introduced) = (&Arc::new(here), &OnceLock::<(Arc<Stream>, Session)>::new());
        let has_failed = &AtomicBool::new(false);
        let is_enough = &|| self.middlebox.flips().len() >= flips;
        let errors: Vec<_> = thread::scope(|scope| {
            let write = move || {
                (&**here).write_all(&seed.to_be_bytes())?;
                match self.load {
                    Load::Bytes => write_bytes(here, seed, is_enough),
                    Load::Packets(method) => write_packets(here, method, seed, is_enough),
                }
            };
            let writing = scope.spawn(move || {
                write().inspect_err(|_| {
                    // The server would wait for the next connection.
                    has_failed.store(true, Ordering::SeqCst);
                    introduced.get().inspect(|(there, _)| there.shut_down());
                })
            });
            let Some(found) = self.introduced(seed, &|| writing.is_finished()) else {
                return vec![writing.join().unwrap().err()];
            };
            let (there, _session) = introduced.get_or_init(|| found);
            if has_failed.load(Ordering::SeqCst) {
                there.shut_down();
            }
            // What one end waits for, the other one has given up.
            let or_end = move |result: io::Result<u64>| {
                result.inspect_err(|_| [here, there].iter().for_each(|end| end.shut_down()))
            };
            let back = match self.load {
                Load::Bytes => vec![
                    scope.spawn(move || or_end(write_bytes(there, seed + 1, is_enough))),
                    scope.spawn(move || or_end(read_bytes(here, seed + 1))),
                ],
                Load::Packets(_) => vec![],
            };
            let read = or_end(match self.load {
                Load::Bytes => read_bytes(there, seed),
                Load::Packets(_) => read_packets(there, seed),
            });
            let mut results = vec![or_end(writing.join().unwrap()), read];
            results.extend(back.into_iter().map(|job| job.join().unwrap()));
            for pair in results.chunks(2) {
                if let [Ok(written), Ok(read)] = pair {
                    assert_eq!(read, written, "UNNOTICED: the end came too early");
                }
            }
            results.into_iter().map(Result::err).collect()
        });
        session.shut_down();
        errors
            .into_iter()
            .flatten()
            .map(|error| error.to_string())
            .collect()
    }

    /// The server's end of the stream; `None` if the client's fails before.
    fn introduced(&self, seed: u64, is_over: &dyn Fn() -> bool) -> Option<(Arc<Stream>, Session)> {
        loop {
            let Some(introduced) = self.sessions.next(Duration::from_millis(100)) else {
                if is_over() {
                    return None;
                }
                continue;
            };
            // It may be one of a session before that failed at once.
            let mut number = [0; 8];
            let read = introduced.stream.read_full(&mut number);
            if read.is_ok() && u64::from_be_bytes(number) == seed {
                return Some((Arc::new(introduced.stream), introduced.session));
            }
        }
    }

    /// Where a flip fell, and how it was noticed.
    fn judge(&self, flip: &Flipped, errors: &[String]) -> (&'static str, &'static str) {
        const HANDSHAKE: usize = HELLO_LEN + ATTACH_LEN;
        let byte = usize::try_from(flip.byte).unwrap();
        let there = self
            .middlebox
            .recorded(flip.connection, Direction::ToListener);
        let back = self
            .middlebox
            .recorded(flip.connection, Direction::ToDialler);
        if byte < HANDSHAKE {
            assert!(there.len() <= HANDSHAKE, "the client went on: {flip:?}");
            let is_welcome = flip.direction == Direction::ToDialler && byte >= HELLO_LEN;
            let refusal = back.get(HELLO_LEN..HELLO_LEN + 4);
            assert!(
                is_welcome || refusal.is_none_or(|code| code != [0; 4]),
                "the server went on: {flip:?}"
            );
            return ("handshake", "the connection was refused or left");
        }
        let bytes = match flip.direction {
            Direction::ToListener => there,
            Direction::ToDialler => back,
        };
        let mut at = HANDSHAKE;
        while let Some(header_bytes) = bytes[at..].first_chunk::<HEADER_LEN>() {
            let header = Header::decode(header_bytes).expect("as it was sent");
            let data = at + HEADER_LEN;
            if byte < data {
                let mut changed = *header_bytes;
                changed[byte - at] ^= 1 << flip.bit;
                let told = Header::decode(&changed).expect_err("unnoticed").to_string();
                let place = match header.kind {
                    Kind::Data => "header of data",
                    Kind::Acknowledge => "acknowledgement",
                    Kind::End | Kind::Abort => "end of a stream",
                };
                return (place, fate(&told, errors, "the header's checksum"));
            }
            at = data + header.len;
            if byte < at {
                let is_header = header.len == LAYOUT.ram_header_len() && header.pages.is_none();
                let place = match self.load {
                    Load::Packets(_) if is_header => "packet header",
                    Load::Packets(_) if header.len > 8 => "packet payload",
                    _ => "bytes of a stream",
                };
                let Some(sent) = bytes.get(data..at) else {
                    return (place, UNREAD);
                };
                let mut changed = sent.to_vec();
                changed[byte - data] ^= 1 << flip.bit;
                let (found, expected) = (crc32c::crc32c(&changed), crc32c::crc32c(sent));
                let told = format!(
                    "{} bytes at offset {} were changed on their way: their checksum is {found:#010x}, not {expected:#010x}",
                    header.len, header.offset
                );
                return (place, fate(&told, errors, "the frame's checksum"));
            }
        }
        ("header that was cut off", UNREAD)
    }
}

fn fate(told: &str, errors: &[String], how: &'static str) -> &'static str {
    let is_told = log::has(told) || errors.iter().any(|error| error.contains(told));
    if is_told { how } else { UNREAD }
}

fn config() -> SessionConfig {
    SessionConfig {
        stall_timeout: LIMIT,
        reconnect_timeout: Duration::from_secs(5),
        ..SessionConfig::new(Security::Insecure)
    }
}

/// Writes until it is enough, and the end. Returns how much.
fn write_bytes(
    stream: &Stream,
    seed: u64,
    is_enough: &(dyn Fn() -> bool + Sync),
) -> io::Result<u64> {
    let (mut rng, mut written) = (Rng::with_seed(seed), 0);
    while !is_enough() {
        let piece = content(seed, written, rng.usize(1..9000));
        let (head, tail) = piece.split_at(piece.len() / 3);
        stream.write_both(head, tail)?;
        written += piece.len() as u64;
    }
    stream.finish();
    Ok(written)
}

/// Reads to the end, and compares.
fn read_bytes(stream: &Stream, seed: u64) -> io::Result<u64> {
    let (mut rng, mut total) = (Rng::with_seed(seed ^ 1), 0);
    let mut buffer = vec![0; 30_000];
    loop {
        let wanted = rng.usize(1..buffer.len());
        let read = stream.read_until(&mut buffer[..wanted], None)?.unwrap_or(0);
        assert!(
            buffer[..read] == content(seed, total, read),
            "UNNOTICED: {seed}, {total}"
        );
        total += read as u64;
        if read == 0 {
            return Ok(total);
        }
    }
}

/// What a stream has from an offset on.
fn content(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    const BLOCK: u64 = 4096;
    let skip = (offset % BLOCK) as usize;
    let blocks = offset / BLOCK..(offset + len as u64).div_ceil(BLOCK);
    let bytes = blocks.flat_map(|block| {
        let mut bytes = [0; BLOCK as usize];
        Rng::with_seed(seed.wrapping_mul(1 << 20) ^ block).fill(&mut bytes);
        bytes
    });
    bytes.skip(skip).take(len).collect()
}

fn write_packets(
    stream: &Arc<Stream>,
    method: Method,
    seed: u64,
    is_enough: &(dyn Fn() -> bool + Sync),
) -> io::Result<u64> {
    let settings = Settings::new(method, None).unwrap();
    let encoder = encoder(&settings, LAYOUT).unwrap();
    let stats = Arc::new(Stats::default());
    let mut writer = ChannelWriter::new(stream.clone(), LAYOUT, encoder, None, stats);
    let mut packet = Packet::new(LAYOUT);
    let mut number = 0;
    while !is_enough() {
        let sent = sent(seed, number);
        build(&sent, &mut packet);
        packet.ram_mut().packet_num = number;
        writer.write(&mut packet).map_err(io::Error::other)?;
        number += 1;
    }
    stream.finish();
    Ok(number)
}

fn read_packets(stream: &Arc<Stream>, seed: u64) -> io::Result<u64> {
    let stats = Arc::new(Stats::default());
    let mut reader = ChannelReader::new(stream.clone(), LAYOUT, Decoder::new(LAYOUT), stats);
    let mut packet = Packet::new(LAYOUT);
    let mut number = 0;
    loop {
        match reader.read(&mut packet) {
            Ok(Received::End) => return Ok(number),
            Ok(Received::Packet) => {}
            Err(error) => {
                // Only the link may be the reason.
                let is_link = iter::successors(error.source(), |&error| error.source())
                    .any(|error| error.is::<io::Error>());
                assert!(is_link, "UNNOTICED: {seed}, {number}: {}", chain(&error));
                return Err(io::Error::other(chain(&error).to_string()));
            }
        }
        let sent = sent(seed, number);
        let pages: Vec<u8> = sent.pages.iter().flat_map(|kind| page(*kind)).collect();
        let (normal, zero) = (sent.pages.len() as u64, sent.zero as u64);
        let offsets =
            |pages: std::ops::Range<u64>| pages.map(|page| page * 4096).collect::<Vec<_>>();
        let header = packet.ram();
        let is_right = header.packet_num == number
            && header.block == BlockName::new(b"pc.ram").unwrap()
            && header.normal_offsets() == offsets(0..normal)
            && header.zero_offsets() == offsets(normal..normal + zero);
        assert!(
            is_right && packet.pages() == pages,
            "UNNOTICED: {seed}, {number}"
        );
        number += 1;
    }
}

fn sent(seed: u64, number: u64) -> Sent {
    let mut rng = Rng::with_seed(seed.wrapping_mul(1 << 20) ^ number);
    Sent {
        pages: (0..rng.usize(..6)).map(|_| rng.u8(..)).collect(),
        zero: rng.usize(1..4),
        sync: false,
    }
}
