//! The policy's tables.

use crate::adaptive::policy::{
    Cost, Limit, LinkWindow, Policy, RAW, RUNGS, Rates, START, Waits, buffered,
};

/// Waits of the sender for its source, the socket, a core, and of the receiver for the network.
fn waits(source: f64, socket: f64, core: f64, network: impl Into<Option<f64>>) -> Waits {
    Waits {
        source,
        socket,
        core,
        network: network.into(),
    }
}

const LINK: [f64; 4] = [0.0, 0.6, 0.0, 0.6];
const ENCODER: [f64; 4] = [0.0, 0.0, 0.0, 0.6];
const BALANCE: [f64; 4] = [0.0, 0.1, 0.3, 0.2];
const SOURCE: [f64; 4] = [0.6, 0.0, 0.0, 0.6];

fn observe(policy: &mut Policy, limit: [f64; 4]) {
    let wire = if limit[1] > 0.0 { 0.08 } else { 0.06 };
    observe_rates(policy, limit, 0.2, wire);
}

/// One of two channels sends at these rates, and the other one as much.
fn observe_rates(
    policy: &mut Policy,
    [source, socket, core, network]: [f64; 4],
    pages: f64,
    wire: f64,
) {
    let link = Some(LinkWindow {
        arrived: 2.0 * wire,
        buffered: 0.0,
    });
    policy.observe(
        waits(source, socket, core, network),
        Rates { pages, wire, link },
    );
    policy.next_packet();
}

#[test]
fn bottleneck_follows_from_who_waits() {
    for (source, socket, core, network, limit) in [
        (0.0, 0.6, 0.0, Some(0.6), Limit::Link),
        (0.1, 0.6, 0.2, Some(0.3), Limit::Link),
        (0.0, 0.6, 0.0, None, Limit::Link),
        (0.0, 0.6, 0.0, Some(0.0), Limit::Receiver),
        (0.3, 0.4, 0.2, Some(0.02), Limit::Receiver),
        (0.6, 0.0, 0.0, Some(0.6), Limit::Source),
        (0.0, 0.0, 0.0, Some(0.6), Limit::Encoder),
        (0.1, 0.0, 0.1, None, Limit::Encoder),
        (0.2, 0.0, 0.5, Some(0.6), Limit::Encoder),
        (0.0, 0.1, 0.5, Some(0.1), Limit::Balance),
    ] {
        let waits = waits(source, socket, core, network);
        assert_eq!(Limit::of(waits), limit, "{waits:?}");
    }
}

/// Without buffers, the sender would have waited for the socket.
#[test]
fn bytes_that_only_fill_buffers_count_as_a_wait_for_the_link() {
    // 5 MB are sent in a window, over a round trip of 1 ms.
    for (unacknowledged, limit) in [
        ([0.0, 0.3e6], Limit::Encoder),
        ([0.0, 1.5e6], Limit::Link),
        ([2e6, 2.1e6], Limit::Encoder),
        ([2e6, 3e6], Limit::Link),
        ([3e6, 0.0], Limit::Encoder),
    ] {
        let mut policy = Policy::new();
        let [source, socket, core, network] = ENCODER;
        let rates = Rates {
            pages: 0.4,
            wire: 0.1,
            link: Some(LinkWindow {
                arrived: 0.2,
                buffered: buffered(unacknowledged, 0.1, [50e6, 1e6]),
            }),
        };
        policy.observe(waits(source, socket, core, network), rates);
        assert_eq!(policy.limit(), limit, "{unacknowledged:?}");
    }
}

/// What is on its way over a long distance is no backlog.
#[test]
fn a_round_trip_is_no_backlog() {
    let grown = |trip| buffered([0.0, 5e6], 0.1, [50e6, trip]);
    assert!(grown(1e6) > 0.9 && grown(80e6) == 0.0);
}

#[test]
fn channel_of_a_fast_link_starts_raw_and_encodes_if_the_link_limits() {
    let mut policy = Policy::new();
    policy.start_raw();
    for _ in 0..5 {
        assert_eq!((policy.rung(), policy.mixes_raw()), (RAW, false));
        observe(&mut policy, ENCODER);
    }
    for _ in 0..3 {
        observe(&mut policy, LINK);
    }
    assert!(policy.mixes_raw() || policy.rung() > RAW);
}

/// It shows how connections begin.
#[test]
fn first_window_changes_no_rung() {
    for limit in [LINK, ENCODER, BALANCE, SOURCE] {
        let mut policy = Policy::new();
        observe(&mut policy, limit);
        assert_eq!(policy.rung(), START);
    }
}

/// As where an interrupt came while the lighter rung encoded.
#[test]
fn one_comparison_does_not_make_a_denser_rung_free() {
    let mut policy = lightest_encoded();
    let cost = |size, cpu| Cost { size, cpu };
    policy.compared(1, [cost(0.1, 1.7), cost(0.092, 1.47)]);
    for _ in 0..10 {
        observe_rates(&mut policy, BALANCE, 0.35, 0.04);
    }
    assert_eq!((policy.rung(), policy.mixes_raw()), (RAW + 1, false));
}

