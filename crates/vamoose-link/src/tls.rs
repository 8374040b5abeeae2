//! TLS 1.3 between two Vamooses: who the peer is, and a connection that nobody else can read or change.
//!
//! ```text
//! Security ─> client_terms / server_terms    files are read, once a session
//!          ─> connect / accept               rustls: the handshake, in both directions authenticated
//!          ─> Sealer, Opener                 our own record layer, with the secrets of the handshake
//! ```
//!
//! rustls does the handshake alone. Its buffers cost as much as the cipher, so that the records of a
//! migration are sealed straight from its packets into what is written, and opened straight into where
//! they are read to (`sealer`, `opener`).
//!
//! In TLS 1.3 the client is done before the server has seen the client's certificate. The server therefore
//! sends one byte of application data when it has accepted the client, and `connect` waits for it: who has
//! connected, is welcome.

mod certificates;
mod error;
mod handshake;
mod keys;
mod names;
mod opener;
mod record;
mod revocation;
mod sealer;
mod terms;
#[cfg(feature = "fuzzing")]
pub mod testing;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use error::{End, FileFault, Objection, Refusal, TlsError};
pub use keys::{OneTimeKey, PublicKey, PublicKeyError, TrustedError};
pub(crate) use {
    handshake::Secured,
    opener::Opener,
    sealer::Sealer,
    terms::{ClientTerms, ServerTerms},
};

/// How two Vamooses authenticate each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// Not at all, and without encryption.
    Insecure,
    /// By certificates of a common authority.
    Certificates(Certificates),
    /// By public keys that each end knows of the other.
    Keys(Keys),
    /// By keys that both ends have for this once, and have told each other.
    OneTime {
        /// This end's.
        own: OneTimeKey,
        /// The public half of the other's.
        peer: PublicKey,
    },
}

/// Certificates in a directory, with the file names that QEMU and libvirt use: `ca-cert.pem`, `ca-crl.pem` (optional), and
/// at the end that dials `client-cert.pem` and `client-key.pem`, at the other `server-cert.pem` and `server-key.pem`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificates {
    /// Where the files are.
    pub directory: PathBuf,
    /// Patterns, of which one must match a name in the peer's certificate: its common name or a DNS name. `*` stands for any
    /// characters, `?` for one. `None`: any certificate of the authority is accepted.
    pub allow: Option<Vec<String>>,
    /// The name that the server's certificate must be for, instead of the host that is dialled.
    pub server_name: Option<String>,
}

/// Raw public keys (RFC 7250) in a directory: `key`, an Ed25519 key (PKCS#8, PEM), which only its owner may read, and
/// `trusted`, a line `ed25519:BASE64 [hosts=PATTERN,PATTERN...] [comment]` for each peer.
///
/// A host that is dialled must have a key whose line names it, if one does; otherwise one whose line names no hosts. Who dials here may
/// have any key of the list: his address proves nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// Where the files are.
    pub directory: PathBuf,
    /// The only keys to trust, which may be none. `None`: those in the file `trusted`.
    pub trusted: Option<Vec<PublicKey>>,
}

/// The cipher that the end which dials prefers. The other end takes what is preferred.
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
