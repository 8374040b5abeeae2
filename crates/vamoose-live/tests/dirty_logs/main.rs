//! Every dirty log against what was really written.
//!
//! A fixture is a guest's memory, a log for it and writers that write as the log expects it. The tests that all
//! logs have to pass are in `model`; what only one log promises is tested here.

#![cfg(not(feature = "loom"))] // whose atomics work in a model only
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test helper fails by panicking"
)]
#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers of pages, and random ones"
)]

#[cfg(target_arch = "x86_64")]
mod guest;
mod model;

use std::{
    fs::File,
    ops::Range,
    os::fd::AsRawFd,
    sync::{Arc, Mutex},
};

use model::{Fixture, Place, Write, collected, start, write};
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    mm::{Advice, madvise},
    param::page_size,
};
use vamoose_live::{
    Ram, RamBlock,
    causes::DirtyLogError,
    dirty::{DirtyLog, SharedBitmap, UserfaultLog},
};
use vm_memory::{
    FileOffset, MmapRegion,
    mmap::{MmapRegionBuilder, MmapRegionError},
};

/// Pages of the blocks: a single one, a number that 64 does not divide, one that it does.
const BLOCKS: [usize; 3] = [1, 333, 1024];

#[test]
fn shared_bitmap() {
    model::check_all(|| {
        let ram = anonymous(&BLOCKS);
        let log = Arc::new(SharedBitmap::new(&ram));
        let writers = [(); 2].map(|()| marking(&ram, &log)).into();
        Fixture::new(ram, log, writers)
    });
}

#[test]
fn userfaultfd_of_anonymous_memory() {
    if userfaultfd_is_missing() {
        return;
    }
    model::check_all(|| {
        let ram = anonymous(&BLOCKS);
        // A page that is read before it is written would count as written.
        touch_all(&ram, 0);
        let log = Arc::new(UserfaultLog::new(&ram).unwrap());
        let writers = [(); 2].map(|()| storing(&ram)).into();
        Fixture::new(ram, log, writers)
    });
}

#[test]
fn userfaultfd_of_a_memfd() {
    if userfaultfd_is_missing() {
        return;
    }
    model::check_all(|| {
        let ram = mapped(&memfds(&BLOCKS));
        let log = Arc::new(UserfaultLog::new(&ram).unwrap());
        let writers = [(); 2].map(|()| storing(&ram)).into();
        Fixture::new(ram, log, writers)
    });
}

/// One log for what this process writes, one for what another does that has mapped the same memory.
#[test]
fn merged_logs_of_two_mappings() {
    if userfaultfd_is_missing() {
        return;
    }
    model::check_all(|| {
        let files = memfds(&BLOCKS);
        let (ram, elsewhere) = (mapped(&files), mapped(&files));
        let shared = Arc::new(SharedBitmap::new(&ram));
        let page_tables = Arc::new(UserfaultLog::new(&ram).unwrap());
        let writers = vec![storing(&ram), marking(&elsewhere, &shared)];
        let log = vamoose_live::dirty::Merged::new(vec![page_tables, shared]);
        Fixture::new(ram, Arc::new(log), writers)
    });
}

#[cfg(target_arch = "x86_64")]
mod kvm {
    use kvm_ioctls::Kvm;
    use vamoose_live::dirty::{KvmDirtyLog, KvmSlot};

    use super::{
        guest::{BOOT_PAGES, Guest},
        *,
    };

    #[test]
    fn bitmap_with_manual_protection() {
        let Some(kvm) = kvm() else { return };
        if !guest(kvm).has_manual_protection() {
            return lab::skipped("this KVM has no KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2").unwrap();
        }
        model::check_all(|| {
            let guest = guest(Kvm::new().unwrap());
            let log = guest.bitmap();
            guest.with_log(log).keeping(true)
        });
    }

    /// The vCPUs and a device of the VMM: one log keeps its bits until they are cleared, the other does not.
    #[test]
    fn bitmap_merged_with_that_of_a_device() {
        let Some(kvm) = kvm() else { return };
        let guest = guest(kvm);
        let kvm = guest.bitmap();
        let device = Arc::new(SharedBitmap::new(&guest.ram));
        let writes = marking(&guest.ram, &device);
        let log = vamoose_live::dirty::Merged::new(vec![kvm, device]);
        model::no_write_is_lost(guest.with_log(Arc::new(log)).with_writer(writes));
    }

