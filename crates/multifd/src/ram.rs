//! RAM packets: the pages of a RAM block, their encoding, and whether the packet is a SYNC.

use std::fmt;

use crate::{
    Layout, Method, PRELUDE_LEN, PacketError, PacketKind, Prelude, layout::PACKET_BYTES_RANGE,
};

/// Bytes of a RAM packet's header without its offset table, the 12 of the [`Prelude`] included.
pub const RAM_HEADER_FIXED_LEN: usize = 320;

/// Header of a RAM packet. Reused from packet to packet, it allocates only once.
///
/// The offset table holds the normal pages' offsets, then the zero pages'. Both are bytes from the
/// start of the RAM block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamHeader {
    /// A SYNC: everything before it on all channels is applied before anything after it on any.
    /// Sources older than 9.0 send one with pages: they come before the barrier.
    pub sync: bool,
    /// How the payload is encoded; without meaning in a packet without pages.
    pub method: Method,
    /// How the source's QEMU had encoded the pages, where a relay between says it to another one. QEMU neither sends it nor
    /// reads it: it is in what its header leaves unused.
    pub origin: Option<Method>,
    /// The source's running number of the packet, over all channels.
    pub packet_num: u64,
    /// The RAM block whose pages these are.
    pub block: BlockName,
    /// Bytes of payload after the header.
    payload_len: usize,
    normal: usize,
    offsets: Vec<u64>,
}

impl RamHeader {
    /// An empty header with room for the offsets of a whole packet.
    pub fn new(layout: Layout) -> Self {
        Self {
            sync: false,
            method: Method::None,
            origin: None,
            packet_num: 0,
            block: BlockName::default(),
            payload_len: 0,
            normal: 0,
            offsets: Vec::with_capacity(layout.page_count()),
        }
    }

    /// Parses the header of a packet whose first 12 bytes are `prelude`; `rest` is what follows
    /// them, up to the payload: `layout.ram_header_len() - PRELUDE_LEN` bytes.
    ///
    /// # Errors
    /// When a field holds a value that no correct source sends, or `rest` has the wrong length.
    /// `self` is then a valid header, but of no use.
    pub fn parse(
        &mut self,
        prelude: Prelude,
        rest: &[u8],
        layout: Layout,
    ) -> Result<(), PacketError> {
        let expected = layout.ram_header_len() - PRELUDE_LEN;
        if rest.len() != expected {
            return Err(PacketError::HeaderLength {
                found: rest.len(),
                expected,
            });
        }
        let normal = read_u32(rest, at::NORMAL_PAGES);
        let pages = count_pages(normal, read_u32(rest, at::ZERO_PAGES), layout)?;
        let block = BlockName::from_field(&rest[at::BLOCK_NAME..at::OFFSETS], pages > 0)?;
        let payload_len = payload_len(prelude.method, normal, rest, layout)?;
        self.offsets.clear();
        let offsets = rest[at::OFFSETS..].as_chunks().0.iter();
        for (index, bytes) in offsets.take(pages).enumerate() {
            let offset = u64::from_be_bytes(*bytes);
            check_offset(index, offset, layout)?;
            self.offsets.push(offset);
        }
        self.sync = prelude.sync;
        self.method = prelude.method;
        self.origin = origin(read_u32(rest, at::ORIGIN));
        self.packet_num = u64::from_be_bytes(part(rest, at::PACKET_NUM));
        self.block = block;
        self.payload_len = payload_len;
        self.normal = normal as usize;
        Ok(())
    }

    /// Appends the header to `out` as it goes on the wire: `layout.ram_header_len()` bytes.
    ///
    /// The method bits are left out of a packet without pages and the payload length out of one
    /// without normal pages, as receivers demand.
    pub fn write(&self, layout: Layout, out: &mut Vec<u8>) {
        let prelude = Prelude {
            kind: PacketKind::Ram,
            sync: self.sync,
            method: if self.is_empty() {
                Method::None
            } else {
                self.method
            },
        };
        let start = out.len();
        out.extend_from_slice(&prelude.to_bytes());
        out.extend_from_slice(&field(layout.page_count()));
        out.extend_from_slice(&field(self.normal));
        out.extend_from_slice(&field(self.payload_len()));
        out.extend_from_slice(&self.packet_num.to_be_bytes());
        out.extend_from_slice(&field(self.zero_offsets().len()));
        let origin = self.origin.map_or(0, |method| method.bits() | ORIGIN_KNOWN);
        out.extend_from_slice(&origin.to_be_bytes());
        out.extend_from_slice(&[0; 3 * 8]);
        out.extend_from_slice(&self.block.0);
        for offset in &self.offsets {
            out.extend_from_slice(&offset.to_be_bytes());
        }
        out.resize(start + layout.ram_header_len(), 0);
    }

