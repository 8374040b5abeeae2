//! Runs `vamoose-bench` as a user would, with real migrations of small guests.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use lab::ram::PAGE;
use lab::real::Real;
use lab::{qemu, skipped};
use serde_json::Value;
use tempfile::TempDir;

/// Over what the kernel can, so that only what is measured needs root.
const SCENARIO: &str = r#"
about = "Small guests"
guests = ["silesia", "zero"]
links = ["open"]
ram = "32M"
rounds = 2
contenders = ["qemu none", "migrate zstd", "migrate auto"]
"#;

#[test]
fn every_cell_is_measured_once_per_round() -> Result<()> {
    let Some(bench) = Bench::new()? else {
        return Ok(());
    };
    bench.run(&["--contender", "qemu none", "--contender", "migrate zstd"])?;
    let first = bench.results()?;
    ensure!(first.len() == 2 * 2 * 2, "{first:#?}");
    for record in &first {
        ensure!(record["outcome"] == "equal", "{record}");
        let figures = &record["figures"];
        ensure!(figures["seconds"].as_f64() > Some(0.0), "{record}");
        ensure!(figures["wire-bytes"].as_u64() > Some(0), "{record}");
    }
    // The same again, and one more.
    bench.run(&[])?;
    let all = bench.results()?;
    ensure!(all.len() == 3 * 2 * 2, "{all:#?}");
    ensure!(all[..first.len()] == first[..], "results were made anew");
    let added = all[first.len()..].iter();
    let mut contenders = added.map(|record| record["cell"]["contender"].clone());
    ensure!(contenders.all(|it| it == "migrate auto"), "{all:#?}");
    Ok(())
}

#[test]
fn missing_requirements_are_reported_and_the_rest_is_measured() -> Result<()> {
    let Some(bench) = Bench::new()? else {
        return Ok(());
    };
    fs::write(
        bench.scenario(),
        SCENARIO.replace(r#""open""#, r#""open", "1G""#),
    )?;
    let only = bench.folder.path().join("bin");
    all_but(&["ip", "tc"], &only)?;
    let mut command = bench.command(&["--contender", "qemu none", "--rounds", "1"]);
    let output = command.env("PATH", &only).output()?;
    let said = said(&output);
    ensure!(output.status.success(), "{said}");
    ensure!(said.contains("not here: links of given rates"), "{said}");
    ensure!(said.contains("iproute2"), "{said}");
    ensure!(bench.results()?.len() == 2, "{said}");
    Ok(())
}

/// Takes a minute where it has not run before: the memory is kept.
#[test]
fn the_memory_of_a_real_guest_is_written() -> Result<()> {
    if qemu::newest_or_skip()?.is_none() {
        return Ok(());
    }
    if !Real::is_there() {
        return skipped("no programs for guests: scripts/setup guest workloads");
    }
    let folder = TempDir::new()?;
    let file = folder.path().join("base.mem");
    let mut command = Command::new(env!("CARGO_BIN_EXE_vamoose-bench"));
    command.args(["dump", "base", "--ram", "512M"]).arg(&file);
    let output = command.output()?;
    ensure!(output.status.success(), "{}", said(&output));
    let memory = fs::read(&file)?;
    ensure!(memory.len() == 512 << 20, "{} bytes", memory.len());
    let used = memory.chunks(PAGE).filter(|page| **page != [0; PAGE]);
    let used = used.count() * 100 / (memory.len() / PAGE);
    ensure!(used > 25, "only {used} % of the pages are not zero");
    Ok(())
}

struct Bench {
    folder: TempDir,
}

impl Bench {
    /// Skips where there is no QEMU, or no `vamoose` to measure.
    fn new() -> Result<Option<Self>> {
        if qemu::newest_or_skip()?.is_none() {
            return Ok(None);
        }
        let program = Path::new(env!("CARGO_BIN_EXE_vamoose-bench"));
        if !program.with_file_name("vamoose").is_file() {
            skipped("there is no vamoose beside vamoose-bench: cargo build -p vamoose")?;
            return Ok(None);
        }
        let bench = Self {
            folder: TempDir::new()?,
        };
        fs::write(bench.scenario(), SCENARIO)?;
        Ok(Some(bench))
    }

    fn scenario(&self) -> PathBuf {
        self.folder.path().join("small.toml")
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vamoose-bench"));
        command.arg(self.scenario()).arg("--out").arg(self.out());
        command.args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Result<()> {
        let output = self.command(arguments).output()?;
        ensure!(output.status.success(), "{}", said(&output));
        Ok(())
    }

    fn results(&self) -> Result<Vec<Value>> {
        let lines = fs::read_to_string(self.out().join("results.jsonl"))?;
        let parse = |line| serde_json::from_str(line).context("a line of results");
        lines.lines().map(parse).collect()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder with every program of this host but some.
fn all_but(names: &[&str], folder: &Path) -> Result<()> {
    fs::create_dir(folder)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    for place in std::env::split_paths(&path) {
        for entry in fs::read_dir(place).into_iter().flatten().flatten() {
            let link = folder.join(entry.file_name());
            let is_left_out = names.iter().any(|name| entry.file_name() == *name);
            // The first of a name counts.
            if !is_left_out && !link.is_symlink() {
                symlink(entry.path(), link)?;
            }
        }
    }
    Ok(())
}
