//! Vamoose's default beside the best: whether it is at least as fast as stock QEMU's best method, and close to the best method that it
//! could have had. Both are told afterwards, with all figures known; the default has to choose before.

use std::cmp::Ordering::Equal;

use super::results::{Group, Results, Row, Spread};
use super::table::{self, ABSENT, Table, Tone, full};
use crate::record::Record;
use crate::scenario::{Contender, Who};

/// The default of one guest, link and number of channels.
struct Verdict<'a> {
    default: &'a Row,
    /// Beside the fastest method of stock QEMU.
    stock: Option<Comparison<'a>>,
    /// Beside its method of the least CPU, where that is another.
    thrifty: Option<Comparison<'a>>,
    /// Beside the fastest method that can be set by hand, of the same way to attach.
    fixed: Option<Comparison<'a>>,
}

/// The default beside another.
struct Comparison<'a> {
    requirement: Requirement,
    /// If it has no time, no such migration went through.
    with: &'a Row,
    /// The default's time divided by the other's.
    ratio: Option<f64>,
    holds: bool,
    /// The times of the rounds overlap, so that the difference may be chance.
    overlaps: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Requirement {
    /// Than stock QEMU.
    NotSlower,
    /// Of Vamoose's own best.
    WithinTenth,
    /// It is shown, so that nobody takes the fastest for the best in all.
    None,
}

/// Of a group, for each number of channels with which the default was measured.
fn of(group: &Group) -> Vec<Verdict<'_>> {
    let verdicts = group.channels().into_iter().map(|channels| {
        let is_same = |row: &&Row| row.cell.channels == channels;
        let rows: Vec<&Row> = group.rows.iter().filter(is_same).collect();
        let default = default(&rows)?;
        let stock = rows.iter().copied();
        let stock = stock.filter(|row| row.cell.contender.who == Who::Qemu);
        // Without a fixed method of its own, `migrate` is compared with a pair of relays, which has the same data path.
        let fixed = [default.cell.contender.who, Who::Pair].map(|who| {
            let own = rows
                .iter()
                .copied()
                .filter(|row| is_fixed(&row.cell.contender, who));
            Comparison::with_best(default, own, Requirement::WithinTenth)
        });
        let fastest = Comparison::with_best(default, stock.clone(), Requirement::NotSlower);
        let cpu = |row: &Row| row.spread(table::cpu_total).map(|spread| spread.median);
        let is_less = |row: &&Row| match fastest.as_ref().and_then(|fastest| cpu(fastest.with)) {
            Some(of_fastest) => cpu(row).is_some_and(|cpu| cpu < of_fastest),
            None => false,
        };
        let whole = stock.filter(|row| row.cancelled() == 0.0).filter(is_less);
        let thrifty = whole.min_by(|one, other| cpu(one).partial_cmp(&cpu(other)).unwrap_or(Equal));
        Some(Verdict {
            default,
            stock: fastest,
            thrifty: thrifty.map(|row| Comparison::with(default, row, Requirement::None)),
            fixed: fixed.into_iter().flatten().next(),
        })
    });
    verdicts.flatten().collect()
}

/// As a table, with a row for each comparison; `None` if there is none.
pub(super) fn table(group: &Group) -> Option<Table> {
    let mut table = Table::new([
        "default",
        "channels",
        "CPU, s/GiB",
        "beside",
        "its CPU, s/GiB",
        "ratio of seconds",
        "requirement",
    ]);
    for verdict in of(group) {
        let default = verdict.default;
        let comparisons = [verdict.stock, verdict.thrifty, verdict.fixed];
        for comparison in comparisons.into_iter().flatten() {
            let cells = [
                named(default),
                default.cell.channels.to_string(),
                median(default, table::cpu_by_memory),
                named(comparison.with),
                median(comparison.with, table::cpu_by_memory),
                comparison.ratio(),
                comparison.judgement(),
            ];
            table.add(tone(comparison.holds), cells);
        }
    }
    (!table.rows.is_empty()).then_some(table)
}

/// The whole run: a row for each number of channels of each group; `None` if nothing is compared.
pub(super) fn overview(results: &Results) -> Option<Table> {
    let mut table = Table::new([
        "scenario",
        "guest and link",
        "channels",
        "stock QEMU",
        "Vamoose",
        "ratio",
        "downtime, ms",
        "CPU, s/GiB",
        "verdict",
    ]);
    for section in &results.scenarios {
        for group in &section.groups {
            for verdict in of(group) {
                let Some(stock) = &verdict.stock else {
                    continue;
                };
                let both = |value| {
                    let [theirs, ours] =
                        [stock.with, verdict.default].map(|row| median(row, value));
                    format!("{theirs},\u{a0}{ours}")
                };
                let short = verdict.shortfalls();
                let cells = [
                    section.name.clone(),
                    group.same.title(),
                    verdict.default.cell.channels.to_string(),
                    named(stock.with),
                    named(verdict.default),
                    stock.ratio(),
                    both(table::downtime),
                    both(table::cpu_by_memory),
                    match short.is_empty() {
                        true => "holds".to_owned(),
                        false => short.join("; "),
                    },
                ];
                table.add(tone(short.is_empty()), cells);
            }
        }
    }
    (!table.rows.is_empty()).then_some(table)
}

fn tone(holds: bool) -> Tone {
    if holds { Tone::Plain } else { Tone::Short }
}

/// A row and its time.
fn named(row: &Row) -> String {
    match row.seconds() {
        Some(spread) => format!("{} {}", row.cell.contender, full(spread)),
        None => format!("{}: not moved", row.cell.contender),
    }
}

