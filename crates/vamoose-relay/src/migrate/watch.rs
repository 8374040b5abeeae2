//! Follows the source QEMU's migration to its end, and stops the migration on request.

use std::{
    mem,
    path::Path,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tracing::{info, warn};
use vamoose_link::{Hangup, Session, Stats};

use super::{
    Cause, Migration, Progress,
    hand_over::HandOver,
    remainder::Remainder,
    source::{EVENT_WAIT, SourceQemu},
};
use crate::{chain, qemu::QemuError};

/// How often to ask for QEMU's account.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// How long a QEMU may take to cancel before its connections are closed.
const CANCELLING: Duration = Duration::from_secs(5);

/// The relay beside the source.
pub(super) struct Beside<'a> {
    /// Socket for the source's connections.
    pub(super) socket: &'a Path,
    pub(super) stats: &'a Stats,
    pub(super) session: &'a Session,
    pub(super) hangup: &'a Hangup,
    pub(super) has_ended: &'a dyn Fn() -> bool,
}

/// Why a migration is being stopped from here.
struct Stop {
    cause: Cause,
    since: Instant,
    /// Stopping takes long, and the last measures have been taken.
    is_urged: bool,
}

impl Migration<'_> {
    /// Makes the source migrate to its relay, and waits for the end. Returns QEMU's answer to `query-migrate` if it completed.
    pub(super) fn watch(
        &self,
        hand_over: &mut HandOver<'_>,
        source: &mut SourceQemu,
        relay: &Beside<'_>,
        observe: &mut dyn FnMut(&Progress),
    ) -> Result<Value, Cause> {
        if self.is_cancelled() {
            return Err(Cause::Cancelled);
        }
        source.begin()?;
        let uri = format!("unix:{}", relay.socket.display());
        source.qemu.execute("migrate", json!({ "uri": uri }))?;
        let mut stopping = None;
        let mut asked = None;
        let mut without_relay = None;
        let mut remainder = source
            .downtime_limit()
            .map(|limit| Remainder::new(limit, self.channels, self.config.layout));
        loop {
            if stopping.is_none() {
                stopping = self.reason_to_stop(source, without_relay);
                if let Some(Stop { cause, .. }) = &stopping {
                    info!("{cause}");
                    stop(source, cause, relay.hangup)?;
                }
            }
            if let Some(stop) = &mut stopping
                && stop.since.elapsed() > CANCELLING
                && !mem::replace(&mut stop.is_urged, true)
            {
                // Without its sockets QEMU has to give up. One whose sockets were closed first gets the cancel now.
                relay.hangup.hang_up();
                if !source.qemu.cancels_safely() {
                    cancel(source, relay.hangup)?;
                }
            }
            // A QEMU that neither cancels nor completes is not waited for any longer.
            let overdue = |stop: &mut Stop| stop.since.elapsed() > 4 * CANCELLING;
            if let Some(Stop { cause, .. }) = stopping.take_if(overdue) {
                return Err(cause);
            }
            let is_news = source.take_events(EVENT_WAIT)?;
            hand_over.note_wish(source.is_wanted)?;
            if !is_news && asked.is_some_and(|asked: Instant| asked.elapsed() < ASK_EVERY) {
                continue;
            }
            asked = Some(Instant::now());
            let account = match source.qemu.query_migrate() {
                Err(QemuError::Qmp(error)) if error.is_no_answer() && !self.is_cancelled() => {
                    warn!("{}; it is asked again", chain(&error));
                    continue;
                }
                account => account?,
            };
            let status = account["status"].as_str().unwrap_or("none");
            let moved = relay.stats.snapshot();
            if let (Some(remainder), "active") = (&mut remainder, status)
                && let Some(allowed) =
                    remainder.after(Instant::now(), moved, relay.session.round_trip())
            {
                source.allow(allowed)?;
            }
            if status == "completed" {
                // Takes the events, which tell when the guest stopped. The guest is paused, so this does not wait.
                let has_come_back = source.has_come_back()?;
                hand_over.note_wish(source.is_wanted)?;
                if has_come_back {
                    return Err(Cause::broken(
                        "the guest was continued at the source QEMU's monitor when it had been sent",
                    ));
                }
                if let Some(error) = source.suspended_in_vain() {
                    return Err(error.into());
                }
            }
            observe(&Progress {
                status: status.to_owned(),
                moved,
                source: account.clone(),
                session: Some(relay.session.clone()),
                stopped_for: source.stopped_for(),
            });
            match status {
                "completed" => {
                    if stopping.is_some() {
                        warn!("too late to cancel: the guest has been sent");
                    }
                    return Ok(account);
                }
                // A cancelled source sometimes reports a failure.
                "cancelled" | "failed" => {
                    return Err(stopping.map_or_else(|| broken(&account), |stop| stop.cause));
                }
                _ => {}
            }
            // A source that waits for a SYNC to be sent does not notice that its relay is gone.
            if (relay.has_ended)() || relay.hangup.is_hung_up() {
                without_relay.get_or_insert_with(Instant::now);
            }
        }
    }

    fn reason_to_stop(&self, source: &SourceQemu, without_relay: Option<Instant>) -> Option<Stop> {
        let cause = if self.is_cancelled() {
            Cause::Cancelled
        } else if source.stopped_for() > self.downtime_max {
            Cause::Downtime(self.downtime_max)
        } else if let Some(error) = source.suspended_in_vain() {
            error.into()
        } else if without_relay.is_some_and(|since| since.elapsed() > CANCELLING) {
            Cause::broken("the relay has ended, and the source QEMU has not noticed")
        } else {
            return None;
        };
        let since = Instant::now();
        Some(Stop {
            cause,
            since,
            is_urged: false,
        })
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }
}

fn stop(source: &mut SourceQemu, cause: &Cause, hangup: &Hangup) -> Result<(), Cause> {
    if !source.qemu.cancels_safely() {
        // This ends QEMU's main stream first, and then its channels.
        hangup.hang_up();
        return Ok(());
    }
    if !matches!(cause, Cause::Cancelled) {
        // With the guest stopped, a QEMU that blocks in a write of device state does not answer its monitor.
        hangup.hang_up();
    }
    cancel(source, hangup)
}

fn cancel(source: &mut SourceQemu, hangup: &Hangup) -> Result<(), Cause> {
    let cancelled = source.qemu.execute("migrate_cancel", json!({}));
    if cancelled.is_err() {
        hangup.hang_up();
    }
    match cancelled {
        // The migration may just have ended by itself.
        Err(error) if error.is_refusal() => Ok(()),
        result => Ok(result?),
    }
}

fn broken(account: &Value) -> Cause {
    if account["status"] == "cancelled" {
        return Cause::broken("the migration was cancelled at the source QEMU's monitor");
    }
    let reason = account["error-desc"].as_str().unwrap_or("no reason given");
    Cause::broken(format!("source QEMU: {reason}"))
}
