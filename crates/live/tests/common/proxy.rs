//! A TCP proxy between a source and a destination that breaks, at a point that the test names.
//!
//! ```text
//!  source ──> Proxy ──> destination      every connection, those that the source opens after a cut too
//!              │
//!              └ at a Point (a number of bytes, a message of the control connection): one Action
//! ```
//! It never refuses a connection: that would say that nobody listens.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use transfer::Address;

use super::{lock, socket_address};

/// When to break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// When so many bytes have passed, over all connections and both ways. The connections' bytes are cut there.
    Bytes(u64),
    /// Instead of passing this message on.
    Before(&'static str),
    /// Right after passing this message on.
    After(&'static str),
    /// When the test says so.
    Asked,
}

/// What breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// One of the channels that there are: the remainder of this number.
    CutChannel(usize),
    CutControl,
    CutAll,
    /// Nothing passes for a while; nothing is lost.
    Stall(Duration),
    /// Everything that there is is cut, and whatever comes later ends at once.
    Die,
    /// Nothing passes any more, and nobody is told.
    Freeze,
}

pub(crate) struct Proxy {
    shared: Arc<Shared>,
    address: Address,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    destination: (String, u16),
    point: Point,
    action: Action,
    /// How often it may still be done.
    times: Mutex<u32>,
    passed: AtomicU64,
    connections: Mutex<Vec<Arc<Connection>>>,
    flow: Mutex<Flow>,
    /// Held while a message passes.
    turn: Mutex<()>,
    changed: Condvar,
    closing: AtomicBool,
    /// What the messages of the control connections were, in their order.
    said: Mutex<Vec<String>>,
    id: Mutex<Option<[u8; 16]>>,
}

#[derive(Default)]
struct Flow {
    stalled_until: Option<Instant>,
    frozen: bool,
    dead: bool,
}

struct Connection {
    source: TcpStream,
    destination: TcpStream,
    is_control: bool,
}

impl Proxy {
    /// To `destination`; does `action` at `point`, once.
    pub(crate) fn new(destination: &Address, point: Point, action: Action) -> Self {
        Self::repeated(destination, point, action, 1)
    }

    /// Does it again when it comes to the same point again, `times` times in all.
    pub(crate) fn repeated(
        destination: &Address,
        point: Point,
        action: Action,
        times: u32,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            destination: socket_address(destination),
            point,
            action,
            times: Mutex::new(times),
            passed: AtomicU64::new(0),
            connections: Mutex::default(),
            flow: Mutex::default(),
            turn: Mutex::default(),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
            said: Mutex::default(),
            id: Mutex::default(),
        });
        let acceptor = thread::spawn({
            let shared = shared.clone();
            move || accept(&listener, &shared)
        });
        Self {
            shared,
            address: Address::Tcp {
                host: "127.0.0.1".to_owned(),
                port,
            },
            acceptor: Some(acceptor),
        }
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    pub(crate) fn point(&self) -> Point {
        self.shared.point
    }

    /// For [`Point::Asked`].
    pub(crate) fn act(&self) {
        self.shared.act();
    }

    /// Whether all has been done that was to be done.
    pub(crate) fn has_acted(&self) -> bool {
        *lock(&self.shared.times) == 0
    }

    /// The messages of the control connections, both ways, whether they were passed on or not.
    pub(crate) fn said(&self) -> Vec<String> {
        lock(&self.shared.said).clone()
    }

    /// The migration's id.
    pub(crate) fn id(&self) -> [u8; 16] {
        lock(&self.shared.id).expect("no source has come")
    }
}

