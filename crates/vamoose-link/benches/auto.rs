//! Method auto beside fixed methods, over links of several rates.
//!
//! ```text
//! cargo bench -p vamoose-link --bench auto -- [ROUNDS] [LINK…] [METHOD…]      as root, for links
//!
//! ROUNDS   3 if not said
//! LINK     100M 1G 10G 25G free loopback, or any other rate; 1G>100M changes after the first half
//! METHOD   those that can win, if none is said; auto none lz4:8 zstd-frames:-1 zlib:1 …
//! VAMOOSE_CORPUS=dir[:dir…]      other data than target/corpus/{memory,silesia}
//! ```
//! Real data goes through the writers of two channels, over a session without TLS between two network
//! namespaces joined by a link of that rate (or one without a limit, or loopback), to readers that decode
//! it, all in this one process.
//!
//! In a round each method has one slice of the time, with new connections and encoders, as a migration
//! has: what auto loses while it learns is counted. All that counts is pages that were decoded at the
//! far end within the slice. Noise of the machine comes and goes, so methods are compared within a round
//! only, and of the rounds the median counts.
//!
//! Prints a Markdown table: pages that arrived, in MB (10^6 bytes) per second, and CPU seconds of the
//! whole process, both ends, per GiB of them. At the end of a row auto's share of the fixed method that
//! was best on that link: of the whole slice, and of its second half, when auto has learnt what there is
//! to learn. A link that changes does so at the end of the first half, and the second half begins a second later.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    reason = "a benchmark fails by panicking and prints rounded figures"
)]

use std::{
    env, fs, iter,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use lab::net::{Link, Namespace};
use multifd::{BlockName, Layout, Method};
use rustix::{
    thread::{LinkNameSpaceType, move_into_link_name_space},
    time::{ClockId, clock_gettime},
};
use std::os::fd::AsFd;
use vamoose_codec::{Engines, Settings};
use vamoose_link::{
    ChannelReader, ChannelWriter, Listener, MethodChoice, Packet, Received, Security, Session,
    SessionConfig, Sessions, Stats, Stream,
};

const LAYOUT: Layout = Layout::X86;
const CHANNELS: usize = 2;
const LINKS: [&str; 4] = ["100M", "1G", "10G", "free"];
const METHODS: [&str; 8] = [
    "auto",
    "none",
    "lz4:8",
    "lz4:1",
    "zstd-frames:-1",
    "zstd-frames:1",
    "zstd-frames:3",
    "zstd:1",
];

/// Time of a method in a round. On a slow link a packet takes long, and what buffers hold even longer.
fn slice_time(link: &str) -> Duration {
    Duration::from_secs(if link.ends_with('M') { 7 } else { 3 })
}

fn main() {
    // Cargo adds `--bench`.
    let words = env::args().skip(1).filter(|word| word != "--bench");
    let (mut rounds, mut links, mut methods) = (3, Vec::new(), Vec::new());
    for word in words {
        if let Ok(number) = word.parse() {
            rounds = number;
        } else if is_link(&word) {
            links.push(word);
        } else {
            methods.push(word);
        }
    }
    if links.is_empty() {
        links = LINKS.map(String::from).to_vec();
    }
    if methods.is_empty() {
        methods = METHODS.map(String::from).to_vec();
    }
    for folder in corpora() {
        let name = folder.file_name().expect("a name").to_string_lossy();
        let data = Arc::new(read(&folder));
        println!("\n{name}: page MB/s (CPU-s per GiB), median of {rounds} rounds\n");
        println!(
            "| link | {} | auto / best | second half | load |",
            methods.join(" | ")
        );
        println!("|---|{}---|---|---|", "---|".repeat(methods.len()));
        for link in &links {
            let cells = measure(link, &methods, rounds, &data);
            println!("| {link} | {} | {} |", row(&methods, &cells), load());
        }
    }
}

fn is_link(word: &str) -> bool {
    matches!(word, "free" | "loopback") || word.starts_with(|first: char| first.is_ascii_digit())
}

fn choice(method: &str) -> MethodChoice {
    let (name, level) = match method.split_once(':') {
        Some((name, level)) => (name, Some(level.parse().expect("a level"))),
        None => (method, None),
    };
    match name {
        MethodChoice::ADAPTIVE => MethodChoice::Adaptive(Engines::software(Settings::default())),
        name => {
            let method = Method::ALL.into_iter().find(|method| method.name() == name);
            let settings = Settings::new(method.expect("a method"), level);
            Engines::software(settings.expect("a level of it")).into()
        }
    }
}

/// What a method did in one slice, or in half of one.
#[derive(Clone, Copy, Default)]
struct Cell {
    page_bytes: u64,
    time: Duration,
    cpu: Duration,
}

impl Cell {
    fn rate(&self) -> f64 {
        self.page_bytes as f64 / self.time.as_secs_f64() / 1e6
    }

    fn cost(&self) -> f64 {
        let gib = self.page_bytes as f64 / f64::from(1 << 30);
        self.cpu.as_secs_f64() / gib
    }
}

/// A slice.
#[derive(Clone, Copy)]
struct Slice {
    whole: Cell,
    second_half: Cell,
}

/// For each method its slices, one a round.
fn measure(link: &str, methods: &[String], rounds: usize, data: &Arc<Vec<u8>>) -> Vec<Vec<Slice>> {
    let ends = ends(link);
    let mut cells = vec![Vec::new(); methods.len()];
    for _ in 0..rounds {
        for (cell, method) in cells.iter_mut().zip(methods) {
            cell.push(slice(&choice(method), &ends, data, slice_time(link)));
            ends.restore();
        }
    }
    cells
}

fn row(methods: &[String], cells: &[Vec<Slice>]) -> String {
    let mut row: Vec<_> = cells
        .iter()
        .map(|slices| {
            let rate = median(slices.iter().map(|slice| slice.whole.rate()));
            let cost = median(slices.iter().map(|slice| slice.whole.cost()));
            format!("{rate:.0} ({cost:.2})")
        })
        .collect();
    let part: [fn(&Slice) -> f64; 2] =
        [|slice| slice.whole.rate(), |slice| slice.second_half.rate()];
    let auto = methods.iter().position(|method| method == "auto");
    row.extend(part.map(|rate| {
        auto.and_then(|auto| share(cells, auto, rate))
            .map_or(String::new(), |(share, best)| {
                format!("{share:.2} of {}", methods[best])
            })
    }));
    row.join(" | ")
}

/// The share that auto has of the best fixed method's rate, the median of rounds, and which one that is.
fn share(cells: &[Vec<Slice>], auto: usize, rate: fn(&Slice) -> f64) -> Option<(f64, usize)> {
    let rates = |method: usize| cells[method].iter().map(rate);
    let best = (0..cells.len())
        .filter(|method| *method != auto)
        .max_by(|a, b| median(rates(*a)).total_cmp(&median(rates(*b))))?;
    let shares = rates(auto).zip(rates(best)).map(|(auto, best)| auto / best);
    Some((median(shares), best))
}

/// The lower of two in the middle.
fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<_> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers[(numbers.len() - 1) / 2]
}

