//! Exit codes of a command that failed.

use std::{error::Error as StdError, fmt, process::ExitCode};

use anyhow::{Error, Result};
use vamoose_relay::{Cause, Failure, GuestLocation};

/// How a command that failed ends. An error without a code of its own is [`Exit::Failed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A guest that was to move is where it was.
    Failed,
    /// The command line is wrong, and nothing was done. clap uses this code as well.
    Usage,
    /// The user cancelled the migration.
    Cancelled,
    /// A guest is not where it was, or a person has to find out where it is: the message tells which.
    InDoubt,
}

impl Exit {
    /// `error`, with which the program ends in this way.
    pub fn with(self, error: impl Into<Error>) -> Error {
        Error::new(Ended(self, error.into()))
    }

    /// How the program ends because of `error`.
    pub fn of(error: &Error) -> Self {
        let exit = error.chain().find_map(|cause| {
            let failure = || Some(Self::of_failure(cause.downcast_ref()?));
            let ended = cause.downcast_ref::<Ended>();
            ended.map(|ended| ended.0).or_else(failure)
        });
        exit.unwrap_or(Self::Failed)
    }

    fn of_failure(failure: &Failure) -> Self {
        match (failure.guest, &failure.cause) {
            (GuestLocation::Source, Cause::Cancelled) => Self::Cancelled,
            (GuestLocation::Source, _) => Self::Failed,
            _ => Self::InDoubt,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::Cancelled => 3,
            Exit::InDoubt => 4,
        })
    }
}

/// Options whose values are wrong.
pub trait OrUsage<T> {
    /// Ends the program with [`Exit::Usage`] after an error.
    fn or_usage(self) -> Result<T>;
}

impl<T, E: Into<Error>> OrUsage<T> for Result<T, E> {
    fn or_usage(self) -> Result<T> {
        self.map_err(|error| Exit::Usage.with(error))
    }
}

/// An error with its exit code.
#[derive(Debug)]
struct Ended(Exit, Error);

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.1.fmt(f)
    }
}

impl StdError for Ended {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.1.source()
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    #[test]
    fn exit_code_is_found_below_other_errors() {
        let error = || Err::<(), _>(anyhow!("why").context("what"));
        let wrong = error().or_usage().context("where").unwrap_err();
        assert_eq!(Exit::of(&wrong), Exit::Usage);
        assert_eq!(format!("{wrong:#}"), "where: what: why");
        assert_eq!(Exit::of(&error().unwrap_err()), Exit::Failed);
    }

    #[test]
    fn failed_migration_tells_who_has_to_act() {
        let failed = |cause, guest| {
            let attempt = None;
            Exit::of(
                &Failure {
                    is_running: false,
                    cause,
                    guest,
                    attempt,
                }
                .into(),
            )
        };
        let (broken, cancelled) = (|| Cause::SourceEnded, || Cause::Cancelled);
        assert_eq!(failed(broken(), GuestLocation::Source), Exit::Failed);
        assert_eq!(failed(cancelled(), GuestLocation::Source), Exit::Cancelled);
        assert_eq!(failed(broken(), GuestLocation::InDoubt), Exit::InDoubt);
        assert_eq!(failed(broken(), GuestLocation::Lost), Exit::InDoubt);
        assert_eq!(
            failed(cancelled(), GuestLocation::Unconfirmed),
            Exit::InDoubt
        );
    }
}
