//! Racks of a thousand hosts are emptied, in virtual time.

use crate::simulator::{MIB, Scenario};

/// Fewer guests than in the example, so that the test is quick.
const SCENARIO: Scenario = Scenario {
    hosts: 1000,
    rack: 20,
    guests: 10,
    parallel: 4,
    bandwidth: 11_000 * MIB,
    failures: 10,
};

#[test]
fn rack_is_emptied_almost_at_link_rate() {
    let found = SCENARIO.empty_one_rack(1);
    assert_eq!((found.guests, found.moved), (200, 200));
    assert!(found.tries >= 200 && found.sent > found.memory as f64);
    // Virtual time does not depend on the machine.
    let ratio = found.took.as_secs_f64() / found.bound.as_secs_f64();
    assert!((1.0..1.6).contains(&ratio), "{ratio}: {found:?}");
}

#[test]
fn racks_are_emptied_one_after_the_other() {
    let scenario = Scenario {
        hosts: 40,
        failures: 50,
        ..SCENARIO
    };
    let found = scenario.empty_all(1);
    assert_eq!(found.guests, found.moved);
    assert!(found.guests > 400, "{found:?}");
}
