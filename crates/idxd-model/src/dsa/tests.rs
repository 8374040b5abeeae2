//! What each of DSA's operations does, against the obvious way to do it.

use fastrand::Rng;
use idxd::{Descriptor, Flags, opcode};
use proptest::prelude::*;

use super::{Outcome, execute};
use crate::{
    config::Work,
    memory::{Fault, Memory},
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
    let mut random = Rng::with_seed(7);
    (0..length).map(|_| random.u8(..)).collect()
}

/// `bytes` lie at `base`; accesses elsewhere fault.
struct Fake {
    base: u64,
    bytes: Vec<u8>,
}

impl Fake {
    fn range(
        &self,
        address: u64,
        length: usize,
        write: bool,
    ) -> (std::ops::Range<usize>, Result<(), Fault>) {
        let start = usize::try_from(address.wrapping_sub(self.base))
            .unwrap()
            .min(self.bytes.len());
        let end = (start + length).min(self.bytes.len());
        let done = end - start;
        let fault = Fault {
            done,
            address: address + done as u64,
            write,
        };
        (start..end, if done == length { Ok(()) } else { Err(fault) })
    }
}

impl Memory for Fake {
    fn read(&mut self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        let (range, result) = self.range(address, buffer.len(), false);
        buffer[..range.len()].copy_from_slice(&self.bytes[range]);
        result
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let (range, result) = self.range(address, bytes.len(), true);
        let length = range.len();
        self.bytes[range].copy_from_slice(&bytes[..length]);
        result
    }
}

proptest! {
    #[test]
    fn moves_are_moves(from in 0usize..9000, to in 0usize..1000, size in 1usize..9000) {
        let before = noise(30_000);
        let mut expected = before.clone();
        let to = 20_000 + to;
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
