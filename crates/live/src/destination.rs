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
//! source, from new connections, reaches it as an event; whatever blocks is ended by hanging up.

mod accept;
mod channel;
mod parallel;
mod place;

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, Scope},
    time::{Duration, Instant},
};

use codec::Engines;
use multifd::Layout;
use tracing::{debug, info, warn};
use transfer::{Address, ChannelReader, Hangup, Listener, Snapshot, Stats, Stream};

use crate::{
    ChannelError, DestinationError, DestinationGuest, GuestError, Offload, PageCopy, Ram,
    offload::Account,
    protocol::{
        DestinationMessage, Hello, MigrationId, Opening, ProtocolError, SourceMessage, VERSION,
        receive, receive_state, send,
    },
    source::CHANNELS,
};
use place::Place;

/// Waits for a guest.
pub struct Destination {
    listener: Listener,
    ram: Ram,
    config: DestinationConfig,
    closing: Arc<Hangup>,
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
    /// From the source's first words to the running guest.
    pub total_time: Duration,
    /// Whether the source has said that it knows. If not, it was out of reach for the settle time.
    pub settled: bool,
    /// What devices have done of the copies, if there were some for that.
    pub copy: Option<Offload>,
}

/// How much longer questions are answered than the source asks: whoever finds nobody listening must be right
/// in thinking that the guest never ran here.
const LINGER: Duration = Duration::from_secs(30);

/// Longest settle time that a source can ask for.
const MOST_SETTLE_TIME: Duration = Duration::from_secs(3600);

/// How long telling a source why it failed may take.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(1);

/// How long to wait for the words of a source whose channels break: its guest may stand still.
const SOURCES_LAST_WORDS_WITHIN: Duration = Duration::from_millis(100);

impl Destination {
    /// Listens on `address` for a guest whose memory is `ram`.
    ///
    /// # Errors
    /// When the address is taken or not this host's.
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
    /// hold anything. It may be called again for another attempt.
    pub fn run(&mut self, guest: &mut dyn DestinationGuest) -> Result<Arrival, DestinationError> {
        let hangup = Hangup::new()?;
        let stats = Arc::new(Stats::default());
        let place = Place::new(&self.ram, self.config.punch_holes);
        let (events_in, events) = mpsc::channel();
        thread::scope(|scope| {
            let attempt = Attempt {
                destination: self,
                hangup: &hangup,
                stats,
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
            attempt.run(guest)
        })
    }
}

struct HangUp<'a>(&'a Hangup);

impl Drop for HangUp<'_> {
    fn drop(&mut self) {
        self.0.hang_up();
    }
}

/// What the coordinator waits for.
enum Event {
    /// A connection of a source.
    Opened(Opening, Arc<Stream>),
    /// The listener has failed.
    Deaf(DestinationError),
    /// The source says something, on the control connection of this number.
    Heard(u64, SourceMessage),
    /// The device state has come.
    State(Vec<u8>),
    /// A control connection has ended.
    Silence(u64, Option<DestinationError>),
    /// A channel has written all its pages of a round.
    Synced(usize, u64),
    /// A channel has ended.
    Ended(usize, Result<(), ChannelError>),
    /// Somebody has cancelled.
    Cancelled,
}

/// The coordinator.
struct Attempt<'scope, 'env> {
    destination: &'env Destination,
    hangup: &'env Hangup,
    stats: Arc<Stats>,
    copied: Option<Account>,
    place: &'env Place<'env>,
    events: Receiver<Event>,
    events_in: Sender<Event>,
    scope: &'scope Scope<'scope, 'env>,
}

/// A source that has introduced itself.
struct Guest {
    id: MigrationId,
    hello: Hello,
    layout: Layout,
    controls: Controls,
    start: Instant,
}

/// The control connections of a source: one, and more if it was lost.
#[derive(Default)]
struct Controls {
    open: HashMap<u64, Arc<Stream>>,
    last: u64,
}

