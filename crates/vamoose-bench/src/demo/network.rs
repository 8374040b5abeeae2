//! The network between the two hosts: a link whose rate is set, or loopback where no link can be made.

use anyhow::{Context, Result};
use lab::middlebox::{Admission, Change, Direction, Flow, Middlebox, Which};
use lab::net::{self, End, Link, Wire};

use crate::scenario::Rate;

/// Bits per second in each direction, at first.
const RATE: u64 = 1_000_000_000;

pub(crate) struct Network {
    pub(crate) link: Link,
    /// Why it is loopback, if it is.
    why_loopback: Option<String>,
}

/// A cable that can be pulled.
pub(crate) enum Cable<'a> {
    Wire(&'a Wire),
    /// On loopback: a proxy, which drops everything while it is pulled.
    Proxy(Middlebox),
}

impl Network {
    pub(crate) fn new() -> Self {
        let made = net::available().and_then(|()| Link::new(Some(RATE)));
        let (link, why_loopback) = match made {
            Ok(link) => (link, None),
            Err(error) => (Link::loopback(), Some(format!("{error:#}"))),
        };
        Self { link, why_loopback }
    }

    pub(crate) fn describe(&self) -> String {
        match &self.why_loopback {
            None => "two network namespaces, joined by a link of 1 Gbit/s".to_owned(),
            Some(reason) => format!(
                "LOOPBACK, without a limit of its rate, as no link could be made: {reason}\n\
                 NOTE: times say little about a real network, bytes are as reported, and in place of a pulled cable \
                 a proxy drops all data and refuses connections"
            ),
        }
    }

    /// The rates at which moves are compared.
    pub(crate) fn rates(&self) -> &'static [Rate] {
        match self.why_loopback {
            None => &[Rate::Constant(RATE), Rate::Open],
            Some(_) => &[Rate::Open],
        }
    }

    /// Sets the rate; returns the name of the link then.
    pub(crate) fn set(&self, rate: Rate) -> Result<&'static str> {
        let Some(rate) = rate.limit() else {
            self.link.lift_rate()?;
            return Ok(match self.why_loopback {
                None => "a link without a limit",
                Some(_) => "loopback",
            });
        };
        self.link.set_rate(rate)?;
        Ok("1 Gbit/s")
    }

    /// How bytes on the link are counted.
    pub(crate) fn describe_measuring(&self) -> &'static str {
        match self.why_loopback {
            None => "counted by the network device, with all headers",
            Some(_) => "as reported, because loopback has no counter",
        }
    }

    /// The cable to a server at the destination.
    pub(crate) fn cable(&self, server: &str) -> Result<Cable<'_>> {
        if let Some(wire) = self.link.wires.first() {
            return Ok(Cable::Wire(wire));
        }
        let server = server.trim_start_matches("tcp:").parse();
        let server = server.context("the server's address")?;
        Ok(Cable::Proxy(Middlebox::new(server)?))
    }
}

impl Cable<'_> {
    /// Address at which the source reaches the server.
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
