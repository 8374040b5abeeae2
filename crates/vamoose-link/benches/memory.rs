//! What it costs to move guest memory, against a bare socket copy.
//!
//! ```text
//! cargo bench -p vamoose-link --bench memory [-- [small-pages] [WORD…]]    # only the rows with one of these words
//! ```
//! 1 GiB over loopback TCP, on 2 channels, each with a thread at either end. The figures are seconds of
//! CPU, of the threads of each side and in the kernel on their behalf, each the median of rounds that take turns.
//! On loopback the sender's threads do most of the receiver's TCP too, so that only the sum says
//! anything; and MSG_ZEROCOPY ends in a copy there. Memory is in transparent huge pages, unless `small-pages`.
//!
//! Two bare copies: of one buffer of 512 KiB, which stays in the cache, and of as much memory as the guest
//! has. What is between these two is memory traffic, that nobody who moves a guest can avoid.

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
    time::{Duration, Instant},
};

use multifd::{BlockName, Layout, Method, RamHeader};
use rustix::{
    mm::{Advice, madvise},
    time::{ClockId, clock_gettime},
};
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_link::{ChannelReader, ChannelWriter, Received, Stats, Stream};
use vm_memory::VolatileSlice;

const CHANNELS: usize = 2;
/// Each channel's part of the guest.
const MEMORY: usize = 256 << 20;
/// How often it is sent.
const PASSES: usize = 2;
const ROUNDS: usize = 5;
const BUFFER: usize = 512 * 1024;
const HUGE_PAGE: usize = 2 << 20;
const SMALL_PAGES: &str = "small-pages";

#[derive(Clone, Copy)]
enum What {
    /// One buffer, again and again.
    Buffer,
    /// All of the memory, in buffers' lengths.
    Memory,
    /// Packets of so many bytes.
    Packets {
        bytes: u32,
        /// Whether the pages of a packet lie apart.
        scattered: bool,
        zero_copy: bool,
    },
}

/// Seconds: of the sender's CPU, of the receiver's, by the clock.
type Cost = [f64; 3];

fn main() {
    let packets = |bytes, scattered, zero_copy| What::Packets {
        bytes,
        scattered,
        zero_copy,
    };
    let mut cases = vec![
        ("bare buffer".to_owned(), What::Buffer),
        ("bare memory".to_owned(), What::Memory),
    ];
    for kib in [64, 128, 256, 512, 1024, 4096] {
        let name = format!("none {kib} KiB");
        cases.push((name, packets(kib * 1024, false, false)));
    }
    for kib in [512, 4096] {
        let name = format!("none {kib} KiB scattered");
        cases.push((name, packets(kib * 1024, true, false)));
    }
    for kib in [512, 4096] {
        let name = format!("zero-copy {kib} KiB");
        cases.push((name, packets(kib * 1024, false, true)));
    }
    let mut words: Vec<_> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'))
        .collect();
    let huge = !words.iter().any(|word| word == SMALL_PAGES);
    words.retain(|word| word != SMALL_PAGES);
    cases.retain(|(name, _)| words.is_empty() || words.iter().any(|word| name.contains(word)));

    let guest = || (0..CHANNELS).map(|_| memory(huge)).collect();
    let (mut source, mut destination): (Vec<_>, Vec<_>) = (guest(), guest());
    let mut costs = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for ((_, what), costs) in cases.iter().zip(&mut costs) {
            costs.push(run(*what, &mut source, &mut destination));
        }
    }
    println!("CPU seconds per GiB         source  destination    sum    wall");
    for ((name, _), costs) in cases.iter().zip(&costs) {
        let gib = (CHANNELS * PASSES * MEMORY) as f64 / f64::from(1 << 30);
        let median = |of: &dyn Fn(&Cost) -> f64| {
            let mut values: Vec<f64> = costs.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[ROUNDS / 2] / gib
        };
        println!(
            "{name:<26}  {:>6.3}       {:>6.3} {:>6.3}  {:>6.3}",
            median(&|cost| cost[0]),
            median(&|cost| cost[1]),
            median(&|cost| cost[0] + cost[1]),
            median(&|cost| cost[2]),
        );
    }
}

/// Room for [`aligned`] memory, of huge pages if there are any and they are wanted, as a VMM would have it.
fn memory(huge: bool) -> Vec<u8> {
    let mut memory = vec![0; MEMORY + HUGE_PAGE];
    let part = aligned(&mut memory);
    let advice = if huge {
        Advice::LinuxHugepage
    } else {
        Advice::LinuxNoHugepage
    };
    // SAFETY: The range is this allocation's, and the advice changes nothing but the size of its pages.
    let advised = unsafe { madvise(part.as_mut_ptr().cast(), part.len(), advice) };
    advised.expect("the kernel has transparent huge pages");
    part.fill(1);
    memory
}

fn aligned(memory: &mut [u8]) -> &mut [u8] {
    let skip = memory.as_ptr().align_offset(HUGE_PAGE);
    &mut memory[skip..][..MEMORY]
}

