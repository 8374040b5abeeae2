//! The model behind the driver's own builders: it executes what they make.

use idxd::{
    dsa,
    iaa::{self, CompressAecs},
};

use super::*;

fn compress(memory: &Memory, out: &Memory, aecs: &CompressAecs, record: &Record) -> Descriptor {
    let compress = iaa::Compress {
        source: memory.address(),
        size: 4096,
        destination: out.address(),
        destination_size: 4096,
        aecs: aecs.address(),
    };
    iaa::compress(compress, record.address())
}

fn decompress(from: &Memory, size: u32, to: &Memory, record: &Record) -> Descriptor {
    let decompress = iaa::Decompress {
        source: from.address(),
        size,
        destination: to.address(),
        destination_size: 4096,
    };
    iaa::decompress(decompress, record.address())
}

#[test]
fn a_page_goes_through_an_iaa_and_back() {
    let aecs = CompressAecs::fixed();
    let (page, packed, unpacked) = (Memory::new(1, 3), Memory::new(1, 0), Memory::new(1, 0));
    page.set(1000, 77);
    for model in [Model::deterministic, Model::timed].map(|new| new(&Config::iaa())) {
        let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
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
            run(&queue, &dsa::drain(record.address()), &record).status(),
            1
        );
    }
}

#[test]
fn an_iaa_corrupts_in_silence() {
    let aecs = CompressAecs::fixed();
    let (page, packed) = (Memory::varied(1), [Memory::new(2, 0), Memory::new(2, 0)]);
    let model = Model::deterministic(&Config::iaa());
    model.inject(On::any(), 1, 1, InjectedFault::Corrupt);
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
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
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
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

#[test]
fn the_flags_that_are_wrong_are_in_the_record() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, record, memory) = (
        model.queue(0, 0, PortalKind::Enqcmd),
        Record::default(),
        Memory::new(1, 0),
    );
    let wrong = with(
        is_zero(memory.address(), 8, &record),
        Flags::CACHE.with(Flags(1)),
    );
    let image = run(&queue, &wrong, &record);
    assert_eq!(
        (image.status(), image.words[2] & 0xffff_ffff),
        (0x11, 0x101)
    );
}
