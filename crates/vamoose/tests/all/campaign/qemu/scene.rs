//! A running experiment with two QEMUs: the QEMUs, the link, and the commands.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lab::counter::Image;
use lab::process::{Process, now};
use lab::ram::Fill;
use lab::vamoose::Vamoose;
use lab::writer::{self, Disk};

use super::host::STALL;
use super::instance::{Instance, State};
use super::plan::{Plan, RAM};
use super::{Hosts, Setting};
use crate::campaign::claim::Claim;
use crate::campaign::fault::{Kind, Role};
use crate::campaign::injector::{Injector, LIMIT, REPAIRED};
use crate::campaign::link::Link;
use crate::campaign::report::{Broken, Trouble, broken};
use crate::campaign::timeline::Life;

/// Indices of the hosts.
pub(crate) const SOURCE_HOST: usize = 0;
pub(crate) const HOST: usize = 1;
pub(crate) const OTHER_HOST: usize = 2;

pub(crate) struct Scene<'a> {
    pub(crate) plan: &'a Plan,
    pub(super) setting: &'a Setting,
    hosts: &'a mut Hosts,
    /// The guest's disk, and its initial memory.
    pub(crate) disk: Disk,
    pub(crate) image: Image,
    /// The source first.
    pub(crate) instances: Vec<Instance>,
    pub(crate) injector: Injector,
    pub(crate) outcomes: Vec<Outcome>,
    /// The attempt that a command wants to have confirmed: that nothing else has moved the guest.
    confirmed: Option<String>,
    // Dropped before the link, which they use.
    commands: Vec<Running>,
    link: Link,
    outputs: Vec<String>,
}

/// A command that migrates the guest.
#[derive(Clone, Debug)]
pub(crate) struct Migration {
    /// A description.
    pub(crate) what: &'static str,
    /// The instances that it moves the guest between.
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// The host that it runs on.
    host: usize,
    /// The address of the destination's server.
    server: String,
    /// The guest's name at that server.
    name: String,
}

/// A running command.
struct Running {
    vamoose: Vamoose,
    migration: Migration,
    /// It was started without faults.
    whole: bool,
}

/// How a command ended.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) migration: Migration,
    pub(crate) claim: Claim,
    pub(crate) at: Duration,
    /// There was no fault for so long that the command has to know where the guest is.
    pub(crate) whole: bool,
    /// The source's journal has a commit, or the outcome of one.
    pub(crate) committed: bool,
}

/// The limit for a guest to begin to write, on a very busy machine.
const BEGINS: Duration = Duration::from_secs(60);
/// A command knows where the guest is within this time after the last fault: it asks every few seconds.
const KNOWS: Duration = Duration::from_secs(8);
/// The interval of checks for due actions.
const LOOK: Duration = Duration::from_millis(10);

impl<'a> Scene<'a> {
    /// Starts the servers and QEMUs.
    pub(crate) fn new(plan: &'a Plan, setting: &'a Setting, hosts: &'a mut Hosts) -> Result<Self> {
        for host in &mut hosts[HOST..] {
            host.start()?;
        }
        let link = Link::new(hosts[HOST].address()?)?;
        let disk = Disk::new()?;
        let machine = disk.machine(&setting.binaries[plan.versions[0]], RAM);
        let machine = machine.content(Fill::Mixed, plan.content).paused();
        let mut source = machine.start()?;
        source.qmp.cont()?;
        let image = writer::wait_begun(&source, BEGINS)?;
        if !plan.runs {
            source.qmp.stop()?;
            // The guest never runs from here on.
            source.qmp.drain_events();
        }
        let source = Instance::new("A", source);
        let destination = setting.waiting(plan, &disk, plan.versions[1], "B")?;
        hosts[HOST].knows(&plan.name(), &destination.qemu)?;
        let injector = Injector {
            faults: Arc::new(plan.faults.clone()),
            link: link.handle().clone(),
            source: source.process.clone(),
            destination: destination.process.clone(),
            disks: [SOURCE_HOST, HOST].map(|host| hosts[host].disk().clone()),
            state: Arc::default(),
        };
        injector.reaches(None, hosts[HOST].process()?);
        Ok(Self {
            plan,
            setting,
            hosts,
            disk,
            image,
            instances: vec![source, destination],
            injector,
            outcomes: Vec::new(),
            confirmed: None,
            commands: Vec::new(),
            link,
            outputs: Vec::new(),
        })
    }

