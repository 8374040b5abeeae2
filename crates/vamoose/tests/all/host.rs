//! What others on the two hosts may do to them: connect without end, use up descriptors, plant links, choose names.

use std::{
    fs::{self, Permissions},
    io::Write as _,
    net::TcpStream,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink},
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::common::{
    Host, LIMIT, MIB,
    gate::{Fate, Gate, Message},
    migrate, migrate_from, vamoose,
};
use anyhow::{Context as _, Result, ensure};
use lab::{
    proc,
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::Vamoose,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify,
    process::geteuid,
};
use tempfile::TempDir;

const RAM: u64 = 2 * MIB;

/// A guest that runs.
fn guest(binary: &Binary) -> Result<Qemu> {
    let mut qemu = Builder::bare(binary, RAM).content(Fill::Mixed, 1).start()?;
    qemu.qmp.cont()?;
    Ok(qemu)
}

/// A QEMU that waits for a guest.
fn waiting(binary: &Binary) -> Result<Qemu> {
    Builder::bare(binary, RAM).incoming().start()
}

/// Connects `count` times, or until there is no room even in the queue, and stays: every second one sends nothing, the
/// others announce a message.
fn strays(address: &str, count: u8) -> Result<Vec<TcpStream>> {
    let address = address.trim_start_matches("tcp:").parse()?;
    let mut strays = Vec::new();
    for number in 0..count {
        // The kernel answers for a server that is busy.
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(5)) else {
            break;
        };
        if number % 2 == 0 {
            // The server may have had enough of strays.
            let _ = stream.write_all(&[b"VAMOOSEC".as_slice(), &[number; 16]].concat());
        }
        strays.push(stream);
    }
    Ok(strays)
}

/// More than a server needs for one migration, fewer than there are strays.
const FEW_DESCRIPTORS: &str = "ulimit -n 64";
/// No more than a listener's queue holds.
const STRAYS: u8 = 120;

/// Strays use up all descriptors: the server waits for better times, instead of asking for one again and again.
#[test]
fn a_server_without_descriptors_does_not_spin() -> Result<()> {
    let host = Host::start_under(FEW_DESCRIPTORS, &[])?;
    let _strays = strays(&host.address, STRAYS)?;
    let (start, before) = (Instant::now(), proc::cpu_seconds(host.server.pid())?);
    // Watched for a while: a machine that is slow can only hide something.
    while start.elapsed() < Duration::from_secs(3) {
        let refused = host.server.stderr().matches("os error 24").count();
        ensure!(
            refused < 1000,
            "the server said {refused} times within {:?} that it has no descriptors",
            start.elapsed()
        );
        thread::sleep(Duration::from_millis(20));
    }
    let used = proc::cpu_seconds(host.server.pid())? - before;
    ensure!(
        used < start.elapsed().as_secs_f64() / 2.0,
        "a server with nothing to do used {used} s of CPU in {:?}",
        start.elapsed()
    );
    Ok(())
}

/// The source has stopped for good and its connection breaks: strays do not keep it from connecting again.
#[test]
fn a_commit_comes_through_a_crowd_of_strays() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    // It does not log each time that it has no descriptors.
    let limits = format!("{FEW_DESCRIPTORS}; export VAMOOSE_LOG=info,relay=error");
    let host = Host::start_under(&limits, &[])?;
    let gate = Gate::start(&host.address)?;
    let (mut source, mut destination) = (guest(&binary)?, waiting(&binary)?);
    host.knows("vm", &destination)?;
    gate.rule(Message::Request("commit"), Fate::Held);
    let migration = migrate(&source.qmp_socket(), &gate.address, "vm", &[])?;
    gate.wait_until_held()?;
    source.qmp.wait_status("postmigrate", LIMIT)?;
    let _strays = strays(&host.address, STRAYS)?;
    gate.release(Fate::CutBefore);
    migration.finish(LIMIT)?.success()?;
    destination.qmp.wait_status("running", LIMIT)?;
    ram::compare(source.ram(), destination.ram())?;
    Ok(())
}

const GUESTS: usize = 12;

