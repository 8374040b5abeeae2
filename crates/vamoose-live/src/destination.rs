//! The destination: takes a guest's memory and state, and runs it when the source has let go of it.
//!
//! ```text
//!  Destination::run     wait for a source ─> channels ─> rounds ─> load ─> commit ─> run, answer questions
//!    (coordinator)                              ▲ synced, ended
//!                                               │
//!  channel threads           header, check, pages into guest memory              one for each channel
//! ```
//!
//! The coordinator is the caller's thread: it alone talks to the VMM. Whatever comes, from channels, from the
//! source, from new connections, reaches it as an event; whatever blocks is ended by hanging up. What is said about whose
//! the guest is, [`handover::Destination`] decides, one for each attempt.

mod accept;
mod channel;
mod finished;
mod parallel;
mod place;

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{
        Arc,
        atomic::AtomicUsize,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    thread::{self, Scope},
    time::{Duration, Instant},
};

use handover::{
    AttemptId, DestinationAction, DestinationEvent, DestinationMessage, Details, Incarnation,
    Prepare, SourceMessage,
};
use multifd::{Initial, Layout};
use tracing::{debug, info, warn};
use vamoose_codec::Engines;
use vamoose_link::{Address, ChannelReader, Hangup, Listener, Snapshot, Stats, Stream};

use crate::{
    ChannelError, DestinationError, DestinationGuest, GuestError, OffloadCounters, PageCopy, Ram,
    offload::Account,
    protocol::{PrepareDetails, ProtocolError, random_id, send},
    source::CHANNELS,
};
use accept::Connections;
use finished::Finished;
use place::Place;

/// Waits for a guest.
pub struct Destination {
    listener: Listener,
    ram: Ram,
    config: DestinationConfig,
    closing: Arc<Hangup>,
    finished: Finished,
    /// A guest runs in this memory.
    arrived: bool,
}

/// How.
#[derive(Clone)]
pub struct DestinationConfig {
    /// How pages are decoded: which hardware may help.
    pub engines: Engines,
    /// For how long the source may stop in the middle of something.
    pub stall_timeout: Duration,
    /// Most bytes of device state.
    pub max_state: u64,
    /// Whether the VMM vouches for it that guest memory reads as zeros (it has just been mapped), so that nobody need look.
    pub memory_is_zero: bool,
    /// Whether large runs of pages that become zero are given back to the system. Not right for memory that is
    /// pinned for devices.
    pub punch_holes: bool,
    /// Who copies decoded pages into guest memory.
    pub copy: PageCopy,
}

impl DestinationConfig {
    /// Decodes with `engines`, everything else by default.
    pub fn new(engines: Engines) -> Self {
        Self {
            engines,
            stall_timeout: Duration::from_secs(15),
            max_state: 1 << 30,
            memory_is_zero: false,
            punch_holes: true,
            copy: PageCopy::Cpu,
        }
    }
}

/// Ends a destination from another thread.
#[derive(Clone)]
pub struct DestinationHandle(Arc<Hangup>);

impl DestinationHandle {
    /// Stops waiting for a guest, or gives up one that does not run here yet: it stays at the source. Without
    /// effect on one that runs.
    pub fn cancel(&self) {
        self.0.hang_up();
    }
}

/// A guest that has arrived.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// What was received.
    pub moved: Snapshot,
    /// From the source's first message to the running guest.
    pub total_time: Duration,
    /// Whether it was let run: a guest that was paused at the source stays so.
    pub running: bool,
    /// Whether the source has said that it knows. If not, it was out of reach for the settle time.
    pub settled: bool,
    /// What devices have done of the copies, if there were some for that.
    pub copy: Option<OffloadCounters>,
}

/// How much longer questions are answered than the source asks: one whose connections are refused must be
/// right in thinking that the guest never ran here.
const LINGER: Duration = Duration::from_secs(30);

/// Longest settle time that a source can ask for.
const MOST_SETTLE_TIME: Duration = Duration::from_secs(3600);

/// How long telling a source why it failed may take.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(1);

/// How long to wait for the words of a source whose channels break: its guest may stand still.
const SOURCES_LAST_WORDS_WITHIN: Duration = Duration::from_millis(100);

/// Events that may wait for the coordinator.
const QUEUE: usize = 64;

