//! Devices that are slow, stuck, wrong, late, reset or gone.

use super::*;

#[test]
fn a_slow_device_is_slow() {
    let took = [1, 1000].map(|factor| {
        let config = config_with(Config::dsa(), |config| {
            config.speeds = Speeds::default().slower(factor);
        });
        let model = Model::deterministic(&config);
        let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
        let memory = Memory::new(16, 0);
        run(&queue, &is_zero(memory.address(), 65536, &record), &record);
        queue.now()
    });
    assert!(took[0] < Duration::from_micros(10), "{took:?}");
    assert!(took[1] > Duration::from_millis(3), "{took:?}");
}

#[test]
fn a_device_has_its_throughput_with_all_engines_together() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, memory, records) = (
        model.queue(0, 0, PortalKind::Enqcmd),
        Memory::new(256, 0),
        records(30),
    );
    let all: Vec<_> = records
        .iter()
        .map(|record| is_zero(memory.address(), 1 << 20, record))
        .collect();
    accepted(&queue, &all);
    queue.close();
    let expected = Duration::from_nanos(30 * (1 << 20) / 30);
    assert!(
        queue.now() >= expected && queue.now() < expected * 11 / 10,
        "{:?}",
        queue.now()
    );
}

#[test]
fn a_stuck_descriptor_never_completes_and_the_others_do() {
    let model = Model::deterministic(&Config::dsa());
    model.inject(On::any(), 1, 1, InjectedFault::Stuck);
    let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(8));
    accepted(&queue, &records.iter().map(noop).collect::<Vec<_>>());
    assert_eq!(wait(&queue, &records[1], Duration::from_secs(3600)), None);
    let done = records.iter().filter(|record| record.status() == 1).count();
    assert_eq!(done, 7);
    queue.close();
    assert_eq!((records[1].status(), model.statistics().aborted), (0, 1));
}

#[test]
fn a_stuck_engine_does_nothing_else() {
    let mut config = Config::dsa();
    config.devices[0].engines = 1;
    let model = Model::deterministic(&config);
    model.inject(On::any(), 1, 1, InjectedFault::StuckEngine);
    let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(3));
    accepted(&queue, &records.iter().map(noop).collect::<Vec<_>>());
    assert_eq!(wait(&queue, &records[2], Duration::from_secs(3600)), None);
    assert_eq!(records[0].status(), 1);
    // What is stuck goes when its queue is closed.
    queue.close();
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    assert_eq!(run(&queue, &noop(&records[2]), &records[2]).status(), 1);
}

#[test]
fn the_hardware_and_the_watchdog_report_errors() {
    for config in [Config::dsa(), Config::iaa()] {
        let model = Model::deterministic(&config);
        let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
        for status in [0x20, 0x22, 0x24] {
            model.inject(On::any(), 0, 1, InjectedFault::Status(status));
            assert_eq!(run(&queue, &noop(&record), &record).status(), status);
        }
    }
}

#[test]
fn a_device_that_is_reset_in_mid_run_forgets_everything() {
    let portals = [PortalKind::Enqcmd, PortalKind::Write];
    for (portal, steps) in portals
        .into_iter()
        .flat_map(|portal| (0..20).map(move |steps| (portal, steps)))
    {
        let model = Model::deterministic(&Config::dsa());
        let (queue, memory, records) = (model.queue(0, 0, portal), Memory::new(1, 0), records(16));
        let all: Vec<_> = records
            .iter()
            .map(|record| fill(1, memory.address(), 4096, record))
            .collect();
        accepted(&queue, &all);
        for _ in 0..steps {
            queue.pause(&records[15], Duration::from_secs(1));
        }
        model.reset(0);
        let statuses = || records.iter().map(Record::status).collect::<Vec<_>>();
        let before = statuses();
        let bytes = memory.bytes();
        memory.word(0).store(0, Ordering::Relaxed);
        assert_eq!(wait(&queue, &Record::default(), TIMEOUT), None);
        assert_eq!((statuses(), memory.bytes()[0]), (before, 0));
        drop(bytes);

        // It looks as if it were full; also when others use the device again.
        for _ in 0..2 {
            let refusal = submit(&queue, &all).refusal;
            assert!(matches!(refusal, Some(Refusal::Full)));
            model.enable(0);
        }
        let again = model.queue(0, 0, portal);
        assert_eq!(run(&again, &all[0], &records[0]).status(), 1);
        queue.close();
    }
}

