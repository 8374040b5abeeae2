//! The laboratory: QEMUs, guests and networks for the tests and the benchmarks. Internal only.
//!
//! - [`qemu`] finds and runs QEMUs: bare ones whose RAM is a file, and ones with a Linux guest;
//! - [`qmp`] controls them, [`guest`] watches a running guest, [`program`] runs a real program in one, [`counter`] is the smallest
//!   guest, [`writer`] the smallest one with a disk, [`ram`] makes and compares memory images, [`real`] makes those of real guests;
//! - [`vamoose`] runs the program under test, [`stand_in`] compiles substitutes for hardware libraries, [`qatzip`] finds the real
//!   one;
//! - [`net`] makes links of given rates that can be pulled, [`middlebox`] is a proxy that breaks connections, [`sockets`] has ports
//!   that refuse them;
//! - [`process`] runs and ends processes, [`proc`] and [`cpu`] measure them;
//! - [`watched`] lets threads wait for each other.
//!
//! Everything cleans up after itself on drop: processes are killed and reaped, files and namespaces removed.
//! `scripts/setup` fetches what this needs; tests that lack something are reported as skipped (see [`skipped`]).

pub mod counter;
pub mod cpu;
pub mod guest;
pub mod middlebox;
pub mod net;
pub mod proc;
pub mod process;
pub mod program;
pub mod qatzip;
pub mod qemu;
pub mod qmp;
pub mod ram;
pub mod real;
pub mod serial;
pub mod sockets;
pub mod stand_in;
pub mod vamoose;
pub mod watched;
pub mod writer;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};

/// Reports on the terminal that a test was skipped, and why, even if the test harness captures output.
pub fn skipped(reason: &str) -> Result<()> {
    if std::env::var_os("VAMOOSE_NO_SKIP").is_some() {
        bail!("{reason}, and VAMOOSE_NO_SKIP forbids to skip");
    }
    // The print macros are captured in tests that pass.
    let _ = std::io::stderr().write_all(format!("\nSKIPPED: {reason}\n").as_bytes());
    Ok(())
}

/// The folder of what `scripts/setup` has fetched: the workspace's `target`, whatever CARGO_TARGET_DIR is. `scripts/package` sets
/// `VAMOOSE_TARGET` at build time to the folder of an installed package; at run time it overrides the folder.
pub fn target_dir() -> PathBuf {
    const BUILT_FOR: &str = match option_env!("VAMOOSE_TARGET") {
        Some(folder) => folder,
        None => concat!(env!("CARGO_MANIFEST_DIR"), "/../../target"),
    };
    std::env::var_os("VAMOOSE_TARGET").map_or_else(|| BUILT_FOR.into(), PathBuf::from)
}

/// The exit code of an internal program. Prints an error on one line with all causes.
pub fn exit_code(program: &str, result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command to its end and returns its output. Its failure is an error with its stderr.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("running {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The median of some values; `None` if there are none.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some((values[low] + values[high]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0]), Some(3.0));
        assert_eq!(median([3.0, 1.0, 9.0]), Some(3.0));
        assert_eq!(median([4.0, 1.0, 9.0, 2.0]), Some(3.0));
    }
}
