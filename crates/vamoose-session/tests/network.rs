//! Two ends of [`StreamState`] over a network in virtual time: connections are cut, cut for one end only, black holes, corrupt,
//! replaced and attached out of order, over several paths.
//!
//! - Exhaustive: every sequence of [`Action`]s with at most [`FAULTS`] faults, for one stream to depth [`DEPTH_OF_ONE`] and for
//!   two streams that share a window to depth [`DEPTH_OF_TWO`], from streams that are up and have a frame on its way.
//! - Random: longer sequences, each from a seed; `VAMOOSE_SEED=n` runs a single one.
//!
//! `VAMOOSE_DEPTH=n` makes both depths larger by n.
//!
//! After each sequence the faults stop, and both directions of each stream must end within [`SETTLE`]. Meanwhile bytes arrive once
//! and in order, nothing that was acknowledged is sent again, and what is kept stays within the window.
//!
//! A driver that makes a mistake ([`Mistake`]) must be found out by the same search.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use vamoose_session::{
    frame::HEADER_LEN,
    stream::{
        Bounds, ConnectionId, FrameEvent, Link, Seen, StreamError, StreamState, Timeouts, Transmit,
    },
    window::{Buffer, Sums},
};

const FAULTS: usize = 3;
const DEPTH_OF_ONE: usize = 4;
const DEPTH_OF_TWO: usize = 3;
const SETTLE: Duration = Duration::from_secs(60);

/// How often ends look around.
const LOOK: Duration = Duration::from_millis(500);

/// A client gives up an attempt after this long.
const ATTEMPT: Duration = Duration::from_secs(3);

/// The window of all streams together.
const WINDOW: usize = 256;

const CLIENT: usize = 0;
const SERVER: usize = 1;

type Checked = Result<(), String>;

macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(format!($($message)*));
        }
    };
}

/// What happens next to a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// An end writes a frame, if there is room.
    Write(usize),
    /// The next part of what is on its way to an end arrives: a handshake message, a header, bytes or the connection's end. It is
    /// that of the newest connection, or of the oldest one that has something.
    Deliver(usize, Age),
    /// An end's system call returns late: until then its frames are lent.
    Hold(usize),
    /// The client replaces a connection that works.
    Replace,
    /// Time passes.
    Tick,
    /// Both ends see that the connection is lost, and what was on its way is.
    Cut,
    /// One end sees that; the other one hears nothing any more.
    CutFor(usize),
    /// Nothing arrives any more, and neither end sees why.
    Swallow,
    /// A bit of what is on its way to an end changes.
    Flip(usize),
    /// The client takes the attempt for lost and makes another one on the next path: the first may still arrive.
    DialAgain,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Age {
    Newest,
    Oldest,
}

impl Action {
    const ALL: [Self; 16] = [
        Self::Write(CLIENT),
        Self::Write(SERVER),
        Self::Deliver(CLIENT, Age::Newest),
        Self::Deliver(SERVER, Age::Newest),
        Self::Deliver(CLIENT, Age::Oldest),
        Self::Deliver(SERVER, Age::Oldest),
        Self::Hold(CLIENT),
        Self::Replace,
        Self::Tick,
        Self::Cut,
        Self::CutFor(CLIENT),
        Self::CutFor(SERVER),
        Self::Swallow,
        Self::Flip(CLIENT),
        Self::Flip(SERVER),
        Self::DialAgain,
    ];

    fn is_fault(self) -> bool {
        matches!(
            self,
            Self::Cut | Self::CutFor(_) | Self::Swallow | Self::Flip(_) | Self::DialAgain
        )
    }
}

/// What a driver may do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// L5: a connection whose key is nearly used up is reported as lost.
    ReplacesAsLoss,
    /// L9: an acknowledgement that is due is left to a thread which never sends it.
    LeavesAcknowledgements,
    /// What still comes on an old connection is taken for the new one's.
    MixesConnections,
    /// A reader gets bytes before they are judged.
    ReadsUnjudged,
    /// Writes without asking for room.
    IgnoresRoom,
}

