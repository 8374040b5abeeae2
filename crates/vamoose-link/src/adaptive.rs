//! The adaptive method (`auto`): chooses an encoding for each packet, by who waits.
//!
//! The threads at both ends of a channel measure what they wait for, see `meter`. Over the last 50 ms (at first 25 ms):
//!
//! ```text
//!  sender      waits for its source    | encodes | waits for the socket
//!  receiver    waits for the network   | decodes | waits for its consumer        (reported in acknowledgements)
//! ```
//!
//! | who waits | what limits | what auto does |
//! |---|---|---|
//! | the sender for the socket, the receiver for the network | the link | a denser rung, if it is worth its CPU time |
//! | the sender for the socket, the receiver not for the network | the receiver | a lighter rung |
//! | the sender for its source | the source | a lighter rung |
//! | the sender for the socket, a little; or for nothing, or a core, while the link is busy | link and encoder alike | the densest rung that takes little CPU time; in a mix with raw packets, more of these |
//! | the sender for nothing, or for a core | the encoder | a lighter rung, up to a busy link; in a mix with raw packets, more of these |
//!
//! Rungs are none, and zstd at levels -1, 1, 2, 3 and 5: each slower and denser than the one before. Packets of two neighbouring
//! rungs are mixed where the lighter one makes more bytes than the link carries, and the denser one is too slow to fill the link. In a mix
//! with raw packets, those that shrink most are encoded; a sample of each packet shows how much that is. Such a mix is given up for a
//! second if it sends more bytes than encoded packets alone for hardly more pages, or moves fewer pages than raw packets alone. Steps are
//! small where the direction changes, and become larger while it does not, or while the sender waits long for the link.
//!
//! A denser rung is worth its CPU time if it saves 4 % of the bytes for each additional tenth of a core, and 20 % or more where link and
//! encoder limit alike. To find out, both rungs encode a part of the same packet now and then, while the link limits. The link is busy with
//! 80 % of what arrived when it was the limit.
//!
//! If the bytes that were sent and have not arrived become more in a window, buffers absorbed what the link did not carry. Their growth, as
//! a share of the bytes sent, counts as the share of time that the sender waited for the socket, if it is the larger of the two.
//!
//! For a destination with a page store, packets go raw only where they do not shrink: what is alike today saves bytes of the next guest.
//!
//! The first packets go by zstd 1, or raw if the link is known to be fast. Each channel decides for itself, by its share of the cores and
//! by what all channels send.

pub(crate) mod meter;
mod policy;

use std::mem;

use multifd::{Layout, Method};
use vamoose_codec::{EncodeError, Encoded, Encoder, Settings, encoder};

use self::{
    meter::{Activity, WaitMeter},
    policy::{Cost, LIGHTEST, Limit, LinkWindow, Policy, RAW, RUNGS, Rates, Waits, buffered},
};
use crate::{Stats, Stream, stats::cpu_timed, stream::Delivery};

/// Chooses a method for each packet of one channel, and encodes it.
pub struct Adaptive {
    policy: Policy,
    encoders: Encoders,
    meter: WaitMeter,
    /// See [`Adaptive::avoid_raw`].
    avoids_raw: bool,
    /// Packets in a row that were tried and did not shrink.
    dense: u32,
    /// So many packets may go raw before another one is tried.
    untried: u32,
    /// Packets, bytes of their pages, and bytes sent, since the policy has learned of waits.
    packets: u32,
    page_bytes: usize,
    wire_bytes: usize,
    /// What had been delivered then, if that is known.
    before: Option<Delivery>,
}

/// What is known beyond the sender of a channel.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FarEnd {
    /// The share of its time that the receiver waits for the network.
    network: Option<f64>,
    delivery: Option<Delivery>,
}

impl FarEnd {
    pub(crate) fn of(stream: &Stream, stats: Option<&Stats>) -> Self {
        // Of a socket it is known only what it has taken.
        let taken = stats.map(|stats| Delivery {
            arrived: stats.wire_bytes.read(),
            ..Delivery::default()
        });
        Self {
            network: stream.peer_wait(),
            delivery: stream.delivery().or(taken),
        }
    }
}

/// Waits are measured over at least so many packets.
const LEAST_PACKETS: u32 = 2;

/// At most 31 packets in a row are not tried: binary logarithm of one more.
const MOST_UNTRIED: u32 = 5;

/// The part of a packet that two rungs encode to be compared.
const COMPARED_PART: usize = 4;

/// The part of a packet that shows how much it shrinks.
const SAMPLED_PART: usize = 64;

