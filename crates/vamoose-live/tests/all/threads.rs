//! The system calls that the threads of a migration make: those of the handbook's list, and no others. A process of its own
//! runs migrations under a filter that ends it at any other.

#![allow(unsafe_code, reason = "filters are installed by address")]

use std::{
    env, fs, io,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use libc::*;
use multifd::Method;
use vamoose_live::{
    Destination, DestinationConfig, DestinationGuest, GuestError, Ram, Source, SourceGuest, Status,
    Switchover,
    dirty::{SharedBitmap, UserfaultLog},
    on_every_thread,
    snapshot::{Snapshot, SnapshotOptions},
};
use vm_memory::Bytes;

use crate::common::{
    PAGE, Rig, Shape, Watchdog, address_of, expect_equal,
    sessions::{Hosts, acceptor_for, way_to},
    source_config,
};

const CHILD: &str = "VAMOOSE_FILTERED";

/// The names and numbers of calls that may be in the list.
macro_rules! numbers {
    ($($name:literal $number:ident),* $(,)?) => { [$(($name, $number)),*] };
}

#[rustfmt::skip]
const NUMBERS: &[(&str, c_long)] = &numbers![
    "accept4" SYS_accept4, "bind" SYS_bind, "brk" SYS_brk, "clock_gettime" SYS_clock_gettime, "clock_nanosleep" SYS_clock_nanosleep,
    "clone3" SYS_clone3, "close" SYS_close, "connect" SYS_connect, "eventfd2" SYS_eventfd2, "exit" SYS_exit, "fcntl" SYS_fcntl,
    "fstat" SYS_fstat, "fstatfs" SYS_fstatfs, "fsync" SYS_fsync, "futex" SYS_futex, "getpeername" SYS_getpeername,
    "getpid" SYS_getpid, "getrandom" SYS_getrandom, "getsockname" SYS_getsockname, "getsockopt" SYS_getsockopt, "gettid" SYS_gettid,
    "ioctl" SYS_ioctl, "listen" SYS_listen, "lseek" SYS_lseek, "madvise" SYS_madvise, "mmap" SYS_mmap, "mprotect" SYS_mprotect,
    "mremap" SYS_mremap, "munmap" SYS_munmap, "newfstatat" SYS_newfstatat, "openat" SYS_openat, "poll" SYS_poll, "ppoll" SYS_ppoll,
    "prctl" SYS_prctl, "pread64" SYS_pread64, "prlimit64" SYS_prlimit64, "pwrite64" SYS_pwrite64, "read" SYS_read,
    "readlink" SYS_readlink, "recvfrom" SYS_recvfrom, "recvmsg" SYS_recvmsg, "rename" SYS_rename,
    "restart_syscall" SYS_restart_syscall, "rseq" SYS_rseq, "rt_sigprocmask" SYS_rt_sigprocmask, "rt_sigreturn" SYS_rt_sigreturn,
    "sched_getaffinity" SYS_sched_getaffinity, "sched_yield" SYS_sched_yield, "sendmsg" SYS_sendmsg, "sendto" SYS_sendto,
    "set_robust_list" SYS_set_robust_list, "setsockopt" SYS_setsockopt, "shutdown" SYS_shutdown, "sigaltstack" SYS_sigaltstack,
    "socket" SYS_socket, "statx" SYS_statx, "unlink" SYS_unlink, "userfaultfd" SYS_userfaultfd, "write" SYS_write,
    "writev" SYS_writev,
];

/// The list of the handbook; `None` where the handbook is not.
fn list() -> Option<Vec<c_long>> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/live.md");
    let page = fs::read_to_string(page).ok()?;
    let (_, list) = page
        .split_once("<!-- system calls -->\n```text\n")
        .expect("the list has gone");
    let (list, _) = list.split_once("```").unwrap();
    let number = |name: &str| {
        let known = NUMBERS.iter().find(|(known, _)| *known == name);
        known.unwrap_or_else(|| panic!("add {name} to the test")).1
    };
    Some(list.split_whitespace().map(number).collect())
}

