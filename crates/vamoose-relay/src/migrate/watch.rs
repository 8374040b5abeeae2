//! Follows the source QEMU's migration to its end, and stops the migration on request.

use std::{
    mem,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tracing::{info, warn};
use vamoose_link::{Address, Hangup, Session, Stats};

use super::{
    Cause, Migration, News, Progress,
    hand_over::HandOver,
    policy::Guide,
    source::{EVENT_WAIT, SourceQemu},
    storage::Copies,
};
use crate::{
    chain,
    qemu::{MigrationStatus, QemuError, is_switchover},
};

/// How often to ask QEMU by `query-migrate`.
pub(super) const ASK_EVERY: Duration = Duration::from_millis(200);
/// How long a QEMU may take to cancel before its connections are closed.
const CANCELLING: Duration = Duration::from_secs(5);

/// The relay beside the source.
pub(super) struct SourceRelay<'a> {
    /// Where it accepts the source's connections.
    pub(super) address: &'a Address,
    pub(super) stats: &'a Stats,
    pub(super) session: &'a Session,
    pub(super) hangup: &'a Hangup,
    pub(super) has_ended: &'a dyn Fn() -> bool,
}

/// A migration that is being stopped from here.
struct Stop {
    cause: Cause,
    since: Instant,
    /// Stopping takes long, and the last measures have been taken.
    is_urged: bool,
}

