//! Hosts and guests in virtual time: migrations that take as long as their bytes at their rates.

use std::{
    collections::BTreeMap,
    num::{NonZeroU64, NonZeroUsize},
    time::{Duration, Instant},
};

use evacuation::{
    Action, At, End, Event, Failure, FailureKind, Fleet, Guest, GuestId, Host, HostId, Limits,
    Outcome, Plan, Scheduler,
};

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    /// All hosts.
    pub(crate) hosts: usize,
    /// How many of them are emptied at once.
    pub(crate) rack: usize,
    /// Guests on each host.
    pub(crate) guests: usize,
    /// Migrations at once, from and to each host.
    pub(crate) parallel: usize,
    /// Bytes a second of all migrations.
    pub(crate) bandwidth: u64,
    /// Of a thousand migrations, how many fail.
    pub(crate) failures: u32,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Found {
    pub(crate) guests: usize,
    pub(crate) moved: usize,
    pub(crate) tries: u32,
    /// Memory of the guests.
    pub(crate) memory: u64,
    /// What was sent, with what guests wrote meanwhile, and what failed.
    pub(crate) sent: f64,
    /// What all bytes of the memory take within the limit.
    pub(crate) bound: Duration,
    /// What it took.
    pub(crate) took: Duration,
    /// What planning took, on this machine.
    pub(crate) planning: Duration,
    /// What all decisions of the scheduler took, on this machine.
    pub(crate) scheduling: Duration,
    /// The most that was used at any moment, of the bandwidth.
    pub(crate) most_used: f64,
}

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// What a migration takes beside its bytes: connecting, and the switch at the end.
const SETUP: f64 = 0.5;

/// Memory that guests may have of a host, so that a rack finds room.
const HOST_MEMORY: u64 = 512 * GIB;

impl Scenario {
    /// Empties the first rack.
    pub(crate) fn empty_one_rack(&self, seed: u64) -> Found {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut places = self.populate(&mut random);
        self.empty(0..self.rack, &mut places, &mut random)
    }

    /// Empties all racks, one after the other. Hosts that were emptied take guests of the next ones.
    pub(crate) fn empty_all(&self, seed: u64) -> Found {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut places = self.populate(&mut random);
        let mut all = Found::default();
        for first in (0..self.hosts).step_by(self.rack) {
            let rack = first..(first + self.rack).min(self.hosts);
            let found = self.empty(rack, &mut places, &mut random);
            all.guests += found.guests;
            all.moved += found.moved;
            all.tries += found.tries;
            all.memory += found.memory;
            all.sent += found.sent;
            all.bound += found.bound;
            all.took += found.took;
            all.planning += found.planning;
            all.scheduling += found.scheduling;
            all.most_used = all.most_used.max(found.most_used);
        }
        all
    }

    /// The guests of all hosts.
    fn populate(&self, random: &mut fastrand::Rng) -> Vec<Guest> {
        let mut guests = Vec::new();
        for host in 0..self.hosts {
            for number in 0..self.guests {
                let memory = *random.choice(&[2, 4, 4, 8, 8, 16, 32]).unwrap_or(&4) * GIB;
                guests.push(Guest {
                    name: format!("guest{number} of host{host}"),
                    host: HostId(host),
                    memory,
                    cpus: 4,
                    dirty_rate: Some(random.u64(0..80) * MIB),
                    obstacles: Vec::new(),
                    barred: BTreeMap::new(),
                });
            }
        }
        guests
    }

    fn empty(
        &self,
        rack: std::ops::Range<usize>,
        places: &mut [Guest],
        random: &mut fastrand::Rng,
    ) -> Found {
        let mut free = vec![HOST_MEMORY; self.hosts];
        for guest in places.iter() {
            free[guest.host.0] -= guest.memory;
        }
        let hosts = free.iter().enumerate().map(|(number, free)| Host {
            name: format!("host{number}"),
            memory_free: *free,
            cpus: 64,
        });
        let is_here = |guest: &&mut Guest| rack.contains(&guest.host.0);
        let mut moving: Vec<_> = places.iter_mut().filter(is_here).collect();
        let guests = moving.iter().map(|guest| (**guest).clone()).collect();
        let others = (0..self.hosts).filter(|host| !rack.contains(host));
        let fleet = Fleet::new(hosts.collect(), guests, others.map(HostId).collect()).unwrap();
        let (found, to) = self.run(&fleet, random);
        for (guest, to) in moving.iter_mut().zip(to) {
            guest.host = to.unwrap_or(guest.host);
        }
        found
    }

