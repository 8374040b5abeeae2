//! What each of DSA's operations does, against the obvious way to do it.

use idxd::{Descriptor, Flags, opcode};
use proptest::prelude::*;

use super::{Outcome, TRANSLATION_FETCH, execute};
use crate::{
    config::Work,
    memory::{Pages, View, fake::Fake},
    random::Random,
};

const BASE: u64 = 0x10_0000;

fn on(bytes: Vec<u8>, descriptor: Descriptor) -> (Outcome, Vec<u8>) {
    let mut memory = Fake { base: BASE, bytes };
    let outcome = execute(&descriptor, &mut memory, &Work::All);
    (outcome, memory.bytes)
}

fn plain(opcode: u8) -> Descriptor {
    Descriptor {
        control: Descriptor::control_of(opcode, Flags(0)),
        ..Descriptor::default()
    }
}

fn noise(length: usize) -> Vec<u8> {
    let mut random = Random::new(7);
    (0..length)
        .map(|_| random.next().to_le_bytes()[0])
        .collect()
}

/// The usual CRC-32C, bit by bit.
fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    let mut sum = !seed;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !sum
}

#[test]
fn crcs_are_castagnoli_s() {
    assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
    let crc = Descriptor {
        address_1: BASE,
        size: 9,
        ..plain(opcode::CRC)
    };
    assert_eq!(on(b"123456789".to_vec(), crc).0.extra, Some(0xe306_9283));
}

#[test]
fn an_overlapping_move_can_be_taken_up_again_after_a_fault() {
    let (from, to, size) = (BASE + 100, BASE + 1100, 20_000);
    let before = noise(32_768);
    let mut expected = before.clone();
    expected.copy_within(100..20_100, 1100);
    // Wherever it faults, for reading or writing: the rest is done with the size that is left.
    for (bad, write) in [
        (from + 7000, false),
        (from, false),
        (to + 13_000, true),
        (to + 19_999, true),
    ] {
        let pages = Pages::default();
        let mut memory = before.clone();
        let start = memory.as_mut_ptr().expose_provenance() as u64;
        let here = |address: u64| start + (address - BASE);
        let mut view = View {
            pages: &pages,
            residency: None,
            now: 0,
            block: false,
            loses_writes: false,
            injected: Some((here(bad), write)),
            stalled: 0,
        };
        let copy = Descriptor {
            address_1: here(from),
            address_2: here(to),
            size,
            ..plain(opcode::MEMMOVE)
        };
        let outcome = execute(&copy, &mut view, &Work::All);
        assert_eq!(outcome.status, if write { 0x83 } else { 3 });
        assert_eq!(outcome.result, 1);
        view.injected = None;
        let rest = Descriptor {
            size: size - outcome.completed.unwrap(),
            ..copy
        };
        assert_eq!(execute(&rest, &mut view, &Work::All).status, 1);
        // The kernel has written it.
        assert!(*std::hint::black_box(&mut memory) == expected);
    }
}

#[test]
fn a_delta_that_goes_backward_or_beyond_is_refused() {
    let entry = |word: u16| [&word.to_le_bytes()[..], &[9; 8]].concat();
    let apply = |words: [u16; 2]| {
        let mut bytes = vec![0; 4096];
        let record = [entry(words[0]), entry(words[1])].concat();
        bytes[..20].copy_from_slice(&record);
        let apply = Descriptor {
            address_1: BASE,
            address_2: BASE + 1024,
            size: 64,
            operands: [20, 0, 0],
            ..plain(opcode::APPLY_DELTA)
        };
        on(bytes, apply).0.status
    };
    assert_eq!(apply([0, 7]), 1);
    assert_eq!(apply([3, 3]), 7);
    assert_eq!(apply([5, 3]), 7);
    assert_eq!(apply([0, 8]), 8);
}

#[test]
fn expected_results_are_checked() {
    let expecting = |expected: u64| {
        let control = Descriptor::control_of(opcode::COMPARE_PATTERN, Flags::CHECK_RESULT);
        let zero = Descriptor {
            control,
            address_1: BASE,
            size: 8,
            operands: [expected, 0, 0],
            ..Descriptor::default()
        };
        on(vec![0; 8], zero).0.status
    };
    assert_eq!((expecting(0), expecting(1)), (1, 2));
    // Only bit 0 counts.
    assert_eq!((expecting(0xfe), expecting(0xff)), (1, 2));
}

#[test]
fn a_delta_that_faults_reports_whether_any_of_it_was_written() {
    // Of the second source, the second page is missing. The delta lies before both.
    let create = |differs: bool| {
        let mut bytes = vec![0; 1024 + 2 * 4096];
        bytes[1024 + 4096] = u8::from(differs);
        let create = Descriptor {
            address_1: BASE + 1024,
            address_2: BASE + 1024 + 4096,
            size: 8192,
            operands: [BASE, 80, 0],
            ..plain(opcode::CREATE_DELTA)
        };
        on(bytes, create).0
    };
    for differs in [false, true] {
        let outcome = create(differs);
        assert_eq!((outcome.status, outcome.completed), (3, Some(4096)));
        assert_eq!(outcome.result, u8::from(differs));
        assert_eq!(outcome.extra, Some(if differs { 10 } else { 0 }));
    }
}

#[test]
fn translations_of_missing_pages_cannot_be_fetched() {
    let fetch = |address_1, size, stride| {
        let fetch = Descriptor {
            address_1,
            size,
            operands: [0, stride, 0],
            ..plain(TRANSLATION_FETCH)
        };
        let outcome = on(vec![0; 3 * 4096], fetch).0;
        (outcome.status, outcome.completed)
    };
    assert_eq!(fetch(BASE, 3 * 4096, 0), (1, None));
    assert_eq!(fetch(BASE + 100, 3 * 4096 - 100, 64), (1, None));
    // Its last byte is on the page behind.
    assert_eq!(
        fetch(BASE + 100, 3 * 4096 - 99, 0),
        (3, Some(3 * 4096 - 100))
    );
    // With every second page the missing one is not looked at.
    assert_eq!(fetch(BASE, 4 * 4096, 2 * 4096), (1, None));
}

