//! Gateways that are started and stopped by key, for who prepares every migration by itself: KubeVirt's virt-handler, in the
//! place of its own proxies.
//!
//! ```text
//!  pod of the source                        node           node                    pod of the target
//!   libvirt ── KEY-source.sock ───────────> slot 0     ══> port of slot 0     ───> libvirt's socket
//!   QEMU ───── KEY-49152-source.sock ─────> slot 49152 ══> port of slot 49152 ───> KEY-49152-source.sock
//! ```
//!
//! A key has *slots*, numbered as libvirt's ports; 0 is libvirt itself. Each slot is a [`Gateway`] with one stream: that of a
//! target listens at a port which the system chooses, that of a source at a unix socket. Requests come over a unix socket, a
//! line of JSON on a connection each, and are answered by one. Nothing is remembered by a later process.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle, Scope},
    time::{Duration, Instant},
};

use handover::{Lines, encode};
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::{debug, error, error_span, info, warn};
use vamoose_link::{
    Address, Hangup, Listener, Path as LinkPath, Peers, Socket, chain, lock, wait_for,
};

use super::{Gateway, GatewayConfig, GatewayError, GatewayPeer, GatewayStream};
use crate::{Observer, UnderWay};

/// What [`KubeVirt`] works by.
#[derive(Clone)]
pub struct KubeVirtConfig {
    /// Where requests come: a unix socket for our own user and root.
    pub control: PathBuf,
    /// The address of this node at which ports of targets are.
    pub listen: IpAddr,
    /// Gateways work by it, but for their addresses and streams.
    pub template: GatewayConfig,
    /// What stands for every other node, but for its address: all prove to be the same.
    pub node: GatewayPeer,
}

/// Starts and stops gateways when it is asked to.
pub struct KubeVirt {
    config: KubeVirtConfig,
    control: Listener,
    running: Mutex<HashMap<(Side, String), Running>>,
    observer: Arc<dyn Observer>,
    drain: Hangup,
    stop: Hangup,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Side {
    Source,
    Target,
}

/// What was asked for, with a key.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum Request {
    StartTarget(StartTarget),
    StartSource(StartSource),
    StopTarget(Key),
    StopSource(Key),
    /// The keys that there are.
    List {},
}

/// To wait for a guest.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct StartTarget {
    key: String,
    /// What is connected to, by slot.
    sockets: BTreeMap<u16, PathBuf>,
}

/// To have a guest leave.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct StartSource {
    key: String,
    /// The other node.
    to: String,
    /// Its ports, by slot.
    ports: BTreeMap<u16, u16>,
    /// Where the sockets are made.
    directory: PathBuf,
    /// Whose they are besides root's: the user of libvirt and QEMU.
    user: u32,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Key {
    key: String,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    /// Of a target, by slot.
    Ports(BTreeMap<u16, u16>),
    /// Of a source, by slot.
    Sockets(BTreeMap<u16, PathBuf>),
    Stopped,
    Keys {
        sources: Vec<String>,
        targets: Vec<String>,
    },
    Error(String),
}

/// What a key has.
struct Running {
    asked: Asked,
    answer: Answer,
    slots: Vec<Slot>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Asked {
    Target(StartTarget),
    Source(StartSource),
}

/// A gateway that runs until this is dropped.
struct Slot {
    gateway: Arc<Gateway>,
    thread: Option<JoinHandle<()>>,
}

/// A request cannot be carried out.
#[derive(Debug, Error)]
enum RequestError {
    #[error("key `{0}`: letters, digits, `-`, `_` and `.` are allowed, and 200 of them")]
    Key(String),
    #[error("{0} is no absolute path")]
    Path(PathBuf),
    #[error("no slot is named")]
    NoSlots,
    #[error("this gateway is about to end")]
    Ending,
    #[error("slot {slot}")]
    Slot {
        slot: u16,
        #[source]
        source: SlotError,
    },
}

#[derive(Debug, Error)]
enum SlotError {
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    #[error("no thread can be started")]
    Thread(#[from] io::Error),
    #[error("it listens nowhere")]
    Nowhere,
}

/// How long whoever has connected may take to ask, and to read the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often it is looked whether all gateways have ended.
const TICK: Duration = Duration::from_millis(200);

impl KubeVirt {
    /// Listens for requests.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn bind(config: KubeVirtConfig) -> Result<Self, GatewayError> {
        Ok(Self {
            control: Listener::bind(&Address::Unix(config.control.clone()), PATIENCE)?,
            running: Mutex::default(),
            drain: Hangup::new()?,
            stop: Hangup::new()?,
            observer: Arc::new(()),
            config,
        })
    }

