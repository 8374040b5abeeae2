//! What several streams bring a channel whose engine has a latency.
//!
//! ```text
//! cargo bench -p vamoose-link --bench streams
//! ```
//! Packets go through one channel's writers to a socket whose other end is drained: with an engine that
//! answers at once, and with one that takes 100 us longer for each packet, as a device might. Throughput
//! is by the clock, since it is waiting that counts here; each figure is the median of rounds that take
//! turns, so that only ratios within one run mean something.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    reason = "a benchmark fails by panicking and prints rounded figures"
)]

use std::{
    io::{Read as _, Result},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use multifd::{BlockName, Layout, Method};
use vamoose_codec::{Accel, Engines, Faults, Registry, Settings, Verify};
use vamoose_link::{ChannelWriter, Packet, Stats, Stream};

const LAYOUT: Layout = Layout::X86;
const DELAYS: [&str; 2] = ["delay=0us", "delay=100us"];
const STREAMS: [usize; 5] = [1, 2, 3, 4, 8];
/// In each measurement, however they are cut into packets.
const PAGES: usize = 400 * 128;
const ROUNDS: usize = 5;

fn main() {
    println!("method   pages  delay        streams  MB/s by the clock");
    // In small packets the delay is most of the time, as it is for a device that is faster than this
    // machine's processors.
    for (method, level, pages) in [
        (Method::Lz4, 8, 128),
        (Method::Lz4, 8, 8),
        (Method::Qatzip, 1, 128),
    ] {
        let cases: Vec<_> = DELAYS
            .iter()
            .flat_map(|delay| STREAMS.map(|streams| (*delay, streams)))
            .collect();
        let mut seconds = vec![Vec::new(); cases.len()];
        for _ in 0..ROUNDS {
            for (case, seconds) in cases.iter().zip(&mut seconds) {
                let engines = engines(method, level, case.0);
                let time = run(&engines, pages, case.1).expect("sockets work");
                seconds.push(time.as_secs_f64());
            }
        }
        for ((delay, streams), mut seconds) in cases.into_iter().zip(seconds) {
            seconds.sort_by(f64::total_cmp);
            let bytes = (PAGES * LAYOUT.page_size()) as f64;
            let rate = bytes / seconds[ROUNDS / 2] / 1e6;
            println!("{method:<8} {pages:>5}  {delay:<12} {streams:>7}  {rate:>8.0}");
        }
    }
}

/// Sends all pages over one channel, so many in a packet, and says how long that took.
fn run(engines: &Engines, pages: usize, streams: usize) -> Result<Duration> {
    let (mut far, near) = UnixStream::pair()?;
    let stats = Arc::new(Stats::default());
    let encoder = || engines.encoder(LAYOUT, stats.health()).expect("an encoder");
    let first = ChannelWriter::new(
        Arc::new(Stream::from(near)),
        LAYOUT,
        encoder(),
        None,
        stats.clone(),
    );
    let mut writers: Vec<_> = (1..streams).map(|_| first.sibling(encoder())).collect();
    writers.push(first);

    let drain = thread::spawn(move || {
        let mut buffer = vec![0; 1 << 20];
        while far.read(&mut buffer).is_ok_and(|read| read > 0) {}
    });
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    thread::scope(|scope| {
        for mut writer in writers {
            let next = &next;
            scope.spawn(move || {
                let mut packet = packet(pages);
                while next.fetch_add(pages, Ordering::Relaxed) < PAGES {
                    writer.write(&mut packet).expect("it is drained");
                }
                writer.finish();
            });
        }
    });
    let time = start.elapsed();
    drain.join().expect("it does not fail");
    Ok(time)
}

fn engines(method: Method, level: i32, faults: &str) -> Engines {
    let settings = Settings::new(method, Some(level)).expect("a level of the method");
    let faults: Faults = faults.parse().expect("a delay");
    Arc::new(Registry::with_faults(&faults))
        .choose(settings, Accel::Auto, Verify::Off)
        .expect("it is there")
}

/// Of text-like pages, about 2 : 1.
fn packet(pages: usize) -> Packet {
    let mut packet = Packet::new(LAYOUT);
    packet.ram_mut().block = BlockName::new(b"pc.ram").expect("a name");
    let offsets: Vec<u64> = (0..pages as u64).map(|page| page << 12).collect();
    let set = packet.ram_mut().set_pages(&offsets, &[], LAYOUT);
    set.expect("as many pages as fit");
    let mut state = 1_u64;
    for word in packet.pages_mut().chunks_exact_mut(8) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let kinds: [&[u8; 8]; 4] = [b"migrate ", b"the page", b"downtime", b"dirtylog"];
        if state >> 63 == 0 {
            word.copy_from_slice(&state.to_le_bytes());
        } else {
            word.copy_from_slice(kinds[usize::from(state.to_be_bytes()[2] & 3)]);
        }
    }
    packet
}
