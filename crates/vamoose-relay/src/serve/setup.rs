//! Prepares a waiting QEMU for a guest, if it matches the guest.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use handover::{
    AttemptId, Destination, DestinationMessage, DestinationState, Details, FrameError, Prepare,
    from_details, to_details,
};
use multifd::{Layout, Method};
use serde_json::json;
use thiserror::Error;
use tracing::info;
use vamoose_codec::raw_frame;
use vamoose_link::{Address, MethodChoice, Session};

use super::{DestinationQemu, Job, Server, job::Transfer, storage::Exports};
use crate::{
    Config, Dialer, Instance, JournalError, chain,
    control::{Offer, PostCopyAbilities, Request, Resumed},
    journal::{AtDestination, Record, now},
    main_stream::KEEP_TRYING,
    migrate::capabilities,
    process::ProcessError,
    qemu::{Disk, Qemu, QemuError},
};

/// A waiting QEMU that has not been touched. Its monitor is held.
pub(super) struct Waiting {
    qemu: Qemu,
    instance: Instance,
    config: Config,
    protocol: u32,
    request: Request,
}

impl Waiting {
    /// The same QEMU, for the migration that `prepare` asks for; `None` if another one was inspected. The source knows the link by now,
    /// so the method may be none.
    pub(super) fn for_migration(self, prepare: &Prepare) -> Option<Self> {
        let request: Request = from_details(prepare.details.clone()).ok()?;
        let mut inspected = self.request;
        if request.method == Method::None.name() {
            inspected.method.clone_from(&request.method);
        }
        (inspected == request).then_some(Self { request, ..self })
    }

    /// The answer to `inspect`.
    pub(super) fn inspect(&mut self) -> Result<DestinationMessage, PrepareError> {
        let details = to_details(&Offer {
            qemu: self.qemu.version.to_string(),
            knows_zero_pages: self.qemu.knows_zero_pages(),
            keeps_suspended: self.qemu.keeps_suspended(),
            post_copy: self.post_copy()?,
            machine: self.qemu.machine(&self.instance.uuid)?,
            disks: self.disks()?,
            measures: true,
        })?;
        Ok(DestinationMessage::Inspected { details })
    }

    /// The disks that there are, if the source asks for some.
    fn disks(&mut self) -> Result<Option<Vec<Disk>>, QemuError> {
        if self.request.disks.is_empty() {
            return Ok(None);
        }
        let images = self.qemu.images()?.into_iter();
        Ok(Some(images.map(|image| image.disk).collect()))
    }

    /// What both QEMUs have for post-copy, if that is requested.
    fn post_copy(&mut self) -> Result<Option<PostCopyAbilities>, QemuError> {
        let Some(wanted) = self.request.post_copy else {
            return Ok(None);
        };
        self.qemu.check(&["postcopy-ram"])?;
        self.qemu.try_post_copy()?;
        Ok(Some(PostCopyAbilities {
            preempt: wanted.preempt && self.qemu.post_copy_abilities().preempt,
        }))
    }
}

/// How long another client may hold the monitor: less than a source waits for an answer.
const MONITOR_WITHIN: Duration = Duration::from_secs(8);

impl Server {
    /// Finds the QEMU for a guest, and refuses one that could not take it. Changes nothing.
    pub(super) fn find(&self, prepare: &Prepare) -> Result<Waiting, PrepareError> {
        if self.draining.has_begun() {
            return Err(PrepareError::Draining);
        }
        let protocol = prepare.negotiate()?;
        let request: Request = from_details(prepare.details.clone())?;
        let config = self.relay_config(&request)?;
        let monitor = self.monitor(&request.name)?;
        self.jobs.check_idle(&request.name)?;
        let qemu = Qemu::connect_within(&monitor, MONITOR_WITHIN);
        let mut qemu = qemu.map_err(|error| match error.is_monitor_closed() {
            true => PrepareError::Absent(error),
            false => error.into(),
        })?;
        let instance = Instance::of(&mut qemu, &monitor)?;
        check(&mut qemu)?;
        // If the migration fails, QEMU holds half a guest and has to be ended, with proof.
        qemu.check_owner().map_err(PrepareError::Unidentified)?;
        Ok(Waiting {
            qemu,
            instance,
            config,
            protocol,
            request,
        })
    }

