//! The progress of a migration, under the names of QEMU's `query-migrate`.

use std::{
    num::NonZeroU64,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use serde::{Serialize, Serializer};
use vamoose_link::{Counters, DowntimeParts, Hangup, Limit, Pacer, Session, Stats, lock, millis};

use crate::{
    Ram, SourceError,
    offload::{Account, OffloadCounters},
};

/// Watches a migration and ends it, from any thread.
#[derive(Clone)]
pub struct Handle(pub(crate) Arc<Shared>);

/// A migration at one moment. Serialized, times are in milliseconds, as in QEMU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
#[serde(rename_all = "kebab-case")]
pub struct Status {
    /// The phase.
    pub status: Phase,
    /// Time since the beginning.
    #[serde(serialize_with = "as_millis")]
    pub total_time: Duration,
    /// How long the guest was paused, once it runs again: at the destination, or here after a failure.
    #[serde(serialize_with = "some_as_millis")]
    pub downtime: Option<Duration>,
    /// Parts of the downtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime_parts: Option<DowntimeParts>,
    /// How long the last round would take if the guest were paused now.
    #[serde(serialize_with = "some_as_millis")]
    pub expected_downtime: Option<Duration>,
    /// Time until the first page was sent.
    #[serde(serialize_with = "as_millis")]
    pub setup_time: Duration,
    /// The guest's memory.
    pub ram: RamStatus,
    /// The devices' part of the search for zero pages, if devices are used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_page_detection: Option<OffloadCounters>,
    /// Percentage of time for which the vCPUs are stopped.
    pub cpu_throttle_percentage: u8,
    /// Why the migration failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_desc: Option<String>,
}

fn as_millis<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    millis(*time).serialize(serializer)
}

fn some_as_millis<S: Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    time.map(millis).serialize(serializer)
}

/// The memory part of a [`Status`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
#[serde(rename_all = "kebab-case")]
pub struct RamStatus {
    /// Bytes sent, headers included.
    pub transferred: u64,
    /// Bytes of pages that are known to be dirty and have not been sent.
    pub remaining: u64,
    /// Bytes of guest memory.
    pub total: u64,
    /// Zero pages sent, as offsets only.
    pub duplicate: u64,
    /// Normal pages sent.
    pub normal: u64,
    /// Bytes of guest memory in the normal pages.
    pub normal_bytes: u64,
    /// Pages that the guest dirties per second.
    pub dirty_pages_rate: u64,
    /// Megabits per second on the wire, in the last round.
    pub mbps: f64,
    /// Pages per second, normal and zero, in the last round.
    pub pages_per_second: u64,
    /// How often the dirty log was read.
    pub dirty_sync_count: u64,
    /// See [`vamoose_link::Counters::missed_zero_copy`].
    pub dirty_sync_missed_zero_copy: u64,
    /// Bytes in a page.
    pub page_size: u64,
}

/// The phase of a migration, as QEMU's `MigrationStatus`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Connecting.
    #[default]
    Setup,
    /// Sending the memory of the running guest.
    Active,
    /// Sending the rest of the paused guest.
    Device,
    /// Sending the rest of the memory to the guest, which runs at the destination.
    PostcopyActive,
    /// The guest runs at the destination.
    Completed,
    /// The migration failed. The error tells where the guest is.
    Failed,
    /// The migration was cancelled. The guest runs at the source.
    Cancelled,
}

impl Handle {
    /// The progress at this moment.
    pub fn status(&self) -> Status {
        self.0.status()
    }

    /// The counters.
    pub fn moved(&self) -> Counters {
        self.0.stats.snapshot()
    }

    /// The session with the destination, once it is established.
    pub fn session(&self) -> Option<Session> {
        self.0.session.get().cloned()
    }

    /// Has the guest switch over after the round that is under way, as by [`Switchover::Force`](crate::Switchover::Force): with
    /// [`SourceConfig::post_copy`](crate::SourceConfig::post_copy) it then runs at the destination at once.
    pub fn switch_over(&self) {
        self.0.switch_over.store(true, Ordering::Relaxed);
    }

    /// Cancels the migration: the guest resumes at the source. False if it is too late: the destination was told
    /// to run the guest, or the migration is over.
    pub fn cancel(&self) -> bool {
        if self.0.progress().over {
            return false;
        }
        let cancelled = self.0.decide(CANCELLED);
        if cancelled && let Some(wake) = &*lock(&self.0.wake) {
            wake();
        }
        cancelled || self.0.is_cancelled()
    }

    /// Changes the [bandwidth limit](crate::SourceConfig::max_bandwidth), in bytes per second.
    pub fn set_max_bandwidth(&self, limit: Option<NonZeroU64>) {
        self.0.pacer.set(limit);
    }

    /// Changes the [downtime limit](crate::SourceConfig::downtime_limit), from the next decision on. At most the longest downtime counts.
    pub fn set_downtime_limit(&self, limit: Duration) {
        self.0
            .downtime_limit
            .store(millis(limit), Ordering::Relaxed);
    }
}

/// Shared by a migration's threads and handles.
pub(crate) struct Shared {
    pub(crate) stats: Arc<Stats>,
    pub(crate) pacer: Arc<Pacer>,
    /// In milliseconds.
    downtime_limit: AtomicU64,
    pub(crate) zero_page_detection: Option<Account>,
    pub(crate) hangup: Hangup,
    /// The session of the first control connection and the channels.
    pub(crate) session: OnceLock<Session>,
    fate: AtomicU8,
    /// Wakes the coordinator of a migration that is cancelled.
    wake: Mutex<Option<Box<dyn Fn() + Send>>>,
    /// A handle wants the guest to switch over.
    pub(crate) switch_over: AtomicBool,
    progress: Mutex<Progress>,
}