/// Part of what is on its way.
enum Part {
    Attach { received: u64 },
    Welcome { received: u64 },
    Header([u8; HEADER_LEN]),
    Bytes(Vec<u8>),
}

struct Connection {
    path: usize,
    /// On their way to each end.
    to: [VecDeque<Part>; 2],
    /// Whether the connection's end comes behind that.
    ends: [bool; 2],
    /// Nothing arrives.
    is_dead: bool,
    /// What the ends call it.
    ids: [Option<ConnectionId>; 2],
    heard: [Instant; 2],
    sent: [Instant; 2],
}

struct End {
    state: StreamState,
    current: Option<(usize, ConnectionId)>,
    lent: Option<(ConnectionId, Transmit)>,
    holds: bool,
    written: usize,
    read: usize,
    is_finished: bool,
}

struct Stream {
    number: usize,
    ends: [End; 2],
    connections: Vec<Connection>,
    /// The client's attempt, since when, and the connection that it is to replace.
    attempt: Option<(usize, Instant, Option<usize>)>,
    flips: usize,
}

struct Network {
    now: Instant,
    streams: Vec<Stream>,
    mistake: Option<Mistake>,
    bounds: Bounds,
}

impl Network {
    /// Streams that are up, with a frame on its way in each direction.
    fn new(streams: usize, reconnect: Duration, mistake: Option<Mistake>) -> Result<Self, String> {
        let now = Instant::now();
        let timeouts = Timeouts {
            reconnect,
            stall: Duration::from_secs(1000),
        };
        let end = || End {
            state: StreamState::new(0, timeouts, now),
            current: None,
            lent: None,
            holds: false,
            written: 0,
            read: 0,
            is_finished: false,
        };
        let stream = |number| Stream {
            number,
            ends: [end(), end()],
            connections: Vec::new(),
            attempt: None,
            flips: 0,
        };
        let mut network = Self {
            now,
            streams: (0..streams).map(stream).collect(),
            mistake,
            bounds: Bounds {
                usual: WINDOW / 16,
                most: WINDOW / streams,
            },
        };
        for at in 0..streams {
            network.dial(at);
            network.deliver(at, SERVER, Age::Newest)?;
            network.deliver(at, CLIENT, Age::Newest)?;
            network.act(at, Action::Write(CLIENT))?;
            network.act(at, Action::Write(SERVER))?;
        }
        Ok(network)
    }

    fn act(&mut self, at: usize, action: Action) -> Checked {
        let now = self.now;
        let stream = &mut self.streams[at];
        match action {
            Action::Write(end) => {
                let len = match self.mistake {
                    Some(Mistake::IgnoresRoom) => 70,
                    _ => 6 + stream.ends[end].written % 3,
                };
                self.write(at, end, len)?;
            }
            Action::Deliver(end, age) => self.deliver(at, end, age)?,
            Action::Hold(end) => stream.ends[end].holds ^= true,
            Action::Replace => self.replace(at),
            Action::Tick => self.tick(LOOK)?,
            Action::Cut => {
                if let Some(connection) = stream.connections.last_mut() {
                    connection.cut();
                }
            }
            Action::CutFor(end) => {
                if let Some(connection) = stream.connections.last_mut() {
                    connection.swallow();
                }
                if let Some((_, id)) = stream.ends[end].current {
                    let state = &mut stream.ends[end].state;
                    state.on_connection_lost(id, "a fault", now);
                }
            }
            Action::Swallow => {
                if let Some(connection) = stream.connections.last_mut() {
                    connection.swallow();
                }
            }
            Action::Flip(end) => stream.flip(end),
            Action::DialAgain => {
                if stream.attempt.is_some() {
                    self.dial(at);
                }
            }
        }
        for end in [CLIENT, SERVER] {
            self.carry_out(at, end)?;
            self.send(at, end)?;
        }
        self.check()
    }

