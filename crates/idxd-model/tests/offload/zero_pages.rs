//! Which pages are zero.

use std::{
    num::NonZeroU32,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap,
};

use super::*;
use idxd_model::{InjectedFault, On, Page, Work as Done};

/// Scans `count` pages of `memory` with `meanwhile` between start and finish; the pages that the processor looked at.
fn scan(
    scanner: &mut ZeroScanner,
    memory: &Memory,
    count: usize,
    meanwhile: impl FnOnce(),
) -> Vec<usize> {
    let pages = memory.addresses(count);
    let batch = scanner.start(&pages);
    meanwhile();
    let (mut looked, mut verdicts) = (Vec::new(), vec![false; count]);
    let mut by_processor = |page: usize| {
        looked.push(page);
        memory.is_zero(page)
    };
    scanner
        .finish(batch, &pages, &mut by_processor, &mut verdicts)
        .unwrap();
    for (page, verdict) in verdicts.iter().enumerate() {
        assert_eq!(*verdict, memory.is_zero(page), "page {page}");
    }
    looked
}

fn one_in(number: u32) -> Option<NonZeroU32> {
    NonZeroU32::new(number)
}

const LONG: Duration = Duration::from_millis(1);

#[test]
fn the_device_finds_them_if_it_has_time() {
    for bytes in [contents(128), vec![0; 128 * PAGE], vec![1; 128 * PAGE]] {
        let model = Model::deterministic(&Config::devices(Kind::Dsa, 2));
        let clock = model.queue(0, 0, PortalKind::Enqcmd);
        let (devices, memory) = (devices(&model, 2, BATCHES), Memory::of(&bytes));
        let mut scanner = ZeroScanner::new(devices.clone(), 4096, None);
        for batch in 1..=4 {
            let looked = scan(&mut scanner, &memory, 128, || pass(&clock, LONG));
            assert_eq!((looked.len(), devices.work().by_device), (0, batch * 128));
        }
        // In turn.
        let operations = statistics(&devices)
            .iter()
            .map(|of| of.operations)
            .collect::<Vec<_>>();
        assert_eq!(operations, [256, 256]);
    }
}

#[test]
fn a_device_and_the_processor_meet() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let (devices, memory) = (devices(&model, 1, BATCHES), Memory::of(&contents(128)));
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, None);
    let looked = scan(&mut scanner, &memory, 128, || {
        pass(&clock, Duration::from_micros(8))
    });
    let first = looked.len();
    assert!((10..118).contains(&first), "{first}");
    // From the front, and none of what was there.
    assert_eq!(looked, (0..first).collect::<Vec<_>>());
    assert_eq!(devices.work().by_device, 128 - first as u64);
}

#[test]
fn fewer_than_eight_pages_are_not_submitted() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let (devices, memory) = (devices(&model, 1, BATCHES), Memory::of(&contents(8)));
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, None);
    for count in 0..8 {
        let looked = scan(&mut scanner, &memory, count, || pass(&clock, LONG));
        assert_eq!(looked.len(), count);
    }
    assert!(scan(&mut scanner, &memory, 8, || pass(&clock, LONG)).is_empty());
    assert_eq!(sum(devices.work()), 7 * 8 / 2 + 8);
}

#[test]
fn without_devices_the_processor_does_it() {
    let devices = Arc::new(Devices::none());
    let memory = Memory::of(&contents(128));
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, one_in(1));
    let looked = scan(&mut scanner, &memory, 128, || ());
    assert_eq!(looked, (0..128).collect::<Vec<_>>());
    let all = OffloadCounters {
        refused: 128,
        ..OffloadCounters::default()
    };
    assert_eq!((devices.work(), devices.are_gone()), (all, true));
}

#[test]
fn descriptors_are_submitted_unchanged() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let (devices, memory) = (devices(&model, 1, BATCHES), Memory::of(&contents(64)));
    let mut scanner = ZeroScanner::new(devices, 4096, None);
    let pages = memory.addresses(64);
    for (asked, length) in [(64, 70), (64, 64), (64, 9), (64, 0), (40, 64)] {
        let batch = scanner.start(&pages[..asked]);
        pass(&clock, LONG);
        let mut verdicts = vec![true; length];
        // Also if these are other pages than before.
        scanner
            .finish(
                batch,
                &pages,
                &mut |page| memory.is_zero(page),
                &mut verdicts,
            )
            .unwrap();
        for (page, verdict) in verdicts.iter().enumerate() {
            assert_eq!(*verdict, page >= 64 || memory.is_zero(page));
        }
    }
}

