//! Links between hosts and the connections on them: rate, delay, and what may go wrong.
//!
//! A connection is TCP's: what is sent arrives once and in order, however late, until the connection ends. So a silent path delays,
//! and the bytes of a connection that was replaced meanwhile still arrive. Only resets, and a middlebox that forgets a
//! connection, lose bytes.

use std::{collections::VecDeque, time::Duration};

use vamoose_session::{
    frame::HEADER_LEN,
    handshake::{ATTACH_LEN, HELLO_LEN, Transcript},
    stream::ConnectionId,
};

use crate::{
    qemu::{CHUNK, PAGE_BYTES},
    session::SERVER,
    world::{Event, Process, World},
};

/// One path between two hosts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Link {
    pub(crate) delay: Duration,
    pub(crate) silent_until: Duration,
    /// By how much it is slower, and until when.
    pub(crate) slow: (u64, Duration),
    /// When the last byte of each direction has left.
    free: [Duration; 2],
}

pub(crate) struct Connection {
    pub(crate) session: usize,
    pub(crate) stream: usize,
    link: usize,
    /// Whether the client's host comes first in the link's name.
    is_forward: bool,
    /// On its way to each end, with the time of its arrival; and what has arrived and was not read.
    flight: [VecDeque<(Duration, Part)>; 2],
    pub(crate) arrived: [VecDeque<Part>; 2],
    /// Bytes that each end has sent and the other one has not read.
    pub(crate) unread: [u64; 2],
    is_swallowed: bool,
    /// Until when what comes to each end waits for what was lost.
    pub(crate) late_until: [Duration; 2],
    /// An end that has given it up may still read what comes on it.
    pub(crate) is_replaced: [bool; 2],
    /// An end that is over neither sends nor hears.
    pub(crate) is_over: [bool; 2],
    /// After how many parts for an end a bit changes.
    pub(crate) flips: [Option<usize>; 2],
    /// What the ends call it.
    pub(crate) ids: [Option<ConnectionId>; 2],
    pub(crate) heard: [Duration; 2],
    pub(crate) sent: [Duration; 2],
    pub(crate) hello: [u8; HELLO_LEN],
    pub(crate) transcripts: [Option<Transcript>; 2],
    pub(crate) attach: [u8; ATTACH_LEN],
}

#[derive(Clone, Debug)]
pub(crate) enum Part {
    Hello([u8; HELLO_LEN]),
    Answer([u8; HELLO_LEN]),
    Attach([u8; ATTACH_LEN]),
    Welcome([u8; ATTACH_LEN]),
    Header([u8; HEADER_LEN]),
    Bytes(Vec<u8>),
    /// The other end is over.
    End,
    /// There is no listener.
    Refused,
}

/// What a socket takes before its reader has read.
pub(crate) const SOCKET: u64 = 2 * CHUNK;

