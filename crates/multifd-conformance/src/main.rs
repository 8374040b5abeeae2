//! The program `multifd-conformance`: see the README.

use std::{ffi::OsString, fs, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use multifd_conformance::{Case, Driver, Exclusions, Verdict, fits, run, table};

/// Runs the conformance cases of QEMU's multifd migration format against an implementation.
#[derive(Parser)]
struct Options {
    /// The folder of the cases.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/cases"))]
    cases: PathBuf,
    /// The implementation's name, in the table and in the file of exclusions.
    #[arg(long, default_value = "driver")]
    name: String,
    /// A file of cases that implementations need not pass, and why.
    #[arg(long)]
    exclusions: Option<PathBuf>,
    /// Only these cases: a name, or its beginning and `*`.
    #[arg(long, default_value = "*")]
    only: String,
    /// How many cases to run at a time.
    #[arg(long, default_value_t = 8)]
    jobs: usize,
    /// The driver, and its arguments.
    #[arg(required = true, trailing_var_arg = true)]
    driver: Vec<OsString>,
}

fn main() -> ExitCode {
    match run_all(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("multifd-conformance: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_all(options: Options) -> Result<()> {
    let mut all = Exclusions::new();
    if let Some(path) = options.exclusions {
        let text = fs::read_to_string(&path);
        let text = text.with_context(|| format!("reading {}", path.display()))?;
        all = serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))?;
    }
    let mut cases = Case::load_all(&options.cases)?;
    cases.retain(|case| fits(&options.only, &case.name));
    let mut exclusions = all.remove(&options.name).unwrap_or_default();
    for exclusion in &mut exclusions {
        exclusion
            .cases
            .retain(|it| cases.iter().any(|case| fits(it, &case.name)));
    }
    let outcomes = run(
        &Driver::of(options.driver)?,
        &cases,
        &exclusions,
        options.jobs,
    )?;
    let failed = |verdict: &Verdict| matches!(verdict, Verdict::Failed(_));
    let failures = outcomes
        .iter()
        .filter(|outcome| failed(&outcome.verdict))
        .count();
    print!("{}", table(&[(options.name, outcomes)]));
    ensure!(failures == 0, "{failures} of {} cases failed", cases.len());
    Ok(())
}