    /// What must hold whenever.
    fn check(&self) -> Checked {
        for end in [CLIENT, SERVER] {
            let kept: usize = self
                .streams
                .iter()
                .map(|it| it.ends[end].state.unacknowledged())
                .sum();
            // The streams' ends count as a byte each.
            ensure!(kept <= WINDOW + self.streams.len(), "{kept} bytes are kept");
        }
        for stream in &self.streams {
            let [client, server] = &stream.ends;
            for (near, far) in [(client, server), (server, client)] {
                let (acknowledged, received) = (near.state.acknowledged(), far.state.received());
                ensure!(
                    acknowledged <= received,
                    "{acknowledged} of {received} acknowledged"
                );
            }
        }
        Ok(())
    }

    fn write(&mut self, at: usize, end: usize, len: usize) -> Checked {
        let (bounds, mistake) = (self.bounds, self.mistake);
        let stream = &mut self.streams[at];
        let writer = &mut stream.ends[end];
        if writer.is_finished || writer.state.is_closed() {
            return Ok(());
        }
        if !writer.state.has_room(len, bounds) && mistake != Some(Mistake::IgnoresRoom) {
            return Ok(());
        }
        let bytes: Vec<u8> = (writer.written..writer.written + len)
            .map(|offset| byte(stream.number, end, offset))
            .collect();
        let sums = Sums::of(&bytes, true);
        let written = match len.is_multiple_of(2) {
            true => writer.state.write_copy(&bytes, sums),
            false => {
                let mut buffer: Buffer = bytes.into();
                writer.state.write_buffer(&mut buffer, len, sums)
            }
        };
        written.map_err(|error| error.to_string())?;
        writer.written += len;
        Ok(())
    }

    /// Carries out what a state asks for.
    fn carry_out(&mut self, at: usize, end: usize) -> Checked {
        let stream = &mut self.streams[at];
        let near = &mut stream.ends[end];
        let effects = near.state.take_effects();
        if effects.disconnect
            && let Some((connection, _)) = near.current.take()
        {
            stream.connections[connection].end(1 - end);
        }
        if let Link::Closed(error) = near.state.link() {
            // A frame that is corrupt twice ends a stream, and so the other end.
            let is_right = stream.flips > 1
                && matches!(error, StreamError::Corrupt { .. } | StreamError::Aborted);
            ensure!(is_right, "stream {at} has ended: {error}");
        }
        if effects.reconnect && end == CLIENT {
            self.dial(at);
        }
        Ok(())
    }

    /// Sends what there is to send.
    fn send(&mut self, at: usize, end: usize) -> Checked {
        let (now, mistake) = (self.now, self.mistake);
        let stream = &mut self.streams[at];
        let near = &mut stream.ends[end];
        if !near.holds
            && let Some((id, lent)) = near.lent.take()
        {
            let is_sent = near.state.is_carried_by(id);
            near.state.on_transmitted(lent, is_sent);
        }
        while near.lent.is_none()
            && let Some((connection, id)) = near.current
            && let Some(transmit) = near.state.poll_transmit(id)
        {
            let connection = &mut stream.connections[connection];
            const ACKNOWLEDGE: u8 = 2;
            let is_alone = transmit
                .frames()
                .all(|(header, _)| header[0] == ACKNOWLEDGE);
            if is_alone && mistake == Some(Mistake::LeavesAcknowledgements) {
                near.state.on_transmitted(transmit, true);
                continue;
            }
            for (header, bytes) in transmit.frames() {
                let offset = u64::from_be_bytes(header[8..16].try_into().unwrap());
                let is_data = !bytes.is_empty();
                let acknowledged = near.state.acknowledged();
                ensure!(
                    !is_data || offset >= acknowledged,
                    "{offset} was acknowledged"
                );
                if !connection.is_dead {
                    connection.to[1 - end].push_back(Part::Header(header));
                    if is_data {
                        connection.to[1 - end].push_back(Part::Bytes(bytes.to_vec()));
                    }
                }
            }
            connection.sent[end] = now;
            match near.holds {
                true => near.lent = Some((id, transmit)),
                false => near.state.on_transmitted(transmit, true),
            }
        }
        Ok(())
    }

