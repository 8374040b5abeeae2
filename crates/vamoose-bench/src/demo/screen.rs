//! Output of the demo, at most 80 columns wide. If standard output is closed, the demo goes on without it.

use std::fmt::Display;
use std::io::{self, Write as _};

const COLUMNS: usize = 80;

pub(crate) fn say(text: impl Display) {
    // The print macros would panic if standard output is closed.
    let _ = writeln!(io::stdout(), "{text}");
}

/// Begins a step of the demo.
pub(crate) fn step(number: u32, title: &str) {
    say("");
    wrapped(&format!("{number}. "), "   ", title);
}

/// Prints a remark within a step.
pub(crate) fn note(text: impl Display) {
    for line in text.to_string().lines() {
        wrapped("   ", "     ", line);
    }
}

/// Prints a paragraph outside of steps.
pub(crate) fn wrap(text: impl Display) {
    wrapped("", "", &text.to_string());
}

fn wrapped(first: &str, further: &str, text: &str) {
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            say(&line);
            further.clone_into(&mut line);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    say(line);
}
