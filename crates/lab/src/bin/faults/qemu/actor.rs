//! A QEMU that has, had, or may get the guest.

use std::time::Duration;

use anyhow::Result;
use lab::qemu::Qemu;
use lab::qmp::Event;

use crate::process::Process;
use crate::timeline::Life;

pub(crate) struct Actor {
    pub(crate) name: String,
    pub(crate) qemu: Qemu,
    pub(crate) process: Process,
    events: Vec<Event>,
}

/// What a QEMU says of its guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    /// Any other state, by QEMU's name.
    Still(String),
    /// It does not answer.
    Mute,
    Ended,
}

/// A QEMU answers at once, unless it hangs or the machine is very busy.
const ANSWER: Duration = Duration::from_secs(10);

/// How long a process may take to die.
const DYING: Duration = Duration::from_secs(1);

impl Actor {
    pub(crate) fn new(name: &str, mut qemu: Qemu) -> Result<Self> {
        let process = Process::open(qemu.pid())?;
        qemu.qmp.set_timeout(ANSWER);
        Ok(Self {
            name: name.to_owned(),
            qemu,
            process,
            events: Vec::new(),
        })
    }

    pub(crate) fn state(&mut self) -> State {
        if self.has_ended() {
            return State::Ended;
        }
        match self.qemu.qmp.query_status() {
            Ok(state) if state == "running" => State::Running,
            Ok(state) => State::Still(state),
            // Its monitor goes before it does.
            Err(_) if self.process.wait(DYING) => State::Ended,
            Err(_) => State::Mute,
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.process.has_ended()
    }

    /// When it ran.
    pub(crate) fn life(&mut self) -> Life {
        self.listen();
        Life::of_events(&self.name, &self.events, self.process.ended_at())
    }

    /// When it said that all of the guest had come, if it has.
    pub(crate) fn loaded_at(&mut self) -> Option<Duration> {
        self.listen();
        let completed =
            |event: &&Event| event.name == "MIGRATION" && event.data["status"] == "completed";
        self.events
            .iter()
            .find(completed)
            .map(|event| event.timestamp)
    }

    /// What it has told, for the story of an experiment.
    pub(crate) fn events(&mut self) -> &[Event] {
        self.listen();
        &self.events
    }

    fn listen(&mut self) {
        // The end first: what it had reported by then can still be read.
        self.has_ended();
        self.events.extend(self.qemu.qmp.drain_events());
    }
}
