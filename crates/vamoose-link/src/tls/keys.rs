//! Raw public keys (RFC 7250): as with ssh, each end has a key and knows the other's. There are no certificates, names, or expiry.
//!
//! Users copy whole keys rather than digests: 32 bytes are short enough.

use std::{
    fmt,
    fs::{DirBuilder, File},
    io::{self, Read as _, Write as _},
    net::IpAddr,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use aws_lc_rs::{pkcs8::Document, signature::Ed25519KeyPair};
use base64::{
    Engine as _, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig, general_purpose::STANDARD},
};
use rustix::process::geteuid;
use rustls::{
    pki_types::{CertificateDer, PrivatePkcs8KeyDer, pem::PemObject as _},
    sign::CertifiedKey,
};
use thiserror::Error;

use super::{FileFault, Keys, TlsError, names, terms::crypto::sign::any_eddsa_type};
use crate::NewFile;

/// An Ed25519 public key. Its text form is `ed25519:` and 32 bytes in base64.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicKey([u8; 32]);

/// A text is not a public key.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a public key is `ed25519:` and 32 bytes in base64")]
pub struct PublicKeyError;

impl Keys {
    /// The keys in `directory`, and those that its file `trusted` lists.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            trusted: None,
        }
    }

    /// Generates a key in `directory`, which is created if it is missing. Returns the public half.
    ///
    /// # Errors
    /// When a key exists already, or the file cannot be written.
    pub fn generate(directory: &Path) -> Result<PublicKey, TlsError> {
        let path = directory.join(KEY);
        write_key(directory, &path).map_err(|error| TlsError::file(&path, error))
    }

    /// The public half of the key in `directory`.
    ///
    /// # Errors
    /// When the key is missing or cannot be used.
    pub fn public_key(directory: &Path) -> Result<PublicKey, TlsError> {
        Ok(OwnKey::load(directory)?.public)
    }

    /// Whether `directory` has a key, which may be unusable.
    pub fn has_key(directory: &Path) -> bool {
        directory.join(KEY).exists()
    }

    /// The file that lists the keys to trust.
    pub fn trusted_file(directory: &Path) -> PathBuf {
        directory.join(TRUSTED)
    }

    /// The lines of the trusted keys, with their hosts and comments.
    ///
    /// # Errors
    /// When the list cannot be used.
    pub fn trusted_lines(directory: &Path) -> Result<Vec<String>, TlsError> {
        let text = Self::read_guarded(&Self::trusted_file(directory))?;
        let text = String::from_utf8_lossy(&text);
        Ok(lines(&text).map(|(line, _)| line.to_owned()).collect())
    }

    /// The bytes of a file that decides where guests go: it belongs to root or to the user of this process, and no other user can
    /// write it.
    ///
    /// # Errors
    /// When the file cannot be read, or others could have written it.
    pub fn read_guarded(path: &Path) -> Result<Vec<u8>, TlsError> {
        read_guarded(path).map_err(|fault| TlsError::file(path, fault))
    }

    /// All trusted keys. A list that is read from the file has at least one.
    pub(super) fn all_trusted(&self) -> Result<Vec<Trusted>, TlsError> {
        if let Some(trusted) = &self.trusted {
            return Ok(trusted.iter().copied().map(Trusted::from).collect());
        }
        let path = Self::trusted_file(&self.directory);
        let read = read_guarded(&path).and_then(|text| parse_trusted(&text));
        let trusted = match read {
            Ok(trusted) => trusted,
            Err(FileFault::System(error)) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(fault) => return Err(TlsError::file(path, fault)),
        };
        if trusted.is_empty() {
            return Err(TlsError::file(path, FileFault::NobodyTrusted));
        }
        Ok(trusted)
    }
}

const PRIVATE_KEY: &str = "Ed25519 private key";
const KEY: &str = "key";
const TRUSTED: &str = "trusted";

/// Keys and lists of keys are short: a million bytes hold 20,000 keys.
const MAX_FILE: u64 = 1 << 20;

/// A key that exists only in this process.
#[derive(Clone)]
pub struct OneTimeKey(Arc<OwnKey>);

