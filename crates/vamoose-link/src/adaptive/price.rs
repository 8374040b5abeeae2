//! Whether encoding costs more than the time of the thread that does it.
//!
//! A socket that takes no more need not mean a slow link. The receiver may be slower than the link, or
//! share its cores with the sender; then encoding more makes the socket slower still, which looks like a
//! slower link, and so on down. So the thread's time has a price: it is multiplied with it before it is
//! compared with the link's, and at a price of 4 the thread may be busy a quarter of the time at most.
//!
//! The price is found by trial: for a period packets are encoded as at a higher price or a lower one, and
//! the bytes of pages that went out are compared with those of the periods before and after. Where no
//! other work suffers from encoding, the right price is 1, and it is never lower.
//!
//! ```text
//! another price    ┌──────┐
//! price   ──┬──────┘      └──────┬── …
//!           before  trial  after
//! ```
//! A price that changes nothing proves nothing: the next one to be tried is higher.

use super::{link::Link, packets};

/// The price, and the trial that is under way.
pub(super) struct Price {
    price: f64,
    phase: Phase,
    trial: Trial,
    /// What a trial of a higher price multiplies it with.
    step: f64,
    /// Periods to wait until the next trial.
    wait: f64,
    /// Gain of the last trial, if it was a small one that may be chance.
    promise: bool,
    period: Period,
    /// Bytes of pages per nanosecond before the trial, and during it.
    before: f64,
    tried: f64,
    /// The link as it was when the price had been found.
    found_at: Option<f64>,
}

/// What is done to packets, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// All go raw.
    Nothing,
    /// Some are encoded, and that may or may not be the right thing.
    Pays,
    /// Some are encoded, and the link is so slow that there is no need to try anything else: a single raw
    /// packet may take it a tenth of a second.
    ClearlyPays,
}

/// What to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trial {
    Dearer,
    Cheaper,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Normal,
    Trial,
    After,
}

#[derive(Clone, Copy, Default)]
struct Period {
    settled: bool,
    wire: f64,
    pages: f64,
    time: f64,
}

/// Length of a period: at least, and at most, in nanoseconds.
const LEAST_PERIOD: f64 = 20e6;
const MOST_PERIOD: f64 = 250e6;

/// Quanta on the wire before a period counts: what is in the buffers of both ends was sent before, and
/// until it is gone neither receiver nor link has seen anything of the change.
const SETTLING: f64 = 6.0;

/// Quanta that a period has at least.
const QUANTA: f64 = 3.0;

/// Full packets that a period has at least, so that it has data of all kinds.
const LEAST_PACKETS: f64 = 32.0;

/// A trial with less than this part of the goodput before it is lost already, whatever data comes next.
const HOPELESS: f64 = 0.7;

/// Part of the time that trials may lose, and how many periods there are between them at most and at
/// least.
const LOSS: f64 = 0.03;
const MOST_WAIT: f64 = 32.0;
const LEAST_WAIT: f64 = 3.0;

/// The step of a first trial: one of a link that is slow indeed costs little, then, and chance does little harm. Where a dearer
/// price made no difference, since all goes by the same rung still, the next step is twice as large, up to the most.
const STEP: f64 = 2.0;
const MOST_STEP: f64 = 16.0;

/// Highest price: encoding has stopped long before.
const MOST: f64 = 256.0;

/// Gain, as a logarithm, that is believed at once unless the data alone makes such a difference, and that
/// is believed when it comes twice.
const CLEAR_GAIN: f64 = 0.06;
const SMALL_GAIN: f64 = 0.02;

/// A link that differs by this factor is another one.
const OTHER_LINK: f64 = 3.0;

/// Periods that differ by more, as a logarithm, are of different links or data.
const UNEQUAL: f64 = 0.35;

impl Price {
    /// Tries a higher price as soon as there is something to compare it with.
    pub(super) fn new() -> Self {
        Self {
            price: 1.0,
            phase: Phase::Normal,
            trial: Trial::Cheaper,
            step: STEP,
            wait: 0.0,
            promise: false,
            period: Period::default(),
            before: 0.0,
            tried: 0.0,
            found_at: None,
        }
    }

    /// The price for the next packet.
    pub(super) fn now(&self) -> f64 {
        match (self.phase, self.trial) {
            (Phase::Trial, Trial::Dearer) => self.price * self.step,
            (Phase::Trial, Trial::Cheaper) => self.price / STEP,
            _ => self.price,
        }
    }

    /// The channel had nothing to send for a while.
    pub(super) fn paused(&mut self) {
        self.period = Period::default();
        self.phase = Phase::Normal;
        self.wait = self.wait.max(1.0);
    }

    /// A packet is out.
    pub(super) fn sent(
        &mut self,
        wire: f64,
        pages: f64,
        time: f64,
        link: &Link,
        encoding: Encoding,
    ) {
        let period = &mut self.period;
        period.wire += wire;
        period.pages += pages;
        period.time += time;
        if !period.settled {
            if period.wire > SETTLING * link.quantum() || period.time > MOST_PERIOD {
                *period = Period {
                    settled: true,
                    ..Period::default()
                };
            }
            return;
        }
        let goodput = period.pages / period.time;
        let lost = self.phase == Phase::Trial && goodput < HOPELESS * self.before;
        let long = period.time > LEAST_PERIOD
            && period.wire > QUANTA * link.quantum()
            && (lost || packets(period.pages) > LEAST_PACKETS);
        if long || period.time > MOST_PERIOD {
            self.period = Period::default();
            self.over(goodput, encoding);
            self.compare(link.time().unwrap_or(0.0));
        }
    }

