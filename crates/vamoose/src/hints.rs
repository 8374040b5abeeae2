//! What a user can do about an error, in terms of the programs' options, which the crates below do not know.

use anyhow::Error;
use vamoose_codec::{DecodeError, EncodeError, SettingsError};
use vamoose_relay::{Failure, GuestLocation, RelayError};

/// The hint for the first error of the chain that has one.
pub fn of(error: &Error) -> Option<String> {
    error.chain().find_map(|cause| {
        if let Some(failure) = cause.downcast_ref() {
            of_failure(failure)
        } else if let Some(settings) = cause.downcast_ref() {
            of_settings(settings)
        } else if let Some(EncodeError::Distrusted { .. }) = cause.downcast_ref() {
            Some(DISTRUSTED.to_owned())
        } else if let Some(DecodeError::Distrusted { .. }) = cause.downcast_ref() {
            Some(DISTRUSTED.to_owned())
        } else if let Some(RelayError::LateChannel) = cause.downcast_ref() {
            Some(
                "name the number of channels that the source opens: --incoming-channels N"
                    .to_owned(),
            )
        } else {
            None
        }
    })
}

const DISTRUSTED: &str = "a device is broken: use --accel none, or --verify all";

fn of_failure(failure: &Failure) -> Option<String> {
    let attempt = failure.attempt?;
    (failure.guest == GuestLocation::InDoubt).then(|| {
        format!(
            "run the same command again to finish the migration, and do not continue the guest by hand on either host \
             before. If the destination is gone for good, check there whether the guest runs, then: \
             vamoose settle --attempt {attempt} --as running-there|never-ran"
        )
    })
}

fn of_settings(error: &SettingsError) -> Option<String> {
    match error {
        SettingsError::EngineAbsent { .. } => Some(
            "`vamoose probe` shows what this host has and what is missing; --accel auto uses what there is, none only \
             software"
                .to_owned(),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;
    use vamoose_codec::Absence;

    use super::*;

    #[test]
    fn a_hint_is_found_below_other_errors() {
        let absent = SettingsError::EngineAbsent {
            engine: "qat",
            reason: Absence("no library".to_owned()),
        };
        let error = Err::<(), _>(absent).context("setting up").unwrap_err();
        assert!(of(&error).unwrap().contains("--accel auto"));
        assert_eq!(of(&Error::msg("anything else")), None);
    }
}