    /// What a vCPU writes goes through tables of KVM's own, which follow those of the process.
    #[test]
    fn userfaultfd_of_a_guest() {
        if kvm().is_none() || userfaultfd_is_missing() {
            return;
        }
        model::check_all(|| {
            let guest = guest(Kvm::new().unwrap());
            touch_all(&guest.ram, 1);
            let log = UserfaultLog::new(&guest.ram).unwrap();
            guest.with_log(Arc::new(log))
        });
    }

    #[test]
    fn slots_that_do_not_fit_the_memory_are_refused() {
        let Some(kvm) = kvm() else { return };
        let guest = guest(kvm);
        let page = page_size() as u64;
        let ram = anonymous(&[4, 4]);
        let slot = |slot, block, first: u64, pages: u64| KvmSlot {
            slot,
            flags: 0,
            guest_phys_addr: u64::from(slot) << 30,
            block,
            offset: first * page,
            len: pages * page,
        };
        let new = |slots: &[KvmSlot]| {
            // SAFETY: nothing is done with it, and the VM has none of these slots.
            unsafe { KvmDirtyLog::new(&guest.vm(), slots.to_vec(), &ram) }
        };
        // In any order, overlapping: the same memory may be shown twice.
        new(&[slot(9, 1, 2, 2), slot(1, 0, 0, 4), slot(3, 1, 0, 3)]).unwrap();
        let odd = KvmSlot {
            len: page + 1,
            ..slot(2, 1, 0, 4)
        };
        let shifted = KvmSlot {
            offset: 1,
            len: 3 * page,
            ..slot(2, 1, 0, 4)
        };
        let absurd = KvmSlot {
            offset: u64::MAX - page + 1,
            ..slot(2, 1, 0, 4)
        };
        for (slots, part) in [
            (vec![slot(1, 0, 0, 4)], "is in no slot"),
            (vec![slot(1, 0, 0, 4), slot(2, 1, 1, 3)], "page 0 of block"),
            (
                vec![slot(1, 0, 0, 4), slot(2, 1, 0, 1), slot(3, 1, 2, 2)],
                "page 1 of block",
            ),
            (vec![slot(1, 0, 0, 4), slot(1, 1, 0, 4)], "the number 1"),
            (vec![slot(1, 2, 0, 4)], "not there"),
            (vec![slot(1, 0, 0, 4), slot(2, 1, 0, 5)], "whole pages"),
            (vec![slot(1, 0, 0, 4), slot(2, 1, 0, 0)], "whole pages"),
            (vec![slot(1, 0, 0, 4), odd], "whole pages"),
            (vec![slot(1, 0, 0, 4), shifted], "whole pages"),
            (vec![slot(1, 0, 0, 4), absurd], "whole pages"),
        ] {
            let Err(DirtyLogError::Setup { reason, .. }) = new(&slots) else {
                panic!("taken: {slots:?}");
            };
            assert!(reason.contains(part), "{reason}");
        }
    }

    #[test]
    fn other_file_than_a_vm_is_refused() {
        let ram = anonymous(&[1]);
        let file = memfd_create("no VM", MemfdFlags::CLOEXEC).unwrap();
        let slot = KvmSlot {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            block: 0,
            offset: 0,
            len: page_size() as u64,
        };
        // SAFETY: there is no VM whose memory it could change.
        let log = unsafe { KvmDirtyLog::new(&file, vec![slot], &ram) };
        assert!(matches!(log, Err(DirtyLogError::System { .. })));
    }

    fn guest(kvm: Kvm) -> Guest {
        let [_, odd, large] = BLOCKS;
        Guest::new(kvm, anonymous(&[BOOT_PAGES, odd, large]))
    }

    fn kvm() -> Option<Kvm> {
        Kvm::new()
            .inspect_err(|error| lab::skipped(&format!("needs /dev/kvm: {error}")).unwrap())
            .ok()
    }
}

