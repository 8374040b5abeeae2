//! Pacing: limits in bytes per second, of one migration and of all migrations of a host.
//!
//! ```text
//!  sender:    a packet ──> Pacer: limit of the migration, or what its receiver reports ──> Limit of the host ──> stream
//!  receiver:  a frame's header ──> Limit of the host ──> its payload is read; frames to the sender report the share
//! ```
//!
//! A [`Limit`] is shared by many migrations: [`shares`] has the rules. The receiver tells each sender its share, so that the sender
//! waits before it encodes further, and no queue builds up in windows and sockets: a paused guest would wait for it. A sender that
//! ignores its share is held up all the same, as the receiver reads no faster.

mod shares;

use std::{
    num::NonZeroU64,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use self::shares::Shares;
use crate::{Session, lock, session::Urgency};

/// A limit in bytes per second of many migrations together, which can be changed at any time. A clone is the same limit.
#[derive(Clone, Debug)]
pub struct Limit(Arc<State>);

#[derive(Debug)]
struct State {
    /// Read for every packet, so that nothing is locked without a limit.
    is_set: AtomicBool,
    shares: Mutex<Shares>,
    changed: Condvar,
}

/// Time whose unused bytes are kept, in seconds, so that a short pause of a source costs nothing.
const BURST: f64 = 0.02;
/// The same for a migration's own limit: a QEMU that keeps to a limit itself sends the bytes of 100 ms at once.
const OWN_BURST: f64 = 0.1;

impl Default for Limit {
    fn default() -> Self {
        Self::new(None)
    }
}

impl Limit {
    /// A limit of `rate` bytes per second, or none.
    pub fn new(rate: Option<NonZeroU64>) -> Self {
        Self::with_burst(rate, BURST)
    }

    fn with_burst(rate: Option<NonZeroU64>, burst: f64) -> Self {
        let limit = Self(Arc::new(State {
            is_set: AtomicBool::new(false),
            shares: Mutex::new(Shares::new(burst, Instant::now())),
            changed: Condvar::new(),
        }));
        limit.set(rate);
        limit
    }

    /// Changes the limit, also for migrations under way.
    pub fn set(&self, rate: Option<NonZeroU64>) {
        let mut shares = lock(&self.0.shares);
        shares.set_rate(rate, Instant::now());
        self.0.is_set.store(rate.is_some(), Ordering::Relaxed);
        self.0.changed.notify_all();
    }

    /// The limit, in bytes per second.
    pub fn rate(&self) -> Option<NonZeroU64> {
        lock(&self.0.shares).rate()
    }

    /// Another migration under this limit.
    pub(crate) fn join(&self) -> Member {
        Member {
            limit: self.clone(),
            id: lock(&self.0.shares).join(Instant::now()),
            urgency: AtomicU8::new(Urgency::default() as u8),
        }
    }
}

/// A migration under a limit.
#[derive(Debug)]
pub(crate) struct Member {
    limit: Limit,
    id: u64,
    /// An [`Urgency`].
    urgency: AtomicU8,
}

impl Member {
    /// Whether there is a limit at present.
    pub(crate) fn is_limited(&self) -> bool {
        self.limit.0.is_set.load(Ordering::Relaxed)
    }

    /// Reserves bytes: see [`wait`](Self::wait).
    pub(crate) fn reserve(&self, bytes: usize) -> f64 {
        lock(&self.limit.0.shares).reserve(self.id, bytes, Instant::now())
    }

    /// How long a reservation has to wait, before this is to be asked again.
    pub(crate) fn wait(&self, reserved: f64) -> Option<Duration> {
        lock(&self.limit.0.shares).wait(self.id, reserved, Instant::now())
    }

    /// Sleeps for this time, or until the limit or an urgency changes.
    fn sleep(&self, time: Duration) {
        let state = &*self.limit.0;
        let woken = state.changed.wait_timeout(lock(&state.shares), time);
        drop(woken.unwrap_or_else(PoisonError::into_inner));
    }

    /// Sets how urgent the guest is. Returns whether that is a change.
    pub(crate) fn set_urgency(&self, urgency: Urgency) -> bool {
        // Mostly it is the same.
        let code = urgency as u8;
        if self.urgency.load(Ordering::Relaxed) == code
            || self.urgency.swap(code, Ordering::Relaxed) == code
        {
            return false;
        }
        let mut shares = lock(&self.limit.0.shares);
        shares.set_urgency(self.id, urgency, Instant::now());
        self.limit.0.changed.notify_all();
        true
    }

    /// What to report to the sender of what is received, in KiB per second, or 0 without a limit. A little less than the share, for
    /// what the counted bytes do not include (headers of frames, TLS and TCP), and so that a queue becomes shorter.
    pub(crate) fn reported(&self) -> u32 {
        if !self.is_limited() {
            return 0;
        }
        let share = lock(&self.limit.0.shares).share(self.id, Instant::now());
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates"
        )]
        share.map_or(0, |share| ((share * 31.0 / 32.0 / 1024.0) as u32).max(1))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        lock(&self.limit.0.shares).leave(self.id, Instant::now());
    }
}

