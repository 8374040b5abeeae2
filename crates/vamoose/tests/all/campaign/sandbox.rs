//! Namespaces for a campaign, so that no process, file or mount is left when it ends, however it ends.
//!
//! The campaign runs in a process of its own, the first one of a PID namespace: when it ends, the kernel kills all others. Temporary
//! files and guests' memory are in a tmpfs of the mount namespace.

use std::{
    env,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result};

/// Set in the process of the campaign: whether it has namespaces.
const INSIDE: &str = "VAMOOSE_FAULTS_INSIDE";
const WITH_NAMESPACES: &str = "namespaces";

/// The folder of temporary files, including QEMUs' memory.
const SCRATCH: &str = "/dev/shm";

/// Whether this is the process of the campaign.
pub(crate) fn is_inside() -> bool {
    env::var_os(INSIDE).is_some()
}

pub(crate) fn has_namespaces() -> bool {
    env::var_os(INSIDE).is_some_and(|inside| inside == WITH_NAMESPACES)
}

/// A test of this program in a process of its own, in namespaces if the system allows it. When the process is killed, all that it
/// has started ends.
pub(crate) fn command(test: &str) -> Result<Command> {
    let this = env::current_exe().context("where is this program?")?;
    let as_user = [false, true].into_iter().find(|as_user| works(*as_user));
    let mut command = match as_user {
        Some(as_user) => {
            let script = format!("mount -t tmpfs faults {SCRATCH} && exec \"$@\"");
            let mut command = unshare(as_user);
            command.args(["sh", "-c", &script, "sh"]).arg(this);
            command.env(INSIDE, WITH_NAMESPACES).env("TMPDIR", SCRATCH);
            command
        }
        None => {
            eprintln!("no namespaces, which the system does not allow, and no full disks");
            let mut command = Command::new(this);
            command.env(INSIDE, "nothing");
            command
        }
    };
    command.args([test, "--exact", "--ignored", "--nocapture"]);
    Ok(command)
}

fn works(as_user: bool) -> bool {
    let mut command = unshare(as_user);
    command.args(["mount", "-t", "tmpfs", "faults", SCRATCH]);
    let tried = command.stderr(Stdio::null()).status();
    tried.is_ok_and(|status| status.success())
}

/// The command, without the program to run inside.
fn unshare(as_user: bool) -> Command {
    let mut command = Command::new("unshare");
    if as_user {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command
}
