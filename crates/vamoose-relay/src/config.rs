//! The configuration of a relay, and its connections to the destination.

use std::{collections::VecDeque, num::NonZeroU64, sync::Mutex, time::Duration};

use multifd::Layout;
use vamoose_link::{
    Address, Limit, MethodChoice, Opening, Remote, Session, Socket, SocketError, Stream, dial, lock,
};

use crate::RelayError;

/// What a relay does with pages.
#[derive(Clone)]
pub struct Config {
    /// Method and level of outgoing pages, and the engines that encode and decode.
    pub method: MethodChoice,
    /// Re-encodes with the source QEMU's method, if the relay before this one reports it: libvirt configures both QEMUs alike.
    pub restore: bool,
    /// Name of the guest, if it is known: which group of guests it shares pages with.
    pub guest: Option<String>,
    /// Page size of the guest.
    pub layout: Layout,
    /// Number of channels that the source opens, where the caller knows it.
    pub incoming_channels: Option<usize>,
    /// Number of channels to the destination; as many as from the source, if `None`.
    pub outgoing_channels: Option<usize>,
    /// Bandwidth limit towards the destination, in bytes per second.
    pub max_bandwidth: Option<NonZeroU64>,
    /// Limit that this migration shares with others towards their destinations.
    pub limit: Limit,
    /// Abort after this long without progress from a peer.
    pub stall_timeout: Duration,
    /// What happens to zero pages.
    pub zero_pages: ZeroPages,
    /// Whether the destination QEMU is set up for method zstd, and decodes zstd frames itself
    /// ([`ChannelWriter::send_frames`](vamoose_link::ChannelWriter::send_frames)).
    pub(crate) is_decoded_by_qemu: bool,
    /// The link is too fast for the encoders to fill it.
    pub(crate) has_fast_link: bool,
    /// Whether to send differences for pages that were sent before, where that is shorter. Requires a session whose server keeps
    /// the pages, and a method whose packets can hold differences.
    pub delta: bool,
}

impl Config {
    /// A relay that sends pages by `method`, with defaults for everything else.
    pub fn new(method: impl Into<MethodChoice>) -> Self {
        let method = method.into();
        Self {
            delta: matches!(method, MethodChoice::Adaptive(_)),
            method,
            restore: false,
            guest: None,
            layout: Layout::X86,
            incoming_channels: None,
            outgoing_channels: None,
            max_bandwidth: None,
            limit: Limit::default(),
            stall_timeout: Duration::from_secs(15),
            zero_pages: ZeroPages::Pass,
            is_decoded_by_qemu: false,
            has_fast_link: false,
        }
    }

    /// Whether its packets can have references to a destination's page store: its sessions are to take one then.
    pub fn takes_store(&self) -> bool {
        self.method.takes_differences() && !self.restore
    }
}

/// What a relay does with pages that are all zeros, which a source may send as offsets without data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroPages {
    /// Forwards them: for destinations from QEMU 9.0 on, and for another relay.
    #[default]
    Pass,
    /// Expands them to normal pages: for older destinations, which would lose them silently.
    Expand,
    /// Detects more of them among the normal pages, for a source that does not.
    Detect,
}

/// Opens connections towards the destination.
pub struct Dialer {
    to: To,
    /// The first bytes of each connection; empty towards a QEMU.
    preamble: Vec<u8>,
}

enum To {
    /// A QEMU, or a relay that accepts plain connections. The first connection may be open already.
    Socket(Address, Mutex<Option<Socket>>),
    /// Another Vamoose.
    Session(Box<Begin>, Mutex<Option<Begun>>),
}

/// Begins a session that is to have this many streams. Some may be open then. Called again if no stream could be opened afterwards.
type Begin = dyn Fn(usize) -> Result<(Session, Vec<Opening>), RelayError> + Send + Sync;

struct Begun {
    session: Session,
    /// Streams for the next connections.
    ahead: VecDeque<Opening>,
    is_used: bool,
}

