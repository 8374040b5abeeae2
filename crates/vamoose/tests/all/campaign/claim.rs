//! What an ended command says about the guest's location.

use serde_json::Value;
use thiserror::Error;

use lab::vamoose::Ended;

/// Where a command says the guest is.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum Claim {
    /// At the destination: the command succeeded.
    #[error("moved")]
    Moved,
    #[error("stays at the source")]
    Source,
    /// An earlier attempt has moved it elsewhere, as the command reports.
    #[error("was moved before")]
    Elsewhere,
    #[error("in doubt")]
    InDoubt,
    /// The command asks for a confirmation that nothing else has moved it.
    #[error("to be confirmed")]
    Unconfirmed,
    /// The guest has ended.
    #[error("lost")]
    Lost,
    /// The command failed and says nothing about the guest.
    #[error("nothing about the guest")]
    Silent,
    #[error("nothing, it was killed")]
    Killed,
}

impl Claim {
    /// The claim of an ended command.
    ///
    /// # Errors
    /// When its exit status and its report contradict each other, or it has panicked.
    pub(crate) fn of(ended: &Ended) -> Result<Self, String> {
        if ended.stderr.contains("panicked at") {
            return Err("it panicked".to_owned());
        }
        if ended.status.code().is_none() {
            return Ok(Self::Killed);
        }
        let report = serde_json::from_str::<Value>(&ended.stdout).unwrap_or_default();
        match (ended.status.success(), report["status"].as_str()) {
            (true, None | Some("completed")) => Ok(Self::Moved),
            (true, Some(status)) => Err(format!("it succeeds and its report says `{status}`")),
            (false, Some("completed")) => {
                Err("it fails and its report says `completed`".to_owned())
            }
            (false, _) => Ok(match report["location"].as_str() {
                Some("source") => Self::Source,
                Some("destination" | "moved-on") => Self::Elsewhere,
                Some("in-doubt") => Self::InDoubt,
                Some("unconfirmed") => Self::Unconfirmed,
                Some("gone" | "lost") => Self::Lost,
                _ => Self::Silent,
            }),
        }
    }

    /// Whether the command need not be run again.
    pub(crate) fn is_definite(self) -> bool {
        !matches!(
            self,
            Self::InDoubt | Self::Unconfirmed | Self::Silent | Self::Killed
        )
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn ended(status: i32, stdout: &str, stderr: &str) -> Ended {
        Ended {
            status: ExitStatus::from_raw(status),
            stdout: stdout.to_owned(),
            stderr: stderr.to_owned(),
            cpu_seconds: 0.0,
        }
    }

    #[test]
    fn reports_are_understood() {
        let failed =
            |location: &str| format!(r#"{{"status": "failed", "location": "{location}"}}"#);
        for (status, stdout, claim) in [
            (0, r#"{"status": "completed"}"#.to_owned(), Claim::Moved),
            (0x100, failed("source"), Claim::Source),
            // By an earlier attempt, to another destination.
            (0x100, failed("destination"), Claim::Elsewhere),
            (0x400, failed("in-doubt"), Claim::InDoubt),
            (0x400, failed("lost"), Claim::Lost),
            (0x200, String::new(), Claim::Silent),
            (9, String::new(), Claim::Killed),
        ] {
            assert_eq!(
                Claim::of(&ended(status, &stdout, "")),
                Ok(claim),
                "{stdout}"
            );
        }
    }

    #[test]
    fn contradictions_are_found() {
        for (status, stdout, stderr) in [
            (0, r#"{"status": "failed", "location": "source"}"#, ""),
            (0x100, r#"{"status": "completed"}"#, ""),
            (0x6500, "", "thread 'main' panicked at x.rs:1"),
        ] {
            assert!(Claim::of(&ended(status, stdout, stderr)).is_err());
        }
    }
}
