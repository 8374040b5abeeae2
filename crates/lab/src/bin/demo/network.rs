//! Between the two hosts: a link of a known rate, or loopback where no link can be made.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use lab::net::{self, Link, Namespace};
use lab::qemu::Builder;

/// Bits per second in each direction.
const RATE: u64 = 1_000_000_000;

pub(crate) struct Network(
    /// Or why there is none, and both hosts are this one.
    Result<Link, String>,
);

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
                 NOTE: total times say little about a real network, and the bytes are those that were reported"
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
