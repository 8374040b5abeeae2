//! Reads attributes from sysfs without trusting them: another kernel or a container may have written them, and they may
//! disappear at any moment.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags};

use super::Problem;
use crate::Operations;

/// The attributes of one directory.
pub(super) struct Attributes {
    pub(super) path: PathBuf,
}

impl Attributes {
    pub(super) fn of(path: PathBuf) -> Self {
        Self { path }
    }

    /// Reads a required attribute.
    pub(super) fn need<T>(
        &self,
        name: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<T, Problem> {
        let bytes = read(&self.path.join(name)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Problem::Missing { attribute: name },
            kind => Problem::Unreadable {
                attribute: name,
                kind,
            },
        })?;
        let text = String::from_utf8_lossy(&bytes);
        parse(text.trim()).ok_or_else(|| Problem::Garbled {
            attribute: name,
            value: text.chars().take(MOST_QUOTED).collect(),
        })
    }

    /// Reads an optional attribute: `None` if it is missing or malformed.
    pub(super) fn may<T>(
        &self,
        name: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        self.need(name, parse).ok()
    }
}

/// Longest value that sysfs returns.
const MOST_BYTES: u64 = 4096;
/// Most characters of a malformed value in a message.
const MOST_QUOTED: usize = 40;

fn read(path: &Path) -> io::Result<Vec<u8>> {
    // A pipe in the place of an attribute must not block the scan.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Decimal, or hexadecimal with `0x`.
pub(super) fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The same, with 32 bits.
pub(super) fn small(text: &str) -> Option<u32> {
    number(text)?.try_into().ok()
}

/// A NUMA node; -1 is none.
pub(super) fn node_number(text: &str) -> Option<Option<u32>> {
    if text == "-1" {
        return Some(None);
    }
    small(text).map(Some)
}

/// 0 or 1.
pub(super) fn flag(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// Any text, never malformed; `Some(None)` if it is empty or `(null)`, which sysfs prints where there is none.
pub(super) fn text(text: &str) -> Option<Option<String>> {
    let named = !text.is_empty() && text != "(null)";
    Some(named.then(|| text.to_owned()))
}

/// A word such as `enabled`.
pub(super) fn word(text: &str) -> Option<String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    (!text.is_empty() && text.bytes().all(is_plain)).then(|| text.to_owned())
}

/// A 256-bit map of opcodes.
///
/// Two forms: 32-bit words with commas between, the most significant first (the kernel's `%*pb`); and, of kernels before
/// 6.0, 64-bit words with spaces between, the least significant first.
pub(super) fn operations(text: &str) -> Option<Operations> {
    let mut map = [0_u64; 4];
    if text.contains(',') {
        for (index, word) in text.split(',').rev().enumerate() {
            let word = word_of(word.trim(), 8)?;
            match map.get_mut(index / 2) {
                Some(place) => *place |= word << (32 * (index % 2)),
                None if word == 0 => {}
                None => return None,
            }
        }
    } else {
        for (index, word) in text.split_whitespace().enumerate() {
            *map.get_mut(index)? = word_of(word, 16)?;
        }
    }
    (!text.trim().is_empty()).then_some(Operations(map))
}

/// At most `digits` hexadecimal digits, with or without `0x`.
fn word_of(text: &str, digits: usize) -> Option<u64> {
    let text = text.strip_prefix("0x").unwrap_or(text);
    let plain = text.bytes().all(|byte| byte.is_ascii_hexdigit()) && text.len() <= digits;
    plain.then(|| u64::from_str_radix(text, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn maps_of_opcodes_in_all_forms() {
        let low = Operations([0x0000_0001_003f_03ff, 0x0d, 0, 1 << 63]);
        for text in [
            "80000000,00000000,00000000,00000000,00000000,0000000d,00000001,003f03ff",
            "80000000, 0,0,0 ,0,d,1,3f03ff",
            "0,80000000,00000000,00000000,00000000,00000000,0000000d,00000001,003f03ff",
            "0x1003f03ff 0xd 0x0 0x8000000000000000",
        ] {
            assert_eq!(operations(text), Some(low), "{text}");
        }
        assert_eq!(operations("bf067f"), Some(Operations([0xbf_067f, 0, 0, 0])));
    }

    #[test]
    fn a_malformed_opcode_map_is_refused() {
        let long = "1".repeat(65);
        for text in [
            "",
            ",",
            "x",
            "0x",
            "1,g",
            "1,-1",
            "1,+1",
            "100000000,0",
            "1,0,0,0,0,0,0,0,0",
            "1 2 3 4 5",
            "1 x",
            &long,
        ] {
            assert_eq!(operations(text), None, "{text}");
        }
    }

    #[test]
    fn numbers_fit_or_are_refused() {
        assert_eq!(number("2147483648"), Some(1 << 31));
        assert_eq!(number("0x40915f0107"), Some(0x40_915f_0107));
        for text in [
            "",
            "-1",
            "0x",
            "1 2",
            "18446744073709551616",
            "0x10000000000000000",
            "1e3",
        ] {
            assert_eq!(number(text), None, "{text}");
        }
        assert_eq!(small("4294967296"), None);
        assert_eq!(node_number("-1"), Some(None));
        assert_eq!(node_number("-2"), None);
        assert_eq!(flag("2"), None);
    }

    proptest! {
        #[test]
        fn the_kernels_form_gives_the_map_back(map: [u64; 4]) {
            let words: Vec<String> = map
                .iter()
                .rev()
                .flat_map(|word| [word >> 32, word & 0xffff_ffff])
                .map(|word| format!("{word:08x}"))
                .collect();
            prop_assert_eq!(operations(&words.join(",")), Some(Operations(map)));
            let old: Vec<String> = map.iter().map(|word| format!("{word:#x}")).collect();
            prop_assert_eq!(operations(&old.join(" ")), Some(Operations(map)));
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = (operations(&text), number(&text), node_number(&text));
        }
    }
}
