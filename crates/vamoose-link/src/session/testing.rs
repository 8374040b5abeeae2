//! Access to the receiving half of a stream and to admission, for fuzz targets and benches only.

use std::{
    io,
    net::IpAddr,
    time::{Duration, Instant},
};

use vamoose_session::stream::{self, Link, StreamError, StreamState, Timeouts};
use vm_memory::VolatileSlice;

use super::{
    admission::{Admission, network},
    connection::NewConnection,
    incoming::{Failure, Incoming, Target},
};
use crate::{Socket, memory::Left};

/// One direction of a stream, without the other one.
pub struct Receiving {
    incoming: Incoming,
    state: StreamState,
}

/// A received event.
#[derive(Debug, PartialEq, Eq)]
pub enum Came {
    /// This many bytes.
    Bytes(usize),
    /// A header, of a frame without bytes or before its bytes.
    Header,
    /// The stream's end.
    End,
    /// The peer has given the stream up.
    Abort,
}

/// Destination of received bytes.
pub enum Wanted<'a, 'b> {
    /// A buffer.
    Own(&'a mut [u8]),
    /// Guest memory.
    Guest(&'a [VolatileSlice<'b>]),
}

impl Receiving {
    /// A stream that begins at offset `first`, without a connection.
    pub fn new(first: u64) -> Self {
        let timeouts = Timeouts {
            reconnect: Duration::MAX,
            stall: Duration::MAX,
        };
        Self {
            incoming: Incoming::default(),
            state: StreamState::new(first, timeouts, Instant::now()),
        }
    }

    /// Replaces the connection. The peer must close it: nothing here notices silence.
    ///
    /// # Errors
    /// The system's.
    pub fn attach(&mut self, socket: Socket) -> io::Result<()> {
        let no_handshake = Instant::now() + Duration::from_secs(1);
        let connection = NewConnection::new(socket, None, no_handshake);
        connection.end_handshake()?;
        self.state.begin_attach(Instant::now());
        let id = self.state.on_connection();
        self.state.end_attach();
        let receiver = id.map(|id| connection.split(id, 0, String::new()).0);
        self.incoming.replace(receiver);
        Ok(())
    }

    /// Receives as a reader does.
    ///
    /// # Errors
    /// Why nothing was received, as text.
    pub fn receive(&mut self, wanted: Wanted<'_, '_>) -> Result<Came, String> {
        let mut left;
        let mut target = match wanted {
            Wanted::Own(out) => Target::Own(out),
            Wanted::Guest(pages) => {
                left = Left::new(&[], pages);
                Target::Guest(&mut left)
            }
        };
        if !self.incoming.waiting().is_empty() {
            return Ok(Came::Bytes(self.incoming.deliver(&mut target)));
        }
        let Some(connection) = self.incoming.connection() else {
            return Err("no connection".to_owned());
        };
        let id = connection.id;
        let mut stalled = || Ok(());
        if let Some(header) = self.state.announced() {
            let unverified = self.incoming.read_data(&header, &mut target, &mut stalled);
            let unverified = unverified.map_err(describe)?;
            if self.state.on_data(id, unverified.sum, "", Instant::now()) {
                return Ok(Came::Bytes(self.incoming.accept(
                    &header,
                    &unverified,
                    &mut target,
                )));
            }
            self.incoming.discard();
            return Err(format!("{:?}", self.state.link()));
        }
        let header = self.incoming.read_header(&mut stalled).map_err(describe)?;
        match self.state.on_header(id, &header, "", Instant::now()) {
            stream::FrameEvent::Data(_) | stream::FrameEvent::Acknowledgement => Ok(Came::Header),
            stream::FrameEvent::End => Ok(Came::End),
            stream::FrameEvent::Nothing => match self.state.link() {
                Link::Closed(StreamError::Aborted) => Ok(Came::Abort),
                link => Err(format!("{link:?}")),
            },
        }
    }

    /// Whether the stream has ended for good.
    pub fn is_closed(&self) -> bool {
        self.state.is_closed()
    }

    /// Offset up to which bytes were received, and the number of those that wait for a reader.
    pub fn received(&self) -> (u64, usize) {
        (self.state.received(), self.incoming.waiting().len())
    }
}

fn describe(failure: Failure) -> String {
    match failure {
        Failure::Connection(error) => error.to_string(),
        Failure::Absent => "no connection".to_owned(),
        Failure::Stalled | Failure::HeldUp(_) => "nothing came".to_owned(),
    }
}

/// Admission without connections.
pub struct Strangers(Admission<bool>);

impl Strangers {
    /// With `limit` places.
    pub fn new(limit: usize) -> Self {
        Self(Admission::new(limit))
    }

    /// Whether a connection from this address is admitted. An evicted connection leaves immediately.
    pub fn admit(&mut self, from: IpAddr, has_sent: bool) -> bool {
        let now = Instant::now();
        let admitted = self
            .0
            .admit(network(Some(from)), has_sent, now, |sent| *sent);
        let Some(admitted) = admitted else {
            return false;
        };
        if admitted.evicted.is_some() {
            // The number of an evicted connection has no place any more.
            self.0.leave(u64::MAX);
        }
        true
    }

    /// Number of places and networks in memory.
    pub fn kept(&self) -> (usize, usize) {
        self.0.kept()
    }
}
