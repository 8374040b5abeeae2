//! Authorities, and directories of certificates as QEMU has them.

use std::{fs, path::Path};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose as Purpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SerialNumber, date_time_ymd,
};
use tempfile::TempDir;

use crate::tls::{Certificates, Cipher, ClientTerms, Security, ServerTerms};

/// An authority that is made for a test.
pub(super) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate as a test wants it.
pub(super) struct Leaf<'a> {
    pub(super) common_name: &'a str,
    pub(super) alternative: &'a [&'a str],
    /// Years of its beginning and end.
    pub(super) years: (i32, i32),
    pub(super) purposes: &'a [Purpose],
    pub(super) serial: u64,
}

impl Default for Leaf<'_> {
    fn default() -> Self {
        Self {
            common_name: "host1",
            alternative: &["host1.example.org", "127.0.0.1"],
            years: (2020, 3000),
            purposes: &[],
            serial: 7,
        }
    }
}

impl Authority {
    pub(super) fn new() -> Self {
        Self::named("authority")
    }

    pub(super) fn named(name: &str) -> Self {
        Self::of(name, KeyPair::generate().unwrap())
    }

    /// With a key of its own kind.
    pub(super) fn of(name: &str, key: KeyPair) -> Self {
        Self(CertifiedIssuer::self_signed(Self::params(name), key).unwrap())
    }

    /// One below this one, with a certificate of the number `serial`.
    pub(super) fn intermediate(&self, serial: u64) -> Self {
        let mut params = Self::params("intermediate");
        params.serial_number = Some(SerialNumber::from(serial));
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::signed_by(params, key, &self.0).unwrap())
    }

    fn params(name: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
    }

    pub(super) fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes `ROLE-cert.pem` and `ROLE-key.pem`.
    pub(super) fn issue(&self, directory: &Path, role: &str, leaf: &Leaf<'_>) {
        let names: Vec<_> = leaf
            .alternative
            .iter()
            .map(|name| (*name).to_owned())
            .collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::OrganizationName, "a test");
        params
            .distinguished_name
            .push(DnType::CommonName, leaf.common_name);
        params.not_before = date_time_ymd(leaf.years.0, 1, 1);
        params.not_after = date_time_ymd(leaf.years.1, 1, 1);
        params.extended_key_usages = leaf.purposes.to_vec();
        params.serial_number = Some(SerialNumber::from(leaf.serial));
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        fs::write(
            directory.join(format!("{role}-cert.pem")),
            certificate.pem(),
        )
        .unwrap();
        fs::write(
            directory.join(format!("{role}-key.pem")),
            key.serialize_pem(),
        )
        .unwrap();
    }

    /// Writes `ca-crl.pem`, which revokes `serial` and is replaced in the year `until`.
    pub(super) fn revoke(&self, directory: &Path, serial: u64, until: i32) {
        fs::write(directory.join("ca-crl.pem"), self.list(serial, until)).unwrap();
    }

    /// The list that revokes `serial` and is replaced in the year `until`.
    pub(super) fn list(&self, serial: u64, until: i32) -> String {
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(until, 1, 1),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs: vec![RevokedCertParams {
                serial_number: SerialNumber::from(serial),
                revocation_time: date_time_ymd(2020, 1, 1),
                reason_code: None,
                invalidity_date: None,
            }],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.0).unwrap().pem().unwrap()
    }
}

/// Certificates for both ends, in a directory each.
pub(super) struct Hosts {
    pub(super) authority: Authority,
    pub(super) client: TempDir,
    pub(super) server: TempDir,
    /// Patterns of the server.
    pub(super) allow: Option<Vec<String>>,
    /// What the client expects.
    pub(super) server_name: Option<String>,
}

impl Hosts {
    pub(super) fn new() -> Self {
        let hosts = Self {
            authority: Authority::new(),
            client: TempDir::new().unwrap(),
            server: TempDir::new().unwrap(),
            allow: None,
            server_name: None,
        };
        for (directory, role) in [(&hosts.client, "client"), (&hosts.server, "server")] {
            hosts.trust(directory, &hosts.authority);
            hosts
                .authority
                .issue(directory.path(), role, &Leaf::default());
        }
        hosts
    }

    /// Lets the host of `directory` trust `authority`, and no other.
    pub(super) fn trust(&self, directory: &TempDir, authority: &Authority) {
        fs::write(directory.path().join("ca-cert.pem"), authority.pem()).unwrap();
    }

    pub(super) fn client_security(&self) -> Security {
        Security::Certificates(Certificates {
            directory: self.client.path().to_owned(),
            allow: None,
            server_name: self.server_name.clone(),
        })
    }

    pub(super) fn server_security(&self) -> Security {
        Security::Certificates(Certificates {
            directory: self.server.path().to_owned(),
            allow: self.allow.clone(),
            server_name: None,
        })
    }

    pub(super) fn client_terms(&self, cipher: Cipher) -> ClientTerms {
        self.client_security()
            .client_terms(cipher)
            .unwrap()
            .unwrap()
    }

    pub(super) fn server_terms(&self) -> ServerTerms {
        self.server_security()
            .server_terms(Cipher::default())
            .unwrap()
            .unwrap()
    }
}
