//! The rule of the adaptive method, without a clock and without a codec: waits go in, the rung of the next packet comes out.
//!
//! A **rung** is one encoding on a ladder from raw pages to dense zstd: a denser rung makes fewer bytes with more CPU time. A
//! **window** is the time between two calls of [`Policy::observe`], 25 ms or more.

use std::{iter, mem};

/// What the threads of a channel waited for lately, in shares of the time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waits {
    /// The sender waited for pages of the source.
    pub(super) source: f64,
    /// The sender waited for the socket, or for the bandwidth limit.
    pub(super) socket: f64,
    /// The sender was ready to run, and had no core.
    pub(super) core: f64,
    /// The receiver waited for the network; `None` while it has not reported that.
    pub(super) network: Option<f64>,
}

/// What went out lately, in bytes per nanosecond.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    pub(super) pages: f64,
    /// Headers and payloads.
    pub(super) wire: f64,
    /// `None` if that is not known.
    pub(super) link: Option<LinkWindow>,
}

/// What is known of the way to the peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkWindow {
    /// Bytes of all channels that arrived, per nanosecond.
    pub(super) arrived: f64,
    /// See [`buffered`]: for about this share of the time, the sender would have waited for the socket if there were no buffers.
    pub(super) buffered: f64,
}

/// The part of the bytes sent by which a channel's backlog grew in a window, from its unacknowledged bytes before and after. `rate` is in
/// bytes sent per nanosecond, and the times are those of the window and of a round trip, in nanoseconds.
pub(super) fn buffered(unacknowledged: [f64; 2], rate: f64, [time, round_trip]: [f64; 2]) -> f64 {
    let [before, now] = unacknowledged.map(|it| (it - IN_FLIGHT - rate * round_trip).max(0.0));
    (now - before) / (rate * time).max(1.0)
}

/// Bytes of a channel that are not acknowledged even without a backlog, beside those of a round trip: a peer acknowledges every 256 KiB.
const IN_FLIGHT: f64 = 262_144.0;

/// What limits the throughput of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    Link,
    Receiver,
    Source,
    /// The encoder, or the cores it runs on.
    Encoder,
    /// The link and the encoder about equally.
    Balance,
}

/// A wait of a larger share of the time limits the throughput.
const LONG: f64 = 0.15;
/// A wait of a smaller share counts as none.
const SHORT: f64 = 0.05;

impl Limit {
    /// The table in the module documentation of [`adaptive`](super). Whether the link is busy is decided in [`Policy::observe`].
    pub(super) fn of(waits: Waits) -> Self {
        let network = waits.network.unwrap_or(1.0);
        match waits {
            _ if waits.socket > LONG && network < SHORT => Self::Receiver,
            _ if waits.socket > LONG => Self::Link,
            _ if waits.source > waits.core.max(LONG) => Self::Source,
            _ if waits.socket > SHORT => Self::Balance,
            _ => Self::Encoder,
        }
    }
}

/// How a rung compares with the one before it, on the same pages: mean costs of both. The ratio of mean sizes counts, not the mean of
/// ratios, so that packets that nearly vanish, where a denser rung saves nothing, have little weight.
#[derive(Clone, Copy, Debug)]
struct Comparison {
    lighter: Cost,
    denser: Cost,
    /// Additional CPU time of the denser rung, in nanoseconds per byte of pages, before any comparison.
    typical_cpu: f64,
    /// Comparisons made, up to [`MEMORY`].
    count: f64,
}

impl Comparison {
    /// Quotient of the sizes.
    fn size(&self) -> f64 {
        self.denser.size / self.lighter.size.max(f64::MIN_POSITIVE)
    }

    /// Additional CPU time of the denser rung, in nanoseconds per byte of pages.
    fn cpu(&self) -> f64 {
        let measured = (self.denser.cpu - self.lighter.cpu) * self.count;
        let typical = TYPICAL_COUNT * (1.0 - self.count / MEMORY);
        (measured + self.typical_cpu * typical) / (self.count + typical)
    }
}

/// A mean of the last values.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, value: f64, memory: f64) {
        self.count = (self.count + 1.0).min(memory);
        self.value += (value - self.value) / self.count;
    }
}