#[test]
fn the_slot_of_an_unfinished_batch_comes_back() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let (devices, memory) = (devices(&model, 1, BATCHES), Memory::of(&contents(64)));
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, None);
    for _ in 0..200 {
        drop(scanner.start(&memory.addresses(64)));
        pass(&clock, LONG);
    }
    drop(scanner);
    let statistics = statistics(&devices)[0];
    assert_eq!((statistics.operations, statistics.full), (200 * 64, 0));
}

#[test]
fn pages_that_fault_are_looked_at() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let (devices, memory) = (devices(&model, 1, BATCHES), Memory::of(&contents(128)));
    let pages = memory.addresses(128);
    for page in [0, 1, 64, 127] {
        model.pages().set(pages[page], 4096, Page::Absent);
    }
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, None);
    let looked = scan(&mut scanner, &memory, 128, || pass(&clock, LONG));
    assert_eq!(looked, [0, 1, 64, 127]);
    assert_eq!((devices.work().failed, devices.work().by_device), (4, 124));
}

#[test]
fn memory_that_is_gone_crashes_nothing() {
    let bytes = 64 * PAGE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, to which there are no references.
    let area = unsafe {
        let area =
            mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE).unwrap();
        madvise(area, bytes / 2, Advice::LinuxDontNeed).unwrap();
        // Unmapped, the second half could become another thread's.
        mprotect(area.byte_add(bytes / 2), bytes / 2, MprotectFlags::empty()).unwrap();
        area
    };
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 1, BATCHES);
    let start = area.expose_provenance() as u64;
    let mut pages: Vec<_> = (0..64).map(|page| start + page * 4096).collect();
    pages.extend([0, u64::MAX - 4095, u64::MAX, 1 << 63, 1, 4095, 1 << 47, 8]);
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, None);
    let batch = scanner.start(&pages);
    pass(&clock, LONG);
    let (mut looked, mut verdicts) = (Vec::new(), vec![false; pages.len()]);
    let mut by_processor = |page: usize| {
        looked.push(page);
        true
    };
    scanner
        .finish(batch, &pages, &mut by_processor, &mut verdicts)
        .unwrap();
    // The first half reads as zeros, page by page.
    assert_eq!(looked, (32..pages.len()).collect::<Vec<_>>());
    assert!(verdicts.iter().all(|zero| *zero));
    // SAFETY: the mapping; nothing is in flight any more.
    unsafe { munmap(area, bytes) }.unwrap();
}

#[test]
fn nobody_waits_for_a_device_that_is_stuck() {
    let model = Model::deterministic(&Config::devices(Kind::Dsa, 2));
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let (devices, memory) = (devices(&model, 2, BATCHES), Memory::of(&contents(128)));
    model.inject(
        On {
            device: Some(0),
            ..On::any()
        },
        0,
        u32::MAX,
        InjectedFault::Stuck,
    );
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, None);
    let before = clock.now();
    for _ in 0..100 {
        scan(&mut scanner, &memory, 128, || ());
    }
    assert!(clock.now() - before < LONG);
    for _ in 0..400 {
        scan(&mut scanner, &memory, 128, || {
            pass(&clock, Duration::from_millis(5))
        });
    }
    let dead: Vec<_> = devices.queues().map(Queue::is_dead).collect();
    assert_eq!(dead, [true, false]);
    // The other one does it all.
    assert!(scan(&mut scanner, &memory, 128, || pass(&clock, LONG)).is_empty());
}

#[test]
fn a_device_that_becomes_faster_gets_more_again() {
    for count in [16, 64, 128] {
        let model = Model::deterministic(&Config::dsa());
        let clock = model.queue(0, 0, PortalKind::Enqcmd);
        let (devices, memory) = (devices(&model, 1, BATCHES), Memory::of(&contents(count)));
        let mut scanner = ZeroScanner::new(devices.clone(), 4096, None);
        for _ in 0..50 {
            scan(&mut scanner, &memory, count, || ());
            pass(&clock, LONG);
        }
        assert!(devices.work().by_device < 10 * count as u64);
        for _ in 0..300 {
            scan(&mut scanner, &memory, count, || pass(&clock, LONG));
        }
        assert!(scan(&mut scanner, &memory, count, || pass(&clock, LONG)).is_empty());
    }
}

#[test]
fn a_device_with_wrong_verdicts_is_detected_among_others() {
    let (honest, mut wrong) = (Config::dsa(), Config::dsa());
    wrong.work = Done::Oracle(Arc::new(|_, _| true));
    let models = [honest, wrong].map(|config| Model::deterministic(&config));
    let submits = models
        .each_ref()
        .map(|model| model.queue(0, 0, PortalKind::Enqcmd));
    let queues = submits
        .clone()
        .map(|submit| Queue::new(submit, BATCHES, Tuning::default()).unwrap());
    let devices = Arc::new(Devices::new(queues));
    let memory = Memory::of(&vec![1; 64 * PAGE]);
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, one_in(1));
    let pages = memory.addresses(64);
    let results = [(); 4].map(|()| {
        let batch = scanner.start(&pages);
        submits.iter().for_each(|clock| pass(clock, LONG));
        let mut verdicts = [true; 64];
        let result = scanner.finish(
            batch,
            &pages,
            &mut |page| memory.is_zero(page),
            &mut verdicts,
        );
        assert!(verdicts.iter().all(|zero| !zero));
        result.is_err()
    });
    assert_eq!(results, [false, true, false, true]);
    assert_eq!(devices.work().checked, 128);
}

