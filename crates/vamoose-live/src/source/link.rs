//! The source's connections to the destination: control messages, rounds on the channels, the device state.

use std::{
    cell::Cell,
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, SyncSender},
    },
    thread::{self, Scope},
    time::{Duration, Instant},
};

use handover::{AttemptId, DestinationMessage, Prepare, SourceMessage, negotiate, to_details};
use multifd::Initial;
use tracing::warn;
use vamoose_link::{
    ChannelWriter, Conversation, ConversationError, DeltaSender, Pacer, StoreSender, Stream,
    receive_until, send_message,
};

use super::{Source, Transport, channel::Channel, round::Round, transport::Redialer};
use crate::{
    SourceError,
    protocol::{PrepareDetails, control_preamble, page_streams},
    spans::in_span,
};

pub(super) struct Link<'scope, 'a> {
    source: &'a Source,
    scope: &'scope Scope<'scope, 'a>,
    /// Opens further connections to the destination.
    redialer: Redialer,
    id: AttemptId,
    control: Arc<Stream>,
    events: Receiver<Event>,
    events_in: SyncSender<Event>,
    /// The control connection has ended.
    disconnected: Cell<bool>,
    /// The queue of each channel's thread. Empty once the channels have ended.
    rounds: Vec<SyncSender<Arc<Round>>>,
    device_state: DeviceState,
    /// When the guest has been paused for too long and has to be resumed.
    resume_at: Option<Instant>,
}

/// Progress of the device state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceState {
    Unsent,
    Sending,
    Sent,
    Loaded,
}

/// An event for the coordinator.
enum Event {
    /// Streams of pages are open.
    Opened(Vec<Arc<Stream>>),
    /// A channel has sent its share of the round, or the device state has been sent.
    Sent,
    /// A channel has failed, or the device state could not be sent.
    Failed(SourceError),
    /// From the destination.
    Message(DestinationMessage),
    /// The control connection has ended.
    Disconnected(ConversationError),
    Cancelled,
}

/// How a round without a failure ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundEnd {
    /// All pages are written at the destination.
    Synced,
    /// The deadline has passed.
    TooLate,
}

/// Least timeout between two `preparing` of a destination, which first looks for the memory that
/// it has to make zero. That takes up to 15 s per TiB.
const MIN_PREPARE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long to wait for the reason when the destination's connections break, and to report a failure to it.
const FAILURE_TIMEOUT: Duration = Duration::from_secs(1);

/// Events that may wait for the coordinator.
const QUEUE: usize = 64;

impl<'scope, 'a> Link<'scope, 'a> {
    /// Opens the control connection of the new attempt `id`.
    pub(super) fn connect(
        source: &'a Source,
        id: AttemptId,
        destination: &Transport,
        scope: &'scope Scope<'scope, 'a>,
    ) -> Result<Self, SourceError> {
        let (redialer, control) = destination.begin(source.config.stall_timeout)?;
        if let Redialer::Session(session, _) = &redialer {
            // Set only here.
            let _ = source.shared.session.set(session.clone());
            source.shared.pacer.follow(session.clone());
        }
        let control = register(source, control)?;
        control
            .write_both(&control_preamble(id), &[])
            .map_err(ConversationError::from)?;
        let (events_in, events) = mpsc::sync_channel(QUEUE);
        let link = Self {
            source,
            scope,
            redialer,
            id,
            control: control.clone(),
            events,
            events_in: events_in.clone(),
            disconnected: Cell::new(false),
            rounds: Vec::new(),
            device_state: DeviceState::Unsent,
            resume_at: None,
        };
        let wake = link.events_in.clone();
        source.shared.wake_by(move || {
            // If the queue is full, this thread is awake.
            let _ = wake.try_send(Event::Cancelled);
        })?;
        link.spawn(move || receive(Conversation::new(control), &events_in))?;
        Ok(link)
    }

    /// Describes the guest, and waits until the destination is ready for it; returns its answer.
    pub(super) fn prepare(&self, description: Vec<u8>) -> Result<DestinationMessage, SourceError> {
        let Source {
            ram,
            layout,
            config,
            ..
        } = self.source;
        let details = to_details(&PrepareDetails::new(ram, *layout, config, description));
        let prepare = Prepare::new(details.map_err(ConversationError::from)?);
        let timeout = self.timeout(config.stall_timeout.max(MIN_PREPARE_TIMEOUT));
        let mut answer = self
            .send(&SourceMessage::Prepare(prepare))
            .and_then(|()| self.receive("accepted the guest", timeout))
            .map_err(or_unanswered)?;
        while answer == DestinationMessage::Preparing {
            answer = self.receive("accepted the guest", timeout)?;
        }
        let DestinationMessage::Prepared { protocol, .. } = answer else {
            return Err(unexpected(answer));
        };
        negotiate(protocol..=protocol)?;
        Ok(answer)
    }

