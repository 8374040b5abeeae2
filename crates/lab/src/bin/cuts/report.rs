//! The table.

use std::{fmt, fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use lab::cuts::Phase;

use crate::{
    options::{NetworkName, Plan, Security},
    stage::{End, Found},
};

/// What became of one experiment, as a line of the table.
pub(crate) struct Line {
    pub(crate) number: usize,
    plan: Plan,
    found: Result<Found>,
}

impl Line {
    pub(crate) fn new(plan: &Plan, found: Result<Found>) -> Self {
        Self {
            number: plan.number,
            plan: plan.clone(),
            found,
        }
    }

    /// Whether an invariant does not hold, or the guest should have moved and has not.
    pub(crate) fn is_wrong(&self) -> bool {
        match &self.found {
            Err(_) => true,
            Ok(found) => match &found.end {
                End::Moved { .. } => false,
                End::Stayed { why } => {
                    found.cut_after.is_none() || self.must_move() && !self.stood_still(why)
                }
            },
        }
    }

    /// The source of a small guest may believe that all has been sent, stop it, and wait for the cut to end.
    fn stood_still(&self, why: &str) -> bool {
        let lasts = self.plan.row.kind.lasts().unwrap_or_default();
        why.contains("stood still") && lasts > Duration::from_secs(10)
    }

    /// A migration survives a cut that is shorter than its timeouts: 30 s for the link, and 10 s of downtime.
    fn must_move(&self) -> bool {
        let lasts = self.plan.row.kind.lasts().unwrap_or_default();
        match self.plan.row.phase {
            // The command dials each path once.
            Phase::FirstConnection => false,
            Phase::FirstRound | Phase::LaterRound => true,
            Phase::Switchover | Phase::HandOver => lasts <= Duration::from_secs(1),
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (row, setting) = (&self.plan.row, &self.plan.setting);
        let [source, destination] = setting.versions;
        let security = match setting.security {
            Security::Insecure => "insecure",
            Security::Keys => "keys",
        };
        let network = match self.plan.network {
            NetworkName::Middlebox => "",
            NetworkName::Wires => " (wire)",
        };
        write!(
            f,
            "| {} | {}{network} | {} | {}, {source} to {destination}, {security} | ",
            row.phase, row.kind, row.paths, setting.method
        )?;
        let found = match &self.found {
            Ok(found) => found,
            Err(error) => return write!(f, "**WRONG**: {} | | | |", one_line(error)),
        };
        let wrong = if self.is_wrong() { "**WRONG**: " } else { "" };
        let reached = match found.cut_after {
            Some(_) => "",
            None => ", not cut: the phase was over",
        };
        let seconds = found.time.as_secs_f64();
        match &found.end {
            End::Moved {
                downtime,
                uncut,
                reconnects,
            } => {
                let millis = |time: &Duration| time.as_millis().cast_signed();
                let added = match (downtime, uncut) {
                    (Some(downtime), Some(uncut)) => {
                        format!("{:+}", millis(downtime) - millis(uncut))
                    }
                    _ => "paused".to_owned(),
                };
                write!(
                    f,
                    "{wrong}moved{reached} | {seconds:.1} | {added} | {reconnects} |"
                )
            }
            End::Stayed { why } => write!(
                f,
                "{wrong}at the source: {why}{reached} | {seconds:.1} | | |"
            ),
        }
    }
}

/// Writes the table to stdout, and into a file.
pub(crate) fn write(file: Option<&Path>, lines: &[Line]) -> Result<()> {
    let head = "| phase | cut | paths | method, QEMU, link | ended | s | downtime added, ms | reconnects |\n\
                |---|---|---|---|---|---:|---:|---:|\n";
    let lines: Vec<_> = lines.iter().map(|line| format!("{line}\n")).collect();
    let table = format!("{head}{}", lines.concat());
    print!("{table}");
    match file {
        Some(file) => fs::write(file, table).with_context(|| format!("writing {}", file.display())),
        None => Ok(()),
    }
}

fn one_line(error: &anyhow::Error) -> String {
    format!("{error:#}").replace('\n', "; ").replace('|', "/")
}
