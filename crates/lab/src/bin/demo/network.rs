//! Between the two hosts: a link of a known rate, or loopback where no link can be made.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use lab::middlebox::{Admission, Change, Direction, Flow, Middlebox, Which};
use lab::net::{self, End, Link, Namespace, Wire};
use lab::qemu::Builder;

/// Bits per second in each direction.
const RATE: u64 = 1_000_000_000;

pub(crate) struct Network(
    /// Or why there is none, and both hosts are this one.
    Result<Link, String>,
);

/// What can be pulled.
pub(crate) enum Cable<'a> {
    Wire(&'a Wire),
    /// On loopback: a proxy, which loses everything while it is pulled.
    Proxy(Middlebox),
}

/// One of the two hosts: a namespace, or this one.
#[derive(Clone, Copy)]
pub(crate) struct Host<'a>(Option<&'a Namespace>);

impl Network {
    pub(crate) fn new() -> Self {
        let link = net::available().and_then(|()| Link::new(Some(RATE)));
        Self(link.map_err(|error| format!("{error:#}")))
    }

    pub(crate) fn describe(&self) -> String {
        match &self.0 {
            Ok(_) => "two network namespaces, joined by a link of 1 Gbit/s".to_owned(),
            Err(reason) => format!(
                "LOOPBACK, as fast as the CPU can, as there is no link: {reason}\n\
                 NOTE: total times say little about a real network, the bytes are those that were reported, and instead of\n\
                 a cable that is pulled a proxy loses all that is sent and refuses connections"
            ),
        }
    }

    /// What `bytes on the link` means here.
    pub(crate) fn describe_measuring(&self) -> &'static str {
        match self.0 {
            Ok(_) => "counted by the source's network device, with all headers",
            Err(_) => "as reported (loopback cannot tell; before QEMU 9 stock does not know)",
        }
    }

    /// The cable to a server of the destination's.
    pub(crate) fn cable(&self, server: &str) -> Result<Cable<'_>> {
        match &self.0 {
            Ok(link) => link.wires.first().map(Cable::Wire).context("no wire"),
            Err(_) => {
                let server = server.trim_start_matches("tcp:").parse();
                let server = server.context("the server's address")?;
                Ok(Cable::Proxy(Middlebox::new(server)?))
            }
        }
    }

    pub(crate) fn source(&self) -> Host<'_> {
        Host(self.0.as_ref().ok().map(|link| &link.source))
    }

    pub(crate) fn destination(&self) -> Host<'_> {
        Host(self.0.as_ref().ok().map(|link| &link.destination))
    }

    /// Bytes that the source has sent over the link so far. Loopback is shared with other programs: there is no telling.
    pub(crate) fn sent(&self) -> Result<Option<u64>> {
        let traffic = self.source().0.map(Namespace::traffic).transpose()?;
        Ok(traffic.map(|traffic| traffic.sent))
    }
}

impl Cable<'_> {
    /// Where the source reaches the server.
    pub(crate) fn address(&self, server: &str) -> String {
        match self {
            Self::Wire(_) => server.to_owned(),
            Self::Proxy(proxy) => format!("tcp:{}", proxy.address()),
        }
    }

    /// Bytes towards the destination so far.
    pub(crate) fn sent(&self) -> Result<u64> {
        Ok(match self {
            Self::Wire(wire) => wire.traffic(End::Source)?.sent,
            Self::Proxy(proxy) => {
                let connections = proxy.connections().into_iter();
                let passed = connections.map(|it| it.traffic(Direction::ToListener).passed);
                passed.sum()
            }
        })
    }

    pub(crate) fn pull(&self) -> Result<()> {
        match self {
            Self::Wire(wire) => wire.pull(End::Source),
            Self::Proxy(proxy) => {
                proxy.admit(Admission::Refuse)?;
                proxy.apply(Which::All, Change::Flow(Flow::Drop));
                Ok(())
            }
        }
    }

    pub(crate) fn plug(&self) -> Result<()> {
        match self {
            Self::Wire(wire) => wire.plug(),
            Self::Proxy(proxy) => proxy.admit(Admission::Pass),
        }
    }
}

impl Host<'_> {
    pub(crate) fn address(self) -> Ipv4Addr {
        self.0.map_or(Ipv4Addr::LOCALHOST, Namespace::address)
    }

    /// A command that runs on this host; its process is the program itself.
    pub(crate) fn command(self, program: &Path) -> Command {
        match self.0 {
            Some(namespace) => namespace.command(program),
            None => Command::new(program),
        }
    }

    /// The machine, on this host.
    pub(crate) fn place(self, machine: Builder) -> Builder {
        match self.0 {
            Some(namespace) => machine.namespace(namespace.name()),
            None => machine,
        }
    }
}
