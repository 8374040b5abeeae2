//! What a gateway is told.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    num::NonZeroU64,
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use vamoose_link::{Address, PageCaches, Peers, Remote, SessionConfig};

use super::endpoint::{Endpoint, Target};
use crate::Config;

/// How a gateway works.
#[derive(Clone)]
pub struct GatewayConfig {
    /// Where other gateways reach this one.
    pub listen: Vec<Address>,
    /// Where this host's QEMUs wait for migrations, if they do. Besides it, only addresses of streams are dialled for
    /// another gateway.
    pub alias: Option<IpAddr>,
    /// The ports at which they wait. libvirt takes a port only if nobody listens there, at whichever address of its host: the
    /// peers' ports have to be others.
    pub ports: RangeInclusive<u16>,
    /// The other hosts.
    pub peers: Vec<Arc<GatewayPeer>>,
    /// Sockets at both ends that are connected by name.
    pub streams: Vec<GatewayStream>,
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
    pub alias: Option<IpAddr>,
    /// The ports at which QEMUs wait there.
    pub ports: RangeInclusive<u16>,
    /// Its gateway.
    pub remote: Remote,
    /// What it has to prove to be: its key, or a name in its certificate. `None` without authentication.
    pub identity: Option<String>,
    /// How many migrations to it there may be at once, and as many from it.
    pub migrations: usize,
    /// Bandwidth limit of each migration to it, in bytes per second.
    pub max_bandwidth: Option<NonZeroU64>,
}

/// A socket here, and one at a peer, for the connections of a program that finds its own way there: who connects to one
/// reaches what listens on the other. Both hosts know it by its name, and each only its own addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayStream {
    /// The same on both hosts.
    pub name: Arc<str>,
    /// The peer, by its name: where connections go, and the only one from which they come.
    pub peer: String,
    /// Where programs of this host connect, if they do.
    pub listen: Option<Address>,
    /// What is connected to here for the peer, if it may.
    pub to: Option<Address>,
}

impl GatewayConfig {
    /// Has all sessions take the memory of their page caches from `caches`.
    #[must_use]
    pub fn sharing(mut self, caches: &PageCaches) -> Self {
        self.sessions.page_caches = caches.clone();
        for peer in &mut self.peers {
            Arc::make_mut(peer).remote.config.page_caches = caches.clone();
        }
        self
    }

    /// Where sources of migrations connect, and the addresses.
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

    /// Peers at whose ports QEMUs of this host may wait as well: where libvirt chooses ports, it finds none.
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

    /// The peer that a endpoint leads to.
    pub(super) fn behind(&self, endpoint: &Endpoint) -> Option<&Arc<GatewayPeer>> {
        match endpoint {
            Endpoint::Port(at) => self.peers.iter().find(|it| it.alias == Some(at.ip())),
            Endpoint::Stream(name) => {
                let stream = self.streams.iter().find(|it| it.name == *name)?;
                self.peers.iter().find(|it| it.name == stream.peer)
            }
        }
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

    /// What `peer` may be connected to by this target, or why there is nothing.
    pub(super) fn waiting_at(&self, target: &Target, peer: &str) -> Result<Address, String> {
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
