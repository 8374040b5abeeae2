//! The migrations under way on this host. Every process that migrates guests reports them on its own socket in a common folder.

use std::{
    fmt::Debug,
    fs::{self, DirBuilder},
    io::{self, Read as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::debug;
use vamoose_link::{
    Address, Counters, Hangup, HangupGuard, Listener, Socket, SocketError, chain, dial, millis,
    wait_until,
};

/// A migration under way. `None` is unknown to the process that reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct UnderWay {
    /// The command that moves the guest: `migrate`, `serve` or `gateway`.
    pub by: String,
    /// Whether the guest leaves this host or arrives.
    pub role: Role,
    /// The guest's name.
    pub name: Option<String>,
    /// The other host.
    pub peer: String,
    /// The port or stream, for a gateway.
    pub target: Option<String>,
    /// The state, as QEMU names it.
    pub status: Option<String>,
    /// Encoding towards the other host.
    pub method: Option<String>,
    /// Whether connections of another protocol are forwarded, such as the NBD of the guest's disks.
    #[serde(default)]
    pub is_bytes: bool,
    /// Since the beginning, in milliseconds.
    pub total_time: u64,
    /// Bytes between the QEMU of this host and the process.
    pub guest_bytes: u64,
    /// Bytes between the hosts.
    pub wire_bytes: u64,
    /// Rounds over the guest's memory.
    pub rounds: Option<u64>,
    /// Bytes of memory still to be sent.
    pub remaining: Option<u64>,
    /// Bytes of all memory.
    pub total: Option<u64>,
    /// How long the guest has been paused, in milliseconds.
    pub downtime: Option<u64>,
}

impl UnderWay {
    /// From the counters of a relay.
    pub fn new(by: &str, role: Role, peer: String, began: Instant, moved: &Counters) -> Self {
        let (guest_bytes, wire_bytes) = match role {
            Role::Source => (moved.received_bytes, moved.wire_bytes),
            Role::Destination => (moved.wire_bytes, moved.received_bytes),
        };
        Self {
            by: by.to_owned(),
            role,
            name: None,
            peer,
            target: None,
            status: None,
            method: None,
            is_bytes: false,
            total_time: millis(began.elapsed()),
            guest_bytes,
            wire_bytes,
            rounds: (moved.syncs > 0).then_some(moved.syncs),
            remaining: None,
            total: None,
            downtime: None,
        }
    }

    /// Identifies the migration, and orders several.
    pub fn key(&self) -> impl Ord + Debug {
        let it = self;
        (&it.name, &it.by, it.role, &it.peer, &it.target)
    }
}

/// Which end of a migration a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Role {
    Source,
    Destination,
}

/// The socket at which this process reports its migrations.
pub struct Watchable {
    listener: Listener,
    end: Hangup,
}

/// Migrations cannot be watched.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WatchError {
    #[error("cannot use the folder {}", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("the system is out of file descriptors")]
    System(#[from] io::Error),
}

/// Time limit of each side, for a few kilobytes.
const PATIENCE: Duration = Duration::from_secs(1);

/// Length limit of an answer: more migrations than a host has.
const LONGEST: u64 = 4 << 20;

const PREFIX: &str = "under-way-";
const SUFFIX: &str = ".sock";

impl Watchable {
    /// Listens in the folder `dir`, and creates it if necessary.
    ///
    /// # Errors
    /// When the folder cannot be used.
    pub fn bind(dir: &Path) -> Result<Self, WatchError> {
        let mut builder = DirBuilder::new();
        let made = builder.recursive(true).mode(0o700).create(dir);
        made.map_err(|error| WatchError::Folder(dir.to_owned(), error))?;
        let path = dir.join(format!("{PREFIX}{}{SUFFIX}", process::id()));
        Ok(Self {
            listener: Listener::bind(&Address::Unix(path), PATIENCE)?,
            end: Hangup::new()?,
        })
    }

