//! A small synchronous QMP client with what migrations need.
//!
//! It deliberately shares no code with the client of `vamoose-relay`, which it helps to test. One thread uses a connection; events
//! are queued in order. Every wait has a limit. All commands fail like [`Qmp::execute`].

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use crate::qemu::read_stderr;

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// The received part of an incomplete line.
    line: Vec<u8>,
    events: Vec<Event>,
    commands: u64,
    /// The limit for a command.
    timeout: Duration,
    /// The file with QEMU's stderr, quoted in errors.
    stderr: Option<PathBuf>,
}

/// An event.
#[derive(Clone, Debug)]
pub struct Event {
    /// The name, such as `MIGRATION` or `STOP`.
    pub name: String,
    /// The event's own data.
    pub data: Value,
    /// When QEMU sent the event, since 1970.
    pub timestamp: Duration,
}

/// The result of a check.
enum Look<T> {
    Found(T),
    /// Not yet; what was found instead.
    NotYet(String),
}

/// A command takes this long only if QEMU hangs.
const COMMAND: Duration = Duration::from_secs(60);
/// Enough to read what is in the socket's buffer.
const AT_HAND: Duration = Duration::from_millis(1);
/// How often state is polled that changes without an event.
const AGAIN: Duration = Duration::from_millis(50);

