//! The source's connections to the destination: control messages, rounds on the channels, the device state.

use std::{
    cell::Cell,
    io,
    sync::{
        Arc,
        mpsc::{self, Receiver, SyncSender},
    },
    thread::{self, Scope},
    time::{Duration, Instant},
};

use handover::{AttemptId, DestinationMessage, Prepare, SourceMessage, negotiate, to_details};
use multifd::Initial;
use tracing::warn;
use vamoose_link::{
    ChannelWriter, Conversation, ConversationError, DeltaSender, Stream, receive_until,
    send_message,
};

use super::{Source, Transport, channel::Channel, round::Round, transport::Way};
use crate::{
    SourceError,
    protocol::{PrepareDetails, control_preamble},
    spans::in_span,
};

pub(super) struct Link<'scope, 'a> {
    source: &'a Source,
    scope: &'scope Scope<'scope, 'a>,
    /// To the destination.
    way: Way,
    id: AttemptId,
    control: Arc<Stream>,
    events: Receiver<Event>,
    events_in: SyncSender<Event>,
    /// The control connection has ended.
    disconnected: Cell<bool>,
    /// To each channel's thread; empty when the channels have ended.
    rounds: Vec<SyncSender<Arc<Round>>>,
    device_state: DeviceState,
    /// When the guest will have been paused for too long.
    resume_at: Option<Instant>,
}

/// How far the device state has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceState {
    Unsent,
    Sending,
    Sent,
    Loaded,
}

/// What the coordinator waits for.
enum Event {
    /// A channel has sent its share of the round, or all of the state has been sent.
    Sent,
    /// A channel has failed, or the state cannot be sent.
    Failed(SourceError),
    /// From the destination.
    Message(DestinationMessage),
    /// The control connection has ended.
    Disconnected(ConversationError),
}

/// How a round ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundEnd {
    /// All pages are written at the destination.
    Synced,
    /// The deadline has passed.
    TooLate,
}

