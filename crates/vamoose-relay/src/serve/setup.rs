//! Prepares a waiting QEMU for a guest, if it matches the guest.

use std::{io, path::PathBuf, sync::Arc};

use handover::{
    AttemptId, Destination, DestinationMessage, DestinationState, FrameError, Prepare,
    from_details, to_details,
};
use multifd::{Layout, Method};
use serde_json::json;
use thiserror::Error;
use tracing::info;
use vamoose_codec::raw_frame;
use vamoose_link::{Address, Bytes, MethodChoice, Session};

use super::{DestinationQemu, Job, Server, job::Transfer};
use crate::{
    Config, Dialer, Instance, JournalError, chain,
    control::{Offer, Request},
    journal::{AtDestination, Record, now},
    process::ProcessError,
    qemu::{Qemu, QemuError},
};

impl Server {
    pub(super) fn prepare(
        &self,
        attempt: AttemptId,
        prepare: &Prepare,
        session: &Session,
    ) -> Result<(Arc<Job>, DestinationMessage), PrepareError> {
        if self.draining.has_begun() {
            return Err(PrepareError::Draining);
        }
        let protocol = prepare.negotiate()?;
        let request: Request = from_details(prepare.details.clone())?;
        let config = self.relay_config(&request)?;
        let monitor = self.monitor(&request.name)?;
        self.jobs.check_idle(&request.name)?;
        let mut qemu = Qemu::connect(&monitor)?;
        let instance = Instance::of(&mut qemu, &monitor)?;
        check(&mut qemu, &instance.uuid, &request)?;
        // If the migration fails, QEMU holds half a guest and has to be ended, with proof.
        qemu.check_owner().map_err(PrepareError::Unidentified)?;
        let name = format!("{}.incoming", request.name);
        let incoming = Address::Unix(self.config.qmp_dir.join(name));
        let offer = to_details(&Offer {
            qemu: qemu.version.to_string(),
            knows_zero_pages: qemu.knows_zero_pages(),
            keeps_suspended: qemu.keeps_suspended(),
        })?;
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
            },
            state: DestinationState::Receiving,
        })?;
        entry.write()?;
        if let Err(error) = self.set_up(&mut qemu, &request, &mut transfer.config, &incoming) {
            let cause = chain(&error);
            entry.record.state = DestinationState::Aborted { cause };
            entry.write()?;
            return Err(error);
        }
        let qemu = DestinationQemu::new(instance, Some(qemu));
        let machine = Destination::new(self.incarnation);
        let job = Arc::new(Job::new(machine, entry, qemu, Some(transfer)));
        // The monitor serves one client, so no other attempt has prepared this QEMU meanwhile.
        self.jobs.insert(&job);
        info!("{}: ready for attempt {attempt}", request.name);
        let answer = DestinationMessage::Prepared {
            protocol,
            incarnation: self.incarnation,
            details: offer,
        };
        Ok((job, answer))
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
        config.incoming_channels = Some(request.channels.into());
        config.stall_timeout = self.config.sessions.stall_timeout;
        Ok(config)
    }

    /// Makes the QEMU listen for its relay at `incoming`, and keeps it from starting the guest by itself. Completes `config`.
    fn set_up(
        &self,
        qemu: &mut Qemu,
        request: &Request,
        config: &mut Config,
        incoming: &Address,
    ) -> Result<(), PrepareError> {
        let parameters = json!({
            "multifd-channels": request.channels,
            "multifd-compression": Method::None.name(),
        });
        // late-block-activate: the disks stay the source's until the commit.
        let optional = ["late-block-activate", "events"];
        qemu.set_up(&["multifd", "return-path"], &optional, parameters)?;
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
    #[error("this server is about to end: try again after its restart")]
    Draining,
    #[error("{0}: another migration to this QEMU is under way")]
    Busy(String),
    #[error("this attempt has been prepared already")]
    Repeated,
    #[error("this attempt belongs to another source")]
    OtherSource,
    #[error(transparent)]
    Qemu(#[from] QemuError),
    #[error("its QEMU does not wait for a migration: {0}; start it again with -incoming defer -S")]
    NotWaiting(String),
    #[error("its QEMU is not known well enough to end it, should the migration fail")]
    Unidentified(#[source] ProcessError),
    #[error("the destination's guest has the uuid {0}, the source's {1}")]
    Uuid(String, String),
    #[error("the destination's guest has {0} of RAM, the source's {1}")]
    Ram(Bytes, Bytes),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("the system refused")]
    System(#[from] io::Error),
}

/// Sets `qemu` up to decode zstd frames itself, which takes less CPU time than to get their pages through a socket. Pages that are not
/// in frames take more (docs/link.md), so it is not for methods without frames.
fn let_decode(qemu: &mut Qemu, request: &Request) -> Result<bool, QemuError> {
    let has_frames =
        [Method::ZstdFrames.name(), MethodChoice::ADAPTIVE].contains(&&*request.method);
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

/// Refuses a QEMU that cannot take this guest. Nothing has been touched yet.
fn check(qemu: &mut Qemu, uuid: &str, request: &Request) -> Result<(), PrepareError> {
    qemu.check(&["multifd", "return-path"])?;
    let state = qemu.state()?;
    let status = qemu.query_migrate()?["status"].as_str().map(str::to_owned);
    let begun = status.filter(|status| status != "none");
    if let Some(status) = begun {
        let why = format!("its migration has begun already, and is `{status}`");
        return Err(PrepareError::NotWaiting(why));
    }
    if state != "inmigrate" {
        let why = format!("its guest is `{state}`");
        return Err(PrepareError::NotWaiting(why));
    }
    if uuid != request.uuid {
        return Err(PrepareError::Uuid(uuid.to_owned(), request.uuid.clone()));
    }
    let here = qemu.ram_bytes()?;
    if here != request.ram_bytes {
        return Err(PrepareError::Ram(Bytes(here), Bytes(request.ram_bytes)));
    }
    Ok(())
}

fn listen(qemu: &mut Qemu, incoming: &Address) -> Result<(), QemuError> {
    // In this state `stop` means: do not start when everything is loaded, as -S does.
    qemu.execute("stop", json!({}))?;
    let uri = incoming.to_string();
    qemu.execute("migrate-incoming", json!({ "uri": uri }))
}
