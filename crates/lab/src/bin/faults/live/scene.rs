//! A running experiment with two VMMs.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::plan::Plan;
use super::vmm::{Event, Vmm};
use crate::fault::{Kind, Role};
use crate::injector::{Injector, LIMIT, REPAIRED};
use crate::link::Link;
use crate::report::{Broken, Ended, Trouble, broken};
use crate::timeline::doubled;

pub(crate) struct Scene<'a> {
    plan: &'a Plan,
    program: &'a Path,
    clean: Duration,
    source: Vmm,
    /// All destinations, in order of their start.
    destinations: Vec<Vmm>,
    pub(crate) injector: Injector,
    link: Link,
    pub(crate) in_doubt: bool,
}

/// The limit for what is immediate, on a very busy machine.
const SOON: Duration = Duration::from_secs(20);
/// A source knows where the guest is within this time after the last fault.
const KNOWS: Duration = Duration::from_secs(4);
/// The interval of checks for due actions.
const LOOK: Duration = Duration::from_millis(5);

impl<'a> Scene<'a> {
    /// Starts both VMMs.
    pub(crate) fn new(plan: &'a Plan, program: &'a Path, clean: Duration) -> Result<Self> {
        let source = Vmm::start(program, "A", "source", &plan.options)?;
        let destination = Vmm::start(program, "B", "destination", &plan.options)?;
        source
            .wait_for(&["runs"], 0, SOON)
            .context("the source does not start")?;
        let link = Link::new(address(&destination)?.parse()?, 1)?;
        let injector = Injector {
            faults: Arc::new(plan.faults.clone()),
            link: link.handle().clone(),
            source: source.process().clone(),
            destination: destination.process().clone(),
            disks: None,
            cancel: Some(Arc::new(source.teller("cancel"))),
            state: Arc::default(),
        };
        Ok(Self {
            plan,
            program,
            clean,
            source,
            destinations: vec![destination],
            injector,
            link,
            in_doubt: false,
        })
    }

    /// Runs the whole experiment.
    pub(crate) fn play(&mut self) -> Result<Ended, Trouble> {
        let over = self.migrate_with_faults()?;
        let ended = match &over {
            Some(over) => self.judge(over)?,
            None => self.judge_without_source()?,
        };
        if ended == Ended::Source {
            self.migrate_again()?;
        }
        Ok(ended)
    }

    /// Migrates with all faults until everything is repaired. Returns the source's last event, unless it was killed.
    fn migrate_with_faults(&mut self) -> Result<Option<Event>, Trouble> {
        self.injector.arm(self.clean);
        let to = self.link.addresses().concat();
        self.source.tell(&format!("migrate {to}"));
        let begin = Instant::now();
        let over = loop {
            for kind in self.injector.work() {
                self.do_rest(kind)?;
            }
            if let Some(over) = self.source.wait_for(&["over"], 0, LOOK) {
                break Some(over);
            }
            if self.source.process().has_ended() {
                break None;
            }
            if begin.elapsed() > REPAIRED && !self.injector.is_whole() {
                self.repair_all()?;
            }
            if begin.elapsed().min(self.injector.whole_for()) > LIMIT {
                let what = format!("the migration runs on after {LIMIT:?} without a fault");
                return broken(Broken::Hangs, what);
            }
        };
        self.in_doubt = over
            .as_ref()
            .is_some_and(|over| over.message["guest"] == "in-doubt");
        let knows = self.in_doubt && self.injector.whole_for() > KNOWS;
        let killed = [Kind::Kill(Role::Destination), Kind::RestartDestination];
        if knows
            && !self
                .injector
                .struck()
                .iter()
                .any(|kind| killed.contains(kind))
        {
            return broken(Broken::InDoubt, "the source is in doubt");
        }
        self.repair_all()?;
        self.expect_no_crash()?;
        self.hear_all_out();
        Ok(over)
    }

    /// Waits for the events of all VMMs so far.
    fn hear_all_out(&self) {
        for vmm in self.all() {
            vmm.hear_out(SOON);
        }
    }

