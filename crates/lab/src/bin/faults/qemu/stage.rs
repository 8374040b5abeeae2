//! One experiment while it goes on: the QEMUs, the link, the commands, and what is done to them.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lab::counter::Image;
use lab::process::{Process, now};
use lab::qemu::Binary;
use lab::qmp::Event;
use lab::ram::Fill;
use lab::vamoose::Vamoose;
use lab::writer::{self, Disk};
use serde_json::{Value, json};

use super::actor::{Actor, State};
use super::host::{Host, STALL};
use super::plan::Plan;
use crate::claim::Claim;
use crate::fault::{Kind, Moment, Role};
use crate::hands::Hands;
use crate::link::Link;
use crate::report::{Broken, Trouble, broken};
use crate::table::Row;
use crate::timeline::Life;

/// What a job keeps over its experiments.
pub(crate) struct Props {
    pub(crate) program: PathBuf,
    pub(crate) binaries: Vec<Binary>,
    /// The source's, the destination's, and another one.
    pub(crate) hosts: [Host; 3],
    /// What a migration takes without faults.
    pub(crate) clean: Duration,
}

pub(crate) const SOURCE_HOST: usize = 0;
pub(crate) const HOST: usize = 1;
pub(crate) const OTHER_HOST: usize = 2;

pub(crate) struct Stage<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) props: &'a mut Props,
    /// The guest's, and its memory at its start.
    pub(crate) disk: Disk,
    pub(crate) image: Image,
    /// The source first.
    pub(crate) actors: Vec<Actor>,
    pub(crate) hands: Hands,
    pub(crate) said: Vec<Said>,
    /// The attempt of which a command wants a word that nobody else has moved the guest.
    confirmed: Option<String>,
    /// The guest has stayed, and its destination has not been ended.
    pub(crate) left_over: bool,
    /// Before the link, which they use.
    commands: Vec<Running>,
    link: Link,
    /// What the source may send in a second, and its downtime limit in milliseconds, for a row of the table.
    pace: (u64, u64),
    outputs: Vec<String>,
}

/// A command to be run.
#[derive(Clone, Debug)]
pub(crate) struct Errand {
    /// In words.
    pub(crate) what: &'static str,
    /// The actors between which it is to move the guest.
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Where it runs.
    host: usize,
    /// Where the destination's server listens, for each path.
    server: Vec<String>,
    /// Of the guest, at that server.
    name: String,
}

/// A command that runs.
struct Running {
    vamoose: Vamoose,
    errand: Errand,
    /// Nothing was broken at its start.
    whole: bool,
}

/// What a command has said at its end.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) errand: Errand,
    pub(crate) claim: Claim,
    pub(crate) at: Duration,
    /// Nothing was broken for so long that it has to know.
    pub(crate) whole: bool,
    /// The source remembers a commit that it has sent or was about to send, or what came of one.
    pub(crate) committed: bool,
}

/// A guest begins to write in a second, unless the machine is very busy.
const BEGINS: Duration = Duration::from_secs(60);
/// How long a command may take when nothing is broken: the longest of its timeout, many times.
const LIMIT: Duration = Duration::from_secs(60);
/// Faults are over by then at the latest.
const REPAIRED: Duration = Duration::from_secs(25);
/// After the last fault a command knows where the guest is within this time: it asks again every few seconds.
const KNOWS: Duration = Duration::from_secs(8);
/// What a source may send in a second, when nothing keeps it in its round.
const RATE: u64 = 1 << 30;
/// The guest writes faster, so a round does not end.
const SLOW_RATE: u64 = 256 << 10;
/// Milliseconds, for a migration of the table that is to end.
const DOWNTIME: u64 = 500;
/// How often the stage looks what is to be done.
const LOOK: Duration = Duration::from_millis(10);

