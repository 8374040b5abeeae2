//! The adaptive method (`auto`): for each packet the best of none, lz4 and zstd-frames, so that the link and
//! the cores are both busy all the time.
//!
//! # The idea
//! A sender's thread encodes while the socket's buffer drains, so a byte of pages takes
//!
//! ```text
//! time = max(link · size, thread)        thread = other + stretch · (cost + copying · size)
//!
//! link     time of the link, per byte on the wire           from when the socket takes no more: `link`
//! size     bytes on the wire per byte of pages              of each rung, on this data: `ladder`
//! cost     CPU time of encoding, per byte of pages                   "
//! stretch  wall time per CPU time, where threads share cores
//! ```
//!
//! The rungs are raw, lz4 and zstd at a few levels, each slower and denser than the one before. The first
//! term falls from rung to rung and the second rises, so the best is where they meet. That is hardly ever
//! at a rung, but between two of them (of the convex hull of cost and size), and any point between is
//! reached by mixing: so many packets by one, the rest by the other, evenly spread. At 25 Gbit/s two cores
//! cannot encode everything, and raw packets leave the cores idle; a mix is a third faster than either.
//!
//! # What could go wrong
//! - The link changes: its rate is known from the last few waits and from what the socket holds, see `link`.
//! - The data changes: rungs are measured whenever they are used, and their neighbours now and then.
//! - A higher rung saves little for much CPU time, which the guest, QEMU and other migrations could use: it has to be worth
//!   it, see `ladder`.
//! - There is nothing to save: a sample of the packet is tried first, and after several such packets only
//!   one in a few is looked at. Where packets go raw, samples tell when there is something to save again.
//! - It is not the link that is slow but the receiver, or encoding takes the cores from other work:
//!   then all of this makes things worse, and trials find out, see `price`.
//!
//! Each channel decides for itself, by its share of link and cores.

mod controller;
mod ladder;
mod link;
mod price;

use std::time::{Duration, Instant};

use multifd::{Layout, Method};
use vamoose_codec::{EncodeError, Encoded, Encoder, Settings, encoder};

use self::{
    controller::{Controller, Cost, Sent},
    ladder::{FIRST, Ladder, RAW, RUNGS},
};
use crate::{memory::thread_waits, stats::thread_cpu_time};

/// Chooses a method for each packet of one channel, and encodes it.
pub struct Adaptive {
    controller: Controller,
    encoders: Encoders,
    /// Pages out of the middle of a packet, and what becomes of them.
    sample: Box<[u8]>,
    sample_out: Box<[u8]>,
    /// When the last packet was out.
    last_sent: Stamp,
    /// When the thread turned to the socket, as far as is known.
    last_encoded: Stamp,
    /// How often the thread had given its core away by then.
    waits: u64,
    /// Time of encoding since the last packet was out.
    encoding: Duration,
    /// The packet under way holds differences.
    is_left_out: bool,
}

/// Bytes of pages in a sample: enough for both codecs to find what there is, and a thirtieth of a packet.
const SAMPLE: usize = 16 << 10;

/// CPU time of a sender for a byte of pages that go as differences, in nanoseconds (`benches/delta.rs`, which shows that of
/// both ends).
const DIFFERENCE: f64 = 0.6;

/// Pieces of a sample.
const PIECES: usize = 4;

impl Adaptive {
    /// For a new channel.
    pub fn new(layout: Layout) -> Self {
        let now = Stamp::now();
        Self {
            controller: Controller::new(),
            encoders: Encoders::new(layout),
            sample: vec![0; SAMPLE].into(),
            sample_out: vec![0; SAMPLE].into(),
            last_sent: now,
            last_encoded: now,
            waits: thread_waits(),
            encoding: Duration::ZERO,
            is_left_out: false,
        }
    }

    /// Whether the next packet goes as it is, by method none, so that its pages need not be gathered.
    /// After `true`, [`encode`](Self::encode) need not be called for that packet.
    pub(crate) fn next_is_raw(&self) -> bool {
        let plan = self.controller.plan();
        plan.rung == RAW && plan.probe.is_none() && !plan.look
    }

