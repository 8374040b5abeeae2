//! What a relay does with the pages that cross it, and how it reaches the destination.

use std::{
    num::{NonZeroU64, NonZeroUsize},
    time::Duration,
};

use multifd::Layout;
use vamoose_link::{Address, MethodChoice, SocketError, Stream, dial};

/// How a relay works on the pages that cross it.
#[derive(Clone)]
pub struct Config {
    /// Method and level on the outgoing channels, and what encodes and decodes.
    pub method: MethodChoice,
    /// Page size of the guest.
    pub layout: Layout,
    /// How many channels the source opens, where the caller knows.
    pub incoming_channels: Option<usize>,
    /// How many channels to open towards the destination; as many as the source, if `None`.
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
}

impl Config {
    /// A relay that passes pages on by `method`, everything else by default.
    pub fn new(method: impl Into<MethodChoice>) -> Self {
        Self {
            method: method.into(),
            layout: Layout::X86,
            incoming_channels: None,
            outgoing_channels: None,
            max_bandwidth: None,
            stall_timeout: Duration::from_secs(15),
            zero_pages: ZeroPages::Pass,
            streams: NonZeroUsize::MIN,
        }
    }
}

/// What a relay does with pages that are all zeros, which a source may send as mere offsets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroPages {
    /// Passes them on: right for destinations from QEMU 9.0 on, and for another relay.
    #[default]
    Pass,
    /// Writes them out as normal pages: for older destinations, which would lose them silently.
    Expand,
    /// Looks for more of them among the normal pages, for a source that does not.
    Detect,
}

/// Opens connections towards the destination.
#[derive(Clone, Debug)]
pub struct Dialer {
    /// Where to.
    pub address: Address,
    /// The first bytes of each connection. Empty towards a QEMU.
    pub preamble: Vec<u8>,
}

impl Dialer {
    /// Dials `address` without a preamble.
    pub fn new(address: Address) -> Self {
        Self {
            address,
            preamble: Vec::new(),
        }
    }

    pub(crate) fn dial(&self, first: &[u8], timeout: Duration) -> Result<Stream, SocketError> {
        let stream = Stream::from(dial(&self.address, timeout)?);
        let written = stream.write_both(&self.preamble, first);
        written.map_err(|source| SocketError::dial(&self.address, source))?;
        Ok(stream)
    }
}