impl OneTimeKey {
    /// Generates a key.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn generate() -> io::Result<Self> {
        let (_, own) = generate()?;
        Ok(Self(Arc::new(own)))
    }

    /// The key in `text`, which has the form of a key's file (PKCS#8, PEM).
    ///
    /// # Errors
    /// When it is not an Ed25519 key.
    pub fn from_pem(text: &[u8]) -> Result<Self, FileFault> {
        Ok(Self(Arc::new(OwnKey::from_pem(text)?)))
    }

    /// Its public half, for the other end.
    pub fn public(&self) -> PublicKey {
        self.0.public
    }

    pub(super) fn certified(&self) -> Arc<CertifiedKey> {
        self.0.certified.clone()
    }
}

impl PartialEq for OneTimeKey {
    fn eq(&self, other: &Self) -> bool {
        self.public() == other.public()
    }
}

impl Eq for OneTimeKey {}

impl fmt::Debug for OneTimeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OneTimeKey({})", self.public())
    }
}

/// A new key, as PKCS#8 and ready for use.
fn generate() -> io::Result<(Document, OwnKey)> {
    let pair = Ed25519KeyPair::generate()
        .map_err(|_| io::Error::other("the system has no random numbers"))?;
    let der = pair
        .to_pkcs8v1()
        .map_err(|_| io::Error::other("the key cannot be encoded"))?;
    let own = OwnKey::new(&PrivatePkcs8KeyDer::from(der.as_ref()));
    let own = own.map_err(|fault| io::Error::other(fault.to_string()))?;
    Ok((der, own))
}

/// Writes the key atomically: a key cut short by a full disk would look like an existing one.
fn write_key(directory: &Path, path: &Path) -> io::Result<PublicKey> {
    let (der, own) = generate()?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    let new = NewFile::create(path)?;
    new.file().write_all(pem(der.as_ref()).as_bytes())?;
    // Never in place of an existing key.
    new.add().map(|()| own.public)
}

/// The PEM form of an Ed25519 key, whose 48 bytes are one line of base64.
fn pem(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    format!("-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n")
}

/// The key of this end.
pub(super) struct OwnKey {
    pub(super) public: PublicKey,
    pub(super) certified: Arc<CertifiedKey>,
}

impl OwnKey {
    /// The key in `directory`.
    pub(super) fn load(directory: &Path) -> Result<Self, TlsError> {
        let path = directory.join(KEY);
        let read = read_secret(&path).and_then(|text| Self::from_pem(&text));
        read.map_err(|fault| TlsError::file(path, fault))
    }

    fn from_pem(text: &[u8]) -> Result<Self, FileFault> {
        let key =
            PrivatePkcs8KeyDer::from_pem_slice(text).map_err(|_| FileFault::no_pem(PRIVATE_KEY))?;
        Self::new(&key)
    }

    fn new(key: &PrivatePkcs8KeyDer<'_>) -> Result<Self, FileFault> {
        let key = any_eddsa_type(key).map_err(|error| FileFault::malformed(PRIVATE_KEY, error))?;
        let none = || FileFault::no_pem(PRIVATE_KEY);
        let spki = key.public_key().ok_or_else(none)?.into_owned();
        let public = PublicKey::from_spki(&spki).ok_or_else(none)?;
        let shown = vec![CertificateDer::from(spki.to_vec())];
        let certified = Arc::new(CertifiedKey::new(shown, key));
        Ok(Self { public, certified })
    }
}

/// Reads a file that nobody but its owner may read.
pub(super) fn read_secret(path: &Path) -> Result<Vec<u8>, FileFault> {
    read_owned(path, 0o077, |mode| FileFault::Mode { mode })
}

fn read_guarded(path: &Path) -> Result<Vec<u8>, FileFault> {
    read_owned(path, 0o022, |mode| {
        let fault = format!("other users can write it (mode {mode:04o}, 0644 at most)");
        FileFault::Unfit(fault)
    })
}

/// Reads a file without the permissions `forbidden`, of which `fault` complains. Only the user of this process and root may own keys and
/// lists: these decide who can receive guests.
fn read_owned(
    path: &Path,
    forbidden: u32,
    fault: fn(u32) -> FileFault,
) -> Result<Vec<u8>, FileFault> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let (mode, owner) = (metadata.mode() & 0o7777, metadata.uid());
    if mode & forbidden != 0 {
        return Err(fault(mode));
    }
    if owner != 0 && owner != geteuid().as_raw() {
        return Err(FileFault::Unfit(format!("it belongs to user {owner}")));
    }
    read_file(file)
}

