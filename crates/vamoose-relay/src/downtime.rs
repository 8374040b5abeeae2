//! What a guest's downtime consists of.

use std::{
    fmt,
    time::{Duration, Instant},
};

use serde::{Serialize, Serializer};

/// When a relay saw the steps of a switchover done.
#[derive(Clone, Copy, Debug)]
pub struct Switchover {
    /// The last SYNC was sent on all channels, behind all pages.
    pub last_sync: Instant,
    /// The last bytes of the main stream were sent: all of the device state.
    pub main_sent: Instant,
    /// The destination's message that it has loaded the guest was delivered to the source.
    pub loaded: Instant,
}

/// The parts of a downtime, one after the other; in milliseconds where they are written down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DowntimeParts {
    /// From the source's stop until the pages of the last round have been sent.
    #[serde(serialize_with = "as_millis")]
    pub last_round: Duration,
    /// Until the device state has been sent.
    #[serde(serialize_with = "as_millis")]
    pub device_state: Duration,
    /// Until the destination has loaded the guest.
    #[serde(serialize_with = "as_millis")]
    pub load: Duration,
    /// Until the guest runs at the destination.
    #[serde(serialize_with = "as_millis")]
    pub commit: Duration,
}

impl DowntimeParts {
    /// Of a guest that was stopped and ran again at these times.
    pub(crate) fn new(stopped: Instant, switchover: Switchover, running: Instant) -> Self {
        let mut before = stopped;
        // A step that was done before the one before it has taken no time.
        let mut until = |step: Instant| {
            let time = step.saturating_duration_since(before);
            before = before.max(step);
            time
        };
        Self {
            last_round: until(switchover.last_sync),
            device_state: until(switchover.main_sent),
            load: until(switchover.loaded),
            commit: until(running),
        }
    }
}

impl fmt::Display for DowntimeParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            last_round,
            device_state,
            load,
            commit,
        } = self;
        write!(
            f,
            "last round {} ms, device state {} ms, load {} ms, commit {} ms",
            last_round.as_millis(),
            device_state.as_millis(),
            load.as_millis(),
            commit.as_millis()
        )
    }
}

fn as_millis<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_the_whole() {
        let stopped = Instant::now();
        let after = |millis| stopped + Duration::from_millis(millis);
        let switchover = |last_sync, main_sent, loaded| Switchover {
            last_sync: after(last_sync),
            main_sent: after(main_sent),
            loaded: after(loaded),
        };
        let parts = DowntimeParts::new(stopped, switchover(10, 15, 40), after(48));
        let text = "last round 10 ms, device state 5 ms, load 25 ms, commit 8 ms";
        assert_eq!(parts.to_string(), text);
        assert_eq!(
            serde_json::to_value(parts).unwrap(),
            serde_json::json!({ "last-round": 10, "device-state": 5, "load": 25, "commit": 8 })
        );
        // The last SYNC was passed on after the last bytes of the main stream.
        let parts = DowntimeParts::new(stopped, switchover(15, 10, 40), after(48));
        let text = "last round 15 ms, device state 0 ms, load 25 ms, commit 8 ms";
        assert_eq!(parts.to_string(), text);
    }
}
