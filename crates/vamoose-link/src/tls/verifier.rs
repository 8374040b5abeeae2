//! Accepts the peer of one connection, at either end, by its certificate or its key.

use std::sync::{Arc, OnceLock};

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{
        WebPkiSupportedAlgorithms, verify_tls13_signature, verify_tls13_signature_with_raw_key,
    },
    pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};

use super::{PublicKey, error::Refusal, keys::Trusted, names};

/// Which peers are accepted.
#[derive(Debug)]
pub(super) enum Trust {
    /// Peers with a valid chain, if a name in their certificate matches `allow`.
    Certificates {
        chains: ChainVerifier,
        allow: Option<Vec<String>>,
    },
    Keys(Vec<Trusted>),
}

/// rustls' verifier of certificates of one role. If there are revocation lists, every authority of a chain needs a current one.
#[derive(Debug)]
pub(super) enum ChainVerifier {
    OfServers(Arc<WebPkiServerVerifier>),
    OfClients(Arc<dyn ClientCertVerifier>),
}

/// Reason why the verifier refused the peer of one connection, with details that rustls' errors cannot carry.
pub(super) type RefusalSlot = Arc<OnceLock<Refusal>>;

/// Verifies the peer of one connection.
#[derive(Debug)]
pub(super) struct PeerVerifier {
    pub(super) trust: Arc<Trust>,
    /// At the client: the dialled host. `None` at the server, where any host may connect.
    pub(super) host: Option<String>,
    pub(super) algorithms: WebPkiSupportedAlgorithms,
    pub(super) refusal: RefusalSlot,
}

impl PeerVerifier {
    /// Verifies the peer. `shown` is its certificate, or with [`Trust::Keys`] its public key, which rustls passes in the same type.
    /// `verify_chain` verifies a certificate's chain.
    fn verify(
        &self,
        shown: &CertificateDer<'_>,
        verify_chain: impl FnOnce(&ChainVerifier) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match &*self.trust {
            Trust::Certificates { chains, allow } => {
                verify_chain(chains).map_err(chain_error)?;
                self.verify_names(shown, allow.as_deref())
            }
            Trust::Keys(trusted) => self.verify_key(shown, trusted),
        }
    }

    fn verify_names(
        &self,
        certificate: &CertificateDer<'_>,
        allow: Option<&[String]>,
    ) -> Result<(), Error> {
        let Some(allow) = allow else { return Ok(()) };
        let names = names::of(certificate);
        let allowed = |name| allow.iter().any(|pattern| names::matches(pattern, name));
        match names.iter().any(|name| allowed(name)) {
            true => Ok(()),
            false => Err(self.refuse(Refusal::NotAllowed { names })),
        }
    }

    fn verify_key(&self, spki: &CertificateDer<'_>, trusted: &[Trusted]) -> Result<(), Error> {
        let key = PublicKey::from_spki(spki).ok_or(CertificateError::BadEncoding)?;
        if !trusted.iter().any(|it| it.key == key) {
            return Err(self.refuse(Refusal::UnknownKey { key }));
        }
        match &self.host {
            Some(host) if !is_of(&key, host, trusted) => {
                let host = host.clone();
                Err(self.refuse(Refusal::OtherHost { key, host }))
            }
            _ => Ok(()),
        }
    }

    /// Refuses the peer for a reason of our own. The peer gets the alert `access_denied`.
    fn refuse(&self, refusal: Refusal) -> Error {
        // A connection has one peer, which is refused once.
        let _ = self.refusal.set(refusal);
        CertificateError::ApplicationVerificationFailure.into()
    }
}

/// Replaces two errors of a chain. A wrong signature means that another authority has the same name, as after a renewal: the issuer is
/// unknown. An invalid revocation list leaves the status unknown.
fn chain_error(error: Error) -> Error {
    match error {
        Error::InvalidCertificate(CertificateError::BadSignature) => {
            CertificateError::UnknownIssuer.into()
        }
        Error::InvalidCertRevocationList(_) => CertificateError::UnknownRevocationStatus.into(),
        error => error,
    }
}

/// Whether `host` may have the key. A host that the list names has only the keys of the lines that name it; any other host may have
/// a key whose line names no hosts.
fn is_of(key: &PublicKey, host: &str, trusted: &[Trusted]) -> bool {
    let is_named = trusted.iter().any(|it| it.is_of(host));
    let counts = |it: &&Trusted| match is_named {
        true => it.is_of(host),
        false => it.hosts.is_empty(),
    };
    trusted.iter().filter(counts).any(|it| it.key == *key)
}

const ONLY_TLS13: Error =
    Error::PeerIncompatible(PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig);

/// What rustls asks of the verifiers of both roles.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(ONLY_TLS13)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            shown: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.algorithms;
            match &*self.trust {
                Trust::Certificates { .. } => {
                    verify_tls13_signature(message, shown, signature, algorithms)
                }
                Trust::Keys(_) => {
                    let spki = SubjectPublicKeyInfoDer::from(shown.as_ref());
                    verify_tls13_signature_with_raw_key(message, &spki, signature, algorithms)
                }
            }
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            match &*self.trust {
                Trust::Certificates { .. } => self.algorithms.supported_schemes(),
                Trust::Keys(_) => vec![SignatureScheme::ED25519],
            }
        }

        fn requires_raw_public_keys(&self) -> bool {
            matches!(&*self.trust, Trust::Keys(_))
        }
    };
}

impl ServerCertVerifier for PeerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify(end_entity, |chains| match chains {
            ChainVerifier::OfServers(verifier) => verifier
                .verify_server_cert(end_entity, intermediates, server_name, ocsp, now)
                .map(drop),
            // A verifier of clients does not check the server's name.
            ChainVerifier::OfClients(_) => Err(CertificateError::NotValidForName.into()),
        })?;
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

impl ClientCertVerifier for PeerVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        match &*self.trust {
            Trust::Certificates {
                chains: ChainVerifier::OfClients(verifier),
                ..
            } => verifier.root_hint_subjects(),
            _ => &[],
        }
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify(end_entity, |chains| match chains {
            ChainVerifier::OfClients(verifier) => verifier
                .verify_client_cert(end_entity, intermediates, now)
                .map(drop),
            ChainVerifier::OfServers(_) => Err(CertificateError::InvalidPurpose.into()),
        })?;
        Ok(ClientCertVerified::assertion())
    }

    signatures!();
}
