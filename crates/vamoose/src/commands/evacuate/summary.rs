//! The report of a plan and of its outcome, as text and as JSON.

use std::time::Duration;

use evacuation::{GuestId, HostId, Outcome, Plan, Scheduler};
use serde::Serialize;
use vamoose_link::millis;

use super::{
    drive::{self, Account},
    survey::{SOURCE, Survey},
};

/// The report of an evacuation. Times are in milliseconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Report {
    /// `planned`, `completed`, `stopped` or `incomplete`.
    pub(super) status: &'static str,
    pub(super) host: String,
    pub(super) total_time: u64,
    pub(super) guests: Vec<GuestReport>,
    /// Guests that are shut off, which are not moved.
    pub(super) shut_off: usize,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct GuestReport {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) memory: u64,
    /// `planned`, `moved`, `stays` or `in-doubt`.
    pub(super) outcome: &'static str,
    /// The host that has the guest, as both hosts report; `None` if in doubt.
    pub(super) at: Option<String>,
    /// Destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) to: Option<String>,
    /// State there, as libvirt reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) state: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    pub(super) tries: u32,
    pub(super) total_time: u64,
    /// Of the last try, as QEMU counts them: before a gateway compresses them.
    pub(super) bytes: u64,
    pub(super) downtime: Option<u64>,
}

impl Report {
    pub(super) fn of_plan(survey: &Survey, plan: &Plan) -> Self {
        let moves = plan.moves.iter().map(|step| {
            let host = &survey.hosts[step.to.0];
            GuestReport {
                to: Some(host.name.clone()),
                ..GuestReport::new(survey, step.guest.0, "planned")
            }
        });
        let stays = plan.stays.iter().map(|(guest, why)| GuestReport {
            reason: Some(why.to_string()),
            ..GuestReport::new(survey, guest.0, "stays")
        });
        Self {
            guests: moves.chain(stays).collect(),
            ..Self::new(survey, "planned", Duration::ZERO)
        }
    }

    pub(super) fn of(
        survey: &Survey,
        guests: Vec<GuestReport>,
        was_stopped: bool,
        took: Duration,
    ) -> Self {
        let status = if guests.iter().all(|guest| guest.outcome == "moved") {
            "completed"
        } else if was_stopped {
            "stopped"
        } else {
            "incomplete"
        };
        Self {
            guests,
            ..Self::new(survey, status, took)
        }
    }

    fn new(survey: &Survey, status: &'static str, took: Duration) -> Self {
        Self {
            status,
            host: survey.hosts[SOURCE.0].name.clone(),
            total_time: millis(took),
            guests: Vec::new(),
            shut_off: survey.shut_off,
        }
    }

    pub(super) fn count(&self, outcome: &str) -> usize {
        let guests = self.guests.iter();
        guests.filter(|guest| guest.outcome == outcome).count()
    }

    /// A line for each guest.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> {
        self.guests.iter().map(GuestReport::line)
    }
}

impl GuestReport {
    fn new(survey: &Survey, guest: usize, outcome: &'static str) -> Self {
        let is = &survey.fleet.guests()[guest];
        Self {
            name: is.name.clone(),
            uuid: survey.known[guest].uuid.clone(),
            memory: is.memory,
            outcome,
            at: Some(survey.hosts[SOURCE.0].name.clone()),
            to: None,
            state: None,
            reason: None,
            tries: 0,
            total_time: 0,
            bytes: 0,
            downtime: None,
        }
    }

    pub(super) fn of(
        survey: &Survey,
        scheduler: &Scheduler<'_>,
        guest: GuestId,
        account: &Account,
    ) -> Self {
        let report = Self {
            state: account.state,
            tries: scheduler.tries(guest),
            total_time: millis(account.took),
            bytes: account.bytes,
            downtime: account.downtime_ms,
            ..Self::new(survey, guest.0, "stays")
        };
        let name = |host: HostId| survey.hosts[host.0].name.clone();
        match scheduler.outcome(guest) {
            None => report,
            Some(Outcome::Moved { to }) => Self {
                outcome: "moved",
                at: Some(name(*to)),
                ..report
            },
            Some(Outcome::Stays(stay)) => Self {
                reason: Some(stay.to_string()),
                ..report
            },
            Some(Outcome::InDoubt { to, at, reason }) => {
                let doubt = drive::in_doubt(*at, &name(*to));
                let reason = reason.iter().map(|reason| format!("; {reason}"));
                Self {
                    outcome: "in-doubt",
                    at: None,
                    to: Some(name(*to)),
                    reason: Some(format!("{doubt}{}", reason.collect::<String>())),
                    ..report
                }
            }
        }
    }

    fn line(&self) -> String {
        let Self { name, memory, .. } = self;
        let reason = self.reason.as_deref().unwrap_or("no reason is known");
        let text = match self.outcome {
            "planned" => format!("-> {}", self.to.as_deref().unwrap_or_default()),
            "moved" => {
                let at = self.at.as_deref().unwrap_or_default();
                let state = match self.state {
                    None | Some("running") => String::new(),
                    Some(state) => format!(", {state}"),
                };
                let downtime = self.downtime.map(|ms| format!(", downtime {ms} ms"));
                let again = if self.tries > 1 {
                    format!(", {} tries", self.tries)
                } else {
                    String::new()
                };
                format!(
                    "on {at}{state}: {:.1} s, {} MiB{}{again}",
                    self.total_time as f64 / 1e3,
                    self.bytes >> 20,
                    downtime.unwrap_or_default()
                )
            }
            "in-doubt" => format!("IN DOUBT: {reason}"),
            _ => format!("stays: {reason}"),
        };
        format!("{name:<20} {:>8} MiB  {text}", memory >> 20)
    }
}
