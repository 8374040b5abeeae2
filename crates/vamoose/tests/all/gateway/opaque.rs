//! Connections that are no migrations arrive unchanged, and are compressed between the gateways: NBD, where the server speaks first,
//! TLS, RPC.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use lab::middlebox::{Change, Direction, Mark, Middlebox, Which};

use super::{Hosts, PORT, PORTS};
use crate::common::LIMIT;

/// A server at a port of the far host, instead of a QEMU.
fn waiting(hosts: &Hosts, port: u16) -> Result<TcpListener> {
    Ok(TcpListener::bind((hosts.far.own, port))?)
}

fn connect(hosts: &Hosts, port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect((hosts.near.door, port))?;
    stream.set_read_timeout(Some(LIMIT))?;
    Ok(stream)
}

fn read(mut stream: &TcpStream, length: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[test]
fn a_server_that_speaks_first_is_heard() -> Result<()> {
    let hosts = Hosts::start()?;
    let listener = waiting(&hosts, PORT)?;
    // Connections one after the other, and two at once.
    let clients = [connect(&hosts, PORT)?, connect(&hosts, PORT)?];
    for client in &clients {
        let (mut server, _) = listener.accept()?;
        server.write_all(b"NBDMAGIC")?;
        drop(server);
        // The order of the two is not determined.
        let _ = client;
    }
    for mut client in &clients {
        ensure!(read(client, 8)? == b"NBDMAGIC");
        ensure!(client.read(&mut [0])? == 0);
    }
    drop(clients);
    hosts
        .near
        .says("passing bytes through, compressed and encrypted: the destination speaks first")?;
    hosts.near.says("port 49152: passed through to its end; ")?;
    hosts.far.says("port 49152: passed through to its end; ")?;
    Ok(())
}

#[test]
fn bytes_of_all_kinds_arrive_both_ways_and_so_does_each_end() -> Result<()> {
    const BYTES: usize = 8 << 20;
    let hosts = Hosts::start()?;
    let listener = waiting(&hosts, PORT)?;
    for first in [&b"\x16\x03\x01\x02\x00"[..], b"RPC!", b"x", b"QE"] {
        let mut client = connect(&hosts, PORT)?;
        client.write_all(first)?;
        let (mut server, _) = listener.accept()?;
        ensure!(read(&server, first.len())? == first);
        let bytes: Vec<_> = (0..=250).cycle().take(BYTES).collect();
        let (sent, back) = (bytes.clone(), bytes.clone());
        let mut writes = client.try_clone()?;
        let writer = thread::spawn(move || {
            writes.write_all(&sent)?;
            writes.shutdown(Shutdown::Write)
        });
        ensure!(read(&server, BYTES)? == bytes);
        ensure!(server.read(&mut [0])? == 0);
        writer.join().unwrap()?;
        // One direction has ended, the other has not.
        let writer = thread::spawn(move || server.write_all(&back));
        ensure!(read(&client, BYTES)? == bytes);
        ensure!(client.read(&mut [0])? == 0);
        writer.join().unwrap()?;
    }
    hosts.near.says("encrypted: it is TLS")?;
    let (before, after) = hosts.near.carried("passed through to its end; ")?;
    ensure!(after < before, "{before} MiB as {after} MiB");
    Ok(())
}

/// After the first block, the limit leaves nothing for minutes.
#[test]
fn the_bandwidth_limit_is_for_all_bytes() -> Result<()> {
    let bytes = random(1, 1 << 20).repeat(32);
    let hosts = Hosts::with("", ", max-bandwidth = \"1KiB/s\"", &[])?;
    let listener = waiting(&hosts, PORT)?;
    let mut client = connect(&hosts, PORT)?;
    client.set_write_timeout(Some(Duration::from_secs(1)))?;
    ensure!(client.write_all(&bytes).is_err(), "all was taken");
    let (server, _) = listener.accept()?;
    server.set_read_timeout(Some(Duration::from_secs(1)))?;
    ensure!(read(&server, bytes.len()).is_err(), "all has arrived");
    Ok(())
}

#[test]
fn a_connection_without_a_listener_is_closed() -> Result<()> {
    let hosts = Hosts::start()?;
    for first in [&b""[..], b"RPC!"] {
        let mut client = connect(&hosts, PORTS[1])?;
        client.write_all(first)?;
        // Closed, or reset because its data was not read.
        ensure!(!matches!(client.read(&mut [0]), Ok(1..)));
    }
    hosts
        .near
        .says("port 49155: refused: other refuses: cannot connect to tcp:")?;
    hosts
        .far
        .says("port 49155: refused: cannot connect to tcp:")?;
    Ok(())
}

/// Unique bytes that do not compress.
fn random(mut state: u64, length: usize) -> Vec<u8> {
    let bytes = std::iter::from_fn(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state.to_be_bytes()[0])
    });
    bytes.take(length).collect()
}

/// Numbers of bytes after which a connection is cut.
fn mark(connection: usize, direction: Direction, bytes: u64) -> Mark {
    Mark {
        connection,
        direction,
        bytes,
    }
}

#[test]
fn bytes_both_ways_survive_cuts_of_the_link() -> Result<()> {
    const BYTES: usize = 8 << 20;
    const GREETING: &[u8] = b"NBDMAGIC";
    let mut middlebox = None;
    let hosts = Hosts::through("", "", &[], |to| {
        let made = middlebox.insert(Middlebox::new(to.parse::<SocketAddr>()?)?);
        Ok(made.address().to_string())
    })?;
    let middlebox = middlebox.context("no middlebox")?;
    // The first connection has the gateways' messages, the second one the bytes; then each is dialled again.
    let first = mark(1, Direction::ToListener, 1 << 20);
    let second = [2, 3].map(|connection| mark(connection, Direction::ToDialler, 2 << 20));
    for mark in [first].into_iter().chain(second) {
        middlebox.apply_at(mark, Which::All, Change::Reset);
    }
    let listener = waiting(&hosts, PORT)?;
    let client = connect(&hosts, PORT)?;
    let (mut server, _) = listener.accept()?;
    server.set_read_timeout(Some(LIMIT))?;
    server.write_all(GREETING)?;
    ensure!(read(&client, GREETING.len())? == GREETING);
    let (there, back) = (random(1, BYTES), random(2, BYTES));
    let send = |mut stream: &TcpStream, bytes: &[u8]| {
        stream.write_all(bytes)?;
        stream.shutdown(Shutdown::Write)
    };
    let (client, server) = (&client, &server);
    thread::scope(|scope| {
        let writers = [
            scope.spawn(|| send(client, &there)),
            scope.spawn(|| send(server, &back)),
        ];
        let came_back = scope.spawn(|| read(client, BYTES));
        ensure!(read(server, BYTES)? == there);
        ensure!(came_back.join().unwrap()? == back);
        for writer in writers {
            writer.join().unwrap()?;
        }
        anyhow::Ok(())
    })?;
    for mut end in [client, server] {
        ensure!(end.read(&mut [0])? == 0);
    }
    let connections = middlebox.connections();
    ensure!(
        connections[1].to_listener.passed == first.bytes,
        "{connections:?}"
    );
    let is_cut = |mark: &Mark| {
        let connection = connections.get(mark.connection);
        connection.is_some_and(|it| it.to_dialler.passed == mark.bytes)
    };
    ensure!(second.iter().any(is_cut), "{connections:?}");
    hosts.near.says("port 49152: passed through to its end; ")?;
    hosts.far.says("port 49152: passed through to its end; ")?;
    Ok(())
}
