//! Revoked certificates: the lists in `ca-crl.pem`.
//!
//! If the file exists, every authority in a peer's chain, from its issuer to the root, needs a current list in it. A certificate is
//! revoked if any current list of its authority names it. (QEMU and GnuTLS accept authorities without a list.)
//!
//! An authority and its successor often share a name, and an authority may have several lists. webpki uses the first list that has
//! the name of a certificate's issuer, whoever signed it. Therefore each list is checked alone first, and then the lists signed by
//! the chain's authorities together.

use std::sync::Arc;

use rustls::{
    CertificateError, Error, RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier},
    crypto::CryptoProvider,
    pki_types::{CertificateRevocationListDer, pem::PemObject as _},
    server::{VerifierBuilderError, WebPkiClientVerifier, danger::ClientCertVerifier},
};

use super::FileFault;

/// Judges chains of certificates. `V` is rustls' verifier of one of the two roles.
pub(super) struct Chains<V: ?Sized> {
    builder: Builder<V>,
    /// Verifier without lists.
    plain: Arc<V>,
    /// Each list, with a verifier that uses only this list.
    lists: Vec<(List, Arc<V>)>,
}

type List = CertificateRevocationListDer<'static>;

struct Builder<V: ?Sized> {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
    build: Build<V>,
}

type Build<V> = fn(&Builder<V>, &[List], Unknown) -> Result<Arc<V>, VerifierBuilderError>;

/// How to treat a certificate whose authority has no list.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unknown {
    Valid,
    Refused,
}

impl Chains<dyn ServerCertVerifier> {
    /// For servers' certificates. Without lists none is revoked.
    pub(super) fn of_servers(
        roots: Arc<RootCertStore>,
        lists: Vec<List>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        Self::new(roots, lists, provider, |builder, lists, unknown| {
            let (roots, provider) = (builder.roots.clone(), builder.provider.clone());
            let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider)
                .with_crls(lists.iter().cloned())
                .enforce_revocation_expiration();
            let verifier = match unknown {
                Unknown::Valid => verifier.allow_unknown_revocation_status(),
                Unknown::Refused => verifier,
            };
            Ok(verifier.build()?)
        })
    }
}

impl Chains<dyn ClientCertVerifier> {
    /// For clients' certificates. Without lists none is revoked.
    pub(super) fn of_clients(
        roots: Arc<RootCertStore>,
        lists: Vec<List>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        Self::new(roots, lists, provider, |builder, lists, unknown| {
            let (roots, provider) = (builder.roots.clone(), builder.provider.clone());
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider)
                .with_crls(lists.iter().cloned())
                .enforce_revocation_expiration();
            let verifier = match unknown {
                Unknown::Valid => verifier.allow_unknown_revocation_status(),
                Unknown::Refused => verifier,
            };
            verifier.build()
        })
    }
}

impl<V: ?Sized> Chains<V> {
    fn new(
        roots: Arc<RootCertStore>,
        lists: Vec<List>,
        provider: &Arc<CryptoProvider>,
        build: Build<V>,
    ) -> Result<Self, VerifierBuilderError> {
        let provider = provider.clone();
        let builder = Builder {
            roots,
            provider,
            build,
        };
        let plain = builder.with(&[], Unknown::Valid)?;
        let lists = lists.into_iter().map(|list| {
            let alone = builder.with(std::slice::from_ref(&list), Unknown::Valid)?;
            Ok((list, alone))
        });
        Ok(Self {
            lists: lists.collect::<Result<_, VerifierBuilderError>>()?,
            plain,
            builder,
        })
    }

    /// Verifier for signatures.
    pub(super) fn plain(&self) -> &V {
        &self.plain
    }

    /// Verifies a chain: `verify` applies one verifier to it.
    pub(super) fn verify<T>(&self, verify: impl Fn(&V) -> Result<T, Error>) -> Result<T, Error> {
        if self.lists.is_empty() {
            return verify(&self.plain);
        }
        // From here on, a wrong signature is that of a list.
        verify(&self.plain)?;
        let mut current = Vec::new();
        let mut unknown = CertificateError::UnknownRevocationStatus;
        for (list, alone) in &self.lists {
            match verify(alone) {
                Ok(_) => current.push(list.clone()),
                // The list of another authority with the same name.
                Err(
                    Error::InvalidCertRevocationList(_)
                    | Error::InvalidCertificate(
                        CertificateError::BadSignature
                        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext {
                            ..
                        },
                    ),
                ) => {}
                Err(Error::InvalidCertificate(
                    expired @ (CertificateError::ExpiredRevocationList
                    | CertificateError::ExpiredRevocationListContext { .. }),
                )) => unknown = expired,
                Err(error) => return Err(error),
            }
        }
        // A verifier without any list would ask for none.
        if current.is_empty() {
            return Err(unknown.into());
        }
        let all = self.builder.with(&current, Unknown::Refused);
        let all = all.map_err(|error| Error::General(error.to_string()))?;
        verify(&all).map_err(|error| match error {
            Error::InvalidCertificate(CertificateError::UnknownRevocationStatus) => unknown.into(),
            error => error,
        })
    }
}

impl<V: ?Sized> Builder<V> {
    fn with(&self, lists: &[List], unknown: Unknown) -> Result<Arc<V>, VerifierBuilderError> {
        (self.build)(self, lists, unknown)
    }
}

/// Parses a file of lists: at least one, and nothing else in PEM format, as an unread list would revoke nothing. Text between lists
/// is allowed: tools write it before a list.
pub(super) fn parse(text: &[u8]) -> Result<Vec<List>, FileFault> {
    let none = || FileFault::NotPem {
        what: "revocation list",
    };
    let lists: Vec<_> = List::pem_slice_iter(text)
        .collect::<Result<_, _>>()
        .map_err(|_| none())?;
    if lists.is_empty() {
        return Err(none());
    }
    let text = String::from_utf8_lossy(text);
    let count = |mark| text.matches(mark).count();
    let rest = text.rsplit(END).next().unwrap_or_default();
    let is_all = [count("-----BEGIN "), count("-----END ")] == [lists.len(); 2];
    match is_all && rest.trim().is_empty() {
        true => Ok(lists),
        false => Err(FileFault::Unfit(
            "it holds something else than revocation lists in PEM format".to_owned(),
        )),
    }
}

const END: &str = "-----END X509 CRL-----";
