//! Finds the name of the guest whose QEMU has opened a connection, for the log.
//!
//! A Unix socket identifies the connecting process. For TCP, the kernel reports the socket's inode, and /proc/PID/fd shows which
//! process has it open. /proc/PID/cmdline has the guest's name (`-name guest=NAME`, or `-name NAME`). Reading the files of
//! other users' processes needs CAP_SYS_PTRACE: without it, the name is unknown.

use std::fs;

use vamoose_link::{Stream, peer_inode};

use super::announce::printable;
use crate::process::{pids, sockets};

/// The name of the guest at the other end.
pub(super) fn name_of(stream: &Stream) -> Option<String> {
    let socket = stream.socket()?;
    let name = |pid| name_in(&fs::read(format!("/proc/{pid}/cmdline")).ok()?);
    if let Some(pid) = socket.peer_pid() {
        return name(pid);
    }
    let inode = peer_inode(socket).ok()??.into();
    let mut names = pids().ok()?.into_iter().filter_map(|pid| {
        let name = name(pid)?;
        sockets(pid).contains(&inode).then_some(name)
    });
    names.next()
}

/// The guest's name on a command line, whose arguments end with zeros.
fn name_in(command_line: &[u8]) -> Option<String> {
    let mut arguments = command_line.split(|byte| *byte == 0);
    arguments.find(|argument| *argument == b"-name" || *argument == b"--name")?;
    let value = String::from_utf8_lossy(arguments.next()?).into_owned();
    let mut parts = value.split(',');
    let name = parts.find_map(|part| match part.split_once('=') {
        None => Some(part),
        Some(("guest", name)) => Some(name),
        Some(_) => None,
    })?;
    (!name.is_empty()).then(|| printable(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_on_command_lines() {
        for (line, name) in [
            (
                &b"qemu\0-name\0guest=web1,debug-threads=on\0-S\0"[..],
                Some("web1"),
            ),
            (b"qemu\0-name\0web1,process=x\0", Some("web1")),
            (b"qemu\0-name\0debug-threads=on,guest=a b\0", Some("a b")),
            (b"qemu\0-S\0", None),
            (b"qemu\0-name", None),
            (b"qemu\0-name\0guest=\0", None),
            (b"", None),
        ] {
            assert_eq!(name_in(line).as_deref(), name);
        }
    }
}
