//! One migration between two guests of this process, for all end-to-end tests.
//!
//! ```text
//!  Stage   source: Guest, Ram                       destination: Ram, Guest (when it has arrived)
//!  Here    SourceGuest of the source                There   DestinationGuest of the destination
//! ```
//! The stage sees to what must never be: at the moment of the switchover the whole memory of both sides is compared,
//! byte by byte, and no guest begins to run while the other one does. Hooks let a test do anything at each step
//! of the two.

#![allow(
    dead_code,
    reason = "each test program uses another part of what they share"
)]

pub(crate) mod cuts;
pub(crate) mod proxy;
pub(crate) mod sessions;
pub(crate) mod snapshot;

use std::{
    fs::File,
    io::{self, Write as _},
    net::SocketAddr,
    num::NonZeroU64,
    process,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, SystemTime},
};

use idxd::{Queue, Tuning, offload::Devices};
use idxd_model::{Model, PortalKind};
use lab::middlebox::Middlebox;
use multifd::Method;
use rustix::fs::{MemfdFlags, memfd_create};
use testguest::{Backing, Config, Fill, Guest, Kind, Memory, Pattern, kvm_available};
use vamoose_codec::{Engines, Settings, Verify};
use vamoose_live::{
    Acceptor, Address, Arrival, Destination, DestinationConfig, DestinationError, DestinationGuest,
    GuestError, GuestLocation, Listener, Ram, RamBlock, Source, SourceConfig, SourceError,
    SourceGuest, Status, Switchover, Transport, ZeroPageDetection,
    compression::MethodChoice,
    dirty::{DirtyLog, KvmDirtyLog, KvmSlot, UserfaultLog},
    dsa::DsaDetection,
};
use vm_memory::{FileOffset, MmapRegion};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const PAGE: usize = 4096;

/// What runs the guests and what finds their writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rig {
    /// Threads, over userfaultfd's log.
    Threads,
    /// A KVM guest, over userfaultfd's log.
    Kvm,
    /// A KVM guest, over KVM's log.
    KvmLog,
}

impl Rig {
    /// All that this host has; prints the missing ones.
    pub(crate) fn all() -> Vec<Self> {
        let mut rigs = Vec::new();
        match UserfaultLog::new(&Shape::default().memory().1) {
            Ok(_) => rigs.push(Self::Threads),
            Err(error) => lab::skipped(&error.to_string()).unwrap(),
        }
        match kvm_available() {
            Ok(()) if !rigs.is_empty() => rigs.extend([Self::Kvm, Self::KvmLog]),
            Ok(()) => rigs.push(Self::KvmLog),
            Err(reason) => lab::skipped(&format!("guests under KVM: {reason}")).unwrap(),
        }
        rigs
    }

    fn kind(self) -> Kind {
        match self {
            Self::Threads => Kind::Threads,
            Self::Kvm | Self::KvmLog => Kind::Kvm,
        }
    }

    /// The log of a migration of `guest`.
    pub(crate) fn log(self, guest: &Guest, ram: &Ram) -> Arc<dyn DirtyLog> {
        match self {
            Self::Threads | Self::Kvm => Arc::new(UserfaultLog::new(ram).unwrap()),
            Self::KvmLog => Arc::new(kvm_log(guest, ram)),
        }
    }
}

#[allow(
    unsafe_code,
    reason = "the log has to be told which memory the VM's slots show"
)]
fn kvm_log(guest: &Guest, ram: &Ram) -> KvmDirtyLog {
    let slots = guest.slots().iter().map(|slot| KvmSlot {
        slot: slot.slot,
        flags: slot.flags,
        guest_phys_addr: slot.guest_address,
        block: slot.block,
        offset: slot.offset,
        len: slot.len,
    });
    // SAFETY: a guest never changes its slots; they show its memory, of which `ram` has the same mappings in
    // the same order.
    unsafe { KvmDirtyLog::new(&guest.vm_fd().unwrap(), slots.collect(), ram) }.unwrap()
}

