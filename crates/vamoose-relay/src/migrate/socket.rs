//! The Unix sockets between the source QEMU and its relays, and the ways from there to the server.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use vamoose_link::{Address, Hangup, Listener, Peers, Session, Stats};

use super::Cause;
use crate::{Config, Dialer, Relay};

/// The way of connections that are forwarded as bytes, each over a stream of its own.
pub(super) struct Route {
    listener: Listener,
    dialer: Dialer,
}

impl Route {
    pub(super) fn new(listener: Listener, session: &Session, preamble: &[u8]) -> Self {
        let session = session.clone();
        let begin = move |_| Ok((session.clone(), Vec::new()));
        Self {
            listener,
            dialer: Dialer::session(begin, preamble),
        }
    }

    pub(super) fn address(&self) -> &Address {
        self.listener.address()
    }

    pub(super) fn relay<'a>(
        &'a self,
        config: &'a Config,
        hangup: &'a Hangup,
        stats: &'a Arc<Stats>,
    ) -> Relay<'a> {
        Relay {
            accept: &self.listener,
            dialer: &self.dialer,
            config,
            hangup,
            stats,
            reached: &|_| (),
        }
    }
}

/// Listens where the source QEMU can reach it: beside its monitor, at `NAME.WHAT`.
pub(super) fn listen_beside(
    monitor: &Path,
    what: &str,
    stall_timeout: Duration,
) -> Result<Listener, Cause> {
    let address = Address::Unix(path_beside(monitor, what));
    // QEMU often runs as another user than this process: the owner of the monitor.
    let peers = Peers::own_and([fs::metadata(monitor)?.uid()]);
    Ok(Listener::bind_for(&address, stall_timeout, peers)?)
}

/// `NAME.WHAT` beside `NAME.qmp`.
fn path_beside(monitor: &Path, what: &str) -> PathBuf {
    let name = monitor.file_name().unwrap_or_default();
    let name = name
        .as_bytes()
        .strip_suffix(b".qmp")
        .unwrap_or(name.as_bytes());
    let mut socket = OsString::from(OsStr::from_bytes(name));
    socket.push(".");
    socket.push(what);
    monitor.with_file_name(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monitors_with_dots_in_their_names_have_distinct_sockets() {
        for (monitor, socket) in [
            ("/run/vms/web1.qmp", "/run/vms/web1.outgoing"),
            ("/run/vms/web.1.qmp", "/run/vms/web.1.outgoing"),
            ("/run/vms/web.2", "/run/vms/web.2.outgoing"),
        ] {
            assert_eq!(
                path_beside(Path::new(monitor), "outgoing"),
                Path::new(socket)
            );
        }
    }
}
