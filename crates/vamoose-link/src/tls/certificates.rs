//! Certificates in files that are named as QEMU and libvirt name them.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::CryptoProvider,
    pki_types::{
        CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
        pem::PemObject,
    },
    server::{
        VerifierBuilderError, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
};

use super::{
    Certificates, End, FileFault, TlsError,
    error::Refusal,
    keys::read_file,
    names,
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
                rustls::Error::InconsistentKeys(_) => FileFault::OtherKey,
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

    /// What verifies the chain and name of a server's certificate.
    pub(super) fn server_verifier(
        &self,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ServerCertVerifier>, TlsError> {
        let mut builder =
            WebPkiServerVerifier::builder_with_provider(self.roots()?, provider.clone());
        if let Some(list) = self.revoked()? {
            // As elsewhere, authorities without a list have revoked nothing; a list that is too old is not relied on.
            builder = builder
                .with_crls([list])
                .allow_unknown_revocation_status()
                .enforce_revocation_expiration();
        }
        let verifier = builder.build().map_err(|error| self.unusable(error))?;
        Ok(verifier)
    }

    /// What verifies the chain of a client's certificate.
    pub(super) fn client_verifier(
        &self,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
        let mut builder =
            WebPkiClientVerifier::builder_with_provider(self.roots()?, provider.clone());
        if let Some(list) = self.revoked()? {
            builder = builder
                .with_crls([list])
                .allow_unknown_revocation_status()
                .enforce_revocation_expiration();
        }
        builder.build().map_err(|error| self.unusable(error))
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

    fn revoked(&self) -> Result<Option<CertificateRevocationListDer<'static>>, TlsError> {
        let path = self.directory.join(REVOKED);
        match parse(&path, "revocation list") {
            Ok(list) => Ok(Some(list)),
            Err(FileFault::System(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
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

/// All certificates in a file: at least one.
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
    parse(path, "private key").map_err(|fault| TlsError::file(path, fault))
}

fn parse<T: PemObject>(path: &Path, what: &'static str) -> Result<T, FileFault> {
    let text = read_file(File::open(path)?)?;
    T::from_pem_slice(&text).map_err(|_| FileFault::NotPem { what })
}

/// Accepts what `inner` accepts, if one of the names in it is allowed.
#[derive(Debug)]
pub(super) struct NameVerifier<V: ?Sized> {
    pub(super) allow: Arc<[String]>,
    pub(super) refusal: RefusalSlot,
    pub(super) inner: Arc<V>,
}

impl<V: ?Sized> NameVerifier<V> {
    fn verify(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        if self.allow.is_empty() {
            return Ok(());
        }
        let names = names::of(certificate);
        let allowed = |name| {
            self.allow
                .iter()
                .any(|pattern| names::matches(pattern, name))
        };
        if names.iter().any(|name| allowed(name)) {
            return Ok(());
        }
        Err(refuse(&self.refusal, Refusal::NotAllowed { names }))
    }
}

/// A signature in a chain is wrong if the authority has the same name as ours and another key: one that was made anew.
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
        let verified = self
            .inner
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            .map_err(of_chain)?;
        self.verify(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

impl ClientCertVerifier for NameVerifier<dyn ClientCertVerifier> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self
            .inner
            .verify_client_cert(end_entity, intermediates, now)
            .map_err(of_chain)?;
        self.verify(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