/// Whether guests cannot be migrated here, which it prints.
pub(crate) fn nothing_to_migrate() -> bool {
    Rig::all().is_empty()
}

/// A guest, as both sides have it.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) rig: Rig,
    pub(crate) backing: Backing,
    /// Bytes of each block; all but the last are multiples of 2 MiB.
    pub(crate) blocks: Vec<u64>,
    pub(crate) vcpus: u8,
    pub(crate) pattern: Pattern,
    /// Pages written per second; as many as it can if there is none.
    pub(crate) rate: Option<u64>,
    pub(crate) working_set: Option<std::ops::Range<u64>>,
    pub(crate) fill: Fill,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            rig: Rig::Threads,
            backing: Backing::Anonymous,
            blocks: vec![2 * MIB, 6 * MIB],
            vcpus: 2,
            pattern: Pattern::Random,
            rate: Some(50_000),
            working_set: None,
            fill: Fill::Mixed,
        }
    }
}

impl Shape {
    /// Memory that was never touched.
    pub(crate) fn memory(&self) -> (Memory, Ram) {
        let name = |index| format!("block{index}");
        let regions = self.blocks.iter().enumerate();
        let regions: Vec<(String, Arc<MmapRegion>)> = regions
            .map(|(index, bytes)| (name(index), Arc::new(map(self.backing, *bytes))))
            .collect();
        let blocks = regions
            .iter()
            .map(|(name, region)| RamBlock::new(name, region.clone()).unwrap());
        let ram = Ram::new(blocks.collect()).unwrap();
        (Memory::from_regions(regions).unwrap(), ram)
    }

    /// The guest in `memory`.
    pub(crate) fn config(&self, memory: Memory) -> Config {
        let mut config = Config::new(self.rig.kind(), memory);
        config.vcpus = self.vcpus;
        config.pattern = self.pattern;
        config.rate = self.rate.and_then(NonZeroU64::new);
        config.working_set = self.working_set.clone();
        config
    }
}

fn map(backing: Backing, bytes: u64) -> MmapRegion {
    let len = usize::try_from(bytes).unwrap();
    match backing {
        Backing::Anonymous => MmapRegion::new(len).unwrap(),
        Backing::Memfd => {
            let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(bytes).unwrap();
            MmapRegion::from_file(FileOffset::new(file, 0), len).unwrap()
        }
        Backing::Hugetlb => unimplemented!("tests do without a pool of huge pages"),
    }
}

/// A running guest, and the place that it may go to.
pub(crate) struct Stage {
    pub(crate) rig: Rig,
    pub(crate) guest: Arc<Guest>,
    pub(crate) ram: Ram,
    /// The destination's.
    pub(crate) there: Ram,
    config: Config,
    arrived: Mutex<Option<Arc<Guest>>>,
    /// Whoever starts, stops or compares the guests, one at a time.
    turn: Mutex<()>,
}

impl Stage {
    pub(crate) fn new(shape: &Shape) -> Arc<Self> {
        let (memory, ram) = shape.memory();
        testguest::fill(&memory, shape.fill);
        let guest = Guest::new(&shape.config(memory)).unwrap();
        guest.resume().unwrap();
        Self::between(shape, (Arc::new(guest), ram), shape.memory())
    }

    /// For a guest that runs already, and that may go to `there`.
    pub(crate) fn between(
        shape: &Shape,
        (guest, ram): (Arc<Guest>, Ram),
        (memory, there): (Memory, Ram),
    ) -> Arc<Self> {
        Arc::new(Self {
            rig: shape.rig,
            guest,
            ram,
            there,
            config: shape.config(memory),
            arrived: Mutex::new(None),
            turn: Mutex::new(()),
        })
    }

    /// The guest at the destination, if its state has been loaded.
    pub(crate) fn arrived(&self) -> Option<Arc<Guest>> {
        lock(&self.arrived).clone()
    }

    pub(crate) fn runs_there(&self) -> bool {
        self.arrived().is_some_and(|guest| guest.is_running())
    }