    /// Prepares the QEMU that was found.
    pub(super) fn prepare(
        &self,
        attempt: AttemptId,
        waiting: Waiting,
        session: &Session,
    ) -> Result<(Arc<Job>, DestinationMessage), PrepareError> {
        let mut waiting = waiting;
        let post_copy = waiting.post_copy()?;
        let Waiting {
            mut qemu,
            instance,
            config,
            protocol,
            request,
        } = waiting;
        let incoming = self.incoming(&request.name);
        let dialer = Dialer::new(incoming.clone());
        let observer = self.observer.clone();
        let mut transfer = Transfer::new(session.clone(), dialer, config, observer)?;
        let mut entry = self.jobs.journal.claim(Record {
            attempt,
            began: now(),
            name: request.name.clone(),
            qemu: instance.clone(),
            side: AtDestination {
                incarnation: self.incarnation,
                server: self.local_address(),
                orphaned: false,
                source: session.identity().map(str::to_owned),
                post_copy: post_copy.is_some(),
                incomplete: true,
                kept_monitor: None,
            },
            state: DestinationState::Receiving,
        })?;
        entry.write()?;
        let exports = Exports::open(&mut qemu, &request.disks);
        let ready = exports.and_then(|exports| {
            transfer.exports = exports;
            let config = &mut transfer.config;
            self.set_up(&mut qemu, &request, post_copy, config, &incoming)
        });
        if let Err(error) = ready {
            if transfer.exports.is_some() {
                Exports::close(&mut qemu);
            }
            let cause = chain(&error);
            entry.record.state = DestinationState::Aborted { cause };
            entry.write()?;
            return Err(error);
        }
        let mut qemu = DestinationQemu::new(instance, Some(qemu));
        qemu.follow_log(&request.name);
        let machine = Destination::new(self.incarnation);
        let job = Arc::new(Job::new(machine, entry, qemu, Some(transfer)));
        // The monitor serves one client, so no other attempt has prepared this QEMU meanwhile.
        self.jobs.insert(&job);
        info!("{}: ready for attempt {attempt}", request.name);
        let answer = DestinationMessage::Prepared {
            protocol,
            incarnation: self.incarnation,
            details: Details::new(),
        };
        Ok((job, answer))
    }

    /// Prepares a QEMU that is under post-copy for a new connection, and the relay for that.
    pub(super) fn prepare_recovery(
        &self,
        job: &Job,
        prepare: &Prepare,
        session: &Session,
    ) -> Result<DestinationMessage, PrepareError> {
        let protocol = prepare.negotiate()?;
        let request: Request = from_details(prepare.details.clone())?;
        if request.resumes {
            // Its source has no relay any more.
            job.end_relay();
        }
        if !request.resumes || !job.is_under_post_copy() {
            return Err(PrepareError::Repeated);
        }
        let incoming = self.incoming(&job.name);
        let mut transfer = Transfer::new(
            session.clone(),
            Dialer::new(incoming.clone()),
            self.relay_config(&request)?,
            self.observer.clone(),
        )?;
        transfer.resumes = true;
        session.keep_trying(KEEP_TRYING);
        let complete = job.recover(transfer, &incoming)?;
        match complete {
            true => info!("{}: all memory has come", job.name),
            false => info!("{}: ready for the rest of the memory", job.name),
        }
        Ok(DestinationMessage::Prepared {
            protocol,
            incarnation: self.incarnation,
            details: to_details(&Resumed { complete })?,
        })
    }

    /// Where the QEMU called `name` listens for its relay.
    fn incoming(&self, name: &str) -> Address {
        Address::Unix(self.config.qmp_dir.join(format!("{name}.incoming")))
    }

    /// The relay's configuration. `set_up` adds the method that QEMU decodes.
    fn relay_config(&self, request: &Request) -> Result<Config, PrepareError> {
        let method = request.method.as_str();
        let mut known = Method::ALL.iter().map(|method| method.name());
        if method != MethodChoice::ADAPTIVE && known.all(|known| known != method) {
            return Err(PrepareError::Method(method.to_owned()));
        }
        let mut config = Config::new(self.config.engines.clone());
        config.layout = Layout::new(request.page_size)?;
        config.guest = Some(request.name.clone());
        // Post-copy takes the channels' place.
        let channels = request.post_copy.is_none().then_some(request.channels);
        config.incoming_channels = channels.map(usize::from);
        config.stall_timeout = self.config.sessions.stall_timeout;
        Ok(config)
    }

