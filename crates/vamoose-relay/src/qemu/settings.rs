//! Sets a QEMU up for a migration through a relay, and restores its settings afterwards.

use std::{collections::BTreeMap, ops::ControlFlow, time::Duration};

use serde_json::{Map, Value, json};
use tracing::{debug, info, warn};

use super::{Qemu, QemuError};
use crate::{chain, qmp::QmpError};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Settings {
    pub(crate) capabilities: BTreeMap<String, bool>,
    pub(crate) parameters: Map<String, Value>,
}

/// How long a QEMU may take to clean up after a migration.
const CLEANING_UP: Duration = Duration::from_secs(10);

/// The effect of an enabled capability on a migration through a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// Harmless, or required.
    Harmless,
    /// Incompatible with multifd through a relay, or the guest could not come back: switched off for the migration.
    InTheWay,
    /// It asks for a different kind of migration.
    Refused(&'static str),
}

use Meaning::{Harmless, InTheWay, Refused};

/// All capabilities of QEMU 7.2 to 11.1.
const CAPABILITIES: [(&str, Meaning); 24] = [
    ("auto-converge", Harmless),
    ("background-snapshot", InTheWay),
    (
        "block",
        Refused("QEMU would send the disks along, but not through a relay"),
    ),
    ("compress", InTheWay),
    ("dirty-bitmaps", Harmless),
    ("dirty-limit", Harmless),
    ("events", Harmless),
    ("late-block-activate", Harmless),
    ("mapped-ram", InTheWay),
    // Together with post-copy.
    ("multifd", InTheWay),
    ("pause-before-switchover", InTheWay),
    ("postcopy-blocktime", Harmless),
    // Only together with the next one, in the same command.
    ("postcopy-preempt", InTheWay),
    ("postcopy-ram", InTheWay),
    ("rdma-pin-all", InTheWay),
    // The guest could not resume at the source.
    ("release-ram", InTheWay),
    ("return-path", Harmless),
    ("switchover-ack", Harmless),
    ("validate-uuid", Harmless),
    ("x-colo", Refused("the guest would be kept at both ends")),
    (
        "x-ignore-shared",
        Refused("shared memory of the guest would not be sent"),
    ),
    ("xbzrle", InTheWay),
    ("zero-blocks", Harmless),
    ("zero-copy-send", InTheWay),
];

/// The meaning of any other capability.
const UNKNOWN: Meaning = Refused("this release of Vamoose does not know it");

impl Settings {
    /// Refuses settings with which a reported success could be wrong.
    pub(super) fn check(&self) -> Result<(), QemuError> {
        for (name, meaning) in self.switched_on() {
            if let Refused(why) = meaning {
                let name = name.to_owned();
                return Err(QemuError::Capability { name, why });
            }
        }
        let text = |name: &str| self.parameters.get(name).and_then(Value::as_str);
        if text("tls-creds").is_some_and(|id| !id.is_empty()) {
            return Err(QemuError::Tls);
        }
        match text("mode") {
            None | Some("normal") => Ok(()),
            Some(mode) => Err(QemuError::Mode(mode.to_owned())),
        }
    }

    /// The settings that differ in `now`.
    fn differing_from(mut self, now: &Self) -> Self {
        self.capabilities
            .retain(|name, on| now.capabilities.get(name) != Some(on));
        self.parameters
            .retain(|name, value| now.parameters.get(name) != Some(value));
        self
    }

    /// Each setting with its value.
    fn list(&self) -> Vec<String> {
        let on_or_off = |on| if on { "on" } else { "off" };
        let capabilities = self.capabilities.iter();
        let capabilities = capabilities.map(|(name, on)| (name, on_or_off(*on).to_owned()));
        let parameters = self.parameters.iter();
        let parameters = parameters.map(|(name, value)| (name, value.to_string()));
        let all = capabilities.chain(parameters);
        all.map(|(name, value)| format!("`{name}` (was {value})"))
            .collect()
    }

    fn switched_on(&self) -> impl Iterator<Item = (&str, Meaning)> {
        let on = self.capabilities.iter().filter(|(_, on)| **on);
        on.map(|(name, _)| (name.as_str(), meaning(name)))
    }
}

