//! Refusals by certificate. Each case has its own message at both ends.

use std::{fs, path::Path};

use rcgen::{ExtendedKeyUsagePurpose as Purpose, KeyPair, PKCS_ED25519};
use rustls::{ClientConfig, ClientConnection, Connection, version::TLS13};

use super::{
    LIMIT,
    authority::{Authority, Hosts, Leaf},
    meet, message, sockets,
};
use crate::tls::{
    Cipher, End, TlsError,
    error::Shown,
    handshake::{self, ALPN},
};

/// The messages of both ends, with `CLIENT` and `SERVER` for their directories.
fn refused(hosts: &Hosts, host: &str) -> (String, String) {
    let (connected, accepted) = meet(
        &hosts.client_terms(Cipher::default()),
        &hosts.server_terms(),
        host,
    );
    let short = |text: String| {
        let [client, server] =
            [&hosts.client, &hosts.server].map(|directory| directory.path().display().to_string());
        text.replace(&client, "CLIENT").replace(&server, "SERVER")
    };
    (short(message(connected)), short(message(accepted)))
}

fn expect(hosts: &Hosts, client: &str, server: &str) {
    let (at_client, at_server) = refused(hosts, "127.0.0.1");
    assert_eq!(at_client, client);
    assert_eq!(at_server, server);
}

fn with_client(leaf: &Leaf<'_>) -> Hosts {
    let hosts = Hosts::new();
    hosts.authority.issue(hosts.client.path(), "client", leaf);
    hosts
}

fn with_server(leaf: &Leaf<'_>) -> Hosts {
    let hosts = Hosts::new();
    hosts.authority.issue(hosts.server.path(), "server", leaf);
    hosts
}

#[test]
fn a_client_of_another_authority() {
    // One that was made anew may have the same name.
    for name in ["another", "authority"] {
        let hosts = Hosts::new();
        let other = Authority::named(name);
        other.issue(hosts.client.path(), "client", &Leaf::default());
        expect(
            &hosts,
            "the server refuses this client: it does not trust the authority that signed CLIENT/client-cert.pem, or has \
             no current list of the certificates that were revoked",
            "refusing the client: its certificate is not signed by the authority in ca-cert.pem",
        );
    }
}

#[test]
fn a_server_of_another_authority() {
    for name in ["another", "authority"] {
        let hosts = Hosts::new();
        let other = Authority::named(name);
        other.issue(hosts.server.path(), "server", &Leaf::default());
        expect(
            &hosts,
            "refusing the server: its certificate is not signed by the authority in ca-cert.pem",
            "the client refuses this server: it does not trust the authority that signed SERVER/server-cert.pem, or has \
             no current list of the certificates that were revoked",
        );
    }
}

#[test]
fn certificates_that_have_expired() {
    let expired = Leaf {
        years: (2020, 2021),
        ..Leaf::default()
    };
    let (client, server) = refused(&with_client(&expired), "127.0.0.1");
    assert_eq!(
        client,
        "the server refuses this client: by its clock, CLIENT/client-cert.pem has expired or is not valid yet"
    );
    let begin = "refusing the client: its certificate cannot be used: certificate expired: ";
    assert!(server.starts_with(begin), "{server}");
    let (client, server) = refused(&with_server(&expired), "127.0.0.1");
    let begin = "refusing the server: its certificate cannot be used: certificate expired: ";
    assert!(client.starts_with(begin), "{client}");
    assert_eq!(
        server,
        "the client refuses this server: by its clock, SERVER/server-cert.pem has expired or is not valid yet"
    );
}

