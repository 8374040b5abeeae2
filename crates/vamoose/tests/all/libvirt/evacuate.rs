//! `vamoose evacuate` through gateways: limits, interruption and continuation, a guest that cannot move, and a guest that moves at
//! the second try.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use lab::vamoose::{Ended, Keys, Vamoose};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::{
    hosts::{Crowd, Generation, Member, Passage, Way, Where},
    in_all_generations,
};
use crate::common::{LIMIT, MIB, vamoose};

/// Bytes in a guest's memory that have to be sent.
const CONTENT: u64 = 24 * MIB;

/// Number of guests, without [`LATE`].
const GUESTS: usize = 9;

/// A guest whose disk is only on its host.
const LOCAL: &str = "local";

/// A guest whose QEMU reads a file at its start that the other host lacks at first.
const LATE: &str = "late";

/// Options for two migrations at once that take long.
const TWO_SLOWLY: [&str; 6] = [
    "--max-bandwidth",
    "10M",
    "--parallel",
    "2",
    "--except",
    LATE,
];

const LATE_FILE: &str = "/var/lib/late";

#[test]
fn a_host_is_emptied_through_gateways_whatever_comes_between() -> Result<()> {
    in_all_generations(emptied)
}

fn emptied(generation: &Generation) -> Result<()> {
    let keys = Keys::make(vamoose())?;
    let crowd = Crowd::hosts(generation, Way::Gateways, CONTENT, 1_000_000_000)?;
    let mut passage = Passage::new(&crowd.hosts, &keys)?;
    passage.prepare(Where::First)?;
    let evacuation = Evacuation::of(&crowd)?;
    evacuation.is_planned()?;
    evacuation.is_without_one_that_ends()?;
    evacuation.is_stopped().with_context(|| passage.said())?;
    evacuation.is_cancelled().with_context(|| passage.said())?;
    evacuation.is_killed().with_context(|| passage.said())?;
    evacuation.is_continued().with_context(|| passage.said())?;
    for name in &evacuation.movable {
        let guest = format!("guest {name}");
        ensure!(passage.said().contains(&guest), "{guest} took another way");
    }
    Ok(())
}

struct Evacuation<'a> {
    crowd: &'a Crowd,
    movable: BTreeSet<String>,
}

impl<'a> Evacuation<'a> {
    fn of(crowd: &'a Crowd) -> Result<Self> {
        let first = Where::First.of(&crowd.hosts);
        fs::create_dir_all(first.path("var/lib"))?;
        fs::File::create(first.path("var/lib/disk"))?.set_len(MIB)?;
        fs::File::create(first.path(&LATE_FILE[1..]))?.set_len(MIB)?;
        let mut movable = BTreeSet::from([LATE.to_owned()]);
        for number in 0..GUESTS {
            let name = format!("web{number}");
            crowd.start(&Member {
                is_persistent: number % 2 == 0,
                ..Member::plain(&name)
            })?;
            movable.insert(name);
        }
        crowd.start(&Member {
            disk: Some("/var/lib/disk"),
            ..Member::plain(LOCAL)
        })?;
        crowd.start(&Member {
            content: Some(LATE_FILE),
            ..Member::plain(LATE)
        })?;
        let evacuation = Self { crowd, movable };
        evacuation.expect_moved(&BTreeSet::new())?;
        Ok(evacuation)
    }

    fn command(&self, arguments: &[&str]) -> Result<Command> {
        let program = vamoose().to_str().context("the name of a folder")?;
        let mut command = Where::First.of(&self.crowd.hosts).command(program);
        command.args(["evacuate", "localhost", "--to", "qemu+tcp://host2/system"]);
        command.args(["--backoff", "1", "--json", "/etc/host/report"]);
        command.args(arguments);
        Ok(command)
    }

    fn start(&self, arguments: &[&str]) -> Result<Vamoose> {
        Vamoose::start(&mut self.command(arguments)?)
    }

    fn report(&self) -> Result<Report> {
        let host = Where::First.of(&self.crowd.hosts);
        let text = fs::read_to_string(host.path("etc/host/report"))?;
        Report::parse(&text).with_context(|| text.clone())
    }

    /// Expects these guests only on the other host, and all others only on the first one.
    fn expect_moved(&self, moved: &BTreeSet<String>) -> Result<()> {
        let mut stay: BTreeSet<_> = self.movable.difference(moved).cloned().collect();
        stay.insert(LOCAL.to_owned());
        self.crowd.expect(Where::First, &stay)?;
        self.crowd.expect(Where::Second, moved)
    }

