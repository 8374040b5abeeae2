//! Progress of a migration: a line that is updated in place on a terminal, otherwise a line per second.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;
use vamoose_link::{Session, lock, millis};
use vamoose_relay::CopiedDisks;
pub use vamoose_relay::Progress;

use crate::{
    log, report,
    sample::Sample,
    terminal::{self, say},
};

/// How progress is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// `bar` on a terminal, `lines` elsewhere and if NO_COLOR is set; `none` with --quiet
    #[default]
    Auto,
    /// One line on standard error that is updated in place
    Bar,
    /// A line per second on standard error
    Lines,
    /// A JSON object per second on standard output, one per line (docs/reading-a-report.md)
    Json,
    /// Nothing
    None,
}

impl Mode {
    fn choose(self) -> Self {
        match self {
            Self::Auto if log::is_quiet() => Self::None,
            Self::Auto if terminal::has_control() => Self::Bar,
            Self::Auto => Self::Lines,
            chosen => chosen,
        }
    }
}

/// Shows how much is done.
pub struct ProgressLine {
    mode: Mode,
    line_every: Duration,
    last_line: Option<Instant>,
}

/// A part of a line and its rank: where a line is too long, the parts of the highest ranks are left out.
pub type Part = (u8, String);

impl ProgressLine {
    /// Lines are written at an interval.
    pub fn new(mode: Mode, line_every: Duration) -> Self {
        Self {
            mode: mode.choose(),
            line_every,
            last_line: None,
        }
    }

    /// Updates the line in place, or writes a line if one is due.
    pub fn show(&mut self, done: u64, total: u64, parts: &[Part]) {
        let is_bar = self.mode == Mode::Bar;
        if is_bar || self.mode == Mode::Lines && self.is_due() {
            let width = is_bar.then(|| terminal::width().saturating_sub(1));
            self.write(line(done, total, parts, width));
        }
    }

    fn write(&self, line: String) {
        match self.mode {
            Mode::Bar => terminal::show_in_place(&line),
            _ => say(line),
        }
    }

    /// Whether the interval since the last line is over, so that another one begins.
    fn is_due(&mut self) -> bool {
        let is_due = |last: Instant| last.elapsed() >= self.line_every;
        let is_due = self.last_line.is_none_or(is_due);
        if is_due {
            self.last_line = Some(Instant::now());
        }
        is_due
    }

    /// Removes the line in place.
    pub fn end(&mut self) {
        if self.mode == Mode::Bar {
            terminal::show_in_place("");
        }
        self.mode = Mode::None;
    }
}

/// A line of these parts, within `width` columns if there is a limit. If that leaves room, the line begins with a bar.
fn line(done: u64, total: u64, parts: &[Part], width: Option<usize>) -> String {
    let (done, total) = (u128::from(done.min(total)), u128::from(total.max(1)));
    let percent = done * 100 / total;
    let bar = width.map(|width| {
        let columns = if width < 100 { 16 } else { 30 };
        let filled = usize::try_from(done * columns as u128 / total).unwrap_or(0);
        let bar = "#".repeat(filled);
        (BAR, format!("[{bar:-<columns$}] "))
    });
    let mut kept: Vec<&Part> = bar.iter().chain(parts).collect();
    loop {
        let bar = kept.iter().find(|(rank, _)| *rank == BAR);
        let texts = kept.iter().filter(|(rank, _)| *rank != BAR);
        let texts: Vec<_> = texts.map(|(_, text)| text.as_str()).collect();
        let bar = bar.map_or("", |(_, bar)| bar);
        let line = format!("{bar}{percent:>3}% {}", texts.join(", "));
        let width = width.unwrap_or(usize::MAX);
        match kept.iter().map(|(rank, _)| *rank).max() {
            Some(last) if line.chars().count() > width => kept.retain(|(rank, _)| *rank != last),
            _ => return line.chars().take(width).collect(),
        }
    }
}

/// The bar's rank.
const BAR: u8 = 4;

/// Shows the progress of one migration until [`Display::end`], also when no progress is reported for a while.
pub struct Display(Arc<Mutex<Shown>>);

