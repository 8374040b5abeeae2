//! How the demo's two processes connect: over a session, for which each makes a key, or over plain connections.
//!
//! Public keys are exchanged through the destination's standard input and output, so that the user needs no keys.

use std::{fs, io, path::PathBuf, process, thread, time::Duration};

use anyhow::{Context as _, Result};
use clap::Args;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use vamoose_live::{
    Acceptor, Address, Keys, Listener, Remote, Security, SessionConfig, Sessions, Transport,
};

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Connection")]
pub(crate) struct LinkOptions {
    /// Use neither authentication nor encryption [default: each side makes a key]
    #[arg(long)]
    insecure: bool,
    /// Use plain connections instead of a session: not authenticated, encrypted or checked, and none may be lost
    #[arg(long, conflicts_with = "insecure")]
    plain: bool,
    /// Give up after this many seconds without a connection; 0 does not survive the loss of one
    #[arg(
        long,
        default_value_t = 30,
        value_name = "SECONDS",
        conflicts_with = "plain"
    )]
    reconnect_timeout: u64,
}

/// Connections that the destination accepts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Link {
    Plain,
    Session {
        /// The source's public key; `None` without keys.
        key: Option<String>,
        reconnect_timeout: Duration,
    },
}

/// Where the destination listens.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Listening {
    pub(crate) address: String,
    /// Its public key.
    key: Option<String>,
}

/// This side's key, until it is dropped.
pub(crate) struct OwnKey {
    directory: TempDir,
    public: String,
}

impl LinkOptions {
    /// The link for the order to the destination, and the source's key.
    pub(crate) fn link(&self) -> Result<(Link, Option<OwnKey>)> {
        if self.plain {
            return Ok((Link::Plain, None));
        }
        let own = (!self.insecure).then(OwnKey::new).transpose()?;
        let link = Link::Session {
            key: own.as_ref().map(|own| own.public.clone()),
            reconnect_timeout: Duration::from_secs(self.reconnect_timeout),
        };
        Ok((link, own))
    }
}

impl Link {
    /// The transport to the listening destination.
    pub(crate) fn to(&self, there: &Listening, own: Option<&OwnKey>) -> Result<Transport> {
        let address: Address = there.address.parse()?;
        Ok(match self.session(there.key.as_deref(), own)? {
            None => Transport::Plain(address),
            Some(config) => Transport::Session(Remote {
                paths: vec![address.into()],
                config,
            }),
        })
    }

    /// The key that the destination needs.
    pub(crate) fn own_key(&self) -> Result<Option<OwnKey>> {
        match self {
            Self::Session { key: Some(_), .. } => OwnKey::new().map(Some),
            Self::Session { key: None, .. } | Self::Plain => Ok(None),
        }
    }

    /// Listens on `address`.
    pub(crate) fn listen(
        &self,
        address: &str,
        own: Option<&OwnKey>,
        stall_timeout: Duration,
    ) -> Result<(Acceptor, Listening)> {
        let listener = Listener::bind(&address.parse()?, stall_timeout)?;
        let listening = Listening {
            address: listener.address().to_string(),
            key: own.map(|own| own.public.clone()),
        };
        let key = match self {
            Self::Plain => None,
            Self::Session { key, .. } => key.as_deref(),
        };
        let acceptor = match self.session(key, own)? {
            None => Acceptor::Plain(listener),
            Some(config) => Acceptor::Sessions(Sessions::new(vec![listener], config)?),
        };
        Ok((acceptor, listening))
    }

    /// The configuration of sessions with the owner of `key`; `None` for plain connections.
    fn session(&self, key: Option<&str>, own: Option<&OwnKey>) -> Result<Option<SessionConfig>> {
        let Self::Session {
            reconnect_timeout, ..
        } = self
        else {
            return Ok(None);
        };
        let security = match own {
            None => Security::Insecure,
            Some(own) => Security::Keys(Keys {
                directory: own.directory.path().to_owned(),
                trusted: Some(vec![key.context("the other side has no key")?.parse()?]),
            }),
        };
        Ok(Some(SessionConfig {
            reconnect_timeout: *reconnect_timeout,
            ..SessionConfig::new(security)
        }))
    }
}

impl OwnKey {
    fn new() -> Result<Self> {
        let directory = TempDir::new().context("no directory for a key")?;
        let public = Keys::generate(directory.path())?.to_string();
        Ok(Self { directory, public })
    }
}

/// Ends this process and removes its key when the source has ended in any way.
pub(crate) fn end_with_the_source(own: Option<&OwnKey>) {
    let directory: Option<PathBuf> = own.map(|own| own.directory.path().to_owned());
    thread::spawn(move || {
        // An error is an end, too.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        // It may have been removed.
        let _ = directory.map(fs::remove_dir_all);
        process::exit(1);
    });
}