/// The method and level of each rung.
pub(crate) const METHODS: [(Method, Option<i32>); RUNGS] = [
    (Method::None, None),
    (Method::ZstdFrames, Some(-1)),
    (Method::ZstdFrames, Some(1)),
    (Method::ZstdFrames, Some(2)),
    (Method::ZstdFrames, Some(3)),
    (Method::ZstdFrames, Some(5)),
];

impl Adaptive {
    /// For a new channel.
    pub fn new(layout: Layout) -> Self {
        Self {
            policy: Policy::new(),
            encoders: Encoders::new(layout),
            meter: WaitMeter::of_sender(),
            avoids_raw: false,
            dense: 0,
            untried: 0,
            packets: 0,
            page_bytes: 0,
            wire_bytes: 0,
            before: None,
        }
    }

    /// See [`Encoder::add_checksums`].
    pub(crate) fn add_checksums(&mut self) {
        self.encoders.has_checksums = true;
    }

    /// The first packets go raw.
    pub(crate) fn start_raw(&mut self) {
        self.policy.start_raw();
    }

    /// Packets go raw only where they do not shrink, also if that costs time.
    pub(crate) fn avoid_raw(&mut self) {
        self.avoids_raw = true;
    }

    /// The rung of the next packet.
    fn rung(&self) -> usize {
        let least = if self.avoids_raw && self.untried == 0 {
            RAW + 1
        } else {
            RAW
        };
        self.policy.rung().max(least)
    }

    /// Whether the next packet goes as it is, by method none, so that its pages need not be gathered.
    /// After `true`, [`encode`](Self::encode) need not be called for that packet.
    pub(crate) fn next_is_raw(&self) -> bool {
        self.rung() == RAW && self.policy.wanted().is_none()
    }

    /// Whether differences to earlier versions of pages should be sent though the next packet goes raw: these load the link less.
    pub(crate) fn prefers_differences(&self) -> bool {
        self.policy.limit() == Limit::Link
    }

    /// The next packet is about to be encoded.
    pub(crate) fn begin_encode(&mut self) {
        self.meter.switch_to(Activity::Work);
    }

    /// As [`Encoder::encode`], by the method of the packet's rung.
    pub(crate) fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        if let Some(rung) = self.policy.wanted() {
            let part = &pages[..pages.len() / COMPARED_PART];
            if !part.is_empty() {
                let lighter = self.encoders.measure(rung, part, out)?;
                let denser = self.encoders.measure(rung + 1, part, out)?;
                self.policy.compared(rung, [lighter, denser]);
            }
        }
        let rung = match self.policy.mixes_raw() && !self.avoids_raw {
            true => {
                let sample = middle(pages, self.encoders.layout.page_size());
                let encoded = self.encoders.encode(LIGHTEST, sample, out)?.payload.len();
                self.policy.pick(bytes(encoded) / bytes(sample.len()))
            }
            false => self.rung(),
        };
        let encoded = self.encoders.encode(rung, pages, out)?;
        if rung != RAW {
            self.dense = if encoded.method == Method::None {
                self.dense + 1
            } else {
                0
            };
            self.untried = (1 << self.dense.min(MOST_UNTRIED)) - 1;
        }
        Ok(encoded)
    }

    /// The packet is about to be sent.
    pub(crate) fn begin_send(&mut self) {
        self.meter.switch_to(Activity::Output);
    }

    /// The packet is out, on this stream.
    pub(crate) fn end_send(
        &mut self,
        page_bytes: usize,
        wire_bytes: usize,
        peer: impl FnOnce() -> FarEnd,
    ) {
        self.meter.switch_to(Activity::Input);
        self.untried = self.untried.saturating_sub(1);
        self.packets += 1;
        self.page_bytes += page_bytes;
        self.wire_bytes += wire_bytes;
        if self.packets >= LEAST_PACKETS
            && let Some(shares) = self.meter.shares()
        {
            let FarEnd { network, delivery } = peer();
            let waits = Waits {
                source: shares.input,
                socket: shares.output,
                core: shares.core,
                network,
            };
            let [pages, wire] = [&mut self.page_bytes, &mut self.wire_bytes]
                .map(|sent| bytes(mem::take(sent)) / shares.nanos);
            let before = mem::replace(&mut self.before, delivery);
            // What others send during a pause of this channel is no part of its window.
            let window = before.zip(delivery).filter(|_| !shares.had_pause);
            let link = window.map(|(before, now)| {
                let arrived = usize::try_from(now.arrived.saturating_sub(before.arrived));
                let unacknowledged = [before, now].map(|it| bytes(it.unacknowledged));
                let round_trip = now.round_trip.as_secs_f64() * 1e9;
                LinkWindow {
                    arrived: bytes(arrived.unwrap_or(usize::MAX)) / shares.nanos,
                    buffered: buffered(unacknowledged, wire, [shares.nanos, round_trip]),
                }
            });
            self.policy.observe(waits, Rates { pages, wire, link });
            self.packets = 0;
        }
        self.policy.next_packet();
    }
}

