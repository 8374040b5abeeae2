//! A QEMU that has, had, or may get the guest.

use std::time::Duration;

use lab::process::Process;
use lab::qemu::Qemu;
use lab::qmp::Event;

use crate::timeline::Life;

pub(crate) struct Instance {
    pub(crate) name: String,
    pub(crate) qemu: Qemu,
    pub(crate) process: Process,
    /// What it has told so far.
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

impl Instance {
    pub(crate) fn new(name: &str, mut qemu: Qemu) -> Self {
        qemu.qmp.set_timeout(ANSWER);
        Self {
            name: name.to_owned(),
            process: qemu.process().clone(),
            qemu,
            events: Vec::new(),
        }
    }

    pub(crate) fn state(&mut self) -> State {
        if self.process.has_ended() {
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

    /// When it ran.
    pub(crate) fn life(&mut self) -> Life {
        let (name, ended) = (self.name.clone(), self.process.ended_at());
        let events = self.events().iter();
        let told = events.map(|event| (event.name.as_str(), event.timestamp));
        Life::of(&name, told, ended)
    }

    /// When it said that all of the guest had come, if it has.
    pub(crate) fn loaded_at(&mut self) -> Option<Duration> {
        let completed =
            |event: &&Event| event.name == "MIGRATION" && event.data["status"] == "completed";
        let event = self.events().iter().find(completed)?;
        Some(event.timestamp)
    }

    /// What it has told.
    pub(crate) fn events(&mut self) -> &[Event] {
        // The end first: what it had reported by then can still be read.
        self.process.has_ended();
        self.events.extend(self.qemu.qmp.drain_events());
        &self.events
    }
}
