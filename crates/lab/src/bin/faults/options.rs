//! The command line.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

const USAGE: &str = "usage: faults [--faults N] [--minutes N] [--seed N] [--engine qemu|live|both] [--versions V,V...] [--jobs N]
              [--experiment N] [--only TEXT]... [--short] [--keep-going]
              [--vamoose PROGRAM] [--vmm PROGRAM]

  --faults N         end after so many faults (200)
  --minutes N        end after so long
  --seed N           what chance decides from (drawn anew, and printed)
  --engine NAME      two QEMUs, two VMMs with the crate live, or each in turn (both)
  --versions V,V     of QEMU, such as 7.2,10.0 (all that are here)
  --jobs N           experiments at once (twice the processors)
  --experiment N     only this one, and tell all about it
  --only TEXT        only faults whose name holds this, such as `kill`; may be repeated
  --short            when everything is repaired, run nothing but the next migration: no old command again
  --keep-going       go on after a violation, and count them by kind
  --vamoose PROGRAM  break this one (the one beside this program)
  --vmm PROGRAM      and this one, live's example (the one in examples/ beside this program)";

/// What to do.
pub(crate) struct Options {
    pub(crate) faults: u64,
    pub(crate) time: Option<Duration>,
    pub(crate) seed: u64,
    pub(crate) engine: Engine,
    pub(crate) versions: Option<Vec<String>>,
    pub(crate) jobs: usize,
    pub(crate) experiment: Option<u64>,
    pub(crate) only: Vec<String>,
    pub(crate) short: bool,
    pub(crate) keep_going: bool,
    pub(crate) vamoose: PathBuf,
    pub(crate) vmm: PathBuf,
}

/// What is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    Qemu,
    Live,
    Both,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qemu => "qemu",
            Self::Live => "live",
            Self::Both => "both",
        })
    }
}

impl Options {
    /// From the arguments behind the program's name.
    pub(crate) fn from_arguments(arguments: impl Iterator<Item = String>) -> Result<Self> {
        let options = Self::parse(arguments)?;
        ensure!(
            options.engine == Engine::Live || options.vamoose.is_file(),
            "there is no {}: cargo build --release -p vamoose, with the same target folder",
            options.vamoose.display()
        );
        Ok(options)
    }

    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let this = std::env::current_exe().context("where is this program?")?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mut options = Self {
            faults: 200,
            time: None,
            seed: any_seed(),
            engine: Engine::Both,
            versions: None,
            jobs: 2 * processors,
            experiment: None,
            only: Vec::new(),
            short: false,
            keep_going: false,
            vamoose: this.with_file_name("vamoose"),
            vmm: this.with_file_name("examples").join("vmm"),
        };
        let mut faults = None;
        while let Some(name) = arguments.next() {
            let mut value = || {
                let value = arguments.next();
                value.with_context(|| format!("{name} needs a value\n\n{USAGE}"))
            };
            match name.as_str() {
                "--faults" => faults = Some(number(&name, &value()?)?),
                "--minutes" => {
                    options.time = Some(Duration::from_secs(60 * number(&name, &value()?)?));
                }
                "--seed" => options.seed = number(&name, &value()?)?,
                "--engine" => options.engine = engine(&value()?)?,
                "--versions" => {
                    options.versions = Some(value()?.split(',').map(str::to_owned).collect());
                }
                "--jobs" => options.jobs = usize::try_from(number(&name, &value()?)?)?,
                "--experiment" => options.experiment = Some(number(&name, &value()?)?),
                "--only" => options.only.push(value()?),
                "--short" => options.short = true,
                "--keep-going" => options.keep_going = true,
                "--vmm" => options.vmm = value()?.into(),
                "--vamoose" => options.vamoose = value()?.into(),
                _ => bail!("{name}?\n\n{USAGE}"),
            }
        }
        ensure!(options.jobs > 0, "--jobs 0 does nothing");
        // With a time and no number, the time alone ends it.
        let default = if options.time.is_some() {
            u64::MAX
        } else {
            options.faults
        };
        options.faults = faults.unwrap_or(default);
        Ok(options)
    }
}

/// Of few digits, as people have to type it.
fn any_seed() -> u64 {
    u64::from(crate::proxy::now().subsec_micros())
}

fn number(name: &str, text: &str) -> Result<u64> {
    text.parse()
        .with_context(|| format!("{name} {text} is not a number\n\n{USAGE}"))
}

fn engine(text: &str) -> Result<Engine> {
    match text {
        "qemu" => Ok(Engine::Qemu),
        "live" => Ok(Engine::Live),
        "both" => Ok(Engine::Both),
        _ => bail!("--engine {text}?\n\n{USAGE}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options> {
        Options::parse(words.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn a_time_alone_is_no_number_of_faults() {
        assert_eq!(parse(&[]).unwrap().faults, 200);
        let options = parse(&["--minutes", "3", "--seed", "5", "--engine", "qemu"]).unwrap();
        assert_eq!((options.faults, options.seed), (u64::MAX, 5));
        assert_eq!(options.engine, Engine::Qemu);
        assert_eq!(
            parse(&["--minutes", "3", "--faults", "9"]).unwrap().faults,
            9
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for words in [
            &["--nonsense"][..],
            &["--seed"],
            &["--seed", "x"],
            &["--jobs", "0"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
