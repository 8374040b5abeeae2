//! Cloud Hypervisor's migrations over streams. Both ends are stand-ins that speak its protocol, framed as its sources of August 2026
//! do (vm-migration/src/protocol.rs, vmm/src/migration/transport.rs).
//!
//! ```text
//!  request   u16 command, 6 bytes, u64 length of what follows     all numbers are little endian
//!  answer    u16 status (1: OK), 6 bytes, u64 length
//!  Memory    a table of (u64 address, u64 length), then the bytes of all ranges; one answer
//!  role      u16 at the beginning of each connection but the first: 1 memory, 2 page faults of a post-copy
//! ```

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Context as _, Result, ensure};
use lab::middlebox::{Admission, Change, Middlebox, Which};
use rustix::process::Signal;
use tempfile::TempDir;

use super::{
    Hosts,
    streams::{add, stream},
};
use crate::common::LIMIT;

const START: u16 = 1;
const CONFIG: u16 = 2;
const STATE: u16 = 3;
const MEMORY: u16 = 4;
const COMPLETE: u16 = 5;
const PAGE_FAULT: u16 = 9;

const OK: u16 = 1;

const MEMORY_ROLE: u16 = 1;
const FAULT_ROLE: u16 = 2;

/// What one `Memory` carries with several connections. 64 MiB in the real program.
const CHUNK: usize = 2 << 20;
const RAM: usize = 24 << 20;
const PAGE: usize = 4096;

/// A request or an answer.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    code: u16,
    length: usize,
}

impl Head {
    fn read(wire: &mut impl Read) -> io::Result<Self> {
        Ok(Self {
            code: u16::from_le_bytes(*read(wire, 8)?.first_chunk().unwrap()),
            length: number(wire)?,
        })
    }

    fn write(wire: &mut impl Write, code: u16, length: usize) -> io::Result<()> {
        wire.write_all(&u64::from(code).to_le_bytes())?;
        wire.write_all(&(length as u64).to_le_bytes())
    }
}

fn read(wire: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    wire.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn number(wire: &mut impl Read) -> io::Result<usize> {
    let bytes = read(wire, 8)?;
    Ok(usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap())
}

fn expect_ok(wire: &mut impl Read) -> Result<()> {
    let answer = Head::read(wire)?;
    ensure!(answer.code == OK, "{answer:?}");
    Ok(())
}

/// Address and length in guest memory.
type Range = (usize, usize);

fn write_table(wire: &mut impl Write, ranges: &[Range]) -> io::Result<()> {
    for number in ranges.iter().flat_map(|&(at, length)| [at, length]) {
        wire.write_all(&(number as u64).to_le_bytes())?;
    }
    Ok(())
}

/// A connection of one of the two.
trait Wire: Read + Write + Send {}
impl<T: Read + Write + Send> Wire for T {}

/// What the source does.
#[derive(Clone, Copy, Debug)]
enum Mode {
    Precopy { connections: usize },
    Postcopy,
}

/// The source of a migration, with a stream's `listen`.
struct Source<'a> {
    connect: &'a (dyn Fn() -> io::Result<Box<dyn Wire>> + Sync),
    ram: &'a [u8],
    /// Called in the middle of memory.
    cut: &'a (dyn Fn() -> Result<()> + Sync),
}

