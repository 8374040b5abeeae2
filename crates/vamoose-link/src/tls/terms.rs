//! Certificates or keys of one end, as read once for a session, and the connections made with them.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use rustls::{
    ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection,
    SupportedCipherSuite,
    client::{AlwaysResolvesClientRawPublicKeys, Resumption, danger::ServerCertVerifier},
    crypto::{
        CryptoProvider,
        aws_lc_rs::{self, cipher_suite as suite, kx_group},
    },
    pki_types::ServerName,
    server::{
        AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, danger::ClientCertVerifier,
    },
    sign::{CertifiedKey, SingleCertAndKey},
    version::TLS13,
};

use super::{
    Certificates, Cipher, End, Security, TlsError,
    certificates::NameVerifier,
    error::{Refusal, Shown},
    handshake::{self, ALPN, Secured},
    keys::{KeyVerifier, Trusted},
    revocation::Chains,
};
use crate::Socket;

/// Terms of a client.
pub(crate) type ClientTerms = Terms<dyn ServerCertVerifier>;

/// Terms of a server.
pub(crate) type ServerTerms = Terms<dyn ClientCertVerifier>;

/// An end's own certificate or key, and the rules for accepting its peer. `V` is the verifier for the peer's role.
pub(crate) struct Terms<V: ?Sized> {
    provider: Arc<CryptoProvider>,
    pub(super) certified: Arc<CertifiedKey>,
    shown: Shown,
    server_name: Option<String>,
    trust: Trust<V>,
}

/// Who is accepted.
enum Trust<V: ?Sized> {
    Certificates {
        chains: Arc<Chains<V>>,
        allow: Option<Arc<[String]>>,
    },
    Keys(Arc<[Trusted]>),
}

/// Reason why the verifier refused the peer of one connection, with details that rustls' errors cannot carry.
pub(super) type RefusalSlot = Arc<OnceLock<Refusal>>;

/// Refuses the peer for a reason of our own. The peer gets the alert `access_denied`.
pub(super) fn refuse(slot: &RefusalSlot, refusal: Refusal) -> rustls::Error {
    // A connection has one peer, which is refused once.
    let _ = slot.set(refusal);
    rustls::CertificateError::ApplicationVerificationFailure.into()
}

impl Security {
    /// Reads the files of a client; `None` without security.
    ///
    /// # Errors
    /// When a file is missing or cannot be used.
    pub(crate) fn client_terms(&self, cipher: Cipher) -> Result<Option<ClientTerms>, TlsError> {
        self.terms(End::Client, cipher, Certificates::server_chains)
    }

    /// Reads the files of a server; `None` without security.
    ///
    /// # Errors
    /// As [`Security::client_terms`].
    pub(crate) fn server_terms(&self, cipher: Cipher) -> Result<Option<ServerTerms>, TlsError> {
        self.terms(End::Server, cipher, Certificates::client_chains)
    }

    fn terms<V: ?Sized>(
        &self,
        end: End,
        cipher: Cipher,
        chains: fn(&Certificates, &Arc<CryptoProvider>) -> Result<Chains<V>, TlsError>,
    ) -> Result<Option<Terms<V>>, TlsError> {
        let provider = provider(cipher);
        let mut server_name = None;
        let (certified, shown, trust) = match self {
            Self::Insecure => return Ok(None),
            Self::Certificates(certificates) => {
                let own = certificates.own(end, &provider)?;
                let (path, names) = (own.path, own.names);
                let trust = Trust::Certificates {
                    chains: chains(certificates, &provider)?.into(),
                    allow: certificates.allow.clone().map(Arc::from),
                };
                server_name.clone_from(&certificates.server_name);
                (own.certified, Shown::Certificate { path, names }, trust)
            }
            Self::Keys(keys) => {
                let own = keys.own()?;
                let trust = Trust::Keys(keys.all_trusted()?.into());
                (own.certified, Shown::Key(own.public), trust)
            }
            Self::OneTime { own, peer } => {
                let trust = Trust::Keys([(*peer).into()].into());
                (own.certified(), Shown::Key(own.public()), trust)
            }
        };
        Ok(Some(Terms {
            provider,
            certified,
            shown,
            server_name,
            trust,
        }))
    }
}

impl ClientTerms {
    /// Secures a dialled `socket` to `host`. On success the server has accepted this end.
    ///
    /// # Errors
    /// When either end refuses the other, or the handshake does not end within `timeout`.
    pub(crate) fn connect(
        &self,
        socket: &Socket,
        host: &str,
        timeout: Duration,
    ) -> Result<Secured, TlsError> {
        let refusal = RefusalSlot::default();
        let connection = self.connection(host, &refusal)?;
        handshake::run(Connection::Client(connection), socket, timeout)
            .map_err(|fault| fault.of(End::Server, timeout, refusal.get().cloned(), &self.shown))
    }

