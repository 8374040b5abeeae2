//! A network of the test's own between `migrate` and `serve`: it holds a message back, cuts the connection before or after
//! it, or loses its answer.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::{Result, ensure};

use super::LIMIT;

/// Leads every connection to its server, see [`Gate::rule`] for those that it does not lead through. Its address stays when
/// the server's changes.
pub(crate) struct Gate {
    pub(crate) address: String,
    shared: Arc<Shared>,
}

/// What is looked for in everything that passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// A request of `migrate`'s, by its name on the wire.
    Request(&'static str),
    /// An answer of `serve`'s, by its name on the wire.
    Answer(&'static str),
    /// The beginning of QEMU's main stream. The destination QEMU waits for it when it comes.
    MainStream,
    /// The destination QEMU's word, on the return path, that it has loaded the guest.
    Loaded,
}

/// What becomes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Passes,
    /// It waits for [`Gate::release`].
    Held,
    /// Its connection is cut instead.
    CutBefore,
    /// It goes through, and its connection is cut.
    CutAfter,
    /// It goes through, and its connection is cut when the answer comes.
    AnswerLost,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    server: String,
    open: bool,
    rule: Option<(Message, Fate)>,
    held: usize,
    /// How many releases there have been, and what the last one decided.
    released: (u64, Fate),
    connections: Vec<Weak<Connection>>,
}

struct Connection {
    near: TcpStream,
    far: TcpStream,
    /// The next bytes from the server do not arrive.
    loses_answer: AtomicBool,
}

impl Gate {
    pub(crate) fn start(server: &str) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = format!("tcp:{}", listener.local_addr()?);
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                server: host_and_port(server),
                open: true,
                rule: None,
                held: 0,
                released: (0, Fate::Passes),
                connections: Vec::new(),
            }),
            changed: Condvar::new(),
        });
        thread::spawn({
            let shared = shared.clone();
            // Ends with the test's process.
            move || {
                for near in listener.incoming().flatten() {
                    let shared = shared.clone();
                    thread::spawn(move || shared.lead(near));
                }
            }
        });
        Ok(Self { address, shared })
    }

    /// Every such message meets this fate from now on; all others pass.
    pub(crate) fn rule(&self, message: Message, fate: Fate) {
        self.shared.state().rule = Some((message, fate));
    }

    /// Waits until a message is held.
    pub(crate) fn wait_until_held(&self) -> Result<()> {
        let state = self.shared.state();
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, LIMIT, |state| state.held == 0)
            .unwrap_or_else(PoisonError::into_inner);
        ensure!(state.held > 0, "nothing came for the rule {:?}", state.rule);
        Ok(())
    }

    /// What is held meets this fate now, and what comes later passes.
    pub(crate) fn release(&self, fate: Fate) {
        let mut state = self.shared.state();
        state.rule = None;
        state.released = (state.released.0 + 1, fate);
        self.shared.changed.notify_all();
    }

    /// Leads to another server from now on.
    pub(crate) fn lead_to(&self, server: &str) {
        self.shared.state().server = host_and_port(server);
    }

    /// Cuts all connections, held messages with them, and lets none through any more.
    pub(crate) fn close(&self) {
        self.shared.state().open = false;
        self.release(Fate::CutBefore);
        let connections = std::mem::take(&mut self.shared.state().connections);
        for connection in connections.iter().filter_map(Weak::upgrade) {
            connection.cut();
        }
    }

    /// Lets connections through again.
    pub(crate) fn open(&self) {
        self.shared.state().open = true;
    }
}

fn host_and_port(address: &str) -> String {
    address.trim_start_matches("tcp:").to_owned()
}

impl Message {
    fn is_from_server(self) -> bool {
        matches!(self, Self::Answer(_) | Self::Loaded)
    }

    /// How it is known among other bytes. All of them are short and written at once, so that they come in one piece.
    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Request(name) => format!("\"request\":\"{name}\"").into_bytes(),
            Self::Answer(name) => format!("\"answer\":\"{name}\"").into_bytes(),
            Self::MainStream => b"QEVM".to_vec(),
            // Type 1 (SHUT), four bytes long, no error.
            Self::Loaded => vec![0, 1, 0, 4, 0, 0, 0, 0],
        }
    }

    fn is_in(self, piece: &[u8], from_server: bool) -> bool {
        let bytes = self.bytes();
        let mut windows = piece.windows(bytes.len());
        self.is_from_server() == from_server && windows.any(|window| window == bytes)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lead(&self, near: TcpStream) {
        let server = self.state().server.clone();
        let Ok(far) = TcpStream::connect(server) else {
            return;
        };
        let connection = Arc::new(Connection {
            near,
            far,
            loses_answer: AtomicBool::new(false),
        });
        {
            let mut state = self.state();
            if !state.open {
                return;
            }
            state.connections.retain(|known| known.strong_count() > 0);
            state.connections.push(Arc::downgrade(&connection));
        }
        thread::scope(|scope| {
            scope.spawn(|| self.copy(&connection, false));
            self.copy(&connection, true);
        });
    }

    fn copy(&self, connection: &Connection, from_server: bool) {
        let (mut from, mut to) = if from_server {
            (&connection.far, &connection.near)
        } else {
            (&connection.near, &connection.far)
        };
        let mut buffer = [0; 64 * 1024];
        loop {
            let piece = match from.read(&mut buffer) {
                // The other direction may still have something to send.
                Ok(0) if to.shutdown(Shutdown::Write).is_ok() => return,
                Ok(0) => break,
                Ok(read) => &buffer[..read],
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            let fate = if from_server && connection.loses_answer.load(Ordering::Acquire) {
                Fate::CutBefore
            } else {
                self.fate(piece, from_server)
            };
            if fate == Fate::AnswerLost {
                connection.loses_answer.store(true, Ordering::Release);
            }
            if fate == Fate::CutBefore || to.write_all(piece).is_err() || fate == Fate::CutAfter {
                break;
            }
        }
        connection.cut();
    }

    /// What becomes of these bytes, when it has been decided.
    fn fate(&self, piece: &[u8], from_server: bool) -> Fate {
        let mut state = self.state();
        let fate = match state.rule {
            Some((message, fate)) if message.is_in(piece, from_server) => fate,
            _ => Fate::Passes,
        };
        if fate != Fate::Held {
            return fate;
        }
        let (number, _) = state.released;
        state.held += 1;
        self.changed.notify_all();
        state = self
            .changed
            .wait_while(state, |state| state.released.0 == number)
            .unwrap_or_else(PoisonError::into_inner);
        state.held -= 1;
        state.released.1
    }
}

impl Connection {
    /// Both ends see it, whatever the other direction does.
    fn cut(&self) {
        // An end that is gone already has nothing to see.
        let _ = self.near.shutdown(Shutdown::Both);
        let _ = self.far.shutdown(Shutdown::Both);
    }
}