#[test]
fn certificates_that_are_not_valid_yet() {
    let early = Leaf {
        years: (3000, 3001),
        ..Leaf::default()
    };
    let (client, server) = refused(&with_client(&early), "127.0.0.1");
    assert!(
        client.ends_with("has expired or is not valid yet"),
        "{client}"
    );
    let begin = "refusing the client: its certificate cannot be used: certificate not valid yet: ";
    assert!(server.starts_with(begin), "{server}");
    let (client, server) = refused(&with_server(&early), "127.0.0.1");
    let begin = "refusing the server: its certificate cannot be used: certificate not valid yet: ";
    assert!(client.starts_with(begin), "{client}");
    assert!(
        server.ends_with("has expired or is not valid yet"),
        "{server}"
    );
}

#[test]
fn a_server_of_another_name() {
    let hosts = Hosts::new();
    let (client, server) = refused(&hosts, "host3.example.org");
    assert!(
        client.starts_with(
            "refusing the server: its certificate cannot be used: certificate not valid for name \"host3.example.org\""
        ),
        "{client}"
    );
    assert!(client.contains("host1.example.org"), "{client}");
    assert_eq!(
        server,
        "the client refuses this server: SERVER/server-cert.pem is not for the name that it dialled"
    );
    let (client, _) = refused(&hosts, "127.0.0.2");
    assert!(
        client.contains("not valid for name \"127.0.0.2\""),
        "{client}"
    );
}

#[test]
fn the_name_that_is_expected_need_not_be_the_host_that_is_dialled() {
    let mut hosts = Hosts::new();
    hosts.server_name = Some("host1.example.org".to_owned());
    let none = ("no error".to_owned(), "no error".to_owned());
    assert_eq!(refused(&hosts, "10.0.0.9"), none);
    hosts.server_name = Some("host2.example.org".to_owned());
    let (client, _) = refused(&hosts, "127.0.0.1");
    assert!(
        client.contains("not valid for name \"host2.example.org\""),
        "{client}"
    );
    hosts.server_name = Some("no name".to_owned());
    let connected =
        hosts
            .client_terms(Cipher::default())
            .connect(&sockets().0, "127.0.0.1", &[], LIMIT);
    assert_eq!(
        message(connected),
        "`no name` is no host name or IP address that a certificate could be for"
    );
}

#[test]
fn clients_by_name() {
    let mut hosts = with_client(&Leaf {
        common_name: "host2",
        alternative: &["host2.example.org"],
        ..Leaf::default()
    });
    let none = ("no error".to_owned(), "no error".to_owned());
    for pattern in ["host2", "HOST2", "host?", "*.example.org", "*"] {
        hosts.allow = Some(vec!["someone".to_owned(), pattern.to_owned()]);
        assert_eq!(refused(&hosts, "127.0.0.1"), none, "{pattern}");
    }
    for others in [
        vec!["host1*".to_owned(), "example.org".to_owned()],
        Vec::new(),
    ] {
        hosts.allow = Some(others);
        expect(
            &hosts,
            "the server refuses this client: it does not allow the name in CLIENT/client-cert.pem: host2, host2.example.org",
            "refusing the client: no name of its certificate is allowed: host2, host2.example.org",
        );
    }
}

/// As libvirt's clients are, whose certificates have nothing but a common name.
#[test]
fn a_client_without_alternative_names_is_known_by_its_common_name() {
    let mut hosts = with_client(&Leaf {
        common_name: "host2",
        alternative: &[],
        ..Leaf::default()
    });
    hosts.allow = Some(vec!["host2".to_owned()]);
    let (connected, accepted) = meet(
        &hosts.client_terms(Cipher::default()),
        &hosts.server_terms(),
        "127.0.0.1",
    );
    connected.unwrap();
    assert_eq!(accepted.unwrap().0.peer, "host2");
}

