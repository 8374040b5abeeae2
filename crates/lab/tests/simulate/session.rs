//! Sessions: what `vamoose-link` does with sockets and threads, here with the connections of [`crate::net`].
//!
//! Shipped: the handshake with its proofs ([`Hello`] to [`Welcome`]) and each end of a stream ([`StreamState`]). Model: who dials when
//! and over which path, which connection the server takes for which stream, and the reader that takes two packets at most.

use std::{collections::VecDeque, time::Duration};

use handover::{Lines, Preamble};
use vamoose_session::{
    handshake::{Answer, Attach, Hello, Intent, Refusal, Secret, Target, Transcript, Welcome},
    stream::{
        Bounds, ConnectionId, FrameEvent, HEARTBEAT, Link, Seen, StreamError, StreamState, Timeouts,
    },
    window::Sums,
};

use crate::{
    mutants::Mutant,
    net::{Part, SOCKET},
    qemu::PAGE_BYTES,
    world::{Event, Process, World},
};

pub(crate) const CLIENT: usize = 0;
pub(crate) const SERVER: usize = 1;

pub(crate) struct Session {
    pub(crate) hosts: [usize; 2],
    pub(crate) client: Process,
    /// The process that knows the session.
    pub(crate) server: Option<usize>,
    secrets: [Option<Secret>; 2],
    pub(crate) streams: Vec<Stream>,
    looks: [bool; 2],
    /// Its first connection could not be made; whether it was refused.
    pub(crate) failed: Option<bool>,
}

pub(crate) struct Stream {
    /// Under which the server knows it.
    number: u32,
    pub(crate) ends: [Option<End>; 2],
    /// The client's attempt to connect.
    dialling: Option<usize>,
    is_attaching: bool,
    intent: Intent,
    path: usize,
    tried: usize,
    is_last_chance: bool,
    pause: Duration,
    /// What a server's reader has taken off the beginning, and the lines of a control stream.
    pub(crate) preamble: Option<Preamble>,
    pub(crate) lines: [Lines; 2],
}

pub(crate) struct End {
    pub(crate) state: StreamState,
    on: Option<(usize, ConnectionId)>,
    since: Duration,
    pub(crate) inbox: VecDeque<Vec<u8>>,
}

/// As in `vamoose-link`.
const LOOK: Duration = Duration::from_millis(500);
const ATTEMPT: Duration = Duration::from_secs(3);
const LAST_ATTEMPT: Duration = Duration::from_secs(10);
const RETRY_PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
const STALL: Duration = Duration::from_secs(30);

/// What a stream may keep to send it again.
const BOUNDS: Bounds = Bounds {
    usual: 4 * PAGE_BYTES,
    most: 16 * PAGE_BYTES,
};

/// Packets that a reader holds.
const INBOX: usize = 2;