proptest! {
    #[test]
    fn moves_are_moves(from in 0usize..9000, to in 0usize..9000, size in 1usize..9000) {
        let before = noise(18_000);
        let mut expected = before.clone();
        expected.copy_within(from..from + size, to);
        let copy = Descriptor {
            address_1: BASE + from as u64,
            address_2: BASE + to as u64,
            size: u32::try_from(size).unwrap(),
            ..plain(opcode::MEMMOVE)
        };
        let (outcome, after) = on(before, copy);
        prop_assert_eq!(outcome.status, 1);
        prop_assert!(after == expected);
    }

    #[test]
    fn fills_fill(to in 0usize..100, size in 1usize..9000, pattern: u64) {
        let fill = Descriptor {
            address_1: pattern,
            address_2: BASE + to as u64,
            size: u32::try_from(size).unwrap(),
            ..plain(opcode::FILL)
        };
        let (outcome, after) = on(vec![0; 9100], fill);
        prop_assert_eq!(outcome.status, 1);
        let bytes = pattern.to_le_bytes();
        for (at, byte) in after.iter().enumerate() {
            let inside = at >= to && at < to + size;
            prop_assert_eq!(*byte, if inside { bytes[(at - to) % 8] } else { 0 });
        }
    }

    #[test]
    fn comparisons_find_the_first_difference(size in 1usize..9000, differs in proptest::option::of(0usize..9000)) {
        let mut bytes = noise(size);
        bytes.extend(noise(size));
        let differs = differs.filter(|at| *at < size);
        if let Some(at) = differs {
            bytes[size + at] ^= 1;
        }
        let compare = Descriptor {
            address_1: BASE,
            address_2: BASE + size as u64,
            size: u32::try_from(size).unwrap(),
            ..plain(opcode::COMPARE)
        };
        let (outcome, _) = on(bytes, compare);
        prop_assert_eq!(outcome.status, 1);
        prop_assert_eq!(outcome.result, u8::from(differs.is_some()));
        prop_assert_eq!(outcome.completed, Some(u32::try_from(differs.unwrap_or(0)).unwrap()));
    }

    #[test]
    fn patterns_are_compared_with_every_byte(size in 1usize..9000, pattern: u64, differs in proptest::option::of(0usize..9000)) {
        let mut bytes: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(size).collect();
        let differs = differs.filter(|at| *at < size);
        if let Some(at) = differs {
            bytes[at] ^= 1;
        }
        let compare = Descriptor {
            address_1: BASE,
            address_2: pattern,
            size: u32::try_from(size).unwrap(),
            ..plain(opcode::COMPARE_PATTERN)
        };
        let (outcome, _) = on(bytes, compare);
        prop_assert_eq!(outcome.result, u8::from(differs.is_some()));
        prop_assert_eq!(outcome.completed, Some(u32::try_from(differs.unwrap_or(0)).unwrap()));
    }

    #[test]
    fn deltas_make_one_buffer_the_other(changes in proptest::collection::vec(0usize..1024, 0..40)) {
        let old = noise(8192);
        let mut new = old.clone();
        for word in &changes {
            new[word * 8] ^= 1;
        }
        let bytes = [old.clone(), new.clone(), vec![0; 4000]].concat();
        let differing = old.chunks(8).zip(new.chunks(8)).filter(|(old, new)| old != new).count();
        let create = Descriptor {
            address_1: BASE,
            address_2: BASE + 8192,
            size: 8192,
            operands: [BASE + 16_384, 80, 0],
            ..plain(opcode::CREATE_DELTA)
        };
        let short = on(bytes.clone(), create).0;
        prop_assert_eq!(short.result, match differing { 0 => 0, 1..=8 => 1, _ => 2 });
        let create = Descriptor { operands: [BASE + 16_384, 400, 0], ..create };
        let (outcome, bytes) = on(bytes, create);
        prop_assert_eq!(outcome.result, u8::from(differing > 0));
        let size = outcome.extra.unwrap();
        prop_assert_eq!(size as usize, differing * 10);
        let apply = Descriptor {
            address_1: BASE + 16_384,
            address_2: BASE,
            size: 8192,
            operands: [u64::from(size), 0, 0],
            ..plain(opcode::APPLY_DELTA)
        };
        let (outcome, bytes) = on(bytes, apply);
        prop_assert_eq!(outcome.status, 1);
        prop_assert!(bytes[..8192] == new[..]);
    }

    #[test]
    fn crcs_go_on_where_they_stopped(size in 1usize..9000, seed: u32, missing in 1usize..9000) {
        let bytes = noise(size);
        let whole = Descriptor {
            address_1: BASE,
            address_2: BASE + 0x10_0000,
            size: u32::try_from(size).unwrap(),
            operands: [seed.into(), 0, 0],
            ..plain(opcode::CRC)
        };
        prop_assert_eq!(on(bytes.clone(), whole).0.extra, Some(crc32c(seed, &bytes)));
        let there = size - missing.min(size);
        let (outcome, _) = on(bytes[..there].to_vec(), whole);
        prop_assert_eq!(outcome.status, 3);
        prop_assert_eq!(outcome.completed, Some(u32::try_from(there).unwrap()));
        prop_assert_eq!(outcome.extra, Some(crc32c(seed, &bytes[..there])));
    }
}
