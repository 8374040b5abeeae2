//! Clients of Redis: the workloads of YCSB, and SETs of random values.
//!
//! A record of YCSB is a hash of ten fields of 100 characters, and an update sets one field. Records are chosen by a Zipf
//! distribution (exponent 0.99), scattered over all keys. Each client has one connection and one pending request.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use fastrand::Rng;
use lab::net::{Lan, Namespace};

use crate::clients::{Clients, Sample};

/// A mix of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mix {
    records: u32,
    /// Plain values of random bytes instead of records of fields.
    is_random: bool,
    /// Reads in a hundred requests.
    reads: u32,
    /// Each update follows a read of the same record.
    reads_first: bool,
}

impl Mix {
    pub(crate) const RANDOM: Self = Self::ycsb(150_000, true, 0, false);
    pub(crate) const A: Self = Self::ycsb(40_000, false, 50, false);
    pub(crate) const B: Self = Self::ycsb(40_000, false, 95, false);
    pub(crate) const F: Self = Self::ycsb(40_000, false, 50, true);

    const fn ycsb(records: u32, is_random: bool, reads: u32, reads_first: bool) -> Self {
        Self {
            records,
            is_random,
            reads,
            reads_first,
        }
    }
}

/// Running clients.
pub(crate) struct Redis {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Vec<Sample>>>>,
}

const CLIENTS: u64 = 4;
/// Time limit of a request: the guest is lost.
const TIMEOUT: Duration = Duration::from_secs(60);

impl Redis {
    /// Fills the guest's Redis and starts clients in the namespace.
    pub(crate) fn start(network: &Namespace, mix: Mix) -> Result<Self> {
        let inside = |what: &(dyn Fn() -> Result<Connection> + Sync)| {
            let run = || {
                network.enter()?;
                what()
            };
            let ended = thread::scope(|scope| scope.spawn(run).join());
            ended.map_err(|_| anyhow!("a thread has panicked"))?
        };
        let mut first = inside(&Connection::open)?;
        first.fill(mix)?;
        let stop = Arc::<AtomicBool>::default();
        let mut threads = Vec::new();
        for seed in 0..CLIENTS {
            let (connection, stop) = (inside(&Connection::open)?, stop.clone());
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
}

impl Clients for Redis {
    fn end(self: Box<Self>) -> Result<Vec<Sample>> {
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
        if mix.is_random {
            let key = random.u32(0..mix.records);
            self.connection.set(key, random);
            return self.connection.exchange(1);
        }
        let key = self.zipf.next(random);
        let is_read = random.u32(0..100) < mix.reads;
        if is_read || mix.reads_first {
            self.connection.ask(&[b"HGETALL", name(key).as_bytes()]);
            self.connection.exchange(1)?;
        }
        if !is_read {
            let field = random.usize(0..FIELDS);
            self.connection
                .update(key, field..field + 1, &mut self.random);
            self.connection.exchange(1)?;
        }
        Ok(())
    }
}

const FIELDS: usize = 10;
/// Bytes of a field, and of a random value.
const FIELD: usize = 100;
const VALUE: usize = 300;

fn name(key: u32) -> String {
    format!("user{key}")
}

/// A connection that speaks RESP.
struct Connection {
    stream: BufReader<TcpStream>,
    /// Requests that are not sent yet.
    out: Vec<u8>,
}

impl Connection {
    fn open() -> Result<Self> {
        let address = (Lan::GUEST, 6379).into();
        let stream =
            TcpStream::connect_timeout(&address, TIMEOUT).context("connecting to Redis")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self {
            stream: BufReader::with_capacity(64 << 10, stream),
            out: Vec::new(),
        })
    }

    /// Writes all records.
    fn fill(&mut self, mix: Mix) -> Result<()> {
        const AT_ONCE: u32 = 100;
        let mut random = Rng::with_seed(7);
        for start in (0..mix.records).step_by(AT_ONCE as usize) {
            for key in start..start + AT_ONCE {
                if mix.is_random {
                    self.set(key, &mut random);
                } else {
                    self.update(key, 0..FIELDS, &mut random);
                }
            }
            self.exchange(AT_ONCE)?;
        }
        Ok(())
    }

    fn set(&mut self, key: u32, random: &mut Rng) {
        let mut value = [0; VALUE];
        random.fill(&mut value);
        self.ask(&[b"SET", name(key).as_bytes(), &value]);
    }

    fn update(&mut self, key: u32, fields: std::ops::Range<usize>, random: &mut Rng) {
        let mut words = vec![b"HSET".to_vec(), name(key).into_bytes()];
        for field in fields {
            words.push(format!("field{field}").into_bytes());
            let text = (0..FIELD).map(|_| random.u8(b' '..b'~'));
            words.push(text.collect());
        }
        let words: Vec<_> = words.iter().map(Vec::as_slice).collect();
        self.ask(&words);
    }

    /// Adds a request.
    fn ask(&mut self, words: &[&[u8]]) {
        self.out
            .extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
        for word in words {
            self.out
                .extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            self.out.extend_from_slice(word);
            self.out.extend_from_slice(b"\r\n");
        }
    }

    /// Sends the requests, and reads this many answers.
    fn exchange(&mut self, answers: u32) -> Result<()> {
        let sent = self.stream.get_mut().write_all(&self.out);
        sent.context("sending to Redis")?;
        self.out.clear();
        (0..answers).try_for_each(|_| self.answer())
    }

    fn answer(&mut self) -> Result<()> {
        let mut line = String::new();
        self.stream
            .read_line(&mut line)
            .context("reading from Redis")?;
        let (kind, rest) = line
            .split_at_checked(1)
            .context("Redis has closed the connection")?;
        match kind {
            "+" | ":" => Ok(()),
            "$" => {
                let length: usize = rest.trim_end().parse().context("a length of Redis")?;
                let mut bytes = vec![0; length + 2];
                self.stream
                    .read_exact(&mut bytes)
                    .context("reading from Redis")
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