#[test]
fn userfaultfd_of_huge_pages() {
    if userfaultfd_is_missing() {
        return;
    }
    const HUGE: usize = 2 << 20;
    let file = memfd_create("huge", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).unwrap();
    ftruncate(&file, 2 * HUGE as u64).unwrap();
    let Ok(region) = map(&FileOffset::new(File::from(file), 0), 2 * HUGE) else {
        lab::skipped("needs 2 free huge pages of 2 MiB (vm.nr_hugepages)").unwrap();
        return;
    };
    let ram = Ram::new(vec![RamBlock::new("huge", Arc::new(region)).unwrap()]).unwrap();
    let log = UserfaultLog::new(&ram).unwrap();
    start(&ram, &log);
    assert_eq!(collected(&ram, &log, 0).count(), 0, "nobody wrote");
    let in_huge_page = HUGE / ram.page_size();
    write(
        &ram,
        Place {
            block: 0,
            page: in_huge_page + 7,
        },
        1,
    );
    let dirty = collected(&ram, &log, 0);
    assert!(dirty.iter().eq(in_huge_page..2 * in_huge_page));
    assert_eq!(collected(&ram, &log, 0).count(), 0, "collected before");
    log.stop().unwrap();
}

/// They are protected as a whole, and split by the first write.
#[test]
fn a_transparent_huge_page_is_logged_by_its_pages() {
    if userfaultfd_is_missing() {
        return;
    }
    let ram = ram([MmapRegion::new(4096 * page_size()).unwrap()].into_iter());
    advise(&ram, Advice::LinuxHugepage);
    touch_all(&ram, 0);
    let log = UserfaultLog::new(&ram).unwrap();
    start(&ram, &log);
    for page in [2000, 2001, 3333] {
        assert_eq!(collected(&ram, &log, 0).count(), 0);
        write(&ram, Place { block: 0, page }, 1);
        assert!(collected(&ram, &log, 0).iter().eq([page]));
    }
    log.stop().unwrap();
}

#[test]
fn untouched_memory_is_not_reported_until_written() {
    if userfaultfd_is_missing() {
        return;
    }
    // Page tables and their tables: the pages around a written one are as untouched as those far away.
    const PAGES: usize = 100_000;
    for ram in [anonymous(&[PAGES]), mapped(&memfds(&[PAGES]))] {
        let log = UserfaultLog::new(&ram).unwrap();
        start(&ram, &log);
        assert_eq!(collected(&ram, &log, 0).count(), 0);
        let written = [0, 1, 512, 700, PAGES - 1];
        for page in written {
            write(&ram, Place { block: 0, page }, 1);
        }
        assert!(collected(&ram, &log, 0).iter().eq(written));
        assert_eq!(collected(&ram, &log, 0).count(), 0);
        log.stop().unwrap();
    }
}