#[test]
fn first_packets_are_encoded_and_an_encoder_that_limits_goes_to_none() {
    let mut policy = Policy::new();
    assert_eq!(policy.rung(), START);
    let rungs = [(); 5].map(|()| {
        observe(&mut policy, ENCODER);
        policy.rung()
    });
    assert_eq!(rungs[4], RAW);
}

#[test]
fn a_source_that_limits_is_followed_slowly() {
    let mut policy = Policy::new();
    let rungs = [(); 7].map(|()| {
        observe(&mut policy, SOURCE);
        policy.rung()
    });
    assert_eq!(rungs[6], RAW, "{rungs:?}");
    assert!(rungs.is_sorted_by(|before, after| before >= after));
}

#[test]
fn with_raw_packets_those_that_shrink_most_are_encoded() {
    let mut policy = Policy::new();
    for _ in 0..4 {
        observe(&mut policy, ENCODER);
    }
    // Half a step up, and a quarter down.
    observe(&mut policy, LINK);
    observe(&mut policy, ENCODER);
    assert!(policy.mixes_raw());
    let sizes = [0.5, 0.04, 0.9, 0.2, 0.6, 0.35, 0.7, 0.8];
    let mut encoded = [0_u32; 8];
    for packet in 0..8000 {
        policy.next_packet();
        let rung = policy.pick(sizes[packet % 8]);
        encoded[packet % 8] += u32::try_from(rung).unwrap();
    }
    // A quarter of the packets.
    assert!(
        encoded.iter().sum::<u32>().abs_diff(2000) < 50,
        "{encoded:?}"
    );
    assert!(encoded[1] > 900 && encoded[3] > 900, "{encoded:?}");
}

#[test]
fn packets_that_shrink_alike_are_mixed_evenly() {
    let mut policy = Policy::new();
    for limit in [ENCODER, ENCODER, ENCODER, ENCODER, LINK, ENCODER] {
        observe(&mut policy, limit);
    }
    let rungs: Vec<_> = (0..200).map(|_| policy.pick(0.3)).skip(100).collect();
    assert_eq!(rungs.iter().sum::<usize>(), 25);
    assert!(rungs.windows(5).all(|few| few.contains(&1)));
}

/// A mix fills the link: pages, and bytes sent for each, beside the first rung's 0.2 and 0.1.
#[test]
fn a_mix_that_moves_hardly_more_pages_is_given_up_for_a_second() {
    for (pages, size, is_useless) in [(0.21, 0.4, true), (0.3, 0.4, false), (0.21, 0.11, false)] {
        let (mut policy, observe) = mixing(pages, size);
        let mixes = [(); 15].map(|()| observe(&mut policy, ENCODER, 0.2, 0.02));
        assert_eq!(!mixes.contains(&true), is_useless, "{pages} {size}");
        let mixes = [(); 15].map(|()| observe(&mut policy, ENCODER, 0.2, 0.02));
        let has_raw = mixes.contains(&true) || policy.rung() == RAW;
        assert!(has_raw, "{pages} {size}");
    }
}

/// Less compressible pages, of which the first rung moves fewer than the mix did.
#[test]
fn a_mix_that_was_given_up_comes_back_if_the_pages_change() {
    let (mut policy, observe) = mixing(0.21, 0.4);
    let mixes = [(); 4].map(|()| observe(&mut policy, ENCODER, 0.1, 0.01));
    assert!(mixes.contains(&true));
}

type Observe = fn(&mut Policy, [f64; 4], f64, f64) -> bool;

/// A policy that has come to the lightest rung that encodes.
fn lightest_encoded() -> Policy {
    let mut policy = Policy::new();
    for _ in 0..3 {
        observe(&mut policy, SOURCE);
    }
    assert_eq!((policy.rung(), policy.mixes_raw()), (RAW + 1, false));
    policy
}

/// A policy after two windows of a mix, and a function that returns whether the policy mixes raw packets after another window.
fn mixing(pages: f64, size: f64) -> (Policy, Observe) {
    let observe: Observe = |policy, limit, pages, wire| {
        observe_rates(policy, limit, pages, wire);
        policy.mixes_raw()
    };
    let mut policy = lightest_encoded();
    assert!(observe(&mut policy, ENCODER, 0.2, 0.02));
    assert!(observe(&mut policy, ENCODER, pages, size * pages));
    observe(&mut policy, LINK, pages, size * pages);
    (policy, observe)
}

/// Where the policy comes to over a link that limits to this rate of pages, if a rung's size beside the one before and its additional
/// CPU time are these.
fn settled(rate: f64, pairs: [(f64, f64); RUNGS - 1]) -> usize {
    let mut policy = Policy::new();
    for _ in 0..200 {
        if let Some(rung) = policy.wanted() {
            let (size, cpu) = pairs[rung];
            let cost = |size, cpu| Cost { size, cpu };
            policy.compared(rung, [cost(0.5, 1.0), cost(0.5 * size, 1.0 + cpu)]);
        }
        observe_rates(&mut policy, LINK, rate, 0.4 * rate);
    }
    policy.rung()
}