    /// As [`Encoder::encode`], by the method that serves this packet best.
    pub(crate) fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        if pages.is_empty() || self.next_is_raw() {
            return Ok(raw(pages));
        }
        let start = Stamp::now();
        let encoded = self.encode_as_planned(pages, out);
        self.last_encoded = Stamp::now();
        self.waits = thread_waits();
        self.encoding += start.until(self.last_encoded).1;
        encoded
    }

    /// Whether differences to earlier versions of pages are faster than these pages as they are, though the next packet goes
    /// raw.
    pub(crate) fn prefers_differences(&self) -> bool {
        self.controller.link_is_slower_than(DIFFERENCE)
    }

    /// As [`encode`](Self::encode), of pages of which some are differences to earlier versions: by another method than other
    /// pages. What becomes of them tells nothing of the others, and they hardly load the link.
    pub(crate) fn encode_differences<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        self.is_left_out = true;
        let rung = Ladder::for_differences(self.controller.plan().rung);
        let encoded = self.encoders.encode(rung, pages, out);
        encoded.map(|(encoded, _)| encoded)
    }

    /// Learns how long the channel took for the last packet: `wire_bytes` bytes, header included, for
    /// `page_bytes` bytes of pages. `took` is wall time, and waiting for a limited bandwidth is in it: a
    /// limit is as good as a slow link. `queued` are the bytes that the channel's socket still holds, if known.
    pub(crate) fn observe(
        &mut self,
        wire_bytes: usize,
        page_bytes: usize,
        took: Duration,
        queued: Option<usize>,
    ) {
        let now = Stamp::now();
        if std::mem::take(&mut self.is_left_out) {
            self.controller.left_out();
            self.encoding = Duration::ZERO;
            self.waits = thread_waits();
            (self.last_sent, self.last_encoded) = (now, now);
            return;
        }
        let (_, elapsed) = self.last_sent.until(now);
        let (cpu, _) = self.last_encoded.until(now);
        let before = std::mem::replace(&mut self.waits, thread_waits());
        self.controller.sent(Sent {
            wire_bytes,
            page_bytes,
            took,
            queued,
            cpu: cpu.min(took),
            blocked: self.waits != before,
            encoding: std::mem::take(&mut self.encoding),
            elapsed,
        });
        (self.last_sent, self.last_encoded) = (now, now);
    }

    fn encode_as_planned<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        let plan = self.controller.plan();
        if plan.rung == RAW {
            if let Some(rungs) = plan.probe {
                let costs = [
                    self.encoders.encode(rungs[0], pages, out)?.1,
                    self.encoders.encode(rungs[1], pages, out)?.1,
                ];
                self.controller.probed(rungs, costs);
            } else if plan.look
                && let Some((_, cost)) = self.encode_sample(FIRST, pages)?
            {
                self.controller.looked(cost);
            }
            return Ok(raw(pages));
        }
        if let Some((Method::None, cost)) = self.encode_sample(Ladder::quick(plan.rung), pages)? {
            self.controller.gave_up(Cost {
                page_bytes: pages.len(),
                payload_bytes: pages.len(),
                ..cost
            });
            return Ok(raw(pages));
        }
        let other = match plan.probe {
            Some([_, other]) => Some((other, self.encoders.encode(other, pages, out)?.1)),
            None => None,
        };
        let (encoded, cost) = self.encoders.encode(plan.rung, pages, out)?;
        if let Some((other, found)) = other {
            self.controller.probed([plan.rung, other], [cost, found]);
        }
        match encoded.method {
            Method::None => self.controller.gave_up(cost),
            _ => self.controller.encoded(cost),
        }
        Ok(encoded)
    }

    /// What becomes of a sample of a packet; `None` of small packets.
    fn encode_sample(
        &mut self,
        rung: usize,
        pages: &[u8],
    ) -> Result<Option<(Method, Cost)>, EncodeError> {
        if pages.len() < 4 * SAMPLE {
            return Ok(None);
        }
        let piece = SAMPLE / PIECES;
        let step = pages.len() / PIECES;
        for (to, from) in self
            .sample
            .chunks_exact_mut(piece)
            .zip(pages.chunks_exact(step))
        {
            to.copy_from_slice(&from[..piece]);
        }
        let sample = self
            .encoders
            .encode(rung, &self.sample, &mut self.sample_out)?;
        Ok(Some((sample.0.method, sample.1)))
    }
}

/// An encoder for each rung, created when it is first used.
struct Encoders {
    layout: Layout,
    encoders: [Option<Encoder>; RUNGS],
}

impl Encoders {
    fn new(layout: Layout) -> Self {
        Self {
            layout,
            encoders: [const { None }; RUNGS],
        }
    }