/// Moves all of the memory, and says what that cost.
fn run(what: What, source: &mut [Vec<u8>], destination: &mut [Vec<u8>]) -> Cost {
    let start = Instant::now();
    thread::scope(|scope| {
        let mut senders = Vec::new();
        let mut receivers = Vec::new();
        for (from, to) in source.iter_mut().zip(destination) {
            let (near, far) = connection();
            let (from, to) = (aligned(from), aligned(to));
            senders.push(scope.spawn(move || cpu_time_of(|| send(what, near, from))));
            receivers.push(scope.spawn(move || cpu_time_of(|| receive(what, far, to))));
        }
        let [sent, received] = [senders, receivers].map(|threads| {
            let times = threads
                .into_iter()
                .map(|thread| thread.join().expect("it works"));
            times.sum::<Duration>().as_secs_f64()
        });
        [sent, received, start.elapsed().as_secs_f64()]
    })
}

fn send(what: What, mut stream: TcpStream, memory: &mut [u8]) {
    let (packet_bytes, scattered, zero_copy) = match what {
        What::Buffer => {
            for _ in 0..PASSES * MEMORY / BUFFER {
                stream.write_all(&memory[..BUFFER]).expect("it is read");
            }
            return;
        }
        What::Memory => {
            for buffer in (0..PASSES).flat_map(|_| memory.chunks(BUFFER)) {
                stream.write_all(buffer).expect("it is read");
            }
            return;
        }
        What::Packets {
            bytes,
            scattered,
            zero_copy,
        } => (bytes, scattered, zero_copy),
    };
    let layout = layout(packet_bytes);
    let settings = Settings::new(Method::None, None).expect("a method");
    let encoder = encoder(&settings, layout).expect("an encoder");
    let stream = Arc::new(Stream::from(stream));
    let mut writer = ChannelWriter::new(stream, layout, encoder, None, Arc::default());
    if zero_copy {
        writer
            .enable_zero_copy()
            .expect("it is TCP and method none");
    }
    let memory = VolatileSlice::from(memory);
    let mut header = RamHeader::new(layout);
    let mut pages = Vec::new();
    for _ in 0..PASSES {
        for packet in 0..MEMORY / layout.packet_bytes() {
            let offsets = offsets(packet, scattered, layout);
            header.block = BlockName::new(b"pc.ram").expect("a name");
            let set = header.set_pages(&offsets, &[], layout);
            set.expect("as many pages as fit");
            slices(&header, &memory, &mut pages, layout);
            writer
                .write_memory(&mut header, &pages)
                .expect("it is read");
        }
        writer.write_sync(0).expect("it is read");
    }
    writer.finish();
}

fn receive(what: What, mut stream: TcpStream, memory: &mut [u8]) {
    let layout = match what {
        What::Buffer => {
            while stream.read(&mut memory[..BUFFER]).expect("it works") > 0 {}
            return;
        }
        What::Memory => {
            for buffer in (0..PASSES).flat_map(|_| 0..MEMORY / BUFFER) {
                let buffer = &mut memory[buffer * BUFFER..][..BUFFER];
                stream.read_exact(buffer).expect("it is written");
            }
            return;
        }
        What::Packets { bytes, .. } => layout(bytes),
    };
    let (stream, stats) = (Arc::new(Stream::from(stream)), Arc::new(Stats::default()));
    let mut reader = ChannelReader::new(stream, layout, Decoder::new(layout), stats);
    let memory = VolatileSlice::from(memory);
    let mut header = RamHeader::new(layout);
    let mut pages = Vec::new();
    while reader.read_header(&mut header).expect("it is written") == Received::Packet {
        slices(&header, &memory, &mut pages, layout);
        reader.read_pages(&header, &pages).expect("it is written");
    }
}

fn layout(packet_bytes: u32) -> Layout {
    let layout = Layout::X86.with_packet_bytes(packet_bytes);
    layout.expect("a power of two in the range")
}

/// The pages of a packet: those that follow each other, or every so many.
fn offsets(packet: usize, scattered: bool, layout: Layout) -> Vec<u64> {
    let (count, packets) = (layout.page_count(), MEMORY / layout.packet_bytes());
    let page = |index| {
        if scattered {
            index * packets + packet
        } else {
            packet * count + index
        }
    };
    let bytes = layout.page_size();
    (0..count)
        .map(|index| (page(index) * bytes) as u64)
        .collect()
}

fn slices<'a>(
    header: &RamHeader,
    memory: &VolatileSlice<'a>,
    pages: &mut Vec<VolatileSlice<'a>>,
    layout: Layout,
) {
    pages.clear();
    pages.extend(header.normal_offsets().iter().map(|offset| {
        let offset = usize::try_from(*offset).expect("it is in memory");
        let page = memory.subslice(offset, layout.page_size());
        page.expect("it is in memory")
    }));
}

fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = TcpStream::connect(listener.local_addr().expect("a port")).expect("it listens");
    let (far, _) = listener.accept().expect("it has connected");
    near.set_nodelay(true).expect("it is TCP");
    (near, far)
}

fn cpu_time_of(work: impl FnOnce()) -> Duration {
    let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("it is positive");
    let start = now();
    work();
    now() - start
}
