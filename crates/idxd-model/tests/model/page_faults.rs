//! Memory that is not there.

use super::*;

#[test]
fn a_fault_can_be_at_every_byte_of_a_read_or_a_write() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (from, record) = (Memory::new(2, 7), Record::default());
    for write in [false, true] {
        for byte in [0, 1, 7, 8, 4095, 4096, 4097, 5000, 8191] {
            let to = Memory::new(2, 0);
            model.inject(
                On::any(),
                0,
                1,
                InjectedFault::PageFault {
                    at: At::Byte(byte),
                    write,
                    refused: false,
                },
            );
            let image = run(
                &queue,
                &copy(from.address(), to.address(), 8192, &record),
                &record,
            );
            assert_eq!(image.status(), if write { 0x83 } else { 0x03 });
            assert_eq!((image.completed(), image.result()), (byte, 0));
            let start = if write { to.address() } else { from.address() };
            assert!(is_at(&image, start + u64::from(byte)));
            let done = to.bytes().iter().filter(|byte| **byte == 7).count();
            assert_eq!(done, byte as usize);
        }
    }
}

#[test]
fn a_page_that_is_missing_faults_again_and_again() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record) = (Memory::new(3, 0), Record::default());
    model.pages().set(memory.address() + PAGE, 1, Page::Absent);
    let image = run(
        &queue,
        &is_zero(memory.address(), 3 << 12, &record),
        &record,
    );
    assert_eq!((image.status(), image.completed()), (3, 4096));
    for _ in 0..3 {
        // No progress at all.
        let image = run(
            &queue,
            &is_zero(memory.address() + PAGE, 4096, &record),
            &record,
        );
        assert_eq!((image.status(), image.completed()), (3, 0));
        assert_eq!(image.fault_address(), memory.address() + PAGE);
    }
    model.pages().set(memory.address() + PAGE, 1, Page::Present);
    assert_eq!(
        run(
            &queue,
            &is_zero(memory.address(), 3 << 12, &record),
            &record
        )
        .status(),
        1
    );
}

#[test]
fn read_only_pages_fault_on_writes_only() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record) = (Memory::new(2, 0), Record::default());
    model
        .pages()
        .set(memory.address() + PAGE, 4096, Page::ReadOnly);
    assert_eq!(
        run(&queue, &is_zero(memory.address(), 8192, &record), &record).status(),
        1
    );
    let image = run(&queue, &fill(1, memory.address(), 8192, &record), &record);
    assert_eq!((image.status(), image.completed()), (0x83, 4096));
}

#[test]
fn memory_that_the_process_does_not_have_is_a_fault_and_no_crash() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    for address in [0, 0x1000, u64::MAX - 0xfff] {
        let image = run(&queue, &is_zero(address, 64, &record), &record);
        assert_eq!((image.status(), image.completed()), (3, 0));
        assert_eq!(image.fault_address(), address);
    }
}

#[test]
fn a_fault_address_is_that_of_the_byte_or_of_its_page() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, memory, record) = (
        model.queue(0, 0, PortalKind::Enqcmd),
        Memory::new(1, 0),
        Record::default(),
    );
    let fault = InjectedFault::PageFault {
        at: At::Byte(1000),
        write: false,
        refused: false,
    };
    model.inject(On::any(), 0, 64, fault);
    let zero = is_zero(memory.address(), 4096, &record);
    let mut offsets: Vec<_> = (0..64)
        .map(|_| run(&queue, &zero, &record).fault_address() - memory.address())
        .collect();
    offsets.sort_unstable();
    offsets.dedup();
    assert_eq!(offsets, [0, 1000]);
}

#[test]
fn a_record_that_faults_comes_late_or_never() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record) = (Memory::new(1, 0), Record::default());
    let late = Duration::from_millis(100);
    model.inject(On::any(), 0, 1, InjectedFault::RecordLate(late));
    accepted(&queue, &[fill(1, memory.address(), 8, &record)]);
    assert_eq!(wait(&queue, &record, TIMEOUT), None);
    // The work is done all the same.
    assert_eq!(memory.bytes()[0], 1);
    assert_eq!(complete(&queue, &record).status(), 1);
    assert!(queue.now() >= late);

    record.clear();
    model.inject(On::any(), 0, 1, InjectedFault::RecordLost);
    accepted(&queue, &[fill(2, memory.address(), 8, &record)]);
    assert_eq!(wait(&queue, &record, Duration::from_secs(100)), None);
    assert_eq!(memory.bytes()[0], 2);

    // A record where nothing is.
    let nowhere = Descriptor {
        record: 0x1000,
        ..noop(&record)
    };
    accepted(&queue, &[nowhere]);
    assert_eq!(wait(&queue, &record, TIMEOUT), None);
    queue.close();
    assert_eq!(model.statistics().unrecorded, 2);
}

#[test]
fn without_a_request_only_errors_are_recorded() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    let memory = Memory::new(1, 0);
    let fill = fill(0, memory.address(), 4096, &record);
    let quiet = Descriptor {
        control: Descriptor::control_of(fill.opcode(), Flags::RECORD_VALID),
        ..fill
    };
    accepted(&queue, &[quiet]);
    assert_eq!(wait(&queue, &record, TIMEOUT), None);
    model.pages().set(memory.address(), 1, Page::Absent);
    assert_eq!(run(&queue, &quiet, &record).status(), 0x83);
}

#[test]
fn a_misaligned_record_is_never_written() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    accepted(
        &queue,
        &[Descriptor {
            record: record.address() + 8,
            ..noop(&record)
        }],
    );
    assert_eq!(wait(&queue, &record, TIMEOUT), None);
}
