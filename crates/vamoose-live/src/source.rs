//! The source: rounds over guest memory until the rest fits into the downtime limit, then the switchover.
//!
//! ```text
//!  Source::run      connect ─> first round ─> rounds ─> switch over ─> hand over
//!   (coordinator)                  │  ▲ sent, synced
//!                            Round │  │
//!  channel threads     clear, scan for zeros, read, send ─> SYNC      one for each channel
//! ```
//!
//! The coordinator is the caller's thread, and the only one that calls the VMM. It waits for events from the channel
//! threads and from the thread that receives from the destination. Hanging up ends a call that blocks. [`handover::Source`]
//! decides where the guest is in the end.

mod channel;
mod config;
mod hand_over;
mod link;
mod post_copy;
mod rates;
pub(crate) mod round;
mod transport;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use convergence::Convergence;
use handover::{AttemptId, Decision, GuestLocation, SourceDriver, SourceEvent, SourceState};
use multifd::Layout;
use tracing::{debug, info, warn};
use vamoose_link::{Conversation, ZeroCopyError, check_locked_memory, random_id};

use crate::{
    GuestError, Handle, Phase, Ram, SourceError, SourceGuest, Status, Switchover, chain,
    dirty::{Bitmap, DirtyLog, clear, collect, count},
    mapping::backings,
    offload::Account,
    parallel,
    present::Touched,
    protocol::missing_bytes,
    status::{Shared, Stopwatch},
};
pub(crate) use config::CHANNELS;
pub use config::{SourceConfig, ZeroPageDetection};
pub use convergence::{AutoConverge, OnTimeout};
use hand_over::HandOver;
use link::{Link, RoundEnd};
use post_copy::PostCopy;
use rates::{Rates, Sent};
use round::{Pages, Round};
pub use transport::{OwnConnections, Transport};

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

impl Source {
    /// A migration of `ram` with the default options. `log` finds the pages that the guest writes.
    ///
    /// # Errors
    /// When the system is out of a resource.
    pub fn new(ram: &Ram, log: Arc<dyn DirtyLog>) -> Result<Self, SourceError> {
        Self::with_config(ram.clone(), log, SourceConfig::default())
    }

    /// A migration of `ram` with the options in `config`.
    ///
    /// # Errors
    /// When an option is out of range, or zero-copy send cannot lock the memory that it needs.
    pub fn with_config(
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
        let mut shared = Shared::new(&ram, config.max_bandwidth, config.downtime_limit)?;
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

    /// Migrates `guest` to the [`Destination`](crate::Destination) at `destination`. When this
    /// returns a status, the guest runs there.
    ///
    /// # Errors
    /// Zero-copy send over a session is refused: see [`SourceConfig::zero_copy`].
    /// [`SourceError::guest`] returns where the guest is after an error: with few exceptions here, running as before. Another
    /// migration may be tried at once.
    pub fn run(
        self,
        destination: impl Into<Transport>,
        guest: &mut dyn SourceGuest,
    ) -> Result<Status, SourceError> {
        let destination = &destination.into();
        self.shared.progress().start = Instant::now();
        let _held = match self.ram.hold() {
            Ok(held) => held,
            Err(error) => return self.report(Err(error.into())),
        };
        let is_session = matches!(destination, Transport::Session(_));
        if self.config.zero_copy && is_session {
            return self.report(Err(ZeroCopyError::Session.into()));
        }
        let id = match random_id() {
            Ok(id) => AttemptId(id),
            Err(error) => return self.report(Err(error.into())),
        };
        let span = tracing::error_span!("migration", role = "source", attempt = %id);
        let _entered = span.enter();
        let runs = guest.is_running();
        let result = thread::scope(|scope| {
            let mut machine = handover::Source::new(runs);
            if self.config.direct_link && matches!(destination, Transport::Plain(_)) {
                machine = machine.direct();
            }
            let mut attempt = Attempt {
                source: &self,
                guest,
                runs,
                paused: None,
                not_resumed: None,
                logging: false,
                round: 0,
                convergence: Convergence::new(self.config.policy()),
                rates: Rates::default(),
                post_copy: None,
            };
            // Also when the VMM panics: the scope waits for its threads.
            let _hang_up = self.shared.hangup.guard();
            attempt.run(id, destination, SourceDriver::new(machine), scope)
        });
        self.report(result)
    }

    fn report(&self, result: Result<(), SourceError>) -> Result<Status, SourceError> {
        self.shared.forget_wake();
        let mut progress = self.shared.progress();
        progress.end();
        progress.status.status = match &result {
            Ok(()) => Phase::Completed,
            Err(SourceError::Cancelled) => Phase::Cancelled,
            Err(_) => Phase::Failed,
        };
        progress.status.error_desc = result.as_ref().err().map(|error| chain(error));
        drop(progress);
        result.map(|()| self.shared.status())
    }
}

struct Attempt<'a> {
    source: &'a Source,
    guest: &'a mut dyn SourceGuest,
    /// Whether the guest ran when the migration began. It is only resumed then.
    runs: bool,
    convergence: Convergence,
    rates: Rates,
    /// Measures the downtime. `Some` while the guest is paused and has to be resumed on failure.
    paused: Option<Stopwatch>,
    /// The dirty log has been started and has to be stopped.
    logging: bool,
    /// Why the guest could not be resumed.
    not_resumed: Option<GuestError>,
    round: u64,
    /// What follows the guest, once it has been handed over.
    post_copy: Option<PostCopy>,
}