    fn repair_all(&mut self) -> Result<()> {
        let repaired = self.injector.finish();
        repaired.into_iter().try_for_each(|kind| self.do_rest(kind))
    }

    /// Finishes the repair of a fault.
    fn do_rest(&mut self, kind: Kind) -> Result<()> {
        if kind == Kind::RestartDestination {
            let address = self.start_destination("C")?;
            self.link.handle().lead_to(address.parse()?);
        }
        Ok(())
    }

    /// Starts another destination and returns its address.
    fn start_destination(&mut self, name: &str) -> Result<String> {
        let destination = Vmm::start(self.program, name, "destination", &self.plan.options)?;
        let address = address(&destination)?;
        self.destinations.push(destination);
        Ok(address)
    }

    /// Checks that VMMs that were not killed still run.
    fn expect_no_crash(&self) -> Result<(), Trouble> {
        let struck = self.injector.struck();
        let killed = |kinds: &[Kind]| struck.iter().any(|kind| kinds.contains(kind));
        let source = !killed(&[Kind::Kill(Role::Source)]);
        let destination = !killed(&[Kind::Kill(Role::Destination), Kind::RestartDestination]);
        for (vmm, lives) in [(&self.source, source), (&self.destinations[0], destination)] {
            if lives && vmm.process().has_ended() {
                return broken(
                    Broken::Crash,
                    format!("{} has ended, but was not killed", vmm.name),
                );
            }
        }
        Ok(())
    }

    /// Compares the source's claim with the facts.
    fn judge(&self, over: &Event) -> Result<Ended, Trouble> {
        self.expect_one()?;
        let said = over.message["guest"].as_str().unwrap_or("?");
        let runs_there = self.destinations.iter().find(|vmm| vmm.life().runs_now());
        let untrue = |what: String| broken(Broken::Untrue, what);
        let killed = self.destinations[0].process().has_ended();
        match (said, runs_there) {
            ("destination", Some(there)) => {
                self.prove(there)?;
                Ok(Ended::Destination)
            }
            ("destination", None) if killed && self.destinations[0].life().has_run() => {
                Ok(Ended::Lost("its destination was killed"))
            }
            ("source", None) => {
                self.verify(&self.source)?;
                Ok(Ended::Source)
            }
            ("lost", None) if killed => Ok(Ended::Lost("its destination was killed")),
            // A source in doubt has paused the guest and makes no other claim.
            ("in-doubt", Some(there)) => {
                self.prove(there)?;
                Ok(Ended::InDoubt)
            }
            ("in-doubt", None) => Ok(Ended::InDoubt),
            (_, there) => {
                let there = there.map_or("nowhere else", |there| there.name.as_str());
                untrue(format!(
                    "the source says `{said}`, and the guest runs {there}"
                ))
            }
        }
    }

    /// Judges after the source was killed: the guest is at the destination, or lost with the source.
    fn judge_without_source(&self) -> Result<Ended, Trouble> {
        self.expect_one()?;
        let Some(there) = self.destinations.iter().find(|vmm| vmm.life().runs_now()) else {
            return Ok(Ended::Lost("its source was killed"));
        };
        self.prove(there)?;
        Ok(Ended::Destination)
    }

    fn expect_one(&self) -> Result<(), Trouble> {
        let lives: Vec<_> = self.all().map(Vmm::life).collect();
        match doubled(&lives) {
            Some(doubled) => broken(Broken::Doubled, doubled),
            None => Ok(()),
        }
    }

    /// Checks that the guest has moved with its memory, and runs.
    fn prove(&self, there: &Vmm) -> Result<(), Trouble> {
        self.verify(there)?;
        self.compare(there)
    }

    /// Checks that the guest's memory is right, and that it runs.
    fn verify(&self, vmm: &Vmm) -> Result<(), Trouble> {
        let first = self.ask_for_proof(vmm)?;
        let begin = Instant::now();
        while self.ask_for_proof(vmm)? <= first {
            if begin.elapsed() > SOON {
                return broken(
                    Broken::Nowhere,
                    format!("{} runs and does not write", vmm.name),
                );
            }
        }
        Ok(())
    }

