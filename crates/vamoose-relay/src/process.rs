//! Finds the process that serves a monitor by the socket that the process holds, never by its name.
//!
//! The process that listens on the monitor's socket is QEMU. A process name proves nothing: QEMU changes its name on request
//! (`-name process=`), and may run under the name of a loader or wrapper. The credentials of the socket prove nothing either:
//! they belong to the process that called `listen`, which may be a libvirt daemon that passed the socket on. So the
//! process is identified by the listening socket among its descriptors:
//!
//! ```text
//!  monitor's path ── O_PATH ─> file ══ is the same file as ══ path of a socket
//!                                                                   │ /proc/PID/net/unix: listens
//!  pidfd ── of the same process as ── /proc/PID/fd/N ─> socket:[inode]
//! ```
//!
//! Data read about a process counts only if its pidfd shows that the process has not ended meanwhile: then no other process
//! can have reused its number.
//!
//! A program that forwards a monitor (`socat`) would be taken for QEMU. Vamoose needs the monitor
//! that QEMU itself opened or received.
//!
//! Where several users may create files in the monitors' folder, no user may redirect a guest to another user's QEMU. So the
//! monitor's file, and a link that leads to it, has to belong to root, to this process's user, or to QEMU's user.

mod lookup;
mod monitor;

use std::{
    fs, io,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    fd::OwnedFd,
    io::Errno,
    process::{
        Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open, pidfd_send_signal,
    },
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vamoose_link::wait_for;

pub(crate) use monitor::Monitor;
use monitor::listening;
pub(crate) use monitor::sockets;

/// A process, as identified in a journal. Its number alone may be reused by another process.
///
/// Valid until the host reboots, as both numbers start over then, and within one pid namespace. A
/// journal that survives a reboot would need `/proc/sys/kernel/random/boot_id` as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// The process's number.
    pub pid: u32,
    /// When it started, in clock ticks since the host's boot.
    pub start_time: u64,
}

impl ProcessId {
    /// A duplicate of the socket with this inode, if the process has it open.
    pub(crate) fn socket(self, inode: u64) -> Result<Option<OwnedFd>, ProcessError> {
        let process = QemuProcess::open(self.pid)?;
        let Some(process) = process.filter(|process| process.id == self) else {
            return Ok(None);
        };
        let failed = |error| unreadable(self.pid, "fd", error);
        let wanted = format!("socket:[{inode}]");
        for file in fs::read_dir(format!("/proc/{}/fd", self.pid)).map_err(failed)? {
            let file = file.map_err(failed)?;
            let is_wanted = fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == &*wanted);
            let number = file.file_name().to_str().and_then(|name| name.parse().ok());
            if let (true, Some(number)) = (is_wanted, number) {
                let socket = pidfd_getfd(&process.pidfd, number, PidfdGetfdFlags::empty());
                return socket.map(Some).map_err(|error| failed(error.into()));
            }
        }
        Ok(None)
    }

    /// Whether this very process is alive. False proves that it has ended, with all its threads. A
    /// zombie has ended. An error proves nothing.
    pub(crate) fn is_alive(self) -> Result<bool, ProcessError> {
        match QemuProcess::open(self.pid)? {
            Some(process) if process.id == self => Ok(!process.has_ended()?),
            _ => Ok(false),
        }
    }

    /// Kills this very process if it is alive, and waits for its end.
    pub(crate) fn end(self, within: Duration) -> Result<(), ProcessError> {
        match QemuProcess::open(self.pid)? {
            Some(process) if process.id == self => process.end(within),
            _ => Ok(()),
        }
    }
}

#[derive(Debug, Error)]
pub(crate) enum ProcessError {
    /// No visible process serves the monitor.
    #[error(
        "cannot tell which process serves the monitor {}: no process visible to this user listens there; run as root, in QEMU's pid namespace, and name QEMU's own monitor socket",
        .0.display()
    )]
    NotFound(PathBuf),
    #[error("cannot tell which process serves the monitor {}: {pids:?} all listen there", monitor.display())]
    Several { monitor: PathBuf, pids: Vec<u32> },
    /// An untrusted user created the monitor.
    #[error(
        "the monitor {} was put there by user {owner}, while process {pid}, which serves it, belongs to user {user}: only \
         root, this program's user or the QEMU's user may create it",
        monitor.display()
    )]
    Foreign {
        monitor: PathBuf,
        owner: u32,
        pid: u32,
        user: u32,
    },
    #[error("cannot read what the system knows of process {pid} ({what})")]
    Unreadable {
        pid: u32,
        what: &'static str,
        source: io::Error,
    },
    #[error("cannot list processes, is /proc mounted?")]
    NoProc(#[source] io::Error),
    #[error("cannot end process {0}, end it by hand")]
    Kill(u32, #[source] io::Error),
    #[error(
        "process {pid} was killed and has not ended in {} s: it waits in the kernel, for storage perhaps",
        within.as_secs()
    )]
    Stuck { pid: u32, within: Duration },
}

