//! One migration through a relay, from the source's first connection to the last one's end.
//!
//! ```text
//!  gather      the source's connections            (module gather)
//!  dial        main stream first, with its first bytes; then the channels
//!  move        a thread per channel and direction; this thread waits for what they report
//!  tear down   every connection at once, whatever happened
//! ```
//!
//! Whether the guest arrived is for the destination to say, on the return path. Without one (QEMU's
//! default, against which the documentation warns) the end of the source's stream has to do.

use std::{
    num::{NonZeroU64, NonZeroUsize},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, Scope},
    time::{Duration, Instant},
};

use multifd::{Initial, Layout, MAIN_MAGIC};
use tracing::{debug, info};
use vamoose_codec::Framing;
use vamoose_link::{
    Address, ChannelReader, ChannelWriter, Hangup, MethodChoice, Pacer, SocketError, Stats, Stream,
    dial,
};

use crate::{
    Accept, Direction, RelayError, channels,
    channels::Out,
    exchange::{Inlet, Outlet, exchange},
    gather::{Arrival, gather},
    main_stream::{MainState, ReturnWitness, Witness, pump},
    opaque,
    syncs::{BehindSyncs, Syncs},
};

/// How a relay works on the pages that cross it.
#[derive(Clone)]
pub struct Config {
    /// Method and level on the outgoing channels, and what encodes and decodes.
    pub method: MethodChoice,
    /// Page size of the guest.
    pub layout: Layout,
    /// How many channels the source opens, where the caller knows.
    pub incoming_channels: Option<usize>,
    /// How many channels to open towards the destination; as many as the source, if `None`.
    pub outgoing_channels: Option<usize>,
    /// Most bytes per second towards the destination.
    pub max_bandwidth: Option<NonZeroU64>,
    /// How long a peer may neither send nor take a byte while one is awaited.
    pub stall_timeout: Duration,
    /// What becomes of zero pages.
    pub zero_pages: ZeroPages,
    /// Packets that each outgoing channel encodes side by side, for engines with a latency. More than
    /// 1 has an effect only where the method's packets are independent (auto, lz4, zstd-frames, qpl,
    /// qatzip).
    pub streams: NonZeroUsize,
}

impl Config {
    /// A relay that passes pages on by `method`, everything else by default.
    pub fn new(method: impl Into<MethodChoice>) -> Self {
        Self {
            method: method.into(),
            layout: Layout::X86,
            incoming_channels: None,
            outgoing_channels: None,
            max_bandwidth: None,
            stall_timeout: Duration::from_secs(15),
            zero_pages: ZeroPages::Pass,
            streams: NonZeroUsize::MIN,
        }
    }
}

/// What a relay does about pages that are all zeros, which a source may send as mere offsets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroPages {
    /// Passes them on: right for destinations from QEMU 9.0 on, and for another relay.
    #[default]
    Pass,
    /// Writes them out as normal pages: for older destinations, which would lose them silently.
    Expand,
    /// Looks for more of them among the normal pages, in the source's stead.
    Detect,
}

/// Opens connections towards the destination.
#[derive(Clone, Debug)]
pub struct Dialer {
    /// Where to.
    pub address: Address,
    /// Bytes to send first on each connection, before everything else. Empty towards a QEMU.
    pub preamble: Vec<u8>,
}

impl Dialer {
    /// Dials `address` and says nothing of its own.
    pub fn new(address: Address) -> Self {
        Self {
            address,
            preamble: Vec::new(),
        }
    }

    pub(crate) fn dial(&self, first: &[u8], timeout: Duration) -> Result<Stream, SocketError> {
        let stream = dial(&self.address, timeout)?;
        stream
            .write_both(&self.preamble, first)
            .map_err(|source| SocketError::Dial {
                address: self.address.clone(),
                source,
            })?;
        Ok(stream)
    }
}