    /// Makes the guest verify its memory. Returns how many pages it has written.
    fn ask_for_proof(&self, vmm: &Vmm) -> Result<u64, Trouble> {
        let before = vmm.said().len();
        vmm.tell("verify");
        let answers = ["verified", "corrupt", "what?"];
        let answer = vmm
            .wait_for(&answers, before, SOON)
            .map(|word| word.message);
        match answer {
            Some(answer) if answer["say"] == "verified" && answer["runs"] == true => {
                Ok(answer["writes"].as_u64().unwrap_or(0))
            }
            Some(answer) if answer["say"] == "corrupt" => {
                broken(Broken::Memory, format!("{}: {}", vmm.name, answer["cause"]))
            }
            answer => broken(
                Broken::Nowhere,
                format!("{} was to run, and says {answer:?}", vmm.name),
            ),
        }
    }

    /// Checks that all memory arrived as it was sent.
    fn compare(&self, there: &Vmm) -> Result<(), Trouble> {
        let memory = |word: Option<Event>| word.map(|word| word.message["memory"].clone());
        let (sent, came) = (memory(self.source.last("sent")), memory(there.last("came")));
        if sent.is_some() && sent == came {
            return Ok(());
        }
        broken(
            Broken::Memory,
            format!("{} has other memory than the source had", there.name),
        )
    }

    /// Checks that the next migration of a guest that stayed works.
    fn migrate_again(&mut self) -> Result<(), Trouble> {
        let same = self.plan.same_process
            && self.destinations.len() == 1
            && !self.destinations[0].process().has_ended();
        let address = if same {
            address(&self.destinations[0])?
        } else {
            // Earlier destinations are not needed any more.
            self.destinations
                .iter()
                .for_each(|vmm| vmm.process().kill());
            self.start_destination("D")?
        };
        self.injector.tell("the next migration");
        // An earlier destination may be busy with the first migration for a while.
        let deadline = Instant::now() + if same { SOON } else { Duration::ZERO };
        while let Err(cause) = self.migrate_to(&address)? {
            if Instant::now() >= deadline {
                return broken(Broken::NextFails, cause);
            }
        }
        self.hear_all_out();
        self.expect_one()?;
        let there = self.destinations.last().context("no destination")?;
        self.prove(there)
    }

    /// Migrates without faults. The inner error is the source's reason for keeping the guest.
    fn migrate_to(&self, address: &str) -> Result<Result<(), String>, Trouble> {
        let before = self.source.said().len();
        self.source.tell(&format!("migrate tcp:{address}"));
        match self.source.wait_for(&["over"], before, LIMIT) {
            Some(over) if over.message["guest"] == "destination" => Ok(Ok(())),
            Some(over) if over.message["guest"] == "source" => Ok(Err(over.message.to_string())),
            Some(over) => broken(Broken::NextFails, over.message.to_string()),
            None => broken(Broken::Hangs, "the next migration"),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Vmm> {
        std::iter::once(&self.source).chain(&self.destinations)
    }

    /// All events in order.
    pub(crate) fn story(&self) -> Vec<String> {
        let mut story = Vec::new();
        for vmm in self.all() {
            if let Some(at) = vmm.process().ended_at() {
                story.push((at, format!("{} has ended", vmm.name)));
            }
            for said in vmm.said() {
                story.push((said.at, format!("{}: {}", vmm.name, said.message)));
            }
        }
        self.injector.story(story)
    }
}

/// The address that a destination listens on: host and port.
fn address(destination: &Vmm) -> Result<String> {
    let listening = destination.wait_for(&["listening"], 0, SOON);
    let listening = listening.context("the destination does not listen")?;
    let address = listening.message["address"]
        .as_str()
        .context("no address")?;
    Ok(address.trim_start_matches("tcp:").to_owned())
}
