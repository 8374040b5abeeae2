//! One experiment: two QEMUs, `vamoose serve` and `vamoose migrate` with two paths between them, and one cut.

use std::{
    collections::HashMap,
    net::SocketAddr,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use lab::{
    counter::Image,
    cuts::{self, Experiment, Phase},
    middlebox::Middlebox,
    net::{End as WireEnd, Link},
    qemu::{self, Binary, Qemu},
    ram::Fill,
    vamoose::{Keys, Vamoose, program, state_dir},
    writer::{self, Disk},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::options::{NetworkName, Options, Plan, Security, Setting};

/// What all experiments share.
pub(crate) struct Studio {
    program: PathBuf,
    binaries: Vec<Binary>,
    keys: Keys,
    options: [String; 4],
    /// The downtimes of migrations without a cut.
    uncut: Mutex<HashMap<(Setting, bool), Option<Duration>>>,
}

/// What became of an experiment whose guest is well.
pub(crate) struct Found {
    /// When the link was cut, if it was.
    pub(crate) cut_after: Option<Duration>,
    /// How long the command ran.
    pub(crate) time: Duration,
    pub(crate) end: End,
}

/// How a migration ended.
pub(crate) enum End {
    Moved {
        /// From the STOP of one QEMU to the RESUME of the other one; `None` of a guest that was paused before.
        downtime: Option<Duration>,
        /// The same without a cut.
        uncut: Option<Duration>,
        reconnects: u64,
    },
    Stayed {
        why: String,
    },
}

/// Sent at this rate the first round takes some seconds.
const RATE: u64 = 8 << 20;
/// The guest writes faster: rounds follow each other until this is changed.
const LATER_RATE: u64 = 256 << 10;
const RAM: u64 = 24 << 20;
const SEED: u64 = 1;
const LIMIT: Duration = Duration::from_secs(180);
/// How often QEMU is asked how far it is.
const LOOK: Duration = Duration::from_millis(2);

impl Studio {
    pub(crate) fn new(options: &Options) -> Result<Self> {
        let program = program(options.vamoose.as_deref(), "vamoose")?;
        let keys = Keys::make(&program)?;
        let number = |number: std::num::NonZeroUsize| number.to_string();
        Ok(Self {
            program,
            binaries: qemu::available().to_vec(),
            keys,
            options: [
                "--streams".to_owned(),
                number(options.streams),
                "--channels".to_owned(),
                number(options.channels),
            ],
            uncut: Mutex::default(),
        })
    }

    /// The QEMUs of this machine.
    pub(crate) fn binaries(&self) -> &[Binary] {
        &self.binaries
    }

    /// Makes an experiment.
    ///
    /// # Errors
    /// When the guest is not well at exactly one end, and when the experiment cannot be made.
    pub(crate) fn experiment(&self, plan: &Plan) -> Result<Found> {
        let uncut = self.uncut(plan)?;
        let network = Network::new(self, plan)?;
        let mut stage = Stage::new(self, &plan.setting, &network)?;
        let begin = Instant::now();
        let (ended, outcome) = cuts::run(plan.row, &network.paths(), |experiment| {
            stage.migrate(Some((experiment, plan.row.phase)))
        })?;
        let time = begin.elapsed();
        let end = stage.judge(ended?, uncut)?;
        Ok(Found {
            cut_after: outcome.cut_after,
            time,
            end,
        })
    }

    /// The downtime without a cut, which is measured when it is needed first.
    fn uncut(&self, plan: &Plan) -> Result<Option<Duration>> {
        let key = (plan.setting.clone(), plan.network == NetworkName::Wires);
        let known = || {
            let known = self.uncut.lock().unwrap_or_else(PoisonError::into_inner);
            known.get(&key).copied()
        };
        if let Some(known) = known() {
            return Ok(known);
        }
        let network = Network::new(self, plan)?;
        let mut stage = Stage::new(self, &plan.setting, &network)?;
        let ended = stage.migrate(None)?;
        let stderr = ended.stderr.clone();
        let end = stage.judge(ended, None)?;
        let End::Moved { downtime, .. } = end else {
            bail!("a migration without a cut failed: {}", stderr.trim());
        };
        let mut uncut = self.uncut.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(*uncut.entry(key).or_insert(downtime))
    }
}

/// What is between the hosts, and the server behind it.
struct Network {
    parts: Parts,
    /// The server's, and where it finds QEMUs.
    server: Vamoose,
    monitors: TempDir,
    _state: TempDir,
}

enum Parts {
    Middleboxes([Middlebox; 2]),
    /// And the server's port.
    Wires(Link, u16),
}

impl Network {
    fn new(studio: &Studio, plan: &Plan) -> Result<Self> {
        let (monitors, state) = (TempDir::new()?, state_dir()?);
        let link = match plan.network {
            NetworkName::Middlebox => None,
            NetworkName::Wires => Some(Link::of_wires(&[None, None])?),
        };
        let (mut command, listen) = match &link {
            None => (Command::new(&studio.program), "tcp:127.0.0.1:0"),
            Some(link) => (link.destination.command(&studio.program), "tcp:0.0.0.0:0"),
        };
        command.args(["serve", "--listen", listen, "--qmp-dir"]);
        command
            .arg(monitors.path())
            .arg("--state-dir")
            .arg(state.path());
        command.args(security(&plan.setting, &studio.keys.destination));
        let server = Vamoose::start(&mut command)?;
        let address = server.wait_for("taking migrations on tcp:", LIMIT)?;
        let address: SocketAddr = address.parse().context("the server's address")?;
        let parts = match link {
            None => Parts::Middleboxes([Middlebox::new(address)?, Middlebox::new(address)?]),
            Some(link) => Parts::Wires(link, address.port()),
        };
        Ok(Self {
            parts,
            server,
            monitors,
            _state: state,
        })
    }

    fn paths(&self) -> Vec<&dyn cuts::Path> {
        match &self.parts {
            Parts::Middleboxes(boxes) => boxes.iter().map(|it| it as &dyn cuts::Path).collect(),
            Parts::Wires(link, _) => link.wires.iter().map(|it| it as &dyn cuts::Path).collect(),
        }
    }

    /// A command of the source, with the addresses of the server.
    fn migrate(&self, program: &Path) -> Command {
        match &self.parts {
            Parts::Middleboxes(boxes) => {
                let mut command = Command::new(program);
                command.arg("migrate");
                for middlebox in boxes {
                    command.args(["--to", &format!("tcp:{}", middlebox.address())]);
                }
                command
            }
            Parts::Wires(link, port) => {
                let mut command = link.source.command(program);
                command.arg("migrate");
                for wire in &link.wires {
                    let to = format!("tcp:{}:{port}", wire.address(WireEnd::Destination));
                    let bind = wire.address(WireEnd::Source).to_string();
                    command.args(["--to", &to, "--bind", &bind]);
                }
                command
            }
        }
    }
}

/// The two QEMUs.
struct Stage<'a> {
    source: Qemu,
    destination: Qemu,
    disk: Disk,
    /// The guest's memory at its start.
    image: Image,
    command: Command,
    network: &'a Network,
    /// Whether the guest runs at the beginning.
    runs: bool,
    _state: TempDir,
}

/// How the command ended.
struct Ended {
    has_moved: bool,
    report: Value,
    stderr: String,
}

impl<'a> Stage<'a> {
    fn new(studio: &Studio, setting: &Setting, network: &'a Network) -> Result<Self> {
        let (disk, state) = (Disk::new()?, state_dir()?);
        let [here, there] = setting.qemus.map(|qemu| &studio.binaries[qemu]);
        let machine = disk.machine(here, RAM).content(Fill::Mixed, SEED);
        let mut source = machine.start()?;
        let destination = disk.machine(there, RAM).incoming().start()?;
        let image = writer::wait_begun(&source, LIMIT)?;
        source
            .qmp
            .set_parameters(json!({ "max-bandwidth": RATE }))?;
        goes_on(&source)?;
        if !setting.runs() {
            source.qmp.stop()?;
        }
        symlink(
            destination.qmp_socket(),
            network.monitors.path().join("vm.qmp"),
        )?;
        let mut command = network.migrate(&studio.program);
        command.args([
            "--json",
            "-",
            "--name",
            "vm",
            "--downtime-limit",
            "1",
            "--qmp",
        ]);
        command.arg(source.qmp_socket());
        command
            .args(["--method", &setting.method])
            .args(&studio.options);
        command.args(security(setting, &studio.keys.source));
        command.arg("--state-dir").arg(state.path());
        Ok(Self {
            source,
            destination,
            disk,
            image,
            command,
            network,
            runs: setting.runs(),
            _state: state,
        })
    }

    /// Runs the command, and reports its phases. It stays in the one that is cut until the link is mended.
    fn migrate(&mut self, experiment: Option<(&Experiment<'_>, Phase)>) -> Result<Ended> {
        let reached = |phase| {
            if let Some((experiment, cut_in)) = experiment {
                experiment.reached(phase);
                if phase == cut_in && phase < Phase::Switchover && phase > Phase::FirstConnection {
                    experiment.wait_until_mended(LIMIT);
                }
            }
        };
        reached(Phase::FirstConnection);
        let migration = Vamoose::start(&mut self.command)?;
        let (source, destination) = (&mut self.source.qmp, &mut self.destination.qmp);
        let steps = [
            Phase::FirstRound,
            Phase::LaterRound,
            Phase::Switchover,
            Phase::HandOver,
        ];
        for phase in steps {
            if phase == Phase::Switchover {
                source.set_parameters(json!({ "max-bandwidth": RATE, "downtime-limit": 500 }))?;
            }
            let (begin, mut is_slow) = (Instant::now(), false);
            loop {
                let is_there = match phase {
                    Phase::FirstRound => {
                        source.query_migrate()?["ram"]["transferred"].as_u64() > Some(1 << 20)
                    }
                    Phase::LaterRound => {
                        let ram = &source.query_migrate()?["ram"];
                        // Before the round ends: from then on the guest writes more than is sent.
                        if !is_slow && ram["remaining"].as_u64() < Some(512 << 10) {
                            source.set_parameters(json!({ "max-bandwidth": LATER_RATE }))?;
                            is_slow = true;
                        }
                        ram["dirty-sync-count"].as_u64() > Some(1)
                    }
                    Phase::Switchover => source.query_status()? != "running",
                    _ => destination.query_status().is_ok_and(|it| it != "inmigrate"),
                };
                if is_there {
                    break;
                }
                if migration.has_ended()? {
                    return ended(migration);
                }
                ensure!(
                    begin.elapsed() < LIMIT,
                    "{phase} does not come; migrate: {}; serve: {}",
                    migration.stderr(),
                    self.network.server.stderr()
                );
                thread::sleep(LOOK);
            }
            // The relay takes some MiB of a small guest while the link is cut: as if it were a large one, the round goes on.
            if phase == Phase::FirstRound {
                source.set_parameters(json!({ "max-bandwidth": LATER_RATE }))?;
            }
            reached(phase);
            if phase == Phase::FirstRound {
                source.set_parameters(json!({ "max-bandwidth": RATE }))?;
            }
        }
        ended(migration)
    }

    /// Looks where the guest is, and whether it is well there.
    fn judge(&mut self, ended: Ended, uncut: Option<Duration>) -> Result<End> {
        let told = format!("{}; serve: {}", ended.stderr, self.network.server.stderr());
        let (here, there) = match ended.has_moved {
            true => (&mut self.destination, &mut self.source),
            false => (&mut self.source, &mut self.destination),
        };
        let status = if self.runs { "running" } else { "paused" };
        here.qmp.wait_status(status, LIMIT).context(told.clone())?;
        match there.qmp.query_status() {
            Ok(status) if ended.has_moved => {
                ensure!(
                    status == "postmigrate",
                    "the source is in state {status}: {told}"
                );
            }
            // Nothing has begun there.
            Ok(status) if status == "inmigrate" => {}
            // A whole guest is neither run nor ended there before somebody knows: the command says so (docs/hand-over.md).
            Ok(status) if status == "paused" && ended.stderr.contains("has not confirmed") => {}
            // The server ends what will not be a guest, as soon as it knows.
            _ => drop(there.wait_exit(LIMIT).context(told.clone())?),
        }
        // What was paused shows now that its disk has moved with it.
        if !self.runs {
            here.qmp.cont()?;
        }
        goes_on(here).context(told)?;
        here.qmp.stop()?;
        self.image.check(here.ram()).context("the guest's memory")?;
        here.kill()?;
        self.disk
            .check(here.ram(), writer::Ended::Stopped)
            .context("the guest's disk")?;
        if !ended.has_moved {
            let why = ended.stderr.lines().last().unwrap_or_default();
            return Ok(End::Stayed {
                why: why.replace('|', "/"),
            });
        }
        let downtime = match self.runs {
            true => {
                let stopped = last(&mut self.source, "STOP")?;
                Some(last(&mut self.destination, "RESUME")?.saturating_sub(stopped))
            }
            false => None,
        };
        Ok(End::Moved {
            downtime,
            uncut,
            reconnects: ended.report["link"]["reconnects"].as_u64().unwrap_or(0),
        })
    }
}

/// Waits until the guest has written on.
fn goes_on(qemu: &Qemu) -> Result<()> {
    writer::wait_written(qemu, 3, LIMIT)
}

fn ended(migration: Vamoose) -> Result<Ended> {
    let ended = migration.finish(LIMIT)?;
    let report = serde_json::from_str(&ended.stdout).unwrap_or_default();
    Ok(Ended {
        has_moved: ended.status.success(),
        report,
        stderr: ended.stderr,
    })
}

/// When a QEMU sent its last event of this name.
fn last(qemu: &mut Qemu, name: &str) -> Result<Duration> {
    let events = qemu.qmp.drain_events();
    let found = events.iter().rev().find(|event| event.name == name);
    Ok(found.with_context(|| format!("no event {name}"))?.timestamp)
}

/// The options of the host whose keys are in the folder `keys`.
fn security(setting: &Setting, keys: &Path) -> Vec<PathBuf> {
    match setting.security {
        Security::Insecure => vec!["--insecure".into()],
        Security::Keys => vec!["--keys".into(), keys.to_owned()],
    }
}
