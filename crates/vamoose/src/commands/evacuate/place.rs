//! A host of libvirt, and connections to it.

use std::{
    ffi::OsString,
    io, mem,
    ops::Deref,
    os::unix::process::CommandExt as _,
    process::Command,
    sync::{Arc, Mutex},
};

use anyhow::{Context as _, Result};
use vamoose_link::lock;

use super::libvirt::Connection;

/// A host, as it was named on the command line.
#[derive(Debug)]
pub(super) struct Place {
    /// For messages.
    pub(super) name: String,
    /// Where libvirt finds it.
    pub(super) uri: String,
    /// Connections that nobody uses.
    idle: Mutex<Vec<Arc<Connection>>>,
}

impl Place {
    /// A URI of libvirt, `localhost`, or what ssh knows.
    pub(super) fn new(text: &str) -> Self {
        let (name, uri) = match text {
            _ if text.contains("://") => (host_of(text), text.to_owned()),
            "localhost" => (text.to_owned(), "qemu:///system".to_owned()),
            _ => (text.to_owned(), format!("qemu+ssh://{text}/system")),
        };
        Self {
            name,
            uri,
            idle: Mutex::default(),
        }
    }

    /// Whether each host finds itself by its URI.
    pub(super) fn is_local(&self) -> bool {
        self.uri.contains(":///")
    }

    /// A connection that nobody else uses: libvirt serves only a few calls of one at once, and migrations are long ones.
    pub(super) fn connect(&self) -> Result<Lease<'_>> {
        let idle = mem::take(&mut *lock(&self.idle));
        let mut alive = idle.into_iter().filter(|connection| connection.is_alive());
        let first = alive.next();
        lock(&self.idle).extend(alive);
        let connection = match first {
            Some(connection) => connection,
            None => {
                let context = || format!("cannot reach libvirt of {} by {}", self.name, self.uri);
                Arc::new(Connection::open(&shielded(&self.uri)).with_context(context)?)
            }
        };
        Ok(Lease {
            place: self,
            connection,
        })
    }
}

/// The host in a URI.
fn host_of(uri: &str) -> String {
    let authority = uri.split_once("://").map_or(uri, |(_, rest)| rest);
    let authority = authority.split(['/', '?']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let host = match host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        Some((address, _)) => address,
        None => host.split(':').next().unwrap_or_default(),
    };
    match host {
        "" => "localhost".to_owned(),
        host => host.to_owned(),
    }
}

/// This program, as libvirt finds it.
const SHIELD: &str = "/proc/self/exe";

/// libvirt starts ssh in this process's group, where Ctrl-C would end it and with it all migrations. So libvirt is told to start
/// this program in the place of ssh, which [`shield`] is for.
fn shielded(uri: &str) -> String {
    let is_by_ssh = uri
        .split_once("://")
        .is_some_and(|(scheme, _)| scheme.ends_with("+ssh"));
    if !is_by_ssh || uri.contains("command=") {
        return uri.to_owned();
    }
    let separator = if uri.contains('?') { '&' } else { '?' };
    format!("{uri}{separator}command={SHIELD}")
}

/// If this process was started by libvirt in the place of ssh, becomes ssh, which Ctrl-C does not end.
pub(crate) fn shield() -> Option<io::Error> {
    let mut arguments = std::env::args_os();
    if arguments.next() != Some(OsString::from(SHIELD)) {
        return None;
    }
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' INT; exec ssh \"$@\"", "ssh"]);
    Some(command.args(arguments).exec())
}

/// A connection, for a while.
pub(super) struct Lease<'a> {
    place: &'a Place,
    connection: Arc<Connection>,
}

impl Deref for Lease<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        lock(&self.place.idle).push(Arc::clone(&self.connection));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_uris_are_told_apart() {
        for (text, name, uri) in [
            ("kvm1", "kvm1", "qemu+ssh://kvm1/system"),
            ("root@kvm1", "root@kvm1", "qemu+ssh://root@kvm1/system"),
            ("localhost", "localhost", "qemu:///system"),
            ("qemu:///system", "localhost", "qemu:///system"),
            (
                "qemu+tcp://a@kvm2:1/system",
                "kvm2",
                "qemu+tcp://a@kvm2:1/system",
            ),
            (
                "qemu+tls://[fd00::2]:1/system?x=y",
                "fd00::2",
                "qemu+tls://[fd00::2]:1/system?x=y",
            ),
        ] {
            let place = Place::new(text);
            assert_eq!((&*place.name, &*place.uri), (name, uri));
        }
    }

    #[test]
    fn only_ssh_is_shielded() {
        for (uri, shielded_uri) in [
            (
                "qemu+ssh://a/system",
                "qemu+ssh://a/system?command=/proc/self/exe",
            ),
            (
                "qemu+ssh://a/system?no_tty=1",
                "qemu+ssh://a/system?no_tty=1&command=/proc/self/exe",
            ),
            (
                "qemu+ssh://a/system?command=/x",
                "qemu+ssh://a/system?command=/x",
            ),
            ("qemu+tcp://a/system", "qemu+tcp://a/system"),
        ] {
            assert_eq!(shielded(uri), shielded_uri);
        }
    }
}