fn meaning(capability: &str) -> Meaning {
    let known = CAPABILITIES.iter().find(|(name, _)| *name == capability);
    known.map_or(UNKNOWN, |(_, meaning)| *meaning)
}

impl Qemu {
    /// Sets this QEMU up for a migration through a relay with `parameters`, and remembers its settings.
    /// Optional capabilities are switched on if QEMU has them.
    pub(crate) fn set_up(
        &mut self,
        mandatory: &[&str],
        optional: &[&str],
        parameters: Value,
    ) -> Result<(), QemuError> {
        self.wait_until_idle()?;
        self.before = self.settings()?;
        let mut wanted = Settings::default();
        let on = self.before.switched_on();
        let on = on.filter(|(name, _)| !mandatory.contains(name));
        for (name, _) in on.filter(|(_, meaning)| *meaning == InTheWay) {
            info!("the migration capability `{name}` is switched off for this migration");
            wanted.capabilities.insert(name.to_owned(), false);
        }
        let known = |name: &&&str| self.before.capabilities.contains_key(**name);
        for name in mandatory.iter().chain(optional.iter().filter(known)) {
            wanted.capabilities.insert((*name).to_owned(), true);
        }
        if let Value::Object(parameters) = parameters {
            wanted.parameters = parameters;
        }
        let applied = self.apply(wanted.differing_from(&self.before));
        if applied.is_err() {
            self.put_back();
        }
        applied
    }

    /// Refuses a waiting QEMU that could not receive pages by post-copy: its kernel or its user may not allow that. Only QEMU itself
    /// can tell, when it is told to be ready for it. The setting is put back.
    pub(crate) fn try_post_copy(&mut self) -> Result<(), QemuError> {
        let now = self.settings()?;
        if now.capabilities.get("postcopy-ram") == Some(&true) {
            return Ok(());
        }
        let mut wanted = Settings::default();
        // Older QEMUs refuse both.
        for (name, on) in [("multifd", false), ("postcopy-ram", true)] {
            wanted.capabilities.insert(name.to_owned(), on);
        }
        let tried = self.apply(wanted.differing_from(&now));
        let then = self.settings()?;
        self.apply(now.differing_from(&then))?;
        tried
    }

    /// Restores the capabilities and parameters from before [`Qemu::set_up`]. Best effort: QEMU may be exiting.
    pub(crate) fn put_back(&mut self) {
        let before = std::mem::take(&mut self.before);
        let put_back = self.wait_until_idle().and_then(|()| {
            let now = self.settings()?;
            self.apply(before.clone().differing_from(&now))
        });
        let Err(error) = put_back else {
            return;
        };
        let error = chain(&error);
        match self
            .settings()
            .map(|now| before.differing_from(&now).list())
        {
            Ok(left) if !left.is_empty() => warn!(
                "QEMU keeps these migration settings of the attempt, to be put back by hand: {}: {error}",
                left.join(", ")
            ),
            _ => debug!("could not put migration settings back: {error}"),
        }
    }

    /// Waits until nothing is left of a migration that has ended.
    ///
    /// QEMU reports *failed* or *cancelled* before it has cleaned up, and cleans up according to its capabilities at
    /// that time. Switching multifd off in between aborts QEMU 10.0, and the guest with it (an
    /// assertion in its yank code, seen in one run of fifty). The yank instance is removed last.
    fn wait_until_idle(&mut self) -> Result<(), QemuError> {
        self.ask_until("no migration", CLEANING_UP, |qemu| {
            let instances = match qemu.qmp.execute("query-yank", json!({})) {
                // Before 6.0 there is no yank.
                Err(QmpError::Refused { .. }) => return Ok(ControlFlow::Break(())),
                answer => answer?,
            };
            let mut instances = instances.as_array().into_iter().flatten();
            Ok(
                match instances.any(|instance| instance["type"] == "migration") {
                    true => ControlFlow::Continue("a migration that does not end".to_owned()),
                    false => ControlFlow::Break(()),
                },
            )
        })
    }

