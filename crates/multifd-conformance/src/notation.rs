//! Bytes as text that can be read and compared: groups of hexadecimal digits, `*N` behind a repeated one.
//!
//! ```text
//! 11223344 00000001 00*56
//! ```

use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail};

/// Bytes in a group that is not repeated.
const GROUP: usize = 4;

/// Longest repeated group.
const LONGEST: usize = 32;

/// Fewest repetitions that are written as such.
const FEWEST: usize = 4;

/// Fewest bytes for which a repetition is written.
const SHORTEST: usize = 12;

/// Bytes as text.
pub(crate) fn write(bytes: &[u8]) -> String {
    let (mut text, mut at, mut loose) = (String::new(), 0, 0);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let covered = |len: &usize| repeats(rest, *len) * len;
        let best = (1..=LONGEST).rev().max_by_key(covered).unwrap_or(1);
        let (len, count) = match repeats(rest, best) {
            count if count >= FEWEST && count * best >= SHORTEST => (best, count),
            _ => (1, 1),
        };
        if !text.is_empty() && (count > 1 || loose % GROUP == 0) {
            text.push(' ');
        }
        rest[..len].iter().for_each(|byte| {
            let _ = write!(text, "{byte:02x}");
        });
        if count > 1 {
            let _ = write!(text, "*{count}");
        }
        loose = if count > 1 { 0 } else { loose + 1 };
        at += len * count;
    }
    text
}

/// How often `bytes` begins with its first `len` bytes.
fn repeats(bytes: &[u8], len: usize) -> usize {
    let Some(group) = bytes.get(..len) else {
        return 0;
    };
    bytes
        .chunks_exact(len)
        .take_while(|it| it == &group)
        .count()
}

/// The bytes that a text stands for.
pub(crate) fn read(text: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for word in text.split_whitespace() {
        let (digits, count) = word.split_once('*').unwrap_or((word, "1"));
        if digits.len() % 2 != 0 || !digits.is_ascii() {
            bail!("'{word}' is not a number of whole bytes");
        }
        let group: Result<Vec<u8>, _> = (0..digits.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&digits[at..at + 2], 16))
            .collect();
        let group = group.with_context(|| format!("'{word}' is not hexadecimal"))?;
        let count = count.parse().with_context(|| format!("'{word}'"))?;
        bytes.extend(group.repeat(count));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back() {
        let noise: Vec<u8> = (0..999u32)
            .map(|at| ((at * at) >> 3).to_le_bytes()[0])
            .collect();
        for bytes in [
            vec![],
            vec![1],
            vec![0; 4096],
            b"one, two, one, two, one, two".to_vec(),
            [&[1, 2, 3][..], &[0; 100], &[7; 5]].concat(),
            noise,
        ] {
            assert_eq!(read(&write(&bytes)).unwrap(), bytes);
        }
        assert_eq!(write(&[0x11, 0x22, 0x33, 0x44, 5]), "11223344 05");
        assert_eq!(write(&[0; 56]), "00*56");
        assert_eq!(write(&[1, 2].repeat(2048)), "0102*2048");
    }

    #[test]
    fn other_text_is_refused() {
        for text in ["1", "xy", "00*", "00*-1", "0é0"] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
