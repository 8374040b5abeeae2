//! The source's connections, and what happens on them.

use std::{
    cell::Cell,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::Scope,
    time::{Duration, Instant},
};

use multifd::Initial;
use transfer::{Address, ChannelWriter, SocketError, Stream, dial};

use super::{Source, channel::Channel, round::Round};
use crate::{
    SourceError,
    protocol::{
        BlockShape, DestinationMessage, Hello, MigrationId, Opening, ProtocolError, SourceMessage,
        receive, send,
    },
    status::millis,
};

/// Everything that leads to the destination.
pub(super) struct Link<'a> {
    source: &'a Source,
    destination: &'a Address,
    id: MigrationId,
    control: Arc<Stream>,
    events: Receiver<Event>,
    /// The destination will not say anything more.
    silent: Cell<bool>,
    /// To each channel's thread; empty when the channels have ended.
    rounds: Vec<Sender<Arc<Round>>>,
    /// The destination may have loaded the guest.
    state_sent: bool,
}

/// What the coordinator waits for.
enum Event {
    /// A channel has sent its share of the round.
    Sent,
    /// A channel has failed.
    Failed(SourceError),
    /// The destination says something.
    Heard(DestinationMessage),
    /// It will not say anything more.
    Silence(Option<ProtocolError>),
}

/// How a round ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// All pages are there.
    All,
    /// The deadline has passed.
    TooLate,
}

/// How long a destination may take to make its memory zero.
const ACCEPT_WITHIN: Duration = Duration::from_secs(60);

/// How long to wait for the words of a destination whose connections break.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(1);

