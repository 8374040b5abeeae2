//! Errors before a connection is secured, explained for each end.
//!
//! The refusing end knows the reason ([`Refusal`]). The other end receives only the number of a TLS alert; [`Objection`] explains
//! what it means for its own certificate or key.

use std::{fmt, io, path::PathBuf, time::Duration};

use rustls::{
    AlertDescription, CertificateError, PeerIncompatible,
    pki_types::{ServerName, UnixTime},
};
use thiserror::Error;

use super::{PublicKey, TrustedError};

/// A connection could not be secured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file of certificates or keys cannot be used.
    #[error("cannot use {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        fault: FileFault,
    },
    /// The name expected of the server is not that of a host.
    #[error("`{name}` is no host name or IP address that a certificate could be for")]
    ServerName {
        /// The name.
        name: String,
    },
    /// This end refuses the peer.
    #[error("refusing the {peer}")]
    Refused {
        /// The end that is refused.
        peer: End,
        /// Why.
        #[source]
        reason: Refusal,
    },
    /// The peer refuses this end.
    #[error("the {peer} refuses this {}", peer.other())]
    RefusedByPeer {
        /// The end that refuses.
        peer: End,
        /// What its alert means.
        #[source]
        reason: Objection,
    },
    /// One end has certificates and the other has keys.
    #[error("one end uses certificates and the {peer} keys, or the other way round")]
    Kind {
        /// The other end.
        peer: End,
    },
    /// The peer does not send TLS.
    #[error("the {peer} does not speak TLS: it is configured without, or it is not Vamoose")]
    NotTls {
        /// Which.
        peer: End,
    },
    /// The peer speaks TLS for another purpose.
    #[error("the {peer} speaks TLS, but it is not Vamoose")]
    OtherProtocol {
        /// Which.
        peer: End,
    },
    /// The peer did not finish the handshake in time.
    #[error("the {peer} did not finish the TLS handshake within {} s", timeout.as_secs_f32())]
    TimedOut {
        /// Which.
        peer: End,
        /// The timeout.
        timeout: Duration,
    },
    /// The peer sent more than any handshake needs.
    #[error("the {peer} sent more than {limit} bytes before the end of the TLS handshake")]
    TooLong {
        /// Which.
        peer: End,
        /// Limit of bytes.
        limit: usize,
    },
    /// The peer closed the connection.
    #[error("the {peer} closed the connection during the TLS handshake")]
    Closed {
        /// Which.
        peer: End,
    },
    /// The connection failed.
    #[error("the connection to the {peer} failed during the TLS handshake")]
    Socket {
        /// The other end.
        peer: End,
        /// The system's error.
        source: io::Error,
    },
    /// Any other error of the protocol.
    #[error("the TLS handshake with the {peer} failed")]
    Handshake {
        /// The other end.
        peer: End,
        /// The library's error.
        source: rustls::Error,
    },
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The end that dialled.
    Client,
    /// The end that accepted.
    Server,
}

impl End {
    /// The other end.
    pub fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Client => "client",
            Self::Server => "server",
        })
    }
}

/// Why a file cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FileFault {
    /// It cannot be read or written.
    #[error(transparent)]
    System(#[from] io::Error),
    /// It does not contain the expected PEM object.
    #[error("it holds no {what} in PEM format")]
    NotPem {
        /// The expected object.
        what: &'static str,
    },
    /// An object in it is malformed.
    #[error("it holds a malformed {what}")]
    Malformed {
        /// The object.
        what: &'static str,
        /// The library's error.
        source: rustls::Error,
    },
    /// Other users can read the key.
    #[error("other users can read it (mode {mode:04o}, 0600 is needed)")]
    Mode {
        /// Its permissions.
        mode: u32,
    },
    /// Its content, size or owner does not fit its purpose.
    #[error("{0}")]
    Unfit(String),
    /// It lists no key, and no keys are given otherwise.
    #[error("no key is trusted")]
    NobodyTrusted,
    /// A line is malformed.
    #[error("line {line}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// Why not.
        source: TrustedError,
    },
}

/// Why this end refuses its peer.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum Refusal {
    /// The certificate is for another server.
    #[error("its certificate is not for `{expected}` but for {}", list(.presented))]
    Name {
        /// The dialled host, or the configured name.
        expected: String,
        /// Names in the certificate; the common name does not count.
        presented: Vec<String>,
    },
    /// No name in the certificate is allowed.
    #[error("no name of its certificate is allowed: {}", list(.names))]
    NotAllowed {
        /// Names in the certificate.
        names: Vec<String>,
    },
    /// The key is not trusted.
    #[error("its key is not trusted: {key}")]
    UnknownKey {
        /// The key.
        key: PublicKey,
    },
    /// The key is trusted for other hosts only.
    #[error("its key is not trusted as that of `{host}`: {key}")]
    OtherHost {
        /// The key.
        key: PublicKey,
        /// The dialled host.
        host: String,
    },
    /// The peer has no certificate, or its certificate is not valid here.
    #[error("{0}")]
    Invalid(String),
    /// Any other fault of a certificate.
    #[error("its certificate cannot be used")]
    Certificate(#[source] rustls::Error),
}

/// Why the peer refuses this end, as far as its alert tells.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Objection {
    /// No name in the certificate is allowed there.
    #[error("it does not allow the name in {}: {}", certificate.display(), list(.names))]
    NotAllowed {
        /// Our certificate.
        certificate: PathBuf,
        /// Names in it.
        names: Vec<String>,
    },
    /// The key is not trusted there.
    #[error("it does not trust the key of this host: {key}")]
    UnknownKey {
        /// Our key.
        key: PublicKey,
    },
    /// The peer requires a certificate, or does not accept this end's.
    #[error("{0}")]
    Certificate(String),
    /// Any other alert.
    #[error("it sent the TLS alert {0:?}")]
    Alert(AlertDescription),
}

