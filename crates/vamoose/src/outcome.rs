//! How `migrate` tells the end of a migration: where the guest is comes first.

use std::{error::Error, fmt};

use vamoose_relay::{Cause, Failure, GuestLocation, Moved, chain};

/// Where a guest runs now, and how it went, for [`wrap`](crate::terminal::wrap).
pub fn moved(guest: &str, peer: &str, moved: &Moved) -> String {
    let place = match moved.is_running {
        true => format!("{guest} runs at {peer}"),
        false => format!("{guest} is at {peer}, paused"),
    };
    // Another process has driven the migration.
    if moved.total_time.is_zero() {
        return place + ".";
    }
    let wire = moved.moved.wire_bytes;
    let mut facts = vec![format!("{:.1} s", moved.total_time.as_secs_f64())];
    if let Some(downtime) = moved.downtime {
        facts.push(format!("downtime {} ms", downtime.as_millis()));
    }
    let done = &moved.source["on-timeout"];
    if let (Some(action), Some(millis)) = (done["action"].as_str(), done["milliseconds"].as_u64()) {
        facts.push(format!("{action} after {} s", millis / 1000));
    }
    if let Some(percent) = moved.source["cpu-throttle-percentage"].as_u64() {
        facts.push(format!("slowed down by {percent} %"));
    }
    if let Some(disks) = moved.disks {
        let [bytes, sent] = [disks.bytes, disks.wire_bytes].map(|it| it >> 20);
        facts.push(format!("disks {bytes} MiB as {sent} MiB"));
    }
    if wire > 0 {
        let ratio = moved.moved.page_bytes as f64 / wire as f64;
        facts.push(format!("{} MiB sent", wire >> 20));
        facts.push(format!("ratio {ratio:.2}"));
    }
    let facts = facts.iter().map(|fact| fact.replace(' ', "\u{a0}"));
    format!("{place} ({}).", facts.collect::<Vec<_>>().join(", "))
}

/// A guest that `migrate` has not moved.
#[derive(Debug)]
pub struct NotMoved {
    pub guest: String,
    pub failure: Failure,
    /// What explains the cause, in terms of the command line.
    pub remark: Option<String>,
}

impl NotMoved {
    /// Why, if that is not said by where the guest is.
    pub fn why(&self) -> Option<String> {
        let cause = match &self.failure.cause {
            Cause::Cancelled => return None,
            cause => chain(cause),
        };
        let remark = self.remark.as_ref();
        Some(remark.map_or(cause.clone(), |remark| format!("{remark}: {cause}")))
    }
}

impl fmt::Display for NotMoved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest, failure, .. } = self;
        match (failure.guest, &failure.cause, failure.is_running) {
            // Where the guest is may change at any moment.
            (_, Cause::UnderWay(..), _) => {
                write!(
                    f,
                    "{guest} is being moved by another process; nothing was changed."
                )
            }
            (GuestLocation::Source, Cause::Cancelled, true) => {
                write!(f, "Cancelled; {guest} still runs here.")
            }
            (GuestLocation::Source, Cause::Cancelled, false) => {
                write!(f, "Cancelled; {guest} stays here.")
            }
            (GuestLocation::Source, _, true) => {
                write!(f, "{guest} was not moved; it still runs here.")
            }
            (GuestLocation::Source, _, false) => write!(f, "{guest} was not moved; it stays here."),
            _ => write!(f, "{guest}: {failure}"),
        }
    }
}

impl Error for NotMoved {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.failure)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use vamoose_link::Counters;

    use super::*;
    use crate::terminal::wrap;

    fn done() -> Moved {
        Moved {
            moved: Counters {
                wire_bytes: 812 << 20,
                page_bytes: 4060 << 20,
                ..Counters::default()
            },
            downtime: Some(Duration::from_millis(112)),
            total_time: Duration::from_millis(8200),
            is_running: true,
            ..Moved::default()
        }
    }

    #[test]
    fn the_result_is_complete_on_any_terminal() {
        let result = moved("web1", "kvm2", &done());
        let line = "web1 runs at kvm2 (8.2 s, downtime 112 ms, 812 MiB sent, ratio 5.00).";
        let lines = "web1 runs at kvm2 (8.2 s,\ndowntime 112 ms, 812 MiB sent,\nratio 5.00).";
        for (width, expected) in [(40, lines), (80, line), (200, line), (usize::MAX, line)] {
            assert_eq!(wrap(&result, width), expected);
        }
    }

    #[test]
    fn what_was_done_about_a_busy_guest_is_told() {
        let throttled = Moved {
            source: json!({
                "on-timeout": { "action": "throttle", "milliseconds": 5003, "remaining": 1 },
                "cpu-throttle-percentage": 40,
            }),
            ..done()
        };
        let result = wrap(&moved("web1", "kvm2", &throttled), usize::MAX);
        let told = "downtime 112 ms, throttle after 5 s, slowed down by 40 %, 812 MiB sent";
        assert!(result.contains(told), "{result}");
    }

    #[test]
    fn a_result_has_only_what_is_known() {
        let paused = Moved {
            is_running: false,
            downtime: None,
            ..done()
        };
        let text = moved("web1", "kvm2", &paused);
        assert!(
            text.starts_with("web1 is at kvm2, paused (8.2\u{a0}s, 812"),
            "{text}"
        );
        let by_another = Moved {
            is_running: true,
            ..Moved::default()
        };
        assert_eq!(moved("web1", "kvm2", &by_another), "web1 runs at kvm2.");
    }

    #[test]
    fn where_the_guest_is_comes_first() {
        let refused = || Cause::Refused("no such guest".to_owned());
        for (cause, location, is_running, first, why) in [
            (
                Cause::Cancelled,
                GuestLocation::Source,
                true,
                "Cancelled; web1 still runs here.",
                None,
            ),
            (
                Cause::Cancelled,
                GuestLocation::Source,
                false,
                "Cancelled; web1 stays here.",
                None,
            ),
            (
                refused(),
                GuestLocation::Source,
                true,
                "web1 was not moved; it still runs here.",
                Some("the server refuses: no such guest"),
            ),
            (
                refused(),
                GuestLocation::InDoubt,
                false,
                "web1: the migration failed; the guest is paused at the source and may be running at the destination",
                Some("the server refuses: no such guest"),
            ),
        ] {
            let not_moved = NotMoved {
                guest: "web1".to_owned(),
                failure: Failure {
                    cause,
                    guest: location,
                    attempt: None,
                    is_running,
                },
                remark: None,
            };
            assert_eq!(not_moved.to_string(), first);
            assert_eq!(not_moved.why().as_deref(), why);
        }
    }
}