/// Ends the process at any call of this thread, and of those that it starts, that is not `allowed`.
fn filter(allowed: &[c_long]) {
    let op = |code: u32, k: u32| sock_filter {
        code: u16::try_from(code).unwrap(),
        jt: 0,
        jf: 0,
        k,
    };
    let mut program = vec![op(BPF_LD | BPF_W | BPF_ABS, 0)];
    for (index, call) in allowed.iter().enumerate() {
        let mut jump = op(BPF_JMP | BPF_JEQ | BPF_K, u32::try_from(*call).unwrap());
        jump.jt = u8::try_from(allowed.len() - index).unwrap();
        program.push(jump);
    }
    program.push(op(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    program.push(op(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    let program = sock_fprog {
        len: u16::try_from(program.len()).unwrap(),
        filter: program.as_mut_ptr(),
    };
    // SAFETY: both calls are about this thread, and the kernel copies the program.
    let failed = unsafe {
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &raw const program) != 0
    };
    assert!(!failed, "{}", io::Error::last_os_error());
}

/// Prints the number of the call, and ends the process.
extern "C" fn report(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    use std::io::Write as _;
    // SAFETY: the kernel passes a structure of 128 bytes, in which the number is at 24.
    let call = unsafe { info.cast::<c_int>().add(6).read() };
    let mut text = [0_u8; 80];
    let _ = writeln!(
        &mut text[..],
        "system call {call} is not in the list of docs/live.md"
    );
    let len = text.iter().position(|byte| *byte == 0);
    let len = len.unwrap_or(text.len());
    // SAFETY: the bytes are there, and both calls may be made in a handler.
    unsafe {
        write(2, text.as_ptr().cast(), len);
        kill(0, SIGKILL);
    }
}

/// A VMM whose memory is dirty when it is paused, and in parts at both ends.
struct Vm<'a>(&'a SharedBitmap, &'a Ram);

impl SourceGuest for Vm<'_> {
    fn pause(&mut self) -> Result<(), GuestError> {
        self.0.mark(0, 0, u64::MAX);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(Vec::new())
    }

    fn switchover(&mut self, status: &Status) -> Switchover {
        match status.ram.dirty_sync_count {
            0..3 => Switchover::Forbid,
            _ => Switchover::Force,
        }
    }
}

impl DestinationGuest for Vm<'_> {
    fn load(&mut self, _: &[u8]) -> Result<(), GuestError> {
        let _: u8 = self.1.blocks()[0].memory().read_obj(PAGE)?;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
}

#[test]
fn only_the_listed_system_calls_are_made() {
    if env::var_os(CHILD).is_some() {
        return be_filtered(&list().unwrap());
    }
    if list().is_none() {
        return lab::skipped("the handbook is not in the package").unwrap();
    }
    if !Rig::all().contains(&Rig::Threads) {
        return;
    }
    let mut child = Command::new(env::current_exe().unwrap());
    child.args([
        "--exact",
        "threads::only_the_listed_system_calls_are_made",
        "--nocapture",
    ]);
    // A group of its own, which its handler ends.
    std::os::unix::process::CommandExt::process_group(&mut child, 0);
    let output = child.env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

fn be_filtered(allowed: &[c_long]) {
    let _watchdog = Watchdog::new("migrations under a filter".into());
    // SAFETY: the structure may be zero, and the handler calls what it may.
    unsafe {
        let mut action: sigaction = std::mem::zeroed();
        action.sa_sigaction = report as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
        action.sa_flags = SA_SIGINFO;
        assert_eq!(
            sigaction(SIGSYS, &raw const action, std::ptr::null_mut()),
            0
        );
    }
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    let of_thread = allowed.to_vec();
    assert!(on_every_thread(move || {
        THREADS.fetch_add(1, Ordering::Relaxed);
        filter(&of_thread);
    }));
    let hosts = Hosts::new();
    let shape = Shape {
        blocks: vec![8 << 20],
        ..Shape::default()
    };
    for (hosts, method, post_copy) in [
        (Some(&hosts), Method::Zstd, false),
        (Some(&hosts), Method::Lz4, true),
        (None, Method::None, true),
        (None, Method::None, false),
    ] {
        let ((_, here), (_, there)) = (shape.memory(), shape.memory());
        let block = here.blocks()[0].memory();
        (0..here.pages(0)).for_each(|page| block.write_obj(page % 3, page * PAGE).unwrap());
        let shared = Arc::new(SharedBitmap::new(&here));
        let page_tables = Arc::new(UserfaultLog::new(&here).unwrap());
        let log = vamoose_live::dirty::Merged::new(vec![page_tables, shared.clone()]);
        let mut config = source_config(method);
        config.post_copy = post_copy;
        let source = Source::with_config(here.clone(), Arc::new(log), config).unwrap();
        let config = DestinationConfig::default();
        let mut destination = Destination::new(acceptor_for(hosts), &there, config).unwrap();
        let to = way_to(hosts, &destination);
        assert!(!address_of(&destination).to_string().is_empty());
        thread::scope(|scope| {
            scope.spawn(|| {
                filter(allowed);
                destination.run(&mut Vm(&shared, &there)).unwrap();
            });
            scope.spawn(|| {
                filter(allowed);
                source.run(&to, &mut Vm(&shared, &here)).unwrap();
            });
        });
        expect_equal(&here, &there);
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("snapshot");
        thread::scope(|scope| {
            scope.spawn(|| {
                filter(allowed);
                let mut vm = Vm(&shared, &there);
                Snapshot::write(&file, &here, &mut vm, &SnapshotOptions::default()).unwrap();
                let snapshot = Snapshot::open(&file, None).unwrap();
                snapshot.restore(&there, &mut vm).unwrap();
                snapshot.restore_on_demand(&there, &mut vm).unwrap();
            });
        });
        expect_equal(&here, &there);
    }
    let threads = THREADS.load(Ordering::Relaxed);
    assert!(
        threads > 10,
        "the hook was called on {threads} threads only"
    );
}
