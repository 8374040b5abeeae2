//! What kind of memory a RAM block is, as the kernel sees it.
//!
//! Whether a page that the page tables do not know holds zeros depends on it, and the VMM that hands over an address and
//! maybe a file does not say: memory may be shared without a file, and a file may be mapped privately.

use std::{fs, io};

use crate::RamBlock;

/// Where pages come from that are not in the page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// Nowhere: a page without an entry holds zeros and belongs to this process alone.
    Anonymous,
    /// From a file, and what is written goes there.
    SharedFile,
    /// From somewhere else: a private mapping of a file, shared memory without a file, several of these.
    Other,
}

/// The backing of all of `block`, [`Backing::Other`] if in doubt.
pub(crate) fn backing(block: &RamBlock) -> io::Result<Backing> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let address = block.address();
    Ok(match kind(&maps, address, address + block.len()) {
        Some(Kind::Anonymous) if block.file().is_none() => Backing::Anonymous,
        Some(Kind::Shared) if block.file().is_some() => Backing::SharedFile,
        _ => Backing::Other,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Anonymous,
    Shared,
}

/// What all mappings between `start` and `end` are, if they cover it and are the same.
fn kind(maps: &str, start: usize, end: usize) -> Option<Kind> {
    let mut covered = start;
    let mut found = None;
    // Lines are in the order of their addresses.
    for line in maps.lines() {
        let mapping = Mapping::parse(line)?;
        if mapping.end <= start {
            continue;
        }
        if mapping.start > covered || mapping.start >= end {
            break;
        }
        if *found.get_or_insert(mapping.kind) != mapping.kind {
            return None;
        }
        covered = mapping.end;
    }
    found.flatten().filter(|_| covered >= end)
}

struct Mapping {
    start: usize,
    end: usize,
    kind: Option<Kind>,
}

impl Mapping {
    /// `7f0c00000000-7f0c00021000 rw-p 00000000 00:00 0    [name]`
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (permissions, inode) = (fields.next()?, fields.nth(2)?);
        let name = fields.next().unwrap_or_default();
        let kind = match permissions.as_bytes().last()? {
            b's' => Some(Kind::Shared),
            // Private memory of huge pages has a file inside of the kernel.
            b'p' if inode == "0" || name == "/anon_hugepage" => Some(Kind::Anonymous),
            _ => None,
        };
        Some(Self {
            start: usize::from_str_radix(start, 16).ok()?,
            end: usize::from_str_radix(end, 16).ok()?,
            kind,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0
3000-4000 r--p 00000000 00:00 0 [anon: guest]
4000-5000 rw-s 00000000 00:01 4711 /memfd:ram (deleted)
6000-8000 rw-s 00002000 00:01 4711 /memfd:ram (deleted)
8000-9000 rw-p 00000000 fd:00 17 /var/lib/image with spaces
9000-a000 rw-p 00000000 00:0f 99 /anon_hugepage (deleted)
";

    #[test]
    fn a_block_is_what_all_of_its_mappings_are() {
        for (start, end, expected) in [
            (0x1000, 0x3000, Some(Kind::Anonymous)),
            (0x2000, 0x4000, Some(Kind::Anonymous)),
            (0x2000, 0x5000, None),
            (0x4000, 0x5000, Some(Kind::Shared)),
            (0x4000, 0x6000, None),
            (0x7000, 0x8000, Some(Kind::Shared)),
            (0x8000, 0x9000, None),
            (0x9000, 0xa000, Some(Kind::Anonymous)),
            (0x9000, 0xb000, None),
            (0x0000, 0x2000, None),
            (0xc000, 0xd000, None),
        ] {
            assert_eq!(kind(MAPS, start, end), expected, "{start:#x} to {end:#x}");
        }
    }
}
