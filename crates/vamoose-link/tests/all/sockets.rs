//! Sockets as others see them: who is kept waiting, disturbed, let in or killed by them.

use std::{
    env, fs,
    io::{self, IoSlice, Write as _},
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net::{UnixListener, UnixStream},
    },
    path::Path,
    process::Command,
    sync::mpsc::channel,
    thread,
    time::Duration,
};

use rustix::{
    net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket},
    process::umask,
};
use vamoose_link::{Address, Listener, Stream, dial};

/// Longer than anything may take on a machine that is very busy.
const LIMIT: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

fn unix(path: &Path) -> Address {
    Address::Unix(path.to_owned())
}

/// In a thread of its own, so that a test that fails ends.
fn within_limit<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = channel();
    thread::spawn(move || tell.send(work()));
    told.recv_timeout(LIMIT).unwrap()
}

/// A monitor that is held by another process, for example.
#[test]
fn a_unix_listener_that_takes_no_connections_is_not_waited_for_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    // Room for a single connection.
    listen(&listener, 0).unwrap();
    let _first = dial(&unix(&path), LIMIT).unwrap();
    let (dialled, address) = (unix(&path), unix(&path));
    let error = within_limit(move || dial(&dialled, SHORT).unwrap_err());
    assert_eq!(error.source.kind(), io::ErrorKind::TimedOut, "{error}");

    // Who takes them in time is connected to.
    let second = thread::spawn(move || dial(&address, LIMIT));
    let listener = UnixListener::from(listener);
    for _ in 0..2 {
        listener.accept().unwrap();
    }
    second.join().unwrap().unwrap();
}

#[test]
fn who_listens_already_is_not_disturbed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let first = UnixListener::bind(&path).unwrap();
    first.set_nonblocking(true).unwrap();
    assert!(Listener::bind(&unix(&path), LIMIT).is_err());
    // Nobody has connected.
    let error = first.accept().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn only_a_socket_that_was_left_behind_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    drop(Listener::bind(&unix(&path), LIMIT).unwrap());
    assert!(!path.exists());

    fs::write(&path, "not a socket").unwrap();
    assert!(Listener::bind(&unix(&path), LIMIT).is_err());
    assert_eq!(fs::read(&path).unwrap(), b"not a socket");
}

/// The only test here that minds the umask.
#[test]
fn a_unix_socket_is_for_its_owner_whatever_the_umask() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    for mask in [0o000, 0o022, 0o077] {
        let before = umask(rustix::fs::Mode::from_raw_mode(mask));
        let listener = Listener::bind(&unix(&path), LIMIT);
        umask(before);
        let listener = listener.unwrap();
        let file = fs::symlink_metadata(&path).unwrap();
        assert!(file.file_type().is_socket());
        assert_eq!(file.permissions().mode() & 0o777, 0o600, "umask {mask:o}");
        drop(listener);
    }
}

/// Run by itself in a child, which has the signal's default as a VMM may: then it kills.
#[test]
fn a_peer_that_is_gone_is_an_error_and_no_signal() {
    const CHILD: &str = "TRANSFER_TEST_CHILD";
    if env::var_os(CHILD).is_none() {
        let mut child = Command::new(env::current_exe().unwrap());
        let name = "a_peer_that_is_gone_is_an_error_and_no_signal";
        let ended = child.args(["--exact", name]).env(CHILD, "1").output();
        let ended = ended.unwrap();
        assert!(ended.status.success(), "{ended:?}");
        return;
    }
    // SAFETY: The default is no handler of ours, so nothing of this program is run by it.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let writes: [fn(&Stream) -> io::Result<()>; 4] = [
        |stream| stream.write_both(b"head", b"tail"),
        |mut stream| stream.write(b"bytes").map(drop),
        |mut stream| stream.write_vectored(&[IoSlice::new(b"bytes")]).map(drop),
        |stream| stream.send_memory(b"head", &[]),
    ];
    for write in writes {
        let (near, far) = UnixStream::pair().unwrap();
        drop(far);
        let error = write(&Stream::from(near)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
