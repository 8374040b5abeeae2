//! How the demo's two processes connect: over a session, or over plain connections.
//!
//! The source makes a key for each side, so that the user needs none.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use clap::Args;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use vamoose_live::{
    Acceptor, Address, Keys, Listener, Remote, Transport,
    session::{Security, SessionConfig, Sessions},
};

#[derive(Args, Clone, Debug, Serialize, Deserialize)]
#[command(next_help_heading = "Connection")]
pub(crate) struct LinkOptions {
    /// Use neither authentication nor encryption [default: each side gets a key]
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

/// One side of the link.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Link {
    options: LinkOptions,
    /// Folder of this side's key, and public key of the other side; `None` without authentication.
    keys: Option<(PathBuf, String)>,
}

impl LinkOptions {
    /// Source and destination of the link, and the folder of their new keys, which is removed on drop.
    pub(crate) fn sides(&self) -> Result<([Link; 2], TempDir)> {
        let folder = TempDir::new().context("no directory for keys")?;
        let keys = if self.plain || self.insecure {
            [None, None]
        } else {
            let [source, destination] =
                ["source", "destination"].map(|side| folder.path().join(side));
            let of_source = Keys::generate(&source)?.to_string();
            let of_destination = Keys::generate(&destination)?.to_string();
            [
                Some((source, of_destination)),
                Some((destination, of_source)),
            ]
        };
        let side = |keys| Link {
            options: self.clone(),
            keys,
        };
        Ok((keys.map(side), folder))
    }
}

impl Link {
    /// The transport to the listening destination.
    pub(crate) fn to(&self, address: &str) -> Result<Transport> {
        let address: Address = address.parse()?;
        Ok(match self.session()? {
            None => Transport::Plain(address),
            Some(config) => Transport::Session(Remote {
                paths: vec![address.into()],
                config,
            }),
        })
    }

    /// Listens on `address`; also returns the address with its port.
    pub(crate) fn listen(
        &self,
        address: &str,
        stall_timeout: Duration,
    ) -> Result<(Acceptor, String)> {
        let listener = Listener::bind(&address.parse()?, stall_timeout)?;
        let address = listener.address().to_string();
        let acceptor = match self.session()? {
            None => Acceptor::Plain(listener),
            Some(config) => Acceptor::Sessions(Sessions::new(vec![listener], config)?),
        };
        Ok((acceptor, address))
    }

    /// The configuration of sessions; `None` for plain connections.
    fn session(&self) -> Result<Option<SessionConfig>> {
        if self.options.plain {
            return Ok(None);
        }
        let security = match &self.keys {
            None => Security::Insecure,
            Some((directory, trusted)) => Security::Keys(Keys {
                directory: directory.clone(),
                trusted: Some(vec![trusted.parse()?]),
            }),
        };
        Ok(Some(SessionConfig {
            reconnect_timeout: Duration::from_secs(self.options.reconnect_timeout),
            ..SessionConfig::new(security)
        }))
    }
}
