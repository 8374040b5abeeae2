//! Describes this machine for the report.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::measure::Host;
use crate::record::Machine;

impl Machine {
    /// Describes this machine.
    pub(crate) fn look(host: &Host) -> Result<Self> {
        let read = |path: &str| fs::read_to_string(path).with_context(|| format!("reading {path}"));
        let processors = read("/proc/cpuinfo")?;
        let model = processors
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let memory = read("/proc/meminfo")?;
        let memory = memory
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"));
        let memory = memory.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let load = read("/proc/loadavg")?;
        let averages: Vec<_> = load.split(' ').take(3).collect();
        let date = lab::run(Command::new("date").arg("--iso-8601"))?;
        Ok(Self {
            processor: model
                .map_or("unknown processor", |(_, model)| model)
                .to_owned(),
            processors: std::thread::available_parallelism()?.get(),
            memory: memory.context("no MemTotal in /proc/meminfo")? << 10,
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            qemu: host.qemu.version.to_string(),
            vamoose: lab::run(Command::new(&host.vamoose).arg("--version"))?
                .trim()
                .to_owned(),
            corpus: host.corpus.name.clone(),
            command: command(),
            date: date.trim().to_owned(),
            load: averages.join(", "),
        })
    }

    /// Whether results of both machines can be compared: command, date and load may differ.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let same_run = Self {
            command: self.command.clone(),
            date: self.date.clone(),
            load: self.load.clone(),
            ..other.clone()
        };
        *self == same_run
    }
}

/// The command as a user types it, without the program's path.
fn command() -> String {
    let mut arguments = std::env::args();
    let program = arguments.next().unwrap_or_default();
    let name = Path::new(&program)
        .file_name()
        .and_then(|name| name.to_str());
    let name = name.unwrap_or("vamoose-bench").replace('-', " ");
    let words = [name].into_iter().chain(arguments);
    words.collect::<Vec<_>>().join(" ")
}
