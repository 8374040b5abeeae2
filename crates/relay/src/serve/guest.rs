//! What a destination does to its QEMU when crate `handover` says so, and what came of it.

use std::time::{Duration, Instant};

use handover::DestinationEvent;
use serde_json::json;
use tracing::{debug, warn};

use crate::{
    Instance,
    qemu::{Qemu, QemuError},
};

/// A QEMU that takes a guest, connected to or not: its monitor serves one client.
pub(crate) struct Guest {
    instance: Instance,
    qemu: Option<Qemu>,
}

/// How long a QEMU may take to get from its word that it has everything to a guest that can run.
pub(super) const LOADING: Duration = Duration::from_secs(30);
/// How long a QEMU may take to end when it is killed.
const KILLED: Duration = Duration::from_secs(30);
/// How long a QEMU that has closed its monitor may take to end: it frees the guest's memory.
const ENDING: Duration = Duration::from_secs(10);
/// How often a QEMU is asked while no event comes.
const ASKING: Duration = Duration::from_millis(20);

/// States of a guest that has not run since it was loaded, and may be continued.
const WAITING: [&str; 2] = ["paused", "prelaunch"];
/// States of a guest that runs here; in the last one it may be on its way to another host.
const HERE: [&str; 3] = ["running", "suspended", "finish-migrate"];
/// State of a guest that has been sent on from here.
const SENT_ON: &str = "postmigrate";

impl Guest {
    pub(crate) fn new(instance: Instance, qemu: Option<Qemu>) -> Self {
        Self { instance, qemu }
    }

    /// Lets the loaded guest go on, unless it does, and looks whether it does.
    pub(super) fn run(&mut self, resume: bool) -> DestinationEvent {
        let state = match self.wait_until_loaded() {
            Ok(state) => state,
            Err(error) => return self.not_started(&error),
        };
        if state == SENT_ON {
            return DestinationEvent::MovedOn;
        }
        if HERE.contains(&state.as_str()) || !resume {
            return self.started(state);
        }
        if !WAITING.contains(&state.as_str()) {
            return unclear(format!("the guest is in the state `{state}`"));
        }
        let told = self.with_qemu(|qemu| qemu.execute("cont", json!({})));
        match told {
            Ok(()) => self.look(),
            Err(error) if error.is_refusal() => self.not_started(&error),
            Err(error) => self.lost_sight(&error),
        }
    }

    /// Looks what became of a guest that was seen to run here. Its monitor may be somebody else's by now.
    pub(super) fn check(&mut self) -> DestinationEvent {
        if self.instance.has_ended() {
            return died();
        }
        match self.with_qemu(Qemu::state) {
            Ok(state) => {
                self.let_go();
                match state.as_str() {
                    SENT_ON => DestinationEvent::MovedOn,
                    _ => DestinationEvent::Started { state },
                }
            }
            // Its process is there, and it has run.
            Err(error) if self.instance.process.is_some() && !self.instance.has_ended() => {
                debug!("{error}");
                let state = "alive".to_owned();
                DestinationEvent::Started { state }
            }
            Err(error) => self.lost_sight(&error),
        }
    }

    /// Ends it.
    pub(super) fn end(&mut self) -> DestinationEvent {
        if self.instance.has_ended() {
            return died();
        }
        let ended = match &mut self.qemu {
            Some(qemu) => qemu.end().map_err(|error| error.to_string()),
            None => self.instance.end(KILLED).map_err(|error| error.to_string()),
        };
        match ended {
            Ok(()) => {
                self.qemu = None;
                died()
            }
            Err(reason) => DestinationEvent::NotEnded { reason },
        }
    }

    /// The state of a guest that has been told to go on, once it does.
    fn look(&mut self) -> DestinationEvent {
        match self.with_qemu(Qemu::state) {
            Ok(state) if HERE.contains(&state.as_str()) => self.started(state),
            Ok(state) => unclear(format!(
                "the guest was told to go on and is in the state `{state}`"
            )),
            Err(error) => self.lost_sight(&error),
        }
    }

    fn started(&mut self, state: String) -> DestinationEvent {
        if let Some(qemu) = &mut self.qemu {
            qemu.put_back();
            // The announcement that QEMU made when it had loaded the guest may have been answered by the source's.
            if let Err(error) = qemu.announce() {
                warn!("the guest is not announced to the network: {error}");
            }
        }
        self.let_go();
        DestinationEvent::Started { state }
    }

    /// Nothing is left to do with its monitor.
    fn let_go(&mut self) {
        self.qemu = None;
    }

    /// The guest has not been told to go on, or not with success.
    fn not_started(&mut self, error: &QemuError) -> DestinationEvent {
        DestinationEvent::NotStarted {
            cause: format!("it failed when everything had been sent: {error}"),
        }
    }

    /// The guest may run or not: only the end of its process tells.
    fn lost_sight(&mut self, error: &QemuError) -> DestinationEvent {
        let dead = self.qemu.as_ref().is_some_and(|qemu| qemu.is_dead(ENDING));
        if dead || self.instance.has_ended() {
            return died();
        }
        // The connection is of no use any more; another one may be.
        self.let_go();
        unclear(error.to_string())
    }

    fn wait_until_loaded(&mut self) -> Result<String, QemuError> {
        let deadline = Instant::now() + LOADING;
        self.with_qemu(|qemu| {
            loop {
                let state = qemu.state()?;
                if state != "inmigrate" {
                    return Ok(state);
                }
                if Instant::now() >= deadline {
                    return Err(QemuError::State {
                        state,
                        expected: "a loaded guest",
                    });
                }
                // Any event is a reason to look again.
                qemu.next_event(ASKING)?;
            }
        })
    }

    /// Uses the connection to its monitor, or a new one, to the very same QEMU.
    fn with_qemu<T>(
        &mut self,
        work: impl FnOnce(&mut Qemu) -> Result<T, QemuError>,
    ) -> Result<T, QemuError> {
        if self.qemu.is_none() {
            let mut qemu = Qemu::connect(&self.instance.monitor)?;
            let uuid = qemu.uuid()?;
            let found = Instance::of(&mut qemu, &self.instance.monitor, uuid);
            if !found.is_same(&self.instance) {
                return Err(QemuError::Replaced);
            }
            self.qemu = Some(qemu);
        }
        match &mut self.qemu {
            Some(qemu) => work(qemu),
            None => Err(QemuError::Replaced),
        }
    }
}

fn died() -> DestinationEvent {
    DestinationEvent::Died {
        cause: "its QEMU has ended".to_owned(),
    }
}

fn unclear(reason: String) -> DestinationEvent {
    DestinationEvent::Unclear { reason }
}