    /// The client begins an attempt.
    fn dial(&mut self, at: usize) {
        let now = self.now;
        let stream = &mut self.streams[at];
        let client = &mut stream.ends[CLIENT];
        let replaced = stream.attempt.take();
        if let Some((given_up, _, _)) = replaced {
            stream.connections[given_up].end(SERVER);
            client.state.end_attach();
        }
        if !client.state.begin_attach(now) {
            return;
        }
        client.state.take_effects();
        // Its end is not seen before the new one is there.
        let old = client.current.take().map(|(old, _)| old);
        let path = stream.connections.last().map_or(0, |last| 1 - last.path);
        let received = client.state.received();
        let mut connection = Connection {
            path,
            to: Default::default(),
            ends: [false; 2],
            is_dead: false,
            ids: [None; 2],
            heard: [now; 2],
            sent: [now; 2],
        };
        connection.to[SERVER].push_back(Part::Attach { received });
        let old = old.or(replaced.and_then(|(_, _, old)| old));
        stream.attempt = Some((stream.connections.len(), now, old));
        stream.connections.push(connection);
    }

    fn replace(&mut self, at: usize) {
        let now = self.now;
        let client = &mut self.streams[at].ends[CLIENT];
        let Some((_, id)) = client.current else {
            return;
        };
        match self.mistake == Some(Mistake::ReplacesAsLoss) {
            true => client
                .state
                .on_connection_lost(id, "its key is used up", now),
            false => self.dial(at),
        }
    }

    /// Delivers the next part to an end.
    fn deliver(&mut self, at: usize, end: usize, age: Age) -> Checked {
        let stream = &self.streams[at];
        let has_some = |it: &usize| {
            let connection = &stream.connections[*it];
            !connection.to[end].is_empty() || connection.ends[end]
        };
        let mut all = 0..stream.connections.len();
        let found = match age {
            Age::Newest => all.next_back().filter(has_some),
            Age::Oldest => all.find(has_some),
        };
        match found {
            Some(connection) => self.deliver_on(at, end, connection),
            None => Ok(()),
        }
    }

    fn deliver_on(&mut self, at: usize, end: usize, on: usize) -> Checked {
        let (now, mistake) = (self.now, self.mistake);
        let stream = &mut self.streams[at];
        let connection = &mut stream.connections[on];
        connection.heard[end] = now;
        let part = connection.to[end].pop_front();
        let near = &mut stream.ends[end];
        // An old connection's thread may be late: the state must know.
        let id = match (mistake, near.current) {
            (Some(Mistake::MixesConnections), Some((_, id))) => Some(id),
            _ => connection.ids[end],
        };
        match part {
            None => {
                connection.ends[end] = false;
                if let Some(id) = id {
                    near.state.on_connection_lost(id, "it was closed", now);
                }
                if let Some((attempt, _, _)) = stream.attempt
                    && (end, attempt) == (CLIENT, on)
                {
                    // Refused, or lost: the client tries again.
                    self.dial(at);
                }
            }
            Some(Part::Attach { received }) => {
                if !near.state.begin_attach(now) {
                    connection.end(CLIENT);
                    return Ok(());
                }
                near.state.take_effects();
                if let Some((old, _)) = near.current.take() {
                    stream.connections[old].end(CLIENT);
                }
                near.give_back();
                let has = near.state.received();
                let accepted = near.state.on_resume_offset(received).is_ok();
                let is_stale = stream.attempt.is_none_or(|(attempt, _, _)| attempt != on);
                ensure!(accepted || is_stale, "{received} is not accepted");
                let connection = &mut stream.connections[on];
                if accepted && let Some(id) = near.state.on_connection() {
                    near.current = Some((on, id));
                    connection.ids[SERVER] = Some(id);
                    connection.to[CLIENT].push_back(Part::Welcome { received: has });
                } else {
                    connection.end(CLIENT);
                }
                near.state.end_attach();
            }
            Some(Part::Welcome { received }) => {
                let Some((_, _, old)) = stream.attempt.take_if(|(attempt, _, _)| *attempt == on)
                else {
                    return Ok(());
                };
                near.give_back();
                let accepted = near.state.on_resume_offset(received);
                ensure!(accepted.is_ok(), "{accepted:?}");
                let id = near.state.on_connection();
                stream.connections[on].ids[CLIENT] = id;
                near.current = id.map(|id| (on, id));
                near.state.end_attach();
                if let Some(old) = old {
                    stream.connections[old].end(SERVER);
                }
            }
            Some(Part::Header(header)) => {
                let Some(id) = id else {
                    return Ok(());
                };
                let is_next = near.state.announced().is_none() || !near.state.is_carried_by(id);
                ensure!(is_next, "a header where bytes are expected");
                let came = near.state.on_header(id, &header, "a path", now);
                ensure!(
                    came != FrameEvent::End || near.read == stream.ends[1 - end].written,
                    "the end before all bytes"
                );
            }
            Some(Part::Bytes(bytes)) => {
                let Some(id) = id else {
                    return Ok(());
                };
                let is_right = near
                    .state
                    .on_data(id, crc32c::crc32c(&bytes), "a path", now);
                if is_right || mistake == Some(Mistake::ReadsUnjudged) {
                    for found in bytes {
                        let expected = byte(stream.number, 1 - end, near.read);
                        ensure!(found == expected, "other bytes at {}", near.read);
                        near.read += 1;
                    }
                    let received = near.state.received();
                    ensure!(received == near.read as u64, "{received} received");
                }
            }
        }
        Ok(())
    }