impl<'a> Link<'a> {
    /// Connects, introduces the guest, opens the channels.
    pub(super) fn establish<'scope>(
        source: &'a Source,
        destination: &'a Address,
        scope: &'scope Scope<'scope, 'a>,
    ) -> Result<Self, SourceError> {
        let config = &source.config;
        let id = MigrationId::random()?;
        let control = connect(source, destination)?;
        control
            .write_both(&Opening::control(id), &[])
            .map_err(ProtocolError::from)?;
        let (events_in, events) = mpsc::channel();
        scope.spawn({
            let (control, events) = (control.clone(), events_in.clone());
            move || listen(&control, &events)
        });
        let mut link = Self {
            source,
            destination,
            id,
            control,
            events,
            silent: Cell::new(false),
            rounds: Vec::new(),
            state_sent: false,
        };
        link.say(&SourceMessage::Hello(hello(source)))?;
        match link.hear(
            "accepted the guest",
            config.stall_timeout.max(ACCEPT_WITHIN),
        )? {
            DestinationMessage::Accepted => {}
            said => return Err(unexpected(said)),
        }
        for number in 0..config.channels {
            let writer = link.open_channel(number)?;
            let (rounds_in, rounds) = mpsc::channel();
            let events = events_in.clone();
            scope.spawn(move || {
                let channel = Channel::new(source, number.into(), writer);
                run(channel, &rounds, &events);
            });
            link.rounds.push(rounds_in);
        }
        Ok(link)
    }

    /// Has all channels send `round`, and waits for the destination's word that all of it is there.
    pub(super) fn send(
        &self,
        round: Round,
        deadline: Option<Instant>,
    ) -> Result<Sent, SourceError> {
        let number = round.number;
        let round = Arc::new(round);
        let (sent_before, began) = (
            self.source.shared.stats.snapshot().wire_bytes,
            Instant::now(),
        );
        for channel in &self.rounds {
            // A channel that has ended has said why.
            let _ = channel.send(round.clone());
        }
        // The destination's word may overtake that of the last channel's thread.
        let (mut sending, mut synced) = (self.rounds.len(), false);
        while sending > 0 {
            match self.next(deadline)? {
                Some(Event::Sent) => sending -= 1,
                Some(Event::Failed(error)) => return Err(error),
                Some(Event::Heard(DestinationMessage::Synced { round }))
                    if round == number && !synced =>
                {
                    synced = true;
                }
                Some(Event::Heard(said)) => return Err(unexpected(said)),
                Some(Event::Silence(why)) => return Err(silence(why)),
                None => return Ok(Sent::TooLate),
            }
        }
        if synced {
            return Ok(Sent::All);
        }
        let sent = self.source.shared.stats.snapshot().wire_bytes - sent_before;
        let patience =
            self.source.config.stall_timeout + drain_time(self.rounds.len(), sent, began.elapsed());
        match self.hear("received a round", patience)? {
            DestinationMessage::Synced { round } if round == number => Ok(Sent::All),
            said => Err(unexpected(said)),
        }
    }

    /// Ends the channels: what was sent still arrives.
    pub(super) fn end_channels(&mut self) {
        self.rounds.clear();
    }

    pub(super) fn say(&self, message: &SourceMessage) -> Result<(), SourceError> {
        Ok(send(&self.control, message)?)
    }

    /// Sends the device state.
    pub(super) fn say_state(&mut self, state: &[u8]) -> Result<(), SourceError> {
        self.state_sent = true;
        let len = state.len() as u64;
        self.say(&SourceMessage::State { len })?;
        self.control
            .write_both(state, &[])
            .map_err(ProtocolError::from)?;
        self.source.shared.stats.add_sent(state.len());
        Ok(())
    }

    /// The destination's next words, within `patience`.
    pub(super) fn hear(
        &self,
        what: &'static str,
        patience: Duration,
    ) -> Result<DestinationMessage, SourceError> {
        let deadline = Instant::now() + patience;
        loop {
            match self.next(Some(deadline))? {
                Some(Event::Heard(said)) => return Ok(said),
                Some(Event::Failed(error)) => return Err(error),
                Some(Event::Silence(why)) => return Err(silence(why)),
                Some(Event::Sent) => {}
                None => {
                    let seconds = patience.as_secs();
                    return Err(SourceError::NoAnswer { what, seconds });
                }
            }
        }
    }

    /// Waits, and fails at once if something fails meanwhile.
    pub(super) fn idle(&self, time: Duration) -> Result<(), SourceError> {
        match self.next(Some(Instant::now() + time))? {
            None | Some(Event::Sent) => Ok(()),
            Some(Event::Failed(error)) => Err(error),
            Some(Event::Heard(said)) => Err(unexpected(said)),
            Some(Event::Silence(why)) => Err(silence(why)),
        }
    }

    /// Replaces an error of a connection by the destination's own words, if they are on their way.
    pub(super) fn explain(&self, error: SourceError) -> SourceError {
        let of_connection = matches!(
            error,
            SourceError::Channel { .. } | SourceError::Control(_) | SourceError::ControlEnded
        );
        if !of_connection || self.silent.get() || self.source.shared.is_cancelled() {
            return error;
        }
        let deadline = Instant::now() + LAST_WORDS_WITHIN;
        while let Ok(Some(event)) = self.next(Some(deadline)) {
            match event {
                Event::Heard(DestinationMessage::Aborted { cause }) => {
                    return SourceError::Destination { cause };
                }
                Event::Silence(_) => break,
                _ => {}
            }
        }
        error
    }

    /// Tells the destination that the guest stays here. It finds out by itself if it cannot be told, but one
    /// that has loaded the guest only after the settle time.
    pub(super) fn abort(&self, error: &SourceError) {
        let abort = SourceMessage::Abort {
            cause: error.to_string(),
        };
        // Not for long: the connection may be what has failed.
        let _ = self.control.set_stall_timeout(LAST_WORDS_WITHIN);
        let said = send(&self.control, &abort);
        if said.is_err()
            && self.state_sent
            && let Ok(stream) = dial(self.destination, LAST_WORDS_WITHIN)
        {
            let opening = Opening::control(self.id);
            let _ = stream.write_both(&opening, &[]);
            let _ = send(&stream, &abort);
        }
    }

    /// The attempt's name.
    pub(super) fn id(&self) -> MigrationId {
        self.id
    }

    fn open_channel(&self, number: u8) -> Result<ChannelWriter, SourceError> {
        let source = self.source;
        let config = &source.config;
        let opening = Initial::new(self.id.0, number, config.channels.into())?.to_bytes();
        let stream = connect(source, self.destination)?;
        stream
            .write_both(&opening, &[])
            .map_err(ProtocolError::from)?;
        let stats = &source.shared.stats;
        let mut writer = ChannelWriter::new(
            stream,
            source.layout,
            config.engines.encoder(source.layout, stats.health())?,
            source.shared.pacer.clone(),
            stats.clone(),
        );
        if config.zero_copy {
            writer.enable_zero_copy()?;
        }
        Ok(writer)
    }

    /// The next event; `None` when `deadline` has passed.
    fn next(&self, deadline: Option<Instant>) -> Result<Option<Event>, SourceError> {
        let event = match deadline {
            None => self.events.recv().map_err(RecvTimeoutError::from),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.events.recv_timeout(left)
            }
        };
        match event {
            Ok(event) => {
                if matches!(event, Event::Silence(_)) {
                    self.silent.set(true);
                }
                Ok(Some(event))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(SourceError::ControlEnded),
        }
    }
}