struct Shown {
    line: ProgressLine,
    /// The peer's name.
    peer: String,
    begun: Instant,
    progress: Progress,
    rates: Rates,
    /// Time of the last report, and what the migration waits for until the next one.
    reported: Instant,
    waits_for: String,
    /// The trouble that is shown.
    trouble: Option<Trouble>,
}

/// Why a migration does not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Trouble {
    /// A stream has been without a connection for this time, of at most `limit`.
    NoConnection { time: Duration, limit: Duration },
    /// Nothing has been reported for this time.
    Waiting(Duration),
}

const LINE_EVERY: Duration = Duration::from_secs(1);
/// Interval at which trouble is looked for.
const LOOK: Duration = Duration::from_millis(250);
/// Time without a connection after which this is shown.
const LOST_FOR: Duration = Duration::from_secs(1);
/// Time without a report after which the display says what the migration waits for.
const SILENT_FOR: Duration = Duration::from_secs(2);

impl Display {
    /// For a migration to `peer`.
    pub fn new(mode: Mode, peer: impl Into<String>) -> Self {
        let now = Instant::now();
        let shown = Arc::new(Mutex::new(Shown {
            line: ProgressLine::new(mode, LINE_EVERY),
            peer: peer.into(),
            begun: now,
            progress: Progress::default(),
            rates: Rates::default(),
            reported: now,
            waits_for: String::new(),
            trouble: None,
        }));
        let watched = Arc::downgrade(&shown);
        // Without the thread, trouble is seen only when progress is reported.
        let _ = thread::Builder::new().spawn(move || {
            while let Some(shown) = watched.upgrade() {
                lock(&shown).update();
                drop(shown);
                thread::sleep(LOOK);
            }
        });
        Self(shown)
    }

    /// The migration has reported its progress.
    pub fn show(&self, progress: &Progress) {
        let shown = &mut *lock(&self.0);
        shown.reported = Instant::now();
        shown.progress = progress.clone();
        let disks = progress.disks.map_or(0, |disks| disks.wire_bytes);
        let wire = progress.moved.wire_bytes + disks;
        let bytes = [wire, guest_bytes(&progress.source)];
        shown.rates.update(shown.reported, bytes);
        // The final progress is always shown.
        if progress.source["downtime-parts"].is_object() {
            shown.line.last_line = None;
        }
        shown.update();
    }

    /// The migration may be without progress from now on because it waits for this.
    pub fn wait_for(&self, what: &str) {
        let shown = &mut *lock(&self.0);
        shown.reported = Instant::now();
        what.clone_into(&mut shown.waits_for);
    }

    pub fn end(self) {
        lock(&self.0).line.end();
    }
}

impl Shown {
    fn update(&mut self) {
        let trouble = self.find_trouble();
        let has_changed_kind = self.trouble.as_ref().map(Trouble::is_of_link)
            != trouble.as_ref().map(Trouble::is_of_link);
        let before = std::mem::replace(&mut self.trouble, trouble);
        let mode = self.line.mode;
        let has_nothing_to_show = self.progress.status.is_empty() && self.trouble.is_none();
        match mode {
            _ if has_nothing_to_show => {}
            Mode::Json if self.line.is_due() => self.print_json(),
            Mode::Bar | Mode::Lines => {
                if let Some(Trouble::NoConnection { time, .. }) = before
                    && has_changed_kind
                    && self
                        .progress
                        .session
                        .as_ref()
                        .is_some_and(Session::is_connected)
                {
                    let (peer, seconds) = (&self.peer, time.as_secs());
                    say(format_args!("connected to {peer} again after {seconds} s"));
                }
                match &self.trouble {
                    Some(trouble) if has_changed_kind || mode == Mode::Bar => {
                        let text = trouble.text(&self.peer, &self.waits_for);
                        self.line.write(text);
                    }
                    Some(_) => {}
                    None => self.show_progress(),
                }
            }
            _ => {}
        }
    }