/// The certificate or key that this end has shown to its peer.
#[derive(Clone, Debug)]
pub(super) enum Shown {
    Certificate {
        path: PathBuf,
        /// Names in it.
        names: Vec<String>,
    },
    Key(PublicKey),
}

impl TlsError {
    /// `path` cannot be used.
    pub(super) fn file(path: impl Into<PathBuf>, fault: impl Into<FileFault>) -> Self {
        Self::File {
            path: path.into(),
            fault: fault.into(),
        }
    }

    /// Explains a rustls error. `refusal` is the reason of our own verifier, if it has refused the peer.
    pub(super) fn of(
        error: rustls::Error,
        peer: End,
        refusal: Option<Refusal>,
        shown: &Shown,
    ) -> Self {
        if let Some(reason) = refusal {
            return Self::Refused { peer, reason };
        }
        match error {
            rustls::Error::InvalidCertificate(error) => {
                let reason = Refusal::of(error, peer);
                Self::Refused { peer, reason }
            }
            rustls::Error::NoCertificatesPresented => {
                let reason = Refusal::Invalid("it has no certificate".to_owned());
                Self::Refused { peer, reason }
            }
            rustls::Error::PeerIncompatible(
                PeerIncompatible::IncorrectCertificateTypeExtension
                | PeerIncompatible::UnsolicitedCertificateTypeExtension,
            )
            | rustls::Error::AlertReceived(AlertDescription::HandshakeFailure) => {
                Self::Kind { peer }
            }
            rustls::Error::NoApplicationProtocol
            | rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol) => {
                Self::OtherProtocol { peer }
            }
            rustls::Error::AlertReceived(alert) => {
                let reason = Objection::of(alert, peer, shown);
                Self::RefusedByPeer { peer, reason }
            }
            rustls::Error::InvalidMessage(_) => Self::NotTls { peer },
            source => Self::Handshake { peer, source },
        }
    }
}

impl Refusal {
    fn of(error: CertificateError, peer: End) -> Self {
        use CertificateError as Error;
        let reason = match error {
            Error::UnknownIssuer => {
                "its certificate is not signed by the authority in ca-cert.pem".to_owned()
            }
            Error::Expired => "its certificate has expired, by the clock of this host".to_owned(),
            Error::ExpiredContext { time, not_after } => format!(
                "its certificate expired {} ago, by the clock of this host",
                span(not_after, time)
            ),
            Error::NotValidYet => {
                "its certificate is not valid yet, by the clock of this host".to_owned()
            }
            Error::NotValidYetContext { time, not_before } => format!(
                "its certificate is not valid for another {}, by the clock of this host",
                span(time, not_before)
            ),
            Error::NotValidForNameContext {
                expected,
                presented,
            } => {
                let expected = match &expected {
                    ServerName::IpAddress(address) => std::net::IpAddr::from(*address).to_string(),
                    name => name.to_str().into_owned(),
                };
                return Self::Name {
                    expected,
                    presented,
                };
            }
            Error::InvalidPurpose | Error::InvalidPurposeContext { .. } => {
                format!("its certificate is not for use by a {peer} (extended key usage)")
            }
            Error::Revoked => "its certificate has been revoked (ca-crl.pem)".to_owned(),
            Error::ExpiredRevocationList | Error::ExpiredRevocationListContext { .. } => {
                "the list of revoked certificates of this host has expired (ca-crl.pem)".to_owned()
            }
            Error::UnknownRevocationStatus => {
                "ca-crl.pem has no list of revoked certificates of the authority that signed its certificate, or of one above"
                    .to_owned()
            }
            error => return Self::Certificate(error.into()),
        };
        Self::Invalid(reason)
    }
}

impl Objection {
    fn of(alert: AlertDescription, peer: End, shown: &Shown) -> Self {
        use AlertDescription as Alert;
        let (certificate, names) = match shown {
            Shown::Key(key) if alert == Alert::AccessDenied => {
                return Self::UnknownKey { key: *key };
            }
            Shown::Key(_) => return Self::Alert(alert),
            Shown::Certificate { path, names } => (path.clone(), names.clone()),
        };
        let file = certificate.display();
        Self::Certificate(match alert {
            Alert::UnknownCA => format!(
                "it does not trust the authority that signed {file}, or has no current list of the certificates that were revoked"
            ),
            Alert::CertificateExpired => {
                format!("by its clock, {file} has expired or is not valid yet")
            }
            Alert::BadCertificate if peer == End::Client => {
                format!("{file} is not for the name that it dialled")
            }
            Alert::UnsupportedCertificate => {
                format!(
                    "{file} is not for use by a {} (extended key usage)",
                    peer.other()
                )
            }
            Alert::CertificateRevoked => format!("{file} has been revoked"),
            Alert::CertificateRequired => "it requires a certificate".to_owned(),
            Alert::AccessDenied => return Self::NotAllowed { certificate, names },
            alert => return Self::Alert(alert),
        })
    }
}

/// Time between two instants, in its largest unit.
fn span(from: UnixTime, to: UnixTime) -> String {
    let seconds = to.as_secs().saturating_sub(from.as_secs());
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        return "none at all".to_owned();
    }
    names.join(", ")
}