    pub(super) fn open_channels(&mut self) -> Result<(), SourceError> {
        let source = self.source;
        let (sent_pages, store) = (self.sent_pages(), self.store());
        let streams = self.open_streams(0..source.config.channels)?;
        for (number, stream) in streams.into_iter().enumerate() {
            let mut writer = self.writer(stream, Some(source.shared.pacer.clone()))?;
            if source.config.zero_copy {
                writer.enable_zero_copy()?;
            }
            if let Some(sent_pages) = &sent_pages {
                writer.send_differences(sent_pages.clone())?;
            }
            if let Some(store) = &store {
                let listener = writer.share_pages(store.clone());
                self.spawn(move || listener.run())?;
            }
            // The coordinator waits for the round before.
            let (rounds_in, rounds) = mpsc::sync_channel(1);
            let events = self.events_in.clone();
            self.spawn(move || {
                let channel = Channel::new(source, number, writer);
                run(channel, &rounds, &events);
            })?;
            self.rounds.push(rounds_in);
        }
        Ok(())
    }

    /// The cache of sent pages, if pages may be sent as differences.
    fn sent_pages(&self) -> Option<Arc<DeltaSender>> {
        let session = self.source.shared.session.get()?;
        let cache = DeltaSender::in_place_over(session, self.source.layout);
        cache.filter(|_| self.source.config.delta).map(Arc::new)
    }

    /// The destination's page store, if it has one and the session takes it.
    fn store(&self) -> Option<Arc<StoreSender>> {
        let session = self.source.shared.session.get()?;
        let stats = self.source.shared.stats.clone();
        StoreSender::over(session, None, stats).map(Arc::new)
    }

    /// Limits all further waits to `resume_at`, or lifts that limit.
    pub(super) fn bound_downtime(&mut self, resume_at: Option<Instant>) {
        self.resume_at = resume_at;
    }

    /// Has all channels send `round`, and waits until the destination has written all of it.
    pub(super) fn send_round(
        &self,
        round: Round,
        deadline: Option<Instant>,
    ) -> Result<RoundEnd, SourceError> {
        let number = round.number;
        let is_synced = |message: &DestinationMessage| matches!(message, DestinationMessage::Synced { round } if *round == number);
        let round = Arc::new(round);
        let stats = &self.source.shared.stats;
        let (sent_before, began) = (stats.snapshot().wire_bytes, Instant::now());
        for channel in &self.rounds {
            // A channel that has ended has reported why.
            let _ = channel.send(round.clone());
        }
        // The destination's message may overtake the event of the last channel's thread.
        let (mut sending, mut synced) = (self.rounds.len(), false);
        while sending > 0 {
            match self.next(deadline)? {
                None => return Ok(RoundEnd::TooLate),
                Some(Event::Sent) => sending -= 1,
                Some(Event::Message(message)) if is_synced(&message) && !synced => synced = true,
                Some(event) => unexpected_event(event)?,
            }
        }
        if synced {
            return Ok(RoundEnd::Synced);
        }
        let sent = stats.snapshot().wire_bytes - sent_before;
        let drain_time = drain_time(self.rounds.len(), sent, began.elapsed());
        let timeout = self.timeout(self.source.config.stall_timeout + drain_time);
        let message = self.receive("received a round", timeout)?;
        match is_synced(&message) {
            true => Ok(RoundEnd::Synced),
            false => Err(unexpected(message)),
        }
    }

    /// Ends the channels. Pages that were sent still arrive.
    pub(super) fn end_channels(&mut self) {
        self.rounds.clear();
    }

