//! TLS 1.3 between two Vamooses: authenticates the peer and protects the connection.
//!
//! ```text
//! Security ─> client_terms / server_terms    files are read, once a session
//!          ─> connect / accept               rustls: the handshake, in both directions authenticated
//!          ─> Sealer, Opener                 our own record layer, with the secrets of the handshake
//! ```
//!
//! rustls only does the handshake. Its buffers would cost as much as the cipher; `sealer` seals records straight from packets into
//! the output, and `opener` opens them straight into the reader's buffer.
//!
//! In TLS 1.3 the client's handshake ends before the server has seen the client's certificate. The server therefore sends one byte
//! of application data when it has accepted the client, and `connect` waits for this byte.

mod certificates;
mod error;
mod file_key;
mod handshake;
mod keys;
mod names;
mod opener;
mod record;
mod sealer;
mod terms;
#[cfg(any(test, feature = "fuzzing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod verifier;

use std::path::PathBuf;

pub use error::{End, FileFault, Objection, Refusal, TlsError};
pub use file_key::{FileCipher, FileKey};
pub use keys::{OneTimeKey, PublicKey, PublicKeyError};
pub(crate) use names::matches;
pub(crate) use {
    handshake::Secured,
    opener::Opener,
    sealer::Sealer,
    terms::{ClientTerms, ServerTerms},
};

/// How two Vamooses authenticate each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// No authentication, and no encryption.
    Insecure,
    /// By certificates of a common authority.
    Certificates(Certificates),
    /// By public keys that each end knows of the other.
    Keys(Keys),
    /// By keys generated for one use, whose public halves the ends have exchanged.
    OneTime {
        /// Key of this end.
        own: OneTimeKey,
        /// Public key of the other end.
        peer: PublicKey,
    },
}

impl From<Keys> for Security {
    fn from(keys: Keys) -> Self {
        Self::Keys(keys)
    }
}

impl From<Certificates> for Security {
    fn from(certificates: Certificates) -> Self {
        Self::Certificates(certificates)
    }
}

/// Certificates in a directory, with the file names that QEMU and libvirt use: `ca-cert.pem`, `ca-crl.pem` (optional), and
/// at the end that dials `client-cert.pem` and `client-key.pem`, at the other `server-cert.pem` and `server-key.pem`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificates {
    /// Directory of the files.
    pub directory: PathBuf,
    /// Patterns, one of which must match a name in the peer's certificate: its common name or a DNS name. `*` stands for any
    /// characters, `?` for one. `None`: any certificate of the authority is accepted.
    pub allow: Option<Vec<String>>,
    /// Name that the server's certificate must have, instead of the dialled host.
    pub server_name: Option<String>,
}

/// Raw public keys (RFC 7250) in a directory: `key`, an Ed25519 key (PKCS#8, PEM), which only its owner may read, and
/// `trusted`, a line `ed25519:BASE64 [hosts=PATTERN,PATTERN...] [comment]` for each peer.
///
/// A dialled host must have a key whose line names it, if there is one; otherwise a key whose line names no hosts. A client may
/// have any key of the list: its address proves nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// Directory of the files.
    pub directory: PathBuf,
    /// The trusted keys, possibly none. `None`: the keys in the file `trusted`.
    pub trusted: Option<Vec<PublicKey>>,
}

/// The cipher that the client prefers; the server takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cipher {
    /// AES-128-GCM, the fastest where a CPU has AES.
    #[default]
    Aes128Gcm,
    /// AES-256-GCM.
    Aes256Gcm,
    /// ChaCha20-Poly1305, the fastest where a CPU has no AES.
    Chacha20Poly1305,
}
