//! `vamoose libvirt receive`, which `vamoose libvirt migrate` starts on the other host over ssh: a relay for one migration.
//!
//! ```text
//!  migrate                                     receive, on the other host
//!     Request, a line ────── stdin ───────────────>  chooses a port at which its QEMU can wait, and listens for the relay
//!     Ready, a line after MARK <─── stdout ────────
//!     the end of stdin ─────────────────────────> ends
//! ```

use std::{
    env,
    io::{self, BufRead as _, Read as _, Write as _},
    net::{Ipv4Addr, TcpListener},
    process,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Error, Result, bail};
use multifd::Layout;
use serde::{Deserialize, Serialize};
use vamoose_codec::Settings;
use vamoose_link::{
    Address, Hangup, Listener, MethodChoice, OneTimeKey, Peers, PublicKey, Security, SessionConfig,
    Sessions,
};
use vamoose_relay::{Accept as _, Config, Dialer, Relay, SortedStreams};

use vamoose::options::Hardware;

/// Request of the source's host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    /// Public key of the source's host.
    pub(super) key: String,
    /// Loopback ports that `migrate` has bound on its host.
    pub(super) ports: Vec<u16>,
    /// Port at which to listen for the other relay; 0 for any.
    pub(super) listen: u16,
    /// Whether libvirt copies disks.
    pub(super) disks: bool,
    pub(super) page_size: u32,
    /// Seconds.
    pub(super) stall_timeout: u64,
}

/// Answer to a [`Request`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ready {
    pub(super) key: String,
    /// One of the offered ports, which is free on this host's loopback as well.
    pub(super) port: u16,
    /// Another one, for the NBD server of the guest's disks.
    pub(super) disks_port: Option<u16>,
    /// Port at which this relay listens.
    pub(super) listen: u16,
    /// Address of this host that ssh has connected to.
    pub(super) address: Option<String>,
}

/// Prefix of the line with [`Ready`]; a login shell may print other lines.
pub(super) const MARK: &str = "vamoose-ready ";

pub(super) fn run() -> Result<()> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    let request: Request = serde_json::from_str(&line)
        .context("`vamoose libvirt migrate` of another version has started this")?;
    let stall_timeout = Duration::from_secs(request.stall_timeout);
    let own = OneTimeKey::generate()?;
    let peer: PublicKey = request.key.parse()?;
    let key = own.public().to_string();
    let listener = listen(request.listen, stall_timeout)?;
    let &Address::Tcp { port: listen, .. } = listener.address() else {
        bail!("a TCP socket without a port");
    };
    let sessions = SessionConfig {
        stall_timeout,
        ..SessionConfig::new(Security::OneTime { own, peer })
    };
    let accept = SortedStreams::new(Sessions::new(vec![listener], sessions)?)?;
    let mut ports = request.ports.iter().copied().filter(is_free);
    let mut free_port = || {
        let port = ports.next();
        port.context("of the source's ports, too few are free on this host")
    };
    let port = free_port()?;
    let disks_port = request.disks.then(free_port).transpose()?;
    let restores = Hardware::default().engines(Settings::default())?;
    let mut config = Config::new(MethodChoice::Fixed(restores));
    config.restore = true;
    config.layout = Layout::new(request.page_size)?;
    config.stall_timeout = stall_timeout;
    let ready = Ready {
        key,
        port,
        disks_port,
        listen,
        address: reached_at(),
    };
    println!("{MARK}{}", serde_json::to_string(&ready)?);
    io::stdout().flush()?;
    let (hangup, stats) = (Hangup::new()?, Arc::default());
    let (dialer, disks) = (
        Dialer::new(at(port)),
        disks_port.map(|it| Dialer::new(at(it))),
    );
    let relay = Relay {
        accept: &accept,
        dialer: &dialer,
        config: &config,
        hangup: &hangup,
        stats: &stats,
        reached: &|_| (),
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            // The end of standard input means that `migrate` or ssh has ended.
            let _ = io::stdin().lock().read_to_end(&mut Vec::new());
            hangup.hang_up();
        });
        if let Some(dialer) = &disks {
            let accept = &accept.bytes;
            scope.spawn(move || {
                Relay {
                    accept,
                    dialer,
                    ..relay
                }
                .pass_bytes()
            });
        }
        match relay.run() {
            Ok(_) => {
                accept.drain(stall_timeout);
                // The other thread still waits for the end of standard input, so this thread cannot return.
                process::exit(0);
            }
            // `migrate` or ssh has ended, and reports the reason.
            Err(_) if hangup.is_hung_up() => Ok(()),
            Err(error) => {
                eprintln!("vamoose: {:#}", Error::from(error));
                process::exit(1);
            }
        }
    })
}

/// The loopback address at which a QEMU and its relay meet.
pub(super) fn at(port: u16) -> Address {
    Address::Tcp {
        host: Ipv4Addr::LOCALHOST.to_string(),
        port,
    }
}

/// Listens on all addresses; keys decide who may connect.
fn listen(port: u16, stall_timeout: Duration) -> Result<Listener> {
    let bind = |host: &str| {
        let host = host.to_owned();
        Listener::bind_for(&Address::Tcp { host, port }, stall_timeout, Peers::anyone())
    };
    Ok(bind("::").or_else(|_| bind("0.0.0.0"))?)
}

fn is_free(port: &u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()
}

/// The server's address in sshd's variable, which has the addresses and ports of client and server.
fn reached_at() -> Option<String> {
    let connection = env::var("SSH_CONNECTION").ok()?;
    connection.split(' ').nth(2).map(str::to_owned)
}
