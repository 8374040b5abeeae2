//! Streams: unix sockets at both ends, for a VMM that makes its own connections for migrations.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::{UnixListener, UnixStream},
};

use anyhow::{Result, ensure};
use lab::{qemu, ram::Fill};
use rustix::process::Signal;
use tempfile::TempDir;

use super::{Host, Hosts};
use crate::common::{LIMIT, MIB, set_up};

/// Adds lines to a host's configuration while its gateway runs.
pub(super) fn add(host: &Host, lines: &str) -> Result<()> {
    host.setting
        .write(&format!("{}{lines}", host.setting.text))?;
    host.gateway.signal(Signal::HUP)?;
    host.says("the configuration has been read again")?;
    Ok(())
}

/// A stream in a configuration, with its `listen` and `to`.
pub(super) fn stream(
    folder: &TempDir,
    stream: &str,
    listen: Option<&str>,
    to: Option<&str>,
) -> String {
    let unix = |key: &str, name: Option<&str>| {
        let path = name.map(|name| folder.path().join(name));
        path.map_or_else(String::new, |path| {
            format!(", {key} = \"unix:{}\"", path.display())
        })
    };
    let (listen, to) = (unix("listen", listen), unix("to", to));
    format!("streams.{stream} = {{ peer = \"other\"{listen}{to} }}\n")
}

#[test]
fn a_qemu_that_connects_to_a_stream_migrates_as_over_a_port() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::start()?;
    let folder = TempDir::new()?;
    add(&hosts.near, &stream(&folder, "vm1", Some("near"), None))?;
    add(&hosts.far, &stream(&folder, "vm1", None, Some("far")))?;
    let mut source = qemu::Builder::bare(&binary, 16 * MIB)
        .content(Fill::Mixed, 1)
        .argument("-name")
        .argument("guest=web1")
        .start()?;
    let mut destination = qemu::Builder::bare(&binary, 16 * MIB).incoming().start()?;
    for qemu in [&mut source, &mut destination] {
        set_up(qemu, 3, "none")?;
    }
    let unix = |name: &str| format!("unix:{}", folder.path().join(name).display());
    destination.qmp.migrate_incoming(&unix("far"))?;
    source.qmp.migrate(&unix("near"))?;
    hosts.expect_moved(&mut source, &mut destination)?;
    let line = hosts
        .near
        .says("guest web1 to other, stream vm1: loaded; ")?;
    let sizes: Vec<f64> = line
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    ensure!(sizes[0] > sizes[1] && sizes[1] > 0.0, "{line}");
    Ok(())
}

/// User `nobody`.
const KEY: &str = "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=";

#[test]
fn a_stream_leads_only_where_the_other_host_lets_it() -> Result<()> {
    let hosts = Hosts::start()?;
    let folder = TempDir::new()?;
    let first = stream(&folder, "vm1", Some("first"), None);
    let second = stream(&folder, "vm2", Some("second"), None);
    add(&hosts.near, &(first + &second))?;
    let is_closed = |name: &str| -> Result<()> {
        let mut client = UnixStream::connect(folder.path().join(name))?;
        client.set_read_timeout(Some(LIMIT))?;
        client.write_all(b"QEMU is not here")?;
        // Closed, or reset because its data was not read.
        ensure!(!matches!(client.read(&mut [0]), Ok(1..)));
        Ok(())
    };
    is_closed("first")?;
    hosts
        .near
        .says("stream vm1: refused: other refuses: there is no stream vm1 from other to here")?;

    // A stream of a third host leads nowhere, and the second one has no server.
    let anothers = UnixListener::bind(folder.path().join("another"))?;
    anothers.set_nonblocking(true)?;
    let third = format!("peers.third = {{ to = [\"127.0.0.1:1\"], key = \"{KEY}\" }}\n");
    let from_third =
        stream(&folder, "vm1", None, Some("another")).replace("\"other\"", "\"third\"");
    let far = third + &from_third + &stream(&folder, "vm2", None, Some("nobody"));
    add(&hosts.far, &far)?;
    is_closed("first")?;
    ensure!(anothers.accept().is_err());
    is_closed("second")?;
    hosts
        .far
        .says("stream vm2: refused: cannot connect to unix:")?;
    Ok(())
}
