//! A rack of a thousand hosts is emptied, in virtual time.

use crate::simulator::{MIB, Scenario};

/// Small guests make it quick; the example has larger numbers.
const SCENARIO: Scenario = Scenario {
    hosts: 1000,
    rack: 20,
    guests: 10,
    parallel: 4,
    bandwidth: 11_000 * MIB,
    failures: 10,
};

#[test]
fn a_rack_is_emptied_in_little_more_than_its_bytes_take() {
    let found = SCENARIO.empty_one_rack(1);
    assert_eq!((found.guests, found.moved), (200, 200));
    assert!(found.tries >= 200 && found.sent > found.memory as f64);
    // In virtual time, so this is no matter of the machine.
    let ratio = found.took.as_secs_f64() / found.bound.as_secs_f64();
    assert!((1.0..1.6).contains(&ratio), "{ratio}: {found:?}");
}

#[test]
fn hosts_are_emptied_one_rack_after_the_other() {
    let scenario = Scenario {
        hosts: 40,
        failures: 50,
        ..SCENARIO
    };
    let found = scenario.empty_all(1);
    assert_eq!(found.guests, found.moved);
    assert!(found.guests > 400, "{found:?}");
}
