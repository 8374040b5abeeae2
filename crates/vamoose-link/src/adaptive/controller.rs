//! What to do with the next packet, from what became of those before it. No clock and no codec:
//! durations come in, a [`Plan`] goes out, and the same durations give the same plans.
//!
//! Rates are kept as their inverse, nanoseconds per byte, since it is times that are added and compared.

use std::time::Duration;

use super::{
    bytes,
    ladder::{FIRST, Ladder, Mix, RAW, RUNGS, Terms},
    link::Link,
    nanos, packets,
    price::{Encoding, Price},
};

/// What to do with the next packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The rung to encode it with.
    pub(super) rung: usize,
    /// Two rungs to try on it, only to see how the second compares with the first: which is the rung to encode it with, unless
    /// that does nothing.
    pub(super) probe: Option<[usize; 2]>,
    /// Whether to try the first rung on a sample of a packet that goes raw, to see whether it still should.
    pub(super) look: bool,
}

/// An encoding that was done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) page_bytes: usize,
    pub(super) payload_bytes: usize,
    /// Time that the thread had of a core.
    pub(super) cpu: Duration,
    pub(super) wall: Duration,
}

/// A packet that is out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) wire_bytes: usize,
    pub(super) page_bytes: usize,
    /// Time in the socket, and waiting for the limit of the bandwidth.
    pub(super) took: Duration,
    /// Bytes that the socket still holds, if known.
    pub(super) queued: Option<usize>,
    /// Time that the thread had of a core meanwhile.
    pub(super) cpu: Duration,
    /// Whether the thread gave its core away meanwhile. If it did not, only the scheduler made it wait.
    pub(super) blocked: bool,
    /// Time for all that was encoded since the packet before.
    pub(super) encoding: Duration,
    /// Time since the packet before was out.
    pub(super) elapsed: Duration,
}

/// Chooses for one channel.
pub(super) struct Controller {
    ladder: Ladder,
    link: Link,
    price: Price,
    /// Wall time per CPU time: more than 1 where threads share cores.
    stretch: f64,
    /// CPU time of the socket, per byte on the wire.
    copying: f64,
    /// Other work for a packet (reading it, for example), per byte of its pages.
    other: f64,
    /// Part of the bytes in which a sample found nothing to save.
    hopeless: f64,
    /// Such packets in a row, and how many more are not even looked at.
    hopeless_row: u32,
    unseen: u32,
    mix: Mix,
    /// Bytes of pages that should have gone by the upper rung of the mix and have not yet.
    debt: f64,
    /// Time that probes may take, and whose turn it is.
    allowance: f64,
    /// Time that looks at samples may take.
    looking: f64,
    turn: usize,
    plan: Plan,
    /// How many more packets are sent on the guess that the link is slow.
    guesses: u32,
    /// Whether the packet under way is none of the mix's.
    exempt: bool,
    /// Full packets that went raw since one was encoded or probed.
    unknown: f64,
}

/// Packets over which times are smoothed.
const MEMORY: f64 = 48.0;

/// Packets over which the part of the hopeless ones is smoothed: these come in long runs.
const HOPELESS_MEMORY: f64 = 64.0;

/// CPU time over which the stretch is smoothed, in nanoseconds: many turns of the scheduler.
const STRETCH_MEMORY: f64 = 20e6;

/// A channel starts with so many packets of this rung, until it feels the link. What fills the buffers of a
/// slow link first takes it a second to carry; on a fast link the guess costs some milliseconds.
const FIRST_GUESS: usize = 4;
const GUESSES: u32 = 8;

/// Encoding clearly pays where by arithmetic it makes the link so much faster than raw packets, and a byte
/// of pages still takes so many nanoseconds: no receiver is so slow, unless its cores are shared as the
/// sender's are.
const CLEAR_GAIN: f64 = 1.5;
const CLEARLY_SLOW: f64 = 15.0;

/// Between packets, in nanoseconds: longer ones are not work but a pause, in which the socket empties.
const PAUSE: f64 = 20e6;

/// Part of the time that probes may take.
const PROBING: f64 = 0.01;

/// Most time for probes that is kept for later, in nanoseconds: no more than the slowest needs.
const MOST_ALLOWANCE: f64 = 30e6;

/// The same of looks at samples of packets that go raw; the most is enough for some of them.
const LOOKING: f64 = 0.003;
const MOST_LOOKING: f64 = 100e3;

/// After so many packets in a row in which nothing can be saved one is left out between any two that are
/// looked at, after twice as many two, up to the most: looking costs as much as a tenth of sending.
const ROWS_UNSEEN: u32 = 16;
const MOST_UNSEEN: u32 = 4;

