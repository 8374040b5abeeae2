//! Certificates, in files with the names that QEMU and libvirt use.

use std::{collections::HashSet, fs::File, io, path::Path, sync::Arc};

use rustls::{
    RootCertStore,
    client::WebPkiServerVerifier,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
    sign::CertifiedKey,
};
use webpki::{BorrowedCertRevocationList, CertRevocationList};

use super::{
    Certificates, End, FileFault, TlsError, error::Shown, keys::read_file, names,
    verifier::ChainVerifier,
};

const AUTHORITY: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

impl Certificates {
    /// The certificate and key for the role `end`.
    pub(super) fn own(
        &self,
        end: End,
        provider: &CryptoProvider,
    ) -> Result<(Arc<CertifiedKey>, Shown), TlsError> {
        let path = self.directory.join(format!("{end}-cert.pem"));
        let key_path = self.directory.join(format!("{end}-key.pem"));
        let chain = certificates(&path)?;
        let parse = |text: &[u8]| PrivateKeyDer::from_pem_slice(text).ok();
        let key = read_pem(&key_path, PRIVATE_KEY, parse)?;
        let names = chain.first().map(names::of).unwrap_or_default();
        let certified = CertifiedKey::from_der(chain, key, provider).map_err(|error| {
            let fault = match error {
                rustls::Error::InconsistentKeys(_) => FileFault::Unfit(
                    "the key in it does not belong to the certificate beside it".to_owned(),
                ),
                error => FileFault::malformed(PRIVATE_KEY, error),
            };
            TlsError::file(key_path, fault)
        })?;
        Ok((Arc::new(certified), Shown::Certificate { path, names }))
    }

    /// Verifies the certificates of the `peer`'s role. Without a file of revocation lists, no certificate is revoked.
    pub(super) fn chains(
        &self,
        peer: End,
        provider: &Arc<CryptoProvider>,
    ) -> Result<ChainVerifier, TlsError> {
        let (roots, lists) = (self.roots()?, self.revoked()?);
        let built = match peer {
            End::Server => WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
                .with_crls(lists)
                .enforce_revocation_expiration()
                .build()
                .map(ChainVerifier::OfServers),
            End::Client => WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
                .with_crls(lists)
                .enforce_revocation_expiration()
                .build()
                .map(ChainVerifier::OfClients),
        };
        // There are roots.
        built.map_err(|error| {
            let fault = FileFault::malformed(REVOCATION_LIST, error);
            TlsError::file(self.directory.join(REVOKED), fault)
        })
    }

    fn roots(&self) -> Result<Arc<RootCertStore>, TlsError> {
        let path = self.directory.join(AUTHORITY);
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&path)? {
            roots
                .add(certificate)
                .map_err(|error| TlsError::file(&path, FileFault::malformed(CERTIFICATE, error)))?;
        }
        Ok(Arc::new(roots))
    }

    /// Empty if the file does not exist.
    fn revoked(&self) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
        let path = self.directory.join(REVOKED);
        let read = || revocation_lists(&read_file(File::open(&path)?)?);
        match read() {
            Ok(lists) => Ok(lists),
            Err(FileFault::System(error)) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Vec::new())
            }
            Err(fault) => Err(TlsError::file(path, fault)),
        }
    }
}

const CERTIFICATE: &str = "certificate";
const PRIVATE_KEY: &str = "private key";
const REVOCATION_LIST: &str = "revocation list";

/// All certificates in a file; at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    read_pem(path, CERTIFICATE, |text| {
        let chain = CertificateDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>();
        chain.ok().filter(|chain| !chain.is_empty())
    })
}

fn read_pem<T>(
    path: &Path,
    what: &str,
    parse: impl FnOnce(&[u8]) -> Option<T>,
) -> Result<T, TlsError> {
    let text = File::open(path)
        .map_err(FileFault::from)
        .and_then(read_file);
    let read = text.and_then(|text| parse(&text).ok_or_else(|| FileFault::no_pem(what)));
    read.map_err(|fault| TlsError::file(path, fault))
}

/// All revocation lists in a file: at least one, and nothing else in PEM format, as an unread list would revoke nothing. Text
/// between lists is allowed: tools write it before a list.
fn revocation_lists(text: &[u8]) -> Result<Vec<CertificateRevocationListDer<'static>>, FileFault> {
    let lists = CertificateRevocationListDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>();
    let lists = lists
        .ok()
        .filter(|lists| !lists.is_empty())
        .ok_or_else(|| FileFault::no_pem(REVOCATION_LIST))?;
    let text = String::from_utf8_lossy(text);
    let count = |mark| text.matches(mark).count();
    let rest = text.rsplit("-----END X509 CRL-----").next();
    let is_all = [count("-----BEGIN "), count("-----END ")] == [lists.len(); 2];
    if !is_all || !rest.unwrap_or_default().trim().is_empty() {
        let fault = "it holds something else than revocation lists in PEM format";
        return Err(FileFault::Unfit(fault.to_owned()));
    }
    // webpki reads only the first list of an issuer's name.
    let mut issuers = HashSet::new();
    let parsed = lists
        .iter()
        .flat_map(|list| BorrowedCertRevocationList::from_der(list));
    if !parsed
        .map(CertRevocationList::from)
        .all(|list| issuers.insert(list.issuer().to_vec()))
    {
        let fault = "it holds two revocation lists of the same issuer: keep the current one";
        return Err(FileFault::Unfit(fault.to_owned()));
    }
    Ok(lists)
}