    /// Sends the device state, or a part that goes ahead.
    pub(super) fn send_state(&mut self, state: Vec<u8>, is_part: bool) -> Result<(), SourceError> {
        let (control, events) = (self.control.clone(), self.events_in.clone());
        let stats = self.source.shared.stats.clone();
        self.device_state = DeviceState::Sending;
        // On a separate thread: a destination that stops reading must not block the coordinator, which alone can
        // resume the guest.
        self.spawn(move || {
            let event = match send_state(&control, &state, is_part) {
                Ok(()) => Event::Sent,
                Err(error) => Event::Failed(error.into()),
            };
            stats.add_sent(state.len());
            // The coordinator is gone when the migration is over.
            let _ = events.send(event);
        })?;
        while self.device_state == DeviceState::Sending {
            match self.next(None)? {
                None => {}
                Some(Event::Sent) if is_part => self.device_state = DeviceState::Unsent,
                Some(Event::Sent) => self.device_state = DeviceState::Sent,
                // The message has overtaken the thread's event.
                Some(Event::Message(DestinationMessage::Loaded)) if !is_part => {
                    self.device_state = DeviceState::Loaded;
                }
                Some(event) => unexpected_event(event)?,
            }
        }
        Ok(())
    }

    /// Waits until the destination has loaded the device state.
    pub(super) fn wait_for_loaded(&mut self) -> Result<(), SourceError> {
        if self.device_state != DeviceState::Loaded {
            let timeout = self.timeout(self.source.config.stall_timeout);
            match self.receive("loaded the guest", timeout)? {
                DestinationMessage::Loaded => self.device_state = DeviceState::Loaded,
                message => return Err(unexpected(message)),
            }
        }
        Ok(())
    }

    pub(super) fn send(&self, message: &SourceMessage) -> Result<(), SourceError> {
        Ok(send_message(&self.control, message)?)
    }

