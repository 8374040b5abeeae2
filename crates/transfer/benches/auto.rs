//! Method auto beside every fixed method, over links of several rates.
//!
//! ```text
//! cargo bench -p transfer --bench auto -- [SECONDS] [LINK…]      as root, for links: 100M 1G 10G 25G free loopback
//! VAMOOSE_CORPUS=dir[:dir…]                                      other data than target/corpus/{memory,silesia}
//! ```
//! Real data goes through the writers of two channels, over TCP between two network namespaces joined by
//! a link of that rate (or one without a limit, or loopback), to readers that decode it, all in this one
//! process. In each cell the methods take turns in short slices, so that the noise of the machine hits all
//! alike; SECONDS is the time of a method in a cell (12 if not said). A slice starts with new connections
//! and encoders, as a migration does. Its first quarter is not counted: buffers fill, auto learns.
//!
//! Prints a Markdown table: bytes of pages that arrived, in MB (10^6) per second, and CPU seconds of the
//! whole process, both ends, per GiB of them.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    reason = "a benchmark fails by panicking and prints rounded figures"
)]

use std::{
    env, fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use codec::{Engines, Settings};
use lab::net::{Link, Namespace};
use multifd::{BlockName, Layout, Method};
use rustix::{
    thread::{LinkNameSpaceType, move_into_link_name_space},
    time::{ClockId, clock_gettime},
};
use std::os::fd::AsFd;
use transfer::{ChannelReader, ChannelWriter, Packet, Received, Stats, Stream};

const LAYOUT: Layout = Layout::X86;
const CHANNELS: usize = 2;
const SLICE: Duration = Duration::from_secs(3);
const LINKS: [&str; 5] = ["100M", "1G", "10G", "free", "loopback"];

const METHODS: [(Option<Method>, Option<i32>); 14] = [
    (None, None),
    (Some(Method::None), None),
    (Some(Method::Lz4), Some(8)),
    (Some(Method::Lz4), Some(1)),
    (Some(Method::ZstdFrames), Some(-1)),
    (Some(Method::ZstdFrames), Some(1)),
    (Some(Method::ZstdFrames), Some(3)),
    (Some(Method::ZstdFrames), Some(6)),
    (Some(Method::ZstdFrames), Some(9)),
    (Some(Method::Zstd), Some(1)),
    (Some(Method::Zstd), Some(3)),
    (Some(Method::Zlib), Some(1)),
    (Some(Method::Qpl), Some(0)),
    (Some(Method::Qatzip), Some(1)),
];

fn main() {
    // Cargo adds `--bench`.
    let mut words: Vec<_> = env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    let seconds = words.first().and_then(|word| word.parse().ok());
    if seconds.is_some() {
        words.remove(0);
    }
    let seconds = Duration::from_secs(seconds.unwrap_or(12));
    let links: Vec<&str> = match words.is_empty() {
        true => LINKS.to_vec(),
        false => words.iter().map(String::as_str).collect(),
    };
    for folder in corpora() {
        let name = folder.file_name().expect("a name").to_string_lossy();
        let data = Arc::new(read(&folder));
        println!("\n{name}: page MB/s (CPU-s per GiB)\n");
        let methods = METHODS.map(|(method, level)| label(method, level));
        println!("| link | {} | auto / best |", methods.join(" | "));
        println!("|---|{}---|", "---|".repeat(methods.len()));
        for link in &links {
            let cells = measure(link, &data, seconds);
            let best = cells[1..].iter().map(Cell::rate).fold(0.0, f64::max);
            let row: Vec<_> = cells.iter().map(Cell::show).collect();
            let share = cells[0].rate() / best;
            println!("| {link} | {} | {share:.2} |", row.join(" | "));
        }
    }
}

fn label(method: Option<Method>, level: Option<i32>) -> String {
    let level = level.map(|level| format!(" {level}")).unwrap_or_default();
    method.map_or("auto".into(), |method| format!("{method}{level}"))
}

/// What a method did on a link.
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

    fn show(&self) -> String {
        let gib = self.page_bytes as f64 / f64::from(1 << 30);
        format!("{:.0} ({:.2})", self.rate(), self.cpu.as_secs_f64() / gib)
    }
}

