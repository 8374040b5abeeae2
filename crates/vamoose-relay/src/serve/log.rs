//! The log of a QEMU: its standard error, as far as that is a file, or the file that libvirt keeps for it.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

/// A QEMU's log, from the time when it was opened.
pub(super) struct Log {
    file: File,
    start: u64,
}

/// Most bytes to read.
const LONGEST: usize = 64 << 10;
/// Most lines to report: the last ones.
const MOST_LINES: usize = 3;

impl Log {
    /// The log of the process `pid`, whose guest libvirt may know as `name`.
    pub(super) fn open(pid: u32, name: &str) -> Option<Self> {
        let stderr = PathBuf::from(format!("/proc/{pid}/fd/2"));
        let of_libvirt = format!("/var/log/libvirt/qemu/{name}.log");
        [stderr, of_libvirt.into()]
            .iter()
            .find_map(|path| Self::at(path))
    }

    fn at(path: &Path) -> Option<Self> {
        // Anything else may block.
        let is_file = fs::metadata(path).is_ok_and(|found| found.is_file());
        let file = is_file.then(|| File::open(path).ok())??;
        let start = file.metadata().ok()?.len();
        Some(Self { file, start })
    }

    /// The last lines, without the program's name.
    pub(super) fn last_lines(&self) -> Vec<String> {
        // What could be read counts.
        let bytes = self.read().unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(MOST_LINES)..];
        last.iter().map(|line| without_program(line)).collect()
    }
}

impl Log {
    fn read(&self) -> io::Result<Vec<u8>> {
        let end = self.file.metadata()?.len();
        let start = self.start.max(end.saturating_sub(LONGEST as u64));
        let mut bytes = vec![0; LONGEST];
        let read = self.file.read_at(&mut bytes, start)?;
        bytes.truncate(read);
        Ok(bytes)
    }
}

fn without_program(line: &str) -> String {
    let rest = match line.split_once(": ") {
        Some((program, rest)) if program.contains("qemu") => rest,
        _ => line,
    };
    rest.replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn only_the_last_new_lines_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, "old\n").unwrap();
        let log = Log::at(&path).unwrap();
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"1\n2\n\nqemu-system-x86_64: load of migration failed: Invalid\n")
            .unwrap();
        file.write_all(b"2026-11-26T10:00:00Z qemu-kvm: \x1b[2J\n")
            .unwrap();
        let expected = ["2", "load of migration failed: Invalid", "?[2J"];
        assert_eq!(log.last_lines(), expected);
        assert!(Log::at(dir.path()).is_none() && Log::at(&dir.path().join("none")).is_none());
    }
}
