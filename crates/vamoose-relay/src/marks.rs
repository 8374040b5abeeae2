//! Finds the marks in a main stream: the points at which a destination waits for a SYNC from every channel.
//!
//! ```text
//! section   type u8 (1 start, 2 part, 3 end), id u32; a start goes on: name, instance u32, version u32
//! of ram    records of u64: address and flags; in a start a list of RAM blocks; then FLUSH, EOS
//! footer    7e, id u32                            command   08, command u16, length u16, data
//! ```
//!
//! The mark is FLUSH. For sources that send no FLUSH in the first section (older QEMUs, and newer ones with older machine
//! types) the mark is EOS. **The n-th mark belongs to the n-th SYNC of every channel**, so the times at which they come do not
//! matter.
//!
//! Unsupported content (other iterating sections, postcopy) ends the search: the rest of the stream has no marks and is forwarded
//! as opaque bytes.

use multifd::Layout;

/// Parses a main stream that arrives in pieces of any size.
pub(crate) struct Marks {
    /// The item being read. `None` if there are no more marks.
    item: Option<Item>,
    /// Bytes to skip before the item.
    skip: u64,
    /// The bytes of the item so far, as a number, and how many there are.
    value: u128,
    got: usize,
    page_size: u64,
    /// The id of the section `ram`.
    id: u64,
    section: Section,
    /// Total size of the RAM blocks that the list has yet to name.
    unlisted: u64,
    /// The source sends FLUSH, so EOS is not a mark.
    flushes: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Item {
    /// The start of the section `ram`, which may be anywhere.
    Start,
    /// Address and flags of a record.
    Record,
    /// Length of the name in a list of RAM blocks.
    BlockName,
    /// Length of the RAM block.
    BlockLength,
    /// Length of the name of a zero page's RAM block.
    ZeroName,
    /// Length of the name of a page's RAM block.
    PageName,
    /// The type of a section.
    SectionType,
    /// The id of a section.
    SectionId,
    /// The id in a footer.
    FooterId,
    /// A command and its length.
    Command,
}

/// The kind of a section `ram`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    Start,
    Part,
    End,
}

impl Marks {
    /// Starts at a main stream's first bytes, or shortly after them.
    pub(crate) fn new(layout: Layout) -> Self {
        Self {
            item: Some(Item::Start),
            skip: 0,
            value: 0,
            got: 0,
            page_size: layout.page_size() as u64,
            id: 0,
            section: Section::Start,
            unlisted: 0,
            flushes: false,
        }
    }

    /// Parses `bytes`, the next of the stream, up to the end of the next mark, and returns the index after that mark. `None` if
    /// they contain no mark: then all of them have been parsed.
    pub(crate) fn next(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while let Some(item) = self.item
            && at < bytes.len()
        {
            if self.skip > 0 {
                let there = bytes.len() - at;
                let skipped = usize::try_from(self.skip).map_or(there, |skip| skip.min(there));
                at += skipped;
                self.skip -= skipped as u64;
                continue;
            }
            self.value = self.value << 8 | u128::from(bytes[at]);
            self.got += 1;
            at += 1;
            let is_complete = match item {
                Item::Start => self.value & START_MASK == START,
                _ => self.got == item.len(),
            };
            if is_complete {
                let value = std::mem::take(&mut self.value);
                self.got = 0;
                // The id precedes the start. All other items have 8 bytes at most.
                let value = if item == Item::Start {
                    value >> 96
                } else {
                    value
                };
                let value = u64::try_from(value).unwrap_or(0);
                let is_mark = self.is_mark(item, value);
                self.item = self.after(item, value);
                if is_mark {
                    return Some(at);
                }
            }
        }
        None
    }

    /// Whether the last section may have begun: behind it the guest is complete.
    pub(crate) fn may_be_last(&self) -> bool {
        self.item.is_none() || self.section == Section::End
    }