    fn connection(&self, host: &str, refusal: &RefusalSlot) -> Result<ClientConnection, TlsError> {
        let name = self.name(host)?;
        let config = self
            .config(host, refusal)
            .map_err(|error| local(error, End::Server))?;
        ClientConnection::new(Arc::new(config), name).map_err(|error| local(error, End::Server))
    }

    pub(super) fn config(
        &self,
        host: &str,
        refusal: &RefusalSlot,
    ) -> Result<ClientConfig, rustls::Error> {
        let builder = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .dangerous();
        let certified = self.certified.clone();
        let refusal = refusal.clone();
        let mut config = match &self.trust {
            Trust::Certificates { chains, allow } => builder
                .with_custom_certificate_verifier(Arc::new(NameVerifier {
                    allow: allow.clone(),
                    refusal,
                    chains: chains.clone(),
                }))
                .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified))),
            Trust::Keys(trusted) => builder
                .with_custom_certificate_verifier(Arc::new(KeyVerifier {
                    trusted: trusted.clone(),
                    host: Some(host.to_owned()),
                    algorithms: self.provider.signature_verification_algorithms,
                    refusal,
                }))
                .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(
                    certified,
                ))),
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.enable_secret_extraction = true;
        config.resumption = Resumption::disabled();
        Ok(config)
    }

    /// The name that the server's certificate must be for. Keys have no names.
    fn name(&self, host: &str) -> Result<ServerName<'static>, TlsError> {
        let name = match &self.trust {
            Trust::Certificates { .. } => self.server_name.as_deref().unwrap_or(host),
            Trust::Keys(_) => "vamoose",
        };
        ServerName::try_from(name.to_owned()).map_err(|_| TlsError::ServerName {
            name: name.to_owned(),
        })
    }
}

impl ServerTerms {
    /// Secures an accepted `socket`. On success the client has been told that it is accepted.
    ///
    /// # Errors
    /// As [`ClientTerms::connect`].
    pub(crate) fn accept(&self, socket: &Socket, timeout: Duration) -> Result<Secured, TlsError> {
        let refusal = RefusalSlot::default();
        let connection = self
            .config(&refusal)
            .and_then(|config| ServerConnection::new(Arc::new(config)))
            .map_err(|error| local(error, End::Client))?;
        handshake::run(Connection::Server(connection), socket, timeout)
            .map_err(|fault| fault.of(End::Client, timeout, refusal.get().cloned(), &self.shown))
    }

    pub(super) fn config(&self, refusal: &RefusalSlot) -> Result<ServerConfig, rustls::Error> {
        let builder = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])?;
        let certified = self.certified.clone();
        let refusal = refusal.clone();
        let mut config = match &self.trust {
            Trust::Certificates { chains, allow } => builder
                .with_client_cert_verifier(Arc::new(NameVerifier {
                    allow: allow.clone(),
                    refusal,
                    chains: chains.clone(),
                }))
                .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified))),
            Trust::Keys(trusted) => builder
                .with_client_cert_verifier(Arc::new(KeyVerifier {
                    trusted: trusted.clone(),
                    host: None,
                    algorithms: self.provider.signature_verification_algorithms,
                    refusal,
                }))
                .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified))),
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.enable_secret_extraction = true;
        // Tickets would be sent behind the handshake, where only our own record layer reads.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(config)
    }
}

/// The handshake could not begin.
fn local(source: rustls::Error, peer: End) -> TlsError {
    TlsError::Handshake { peer, source }
}

/// TLS 1.3 ciphers, `first` preferred, and post-quantum key exchange where the peer supports it: traffic recorded today contains
/// guest memory.
fn provider(first: Cipher) -> Arc<CryptoProvider> {
    let mut suites = vec![
        suite::TLS13_AES_128_GCM_SHA256,
        suite::TLS13_AES_256_GCM_SHA384,
        suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    let first = first.suite();
    suites.retain(|suite| *suite != first);
    suites.insert(0, first);
    Arc::new(CryptoProvider {
        cipher_suites: suites,
        kx_groups: vec![
            kx_group::X25519MLKEM768,
            kx_group::X25519,
            kx_group::SECP256R1,
            kx_group::SECP384R1,
        ],
        ..aws_lc_rs::default_provider()
    })
}

impl Cipher {
    fn suite(self) -> SupportedCipherSuite {
        match self {
            Self::Aes128Gcm => suite::TLS13_AES_128_GCM_SHA256,
            Self::Aes256Gcm => suite::TLS13_AES_256_GCM_SHA384,
            Self::Chacha20Poly1305 => suite::TLS13_CHACHA20_POLY1305_SHA256,
        }
    }
}

impl<V: ?Sized> fmt::Debug for Terms<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Terms")
            .field("shown", &self.shown)
            .finish_non_exhaustive()
    }
}
