//! What each of DSA's operations does, against the obvious way to do it.

use idxd::{Descriptor, Flags, opcode};
use proptest::prelude::*;

use super::{Outcome, execute};
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
            now: 0,
            block: false,
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
}