/// Means over some windows.
#[derive(Clone, Copy, Debug, Default)]
struct Throughput {
    /// Bytes of pages per nanosecond.
    rate: Mean,
    /// Bytes sent per byte of pages.
    size: Mean,
}

impl Throughput {
    fn add(&mut self, rates: Rates) {
        self.rate.add(rates.pages, THROUGHPUT_WINDOWS);
        let size = rates.wire / rates.pages.max(f64::MIN_POSITIVE);
        self.size.add(size, THROUGHPUT_WINDOWS);
    }

    /// Whether this moves more pages than `other`, by more than the windows differ by chance; also where nothing is known of `other`.
    fn gains_over(&self, other: &Self) -> bool {
        self.rate.value >= LEAST_GAIN * other.rate.value
    }
}

/// What one encoding of some pages came to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    /// Bytes of payload, per byte of pages.
    pub(super) size: f64,
    /// CPU time, in nanoseconds per byte of pages.
    pub(super) cpu: f64,
}

/// Chooses the rung for each packet of one channel.
pub(super) struct Policy {
    /// The first window has not ended. It shows how connections begin, not what limits them.
    is_first: bool,
    /// Between two rungs, packets of both are mixed: 1.25 is a quarter of rung 2 among rung 1.
    position: f64,
    step: f64,
    /// Where the last steps went, and how many in a row.
    direction: f64,
    in_a_row: u32,
    limit: Limit,
    /// Bytes of pages per nanosecond while the link is the limit: with raw packets only, and since encoded packets have been mixed in.
    raw_rate: Mean,
    mixed_rate: Mean,
    /// Windows for which all packets stay raw.
    hold_raw: u32,
    /// What encoded packets alone achieve while the link is not the limit, and what the last mix with raw packets achieved.
    encoded: Throughput,
    mix: Throughput,
    /// Windows for which an encoder that limits is no reason to send anything raw.
    hold_encoded: u32,
    link_capacity: LinkCapacity,
    /// Each rung beside the one before.
    comparisons: [Comparison; RUNGS - 1],
    /// The comparison to make with the next packet, by index.
    wanted: Option<usize>,
    looks_up: bool,
    /// Part of a packet that the denser rung of the mix is owed.
    owed: f64,
    rung: usize,
    /// In a mix with raw packets, those that shrink to this part or less are encoded: binary logarithm. `None` before the first.
    bound: Option<f64>,
}

/// What the link carries for all channels, in bytes per nanosecond: learned while the link limits, and forgotten soon after.
#[derive(Clone, Copy, Debug, Default)]
struct LinkCapacity {
    rate: Option<f64>,
    /// Windows since the link limited; those in which it was not busy count twice, those of a balance do not count.
    age: u32,
    /// What arrived lately.
    arrived: Mean,
}

impl LinkCapacity {
    fn observe(&mut self, limit: Limit, arrived: f64) {
        self.arrived.add(arrived, LINK_WINDOWS);
        let mean = self.arrived.value;
        match (limit, self.rate) {
            // Of single windows, a receiver without a core makes some empty and others full.
            (Limit::Link, Some(rate)) => {
                let part = if arrived < rate { 4.0 } else { 2.0 };
                self.rate = Some(rate + (arrived - rate) / part);
                self.age = 0;
            }
            (Limit::Link, None) if arrived > 0.0 => (self.rate, self.age) = (Some(arrived), 0),
            (Limit::Link | Limit::Balance, _) | (_, None) => {}
            (_, Some(rate)) => {
                // When the rate is forgotten, auto tries for more. On a busy link, that costs more than it may gain.
                self.age += if mean > BUSY * rate { 1 } else { 2 };
                let is_another = mean > FASTER * rate || self.age > LINK_MEMORY;
                self.rate = (!is_another).then_some(rate);
            }
        }
    }

    /// How many times the bytes of now would make the link busy. Infinite if the link has not limited lately.
    fn room(self) -> f64 {
        let rate = self.rate.unwrap_or(f64::INFINITY);
        BUSY * rate / self.arrived.value.max(f64::MIN_POSITIVE)
    }
}