/// One migration.
pub struct Relay<'a> {
    /// Where the source's connections come from.
    pub accept: &'a dyn Accept,
    /// How the destination is reached.
    pub dialer: &'a Dialer,
    /// What to do with the pages.
    pub config: &'a Config,
    /// Ends the migration when thrown.
    pub hangup: &'a Hangup,
    /// Counts while it runs.
    pub stats: &'a Arc<Stats>,
    /// Called once, when the destination's word that it has loaded the guest has been delivered to
    /// the source.
    pub on_loaded: &'a (dyn Fn() + Sync),
}

/// How sure it is that the guest arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The destination said so.
    Loaded,
    /// Everything was delivered and nobody complained, but there is no return path (or it cannot
    /// be read) on which the destination could have said so.
    Unconfirmed,
}

/// A migration that went through.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// How sure it is.
    pub outcome: Outcome,
    /// Channels that the source opened; 0 when the bytes were passed through unchanged.
    pub incoming_channels: usize,
    /// Channels opened towards the destination.
    pub outgoing_channels: usize,
    /// From the source's first bytes to having all connections on both sides.
    pub setup_time: Duration,
    /// From the source's first bytes to the end.
    pub total_time: Duration,
}

impl Relay<'_> {
    /// Runs the migration to its end.
    ///
    /// # Errors
    /// The first thing that went wrong. Every connection is closed by then, so both QEMUs know.
    pub fn run(&self) -> Result<Summary, RelayError> {
        let patience = self.config.stall_timeout;
        let arrival = gather(
            self.accept,
            self.config.incoming_channels,
            patience,
            self.hangup,
        )?;
        let start = Instant::now();
        match arrival {
            Arrival::Multifd {
                main,
                channels,
                uuid,
            } => {
                let dialled = self.dial_all(channels.len(), uuid);
                let outgoing = dialled.inspect_err(|_| self.let_source_set_up(&channels))?;
                self.relay_pages(
                    start,
                    Connections {
                        main,
                        channels,
                        outgoing,
                    },
                )
            }
            Arrival::Opaque {
                why,
                opened,
                speaks_first,
            } => {
                info!("passing the migration through unchanged: {why}");
                opaque::pass_through(self, opened, speaks_first, start)
            }
        }
    }

    pub(crate) fn dial_one(&self, first: &[u8]) -> Result<Arc<Stream>, RelayError> {
        let stream = Arc::new(self.dialer.dial(first, self.config.stall_timeout)?);
        self.hangup.register(&stream);
        Ok(stream)
    }

    /// Main stream first and with its first bytes: a destination QEMU takes the first connection
    /// for it (7.2), or waits in its main loop for any connection's first bytes (10.0).
    fn dial_all(&self, incoming: usize, uuid: [u8; 16]) -> Result<Outgoing, RelayError> {
        let number = self.config.outgoing_channels.unwrap_or(incoming);
        let main = self.dial_one(&MAIN_MAGIC.to_be_bytes())?;
        self.stats.add_sent(size_of_val(&MAIN_MAGIC));
        let channels = (0..number).map(|id| {
            // An id that does not fit a byte is refused by its number, which does not either.
            let id = u8::try_from(id).unwrap_or(u8::MAX);
            let initial = Initial::new(uuid, id, number)?.to_bytes();
            self.stats.add_sent(initial.len());
            self.dial_one(&initial)
        });
        let channels = channels.collect::<Result<_, _>>()?;
        Ok(Outgoing { main, channels })
    }

    /// Takes the source's first SYNC before its connections are closed. A source whose channels break
    /// while that SYNC goes out waits for it for ever (seen with QEMU 10.0): its guest runs on, but
    /// can never be migrated again.
    fn let_source_set_up(&self, channels: &[Arc<Stream>]) {
        let mut sync = vec![0; self.config.layout.ram_header_len()];
        for channel in channels {
            // A source that sends none will not wait for one.
            let taken = channel
                .set_stall_timeout(SETTING_UP)
                .and_then(|()| channel.read_full(&mut sync));
            if let Err(error) = taken {
                debug!("no first SYNC from the source: {error}");
            }
        }
    }

    /// Streams of each outgoing channel.
    fn streams(&self) -> usize {
        match self.config.method.framing() {
            Framing::Packet => self.config.streams.get(),
            Framing::Stream => 1,
        }
    }

    /// The writers of all channels: those of the first, then those of the next.
    fn writers(
        &self,
        channels: Vec<Arc<Stream>>,
        streams: usize,
        pacer: Option<&Arc<Pacer>>,
    ) -> Result<Vec<ChannelWriter>, RelayError> {
        let layout = self.config.layout;
        let encoder = || self.config.method.encoder(layout, self.stats.health());
        let mut writers = Vec::with_capacity(channels.len() * streams);
        for stream in channels {
            let stats = self.stats.clone();
            let first = ChannelWriter::new(stream, layout, encoder()?, pacer.cloned(), stats);
            for _ in 1..streams {
                writers.push(first.sibling(encoder()?));
            }
            writers.push(first);
        }
        Ok(writers)
    }

    fn relay_pages(&self, start: Instant, all: Connections) -> Result<Summary, RelayError> {
        let setup_time = start.elapsed();
        let incoming = all.channels.len();
        let outgoing = all.outgoing.channels.len();
        info!(
            incoming,
            outgoing,
            method = self.config.method.name(),
            engine = self.config.method.engine(),
            "relaying a multifd migration"
        );
        let pacer = self
            .config
            .max_bandwidth
            .map(|rate| Arc::new(Pacer::new(rate)));
        let streams = self.streams();
        let writers = self.writers(all.outgoing.channels, streams, pacer.as_ref())?;
        let readers = all.channels.into_iter().map(|stream| {
            let layout = self.config.layout;
            let engines = self.config.method.engines();
            let decoder = engines.decoder(layout, self.stats.health());
            ChannelReader::new(stream, layout, decoder, self.stats.clone())
        });
        let mut give_up = None;
        let (report, reports) = channel();
        let main_state = MainState::default();
        let syncs = Syncs::new(outgoing);
        let outcome = thread::scope(|scope| {
            let threads = Threads {
                scope,
                report,
                stats: self.stats,
                syncs: &syncs,
                config: self.config,
            };
            if incoming == outgoing && streams == 1 {
                for (channel, (reader, writer)) in readers.zip(writers).enumerate() {
                    threads.pass_on(channel, reader, writer);
                }
            } else {
                let (inlets, outlets, barriers) =
                    exchange(incoming, outgoing, streams, self.config.layout);
                give_up = Some(barriers);
                for (channel, (reader, inlet)) in readers.zip(inlets).enumerate() {
                    threads.read(channel, reader, inlet);
                }
                for (index, (writer, outlet)) in writers.into_iter().zip(outlets).enumerate() {
                    threads.write(index / streams, writer, outlet);
                }
            }
            threads.forward_main(&all.main, &all.outgoing.main, pacer.as_deref(), &main_state);
            threads.return_main(&all.outgoing.main, &all.main, &main_state);
            // From here on only the threads can report, so their end is seen as well.
            drop(threads);
            let outcome = Supervisor {
                main: &main_state,
                syncs: &syncs,
                patience: self.config.stall_timeout,
                ends: incoming + outgoing * streams,
                on_loaded: self.on_loaded,
            }
            .watch(&reports, self.hangup);
            self.hangup.hang_up();
            // After the sockets: what was held back must not go out now.
            syncs.give_up();
            if let Some(give_up) = &give_up {
                give_up.now();
            }
            if let Some(pacer) = &pacer {
                pacer.close();
            }
            outcome
        });
        // The destination's word may have been delivered while something else broke, or was cancelled:
        // then the source has completed, and that is what counts.
        let outcome = outcome.or_else(|error| {
            let mut rest = reports.try_iter();
            if rest.any(|report| matches!(report, Report::Shut { code: 0 })) {
                (self.on_loaded)();
                return Ok(Outcome::Loaded);
            }
            Err(error)
        })?;
        Ok(Summary {
            outcome,
            incoming_channels: incoming,
            outgoing_channels: outgoing,
            setup_time,
            total_time: start.elapsed(),
        })
    }
}

