//! `make soak`: migrations of all kinds with faults at random, for hours, until a promise is broken.
//!
//! | lane | what goes on, and what stays for the whole time |
//! |---|---|
//! | libvirt | two hosts, gateways and one guest that writes to its disk; `virsh migrate` in all ways of `make libvirt`, with cuts, kills and cancellations |
//! | gateways | two gateways; guests by the dozen and strangers by the hundred, while connections break and configurations are read again |
//! | faults | the campaign of `make faults`: `migrate` and `serve`, each for one guest, killed, cut and cancelled |
//!
//! Each lane checks its guests as the test does that it is made of. The second one also checks, after each round, that its
//! gateways have closed every descriptor, and at the end that their memory has not grown. Each round is a line of
//! target/soak/samples.csv.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write as _,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use fastrand::Rng;
use lab::{
    middlebox::{Change, Flow, Middlebox, Which},
    proc,
    qemu::{self, Binary},
    target_dir,
    vamoose::Vamoose,
};
use rustix::process::Signal;

use crate::{
    campaign::{
        self,
        options::{JOBS, MINUTES, SEED},
        sandbox,
    },
    common::{LIMIT, MIB, number},
    gateway::load::Crowd,
    libvirt::{
        hosts::{self, Generation},
        matrix,
    },
};

/// Of a round in the lane of gateways.
const GUESTS: u16 = 8;
const STRANGERS: usize = 200;

/// What a QEMU 10.0 says at its end if multifd is switched off before it has cleaned up.
const CLEANING_UP: &str = "yank_unregister_instance: Assertion";

/// What resident memory may grow by between the first half of the rounds, but at least this many, and the last round.
const GROWTH: u64 = 8 * MIB;
const WARM_UP: usize = 50;

/// SOAK_HOURS and SOAK_SEED set how long and which faults.
#[test]
#[ignore = "hours, as root"]
fn no_promise_is_broken_for_hours() -> Result<()> {
    let hours: f64 = number("SOAK_HOURS", 8.0)?;
    let seed = number("SOAK_SEED", fastrand::u64(..1_000_000))?;
    let binary = qemu::available().last().context("there is no QEMU here")?;
    let generation = hosts::available_or_skip()?.pop();
    let generation = generation.context("there is no libvirt here")?;
    let soak = Soak::new(Duration::from_secs_f64(hours * 3600.0))?;
    println!("SOAK_HOURS={hours} SOAK_SEED={seed}");
    let lanes: [(&str, &(dyn Fn() -> Result<()> + Sync)); 3] = [
        ("libvirt", &|| soak.libvirt(&generation, seed)),
        ("gateways", &|| soak.gateways(binary, seed)),
        ("faults", &|| soak.faults(seed)),
    ];
    let results = thread::scope(|scope| {
        let soak = &soak;
        let running = lanes.map(|(name, lane)| {
            scope.spawn(move || {
                let result = lane().with_context(|| name.to_owned());
                soak.is_broken.fetch_or(result.is_err(), Ordering::Relaxed);
                result
            })
        });
        running.map(|lane| {
            lane.join()
                .unwrap_or_else(|_| Err(anyhow!("a lane panicked")))
        })
    });
    soak.print()?;
    let broken = results.into_iter().filter_map(Result::err);
    let broken: Vec<_> = broken.map(|error| format!("{error:#}")).collect();
    ensure!(broken.is_empty(), "{}", broken.join("\n\n"));
    Ok(())
}

/// What lanes have in common.
struct Soak {
    begun: Instant,
    time: Duration,
    is_broken: AtomicBool,
    /// How often each thing was done.
    counts: Mutex<BTreeMap<String, u64>>,
    samples: Mutex<File>,
    folder: PathBuf,
}

impl Soak {
    fn new(time: Duration) -> Result<Self> {
        let folder = target_dir().join("soak");
        fs::create_dir_all(&folder)?;
        let mut samples = File::create(folder.join("samples.csv"))?;
        writeln!(samples, "seconds,gateway,descriptors,resident_bytes")?;
        Ok(Self {
            begun: Instant::now(),
            time,
            is_broken: AtomicBool::new(false),
            counts: Mutex::default(),
            samples: Mutex::new(samples),
            folder,
        })
    }

    fn goes_on(&self) -> bool {
        !self.is_broken.load(Ordering::Relaxed) && self.begun.elapsed() < self.time
    }

    fn count(&self, what: &str, times: u64) {
        *self
            .counts
            .lock()
            .unwrap()
            .entry(what.to_owned())
            .or_default() += times;
    }

    fn print(&self) -> Result<()> {
        let hours = self.begun.elapsed().as_secs_f64() / 3600.0;
        println!("| in {hours:.2} hours | times |\n|---|---:|");
        for (what, times) in &*self.counts.lock().unwrap() {
            println!("| {what} | {times} |");
        }
        Ok(())
    }

    fn libvirt(&self, generation: &Generation, seed: u64) -> Result<()> {
        let mut random = Rng::with_seed(seed);
        loop {
            let choose = |cases| self.goes_on().then(|| random.usize(..cases));
            let moved = |case: &str| self.count(&format!("virsh: {case}"), 1);
            match matrix::moves_on(generation, choose, moved) {
                // Libvirt switches multifd off while the source's QEMU cleans up after a failure: docs/qemu.md.
                Err(error) if format!("{error:#}").contains(CLEANING_UP) => {
                    self.count("virsh: guest ended by QEMU's assertion", 1);
                }
                ended => return ended,
            }
        }
    }