impl Destination {
    /// Listens on `address` for a guest whose memory is `ram`.
    ///
    /// # Errors
    /// When the address is taken or not this host's, or the system is out of something.
    pub fn bind(
        address: &Address,
        ram: Ram,
        config: DestinationConfig,
    ) -> Result<Self, DestinationError> {
        Ok(Self {
            listener: Listener::bind(address, config.stall_timeout)?,
            ram,
            config,
            closing: Arc::new(Hangup::new()?),
            finished: Finished::new(Incarnation(random_id()?)),
            arrived: false,
        })
    }

    /// Where it listens, with the port that the system chose.
    pub fn address(&self) -> &Address {
        self.listener.address()
    }

    /// Ends it from another thread.
    pub fn handle(&self) -> DestinationHandle {
        DestinationHandle(self.closing.clone())
    }

    /// Waits for a source, takes its guest and lets `guest` run. Returns when the source has acknowledged that:
    /// call it on a thread of its own, and keep the process until it returns.
    ///
    /// # Errors
    /// Whatever went wrong: the guest never ran here, and the source knows or will find out. Guest memory may
    /// hold anything. It may be called again for another attempt, but not when a guest has arrived: its memory is left alone.
    pub fn run(&mut self, guest: &mut dyn DestinationGuest) -> Result<Arrival, DestinationError> {
        if self.arrived {
            return Err(DestinationError::AlreadyArrived);
        }
        let hangup = Hangup::new()?;
        let place = Place::new(&self.ram, self.config.punch_holes);
        let (events_in, events) = mpsc::sync_channel(QUEUE);
        let connections = Connections {
            events: events_in.clone(),
            max_state: self.config.max_state,
            unknown: Arc::new(AtomicUsize::new(0)),
        };
        thread::scope(|scope| {
            let mut coordinator = Coordinator {
                config: &self.config,
                ram: &self.ram,
                finished: &mut self.finished,
                arrived: &mut self.arrived,
                controls: HashMap::new(),
                stats: Arc::new(Stats::default()),
                copied: match &self.config.copy {
                    PageCopy::Cpu => None,
                    PageCopy::Dsa(devices) => Some(Account::open(devices)),
                },
                place: &place,
                events,
                events_in,
                scope,
            };
            // Also when the VMM panics: the scope waits for its threads.
            let _hang_up = HangUp(&hangup);
            let (listener, hangup, closing) = (&self.listener, &hangup, &self.closing);
            scope.spawn(move || accept::run(listener, hangup, closing, &connections, scope));
            coordinator.run(guest)
        })
    }
}

struct HangUp<'a>(&'a Hangup);

impl Drop for HangUp<'_> {
    fn drop(&mut self) {
        self.0.hang_up();
    }
}

/// What the coordinator waits for. Control connections have numbers.
enum Event {
    /// A control connection, and the first message on it.
    Connected {
        number: u64,
        attempt: AttemptId,
        message: SourceMessage,
        stream: Arc<Stream>,
    },
    /// A channel.
    Channel(Initial, Arc<Stream>),
    /// A further message.
    Message(u64, SourceMessage),
    /// The device state has come.
    State(u64, Vec<u8>),
    /// A control connection has ended.
    Disconnected(u64, Option<DestinationError>),
    /// A channel has written all its pages of a round.
    Synced(usize, u64),
    /// A channel has ended.
    Ended(usize, Result<(), ChannelError>),
    /// The VMM has cancelled.
    Cancelled,
}

/// The coordinator.
struct Coordinator<'scope, 'env> {
    config: &'env DestinationConfig,
    ram: &'env Ram,
    finished: &'env mut Finished,
    arrived: &'env mut bool,
    /// The control connections of the current attempt: one, and more if it was lost.
    controls: HashMap<u64, Arc<Stream>>,
    stats: Arc<Stats>,
    copied: Option<Account>,
    place: &'env Place<'env>,
    events: Receiver<Event>,
    events_in: SyncSender<Event>,
    scope: &'scope Scope<'scope, 'env>,
}

/// The current attempt.
struct Session {
    id: AttemptId,
    machine: handover::Destination,
    details: PrepareDetails,
    layout: Layout,
    start: Instant,
    /// The source will not ask again.
    settled: bool,
    /// The guest was let run.
    running: bool,
    /// Why it could not be.
    failure: Option<DestinationError>,
}

