//! Debian's pgbench, which runs in a chroot and logs each transaction.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use lab::net::{Lan, Namespace};
use lab::process::Child;
use lab::target_dir;
use tempfile::TempDir;

use crate::clients::{Clients, Sample};

/// A running pgbench.
pub(crate) struct Pgbench {
    child: Child,
    /// Folder of its log, in the chroot.
    logs: TempDir,
    /// Command that ends its connections.
    end: Command,
    /// The start, by both clocks.
    now: (Instant, SystemTime),
}

const CLIENTS: &str = "4";
/// Size of the tables, in units of 100,000 accounts.
const SCALE: &str = "4";
const LIMIT: Duration = Duration::from_secs(60);

impl Pgbench {
    /// Makes its tables and starts it in the namespace.
    pub(crate) fn start(network: &Namespace) -> Result<Self> {
        let root = target_dir().join("workloads/all");
        let root = root.canonicalize().context("run scripts/setup workloads")?;
        fs::create_dir_all(root.join("tmp"))?;
        let logs = TempDir::new_in(root.join("tmp")).context("creating a folder for logs")?;
        let command = |program| command(network, &root, program);
        lab::run(command("pgbench").args(["-i", "-q", "-s", SCALE, "postgres"]))?;
        let mut end = command("psql");
        end.args(["-d", "postgres", "-c"]).arg(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pgbench'",
        );
        let inside = Path::new("/").join(logs.path().strip_prefix(&root)?);
        let prefix = inside.join("log").display().to_string();
        let mut pgbench = command("pgbench");
        pgbench.args(["-n", "-c", CLIENTS, "-T", "1000000"]);
        pgbench.args(["-l", "--log-prefix", &prefix]);
        pgbench.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self {
            child: Child::start(pgbench.arg("postgres"))?,
            logs,
            end,
            now: (Instant::now(), SystemTime::now()),
        })
    }

    /// The moment of a time in the log, which counts from 1970.
    fn at(&self, since_epoch: Duration) -> Option<Instant> {
        let (now, wall) = self.now;
        let moment = SystemTime::UNIX_EPOCH + since_epoch;
        now.checked_add(moment.duration_since(wall).ok()?)
    }

    /// Parses a line of the log: client, transaction, microseconds, script, and when it ended, in seconds and microseconds.
    fn sample(&self, line: &str) -> Option<Sample> {
        let words: Vec<u64> = line
            .split(' ')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .ok()?;
        let &[_, _, micros, _, seconds, fraction] = &words[..] else {
            return None;
        };
        let ended = Duration::from_secs(seconds) + Duration::from_micros(fraction);
        Some(Sample {
            at: self.at(ended)?,
            latency: Duration::from_micros(micros),
        })
    }
}

impl Clients for Pgbench {
    fn end(mut self: Box<Self>) -> Result<Vec<Sample>> {
        ensure!(
            self.child.wait(Duration::ZERO)?.is_none(),
            "pgbench has ended before"
        );
        lab::run(&mut self.end)?;
        // It fails, as its connections were closed.
        self.child.finish(LIMIT)?;
        let mut samples = Vec::new();
        for entry in fs::read_dir(self.logs.path())? {
            let path: PathBuf = entry?.path();
            let log = fs::read_to_string(&path).context("reading pgbench's log")?;
            for line in log.lines() {
                let sample = self.sample(line);
                samples.push(sample.with_context(|| format!("not a line of pgbench: '{line}'"))?);
            }
        }
        Ok(samples)
    }
}

/// A program of PostgreSQL, in the chroot and in the namespace, that will connect to the guest.
fn command(network: &Namespace, root: &Path, program: &str) -> Command {
    let guest: Ipv4Addr = Lan::GUEST;
    let mut command = network.command("chroot");
    command.arg(root);
    command.arg(format!("/usr/lib/postgresql/15/bin/{program}"));
    command.args(["-h", &guest.to_string(), "-U", "postgres"]);
    command
}
