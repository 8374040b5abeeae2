//! What gets into a work queue.

use super::*;

/// A device that fetches nothing, so that its queue fills.
fn clogged(config: &Config) -> Model {
    let model = Model::deterministic(config);
    model.inject(On::any(), 0, 4, InjectedFault::StuckEngine);
    model
}

fn fill_up(queue: &Arc<dyn Submit>, record: &Record, count: usize) -> Submitted {
    submit(queue, &vec![noop(record); count])
}

#[test]
fn a_shared_queue_is_full_at_its_threshold() {
    let mut config = Config::dsa();
    config.devices[0].queues[0].threshold = 100;
    let model = Model::deterministic(&config);
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    let submitted = fill_up(&queue, &record, 200);
    assert_eq!(submitted.accepted, 100);
    assert!(matches!(submitted.refusal, Some(Refusal::Full)));
}

#[test]
fn entries_are_free_when_fetched() {
    let model = clogged(&Config::dsa());
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    accepted(&queue, &[noop(&record); 4]);
    // The four are never done, but their entries are free.
    assert_eq!(wait(&queue, &record, TIMEOUT), None);
    assert_eq!(fill_up(&queue, &record, 200).accepted, 128);
}

#[test]
fn another_tenant_takes_entries() {
    let mut config = Config::dsa();
    config.faults.competitor = 64;
    let model = Model::deterministic(&config);
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    let accepted = fill_up(&queue, &record, 200).accepted;
    assert!((64..128).contains(&accepted), "{accepted}");
}

#[test]
fn a_queue_refuses_for_ever_or_a_number_of_times() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    model.refuse(0, 0, 3);
    for _ in 0..3 {
        assert!(matches!(
            fill_up(&queue, &record, 1).refusal,
            Some(Refusal::Full)
        ));
    }
    assert_eq!(fill_up(&queue, &record, 1).accepted, 1);
    model.refuse(0, 0, u32::MAX);
    let before = queue.now();
    for _ in 0..1000 {
        assert_eq!(fill_up(&queue, &record, 1).accepted, 0);
    }
    // Tries without a pause take time too.
    assert!(queue.now() > before);
    model.refuse(0, 0, 0);
    assert_eq!(fill_up(&queue, &record, 1).accepted, 1);
}

#[test]
fn a_queue_is_full_by_chance() {
    let mut config = Config::dsa();
    config.faults.full_per_mille = 500;
    let model = Model::deterministic(&config);
    let (queue, record) = (model.queue(0, 0, PortalKind::Enqcmd), Record::default());
    let tries = (0..100).map(|_| fill_up(&queue, &record, 1).accepted);
    let accepted: usize = tries.sum();
    assert!((20..80).contains(&accepted), "{accepted}");
}

#[test]
fn write_takes_what_it_can() {
    let model = Model::deterministic(&Config::dsa());
    let queue = model.queue(0, 0, PortalKind::Write);
    let (record, list) = (Record::default(), vec![Descriptor::default(); 2]);
    let submitted = submit(
        &queue,
        &[noop(&record), batch(&list, &record), noop(&record)],
    );
    assert_eq!(submitted.accepted, 1);
    assert!(matches!(submitted.refusal, Some(Refusal::Invalid)));

    // A misaligned record, even if none is wanted.
    let odd = Descriptor {
        record: 8,
        ..Descriptor::default()
    };
    assert!(matches!(
        submit(&queue, &[odd]).refusal,
        Some(Refusal::Invalid)
    ));

    let full = fill_up(&queue, &record, 200);
    // Each refusal before was time for an engine.
    assert!((127..200).contains(&full.accepted));
    assert!(matches!(full.refusal, Some(Refusal::Full)));
    assert_eq!(complete(&queue, &record).status(), 1);
}

#[test]
fn write_retries_in_the_kernel() {
    let model = Model::deterministic(&Config::dsa());
    let (queue, record) = (model.queue(0, 0, PortalKind::Write), Record::default());
    model.refuse(0, 0, 32);
    assert_eq!(fill_up(&queue, &record, 1).accepted, 1);
    model.refuse(0, 0, 33);
    assert!(matches!(
        fill_up(&queue, &record, 1).refusal,
        Some(Refusal::Full)
    ));
}

#[test]
fn write_takes_batches_where_the_device_is_safe() {
    let mut config = Config::dsa();
    let (records, memory) = (records(3), Memory::new(1, 0));
    let list: Vec<_> = records[..2]
        .iter()
        .map(|record| is_zero(memory.address(), 64, record))
        .collect();
    config.devices[0].queues[0].version = 0x200;
    let model = Model::deterministic(&config);
    let queue = model.queue(0, 0, PortalKind::Write);
    assert_eq!(
        run(&queue, &batch(&list, &records[2]), &records[2]).status(),
        1
    );
}

#[test]
fn a_forked_child_gets_nothing_in() {
    let model = Model::deterministic(&Config::dsa());
    for portal in [PortalKind::Enqcmd, PortalKind::Write] {
        let (queue, record) = (model.queue(0, 0, portal), Record::default());
        model.fork();
        assert!(matches!(
            submit(&queue, &[noop(&record)]).refusal,
            Some(Refusal::Forked)
        ));
        // But it can open the queue itself.
        assert_eq!(
            run(&model.queue(0, 0, portal), &noop(&record), &record).status(),
            1
        );
    }
}