impl<'a> Stage<'a> {
    /// Sets everything up; nothing moves yet.
    pub(crate) fn new(plan: &'a Plan, props: &'a mut Props) -> Result<Self> {
        for host in &mut props.hosts[HOST..] {
            host.start()?;
        }
        let link = Link::new(props.hosts[HOST].address()?, plan.paths())?;
        let disk = Disk::new()?;
        let machine = disk.machine(&props.binaries[plan.versions[0]], plan.ram());
        let machine = machine.content(Fill::Mixed, plan.content).paused();
        let mut source = machine.start()?;
        source.qmp.cont()?;
        let image = writer::wait_begun(&source, BEGINS)?;
        if !plan.runs {
            source.qmp.stop()?;
            // From here on it never runs.
            source.qmp.drain_events();
        }
        let holds = plan.row.as_ref().is_some_and(Row::holds_round);
        let pace = (RATE, if holds { 1 } else { DOWNTIME });
        let source = Actor::new("A", source);
        let destination = props.waiting(plan, &disk, plan.versions[1], "B")?;
        props.hosts[HOST].knows(&plan.name(), &destination.qemu)?;
        let hands = Hands {
            faults: Arc::new(plan.faults.clone()),
            link: link.control().clone(),
            source: source.process.clone(),
            destination: destination.process.clone(),
            disks: Some([SOURCE_HOST, HOST].map(|host| props.hosts[host].disk().clone())),
            cancel: None,
            state: Arc::default(),
        };
        hands.reaches(None, props.hosts[HOST].process()?);
        Ok(Self {
            plan,
            props,
            disk,
            image,
            actors: vec![source, destination],
            hands,
            said: Vec::new(),
            confirmed: None,
            left_over: false,
            commands: Vec::new(),
            link,
            pace,
            outputs: Vec::new(),
        })
    }

    /// Runs the first command with all faults, until everything is repaired and all commands have ended.
    pub(crate) fn run_with_faults(&mut self) -> Result<(), Trouble> {
        self.hands.arm(self.props.clean);
        let first = self.start(self.first_command("the first command"), false)?;
        self.hands
            .reaches(Some(first), self.props.hosts[HOST].process()?);
        let repaired = match &self.plan.row {
            Some(row) => row.fault.lasts.unwrap_or_default() + REPAIRED,
            None => REPAIRED,
        };
        let begin = Instant::now();
        while !self.commands.is_empty() {
            self.strike_as_told();
            self.keep_pace()?;
            for kind in self.hands.work() {
                self.do_rest(kind)?;
            }
            self.collect_ended()?;
            if begin.elapsed() > repaired && !self.hands.is_whole() {
                self.repair_all()?;
            }
            self.expect_end(begin.elapsed().min(self.hands.whole_for()))?;
        }
        self.expect_servers()?;
        self.repair_all()?;
        Ok(())
    }

    /// Strikes with the faults whose moments the source's QEMU has told.
    fn strike_as_told(&mut self) {
        let events = self.actors[0].events();
        let has = |name: &str, is_it: &dyn Fn(&Event) -> bool| {
            events
                .iter()
                .any(|event| event.name == name && is_it(event))
        };
        self.hands.strike_at(|moment| match moment {
            Moment::Round(round) => has("MIGRATION_PASS", &|event| {
                event.data["pass"].as_u64() >= Some(round)
            }),
            Moment::Paused => has("STOP", &|_| true),
            Moment::Time(_) | Moment::At(_) => false,
        });
    }

    /// Keeps a migration of the table in its round until the cut is over: the guest writes more than is sent meanwhile.
    fn keep_pace(&mut self) -> Result<()> {
        let Some(row) = self.plan.row.as_ref().filter(|row| row.holds_round()) else {
            return Ok(());
        };
        let qmp = &mut self.actors[0].qemu.qmp;
        let pace = if self.hands.struck().is_empty() {
            // From here on the guest writes more than is sent, so the next round does not end.
            let ends = |ram: &Value| ram["remaining"].as_u64().is_some_and(|it| it < 512 << 10);
            let slow = row.is_in_later_round() && ends(&qmp.query_migrate()?["ram"]);
            if slow { (SLOW_RATE, 1) } else { self.pace }
        } else if self.hands.is_whole() {
            (RATE, DOWNTIME)
        } else {
            (SLOW_RATE, 1)
        };
        if pace != self.pace {
            let (rate, downtime) = pace;
            let parameters = json!({ "max-bandwidth": rate, "downtime-limit": downtime });
            let set = qmp.set_parameters(parameters);
            set.with_context(|| format!("setting the pace for {row}"))?;
            self.pace = pace;
        }
        Ok(())
    }

    /// Runs a command with nothing broken, to its end.
    pub(crate) fn run(&mut self, errand: Errand) -> Result<Claim, Trouble> {
        self.start(errand, true)?;
        let begin = Instant::now();
        while !self.commands.is_empty() {
            self.collect_ended()?;
            self.expect_end(begin.elapsed())?;
        }
        let said = self.said.last().context("a command that said nothing")?;
        Ok(said.claim)
    }

    /// The command that moves the guest from the source to the first destination.
    pub(crate) fn first_command(&self, what: &'static str) -> Errand {
        let to = self.link.addresses();
        self.errand(what, [0, 1], SOURCE_HOST, to, &self.plan.name())
    }

