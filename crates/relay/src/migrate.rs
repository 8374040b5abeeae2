//! The source's side: drives one QEMU through a migration to a server on another host.
//!
//! ```text
//!  survey    the source QEMU: can it migrate, what is it
//!  prepare   the server: is there a QEMU for it, what can that one do
//!  set up    the source QEMU and a relay beside it
//!  watch     until the source says completed, failed or cancelled
//!  commit    completed: the source is paused for good; ask the server to continue the guest, until
//!            it answers.  Anything else: the guest runs on here, the server ends its QEMU.
//! ```
//!
//! The order of the last step is what keeps the guest from running twice or nowhere: the
//! destination never runs before the source has stopped for good, and the source is only continued
//! after that when the server says that the guest never ran there.

use std::{
    fmt, io,
    os::unix::fs::{MetadataExt, chown},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};
use thiserror::Error;
use tracing::{info, warn};
use transfer::{Address, Hangup, Listener, Snapshot, SocketError, Stats};

use crate::{
    Config, Dialer, Relay, RelayError,
    control::{
        Answer, Commit, Control, ControlError, Id, Kind, PROTOCOL, Prepare, Request, preamble,
    },
    qemu::{MigrationStatus, Qemu, QemuError},
};

/// One migration to be driven.
pub struct Migration<'a> {
    /// The source QEMU's monitor.
    pub qmp: &'a Path,
    /// The server.
    pub to: &'a Address,
    /// The waiting QEMU's name at the server.
    pub name: &'a str,
    /// Data channels, all the way.
    pub channels: u8,
    /// What the relay does with the pages.
    pub config: Config,
    /// Longest downtime to aim at; QEMU's own setting if `None`.
    pub downtime_limit: Option<Duration>,
    /// How the source finds zero pages (`none`, `legacy`, `multifd`); the best that both QEMUs know
    /// if `None`.
    pub zero_page_detection: Option<&'a str>,
    /// Set to cancel.
    pub cancel: &'a AtomicBool,
}

/// Where a migration stands.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// QEMU's name for the state: `setup`, `active`, `device`, ...
    pub status: String,
    /// QEMU's whole account, as `query-migrate` gives it.
    pub source: Value,
    /// What the relay has moved.
    pub moved: Snapshot,
}

/// A guest that has moved.
#[derive(Clone, Debug)]
pub struct Moved {
    /// QEMU's account at the end; empty when the migration had been driven by somebody else.
    pub source: Value,
    /// What the relay has moved.
    pub moved: Snapshot,
    /// From the source's stop to the server's word that the guest runs, as this host's clock saw it.
    /// `None` when it did not run.
    pub downtime: Option<Duration>,
    /// From the first command to the server's last word.
    pub total_time: Duration,
}

/// Where the guest is after a migration that did not go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// At the source, as if nothing had been.
    Source,
    /// The source is paused for good, and the destination has not answered.
    Undecided,
    /// Its QEMU ended.
    Lost,
}

impl fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "the guest stays at the source",
            Self::Undecided => {
                "the guest is paused at the source, and the destination may have it: run the same \
                 command again to finish the migration, and continue neither by hand before"
            }
            Self::Lost => "the source's QEMU has ended, and the guest with it",
        })
    }
}

/// A migration that did not go through.
#[derive(Debug, Error)]
#[error("{cause}; {guest}")]
pub struct Failure {
    /// Why.
    #[source]
    pub cause: Cause,
    /// Where that leaves the guest.
    pub guest: Whereabouts,
}

