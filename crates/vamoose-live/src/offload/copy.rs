//! Copying decoded pages into guest memory.

#![allow(unsafe_code, reason = "devices write to guest memory by address")]

use std::sync::Arc;

use idxd::offload::{Copier, Devices, Move};
use multifd::Layout;
use vm_memory::VolatileSlice;

/// The copies of one thread by DSAs, and by the processor where they do not.
pub(crate) struct DsaCopy {
    copier: Copier,
    page_bytes: u32,
    /// The moves of the current packet.
    moves: Vec<Move>,
}

impl DsaCopy {
    /// By `devices`, for packets of `layout`.
    pub(crate) fn new(devices: Arc<Devices>, layout: Layout) -> Self {
        Self {
            copier: Copier::new(devices),
            page_bytes: u32::try_from(layout.page_size()).unwrap_or(u32::MAX),
            moves: Vec::with_capacity(layout.page_count()),
        }
    }

    /// Copies `bytes` into `pages`, which are pages of the layout, one after the other.
    pub(crate) fn copy(&mut self, bytes: &[u8], pages: &[VolatileSlice<'_>]) {
        let size = self.page_bytes as usize;
        let moves = bytes
            .chunks_exact(size)
            .zip(pages)
            .map(|(part, page)| Move {
                source: part.as_ptr().expose_provenance() as u64,
                destination: page.ptr_guard_mut().as_ptr().expose_provenance() as u64,
                len: self.page_bytes,
            });
        self.moves.clear();
        self.moves.extend(moves);
        let mut by_processor = |index: usize| pages[index].copy_from(&bytes[index * size..]);
        // SAFETY: the destinations are pages of mappings of guest memory, which may be written and live as long as the slices;
        // there are no Rust references into guest memory. A concurrent write by a vCPU or another channel is
        // as if it came before or after. `bytes` is borrowed until this returns, and by then no
        // device reads or writes any more: that is `copy`'s promise.
        unsafe { self.copier.copy(&self.moves, &mut by_processor) };
    }
}