/// Part of the link's time for which a thread is busy. With more it would never wait, and could not notice a
/// link that has become faster.
const MOST_BUSY: f64 = 0.95;
const LEAST_BUSY: f64 = 0.75;

/// The least that a socket can cost, in nanoseconds per byte: nothing is for nothing.
const LEAST_COPYING: f64 = 0.01;

/// Time in which a faster link should show, in nanoseconds.
const NOTICE: f64 = 400e6;

impl Controller {
    pub(super) fn new() -> Self {
        Self {
            ladder: Ladder::new(),
            link: Link::new(),
            price: Price::new(),
            stretch: 1.0,
            copying: 0.2,
            other: 0.0,
            hopeless: 0.0,
            hopeless_row: 0,
            unseen: 0,
            mix: Mix::all(FIRST_GUESS),
            debt: 0.0,
            allowance: 0.0,
            looking: 0.0,
            turn: FIRST,
            plan: Plan {
                rung: FIRST_GUESS,
                probe: None,
                look: false,
            },
            guesses: GUESSES,
            exempt: false,
            unknown: 0.0,
        }
    }

    /// What to do with the next packet: the same until it is [sent](Self::sent).
    pub(super) fn plan(&self) -> Plan {
        self.plan
    }

    /// The packet was encoded by the plan's rung.
    pub(super) fn encoded(&mut self, cost: Cost) {
        self.ladder.measured(self.plan.rung, cost, 0.0);
        self.looked_at(cost, false);
    }

    /// The packet goes raw: looking at a part of it, at this cost, or all of it, showed nothing to save.
    pub(super) fn gave_up(&mut self, cost: Cost) {
        self.exempt = true;
        self.looked_at(cost, true);
    }

    /// A packet went out that tells nothing of the others.
    pub(super) fn left_out(&mut self) {
        self.link.paused();
        self.price.paused();
    }

    /// Whether the link takes more time for a byte than a thread that takes `cost` of a core for it.
    pub(super) fn link_is_slower_than(&self, cost: f64) -> bool {
        let thread = cost * self.stretch * self.price.now();
        self.link.time().is_some_and(|link| link > thread)
    }

    /// Both rungs of the plan's probe have encoded the packet.
    pub(super) fn probed(&mut self, rungs: [usize; 2], costs: [Cost; 2]) {
        self.ladder.compared(rungs, costs);
        if self.is_left_raw() {
            // Nobody else tells whether the data has become better.
            self.ladder.measured(rungs[0], costs[0], self.unknown);
            self.unknown = 0.0;
        }
        // The packet needs the encoding of its own rung anyway, and [`encoded`](Self::encoded) counts it.
        let extra = usize::from(self.plan.rung != RAW);
        for cost in &costs[extra..] {
            self.allowance -= nanos(cost.wall);
            self.has_run(*cost);
        }
    }

    /// The first rung has encoded a sample of a packet that goes raw.
    pub(super) fn looked(&mut self, sample: Cost) {
        self.ladder.measured(FIRST, sample, self.unknown);
        self.unknown = 0.0;
        self.looking -= nanos(sample.wall);
        self.has_run(sample);
    }

    /// The packet is out.
    pub(super) fn sent(&mut self, sent: Sent) {
        let (wire, pages) = (bytes(sent.wire_bytes), bytes(sent.page_bytes));
        let (took, cpu, elapsed) = (nanos(sent.took), nanos(sent.cpu), nanos(sent.elapsed));
        let other = (elapsed - took - nanos(sent.encoding)).max(0.0);
        if other > PAUSE {
            self.link.paused();
            self.price.paused();
        } else if pages > 0.0 {
            let weight = packets(pages) / MEMORY;
            approach(&mut self.other, other / pages, weight);
            approach(
                &mut self.copying,
                (cpu.min(took) / wire.max(1.0)).max(LEAST_COPYING),
                weight,
            );
            // Of a link that has never been felt a thread that only lost its core knows nothing yet.
            let waited = match sent.blocked || self.link.time().is_some() {
                true => (took - cpu * self.stretch).max(0.0),
                false => 0.0,
            };
            self.link
                .sent(wire, elapsed, waited, sent.queued.map(bytes));
            let encoding = self.encoding();
            self.price.sent(wire, pages, elapsed, &self.link, encoding);
        }
        self.unknown = match self.is_left_raw() {
            true => self.unknown + packets(pages),
            false => 0.0,
        };
        self.allowance = (self.allowance + PROBING * elapsed).min(MOST_ALLOWANCE);
        self.looking = (self.looking + LOOKING * elapsed).min(MOST_LOOKING);
        self.settle_debt(pages);
        if !self.link.is_felt() {
            self.guesses = self.guesses.saturating_sub(1);
        }
        self.mix = self.best_mix();
        self.plan = self.next_plan();
    }

