//! The parts of a guest's downtime, as its relay saw them.

use std::time::Instant;

use vamoose_link::DowntimeParts;

/// When the relay saw each step of a switchover finished.
#[derive(Clone, Copy, Debug)]
pub struct Switchover {
    /// The last SYNC was sent on all channels, behind all pages.
    pub last_sync: Instant,
    /// The last bytes of the main stream were sent: all of the device state.
    pub main_sent: Instant,
    /// The destination's message that it has loaded the guest was delivered to the source.
    pub loaded: Instant,
}

impl Switchover {
    /// The downtime of a guest that was stopped and ran again at these times.
    pub(crate) fn parts(self, stopped: Instant, running: Instant) -> DowntimeParts {
        let mut before = stopped;
        // A step that was done before the one before it has taken no time.
        let mut until = |step: Instant| {
            let time = step.saturating_duration_since(before);
            before = before.max(step);
            time
        };
        DowntimeParts {
            last_round: until(self.last_sync),
            device_state: until(self.main_sent),
            load: until(self.loaded),
            commit: until(running),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn parts_add_up_to_the_downtime() {
        let stopped = Instant::now();
        let after = |millis| stopped + Duration::from_millis(millis);
        let switchover = |last_sync, main_sent, loaded| Switchover {
            last_sync: after(last_sync),
            main_sent: after(main_sent),
            loaded: after(loaded),
        };
        let parts = switchover(10, 15, 40).parts(stopped, after(48));
        let text = "last round 10 ms, device state 5 ms, load 25 ms, commit 8 ms";
        assert_eq!(parts.to_string(), text);
        assert_eq!(
            serde_json::to_value(parts).unwrap(),
            serde_json::json!({ "last-round": 10, "device-state": 5, "load": 25, "commit": 8 })
        );
        // The last SYNC was passed on after the last bytes of the main stream.
        let parts = switchover(15, 10, 40).parts(stopped, after(48));
        let text = "last round 15 ms, device state 0 ms, load 25 ms, commit 8 ms";
        assert_eq!(parts.to_string(), text);
    }
}