    /// A dry run changes nothing. Unreachable hosts are left out, and no host may be named twice.
    fn is_planned(&self) -> Result<()> {
        for host in ["host1", "host2"] {
            let again = format!("qemu+tcp://{host}/system?again=1");
            let ended = self.start(&["--dry-run", "--to", &again])?.finish(LIMIT)?;
            ended.failure(&format!("and {again} are the same host"))?;
        }
        let local = ["--dry-run", "--p2p", "--to", "localhost"];
        self.start(&local)?.finish(LIMIT)?.failure("with --p2p")?;
        let slow = ["--dry-run", "--max-bandwidth", "9M"];
        self.start(&slow)?
            .finish(LIMIT)?
            .failure("too little for 2 migrations at once")?;
        let more = ["--dry-run", "--to", "qemu+tcp://127.0.0.1:1/system"];
        let ended = self.start(&more)?.finish(LIMIT)?;
        let ended = ended.failure("1 guests cannot move")?;
        ensure!(
            ended
                .stderr
                .contains("nothing moves to 127.0.0.1: cannot reach"),
            "{}",
            ended.stderr
        );
        ensure!(
            !ended.stderr.contains("cannot compare CPUs"),
            "{}",
            ended.stderr
        );
        let said = ended.stdout;
        for name in &self.movable {
            let line = said.lines().find(|line| line.starts_with(name.as_str()));
            ensure!(
                line.is_some_and(|line| line.contains("-> host2: about ") && line.ends_with(" MiB")),
                "{said}"
            );
        }
        ensure!(said.contains("stays: disk vda is /var/lib/disk"), "{said}");
        ensure!(said.contains("all: about "), "{said}");
        // With a limit, time as well.
        let ended = self
            .start(&["--dry-run", "--max-bandwidth", "200M"])?
            .finish(LIMIT)?;
        let timed = ended.failure("1 guests cannot move")?.stdout;
        let are_timed = timed
            .lines()
            .filter(|line| line.contains("-> host2"))
            .all(|line| line.contains(" MiB in "));
        ensure!(are_timed, "{timed}");
        self.expect_moved(&BTreeSet::new())
    }

    /// A guest that is destroyed during its migration is not in doubt: libvirt knows why it is shut off.
    fn is_without_one_that_ends(&self) -> Result<()> {
        const SHORT: &str = "short";
        self.crowd.start(&Member {
            is_persistent: true,
            ..Member::plain(SHORT)
        })?;
        let run = self.start(&["--guest", SHORT, "--parallel", "1", "--max-bandwidth", "5M"])?;
        run.wait_for(" moves to ", LIMIT)?;
        let start = Instant::now();
        // Until it is really under way.
        while self.crowd_on_second()?.is_empty() {
            ensure!(start.elapsed() < LIMIT, "nothing is under way");
        }
        let first = Where::First.of(&self.crowd.hosts);
        first.virsh(["destroy", SHORT])?.success()?;
        let ended = run.finish(LIMIT)?;
        let report = self.report()?;
        let reason = report.reason(SHORT);
        ensure!(
            reason == "it no longer runs: destroyed",
            "{reason}: {}",
            ended.stderr
        );
        ended.failure("has not moved to host2: it no longer runs: destroyed")?;
        first.virsh(["undefine", SHORT])?.success()?;
        self.expect_moved(&BTreeSet::new())
    }

    /// Two migrate at once, no faster than allowed. After the signal, those under way still move, and no others.
    fn is_stopped(&self) -> Result<()> {
        const RATE: u64 = 16 * MIB;
        let run = self.start(&[
            "--max-bandwidth",
            "16M",
            "--parallel",
            "2",
            "--except",
            LATE,
        ])?;
        run.wait_for("has moved to ", LIMIT)?;
        run.signal(Signal::INT)?;
        let ended = run.finish(LIMIT)?.failure("stopped: ")?;
        let first = ended.stderr.find(" cannot move: disk vda");
        ensure!(
            first < ended.stderr.find(" moves to host2"),
            "{}",
            ended.stderr
        );
        let (most, started) = at_once(&ended);
        ensure!(most == 2, "{most} at once: {}", ended.stderr);
        let report = self.report()?;
        let moved = report.names("moved");
        ensure!(report.status == "stopped", "{}", report.status);
        ensure!(moved == started, "{moved:?} instead of {started:?}");
        ensure!(moved.len() < GUESTS, "it was not stopped");
        // A busy machine is only slower. At such rates, QEMU's packets are large compared with its limit for 100 ms.
        let least = report.bytes as f64 / RATE as f64 * 0.6;
        let took = report.took.as_secs_f64();
        ensure!(took >= least && report.bytes >= CONTENT, "{report:?}");
        self.expect_moved(&moved)
    }

    /// The second signal cancels the migrations under way.
    fn is_cancelled(&self) -> Result<()> {
        let before = self.crowd_on_second()?;
        let run = self.start(&TWO_SLOWLY)?;
        run.wait_for(" moves to ", LIMIT)?;
        run.signal(Signal::INT)?;
        run.wait_for("no further guests", LIMIT)?;
        run.signal(Signal::INT)?;
        run.finish(LIMIT)?.failure("stopped: 0 of ")?;
        let report = self.report()?;
        ensure!(report.reason_of("cancelled").len() == 2, "{report:?}");
        self.expect_moved(&before)
    }

    /// When the process is killed, libvirt cancels the migrations under way.
    fn is_killed(&self) -> Result<()> {
        let before = self.crowd_on_second()?;
        let mut run = self.start(&TWO_SLOWLY)?;
        run.wait_for(" moves to ", LIMIT)?;
        let start = Instant::now();
        // Until it is really under way.
        while self.crowd_on_second()? == before {
            ensure!(start.elapsed() < LIMIT, "nothing is under way");
        }
        run.kill()?;
        while let Err(error) = self.expect_moved(&before) {
            ensure!(start.elapsed() < LIMIT, "{error:#}");
        }
        Ok(())
    }

