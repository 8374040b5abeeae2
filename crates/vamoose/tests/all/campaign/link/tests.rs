use std::io;
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

/// A link, a connection through it, and the server's end of that.
fn connected(stream: u32) -> (Link, TcpStream, TcpStream, TcpListener) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let link = Link::new(server.local_addr().unwrap()).unwrap();
    let near = connect(&link, &opening(stream)).unwrap();
    let mut far = server.accept().unwrap().0;
    expect(&mut far, &opening(stream));
    (link, near, far, server)
}

fn connect(link: &Link, opening: &[u8]) -> io::Result<TcpStream> {
    let address = link.address();
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
    let (link, mut near, mut far, _server) = connected(CONTROL);
    let (send, struck) = mpsc::channel();
    for (point, name) in [
        (Point::After("request:commit"), "after"),
        (Point::Before("request:commit"), "before"),
    ] {
        let send = send.clone();
        link.handle()
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
    let names: Vec<_> = link
        .handle()
        .messages()
        .into_iter()
        .map(|message| message.name)
        .collect();
    assert_eq!(names, ["request:commit", "answer:running"]);
}

#[test]
fn a_strike_at_a_byte_comes_there() {
    let (link, mut near, mut far, _server) = connected(PAGES);
    let (send, struck) = mpsc::channel();
    let control = link.handle().clone();
    let strike = move || {
        send.send(control.watch.lock().bytes).unwrap();
        control.cut(Which::Data, Change::Reset);
    };
    link.handle().arm(Point::Bytes(2), Box::new(strike));
    let _ = near.write_all(b"more of them");
    assert_eq!(struck.recv().unwrap(), 2);
    let mut rest = Vec::new();
    let _ = far.read_to_end(&mut rest);
    // A reset may overtake what was written before it.
    assert!(b"mo".starts_with(&rest[..]), "{rest:?}");
}

#[test]
fn silence_holds_bytes_back_and_a_hole_swallows_them() {
    let (link, mut near, mut far, _server) = connected(CONTROL);
    link.handle().set_flow(&[Direction::ToListener], Flow::Hold);
    near.write_all(&commit()).unwrap();
    expect_nothing(&mut far);
    far.write_all(&[0; 112]).unwrap();
    expect(&mut near, &[0; 112]);
    link.handle().repair();
    expect(&mut far, &commit());
    link.handle().set_flow(&[Direction::ToListener], Flow::Drop);
    near.write_all(&commit()).unwrap();
    expect_nothing(&mut far);
    link.handle().repair();
    near.write_all(&commit()).unwrap();
    // A direction that has lost bytes stays silent.
    expect_nothing(&mut far);
    link.handle().cut(Which::All, Change::Reset);
    assert_eq!(
        far.read(&mut [0]).unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
}

#[test]
fn cuts_of_both_kinds_reach_both_ends() {
    let (link, mut near, mut far, _server) = connected(CONTROL);
    link.handle().cut(Which::Data, Change::Reset);
    expect_nothing(&mut far);
    link.handle().cut(Which::Control, Change::Close);
    assert_eq!(
        (near.read(&mut [0]).unwrap(), far.read(&mut [0]).unwrap()),
        (0, 0)
    );
    let (link, mut near, mut far, _server) = connected(CONTROL);
    link.handle().cut(Which::All, Change::Reset);
    for end in [&mut near, &mut far] {
        assert_eq!(
            end.read(&mut [0]).unwrap_err().kind(),
            io::ErrorKind::ConnectionReset
        );
    }
}

#[test]
fn refused_connections_and_then_others() {
    let (link, _near, _far, server) = connected(CONTROL);
    link.handle().refuse();
    let limit = std::time::Instant::now() + Duration::from_secs(10);
    let refused = loop {
        match connect(&link, b"") {
            Err(error) => break error,
            Ok(_) => assert!(std::time::Instant::now() < limit, "never refused"),
        }
    };
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    link.handle().repair();
    let mut near = loop {
        if let Ok(near) = connect(&link, &opening(CONTROL)) {
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
    let (link, mut near, mut far, server) = connected(CONTROL);
    near.write_all(&commit()).unwrap();
    expect(&mut far, &commit());
    link.handle().duplicate(Which::Control);
    let mut again = server.accept().unwrap().0;
    expect(&mut again, &opening(CONTROL));
    expect(&mut again, &commit());
}

#[test]
fn the_end_of_one_end_is_told_to_the_other() {
    let (_link, mut near, far, _server) = connected(CONTROL);
    drop(far);
    assert_eq!(near.read(&mut [0]).unwrap(), 0);
    let (_link, mut near, far, _server) = connected(CONTROL);
    rustix::net::connect_unspec(&far).unwrap();
    assert_eq!(
        near.read(&mut [0]).unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
}

#[test]
fn one_bit_is_another() {
    let (link, mut near, mut far, _server) = connected(PAGES);
    link.handle().flip(9);
    near.write_all(b"abc").unwrap();
    expect(&mut far, b"a`c");
    near.write_all(b"abc").unwrap();
    expect(&mut far, b"abc");
}

#[test]
fn late_bytes_arrive_late_also_on_new_connections() {
    let (link, _near, _far, server) = connected(CONTROL);
    let late = Duration::from_millis(200);
    link.handle().set_flow(&Direction::BOTH, Flow::Late(late));
    let start = std::time::Instant::now();
    let _near = connect(&link, &opening(PAGES)).unwrap();
    let mut far = server.accept().unwrap().0;
    expect(&mut far, &opening(PAGES));
    assert!(start.elapsed() >= late);
}

#[test]
fn connections_to_come_go_to_a_new_server() {
    let (link, ..) = connected(CONTROL);
    let second = TcpListener::bind("127.0.0.1:0").unwrap();
    link.handle().lead_to(second.local_addr().unwrap());
    let _near = connect(&link, &opening(PAGES)).unwrap();
    expect(&mut second.accept().unwrap().0, &opening(PAGES));
}