    fn gateways(&self, binary: &Binary, seed: u64) -> Result<()> {
        let mut random = Rng::with_seed(seed);
        let mut middlebox = None;
        let crowd = Crowd::new(GUESTS, |far| {
            let between = middlebox.insert(Middlebox::new(far)?);
            Ok(between.address())
        })?;
        let middlebox = middlebox.context("nothing is between the gateways")?;
        let at_rest = self.sample(&crowd, &[usize::MAX; 2])?.map(|(open, _)| open);
        let mut memory = Vec::new();
        while self.goes_on() {
            let mut guests = crowd.guests(binary)?;
            let (done, until) = mpsc::channel();
            let failed = thread::scope(|scope| {
                let (random, middlebox, crowd) = (&mut random, &middlebox, &crowd);
                let breaking = scope.spawn(move || self.breaks(random, middlebox, crowd, &until));
                let failed = crowd.moves(&mut guests, STRANGERS);
                drop(done);
                breaking
                    .join()
                    .map_err(|_| anyhow!("breaking panicked"))??;
                failed.with_context(|| crowd.said())
            })?;
            let stayed = failed.len() as u64;
            self.count("gateways: guests moved", u64::from(GUESTS) - stayed);
            self.count("gateways: guests stayed", stayed);
            drop(guests);
            let now = self
                .sample(&crowd, &at_rest)
                .with_context(|| crowd.said())?;
            memory.push(now.map(|(_, resident)| resident));
        }
        ensure!(!memory.is_empty(), "no round ended");
        // Allocators keep what they have once needed, so the first rounds say little.
        let early = memory.iter().take((memory.len() / 2).max(WARM_UP));
        let early = early
            .copied()
            .reduce(|a, b| [a[0].max(b[0]), a[1].max(b[1])]);
        for (early, last) in early.into_iter().zip(memory.last()) {
            let grown = (0..2).any(|gateway| last[gateway] > early[gateway] + GROWTH);
            ensure!(
                !grown,
                "resident memory was at most {early:?} first, and is {last:?}"
            );
        }
        Ok(())
    }

    /// Breaks connections between two gateways until their migrations are done.
    fn breaks(
        &self,
        random: &mut Rng,
        middlebox: &Middlebox,
        crowd: &Crowd,
        done: &mpsc::Receiver<()>,
    ) -> Result<()> {
        let wait = |random: &mut Rng, millis| {
            let time = Duration::from_millis(random.u64(..millis));
            done.recv_timeout(time) == Err(RecvTimeoutError::Timeout)
        };
        while wait(random, 2000) {
            let flow = |flow| middlebox.apply(Which::All, Change::Flow(flow));
            let name = match random.u8(..5) {
                0 => {
                    for gateway in crowd.gateways() {
                        gateway.signal(Signal::HUP)?;
                    }
                    "configurations read again"
                }
                1 => {
                    flow(Flow::Hold);
                    wait(random, 3000);
                    flow(Flow::Pass);
                    "connections held"
                }
                2 => {
                    flow(Flow::Drop);
                    "connections silenced"
                }
                3 => {
                    middlebox.apply(Which::All, Change::Close);
                    "connections closed"
                }
                _ => {
                    middlebox.apply(Which::All, Change::Reset);
                    "connections reset"
                }
            };
            self.count(&format!("gateways: {name}"), 1);
        }
        Ok(())
    }

    /// The open descriptors and resident memory of both gateways, as soon as no more are open than this.
    fn sample(&self, crowd: &Crowd, most: &[usize; 2]) -> Result<[(usize, u64); 2]> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let [near, far] = crowd.gateways().map(Vamoose::pid);
            let now = |pid| anyhow::Ok((proc::descriptors(pid)?, proc::resident_memory(pid)?));
            let now = [now(near)?, now(far)?];
            if now.iter().zip(most).all(|((open, _), most)| open <= most) {
                let seconds = self.begun.elapsed().as_secs();
                let mut samples = self.samples.lock().unwrap();
                for (name, (open, resident)) in ["source", "destination"].iter().zip(now) {
                    writeln!(samples, "{seconds},{name},{open},{resident}")?;
                }
                return Ok(now);
            }
            ensure!(
                Instant::now() < deadline,
                "gateways hold {now:?} descriptors and bytes, and began with {most:?} descriptors"
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn faults(&self, seed: u64) -> Result<()> {
        let left = self.time.saturating_sub(self.begun.elapsed());
        let minutes = (left.as_secs_f64() / 60.0).ceil().to_string();
        let seed = seed.to_string();
        let log = self.folder.join("faults.log");
        let mut campaign = sandbox::command(campaign::TEST)?;
        campaign.envs([(JOBS, "1"), (MINUTES, &minutes), (SEED, &seed)]);
        let campaign = campaign.stdout(File::create(&log)?).spawn();
        let mut campaign = campaign.context("starting the campaign")?;
        let ended = loop {
            if let Some(ended) = campaign.try_wait()? {
                break ended;
            }
            if self.is_broken.load(Ordering::Relaxed) {
                campaign.kill()?;
            }
            thread::sleep(Duration::from_millis(200));
        };
        let said = fs::read_to_string(&log)?;
        let is_done = ended.success() || self.is_broken.load(Ordering::Relaxed);
        ensure!(is_done, "{ended}\n{said}");
        println!("{said}");
        Ok(())
    }
}
