//! Hints: remedies for errors in terms of the program's options, which the crates below do not know.

use std::io;

use anyhow::Error;
use vamoose_codec::{DecodeError, EncodeError, SettingsError};
use vamoose_link::{FileFault, Objection, Refusal, TlsError};
use vamoose_relay::{Cause, Failure, GuestLocation, RelayError, SettleError};

/// The hint for the first error in the chain that has one.
pub fn of(error: &Error) -> Option<String> {
    error.chain().find_map(|cause| {
        if let Some(failure) = cause.downcast_ref() {
            of_failure(failure)
        } else if let Some(SettleError::NotAsked(..) | SettleError::NoProof(_)) =
            cause.downcast_ref()
        {
            Some(NOT_ASKED.to_owned())
        } else if let Some(settings) = cause.downcast_ref() {
            of_settings(settings)
        } else if let Some(tls) = cause.downcast_ref() {
            of_tls(tls)
        } else if matches!(cause.downcast_ref(), Some(EncodeError::Distrusted { .. }))
            || matches!(cause.downcast_ref(), Some(DecodeError::Distrusted { .. }))
        {
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

const NOT_ASKED: &str =
    "make sure that the guest does not run there. If that host is gone for good, add --unreachable";
const DISTRUSTED: &str = "a device is broken: use --accel none, or --verify all";

fn of_failure(failure: &Failure) -> Option<String> {
    if let Cause::StandsStill(state) = &failure.cause {
        return Some(of_state(state));
    }
    let attempt = failure.attempt?;
    match failure.guest {
        GuestLocation::InDoubt => Some(format!(
            "run the same command again to finish the migration, and do not continue the guest by hand on either host \
             before. If the destination is gone for good, find out whether the guest ran there, then run: \
             vamoose settle --attempt {attempt} --as running-there|never-ran, \
             with this command's --keys (or equivalent), or with --unreachable if the host cannot be asked"
        )),
        GuestLocation::Unconfirmed => Some(format!(
            "if nobody has migrated the guest with another tool since, run the same command with --confirm {attempt} to finish \
             the migration. If somebody has, run: vamoose settle --attempt {attempt} --as moved-elsewhere"
        )),
        GuestLocation::Gone => Some(format!(
            "if `vamoose attempts` on the destination's host has the attempt as orphaned, its QEMU holds all of the guest, paused. \
             If the guest runs nowhere else, run there: vamoose settle --attempt {attempt} --as running-there|never-ran"
        )),
        _ => None,
    }
}

/// Remedy for a guest that resumed at the destination and then stopped there. `state` is QEMU's name for its state.
fn of_state(state: &str) -> String {
    let remedy = match state {
        "io-error" => {
            "its storage has failed or is full: repair that, then continue it there (`cont`, `virsh resume`)"
        }
        "shutdown" => "it has powered off",
        _ => "look at QEMU's log there; it goes on only when it is reset (`system_reset`)",
    };
    format!("the migration is over. At the destination: {remedy}")
}

fn of_settings(error: &SettingsError) -> Option<String> {
    match error {
        SettingsError::EngineAbsent { .. } => Some(
            "`vamoose probe` shows what this host has and what is missing; --accel auto uses what is available; \
             --accel none, software only"
                .to_owned(),
        ),
        _ => None,
    }
}

fn of_tls(error: &TlsError) -> Option<String> {
    const PEERS_KEY: &str = "`vamoose keys show` on the other host prints its key";
    const SAME: &str = "use the same one of --tls-creds, --keys and --insecure at both ends";
    let hint = match error {
        TlsError::File { path, fault } => {
            let is_key = path.file_name().is_some_and(|name| name == "key");
            match fault {
                FileFault::System(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    "`vamoose keys show` prints the key that is there".to_owned()
                }
                FileFault::System(error) if error.kind() == io::ErrorKind::NotFound && is_key => {
                    "`vamoose keys init` creates a key".to_owned()
                }
                FileFault::System(error) if error.kind() == io::ErrorKind::NotFound => {
                    "--tls-creds takes a directory as QEMU's documentation describes it for TLS; without a certificate \
                     authority, use --keys"
                        .to_owned()
                }
                FileFault::NobodyTrusted => {
                    format!("{PEERS_KEY}: add it to this file, or give it with --peer-key")
                }
                FileFault::Mode { .. } => format!("chmod 600 {}", path.display()),
                _ => return None,
            }
        }
        TlsError::Kind { .. } | TlsError::NotTls { .. } => SAME.to_owned(),
        TlsError::Refused { reason, .. } => match reason {
            Refusal::UnknownKey { .. } => {
                format!(
                    "{PEERS_KEY}: if it is this one, add it to `trusted`, or give it with --peer-key, which replaces `trusted`"
                )
            }
            Refusal::OtherHost { host, .. } => {
                format!("{PEERS_KEY}: if it is this one, write hosts={host} behind it in `trusted`")
            }
            Refusal::Name { .. } => {
                "--tls-server-name NAME names the server's certificate if it is not for the address"
                    .to_owned()
            }
            Refusal::NotAllowed { .. } => "--allow PATTERN allows a name".to_owned(),
            _ => return None,
        },
        TlsError::RefusedByPeer { reason, .. } => match reason {
            Objection::UnknownKey { .. } => {
                "add this key to `trusted` on the other host, or give it there with --peer-key"
                    .to_owned()
            }
            Objection::NotAllowed { .. } => {
                "--allow PATTERN allows a name on the other host".to_owned()
            }
            _ => return None,
        },
        _ => return None,
    };
    Some(hint)
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

    #[test]
    fn distrust_has_a_hint_at_both_ends() {
        let key = "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=";
        let key = key.parse().unwrap();
        let peer = vamoose_link::End::Client;
        let refused = TlsError::Refused {
            peer,
            reason: Refusal::UnknownKey { key },
        };
        let error = Error::new(refused).context("accepting a session");
        assert!(of(&error).unwrap().contains("--peer-key"));
        let objection = TlsError::RefusedByPeer {
            peer,
            reason: Objection::UnknownKey { key },
        };
        assert!(of(&objection.into()).unwrap().contains("on the other host"));
        assert!(
            of(&TlsError::NotTls { peer }.into())
                .unwrap()
                .contains("both ends")
        );
    }
}
