//! Copies of a guest's disks, which go along with its memory.
//!
//! ```text
//!  copy     a mirror job for each disk writes its content, and what the guest changes meanwhile, to an export at the destination
//!  follow   a disk that the guest writes faster than the job copies is written at both ends at once (QEMU 8.2 and later)
//!  ready    when all jobs have caught up, the memory is moved; the jobs go on
//!  finish   QEMU holds the migration when the guest is paused (`pause-before-switchover`). The jobs write the rest and end
//!  go on    when all jobs have ended without an error, and only then
//! ```
//!
//! A job that is ended by `block-job-cancel` when it is ready has completed its copy, and the guest keeps its own image. So until the
//! commit the source's images are complete, whatever happens. QEMU itself would go on without a complete copy, also when a job
//! has failed.

use std::{ops::ControlFlow, path::Path, sync::Arc, time::Duration};

use handover::{AttemptId, ConnectionKind};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tracing::{debug, info, warn};
use vamoose_link::{Address, Session, Stats};

use super::{
    Cause, Migration, News, Progress,
    hand_over::HandOver,
    socket::{Route, listen_beside},
    source::SourceQemu,
};
use crate::{
    chain,
    control::preamble,
    qemu::{COPY, Disk, Image, Qemu, QemuError, copy_id},
};

/// Which disks to copy, and what of them.
#[derive(Clone, Debug)]
pub struct Storage {
    /// Only what images have on top of their backing files.
    pub increments: bool,
    /// Names of the disks; all writable ones if empty.
    pub only: Vec<String>,
}

/// Progress of all copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CopiedDisks {
    /// Bytes of disks that have been copied, again if the guest has changed them.
    pub bytes: u64,
    /// With what is left.
    pub total: u64,
    /// Bytes sent for that.
    pub wire_bytes: u64,
}

impl Storage {
    /// The disks to be copied, of all that a QEMU has.
    pub(super) fn choose(&self, images: Vec<Image>) -> Result<Vec<Image>, Cause> {
        let has = |name: &String| images.iter().any(|image| image.disk.name == *name);
        if let Some(name) = self.only.iter().find(|name| !has(name)) {
            return Err(Cause::NoDisk {
                name: name.clone(),
                known: images.into_iter().map(|image| image.disk.name).collect(),
            });
        }
        let is_wanted = |disk: &Disk| self.only.is_empty() || self.only.contains(&disk.name);
        let images = images.into_iter();
        Ok(images.filter(|image| is_wanted(&image.disk)).collect())
    }
}

/// The copies of one attempt.
pub(super) struct Copies {
    images: Vec<Image>,
    phase: Phase,
    pub(super) stats: Arc<Stats>,
    copied: CopiedDisks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The jobs copy, or follow the guest's writes.
    Copying,
    /// The guest is paused, and the jobs write the rest.
    Finishing,
    /// All copies are complete, or there are none.
    Complete,
}

/// A job, as QEMU lists it.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Job {
    id: String,
    status: String,
    current_progress: u64,
    total_progress: u64,
    error: Option<String>,
}

/// How often to ask for the progress.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// A guest outruns a job that has come no nearer to its end for so many questions.
const OUTRUN: u32 = 15;
/// How long jobs may take to end: their connections are closed by then.
const ENDING: Duration = Duration::from_secs(10);