impl Source<'_> {
    fn migrate(&self, mode: Mode) -> Result<()> {
        let mut main = (self.connect)()?;
        let ask = |wire: &mut dyn Wire, command, data: &[u8]| {
            let mut wire = wire;
            Head::write(&mut wire, command, data.len())?;
            wire.write_all(data)?;
            expect_ok(&mut wire)
        };
        ask(&mut main, START, b"")?;
        ask(&mut main, CONFIG, b"{\"vm_config\":{}}")?;
        // The first round is everything, later ones are what the guest has written.
        let dirty: Vec<_> = (0..RAM / PAGE / 16)
            .map(|at| (at * 16 * PAGE, PAGE))
            .collect();
        let rounds = [vec![(0, RAM / 2), (RAM / 2, RAM / 2)], dirty];
        thread::scope(|scope| -> Result<()> {
            let mut faults = None;
            match mode {
                Mode::Precopy { connections: 1 } => {
                    for round in &rounds {
                        self.send(&mut main, round)?;
                    }
                }
                Mode::Precopy { connections } => {
                    let mut wires = Vec::new();
                    for _ in 0..connections {
                        let mut wire = (self.connect)()?;
                        wire.write_all(&MEMORY_ROLE.to_le_bytes())?;
                        wires.push(wire);
                    }
                    for round in &rounds {
                        self.send_over(&mut wires, round)?;
                    }
                }
                Mode::Postcopy => {
                    let mut wire = (self.connect)()?;
                    wire.write_all(&FAULT_ROLE.to_le_bytes())?;
                    faults = Some(scope.spawn(move || self.serve_faults(&mut wire)));
                }
            }
            ask(&mut main, STATE, b"{\"snapshots\":{}}")?;
            ask(&mut main, COMPLETE, b"")?;
            faults.map_or(Ok(()), |thread| thread.join().unwrap())
        })
    }

    /// Sends ranges in one `Memory`.
    fn send(&self, mut wire: &mut dyn Wire, ranges: &[Range]) -> Result<()> {
        Head::write(&mut wire, MEMORY, 16 * ranges.len())?;
        write_table(&mut wire, ranges)?;
        for (index, &(at, length)) in ranges.iter().enumerate() {
            let (first, rest) = self.ram[at..at + length].split_at(length / 2);
            wire.write_all(first)?;
            if index == ranges.len() / 2 {
                (self.cut)()?;
            }
            wire.write_all(rest)?;
        }
        expect_ok(&mut wire)
    }

    /// Sends ranges in chunks over several connections.
    fn send_over(&self, wires: &mut [Box<dyn Wire>], ranges: &[Range]) -> Result<()> {
        let chunks: Vec<Range> = ranges
            .iter()
            .flat_map(|&(at, length)| {
                let end = at + length;
                (at..end)
                    .step_by(CHUNK)
                    .map(move |at| (at, CHUNK.min(end - at)))
            })
            .collect();
        let left = Mutex::new(chunks);
        thread::scope(|scope| {
            let send = |wire: &mut Box<dyn Wire>| -> Result<()> {
                loop {
                    let next = left.lock().unwrap().pop();
                    let Some(chunk) = next else {
                        return Ok(());
                    };
                    self.send(wire, &[chunk])?;
                }
            };
            let threads: Vec<_> = wires
                .iter_mut()
                .map(|wire| scope.spawn(move || send(wire)))
                .collect();
            threads.into_iter().try_for_each(|it| it.join().unwrap())
        })
    }

    /// Sends the pages that the destination asks for, until it closes the connection.
    fn serve_faults(&self, wire: &mut dyn Wire) -> Result<()> {
        let mut wire = wire;
        let mut served = 0;
        loop {
            let request = match Head::read(&mut wire) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                request => request?,
            };
            let expected = Head {
                code: PAGE_FAULT,
                length: 16,
            };
            ensure!(request == expected, "{request:?}");
            let (at, length) = (number(&mut wire)?, number(&mut wire)?);
            Head::write(&mut wire, OK, length)?;
            wire.write_all(&self.ram[at..at + length])?;
            served += 1;
            if served == 8 {
                (self.cut)()?;
            }
        }
    }
}

