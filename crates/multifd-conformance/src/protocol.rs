//! How the runner and a driver speak: lines of text, then bytes.
//!
//! ```text
//!  request (stdin)                          reply (stdout)
//!  multifd-conformance 1                    accepted          and the memory: all blocks, one after the other
//!  decode | encode                          encoded 1408 64   (lengths) and the streams of the channels
//!  method zlib                              refused WHY       nothing follows
//!  block 65536 mem      for each block      unsupported WHY   nothing follows: the case is excluded
//!  channels 2
//!  stream 5440          decode: the length of each channel's stream, in the order in which they connect
//!  round                encode: for each round
//!  begin                and the bytes: the streams, or all memory for each round
//! ```

use std::io::{BufRead, Read, Write};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{Block, Case, Memory, Task};

const FIRST_LINE: &str = "multifd-conformance 1";

/// What a driver is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The method that both ends are set to, by QEMU's name.
    pub method: String,
    /// The guest's memory.
    pub blocks: Vec<Block>,
    /// What to do.
    pub work: Work,
}

/// What a driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Decode these streams.
    Decode(Vec<Vec<u8>>),
    /// Send a guest.
    Encode {
        /// Over so many channels.
        channels: u8,
        /// Its memory in each round.
        rounds: Vec<Memory>,
    },
}

/// What a driver says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The streams were decoded to this.
    Accepted(Memory),
    /// The streams were refused, and why.
    Refused(String),
    /// The streams of an encoder.
    Encoded(Vec<Vec<u8>>),
    /// The implementation cannot do what the case needs.
    Unsupported(String),
}

impl Request {
    /// What a case asks.
    ///
    /// # Errors
    /// When the case contradicts itself.
    pub fn of(case: &Case) -> Result<Self> {
        Ok(Self {
            method: case.method.clone(),
            blocks: case.blocks.clone(),
            work: match &case.task {
                Task::Decode { channels, .. } => {
                    let stream = |parts: &Vec<crate::Bytes>| {
                        parts.iter().flat_map(|part| &part.0).copied().collect()
                    };
                    Work::Decode(channels.iter().map(stream).collect())
                }
                Task::Encode { channels, rounds } => Work::Encode {
                    channels: *channels,
                    rounds: rounds
                        .iter()
                        .map(|pages| case.memory(pages))
                        .collect::<Result<_>>()?,
                },
            },
        })
    }

    /// Sends it.
    ///
    /// # Errors
    /// When that fails.
    pub fn write(&self, mut to: impl Write) -> Result<()> {
        let (verb, channels) = match &self.work {
            Work::Decode(streams) => ("decode", streams.len()),
            Work::Encode { channels, .. } => ("encode", usize::from(*channels)),
        };
        write!(to, "{FIRST_LINE}\n{verb}\nmethod {}\n", self.method)?;
        for Block { name, len } in &self.blocks {
            writeln!(to, "block {len} {name}")?;
        }
        writeln!(to, "channels {channels}")?;
        let bytes: Vec<&Vec<u8>> = match &self.work {
            Work::Decode(streams) => {
                for stream in streams {
                    writeln!(to, "stream {}", stream.len())?;
                }
                streams.iter().collect()
            }
            Work::Encode { rounds, .. } => {
                for _ in rounds {
                    writeln!(to, "round")?;
                }
                rounds.iter().flatten().collect()
            }
        };
        writeln!(to, "begin")?;
        for bytes in bytes {
            to.write_all(bytes)?;
        }
        Ok(to.flush()?)
    }

    /// Receives it: for drivers in Rust.
    ///
    /// # Errors
    /// When it is not a request.
    pub fn read(mut from: impl BufRead) -> Result<Self> {
        ensure!(line(&mut from)? == FIRST_LINE, "not a request");
        let verb = line(&mut from)?;
        let (mut method, mut blocks, mut channels) = (String::new(), Vec::new(), 0);
        let (mut streams, mut rounds) = (Vec::new(), 0);
        loop {
            let line = line(&mut from)?;
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            match word {
                "method" => rest.clone_into(&mut method),
                "block" => {
                    let (len, name) = rest.split_once(' ').context("a block without a name")?;
                    let (len, name) = (len.parse()?, name.to_owned());
                    blocks.push(Block { name, len });
                }
                "channels" => channels = rest.parse()?,
                "stream" => streams.push(rest.parse()?),
                "round" => rounds += 1,
                "begin" => break,
                _ => bail!("'{line}' in a request"),
            }
        }
        let memory = |from: &mut _| blocks.iter().map(|block| bytes(from, block.len)).collect();
        let work = match &*verb {
            "decode" => {
                let streams = streams.into_iter().map(|len| bytes(&mut from, len));
                Work::Decode(streams.collect::<Result<_>>()?)
            }
            "encode" => {
                let rounds = (0..rounds).map(|_| memory(&mut from));
                let rounds = rounds.collect::<Result<_>>()?;
                Work::Encode { channels, rounds }
            }
            _ => bail!("'{verb}' in a request"),
        };
        Ok(Self {
            method,
            blocks,
            work,
        })
    }
}