impl<'scope, 'env: 'scope> Coordinator<'scope, 'env> {
    fn run(&mut self, guest: &mut dyn DestinationGuest) -> Result<Arrival, DestinationError> {
        let mut session = self.wait_for_source()?;
        let result = self.serve(&mut session, guest);
        if !session.settled {
            self.finished.remember(session.id, session.machine);
        }
        result
    }

    fn serve(
        &mut self,
        session: &mut Session,
        guest: &mut dyn DestinationGuest,
    ) -> Result<Arrival, DestinationError> {
        let committed = self
            .receive(session)
            .and_then(|state| {
                guest
                    .load(&state)
                    .map_err(|error| guest_error("load the state of", error))
            })
            .and_then(|()| {
                self.report(session, guest, DestinationEvent::Loaded);
                self.wait_for_commit(session)
            });
        match committed {
            Ok(commit) => self.start(session, guest, commit),
            Err(error) => {
                let error = self.explain(session, error);
                for control in self.controls.values() {
                    // Not for long: the connection may be what has failed.
                    let _ = control.set_stall_timeout(LAST_WORDS_WITHIN);
                }
                let cause = error.to_string();
                self.report(session, guest, DestinationEvent::Failed { cause });
                Err(error)
            }
        }
    }

    /// The first source whose guest is ours, once it is accepted.
    fn wait_for_source(&mut self) -> Result<Session, DestinationError> {
        loop {
            match self.next_event(None)? {
                Some(Event::Connected {
                    number,
                    attempt,
                    message: SourceMessage::Prepare(prepare),
                    stream,
                }) if !self.finished.knows(attempt) => {
                    self.controls.insert(number, stream);
                    return self.prepare(attempt, prepare);
                }
                Some(Event::Connected {
                    attempt,
                    message,
                    stream,
                    ..
                }) => self.answer(attempt, message, &stream),
                Some(Event::Channel(_, stream)) => refuse_channel(&stream),
                Some(Event::Cancelled) => return Err(DestinationError::Cancelled),
                _ => {}
            }
        }
    }

    /// Gets ready for the guest of a source, or refuses it.
    fn prepare(&mut self, id: AttemptId, prepare: Prepare) -> Result<Session, DestinationError> {
        let start = Instant::now();
        let refuse = |error: DestinationError| {
            let reason = error.to_string();
            self.send(&DestinationMessage::Refused { reason });
            error
        };
        let protocol = prepare.negotiate().map_err(|error| refuse(error.into()))?;
        let details = PrepareDetails::try_from(prepare.details)
            .map_err(|error| refuse(ProtocolError::from(error).into()))?;
        let layout = self.check(&details).map_err(refuse)?;
        self.make_zero();
        self.send(&DestinationMessage::Prepared {
            protocol,
            incarnation: self.finished.incarnation(),
            details: Details::new(),
        });
        info!(
            "accepted a guest of {} RAM blocks over {} channels",
            details.blocks.len(),
            details.channels
        );
        Ok(Session {
            id,
            machine: self.finished.begin(),
            details,
            layout,
            start,
            settled: false,
            running: false,
            failure: None,
        })
    }

    /// Takes all memory and the device state. When this returns, no page can be written any more.
    fn receive(&mut self, session: &Session) -> Result<Vec<u8>, DestinationError> {
        let channels = usize::from(session.details.channels);
        self.open_channels(session, channels)?;
        // A SYNC of each channel, of the same round, is a round.
        let (mut round, mut synced) = (0, vec![0; channels]);
        let (mut ended, mut state) = (vec![false; channels], None);
        loop {
            match self.next(session, None)? {
                Some(Event::Synced(channel, number))
                    if number == round + 1 && synced[channel] == round && state.is_none() =>
                {
                    synced[channel] = number;
                    if synced.iter().all(|synced| *synced == number) {
                        round = number;
                        self.send(&DestinationMessage::Synced { round });
                        debug!(round, "round received");
                    }
                }
                Some(Event::Ended(channel, Ok(()))) => ended[channel] = true,
                Some(Event::State(_, bytes))
                    if state.is_none()
                        && round > 0
                        && synced.iter().all(|synced| *synced == round) =>
                {
                    state = Some(bytes);
                }
                Some(event) => unexpected(event)?,
                None => {}
            }
            // A round to which an ended channel has not contributed will never be complete.
            let last = synced.iter().max();
            if let Some(channel) =
                (0..channels).find(|channel| ended[*channel] && synced.get(*channel) < last)
            {
                let error = ChannelError::Ended;
                return Err(DestinationError::Channel { channel, error });
            }
            if ended.iter().all(|ended| *ended)
                && let Some(state) = state.take()
            {
                return Ok(state);
            }
        }
    }

    /// Waits until the source says that the guest is ours; returns the message.
    fn wait_for_commit(&mut self, session: &Session) -> Result<SourceMessage, DestinationError> {
        let timeout = settle_time(session);
        let deadline = Instant::now() + timeout;
        loop {
            match self.next(session, Some(deadline))? {
                Some(Event::Message(_, commit @ SourceMessage::Commit { .. })) => {
                    return Ok(commit);
                }
                // The source has perhaps committed: it will come back, or stay away.
                Some(Event::Disconnected(number, _)) => drop(self.controls.remove(&number)),
                Some(event) => unexpected(event)?,
                None => {
                    let seconds = timeout.as_secs();
                    return Err(DestinationError::NotCommitted { seconds });
                }
            }
        }
    }

    /// Lets the guest run, and answers for it until the source knows.
    fn start(
        &mut self,
        session: &mut Session,
        guest: &mut dyn DestinationGuest,
        commit: SourceMessage,
    ) -> Result<Arrival, DestinationError> {
        let deadline = Instant::now() + settle_time(session) + LINGER;
        self.report(session, guest, DestinationEvent::Message(commit));
        let total_time = session.start.elapsed();
        while !session.settled
            && let Ok(Some(event)) = self.next(session, Some(deadline))
        {
            match event {
                Event::Message(_, message) => {
                    self.report(session, guest, DestinationEvent::Message(message));
                }
                Event::Disconnected(number, _) => drop(self.controls.remove(&number)),
                _ => {}
            }
        }
        if !session.settled {
            warn!("the source has not acknowledged what has become of the guest");
        }
        if let Some(error) = session.failure.take() {
            return Err(error);
        }
        Ok(Arrival {
            moved: self.stats.snapshot(),
            total_time,
            running: session.running,
            settled: session.settled,
            copy: self.copied.as_ref().map(Account::read),
        })
    }

    /// Reports `event` to the attempt's machine, and does what it wants done.
    fn report(
        &mut self,
        session: &mut Session,
        guest: &mut dyn DestinationGuest,
        event: DestinationEvent,
    ) {
        let mut actions = VecDeque::from(session.machine.handle(event));
        while let Some(action) = actions.pop_front() {
            let event = match action {
                // There is no journal: this process has the guest, and when it ends so does the guest.
                DestinationAction::Persist => continue,
                DestinationAction::Send(message) => {
                    self.send(&message);
                    continue;
                }
                DestinationAction::Forget => {
                    session.settled = true;
                    continue;
                }
                DestinationAction::Run { resume } => self.run_guest(session, guest, resume),
                DestinationAction::Check => started(session.running),
                // It has not run, and will not: there is nothing else to end.
                DestinationAction::End => DestinationEvent::Died {
                    cause: String::new(),
                },
            };
            actions.extend(session.machine.handle(event));
        }
    }

    fn run_guest(
        &mut self,
        session: &mut Session,
        guest: &mut dyn DestinationGuest,
        resume: bool,
    ) -> DestinationEvent {
        *self.arrived = true;
        let resumed = if resume { guest.resume() } else { Ok(()) };
        match resumed {
            Ok(()) => {
                session.running = resume;
                started(resume)
            }
            Err(error) => {
                *self.arrived = false;
                let error = guest_error("run", error);
                let cause = error.to_string();
                session.failure = Some(error);
                DestinationEvent::NotStarted { cause }
            }
        }
    }

    /// Replaces an error of a connection by the source's own words, if they are on their way.
    fn explain(&mut self, session: &Session, error: DestinationError) -> DestinationError {
        let cut_short = matches!(
            &error,
            DestinationError::Channel {
                error: ChannelError::Ended | ChannelError::PagesAfterSync | ChannelError::Read(_),
                ..
            }
        );
        let deadline = Instant::now() + SOURCES_LAST_WORDS_WITHIN;
        while cut_short && let Ok(Some(event)) = self.next(session, Some(deadline)) {
            match event {
                Event::Message(_, SourceMessage::Abort { cause }) => {
                    return DestinationError::Aborted { cause };
                }
                Event::Disconnected(..) => break,
                _ => {}
            }
        }
        error
    }

    /// Waits for the channels, and starts their threads when all of them are there: nothing is received of a
    /// round before.
    fn open_channels(
        &mut self,
        session: &Session,
        channels: usize,
    ) -> Result<(), DestinationError> {
        let timeout = self.config.stall_timeout;
        let deadline = Instant::now() + timeout;
        let mut open: Vec<Option<Arc<Stream>>> = vec![None; channels];
        while open.iter().any(Option::is_none) {
            match self.next(session, Some(deadline))? {
                Some(Event::Channel(initial, stream)) => {
                    let channel = initial.channel();
                    match open.get_mut(usize::from(channel)) {
                        Some(place @ None) => *place = Some(stream),
                        _ => return Err(DestinationError::ChannelNumber { channel }),
                    }
                }
                Some(event) => unexpected(event)?,
                None => {
                    return Err(DestinationError::Channels {
                        arrived: open.iter().flatten().count(),
                        channels,
                        seconds: timeout.as_secs(),
                    });
                }
            }
        }
        for (number, stream) in open.into_iter().flatten().enumerate() {
            self.start_channel(session.layout, number, stream)?;
        }
        Ok(())
    }

    fn start_channel(&self, layout: Layout, number: usize, stream: Arc<Stream>) -> io::Result<()> {
        let engines = &self.config.engines;
        let decoder = engines.decoder(layout, self.stats.health());
        let reader = ChannelReader::new(stream, layout, decoder, self.stats.clone());
        let (place, events) = (self.place, self.events_in.clone());
        let copy = &self.config.copy;
        let receive = move || {
            let result = channel::receive(reader, layout, place, copy, |round| {
                // The coordinator is gone when the attempt is over.
                let _ = events.send(Event::Synced(number, round));
            });
            let _ = events.send(Event::Ended(number, result));
        };
        thread::Builder::new().spawn_scoped(self.scope, receive)?;
        Ok(())
    }

    fn check(&self, theirs: &PrepareDetails) -> Result<Layout, DestinationError> {
        let ram = self.ram;
        let mismatch = |text: String| Err(DestinationError::Mismatch(text));
        if theirs.page_size as usize != ram.page_size() {
            return mismatch(format!(
                "its pages have {} bytes, ours {}",
                theirs.page_size,
                ram.page_size()
            ));
        }
        if !CHANNELS.contains(&theirs.channels) {
            return mismatch(format!("it announces {} channels", theirs.channels));
        }
        for block in ram.blocks() {
            let name = block.name().to_string();
            let same_name = theirs.blocks.iter().filter(|theirs| theirs.name == name);
            match same_name.map(|theirs| theirs.len).collect::<Vec<_>>()[..] {
                [len] if len == block.len() as u64 => {}
                [len] => {
                    let ours = block.len();
                    return mismatch(format!(
                        "its RAM block `{name}` has {len} bytes, ours {ours}"
                    ));
                }
                [] => return mismatch(format!("it has no RAM block `{name}`")),
                _ => return mismatch(format!("it has several RAM blocks `{name}`")),
            }
        }
        if theirs.blocks.len() != ram.blocks().len() {
            let ours: Vec<_> = ram
                .blocks()
                .iter()
                .map(|block| block.name().to_string())
                .collect();
            let names = theirs.blocks.iter().map(|block| &block.name);
            let more: Vec<_> = names.filter(|name| !ours.contains(name)).collect();
            return mismatch(format!("it has RAM blocks that we do not have: {more:?}"));
        }
        Layout::new(theirs.page_size)
            .and_then(|layout| layout.with_packet_bytes(theirs.packet_bytes))
            .or_else(|error| mismatch(error.to_string()))
    }

    /// Makes all memory read as zeros: a source does not send what was never touched. It is told that this goes on.
    fn make_zero(&self) {
        if !self.config.memory_is_zero {
            self.send(&DestinationMessage::Preparing);
            let place = self.place;
            place.make_zero(&|| self.send(&DestinationMessage::Preparing));
        }
    }

    /// Sends `message` on all control connections of the attempt. Should it not get there, the source asks again.
    fn send(&self, message: &DestinationMessage) {
        for control in self.controls.values() {
            if let Err(error) = send(control, message) {
                warn!("cannot send {message:?} to the source: {error}");
                // For its thread to notice.
                control.shut_down();
            }
        }
    }

    /// Answers for an attempt that is not the current one, once for each connection.
    fn answer(&mut self, attempt: AttemptId, message: SourceMessage, stream: &Stream) {
        if let Some(answer) = self.finished.answer(attempt, message)
            && let Err(error) = send(stream, &answer)
        {
            warn!("cannot answer for attempt {attempt}: {error}");
        }
        stream.shut_down();
    }

    /// The next event of `session`; `None` when `deadline` has passed. What belongs to other attempts is answered for
    /// these.
    fn next(
        &mut self,
        session: &Session,
        deadline: Option<Instant>,
    ) -> Result<Option<Event>, DestinationError> {
        loop {
            match self.next_event(deadline)? {
                Some(Event::Connected {
                    number,
                    attempt,
                    message,
                    stream,
                }) => {
                    if attempt == session.id {
                        self.controls.insert(number, stream);
                        return Ok(Some(Event::Message(number, message)));
                    }
                    self.answer(attempt, message, &stream);
                }
                Some(Event::Channel(initial, stream)) if initial.uuid() != session.id.0 => {
                    refuse_channel(&stream);
                }
                Some(
                    Event::Message(number, _)
                    | Event::State(number, _)
                    | Event::Disconnected(number, _),
                ) if !self.controls.contains_key(&number) => {}
                event => return Ok(event),
            }
        }
    }

    /// The next event of whatever attempt; `None` when `deadline` has passed.
    fn next_event(&self, deadline: Option<Instant>) -> Result<Option<Event>, DestinationError> {
        let gone = || DestinationError::System(io::ErrorKind::BrokenPipe.into());
        let Some(deadline) = deadline else {
            return self.events.recv().map(Some).map_err(|_| gone());
        };
        let left = deadline.saturating_duration_since(Instant::now());
        match self.events.recv_timeout(left) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
        }
    }
}

