//! Handshakes that succeed, and peers that are no good ones from the first byte on.

use std::{
    io::{self, Read as _, Write as _},
    mem,
    net::TcpListener,
    thread,
    time::Duration,
};

use super::{
    LIMIT,
    authority::{Hosts, Leaf},
    meet, message, sockets,
};
use crate::{
    Address, Socket, dial,
    tls::{Cipher, Keys, Security, TlsError},
};

#[test]
fn both_ends_know_each_other_and_share_a_secret() {
    for (cipher, name) in [
        (Cipher::Aes128Gcm, "AES-128-GCM"),
        (Cipher::Aes256Gcm, "AES-256-GCM"),
        (Cipher::Chacha20Poly1305, "ChaCha20-Poly1305"),
    ] {
        let hosts = Hosts::new();
        let client = Leaf {
            common_name: "host2",
            ..Leaf::default()
        };
        hosts
            .authority
            .issue(hosts.client.path(), "client", &client);
        let (client, server) = (hosts.client_terms(cipher), hosts.server_terms());
        let (connected, accepted) = meet(&client, &server, "127.0.0.1");
        let ((connected, near), (accepted, far)) = (connected.unwrap(), accepted.unwrap());
        assert_eq!((connected.cipher, accepted.cipher), (name, name));
        assert_eq!(connected.binding, accepted.binding);
        assert_eq!(
            (&connected.peer[..], &accepted.peer[..]),
            ("host1", "host2")
        );
        for (from, to, near, far) in [
            (connected.sealer, accepted.opener, &near, &far),
            (accepted.sealer, connected.opener, &far, &near),
        ] {
            let (mut from, mut to, mut read) = (from, to, [0; 9]);
            from.send(near, &[b"a ", b"mes", b"sage"], &mut |_| Ok(()))
                .unwrap();
            assert_eq!(to.read(far, &mut read).unwrap(), 9);
            assert_eq!(&read, b"a message");
            from.close(near, &mut |_| Ok(())).unwrap();
            assert_eq!(to.read(far, &mut read).unwrap(), 0);
            assert_eq!(to.read(far, &mut read).unwrap(), 0);
        }
        let (another, _) = meet(&client, &server, "127.0.0.1");
        assert_ne!(another.unwrap().0.binding, accepted.binding);
    }
}

#[test]
fn certificates_are_read_anew_for_the_next_session() {
    let hosts = Hosts::new();
    let server = hosts.server_terms();
    hosts.trust(&hosts.server, &super::authority::Authority::new());
    let client = hosts.client_terms(Cipher::default());
    assert!(meet(&client, &server, "127.0.0.1").0.is_ok());
    assert!(meet(&client, &hosts.server_terms(), "127.0.0.1").0.is_err());
}

/// The end of the client's handshake is kept back until the bytes behind it have come, so nothing of the server answers it.
#[test]
fn first_bytes_go_with_the_end_of_the_handshake() {
    let hosts = Hosts::new();
    let ((near, client), (server, far)) = (sockets(), sockets());
    thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let mut secured = hosts.server_terms().accept(&far, LIMIT).unwrap();
            let mut first = [0; 16];
            let read = secured.opener.read(&far, &mut first).unwrap();
            first[..read].to_vec()
        });
        let connected = scope.spawn(|| {
            let client = hosts.client_terms(Cipher::default());
            client.connect(&near, "127.0.0.1", b"first", LIMIT).is_ok()
        });
        scope.spawn(|| io::copy(&mut &server, &mut &client));
        let mut kept = Vec::new();
        // Encrypted records: the certificate with the end of the handshake, and the bytes.
        let mut encrypted = 0;
        while encrypted < 2 {
            let mut header = [0; 5];
            (&client).read_exact(&mut header).unwrap();
            let mut body = vec![0; usize::from(u16::from_be_bytes([header[3], header[4]]))];
            (&client).read_exact(&mut body).unwrap();
            encrypted += usize::from(header[0] == 23);
            kept.extend([&header[..], &body].concat());
            if encrypted == 0 {
                (&mut &server).write_all(&mem::take(&mut kept)).unwrap();
            }
        }
        (&mut &server).write_all(&kept).unwrap();
        assert_eq!(accepted.join().unwrap(), b"first");
        assert!(connected.join().unwrap());
        server.shut_down();
    });
}

#[test]
fn a_peer_that_speaks_another_language_is_named_as_such() {
    let hosts = Hosts::new();
    for bytes in [&b"VAMOOSE link\n........."[..], &[0; 64]] {
        let (near, far) = sockets();
        (&mut &near).write_all(bytes).unwrap();
        let accepted = hosts.server_terms().accept(&far, LIMIT);
        assert!(matches!(accepted, Err(TlsError::NotTls { .. })));
        assert_eq!(
            message(accepted),
            "the client does not speak TLS: it is configured without, or it is not Vamoose"
        );
        let (near, far) = sockets();
        (&mut &far).write_all(bytes).unwrap();
        let connected = hosts
            .client_terms(Cipher::default())
            .connect(&near, "host1", &[], LIMIT);
        assert_eq!(
            message(connected),
            "the server does not speak TLS: it is configured without, or it is not Vamoose"
        );
    }
}

