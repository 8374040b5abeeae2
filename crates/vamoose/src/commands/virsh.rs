//! Calls of `virsh` on this host.

use std::{
    io,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Error, Result, ensure};

/// A `virsh` whose output does not depend on the locale.
pub(crate) fn command() -> Command {
    let mut command = Command::new("virsh");
    command.env("LC_ALL", "C").stdin(Stdio::null());
    command
}

/// The output of a `virsh` command, or its error.
pub(crate) fn output<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Result<String> {
    let output = command().args(arguments).output().map_err(cannot_run)?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    let complaint = complaint.trim().replace('\n', "; ");
    ensure!(output.status.success(), "virsh: {complaint}");
    String::from_utf8(output.stdout).context("virsh prints no text")
}

/// `running`, `paused`, ...
pub(crate) fn state(domain: &str) -> Result<String> {
    Ok(output(["domstate", "--domain", domain])?.trim().to_owned())
}

pub(crate) fn cannot_run(error: io::Error) -> Error {
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    Error::new(error).context(match is_missing {
        true => "virsh is missing on this host: install libvirt-clients",
        false => "cannot run virsh",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_virsh_names_its_package() {
        let missing = Command::new("/no/virsh").output().unwrap_err();
        let said = cannot_run(missing).to_string();
        assert_eq!(
            said,
            "virsh is missing on this host: install libvirt-clients"
        );
        let not_executable = Command::new("/etc/passwd").output().unwrap_err();
        assert_eq!(cannot_run(not_executable).to_string(), "cannot run virsh");
    }
}
