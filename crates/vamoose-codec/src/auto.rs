//! Method auto: for each packet of its own the best of none, lz4 and zstd-frames, so that the link and
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
//! - There is nothing to save: a sample of the packet is tried first, and after several such packets only
//!   one in a few is looked at.
//! - It is not the link that is slow but the receiver, or encoding takes the cores from somebody else:
//!   then all of this makes things worse, and trials find out, see `price`.
//!
//! Each channel decides for itself, by its share of link and cores.

mod controller;
mod ladder;
mod link;
mod price;
#[cfg(test)]
mod simulation;

use std::time::{Duration, Instant};

use multifd::{Layout, Method};
use rustix::time::{ClockId, clock_gettime};

use self::{
    controller::{Controller, Cost, Sent},
    ladder::{Codec, RAW},
};
use crate::{
    EncodeError, Encoded, Encoder,
    encode::{check_input, raw},
    engine::{Compress, Fault, most_worth_sending},
    ffi, lz4, zstd_frames,
};

/// The encoder of one channel.
pub(crate) struct Auto {
    layout: Layout,
    codecs: Codecs,
    controller: Controller,
    /// Pages out of the middle of a packet, and what becomes of them.
    sample: Box<[u8]>,
    sample_room: Box<[u8]>,
    failed: bool,
    /// When the last packet was out.
    last_out: Stamp,
    /// When the thread turned to the socket, as far as is known.
    last_encoded: Stamp,
    /// How often the thread had given its core away by then.
    waits: u64,
    /// Time of encoding since the last packet was out.
    encoding: Duration,
}

/// Bytes of pages in a sample: enough for both codecs to find what there is, and a thirtieth of a packet.
const SAMPLE: usize = 16 << 10;

/// Pieces of a sample.
const PIECES: usize = 4;

impl Auto {
    pub(crate) fn new(layout: Layout) -> Result<Self, EncodeError> {
        let engine = |reason| EncodeError::Engine {
            method: Method::ZstdFrames,
            engine: "zstd",
            reason,
        };
        let now = Stamp::now();
        Ok(Self {
            layout,
            codecs: Codecs {
                lz4: lz4::Compressor { acceleration: 1 },
                zstd: zstd_frames::Compressor::new(1).map_err(engine)?,
            },
            controller: Controller::new(),
            sample: vec![0; SAMPLE].into(),
            sample_room: vec![0; SAMPLE].into(),
            failed: false,
            last_out: now,
            last_encoded: now,
            waits: ffi::thread::waits(),
            encoding: Duration::ZERO,
        })
    }

    /// Encodes by the plan's rung; `None` where the packet had better go raw.
    fn try_encode(
        &mut self,
        pages: &[u8],
        out: &mut [u8],
    ) -> Result<Option<(Method, usize)>, EncodeError> {
        let plan = self.controller.plan();
        if let Some(rungs) = plan.probe {
            let costs = [
                self.run(rungs[0], pages, out)?,
                self.run(rungs[1], pages, out)?,
            ];
            self.controller.probed(rungs, costs.map(|(_, cost)| cost));
        }
        if plan.rung == RAW {
            return Ok(None);
        }
        if let Some(cost) = self.sample_is_hopeless(plan.rung, pages)? {
            self.controller.gave_up(cost);
            return Ok(None);
        }
        let (len, cost) = self.run(plan.rung, pages, out)?;
        if len.is_none() {
            self.controller.gave_up(cost);
            return Ok(None);
        }
        self.controller.encoded(cost);
        let method = self.controller.rung(plan.rung).codec.method();
        Ok(len.map(|len| (method, len)))
    }

    /// What a look at a sample cost, if there is nothing to save in it.
    fn sample_is_hopeless(
        &mut self,
        rung: usize,
        pages: &[u8],
    ) -> Result<Option<Cost>, EncodeError> {
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
        let codec = self.controller.rung(rung).codec.quick();
        let start = Stamp::now();
        let found = self
            .codecs
            .compress(codec, &self.sample, &mut self.sample_room)?;
        let (cpu, wall) = start.until(Stamp::now());
        Ok(found.is_none().then_some(Cost {
            page_bytes: pages.len(),
            payload_bytes: pages.len(),
            cpu,
            wall,
        }))
    }

    /// Encodes by a rung; the length is `None` where too little is saved.
    fn run(
        &mut self,
        rung: usize,
        pages: &[u8],
        out: &mut [u8],
    ) -> Result<(Option<usize>, Cost), EncodeError> {
        let codec = self.controller.rung(rung).codec;
        let start = Stamp::now();
        let len = self.codecs.compress(codec, pages, out)?;
        let (cpu, wall) = start.until(Stamp::now());
        let cost = Cost {
            page_bytes: pages.len(),
            payload_bytes: len.unwrap_or(pages.len()),
            cpu,
            wall,
        };
        Ok((len, cost))
    }
}

impl Encoder for Auto {
    fn method(&self) -> Method {
        Method::None
    }

