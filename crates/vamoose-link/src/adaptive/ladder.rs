//! The rungs that the adaptive method chooses from, what each costs and saves on this data and machine, and which two of
//! them to mix.
//!
//! ```text
//! cost of a rung    = its own part · pace      pace   of this core and data
//! saving of a rung  = its own part · ease      ease   how easily this data becomes smaller
//! ```
//! Every packet that is encoded tells of pace and ease, whichever rung it goes by, since data changes from file to file; where
//! packets go as they are, those tell of it on which rungs are compared. The part of a rung
//! changes by comparisons alone, in which one packet goes by two rungs: packets of different data tell nothing of it.

use multifd::Method;

use super::controller::Cost;

/// An encoding of a packet: a method at a level.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rung {
    /// CPU time per byte of pages, in nanoseconds.
    pub(super) cost: f64,
    /// Bytes of payload per byte of pages.
    pub(super) size: f64,
}

/// What a rung costs and saves beside the others.
#[derive(Clone, Copy, Debug)]
struct Part {
    cost: f64,
    saving: f64,
    /// Packets that were compared, up to [`COMPARED`].
    known: f64,
}

/// Which two rungs to mix: part `share` of the bytes goes by `high`, the rest by `low`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mix {
    pub(super) low: usize,
    pub(super) high: usize,
    pub(super) share: f64,
}

impl Mix {
    /// Nothing is encoded.
    pub(super) const RAW: Self = Self::all(RAW);

    /// Everything goes by one rung.
    pub(super) const fn all(rung: usize) -> Self {
        Self {
            low: rung,
            high: rung,
            share: 1.0,
        }
    }
}

/// All that the best mix depends on beside the rungs; times in nanoseconds, per byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Time of the link, per byte on the wire.
    pub(super) link: f64,
    /// What the thread's time is multiplied with before it is compared with the link's.
    pub(super) load: f64,
    /// Wall time per CPU time.
    pub(super) stretch: f64,
    /// CPU time of the socket, per byte on the wire.
    pub(super) copying: f64,
    /// Other wall time, per byte of pages.
    pub(super) other: f64,
    /// Part of the bytes that go raw whatever the mix.
    pub(super) hopeless: f64,
}

impl Terms {
    /// Bytes on the wire per byte of pages, at this size of those that are encoded.
    fn wire(&self, size: f64) -> f64 {
        self.hopeless + (1.0 - self.hopeless) * size
    }
}

/// The rungs, faster ones first.
pub(super) struct Ladder {
    parts: [Part; RUNGS],
    pace: f64,
    ease: f64,
    /// Packets that were measured, up to [`MEMORY`].
    known: f64,
}

pub(super) const RUNGS: usize = 6;

/// The rung that does nothing.
pub(super) const RAW: usize = 0;

/// The first rung that does something.
pub(super) const FIRST: usize = 1;

/// Where estimates start: the medians of what notes and benchmarks have for memory and for files. Higher
/// levels of zstd save another twentieth for three times the time: no link is worth that.
const START: [(Method, Option<i32>, f64, f64); RUNGS] = [
    (Method::None, None, 0.0, 1.0),
    (Method::Lz4, Some(8), 0.9, 0.55),
    (Method::Lz4, Some(1), 1.3, 0.48),
    (Method::ZstdFrames, Some(-1), 1.9, 0.41),
    (Method::ZstdFrames, Some(1), 2.3, 0.35),
    (Method::ZstdFrames, Some(3), 3.5, 0.33),
];

/// LZ4 as it finds the most.
const FAST: usize = 2;

/// The first rung of zstd with its match finder in full.
const ZSTD: usize = 4;

/// Packets over which pace and ease are smoothed.
const MEMORY: f64 = 48.0;

/// Packets over which comparisons are.
const COMPARED: f64 = 12.0;

/// How much faster a migration has to become for more CPU time, as a quotient of logarithms: for twice the CPU time it has to
/// take a tenth less.
const WORTH: f64 = 0.14;

/// CPU time for a byte of pages elsewhere, in nanoseconds: of two QEMUs, and of relays, kernels and decoders.
const ELSEWHERE: f64 = 1.2;

impl Ladder {
    pub(super) fn new() -> Self {
        Self {
            parts: START.map(|(_, _, cost, size)| Part {
                cost,
                saving: 1.0 - size,
                known: 0.0,
            }),
            pace: 1.0,
            ease: 1.0,
            known: 0.0,
        }
    }

    /// The method and level of a rung.
    pub(super) fn codec(rung: usize) -> (Method, Option<i32>) {
        let (method, level, ..) = START[rung];
        (method, level)
    }

