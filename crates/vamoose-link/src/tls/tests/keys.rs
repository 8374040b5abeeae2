//! Keys without certificates: files, and ends that do not know each other.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc};

use rustls::sign::CertifiedKey;
use tempfile::TempDir;

use super::{meet, message};
use crate::tls::{
    Cipher, Keys, OneTimeKey, PublicKey, PublicKeyError, Security, TlsError,
    keys::{Trusted, parse_trusted},
};

struct Host {
    directory: TempDir,
    public: PublicKey,
}

impl Host {
    fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let public = Keys::generate(directory.path()).unwrap();
        Self { directory, public }
    }

    fn knows(&self, key: PublicKey) {
        self.lists(&format!("# friends\n\n{key} a comment\n"));
    }

    fn lists(&self, text: &str) {
        fs::write(Keys::trusted_file(self.directory.path()), text).unwrap();
    }

    fn security(&self, trusted: &[PublicKey]) -> Security {
        Security::Keys(Keys {
            directory: self.directory.path().to_owned(),
            trusted: (!trusted.is_empty()).then(|| trusted.to_vec()),
        })
    }
}

/// As a gateway is, all of whose peers have been taken out of its configuration.
#[test]
fn empty_list_of_trusted_keys_overrides_the_file() {
    let (client, server) = (Host::new(), Host::new());
    server.knows(client.public);
    let nobody = Security::Keys(Keys {
        directory: server.directory.path().to_owned(),
        trusted: Some(Vec::new()),
    });
    let (_, at_server) = try_both(&client.security(&[server.public]), &nobody);
    let key = client.public;
    assert_eq!(
        at_server,
        format!("refusing the client: its key is not trusted: {key}")
    );
}

/// What both ends say.
fn try_both(client: &Security, server: &Security) -> (String, String) {
    let (connected, accepted) = meet(
        &client.client_terms(Cipher::default()).unwrap().unwrap(),
        &server.server_terms(Cipher::default()).unwrap().unwrap(),
        "any host",
    );
    (message(connected), message(accepted))
}

#[test]
fn hosts_that_know_each_other() {
    let (client, server) = (Host::new(), Host::new());
    client.knows(server.public);
    let (connected, accepted) = meet(
        &client
            .security(&[])
            .client_terms(Cipher::default())
            .unwrap()
            .unwrap(),
        &server
            .security(&[client.public])
            .server_terms(Cipher::default())
            .unwrap()
            .unwrap(),
        "any host",
    );
    let (connected, accepted) = (connected.unwrap().0, accepted.unwrap().0);
    assert_eq!(connected.peer, server.public.to_string());
    assert_eq!(accepted.peer, client.public.to_string());
    assert_eq!(connected.binding, accepted.binding);
}

#[test]
fn keys_for_once_are_those_of_this_end_and_no_other() {
    let [client, server, other] = [(); 3].map(|()| OneTimeKey::generate().unwrap());
    let once = |own: &OneTimeKey, peer: &OneTimeKey| Security::OneTime {
        own: own.clone(),
        peer: peer.public(),
    };
    let (connected, accepted) = meet(
        &once(&client, &server)
            .client_terms(Cipher::default())
            .unwrap()
            .unwrap(),
        &once(&server, &client)
            .server_terms(Cipher::default())
            .unwrap()
            .unwrap(),
        "any host",
    );
    assert_eq!(connected.unwrap().0.peer, server.public().to_string());
    assert_eq!(accepted.unwrap().0.peer, client.public().to_string());
    let (_, at_server) = try_both(&once(&client, &server), &once(&server, &other));
    let key = client.public();
    assert_eq!(
        at_server,
        format!("refusing the client: its key is not trusted: {key}")
    );
}

#[test]
fn a_client_that_is_not_known() {
    let (client, server, other) = (Host::new(), Host::new(), Host::new());
    let (at_client, at_server) = try_both(
        &client.security(&[server.public]),
        &server.security(&[other.public]),
    );
    let key = client.public;
    assert_eq!(
        at_client,
        format!("the server refuses this client: it does not trust the key of this host: {key}")
    );
    assert_eq!(
        at_server,
        format!("refusing the client: its key is not trusted: {key}")
    );
}

#[test]
fn a_server_that_is_not_known() {
    let (client, server, other) = (Host::new(), Host::new(), Host::new());
    let (at_client, at_server) = try_both(
        &client.security(&[other.public]),
        &server.security(&[client.public]),
    );
    let key = server.public;
    assert_eq!(
        at_client,
        format!("refusing the server: its key is not trusted: {key}")
    );
    assert_eq!(
        at_server,
        format!("the client refuses this server: it does not trust the key of this host: {key}")
    );
}