/// For how long what the system has taken may still be on its way, if `sent` bytes have taken it `took`.
fn drain_time(channels: usize, sent: u64, took: Duration) -> Duration {
    let in_flight = channels as u64 * MOST_IN_FLIGHT;
    if in_flight >= sent {
        // Perhaps nobody has waited for the link yet: then it is known only that it is slower than memory.
        return took.max(SLOWEST_DRAIN);
    }
    took.mul_f64(in_flight as f64 / sent as f64)
}

/// What the sockets of a channel can hold, on both hosts.
const MOST_IN_FLIGHT: u64 = 10 << 20;

/// For a short round on a link of 10 Mbit/s.
const SLOWEST_DRAIN: Duration = Duration::from_secs(10);

/// What a message means that nobody waits for.
pub(super) fn unexpected(said: DestinationMessage) -> SourceError {
    match said {
        DestinationMessage::Aborted { cause } => SourceError::Destination { cause },
        DestinationMessage::Refused { cause } => SourceError::Refused { cause },
        said => SourceError::OutOfTurn {
            said: format!("{said:?}"),
        },
    }
}

fn silence(why: Option<ProtocolError>) -> SourceError {
    why.map_or(SourceError::ControlEnded, SourceError::Control)
}

fn connect(source: &Source, destination: &Address) -> Result<Arc<Stream>, SocketError> {
    let stream = Arc::new(dial(destination, source.config.stall_timeout)?);
    source.shared.register(&stream);
    Ok(stream)
}

fn hello(source: &Source) -> Hello {
    let number = |value| u32::try_from(value).unwrap_or(u32::MAX);
    let blocks = source.ram.blocks().iter().map(|block| BlockShape {
        name: block.name().to_string(),
        len: block.len() as u64,
    });
    Hello {
        blocks: blocks.collect(),
        page_size: number(source.layout.page_size()),
        packet_bytes: number(source.layout.packet_bytes()),
        channels: source.config.channels,
        settle_ms: millis(source.config.settle_time),
    }
}

/// Hears the destination out.
fn listen(control: &Stream, events: &Sender<Event>) {
    loop {
        let event = match receive(control) {
            Ok(Some(said)) => Event::Heard(said),
            Ok(None) => Event::Silence(None),
            Err(error) => Event::Silence(Some(error)),
        };
        let last = matches!(event, Event::Silence(_));
        // Nobody listens any more when the migration is over.
        if events.send(event).is_err() || last {
            return;
        }
    }
}

/// A channel's thread.
fn run(mut channel: Channel<'_>, rounds: &Receiver<Arc<Round>>, events: &Sender<Event>) {
    for round in rounds {
        let sent = channel.send(&round);
        let failed = sent.is_err();
        let event = sent.map_or_else(Event::Failed, |()| Event::Sent);
        if events.send(event).is_err() || failed {
            return;
        }
    }
    if let Err(error) = channel.finish() {
        // Nobody listens any more when the migration is over.
        let _ = events.send(Event::Failed(error));
    }
}
