use std::{
    fs,
    io::{self, BufRead, BufReader, Write},
    num::NonZeroU32,
    os::unix::fs::{FileExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Barrier,
    thread,
    time::Duration,
};

use proptest::prelude::*;
use tempfile::TempDir;

use idxd::shares::*;

const QUEUE: &str = "wq0.1";

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn open(directory: &TempDir, entries: u32) -> Result<Table, SharesError> {
    Table::open(directory.path(), QUEUE, NonZeroU32::new(entries).unwrap())
}

fn file_in(directory: &TempDir) -> PathBuf {
    directory.path().join(format!("idxd-shares.{QUEUE}"))
}

/// As another process would join: with an open file of its own.
fn join(directory: &TempDir, entries: u32, weight: u8) -> Share {
    open(directory, entries)
        .unwrap()
        .join(Weight::new(weight))
        .unwrap()
}

fn entries(shares: &[Share]) -> Vec<u32> {
    shares.iter().map(Share::entries).collect()
}

/// Changes a word of the table behind the members' backs.
fn write_word(directory: &TempDir, word: usize, value: u64) {
    let file = fs::File::options().write(true).open(file_in(directory));
    let offset = word as u64 * 8;
    file.unwrap()
        .write_all_at(&value.to_ne_bytes(), offset)
        .unwrap();
}

// The table's layout.
const ENTRIES: usize = 1;
const ROWS: usize = 64;
const WORDS: usize = 512;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn members_divide_by_weight() {
    let directory = directory();
    let first = join(&directory, 64, 4);
    assert_eq!(first.entries(), 64);
    let second = join(&directory, 64, 12);
    assert_eq!((first.entries(), second.entries()), (16, 48));
    second.set_weight(Weight::new(4));
    assert_eq!((first.entries(), second.entries()), (32, 32));
    drop(first);
    assert_eq!(second.entries(), 64);
}

#[test]
fn idle_members_lend_their_entries() {
    let directory = directory();
    let shares = [join(&directory, 10, 4), join(&directory, 10, 4)];
    shares[0].set_active(false);
    assert_eq!(entries(&shares), [0, 10]);
    shares[0].set_active(true);
    assert_eq!(entries(&shares), [5, 5]);
}

#[test]
fn queues_have_tables_of_their_own() {
    let directory = directory();
    let size = NonZeroU32::new(16).unwrap();
    let join = |queue| {
        Table::open(directory.path(), queue, size)
            .unwrap()
            .join(Weight::NORMAL)
            .unwrap()
    };
    let shares = [join("wq0.0"), join("wq1.0")];
    assert_eq!(entries(&shares), [16, 16]);
    for name in ["", "../wq0.0", "wq 1", "a/b", &"w".repeat(65)] {
        let error = Table::open(directory.path(), name, size).unwrap_err();
        assert!(matches!(error, SharesError::Queue { .. }), "{error}");
    }
}

#[test]
fn more_members_than_entries_take_turns() {
    let directory = directory();
    let shares: Vec<_> = (0..5).map(|_| join(&directory, 2, 4)).collect();
    let mut had = [0; 5];
    let mut before = entries(&shares);
    for step in 0..100u32 {
        let now = TURN * step;
        // Whoever refreshes moves the turn on, once for all.
        for share in &shares {
            share.refresh(now).unwrap();
        }
        let after = entries(&shares);
        assert_eq!(after.iter().sum::<u32>(), 2);
        assert_eq!(step > 0, before != after, "turn of step {step}");
        had.iter_mut()
            .zip(&after)
            .for_each(|(had, share)| *had += share);
        before = after;
    }
    assert_eq!(had, [40; 5]);
}

#[test]
fn a_table_that_is_full_says_so() {
    let directory = directory();
    let table = open(&directory, 512).unwrap();
    let mut shares: Vec<_> = (0..MEMBERS)
        .map(|_| table.join(Weight::NORMAL).unwrap())
        .collect();
    assert_eq!(entries(&shares), [2; MEMBERS]);
    for table in [table, open(&directory, 512).unwrap()] {
        assert!(matches!(
            table.join(Weight::NORMAL),
            Err(SharesError::Full { .. })
        ));
    }
    shares.pop();
    shares.push(join(&directory, 512, 4));
    assert_eq!(entries(&shares), [2; MEMBERS]);
}

/// Somebody died between changing a row and incrementing the generation.
#[test]
fn a_change_that_nobody_announced_is_found() {
    let directory = directory();
    let shares = [join(&directory, 8, 4), join(&directory, 8, 4)];
    assert_eq!(entries(&shares), [4, 4]);
    write_word(&directory, ROWS + 1, 0);
    assert_eq!(entries(&shares), [4, 4]);
    shares[0].refresh(seconds(0)).unwrap();
    assert_eq!(shares[0].entries(), 8);
    // The row's owner, which lives, takes it back.
    shares[1].refresh(seconds(0)).unwrap();
    assert_eq!(entries(&shares), [4, 4]);
}

#[test]
fn a_silent_member_is_idle_until_it_speaks() {
    let directory = directory();
    let [silent, other] = [join(&directory, 8, 4), join(&directory, 8, 4)];
    for second in 0..=10 {
        assert_eq!(other.entries(), 4);
        other.refresh(seconds(second)).unwrap();
    }
    assert_eq!((silent.entries(), other.entries()), (0, 8));
    silent.refresh(seconds(0)).unwrap();
    assert_eq!((silent.entries(), other.entries()), (4, 4));
}

#[test]
fn shares_of_one_process_do_not_take_each_other_for_dead() {
    let directory = directory();
    let table = open(&directory, 8).unwrap();
    let shares = [
        table.join(Weight::NORMAL).unwrap(),
        table.join(Weight::NORMAL).unwrap(),
    ];
    drop(table);
    for second in 0..60 {
        shares[0].refresh(seconds(second)).unwrap();
        assert_eq!(entries(&shares), [4, 4]);
    }
}

#[test]
fn a_queue_of_another_size_waits_for_its_old_users() {
    let directory = directory();
    let old = join(&directory, 32, 4);
    let error = open(&directory, 64).unwrap_err();
    assert!(
        matches!(
            error,
            SharesError::Entries {
                theirs: 32,
                ours: 64,
                ..
            }
        ),
        "{error}"
    );
    let late = open(&directory, 32).unwrap();
    drop(old);
    let new = join(&directory, 64, 4);
    assert_eq!(new.entries(), 64);
    assert!(matches!(
        late.join(Weight::NORMAL),
        Err(SharesError::Entries { .. })
    ));
}

#[test]
fn a_removed_file_is_noticed() {
    let directory = directory();
    let table = open(&directory, 8).unwrap();
    let share = table.join(Weight::NORMAL).unwrap();
    fs::remove_file(file_in(&directory)).unwrap();
    assert!(matches!(
        share.refresh(seconds(0)),
        Err(SharesError::Removed { .. })
    ));
    assert!(matches!(
        table.join(Weight::NORMAL),
        Err(SharesError::Removed { .. })
    ));
    assert_eq!(join(&directory, 8, 4).entries(), 8);
}

#[test]
fn the_file_is_for_those_whom_the_directory_is_for() {
    let directory = directory();
    for (of_directory, of_file) in [(0o700, 0o660), (0o2770, 0o660), (0o1777, 0o600)] {
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(of_directory)).unwrap();
        drop(open(&directory, 8).unwrap());
        let metadata = fs::metadata(file_in(&directory)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o7777, of_file);
        fs::remove_file(file_in(&directory)).unwrap();
    }
}

