//! What fills the guest's memory: files of this machine, as a page cache holds them, and the memory of a program that runs here.
//!
//! Programs in the guest would need minutes to fill its memory, because its processors are emulated.

use std::fs;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use lab::ram::{self, PAGE};
use tempfile::NamedTempFile;

const MIB: u64 = 1 << 20;
/// At most so many bytes of files, and of the program's memory.
const FILES: u64 = 400 * MIB;
const HEAP: u64 = 240 * MIB;

/// Reads texts of this machine and where each word is, then writes its own anonymous memory into a file. Perl, because every Debian
/// has it.
const PROGRAM: &str = r#"
    my ($out, $most) = @ARGV;
    FILE: for my $name (glob("/usr/share/doc/*/copyright /usr/share/perl/*/{*,*/*}.pm /usr/include/{*,*/*}.h")) {
        open my $file, "<", $name or next;
        while (<$file>) {
            push @lines, $_;
            push @{$places{$_}}, $#lines for /\w+/g;
            last FILE if @lines >= 800_000;
        }
    }
    open $out, ">:raw", $out or die; open my $maps, "<", "/proc/self/maps" or die;
    open my $memory, "<:raw", "/proc/self/mem" or die;
    for (<$maps>) {
        my ($from, $to) = map { hex } /^(\w+)-(\w+) rw\S+ \S+ \S+ 0\s/ or next;
        sysseek $memory, $from, 0;
        for (; $from < $to && $most > 0; $from += 4096, $most -= 4096) {
            sysread $memory, my $page, 4096 or die;
            print $out $page;
        }
    }
"#;

/// A file with the content.
pub(crate) struct Content {
    file: NamedTempFile,
    /// Bytes of the program's memory; 0 if there is none.
    heap: u64,
    files: u64,
}

impl Content {
    pub(crate) fn gather() -> Result<Self> {
        let mut file = NamedTempFile::with_prefix("vamoose-")?;
        let mut perl = Command::new("perl");
        perl.args(["-e", PROGRAM]).arg(file.path());
        // Without perl, or where no process may read its memory, files must do.
        if lab::run(perl.arg(HEAP.to_string())).is_err() {
            file.as_file().set_len(0)?;
        }
        let heap = file.seek(SeekFrom::End(0))?;
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
