//! Order, and what batches can come to.

use super::*;

/// Where completion records appear in their order.
fn order(model: &Model, queue: &Arc<dyn Submit>, records: &[Record]) -> Vec<usize> {
    let (mut seen, mut order) = (vec![false; records.len()], Vec::new());
    let (never, end) = (Record::default(), model.now() + Duration::from_secs(10));
    while order.len() < records.len() && model.now() < end {
        queue.pause(&never, end);
        for (index, record) in records.iter().enumerate() {
            if record.status() != 0 && !std::mem::replace(&mut seen[index], true) {
                order.push(index);
            }
        }
    }
    order
}

#[test]
fn descriptors_complete_out_of_order() {
    let orders = [1, 2, 3].map(|seed| {
        let model = Model::deterministic(&config_with(Config::dsa(), |config| {
            config.seed = seed;
        }));
        let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(32));
        accepted(&queue, &records.iter().map(noop).collect::<Vec<_>>());
        order(&model, &queue, &records)
    });
    assert!(
        orders
            .iter()
            .all(|order| order.len() == 32 && !order.is_sorted()),
        "{orders:?}"
    );
    assert_ne!(orders[0], orders[1]);
}

#[test]
fn one_straggler_is_last() {
    let model = Model::deterministic(&Config::dsa());
    model.inject(On::any(), 3, 1, InjectedFault::Slow(Duration::from_secs(1)));
    let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(16));
    accepted(&queue, &records.iter().map(noop).collect::<Vec<_>>());
    assert_eq!(order(&model, &queue, &records).last(), Some(&3));
    assert!(model.now() >= Duration::from_secs(1));
}

/// Eight pages, of which `bad` are not there; the batch over them, and the records of its members.
fn pages_with(bad: &[u64]) -> (RecordImage, Vec<u8>) {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, records) = (Memory::new(8, 0), records(9));
    for page in bad {
        model
            .pages()
            .set(memory.address() + page * PAGE, 1, Page::Absent);
    }
    let list: Vec<_> = (0..8u64)
        .zip(&records)
        .map(|(page, record)| is_zero(memory.address() + page * PAGE, 4096, record))
        .collect();
    let image = run(&queue, &batch(&list, &records[8]), &records[8]);
    (image, records[..8].iter().map(Record::status).collect())
}

#[test]
fn a_batch_fails_with_any_of_its_members() {
    for bad in [vec![0], vec![7], vec![1, 5], (0..8).collect()] {
        let (image, statuses) = pages_with(&bad);
        assert_eq!((image.status(), image.completed()), (5, 8));
        for (page, status) in (0..).zip(statuses) {
            assert_eq!(status, if bad.contains(&page) { 3 } else { 1 });
        }
    }
}

#[test]
fn one_member_fails_where_a_test_wants_it() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, records) = (Memory::new(8, 0), records(9));
    let fault = InjectedFault::PageFault {
        at: At::Byte(1000),
        write: false,
        refused: false,
    };
    model.inject(On::member(3), 0, 1, fault);
    let list: Vec<_> = records[..8]
        .iter()
        .map(|record| is_zero(memory.address(), 4096, record))
        .collect();
    assert_eq!(
        run(&queue, &batch(&list, &records[8]), &records[8]).status(),
        5
    );
    let image = records[3].image().unwrap();
    assert_eq!((image.status(), image.completed()), (3, 1000));
    assert_eq!(
        records[..8]
            .iter()
            .filter(|record| record.status() == 1)
            .count(),
        7
    );
}

#[test]
fn the_list_faults_at_any_member() {
    for index in [0, 1, 4, 7] {
        let model = Model::deterministic(&Config::dsa());
        let queue = model.queue(0, 0, PortalKind::Enqcmd);
        let records = records(9);
        model.inject(On::batch(), 0, 1, InjectedFault::ListFault(index));
        let list: Vec<_> = records[..8].iter().map(noop).collect();
        let image = run(&queue, &batch(&list, &records[8]), &records[8]);
        assert_eq!((image.status(), image.completed()), (6, index));
        assert!(is_at(&image, list.as_ptr() as u64 + u64::from(index) * 64));
        let statuses = records[..8].iter().map(Record::status);
        assert!(
            (0..8)
                .zip(statuses)
                .all(|(at, status)| status == u8::from(at < index))
        );
    }
}

#[test]
fn a_list_that_crosses_into_a_missing_page_faults_there() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    // Descriptors of zeros are NOOPs without records.
    let (memory, record) = (Memory::new(2, 0), Record::default());
    model.pages().set(memory.address() + PAGE, 1, Page::Absent);
    let parent = Descriptor {
        address_1: memory.address() + PAGE - 128,
        size: 4,
        ..descriptor(opcode::BATCH, &record)
    };
    let image = run(&queue, &parent, &record);
    assert_eq!((image.status(), image.completed()), (6, 2));
}

