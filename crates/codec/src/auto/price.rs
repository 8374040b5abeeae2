//! Whether encoding costs more than the time of the thread that does it.
//!
//! A socket that takes no more need not mean a slow link. The receiver may be slower than the link, or
//! share its cores with the sender; then encoding more makes the socket slower still, which looks like a
//! slower link, and so on down. So the thread's time has a price: it is multiplied with it before it is
//! compared with the link's, and at a price of 4 the thread may be busy a quarter of the time at most.
//!
//! The price is found by trial: for a period things are done as at twice the price, or half, and the bytes
//! of pages that went out are compared with those of the periods before and after. Without somebody else
//! to suffer from encoding the right price is 1, and it is never lower.
//!
//! ```text
//! price × 2        ┌──────┐
//! price   ──┬──────┘      └──────┬── …
//!           before  trial  after
//! ```

/// The price, and the trial that is under way.
pub(super) struct Price {
    price: f64,
    phase: Phase,
    /// Periods to wait until the next trial, and how many it was the last time.
    wait: u32,
    interval: u32,
    up: bool,
    /// Sum of the gains of trials in a row that would have been better.
    promise: f64,
    period: Period,
    /// Bytes of pages per nanosecond in the period before.
    before: f64,
    trial: f64,
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
const MOST_PERIOD: f64 = 500e6;

/// A period has so many times the bytes that the socket's buffer may hide.
const QUANTA: f64 = 3.0;

/// Most periods between two trials, so that they cost a few percent of what they may lose.
const MOST_INTERVAL: u32 = 16;

/// Highest price: encoding has stopped long before.
const MOST: f64 = 256.0;

/// Gain, as a logarithm, that is believed at once, and that is believed when it comes twice.
const CLEAR_GAIN: f64 = 0.12;
const SMALL_GAIN: f64 = 0.02;

/// Periods that differ by more, as a logarithm, are of different links or data.
const UNEQUAL: f64 = 0.35;

impl Price {
    pub(super) fn new() -> Self {
        Self {
            price: 1.0,
            phase: Phase::Normal,
            wait: 1,
            interval: 1,
            up: true,
            promise: 0.0,
            period: Period::default(),
            before: 0.0,
            trial: 0.0,
        }
    }

    /// The price for the next packet.
    pub(super) fn now(&self) -> f64 {
        match self.phase {
            Phase::Trial if self.up => self.price * 2.0,
            Phase::Trial => self.price / 2.0,
            _ => self.price,
        }
    }

    /// What has been learnt is of another link.
    pub(super) fn forget(&mut self) {
        *self = Self::new();
    }

    /// The channel had nothing to send for a while.
    pub(super) fn paused(&mut self) {
        self.period = Period::default();
        self.phase = Phase::Normal;
        self.wait = self.wait.max(1);
    }

    /// A packet is out. `quantum` is what a socket's buffer may hide; `encoding` tells whether anything
    /// was encoded lately.
    pub(super) fn sent(&mut self, wire: f64, pages: f64, time: f64, quantum: f64, encoding: bool) {
        let period = &mut self.period;
        period.wire += wire;
        period.pages += pages;
        period.time += time;
        if !period.settled {
            // The first bytes fill the buffer up, or empty it.
            if period.wire > quantum || period.time > MOST_PERIOD / 4.0 {
                *period = Period {
                    settled: true,
                    ..Period::default()
                };
            }
            return;
        }
        let long = period.time > LEAST_PERIOD && period.wire > QUANTA * quantum;
        if long || period.time > MOST_PERIOD {
            let goodput = period.pages / period.time;
            self.period = Period::default();
            self.over(goodput, encoding);
        }
    }

    fn over(&mut self, goodput: f64, encoding: bool) {
        match self.phase {
            Phase::Normal if self.wait > 0 => {
                self.wait -= 1;
                self.before = goodput;
                self.period.settled = true;
            }
            Phase::Normal => {
                self.before = goodput;
                // Where nothing is encoded only more can be tried, and at price 1 only less.
                self.up = encoding && (self.up || self.price <= 1.0);
                if self.up && self.price >= MOST || !self.up && self.price <= 1.0 {
                    self.period.settled = true;
                } else {
                    self.phase = Phase::Trial;
                }
            }
            Phase::Trial => {
                self.trial = goodput;
                self.phase = Phase::After;
            }
            Phase::After => {
                self.phase = Phase::Normal;
                self.judge(goodput);
                self.before = goodput;
            }
        }
    }

    fn judge(&mut self, after: f64) {
        if !((after / self.before).ln().abs() < UNEQUAL) {
            self.wait = 1;
            return;
        }
        let gain = (self.trial / (self.before * after).sqrt()).ln();
        let promise = self.promise + gain;
        if gain > CLEAR_GAIN || gain > SMALL_GAIN && self.promise > 0.0 {
            let price = if self.up {
                self.price * 2.0
            } else {
                self.price / 2.0
            };
            self.price = price.clamp(1.0, MOST);
            self.promise = 0.0;
            self.interval = 1;
            self.wait = 0;
        } else if gain > SMALL_GAIN {
            self.promise = promise;
            self.wait = 1;
        } else {
            self.promise = 0.0;
            self.interval = (2 * self.interval).min(MOST_INTERVAL);
            self.wait = self.interval;
            self.up = !self.up;
        }
    }
}