/// Why a migration did not go through.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Cause {
    /// Somebody asked for it.
    #[error("the migration was cancelled")]
    Cancelled,
    /// The source QEMU.
    #[error("source: {0}")]
    Source(#[from] QemuError),
    /// The server could not be talked to.
    #[error("server: {0}")]
    Control(#[from] ControlError),
    /// The server does not take this migration.
    #[error("the server refuses: {0}")]
    Refused(String),
    /// An answer to another question.
    #[error("the server answered out of turn: {0}")]
    OutOfTurn(String),
    /// The socket between the source QEMU and its relay.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refused something that every migration needs.
    #[error("cannot set up the migration: {0}")]
    SetUp(#[from] io::Error),
    /// It broke under way.
    #[error("{}", join(.0))]
    Broken(Vec<String>),
}

fn join(causes: &[String]) -> String {
    causes.join("; ")
}

impl Migration<'_> {
    /// Runs the migration to its end. `observe` is called several times a second meanwhile.
    ///
    /// # Errors
    /// Why it did not go through, and where the guest is.
    pub fn run(&self, observe: &mut dyn FnMut(&Progress)) -> Result<Moved, Failure> {
        let start = Instant::now();
        let mut source = self.survey().map_err(at_source)?;
        let id = Id::random().map_err(|error| at_source(error.into()))?;
        if source.completed_before {
            info!("the source has completed a migration before: finishing that one");
            let answer = self.commit(id, &source, None);
            return self.finish(&mut source, Completed::before(answer), start);
        }
        let mut control = self.prepare(id, &mut source).map_err(at_source)?;
        match self.move_pages(id, &mut source, &mut control, observe) {
            Ok(completed) => self.finish(&mut source, completed, start),
            Err(cause) => Err(self.abort(&mut control, id, &mut source, cause)),
        }
    }

    /// Looks at the source QEMU and refuses what cannot work; changes nothing.
    fn survey(&self) -> Result<Source, Cause> {
        let mut qemu = Qemu::connect(self.qmp)?;
        let state = qemu.state()?;
        let account = qemu.query_migrate()?;
        let status = MigrationStatus::of(&account);
        let stopped_for_good = ["finish-migrate", "postmigrate"];
        let completed_before =
            stopped_for_good.contains(&state.as_str()) && status == MigrationStatus::Completed;
        if !completed_before {
            if state == "inmigrate" || status == MigrationStatus::Busy {
                return Err(QemuError::State {
                    state: format!(
                        "{state}, migration {}",
                        account["status"].as_str().unwrap_or("none")
                    ),
                    expected: "a guest that is not being migrated",
                }
                .into());
            }
            qemu.check(&["multifd", "return-path"])?;
            if let Some(value) = self.zero_page_detection {
                qemu.check_value("zero-page-detection", value)?;
            }
        }
        Ok(Source {
            // After a migration the guest is to run if it did before, and that it did is the rule.
            was_running: state == "running" || completed_before,
            uuid: qemu.uuid()?,
            ram_bytes: qemu.ram_bytes()?,
            completed_before,
            stopped_at: None,
            zero_pages: None,
            qemu,
        })
    }

    fn prepare(&self, id: Id, source: &mut Source) -> Result<Control, Cause> {
        let mut control = Control::connect(self.to, id, self.config.stall_timeout)?;
        let request = Request::Prepare(Prepare {
            protocol: PROTOCOL,
            name: self.name.to_owned(),
            uuid: source.uuid.clone(),
            ram_bytes: source.ram_bytes,
            channels: self.channels,
            page_size: u32::try_from(self.config.layout.page_size()).unwrap_or(u32::MAX),
            method: self.config.engines.settings().name().to_owned(),
        });
        match control.ask(&request)? {
            Answer::Prepared {
                qemu,
                knows_zero_pages,
            } => {
                info!(
                    "source QEMU {}, destination QEMU {qemu}",
                    source.qemu.version()
                );
                if source.qemu.knows_zero_pages() {
                    // An older destination would lose zero pages in packets silently.
                    let best = if knows_zero_pages {
                        "multifd"
                    } else {
                        "legacy"
                    };
                    let wanted = self.zero_page_detection.unwrap_or(best);
                    if wanted == "multifd" && !knows_zero_pages {
                        return Err(Cause::Refused(format!(
                            "its QEMU {qemu} does not know zero-page-detection multifd"
                        )));
                    }
                    source.zero_pages = Some(wanted.to_owned());
                }
                Ok(control)
            }
            Answer::Refused { reason } => Err(Cause::Refused(reason)),
            other => Err(Cause::OutOfTurn(format!("{other:?}"))),
        }
    }

    /// From the set-up to the source's last word and, if that is *completed*, the server's answer to
    /// the commit.
    fn move_pages(
        &self,
        id: Id,
        source: &mut Source,
        control: &mut Control,
        observe: &mut dyn FnMut(&Progress),
    ) -> Result<Completed, Cause> {
        self.set_up(source)?;
        let socket = Socket::beside(self.qmp, self.config.stall_timeout)?;
        let dialer = Dialer {
            address: self.to.clone(),
            preamble: preamble(Kind::Data, id).to_vec(),
        };
        let mut config = self.config.clone();
        config.incoming_channels = Some(self.channels.into());
        config.outgoing_channels = Some(self.channels.into());
        let hangup = Hangup::new()?;
        let stats = Arc::new(Stats::default());
        let relay = Relay {
            accept: &socket.listener,
            dialer: &dialer,
            config: &config,
            hangup: &hangup,
            stats: &stats,
            on_loaded: &|| (),
        };
        let (ended, relayed) = thread::scope(|scope| {
            let relay = scope.spawn(|| relay.run());
            let ended = self
                .start(source, &socket.path)
                .and_then(|()| self.watch(source, &stats, observe));
            let ended = match ended {
                // The guest stands still: nothing comes before the commit, not even the relay's end.
                Ok(account) => Ok((account, self.commit(id, source, Some(control)))),
                Err(cause) => {
                    hangup.hang_up();
                    Err(cause)
                }
            };
            // A thread that panicked has nothing to tell; the source's word decides.
            (ended, relay.join().unwrap_or(Err(RelayError::Cancelled)))
        });
        match (ended, relayed) {
            (Ok((account, answer)), _) => Ok(Completed {
                account,
                moved: stats.snapshot(),
                answer,
            }),
            (Err(Cause::Broken(causes)), Err(error)) if !matches!(error, RelayError::Cancelled) => {
                // What the relay saw is the cause, what QEMU says usually the consequence.
                let relayed = std::iter::once(error.to_string());
                Err(Cause::Broken(relayed.chain(causes).collect()))
            }
            (Err(cause), _) => Err(cause),
        }
    }

    fn set_up(&self, source: &mut Source) -> Result<(), Cause> {
        let mut parameters = json!({
            "multifd-channels": self.channels,
            "multifd-compression": "none",
            // The relay paces where pacing is asked for; here a limit would only be in its way.
            "max-bandwidth": UNLIMITED,
        });
        if let Some(limit) = self.downtime_limit {
            let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
            parameters["downtime-limit"] = millis.into();
        }
        if let Some(zero_pages) = &source.zero_pages {
            parameters["zero-page-detection"] = zero_pages.as_str().into();
        }
        let mandatory = ["multifd", "return-path"];
        Ok(source.qemu.set_up(&mandatory, &["events"], parameters)?)
    }

    fn start(&self, source: &mut Source, socket: &Path) -> Result<(), Cause> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Cause::Cancelled);
        }
        let uri = format!("unix:{}", socket.display());
        Ok(source.qemu.execute("migrate", json!({ "uri": uri }))?)
    }

    /// Follows the source until it says how the migration ended.
    fn watch(
        &self,
        source: &mut Source,
        stats: &Stats,
        observe: &mut dyn FnMut(&Progress),
    ) -> Result<Value, Cause> {
        let mut cancelling = false;
        let mut asked = None;
        loop {
            if self.cancel.load(Ordering::Relaxed) && !cancelling {
                cancelling = true;
                source.qemu.execute("migrate_cancel", json!({}))?;
            }
            let event = source.qemu.next_event(EVENT_WAIT)?;
            let is_news = event.is_some_and(|event| match event.name.as_str() {
                "STOP" => {
                    source.stopped_at = Some(event.timestamp.since_epoch());
                    false
                }
                "MIGRATION" => true,
                _ => false,
            });
            if !is_news && asked.is_some_and(|asked: Instant| asked.elapsed() < ASK_EVERY) {
                continue;
            }
            asked = Some(Instant::now());
            let account = source.qemu.query_migrate()?;
            let status = account["status"].as_str().unwrap_or("none");
            observe(&Progress {
                status: status.to_owned(),
                moved: stats.snapshot(),
                source: account.clone(),
            });
            match status {
                "completed" => {
                    if cancelling {
                        warn!("too late to cancel: the guest has moved");
                    }
                    return Ok(account);
                }
                // A source that is cancelled sometimes calls it a failure.
                "cancelled" | "failed" if cancelling => return Err(Cause::Cancelled),
                "cancelled" => {
                    return Err(Cause::Broken(vec![
                        "somebody cancelled at the source".into(),
                    ]));
                }
                "failed" => {
                    let reason = account["error-desc"].as_str().unwrap_or("no reason given");
                    return Err(Cause::Broken(vec![format!("source QEMU: {reason}")]));
                }
                _ => {}
            }
        }
    }

    /// The source has stopped for good: asks the server to continue the guest, over the connection
    /// that there is and then over new ones, until it answers. Only a cancel ends this before.
    fn commit(
        &self,
        id: Id,
        source: &Source,
        control: Option<&mut Control>,
    ) -> Result<Commitment, Cause> {
        let request = Request::Commit(Commit {
            name: self.name.to_owned(),
            uuid: source.uuid.clone(),
            resume: source.was_running,
        });
        let mut answer = control.map(|control| control.ask(&request));
        let mut told = false;
        loop {
            let result = answer.take().unwrap_or_else(|| {
                Control::connect(self.to, id, self.config.stall_timeout)
                    .and_then(|mut control| control.ask(&request))
            });
            match result {
                Ok(answer) => {
                    let now = SystemTime::now().duration_since(UNIX_EPOCH);
                    return Ok(Commitment {
                        answer,
                        at: now.unwrap_or_default(),
                    });
                }
                Err(error) if told && self.cancel.load(Ordering::Relaxed) => {
                    return Err(error.into());
                }
                Err(error) => {
                    if !told {
                        warn!(
                            "the source has stopped; asking the server again until it answers: {error}"
                        );
                        // A cancel from before cannot have been meant for this.
                        self.cancel.store(false, Ordering::Relaxed);
                    }
                    told = true;
                    thread::sleep(ASK_AGAIN);
                }
            }
        }
    }

    /// Draws the conclusion from the server's answer to the commit.
    fn finish(
        &self,
        source: &mut Source,
        completed: Completed,
        start: Instant,
    ) -> Result<Moved, Failure> {
        let undecided = |cause| Failure {
            cause,
            guest: Whereabouts::Undecided,
        };
        let Commitment { answer, at } = completed.answer.map_err(undecided)?;
        match answer {
            Answer::Running { .. } => {
                source.put_back();
                let downtime = source.stopped_at.map(|stopped| at.saturating_sub(stopped));
                Ok(Moved {
                    source: completed.account,
                    moved: completed.moved,
                    downtime: downtime.filter(|_| source.was_running),
                    total_time: start.elapsed(),
                })
            }
            Answer::Aborted { cause } => {
                // It never ran there and never will.
                source.put_back();
                let reason = cause.unwrap_or_else(|| "no reason given".to_owned());
                Err(match source.make_run() {
                    Ok(()) => Failure {
                        cause: Cause::Broken(vec![format!("destination: {reason}")]),
                        guest: Whereabouts::Source,
                    },
                    Err(error) => undecided(error.into()),
                })
            }
            Answer::Unknown { reason } | Answer::Refused { reason } => {
                Err(undecided(Cause::Refused(reason)))
            }
            other @ Answer::Prepared { .. } => {
                Err(undecided(Cause::OutOfTurn(format!("{other:?}"))))
            }
        }
    }

    /// The migration failed: the server ends its QEMU, the guest runs on here.
    fn abort(&self, control: &mut Control, id: Id, source: &mut Source, cause: Cause) -> Failure {
        let answer = control.ask(&Request::Abort).or_else(|_| {
            Control::connect(self.to, id, self.config.stall_timeout)
                .and_then(|mut control| control.ask(&Request::Abort))
        });
        let cause = match (cause, &answer) {
            (
                Cause::Broken(mut causes),
                Ok(Answer::Aborted {
                    cause: Some(theirs),
                }),
            ) => {
                causes.push(format!("destination: {theirs}"));
                Cause::Broken(causes)
            }
            (cause, Ok(_)) => cause,
            (cause, Err(error)) => {
                warn!(
                    "the server cannot be told that the migration failed ({error}); do not \
                     continue the guest `{}` there",
                    self.name
                );
                cause
            }
        };
        let guest = match source.settle() {
            Ok(()) => Whereabouts::Source,
            Err(_) if source.qemu.is_dead(SETTLING) => Whereabouts::Lost,
            Err(error) => {
                warn!("the source is not as it was: {error}");
                Whereabouts::Undecided
            }
        };
        source.put_back();
        Failure { cause, guest }
    }
}