impl Begun {
    fn new((session, ahead): (Session, Vec<Opening>)) -> Self {
        Self {
            session,
            ahead: ahead.into(),
            is_used: false,
        }
    }
}

/// First byte of each stream from relay to relay: a session announces a stream with its first byte, and a QEMU may
/// send none for a long time.
pub(crate) const RELAYED: u8 = b'r';

/// First byte of each stream of [`Relay::pass_bytes`](crate::Relay::pass_bytes).
pub(crate) const BYTES: u8 = b'b';

impl Dialer {
    /// To a QEMU, or to a relay that accepts plain connections.
    pub fn new(address: Address) -> Self {
        Self::dialled(address, None)
    }

    /// To another relay, over a session that the first connection begins.
    pub fn remote(remote: Remote) -> Self {
        Self::of_kind(remote, RELAYED)
    }

    /// As [`remote`](Self::remote), for [`Relay::pass_bytes`](crate::Relay::pass_bytes).
    pub fn remote_bytes(remote: Remote) -> Self {
        Self::of_kind(remote, BYTES)
    }

    fn of_kind(remote: Remote, kind: u8) -> Self {
        let begin = move |streams| {
            let (session, stream) = remote.dial_for(streams)?;
            let first = Opening::opened(&session, stream);
            Ok((session, vec![first]))
        };
        Self::session(begin, &[kind])
    }

    /// To a QEMU, over the connection in `first` if there is one.
    pub(crate) fn dialled(address: Address, first: Option<Socket>) -> Self {
        Self {
            to: To::Socket(address, Mutex::new(first)),
            preamble: Vec::new(),
        }
    }

    /// To another Vamoose, over the session from `begin`. Each stream begins with `preamble`.
    pub(crate) fn session(
        begin: impl Fn(usize) -> Result<(Session, Vec<Opening>), RelayError> + Send + Sync + 'static,
        preamble: &[u8],
    ) -> Self {
        Self {
            to: To::Session(Box::new(begin), Mutex::default()),
            preamble: preamble.to_vec(),
        }
    }

    /// The session, once a first connection has been dialled over it.
    pub fn with(&self) -> Option<Session> {
        match &self.to {
            To::Socket(..) => None,
            To::Session(_, begun) => lock(begun).as_ref().map(|begun| begun.session.clone()),
        }
    }

    /// Whether the other end may be a QEMU.
    pub(crate) fn is_to_qemu(&self) -> bool {
        matches!(self.to, To::Socket(..))
    }

    /// Begins to open as many connections to another Vamoose as are to be dialled next, side by side.
    pub(crate) fn open_ahead(&self, count: usize) -> Result<(), RelayError> {
        if let To::Session(begin, begun) = &self.to {
            let mut begun = lock(begun);
            let now = match &mut *begun {
                Some(now) => now,
                none => none.insert(Begun::new(begin(count)?)),
            };
            let missing = count.saturating_sub(now.ahead.len());
            now.ahead.extend(now.session.open_ahead(missing));
        }
        Ok(())
    }

    pub(crate) fn dial(&self, first: &[u8], timeout: Duration) -> Result<Stream, RelayError> {
        match &self.to {
            To::Socket(address, dialled) => {
                let dialled = lock(dialled).take();
                let socket = dialled.map_or_else(|| dial(address, timeout), Ok)?;
                let written = socket.write_both(&self.preamble, first);
                written.map_err(|source| SocketError::dial(address, source))?;
                Ok(socket.into())
            }
            To::Session(begin, begun) => {
                let mut begun = lock(begun);
                let now = match &mut *begun {
                    Some(now) => now,
                    none => none.insert(Begun::new(begin(1)?)),
                };
                let ahead = now.ahead.pop_front();
                let opened = ahead.map_or_else(|| now.session.open(), Opening::wait);
                now.is_used |= opened.is_ok();
                if !now.is_used {
                    *begun = None;
                }
                drop(begun);
                let stream = opened?;
                stream
                    .write_both(&self.preamble, first)
                    .map_err(RelayError::Opening)?;
                Ok(stream)
            }
        }
    }
}