/// Windows over which the bytes on the link are averaged: single windows differ by a third, as buffers fill and drain.
const LINK_WINDOWS: f64 = 3.0;

/// A link that carries so many times the known rate without limiting is a faster one, of which nothing is known.
const FASTER: f64 = 1.5;

/// Windows for which the rate of a link that has limited is remembered, while the link is busy. Half of them if it is not.
const LINK_MEMORY: u32 = 20;

/// A link is busy with this share of its rate: it limits as soon as the next pages are less compressible.
const BUSY: f64 = 0.8;

/// None, and five levels of zstd.
pub(super) const RUNGS: usize = 6;

/// The rung that encodes nothing.
pub(super) const RAW: usize = 0;

/// The lightest rung that encodes.
pub(super) const LIGHTEST: usize = 1;

/// The rung of a new channel. Starting with raw packets on a slow link costs more than starting with encoded ones on a fast one.
pub(super) const START: usize = 2;

/// The step by which the bound moves, so that the right part of the packets is encoded.
const BOUND_STEP: f64 = 0.1;

/// Typical quotients of size, and additional CPU times in nanoseconds per byte of pages, until the guest's own are known.
const TYPICAL: [(f64, f64); RUNGS - 1] = [
    (0.36, 1.6),
    (0.86, 0.35),
    (0.97, 0.3),
    (0.96, 0.7),
    (0.97, 3.5),
];

/// Share of the bytes that a rung has to save for each additional core: 4 % for a tenth of a core. A slow link has the time for dense
/// rungs.
const PRICE: f64 = 0.4;

/// The same where the encoder limits, too: 20 %.
const DEAR: f64 = 2.0;

/// Share of the bytes that the first rung that encodes has to save.
const LEAST_SAVING: f64 = 0.08;

/// Comparisons that are averaged.
const MEMORY: f64 = 6.0;

/// The typical CPU time counts as much as so many comparisons at first, and nothing in the end: an interrupt in one comparison may take
/// as long as the encoding.
const TYPICAL_COUNT: f64 = 2.0;

/// Bounds of a step, in rungs.
const LEAST_STEP: f64 = 0.125;
const MOST_STEP: f64 = 1.0;
/// The largest while the source limits: nothing is lost then by going slowly.
const SOURCE_STEP: f64 = 0.5;

/// The largest step towards raw packets, and within a mix with them.
const RAW_STEP: f64 = 0.5;

/// The same for these pages: a raw packet among highly compressible ones makes many times their bytes, and a step is so small that the
/// bytes about double at most.
fn raw_step(rates: Rates) -> f64 {
    let size = (rates.wire / rates.pages.max(f64::MIN_POSITIVE)).clamp(LEAST, 0.5);
    let mut step = RAW_STEP;
    while step > 1.5 * size / (1.0 - size) {
        step /= 2.0;
    }
    step
}

/// Fewer raw packets than this part hardly save CPU time, and make many bytes.
const LEAST_RAW_PART: f64 = 0.2;

/// A mix has lost to raw packets if its rate of pages is lower than theirs by more than `LOSS / sqrt(windows)`: the rates of single windows
/// differ by about 15 %.
const LOSS: f64 = 0.2;
const LEAST_WINDOWS: f64 = 2.0;
const MOST_WINDOWS: f64 = 16.0;
/// Windows for which a mix that lost, or gained nothing, is not tried again.
const HOLD: u32 = 20;

/// A mix gains nothing if it moves less than `LEAST_GAIN` times the pages of encoded packets alone, and sends more than `MORE_BYTES` times
/// the bytes for each page.
const LEAST_GAIN: f64 = 1.1;
const MORE_BYTES: f64 = 1.2;
const THROUGHPUT_WINDOWS: f64 = 8.0;

/// Steps in a row before they grow: what is in the buffers takes a window or two to show a change.
const PATIENCE: u32 = 2;

