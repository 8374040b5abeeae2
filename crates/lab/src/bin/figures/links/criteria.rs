//! What is demanded of method auto, and of the program's defaults, on each link.

use lab::median;

use super::{Case, Data, Measured, Rate, Way};
use crate::criteria::{Found, Verdict};

/// The most time that auto may take beside the best fixed method of the same two relays: in the median round, and in nine of ten.
const MOST: f64 = 1.1;
const MOST_OF_NINE_IN_TEN: f64 = 1.2;

/// The most CPU time beside stock zstd at 100 Mbit/s, where every method waits for the link most of the time.
const MOST_CPU: f64 = 1.3;

/// Judges what there is to judge.
pub(crate) fn judge(measured: &[Measured]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for auto in measured.iter().filter(|one| one.case.way.is_judged()) {
        let beside: Vec<_> = measured
            .iter()
            .filter(|other| other.case.is_beside(&auto.case))
            .collect();
        let best = |is_one: fn(Way) -> bool| {
            let fixed = beside.iter().filter(|other| is_one(other.case.way));
            fixed.min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
        };
        let name = &auto.case.name;
        if let Some(best) = best(Way::is_fixed) {
            verdicts.push(Verdict::new(
                format!("{name}: at most {MOST} times the best fixed method's time, {MOST_OF_NINE_IN_TEN} in nine rounds of ten"),
                Some(beside_fixed(auto, best)),
            ));
        }
        if let Some((stock, most)) = best(Way::is_stock).zip(auto.case.most_of_stock()) {
            verdicts.push(Verdict::new(
                format!("{name}: at most {most} times the time of stock QEMU's best method"),
                Some(at_most(most, auto, stock, seconds)),
            ));
        }
        let zstd = beside
            .iter()
            .find(|other| other.case.way == Way::Stock("zstd"));
        if let Some(zstd) = zstd.filter(|_| auto.case.is_slow_text()) {
            verdicts.push(Verdict::new(
                format!("{name}: at most {MOST_CPU} times the CPU time of stock zstd"),
                Some(at_most(MOST_CPU, auto, zstd, cpu_seconds)),
            ));
        }
    }
    verdicts
}

impl Way {
    fn is_judged(self) -> bool {
        matches!(self, Self::Pair("auto") | Self::Migrate)
    }

    fn is_fixed(self) -> bool {
        matches!(self, Self::Pair(method) if method != "auto")
    }

    fn is_stock(self) -> bool {
        matches!(self, Self::Stock(_))
    }
}

impl Case {
    /// Whether only the way is another.
    fn is_beside(&self, other: &Self) -> bool {
        self.rate == other.rate && self.data == other.data && self.way != other.way
    }

    fn is_slow_text(&self) -> bool {
        self.rate == Rate::Constant(100_000_000) && self.data == Data::Corpus
    }

    /// The most time beside stock QEMU's best.
    fn most_of_stock(&self) -> Option<f64> {
        match (self.rate, self.data) {
            (Rate::Constant(100_000_000), Data::Corpus) => Some(0.9),
            (Rate::Constant(1_000_000_000), Data::Corpus) => Some(0.7),
            (Rate::Constant(10_000_000_000), Data::Corpus) => Some(1.0),
            _ => None,
        }
    }
}

fn seconds(measured: &Measured) -> f64 {
    measured.median(|one| one.seconds)
}

fn cpu_seconds(measured: &Measured) -> f64 {
    measured.median(|one| one.cpu_seconds)
}

/// Round by round, since only what was measured side by side can be compared.
fn beside_fixed(auto: &Measured, best: &Measured) -> Found {
    let rounds = auto.rounds.iter().zip(&best.rounds);
    let mut ratios: Vec<_> = rounds
        .map(|(auto, best)| auto.seconds / best.seconds)
        .collect();
    ratios.sort_by(f64::total_cmp);
    let middle = median(ratios.iter().copied()).unwrap_or(f64::NAN);
    let ninth = (ratios.len() * 9).div_ceil(10).saturating_sub(1);
    let high = ratios.get(ninth).copied().unwrap_or(f64::NAN);
    let numbers = format!("{middle:.2} and {high:.2} of {}", best.case.name);
    (middle <= MOST && high <= MOST_OF_NINE_IN_TEN, numbers)
}

fn at_most(most: f64, auto: &Measured, stock: &Measured, of: fn(&Measured) -> f64) -> Found {
    let ratio = of(auto) / of(stock);
    let numbers = format!(
        "{:.2} of {:.2}, {ratio:.2} of {}",
        of(auto),
        of(stock),
        stock.case.name
    );
    (ratio <= most, numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::Move;

    fn measured(way: Way, seconds: &[f64]) -> Measured {
        let one = |seconds: &f64| Move {
            seconds: *seconds,
            cpu_seconds: 1.0,
            link_bytes: 1.0,
            downtime: 1.0,
        };
        Measured {
            case: Case {
                name: format!("{}", seconds[0]),
                rate: Rate::Constant(1_000_000_000),
                data: Data::Corpus,
                way,
                ram: 1,
            },
            rounds: seconds.iter().map(one).collect(),
        }
    }

    #[test]
    fn auto_is_compared_with_the_best_of_its_kind() {
        let all = [
            measured(Way::Pair("auto"), &[1.05, 1.05, 1.15]),
            measured(Way::Pair("lz4"), &[1.0, 1.0, 1.0]),
            measured(Way::Pair("none"), &[2.0, 2.0, 2.0]),
            measured(Way::Stock("zstd"), &[1.4, 1.4, 1.4]),
        ];
        let passed: Vec<_> = judge(&all).iter().map(|verdict| verdict.pass).collect();
        assert_eq!(passed, [Some(true), Some(false)]);
    }

    #[test]
    fn one_bad_round_in_a_few_is_too_many() {
        let all = [
            measured(Way::Pair("auto"), &[1.0, 1.0, 1.25]),
            measured(Way::Pair("lz4"), &[1.0, 1.0, 1.0]),
        ];
        assert_eq!(judge(&all)[0].pass, Some(false));
    }
}
