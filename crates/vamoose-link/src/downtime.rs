//! The parts of a guest's downtime.

use std::{fmt, time::Duration};

use serde::{Serialize, Serializer};

/// The parts of a downtime, which add up to it; serialized in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DowntimeParts {
    /// From pausing the guest until the last pages have been sent, without the time for the device state.
    #[serde(serialize_with = "as_millis")]
    pub last_round: Duration,
    /// Saving and sending the device state.
    #[serde(serialize_with = "as_millis")]
    pub device_state: Duration,
    /// Until the destination has loaded the guest.
    #[serde(serialize_with = "as_millis")]
    pub load: Duration,
    /// Until the source knows that the guest runs at the destination.
    #[serde(serialize_with = "as_millis")]
    pub commit: Duration,
}

impl fmt::Display for DowntimeParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [last_round, device_state, load, commit] =
            [self.last_round, self.device_state, self.load, self.commit].map(millis);
        write!(
            f,
            "last round {last_round} ms, device state {device_state} ms, load {load} ms, commit {commit} ms"
        )
    }
}

fn as_millis<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(millis(*time))
}

/// Whole milliseconds of a time, for reports.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
