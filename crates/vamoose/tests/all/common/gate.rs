//! A middlebox between `migrate` and `serve` that waits for a message: it holds the message, cuts the connection before or after
//! it, or loses its answer.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    middlebox::{Admission, Change, Direction, Handle, Middlebox, Observer, Which},
    watched::Watched,
};

use super::LIMIT;

/// Passes all connections to the server; [`Gate::rule`] decides the fate of a message. The gate's address stays when the server's
/// changes.
pub(crate) struct Gate {
    pub(crate) address: String,
    middlebox: Middlebox,
    rules: Arc<Rules>,
}

/// A message to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// A request of `migrate`, by its name on the wire.
    Request(&'static str),
    /// An answer of `serve`, by its name on the wire.
    Answer(&'static str),
    /// The beginning of QEMU's main stream, which the destination QEMU waits for.
    MainStream,
    /// The destination QEMU's message on the return path that it has loaded the guest.
    Loaded,
}

/// The fate of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fate {
    #[default]
    Passes,
    /// It waits for [`Gate::release`].
    Held,
    /// Its connection is cut instead.
    CutBefore,
    /// It passes, and its connection is cut.
    CutAfter,
    /// It passes, and its connection is cut when the answer arrives.
    AnswerLost,
}

#[derive(Default)]
struct Rules(Watched<State>);

#[derive(Default)]
struct State {
    rule: Option<(Message, Fate)>,
    held: usize,
    /// The number of releases, and the fate that the last one decided.
    released: (u64, Fate),
    /// The fate of a connection after its message has passed, by the connection's number and the direction.
    passing: HashMap<(usize, usize), Fate>,
    /// Connections whose next bytes from the server do not arrive.
    lose_answer: HashSet<usize>,
}

impl Gate {
    pub(crate) fn start(server: &str) -> Result<Self> {
        let rules = Arc::<Rules>::default();
        let middlebox = Middlebox::observed(socket_address(server)?, rules.clone())?;
        Ok(Self {
            address: format!("tcp:{}", middlebox.address()),
            middlebox,
            rules,
        })
    }

    /// Such messages meet this fate from now on; all others pass.
    pub(crate) fn rule(&self, message: Message, fate: Fate) {
        self.rules.0.lock().rule = Some((message, fate));
    }

    /// Waits until a message is held.
    pub(crate) fn wait_until_held(&self) -> Result<()> {
        let held = |state: &State| (state.held > 0).then_some(());
        let is_held = self.rules.0.wait(LIMIT, held).is_some();
        ensure!(
            is_held,
            "no message came for the rule {:?}",
            self.rules.0.lock().rule
        );
        Ok(())
    }

    /// Held messages meet this fate now, and later ones pass.
    pub(crate) fn release(&self, fate: Fate) {
        self.rules.0.update(|state| {
            state.rule = None;
            state.released = (state.released.0 + 1, fate);
        });
    }

    /// Passes connections to come to another server.
    pub(crate) fn lead_to(&self, server: &str) {
        self.middlebox.lead_to(socket_address(server).unwrap());
    }

    /// Cuts all connections, also those of held messages, and refuses new ones.
    pub(crate) fn close(&self) {
        self.middlebox.admit(Admission::Refuse).unwrap();
        self.middlebox.apply(Which::All, Change::Close);
        self.release(Fate::CutBefore);
    }

    /// Accepts connections again.
    pub(crate) fn open(&self) {
        self.middlebox.admit(Admission::Pass).unwrap();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // The middlebox waits for threads that hold a message.
        self.release(Fate::CutBefore);
    }
}

fn socket_address(server: &str) -> Result<SocketAddr> {
    let address = server.trim_start_matches("tcp:").parse();
    address.with_context(|| format!("not an address: {server}"))
}

impl Message {
    fn direction(self) -> Direction {
        match self {
            Self::Request(_) | Self::MainStream => Direction::ToListener,
            Self::Answer(_) | Self::Loaded => Direction::ToDialler,
        }
    }

    /// The bytes that identify the message. All are short and written at once, so they arrive together.
    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Request(name) => format!("\"request\":\"{name}\"").into_bytes(),
            Self::Answer(name) => format!("\"answer\":\"{name}\"").into_bytes(),
            Self::MainStream => b"QEVM".to_vec(),
            // Type 1 (SHUT), four bytes long, no error.
            Self::Loaded => vec![0, 1, 0, 4, 0, 0, 0, 0],
        }
    }

    fn is_in(self, piece: &[u8], direction: Direction) -> bool {
        let bytes = self.bytes();
        let mut windows = piece.windows(bytes.len());
        self.direction() == direction && windows.any(|window| window == bytes)
    }
}

impl Observer for Rules {
    fn piece(
        &self,
        middlebox: &Handle,
        connection: usize,
        direction: Direction,
        bytes: &[u8],
    ) -> usize {
        let key = (connection, direction as usize);
        let mut state = self.0.lock();
        let passed = state.passing.remove(&key);
        if passed == Some(Fate::AnswerLost) {
            state.lose_answer.insert(connection);
        }
        let is_answer = direction == Direction::ToDialler && !bytes.is_empty();
        let is_lost = is_answer && state.lose_answer.contains(&connection);
        drop(state);
        let fate = match passed {
            Some(Fate::CutAfter) => Fate::CutBefore,
            _ if is_lost => Fate::CutBefore,
            _ => self.fate(bytes, direction),
        };
        match fate {
            Fate::Passes | Fate::Held => {}
            Fate::CutBefore => {
                middlebox.apply(Which::One(connection), Change::Close);
                return 0;
            }
            Fate::CutAfter | Fate::AnswerLost => {
                self.0.lock().passing.insert(key, fate);
            }
        }
        bytes.len()
    }
}

impl Rules {
    /// The fate of these bytes, once it has been decided.
    fn fate(&self, bytes: &[u8], direction: Direction) -> Fate {
        let number = match *self.0.lock() {
            State {
                rule: Some((message, fate)),
                released,
                ..
            } if message.is_in(bytes, direction) => match fate {
                Fate::Held => released.0,
                fate => return fate,
            },
            _ => return Fate::Passes,
        };
        self.0.update(|state| state.held += 1);
        let decided = |state: &State| (state.released.0 != number).then_some(state.released.1);
        let fate = loop {
            if let Some(fate) = self.0.wait(LIMIT, decided) {
                break fate;
            }
        };
        self.0.update(|state| state.held -= 1);
        fate
    }
}