    /// Time passes.
    fn tick(&mut self, time: Duration) -> Checked {
        self.now += time;
        let now = self.now;
        for at in 0..self.streams.len() {
            let stream = &mut self.streams[at];
            for end in [CLIENT, SERVER] {
                let near = &mut stream.ends[end];
                let seen = near.current.map(|(connection, id)| {
                    let connection = &stream.connections[connection];
                    Seen {
                        connection: id,
                        silent_for: now - connection.heard[end],
                        idle_for: now - connection.sent[end],
                        has_unread: !connection.to[end].is_empty(),
                    }
                });
                near.state.on_timeout(now, seen);
                near.state.on_round_trip(LOOK, now);
            }
            for end in [CLIENT, SERVER] {
                self.carry_out(at, end)?;
            }
            let stream = &self.streams[at];
            let is_late = match stream.attempt {
                Some((_, since, _)) => now - since >= ATTEMPT,
                None => stream.ends[CLIENT].current.is_none(),
            };
            if is_late {
                self.dial(at);
            }
            for end in [CLIENT, SERVER] {
                self.send(at, end)?;
            }
        }
        Ok(())
    }

    /// No more faults: all arrives, and both directions end; without another connection if there were none.
    fn settle(mut self, is_calm: bool) -> Checked {
        let until = self.now + SETTLE;
        for at in 0..self.streams.len() {
            for end in [CLIENT, SERVER] {
                let near = &mut self.streams[at].ends[end];
                near.holds = false;
                self.act(at, Action::Write(end))?;
                let near = &mut self.streams[at].ends[end];
                if !near.state.is_closed() {
                    near.state.finish().map_err(|error| error.to_string())?;
                    near.is_finished = true;
                }
            }
        }
        while self.now < until {
            for at in 0..self.streams.len() {
                self.deliver_all(at)?;
            }
            if self.streams.iter().all(Stream::is_done) {
                let is_first = |it: &Stream| it.connections.len() == 1;
                ensure!(
                    !is_calm || self.streams.iter().all(is_first),
                    "a connection was lost for nothing"
                );
                return Ok(());
            }
            ensure!(!is_calm, "the ends wait for a heartbeat");
            self.tick(LOOK)?;
        }
        Err("faults have stopped, and the streams do not end".to_owned())
    }

    fn deliver_all(&mut self, at: usize) -> Checked {
        for _ in 0..10_000 {
            for end in [CLIENT, SERVER] {
                self.carry_out(at, end)?;
                self.send(at, end)?;
            }
            let stream = &self.streams[at];
            let all = (0..stream.connections.len()).flat_map(|it| [(it, CLIENT), (it, SERVER)]);
            let has_some = |(it, end): &(usize, usize)| {
                let connection = &stream.connections[*it];
                !connection.to[*end].is_empty() || connection.ends[*end]
            };
            let Some((connection, end)) = { all }.find(has_some) else {
                return Ok(());
            };
            self.deliver_on(at, end, connection)?;
            self.check()?;
        }
        Err("the ends never fall silent".to_owned())
    }
}

