//! A folder of results: `results.jsonl`, to which each migration is added as soon as it is known, and `machine.json`.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::record::{Cell, Machine, Outcome, Record};

/// A folder to which results are added.
pub(crate) struct Results {
    folder: PathBuf,
    file: File,
    /// For each cell, the number of rounds and how many of them were cancelled.
    made: HashMap<Cell, (u32, u32)>,
}

const LINES: &str = "results.jsonl";
const MACHINE: &str = "machine.json";

impl Results {
    /// Opens a new folder, or one of an earlier run on the same machine.
    pub(crate) fn open(folder: &Path, machine: &Machine) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let path = folder.join(MACHINE);
        if path.exists() {
            ensure!(
                read_machine(folder)?.is_same(machine),
                "{} has results of another machine, QEMU or Vamoose, which cannot be compared: choose another --out",
                folder.display()
            );
        } else {
            let text = format!("{:#}\n", serde_json::to_value(machine)?);
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        }
        let path = folder.join(LINES);
        let open = || {
            let mut file = File::options()
                .read(true)
                .append(true)
                .create(true)
                .open(&path)?;
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            // Removes a line that an interruption left incomplete, so that the next line is valid.
            file.set_len(whole(&text) as u64)?;
            io::Result::Ok(file)
        };
        let file = open().with_context(|| format!("opening {}", path.display()))?;
        let mut results = Self {
            folder: folder.to_owned(),
            file,
            made: HashMap::new(),
        };
        for record in read(folder)? {
            results.count(&record);
        }
        Ok(results)
    }

    /// The folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether there is any result.
    pub(crate) fn is_any(&self) -> bool {
        !self.made.is_empty()
    }

    /// Number of rounds of a cell.
    pub(crate) fn rounds(&self, cell: &Cell) -> u32 {
        self.made.get(cell).map_or(0, |(rounds, _)| *rounds)
    }

    /// Number of cancelled rounds of a cell.
    pub(crate) fn cancelled(&self, cell: &Cell) -> u32 {
        self.made.get(cell).map_or(0, |(_, cancelled)| *cancelled)
    }

    /// Adds a result.
    pub(crate) fn add(&mut self, record: &Record) -> Result<()> {
        let line = serde_json::to_string(record)? + "\n";
        self.file
            .write_all(line.as_bytes())
            .with_context(|| format!("writing {LINES} in {}", self.folder.display()))?;
        self.count(record);
        Ok(())
    }

    fn count(&mut self, record: &Record) {
        let (rounds, cancelled) = self.made.entry(record.cell.clone()).or_default();
        *rounds += 1;
        *cancelled += u32::from(record.outcome == Outcome::Cancelled);
    }
}

/// All results in a folder, without a last line that an interruption left incomplete.
pub(crate) fn read(folder: &Path) -> Result<Vec<Record>> {
    let text = load(folder, LINES)?;
    let lines = text[..whole(&text)].lines().zip(1..);
    let parse = |(line, number)| {
        serde_json::from_str(line).with_context(|| {
            format!(
                "{LINES} in {}: line {number} is not a result",
                folder.display()
            )
        })
    };
    lines.map(parse).collect()
}

/// The machine of a folder of results.
pub(crate) fn read_machine(folder: &Path) -> Result<Machine> {
    let text = load(folder, MACHINE)?;
    serde_json::from_str(&text).with_context(|| {
        format!(
            "{MACHINE} in {} was not written by this program",
            folder.display()
        )
    })
}

fn load(folder: &Path, name: &str) -> Result<String> {
    let path = folder.join(name);
    fs::read_to_string(&path).with_context(|| {
        let path = path.display();
        format!("cannot read {path}: is this the folder of a run?")
    })
}

/// Length of the complete lines.
fn whole(text: &str) -> usize {
    text.rfind('\n').map_or(0, |end| end + 1)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::record::Figures;
    use crate::scenario::Scenario;

    fn machine() -> Machine {
        Machine {
            processor: "A".to_owned(),
            processors: 2,
            memory: 1 << 30,
            kernel: "6.1".to_owned(),
            qemu: "11.1.3".to_owned(),
            vamoose: "vamoose 0.1.0".to_owned(),
            corpus: "files".to_owned(),
            command: "vamoose bench".to_owned(),
            date: "2026-11-25".to_owned(),
            load: "0.1".to_owned(),
        }
    }

    fn record(outcome: Outcome, round: u32) -> Record {
        let scenario = "about = ''\nguests = ['zero']\nlinks = ['open']\nram = '1G'\nrounds = 1\ncontenders = ['qemu none']";
        let cells = Scenario::parse(scenario)
            .unwrap()
            .cells("test", 1 << 30, 20);
        Record::new(&cells[0], round, outcome, Figures::default())
    }

    #[test]
    fn an_incomplete_last_line_is_ignored() {
        let dir = TempDir::new().unwrap();
        let mut results = Results::open(dir.path(), &machine()).unwrap();
        let first = record(Outcome::Equal, 1);
        results.add(&first).unwrap();
        results.add(&record(Outcome::Cancelled, 2)).unwrap();
        results.file.write_all(b"{\"cell\":").unwrap();
        assert_eq!(read(dir.path()).unwrap().len(), 2);
        let again = Results::open(dir.path(), &machine()).unwrap();
        assert_eq!(again.rounds(&first.cell), 2);
        assert_eq!(again.cancelled(&first.cell), 1);
        let mut results = again;
        let last = record(Outcome::Equal, 3);
        results.add(&last).unwrap();
        let all = read(dir.path()).unwrap();
        assert_eq!((&all[0], &all[2]), (&first, &last));
    }

    #[test]
    fn results_of_two_machines_are_not_mixed() {
        let dir = TempDir::new().unwrap();
        drop(Results::open(dir.path(), &machine()).unwrap());
        let other = Machine {
            qemu: "10.0.2".to_owned(),
            ..machine()
        };
        let error = Results::open(dir.path(), &other).err().unwrap();
        assert!(error.to_string().contains("another machine"), "{error}");
        // When and how they were made may differ.
        let later = Machine {
            date: "2026-11-26".to_owned(),
            command: "vamoose bench zero".to_owned(),
            ..machine()
        };
        assert!(Results::open(dir.path(), &later).is_ok());
    }
}