impl Policy {
    pub(super) fn new() -> Self {
        let comparisons = TYPICAL.map(|(size, cpu)| Comparison {
            lighter: Cost {
                size: 1.0,
                cpu: 0.0,
            },
            denser: Cost { size, cpu },
            typical_cpu: cpu,
            count: 0.0,
        });
        Self {
            position: rung_position(START),
            is_first: true,
            step: MOST_STEP,
            direction: 0.0,
            in_a_row: 0,
            limit: Limit::Link,
            raw_rate: Mean::default(),
            mixed_rate: Mean::default(),
            hold_raw: 0,
            encoded: Throughput::default(),
            mix: Throughput::default(),
            hold_encoded: 0,
            link_capacity: LinkCapacity::default(),
            comparisons,
            wanted: None,
            looks_up: false,
            owed: 0.0,
            rung: START,
            bound: None,
        }
    }

    /// Begins with raw packets.
    pub(super) fn start_raw(&mut self) {
        (self.position, self.rung) = (rung_position(RAW), RAW);
    }

    /// The rung of the next packet: the same until [`next_packet`](Self::next_packet). [`pick`](Self::pick) decides in a mix with raw
    /// packets.
    pub(super) fn rung(&self) -> usize {
        self.rung
    }

    /// Whether some packets are encoded and others go raw.
    pub(super) fn mixes_raw(&self) -> bool {
        self.position > 0.0 && self.has_raw()
    }

    /// Whether some or all packets go raw.
    fn has_raw(&self) -> bool {
        self.position < rung_position(LIGHTEST)
    }

    /// The rung of a packet that shrinks to about this part, in a mix with raw packets: those that shrink most are encoded, as they save
    /// most bytes and take least CPU time.
    pub(super) fn pick(&mut self, size: f64) -> usize {
        let size = size.max(LEAST).log2();
        let bound = self.bound.get_or_insert(size);
        let is_below = size <= *bound;
        *bound += BOUND_STEP * (self.position - f64::from(u8::from(is_below)));
        if is_below { LIGHTEST } else { RAW }
    }

    pub(super) fn limit(&self) -> Limit {
        self.limit
    }

    /// The comparison to make with the next packet: of this rung and the one after it.
    pub(super) fn wanted(&self) -> Option<usize> {
        self.wanted
    }

    /// A packet is out.
    pub(super) fn next_packet(&mut self) {
        if self.mixes_raw() {
            self.rung = LIGHTEST;
            return;
        }
        let low = self.position.floor();
        self.owed += self.position - low;
        let is_due = self.owed >= 1.0;
        self.owed -= f64::from(u8::from(is_due));
        let low = (0..RUNGS).rfind(|rung| rung_position(*rung) <= low);
        self.rung = low.unwrap_or(RAW) + usize::from(is_due);
    }

