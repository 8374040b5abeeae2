//! Compares Vamoose's default with other methods: it should be at least as fast as stock QEMU's fastest method, and within a tenth
//! of Vamoose's own fastest fixed method. The fastest method is known only afterwards; the default has to choose before.

use super::results::{Group, Results, Row, Spread};
use super::table::{self, ABSENT, Table, full, short};
use crate::record::Record;
use crate::scenario::{Contender, Who};

/// The default beside another method, for one number of channels.
struct Comparison<'a> {
    requirement: Requirement,
    default: &'a Row,
    /// Without a time, none of its migrations completed.
    other: &'a Row,
    /// Time of the default divided by time of the other.
    ratio: Option<f64>,
    holds: bool,
    /// The times of the rounds overlap, so that the difference may be chance.
    overlaps: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Requirement {
    NotSlowerThanStock,
    WithinTenthOfOwnBest,
}

/// A table of all comparisons; `None` if there are none.
pub(super) fn table(results: &Results) -> Option<Table> {
    let mut table = Table::new([
        "scenario",
        "guest and link",
        "channels",
        "compared with",
        "default",
        "ratio",
        "downtime, ms",
        "CPU, s/GiB",
        "verdict",
    ]);
    for section in &results.scenarios {
        for group in &section.groups {
            for comparison in of(group) {
                let bold = (!comparison.holds).then_some(8);
                let [name, title] = [section.name.clone(), group.title()];
                table.add(bold, [name, title].into_iter().chain(comparison.cells()));
            }
        }
    }
    (!table.is_empty()).then_some(table)
}

/// A line for each requirement, over the whole run.
pub(super) fn summary(results: &Results) -> Vec<String> {
    let all: Vec<_> = results.groups().flat_map(of).collect();
    let line = |requirement: Requirement| {
        let of_it = || {
            all.iter()
                .filter(|comparison| comparison.requirement == requirement)
        };
        let (holds, count) = (
            of_it().filter(|comparison| comparison.holds).count(),
            of_it().count(),
        );
        let end = if holds == count {
            ""
        } else {
            " Where it falls short is marked below."
        };
        let text = match requirement {
            Requirement::NotSlowerThanStock => "is not slower than stock QEMU's best method",
            Requirement::WithinTenthOfOwnBest => "is within 10 % of its own best fixed method",
        };
        (count > 0)
            .then(|| format!("Vamoose's default {text} in {holds} of {count} comparisons.{end}"))
    };
    let requirements = [
        Requirement::NotSlowerThanStock,
        Requirement::WithinTenthOfOwnBest,
    ];
    requirements.into_iter().filter_map(line).collect()
}

/// The comparisons of a group, for each number of channels with which the default was measured.
fn of(group: &Group) -> Vec<Comparison<'_>> {
    let of_channels = |channels| {
        let rows = || {
            group
                .rows
                .iter()
                .filter(move |row| row.cell.channels == channels)
        };
        let by = |who: Who| move |row: &&Row| row.cell.contender.who == who;
        let defaults = rows().filter(|row| is_default(&row.cell.contender));
        let Some(default) = defaults.max_by_key(|row| row.cell.contender.who == Who::Migrate)
        else {
            return Vec::new();
        };
        let is_fixed =
            |row: &&Row| row.cell.contender.method != "auto" && row.cell.contender.has_defaults();
        // Without a fixed method, `migrate` is compared with a pair of relays, which has the same data path.
        let own = best(
            rows()
                .filter(by(default.cell.contender.who))
                .filter(is_fixed),
        );
        let own = own.or_else(|| best(rows().filter(by(Who::Pair)).filter(is_fixed)));
        let stock = best(rows().filter(by(Who::Qemu)));
        let stock =
            stock.map(|other| Comparison::new(Requirement::NotSlowerThanStock, default, other));
        let own =
            own.map(|other| Comparison::new(Requirement::WithinTenthOfOwnBest, default, other));
        stock.into_iter().chain(own).collect()
    };
    group.channels().into_iter().flat_map(of_channels).collect()
}

