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
            assert_eq!(image.fault_address(), start + u64::from(byte));
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
    let zero = is_zero(memory.address(), 4096, &record);
    let quiet = Descriptor {
        control: Descriptor::control_of(zero.opcode(), Flags::RECORD_VALID),
        ..zero
    };
    accepted(&queue, &[quiet]);
    assert_eq!(wait(&queue, &record, TIMEOUT), None);
    model.pages().set(memory.address(), 1, Page::Absent);
    assert_eq!(run(&queue, &quiet, &record).status(), 3);
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
        (1, 1, 8184)
    );
}

/// A mapping of zeros that was never touched.
fn untouched(pages: usize) -> (u64, impl Drop) {
    struct Mapping(*mut std::ffi::c_void, usize);
    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: mapped below, and nothing else refers to it any more.
            unsafe { rustix::mm::munmap(self.0, self.1).unwrap() };
        }
    }
    let (protection, flags) = (
        rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
        rustix::mm::MapFlags::PRIVATE,
    );
    let length = pages * 4096;
    // SAFETY: a new mapping, wherever the kernel wants it.
    let at = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, flags).unwrap()
    };
    (at.expose_provenance() as u64, Mapping(at, length))
}

#[test]
fn memory_that_was_never_touched_faults_as_for_hardware() {
    let mut config = blocking();
    let (memory, mapping) = untouched(2);
    // By default it is zeros.
    let (model, record) = (Model::deterministic(&config), Record::default());
    let zero = is_zero(memory, 4096, &record);
    assert_eq!(
        run(&model.queue(0, 0, PortalKind::Enqcmd), &zero, &record).status(),
        1
    );
    drop(mapping);

    config.untouched_faults = true;
    let (memory, mapping) = untouched(2);
    let model = Model::deterministic(&config);
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let zero = is_zero(memory, 8192, &record);
    let status = run(&queue, &zero, &record).status();
    if std::fs::File::open("/proc/self/pagemap").is_ok() {
        assert_eq!(status, 3);
    }
    // Who blocks waits until the kernel has mapped it.
    assert_eq!(
        run(&queue, &with(zero, Flags::BLOCK_ON_FAULT), &record).status(),
        1
    );
    drop(mapping);
}
