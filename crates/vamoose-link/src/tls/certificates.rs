//! Certificates, in files with the names that QEMU and libvirt use.

use std::{
    fmt,
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::CryptoProvider,
    pki_types::{
        CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
        pem::PemObject,
    },
    server::{
        VerifierBuilderError,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
};

use super::{
    Certificates, End, FileFault, TlsError,
    error::Refusal,
    keys::read_file,
    names,
    revocation::{self, Chains},
    terms::{RefusalSlot, refuse},
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

    /// Verifier of the chain and name of a server's certificate.
    pub(super) fn server_chains(
        &self,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Chains<dyn ServerCertVerifier>, TlsError> {
        Chains::of_servers(self.roots()?, self.revoked()?, provider)
            .map_err(|error| self.unusable(error))
    }

    /// Verifier of the chain of a client's certificate.
    pub(super) fn client_chains(
        &self,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Chains<dyn ClientCertVerifier>, TlsError> {
        Chains::of_clients(self.roots()?, self.revoked()?, provider)
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

/// Accepts a certificate with a valid chain if one of its names is allowed.
pub(super) struct NameVerifier<V: ?Sized> {
    pub(super) allow: Option<Arc<[String]>>,
    pub(super) refusal: RefusalSlot,
    pub(super) chains: Arc<Chains<V>>,
}

impl<V: ?Sized> fmt::Debug for NameVerifier<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NameVerifier")
            .field("allow", &self.allow)
            .finish_non_exhaustive()
    }
}

impl<V: ?Sized> NameVerifier<V> {
    fn verify(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let Some(allow) = &self.allow else {
            return Ok(());
        };
        let names = names::of(certificate);
        let allowed = |name| allow.iter().any(|pattern| names::matches(pattern, name));
        if names.iter().any(|name| allowed(name)) {
            return Ok(());
        }
        Err(refuse(&self.refusal, Refusal::NotAllowed { names }))
    }
}

/// A wrong signature in a chain means that the authority has the name of ours and another key, as after its renewal.
fn of_chain(error: rustls::Error) -> rustls::Error {
    match error {
        rustls::Error::InvalidCertificate(CertificateError::BadSignature) => {
            CertificateError::UnknownIssuer.into()
        }
        error => error,
    }
}

impl ServerCertVerifier for NameVerifier<dyn ServerCertVerifier> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self.chains.verify(|verifier| {
            verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
        });
        let verified = verified.map_err(of_chain)?;
        self.verify(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chains
            .plain()
            .verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chains
            .plain()
            .verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.plain().supported_verify_schemes()
    }
}

impl ClientCertVerifier for NameVerifier<dyn ClientCertVerifier> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chains.plain().root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self
            .chains
            .verify(|verifier| verifier.verify_client_cert(end_entity, intermediates, now));
        let verified = verified.map_err(of_chain)?;
        self.verify(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chains
            .plain()
            .verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chains
            .plain()
            .verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.plain().supported_verify_schemes()
    }
}
