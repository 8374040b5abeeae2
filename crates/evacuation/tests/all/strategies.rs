//! Random fleets.

use std::collections::BTreeMap;

use evacuation::{Fleet, Guest, Host, HostId};
use proptest::{collection::vec, prelude::*, sample::subsequence};

/// A fleet of up to three sources and up to five destinations.
pub(crate) fn fleet() -> impl Strategy<Value = Fleet> {
    (1..=3_usize, 0..=5_usize).prop_flat_map(|(sources, destinations)| {
        let hosts = vec(host(), sources + destinations);
        let guests = vec(guest(sources, destinations), 0..20);
        (hosts, guests).prop_map(move |(hosts, guests)| {
            let to = (sources..sources + destinations).map(HostId).collect();
            Fleet::new(hosts, guests, to).unwrap()
        })
    })
}

fn host() -> impl Strategy<Value = Host> {
    (0..200_u64, 1..8_u32).prop_map(|(memory_free, cpus)| Host {
        name: format!("host of {memory_free}"),
        memory_free,
        cpus,
    })
}

fn guest(sources: usize, destinations: usize) -> impl Strategy<Value = Guest> {
    let barred: Vec<_> = (sources..sources + destinations).collect();
    let barred = subsequence(barred, 0..=destinations);
    let barred = prop_oneof![2 => Just(Vec::new()), 1 => barred];
    let obstacles = prop_oneof![8 => Just(Vec::new()), 1 => Just(vec!["pinned".to_owned()])];
    (0..sources, 1..60_u64, 1..8_u32, obstacles, barred).prop_map(
        |(host, memory, cpus, obstacles, barred)| Guest {
            name: format!("guest of {memory}"),
            host: HostId(host),
            memory,
            cpus,
            obstacles,
            barred: barred
                .into_iter()
                .map(|host| (HostId(host), "barred".to_owned()))
                .collect::<BTreeMap<_, _>>(),
        },
    )
}