    /// Ends the search for marks.
    pub(crate) fn stop(&mut self) {
        self.item = None;
    }

    fn is_mark(&mut self, item: Item, value: u64) -> bool {
        match (item, value) {
            (Item::Record, FLUSH) => {
                self.flushes |= self.section == Section::Start;
                true
            }
            (Item::Record, EOS) => !self.flushes,
            _ => false,
        }
    }

    /// The item after this one.
    fn after(&mut self, item: Item, value: u64) -> Option<Item> {
        match item {
            Item::Start => {
                self.id = value;
                Some(Item::Record)
            }
            Item::Record => self.after_record(value),
            Item::BlockName => self.behind(value, Item::BlockLength),
            Item::BlockLength => {
                self.unlisted = self.unlisted.checked_sub(value)?;
                Some(match self.unlisted {
                    0 => Item::Record,
                    _ => Item::BlockName,
                })
            }
            // A name, and the byte that fills the page.
            Item::ZeroName => self.behind(value + 1, Item::Record),
            Item::PageName => self.behind(value + self.page_size, Item::Record),
            Item::SectionType => self.after_section_type(value),
            Item::SectionId => (value == self.id).then_some(Item::Record),
            Item::FooterId => (value == self.id).then_some(Item::SectionType),
            Item::Command if POSTCOPY.contains(&(value >> 16)) => None,
            Item::Command => self.behind(value & 0xffff, Item::SectionType),
        }
    }

    fn after_record(&mut self, value: u64) -> Option<Item> {
        let flags = value & (self.page_size - 1);
        match flags {
            MEM_SIZE if self.section == Section::Start => {
                self.unlisted = value - flags;
                Some(Item::BlockName)
            }
            ZERO => Some(Item::ZeroName),
            ZERO_IN_SAME_BLOCK => self.behind(1, Item::Record),
            PAGE => Some(Item::PageName),
            PAGE_IN_SAME_BLOCK => self.behind(self.page_size, Item::Record),
            FLUSH => Some(Item::Record),
            // Only device state follows the last section.
            EOS => (self.section != Section::End).then_some(Item::SectionType),
            _ => None,
        }
    }

    fn after_section_type(&mut self, value: u64) -> Option<Item> {
        self.section = match value {
            FOOTER => return Some(Item::FooterId),
            COMMAND => return Some(Item::Command),
            PART => Section::Part,
            END => Section::End,
            _ => return None,
        };
        Some(Item::SectionId)
    }

    /// `item`, which follows after `skip` bytes.
    fn behind(&mut self, skip: u64, item: Item) -> Option<Item> {
        self.skip = skip;
        Some(item)
    }
}

impl Item {
    /// Number of bytes.
    fn len(self) -> usize {
        match self {
            Self::BlockName | Self::ZeroName | Self::PageName | Self::SectionType => 1,
            Self::SectionId | Self::FooterId | Self::Command => 4,
            Self::Record | Self::BlockLength => 8,
            Self::Start => 16,
        }
    }
}

/// Name, instance 0 and version 4 of the section `ram`. The section's id precedes them.
const START: u128 = 0x0372_616d_0000_0000_0000_0004;
const START_MASK: u128 = (1 << 96) - 1;

const PART: u64 = 0x02;
const END: u64 = 0x03;
const COMMAND: u64 = 0x08;
const FOOTER: u64 = 0x7e;

/// Commands of postcopy, during which the guest's pages are sent on the main stream.
const POSTCOPY: std::ops::RangeInclusive<u64> = 4..=10;

