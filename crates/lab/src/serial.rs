//! The serial port of a guest: lines with the time of their arrival, and the ticker's messages in them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::qemu::read_stderr;
use crate::watched::Watched;

/// A serial port, read by a thread.
#[derive(Debug)]
pub struct Serial {
    log: Arc<Watched<Log>>,
    port: UnixStream,
    reader: JoinHandle<()>,
    /// The file with QEMU's stderr, quoted in errors.
    stderr: Option<PathBuf>,
}

/// The output of a serial port.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// The complete lines, without line ends.
    pub lines: Vec<Line>,
    /// The beginning of an incomplete line. During a migration, its end may arrive at the destination.
    pub tail: String,
    /// Whether the port is closed.
    pub ended: bool,
}

/// One line of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// When the line was complete.
    pub at: Instant,
    /// The text.
    pub text: String,
}

/// A tick of the ticker in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tick {
    /// Counts from 0.
    pub number: u64,
    /// The time by the guest's clock.
    pub guest: Duration,
    /// The time of arrival.
    pub at: Instant,
}

impl Log {
    /// The ticks among the lines.
    pub fn ticks(&self) -> Vec<Tick> {
        self.lines.iter().filter_map(Line::tick).collect()
    }

    /// The longest time between two consecutive ticks; zero if there are less than two.
    pub fn largest_gap(&self) -> Duration {
        self.ticks()
            .windows(2)
            .map(|pair| pair[1].at - pair[0].at)
            .max()
            .unwrap_or_default()
    }

    /// Checks that the guest has reported no error.
    pub fn check(&self) -> Result<()> {
        let bad = |line: &&Line| {
            let text = &line.text;
            text.starts_with("corrupt")
                || text.starts_with("fatal")
                || text.contains("Kernel panic")
        };
        match self.lines.iter().find(bad) {
            Some(line) => bail!("the guest says: {}", line.text),
            None => Ok(()),
        }
    }

    /// The last few lines, for error messages.
    pub(crate) fn end(&self) -> String {
        let from = self.lines.len().saturating_sub(10);
        let lines = self.lines[from..].iter().map(|line| line.text.as_str());
        let all: Vec<_> = lines.chain([self.tail.as_str()]).collect();
        all.join("\n")
    }

    fn add(&mut self, bytes: &[u8]) {
        let at = Instant::now();
        self.tail.push_str(&String::from_utf8_lossy(bytes));
        while let Some(end) = self.tail.find('\n') {
            let rest = self.tail.split_off(end + 1);
            let text = std::mem::replace(&mut self.tail, rest)
                .trim_end()
                .to_owned();
            self.lines.push(Line { at, text });
        }
    }
}

impl Line {
    fn tick(&self) -> Option<Tick> {
        let mut words = self.text.strip_prefix("tick ")?.split(' ');
        let number = words.next()?.parse().ok()?;
        let guest = Duration::from_millis(words.next()?.parse().ok()?);
        Some(Tick {
            number,
            guest,
            at: self.at,
        })
    }
}

/// The ticks of a guest across a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Continuity {
    /// The last tick at the source.
    pub last: Tick,
    /// The first tick at the destination.
    pub first: Tick,
    /// The number of all ticks.
    pub ticks: usize,
}

impl Continuity {
    /// The time from the last tick at the source to the first one at the destination: the downtime for the guest's users, plus up
    /// to one tick (100 ms).
    pub fn gap(&self) -> Duration {
        self.first.at.saturating_duration_since(self.last.at)
    }

    /// The gap by the guest's clock.
    pub fn guest_gap(&self) -> Duration {
        self.first.guest.saturating_sub(self.last.guest)
    }
}

/// Checks that the ticks at the source and at the destination follow each other. A line that the migration divided counts at the
/// destination.
pub fn follow(source: &Log, destination: &Log) -> Result<Continuity> {
    let mut destination = destination.clone();
    if let Some(line) = destination.lines.first_mut() {
        line.text = format!("{}{}", source.tail, line.text).trim().to_owned();
    }
    source.check().context("at the source")?;
    destination.check().context("at the destination")?;
    let (before, after) = (source.ticks(), destination.ticks());
    let last = *before.last().context("no ticks at the source")?;
    let Some(&first) = after.first() else {
        bail!("no ticks at the destination: {}", destination.end())
    };
    let all: Vec<_> = before.iter().chain(&after).collect();
    for pair in all.windows(2) {
        if pair[1].number != pair[0].number + 1 {
            bail!(
                "tick {} is followed by tick {} ({} ticks at the source, {} at the destination)",
                pair[0].number,
                pair[1].number,
                before.len(),
                after.len()
            );
        }
    }
    Ok(Continuity {
        last,
        first,
        ticks: all.len(),
    })
}

