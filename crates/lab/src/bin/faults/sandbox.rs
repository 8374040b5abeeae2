//! Namespaces for this program, so that no process, file or mount is left when it ends, however it ends.
//!
//! The program starts itself again as the first process of a PID namespace: when it ends, the kernel kills all others. Temporary
//! files and guests' memory are in a tmpfs of the mount namespace.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

/// Set inside the namespaces.
const INSIDE: &str = "VAMOOSE_FAULTS_INSIDE";

/// The folder of temporary files, including QEMUs' memory.
const SCRATCH: &str = "/dev/shm";

/// Whether this process is inside the namespaces.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Enters the namespaces if the system allows it. Returns only if it does not, or inside.
pub(crate) fn enter() -> Result<()> {
    if is_inside() {
        return Ok(());
    }
    let Some(as_user) = [false, true].into_iter().find(|as_user| works(*as_user)) else {
        eprintln!(
            "faults: running without namespaces, which the system does not allow, and without full disks"
        );
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

/// The command, without the program to run inside.
fn unshare(as_user: bool) -> Command {
    let mut command = Command::new("unshare");
    if as_user {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command
}
