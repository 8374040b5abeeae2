//! How migrations share bandwidth: max-min fair, in whole units.
//!
//! All rates rise together until a limit is reached; flows under that limit stop, the others go on. A remainder goes to the
//! first flows, one unit each, so that limits are used up.

/// A migration: the limits that it is subject to, as indices.
pub(crate) type Flow = Vec<usize>;

/// The rate of each flow, for limits in units; none for a flow without a limit.
pub(crate) fn fair(limits: &[u64], flows: &[Flow]) -> Vec<Option<u64>> {
    let mut left = limits.to_vec();
    let mut rates: Vec<_> = flows
        .iter()
        .map(|flow| (!flow.is_empty()).then_some(0))
        .collect();
    let mut rising: Vec<usize> = (0..flows.len())
        .filter(|&flow| rates[flow].is_some())
        .collect();
    let mut users = vec![0_u64; limits.len()];
    while !rising.is_empty() {
        users.fill(0);
        for &flow in &rising {
            flows[flow].iter().for_each(|&limit| users[limit] += 1);
        }
        let each = left.iter().zip(&users);
        let step = each
            .filter_map(|(left, users)| left.checked_div(*users))
            .min();
        let step = step.unwrap_or(0);
        rising.retain(|&flow| {
            // The step keeps all limits; at a step of 0, single units are left for some flows.
            let step = step.max(1);
            let can_rise = flows[flow].iter().all(|&limit| left[limit] >= step);
            if can_rise {
                flows[flow].iter().for_each(|&limit| left[limit] -= step);
                rates[flow] = rates[flow].map(|rate| rate + step);
            }
            can_rise
        });
    }
    rates
}

#[cfg(test)]
mod tests {
    use proptest::{
        collection::{btree_set, vec},
        prelude::*,
    };

    use super::*;

    #[test]
    fn what_one_cannot_use_is_for_the_others() {
        // All share 0; the first is limited by 1 as well.
        let rates = fair(&[100, 10], &[vec![0, 1], vec![0], vec![0]]);
        assert_eq!(rates, [Some(10), Some(45), Some(45)]);
        assert_eq!(
            fair(&[10], &[vec![0], vec![0], vec![0]]),
            [4, 3, 3].map(Some)
        );
        assert_eq!(
            fair(&[1], &[vec![0], vec![0], vec![]]),
            [Some(1), Some(0), None]
        );
        assert_eq!(fair(&[], &[]), []);
    }

    proptest! {
        #[test]
        fn within_all_limits_and_none_could_have_more_without_one_that_has_less(
            (limits, flows) in vec(0_u64..2000, 1..6).prop_flat_map(|limits| {
                let flow = btree_set(0..limits.len(), 1..=limits.len());
                let flows = vec(flow.prop_map(|it| it.into_iter().collect::<Vec<_>>()), 0..12);
                (Just(limits), flows)
            }),
        ) {
            let rates: Vec<u64> = fair(&limits, &flows).into_iter().map(|it| it.unwrap()).collect();
            let used = |limit: usize| -> u64 {
                let users = flows.iter().zip(&rates).filter(|(flow, _)| flow.contains(&limit));
                users.map(|(_, rate)| rate).sum()
            };
            for (limit, most) in limits.iter().enumerate() {
                prop_assert!(used(limit) <= *most);
            }
            for (flow, rate) in flows.iter().zip(&rates) {
                // A limit that is used up, of which nobody has more than this one, but for a unit.
                let is_limited = flow.iter().any(|&limit| {
                    let mut users = flows.iter().zip(&rates).filter(|(flow, _)| flow.contains(&limit));
                    used(limit) == limits[limit] && users.all(|(_, other)| *other <= rate + 1)
                });
                prop_assert!(is_limited, "{rate} of {rates:?} within {limits:?}: {flows:?}");
            }
        }
    }
}