/// Receives a migration over connections that `accept` returns, and returns the guest's memory.
fn receive(accept: impl Fn() -> io::Result<Box<dyn Wire>> + Sync, mode: Mode) -> Result<Vec<u8>> {
    let ram = Mutex::new(vec![0; RAM]);
    let mut main = accept()?;
    let memory = |wire: &mut dyn Wire, request: &Head| -> Result<()> {
        let mut wire = wire;
        let ranges: Vec<Range> = (0..request.length / 16)
            .map(|_| Ok((number(&mut wire)?, number(&mut wire)?)))
            .collect::<io::Result<_>>()?;
        for (at, length) in ranges {
            let bytes = read(&mut wire, length)?;
            ram.lock().unwrap()[at..at + length].copy_from_slice(&bytes);
        }
        Ok(Head::write(&mut wire, OK, 0)?)
    };
    thread::scope(|scope| -> Result<()> {
        let mut faults = None;
        loop {
            let request = Head::read(&mut main)?;
            match request.code {
                MEMORY => {
                    memory(&mut main, &request)?;
                    continue;
                }
                CONFIG => {
                    read(&mut main, request.length)?;
                    let others = match mode {
                        Mode::Precopy { connections: 1 } => 0,
                        Mode::Precopy { connections } => connections,
                        Mode::Postcopy => 1,
                    };
                    Head::write(&mut main, OK, 0)?;
                    for _ in 0..others {
                        let mut wire = accept()?;
                        let role = u16::from_le_bytes(*read(&mut wire, 2)?.first_chunk().unwrap());
                        match role {
                            MEMORY_ROLE => drop(scope.spawn(move || {
                                while let Ok(request) = Head::read(&mut wire) {
                                    ensure!(request.code == MEMORY, "{request:?}");
                                    memory(&mut wire, &request)?;
                                }
                                Ok(())
                            })),
                            role => {
                                ensure!(role == FAULT_ROLE, "role {role}");
                                faults = Some(wire);
                            }
                        }
                    }
                    continue;
                }
                STATE => {
                    read(&mut main, request.length)?;
                }
                START => {}
                _ => ensure!(request.code == COMPLETE, "{request:?}"),
            }
            Head::write(&mut main, OK, 0)?;
            if request.code == COMPLETE {
                break;
            }
        }
        // The guest runs, and touches its pages.
        if let Some(mut wire) = faults {
            for at in (0..RAM).step_by(PAGE * 64) {
                Head::write(&mut wire, PAGE_FAULT, 16)?;
                write_table(&mut wire, &[(at, PAGE)])?;
                let answer = Head::read(&mut wire)?;
                ensure!(answer.code == OK && answer.length == PAGE, "{answer:?}");
                let page = read(&mut wire, PAGE)?;
                ram.lock().unwrap()[at..at + PAGE].copy_from_slice(&page);
            }
        }
        // The source has closed the connection, once it has the last answer.
        ensure!(main.read(&mut [0])? == 0);
        Ok(())
    })?;
    Ok(ram.into_inner().unwrap())
}

/// Half zeros; of the rest, half is text and half does not shrink.
fn ram() -> Vec<u8> {
    let mut random = 1_u64;
    let mut ram = vec![0; RAM];
    for (number, page) in ram.chunks_mut(PAGE).enumerate() {
        match number / 32 % 4 {
            0 => page.fill_with(|| {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                random.to_be_bytes()[0]
            }),
            1 => {
                let line = format!("page {number} of a guest's memory\n");
                let bytes = line.bytes().cycle();
                page.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
            }
            _ => {}
        }
    }
    ram
}

/// A path for connections from one host to the other that a test may cut, and the hosts. Both give up after 2 s without a link.
fn hosts() -> Result<(Hosts, Middlebox)> {
    let mut made = None;
    let lines = "reconnect-timeout = 2";
    let mut hosts = Hosts::through(lines, "", &[], |to| {
        let made = made.insert(Middlebox::new(to.parse::<SocketAddr>()?)?);
        Ok(made.address().to_string())
    })?;
    hosts.far.setting.text.insert_str(0, &format!("{lines}\n"));
    hosts.far.setting.write(&hosts.far.setting.text)?;
    hosts.far.restart()?;
    Ok((hosts, made.context("no middlebox")?))
}