/// How long a source may take to its first SYNC.
const SETTING_UP: Duration = Duration::from_secs(1);

struct Connections {
    main: Arc<Stream>,
    channels: Vec<Arc<Stream>>,
    outgoing: Outgoing,
}

struct Outgoing {
    main: Arc<Stream>,
    channels: Vec<Arc<Stream>>,
}

/// What the threads report.
enum Report {
    /// Something broke.
    Failed(RelayError),
    /// The source closed a channel in good order.
    ChannelRead { channel: usize },
    /// Everything that came has been written to a channel.
    ChannelWritten,
    /// One direction of the main stream ended in good order.
    MainEnded(Direction),
    /// The destination's word on loading the guest has been delivered to the source.
    Shut { code: u32 },
}

/// Starts the threads of a migration; each reports its end.
struct Threads<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    report: Sender<Report>,
    stats: &'env Arc<Stats>,
    syncs: &'env Syncs,
    config: &'env Config,
}

impl<'scope, 'env> Threads<'scope, 'env> {
    fn read(&self, channel: usize, mut reader: ChannelReader, inlet: Inlet) {
        let zero = self.config.zero_pages;
        self.spawn(move |report| {
            report(match channels::read(&mut reader, &inlet, zero) {
                Ok(()) => Report::ChannelRead { channel },
                Err(error) => Report::Failed(RelayError::SourceChannel { channel, error }),
            });
        });
    }