#[test]
fn unchecked_verdicts_are_counted() {
    let mut config = Config::dsa();
    config.work = Done::Oracle(Arc::new(|_, _| true));
    let model = Model::deterministic(&config);
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let (devices, memory) = (devices(&model, 1, BATCHES), Memory::of(&vec![1; 64 * PAGE]));
    let mut scanner = ZeroScanner::new(devices, 4096, one_in(16));
    let pages = memory.addresses(64);
    let batch = scanner.start(&pages);
    pass(&clock, LONG);
    let wrong = scanner.finish(
        batch,
        &pages,
        &mut |page| memory.is_zero(page),
        &mut [false; 64],
    );
    assert_eq!(wrong, Err(WrongVerdict { unchecked: 60 }));
}

#[test]
fn concurrent_guest_writes_are_not_wrong_verdicts() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 1, BATCHES);
    let words: Vec<_> = (0..65 * PAGE / 8).map(|_| AtomicU64::new(0)).collect();
    let start = words.as_ptr().align_offset(PAGE);
    let words = &words[start..];
    let pages: Vec<_> = (0..64)
        .map(|page| (&raw const words[page * PAGE / 8]).expose_provenance() as u64)
        .collect();
    // Written to after the device has looked: once, or again and again.
    for often in [false, true] {
        let mut scanner = ZeroScanner::new(devices.clone(), 4096, one_in(1));
        words
            .iter()
            .for_each(|word| word.store(0, Ordering::Relaxed));
        let batch = scanner.start(&pages);
        pass(&clock, LONG);
        let mut looks = 0;
        let mut by_processor = |page: usize| {
            looks += 1;
            let word = &words[page * PAGE / 8 + looks % 512];
            word.store(1, Ordering::Relaxed);
            let zero = words[page * PAGE / 8..][..PAGE / 8]
                .iter()
                .all(|word| word.load(Ordering::Relaxed) == 0);
            if often && looks % 4 != 0 {
                word.store(0, Ordering::Relaxed);
            }
            zero
        };
        let mut verdicts = [true; 64];
        scanner
            .finish(batch, &pages, &mut by_processor, &mut verdicts)
            .unwrap();
        assert!(verdicts.iter().all(|zero| !zero));
        assert!(looks >= 64);
    }
}

#[test]
fn many_threads_share_devices_while_the_memory_changes() {
    const THREADS: usize = 4;
    let words: Vec<_> = (0..129 * PAGE / 8).map(|_| AtomicU64::new(0)).collect();
    let start = words.as_ptr().align_offset(PAGE);
    let words = &words[start..];
    let page = |page: usize| &words[page * PAGE / 8..][..PAGE / 8];
    // Every third page is not zero, every third changes.
    for of in (0..128).filter(|of| of % 3 == 1) {
        page(of)[of].store(1, Ordering::Relaxed);
    }
    let model = Model::timed(&Config::devices(Kind::Dsa, 2));
    let devices = devices(&model, 2, BATCHES);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for of in (0..128).filter(|of| of % 3 == 2) {
                    page(of)[511].fetch_xor(1, Ordering::Relaxed);
                }
            }
        });
        let scanners: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let mut scanner = ZeroScanner::new(devices.clone(), 4096, one_in(4));
                    let pages: Vec<_> = (0..128)
                        .map(|of| page(of).as_ptr().expose_provenance() as u64)
                        .collect();
                    for _ in 0..20 {
                        let batch = scanner.start(&pages);
                        thread::yield_now();
                        let mut verdicts = [false; 128];
                        let mut by_processor = |of: usize| {
                            page(of)
                                .iter()
                                .all(|word| word.load(Ordering::Relaxed) == 0)
                        };
                        // Whether a page that always changes makes a device look wrong is a matter of chance.
                        let _ = scanner.finish(batch, &pages, &mut by_processor, &mut verdicts);
                        for (of, verdict) in verdicts.iter().enumerate() {
                            match of % 3 {
                                0 => assert!(*verdict),
                                1 => assert!(!*verdict),
                                _ => {}
                            }
                        }
                    }
                })
            })
            .collect();
        scanners
            .into_iter()
            .for_each(|scanner| scanner.join().unwrap());
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(sum(devices.work()), (THREADS * 20 * 128) as u64);
}
