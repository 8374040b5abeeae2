//! Random schedules: whatever happens in which order, slots and credits are right.

use std::collections::HashSet;

use proptest::{collection::vec, prelude::*};

use super::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Submit(usize),
    /// Completes one of what the device has in hand.
    Complete(usize),
    Poll(usize),
    Wait(usize),
    Drop(usize),
    /// The next submission is taken so far, and the ones after it too.
    Full(usize, usize),
    RefuseBatches,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (1..=8_usize).prop_map(Step::Submit),
        8 => any::<usize>().prop_map(Step::Complete),
        4 => any::<usize>().prop_map(Step::Poll),
        2 => any::<usize>().prop_map(Step::Wait),
        1 => any::<usize>().prop_map(Step::Drop),
        2 => (0..4_usize, 1..8_usize).prop_map(|(taken, times)| Step::Full(taken, times)),
        1 => Just(Step::RefuseBatches),
    ]
}

proptest! {
    #[test]
    fn any_schedule_keeps_slots_and_credits_right(
        most_batch in prop_oneof![Just(1_u32), Just(3), Just(32)],
        entries in 1..12_u32,
        slots in 1..6_u32,
        steps in vec(step(), 0..120),
    ) {
        let tuning = Tuning {
            slots,
            most_timed_out: u32::MAX,
        };
        let (fake, queue) = open_with(shared(entries, most_batch), Pace::Never, tuning);
        let mut in_flight: Vec<(u64, InFlight)> = Vec::new();
        let mut submissions = 0;
        let mut outcomes = 0;
        for step in steps {
            let pick = |index: usize, of: usize| (of > 0).then(|| index % of);
            match step {
                Step::Submit(count) => {
                    let Some(slot) = queue.slot() else { continue };
                    let record = slot.record_address(0).unwrap();
                    prop_assert!(in_flight.iter().all(|(other, _)| *other != record));
                    // What the device still has is not handed out, whichever thread released it.
                    prop_assert!(!fake.in_hand().contains(&record));
                    let before = fake.state().submissions;
                    let count = count.min(slot.capacity());
                    match submit_slot(slot, count) {
                        Ok(one) => {
                            submissions += 1;
                            in_flight.push((record, one));
                        }
                        Err((_, reason)) => prop_assert!(matches!(reason, SubmitError::Full)),
                    }
                    // The batch that was refused, and then its members.
                    prop_assert!(fake.state().submissions - before <= 2);
                }
                Step::Complete(index) => {
                    let index = pick(index, fake.state().taken.len());
                    index.into_iter().for_each(|index| fake.complete(index));
                }
                Step::Poll(index) => {
                    let Some(index) = pick(index, in_flight.len()) else { continue };
                    let (record, one) = in_flight.swap_remove(index);
                    match one.poll() {
                        Ok(outcome) => {
                            outcomes += 1;
                            let has_record = |index: usize| outcome.image(index).is_some();
                            let taken = (0..outcome.count()).take_while(|index| has_record(*index)).count();
                            prop_assert!(taken >= 1 && !(taken..outcome.count()).any(has_record));
                            for (number, index) in (0..).zip(0..taken) {
                                prop_assert_eq!(outcome.status_and_result(index), (1, number));
                            }
                        }
                        Err(one) => in_flight.push((record, one)),
                    }
                }
                Step::Wait(index) => {
                    let Some(index) = pick(index, in_flight.len()) else { continue };
                    let (_, one) = in_flight.swap_remove(index);
                    let done = one.is_done();
                    prop_assert_eq!(one.wait(after(&queue, 7)).is_ok(), done);
                    outcomes += 1;
                }
                Step::Drop(index) => {
                    let Some(index) = pick(index, in_flight.len()) else { continue };
                    drop(in_flight.swap_remove(index));
                    outcomes += 1;
                }
                Step::Full(taken, times) => {
                    let answers = (0..times).map(|_| (taken, Some(Refusal::Full)));
                    fake.state().answers.extend(answers);
                }
                Step::RefuseBatches => fake.state().refuses_batches = true,
            }
            prop_assert!(queue.statistics().entries <= entries);
            prop_assert!(queue.statistics().entries as usize >= fake.state().taken.len());
            prop_assert!(!queue.is_dead());
        }
        prop_assert_eq!(submissions, outcomes + in_flight.len());
        // Nothing is left behind once the device has done everything.
        while !fake.state().taken.is_empty() {
            fake.complete(0);
        }
        for (_, one) in in_flight {
            prop_assert!(one.poll().is_ok());
        }
        fake.state().answers.clear();
        drop(queue.slot());
        prop_assert_eq!(queue.statistics().entries, 0);
        prop_assert_eq!(queue.statistics().late, queue.statistics().quarantined);
        let all: Vec<Slot> = std::iter::from_fn(|| queue.slot()).collect();
        let records: HashSet<_> = all.iter().map(|slot| slot.record_address(0)).collect();
        prop_assert_eq!(records.len(), all.len());
    }
}
