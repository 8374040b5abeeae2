//! A writer's use of the cache: builds payloads with differences.

use std::sync::Arc;

use multifd::{Layout, Method, RamHeader};
use vamoose_codec::{
    EncodeError, Encoder, Settings,
    delta::{Mark, table_len, write_table},
    encoder,
};

use super::{DeltaSender, sender::Planned};
use crate::session::MAX_LEN;

/// Builds the payloads of one writer.
pub(crate) struct Outgoing {
    cache: Arc<DeltaSender>,
    encoder: Encoder,
    plan: Vec<Planned>,
    marks: Vec<Mark>,
    /// The versions that the receiver has of the packet's pages.
    earlier: Vec<u8>,
}

/// A payload with differences.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made {
    pub(crate) len: usize,
    /// Number of pages encoded after an earlier version.
    pub(crate) differences: usize,
}

impl Outgoing {
    pub(crate) fn new(cache: Arc<DeltaSender>, layout: Layout) -> Result<Self, EncodeError> {
        // Higher levels find hardly more.
        let settings = Settings::new(Method::ZstdFrames, Some(1))?;
        Ok(Self {
            cache,
            encoder: encoder(&settings, layout)?,
            plan: Vec::new(),
            marks: Vec::with_capacity(layout.page_count()),
            earlier: Vec::new(),
        })
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

    /// Encodes the planned packet's `pages` to the beginning of `out`, after the earlier versions of some of them. `None` if the
    /// packet is to be sent without these.
    pub(crate) fn encode(
        &mut self,
        pages: &[u8],
        out: &mut [u8],
    ) -> Result<Option<Made>, EncodeError> {
        let Self {
            cache,
            encoder,
            plan,
            marks,
            earlier,
        } = self;
        cache.prepare(plan, pages, earlier, marks);
        let made = match marks.iter().all(|mark| *mark == Mark::Plain) {
            true => Ok(None),
            false => encode(encoder, (pages, earlier), marks, out).map(Some),
        };
        // Also after an error: without this packet the migration ends.
        cache.finish(plan);
        Ok(made?.filter(|made| made.len <= MOST_CHECKED))
    }
}

fn encode(
    encoder: &mut Encoder,
    (pages, earlier): (&[u8], &[u8]),
    marks: &[Mark],
    out: &mut [u8],
) -> Result<Made, EncodeError> {
    let (table, room) = out.split_at_mut(table_len(marks.len()));
    let encoded = encoder.encode_after(earlier, pages, room)?;
    write_table(marks, encoded.method, table)?;
    let mut len = table.len() + encoded.payload.len();
    if encoded.method == Method::None {
        room[..pages.len()].copy_from_slice(pages);
        len = table.len() + pages.len();
    }
    let differences = marks.iter().filter(|mark| mark.is_difference()).count();
    Ok(Made { len, differences })
}

/// Longer payloads are sent without a checksum of their pages, so they must hold no differences. Only packets of a VMM can be
/// that long ([`DeltaSender::over`] checks that).
pub(super) const MOST_CHECKED: usize = MAX_LEN;

#[cfg(test)]
mod tests {
    use multifd::BlockName;

    use super::*;

    #[test]
    fn payload_too_long_for_a_checksum_has_no_differences() {
        let layout = Layout::X86.with_packet_bytes(4 << 20).unwrap();
        let mut header = RamHeader::new(layout);
        header.block = BlockName::new(b"ram").unwrap();
        let offsets: Vec<_> = (0..1024).map(|page| page << 12).collect();
        header.set_pages(&offsets, &[], layout).unwrap();
        let cache = Arc::new(DeltaSender::in_place(16 << 20, layout));
        let mut outgoing = Outgoing::new(cache, layout).unwrap();
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
            assert_eq!(outgoing.plan(&header, epoch), epoch > 1);
            if epoch > 1 {
                let made = outgoing.encode(&sent, &mut out).unwrap();
                assert_eq!(made.is_some(), epoch == 4);
                assert!(made.is_none_or(|made| made.len <= MOST_CHECKED));
            }
        }
    }
}
