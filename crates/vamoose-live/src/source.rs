//! The source: rounds over guest memory until the rest fits into the downtime limit, then the switchover.
//!
//! ```text
//!  Source::run      connect ─> first round ─> rounds ─> switch over ─> hand over
//!   (coordinator)                  │  ▲ sent, synced
//!                            Round │  │
//!  channel threads     clear, scan for zeros, read, send ─> SYNC      one for each channel
//! ```
//!
//! The coordinator is the caller's thread: it alone talks to the VMM. It waits for events only, from the channel
//! threads and from the thread that receives from the destination; whatever blocks is ended by hanging up. Where the guest is
//! in the end [`handover::Source`] decides.

mod channel;
mod hand_over;
mod link;
mod round;

use std::{
    num::NonZeroU64,
    ops::RangeInclusive,
    sync::{Arc, atomic::AtomicU64},
    thread,
    time::{Duration, Instant},
};

use handover::{Decision, GuestLocation, SourceEvent, SourceState};
use multifd::{Layout, PACKET_BYTES};
use tracing::{debug, info, warn};
use vamoose_link::{Address, MethodChoice, check_locked_memory};

use crate::{
    Bitmap, DirtyLog, DsaDetection, GuestError, Handle, Ram, SourceError, SourceGuest, State,
    Status, Switchover,
    mapping::backings,
    offload::Account,
    present::present,
    status::{Shared, millis},
};
use hand_over::HandOver;
use link::{Link, Sent};
use round::{Rate, Round};

/// Migrates a guest away.
pub struct Source {
    ram: Ram,
    log: Arc<dyn DirtyLog>,
    config: SourceConfig,
    layout: Layout,
    shared: Arc<Shared>,
    /// Numbers the packets of all channels.
    packets: AtomicU64,
}

/// How.
#[derive(Clone)]
pub struct SourceConfig {
    /// How pages are encoded.
    pub method: MethodChoice,
    /// Channels, 1 to 64.
    pub channels: u8,
    /// Most bytes of pages in a packet: a power of two from 64 KiB to 4 MiB.
    pub packet_bytes: u32,
    /// Whether pages are sent with MSG_ZEROCOPY; for method none over TCP only.
    pub zero_copy: bool,
    /// Who looks for zero pages.
    pub zero_page_detection: ZeroPageDetection,
    /// Percentage of zero pages to send as normal ones all the same: traffic for benchmarks.
    pub normal_page_ratio: u8,
    /// Most bytes per second, over all channels.
    pub max_bandwidth: Option<NonZeroU64>,
    /// For how long the guest may stand still, as far as it can be foreseen: it is paused when what is left fits.
    pub downtime_limit: Duration,
    /// For how long it may stand still whatever happens, not less than that: then the migration is given up and the
    /// guest goes on here, unless it has been handed over.
    pub downtime_max: Duration,
    /// When to give up if the guest has not been paused by then.
    pub timeout: Option<Duration>,
    /// Whether and how the vCPUs are slowed down if they write too fast.
    pub auto_converge: Option<AutoConverge>,
    /// For how long the destination may neither send nor take a byte while one is awaited.
    pub stall_timeout: Duration,
    /// For how long to ask what has become of the guest if the connection is lost in the very hand-over.
    pub settle_time: Duration,
    /// Whether the VMM vouches for it that nothing stands between the two processes that could accept, close or refuse
    /// a connection in the destination's name: no tunnel, no proxy, no address translation. Then a destination that has
    /// closed its connections and refuses new ones has ended: the guest goes on here if it had not begun to run there.
    /// Otherwise such a guest stays paused and [in doubt](SourceError::InDoubt), until a person has looked.
    pub direct_link: bool,
}

/// Who looks for zero pages.
#[derive(Clone, Debug, Default)]
pub enum ZeroPageDetection {
    /// Nobody. Memory that was never touched costs nothing all the same.
    None,
    /// The processor.
    #[default]
    Cpu,
    /// DSAs, and the processor where they do not.
    Dsa(DsaDetection),
}

