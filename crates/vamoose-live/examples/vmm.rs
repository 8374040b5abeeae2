//! The smallest VMM there is, for the campaign of faults (`lab`'s program `faults`): a source or a destination in a process of
//! its own, which can be killed. Its guest is a few threads that write memory and can prove what they wrote.
//!
//! ```text
//!  vmm source      METHOD CHANNELS RATE LINK    makes a guest and lets it run; to stdin: `migrate ADDRESS`, `cancel`, `verify`
//!  vmm destination METHOD CHANNELS RATE LINK    says where it listens, and takes a guest; to stdin: `verify`
//! ```
//! LINK is for sessions `--keys DIR` (this host's key, and those it trusts; only those of `--peer-key KEY`, if given), or
//! `--insecure` (neither authentication nor encryption); or `--plain`, for plain connections.
//!
//! Both tell on standard output, in lines of JSON, when their guest begins to run, when it has stopped, what its memory was at
//! the switchover, and what has become of a migration. The end of standard input ends them.

use std::{
    error::Error,
    hash::{DefaultHasher, Hasher as _},
    io::{self, BufRead as _, Write as _},
    num::NonZeroU64,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};
use testguest::{Backing, Config, Fill, Guest, Kind, Memory, fill};
use vamoose_live::{
    Acceptor, Address, Destination, DestinationConfig, DestinationGuest, GuestError, Handle, Keys,
    Listener, Ram, RamBlock, Remote, Source, SourceConfig, SourceError, SourceGuest, Transport,
    chain,
    compression::{Engines, Method, Settings},
    dirty::UserfaultLog,
    session::{PublicKey, Security, SessionConfig, Sessions},
};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["source", method, channels, rate, ref link @ ..] => {
            be_source(&Shape::parse(method, channels, rate)?, link_of(link)?)
        }
        ["destination", method, channels, rate, ref link @ ..] => {
            be_destination(&Shape::parse(method, channels, rate)?, link_of(link)?)
        }
        _ => Err(USAGE.into()),
    }
}

const USAGE: &str = "usage: vmm source|destination METHOD CHANNELS RATE --plain | --insecure | --keys DIR [--peer-key KEY]...";

/// How sessions behave; `None` for plain connections.
fn link_of(words: &[&str]) -> Result<Option<SessionConfig>> {
    let security = match words {
        ["--plain"] => return Ok(None),
        ["--insecure"] => Security::Insecure,
        ["--keys", directory, more @ ..] => {
            let more = more.chunks(2).map(|option| match option {
                ["--peer-key", key] => Ok(key.parse::<PublicKey>()?),
                _ => Err(USAGE.into()),
            });
            let trusted = more.collect::<Result<Vec<_>>>()?;
            Security::Keys(Keys {
                directory: directory.into(),
                trusted: (!trusted.is_empty()).then_some(trusted),
            })
        }
        _ => return Err(USAGE.into()),
    };
    Ok(Some(SessionConfig {
        reconnect_timeout: RECONNECT_TIMEOUT,
        ..SessionConfig::new(security)
    }))
}

/// Shorter than a person would have it, as the campaign waits for it.
const STALL_TIMEOUT: Duration = Duration::from_secs(2);
const SETTLE_TIME: Duration = Duration::from_secs(6);
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(6);
/// Enough for some packets on every channel.
const RAM: u64 = 4 << 20;

/// What both sides have alike.
struct Shape {
    engines: Engines,
    channels: u8,
    /// Pages that the guest writes in a second.
    rate: u64,
}

impl Shape {
    fn parse(method: &str, channels: &str, rate: &str) -> Result<Self> {
        let known = Method::ALL.iter().find(|known| known.name() == method);
        let method = known.ok_or_else(|| format!("there is no method {method}"))?;
        Ok(Self {
            engines: Engines::software(Settings::new(*method, None)?),
            channels: channels.parse()?,
            rate: rate.parse()?,
        })
    }

    fn config(&self, memory: Memory) -> Config {
        let mut config = Config::new(Kind::Threads, memory);
        config.vcpus = 2;
        config.rate = NonZeroU64::new(self.rate);
        config
    }
}

/// Guest memory, as the guest and as the engine have it.
fn memory() -> Result<(Memory, Ram)> {
    let memory = Memory::new(Backing::Anonymous, RAM)?;
    let blocks = memory.blocks().iter();
    let blocks = blocks.map(|block| RamBlock::new(block.name(), block.region().clone()));
    let ram = Ram::new(blocks.collect::<Result<_, _>>()?)?;
    Ok((memory, ram))
}

fn be_source(shape: &Shape, link: Option<SessionConfig>) -> Result<()> {
    let (memory, ram) = memory()?;
    fill(&memory, &Fill::Mixed)?;
    let guest = Guest::new(&shape.config(memory))?;
    tell(&json!({ "say": "runs" }));
    guest.resume()?;
    // The handle of the migration under way.
    let current = Mutex::new(None::<Handle>);
    thread::scope(|scope| {
        for line in io::stdin().lock().lines() {
            let line = line?;
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("migrate", address) => {
                    let source = source(shape, &ram)?;
                    *lock(&current) = Some(source.handle());
                    let (guest, ram, address) = (&guest, &ram, address.parse::<Address>()?);
                    let to = match &link {
                        None => Transport::Plain(address),
                        Some(config) => Transport::Session(Remote {
                            paths: vec![address.into()],
                            config: config.clone(),
                        }),
                    };
                    scope.spawn(move || {
                        let mut here = Here { guest, ram };
                        let result = source.run(&to, &mut here);
                        tell(&verdict(result.err()));
                    });
                }
                ("cancel", _) => drop(lock(&current).as_ref().map(Handle::cancel)),
                ("verify", _) => verify(&guest)?,
                _ => tell(&json!({ "say": "what?" })),
            }
        }
        // Whatever is under way: nobody needs it any more.
        std::process::exit(0)
    })
}

