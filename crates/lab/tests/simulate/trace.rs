//! What happened, in lines for people, and a hash of these and of all that is too much for lines.

use std::{fmt, time::Duration};

#[derive(Clone, Debug)]
pub(crate) struct Trace {
    pub(crate) hash: u64,
    /// Kept if somebody is to read them.
    pub(crate) lines: Option<Vec<String>>,
    line: String,
}

impl Trace {
    pub(crate) fn new(is_kept: bool) -> Self {
        Self {
            // FNV-1a.
            hash: 0xcbf2_9ce4_8422_2325,
            lines: is_kept.then(Vec::new),
            line: String::new(),
        }
    }

    pub(crate) fn note(&mut self, now: Duration, what: fmt::Arguments<'_>) {
        use fmt::Write as _;
        self.line.clear();
        let _ = write!(self.line, "{:11.3} {what}", now.as_secs_f64());
        let line = std::mem::take(&mut self.line);
        line.bytes().for_each(|byte| self.mix(byte.into()));
        self.line = line;
        if let Some(lines) = &mut self.lines {
            lines.push(self.line.clone());
        }
    }

    pub(crate) fn mix(&mut self, number: u64) {
        self.hash = (self.hash ^ number).wrapping_mul(0x0100_0000_01b3);
    }
}