#[test]
fn certificates_for_the_other_role() {
    let hosts = with_client(&Leaf {
        purposes: &[Purpose::ServerAuth],
        ..Leaf::default()
    });
    expect(
        &hosts,
        "the server refuses this client: CLIENT/client-cert.pem is not for use by a client (extended key usage)",
        "refusing the client: its certificate cannot be used: certificate does not allow extended key usage for client \
         authentication, allows server authentication",
    );
    let hosts = with_server(&Leaf {
        purposes: &[Purpose::ClientAuth],
        ..Leaf::default()
    });
    expect(
        &hosts,
        "refusing the server: its certificate cannot be used: certificate does not allow extended key usage for server \
         authentication, allows client authentication",
        "the client refuses this server: SERVER/server-cert.pem is not for use by a server (extended key usage)",
    );
}

#[test]
fn certificates_that_have_been_revoked() {
    let hosts = Hosts::new();
    hosts.authority.revoke(hosts.server.path(), 7, 3000);
    expect(
        &hosts,
        "the server refuses this client: CLIENT/client-cert.pem has been revoked",
        "refusing the client: its certificate has been revoked (ca-crl.pem)",
    );
    let hosts = Hosts::new();
    hosts.authority.revoke(hosts.client.path(), 7, 3000);
    expect(
        &hosts,
        "refusing the server: its certificate has been revoked (ca-crl.pem)",
        "the client refuses this server: SERVER/server-cert.pem has been revoked",
    );
}

#[test]
fn a_list_of_others_that_are_revoked() {
    let hosts = Hosts::new();
    hosts.authority.revoke(hosts.server.path(), 8, 3000);
    let none = ("no error".to_owned(), "no error".to_owned());
    assert_eq!(refused(&hosts, "127.0.0.1"), none);
    // Nobody knows what a newer one would say.
    hosts.authority.revoke(hosts.server.path(), 8, 2021);
    expect(
        &hosts,
        "the server refuses this client: it does not trust the authority that signed CLIENT/client-cert.pem, or has no \
         current list of the certificates that were revoked",
        "refusing the client: this host's list of revoked certificates (ca-crl.pem) has expired",
    );
}

/// As while one authority takes the place of another.
#[test]
fn certificate_revoked_by_either_of_two_authorities() {
    let hosts = Hosts::new();
    let authorities = ["old", "new"].map(Authority::named);
    trust_both(&hosts, &authorities);
    let lists = authorities.each_ref().map(|it| it.list(8, 3000));
    fs::write(hosts.server.path().join("ca-crl.pem"), lists.concat()).unwrap();
    for authority in &authorities {
        let (accepted, revoked) = [7, 8]
            .map(|serial| client_of(&hosts, authority, serial))
            .into();
        assert_eq!(accepted, "no error");
        assert_eq!(
            revoked,
            "refusing the client: its certificate has been revoked (ca-crl.pem)"
        );
    }
}

/// Only one of them can have a list: the other's certificates are refused, revoked or not.
#[test]
fn two_authorities_of_one_name() {
    let another_kind = KeyPair::generate_for(&PKCS_ED25519).unwrap();
    for authorities in [
        [Authority::new(), Authority::new()],
        [Authority::new(), Authority::of("authority", another_kind)],
    ] {
        let hosts = Hosts::new();
        trust_both(&hosts, &authorities);
        let lists = authorities.each_ref().map(|it| it.list(8, 3000));
        let [listed, other] = &authorities;
        fs::write(hosts.server.path().join("ca-crl.pem"), &lists[0]).unwrap();
        assert_eq!(client_of(&hosts, listed, 7), "no error");
        assert_eq!(
            client_of(&hosts, listed, 8),
            "refusing the client: its certificate has been revoked (ca-crl.pem)"
        );
        for serial in [7, 8] {
            let said = client_of(&hosts, other, serial);
            assert!(said.starts_with("refusing the client: "), "{said}");
        }
        fs::write(hosts.server.path().join("ca-crl.pem"), lists.concat()).unwrap();
        let terms = hosts.server_security().server_terms(Cipher::default());
        assert!(message(terms).ends_with(TWO_LISTS));
    }
}

const TWO_LISTS: &str =
    "ca-crl.pem: it holds two revocation lists of the same issuer: keep the current one";

