//! What a schedule promises, whatever happens to its migrations.

use std::{
    collections::{BTreeMap, BTreeSet},
    num::{NonZeroU64, NonZeroUsize},
    time::Duration,
};

use evacuation::{
    Action, At, End, Event, Failure, FailureKind, Fleet, GuestId, HostId, Limits, Outcome, Plan,
    Scheduler, Stay, Stop,
};
use proptest::{collection::vec, option, prelude::*};

use crate::strategies::fleet;

/// What happens next.
#[derive(Clone, Debug)]
enum Step {
    Ends(usize, At, Result<(), FailureKind>),
    Writes(usize, u64),
    Time(u64),
    Stop(Stop),
}

fn step() -> impl Strategy<Value = Step> {
    let at = prop_oneof![
        6 => Just(At::Destination),
        6 => Just(At::Source),
        1 => Just(At::Both),
        1 => Just(At::Neither),
        1 => Just(At::Unknown),
    ];
    let kind = prop_oneof![
        4 => Just(FailureKind::Temporary),
        1 => Just(FailureKind::Permanent),
        1 => Just(FailureKind::Cancelled),
    ];
    let result = prop_oneof![Just(Ok(())).boxed(), kind.prop_map(Err).boxed()];
    prop_oneof![
        20 => (any::<usize>(), at, result).prop_map(|(guest, at, result)| Step::Ends(guest, at, result)),
        4 => (any::<usize>(), 0..60_u64).prop_map(|(guest, rate)| Step::Writes(guest, rate)),
        10 => (1..20_u64).prop_map(Step::Time),
        1 => prop_oneof![Just(Stop::Finish), Just(Stop::Cancel)].prop_map(Step::Stop),
    ]
}

fn limits() -> impl Strategy<Value = Limits> {
    let bandwidth = option::of(10..120_u64);
    (
        1..4_usize,
        1..4_usize,
        bandwidth,
        (1..=10_u64, 0..40_u64),
        0..3_u32,
        option::of(5..40_u64),
    )
        .prop_map(
            |(source, destination, bandwidth, (unit, least_rate), retries, timeout)| Limits {
                per_source: NonZeroUsize::new(source).unwrap(),
                per_destination: NonZeroUsize::new(destination).unwrap(),
                bandwidth,
                rate_unit: NonZeroU64::new(unit).unwrap(),
                least_rate,
                retries,
                backoff: Duration::from_secs(4),
                timeout: timeout.map(Duration::from_secs),
            },
        )
}

/// Does what the scheduler says, and checks it.
struct World<'a> {
    fleet: &'a Fleet,
    limits: Limits,
    running: BTreeMap<GuestId, (HostId, Option<u64>)>,
    cancelled: BTreeSet<GuestId>,
    /// Where guests have moved to, or may have.
    taken: BTreeMap<GuestId, HostId>,
    tries: BTreeMap<GuestId, u32>,
}

