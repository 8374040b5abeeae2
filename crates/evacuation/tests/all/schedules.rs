//! Guarantees of a schedule, for any sequence of events.

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroUsize,
    time::Duration,
};

use evacuation::{
    Action, At, End, Event, Failure, Fleet, GuestId, HostId, Limits, Outcome, Plan, Scheduler,
    SourceId, Stay, Stop,
};
use proptest::{collection::vec, option, prelude::*};

use crate::strategies::fleet;

/// The next event.
#[derive(Clone, Debug)]
enum Step {
    Ends(usize, At, Result<(), Failure>),
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
    let result = prop_oneof![
        3 => Just(Ok(())),
        2 => Just(Err(Failure::temporary("it failed"))),
        1 => Just(Err(Failure::permanent("it failed for good"))),
    ];
    prop_oneof![
        20 => (any::<usize>(), at, result).prop_map(|(guest, at, result)| Step::Ends(guest, at, result)),
        10 => (1..20_u64).prop_map(Step::Time),
        1 => prop_oneof![Just(Stop::Finish), Just(Stop::Cancel)].prop_map(Step::Stop),
    ]
}

fn limits() -> impl Strategy<Value = Limits> {
    (1..4_usize, 0..3_u32, option::of(5..40_u64)).prop_map(|(per_host, retries, timeout)| Limits {
        per_host: NonZeroUsize::new(per_host).unwrap(),
        retries,
        backoff: Duration::from_secs(4),
        timeout: timeout.map(Duration::from_secs),
    })
}

/// Carries out the actions, and checks them.
struct World<'a> {
    fleet: &'a Fleet,
    limits: Limits,
    running: BTreeMap<GuestId, HostId>,
    cancelled: BTreeSet<GuestId>,
    /// Guests that have moved, or may have moved, with their destinations.
    taken: BTreeMap<GuestId, HostId>,
    tries: BTreeMap<GuestId, u32>,
}