    /// What encodes differences where other pages go by this rung: they are mostly zeros, of which LZ4 makes little in no
    /// time, and zstd on slow links less.
    pub(super) fn for_differences(rung: usize) -> usize {
        if rung < ZSTD { FAST } else { ZSTD }
    }

    /// A quick rung that finds something to save where this one does.
    pub(super) fn quick(rung: usize) -> usize {
        if rung < ZSTD { FIRST } else { ZSTD }
    }

    pub(super) fn rung(&self, rung: usize) -> Rung {
        let part = self.parts[rung];
        match rung {
            RAW => Rung {
                cost: 0.0,
                size: 1.0,
            },
            _ => Rung {
                cost: (part.cost * self.pace).max(LEAST_COST),
                size: (1.0 - part.saving * self.ease).clamp(LEAST_SIZE, MOST_SIZE),
            },
        }
    }

    /// A packet went by `rung`, and speaks for so many full packets before it of which nothing is known.
    pub(super) fn measured(&mut self, rung: usize, cost: Cost, unknown: f64) {
        let (Some(found), true) = (PerByte::of(cost), rung != RAW) else {
            return;
        };
        let counts = found.packets + unknown;
        self.known = (self.known + counts).min(MEMORY);
        let weight = (counts / self.known).min(1.0);
        let part = self.parts[rung];
        self.pace += (found.cost / part.cost - self.pace) * weight;
        self.ease += ((1.0 - found.size) / part.saving - self.ease) * weight;
    }

    /// The same packet went by both rungs: how the second compares with the first.
    pub(super) fn compared(&mut self, [known, other]: [usize; 2], costs: [Cost; 2]) {
        let [Some(first), Some(second)] = costs.map(PerByte::of) else {
            return;
        };
        let base = self.parts[known];
        let part = &mut self.parts[other];
        // Packets in which there is little to save must not count as much.
        let saved = 1.0 - first.size;
        let counts = second.packets * saved;
        part.known = (part.known + counts).min(COMPARED);
        let weight = (counts / part.known).min(1.0);
        part.cost += (base.cost * second.cost / first.cost - part.cost) * weight;
        let saving = base.saving * (1.0 - second.size) / saved;
        part.saving += (saving.max(LEAST_SAVING) - part.saving) * weight;
    }

    /// The mix that keeps the link busy with as few bytes as the thread has time for: where the time of
    /// the link and the time of the thread, times the load, meet. Rungs that are not worth their CPU time are none of it.
    pub(super) fn best_mix(&self, terms: &Terms) -> Mix {
        let wire = |rung: usize| terms.wire(self.rung(rung).size);
        let encoding = |rung: usize| (1.0 - terms.hopeless) * self.rung(rung).cost;
        let surplus = |rung: usize| {
            let cpu = terms.copying * wire(rung) + encoding(rung);
            terms.link * wire(rung) - terms.load * (terms.other + terms.stretch * cpu)
        };
        let is_worth_it = |low: usize, high: usize| {
            let saved = (wire(low) / wire(high)).ln();
            saved > WORTH * ((ELSEWHERE + encoding(high)) / (ELSEWHERE + encoding(low))).ln()
        };
        let mut low = RAW;
        let mut left = surplus(low);
        if left <= 0.0 {
            return Mix::RAW;
        }
        while let Some(high) = self.next_on_hull(low)
            && is_worth_it(low, high)
        {
            let then = surplus(high);
            if then <= 0.0 {
                let share = left / (left - then);
                return Mix { low, high, share };
            }
            (low, left) = (high, then);
        }
        Mix::all(low)
    }

    /// The rung above `low` that saves the most for its time, if one saves anything. The rungs found so
    /// are the convex hull: mixes of others are beaten by mixes of these.
    pub(super) fn next_on_hull(&self, low: usize) -> Option<usize> {
        let from = self.rung(low);
        let slope = |to: Rung| (from.size - to.size) / (to.cost - from.cost).max(LEAST_COST);
        (low + 1..RUNGS)
            .filter(|high| self.rung(*high).size < from.size)
            .max_by(|a, b| slope(self.rung(*a)).total_cmp(&slope(self.rung(*b))))
    }
}

/// Bounds of what is believed, so that every quotient exists.
const LEAST_COST: f64 = 0.01;
const LEAST_SAVING: f64 = 0.005;
const LEAST_SIZE: f64 = 0.001;
const MOST_SIZE: f64 = 0.995;

/// A cost by the byte.
struct PerByte {
    cost: f64,
    size: f64,
    packets: f64,
}

