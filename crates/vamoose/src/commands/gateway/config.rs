//! The gateway's configuration file.

use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    num::{NonZeroU64, NonZeroUsize},
    ops::RangeInclusive,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use vamoose_codec::Settings;
use vamoose_link::{
    Address, AddressError, Certificates, Keys, MethodChoice, Peers, PublicKey, Remote, Security,
    SessionConfig,
};
use vamoose_relay::{Config, GatewayConfig, GatewayPeer, GatewayStream};

use vamoose::{
    link::{page_caches, paths},
    options::{Hardware, MethodName, Text},
    security::keys_directory,
    values::{Rate, Size},
};

/// Settings of a gateway.
pub(super) struct GatewaySettings {
    pub(super) config: GatewayConfig,
    /// Address at which to serve metrics.
    pub(super) metrics: Option<Address>,
    /// Memory for the page caches of all migrations.
    pub(super) page_caches: usize,
    /// Limit of all migrations together, in each direction.
    pub(super) max_bandwidth: Option<NonZeroU64>,
    /// Memory for the page store; 0 without one.
    pub(super) page_store: usize,
    /// Patterns of the names of guests that share pages.
    pub(super) page_store_groups: Vec<String>,
}

/// The keys of the file; docs/gateway.md explains them.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct File {
    #[serde(default)]
    listen: Vec<Text<Endpoint>>,
    alias: Option<IpAddr>,
    ports: Option<Text<Ports>>,
    users: Option<Vec<String>>,
    keys: Option<PathBuf>,
    tls_creds: Option<PathBuf>,
    #[serde(default)]
    insecure: bool,
    method: Option<Text<MethodName>>,
    level: Option<i32>,
    page_cache: Option<Text<Size>>,
    page_caches: Option<Text<Size>>,
    max_bandwidth: Option<Text<Rate>>,
    page_store: Option<Text<Size>>,
    #[serde(default)]
    page_store_groups: Vec<String>,
    /// In seconds, like `stall_timeout`.
    reconnect_timeout: Option<u64>,
    stall_timeout: Option<NonZeroU64>,
    metrics: Option<Text<Endpoint>>,
    #[serde(default)]
    peers: BTreeMap<String, Peer>,
    #[serde(default)]
    streams: BTreeMap<String, Stream>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Peer {
    alias: Option<IpAddr>,
    ports: Option<Text<Ports>>,
    to: Vec<Text<Endpoint>>,
    #[serde(default)]
    bind: Vec<IpAddr>,
    key: Option<Text<PublicKey>>,
    certificate: Option<String>,
    migrations: Option<NonZeroUsize>,
    max_bandwidth: Option<Text<Rate>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Stream {
    peer: String,
    listen: Option<Text<Endpoint>>,
    to: Option<Text<Endpoint>>,
}

/// An address, as a URI of QEMU or as HOST:PORT.
#[derive(Clone, Debug)]
struct Endpoint(Address);

impl FromStr for Endpoint {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let has_scheme = text.starts_with("tcp:") || text.starts_with("unix:");
        let scheme = if has_scheme { "" } else { "tcp:" };
        format!("{scheme}{text}").parse().map(Self)
    }
}

fn address(Text(Endpoint(address)): &Text<Endpoint>) -> Address {
    address.clone()
}

/// A range of ports, as FIRST-LAST.
#[derive(Clone, Debug)]
struct Ports(RangeInclusive<u16>);

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ports = || {
            let (first, last) = text.split_once('-')?;
            let ports: RangeInclusive<u16> =
                first.trim().parse().ok()?..=last.trim().parse().ok()?;
            (*ports.start() > 0 && !ports.is_empty()).then_some(Self(ports))
        };
        ports().ok_or_else(|| format!("`{text}` is no range: write FIRST-LAST"))
    }
}

/// Users that distributions run QEMU as, under libvirt.
const USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

