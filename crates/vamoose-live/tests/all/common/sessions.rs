//! Sessions of two hosts that know each other's keys.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tempfile::TempDir;
use vamoose_live::{
    Acceptor, Address, Destination, Keys, Listener, Remote, Transport,
    session::{Security, SessionConfig, Sessions},
};

use super::{address_of, listen, loopback, plain};

/// Two hosts with a key each.
pub(crate) struct Hosts {
    dir: Arc<TempDir>,
    pub(crate) near: SessionConfig,
    pub(crate) far: SessionConfig,
}

impl Hosts {
    /// Hosts that trust each other.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str| -> PathBuf { dir.path().join(name) };
        let near_key = Keys::generate(&folder("near")).unwrap();
        let far_key = Keys::generate(&folder("far")).unwrap();
        let config = |name, key| {
            SessionConfig::new(Security::Keys(Keys {
                directory: folder(name),
                trusted: Some(vec![key]),
            }))
        };
        Self {
            near: config("near", far_key),
            far: config("far", near_key),
            dir: Arc::new(dir),
        }
    }

    /// Hosts without keys, or with.
    pub(crate) fn insecure(is_insecure: bool) -> Self {
        let mut hosts = Self::new();
        if is_insecure {
            hosts.near.security = Security::Insecure;
            hosts.far.security = Security::Insecure;
        }
        hosts
    }

    /// The same keys, and trust of its own.
    pub(crate) fn twin(&self) -> Self {
        Self {
            dir: self.dir.clone(),
            near: self.near.clone(),
            far: self.far.clone(),
        }
    }

    /// Lets another near host connect to this far one, too.
    pub(crate) fn befriend(&mut self, other: &mut Self) {
        let other_key = Keys::public_key(&keys_of(&mut other.near).directory).unwrap();
        keys_of(&mut self.far)
            .trusted
            .get_or_insert_default()
            .push(other_key);
        let far_key = Keys::public_key(&keys_of(&mut self.far).directory).unwrap();
        keys_of(&mut other.near)
            .trusted
            .get_or_insert_default()
            .push(far_key);
    }

    /// The same, which give up after `timeout` without a connection.
    pub(crate) fn reconnecting_for(mut self, timeout: Duration) -> Self {
        self.near.reconnect_timeout = timeout;
        self.far.reconnect_timeout = timeout;
        self
    }

    /// Accepts sessions at the far host.
    pub(crate) fn acceptor(&self) -> Acceptor {
        let listener = Listener::bind(&loopback(), self.far.stall_timeout).unwrap();
        Acceptor::Sessions(Sessions::new(vec![listener], self.far.clone()).unwrap())
    }

    /// Sessions from the near host to `address`.
    pub(crate) fn to(&self, address: &Address) -> Transport {
        Transport::Session(self.remote(address))
    }

    pub(crate) fn remote(&self, address: &Address) -> Remote {
        Remote {
            paths: vec![address.clone().into()],
            config: self.near.clone(),
        }
    }
}

fn keys_of(config: &mut SessionConfig) -> &mut Keys {
    match &mut config.security {
        Security::Keys(keys) => keys,
        security => panic!("{security:?}"),
    }
}

/// Where a destination is to listen: for sessions of `hosts`, or for plain connections.
pub(crate) fn acceptor_for(hosts: Option<&Hosts>) -> Acceptor {
    hosts.map_or_else(|| listen(&loopback()), Hosts::acceptor)
}

/// The way to such a destination.
pub(crate) fn way_to(hosts: Option<&Hosts>, destination: &Destination) -> Transport {
    let address = address_of(destination);
    hosts.map_or_else(|| plain(&address), |hosts| hosts.to(&address))
}