    /// Runs the first command with all faults until everything is repaired and all commands have ended.
    pub(crate) fn run_with_faults(&mut self) -> Result<(), Trouble> {
        self.injector.arm(self.setting.clean);
        let first = self.start(self.first_command("the first command"), false)?;
        self.injector
            .reaches(Some(first), self.hosts[HOST].process()?);
        let begin = Instant::now();
        while !self.commands.is_empty() {
            for kind in self.injector.work() {
                self.do_rest(kind)?;
            }
            self.collect_ended()?;
            if begin.elapsed() > REPAIRED && !self.injector.is_whole() {
                self.repair_all()?;
            }
            self.expect_end(begin.elapsed().min(self.injector.whole_for()))?;
        }
        self.expect_servers()?;
        self.repair_all()?;
        Ok(())
    }

    /// Runs a command without faults to its end.
    pub(crate) fn run(&mut self, migration: Migration) -> Result<Claim, Trouble> {
        self.start(migration, true)?;
        let begin = Instant::now();
        while !self.commands.is_empty() {
            self.collect_ended()?;
            self.expect_end(begin.elapsed())?;
        }
        let outcome = self
            .outcomes
            .last()
            .context("a command without an outcome")?;
        Ok(outcome.claim)
    }

    /// The command that moves the guest from the source to the first destination.
    pub(crate) fn first_command(&self, what: &'static str) -> Migration {
        let to = self.link.address();
        self.migration(what, [0, 1], SOURCE_HOST, to, &self.plan.name())
    }

    /// A command that moves the guest between two instances, to `name` at `server`.
    pub(crate) fn migration(
        &self,
        what: &'static str,
        [from, to]: [usize; 2],
        host: usize,
        server: String,
        name: &str,
    ) -> Migration {
        Migration {
            what,
            from,
            to,
            host,
            server,
            name: name.to_owned(),
        }
    }

    /// Starts a QEMU that waits on a host, and returns its number.
    pub(crate) fn add_waiting(
        &mut self,
        host: usize,
        version: usize,
        name: &str,
        label: &str,
    ) -> Result<usize> {
        let instance = self
            .setting
            .waiting(self.plan, &self.disk, version, label)?;
        self.hosts[host].knows(name, &instance.qemu)?;
        self.instances.push(instance);
        Ok(self.instances.len() - 1)
    }

    /// The address of a host's server.
    pub(crate) fn address(&self, host: usize) -> Result<String> {
        Ok(format!("tcp:{}", self.hosts[host].address()?))
    }

    /// Checks that all running QEMUs answer.
    pub(crate) fn expect_answers(&mut self) -> Result<(), Trouble> {
        for instance in &mut self.instances {
            if instance.state() == State::Mute {
                // To tell a hang from a lack of CPU time.
                let threads = lab::proc::threads(instance.qemu.pid());
                let what = format!(
                    "{} (QEMU {}; {threads})",
                    instance.name, instance.qemu.version
                );
                return broken(Broken::Mute, what);
            }
        }
        Ok(())
    }

    pub(crate) fn lives(&mut self) -> Vec<Life> {
        self.instances.iter_mut().map(Instance::life).collect()
    }

    /// When a message first arrived at the link.
    pub(crate) fn message_at(&self, name: &str) -> Option<Duration> {
        let mut messages = self.link.handle().messages().into_iter();
        messages
            .find(|message| message.name == name)
            .map(|message| message.at)
    }

    /// Whether a command was in doubt.
    pub(crate) fn was_in_doubt(&self) -> bool {
        self.outcomes
            .iter()
            .any(|outcome| outcome.claim == Claim::InDoubt)
    }

    fn start(&mut self, migration: Migration, whole: bool) -> Result<Process> {
        let mut command = Command::new(&self.setting.program);
        command.args(["migrate", "--json", "-", "--qmp"]);
        command.arg(self.instances[migration.from].qemu.qmp_socket());
        command.args(["--name", &migration.name]);
        command.args(["--to", &migration.server]);
        // So that the link sees the messages.
        command.arg("--insecure");
        command.args(["--stall-timeout", STALL, "--downtime-max", "5"]);
        command.args(&self.plan.options);
        if let Some(attempt) = &self.confirmed {
            command.args(["--confirm", attempt]);
        }
        command.arg("--state-dir");
        command.arg(self.hosts[migration.host].disk().path());
        let vamoose = Vamoose::start(&mut command)?;
        let process = vamoose.process().clone();
        let to = &self.instances[migration.to].name;
        self.injector
            .tell(&format!("{} starts, to {to}", migration.what));
        self.commands.push(Running {
            vamoose,
            migration,
            whole,
        });
        Ok(process)
    }