    /// Tells `observer` of its migrations.
    #[must_use]
    pub fn observed_by(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// What is under way, through all slots.
    pub fn under_way(&self) -> Vec<UnderWay> {
        let running = lock(&self.running);
        let slots = running.values().flat_map(|it| &it.slots);
        slots.flat_map(|slot| slot.gateway.under_way()).collect()
    }

    /// Starts nothing any more; when migrations under way have ended, [`run`](Self::run) returns.
    pub fn drain(&self) {
        self.drain.hang_up();
        for slot in lock(&self.running).values().flat_map(|it| &it.slots) {
            slot.gateway.drain();
        }
    }

    /// Ends migrations under way.
    pub fn stop(&self) {
        self.drain();
        self.stop.hang_up();
    }

    /// Does what is asked until it is drained or stopped.
    ///
    /// # Errors
    /// When the system refuses to wait for connections.
    pub fn run(&self) -> Result<(), GatewayError> {
        let served = thread::scope(|scope| self.serve(scope));
        // Dropped without the lock: gateways have last words to say.
        let running = std::mem::take(&mut *lock(&self.running));
        drop(running);
        served
    }

    fn serve<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Result<(), GatewayError> {
        loop {
            let mut fds = [PollFd::new(&self.control, PollFlags::IN)];
            wait_for(&mut fds, TICK)?;
            match self.control.try_accept() {
                Ok(Some(socket)) => {
                    let work = move || self.answer(&socket);
                    if let Err(error) = thread::Builder::new().spawn_scoped(scope, work) {
                        warn!("a request is not answered: no thread can be started: {error}");
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    warn!("{}; trying again", chain(&error));
                    thread::sleep(TICK);
                }
            }
            if self.stop.is_hung_up() || (self.drain.is_hung_up() && self.is_idle()) {
                return Ok(());
            }
        }
    }

    fn is_idle(&self) -> bool {
        let running = lock(&self.running);
        let mut slots = running.values().flat_map(|it| &it.slots);
        slots.all(Slot::has_ended)
    }

    fn answer(&self, socket: &Socket) {
        let answer = match request(socket) {
            Ok(Some(request)) => self.carry_out(request),
            Ok(None) => return debug!("a connection without a request was closed"),
            Err(reason) => Answer::Error(reason),
        };
        if let Answer::Error(reason) = &answer {
            warn!("a request is refused: {reason}");
        }
        let written = encode(&answer).map_err(io::Error::other);
        if let Err(error) = written.and_then(|line| socket.write_both(&line, &[])) {
            debug!("an answer was not taken: {error}");
        }
    }

    fn carry_out(&self, request: Request) -> Answer {
        let done = match request {
            Request::StartTarget(asked) => self.start(Asked::Target(asked)),
            Request::StartSource(asked) => self.start(Asked::Source(asked)),
            Request::StopTarget(Key { key }) => Ok(self.stop_key(Side::Target, key)),
            Request::StopSource(Key { key }) => Ok(self.stop_key(Side::Source, key)),
            Request::List {} => Ok(self.list()),
        };
        done.unwrap_or_else(|error| Answer::Error(chain(&error)))
    }

    /// What runs as it is asked for goes on; anything else by the key is ended first.
    fn start(&self, asked: Asked) -> Result<Answer, RequestError> {
        let id = asked.check()?;
        let mut running = lock(&self.running);
        if self.drain.is_hung_up() {
            return Err(RequestError::Ending);
        }
        match running.get(&id) {
            Some(it) if it.asked == asked && !it.slots.iter().any(Slot::has_ended) => {
                return Ok(it.answer.clone());
            }
            _ => drop(running.remove(&id)),
        }
        let (answer, slots) = match &asked {
            Asked::Target(target) => self.start_target(target)?,
            Asked::Source(source) => self.start_source(source)?,
        };
        info!("{} {}: started", id.0.name(), id.1);
        let begun = Running {
            asked,
            answer: answer.clone(),
            slots,
        };
        running.insert(id, begun);
        Ok(answer)
    }

    fn start_target(&self, asked: &StartTarget) -> Result<(Answer, Vec<Slot>), RequestError> {
        let (mut ports, mut slots) = (BTreeMap::new(), Vec::new());
        for (number, path) in &asked.sockets {
            let stream = self.stream(&asked.key, *number, None, Some(path));
            let mut config = self.gateway(self.config.node.clone(), stream);
            config.listen.push(Address::Tcp {
                host: self.config.listen.to_string(),
                port: 0,
            });
            let slot = Slot::start(config, self.observer.clone(), &asked.key, *number)?;
            let port = slot.port().ok_or(SlotError::Nowhere);
            ports.insert(*number, port.map_err(|it| it.of(*number))?);
            slots.push(slot);
        }
        Ok((Answer::Ports(ports), slots))
    }

    fn start_source(&self, asked: &StartSource) -> Result<(Answer, Vec<Slot>), RequestError> {
        let (mut sockets, mut slots) = (BTreeMap::new(), Vec::new());
        for (number, port) in &asked.ports {
            let name = socket_name(&asked.key, *number);
            let path = asked.directory.join(format!("{name}-source.sock"));
            let mut node = self.config.node.clone();
            let (host, port) = (asked.to.clone(), *port);
            node.remote.paths = vec![LinkPath::from(Address::Tcp { host, port })];
            let stream = self.stream(&asked.key, *number, Some(&path), None);
            let mut config = self.gateway(node, stream);
            config.users = Peers::own_and([asked.user]);
            slots.push(Slot::start(
                config,
                self.observer.clone(),
                &asked.key,
                *number,
            )?);
            sockets.insert(*number, path);
        }
        Ok((Answer::Sockets(sockets), slots))
    }

    fn stream(
        &self,
        key: &str,
        slot: u16,
        listen: Option<&Path>,
        to: Option<&Path>,
    ) -> GatewayStream {
        let unix = |path: &Path| Address::Unix(path.to_owned());
        GatewayStream {
            name: socket_name(key, slot).into(),
            peer: self.config.node.name.clone(),
            listen: listen.map(unix),
            to: to.map(unix),
        }
    }

    fn gateway(&self, node: GatewayPeer, stream: GatewayStream) -> GatewayConfig {
        let mut config = self.config.template.clone();
        config.peers = vec![Arc::new(node)];
        config.streams = vec![stream];
        config
    }

    /// That there is nothing to be stopped is just as well.
    fn stop_key(&self, side: Side, key: String) -> Answer {
        let id = (side, key);
        // Not dropped under the lock: gateways have last words to say.
        let stopped = lock(&self.running).remove(&id);
        if stopped.is_some() {
            info!("{} {}: stopped", id.0.name(), id.1);
        }
        drop(stopped);
        Answer::Stopped
    }

    fn list(&self) -> Answer {
        let running = lock(&self.running);
        let of = |side| {
            let keys = running.keys().filter(|(its, _)| *its == side);
            let mut keys: Vec<_> = keys.map(|(_, key)| key.clone()).collect();
            keys.sort_unstable();
            keys
        };
        Answer::Keys {
            sources: of(Side::Source),
            targets: of(Side::Target),
        }
    }
}

/// The request on a connection; `None` if that was closed without.
fn request(socket: &Socket) -> Result<Option<Request>, String> {
    let (mut lines, deadline) = (Lines::default(), Instant::now() + PATIENCE);
    loop {
        if let Some(request) = lines.next_message().map_err(|error| chain(&error))? {
            return Ok(Some(request));
        }
        let mut piece = [0; 4096];
        match socket.read_until(&mut piece, Some(deadline)) {
            Ok(Some(0)) if lines.is_in_message() => {
                return Err("a request ends with a line feed".to_owned());
            }
            Ok(Some(0)) => return Ok(None),
            Ok(Some(read)) => lines.push(&piece[..read]),
            Ok(None) => return Err(format!("no request came in {} s", PATIENCE.as_secs())),
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// As KubeVirt names the sockets of a key.
fn socket_name(key: &str, slot: u16) -> String {
    match slot {
        0 => key.to_owned(),
        slot => format!("{key}-{slot}"),
    }
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Target => "target",
        }
    }
}

impl Asked {
    /// Nothing in a request may name anything else than it says.
    fn check(&self) -> Result<(Side, String), RequestError> {
        let (side, key, slots, paths) = match self {
            Self::Target(it) => (
                Side::Target,
                &it.key,
                it.sockets.len(),
                it.sockets.values().collect(),
            ),
            Self::Source(it) => (Side::Source, &it.key, it.ports.len(), vec![&it.directory]),
        };
        let is_fine = |it: u8| it.is_ascii_alphanumeric() || b"-_.".contains(&it);
        if key.is_empty() || key.len() > 200 || !key.bytes().all(is_fine) {
            return Err(RequestError::Key(key.clone()));
        }
        if let Some(path) = paths.iter().find(|path| !path.is_absolute()) {
            return Err(RequestError::Path(path.to_path_buf()));
        }
        if slots == 0 {
            return Err(RequestError::NoSlots);
        }
        Ok((side, key.clone()))
    }
}

impl SlotError {
    fn of(self, slot: u16) -> RequestError {
        RequestError::Slot { slot, source: self }
    }
}

impl Slot {
    fn start(
        config: GatewayConfig,
        observer: Arc<dyn Observer>,
        key: &str,
        slot: u16,
    ) -> Result<Self, RequestError> {
        let started = || {
            let gateway = Gateway::bind(config, Vec::new())?.observed_by(observer);
            let gateway = Arc::new(gateway);
            let (runs, span) = (gateway.clone(), error_span!("slot", key, number = slot));
            let work = move || {
                if let Err(error) = span.in_scope(|| runs.run()) {
                    error!("{}", chain(&error));
                }
            };
            let thread = Some(thread::Builder::new().spawn(work)?);
            Ok(Self { gateway, thread })
        };
        started().map_err(|error: SlotError| error.of(slot))
    }

    /// Where other nodes reach it.
    fn port(&self) -> Option<u16> {
        match self.gateway.addresses().next()? {
            Address::Tcp { port, .. } => Some(*port),
            Address::Unix(_) => None,
        }
    }

    fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.gateway.stop();
        // Its errors are in the log.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