/// Least timeout between two `preparing` of a destination: it begins by looking for the memory that
/// it has to make zero, which takes up to 15 s per TiB.
const MIN_PREPARE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long to wait for the reason from a destination whose connections break, and to report a failure to it.
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
        let (way, control) = destination.begin(source.config.stall_timeout)?;
        if let Way::Session(session, _) = &way {
            // The first and only one.
            let _ = source.shared.session.set(session.clone());
        }
        let control = register(source, control)?;
        control
            .write_both(&control_preamble(id), &[])
            .map_err(ConversationError::from)?;
        let (events_in, events) = mpsc::sync_channel(QUEUE);
        let link = Self {
            source,
            scope,
            way,
            id,
            control: control.clone(),
            events,
            events_in: events_in.clone(),
            disconnected: Cell::new(false),
            rounds: Vec::new(),
            device_state: DeviceState::Unsent,
            resume_at: None,
        };
        link.spawn(move || receive(Conversation::new(control), &events_in))?;
        Ok(link)
    }

    /// Describes the guest, and waits until the destination is ready for it; returns its answer.
    pub(super) fn prepare(&self) -> Result<DestinationMessage, SourceError> {
        let Source {
            ram,
            layout,
            config,
            ..
        } = self.source;
        let details = to_details(&PrepareDetails::new(ram, *layout, config));
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
        let sent_pages = self.sent_pages();
        for number in 0..source.config.channels {
            let mut writer = self.open_channel(number)?;
            if let Some(sent_pages) = &sent_pages {
                writer.send_differences(sent_pages.clone());
            }
            // The coordinator waits for the round before.
            let (rounds_in, rounds) = mpsc::sync_channel(1);
            let events = self.events_in.clone();
            self.spawn(move || {
                let channel = Channel::new(source, number.into(), writer);
                run(channel, &rounds, &events);
            })?;
            self.rounds.push(rounds_in);
        }
        Ok(())
    }

    /// What is kept of the pages that are sent, where differences to them are of use.
    fn sent_pages(&self) -> Option<Arc<DeltaSender>> {
        let Way::Session(session, _) = &self.way else {
            return None;
        };
        let cache = DeltaSender::in_place_over(session, self.source.layout);
        cache.filter(|_| self.source.config.delta).map(Arc::new)
    }

    /// From now on no wait lasts beyond `resume_at`; without one, for as long as it takes.
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
        // The destination's message may overtake that of the last channel's thread.
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

    /// Ends the channels: what was sent still arrives.
    pub(super) fn end_channels(&mut self) {
        self.rounds.clear();
    }

    /// Sends the device state.
    pub(super) fn send_state(&mut self, state: Vec<u8>) -> Result<(), SourceError> {
        let (control, events) = (self.control.clone(), self.events_in.clone());
        let stats = self.source.shared.stats.clone();
        self.device_state = DeviceState::Sending;
        // On a thread of its own: a destination that stops reading must not block the coordinator, which alone can
        // resume the guest.
        self.spawn(move || {
            let event = match send_state(&control, &state) {
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
                Some(Event::Sent) => self.device_state = DeviceState::Sent,
                // It has overtaken the thread's event.
                Some(Event::Message(DestinationMessage::Loaded)) => {
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

    /// The destination's next message, within `timeout`: it should report that it has done `what`.
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
                    let seconds = timeout.as_secs();
                    return Err(SourceError::NoAnswer { what, seconds });
                }
            }
        }
    }

    /// Waits, and fails at once if something fails meanwhile.
    pub(super) fn idle(&self, time: Duration) -> Result<(), SourceError> {
        match self.next(Some(Instant::now() + time))? {
            None | Some(Event::Sent) => Ok(()),
            Some(event) => unexpected_event(event),
        }
    }

    /// Replaces an error of a connection by the reason that the destination sends, if it does.
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

    /// Sends `abort`: the guest stays here. A destination that does not receive it finds out by itself, but one
    /// that has loaded the guest only after the settle time.
    pub(super) fn abort(&self, abort: &SourceMessage) -> Result<(), SourceError> {
        if self.device_state == DeviceState::Sending {
            // The message would be taken for a part of the state.
            self.control.shut_down();
        }
        // The connection may be what has failed.
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

    /// Waits until the destination has what was sent on `control`, the last control connection, or the link's own.
    pub(super) fn finish(&self, control: Option<&Arc<Stream>>, is_over: bool) {
        // A destination that has the guest waits for its source's last word.
        let timeout = match is_over {
            true => self.timeout(FAILURE_TIMEOUT),
            false => FAILURE_TIMEOUT,
        };
        finish(control.unwrap_or(&self.control), timeout);
    }

    /// Another control connection of this attempt.
    pub(super) fn dial_again(&self, timeout: Duration) -> Result<Conversation, SourceError> {
        let stream = self.way.open_anew(timeout)?;
        stream.set_stall_timeout(timeout)?;
        stream
            .write_both(&control_preamble(self.id), &[])
            .map_err(ConversationError::from)?;
        Ok(Conversation::new(Arc::new(stream)))
    }

    /// How long to wait for what takes `timeout` at most while the connection is there.
    fn timeout(&self, timeout: Duration) -> Duration {
        timeout.saturating_add(self.way.reconnect_timeout())
    }

    fn spawn(&self, run: impl FnOnce() + Send + 'scope) -> io::Result<()> {
        thread::Builder::new().spawn_scoped(self.scope, in_span(run))?;
        Ok(())
    }

    fn open_channel(&self, number: u8) -> Result<ChannelWriter, SourceError> {
        let source = self.source;
        let config = &source.config;
        let opening = Initial::new(self.id.0, number, config.channels.into())?.to_bytes();
        let stream = self.way.open(config.stall_timeout)?;
        let stream = register(source, stream)?;
        stream
            .write_both(&opening, &[])
            .map_err(ConversationError::from)?;
        let stats = &source.shared.stats;
        let mut writer = ChannelWriter::new(
            stream,
            source.layout,
            config.method.encoder(source.layout, stats.health())?,
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
        let until = [deadline, self.resume_at].into_iter().flatten().min();
        match receive_until(&self.events, until) {
            Ok(event) => {
                if matches!(event, Event::Disconnected(_)) {
                    self.disconnected.set(true);
                }
                Ok(Some(event))
            }
            Err(_) if self.resume_at.is_some_and(|end| end <= Instant::now()) => {
                let max = self.source.config.downtime_max;
                Err(SourceError::DowntimeExceeded { max })
            }
            Err(_) => Ok(None),
        }
    }
}

/// How long the socket buffers may take to drain, where it took `took` until they had taken `sent` bytes.
fn drain_time(channels: usize, sent: u64, took: Duration) -> Duration {
    let in_flight = channels as u64 * MAX_IN_FLIGHT;
    if in_flight >= sent {
        // Perhaps the link has not been the limit yet: then it is known only that it is slower than memory.
        return took.max(SLOWEST_DRAIN);
    }
    took.mul_f64(in_flight as f64 / sent as f64)
}

/// What the sockets of a channel can hold, on both hosts.
const MAX_IN_FLIGHT: u64 = 10 << 20;

/// For a short round on a link of 10 Mbit/s.
const SLOWEST_DRAIN: Duration = Duration::from_secs(10);

/// What an event means where it is not expected.
fn unexpected_event(event: Event) -> Result<(), SourceError> {
    Err(match event {
        Event::Sent => return Ok(()),
        Event::Failed(error) => error,
        Event::Message(message) => unexpected(message),
        Event::Disconnected(error) => error.into(),
    })
}

/// What a message means where it is not expected.
fn unexpected(message: DestinationMessage) -> SourceError {
    match message {
        DestinationMessage::Aborted { cause, .. } => SourceError::Destination { cause },
        DestinationMessage::Refused { reason: cause } => SourceError::Refused { cause },
        message => SourceError::OutOfTurn {
            message: format!("{message:?}"),
        },
    }
}

/// What it means that the connection is closed before its first message.
fn or_unanswered(error: SourceError) -> SourceError {
    match error {
        SourceError::Control(ConversationError::Closed) => SourceError::Unanswered,
        SourceError::Control(error) if error.is_reset() => SourceError::Unanswered,
        error => error,
    }
}

/// Lets the source's options apply to `stream`, and its end end it.
fn register(source: &Source, stream: Stream) -> io::Result<Arc<Stream>> {
    stream.set_stall_timeout(source.config.stall_timeout)?;
    let stream = Arc::new(stream);
    source.shared.hangup.register(&stream);
    Ok(stream)
}

/// Ends a control connection, and waits until the destination has what was sent on it.
fn finish(control: &Stream, timeout: Duration) {
    control.finish();
    if !control.drain(timeout) {
        warn!("the destination has not acknowledged the last message");
    }
}

fn send_state(control: &Stream, state: &[u8]) -> Result<(), ConversationError> {
    let len = state.len() as u64;
    send_message(control, &SourceMessage::State { len })?;
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