const ZERO: u64 = 0x02;
const MEM_SIZE: u64 = 0x04;
const PAGE: u64 = 0x08;
const EOS: u64 = 0x10;
const SAME_BLOCK: u64 = 0x20;
const ZERO_IN_SAME_BLOCK: u64 = ZERO | SAME_BLOCK;
const PAGE_IN_SAME_BLOCK: u64 = PAGE | SAME_BLOCK;
const FLUSH: u64 = 0x200;

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use multifd::{INITIAL_LEN, PRELUDE_LEN, Prelude, RamHeader};
    use proptest::prelude::*;

    use super::*;

    const FOLDERS: [&str; 8] = [
        "qemu-10.0.2-none",
        "qemu-10.0.2-zlib",
        "qemu-10.0.2-zstd",
        "qemu-10.0.2-qpl",
        "qemu-10.0.2-qatzip",
        "qemu-7.2.22-none",
        "qemu-7.2.22-zlib",
        "qemu-7.2.22-zstd",
    ];

    /// The ends of all marks in a stream that comes in `pieces`.
    fn marks<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<usize> {
        let mut marks = Marks::new(Layout::X86);
        let (mut found, mut before) = (Vec::new(), 0);
        for piece in pieces {
            let mut at = 0;
            while let Some(end) = marks.next(&piece[at..]) {
                at += end;
                found.push(before + at);
            }
            before += piece.len();
        }
        found
    }

    fn recorded(folder: &str, file: &str) -> Vec<u8> {
        let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/vectors");
        let packed = fs::read(vectors.join(folder).join(file)).unwrap();
        let mut bytes = Vec::with_capacity(16 << 20);
        zstd_safe::decompress(&mut bytes, &packed).unwrap();
        bytes
    }

    fn syncs(channel: &[u8]) -> usize {
        let mut rest = &channel[INITIAL_LEN..];
        let mut header = RamHeader::new(Layout::X86);
        let mut syncs = 0;
        while let Some((prelude, behind)) = rest.split_first_chunk::<PRELUDE_LEN>() {
            let prelude = Prelude::parse(prelude).unwrap();
            let length = Layout::X86.ram_header_len() - PRELUDE_LEN;
            let (fixed, behind) = behind.split_at(length);
            header.parse(prelude, fixed, Layout::X86).unwrap();
            syncs += usize::from(header.sync);
            rest = &behind[header.payload_len()..];
        }
        syncs
    }

    #[test]
    fn recorded_migration_has_a_mark_for_each_sync() {
        for folder in FOLDERS {
            let main = recorded(folder, "main.bin.zst");
            for channel in ["channel0.bin.zst", "channel1.bin.zst"] {
                let syncs = syncs(&recorded(folder, channel));
                assert_eq!(marks([&main[..]]).len(), syncs, "{folder} {channel}");
            }
        }
    }

    #[test]
    fn marks_do_not_depend_on_pieces() {
        for folder in ["qemu-10.0.2-none", "qemu-7.2.22-none"] {
            let main = recorded(folder, "main.bin.zst");
            let whole = marks([&main[..]]);
            for size in 1..64 {
                assert_eq!(marks(main.chunks(size)), whole, "{folder}, {size}");
            }
            // The relay has read the first four bytes before.
            let behind: Vec<_> = whole.iter().map(|end| end - 4).collect();
            assert_eq!(marks([&main[4..]]), behind);
        }
    }

    #[test]
    fn unknown_content_ends_the_marks() {
        let main = recorded("qemu-7.2.22-none", "main.bin.zst");
        let second = marks([&main[..]])[1];
        for (at, other) in [
            // Another iterating section in place of the footer, and an unknown flag.
            (second, PART),
            (second, 0x01),
            (second - 1, 0x40),
        ] {
            let mut other_stream = main.clone();
            other_stream[at] = u8::try_from(other).unwrap();
            let found = marks([&other_stream[..]]).len();
            assert!((1..=2).contains(&found), "{found} with {other:#x} at {at}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_to_their_end(bytes: Vec<u8>, id: u32) {
            let start = [&id.to_be_bytes()[..], &START.to_be_bytes()[4..]].concat();
            for bytes in [bytes.clone(), [start, bytes].concat()] {
                prop_assert!(marks([&bytes[..]]).iter().all(|end| *end <= bytes.len()));
            }
        }
    }
}
