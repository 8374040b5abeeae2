//! How a QEMU is set up for a migration through a relay, and put back afterwards.

use std::{collections::BTreeMap, ops::ControlFlow, time::Duration};

use serde_json::{Map, Value, json};
use tracing::debug;

use super::{Qemu, QemuError};
use crate::{chain, qmp::QmpError};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Settings {
    pub(crate) capabilities: BTreeMap<String, bool>,
    pub(crate) parameters: Map<String, Value>,
}

/// How long a QEMU may take to clean up after a migration.
const CLEANING_UP: Duration = Duration::from_secs(10);
/// Capabilities that do not go together with multifd through a relay. They are switched off where
/// they are on, and put back afterwards.
const IN_THE_WAY: [&str; 8] = [
    "postcopy-ram",
    "xbzrle",
    "compress",
    "rdma-pin-all",
    "zero-copy-send",
    "background-snapshot",
    "mapped-ram",
    "pause-before-switchover",
];

impl Qemu {
    /// Sets this QEMU up for multifd through a relay with `parameters`, and remembers how it was.
    /// Optional capabilities are switched on where they are known.
    pub(crate) fn set_up(
        &mut self,
        mandatory: &[&str],
        optional: &[&str],
        parameters: Value,
    ) -> Result<(), QemuError> {
        self.wait_until_idle()?;
        self.before = self.settings()?;
        let mut wanted = Settings::default();
        for name in IN_THE_WAY {
            if self.before.capabilities.get(name) == Some(&true) {
                wanted.capabilities.insert(name.to_owned(), false);
            }
        }
        let known = |name: &&&str| self.schema.has_capability(name);
        for name in mandatory.iter().chain(optional.iter().filter(known)) {
            wanted.capabilities.insert((*name).to_owned(), true);
        }
        if let Value::Object(parameters) = parameters {
            wanted.parameters = parameters;
        }
        let applied = self.apply(&wanted);
        if applied.is_err() {
            self.put_back();
        }
        applied
    }

    /// Puts capabilities and parameters back to what they were before [`Qemu::set_up`]. What QEMU
    /// refuses, for it may be on its way out, stays as it is.
    pub(crate) fn put_back(&mut self) {
        let before = std::mem::take(&mut self.before);
        if let Err(error) = self.wait_until_idle().and_then(|()| self.apply(&before)) {
            debug!("could not put migration settings back: {}", chain(&error));
        }
    }

    /// Waits until nothing is left of a migration that has ended.
    ///
    /// QEMU reports *failed* or *cancelled* before it has cleaned up, and cleans up by the capabilities of
    /// that moment: switching multifd off in between aborts QEMU 10.0, and the guest with it (an
    /// assertion in its yank code, seen in one run of fifty). Its yank instance is the last thing to go.
    fn wait_until_idle(&mut self) -> Result<(), QemuError> {
        self.ask_until("no migration", CLEANING_UP, |qemu| {
            let instances = match qemu.qmp.execute("query-yank", json!({})) {
                // Before 6.0 there was no yank to go wrong.
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

    /// Makes the wanted settings the present ones, touching only what differs.
    fn apply(&mut self, wanted: &Settings) -> Result<(), QemuError> {
        let now = self.settings()?;
        let differs = |(name, on): &(&String, &bool)| now.capabilities.get(*name) != Some(*on);
        // Off before on: two that exclude each other must not be on at once.
        for turn_on in [false, true] {
            let list = wanted
                .capabilities
                .iter()
                .filter(|(_, on)| **on == turn_on)
                .filter(differs)
                .map(|(name, on)| json!({ "capability": name, "state": on }))
                .collect::<Vec<_>>();
            if !list.is_empty() {
                let arguments = json!({ "capabilities": list });
                self.qmp.execute("migrate-set-capabilities", arguments)?;
            }
        }
        let parameters = wanted
            .parameters
            .iter()
            .filter(|(name, value)| now.parameters.get(*name) != Some(*value))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect::<Map<_, _>>();
        if !parameters.is_empty() {
            self.qmp
                .execute("migrate-set-parameters", Value::Object(parameters))?;
        }
        Ok(())
    }
}
