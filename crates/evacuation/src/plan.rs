//! Which guest moves where, and which cannot.

use std::cmp::Reverse;

use thiserror::Error;

use crate::{Fleet, Guest, GuestId, HostId};

/// The plan of an evacuation. The same fleet has the same plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The moves in the order in which they begin, the largest guests first.
    pub moves: Vec<Move>,
    /// The guests that cannot move.
    pub stays: Vec<(GuestId, Hindrance)>,
}

/// A guest and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The guest.
    pub guest: GuestId,
    /// Its destination.
    pub to: HostId,
}

/// Why a guest cannot move.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Hindrance {
    /// The guest itself prevents it.
    #[error("{}", .0.join("; "))]
    Obstacles(Vec<String>),
    /// No destination takes the guest.
    #[error("no destination accepts it: {}", list(.0))]
    NoDestination(Vec<String>),
}

impl Plan {
    /// Chooses a destination for each guest.
    pub fn new(fleet: &Fleet) -> Self {
        let spread = Self::placed(fleet, Preference::Spread);
        if spread.left_over(fleet) == 0 {
            return spread;
        }
        // An even spread may leave no room for large guests.
        let tight = Self::placed(fleet, Preference::Tight);
        match tight.left_over(fleet) < spread.left_over(fleet) {
            true => tight,
            false => spread,
        }
    }

    fn placed(fleet: &Fleet, preference: Preference) -> Self {
        let hosts = fleet.hosts().iter();
        let mut free: Vec<_> = hosts.map(|host| host.memory_free).collect();
        let (mut moves, mut stays) = (Vec::new(), Vec::new());
        let mut guests: Vec<_> = fleet.guest_ids().collect();
        guests.sort_by_key(|&id| (Reverse(fleet.guest(id).memory), id));
        for id in guests {
            let guest = fleet.guest(id);
            if !guest.obstacles.is_empty() {
                let why = Hindrance::Obstacles(guest.obstacles.clone());
                stays.push((id, why));
                continue;
            }
            match choose(fleet, guest, &free, preference) {
                Some(to) => {
                    free[to.0] -= guest.memory;
                    moves.push(Move { guest: id, to });
                }
                None => {
                    let why = refusals(fleet, guest, &free);
                    stays.push((id, Hindrance::NoDestination(why)));
                }
            }
        }
        Self { moves, stays }
    }

    /// Bytes of the guests that found no destination.
    fn left_over(&self, fleet: &Fleet) -> u128 {
        let stays = self.stays.iter();
        let without = stays.filter(|(_, why)| matches!(why, Hindrance::NoDestination(_)));
        // A guest without memory counts, too.
        without
            .map(|(id, _)| u128::from(fleet.guest(*id).memory) + 1)
            .sum()
    }
}

/// Which of the hosts with enough memory is chosen.
#[derive(Clone, Copy)]
enum Preference {
    /// The one with the most left.
    Spread,
    /// The one with the least left.
    Tight,
}

fn choose(fleet: &Fleet, guest: &Guest, free: &[u64], preference: Preference) -> Option<HostId> {
    let takes = |host: &HostId| refusal(fleet, guest, *host, free[host.0]).is_none();
    let hosts = fleet.destinations().iter().copied().filter(takes);
    match preference {
        Preference::Spread => hosts.min_by_key(|host| (Reverse(free[host.0]), *host)),
        Preference::Tight => hosts.min_by_key(|host| (free[host.0], *host)),
    }
}

/// Each destination with its reason.
fn refusals(fleet: &Fleet, guest: &Guest, free: &[u64]) -> Vec<String> {
    let refused = fleet.destinations().iter().filter_map(|&host| {
        let why = refusal(fleet, guest, host, free[host.0])?;
        Some(format!("{}: {why}", fleet.host(host).name))
    });
    refused.collect()
}

/// Why a host with `free` bytes left does not accept a guest.
pub(crate) fn refusal(fleet: &Fleet, guest: &Guest, host: HostId, free: u64) -> Option<String> {
    let cpus = fleet.host(host).cpus;
    if let Some(why) = guest.barred.get(&host) {
        Some(why.clone())
    } else if guest.cpus > cpus {
        Some(format!("it has {cpus} CPUs, the guest {}", guest.cpus))
    } else if guest.memory > free {
        let [free, needed] = [free, guest.memory].map(|bytes| bytes >> 20);
        Some(format!(
            "it has {free} MiB of memory left, the guest needs {needed} MiB"
        ))
    } else {
        None
    }
}

/// The first few refusals: there may be a thousand.
fn list(refused: &[String]) -> String {
    const SHOWN: usize = 3;
    let text = match refused.len() {
        0 => "there is none".to_owned(),
        all => refused[..all.min(SHOWN)].join("; "),
    };
    match refused.len().saturating_sub(SHOWN) {
        0 => text,
        more => format!("{text}; and {more} more"),
    }
}