/// Adds a TCP stream from the near host to the far one: the addresses at which the source's VMM connects, and at which the
/// destination's listens.
fn tcp_stream(hosts: &Hosts) -> Result<(SocketAddr, TcpListener)> {
    let listen = SocketAddr::from((hosts.near.own, 4600));
    let listener = TcpListener::bind((hosts.far.own, 0))?;
    let to = listener.local_addr()?;
    let line = |key: &str, at| format!("streams.vm1 = {{ peer = \"other\", {key} = \"{at}\" }}\n");
    add(&hosts.far, &line("to", to))?;
    add(&hosts.near, &line("listen", listen))?;
    Ok((listen, listener))
}

fn connect(at: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(at)?;
    stream.set_read_timeout(Some(LIMIT))?;
    Ok(stream)
}

#[test]
fn each_kind_of_migration_passes_though_its_connections_are_cut() -> Result<()> {
    let (hosts, between) = hosts()?;
    let (listen, listener) = tcp_stream(&hosts)?;
    let ram = ram();
    for mode in [
        Mode::Precopy { connections: 1 },
        Mode::Precopy { connections: 4 },
        Mode::Postcopy,
    ] {
        let cuts = AtomicUsize::new(0);
        let source = Source {
            connect: &|| Ok(Box::new(connect(listen)?)),
            ram: &ram,
            cut: &|| {
                // Cut for every chunk, no connection would ever carry anything.
                if cuts.fetch_add(1, Ordering::Relaxed) < 6 {
                    between.apply(Which::All, Change::Reset);
                }
                Ok(())
            },
        };
        let received = thread::scope(|scope| {
            let accept = || Ok(Box::new(listener.accept()?.0) as Box<dyn Wire>);
            let received = scope.spawn(move || receive(accept, mode));
            source.migrate(mode)?;
            received.join().unwrap()
        });
        let received = received.with_context(|| format!("{mode:?}"))?;
        match mode {
            Mode::Precopy { .. } => ensure!(received == ram, "{mode:?}"),
            Mode::Postcopy => {
                let pages = |ram: &[u8]| {
                    let pages = ram.chunks(PAGE).step_by(64);
                    pages.flatten().copied().collect::<Vec<_>>()
                };
                ensure!(pages(&received) == pages(&ram), "{mode:?}");
            }
        }
        let (before, after) = hosts
            .near
            .carried("stream vm1: passed through to its end; ")?;
        ensure!(after < before, "{before} MiB as {after} MiB");
    }
    Ok(())
}

/// With unix sockets.
#[test]
fn a_migration_and_its_way_back_pass_though_all_connections_are_cut() -> Result<()> {
    let mut there = None;
    let hosts = Hosts::through("", "", &[], |to| {
        let made = there.insert(Middlebox::new(to.parse::<SocketAddr>()?)?);
        Ok(made.address().to_string())
    })?;
    let there = there.context("no middlebox")?;
    let back = Middlebox::new(SocketAddr::from((hosts.near.own, 4440)))?;
    let folder = TempDir::new()?;
    let direct = format!("to = [\"{}:4440\"]", hosts.near.own);
    let through = format!("to = [\"{}\"]", back.address());
    let both = |host: &str| {
        let (listen, to) = (format!("{host}-in"), format!("{host}-out"));
        stream(&folder, "vm1", Some(&listen), Some(&to))
    };
    add(&hosts.near, &both("near"))?;
    let far = hosts.far.setting.text.replace(&direct, &through);
    ensure!(far != hosts.far.setting.text);
    hosts.far.setting.write(&(far + &both("far")))?;
    hosts.far.gateway.signal(Signal::HUP)?;
    hosts.far.says("the configuration has been read again")?;

    let (ram, mode) = (ram(), Mode::Precopy { connections: 1 });
    for (from, to, middlebox) in [
        ("near-in", "far-out", &there),
        ("far-in", "near-out", &back),
    ] {
        let listener = UnixListener::bind(folder.path().join(to))?;
        let path = folder.path().join(from);
        let source = Source {
            connect: &|| {
                let stream = UnixStream::connect(&path)?;
                stream.set_read_timeout(Some(LIMIT))?;
                Ok(Box::new(stream))
            },
            ram: &ram,
            cut: &|| {
                ensure!(middlebox.apply(Which::All, Change::Reset) > 0);
                Ok(())
            },
        };
        let received = thread::scope(|scope| {
            let accept = || Ok(Box::new(listener.accept()?.0) as Box<dyn Wire>);
            let received = scope.spawn(move || receive(accept, mode));
            source.migrate(mode)?;
            received.join().unwrap()
        });
        ensure!(received? == ram);
    }
    for host in [&hosts.near, &hosts.far] {
        host.says("to other, stream vm1: passed through to its end; ")?;
        host.says("from other, stream vm1: passed through to its end; ")?;
    }
    Ok(())
}

