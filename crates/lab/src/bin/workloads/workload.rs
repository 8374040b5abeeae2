//! What runs in the guest, and who uses it.

use anyhow::Result;
use clap::ValueEnum;
use lab::guest::{Image, Load, Pattern};
use lab::net::Namespace;
use lab::program::Program;
use lab::qemu::{Binary, Builder};
use serde::{Deserialize, Serialize};

use crate::clients::Clients;
use crate::pgbench::Pgbench;
use crate::redis::{Mix, Redis};

/// A guest that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Workload {
    /// Redis: SET of random values of 300 bytes
    RedisRandom,
    /// Redis: half reads, half updates of a field of a record (YCSB A)
    RedisA,
    /// Redis: 95 % reads, 5 % updates (YCSB B)
    RedisB,
    /// Redis: half reads, half reads with an update afterwards (YCSB F)
    RedisF,
    /// PostgreSQL: the transactions of pgbench (TPC-B)
    Pgbench,
    /// A compiler, which compiles one file after the other
    Compile,
    /// A program that writes pages three times as fast as the link carries them
    Writer,
    /// The same, which changes only the first 40 of the 512 words of a page, as programs do that update memory in place
    Updates,
    /// The same, which counts: each second word of a page is four small counters, all of which go up
    Counters,
}

/// Of the guest, in bytes.
const RAM: u64 = 1 << 30;

impl Workload {
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// What a sample of the clients is, for the table.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Pgbench => "transactions",
            Self::Compile => "files",
            Self::Writer | Self::Updates | Self::Counters => "ticks",
            _ => "requests",
        }
    }

    /// Of the link in Mbit/s, unless another one is asked for. What runs under TCG changes little memory: on a fast link
    /// every contender moves it in two rounds.
    pub(crate) fn link_rate(self) -> u64 {
        match self {
            Self::Writer | Self::Updates | Self::Counters => 1000,
            _ => 200,
        }
    }

    /// What the guest boots from, and the machine, for a link of `rate` bits per second.
    pub(crate) fn machine(self, binary: &Binary, rate: u64) -> Result<(Image, Builder)> {
        let program = match self {
            Self::RedisRandom | Self::RedisA | Self::RedisB | Self::RedisF => Program::Redis,
            Self::Pgbench => Program::Postgres,
            Self::Compile => Program::Compiler,
            Self::Writer | Self::Updates | Self::Counters => {
                let image = Image::build(16)?;
                let load = Load {
                    fill: 384,
                    hot: 192,
                    rate: u32::try_from(3 * rate / 8 / 4096)?,
                };
                let pattern = match self {
                    Self::Updates => Pattern::First(40),
                    Self::Counters => Pattern::Counters,
                    _ => Pattern::All,
                };
                let machine = image.machine_that_writes(binary, RAM, &load, pattern);
                return Ok((image, machine));
            }
        };
        let image = program.image()?;
        let machine = program.machine(&image, binary, RAM);
        Ok((image, machine))
    }

    /// The clients, at work; `None` where the guest's serial port tells what it does.
    pub(crate) fn clients(self, network: &Namespace) -> Result<Option<Box<dyn Clients>>> {
        Ok(Some(match self {
            Self::RedisRandom => Box::new(Redis::start(network, Mix::RANDOM)?),
            Self::RedisA => Box::new(Redis::start(network, Mix::A)?),
            Self::RedisB => Box::new(Redis::start(network, Mix::B)?),
            Self::RedisF => Box::new(Redis::start(network, Mix::F)?),
            Self::Pgbench => Box::new(Pgbench::start(network)?),
            Self::Compile | Self::Writer | Self::Updates | Self::Counters => return Ok(None),
        }))
    }

    /// Whether the guest checks its own memory, and says so on its serial port.
    pub(crate) fn checks_itself(self) -> bool {
        matches!(self, Self::Writer | Self::Updates | Self::Counters)
    }

    /// Whether a line of the guest's serial port shows that it has done something.
    pub(crate) fn is_sign(self, line: &str) -> bool {
        match self {
            Self::Compile => line.starts_with("compiled "),
            Self::Writer | Self::Updates | Self::Counters => line.starts_with("tick "),
            _ => false,
        }
    }
}