    /// Answers with the result of `list`, until the guard of [`ends_with`](Self::ends_with) is dropped.
    pub fn serve(&self, list: &dyn Fn() -> Vec<UnderWay>) {
        loop {
            let mut fds = [
                PollFd::new(&self.end, PollFlags::IN),
                PollFd::new(&self.listener, PollFlags::IN),
            ];
            if let Err(error) = wait_until(&mut fds, None) {
                return debug!("migrations cannot be watched any more: {error}");
            }
            if self.end.is_hung_up() {
                return;
            }
            let answered = match self.listener.try_accept() {
                Ok(Some(socket)) => answer(&socket, &list()),
                Ok(None) => Ok(()),
                Err(error) => Err(io::Error::other(error)),
            };
            if let Err(error) = answered {
                debug!("a watcher got no answer: {error}");
            }
        }
    }

    /// [`serve`](Self::serve) returns when this is dropped.
    pub fn ends_with(&self) -> HangupGuard<'_> {
        self.end.guard()
    }
}

fn answer(socket: &Socket, list: &[UnderWay]) -> io::Result<()> {
    socket.write_both(&serde_json::to_vec(list)?, &[])
}

/// All migrations under way, of the processes whose sockets are in `dir`. Empty if there is no such folder.
///
/// # Errors
/// When the folder cannot be read.
pub fn under_way(dir: &Path) -> Result<Vec<UnderWay>, WatchError> {
    let failed = |error| WatchError::Folder(dir.to_owned(), error);
    let files = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        files => files.map_err(failed)?,
    };
    let mut all = Vec::new();
    for file in files {
        let path = file.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let pid = name
            .strip_prefix(PREFIX)
            .and_then(|it| it.strip_suffix(SUFFIX));
        let Some(pid) = pid.map(str::to_owned) else {
            continue;
        };
        match ask(&path) {
            Ok(list) => all.extend(list),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                debug!("process {pid} has gone: {error}");
                // A live process may be about to listen. Another user's socket cannot be removed, and stays.
                if !Path::new("/proc").join(&pid).exists() {
                    let _ = fs::remove_file(&path);
                }
            }
            Err(error) => debug!("process {pid} does not answer: {error}"),
        }
    }
    all.sort_by(|one, other| one.key().cmp(&other.key()));
    Ok(all)
}

fn ask(path: &Path) -> io::Result<Vec<UnderWay>> {
    let socket = dial(&Address::Unix(path.to_owned()), PATIENCE)
        .map_err(|error| io::Error::new(error.source.kind(), chain(&error)))?;
    let mut text = Vec::new();
    (&socket).take(LONGEST).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;

    fn moving(name: &str) -> UnderWay {
        let moved = Counters::default();
        UnderWay {
            name: Some(name.to_owned()),
            total_time: 0,
            ..UnderWay::new("x", Role::Source, "kvm2".to_owned(), Instant::now(), &moved)
        }
    }

    #[test]
    fn only_live_processes_are_found() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(under_way(&dir.path().join("none")).unwrap(), []);
        // Left by a killed process. No other process has its number.
        let stale = dir.path().join(format!("{PREFIX}4194305{SUFFIX}"));
        drop(UnixListener::bind(&stale).unwrap());
        let watchable = Watchable::bind(dir.path()).unwrap();
        thread::scope(|scope| {
            let _end = watchable.ends_with();
            scope.spawn(|| watchable.serve(&|| vec![moving("b"), moving("a")]));
            for _ in 0..2 {
                let found = under_way(dir.path()).unwrap();
                assert_eq!(found, [moving("a"), moving("b")]);
            }
        });
        assert!(!stale.exists());
        drop(watchable);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn wire_bytes_are_those_between_the_hosts() {
        let moved = Counters {
            received_bytes: 5,
            wire_bytes: 3,
            ..Counters::default()
        };
        for (role, guest, wire) in [(Role::Source, 5, 3), (Role::Destination, 3, 5)] {
            let it = UnderWay::new("x", role, "kvm2".to_owned(), Instant::now(), &moved);
            assert_eq!((it.guest_bytes, it.wire_bytes), (guest, wire));
        }
    }
}