#[test]
fn userfaultfd_finds_writes_by_the_kernel() {
    if userfaultfd_is_missing() {
        return;
    }
    for ram in [anonymous(&[8]), mapped(&memfds(&[8]))] {
        touch_all(&ram, 0);
        let log = UserfaultLog::new(&ram).unwrap();
        start(&ram, &log);
        let page = ram.page_size();
        let source = File::from(memfd_create("source", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&source, 2 * page as u64).unwrap();
        let memory = ram.blocks()[0].memory();
        let target = memory.subslice(3 * page, 2 * page).unwrap();
        // SAFETY: the memory is mapped, and nothing has a reference to it.
        let read = unsafe {
            let address = target.ptr_guard_mut().as_ptr();
            libc::read(source.as_raw_fd(), address.cast(), target.len())
        };
        assert_eq!(usize::try_from(read), Ok(2 * page));
        assert!(collected(&ram, &log, 0).iter().eq([3, 4]));
        log.stop().unwrap();
    }
}

/// A page of a file may leave the page tables after it was written; the write counts all the same.
#[test]
fn a_written_page_that_was_evicted_is_found_by_userfaultfd() {
    if userfaultfd_is_missing() {
        return;
    }
    let ram = mapped(&memfds(&[8]));
    let log = UserfaultLog::new(&ram).unwrap();
    start(&ram, &log);
    write(&ram, Place { block: 0, page: 5 }, 1);
    advise(&ram, Advice::LinuxDontNeed);
    assert!(collected(&ram, &log, 0).iter().eq([5]));
    log.stop().unwrap();
}

#[test]
fn userfaultfd_refuses_memory_that_another_has() {
    if userfaultfd_is_missing() {
        return;
    }
    let ram = anonymous(&[4]);
    let (first, second) = (
        UserfaultLog::new(&ram).unwrap(),
        UserfaultLog::new(&ram).unwrap(),
    );
    first.start().unwrap();
    assert!(matches!(second.start(), Err(DirtyLogError::System { .. })));
    assert!(matches!(
        second.collect(0, 0, &mut [0]),
        Err(DirtyLogError::Setup { .. })
    ));
    first.stop().unwrap();
    second.start().unwrap();
    second.stop().unwrap();
}

#[test]
fn marks_are_of_all_pages_that_bytes_lie_in_and_of_no_others() {
    let ram = anonymous(&[333, 2]);
    let page = ram.page_size() as u64;
    let log = SharedBitmap::new(&ram);
    for (offset, len, expected) in [
        (0, 1, vec![0]),
        (page - 1, 2, vec![0, 1]),
        (page, page, vec![1]),
        (62 * page, 68 * page, (62..130).collect()),
        (332 * page, 5 * page, vec![332]),
        (333 * page, page, vec![]),
        (7, 0, vec![]),
        (u64::MAX, u64::MAX, vec![]),
        (331 * page, u64::MAX, vec![331, 332]),
    ] {
        log.mark(0, offset, len);
        log.mark(2, offset, len);
        assert!(
            collected(&ram, &log, 0).iter().eq(expected.iter().copied()),
            "{len} bytes at {offset}"
        );
        assert_eq!(collected(&ram, &log, 1).count(), 0);
    }
}

/// Writes in a log of its own what it is asked to do, and fails where it is set to.
struct Recording {
    name: &'static str,
    pages_per_collect: usize,
    fails: Option<&'static str>,
    calls: Arc<Mutex<Vec<String>>>,
}

impl Recording {
    fn call(&self, call: &'static str) -> Result<(), DirtyLogError> {
        self.calls
            .lock()
            .unwrap()
            .push(format!("{} {call}", self.name));
        match self.fails {
            Some(fails) if fails.contains(call) => Err(DirtyLogError::Unsupported {
                log: self.name,
                reason: call.into(),
            }),
            _ => Ok(()),
        }
    }
}

impl DirtyLog for Recording {
    fn start(&self) -> Result<(), DirtyLogError> {
        self.call("start")
    }
    fn watch(&self, _: usize, _: Range<usize>) -> Result<(), DirtyLogError> {
        self.call("watch")
    }
    fn pages_per_collect(&self) -> usize {
        self.pages_per_collect
    }
    fn collect(&self, _: usize, _: usize, _: &mut [u64]) -> Result<(), DirtyLogError> {
        self.call("collect")
    }
    fn clear(&self, _: usize, _: usize, _: &[u64]) -> Result<(), DirtyLogError> {
        self.call("clear")
    }
    fn stop(&self) -> Result<(), DirtyLogError> {
        self.call("stop")
    }
}

#[test]
fn merged_logs_start_together_or_not_at_all() {
    let (merged, calls) = recorded([None, Some("start"), None]);
    let error = merged.start().unwrap_err();
    assert!(matches!(error, DirtyLogError::Unsupported { log: "b", .. }));
    assert_eq!(
        *calls.lock().unwrap(),
        ["a start", "b start", "b stop", "a stop"]
    );
}

#[test]
fn merged_logs_are_all_stopped_whatever_fails() {
    let (merged, calls) = recorded([None, Some("stop"), Some("stop")]);
    let error = merged.stop().unwrap_err();
    assert!(matches!(error, DirtyLogError::Unsupported { log: "b", .. }));
    assert_eq!(*calls.lock().unwrap(), ["a stop", "b stop", "c stop"]);
}

#[test]
fn a_failure_of_one_log_is_one_of_the_merged() {
    let (merged, _) = recorded([None, None, Some("watch collect clear")]);
    assert!(merged.watch(0, 0..1).is_err());
    assert!(merged.collect(0, 0, &mut [0]).is_err());
    assert!(merged.clear(0, 0, &[1]).is_err());
}

#[test]
fn merged_logs_are_collected_in_the_largest_parts() {
    let (merged, _) = recorded([None; 3]);
    assert_eq!(merged.pages_per_collect(), 256);
}

fn recorded(
    fails: [Option<&'static str>; 3],
) -> (vamoose_live::dirty::Merged, Arc<Mutex<Vec<String>>>) {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let logs = [("a", 64), ("b", 256), ("c", 128)].into_iter().zip(fails);
    let logs = logs.map(|((name, pages_per_collect), fails)| {
        let calls = Arc::clone(&calls);
        Arc::new(Recording {
            name,
            pages_per_collect,
            fails,
            calls,
        }) as Arc<dyn DirtyLog>
    });
    (vamoose_live::dirty::Merged::new(logs.collect()), calls)
}

/// Pages of the base size, whatever the host's policy is.
fn anonymous(blocks: &[usize]) -> Ram {
    let region = |pages: &usize| MmapRegion::new(pages * page_size()).unwrap();
    let ram = ram(blocks.iter().map(region));
    advise(&ram, Advice::LinuxNoHugepage);
    ram
}

/// Advises the kernel about all of `ram`.
fn advise(ram: &Ram, advice: Advice) {
    for block in ram.blocks() {
        let address = block.memory().ptr_guard_mut().as_ptr();
        // SAFETY: it is mapped, and nothing has a reference to it.
        unsafe { madvise(address.cast(), block.len(), advice) }.unwrap();
    }
}

fn memfds(blocks: &[usize]) -> Vec<FileOffset> {
    let file = |pages| {
        // In the middle of its file, as a block of a VMM may be.
        let start = 3 * page_size();
        let file = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, (start + pages * page_size()) as u64).unwrap();
        FileOffset::new(File::from(file), start as u64)
    };
    blocks.iter().copied().map(file).collect()
}

fn mapped(files: &[FileOffset]) -> Ram {
    ram(files.iter().map(|file| {
        let len = file.file().metadata().unwrap().len() - file.start();
        map(file, usize::try_from(len).unwrap()).unwrap()
    }))
}

/// Unlike `MmapRegion::from_file`, it fails when huge pages cannot be reserved, instead of the first access.
fn map(file: &FileOffset, len: usize) -> Result<MmapRegion, MmapRegionError> {
    MmapRegionBuilder::new(len)
        .with_file_offset(file.clone())
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED)
        .build()
}