fn unreadable(pid: u32, what: &'static str, source: io::Error) -> ProcessError {
    ProcessError::Unreadable { pid, what, source }
}

/// The process that serves a monitor.
#[derive(Debug)]
pub(crate) struct QemuProcess {
    pub(crate) id: ProcessId,
    /// The effective user of the process.
    user: u32,
    pidfd: OwnedFd,
}

/// How long to search while several processes hold the monitor. A child of QEMU holds all of QEMU's descriptors between its
/// fork and its exec.
const LOOKING: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl QemuProcess {
    /// The process that listens on `monitor`.
    pub(crate) fn serving(monitor: &Monitor) -> Result<Self, ProcessError> {
        let deadline = Instant::now() + LOOKING;
        loop {
            let mut found = Self::all_serving(monitor)?;
            match found.pop() {
                None => {
                    return Err(ProcessError::NotFound(monitor.path.clone()));
                }
                Some(process) if found.is_empty() => return Ok(process),
                Some(process) if Instant::now() >= deadline => {
                    found.push(process);
                    return Err(ProcessError::Several {
                        monitor: monitor.path.clone(),
                        pids: found.iter().map(|process| process.id.pid).collect(),
                    });
                }
                Some(_) => thread::sleep(LOOK_AGAIN),
            }
        }
    }

    fn all_serving(monitor: &Monitor) -> Result<Vec<Self>, ProcessError> {
        let pids = pids()?;
        let listening = listening(&pids, monitor.name());
        let mut found = Vec::new();
        for pid in pids {
            if !monitor.is_served_by(pid, &listening) {
                continue;
            }
            // Checked again with the pidfd open, so it is the same process.
            if let Some(process) = Self::open(pid)?
                && monitor.is_served_by(pid, &listening)
                && !process.has_ended()?
            {
                found.push(process);
            }
        }
        Ok(found)
    }

    /// The process with this number, if there is one.
    fn open(pid: u32) -> Result<Option<Self>, ProcessError> {
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(number, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            // INVAL and NOENT: the number now belongs to a thread.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Ok(None),
            Err(error) => return Err(unreadable(pid, "pidfd_open", error.into())),
        };
        let stat = fs::read(format!("/proc/{pid}/stat"));
        let status = fs::read(format!("/proc/{pid}/status"));
        let mut process = Self {
            id: ProcessId { pid, start_time: 0 },
            user: 0,
            pidfd,
        };
        // The files were read before this check, so they belong to the pidfd's process.
        if process.has_ended()? {
            return Ok(None);
        }
        let stat = stat.map_err(|error| unreadable(pid, "stat", error))?;
        process.id.start_time = start_time(&stat)
            .ok_or_else(|| unreadable(pid, "stat", io::ErrorKind::InvalidData.into()))?;
        let status = status.map_err(|error| unreadable(pid, "status", error))?;
        process.user = effective_user(&status)
            .ok_or_else(|| unreadable(pid, "status", io::ErrorKind::InvalidData.into()))?;
        Ok(Some(process))
    }

    /// Refuses a monitor created by an untrusted user.
    pub(crate) fn check_owner(&self, monitor: &Monitor) -> Result<(), ProcessError> {
        match monitor.foreign_owner(self.user) {
            None => Ok(()),
            Some(owner) => Err(ProcessError::Foreign {
                monitor: monitor.path.clone(),
                owner,
                pid: self.id.pid,
                user: self.user,
            }),
        }
    }

    /// Whether the process has ended, with all its threads.
    pub(crate) fn has_ended(&self) -> Result<bool, ProcessError> {
        self.wait_for_end(Duration::ZERO)
    }

    /// Waits for the end of the process. False if it has not ended within `timeout`.
    pub(crate) fn wait_for_end(&self, timeout: Duration) -> Result<bool, ProcessError> {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        wait_for(&mut fds, timeout).map_err(|error| unreadable(self.id.pid, "poll", error))
    }

    /// Kills the process and waits for its end.
    pub(crate) fn end(&self, within: Duration) -> Result<(), ProcessError> {
        let pid = self.id.pid;
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(ProcessError::Kill(pid, error.into())),
        }
        if self.wait_for_end(within)? {
            Ok(())
        } else {
            Err(ProcessError::Stuck { pid, within })
        }
    }
}