#[test]
fn a_denser_rung_has_to_save_four_percent_for_a_tenth_of_a_core() {
    let good = (0.6, 0.5);
    for (rate, last, rung) in [
        (0.2, (0.97, 0.5), 2),
        (0.2, (0.95, 0.5), 3),
        (0.2, (0.95, 1.0), 2),
        (0.02, (0.97, 1.0), 3),
    ] {
        let found = settled(rate, [good, good, last, (1.0, 1.0), (1.0, 1.0)]);
        assert_eq!(found, rung, "{rate} {last:?}");
    }
    // A slow link has time for the densest rung.
    assert_eq!(settled(0.02, [good, good, good, good, (0.95, 5.0)]), 5);
    assert_eq!(settled(0.2, [good, good, good, good, (0.95, 5.0)]), 4);
    // What saves nothing is left out.
    assert_eq!(settled(0.2, [(2.0, 0.0); 5]), RAW);
    assert_eq!(
        settled(0.2, [good, (1.0, 0.3), (1.0, 0.3), (1.0, 0.3), (1.0, 0.3)]),
        1
    );
}

#[test]
fn rungs_are_compared_while_the_link_limits() {
    let mut policy = Policy::new();
    observe(&mut policy, ENCODER);
    assert_eq!(policy.wanted(), None);
    observe(&mut policy, LINK);
    assert!(policy.wanted().is_some());
}

/// The encoder has no time to spare, and the link was full a moment ago: raw packets would fill it again.
#[test]
fn a_link_that_was_full_lately_gets_no_raw_packets() {
    let mut policy = Policy::new();
    observe(&mut policy, LINK);
    let rungs = [(); 40].map(|()| {
        observe(&mut policy, ENCODER);
        policy.rung()
    });
    assert!(!rungs[..10].contains(&RAW), "{rungs:?}");
    assert_eq!(rungs[39], RAW, "{rungs:?}");
}

/// Raw packets among pages that are encoded to a 20th of their size.
#[test]
fn a_step_towards_raw_packets_about_doubles_the_bytes_at_most() {
    let mut policy = lightest_encoded();
    observe_rates(&mut policy, ENCODER, 1.0, 0.05);
    let raw = (0..1000).filter(|_| policy.pick(0.05) == RAW);
    assert!((40..80).contains(&raw.count()));
}

/// By the size of rung 2 beside rung 1, and its additional CPU time.
#[test]
fn where_link_and_encoder_limit_alike_a_denser_rung_has_to_save_five_times_as_much() {
    for (pair, rung) in [((0.8, 0.2), 2), ((0.95, 0.2), 1)] {
        let mut policy = Policy::new();
        for window in 0..60 {
            if let Some(rung) = policy.wanted() {
                let (size, cpu) = if rung == 1 { pair } else { (0.99, 1.0) };
                let cost = |size, cpu| Cost { size, cpu };
                policy.compared(rung, [cost(0.5, 1.0), cost(0.5 * size, 1.0 + cpu)]);
            }
            observe(&mut policy, if window < 30 { LINK } else { BALANCE });
        }
        assert_eq!((policy.rung(), policy.mixes_raw()), (rung, false));
    }
}

/// A balance lasts as long as it likes, and the link is still full then.
#[test]
fn a_link_is_remembered_during_a_balance() {
    let mut policy = Policy::new();
    for limit in [[LINK; 3].as_slice(), &[BALANCE; 60], &[ENCODER; 5]].concat() {
        observe(&mut policy, limit);
        assert!(policy.rung() > RAW && !policy.mixes_raw());
    }
}

#[test]
fn pages_that_do_not_shrink_go_raw_also_over_a_busy_link() {
    let mut policy = Policy::new();
    for limit in [[LINK].as_slice(), &[ENCODER; 8]].concat() {
        observe_rates(&mut policy, limit, 0.2, 0.2);
    }
    assert_eq!((policy.rung(), policy.mixes_raw()), (RAW, false));
}

/// Pages that nearly vanish: the mixes on the way move hardly more of them.
#[test]
fn a_fast_link_gets_raw_packets_whatever_these_shrink_to() {
    let mut policy = Policy::new();
    for _ in 0..30 {
        let wire = if policy.mixes_raw() { 0.03 } else { 0.015 };
        observe_rates(&mut policy, ENCODER, 0.5, wire);
    }
    assert_eq!((policy.rung(), policy.mixes_raw()), (RAW, false));
}

/// Packets that nearly vanish do not hide what a denser rung saves on those that load the link.
#[test]
fn comparisons_count_by_bytes() {
    let mut policy = Policy::new();
    for number in 0..200 {
        if let Some(rung) = policy.wanted() {
            let (size, saving) = if number % 4 < 2 {
                (0.02, 1.0)
            } else {
                (0.6, 0.9)
            };
            let cost = |size, cpu| Cost { size, cpu };
            let costs = [cost(size, 0.3 * size), cost(size * saving, 0.5 * size)];
            policy.compared(rung, costs);
        }
        observe(&mut policy, LINK);
    }
    assert_eq!(policy.rung(), RUNGS - 1);
}
