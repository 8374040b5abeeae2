//! Clients of Redis: the workloads of YCSB, and SETs of random values.
//!
//! A record of YCSB is a hash of ten fields of 100 characters, and an update sets one field. Records are chosen by a Zipf
//! distribution (exponent 0.99), scattered over all keys. Each client has one connection and one pending request.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use fastrand::Rng;
use lab::net::{Lan, Namespace};

use crate::clients::Sample;

/// A mix of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mix {
    records: u32,
    /// Reads in a hundred requests to records of fields; `None` for SETs of random bytes.
    reads: Option<u32>,
}

impl Mix {
    pub(crate) const RANDOM: Self = Self {
        records: 150_000,
        reads: None,
    };
    pub(crate) const A: Self = Self::ycsb(50);
    pub(crate) const B: Self = Self::ycsb(95);

    const fn ycsb(reads: u32) -> Self {
        Self {
            records: 40_000,
            reads: Some(reads),
        }
    }
}

/// Running clients.
pub(crate) struct Redis {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Vec<Sample>>>>,
}

const CLIENTS: u64 = 4;
/// Time limit of a request, after which the guest is considered lost.
const TIMEOUT: Duration = Duration::from_secs(60);

impl Redis {
    /// Fills the guest's Redis and starts clients in the namespace.
    pub(crate) fn start(network: &Namespace, mix: Mix) -> Result<Self> {
        fill(&mut connect(network)?, mix).context("filling Redis")?;
        let stop = Arc::<AtomicBool>::default();
        let mut threads = Vec::new();
        for seed in 0..CLIENTS {
            let (connection, stop) = (connect(network)?, stop.clone());
            let client = Client {
                connection,
                mix,
                zipf: Zipf::new(mix.records),
                random: Rng::with_seed(seed),
            };
            threads.push(thread::spawn(move || client.work(&stop)));
        }
        Ok(Self { stop, threads })
    }

    /// Ends the clients and returns all answered requests, in any order.
    ///
    /// # Errors
    /// If a client failed: a connection broke, or an answer was wrong.
    pub(crate) fn end(self) -> Result<Vec<Sample>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut samples = Vec::new();
        for thread in self.threads {
            let ended = thread
                .join()
                .map_err(|_| anyhow!("a client has panicked"))?;
            samples.extend(ended.context("a client of Redis")?);
        }
        Ok(samples)
    }
}

/// Connects from the namespace, which a separate thread enters.
fn connect(network: &Namespace) -> Result<Connection> {
    let connect = || {
        network.enter()?;
        let stream = TcpStream::connect_timeout(&(Lan::GUEST, 6379).into(), TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Connection(BufReader::new(stream)))
    };
    let connected = thread::scope(|scope| scope.spawn(connect).join());
    let connected: Result<_> = connected.map_err(|_| anyhow!("a thread has panicked"))?;
    connected.context("connecting to Redis")
}

/// Writes all records.
fn fill(connection: &mut Connection, mix: Mix) -> Result<()> {
    const AT_ONCE: usize = 100;
    let mut random = Rng::with_seed(7);
    for start in (0..mix.records).step_by(AT_ONCE) {
        let requests = (start..mix.records)
            .take(AT_ONCE)
            .map(|key| match mix.reads {
                None => set(key, &mut random),
                Some(_) => update(key, 0..FIELDS, &mut random),
            });
        connection.exchange(requests)?;
    }
    Ok(())
}

struct Client {
    connection: Connection,
    mix: Mix,
    zipf: Zipf,
    random: Rng,
}

impl Client {
    fn work(mut self, stop: &AtomicBool) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let start = Instant::now();
            self.request()?;
            let at = Instant::now();
            let latency = at - start;
            samples.push(Sample { at, latency });
        }
        Ok(samples)
    }

    fn request(&mut self) -> Result<()> {
        let (mix, random) = (self.mix, &mut self.random);
        let Some(reads) = mix.reads else {
            let key = random.u32(0..mix.records);
            return self.connection.exchange([set(key, random)]);
        };
        let key = self.zipf.next(random);
        if random.u32(0..100) < reads {
            let read = vec![b"HGETALL".to_vec(), name(key)];
            return self.connection.exchange([read]);
        }
        let field = random.usize(0..FIELDS);
        self.connection
            .exchange([update(key, field..field + 1, random)])
    }
}

