//! Certificates or keys of one end, as read once for a session, and the connections made with them.

use std::{sync::Arc, time::Duration};

use rustls::{
    ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection,
    SupportedCipherSuite,
    client::{AlwaysResolvesClientRawPublicKeys, ResolvesClientCert, Resumption},
    crypto::CryptoProvider,
    pki_types::ServerName,
    server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, ResolvesServerCert},
    sign::{CertifiedKey, SingleCertAndKey},
    version::TLS13,
};

#[cfg(feature = "sessions")]
pub(super) use rustls::crypto::aws_lc_rs as crypto;
#[cfg(not(feature = "sessions"))]
pub(super) use rustls::crypto::ring as crypto;

use super::{
    Cipher, End, Security, TlsError,
    error::Shown,
    handshake::{self, ALPN, Secured},
    keys::OwnKey,
    verifier::{PeerVerifier, RefusalSlot, Trust},
};
use crate::Socket;
use crypto::{cipher_suite as suite, kx_group};

/// Terms of a client.
pub(crate) struct ClientTerms(pub(super) Terms);

/// Terms of a server.
pub(crate) struct ServerTerms(pub(super) Terms);

/// An end's own certificate or key, and the rules for accepting its peer.
pub(super) struct Terms {
    provider: Arc<CryptoProvider>,
    pub(super) certified: Arc<CertifiedKey>,
    shown: Shown,
    server_name: Option<String>,
    trust: Arc<Trust>,
}

impl Security {
    /// Reads the files of a client; `None` without security.
    ///
    /// # Errors
    /// When a file is missing or cannot be used.
    pub(crate) fn client_terms(&self, cipher: Cipher) -> Result<Option<ClientTerms>, TlsError> {
        Ok(self.terms(End::Client, cipher)?.map(ClientTerms))
    }

    /// Reads the files of a server; `None` without security.
    ///
    /// # Errors
    /// As [`Security::client_terms`].
    pub(crate) fn server_terms(&self, cipher: Cipher) -> Result<Option<ServerTerms>, TlsError> {
        Ok(self.terms(End::Server, cipher)?.map(ServerTerms))
    }

    fn terms(&self, end: End, cipher: Cipher) -> Result<Option<Terms>, TlsError> {
        let provider = provider(cipher);
        let mut server_name = None;
        let (certified, shown, trust) = match self {
            Self::Insecure => return Ok(None),
            Self::Certificates(certificates) => {
                let (certified, shown) = certificates.own(end, &provider)?;
                let trust = Trust::Certificates {
                    chains: certificates.chains(end.other(), &provider)?,
                    allow: certificates.allow.clone(),
                };
                server_name.clone_from(&certificates.server_name);
                (certified, shown, trust)
            }
            Self::Keys(keys) => {
                let own = OwnKey::load(&keys.directory)?;
                let trust = Trust::Keys(keys.all_trusted()?);
                (own.certified, Shown::Key(own.public), trust)
            }
            Self::OneTime { own, peer } => {
                let trust = Trust::Keys(vec![(*peer).into()]);
                (own.certified(), Shown::Key(own.public()), trust)
            }
        };
        Ok(Some(Terms {
            provider,
            certified,
            shown,
            server_name,
            trust: trust.into(),
        }))
    }
}

impl ClientTerms {
    /// Secures a dialled `socket` to `host`, and sends the bytes of `first` when the server has proved its identity. On success the
    /// server has accepted this end.
    ///
    /// # Errors
    /// When either end refuses the other, or the handshake does not end within `timeout`.
    pub(crate) fn connect(
        &self,
        socket: &Socket,
        host: &str,
        first: &[u8],
        timeout: Duration,
    ) -> Result<Secured, TlsError> {
        let refusal = RefusalSlot::default();
        let name = self.name(host)?;
        let connection = self
            .config(host, &refusal)
            .and_then(|config| ClientConnection::new(Arc::new(config), name))
            .map_err(|error| TlsError::handshake(End::Server, error))?;
        (self.0).shake_hands(
            connection.into(),
            End::Server,
            socket,
            first,
            timeout,
            &refusal,
        )
    }

    pub(super) fn config(
        &self,
        host: &str,
        refusal: &RefusalSlot,
    ) -> Result<ClientConfig, rustls::Error> {
        let terms = &self.0;
        let certified = terms.certified.clone();
        let resolver: Arc<dyn ResolvesClientCert> = match &*terms.trust {
            Trust::Certificates { .. } => Arc::new(SingleCertAndKey::from(certified)),
            Trust::Keys(_) => Arc::new(AlwaysResolvesClientRawPublicKeys::new(certified)),
        };
        let mut config = ClientConfig::builder_with_provider(terms.provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(terms.verifier(Some(host), refusal))
            .with_client_cert_resolver(resolver);
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.enable_secret_extraction = true;
        config.resumption = Resumption::disabled();
        Ok(config)
    }

    /// The name that the server's certificate must be for. Keys have no names.
    fn name(&self, host: &str) -> Result<ServerName<'static>, TlsError> {
        let name = match &*self.0.trust {
            Trust::Certificates { .. } => self.0.server_name.as_deref().unwrap_or(host),
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
            .map_err(|error| TlsError::handshake(End::Client, error))?;
        (self.0).shake_hands(
            connection.into(),
            End::Client,
            socket,
            &[],
            timeout,
            &refusal,
        )
    }

    pub(super) fn config(&self, refusal: &RefusalSlot) -> Result<ServerConfig, rustls::Error> {
        let terms = &self.0;
        let certified = terms.certified.clone();
        let resolver: Arc<dyn ResolvesServerCert> = match &*terms.trust {
            Trust::Certificates { .. } => Arc::new(SingleCertAndKey::from(certified)),
            Trust::Keys(_) => Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified)),
        };
        let mut config = ServerConfig::builder_with_provider(terms.provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(terms.verifier(None, refusal))
            .with_cert_resolver(resolver);
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.enable_secret_extraction = true;
        // Tickets would be sent after the handshake, which our record layer does not expect.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(config)
    }
}

impl Terms {
    fn verifier(&self, host: Option<&str>, refusal: &RefusalSlot) -> Arc<PeerVerifier> {
        Arc::new(PeerVerifier {
            trust: self.trust.clone(),
            host: host.map(str::to_owned),
            algorithms: self.provider.signature_verification_algorithms,
            refusal: refusal.clone(),
        })
    }

    fn shake_hands(
        &self,
        connection: Connection,
        peer: End,
        socket: &Socket,
        first: &[u8],
        timeout: Duration,
        refusal: &RefusalSlot,
    ) -> Result<Secured, TlsError> {
        handshake::run(connection, socket, first, timeout, peer, &|error| {
            TlsError::of(error, peer, refusal.get().cloned(), &self.shown)
        })
    }
}

/// Given to rustls explicitly: this program's default provider may be another, or missing where features enable several.
///
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
            #[cfg(feature = "sessions")]
            kx_group::X25519MLKEM768,
            kx_group::X25519,
            kx_group::SECP256R1,
            kx_group::SECP384R1,
        ],
        ..crypto::default_provider()
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