#[test]
fn a_peer_that_goes_is_named_as_such() {
    let hosts = Hosts::new();
    let (near, far) = sockets();
    drop(near);
    assert_eq!(
        message(hosts.server_terms().accept(&far, LIMIT)),
        "the TLS handshake with the client failed: the connection was closed"
    );
    let (near, far) = sockets();
    let server = thread::spawn(move || (&mut &far).read(&mut [0; 10]));
    let connected = hosts
        .client_terms(Cipher::default())
        .connect(&near, "host1", &[], LIMIT);
    server.join().unwrap().unwrap();
    assert_eq!(
        message(connected),
        "the TLS handshake with the server failed: Connection reset by peer (os error 104)"
    );
}

#[test]
fn a_peer_that_stalls_has_a_deadline() {
    let hosts = Hosts::new();
    let timeout = Duration::from_millis(20);
    for sent in [&[][..], &[22, 3, 1], &[22, 3, 1, 2, 0, 1, 0, 1]] {
        let (near, far) = sockets();
        (&mut &near).write_all(sent).unwrap();
        let accepted = hosts.server_terms().accept(&far, timeout);
        assert_eq!(
            message(accepted),
            "the TLS handshake with the client failed: it did not end within 0.02 s"
        );
        let (near, far) = sockets();
        (&mut &far).write_all(sent).unwrap();
        let connected = hosts
            .client_terms(Cipher::default())
            .connect(&near, "host1", &[], timeout);
        assert_eq!(
            message(connected),
            "the TLS handshake with the server failed: it did not end within 0.02 s"
        );
    }
}

#[test]
fn a_handshake_has_a_limit_of_bytes() {
    let hosts = Hosts::new();
    let (near, far) = sockets();
    let endless = thread::spawn(move || {
        // A message of 64 KiB, which is never whole.
        let mut first = vec![22, 3, 3, 0x40, 0, 1, 0, 0xff, 0xf0];
        first.resize(5 + 0x4000, 0);
        (&mut &near).write_all(&first)?;
        let mut next = vec![22, 3, 3, 0x40, 0];
        next.resize(5 + 0x4000, 0);
        loop {
            (&mut &near).write_all(&next)?;
        }
    });
    let accepted = hosts.server_terms().accept(&far, LIMIT);
    assert_eq!(
        message(accepted),
        "the TLS handshake with the client failed: more than 65536 bytes came before its end"
    );
    drop(far);
    let stopped: io::Result<()> = endless.join().unwrap();
    stopped.unwrap_err();
}

#[test]
fn without_security_there_are_no_terms() {
    let none = Security::Insecure;
    assert!(matches!(none.client_terms(Cipher::default()), Ok(None)));
    assert!(matches!(none.server_terms(Cipher::default()), Ok(None)));
}

/// As over the network, where a connection that is closed with unread bytes is reset.
#[test]
fn a_refusal_arrives_over_tcp() {
    let mut hosts = Hosts::new();
    hosts.allow = Some(vec!["nobody".to_owned()]);
    for _ in 0..20 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = Address::Tcp {
            host: "127.0.0.1".to_owned(),
            port,
        };
        let server = hosts.server_terms();
        let client = hosts.client_terms(Cipher::default());
        thread::scope(|scope| {
            scope.spawn(move || {
                let far = Socket::Tcp(listener.accept().unwrap().0);
                assert!(server.accept(&far, LIMIT).is_err());
            });
            let near = dial(&address, LIMIT).unwrap();
            let refused = message(client.connect(&near, "127.0.0.1", &[], LIMIT));
            assert!(refused.contains("it does not allow the name"), "{refused}");
        });
    }
}

#[test]
fn certificates_and_keys_do_not_meet() {
    let hosts = Hosts::new();
    let directory = tempfile::TempDir::new().unwrap();
    let public = Keys::generate(directory.path()).unwrap();
    let keys = Security::Keys(Keys {
        directory: directory.path().to_owned(),
        trusted: Some(vec![public]),
    });
    let (connected, accepted) = meet(
        &keys.client_terms(Cipher::default()).unwrap().unwrap(),
        &hosts.server_terms(),
        "127.0.0.1",
    );
    for (end, peer) in [
        (message(connected), "server"),
        (message(accepted), "client"),
    ] {
        let expected =
            format!("this end and the {peer} do not match: one uses certificates, the other keys");
        assert_eq!(end, expected);
    }
    let (connected, accepted) = meet(
        &hosts.client_terms(Cipher::default()),
        &keys.server_terms(Cipher::default()).unwrap().unwrap(),
        "127.0.0.1",
    );
    for end in [message(connected), message(accepted)] {
        assert!(
            end.ends_with("one uses certificates, the other keys"),
            "{end}"
        );
    }
}
