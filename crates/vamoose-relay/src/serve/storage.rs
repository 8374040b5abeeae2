//! The disks of a waiting QEMU while a source copies to them.
//!
//! QEMU's NBD server exports the images, writable, at a socket that only this server can reach. Each disk has one stream of the
//! session, which is forwarded to that socket as bytes. The exports end before the guest is given its disks
//! ([`Qemu::end_copies`]): until then only the source writes to the images. If the migration fails, they are worthless.

use std::sync::Arc;

use serde_json::json;
use tracing::{debug, info};
use vamoose_link::{Address, PollQueue, Stream};

use super::setup::PrepareError;
use crate::{
    Dialer, Relay, chain,
    qemu::{PrivateFolder, Qemu, QemuError, copy_id},
};

pub(super) struct Exports {
    /// The streams of the source's disks.
    pub(super) streams: PollQueue<Arc<Stream>>,
    /// To QEMU's NBD server.
    dialer: Dialer,
    /// Has the socket.
    _folder: PrivateFolder,
}

impl Exports {
    /// Exports these disks, in this order. `None` if there are none.
    pub(super) fn open(qemu: &mut Qemu, names: &[String]) -> Result<Option<Self>, PrepareError> {
        if names.is_empty() {
            return Ok(None);
        }
        let images = qemu.images()?;
        let folder = PrivateFolder::new()?;
        let listener = folder.listen().map_err(QemuError::Listener)?;
        qemu.start_nbd_server(&listener, names.len())?;
        let mut exports = names.iter().enumerate();
        let exported = exports.try_for_each(|(number, name)| {
            let image = images.iter().find(|image| image.disk.name == *name);
            let image = image.ok_or_else(|| PrepareError::NoDisk(name.clone()))?;
            let exported = qemu.export(&copy_id(number), &image.node, true);
            exported.map_err(|error| PrepareError::NotExported(name.clone(), error))
        });
        exported.inspect_err(|_| Self::close(qemu))?;
        info!("ready for copies of {} disks", names.len());
        Ok(Some(Self {
            streams: PollQueue::new()?,
            dialer: Dialer::new(Address::Unix(folder.socket())),
            _folder: folder,
        }))
    }

    /// Ends the exports of a QEMU that goes on waiting.
    pub(super) fn close(qemu: &mut Qemu) {
        if let Err(error) = qemu.execute("nbd-server-stop", json!({})) {
            debug!("{}", chain(&error));
        }
    }

    /// What forwards the source's writes, beside the relay of the memory.
    pub(super) fn relay<'a>(&'a self, memory: &Relay<'a>) -> Relay<'a> {
        Relay {
            accept: &self.streams,
            dialer: &self.dialer,
            reached: &|_| (),
            ..*memory
        }
    }
}