    /// Removes all pages and the SYNC.
    pub fn clear(&mut self) {
        self.sync = false;
        self.origin = None;
        self.offsets.clear();
        self.normal = 0;
        self.payload_len = 0;
    }

    /// Replaces the pages by `normal` and `zero`, offsets in bytes.
    ///
    /// # Errors
    /// When there are more than the offset table can hold, or one is no multiple of the page size.
    /// `self` is then without pages.
    pub fn set_pages(
        &mut self,
        normal: &[u64],
        zero: &[u64],
        layout: Layout,
    ) -> Result<(), PacketError> {
        self.offsets.clear();
        self.normal = 0;
        self.payload_len = 0;
        let [normals, zeros] =
            [normal, zero].map(|offsets| u32::try_from(offsets.len()).unwrap_or(u32::MAX));
        count_pages(normals, zeros, layout)?;
        for (index, offset) in normal.iter().chain(zero).enumerate() {
            check_offset(index, *offset, layout)?;
        }
        self.offsets.extend_from_slice(normal);
        self.offsets.extend_from_slice(zero);
        self.normal = normal.len();
        Ok(())
    }

    /// Makes every zero page a normal page, for a destination that does not know zero pages
    /// (before 9.0): it would lose them silently.
    pub fn zero_pages_become_normal(&mut self) {
        self.normal = self.offsets.len();
    }

    /// Makes zero pages of those normal pages for which `is_zero` is true, by their place in the payload;
    /// it is asked once for each, in order. The other normal pages keep theirs.
    pub fn normal_pages_become_zero(&mut self, mut is_zero: impl FnMut(usize) -> bool) {
        let mut kept = 0;
        for index in 0..self.normal {
            if !is_zero(index) {
                self.offsets.swap(kept, index);
                kept += 1;
            }
        }
        self.normal = kept;
    }

    /// Removes the normal page of this index, if there is one.
    pub fn remove_normal_page(&mut self, index: usize) {
        if index < self.normal {
            self.offsets.remove(index);
            self.normal -= 1;
        }
    }

    /// Offsets of the pages in the payload, in its order.
    pub fn normal_offsets(&self) -> &[u64] {
        &self.offsets[..self.normal]
    }

    /// Offsets of the pages that are all zeros and not in the payload.
    pub fn zero_offsets(&self) -> &[u64] {
        &self.offsets[self.normal..]
    }

    /// Whether there is no page in the packet.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// Bytes of payload after the header; 0 without normal pages, at most `layout.max_payload()`.
    pub fn payload_len(&self) -> usize {
        if self.normal == 0 {
            0
        } else {
            self.payload_len
        }
    }

    /// Sets the length of the payload that will follow.
    ///
    /// # Errors
    /// When it is longer than a receiver's buffer.
    pub fn set_payload_len(&mut self, len: usize, layout: Layout) -> Result<(), PacketError> {
        if len > layout.max_payload() {
            return Err(PacketError::PayloadTooLong {
                len: u32::try_from(len).unwrap_or(u32::MAX),
                max: layout.max_payload(),
            });
        }
        self.payload_len = len;
        Ok(())
    }
}

/// Name of a RAM block (`pc.ram`), as the NUL-padded field of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockName([u8; BLOCK_NAME_LEN]);

impl BlockName {
    /// The name `name`.
    ///
    /// # Errors
    /// When it is empty, longer than 255 bytes, or holds a NUL.
    pub fn new(name: &[u8]) -> Result<Self, PacketError> {
        let mut field = [0; BLOCK_NAME_LEN];
        field
            .get_mut(..name.len())
            .ok_or(PacketError::BlockName {
                problem: "too long",
            })?
            .copy_from_slice(name);
        let block = Self::from_field(&field, true)?;
        if block.as_bytes() != name {
            return Err(PacketError::BlockName {
                problem: "cut short by a NUL",
            });
        }
        Ok(block)
    }

