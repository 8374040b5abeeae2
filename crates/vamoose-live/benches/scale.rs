//! What the size of a guest costs, whatever it does: dirty logs, bitmaps, the search for what was touched.
//!
//! ```text
//! cargo bench -p vamoose-live --bench scale [-- GIB MEMORY LOG]
//! ```
//! A simulated guest of 64 vCPUs moves within this process over loopback. None of its memory takes any: `untouched` pages are
//! not there, `mapped` ones are all the kernel's shared page of zeros, so that the page tables are those of a guest
//! that has touched everything in pages of 4 KiB (2 GiB of them for a TiB, on either side).
//!
//! - `kvm`: a log that counts calls, and makes up what was written: 512 pages of each GiB during the first round, 64 during the
//!   second, 16 before the guest is paused; in a row, or if `mapped` as far apart as can be. KVM interrupts every vCPU
//!   for each call that clears.
//! - `userfaultfd`: the real log; nobody writes.
//!
//! CPU is of the whole process, its peak memory without page tables.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    reason = "a benchmark fails by panicking and prints rounded figures"
)]

use std::{
    env, fs,
    ops::Range,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mm::{Advice, madvise},
    time::{ClockId, clock_gettime},
};
use vamoose_live::{
    Acceptor, Destination, DestinationConfig, DestinationGuest, GuestError, Listener, Ram,
    RamBlock, Source, SourceConfig, SourceGuest, Status, Switchover, Transport,
    causes::DirtyLogError,
    compression::{Engines, Method, Settings},
    dirty::{DirtyLog, UserfaultLog},
};
use vm_memory::{MmapRegion, mmap::MmapRegionBuilder};

const VCPUS: usize = 64;
const CHANNELS: u8 = 8;

/// GiB, memory, log.
const CASES: [(usize, &str, &str); 8] = [
    (64, "untouched", "kvm"),
    (256, "untouched", "kvm"),
    (1024, "untouched", "kvm"),
    (64, "mapped", "kvm"),
    (256, "mapped", "kvm"),
    (1024, "mapped", "kvm"),
    (64, "mapped", "userfaultfd"),
    (256, "mapped", "userfaultfd"),
];

fn main() {
    let args: Vec<_> = env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    if let [gib, memory, log] = &args[..] {
        let gib = gib.parse().expect("a number of GiB");
        return run(gib, memory == "mapped", log == "userfaultfd");
    }
    println!(
        "| guest | memory | log | setup ms | total ms | last round ms | CPU s | CPU ms / GiB | watch | clear | vCPUs interrupted | collect | peak MiB |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (gib, memory, log) in CASES {
        let program = env::current_exe().expect("this program");
        // A process each, for its peak of memory.
        let ended = Command::new(program)
            .args([&gib.to_string(), memory, log])
            .status()
            .expect("it starts");
        assert!(ended.success(), "{gib} GiB, {memory}, {log}");
    }
}

