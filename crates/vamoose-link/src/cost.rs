//! What a method makes of given pages, to predict a migration: encodes a sample by all encodings that the method may use.

use multifd::{Layout, Method};
use vamoose_codec::{EncodeError, Encoder, Health, Settings, encoder};

use crate::{MethodChoice, adaptive, stats::cpu_timed};

/// What an encoding of some pages came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncodingCost {
    /// Method and level.
    pub method: &'static str,
    /// `None` if the method has none.
    pub level: Option<i32>,
    /// Bytes of payload, per byte of pages.
    pub size: f64,
    /// CPU time in seconds, per byte of pages.
    pub cpu: f64,
}

impl MethodChoice {
    /// What the method's encodings make of `pages`, the lightest first. Method auto has several.
    ///
    /// # Errors
    /// When a library fails, or does not support the page size.
    pub fn costs(&self, layout: Layout, pages: &[u8]) -> Result<Vec<EncodingCost>, EncodeError> {
        match self {
            Self::Fixed(engines) => {
                let encoder = engines.encoder(layout, &Health::default().into())?;
                let cost = cost(encoder, engines.settings().level(), layout, &[], pages)?;
                Ok(vec![cost])
            }
            Self::Adaptive(_) => {
                let costs = adaptive::METHODS.iter().map(|(method, level)| {
                    let encoder = encoder(&Settings::new(*method, *level)?, layout)?;
                    cost(encoder, *level, layout, &[], pages)
                });
                costs.collect()
            }
        }
    }
}

impl EncodingCost {
    /// Of pages that are sent as they are.
    pub const RAW: Self = Self {
        method: "none",
        level: None,
        size: 1.0,
        cpu: 0.0,
    };

    /// What differences of `pages` from their `earlier` versions come to.
    ///
    /// # Errors
    /// When the library fails, or does not support the page size.
    pub fn of_differences(
        layout: Layout,
        earlier: &[u8],
        pages: &[u8],
    ) -> Result<Self, EncodeError> {
        let level = Some(1);
        let encoder = encoder(&Settings::new(Method::ZstdFrames, level)?, layout)?;
        cost(encoder, level, layout, earlier, pages)
    }
}

/// `earlier` is empty, or as long as `pages`.
fn cost(
    mut encoder: Encoder,
    level: Option<i32>,
    layout: Layout,
    earlier: &[u8],
    pages: &[u8],
) -> Result<EncodingCost, EncodeError> {
    let mut out = vec![0; layout.max_payload()];
    let packet = layout.packet_bytes();
    // An encoder's first packet costs the memory of its tables too.
    encoder.encode(&pages[..packet.min(pages.len())], &mut out)?;
    let method = encoder.method().name();
    let (encoded, time) = cpu_timed(|| {
        let packets = pages.chunks(packet).enumerate();
        let payloads = packets.map(|(at, pages)| {
            let earlier = earlier.get(at * packet..).unwrap_or_default();
            let earlier = &earlier[..pages.len().min(earlier.len())];
            Ok(encoder
                .encode_after(earlier, pages, &mut out)?
                .payload
                .len())
        });
        payloads.sum::<Result<usize, EncodeError>>()
    });
    let len = pages.len().max(1) as f64;
    Ok(EncodingCost {
        method,
        level,
        size: encoded? as f64 / len,
        cpu: time.as_secs_f64() / len,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of text, pages that a denser rung makes shorter.
    fn pages() -> Vec<u8> {
        let words = (0_u32..).map(|n| format!("{} ", n.wrapping_mul(2_654_435_761) % 5_000));
        words.flat_map(String::into_bytes).take(300 << 12).collect()
    }

    #[test]
    fn denser_rungs_of_auto_make_fewer_bytes() {
        let costs = MethodChoice::default()
            .costs(Layout::X86, &pages())
            .unwrap();
        assert_eq!((costs[0].method, costs[0].size), ("none", 1.0));
        let (first, last) = (costs[1], costs[costs.len() - 1]);
        assert_eq!((first.method, first.level), ("zstd-frames", Some(-1)));
        assert!(last.size < first.size && first.size < 0.8, "{costs:?}");
        assert!(last.cpu > first.cpu && first.cpu > 0.0, "{costs:?}");
    }

    #[test]
    fn pages_that_hardly_changed_are_short_as_differences() {
        let earlier = pages();
        let mut pages = earlier.clone();
        pages.chunks_mut(4096).for_each(|page| page[100] ^= 0xff);
        let differences = EncodingCost::of_differences(Layout::X86, &earlier, &pages).unwrap();
        assert!(differences.size < 0.02, "{differences:?}");
    }
}
