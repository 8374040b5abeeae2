//! Access to the record layer and the parsers, for fuzz targets, benches and tests only.

use std::io;

use aws_lc_rs::aead::Aad;

use super::{
    Cipher, FileFault, Opener, PublicKey, Sealer, keys, names,
    record::{self, DATA, RecordKey, TAG_LEN},
};
use crate::Socket;

/// Content of a full record.
pub const MAX_CONTENT: usize = record::MAX_CONTENT;

/// Seals with a fixed key.
pub struct Sealing(Sealer);

/// Opens what [`Sealing`] and [`Forging`] seal.
pub struct Opening(Opener);

/// Seals invalid records.
pub struct Forging(RecordKey);

impl Sealing {
    /// A new connection's; `None` never.
    pub fn new(cipher: Cipher) -> Option<Self> {
        Some(Self(Sealer::new(key(cipher)?)))
    }

    /// Sends `pieces`.
    ///
    /// # Errors
    /// The system's.
    pub fn send(&mut self, socket: &Socket, pieces: &[&[u8]]) -> io::Result<()> {
        self.0.send(socket, pieces, &mut |_| Ok(()))
    }
}

impl Opening {
    /// A new connection's; `None` never.
    pub fn new(cipher: Cipher) -> Option<Self> {
        Some(Self(Opener::new(key(cipher)?)))
    }

    /// Reads at least one byte, or none at the end.
    ///
    /// # Errors
    /// When a record is not in order, and the system's.
    pub fn read(&mut self, socket: &Socket, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(socket, out)
    }

    /// Whether bytes are there without a system call.
    pub fn buffered(&self) -> bool {
        self.0.buffered()
    }
}

impl Forging {
    /// A new connection's; `None` never.
    pub fn new(cipher: Cipher) -> Option<Self> {
        key(cipher).map(Self)
    }

    /// A record of any content, type and padding; `None` if it is longer than a length can say.
    pub fn record(&mut self, inner: &[u8]) -> Option<Vec<u8>> {
        seal_any(&mut self.0, inner)
    }
}

/// The keys of a list, and the hosts that they are of.
///
/// # Errors
/// When a line is none.
pub fn parse_trusted(text: &[u8]) -> Result<Vec<(PublicKey, Vec<String>)>, FileFault> {
    let trusted = keys::parse_trusted(text)?.into_iter();
    Ok(trusted.map(|it| (it.key, it.hosts)).collect())
}

/// The common name in the subject of a certificate.
pub fn common_name(subject: &[u8]) -> Option<&str> {
    names::common_name(subject)
}

/// Whether `pattern` matches `name`.
pub fn matches(pattern: &str, name: &str) -> bool {
    names::matches(pattern, name)
}

fn key(cipher: Cipher) -> Option<RecordKey> {
    let key = [1; 32];
    let len = cipher.algorithm().key_len();
    RecordKey::of(cipher, &key[..len], [2; 12], 0).ok()
}

/// Seals a record whose content, type and padding are `inner`.
pub(super) fn seal_any(key: &mut RecordKey, inner: &[u8]) -> Option<Vec<u8>> {
    let body = u16::try_from(inner.len() + TAG_LEN).ok()?;
    let [high, low] = body.to_be_bytes();
    let header = [DATA, 3, 3, high, low];
    let mut sealed = inner.to_vec();
    let aad = Aad::from(header);
    let tag = key
        .key()
        .seal_in_place_separate_tag(key.nonce(), aad, &mut sealed)
        .ok()?;
    key.advance();
    Some([&header[..], &sealed, tag.as_ref()].concat())
}
