//! The link between two hosts: a middlebox, whose connections are observed and broken.
//!
//! ```text
//!  migrate ──> Link ──> serve     sessions without TLS: the control stream passes message by message
//!               │
//!               └ a Strike at a Point: made while the bytes at that point wait
//! ```

mod message;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use lab::middlebox::{
    Admission, Change, Direction, Flow, Handle, Mark, Middlebox, Observer, Status,
    Which as Connections,
};
use lab::process::now;

use message::{Kind, Splitter};

/// A link. Dropping it resets its connections.
pub(crate) struct Link {
    middlebox: Middlebox,
    handle: LinkHandle,
}

/// Breaks and repairs a link from any thread.
#[derive(Clone)]
pub(crate) struct LinkHandle {
    middlebox: Handle,
    watch: Arc<Watch>,
}

/// A point in the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// After this many bytes of pages towards the destination.
    Bytes(u64),
    /// A message has arrived and has not been passed on.
    Before(&'static str),
    /// A message has been passed on.
    After(&'static str),
}

/// An action at a point. The connection waits meanwhile.
pub(crate) type Strike = Box<dyn FnOnce() + Send>;

/// A set of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    Control,
    /// All connections but those of the control stream.
    Data,
    /// A data connection, chosen by a random number.
    OneOfData(usize),
}

/// A message of the control stream.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    /// Since 1970.
    pub(crate) at: Duration,
    pub(crate) name: String,
}

/// Observes the traffic, and strikes at points.
#[derive(Default)]
struct Watch(Mutex<Seen>);

#[derive(Default)]
struct Seen {
    /// The connections by their number.
    connections: HashMap<usize, Conversation>,
    messages: Vec<Message>,
    bytes: u64,
    strikes: Vec<(Point, Strike)>,
}

struct Conversation {
    /// Known after the handshake.
    stream: Option<u32>,
    splitters: [Splitter; 2],
    /// The messages in the passing piece, by direction.
    passing: [Vec<String>; 2],
}

/// The control stream begins a session.
const CONTROL_STREAM: u32 = 0;

/// A flipped bit is within this many bytes.
const FLIPPED: u64 = 4096;

impl Link {
    /// A link to a server.
    pub(crate) fn new(server: SocketAddr) -> Result<Self> {
        let watch = Arc::<Watch>::default();
        let middlebox = Middlebox::observed(server, watch.clone())?;
        middlebox.record();
        let handle = LinkHandle {
            middlebox: Handle::clone(&middlebox),
            watch,
        };
        Ok(Self { middlebox, handle })
    }

    /// The address for the source.
    pub(crate) fn address(&self) -> String {
        format!("tcp:{}", self.middlebox.address())
    }

    pub(crate) fn handle(&self) -> &LinkHandle {
        &self.handle
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Strikes may own handles of this link.
        self.handle.watch.lock().strikes.clear();
    }
}

impl LinkHandle {
    /// Leads connections to come to another server.
    pub(crate) fn lead_to(&self, server: SocketAddr) {
        self.middlebox.lead_to(server);
    }

    /// Strikes when `point` is reached for the first time from now on.
    pub(crate) fn arm(&self, point: Point, strike: Strike) {
        self.watch.lock().strikes.push((point, strike));
    }

    /// Resets connections, or closes them.
    pub(crate) fn cut(&self, which: Which, how: Change) {
        for connection in self.connections(which) {
            self.middlebox.apply(Connections::One(connection), how);
        }
    }

    /// Changes what happens to bytes in these directions, also on connections to come.
    pub(crate) fn set_flow(&self, directions: &[Direction], flow: Flow) {
        for direction in directions {
            self.middlebox.set_flow(*direction, flow);
        }
    }

    /// Existing connections lose bytes in these directions for good, and new ones get no answer.
    pub(crate) fn deaden(&self, directions: &[Direction]) {
        // It only fails for a port that cannot listen.
        let _ = self.middlebox.admit(Admission::Silence);
        for direction in directions {
            let loses = Change::OneWay(*direction, Flow::Drop);
            self.middlebox.apply(Connections::All, loses);
        }
    }

    /// Resets everything, and refuses connections.
    pub(crate) fn refuse(&self) {
        // It only fails for a port that cannot be shut down.
        let _ = self.middlebox.admit(Admission::Refuse);
        self.middlebox.apply(Connections::All, Change::Reset);
    }

    /// Sends what the source has sent a second time, over separate connections.
    pub(crate) fn duplicate(&self, which: Which) {
        for connection in self.connections(which) {
            let sent = self.middlebox.recorded(connection, Direction::ToListener);
            let server = self.middlebox.listener();
            thread::spawn(move || {
                let Ok(mut again) = TcpStream::connect(server) else {
                    return;
                };
                // Answers are discarded.
                let _ = again.set_read_timeout(Some(Duration::from_secs(1)));
                let _ = again.write_all(&sent);
                let mut answers = [0; 4096];
                while let Ok(1..) = again.read(&mut answers) {}
            });
        }
    }