    /// All other guests move with --p2p. One of them, which is paused, needs a second try.
    fn is_continued(&self) -> Result<()> {
        let [first, second] = &self.crowd.hosts.hosts;
        first.virsh(["suspend", LATE])?.success()?;
        let run = self.start(&["--p2p", "--parallel", "3", "--retries", "100"])?;
        run.wait_for(&format!("{LATE} has not moved to host2"), LIMIT)?;
        let late = second.path(&LATE_FILE[1..]);
        fs::create_dir_all(late.parent().context("a folder")?)?;
        fs::File::create(late)?.set_len(MIB)?;
        let ended = run.finish(LIMIT)?.failure("guests have moved")?;
        let report = self.report()?;
        ensure!(report.status == "incomplete", "{}", ended.stderr);
        ensure!(
            report.guests[LATE]["tries"].as_u64() >= Some(2),
            "{report:?}"
        );
        let stay = report.names("stays");
        ensure!(
            stay == BTreeSet::from([LOCAL.to_owned()]),
            "{}",
            ended.stderr
        );
        ensure!(
            report
                .reason(LOCAL)
                .starts_with("disk vda is /var/lib/disk")
        );
        ensure!(report.guests[LATE]["state"] == "paused", "{report:?}");
        second.virsh(["resume", LATE])?.success()?;
        self.expect_moved(&self.movable)?;
        let again = self.start(&["--except", LOCAL])?.finish(LIMIT)?;
        again.success().map(drop)
    }

    fn crowd_on_second(&self) -> Result<BTreeSet<String>> {
        let host = Where::Second.of(&self.crowd.hosts);
        let names = host.virsh(["list", "--name"])?.success()?;
        Ok(names.split_whitespace().map(str::to_owned).collect())
    }
}

/// The most migrations at once, and all guests that were started, from the order of messages.
fn at_once(ended: &Ended) -> (usize, BTreeSet<String>) {
    let (mut now, mut most, mut started) = (BTreeSet::new(), 0, BTreeSet::new());
    for line in ended.stderr.lines() {
        let name = |end: &str| line.split_once(end)?.0.split_whitespace().last();
        if let Some(name) = name(" moves to ") {
            now.insert(name);
            started.insert(name.to_owned());
        } else if let Some(name) = name(" has moved to ") {
            now.remove(name);
        }
        most = most.max(now.len());
    }
    (most, started)
}

#[derive(Debug)]
struct Report {
    status: String,
    took: Duration,
    bytes: u64,
    guests: BTreeMap<String, Value>,
}

impl Report {
    fn parse(text: &str) -> Result<Self> {
        let report: Value = serde_json::from_str(text)?;
        let guests = report["guests"].as_array().context("guests")?;
        let name = |guest: &Value| guest["name"].as_str().unwrap_or_default().to_owned();
        Ok(Self {
            status: report["status"].as_str().context("status")?.to_owned(),
            took: Duration::from_millis(report["total-time"].as_u64().context("total-time")?),
            bytes: guests
                .iter()
                .filter_map(|guest| guest["bytes"].as_u64())
                .sum(),
            guests: guests
                .iter()
                .map(|guest| (name(guest), guest.clone()))
                .collect(),
        })
    }

    fn names(&self, outcome: &str) -> BTreeSet<String> {
        let has = |guest: &Value| guest["outcome"] == outcome;
        let guests = self.guests.iter().filter(|(_, guest)| has(guest));
        guests.map(|(name, _)| name.clone()).collect()
    }

    fn reason(&self, name: &str) -> &str {
        self.guests[name]["reason"].as_str().unwrap_or_default()
    }

    fn reason_of(&self, reason: &str) -> Vec<&String> {
        let names = self.guests.keys();
        names.filter(|name| self.reason(name) == reason).collect()
    }
}

/// Ctrl-C reaches `vamoose`, but neither `virsh` nor its ssh.
#[test]
fn virsh_does_not_get_the_signal_that_stops_an_evacuation() -> Result<()> {
    let folder = TempDir::new()?;
    super::script(
        &folder.path().join("virsh"),
        "echo error: pid, group: $$, $(cut -d' ' -f5 /proc/$$/stat) >&2",
        Command::new("echo").arg("arguments:"),
    )?;
    let output = Command::new(vamoose())
        .args(["evacuate", "host1", "--to", "host2"])
        .env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()))
        .output()?;
    let said = String::from_utf8(output.stderr)?;
    let numbers = said.split_once("pid, group: ").context("no virsh")?.1;
    let numbers = numbers.split([',', ' ', '\n']);
    let numbers: Vec<_> = numbers.filter(|it| !it.is_empty()).collect();
    ensure!(numbers.len() == 2 && numbers[0] == numbers[1], "{said}");
    ensure!(
        said.contains("cannot reach libvirt of host1 by qemu+ssh://host1/system"),
        "{said}"
    );
    Ok(())
}
