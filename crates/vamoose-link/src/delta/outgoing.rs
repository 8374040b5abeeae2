//! A writer's use of the cache: builds payloads with differences.

use std::sync::Arc;

use multifd::{Method, RamHeader};
use vamoose_codec::{
    EncodeError,
    delta::{Mark, table_len, write_table},
};
use vamoose_session::frame::MAX_LEN;

use super::{DeltaSender, sender::Planned};
use crate::PacketEncoder;

/// Builds the payloads of one writer.
pub(crate) struct Outgoing {
    cache: Arc<DeltaSender>,
    plan: Vec<Planned>,
    marks: Vec<Mark>,
    sample: Sample,
}

/// A payload with differences.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made {
    pub(crate) len: usize,
    /// Number of pages sent as differences.
    pub(crate) differences: usize,
}

impl Outgoing {
    pub(crate) fn new(cache: Arc<DeltaSender>) -> Self {
        Self {
            cache,
            plan: Vec::new(),
            marks: Vec::new(),
            sample: Sample::default(),
        }
    }

    /// Bytes of pages in the cache.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.cache.kept_bytes()
    }

    /// Plans a packet in the `epoch` of its channel. True if the packet touches slots; it must be
    /// [encoded](Self::encode) next then.
    pub(crate) fn plan(&mut self, header: &RamHeader, epoch: u64) -> bool {
        self.cache.plan(header, epoch, &mut self.plan);
        !self.plan.is_empty()
    }

    /// A packet is sent without the cache.
    pub(crate) fn pass_by(&self, header: &RamHeader) {
        self.cache.pass_by(header);
    }

    /// Encodes the planned packet's `pages`, some of which become differences, to the beginning of `out`. `None` if the packet is
    /// to be sent without differences.
    pub(crate) fn encode(
        &mut self,
        encoder: &mut PacketEncoder,
        pages: &mut [u8],
        out: &mut [u8],
    ) -> Result<Option<Made>, EncodeError> {
        let Self {
            cache, plan, marks, ..
        } = self;
        cache.prepare(plan, pages, marks);
        if !self
            .sample
            .pays(cache, plan, (pages, marks), encoder, out)?
        {
            cache.undo(plan, pages, marks);
        }
        let made = match marks.iter().all(|mark| *mark == Mark::Plain) {
            true => Ok(None),
            false => encode(encoder, pages, marks, out).map(Some),
        };
        let made = made.map(|made| {
            made.filter(|made| made.len <= MOST_CHECKED).or_else(|| {
                cache.undo(plan, pages, marks);
                None
            })
        });
        // Also after an error: without this packet the migration ends.
        cache.finish(plan);
        made
    }
}

fn encode(
    encoder: &mut PacketEncoder,
    pages: &[u8],
    marks: &[Mark],
    out: &mut [u8],
) -> Result<Made, EncodeError> {
    let (table, room) = out.split_at_mut(table_len(marks.len()));
    let is_difference = |mark: &&Mark| matches!(mark, Mark::Difference(_) | Mark::InPlace);
    let differences = marks.iter().filter(is_difference).count();
    let encoded = match differences {
        0 => encoder.encode(pages, room),
        _ => encoder.encode_differences(pages, room),
    }?;
    write_table(marks, encoded.method, table)?;
    let mut len = table.len() + encoded.payload.len();
    if encoded.method == Method::None {
        room[..pages.len()].copy_from_slice(pages);
        len = table.len() + pages.len();
    }
    Ok(Made { len, differences })
}

/// Longer payloads are sent without a checksum of their pages, so they must hold no differences. Only packets of a VMM can be
/// that long ([`DeltaSender::over`] checks that).
pub(super) const MOST_CHECKED: usize = MAX_LEN;

/// Encodes some pages of a packet, to see whether differences are smaller than pages.
#[derive(Default)]
struct Sample {
    differences: Vec<u8>,
    pages: Vec<u8>,
}

/// Pages in a sample.
const SAMPLE: usize = 4;

impl Sample {
    fn pays(
        &mut self,
        cache: &DeltaSender,
        plan: &[Planned],
        (pages, marks): (&[u8], &[Mark]),
        encoder: &mut PacketEncoder,
        out: &mut [u8],
    ) -> Result<bool, EncodeError> {
        self.differences.clear();
        self.pages.clear();
        let step = plan.len().div_ceil(SAMPLE);
        cache.sample((plan, pages, marks), step, &mut |difference, page| {
            self.differences.extend_from_slice(difference);
            self.pages.extend_from_slice(page);
        });
        // So few changed bytes are smaller than any encoded page.
        let changed = self.differences.iter().filter(|byte| **byte != 0).count();
        if changed <= self.differences.len() / CLEARLY {
            return Ok(true);
        }
        let mut size = |pages: &[u8]| {
            let encoded = encoder.encode_differences(pages, &mut *out)?;
            Ok::<usize, EncodeError>(encoded.payload.len())
        };
        Ok(size(&self.differences)? < size(&self.pages)?)
    }
}

/// Differences with at most one changed byte in this many need no comparison.
const CLEARLY: usize = 32;

#[cfg(test)]
mod tests {
    use multifd::{BlockName, Layout};
    use vamoose_codec::{Settings, encoder};

    use super::*;

    #[test]
    fn payload_too_long_for_a_checksum_has_no_differences() {
        let layout = Layout::X86.with_packet_bytes(4 << 20).unwrap();
        let mut header = RamHeader::new(layout);
        header.block = BlockName::new(b"ram").unwrap();
        let offsets: Vec<_> = (0..1024).map(|page| page << 12).collect();
        header.set_pages(&offsets, &[], layout).unwrap();
        let settings = Settings::new(Method::Lz4, None).unwrap();
        let mut encoder = encoder(&settings, layout).unwrap().into();
        let mut outgoing = Outgoing::new(Arc::new(DeltaSender::in_place(16 << 20, layout)));
        let mut out = vec![0; layout.max_payload()];
        // In the third round most pages have changed altogether, in the fourth nothing has.
        for (epoch, changed) in [(1, 0), (2, 0), (3, 700), (4, 700)] {
            let noise = |seed| {
                let mut random = fastrand::Rng::with_seed(seed);
                (0..4 << 20).map(move |_| random.u8(..))
            };
            let mut sent: Vec<u8> = noise(1).collect();
            let others = sent[..changed << 12].iter_mut().zip(noise(2));
            others.for_each(|(byte, other)| *byte = other);
            let mut pages = sent.clone();
            assert_eq!(outgoing.plan(&header, epoch), epoch > 1);
            if epoch > 1 {
                let made = outgoing.encode(&mut encoder, &mut pages, &mut out);
                let made = made.unwrap();
                assert_eq!(made.is_some(), epoch == 4);
                assert_eq!(pages == sent, made.is_none());
                assert!(made.is_none_or(|made| made.len <= MOST_CHECKED));
            }
        }
    }
}
