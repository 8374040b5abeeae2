//! What both ends must agree on because it is not on the wire: the page size, and with it the
//! length of the offset table.

use std::ops::RangeInclusive;

use crate::{LayoutError, RAM_HEADER_FIXED_LEN};

/// Bytes of guest memory that one packet can name: 512 KiB in every QEMU.
pub const PACKET_BYTES: u32 = 512 * 1024;

/// What [`Layout::with_packet_bytes`] allows: between two Vamooses a packet may be smaller or larger.
pub const PACKET_BYTES_RANGE: RangeInclusive<u32> = 64 * 1024..=4 * 1024 * 1024;

/// Page size of the guest and length of a packet, and the sizes that follow from them.
///
/// `pages_alloc` of a packet looks like the table's length and is not (0 in SYNC packets of QEMU
/// 10.0), so the layout is configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    page_size: u32,
    packet_bytes: u32,
}

impl Layout {
    /// x86 guests: 4 KiB pages, 128 a packet.
    pub const X86: Self = Self {
        page_size: 4096,
        packet_bytes: PACKET_BYTES,
    };

    /// The layout for a guest with pages of `page_size` bytes, in packets as QEMU has them.
    ///
    /// # Errors
    /// When `page_size` is not a power of two from 1 KiB to [`PACKET_BYTES`].
    pub fn new(page_size: u32) -> Result<Self, LayoutError> {
        if page_size.is_power_of_two() && (1024..=PACKET_BYTES).contains(&page_size) {
            Ok(Self {
                page_size,
                packet_bytes: PACKET_BYTES,
            })
        } else {
            Err(LayoutError::PageSize { page_size })
        }
    }

    /// The same with packets of `packet_bytes` bytes of pages, which no QEMU supports: both ends
    /// must use the same.
    ///
    /// # Errors
    /// When `packet_bytes` is not a power of two in [`PACKET_BYTES_RANGE`], or smaller than a page.
    pub fn with_packet_bytes(self, packet_bytes: u32) -> Result<Self, LayoutError> {
        if packet_bytes.is_power_of_two()
            && PACKET_BYTES_RANGE.contains(&packet_bytes)
            && packet_bytes >= self.page_size
        {
            Ok(Self {
                packet_bytes,
                ..self
            })
        } else {
            Err(LayoutError::PacketBytes {
                packet_bytes,
                page_size: self.page_size,
            })
        }
    }

    /// Bytes in a page.
    pub fn page_size(self) -> usize {
        self.page_size as usize
    }

    /// Bytes in a page, as wide as page offsets are.
    pub(crate) fn page_size_u32(self) -> u32 {
        self.page_size
    }

    /// Most pages a packet can name, normal and zero together: the length of the offset table.
    pub fn page_count(self) -> usize {
        (self.packet_bytes / self.page_size) as usize
    }

    /// Bytes of a whole RAM packet header with its offset table; the same for every RAM packet.
    pub fn ram_header_len(self) -> usize {
        RAM_HEADER_FIXED_LEN + self.page_count() * size_of::<u64>()
    }

    /// Most bytes of guest memory in one packet.
    pub fn packet_bytes(self) -> usize {
        self.packet_bytes as usize
    }

    /// Most bytes of encoded payload in one packet. A stock receiver's buffer has this size and
    /// some versions do not check.
    pub fn max_payload(self) -> usize {
        2 * self.packet_bytes()
    }
}

impl Default for Layout {
    fn default() -> Self {
        Self::X86
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x86_header_is_1344_bytes() {
        assert_eq!(Layout::X86.page_count(), 128);
        assert_eq!(Layout::X86.ram_header_len(), 1344);
        assert_eq!(Layout::X86.max_payload(), 1 << 20);
    }

    #[test]
    fn odd_page_sizes_are_refused() {
        for page_size in [0, 1, 512, 4095, 12288, PACKET_BYTES * 2, u32::MAX] {
            assert_eq!(
                Layout::new(page_size),
                Err(LayoutError::PageSize { page_size })
            );
        }
        assert_eq!(Layout::new(65536).unwrap().page_count(), 8);
    }

    #[test]
    fn packets_may_have_64_kib_to_4_mib() {
        for (packet_bytes, pages) in [(64 << 10, 16), (1 << 20, 256), (4 << 20, 1024)] {
            let layout = Layout::X86.with_packet_bytes(packet_bytes).unwrap();
            assert_eq!(layout.page_count(), pages);
            assert_eq!(layout.packet_bytes(), packet_bytes as usize);
            assert_eq!(layout.ram_header_len(), 320 + 8 * pages);
        }
        for packet_bytes in [0, 4096, 32 << 10, 96 << 10, 8 << 20, u32::MAX] {
            assert!(Layout::X86.with_packet_bytes(packet_bytes).is_err());
        }
        let large_pages = Layout::new(128 << 10).unwrap();
        assert!(large_pages.with_packet_bytes(64 << 10).is_err());
    }
}