    /// The destination's next message, within `timeout`. The message is expected to report that it has done `what`.
    pub(super) fn receive(
        &self,
        what: &'static str,
        timeout: Duration,
    ) -> Result<DestinationMessage, SourceError> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            match self.next(deadline)? {
                Some(Event::Message(message)) => return Ok(message),
                Some(Event::Sent) => {}
                Some(event) => unexpected_event(event)?,
                None => {
                    let time = timeout;
                    return Err(SourceError::NoAnswer { what, time });
                }
            }
        }
    }

    /// Waits for `time`. Fails at once if something fails meanwhile.
    pub(super) fn idle(&self, time: Duration) -> Result<(), SourceError> {
        match self.next(Some(Instant::now() + time))? {
            None | Some(Event::Sent) => Ok(()),
            Some(event) => unexpected_event(event),
        }
    }

    /// Replaces an error of a connection by the destination's reason, if the destination sends one.
    pub(super) fn explain(&self, error: SourceError) -> SourceError {
        let of_connection = matches!(
            error,
            SourceError::Channel { .. } | SourceError::Control(_) | SourceError::Session(_)
        );
        if !of_connection || self.disconnected.get() || self.source.shared.is_cancelled() {
            return error;
        }
        let deadline = Instant::now() + FAILURE_TIMEOUT;
        while let Ok(Some(event)) = self.next(Some(deadline)) {
            match event {
                Event::Message(DestinationMessage::Aborted { cause, .. }) => {
                    return SourceError::Destination { cause };
                }
                Event::Disconnected(_) => break,
                _ => {}
            }
        }
        error
    }

    /// Sends `abort`: the guest stays here. A destination that does not receive the message finds out by itself: after the
    /// settle time if it has loaded the guest, at once otherwise.
    pub(super) fn abort(&self, abort: &SourceMessage) -> Result<(), SourceError> {
        if self.device_state == DeviceState::Sending {
            // The destination would take the message for a part of the state.
            self.control.shut_down();
        }
        // The connection itself may have failed.
        let _ = self.control.set_stall_timeout(FAILURE_TIMEOUT);
        let sent = self.send(abort);
        if sent.is_ok() || self.device_state == DeviceState::Unsent {
            return sent;
        }
        let again = self.dial_again(FAILURE_TIMEOUT)?;
        again.send(abort)?;
        finish(again.stream(), FAILURE_TIMEOUT);
        Ok(())
    }

    /// Waits until the destination has received everything sent on `control`, or on the link's own control connection.
    pub(super) fn finish(&self, control: Option<&Arc<Stream>>, is_over: bool) {
        // A destination that has the guest waits for the source's last message.
        let timeout = match is_over {
            true => self.timeout(FAILURE_TIMEOUT),
            false => FAILURE_TIMEOUT,
        };
        finish(control.unwrap_or(&self.control), timeout);
    }

    /// Another control connection of this attempt.
    pub(super) fn dial_again(&self, timeout: Duration) -> Result<Conversation, SourceError> {
        let stream = self.redialer.open_anew(timeout)?;
        stream.set_stall_timeout(timeout)?;
        stream
            .write_both(&control_preamble(self.id), &[])
            .map_err(ConversationError::from)?;
        Ok(Conversation::new(Arc::new(stream)))
    }

    /// `timeout`, and the time in which a lost connection may come back.
    fn timeout(&self, timeout: Duration) -> Duration {
        timeout.saturating_add(self.redialer.reconnect_timeout())
    }

    pub(super) fn spawn(&self, run: impl FnOnce() + Send + 'scope) -> io::Result<()> {
        thread::Builder::new().spawn_scoped(self.scope, in_span(run))?;
        Ok(())
    }

    /// Opens the streams of pages with these numbers. On a separate thread, as it may take long: the guest may be paused.
    pub(super) fn open_streams(&self, numbers: Range<u8>) -> Result<Vec<Arc<Stream>>, SourceError> {
        let (source, id) = (self.source, self.id);
        let (redialer, events) = (self.redialer.clone(), self.events_in.clone());
        let is_wanted = Arc::new(AtomicBool::new(true));
        let goes_on = is_wanted.clone();
        self.spawn(move || {
            let numbers = numbers.take_while(|_| goes_on.load(Ordering::Acquire));
            let opened = numbers.map(|number| open_stream(source, &redialer, id, number));
            let event = opened.collect::<Result<_, _>>();
            // The coordinator is gone when the migration is over.
            let _ = events.send(event.map_or_else(Event::Failed, Event::Opened));
        })?;
        let opened = self.wait_for_streams();
        if opened.is_err() {
            is_wanted.store(false, Ordering::Release);
            if let Some(session) = self.source.shared.session.get() {
                // The destination is still told why.
                session.shut_down_but(&self.control);
            }
        }
        opened
    }

    fn wait_for_streams(&self) -> Result<Vec<Arc<Stream>>, SourceError> {
        loop {
            match self.next(None)? {
                Some(Event::Opened(streams)) => return Ok(streams),
                Some(event) => unexpected_event(event)?,
                None => {}
            }
        }
    }

    /// Writes pages, which are limited by `pacer`.
    pub(super) fn writer(
        &self,
        stream: Arc<Stream>,
        pacer: Option<Arc<Pacer>>,
    ) -> Result<ChannelWriter, SourceError> {
        let Source {
            layout,
            config,
            shared,
            ..
        } = self.source;
        let encoder = config.method.encoder(*layout, shared.stats.health())?;
        let stats = shared.stats.clone();
        Ok(ChannelWriter::new(stream, *layout, encoder, pacer, stats))
    }

    /// The next event; `None` when `deadline` has passed.
    fn next(&self, deadline: Option<Instant>) -> Result<Option<Event>, SourceError> {
        if self.source.shared.is_cancelled() {
            return Err(SourceError::Cancelled);
        }
        let until = [deadline, self.resume_at].into_iter().flatten().min();
        match self.receive_unless_refused(until)? {
            Some(event) => {
                if matches!(event, Event::Disconnected(_)) {
                    self.disconnected.set(true);
                }
                Ok(Some(event))
            }
            None if self.resume_at.is_some_and(|end| end <= Instant::now()) => {
                let max = self.source.config.downtime_max;
                Err(SourceError::DowntimeExceeded { max })
            }
            None => Ok(None),
        }
    }

    /// The next event by `until`. While the guest is paused, a destination that has ended is not waited for: the guest can resume here
    /// until it is handed over.
    fn receive_unless_refused(&self, until: Option<Instant>) -> Result<Option<Event>, SourceError> {
        let session = self.source.shared.session.get();
        let Some(session) = session.filter(|_| self.resume_at.is_some()) else {
            return Ok(receive_until(&self.events, until).ok());
        };
        loop {
            let look = Instant::now() + LOOK;
            let time = until.map_or(look, |until| until.min(look));
            match receive_until(&self.events, Some(time)) {
                Ok(event) => return Ok(Some(event)),
                Err(_) if session.refused().is_some_and(|time| time > REFUSED) => {
                    return Err(SourceError::Unanswered);
                }
                Err(_) if until.is_some_and(|until| until <= Instant::now()) => return Ok(None),
                Err(_) => {}
            }
        }
    }
}

/// How long the destination's host may refuse connections of a paused guest's session: as long as a restart of the network takes.
const REFUSED: Duration = Duration::from_secs(3);

