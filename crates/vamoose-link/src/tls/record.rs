//! TLS 1.3 records after the handshake (RFC 8446, 5): parts shared by both directions.
//!
//! ```text
//! 23 3 3 len  |  sealed: up to 16 KiB of content, its type, zeros as padding  |  tag
//! └ header, authenticated
//! ```

use aws_lc_rs::{
    aead::{
        AES_128_GCM, AES_256_GCM, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
    },
    error::Unspecified,
};
use rustls::ConnectionTrafficSecrets as Secrets;

use super::Cipher;

pub(super) const HEADER_LEN: usize = 5;
/// Limit of a record's content.
pub(super) const MAX_CONTENT: usize = 1 << 14;
/// Limit of a record's length after the header.
pub(super) const MAX_BODY: usize = MAX_CONTENT + 256;
pub(super) const TAG_LEN: usize = 16;

/// Content types.
pub(super) const ALERT: u8 = 21;
pub(super) const HANDSHAKE: u8 = 22;
pub(super) const DATA: u8 = 23;

pub(super) const CLOSE_NOTIFY: u8 = 0;

/// Whether bytes look like a record header of any TLS version.
pub(super) fn is_tls_header(header: &[u8; HEADER_LEN]) -> bool {
    matches!(header, [20..=23, 3, 0..=4, ..])
}

/// The header of a record with `content` bytes, without padding.
pub(super) fn header(content: usize) -> Option<[u8; HEADER_LEN]> {
    let body = u16::try_from(content + 1 + TAG_LEN).ok()?;
    let [high, low] = body.to_be_bytes();
    Some([DATA, 3, 3, high, low])
}

/// Key of one direction, with the number of the next record.
pub(super) struct RecordKey {
    key: LessSafeKey,
    iv: [u8; 12],
    sequence: u64,
}

impl RecordKey {
    pub(super) fn new((sequence, secrets): (u64, Secrets)) -> Result<Self, rustls::Error> {
        let (cipher, key, iv) = match &secrets {
            Secrets::Aes128Gcm { key, iv } => (Cipher::Aes128Gcm, key, iv),
            Secrets::Aes256Gcm { key, iv } => (Cipher::Aes256Gcm, key, iv),
            Secrets::Chacha20Poly1305 { key, iv } => (Cipher::Chacha20Poly1305, key, iv),
            _ => return Err(unusable()),
        };
        let iv = iv.as_ref().try_into().map_err(|_| unusable())?;
        Self::of(cipher, key.as_ref(), iv, sequence).map_err(|_| unusable())
    }

    pub(super) fn of(
        cipher: Cipher,
        key: &[u8],
        iv: [u8; 12],
        sequence: u64,
    ) -> Result<Self, Unspecified> {
        let key = UnboundKey::new(cipher.algorithm(), key)?;
        Ok(Self {
            key: LessSafeKey::new(key),
            iv,
            sequence,
        })
    }

    /// Number of records so far.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Counts a record that has been sealed or opened.
    pub(super) fn advance(&mut self) {
        // Both ends stop long before the maximum.
        self.sequence = self.sequence.saturating_add(1);
    }

    pub(super) fn key(&self) -> &LessSafeKey {
        &self.key
    }

    /// The nonce of the next record (RFC 8446, 5.3).
    pub(super) fn nonce(&self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        Nonce::assume_unique_for_key(nonce)
    }
}

impl Cipher {
    pub(super) fn algorithm(self) -> &'static Algorithm {
        match self {
            Self::Aes128Gcm => &AES_128_GCM,
            Self::Aes256Gcm => &AES_256_GCM,
            Self::Chacha20Poly1305 => &CHACHA20_POLY1305,
        }
    }
}

fn unusable() -> rustls::Error {
    rustls::Error::General("the record layer cannot use the secrets of the handshake".to_owned())
}
