//! Behaviours 5, 6, 9 and 16: memory that is not there, or not the same.

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
fn what_is_read_only_faults_on_writes_only() {
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

/// The first queue of a DSA as `change` makes it.
fn changed(change: impl FnOnce(&mut QueueConfig)) -> Model {
    let mut config = Config::dsa();
    change(config.queue_mut(0, 0).unwrap());
    Model::deterministic(&config)
}

/// The last 64 bytes of a page, where a record can be. A device writes to them.
fn record_in(memory: &Memory) -> Descriptor {
    let unused = Record::default();
    Descriptor {
        record: memory.address() + PAGE - 64,
        ..noop(&unused)
    }
}

#[test]
fn what_is_missing_under_a_record_is_waited_for() {
    let late = Duration::from_millis(3);
    for (prs_disable, page, is_written) in [
        (false, Page::Resolvable(late), true),
        (true, Page::Resolvable(late), false),
        (false, Page::Absent, false),
    ] {
        let model = changed(|queue| queue.prs_disable = prs_disable);
        let queue = model.queue(0, 0, PortalKind::Enqcmd);
        let (memory, never) = (Memory::new(1, 0), Record::default());
        model.pages().set(memory.address(), 1, page);
        // It does not ask to wait.
        accepted(&queue, &[record_in(&memory)]);
        let status = || memory.bytes()[4096 - 64];
        assert_eq!(wait(&queue, &never, late / 2), None);
        assert_eq!(status(), 0);
        assert_eq!(wait(&queue, &never, late), None);
        assert_eq!(status(), u8::from(is_written));
        assert_eq!(model.error_latched(0), !is_written);
    }
}

#[test]
fn what_is_missing_under_a_list_is_waited_for() {
    let late = Duration::from_millis(3);
    for (prs_disable, page, status) in [
        (false, Page::Resolvable(late), 1),
        (true, Page::Resolvable(late), 6),
        (false, Page::Absent, 6),
    ] {
        let model = changed(|queue| queue.prs_disable = prs_disable);
        let queue = model.queue(0, 0, PortalKind::Enqcmd);
        // Descriptors of zeros are NOOPs without records.
        let (memory, record) = (Memory::new(2, 0), Record::default());
        model.pages().set(memory.address() + PAGE, 1, page);
        let parent = Descriptor {
            address_1: memory.address() + PAGE - 128,
            size: 4,
            ..descriptor(opcode::BATCH, &record)
        };
        let image = run(&queue, &parent, &record);
        assert_eq!(image.status(), status);
        assert_eq!(image.completed(), if status == 1 { 4 } else { 2 });
        assert_eq!(queue.now() >= late, status == 1);
    }
}

#[test]
fn a_page_is_there_for_so_many_accesses() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record) = (Memory::new(1, 0), Record::default());
    model
        .pages()
        .set(memory.address(), 4096, Page::FlipsAfter(2));
    let statuses: Vec<_> = (0..3)
        .map(|_| run(&queue, &is_zero(memory.address(), 4096, &record), &record).status())
        .collect();
    assert_eq!(statuses, [1, 1, 3]);
}

fn blocking() -> Config {
    let mut config = Config::dsa();
    config.limits_mut(0, 0).unwrap().block_on_fault = true;
    config
}

#[test]
fn who_blocks_on_a_fault_waits_and_the_others_behind() {
    let mut config = blocking();
    config.devices[0].groups[0].engines = 1;
    let model = Model::deterministic(&config);
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, records) = (Memory::new(2, 0), records(2));
    let wait = Duration::from_millis(3);
    model
        .pages()
        .set(memory.address(), 1, Page::Resolvable(wait));
    let first = with(
        is_zero(memory.address(), 8192, &records[0]),
        Flags::BLOCK_ON_FAULT,
    );
    accepted(&queue, &[first, noop(&records[1])]);
    assert_eq!(complete(&queue, &records[1]).status(), 1);
    assert!(queue.now() >= wait);
    assert_eq!(complete(&queue, &records[0]).status(), 1);
}

#[test]
fn who_blocks_in_vain_is_told_so() {
    let model = Model::deterministic(&blocking());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record) = (Memory::new(2, 0), Record::default());
    model.pages().set(memory.address() + PAGE, 1, Page::Absent);
    let zero = with(
        is_zero(memory.address(), 8192, &record),
        Flags::BLOCK_ON_FAULT,
    );
    let image = run(&queue, &zero, &record);
    assert_eq!((image.status(), image.completed()), (4, 4096));
    let write = with(
        fill(0, memory.address(), 8192, &record),
        Flags::BLOCK_ON_FAULT,
    );
    assert_eq!(run(&queue, &write, &record).status(), 0x84);
    // Who does not block, on the same queue.
    assert_eq!(
        run(&queue, &is_zero(memory.address(), 8192, &record), &record).status(),
        3
    );
}

#[test]
fn a_resolvable_page_comes_for_who_does_not_block_too() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record, never) = (Memory::new(1, 0), Record::default(), Record::default());
    model.pages().set(
        memory.address(),
        1,
        Page::Resolvable(Duration::from_millis(1)),
    );
    assert_eq!(
        run(&queue, &is_zero(memory.address(), 4096, &record), &record).status(),
        3
    );
    assert_eq!(wait(&queue, &never, Duration::from_millis(2)), None);
    assert_eq!(
        run(&queue, &is_zero(memory.address(), 4096, &record), &record).status(),
        1
    );
}

#[test]
fn blocking_where_the_queue_does_not_is_an_invalid_flag() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    let memory = Memory::new(1, 0);
    let zero = with(
        is_zero(memory.address(), 4096, &record),
        Flags::BLOCK_ON_FAULT,
    );
    let image = run(&queue, &zero, &record);
    assert_eq!((image.status(), image.words[2] & 0xffff_ffff), (0x11, 2));
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
    assert!(model.error_latched(0));

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
fn a_record_that_is_not_requested_is_for_errors_only() {
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
    assert!(model.error_latched(0));
}

#[test]
fn memory_changes_under_the_device() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record) = (Arc::new(Memory::new(2, 0)), Record::default());
    let guest = Arc::clone(&memory);
    // The first page has been read when the guest writes to both.
    model
        .pages()
        .before_access(memory.address() + PAGE, move || {
            guest.set(0, 1);
            guest.set(8191, 1);
        });
    let image = run(&queue, &is_zero(memory.address(), 8192, &record), &record);
    assert_eq!(
        (image.status(), image.result(), image.completed()),
        (1, 1, 8191)
    );
}
