//! How an evacuation is shown while it runs: a bar over the memory of all guests on a terminal, a line now and then elsewhere.

use std::{
    io::{self, IsTerminal as _},
    time::{Duration, Instant},
};

use evacuation::Plan;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::survey::Survey;

/// Shows progress on standard error.
pub(super) struct Display {
    bar: Option<ProgressBar>,
    last_line: Instant,
    total: u64,
    guests: usize,
    /// Memory and number of the guests that have moved.
    moved: (u64, usize),
}

const LINE_EVERY: Duration = Duration::from_secs(5);

impl Display {
    pub(super) fn on_stderr(survey: &Survey, plan: &Plan) -> Self {
        let memory = plan
            .moves
            .iter()
            .map(|step| survey.fleet.guest(step.guest).memory);
        let total = memory.sum::<u64>().max(1);
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            // The template is a constant: without it the bar is plainer, not wrong.
            if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3}% {msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self {
            bar,
            last_line: Instant::now(),
            total,
            guests: plan.moves.len(),
            moved: (0, 0),
        }
    }

    /// Writes a line to the log without a bar through it.
    pub(super) fn note(&self, line: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(line),
            None => line(),
        }
    }

    pub(super) fn moved(&mut self, memory: u64) {
        self.moved.0 += memory;
        self.moved.1 += 1;
    }

    /// Shows progress; `done` is the memory already sent of guests under way.
    pub(super) fn show(&mut self, done: u64, under_way: usize) {
        let position = (self.moved.0 + done).min(self.total);
        let text = format!(
            "{} of {} guests moved, {under_way} under way",
            self.moved.1, self.guests
        );
        if let Some(bar) = &self.bar {
            bar.set_position(position);
            bar.set_message(text);
        } else if self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            let percent = u128::from(position) * 100 / u128::from(self.total);
            vamoose::say(format_args!("{percent:>3}% {text}"));
        }
    }

    /// Leaves the terminal to others.
    pub(super) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