impl<'scope, 'env: 'scope> Attempt<'scope, 'env> {
    fn run(&self, guest: &mut dyn DestinationGuest) -> Result<Arrival, DestinationError> {
        let destination = self.destination;
        self.scope.spawn({
            let (hangup, events, scope) = (self.hangup, self.events_in.clone(), self.scope);
            move || {
                accept::run(
                    &destination.listener,
                    hangup,
                    &destination.closing,
                    &events,
                    scope,
                )
            }
        });
        let mut source = self.wait_for_source()?;
        let loaded = self
            .receive(&mut source)
            .and_then(|state| {
                guest
                    .load(&state)
                    .map_err(|error| guest_error("load the state of", error))
            })
            .and_then(|()| source.controls.say(&DestinationMessage::Loaded))
            .and_then(|()| self.wait_for_commit(&mut source));
        let asked_by = match loaded {
            Ok(control) => control,
            Err(error) => {
                let error = self.explain(error);
                source.controls.abort(&error);
                return Err(error);
            }
        };
        self.start(guest, &mut source, asked_by)
    }

    /// The first source whose guest is ours, once it is accepted.
    fn wait_for_source(&self) -> Result<Guest, DestinationError> {
        let mut controls = Controls::default();
        let (id, start, hello) = loop {
            let id = self.wait_for_control(&mut controls)?;
            let start = Instant::now();
            match self.hear(&mut controls, self.destination.config.stall_timeout)? {
                SourceMessage::Hello(hello) => break (id, start, hello),
                // Of an attempt that is over here: the guest has not run, or its source would not ask.
                SourceMessage::Commit => {
                    let cause = "the destination has given up before".to_owned();
                    let _ = controls.say(&DestinationMessage::Aborted { cause });
                }
                SourceMessage::Abort { .. } | SourceMessage::Settled => {}
                said => return Err(unexpected(said)),
            }
        };
        match self.check(&hello) {
            Ok(layout) => {
                self.make_zero();
                controls.say(&DestinationMessage::Accepted)?;
                info!(
                    "accepted a guest of {} RAM blocks over {} channels",
                    hello.blocks.len(),
                    hello.channels
                );
                Ok(Guest {
                    id,
                    hello,
                    layout,
                    controls,
                    start,
                })
            }
            Err(error) => {
                let cause = error.to_string();
                // The source finds out by the end of the connection otherwise.
                let _ = controls.say(&DestinationMessage::Refused { cause });
                Err(error)
            }
        }
    }

    /// The next control connection of a source of our version.
    fn wait_for_control(&self, controls: &mut Controls) -> Result<MigrationId, DestinationError> {
        loop {
            match self.next(None)? {
                Some(Event::Opened(Opening::Control { version, id }, stream)) => {
                    if version != VERSION {
                        let (theirs, ours) = (version, VERSION);
                        let error = DestinationError::Version { theirs, ours };
                        refuse(&stream, &error);
                        return Err(error);
                    }
                    controls.open.clear();
                    self.listen(controls, stream);
                    return Ok(id);
                }
                Some(Event::Opened(Opening::Channel(_), _)) => {
                    warn!("a channel of a migration that is not expected: ignored");
                }
                Some(Event::Cancelled) => return Err(DestinationError::Cancelled),
                Some(Event::Deaf(error)) => return Err(error),
                _ => {}
            }
        }
    }

    /// Takes all memory and the device state. When this returns, nobody can write a page any more.
    fn receive(&self, source: &mut Guest) -> Result<Vec<u8>, DestinationError> {
        let channels = usize::from(source.hello.channels);
        self.open_channels(source, channels)?;
        // A SYNC of each channel, of the same round, is a round.
        let (mut round, mut synced) = (0, vec![0; channels]);
        let (mut ended, mut state) = (vec![false; channels], None);
        loop {
            match self.next(None)? {
                Some(Event::Synced(channel, number))
                    if number == round + 1 && synced[channel] == round && state.is_none() =>
                {
                    synced[channel] = number;
                    if synced.iter().all(|synced| *synced == number) {
                        round = number;
                        source.controls.say(&DestinationMessage::Synced { round })?;
                        debug!(round, "round received");
                    }
                }
                Some(Event::Ended(channel, Ok(()))) => ended[channel] = true,
                Some(Event::State(bytes))
                    if state.is_none()
                        && round > 0
                        && synced.iter().all(|synced| *synced == round) =>
                {
                    state = Some(bytes);
                }
                Some(event) => self.mind(source, event)?,
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

    /// Waits until the source says that the guest is ours; returns the connection on which it did.
    fn wait_for_commit(&self, source: &mut Guest) -> Result<u64, DestinationError> {
        let patience = source.hello.settle_time().min(MOST_SETTLE_TIME);
        let deadline = Instant::now() + patience;
        loop {
            match self.next(Some(deadline))? {
                Some(Event::Heard(control, SourceMessage::Commit)) => return Ok(control),
                Some(Event::Opened(Opening::Control { id, .. }, stream)) if id == source.id => {
                    self.listen(&mut source.controls, stream);
                }
                Some(Event::Silence(control, _)) => {
                    // It has perhaps committed: it will come back, or stay away.
                    source.controls.open.remove(&control);
                }
                Some(event) => self.mind(source, event)?,
                None => {
                    let seconds = patience.as_secs();
                    return Err(DestinationError::NotCommitted { seconds });
                }
            }
        }
    }

    /// Lets the guest run, and answers for it until the source knows.
    fn start(
        &self,
        guest: &mut dyn DestinationGuest,
        source: &mut Guest,
        asked_by: u64,
    ) -> Result<Arrival, DestinationError> {
        let deadline = Instant::now() + source.hello.settle_time().min(MOST_SETTLE_TIME) + LINGER;
        // Before it runs: a source that has heard nothing must be able to rely on that. Should it not
        // get there, it asks again.
        source
            .controls
            .tell(asked_by, &DestinationMessage::Starting);
        let result = guest.resume();
        let answer = match &result {
            Ok(()) => DestinationMessage::Running,
            Err(error) => DestinationMessage::Aborted {
                cause: format!("cannot run the guest: {error}"),
            },
        };
        let total_time = source.start.elapsed();
        source.controls.tell(asked_by, &answer);
        let settled = self.answer_questions(source, &answer, deadline);
        result.map_err(|error| guest_error("run", error))?;
        Ok(Arrival {
            moved: self.stats.snapshot(),
            total_time,
            settled,
            copy: self.copied.as_ref().map(Account::read),
        })
    }

    /// Answers the source's questions until it says that it has no more; false if it did not until `deadline`.
    fn answer_questions(
        &self,
        source: &mut Guest,
        answer: &DestinationMessage,
        deadline: Instant,
    ) -> bool {
        while let Ok(Some(event)) = self.next(Some(deadline)) {
            match event {
                Event::Heard(_, SourceMessage::Settled) => return true,
                Event::Heard(control, SourceMessage::Commit) => {
                    source.controls.tell(control, answer);
                }
                Event::Opened(Opening::Control { id, .. }, stream) if id == source.id => {
                    self.listen(&mut source.controls, stream);
                }
                Event::Silence(control, _) => {
                    source.controls.open.remove(&control);
                }
                Event::Opened(_, stream) => stream.shut_down(),
                _ => {}
            }
        }
        warn!("the source has not acknowledged that the guest runs here");
        false
    }

    /// Replaces an error of a connection by the source's own words, if they are on their way.
    fn explain(&self, error: DestinationError) -> DestinationError {
        let cut_short = matches!(
            &error,
            DestinationError::Channel {
                error: ChannelError::Ended | ChannelError::PagesAfterSync | ChannelError::Read(_),
                ..
            }
        );
        let deadline = Instant::now() + SOURCES_LAST_WORDS_WITHIN;
        while cut_short && let Ok(Some(event)) = self.next(Some(deadline)) {
            match event {
                Event::Heard(_, SourceMessage::Abort { cause }) => {
                    return DestinationError::Aborted { cause };
                }
                Event::Silence(..) => break,
                _ => {}
            }
        }
        error
    }

    /// What ends an attempt whenever it comes.
    fn mind(&self, source: &Guest, event: Event) -> Result<(), DestinationError> {
        match event {
            Event::Ended(channel, Err(error)) => Err(DestinationError::Channel { channel, error }),
            Event::Heard(_, said) => Err(unexpected(said)),
            Event::Silence(_, why) => Err(why.unwrap_or(DestinationError::ControlEnded)),
            Event::Cancelled => Err(DestinationError::Cancelled),
            Event::Deaf(error) => Err(error),
            Event::Opened(opening, stream) => {
                warn!(
                    ?opening,
                    "a connection that is not of migration {:?}: refused", source.id
                );
                stream.shut_down();
                Ok(())
            }
            Event::Synced(_, number) => Err(out_of_turn(format!("SYNC {number}"))),
            Event::State(_) => Err(out_of_turn("state".to_owned())),
            Event::Ended(channel, Ok(())) => {
                let error = ChannelError::Ended;
                Err(DestinationError::Channel { channel, error })
            }
        }
    }

    /// Waits for the channels, and starts their threads when all of them are there: nothing is heard of a
    /// round before.
    fn open_channels(&self, source: &Guest, channels: usize) -> Result<(), DestinationError> {
        let patience = self.destination.config.stall_timeout;
        let deadline = Instant::now() + patience;
        let mut open: Vec<Option<Arc<Stream>>> = vec![None; channels];
        while open.iter().any(Option::is_none) {
            match self.next(Some(deadline))? {
                Some(Event::Opened(Opening::Channel(initial), stream))
                    if initial.uuid() == source.id.0 =>
                {
                    let channel = initial.channel();
                    match open.get_mut(usize::from(channel)) {
                        Some(place @ None) => *place = Some(stream),
                        _ => return Err(DestinationError::ChannelNumber { channel }),
                    }
                }
                Some(event) => self.mind(source, event)?,
                None => {
                    return Err(DestinationError::Channels {
                        arrived: open.iter().flatten().count(),
                        channels,
                        seconds: patience.as_secs(),
                    });
                }
            }
        }
        for (number, stream) in open.into_iter().flatten().enumerate() {
            self.start_channel(source.layout, number, stream);
        }
        Ok(())
    }

    fn start_channel(&self, layout: Layout, number: usize, stream: Arc<Stream>) {
        let decoder = self
            .destination
            .config
            .engines
            .decoder(layout, self.stats.health());
        let reader = ChannelReader::new(stream, layout, decoder, self.stats.clone());
        let (place, events) = (self.place, self.events_in.clone());
        let copy = &self.destination.config.copy;
        self.scope.spawn(move || {
            let result = channel::receive(reader, layout, place, copy, |round| {
                // Nobody listens any more when the attempt is over.
                let _ = events.send(Event::Synced(number, round));
            });
            let _ = events.send(Event::Ended(number, result));
        });
    }

    fn check(&self, hello: &Hello) -> Result<Layout, DestinationError> {
        let ram = &self.destination.ram;
        let mismatch = |text: String| Err(DestinationError::Mismatch(text));
        if hello.page_size as usize != ram.page_size() {
            return mismatch(format!(
                "its pages have {} bytes, ours {}",
                hello.page_size,
                ram.page_size()
            ));
        }
        if !CHANNELS.contains(&hello.channels) {
            return mismatch(format!("it announces {} channels", hello.channels));
        }
        for block in ram.blocks() {
            let name = block.name().to_string();
            let theirs = hello.blocks.iter().filter(|theirs| theirs.name == name);
            match theirs.map(|theirs| theirs.len).collect::<Vec<_>>()[..] {
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
        if hello.blocks.len() != ram.blocks().len() {
            let ours: Vec<_> = ram
                .blocks()
                .iter()
                .map(|block| block.name().to_string())
                .collect();
            let theirs = hello.blocks.iter().map(|block| &block.name);
            let more: Vec<_> = theirs.filter(|name| !ours.contains(name)).collect();
            return mismatch(format!("it has RAM blocks that we do not have: {more:?}"));
        }
        Layout::new(hello.page_size)
            .and_then(|layout| layout.with_packet_bytes(hello.packet_bytes))
            .or_else(|error| mismatch(error.to_string()))
    }

    /// Makes all memory read as zeros: a source does not send what was never touched.
    fn make_zero(&self) {
        if !self.destination.config.memory_is_zero {
            self.place
                .make_zero(&|| debug!("still making guest memory zero"));
        }
    }

    /// Starts to listen to a control connection.
    fn listen(&self, controls: &mut Controls, stream: Arc<Stream>) {
        controls.last += 1;
        let number = controls.last;
        controls.open.insert(number, stream.clone());
        let (events, max) = (self.events_in.clone(), self.destination.config.max_state);
        self.scope
            .spawn(move || listen(number, &stream, max, &events));
    }

    /// The source's next words.
    fn hear(
        &self,
        controls: &mut Controls,
        patience: Duration,
    ) -> Result<SourceMessage, DestinationError> {
        let deadline = Instant::now() + patience;
        loop {
            match self.next(Some(deadline))? {
                Some(Event::Heard(_, said)) => return Ok(said),
                Some(Event::Silence(number, why)) if controls.open.contains_key(&number) => {
                    return Err(why.unwrap_or(DestinationError::ControlEnded));
                }
                Some(Event::Cancelled) => return Err(DestinationError::Cancelled),
                Some(Event::Deaf(error)) => return Err(error),
                Some(Event::Opened(_, stream)) => stream.shut_down(),
                Some(Event::State(_)) => return Err(out_of_turn("state".to_owned())),
                Some(_) => {}
                None => return Err(ProtocolError::Silent.into()),
            }
        }
    }

    /// The next event; `None` when `deadline` has passed.
    fn next(&self, deadline: Option<Instant>) -> Result<Option<Event>, DestinationError> {
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

impl Controls {
    /// Says something on the connection that was opened last.
    fn say(&self, message: &DestinationMessage) -> Result<(), DestinationError> {
        let control = self
            .open
            .get(&self.last)
            .ok_or(DestinationError::ControlEnded)?;
        Ok(send(control, message)?)
    }

    /// Answers on connection `number`. Should that fail, the source asks again.
    fn tell(&self, number: u64, message: &DestinationMessage) {
        if let Some(control) = self.open.get(&number)
            && let Err(error) = send(control, message)
        {
            warn!("the source cannot be told `{message:?}`: {error}");
        }
    }

    /// Says on all connections why the guest will never run here.
    fn abort(&self, error: &DestinationError) {
        let cause = error.to_string();
        for control in self.open.values() {
            // Not for long: the connection may be what has failed.
            let _ = control.set_stall_timeout(LAST_WORDS_WITHIN);
            let cause = cause.clone();
            let _ = send(control, &DestinationMessage::Aborted { cause });
        }
    }
}

fn guest_error(what: &'static str, error: GuestError) -> DestinationError {
    DestinationError::Guest { what, error }
}

/// What a message means that nobody waits for.
fn unexpected(said: SourceMessage) -> DestinationError {
    match said {
        SourceMessage::Abort { cause } => DestinationError::Aborted { cause },
        said => out_of_turn(format!("{said:?}")),
    }
}

fn out_of_turn(said: String) -> DestinationError {
    DestinationError::OutOfTurn { said }
}

fn refuse(stream: &Stream, error: &DestinationError) {
    let cause = error.to_string();
    let _ = send(stream, &DestinationMessage::Refused { cause });
}

/// Hears a source out.
fn listen(number: u64, control: &Stream, max_state: u64, events: &Sender<Event>) {
    loop {
        let event = match receive(control) {
            Ok(Some(SourceMessage::State { len })) => state(number, control, len, max_state),
            Ok(Some(said)) => Event::Heard(number, said),
            Ok(None) => Event::Silence(number, None),
            Err(error) => Event::Silence(number, Some(error.into())),
        };
        let last = matches!(event, Event::Silence(..));
        // Nobody listens any more when the attempt is over.
        if events.send(event).is_err() || last {
            return;
        }
    }
}

/// Receives the device state.
fn state(number: u64, control: &Stream, len: u64, max: u64) -> Event {
    let result = match usize::try_from(len) {
        Ok(wanted) if len <= max => receive_state(control, wanted).map_err(DestinationError::from),
        _ => Err(DestinationError::StateLength { len, max }),
    };
    result.map_or_else(|error| Event::Silence(number, Some(error)), Event::State)
}
