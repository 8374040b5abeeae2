//! The report of an evacuation, as text and as JSON: first the plan, then the outcome of each guest.

use std::time::{Duration, Instant};

use evacuation::{At, GuestId, Outcome, Plan, Scheduler};
use serde::Serialize;
use vamoose_link::millis;

use super::survey::Survey;

/// The report of an evacuation. Times are in milliseconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Report {
    /// `planned`, `completed`, `stopped` or `incomplete`.
    pub(super) status: &'static str,
    host: String,
    pub(super) total_time: u64,
    /// In the order of the fleet's guests.
    pub(super) guests: Vec<GuestReport>,
    /// Guests that are shut off, which are not moved.
    shut_off: usize,
}

#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct GuestReport {
    name: String,
    uuid: String,
    memory: u64,
    /// `planned`, `moved`, `stays` or `in-doubt`.
    pub(super) outcome: &'static str,
    /// The host that has the guest, according to both hosts; `None` if in doubt.
    at: Option<String>,
    /// Destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<String>,
    /// State of the guest there, according to libvirt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) state: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    tries: usize,
    /// Start of the first try.
    #[serde(skip)]
    pub(super) began: Option<Instant>,
    /// From the start of the first try to the end of the last one.
    pub(super) total_time: u64,
    /// Bytes of the last try as QEMU counts them, before a gateway compresses them.
    pub(super) bytes: u64,
    pub(super) downtime: Option<u64>,
    /// Of a plan, whether the migration will end; `None` if that is not known. Time and bytes are then predicted, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) converges: Option<bool>,
}

impl Report {
    pub(super) fn of_plan(survey: &Survey, plan: &Plan) -> Self {
        let host = &survey.source.name;
        let guests = survey.domains.iter().map(|domain| GuestReport {
            name: domain.name.clone(),
            uuid: domain.uuid.clone(),
            memory: domain.memory,
            outcome: "stays",
            at: Some(host.clone()),
            ..GuestReport::default()
        });
        let mut report = Self {
            status: "planned",
            host: host.clone(),
            total_time: 0,
            guests: guests.collect(),
            shut_off: survey.shut_off,
        };
        for step in &plan.moves {
            let guest = report.guest(step.guest);
            guest.outcome = "planned";
            guest.to = Some(survey.host(step.to).name.clone());
        }
        for (guest, why) in &plan.stays {
            report.guest(*guest).reason = Some(why.to_string());
        }
        report
    }

    /// Replaces the plan by the outcome of each guest.
    pub(super) fn conclude(
        &mut self,
        survey: &Survey,
        scheduler: &Scheduler<'_>,
        was_stopped: bool,
        took: Duration,
    ) {
        for (at, guest) in self.guests.iter_mut().enumerate() {
            guest.tries = scheduler.tries(GuestId(at));
            if let Some(outcome) = scheduler.outcome(GuestId(at)) {
                guest.conclude(survey, outcome);
            }
        }
        self.total_time = millis(took);
        self.status = if self.count("moved") == self.guests.len() {
            "completed"
        } else if was_stopped {
            "stopped"
        } else {
            "incomplete"
        };
    }

    pub(super) fn guest(&mut self, guest: GuestId) -> &mut GuestReport {
        &mut self.guests[guest.0]
    }

    pub(super) fn count(&self, outcome: &str) -> usize {
        let guests = self.guests.iter();
        guests.filter(|guest| guest.outcome == outcome).count()
    }
}

impl GuestReport {
    fn conclude(&mut self, survey: &Survey, outcome: &Outcome) {
        let name = |host| survey.host(host).name.clone();
        self.to = None;
        match outcome {
            Outcome::Moved { to } => {
                self.outcome = "moved";
                self.at = Some(name(*to));
            }
            Outcome::Stays(stay) => {
                self.outcome = "stays";
                self.reason = Some(stay.to_string());
            }
            Outcome::InDoubt { to, at, reason } => {
                self.outcome = "in-doubt";
                self.at = None;
                let reason = reason.as_ref().map(|reason| format!("; {reason}"));
                let doubt = in_doubt(*at, &name(*to));
                self.reason = Some(doubt + &reason.unwrap_or_default());
                self.to = Some(name(*to));
            }
        }
    }

    pub(super) fn line(&self) -> String {
        let Self { name, memory, .. } = self;
        let reason = self.reason.as_deref().unwrap_or("no reason is known");
        let text = match self.outcome {
            "planned" => {
                let to = self.to.as_deref().unwrap_or_default();
                let time = match (self.converges, self.total_time) {
                    (Some(false), _) => ", does not converge: it writes too fast".to_owned(),
                    (_, 0) => String::new(),
                    (_, ms) => format!(" in {:.0} s", (ms as f64 / 1e3).ceil()),
                };
                format!("-> {to}: about {} MiB{time}", self.bytes >> 20)
            }
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

/// Reason why the location of a guest is not known.
pub(super) fn in_doubt(at: At, to: &str) -> String {
    match at {
        At::Both => format!("IT IS ACTIVE ON ITS HOST AND ON {to}: end one of the two"),
        At::Neither => format!("it is active neither on its host nor on {to}"),
        At::Unknown | At::Source | At::Destination => {
            format!("its host and {to} did not both answer")
        }
    }
}
