//! Our record layer at one end, rustls' own at the other.

use std::{
    io::{self, Read as _, Write as _},
    thread,
};

use rustls::{ClientConnection, ServerConnection};

use super::{LIMIT, authority::Hosts, sockets};
use crate::{
    Socket,
    tls::{Cipher, Opener, Sealer, verifier::RefusalSlot},
};

const CIPHERS: [Cipher; 3] = [
    Cipher::Aes128Gcm,
    Cipher::Aes256Gcm,
    Cipher::Chacha20Poly1305,
];
const LEN: usize = 3_000_000;

fn go_on(_taken: usize) -> io::Result<()> {
    Ok(())
}

fn message(seed: usize) -> Vec<u8> {
    (seed..seed + LEN)
        .map(|index| (index % 251).to_le_bytes()[0])
        .collect()
}

/// Sends one message, receives another, and says good-bye.
fn ours(sealer: &mut Sealer, opener: &mut Opener, socket: &Socket) {
    let sent = message(1);
    sealer.send(socket, &[b"head", &sent], &mut go_on).unwrap();
    sealer.close(socket, &mut go_on).unwrap();
    let (mut read, mut out) = (Vec::new(), vec![0; 100_000]);
    loop {
        match opener.read(socket, &mut out).unwrap() {
            0 => break,
            bytes => read.extend_from_slice(&out[..bytes]),
        }
    }
    assert!(read == message(2));
}

/// The other side of it, by rustls.
fn theirs(mut stream: impl io::Read + io::Write) {
    let mut read = Vec::new();
    stream.read_to_end(&mut read).unwrap();
    assert!(read == [b"head", &message(1)[..]].concat());
    stream.write_all(&message(2)).unwrap();
    stream.flush().unwrap();
}

#[test]
fn with_a_server_of_rustls() {
    for cipher in CIPHERS {
        let hosts = Hosts::new();
        let (near, far) = sockets();
        let config = hosts
            .server_terms()
            .config(&RefusalSlot::default())
            .unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut connection = ServerConnection::new(config.into()).unwrap();
                let mut socket = &far;
                let mut stream = rustls::Stream::new(&mut connection, &mut socket);
                // The confirmation.
                stream.write_all(&[1]).unwrap();
                stream.flush().unwrap();
                theirs(&mut stream);
                connection.send_close_notify();
                while connection.wants_write() {
                    connection.write_tls(&mut socket).unwrap();
                }
            });
            let client = hosts.client_terms(cipher);
            let mut secured = client.connect(&near, "127.0.0.1", &[], LIMIT).unwrap();
            ours(&mut secured.sealer, &mut secured.opener, &near);
        });
    }
}

#[test]
fn with_a_client_of_rustls() {
    for cipher in CIPHERS {
        let hosts = Hosts::new();
        let (near, far) = sockets();
        let client = hosts.client_terms(cipher);
        let config = client.config("127.0.0.1", &RefusalSlot::default()).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                let name = "127.0.0.1".try_into().unwrap();
                let mut connection = ClientConnection::new(config.into(), name).unwrap();
                let mut socket = &near;
                let mut stream = rustls::Stream::new(&mut connection, &mut socket);
                let mut confirmation = [0];
                stream.read_exact(&mut confirmation).unwrap();
                assert_eq!(confirmation, [1]);
                theirs(&mut stream);
                connection.send_close_notify();
                while connection.wants_write() {
                    connection.write_tls(&mut socket).unwrap();
                }
            });
            let mut secured = hosts.server_terms().accept(&far, LIMIT).unwrap();
            ours(&mut secured.sealer, &mut secured.opener, &far);
        });
    }
}

/// Keys are changed by a new connection; a peer that wants it otherwise is none of ours.
#[test]
fn a_change_of_keys_is_refused() {
    let hosts = Hosts::new();
    let (near, far) = sockets();
    let client = hosts.client_terms(Cipher::default());
    let config = client.config("127.0.0.1", &RefusalSlot::default()).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let name = "127.0.0.1".try_into().unwrap();
            let mut connection = ClientConnection::new(config.into(), name).unwrap();
            let mut socket = &near;
            let mut stream = rustls::Stream::new(&mut connection, &mut socket);
            stream.read_exact(&mut [0]).unwrap();
            connection.refresh_traffic_keys().unwrap();
            while connection.wants_write() {
                connection.write_tls(&mut socket).unwrap();
            }
        });
        let mut secured = hosts.server_terms().accept(&far, LIMIT).unwrap();
        let refused = secured.opener.read(&far, &mut [0; 10]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    });
}
