//! A host of libvirt, and the connection to it.

use std::sync::Mutex;

use anyhow::{Context as _, Result};
use vamoose_link::lock;

use super::libvirt::{self, Connection};

/// A host, as named on the command line.
#[derive(Debug)]
pub(super) struct LibvirtHost {
    /// For messages.
    pub(super) name: String,
    /// Libvirt's URI of it.
    pub(super) uri: String,
    connection: Mutex<Option<Connection>>,
}

impl LibvirtHost {
    /// A URI of libvirt, `localhost`, or a name that ssh knows.
    pub(super) fn new(text: &str) -> Self {
        let (name, uri) = match text {
            _ if text.contains("://") => (host_of(text), text.to_owned()),
            "localhost" => (text.to_owned(), "qemu:///system".to_owned()),
            _ => (text.to_owned(), format!("qemu+ssh://{text}/system")),
        };
        Self {
            name,
            uri,
            connection: Mutex::default(),
        }
    }

    /// Whether the URI means another host on each host.
    pub(super) fn is_local(&self) -> bool {
        self.uri.contains(":///")
    }

    /// Asks the host's libvirt, over one connection that all threads share: only migrations take long, and have their own.
    pub(super) fn ask<T>(
        &self,
        question: impl FnOnce(&mut Connection) -> libvirt::Result<T>,
    ) -> Result<T> {
        let mut held = lock(&self.connection);
        if !held.as_mut().is_some_and(Connection::is_alive) {
            let context = || format!("cannot reach libvirt of {} by {}", self.name, self.uri);
            *held = Some(Connection::open(&self.uri_here()).with_context(context)?);
        }
        let connection = held.as_mut().context("no connection")?;
        Ok(question(connection)?)
    }

    /// The URI for use on this host: `virsh` is in the background, where ssh cannot ask for a password.
    pub(super) fn uri_here(&self) -> String {
        let uri = &self.uri;
        let is_by_ssh = uri
            .split_once("://")
            .is_some_and(|(scheme, _)| scheme.ends_with("+ssh"));
        if !is_by_ssh || uri.contains("no_tty=") {
            return uri.clone();
        }
        let separator = if uri.contains('?') { '&' } else { '?' };
        format!("{uri}{separator}no_tty=1")
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
            let host = LibvirtHost::new(text);
            assert_eq!((&*host.name, &*host.uri), (name, uri));
        }
    }

    #[test]
    fn ssh_asks_for_no_password() {
        for (uri, expected) in [
            ("qemu+ssh://a/system", "qemu+ssh://a/system?no_tty=1"),
            (
                "qemu+ssh://a/system?keyfile=/x",
                "qemu+ssh://a/system?keyfile=/x&no_tty=1",
            ),
            (
                "qemu+ssh://a/system?no_tty=0",
                "qemu+ssh://a/system?no_tty=0",
            ),
            ("qemu+tcp://a/system", "qemu+tcp://a/system"),
        ] {
            assert_eq!(LibvirtHost::new(uri).uri_here(), expected);
        }
    }
}