    fn over(&mut self, goodput: f64, encoding: Encoding) {
        match self.phase {
            Phase::Normal => {
                self.before = goodput;
                self.wait -= 1.0;
                let trial = self.next_trial(encoding);
                if self.wait < 0.0
                    && let Some(trial) = trial
                {
                    (self.phase, self.trial) = (Phase::Trial, trial);
                } else {
                    self.period.settled = true;
                }
            }
            Phase::Trial => {
                self.tried = goodput;
                self.phase = Phase::After;
            }
            Phase::After => {
                self.phase = Phase::Normal;
                self.judge(goodput);
            }
        }
    }

    /// Where nothing is encoded only more can be tried, and at the lowest price only less. A trial that was
    /// promising is made again.
    fn next_trial(&self, encoding: Encoding) -> Option<Trial> {
        if encoding != Encoding::Pays {
            return (self.price > 1.0).then_some(Trial::Cheaper);
        }
        Some(match self.trial {
            Trial::Cheaper if self.promise && self.price > 1.0 => Trial::Cheaper,
            Trial::Dearer if !self.promise && self.price > 1.0 => Trial::Cheaper,
            _ => Trial::Dearer,
        })
    }

    /// A price is of its link: with another one it is looked for anew.
    fn compare(&mut self, link: f64) {
        if self.phase != Phase::Normal {
            return;
        }
        let then = *self.found_at.get_or_insert(link);
        if link > then * OTHER_LINK || link * OTHER_LINK < then {
            *self = Self::new();
        }
    }

    fn judge(&mut self, after: f64) {
        let (before, tried) = (self.before, self.tried);
        let noise = (after / before).ln().abs();
        if noise > UNEQUAL {
            self.wait = LEAST_WAIT;
            return;
        }
        let gain = (tried / (before * after).sqrt()).ln();
        let believed = gain > CLEAR_GAIN.max(noise) || gain > SMALL_GAIN && self.promise;
        self.promise = gain > SMALL_GAIN && !believed;
        if believed {
            let price = match self.trial {
                Trial::Cheaper => self.price / STEP,
                Trial::Dearer => self.price * self.step,
            };
            self.price = price.clamp(1.0, MOST);
            self.found_at = None;
        }
        if self.trial == Trial::Dearer {
            self.step = match gain.abs() < SMALL_GAIN {
                true => (self.step * STEP).min(MOST_STEP),
                false if self.promise => self.step,
                false => STEP,
            };
        }
        self.wait = match believed || self.promise {
            true => 0.0,
            false => (-gain / LOSS).clamp(LEAST_WAIT, MOST_WAIT),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What goes out, in bytes of pages per nanosecond, at the price of the moment.
    fn run(price: &mut Price, encoding: Encoding, goodput: impl Fn(f64) -> f64) -> Vec<f64> {
        let (link, pages) = (Link::new(), 1e6);
        let packet = |_| {
            price.sent(
                0.5 * pages,
                pages,
                pages / goodput(price.now()),
                &link,
                encoding,
            );
            price.now()
        };
        (0..5000).map(packet).collect()
    }

    #[test]
    fn encoding_that_hurts_becomes_dear() {
        let mut price = Price::new();
        run(&mut price, Encoding::Pays, |now| now.min(16.0).powf(0.2));
        assert!(price.price >= 16.0, "{}", price.price);
    }

    /// As long as all goes by the same rung.
    #[test]
    fn encoding_that_hurts_becomes_dear_where_small_steps_make_no_difference() {
        let mut price = Price::new();
        run(&mut price, Encoding::Pays, |now| {
            if now < 16.0 { 0.5 } else { 1.0 }
        });
        assert!(price.price >= 16.0, "{}", price.price);
    }

    #[test]
    fn encoding_that_helps_stays_cheap_and_is_seldom_questioned() {
        let mut price = Price::new();
        let prices = run(&mut price, Encoding::Pays, |now| {
            if now > 1.0 { 0.4 } else { 1.0 }
        });
        assert!(price.price <= 1.0);
        let trials = prices.iter().filter(|now| **now > 1.0).count();
        assert!((1..prices.len() / 8).contains(&trials), "{trials}");
    }

    #[test]
    fn a_slow_link_is_left_alone() {
        let mut price = Price::new();
        let prices = run(&mut price, Encoding::ClearlyPays, |_| 0.03);
        assert!(prices.iter().all(|now| *now <= 1.0));
    }

    #[test]
    fn a_high_price_falls_step_by_step_when_encoding_hurts_no_more() {
        let mut price = Price::new();
        price.price = 64.0;
        run(&mut price, Encoding::Nothing, |now| now.powf(-0.1));
        assert!(price.price <= 4.0, "{}", price.price);
    }
}
