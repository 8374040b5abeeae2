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
use vamoose_relay::{Config, Dialer, Relay};

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
    let accept = Sessions::new(vec![listener], sessions)?;
    let port = free(&request.ports).context("none of the source's ports is free on this host")?;
    let restores = Hardware::default().engines(Settings::default())?;
    let mut config = Config::new(MethodChoice::Fixed(restores));
    config.restore = true;
    config.layout = Layout::new(request.page_size)?;
    config.stall_timeout = stall_timeout;
    let ready = Ready {
        key,
        port,
        listen,
        address: reached_at(),
    };
    println!("{MARK}{}", serde_json::to_string(&ready)?);
    io::stdout().flush()?;
    let hangup = Hangup::new()?;
    thread::scope(|scope| {
        scope.spawn(|| {
            // The end of standard input means that `migrate` or ssh has ended.
            let _ = io::stdin().lock().read_to_end(&mut Vec::new());
            hangup.hang_up();
        });
        let result = Relay {
            accept: &accept,
            dialer: &Dialer::new(at(port)),
            config: &config,
            hangup: &hangup,
            stats: &Arc::default(),
            on_loaded: &|| (),
        }
        .run();
        match result {
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

fn free(ports: &[u16]) -> Option<u16> {
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    ports.iter().copied().find(is_free)
}

/// The server's address in sshd's variable, which has the addresses and ports of client and server.
fn reached_at() -> Option<String> {
    let connection = env::var("SSH_CONNECTION").ok()?;
    connection.split(' ').nth(2).map(str::to_owned)
}