/// Keys that are given count alone: who is trusted otherwise cannot stand in for their host.
#[test]
fn keys_that_are_given_take_the_place_of_the_list() {
    let (client, server, other) = (Host::new(), Host::new(), Host::new());
    client.knows(other.public);
    other.knows(client.public);
    let (at_client, _) = try_both(&client.security(&[server.public]), &other.security(&[]));
    let key = other.public;
    assert_eq!(
        at_client,
        format!("refusing the server: its key is not trusted: {key}")
    );
    let (_, at_server) = try_both(&other.security(&[]), &client.security(&[server.public]));
    assert_eq!(
        at_server,
        format!("refusing the client: its key is not trusted: {key}")
    );
}

/// As known_hosts has them: who is trusted as one host cannot stand in for another.
#[test]
fn keys_of_hosts_that_are_named() {
    let (client, server, other) = (Host::new(), Host::new(), Host::new());
    let trusts = |lines: &[String]| {
        client.lists(&lines.join("\n"));
        client
            .security(&[])
            .client_terms(Cipher::default())
            .unwrap()
            .unwrap()
    };
    let (key, others) = (server.public, other.public);
    let accepts = server.security(&[client.public]);
    let accepts = accepts.server_terms(Cipher::default()).unwrap().unwrap();
    for (lines, host, is_trusted) in [
        (vec![format!("{key}")], "kvm2", true),
        (vec![format!("{key} hosts=kvm2,192.0.2.20")], "kvm2", true),
        (vec![format!("{key} hosts=kvm2,192.0.2.20")], "KVM2", true),
        (
            vec![format!("{key} hosts=kvm2,192.0.2.20")],
            "192.0.2.20",
            true,
        ),
        (
            vec![format!("{key} hosts=kvm2,192.0.2.20")],
            "192.0.2.2",
            false,
        ),
        (vec![format!("{key} hosts=kvm*")], "kvm3", true),
        (vec![format!("{key} hosts=fd00:0::2")], "fd00::2", true),
        (vec![format!("{key} hosts=kvm3")], "kvm2", false),
        // A host that is named has its own keys alone.
        (
            vec![format!("{others} hosts=kvm2"), format!("{key}")],
            "kvm2",
            false,
        ),
        (
            vec![format!("{others} hosts=kvm2"), format!("{key}")],
            "kvm3",
            true,
        ),
        (
            vec![format!("{others} hosts=kvm2"), format!("{key} hosts=kvm2")],
            "kvm2",
            true,
        ),
    ] {
        let (connected, _) = meet(&trusts(&lines), &accepts, host);
        let expected = match is_trusted {
            true => "no error".to_owned(),
            false => {
                format!("refusing the server: its key is not trusted as that of `{host}`: {key}")
            }
        };
        assert_eq!(message(connected), expected, "{lines:?} {host}");
    }
    // Who dials may come from anywhere.
    server.lists(&format!("{} hosts=kvm1", client.public));
    let (_, accepted) = try_both(&client.security(&[key]), &server.security(&[]));
    assert_eq!(accepted, "no error");
}

/// A public key is no secret: showing another one's is not enough.
#[test]
fn a_host_that_shows_a_key_which_is_not_its_own() {
    let (client, server, thief) = (Host::new(), Host::new(), Host::new());
    let own = Keys::public_key(thief.directory.path()).unwrap();
    assert_eq!(own, thief.public);
    let mut terms = thief
        .security(&[server.public])
        .client_terms(Cipher::default())
        .unwrap()
        .unwrap();
    let other = client.security(&[server.public]);
    let other = other.client_terms(Cipher::default()).unwrap().unwrap();
    let shown = other.0.certified.cert.clone();
    terms.0.certified = Arc::new(CertifiedKey::new(shown, terms.0.certified.key.clone()));
    let server = server.security(&[client.public]);
    let (connected, accepted) = meet(
        &terms,
        &server.server_terms(Cipher::default()).unwrap().unwrap(),
        "any host",
    );
    assert!(message(accepted).contains("certificate"));
    assert!(matches!(connected, Err(TlsError::RefusedByPeer { .. })));
}

#[test]
fn a_key_is_made_once_and_for_its_owner_only() {
    let parent = TempDir::new().unwrap();
    let directory = parent.path().join("a/b");
    let public = Keys::generate(&directory).unwrap();
    assert_eq!(Keys::public_key(&directory).unwrap(), public);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&directory), 0o700);
    assert_eq!(mode(&directory.join("key")), 0o600);
    // RFC 7468: lines of base64 have at most 64 characters.
    let pem = fs::read_to_string(directory.join("key")).unwrap();
    assert!(pem.lines().all(|line| line.len() <= 64), "{pem}");
    let again = Keys::generate(&directory).map(|_| ());
    assert!(message(again).ends_with("File exists (os error 17)"));
    assert_eq!(Keys::public_key(&directory).unwrap(), public);
    // Nothing else is left.
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
}