impl World<'_> {
    // What applications call.

    pub(crate) fn open_session(&mut self, client: Process, hosts: [usize; 2]) -> usize {
        let session = self.sessions.len();
        self.sessions.push(Session {
            hosts,
            client,
            server: None,
            secrets: [None, None],
            streams: Vec::new(),
            looks: [false; 2],
            failed: None,
        });
        self.open_stream(session);
        session
    }

    pub(crate) fn open_stream(&mut self, session: usize) -> usize {
        let stream = self.sessions[session].streams.len();
        let number = match self.has(Mutant::ReusesStreamNumbers) {
            true => stream.min(2),
            false => stream,
        };
        let end = self.new_end();
        self.sessions[session].streams.push(Stream {
            number: u32::try_from(number).unwrap(),
            ends: [Some(end), None],
            dialling: None,
            is_attaching: false,
            intent: Intent::Open,
            path: stream % self.options.paths,
            tried: 0,
            is_last_chance: false,
            pause: RETRY_PAUSES[0],
            preamble: None,
            lines: Default::default(),
        });
        self.look_after(session, CLIENT);
        self.after(Duration::ZERO, Event::Dials(session, stream));
        stream
    }

    fn new_end(&self) -> End {
        let timeouts = Timeouts {
            reconnect: self.options.reconnect,
            stall: STALL,
        };
        End {
            state: StreamState::new(0, timeouts, self.instant()),
            on: None,
            since: Duration::ZERO,
            inbox: VecDeque::new(),
        }
    }

    fn end(&mut self, session: usize, stream: usize, end: usize) -> Option<&mut End> {
        let stream = self.sessions[session].streams.get_mut(stream)?;
        stream.ends[end].as_mut()
    }

    /// Whether an end has a stream that works or may work again.
    pub(crate) fn is_open(&self, session: usize, stream: usize, end: usize) -> bool {
        let stream = self.sessions[session].streams.get(stream);
        let end = stream.and_then(|it| it.ends[end].as_ref());
        end.is_some_and(|end| !end.state.is_closed())
    }

    /// Whether the client's stream has been welcomed.
    pub(crate) fn is_attached(&self, session: usize, stream: usize) -> bool {
        let end = self.sessions[session].streams[stream].ends[CLIENT].as_ref();
        end.is_some_and(|end| end.on.is_some())
    }

    /// Whether a client may write a packet now.
    pub(crate) fn has_room(&mut self, session: usize, stream: usize, len: usize) -> bool {
        let ignores_room = self.has(Mutant::IgnoresRoom);
        let near = self.end(session, stream, CLIENT);
        near.is_some_and(|near| {
            !near.state.is_closed() && (ignores_room || near.state.has_room(len, BOUNDS))
        })
    }

    /// Writes a frame. False if there is no room, or no stream any more; `is_urgent` messages are few and need no room.
    pub(crate) fn write(
        &mut self,
        session: usize,
        stream: usize,
        end: usize,
        bytes: &[u8],
        is_urgent: bool,
    ) -> bool {
        let ignores_room = is_urgent || self.has(Mutant::IgnoresRoom);
        let Some(near) = self.end(session, stream, end) else {
            return false;
        };
        if near.state.is_closed() || !(ignores_room || near.state.has_room(bytes.len(), BOUNDS)) {
            return false;
        }
        let written = near.state.write_copy(bytes, Sums::of(bytes, true));
        let kept = near.state.unacknowledged();
        if written.is_ok() && !is_urgent && kept > BOUNDS.most + PAGE_BYTES {
            self.fail(format!("a stream keeps {kept} bytes"));
        }
        self.transmit(session, stream, end);
        written.is_ok()
    }

    pub(crate) fn read(&mut self, session: usize, stream: usize, end: usize) -> Option<Vec<u8>> {
        let near = self.end(session, stream, end)?;
        let bytes = near.inbox.pop_front()?;
        if let Some((connection, _)) = near.on {
            self.receive_only(connection, end);
        }
        Some(bytes)
    }

    /// Drops a stream: what was finished is still delivered.
    pub(crate) fn drop_stream(&mut self, session: usize, stream: usize, end: usize) {
        if let Some(near) = self.end(session, stream, end) {
            let _ = near.state.finish();
            near.state.abandon();
            self.carry_out(session, stream, end);
            self.transmit(session, stream, end);
        }
    }

    pub(crate) fn hang_up(&mut self, session: usize, stream: usize, end: usize) {
        if let Some(near) = self.end(session, stream, end) {
            near.state.close(StreamError::ShutDown);
            self.carry_out(session, stream, end);
        }
    }

    /// The process at an end has died. Its system ends its connections.
    pub(crate) fn forget(&mut self, session: usize, end: usize) {
        for stream in 0..self.sessions[session].streams.len() {
            let stream = &mut self.sessions[session].streams[stream];
            let attempt = stream.dialling.filter(|_| end == CLIENT);
            let on = stream.ends[end].take().and_then(|it| it.on);
            for connection in on.map(|(it, _)| it).into_iter().chain(attempt) {
                self.close(connection, end);
            }
        }
        if end == SERVER {
            self.sessions[session].server = None;
            self.sessions[session].secrets[SERVER] = None;
        }
    }

    // Dialling.

    pub(crate) fn dial(&mut self, session: usize, stream: usize) {
        let of = &self.sessions[session].streams[stream];
        let is_wanted = of.ends[CLIENT]
            .as_ref()
            .is_some_and(|end| !end.state.is_closed() && end.on.is_none());
        // The first stream makes the session.
        let is_early = stream > 0 && self.sessions[session].secrets[CLIENT].is_none();
        if !is_wanted || is_early || of.dialling.is_some() {
            return;
        }
        let (path, is_last) = (of.path, of.is_last_chance);
        let connection = self.connect(session, stream, path);
        self.sessions[session].streams[stream].dialling = Some(connection);
        let hello = Hello::new(self.random.bytes()).encode();
        self.connections[connection].hello = hello;
        self.send(connection, SERVER, Part::Hello(hello));
        let limit = if is_last { LAST_ATTEMPT } else { ATTEMPT };
        self.after(limit, Event::DialIsLate(session, stream, connection));
    }

    pub(crate) fn dial_is_late(&mut self, session: usize, stream: usize, connection: usize) {
        if self.sessions[session].streams[stream].dialling == Some(connection) {
            self.dial_failed(session, stream, None);
        }
    }

    /// An attempt has failed. `refused`: there is no listener, or the server refuses.
    fn dial_failed(&mut self, session: usize, stream: usize, refused: Option<Refusal>) {
        let (paths, reconnect) = (self.options.paths, self.options.reconnect);
        let now = self.instant();
        let of = &mut self.sessions[session].streams[stream];
        let Some(connection) = of.dialling.take() else {
            return;
        };
        let is_attaching = std::mem::take(&mut of.is_attaching);
        of.tried += 1;
        of.path = (of.path + 1) % paths;
        let is_new = stream == 0 && of.intent == Intent::Open;
        let is_round = of.tried.is_multiple_of(paths);
        let (is_last, pause) = (of.is_last_chance, of.pause);
        let is_refused = matches!(
            self.connections[connection].arrived[CLIENT].front(),
            Some(Part::Refused)
        );
        self.give_up(connection, CLIENT);
        let of = &mut self.sessions[session].streams[stream];
        let Some(end) = &mut of.ends[CLIENT] else {
            return;
        };
        if is_attaching {
            end.state.end_attach();
        }
        if let Some(refusal) = refused {
            let cause = "it was lost".into();
            end.state.close(StreamError::Refused { cause, refusal });
            self.carry_out(session, stream, CLIENT);
        } else if !is_round {
            self.after(Duration::ZERO, Event::Dials(session, stream));
        } else if is_new && (is_last || is_refused) {
            self.sessions[session].failed = Some(is_refused);
            self.hang_up(session, stream, CLIENT);
        } else if is_new {
            of.is_last_chance = true;
            self.after(Duration::ZERO, Event::Dials(session, stream));
        } else {
            let since = end.state.trouble(now).map_or(now, |(_, since)| since);
            of.pause = (pause * 2).min(RETRY_PAUSES[1]);
            if now + pause > since + reconnect {
                let (cause, seconds) = ("no connection".into(), reconnect.as_secs());
                end.state.close(StreamError::Lost { cause, seconds });
                self.carry_out(session, stream, CLIENT);
            } else {
                self.after(pause, Event::Dials(session, stream));
            }
        }
        self.touched(session, stream, CLIENT);
    }

    // Receiving.

    /// Takes what has arrived at an end, as far as its reader does.
    pub(crate) fn receive(&mut self, number: usize, end: usize) {
        self.receive_only(number, end);
        let (session, stream) = self.stream_of(number);
        self.transmit(session, stream, end);
        self.touched(session, stream, end);
    }

    fn stream_of(&self, connection: usize) -> (usize, usize) {
        let connection = &self.connections[connection];
        (connection.session, connection.stream)
    }

    fn receive_only(&mut self, number: usize, end: usize) {
        let (session, stream) = self.stream_of(number);
        let mut has_read = false;
        loop {
            let is_full = self
                .end(session, stream, end)
                .is_some_and(|it| it.inbox.len() >= INBOX);
            match self.connections[number].arrived[end].front() {
                Some(Part::Bytes(_)) if is_full => break,
                // Who looks at why an attempt has failed finds it there.
                Some(Part::Refused)
                    if self.sessions[session].streams[stream].dialling == Some(number) =>
                {
                    self.dial_failed(session, stream, None);
                    break;
                }
                _ => {}
            }
            let Some(part) = self.connections[number].arrived[end].pop_front() else {
                break;
            };
            has_read = true;
            let unread = &mut self.connections[number].unread[1 - end];
            *unread = unread.saturating_sub(part.len());
            self.take(number, end, part);
            if self.connections[number].is_over[end] && !self.connections[number].is_replaced[end] {
                break;
            }
        }
        let is_empty = self.connections[number].arrived[end].is_empty();
        if is_empty
            && let Some(near) = self.end(session, stream, end)
            && near.on.is_some_and(|(on, _)| on == number)
        {
            near.state.on_idle();
        }
        if has_read {
            self.transmit(session, stream, 1 - end);
        }
    }

    fn take(&mut self, number: usize, end: usize, part: Part) {
        let (session, stream) = self.stream_of(number);
        let now = self.instant();
        let mixes = self.has(Mutant::MixesConnections);
        let unjudged = self.has(Mutant::ReadsUnjudged);
        let is_dialled = self.sessions[session].streams[stream].dialling == Some(number);
        let of_old = self.connections[number].ids[end];
        let id = match self.end(session, stream, end).and_then(|it| it.on) {
            Some((_, id)) if mixes => Some(id),
            _ => of_old,
        };
        let is_old = self.connections[number].is_replaced[end];
        match part {
            Part::Header(_) | Part::Bytes(_) if is_old && of_old.is_none() => {}
            Part::Welcome(bytes) if is_old && self.has(Mutant::TakesLateWelcomes) => {
                self.welcomed(number, &bytes);
            }
            part if is_old && !matches!(part, Part::Header(_) | Part::Bytes(_)) => {}
            Part::Hello(bytes) => self.greet(number, &bytes),
            Part::Answer(bytes) if is_dialled => self.is_greeted(number, &bytes),
            Part::Attach(bytes) => self.attach(number, bytes),
            Part::Welcome(bytes) if is_dialled => self.welcomed(number, &bytes),
            Part::Header(bytes) => {
                if let (Some(id), Some(near)) = (id, self.end(session, stream, end)) {
                    let came = near.state.on_header(id, &bytes, "a path", now);
                    if came != FrameEvent::Nothing {
                        self.trace
                            .mix(u64::from_be_bytes(bytes[8..16].try_into().unwrap()));
                    }
                    self.carry_out(session, stream, end);
                }
            }
            Part::Bytes(bytes) => {
                if let (Some(id), Some(near)) = (id, self.end(session, stream, end)) {
                    let sum = crc32c::crc32c(&bytes);
                    if near.state.on_data(id, sum, "a path", now) || unjudged {
                        near.inbox.push_back(bytes);
                    }
                    self.carry_out(session, stream, end);
                }
            }
            Part::End => {
                if let (Some(id), Some(near)) = (id, self.end(session, stream, end)) {
                    near.state.on_connection_lost(id, "it was closed", now);
                    self.carry_out(session, stream, end);
                }
                self.close(number, end);
                if is_dialled && end == CLIENT {
                    self.dial_failed(session, stream, None);
                }
            }
            // Of an attempt that was given up.
            Part::Answer(_) | Part::Welcome(_) | Part::Refused => self.close(number, end),
        }
    }

    /// The server answers the first message.
    fn greet(&mut self, number: usize, bytes: &[u8; 48]) {
        let host = self.sessions[self.connections[number].session].hosts[1];
        let is_there =
            self.hosts[host].serve.is_some() && self.now >= self.hosts[host].refuses_until;
        if !self.hosts[host].is_up {
            return;
        }
        if !is_there {
            self.send(number, CLIENT, Part::Refused);
            self.connections[number].is_over[SERVER] = true;
            return;
        }
        let Ok(hello) = Hello::decode(bytes) else {
            return self.close(number, SERVER);
        };
        let answer = Answer::to(&hello, self.random.bytes());
        self.connections[number].transcripts[SERVER] =
            Some(Transcript::new(&hello, &answer, [0; 32]));
        self.send(number, CLIENT, Part::Answer(answer.encode()));
    }

    fn is_greeted(&mut self, number: usize, bytes: &[u8; 48]) {
        let (session, stream) = self.stream_of(number);
        let now = self.instant();
        let hello = Hello::decode(&self.connections[number].hello);
        let (Ok(hello), Ok(answer)) = (hello, Answer::decode(bytes)) else {
            return self.dial_failed(session, stream, None);
        };
        let transcript = Transcript::new(&hello, &answer, [0; 32]);
        let of = &mut self.sessions[session];
        let is_first = stream == 0 && of.streams[0].intent == Intent::Open;
        if is_first {
            of.secrets[CLIENT] = Some(transcript.secret());
        }
        let Some(secret) = of.secrets[CLIENT].clone() else {
            return;
        };
        let of = &mut of.streams[stream];
        let Some(end) = &mut of.ends[CLIENT] else {
            return;
        };
        if !end.state.begin_attach(now) {
            return self.dial_failed(session, stream, None);
        }
        of.is_attaching = true;
        end.state.take_effects();
        let old = end.on.take();
        let attach = Attach {
            target: if is_first {
                Target::New
            } else {
                Target::Known(secret.id())
            },
            stream: of.number,
            intent: of.intent,
            received: end.state.received(),
        };
        let attach = attach.encode(&transcript, &secret);
        if let Some((old, _)) = old {
            self.give_up(old, CLIENT);
        }
        self.connections[number].attach = attach;
        self.connections[number].transcripts[CLIENT] = Some(transcript);
        self.send(number, SERVER, Part::Attach(attach));
    }

    /// The server attaches a connection to its stream.
    fn attach(&mut self, number: usize, bytes: [u8; 64]) {
        let session = self.connections[number].session;
        let host = self.sessions[session].hosts[1];
        let serve = self.hosts[host].serve;
        let Some(transcript) = self.connections[number].transcripts[SERVER].take() else {
            return self.close(number, SERVER);
        };
        // An attempt that its client has given up begins a session of its own, which nobody uses.
        let is_current = self.sessions[session].streams[0].dialling == Some(number);
        let attach = Attach::decode(&bytes);
        if attach.is_ok_and(|attach| attach.target == Target::New) && !is_current {
            return self.close(number, SERVER);
        }
        let attached = match serve {
            Some(serve) => self.find_stream(number, serve, &bytes, &transcript),
            None => Err(Refusal::UnknownSession),
        };
        let secret = self.sessions[session].secrets[SERVER].clone();
        let (outcome, stream) = match attached {
            Ok((stream, received)) => (Ok(received), Some(stream)),
            Err(refusal) => (Err(refusal), None),
        };
        let secret = secret.filter(|_| stream.is_some());
        let welcome = Welcome { outcome }.encode(&transcript, &bytes, secret.as_ref());
        self.send(number, CLIENT, Part::Welcome(welcome));
        match stream {
            Some(stream) => {
                self.connections[number].stream = stream;
                self.look_after(session, SERVER);
                self.transmit(session, stream, SERVER);
            }
            None => self.close(number, SERVER),
        }
    }

    fn find_stream(
        &mut self,
        number: usize,
        serve: usize,
        bytes: &[u8; 64],
        transcript: &Transcript,
    ) -> Result<(usize, u64), Refusal> {
        let session = self.connections[number].session;
        let (now, fresh) = (self.instant(), self.new_end());
        let (since, forgets) = (self.now, self.has(Mutant::ForgetsWhatItReceived));
        let attach = Attach::decode(bytes).map_err(|_| Refusal::Other)?;
        let of = &mut self.sessions[session];
        match attach.target {
            Target::New if of.secrets[SERVER].is_none() => {
                of.server = Some(serve);
                of.secrets[SERVER] = Some(transcript.secret());
            }
            Target::New => {}
            Target::Known(_) if of.server == Some(serve) => {}
            Target::Known(_) => return Err(Refusal::UnknownSession),
        }
        if attach.target == Target::New {
            // A client that was not welcomed begins another session.
            of.secrets[SERVER] = Some(transcript.secret());
        }
        let secret = of.secrets[SERVER].clone().ok_or(Refusal::UnknownSession)?;
        if !Attach::is_proved(bytes, transcript, &secret) {
            return Err(Refusal::Proof);
        }
        let stream = usize::try_from(attach.stream).map_err(|_| Refusal::Ended)?;
        let of = of.streams.get_mut(stream).ok_or(Refusal::Ended)?;
        if of.ends[SERVER].is_none() || attach.target == Target::New {
            if attach.intent != Intent::Open {
                return Err(Refusal::Ended);
            }
            (of.preamble, of.lines[SERVER]) = (None, Lines::default());
            of.ends[SERVER] = Some(fresh);
        }
        let end = of.ends[SERVER].as_mut().ok_or(Refusal::Ended)?;
        if !end.state.begin_attach(now) {
            return Err(Refusal::Ended);
        }
        end.state.take_effects();
        let old = end.on.take();
        let is_accepted = end.state.on_resume_offset(attach.received).is_ok();
        // What is told to the client before everything was read is told twice.
        let received = match forgets {
            true => end.state.received().saturating_sub(PAGE_BYTES as u64),
            false => end.state.received(),
        };
        let id = if is_accepted {
            end.state.on_connection()
        } else {
            None
        };
        end.state.end_attach();
        end.on = id.map(|id| (number, id));
        end.since = since;
        if let Some((old, _)) = old {
            self.give_up(old, SERVER);
        }
        self.connections[number].ids[SERVER] = id;
        match (is_accepted, id) {
            (true, Some(_)) => Ok((stream, received)),
            (true, None) => Err(Refusal::Ended),
            (false, _) => Err(Refusal::Offset),
        }
    }

    fn welcomed(&mut self, number: usize, bytes: &[u8; 64]) {
        let (session, stream) = self.stream_of(number);
        let since = self.now;
        let connection = &self.connections[number];
        let (Some(transcript), Some(secret)) = (
            &connection.transcripts[CLIENT],
            &self.sessions[session].secrets[CLIENT],
        ) else {
            return;
        };
        let received = Welcome::decode(bytes, transcript, &connection.attach, secret);
        let of = &mut self.sessions[session].streams[stream];
        let Some(end) = &mut of.ends[CLIENT] else {
            return;
        };
        let received = match received {
            Ok(received) => received,
            Err(vamoose_session::handshake::HandshakeError::Refused(refusal)) => {
                return self.dial_failed(session, stream, Some(refusal));
            }
            Err(_) => return self.dial_failed(session, stream, None),
        };
        let accepted = end.state.on_resume_offset(received);
        let id = end.state.on_connection();
        end.state.end_attach();
        end.on = id.map(|id| (number, id));
        end.since = since;
        (of.dialling, of.is_attaching) = (None, false);
        self.counts.reconnects += u64::from(of.intent == Intent::Resume);
        (of.intent, of.tried, of.pause) = (Intent::Resume, 0, RETRY_PAUSES[0]);
        self.connections[number].ids[CLIENT] = id;
        if let Err(error) = accepted {
            self.fail(format!("a server has what was not sent: {error}"));
        }
        if stream == 0 {
            for other in 1..self.sessions[session].streams.len() {
                self.after(Duration::ZERO, Event::Dials(session, other));
            }
        }
    }

    // Sending.

    pub(crate) fn transmit(&mut self, session: usize, stream: usize, end: usize) {
        let keeps_silent = self.has(Mutant::NoHeartbeats);
        let keeps_silent_first = self.has(Mutant::NoFirstAcknowledgement);
        loop {
            let now = self.now;
            let Some(near) = self.end(session, stream, end) else {
                return;
            };
            let Some((connection, id)) = near.on else {
                return;
            };
            let has_begun = now >= near.since + HEARTBEAT;
            if self.connections[connection].unread[end] >= SOCKET {
                return;
            }
            let Some(near) = self.end(session, stream, end) else {
                return;
            };
            let Some(transmit) = near.state.poll_transmit(id) else {
                return;
            };
            let parts: Vec<_> = transmit
                .frames()
                .map(|(header, bytes)| (header, bytes.to_vec()))
                .collect();
            near.state.on_transmitted(transmit, true);
            const ACKNOWLEDGE: u8 = 2;
            let is_alone = parts.iter().all(|(header, _)| header[0] == ACKNOWLEDGE);
            if is_alone && (keeps_silent || keeps_silent_first && !has_begun) {
                continue;
            }
            for (header, bytes) in parts {
                self.send(connection, 1 - end, Part::Header(header));
                if !bytes.is_empty() {
                    self.send(connection, 1 - end, Part::Bytes(bytes));
                }
            }
        }
    }

    /// Carries out what a state asks for.
    fn carry_out(&mut self, session: usize, stream: usize, end: usize) {
        let Some(near) = self.end(session, stream, end) else {
            return;
        };
        let effects = near.state.take_effects();
        let closed = match near.state.link() {
            Link::Closed(error) if effects.ended => Some(error.clone()),
            _ => None,
        };
        let gone = near.on.take_if(|_| effects.disconnect);
        let last = near.state.abort();
        if let Some((connection, _)) = gone {
            if effects.abort {
                self.send(connection, 1 - end, Part::Header(last));
            }
            self.give_up(connection, end);
        }
        if effects.reconnect && end == CLIENT {
            let of = &mut self.sessions[session].streams[stream];
            (of.tried, of.pause) = (0, RETRY_PAUSES[0]);
            self.after(Duration::ZERO, Event::Dials(session, stream));
        }
        if let Some(error) = closed {
            self.judge_end(session, stream, end, &error);
        }
    }

    /// Both ends keep to the protocol, and a stream survives what it is made for.
    fn judge_end(&mut self, session: usize, stream: usize, end: usize, error: &StreamError) {
        self.note(format_args!(
            "session {session} stream {stream} end {end}: {error}"
        ));
        let trouble = self.troubled + self.options.reconnect + LAST_ATTEMPT;
        let peer = &self.sessions[session].streams[stream].ends[1 - end];
        let is_alone = peer.as_ref().is_none_or(|it| it.state.is_closed());
        let is_right = match error {
            StreamError::Violation(_) | StreamError::Acknowledge(_) => false,
            StreamError::Corrupt { .. } => self.flips > 1,
            StreamError::Refused { refusal, .. } => match refusal {
                Refusal::Ended | Refusal::UnknownSession => true,
                _ => self.flips > 0,
            },
            StreamError::Lost { .. } => self.now <= trouble || is_alone,
            _ => true,
        };
        if !is_right {
            self.fail(format!("a stream has ended: {error}"));
        }
    }

    // Time.

    fn look_after(&mut self, session: usize, end: usize) {
        if !std::mem::replace(&mut self.sessions[session].looks[end], true) {
            self.after(LOOK, Event::Looks(session, end));
        }
    }

    pub(crate) fn looks(&mut self, session: usize, end: usize) {
        let (now, time) = (self.instant(), self.now);
        let mut is_needed = false;
        for stream in 0..self.sessions[session].streams.len() {
            let Some(near) = &self.sessions[session].streams[stream].ends[end] else {
                continue;
            };
            if near.state.is_closed() {
                continue;
            }
            is_needed = true;
            let seen = near.on.map(|(connection, id)| {
                let connection = &self.connections[connection];
                Seen {
                    connection: id,
                    silent_for: time - connection.heard[end],
                    idle_for: time - connection.sent[end],
                    has_unread: !connection.arrived[end].is_empty(),
                }
            });
            let trip = 2 * self.options.delay;
            if let Some(near) = self.end(session, stream, end) {
                near.state.on_timeout(now, seen);
                near.state.on_round_trip(trip, now);
            }
            self.carry_out(session, stream, end);
            self.transmit(session, stream, end);
            self.touched(session, stream, end);
        }
        self.sessions[session].looks[end] = false;
        if is_needed {
            self.look_after(session, end);
        }
    }

    /// Something has happened to a stream: its application looks at it.
    fn touched(&mut self, session: usize, stream: usize, end: usize) {
        match (
            end,
            self.sessions[session].client,
            self.sessions[session].server,
        ) {
            (CLIENT, Process::Migrate(id), _) => self.client_looks(id, session),
            (SERVER, _, Some(serve)) => self.server_looks(serve, session, stream),
            _ => {}
        }
    }
}
