//! Errors before a connection is secured, explained for each end.
//!
//! The refusing end knows the reason ([`Refusal`]). The other end receives only the number of a TLS alert; [`Objection`] explains
//! what it means for its own certificate or key.
#![allow(missing_docs, reason = "the messages say it")]

use std::{fmt, io, path::PathBuf};

use rustls::{AlertDescription, CertificateError, PeerIncompatible};
use thiserror::Error;

use super::PublicKey;

/// A connection could not be secured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file of certificates or keys cannot be used.
    #[error("cannot use {}", path.display())]
    File {
        path: PathBuf,
        #[source]
        fault: FileFault,
    },
    /// The name expected of the server is not that of a host.
    #[error("`{name}` is no host name or IP address that a certificate could be for")]
    ServerName { name: String },
    /// This end refuses the peer.
    #[error("refusing the {peer}")]
    Refused {
        peer: End,
        #[source]
        reason: Refusal,
    },
    /// The peer refuses this end.
    #[error("the {peer} refuses this {}", peer.other())]
    RefusedByPeer {
        peer: End,
        #[source]
        reason: Objection,
    },
    /// One end has certificates and the other has keys.
    #[error("this end and the {peer} do not match: one uses certificates, the other keys")]
    Kind { peer: End },
    /// The peer does not send TLS.
    #[error("the {peer} does not speak TLS: it is configured without, or it is not Vamoose")]
    NotTls { peer: End },
    /// The peer speaks TLS for another purpose.
    #[error("the {peer} speaks TLS, but it is not Vamoose")]
    OtherProtocol { peer: End },
    /// The handshake failed: the connection was lost, the peer was too slow, or its messages are invalid.
    #[error("the TLS handshake with the {peer} failed")]
    Handshake { peer: End, source: io::Error },
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
    /// Other users can read the key.
    #[error("other users can read it (mode {mode:04o}, 0600 is needed)")]
    Mode { mode: u32 },
    /// It lists no key, and no keys are given otherwise.
    #[error("no key is trusted")]
    NobodyTrusted,
    /// Its content, size or owner does not fit its purpose.
    #[error("{0}")]
    Unfit(String),
}

impl FileFault {
    pub(super) fn no_pem(what: &str) -> Self {
        Self::Unfit(format!("it holds no {what} in PEM format"))
    }

    pub(super) fn malformed(what: &str, error: impl fmt::Display) -> Self {
        Self::Unfit(format!("it holds a malformed {what}: {error}"))
    }
}

/// Why this end refuses its peer.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum Refusal {
    /// The certificate is for another server.
    #[error("its certificate cannot be used: {0}")]
    Name(CertificateError),
    /// No name in the certificate is allowed.
    #[error("no name of its certificate is allowed: {}", list(.names))]
    NotAllowed { names: Vec<String> },
    /// The key is not trusted.
    #[error("its key is not trusted: {key}")]
    UnknownKey { key: PublicKey },
    /// The key is trusted for other hosts only.
    #[error("its key is not trusted as that of `{host}`: {key}")]
    OtherHost { key: PublicKey, host: String },
    /// The peer has no certificate, or its certificate is not valid here.
    #[error("{0}")]
    Invalid(String),
}

/// Why the peer refuses this end, as far as its alert tells.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Objection {
    /// No name in the certificate is allowed there.
    #[error("it does not allow the name in {}: {}", certificate.display(), list(.names))]
    NotAllowed {
        certificate: PathBuf,
        names: Vec<String>,
    },
    /// The key is not trusted there.
    #[error("it does not trust the key of this host: {key}")]
    UnknownKey { key: PublicKey },
    /// Any other reason.
    #[error("{0}")]
    Other(String),
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

    /// The handshake fails because of `error`.
    pub(super) fn handshake(peer: End, error: rustls::Error) -> Self {
        let source = io::Error::new(io::ErrorKind::InvalidData, error);
        Self::Handshake { peer, source }
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
                let reason = Refusal::of(error);
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
            error => Self::handshake(peer, error),
        }
    }
}

impl Refusal {
    fn of(error: CertificateError) -> Self {
        use CertificateError as Error;
        let reason = match error {
            Error::NotValidForNameContext { .. } => return Self::Name(error),
            Error::UnknownIssuer => "its certificate is not signed by the authority in ca-cert.pem",
            Error::Revoked => "its certificate has been revoked (ca-crl.pem)",
            Error::ExpiredRevocationList | Error::ExpiredRevocationListContext { .. } => {
                "this host's list of revoked certificates (ca-crl.pem) has expired"
            }
            Error::UnknownRevocationStatus => {
                "ca-crl.pem has no list of revoked certificates of the authority that signed its certificate, or of one above"
            }
            // Its period of validity, for example.
            error => return Self::Invalid(format!("its certificate cannot be used: {error}")),
        };
        Self::Invalid(reason.to_owned())
    }
}

impl Objection {
    fn of(alert: AlertDescription, peer: End, shown: &Shown) -> Self {
        use AlertDescription as Alert;
        let (certificate, names) = match shown {
            Shown::Key(key) if alert == Alert::AccessDenied => {
                return Self::UnknownKey { key: *key };
            }
            Shown::Key(_) => return Self::other(alert),
            Shown::Certificate { path, names } => (path.clone(), names.clone()),
        };
        let file = certificate.display();
        Self::Other(match alert {
            Alert::AccessDenied => return Self::NotAllowed { certificate, names },
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
                let role = peer.other();
                format!("{file} is not for use by a {role} (extended key usage)")
            }
            Alert::CertificateRevoked => format!("{file} has been revoked"),
            Alert::CertificateRequired => "it requires a certificate".to_owned(),
            alert => return Self::other(alert),
        })
    }

    fn other(alert: AlertDescription) -> Self {
        Self::Other(format!("it sent the TLS alert {alert:?}"))
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        return "none at all".to_owned();
    }
    names.join(", ")
}