/// A bandwidth beyond every link, bytes per second.
const UNLIMITED: u64 = 1 << 40;
/// How long to wait for an event before looking at the clock and at a cancel.
const EVENT_WAIT: Duration = Duration::from_millis(50);
/// How often to ask for QEMU's account.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// Between two attempts to reach the server.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// How long a source may take to run again after a failure.
const SETTLING: Duration = Duration::from_secs(10);

/// A source that has stopped for good.
struct Completed {
    /// QEMU's account.
    account: Value,
    moved: Snapshot,
    answer: Result<Commitment, Cause>,
}

impl Completed {
    /// What is known of a migration that was driven by an earlier run.
    fn before(answer: Result<Commitment, Cause>) -> Self {
        Self {
            account: Value::Null,
            moved: Snapshot::default(),
            answer,
        }
    }
}

/// What the server answered to the commit, and when, since the epoch.
struct Commitment {
    answer: Answer,
    at: Duration,
}

struct Source {
    qemu: Qemu,
    uuid: String,
    ram_bytes: u64,
    was_running: bool,
    /// A migration was completed and perhaps never committed.
    completed_before: bool,
    /// When the guest stopped, since the epoch.
    stopped_at: Option<Duration>,
    /// Value for `zero-page-detection`, where QEMU knows it.
    zero_pages: Option<String>,
}