    /// A command from one QEMU on a host to another one, which `name` names at the server `to`.
    pub(crate) fn errand(
        &self,
        what: &'static str,
        [from, to]: [usize; 2],
        host: usize,
        server: Vec<String>,
        name: &str,
    ) -> Errand {
        Errand {
            what,
            from,
            to,
            host,
            server,
            name: name.to_owned(),
        }
    }

    /// Adds a QEMU that waits at a host, and says its number.
    pub(crate) fn add_waiting(
        &mut self,
        host: usize,
        version: usize,
        name: &str,
        label: &str,
    ) -> Result<usize> {
        let actor = self.props.waiting(self.plan, &self.disk, version, label)?;
        self.props.hosts[host].knows(name, &actor.qemu)?;
        self.actors.push(actor);
        Ok(self.actors.len() - 1)
    }

    /// No QEMU that lives keeps silent.
    pub(crate) fn expect_answers(&mut self) -> Result<(), Trouble> {
        for actor in &mut self.actors {
            if actor.state() == State::Mute {
                // Hangs, or has had no processor?
                let threads = lab::proc::threads(actor.qemu.pid());
                let what = format!("{} (QEMU {}; {threads})", actor.name, actor.qemu.version);
                return broken(Broken::Mute, what);
            }
        }
        Ok(())
    }

    pub(crate) fn lives(&mut self) -> Vec<Life> {
        self.actors.iter_mut().map(Actor::life).collect()
    }

    /// When the link first saw this message.
    pub(crate) fn heard(&self, word: &str) -> Option<Duration> {
        let mut heard = self.link.control().heard().into_iter();
        heard.find(|heard| heard.word == word).map(|heard| heard.at)
    }

    /// The messages of the control connections.
    pub(crate) fn words(&self) -> Vec<String> {
        self.link.control().words()
    }

    /// Whether a command did not know where the guest was.
    pub(crate) fn was_in_doubt(&self) -> bool {
        self.said.iter().any(|said| said.claim == Claim::InDoubt)
    }

    fn start(&mut self, errand: Errand, whole: bool) -> Result<Process> {
        let mut command = Command::new(&self.props.program);
        command.args(["migrate", "--json", "-", "--qmp"]);
        command.arg(self.actors[errand.from].qemu.qmp_socket());
        command.args(["--name", &errand.name]);
        for address in &errand.server {
            command.args(["--to", address]);
        }
        // The link's messages are read.
        command.arg("--insecure");
        if self.plan.row.is_none() {
            command.args(["--stall-timeout", STALL, "--downtime-max", "5"]);
        } else {
            command.args(["--downtime-limit", &self.pace.1.to_string()]);
        }
        command.args(&self.plan.options);
        if let Some(attempt) = &self.confirmed {
            command.args(["--confirm", attempt]);
        }
        command.arg("--state-dir");
        command.arg(self.props.hosts[errand.host].disk().path());
        let vamoose = Vamoose::start(&mut command)?;
        let process = vamoose.process().clone();
        let to = &self.actors[errand.to].name;
        self.hands.tell(&format!("{} starts, to {to}", errand.what));
        self.commands.push(Running {
            vamoose,
            errand,
            whole,
        });
        Ok(process)
    }