    /// A destination for the guest, with `settings` applied to its defaults.
    pub(crate) fn destination(&self, settings: impl FnOnce(&mut DestinationConfig)) -> Destination {
        self.destination_at(listen(&loopback()), settings)
    }

    /// The same, at `acceptor`.
    pub(crate) fn destination_at(
        &self,
        acceptor: Acceptor,
        settings: impl FnOnce(&mut DestinationConfig),
    ) -> Destination {
        let mut config = DestinationConfig::new(engines(Method::None));
        settings(&mut config);
        Destination::new(acceptor, self.there.clone(), config).unwrap()
    }

    /// A source for the guest.
    pub(crate) fn source(&self, config: SourceConfig) -> Source {
        let log = self.rig.log(&self.guest, &self.ram);
        Source::with_config(self.ram.clone(), log, config).unwrap()
    }

    /// The guest is at the source alone, writes there, and what it wrote is right.
    pub(crate) fn expect_here(&self) {
        assert!(!self.runs_there(), "the guest runs at the destination");
        assert_eq!(
            self.guest.throttled(),
            0,
            "the guest at the source is throttled"
        );
        // It is paused for that, but not for a switchover.
        let _turn = lock(&self.turn);
        expect_alive(&self.guest);
    }

    /// The guest is at the destination alone, writes there, and what it wrote is right.
    pub(crate) fn expect_there(&self) {
        assert!(
            !self.guest.is_running(),
            "the guest still runs at the source"
        );
        expect_alive(&self.arrived().expect("no guest has arrived"));
    }
}

/// The guest runs, writes, and what it wrote is right. It runs on.
pub(crate) fn expect_alive(guest: &Guest) {
    assert!(guest.is_running(), "the guest does not run");
    let before = guest.written();
    while guest.written() == before {
        assert!(guest.failure().is_none(), "{:?}", guest.failure());
        thread::yield_now();
    }
    guest.pause();
    guest.verify().unwrap();
    guest.resume().unwrap();
}

/// What a hook is called for; before it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Pause,
    Save,
    /// The source resumes its guest.
    TakeBack,
    Load,
    /// The destination resumes its guest.
    Run,
}

/// May fail a step, or do anything else before it.
pub(crate) type Hook<'a> = Box<dyn FnMut(Step) -> Result<(), GuestError> + Send + 'a>;

/// The VMM at the source.
pub(crate) struct Here<'a> {
    stage: Arc<Stage>,
    pub(crate) hook: Hook<'a>,
    pub(crate) switchover: Box<dyn FnMut(&Status) -> Switchover + Send + 'a>,
    /// What it was asked to slow the vCPUs down to.
    pub(crate) throttles: Vec<u8>,
}

impl<'a> Here<'a> {
    pub(crate) fn new(stage: &Arc<Stage>) -> Self {
        Self {
            stage: stage.clone(),
            hook: Box::new(|_| Ok(())),
            switchover: Box::new(|_| Switchover::Auto),
            throttles: Vec::new(),
        }
    }

    pub(crate) fn hooked(
        mut self,
        hook: impl FnMut(Step) -> Result<(), GuestError> + Send + 'a,
    ) -> Self {
        self.hook = Box::new(hook);
        self
    }

    pub(crate) fn switching(
        mut self,
        switchover: impl FnMut(&Status) -> Switchover + Send + 'a,
    ) -> Self {
        self.switchover = Box::new(switchover);
        self
    }

    /// At least so many rounds before it switches over.
    pub(crate) fn with_rounds(self, least: u64) -> Self {
        self.switching(move |status| {
            if status.ram.dirty_sync_count < least {
                Switchover::Forbid
            } else {
                Switchover::Auto
            }
        })
    }
}

