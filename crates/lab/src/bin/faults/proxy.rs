//! The link between two hosts: every connection goes through here, and here it breaks.
//!
//! ```text
//!  migrate ──> Proxy ──> serve     passes the bytes of sessions without TLS, the control connection's message by message
//!               │
//!               └ a Strike at a Point: done while the bytes at that point wait
//! ```

mod connection;
mod message;

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use lab::process::{now, wait_readable};
use lab::sockets::Port;
use lab::watched::Watched;

use connection::Connection;

/// A proxy, which ends with all its connections when it is dropped.
pub(crate) struct Proxy {
    link: Link,
    acceptor: Option<JoinHandle<()>>,
}

/// What can be done to it, from any thread.
#[derive(Clone)]
pub(crate) struct Link(Arc<Shared>);

/// Where in what passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// So many bytes of pages towards the destination.
    Bytes(u64),
    /// A message has come, and has not been passed on.
    Before(&'static str),
    /// A message has been passed on.
    After(&'static str),
}

/// What is done at a point. Whatever passes there waits for it.
pub(crate) type Strike = Box<dyn FnOnce() + Send>;

/// Which connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    Control,
    /// All but the control connections.
    Data,
    /// One of them, by a number that chance gave.
    OneOfData(usize),
}

/// How a connection is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends see that the other one has finished.
    Finished,
    /// Both ends get an error.
    Reset,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the source to the destination.
    There,
    Back,
}

/// A message of a control connection, as it came.
#[derive(Clone, Debug)]
pub(crate) struct Heard {
    /// Since 1970.
    pub(crate) at: Duration,
    pub(crate) word: String,
}

struct Shared {
    port: Port,
    state: Watched<State>,
}

#[derive(Default)]
struct State {
    upstream: Option<SocketAddr>,
    flow: Flow,
    refusing: bool,
    closing: bool,
    connections: Vec<Arc<Connection>>,
    heard: Vec<Heard>,
    bytes: u64,
    /// A bit of the next bytes of pages that will be another one.
    flip: Option<u64>,
    strikes: Vec<(Point, Strike)>,
}

/// What happens to bytes on their way.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    silent_there: bool,
    silent_back: bool,
    /// Bytes that go this way are swallowed.
    hole: Option<Way>,
    delay: Duration,
}

impl Proxy {
    /// A proxy to the server at `upstream`.
    pub(crate) fn new(upstream: SocketAddr) -> Result<Self> {
        let port = Port::new().context("taking a port for the proxy")?;
        port.listen().context("listening for the proxy")?;
        let state = State {
            upstream: Some(upstream),
            ..State::default()
        };
        let link = Link(Arc::new(Shared {
            port,
            state: Watched::new(state),
        }));
        let acceptor = thread::spawn({
            let link = link.clone();
            move || link.accept()
        });
        Ok(Self {
            link,
            acceptor: Some(acceptor),
        })
    }

