//! Everything at once: whatever goes wrong, each descriptor has one end, time is bounded, and a seed repeats itself.

use proptest::prelude::*;

use super::*;
use crate::faults::{any_faults, harmless};

const COUNT: usize = 60;

/// What a driver that only submits and waits has seen.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    statuses: Vec<u8>,
    refused: usize,
    statistics: Statistics,
    trace: u64,
    took: Duration,
}

/// Submits descriptors of all sorts, with a bound on retries; waits for each for a while; closes.
fn drive(config: &Config, reset: Option<usize>) -> Seen {
    let model = Model::deterministic(config);
    let queue = model.queue(0, 0, PortalKind::Enqcmd);
    let (memory, records, members) = (Memory::new(4, 0), records(COUNT), records(COUNT * 4));
    let lists: Vec<Vec<_>> = members
        .chunks(4)
        .map(|members| {
            let list: Vec<_> = members
                .iter()
                .map(|it| is_zero(memory.address(), 4096, it))
                .collect();
            list
        })
        .collect();
    let mut had = vec![false; COUNT];
    for (index, record) in records.iter().enumerate() {
        if reset == Some(index) {
            model.reset(0);
        }
        let descriptor = match index % 5 {
            0 => batch(&lists[index], record),
            1 => fill(0, memory.address(), 4096, record),
            2 => copy(memory.address(), memory.address() + 8192, 4096, record),
            3 if index % 10 == 3 => descriptor(opcode::DRAIN, record),
            _ => is_zero(memory.address(), 8192, record),
        };
        for _ in 0..4 {
            if submit(&queue, &[descriptor]).accepted == 1 {
                had[index] = true;
                break;
            }
            queue.pause(record, queue.now() + Duration::from_micros(1));
        }
    }
    for (record, had) in records.iter().zip(&had) {
        if *had {
            wait(&queue, record, Duration::from_millis(1));
        }
    }
    queue.close();
    let statuses: Vec<_> = records.iter().map(Record::status).collect();
    assert!(
        had.iter()
            .zip(&statuses)
            .all(|(had, status)| *had || *status == 0)
    );
    Seen {
        refused: had.iter().filter(|had| !**had).count(),
        statuses,
        statistics: model.statistics(),
        trace: model.trace(),
        took: model.now(),
    }
}

proptest! {
    #[test]
    fn every_descriptor_ends_exactly_once(faults in any_faults(prop_oneof![10 => harmless(), 1 => Just(InjectedFault::Corrupt)], 8), seed: u64, reset in proptest::option::of(0..COUNT)) {
        let config = config_with(Config::dsa(), |config| { config.faults = faults; config.seed = seed; });
        let seen = drive(&config, reset);
        let Statistics { accepted, completed, unrecorded, aborted } = seen.statistics;
        prop_assert_eq!(accepted, completed + unrecorded + aborted);
        prop_assert_eq!(accepted + seen.refused as u64, COUNT as u64);
        let recorded = seen.statuses.iter().filter(|status| **status != 0).count();
        prop_assert_eq!(recorded as u64, completed);
        prop_assert!(seen.took < Duration::from_secs(1));

        prop_assert_eq!(drive(&config, reset), seen);
    }

    #[test]
    fn a_healthy_device_completes_everything(seed: u64) {
        let seen = drive(&config_with(Config::dsa(), |config| { config.seed = seed; }), None);
        prop_assert!(seen.statuses.iter().all(|status| *status == 1));
    }
}

#[test]
fn threads_come_to_the_same_end() {
    let mut config = Config::dsa();
    config.faults.chances = [
        InjectedFault::Late(Duration::from_micros(300)),
        InjectedFault::Slow(Duration::from_micros(300)),
        InjectedFault::Stuck,
        InjectedFault::RecordLost,
        InjectedFault::PageFault {
            at: At::Anywhere,
            write: true,
            refused: false,
        },
    ]
    .map(|fault| Chance {
        per_mille: 50,
        on: On::any(),
        fault,
    })
    .to_vec();
    for seed in 0..5 {
        let model = Model::timed(&config_with(config.clone(), |config| {
            config.seed = seed;
        }));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let queue = model.queue(0, 0, PortalKind::Enqcmd);
                    let (memory, records) = (Memory::new(1, 0), records(50));
                    for record in &records {
                        while submit(&queue, &[fill(1, memory.address(), 4096, record)]).accepted
                            == 0
                        {
                            std::thread::yield_now();
                        }
                    }
                    queue.close();
                    // All of it is ours again.
                    let statuses = || records.iter().map(Record::status).collect::<Vec<_>>();
                    let before = statuses();
                    drop(memory);
                    assert_eq!(statuses(), before);
                });
            }
        });
        let Statistics {
            accepted,
            completed,
            unrecorded,
            aborted,
            ..
        } = model.statistics();
        assert_eq!((accepted, completed + unrecorded + aborted), (150, 150));
    }
}