fn run(gib: usize, mapped: bool, userfaultfd: bool) {
    let (here, there) = (ram(gib, mapped), ram(gib, mapped));
    let counting = Arc::new(Log {
        apart: mapped,
        ..Log::default()
    });
    let log: Arc<dyn DirtyLog> = match userfaultfd {
        true => Arc::new(UserfaultLog::new(&here).expect("userfaultfd")),
        false => counting.clone(),
    };
    let settings = Settings::new(Method::None, None).expect("a method");
    let engines = Engines::software(settings);
    let listener = Listener::bind(
        &"tcp:127.0.0.1:0".parse().expect("an address"),
        Duration::from_secs(60),
    );
    let listener = listener.expect("a port");
    let to = Transport::Plain(listener.address().clone());
    let config = DestinationConfig::new(engines.clone());
    let destination = Destination::new(Acceptor::Plain(listener), there, config);
    let mut destination = destination.expect("a destination");
    let mut config = SourceConfig::new(engines);
    config.channels = CHANNELS;
    config.downtime_max = Duration::from_secs(600);
    config.stall_timeout = Duration::from_secs(600);
    let source = Source::with_config(here, log, config).expect("a source");

    let (cpu, began) = (clock_gettime(ClockId::ProcessCPUTime), Instant::now());
    let status = thread::scope(|scope| {
        scope.spawn(move || destination.run(&mut Vm::default()).expect("a guest"));
        source.run(&to, &mut Vm::default()).expect("it moves")
    });
    let (total, cpu_then) = (began.elapsed(), clock_gettime(ClockId::ProcessCPUTime));
    let cpu =
        Duration::try_from(cpu_then).expect("a time") - Duration::try_from(cpu).expect("a time");
    let cpu = cpu.as_secs_f64();
    let parts = status.downtime_parts.expect("it was paused");
    let calls = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let clears = calls(&counting.clears) + calls(&counting.watches);
    println!(
        "| {gib} GiB | {} | {} | {} | {} | {:.1} | {cpu:.2} | {:.2} | {} | {} | {} | {} | {:.0} |",
        if mapped { "mapped" } else { "untouched" },
        if userfaultfd { "userfaultfd" } else { "kvm" },
        status.setup_time.as_millis(),
        total.as_millis(),
        parts.last_round.as_secs_f64() * 1e3,
        cpu * 1e3 / gib as f64,
        calls(&counting.watches),
        calls(&counting.clears),
        clears * VCPUS,
        calls(&counting.collects),
        peak_kib() / 1024.0,
    );
}

/// So many GiB of addresses.
fn ram(gib: usize, mapped: bool) -> Ram {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let region: MmapRegion = MmapRegionBuilder::new(gib << 30)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(flags)
        .build()
        .expect("addresses");
    let advise = |advice| {
        // SAFETY: it is mapped, nothing in it changes, and nothing has a reference to it.
        unsafe { madvise(region.as_ptr().cast(), region.size(), advice) }.expect("advice is taken");
    };
    advise(Advice::LinuxNoHugepage);
    if mapped {
        advise(Advice::LinuxPopulateRead);
    }
    Ram::new(vec![
        RamBlock::new("ram", Arc::new(region)).expect("a name"),
    ])
    .expect("memory")
}

/// Makes up what the guest has written.
#[derive(Default)]
struct Log {
    /// The pages lie apart.
    apart: bool,
    watches: AtomicUsize,
    clears: AtomicUsize,
    collects: AtomicUsize,
}

impl DirtyLog for Log {
    fn start(&self) -> Result<(), DirtyLogError> {
        Ok(())
    }

    fn watch(&self, _: usize, _: Range<usize>) -> Result<(), DirtyLogError> {
        self.watches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn collect(&self, _: usize, _: usize, dirty: &mut [u64]) -> Result<(), DirtyLogError> {
        let round = self.collects.fetch_add(1, Ordering::Relaxed);
        let pages = [512, 64, 16][round.min(2)];
        for gib in dirty.chunks_mut((1 << 18) / 64) {
            for page in 0..pages {
                let page = match self.apart {
                    true => page * ((1 << 18) / pages),
                    false => page,
                };
                gib[page / 64] |= 1 << (page % 64);
            }
        }
        Ok(())
    }

    fn clear(&self, _: usize, _: usize, _: &[u64]) -> Result<(), DirtyLogError> {
        self.clears.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        Ok(())
    }
}

/// Switches over after the third round.
#[derive(Default)]
struct Vm {
    rounds: usize,
}

impl SourceGuest for Vm {
    fn pause(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(vec![7])
    }

    fn switchover(&mut self, _: &Status) -> Switchover {
        self.rounds += 1;
        match self.rounds {
            ..2 => Switchover::Forbid,
            _ => Switchover::Force,
        }
    }
}

impl DestinationGuest for Vm {
    fn load(&mut self, _: &[u8]) -> Result<(), GuestError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
}

/// The process's peak of resident memory.
fn peak_kib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").expect("there is /proc");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    number
        .and_then(|number| number.parse().ok())
        .expect("a number of KiB")
}
