//! Post-copy at the source: the switch, and the rest of the memory after it.
//!
//! ```text
//!  pre-copy ─> journal: switching ─> migrate-start-postcopy ─> commit ─> supply ───────> completed
//!                                                                          │   ▲
//!                                      both QEMUs are postcopy-paused      ▼   │ `prepare`, a new relay, resume
//!                                                                        recover
//! ```
//!
//! Until QEMU switches, a failure leaves the guest here. After the switch QEMU can neither cancel nor continue the guest here. The
//! destination's QEMU has been told not to start by itself, so it runs the guest only after the commit, as without post-copy. From then
//! on, both QEMUs are needed, and both wait for each other when their connections break. So nothing is given up: a broken relay is
//! replaced until all memory has been sent, in this run of the command or the next.

use std::{
    mem,
    num::NonZeroU64,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use handover::{
    ConnectionKind, Decision, DestinationMessage, Prepare, SourceEvent, SourceMessage,
    from_details, to_details,
};
use serde_json::{Value, json};
use tracing::{Span, info, warn};
use vamoose_link::{ConversationError, Counters, Hangup, Stats};

use super::{
    Cause, Ended, Migration, News, Progress, Route,
    hand_over::HandOver,
    listen_beside,
    source::{EVENT_WAIT, SourceQemu},
    watch::{ASK_EVERY, SourceRelay},
};
use crate::{
    chain,
    control::{ControlError, Request, Resumed, ask, preamble},
    main_stream::KEEP_TRYING,
    qemu::{MigrationStatus, QemuError},
};

/// How long a server may take to prepare a recovery.
const PREPARED_WITHIN: Duration = Duration::from_secs(60);
/// Pause before the next attempt to recover.
const AGAIN: Duration = Duration::from_secs(1);

impl Migration<'_> {
    /// Tells the source QEMU to switch, when it is time and the destination has answered it: QEMU waits for that without end (10.0).
    /// The journal has it first. `info` is of a migration that is active.
    pub(super) fn switch(
        &self,
        hand_over: &mut HandOver<'_>,
        source: &mut SourceQemu,
        relay: &SourceRelay<'_>,
        info: &Value,
        elapsed: Duration,
    ) -> Result<(), Cause> {
        let is_time = match self.post_copy {
            Some(Duration::ZERO) => is_after_first_round(info),
            Some(after) => elapsed >= after,
            None => false,
        };
        if !is_time
            || source.may_be_switched
            || !relay.stats.has_answer()
            || !hand_over.is_waited_for()?
        {
            return Ok(());
        }
        // Not while the guest is paused.
        self.pace(source, &relay.stats.snapshot(), info)?;
        relay.session.keep_trying(KEEP_TRYING);
        hand_over.ask_to_switch(source.is_wanted)?;
        if source.is_wanted {
            source.hold()?;
        }
        source.may_be_switched = true;
        info!("switching to post-copy");
        match source.qemu.execute("migrate-start-postcopy", json!({})) {
            // The migration has ended by itself. Its status tells how.
            Err(error) if error.is_refusal() => {
                info!("{}", chain(&error));
                Ok(())
            }
            told => Ok(told?),
        }
    }

    /// Waits until all memory has been sent through `relay`, or QEMU has paused post-copy.
    pub(super) fn supply(
        &self,
        source: &mut SourceQemu,
        relay: &SourceRelay<'_>,
        ended: &mut Ended,
        observe: &mut dyn FnMut(News<'_>),
    ) -> Result<(), Cause> {
        info!("the guest runs at the destination, and its memory follows");
        let mut asked: Option<Instant> = None;
        loop {
            let is_news = source.take_events(EVENT_WAIT)?;
            self.check_given_up(source)?;
            if !is_news && asked.is_some_and(|asked| asked.elapsed() < ASK_EVERY) {
                continue;
            }
            asked = Some(Instant::now());
            let info = match source.qemu.query_migrate() {
                Err(QemuError::Qmp(error)) if error.is_no_answer() => continue,
                info => info?,
            };
            let status = info["status"].as_str().unwrap_or("none").to_owned();
            ended.info.clone_from(&info);
            let moved = relay.stats.snapshot();
            self.pace(source, &moved, &info)?;
            let is_under_way = [
                "postcopy-active",
                "postcopy-recover-setup",
                "postcopy-recover",
            ]
            .contains(&&*status)
                || MigrationStatus::of(&info) == MigrationStatus::Busy;
            observe(News::Progress(&Progress {
                status,
                moved,
                source: info,
                session: Some(relay.session.clone()),
                ..Progress::default()
            }));
            if !is_under_way {
                return Ok(());
            }
        }
    }

    /// Lets QEMU itself keep to the bandwidth limit: a page that the guest needs cannot overtake itself in the relays and their sockets.
    fn pace(
        &self,
        source: &mut SourceQemu,
        moved: &Counters,
        info: &Value,
    ) -> Result<(), QemuError> {
        let sent = info["ram"]["transferred"].as_u64().unwrap_or(0);
        let limit = self.config.max_bandwidth;
        match limit.and_then(|limit| source.pace.after(limit, sent, moved.wire_bytes)) {
            Some(rate) => source.change(json!({ "max-postcopy-bandwidth": rate })),
            None => Ok(()),
        }
    }

    /// Sends the rest of the memory through new relays, until all has gone or the user gives up.
    pub(super) fn recover(
        &self,
        hand_over: &mut HandOver<'_>,
        source: &mut SourceQemu,
        ended: &mut Ended,
        observe: &mut dyn FnMut(News<'_>),
    ) -> Decision {
        let mut warned = String::new();
        while hand_over.is_under_post_copy() {
            let recovered = self.recover_once(hand_over, source, ended, observe);
            let recovered = recovered.and_then(|()| self.check_given_up(source));
            let Err(cause) = recovered else {
                continue;
            };
            if source.has_ended_by(&cause) {
                ended.cause = Some(Cause::SourceEnded);
                let last = source.last_seen();
                return hand_over.finish(SourceEvent::GuestDied { last }, None);
            }
            if matches!(cause, Cause::Cancelled) {
                ended.cause = Some(cause);
                return hand_over.decision();
            }
            let problem = chain(&cause);
            if mem::replace(&mut warned, problem.clone()) != problem {
                warn!(
                    "the guest waits for memory that is here; trying again to send it: {problem}"
                );
            }
            observe(News::WaitsFor("the server, to send the guest's memory"));
            thread::sleep(AGAIN);
        }
        hand_over.drive(Some(source))
    }

    fn recover_once(
        &self,
        hand_over: &mut HandOver<'_>,
        source: &mut SourceQemu,
        ended: &mut Ended,
        observe: &mut dyn FnMut(News<'_>),
    ) -> Result<(), Cause> {
        self.check_given_up(source)?;
        hand_over.attempt.relay_has_ended = None;
        ended.info = source.qemu.query_migrate()?;
        let status = MigrationStatus::of(&ended.info);
        match status {
            MigrationStatus::Completed => {
                commit(hand_over, source)?;
                hand_over.finish(SourceEvent::Supplied, Some(source));
                return Ok(());
            }
            MigrationStatus::Switched => {}
            MigrationStatus::Busy => return Err(Cause::broken("the source QEMU is busy")),
            // A connection that breaks when the last page has been sent fails the migration, and some QEMUs then continue the guest.
            MigrationStatus::Idle => source.qemu.execute("stop", json!({}))?,
        }
        // The destination first: its QEMU may answer nothing else while it waits for a page.
        let request = Request {
            resumes: true,
            ..self.request(&hand_over.attempt.entry.record.name, Vec::new())
        };
        let prepare = Prepare::new(to_details(&request).map_err(ControlError::from)?);
        let (to, id) = (hand_over.attempt.to, hand_over.attempt.id());
        let (answer, control) = ask(to, id, &SourceMessage::Prepare(prepare), PREPARED_WITHIN)?;
        hand_over.attempt.control = Some(control);
        let there: Resumed = match answer {
            DestinationMessage::Prepared { details, .. } => {
                from_details(details).map_err(ControlError::from)?
            }
            DestinationMessage::Unknown { reason, .. } => return Err(Cause::Refused(reason)),
            // Perhaps its guest has ended.
            DestinationMessage::Refused { reason } => {
                hand_over.ask_again()?;
                return match hand_over.is_under_post_copy() {
                    true => Err(Cause::Refused(reason)),
                    false => Ok(()),
                };
            }
            other => return Err(Cause::unexpected(&other)),
        };
        if there.complete {
            commit(hand_over, source)?;
            info!("all memory has come, and the source QEMU has not been told: end it");
            hand_over.finish(SourceEvent::Supplied, Some(source));
            return Ok(());
        }
        if status == MigrationStatus::Idle {
            warn!(
                "the source QEMU failed at the end of post-copy, and its guest has been paused here: end this QEMU"
            );
            let last = source.last_seen();
            hand_over.finish(SourceEvent::GuestDied { last }, None);
            return Ok(());
        }
        let closed = || Cause::from(ControlError::from(ConversationError::Closed));
        let session = hand_over.attempt.session().ok_or_else(closed)?;
        session.keep_trying(KEEP_TRYING);
        let listener = listen_beside(self.qmp, "outgoing", self.config.stall_timeout)?;
        let route = Route::new(listener, &session, &preamble(ConnectionKind::Data, id));
        let (hangup, stats) = (Hangup::new()?, Arc::new(Stats::default()));
        let relay = route.relay(&self.config, &hangup, &stats);
        let span = Span::current();
        thread::scope(|scope| {
            let relaying = scope.spawn(|| span.in_scope(|| relay.resume_post_copy()));
            let relay = SourceRelay {
                address: route.address(),
                stats: &stats,
                session: &session,
                hangup: &hangup,
                has_ended: &|| relaying.is_finished(),
            };
            let resumed = source.resume_migration(relay.address);
            let supplied = resumed.map_err(Cause::from).and_then(|()| {
                commit(hand_over, source)?;
                self.supply(source, &relay, ended, observe)
            });
            hangup.hang_up();
            ended.moved = stats.snapshot();
            supplied
        })
    }

    /// Fails when the user has cancelled twice. The first time, it is too late to cancel.
    fn check_given_up(&self, source: &mut SourceQemu) -> Result<(), Cause> {
        if !self.is_cancelled() {
            return Ok(());
        }
        if mem::replace(&mut source.was_cancelled_late, true) {
            return Err(Cause::Cancelled);
        }
        self.cancel.store(false, Ordering::Relaxed);
        warn!(
            "too late to cancel: the guest runs at the destination, and needs its memory that is here. Cancel again to stop all the \
             same: the guest then waits until this command is run again"
        );
        Ok(())
    }
}

/// Finds QEMU's own limit, which is that of the link times what the relay saves.
#[derive(Default)]
pub(super) struct Pace {
    /// Bytes that QEMU has sent, and those on the link, when the limit was computed last.
    sent: u64,
    wire: u64,
}

/// Part of the link's limit for QEMU, in percent. The rest is for pages that the guest waits for.
const BACKGROUND: u128 = 90;

impl Pace {
    /// QEMU's new limit for `limit` bytes per second on the link, once half of these have been sent since the last one.
    fn after(&mut self, limit: NonZeroU64, sent: u64, wire: u64) -> Option<u64> {
        if wire < self.wire {
            // It goes through another relay.
            *self = Self { sent, wire };
        }
        let on_link = wire - self.wire;
        if on_link < limit.get().div_ceil(2) {
            return None;
        }
        let from_qemu = sent.saturating_sub(self.sent).max(on_link);
        *self = Self { sent, wire };
        let rate = u128::from(limit.get()) * u128::from(from_qemu) / u128::from(on_link);
        Some(u64::try_from(rate * BACKGROUND / 100).unwrap_or(u64::MAX))
    }
}

/// Hands the guest over, unless that has been done.
fn commit(hand_over: &mut HandOver<'_>, source: &mut SourceQemu) -> Result<(), Cause> {
    if hand_over.is_supplying() {
        return Ok(());
    }
    let decision = hand_over.drive(Some(source));
    match hand_over.is_supplying() {
        true => Ok(()),
        false => Err(Cause::broken(decision.cause.unwrap_or_default())),
    }
}

/// Whether QEMU has sent as many pages as the guest has. It counts no rounds then: with post-copy on, it looks for written pages all
/// the time.
fn is_after_first_round(info: &Value) -> bool {
    let ram = |key: &str| info["ram"][key].as_u64().unwrap_or_default();
    let pages = ram("normal").saturating_add(ram("duplicate"));
    let total = ram("total");
    total > 0 && pages.saturating_mul(ram("page-size")) >= total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_sends_what_fills_the_link() {
        let limit = NonZeroU64::new(1_000_000).unwrap();
        let mut pace = Pace::default();
        // Too little to tell what the relay saves.
        assert_eq!(pace.after(limit, 900_000, 400_000), None);
        assert_eq!(pace.after(limit, 4_000_000, 1_000_000), Some(3_600_000));
        assert_eq!(pace.after(limit, 5_000_000, 1_400_000), None);
        assert_eq!(pace.after(limit, 6_000_000, 2_000_000), Some(1_800_000));
        // Headers make it a little more.
        assert_eq!(pace.after(limit, 6_990_000, 3_000_000), Some(900_000));
        // Through another relay, which counts anew.
        assert_eq!(pace.after(limit, 7_000_000, 0), None);
        assert_eq!(pace.after(limit, 9_000_000, 1_000_000), Some(1_800_000));
    }

    #[test]
    fn first_round_has_sent_every_page_once() {
        let info = |normal: u64, duplicate: u64| json!({ "ram": { "normal": normal, "duplicate": duplicate, "page-size": 4096, "total": 40960 } });
        assert!(!is_after_first_round(&json!({ "status": "setup" })));
        assert!(!is_after_first_round(&info(4, 5)));
        assert!(is_after_first_round(&info(4, 6)));
        assert!(is_after_first_round(&info(u64::MAX, 1)));
    }
}
