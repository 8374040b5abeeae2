//! A VMM as a process: the example `vmm` of `vamoose-live`.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::process::{Child, Process};
use lab::watched::Watched;
use serde_json::Value;

use crate::timeline::Life;

/// A running VMM. Killed and reaped on drop.
pub(crate) struct Vmm {
    pub(crate) name: String,
    child: Child,
    input: Arc<Mutex<ChildStdin>>,
    said: Arc<Watched<Said>>,
}

#[derive(Default)]
struct Said {
    events: Vec<Event>,
    /// Its output has ended.
    ended: bool,
}

/// A line of a VMM's output.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// Since 1970.
    pub(crate) at: Duration,
    pub(crate) name: String,
    pub(crate) message: Value,
}

impl Vmm {
    pub(crate) fn start(
        program: &Path,
        name: &str,
        role: &str,
        options: &[String],
    ) -> Result<Self> {
        let mut command = Command::new(program);
        command
            .arg(role)
            .args(options)
            .arg("--insecure")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = Child::start(&mut command)?;
        let input = child.pipes.stdin.take().context("no stdin")?;
        let output = child.pipes.stdout.take().context("no stdout")?;
        let said = Arc::<Watched<Said>>::default();
        let vmm = Self {
            name: name.to_owned(),
            child,
            input: Arc::new(Mutex::new(input)),
            said: said.clone(),
        };
        // Ends with the process.
        thread::spawn(move || listen(BufReader::new(output), &said));
        Ok(vmm)
    }

    pub(crate) fn process(&self) -> &Process {
        self.child.process()
    }

    /// Sends a command, unless the VMM has ended.
    pub(crate) fn tell(&self, what: &str) {
        tell(&self.input, what);
    }

    /// Returns a function that sends a command from any thread.
    pub(crate) fn teller(&self, what: &'static str) -> impl Fn() + Send + Sync + use<> {
        let input = self.input.clone();
        move || tell(&input, what)
    }

    /// Waits for one of these events after the first `from` ones; `None` if none comes in time.
    pub(crate) fn wait_for(&self, words: &[&str], from: usize, within: Duration) -> Option<Event> {
        let found = |said: &Said| {
            let mut new = said.events.iter().skip(from);
            let found = new
                .find(|word| words.contains(&word.name.as_str()))
                .cloned();
            (found.is_some() || said.ended).then_some(found)
        };
        self.said.wait(within, found).flatten()
    }

    /// Waits until all output so far has been read.
    pub(crate) fn hear_out(&self, within: Duration) {
        let before = self.said().len();
        // An unknown command.
        self.tell("ping");
        self.wait_for(&["what?"], before, within);
    }

    pub(crate) fn said(&self) -> Vec<Event> {
        self.said.lock().events.clone()
    }

    /// The last event of this name.
    pub(crate) fn last(&self, word: &str) -> Option<Event> {
        self.said().into_iter().rev().find(|said| said.name == word)
    }

    /// When the guest ran.
    pub(crate) fn life(&self) -> Life {
        let said = self.said.lock();
        let told = said.events.iter().map(|said| (said.name.as_str(), said.at));
        Life::of(&self.name, told, self.process().ended_at())
    }
}

fn listen(output: impl BufRead, said: &Watched<Said>) {
    for line in output.lines().map_while(Result::ok) {
        let message = serde_json::from_str::<Value>(&line).unwrap_or_default();
        let name = message["say"].as_str().unwrap_or("?").to_owned();
        let at = Duration::from_micros(message["at"].as_u64().unwrap_or(0));
        said.update(|said| said.events.push(Event { at, name, message }));
    }
    said.update(|said| said.ended = true);
}

fn tell(input: &Mutex<ChildStdin>, what: &str) {
    let mut input = input.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = writeln!(input, "{what}").and_then(|()| input.flush());
}