impl File {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).with_context(|| path.display().to_string())
    }

    fn stall_timeout(&self) -> Duration {
        Duration::from_secs(self.stall_timeout.map_or(15, NonZeroU64::get))
    }

    /// The settings of the gateway, with these devices.
    pub(super) fn settings(
        &self,
        hardware: &Hardware,
        drain_timeout: Duration,
    ) -> Result<GatewaySettings> {
        ensure!(
            !self.listen.is_empty(),
            "listen: other gateways need an address"
        );
        let method = self.method.as_ref().map_or(MethodName::Auto, |it| it.0);
        let mut outgoing = Config::new(method.choose(self.level, hardware)?);
        let restores = hardware.engines(Settings::default())?;
        let mut incoming = Config::new(MethodChoice::Fixed(restores));
        incoming.restore = true;
        outgoing.stall_timeout = self.stall_timeout();
        incoming.stall_timeout = self.stall_timeout();
        let takes_store = outgoing.takes_store();
        let peers = self.peers.iter().map(|(name, peer)| {
            let peer = self.peer(name, peer).map(|mut peer| {
                peer.remote.config.takes_store = takes_store;
                peer
            });
            peer.map(Arc::new).with_context(|| format!("peer {name}"))
        });
        let streams = self.streams.iter().map(|(name, it)| {
            let stream = self.stream(name, it);
            stream.with_context(|| format!("stream {name}"))
        });
        let all: Vec<_> = self.peers.iter().collect();
        let config = GatewayConfig {
            peers: peers.collect::<Result<_>>()?,
            streams: streams.collect::<Result<_>>()?,
            listen: self.listen.iter().map(address).collect(),
            alias: self.alias,
            ports: ports(self.ports.as_ref(), self.alias),
            users: users(self.users.as_deref()).context("users")?,
            outgoing,
            incoming,
            sessions: self.sessions(self.security(&all, None)?),
            drain_timeout,
        };
        check(&config)?;
        Ok(GatewaySettings {
            config,
            metrics: self.metrics.as_ref().map(address),
            page_caches: page_caches(self.page_caches.as_ref().map(|size| size.0)),
            max_bandwidth: self.max_bandwidth.as_ref().map(|Text(rate)| rate.0),
            page_store: self
                .page_store
                .as_ref()
                .map_or(0, |size| size.0.in_memory()),
            page_store_groups: self.page_store_groups.clone(),
        })
    }

    fn peer(&self, name: &String, peer: &Peer) -> Result<GatewayPeer> {
        let to: Vec<_> = peer.to.iter().map(address).collect();
        ensure!(!to.is_empty(), "to: an address is needed");
        let paths = paths(&to, &peer.bind);
        let security = self.security(&[(name, peer)], Some(certificate_name(name, peer)))?;
        let identity = match &security {
            Security::Certificates(certificates) => certificates.server_name.clone(),
            Security::Keys(_) => peer.key.as_ref().map(|key| key.0.to_string()),
            _ => None,
        };
        Ok(GatewayPeer {
            name: name.clone(),
            alias: peer.alias,
            ports: ports(peer.ports.as_ref(), peer.alias),
            remote: Remote {
                paths: paths.context("bind: one for each address of `to`, or none")?,
                config: self.sessions(security),
            },
            identity,
            migrations: peer.migrations.map_or(16, NonZeroUsize::get),
            max_bandwidth: peer.max_bandwidth.as_ref().map(|Text(rate)| rate.0),
        })
    }

    fn stream(&self, name: &str, stream: &Stream) -> Result<GatewayStream> {
        let peer = &stream.peer;
        ensure!(self.peers.contains_key(peer), "there is no peer {peer}");
        ensure!(
            stream.listen.is_some() || stream.to.is_some(),
            "`listen` is needed where connections begin, `to` where they lead"
        );
        let local = |endpoint: &Option<Text<Endpoint>>| {
            let address = endpoint.as_ref().map(address);
            if let Some(address) = &address {
                ensure!(address.is_local(), "{address} is not this host's alone");
            }
            Ok(address)
        };
        Ok(GatewayStream {
            name: name.into(),
            peer: peer.clone(),
            listen: local(&stream.listen).context("listen")?,
            to: local(&stream.to).context("to")?,
        })
    }

    /// Authentication of these peers. For a peer that this host dials, `server_name` is the name in its certificate.
    fn security(
        &self,
        peers: &[(&String, &Peer)],
        server_name: Option<String>,
    ) -> Result<Security> {
        if self.insecure {
            ensure!(
                self.keys.is_none() && self.tls_creds.is_none(),
                "insecure: neither keys nor tls-creds have an effect then"
            );
            return Ok(Security::Insecure);
        }
        if let Some(directory) = &self.tls_creds {
            ensure!(self.keys.is_none(), "keys and tls-creds: choose one");
            let names = peers
                .iter()
                .map(|(name, peer)| certificate_name(name, peer));
            return Ok(Security::Certificates(Certificates {
                directory: directory.clone(),
                allow: Some(names.collect()),
                server_name,
            }));
        }
        let keys = peers.iter().map(|(name, peer)| {
            let key = peer.key.as_ref().map(|key| key.0);
            key.with_context(|| {
                format!("peer {name}: its key is missing; `vamoose keys show` prints it there")
            })
        });
        Ok(Security::Keys(Keys {
            directory: keys_directory(self.keys.clone())?,
            trusted: Some(keys.collect::<Result<_>>()?),
        }))
    }

    fn sessions(&self, security: Security) -> SessionConfig {
        let mut sessions = SessionConfig::new(security);
        if let Some(seconds) = self.reconnect_timeout {
            sessions.reconnect_timeout = Duration::from_secs(seconds);
        }
        sessions.stall_timeout = self.stall_timeout();
        if let Some(Text(size)) = self.page_cache {
            sessions.page_cache = size.in_memory();
        }
        sessions
    }
}

