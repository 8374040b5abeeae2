//! Substitutes for libraries of hardware that test machines do not have.
//!
//! `stand_in/libqatzip.c` is a libqatzip that uses zlib instead of a QAT device, with switches for every failure of the real
//! library. A program under test gets the switches through its environment (`STAND_IN_hw_session_stat=11`); a test that loads the
//! library calls `stand_in_set(name, value)` and `stand_in_get(name)`. The C file lists the names.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::{run, skipped};

/// The functions of libqatzip that Vamoose calls. The stand-in has all of them.
pub const LIBQATZIP_SYMBOLS: [&str; 10] = [
    "qzInit",
    "qzGetDefaultsDeflate",
    "qzSetupSessionDeflate",
    "qzMaxCompressedLength",
    "qzMalloc",
    "qzFree",
    "qzCompress",
    "qzDecompress",
    "qzTeardownSession",
    "qzClose",
];

/// A function that Vamoose calls if the library has it; the first versions of QATzip do not. The stand-in has it.
pub const LIBQATZIP_OPTIONAL_SYMBOL: &str = "qzSetLogLevel";

/// Compiles the stand-in for libqatzip into `folder`, optionally without a symbol, and returns its path. Every test needs a folder
/// of its own: a process that loads a file twice shares its switches. Without a compiler or zlib, says loudly that the test is
/// skipped, and gives `None`.
pub fn libqatzip_or_skip(folder: &Path, without: Option<&str>) -> Result<Option<PathBuf>> {
    // Checks for a C compiler and zlib's header.
    let mut compiler = Command::new("cc");
    compiler.args(["-E", "-include", "zlib.h", "-x", "c", "/dev/null"]);
    if let Err(error) = run(&mut compiler) {
        let why = format!("no stand-in for libqatzip: {error:#}; run scripts/setup build");
        return skipped(&why).map(|()| None);
    }
    let path = folder.join("libqatzip.so.3");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]);
    if let Some(symbol) = without {
        ensure!(
            symbol == LIBQATZIP_OPTIONAL_SYMBOL || LIBQATZIP_SYMBOLS.contains(&symbol),
            "the stand-in has no {symbol} to leave out"
        );
        // Renames the function, so that it is not found.
        compiler.arg(format!("-D{symbol}=without_{symbol}"));
    }
    compiler.arg("-o").arg(&path).arg(SOURCE).arg("-lz");
    run(&mut compiler)?;
    Ok(Some(path))
}

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/stand_in/libqatzip.c");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_that_is_left_out_is_missing_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let Some(path) = libqatzip_or_skip(folder.path(), Some("qzCompress")).unwrap() else {
            return;
        };
        let library = std::fs::read(path).unwrap();
        // Names of exported functions stand between zeros in the file's string table.
        let has = |symbol: &str| {
            let name = format!("\0{symbol}\0");
            library.windows(name.len()).any(|at| at == name.as_bytes())
        };
        for symbol in LIBQATZIP_SYMBOLS {
            assert_eq!(has(symbol), symbol != "qzCompress", "{symbol}");
        }
        assert!(libqatzip_or_skip(folder.path(), Some("qzNonsense")).is_err());
    }
}