    /// Continues a fault or finishes its repair.
    fn do_rest(&mut self, kind: Kind) -> Result<()> {
        match kind {
            Kind::Kill(Role::Serve) => self.restart_server()?,
            Kind::SameAgain => {
                let migration = self.first_command("the same command meanwhile");
                self.start(migration, false)?;
            }
            Kind::OtherHost => {
                let name = self.plan.name();
                let to = self.add_waiting(OTHER_HOST, self.plan.versions[2], &name, "C")?;
                let address = self.address(OTHER_HOST)?;
                let what = "the command to another host";
                let migration = self.migration(what, [0, to], SOURCE_HOST, address, &name);
                self.start(migration, false)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn repair_all(&mut self) -> Result<()> {
        let repaired = self.injector.finish();
        repaired.into_iter().try_for_each(|kind| self.do_rest(kind))
    }

    /// Restarts the destination's server.
    pub(crate) fn restart_server(&mut self) -> Result<()> {
        let host = &mut self.hosts[HOST];
        host.restart()?;
        self.link.handle().lead_to(host.address()?);
        Ok(())
    }

    /// Checks that servers that were not killed still run.
    fn expect_servers(&self) -> Result<(), Trouble> {
        let killed = self.injector.struck().contains(&Kind::Kill(Role::Serve));
        for host in [HOST, OTHER_HOST] {
            let may_be_dead = host == HOST && killed;
            if !may_be_dead && !self.hosts[host].is_up() {
                return broken(Broken::Crash, "a server has ended, but was not killed");
            }
        }
        Ok(())
    }

    /// Records the outcomes of ended commands, after a short wait.
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
        let whole = command.whole || self.injector.whole_for() > KNOWS;
        let what = command.migration.what;
        let ended = command.vamoose.finish(LIMIT)?;
        self.outputs
            .push(format!("{what}, {}:\n{}", ended.status, ended.stderr));
        let claim = match Claim::of(&ended) {
            Ok(claim) => claim,
            Err(contradiction) => {
                return broken(Broken::Untrue, format!("{what}: {contradiction}"));
            }
        };
        self.injector.tell(&format!("{what} ends: {claim}"));
        // What another command has not finished, this one cannot know.
        if ended.stderr.contains("is being moved by another process") {
            return Ok(());
        }
        if claim == Claim::Unconfirmed {
            // Nothing else moves guests here.
            let hint = ended.stderr.split("--confirm ").nth(1);
            let attempt = hint.and_then(|hint| hint.split_whitespace().next());
            self.confirmed = attempt.map(str::to_owned);
        }
        let committed =
            self.hosts[command.migration.host].has_committed(&command.migration.name)?;
        self.outcomes.push(Outcome {
            migration: command.migration,
            claim,
            at,
            whole,
            committed,
        });
        Ok(())
    }

    /// Checks that commands end in time without faults.
    fn expect_end(&mut self, whole_for: Duration) -> Result<(), Trouble> {
        let Some(command) = self.commands.first().filter(|_| whole_for > LIMIT) else {
            return Ok(());
        };
        let (what, said) = (command.migration.what, command.vamoose.stderr());
        self.outputs.push(format!("{what}, which runs on:\n{said}"));
        self.expect_answers()?;
        broken(
            Broken::Hangs,
            format!("{what} runs on after {LIMIT:?} without a fault"),
        )
    }

    /// All events in order.
    pub(crate) fn story(&mut self) -> Vec<String> {
        let mut story = Vec::new();
        for instance in &mut self.instances {
            let name = instance.name.clone();
            if let Some(at) = instance.process.ended_at() {
                let how = instance.qemu.wait_exit(Duration::ZERO);
                let how = how.map_or_else(|error| error.to_string(), |how| how.to_string());
                let what = format!("{name} has ended ({how}; {})", instance.qemu.stderr());
                story.push((at, what));
            }
            for event in instance.events() {
                let status = event.data["status"].as_str().unwrap_or_default();
                let what = format!("{name}: {} {status}", event.name);
                story.push((event.timestamp, what.trim_end().to_owned()));
            }
        }
        let mut lines = self.injector.story(story);
        for instance in &mut self.instances {
            let (state, version) = (instance.state(), instance.qemu.version);
            lines.push(format!("{} (QEMU {version}): {state:?}", instance.name));
        }
        lines.append(&mut self.outputs);
        for (host, name) in [(HOST, "its server"), (OTHER_HOST, "the other server")] {
            let said = self.hosts[host].said();
            lines.push(format!("{name}:\n{}", last_lines(&said)));
        }
        lines
    }
}

impl Setting {
    /// Starts a QEMU that waits for the guest with this disk.
    fn waiting(&self, plan: &Plan, disk: &Disk, version: usize, label: &str) -> Result<Instance> {
        let mut machine = disk.machine(&self.binaries[version], RAM).incoming();
        if plan.paused {
            machine = machine.paused();
        }
        Ok(Instance::new(label, machine.start()?))
    }
}

impl Plan {
    /// The guest's name on all hosts.
    pub(crate) fn name(&self) -> String {
        format!("vm{}", self.number)
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
