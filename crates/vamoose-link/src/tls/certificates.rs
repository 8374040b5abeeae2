//! Certificates, in files with the names that QEMU and libvirt use.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    RootCertStore,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, pem::PemObject},
    server::VerifierBuilderError,
    sign::CertifiedKey,
};

use super::{
    Certificates, End, FileFault, TlsError,
    keys::read_file,
    names,
    revocation::{self, Chains},
};

const AUTHORITY: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// The certificate of this end.
pub(super) struct OwnCertificate {
    pub(super) path: PathBuf,
    pub(super) names: Vec<String>,
    pub(super) certified: Arc<CertifiedKey>,
}

impl Certificates {
    /// The certificate and key for the role `end`.
    pub(super) fn own(
        &self,
        end: End,
        provider: &CryptoProvider,
    ) -> Result<OwnCertificate, TlsError> {
        let path = self.directory.join(format!("{end}-cert.pem"));
        let key_path = self.directory.join(format!("{end}-key.pem"));
        let chain = certificates(&path)?;
        let key = private_key(&key_path)?;
        let names = chain.first().map(names::of).unwrap_or_default();
        let certified = CertifiedKey::from_der(chain, key, provider).map_err(|source| {
            let what = "private key";
            let fault = match source {
                rustls::Error::InconsistentKeys(_) => FileFault::Unfit(
                    "the key in it does not belong to the certificate beside it".to_owned(),
                ),
                source => FileFault::Malformed { what, source },
            };
            TlsError::file(key_path, fault)
        })?;
        let certified = Arc::new(certified);
        Ok(OwnCertificate {
            path,
            names,
            certified,
        })
    }

    /// Verifier of the chains of the `peer`'s certificates.
    pub(super) fn chains(
        &self,
        peer: End,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Chains, TlsError> {
        Chains::new(peer, self.roots()?, self.revoked()?, provider)
            .map_err(|error| self.unusable(error))
    }

    fn roots(&self) -> Result<Arc<RootCertStore>, TlsError> {
        let path = self.directory.join(AUTHORITY);
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&path)? {
            roots.add(certificate).map_err(|source| {
                let what = "certificate";
                TlsError::file(&path, FileFault::Malformed { what, source })
            })?;
        }
        Ok(Arc::new(roots))
    }

    /// Empty if the file does not exist.
    fn revoked(&self) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
        let path = self.directory.join(REVOKED);
        let read = || revocation::parse(&read_file(File::open(&path)?)?);
        match read() {
            Ok(lists) => Ok(lists),
            Err(FileFault::System(error)) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Vec::new())
            }
            Err(fault) => Err(TlsError::file(path, fault)),
        }
    }

    fn unusable(&self, error: VerifierBuilderError) -> TlsError {
        let (file, what) = match &error {
            VerifierBuilderError::InvalidCrl(_) => (REVOKED, "revocation list"),
            _ => (AUTHORITY, "certificate"),
        };
        let source = rustls::Error::General(error.to_string());
        let fault = FileFault::Malformed { what, source };
        TlsError::file(self.directory.join(file), fault)
    }
}

/// All certificates in a file; at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let what = "certificate";
    let read = || {
        let text = read_file(File::open(path)?)?;
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&text)
            .collect::<Result<_, _>>()
            .map_err(|_| FileFault::NotPem { what })?;
        if chain.is_empty() {
            return Err(FileFault::NotPem { what });
        }
        Ok(chain)
    };
    read().map_err(|fault: FileFault| TlsError::file(path, fault))
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let what = "private key";
    let read = || {
        let text = read_file(File::open(path)?)?;
        PrivateKeyDer::from_pem_slice(&text).map_err(|_| FileFault::NotPem { what })
    };
    read().map_err(|fault| TlsError::file(path, fault))
}