    fn write(&self, channel: usize, mut writer: ChannelWriter, outlet: Outlet) {
        let out = self.out();
        self.spawn(
            move |report| match channels::write(channel, &mut writer, &outlet, out) {
                Ok(()) => {
                    writer.finish();
                    report(Report::ChannelWritten);
                }
                Err(error) => {
                    let error = RelayError::DestinationChannel { channel, error };
                    report(Report::Failed(error));
                }
            },
        );
    }

    fn pass_on(&self, channel: usize, mut reader: ChannelReader, mut writer: ChannelWriter) {
        let (config, out) = (self.config, self.out());
        self.spawn(move |report| {
            match channels::pass_on(channel, &mut reader, &mut writer, config, out) {
                Ok(()) => {
                    writer.finish();
                    report(Report::ChannelRead { channel });
                    report(Report::ChannelWritten);
                }
                Err(error) => report(Report::Failed(error)),
            }
        });
    }

    fn forward_main(
        &self,
        from: &Arc<Stream>,
        to: &Arc<Stream>,
        pacer: Option<&'env Pacer>,
        state: &'env MainState,
    ) {
        let (from, to, stats) = (from.clone(), to.clone(), self.stats);
        let Config {
            layout,
            stall_timeout,
            ..
        } = *self.config;
        let behind = BehindSyncs::new(state, self.syncs, stats, layout, stall_timeout);
        self.spawn(move |report| {
            report(report_main(
                Direction::Forward,
                &from,
                &to,
                stats,
                pacer,
                behind,
            ));
        });
    }

    fn return_main(&self, from: &Arc<Stream>, to: &Arc<Stream>, state: &'env MainState) {
        let (from, to, stats) = (from.clone(), to.clone(), self.stats);
        self.spawn(move |report| {
            let witness = ReturnWitness::new(state, |code| report(Report::Shut { code }));
            report(report_main(
                Direction::Back,
                &from,
                &to,
                stats,
                None,
                witness,
            ));
        });
    }

