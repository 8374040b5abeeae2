//! Progress of a migration: a bar on a terminal, otherwise a line per second.

use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
pub use vamoose_relay::Progress;

/// Progress on standard error: a bar on a terminal, otherwise lines at an interval.
pub struct Bar {
    bar: Option<ProgressBar>,
    line_every: Duration,
    last_line: Option<Instant>,
}

impl Bar {
    pub fn on_stderr(line_every: Duration) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            // The template is a constant. Without it, the bar would only look plainer.
            if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3}% {msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self {
            bar,
            line_every,
            last_line: None,
        }
    }

    /// Updates the bar, or prints a line if one is due.
    pub fn show(&mut self, done: u64, total: u64, text: String) {
        let (done, total) = (done.min(total), total.max(1));
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            bar.set_message(text);
            return;
        }
        let is_due = |last: Instant| last.elapsed() >= self.line_every;
        if self.last_line.is_none_or(is_due) {
            self.last_line = Some(Instant::now());
            let percent = u128::from(done) * 100 / u128::from(total);
            crate::say(format_args!("{percent:>3}% {text}"));
        }
    }

    /// Makes the next line due immediately.
    fn expect_line(&mut self) {
        self.last_line = None;
    }

    /// Hides the bar while `line` writes to the log.
    pub fn suspend(&self, line: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(line),
            None => line(),
        }
    }

    /// Clears the bar.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Shows the progress of one migration.
pub struct Display {
    bar: Bar,
    rate: Rate,
}

const LINE_EVERY: Duration = Duration::from_secs(1);

impl Display {
    pub fn on_stderr() -> Self {
        Self {
            bar: Bar::on_stderr(LINE_EVERY),
            rate: Rate::default(),
        }
    }

    pub fn show(&mut self, progress: &Progress) {
        self.rate.update(progress.moved.wire_bytes);
        // The final progress is always shown.
        if progress.source["downtime-parts"].is_object() {
            self.bar.expect_line();
        }
        let (done, total) = done(&progress.source);
        let text = text(progress, self.rate.bytes_per_second);
        self.bar.show(done, total, text);
    }

    pub fn end(&self) {
        self.bar.end();
    }
}

/// Bytes left to send. From QEMU 11.1 on they include devices; before, they are guest memory only.
pub fn remaining(source: &Value) -> Option<u64> {
    let all = source["remaining"].as_u64();
    all.or_else(|| source["ram"]["remaining"].as_u64())
}

/// Bytes sent, and bytes in all.
fn done(source: &Value) -> (u64, u64) {
    let total = source["ram"]["total"].as_u64().unwrap_or(0);
    (total.saturating_sub(remaining(source).unwrap_or(0)), total)
}

fn text(progress: &Progress, bytes_per_second: f64) -> String {
    let (source, moved) = (&progress.source, &progress.moved);
    let downtime = source["expected-downtime"].as_u64();
    let downtime = downtime.map(|millis| format!(", expected downtime {millis} ms"));
    // The keys are those of the report.
    let parts = source["downtime-parts"].as_object().into_iter().flatten();
    let parts: String = parts
        .map(|(part, millis)| format!(", {part} {millis} ms"))
        .collect();
    format!(
        "{}, {:.0} MiB/s on the wire, ratio {:.2}, round {}{}{parts}",
        progress.status,
        bytes_per_second / f64::from(1 << 20),
        moved.page_bytes as f64 / moved.wire_bytes.max(1) as f64,
        source["ram"]["dirty-sync-count"].as_u64().unwrap_or(0),
        downtime.unwrap_or_default(),
    )
}

/// Rate over about the last second.
#[derive(Default)]
struct Rate {
    since: Option<(Instant, u64)>,
    bytes_per_second: f64,
}

impl Rate {
    fn update(&mut self, bytes: u64) {
        let now = Instant::now();
        let (since, before) = *self.since.get_or_insert((now, bytes));
        let elapsed = now.duration_since(since);
        if elapsed >= LINE_EVERY {
            self.bytes_per_second = bytes.saturating_sub(before) as f64 / elapsed.as_secs_f64();
            self.since = Some((now, bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vamoose_link::Snapshot;

    use super::*;

    #[test]
    fn progress_is_the_sent_part_of_ram() {
        let progress = Progress {
            status: "active".to_owned(),
            source: json!({ "ram": { "total": 4096, "remaining": 1024, "dirty-sync-count": 2 },
                "expected-downtime": 300 }),
            moved: Snapshot {
                wire_bytes: 100,
                page_bytes: 250,
                ..Snapshot::default()
            },
            ..Progress::default()
        };
        assert_eq!(done(&progress.source), (3072, 4096));
        assert_eq!(
            text(&progress, 2_097_152.0),
            "active, 2 MiB/s on the wire, ratio 2.50, round 2, expected downtime 300 ms"
        );
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
        let text = text(&progress, 0.0);
        assert!(text.ends_with("round 0, commit 8 ms, load 25 ms"), "{text}");
    }

    #[test]
    fn progress_without_an_answer_of_the_source_is_zero() {
        assert_eq!(done(&Progress::default().source), (0, 0));
    }
}