fn measure(link: &str, data: &Arc<Vec<u8>>, seconds: Duration) -> Vec<Cell> {
    let ends = ends(link);
    let mut cells = vec![Cell::default(); METHODS.len()];
    while cells.iter().any(|cell| cell.time < seconds) {
        for (cell, (method, level)) in cells.iter_mut().zip(METHODS) {
            let settings = method.map_or(Settings::auto(), |method| {
                Settings::new(method, level).expect("a level of the method")
            });
            slice(&Engines::software(settings), &ends, data, cell);
        }
    }
    cells
}

/// Where the two ends of the link are.
enum Ends {
    Link(Link),
    Loopback,
}

fn ends(link: &str) -> Ends {
    let rate = match link {
        "loopback" => return Ends::Loopback,
        "free" => None,
        rate => {
            let (number, unit) = rate.split_at(rate.len() - 1);
            let number: u64 = number.parse().expect("a rate such as 10G");
            let unit = if unit == "G" {
                1_000_000_000
            } else {
                1_000_000
            };
            Some(number * unit)
        }
    };
    Ends::Link(Link::new(rate).expect("root makes links"))
}

impl Ends {
    /// A connection from one end to the other.
    fn connect(&self) -> (Stream, Stream) {
        let (near, far, address) = match self {
            Self::Link(link) => (
                Some(&link.source),
                Some(&link.destination),
                link.destination.address(),
            ),
            Self::Loopback => (None, None, Ipv4Addr::LOCALHOST),
        };
        let listener = inside(far, || std::net::TcpListener::bind((address, 0))).expect("a port");
        let target = listener.local_addr().expect("it has one");
        let sender = inside(near, || std::net::TcpStream::connect(target)).expect("a connection");
        let (receiver, _) = listener.accept().expect("it was dialled");
        sender.set_nodelay(true).expect("an option");
        (Stream::Tcp(sender), Stream::Tcp(receiver))
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

/// Sends for the time of a slice and adds what arrived to the cell.
fn slice(engines: &Engines, ends: &Ends, data: &Arc<Vec<u8>>, cell: &mut Cell) {
    let stats = Arc::new(Stats::default());
    let (stop, arrived) = (AtomicBool::new(false), AtomicU64::new(0));
    let connections: Vec<_> = (0..CHANNELS).map(|_| ends.connect()).collect();
    thread::scope(|scope| {
        let (stop, arrived) = (&stop, &arrived);
        let mut hangups = Vec::new();
        for (number, (near, far)) in connections.into_iter().enumerate() {
            let (near, far) = (Arc::new(near), Arc::new(far));
            hangups.push(near.clone());
            let encoder = engines.encoder(LAYOUT, stats.health()).expect("an encoder");
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
            let decoder = engines.decoder(LAYOUT, stats.health());
            let mut reader = ChannelReader::new(far, LAYOUT, decoder, Arc::default());
            scope.spawn(move || {
                let mut packet = packet();
                while let Ok(Received::Packet) = reader.read(&mut packet) {
                    let len = packet.pages().len() as u64;
                    arrived.fetch_add(len, Ordering::Relaxed);
                }
            });
        }
        thread::sleep(SLICE / 4);
        let (before, cpu, start) = (
            arrived.load(Ordering::Relaxed),
            process_cpu(),
            Instant::now(),
        );
        thread::sleep(SLICE * 3 / 4);
        cell.page_bytes += arrived.load(Ordering::Relaxed) - before;
        cell.cpu += process_cpu() - cpu;
        cell.time += start.elapsed();
        stop.store(true, Ordering::Relaxed);
        hangups.iter().for_each(|stream| stream.shut_down());
    });
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
        data.extend(pages.filter(|page| !codec::is_zero(page)).flatten());
    }
    data
}
