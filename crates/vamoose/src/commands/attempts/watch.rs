//! `vamoose attempts --watch`: shows the migrations under way until the command is ended.

use std::{
    collections::HashMap,
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::Result;
use serde::Serialize;
use vamoose_link::millis;
use vamoose_relay::{Role, UnderWay, under_way};

const EVERY: Duration = Duration::from_secs(1);

pub(super) fn run(dirs: &[PathBuf], json: bool) -> Result<()> {
    let mut rates = Rates::default();
    let is_terminal = io::stdout().is_terminal();
    loop {
        let mut all = Vec::new();
        for dir in dirs {
            all.extend(under_way(dir)?);
        }
        let all = rates.of(all, Instant::now());
        let printed = match json {
            true => print_json(all),
            false => print(&all, is_terminal),
        };
        match printed {
            // The reader has closed the pipe.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            printed => printed?,
        }
        thread::sleep(EVERY);
    }
}

/// A migration and its rate.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Shown {
    #[serde(flatten)]
    under_way: UnderWay,
    wire_bytes_per_second: u64,
}

#[derive(Serialize)]
struct Line {
    /// In milliseconds since the epoch.
    time: u64,
    migrations: Vec<Shown>,
}

fn print_json(migrations: Vec<Shown>) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let time = millis(now.unwrap_or_default());
    let mut line = serde_json::to_vec(&Line { time, migrations })?;
    line.push(b'\n');
    io::stdout().write_all(&line)
}

/// Prints a line for each migration; on a terminal, replaces the previous lines.
fn print(all: &[Shown], is_terminal: bool) -> io::Result<()> {
    const CLEAR: &str = "\x1b[H\x1b[2J";
    let mut lines: String = all.iter().map(|shown| text(shown) + "\n").collect();
    if all.is_empty() {
        "no migration is under way\n".clone_into(&mut lines);
    }
    let clear = if is_terminal { CLEAR } else { "" };
    write!(io::stdout(), "{clear}{lines}")?;
    io::stdout().flush()
}

fn text(shown: &Shown) -> String {
    let it = &shown.under_way;
    let mebibytes = |bytes: u64| bytes >> 20;
    let name = it.name.as_deref().unwrap_or("(unknown)");
    let way = match it.role {
        Role::Source => "to",
        Role::Destination => "from",
    };
    let target = it.target.as_deref().map(|it| format!(", {it}"));
    let status = it.status.as_deref().map(|it| format!(", {it}"));
    let bytes = if it.is_bytes { ", bytes" } else { "" };
    let method = it.method.as_deref().map(|it| format!(" by {it}"));
    let rounds = it.rounds.map(|it| format!(", round {it}"));
    let remaining = it
        .remaining
        .map(|it| format!(", {} MiB left", mebibytes(it)));
    let downtime = it.downtime.map(|it| format!(", paused for {it} ms"));
    let or_nothing = Option::unwrap_or_default;
    let line = format!(
        "{name} {way} {}{} ({}){bytes}{}: {} MiB as {} MiB{} in {} s, {} MiB/s on the wire{}{}{}",
        it.peer,
        or_nothing(target),
        it.by,
        or_nothing(status),
        mebibytes(it.guest_bytes),
        mebibytes(it.wire_bytes),
        or_nothing(method),
        it.total_time / 1000,
        mebibytes(shown.wire_bytes_per_second),
        or_nothing(rounds),
        or_nothing(remaining),
        or_nothing(downtime),
    );
    // Names come from other hosts, and might control the terminal.
    line.replace(char::is_control, "?")
}

/// Bytes that each migration had moved at the previous update.
#[derive(Default)]
struct Rates(HashMap<String, (Instant, u64)>);

impl Rates {
    /// The rate since the previous update; at the first one, the rate since the migration began.
    fn of(&mut self, all: Vec<UnderWay>, now: Instant) -> Vec<Shown> {
        let before = std::mem::take(&mut self.0);
        let shown = all.into_iter().map(|under_way| {
            let key = format!("{:?}", under_way.key());
            let bytes = under_way.wire_bytes;
            let (time, moved) = match before.get(&key) {
                Some((then, moved)) => (now.duration_since(*then), bytes.saturating_sub(*moved)),
                None => (Duration::from_millis(under_way.total_time), bytes),
            };
            self.0.insert(key, (now, bytes));
            Shown {
                under_way,
                wire_bytes_per_second: moved.saturating_mul(1000) / millis(time).max(1),
            }
        });
        shown.collect()
    }
}

#[cfg(test)]
mod tests {
    use vamoose_link::Counters;

    use super::*;

    fn moving(wire_bytes: u64) -> UnderWay {
        let (now, peer) = (Instant::now(), "kvm2".to_owned());
        UnderWay {
            name: Some("web1".to_owned()),
            guest_bytes: 900 << 20,
            wire_bytes,
            total_time: 2_000,
            ..UnderWay::new("gateway", Role::Source, peer, now, &Counters::default())
        }
    }

    #[test]
    fn rate_is_measured_since_the_previous_update() {
        let (mut rates, start) = (Rates::default(), Instant::now());
        for (seconds, moved, rate) in [(0, 100, 50), (2, 500, 200), (3, 500, 0), (4, 400, 0)] {
            let now = start + Duration::from_secs(seconds);
            let shown = rates.of(vec![moving(moved)], now);
            assert_eq!(shown[0].wire_bytes_per_second, rate, "{seconds} s");
        }
        rates.of(Vec::new(), start);
        assert!(rates.0.is_empty());
    }

    #[test]
    fn line_has_the_known_values() {
        let known = |under_way| {
            text(&Shown {
                under_way,
                wire_bytes_per_second: 150 << 20,
            })
        };
        assert_eq!(
            known(moving(300 << 20)),
            "web1 to kvm2 (gateway): 900 MiB as 300 MiB in 2 s, 150 MiB/s on the wire"
        );
        let all = UnderWay {
            name: Some("\x1b".to_owned()),
            role: Role::Destination,
            target: Some("port 49152".to_owned()),
            status: Some("active".to_owned()),
            method: Some("auto".to_owned()),
            is_bytes: true,
            rounds: Some(3),
            remaining: Some(7 << 20),
            downtime: Some(12),
            ..moving(300 << 20)
        };
        assert_eq!(
            known(all),
            "? from kvm2, port 49152 (gateway), bytes, active: 900 MiB as 300 MiB by auto in 2 s, 150 MiB/s on the wire, \
             round 3, 7 MiB left, paused for 12 ms"
        );
    }
}