fn median(row: &Row, value: fn(&Record) -> Option<f64>) -> String {
    row.spread(value).map_or(ABSENT.to_owned(), table::median)
}

/// A line for each requirement, over the whole run.
pub(super) fn summary(results: &Results) -> Vec<String> {
    let all: Vec<Verdict<'_>> = results.groups().into_iter().flat_map(of).collect();
    let line = |of: for<'a> fn(&'a Verdict<'a>) -> Option<&'a Comparison<'a>>, text: &str| {
        let comparisons: Vec<_> = all.iter().filter_map(of).collect();
        let holds = comparisons.iter().filter(|c| c.holds).count();
        let count = comparisons.len();
        let state = if holds == count {
            ""
        } else {
            " Where it falls short is marked below."
        };
        (count > 0)
            .then(|| format!("Vamoose's default {text} in {holds} of {count} comparisons.{state}"))
    };
    [
        line(
            |v| v.stock.as_ref(),
            "is not slower than stock QEMU's best method",
        ),
        line(
            |v| v.fixed.as_ref(),
            "is within 10 % of its own best fixed method",
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// `migrate auto`, else `pair auto`, without options.
pub(super) fn default<'a>(rows: &[&'a Row]) -> Option<&'a Row> {
    let find = |who: Who| {
        let is_default =
            |row: &&Row| row.cell.contender.who == who && is_default(&row.cell.contender);
        rows.iter().copied().find(is_default)
    };
    find(Who::Migrate).or_else(|| find(Who::Pair))
}

/// Whether it is what users get who set nothing.
pub(super) fn is_default(contender: &Contender) -> bool {
    let is_two = matches!(contender.who, Who::Migrate | Who::Pair);
    is_two && contender.method == "auto" && contender.has_defaults()
}

/// The row of the least median time, of those whose migrations went through; where none has only such, of all.
pub(super) fn fastest<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<(&'a Row, Spread)> {
    let timed = rows.filter_map(|row| Some((row, row.seconds()?)));
    timed.min_by(|(one, time), (other, other_time)| {
        let by_time = time.median.total_cmp(&other_time.median);
        one.cancelled().total_cmp(&other.cancelled()).then(by_time)
    })
}

fn is_fixed(contender: &Contender, who: Who) -> bool {
    contender.who == who && contender.method != "auto" && contender.has_defaults()
}

impl Requirement {
    /// The highest ratio at which it holds.
    fn limit(self) -> f64 {
        match self {
            Self::NotSlower => 1.0,
            Self::WithinTenth => 1.1,
            Self::None => f64::INFINITY,
        }
    }

    fn text(self, holds: bool) -> &'static str {
        match (self, holds) {
            (Self::NotSlower, true) => "holds: not slower",
            (Self::NotSlower, false) => "falls short: slower",
            (Self::WithinTenth, true) => "holds: within 10 %",
            (Self::WithinTenth, false) => "falls short: more than 10 % slower than its own best",
            (Self::None, _) => "none: stock QEMU's least CPU",
        }
    }
}

impl Verdict<'_> {
    /// The requirements that are not met.
    fn shortfalls(&self) -> Vec<String> {
        let required = self.stock.iter().chain(&self.fixed);
        let short = required.filter(|comparison| !comparison.holds);
        short.map(Comparison::judgement).collect()
    }
}

impl<'a> Comparison<'a> {
    /// `None` if there is no other.
    fn with_best(
        default: &Row,
        others: impl Iterator<Item = &'a Row> + Clone,
        requirement: Requirement,
    ) -> Option<Self> {
        // Where others were tried, and none got the guest moved, one of them.
        let best = fastest(others.clone()).map(|(best, _)| best);
        let other = best.or_else(|| others.into_iter().next())?;
        Some(Self::with(default, other, requirement))
    }

    fn with(default: &Row, other: &'a Row, requirement: Requirement) -> Self {
        let (ours, theirs) = (default.seconds(), other.seconds());
        let ratio = ours
            .zip(theirs)
            .map(|(ours, theirs)| ours.median / theirs.median);
        let ratio = ratio.filter(|ratio| ratio.is_finite());
        let limit = requirement.limit();
        let is_fast = match theirs {
            Some(_) => ratio.is_some_and(|ratio| ratio <= limit),
            None => ours.is_some(),
        };
        let is_reliable = default.cancelled() <= other.cancelled();
        let overlaps = ours
            .zip(theirs)
            .is_some_and(|(ours, theirs)| ours.least <= theirs.most * limit);
        Self {
            requirement,
            with: other,
            ratio,
            holds: requirement == Requirement::None || is_fast && is_reliable,
            overlaps: is_reliable && overlaps,
        }
    }

    /// In words.
    fn judgement(&self) -> String {
        let text = self.requirement.text(self.holds);
        match self.with.seconds() {
            Some(_) if self.ratio.is_none() => "falls short: the guest was not moved".to_owned(),
            _ if !self.holds && self.overlaps => {
                format!("{text}, though the times of the rounds overlap")
            }
            _ if !self.holds
                && self
                    .ratio
                    .is_some_and(|ratio| ratio <= self.requirement.limit()) =>
            {
                "falls short: cancelled more often".to_owned()
            }
            _ => text.to_owned(),
        }
    }

    /// To the third place, so that what is just above the limit does not look like it.
    fn ratio(&self) -> String {
        self.ratio
            .map_or(ABSENT.to_owned(), |ratio| format!("{ratio:.3}"))
    }
}