    /// Makes the QEMU listen for its relay at `incoming`, and keeps it from starting the guest by itself. Completes `config`.
    fn set_up(
        &self,
        qemu: &mut Qemu,
        request: &Request,
        post_copy: Option<PostCopyAbilities>,
        config: &mut Config,
        incoming: &Address,
    ) -> Result<(), PrepareError> {
        let parameters = json!({
            "multifd-channels": request.channels,
            "multifd-compression": Method::None.name(),
        });
        // late-block-activate: the disks stay the source's until the commit.
        let optional = ["late-block-activate", "events"];
        qemu.set_up(&capabilities(post_copy), &optional, parameters)?;
        let ready = let_decode(qemu, request).and_then(|decodes| {
            config.is_decoded_by_qemu = decodes;
            listen(qemu, incoming)
        });
        if ready.is_err() {
            qemu.put_back();
        }
        Ok(ready?)
    }

    /// The monitor of the QEMU called `name`; the name comes from a peer and must stay in its folder.
    fn monitor(&self, name: &str) -> Result<PathBuf, PrepareError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
            return Err(PrepareError::Name(name.to_owned()));
        }
        Ok(self.config.qmp_dir.join(format!("{name}.qmp")))
    }
}

#[derive(Debug, Error)]
pub(super) enum PrepareError {
    #[error(transparent)]
    Version(#[from] handover::VersionMismatch),
    #[error("this server does not know method {0}: it is of an older release than the source's")]
    Method(String),
    #[error(transparent)]
    Request(#[from] FrameError),
    #[error(transparent)]
    Layout(#[from] multifd::LayoutError),
    #[error("invalid name `{0}`: only letters, digits, `-`, `_` and `.` are allowed")]
    Name(String),
    #[error("its QEMU has no writable disk `{0}`: start it with the disks of the source's QEMU")]
    NoDisk(String),
    #[error("the disk `{0}` cannot be made ready for a copy")]
    NotExported(String, #[source] QemuError),
    #[error("this server is about to end: try again after its restart")]
    Draining,
    #[error("{0}: another migration to this QEMU is under way")]
    Busy(String),
    #[error("this attempt has been prepared already, and is not under post-copy")]
    Repeated,
    #[error("this attempt belongs to another source")]
    OtherSource,
    #[error(transparent)]
    Qemu(#[from] QemuError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("no thread can be started")]
    NoThread(#[source] io::Error),
    #[error("its QEMU is not known well enough to end it, should the migration fail")]
    Unidentified(#[source] ProcessError),
    #[error(
        "no QEMU waits there under this name: start it (again, after a failure) with -incoming defer -S"
    )]
    Absent(#[source] QemuError),
    #[error(
        "its QEMU does not wait for a guest: it is `{state}`, with migration status `{status}`; start it again with -incoming defer -S"
    )]
    NotWaiting { state: String, status: String },
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("the system refused")]
    System(#[from] io::Error),
}

/// Sets `qemu` up to decode zstd frames itself, which takes less CPU time than to get their pages through a socket. Pages that are not
/// in frames take more (docs/link.md), so it is not for methods without frames.
fn let_decode(qemu: &mut Qemu, request: &Request) -> Result<bool, QemuError> {
    let has_frames = request.post_copy.is_none()
        && [Method::ZstdFrames.name(), MethodChoice::ADAPTIVE].contains(&&*request.method);
    if !has_frames || raw_frame(request.page_size as usize).is_none() {
        return Ok(false);
    }
    let parameters = json!({ "multifd-compression": Method::Zstd.name() });
    match qemu.execute("migrate-set-parameters", parameters) {
        Ok(()) => {
            info!("{}: QEMU decodes zstd frames itself", request.name);
            Ok(true)
        }
        Err(error) if error.is_refusal() => {
            info!(
                "{}: decoding the pages here: {}",
                request.name,
                chain(&error)
            );
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Refuses a QEMU that cannot take a guest.
fn check(qemu: &mut Qemu) -> Result<(), PrepareError> {
    qemu.check(&["multifd", "return-path"])?;
    let state = qemu.state()?;
    let info = qemu.query_migrate()?;
    let status = info["status"].as_str().unwrap_or("none").to_owned();
    match state == "inmigrate" && status == "none" {
        true => Ok(()),
        false => Err(PrepareError::NotWaiting { state, status }),
    }
}

fn listen(qemu: &mut Qemu, incoming: &Address) -> Result<(), QemuError> {
    // In this state `stop` means: do not start when everything is loaded, as -S does.
    qemu.execute("stop", json!({}))?;
    let mut arguments = json!({ "uri": incoming.to_string() });
    if qemu.explains_failures() {
        arguments["exit-on-error"] = false.into();
    }
    qemu.execute("migrate-incoming", arguments)
}