    /// Learns what the threads waited for, and what went out meanwhile.
    pub(super) fn observe(&mut self, mut waits: Waits, rates: Rates) {
        let buffered = rates.link.map_or(0.0, |link| link.buffered);
        waits.socket = waits.socket.max(buffered);
        self.limit = Limit::of(waits);
        if let Some(link) = rates.link {
            self.link_capacity.observe(self.limit, link.arrived);
        }
        if mem::take(&mut self.is_first) {
            return;
        }
        if self.loses_to_raw(rates.pages) {
            self.turn(-1.0, MOST_STEP);
            (self.position, self.hold_raw) = (0.0, HOLD);
            return;
        }
        let room = self.link_capacity.room();
        if self.mix_gains_nothing(rates, room) {
            self.turn(1.0, MOST_STEP);
            (self.position, self.hold_encoded) = (rung_position(LIGHTEST), HOLD);
            return;
        }
        let is_busy = self.limit == Limit::Balance || room < 1.0;
        // All packets are encoded, and that is worth it.
        let shrinks = !self.has_raw() && rates.wire < (1.0 - LEAST_SAVING) * rates.pages;
        let worthwhile = |price| rung_position(self.densest_worthwhile(rates.pages, price));
        let (target, most) = match self.limit {
            Limit::Link if self.hold_raw > 0 => (0.0, MOST_STEP),
            Limit::Link => (worthwhile(PRICE), MOST_STEP),
            Limit::Source => (0.0, SOURCE_STEP),
            // Link and encoder limit alike.
            Limit::Balance | Limit::Encoder if shrinks && is_busy => {
                let price = DEAR / (1.0 - waits.core).max(LEAST);
                (worthwhile(price), MOST_STEP)
            }
            Limit::Encoder if shrinks => {
                let lightest = if self.hold_encoded > 0 { LIGHTEST } else { RAW };
                let fits = self.lightest_that_fits(room, rates);
                (fits.max(rung_position(lightest)), MOST_STEP)
            }
            // What does not shrink may as well go raw. With raw packets in the mix, the socket fills in bursts and the link is idle
            // between these: so towards raw.
            Limit::Encoder | Limit::Receiver | Limit::Balance => (0.0, MOST_STEP),
        };
        if self.limit == Limit::Link {
            self.looks_up = !self.looks_up;
            let below = self.rung.saturating_sub(1);
            let above = self.rung.min(RUNGS - 2);
            self.wanted = Some(if self.looks_up { above } else { below });
        }
        let distance = target - self.position;
        if distance == 0.0 {
            return;
        }
        let direction = distance.signum();
        self.turn(direction, most);
        let encoded = self.position - rung_position(LIGHTEST);
        let most = match direction < 0.0 || encoded <= 0.0 {
            true => most.min(encoded.max(0.0) + raw_step(rates)),
            false => most,
        };
        // A sender that waits long for the link has time for much denser packets.
        let spare = match self.limit {
            _ if direction < 0.0 => 0.0,
            Limit::Link if shrinks => waits.socket,
            // In a mix, the encoded part grows as the time for encoding does.
            Limit::Link => self.position * waits.socket / (1.0 - waits.socket).max(LEAST),
            _ => 0.0,
        };
        let step = self.step.max(spare);
        self.position += direction * step.min(most).min(distance.abs());
        if self.has_raw() {
            self.hold_encoded = 0;
        }
    }

    /// Adapts the step to a direction: smaller after a turn, larger after many steps the same way.
    fn turn(&mut self, direction: f64, most: f64) {
        if direction == self.direction {
            self.in_a_row += 1;
        } else {
            self.step /= if self.direction == 0.0 { 1.0 } else { 2.0 };
            (self.direction, self.in_a_row) = (direction, 1);
        }
        if self.in_a_row > PATIENCE {
            self.step *= 2.0;
        }
        self.step = self.step.clamp(LEAST_STEP, most);
    }

    /// Whether a mix with raw packets moves fewer pages than raw packets alone did: where the socket holds less than a packet, the
    /// link is idle while the sender encodes. Then all packets stay raw for a while.
    fn loses_to_raw(&mut self, rate: f64) -> bool {
        let is_link = self.limit == Limit::Link;
        if self.position == 0.0 {
            if self.hold_raw > 0 {
                self.hold_raw -= 1;
                self.mixed_rate = Mean::default();
            }
            if rate < self.raw_rate.value / 2.0 {
                // So slow a link is another one.
                self.raw_rate = Mean::default();
            }
            match is_link {
                true => self.raw_rate.add(rate, MOST_WINDOWS),
                false => self.raw_rate = Mean::default(),
            }
            return false;
        }
        if self.mixed_rate.count >= MOST_WINDOWS {
            // The rate of raw packets was measured too long ago.
            (self.raw_rate, self.mixed_rate) = Default::default();
        }
        // With more packets encoded, an encoder that limits calls for fewer first.
        let counts = match self.limit {
            Limit::Link | Limit::Balance => self.mixes_raw(),
            Limit::Encoder => self.position <= LEAST_STEP,
            Limit::Receiver | Limit::Source => false,
        };
        if !counts {
            return false;
        }
        self.mixed_rate.add(rate, MOST_WINDOWS);
        let Mean { value, count } = self.mixed_rate;
        count >= LEAST_WINDOWS && value < (1.0 - LOSS / count.sqrt()) * self.raw_rate.value
    }

