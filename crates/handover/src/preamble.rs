//! The first bytes of a connection to a destination: its purpose and its attempt.

use crate::AttemptId;

/// Bytes of a preamble.
pub const PREAMBLE_LEN: usize = 24;

/// How every preamble begins.
pub const PREAMBLE_MAGIC: [u8; 7] = *b"VAMOOSE";

/// The first bytes of a connection: [`PREAMBLE_MAGIC`], the kind, the attempt's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// The connection's purpose.
    pub kind: ConnectionKind,
    /// The attempt that it belongs to.
    pub attempt: AttemptId,
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionKind {
    /// The conversation of this crate, in lines of JSON.
    Control,
    /// Memory, in the format of the engine.
    Data,
    /// A disk, in the format of the engine.
    Disk,
    /// Bytes to be discarded: the source measures the link.
    Measure,
}

impl Preamble {
    /// The bytes on the wire.
    pub fn to_bytes(self) -> [u8; PREAMBLE_LEN] {
        let mut bytes = [0; PREAMBLE_LEN];
        let (magic, rest) = bytes.split_at_mut(PREAMBLE_MAGIC.len());
        magic.copy_from_slice(&PREAMBLE_MAGIC);
        rest[0] = match self.kind {
            ConnectionKind::Control => b'C',
            ConnectionKind::Data => b'D',
            ConnectionKind::Disk => b'S',
            ConnectionKind::Measure => b'M',
        };
        rest[1..].copy_from_slice(&self.attempt.0);
        bytes
    }

    /// `None` for bytes that are not a preamble.
    pub fn parse(bytes: &[u8; PREAMBLE_LEN]) -> Option<Self> {
        let (kind, id) = bytes.strip_prefix(&PREAMBLE_MAGIC)?.split_first()?;
        let kind = match kind {
            b'C' => ConnectionKind::Control,
            b'D' => ConnectionKind::Data,
            b'S' => ConnectionKind::Disk,
            b'M' => ConnectionKind::Measure,
            _ => return None,
        };
        let attempt = AttemptId(id.try_into().ok()?);
        Some(Self { kind, attempt })
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::select};

    use super::*;

    proptest! {
        #[test]
        fn a_preamble_parses_back(
            kind in select(&[ConnectionKind::Control, ConnectionKind::Data, ConnectionKind::Measure][..]),
            id: [u8; 16],
        ) {
            let preamble = Preamble { kind, attempt: AttemptId(id) };
            prop_assert_eq!(Preamble::parse(&preamble.to_bytes()), Some(preamble));
        }

        #[test]
        fn parsed_preamble_is_the_one_sent(bytes: [u8; PREAMBLE_LEN]) {
            if let Some(preamble) = Preamble::parse(&bytes) {
                prop_assert_eq!(preamble.to_bytes(), bytes);
            }
        }
    }

    #[test]
    fn other_bytes_are_no_preamble() {
        assert_eq!(Preamble::parse(b"QEVM...................."), None);
        assert_eq!(Preamble::parse(b"VAMOOSEX................"), None);
    }
}
