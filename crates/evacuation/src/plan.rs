//! Plan: destinations of the guests, and the guests that cannot move.

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

/// A guest and its destination.
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
    /// Reasons that lie in the guest itself.
    #[error("{}", .0.join("; "))]
    Obstacles(Vec<String>),
    /// No destination accepts the guest.
    #[error("no destination accepts the guest: {}", list(.0))]
    NoDestination(Vec<String>),
}

impl Plan {
    /// Chooses a destination for each guest.
    pub fn new(fleet: &Fleet) -> Self {
        let spread = Self::placed(fleet, Preference::Spread);
        if spread.left_over(fleet) == 0 {
            return spread;
        }
        // Spread evenly, guests may leave so little room on each host that a later one fits nowhere.
        let tight = Self::placed(fleet, Preference::Tight);
        match tight.left_over(fleet) < spread.left_over(fleet) {
            true => tight,
            false => spread,
        }
    }

    fn placed(fleet: &Fleet, preference: Preference) -> Self {
        let hosts = fleet.destinations.iter();
        let mut free: Vec<_> = hosts.map(|host| host.memory_free).collect();
        let (mut moves, mut stays) = (Vec::new(), Vec::new());
        let mut guests: Vec<_> = (0..fleet.guests.len()).map(GuestId).collect();
        guests.sort_by_key(|&id| (Reverse(fleet.guest(id).memory), id));
        for id in guests {
            let guest = fleet.guest(id);
            match destination(fleet, guest, &free, preference) {
                Ok(to) => {
                    free[to.0] -= guest.memory;
                    moves.push(Move { guest: id, to });
                }
                Err(why) => stays.push((id, why)),
            }
        }
        Self { moves, stays }
    }

    /// Bytes of the guests without a destination.
    fn left_over(&self, fleet: &Fleet) -> u128 {
        let stays = self.stays.iter();
        let without = stays.filter(|(_, why)| matches!(why, Hindrance::NoDestination(_)));
        // The 1 makes guests without memory count.
        without
            .map(|(id, _)| u128::from(fleet.guest(*id).memory) + 1)
            .sum()
    }
}

/// Choice among the destinations that accept a guest.
#[derive(Clone, Copy)]
enum Preference {
    /// The destination with the most memory left.
    Spread,
    /// The destination with the least memory left.
    Tight,
}

/// The destination of a guest, or why there is none.
fn destination(
    fleet: &Fleet,
    guest: &Guest,
    free: &[u64],
    preference: Preference,
) -> Result<HostId, Hindrance> {
    if !guest.obstacles.is_empty() {
        return Err(Hindrance::Obstacles(guest.obstacles.clone()));
    }
    let refusal = |host: HostId| refusal(fleet, guest, host, free[host.0]);
    let hosts = fleet.host_ids();
    let accepting = hosts.clone().filter(|host| refusal(*host).is_none());
    let chosen = match preference {
        Preference::Spread => accepting.min_by_key(|host| (Reverse(free[host.0]), *host)),
        Preference::Tight => accepting.min_by_key(|host| (free[host.0], *host)),
    };
    chosen.ok_or_else(|| {
        let refused = hosts.filter_map(|host| {
            let why = refusal(host)?;
            Some(format!("{}: {why}", fleet.host(host).name))
        });
        Hindrance::NoDestination(refused.collect())
    })
}

/// Why a host with `free` bytes left does not accept a guest.
pub(crate) fn refusal(fleet: &Fleet, guest: &Guest, host: HostId, free: u64) -> Option<String> {
    let cpus = fleet.host(host).cpus;
    if let Some(why) = guest.barred.get(&host) {
        Some(why.clone())
    } else if guest.cpus > cpus {
        Some(format!(
            "the host has {cpus} CPUs, the guest needs {}",
            guest.cpus
        ))
    } else if guest.memory > free {
        let [free, needed] = [free, guest.memory].map(|bytes| bytes >> 20);
        Some(format!(
            "the host has {free} MiB of memory left, the guest needs {needed} MiB"
        ))
    } else {
        None
    }
}

/// The first few refusals, as there may be a thousand.
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