impl SourceGuest for Here<'_> {
    fn pause(&mut self) -> Result<(), GuestError> {
        (self.hook)(Step::Pause)?;
        self.stage.guest.pause();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        (self.hook)(Step::TakeBack)?;
        let _turn = lock(&self.stage.turn);
        assert!(
            !self.stage.runs_there(),
            "the source resumes a guest that runs at the destination"
        );
        Ok(self.stage.guest.resume()?)
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        (self.hook)(Step::Save)?;
        Ok(self.stage.guest.save()?)
    }

    fn throttle(&mut self, percent: u8) {
        self.throttles.push(percent);
        self.stage.guest.throttle(percent);
    }

    fn switchover(&mut self, status: &Status) -> Switchover {
        (self.switchover)(status)
    }
}

/// The VMM at the destination.
pub(crate) struct There<'a> {
    stage: Arc<Stage>,
    pub(crate) hook: Hook<'a>,
    /// It was let run, at least once.
    started: AtomicBool,
    /// Not all of its memory is there when it is loaded.
    is_partial: bool,
}

impl<'a> There<'a> {
    pub(crate) fn new(stage: &Arc<Stage>) -> Self {
        Self {
            stage: stage.clone(),
            hook: Box::new(|_| Ok(())),
            started: AtomicBool::new(false),
            is_partial: false,
        }
    }

    /// Compares nothing while it is loaded, which would touch all memory.
    pub(crate) fn partial(mut self) -> Self {
        self.is_partial = true;
        self
    }

    pub(crate) fn hooked(
        mut self,
        hook: impl FnMut(Step) -> Result<(), GuestError> + Send + 'a,
    ) -> Self {
        self.hook = Box::new(hook);
        self
    }
}

impl DestinationGuest for There<'_> {
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        (self.hook)(Step::Load)?;
        let turn = lock(&self.stage.turn);
        // A source that gave up meanwhile has resumed its guest, which writes.
        let handed_over = !self.is_partial && !self.stage.guest.is_running();
        let saved = handed_over.then(|| {
            expect_equal(&self.stage.ram, &self.stage.there);
            self.stage.guest.verify().unwrap()
        });
        drop(turn);
        let guest = Guest::incoming(&self.stage.config)?;
        guest.load(state)?;
        if !self.is_partial {
            let proof = guest.verify()?;
            if let Some(saved) = saved {
                assert_eq!(saved, proof);
            }
        }
        *lock(&self.stage.arrived) = Some(Arc::new(guest));
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        (self.hook)(Step::Run)?;
        let _turn = lock(&self.stage.turn);
        assert!(
            !self.stage.guest.is_running(),
            "the destination runs a guest that runs at the source"
        );
        self.started.store(true, Ordering::SeqCst);
        let guest = self.stage.arrived().expect("resumed before it was loaded");
        Ok(guest.resume()?)
    }
}

/// Two memories hold the same bytes.
pub(crate) fn expect_equal(one: &Ram, other: &Ram) {
    assert_eq!(one.blocks().len(), other.blocks().len());
    for (one, other) in one.blocks().iter().zip(other.blocks()) {
        assert_eq!(one.len(), other.len());
        let (mut left, mut right) = (vec![0_u8; 256 << 10], vec![0_u8; 256 << 10]);
        for start in (0..one.len()).step_by(left.len()) {
            let len = left.len().min(one.len() - start);
            let part = |block: &RamBlock, bytes: &mut [u8]| {
                let slice = block.memory().subslice(start, len).unwrap();
                slice.copy_to(&mut bytes[..len]);
            };
            part(one, &mut left);
            part(other, &mut right);
            if left[..len] != right[..len] {
                let at = (0..len).find(|at| left[*at] != right[*at]).unwrap();
                panic!(
                    "block {}: page {} differs: {:#x} at the source, {:#x} at the destination",
                    one.name(),
                    (start + at) / PAGE,
                    left[at],
                    right[at]
                );
            }
        }
    }
}

/// What came of a migration.
pub(crate) struct Outcome {
    pub(crate) source: Result<Status, SourceError>,
    pub(crate) destination: Result<Arrival, DestinationError>,
}

impl Outcome {
    /// Both sides report success.
    pub(crate) fn expect_done(self) -> (Status, Arrival) {
        let status = self.source.unwrap();
        let arrival = self.destination.unwrap();
        assert!(arrival.settled, "the source did not acknowledge");
        (status, arrival)
    }
}

