//! One connection through the proxy.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use lab::sockets::reset;

use super::message::{Cutter, Kind, Piece};
use super::{Cut, Link, Point, Way};

/// A connection that is open at both ends, or was.
pub(super) struct Connection {
    near: TcpStream,
    far: TcpStream,
    /// Which of its session it carries, once that has been said.
    stream: OnceLock<u32>,
    /// What went to the destination, in case it is to be said again.
    said: Mutex<Vec<u8>>,
    ended: AtomicBool,
}

/// The stream of the control connection: it begins the session.
const CONTROL: u32 = 0;

/// How much of a connection can be said again.
const MOST_SAID: usize = 8 << 20;

/// Forwards a connection to the server until one end closes it.
pub(super) fn serve(near: TcpStream, link: &Link) {
    let upstream = link.lock().upstream;
    let far = upstream.map(TcpStream::connect);
    let Some(Ok(far)) = far else {
        // The closest thing to a server that is not there.
        reset(&near);
        return;
    };
    let connection = Arc::new(Connection {
        near,
        far,
        stream: OnceLock::new(),
        said: Mutex::default(),
        ended: AtomicBool::new(false),
    });
    let mut state = link.lock();
    state.connections.push(connection.clone());
    let too_late = state.closing || state.refusing;
    drop(state);
    if too_late {
        connection.cut(Cut::Reset);
    }
    let back = thread::spawn({
        let (connection, link) = (connection.clone(), link.clone());
        move || connection.carry(Way::Back, &link)
    });
    connection.carry(Way::There, link);
    // It ends with its connection.
    let _ = back.join();
    connection.ended.store(true, Ordering::SeqCst);
}

impl Connection {
    pub(super) fn is_control(&self) -> bool {
        self.stream.get() == Some(&CONTROL)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    pub(super) fn cut(&self, how: Cut) {
        for end in [&self.near, &self.far] {
            match how {
                Cut::Reset => reset(end),
                // It may have gone already.
                Cut::Finished => drop(end.shutdown(Shutdown::Both)),
            }
        }
    }

    /// Says over a connection of its own what was said over this one so far.
    pub(super) fn say_again(&self, upstream: Option<SocketAddr>) {
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let said = said.clone();
        thread::spawn(move || {
            let again = upstream.map(TcpStream::connect);
            let Some(Ok(mut again)) = again else { return };
            // Whatever the server makes of it: answers go nowhere.
            let _ = again.set_read_timeout(Some(Duration::from_secs(1)));
            let _ = again.write_all(&said);
            let mut answers = [0; 4096];
            while let Ok(1..) = again.read(&mut answers) {}
        });
    }

    /// Passes on what goes one way, to its end; the other way may go on.
    fn carry(&self, way: Way, link: &Link) {
        let (from, to) = match way {
            Way::There => (&self.near, &self.far),
            Way::Back => (&self.far, &self.near),
        };
        let mut cutter = Cutter::new(way);
        let carried = self.carry_all(way, &mut cutter, link, from, to);
        // A silence hides an end too, and so does a black hole.
        if !link.flow(way).is_ok_and(|passes| passes) {
            return;
        }
        match carried {
            Ok(()) => {
                // The peer may be gone already.
                let mut to = to;
                let _ = to.write_all(&cutter.rest());
                let _ = to.shutdown(Shutdown::Write);
            }
            Err(_) => self.cut(Cut::Reset),
        }
    }

    fn carry_all(
        &self,
        way: Way,
        cutter: &mut Cutter,
        link: &Link,
        mut from: &TcpStream,
        to: &TcpStream,
    ) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => cutter.add(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some(piece) = cutter.next(self.is_control()) {
                self.pass(way, &piece, link, to)?;
            }
        }
    }

    fn pass(&self, way: Way, piece: &Piece, link: &Link, to: &TcpStream) -> io::Result<()> {
        let words = match &piece.kind {
            Kind::Bytes => return self.pass_bytes(way, &piece.bytes, link, to),
            Kind::Handshake => &[][..],
            Kind::Attach(stream) => {
                self.stream.get_or_init(|| *stream);
                &[]
            }
            Kind::Messages(words) => words,
        };
        for word in words {
            link.on_message(word);
            link.reach(|point| matches!(point, Point::Before(before) if before == word));
        }
        self.write(way, &piece.bytes, link, to)?;
        for word in words {
            link.reach(|point| matches!(point, Point::After(after) if after == word));
        }
        Ok(())
    }

    /// Passes bytes on, and strikes at the very byte.
    fn pass_bytes(
        &self,
        way: Way,
        mut bytes: &[u8],
        link: &Link,
        to: &TcpStream,
    ) -> io::Result<()> {
        let counts = way == Way::There && !self.is_control();
        while counts && let Some(head) = link.count_to_next_point(bytes.len()) {
            let (before, after) = bytes.split_at(head);
            self.write(way, before, link, to)?;
            bytes = after;
            link.strike_at_bytes();
        }
        let flipped = if counts { link.flipped(bytes) } else { None };
        self.write(way, flipped.as_deref().unwrap_or(bytes), link, to)
    }

    fn write(&self, way: Way, bytes: &[u8], link: &Link, mut to: &TcpStream) -> io::Result<()> {
        if bytes.is_empty() || !link.flow(way)? {
            return Ok(());
        }
        if way == Way::There {
            let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
            if said.len() < MOST_SAID {
                said.extend_from_slice(bytes);
            }
        }
        to.write_all(bytes)
    }
}

impl Link {
    /// Counts bytes up to the next point among them, and says how many that is; all of them if there is none.
    fn count_to_next_point(&self, len: usize) -> Option<usize> {
        let mut state = self.lock();
        let end = state.bytes + len as u64;
        let points = state.strikes.iter().filter_map(|(point, _)| match point {
            Point::Bytes(at) => Some((*at).max(state.bytes)),
            _ => None,
        });
        let next = points.min().filter(|at| *at < end);
        let head = next.map(|at| at - state.bytes);
        state.bytes = next.unwrap_or(end);
        head.and_then(|head| usize::try_from(head).ok())
    }

    /// These bytes with another bit among them, if that is to be so.
    fn flipped(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let bits = 8 * bytes.len() as u64;
        let bit = self.lock().flip.take_if(|_| bits > 0)? % bits;
        let mut bytes = bytes.to_vec();
        let index = usize::try_from(bit / 8).unwrap_or(0);
        bytes[index] ^= 1 << (bit % 8);
        Some(bytes)
    }

    fn strike_at_bytes(&self) {
        let bytes = self.bytes();
        self.reach(|point| matches!(point, Point::Bytes(at) if *at <= bytes));
    }
}