/// Steps of the vCPUs' throttle, in percent of the time that they do not run. The defaults are QEMU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoConverge {
    /// The first.
    pub initial: u8,
    /// What each further one adds.
    pub increment: u8,
    /// The ceiling, at most 99.
    pub max: u8,
}

impl Default for AutoConverge {
    fn default() -> Self {
        Self {
            initial: 20,
            increment: 10,
            max: 99,
        }
    }
}

/// How many channels a migration may have.
pub const CHANNELS: RangeInclusive<u8> = 1..=64;

impl SourceConfig {
    /// Sends by `method` over two channels, everything else by default.
    pub fn new(method: impl Into<MethodChoice>) -> Self {
        Self {
            method: method.into(),
            channels: 2,
            packet_bytes: PACKET_BYTES,
            zero_copy: false,
            zero_page_detection: ZeroPageDetection::Cpu,
            normal_page_ratio: 0,
            max_bandwidth: None,
            downtime_limit: Duration::from_millis(300),
            downtime_max: Duration::from_secs(10),
            timeout: None,
            auto_converge: None,
            stall_timeout: Duration::from_secs(15),
            settle_time: Duration::from_secs(60),
            direct_link: false,
        }
    }

    fn check(&self) -> Result<(), SourceError> {
        let refuse = |text: String| Err(SourceError::Config(text));
        if !CHANNELS.contains(&self.channels) {
            return refuse(format!(
                "{} channels: {} to {} can be had",
                self.channels,
                CHANNELS.start(),
                CHANNELS.end()
            ));
        }
        if self.normal_page_ratio > 100 {
            return refuse(format!("normal page ratio {} %", self.normal_page_ratio));
        }
        let times = [self.stall_timeout, self.settle_time, self.downtime_max];
        if times.iter().any(Duration::is_zero) {
            return refuse("a timeout of nothing".to_owned());
        }
        if self.downtime_limit > self.downtime_max {
            return refuse(format!(
                "a downtime limit of {:?}, and at most {:?} of downtime",
                self.downtime_limit, self.downtime_max
            ));
        }
        if let Some(steps) = self.auto_converge
            && (steps.max > 99 || steps.initial > steps.max || steps.increment == 0)
        {
            return refuse(format!(
                "auto-converge {steps:?}: at most 99 %, in steps upwards"
            ));
        }
        Ok(())
    }
}

impl Source {
    /// A migration of `ram`, whose changes `log` finds.
    ///
    /// # Errors
    /// When the options contradict each other, or zero-copy send cannot lock the memory that it needs.
    pub fn new(
        ram: Ram,
        log: Arc<dyn DirtyLog>,
        config: SourceConfig,
    ) -> Result<Self, SourceError> {
        config.check()?;
        let page_size = u32::try_from(ram.page_size()).unwrap_or(u32::MAX);
        let layout = Layout::new(page_size)?.with_packet_bytes(config.packet_bytes)?;
        if config.zero_copy {
            check_locked_memory(config.channels.into(), layout)?;
        }
        let mut shared = Shared::new(&ram, config.max_bandwidth)?;
        if let ZeroPageDetection::Dsa(dsa) = &config.zero_page_detection {
            shared.zero_page_detection = Some(Account::open(&dsa.devices));
        }
        Ok(Self {
            ram,
            log,
            config,
            layout,
            shared: Arc::new(shared),
            packets: AtomicU64::new(0),
        })
    }

    /// Watches and ends this migration from other threads.
    pub fn handle(&self) -> Handle {
        Handle(self.shared.clone())
    }

