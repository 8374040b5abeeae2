//! Plan: destinations of the guests, and the guests that cannot move.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap, HashSet},
};

use thiserror::Error;

use crate::{Fleet, Guest, GuestId, HostId};

/// The plan of an evacuation. The same fleet has the same plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The moves in the order in which they begin, the largest guests first, each followed by its siblings.
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
        // With siblings together or spread evenly, guests may leave so little room on each host that a later one fits nowhere.
        [
            (Preference::Spread, true),
            (Preference::Spread, false),
            (Preference::Tight, false),
        ]
        .map(|(preference, together)| Self::placed(fleet, preference, together))
        .into_iter()
        .min_by_key(|plan| plan.left_over(fleet))
        .unwrap_or_default()
    }

    /// The guests that follow a sibling to the same host.
    pub fn followers<'a>(&'a self, fleet: &'a Fleet) -> impl Iterator<Item = GuestId> + 'a {
        let mut seen = HashSet::new();
        self.moves.iter().filter_map(move |step| {
            let image = fleet.guest(step.guest).image.as_ref()?;
            (!seen.insert((image, step.to))).then_some(step.guest)
        })
    }

    fn placed(fleet: &Fleet, preference: Preference, together: bool) -> Self {
        let hosts = fleet.destinations.iter();
        let mut free: Vec<_> = hosts.map(|host| host.memory_free).collect();
        let mut plan = Self::default();
        // Where siblings are, by their image.
        let mut homes: HashMap<&str, BTreeSet<HostId>> = HashMap::new();
        for id in in_order(fleet) {
            let guest = fleet.guest(id);
            let image = guest.image.as_deref().filter(|_| together);
            let home = image.map(|image| homes.entry(image).or_default());
            match destination(fleet, guest, &free, (preference, home.as_deref())) {
                Ok(to) => {
                    free[to.0] -= guest.memory;
                    plan.moves.push(Move { guest: id, to });
                    if let Some(home) = home {
                        home.insert(to);
                    }
                }
                Err(why) => plan.stays.push((id, why)),
            }
        }
        plan
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

/// The largest guests first, each followed by its siblings.
fn in_order(fleet: &Fleet) -> Vec<GuestId> {
    let size = |id: &GuestId| (Reverse(fleet.guest(*id).memory), *id);
    let mut guests: Vec<_> = (0..fleet.guests.len()).map(GuestId).collect();
    guests.sort_by_key(size);
    // The largest sibling of each image.
    let mut first = HashMap::new();
    for id in &guests {
        first.entry(&fleet.guest(*id).image).or_insert(*id);
    }
    guests.sort_by_key(|id| match &fleet.guest(*id).image {
        None => size(id),
        image => size(&first[image]),
    });
    guests
}

/// The destination of a guest, or why there is none: one of those of its siblings, if one accepts it.
fn destination(
    fleet: &Fleet,
    guest: &Guest,
    free: &[u64],
    (preference, home): (Preference, Option<&BTreeSet<HostId>>),
) -> Result<HostId, Hindrance> {
    if !guest.obstacles.is_empty() {
        return Err(Hindrance::Obstacles(guest.obstacles.clone()));
    }
    let refusal = |host: HostId| refusal(fleet, guest, host, free[host.0]);
    let hosts = fleet.host_ids();
    let accepting = hosts.clone().filter(|host| refusal(*host).is_none());
    let is_elsewhere = |host: &HostId| home.is_some_and(|home| !home.contains(host));
    let chosen = accepting.min_by_key(|host| {
        let free = free[host.0];
        let room = match preference {
            Preference::Spread => u64::MAX - free,
            Preference::Tight => free,
        };
        (is_elsewhere(host), room, *host)
    });
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