/// Runs one migration over plain connections, the destination on a thread of its own.
pub(crate) fn migrate(
    source: Source,
    here: &mut Here<'_>,
    destination: &mut Destination,
    there: &mut There<'_>,
) -> Outcome {
    let to = plain(&address_of(destination));
    migrate_over(&to, source, here, destination, there)
}

/// The same to `destination`, to which `to` leads.
pub(crate) fn migrate_over(
    to: &Transport,
    source: Source,
    here: &mut Here<'_>,
    destination: &mut Destination,
    there: &mut There<'_>,
) -> Outcome {
    thread::scope(|scope| {
        let arriving = scope.spawn(move || destination.run(there));
        let source = source.run(to, here);
        Outcome {
            source,
            destination: arriving.join().unwrap(),
        }
    })
}

/// Moves the guest of `stage` with the sources' settings, and expects that it works.
pub(crate) fn move_guest(stage: &Arc<Stage>, config: SourceConfig) -> (Status, Arrival) {
    let outcome = migrate(
        stage.source(config),
        &mut Here::new(stage),
        &mut stage.destination(|_| {}),
        &mut There::new(stage),
    );
    let done = outcome.expect_done();
    stage.expect_there();
    done
}

/// Tries to move the guest to a destination that has seen failures, until it accepts. It may be waiting for the
/// word of the last source still, for no longer than the settle time.
pub(crate) fn move_in_the_end(stage: &Arc<Stage>, to: &Transport) {
    loop {
        let mut config = source_config(Method::Zstd);
        config.settle_time = Duration::from_secs(60);
        match stage.source(config).run(to, &mut Here::new(stage)) {
            Ok(_) => return,
            Err(error) => {
                assert_eq!(error.guest(), GuestLocation::Source, "{error}");
                assert!(
                    matches!(
                        error,
                        SourceError::Unanswered
                            | SourceError::Session(_)
                            | SourceError::OtherTransport(_)
                            | SourceError::Control(_)
                            | SourceError::Channel { .. }
                            | SourceError::Refused { .. }
                    ),
                    "{error}"
                );
                stage.expect_here();
                thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

/// Has `destination` take guests until it has got one; gives the errors before that.
pub(crate) fn until_one_arrives(
    destination: &mut Destination,
    there: &mut There<'_>,
) -> (Vec<DestinationError>, Arrival) {
    let mut errors = Vec::new();
    loop {
        match destination.run(there) {
            Ok(arrival) => return (errors, arrival),
            Err(error) => errors.push(error),
        }
        assert!(
            !there.started.load(Ordering::SeqCst),
            "a guest that did not arrive has run: {errors:?}"
        );
    }
}

/// Runs them a few at a time: most of what they do is wait.
pub(crate) fn in_parallel(runs: u64, run: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= runs {
                        return;
                    }
                    run(number);
                }
            });
        }
    });
}

/// The first `count` devices of `model`, for batches of pages.
pub(crate) fn dsas(model: &Model, count: usize) -> Arc<Devices> {
    let shape = idxd::Shape {
        members: 128,
        buffer_bytes: 0,
    };
    let tuning = Tuning {
        slots: 64,
        ..Tuning::default()
    };
    let queues = (0..count).map(|device| {
        let submit = model.queue(device, 0, PortalKind::Enqcmd);
        Queue::new(submit, shape, tuning).unwrap()
    });
    Arc::new(Devices::new(queues))
}

/// `devices` look for zero pages, and are checked as by `verify`.
pub(crate) fn by_dsas(devices: &Arc<Devices>, verify: Verify) -> ZeroPageDetection {
    ZeroPageDetection::Dsa(DsaDetection {
        devices: devices.clone(),
        verify,
    })
}

pub(crate) fn engines(method: Method) -> Engines {
    Engines::software(Settings::new(method, None).unwrap())
}

pub(crate) fn source_config(method: Method) -> SourceConfig {
    source_config_by(engines(method))
}