    fn engine(&self) -> &'static str {
        "auto"
    }

    fn next_is_raw(&mut self) -> bool {
        let plan = self.controller.plan();
        plan.rung == RAW && plan.probe.is_none()
    }

    fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        if self.failed {
            let method = Method::ZstdFrames;
            return Err(EncodeError::AfterError { method });
        }
        check_input(pages, self.layout)?;
        if pages.is_empty() || self.next_is_raw() {
            return Ok(raw(pages));
        }
        let start = Stamp::now();
        let room = out.len().min(self.layout.max_payload());
        let encoded = self.try_encode(pages, &mut out[..room]);
        self.failed = encoded.is_err();
        self.last_encoded = Stamp::now();
        self.waits = ffi::thread::waits();
        self.encoding += start.until(self.last_encoded).1;
        Ok(match encoded? {
            Some((method, len)) => Encoded {
                method,
                payload: &out[..len],
            },
            None => raw(pages),
        })
    }

    fn sent(
        &mut self,
        wire_bytes: usize,
        page_bytes: usize,
        took: Duration,
        queued: &dyn Fn() -> Option<usize>,
    ) {
        let now = Stamp::now();
        let (_, elapsed) = self.last_out.until(now);
        let (cpu, _) = self.last_encoded.until(now);
        let before = std::mem::replace(&mut self.waits, ffi::thread::waits());
        self.controller.sent(Sent {
            wire_bytes,
            page_bytes,
            took,
            queued: queued(),
            cpu: cpu.min(took),
            blocked: self.waits != before,
            encoding: std::mem::take(&mut self.encoding),
            elapsed,
        });
        (self.last_out, self.last_encoded) = (now, now);
    }
}

impl Codec {
    fn method(self) -> Method {
        match self {
            Self::Raw => Method::None,
            Self::Lz4(_) => Method::Lz4,
            Self::Zstd(_) => Method::ZstdFrames,
        }
    }

    /// A quick relative that finds something where this one does.
    fn quick(self) -> Self {
        match self {
            Self::Zstd(1..) => Self::Zstd(1),
            _ => Self::Lz4(8),
        }
    }
}

struct Codecs {
    lz4: lz4::Compressor,
    zstd: zstd_frames::Compressor,
}

impl Codecs {
    /// Writes `pages`, encoded, to `out` and returns how many bytes that are; `None` if too many.
    fn compress(
        &mut self,
        codec: Codec,
        pages: &[u8],
        out: &mut [u8],
    ) -> Result<Option<usize>, EncodeError> {
        let room = most_worth_sending(pages.len()).min(out.len());
        let out = &mut out[..room];
        let result = match codec {
            Codec::Raw => return Ok(None),
            Codec::Lz4(acceleration) => {
                self.lz4.acceleration = acceleration;
                self.lz4.compress(pages, out)
            }
            Codec::Zstd(level) => self
                .zstd
                .set_level(level)
                .and_then(|()| self.zstd.compress(pages, out)),
        };
        match result {
            Ok(len) => Ok(Some(len)),
            Err(Fault::Room) => Ok(None),
            Err(Fault::Refused(reason)) => Err(EncodeError::Engine {
                method: codec.method(),
                engine: "auto",
                reason,
            }),
            Err(Fault::Distrusted { unchecked }) => Err(EncodeError::Distrusted {
                method: codec.method(),
                engine: "auto",
                unchecked,
            }),
        }
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
            cpu: Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default(),
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
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;
    use crate::Decoder;

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
            let mut auto = Auto::new(layout).unwrap();
            let mut decoder = Decoder::new(layout);
            let mut out = vec![0; layout.max_payload()];
            for (kind, seed, count) in packets {
                let pages = pages(kind, seed, count);
                let raw = auto.next_is_raw();
                let encoded = auto.encode(&pages, &mut out).unwrap();
                prop_assert!(!raw || encoded.method == Method::None);
                prop_assert!(encoded.payload.len() <= pages.len());
                let mut back = vec![0xee; pages.len()];
                prop_assert_eq!(decoder.decode(encoded.method, encoded.payload, &mut back), Ok(()));
                prop_assert!(back == pages);
                let wire = encoded.payload.len();
                auto.sent(wire, pages.len(), Duration::from_micros(took), &|| queued);
            }
        }

        /// Every rung, without waiting for the controller to choose it.
        #[test]
        fn every_rung_arrives(kind in 0..2_u8, seed: u64, rung in 0..ladder::RUNGS) {
            let layout = Layout::X86;
            let mut auto = Auto::new(layout).unwrap();
            let mut out = vec![0; layout.max_payload()];
            let pages = pages(kind, seed, 32);
            let method = auto.controller.rung(rung).codec.method();
            let (len, cost) = auto.run(rung, &pages, &mut out).unwrap();
            prop_assert_eq!(cost.page_bytes, pages.len());
            prop_assert_eq!(len.is_none(), rung == RAW);
            if let Some(len) = len {
                let mut back = vec![0xee; pages.len()];
                prop_assert_eq!(Decoder::new(layout).decode(method, &out[..len], &mut back), Ok(()));
                prop_assert!(back == pages);
            }
        }
    }
}