fn settle_time(session: &Session) -> Duration {
    session.details.settle_time().min(MOST_SETTLE_TIME)
}

/// Of a guest that was told to go on by this very process, which is all that it takes.
fn started(running: bool) -> DestinationEvent {
    let state = if running { "running" } else { "paused" };
    DestinationEvent::Started {
        state: state.to_owned(),
    }
}

fn guest_error(what: &'static str, error: GuestError) -> DestinationError {
    DestinationError::Guest { what, error }
}

/// What an event means that is not waited for: most end the attempt.
fn unexpected(event: Event) -> Result<(), DestinationError> {
    match event {
        Event::Ended(channel, result) => {
            let error = result.err().unwrap_or(ChannelError::Ended);
            Err(DestinationError::Channel { channel, error })
        }
        Event::Message(_, SourceMessage::Abort { cause }) => {
            Err(DestinationError::Aborted { cause })
        }
        Event::Message(_, message) | Event::Connected { message, .. } => {
            Err(out_of_turn(format!("{message:?}")))
        }
        Event::Synced(_, number) => Err(out_of_turn(format!("SYNC {number}"))),
        Event::State(..) => Err(out_of_turn("state".to_owned())),
        Event::Disconnected(_, why) => Err(why.unwrap_or(DestinationError::ControlEnded)),
        Event::Cancelled => Err(DestinationError::Cancelled),
        Event::Channel(_, stream) => {
            refuse_channel(&stream);
            Ok(())
        }
    }
}

fn out_of_turn(message: String) -> DestinationError {
    DestinationError::OutOfTurn { message }
}

fn refuse_channel(stream: &Stream) {
    warn!("a channel that is not expected: refused");
    stream.shut_down();
}