/// A server has had many guests, all of them gone: it holds a few descriptors more than before the first, not some for each.
#[test]
fn guests_leave_no_descriptors_behind() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let open = || proc::descriptors(host.server.pid());
    let before = open()?;
    for number in 0..GUESTS {
        let name = format!("vm{number}");
        let (source, destination) = (guest(&binary)?, waiting(&binary)?);
        host.knows(&name, &destination)?;
        host.migrate(&source, &name, &[])?
            .finish(LIMIT)?
            .success()?;
        host.forgets(&name)?;
    }
    // The last one's threads may not be done yet.
    let deadline = Instant::now() + LIMIT / 4;
    loop {
        let now = open()?;
        if now < before + GUESTS {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{before} descriptors before {GUESTS} guests, {now} afterwards"
        );
        thread::sleep(Duration::from_millis(50));
    }
}

/// The monitors of two guests differ in what looks like an extension. Both move at the same time.
#[test]
fn names_with_dots_move_side_by_side() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let gate = Gate::start(&host.address)?;
    let monitors = TempDir::new()?;
    let (mut first, mut first_there) = (guest(&binary)?, waiting(&binary)?);
    let (second, mut second_there) = (guest(&binary)?, waiting(&binary)?);
    for (name, here, there) in [
        ("web.1", &first, &first_there),
        ("web.2", &second, &second_there),
    ] {
        symlink(here.qmp_socket(), monitors.path().join(name))?;
        host.knows(name, there)?;
    }
    gate.rule(Message::Request("commit"), Fate::Held);
    let monitor = monitors.path().join("web.1");
    let migration = migrate(&monitor, &gate.address, "web.1", &[])?;
    gate.wait_until_held()?;
    first.qmp.wait_status("postmigrate", LIMIT)?;

    let monitor = monitors.path().join("web.2");
    migrate(&monitor, &host.address, "web.2", &[])?
        .finish(LIMIT)?
        .success()?;
    second_there.qmp.wait_status("running", LIMIT)?;
    gate.release(Fate::Passes);
    migration.finish(LIMIT)?.success()?;
    first_there.qmp.wait_status("running", LIMIT)?;
    ram::compare(second.ram(), second_there.ram())?;
    Ok(())
}

const NOBODY: u32 = 65534;

/// The folder of a monitor belongs to its QEMU's user, who puts a link in the place of the socket that `migrate`, as root, makes
/// there and gives away. What the link leads to stays root's.
#[test]
fn a_planted_link_gives_away_no_file_of_root() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    if !geteuid().is_root() {
        return lab::skipped("only root gives files away");
    }
    let host = Host::start(&[])?;
    let source = guest(&binary)?;
    let destination = waiting(&binary)?;
    host.knows("vm", &destination)?;
    chown(source.qmp_socket(), Some(NOBODY), Some(NOBODY))?;
    let (monitors, private) = (TempDir::new()?, TempDir::new()?);
    let canary = private.path().join("canary");
    fs::write(&canary, "root's")?;
    long_way(monitors.path(), &source.qmp_socket())?;
    symlink(&canary, monitors.path().join("planted"))?;
    chown(monitors.path(), Some(NOBODY), Some(NOBODY))?;

    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let attacker = scope.spawn(|| replace_sockets(monitors.path(), &over));
        let monitor = monitors.path().join("vm.qmp");
        let state = private.path().join("state");
        let ended = migrate_from(&state, &monitor, &host.address, "vm", &[])
            .and_then(|migration| migration.finish(LIMIT));
        over.store(true, Ordering::Relaxed);
        // With what became of the guest this test has nothing to do: its QEMU's user can always end it.
        ended?;
        attacker.join().ok().context("the attacker panicked")?
    })?;
    let owner = fs::metadata(&canary)?.uid();
    ensure!(owner == 0, "a file of root's belongs to user {owner} now");
    Ok(())
}

/// Makes `folder`/vm.qmp a link to `monitor` by a path so long that following it takes milliseconds.
fn long_way(folder: &Path, monitor: &Path) -> Result<()> {
    // The kernel follows 40 links at most, of 4095 bytes each.
    let way = folder.join("way");
    fs::create_dir_all(way.join("d"))?;
    symlink(monitor, way.join("0"))?;
    for number in 1..36 {
        let to = format!("{}{}", "d/../".repeat(800), number - 1);
        symlink(to, way.join(number.to_string()))?;
    }
    symlink("way/35", folder.join("vm.qmp"))?;
    Ok(())
}