impl Migration<'_> {
    /// The way of the copies, if there are any.
    pub(super) fn route(
        &self,
        copies: &Copies,
        session: &Session,
        attempt: AttemptId,
    ) -> Result<Option<Route>, Cause> {
        if !copies.are_due() {
            return Ok(None);
        }
        let stall_timeout = self.config.stall_timeout;
        let listener = listen_beside(self.qmp, "disks", stall_timeout)?;
        let preamble = preamble(ConnectionKind::Disk, attempt);
        Ok(Some(Route::new(listener, session, &preamble)))
    }

    /// Copies the disks until all jobs have caught up with the guest.
    pub(super) fn copy_disks(
        &self,
        hand_over: &mut HandOver<'_>,
        source: &mut SourceQemu,
        copies: &mut Copies,
        (route, session): (&Route, &Session),
        observe: &mut dyn FnMut(News<'_>),
    ) -> Result<(), Cause> {
        let increments = self.storage.is_some_and(|storage| storage.increments);
        observe(News::WaitsFor(
            "the source QEMU to begin the copies of the disks",
        ));
        copies.begin(&mut source.qemu, route.address(), increments)?;
        let (mut least_left, mut since) = (u64::MAX, 0);
        loop {
            if self.is_cancelled() {
                return Err(Cause::Cancelled);
            }
            let jobs = copies.look(&mut source.qemu)?;
            observe(News::Progress(&Progress {
                status: "copying disks".to_owned(),
                session: Some(session.clone()),
                disks: copies.progress(),
                ..Progress::default()
            }));
            if jobs.iter().all(Job::is_ready) {
                info!("the disks have been copied, and are kept up to date");
                return Ok(());
            }
            match copies.copied.total.saturating_sub(copies.copied.bytes) {
                left if left < least_left => (least_left, since) = (left, 0),
                _ => since += 1,
            }
            if since == OUTRUN {
                write_at_both_ends(&mut source.qemu, &jobs)?;
            }
            source.take_events(ASK_EVERY)?;
            hand_over.note_wish(source.is_wanted)?;
        }
    }
}

impl Copies {
    pub(super) fn new(images: Vec<Image>) -> Self {
        let phase = match images.is_empty() {
            true => Phase::Complete,
            false => Phase::Copying,
        };
        Self {
            images,
            phase,
            stats: Arc::default(),
            copied: CopiedDisks::default(),
        }
    }

    /// Whether the migration must not go on yet when the guest is paused. QEMU holds it then, and has not given up its images, so
    /// that every version can be cancelled.
    pub(super) fn are_due(&self) -> bool {
        self.phase != Phase::Complete
    }

    pub(super) fn progress(&self) -> Option<CopiedDisks> {
        let wire_bytes = self.stats.snapshot().wire_bytes;
        (!self.images.is_empty()).then_some(CopiedDisks {
            wire_bytes,
            ..self.copied
        })
    }

    /// Starts the jobs.
    fn begin(&self, qemu: &mut Qemu, address: &Address, increments: bool) -> Result<(), Cause> {
        remove_copies(qemu)?;
        let socket = match address {
            Address::Unix(path) => path.as_path(),
            Address::Tcp { .. } => Path::new(""),
        };
        for (number, image) in self.images.iter().enumerate() {
            let id = copy_id(number);
            let node = json!({
                "driver": "nbd", "node-name": id, "export": id, "discard": "unmap",
                "server": { "type": "unix", "path": socket },
            });
            // Without a backing file, what was never written has to become zeros.
            let sync = match increments && image.disk.backing.is_some() {
                true => "top",
                false => "full",
            };
            let job = json!({
                "job-id": id, "device": image.node, "target": id, "sync": sync, "auto-dismiss": false,
            });
            let begun = qemu.execute("blockdev-add", node);
            let begun = begun.and_then(|()| qemu.execute("blockdev-mirror", job));
            begun.map_err(|error| match error.is_refusal() {
                true => Cause::disk(image, chain(&error)),
                false => error.into(),
            })?;
        }
        Ok(())
    }

    /// Finishes the copies when QEMU holds the migration, whose `status` this is, and then lets the migration go on.
    pub(super) fn follow(&mut self, qemu: &mut Qemu, status: &str) -> Result<(), Cause> {
        if !self.are_due() {
            return Ok(());
        }
        if status == "completed" {
            let early = "the migration was continued at the source QEMU's monitor before the disks were complete";
            return Err(Cause::broken(early));
        }
        let jobs = self.look(qemu)?;
        match (self.phase, status) {
            (Phase::Copying, "pre-switchover") => {
                for job in &jobs {
                    qemu.execute("block-job-cancel", json!({ "device": job.id }))?;
                }
                self.phase = Phase::Finishing;
            }
            (Phase::Finishing, "pre-switchover") if jobs.iter().all(Job::has_ended) => {
                for job in &jobs {
                    qemu.execute("job-dismiss", json!({ "id": job.id }))?;
                    qemu.execute("blockdev-del", json!({ "node-name": job.id }))?;
                }
                qemu.execute("migrate-continue", json!({ "state": status }))?;
                self.phase = Phase::Complete;
            }
            _ => {}
        }
        Ok(())
    }