#[test]
fn batches_have_two_members_up_to_the_queues_limit_and_an_aligned_list() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, record) = (Memory::new(3, 0), Record::default());
    for (size, odd, status) in [
        (0, 0, 0x14),
        (1, 0, 0x14),
        (129, 0, 0x14),
        (128, 0, 1),
        (2, 0, 1),
        (2, 32, 0x18),
    ] {
        let address_1 = memory.address() + odd;
        let parent = Descriptor {
            address_1,
            size,
            ..descriptor(opcode::BATCH, &record)
        };
        assert_eq!(
            run(&queue, &parent, &record).status(),
            status,
            "{size} {odd}"
        );
    }
}

#[test]
fn batches_and_drains_do_not_nest() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(3));
    let inner = [Descriptor::default(); 2];
    let list = [
        batch(&inner, &records[0]),
        descriptor(opcode::DRAIN, &records[1]),
    ];
    assert_eq!(
        run(&queue, &batch(&list, &records[2]), &records[2]).status(),
        5
    );
    assert_eq!((records[0].status(), records[1].status()), (0x10, 0x10));
}

#[test]
fn the_record_of_a_batch_comes_last() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(9));
    let list: Vec<_> = records[..8].iter().map(noop).collect();
    let batch = batch(&list, &records[8]);
    assert_eq!(run(&queue, &batch, &records[8]).status(), 1);
    assert!(records.iter().all(|record| record.status() == 1));
    assert_eq!(model.statistics().completed, 1);
}

#[test]
fn a_members_lost_record_fails_the_batch() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(5));
    model.inject(On::member(2), 0, 1, InjectedFault::RecordLost);
    let list: Vec<_> = records[..4].iter().map(noop).collect();
    let image = run(&queue, &batch(&list, &records[4]), &records[4]);
    assert_eq!(
        (image.status(), image.result(), records[2].status()),
        (5, 1, 0)
    );
}

#[test]
fn engines_have_several_batches_in_progress() {
    let mut config = Config::dsa();
    config.devices[0].engines = 1;
    let model = Model::deterministic(&config);
    let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(2));
    // The first batch waits for a member that is late; the second one is done meanwhile.
    model.inject(On::member(0), 0, 1, InjectedFault::Late(TIMEOUT));
    let nothing = Descriptor::default();
    let waiting = [nothing; 2];
    accepted(&queue, &[batch(&waiting, &records[0])]);
    assert_eq!(wait(&queue, &records[0], Duration::from_micros(10)), None);
    let list = [nothing; 2];
    let second = batch(&list, &records[1]);
    let status = run(&queue, &second, &records[1]).status();
    let is_before = records[0].status() == 0 && queue.now() < TIMEOUT;
    // Nothing is in flight any more when this fails.
    let of_first = complete(&queue, &records[0]).status();
    assert_eq!((status, of_first, is_before), (1, 1, true));
}

#[test]
fn a_batch_list_is_read_after_submission() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(3));
    let memory = Memory::new(1, 0);
    let mut single = noop(&records[0]);
    accepted(
        &queue,
        &[
            single,
            Descriptor {
                address_1: memory.address(),
                size: 2,
                ..descriptor(opcode::BATCH, &records[2])
            },
        ],
    );
    // The descriptor has been copied; the list has not been read yet.
    single.record = 0;
    for member in 0..2 {
        memory
            .word(member * 64)
            .store(0xff << 56, Ordering::Relaxed);
    }
    assert_eq!(single.record, 0);
    assert_eq!(complete(&queue, &records[0]).status(), 1);
    assert_eq!(complete(&queue, &records[2]).status(), 5);
}

#[test]
fn a_drain_does_not_wait_for_other_processes_of_a_shared_queue() {
    let model = Model::deterministic(&Config::dsa());
    let (ours, other) = (
        model.queue(0, 0, PortalKind::Enqcmd),
        model.queue(0, 0, PortalKind::Enqcmd),
    );
    let records = records(3);
    model.inject(On::any(), 0, 1, InjectedFault::Late(Duration::from_secs(1)));
    accepted(&other, &[noop(&records[0])]);
    assert_eq!(wait(&other, &records[0], TIMEOUT), None);
    let drain = |record| descriptor(opcode::DRAIN, record);
    assert_eq!(run(&ours, &drain(&records[1]), &records[1]).status(), 1);
    assert_eq!(records[0].status(), 0);
    // Its own does.
    assert_eq!(run(&other, &drain(&records[2]), &records[2]).status(), 1);
    assert_eq!(records[0].status(), 1);
}

#[test]
fn a_drain_waits_for_everything_before_it() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, records) = (model.queue(0, 0, PortalKind::Enqcmd), records(11));
    model.inject(
        On::any(),
        2,
        1,
        InjectedFault::Slow(Duration::from_millis(5)),
    );
    let mut all: Vec<_> = records[..10].iter().map(noop).collect();
    all.push(descriptor(opcode::DRAIN, &records[10]));
    accepted(&queue, &all);
    assert_eq!(complete(&queue, &records[10]).status(), 1);
    assert!(records.iter().all(|record| record.status() == 1));
}
