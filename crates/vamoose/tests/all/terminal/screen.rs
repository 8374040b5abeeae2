//! A terminal of a given width, and what a program shows on it.

use std::{
    fs::File,
    io::{self, Read as _},
    process::{Command, ExitStatus, Stdio},
    sync::Arc,
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result};
use lab::{process::Child, watched::Watched};
use rustix::{
    fs::{Mode, OFlags, open},
    process::Signal,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use crate::common::LIMIT;

/// A program on a terminal.
pub(super) struct Screen {
    child: Child,
    shown: Arc<Watched<Shown>>,
    terminal: Arc<File>,
    reader: JoinHandle<()>,
}

/// What a terminal has shown.
#[derive(Clone, Debug, Default)]
pub(super) struct Shown {
    columns: usize,
    /// The lines, of which the last one is where the program writes.
    pub(super) lines: Vec<String>,
    /// What was on a line before it was cleared.
    pub(super) cleared: Vec<String>,
    /// Lines that did not fit.
    pub(super) wrapped: Vec<String>,
    column: usize,
    /// An escape sequence that has not ended.
    escape: String,
}

impl Screen {
    pub(super) fn start(command: &mut Command, columns: u16) -> Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let path = ptsname(&master, Vec::new())?;
        let slave = open(&*path, OFlags::RDWR | OFlags::NOCTTY, Mode::empty())?;
        let terminal = Arc::new(File::from(master));
        resize(&terminal, columns)?;
        command.env("TERM", "xterm").env_remove("NO_COLOR");
        command.stdin(Stdio::null()).stdout(slave.try_clone()?);
        let child = Child::start(command.stderr(slave))?;
        // The terminal ends with the program's descriptors.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let shown = Arc::new(Watched::new(Shown::new(columns.into())));
        let (read, reads) = (terminal.clone(), shown.clone());
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = (&*read).read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..count]);
                reads.update(|shown| text.chars().for_each(|char| shown.take(char)));
            }
        });
        Ok(Self {
            child,
            shown,
            terminal,
            reader,
        })
    }

    /// Waits until `text` is shown, or has been.
    pub(super) fn wait_for(&self, text: &str) -> Result<()> {
        let shows = |shown: &Shown| {
            let mut lines = shown.lines.iter().chain(&shown.cleared);
            lines.any(|line| line.contains(text)).then_some(())
        };
        let found = self.shown.wait(LIMIT, shows);
        found.with_context(|| format!("`{text}` is not on {:#?}", self.shown.lock()))
    }

    /// Lines under way may be as long as before.
    pub(super) fn resize(&self, columns: u16) -> io::Result<()> {
        resize(&self.terminal, columns)
    }

    pub(super) fn signal(&self, signal: Signal) {
        self.child.process().signal(signal);
    }

    pub(super) fn finish(mut self) -> Result<(ExitStatus, Shown)> {
        let ended = self.child.finish(LIMIT);
        let (status, _) = ended.with_context(|| format!("{:#?}", self.shown.lock()))?;
        let _ = self.reader.join();
        let shown = self.shown.lock().clone();
        Ok((status, shown))
    }
}

fn resize(terminal: &File, columns: u16) -> io::Result<()> {
    let size = Winsize {
        ws_row: 24,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(tcsetwinsize(terminal, size)?)
}

impl Shown {
    fn new(columns: usize) -> Self {
        Self {
            columns,
            lines: vec![String::new()],
            ..Self::default()
        }
    }

    /// All that remains on the terminal.
    pub(super) fn text(&self) -> String {
        self.lines.join("\n")
    }

    fn take(&mut self, char: char) {
        let Some(line) = self.lines.last_mut() else {
            return;
        };
        if !self.escape.is_empty() || char == '\x1b' {
            self.escape.push(char);
            if char.is_ascii_alphabetic() {
                if self.escape == "\x1b[K" {
                    if !line.is_empty() {
                        self.cleared.push(line.clone());
                    }
                    *line = line.chars().take(self.column).collect();
                }
                self.escape.clear();
            }
            return;
        }
        match char {
            '\r' => self.column = 0,
            '\n' => self.lines.push(String::new()),
            _ => {
                if self.column == self.columns {
                    self.wrapped.push(line.clone());
                }
                let kept = line.chars().take(self.column);
                let behind: String = line.chars().skip(self.column + 1).collect();
                *line = kept.chain([char]).collect::<String>() + &behind;
                self.column += 1;
            }
        }
    }
}
