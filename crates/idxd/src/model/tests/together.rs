//! The model behind the crate's own builders: it executes what they make, and its rules agree with theirs.

use proptest::prelude::*;

use super::*;
use crate::{
    Kind, iaa,
    iaa::CompressAecs,
    model::validate::validate,
    rules::{Place, check},
};

fn compress(memory: &Memory, out: &Memory, aecs: &CompressAecs, record: &Record) -> Descriptor {
    let compress = iaa::Compress {
        source: memory.address(),
        size: 4096,
        destination: out.address(),
        destination_size: 4096,
        aecs: aecs.address(),
        end: iaa::End::Block,
    };
    iaa::compress(compress, record.address()).descriptor()
}

fn decompress(from: &Memory, size: u32, to: &Memory, record: &Record) -> Descriptor {
    let decompress = iaa::Decompress {
        source: from.address(),
        size,
        destination: to.address(),
        destination_size: 4096,
    };
    iaa::decompress(decompress, record.address()).descriptor()
}

#[test]
fn a_page_goes_through_an_iaa_and_back() {
    let aecs = CompressAecs::fixed();
    let (page, packed, unpacked) = (Memory::new(1, 3), Memory::new(1, 0), Memory::new(1, 0));
    page.set(1000, 77);
    for model in
        [Model::deterministic, Model::timed, Model::threaded].map(|new| new(&Config::iaa()))
    {
        let (queue, record) = (model.queue(0, 0, Door::Enqcmd), Record::default());
        let image = run(&queue, &compress(&page, &packed, &aecs, &record), &record);
        let size = u32::try_from(image.words[3] & 0xffff_ffff).unwrap();
        assert!(image.status() == 1 && (1..200).contains(&size), "{image:?}");
        let image = run(
            &queue,
            &decompress(&packed, size, &unpacked, &record),
            &record,
        );
        assert_eq!((image.status(), image.words[3] & 0xffff_ffff), (1, 4096));
        assert_eq!(unpacked.bytes(), page.bytes());
        // DRAIN is the scheduler's.
        assert_eq!(
            run(&queue, &iaa::drain(record.address()).descriptor(), &record).status(),
            1
        );
    }
}

#[test]
fn an_iaa_corrupts_in_silence() {
    let aecs = CompressAecs::fixed();
    let (page, packed) = (Memory::varied(1), [Memory::new(2, 0), Memory::new(2, 0)]);
    let model = Model::deterministic(&Config::iaa());
    model.inject(On::any(), 1, 1, Mishap::Corrupt);
    let (queue, record) = (model.queue(0, 0, Door::Enqcmd), Record::default());
    for out in &packed {
        let compress = compress(&page, out, &aecs, &record);
        let roomy = Descriptor {
            operands: [compress.operands[0], compress.operands[1] + 4096, 0],
            ..compress
        };
        assert_eq!(run(&queue, &roomy, &record).status(), 1);
    }
    let [good, bad] = packed.map(|memory| memory.bytes());
    assert_eq!(
        good.iter()
            .zip(&bad)
            .filter(|(good, bad)| good != bad)
            .count(),
        1
    );
}

#[test]
fn an_iaa_faults_on_either_side() {
    let aecs = CompressAecs::fixed();
    let (page, packed, record) = (Memory::new(1, 3), Memory::new(1, 0), Record::default());
    let model = Model::deterministic(&Config::iaa());
    let queue = model.queue(0, 0, Door::Enqcmd);
    model.pages().set(page.address(), 1, Page::Absent);
    assert_eq!(
        run(&queue, &compress(&page, &packed, &aecs, &record), &record).status(),
        3
    );
    model.pages().set(page.address(), 1, Page::Present);
    model.pages().set(packed.address(), 1, Page::ReadOnly);
    assert_eq!(
        run(&queue, &compress(&page, &packed, &aecs, &record), &record).status(),
        0x83
    );
}

proptest! {
    #[test]
    fn two_tables_of_rules_agree(
        opcode in prop_oneof![0u8..0x12, Just(0x42), Just(0x44)],
        // A few flags at a time, rarely odd ones.
        flags in proptest::collection::vec(0u32..24, 0..3),
        sizes in proptest::collection::vec(prop_oneof![Just(0u32), Just(1), Just(2), Just(80), Just(4096), Just(4 << 20)], 2),
        addresses in proptest::collection::vec(prop_oneof![Just(0u64), Just(64), Just(0x10000), Just(0x20000), Just(0x20800), Just(0x30004)], 3),
        expected in 0u64..2,
        block: bool,
        member: bool,
    ) {
        let mut limits = Config::dsa().limits_mut(0, 0).unwrap().clone();
        prop_assume!(limits.kind == Kind::Dsa);
        limits.block_on_fault = block;
        let flags = flags.iter().fold(Flags::RECORD_VALID, |all, bit| all.with(Flags(1 << bit)));
        let descriptor = Descriptor {
            control: Descriptor::control_of(opcode, flags),
            record: 64,
            address_1: addresses[0],
            address_2: addresses[1],
            size: sizes[0],
            operands: [addresses[2], u64::from(sizes[1]), expected],
            ..Descriptor::default()
        };
        let place = if member { Place::Batch } else { Place::Queue };
        let ours = validate(&descriptor, &limits, member).map_err(|invalid| invalid.status);
        let theirs = check(&descriptor, &limits, place).map_err(|violation| violation.code());
        prop_assert_eq!(ours.is_ok(), theirs.is_ok(), "{:?} {:?} {:?}", ours, theirs, descriptor);
    }
}