impl Connection {
    /// It ends for this end, as the other one has shut it down.
    fn end(&mut self, end: usize) {
        self.ends[end] = !self.is_dead;
    }

    fn cut(&mut self) {
        self.swallow();
        self.ends = [true; 2];
    }

    fn swallow(&mut self) {
        self.is_dead = true;
        self.to = Default::default();
        self.ends = [false; 2];
    }
}

impl End {
    /// A connection takes another one's place only when no thread sends on the old one.
    fn give_back(&mut self) {
        if let Some((_, lent)) = self.lent.take() {
            self.state.on_transmitted(lent, false);
        }
    }
}

impl Stream {
    fn flip(&mut self, end: usize) {
        let Some(connection) = self.connections.last_mut() else {
            return;
        };
        match connection.to[end].back_mut() {
            Some(Part::Header(header)) => header[9] ^= 4,
            Some(Part::Bytes(bytes)) => bytes[0] ^= 1,
            // A handshake that is changed is one that fails.
            Some(Part::Attach { .. } | Part::Welcome { .. }) => connection.cut(),
            None => return,
        }
        self.flips += 1;
    }

    /// Whether both directions have ended, and both ends know.
    fn is_done(&self) -> bool {
        let [client, server] = &self.ends;
        let pairs = [(client, server), (server, client)];
        let is_whole = pairs.iter().all(|(near, far)| {
            near.state.is_done() && far.state.has_peer_ended() && far.read == near.written
        });
        is_whole || self.ends.iter().any(|end| end.state.is_closed())
    }
}

/// What a stream has at an offset of the direction from an end: not again soon.
fn byte(stream: usize, end: usize, offset: usize) -> u8 {
    let mixed = (offset + stream * 1_000_003 + end * 7_001).wrapping_mul(2_654_435_761);
    (mixed >> 13).to_le_bytes()[0]
}

/// Runs one sequence.
fn run(streams: usize, sequence: &[(usize, Action)], mistake: Option<Mistake>) -> Checked {
    run_with(streams, Duration::from_secs(1000), sequence, mistake)
}

fn run_with(
    streams: usize,
    reconnect: Duration,
    sequence: &[(usize, Action)],
    mistake: Option<Mistake>,
) -> Checked {
    let result = Network::new(streams, reconnect, mistake).and_then(|mut network| {
        for (at, action) in sequence {
            network.act(*at, *action)?;
        }
        let is_calm = sequence
            .iter()
            .all(|(_, it)| !it.is_fault() && *it != Action::Replace);
        network.settle(is_calm)
    });
    result.map_err(|error| format!("{sequence:?}: {error}"))
}

/// Every sequence of `depth` of these actions.
fn all_sequences(
    streams: usize,
    depth: usize,
    actions: &[Action],
    run: &mut impl FnMut(&[(usize, Action)]) -> Checked,
) -> Checked {
    fn further(
        streams: usize,
        depth: usize,
        actions: &[Action],
        sequence: &mut Vec<(usize, Action)>,
        run: &mut impl FnMut(&[(usize, Action)]) -> Checked,
    ) -> Checked {
        if sequence.len() == depth {
            return run(sequence);
        }
        let faults = sequence.iter().filter(|(_, it)| it.is_fault()).count();
        for at in 0..streams {
            for action in actions {
                if action.is_fault() && faults == FAULTS {
                    continue;
                }
                sequence.push((at, *action));
                further(streams, depth, actions, sequence, run)?;
                sequence.pop();
            }
        }
        Ok(())
    }
    further(streams, depth, actions, &mut Vec::new(), run)
}

/// A depth, and what the user adds.
fn depth(least: usize) -> usize {
    let more = std::env::var("VAMOOSE_DEPTH").ok();
    least + more.map_or(0, |more| more.parse().expect("a number"))
}

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        usize::try_from(mixed % limit as u64).unwrap()
    }
}