    /// Whether a mix with raw packets sends more bytes than encoded packets alone did, for hardly more pages. Then nothing goes raw for
    /// a while.
    fn mix_gains_nothing(&mut self, rates: Rates, room: f64) -> bool {
        self.hold_encoded = self.hold_encoded.saturating_sub(1);
        if !self.mixes_raw() {
            if self.hold_encoded == 0 {
                self.mix = Throughput::default();
            }
            if !self.has_raw() && matches!(self.limit, Limit::Encoder | Limit::Balance) {
                self.encoded.add(rates);
                if self.mix.gains_over(&self.encoded) {
                    // The pages have changed since the mix was given up.
                    self.hold_encoded = 0;
                }
            }
            return false;
        }
        if matches!(self.limit, Limit::Source | Limit::Receiver) {
            return false;
        }
        self.mix.add(rates);
        let is_useless = (self.limit == Limit::Link || room < 1.0)
            && self.mix.rate.count >= LEAST_WINDOWS
            && !self.mix.gains_over(&self.encoded)
            && self.mix.size.value > MORE_BYTES * self.encoded.size.value;
        if is_useless {
            self.encoded = Throughput::default();
        }
        is_useless
    }

    /// A rung and the one after it have encoded the same pages.
    pub(super) fn compared(&mut self, rung: usize, [lighter, denser]: [Cost; 2]) {
        self.wanted = None;
        let Some(comparison) = self.comparisons.get_mut(rung) else {
            return;
        };
        comparison.count = (comparison.count + 1.0).min(MEMORY);
        let both = [
            (&mut comparison.lighter, lighter),
            (&mut comparison.denser, denser),
        ];
        for (mean, cost) in both {
            mean.size += (cost.size - mean.size) / comparison.count;
            mean.cpu += (cost.cpu - mean.cpu) / comparison.count;
        }
    }

    /// The lightest position, up to the one of now, that makes at most `room` times the bytes of now. Nothing goes raw now.
    fn lightest_that_fits(&self, room: f64, now: Rates) -> f64 {
        // Beside the first rung that encodes.
        let mut sizes = [1.0; RUNGS];
        for rung in LIGHTEST + 1..RUNGS {
            sizes[rung] = sizes[rung - 1] * self.comparisons[rung - 1].size().min(1.0);
        }
        // Of each rung its position, its size and the next one's.
        let steps =
            (LIGHTEST..RUNGS - 1).map(|rung| (rung_position(rung), sizes[rung], sizes[rung + 1]));
        let here = steps.clone().rfind(|(at, ..)| *at <= self.position);
        let here = here.map_or(1.0, |(at, lighter, denser)| {
            lighter + (denser - lighter) * (self.position - at)
        });
        let size = (now.wire / now.pages.max(f64::MIN_POSITIVE)).clamp(LEAST, 1.0);
        let raw = (rung_position(RAW), here / size, sizes[LIGHTEST]);
        let most = room * here;
        let mut fitting = iter::once(raw)
            .chain(steps)
            .filter(|(.., denser)| *denser <= most);
        let fits = fitting
            .next()
            .map_or(self.position, |(at, lighter, denser)| {
                at + ((lighter - most) / (lighter - denser)).max(0.0)
            });
        let has_few_raw = 1.0 - LEAST_RAW_PART < fits && fits < 1.0;
        if has_few_raw { 1.0 } else { fits }.min(self.position)
    }

    /// The densest rung that saves enough for its CPU time at this `rate`, compared with the next lighter worthwhile rung. If rungs
    /// between these two were rejected, typical values do not suffice: the rung must have been measured.
    fn densest_worthwhile(&self, rate: f64, price: f64) -> usize {
        let (mut best, mut size, mut cpu) = (RAW, 1.0, 0.0);
        for (comparison, rung) in self.comparisons.iter().zip(1..) {
            if comparison.count == 0.0 && best + 1 < rung {
                break;
            }
            size *= comparison.size();
            cpu += comparison.cpu();
            let least = match best {
                // Packets of both are mixed, so as many are encoded as the cores have time for.
                RAW => LEAST_SAVING,
                _ => price * rate * cpu,
            };
            if 1.0 - size >= least && size < 1.0 {
                (best, size, cpu) = (rung, 1.0, 0.0);
            }
        }
        best
    }
}

/// So that every quotient exists.
const LEAST: f64 = 1e-3;

fn rung_position(rung: usize) -> f64 {
    f64::from(u8::try_from(rung).unwrap_or(u8::MAX))
}
