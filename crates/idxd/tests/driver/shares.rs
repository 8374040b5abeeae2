use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Write},
    num::NonZeroU32,
    os::fd::AsRawFd,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Child, Command, Stdio},
    sync::Barrier,
    thread,
};

use tempfile::TempDir;

use idxd::{Kind, discovery::QueueName, shares::*};

const QUEUE: QueueName = QueueName {
    kind: Some(Kind::Dsa),
    device: 0,
    queue: 1,
};

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn try_join(directory: &Path, entries: u32, weight: u8) -> Result<Share, SharesError> {
    let entries = NonZeroU32::new(entries).unwrap();
    Share::join(directory, QUEUE, entries, Weight::new(weight))
}

fn join(directory: &TempDir, entries: u32, weight: u8) -> Share {
    try_join(directory.path(), entries, weight).unwrap()
}

fn entries(shares: &[Share]) -> Vec<u32> {
    shares
        .iter()
        .map(|share| share.part().unwrap().entries)
        .collect()
}

#[test]
fn members_divide_by_weight() {
    let directory = directory();
    let mut shares = vec![join(&directory, 120, 4)];
    assert_eq!(entries(&shares), [120]);
    shares.push(join(&directory, 120, 4));
    shares.push(join(&directory, 120, 15));
    shares.push(join(&directory, 120, 1));
    assert_eq!(entries(&shares), [20, 20, 75, 5]);
    shares.remove(2);
    assert_eq!(entries(&shares), [53, 53, 14]);
    // The row that became free is used again.
    shares.push(join(&directory, 120, 0));
    assert_eq!(entries(&shares), [48, 48, 12, 12]);
}

#[test]
fn queues_are_divided_one_by_one() {
    let directory = directory();
    let other = QueueName { queue: 2, ..QUEUE };
    let eight = NonZeroU32::new(8).unwrap();
    let shares = [
        join(&directory, 8, 4),
        Share::join(directory.path(), other, eight, Weight::new(4)).unwrap(),
    ];
    assert_eq!(entries(&shares), [8, 8]);
}

#[test]
fn with_more_members_than_entries_each_has_one() {
    let directory = directory();
    let shares: Vec<_> = (0..10).map(|_| join(&directory, 4, 4)).collect();
    assert_eq!(entries(&shares), [1; 10]);
}

#[test]
fn there_is_an_end_of_members() {
    let directory = directory();
    let mut shares: Vec<_> = (0..MEMBERS).map(|_| join(&directory, 512, 4)).collect();
    assert_eq!(entries(&shares[254..]), [2, 2]);
    let full = try_join(directory.path(), 512, 4).unwrap_err();
    assert!(matches!(full, SharesError::Full(_)), "{full}");
    shares.remove(7);
    join(&directory, 512, 4);
}

#[test]
fn many_locks_of_one_process_count_once_for_each_row() {
    let directory = directory();
    let share = join(&directory, 120, 4);
    let path = directory.path().join("idxd-shares.wq0.1");
    let file = File::options().write(true).open(path).unwrap();
    for start in (5..4096).step_by(2) {
        let lock = libc::flock {
            l_type: libc::F_WRLCK.try_into().unwrap(),
            l_whence: libc::SEEK_SET.try_into().unwrap(),
            l_start: start,
            l_len: 1,
            l_pid: 0,
        };
        // SAFETY: the command takes a pointer to a `struct flock`, which outlives the call.
        let locked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
        assert_eq!(locked, 0);
    }
    let part = share.part().unwrap();
    assert_eq!(
        part,
        Part {
            entries: 1,
            others: 255
        }
    );
}

#[test]
fn the_file_is_for_owner_and_group() {
    let directory = directory();
    let _share = join(&directory, 8, 4);
    let file = fs::metadata(directory.path().join("idxd-shares.wq0.1")).unwrap();
    assert_eq!((file.len(), file.permissions().mode() & 0o777), (0, 0o660));
}

#[test]
fn links_and_directories_are_refused() {
    let directory = directory();
    let file = directory.path().join("idxd-shares.wq0.1");
    symlink("elsewhere", &file).unwrap();
    assert!(try_join(directory.path(), 8, 4).is_err());
    assert!(!directory.path().join("elsewhere").exists());
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let error = try_join(directory.path(), 8, 4).unwrap_err();
    assert!(matches!(error, SharesError::System { .. }), "{error}");
    assert!(try_join(&directory.path().join("missing"), 8, 4).is_err());
}

#[test]
fn threads_come_and_go() {
    let directory = directory();
    let barrier = Barrier::new(8);
    thread::scope(|scope| {
        for weight in 1..=8 {
            let (directory, barrier) = (&directory, &barrier);
            scope.spawn(move || {
                for _ in 0..20 {
                    let share = join(directory, 64, weight);
                    assert!((1..=64).contains(&share.part().unwrap().entries));
                }
                let share = join(directory, 36, weight);
                barrier.wait();
                assert_eq!(share.part().unwrap().entries, u32::from(weight));
                barrier.wait();
            });
        }
    });
}

const DIRECTORY: &str = "IDXD_TEST_SHARES";

/// A member in a process of its own.
fn process(directory: &TempDir) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "shares::member", "--nocapture"])
        .env(DIRECTORY, directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("joined")));
    child
}

/// Not a test, but what [`process`] starts.
#[test]
fn member() {
    let Ok(directory) = std::env::var(DIRECTORY) else {
        return;
    };
    let _share = try_join(Path::new(&directory), 120, 4).unwrap();
    println!("joined");
    io::stdout().flush().unwrap();
    let _ = io::stdin().lines().next();
}

#[test]
fn the_entries_of_a_killed_process_are_free_at_once() {
    let directory = directory();
    let share = join(&directory, 120, 4);
    let mut processes: Vec<_> = (0..3).map(|_| process(&directory)).collect();
    assert_eq!(
        share.part().unwrap(),
        Part {
            entries: 30,
            others: 3
        }
    );
    for (left, child) in (1..=3).rev().zip(&mut processes) {
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(share.part().unwrap().entries, 120 / left);
    }
}
