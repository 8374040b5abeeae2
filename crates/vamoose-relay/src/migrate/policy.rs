//! Guides a migration under way by the policy of crate `convergence`.

use std::time::{Duration, Instant};

use convergence::{OnTimeout, Policy};
use multifd::Layout;
use serde_json::{Value, json};
use tracing::warn;
use vamoose_link::{Counters, millis};

use super::{
    Cause,
    remainder::{Remainder, Seen},
    source::{LEAST_THROTTLE, SourceQemu},
};
use crate::qemu::QemuError;

pub(super) struct Guide {
    began: Instant,
    policy: Policy,
    remainder: Remainder,
    /// What was done about a guest that had not been paused in time.
    on_timeout: Option<Value>,
    /// The guest's highest throttle so far, in percent.
    throttle: u64,
}

impl Guide {
    /// For a migration over `channels` that has just begun.
    pub(super) fn new(policy: Policy, channels: u8, layout: Layout) -> Self {
        Self {
            began: Instant::now(),
            policy,
            remainder: Remainder::new(policy, channels, layout),
            on_timeout: None,
            throttle: 0,
        }
    }

    /// Time since the migration's beginning.
    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Longest pause of the guest before the hand-over.
    pub(super) fn downtime_max(&self) -> Duration {
        match self.remainder.convergence.limit() {
            Duration::MAX => Duration::MAX,
            _ => self.policy.downtime_max,
        }
    }

    /// Looks at `info`, QEMU's answer to `query-migrate` while the guest runs: carries out the action whose time has come, and tells QEMU
    /// how much may be left. Returns why the migration is to be given up, if it is.
    pub(super) fn look(
        &mut self,
        source: &mut SourceQemu,
        info: &Value,
        moved: Counters,
        round_trip: Duration,
    ) -> Result<Option<Cause>, QemuError> {
        let ram = |key: &str| info["ram"][key].as_u64().unwrap_or(0);
        let seen = Seen {
            now: Instant::now(),
            elapsed: self.elapsed(),
            moved,
            round_trip,
            round: ram("dirty-sync-count"),
            // From 11.1 on with devices.
            remaining: info["remaining"].as_u64().unwrap_or(ram("remaining")),
        };
        let mut give_up = None;
        if let Some(action) = self.remainder.convergence.action(seen.elapsed) {
            self.on_timeout = Some(json!({
                "action": action.to_string(),
                "milliseconds": millis(seen.elapsed),
                "remaining": seen.remaining,
            }));
            give_up = self.act(action, source, &seen)?;
        }
        match self.remainder.after(&seen) {
            Some(allowed) if give_up.is_none() && source.post_copy.is_none() => {
                source.allow(allowed)?;
            }
            _ => {}
        }
        Ok(give_up)
    }

    /// Adds to `info` the keys `on-timeout` and, as the highest so far, `cpu-throttle-percentage`.
    pub(super) fn complete(&mut self, info: &mut Value, round_trip: Duration) {
        self.remainder.correct(info, round_trip);
        let throttle = info["cpu-throttle-percentage"].as_u64();
        self.throttle = self.throttle.max(throttle.unwrap_or(0));
        if self.throttle > u64::from(LEAST_THROTTLE.max) {
            info["cpu-throttle-percentage"] = self.throttle.into();
        } else if let Some(info) = info.as_object_mut() {
            info.remove("cpu-throttle-percentage");
        }
        if let Some(done) = &self.on_timeout {
            info["on-timeout"] = done.clone();
        }
    }

    fn act(
        &self,
        action: OnTimeout,
        source: &mut SourceQemu,
        seen: &Seen,
    ) -> Result<Option<Cause>, QemuError> {
        let cause = Cause::TimedOut {
            after: seen.elapsed,
            remaining: seen.remaining,
            rate: self.remainder.rate(),
        };
        let consequence = match action {
            OnTimeout::Abort => return Ok(Some(cause)),
            OnTimeout::Throttle => {
                let steps = self.remainder.convergence.auto_converge();
                source.throttle(steps.unwrap_or_default())?;
                "the guest is slowed down from now on"
            }
            OnTimeout::Pause => "the guest is paused, and the rest is sent",
            OnTimeout::Force => "any downtime up to the longest is accepted from now on",
        };
        warn!("{cause}: {consequence}");
        Ok(None)
    }
}