#[test]
fn other_files_are_refused() {
    let directory = directory();
    let file = file_in(&directory);
    let refused = |what: &str| {
        let error = open(&directory, 8).unwrap_err();
        assert!(
            matches!(error, SharesError::NotATable { .. }),
            "{what}: {error}"
        );
    };
    for (what, content) in [
        ("short", vec![0; 4095]),
        ("long", vec![0; 8192]),
        ("other", vec![b'x'; 4096]),
    ] {
        fs::write(&file, &content).unwrap();
        refused(what);
        assert_eq!(fs::read(&file).unwrap(), content, "{what} is left alone");
    }
    fs::remove_file(&file).unwrap();

    fs::create_dir(&file).unwrap();
    refused("directory");
    fs::remove_dir(&file).unwrap();

    rustix::fs::mknodat(
        rustix::fs::CWD,
        &file,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    refused("pipe");
    fs::remove_file(&file).unwrap();

    let victim = directory.path().join("victim");
    fs::write(&victim, "").unwrap();
    symlink(&victim, &file).unwrap();
    refused("link");
    assert_eq!(fs::read(&victim).unwrap(), b"");
    fs::remove_file(&victim).unwrap();
    refused("link to nothing");
    assert!(!victim.exists());
}

#[test]
fn other_versions_are_refused() {
    let directory = directory();
    drop(open(&directory, 8).unwrap());
    let file = fs::OpenOptions::new()
        .write(true)
        .open(file_in(&directory))
        .unwrap();
    file.write_all_at(&[9], 7).unwrap();
    let error = open(&directory, 8).unwrap_err();
    assert!(
        matches!(error, SharesError::Version { version: 9, .. }),
        "{error}"
    );
}

#[test]
fn a_file_that_everybody_may_write_is_refused() {
    let directory = directory();
    let share = join(&directory, 8, 4);
    fs::set_permissions(file_in(&directory), fs::Permissions::from_mode(0o666)).unwrap();
    let error = open(&directory, 8).unwrap_err();
    assert!(
        matches!(error, SharesError::Untrusted { mode: 0o666, .. }),
        "{error}"
    );
    assert_eq!(share.entries(), 8);
}

#[test]
fn directories_that_take_no_file_are_errors() {
    let directory = directory();
    let size = NonZeroU32::new(8).unwrap();
    let missing = directory.path().join("missing");
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    // The last takes no file from root either.
    for path in [missing.as_path(), &file, Path::new("/proc/self")] {
        let error = Table::open(path, QUEUE, size).unwrap_err();
        assert!(matches!(error, SharesError::System { .. }), "{error}");
    }
}

#[test]
fn an_unfinished_file_is_finished() {
    let directory = directory();
    fs::write(file_in(&directory), "").unwrap();
    assert_eq!(join(&directory, 8, 4).entries(), 8);
    fs::write(file_in(&directory), [0; 4096]).unwrap();
    assert_eq!(join(&directory, 8, 4).entries(), 8);
}

#[test]
fn threads_come_and_go() {
    let directory = directory();
    let (stay, table) = (join(&directory, 100, 4), open(&directory, 100).unwrap());
    let together = Barrier::new(8);
    thread::scope(|scope| {
        for _ in 0..8 {
            let (directory, table, stay, together) = (&directory, &table, &stay, &together);
            scope.spawn(move || {
                together.wait();
                for round in 0..50 {
                    let share = match round % 2 {
                        0 => table.join(Weight::new(4)).unwrap(),
                        _ => join(directory, 100, 4),
                    };
                    assert!((1..=50).contains(&share.entries()));
                    share.set_active(round % 3 == 0);
                    share.refresh(seconds(1)).unwrap();
                    // Whoever moves to another row meanwhile may be seen in both.
                    assert!(stay.entries() >= 100 / 17);
                }
            });
        }
    });
    assert_eq!((stay.entries(), table.members()), (100, 1));
}

/// What a member does that may become of it.
#[derive(Clone, Debug)]
enum Event {
    Join(u8),
    Leave(usize),
    Active(usize, bool),
    Weight(usize, u8),
    Refresh(usize),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        3 => (0..20u8).prop_map(Event::Join),
        1 => any::<usize>().prop_map(Event::Leave),
        2 => any::<(usize, bool)>().prop_map(|(member, active)| Event::Active(member, active)),
        1 => (any::<usize>(), 0..20u8).prop_map(|(member, weight)| Event::Weight(member, weight)),
        2 => any::<usize>().prop_map(Event::Refresh),
    ];
    prop::collection::vec(event, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A plain list of rows, of which the first free one is taken, and [`divide`].
    #[test]
    fn shares_are_those_of_a_model(events in events(), size in 1..200u32) {
        let directory = directory();
        let table = open(&directory, size).unwrap();
        let mut shares: Vec<Option<Share>> = Vec::new();
        let mut model: Vec<(u8, bool)> = Vec::new();
        for event in events {
            match event {
                Event::Join(weight) => {
                    let free = shares.iter().position(Option::is_none).unwrap_or(shares.len());
                    if free == shares.len() {
                        shares.push(None);
                        model.push((0, false));
                    }
                    shares[free] = Some(table.join(Weight::new(weight)).unwrap());
                    model[free] = (weight.clamp(1, 15), true);
                }
                Event::Leave(member) if !shares.is_empty() => {
                    let member = member % shares.len();
                    shares[member] = None;
                    model[member] = (0, false);
                }
                Event::Active(member, active) if !shares.is_empty() => {
                    let member = member % shares.len();
                    if let Some(share) = &shares[member] {
                        share.set_active(active);
                        model[member].1 = active;
                    }
                }
                Event::Weight(member, weight) if !shares.is_empty() => {
                    let member = member % shares.len();
                    if let Some(share) = &shares[member] {
                        share.set_weight(Weight::new(weight));
                        model[member].0 = weight.clamp(1, 15);
                    }
                }
                // Always at the same time: turns stay.
                Event::Refresh(member) if !shares.is_empty() => {
                    if let Some(share) = &shares[member % shares.len()] {
                        share.refresh(seconds(1)).unwrap();
                    }
                }
                _ => {}
            }
            let weights: Vec<_> = model.iter().map(|&(weight, active)| if active { weight } else { 0 }).collect();
            let mut expected = vec![0; weights.len()];
            // Each queue has another phase: FNV-1a of its name.
            let phase = QUEUE.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
            });
            divide(size, phase, &weights, &mut expected);
            let found: Vec<_> =
                shares.iter().map(|share| share.as_ref().map_or(0, Share::entries)).collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn garbage_does_no_harm(words in prop::collection::vec(any::<u64>(), WORDS), later: bool) {
        let directory = directory();
        let scribble = || {
            for (index, &word) in words.iter().enumerate().skip(ENTRIES) {
                write_word(&directory, index, word);
            }
        };
        let before = open(&directory, 77).unwrap();
        scribble();
        let share = join(&directory, 77, 4);
        prop_assert!(share.entries() <= 77);
        if later {
            // A live member's row too, and the number of entries.
            scribble();
        }
        for second in 0..5 {
            share.refresh(seconds(second)).unwrap();
            prop_assert!(share.entries() <= 77);
        }
        prop_assert_eq!(before.members(), 1);
        let table = fs::read(file_in(&directory)).unwrap();
        let entries = table[ENTRIES * 8..][..8].try_into().unwrap();
        let entries = u64::from_ne_bytes(entries);
        prop_assert_eq!(u64::from(share.entries()), entries.min(77));
    }
}

const DIRECTORY: &str = "IDXD_TEST_SHARES_DIRECTORY";
const SIZE: &str = "IDXD_TEST_SHARES_SIZE";
const ANSWER: &str = "member: ";

/// A member in a process of its own, which follows commands.
struct Process {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Process {
    fn start(directory: &TempDir, size: u32) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "shares::process", "--nocapture"])
            .env(DIRECTORY, directory.path())
            .env(SIZE, size.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            orders,
            answers,
        }
    }

    fn answer(&mut self) -> u32 {
        loop {
            let mut line = String::new();
            assert_ne!(
                self.answers.read_line(&mut line).unwrap(),
                0,
                "the member has ended"
            );
            // The harness of the tests writes the start of a line.
            if let Some((_, answer)) = line.split_once(ANSWER) {
                return answer.trim().parse().unwrap();
            }
        }
    }

    fn ask(&mut self, order: &str) -> u32 {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
        self.answer()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test, but what [`Process`] starts.
#[test]
fn process() {
    let (Ok(directory), Ok(size)) = (std::env::var(DIRECTORY), std::env::var(SIZE)) else {
        return;
    };
    let table = Table::open(Path::new(&directory), QUEUE, size.parse().unwrap()).unwrap();
    let mut share = Some(table.join(Weight::NORMAL).unwrap());
    println!("{ANSWER}{}", share.as_ref().unwrap().entries());
    for order in io::stdin().lines() {
        let member = share.as_ref().unwrap();
        let answer = match order.unwrap().as_str() {
            "entries" => member.entries(),
            "idle" => {
                member.set_active(false);
                member.entries()
            }
            "fork" => fork(|| {
                let member = share.take().unwrap();
                member.set_active(false);
                member.set_weight(Weight::MAX);
                let forked = matches!(member.refresh(seconds(0)), Err(SharesError::Forked { .. }))
                    && matches!(table.join(Weight::MIN), Err(SharesError::Forked { .. }));
                drop(member);
                i32::from(!forked)
            }),
            "leave a child" => {
                fork_and_stay();
                0
            }
            other => panic!("{other}?"),
        };
        println!("{ANSWER}{answer}");
    }
}

/// The exit status of a child that does `what`.
fn fork(what: impl FnOnce() -> i32) -> u32 {
    // SAFETY: the child touches nothing that another thread could have locked, but the allocator, which glibc
    // makes usable there, and ends without any destructors.
    match unsafe { libc::fork() } {
        0 => {
            let status = what();
            // SAFETY: ends the process.
            unsafe { libc::_exit(status) }
        }
        child => {
            let mut status = 0;
            // SAFETY: `status` is an integer, as asked for.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            u32::try_from(libc::WEXITSTATUS(status)).unwrap()
        }
    }
}

/// Leaves a child behind that ends with the standard input.
fn fork_and_stay() {
    // SAFETY: the child makes two system calls.
    if unsafe { libc::fork() } == 0 {
        let mut byte = 0u8;
        // SAFETY: `byte` is writable, and one byte long.
        unsafe {
            libc::read(0, (&raw mut byte).cast(), 1);
            libc::_exit(0)
        }
    }
}

#[test]
fn processes_start_together_and_die() {
    let directory = directory();
    let mut processes: Vec<_> = (0..6).map(|_| Process::start(&directory, 120)).collect();
    for process in &mut processes {
        process.answer();
    }
    for process in &mut processes {
        assert_eq!(process.ask("entries"), 20);
    }
    assert_eq!(processes[0].ask("idle"), 0);
    assert_eq!(processes[1].ask("entries"), 24);

    processes[1..5].iter_mut().for_each(Process::kill);
    assert_eq!(processes[5].ask("entries"), 24, "nobody has looked");
    let table = open(&directory, 120).unwrap();
    let share = table.join(Weight::NORMAL).unwrap();
    // The first of the dead has made room.
    assert_eq!((table.members(), share.entries()), (6, 24));
    share.refresh(seconds(0)).unwrap();
    share.refresh(SUSPICION - Duration::from_nanos(1)).unwrap();
    assert_eq!(table.members(), 6);
    share.refresh(SUSPICION).unwrap();
    assert_eq!((table.members(), share.entries()), (3, 60));
    assert_eq!(processes[5].ask("entries"), 60);
    drop(share);
    assert_eq!(processes[5].ask("entries"), 120);
}

#[test]
fn a_forked_child_is_no_member() {
    let directory = directory();
    let share = join(&directory, 8, 4);
    let mut process = Process::start(&directory, 8);
    assert_eq!(process.answer(), 4);
    assert_eq!(process.ask("fork"), 0);
    assert_eq!(process.ask("entries"), 4);
    for second in 0..5 {
        share.refresh(seconds(second)).unwrap();
    }
    assert_eq!(
        share.entries(),
        4,
        "the child's end does not unlock its parent's row"
    );
}

#[test]
fn a_child_that_outlives_a_member_takes_no_entries() {
    let directory = directory();
    let table = open(&directory, 8).unwrap();
    let share = table.join(Weight::NORMAL).unwrap();
    let mut process = Process::start(&directory, 8);
    assert_eq!(process.answer(), 4);
    assert_eq!(process.ask("leave a child"), 0);
    process.kill();
    for second in 0..=10 {
        assert_eq!((table.members(), share.entries()), (2, 4));
        share.refresh(seconds(second)).unwrap();
    }
    assert_eq!((table.members(), share.entries()), (2, 8));

    process.orders = None;
    let mut now = 11;
    while table.members() == 2 {
        share.refresh(seconds(now)).unwrap();
        now += 1;
        thread::yield_now();
    }
    assert_eq!(share.entries(), 8);
}