    /// Encodes by a rung, or by method none where that saves too little.
    fn encode<'a>(
        &mut self,
        rung: usize,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<(Encoded<'a>, Cost), EncodeError> {
        let encoder = match &mut self.encoders[rung] {
            Some(encoder) => encoder,
            slot => {
                let (method, level) = Ladder::codec(rung);
                slot.insert(encoder(&Settings::new(method, level)?, self.layout)?)
            }
        };
        let start = Stamp::now();
        let encoded = encoder.encode(pages, out)?;
        let (cpu, wall) = start.until(Stamp::now());
        let cost = Cost {
            page_bytes: pages.len(),
            payload_bytes: encoded.payload.len(),
            cpu,
            wall,
        };
        Ok((encoded, cost))
    }
}

fn raw(pages: &[u8]) -> Encoded<'_> {
    Encoded {
        method: Method::None,
        payload: pages,
    }
}

/// A moment, by the thread's clock and by the wall's.
#[derive(Clone, Copy)]
struct Stamp {
    cpu: Duration,
    wall: Instant,
}

impl Stamp {
    fn now() -> Self {
        Self {
            cpu: thread_cpu_time(),
            wall: Instant::now(),
        }
    }

    /// CPU time and wall time between two moments. An encoder that has moved to another thread has none of
    /// the former.
    fn until(self, later: Self) -> (Duration, Duration) {
        let cpu = later.cpu.saturating_sub(self.cpu);
        let wall = later.wall.saturating_duration_since(self.wall);
        (cpu.min(wall), wall)
    }
}

/// Bytes of pages in a full packet.
const PACKET: f64 = 524_288.0;

/// How much of a full packet so many bytes of pages are.
fn packets(pages: f64) -> f64 {
    pages / PACKET
}

/// Exact up to 4 GiB, which no packet has.
fn bytes(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

fn nanos(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

#[cfg(test)]
mod tests {
    mod simulation;

    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;
    use vamoose_codec::Decoder;

    fn pages(kind: u8, seed: u64, count: usize) -> Vec<u8> {
        let mut state = seed;
        let bytes = (0..count * 4096).map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let noise = state.to_be_bytes()[0];
            match kind {
                0 => seed.to_be_bytes()[0],
                1 => b'a' + noise % 5,
                _ => noise,
            }
        });
        bytes.collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the socket does meanwhile.
        #[test]
        fn any_mix_of_packets_arrives(
            packets in vec((0..3_u8, any::<u64>(), 0..=128_usize), 1..12),
            took in select(&[0, 100, 100_000, 100_000_000][..]),
            queued in select(&[None, Some(0), Some(300_000), Some(usize::MAX)][..]),
        ) {
            let layout = Layout::X86;
            let mut adaptive = Adaptive::new(layout);
            let mut decoder = Decoder::new(layout);
            let mut out = vec![0; layout.max_payload()];
            for (kind, seed, count) in packets {
                let pages = pages(kind, seed, count);
                let raw = adaptive.next_is_raw();
                let encoded = adaptive.encode(&pages, &mut out).unwrap();
                prop_assert!(!raw || encoded.method == Method::None);
                prop_assert!(encoded.payload.len() <= pages.len());
                let mut back = vec![0xee; pages.len()];
                prop_assert_eq!(decoder.decode(encoded.method, encoded.payload, &mut back), Ok(()));
                prop_assert!(back == pages);
                let wire = encoded.payload.len();
                adaptive.observe(wire, pages.len(), Duration::from_micros(took), queued);
            }
        }

        /// Every rung, without waiting for the controller to choose it.
        #[test]
        fn every_rung_arrives(kind in 0..2_u8, seed: u64, rung in 0..RUNGS) {
            let layout = Layout::X86;
            let mut out = vec![0; layout.max_payload()];
            let pages = pages(kind, seed, 32);
            let (encoded, cost) = Encoders::new(layout).encode(rung, &pages, &mut out).unwrap();
            prop_assert_eq!(cost.page_bytes, pages.len());
            prop_assert_eq!(encoded.method, Ladder::codec(rung).0);
            let mut back = vec![0xee; pages.len()];
            prop_assert_eq!(Decoder::new(layout).decode(encoded.method, encoded.payload, &mut back), Ok(()));
            prop_assert!(back == pages);
        }
    }
}
