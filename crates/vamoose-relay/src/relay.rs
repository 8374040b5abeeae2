//! One migration through a relay, from the source's first connection to the last one's end.
//!
//! ```text
//!  gather      the source's connections            (module gather)
//!  dial        main stream and channels, with their first bytes
//!  move        a thread per channel and direction  (threads); this thread waits for their reports (supervisor)
//!  tear down   every connection at once, whatever happened; after a failure a source QEMU's channels last (source_channels)
//! ```
//!
//! The destination reports on the return path that it has loaded the guest. Without a return path (QEMU's default, which the
//! documentation advises against), the end of the source's main stream is the only sign.

mod source_channels;
mod supervisor;
mod threads;

use std::{
    cell::Cell,
    sync::{Arc, mpsc::channel},
    thread,
    time::{Duration, Instant},
};

use multifd::{Initial, MAIN_MAGIC};
use tracing::{Span, error_span, info, warn};
use vamoose_link::{
    ChannelReader, ChannelWriter, DeltaReceiver, DeltaSender, Hangup, Pacer, Stats, StoreListener,
    StoreLister, StoreSender, Stream,
};

use crate::{
    Accept, Config, Dialer, RelayError,
    downtime::Switchover,
    exchange::exchange,
    first_bytes::UnclassifiedConnection,
    gather::{Arrival, Connections, gather},
    late,
    main_stream::MainState,
    opaque::{self, Opaque},
    syncs::Syncs,
};
use source_channels::SourceChannels;
use supervisor::{Report, Supervisor};
use threads::Threads;

/// One migration.
pub struct Relay<'a> {
    /// Source of incoming connections.
    pub accept: &'a dyn Accept,
    /// Opens connections towards the destination.
    pub dialer: &'a Dialer,
    /// What happens to the pages.
    pub config: &'a Config,
    /// Ends the migration when it hangs up.
    pub hangup: &'a Hangup,
    /// Counts while it runs.
    pub stats: &'a Arc<Stats>,
    /// Called at each milestone, once.
    pub reached: &'a (dyn Fn(Milestone) + Sync),
}

/// How far a guest has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Milestone {
    /// What comes next may be the last of the guest. Before this, the destination cannot have all of it.
    Last,
    /// The source has received the message that the destination has loaded the guest.
    Loaded,
}

/// How certain it is that the guest has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The destination has confirmed it.
    Loaded,
    /// Everything was delivered without an error, but there is no return path (or it cannot be read) on which
    /// the destination could have confirmed it.
    Unconfirmed,
    /// Everything was forwarded unread, as with QEMU's TLS: only the QEMUs know whether it was a guest.
    Unseen,
}

/// A successful migration.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// How certain it is that the guest has arrived.
    pub outcome: Outcome,
    /// Channels that the source opened; 0 if the connections were forwarded as bytes.
    pub incoming_channels: usize,
    /// Channels opened towards the destination.
    pub outgoing_channels: usize,
    /// From the source's first bytes to having all connections on both sides.
    pub setup_time: Duration,
    /// From the source's first bytes to the end.
    pub total_time: Duration,
    /// When the steps of the switchover finished, if the relay saw them.
    pub switchover: Option<Switchover>,
}