    /// Flips a bit of the next bytes of pages towards the destination.
    pub(crate) fn flip(&self, bit: u64) {
        let data = self.connections(Which::OneOfData(0));
        let (byte, bit) = (bit / 8 % FLIPPED, u8::try_from(bit % 8).unwrap_or(0));
        for connection in data {
            let passed = self.middlebox.connections()[connection].to_listener.passed;
            let mark = Mark {
                connection,
                direction: Direction::ToListener,
                bytes: passed + byte,
            };
            self.middlebox.flip_at(mark, bit);
        }
    }

    /// Everything passes again, except on connections that have lost bytes.
    pub(crate) fn repair(&self) {
        self.set_flow(&Direction::BOTH, Flow::Pass);
        // It only fails for a port that cannot listen.
        let _ = self.middlebox.admit(Admission::Pass);
    }

    /// The messages so far, oldest first.
    pub(crate) fn messages(&self) -> Vec<Message> {
        self.watch.lock().messages.clone()
    }

    /// The numbers of the open connections, those of the control stream first.
    fn connections(&self, which: Which) -> Vec<usize> {
        let seen = self.watch.lock();
        let all = self.middlebox.connections().into_iter().enumerate();
        let open = all.filter(|(_, it)| matches!(it.status, Status::Dialling | Status::Open));
        let open = open.map(|(number, _)| number);
        let is_control = |number: &usize| {
            let conversation = seen.connections.get(number);
            conversation.is_some_and(Conversation::is_control)
        };
        let (control, data): (Vec<_>, Vec<_>) = open.partition(is_control);
        match which {
            Which::All => [control, data].concat(),
            Which::Control => control,
            Which::Data => data,
            Which::OneOfData(number) => {
                let index = number.checked_rem(data.len());
                index.map(|index| data[index]).into_iter().collect()
            }
        }
    }
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Strikes at a point.
    fn reach(&self, reached: impl Fn(&Point) -> bool) {
        let mut seen = self.lock();
        let strikes = seen.strikes.extract_if(.., |(point, _)| reached(point));
        let strikes: Vec<_> = strikes.collect();
        drop(seen);
        for (_, strike) in strikes {
            strike();
        }
    }
}

impl Observer for Watch {
    fn piece(&self, _: &Handle, connection: usize, direction: Direction, bytes: &[u8]) -> usize {
        let mut seen = self.lock();
        let conversation = seen.connections.entry(connection).or_default();
        let passed = std::mem::take(&mut conversation.passing[direction as usize]);
        drop(seen);
        for name in passed {
            self.reach(|point| matches!(point, Point::After(after) if *after == name));
        }
        let mut seen = self.lock();
        let conversation = seen.connections.entry(connection).or_default();
        let is_control = conversation.is_control();
        let Some((len, kind)) = conversation.splitters[direction as usize].split(bytes, is_control)
        else {
            return 0;
        };
        match kind {
            Kind::Handshake => {}
            Kind::Attach(stream) => conversation.stream = Some(stream),
            Kind::Messages(names) => {
                conversation.passing[direction as usize].clone_from(&names);
                let messages = names.iter().map(|name| Message {
                    at: now(),
                    name: name.clone(),
                });
                seen.messages.extend(messages);
                drop(seen);
                for name in names {
                    self.reach(|point| matches!(point, Point::Before(before) if *before == name));
                }
            }
            Kind::Bytes if direction == Direction::ToListener && !is_control => {
                let passed = seen.bytes;
                drop(seen);
                self.reach(|point| matches!(point, Point::Bytes(at) if *at <= passed));
                return self.lock().count_to_next_point(len);
            }
            Kind::Bytes => {}
        }
        len
    }
}

impl Seen {
    /// Counts bytes of pages up to the next point, and returns their number.
    fn count_to_next_point(&mut self, len: usize) -> usize {
        let points = self.strikes.iter().filter_map(|(point, _)| match point {
            Point::Bytes(at) => at.checked_sub(self.bytes).filter(|left| *left > 0),
            _ => None,
        });
        let next = points.min().and_then(|left| usize::try_from(left).ok());
        let len = next.map_or(len, |next| next.min(len));
        self.bytes += len as u64;
        len
    }
}

impl Conversation {
    fn is_control(&self) -> bool {
        self.stream == Some(CONTROL_STREAM)
    }
}

impl Default for Conversation {
    fn default() -> Self {
        Self {
            stream: None,
            splitters: Direction::BOTH.map(Splitter::new),
            passing: Default::default(),
        }
    }
}

#[cfg(test)]
mod tests;
