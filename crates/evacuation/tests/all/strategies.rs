//! Random fleets.

use std::collections::BTreeMap;

use evacuation::{Fleet, Guest, Host, HostId, SourceId};
use proptest::{collection::vec, prelude::*, sample::subsequence};

/// A fleet of up to three sources and up to five destinations.
pub(crate) fn fleet() -> impl Strategy<Value = Fleet> {
    (1..=3_usize, 0..=5_usize).prop_flat_map(|(sources, destinations)| {
        let hosts = vec(host(), destinations);
        let guests = vec(guest(sources, destinations), 0..20);
        (hosts, guests).prop_map(|(destinations, guests)| Fleet {
            destinations,
            guests,
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
    let barred: Vec<_> = (0..destinations).collect();
    let barred = subsequence(barred, 0..=destinations);
    let barred = prop_oneof![2 => Just(Vec::new()), 1 => barred];
    let obstacles = prop_oneof![8 => Just(Vec::new()), 1 => Just(vec!["pinned".to_owned()])];
    let image = proptest::option::of("[ab]");
    (0..sources, 1..60_u64, 1..8_u32, image, obstacles, barred).prop_map(
        |(source, memory, cpus, image, obstacles, barred)| Guest {
            name: format!("guest of {memory}"),
            source: SourceId(source),
            memory,
            cpus,
            image,
            obstacles,
            barred: barred
                .into_iter()
                .map(|host| (HostId(host), "barred".to_owned()))
                .collect::<BTreeMap<_, _>>(),
        },
    )
}