    fn out(&self) -> Out<'env> {
        Out {
            stats: self.stats,
            syncs: self.syncs,
        }
    }

    /// `work` owns its connections and reports while they are open: what a QEMU does about a
    /// connection that closes must not be reported before the reason for it.
    fn spawn(&self, work: impl FnOnce(&dyn Fn(Report)) + Send + 'scope) {
        let report = self.report.clone();
        self.scope.spawn(move || {
            work(&|said| {
                // The supervisor may have seen enough and be gone.
                let _ = report.send(said);
            });
        });
    }
}

fn report_main(
    direction: Direction,
    from: &Stream,
    to: &Stream,
    stats: &Stats,
    pacer: Option<&Pacer>,
    witness: impl Witness,
) -> Report {
    match pump(direction, from, to, stats, pacer, witness) {
        Ok(()) => Report::MainEnded(direction),
        Err(error) => Report::Failed(error),
    }
}

/// Decides from the threads' reports how the migration ended.
struct Supervisor<'a> {
    main: &'a MainState,
    syncs: &'a Syncs,
    patience: Duration,
    /// How many readers and writers of channels will report their end.
    ends: usize,
    on_loaded: &'a dyn Fn(),
}

/// How long a source may go on with its main stream after it has closed a channel, and how long
/// the ends may take to close when the guest has been loaded.
const CLOSING: Duration = Duration::from_secs(3);

impl Supervisor<'_> {
    fn watch(&self, reports: &Receiver<Report>, hangup: &Hangup) -> Result<Outcome, RelayError> {
        let mut open_channels = self.ends;
        let mut closed_channel = None;
        let mut main_open = MainOpen {
            forward: true,
            back: true,
        };
        let mut loaded = false;
        let mut deadline = None;
        let mut held = false;
        let mut broken_off = None;
        loop {
            if open_channels == 0
                && let Some(error) = broken_off.take()
            {
                return Err(error);
            }
            if !main_open.forward && !main_open.back && open_channels == 0 {
                return if loaded {
                    Ok(Outcome::Loaded)
                } else {
                    self.main.verdict()
                };
            }
            let report = match deadline {
                None => reports.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => {
                    let left = Instant::saturating_duration_since(&deadline, Instant::now());
                    reports.recv_timeout(left)
                }
            };
            match report {
                // Before everything else: what has been delivered has happened, cancelled or not.
                Ok(Report::Shut { code: 0 }) => {
                    loaded = true;
                    (self.on_loaded)();
                    deadline = Some(Instant::now() + CLOSING);
                }
                _ if hangup.is_hung_up() && !loaded => return Err(RelayError::Cancelled),
                Err(_) | Ok(Report::Failed(_)) if loaded => {
                    // The destination has the guest and the source knows: what breaks now is only
                    // the connections' end.
                    debug!("the connections ended out of order after the guest had been loaded");
                    return Ok(Outcome::Loaded);
                }
                // Nothing arrives any more.
                Err(_) | Ok(Report::Failed(_) | Report::MainEnded(_)) if broken_off.is_some() => {
                    open_channels = 0;
                }
                Ok(Report::Failed(error)) => return Err(error),
                Ok(Report::Shut { code }) => return Err(RelayError::Refused { code }),
                Ok(Report::ChannelRead { channel }) => {
                    open_channels -= 1;
                    closed_channel.get_or_insert(channel);
                    deadline.get_or_insert_with(|| Instant::now() + CLOSING);
                }
                Ok(Report::ChannelWritten) => open_channels -= 1,
                Ok(Report::MainEnded(direction)) => {
                    let ended = self.main_ended(direction, &mut main_open, loaded);
                    let patience = match (direction, ended) {
                        // What the source sent before it broke off goes on to arrive.
                        (Direction::Forward, Err(error)) => {
                            broken_off = Some(error);
                            CLOSING
                        }
                        (_, ended) => {
                            ended?;
                            self.patience.max(CLOSING)
                        }
                    };
                    deadline = Some(Instant::now() + patience);
                }
                // It cannot end before the channels that it waits for.
                Err(RecvTimeoutError::Timeout) if !held && self.syncs.are_awaited() => {
                    held = true;
                    deadline = Some(Instant::now() + self.patience);
                }
                Err(_) => {
                    return Err(match closed_channel {
                        Some(channel) if main_open.forward => RelayError::ChannelClosed { channel },
                        _ => RelayError::NeverFinished,
                    });
                }
            }
        }
    }

    fn main_ended(
        &self,
        direction: Direction,
        open: &mut MainOpen,
        loaded: bool,
    ) -> Result<(), RelayError> {
        let too_early = match direction {
            Direction::Forward => {
                open.forward = false;
                self.main.is_broken_off() && open.back
            }
            Direction::Back => {
                open.back = false;
                // One that has no return path closes when it has everything, be the source as fast or not.
                self.main.is_broken_off() && open.forward
            }
        };
        if too_early && !loaded {
            return Err(RelayError::MainClosed { direction });
        }
        Ok(())
    }
}

