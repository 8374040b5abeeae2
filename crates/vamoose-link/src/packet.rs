//! A packet in memory: its header and its pages, decoded.

use multifd::{DeviceStateHeader, Layout, PacketKind, RamHeader};

/// One packet between a reader and a writer. Created once, reused for the whole migration.
pub struct Packet {
    /// Header of device state, while the packet holds device state instead of pages.
    pub(crate) device_state: Option<Box<DeviceStateHeader>>,
    pub(crate) ram: RamHeader,
    layout: Layout,
    /// As long as the longest payload, so that it can be exchanged for a payload buffer.
    pub(crate) pages: Box<[u8]>,
    state: Vec<u8>,
}

impl Packet {
    /// An empty RAM packet with room for the pages of a whole packet.
    pub fn new(layout: Layout) -> Self {
        Self {
            device_state: None,
            ram: RamHeader::new(layout),
            layout,
            pages: vec![0; layout.max_payload()].into(),
            state: Vec::new(),
        }
    }

    /// Whether the packet holds pages or device state.
    pub fn kind(&self) -> PacketKind {
        match self.device_state {
            None => PacketKind::Ram,
            Some(_) => PacketKind::DeviceState,
        }
    }

    /// The header of a RAM packet; meaningless while the packet holds device state.
    pub fn ram(&self) -> &RamHeader {
        &self.ram
    }

    /// The header of a RAM packet, to be changed.
    pub fn ram_mut(&mut self) -> &mut RamHeader {
        &mut self.ram
    }

    /// The normal pages, back to back in the order of the offset table.
    pub fn pages(&self) -> &[u8] {
        &self.pages[..self.pages_len()]
    }

    /// The normal pages, to be filled.
    pub fn pages_mut(&mut self) -> &mut [u8] {
        let len = self.pages_len();
        &mut self.pages[..len]
    }

    /// The header, to be changed, and the normal pages.
    pub(crate) fn ram_parts(&mut self) -> (&mut RamHeader, &mut [u8]) {
        let len = self.pages_len();
        (&mut self.ram, &mut self.pages[..len])
    }

    /// Removes the normal pages whose index is in `gone`, which ascends.
    pub(crate) fn remove_pages(&mut self, gone: &[usize]) {
        let page_size = self.layout.page_size();
        for index in gone.iter().rev() {
            let (at, end) = (index * page_size, self.pages_len());
            self.pages.copy_within(at + page_size..end, at);
            self.ram.remove_normal_page(*index);
        }
    }

    /// Turns zero pages into normal ones, for a destination that does not support zero pages.
    pub fn expand_zero_pages(&mut self) {
        let normal = self.pages_len();
        self.ram.zero_pages_become_normal();
        self.pages_mut()[normal..].fill(0);
    }

    /// Turns normal pages of zeros into zero pages, which are sent as offsets only.
    pub fn detect_zero_pages(&mut self) {
        let size = self.layout.page_size();
        let (pages, mut kept) = (&mut self.pages, 0);
        self.ram.normal_pages_become_zero(|index| {
            let page = index * size..(index + 1) * size;
            let is_zero = vamoose_codec::is_zero(&pages[page.clone()]);
            if !is_zero {
                if page.start != kept {
                    pages.copy_within(page, kept);
                }
                kept += size;
            }
            is_zero
        });
    }

    /// The device state.
    pub fn state(&self) -> &[u8] {
        &self.state
    }

    /// Makes this a packet of device state; returns the buffer for its payload.
    pub(crate) fn set_device_state(&mut self, header: DeviceStateHeader) -> &mut Vec<u8> {
        self.device_state = Some(Box::new(header));
        self.ram.clear();
        self.state.clear();
        &mut self.state
    }

    /// At most the length of `pages`: a header never names more pages than a packet holds.
    pub(crate) fn pages_len(&self) -> usize {
        self.ram.normal_offsets().len() * self.layout.page_size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_pages_expand_to_zeros() {
        let mut packet = Packet::new(Layout::X86);
        packet.pages.fill(7);
        packet
            .ram_mut()
            .set_pages(&[0], &[4096, 8192], Layout::X86)
            .unwrap();
        packet.expand_zero_pages();
        assert_eq!(packet.pages().len(), 3 * 4096);
        assert!(packet.pages()[..4096].iter().all(|byte| *byte == 7));
        assert!(packet.pages()[4096..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn zero_pages_are_found_and_other_pages_keep_their_content() {
        let mut packet = Packet::new(Layout::X86);
        let offsets: Vec<u64> = (0..128).map(|page| page << 12).collect();
        packet
            .ram_mut()
            .set_pages(&offsets, &[], Layout::X86)
            .unwrap();
        for (number, page) in (0..).zip(packet.pages_mut().chunks_exact_mut(4096)) {
            // Only the last byte differs from zero, in every other page.
            page[4095] = if number % 2 == 0 { 0 } else { number };
        }
        packet.detect_zero_pages();
        assert_eq!(packet.ram().zero_offsets().len(), 64);
        let pages = packet.pages().chunks_exact(4096);
        for (offset, page) in packet.ram().normal_offsets().iter().zip(pages) {
            assert_eq!(u64::from(page[4095]) << 12, *offset);
        }
    }
}