impl World<'_> {
    fn act(&mut self, actions: &[Action]) -> Result<(), TestCaseError> {
        for action in actions {
            match *action {
                Action::Start { guest, to } => {
                    let before = self.running.insert(guest, to);
                    prop_assert!(before.is_none(), "started while it runs");
                    prop_assert!(!self.taken.contains_key(&guest), "started when it is gone");
                    *self.tries.entry(guest).or_default() += 1;
                    prop_assert!(self.tries[&guest] <= 1 + self.limits.retries);
                    self.cancelled.remove(&guest);
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

    /// Checks the limits, also between two actions.
    fn check(&self) -> Result<(), TestCaseError> {
        let (mut from, mut into) = (BTreeMap::new(), BTreeMap::new());
        let mut memory = BTreeMap::<HostId, u64>::new();
        for (guest, to) in &self.running {
            let guest = self.fleet.guest(*guest);
            *memory.entry(*to).or_default() += guest.memory;
            *from.entry(guest.source).or_insert(0_usize) += 1;
            *into.entry(*to).or_insert(0_usize) += 1;
        }
        let mut counts = from.values().chain(into.values());
        prop_assert!(counts.all(|count| *count <= self.limits.per_host.get()));
        for (guest, host) in &self.taken {
            *memory.entry(*host).or_default() += self.fleet.guest(*guest).memory;
        }
        for (host, memory) in memory {
            prop_assert!(memory <= self.fleet.host(host).memory_free);
        }
        Ok(())
    }

    fn ends(&mut self, guest: GuestId, at: At) {
        let to = self.running.remove(&guest).unwrap();
        if at != At::Source {
            self.taken.insert(guest, to);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn limits_are_kept_and_each_guest_has_one_outcome(
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
        // After the steps, each remaining migration ends at its destination.
        let last = std::iter::repeat(Step::Ends(0, At::Destination, Ok(())));
        let mut steps = steps.into_iter().chain(last);
        while !scheduler.is_done() {
            let running: Vec<_> = world.running.keys().copied().collect();
            let event = match steps.next().unwrap() {
                _ if running.is_empty() => {
                    // All guests that are left wait for their next try.
                    now += Duration::from_secs(1);
                    prop_assert!(now < Duration::from_secs(100_000), "nothing starts any more");
                    Event::Tick
                }
                Step::Ends(index, at, result) => {
                    let guest = running[index % running.len()];
                    world.ends(guest, at);
                    Event::Ended(End { guest, at, result })
                }
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
        for guest in (0..fleet.guests.len()).map(GuestId) {
            prop_assert_eq!(scheduler.tries(guest), world.tries.get(&guest).copied().unwrap_or(0) as usize);
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
fn failed_guest_is_retried_elsewhere_after_a_backoff() {
    let fleet = small();
    let plan = Plan::new(&fleet);
    let mut scheduler = Scheduler::new(&fleet, &plan, one_at_once());
    let first = scheduler.handle(Duration::ZERO, Event::Tick);
    assert_eq!(first, [start(0)]);
    let failed = End {
        guest: GuestId(0),
        at: At::Source,
        result: Err(Failure::temporary("no port is free")),
    };
    let seconds = Duration::from_secs;
    let failed = Event::Ended(failed);
    assert_eq!(scheduler.handle(seconds(1), failed.clone()), []);
    assert_eq!(scheduler.handle(seconds(4), Event::Tick), []);
    assert_eq!(scheduler.handle(seconds(5), Event::Tick), [start(1)]);
    // The second wait is twice as long.
    assert_eq!(scheduler.handle(seconds(6), failed.clone()), []);
    assert_eq!(scheduler.handle(seconds(13), Event::Tick), []);
    assert_eq!(scheduler.handle(seconds(14), Event::Tick), [start(0)]);
    assert_eq!(scheduler.handle(seconds(15), failed), []);
    let outcome = scheduler.outcome(GuestId(0)).unwrap();
    let Outcome::Stays(stay) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(stay.to_string(), "no port is free");
    assert!(scheduler.is_done());
}

#[test]
fn observed_location_overrides_the_result() {
    let fleet = small();
    let plan = Plan::new(&fleet);
    let lost = Err(Failure::temporary("the connection was lost"));
    for (at, result, is_moved) in [(At::Destination, lost, true), (At::Source, Ok(()), false)] {
        let mut scheduler = Scheduler::new(&fleet, &plan, one_at_once());
        scheduler.handle(Duration::ZERO, Event::Tick);
        let guest = GuestId(0);
        scheduler.handle(Duration::ZERO, Event::Ended(End { guest, at, result }));
        let moved = Some(&Outcome::Moved { to: HostId(0) });
        assert_eq!(scheduler.outcome(guest) == moved, is_moved);
    }
}

#[test]
fn late_migration_is_cancelled_once_and_retried() {
    let fleet = small();
    let plan = Plan::new(&fleet);
    let limits = Limits {
        timeout: Some(Duration::from_secs(60)),
        ..one_at_once()
    };
    let mut scheduler = Scheduler::new(&fleet, &plan, limits);
    scheduler.handle(Duration::ZERO, Event::Tick);
    let seconds = Duration::from_secs;
    let guest = GuestId(0);
    assert_eq!(scheduler.handle(seconds(59), Event::Tick), []);
    assert_eq!(
        scheduler.handle(seconds(60), Event::Tick),
        [Action::Cancel { guest }]
    );
    assert_eq!(scheduler.handle(seconds(120), Event::Tick), []);
    let end = End {
        guest,
        at: At::Source,
        result: Err(Failure::permanent("cancelled by the client")),
    };
    scheduler.handle(seconds(120), Event::Ended(end));
    assert!(scheduler.outcome(guest).is_none(), "it is not tried again");
}

fn start(to: usize) -> Action {
    Action::Start {
        guest: GuestId(0),
        to: HostId(to),
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
        source: SourceId(0),
        memory: 4,
        cpus: 1,
        image: None,
        obstacles: Vec::new(),
        barred: BTreeMap::new(),
    };
    Fleet {
        destinations: ["one", "other"].map(host).to_vec(),
        guests: vec![guest],
    }
}

fn one_at_once() -> Limits {
    Limits {
        per_host: NonZeroUsize::MIN,
        retries: 2,
        backoff: Duration::from_secs(4),
        timeout: None,
    }
}
