//! Accepts the connections of a server, and assigns each to its attempt.

use std::{
    os::fd::AsFd as _,
    sync::Arc,
    thread::Scope,
    time::{Duration, Instant},
};

use handover::{
    AttemptId, ConnectionKind, DestinationMessage, PREAMBLE_LEN, Preamble, Prepare, SourceMessage,
    from_details,
};
use rustix::{
    event::{PollFd, PollFlags},
    process::{Resource, getrlimit},
};
use tracing::{Span, debug, warn};
use vamoose_link::{
    Conversation, ConversationError, Hangup, Introduced, Session, Stream, send_message, wait_for,
};

use super::{
    Job, ServeError, Server,
    setup::{PrepareError, Waiting},
    span,
};
use crate::{
    Role,
    accept::first_of,
    chain,
    control::Request,
    observer::Observation,
    service::{catch, spawn},
};

/// Limit of open connections. A migration has one per channel, and three more.
const MOST_CONNECTIONS: u64 = 4096;
/// Descriptors that are reserved for other uses than connections.
const OTHER_DESCRIPTORS: u64 = 64;
/// Bounds of connections that measure the link: how many at once, and the time and bytes of each. Nothing is answered but
/// acknowledgements.
const MOST_MEASURING: usize = 16;
const MEASURED_TIME: Duration = Duration::from_secs(5);
const MEASURED_BYTES: u64 = 64 << 30;
/// How often leases are checked, and whether draining has finished.
const TICK: Duration = Duration::from_secs(1);