    fn find_trouble(&self) -> Option<Trouble> {
        let session = self.progress.session.as_ref();
        let lost = session.and_then(|session| Some((session.disconnected()?, session)));
        let silent_for = self.reported.elapsed();
        match lost {
            Some((time, session)) if time >= LOST_FOR => Some(Trouble::NoConnection {
                time,
                limit: session.reconnect_timeout(),
            }),
            _ if silent_for >= SILENT_FOR && !self.waits_for.is_empty() => {
                Some(Trouble::Waiting(silent_for))
            }
            _ => None,
        }
    }

    fn show_progress(&mut self) {
        let (done, total) = done_and_total(&self.progress);
        self.line
            .show(done, total, &parts(&self.progress, &self.rates));
    }

    fn print_json(&self) {
        let no_connection = match self.trouble {
            Some(Trouble::NoConnection { time, .. }) => Some(millis(time)),
            _ => None,
        };
        let waiting = matches!(self.trouble, Some(Trouble::Waiting(_)));
        let line = Line {
            sample: Sample::of(millis(self.begun.elapsed()), &self.progress),
            total: self.progress.source["ram"]["total"].as_u64(),
            time_left: match outlook(&self.progress, &self.rates) {
                Some(Outlook::Left(time)) => Some(millis(time)),
                _ => None,
            },
            no_connection,
            waits_for: waiting.then_some(&self.waits_for),
        };
        // It has only numbers and strings, so this cannot fail.
        let line = serde_json::to_string(&line).unwrap_or_default();
        let _ = report::print(&(line + "\n"));
    }
}

/// A line of JSON.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Line<'a> {
    #[serde(flatten)]
    sample: Sample,
    /// Bytes of guest memory.
    total: Option<u64>,
    /// Milliseconds until the end at the current rate; null if unknown, or if the guest writes faster than the link carries.
    time_left: Option<u64>,
    /// Milliseconds for which a stream has been without a connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_connection: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    waits_for: Option<&'a String>,
}

impl Trouble {
    fn is_of_link(&self) -> bool {
        matches!(self, Self::NoConnection { .. })
    }

    fn text(&self, peer: &str, waits_for: &str) -> String {
        match self {
            Self::NoConnection { time, limit } => {
                let (time, limit) = (time.as_secs(), limit.as_secs());
                format!("no connection to {peer}, retrying ({time} of {limit} s)")
            }
            Self::Waiting(time) => format!("waiting for {waits_for} ({} s)", time.as_secs()),
        }
    }
}

/// Bytes left to send. From QEMU 11.1 on they include devices; before, they are guest memory only.
pub fn remaining(source: &Value) -> Option<u64> {
    let all = source["remaining"].as_u64();
    all.or_else(|| source["ram"]["remaining"].as_u64())
}

/// Disks that are copied before the memory is moved.
fn disks_being_copied(progress: &Progress) -> Option<CopiedDisks> {
    progress.disks.filter(|_| progress.source.is_null())
}

/// Bytes sent, and bytes in all.
fn done_and_total(progress: &Progress) -> (u64, u64) {
    if let Some(disks) = disks_being_copied(progress) {
        return (disks.bytes, disks.total);
    }
    let source = &progress.source;
    let total = source["ram"]["total"].as_u64().unwrap_or(0);
    (total.saturating_sub(remaining(source).unwrap_or(0)), total)
}

/// Bytes of guest memory that the source has sent, in all rounds.
fn guest_bytes(source: &Value) -> u64 {
    let ram = |key: &str| source["ram"][key].as_u64().unwrap_or(0);
    (ram("normal") + ram("duplicate")).saturating_mul(ram("page-size"))
}

/// What becomes of a migration at the current rates.
#[derive(Debug, PartialEq, Eq)]
enum Outlook {
    Left(Duration),
    /// The guest writes faster than the link carries.
    Endless,
}