const FIELDS: usize = 10;
/// Bytes of a field, and of a random value.
const FIELD: usize = 100;
const VALUE: usize = 300;

/// The words of a request.
type Request = Vec<Vec<u8>>;

fn name(key: u32) -> Vec<u8> {
    format!("user{key}").into_bytes()
}

fn set(key: u32, random: &mut Rng) -> Request {
    let mut value = vec![0; VALUE];
    random.fill(&mut value);
    vec![b"SET".to_vec(), name(key), value]
}

fn update(key: u32, fields: Range<usize>, random: &mut Rng) -> Request {
    let mut words = vec![b"HSET".to_vec(), name(key)];
    for field in fields {
        words.push(format!("field{field}").into_bytes());
        let text = (0..FIELD).map(|_| random.u8(b' '..b'~'));
        words.push(text.collect());
    }
    words
}

/// A connection that speaks RESP. (The crate `redis` has 30 dependencies, ICU among them.)
struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Sends the requests, and reads an answer to each.
    fn exchange(&mut self, requests: impl IntoIterator<Item = Request>) -> Result<()> {
        let (mut out, mut answers) = (Vec::new(), 0);
        for words in requests {
            write!(out, "*{}\r\n", words.len())?;
            for word in words {
                write!(out, "${}\r\n", word.len())?;
                out.extend([&word[..], b"\r\n"].concat());
            }
            answers += 1;
        }
        let sent = self.0.get_mut().write_all(&out);
        sent.context("sending to Redis")?;
        (0..answers).try_for_each(|_| self.answer())
    }

    fn answer(&mut self) -> Result<()> {
        let mut line = String::new();
        let read = self.0.read_line(&mut line);
        read.context("reading from Redis")?;
        let (kind, rest) = line
            .split_at_checked(1)
            .context("Redis has closed the connection")?;
        match kind {
            "+" | ":" => Ok(()),
            "$" => {
                let length: usize = rest.trim_end().parse().context("a length of Redis")?;
                let mut bytes = vec![0; length + 2];
                let read = self.0.read_exact(&mut bytes);
                read.context("reading from Redis")
            }
            "*" => {
                let count: u32 = rest.trim_end().parse().context("a length of Redis")?;
                ensure!(count > 0, "Redis has lost a record");
                (0..count).try_for_each(|_| self.answer())
            }
            _ => bail!("Redis says: {line}"),
        }
    }
}

/// Zipf's distribution over the ranks of all records; ranks are scattered over all keys.
struct Zipf {
    /// For each rank, the weight of this rank and all before it.
    cumulative: Vec<f64>,
}

impl Zipf {
    fn new(count: u32) -> Self {
        const EXPONENT: f64 = 0.99;
        let weights = (1..=count).map(|rank| f64::from(rank).powf(-EXPONENT));
        let cumulative = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Self {
            cumulative: cumulative.collect(),
        }
    }

    fn next(&self, random: &mut Rng) -> u32 {
        let key = self.rank(random.f64()) as u64 * 2_654_435_761 % self.cumulative.len() as u64;
        u32::try_from(key).unwrap_or(0)
    }

    /// The rank for a number between 0 and 1.
    fn rank(&self, uniform: f64) -> usize {
        let weight = uniform * self.cumulative.last().copied().unwrap_or(0.0);
        self.cumulative.partition_point(|sum| *sum <= weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_zipfs_law() {
        let zipf = Zipf::new(1000);
        let mut counts = vec![0_u32; 1000];
        for n in 0..1_000_000 {
            counts[zipf.rank(f64::from(n) / 1e6)] += 1;
        }
        for rank in [0_u8, 1, 9, 99] {
            let expected = 1e6 * f64::from(rank + 1).powf(-0.99) / zipf.cumulative[999];
            let found = f64::from(counts[usize::from(rank)]);
            assert!(
                (found / expected - 1.0).abs() < 0.01,
                "{rank}: {found}, not {expected}"
            );
        }
    }
}