impl Server {
    pub(super) fn accept_all<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stop: &'scope Hangup,
    ) -> Result<(), ServeError> {
        loop {
            let mut fds = [stop.as_fd(), self.sessions.as_fd(), self.local.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            wait_for(&mut fds, TICK)?;
            if stop.is_hung_up() {
                return Ok(());
            }
            if self.draining.has_ended(
                || !self.jobs.are_under_way(),
                || self.jobs.are_under_post_copy(),
            ) {
                // Threads of leftover connections still wait for their peers.
                stop.hang_up();
                return Ok(());
            }
            let orphans = self.jobs.maintain(self.config.orphan_timeout);
            self.observer.orphaned(orphans);
            for job in self.jobs.to_look_at() {
                let (span, cause) = (span(job.attempt), "the transfer has ended".to_owned());
                if let Err(error) = spawn(scope, span, move || job.fail(cause)) {
                    warn!("a QEMU is not looked at: no thread can be started: {error}");
                }
            }
            for sessions in [&self.sessions, &self.local] {
                if let Some(introduced) = sessions.try_next() {
                    self.take_connection(scope, stop, introduced);
                }
            }
        }
    }

    fn take_connection<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stop: &'scope Hangup,
        introduced: Introduced,
    ) {
        let open = self.connections.clone();
        if Arc::strong_count(&open) > self.most_connections.saturating_add(1) {
            return debug!("too many connections: one is closed");
        }
        let Introduced { stream, session } = introduced;
        let stream = Arc::new(stream);
        stop.register(&stream);
        let preamble = first_of::<PREAMBLE_LEN>(&stream);
        let preamble = preamble.and_then(|bytes| Preamble::parse(&bytes));
        let Some(Preamble { kind, attempt }) = preamble else {
            return debug!("a connection without a valid preamble");
        };
        // Of one session, in the order in which they come.
        if matches!(kind, ConnectionKind::Data | ConnectionKind::Disk) {
            let _span = span(attempt).entered();
            return match self.jobs.get(attempt) {
                Some(job) => job.push(kind, stream, &session),
                None => warn!("a data connection for the unknown attempt {attempt}"),
            };
        }
        let work = move || {
            let _span = span(attempt).entered();
            match kind {
                ConnectionKind::Control => self.converse(scope, attempt, &stream, &session),
                _ => self.discard(&stream),
            }
            drop(open);
        };
        if let Err(error) = spawn(scope, Span::none(), work) {
            warn!("a connection is closed: no thread can be started: {error}");
        }
    }

    /// Takes what a source sends to measure the link.
    fn discard(&self, stream: &Stream) {
        let measuring = self.measuring.clone();
        if Arc::strong_count(&measuring) > MOST_MEASURING + 1 {
            return debug!("too many connections that measure the link: one is closed");
        }
        let deadline = Instant::now() + MEASURED_TIME;
        let (mut buffer, mut left) = (vec![0; 256 << 10], MEASURED_BYTES);
        while left > 0
            && Instant::now() < deadline
            && let Ok(Some(read @ 1..)) = stream.read_until(&mut buffer, Some(deadline))
        {
            left = left.saturating_sub(read as u64);
        }
        stream.shut_down();
    }

    /// Answers the requests of one control connection.
    fn converse<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        attempt: AttemptId,
        stream: &Arc<Stream>,
        session: &Session,
    ) {
        let mut control = Conversation::new(stream.clone());
        let mut job = self.jobs.find(attempt);
        let mut found = None;
        if job.as_ref().is_some_and(|job| !job.listens_to(session)) {
            warn!("{} asks about an attempt of another source", session.peer());
            // The connection may be gone.
            let _ = refuse(stream, &PrepareError::OtherSource);
            return;
        }
        if let Some(job) = &job {
            job.connected(stream);
        }
        loop {
            let message = match control.receive() {
                Ok(message) => message,
                Err(error) => {
                    debug!("{}", chain(&error));
                    break;
                }
            };
            let answered = match (message, &job) {
                (SourceMessage::Inspect(prepare), None) => {
                    // The monitor serves one client.
                    drop(found.take());
                    let answer = self.find(&prepare).and_then(|mut waiting| {
                        let answer = waiting.inspect()?;
                        found = Some(waiting);
                        Ok(answer)
                    });
                    answer.map_or_else(
                        |error| self.refuse((stream, session), &error),
                        |answer| send_message(stream, &answer),
                    )
                }
                (SourceMessage::Prepare(prepare), None) if resumes(&prepare) => {
                    send_message(stream, &self.unknown())
                }
                (SourceMessage::Prepare(prepare), None) => {
                    let found = found.take().and_then(|it| it.for_migration(&prepare));
                    let found = found.map_or_else(|| self.find(&prepare), Ok);
                    self.prepare_and_reply(scope, attempt, found, (stream, session), &mut job)
                }
                (SourceMessage::Prepare(prepare), Some(job)) => {
                    match self.prepare_recovery(job, &prepare, session) {
                        Ok(answer) => self.receive_and_reply(scope, job, &answer, stream),
                        Err(error) => self.refuse((stream, session), &error),
                    }
                }
                (SourceMessage::Inspect(_), Some(_)) => refuse(stream, &PrepareError::Repeated),
                (message, Some(job)) => {
                    job.request(message);
                    Ok(())
                }
                (_, None) => send_message(stream, &self.unknown()),
            };
            if answered.is_err() {
                break;
            }
        }
        if let Some(job) = job {
            job.disconnected(stream);
        }
    }

    fn unknown(&self) -> DestinationMessage {
        DestinationMessage::Unknown {
            incarnation: self.incarnation,
            reason: "the server does not know this attempt: another server has accepted it, or its journal is lost"
                .to_owned(),
        }
    }

    fn prepare_and_reply<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        attempt: AttemptId,
        found: Result<Waiting, PrepareError>,
        (stream, session): (&Arc<Stream>, &Session),
        job: &mut Option<Arc<Job>>,
    ) -> Result<(), ConversationError> {
        let prepared = found.and_then(|found| self.prepare(attempt, found, session));
        let (prepared, answer) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return self.refuse((stream, session), &error),
        };
        prepared.connected(stream);
        let job = job.insert(prepared);
        self.receive_and_reply(scope, job, &answer, stream)
    }

    /// Starts the relay of a job that has been prepared, and answers.
    fn receive_and_reply<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        job: &Arc<Job>,
        answer: &DestinationMessage,
        stream: &Arc<Stream>,
    ) -> Result<(), ConversationError> {
        let (receiver, span) = (job.clone(), Span::current());
        let work = move || {
            if catch(|| receiver.receive()).is_none() {
                receiver.hang_up();
                receiver.fail("a bug has ended the relay".to_owned());
            }
        };
        let started = spawn(scope, span, work);
        if let Err(error) = started {
            let error = PrepareError::NoThread(error);
            let cause = chain(&error);
            if job.is_under_post_copy() {
                job.fail(cause);
                return refuse(stream, &error);
            }
            job.request(SourceMessage::Abort { cause });
            return Ok(());
        }
        send_message(stream, answer)
    }
}

impl Server {
    fn refuse(
        &self,
        (stream, session): (&Stream, &Session),
        error: &PrepareError,
    ) -> Result<(), ConversationError> {
        warn!("refused: {}", chain(error));
        let peer = session.identity().unwrap_or_default();
        Observation::refused(&self.observer, Role::Destination, peer);
        refuse(stream, error)
    }
}

/// How many connections this process has descriptors for.
pub(super) fn most_connections() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let left = descriptors
        .saturating_sub(OTHER_DESCRIPTORS)
        .max(descriptors / 2);
    usize::try_from(left.min(MOST_CONNECTIONS)).unwrap_or(usize::MAX)
}

/// Whether a source wants to send the rest of a guest's memory.
fn resumes(prepare: &Prepare) -> bool {
    from_details(prepare.details.clone()).is_ok_and(|request: Request| request.resumes)
}

fn refuse(stream: &Stream, error: &PrepareError) -> Result<(), ConversationError> {
    let reason = chain(error);
    send_message(stream, &DestinationMessage::Refused { reason })
}