/// Reads a file of certificates, keys, or trusted keys.
pub(super) fn read_file(file: File) -> Result<Vec<u8>, FileFault> {
    let mut text = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        let fault = format!("it has more than {MAX_FILE} bytes");
        return Err(FileFault::Unfit(fault));
    }
    Ok(text)
}

/// A trusted key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trusted {
    pub(super) key: PublicKey,
    /// Patterns of the hosts with this key, as they are dialled; empty if the list names none.
    pub(super) hosts: Vec<String>,
}

impl Trusted {
    /// Whether the list names it as a key of `host`.
    pub(super) fn is_of(&self, host: &str) -> bool {
        let address = |text: &str| text.parse::<IpAddr>().ok();
        let is_same = |pattern| address(pattern).is_some_and(|it| address(host) == Some(it));
        let mut patterns = self.hosts.iter();
        patterns.any(|pattern| names::matches(pattern, host) || is_same(pattern))
    }
}

impl From<PublicKey> for Trusted {
    fn from(key: PublicKey) -> Self {
        let hosts = Vec::new();
        Self { key, hosts }
    }
}

/// Parses a list of keys, one per line. `hosts=` with patterns separated by commas may follow the key, and then a comment. Lines
/// that are empty or begin with `#` are ignored.
pub(super) fn parse_trusted(text: &[u8]) -> Result<Vec<Trusted>, FileFault> {
    let text = String::from_utf8_lossy(text);
    let trusted = lines(&text).map(|(text, line)| {
        parse_line(text).map_err(|error| FileFault::Unfit(format!("line {line}: {error}")))
    });
    trusted.collect()
}

/// The lines with a key, and their numbers.
fn lines(text: &str) -> impl Iterator<Item = (&str, usize)> {
    let lines = text.lines().map(str::trim).zip(1..);
    lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#'))
}

/// Refuses unknown options: to ignore one could mean to trust the key too far.
fn parse_line(line: &str) -> Result<Trusted, String> {
    let mut words = line.split_whitespace();
    let key = words.next().unwrap_or_default().parse::<PublicKey>();
    let key = key.map_err(|error| error.to_string())?;
    let option = words.next();
    // The author did not mean a key for any host.
    if words.any(|word| word.starts_with("hosts=")) {
        return Err("hosts= belongs directly behind the key, once".to_owned());
    }
    match option.and_then(|word| Some((word, word.split_once('=')?))) {
        None => Ok(key.into()),
        Some((_, ("hosts", hosts))) => {
            let hosts: Vec<_> = hosts.split(',').map(str::to_owned).collect();
            match hosts.iter().any(String::is_empty) {
                true => Err("hosts= names no host".to_owned()),
                false => Ok(Trusted { key, hosts }),
            }
        }
        Some((word, _)) => Err(format!(
            "`{word}` is not known: behind a key stands hosts=NAME,NAME... or a comment"
        )),
    }
}

/// Prefix of the 32 bytes in an Ed25519 key's SubjectPublicKeyInfo (RFC 8410).
const SPKI_PREFIX: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

impl PublicKey {
    pub(super) fn from_spki(spki: &[u8]) -> Option<Self> {
        let key = spki.strip_prefix(&SPKI_PREFIX)?;
        Self::try_from(key).ok()
    }
}

impl TryFrom<&[u8]> for PublicKey {
    type Error = PublicKeyError;

    fn try_from(bytes: &[u8]) -> Result<Self, Self::Error> {
        bytes.try_into().map(Self).map_err(|_| PublicKeyError)
    }
}

const PREFIX: &str = "ed25519:";

/// Accepts keys without padding, which is easily lost when a key is copied.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

impl FromStr for PublicKey {
    type Err = PublicKeyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let key = text.strip_prefix(PREFIX).ok_or(PublicKeyError)?;
        let bytes = LENIENT.decode(key).map_err(|_| PublicKeyError)?;
        Self::try_from(&bytes[..])
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
