//! Standard error: lines, and on a terminal one line below them that is updated in place.

use std::{
    env,
    fmt::Display,
    io::{self, IsTerminal as _, Write},
    sync::Mutex,
};

use rustix::termios::tcgetwinsize;
use vamoose_link::lock;

/// The line in place; empty if there is none.
static IN_PLACE: Mutex<String> = Mutex::new(String::new());

/// Moves to the beginning of the line in place, and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Whether standard error is a terminal.
pub fn is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Whether standard error is a terminal whose user wants more than plain lines.
pub fn has_control() -> bool {
    let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    is_terminal() && !is_set("NO_COLOR") && env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Columns of a line; all there can be if standard error is not a terminal.
pub fn width() -> usize {
    match tcgetwinsize(io::stderr()) {
        Ok(size) if size.ws_col > 0 => size.ws_col.into(),
        _ if is_terminal() => 80,
        _ => usize::MAX,
    }
}

/// `text` as lines of at most `width` columns, as far as its words are not longer. No-break spaces become spaces.
pub fn wrap(text: &str, width: usize) -> String {
    let (mut lines, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        let length = word.chars().count();
        if column > 0 {
            let fits = column + 1 + length <= width;
            lines.push(if fits { ' ' } else { '\n' });
            column = if fits { column + 1 } else { 0 };
        }
        lines += word;
        column += length;
    }
    lines.replace('\u{a0}', " ")
}

/// Writes a line to standard error. Unlike `eprintln`, ignores a closed terminal or pipe.
pub fn say(line: impl Display) {
    above(|stderr| writeln!(stderr, "{line}"));
}

/// Updates the line in place, as far as it fits. An empty one removes it.
pub fn show_in_place(line: &str) {
    let line: String = line.chars().take(width().saturating_sub(1)).collect();
    let mut shown = lock(&IN_PLACE);
    if *shown != line {
        *shown = line;
        let _ = write!(io::stderr(), "{CLEAR}{shown}");
    }
}

/// Writes above the line in place.
fn above(write: impl FnOnce(&mut io::StderrLock<'_>) -> io::Result<()>) {
    let shown = lock(&IN_PLACE);
    let mut stderr = io::stderr().lock();
    if shown.is_empty() {
        let _ = write(&mut stderr);
        return;
    }
    let _ = write!(stderr, "{CLEAR}");
    let _ = write(&mut stderr);
    let _ = write!(stderr, "{shown}");
}

/// Writes whole lines above the line in place.
pub struct Above;

impl Write for Above {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        above(|stderr| stderr.write_all(lines));
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
