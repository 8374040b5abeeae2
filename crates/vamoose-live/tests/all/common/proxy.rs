//! A TCP proxy between a source and a destination that breaks, at a point that the test names.
//!
//! ```text
//!  source ──> Proxy ──> destination      every connection, those that the source opens after a cut too
//!              │
//!              └ at a Point (a number of bytes, a message of the control connection): one Action
//! ```
//! It never refuses a connection, which would mean that none listens, unless it is to vanish.

use std::{
    io::{self, BufRead as _, BufReader, Read, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use vamoose_link::Address;

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
    /// At the test's request.
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
    /// As [`Action::Die`], and nothing listens at its address any more.
    Vanish,
    /// Nothing passes any more, without a notice.
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
    port: u16,
    /// What the messages of the control connections were, in their order.
    said: Mutex<Vec<String>>,
    id: Mutex<Option<[u8; 16]>>,
}

#[derive(Default)]
struct Flow {
    stalled_until: Option<Instant>,
    frozen: bool,
    dead: bool,
    vanished: bool,
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
            port,
            said: Mutex::default(),
            id: Mutex::default(),
        });
        let acceptor = thread::spawn({
            let shared = shared.clone();
            move || accept(listener, &shared)
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
    let messages = [opening(id), message(COMMIT), message(SETTLED)];
    // One that has been notified before is gone.
    let _ = control.and_then(|mut control| control.write_all(&messages.concat()));
}

/// Asks a destination that waits for its source's acknowledgement what has become of the guest.
pub(crate) fn ask(destination: &Address, id: [u8; 16]) -> String {
    let mut control = TcpStream::connect(socket_address(destination)).unwrap();
    control.write_all(&opening(id)).unwrap();
    control.write_all(&message(COMMIT)).unwrap();
    name_of(&read_line(&mut control).unwrap())
}

pub(crate) const COMMIT: &str = r#"{"request":"commit","resume":true}"#;
pub(crate) const ABORT: &str = r#"{"request":"abort","cause":"no more"}"#;
pub(crate) const SETTLED: &str = r#"{"request":"settled"}"#;

/// The first bytes of a control connection.
pub(crate) fn opening(id: [u8; 16]) -> Vec<u8> {
    [b"VAMOOSEC", &id[..]].concat()
}

/// A message as it goes over the wire.
pub(crate) fn message(json: &str) -> Vec<u8> {
    [json.as_bytes(), b"\n"].concat()
}

/// A message without its end; nothing that follows it is read.
pub(crate) fn read_line(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        if byte == *b"\n" {
            return Ok(line);
        }
        line.extend(byte);
    }
}

/// Which message it is.
pub(crate) fn name_of(json: &[u8]) -> String {
    let value: serde_json::Value = serde_json::from_slice(json).unwrap();
    let names = [&value["request"], &value["answer"]];
    names.map(|name| name.as_str().unwrap_or_default()).concat()
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
            Action::Vanish => (flow.dead, flow.vanished) = (true, true),
            Action::CutAll | Action::CutControl | Action::CutChannel(_) => {}
        }
        drop(flow);
        match self.action {
            Action::CutControl => self.cut(|connection| connection.is_control),
            Action::CutAll | Action::Die => self.cut(|_| true),
            Action::Vanish => {
                self.cut(|_| true);
                // For the acceptor to look.
                let _ = TcpStream::connect(("127.0.0.1", self.port));
            }
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

fn accept(listener: TcpListener, shared: &Arc<Shared>) {
    let mut workers = Vec::new();
    for source in listener.incoming() {
        if shared.closing.load(Ordering::SeqCst) || lock(&shared.flow).vanished {
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
    drop(listener);
    for worker in workers {
        worker.join().unwrap();
    }
}

fn serve(mut source: TcpStream, shared: &Arc<Shared>) -> io::Result<()> {
    let mut opening = vec![0; 24];
    source.read_exact(&mut opening)?;
    let is_control = opening.starts_with(b"VAMOOSEC");
    if is_control {
        *lock(&shared.id) = Some(opening[8..].try_into().unwrap());
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
            // The end of one direction is passed on; the other may continue.
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
    carry_bytes(from, to, u64::MAX, shared)
}

fn carry_messages(from: &TcpStream, to: &TcpStream, shared: &Shared) -> io::Result<()> {
    let mut from = BufReader::new(from);
    loop {
        let mut message = Vec::new();
        from.read_until(b'\n', &mut message)?;
        if message.last() != Some(&b'\n') {
            return Ok(());
        }
        let name = name_of(&message);
        // An answer does not overtake what is done after its question.
        let turn = lock(&shared.turn);
        lock(&shared.said).push(name.clone());
        if matches!(shared.point, Point::Before(point) if point == name) {
            shared.act();
        }
        shared.pass(&message, to)?;
        if matches!(shared.point, Point::After(point) if point == name) {
            shared.act();
        }
        drop(turn);
        if name == "state" {
            let value: serde_json::Value = serde_json::from_slice(&message).unwrap();
            let len = value["len"].as_u64().unwrap();
            carry_bytes(&mut from, to, len, shared)?;
        }
    }
}

fn carry_bytes(
    mut from: impl Read,
    to: &TcpStream,
    mut left: u64,
    shared: &Shared,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
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
