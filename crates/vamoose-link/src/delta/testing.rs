//! For the fuzz target and the bench: both ends of the cache without a link between them.
#![allow(clippy::expect_used, reason = "for tests and measurements only")]

use std::{sync::Arc, time::Duration};

use multifd::{BlockName, Layout, RamHeader};
use vamoose_codec::{
    Decoder,
    delta::{Mark, read_table},
};

use super::{DeltaReceiver, DeltaSender, Incoming, Outgoing, Versions};
use crate::pages::PageSink;

/// A sender and a receiver with the same pages.
pub struct Pair {
    layout: Layout,
    outgoing: Outgoing,
    incoming: Incoming,
    decoder: Decoder,
    header: RamHeader,
    epoch: u64,
    out: Vec<u8>,
}

impl Pair {
    /// Both with caches of `bytes`.
    ///
    /// # Panics
    /// Without memory.
    pub fn new(bytes: usize, layout: Layout) -> Self {
        let mut header = RamHeader::new(layout);
        header.block = BlockName::new(b"ram").expect("a name");
        let receiver = Arc::new(DeltaReceiver::new(bytes, layout, Duration::ZERO));
        Self {
            layout,
            outgoing: Outgoing::new(Arc::new(DeltaSender::new(bytes, layout)), layout)
                .expect("memory"),
            incoming: Incoming::new(Versions::Slots(receiver), layout),
            decoder: Decoder::new(layout),
            header,
            epoch: 0,
            out: vec![0; layout.max_payload()],
        }
    }

    /// Sends all of a guest's memory, which is whole pages, and receives it. Returns the bytes between, and how many pages
    /// were differences.
    ///
    /// # Panics
    /// When the received pages differ.
    pub fn send(&mut self, memory: &[u8]) -> (usize, usize) {
        let page_size = self.layout.page_size();
        let (mut bytes, mut differences, mut offset) = (0, 0, 0);
        self.epoch += 1;
        for sent in memory.chunks(self.layout.packet_bytes()) {
            let offsets: Vec<_> = (0..sent.len() / page_size)
                .map(|page| (offset + page * page_size) as u64)
                .collect();
            offset += sent.len();
            self.header
                .set_pages(&offsets, &[], self.layout)
                .expect("whole pages");
            let mut pages = sent.to_vec();
            let sum = crc32c::crc32c(&pages);
            if !self.outgoing.plan(&self.header, self.epoch) {
                bytes += sent.len();
                continue;
            }
            let made = self
                .outgoing
                .encode(&pages, &mut self.out)
                .expect("it encodes")
                .expect("it touches slots");
            bytes += made.len;
            differences += made.differences;
            let (decoder, payload) = (&mut self.decoder, &self.out[..made.len]);
            let mut sink = PageSink::Own(&mut pages);
            let decoded = self.incoming.decode(decoder, payload, &mut sink, sum);
            assert!(
                decoded.is_ok_and(|found| found == sum) && pages == sent,
                "other pages"
            );
        }
        (bytes, differences)
    }
}

/// Payloads of a peer, with the number of pages of each, one after the other until one is refused.
pub fn receive(layout: Layout, packets: &[(usize, &[u8])]) {
    let receiver = DeltaReceiver::new(
        4 * (layout.page_size() + super::SLOT_OVERHEAD),
        layout,
        Duration::ZERO,
    );
    let mut decoder = Decoder::new(layout);
    for (count, payload) in packets {
        let mut marks = vec![Mark::Plain; *count];
        let mut pages = vec![0; count * layout.page_size()];
        let Ok((method, payload)) = read_table(payload, &mut marks) else {
            return;
        };
        let mut earlier = Vec::new();
        let kept = receiver.versions(&marks, &mut earlier).is_ok()
            && decoder
                .decode_after(method, payload, &earlier, &mut pages)
                .is_ok()
            && receiver.keep(&marks, &pages).is_ok();
        if !kept {
            return;
        }
    }
}
