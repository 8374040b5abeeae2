//! Between the two hosts: a link of a known rate, or loopback where no link can be made.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use lab::net::{self, Link, Namespace};
use lab::qemu::Builder;

/// Bits per second in each direction.
const RATE: u64 = 1_000_000_000;

pub(crate) enum Network {
    Link(Link),
    /// And why there is no link.
    Loopback(String),
}

/// One of the two hosts.
#[derive(Clone, Copy)]
pub(crate) enum Host<'a> {
    Namespace(&'a Namespace),
    ThisOne,
}

impl Network {
    pub(crate) fn new() -> Self {
        match net::available().and_then(|()| Link::new(Some(RATE))) {
            Ok(link) => Self::Link(link),
            Err(error) => Self::Loopback(format!("{error:#}")),
        }
    }

    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Link(_) => "two network namespaces, joined by a link of 1 Gbit/s".to_owned(),
            Self::Loopback(reason) => format!(
                "LOOPBACK, as fast as the CPU can, as there is no link: {reason}\n\
                 NOTE: total times say little about a real network, and the bytes are those that were reported"
            ),
        }
    }

    pub(crate) fn source(&self) -> Host<'_> {
        match self {
            Self::Link(link) => Host::Namespace(&link.source),
            Self::Loopback(_) => Host::ThisOne,
        }
    }

    pub(crate) fn destination(&self) -> Host<'_> {
        match self {
            Self::Link(link) => Host::Namespace(&link.destination),
            Self::Loopback(_) => Host::ThisOne,
        }
    }

    /// Bytes that the source has sent over the link so far. Loopback is everybody's: there is no telling.
    pub(crate) fn sent(&self) -> Result<Option<u64>> {
        match self {
            Self::Link(link) => Ok(Some(link.source.traffic()?.sent)),
            Self::Loopback(_) => Ok(None),
        }
    }
}

impl Host<'_> {
    pub(crate) fn address(self) -> Ipv4Addr {
        match self {
            Self::Namespace(namespace) => namespace.address(),
            Self::ThisOne => Ipv4Addr::LOCALHOST,
        }
    }

    /// A command that runs on this host; its process is the program itself.
    pub(crate) fn command(self, program: &Path) -> Command {
        match self {
            Self::Namespace(namespace) => namespace.command(program),
            Self::ThisOne => Command::new(program),
        }
    }

    /// The machine, on this host.
    pub(crate) fn place(self, machine: Builder) -> Builder {
        match self {
            Self::Namespace(namespace) => machine.namespace(namespace.name()),
            Self::ThisOne => machine,
        }
    }
}
