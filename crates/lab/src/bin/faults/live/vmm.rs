//! A VMM, as a process: `live`'s example of that name.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process::Process;
use crate::timeline::Life;

/// A running VMM. Killed and reaped on drop.
pub(crate) struct Vmm {
    pub(crate) name: String,
    pub(crate) process: Process,
    child: Child,
    input: Arc<Mutex<ChildStdin>>,
    said: Arc<Said>,
}

#[derive(Default)]
struct Said {
    words: Mutex<Vec<Word>>,
    changed: Condvar,
    /// Nothing more will come.
    ended: AtomicBool,
}

/// Something that a VMM has said.
#[derive(Clone, Debug)]
pub(crate) struct Word {
    /// Since 1970.
    pub(crate) at: Duration,
    pub(crate) word: String,
    pub(crate) message: Value,
}

impl Vmm {
    pub(crate) fn start(
        program: &Path,
        name: &str,
        role: &str,
        options: &[String],
    ) -> Result<Self> {
        let mut child = Command::new(program)
            .arg(role)
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let input = child.stdin.take().context("no stdin")?;
        let output = child.stdout.take().context("no stdout")?;
        let said = Arc::new(Said::default());
        let vmm = Self {
            name: name.to_owned(),
            process: Process::open(child.id())?,
            child,
            input: Arc::new(Mutex::new(input)),
            said: said.clone(),
        };
        // Ends with the process.
        thread::spawn(move || said.listen(BufReader::new(output)));
        Ok(vmm)
    }

    /// Sends it a command; nothing happens if it has ended.
    pub(crate) fn tell(&self, what: &str) {
        tell(&self.input, what);
    }

    /// What tells it something, from any thread.
    pub(crate) fn teller(&self, what: &'static str) -> impl Fn() + Send + Sync + use<> {
        let input = self.input.clone();
        move || tell(&input, what)
    }

    /// The first of these words that it says behind the first `from` of all; `None` if none comes in time.
    pub(crate) fn wait_for(&self, words: &[&str], from: usize, within: Duration) -> Option<Word> {
        let deadline = Instant::now() + within;
        let mut said = self.said.lock();
        loop {
            let new = said.iter().skip(from);
            if let Some(found) = new.clone().find(|word| words.contains(&word.word.as_str())) {
                return Some(found.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.said.ended.load(Ordering::SeqCst) {
                return None;
            }
            let waited = self.said.changed.wait_timeout(said, left);
            said = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until everything that it has said by now has been heard.
    pub(crate) fn hear_out(&self, within: Duration) {
        let before = self.said().len();
        // It has no answer to this.
        self.tell("ping");
        self.wait_for(&["what?"], before, within);
    }

    pub(crate) fn said(&self) -> Vec<Word> {
        self.said.lock().clone()
    }

    /// The last time that it said this.
    pub(crate) fn last(&self, word: &str) -> Option<Word> {
        self.said().into_iter().rev().find(|said| said.word == word)
    }

    /// When its guest ran.
    pub(crate) fn life(&self) -> Life {
        let mut life = Life::new(&self.name);
        for said in self.said() {
            match said.word.as_str() {
                "runs" => life.starts(said.at),
                "stopped" => life.stops(said.at),
                _ => {}
            }
        }
        if let Some(ended) = self.process.ended_at() {
            life.stops(ended);
        }
        life
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Said {
    fn listen(&self, output: impl BufRead) {
        for line in output.lines().map_while(Result::ok) {
            let message = serde_json::from_str::<Value>(&line).unwrap_or_default();
            let word = message["say"].as_str().unwrap_or("?").to_owned();
            let at = Duration::from_micros(message["at"].as_u64().unwrap_or(0));
            self.lock().push(Word { at, word, message });
            self.changed.notify_all();
        }
        let _words = self.lock();
        self.ended.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Word>> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tell(input: &Mutex<ChildStdin>, what: &str) {
    let mut input = input.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = writeln!(input, "{what}").and_then(|()| input.flush());
}
