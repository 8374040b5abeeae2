//! A network on which clients reach a guest, whichever of two hosts it runs on.
//!
//! ```text
//!  namespace of the source      namespace of the clients      namespace of the destination
//!  QEMU ─ tap ─┐                                                ┌─ tap ─ QEMU
//!            bridge ──────────────── bridge ──────────────── bridge
//!                                 10.78.0.1
//! ```
//!
//! It shares nothing with the wires of the migration. Bridges learn from packets where the guest is; QEMU sends an announcement
//! after the migration.

use std::net::Ipv4Addr;

use anyhow::Result;

use super::{Link, Namespace};
use crate::qemu::Builder;

/// A network between the hosts of a [`Link`] and a third namespace. Dropping it, and the link, removes it.
#[derive(Debug)]
pub struct Lan {
    /// Where the clients run.
    pub clients: Namespace,
}

impl Lan {
    /// The address that a guest should take; the network is of 24 bits.
    pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);

    /// Makes the network for the hosts of `link`, with a device for a guest on each.
    pub fn new(link: &Link) -> Result<Self> {
        let address = Ipv4Addr::new(10, 78, 0, 1);
        let clients = Namespace::new(format!("{}c", link.source.name()), address)?;
        clients.add_bridge()?;
        clients.ip(&format!("address add {address}/24 dev {BRIDGE}"))?;
        for (host, port) in [(&link.source, "source"), (&link.destination, "target")] {
            host.add_bridge()?;
            host.ip(&format!("tuntap add {TAP} mode tap"))?;
            host.join(TAP)?;
            let peer = format!("peer name {port} netns {}", clients.name());
            host.ip(&format!("link add clients type veth {peer}"))?;
            host.join("clients")?;
            clients.join(port)?;
        }
        Ok(Self { clients })
    }

    /// Gives a machine that runs on one of the hosts a network card on this network.
    pub fn connect(machine: Builder) -> Builder {
        let netdev = format!("tap,id=lan,ifname={TAP},script=no,downscript=no");
        machine
            .argument("-netdev")
            .argument(netdev)
            .argument("-device")
            .argument("virtio-net-pci,netdev=lan,mac=02:00:00:78:00:02,romfile=")
    }
}

impl Namespace {
    fn add_bridge(&self) -> Result<()> {
        self.ip(&format!("link add {BRIDGE} type bridge"))?;
        self.ip(&format!("link set {BRIDGE} up"))
    }

    /// Makes a device a port of the bridge.
    fn join(&self, device: &str) -> Result<()> {
        self.ip(&format!("link set {device} master {BRIDGE} up"))
    }
}

const BRIDGE: &str = "lan";
const TAP: &str = "guest";
