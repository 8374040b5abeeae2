//! The Unix sockets between the source QEMU and its relays.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use vamoose_link::{Address, Listener, Peers};

use super::Cause;

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
