//! Guests that go to a file, and come from one.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use multifd::Method;
use proptest::{collection::vec, prelude::*};
use tempfile::TempDir;
use vamoose_live::{
    DestinationGuest, GuestError, GuestLocation, Ram, RamBlock, SourceGuest,
    causes::Mismatch,
    session::FileKey,
    snapshot::{Snapshot, SnapshotError, SnapshotOptions},
};
use vm_memory::{Bytes, MmapRegion};

use crate::common::{Here, PAGE, Rig, Shape, Stage, Step, There, Watchdog, engines, expect_equal};

/// A place for snapshots, with a key.
struct Shelf(TempDir);

impl Shelf {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("guest")
    }

    fn key(&self) -> FileKey {
        let path = self.0.path().join("key");
        FileKey::read(&path)
            .or_else(|_| FileKey::generate(&path))
            .unwrap()
    }

    /// What is in it but keys.
    fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.0.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name != "key").collect()
    }
}

fn options(method: Method, key: Option<FileKey>) -> SnapshotOptions {
    SnapshotOptions {
        engines: engines(method),
        key,
        ..SnapshotOptions::default()
    }
}

#[test]
fn a_guest_is_restored_from_its_snapshot() {
    for (run, rig) in Rig::all().into_iter().cycle().take(6).enumerate() {
        let method = [Method::ZstdFrames, Method::Lz4, Method::None][run % 3];
        let (is_sealed, is_live, on_demand) = (run % 2 == 0, run % 4 > 1, run > 2);
        let _watchdog = Watchdog::new(format!("snapshot {run} of {rig:?}"));
        let (shelf, stage) = (
            Shelf::new(),
            Stage::new(&Shape {
                rig,
                ..Shape::default()
            }),
        );
        let key = is_sealed.then(|| shelf.key());
        let mut options = options(method, key.clone());
        options.log = is_live.then(|| rig.log(&stage.guest, &stage.ram));
        options.resume = false;
        let mut here = Here::new(&stage);
        Snapshot::write(&shelf.path(), &stage.ram, &mut here, &options).unwrap();
        assert!(!stage.guest.is_running());
        assert_eq!(shelf.files(), ["guest"]);
        let snapshot = Snapshot::open(&shelf.path(), key.as_ref()).unwrap();
        snapshot.verify().unwrap();
        // Compares all memory with that of the paused guest.
        let mut there = There::new(&stage);
        let restored = match on_demand {
            false => snapshot.restore(&stage.there, &mut there),
            true => snapshot.restore_on_demand(&stage.there, &mut there),
        };
        restored.unwrap();
        stage.expect_there();
    }
}

#[test]
fn a_guest_writes_while_it_is_restored() {
    for rig in Rig::all() {
        let _watchdog = Watchdog::new(format!("{rig:?} on demand"));
        let (shelf, stage) = (
            Shelf::new(),
            Stage::new(&Shape {
                rig,
                ..Shape::default()
            }),
        );
        let mut options = options(Method::Lz4, None);
        options.resume = false;
        Snapshot::write(&shelf.path(), &stage.ram, &mut Here::new(&stage), &options).unwrap();
        let snapshot = Snapshot::open(&shelf.path(), None).unwrap();
        let mut there = There::new(&stage).partial();
        snapshot
            .restore_on_demand(&stage.there, &mut there)
            .unwrap();
        // Its writes and those before add up.
        stage.expect_there();
    }
}

/// What becomes of a guest: whether it runs, and where its snapshot goes.
struct Simple<'a> {
    was_running: bool,
    runs: bool,
    path: &'a Path,
    /// Its snapshot cannot get its name.
    fails: bool,
}

impl SourceGuest for Simple<'_> {
    fn is_running(&self) -> bool {
        self.was_running
    }

    fn pause(&mut self) -> Result<(), GuestError> {
        self.runs = false;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.runs = true;
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        if self.fails {
            fs::create_dir(self.path)?;
        }
        Ok(Vec::new())
    }
}

#[test]
fn a_guest_runs_after_its_snapshot_as_it_is_to() {
    let ram = Shape::default().memory().1;
    for (was_running, fails, resume, runs) in [
        (true, false, true, true),
        (true, false, false, false),
        // After a failure when all is written but the name.
        (true, true, true, true),
        (true, true, false, true),
        (false, false, true, false),
        (false, true, false, false),
    ] {
        let shelf = Shelf::new();
        let path = shelf.path();
        let mut guest = Simple {
            was_running,
            runs: was_running,
            path: &path,
            fails,
        };
        let options = SnapshotOptions {
            resume,
            ..options(Method::Lz4, None)
        };
        let written = Snapshot::write(&path, &ram, &mut guest, &options);
        assert_eq!(written.is_err(), fails, "{written:?}");
        if let Err(error) = written {
            assert!(
                error.to_string().contains(path.to_str().unwrap()),
                "{error}"
            );
        }
        assert_eq!(guest.runs, runs, "{was_running} {fails} {resume}");
    }
}