fn source(shape: &Shape, ram: &Ram) -> Result<Source> {
    let mut config = SourceConfig::new(shape.engines.clone());
    config.channels = shape.channels;
    config.stall_timeout = STALL_TIMEOUT;
    config.settle_time = SETTLE_TIME;
    let log = UserfaultLog::new(ram)?;
    Ok(Source::with_config(ram.clone(), Arc::new(log), config)?)
}

/// Where the source thinks the guest is.
#[allow(
    clippy::unneeded_struct_pattern,
    reason = "what is told with a lost guest is none of this program's business"
)]
fn verdict(error: Option<SourceError>) -> Value {
    let Some(error) = error else {
        return json!({ "say": "over", "guest": "destination" });
    };
    let guest = match &error {
        SourceError::Lost { .. } => "lost",
        SourceError::InDoubt { .. } => "in-doubt",
        SourceError::NotResumed { .. } => "not-resumed",
        _ => "source",
    };
    json!({ "say": "over", "guest": guest, "cause": chain(&error) })
}

/// The guest at the source.
struct Here<'a> {
    guest: &'a Guest,
    ram: &'a Ram,
}

impl SourceGuest for Here<'_> {
    fn pause(&mut self) -> Result<(), GuestError> {
        self.guest.pause();
        tell(&json!({ "say": "stopped" }));
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        tell(&json!({ "say": "runs" }));
        Ok(self.guest.resume()?)
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        tell(&json!({ "say": "sent", "memory": digest(self.ram)? }));
        Ok(self.guest.save()?)
    }
}

fn be_destination(shape: &Shape, link: Option<SessionConfig>) -> Result<()> {
    let (memory, ram) = memory()?;
    let mut config = DestinationConfig::new(shape.engines.clone());
    config.stall_timeout = STALL_TIMEOUT;
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse()?, STALL_TIMEOUT)?;
    let listening = json!({ "say": "listening", "address": listener.address().to_string() });
    let acceptor = match link {
        None => Acceptor::Plain(listener),
        Some(config) => Acceptor::Sessions(Sessions::new(vec![listener], config)?),
    };
    let mut destination = Destination::new(acceptor, ram.clone(), config)?;
    tell(&listening);
    let arrived = Mutex::new(None);
    thread::scope(|scope| {
        scope.spawn(|| {
            // One attempt after the other, until a guest has come.
            loop {
                let guest = match Guest::incoming(&shape.config(memory.clone())) {
                    Ok(guest) => guest,
                    Err(error) => {
                        return tell(&json!({ "say": "failed", "cause": format!("{error:#}") }));
                    }
                };
                let mut there = There {
                    guest: Some(guest),
                    ram: &ram,
                    arrived: &arrived,
                };
                match destination.run(&mut there) {
                    Ok(_) => return tell(&json!({ "say": "settled" })),
                    Err(error) => tell(&json!({ "say": "failed", "cause": chain(&error) })),
                }
                if lock(&arrived).is_some() {
                    return;
                }
            }
        });
        for line in io::stdin().lock().lines() {
            match (line?.as_str(), lock(&arrived).as_ref()) {
                ("verify", Some(guest)) => verify(guest)?,
                _ => tell(&json!({ "say": "what?" })),
            }
        }
        std::process::exit(0)
    })
}

/// The guest at the destination.
struct There<'a> {
    guest: Option<Guest>,
    ram: &'a Ram,
    arrived: &'a Mutex<Option<Guest>>,
}

impl DestinationGuest for There<'_> {
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        tell(&json!({ "say": "came", "memory": digest(self.ram)? }));
        let guest = self.guest.as_ref().ok_or("it has been let run")?;
        Ok(guest.load(state)?)
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        let guest = self.guest.take().ok_or("it has been let run")?;
        tell(&json!({ "say": "runs" }));
        guest.resume()?;
        *lock(self.arrived) = Some(guest);
        Ok(())
    }
}

/// Pauses a running guest, has it prove its memory, and lets it go on until it has written more.
fn verify(guest: &Guest) -> Result<()> {
    let runs = guest.is_running();
    guest.pause();
    let proof = guest.verify();
    if runs {
        guest.resume()?;
    }
    tell(&match proof {
        Ok(proof) => json!({ "say": "verified", "writes": proof.writes, "runs": runs }),
        Err(error) => json!({ "say": "corrupt", "cause": error.to_string() }),
    });
    Ok(())
}

/// A number for all that is in memory, which nobody writes meanwhile.
fn digest(ram: &Ram) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    let mut piece = vec![0; 64 << 10];
    for block in ram.blocks() {
        for start in (0..block.len()).step_by(piece.len()) {
            let len = piece.len().min(block.len() - start);
            block
                .memory()
                .subslice(start, len)?
                .copy_to(&mut piece[..len]);
            hasher.write(&piece[..len]);
        }
    }
    Ok(hasher.finish())
}

/// Says something, and when.
fn tell(what: &Value) {
    let mut what = what.clone();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    what["at"] = u64::try_from(now.as_micros()).unwrap_or(u64::MAX).into();
    let mut out = io::stdout().lock();
    // Whoever does not listen any more does not need it.
    let _ = writeln!(out, "{what}").and_then(|()| out.flush());
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