    /// What came of it, and where each guest has moved.
    fn run(&self, fleet: &Fleet, random: &mut fastrand::Rng) -> (Found, Vec<Option<HostId>>) {
        let slots = NonZeroUsize::new(self.parallel).unwrap();
        let limits = Limits {
            per_source: slots,
            per_destination: slots,
            bandwidth: Some(self.bandwidth),
            rate_unit: NonZeroU64::new(MIB).unwrap(),
            least_rate: 5 * MIB,
            retries: 3,
            backoff: Duration::from_secs(5),
            timeout: None,
        };
        let start = Instant::now();
        let plan = Plan::new(fleet);
        let planning = start.elapsed();
        let mut world = World {
            running: BTreeMap::new(),
            now: 0.0,
            sent: 0.0,
            most_used: 0.0,
        };
        let mut scheduling = Duration::ZERO;
        let mut scheduler = Scheduler::new(fleet, &plan, limits);
        let mut event = Event::Tick;
        loop {
            let now = Duration::from_secs_f64(world.now);
            let start = Instant::now();
            let actions = scheduler.handle(now, event);
            let wake = scheduler.wake(now);
            scheduling += start.elapsed();
            for action in actions {
                world.act(fleet, action, random.u32(0..1000) < self.failures);
            }
            world.most_used = world.most_used.max(world.used() / self.bandwidth as f64);
            if scheduler.is_done() {
                break;
            }
            event = world.next(wake.map(|wake| wake.as_secs_f64()));
        }
        let ids = || (0..fleet.guests().len()).map(GuestId);
        let to = ids().map(|guest| match scheduler.outcome(guest) {
            Some(Outcome::Moved { to }) => Some(*to),
            _ => None,
        });
        let to: Vec<_> = to.collect();
        let memory = fleet.guests().iter().map(|guest| guest.memory).sum();
        let found = Found {
            guests: fleet.guests().len(),
            moved: to.iter().flatten().count(),
            tries: ids().map(|guest| scheduler.tries(guest)).sum(),
            memory,
            sent: world.sent,
            bound: Duration::from_secs_f64(memory as f64 / self.bandwidth as f64),
            took: Duration::from_secs_f64(world.now),
            planning,
            scheduling,
            most_used: world.most_used,
        };
        (found, to)
    }
}

/// Migrations under way, in virtual time.
struct World {
    running: BTreeMap<GuestId, Migration>,
    now: f64,
    sent: f64,
    most_used: f64,
}

struct Migration {
    setup: f64,
    remaining: f64,
    rate: f64,
    writes: f64,
    /// It fails when this is left.
    fails_at: Option<f64>,
}

impl World {
    fn act(&mut self, fleet: &Fleet, action: Action, fails: bool) {
        match action {
            Action::Start { guest, rate, .. } => {
                let is = fleet.guest(guest);
                let memory = is.memory as f64;
                let migration = Migration {
                    setup: SETUP,
                    remaining: memory,
                    rate: rate.unwrap() as f64,
                    writes: is.dirty_rate.unwrap_or(0) as f64,
                    fails_at: fails.then_some(memory / 2.0),
                };
                assert!(self.running.insert(guest, migration).is_none());
            }
            Action::SetRate { guest, rate } => {
                self.running.get_mut(&guest).unwrap().rate = rate as f64;
            }
            Action::Cancel { .. } => unreachable!("nothing is cancelled here"),
        }
    }

    fn used(&self) -> f64 {
        self.running.values().map(|it| it.rate).sum()
    }

    /// Goes to the next event, at `wake` at the latest.
    fn next(&mut self, wake: Option<f64>) -> Event {
        let first = self
            .running
            .iter()
            .map(|(guest, it)| (it.ends_in(), *guest));
        let first = first.min_by(|one, other| one.0.total_cmp(&other.0));
        let until_wake = wake.map(|wake| wake - self.now);
        match first {
            Some((after, guest)) if until_wake.is_none_or(|wake| after <= wake) => {
                self.pass(after);
                let ended = self.running.remove(&guest).unwrap();
                let failure = || Failure {
                    kind: FailureKind::Temporary,
                    reason: "as simulated".to_owned(),
                };
                Event::Ended(match ended.fails_at {
                    Some(_) => End {
                        guest,
                        at: At::Source,
                        result: Err(failure()),
                    },
                    None => End {
                        guest,
                        at: At::Destination,
                        result: Ok(()),
                    },
                })
            }
            _ => {
                self.pass(until_wake.expect("nothing runs, and nothing is waited for"));
                // Not before, by rounding.
                self.now = self.now.max(wake.unwrap());
                Event::Tick
            }
        }
    }

    fn pass(&mut self, seconds: f64) {
        for migration in self.running.values_mut() {
            self.sent += migration.pass(seconds);
        }
        self.now += seconds;
    }
}

impl Migration {
    /// How fast less is left.
    fn progress(&self) -> f64 {
        // One that cannot end is made to: by auto-converge, or whatever it is.
        (self.rate - self.writes).max(self.rate / 10.0)
    }

    fn ends_in(&self) -> f64 {
        self.setup + (self.remaining - self.fails_at.unwrap_or(0.0)).max(0.0) / self.progress()
    }

    /// What is sent meanwhile.
    fn pass(&mut self, seconds: f64) -> f64 {
        let setup = self.setup.min(seconds);
        self.setup -= setup;
        self.remaining -= (seconds - setup) * self.progress();
        (seconds - setup) * self.rate
    }
}
