//! What fills the guest's memory: files of this machine, as a page cache holds them, and the memory of a program that runs here.
//!
//! Programs in the guest would need minutes to fill its memory, because its processors are emulated.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use lab::process::Child;
use lab::ram::{self, PAGE};
use tempfile::NamedTempFile;

use super::guard::Guard;

const MIB: u64 = 1 << 20;
/// At most so many bytes of files, and of the program's memory.
const FILES: u64 = 400 * MIB;
const HEAP: u64 = 240 * MIB;

/// Lines of text that the program reads.
const LINES: &str = "800000";
/// Perl, because every Debian has it. It reads texts of this machine, and where each word is.
const PROGRAM: &str = r#"
    FILE: for my $name (glob("/usr/share/doc/*/copyright /usr/share/perl/*/{*,*/*}.pm /usr/include/{*,*/*}.h")) {
        open my $file, "<", $name or next;
        while (<$file>) {
            push @lines, $_;
            push @{$places{$_}}, $#lines for /\w+/g;
            last FILE if @lines >= $ARGV[0];
        }
    }
    $| = 1;
    print "ready\n";
    <STDIN>;
"#;

/// A file with the content.
pub(crate) struct Content {
    file: NamedTempFile,
    /// Bytes of the program's memory; 0 if there is none.
    heap: u64,
    files: u64,
}

impl Content {
    pub(crate) fn gather(guard: &Guard) -> Result<Self> {
        let mut file = NamedTempFile::with_prefix("vamoose-")?;
        let heap = copy_heap(guard, file.as_file_mut());
        // Without perl, or where no process may read another, files must do.
        let heap = heap.or_else(|_| file.as_file_mut().set_len(0).map(|()| 0))?;
        let mut files = 0;
        for path in ram::host_files(FILES)? {
            let mut bytes = fs::read(&path).with_context(|| path.display().to_string())?;
            bytes.truncate(usize::try_from(FILES - files)?);
            // As in a page cache, each file begins with a page.
            bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
            file.write_all(&bytes).context("writing the content")?;
            files += bytes.len() as u64;
        }
        Ok(Self { file, heap, files })
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Whole MiB.
    pub(crate) fn mebibytes(&self) -> Result<u32> {
        Ok(u32::try_from((self.heap + self.files) / MIB)?)
    }

    pub(crate) fn describe(&self) -> String {
        let files = self.files / MIB;
        let files = format!("{files} MiB of this machine's files (libraries, programs, texts)");
        match self.heap / MIB {
            0 => files,
            heap => format!(
                "{files}, and {heap} MiB of the memory of a Perl program with an index of texts"
            ),
        }
    }
}

/// Runs the program, and appends its anonymous memory to `out`.
fn copy_heap(guard: &Guard, out: &mut File) -> Result<u64> {
    let mut command = Command::new("perl");
    command.args(["-e", PROGRAM, LINES]).stdin(Stdio::piped());
    let mut child = Child::start(command.stdout(Stdio::piped()))?;
    guard.watch(child.process())?;
    let mut said = String::new();
    let output = child.pipes.stdout.take().context("no pipe")?;
    BufReader::new(output).read_line(&mut said)?;
    ensure!(said == "ready\n", "perl says '{said}'");
    let process = format!("/proc/{}", child.pipes.id());
    let memory = File::open(format!("{process}/mem"))?;
    let maps = fs::read_to_string(format!("{process}/maps"))?;
    let mut copied = 0;
    for [from, to] in maps.lines().filter_map(anonymous) {
        let size = (to - from).min(HEAP - copied);
        let mut bytes = vec![0; usize::try_from(size)?];
        memory.read_exact_at(&mut bytes, from)?;
        out.write_all(&bytes)?;
        copied += size;
    }
    Ok(copied)
}

/// The addresses of a line of `/proc/PID/maps`, if it is of anonymous memory that the process writes.
fn anonymous(line: &str) -> Option<[u64; 2]> {
    let mut words = line.split_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let can_be_written = words.next()?.starts_with("rw");
    let is_of_no_file = words.nth(2)? == "0";
    let address = |text| u64::from_str_radix(text, 16).ok();
    let addresses = [address(from)?, address(to)?];
    (can_be_written && is_of_no_file).then_some(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_files_is_told_from_a_heap() {
        let heap = "5581a000-5581f000 rw-p 00000000 00:00 0          [heap]";
        assert_eq!(anonymous(heap), Some([0x5581_a000, 0x5581_f000]));
        for other in [
            "5581a000-5581f000 rw-p 0001a000 fe:00 4711       /usr/bin/perl",
            "5581a000-5581f000 r--p 00000000 00:00 0          [vvar]",
            "no map",
        ] {
            assert_eq!(anonymous(other), None, "{other}");
        }
    }
}