impl World<'_> {
    pub(crate) fn lay_links(&mut self) {
        for _ in 0..self.pairs() {
            for path in 0..self.options.paths {
                self.links.push(Link {
                    // A second path takes longer.
                    delay: self.options.delay * (1 + u32::try_from(path).unwrap()),
                    ..Link::default()
                });
            }
        }
    }

    pub(crate) fn pairs(&self) -> usize {
        let hosts = self.hosts.len();
        hosts * (hosts - 1) / 2
    }

    fn pair(&self, one: usize, other: usize) -> usize {
        let (low, high) = (one.min(other), one.max(other));
        high * (high - 1) / 2 + low
    }

    /// Opens a connection from a session's client and sends its first message.
    pub(crate) fn connect(&mut self, session: usize, stream: usize, path: usize) -> usize {
        let [from, to] = self.sessions[session].hosts;
        let link = self.pair(from, to) * self.options.paths + path;
        let number = self.connections.len();
        self.connections.push(Connection {
            session,
            stream,
            link,
            is_forward: from < to,
            flight: Default::default(),
            arrived: Default::default(),
            unread: [0; 2],
            is_swallowed: false,
            late_until: [Duration::ZERO; 2],
            is_over: [false; 2],
            flips: [None; 2],
            is_replaced: [false; 2],
            ids: [None; 2],
            heard: [self.now; 2],
            sent: [self.now; 2],
            hello: [0; HELLO_LEN],
            transcripts: [None, None],
            attach: [0; ATTACH_LEN],
        });
        number
    }

    /// Puts a part on its way to an end.
    pub(crate) fn send(&mut self, number: usize, to: usize, mut part: Part) {
        let connection = &mut self.connections[number];
        if connection.is_over[1 - to] {
            return;
        }
        connection.sent[1 - to] = self.now;
        if connection.is_swallowed {
            return;
        }
        let len = part.len();
        connection.unread[1 - to] += len;
        let flip = connection.flips[to].take();
        connection.flips[to] = flip.and_then(|parts| parts.checked_sub(1));
        if flip == Some(0) {
            match &mut part {
                Part::Header(bytes) => bytes[9] ^= 4,
                Part::Bytes(bytes) => bytes[0] ^= 64,
                Part::Hello(bytes) | Part::Answer(bytes) => bytes[20] ^= 1,
                Part::Attach(bytes) | Part::Welcome(bytes) => bytes[40] ^= 1,
                Part::End | Part::Refused => {}
            }
        }
        let link = &mut self.links[connection.link];
        let free = &mut link.free[usize::from(connection.is_forward == (to == SERVER))];
        let slower = if self.now < link.slow.1 {
            link.slow.0
        } else {
            1
        };
        *free = (*free).max(self.now)
            + Duration::from_nanos(len * slower * 1_000_000_000 / self.options.rate);
        let mut arrives = *free + link.delay;
        if self.now < link.silent_until {
            // Repeated until it comes through.
            arrives = arrives.max(link.silent_until + self.random.millis(0, 1_000));
        }
        let last = connection.flight[to].back().map_or(self.now, |(at, _)| *at);
        let arrives = arrives.max(last).max(connection.late_until[to]);
        connection.flight[to].push_back((arrives, part));
        self.at(arrives, Event::Arrives(number, to));
    }

    pub(crate) fn arrives(&mut self, number: usize, end: usize) {
        let connection = &mut self.connections[number];
        while let Some((at, _)) = connection.flight[end].front()
            && *at <= self.now
        {
            let Some((_, part)) = connection.flight[end].pop_front() else {
                break;
            };
            if !connection.is_over[end] || connection.is_replaced[end] {
                connection.heard[end] = self.now;
                connection.arrived[end].push_back(part);
            }
        }
        self.trace.mix(number as u64 * 2 + end as u64);
        self.receive(number, end);
    }

    /// An end is over: the other one sees that behind all that was sent.
    pub(crate) fn close(&mut self, number: usize, end: usize) {
        self.send(number, 1 - end, Part::End);
        let connection = &mut self.connections[number];
        connection.is_over[end] = true;
        connection.arrived[end].clear();
    }

    /// An end gives it up. What was on its way may still be read, when the stream has another connection.
    pub(crate) fn give_up(&mut self, number: usize, end: usize) {
        let connection = &mut self.connections[number];
        connection.is_replaced[end] = true;
        let arrived = std::mem::take(&mut connection.arrived[end]);
        self.close(number, end);
        self.connections[number].arrived[end] = arrived;
    }

    // Faults.

    fn of_pair(&self, pair: usize) -> Vec<usize> {
        let paths = self.options.paths;
        let is_open = |it: &usize| {
            let connection = &self.connections[*it];
            connection.link / paths == pair && connection.is_over != [true; 2]
        };
        (0..self.connections.len()).filter(is_open).collect()
    }

    /// Nothing is under way between two hosts.
    pub(crate) fn is_silent_between(&self, one: usize, other: usize) -> bool {
        self.of_pair(self.pair(one, other)).is_empty()
    }

    /// All that is on its way between two hosts is lost, and all that comes on these connections; some ends see it.
    pub(crate) fn cut(&mut self, pair: usize, ends: &[usize]) {
        let paths = self.options.paths;
        for link in &mut self.links[pair * paths..][..paths] {
            link.free = [Duration::ZERO; 2];
        }
        for number in self.of_pair(pair) {
            let connection = &mut self.connections[number];
            connection.is_swallowed = true;
            connection.flight = Default::default();
            for end in ends {
                self.sees_end(number, *end);
            }
        }
    }

    /// A host without power neither closes its connections nor answers.
    pub(crate) fn silence_of(&mut self, process: Process) {
        for number in 0..self.connections.len() {
            let session = &self.sessions[self.connections[number].session];
            let is_its = match process {
                Process::Migrate(id) => session.client == Process::Migrate(id),
                Process::Serve(id) => session.server == Some(id),
            };
            if is_its {
                self.connections[number].is_swallowed = true;
                self.connections[number].flight = Default::default();
            }
        }
    }

    fn sees_end(&mut self, number: usize, end: usize) {
        if !self.connections[number].is_over[end] {
            self.connections[number].arrived[end].push_back(Part::End);
            self.receive(number, end);
        }
    }

    pub(crate) fn some_connection(&self, any: usize) -> Option<usize> {
        let open: Vec<_> = (0..self.pairs())
            .flat_map(|pair| self.of_pair(pair))
            .collect();
        (!open.is_empty()).then(|| open[any % open.len()])
    }
}

impl Part {
    /// Its bytes on the link: a chunk's content is shortened to a few KiB.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Hello(_) | Self::Answer(_) => HELLO_LEN as u64,
            Self::Attach(_) | Self::Welcome(_) => ATTACH_LEN as u64,
            Self::Header(_) => HEADER_LEN as u64,
            Self::Bytes(bytes) if bytes.len() == PAGE_BYTES => CHUNK,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::End | Self::Refused => 0,
        }
    }
}