#[test]
fn a_late_write_reaches_memory_that_was_reused_too_early() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, memory, records) = (
        model.queue(0, 0, PortalKind::Enqcmd),
        Memory::new(1, 0),
        records(2),
    );
    model.inject(On::any(), 0, 1, InjectedFault::Late(Duration::from_secs(1)));
    accepted(
        &queue,
        &[fill(u64::MAX, memory.address(), 4096, &records[0])],
    );
    // The engine continues.
    assert_eq!(run(&queue, &noop(&records[1]), &records[1]).status(), 1);
    assert_eq!(wait(&queue, &records[0], TIMEOUT), None);
    // Who uses the memory for something else now loses it.
    memory.word(0).store(42, Ordering::Relaxed);
    assert_eq!(
        wait(&queue, &Record::default(), Duration::from_secs(2)),
        None
    );
    assert_eq!((memory.bytes()[0], records[0].status()), (255, 1));
}

#[test]
fn nothing_is_written_after_the_queue_is_closed() {
    for model in [Model::deterministic, Model::timed].map(|new| new(&Config::dsa())) {
        let (queue, memory, records) = (
            model.queue(0, 0, PortalKind::Enqcmd),
            Memory::new(1, 0),
            records(4),
        );
        model.inject(
            On::any(),
            0,
            1,
            InjectedFault::Late(Duration::from_millis(20)),
        );
        model.inject(
            On::any(),
            0,
            1,
            InjectedFault::RecordLate(Duration::from_millis(20)),
        );
        model.inject(On::any(), 0, 1, InjectedFault::Stuck);
        model.inject(
            On::any(),
            0,
            1,
            InjectedFault::Slow(Duration::from_millis(20)),
        );
        let all: Vec<_> = records
            .iter()
            .map(|record| fill(1, memory.address(), 4096, record))
            .collect();
        accepted(&queue, &all);
        queue.close();
        // Late ones have come by now; the stuck one never will.
        assert_eq!(
            records.iter().filter(|record| record.status() == 1).count(),
            3
        );
        assert_eq!(model.statistics().aborted, 1);
    }
}

#[test]
fn corruption_changes_one_byte_and_reports_success() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    let (from, to) = (Memory::new(1, 5), Memory::new(1, 0));
    model.inject(On::any(), 0, 1, InjectedFault::Corrupt);
    assert_eq!(
        run(
            &queue,
            &copy(from.address(), to.address(), 4096, &record),
            &record
        )
        .status(),
        1
    );
    assert_eq!(to.bytes().iter().filter(|byte| **byte != 5).count(), 1);
}

#[test]
fn a_device_that_is_unplugged_is_gone() {
    for portal in [PortalKind::Enqcmd, PortalKind::Write] {
        let model = Model::deterministic(&Config::dsa());
        let (queue, record) = (model.queue(0, 0, portal), Record::default());
        accepted(&queue, &[noop(&record)]);
        model.unplug(0);
        assert_eq!(wait(&queue, &record, TIMEOUT), None);
        assert!(matches!(
            submit(&queue, &[noop(&record)]).refusal,
            Some(Refusal::System(_))
        ));
        model.enable(0);
        let refused = submit(&model.queue(0, 0, portal), &[noop(&record)]).refusal;
        assert!(matches!(refused, Some(Refusal::System(_))));
        queue.close();
    }
}

#[test]
fn a_missing_device_cannot_be_opened() {
    let model = Model::deterministic(&Config::dsa());
    let refused = |device, queue| {
        let queue = model.queue(device, queue, PortalKind::Enqcmd);
        matches!(
            submit(&queue, &[Descriptor::default()]).refusal,
            Some(Refusal::System(_))
        )
    };
    assert!(refused(1, 0) && refused(0, 1) && !refused(0, 0));
    model.reset(0);
    assert!(refused(0, 0));
}