impl World<'_> {
    fn act(&mut self, actions: &[Action]) -> Result<(), TestCaseError> {
        for action in actions {
            match *action {
                Action::Start { guest, to, rate } => {
                    let before = self.running.insert(guest, (to, rate));
                    prop_assert!(before.is_none(), "started while it runs");
                    prop_assert!(!self.taken.contains_key(&guest), "started when it is gone");
                    *self.tries.entry(guest).or_default() += 1;
                    prop_assert!(self.tries[&guest] <= 1 + self.limits.retries);
                    self.cancelled.remove(&guest);
                }
                Action::SetRate { guest, rate } => {
                    let running = self.running.get_mut(&guest).unwrap();
                    prop_assert!(running.1.is_some_and(|before| before != rate));
                    running.1 = Some(rate);
                }
                Action::Cancel { guest } => {
                    prop_assert!(self.running.contains_key(&guest));
                    prop_assert!(self.cancelled.insert(guest), "cancelled twice");
                }
            }
            self.check()?;
        }
        Ok(())
    }

    /// At any moment, also between two actions.
    fn check(&self) -> Result<(), TestCaseError> {
        let mut all = 0;
        let (mut from, mut into) = (BTreeMap::new(), BTreeMap::new());
        let mut memory = BTreeMap::<HostId, u64>::new();
        for (guest, (to, rate)) in &self.running {
            let guest = self.fleet.guest(*guest);
            *memory.entry(*to).or_default() += guest.memory;
            for (hosts, host) in [(&mut from, guest.host), (&mut into, *to)] {
                *hosts.entry(host).or_insert(0_usize) += 1;
            }
            let unit = self.limits.rate_unit.get();
            prop_assert!(rate.is_none_or(|rate| rate >= unit && rate % unit == 0));
            all += rate.unwrap_or(0);
        }
        if let Some(limit) = self.limits.bandwidth {
            prop_assert!(all <= limit && self.running.values().all(|(_, rate)| rate.is_some()));
        }
        prop_assert!(
            from.values()
                .all(|count| *count <= self.limits.per_source.get())
        );
        prop_assert!(
            into.values()
                .all(|count| *count <= self.limits.per_destination.get())
        );
        for (guest, host) in &self.taken {
            *memory.entry(*host).or_default() += self.fleet.guest(*guest).memory;
        }
        for (host, memory) in memory {
            prop_assert!(memory <= self.fleet.host(host).memory_free);
        }
        Ok(())
    }

    fn ends(&mut self, guest: GuestId, at: At) {
        let (to, _) = self.running.remove(&guest).unwrap();
        if at != At::Source {
            self.taken.insert(guest, to);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn all_limits_are_kept_and_each_guest_has_one_outcome(
        fleet in fleet(),
        limits in limits(),
        steps in vec(step(), 0..120),
    ) {
        let plan = Plan::new(&fleet);
        let mut scheduler = Scheduler::new(&fleet, &plan, limits);
        let mut world = World {
            fleet: &fleet,
            limits,
            running: BTreeMap::new(),
            cancelled: BTreeSet::new(),
            taken: BTreeMap::new(),
            tries: BTreeMap::new(),
        };
        let mut now = Duration::ZERO;
        let mut stopped = None;
        let first = scheduler.clone().handle(now, Event::Tick);
        prop_assert_eq!(&first, &scheduler.handle(now, Event::Tick), "not deterministic");
        world.act(&first)?;
        // Whatever has not ended ends now, at its destination.
        let last = std::iter::repeat(Step::Ends(0, At::Destination, Ok(())));
        let mut steps = steps.into_iter().chain(last);
        while !scheduler.is_done() {
            let running: Vec<_> = world.running.keys().copied().collect();
            prop_assert_eq!(&running, &{
                let mut all: Vec<_> = scheduler.running().map(|(guest, _)| guest).collect();
                all.sort();
                all
            });
            let event = match steps.next().unwrap() {
                _ if running.is_empty() => {
                    // Nothing happens any more: it says itself when to ask again.
                    now = scheduler.wake(now).expect("nothing runs, and nothing is waited for");
                    Event::Tick
                }
                Step::Ends(index, at, result) => {
                    let guest = running[index % running.len()];
                    world.ends(guest, at);
                    let failure = |kind| Failure { kind, reason: "it failed".to_owned() };
                    Event::Ended(End { guest, at, result: result.map_err(failure) })
                }
                Step::Writes(index, rate) => Event::DirtyRate { guest: running[index % running.len()], rate },
                Step::Time(seconds) => {
                    now += Duration::from_secs(seconds);
                    Event::Tick
                }
                Step::Stop(stop) => {
                    stopped = stopped.max(Some(stop));
                    Event::Stop(stop)
                }
            };
            let actions = scheduler.handle(now, event);
            if stopped.is_some() {
                let is_start = |it: &Action| matches!(it, Action::Start { .. });
prop_assert!(!actions.iter().any(is_start));
            }
            world.act(&actions)?;
            if stopped == Some(Stop::Cancel) {
                prop_assert!(world.running.keys().all(|guest| world.cancelled.contains(guest)));
            }
        }
        prop_assert!(world.running.is_empty());
        let hindered: BTreeSet<_> = plan.stays.iter().map(|(guest, _)| *guest).collect();
        for guest in (0..fleet.guests().len()).map(GuestId) {
            prop_assert_eq!(scheduler.tries(guest), world.tries.get(&guest).copied().unwrap_or(0));
            match scheduler.outcome(guest).expect("a guest without an outcome") {
                Outcome::Moved { to } | Outcome::InDoubt { to, .. } => {
                    prop_assert_eq!(world.taken.get(&guest), Some(to));
                }
                Outcome::Stays(stay) => {
                    prop_assert!(!world.taken.contains_key(&guest));
                    let is_hindered = matches!(stay, Stay::Hindered(_));
                    prop_assert_eq!(is_hindered, hindered.contains(&guest));
                    let is_of_a_stop = matches!(stay, Stay::NotStarted | Stay::Cancelled);
                    prop_assert!(!is_of_a_stop || stopped.is_some());
                }
            }
        }
    }
}

#[test]
fn a_guest_that_failed_goes_elsewhere_after_a_while() {
    let fleet = small();
    let plan = Plan::new(&fleet);
    let mut scheduler = Scheduler::new(&fleet, &plan, one_at_once());
    let first = scheduler.handle(Duration::ZERO, Event::Tick);
    assert_eq!(first, [start(1)]);
    let failed = End {
        guest: GuestId(0),
        at: At::Source,
        result: Err(Failure {
            kind: FailureKind::Temporary,
            reason: "no port is free".to_owned(),
        }),
    };
    let seconds = Duration::from_secs;
    let failed = Event::Ended(failed);
    assert_eq!(scheduler.handle(seconds(1), failed.clone()), []);
    assert_eq!(scheduler.wake(seconds(1)), Some(seconds(5)));
    assert_eq!(scheduler.handle(seconds(5), Event::Tick), [start(2)]);
    // The second wait is twice as long.
    assert_eq!(scheduler.handle(seconds(6), failed.clone()), []);
    assert_eq!(scheduler.wake(seconds(6)), Some(seconds(14)));
    assert_eq!(scheduler.handle(seconds(14), Event::Tick), [start(1)]);
    assert_eq!(scheduler.handle(seconds(15), failed), []);
    let outcome = scheduler.outcome(GuestId(0)).unwrap();
    let Outcome::Stays(stay) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(stay.to_string(), "no port is free");
    assert!(scheduler.is_done());
}

#[test]
fn the_observed_location_counts_not_the_result() {
    let fleet = small();
    let plan = Plan::new(&fleet);
    let lost = Err(Failure {
        kind: FailureKind::Temporary,
        reason: "the connection was lost".to_owned(),
    });
    for (at, result, is_moved) in [(At::Destination, lost, true), (At::Source, Ok(()), false)] {
        let mut scheduler = Scheduler::new(&fleet, &plan, one_at_once());
        scheduler.handle(Duration::ZERO, Event::Tick);
        let guest = GuestId(0);
        scheduler.handle(Duration::ZERO, Event::Ended(End { guest, at, result }));
        let moved = Some(&Outcome::Moved { to: HostId(1) });
        assert_eq!(scheduler.outcome(guest) == moved, is_moved);
    }
}

#[test]
fn a_migration_that_takes_too_long_is_cancelled_once_and_tried_again() {
    let fleet = small();
    let plan = Plan::new(&fleet);
    let limits = Limits {
        timeout: Some(Duration::from_secs(60)),
        ..one_at_once()
    };
    let mut scheduler = Scheduler::new(&fleet, &plan, limits);
    scheduler.handle(Duration::ZERO, Event::Tick);
    let wake = scheduler.wake(Duration::ZERO).unwrap();
    assert_eq!(wake, Duration::from_secs(60));
    let guest = GuestId(0);
    assert_eq!(
        scheduler.handle(wake, Event::Tick),
        [Action::Cancel { guest }]
    );
    assert_eq!(scheduler.handle(wake * 2, Event::Tick), []);
    assert_eq!(scheduler.wake(wake * 2), None);
    let end = End {
        guest,
        at: At::Source,
        result: Err(Failure {
            kind: FailureKind::Cancelled,
            reason: "cancelled by the client".to_owned(),
        }),
    };
    scheduler.handle(wake * 2, Event::Ended(end));
    assert!(scheduler.outcome(guest).is_none(), "it is not tried again");
}

#[test]
fn a_busy_guest_gets_enough_bandwidth_to_converge() {
    let fleet = small();
    let guests = [70, 10].map(|dirty| evacuation::Guest {
        dirty_rate: Some(dirty),
        ..fleet.guests()[0].clone()
    });
    let fleet = Fleet::new(
        fleet.hosts().to_vec(),
        guests.to_vec(),
        fleet.destinations().to_vec(),
    );
    let fleet = fleet.unwrap();
    let limits = Limits {
        per_source: NonZeroUsize::new(4).unwrap(),
        bandwidth: Some(100),
        ..one_at_once()
    };
    let plan = Plan::new(&fleet);
    // Half of 100 is not enough for the first one.
    let mut scheduler = Scheduler::new(&fleet, &plan, limits);
    assert_eq!(scheduler.handle(Duration::ZERO, Event::Tick).len(), 1);
    // It is not enough for it anyhow.
    let limits = Limits {
        bandwidth: Some(60),
        ..limits
    };
    let mut scheduler = Scheduler::new(&fleet, &plan, limits);
    assert_eq!(scheduler.handle(Duration::ZERO, Event::Tick).len(), 2);
}

#[test]
fn no_more_run_than_have_the_least_rate() {
    let fleet = small();
    let guests = vec![fleet.guests()[0].clone(); 4];
    let fleet = Fleet::new(
        fleet.hosts().to_vec(),
        guests,
        fleet.destinations().to_vec(),
    );
    let fleet = fleet.unwrap();
    let plan = Plan::new(&fleet);
    for (bandwidth, started) in [(14, 2), (15, 3), (4, 1)] {
        let limits = Limits {
            per_source: NonZeroUsize::new(4).unwrap(),
            per_destination: NonZeroUsize::new(4).unwrap(),
            bandwidth: Some(bandwidth),
            least_rate: 5,
            ..one_at_once()
        };
        let mut scheduler = Scheduler::new(&fleet, &plan, limits);
        let actions = scheduler.handle(Duration::ZERO, Event::Tick);
        assert_eq!(actions.len(), started);
    }
}

#[test]
fn a_migration_has_at_least_one_unit() {
    let fleet = small();
    let limits = Limits {
        bandwidth: Some(1),
        rate_unit: NonZeroU64::new(2).unwrap(),
        ..one_at_once()
    };
    let mut scheduler = Scheduler::new(&fleet, &Plan::new(&fleet), limits);
    let actions = scheduler.handle(Duration::ZERO, Event::Tick);
    assert!(
        matches!(actions[..], [Action::Start { rate: Some(2), .. }]),
        "{actions:?}"
    );
}

fn start(to: usize) -> Action {
    Action::Start {
        guest: GuestId(0),
        to: HostId(to),
        rate: None,
    }
}

/// A guest, and two hosts for it.
fn small() -> Fleet {
    let host = |name: &str| evacuation::Host {
        name: name.to_owned(),
        memory_free: 8,
        cpus: 1,
    };
    let guest = evacuation::Guest {
        name: "guest".to_owned(),
        host: HostId(0),
        memory: 4,
        cpus: 1,
        dirty_rate: None,
        obstacles: Vec::new(),
        barred: BTreeMap::new(),
    };
    let hosts = ["old", "one", "other"].map(host).to_vec();
    Fleet::new(hosts, vec![guest], vec![HostId(1), HostId(2)]).unwrap()
}

fn one_at_once() -> Limits {
    Limits {
        per_source: NonZeroUsize::MIN,
        per_destination: NonZeroUsize::MIN,
        bandwidth: None,
        rate_unit: NonZeroU64::MIN,
        least_rate: 1,
        retries: 2,
        backoff: Duration::from_secs(4),
        timeout: None,
    }
}
