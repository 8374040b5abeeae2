//! The configuration of a gateway.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    num::NonZeroU64,
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use vamoose_link::{Address, Limit, PageCaches, PageStore, Peers, Remote, SessionConfig};

use super::endpoint::{Endpoint, Target};
use crate::Config;

/// The configuration of a gateway.
#[derive(Clone)]
pub struct GatewayConfig {
    /// Addresses at which other gateways reach this one.
    pub listen: Vec<Address>,
    /// Address at which this host's QEMUs wait for migrations. Only it and the targets of streams are dialled for another gateway.
    pub alias: Option<IpAddr>,
    /// Ports at which they wait. They must differ from the peers' ports: libvirt uses only ports that are free at all addresses.
    pub ports: RangeInclusive<u16>,
    /// The other hosts.
    pub peers: Vec<Arc<GatewayPeer>>,
    /// Sockets at both ends that are connected by name.
    pub streams: Vec<GatewayStream>,
    /// Users whose connections are accepted at the aliases of other hosts.
    pub users: Peers,
    /// Relay configuration of migrations from this host.
    pub outgoing: Config,
    /// Relay configuration of migrations to this host.
    pub incoming: Config,
    /// Configuration of sessions that other gateways begin.
    pub sessions: SessionConfig,
    /// How long migrations may continue after [`Gateway::drain`](super::Gateway::drain).
    pub drain_timeout: Duration,
}

/// Another host with a gateway.
#[derive(Clone, Debug)]
pub struct GatewayPeer {
    /// The operator's name for it.
    pub name: String,
    /// Address of this host that stands for the peer: a connection to it reaches the QEMU that waits at the same port there.
    pub alias: Option<IpAddr>,
    /// The ports at which QEMUs wait there.
    pub ports: RangeInclusive<u16>,
    /// Its gateway.
    pub remote: Remote,
    /// Required identity: its key, or a name in its certificate. `None` without authentication.
    pub identity: Option<String>,
    /// Limit of concurrent migrations, in each direction.
    pub migrations: usize,
    /// Bandwidth limit of each migration to it, in bytes per second.
    pub max_bandwidth: Option<NonZeroU64>,
}

/// A local socket whose connections reach a socket of a peer. Both hosts know the stream's name, and only their own addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayStream {
    /// The name, on both hosts.
    pub name: Arc<str>,
    /// The only peer to which, and from which, connections lead.
    pub peer: String,
    /// Address at which programs of this host connect.
    pub listen: Option<Address>,
    /// Address of this host that the peer's connections reach.
    pub to: Option<Address>,
}

impl GatewayConfig {
    /// Lets all sessions take the memory of their page caches from `caches` and share the pages in `store`, and all migrations of a
    /// direction, outgoing and incoming, keep to its limit.
    #[must_use]
    pub fn sharing(
        mut self,
        caches: &PageCaches,
        store: Option<&PageStore>,
        [outgoing, incoming]: [&Limit; 2],
    ) -> Self {
        self.outgoing.limit = outgoing.clone();
        self.sessions.limit = incoming.clone();
        let share = |config: &mut SessionConfig| {
            config.page_caches = caches.clone();
            config.page_store = store.cloned();
        };
        share(&mut self.sessions);
        for peer in &mut self.peers {
            share(&mut Arc::make_mut(peer).remote.config);
        }
        self
    }

    /// Endpoints for sources of migrations, with their addresses.
    pub(super) fn endpoints(&self) -> HashMap<Endpoint, Address> {
        let aliases = self
            .peers
            .iter()
            .filter_map(|peer| Some((peer.alias?, &peer.ports)));
        let ports = aliases.flat_map(|(alias, ports)| {
            ports.clone().map(move |port| {
                let endpoint = Endpoint::Port(SocketAddr::new(alias, port));
                let host = alias.to_string();
                (endpoint, Address::Tcp { host, port })
            })
        });
        let streams = self.streams.iter().filter_map(|stream| {
            let listen = stream.listen.clone()?;
            Some((Endpoint::Stream(stream.name.clone()), listen))
        });
        ports.chain(streams).collect()
    }

    /// Peers whose ports overlap this host's: libvirt finds no free port for a migration to them.
    pub fn peers_with_own_ports(&self) -> impl Iterator<Item = &GatewayPeer> {
        let (own, has_alias) = (&self.ports, self.alias.is_some());
        let overlap =
            |its: &RangeInclusive<u16>| its.start() <= own.end() && own.start() <= its.end();
        let peers = self.peers.iter().map(|peer| &**peer);
        peers.filter(move |peer| has_alias && peer.alias.is_some() && overlap(&peer.ports))
    }

    /// Peers to which migrations or connections of this host lead.
    pub fn dialled(&self) -> impl Iterator<Item = &GatewayPeer> {
        let peers = self.peers.iter().map(|peer| &**peer);
        peers.filter(|peer| {
            let mut streams = self.streams.iter();
            peer.alias.is_some() || streams.any(|it| it.peer == peer.name && it.listen.is_some())
        })
    }

    /// The peer that an endpoint leads to.
    pub(super) fn peer_at(&self, endpoint: &Endpoint) -> Option<&Arc<GatewayPeer>> {
        match endpoint {
            Endpoint::Port(at) => self.peers.iter().find(|it| it.alias == Some(at.ip())),
            Endpoint::Stream(name) => {
                let stream = self.streams.iter().find(|it| it.name == *name)?;
                self.peers.iter().find(|it| it.name == stream.peer)
            }
        }
    }

    /// The peer with this authenticated identity. Without authentication, the peer with this address.
    pub(super) fn identify(
        &self,
        identity: Option<&str>,
        shown: &str,
    ) -> Option<&Arc<GatewayPeer>> {
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

    /// Local address of the target for `peer`, or the reason why there is none.
    pub(super) fn address_of(&self, target: &Target, peer: &str) -> Result<Address, String> {
        match target {
            Target::Port(port) => {
                let alias = self.alias.ok_or("no QEMUs wait for migrations here")?;
                let (first, last) = (self.ports.start(), self.ports.end());
                if !self.ports.contains(port) {
                    return Err(format!("QEMUs wait at ports {first} to {last} here"));
                }
                let (host, port) = (alias.to_string(), *port);
                Ok(Address::Tcp { host, port })
            }
            Target::Stream(name) => {
                let is_it = |it: &&GatewayStream| it.name == *name && it.peer == peer;
                let to = self.streams.iter().find(is_it).and_then(|it| it.to.clone());
                to.ok_or_else(|| format!("there is no stream {name} from {peer} to here"))
            }
        }
    }
}