const LOOK: Duration = Duration::from_millis(100);

/// How long the socket buffers may take to drain, if `sent` bytes took `took` to get into them.
fn drain_time(channels: usize, sent: u64, took: Duration) -> Duration {
    let in_flight = channels as u64 * MAX_IN_FLIGHT;
    if in_flight >= sent {
        // The link may not have been the limit yet, so its speed is unknown.
        return took.max(SLOWEST_DRAIN);
    }
    took.mul_f64(in_flight as f64 / sent as f64)
}

/// Most bytes in the socket buffers of a channel, on both hosts.
const MAX_IN_FLIGHT: u64 = 10 << 20;

/// For a short round on a link of 10 Mbit/s.
const SLOWEST_DRAIN: Duration = Duration::from_secs(10);

/// The error for an unexpected event.
fn unexpected_event(event: Event) -> Result<(), SourceError> {
    Err(match event {
        // Too late.
        Event::Sent | Event::Opened(_) => return Ok(()),
        Event::Failed(error) => error,
        Event::Message(message) => unexpected(message),
        Event::Disconnected(error) => error.into(),
        Event::Cancelled => SourceError::Cancelled,
    })
}

/// The error for an unexpected message.
fn unexpected(message: DestinationMessage) -> SourceError {
    match message {
        DestinationMessage::Aborted { cause, .. } => SourceError::Destination { cause },
        DestinationMessage::Refused { reason: cause } => SourceError::Refused { cause },
        message => SourceError::OutOfTurn {
            message: format!("{message:?}"),
        },
    }
}

/// The error for a connection that is closed before its first message.
fn or_unanswered(error: SourceError) -> SourceError {
    match error {
        SourceError::Control(ConversationError::Closed) => SourceError::Unanswered,
        // A refusal in the session's protocol is no line.
        SourceError::Control(ConversationError::Cut) => SourceError::SessionExpected,
        SourceError::Control(error) if error.is_reset() => SourceError::Unanswered,
        error => error,
    }
}

fn open_stream(
    source: &Source,
    redialer: &Redialer,
    id: AttemptId,
    number: u8,
) -> Result<Arc<Stream>, SourceError> {
    let config = &source.config;
    let streams = page_streams(config.channels, config.post_copy);
    let opening = Initial::new(id.0, number, streams.into())?.to_bytes();
    let stream = register(source, redialer.open(config.stall_timeout)?)?;
    let written = stream.write_both(&opening, &[]);
    written.map_err(ConversationError::from)?;
    Ok(stream)
}

/// Applies the source's options to `stream`, which ends with the migration.
fn register(source: &Source, stream: Stream) -> io::Result<Arc<Stream>> {
    stream.set_stall_timeout(source.config.stall_timeout)?;
    let stream = Arc::new(stream);
    source.shared.hangup.register(&stream);
    Ok(stream)
}

/// Ends a control connection, and waits until the destination has received everything.
fn finish(control: &Stream, timeout: Duration) {
    control.finish();
    if !control.drain(timeout) {
        warn!("the destination has not acknowledged the last message");
    }
}

fn send_state(control: &Stream, state: &[u8], is_part: bool) -> Result<(), ConversationError> {
    let len = state.len() as u64;
    let message = match is_part {
        true => SourceMessage::StatePart { len },
        false => SourceMessage::State { len },
    };
    send_message(control, &message)?;
    Ok(control.write_both(state, &[])?)
}

/// Receives the destination's messages, until the connection ends.
fn receive(mut control: Conversation, events: &SyncSender<Event>) {
    loop {
        let event = control
            .receive()
            .map_or_else(Event::Disconnected, Event::Message);
        let last = matches!(event, Event::Disconnected(_));
        // The coordinator is gone when the migration is over.
        if events.send(event).is_err() || last {
            return;
        }
    }
}

/// A channel's thread.
fn run(mut channel: Channel<'_>, rounds: &Receiver<Arc<Round>>, events: &SyncSender<Event>) {
    for round in rounds {
        let sent = channel.send(&round);
        let failed = sent.is_err();
        let event = sent.map_or_else(Event::Failed, |()| Event::Sent);
        if events.send(event).is_err() || failed {
            return;
        }
    }
    if let Err(error) = channel.finish() {
        // The coordinator is gone when the migration is over.
        let _ = events.send(Event::Failed(error));
    }
}
