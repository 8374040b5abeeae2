//! Guarantees of a plan.

use std::collections::{BTreeMap, BTreeSet};

use evacuation::{Fleet, Guest, GuestId, Hindrance, Host, HostId, Plan, SourceId};
use proptest::prelude::*;

use crate::strategies::fleet;

proptest! {
    #[test]
    fn plan_names_each_guest_once_and_never_exceeds_free_memory(fleet in fleet()) {
        let plan = Plan::new(&fleet);
        prop_assert_eq!(&plan, &Plan::new(&fleet));
        let named = plan.moves.iter().map(|step| step.guest);
        let mut named: Vec<_> = named.chain(plan.stays.iter().map(|(guest, _)| *guest)).collect();
        named.sort();
        prop_assert_eq!(named, (0..fleet.guests.len()).map(GuestId).collect::<Vec<_>>());
        let mut taken = BTreeMap::<HostId, u64>::new();
        for step in &plan.moves {
            let guest = fleet.guest(step.guest);
            *taken.entry(step.to).or_default() += guest.memory;
            prop_assert!(step.to.0 < fleet.destinations.len());
            prop_assert!(guest.cpus <= fleet.host(step.to).cpus);
            prop_assert!(guest.obstacles.is_empty() && !guest.barred.contains_key(&step.to));
        }
        for (host, taken) in &taken {
            prop_assert!(*taken <= fleet.host(*host).memory_free);
        }
        // Of the largest sibling.
        let size = |guest: &Guest| {
            let siblings = fleet.guests.iter().filter(|it| it.image.is_some() && it.image == guest.image);
            siblings.map(|it| it.memory).max().unwrap_or(guest.memory)
        };
        let sizes: Vec<_> = plan.moves.iter().map(|step| size(fleet.guest(step.guest))).collect();
        prop_assert!(sizes.is_sorted_by(|one, next| one >= next), "{sizes:?}");
        for (guest, why) in &plan.stays {
            let Hindrance::NoDestination(refused) = why else { continue };
            let hosts = refused.iter().map(|it| it.split(':').next().unwrap());
            let hosts: BTreeSet<_> = hosts.collect();
            let all = fleet.destinations.iter().map(|host| &*host.name);
            prop_assert_eq!(hosts, all.collect::<BTreeSet<_>>());
            // No host that takes it has room for it now.
            for (at, host) in fleet.destinations.iter().enumerate() {
                let (guest, id) = (fleet.guest(*guest), HostId(at));
                let left = host.memory_free - taken.get(&id).unwrap_or(&0);
                let takes = guest.cpus <= host.cpus && !guest.barred.contains_key(&id);
                prop_assert!(!takes || guest.memory > left);
            }
        }
    }
}

#[test]
fn siblings_go_to_one_host_while_it_has_room() {
    let of = |image: &str, memory| Guest {
        image: Some(image.to_owned()),
        ..guest(image, memory)
    };
    let mut fleet = Fleet {
        destinations: vec![host("a", 20), host("b", 19)],
        guests: vec![
            of("x", 4),
            of("y", 5),
            guest("alone", 3),
            of("x", 5),
            of("y", 4),
            of("x", 4),
        ],
    };
    let moves = |fleet: &Fleet| {
        let plan = Plan::new(fleet);
        let moves = plan.moves.iter().map(|step| (step.guest.0, step.to.0));
        let followers = plan.followers(fleet).map(|guest| guest.0);
        (moves.collect::<Vec<_>>(), followers.collect::<Vec<_>>())
    };
    let together = vec![(1, 0), (4, 0), (3, 1), (0, 1), (5, 1), (2, 0)];
    assert_eq!(moves(&fleet), (together, vec![4, 0, 5]));
    // The third of x has no room beside the others.
    fleet.destinations[1].memory_free = 12;
    let (apart, followers) = moves(&fleet);
    assert!(apart.contains(&(5, 0)), "{apart:?}");
    assert_eq!(followers, [4, 0]);
}

#[test]
fn large_guests_fit_when_small_ones_are_packed() {
    // Spread evenly, the first two guests leave no room for another 5.
    let fleet = Fleet {
        destinations: vec![host("a", 10), host("b", 6)],
        guests: vec![guest("small", 5), guest("large", 6), guest("middle", 5)],
    };
    let plan = Plan::new(&fleet);
    assert_eq!(plan.stays, []);
    let order = plan.moves.iter().map(|step| (step.guest.0, step.to.0));
    assert_eq!(order.collect::<Vec<_>>(), [(1, 1), (0, 0), (2, 0)]);
}

#[test]
fn hindrance_has_the_reason_of_each_destination() {
    const MIB: u64 = 1 << 20;
    let mut large = guest("large", 9 * MIB);
    large.cpus = 4;
    large.barred.insert(HostId(1), "another CPU".to_owned());
    let mut pinned = guest("pinned", 1);
    pinned.obstacles = vec!["a device".to_owned(), "a disk".to_owned()];
    let mut destinations = vec![host("a", 8 * MIB), host("b", 0), host("c", 99 * MIB)];
    destinations[2].cpus = 2;
    let fleet = Fleet {
        destinations,
        guests: vec![pinned, large],
    };
    let plan = Plan::new(&fleet);
    let [(_, large), (_, pinned)] = &plan.stays[..] else {
        panic!("{plan:?}");
    };
    assert_eq!(pinned.to_string(), "a device; a disk");
    assert!(matches!(large, Hindrance::NoDestination(_)), "{large:?}");
    assert_eq!(
        large.to_string(),
        "no destination accepts the guest: a: the host has 8 MiB of memory left, the guest needs 9 MiB; b: another CPU; c: the host has 2 \
         CPUs, the guest needs 4"
    );
}

fn host(name: &str, memory_free: u64) -> Host {
    Host {
        name: name.to_owned(),
        memory_free,
        cpus: 8,
    }
}

fn guest(name: &str, memory: u64) -> Guest {
    Guest {
        name: name.to_owned(),
        source: SourceId(0),
        memory,
        cpus: 1,
        image: None,
        obstacles: Vec::new(),
        barred: BTreeMap::new(),
    }
}