    /// What only the stage can do about a fault: at its end, or when it strikes.
    fn do_rest(&mut self, kind: Kind) -> Result<()> {
        match kind {
            Kind::Kill(Role::Serve) => self.restart_server()?,
            Kind::SameAgain => {
                let errand = self.first_command("the same command meanwhile");
                self.start(errand, false)?;
            }
            Kind::OtherHost => {
                let name = self.plan.name();
                let to = self.add_waiting(OTHER_HOST, self.plan.versions[2], &name, "C")?;
                let address = self.props.address(OTHER_HOST)?;
                let what = "the command to another host";
                let errand = self.errand(what, [0, to], SOURCE_HOST, address, &name);
                self.start(errand, false)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn repair_all(&mut self) -> Result<()> {
        let repaired = self.hands.finish();
        repaired.into_iter().try_for_each(|kind| self.do_rest(kind))
    }

    /// Ends the destination's server, if that has not been done, and starts it anew.
    pub(crate) fn restart_server(&mut self) -> Result<()> {
        let host = &mut self.props.hosts[HOST];
        host.restart()?;
        self.link.control().lead_to(host.address()?);
        Ok(())
    }

    /// A server that was not killed runs.
    fn expect_servers(&self) -> Result<(), Trouble> {
        let killed = self.hands.struck().contains(&Kind::Kill(Role::Serve));
        for host in [HOST, OTHER_HOST] {
            let may_be_dead = host == HOST && killed;
            if !may_be_dead && !self.props.hosts[host].is_up() {
                return broken(Broken::Crash, "a server has ended, but was not killed");
            }
        }
        Ok(())
    }

    /// Takes what the commands have said that have ended; waits a moment for them.
    fn collect_ended(&mut self) -> Result<(), Trouble> {
        if let Some(first) = self.commands.first() {
            first.vamoose.process().wait(LOOK);
        }
        let ended = |command: &mut Running| command.vamoose.process().has_ended();
        let ended: Vec<_> = self.commands.extract_if(.., ended).collect();
        ended
            .into_iter()
            .try_for_each(|command| self.collect(command))
    }

    fn collect(&mut self, command: Running) -> Result<(), Trouble> {
        let at = now();
        let whole = command.whole || self.hands.whole_for() > KNOWS;
        let what = command.errand.what;
        let ended = command.vamoose.finish(LIMIT)?;
        self.outputs
            .push(format!("{what}, {}:\n{}", ended.status, ended.stderr));
        let claim = match Claim::of(&ended) {
            Ok(claim) => claim,
            Err(contradiction) => {
                return broken(Broken::Untrue, format!("{what}: {contradiction}"));
            }
        };
        self.hands.tell(&format!("{what} ends: {claim}"));
        if claim == Claim::Unconfirmed {
            // Nobody uses another tool here.
            let hint = ended.stderr.split("--confirm ").nth(1);
            let attempt = hint.and_then(|hint| hint.split_whitespace().next());
            self.confirmed = attempt.map(str::to_owned);
        }
        let committed =
            self.props.hosts[command.errand.host].has_committed(&command.errand.name)?;
        self.said.push(Said {
            errand: command.errand,
            claim,
            at,
            whole,
            committed,
        });
        Ok(())
    }

    /// Commands end within some time in which nothing is broken.
    fn expect_end(&mut self, whole_for: Duration) -> Result<(), Trouble> {
        let Some(command) = self.commands.first().filter(|_| whole_for > LIMIT) else {
            return Ok(());
        };
        let (what, said) = (command.errand.what, command.vamoose.stderr());
        self.outputs.push(format!("{what}, which runs on:\n{said}"));
        self.expect_answers()?;
        broken(
            Broken::Hangs,
            format!("{what} runs on after {LIMIT:?} without a fault"),
        )
    }

    /// Everything that happened, in its order.
    pub(crate) fn story(&mut self) -> Vec<String> {
        let mut story = Vec::new();
        for actor in &mut self.actors {
            let name = actor.name.clone();
            if let Some(at) = actor.process.ended_at() {
                let how = actor.qemu.wait_exit(Duration::ZERO);
                let how = how.map_or_else(|error| error.to_string(), |how| how.to_string());
                let what = format!("{name} has ended ({how}; {})", actor.qemu.stderr());
                story.push((at, what));
            }
            for event in actor.events() {
                let status = event.data["status"].as_str().unwrap_or_default();
                let what = format!("{name}: {} {status}", event.name);
                story.push((event.timestamp, what.trim_end().to_owned()));
            }
        }
        let mut lines = self.hands.story(story);
        for actor in &mut self.actors {
            let (state, version) = (actor.state(), actor.qemu.version);
            lines.push(format!("{} (QEMU {version}): {state:?}", actor.name));
        }
        lines.append(&mut self.outputs);
        for (host, name) in [(HOST, "its server"), (OTHER_HOST, "the other server")] {
            let said = self.props.hosts[host].said();
            lines.push(format!("{name}:\n{}", last_lines(&said)));
        }
        lines
    }
}

impl Props {
    /// A machine that waits for the guest with this disk.
    fn waiting(&self, plan: &Plan, disk: &Disk, version: usize, label: &str) -> Result<Actor> {
        let mut machine = disk.machine(&self.binaries[version], plan.ram()).incoming();
        if plan.paused {
            machine = machine.paused();
        }
        Ok(Actor::new(label, machine.start()?))
    }

    pub(crate) fn address(&self, host: usize) -> Result<Vec<String>> {
        Ok(vec![format!("tcp:{}", self.hosts[host].address()?)])
    }
}

impl Plan {
    /// Of the guest, on all hosts.
    pub(crate) fn name(&self) -> String {
        format!("vm{}", self.number)
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