impl Reply {
    /// Sends it: for drivers in Rust.
    ///
    /// # Errors
    /// When that fails.
    pub fn write(&self, mut to: impl Write) -> Result<()> {
        let one_line = |text: &str| text.replace('\n', " ");
        match self {
            Self::Accepted(_) => writeln!(to, "accepted")?,
            Self::Refused(why) => writeln!(to, "refused {}", one_line(why))?,
            Self::Unsupported(why) => writeln!(to, "unsupported {}", one_line(why))?,
            Self::Encoded(streams) => {
                write!(to, "encoded")?;
                for stream in streams {
                    write!(to, " {}", stream.len())?;
                }
                writeln!(to)?;
            }
        }
        if let Self::Accepted(parts) | Self::Encoded(parts) = self {
            for part in parts {
                to.write_all(part)?;
            }
        }
        Ok(to.flush()?)
    }

    /// Receives the reply to a request about `blocks`.
    ///
    /// # Errors
    /// When it is not a reply.
    pub fn read(mut from: impl BufRead, blocks: &[Block]) -> Result<Self> {
        let line = line(&mut from)?;
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let reply = match word {
            "accepted" => {
                let memory = blocks.iter().map(|block| bytes(&mut from, block.len));
                Self::Accepted(memory.collect::<Result<_>>()?)
            }
            "encoded" => {
                let streams = rest.split(' ').map(|len| bytes(&mut from, len.parse()?));
                Self::Encoded(streams.collect::<Result<_>>()?)
            }
            "refused" => Self::Refused(rest.to_owned()),
            "unsupported" => Self::Unsupported(rest.to_owned()),
            _ => bail!("the driver says '{line}'"),
        };
        let more = from.read(&mut [0])?;
        ensure!(more == 0, "the driver says more than '{line}'");
        Ok(reply)
    }
}

fn line(from: &mut impl BufRead) -> Result<String> {
    const LONGEST: u64 = 4096;
    let mut line = String::new();
    from.take(LONGEST).read_line(&mut line)?;
    ensure!(line.ends_with('\n'), "it ends with '{line}'");
    Ok(line.trim_end_matches('\n').to_owned())
}

fn bytes(from: &mut impl BufRead, len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(len.try_into()?).read_to_end(&mut bytes)?;
    ensure!(bytes.len() == len, "{} of {len} bytes", bytes.len());
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_replies_come_back() {
        let block = |name: &str, len| Block {
            name: name.to_owned(),
            len,
        };
        let blocks = vec![block("mem", 4), block("a b", 2)];
        let memory = vec![vec![1, 2, 3, 4], vec![10, 10]];
        let (channels, rounds) = (2, vec![memory.clone(), memory.clone()]);
        for work in [
            Work::Decode(vec![vec![1; 70], vec![]]),
            Work::Encode { channels, rounds },
        ] {
            let request = Request {
                method: "zlib".to_owned(),
                blocks: blocks.clone(),
                work,
            };
            let mut sent = Vec::new();
            request.write(&mut sent).unwrap();
            assert_eq!(Request::read(&*sent).unwrap(), request);
            assert!(Request::read(&sent[..sent.len() - 1]).is_err());
        }
        for reply in [
            Reply::Accepted(memory.clone()),
            Reply::Encoded(memory),
            Reply::Refused("a b".to_owned()),
            Reply::Unsupported(String::new()),
        ] {
            let mut sent = Vec::new();
            reply.write(&mut sent).unwrap();
            assert_eq!(Reply::read(&*sent, &blocks).unwrap(), reply);
            sent.push(0);
            assert!(Reply::read(&*sent, &blocks).is_err());
        }
    }
}
