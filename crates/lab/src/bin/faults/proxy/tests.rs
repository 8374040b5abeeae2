use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;

use super::message::tests::{frame, opening};
use super::*;

/// Of control connections, and of others.
const CONTROL: u32 = 0;
const PAGES: u32 = 1;

fn commit() -> Vec<u8> {
    frame(24, b"{\"request\":\"commit\"}\n")
}

/// A proxy, a connection through it, and the server's end of that.
fn connected(stream: u32) -> (Proxy, TcpStream, TcpStream, TcpListener) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = Proxy::new(server.local_addr().unwrap()).unwrap();
    let near = connect(&proxy, &opening(stream)).unwrap();
    let mut far = server.accept().unwrap().0;
    expect(&mut far, &opening(stream));
    (proxy, near, far, server)
}

fn connect(proxy: &Proxy, opening: &[u8]) -> io::Result<TcpStream> {
    let address = proxy.address();
    let mut near = TcpStream::connect(address.trim_start_matches("tcp:"))?;
    near.write_all(opening)?;
    Ok(near)
}

fn expect(stream: &mut TcpStream, expected: &[u8]) {
    let mut read = vec![0; expected.len()];
    stream.read_exact(&mut read).unwrap();
    assert_eq!(read, expected);
}

/// Nothing comes for a moment.
fn expect_nothing(stream: &mut TcpStream) {
    stream
        .set_read_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    stream.set_read_timeout(None).unwrap();
}

#[test]
fn a_strike_comes_before_its_message_and_another_behind_it() {
    let (proxy, mut near, mut far, _server) = connected(CONTROL);
    let (send, struck) = mpsc::channel();
    for (point, name) in [
        (Point::After("request:commit"), "after"),
        (Point::Before("request:commit"), "before"),
    ] {
        let send = send.clone();
        proxy
            .link()
            .arm(point, Box::new(move || send.send(name).unwrap()));
    }
    near.write_all(&commit()).unwrap();
    expect(&mut far, &commit());
    assert_eq!(
        [struck.recv().unwrap(), struck.recv().unwrap()],
        ["before", "after"]
    );
    let answer = frame(0, b"{\"answer\":\"running\"}\n");
    // The server's part of the handshake comes first.
    let answer = [&[0; 112][..], &answer].concat();
    far.write_all(&answer).unwrap();
    expect(&mut near, &answer);
    let words: Vec<_> = proxy
        .link()
        .heard()
        .into_iter()
        .map(|heard| heard.word)
        .collect();
    assert_eq!(words, ["request:commit", "answer:running"]);
}

#[test]
fn a_strike_at_a_byte_comes_there() {
    let (proxy, mut near, mut far, _server) = connected(PAGES);
    let (send, struck) = mpsc::channel();
    let link = proxy.link().clone();
    let strike = move || {
        send.send(link.bytes()).unwrap();
        link.cut(Which::Data, Cut::Reset);
    };
    proxy.link().arm(Point::Bytes(2), Box::new(strike));
    let _ = near.write_all(b"more of them");
    assert_eq!(struck.recv().unwrap(), 2);
    let mut rest = Vec::new();
    let _ = far.read_to_end(&mut rest);
    // A reset may overtake what was written before it.
    assert!(b"mo".starts_with(&rest[..]), "{rest:?}");
}

#[test]
fn silence_holds_bytes_back_and_a_hole_swallows_them() {
    let (proxy, mut near, mut far, _server) = connected(CONTROL);
    proxy.link().silence(true, false);
    near.write_all(&commit()).unwrap();
    expect_nothing(&mut far);
    far.write_all(&[0; 112]).unwrap();
    expect(&mut near, &[0; 112]);
    proxy.link().repair();
    expect(&mut far, &commit());
    proxy.link().swallow(Way::There);
    near.write_all(&commit()).unwrap();
    expect_nothing(&mut far);
    proxy.link().repair();
    // What is missing cannot be made good.
    assert_eq!(
        far.read(&mut [0]).unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
}

#[test]
fn cuts_of_both_kinds_reach_both_ends() {
    let (proxy, mut near, mut far, _server) = connected(CONTROL);
    proxy.link().cut(Which::Data, Cut::Reset);
    expect_nothing(&mut far);
    proxy.link().cut(Which::Control, Cut::Finished);
    assert_eq!(
        (near.read(&mut [0]).unwrap(), far.read(&mut [0]).unwrap()),
        (0, 0)
    );
    let (proxy, mut near, mut far, _server) = connected(CONTROL);
    proxy.link().cut(Which::All, Cut::Reset);
    for end in [&mut near, &mut far] {
        assert_eq!(
            end.read(&mut [0]).unwrap_err().kind(),
            io::ErrorKind::ConnectionReset
        );
    }
}

#[test]
fn refused_connections_and_then_others() {
    let (proxy, _near, _far, server) = connected(CONTROL);
    proxy.link().refuse();
    let limit = std::time::Instant::now() + Duration::from_secs(10);
    let refused = loop {
        match connect(&proxy, b"") {
            Err(error) => break error,
            Ok(_) => assert!(std::time::Instant::now() < limit, "never refused"),
        }
    };
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    proxy.link().repair();
    let mut near = loop {
        if let Ok(near) = connect(&proxy, &opening(CONTROL)) {
            break near;
        }
        assert!(std::time::Instant::now() < limit, "still refused");
    };
    let mut far = server.accept().unwrap().0;
    expect(&mut far, &opening(CONTROL));
    near.write_all(&commit()).unwrap();
    expect(&mut far, &commit());
}

#[test]
fn what_was_said_is_said_again() {
    let (proxy, mut near, mut far, server) = connected(CONTROL);
    near.write_all(&commit()).unwrap();
    expect(&mut far, &commit());
    proxy.link().duplicate(Which::Control);
    let mut again = server.accept().unwrap().0;
    expect(&mut again, &opening(CONTROL));
    expect(&mut again, &commit());
}

#[test]
fn the_end_of_one_end_is_told_to_the_other() {
    let (_proxy, mut near, far, _server) = connected(CONTROL);
    drop(far);
    assert_eq!(near.read(&mut [0]).unwrap(), 0);
    let (_proxy, mut near, far, _server) = connected(CONTROL);
    rustix::net::connect_unspec(&far).unwrap();
    assert_eq!(
        near.read(&mut [0]).unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
}

#[test]
fn one_bit_is_another() {
    let (proxy, mut near, mut far, _server) = connected(PAGES);
    proxy.link().flip(9);
    near.write_all(b"abc").unwrap();
    expect(&mut far, b"a`c");
    near.write_all(b"abc").unwrap();
    expect(&mut far, b"abc");
}
