//! The waiting QEMU: whether it fits the guest, and how it is made to take it.

use std::{io, path::Path};

use serde_json::json;
use thiserror::Error;

use crate::{
    JournalError,
    control::{ControlError, Request},
    qemu::{Qemu, QemuError},
};

/// A migration that will not be taken, and why.
#[derive(Debug, Error)]
pub(super) enum PrepareError {
    #[error(transparent)]
    Version(#[from] handover::VersionMismatch),
    #[error("this server does not know method {theirs}: it is older than the vamoose that asks")]
    Method { theirs: String },
    #[error(transparent)]
    Request(#[from] ControlError),
    #[error(transparent)]
    Layout(#[from] multifd::LayoutError),
    #[error("`{name}` is not a name: letters, digits, - _ and . make one")]
    Name { name: String },
    #[error("{name}: another migration to this QEMU is under way")]
    Busy { name: String },
    #[error("this attempt has been prepared before")]
    Repeated,
    #[error(transparent)]
    Qemu(#[from] QemuError),
    #[error("the destination's guest has the uuid {here}, the source's {source_uuid}")]
    Uuid { source_uuid: String, here: String },
    #[error("the destination's guest has {here} bytes of RAM, the source's {at_source}")]
    Ram { at_source: u64, here: u64 },
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("the system refused: {0}")]
    System(#[from] io::Error),
}

/// Refuses a QEMU that cannot take this guest. Nothing has been touched yet.
pub(super) fn check(qemu: &mut Qemu, request: &Request) -> Result<(), PrepareError> {
    qemu.check(&["multifd", "return-path"])?;
    let state = qemu.state()?;
    let status = qemu.query_migrate()?["status"].as_str().map(str::to_owned);
    if state != "inmigrate" || status.is_some_and(|status| status != "none") {
        return Err(QemuError::State {
            state,
            expected: "inmigrate, with no migration begun (start it with -incoming defer)",
        }
        .into());
    }
    let uuid = qemu.uuid()?;
    if uuid != request.uuid {
        return Err(PrepareError::Uuid {
            source_uuid: request.uuid.clone(),
            here: uuid,
        });
    }
    let here = qemu.ram_bytes()?;
    if here != request.ram_bytes {
        return Err(PrepareError::Ram {
            at_source: request.ram_bytes,
            here,
        });
    }
    Ok(())
}

/// Makes the QEMU listen for its relay at `incoming`, and not start by itself.
pub(super) fn set_up(qemu: &mut Qemu, channels: u8, incoming: &Path) -> Result<(), QemuError> {
    let parameters = json!({ "multifd-channels": channels, "multifd-compression": "none" });
    // late-block-activate: the disks stay the source's until the commit.
    let optional = ["late-block-activate", "events"];
    qemu.set_up(&["multifd", "return-path"], &optional, parameters)?;
    // In this state `stop` means: do not start when everything is loaded, as -S does.
    let listening = qemu.execute("stop", json!({})).and_then(|()| {
        let uri = format!("unix:{}", incoming.display());
        qemu.execute("migrate-incoming", json!({ "uri": uri }))
    });
    if listening.is_err() {
        qemu.put_back();
    }
    listening
}
