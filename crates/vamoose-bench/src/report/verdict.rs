//! Vamoose's default beside the best: whether it is at least as fast as stock QEMU's best method, and close to the best method that it
//! could have had. Both are told afterwards, with all figures known; the default has to choose before.

use super::results::{Group, Results, Row, Spread};
use super::table::{Table, Tone, full};
use crate::scenario::{Contender, Who};

/// The default of one guest, link and number of channels.
struct Verdict {
    channels: u8,
    default: Contender,
    /// `None` where it did not get the guest moved.
    seconds: Option<Spread>,
    /// Beside the fastest method of stock QEMU.
    stock: Option<Comparison>,
    /// Beside the fastest method that can be set by hand, of the same way to attach.
    fixed: Option<Comparison>,
}

/// The default beside another.
struct Comparison {
    requirement: Requirement,
    with: Contender,
    /// Of the other; `None` where no such migration went through.
    seconds: Option<Spread>,
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
}

/// Of a group, for each number of channels with which the default was measured.
fn of(group: &Group) -> Vec<Verdict> {
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
        Some(Verdict {
            channels,
            default: default.cell.contender.clone(),
            seconds: default.seconds(),
            stock: Comparison::with_best(default, stock, Requirement::NotSlower),
            fixed: fixed.into_iter().flatten().next(),
        })
    });
    verdicts.flatten().collect()
}

/// As a table, with a row for each comparison; `None` if there is none.
pub(super) fn table(group: &Group) -> Option<Table> {
    let mut table = Table::new([
        "channels",
        "default",
        "seconds",
        "beside",
        "ratio",
        "requirement",
    ]);
    for verdict in of(group) {
        for comparison in [verdict.stock, verdict.fixed].into_iter().flatten() {
            let tone = if comparison.holds {
                Tone::Plain
            } else {
                Tone::Short
            };
            let cells = [
                verdict.channels.to_string(),
                verdict.default.to_string(),
                verdict.seconds.map_or("not moved".to_owned(), full),
                comparison.other(),
                comparison.ratio(),
                comparison.judgement(),
            ];
            table.add(tone, cells);
        }
    }
    (!table.rows.is_empty()).then_some(table)
}

/// A line for each requirement, over the whole run.
pub(super) fn summary(results: &Results) -> Vec<String> {
    let all: Vec<Verdict> = results.groups().into_iter().flat_map(of).collect();
    let line = |of: fn(&Verdict) -> Option<&Comparison>, text: &str| {
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
        }
    }

    fn text(self, holds: bool) -> &'static str {
        match (self, holds) {
            (Self::NotSlower, true) => "holds: not slower",
            (Self::NotSlower, false) => "falls short: slower",
            (Self::WithinTenth, true) => "holds: within 10 %",
            (Self::WithinTenth, false) => "falls short: more than 10 % slower",
        }
    }
}

impl Comparison {
    /// `None` if there is no other.
    fn with_best<'a>(
        default: &Row,
        others: impl Iterator<Item = &'a Row> + Clone,
        requirement: Requirement,
    ) -> Option<Self> {
        let ours = default.seconds();
        let Some((other, theirs)) = fastest(others.clone()) else {
            // Others were tried, and none got the guest moved.
            return others.into_iter().next().map(|other| Self {
                requirement,
                with: other.cell.contender.clone(),
                seconds: None,
                ratio: None,
                holds: ours.is_some(),
                overlaps: false,
            });
        };
        let ratio = ours.map(|ours| ours.median / theirs.median);
        let ratio = ratio.filter(|ratio| ratio.is_finite());
        let limit = requirement.limit();
        let is_fast = ratio.is_some_and(|ratio| ratio <= limit);
        let is_reliable = default.cancelled() <= other.cancelled();
        Some(Self {
            requirement,
            with: other.cell.contender.clone(),
            seconds: Some(theirs),
            ratio,
            holds: is_fast && is_reliable,
            overlaps: is_reliable && ours.is_some_and(|ours| ours.least <= theirs.most * limit),
        })
    }

    /// In words.
    fn judgement(&self) -> String {
        let text = self.requirement.text(self.holds);
        match self.seconds {
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

    /// The other, and its time.
    fn other(&self) -> String {
        match self.seconds {
            Some(spread) => format!("{} {}", self.with, full(spread)),
            None => format!("{}: not moved", self.with),
        }
    }

    /// To the third place, so that what is just above the limit does not look like it.
    fn ratio(&self) -> String {
        self.ratio
            .map_or("–".to_owned(), |ratio| format!("{ratio:.3}"))
    }
}
