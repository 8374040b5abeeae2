//! A key for files: a secret that is kept beside them, or elsewhere.

use std::{fmt, io, io::Write as _, path::Path};

use aws_lc_rs::{
    aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey},
    hkdf::{HKDF_SHA256, Salt},
    rand,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};

use super::{FileFault, TlsError, keys::read_secret};
use crate::NewFile;

const PREFIX: &str = "vamoose-file-key:";

/// A secret key for files, such as snapshots of guests. Whoever has it can read and make them.
#[derive(Clone)]
pub struct FileKey([u8; 32]);

/// The key of one file, which seals its records with AES-256-GCM. Each record has a number of its own.
pub struct FileCipher(LessSafeKey);

impl FileKey {
    /// Makes a key, in a new file at `path` that only its owner can read.
    ///
    /// # Errors
    /// When the file exists, or cannot be written.
    pub fn generate(path: &Path) -> Result<Self, TlsError> {
        let mut key = [0; 32];
        let written = rand::fill(&mut key)
            .map_err(|_| io::Error::other("the system has no random numbers"))
            .and_then(|()| {
                let new = NewFile::create(path)?;
                writeln!(new.file(), "{PREFIX}{}", STANDARD.encode(key))?;
                new.add()
            });
        written.map_err(|error| TlsError::file(path, error))?;
        Ok(Self(key))
    }

    /// Reads a key.
    ///
    /// # Errors
    /// When the file cannot be read, other users can read it, or it holds no key.
    pub fn read(path: &Path) -> Result<Self, TlsError> {
        let key = read_secret(path).and_then(|text| {
            let text = String::from_utf8_lossy(&text);
            let key = text.trim().strip_prefix(PREFIX);
            let key = key.and_then(|key| STANDARD.decode(key).ok()?.try_into().ok());
            let none = || FileFault::Unfit("it holds no key for files".to_owned());
            key.map(Self).ok_or_else(none)
        });
        key.map_err(|fault| TlsError::file(path, fault))
    }

    /// The key of the file with this `salt`, which no other file may have.
    ///
    /// # Errors
    /// When the library refuses, which it has no reason for.
    pub fn of_file(&self, salt: &[u8; 16]) -> io::Result<FileCipher> {
        let secret = Salt::new(HKDF_SHA256, salt).extract(&self.0);
        let key = secret
            .expand(&[b"vamoose snapshot"], &AES_256_GCM)
            .map(UnboundKey::from);
        let key = key.map_err(|_| io::Error::other("no key can be derived"))?;
        Ok(FileCipher(LessSafeKey::new(key)))
    }
}

impl FileCipher {
    /// Bytes that sealing adds.
    pub const TAG_LEN: usize = 16;

    /// Seals `record`, the one with this `number`, and authenticates `about`. No other record may have the number.
    ///
    /// # Errors
    /// When the library refuses, as it does for records of many GiB.
    pub fn seal(&self, number: u64, about: &[u8], record: &mut Vec<u8>) -> io::Result<()> {
        let sealed = self
            .0
            .seal_in_place_append_tag(nonce(number), Aad::from(about), record);
        sealed.map_err(|_| io::Error::other("a record cannot be sealed"))
    }

    /// Opens a sealed record; `None` if it is another one.
    pub fn open<'a>(&self, number: u64, about: &[u8], record: &'a mut [u8]) -> Option<&'a [u8]> {
        let opened = self
            .0
            .open_in_place(nonce(number), Aad::from(about), record);
        opened.ok().map(|content| &*content)
    }
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

impl fmt::Debug for FileKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FileKey")
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_key_is_read_as_it_was_made_by_its_owner_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        let made = FileKey::generate(&path).unwrap();
        assert_eq!(FileKey::read(&path).unwrap().0, made.0);
        assert!(FileKey::generate(&path).is_err(), "it was replaced");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let error = FileKey::read(&path).unwrap_err();
        assert!(crate::chain(&error).contains("other users"), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "nothing").unwrap();
        assert!(FileKey::read(&path).is_err());
    }

    #[test]
    fn a_record_is_opened_with_its_number_in_its_file_only() {
        let directory = tempfile::tempdir().unwrap();
        let key = FileKey::generate(&directory.path().join("key")).unwrap();
        let cipher = key.of_file(&[1; 16]).unwrap();
        let mut sealed = b"record".to_vec();
        cipher.seal(7, b"about", &mut sealed).unwrap();
        assert_eq!(sealed.len(), 6 + FileCipher::TAG_LEN);
        let open = |salt: u8, number, about: &[u8]| {
            let cipher = key.of_file(&[salt; 16]).unwrap();
            let mut record = sealed.clone();
            cipher.open(number, about, &mut record).map(Vec::from)
        };
        assert_eq!(open(1, 7, b"about").unwrap(), b"record");
        assert!(open(2, 7, b"about").is_none());
        assert!(open(1, 8, b"about").is_none());
        assert!(open(1, 7, b"another").is_none());
    }
}
