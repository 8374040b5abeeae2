//! The attempts of a server: active ones in memory, by id, and all others in the journal.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use handover::AttemptId;
use tracing::{info, warn};
use vamoose_link::lock;

use super::{Job, setup::PrepareError, span};
use crate::{
    Journal, JournalError, UnderWay, chain,
    journal::{AtDestination, Record},
};

pub(super) struct Jobs {
    pub(super) journal: Journal,
    active: Mutex<HashMap<AttemptId, Arc<Job>>>,
}

impl Jobs {
    pub(super) fn new(journal: Journal) -> Self {
        journal.clean_up::<AtDestination>();
        Self {
            journal,
            active: Mutex::default(),
        }
    }

    /// Restores unfinished attempts of an earlier server for the QEMUs in `qmp_dir`.
    pub(super) fn restore_unfinished(&self, qmp_dir: &Path) -> Result<Vec<Arc<Job>>, JournalError> {
        let records = self.journal.records::<AtDestination>()?.into_iter();
        let ours = records
            .filter(|record| record.qemu.monitor.parent() == Some(qmp_dir) && !record.is_over());
        let jobs = ours.filter_map(|record| self.restore(record));
        Ok(jobs
            .inspect(|job| info!("{}: taking up attempt {}", job.name, job.attempt))
            .collect())
    }

    /// Makes a job of a journal entry, unless another server has taken it.
    fn restore(&self, record: Record<AtDestination>) -> Option<Arc<Job>> {
        let mut active = lock(&self.active);
        if let Some(job) = active.get(&record.attempt) {
            return Some(job.clone());
        }
        let entry = self.journal.claim(record);
        let entry = entry.inspect_err(|error| warn!("{}", chain(error))).ok()?;
        let job = Arc::new(Job::restore(entry));
        active.insert(job.attempt, job.clone());
        Some(job)
    }

    /// Adds a new attempt, and removes old entries from the journal.
    pub(super) fn insert(&self, job: &Arc<Job>) {
        self.journal.clean_up::<AtDestination>();
        lock(&self.active).insert(job.attempt, job.clone());
    }

    /// The attempt, if it is active.
    pub(super) fn get(&self, attempt: AttemptId) -> Option<Arc<Job>> {
        lock(&self.active).get(&attempt).cloned()
    }

    /// The attempt, from memory or journal.
    pub(super) fn find(&self, attempt: AttemptId) -> Option<Arc<Job>> {
        self.get(attempt).or_else(|| {
            let record = self.journal.find::<AtDestination>(attempt);
            let record = record
                .inspect_err(|error| warn!("{}", chain(error)))
                .ok()??;
            let job = self.restore(record)?;
            // No server has continued it yet.
            job.go_on();
            Some(job)
        })
    }

    /// Refuses a QEMU that takes part in another attempt.
    pub(super) fn check_idle(&self, name: &str) -> Result<(), PrepareError> {
        let jobs: Vec<_> = lock(&self.active).values().cloned().collect();
        let mut jobs = jobs.into_iter();
        if jobs.any(|job| job.name == name && !job.leaves_qemu_free()) {
            return Err(PrepareError::Busy(name.to_owned()));
        }
        Ok(())
    }

    /// Logs orphans and returns how many there are, and drops finished attempts from memory.
    pub(super) fn maintain(&self, orphan_timeout: Duration) -> usize {
        let mut active = lock(&self.active);
        // The journal answers for an attempt that is over and has no connection.
        active.retain(|_, job| Arc::strong_count(job) > 1 || !job.is_in_journal());
        let is_orphan =
            |job: &&Arc<Job>| span(job.attempt).in_scope(|| job.is_orphan(orphan_timeout));
        active.values().filter(is_orphan).count()
    }

    /// Attempts of which it is still not known whether everything has been loaded.
    pub(super) fn to_look_at(&self) -> Vec<Arc<Job>> {
        let active = lock(&self.active);
        active
            .values()
            .filter(|job| job.is_to_be_looked_at())
            .cloned()
            .collect()
    }

    /// Whether any attempt is under way.
    pub(super) fn are_under_way(&self) -> bool {
        lock(&self.active).values().any(|job| job.is_under_way())
    }

    /// Whether a guest would stand still without its relay.
    pub(super) fn are_under_post_copy(&self) -> bool {
        lock(&self.active).values().any(|job| job.is_fetching())
    }

    pub(super) fn under_way(&self) -> Vec<UnderWay> {
        let jobs: Vec<_> = lock(&self.active).values().cloned().collect();
        jobs.iter().filter_map(|job| job.under_way()).collect()
    }

    pub(super) fn hang_up(&self) {
        for job in lock(&self.active).values() {
            job.hang_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use handover::{Destination, DestinationState, Incarnation};

    use super::*;
    use crate::{Instance, journal::now, serve::DestinationQemu};

    fn record(byte: u8, began: u64, state: DestinationState) -> Record<AtDestination> {
        Record {
            attempt: AttemptId([byte; 16]),
            began,
            name: "vm".to_owned(),
            qemu: Instance::unknown(Path::new("/nowhere")),
            side: AtDestination {
                incarnation: Incarnation([7; 16]),
                server: String::new(),
                orphaned: false,
                source: None,
                post_copy: false,
                incomplete: false,
                kept_monitor: None,
            },
            state,
        }
    }

    #[test]
    fn orphans_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let jobs = Jobs::new(Journal::open(&dir.path().join("state")).unwrap());
        let loaded = DestinationState::Loaded { post_copy: false };
        for (byte, orphaned, state) in [
            (1, true, loaded.clone()),
            (2, false, loaded),
            (3, false, DestinationState::Running),
        ] {
            let mut record = record(byte, now(), state);
            record.side.orphaned = orphaned;
            jobs.restore(record).unwrap();
        }
        let hour = Duration::from_secs(3600);
        assert_eq!(jobs.maintain(hour), 1);
        // Those whose source has not come back are silent from the beginning.
        assert_eq!(jobs.maintain(Duration::ZERO), 2);
        assert_eq!(jobs.maintain(hour), 2);
    }

    #[test]
    fn new_attempt_removes_old_journal_entries() {
        let dir = tempfile::tempdir().unwrap();
        let jobs = Jobs::new(Journal::open(&dir.path().join("state")).unwrap());
        for (byte, began, state) in [
            (1, 1, DestinationState::Running),
            (2, now(), DestinationState::Running),
            (3, 1, DestinationState::Loaded { post_copy: false }),
        ] {
            let entry = jobs.journal.claim(record(byte, began, state)).unwrap();
            entry.write().unwrap();
        }
        let entry = jobs
            .journal
            .claim(record(4, now(), DestinationState::Receiving))
            .unwrap();
        entry.write().unwrap();
        let machine = Destination::new(Incarnation([7; 16]));
        let qemu = DestinationQemu::new(entry.record.qemu.clone(), None);
        jobs.insert(&Arc::new(Job::new(machine, entry, qemu, None)));
        let left = jobs.journal.records::<AtDestination>().unwrap();
        let mut left: Vec<_> = left.iter().map(|record| record.attempt.0[0]).collect();
        left.sort_unstable();
        assert_eq!(left, [2, 3, 4]);
        assert_eq!(
            std::fs::read_dir(dir.path().join("state")).unwrap().count(),
            2 * left.len()
        );
    }
}
