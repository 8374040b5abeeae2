//! The division of entries: a pure function, so that all processes that see the same rows compute the same result.

/// Divides `entries` among members by their `weights`, into `shares`, which is as long. A weight of zero is no member.
///
/// - With an entry or more for each member, each has at least one. A member that would have less by weight has exactly
///   one; the others divide the rest by weight, each rounded down or up.
/// - With fewer, no part by weight has to be a whole entry, and some have none. Whose turn it is goes with
///   `turn`: while members and weights stay as they are, everyone has an entry at least once in `ceil(sum / entries)`
///   turns that follow each other, and in `sum` turns exactly what is theirs by weight; `sum` is that of the weights
///   in lowest terms, of equal ones the number of members.
///
/// The shares add up to `entries`, unless there is no member.
///
/// ```text
///   weights         4          1    1         6                 laid end to end, stretched so that the
///             ├───────────┼────┼────┼────────────────┤          whole is as long as `entries`; a member
///   entries      ↑       ↑       ↑       ↑       ↑              gets the marks above its piece;
///                →       →       →       →       →              a turn shifts the marks
/// ```
pub fn divide(entries: u32, turn: u64, weights: &[u8], shares: &mut [u32]) {
    let members = count(weights, |_| true);
    let entries = u64::from(entries);
    let (least, rest, offset) = if members > entries {
        // A turn shifts by no more than the shortest piece, so none is stepped over; and by what all are multiples
        // of, so each has all the marks that are its own in the end.
        let total = sum(weights, 1).max(1);
        let unit = weights
            .iter()
            .fold(0, |unit, &weight| common_divisor(unit, weight));
        (
            1,
            entries,
            (turn % total) * entries * u64::from(unit) % total,
        )
    } else {
        let least = least_above_one(entries, weights);
        (least, entries - count(weights, |weight| weight < least), 0)
    };
    let total = sum(weights, least).max(1);
    let mut end = offset;
    for (share, &weight) in shares.iter_mut().zip(weights) {
        *share = if weight >= least {
            let start = end;
            end += u64::from(weight) * rest;
            u32::try_from(end / total - start / total).unwrap_or(u32::MAX)
        } else {
            u32::from(weight != 0)
        };
    }
}

/// The least weight whose part is at least one entry, when all below it get one entry each. It exists, with an
/// entry or more for each member: of those who are left, the heaviest always has at least one.
fn least_above_one(entries: u64, weights: &[u8]) -> u8 {
    (1..u8::MAX)
        .find(|&least| {
            let rest = entries - count(weights, |weight| weight < least);
            u64::from(least) * rest >= sum(weights, least)
        })
        .unwrap_or(u8::MAX)
}

fn common_divisor(a: u8, b: u8) -> u8 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

fn count(weights: &[u8], which: impl Fn(u8) -> bool) -> u64 {
    weights
        .iter()
        .map(|&weight| u64::from(weight != 0 && which(weight)))
        .sum()
}

/// The sum of the weights from `least` on.
fn sum(weights: &[u8], least: u8) -> u64 {
    weights
        .iter()
        .filter(|&&weight| weight >= least)
        .map(|&weight| u64::from(weight))
        .sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn divided(entries: u32, turn: u64, weights: &[u8]) -> Vec<u32> {
        let mut shares = vec![u32::MAX; weights.len()];
        divide(entries, turn, weights, &mut shares);
        shares
    }

    #[test]
    fn by_weight_with_at_least_one() {
        assert_eq!(divided(128, 0, &[4, 4]), [64, 64]);
        assert_eq!(divided(128, 9, &[1, 0, 3]), [32, 0, 96]);
        assert_eq!(divided(4, 0, &[15, 1, 15]), [1, 1, 2]);
        assert_eq!(divided(3, 0, &[15, 1, 1]), [1, 1, 1]);
        assert_eq!(divided(10, 7, &[0, 0]), [0, 0]);
        assert_eq!(divided(u32::MAX, 0, &[9]), [u32::MAX]);
        assert_eq!(divided(0, 5, &[1, 2]), [0, 0]);
        assert_eq!(divided(5, 0, &[]), Vec::<u32>::new());
    }

    #[test]
    fn too_few_entries_go_round() {
        let turns: Vec<_> = (0..3).map(|turn| divided(1, turn, &[1, 1, 1])).collect();
        assert_eq!(turns, [[0, 0, 1], [0, 1, 0], [1, 0, 0]]);
    }

    fn weights() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(0..=15u8, 0..40)
    }

    proptest! {
        #[test]
        fn shares_add_up(entries in any::<u32>(), turn: u64, weights in prop::collection::vec(any::<u8>(), 0..300)) {
            let shares = divided(entries, turn, &weights);
            let expected = if weights.iter().any(|&weight| weight != 0) { u64::from(entries) } else { 0 };
            prop_assert_eq!(shares.iter().map(|&share| u64::from(share)).sum::<u64>(), expected);
            prop_assert!(shares.iter().zip(&weights).all(|(&share, &weight)| weight != 0 || share == 0));
        }

        /// Against the definition, in fractions: raise those that have less than one, until none has.
        #[test]
        fn enough_entries_are_proportional_within_one(extra in 0..300u32, turn: u64, weights in weights()) {
            let members = weights.iter().filter(|&&weight| weight != 0).count();
            let entries = u32::try_from(members).unwrap() + extra;
            let shares = divided(entries, turn, &weights);

            let mut raised = vec![false; weights.len()];
            let part = loop {
                let rest = f64::from(entries) - raised.iter().filter(|&&raised| raised).count() as f64;
                let left = weights.iter().zip(&raised).filter(|&(_, &raised)| !raised);
                let part = rest / left.map(|(&weight, _)| f64::from(weight)).sum::<f64>();
                let below = |(&weight, &raised): (&u8, &bool)| {
                    !raised && weight != 0 && f64::from(weight) * part < 1.0 - 1e-9
                };
                let low: Vec<_> = weights.iter().zip(&raised).map(below).collect();
                if !low.contains(&true) {
                    break part;
                }
                raised.iter_mut().zip(low).for_each(|(raised, low)| *raised |= low);
            };
            for ((&share, &weight), &raised) in shares.iter().zip(&weights).zip(&raised) {
                let ideal = if raised { 1.0 } else { f64::from(weight) * part };
                prop_assert!(weight == 0 || share >= 1);
                prop_assert!(weight == 0 || (f64::from(share) - ideal).abs() < 1.0, "{share} of {ideal}");
            }
        }

        #[test]
        fn nobody_starves(entries in 1..20u32, terms in weights(), unit in 1..=4u8, first in 0..1_000_000u64) {
            let total: u64 = terms.iter().map(|&weight| u64::from(weight)).sum();
            let weights: Vec<_> = terms.iter().map(|&weight| weight * unit).collect();
            let members = weights.iter().filter(|&&weight| weight != 0).count();
            prop_assume!(members > entries as usize);
            let mut had = vec![0u64; weights.len()];
            let bound = total.div_ceil(u64::from(entries));
            for turn in 0..total {
                for (had, share) in had.iter_mut().zip(divided(entries, first + turn, &weights)) {
                    *had += u64::from(share);
                }
                if turn + 1 == bound {
                    prop_assert!(had.iter().zip(&weights).all(|(&had, &weight)| weight == 0 || had > 0));
                }
            }
            for (&had, &weight) in had.iter().zip(&terms) {
                prop_assert_eq!(had, u64::from(weight) * u64::from(entries));
            }
        }
    }
}