#[test]
fn a_guest_goes_on_after_its_snapshot_and_after_a_failure() {
    for rig in Rig::all() {
        let (shelf, stage) = (
            Shelf::new(),
            Stage::new(&Shape {
                rig,
                ..Shape::default()
            }),
        );
        fs::write(shelf.path(), "an older one").unwrap();
        for step in [Step::Pause, Step::Save] {
            let mut here = Here::new(&stage).hooked(|now| match now == step {
                true => Err("no".into()),
                false => Ok(()),
            });
            let options = options(Method::Lz4, None);
            let error = Snapshot::write(&shelf.path(), &stage.ram, &mut here, &options);
            assert!(
                matches!(error, Err(SnapshotError::Guest { .. })),
                "{error:?}"
            );
            assert_eq!(shelf.files(), ["guest"]);
            assert_eq!(fs::read(shelf.path()).unwrap(), b"an older one");
            stage.expect_here();
        }
        let mut options = options(Method::Lz4, None);
        options.log = Some(rig.log(&stage.guest, &stage.ram));
        Snapshot::write(&shelf.path(), &stage.ram, &mut Here::new(&stage), &options).unwrap();
        stage.expect_here();
        let snapshot = Snapshot::open(&shelf.path(), None).unwrap();
        snapshot.verify().unwrap();
    }
}

#[test]
fn methods_whose_packets_depend_on_each_other_are_refused() {
    let (shelf, ram) = (Shelf::new(), ram(&[8], &[]));
    for method in [Method::Zlib, Method::Zstd] {
        let written = Snapshot::write(&shelf.path(), &ram, &mut Idle, &options(method, None));
        assert!(matches!(written, Err(SnapshotError::Method { method: found }) if found == method));
    }
    assert!(shelf.files().is_empty());
}

#[test]
fn a_snapshot_takes_its_own_key_and_its_own_guest() {
    let (shelf, other) = (Shelf::new(), Shelf::new());
    let memory = ram(&[40, 300], &[3, 60, 301]);
    let open = |key: Option<&FileKey>| Snapshot::open(&shelf.path(), key);
    let write = |key: Option<FileKey>| {
        let options = options(Method::Lz4, key);
        Snapshot::write(&shelf.path(), &memory, &mut Idle, &options).unwrap();
    };
    write(Some(shelf.key()));
    assert!(matches!(open(None), Err(SnapshotError::KeyNeeded)));
    assert!(matches!(
        open(Some(&other.key())),
        Err(SnapshotError::Index)
    ));
    open(Some(&shelf.key())).unwrap().verify().unwrap();
    let file = fs::read(shelf.path()).unwrap();
    assert!(
        file.windows(8).all(|bytes| bytes != CONTENT),
        "it is legible"
    );
    write(None);
    assert!(matches!(
        open(Some(&shelf.key())),
        Err(SnapshotError::NotEncrypted)
    ));
    let snapshot = open(None).unwrap();
    for on_demand in [false, true] {
        let smaller = ram(&[40, 299], &[]);
        let restored = match on_demand {
            false => snapshot.restore(&smaller, &mut Idle),
            true => snapshot.restore_on_demand(&smaller, &mut Idle),
        };
        assert!(matches!(
            restored,
            Err(SnapshotError::Mismatch(Mismatch::BlockLen { .. }))
        ));
    }
}

/// It is found when the page is needed; the guest may run by then.
#[test]
fn a_damaged_record_loses_pages_of_a_guest_that_is_restored_on_demand() {
    let (shelf, memory) = (Shelf::new(), ram(&[300], &[3, 60, 299]));
    Snapshot::write(
        &shelf.path(),
        &memory,
        &mut Idle,
        &options(Method::Lz4, None),
    )
    .unwrap();
    let mut bytes = fs::read(shelf.path()).unwrap();
    bytes[2] ^= 1;
    fs::write(shelf.path(), bytes).unwrap();
    let snapshot = Snapshot::open(&shelf.path(), None).unwrap();
    let is_damaged =
        |error: &SnapshotError| matches!(error, SnapshotError::Record { packet: 0, .. });
    assert!(is_damaged(&snapshot.verify().unwrap_err()));
    let there = ram(&[300], &[]);
    let error = snapshot.restore(&there, &mut Idle).unwrap_err();
    assert!(is_damaged(&error) && error.guest() == GuestLocation::Source);
    let error = snapshot.restore_on_demand(&there, &mut Idle).unwrap_err();
    assert_eq!(error.guest(), GuestLocation::Lost);
    assert!(
        matches!(&error, SnapshotError::PagesLost { pages: 3, source } if is_damaged(source)),
        "{error}"
    );
}

/// A VMM without a guest.
struct Idle;

impl SourceGuest for Idle {
    fn pause(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(b"state".to_vec())
    }
}

impl DestinationGuest for Idle {
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        assert_eq!(state, b"state");
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
}

const CONTENT: [u8; 8] = *b"contents";