    /// The jobs, in the order of the disks, if none has failed.
    fn look(&mut self, qemu: &mut Qemu) -> Result<Vec<Job>, Cause> {
        let jobs = qemu.copy_jobs()?;
        let of = |number: usize| jobs.iter().find(|job| job.id == copy_id(number));
        for (number, image) in self.images.iter().enumerate() {
            let problem = match of(number) {
                Some(Job {
                    error: Some(error), ..
                }) => error.clone(),
                Some(job) if self.phase == Phase::Finishing || !job.has_ended() => continue,
                Some(_) | None => "its job was ended at the source QEMU's monitor".to_owned(),
            };
            return Err(Cause::disk(image, problem));
        }
        self.copied.bytes = jobs.iter().map(|job| job.current_progress).sum();
        self.copied.total = jobs.iter().map(|job| job.total_progress).sum();
        Ok(jobs)
    }
}

impl Cause {
    fn disk(image: &Image, problem: String) -> Self {
        Self::Disk {
            name: image.disk.name.clone(),
            problem,
        }
    }
}

impl Job {
    /// A job that is ready stays so until it ends.
    fn is_ready(&self) -> bool {
        ["ready", "standby"].contains(&&*self.status)
    }

    fn has_ended(&self) -> bool {
        self.status == "concluded"
    }
}

impl Qemu {
    fn copy_jobs(&mut self) -> Result<Vec<Job>, QemuError> {
        let mut jobs: Vec<Job> = self.list("query-jobs", json!({}))?;
        jobs.retain(|job| job.id.starts_with(COPY));
        Ok(jobs)
    }
}

/// From now on, a write of the guest ends when its copy has been written, too.
fn write_at_both_ends(qemu: &mut Qemu, jobs: &[Job]) -> Result<(), QemuError> {
    for job in jobs.iter().filter(|job| !job.is_ready()) {
        let mode = json!({ "id": job.id, "type": "mirror", "copy-mode": "write-blocking" });
        match qemu.execute("block-job-change", mode) {
            Err(error) if error.is_refusal() => warn!(
                "the guest writes its disks faster than they are copied, and this QEMU cannot slow it down (8.2 and later can): {}",
                chain(&error)
            ),
            changed => changed
                .inspect(|()| info!("the guest's writes to its disks wait for the copies"))?,
        }
    }
    Ok(())
}

/// Ends what this attempt, or an earlier one whose process was killed, has left in QEMU. The guest's own images are not affected.
pub(super) fn remove_copies(qemu: &mut Qemu) -> Result<(), QemuError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Node {
        node_name: Option<String>,
    }
    let tolerate = |result: Result<(), QemuError>| match result {
        // It may just have ended by itself.
        Err(error) if error.is_refusal() => {
            debug!("{}", chain(&error));
            Ok(())
        }
        result => result,
    };
    qemu.ask_until("no copies of disks", ENDING, |qemu| {
        let jobs = qemu.copy_jobs()?;
        for job in &jobs {
            let id = &job.id;
            tolerate(match job.has_ended() {
                true => qemu.execute("job-dismiss", json!({ "id": id })),
                false => qemu.execute("block-job-cancel", json!({ "device": id, "force": true })),
            })?;
        }
        Ok(match jobs.is_empty() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue("copying disks".to_owned()),
        })
    })?;
    let nodes: Vec<Node> = qemu.list("query-named-block-nodes", json!({ "flat": true }))?;
    let names = nodes.into_iter().filter_map(|node| node.node_name);
    for name in names.filter(|name| name.starts_with(COPY)) {
        tolerate(qemu.execute("blockdev-del", json!({ "node-name": name })))?;
    }
    Ok(())
}

/// As [`remove_copies`], at the end of an attempt: the guest's location does not depend on it.
pub(super) fn clean_up(qemu: &mut Qemu) {
    if let Err(error) = remove_copies(qemu) {
        warn!(
            "jobs and nodes `{COPY}...` of the copies of disks may be left in the source's QEMU; the next attempt removes them: {}",
            chain(&error)
        );
    }
}