/// Limits what all channels of a migration send together: by a limit of its own, by what its receiver reports, and by a [`Limit`]
/// that it shares with others.
pub struct Pacer {
    /// The migration's own limit; 0 for none.
    most: AtomicU64,
    own: Member,
    host: Member,
    /// The session over which the migration goes, and what its receiver has reported last.
    session: OnceLock<Session>,
    reported: AtomicU32,
    /// Bytes sent when the last round ended, and those of the largest round.
    rounds: Mutex<[u64; 2]>,
    is_closed: AtomicBool,
}

/// A guest is finishing when a round has less than this part of the largest one.
const FEW: u64 = 8;

impl Pacer {
    /// A pacer for `most` bytes per second, that also keeps to the limit of the host.
    pub fn new(most: Option<NonZeroU64>, host: &Limit) -> Self {
        Self {
            most: AtomicU64::new(most.map_or(0, NonZeroU64::get)),
            own: Limit::with_burst(most, OWN_BURST).join(),
            host: host.join(),
            session: OnceLock::new(),
            reported: AtomicU32::new(0),
            rounds: Mutex::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Keeps to what the peer of `session` reports. A further call has no effect.
    pub fn follow(&self, session: Session) {
        let _ = self.session.set(session);
    }

    /// Changes the migration's own limit.
    pub fn set(&self, most: Option<NonZeroU64>) {
        self.most
            .store(most.map_or(0, NonZeroU64::get), Ordering::Relaxed);
        self.set_own();
    }

    /// Waits until `bytes` may go out, or the pacer is closed.
    pub fn wait_for(&self, bytes: usize) {
        for member in self.limited() {
            let reserved = member.reserve(bytes);
            while !self.is_closed.load(Ordering::Acquire)
                && let Some(wait) = member.wait(reserved)
            {
                member.sleep(wait);
                self.listen();
            }
        }
    }

    /// Counts `bytes` that are sent without waiting, as what somebody waits for is. Later callers wait longer for them.
    pub fn charge(&self, bytes: usize) {
        for member in self.limited() {
            member.reserve(bytes);
        }
    }

    /// A round has ended; `sent` bytes have been sent so far.
    pub(crate) fn end_round(&self, sent: u64) {
        let [before, largest] = &mut *lock(&self.rounds);
        let bytes = sent.saturating_sub(*before);
        *before = sent;
        *largest = bytes.max(*largest);
        if let Some(session) = self.session.get() {
            session.set_finishing(bytes.saturating_mul(FEW) < *largest);
        }
    }

    /// Stops limiting: the migration is over.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        for member in [&self.own, &self.host] {
            member.limit.0.changed.notify_all();
        }
    }

    /// The limits that are set.
    fn limited(&self) -> impl Iterator<Item = &Member> {
        self.listen();
        let members = [&self.own, &self.host].into_iter();
        members.filter(|member| member.is_limited())
    }

    /// Limits the migration by the least of its own limit and what its receiver reports.
    fn set_own(&self) {
        let reported = u64::from(self.reported.load(Ordering::Relaxed)) << 10;
        let both = [self.most.load(Ordering::Relaxed), reported];
        let set = both.into_iter().filter_map(NonZeroU64::new);
        self.own.limit.set(set.min());
    }

    /// Takes in what the session has heard from the receiver, and knows of the guest.
    fn listen(&self) {
        let Some(session) = self.session.get() else {
            return;
        };
        let reported = session.reported_share();
        if self.reported.load(Ordering::Relaxed) != reported {
            self.reported.store(reported, Ordering::Relaxed);
            self.set_own();
        }
        if self.host.is_limited() {
            self.host.set_urgency(session.urgency());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn rate(bytes: u64) -> Option<NonZeroU64> {
        NonZeroU64::new(bytes)
    }

    #[test]
    fn closing_wakes_waiting_callers() {
        for (own, host) in [(rate(1), None), (None, rate(1))] {
            let pacer = Arc::new(Pacer::new(own, &Limit::new(host)));
            pacer.wait_for(1 << 40);
            let waiter = thread::spawn({
                let pacer = pacer.clone();
                move || pacer.wait_for(1)
            });
            pacer.close();
            waiter.join().unwrap();
        }
    }

    #[test]
    fn lifting_the_limit_wakes_waiting_callers() {
        let limit = Limit::new(rate(1));
        let pacer = Arc::new(Pacer::new(None, &limit));
        pacer.wait_for(1 << 40);
        let waiter = thread::spawn({
            let pacer = pacer.clone();
            move || pacer.wait_for(1)
        });
        limit.set(None);
        waiter.join().unwrap();
        // And nothing waits from here on.
        pacer.wait_for(1 << 40);
        pacer.wait_for(1 << 40);
    }

    #[test]
    fn a_share_is_reported_only_under_a_limit() {
        let limit = Limit::new(None);
        let member = limit.join();
        assert_eq!(member.reported(), 0);
        limit.set(rate(64 << 20));
        assert_eq!(member.reported(), 62 << 10);
        assert!(member.set_urgency(Urgency::Paused) && !member.set_urgency(Urgency::Paused));
        limit.set(rate(1));
        assert_eq!(member.reported(), 1);
    }
}