fn outlook(progress: &Progress, rates: &Rates) -> Option<Outlook> {
    let ram = |key: &str| progress.source["ram"][key].as_u64();
    let [_, sent] = rates.per_second?;
    if progress.status != "active" || sent <= 0.0 {
        return None;
    }
    // QEMU measures it after the first round.
    let written = ram("dirty-pages-rate")? as f64 * ram("page-size")? as f64;
    if written >= sent {
        return Some(Outlook::Endless);
    }
    let left = remaining(&progress.source)? as f64 / (sent - written);
    Duration::try_from_secs_f64(left).ok().map(Outlook::Left)
}

fn parts(progress: &Progress, rates: &Rates) -> Vec<Part> {
    let (source, moved) = (&progress.source, &progress.moved);
    let round = source["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
    let mut parts = vec![(0, progress.status.clone())];
    let disks = disks_being_copied(progress);
    parts.extend(disks.map(|disks| {
        let [bytes, total] = [disks.bytes, disks.total].map(|it| it >> 20);
        (1, format!("{bytes} of {total} MiB"))
    }));
    let wire = rates.per_second.map(|[wire, _]| wire / f64::from(1 << 20));
    parts.extend(wire.map(|mebibytes| (2, format!("{mebibytes:.0} MiB/s"))));
    parts.extend(outlook(progress, rates).map(|outlook| match outlook {
        Outlook::Left(time) => (1, format!("{} left", rounded(time))),
        Outlook::Endless => (1, "guest writes faster than the link".to_owned()),
    }));
    if moved.page_bytes > 0 {
        let ratio = moved.page_bytes as f64 / moved.wire_bytes.max(1) as f64;
        parts.push((3, format!("ratio {ratio:.2}")));
    }
    let throttle = source["cpu-throttle-percentage"].as_u64();
    parts.extend(throttle.map(|percent| (2, format!("slowed down by {percent} %"))));
    if disks.is_none() {
        parts.push((5, format!("round {round}")));
    }
    let downtime = source["expected-downtime"].as_u64();
    parts.extend(downtime.map(|millis| (6, format!("expected downtime {millis} ms"))));
    // The keys are those of the report.
    let of_downtime = source["downtime-parts"].as_object().into_iter().flatten();
    parts.extend(of_downtime.map(|(part, millis)| (7, format!("{part} {millis} ms"))));
    parts
}

/// A time in whole units, for people.
pub fn rounded(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{} s", seconds + 1),
        seconds @ 120..7200 => format!("{} min", seconds.div_ceil(60)),
        seconds => format!("{} h", seconds.div_ceil(3600)),
    }
}

/// Rates over about the last second: bytes on the wire, and bytes of guest memory.
#[derive(Default)]
struct Rates {
    since: Option<(Instant, [u64; 2])>,
    /// `None` in the first second.
    per_second: Option<[f64; 2]>,
}

