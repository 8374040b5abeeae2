mod fake;
mod schedules;

use std::{
    collections::HashSet,
    io,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use fake::{Fake, Pace, shared, write};
use idxd::*;
use idxd::{Flags, Kind, Operations};

const SHAPE: Shape = Shape {
    members: 8,
    buffer_bytes: 4096,
};

fn open(limits: Limits, pace: Pace) -> (Arc<Fake>, Queue) {
    open_with(limits, pace, Tuning::default())
}

fn open_with(limits: Limits, pace: Pace, tuning: Tuning) -> (Arc<Fake>, Queue) {
    let fake = Arc::new(Fake::new(limits, pace));
    let queue = Queue::new(fake.clone(), SHAPE, tuning).unwrap();
    (fake, queue)
}

/// Submits `count` operations, which carry their number.
fn submit(queue: &Queue, count: usize) -> Result<InFlight, (Slot, SubmitError)> {
    submit_slot(queue.slot().unwrap(), count)
}

fn submit_slot(mut slot: Slot, count: usize) -> Result<InFlight, (Slot, SubmitError)> {
    for (number, descriptor) in slot.descriptors_mut().iter_mut().take(count).enumerate() {
        *descriptor = Descriptor {
            control: Descriptor::control_of(opcode::COMPARE_PATTERN, Flags::default()),
            address_1: number as u64,
            ..Descriptor::default()
        };
    }
    // SAFETY: nothing is written but records.
    unsafe { slot.submit(count) }
}

fn after(queue: &Queue, nanos: u64) -> Duration {
    queue.now() + Duration::from_nanos(nanos)
}

fn statuses(outcome: &Outcome) -> Vec<u8> {
    let operations = 0..outcome.count();
    operations
        .map(|index| outcome.status_and_result(index).0)
        .collect()
}

#[test]
fn one_goes_alone_and_several_as_a_batch() {
    let (fake, queue) = open(shared(16, 32), Pace::After(100));
    for count in [1, 2, 8] {
        let in_flight = submit(&queue, count).unwrap();
        assert!(!in_flight.is_done());
        // However many operations there are, the device has one descriptor.
        assert_eq!(fake.state().taken.len(), 1);
        let outcome = in_flight.wait(after(&queue, 1000)).unwrap();
        assert!(outcome.all_succeeded());
        let expected: Vec<(u8, u8)> = (0..).map(|number| (1, number)).take(count).collect();
        let found: Vec<_> = (0..count)
            .map(|index| outcome.status_and_result(index))
            .collect();
        assert_eq!(found, expected);
        assert_eq!(outcome.status_and_result(count), (0, 0));
    }
    let expected = Statistics {
        operations: 11,
        batches: 2,
        ..Statistics::default()
    };
    assert_eq!(queue.statistics(), expected);
}

#[test]
fn more_operations_than_a_batch_are_several_batches_and_a_single_one() {
    for (most, entries, batches) in [(4, 2, 2), (3, 3, 3), (7, 2, 1)] {
        let (fake, queue) = open(shared(16, most), Pace::Never);
        let in_flight = submit(&queue, 8).unwrap();
        assert_eq!(fake.state().taken.len(), entries);
        let statistics = queue.statistics();
        assert_eq!(statistics.entries as usize, entries);
        assert_eq!((statistics.batches, statistics.operations), (batches, 8));
        for left in (0..entries).rev() {
            assert!(!in_flight.is_done());
            fake.complete(left);
        }
        let outcome = in_flight.poll().unwrap();
        assert!(outcome.all_succeeded());
    }
}

#[test]
fn without_batches_each_operation_has_an_entry() {
    let iaa = Limits {
        kind: Kind::Iaa,
        max_batch: None,
        ..shared(16, 1)
    };
    let no_opcode = Limits {
        operations: Operations([u64::MAX; 4]).without(opcode::BATCH),
        ..shared(16, 32)
    };
    for limits in [iaa, no_opcode, shared(16, 1)] {
        let (fake, queue) = open(limits, Pace::Never);
        let first = submit(&queue, 8).unwrap();
        let second = submit(&queue, 5).unwrap();
        assert_eq!(queue.statistics().entries, 13);
        let third = queue.slot().unwrap();
        assert_eq!(third.capacity(), 3);
        assert!(matches!(
            submit_slot(third, 4),
            Err((_, SubmitError::Count { most: 3 }))
        ));
        assert_eq!(fake.state().taken.len(), 13);
        for _ in 0..13 {
            assert!(!(first.is_done() && second.is_done()));
            fake.complete(0);
        }
        assert!(first.poll().unwrap().all_succeeded() && second.poll().unwrap().all_succeeded());
        assert_eq!(queue.statistics().entries, 0);
    }
}

#[test]
fn a_batch_that_the_kernel_refuses_is_the_last_one() {
    let (fake, queue) = open(shared(6, 32), Pace::Never);
    fake.state().refuses_batches = true;
    let in_flight = submit(&queue, 4).unwrap();
    assert_eq!(fake.state().taken.len(), 4);
    assert_eq!(queue.statistics().batches, 0);
    assert_eq!(queue.statistics().entries, 4);
    (0..4).for_each(|_| fake.complete(0));
    assert!(in_flight.poll().unwrap().all_succeeded());
}

#[test]
fn a_slot_from_before_the_refusal_is_still_good() {
    let (fake, queue) = open(shared(6, 32), Pace::AtOnce);
    let slot = queue.slot().unwrap();
    fake.state().refuses_batches = true;
    drop(submit(&queue, 2).unwrap());
    assert_eq!(slot.capacity(), 8);
    let outcome = submit_slot(slot, 5).unwrap().poll().unwrap();
    assert!(outcome.all_succeeded());
    assert_eq!(queue.statistics().entries, 5);
    drop(outcome);
    assert_eq!(queue.slot().unwrap().capacity(), 3);
    assert_eq!(queue.statistics().entries, 0);
}

#[test]
fn a_batch_that_the_kernel_refuses_is_submitted_one_by_one_within_the_credits() {
    let (fake, queue) = open(shared(5, 32), Pace::Never);
    let others = [submit(&queue, 2).unwrap(), submit(&queue, 2).unwrap()];
    fake.state().refuses_batches = true;
    let in_flight = submit(&queue, 8).unwrap();
    assert_eq!(queue.statistics().entries, 5);
    (0..5).for_each(|_| fake.complete(0));
    let outcome = in_flight.poll().unwrap();
    assert!(!outcome.all_succeeded());
    assert_eq!(statuses(&outcome), [1, 1, 1, 0, 0, 0, 0, 0]);
    assert!(others.iter().all(InFlight::is_done));
}

#[test]
fn a_full_queue_is_asked_once() {
    let (fake, queue) = open(shared(16, 32), Pace::AtOnce);
    fake.state()
        .answers
        .extend((0..2).map(|_| (0, Some(Refusal::Full))));
    let (slot, reason) = submit(&queue, 3).unwrap_err();
    assert!(matches!(reason, SubmitError::Full));
    assert_eq!(fake.state().answers.len(), 1);
    // SAFETY: nothing is written but records.
    let again = unsafe { slot.submit(3) };
    assert!(matches!(again, Err((_, SubmitError::Full))));
    drop(again);
    assert_eq!(
        (queue.statistics().full, queue.statistics().entries),
        (2, 0)
    );
    assert!(submit(&queue, 3).unwrap().is_done() && !queue.is_dead());
}

#[test]
fn a_partly_accepted_submission_is_partly_in_flight() {
    let (fake, queue) = open(shared(16, 1), Pace::AtOnce);
    fake.state().answers.push_back((3, Some(Refusal::Full)));
    let outcome = submit(&queue, 8).unwrap().poll().unwrap();
    assert_eq!(statuses(&outcome), [1, 1, 1, 0, 0, 0, 0, 0]);
    assert!(!outcome.all_succeeded());
    assert_eq!((outcome.count(), outcome.image(3)), (8, None));
    let statistics = queue.statistics();
    assert_eq!((statistics.operations, statistics.entries), (3, 3));
    drop(outcome);
    assert_eq!(queue.statistics().entries, 0);
}

#[test]
fn errors_of_the_system_end_the_queue() {
    let fatal = [
        Refusal::Forked,
        Refusal::Closed,
        Refusal::System(io::Error::from(io::ErrorKind::PermissionDenied)),
    ];
    for refusal in fatal {
        let (fake, queue) = open(shared(16, 32), Pace::AtOnce);
        let other = queue.slot().unwrap();
        fake.state().answers.push_back((0, Some(refusal)));
        assert!(matches!(
            submit(&queue, 2),
            Err((_, SubmitError::Refused(_)))
        ));
        assert!(queue.is_dead() && queue.slot().is_none());
        assert!(matches!(submit_slot(other, 1), Err((_, SubmitError::Dead))));
    }
    // A single descriptor that is refused is the caller's affair.
    let (fake, queue) = open(shared(16, 32), Pace::AtOnce);
    fake.state().answers.push_back((0, Some(Refusal::Invalid)));
    assert!(matches!(
        submit(&queue, 1),
        Err((_, SubmitError::Refused(Refusal::Invalid)))
    ));
    assert!(!queue.is_dead());
}

#[test]
fn members_tell_what_a_failed_batch_has_done() {
    let (fake, queue) = open(shared(16, 32), Pace::AtOnce);
    // 3: a fault; 0x83: one on a write; 2: done, but not as expected.
    fake.state().statuses.extend([(1, 3), (2, 0x83), (4, 2)]);
    let outcome = submit(&queue, 5).unwrap().poll().unwrap();
    assert_eq!(statuses(&outcome), [1, 3, 0x83, 1, 2]);
    assert!(!outcome.all_succeeded());
    assert!(outcome.buffer(0..4096).is_some() && outcome.buffer(0..4097).is_none());
}

/// Addresses of the records of a submission, which the test then writes itself.
fn by_hand(queue: &Queue, fake: &Fake, count: usize) -> (InFlight, u64, Vec<u64>) {
    let slot = queue.slot().unwrap();
    let members = (0..count)
        .map(|index| slot.record_address(index).unwrap())
        .collect();
    let in_flight = submit_slot(slot, count).unwrap();
    let (_, head) = fake.state().taken.pop().unwrap();
    (in_flight, head.record, members)
}

#[test]
fn members_after_a_fault_of_the_list_are_not_begun() {
    let (fake, queue) = open(shared(16, 32), Pace::Never);
    let (in_flight, head, members) = by_hand(&queue, &fake, 4);
    write(members[0], [1, 0], 0);
    assert!(!in_flight.is_done());
    write(head, [6, 0], 1);
    let outcome = in_flight.poll().unwrap();
    assert_eq!(statuses(&outcome), [1, 0, 0, 0]);
    drop(outcome);
    assert_eq!(
        (queue.statistics().quarantined, queue.statistics().entries),
        (0, 0)
    );
}

#[test]
fn a_slot_with_a_lost_record_waits_for_it() {
    let (fake, queue) = open(shared(16, 32), Pace::Never);
    let (in_flight, head, members) = by_hand(&queue, &fake, 3);
    write(members[0], [1, 0], 0);
    write(members[2], [1, 0], 0);
    write(head, [5, 1], 3);
    let outcome = in_flight.poll().unwrap();
    assert_eq!(statuses(&outcome), [1, 0, 1]);
    assert_eq!(outcome.buffer(0..1), None);
    drop(outcome);
    assert_eq!(
        (queue.statistics().quarantined, queue.statistics().entries),
        (1, 1)
    );
    drop(queue.slot());
    assert_eq!(queue.statistics().late, 0);
    // The kernel delivers it after all.
    write(members[1], [3, 0], 0);
    drop(queue.slot());
    assert_eq!(
        (queue.statistics().late, queue.statistics().entries),
        (1, 0)
    );
}

#[test]
fn a_batch_that_succeeded_waits_for_all_its_members() {
    let (fake, queue) = open(shared(16, 32), Pace::Never);
    let (in_flight, head, members) = by_hand(&queue, &fake, 3);
    write(head, [1, 0], 3);
    for record in members {
        assert!(!in_flight.is_done());
        write(record, [1, 0], 0);
    }
    assert!(in_flight.poll().unwrap().all_succeeded());
}

#[test]
fn a_late_submission_keeps_its_slot_until_it_is_complete() {
    let tuning = Tuning {
        slots: 2,
        most_timed_out: 9,
    };
    let (fake, queue) = open_with(shared(16, 32), Pace::Never, tuning);
    let slot = queue.slot().unwrap();
    let late = slot.record_address(0).unwrap();
    let in_flight = submit_slot(slot, 1).unwrap();
    assert_eq!(
        in_flight.wait(after(&queue, 50)).unwrap_err(),
        Unanswered::TimedOut
    );
    assert_eq!(queue.now(), Duration::from_nanos(50));
    // The other slot goes round; the late one has no owner.
    for _ in 0..5 {
        let slot = queue.slot().unwrap();
        assert_ne!(slot.record_address(0), Some(late));
        assert!(queue.slot().is_none());
    }
    fake.complete(0);
    let slots = [queue.slot().unwrap(), queue.slot().unwrap()];
    assert!(
        slots
            .iter()
            .any(|slot| slot.record_address(0) == Some(late))
    );
    let statistics = queue.statistics();
    let counts = (
        statistics.timed_out,
        statistics.quarantined,
        statistics.late,
    );
    assert_eq!(counts, (1, 1, 1));
}

#[test]
fn too_many_timeouts_end_the_queue() {
    let (fake, queue) = open(shared(16, 32), Pace::Never);
    for timeouts in 1..=3 {
        assert!(!queue.is_dead());
        let waited = submit(&queue, 2).unwrap().wait(after(&queue, 10));
        assert_eq!(waited.unwrap_err(), Unanswered::TimedOut);
        assert_eq!(queue.statistics().timed_out, timeouts);
    }
    assert!(queue.is_dead() && queue.slot().is_none());
    (0..3).for_each(|_| fake.complete(0));
    assert!(queue.is_dead() && queue.slot().is_none());
}

#[test]
fn the_slot_of_a_dropped_submission_comes_back() {
    let (fake, queue) = open(shared(1, 32), Pace::Never);
    drop(submit(&queue, 2).unwrap());
    assert!(queue.slot().is_none());
    fake.complete(0);
    assert!(queue.slot().is_some());
    let statistics = queue.statistics();
    assert_eq!(
        (
            statistics.timed_out,
            statistics.quarantined,
            statistics.late
        ),
        (0, 1, 1)
    );
}

#[test]
fn nobody_waits_for_a_closed_queue() {
    let (fake, queue) = open(shared(16, 32), Pace::Never);
    let (lost, ..) = by_hand(&queue, &fake, 2);
    queue.close();
    assert_eq!(lost.wait(Duration::MAX).unwrap_err(), Unanswered::Closed);
}

#[test]
fn the_queue_is_closed_before_its_memory_goes() {
    // The fake writes the records of what is in flight when it is closed: with the memory gone it would crash.
    let (fake, queue) = open(shared(16, 32), Pace::Never);
    let in_flight = submit(&queue, 8).unwrap();
    drop(submit(&queue, 3).unwrap());
    let forgotten = submit(&queue, 2).unwrap();
    drop(queue);
    assert_eq!(fake.state().closed, 0);
    drop(in_flight);
    assert_eq!(fake.state().closed, 0);
    let outcome_keeps_it = forgotten;
    fake.complete(2);
    let outcome = outcome_keeps_it.poll().unwrap();
    assert_eq!(fake.state().closed, 0);
    drop(outcome);
    assert_eq!(fake.state().closed, 1);
    assert!(fake.state().taken.is_empty());

    let (fake, queue) = open(shared(16, 32), Pace::Never);
    std::mem::forget(submit(&queue, 2).unwrap());
    drop(queue);
    fake.complete(0);
    assert_eq!(fake.state().closed, 0);
}

#[test]
fn the_entries_of_a_shared_queue_are_never_exceeded() {
    let tuning = Tuning {
        slots: 100,
        ..Tuning::default()
    };
    let (fake, queue) = open_with(shared(4, 32), Pace::Never, tuning);
    let fill = || std::iter::from_fn(|| queue.slot()).map(|slot| submit_slot(slot, 2).unwrap());
    let mut in_flight: Vec<_> = fill().collect();
    assert_eq!((in_flight.len(), fake.state().taken.len()), (4, 4));
    (0..3).for_each(|_| fake.complete(0));
    in_flight.retain(|in_flight| !in_flight.is_done());
    assert_eq!(in_flight.len(), 1);
    in_flight.extend(fill());
    assert_eq!((in_flight.len(), fake.state().most_taken), (4, 4));
}

#[test]
fn a_slot_keeps_what_was_in_it() {
    let (_fake, queue) = open(shared(16, 32), Pace::AtOnce);
    let mut slot = queue.slot().unwrap();
    slot.buffer_mut()[7] = 9;
    assert_eq!(slot.buffer_address() % 4096, 0);
    let outcome = submit_slot(slot, 8).unwrap().poll().unwrap();
    assert_eq!(outcome.buffer(7..8), Some(&[9][..]));
    drop(outcome);
    let mut slot = queue.slot().unwrap();
    assert_eq!(slot.descriptors_mut()[5].address_1, 5);
    assert_eq!(slot.buffer_mut()[7], 9);
    // SAFETY: nothing is written but records.
    let outcome = unsafe { slot.submit(6) }.unwrap().poll().unwrap();
    assert_eq!(outcome.count(), 6);
    assert!(outcome.all_succeeded());
}

#[test]
fn a_queue_without_entries_or_slots_is_refused() {
    let new = |limits, shape, tuning| {
        let fake = Arc::new(Fake::new(limits, Pace::Never));
        Queue::new(fake, shape, tuning).map(|_| ())
    };
    let nothing = Shape {
        members: 0,
        buffer_bytes: 0,
    };
    let no_slots = Tuning {
        slots: 0,
        ..Tuning::default()
    };
    let huge = Shape {
        members: 1,
        buffer_bytes: usize::MAX,
    };
    let (limits, tuning) = (shared(16, 32), Tuning::default());
    assert!(matches!(
        new(shared(0, 32), SHAPE, tuning),
        Err(OpenQueueError::NoEntries)
    ));
    assert!(matches!(
        new(limits.clone(), nothing, tuning),
        Err(OpenQueueError::Nothing)
    ));
    assert!(matches!(
        new(limits.clone(), SHAPE, no_slots),
        Err(OpenQueueError::Nothing)
    ));
    assert!(matches!(
        new(limits, huge, tuning),
        Err(OpenQueueError::Memory(_))
    ));
}

#[test]
fn threads_share_a_queue() {
    let tuning = Tuning {
        slots: 3,
        ..Tuning::default()
    };
    let (fake, queue) = open_with(shared(16, 32), Pace::After(5), tuning);
    let held = Mutex::new(HashSet::new());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..2000 {
                    let Some(slot) = queue.slot() else {
                        thread::yield_now();
                        continue;
                    };
                    let record = slot.record_address(0).unwrap();
                    assert!(held.lock().unwrap().insert(record), "handed out twice");
                    let in_flight = submit_slot(slot, round % 8 + 1).unwrap();
                    // Another thread's pause may take the time past any deadline that is near.
                    let outcome = in_flight.wait(Duration::MAX).unwrap();
                    assert!(outcome.all_succeeded());
                    assert!(held.lock().unwrap().remove(&record));
                }
            });
        }
    });
    let statistics = queue.statistics();
    assert_eq!((statistics.entries, statistics.quarantined), (0, 0));
    assert!(fake.state().most_taken <= 3);
}

#[test]
fn a_forked_child_touches_nothing() {
    let (_fake, queue) = open(shared(16, 32), Pace::Never);
    let mut slot = queue.slot().unwrap();
    let done = submit(&queue, 2).unwrap();
    let waiting = submit(&queue, 2).unwrap();
    // SAFETY: the child looks at memory that it has, and ends with `_exit`; what it calls neither allocates nor locks.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let right = queue.is_dead()
            && queue.slot().is_none()
            && slot.descriptors_mut().is_empty()
            && slot.buffer_mut().is_empty()
            && slot.record_address(0).is_none()
            && !done.is_done()
            && done.poll().is_err()
            && waiting.wait(Duration::MAX).is_err_and(|reason| reason == Unanswered::Forked)
            // SAFETY: nothing is submitted.
            && matches!(unsafe { slot.submit(1) }, Err((_, SubmitError::Dead)));
        queue.close();
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!right)) };
    }
    let mut status = -1;
    // SAFETY: `status` is there to be written.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's exit status");
    assert!(!queue.is_dead());
}
