//! The phases of an attempt, from the source's offer to the running guest.

use std::{
    io,
    sync::{Arc, OnceLock, mpsc::SyncSender},
    thread::{self, Scope},
    time::{Duration, Instant},
};

use handover::{
    AttemptId, Destination, DestinationDriver, DestinationEvent, DestinationHost,
    DestinationMessage, Details, Prepare, SourceMessage, from_details,
};
use multifd::Layout;
use tracing::{Span, debug, field, info, warn};
use vamoose_link::{ChannelReader, ConversationError, Stats, StoreLister, Stream};

use super::{
    Arrival, DestinationConfig, Event, channel,
    guest_ram::GuestRam,
    inbox::Inbox,
    make_zero::{HEARTBEAT, MakeZero},
    post_copy::{Following, PostCopy},
    receiving::{Action, Receiving, unexpected},
};
use crate::{
    DestinationError, DestinationGuest, GuestError, chain,
    dirty::count,
    error::ChannelError,
    missing::{Missing, MissingPagesError},
    protocol::{PrepareDetails, split_missing},
    spans::in_span,
};

/// How much longer the destination answers than the source asks. A source whose connections are refused may conclude that the guest
/// never ran here, so the destination must not stop listening while the source may still ask.
const LINGER: Duration = Duration::from_secs(30);

/// Longest settle time that a source can ask for.
const MAX_SETTLE_TIME: Duration = Duration::from_secs(3600);

/// Timeout for reporting a failure to the source.
const FAILURE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait for the reason when the source's connections break. Its guest may be paused.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct Coordinator<'scope, 'env> {
    pub(super) config: &'env DestinationConfig,
    /// Until it is there, the guest is to build it.
    pub(super) memory: &'env OnceLock<GuestRam>,
    /// Whether the guest belongs to this destination.
    pub(super) arrived: &'env mut bool,
    /// Until a source has made an offer.
    pub(super) make_zero: Option<MakeZero<'env>>,
    pub(super) inbox: Inbox<'env>,
    pub(super) events_in: SyncSender<Event>,
    pub(super) scope: &'scope Scope<'scope, 'env>,
    pub(super) stats: Arc<Stats>,
}

/// The current attempt.
struct Attempt<'env> {
    id: AttemptId,
    driver: DestinationDriver,
    details: PrepareDetails,
    memory: &'env GuestRam,
    layout: Layout,
    /// The index in the memory of each of the source's blocks.
    blocks: Vec<usize>,
    start: Instant,
    done: Done,
    /// Pages follow the guest.
    following: Option<Following<'env>>,
}

/// Results of the driver's actions.
#[derive(Default)]
struct Done {
    /// The guest runs here. Otherwise it is paused, as it was at the source.
    running: bool,
    /// Why the guest could not be resumed.
    failure: Option<DestinationError>,
    /// The source will not ask again.
    settled: bool,
}