fn ram(regions: impl Iterator<Item = MmapRegion>) -> Ram {
    let blocks = regions
        .enumerate()
        .map(|(index, region)| RamBlock::new(&format!("ram{index}"), Arc::new(region)).unwrap());
    Ram::new(blocks.collect()).unwrap()
}

/// Writes all pages of the blocks from `first` on.
fn touch_all(ram: &Ram, first: usize) {
    for block in first..ram.blocks().len() {
        for page in 0..ram.pages(block) {
            write(ram, Place { block, page }, 1);
        }
    }
}

/// Writes by store instructions of this process.
fn storing(ram: &Ram) -> Write {
    let ram = ram.clone();
    Box::new(move |place, stamp| write(&ram, place, stamp))
}

/// The same, and notifies the log.
fn marking(ram: &Ram, log: &Arc<SharedBitmap>) -> Write {
    let (ram, log) = (ram.clone(), Arc::clone(log));
    Box::new(move |place, stamp| {
        write(&ram, place, stamp);
        log.mark(place.block, (place.page * ram.page_size()) as u64, 1);
    })
}

fn userfaultfd_is_missing() -> bool {
    match UserfaultLog::new(&anonymous(&[1])) {
        Ok(_) => false,
        Err(DirtyLogError::Unsupported { reason, .. }) => {
            lab::skipped(&reason).unwrap();
            true
        }
        Err(error) => panic!("{error}"),
    }
}