impl Relay<'_> {
    /// Runs the migration to its end.
    ///
    /// # Errors
    /// The first error. All connections are closed by then, so both QEMUs notice it.
    pub fn run(&self) -> Result<Summary, RelayError> {
        error_span!("migration", role = "relay").in_scope(|| self.relay())
    }

    /// Forwards connections of any other protocol, such as the NBD of a guest's disks, until [`hangup`](Self::hangup) hangs up.
    ///
    /// # Errors
    /// When no connection can be accepted any more. One that breaks does not affect the others.
    pub fn pass_bytes(&self) -> Result<(), RelayError> {
        match opaque::pass_bytes(self, Opaque::Bytes, &mut || false) {
            Ok(_) | Err(RelayError::Cancelled) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Forwards the connections of post-copy that is being resumed, until they have ended. They begin in the midst of a migration.
    pub(crate) fn resume_post_copy(&self) -> Result<Summary, RelayError> {
        self.stats.note_post_copy();
        let mut has_begun = || self.stats.snapshot().wire_bytes > 0;
        opaque::pass_bytes(self, Opaque::Resumed, &mut has_begun)
    }

    /// [`run`](Self::run) within the span of a larger migration.
    pub(crate) fn relay(&self) -> Result<Summary, RelayError> {
        let arrival = gather(
            self.accept,
            self.config.incoming_channels,
            self.config.stall_timeout,
            self.hangup,
        )?;
        let start = Instant::now();
        let summary = match arrival {
            Arrival::Multifd {
                source,
                uuid,
                silent,
            } => {
                let source_channels = SourceChannels::new(&source, self.hangup);
                let relayed = self
                    .dial_all(source.channels.len(), uuid)
                    .and_then(|destination| {
                        self.relay_pages(start, source, destination, silent, &source_channels)
                    });
                if relayed.is_err() {
                    self.hangup.hang_up();
                    source_channels.wait();
                }
                relayed
            }
            Arrival::Opaque {
                why,
                main,
                others,
                kind,
            } => {
                info!("passing the migration through unchanged: {why}");
                opaque::pass(self, main, others, kind, start, &mut || true)
            }
        }?;
        if summary.outcome == Outcome::Unconfirmed {
            warn!(
                "everything was delivered, but without a return path it is not confirmed that the \
                 destination has loaded the guest: set the return-path capability on the source"
            );
        }
        Ok(summary)
    }

    pub(crate) fn dial_one(&self, first: &[u8]) -> Result<Arc<Stream>, RelayError> {
        let stream = Arc::new(self.dialer.dial(first, self.config.stall_timeout)?);
        self.hangup.register(&stream);
        self.stats.add_sent(first.len());
        Ok(stream)
    }

    /// To a QEMU, the main stream comes first, with its first bytes: QEMU treats its first connection as the main stream (7.2),
    /// or waits in its main loop for any connection's first bytes (10.0). To another relay, the connections are opened side by side,
    /// and the main stream's first bytes go last: a relay that has a main stream and no channels soon assumes a migration without multifd.
    fn dial_all(&self, incoming: usize, uuid: [u8; 16]) -> Result<Connections, RelayError> {
        let number = self.config.outgoing_channels.unwrap_or(incoming);
        let dial_main = || self.dial_one(&MAIN_MAGIC.to_be_bytes());
        let dial_channels = || {
            let channels = (0..number).map(|id| {
                // With more channels than a byte can number, `Initial::new` refuses `number`.
                let id = u8::try_from(id).unwrap_or(u8::MAX);
                self.dial_one(&Initial::new(uuid, id, number)?.to_bytes())
            });
            channels.collect::<Result<_, RelayError>>()
        };
        let (main, channels);
        if self.dialer.is_to_qemu() {
            main = dial_main()?;
            channels = dial_channels()?;
        } else {
            self.dialer.open_ahead(number + 1)?;
            channels = dial_channels()?;
            main = dial_main()?;
        }
        Ok(Connections { main, channels })
    }

    /// Paces what is sent, once a connection to the destination has been dialled.
    pub(crate) fn pacer(&self) -> Arc<Pacer> {
        let pacer = Pacer::new(self.config.max_bandwidth, &self.config.limit);
        if let Some(session) = self.dialer.with() {
            pacer.follow(session);
        }
        Arc::new(pacer)
    }

    /// The cache of sent pages, if differences to them are sent.
    fn sent_pages(&self) -> Option<Arc<DeltaSender>> {
        if !self.config.delta || !self.config.method.takes_differences() {
            return None;
        }
        let session = self.dialer.with()?;
        let cache = DeltaSender::over(&session, self.config.layout);
        if cache.is_none() {
            info!("pages that are sent again go as a whole: one of both ends keeps none");
        }
        cache.map(Arc::new)
    }

    /// The writers of all channels, in the order of the channels.
    fn writers(
        &self,
        channels: Vec<Arc<Stream>>,
        pacer: &Arc<Pacer>,
    ) -> Result<Vec<ChannelWriter>, RelayError> {
        let layout = self.config.layout;
        let mut writers = Vec::with_capacity(channels.len());
        for stream in channels {
            let encoder = self.config.method.encoder(layout, self.stats.health())?;
            let (pacer, stats) = (Some(pacer.clone()), self.stats.clone());
            writers.push(ChannelWriter::new(stream, layout, encoder, pacer, stats));
        }
        for writer in &mut writers {
            writer.add_checksums()?;
            if self.config.is_decoded_by_qemu {
                writer.send_frames();
            }
            if self.config.has_fast_link {
                writer.start_raw();
            }
            if self.config.restore {
                writer.restore();
            }
        }
        if let Some(cache) = self.sent_pages() {
            for writer in &mut writers {
                writer.send_differences(cache.clone())?;
            }
        }
        Ok(writers)
    }

    /// Lets the writers send references to pages that the destination's store has, if there is one. Returns what reads its messages.
    fn share_pages(&self, writers: &mut [ChannelWriter]) -> Vec<StoreListener> {
        let session = self.dialer.with().filter(|_| self.config.takes_store());
        let guest = self.config.guest.as_deref();
        let sender = session.and_then(|it| StoreSender::over(&it, guest, self.stats.clone()));
        let Some(sender) = sender.map(Arc::new) else {
            return Vec::new();
        };
        let share = |writer: &mut ChannelWriter| writer.share_pages(sender.clone());
        writers.iter_mut().map(share).collect()
    }

    fn relay_pages(
        &self,
        start: Instant,
        source: Connections,
        destination: Connections,
        silent: Vec<UnclassifiedConnection>,
        source_channels: &SourceChannels,
    ) -> Result<Summary, RelayError> {
        let setup_time = start.elapsed();
        let incoming = source.channels.len();
        let outgoing = destination.channels.len();
        let Config {
            method,
            layout,
            stall_timeout,
            ..
        } = self.config;
        info!(
            incoming,
            outgoing,
            method = method.name(),
            engine = method.engine(),
            "relaying a multifd migration"
        );
        let pacer = self.pacer();
        let is_one_to_one = incoming == outgoing;
        let mut writers = self.writers(destination.channels, &pacer)?;
        let listeners = self.share_pages(&mut writers);
        let first = source.channels.first();
        let lister = StoreLister::over(&source.channels, self.config.guest.as_deref());
        let kept = first.and_then(|stream| DeltaReceiver::of(stream, *layout));
        let kept = kept.map(Arc::new);
        let readers = source.channels.into_iter().map(|stream| {
            let decoder = method.engines().decoder(*layout, self.stats.health());
            let mut reader = ChannelReader::new(stream, *layout, decoder, self.stats.clone());
            if let Some(kept) = &kept {
                reader.take_differences(kept.clone());
            }
            if let Some(lister) = &lister {
                reader.share_pages(lister);
            }
            reader
        });
        let mut barriers = None;
        let (report, reports) = channel();
        let main_state = MainState::default();
        let syncs = Syncs::new(outgoing);
        let loaded = Cell::new(None);
        let on_loaded = || {
            loaded.set(Some(Instant::now()));
            (self.reached)(Milestone::Loaded);
        };
        let outcome = thread::scope(|scope| {
            let threads = Threads {
                scope,
                report,
                stats: self.stats,
                syncs: &syncs,
                config: self.config,
            };
            if is_one_to_one {
                for (channel, (reader, writer)) in readers.zip(writers).enumerate() {
                    threads.pass_on(channel, reader, writer);
                }
            } else {
                let (reader_ends, writer_ends, all) = exchange(incoming, outgoing, *layout);
                barriers = Some(all);
                for (channel, (reader, end)) in readers.zip(reader_ends).enumerate() {
                    threads.read(channel, reader, end);
                }
                for (channel, (writer, end)) in writers.into_iter().zip(writer_ends).enumerate() {
                    threads.write(channel, writer, end);
                }
            }
            let (near, far) = (&source.main, &destination.main);
            threads.forward_main(near, far, &pacer, &main_state, self.reached);
            threads.return_main(far, near, &main_state);
            // From here on, only the threads can report, so the supervisor notices when all of them have ended.
            drop(threads);
            let span = Span::current();
            scope.spawn(move || span.in_scope(|| late::attend(self, silent)));
            // These end when the connections are shut down.
            for listener in &listeners {
                scope.spawn(|| listener.run());
            }
            if let Some(lister) = &lister {
                scope.spawn(|| lister.run());
            }
            let ends = incoming + outgoing;
            let supervisor = Supervisor::new(&main_state, &syncs, *stall_timeout, ends, &on_loaded);
            let outcome = supervisor.run(&reports, self.hangup);
            self.hangup.hang_up();
            // After the sockets are shut down: a mark that waits for its SYNCs must not be sent now.
            syncs.give_up();
            if let Some(barriers) = &barriers {
                barriers.give_up();
            }
            if let Some(kept) = &kept {
                kept.give_up();
            }
            pacer.close();
            // The threads that read the source's channels end with these.
            match outcome {
                Ok(_) => source_channels.shut_down(),
                Err(_) => source_channels.wait(),
            }
            outcome
        });
        // The source may have received the destination's message while something else failed, or the migration was cancelled.
        // Then the source has completed, and the migration has succeeded; or the source has closed its connections.
        let outcome = outcome.or_else(|error| {
            let mut rest = reports.try_iter();
            let shut = rest.find_map(|report| match report {
                Report::Shut { code } => Some(code),
                _ => None,
            });
            match (shut, error) {
                (Some(0), _) => {
                    on_loaded();
                    Ok(Outcome::Loaded)
                }
                (Some(code), _) => Err(RelayError::Refused(code)),
                (None, error) => Err(error),
            }
        })?;
        let switchover = syncs.last().zip(main_state.last_sent()).zip(loaded.get());
        Ok(Summary {
            outcome,
            incoming_channels: incoming,
            outgoing_channels: outgoing,
            setup_time,
            total_time: start.elapsed(),
            switchover: switchover.map(|((last_sync, main_sent), loaded)| Switchover {
                last_sync,
                main_sent,
                loaded,
            }),
        })
    }
}