impl<'scope, 'env: 'scope> Coordinator<'scope, 'env> {
    pub(super) fn run(
        &mut self,
        guest: &mut dyn DestinationGuest,
    ) -> Result<Arrival, DestinationError> {
        let (id, prepare) = self.inbox.wait_for_source()?;
        Span::current().record("attempt", field::display(id));
        let mut attempt = self.prepare(id, prepare, guest)?;
        self.drive(&mut attempt, guest);
        let committed = self.receive_and_load(&mut attempt, guest);
        let result = match committed {
            Ok(commit) => self.start(&mut attempt, guest, commit),
            Err(error) => Err(self.fail(&mut attempt, guest, error)),
        };
        if !attempt.done.settled {
            let machine = Destination::clone(&attempt.driver);
            self.inbox.past.remember(attempt.id, machine);
        }
        result
    }

    /// Checks a source's offer, and accepts or refuses the guest.
    fn prepare(
        &mut self,
        id: AttemptId,
        prepare: Prepare,
        guest: &mut dyn DestinationGuest,
    ) -> Result<Attempt<'env>, DestinationError> {
        let start = Instant::now();
        let refuse = |error: DestinationError| {
            let reason = chain(&error);
            self.inbox.send(&DestinationMessage::Refused { reason });
            error
        };
        let protocol = prepare.negotiate().map_err(|error| refuse(error.into()))?;
        let details: PrepareDetails = from_details(prepare.details)
            .map_err(|error| refuse(ConversationError::from(error).into()))?;
        let memory = self.build(guest, &details.description).map_err(&refuse)?;
        let (layout, blocks_here) = details
            .check(&memory.ram)
            .map_err(|error| refuse(error.into()))?;
        if details.post_copy {
            let can_follow = match self.config.punch_holes {
                true => Missing::check(&memory.ram),
                false => Err(MissingPagesError::Pinned),
            };
            can_follow.map_err(|error| refuse(error.into()))?;
        }
        self.begin_making_zero();
        self.finish_making_zero();
        let incarnation = self.inbox.past.incarnation;
        let prepared = DestinationMessage::Prepared {
            protocol,
            incarnation,
            details: Details::new(),
        };
        let (blocks, channels) = (details.blocks.len(), details.channels);
        info!("accepted a guest of {blocks} RAM blocks over {channels} channels");
        Ok(Attempt {
            id,
            driver: DestinationDriver::accept(incarnation, prepared),
            details,
            memory,
            layout,
            blocks: blocks_here,
            start,
            done: Done::default(),
            following: None,
        })
    }

    /// The guest's memory, which the guest builds as `description` says if it is not there.
    fn build(
        &self,
        guest: &mut dyn DestinationGuest,
        description: &[u8],
    ) -> Result<&'env GuestRam, DestinationError> {
        if let Some(memory) = self.memory.get() {
            return Ok(memory);
        }
        let ram = guest
            .prepare(description)
            .map_err(guest_error("build the memory of"))?;
        let memory = GuestRam::new(&ram, self.config.punch_holes)?;
        Ok(self.memory.get_or_init(|| memory))
    }

    /// Begins to make the memory zero, once it is there.
    pub(super) fn begin_making_zero(&mut self) {
        if let Some(memory) = self.memory.get()
            && self.make_zero.is_none()
            && !self.config.memory_is_zero
        {
            self.make_zero = Some(MakeZero::start(memory, self.scope));
        }
    }

    /// Waits until all memory reads as zeros, as a source does not send untouched memory. Sends `preparing` every second
    /// meanwhile.
    fn finish_making_zero(&mut self) {
        if let Some(make_zero) = self.make_zero.take() {
            make_zero.wait(HEARTBEAT, &|| {
                self.inbox.send(&DestinationMessage::Preparing)
            });
        }
    }

    /// Receives and loads the guest. Returns the source's `commit`.
    fn receive_and_load(
        &mut self,
        attempt: &mut Attempt<'env>,
        guest: &mut dyn DestinationGuest,
    ) -> Result<SourceMessage, DestinationError> {
        let state = self.receive(attempt, guest)?;
        let began = Instant::now();
        guest
            .load(&state)
            .map_err(guest_error("load the state of"))?;
        debug!(took = ?began.elapsed(), bytes = state.len(), "device state loaded");
        attempt.check()?;
        self.report(attempt, guest, DestinationEvent::Loaded);
        self.wait_for_commit(attempt)
    }

    /// Receives all memory and the device state. When this returns, no page is written any more, but those that are missing.
    fn receive(
        &mut self,
        attempt: &mut Attempt<'env>,
        guest: &mut dyn DestinationGuest,
    ) -> Result<Vec<u8>, DestinationError> {
        let details = &attempt.details;
        let timeout = self.config.stall_timeout;
        let timeout = timeout.saturating_add(self.inbox.reconnect_timeout());
        let connected_by = Instant::now().checked_add(timeout);
        let mut receiving = Receiving::new(details.channels, details.page_streams());
        loop {
            // `None` once all channels are connected: then there is no deadline.
            let connected = receiving.connected();
            let Some(event) = self.inbox.next(attempt.id, connected.and(connected_by)) else {
                return Err(DestinationError::Channels {
                    arrived: connected.unwrap_or_default(),
                    channels: details.channels.into(),
                    time: timeout,
                });
            };
            match receiving.handle(event)? {
                None => {}
                Some(Action::StartChannels(streams)) => {
                    let lister = StoreLister::over(&streams, None).map(Arc::new);
                    if let Some(lister) = lister.clone() {
                        let list = in_span(move || lister.run());
                        thread::Builder::new().spawn_scoped(self.scope, list)?;
                    }
                    for (number, stream) in streams.into_iter().enumerate() {
                        self.start_channel(attempt, (number, stream), lister.as_deref())?;
                    }
                }
                Some(Action::LoadPart(part)) => {
                    let loaded = guest.load_part(&part);
                    loaded.map_err(guest_error("load a part of the state of"))?;
                }
                Some(Action::ReportSynced(round)) => {
                    self.stats.add_sync();
                    self.inbox.send(&DestinationMessage::Synced { round });
                    debug!(round, "round received");
                }
                Some(Action::Load(state)) if !details.post_copy => return Ok(state),
                Some(Action::Load(bytes)) => {
                    return self.begin_post_copy(attempt, receiving, &bytes);
                }
            }
        }
    }

    /// The device state in `bytes`. If pages are missing, has them follow.
    fn begin_post_copy(
        &mut self,
        attempt: &mut Attempt<'env>,
        mut receiving: Receiving,
        bytes: &[u8],
    ) -> Result<Vec<u8>, DestinationError> {
        let split = split_missing(&attempt.memory.ram, &attempt.blocks, bytes);
        let (missing, state) = split.ok_or(DestinationError::MissingPages)?;
        let Some(missing) = missing else {
            return Ok(state);
        };
        let channels = usize::from(attempt.details.channels);
        let timeout = self.config.stall_timeout;
        let timeout = timeout.saturating_add(self.inbox.reconnect_timeout());
        let connected_by = Instant::now().checked_add(timeout);
        let streams = loop {
            if let Some(streams) = receiving.take_later() {
                break streams;
            }
            let Some(event) = self.inbox.next(attempt.id, connected_by) else {
                return Err(DestinationError::Channels {
                    arrived: channels,
                    channels: attempt.details.page_streams().into(),
                    time: timeout,
                });
            };
            receiving.handle(event)?;
        };
        let Some(demand) = streams.last() else {
            return Err(DestinationError::MissingPages);
        };
        let (memory, layout) = (attempt.memory, attempt.layout);
        let demand = (demand.clone(), attempt.blocks.clone());
        let post_copy = PostCopy::new(memory, layout, &missing, demand, channels)?;
        info!(pages = count(&missing), "pages follow the guest");
        for (number, stream) in streams.iter().enumerate() {
            let reader = self.reader(layout, stream.clone());
            let stream = (channels + number, stream, reader);
            post_copy.receive(self.scope, stream, self.events_in.clone())?;
        }
        post_copy.serve_faults(self.scope, self.events_in.clone())?;
        attempt.following = Some(Following(post_copy));
        Ok(state)
    }

    fn reader(&self, layout: Layout, stream: Arc<Stream>) -> ChannelReader {
        let decoder = self.config.engines.decoder(layout, self.stats.health());
        ChannelReader::new(stream, layout, decoder, self.stats.clone())
    }

    fn start_channel(
        &self,
        attempt: &Attempt<'env>,
        (number, stream): (usize, Arc<Stream>),
        lister: Option<&StoreLister>,
    ) -> io::Result<()> {
        let (memory, layout) = (attempt.memory, attempt.layout);
        let mut reader = self.reader(layout, stream);
        if let Some(lister) = lister {
            reader.share_pages(lister);
        }
        // Only the migration writes the guest's memory before the guest runs here.
        reader.take_differences_in_place();
        let stats = self.stats.clone();
        let events = self.events_in.clone();
        let receive = in_span(move || {
            let result = channel::receive(reader, layout, memory, &stats, |round| {
                // The coordinator is gone when the attempt is over.
                let _ = events.send(Event::Synced(number, round));
            });
            let _ = events.send(Event::Ended(number, result));
        });
        thread::Builder::new().spawn_scoped(self.scope, receive)?;
        Ok(())
    }

    fn wait_for_commit(
        &mut self,
        attempt: &Attempt<'_>,
    ) -> Result<SourceMessage, DestinationError> {
        let timeout = attempt.settle_time();
        let deadline = Instant::now() + timeout;
        loop {
            match self.inbox.next(attempt.id, Some(deadline)) {
                Some(Event::Message(_, commit @ SourceMessage::Commit { .. })) => {
                    return Ok(commit);
                }
                // The source may have committed. It connects again, or the timeout ends the wait.
                Some(Event::Disconnected(number, _)) => self.inbox.forget(number),
                Some(Event::PostCopy) => attempt.check()?,
                Some(event) => unexpected(event)?,
                None => {
                    let time = timeout;
                    return Err(DestinationError::NotCommitted { time });
                }
            }
        }
    }

    /// Ends a failed attempt, and returns the cause.
    fn fail(
        &mut self,
        attempt: &mut Attempt<'env>,
        guest: &mut dyn DestinationGuest,
        error: DestinationError,
    ) -> DestinationError {
        let error = self.explain(attempt, error);
        // The connection itself may have failed.
        self.inbox.limit_sending(FAILURE_TIMEOUT);
        let cause = chain(&error);
        self.report(attempt, guest, DestinationEvent::Failed { cause });
        error
    }

    /// Replaces an error of a connection by the source's reason, if the source sends one.
    fn explain(&mut self, attempt: &Attempt<'_>, error: DestinationError) -> DestinationError {
        // A source that gives up within a state says so on another control connection.
        let cut_short = matches!(
            &error,
            DestinationError::Control(_)
                | DestinationError::Channel {
                    source: ChannelError::Ended
                        | ChannelError::PagesAfterSync
                        | ChannelError::Read(_),
                    ..
                }
        );
        let deadline = Instant::now() + REASON_TIMEOUT;
        while cut_short && let Some(event) = self.inbox.next(attempt.id, Some(deadline)) {
            match event {
                Event::Message(_, SourceMessage::Abort { cause }) => {
                    return DestinationError::Aborted { cause };
                }
                // The reason comes on another connection if this one was cut within a state.
                Event::Disconnected(number, _) => self.inbox.forget(number),
                _ => {}
            }
        }
        error
    }

    /// Resumes the guest, and answers the source until it has acknowledged that.
    fn start(
        &mut self,
        attempt: &mut Attempt<'env>,
        guest: &mut dyn DestinationGuest,
        commit: SourceMessage,
    ) -> Result<Arrival, DestinationError> {
        let deadline = Instant::now() + attempt.settle_time() + LINGER;
        let following = attempt.following.take();
        if let Some(Following(post_copy)) = &following
            && let Err(error) = post_copy.own()
        {
            return Err(self.fail(attempt, guest, error));
        }
        self.report(attempt, guest, DestinationEvent::Message(commit));
        let total_time = attempt.start.elapsed();
        loop {
            let is_over = attempt.done.failure.is_some()
                || following.as_ref().is_none_or(|pages| pages.0.is_over());
            if is_over && attempt.done.settled {
                break;
            }
            match self.inbox.next(attempt.id, is_over.then_some(deadline)) {
                Some(Event::Message(_, message)) => {
                    self.report(attempt, guest, DestinationEvent::Message(message));
                }
                Some(Event::Disconnected(number, _)) => self.inbox.forget(number),
                Some(_) => {}
                None => break,
            }
        }
        if !attempt.done.settled {
            warn!("the source has not acknowledged where the guest is");
        }
        match (attempt.done.failure.take(), following) {
            (Some(error), following) => {
                following.iter().for_each(|pages| pages.0.disown());
                return Err(error);
            }
            (None, Some(following)) => following.0.finish()?,
            (None, None) => {}
        }
        Ok(Arrival {
            moved: self.stats.snapshot(),
            total_time,
            running: attempt.done.running,
            settled: attempt.done.settled,
        })
    }

    /// Reports `event` to the attempt's state machine, and carries out its actions.
    fn report(
        &mut self,
        attempt: &mut Attempt<'env>,
        guest: &mut dyn DestinationGuest,
        event: DestinationEvent,
    ) {
        attempt.driver.handle(event);
        self.drive(attempt, guest);
    }

    fn drive(&mut self, attempt: &mut Attempt<'env>, guest: &mut dyn DestinationGuest) {
        attempt.driver.drive(&mut Host {
            inbox: &self.inbox,
            arrived: self.arrived,
            guest,
            done: &mut attempt.done,
        });
    }
}

