use super::*;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, bind, socket};

/// Runs something on a thread in the namespace; what it opens stays there.
fn inside<T: Send>(namespace: &Namespace, what: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let run = || {
            namespace.enter().unwrap();
            what()
        };
        scope.spawn(run).join().unwrap()
    })
}

#[test]
fn a_link_carries_its_rate_and_counts() {
    const BYTES: usize = 4 << 20;
    let Some(link) = link_or_skip(Some(100_000_000)).unwrap() else {
        return;
    };
    let address = link.destination.address();
    let listener = inside(&link.destination, || {
        TcpListener::bind((address, 0)).unwrap()
    });
    let target = listener.local_addr().unwrap();
    let mut sender = inside(&link.source, || TcpStream::connect(target).unwrap());
    let start = Instant::now();
    let writer = std::thread::spawn(move || sender.write_all(&vec![1; BYTES]).unwrap());
    let (mut receiver, _) = listener.accept().unwrap();
    let received = receiver.read_to_end(&mut Vec::new()).unwrap();
    let elapsed = start.elapsed();
    writer.join().unwrap();
    assert_eq!(received, BYTES);
    let bytes = BYTES as u64;
    // 4 MiB at 100 Mbit/s are 336 ms, less the burst. A slow machine may take any longer.
    assert!(elapsed > Duration::from_millis(250), "{elapsed:?}");
    let (sent, got) = (
        link.source.traffic().unwrap(),
        link.destination.traffic().unwrap(),
    );
    assert!(sent.sent > bytes && sent.sent < bytes * 11 / 10, "{sent:?}");
    assert!(got.received > bytes, "{got:?}");
}

#[test]
fn nothing_is_left_behind() {
    let Some(link) = link_or_skip(None).unwrap() else {
        return;
    };
    let path = format!("/run/netns/{}", link.source.name());
    assert!(fs::exists(&path).unwrap());
    drop(link);
    assert!(!fs::exists(&path).unwrap());
}

const LIMIT: Duration = Duration::from_secs(60);

/// A connection that the source makes over a wire to an address of the destination: the source's end, and the other.
pub(crate) fn connect(link: &Link, wire: &Wire, to: Ipv4Addr) -> [TcpStream; 2] {
    let listen = || TcpListener::bind((to, 0)).unwrap();
    let listener = inside(&link.destination, listen);
    let dialled = inside(&link.source, || {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        let from = SocketAddr::from((wire.address(End::Source), 0));
        bind(&socket, &from).unwrap();
        rustix::net::connect(&socket, &listener.local_addr().unwrap()).unwrap();
        TcpStream::from(socket)
    });
    let ends = [dialled, listener.accept().unwrap().0];
    for end in &ends {
        end.set_read_timeout(Some(LIMIT)).unwrap();
    }
    ends
}

pub(crate) fn expect(mut stream: &TcpStream, expected: &[u8]) {
    let mut read = vec![0; expected.len()];
    stream.read_exact(&mut read).unwrap();
    assert!(read == expected);
}

pub(crate) fn expect_nothing(mut stream: &TcpStream) {
    stream.set_nonblocking(true).unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    stream.set_nonblocking(false).unwrap();
}

#[test]
fn a_pulled_wire_passes_nothing_and_passes_again() {
    for rate in [None, Some(1_000_000_000)] {
        let Some(link) = link_or_skip(rate).unwrap() else {
            return;
        };
        let wire = &link.wires[0];
        let [source, destination] = &connect(&link, wire, wire.address(End::Destination));
        for end in End::BOTH {
            wire.pull(end).unwrap();
            let before = End::BOTH.map(|end| wire.traffic(end).unwrap().received);
            for mut stream in [source, destination] {
                stream.write_all(b"late").unwrap();
            }
            let after = End::BOTH.map(|end| wire.traffic(end).unwrap().received);
            assert_eq!(before, after);
            expect_nothing(source);
            expect_nothing(destination);
            wire.plug().unwrap();
            expect(source, b"late");
            expect(destination, b"late");
        }
        connect(&link, wire, wire.address(End::Destination));
    }
}

