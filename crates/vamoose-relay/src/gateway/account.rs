//! The log line about a migration through a gateway.

use std::fmt;

use tracing::{info, warn};

use vamoose_link::LinkFaults;

use super::endpoint::Target;
use crate::{
    EndKind, RelayError, Role, Summary, Switchover, UnderWay, chain, observer::Observation,
};

/// A migration, for its log line.
pub(super) struct Account {
    pub(super) observation: Observation,
    pub(super) target: Target,
    /// The guest's name, if known.
    pub(super) guest: Option<String>,
    /// Whether connections of another protocol are forwarded.
    pub(super) is_bytes: bool,
}

/// How a migration ended.
#[derive(Debug)]
pub(super) struct MigrationEnd {
    kind: EndKind,
    switchover: Option<Switchover>,
    /// Why the migration was refused or has failed.
    reason: Option<String>,
}

impl Account {
    /// The migration's progress.
    pub(super) fn under_way(&self) -> UnderWay {
        let it = &self.observation.migration;
        let (peer, moved) = (it.peer.clone(), it.stats.snapshot());
        UnderWay {
            name: self.guest.clone(),
            target: Some(self.target.to_string()),
            is_bytes: self.is_bytes,
            ..UnderWay::new("gateway", it.role, peer, it.began, &moved)
        }
    }

    /// Reports the end to the observer, and logs it. `faults` are the session's.
    pub(super) fn write(self, end: &MigrationEnd, faults: LinkFaults) {
        let line = self.line(end);
        let (guest, migration) = (self.guest.as_deref(), self.observation.migration.clone());
        // Counted before it is logged.
        self.observation.end(end.kind, end.switchover, faults);
        let (peer, outcome) = (&*migration.peer, end.kind.name());
        match end.reason {
            Some(_) => warn!(guest, peer, outcome, "{line}"),
            None => info!(guest, peer, outcome, "{line}"),
        }
    }

    fn line(&self, end: &MigrationEnd) -> String {
        let guest = match &self.guest {
            Some(name) => format!("guest {name}"),
            None => "guest of unknown name".to_owned(),
        };
        let migration = &self.observation.migration;
        let moved = migration.stats.snapshot();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let (before, after) = (mib(moved.received_bytes), mib(moved.wire_bytes));
        let took = migration.began.elapsed().as_secs_f64();
        let (peer, target) = (&migration.peer, &self.target);
        let role = match migration.role {
            Role::Source => "to",
            Role::Destination => "from",
        };
        format!(
            "{guest} {role} {peer}, {target}: {end}; {before:.1} MiB as {after:.1} MiB in {took:.2} s"
        )
    }
}

impl MigrationEnd {
    pub(super) fn of(result: &Result<Summary, RelayError>) -> Self {
        Self {
            kind: EndKind::of(result),
            switchover: result.as_ref().ok().and_then(|summary| summary.switchover),
            reason: result.as_ref().err().map(|error| chain(error)),
        }
    }

    pub(super) fn failed(reason: String) -> Self {
        Self {
            kind: EndKind::Failed,
            switchover: None,
            reason: Some(reason),
        }
    }

    /// The error to report to the other gateway.
    pub(super) fn error(&self) -> Option<String> {
        self.reason.clone()
    }

    /// Adds the other gateway's error, which is often the reason.
    pub(super) fn with_peers(mut self, theirs: Option<String>) -> Self {
        let has_failed = [EndKind::Failed, EndKind::Stopped].contains(&self.kind);
        if let (true, Some(ours), Some(theirs)) = (has_failed, &mut self.reason, theirs) {
            *ours += &format!("; the other gateway: {theirs}");
        }
        self
    }
}

impl fmt::Display for MigrationEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            EndKind::Unconfirmed => "delivered, without a confirmation",
            EndKind::Passed => "passed through to its end",
            kind => kind.name(),
        })?;
        match &self.reason {
            Some(reason) => write!(f, ": {reason}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Instant};

    use vamoose_link::Stats;

    use super::*;
    use crate::Observer;

    #[test]
    fn log_line_has_guest_peer_target_outcome_and_size() {
        let (observer, stats): (Arc<dyn Observer>, _) = (Arc::new(()), Arc::<Stats>::default());
        stats.add_received(3 << 20);
        stats.add_sent(1 << 19);
        let account = Account {
            observation: Observation::begin(&observer, Role::Source, "kvm2", Instant::now(), stats),
            target: Target::Port(49_152),
            guest: Some("web1".to_owned()),
            is_bytes: false,
        };
        let end = |kind, reason: Option<&str>| MigrationEnd {
            kind,
            switchover: None,
            reason: reason.map(str::to_owned),
        };
        let failed = MigrationEnd::failed("cut".to_owned()).with_peers(Some("no QEMU".to_owned()));
        for (ending, text) in [
            (end(EndKind::Loaded, None), "loaded"),
            (failed, "failed: cut; the other gateway: no QEMU"),
            (end(EndKind::Refused, Some("full")), "refused: full"),
            (
                end(EndKind::Passed, None).with_peers(Some("x".to_owned())),
                "passed through to its end",
            ),
        ] {
            let line = account.line(&ending);
            let expected =
                format!("guest web1 to kvm2, port 49152: {text}; 3.0 MiB as 0.5 MiB in ");
            assert!(line.starts_with(&expected), "{line}");
        }
    }
}
