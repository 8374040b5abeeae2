//! Revoked certificates: the lists in `ca-crl.pem`.
//!
//! If the file exists, every authority in a peer's chain, from its issuer to the root, needs a current list in it. A certificate is
//! revoked if any current list of its authority names it. (QEMU and GnuTLS accept authorities without a list.)
//!
//! An authority and its successor often share a name, and an authority may have several lists. webpki uses the first list that has
//! the name of a certificate's issuer, whatever key signed it. Therefore each list is checked alone first, and then the lists signed by
//! the chain's authorities together.

use std::sync::Arc;

use rustls::{
    CertificateError, DistinguishedName, Error, RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    crypto::CryptoProvider,
    pki_types::{
        CertificateDer, CertificateRevocationListDer, ServerName, UnixTime, pem::PemObject as _,
    },
    server::{VerifierBuilderError, WebPkiClientVerifier, danger::ClientCertVerifier},
};

use super::{End, FileFault};

/// Judges chains of certificates of one of the two roles.
pub(super) struct Chains {
    builder: Builder,
    /// Verifier without lists.
    plain: Verifier,
    /// Each list, with a verifier that uses only this list.
    lists: Vec<(List, Verifier)>,
}

/// The certificates that a peer has shown.
pub(super) struct Chain<'a> {
    pub(super) end_entity: &'a CertificateDer<'a>,
    pub(super) intermediates: &'a [CertificateDer<'a>],
    /// The name that a server's certificate must be for.
    pub(super) server_name: Option<&'a ServerName<'a>>,
    pub(super) now: UnixTime,
}

type List = CertificateRevocationListDer<'static>;

impl Chains {
    /// For certificates of the role `peer`. Without lists none is revoked.
    pub(super) fn new(
        peer: End,
        roots: Arc<RootCertStore>,
        lists: Vec<List>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        let provider = provider.clone();
        let builder = Builder {
            peer,
            roots,
            provider,
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

    /// The authorities that a client is asked for.
    pub(super) fn root_hints(&self) -> &[DistinguishedName] {
        match &self.plain {
            Verifier::OfServers(_) => &[],
            Verifier::OfClients(verifier) => verifier.root_hint_subjects(),
        }
    }

    /// Verifies a chain.
    pub(super) fn verify(&self, chain: &Chain<'_>) -> Result<(), Error> {
        if self.lists.is_empty() {
            return self.plain.verify(chain);
        }
        // From here on, a wrong signature is that of a list.
        self.plain.verify(chain)?;
        let mut current = Vec::new();
        let mut unknown = CertificateError::UnknownRevocationStatus;
        for (list, alone) in &self.lists {
            match alone.verify(chain) {
                Ok(()) => current.push(list.clone()),
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
        all.verify(chain).map_err(|error| match error {
            Error::InvalidCertificate(CertificateError::UnknownRevocationStatus) => unknown.into(),
            error => error,
        })
    }
}

/// rustls' verifier for a role.
enum Verifier {
    OfServers(Arc<WebPkiServerVerifier>),
    OfClients(Arc<dyn ClientCertVerifier>),
}

impl Verifier {
    fn verify(&self, chain: &Chain<'_>) -> Result<(), Error> {
        let (end_entity, intermediates) = (chain.end_entity, chain.intermediates);
        match self {
            Self::OfServers(verifier) => {
                let name = chain.server_name.ok_or(CertificateError::NotValidForName)?;
                verifier
                    .verify_server_cert(end_entity, intermediates, name, &[], chain.now)
                    .map(drop)
            }
            // A client that judged a server like this would accept any name.
            Self::OfClients(_) if chain.server_name.is_some() => {
                Err(CertificateError::NotValidForName.into())
            }
            Self::OfClients(verifier) => verifier
                .verify_client_cert(end_entity, intermediates, chain.now)
                .map(drop),
        }
    }
}

struct Builder {
    peer: End,
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

/// How to treat a certificate whose authority has no list.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unknown {
    Valid,
    Refused,
}

impl Builder {
    /// A verifier that uses `lists`.
    fn with(&self, lists: &[List], unknown: Unknown) -> Result<Verifier, VerifierBuilderError> {
        let (roots, provider) = (self.roots.clone(), self.provider.clone());
        let lists = lists.iter().cloned();
        match self.peer {
            End::Server => {
                let mut builder = WebPkiServerVerifier::builder_with_provider(roots, provider)
                    .with_crls(lists)
                    .enforce_revocation_expiration();
                if unknown == Unknown::Valid {
                    builder = builder.allow_unknown_revocation_status();
                }
                builder.build().map(Verifier::OfServers)
            }
            End::Client => {
                let mut builder = WebPkiClientVerifier::builder_with_provider(roots, provider)
                    .with_crls(lists)
                    .enforce_revocation_expiration();
                if unknown == Unknown::Valid {
                    builder = builder.allow_unknown_revocation_status();
                }
                builder.build().map(Verifier::OfClients)
            }
        }
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