#[test]
fn one_way_is_lost_and_the_other_passes() {
    for rate in [None, Some(1_000_000_000)] {
        let Some(link) = link_or_skip(rate).unwrap() else {
            return;
        };
        let wire = &link.wires[0];
        let [source, destination] = &connect(&link, wire, wire.address(End::Destination));
        for (end, mut from, mut to) in [
            (End::Source, source, destination),
            (End::Destination, destination, source),
        ] {
            wire.lose(end).unwrap();
            from.write_all(b"lost").unwrap();
            to.write_all(b"passes").unwrap();
            expect(from, b"passes");
            expect_nothing(to);
            // A rate that changes meanwhile counts afterwards.
            wire.set_rate(2_000_000_000).unwrap();
            expect_nothing(to);
            wire.deliver().unwrap();
            expect(to, b"lost");
        }
    }
}

#[test]
fn the_address_that_a_socket_is_bound_to_decides_the_wire() {
    const BYTES: usize = 1 << 20;
    let Some(link) = link_of_wires_or_skip(&[None, None, None]).unwrap() else {
        return;
    };
    for wire in &link.wires {
        for target in &link.wires {
            let traffic = |wire: &Wire| wire.traffic(End::Destination).unwrap();
            let before: Vec<_> = link.wires.iter().map(traffic).collect();
            let to = target.address(End::Destination);
            let [source, destination] = &connect(&link, wire, to);
            for (mut from, to) in [(source, destination), (destination, source)] {
                std::thread::scope(|scope| {
                    scope.spawn(move || from.write_all(&vec![1; BYTES]).unwrap());
                    expect(to, &vec![1; BYTES]);
                });
            }
            for (it, before) in link.wires.iter().zip(before) {
                let now = traffic(it);
                let is_used = it.number == wire.number;
                assert_eq!(now.received - before.received > BYTES as u64, is_used);
                assert_eq!(now.sent - before.sent > BYTES as u64, is_used);
            }
        }
    }
}

#[test]
fn two_wires_carry_independently() {
    const BYTES: usize = 1 << 20;
    // A slow wire takes 8 s for what the other one carries at once.
    let Some(link) = link_of_wires_or_skip(&[Some(1_000_000), None]).unwrap() else {
        return;
    };
    let [slow, fast] = &link.wires[..] else {
        unreachable!();
    };
    let to = slow.address(End::Destination);
    let (slow_ends, fast_ends) = (connect(&link, slow, to), connect(&link, fast, to));
    let writers = [&slow_ends, &fast_ends].map(|[from, _]| {
        let mut from = from.try_clone().unwrap();
        std::thread::spawn(move || from.write_all(&vec![1; BYTES]))
    });
    expect(&fast_ends[1], &vec![1; BYTES]);
    let received = slow.traffic(End::Destination).unwrap().received;
    assert!(received < BYTES as u64, "{received}");
    slow.pull(End::Source).unwrap();
    let [mut from, to] = fast_ends;
    from.write_all(b"passes").unwrap();
    expect(&to, b"passes");
    // The writer is not waited for, as it may take minutes: it ends with its socket.
    slow_ends[0].shutdown(Shutdown::Both).unwrap();
    let _ = writers.map(|writer| writer.join().unwrap());
}

#[test]
fn a_socket_bound_to_a_pulled_wire_does_not_take_another() {
    let Some(link) = link_of_wires_or_skip(&[None, None]).unwrap() else {
        return;
    };
    let [first, second] = &link.wires[..] else {
        unreachable!();
    };
    let to = first.address(End::Destination);
    let listener = inside(&link.destination, || TcpListener::bind((to, 0)).unwrap());
    second.pull(End::Source).unwrap();
    inside(&link.source, || {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        let from = SocketAddr::from((second.address(End::Source), 0));
        bind(&socket, &from).unwrap();
        let connected = rustix::net::connect(&socket, &listener.local_addr().unwrap());
        assert_eq!(connected, Err(Errno::HOSTUNREACH));
    });
    second.plug().unwrap();
    connect(&link, second, to);
}