    pub(super) fn settings(&mut self) -> Result<Settings, QemuError> {
        let capabilities = self.qmp.execute("query-migrate-capabilities", json!({}))?;
        let capabilities = capabilities.as_array().into_iter().flatten();
        let capabilities = capabilities.filter_map(|entry| {
            let name = entry["capability"].as_str()?.to_owned();
            Some((name, entry["state"].as_bool()?))
        });
        let parameters = self.qmp.execute("query-migrate-parameters", json!({}))?;
        Ok(Settings {
            capabilities: capabilities.collect(),
            parameters: parameters.as_object().cloned().unwrap_or_default(),
        })
    }

    /// Applies settings that differ from the present ones.
    fn apply(&mut self, wanted: Settings) -> Result<(), QemuError> {
        // Off before on, as some capabilities exclude each other.
        for turn_on in [false, true] {
            let list = wanted
                .capabilities
                .iter()
                .filter(|(_, on)| **on == turn_on)
                .map(|(name, on)| json!({ "capability": name, "state": on }))
                .collect::<Vec<_>>();
            if !list.is_empty() {
                let arguments = json!({ "capabilities": list });
                self.qmp.execute("migrate-set-capabilities", arguments)?;
            }
        }
        if !wanted.parameters.is_empty() {
            let parameters = Value::Object(wanted.parameters);
            self.qmp.execute("migrate-set-parameters", parameters)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use lab::qemu::{Builder, available, newest_or_skip};

    use super::*;
    use crate::qemu::Version;

    fn with(capabilities: &[&str], parameters: Value) -> Settings {
        let capabilities = capabilities.iter().map(|name| ((*name).to_owned(), true));
        Settings {
            capabilities: capabilities.collect(),
            parameters: parameters.as_object().cloned().unwrap_or_default(),
        }
    }

    /// Every QEMU's list, so that a new capability is decided about and not overlooked.
    #[test]
    fn every_capability_and_parameter_is_known() {
        if newest_or_skip().unwrap().is_none() {
            return;
        }
        for binary in available() {
            let qemu = Builder::bare(binary, 1 << 20).start().unwrap();
            let mut qemu = Qemu::connect(&qemu.qmp_socket()).unwrap();
            let settings = qemu.settings().unwrap();
            assert!(settings.check().is_ok());
            for name in settings.capabilities.keys() {
                assert_ne!(meaning(name), UNKNOWN, "{}: {name}", binary.version);
            }
            // Parameters are listed whether they are set or not.
            qemu.check(&["multifd"]).unwrap();
            let version = qemu.version;
            assert_eq!(qemu.knows_zero_pages(), version >= Version(9, 0, 0));
            let takes_bandwidth = qemu.has_parameter("avail-switchover-bandwidth");
            assert_eq!(takes_bandwidth, version >= Version(8, 2, 0));
            let unknown = qemu.check(&["of-a-later-qemu"]);
            assert!(matches!(unknown, Err(QemuError::NoCapability(..))));
        }
    }

    #[test]
    fn settings_that_could_not_be_put_back_are_named() {
        let mut before = with(
            &["xbzrle"],
            json!({ "multifd-channels": 2, "mode": "normal" }),
        );
        before.capabilities.insert("multifd".to_owned(), false);
        let now = with(
            &["multifd"],
            json!({ "multifd-channels": 8, "mode": "normal" }),
        );
        let left = [
            "`multifd` (was off)",
            "`xbzrle` (was on)",
            "`multifd-channels` (was 2)",
        ];
        assert_eq!(before.differing_from(&now).list(), left);
        assert!(now.clone().differing_from(&now).list().is_empty());
    }

    #[test]
    fn what_would_make_a_success_untrue_is_refused() {
        for name in ["x-ignore-shared", "block", "x-colo", "of-a-later-qemu"] {
            let refused = with(&[name], Value::Null).check();
            assert!(
                matches!(refused, Err(QemuError::Capability { .. })),
                "{name}"
            );
        }
        for mode in ["cpr-reboot", "cpr-transfer", "cpr-exec"] {
            let refused = with(&[], json!({ "mode": mode })).check();
            assert!(matches!(refused, Err(QemuError::Mode(_))), "{mode}");
        }
        let fine = with(&["postcopy-ram", "multifd"], json!({ "mode": "normal" }));
        assert!(fine.check().is_ok());
    }
}