impl Qmp {
    /// Connects to a QMP socket and leaves negotiation mode.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("connecting to {}", path.display()))?;
        Self::greet(stream, None)
    }

    /// Leaves negotiation mode on a fresh connection. `stderr` is the file with QEMU's stderr.
    pub(crate) fn greet(stream: UnixStream, stderr: Option<PathBuf>) -> Result<Self> {
        let mut qmp = Self {
            stream: BufReader::new(stream),
            line: Vec::new(),
            events: Vec::new(),
            commands: 0,
            timeout: COMMAND,
            stderr,
        };
        let greeting = qmp.receive(Instant::now() + COMMAND)?;
        if greeting.get("QMP").is_none() {
            bail!("not a QMP greeting: {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    ///
    /// # Errors
    /// When QEMU refuses the command (with its reason), has exited (with its stderr), or does not answer within a minute or the
    /// time of [`Qmp::set_timeout`].
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.commands += 1;
        let id = self.commands;
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        let sent = self.stream.get_ref().write_all(line.as_bytes());
        sent.map_err(|error| self.with_stderr(anyhow!(error)))
            .with_context(|| format!("sending {command} to QEMU"))?;
        let deadline = Instant::now() + self.timeout;
        loop {
            let mut message = self
                .receive(deadline)
                .with_context(|| format!("waiting for the answer to {command}"))?;
            if let Some(event) = Event::parse(&message) {
                self.events.push(event);
            } else if message["id"] != id {
                // The late answer to a command that timed out.
            } else if let Some(error) = message.get("error") {
                bail!(
                    "QEMU refused {command} {arguments}: {}",
                    error["desc"].as_str().unwrap_or("no reason given")
                );
            } else {
                return Ok(message["return"].take());
            }
        }
    }

    /// Takes the first event of this name whose data fits, waiting for it if needed. Other events stay queued.
    pub fn wait_event(
        &mut self,
        name: &str,
        fits: impl Fn(&Value) -> bool,
        within: Duration,
    ) -> Result<Event> {
        let deadline = Instant::now() + within;
        loop {
            let wanted = |event: &Event| event.name == name && fits(&event.data);
            if let Some(position) = self.events.iter().position(wanted) {
                return Ok(self.events.remove(position));
            }
            let received = self.receive_event(deadline);
            if !received.with_context(|| format!("waiting for the event {name}"))? {
                let queued: Vec<_> = self.events.iter().map(|event| &event.name).collect();
                bail!("no event {name} within {within:?}; queued events: {queued:?}");
            }
        }
    }

    /// Takes all queued events, oldest first.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Takes all events that QEMU has sent, oldest first, even if it has exited since.
    pub fn drain_events(&mut self) -> Vec<Event> {
        // Any error means that there is nothing more to read.
        while let Ok(true) = self.receive_event(Instant::now() + AT_HAND) {}
        self.take_events()
    }

    /// Sets the limit for commands.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The guest's state, such as `running`, `paused`, `postmigrate`, `inmigrate`.
    pub fn query_status(&mut self) -> Result<String> {
        let answer = self.execute("query-status", json!({}))?;
        Ok(answer["status"]
            .as_str()
            .context("query-status gave no status")?
            .to_owned())
    }

    /// Waits for a state of the guest.
    pub fn wait_status(&mut self, wanted: &str, within: Duration) -> Result<()> {
        self.wait(within, |qmp| {
            let status = qmp.query_status()?;
            Ok(match status == wanted {
                true => Look::Found(()),
                false => Look::NotYet(format!("the guest is '{status}', not '{wanted}'")),
            })
        })
    }

    /// Runs the guest.
    pub fn cont(&mut self) -> Result<()> {
        self.execute("cont", json!({})).map(drop)
    }

    /// Pauses the guest.
    pub fn stop(&mut self) -> Result<()> {
        self.execute("stop", json!({})).map(drop)
    }

    /// Switches migration capabilities on or off.
    pub fn set_capabilities(&mut self, capabilities: &[(&str, bool)]) -> Result<()> {
        let list: Vec<_> = capabilities
            .iter()
            .map(|(name, state)| json!({ "capability": name, "state": state }))
            .collect();
        self.execute("migrate-set-capabilities", json!({ "capabilities": list }))
            .map(drop)
    }

    /// Sets migration parameters, such as `json!({"multifd-compression": "zstd"})`.
    pub fn set_parameters(&mut self, parameters: Value) -> Result<()> {
        self.execute("migrate-set-parameters", parameters).map(drop)
    }

    /// Enables what Vamoose needs at both ends: multifd with this many channels, the return path, and events. Removes the bandwidth
    /// limit.
    pub fn use_multifd(&mut self, channels: u8) -> Result<()> {
        self.set_capabilities(&[("events", true), ("return-path", true), ("multifd", true)])?;
        self.set_parameters(json!({ "multifd-channels": channels, "max-bandwidth": 1_u64 << 40 }))
    }

    /// Starts a migration to a QEMU URI, such as `unix:PATH`, without waiting for its end.
    pub fn migrate(&mut self, uri: &str) -> Result<()> {
        self.execute("migrate", json!({ "uri": uri })).map(drop)
    }

    /// Makes a QEMU started with [`crate::qemu::Builder::incoming`] listen at a URI.
    pub fn migrate_incoming(&mut self, uri: &str) -> Result<()> {
        self.execute("migrate-incoming", json!({ "uri": uri }))
            .map(drop)
    }

    /// The TCP port that this QEMU chose for [`Qmp::migrate_incoming`] at port 0.
    pub fn incoming_port(&mut self) -> Result<u16> {
        let info = self.query_migrate()?;
        let port = info["socket-address"][0]["port"]
            .as_str()
            .and_then(|port| port.parse().ok());
        port.with_context(|| format!("QEMU does not wait at a TCP port: {info}"))
    }

    /// Cancels the migration without waiting for its end.
    pub fn migrate_cancel(&mut self) -> Result<()> {
        self.execute("migrate_cancel", json!({})).map(drop)
    }

    /// The result of query-migrate, about the current or last migration.
    pub fn query_migrate(&mut self) -> Result<Value> {
        self.execute("query-migrate", json!({}))
    }

    /// Starts a measurement of the dirty rate, on a sample of pages.
    pub fn begin_dirty_rate(&mut self, time: Duration) -> Result<()> {
        // `sample-pages` is per GiB; its default is 512.
        let arguments = json!({ "calc-time": time.as_secs(), "sample-pages": 8192 });
        self.execute("calc-dirty-rate", arguments).map(drop)
    }

    /// The measured dirty rate in MiB per second.
    pub fn dirty_rate(&mut self, within: Duration) -> Result<u64> {
        self.wait(within, |qmp| {
            let info = qmp.execute("query-dirty-rate", json!({}))?;
            Ok(
                match (info["status"].as_str(), info["dirty-rate"].as_u64()) {
                    (Some("measured"), Some(rate)) => Look::Found(rate),
                    _ => Look::NotYet(format!("the dirty rate is not measured: {info}")),
                },
            )
        })
    }

    /// Waits until QEMU has cleaned up after a migration. QEMU reports *failed* or *cancelled* earlier, but until it has cleaned up it
    /// accepts neither a new migration nor changed capabilities.
    pub fn wait_idle(&mut self, within: Duration) -> Result<()> {
        self.wait(within, |qmp| {
            let instances = qmp.execute("query-yank", json!({}))?;
            let mut instances = instances.as_array().into_iter().flatten();
            Ok(
                match instances.any(|instance| instance["type"] == "migration") {
                    false => Look::Found(()),
                    true => Look::NotYet("a migration has not been cleaned up".to_owned()),
                },
            )
        })
    }

    /// Waits until the migration is in one of these states, and returns query-migrate's result.
    ///
    /// # Errors
    /// At once when the migration ends in another state (with QEMU's reason) or QEMU exits (with its stderr), and at the limit.
    pub fn wait_migration(&mut self, wanted: &[&str], within: Duration) -> Result<Value> {
        self.wait(within, |qmp| {
            let info = qmp.query_migrate()?;
            let status = info["status"].as_str().unwrap_or("none");
            if wanted.contains(&status) {
                return Ok(Look::Found(info));
            }
            if matches!(status, "completed" | "failed" | "cancelled") {
                let reason = info["error-desc"].as_str().unwrap_or("no reason given");
                return Err(qmp.with_stderr(anyhow!(
                    "the migration {status} ({reason}); wanted: {wanted:?}"
                )));
            }
            let what = format!("the migration is not {wanted:?}: {info}");
            Ok(Look::NotYet(what))
        })
    }

    /// Waits until the active migration has transferred this many bytes.
    pub fn wait_transferred(&mut self, bytes: u64, within: Duration) -> Result<()> {
        self.wait(within, |qmp| {
            let info = qmp.wait_migration(&["active"], within)?;
            let moved = info["ram"]["transferred"].as_u64().unwrap_or(0);
            Ok(match moved >= bytes {
                true => Look::Found(()),
                false => Look::NotYet(format!("{moved} of {bytes} bytes have moved")),
            })
        })
    }

    /// Waits until the migration has begun this round, or has completed.
    pub fn wait_rounds(&mut self, rounds: u64, within: Duration) -> Result<()> {
        self.wait(within, |qmp| {
            let info = qmp.wait_migration(&["active", "device", "completed"], within)?;
            let begun = info["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
            Ok(match begun >= rounds || info["status"] == "completed" {
                true => Look::Found(()),
                false => Look::NotYet(format!("{begun} of {rounds} rounds have begun")),
            })
        })
    }

    /// Repeats a check, at each event and in between, until it succeeds.
    fn wait<T>(
        &mut self,
        within: Duration,
        look: impl Fn(&mut Self) -> Result<Look<T>>,
    ) -> Result<T> {
        let deadline = Instant::now() + within;
        loop {
            match look(self)? {
                Look::Found(found) => return Ok(found),
                Look::NotYet(what) if Instant::now() >= deadline => {
                    return Err(self.with_stderr(anyhow!("{what} (within {within:?})")));
                }
                Look::NotYet(_) => self.receive_event(deadline.min(Instant::now() + AGAIN))?,
            };
        }
    }

    /// Queues the next event; false if the deadline passes first.
    fn receive_event(&mut self, deadline: Instant) -> Result<bool> {
        while let Some(message) = self.receive_until(deadline)? {
            if let Some(event) = Event::parse(&message) {
                self.events.push(event);
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn receive(&mut self, deadline: Instant) -> Result<Value> {
        let message = self.receive_until(deadline)?;
        message.ok_or_else(|| self.with_stderr(anyhow!("QEMU does not answer")))
    }

    /// The next message, or `None` if the deadline passes first.
    fn receive_until(&mut self, deadline: Instant) -> Result<Option<Value>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream
                .get_ref()
                .set_read_timeout(Some(left))
                .context("setting a timeout")?;
            // An incomplete line stays in `self.line` at the deadline.
            match self.stream.read_until(b'\n', &mut self.line) {
                Ok(_) if self.line.ends_with(b"\n") => {
                    let line = std::mem::take(&mut self.line);
                    let message = serde_json::from_slice(&line);
                    return message
                        .with_context(|| format!("not JSON: {}", String::from_utf8_lossy(&line)))
                        .map(Some);
                }
                Ok(_) => {
                    return Err(self.with_stderr(anyhow!("QEMU has closed its QMP connection")));
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(self.with_stderr(anyhow!("reading from QMP: {error}"))),
            }
        }
    }

    fn with_stderr(&self, error: anyhow::Error) -> anyhow::Error {
        match self.stderr.as_deref().map(read_stderr) {
            Some(text) if !text.is_empty() => anyhow!("{error:#}; QEMU says: {text}"),
            _ => error,
        }
    }
}

impl Event {
    fn parse(message: &Value) -> Option<Self> {
        let name = message["event"].as_str()?.to_owned();
        let stamp = &message["timestamp"];
        let seconds = Duration::from_secs(stamp["seconds"].as_u64().unwrap_or(0));
        let micros = Duration::from_micros(stamp["microseconds"].as_u64().unwrap_or(0));
        Some(Self {
            name,
            data: message["data"].clone(),
            timestamp: seconds + micros,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// A QMP server that sends the next of `answers` for each line it receives, then closes.
    fn server(answers: &'static [&'static str]) -> UnixStream {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            theirs.write_all(b"{\"QMP\": {}}\n").unwrap();
            let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
            for answer in answers {
                lines.next().unwrap().unwrap();
                theirs.write_all(answer.as_bytes()).unwrap();
            }
        });
        ours
    }

    #[test]
    fn events_between_are_queued_and_found_by_name() {
        let stream = server(&[
            "{\"return\": {}, \"id\": 1}\n",
            "{\"event\": \"STOP\", \"timestamp\": {\"seconds\": 5, \"microseconds\": 7}}\n\
             {\"event\": \"MIGRATION\", \"data\": {\"status\": \"active\"}}\n{\"return\": {\"status\": \"paused\"}, \"id\": 2}\n",
        ]);
        let mut qmp = Qmp::greet(stream, None).unwrap();
        assert_eq!(qmp.query_status().unwrap(), "paused");
        let limit = Duration::from_secs(10);
        qmp.wait_event("MIGRATION", |data| data["status"] == "active", limit)
            .unwrap();
        let stop = qmp.wait_event("STOP", |_| true, limit).unwrap();
        assert_eq!(stop.timestamp, Duration::from_micros(5_000_007));
        assert!(qmp.take_events().is_empty());
    }

    #[test]
    fn refusals_and_closed_connections_are_told() {
        let stream = server(&[
            "{\"return\": {}, \"id\": 1}\n",
            "{\"error\": {\"desc\": \"no such thing\"}, \"id\": 2}\n",
        ]);
        let mut qmp = Qmp::greet(stream, None).unwrap();
        assert!(
            qmp.stop()
                .unwrap_err()
                .to_string()
                .contains("no such thing")
        );
        let error = qmp
            .wait_event("STOP", |_| true, Duration::from_secs(10))
            .unwrap_err();
        assert!(format!("{error:#}").contains("closed"), "{error:#}");
    }

    #[test]
    fn the_last_events_of_a_qemu_that_has_ended() {
        let stream = server(&[
            "{\"return\": {}, \"id\": 1}\n",
            "{\"event\": \"RESUME\"}\n{\"event\": \"STOP\"}\n",
        ]);
        let mut qmp = Qmp::greet(stream, None).unwrap();
        assert!(qmp.cont().is_err());
        let names: Vec<_> = qmp
            .drain_events()
            .into_iter()
            .map(|event| event.name)
            .collect();
        assert_eq!(names, ["RESUME", "STOP"]);
    }

    #[test]
    fn a_migration_that_fails_is_an_error_with_its_reason() {
        let stream = server(&[
            "{\"return\": {}, \"id\": 1}\n",
            "{\"return\": {\"status\": \"failed\", \"error-desc\": \"cable cut\"}, \"id\": 2}\n",
        ]);
        let mut qmp = Qmp::greet(stream, None).unwrap();
        let error = qmp
            .wait_migration(&["completed"], Duration::from_secs(10))
            .unwrap_err();
        assert!(error.to_string().contains("cable cut"), "{error:#}");
    }
}