    /// The name without its padding; empty in packets that carry no page.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.split(|byte| *byte == 0).next().unwrap_or(&self.0)
    }

    fn from_field(field: &[u8], needed: bool) -> Result<Self, PacketError> {
        let name: [u8; BLOCK_NAME_LEN] = field.try_into().map_err(|_| PacketError::BlockName {
            problem: "of the wrong length",
        })?;
        if !name.contains(&0) {
            return Err(PacketError::BlockName {
                problem: "not NUL-terminated",
            });
        }
        if needed && name[0] == 0 {
            return Err(PacketError::BlockName { problem: "empty" });
        }
        Ok(Self(name))
    }
}

impl Default for BlockName {
    fn default() -> Self {
        Self([0; BLOCK_NAME_LEN])
    }
}

impl fmt::Display for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.as_bytes().escape_ascii(), f)
    }
}

impl fmt::Debug for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

const BLOCK_NAME_LEN: usize = 256;

/// Positions of the fields behind the 12 bytes of the prelude. `pages_alloc`, the first one, holds
/// nothing that can be relied on and is not read.
mod at {
    pub(super) const NORMAL_PAGES: usize = 4;
    pub(super) const NEXT_PACKET_SIZE: usize = 8;
    pub(super) const PACKET_NUM: usize = 12;
    pub(super) const ZERO_PAGES: usize = 20;
    pub(super) const ORIGIN: usize = 24;
    pub(super) const BLOCK_NAME: usize = 52;
    pub(super) const OFFSETS: usize = BLOCK_NAME + super::BLOCK_NAME_LEN;
}

const _: () = assert!(at::OFFSETS + PRELUDE_LEN == RAM_HEADER_FIXED_LEN);

/// A flag outside of the method's bits.
const ORIGIN_KNOWN: u32 = 1;

/// What an unused field says about the origin: nothing, if it has a value that no Vamoose writes.
fn origin(field: u32) -> Option<Method> {
    let method = Method::from_flags(field & !ORIGIN_KNOWN).ok()?;
    (field == method.bits() | ORIGIN_KNOWN && method.is_stock()).then_some(method)
}

/// The number of a packet's pages, if the offset table can hold them.
fn count_pages(normal: u32, zero: u32, layout: Layout) -> Result<usize, PacketError> {
    let page_count = layout.page_count();
    match (normal as usize).checked_add(zero as usize) {
        Some(pages) if pages <= page_count => Ok(pages),
        _ => Err(PacketError::Pages {
            normal,
            zero,
            page_count,
        }),
    }
}

fn check_offset(index: usize, offset: u64, layout: Layout) -> Result<(), PacketError> {
    let page_size = layout.page_size_u32();
    match offset.is_multiple_of(page_size.into()) {
        true => Ok(()),
        false => Err(PacketError::Offset {
            index,
            offset,
            page_size,
        }),
    }
}

/// The payload's length: `next_packet_size` where there are normal pages. Where there are none, 7.2
/// leaves a stale size in the field.
fn payload_len(
    method: Method,
    normal: u32,
    rest: &[u8],
    layout: Layout,
) -> Result<usize, PacketError> {
    if normal == 0 {
        return Ok(0);
    }
    let field = read_u32(rest, at::NEXT_PACKET_SIZE);
    let len = field as usize;
    let expected = normal as usize * layout.page_size();
    if len > layout.max_payload() {
        return Err(PacketError::PayloadTooLong {
            len: field,
            max: layout.max_payload(),
        });
    }
    if len == 0 {
        return Err(PacketError::PayloadMissing { normal });
    }
    if method == Method::None && len != expected {
        return Err(PacketError::RawPayload {
            len: field,
            normal,
            expected,
        });
    }
    Ok(len)
}

/// Four bytes at `at`.
pub(crate) fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(part(bytes, at))
}

/// The `N` bytes from `at`: the callers' buffers have a checked or static length.
pub(crate) fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

