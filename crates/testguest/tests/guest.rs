//! Guests of both kinds, from outside: they write, stop, move, and notice what is wrong.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a test"
)]

use std::{
    collections::BTreeSet,
    num::NonZeroU64,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use testguest::{Backing, Config, Fill, Guest, Kind, Memory, PAGE, Pattern, fill, kvm_available};
use vm_memory::{MmapRegion, VolatileMemory};

const MEMORY: u64 = 16 << 20;

#[test]
fn guest_writes_in_its_pattern_and_verifies() {
    for kind in kinds() {
        for pattern in [Pattern::Sequential, Pattern::Random] {
            for vcpus in [1, 2, 7] {
                let config = Config {
                    pattern,
                    vcpus,
                    ..config(kind)
                };
                fill(&config.memory, Fill::Mixed);
                let guest = Guest::new(&config).unwrap();
                assert_eq!(guest.verify().unwrap().writes, 0);
                let before = pages(&config.memory);
                run_for(&guest, 5000);
                let proof = guest.verify().unwrap();
                assert_eq!(proof.writes, guest.written());
                assert_eq!(proof.sums.len(), usize::from(vcpus));
                let after = pages(&config.memory);
                let changed: BTreeSet<_> = (0..after.len())
                    .filter(|page| before[*page] != after[*page])
                    .collect();
                let all = writable(&config);
                let expected = match pattern {
                    // 5000 writes reach each of 4096 pages, if one vCPU does them all, and most at random.
                    Pattern::Sequential if vcpus == 1 => all.len()..=all.len(),
                    Pattern::Sequential => 5000 / 7..=all.len(),
                    Pattern::Random => all.len() * 6 / 10..=all.len(),
                };
                let what = format!("{kind:?} {pattern:?} {vcpus}: {} pages", changed.len());
                assert!(expected.contains(&changed.len()), "{what}");
                assert!(changed.first() >= Some(&all.start), "{what}");
            }
        }
    }
}

#[test]
fn guest_writes_only_its_working_set() {
    for kind in kinds() {
        // Across the border of the two blocks.
        let working_set = (4 << 20) - 3 * PAGE..(4 << 20) + 4 * PAGE;
        let mut config = config(kind);
        config.working_set = Some(working_set.clone());
        let guest = Guest::new(&config).unwrap();
        let before = pages(&config.memory);
        run_for(&guest, 1000);
        guest.verify().unwrap();
        let after = pages(&config.memory);
        let changed: Vec<_> = (0..after.len())
            .filter(|page| before[*page] != after[*page])
            .collect();
        let expected: Vec<_> = page_numbers(&working_set).collect();
        assert_eq!(changed, expected, "{kind:?}");
    }
}

#[test]
fn a_paused_guest_does_not_write() {
    for kind in kinds() {
        let config = Config {
            vcpus: 3,
            ..config(kind)
        };
        let guest = Guest::new(&config).unwrap();
        for round in 0..20 {
            run_for(&guest, 10 * round);
            let written = guest.written();
            let before = pages(&config.memory);
            thread::yield_now();
            assert!(before == pages(&config.memory), "{kind:?}, round {round}");
            assert_eq!(guest.written(), written);
            assert_eq!(guest.verify().unwrap().writes, written);
        }
    }
}

#[test]
fn a_guest_continues_in_the_memory_it_was_moved_to() {
    for kind in kinds() {
        for pattern in [Pattern::Sequential, Pattern::Random] {
            let mut here = Config {
                pattern,
                vcpus: 2,
                ..config(kind)
            };
            fill(&here.memory, Fill::Mixed);
            let mut guest = Guest::new(&here).unwrap();
            let mut writes = 0;
            for hop in 0..4 {
                run_for(&guest, 800);
                let there = Config {
                    memory: Memory::new([Backing::Anonymous, Backing::Memfd][hop % 2], MEMORY)
                        .unwrap(),
                    ..here.clone()
                };
                let destination = Guest::incoming(&there).unwrap();
                copy(&here.memory, &there.memory, |_| true);
                destination.load(&guest.save().unwrap()).unwrap();
                let proof = destination.verify().unwrap();
                assert_eq!(
                    proof,
                    guest.verify().unwrap(),
                    "{kind:?} {pattern:?}, hop {hop}"
                );
                assert_eq!(proof.writes, destination.written());
                assert!(proof.writes >= writes + 800);
                // It stays a guest that could go on here.
                run_for(&guest, 100);
                guest.verify().unwrap();
                (here, guest, writes) = (there, destination, proof.writes);
            }
            run_for(&guest, 800);
            guest.verify().unwrap();
        }
    }
}

#[test]
fn one_page_lost_old_or_elsewhere_is_noticed_at_once_and_later() {
    for kind in kinds() {
        for how in ["lost", "old", "elsewhere"] {
            let sequential = || Config {
                pattern: Pattern::Sequential,
                ..config(kind)
            };
            let (here, there) = (sequential(), sequential());
            let guest = Guest::new(&here).unwrap();
            run_for(&guest, 3500);
            copy(&here.memory, &there.memory, |page| {
                how != "lost" || page != 3000
            });
            let mut old = page(&here.memory, 3000);
            if how == "old" {
                // Until it is written again.
                while page(&here.memory, 3000) == old {
                    run_for(&guest, 500);
                }
                copy(&here.memory, &there.memory, |page| page != 3000);
            }
            if how == "elsewhere" {
                let other = page(&there.memory, 2999);
                set_page(&there.memory, 3000, &other);
                set_page(&there.memory, 2999, &old);
                old = other;
            }
            let destination = Guest::incoming(&there).unwrap();
            destination.load(&guest.save().unwrap()).unwrap();
            assert!(is_wrong(&destination), "{kind:?} {how}");
            run_for(&destination, MEMORY / PAGE);
            assert!(is_wrong(&destination), "{kind:?} {how}, later");
            assert_ne!(old, page(&there.memory, 3000));
        }
    }
}

#[test]
fn a_rate_is_not_exceeded() {
    for kind in kinds() {
        for (rate, vcpus, writes) in [(50_000, 1, 2000), (5000, 3, 500), (100, 8, 8)] {
            let config = Config {
                rate: NonZeroU64::new(rate),
                vcpus,
                ..config(kind)
            };
            let guest = Guest::new(&config).unwrap();
            let started = Instant::now();
            run_for(&guest, writes);
            // Each vCPU may be 10 ms behind and catch up, and be in a batch of 5 ms or one write.
            let most = rate as f64 * (started.elapsed().as_secs_f64() + 0.015) + f64::from(vcpus);
            let written = guest.written();
            assert!(written as f64 <= most, "{kind:?}: {written} of {most}");
            guest.verify().unwrap();
        }
    }
}

#[test]
fn a_throttled_guest_goes_on_and_stops_at_once() {
    for kind in kinds() {
        let guest = Guest::new(&config(kind)).unwrap();
        assert_eq!(guest.throttled(), 0);
        guest.throttle(50);
        run_for(&guest, 1000);
        guest.throttle(250);
        assert_eq!(guest.throttled(), 99);
        run_for(&guest, 50);
        guest.verify().unwrap();
    }
}

#[test]
fn methods_fail_in_the_wrong_state() {
    for kind in kinds() {
        let config = config(kind);
        let guest = Guest::new(&config).unwrap();
        let state = guest.save().unwrap();
        is_refused(guest.load(&state), "does not wait for a state");
        guest.resume().unwrap();
        assert!(guest.is_running());
        is_refused(guest.save(), "is running");
        is_refused(guest.verify(), "is running");
        guest.pause();
        assert!(!guest.is_running());
        drop(guest);

        let waiting = Guest::incoming(&config).unwrap();
        is_refused(waiting.resume(), "waits for its state");
        is_refused(waiting.save(), "waits for its state");
        is_refused(waiting.verify(), "waits for its state");
        waiting.pause();
        assert!(!waiting.is_running());
    }
}

#[test]
fn a_running_guest_can_be_dropped_and_leaves_its_memory_alone() {
    for kind in kinds() {
        let config = Config {
            vcpus: 4,
            ..config(kind)
        };
        let guest = Guest::new(&config).unwrap();
        guest.throttle(90);
        guest.resume().unwrap();
        drop(guest);
        let before = pages(&config.memory);
        thread::yield_now();
        assert!(before == pages(&config.memory));
        let names = config
            .memory
            .blocks()
            .iter()
            .map(|block| Arc::strong_count(block.region()));
        assert_eq!(
            names.collect::<Vec<_>>(),
            [1, 1],
            "nobody else holds the memory"
        );
    }
}

#[test]
fn another_guests_state_is_refused_by_name() {
    for kind in kinds() {
        let like = || Config {
            vcpus: 2,
            ..config(kind)
        };
        let state = Guest::new(&like()).unwrap().save().unwrap();
        let others = [
            Config { vcpus: 1, ..like() },
            Config {
                pattern: Pattern::Sequential,
                ..like()
            },
            Config {
                working_set: Some(8 << 20..9 << 20),
                ..like()
            },
            Config {
                memory: Memory::new(Backing::Anonymous, MEMORY + PAGE).unwrap(),
                ..like()
            },
            Config {
                memory: regions(&[("ram.low", 8 << 20), ("ram.high", 8 << 20)]),
                ..like()
            },
            Config {
                memory: regions(&[("ram.low", 4 << 20), ("ram.top", 12 << 20)]),
                ..like()
            },
        ];
        for other in others {
            let loaded = Guest::incoming(&other).unwrap().load(&state);
            is_refused(loaded, "saved from the guest");
        }
        // The rate is the host's business.
        let same = Config {
            rate: NonZeroU64::new(7),
            ..like()
        };
        Guest::incoming(&same).unwrap().load(&state).unwrap();
    }
    if kvm() {
        let state = Guest::new(&config(Kind::Threads)).unwrap().save().unwrap();
        let loaded = Guest::incoming(&config(Kind::Kvm)).unwrap().load(&state);
        is_refused(loaded, "saved from the guest");
    }
}

#[test]
fn a_state_without_the_guests_code_in_memory_is_refused() {
    if !kvm() {
        return;
    }
    let here = config(Kind::Kvm);
    let there = config(Kind::Kvm);
    let guest = Guest::new(&here).unwrap();
    run_for(&guest, 100);
    let destination = Guest::incoming(&there).unwrap();
    set_page(&there.memory, 0, &[0; PAGE as usize]);
    let state = guest.save().unwrap();
    is_refused(destination.load(&state), "the memory at 0x0");
    copy(&here.memory, &there.memory, |_| true);
    destination.load(&state).unwrap();
    destination.verify().unwrap();
    is_refused(destination.load(&state), "does not wait for a state");
}

#[test]
fn the_slots_of_a_kvm_guest_are_its_blocks() {
    let threads = Guest::new(&config(Kind::Threads)).unwrap();
    assert!(threads.vm_fd().is_none());
    assert!(threads.slots().is_empty());
    if !kvm() {
        return;
    }
    let guest = Guest::new(&config(Kind::Kvm)).unwrap();
    assert!(guest.vm_fd().is_some());
    let blocks = guest.memory().blocks();
    assert_eq!(guest.slots().len(), blocks.len());
    for (slot, block) in guest.slots().iter().zip(blocks) {
        assert_eq!(slot.len, block.region().size() as u64);
        assert_eq!(slot.host_address, block.region().as_ptr().addr() as u64);
        assert_eq!(blocks[slot.block].name(), block.name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn one_bit_of_any_word_is_noticed(page in 0_u64..64, byte in 0..PAGE, bit in 0_u8..8) {
        // One vCPU has all the words.
        let memory = Memory::new(Backing::Anonymous, 64 * PAGE).unwrap();
        let guest = Guest::new(&Config::new(Kind::Threads, memory.clone())).unwrap();
        run_for(&guest, 100);
        guest.verify().unwrap();
        let mut bytes = self::page(&memory, page);
        bytes[byte as usize] ^= 1 << bit;
        set_page(&memory, page, &bytes);
        prop_assert!(is_wrong(&guest));
        bytes[byte as usize] ^= 1 << bit;
        set_page(&memory, page, &bytes);
        prop_assert!(guest.verify().is_ok());
    }

    #[test]
    fn only_an_unchanged_state_is_loaded(
        noise in prop::collection::vec(any::<u8>(), 0..200),
        cut in any::<prop::sample::Index>(),
        flip in any::<prop::sample::Index>(),
        bit in 0_u8..8,
    ) {
        for kind in kinds() {
            let config = Config { vcpus: 2, ..config(kind) };
            let state = Guest::new(&config).unwrap().save().unwrap();
            let guest = Guest::incoming(&config).unwrap();
            prop_assert!(guest.load(&noise).is_err());
            prop_assert!(guest.load(&state[..cut.index(state.len())]).is_err());
            let mut flipped = state.clone();
            flipped[flip.index(state.len())] ^= 1 << bit;
            prop_assert!(guest.load(&flipped).is_err());
            prop_assert!(guest.load(&[&state[..], &noise[..], &[0]].concat()).is_err());
            prop_assert!(guest.load(&[&state[..8], &noise[..]].concat()).is_err());
            guest.load(&state).unwrap();
        }
    }
}

/// Expects an error that says `why`.
fn is_refused<T>(result: anyhow::Result<T>, why: &str) {
    let error = result.err().unwrap();
    assert!(error.to_string().contains(why), "{error}");
}

/// Every kind that this host has.
fn kinds() -> Vec<Kind> {
    let mut kinds = vec![Kind::Threads];
    if kvm() {
        kinds.push(Kind::Kvm);
    }
    kinds
}

/// Whether there is KVM. Without, says so.
fn kvm() -> bool {
    let Err(reason) = kvm_available() else {
        return true;
    };
    lab::skipped(&format!("no KVM: {reason}")).unwrap();
    false
}

fn config(kind: Kind) -> Config {
    let memory = Memory::new(Backing::Anonymous, MEMORY).unwrap();
    assert_eq!(memory.blocks().len(), 2);
    Config::new(kind, memory)
}

fn regions(blocks: &[(&str, usize)]) -> Memory {
    let regions = blocks
        .iter()
        .map(|(name, len)| ((*name).to_owned(), Arc::new(MmapRegion::new(*len).unwrap())));
    Memory::from_regions(regions.collect()).unwrap()
}

/// Lets it write at least `writes` more pages.
fn run_for(guest: &Guest, writes: u64) {
    let until = guest.written() + writes;
    guest.resume().unwrap();
    while guest.written() < until {
        assert!(guest.failure().is_none(), "{:?}", guest.failure());
        thread::sleep(Duration::from_micros(100));
    }
    guest.pause();
}

fn is_wrong(guest: &Guest) -> bool {
    match guest.verify() {
        Err(error) if error.to_string().contains("have the sum") => true,
        Ok(_) => false,
        Err(error) => panic!("{error}"),
    }
}

/// The numbers of the pages that a guest without a working set of its own writes.
fn writable(config: &Config) -> Range<usize> {
    let reserved = match config.kind {
        Kind::Kvm => 4,
        Kind::Threads => 0,
    };
    reserved..usize::try_from(config.memory.len() / PAGE).unwrap()
}

fn page_numbers(range: &Range<u64>) -> impl Iterator<Item = usize> + use<> {
    (range.start / PAGE..range.end / PAGE).map(|page| usize::try_from(page).unwrap())
}

fn pages(memory: &Memory) -> Vec<Vec<u8>> {
    (0..memory.len() / PAGE)
        .map(|number| page(memory, number))
        .collect()
}

fn page(memory: &Memory, number: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE as usize];
    at(memory, number, |slice| {
        slice.copy_to(&mut bytes);
    });
    bytes
}

fn set_page(memory: &Memory, number: u64, bytes: &[u8]) {
    at(memory, number, |slice| slice.copy_from(bytes));
}

fn copy(from: &Memory, to: &Memory, wanted: impl Fn(u64) -> bool) {
    for number in (0..from.len() / PAGE).filter(|number| wanted(*number)) {
        set_page(to, number, &page(from, number));
    }
}

fn at<T>(memory: &Memory, page: u64, f: impl FnOnce(vm_memory::VolatileSlice<'_>) -> T) -> T {
    let address = page * PAGE;
    let block = memory
        .blocks()
        .iter()
        .find(|block| block.range().contains(&address))
        .unwrap();
    let offset = usize::try_from(address - block.range().start).unwrap();
    f(block.region().get_slice(offset, PAGE as usize).unwrap())
}
