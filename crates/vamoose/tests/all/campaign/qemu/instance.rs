//! A QEMU that has, had, or may get the guest.

use std::time::Duration;

use lab::process::Process;
use lab::qemu::Qemu;
use lab::qmp::Event;

use crate::campaign::timeline::Life;

pub(crate) struct Instance {
    pub(crate) name: String,
    pub(crate) qemu: Qemu,
    pub(crate) process: Process,
    /// The events so far.
    events: Vec<Event>,
}

/// The state of a QEMU's guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    /// Another state, by QEMU's name.
    Still(String),
    /// QEMU does not answer.
    Mute,
    Ended,
}

/// The limit for an answer, on a very busy machine.
const ANSWER: Duration = Duration::from_secs(10);

/// The limit for a process to die.
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
            // The monitor closes before the process ends.
            Err(_) if self.process.wait(DYING) => State::Ended,
            Err(_) => State::Mute,
        }
    }

    /// When the guest ran.
    pub(crate) fn life(&mut self) -> Life {
        let (name, ended) = (self.name.clone(), self.process.ended_at());
        let events = self.events().iter();
        let told = events.map(|event| (event.name.as_str(), event.timestamp));
        Life::of(&name, told, ended)
    }

    /// When it reported that the whole guest was loaded.
    pub(crate) fn loaded_at(&mut self) -> Option<Duration> {
        let completed =
            |event: &&Event| event.name == "MIGRATION" && event.data["status"] == "completed";
        let event = self.events().iter().find(completed)?;
        Some(event.timestamp)
    }

    /// All events so far.
    pub(crate) fn events(&mut self) -> &[Event] {
        // First, so that everything reported before the end is read.
        self.process.has_ended();
        self.events.extend(self.qemu.qmp.drain_events());
        &self.events
    }
}