/// An encoder for each rung, created when it is first used.
struct Encoders {
    layout: Layout,
    has_checksums: bool,
    encoders: [Option<Encoder>; RUNGS],
}

impl Encoders {
    fn new(layout: Layout) -> Self {
        Self {
            layout,
            has_checksums: false,
            encoders: [const { None }; RUNGS],
        }
    }

    /// Encodes by a rung, or by method none where that saves too little.
    fn encode<'a>(
        &mut self,
        rung: usize,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        let encoder = match &mut self.encoders[rung] {
            Some(encoder) => encoder,
            slot => {
                let (method, level) = METHODS[rung];
                let encoder = slot.insert(encoder(&Settings::new(method, level)?, self.layout)?);
                if self.has_checksums {
                    encoder.add_checksums()?;
                }
                encoder
            }
        };
        encoder.encode(pages, out)
    }

    fn measure(&mut self, rung: usize, pages: &[u8], out: &mut [u8]) -> Result<Cost, EncodeError> {
        if self.encoders[rung].is_none() {
            // An encoder's first packet costs the memory of its tables too.
            self.encode(rung, pages, out)?;
        }
        let (encoded, time) = cpu_timed(|| self.encode(rung, pages, out));
        let (payload, len) = (encoded?.payload.len(), bytes(pages.len()));
        Ok(Cost {
            size: bytes(payload) / len,
            cpu: time.as_secs_f64() * 1e9 / len,
        })
    }
}

/// A part of the pages, at least one.
fn middle(pages: &[u8], page_size: usize) -> &[u8] {
    let count = pages.len() / page_size;
    let sampled = count.div_ceil(SAMPLED_PART);
    let start = (count - sampled) / 2 * page_size;
    &pages[start..start + sampled * page_size]
}

/// Exact up to 4 GiB, which no packet has, and no window.
fn bytes(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    mod policy;
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

        /// Whatever the threads wait for meanwhile.
        #[test]
        fn any_mix_of_packets_arrives(
            packets in vec((0..3_u8, any::<u64>(), 0..=128_usize), 1..12),
            waits in select(&[(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)][..]),
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
                adaptive.begin_send();
                adaptive.end_send(pages.len(), pages.len(), FarEnd::default);
                let (source, socket) = waits;
                adaptive.policy.observe(Waits { source, socket, ..Waits::default() }, Rates { pages: 1.0, wire: 1.0, link: None });
                adaptive.policy.next_packet();
            }
        }

        /// Whatever the policy chooses, until a packet does not shrink.
        #[test]
        fn packets_for_a_page_store_are_encoded(seed: u64, waits in 0..100_u32) {
            let layout = Layout::X86;
            let mut adaptive = Adaptive::new(layout);
            adaptive.avoid_raw();
            let mut out = vec![0; layout.max_payload()];
            for _ in 0..waits {
                // The encoder limits.
                adaptive.policy.observe(Waits::default(), Rates { pages: 1.0, wire: 1.0, link: None });
                adaptive.policy.next_packet();
            }
            prop_assert!(!adaptive.next_is_raw());
            let text = pages(1, seed, 32);
            prop_assert_eq!(adaptive.encode(&text, &mut out).unwrap().method, Method::ZstdFrames);
            prop_assert!(!adaptive.next_is_raw());
            let noise = pages(2, seed, 32);
            prop_assert_eq!(adaptive.encode(&noise, &mut out).unwrap().method, Method::None);
            prop_assert_eq!(adaptive.rung(), adaptive.policy.rung());
        }

        /// Every rung, without waiting for the policy to choose it.
        #[test]
        fn every_rung_arrives(kind in 0..2_u8, seed: u64, rung in 0..RUNGS) {
            let layout = Layout::X86;
            let mut out = vec![0; layout.max_payload()];
            let pages = pages(kind, seed, 32);
            let mut encoders = Encoders::new(layout);
            let cost = encoders.measure(rung, &pages, &mut out).unwrap();
            let encoded = encoders.encode(rung, &pages, &mut out).unwrap();
            prop_assert_eq!(cost.size, bytes(encoded.payload.len()) / bytes(pages.len()));
            prop_assert_eq!(encoded.method, METHODS[rung].0);
            let mut back = vec![0xee; pages.len()];
            prop_assert_eq!(Decoder::new(layout).decode(encoded.method, encoded.payload, &mut back), Ok(()));
            prop_assert!(back == pages);
        }
    }
}