/// A count or length of a packet as its field: all are at most twice the largest packet.
fn field(value: usize) -> [u8; 4] {
    debug_assert!(value <= 2 * *PACKET_BYTES_RANGE.end() as usize);
    u32::try_from(value).unwrap_or(u32::MAX).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const LAYOUT: Layout = Layout::X86;

    fn parse(bytes: &[u8]) -> Result<RamHeader, PacketError> {
        let mut header = RamHeader::new(LAYOUT);
        let (prelude, rest) = bytes.split_first_chunk().unwrap();
        header.parse(Prelude::parse(prelude)?, rest, LAYOUT)?;
        Ok(header)
    }

    #[test]
    fn the_origin_is_where_qemu_has_nothing() {
        for sent in [
            None,
            Some(Method::None),
            Some(Method::Zlib),
            Some(Method::Zstd),
        ] {
            let mut header = sample();
            header.origin = sent;
            let mut bytes = Vec::new();
            header.write(Layout::X86, &mut bytes);
            let field = read_u32(&bytes, PRELUDE_LEN + at::ORIGIN);
            assert_eq!(field == 0, sent.is_none());
            assert_eq!(origin(field), sent);
        }
        for foreign in [2, 4, 0x3f, 0x41, 0x0f01, 0x1_0001, u32::MAX] {
            assert_eq!(origin(foreign), None, "{foreign:#x}");
        }
    }

    fn sample() -> RamHeader {
        let mut header = RamHeader::new(LAYOUT);
        header.block = BlockName::new(b"pc.ram").unwrap();
        header.method = Method::Zlib;
        header
            .set_pages(&[0x1000, 0x5000], &[0x7000], LAYOUT)
            .unwrap();
        header.set_payload_len(77, LAYOUT).unwrap();
        header
    }

    /// The bytes of [`sample`] with the u32 field at `at` behind the prelude replaced.
    fn with_field(at: usize, value: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        sample().write(LAYOUT, &mut bytes);
        bytes[PRELUDE_LEN + at..][..4].copy_from_slice(&value.to_be_bytes());
        bytes
    }

    #[test]
    fn counts_beyond_the_table_are_refused() {
        let page_count = 128;
        let zero = sample().zero_offsets().len().try_into().unwrap();
        let refused = |normal, zero| {
            Err(PacketError::Pages {
                normal,
                zero,
                page_count,
            })
        };
        let normal = parse(&with_field(at::NORMAL_PAGES, 129));
        assert_eq!(normal, refused(129, zero));
        for zero in [127, u32::MAX] {
            assert_eq!(parse(&with_field(at::ZERO_PAGES, zero)), refused(2, zero));
        }
    }

    #[test]
    fn payload_lengths_are_checked_before_use() {
        assert_eq!(
            parse(&with_field(at::NEXT_PACKET_SIZE, u32::MAX)),
            Err(PacketError::PayloadTooLong {
                len: u32::MAX,
                max: 1 << 20
            })
        );
        assert_eq!(
            parse(&with_field(at::NEXT_PACKET_SIZE, 0)),
            Err(PacketError::PayloadMissing { normal: 2 })
        );
        let mut raw = sample();
        raw.method = Method::None;
        let mut bytes = Vec::new();
        raw.write(LAYOUT, &mut bytes);
        assert_eq!(
            parse(&bytes),
            Err(PacketError::RawPayload {
                len: 77,
                normal: 2,
                expected: 8192
            })
        );
    }

    #[test]
    fn a_stale_size_without_normal_pages_is_ignored() {
        let mut sync = RamHeader::new(LAYOUT);
        sync.sync = true;
        sync.payload_len = 4711;
        let mut bytes = Vec::new();
        sync.write(LAYOUT, &mut bytes);
        // Ours is written without it; put 7.2's back.
        assert_eq!(bytes[PRELUDE_LEN + at::NEXT_PACKET_SIZE..][..4], [0; 4]);
        bytes[PRELUDE_LEN + at::NEXT_PACKET_SIZE..][..4].copy_from_slice(&4711u32.to_be_bytes());
        let parsed = parse(&bytes).unwrap();
        assert_eq!((parsed.payload_len(), parsed.sync), (0, true));
    }

    #[test]
    fn an_unaligned_offset_is_refused() {
        let mut bytes = Vec::new();
        sample().write(LAYOUT, &mut bytes);
        bytes[RAM_HEADER_FIXED_LEN + 8 + 7] = 1;
        let refused = PacketError::Offset {
            index: 1,
            offset: 0x5001,
            page_size: 4096,
        };
        assert_eq!(parse(&bytes), Err(refused.clone()));
        assert_eq!(sample().set_pages(&[0, 0x5001], &[], LAYOUT), Err(refused));
    }

    #[test]
    fn a_block_name_needs_an_end_and_a_beginning() {
        let mut endless = Vec::new();
        sample().write(LAYOUT, &mut endless);
        endless[PRELUDE_LEN + at::BLOCK_NAME..PRELUDE_LEN + at::OFFSETS].fill(b'x');
        assert_eq!(
            parse(&endless),
            Err(PacketError::BlockName {
                problem: "not NUL-terminated"
            })
        );
        let mut nameless = sample();
        nameless.block = BlockName::default();
        let mut bytes = Vec::new();
        nameless.write(LAYOUT, &mut bytes);
        assert_eq!(
            parse(&bytes),
            Err(PacketError::BlockName { problem: "empty" })
        );
        assert!(BlockName::new(&[b'x'; 256]).is_err());
        assert!(BlockName::new(b"a\0b").is_err());
    }

    #[test]
    fn zero_pages_can_become_normal_ones() {
        let mut header = sample();
        header.zero_pages_become_normal();
        assert_eq!(header.normal_offsets(), [0x1000, 0x5000, 0x7000]);
        assert_eq!(header.zero_offsets(), [0u64; 0]);
    }

    #[test]
    fn normal_pages_can_become_zero_ones() {
        let mut header = RamHeader::new(LAYOUT);
        let pages: Vec<u64> = (0..100).map(|page| page << 12).collect();
        header.set_pages(&pages, &[200 << 12], LAYOUT).unwrap();
        let mut asked = Vec::new();
        header.normal_pages_become_zero(|index| {
            asked.push(index);
            index % 3 != 1
        });
        assert!(asked.into_iter().eq(0..100));
        let normal = pages.iter().skip(1).step_by(3);
        assert!(header.normal_offsets().iter().eq(normal));
        let mut all = [header.normal_offsets(), header.zero_offsets()].concat();
        all.sort_unstable();
        assert!(all.iter().eq(pages.iter().chain(&[200 << 12])));
    }

    proptest! {
        #[test]
        fn built_header_parses_back(
            name in "[a-z0-9./-]{1,40}",
            normal in vec(0u64..1 << 40, 0..100),
            zero in vec(0u64..1 << 40, 0..28),
            packet_num: u64,
            sync: bool,
            method in proptest::sample::select(Method::ALL.to_vec()),
            len in 1usize..=1 << 20,
        ) {
            let aligned = |pages: &[u64]| pages.iter().map(|page| page << 12).collect::<Vec<_>>();
            let (normal, zero) = (aligned(&normal), aligned(&zero));
            let len = if method == Method::None { normal.len() * 4096 } else { len };
            let mut built = RamHeader::new(LAYOUT);
            built.block = BlockName::new(name.as_bytes()).unwrap();
            built.packet_num = packet_num;
            built.sync = sync;
            built.set_pages(&normal, &zero, LAYOUT).unwrap();
            built.set_payload_len(len, LAYOUT).unwrap();
            built.method = if built.is_empty() { Method::None } else { method };
            let mut bytes = Vec::new();
            built.write(LAYOUT, &mut bytes);
            prop_assert_eq!(bytes.len(), LAYOUT.ram_header_len());
            let parsed = parse(&bytes).unwrap();
            prop_assert_eq!(parsed.normal_offsets(), &normal[..]);
            prop_assert_eq!(parsed.zero_offsets(), &zero[..]);
            prop_assert_eq!(parsed.payload_len(), built.payload_len());
            prop_assert_eq!(
                (parsed.block, parsed.packet_num, parsed.sync, parsed.method),
                (built.block, packet_num, sync, built.method)
            );
        }

        #[test]
        fn hostile_headers_never_exceed_the_layout(mut rest in vec(any::<u8>(), 1332), small: bool) {
            if small {
                // Makes the counts plausible, so that the fields behind them are reached.
                for at in [at::NORMAL_PAGES, at::NEXT_PACKET_SIZE, at::ZERO_PAGES] {
                    rest[at..at + 3].fill(0);
                }
            }
            let prelude = Prelude { kind: PacketKind::Ram, sync: false, method: Method::Zstd };
            let mut header = RamHeader::new(LAYOUT);
            if header.parse(prelude, &rest, LAYOUT).is_ok() {
                prop_assert!(header.normal_offsets().len() + header.zero_offsets().len() <= 128);
                prop_assert!(header.payload_len() <= LAYOUT.max_payload());
            }
        }
    }
}