impl Migration<'_> {
    /// Makes the source migrate to its relay, and waits for the end. Returns QEMU's answer to `query-migrate` if it completed, or has
    /// switched to post-copy.
    pub(super) fn watch(
        &self,
        hand_over: &mut HandOver<'_>,
        source: &mut SourceQemu,
        relay: &SourceRelay<'_>,
        copies: &mut Copies,
        observe: &mut dyn FnMut(News<'_>),
    ) -> Result<Value, Cause> {
        if self.is_cancelled() {
            return Err(Cause::Cancelled);
        }
        observe(News::WaitsFor("the source QEMU's monitor"));
        source.begin()?;
        let uri = relay.address.to_string();
        let told = source.qemu.execute("migrate", json!({ "uri": uri }));
        // Without an answer, QEMU may have begun.
        source.is_unsent = told.as_ref().is_err_and(QemuError::is_refusal);
        told?;
        let mut stopping: Option<Stop> = None;
        let mut asked = None;
        let mut without_relay = None;
        let mut guide = Guide::new(self.policy(source), self.channels, self.config.layout);
        loop {
            if source.may_be_switched {
                // QEMU cannot be stopped any more, whatever happens.
                hand_over.attempt.refuse_to_cancel();
            } else if let Some(stop) = &mut stopping {
                stop.urge(source, relay.hangup)?;
            } else if let Some(cause) =
                self.reason_to_stop(source, guide.downtime_max(), without_relay)
            {
                stopping = Some(Stop::begin(cause, source, copies, relay.hangup)?);
            }
            // A QEMU that neither cancels nor completes is not waited for any longer.
            if let Some(Stop { cause, .. }) = stopping.take_if(|stop| stop.is_overdue()) {
                return Err(cause);
            }
            let is_news = source.take_events(EVENT_WAIT)?;
            let noted = hand_over.note_wish(source.is_wanted);
            // What QEMU does decides then.
            if !source.may_be_switched {
                noted?;
            }
            relay.session.set_paused(source.stopped.is_some());
            if !is_news && asked.is_some_and(|asked: Instant| asked.elapsed() < ASK_EVERY) {
                continue;
            }
            asked = Some(Instant::now());
            let mut info = match source.qemu.query_migrate() {
                Err(QemuError::Qmp(error)) if error.is_no_answer() && !self.is_cancelled() => {
                    warn!("{}; it is asked again", chain(&error));
                    continue;
                }
                info => info?,
            };
            let moved = relay.stats.snapshot();
            let round_trip = relay.session.round_trip();
            let status = info["status"].as_str().unwrap_or("none").to_owned();
            if status == "active" && stopping.is_none() && source.stopped.is_none() {
                let cause = guide.look(source, &info, moved, round_trip)?;
                let stop = cause.map(|cause| Stop::begin(cause, source, copies, relay.hangup));
                stopping = stop.transpose()?;
            }
            if stopping.is_none()
                && let Err(cause) = copies.follow(&mut source.qemu, &status)
            {
                stopping = Some(Stop::begin(cause, source, copies, relay.hangup)?);
            }
            if status == "active" && stopping.is_none() {
                self.switch(hand_over, source, relay, &info, guide.elapsed())?;
            }
            guide.complete(&mut info, round_trip);
            if status == "completed" && !source.may_be_switched {
                check_sent(hand_over, source)?;
            }
            observe(News::Progress(&Progress {
                status: status.clone(),
                moved,
                source: info.clone(),
                session: Some(relay.session.clone()),
                disks: copies.progress(),
                stopped_for: source.stopped_for(),
            }));
            // QEMU reports the switch just before it pauses the guest.
            if MigrationStatus::of(&info) == MigrationStatus::Switched
                && is_switchover(&source.qemu.state()?)
            {
                return Ok(info);
            }
            match status.as_str() {
                "completed" => {
                    if stopping.is_some() {
                        warn!("too late to cancel: the guest has been sent");
                    }
                    return Ok(info);
                }
                // A cancelled source sometimes reports a failure.
                "cancelled" | "failed" => {
                    return Err(stopping.map_or_else(|| broken(&info), |stop| stop.cause));
                }
                _ => {}
            }
            // A source that waits for a SYNC to be sent does not notice that its relay is gone.
            if (relay.has_ended)() || relay.hangup.is_hung_up() {
                without_relay.get_or_insert_with(Instant::now);
            }
        }
    }

    fn reason_to_stop(
        &self,
        source: &SourceQemu,
        downtime_max: Duration,
        without_relay: Option<Instant>,
    ) -> Option<Cause> {
        if self.is_cancelled() {
            Some(Cause::Cancelled)
        } else if source.stopped_for() > downtime_max {
            Some(Cause::Downtime(downtime_max))
        } else if let Some(error) = source.suspended_error() {
            Some(error.into())
        } else if without_relay.is_some_and(|since| since.elapsed() > CANCELLING) {
            let reason = "the relay has ended, and the source QEMU has not noticed";
            Some(Cause::broken(reason))
        } else {
            None
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }
}

impl Stop {
    fn begin(
        cause: Cause,
        source: &mut SourceQemu,
        copies: &Copies,
        hangup: &Hangup,
    ) -> Result<Self, Cause> {
        info!("{cause}");
        let since = Instant::now();
        // The hangup closes the main stream of a QEMU that does not cancel safely first, and then its channels. A QEMU that cancels
        // safely may block while it writes device state, and not answer its monitor.
        let is_safe = source.qemu.cancels_safely() || copies.are_due();
        let is_calm = matches!(cause, Cause::Cancelled | Cause::TimedOut { .. });
        if !is_safe || !is_calm {
            hangup.hang_up();
        }
        if is_safe {
            cancel(source, hangup)?;
        }
        Ok(Self {
            cause,
            since,
            is_urged: false,
        })
    }

    /// Takes the last measures when stopping takes long: closes the sockets of a QEMU that was cancelled, and cancels one whose
    /// sockets were closed.
    fn urge(&mut self, source: &mut SourceQemu, hangup: &Hangup) -> Result<(), Cause> {
        if self.since.elapsed() <= CANCELLING || mem::replace(&mut self.is_urged, true) {
            return Ok(());
        }
        hangup.hang_up();
        match source.qemu.cancels_safely() {
            true => Ok(()),
            false => cancel(source, hangup),
        }
    }

    fn is_overdue(&self) -> bool {
        self.since.elapsed() > 4 * CANCELLING
    }
}

/// Checks a guest that has been sent completely: it must not have run since, and may have to be refused. The guest is paused, so
/// this does not wait.
fn check_sent(hand_over: &mut HandOver<'_>, source: &mut SourceQemu) -> Result<(), Cause> {
    // Takes the events, too, which tell when the guest stopped.
    let has_come_back = source.has_come_back()?;
    hand_over.note_wish(source.is_wanted)?;
    if has_come_back {
        return Err(Cause::broken(
            "the guest was continued at the source QEMU's monitor when it had been sent",
        ));
    }
    source
        .suspended_error()
        .map_or(Ok(()), |error| Err(error.into()))
}

fn cancel(source: &mut SourceQemu, hangup: &Hangup) -> Result<(), Cause> {
    match source.qemu.execute("migrate_cancel", json!({})) {
        Ok(()) => Ok(()),
        Err(error) => {
            hangup.hang_up();
            // The migration may just have ended by itself.
            if error.is_refusal() {
                return Ok(());
            }
            Err(error.into())
        }
    }
}

fn broken(info: &Value) -> Cause {
    if info["status"] == "cancelled" {
        return Cause::broken("the migration was cancelled at the source QEMU's monitor");
    }
    let reason = info["error-desc"].as_str().unwrap_or("no reason given");
    Cause::broken(format!("source QEMU: {reason}"))
}