/// Carries out the driver's actions. There is no journal: the guest ends with this process.
struct Host<'a, 'env> {
    inbox: &'a Inbox<'env>,
    arrived: &'a mut bool,
    guest: &'a mut dyn DestinationGuest,
    done: &'a mut Done,
}

impl DestinationHost for Host<'_, '_> {
    fn send(&mut self, message: &DestinationMessage) {
        self.inbox.send(message);
    }

    fn run(&mut self, resume: bool) -> Option<DestinationEvent> {
        // Before the guest resumes, so that it is also set if the VMM panics meanwhile.
        *self.arrived = true;
        let resumed = if resume { self.guest.resume() } else { Ok(()) };
        if let Err(source) = resumed {
            *self.arrived = false;
            let error = guest_error("run")(source);
            let cause = chain(&error);
            self.done.failure = Some(error);
            return Some(DestinationEvent::NotStarted { cause });
        }
        self.done.running = resume;
        self.check(resume)
    }

    fn check(&mut self, _: bool) -> Option<DestinationEvent> {
        let state = if self.done.running {
            "running"
        } else {
            "paused"
        };
        let state = state.to_owned();
        Some(DestinationEvent::Started { state })
    }

    /// Ends nothing: the guest has never run here, and ends with this process.
    fn end(&mut self) -> Option<DestinationEvent> {
        let cause = String::new();
        Some(DestinationEvent::Died { cause })
    }

    fn forget(&mut self) {
        self.done.settled = true;
    }
}

fn guest_error(what: &'static str) -> impl FnOnce(GuestError) -> DestinationError {
    move |source| DestinationError::Guest { what, source }
}

impl Attempt<'_> {
    /// Fails if pages that are missing are lost.
    fn check(&self) -> Result<(), DestinationError> {
        let following = self.following.as_ref();
        following.map_or(Ok(()), |pages| pages.0.check())
    }

    fn settle_time(&self) -> Duration {
        self.details.settle_time().min(MAX_SETTLE_TIME)
    }
}
