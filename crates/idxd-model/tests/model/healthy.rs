//! Devices that do what they should.

use super::*;

fn each_time(config: &Config, test: impl Fn(&Model)) {
    test(&Model::deterministic(config));
    test(&Model::timed(config));
}

#[test]
fn moves_memory_in_any_time() {
    each_time(&Config::dsa(), |model| {
        let queue = model.queue(0, 0, PortalKind::Enqcmd);
        let (from, to, record) = (Memory::new(3, 7), Memory::new(3, 0), Record::default());
        let image = run(
            &queue,
            &copy(from.address() + 3, to.address() + 5, 9000, &record),
            &record,
        );
        assert_eq!((image.status(), image.result()), (1, 0));
        let bytes = to.bytes();
        assert!(bytes[..5].iter().all(|byte| *byte == 0));
        assert!(bytes[5..9005].iter().all(|byte| *byte == 7));
        assert!(bytes[9005..].iter().all(|byte| *byte == 0));
    });
}

#[test]
fn batches_complete_with_all_their_members() {
    each_time(&Config::dsa(), |model| {
        let queue = model.queue(0, 0, PortalKind::Enqcmd);
        let (memory, records) = (Memory::new(64, 0), records(65));
        memory.set(5 * 4096 + 4000, 1);
        let members: Vec<_> = (0..64)
            .map(|page| is_zero(memory.address() + page as u64 * 4096, 4096, &records[page]))
            .collect();
        let image = run(&queue, &batch(&members, &records[64]), &records[64]);
        assert_eq!((image.status(), image.completed()), (1, 64));
        for (page, record) in records[..64].iter().enumerate() {
            let image = record.image().unwrap();
            assert_eq!((image.status(), image.result()), (1, u8::from(page == 5)));
        }
        queue.close();
    });
}

#[test]
fn closing_waits_for_what_is_in_flight() {
    each_time(&Config::dsa(), |model| {
        let queue = model.queue(0, 0, PortalKind::Enqcmd);
        let (memory, records) = (Memory::new(1, 0), records(40));
        let all: Vec<_> = records
            .iter()
            .map(|it| fill(1, memory.address(), 4096, it))
            .collect();
        accepted(&queue, &all);
        queue.close();
        assert!(records.iter().all(|record| record.status() == 1));
        assert!(matches!(
            submit(&queue, &all).refusal,
            Some(Refusal::Closed)
        ));
    });
}

#[test]
fn tenants_close_for_themselves() {
    each_time(&Config::dsa(), |model| {
        let (one, two) = (
            model.queue(0, 0, PortalKind::Enqcmd),
            model.queue(0, 0, PortalKind::Enqcmd),
        );
        let record = Record::default();
        one.close();
        assert_eq!(run(&two, &noop(&record), &record).status(), 1);
    });
}
