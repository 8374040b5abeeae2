//! A hundred guests at once: migrations that share eight modelled DSAs, through the driver's own code, in virtual time.
//!
//! ```text
//!  cargo run --release -p idxd-model --bin hundred -- [--quick] [DIRECTORY]
//! ```
//! Writes `hundred-guests.md` (tables) and `hundred-guests.svg` to DIRECTORY, `docs/results` by default; with `--quick` it
//! prints the tables of a run a hundred times shorter, and writes nothing. It takes a minute or two, and gives the
//! same figures each time and everywhere: the only clocks are the guests' own. Every figure is one of the
//! [model](host), with these [parameters]. `docs/hundred-guests.md` explains them.

mod crash;
mod guest;
mod host;
mod parameters;
mod plot;
mod report;
mod run;

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    let mut quick = false;
    let mut directory = PathBuf::from("docs/results");
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => quick = true,
            crash::MEMBER => return crash::be_a_member(arguments),
            option if option.starts_with('-') => bail!("usage: hundred [--quick] [DIRECTORY]"),
            path => directory = path.into(),
        }
    }
    let report = report::Report::of(quick)?;
    print!("{}", report.markdown());
    if !quick {
        let write = |name: &str, text: String| {
            let path = directory.join(name);
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
        };
        write("hundred-guests.md", report.markdown())?;
        write("hundred-guests.svg", report.svg())?;
    }
    Ok(())
}