/// The fastest row; where none was moved, any.
fn best<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<&'a Row> {
    let rows: Vec<_> = rows.collect();
    fastest(rows.iter().copied()).or_else(|| rows.first().copied())
}

/// The row of the least median time, of those of which the fewest migrations were cancelled.
pub(super) fn fastest<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<&'a Row> {
    let timed = rows.filter_map(|row| Some((row, row.seconds()?.median)));
    let fastest = timed.min_by(|(one, time), (other, other_time)| {
        one.cancelled()
            .total_cmp(&other.cancelled())
            .then(time.total_cmp(other_time))
    });
    fastest.map(|(row, _)| row)
}

/// Whether this is what users get who set no option.
pub(super) fn is_default(contender: &Contender) -> bool {
    let has_two_ends = matches!(contender.who, Who::Migrate | Who::Pair);
    has_two_ends && contender.method == "auto" && contender.has_defaults()
}

impl Requirement {
    /// The highest ratio at which it holds.
    fn limit(self) -> f64 {
        match self {
            Self::NotSlowerThanStock => 1.0,
            Self::WithinTenthOfOwnBest => 1.1,
        }
    }
}

impl<'a> Comparison<'a> {
    fn new(requirement: Requirement, default: &'a Row, other: &'a Row) -> Self {
        let (ours, theirs, limit) = (default.seconds(), other.seconds(), requirement.limit());
        let both = ours.zip(theirs);
        let ratio = both.map(|(ours, theirs)| ours.median / theirs.median);
        let ratio = ratio.filter(|ratio| ratio.is_finite());
        let is_fast = match theirs {
            Some(_) => ratio.is_some_and(|ratio| ratio <= limit),
            None => ours.is_some(),
        };
        let is_reliable = default.cancelled() <= other.cancelled();
        let overlaps = both.is_some_and(|(ours, theirs)| ours.least <= theirs.most * limit);
        Self {
            requirement,
            default,
            other,
            ratio,
            holds: is_fast && is_reliable,
            overlaps: is_reliable && overlaps,
        }
    }

    fn cells(&self) -> [String; 7] {
        let both = |value: fn(&Record) -> Option<f64>| {
            let median = |spread: Spread| short(spread.median);
            let [theirs, ours] = [self.other, self.default]
                .map(|row| row.spread(value).map_or(ABSENT.to_owned(), median));
            format!("{theirs},\u{a0}{ours}")
        };
        [
            self.default.cell.channels.to_string(),
            named(self.other),
            named(self.default),
            // To the third place: a ratio just above the limit must not look like one at the limit.
            self.ratio
                .map_or(ABSENT.to_owned(), |ratio| format!("{ratio:.3}")),
            both(table::downtime),
            both(table::cpu_by_memory),
            self.judgement(),
        ]
    }

    fn judgement(&self) -> String {
        let stock = self.requirement == Requirement::NotSlowerThanStock;
        let too_slow = if stock {
            "slower"
        } else {
            "more than 10 % slower than its own best"
        };
        match (self.holds, self.ratio) {
            (true, _) if stock => "holds: not slower".to_owned(),
            (true, _) => "holds: within 10 %".to_owned(),
            (false, None) => "falls short: the guest was not moved".to_owned(),
            (false, Some(ratio)) if ratio <= self.requirement.limit() => {
                "falls short: cancelled more often".to_owned()
            }
            (false, _) if self.overlaps => {
                format!("falls short: {too_slow}, though the times of the rounds overlap")
            }
            (false, _) => format!("falls short: {too_slow}"),
        }
    }
}

/// A contender and its time.
fn named(row: &Row) -> String {
    match row.seconds() {
        Some(spread) => format!("{} {}", row.cell.contender, full(spread)),
        None => format!("{}: not moved", row.cell.contender),
    }
}
