//! A middlebox between a source and a destination that breaks the link at a point that the test names.
//!
//! ```text
//!  source ──> Proxy ──> destination      every connection, also those that the source opens after a cut
//!              │
//!              └ at a Point (a number of bytes, a message of the control connection): one Action
//! ```

use std::{
    collections::HashMap,
    io::{self, Read, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use lab::{
    middlebox::{Admission, Change, Direction, Flow, Handle, Middlebox, Observer, Status, Which},
    sockets::Port,
};
use vamoose_live::Address;

use super::{lock, socket_address};

/// When to break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// When this many bytes have passed over all connections in both directions.
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
    /// One of the open channels, by the remainder of this number.
    CutChannel(usize),
    CutControl,
    CutAll,
    /// Nothing passes for a while; nothing is lost.
    Stall(Duration),
    /// All connections are cut, and later ones end at once.
    Die,
    /// All connections are cut, and later ones refused.
    Vanish,
    /// Nothing passes any more, silently.
    Freeze,
}

pub(crate) struct Proxy {
    middlebox: Middlebox,
    address: Address,
    watch: Arc<Watch>,
}

struct Watch {
    point: Point,
    action: Action,
    /// How often the action is still to be done.
    times: Mutex<u32>,
    seen: Mutex<Seen>,
    /// Refuses connections.
    nobody: Port,
}

#[derive(Default)]
struct Seen {
    connections: HashMap<usize, Connection>,
    passed: u64,
    /// The names of the messages of the control connections, in their order.
    said: Vec<String>,
    id: Option<[u8; 16]>,
}

#[derive(Default)]
struct Connection {
    /// Known from its first bytes.
    is_control: Option<bool>,
    lanes: [Lane; 2],
}

/// One direction of a connection.
#[derive(Default)]
struct Lane {
    /// How much of the current piece is still to come.
    left: usize,
    /// The message that is just passing.
    message: Option<String>,
    /// The length of the device state that follows the message.
    state: usize,
}

impl Proxy {
    /// A proxy to `destination` that does `action` at `point`, once.
    pub(crate) fn new(destination: &Address, point: Point, action: Action) -> Self {
        Self::repeated(destination, point, action, 1)
    }

    /// Does `action` again when the same point comes again, `times` times in all.
    pub(crate) fn repeated(
        destination: &Address,
        point: Point,
        action: Action,
        times: u32,
    ) -> Self {
        let (host, port) = socket_address(destination);
        let destination = SocketAddr::new(host.parse().unwrap(), port);
        let watch = Arc::new(Watch {
            point,
            action,
            times: Mutex::new(times),
            seen: Mutex::default(),
            nobody: Port::new().unwrap(),
        });
        let middlebox = Middlebox::observed(destination, watch.clone()).unwrap();
        Self {
            address: format!("tcp:{}", middlebox.address()).parse().unwrap(),
            middlebox,
            watch,
        }
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    pub(crate) fn point(&self) -> Point {
        self.watch.point
    }

    /// For [`Point::Asked`].
    pub(crate) fn act(&self) {
        self.watch.act(&self.middlebox);
    }

    /// Whether the action has been done as often as it was to be done.
    pub(crate) fn has_acted(&self) -> bool {
        *lock(&self.watch.times) == 0
    }

    /// The messages of the control connections, both ways, whether they were passed on or not.
    pub(crate) fn said(&self) -> Vec<String> {
        lock(&self.watch.seen).said.clone()
    }

    /// The migration's id.
    pub(crate) fn id(&self) -> [u8; 16] {
        lock(&self.watch.seen).id.expect("no source has come")
    }
}

/// Tells a destination, in place of its source, that the outcome is known.
pub(crate) fn settle(destination: &Address, id: [u8; 16]) {
    let control = TcpStream::connect(socket_address(destination));
    let messages = [opening(id), message(COMMIT), message(SETTLED)];
    // A destination that knows already is gone.
    let _ = control.and_then(|mut control| control.write_all(&messages.concat()));
}

/// Asks a destination that waits for its source's acknowledgement for the outcome.
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

/// A message on the wire.
pub(crate) fn message(json: &str) -> Vec<u8> {
    [json.as_bytes(), b"\n"].concat()
}

/// Reads a message without its line end, and nothing after it.
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

/// The name of a message.
pub(crate) fn name_of(json: &[u8]) -> String {
    let value: serde_json::Value = serde_json::from_slice(json).unwrap();
    let names = [&value["request"], &value["answer"]];
    names.map(|name| name.as_str().unwrap_or_default()).concat()
}

impl Watch {
    fn act(&self, middlebox: &Handle) {
        let mut times = lock(&self.times);
        if *times == 0 {
            return;
        }
        *times -= 1;
        drop(times);
        let set_flow = |middlebox: &Handle, flow| {
            for direction in Direction::BOTH {
                middlebox.set_flow(direction, flow);
            }
        };
        match self.action {
            Action::Stall(time) => {
                set_flow(middlebox, Flow::Hold);
                let middlebox = middlebox.clone();
                thread::spawn(move || {
                    thread::sleep(time);
                    set_flow(&middlebox, Flow::Pass);
                });
            }
            Action::Freeze => set_flow(middlebox, Flow::Hold),
            Action::CutAll => drop(middlebox.apply(Which::All, Change::Close)),
            Action::Die => {
                middlebox.lead_to(self.nobody.address());
                middlebox.apply(Which::All, Change::Close);
            }
            Action::Vanish => {
                middlebox.admit(Admission::Refuse).unwrap();
                middlebox.apply(Which::All, Change::Close);
            }
            Action::CutControl => {
                for connection in self.open(middlebox, true) {
                    middlebox.apply(Which::One(connection), Change::Close);
                }
            }
            Action::CutChannel(number) => {
                let channels = self.open(middlebox, false);
                if let Some(index) = number.checked_rem(channels.len()) {
                    middlebox.apply(Which::One(channels[index]), Change::Close);
                }
            }
        }
    }

    /// The open control connections, or the open channels.
    fn open(&self, middlebox: &Handle, control: bool) -> Vec<usize> {
        let seen = lock(&self.seen);
        let is_one = |number: &usize| {
            let known = seen.connections.get(number);
            known.is_some_and(|known| known.is_control == Some(control))
        };
        let all = middlebox.connections();
        let open = (0..all.len()).filter(|number| all[*number].status == Status::Open);
        open.filter(is_one).collect()
    }
}

impl Observer for Watch {
    fn piece(
        &self,
        middlebox: &Handle,
        connection: usize,
        direction: Direction,
        bytes: &[u8],
    ) -> usize {
        let mut seen = lock(&self.seen);
        if let Some(passed) = seen.lane(connection, direction).take_passed() {
            drop(seen);
            if matches!(self.point, Point::After(point) if point == passed) {
                self.act(middlebox);
            }
            seen = lock(&self.seen);
        }
        if seen.lane(connection, direction).left == 0 {
            let Some(message) = seen.begin(connection, direction, bytes) else {
                return 0;
            };
            drop(seen);
            if matches!((self.point, message), (Point::Before(point), Some(it)) if point == it) {
                self.act(middlebox);
            }
            seen = lock(&self.seen);
        }
        let mut len = seen.lane(connection, direction).left.min(bytes.len());
        if let Point::Bytes(point) = self.point
            && len > 0
        {
            if seen.passed == point {
                drop(seen);
                self.act(middlebox);
                seen = lock(&self.seen);
            } else if let Some(left) = point.checked_sub(seen.passed) {
                len = len.min(usize::try_from(left).unwrap());
            }
        }
        seen.passed += len as u64;
        seen.lane(connection, direction).left -= len;
        len
    }
}

impl Seen {
    fn lane(&mut self, connection: usize, direction: Direction) -> &mut Lane {
        let connection = self.connections.entry(connection).or_default();
        &mut connection.lanes[direction as usize]
    }

    /// Begins the next piece, if it is complete, and returns the name of its message, if it is one.
    fn begin(
        &mut self,
        number: usize,
        direction: Direction,
        bytes: &[u8],
    ) -> Option<Option<String>> {
        const OPENING: usize = 24;
        let connection = self.connections.entry(number).or_default();
        let lane = &mut connection.lanes[direction as usize];
        match connection.is_control {
            None if direction == Direction::ToListener => {
                let opening = bytes.get(..OPENING)?;
                let is_control = opening.starts_with(b"VAMOOSEC");
                connection.is_control = Some(is_control);
                if is_control {
                    self.id = Some(opening[8..].try_into().unwrap());
                }
                lane.left = OPENING;
            }
            Some(true) if lane.state > 0 => lane.left = std::mem::take(&mut lane.state),
            Some(true) => {
                lane.left = 1 + bytes.iter().position(|byte| *byte == b'\n')?;
                let message = &bytes[..lane.left];
                let name = name_of(message);
                if name == "state" {
                    let value: serde_json::Value = serde_json::from_slice(message).unwrap();
                    lane.state = usize::try_from(value["len"].as_u64().unwrap()).unwrap();
                }
                lane.message = Some(name.clone());
                self.said.push(name.clone());
                return Some(Some(name));
            }
            None | Some(false) => lane.left = bytes.len(),
        }
        Some(None)
    }
}

impl Lane {
    /// The message that has just passed.
    fn take_passed(&mut self) -> Option<String> {
        self.message.take_if(|_| self.left == 0)
    }
}
