//! Hosts and guests in virtual time: migrations share the network equally, and take as long as their bytes at that rate.

use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use evacuation::{
    Action, At, End, Event, Failure, Fleet, Guest, GuestId, Host, HostId, Limits, Outcome, Plan,
    Scheduler, SourceId,
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
    /// Bytes a second of the network.
    pub(crate) bandwidth: u64,
    /// Of a thousand migrations, how many fail.
    pub(crate) failures: u32,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Found {
    pub(crate) guests: usize,
    pub(crate) moved: usize,
    pub(crate) tries: usize,
    /// Memory of the guests.
    pub(crate) memory: u64,
    /// What was sent, with what guests wrote meanwhile, and what failed.
    pub(crate) sent: f64,
    /// What all bytes of the memory take at the network's bandwidth.
    pub(crate) bound: Duration,
    /// What it took.
    pub(crate) took: Duration,
    /// What planning took, on this machine.
    pub(crate) planning: Duration,
    /// What all decisions of the scheduler took, on this machine.
    pub(crate) scheduling: Duration,
}

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// What a migration takes beside its bytes: connecting, and the switch at the end.
const SETUP: f64 = 0.5;

/// Seconds between two ticks.
const TICK: f64 = 1.0;

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
                    source: SourceId(host),
                    memory,
                    cpus: 4,
                    image: None,
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
            free[guest.source.0] -= guest.memory;
        }
        let others: Vec<_> = (0..self.hosts)
            .filter(|host| !rack.contains(host))
            .collect();
        let destinations = others.iter().map(|number| Host {
            name: format!("host{number}"),
            memory_free: free[*number],
            cpus: 64,
        });
        let is_here = |guest: &&mut Guest| rack.contains(&guest.source.0);
        let mut moving: Vec<_> = places.iter_mut().filter(is_here).collect();
        let fleet = Fleet {
            destinations: destinations.collect(),
            guests: moving.iter().map(|guest| (**guest).clone()).collect(),
        };
        let (found, to) = self.run(&fleet, random);
        for (guest, to) in moving.iter_mut().zip(to) {
            guest.source = to.map_or(guest.source, |to| SourceId(others[to.0]));
        }
        found
    }

    /// What came of it, and where each guest has moved.
    fn run(&self, fleet: &Fleet, random: &mut fastrand::Rng) -> (Found, Vec<Option<HostId>>) {
        let slots = NonZeroUsize::new(self.parallel).unwrap();
        let limits = Limits {
            per_host: slots,
            retries: 3,
            backoff: Duration::from_secs(5),
            timeout: None,
        };
        let start = Instant::now();
        let plan = Plan::new(fleet);
        let planning = start.elapsed();
        let mut world = World {
            running: BTreeMap::new(),
            bandwidth: self.bandwidth as f64,
            now: 0.0,
            sent: 0.0,
        };
        let mut scheduling = Duration::ZERO;
        let mut scheduler = Scheduler::new(fleet, &plan, limits);
        let mut event = Event::Tick;
        loop {
            let now = Duration::from_secs_f64(world.now);
            let start = Instant::now();
            let actions = scheduler.handle(now, event);
            scheduling += start.elapsed();
            for action in actions {
                let fails = random.u32(0..1000) < self.failures;
                let writes = random.u64(0..80) * MIB;
                world.act(fleet, action, fails, writes as f64);
            }
            if scheduler.is_done() {
                break;
            }
            event = world.next();
        }
        let ids = || (0..fleet.guests.len()).map(GuestId);
        let to = ids().map(|guest| match scheduler.outcome(guest) {
            Some(Outcome::Moved { to }) => Some(*to),
            _ => None,
        });
        let to: Vec<_> = to.collect();
        let memory = fleet.guests.iter().map(|guest| guest.memory).sum();
        let found = Found {
            guests: fleet.guests.len(),
            moved: to.iter().flatten().count(),
            tries: ids().map(|guest| scheduler.tries(guest)).sum(),
            memory,
            sent: world.sent,
            bound: Duration::from_secs_f64(memory as f64 / self.bandwidth as f64),
            took: Duration::from_secs_f64(world.now),
            planning,
            scheduling,
        };
        (found, to)
    }
}

/// Migrations under way, in virtual time.
struct World {
    running: BTreeMap<GuestId, Migration>,
    /// Bytes a second of the network.
    bandwidth: f64,
    now: f64,
    sent: f64,
}

struct Migration {
    setup: f64,
    remaining: f64,
    /// Bytes a second that the guest writes.
    writes: f64,
    /// It fails when this is left.
    fails_at: Option<f64>,
}

impl World {
    fn act(&mut self, fleet: &Fleet, action: Action, fails: bool, writes: f64) {
        let Action::Start { guest, .. } = action else {
            unreachable!("nothing is cancelled here");
        };
        let memory = fleet.guest(guest).memory as f64;
        let migration = Migration {
            setup: SETUP,
            remaining: memory,
            writes,
            fails_at: fails.then_some(memory / 2.0),
        };
        assert!(self.running.insert(guest, migration).is_none());
    }

    /// Bytes a second of each migration.
    fn rate(&self) -> f64 {
        self.bandwidth / self.running.len() as f64
    }

    /// Goes to the end of a migration, but no further than to the next tick.
    fn next(&mut self) -> Event {
        let rate = self.rate();
        let first = self
            .running
            .iter()
            .map(|(guest, it)| (it.ends_in(rate), *guest));
        let first = first.min_by(|one, other| one.0.total_cmp(&other.0));
        match first {
            Some((after, guest)) if after <= TICK => {
                self.pass(after);
                let ended = self.running.remove(&guest).unwrap();
                Event::Ended(match ended.fails_at {
                    Some(_) => End {
                        guest,
                        at: At::Source,
                        result: Err(Failure::temporary("as simulated")),
                    },
                    None => End {
                        guest,
                        at: At::Destination,
                        result: Ok(()),
                    },
                })
            }
            _ => {
                self.pass(TICK);
                Event::Tick
            }
        }
    }

    fn pass(&mut self, seconds: f64) {
        let rate = self.rate();
        for migration in self.running.values_mut() {
            self.sent += migration.pass(seconds, rate);
        }
        self.now += seconds;
    }
}

impl Migration {
    /// How fast less is left.
    fn progress(&self, rate: f64) -> f64 {
        // A busy guest is slowed down, by auto-converge for example.
        (rate - self.writes).max(rate / 10.0)
    }

    fn ends_in(&self, rate: f64) -> f64 {
        self.setup + (self.remaining - self.fails_at.unwrap_or(0.0)).max(0.0) / self.progress(rate)
    }

    /// What is sent meanwhile.
    fn pass(&mut self, seconds: f64, rate: f64) -> f64 {
        let setup = self.setup.min(seconds);
        self.setup -= setup;
        self.remaining -= (seconds - setup) * self.progress(rate);
        (seconds - setup) * rate
    }
}