    pub(crate) fn address(&self) -> String {
        format!("tcp:{}", self.link.0.port.address())
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.link.0.state.update(|state| state.closing = true);
        self.link.cut(Which::All, Cut::Reset);
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

impl Link {
    /// The server listens somewhere else from now on.
    pub(crate) fn lead_to(&self, upstream: SocketAddr) {
        self.lock().upstream = Some(upstream);
    }

    /// Has something done when `point` is reached for the first time from now on.
    pub(crate) fn arm(&self, point: Point, strike: Strike) {
        self.lock().strikes.push((point, strike));
    }

    pub(crate) fn cut(&self, which: Which, how: Cut) {
        for connection in self.connections(which) {
            connection.cut(how);
        }
    }

    /// Nothing passes any more, one way or both, and neither end gets an error.
    pub(crate) fn silence(&self, there: bool, back: bool) {
        let mut state = self.lock();
        state.flow.silent_there |= there;
        state.flow.silent_back |= back;
    }

    /// Bytes that go this way vanish, and neither end gets an error.
    pub(crate) fn swallow(&self, way: Way) {
        self.lock().flow.hole = Some(way);
    }

    /// Cuts everything, and accepts no more connections.
    pub(crate) fn refuse(&self) {
        self.0.state.update(|state| {
            state.refusing = true;
            // What has not been accepted is refused, too. It cannot fail for a port of our own.
            let _ = self.0.port.refuse();
        });
        self.cut(Which::All, Cut::Reset);
    }

    /// Everything that passes is late.
    pub(crate) fn delay(&self, delay: Duration) {
        self.lock().flow.delay = delay;
    }

    /// Says everything that was said to the destination once more, over further connections.
    pub(crate) fn duplicate(&self, which: Which) {
        let upstream = self.lock().upstream;
        for connection in self.connections(which) {
            connection.say_again(upstream);
        }
    }

    /// Changes one bit of the next bytes of pages towards the destination.
    pub(crate) fn flip(&self, bit: u64) {
        self.lock().flip = Some(bit);
    }

    /// Everything passes again. Connections from which bytes are missing are cut.
    pub(crate) fn repair(&self) {
        let before = self.0.state.update(|state| {
            state.flip = None;
            if std::mem::take(&mut state.refusing) {
                // As above: the port is still ours.
                let _ = self.0.port.listen();
            }
            std::mem::take(&mut state.flow)
        });
        if before.hole.is_some() {
            self.cut(Which::All, Cut::Reset);
        }
    }

    /// The messages so far, oldest first.
    pub(crate) fn heard(&self) -> Vec<Heard> {
        self.lock().heard.clone()
    }

    /// Bytes of pages so far, towards the destination.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    fn connections(&self, which: Which) -> Vec<Arc<Connection>> {
        let state = self.lock();
        let all = state.connections.iter().filter(|it| !it.has_ended());
        let (control, data): (Vec<_>, Vec<_>) = all.cloned().partition(|it| it.is_control());
        match which {
            Which::All => control.into_iter().chain(data).collect(),
            Which::Control => control,
            Which::Data => data,
            Which::OneOfData(number) => {
                let index = number.checked_rem(data.len());
                index.map(|index| data[index].clone()).into_iter().collect()
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    /// Accepts connections until the proxy is dropped.
    fn accept(&self) {
        while !self.lock().closing {
            if self.lock().refusing {
                let changed = |state: &State| (state.closing || !state.refusing).then_some(());
                self.0.state.wait(LOOK, changed);
            } else if let Some(near) = accept_one(&self.0.port) {
                let link = self.clone();
                thread::spawn(move || connection::serve(near, &link));
            }
        }
    }

    /// Waits until bytes may go on; whether they are to be written at all.
    fn flow(&self, way: Way) -> io::Result<bool> {
        let flow = loop {
            let passes = |state: &State| {
                let silent = match way {
                    Way::There => state.flow.silent_there,
                    Way::Back => state.flow.silent_back,
                };
                (state.closing || !silent).then_some(state.flow)
            };
            if let Some(flow) = self.0.state.wait(LOOK, passes) {
                break flow;
            }
        };
        if self.lock().closing {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        // To be late is the fault.
        thread::sleep(flow.delay);
        Ok(flow.hole != Some(way))
    }

    /// Does what is to be done at a point.
    fn reach(&self, reached: impl Fn(&Point) -> bool) {
        let mut state = self.lock();
        let strikes = state.strikes.extract_if(.., |(point, _)| reached(point));
        let strikes: Vec<_> = strikes.collect();
        drop(state);
        for (_, strike) in strikes {
            strike();
        }
    }

    fn on_message(&self, word: &str) {
        self.lock().heard.push(Heard {
            at: now(),
            word: word.to_owned(),
        });
    }
}

/// How often what waits looks whether the proxy is being dropped.
const LOOK: Duration = Duration::from_millis(20);

fn accept_one(port: &Port) -> Option<TcpStream> {
    wait_readable([port.as_fd()], LOOK).ok()?;
    let stream = port.accept().ok()?;
    stream.set_nonblocking(false).ok()?;
    Some(stream)
}

#[cfg(test)]
mod tests;