impl<'a> Attempt<'a> {
    fn run<'scope>(
        &mut self,
        id: AttemptId,
        destination: &Transport,
        mut driver: SourceDriver,
        scope: &'scope thread::Scope<'scope, 'a>,
    ) -> Result<(), SourceError> {
        let description = self.guest.describe();
        if description.len() > MAX_DESCRIPTION {
            let len = description.len();
            return Err(SourceError::Config(format!(
                "the guest's description has {len} bytes, more than {MAX_DESCRIPTION}"
            )));
        }
        let mut link = Link::connect(self.source, id, destination, scope)
            .map_err(|error| self.or_cancelled(error))?;
        let failure = self.migrate(&mut link, &mut driver, description).err();
        let failure = failure.map(|error| self.or_cancelled(link.explain(error)));
        link.bound_downtime(None);
        driver.handle(match &failure {
            None => SourceEvent::Stopped,
            Some(error) => SourceEvent::Failed {
                cause: chain(error),
            },
        });
        let (decision, control) = HandOver::new(self, &link).run(&mut driver);
        let is_there = decision.guest == GuestLocation::Destination;
        if is_there {
            self.completed();
        } else {
            self.end_throttle();
        }
        self.stop_logging();
        let result = self.result(decision, driver.state(), failure);
        let followed = match self.post_copy.take() {
            Some(post_copy) if result.is_ok() => self.follow(&link, post_copy),
            _ => result,
        };
        link.finish(control.as_ref().map(Conversation::stream), is_there);
        followed
    }

    /// Sends the guest the memory that it has not been sent, now that it runs at the destination.
    fn follow(&mut self, link: &Link<'_, 'a>, post_copy: PostCopy) -> Result<(), SourceError> {
        self.source.shared.progress().status.status = Phase::PostcopyActive;
        let sent = post_copy.run(self.source, link, self.round + 1);
        sent.map_err(|error| SourceError::PagesLost {
            source: Box::new(error),
        })
    }

    /// Moves the guest, until the destination has loaded it. The guest is paused then.
    fn migrate(
        &mut self,
        link: &mut Link<'_, 'a>,
        driver: &mut SourceDriver,
        description: Vec<u8>,
    ) -> Result<(), SourceError> {
        let prepared = link.prepare(description)?;
        driver.handle(SourceEvent::Message(prepared));
        link.open_channels()?;
        let (rest, forced) = self.precopy(link)?;
        self.switch_over(link, rest, forced && self.source.config.post_copy)?;
        // From here on it cannot be cancelled.
        let committed = self.source.shared.commit();
        committed.then_some(()).ok_or(SourceError::Cancelled)
    }

    /// Sends rounds until it is time to pause the guest. Returns the pages that are dirty then, and whether the time has come because
    /// somebody wanted it.
    fn precopy(&mut self, link: &mut Link<'_, '_>) -> Result<(Vec<Bitmap>, bool), SourceError> {
        let source = self.source;
        // Before the log, which may register the memory with a userfaultfd of its own.
        let mut pages = Pages::Touched(Touched::new(backings(&source.ram)));
        source.log.start()?;
        self.logging = true;
        let start = {
            let mut progress = source.shared.progress();
            progress.status.status = Phase::Active;
            progress.status.setup_time = progress.start.elapsed();
            progress.start
        };
        let gives_up = source.config.on_timeout == OnTimeout::Abort;
        let timeout = source.config.timeout.filter(|_| gives_up);
        let deadline = timeout.and_then(|timeout| start.checked_add(timeout));
        loop {
            let began = Instant::now();
            if self.send(link, pages, deadline)? == RoundEnd::TooLate {
                return Err(self.timed_out());
            }
            self.send_parts(link)?;
            let dirty = self.collect(
                Bitmap::for_blocks(&source.ram),
                source.config.channels.into(),
            )?;
            let left = count(&dirty);
            self.rates.guest_dirtied(left, began.elapsed());
            let status = self.update_status(left);
            let limit = source.shared.downtime_limit();
            self.convergence
                .set_downtime_limit(limit.min(source.config.downtime_max));
            let wish = match source.shared.switch_over.load(Ordering::Relaxed) {
                true => Switchover::Force,
                false => self.guest.switchover(&status),
            };
            if self.is_ready(left, wish, start.elapsed())? {
                return Ok((dirty, wish == Switchover::Force));
            }
            let sent = self.rates.last_normal;
            if left == 0 {
                // Nothing is dirty, and the VMM does not want to switch over.
                link.idle(IDLE_ROUND)?;
            } else if let Some(percent) = self.convergence.next_throttle(left as u64, sent) {
                info!(
                    percent,
                    "the guest writes too fast: its vCPUs are throttled"
                );
                self.guest.throttle(percent);
            }
            pages = Pages::Written(dirty);
        }
    }

    /// Whether the guest is to be paused now, `elapsed` after the migration's beginning, with `left` dirty pages and the VMM's wish.
    fn is_ready(
        &mut self,
        left: usize,
        wish: Switchover,
        elapsed: Duration,
    ) -> Result<bool, SourceError> {
        let rest = self.rates.time_for(self.bytes(left));
        let convergence = &mut self.convergence;
        let late = convergence.action(elapsed);
        let most = convergence.limit().mul_f64(LAST_ROUND_SHARE);
        convergence.round_begins(rest, most, elapsed);
        let is_ready = match wish {
            Switchover::Auto => left == 0 || rest <= convergence.allowed(most),
            Switchover::Force => true,
            Switchover::Forbid => false,
        };
        match late {
            Some(OnTimeout::Abort) if !is_ready => return Err(self.timed_out()),
            Some(action) => warn!(%action, "the guest has not been paused in time"),
            None => {}
        }
        Ok(is_ready)
    }

    /// Pauses the guest and sends `rest`, the pages that have become dirty since, and the device state. Returns when
    /// the destination has loaded the guest. In a post-copy `rest` is sent after the guest, when it runs there.
    fn switch_over(
        &mut self,
        link: &mut Link<'_, 'a>,
        rest: Vec<Bitmap>,
        post_copy: bool,
    ) -> Result<(), SourceError> {
        let source = self.source;
        // A guest is not paused for a migration that has ended already.
        link.idle(Duration::ZERO)?;
        source.shared.progress().status.status = Phase::Device;
        let mut paused = Stopwatch::start();
        let max = self.convergence.limit().max(source.config.downtime_max);
        link.bound_downtime(paused.started.checked_add(max));
        // From here on an error resumes the guest.
        self.paused = Some(paused);
        self.guest
            .pause()
            .map_err(|error| guest_error("pause", error))?;
        if let Some(session) = source.shared.session.get() {
            session.set_paused(true);
        }
        paused.lap(|parts| &mut parts.last_round);
        self.send_parts(link)?;
        let state = self.guest.save();
        let mut state = state.map_err(|error| guest_error("save the state of", error))?;
        paused.lap(|parts| &mut parts.device_state);
        // The paused guest does not need its processors.
        let dirty = self.collect(rest, parallel::processors())?;
        if source.config.check_pause {
            // Before the pages are read: what is written from here on is found later.
            clear(source.log.as_ref(), &dirty, source.ram.page_size())?;
        }
        if post_copy {
            link.end_channels();
            self.post_copy = Some(PostCopy::start(source, link, dirty)?);
        } else {
            self.send(link, Pages::Last(dirty), None)?;
            link.end_channels();
        }
        if source.config.post_copy {
            let missing = self.post_copy.as_ref();
            let mut bytes = missing.map_or_else(|| missing_bytes(&[]), PostCopy::missing);
            bytes.append(&mut state);
            state = bytes;
        }
        paused.lap(|parts| &mut parts.last_round);
        link.send_state(state, false)?;
        paused.lap(|parts| &mut parts.device_state);
        link.wait_for_loaded()?;
        self.check_pause()?;
        paused.lap(|parts| &mut parts.load);
        self.paused = Some(paused);
        Ok(())
    }

    /// Sends the parts of the device state that there are now.
    fn send_parts(&mut self, link: &mut Link<'_, '_>) -> Result<(), SourceError> {
        let failed = |error| guest_error("save a part of the state of", error);
        while let Some(part) = self.guest.save_part().map_err(failed)? {
            link.send_state(part, true)?;
        }
        Ok(())
    }

    /// Fails if a page was written since the last pages were collected.
    fn check_pause(&self) -> Result<(), SourceError> {
        let Source {
            ram, log, config, ..
        } = self.source;
        let mut written = Bitmap::for_blocks(ram);
        if config.check_pause {
            collect(log.as_ref(), &mut written, parallel::processors())?;
        }
        let found = written.iter().zip(ram.blocks());
        let mut found = found.filter_map(|(pages, block)| Some((block, pages.iter().next()?)));
        found.next().map_or(Ok(()), |(block, page)| {
            let block = block.name().to_string();
            Err(SourceError::WrittenWhilePaused { block, page })
        })
    }

    /// Sends `pages` and waits until they are written at the destination.
    fn send(
        &mut self,
        link: &Link<'_, '_>,
        pages: Pages,
        deadline: Option<Instant>,
    ) -> Result<RoundEnd, SourceError> {
        let Source {
            ram,
            config,
            shared,
            ..
        } = self.source;
        let (stats, count) = (&shared.stats, pages.count(ram));
        {
            let mut progress = shared.progress();
            progress.count_remaining(count, stats);
            if let Pages::Touched(touched) = &pages {
                progress.untouched = touched.untouched().clone();
            }
        }
        self.round += 1;
        let (before, began) = (stats.snapshot(), Instant::now());
        let round = Round::new(self.round, pages, ram, config.channels.into());
        let end = link.send_round(round, deadline)?;
        stats.add_sync();
        let (sent, took) = (Sent::between(&before, &stats.snapshot()), began.elapsed());
        self.rates.round_sent(sent, took);
        debug!(round = self.round, pages = count, ?took, "round sent");
        Ok(end)
    }

    /// Adds the pages written since the log was last read to `dirty`, a bitmap per block, on up to `threads` threads.
    fn collect(&self, mut dirty: Vec<Bitmap>, threads: usize) -> Result<Vec<Bitmap>, SourceError> {
        let source = self.source;
        collect(source.log.as_ref(), &mut dirty, threads)?;
        source.shared.progress().status.ram.dirty_sync_count += 1;
        Ok(dirty)
    }

    fn update_status(&self, dirty: usize) -> Status {
        let shared = &self.source.shared;
        let rates = self.rates;
        {
            let mut progress = shared.progress();
            progress.count_remaining(dirty, &shared.stats);
            let status = &mut progress.status;
            status.expected_downtime = Some(rates.time_for(self.bytes(dirty)));
            status.ram.dirty_pages_rate = whole(rates.dirty_pages);
            status.ram.mbps = rates.wire_bytes * 8.0 / 1e6;
            status.ram.pages_per_second = whole(rates.pages);
            status.cpu_throttle_percentage = self.convergence.throttle();
        }
        shared.status()
    }

    /// Bytes of this many pages.
    fn bytes(&self, pages: usize) -> u64 {
        pages as u64 * self.source.ram.page_size() as u64
    }

    fn timed_out(&self) -> SourceError {
        let page_size = self.source.ram.page_size() as u64;
        let rates = self.rates;
        SourceError::TimedOut {
            time: self.source.config.timeout.unwrap_or_default(),
            remaining: self.source.shared.status().ram.remaining,
            dirty_rate: whole(rates.dirty_pages) * page_size,
            bandwidth: whole(rates.page_bytes),
        }
    }

    fn completed(&mut self) {
        let Some(mut paused) = self.paused else {
            return;
        };
        paused.lap(|parts| &mut parts.commit);
        let (downtime, parts) = (paused.total(), paused.parts);
        info!(?downtime, "the guest runs at the destination ({parts})");
        let mut progress = self.source.shared.progress();
        progress.status.downtime = Some(downtime);
        progress.status.downtime_parts = Some(parts);
        progress.end();
    }

    /// Resumes the guest, if it was paused.
    fn resume(&mut self) -> SourceEvent {
        let resumed = match self.paused.take() {
            Some(paused) => {
                let resumed = match self.runs {
                    true => self.guest.resume(),
                    false => Ok(()),
                };
                self.source.shared.progress().status.downtime = Some(paused.started.elapsed());
                resumed
            }
            None => Ok(()),
        };
        self.end_throttle();
        match resumed {
            Ok(()) => SourceEvent::Resumed,
            Err(error) => {
                let reason = chain(&*error);
                self.not_resumed = Some(error);
                SourceEvent::NotResumed { reason }
            }
        }
    }

    /// Ends the throttle, also of a guest that stays paused: an operator who resumes it does not know of the throttle.
    fn end_throttle(&mut self) {
        if self.convergence.end_throttle() {
            self.guest.throttle(0);
        }
    }

    fn stop_logging(&mut self) {
        if std::mem::take(&mut self.logging)
            && let Err(error) = self.source.log.stop()
        {
            let error = chain(&error);
            warn!(error, "the guest may be slower until the next migration");
        }
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
        state: &SourceState,
        failure: Option<SourceError>,
    ) -> Result<(), SourceError> {
        let cause = decision.cause.unwrap_or_default();
        if let (Some(error), SourceState::Returning { cause }) = (self.not_resumed.take(), state) {
            let cause = cause.clone();
            let source = Box::new(failure.unwrap_or(SourceError::Destination { cause }));
            return Err(SourceError::NotResumed { source, error });
        }
        Err(match decision.guest {
            // The guest has arrived. The destination may have sent it on.
            GuestLocation::Destination | GuestLocation::MovedOn => return Ok(()),
            GuestLocation::Source => failure.unwrap_or(SourceError::Destination { cause }),
            GuestLocation::InDoubt => SourceError::InDoubt { cause },
            // `Gone` and `Unconfirmed` arise only when an attempt is taken up again, which never happens here.
            GuestLocation::Lost | GuestLocation::Gone | GuestLocation::Unconfirmed => {
                SourceError::Lost { cause }
            }
        })
    }
}

/// Most bytes of a [description](SourceGuest::describe): in `prepare` each takes up to four.
const MAX_DESCRIPTION: usize = 200 << 10;

/// Part of the downtime limit that the last round may take: device state, two answers and scheduling need time too.
const LAST_ROUND_SHARE: f64 = 0.7;

/// Time for the guest to write something before the dirty log is read again.
const IDLE_ROUND: Duration = Duration::from_millis(50);

fn guest_error(what: &'static str, source: GuestError) -> SourceError {
    SourceError::Guest { what, source }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is positive, and the cast saturates"
)]
fn whole(rate: f64) -> u64 {
    rate as u64
}