/// Without the limits that a busy host exceeds: while the guest is paused all of its memory is compared, and its proof
/// is verified. A hang is the watchdog's.
pub(crate) fn source_config_by(method: impl Into<MethodChoice>) -> SourceConfig {
    let mut config = SourceConfig::new(method);
    config.downtime_max = 4 * HANGS;
    config.stall_timeout = 4 * HANGS;
    config
}

/// A listener for plain connections.
pub(crate) fn listen(address: &Address) -> Acceptor {
    Acceptor::Plain(Listener::bind(address, HANGS).unwrap())
}

/// Plain connections to `address`.
pub(crate) fn plain(address: &Address) -> Transport {
    Transport::Plain(address.clone())
}

pub(crate) fn address_of(destination: &Destination) -> Address {
    destination.addresses()[0].clone()
}

/// A box in the way to `destination`, and its address.
pub(crate) fn middlebox(destination: &Destination) -> (Middlebox, Address) {
    let address = address_of(destination).to_string();
    let address: SocketAddr = address.trim_start_matches("tcp:").parse().unwrap();
    let middlebox = Middlebox::new(address).unwrap();
    let address = format!("tcp:{}", middlebox.address()).parse().unwrap();
    (middlebox, address)
}

pub(crate) fn loopback() -> Address {
    "tcp:127.0.0.1:0".parse().unwrap()
}

/// Where `address` is, for sockets of the standard library.
pub(crate) fn socket_address(address: &Address) -> (String, u16) {
    match address {
        Address::Tcp { host, port } => (host.clone(), *port),
        Address::Unix(path) => panic!("{} is no TCP address", path.display()),
    }
}

/// A generator of random numbers (splitmix64) that prints its seed if the test fails, and ends the program if the
/// test hangs: a hang has a seed too.
pub(crate) struct Rng {
    seed: u64,
    state: u64,
    _watchdog: Watchdog,
}

impl Rng {
    /// Number `run` of a test. `VAMOOSE_SEED` repeats a run: then all runs are that one.
    pub(crate) fn new(run: u64) -> Self {
        let given = std::env::var("VAMOOSE_SEED").ok();
        let seed = given.map_or_else(
            || mix(process_seed().wrapping_add(run)),
            |seed| seed.parse().unwrap(),
        );
        Self {
            seed,
            state: seed,
            _watchdog: Watchdog::new(format!("VAMOOSE_SEED={seed}")),
        }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        let index = self.below(of.len() as u64);
        of[usize::try_from(index).unwrap()].clone()
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next().to_le_bytes()[0]).collect()
    }
}

impl Drop for Rng {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("repeat this run with VAMOOSE_SEED={}", self.seed);
        }
    }
}

fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Another one for each process.
fn process_seed() -> u64 {
    static SEED: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let nanos = u64::try_from(now.unwrap().as_nanos() & u128::from(u64::MAX)).unwrap();
    let fresh = nanos ^ u64::from(process::id()) << 40;
    match SEED.compare_exchange(0, fresh | 1, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => fresh | 1,
        Err(seed) => seed,
    }
}

/// Ends the program with a message when this is not dropped for far longer than anything takes.
pub(crate) struct Watchdog {
    over: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

const HANGS: Duration = Duration::from_secs(600);

impl Watchdog {
    pub(crate) fn new(name: String) -> Self {
        let over = Arc::new((Mutex::new(false), Condvar::new()));
        let thread = thread::spawn({
            let over = over.clone();
            move || {
                let (flag, changed) = &*over;
                let waited = changed.wait_timeout_while(lock(flag), HANGS, |over| !*over);
                if waited.is_ok_and(|(_, result)| result.timed_out()) {
                    // Not `eprintln`: what is captured is lost.
                    let _ = writeln!(io::stderr(), "a test hangs: {name}");
                    process::abort();
                }
            }
        });
        Self {
            over,
            thread: Some(thread),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *lock(&self.over.0) = true;
        self.over.1.notify_all();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A test that has panicked elsewhere prints why there.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
