//! What a relay does with the pages that cross it, and how it reaches the destination.

use std::{
    num::{NonZeroU64, NonZeroUsize},
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use multifd::{Layout, Method};
use vamoose_link::{
    Address, MethodChoice, Remote, Session, Socket, SocketError, Stream, dial, lock,
};

use crate::{Placement, RelayError};

/// What a relay does with pages.
#[derive(Clone)]
pub struct Config {
    /// Method and level of outgoing pages, and the engines that encode and decode.
    pub method: MethodChoice,
    /// Re-encodes with the source QEMU's method, if the relay before this one reports it: libvirt configures both QEMUs alike.
    pub restore: bool,
    /// Page size of the guest.
    pub layout: Layout,
    /// Number of channels that the source opens, where the caller knows it.
    pub incoming_channels: Option<usize>,
    /// Number of channels to the destination; as many as from the source, if `None`.
    pub outgoing_channels: Option<usize>,
    /// Bandwidth limit towards the destination, in bytes per second.
    pub max_bandwidth: Option<NonZeroU64>,
    /// Abort after this long without progress from a peer.
    pub stall_timeout: Duration,
    /// What happens to zero pages.
    pub zero_pages: ZeroPages,
    /// Packets encoded in parallel per channel, for engines with a latency. More than 1 has an effect only
    /// where the method's packets are independent (auto, lz4, zstd-frames, qpl, qatzip).
    pub streams: NonZeroUsize,
    /// The destination's memory, where its pages are written by the relay. It has an effect with as many channels out as in
    /// and a single stream.
    pub placement: Option<Arc<Placement>>,
    /// The method of all packets, where they go to a destination QEMU as they come: it decodes them itself. With as many
    /// channels out as in and a single stream.
    pub(crate) passed: Option<Method>,
    /// Whether pages that were sent before go as differences where that pays: over a session whose server keeps them too,
    /// by methods whose packets may hold them.
    pub delta: bool,
}

impl Config {
    /// A relay that passes pages on by `method`, everything else by default.
    pub fn new(method: impl Into<MethodChoice>) -> Self {
        let method = method.into();
        Self {
            delta: matches!(method, MethodChoice::Adaptive(_)),
            method,
            restore: false,
            layout: Layout::X86,
            incoming_channels: None,
            outgoing_channels: None,
            max_bandwidth: None,
            stall_timeout: Duration::from_secs(15),
            zero_pages: ZeroPages::Pass,
            streams: NonZeroUsize::MIN,
            placement: None,
            passed: None,
        }
    }
}

/// What a relay does with pages that are all zeros, which a source may send as offsets without data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroPages {
    /// Passes them on: for destinations from QEMU 9.0 on, and for another relay.
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
    Socket(Address),
    /// The first connection is open already.
    Dialled(Mutex<Option<Socket>>, Address),
    Remote(Remote, Mutex<Option<Session>>),
    Session(Session),
    Announced(Announce, OnceLock<Session>),
}

/// Begins a session, or says why the peer does not want it.
type Announce = Box<dyn Fn() -> Result<Session, RelayError> + Send + Sync>;

/// First byte of each stream from relay to relay: a session announces a stream with its first byte, and a QEMU may
/// send none for long.
pub(crate) const RELAYED: u8 = b'r';

impl Dialer {
    /// To a QEMU, or to a relay that takes plain connections.
    pub fn new(address: Address) -> Self {
        Self::of(To::Socket(address))
    }

    /// To another relay, over a session that the first connection begins.
    pub fn remote(remote: Remote) -> Self {
        Self {
            preamble: vec![RELAYED],
            ..Self::of(To::Remote(remote, Mutex::default()))
        }
    }

    /// To a server that the session is with; each stream begins with `preamble`.
    pub(crate) fn session(session: Session, preamble: &[u8]) -> Self {
        Self {
            preamble: preamble.to_vec(),
            ..Self::of(To::Session(session))
        }
    }

    /// To a QEMU to which a first connection is open.
    pub(crate) fn dialled(first: Socket, address: Address) -> Self {
        Self::of(To::Dialled(Mutex::new(Some(first)), address))
    }

    /// To another gateway, which `announce` asks before the first stream; each stream begins with `preamble`.
    pub(crate) fn announced(announce: Announce, preamble: &[u8]) -> Self {
        Self {
            preamble: preamble.to_vec(),
            ..Self::of(To::Announced(announce, OnceLock::new()))
        }
    }

    fn of(to: To) -> Self {
        let preamble = Vec::new();
        Self { to, preamble }
    }

    /// The session, if there is one.
    pub fn with(&self) -> Option<Session> {
        match &self.to {
            To::Socket(_) | To::Dialled(..) => None,
            To::Remote(_, session) => lock(session).clone(),
            To::Session(session) => Some(session.clone()),
            To::Announced(_, session) => session.get().cloned(),
        }
    }

    /// Whether the other end is a relay that classifies the migration, over a session.
    pub(crate) fn is_to_relay(&self) -> bool {
        matches!(self.to, To::Remote(..) | To::Announced(..))
    }

    pub(crate) fn dial(&self, first: &[u8], timeout: Duration) -> Result<Stream, RelayError> {
        let stream = match &self.to {
            To::Socket(address) => return self.dial_qemu(None, address, first, timeout),
            To::Dialled(socket, address) => {
                let dialled = lock(socket).take();
                return self.dial_qemu(dialled, address, first, timeout);
            }
            To::Session(session) => session.open()?,
            To::Announced(announce, session) => {
                let session = match session.get() {
                    Some(session) => session,
                    None => {
                        let begun = announce()?;
                        session.get_or_init(|| begun)
                    }
                };
                session.open()?
            }
            To::Remote(remote, session) => {
                let mut session = lock(session);
                match &*session {
                    Some(session) => session.open()?,
                    None => {
                        let (begun, stream) = remote.dial()?;
                        *session = Some(begun);
                        stream
                    }
                }
            }
        };
        stream
            .write_both(&self.preamble, first)
            .map_err(RelayError::Opening)?;
        Ok(stream)
    }

    fn dial_qemu(
        &self,
        dialled: Option<Socket>,
        address: &Address,
        first: &[u8],
        timeout: Duration,
    ) -> Result<Stream, RelayError> {
        let socket = match dialled {
            Some(socket) => socket,
            None => dial(address, timeout)?,
        };
        let written = socket.write_both(&self.preamble, first);
        written.map_err(|source| SocketError::dial(address, source))?;
        Ok(socket.into())
    }
}