/// Of the machine in the last minute.
fn load() -> String {
    let loads = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    loads.split(' ').next().unwrap_or_default().to_owned()
}

/// Where the two ends of the link are.
enum Ends {
    Link(Link),
    Loopback,
    /// A link that carries the first rate, and after half of a slice the second.
    Changing(Link, [u64; 2]),
}

fn ends(link: &str) -> Ends {
    let new = |rate| Link::new(rate).expect("root makes links");
    match (link, link.split_once('>')) {
        ("loopback", _) => Ends::Loopback,
        ("free", _) => Ends::Link(new(None)),
        (_, Some((before, after))) => {
            let rates = [before, after].map(rate);
            Ends::Changing(new(Some(rates[0])), rates)
        }
        (only, None) => Ends::Link(new(Some(rate(only)))),
    }
}

/// In bits per second.
fn rate(text: &str) -> u64 {
    let (number, unit) = text.split_at(text.len() - 1);
    let number: u64 = number.parse().expect("a rate such as 10G");
    let unit = if unit == "G" {
        1_000_000_000
    } else {
        1_000_000
    };
    number * unit
}

/// What a changed link has time for before anybody looks: auto is to have followed by then.
const REACTION: Duration = Duration::from_secs(1);

impl Ends {
    /// Half of a slice is over.
    fn change(&self) {
        if let Self::Changing(link, [_, after]) = self {
            link.set_rate(*after).expect("root changes links");
            thread::sleep(REACTION);
        }
    }

    /// A slice is over.
    fn restore(&self) {
        if let Self::Changing(link, [before, _]) = self {
            link.set_rate(*before).expect("root changes links");
        }
    }

    /// Streams of a session from one end to the other, and the session's two ends.
    fn connect(&self) -> (Vec<(Stream, Stream)>, Session, Sessions) {
        let (near, far, address) = match self {
            Self::Link(link) | Self::Changing(link, _) => (
                Some(&link.source),
                Some(&link.destination),
                link.destination.address(),
            ),
            Self::Loopback => (None, None, Ipv4Addr::LOCALHOST),
        };
        let config = SessionConfig::new(Security::Insecure);
        let sessions = inside(far, || {
            let address = format!("tcp:{address}:0").parse().expect("an address");
            let listener = Listener::bind(&address, config.stall_timeout).expect("a port");
            Sessions::new(vec![listener], config.clone()).expect("it listens")
        });
        let path = sessions.addresses().next().expect("one").clone().into();
        let (session, senders) = inside(near, || {
            let (session, first) = Session::dial(vec![path], config.clone()).expect("it listens");
            let others = (1..CHANNELS).map(|_| session.open().expect("it listens"));
            let senders: Vec<_> = iter::once(first).chain(others).collect();
            (session, senders)
        });
        let streams = senders.into_iter().map(|sender| {
            // A stream is passed on when its first byte has come.
            sender.write_both(b"s", &[]).expect("it is read");
            let receiver = sessions
                .next(Duration::from_secs(30))
                .expect("it was opened");
            let mut byte = [0];
            receiver.stream.read_full(&mut byte).expect("it was sent");
            (sender, receiver.stream)
        });
        (streams.collect(), session, sessions)
    }
}