/// All processes. One that starts later cannot be the one that serves the monitor now.
pub(crate) fn pids() -> Result<Vec<u32>, ProcessError> {
    let entries = fs::read_dir("/proc").map_err(ProcessError::NoProc)?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter_map(|name| name.parse().ok()).collect())
}

/// Field 22 of /proc/PID/stat. The name, field 2, may hold spaces and parentheses.
fn start_time(stat: &[u8]) -> Option<u64> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = str::from_utf8(stat.get(end + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The second number of /proc/PID/status's line `Uid:`. The owner of /proc/PID itself is root where a process has changed its user.
fn effective_user(status: &[u8]) -> Option<u32> {
    let mut lines = status.split(|byte| *byte == b'\n');
    let users = lines.find_map(|line| line.strip_prefix(b"Uid:"))?;
    let mut users = str::from_utf8(users).ok()?.split_ascii_whitespace();
    users.nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        ffi::OsStr,
        os::unix::{
            fs::{chown, lchown, symlink},
            net::UnixListener,
            process::CommandExt as _,
        },
        path::Path,
        process::{Child, Command},
    };

    use lab::qemu::newest_or_skip;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn sleeper() -> (Child, QemuProcess) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = QemuProcess::open(child.id()).unwrap().unwrap();
        (child, process)
    }

    #[test]
    fn a_process_is_alive_until_it_has_ended() {
        let (mut child, process) = sleeper();
        let id = process.id;
        assert!(id.is_alive().unwrap() && !process.has_ended().unwrap());
        process.end(LIMIT).unwrap();
        // A zombie first, then gone.
        for _ in 0..2 {
            assert!(!id.is_alive().unwrap() && process.has_ended().unwrap());
            process.end(LIMIT).unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn another_process_with_the_same_number_is_not_it() {
        let (mut child, process) = sleeper();
        let mut id = process.id;
        id.start_time -= 1;
        assert!(!id.is_alive().unwrap());
        process.end(LIMIT).unwrap();
        child.wait().unwrap();
    }

    /// The number of a thread is no process.
    #[test]
    fn a_thread_is_not_a_process() {
        let (stop, wait) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        thread::spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            wait.recv().unwrap_err();
        });
        let thread = told.recv().unwrap().as_raw_nonzero().get();
        for pid in [thread.try_into().unwrap(), 0, u32::MAX] {
            let id = ProcessId { pid, start_time: 1 };
            assert!(!id.is_alive().unwrap(), "{pid}");
        }
        drop(stop);
    }

    #[test]
    fn an_identity_is_kept_in_json() {
        let id = ProcessId {
            pid: 7,
            start_time: u64::MAX,
        };
        let text = serde_json::to_string(&id).unwrap();
        assert_eq!(text, r#"{"pid":7,"start_time":18446744073709551615}"#);
        assert_eq!(serde_json::from_str::<ProcessId>(&text).unwrap(), id);
    }

    fn listen(dir: &Path) -> (UnixListener, Monitor) {
        let path = dir.join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let monitor = Monitor::open(&path).unwrap();
        (listener, monitor)
    }

    /// A process that has this socket, whatever it does with it.
    fn holder(listener: &UnixListener) -> Child {
        let socket = OwnedFd::from(listener.try_clone().unwrap());
        let mut command = Command::new("sleep");
        command.arg("1000").stdin(socket).spawn().unwrap()
    }

    fn reap(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Waits until exactly these serve the monitor, and asserts that they do. Whatever another test
    /// starts has this process's sockets as well, from its fork to its exec.
    fn assert_served_by(monitor: &Monitor, holders: &[&Child]) {
        let wanted = holders
            .iter()
            .map(|child| child.id())
            .collect::<BTreeSet<_>>();
        let deadline = Instant::now() + LIMIT;
        loop {
            let found = match QemuProcess::serving(monitor) {
                Ok(process) => BTreeSet::from([process.id.pid]),
                Err(ProcessError::Several { pids, .. }) => BTreeSet::from_iter(pids),
                Err(ProcessError::NotFound(_)) => BTreeSet::new(),
                Err(error) => panic!("{error}"),
            };
            if found == wanted {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{found:?} serve it, not {wanted:?}"
            );
            thread::sleep(LOOK_AGAIN);
        }
    }

    #[test]
    fn who_has_the_socket_serves_the_monitor_if_it_is_one_process() {
        let dir = tempfile::tempdir().unwrap();
        let (listener, monitor) = listen(dir.path());
        let (first, second) = (holder(&listener), holder(&listener));
        assert_served_by(&monitor, &[&first, &second]);
        reap(second);
        assert_served_by(&monitor, &[&first]);
        reap(first);
        assert_served_by(&monitor, &[]);
    }

    /// One path, two sockets: what was there before, and what is there now.
    #[test]
    fn a_socket_that_took_anothers_place_is_not_it() {
        let dir = tempfile::tempdir().unwrap();
        let (old_listener, old) = listen(dir.path());
        let former = holder(&old_listener);
        fs::rename(dir.path().join("qmp"), dir.path().join("away")).unwrap();
        let (new_listener, new) = listen(dir.path());
        let present = holder(&new_listener);
        assert_served_by(&old, &[]);
        // The former one's path leads to the present socket, too.
        assert_served_by(&new, &[&former, &present]);
        reap(former);
        assert_served_by(&new, &[&present]);
        reap(present);
    }

    /// In containers one path leads to different sockets, and to those of another one a long path does.
    #[test]
    fn the_same_path_in_another_mount_namespace_is_another_socket() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        if !rustix::process::geteuid().is_root() {
            return lab::skipped("not root: no mount namespaces").unwrap();
        }
        let dir = tempfile::tempdir().unwrap();
        let (listener, monitor) = listen(dir.path());
        let here = holder(&listener);
        let path = dir.path().join("qmp");
        let elsewhere = Command::new("unshare")
            .args(["--mount", "sh", "-c"])
            .arg("mount -t tmpfs none \"$1\" && exec \"$0\" -machine none -nodefaults -display none -S -qmp unix:\"$1\"/qmp,server=on,wait=off")
            .arg(&binary.path)
            .arg(dir.path())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + LIMIT;
        let both_listen = || {
            let sockets = listening(&[elsewhere.id()], OsStr::new("qmp"));
            sockets.values().filter(|at| **at == path).count() == 2
        };
        while !both_listen() {
            assert!(Instant::now() < deadline);
            thread::sleep(LOOK_AGAIN);
        }
        assert_served_by(&monitor, &[&here]);
        let through = format!("/proc/{}/root{}", elsewhere.id(), path.display());
        let monitor = Monitor::open(Path::new(&through)).unwrap();
        assert_served_by(&monitor, &[&elsewhere]);
        reap(here);
        reap(elsewhere);
    }

    /// The first of these users, with a socket of the second one's, or behind a link of the third one's.
    #[test]
    fn a_monitor_that_another_user_has_put_there_is_not_its_servers() {
        if !rustix::process::geteuid().is_root() {
            return lab::skipped("not root: no other users").unwrap();
        }
        let (user, other) = (65_534, 65_533);
        for (server, file, link, foreign) in [
            (user, user, user, None),
            (user, 0, 0, None),
            (0, 0, 0, None),
            (user, 0, user, None),
            (user, other, other, Some(other)),
            (user, user, other, Some(other)),
            (user, other, 0, Some(other)),
            (0, user, 0, Some(user)),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let (listener, _) = listen(dir.path());
            let at = dir.path().join("link");
            symlink("qmp", &at).unwrap();
            chown(dir.path().join("qmp"), Some(file), None).unwrap();
            lchown(&at, Some(link), None).unwrap();
            let socket = OwnedFd::from(listener.try_clone().unwrap());
            let mut command = Command::new("sleep");
            let process = command
                .arg("1000")
                .uid(server)
                .stdin(socket)
                .spawn()
                .unwrap();
            let monitor = Monitor::open(&at).unwrap();
            assert_served_by(&monitor, &[&process]);
            let found = QemuProcess::serving(&monitor).unwrap();
            match (found.check_owner(&monitor), foreign) {
                (Ok(()), None) => {}
                (Err(ProcessError::Foreign { owner, user, .. }), Some(foreign)) => {
                    assert_eq!((owner, user), (foreign, server));
                }
                (checked, _) => panic!("{server}, {file}, {link}: {checked:?}"),
            }
            reap(process);
        }
    }

    /// A test's own server must not end the test.
    #[test]
    fn own_process_is_never_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (_listener, monitor) = listen(dir.path());
        assert_served_by(&monitor, &[]);
    }

    #[test]
    fn names_with_parentheses_do_not_shift_the_fields() {
        let stat = b"42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(start_time(stat), Some(4711));
        assert_eq!(start_time(b"42 (a) S 1 2"), None);
    }

    #[test]
    fn a_process_runs_as_its_effective_user() {
        let status = b"Name:\tUid:\nUmask:\t0022\nUid:\t1\t22\t3\t4\nGid:\t5\t6\t7\t8\n";
        assert_eq!(effective_user(status), Some(22));
        assert_eq!(effective_user(b"Name:\tqemu\n"), None);
    }
}
