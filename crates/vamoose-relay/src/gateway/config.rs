//! What a gateway is told.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    num::NonZeroU64,
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use vamoose_link::{Address, Peers, Remote, SessionConfig};

use crate::Config;

/// How a gateway works.
#[derive(Clone)]
pub struct GatewayConfig {
    /// Where other gateways reach this one.
    pub listen: Vec<Address>,
    /// Where this host's QEMUs wait for migrations: the only address that is dialled for another gateway.
    pub alias: IpAddr,
    /// The ports at which they wait, on any host.
    pub ports: RangeInclusive<u16>,
    /// The other hosts.
    pub peers: Vec<Arc<GatewayPeer>>,
    /// Whose connections are taken at the aliases of other hosts.
    pub users: Peers,
    /// What is done with the pages of migrations from this host.
    pub outgoing: Config,
    /// What is done with those of migrations to it.
    pub incoming: Config,
    /// How sessions with other gateways that they begin behave.
    pub sessions: SessionConfig,
    /// How long migrations may go on when the gateway is to end.
    pub drain_timeout: Duration,
}

/// Another host, which has a gateway as well.
#[derive(Clone, Debug)]
pub struct GatewayPeer {
    /// What the operator calls it.
    pub name: String,
    /// The address of this host that stands for it: who connects there reaches the QEMU that waits at the same port on the peer.
    pub alias: IpAddr,
    /// Its gateway.
    pub remote: Remote,
    /// What it has to prove to be: its key, or a name in its certificate. `None` without authentication.
    pub identity: Option<String>,
    /// How many migrations to it there may be at once, and as many from it.
    pub migrations: usize,
    /// Bandwidth limit of each migration to it, in bytes per second.
    pub max_bandwidth: Option<NonZeroU64>,
}

impl GatewayConfig {
    /// The addresses at which sources of migrations connect.
    pub(super) fn doors(&self) -> BTreeSet<SocketAddr> {
        let aliases = self.peers.iter().map(|peer| peer.alias);
        let at = |alias| {
            let ports = self.ports.clone();
            ports.map(move |port| SocketAddr::new(alias, port))
        };
        aliases.flat_map(at).collect()
    }

    /// The peer that an alias stands for.
    pub(super) fn behind(&self, alias: IpAddr) -> Option<&Arc<GatewayPeer>> {
        self.peers.iter().find(|peer| peer.alias == alias)
    }

    /// The peer that has proved to be `identity`. Without authentication, whoever comes from its address.
    pub(super) fn who_is(&self, identity: Option<&str>, shown: &str) -> Option<&Arc<GatewayPeer>> {
        let is_it = |peer: &&Arc<GatewayPeer>| match (&peer.identity, identity) {
            (Some(expected), Some(proved)) => expected == proved,
            (None, None) => peer.remote.paths.iter().any(|path| match &path.to {
                Address::Tcp { host, .. } => host == shown,
                Address::Unix(_) => false,
            }),
            _ => false,
        };
        self.peers.iter().find(is_it)
    }

    /// Where the QEMU waits whose port this is; `None` if it is not one at which QEMUs wait.
    pub(super) fn waiting_at(&self, port: u16) -> Option<Address> {
        let host = self.alias.to_string();
        let is_there = self.ports.contains(&port);
        is_there.then_some(Address::Tcp { host, port })
    }
}
