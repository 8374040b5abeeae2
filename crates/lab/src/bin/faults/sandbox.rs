//! Namespaces of this program's own: whatever becomes of it, no process, file or mount is left.
//!
//! The program starts itself once more, as the first process of a process namespace: when it ends, the kernel kills
//! all others. Temporary files and guests' memory are in a tmpfs that only the mount namespace has.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

/// Says that the program is inside.
const INSIDE: &str = "VAMOOSE_FAULTS_INSIDE";

/// Where temporary files are, which QEMUs also keep their memory in.
const SCRATCH: &str = "/dev/shm";

/// Whether there are namespaces of our own.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Goes inside, if the system lets us; returns only if not, or if we are there.
pub(crate) fn enter() -> Result<()> {
    if is_inside() {
        return Ok(());
    }
    let Some(as_user) = [false, true].into_iter().find(|as_user| works(*as_user)) else {
        eprintln!("faults: no namespaces here: runs without, and without full disks");
        return Ok(());
    };
    let script = format!("mount -t tmpfs faults {SCRATCH} && exec \"$@\"");
    let this = std::env::current_exe().context("where is this program?")?;
    let error = unshare(as_user)
        .args(["sh", "-c", &script, "sh"])
        .arg(this)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .env("TMPDIR", SCRATCH)
        .exec();
    Err(error).context("starting inside namespaces")
}

fn works(as_user: bool) -> bool {
    let mut command = unshare(as_user);
    command.args(["mount", "-t", "tmpfs", "faults", SCRATCH]);
    let tried = command.stderr(Stdio::null()).status();
    tried.is_ok_and(|status| status.success())
}

/// The command, without what is to run inside.
fn unshare(as_user: bool) -> Command {
    let mut command = Command::new("unshare");
    if as_user {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command
}