impl PerByte {
    /// `None` where there is nothing to divide by.
    fn of(cost: Cost) -> Option<Self> {
        let pages = super::bytes(cost.page_bytes);
        (pages > 0.0).then(|| Self {
            cost: (super::nanos(cost.cpu) / pages).max(LEAST_COST),
            size: (super::bytes(cost.payload_bytes) / pages).clamp(LEAST_SIZE, MOST_SIZE),
            packets: super::packets(pages),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const PAGES: usize = 512 << 10;

    fn cost(micros: u64, payload_bytes: usize) -> Cost {
        Cost {
            page_bytes: PAGES,
            payload_bytes,
            cpu: Duration::from_micros(micros),
            wall: Duration::from_micros(micros),
        }
    }

    const TERMS: Terms = Terms {
        link: 1.0,
        load: 1.0,
        stretch: 1.0,
        copying: 0.2,
        other: 0.1,
        hopeless: 0.0,
    };

    fn mix_at(link: f64) -> Mix {
        Ladder::new().best_mix(&Terms { link, ..TERMS })
    }

    #[test]
    fn the_slower_the_link_the_higher_the_mix() {
        assert_eq!(mix_at(0.1), Mix::RAW);
        let ladder = Ladder::new();
        let size = |mix: Mix| {
            let [low, high] = [mix.low, mix.high].map(|rung| ladder.rung(rung).size);
            low + mix.share * (high - low)
        };
        let links = [0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 200.0];
        let sizes = links.map(|link| size(mix_at(link)));
        assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
        assert_eq!(mix_at(200.0), Mix::all(RUNGS - 1));
    }

    #[test]
    fn work_that_saves_little_is_left_out_on_the_slowest_link() {
        let mut ladder = Ladder::new();
        // Zstd at level 3 takes three times the time of level 1 for a fiftieth of the bytes.
        ladder.compared(
            [4, 5],
            [
                cost(1200, PAGES * 350 / 1000),
                cost(3600, PAGES * 343 / 1000),
            ],
        );
        let slow = Terms {
            link: 200.0,
            ..TERMS
        };
        assert_eq!(ladder.best_mix(&slow), Mix::all(4));
    }

    #[test]
    fn in_a_mix_link_and_thread_take_the_same_time() {
        let mix = mix_at(1.0);
        let ladder = Ladder::new();
        let both = |of: fn(Rung) -> f64| {
            (1.0 - mix.share) * of(ladder.rung(mix.low)) + mix.share * of(ladder.rung(mix.high))
        };
        let (size, cost) = (both(|rung| rung.size), both(|rung| rung.cost));
        assert!((size - (0.1 + 0.2 * size + cost)).abs() < 1e-9, "{mix:?}");
    }

    #[test]
    fn a_rung_that_is_beaten_by_mixes_of_others_is_left_out() {
        let mut ladder = Ladder::new();
        // LZ4 at acceleration 1 turns out to be slower than zstd, and to save less.
        ladder.compared(
            [FIRST, 2],
            [cost(400, PAGES / 2), cost(4000, PAGES * 45 / 100)],
        );
        let mut rung = RAW;
        while let Some(next) = ladder.next_on_hull(rung) {
            assert_ne!(next, 2);
            rung = next;
        }
        assert_eq!(rung, RUNGS - 1);
    }

    #[test]
    fn other_data_changes_what_is_expected_of_every_rung() {
        let mut ladder = Ladder::new();
        let before = ladder.rung(4);
        for _ in 0..100 {
            ladder.measured(FIRST, cost(2000, PAGES * 9 / 10), 0.0);
        }
        let after = ladder.rung(4);
        assert!(after.size > 1.5 * before.size, "{after:?}");
        assert!(after.cost > 2.0 * before.cost, "{after:?}");
        assert!(ladder.rung(RAW).size >= 1.0);
    }

    /// Files of all kinds, one after the other, by two rungs in turns: what is expected of the others stays in order.
    #[test]
    fn data_that_changes_tells_nothing_of_the_rungs_that_have_no_part_in_it() {
        let mut ladder = Ladder::new();
        let mut random = 1_u64;
        let (mut ease, mut left) = (1.0, 0);
        for _ in 0..2000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let dice = random >> 60;
            if left == 0 {
                (ease, left) = ([0.3, 1.4, 0.8, 1.1][usize::try_from(dice % 4).unwrap()], 20);
            }
            left -= 1;
            let rung = if dice < 8 { 1 } else { 4 };
            let (saving, micros) = if rung == 1 { (0.45, 400) } else { (0.65, 1200) };
            let size = 1.0 - ease * saving;
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "bytes of a packet"
            )]
            let payload = (PAGES as f64 * size) as usize;
            ladder.measured(rung, cost(micros, payload), 0.0);
            let sizes: Vec<_> = (RAW..RUNGS).map(|rung| ladder.rung(rung).size).collect();
            assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
            let saved = (1.0 - sizes[5]) / (1.0 - sizes[4]);
            assert!((1.0..1.1).contains(&saved), "{sizes:?}");
        }
    }
}
