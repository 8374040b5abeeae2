//! Names in certificates, and patterns to match them.
//!
//! The certificates have verified chains: a trusted authority has signed their bytes.

use std::collections::HashSet;

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

/// The DNS names of `certificate` and its common name, without repetition; empty if it cannot be parsed.
pub(super) fn of(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(parsed) = EndEntityCert::try_from(certificate) else {
        return Vec::new();
    };
    let mut names: Vec<String> = common_name(parsed.subject())
        .filter(|name| is_printable(name))
        .into_iter()
        .chain(parsed.valid_dns_names())
        .map(str::to_owned)
        .collect();
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    names
}

/// Whether all of `name` matches `pattern`: `*` stands for any characters, `?` for one; case does not matter, as in host names.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.to_lowercase().chars().collect();
    let name: Vec<char> = name.to_lowercase().chars().collect();
    let (mut at, mut in_pattern) = (0, 0);
    // Where to continue if the last star has to match one more character.
    let mut retry = None;
    while at < name.len() {
        match pattern.get(in_pattern) {
            Some('*') => {
                in_pattern += 1;
                retry = Some((at, in_pattern));
            }
            Some(letter) if *letter == '?' || *letter == name[at] => {
                at += 1;
                in_pattern += 1;
            }
            _ => {
                let Some((from, behind_star)) = retry else {
                    return false;
                };
                at = from + 1;
                in_pattern = behind_star;
                retry = Some((at, behind_star));
            }
        }
    }
    pattern[in_pattern..].iter().all(|letter| *letter == '*')
}

/// Names are written to logs and terminals.
fn is_printable(name: &str) -> bool {
    !name.is_empty() && !name.chars().any(char::is_control)
}

/// The last common name in a subject: a sequence of sets of pairs of an object identifier and a string.
pub(super) fn common_name(mut subject: &[u8]) -> Option<&str> {
    let mut found = None;
    while let Some((SET, mut set, rest)) = element(subject) {
        subject = rest;
        while let Some((SEQUENCE, pair, rest)) = element(set) {
            set = rest;
            let Some((OBJECT_IDENTIFIER, COMMON_NAME, value)) = element(pair) else {
                continue;
            };
            if let Some((UTF8_STRING | PRINTABLE_STRING | IA5_STRING, name, [])) = element(value) {
                found = std::str::from_utf8(name).ok();
            }
        }
    }
    found
}

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;
/// 2.5.4.3
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];

/// Splits the first DER element off: tag, content, rest. Lengths of more than two bytes are not supported: names are short.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (len, rest) = match der {
        [_, len @ 0..=0x7f, rest @ ..] => (usize::from(*len), rest),
        [_, 0x81, len @ 0x80..=0xff, rest @ ..] => (usize::from(*len), rest),
        [_, 0x82, high @ 1..=0xff, low, rest @ ..] => {
            (usize::from(u16::from_be_bytes([*high, *low])), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    Some((der[0], content, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, name, expected) in [
            ("a", "a", true),
            ("a", "A", true),
            ("a", "ab", false),
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("*.example.org", "h1.example.org", true),
            ("*.example.org", "h1.example.org.evil", false),
            ("h?.example.org", "h1.example.org", true),
            ("h?.example.org", "h12.example.org", false),
            ("a*b*c", "aXbXbXc", true),
            ("a*b*c", "aXbXbX", false),
            ("**a", "ba", true),
            ("?", "", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn a_common_name_is_found_among_others_and_never_outside_of_its_place() {
        let pair = |oid: &[u8], tag: u8, value: &[u8]| {
            let wrap = |tag: u8, content: &[u8]| {
                [&[tag, u8::try_from(content.len()).unwrap()], content].concat()
            };
            let content = [wrap(OBJECT_IDENTIFIER, oid), wrap(tag, value)].concat();
            wrap(SET, &wrap(SEQUENCE, &content))
        };
        let organisation = pair(&[0x55, 0x04, 0x0a], UTF8_STRING, b"host9");
        let name = pair(COMMON_NAME, UTF8_STRING, b"host1");
        assert_eq!(common_name(&organisation), None);
        let both = [organisation, name].concat();
        assert_eq!(common_name(&both), Some("host1"));
        for len in 0..both.len() {
            assert_eq!(common_name(&both[..len]), None, "{len}");
        }
        assert_eq!(common_name(&pair(COMMON_NAME, 0x1e, b"\0h")), None);
    }
}