/// Progress that only the coordinator updates.
pub(crate) struct Progress {
    pub(crate) status: Status,
    pub(crate) start: Instant,
    /// Pages that had been sent when `status.ram.remaining` was counted.
    pages_sent: u64,
    /// Pages of those that turned out to be untouched, and are not sent.
    pub(crate) untouched: Arc<AtomicU64>,
    over: bool,
}

impl Progress {
    /// Ends the migration's time.
    pub(crate) fn end(&mut self) {
        if !self.over {
            self.over = true;
            self.status.total_time = self.start.elapsed();
        }
    }

    /// `pages` are dirty and will be sent, after those that `stats` has counted.
    pub(crate) fn count_remaining(&mut self, pages: usize, stats: &Stats) {
        self.status.ram.remaining = pages as u64 * self.status.ram.page_size;
        self.pages_sent = pages_sent(&stats.snapshot());
        self.untouched = Arc::default();
    }
}

fn pages_sent(moved: &Counters) -> u64 {
    moved.normal_pages + moved.zero_pages
}

/// Whether the migration may still be cancelled.
const OPEN: u8 = 0;
const CANCELLED: u8 = 1;
const COMMITTED: u8 = 2;

impl Shared {
    pub(crate) fn new(
        ram: &Ram,
        max_bandwidth: Option<NonZeroU64>,
        downtime_limit: Duration,
    ) -> std::io::Result<Self> {
        let mut status = Status::default();
        status.ram.total = ram.total_bytes();
        status.ram.remaining = ram.total_bytes();
        status.ram.page_size = ram.page_size() as u64;
        let hangup = Hangup::new()?;
        let pacer = Arc::new(Pacer::new(max_bandwidth, &Limit::default()));
        hangup.set_pacer(pacer.clone());
        Ok(Self {
            stats: Arc::default(),
            pacer,
            downtime_limit: AtomicU64::new(millis(downtime_limit)),
            zero_page_detection: None,
            hangup,
            session: OnceLock::new(),
            fate: AtomicU8::new(OPEN),
            wake: Mutex::default(),
            switch_over: AtomicBool::new(false),
            progress: Mutex::new(Progress {
                status,
                start: Instant::now(),
                pages_sent: 0,
                untouched: Arc::default(),
                over: false,
            }),
        })
    }

    /// The coordinator's part of the status.
    pub(crate) fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }

    pub(crate) fn status(&self) -> Status {
        let progress = self.progress();
        let mut status = progress.status.clone();
        if !progress.over {
            status.total_time = progress.start.elapsed();
        }
        let moved = self.stats.snapshot();
        let done = pages_sent(&moved).saturating_sub(progress.pages_sent)
            + progress.untouched.load(Ordering::Relaxed);
        let done = done * status.ram.page_size;
        drop(progress);
        status.zero_page_detection = self.zero_page_detection.as_ref().map(Account::read);
        status.ram.remaining = status.ram.remaining.saturating_sub(done);
        status.ram.transferred = moved.wire_bytes;
        status.ram.duplicate = moved.zero_pages;
        status.ram.normal = moved.normal_pages;
        status.ram.normal_bytes = moved.page_bytes;
        status.ram.dirty_sync_missed_zero_copy = moved.missed_zero_copy;
        status
    }

    /// Lets `wake` be called when the migration is cancelled.
    ///
    /// # Errors
    /// When it has been cancelled already.
    pub(crate) fn wake_by(&self, wake: impl Fn() + Send + 'static) -> Result<(), SourceError> {
        *lock(&self.wake) = Some(Box::new(wake));
        match self.is_cancelled() {
            true => Err(SourceError::Cancelled),
            false => Ok(()),
        }
    }

    /// The migration is over: nothing is to be woken.
    pub(crate) fn forget_wake(&self) {
        *lock(&self.wake) = None;
    }

    pub(crate) fn downtime_limit(&self) -> Duration {
        Duration::from_millis(self.downtime_limit.load(Ordering::Relaxed))
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.fate.load(Ordering::Acquire) == CANCELLED
    }

    /// Passes the point of no return. False if the migration was cancelled before.
    pub(crate) fn commit(&self) -> bool {
        self.decide(COMMITTED)
    }

    fn decide(&self, fate: u8) -> bool {
        self.fate
            .compare_exchange(OPEN, fate, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}

/// Measures the parts of a downtime.
#[derive(Clone, Copy)]
pub(crate) struct Stopwatch {
    pub(crate) started: Instant,
    pub(crate) parts: DowntimeParts,
    lap: Instant,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        let now = Instant::now();
        let parts = DowntimeParts::default();
        Self {
            started: now,
            parts,
            lap: now,
        }
    }

    /// Adds the time since the last lap to `part`.
    pub(crate) fn lap(&mut self, part: impl FnOnce(&mut DowntimeParts) -> &mut Duration) {
        let now = Instant::now();
        *part(&mut self.parts) += now - self.lap;
        self.lap = now;
    }

    /// The time until the last lap: the sum of the parts.
    pub(crate) fn total(&self) -> Duration {
        self.lap - self.started
    }
}