fn certificate_name(name: &str, peer: &Peer) -> String {
    peer.certificate.clone().unwrap_or_else(|| name.to_owned())
}

/// The configured ports, or the default ports for this alias.
fn ports(configured: Option<&Text<Ports>>, alias: Option<IpAddr>) -> RangeInclusive<u16> {
    configured.map_or_else(|| ports_of(alias), |ports| ports.0.0.clone())
}

/// Each host has 64 ports of its own, by the last number of its alias, 1 to 255. The ports for 1 are libvirt's default.
fn ports_of(alias: Option<IpAddr>) -> RangeInclusive<u16> {
    const FIRST: u16 = 49_152;
    const COUNT: u16 = 64;
    let last = match alias {
        Some(IpAddr::V4(alias)) => alias.octets()[3],
        Some(IpAddr::V6(alias)) => alias.octets()[15],
        None => 1,
    };
    let first = FIRST + COUNT * u16::from(last.wrapping_sub(1));
    first..=first + (COUNT - 1)
}

/// The existing users that QEMU may run as.
pub(crate) fn qemu_users() -> Vec<u32> {
    USERS.into_iter().filter_map(uid).collect()
}

/// The number of a user, who is given by name or by number.
pub(crate) fn uid(user: &str) -> Option<u32> {
    let by_name = || uid_in(&fs::read_to_string("/etc/passwd").ok()?, user);
    user.parse().ok().or_else(by_name)
}

/// Users whose connections are accepted, besides root and the user of this process. Named users must exist.
fn users(named: Option<&[String]>) -> Result<Peers> {
    let number = |name: &String| {
        uid(name).with_context(|| format!("there is no `{name}` in /etc/passwd: give a number"))
    };
    Ok(Peers::own_and(match named {
        None => qemu_users(),
        Some(named) => named.iter().map(number).collect::<Result<_>>()?,
    }))
}

fn uid_in(passwd: &str, name: &str) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    })
}

