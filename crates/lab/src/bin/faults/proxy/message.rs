//! Cuts what a connection says into messages, as far as the proxy has to know them.

use serde_json::Value;

/// What kind of connection this is, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// `vamoose migrate`'s: a preamble of 24 bytes, lines of JSON.
    Lines,
    /// That of the crate `live` before it spoke the same: 24 bytes, then lengths and JSON.
    Lengths,
    /// Anything else: pages.
    Bytes,
}

impl Dialect {
    /// `None` as long as there are too few bytes to tell.
    pub(super) fn of(first: &[u8]) -> Option<Self> {
        let may_be = |magic: &[u8]| {
            let known = first.len().min(magic.len());
            magic[..known] == first[..known]
        };
        if !may_be(MAGIC) && !may_be(OLD_MAGIC) {
            return Some(Self::Bytes);
        }
        (first.len() >= PREAMBLE).then(|| match first[MAGIC.len()] {
            _ if may_be(OLD_MAGIC) => Self::Lengths,
            b'C' => Self::Lines,
            _ => Self::Bytes,
        })
    }

    pub(super) fn is_control(self) -> bool {
        self != Self::Bytes
    }
}

const MAGIC: &[u8] = b"VAMOOSE";
const OLD_MAGIC: &[u8] = b"VLIV";
const PREAMBLE: usize = 24;

/// A piece of what goes one way over a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) bytes: Vec<u8>,
    /// What the message is, such as `request:commit`, if it is one.
    pub(super) word: Option<String>,
}

/// Collects bytes until there is a message.
pub(super) struct Cutter {
    dialect: Dialect,
    /// Who speaks: `request` or `answer`.
    side: &'static str,
    collected: Vec<u8>,
    /// Bytes that are no message: the preamble, and what follows some messages.
    raw: usize,
}

impl Cutter {
    /// For what the source says.
    pub(super) fn of_source(dialect: Dialect) -> Self {
        Self::new(dialect, "request", PREAMBLE)
    }

    /// For what the destination says.
    pub(super) fn of_destination(dialect: Dialect) -> Self {
        Self::new(dialect, "answer", 0)
    }

    fn new(dialect: Dialect, side: &'static str, raw: usize) -> Self {
        Self {
            dialect,
            side,
            collected: Vec::new(),
            raw,
        }
    }

    pub(super) fn cut(&mut self, bytes: &[u8]) -> Vec<Piece> {
        let plain = |bytes| Piece { bytes, word: None };
        if !self.dialect.is_control() {
            return vec![plain(bytes.to_vec())];
        }
        self.collected.extend_from_slice(bytes);
        let mut pieces = Vec::new();
        loop {
            if self.raw > 0 && !self.collected.is_empty() {
                let count = self.raw.min(self.collected.len());
                self.raw -= count;
                pieces.push(plain(self.collected.drain(..count).collect()));
            }
            let Some((start, end)) = self.next_message() else {
                return pieces;
            };
            let bytes: Vec<u8> = self.collected.drain(..end).collect();
            let message = serde_json::from_slice::<Value>(&bytes[start..]).unwrap_or_default();
            let word = self.word(&message);
            if word.as_deref() == Some("request:state") {
                let len = message["len"].as_u64().unwrap_or(0);
                self.raw = usize::try_from(len).unwrap_or(0);
            }
            pieces.push(Piece { bytes, word });
        }
    }

    /// Where the JSON of the next message starts and ends.
    fn next_message(&self) -> Option<(usize, usize)> {
        if self.dialect == Dialect::Lines {
            let end = self.collected.iter().position(|byte| *byte == b'\n')?;
            return Some((0, end + 1));
        }
        let len = u32::from_be_bytes(*self.collected.first_chunk()?);
        let end = usize::try_from(len).ok()?.checked_add(4)?;
        (end <= self.collected.len()).then_some((4, end))
    }

    fn word(&self, message: &Value) -> Option<String> {
        let key = if self.dialect == Dialect::Lines {
            self.side
        } else {
            "say"
        };
        let word = message[key].as_str()?;
        Some(format!("{}:{word}", self.side))
    }

    /// The beginning of a message whose end will not come.
    pub(super) fn rest(self) -> Vec<u8> {
        self.collected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(pieces: &[Piece]) -> Vec<&str> {
        pieces
            .iter()
            .map(|piece| piece.word.as_deref().unwrap_or("-"))
            .collect()
    }

    #[test]
    fn dialects_are_told_by_the_first_bytes() {
        let mut preamble = b"VAMOOSEC0123456789abcdef".to_vec();
        assert_eq!(Dialect::of(&preamble[..7]), None);
        assert_eq!(Dialect::of(&preamble), Some(Dialect::Lines));
        preamble[7] = b'D';
        assert_eq!(Dialect::of(&preamble), Some(Dialect::Bytes));
        assert_eq!(Dialect::of(b"QEVM"), Some(Dialect::Bytes));
    }

    #[test]
    fn messages_are_cut_whatever_the_pieces() {
        let mut said = b"VAMOOSEC0123456789abcdef".to_vec();
        said.extend(
            b"{\"request\":\"prepare\",\"name\":\"vm\"}\n{\"request\":\"state\",\"len\":3}\n",
        );
        said.extend(b"\n\n\n{\"request\":\"commit\"}\n{\"req");
        for size in [1, 7, 1000] {
            let mut cutter = Cutter::of_source(Dialect::Lines);
            let pieces: Vec<_> = said
                .chunks(size)
                .flat_map(|part| cutter.cut(part))
                .collect();
            let mut found = words(&pieces);
            found.dedup();
            let expected = [
                "-",
                "request:prepare",
                "request:state",
                "-",
                "request:commit",
            ];
            assert_eq!(found, expected);
            let mut bytes: Vec<u8> = pieces
                .iter()
                .flat_map(|piece| piece.bytes.clone())
                .collect();
            bytes.extend(cutter.rest());
            assert_eq!(bytes, said);
        }
    }

    #[test]
    fn messages_with_lengths() {
        let mut said = b"VLIV\0\0\0\x010123456789abcdef".to_vec();
        for text in [
            &b"{\"say\":\"hello\"}"[..],
            b"{\"say\":\"state\",\"len\":2}",
        ] {
            said.extend([0, 0, 0, u8::try_from(text.len()).unwrap()]);
            said.extend(text);
        }
        said.extend([0, 0]);
        assert_eq!(Dialect::of(&said), Some(Dialect::Lengths));
        let mut cutter = Cutter::of_source(Dialect::Lengths);
        let pieces = cutter.cut(&said);
        assert_eq!(words(&pieces), ["-", "request:hello", "request:state", "-"]);
        assert_eq!(
            pieces
                .iter()
                .flat_map(|piece| piece.bytes.clone())
                .collect::<Vec<_>>(),
            said
        );
    }
}
