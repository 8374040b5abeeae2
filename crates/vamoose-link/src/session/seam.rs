//! Doors to the receiving half of a stream and to the admission of strangers, for fuzz targets and benches alone.

use std::{
    io,
    net::IpAddr,
    time::{Duration, Instant},
};

use vm_memory::VolatileSlice;

use super::{
    admission::{Admission, network},
    connection::NewConnection,
    incoming::{Event, Failure, Incoming, Target},
};
use crate::{Socket, memory::Left};

/// One direction of a stream, without the other one.
pub struct Receiving(Incoming);

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub enum Came {
    /// So many bytes.
    Bytes(usize),
    /// A header: of a frame without bytes, or of one whose bytes are next.
    Header,
    /// The stream's end.
    End,
    /// The peer has given the stream up.
    Abort,
}

/// Where bytes are wanted.
pub enum Wanted<'a, 'b> {
    /// Here.
    Own(&'a mut [u8]),
    /// In the guest's memory.
    Guest(&'a [VolatileSlice<'b>]),
}

impl Receiving {
    /// A stream that begins at offset `first`, without a connection.
    pub fn new(first: u64) -> Self {
        Self(Incoming::new(first))
    }

    /// Puts another connection in the place of the last. What it carries must end: nothing here notices silence.
    ///
    /// # Errors
    /// The system's.
    pub fn attach(&mut self, socket: Socket) -> io::Result<()> {
        let no_handshake = Instant::now() + Duration::from_secs(1);
        let connection = NewConnection::new(socket, None, no_handshake);
        let (receiver, _) = connection.split(0, String::new())?;
        self.0.replace(Some(receiver));
        Ok(())
    }

    /// Receives as a reader does.
    ///
    /// # Errors
    /// Why nothing came, in words.
    pub fn receive(&mut self, wanted: Wanted<'_, '_>) -> Result<Came, String> {
        let mut left;
        let mut target = match wanted {
            Wanted::Own(out) => Target::Own(out),
            Wanted::Guest(pages) => {
                left = Left::new(&[], pages);
                Target::Guest(&mut left)
            }
        };
        if !self.0.waiting().is_empty() {
            return Ok(Came::Bytes(self.0.deliver(&mut target)));
        }
        let came = self.0.receive(Some(&mut target), &mut || Ok(()));
        match came.map_err(describe)? {
            Event::Bytes(read) => Ok(Came::Bytes(read)),
            Event::Header => Ok(Came::Header),
            Event::End => Ok(Came::End),
            Event::Abort => Ok(Came::Abort),
        }
    }

    /// All before this offset has come, and what of it waits for a reader.
    pub fn received(&self) -> (u64, usize) {
        (self.0.received(), self.0.waiting().len())
    }

    /// What the peer has received, by the last header.
    pub fn peer_has(&self) -> u64 {
        self.0.peer_has()
    }
}

fn describe(failure: Failure) -> String {
    match failure {
        Failure::Connection(error) => error.to_string(),
        Failure::Corrupt(corruption) => corruption.to_string(),
        Failure::Protocol(violation) => violation.to_string(),
        Failure::Absent => "no connection".to_owned(),
        Failure::Stalled => "nothing came".to_owned(),
    }
}

/// Who is in his handshake, without connections.
pub struct Strangers(Admission<bool>);

impl Strangers {
    /// Places for so many.
    pub fn new(limit: usize) -> Self {
        Self(Admission::new(limit))
    }

    /// Whether a connection from this address gets in, which has sent something or not. Whose place it gets, leaves at once.
    pub fn admit(&mut self, from: IpAddr, has_sent: bool) -> bool {
        let now = Instant::now();
        let admitted = self
            .0
            .admit(network(Some(from)), has_sent, now, |sent| *sent);
        let Some(admitted) = admitted else {
            return false;
        };
        if admitted.evicted.is_some() {
            // Its number is not one of a place any more.
            self.0.leave(u64::MAX);
        }
        true
    }

    /// How much is kept: places, and networks.
    pub fn kept(&self) -> (usize, usize) {
        self.0.kept()
    }
}