/// Puts the link `planted` in the place of every socket that appears in the folder.
fn replace_sockets(folder: &Path, over: &AtomicBool) -> Result<()> {
    let events = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    let appears = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(&events, folder, appears)?;
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(&events, &mut buffer);
    let pause = Timespec::try_from(Duration::from_millis(20))?;
    while !over.load(Ordering::Relaxed) {
        poll(&mut [PollFd::new(&events, PollFlags::IN)], Some(&pause))?;
        while let Ok(event) = reader.next() {
            let Some(name) = event.file_name() else {
                continue;
            };
            let path = folder.join(name.to_str()?);
            let is_socket = |found: fs::Metadata| found.file_type().is_socket();
            if fs::symlink_metadata(&path).is_ok_and(is_socket) {
                // The link stays, for the next one.
                let again = folder.join("again");
                fs::hard_link(folder.join("planted"), &again)?;
                fs::rename(again, path)?;
            }
        }
    }
    Ok(())
}

/// A server of another pid namespace cannot tell which process a QEMU is, and so could not end it: it takes no guest for it.
#[test]
fn a_qemu_that_could_not_be_ended_takes_no_guest() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    if !geteuid().is_root() {
        return lab::skipped("not root: no pid namespaces");
    }
    let apart = r#"exec unshare --pid --fork --kill-child --mount-proc "$0" "$@""#;
    let host = Host::start_under(apart, &[])?;
    let (mut source, mut destination) = (guest(&binary)?, waiting(&binary)?);
    host.knows("vm", &destination)?;
    // However often.
    for _ in 0..2 {
        let ended = host.migrate(&source, "vm", &[])?.finish(LIMIT)?;
        ended.failure("cannot tell which process serves the monitor")?;
        ensure!(source.qmp.query_status()? == "running");
        ensure!(destination.qmp.query_status()? == "inmigrate");
    }
    Ok(())
}

/// Monitors in one folder are their users': nobody puts another one in a place of theirs.
#[test]
fn a_folder_of_many_users_needs_a_sticky_bit() -> Result<()> {
    let folder = TempDir::new()?;
    let serve = |mode: u32| -> Result<Vamoose> {
        fs::set_permissions(folder.path(), Permissions::from_mode(mode))?;
        let mut command = Command::new(vamoose());
        command.args(["serve", "--insecure", "--listen", "tcp:127.0.0.1:0"]);
        command.arg("--qmp-dir").arg(folder.path());
        command.arg("--state-dir").arg(folder.path().join("state"));
        Vamoose::start(&mut command)
    };
    for mode in [0o770, 0o777, 0o702] {
        let ended = serve(mode)?.finish(LIMIT)?;
        ended.failure("can be replaced by users who do not own them")?;
    }
    for mode in [0o1770, 0o1777, 0o755] {
        serve(mode)?.wait_for("taking migrations on ", LIMIT)?;
    }
    Ok(())
}

/// Loopback is open to every local user, and to guests behind QEMU's user-mode network. What they send is not read.
#[test]
fn another_user_of_the_host_is_turned_away() -> Result<()> {
    if !geteuid().is_root() {
        return lab::skipped("only root can connect as another user");
    }
    let talk = r#"exec 3<>/dev/tcp/127.0.0.1/$0 || exit 1
        printf 'VAMOOSE\x01\x00\x01\x00\x01\x00\x00\x00\x00%032d' 0 >&3
        head -c 7 <&3"#;
    for (options, answered) in [(&[][..], false), (&["--peer-uid", "65534"][..], true)] {
        let host = Host::start(options)?;
        let (_, port) = host.address.rsplit_once(':').context("no port")?;
        let output = Command::new("setpriv")
            .args(["--reuid=65534", "--clear-groups", "bash", "-c", talk, port])
            .output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            said.contains("VAMOOSE") == answered,
            "{options:?}: {output:?}"
        );
    }
    Ok(())
}
