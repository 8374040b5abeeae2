//! One experiment with two VMMs, while it goes on.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::plan::Plan;
use super::vmm::{Event, Vmm};
use crate::fault::{Kind, Role};
use crate::injector::Injector;
use crate::link::Link;
use crate::report::{Broken, Ended, Trouble, broken};
use crate::timeline::doubled;

pub(crate) struct Scene<'a> {
    plan: &'a Plan,
    program: &'a Path,
    clean: Duration,
    source: Vmm,
    /// Those that wait or waited for the guest, the first one first.
    destinations: Vec<Vmm>,
    injector: Injector,
    link: Link,
    pub(crate) in_doubt: bool,
}

/// How long things may take that take no time, on a machine that is very busy.
const SOON: Duration = Duration::from_secs(20);
/// How long a migration may take when nothing is broken: the longest of its timeout, many times.
const LIMIT: Duration = Duration::from_secs(60);
/// Faults are over by then at the latest.
const REPAIRED: Duration = Duration::from_secs(25);
/// After the last fault a source knows where the guest is within this time.
const KNOWS: Duration = Duration::from_secs(4);
/// How often the scene looks what is to be done.
const LOOK: Duration = Duration::from_millis(5);

impl<'a> Scene<'a> {
    /// Starts both VMMs; nothing moves yet.
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

    /// The whole experiment.
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

    pub(crate) fn struck(&self) -> Vec<Kind> {
        self.injector.struck()
    }

    /// The messages of the control connections.
    pub(crate) fn message_names(&self) -> Vec<String> {
        self.link.handle().message_names()
    }

    /// Migrates with all faults, until everything is repaired; what the source says in the end, unless it was killed.
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
        if knows && !self.struck().iter().any(|kind| killed.contains(kind)) {
            return broken(Broken::InDoubt, "the source is in doubt");
        }
        self.repair_all()?;
        self.expect_no_crash()?;
        self.hear_all_out();
        Ok(over)
    }

    /// What they did by now is known then.
    fn hear_all_out(&self) {
        for vmm in self.all() {
            vmm.hear_out(SOON);
        }
    }

    fn repair_all(&mut self) -> Result<()> {
        let repaired = self.injector.finish();
        repaired.into_iter().try_for_each(|kind| self.do_rest(kind))
    }

    /// What only the scene can do at the end of a fault.
    fn do_rest(&mut self, kind: Kind) -> Result<()> {
        if kind == Kind::RestartDestination {
            let address = self.start_destination("C")?;
            self.link.handle().lead_to(address.parse()?);
        }
        Ok(())
    }

    /// Starts one more destination, and says where it listens.
    fn start_destination(&mut self, name: &str) -> Result<String> {
        let destination = Vmm::start(self.program, name, "destination", &self.plan.options)?;
        let address = address(&destination)?;
        self.destinations.push(destination);
        Ok(address)
    }

    /// A VMM that was not killed is alive.
    fn expect_no_crash(&self) -> Result<(), Trouble> {
        let struck = self.struck();
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

    /// Compares what the source says with what is so.
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
            // A side in doubt has paused the guest, and may be wrong about nothing else.
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

    /// The source was killed: the guest is at the destination, or was lost with it.
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

    /// The guest that has moved is what it was, and goes on.
    fn prove(&self, there: &Vmm) -> Result<(), Trouble> {
        self.verify(there)?;
        self.compare(there)
    }

    /// The guest proves its memory, and goes on.
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

    /// How many pages it has written.
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

    /// All memory came as it was sent.
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

    /// The guest has stayed: the next migration works.
    fn migrate_again(&mut self) -> Result<(), Trouble> {
        let same = self.plan.same_process
            && self.destinations.len() == 1
            && !self.destinations[0].process().has_ended();
        let address = if same {
            address(&self.destinations[0])?
        } else {
            // The one before is not needed any more.
            self.destinations
                .iter()
                .for_each(|vmm| vmm.process().kill());
            self.start_destination("D")?
        };
        self.injector.tell("the next migration");
        // A process that was the destination before may be busy with that for a while.
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

    /// Migrates with nothing broken; what the source says if it keeps the guest.
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

    /// Everything that happened, in its order.
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

/// Where it listens: host and port.
fn address(destination: &Vmm) -> Result<String> {
    let listening = destination.wait_for(&["listening"], 0, SOON);
    let listening = listening.context("the destination does not listen")?;
    let address = listening.message["address"]
        .as_str()
        .context("no address")?;
    Ok(address.trim_start_matches("tcp:").to_owned())
}