    fn looked_at(&mut self, cost: Cost, hopeless: bool) {
        let weight = packets(bytes(cost.page_bytes)) / HOPELESS_MEMORY;
        approach(&mut self.hopeless, f64::from(u8::from(hopeless)), weight);
        self.hopeless_row = match hopeless {
            true => (self.hopeless_row + 1).min(ROWS_UNSEEN * MOST_UNSEEN),
            false => 0,
        };
        self.unseen = self.hopeless_row / ROWS_UNSEEN;
        self.has_run(cost);
    }

    fn has_run(&mut self, cost: Cost) {
        let (cpu, wall) = (nanos(cost.cpu), nanos(cost.wall));
        if cpu > 0.0 {
            // By time, not by packet: a thread that has to wait for a core waits seldom and long.
            approach(
                &mut self.stretch,
                (wall / cpu).max(1.0),
                cpu / STRETCH_MEMORY,
            );
        }
    }

    /// Whether all packets go raw because of what is known of the data. Before the link is felt they do whatever the data is.
    fn is_left_raw(&self) -> bool {
        self.mix.high == RAW && self.link.time().is_some()
    }

    fn settle_debt(&mut self, pages: f64) {
        if !std::mem::take(&mut self.exempt) {
            let done = f64::from(u8::from(self.plan.rung == self.mix.high));
            self.debt = (self.debt + pages * (self.mix.share - done)).clamp(-pages, pages);
        }
    }

    fn encoding(&self) -> Encoding {
        let Mix { low, high, share } = self.mix;
        if high == RAW {
            return Encoding::Nothing;
        }
        let size = |rung: usize| self.ladder.rung(rung).size;
        let encoded = share * size(high) + (1.0 - share) * size(low);
        let size = self.hopeless + (1.0 - self.hopeless) * encoded;
        let time = self.link.time().unwrap_or(0.0) * size;
        match size * CLEAR_GAIN < 1.0 && time > CLEARLY_SLOW * self.stretch {
            true => Encoding::ClearlyPays,
            false => Encoding::Pays,
        }
    }

    fn best_mix(&self) -> Mix {
        let Some(link) = self.link.time() else {
            return match self.guesses {
                0 => Mix::RAW,
                _ => Mix::all(FIRST_GUESS),
            };
        };
        let notice = self.link.quantum() * link / NOTICE;
        let busy = (1.0 / (1.0 + notice)).clamp(LEAST_BUSY, MOST_BUSY);
        self.ladder.best_mix(&Terms {
            link,
            load: self.price.now() / busy,
            stretch: self.stretch,
            copying: self.copying,
            other: self.other,
            hopeless: self.hopeless,
        })
    }

    fn next_plan(&mut self) -> Plan {
        let Mix { low, high, share } = self.mix;
        let mut rung = if self.debt > 0.0 || share >= 1.0 {
            high
        } else {
            low
        };
        if rung != RAW && self.unseen > 0 {
            self.unseen -= 1;
            self.exempt = true;
            rung = RAW;
        }
        let probe = self.next_probe(rung);
        let sample = self.ladder.rung(FIRST).cost * bytes(super::SAMPLE) * self.stretch;
        let look = self.is_left_raw() && probe.is_none() && sample <= self.looking;
        Plan { rung, probe, look }
    }

    /// A rung next to those of the mix, if there is time to see what it does beside `rung`.
    fn next_probe(&mut self, rung: usize) -> Option<[usize; 2]> {
        let near = self.mix.low.max(FIRST + 1) - 1..=(self.mix.high + 2).min(RUNGS - 1);
        let known = match rung {
            RAW => self.mix.high.max(FIRST),
            rung => rung,
        };
        if self.turn == known {
            self.turn += 1;
        }
        if !near.contains(&self.turn) {
            self.turn = *near.start() + usize::from(*near.start() == known);
        }
        let costs = |rung| self.ladder.rung(rung).cost * super::PACKET * self.stretch;
        let extra = costs(self.turn) + if rung == RAW { costs(known) } else { 0.0 };
        if extra > self.allowance || self.hopeless_row > 0 {
            return None;
        }
        let probe = [known, self.turn];
        self.turn += 1;
        Some(probe)
    }
}

/// Moves `value` towards `to`, by the part `weight` of the way.
fn approach(value: &mut f64, to: f64, weight: f64) {
    *value += (to - *value) * weight.clamp(0.0, 1.0);
}
