//! Guarantees of a plan.

use std::collections::{BTreeMap, BTreeSet};

use evacuation::{Fleet, FleetError, Guest, GuestId, Hindrance, Host, HostId, Plan};
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
        prop_assert_eq!(named, (0..fleet.guests().len()).map(GuestId).collect::<Vec<_>>());
        let mut taken = BTreeMap::<HostId, u64>::new();
        for step in &plan.moves {
            let guest = fleet.guest(step.guest);
            *taken.entry(step.to).or_default() += guest.memory;
            prop_assert!(fleet.destinations().contains(&step.to));
            prop_assert!(guest.cpus <= fleet.host(step.to).cpus);
            prop_assert!(guest.obstacles.is_empty() && !guest.barred.contains_key(&step.to));
        }
        for (host, taken) in &taken {
            prop_assert!(*taken <= fleet.host(*host).memory_free);
        }
        let sizes: Vec<_> = plan.moves.iter().map(|step| fleet.guest(step.guest).memory).collect();
        prop_assert!(sizes.is_sorted_by(|one, next| one >= next), "{sizes:?}");
        for (guest, why) in &plan.stays {
            let Hindrance::NoDestination(refused) = why else { continue };
            let hosts = refused.iter().map(|it| it.split(':').next().unwrap());
            let hosts: BTreeSet<_> = hosts.collect();
            let all = fleet.destinations().iter().map(|host| &*fleet.host(*host).name);
            prop_assert_eq!(hosts, all.collect::<BTreeSet<_>>());
            // No host that takes it has room for it now.
            for host in fleet.destinations() {
                let (guest, host_is) = (fleet.guest(*guest), fleet.host(*host));
                let left = host_is.memory_free - taken.get(host).unwrap_or(&0);
                let takes = guest.cpus <= host_is.cpus && !guest.barred.contains_key(host);
                prop_assert!(!takes || guest.memory > left);
            }
        }
    }
}

#[test]
fn large_guests_fit_when_small_ones_are_packed() {
    // Spread evenly, the first two guests leave no room for another 5.
    let fleet = Fleet::new(
        vec![host("old", 0), host("a", 10), host("b", 6)],
        vec![guest("small", 5), guest("large", 6), guest("middle", 5)],
        vec![HostId(1), HostId(2)],
    );
    let plan = Plan::new(&fleet.unwrap());
    assert_eq!(plan.stays, []);
    let order = plan.moves.iter().map(|step| (step.guest.0, step.to.0));
    assert_eq!(order.collect::<Vec<_>>(), [(1, 2), (0, 1), (2, 1)]);
}

#[test]
fn hindrance_has_the_reason_of_each_destination() {
    const MIB: u64 = 1 << 20;
    let mut large = guest("large", 9 * MIB);
    large.cpus = 4;
    large.barred.insert(HostId(2), "another CPU".to_owned());
    let mut pinned = guest("pinned", 1);
    pinned.obstacles = vec!["a device".to_owned(), "a disk".to_owned()];
    let mut hosts = vec![
        host("old", 0),
        host("a", 8 * MIB),
        host("b", 0),
        host("c", 99 * MIB),
    ];
    hosts[3].cpus = 2;
    let fleet = Fleet::new(hosts, vec![pinned, large], [1, 2, 3].map(HostId).to_vec()).unwrap();
    let plan = Plan::new(&fleet);
    let [(_, large), (_, pinned)] = &plan.stays[..] else {
        panic!("{plan:?}");
    };
    assert_eq!(pinned.to_string(), "a device; a disk");
    assert!(matches!(large, Hindrance::NoDestination(_)), "{large:?}");
    assert_eq!(
        large.to_string(),
        "no destination accepts it: a: it has 8 MiB of memory left, the guest needs 9 MiB; b: another CPU; c: it has 2 \
         CPUs, the guest 4"
    );
}

#[test]
fn inconsistent_fleets_are_rejected() {
    let hosts = || vec![host("a", 0), host("b", 0)];
    let fleet = |guests, to| Fleet::new(hosts(), guests, to).unwrap_err();
    let at = fleet(vec![guest("g", 1)], vec![HostId(0)]);
    assert!(matches!(at, FleetError::AtDestination { .. }), "{at}");
    let none = fleet(Vec::new(), vec![HostId(2)]);
    assert_eq!(none, FleetError::NoSuchHost(HostId(2)));
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
        host: HostId(0),
        memory,
        cpus: 1,
        obstacles: Vec::new(),
        barred: BTreeMap::new(),
    }
}