#[test]
fn undefined_record_fields_are_noise() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    let images = [0, 1].map(|_| run(&queue, &noop(&record), &record));
    assert_ne!(images[0].fault_address(), images[1].fault_address());
    assert_ne!(images[0].completed(), images[1].completed());
    assert_eq!(images[0].words[0] & 0xffff, images[1].words[0] & 0xffff);
    // DSA's records end after 32 bytes.
    assert_eq!(images[0].words[4..], [0; 4]);
}

#[test]
fn an_oracle_can_stand_for_the_work() {
    let (memory, record) = (Memory::new(1, 0), Record::default());
    let zero = is_zero(memory.address(), 4096, &record);
    memory.set(2000, 1);
    let result = |work| {
        let model = Model::timed(&config_with(Config::dsa(), |config| {
            config.work = work;
        }));
        run(&model.queue(0, 0, PortalKind::Enqcmd), &zero, &record).result()
    };
    assert_eq!(result(Work::All), 1);
    assert_eq!(result(Work::Oracle(Arc::new(|_, _| true))), 0);
    assert_eq!(result(Work::Oracle(Arc::new(|_, size| size != 4096))), 1);
}

#[test]
fn copies_of_any_alignment_are_right() {
    let (memory, copied, records) = (Memory::varied(9), Memory::new(9, 0), records(9));
    let model = Model::timed(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (from, to) = (memory.address(), copied.address());
    let list: Vec<_> = (0..8u64)
        .zip(&records)
        .map(|(page, it)| copy(from + page * 4096, to + page * 4096, 4096, it))
        .collect();
    assert_eq!(
        run(&queue, &batch(&list, &records[8]), &records[8]).status(),
        1
    );
    assert_eq!(
        run(
            &queue,
            &copy(from + 32771, to + 32771, 4093, &records[8]),
            &records[8]
        )
        .status(),
        1
    );
    assert_eq!(memory.bytes()[..32768], copied.bytes()[..32768]);
    assert_eq!(memory.bytes()[32771..], copied.bytes()[32771..]);
}

#[test]
fn a_failed_batch_has_a_record_only_if_requested() {
    for (flags, status) in [(Flags::RECORD_VALID, 0), (wanted(), 5)] {
        let model = Model::deterministic(&Config::dsa());
        let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(4));
        let list = [noop(&records[0]), descriptor(0x3f, &records[1])];
        let batch = batch(&list, &records[2]);
        let batch = Descriptor {
            control: Descriptor::control_of(opcode::BATCH, flags),
            ..batch
        };
        accepted(&queue, &[batch]);
        let drain = descriptor(opcode::DRAIN, &records[3]);
        assert_eq!(run(&queue, &drain, &records[3]).status(), 1);
        assert_eq!(records[1].status(), 0x10);
        assert_eq!(records[2].status(), status);
    }
}

#[test]
fn a_descriptor_with_a_misaligned_record_is_discarded() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record) = (Memory::new(1, 0), Record::default());
    let misaligned = Descriptor {
        record: record.address() + 8,
        ..fill(!0, memory.address(), 8, &record)
    };
    accepted(&queue, &[misaligned]);
    let drain = descriptor(opcode::DRAIN, &record);
    assert_eq!(run(&queue, &drain, &record).status(), 1);
    assert_eq!(memory.bytes()[..8], [0; 8]);
}

#[test]
fn operations_that_succeed_or_are_invalid_complete_zero_bytes() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record) = (Memory::new(2, 0), Record::default());
    let copy = copy(memory.address(), memory.address() + PAGE, 4096, &record);
    let flagged = with(copy, Flags(1));
    for (descriptor, status) in [(copy, 1), (flagged, 0x11)] {
        for _ in 0..20 {
            let image = run(&queue, &descriptor, &record);
            assert_eq!((image.status(), image.completed()), (status, 0));
        }
    }
}
