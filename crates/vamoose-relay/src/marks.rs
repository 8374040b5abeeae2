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
    state: State,
    page_size: u64,
    /// Of the section `ram`.
    id: u64,
    section: Section,
    /// Total size of the RAM blocks that the list has yet to name.
    unlisted: u64,
    /// The source sends FLUSH, so EOS is no mark.
    flushes: bool,
    /// A page with content has been seen.
    pages: bool,
}

enum State {
    /// Searching for the section's start; holds the last 16 bytes.
    Seek(u128),
    /// Collecting a number.
    Number {
        what: Number,
        missing: usize,
        value: u64,
    },
    /// Skipping bytes before a number.
    Skip { left: u64, then: Number },
    /// There are no more marks.
    Over,
}

#[derive(Clone, Copy)]
enum Number {
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

/// Which of the sections `ram` this is.
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
            state: State::Seek(0),
            page_size: layout.page_size() as u64,
            id: 0,
            section: Section::Start,
            unlisted: 0,
            flushes: false,
            pages: false,
        }
    }

    /// Parses `bytes`, the next of the stream, up to the end of the next mark, and returns the index after that mark. `None` if
    /// they contain no mark: then all of them have been parsed.
    pub(crate) fn next(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while at < bytes.len() {
            match &mut self.state {
                State::Over => return None,
                State::Skip { left, then } => {
                    let there = bytes.len() - at;
                    let skipped = usize::try_from(*left).map_or(there, |left| left.min(there));
                    at += skipped;
                    *left -= skipped as u64;
                    if *left == 0 {
                        self.state = then.collect();
                    }
                }
                State::Seek(seen) => {
                    *seen = *seen << 8 | u128::from(bytes[at]);
                    at += 1;
                    if *seen & START_MASK == START {
                        self.id = u64::try_from(*seen >> 96).unwrap_or(0);
                        self.state = Number::Record.collect();
                    }
                }
                State::Number {
                    what,
                    missing,
                    value,
                } => {
                    *value = *value << 8 | u64::from(bytes[at]);
                    *missing -= 1;
                    at += 1;
                    if *missing == 0 {
                        let (what, value) = (*what, *value);
                        let is_mark = self.is_mark(what, value);
                        self.state = self.after(what, value);
                        if is_mark {
                            return Some(at);
                        }
                    }
                }
            }
        }
        None
    }

    /// Ends the search for marks.
    pub(crate) fn stop(&mut self) {
        self.state = State::Over;
    }

    /// Whether pages with content may have been sent: some were seen, or the stream cannot be parsed any more.
    pub(crate) fn may_have_pages(&self) -> bool {
        self.pages || self.are_over()
    }

    /// Whether the search for marks has ended.
    pub(crate) fn are_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    fn is_mark(&mut self, what: Number, value: u64) -> bool {
        match (what, value) {
            (Number::Record, FLUSH) => {
                self.flushes |= self.section == Section::Start;
                true
            }
            (Number::Record, EOS) => !self.flushes,
            _ => false,
        }
    }

    fn after(&mut self, what: Number, value: u64) -> State {
        match what {
            Number::Record => self.after_record(value),
            Number::BlockName => Number::BlockLength.behind(value),
            Number::BlockLength => match self.unlisted.checked_sub(value) {
                Some(0) => Number::Record.collect(),
                Some(unlisted) => {
                    self.unlisted = unlisted;
                    Number::BlockName.collect()
                }
                None => State::Over,
            },
            // A name, and the byte that the page is full of.
            Number::ZeroName => Number::Record.behind(value + 1),
            Number::PageName => Number::Record.behind(value + self.page_size),
            Number::SectionType => self.after_section_type(value),
            Number::SectionId if value == self.id => Number::Record.collect(),
            Number::FooterId if value == self.id => Number::SectionType.collect(),
            Number::SectionId | Number::FooterId => State::Over,
            Number::Command if POSTCOPY.contains(&(value >> 16)) => State::Over,
            Number::Command => Number::SectionType.behind(value & 0xffff),
        }
    }

    fn after_record(&mut self, value: u64) -> State {
        let flags = value & (self.page_size - 1);
        match flags {
            MEM_SIZE if self.section == Section::Start => {
                self.unlisted = value - flags;
                Number::BlockName.collect()
            }
            ZERO => Number::ZeroName.collect(),
            ZERO_IN_SAME_BLOCK => Number::Record.behind(1),
            PAGE | PAGE_IN_SAME_BLOCK => {
                self.pages = true;
                match flags {
                    PAGE => Number::PageName.collect(),
                    _ => Number::Record.behind(self.page_size),
                }
            }
            FLUSH => Number::Record.collect(),
            // Only device state follows the last section.
            EOS if self.section == Section::End => State::Over,
            EOS => Number::SectionType.collect(),
            _ => State::Over,
        }
    }

    fn after_section_type(&mut self, value: u64) -> State {
        match value {
            FOOTER => Number::FooterId.collect(),
            COMMAND => Number::Command.collect(),
            PART | END => {
                self.section = if value == PART {
                    Section::Part
                } else {
                    Section::End
                };
                Number::SectionId.collect()
            }
            _ => State::Over,
        }
    }
}

impl Number {
    fn collect(self) -> State {
        State::Number {
            what: self,
            missing: match self {
                Self::BlockName | Self::ZeroName | Self::PageName | Self::SectionType => 1,
                Self::SectionId | Self::FooterId | Self::Command => 4,
                Self::Record | Self::BlockLength => 8,
            },
            value: 0,
        }
    }

    /// Collects the number after skipping `left` bytes.
    fn behind(self, left: u64) -> State {
        match left {
            0 => self.collect(),
            left => State::Skip { left, then: self },
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
    fn a_recorded_migration_has_a_mark_for_each_sync() {
        for folder in FOLDERS {
            let main = recorded(folder, "main.bin.zst");
            for channel in ["channel0.bin.zst", "channel1.bin.zst"] {
                let syncs = syncs(&recorded(folder, channel));
                assert_eq!(marks([&main[..]]).len(), syncs, "{folder} {channel}");
            }
        }
    }

    #[test]
    fn pages_on_the_main_stream_are_noticed() {
        let main = recorded("qemu-10.0.2-none", "main.bin.zst");
        let mut marks = Marks::new(Layout::X86);
        let start = marks.next(&main).unwrap();
        assert!(!marks.may_have_pages());
        // A record in place of what follows the footer: a part of the section, and a page.
        let footer = &main[start..start + 5];
        let part = [&[0x02][..], &footer[1..], &(0x1000 | PAGE).to_be_bytes()].concat();
        assert_eq!(marks.next(&[footer, &part].concat()), None);
        assert!(marks.may_have_pages());
    }

    #[test]
    fn marks_are_at_the_same_places_in_any_pieces() {
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
    fn a_stream_that_is_not_understood_has_no_more_marks() {
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
        fn any_bytes_are_followed_to_their_end(bytes: Vec<u8>, id: u32) {
            let start = [&id.to_be_bytes()[..], &START.to_be_bytes()[4..]].concat();
            for bytes in [bytes.clone(), [start, bytes].concat()] {
                prop_assert!(marks([&bytes[..]]).iter().all(|end| *end <= bytes.len()));
            }
        }
    }
}