/// What ends a stream in the middle.
#[derive(Clone, Copy, Debug)]
enum Failure {
    LinkLost,
    NearKilled,
    FarKilled,
    Cancelled,
    SourceReset,
}

/// The receiver of Cloud Hypervisor reads for ever after an orderly end within memory.
#[test]
fn a_stream_that_fails_ends_with_a_reset() -> Result<()> {
    for failure in [
        Failure::LinkLost,
        Failure::NearKilled,
        Failure::FarKilled,
        Failure::Cancelled,
        Failure::SourceReset,
    ] {
        let (mut hosts, between) = hosts()?;
        let (listen, listener) = tcp_stream(&hosts)?;
        let mut source = connect(listen)?;
        Head::write(&mut source, MEMORY, 16)?;
        write_table(&mut source, &[(0, CHUNK)])?;
        source.write_all(&vec![1; CHUNK / 2])?;
        let (mut receiver, _) = listener.accept()?;
        receiver.set_read_timeout(Some(LIMIT))?;
        read(&mut receiver, 16 + 16 + CHUNK / 2)?;
        match failure {
            Failure::LinkLost => {
                between.admit(Admission::Refuse)?;
                between.apply(Which::All, Change::Reset);
            }
            Failure::NearKilled => hosts.near.gateway.kill()?,
            Failure::FarKilled => hosts.far.gateway.kill()?,
            Failure::Cancelled => {
                // The first signal lets migrations finish.
                hosts.near.gateway.signal(Signal::TERM)?;
                hosts.near.says("no further migrations are accepted")?;
                hosts.near.gateway.signal(Signal::TERM)?;
            }
            Failure::SourceReset => lab::sockets::reset(&source),
        }
        let is_reset = |stream: &mut TcpStream| {
            let ended = stream.read(&mut [0]);
            let kind = ended.as_ref().map_err(io::Error::kind);
            ensure!(
                kind == Err(io::ErrorKind::ConnectionReset),
                "{failure:?}: {ended:?}"
            );
            Ok(())
        };
        is_reset(&mut receiver).context("the receiver")?;
        if !matches!(failure, Failure::SourceReset) {
            is_reset(&mut source).context("the source")?;
        }
    }
    Ok(())
}

#[test]
fn an_orderly_end_loses_nothing() -> Result<()> {
    let (hosts, _between) = hosts()?;
    let (listen, listener) = tcp_stream(&hosts)?;
    let ram = ram();
    let mut source = connect(listen)?;
    source.write_all(&ram[..1 << 20])?;
    let (mut receiver, _) = listener.accept()?;
    let mut received = read(&mut receiver, 1)?;
    receiver.shutdown(Shutdown::Write)?;
    ensure!(source.read(&mut [0])? == 0);
    drop(source);
    // The gateway closes its connection while the receiver has read next to nothing.
    hosts.far.says("stream vm1: passed through to its end; ")?;
    receiver.set_read_timeout(Some(LIMIT))?;
    receiver.read_to_end(&mut received)?;
    ensure!(received == ram[..1 << 20]);
    Ok(())
}