fn trust_both(hosts: &Hosts, authorities: &[Authority; 2]) {
    let certificates = authorities.each_ref().map(Authority::pem);
    fs::write(
        hosts.server.path().join("ca-cert.pem"),
        certificates.concat(),
    )
    .unwrap();
}

/// What the server says of a client with a certificate of this number.
fn client_of(hosts: &Hosts, authority: &Authority, serial: u64) -> String {
    let leaf = Leaf {
        serial,
        ..Leaf::default()
    };
    authority.issue(hosts.client.path(), "client", &leaf);
    refused(hosts, "127.0.0.1").1
}

#[test]
fn an_authority_without_a_list() {
    let hosts = Hosts::new();
    let other = Authority::named("other");
    other.revoke(hosts.server.path(), 8, 3000);
    expect(
        &hosts,
        "the server refuses this client: it does not trust the authority that signed CLIENT/client-cert.pem, or has no \
         current list of the certificates that were revoked",
        "refusing the client: ca-crl.pem has no list of revoked certificates of the authority that signed its \
         certificate, or of one above",
    );
}

/// Each has to say that it has not withdrawn the one below.
#[test]
fn authorities_below_others() {
    let hosts = Hosts::new();
    let root = &hosts.authority;
    let middle = root.intermediate(5);
    middle.issue(hosts.client.path(), "client", &Leaf::default());
    let own = hosts.client.path().join("client-cert.pem");
    let chain = fs::read_to_string(&own).unwrap() + &middle.pem();
    fs::write(own, chain).unwrap();
    let said = |lists: &[String]| {
        fs::write(hosts.server.path().join("ca-crl.pem"), lists.concat()).unwrap();
        refused(&hosts, "127.0.0.1").1
    };
    let unknown = "refusing the client: ca-crl.pem has no list of revoked certificates of the authority that signed its \
                   certificate, or of one above";
    let revoked = "refusing the client: its certificate has been revoked (ca-crl.pem)";
    assert_eq!(said(&[middle.list(8, 3000)]), unknown);
    assert_eq!(said(&[root.list(8, 3000)]), unknown);
    assert_eq!(
        said(&[root.list(8, 3000), middle.list(8, 3000)]),
        "no error"
    );
    assert_eq!(said(&[root.list(8, 3000), middle.list(7, 3000)]), revoked);
    assert_eq!(said(&[root.list(5, 3000), middle.list(8, 3000)]), revoked);
}

/// As when a list is replaced by appending the next one: webpki would use the first one only.
#[test]
fn two_lists_of_one_authority_are_refused() {
    let hosts = Hosts::new();
    let list = |serial, until| hosts.authority.list(serial, until);
    for lists in [
        [list(8, 3000), list(7, 3000)],
        [list(8, 2021), list(9, 3000)],
    ] {
        fs::write(hosts.server.path().join("ca-crl.pem"), lists.concat()).unwrap();
        let terms = hosts.server_security().server_terms(Cipher::default());
        assert!(message(terms).ends_with(TWO_LISTS));
    }
}

#[test]
fn lists_that_cannot_be_read_to_their_end() {
    let hosts = Hosts::new();
    let list = hosts.authority.list(8, 3000);
    let said = |text: String| {
        fs::write(hosts.server.path().join("ca-crl.pem"), text).unwrap();
        let directory = hosts.server.path().display().to_string();
        let terms = hosts.server_security().server_terms(Cipher::default());
        message(terms).replace(&directory, "DIR")
    };
    let (begin, end) = list.split_at(list.len() / 2);
    let other =
        "cannot use DIR/ca-crl.pem: it holds something else than revocation lists in PEM format";
    for text in [
        // Two files, of which the first ends without a line break.
        format!("{}{list}", list.trim_end()),
        format!("{list}garbage"),
        format!("{list}{end}"),
        format!("{list}{}", hosts.authority.pem()),
    ] {
        assert_eq!(said(text), other);
    }
    let none = "cannot use DIR/ca-crl.pem: it holds no revocation list in PEM format";
    for text in [String::new(), format!("{list}{begin}"), begin.to_owned()] {
        assert_eq!(said(text), none);
    }
    let malformed = "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n";
    let malformed = said(format!("{list}{malformed}"));
    let begin = "cannot use DIR/ca-crl.pem: it holds a malformed revocation list: ";
    assert!(malformed.starts_with(begin), "{malformed}");
    // As openssl and certtool write it.
    let other = Authority::named("other").list(8, 3000);
    assert_eq!(
        said(format!(
            "A list\n  of none\n{list}\n\nAnother\n{other} \r\n\n"
        )),
        "no error"
    );
}