    /// Migrates `guest` to the [`Destination`](crate::Destination) that listens on `destination`. When this
    /// returns a status the guest runs there.
    ///
    /// # Errors
    /// Whatever went wrong, and [`SourceError::guest`] says where the guest is: here, going on as before, with
    /// very few exceptions. Another migration may be tried at once.
    pub fn run(
        self,
        destination: &Address,
        guest: &mut dyn SourceGuest,
    ) -> Result<Status, SourceError> {
        self.shared.progress().start = Instant::now();
        let result = thread::scope(|scope| {
            let mut machine = handover::Source::new(true);
            if self.config.direct_link {
                machine = machine.direct();
            }
            let mut attempt = Attempt {
                source: &self,
                guest,
                machine,
                paused_since: None,
                not_resumed: None,
                throttle: 0,
                logging: false,
                round: 0,
                rate: Rate::default(),
            };
            // Also when the VMM panics: the scope waits for its threads.
            let _hang_up = HangUp(&self.shared);
            attempt.run(destination, scope)
        });
        self.report(result)
    }

    fn report(&self, result: Result<(), SourceError>) -> Result<Status, SourceError> {
        let mut progress = self.shared.progress();
        progress.end();
        progress.status.status = match &result {
            Ok(()) => State::Completed,
            Err(SourceError::Cancelled) => State::Cancelled,
            Err(_) => State::Failed,
        };
        progress.status.error_desc = result.as_ref().err().map(ToString::to_string);
        drop(progress);
        result.map(|()| self.shared.status())
    }
}

struct HangUp<'a>(&'a Shared);

impl Drop for HangUp<'_> {
    fn drop(&mut self) {
        self.0.hang_up();
    }
}

/// The coordinator's state.
struct Attempt<'a> {
    source: &'a Source,
    guest: &'a mut dyn SourceGuest,
    machine: handover::Source,
    /// What has to be undone if it fails.
    paused_since: Option<Instant>,
    throttle: u8,
    logging: bool,
    /// Why the guest could not be resumed.
    not_resumed: Option<GuestError>,
    /// Number of the last round.
    round: u64,
    /// How fast the last rounds went.
    rate: Rate,
}

