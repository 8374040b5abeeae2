//! A relay that ends while the source's QEMU does not notice.

use std::{
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::Result;
use lab::{
    qemu::{self, Builder},
    ram::Fill,
};
use tempfile::TempDir;

use crate::common::{Host, LIMIT, MIB, gate::Gate, migrate, monitor::pass_lines};

/// Stands before a QEMU's monitor: its migration seems to be active until it is cancelled, whatever becomes of it.
struct ActiveMonitor {
    folder: TempDir,
}

impl ActiveMonitor {
    fn before(qmp: &Path) -> Result<Self> {
        let folder = TempDir::new()?;
        let listener = UnixListener::bind(folder.path().join("qmp"))?;
        let qmp = qmp.to_owned();
        // Ends with the test's process. One client at a time, as QEMU has it.
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if let Ok(far) = UnixStream::connect(&qmp) {
                    serve(&near, &far);
                }
            }
        });
        Ok(Self { folder })
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }
}

fn serve(near: &UnixStream, far: &UnixStream) {
    let cancelled = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            pass_lines(near, far, |line| {
                let cancels = String::from_utf8_lossy(line).contains("migrate_cancel");
                cancelled.fetch_or(cancels, Ordering::AcqRel);
            });
        });
        pass_lines(far, near, |line| {
            let text = String::from_utf8_lossy(line).into_owned();
            if !cancelled.load(Ordering::Acquire) {
                let lie = text.replace("\"status\": \"failed\"", "\"status\": \"active\"");
                *line = lie.into_bytes();
            }
        });
    });
}

#[test]
fn a_source_that_does_not_notice_the_end_of_its_relay_is_cancelled() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let gate = Gate::start(&host.address)?;
    let mut source = Builder::bare(&binary, 4 * MIB)
        .content(Fill::Mixed, 1)
        .start()?;
    source.qmp.cont()?;
    let destination = Builder::bare(&binary, 4 * MIB).incoming().start()?;
    host.knows("vm", &destination)?;
    let monitor = ActiveMonitor::before(&source.qmp_socket())?;
    let slow = ["--max-bandwidth", "16k"];
    let migration = migrate(&monitor.path(), &gate.address, "vm", &slow)?;
    migration.wait_for("active", LIMIT)?;
    gate.close();
    migration.wait_for("the source QEMU has not noticed", LIMIT)?;
    let ended = migration.finish(LIMIT)?;
    // All else follows from that.
    ended.failure("to the server ")?;
    source.qmp.wait_status("running", LIMIT)
}