impl Source {
    /// Waits until the guest is again as it was before a migration that failed.
    fn settle(&mut self) -> Result<(), QemuError> {
        let deadline = Instant::now() + SETTLING;
        loop {
            let state = self.qemu.state()?;
            if !self.was_running || state == "running" {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(QemuError::State {
                    state,
                    expected: "running",
                });
            }
            self.qemu.next_event(EVENT_WAIT)?;
        }
    }

    /// Continues the guest here, after the destination has said that it never ran there.
    fn make_run(&mut self) -> Result<(), QemuError> {
        if self.was_running {
            self.qemu.execute("cont", json!({}))?;
        }
        self.settle()
    }

    fn put_back(&mut self) {
        self.qemu.put_back();
    }
}

/// The socket between a QEMU and the relay, where that QEMU can reach it: beside its monitor.
struct Socket {
    listener: Listener,
    path: PathBuf,
}

impl Socket {
    fn beside(qmp: &Path, stall_timeout: Duration) -> Result<Self, Cause> {
        let path = qmp.with_extension("outgoing");
        let listener = Listener::bind(&Address::Unix(path.clone()), stall_timeout)?;
        // QEMU often runs as another user than we do, and must be able to connect.
        let owner = qmp.metadata()?;
        if path.metadata()?.uid() != owner.uid() {
            chown(&path, Some(owner.uid()), Some(owner.gid()))?;
        }
        Ok(Self { listener, path })
    }
}

fn at_source(cause: Cause) -> Failure {
    Failure {
        cause,
        guest: Whereabouts::Source,
    }
}