impl<'a> Attempt<'a> {
    fn run<'scope>(
        &mut self,
        destination: &Address,
        scope: &'scope thread::Scope<'scope, 'a>,
    ) -> Result<(), SourceError> {
        let mut link = Link::connect(self.source, destination, scope)
            .map_err(|error| self.or_cancelled(error))?;
        let failure = self.migrate(&mut link).err();
        let failure = failure.map(|error| self.or_cancelled(link.explain(error)));
        link.bound_downtime(None);
        let event = match &failure {
            None => SourceEvent::Stopped,
            Some(error) => SourceEvent::Failed {
                cause: error.to_string(),
            },
        };
        let decision = HandOver::new(self, &link).run(event);
        if decision.guest == GuestLocation::Destination {
            let mut progress = self.source.shared.progress();
            progress.status.downtime = self.paused_since.map(|since| millis(since.elapsed()));
            progress.end();
        } else {
            self.end_throttle();
        }
        self.stop_logging();
        self.result(decision, failure)
    }

    /// Everything until the destination has loaded the guest, which is paused then.
    fn migrate(&mut self, link: &mut Link<'_, '_>) -> Result<(), SourceError> {
        let prepared = link.prepare()?;
        // It has nothing to do but to write the journal, and there is none.
        self.machine.handle(SourceEvent::Message(prepared));
        link.open_channels()?;
        let rest = self.precopy(link)?;
        self.switch_over(link, rest)?;
        // From here on it cannot be cancelled.
        let committed = self.source.shared.commit();
        committed.then_some(()).ok_or(SourceError::Cancelled)
    }

    fn or_cancelled(&self, error: SourceError) -> SourceError {
        if self.source.shared.is_cancelled() {
            SourceError::Cancelled
        } else {
            error
        }
    }

    /// What `decision` means after `failure`, if there was one before the guest was handed over.
    fn result(
        &mut self,
        decision: Decision,
        failure: Option<SourceError>,
    ) -> Result<(), SourceError> {
        let cause = decision.cause.unwrap_or_default();
        if let (Some(error), SourceState::Returning { cause }) =
            (self.not_resumed.take(), self.machine.state())
        {
            let cause = cause.clone();
            let cause = Box::new(failure.unwrap_or(SourceError::Destination { cause }));
            return Err(SourceError::NotResumed { cause, error });
        }
        Err(match decision.guest {
            // Where it has gone from there is its business.
            GuestLocation::Destination | GuestLocation::MovedOn => return Ok(()),
            GuestLocation::Source => failure.unwrap_or(SourceError::Destination { cause }),
            GuestLocation::InDoubt => SourceError::InDoubt { cause },
            GuestLocation::Lost => SourceError::Lost { cause },
        })
    }

    /// Rounds until it is time to pause the guest; returns the pages that are dirty then.
    fn precopy(&mut self, link: &Link<'_, '_>) -> Result<Vec<Bitmap>, SourceError> {
        let source = self.source;
        source.log.start()?;
        self.logging = true;
        // Only now: what is written from here on is in the log, whether it was there before or not.
        let mut dirty = self.written_memory();
        let deadline = {
            let mut progress = source.shared.progress();
            progress.status.status = State::Active;
            progress.status.setup_time = millis(progress.start.elapsed());
            source
                .config
                .timeout
                .and_then(|timeout| progress.start.checked_add(timeout))
        };
        loop {
            let began = Instant::now();
            if self.send(link, dirty, deadline)? == Sent::TooLate {
                return Err(self.timed_out());
            }
            dirty = self.collect()?;
            let pages = count(&dirty);
            self.rate.guest_dirtied(pages, began.elapsed());
            let status = self.update_status(pages);
            let switch = match self.guest.switchover(&status) {
                Switchover::Auto => self.fits(pages),
                Switchover::Force => true,
                Switchover::Forbid => false,
            };
            if switch {
                return Ok(dirty);
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(self.timed_out());
            }
            self.converge(pages);
            if pages == 0 {
                link.idle(IDLE_ROUND)?;
            }
        }
    }

    /// Pauses the guest and sends what is left: `rest`, and what has become dirty since. Returns when
    /// the destination has loaded it.
    fn switch_over(
        &mut self,
        link: &mut Link<'_, '_>,
        rest: Vec<Bitmap>,
    ) -> Result<(), SourceError> {
        let source = self.source;
        // A guest is not paused for a migration that has ended already.
        link.idle(Duration::ZERO)?;
        source.shared.progress().status.status = State::Device;
        let paused = Instant::now();
        self.paused_since = Some(paused);
        link.bound_downtime(paused.checked_add(source.config.downtime_max));
        self.guest
            .pause()
            .map_err(|error| guest_error("pause", error))?;
        let state = self
            .guest
            .save()
            .map_err(|error| guest_error("save the state of", error))?;
        let mut dirty = self.collect()?;
        for (dirty, rest) in dirty.iter_mut().zip(&rest) {
            dirty.add(rest);
        }
        self.send(link, dirty, None)?;
        link.end_channels();
        link.send_state(state)
    }

    /// Sends the pages of `dirty` and waits until they are written at the destination.
    fn send(
        &mut self,
        link: &Link<'_, '_>,
        dirty: Vec<Bitmap>,
        deadline: Option<Instant>,
    ) -> Result<Sent, SourceError> {
        let stats = &self.source.shared.stats;
        let pages = count(&dirty);
        self.source.shared.progress().count_remaining(pages, stats);
        self.round += 1;
        let (before, began) = (stats.snapshot(), Instant::now());
        let sent = link.send_round(Round::new(self.round, dirty), deadline)?;
        stats.add_sync();
        let (after, took) = (stats.snapshot(), began.elapsed());
        self.rate.round_sent(before, after, took);
        debug!(round = self.round, pages, ?took, "round sent");
        Ok(sent)
    }

    /// What was written since it was last read.
    fn collect(&self) -> Result<Vec<Bitmap>, SourceError> {
        let source = self.source;
        let mut dirty = no_pages(&source.ram);
        for (block, dirty) in dirty.iter_mut().enumerate() {
            source.log.collect(block, dirty)?;
        }
        source.shared.progress().status.ram.dirty_sync_count += 1;
        Ok(dirty)
    }

    /// All pages that may hold something: those that were never touched are zeros at the destination too.
    fn written_memory(&self) -> Vec<Bitmap> {
        let ram = &self.source.ram;
        let blocks = ram.blocks().iter().zip(backings(ram));
        blocks
            .map(|(block, backing)| present(block, backing, ram.page_size()))
            .collect()
    }

    /// Whether so many dirty pages can be sent within the downtime limit.
    fn fits(&self, pages: usize) -> bool {
        pages == 0
            || self
                .rate
                .time_for(pages, self.source.ram.page_size())
                .is_some_and(|time| time <= self.source.config.downtime_limit.mul_f64(SAFE_PART))
    }

    fn update_status(&self, dirty: usize) -> Status {
        let page_size = self.source.ram.page_size();
        let shared = &self.source.shared;
        {
            let mut progress = shared.progress();
            progress.count_remaining(dirty, &shared.stats);
            let status = &mut progress.status;
            status.expected_downtime = self.rate.time_for(dirty, page_size).map(millis);
            status.ram.dirty_pages_rate = self.rate.dirty_pages_per_second();
            status.ram.mbps = self.rate.wire_mbps();
            status.ram.pages_per_second = self.rate.pages_per_second();
            status.cpu_throttle_percentage = self.throttle;
        }
        shared.status()
    }

    fn timed_out(&self) -> SourceError {
        let page_size = self.source.ram.page_size() as u64;
        SourceError::TimedOut {
            seconds: self.source.config.timeout.unwrap_or_default().as_secs(),
            remaining: self.source.shared.status().ram.remaining,
            dirty_rate: self.rate.dirty_pages_per_second() * page_size,
            bandwidth: self.rate.page_bytes_per_second(),
        }
    }

    /// Slows the guest down if it has dirtied more than half of what the round has moved.
    fn converge(&mut self, dirty: usize) {
        let Some(steps) = self.source.config.auto_converge else {
            return;
        };
        if !self.rate.guest_outruns(dirty) || self.throttle >= steps.max {
            return;
        }
        self.throttle = match self.throttle {
            0 => steps.initial,
            now => now.saturating_add(steps.increment).min(steps.max),
        };
        info!(
            "the guest writes too fast: throttled to {} %",
            self.throttle
        );
        self.guest.throttle(self.throttle);
    }

    /// Lets the guest go on, if it was paused.
    fn resume(&mut self) -> SourceEvent {
        let resumed = match self.paused_since.take() {
            Some(_) => self.guest.resume(),
            None => Ok(()),
        };
        self.end_throttle();
        match resumed {
            Ok(()) => SourceEvent::Resumed,
            Err(error) => {
                let reason = error.to_string();
                self.not_resumed = Some(error);
                SourceEvent::NotResumed { reason }
            }
        }
    }

    /// Also of a guest that stays paused: a person who resumes it by hand does not know of it.
    fn end_throttle(&mut self) {
        if std::mem::take(&mut self.throttle) > 0 {
            self.guest.throttle(0);
        }
    }

    fn stop_logging(&mut self) {
        if std::mem::take(&mut self.logging)
            && let Err(error) = self.source.log.stop()
        {
            warn!("{error}; the guest may be slower until the next migration");
        }
    }
}

/// Part of the downtime limit to plan with: the state, two answers and the system's moods want time too.
const SAFE_PART: f64 = 0.7;

/// How long to wait for the guest to write something before it is looked at again.
const IDLE_ROUND: Duration = Duration::from_millis(50);

fn no_pages(ram: &Ram) -> Vec<Bitmap> {
    (0..ram.blocks().len())
        .map(|block| Bitmap::new(ram.pages(block)))
        .collect()
}

fn guest_error(what: &'static str, error: GuestError) -> SourceError {
    SourceError::Guest { what, error }
}

fn count(dirty: &[Bitmap]) -> usize {
    dirty.iter().map(Bitmap::count).sum()
}