struct MainOpen {
    forward: bool,
    back: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the supervisor of one channel each way makes of `reports`, after `state` has seen its bytes.
    fn judge(state: &MainState, hangup: &Hangup, reports: Vec<Report>) -> Result<Outcome, String> {
        let (report, all) = channel();
        for said in reports {
            report.send(said).unwrap();
        }
        drop(report);
        let supervisor = Supervisor {
            main: state,
            syncs: &Syncs::new(1),
            patience: Duration::from_secs(15),
            ends: 2,
            on_loaded: &|| (),
        };
        supervisor
            .watch(&all, hangup)
            .map_err(|error| error.to_string())
    }

    /// A main stream on which these bytes came, and these back.
    fn seen(forward: &[u8], back: &[u8]) -> MainState {
        let state = MainState::default();
        (&mut &state).received(forward);
        if !back.is_empty() {
            ReturnWitness::new(&state, |_| ()).received(back);
        }
        state
    }

    fn channels_end() -> Vec<Report> {
        vec![Report::ChannelRead { channel: 0 }, Report::ChannelWritten]
    }

    const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 1];

    #[test]
    fn without_a_return_path_either_may_close_first() {
        let hangup = Hangup::new().unwrap();
        for ends in [
            [Direction::Back, Direction::Forward],
            [Direction::Forward, Direction::Back],
        ] {
            let mut reports: Vec<_> = ends.map(Report::MainEnded).into();
            reports.extend(channels_end());
            assert_eq!(
                judge(&seen(b"{}", &[]), &hangup, reports),
                Ok(Outcome::Unconfirmed)
            );
        }
    }

    #[test]
    fn a_main_stream_that_closes_before_its_end_breaks_off() {
        let hangup = Hangup::new().unwrap();
        for direction in [Direction::Back, Direction::Forward] {
            let closed = Err(RelayError::MainClosed { direction }.to_string());
            for state in [seen(b"{", &[]), seen(b"{}", &PONG)] {
                let mut reports = channels_end();
                reports.push(Report::MainEnded(direction));
                assert_eq!(judge(&state, &hangup, reports), closed);
            }
        }
    }

    #[test]
    fn what_has_been_delivered_counts_though_cancelled() {
        let hangup = Hangup::new().unwrap();
        hangup.hang_up();
        let reports = vec![
            Report::Shut { code: 0 },
            Report::Failed(RelayError::Cancelled),
        ];
        assert_eq!(
            judge(&seen(b"{}", &PONG), &hangup, reports),
            Ok(Outcome::Loaded)
        );
        assert_eq!(
            judge(&seen(b"{}", &PONG), &hangup, channels_end()),
            Err(RelayError::Cancelled.to_string())
        );
    }
}