/// Tells a destination what its source may have been unable to: that it knows that the guest runs.
pub(crate) fn settle(destination: &Address, id: [u8; 16]) {
    let control = TcpStream::connect(socket_address(destination));
    let words = [
        opening(id),
        message(r#"{"say":"commit"}"#),
        message(r#"{"say":"settled"}"#),
    ];
    // One that has heard it before is gone.
    let _ = control.and_then(|mut control| control.write_all(&words.concat()));
}

/// Asks a destination that waits for its source's acknowledgement what has become of the guest.
pub(crate) fn ask(destination: &Address, id: [u8; 16]) -> String {
    let mut control = TcpStream::connect(socket_address(destination)).unwrap();
    control.write_all(&opening(id)).unwrap();
    control.write_all(&message(r#"{"say":"commit"}"#)).unwrap();
    said(&read_message(&mut control).unwrap()[4..])
}

/// The first bytes of a control connection.
pub(crate) fn opening(id: [u8; 16]) -> Vec<u8> {
    let mut bytes = b"VLIV\0\0\0\x01".to_vec();
    bytes.extend(id);
    bytes
}

/// A message as it goes over the wire.
pub(crate) fn message(json: &str) -> Vec<u8> {
    let mut bytes = u32::try_from(json.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes
}

/// A whole message, its length included.
pub(crate) fn read_message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    stream.read_exact(&mut bytes)?;
    let len = u32::from_be_bytes(bytes[..].try_into().unwrap());
    bytes.resize(4 + usize::try_from(len).unwrap(), 0);
    stream.read_exact(&mut bytes[4..])?;
    Ok(bytes)
}

/// What a message's JSON says, in a word.
pub(crate) fn said(json: &[u8]) -> String {
    let value: serde_json::Value = serde_json::from_slice(json).unwrap();
    value["say"].as_str().unwrap().to_owned()
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.cut(|_| true);
        self.shared.changed.notify_all();
        if let Address::Tcp { host, port } = &self.address {
            let _ = TcpStream::connect((host.as_str(), *port));
        }
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn act(&self) {
        let mut times = lock(&self.times);
        if *times == 0 {
            return;
        }
        *times -= 1;
        drop(times);
        let mut flow = lock(&self.flow);
        match self.action {
            Action::Stall(time) => flow.stalled_until = Some(Instant::now() + time),
            Action::Freeze => flow.frozen = true,
            Action::Die => flow.dead = true,
            Action::CutAll | Action::CutControl | Action::CutChannel(_) => {}
        }
        drop(flow);
        match self.action {
            Action::CutControl => self.cut(|connection| connection.is_control),
            Action::CutAll | Action::Die => self.cut(|_| true),
            Action::CutChannel(number) => {
                let connections = lock(&self.connections);
                let channels = connections
                    .iter()
                    .filter(|connection| !connection.is_control);
                let channels: Vec<_> = channels.collect();
                if let Some(index) = number.checked_rem(channels.len()) {
                    channels[index].cut();
                }
            }
            Action::Stall(_) | Action::Freeze => {}
        }
    }

    fn cut(&self, which: impl Fn(&Connection) -> bool) {
        let connections = lock(&self.connections);
        for connection in connections.iter().filter(|connection| which(connection)) {
            connection.cut();
        }
    }

    /// Passes `bytes` on.
    fn pass(&self, mut bytes: &[u8], mut to: &TcpStream) -> io::Result<()> {
        self.wait_for_flow()?;
        let len = bytes.len() as u64;
        let before = self.passed.fetch_add(len, Ordering::SeqCst);
        if let Point::Bytes(point) = self.point
            && (before..before + len).contains(&point)
        {
            let (head, tail) = bytes.split_at(usize::try_from(point - before).unwrap());
            to.write_all(head)?;
            self.act();
            self.wait_for_flow()?;
            bytes = tail;
        }
        to.write_all(bytes)
    }

    fn wait_for_flow(&self) -> io::Result<()> {
        let mut flow = lock(&self.flow);
        loop {
            if self.closing.load(Ordering::SeqCst) || flow.dead {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let now = Instant::now();
            let wait = match flow.stalled_until {
                _ if flow.frozen => Duration::from_millis(50),
                Some(until) if until > now => until - now,
                _ => return Ok(()),
            };
            let waited = self.changed.wait_timeout(flow, wait);
            flow = waited.unwrap().0;
        }
    }

    fn is_dead(&self) -> bool {
        lock(&self.flow).dead
    }
}

impl Connection {
    fn cut(&self) {
        let _ = self.source.shutdown(Shutdown::Both);
        let _ = self.destination.shutdown(Shutdown::Both);
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut workers = Vec::new();
    for source in listener.incoming() {
        if shared.closing.load(Ordering::SeqCst) {
            break;
        }
        let (source, shared) = (source.unwrap(), shared.clone());
        if shared.is_dead() {
            continue;
        }
        workers.push(thread::spawn(move || {
            // The end of a connection is what the peers make of it.
            let _ = serve(source, &shared);
        }));
    }
    for worker in workers {
        worker.join().unwrap();
    }
}

fn serve(mut source: TcpStream, shared: &Arc<Shared>) -> io::Result<()> {
    let mut opening = vec![0; 24];
    source.read_exact(&mut opening)?;
    let is_control = opening.starts_with(b"VLIV");
    if is_control {
        *lock(&shared.id) = Some(opening[8..24].try_into().unwrap());
    }
    let (host, port) = &shared.destination;
    let destination = TcpStream::connect((host.as_str(), *port))?;
    source.set_nodelay(true)?;
    destination.set_nodelay(true)?;
    let connection = Arc::new(Connection {
        source,
        destination,
        is_control,
    });
    lock(&shared.connections).push(connection.clone());
    if shared.is_dead() || shared.closing.load(Ordering::SeqCst) {
        connection.cut();
    }
    let down = thread::spawn({
        let (shared, connection) = (shared.clone(), connection.clone());
        move || {
            let (from, to) = (&connection.destination, &connection.source);
            let _ = carry(from, to, is_control, &shared);
            // The end of what one says is passed on; the other may go on.
            let _ = to.shutdown(Shutdown::Write);
        }
    });
    let (from, to) = (&connection.source, &connection.destination);
    let up = shared
        .pass(&opening, to)
        .and_then(|()| carry(from, to, is_control, shared));
    let _ = to.shutdown(Shutdown::Write);
    down.join().unwrap();
    up
}

fn carry(from: &TcpStream, to: &TcpStream, is_control: bool, shared: &Shared) -> io::Result<()> {
    if is_control {
        return carry_messages(from, to, shared);
    }
    let mut buffer = vec![0; 64 << 10];
    carry_bytes(from, to, u64::MAX, &mut buffer, shared)
}

fn carry_messages(mut from: &TcpStream, to: &TcpStream, shared: &Shared) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let mut message = vec![0; 4];
        from.read_exact(&mut message)?;
        let len = u32::from_be_bytes(message[..].try_into().unwrap());
        message.resize(4 + usize::try_from(len).unwrap(), 0);
        from.read_exact(&mut message[4..])?;
        let word = said(&message[4..]);
        // An answer does not overtake what is done after its question.
        let turn = lock(&shared.turn);
        lock(&shared.said).push(word.clone());
        if matches!(shared.point, Point::Before(point) if point == word) {
            shared.act();
        }
        shared.pass(&message, to)?;
        if matches!(shared.point, Point::After(point) if point == word) {
            shared.act();
        }
        drop(turn);
        if word == "state" {
            let value: serde_json::Value = serde_json::from_slice(&message[4..]).unwrap();
            let len = value["len"].as_u64().unwrap();
            carry_bytes(from, to, len, &mut buffer, shared)?;
        }
    }
}

fn carry_bytes(
    mut from: &TcpStream,
    to: &TcpStream,
    mut left: u64,
    buffer: &mut [u8],
    shared: &Shared,
) -> io::Result<()> {
    while left > 0 {
        let most = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let len = from.read(&mut buffer[..most])?;
        if len == 0 {
            return Ok(());
        }
        shared.pass(&buffer[..len], to)?;
        left -= len as u64;
    }
    Ok(())
}