impl Serial {
    /// Starts reading. `stderr` is the file with QEMU's stderr.
    pub fn new(port: UnixStream, stderr: Option<PathBuf>) -> Result<Self> {
        let mut stream = port.try_clone().context("sharing a serial port")?;
        let log = Arc::<Watched<Log>>::default();
        let theirs = Arc::clone(&log);
        let reader = thread::spawn(move || {
            let mut buffer = [0; 4096];
            // An error means that QEMU has exited.
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                theirs.update(|log| log.add(&buffer[..count]));
            }
            theirs.update(|log| log.ended = true);
        });
        Ok(Self {
            log,
            port,
            reader,
            stderr,
        })
    }

    /// Writes a line to the port.
    pub fn say(&self, line: &str) -> Result<()> {
        let line = format!("{line}\n");
        (&self.port)
            .write_all(line.as_bytes())
            .context("writing to a serial port")
    }

    /// A copy of the output so far.
    pub fn log(&self) -> Log {
        self.log.lock().clone()
    }

    /// Waits until the guest has filled its memory and begun to rewrite it.
    pub fn wait_ready(&self, within: Duration) -> Result<()> {
        self.wait("'ready'", within, |log| {
            log.lines.iter().any(|line| line.text == "ready")
        })
    }

    /// Waits for this many more ticks.
    pub fn wait_ticks(&self, count: usize, within: Duration) -> Result<()> {
        let wanted = self.log().ticks().len() + count;
        self.wait("ticks", within, |log| log.ticks().len() >= wanted)
    }

    /// Waits until the guest has verified all its memory `count` more times.
    pub fn wait_rounds(&self, count: usize, within: Duration) -> Result<()> {
        let rounds = |log: &Log| {
            let lines = log.lines.iter();
            lines
                .filter(|line| line.text.starts_with("rounds "))
                .count()
        };
        let wanted = rounds(&self.log()) + count;
        self.wait("a check of all memory", within, |log| rounds(log) >= wanted)
    }

    /// Waits until a condition holds for the log.
    pub fn wait(&self, what: &str, within: Duration, is_so: impl Fn(&Log) -> bool) -> Result<()> {
        let over = |log: &Log| is_so(log) || log.ended || log.check().is_err();
        self.log.wait(within, |log| over(log).then_some(()));
        let log = self.log();
        if is_so(&log) {
            return Ok(());
        }
        log.check()?;
        let why = if log.ended {
            "QEMU has gone".to_owned()
        } else {
            format!("not within {within:?}")
        };
        let stderr = self.stderr.as_deref().map_or(String::new(), read_stderr);
        bail!(
            "waiting for {what} of the guest: {why}; QEMU says: '{stderr}'; its last output:\n{}",
            log.end()
        )
    }

    /// Waits until QEMU has closed the port, and returns all output. Call it after QEMU's end.
    pub fn finish(self) -> Log {
        let _ = self.reader.join();
        self.log.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(text: &str) -> Log {
        let mut log = Log::default();
        log.add(text.as_bytes());
        log
    }

    #[test]
    fn lines_ticks_and_tail_are_told_apart() {
        let mut log = log("Linux\r\ntick 0 5\r\ntick 1 1");
        assert_eq!(log.tail, "tick 1 1");
        log.add(b"07\r\nready\r\n");
        let ticks: Vec<_> = log
            .ticks()
            .iter()
            .map(|tick| (tick.number, tick.guest.as_millis()))
            .collect();
        assert_eq!(ticks, [(0, 5), (1, 107)]);
        assert_eq!(log.tail, "");
        assert!(log.largest_gap() < Duration::from_secs(60));
        log.check().unwrap();
        log.add(b"corrupt cold page 7\n");
        assert!(log.check().is_err());
    }

    #[test]
    fn a_guest_is_followed_through_a_cut_line() {
        let whole = follow(&log("tick 7 700\ntick 8 800\n"), &log("tick 9 950\n")).unwrap();
        assert_eq!(
            (whole.last.number, whole.first.number, whole.ticks),
            (8, 9, 3)
        );
        assert_eq!(whole.guest_gap(), Duration::from_millis(150));
        let cut = follow(&log("tick 7 700\ntick 8 8"), &log("00\ntick 9 950\n")).unwrap();
        assert_eq!(
            (
                cut.last.number,
                cut.first.number,
                cut.first.guest.as_millis()
            ),
            (7, 8, 800)
        );
        let cut_end = follow(&log("tick 7 700\ntick 8 800\r"), &log("\ntick 9 950\n")).unwrap();
        assert_eq!((cut_end.last.number, cut_end.ticks), (7, 3));
    }

    #[test]
    fn lost_and_doubled_ticks_are_found() {
        assert!(follow(&log("tick 7 700\n"), &log("tick 9 900\n")).is_err());
        assert!(follow(&log("tick 7 700\n"), &log("tick 7 700\n")).is_err());
        assert!(follow(&log("tick 7 700\n"), &log("")).is_err());
        assert!(
            follow(
                &log("tick 7 700\n"),
                &log("tick 8 800\ncorrupt hot page 1\n")
            )
            .is_err()
        );
    }

    #[test]
    fn a_closed_port_ends_the_wait() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let serial = Serial::new(ours, None).unwrap();
        drop(theirs);
        let never = serial.wait("nothing", Duration::from_secs(60), |_| false);
        assert!(never.unwrap_err().to_string().contains("gone"));
        assert!(serial.finish().ended);
    }
}