/// A sequence in which one of eight actions is a fault.
fn random_sequence(seed: u64, streams: usize) -> Vec<(usize, Action)> {
    let mut random = Random(seed);
    let (faults, others): (Vec<Action>, Vec<Action>) =
        Action::ALL.into_iter().partition(|it| it.is_fault());
    let len = 20 + random.below(180);
    let mut sequence = Vec::new();
    for _ in 0..len {
        let from: &[Action] = match random.below(8) {
            0 => &faults,
            _ => &others,
        };
        sequence.push((random.below(streams), from[random.below(from.len())]));
    }
    sequence
}

#[test]
fn one_stream_survives_every_sequence() {
    let checked = all_sequences(1, depth(DEPTH_OF_ONE), &Action::ALL, &mut |sequence| {
        run(1, sequence, None)
    });
    assert_eq!(checked, Ok(()));
}

#[test]
fn two_streams_survive_every_sequence() {
    let checked = all_sequences(2, depth(DEPTH_OF_TWO), &Action::ALL, &mut |sequence| {
        run(2, sequence, None)
    });
    assert_eq!(checked, Ok(()));
}

#[test]
fn streams_survive_random_sequences() {
    let seeds = match std::env::var("VAMOOSE_SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => (0..2000).collect::<Vec<u64>>(),
    };
    for seed in seeds {
        let sequence = random_sequence(seed, 2);
        if let Err(error) = run(2, &sequence, None) {
            panic!("VAMOOSE_SEED={seed}: {error}");
        }
    }
}

/// A connection that is replaced before its key is used up is no loss, not even where none is allowed.
const CALM: [Action; 8] = [
    Action::Write(CLIENT),
    Action::Write(SERVER),
    Action::Deliver(CLIENT, Age::Newest),
    Action::Deliver(SERVER, Age::Newest),
    Action::Deliver(CLIENT, Age::Oldest),
    Action::Deliver(SERVER, Age::Oldest),
    Action::Replace,
    Action::Tick,
];

#[test]
fn replaced_connection_is_no_loss_without_reconnects() {
    let checked = all_sequences(1, 5, &CALM, &mut |sequence| {
        run_with(1, Duration::ZERO, sequence, None)
    });
    assert_eq!(checked, Ok(()));
}

#[test]
fn replacement_that_counts_as_loss_is_found() {
    let checked = all_sequences(1, 2, &CALM, &mut |sequence| {
        run_with(1, Duration::ZERO, sequence, Some(Mistake::ReplacesAsLoss))
    });
    assert!(checked.is_err());
}

/// Nobody writes, and no connection lives until a heartbeat is due: that each is welcomed and brings a frame is progress.
#[test]
fn idle_stream_survives_resets_for_longer_than_the_reconnect_timeout() {
    let reset = [
        Action::Cut,
        Action::Deliver(SERVER, Age::Oldest),
        Action::Deliver(CLIENT, Age::Oldest),
        Action::Deliver(SERVER, Age::Newest),
        Action::Deliver(CLIENT, Age::Newest),
        Action::Deliver(CLIENT, Age::Newest),
        Action::Deliver(SERVER, Age::Newest),
        Action::Tick,
    ];
    // The first frames, which nobody may send again.
    let first = [CLIENT, SERVER].map(|end| [(0, Action::Deliver(end, Age::Newest)); 2]);
    let resets = reset.map(|action| (0, action)).repeat(20);
    let sequence = [first.concat(), resets].concat();
    assert_eq!(run_with(1, Duration::from_secs(2), &sequence, None), Ok(()));
}

/// Heartbeats are acknowledgements: without them a connection that works is given up.
#[test]
fn acknowledgements_that_nobody_sends_are_found() {
    let pause = [(0, Action::Tick); 20];
    assert_eq!(run(1, &pause, None), Ok(()));
    assert!(run(1, &pause, Some(Mistake::LeavesAcknowledgements)).is_err());
}

#[test]
fn mistakes_of_a_driver_are_found() {
    for mistake in [
        Mistake::MixesConnections,
        Mistake::ReadsUnjudged,
        Mistake::IgnoresRoom,
    ] {
        let found = (0..500).any(|seed| run(2, &random_sequence(seed, 2), Some(mistake)).is_err());
        assert!(found, "{mistake:?}");
    }
}
