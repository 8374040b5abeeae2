//! Hints: remedies for errors in terms of the program's options, which the crates below do not know.

use std::{error::Error as StdError, io, path::Path};

use anyhow::Error;
use vamoose_codec::{DecodeError, EncodeError, SettingsError};
use vamoose_link::{DialError, FileFault, Objection, Refusal, TlsError};
use vamoose_relay::{Cause, ControlError, Failure, GuestLocation, RelayError, SettleError};

use crate::hosts::PORT;

/// The hint for the first error in the chain that has one.
pub fn of(error: &Error) -> Option<String> {
    error.chain().find_map(|cause| {
        if let Some(failure) = cause.downcast_ref() {
            of_failure(failure)
        } else if let Some(ControlError::Dial(error)) = cause.downcast_ref() {
            of_dial(error)
        } else if let Some(tls) = cause.downcast_ref() {
            of_tls(tls)
        } else {
            fixed(cause).map(str::to_owned)
        }
    })
}

/// Remedies that do not depend on the error's values.
fn fixed(error: &(dyn StdError + 'static)) -> Option<&'static str> {
    if let Some(SettleError::NotAsked(..) | SettleError::NoProof(_)) = error.downcast_ref() {
        Some(
            "make sure that the guest has never run there, not even for a moment. If that host is gone for good, add --unreachable",
        )
    } else if let Some(SettleError::Unknown(_)) = error.downcast_ref() {
        Some("`vamoose attempts` lists the attempts of this host")
    } else if let Some(SettingsError::EngineAbsent { .. }) = error.downcast_ref() {
        Some(
            "`vamoose probe` shows what this host has and what is missing; --accel auto uses what is available; \
             --accel none, software only",
        )
    } else if matches!(error.downcast_ref(), Some(EncodeError::Distrusted { .. }))
        || matches!(error.downcast_ref(), Some(DecodeError::Distrusted { .. }))
    {
        Some("a device is broken: use --accel none, or --verify all")
    } else if let Some(RelayError::LateChannel) = error.downcast_ref() {
        Some("name the number of channels that the source opens: --incoming-channels N")
    } else {
        None
    }
}

fn of_failure(failure: &Failure) -> Option<String> {
    if let Cause::StandsStill(state) = &failure.cause {
        return Some(of_state(state));
    }
    if let Cause::TimedOut { .. } = &failure.cause {
        let remedy = "slow the guest down (--auto-converge), or let it be paused for longer (--downtime-limit, --on-timeout force|pause|postcopy)";
        return Some(remedy.to_owned());
    }
    if let Cause::Unsupplied(_) = &failure.cause {
        return Some(
            "run the same command again: it sends the rest. Until then, do not end or continue the guest's QEMU on either host"
                .to_owned(),
        );
    }
    let attempt = failure.attempt?;
    match failure.guest {
        GuestLocation::InDoubt => Some(format!(
            "run the same command again to finish the migration. Until then, do not continue the guest by hand on either host. \
             If the destination is gone for good, find out whether the guest ran there, then run: \
             vamoose settle --attempt {attempt} --as running-there|never-ran, \
             with this command's --keys (or equivalent), or with --unreachable if the host cannot be asked"
        )),
        GuestLocation::Unconfirmed => Some(format!(
            "if no other tool has migrated the guest since, run the same command with --confirm {attempt} to finish the migration. \
             Otherwise, run: vamoose settle --attempt {attempt} --as moved-elsewhere"
        )),
        GuestLocation::Gone => Some(format!(
            "if `vamoose attempts` on the destination's host lists the attempt as orphaned, its QEMU holds all of the guest, paused \
             (under post-copy only a part: then end it, and start the guest from its disk). \
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

fn of_dial(error: &DialError) -> Option<String> {
    if error.is_about_tls() {
        return Some(SAME_SECURITY.to_owned());
    }
    if error.is_about_port() {
        let hint = format!("is this the port of `vamoose serve`? Its default is {PORT}");
        return Some(hint);
    }
    let DialError::Socket(error) = error else {
        return None;
    };
    let hint = match error.source.kind() {
        io::ErrorKind::ConnectionRefused => {
            "nothing listens there: does `vamoose serve` run on that host, at this port?"
        }
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable => {
            "does that host run, and does its firewall let connections to this port through?"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

const SAME_SECURITY: &str = "use the same one of --tls-creds, --keys and --insecure at both ends";

fn of_tls(error: &TlsError) -> Option<String> {
    const PEERS_KEY: &str = "`vamoose keys show` on the other host prints its key";
    let hint = match error {
        TlsError::File { path, fault } => match fault {
            FileFault::Mode { .. } => format!("chmod 600 {}", path.display()),
            FileFault::NobodyTrusted => {
                format!("{PEERS_KEY}: add it to this file, or to hosts.toml as the host's `key`")
            }
            FileFault::System(error) => of_file(path, error.kind())?.to_owned(),
            _ => return None,
        },
        TlsError::Refused { reason, .. } => match reason {
            Refusal::UnknownKey { .. } => format!(
                "{PEERS_KEY}: if it is this one, add it to `trusted`, or to hosts.toml as the host's `key`; that, or --peer-key, \
                 counts instead of `trusted`"
            ),
            Refusal::OtherHost { host, .. } => {
                format!("{PEERS_KEY}: if it is this one, write hosts={host} after it in `trusted`")
            }
            Refusal::Name { .. } => {
                "--tls-server-name NAME names the server's certificate if it is not for the address"
                    .to_owned()
            }
            Refusal::NotAllowed { .. } => "--allow PATTERN allows a name".to_owned(),
            _ => return None,
        },
        TlsError::RefusedByPeer { reason, .. } => of_objection(reason)?.to_owned(),
        TlsError::Kind { .. } | TlsError::NotTls { .. } => SAME_SECURITY.to_owned(),
        _ => return None,
    };
    Some(hint)
}

fn of_file(path: &Path, error: io::ErrorKind) -> Option<&'static str> {
    match error {
        io::ErrorKind::AlreadyExists => Some("`vamoose keys show` prints the key that is there"),
        io::ErrorKind::NotFound if path.ends_with("key") => {
            Some("`vamoose keys init` creates a key")
        }
        io::ErrorKind::NotFound => Some(
            "--tls-creds takes a directory as QEMU's documentation describes it for TLS; without a certificate authority, use \
             --keys",
        ),
        _ => None,
    }
}

fn of_objection(reason: &Objection) -> Option<&'static str> {
    match reason {
        Objection::UnknownKey { .. } => {
            Some("add this key to `trusted` on the other host, or give it there with --peer-key")
        }
        Objection::NotAllowed { .. } => Some("--allow PATTERN allows a name on the other host"),
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
