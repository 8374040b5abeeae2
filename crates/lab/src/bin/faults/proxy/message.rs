//! Cuts what a connection says into messages, as far as the proxy has to know them.

use serde_json::Value;

/// What kind of connection this is, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// A control connection: a preamble of 24 bytes, lines of JSON.
    Lines,
    /// Anything else: pages.
    Bytes,
}

impl Dialect {
    /// `None` as long as there are too few bytes to tell.
    pub(super) fn of(first: &[u8]) -> Option<Self> {
        let known = first.len().min(CONTROL.len());
        if first[..known] != CONTROL[..known] {
            return Some(Self::Bytes);
        }
        (first.len() >= PREAMBLE).then_some(Self::Lines)
    }

    pub(super) fn is_control(self) -> bool {
        self == Self::Lines
    }
}

/// The magic of Vamoose's connections, and the kind of this one.
const CONTROL: &[u8] = b"VAMOOSEC";
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
            let Some(end) = self.collected.iter().position(|byte| *byte == b'\n') else {
                return pieces;
            };
            let bytes: Vec<u8> = self.collected.drain(..=end).collect();
            let message = serde_json::from_slice::<Value>(&bytes).unwrap_or_default();
            let word = message[self.side].as_str();
            let word = word.map(|word| format!("{}:{word}", self.side));
            if word.as_deref() == Some("request:state") {
                let len = message["len"].as_u64().unwrap_or(0);
                self.raw = usize::try_from(len).unwrap_or(0);
            }
            pieces.push(Piece { bytes, word });
        }
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
}