/// Checks that each alias and each key belongs to one host. A host without an alias can be reached by streams only.
fn check(config: &GatewayConfig) -> Result<()> {
    check_loopback(config.alias)?;
    for (at, peer) in config.peers.iter().enumerate() {
        let name = &peer.name;
        check_loopback(peer.alias).with_context(|| format!("peer {name}"))?;
        if let Some(alias) = peer.alias {
            ensure!(
                peer.alias != config.alias,
                "peer {name}: {alias} is this host's own alias"
            );
            ensure!(
                config.alias.is_some(),
                "peer {name} has an alias: this host needs one, too"
            );
        } else {
            let has_stream = config.streams.iter().any(|it| it.peer == *name);
            ensure!(
                has_stream,
                "peer {name}: it has neither an alias nor a stream"
            );
        }
        for other in &config.peers[..at] {
            let both = format!("peers {} and {name}", other.name);
            let has_same_alias = peer.alias.is_some() && other.alias == peer.alias;
            ensure!(!has_same_alias, "{both} have the same alias");
            let has_same_key = peer.identity.is_some() && other.identity == peer.identity;
            ensure!(!has_same_key, "{both} have the same key");
        }
    }
    Ok(())
}

/// An alias must not be reachable from other hosts: QEMUs that wait there accept migrations from any client.
fn check_loopback(alias: Option<IpAddr>) -> Result<()> {
    if let Some(alias) = alias {
        ensure!(
            alias.is_loopback(),
            "alias: other hosts can reach {alias}: choose an address in 127.0.0.0/8"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    const KEY: &str = "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=";

    fn hardware() -> Hardware {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            hardware: Hardware,
        }
        Line::parse_from(["vamoose"]).hardware
    }

    fn load(text: &str) -> Result<GatewayConfig> {
        let file: File = toml::from_str(text)?;
        let settings = file.settings(&hardware(), Duration::from_secs(1))?;
        Ok(settings.config)
    }

    /// The example in docs/gateway.md.
    fn short() -> String {
        format!(
            "listen = [\"10.0.0.1:4440\"]\nalias = \"127.77.0.1\"\n\
             peers.kvm2 = {{ alias = \"127.77.0.2\", to = [\"10.0.0.2:4440\"], key = \"{KEY}\" }}\n"
        )
    }

    #[test]
    fn three_lines_are_enough() {
        let config = load(&short()).unwrap();
        assert_eq!(config.ports, 49_152..=49_215);
        assert_eq!(config.outgoing.method.name(), "auto");
        assert_eq!(config.incoming.method.name(), "none");
        let peer = &config.peers[0];
        assert_eq!(peer.name, "kvm2");
        assert_eq!(peer.ports, 49_216..=49_279);
        assert_eq!(peer.identity.as_deref(), Some(KEY));
        assert_eq!(peer.remote.paths[0].to.to_string(), "tcp:10.0.0.2:4440");
        let Security::Keys(keys) = &config.sessions.security else {
            panic!("{:?}", config.sessions.security);
        };
        assert_eq!(keys.trusted, Some(vec![KEY.parse().unwrap()]));
    }

    #[test]
    fn each_host_has_ports_of_its_own() {
        for (alias, expected) in [
            ("127.77.0.1", 49_152..=49_215),
            ("127.77.3.255", 65_408..=65_471),
            ("127.77.0.0", 65_472..=65_535),
            ("fd00::3", 49_280..=49_343),
        ] {
            assert_eq!(ports_of(Some(alias.parse().unwrap())), expected, "{alias}");
        }
        let same = short().replace("to = [", "ports = \"49200-49300\", to = [");
        let config = load(&same).unwrap();
        let same: Vec<_> = config
            .peers_with_own_ports()
            .map(|peer| &peer.name)
            .collect();
        assert_eq!(same, ["kvm2"]);
        assert!(
            load(&short())
                .unwrap()
                .peers_with_own_ports()
                .next()
                .is_none()
        );
    }

    /// The file `trusted` is ignored: a peer that is removed from the configuration is no longer trusted.
    #[test]
    fn without_peers_no_key_is_trusted() {
        let head = "listen = [\"10.0.0.1:4440\"]\nalias = \"127.77.0.1\"\n";
        match load(head).unwrap().sessions.security {
            Security::Keys(keys) => assert_eq!(keys.trusted, Some(Vec::new())),
            other => panic!("{other:?}"),
        }
        let text = format!("{head}tls-creds = \"/pki\"\n");
        match load(&text).unwrap().sessions.security {
            Security::Certificates(it) => assert_eq!(it.allow, Some(Vec::new())),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_packages_example_is_valid_without_its_comment_signs() {
        let example = include_str!("../../../../../packaging/gateway.toml");
        let setting = |line: &str| Some(line.strip_prefix('#')?.to_owned() + "\n");
        let settings = example.lines().filter_map(setting);
        let settings: String = settings.filter(|line| !line.starts_with(' ')).collect();
        let config = load(&settings.replace("ed25519:KEY_OF_192.0.2.20", KEY)).unwrap();
        assert_eq!(config.peers[0].name, "kvm2");
        assert_eq!(config.listen[0].to_string(), "tcp:192.0.2.10:4440");
    }

    #[test]
    fn wrong_settings_are_reported() {
        let with = |line: &str| format!("{line}\n{}", short());
        let second = |rest: &str| format!("{}peers.kvm3 = {{ {rest} }}\n", short());
        let other = "key = \"ed25519:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\"";
        for (text, problem) in [
            (with("portz = \"1-2\""), "portz"),
            (with("ports = \"2-1\""), "no range"),
            (with("ports = \"0-1\""), "no range"),
            (with("method = \"zip\""), "zip"),
            (
                with("users = [\"nobody-of-this-name\"]"),
                "nobody-of-this-name",
            ),
            (with("insecure = true\nkeys = \"/k\""), "insecure"),
            (short().replace(", key", ", kay"), "kay"),
            (short().replace(KEY, "ed25519:x"), "ed25519:x"),
            (short().replace("127.77.0.2", "127.77.0.1"), "own alias"),
            (
                short().replace("127.77.0.1", "10.0.0.1"),
                "alias: other hosts can reach 10.0.0.1",
            ),
            (
                short().replace("127.77.0.2", "0.0.0.0"),
                "peer kvm2: alias: other hosts can reach 0.0.0.0",
            ),
            (
                short().replace("10.0.0.2:4440", "10.0.0.2"),
                "port is missing",
            ),
            (
                second("alias = \"127.77.0.3\", to = [\"h:1\"]"),
                "peer kvm3: its key is missing",
            ),
            (
                second(&format!("alias = \"127.77.0.2\", to = [\"h:1\"], {other}")),
                "same alias",
            ),
            (
                second(&format!(
                    "alias = \"127.77.0.3\", to = [\"h:1\"], key = \"{KEY}\""
                )),
                "same key",
            ),
            (
                second(&format!("alias = \"127.77.0.3\", to = [], {other}")),
                "an address is needed",
            ),
            (
                short().replace("alias = \"127.77.0.1\"\n", ""),
                "this host needs one, too",
            ),
            (
                second(&format!("to = [\"h:1\"], {other}")),
                "neither an alias nor a stream",
            ),
            (
                with("streams.x = { peer = \"kvm9\", to = \"unix:/x\" }"),
                "stream x: there is no peer kvm9",
            ),
            (
                with("streams.x = { peer = \"kvm2\" }"),
                "stream x: `listen`",
            ),
            (
                with("streams.x = { peer = \"kvm2\", to = \"10.0.0.9:1\" }"),
                "not this host's alone",
            ),
        ] {
            let error = format!("{:#}", load(&text).map(drop).unwrap_err());
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    /// The example in docs/cloud-hypervisor.md.
    #[test]
    fn a_host_with_streams_alone_needs_no_alias() {
        let text = short()
            .replace("alias = \"127.77.0.1\"\n", "")
            .replace("alias = \"127.77.0.2\", ", "");
        let text = format!("{text}streams.x = {{ peer = \"kvm2\", listen = \"unix:/x\" }}\n");
        let config = load(&text).unwrap();
        let stream = &config.streams[0];
        assert_eq!((&*stream.name, &*stream.peer), ("x", "kvm2"));
        assert_eq!(stream.listen, Some("unix:/x".parse().unwrap()));
        assert_eq!(stream.to, None);
    }

    #[test]
    fn users_are_found_by_name() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nlibvirt-qemu:x:64055:994::/:/bin/false\n";
        assert_eq!(uid_in(passwd, "libvirt-qemu"), Some(64_055));
        assert_eq!(uid_in(passwd, "libvirt"), None);
    }
}