/// Runs something on a thread in the namespace; what it opens stays there.
fn inside<T: Send>(namespace: Option<&Namespace>, what: impl FnOnce() -> T + Send) -> T {
    let Some(namespace) = namespace else {
        return what();
    };
    thread::scope(|scope| {
        let run = || {
            let file =
                fs::File::open(format!("/run/netns/{}", namespace.name())).expect("it is there");
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("root");
            what()
        };
        scope.spawn(run).join().expect("it does not panic")
    })
}

/// Sends for so long.
fn slice(method: &MethodChoice, ends: &Ends, data: &Arc<Vec<u8>>, time: Duration) -> Slice {
    let stats = Arc::new(Stats::default());
    let (stop, arrived) = (AtomicBool::new(false), AtomicU64::new(0));
    let (streams, session, sessions) = ends.connect();
    thread::scope(|scope| {
        let (stop, arrived) = (&stop, &arrived);
        let mut hangups = Vec::new();
        for (number, (near, far)) in streams.into_iter().enumerate() {
            let (near, far) = (Arc::new(near), Arc::new(far));
            hangups.extend([near.clone(), far.clone()]);
            let encoder = method.encoder(LAYOUT, stats.health()).expect("an encoder");
            let mut writer = ChannelWriter::new(near, LAYOUT, encoder, None, stats.clone());
            scope.spawn(move || {
                let mut packet = packet();
                let mut at = number * (data.len() / CHANNELS);
                while !stop.load(Ordering::Relaxed) {
                    let len = packet.pages().len();
                    at = if at + len > data.len() { 0 } else { at };
                    packet.pages_mut().copy_from_slice(&data[at..at + len]);
                    at += len;
                    if writer.write(&mut packet).is_err() {
                        return;
                    }
                }
            });
            let decoder = method.engines().decoder(LAYOUT, stats.health());
            let mut reader = ChannelReader::new(far, LAYOUT, decoder, Arc::default());
            scope.spawn(move || {
                let mut packet = packet();
                while let Ok(Received::Packet) = reader.read(&mut packet) {
                    let len = packet.pages().len() as u64;
                    arrived.fetch_add(len, Ordering::Relaxed);
                }
            });
        }
        let start = Instant::now();
        let cpu_at_start = process_cpu();
        let so_far = || Cell {
            page_bytes: arrived.load(Ordering::Relaxed),
            time: start.elapsed(),
            cpu: process_cpu().saturating_sub(cpu_at_start),
        };
        thread::sleep(time / 2);
        ends.change();
        let half = so_far();
        thread::sleep(time / 2);
        let whole = so_far();
        stop.store(true, Ordering::Relaxed);
        hangups.iter().for_each(|stream| stream.shut_down());
        session.shut_down();
        drop(sessions);
        let second_half = Cell {
            page_bytes: whole.page_bytes - half.page_bytes,
            time: whole.time.saturating_sub(half.time),
            cpu: whole.cpu.saturating_sub(half.cpu),
        };
        Slice { whole, second_half }
    })
}

fn packet() -> Packet {
    let mut packet = Packet::new(LAYOUT);
    packet.ram_mut().block = BlockName::new(b"pc.ram").expect("a name");
    let count = LAYOUT.page_count() as u64;
    let offsets: Vec<u64> = (0..count).map(|page| page << 12).collect();
    let set = packet.ram_mut().set_pages(&offsets, &[], LAYOUT);
    set.expect("as many pages as fit");
    packet
}

fn process_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

fn corpora() -> Vec<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let list = env::var("VAMOOSE_CORPUS");
    let list = list.unwrap_or("target/corpus/memory:target/corpus/silesia".into());
    list.split(':')
        .map(|folder| workspace.join(folder))
        .collect()
}

/// The pages of all files of a folder that are not zero.
fn read(folder: &Path) -> Vec<u8> {
    let files = fs::read_dir(folder).expect("a folder: scripts/corpus makes them");
    let mut files: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    files.sort();
    let mut data = Vec::new();
    for file in files {
        let bytes = fs::read(file).expect("a file");
        let pages = bytes.chunks_exact(LAYOUT.page_size());
        data.extend(pages.filter(|page| !vamoose_codec::is_zero(page)).flatten());
    }
    data
}
