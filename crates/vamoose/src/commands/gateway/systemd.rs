//! Socket activation and notifications: sd_listen_fds(3), sd_notify(3).
//!
//! The crate `sd-notify` does not support a NOTIFY_SOCKET in the abstract namespace, as in containers.

use std::{
    env,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
    process,
    time::Duration,
};

use anyhow::{Context as _, Result};
use tracing::debug;
use vamoose_link::{Listener, Peers};

/// The first passed descriptor.
const FIRST: i32 = 3;

/// The sockets that systemd listens on for this process. Connections are checked after they have been accepted.
pub(super) fn passed_listeners(stall_timeout: Duration) -> Result<Vec<Listener>> {
    let number = |name| env::var(name).ok()?.parse::<i32>().ok();
    let is_for_us =
        number("LISTEN_PID").and_then(|pid| u32::try_from(pid).ok()) == Some(process::id());
    let count = number("LISTEN_FDS").filter(|_| is_for_us).unwrap_or(0);
    let passed = (0..count).map(|at| {
        let listener = Listener::passed(FIRST + at, stall_timeout, Peers::anyone());
        listener.with_context(|| {
            format!(
                "descriptor {} of LISTEN_FDS is no listening TCP socket",
                FIRST + at
            )
        })
    });
    passed.collect()
}

/// Notifies systemd, if it has requested notifications.
pub(super) fn notify(state: &str) {
    let Ok(path) = env::var("NOTIFY_SOCKET") else {
        return;
    };
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let sent = address
        .and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        debug!("cannot notify systemd: {error}");
    }
}