#[test]
fn keys_that_cannot_be_used() {
    let host = Host::new();
    let path = host.directory.path().join("key");
    let said = || {
        let text = message(Keys::public_key(host.directory.path()));
        text.replace(&host.directory.path().display().to_string(), "DIR")
    };
    let set_mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    for mode in [0o640, 0o604, 0o620] {
        set_mode(mode);
        let expected = format!(
            "cannot use DIR/key: other users can read it (mode {mode:04o}, 0600 is needed)"
        );
        assert_eq!(said(), expected);
    }
    set_mode(0o400);
    assert_eq!(said(), "no error");
    fs::remove_file(&path).unwrap();
    assert_eq!(
        said(),
        "cannot use DIR/key: No such file or directory (os error 2)"
    );
    for garbage in [
        "",
        "garbage",
        "-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----\n",
    ] {
        fs::write(&path, garbage).unwrap();
        set_mode(0o600);
        assert_eq!(
            said(),
            "cannot use DIR/key: it holds no Ed25519 private key in PEM format"
        );
    }
    let another_kind = rcgen::KeyPair::generate().unwrap().serialize_pem();
    let malformed = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
    for text in [&another_kind[..], malformed] {
        fs::write(&path, text).unwrap();
        let begin = "cannot use DIR/key: it holds a malformed Ed25519 private key: ";
        assert!(said().starts_with(begin), "{}", said());
    }
}

/// As `openssl genpkey -algorithm ed25519` writes it.
#[test]
fn a_key_of_another_tool_is_a_key() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("key");
    // From RFC 8410, 10.3.
    let pem = "-----BEGIN PRIVATE KEY-----\n\
               MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n\
               -----END PRIVATE KEY-----\n";
    fs::write(&path, pem).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(
        Keys::public_key(directory.path()).unwrap().to_string(),
        "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE="
    );
}

#[test]
fn lists_of_keys() {
    let key = Host::new().public;
    let text = key.to_string();
    let unpadded = text.trim_end_matches('=');
    let list = format!("{text}\n# {text}\n\n  {unpadded}\tof host1 \r\n{text}");
    let trusted = parse_trusted(list.as_bytes()).unwrap();
    assert_eq!(trusted, [(); 3].map(|()| Trusted::from(key)));
    assert_eq!(parse_trusted(b"").unwrap(), []);
    let list = format!("{text} hosts=kvm2,192.0.2.*  a comment\n{text} of host=kvm2\n");
    let hosts = ["kvm2", "192.0.2.*"].map(str::to_owned).to_vec();
    let named = Trusted { key, hosts };
    assert_eq!(parse_trusted(list.as_bytes()).unwrap(), [named, key.into()]);
    for line in [
        &b"ssh-ed25519 AAAA"[..],
        b"ed25519:?",
        b"ed25519:\xff",
        b"ed25519:AAAA",
        b"ed25519:",
    ] {
        let list = [b"# one line before\n", line].concat();
        let fault = parse_trusted(&list).unwrap_err();
        assert_eq!(fault.to_string(), format!("line 2: {PublicKeyError}"));
    }
    // What narrows a key down and is not understood.
    for (rest, expected) in [
        ("hosts=", "hosts= names no host"),
        ("hosts=a,,b", "hosts= names no host"),
        (
            "of kvm2 hosts=kvm2",
            "hosts= belongs directly behind the key, once",
        ),
        (
            "hosts=kvm2 hosts=kvm3",
            "hosts= belongs directly behind the key, once",
        ),
        (
            "host=a",
            "`host=a` is not known: behind a key stands hosts=NAME,NAME... or a comment",
        ),
    ] {
        let fault = parse_trusted(format!("{text} {rest}").as_bytes()).unwrap_err();
        assert_eq!(fault.to_string(), format!("line 1: {expected}"));
    }
}

#[test]
fn a_list_that_others_can_write_is_not_relied_on() {
    let (host, other) = (Host::new(), Host::new());
    host.knows(other.public);
    let path = Keys::trusted_file(host.directory.path());
    let said = |mode| {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        message(host.security(&[]).server_terms(Cipher::default()))
    };
    for mode in [0o600, 0o644, 0o444] {
        assert_eq!(said(mode), "no error");
    }
    for mode in [0o664, 0o646] {
        let end = format!("trusted: other users can write it (mode {mode:04o}, 0644 at most)");
        assert!(said(mode).ends_with(&end));
    }
}

#[test]
fn a_list_may_be_missing_if_keys_are_given() {
    let (host, other) = (Host::new(), Host::new());
    let directory = host.directory.path().display().to_string();
    let said = |security: &Security| {
        let terms = security.client_terms(Cipher::default());
        message(terms).replace(&directory, "DIR")
    };
    let nobody = "cannot use DIR/trusted: no key is trusted";
    assert_eq!(said(&host.security(&[])), nobody);
    assert_eq!(said(&host.security(&[other.public])), "no error");
    fs::write(Keys::trusted_file(host.directory.path()), "# nobody yet\n").unwrap();
    assert_eq!(said(&host.security(&[])), nobody);
    fs::write(Keys::trusted_file(host.directory.path()), "garbage\n").unwrap();
    assert_eq!(
        said(&host.security(&[])),
        "cannot use DIR/trusted: line 1: a public key is `ed25519:` and 32 bytes in base64"
    );
    assert_eq!(said(&host.security(&[other.public])), "no error");
}