#[test]
fn a_client_without_certificate() {
    let hosts = Hosts::new();
    let mut roots = rustls::RootCertStore::empty();
    let authority = hosts.authority.pem();
    let authority = rustls::pki_types::pem::PemObject::from_pem_slice(authority.as_bytes());
    roots.add(authority.unwrap()).unwrap();
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let mut config = ClientConfig::builder_with_provider(provider.into())
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    let name = "127.0.0.1".try_into().unwrap();
    let client = ClientConnection::new(config.into(), name).unwrap();
    let (near, far) = sockets();
    let server = hosts.server_terms();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(move || server.accept(&far, LIMIT));
        let shown = Shown::Certificate {
            path: "none".into(),
            names: Vec::new(),
        };
        let explain = |error| TlsError::of(error, End::Server, None, &shown);
        let client = Connection::Client(client);
        assert_eq!(
            message(handshake::run(
                client,
                &near,
                &[],
                LIMIT,
                End::Server,
                &explain
            )),
            "the server refuses this client: it requires a certificate"
        );
        assert_eq!(
            message(accepted.join().unwrap()),
            "refusing the client: it has no certificate"
        );
    });
}

#[test]
fn files_that_cannot_be_used() {
    fn attempt(change: impl FnOnce(&Path)) -> String {
        let hosts = Hosts::new();
        change(hosts.server.path());
        let directory = hosts.server.path().display().to_string();
        let terms = hosts.server_security().server_terms(Cipher::default());
        message(terms).replace(&directory, "DIR")
    }
    for file in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
        let missing = attempt(|directory| fs::remove_file(directory.join(file)).unwrap());
        let expected = format!("cannot use DIR/{file}: No such file or directory (os error 2)");
        assert_eq!(missing, expected);
        let garbage = attempt(|directory| fs::write(directory.join(file), "garbage").unwrap());
        let begin = format!("cannot use DIR/{file}: it holds no ");
        assert!(garbage.starts_with(&begin), "{garbage}");
        let large =
            attempt(|directory| fs::write(directory.join(file), vec![b'a'; 2 << 20]).unwrap());
        assert_eq!(
            large,
            format!("cannot use DIR/{file}: it has more than 1048576 bytes")
        );
    }
    let garbage = attempt(|directory| fs::write(directory.join("ca-crl.pem"), "garbage").unwrap());
    assert_eq!(
        garbage,
        "cannot use DIR/ca-crl.pem: it holds no revocation list in PEM format"
    );
    let other = attempt(|directory| {
        Authority::new().issue(directory, "other", &Leaf::default());
        fs::rename(
            directory.join("other-key.pem"),
            directory.join("server-key.pem"),
        )
        .unwrap();
    });
    assert_eq!(
        other,
        "cannot use DIR/server-key.pem: the key in it does not belong to the certificate beside it"
    );
    let malformed = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let malformed =
        attempt(|directory| fs::write(directory.join("ca-cert.pem"), malformed).unwrap());
    assert!(
        malformed.starts_with("cannot use DIR/ca-cert.pem: it holds a malformed certificate: "),
        "{malformed}"
    );
}