impl Rates {
    fn update(&mut self, now: Instant, bytes: [u64; 2]) {
        let (since, before) = *self.since.get_or_insert((now, bytes));
        let elapsed = now.duration_since(since);
        if elapsed >= LINE_EVERY {
            let rate =
                |at: usize| bytes[at].saturating_sub(before[at]) as f64 / elapsed.as_secs_f64();
            self.per_second = Some([rate(0), rate(1)]);
            self.since = Some((now, bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vamoose_link::Counters;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A migration that sends 64 MiB of guest memory as 16 MiB per second, of a guest that writes this many MiB per second.
    fn progress(written: u64) -> (Progress, Rates) {
        let ram = json!({ "total": 4096 * MIB, "remaining": 1024 * MIB, "dirty-sync-count": 2,
            "dirty-pages-rate": written * MIB / 4096, "page-size": 4096 });
        let progress = Progress {
            status: "active".to_owned(),
            source: json!({ "ram": ram, "expected-downtime": 300 }),
            moved: Counters {
                wire_bytes: 100,
                page_bytes: 250,
                ..Counters::default()
            },
            ..Progress::default()
        };
        let mut rates = Rates::default();
        let now = Instant::now();
        rates.update(now, [0, 0]);
        rates.update(now + LINE_EVERY, [16 * MIB, 64 * MIB]);
        (progress, rates)
    }

    fn shown((progress, rates): &(Progress, Rates), width: Option<usize>) -> String {
        let (done, total) = done_and_total(progress);
        line(done, total, &parts(progress, rates), width)
    }

    #[test]
    fn lines_fit_and_keep_what_matters_most() {
        let idle = progress(0);
        let busy = progress(64);
        for (migration, width, expected) in [
            (&idle, Some(20), " 75% active, 17 s le"),
            (&idle, Some(40), " 75% active, 16 MiB/s, 17 s left"),
            (
                &idle,
                Some(79),
                "[############----]  75% active, 16 MiB/s, 17 s left, ratio 2.50, round 2",
            ),
            (
                &idle,
                Some(199),
                "[######################--------]  75% active, 16 MiB/s, 17 s left, ratio 2.50, round 2, expected downtime 300 ms",
            ),
            (
                &idle,
                None,
                " 75% active, 16 MiB/s, 17 s left, ratio 2.50, round 2, expected downtime 300 ms",
            ),
            (
                &busy,
                Some(46),
                " 75% active, guest writes faster than the link",
            ),
            (
                &busy,
                Some(79),
                " 75% active, 16 MiB/s, guest writes faster than the link, ratio 2.50",
            ),
        ] {
            let line = shown(migration, width);
            // The narrowest one is cut.
            if width != Some(20) {
                assert_eq!(line, expected, "at {width:?}");
            }
            assert!(line.chars().count() <= width.unwrap_or(usize::MAX));
        }
    }

    #[test]
    fn time_left_counts_what_the_guest_writes_meanwhile() {
        let at = |written| {
            let (progress, rates) = progress(written);
            outlook(&progress, &rates)
        };
        assert_eq!(at(0), Some(Outlook::Left(Duration::from_secs(16))));
        assert_eq!(at(32), Some(Outlook::Left(Duration::from_secs(32))));
        assert_eq!(at(64), Some(Outlook::Endless));
        assert_eq!(outlook(&progress(0).0, &Rates::default()), None);
        let seconds = [0, 119, 120, 3600, 7200].map(|it| rounded(Duration::from_secs(it)));
        assert_eq!(seconds, ["1 s", "120 s", "2 min", "60 min", "2 h"]);
    }

    #[test]
    fn trouble_has_its_time() {
        let lost = Trouble::NoConnection {
            time: Duration::from_secs(12),
            limit: Duration::from_secs(30),
        };
        let text = lost.text("kvm2", "");
        assert_eq!(text, "no connection to kvm2, retrying (12 of 30 s)");
        let text = Trouble::Waiting(Duration::from_millis(2500)).text("kvm2", "the server");
        assert_eq!(text, "waiting for the server (2 s)");
    }

    #[test]
    fn disks_that_are_copied_first_have_a_line_of_their_own() {
        let (bytes, total, wire_bytes) = (256 * MIB, 1024 * MIB, 100 * MIB);
        let copying = Progress {
            status: "copying disks".to_owned(),
            disks: Some(CopiedDisks {
                bytes,
                total,
                wire_bytes,
            }),
            ..Progress::default()
        };
        let line = shown(&(copying, Rates::default()), None);
        assert_eq!(line, " 25% copying disks, 256 of 1024 MiB");
    }

    #[test]
    fn remaining_includes_devices() {
        let older = json!({ "ram": { "total": 4096, "remaining": 1024 } });
        let newer = json!({ "ram": { "total": 4096, "remaining": 0 }, "remaining": 2048 });
        let left = [Value::Null, older, newer].map(|source| remaining(&source));
        assert_eq!(left, [None, Some(1024), Some(2048)]);
    }

    #[test]
    fn final_progress_has_the_parts_of_the_downtime() {
        let progress = Progress {
            status: "completed".to_owned(),
            source: json!({ "downtime-parts": { "commit": 8, "load": 25 } }),
            ..Progress::default()
        };
        let line = shown(&(progress, Rates::default()), None);
        assert!(line.ends_with("round 0, commit 8 ms, load 25 ms"), "{line}");
    }

    #[test]
    fn progress_without_an_answer_of_the_source_is_zero() {
        assert_eq!(done_and_total(&Progress::default()), (0, 0));
    }
}