/// Blocks of so many pages, some of which, numbered over all blocks, are not zero.
fn ram(blocks: &[usize], filled: &[usize]) -> Ram {
    let blocks = blocks.iter().enumerate().map(|(index, pages)| {
        let memory = Arc::new(MmapRegion::<()>::new(pages * PAGE).unwrap());
        RamBlock::new(&format!("block{index}"), memory).unwrap()
    });
    let ram = Ram::new(blocks.collect()).unwrap();
    for page in filled {
        let (mut page, mut block) = (*page, 0);
        while page >= ram.pages(block) {
            page -= ram.pages(block);
            block += 1;
        }
        let content = [CONTENT, (page as u64).to_ne_bytes()].concat();
        let memory = ram.blocks()[block].memory();
        memory
            .write_slice(&content.repeat(PAGE / 16), page * PAGE)
            .unwrap();
    }
    ram
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_memory_comes_back_and_any_damage_is_found(
        filled in vec(0..700_usize, 0..300),
        method in prop::sample::select(vec![Method::None, Method::Lz4, Method::ZstdFrames, Method::Qpl]),
        is_sealed: bool,
        on_demand: bool,
        at: prop::sample::Index,
        flipped in 1..=255_u8,
    ) {
        let (shelf, blocks) = (Shelf::new(), [130, 570]);
        let (here, there) = (ram(&blocks, &filled), ram(&blocks, &[1, 500]));
        let key = is_sealed.then(|| shelf.key());
        let written = Snapshot::write(&shelf.path(), &here, &mut Idle, &options(method, key.clone()));
        let bytes = fs::read(shelf.path()).unwrap();
        prop_assert_eq!(written.unwrap().bytes, bytes.len() as u64);
        let open = |path: &Path| Snapshot::open(path, key.as_ref());
        let snapshot = open(&shelf.path()).unwrap();
        match on_demand {
            false => snapshot.restore(&there, &mut Idle),
            true => snapshot.restore_on_demand(&there, &mut Idle),
        }.unwrap();
        expect_equal(&here, &there);
        // Any byte is changed, or the file is cut anywhere.
        let at = at.index(bytes.len());
        let damaged = shelf.path().with_extension("damaged");
        let mut changed = bytes.clone();
        changed[at] ^= flipped;
        for bytes in [&changed[..], &bytes[..at]] {
            fs::write(&damaged, bytes).unwrap();
            let found = open(&damaged).and_then(|snapshot| snapshot.verify());
            prop_assert!(found.is_err(), "byte {}", at);
        }
    }
}

/// `cargo test --release -p vamoose-live --test all -- --ignored --nocapture snapshot_of`
#[test]
#[ignore = "a measurement, of VAMOOSE_GIB of memory (4)"]
fn snapshot_of_much_memory() {
    struct First(Ram, Option<Duration>);
    impl DestinationGuest for First {
        fn load(&mut self, _: &[u8]) -> Result<(), GuestError> {
            Ok(())
        }

        /// The first instruction touches a page.
        fn resume(&mut self) -> Result<(), GuestError> {
            let (began, memory) = (Instant::now(), self.0.blocks()[0].memory());
            let _: u8 = memory.read_obj(self.0.pages(0) / 2 * PAGE)?;
            self.1 = Some(began.elapsed());
            Ok(())
        }
    }
    let gib: usize = std::env::var("VAMOOSE_GIB").map_or(4, |gib| gib.parse().unwrap());
    let pages = gib << 18;
    let here = ram(&[pages], &[]);
    // Half of it is zero; of the rest, half of each page can be compressed.
    let (mut word, mut page) = (1_u64, vec![0; PAGE]);
    for number in (0..pages).step_by(2) {
        for bytes in page[..PAGE / 2].chunks_mut(8) {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        let memory = here.blocks()[0].memory();
        memory.write_slice(&page, number * PAGE).unwrap();
    }
    let shelf = Shelf::new();
    for (name, key) in [("plain", None), ("sealed", Some(shelf.key()))] {
        let options = options(Method::ZstdFrames, key.clone());
        let (began, before) = (Instant::now(), cpu_seconds());
        let written = Snapshot::write(&shelf.path(), &here, &mut Idle, &options).unwrap();
        eprintln!(
            "{name}: {gib} GiB in {:?}, {} CPU seconds: {written:?}",
            began.elapsed(),
            cpu_seconds() - before
        );
        for on_demand in [false, true] {
            let there = ram(&[pages], &[]);
            let mut first = First(there.clone(), None);
            let before = cpu_seconds();
            let snapshot = Snapshot::open(&shelf.path(), key.as_ref()).unwrap();
            let restored = match on_demand {
                false => snapshot.restore(&there, &mut first),
                true => snapshot.restore_on_demand(&there, &mut first),
            };
            let (first, cpu) = (first.1.unwrap(), cpu_seconds() - before);
            eprintln!(
                "  on demand: {on_demand}, {cpu} CPU seconds, its first page took {first:?}: {restored:?}"
            );
            restored.unwrap();
            expect_equal(&here, &there);
        }
    }
}

/// Of this process, so far.
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let ticks = fields.split_whitespace().skip(11).take(2);
    ticks
        .map(|ticks| ticks.parse::<f64>().unwrap())
        .sum::<f64>()
        / 100.0
}
