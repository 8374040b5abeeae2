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
    /// When its exit status, report and messages contradict each other, or it has panicked.
    pub(crate) fn of(ended: &Ended) -> Result<Self, String> {
        if ended.stderr.contains("panicked at") {
            return Err("it panicked".to_owned());
        }
        if ended.status.code().is_none() {
            return Ok(Self::Killed);
        }
        let report = serde_json::from_str::<Value>(&ended.stdout).ok();
        let status = report.as_ref().and_then(|report| report["status"].as_str());
        if ended.status.success() {
            return match status {
                None | Some("completed") => Ok(Self::Moved),
                Some(status) => Err(format!("it succeeds and its report says `{status}`")),
            };
        }
        if status == Some("completed") {
            return Err("it fails and its report says `completed`".to_owned());
        }
        let told = report.as_ref().and_then(Self::of_report);
        let said = Self::of_words(&ended.stderr);
        match (told, said) {
            (Some(told), Some(said)) if told != said => {
                Err(format!("its report says `{told}`, its last words `{said}`"))
            }
            (told, said) => Ok(told.or(said).unwrap_or(Self::Silent)),
        }
    }

    /// Whether the command need not be run again.
    pub(crate) fn is_definite(self) -> bool {
        !matches!(
            self,
            Self::InDoubt | Self::Unconfirmed | Self::Silent | Self::Killed
        )
    }

    fn of_report(report: &Value) -> Option<Self> {
        match report["guest"].as_str() {
            Some("source") => Some(Self::Source),
            Some("destination") => Some(Self::Moved),
            Some("in-doubt") => Some(Self::InDoubt),
            Some("lost") => Some(Self::Lost),
            _ => Self::of_words(report["error-desc"].as_str()?),
        }
    }

    /// From the last known phrase, as warnings may precede it.
    fn of_words(text: &str) -> Option<Self> {
        let found = PHRASES
            .iter()
            .filter_map(|(phrase, claim)| Some((text.rfind(phrase)?, *claim)));
        found.max_by_key(|(at, _)| *at).map(|(_, claim)| claim)
    }
}

const PHRASES: [(&str, Claim); 13] = [
    (" was not moved; it ", Claim::Source),
    ("Cancelled; ", Claim::Source),
    ("has moved the guest to", Claim::Elsewhere),
    ("the guest has moved on", Claim::Elsewhere),
    ("the guest stays at the source", Claim::Source),
    ("the guest is at the source", Claim::Source),
    ("the guest is at the destination", Claim::Moved),
    ("the guest is paused at the source", Claim::InDoubt),
    ("may be running at the destination", Claim::InDoubt),
    ("please confirm", Claim::Unconfirmed),
    ("the guest is no longer at the source", Claim::Lost),
    ("and the guest with it", Claim::Lost),
    ("the guest has ended", Claim::Lost),
];

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
    fn reports_and_words_are_understood() {
        let failed = r#"{"status": "failed", "error-desc": "x; the guest stays at the source"}"#;
        for (status, stdout, stderr, claim) in [
            (0, r#"{"status": "completed"}"#, "", Claim::Moved),
            (0x100, failed, "", Claim::Source),
            (
                0x100,
                r#"{"status": "failed", "guest": "in-doubt"}"#,
                "",
                Claim::InDoubt,
            ),
            (
                0x100,
                "",
                "vamoose: x; the source's QEMU has ended, and the guest with it",
                Claim::Lost,
            ),
            (0x100, "", "vamoose: no", Claim::Silent),
            (9, "", "", Claim::Killed),
        ] {
            assert_eq!(
                Claim::of(&ended(status, stdout, stderr)),
                Ok(claim),
                "{stderr}"
            );
        }
    }

    #[test]
    fn contradictions_are_found() {
        let failed = r#"{"status": "failed", "error-desc": "x; the guest stays at the source"}"#;
        for (status, stdout, stderr) in [
            (0, failed, ""),
            (0x100, r#"{"status": "completed"}"#, ""),
            (0x100, failed, "the guest has ended"),
            (0x6500, "", "thread 'main' panicked at x.rs:1"),
        ] {
            assert!(Claim::of(&ended(status, stdout, stderr)).is_err());
        }
    }
}
