//! The program `multifd-conformance`: see the README.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    io::{stdin, stdout},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, Subcommand};
use multifd_conformance::{
    Bytes, Case, Driver, Exclusions, Expect, Reply, Request, Role, Task, Verdict, Work, cases,
    decode, fits, run, table,
};

/// Checks implementations of QEMU's multifd migration format.
#[derive(Parser)]
struct Options {
    /// The folder of the cases.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/cases"))]
    cases: PathBuf,
    #[command(subcommand)]
    task: Todo,
}

#[derive(Subcommand)]
enum Todo {
    /// Run the cases against a driver.
    Run {
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
    },
    /// Write all cases that are made from descriptions, and remove those that are no more.
    Generate,
    /// Write what an encoder sends for a case as a case for decoders.
    Record {
        /// A case of the kind `encode`.
        case: String,
        /// What is recorded: the name of the new case.
        name: String,
        /// The driver, and its arguments.
        #[arg(required = true, trailing_var_arg = true)]
        driver: Vec<OsString>,
    },
    /// Be a driver of the suite's own decoder.
    Decode,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.task {
        Todo::Run { .. } | Todo::Record { .. } => with_driver(options),
        Todo::Generate => generate(&options.cases),
        Todo::Decode => own_decoder(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("multifd-conformance: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn with_driver(options: Options) -> Result<()> {
    let mut cases = Case::load_all(&options.cases)?;
    let driver = |words: Vec<OsString>| -> Result<Driver> {
        let mut words = words.into_iter();
        let program = words.next().context("no driver")?.into();
        Ok(Driver {
            program,
            arguments: words.collect(),
        })
    };
    match options.task {
        Todo::Run {
            name,
            exclusions,
            only,
            jobs,
            driver: words,
        } => {
            let mut all = Exclusions::new();
            if let Some(path) = exclusions {
                let text = fs::read_to_string(&path);
                let text = text.with_context(|| format!("reading {}", path.display()))?;
                all = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
            }
            let mut exclusions = all.remove(&name).unwrap_or_default();
            cases.retain(|case| fits(&only, &case.name));
            for exclusion in &mut exclusions {
                exclusion
                    .cases
                    .retain(|it| cases.iter().any(|case| fits(it, &case.name)));
            }
            let outcomes = run(&driver(words)?, &cases, &exclusions, jobs)?;
            let failed = |verdict: &Verdict| matches!(verdict, Verdict::Failed(_));
            let failures = outcomes
                .iter()
                .filter(|outcome| failed(&outcome.verdict))
                .count();
            print!("{}", table(&[(name, outcomes)]));
            ensure!(failures == 0, "{failures} of {} cases failed", cases.len());
        }
        Todo::Record {
            case,
            name,
            driver: words,
        } => {
            let found = cases.into_iter().find(|it| it.name == case);
            let mut case = found.with_context(|| format!("no case {case}"))?;
            let reply = driver(words)?.ask(&Request::of(&case)?, &case.blocks)?;
            let Reply::Encoded(streams) = reply else {
                bail!("{reply:?}");
            };
            let memory = decode(Role::Decoder, &case.method, &case.blocks, &streams)?;
            let expect = Expect::Accepted(case.pages(&memory));
            let channels = streams
                .into_iter()
                .map(|stream| vec![Bytes(stream)])
                .collect();
            case.rule = format!("What {name} has sent is understood.");
            case.name = format!("{}/{name}", cases::RECORDED);
            case.task = Task::Decode { channels, expect };
            case.save(&options.cases)?;
        }
        Todo::Generate | Todo::Decode => {}
    }
    Ok(())
}

fn generate(folder: &std::path::Path) -> Result<()> {
    let cases = cases::all();
    let names: BTreeSet<_> = cases.iter().map(|case| &case.name).collect();
    ensure!(names.len() == cases.len(), "two cases have the same name");
    let there = if folder.exists() {
        Case::load_all(folder)?
    } else {
        Vec::new()
    };
    for case in there {
        if case.kind() != cases::RECORDED && !names.contains(&case.name) {
            fs::remove_file(folder.join(format!("{}.json", case.name)))?;
        }
    }
    cases.iter().try_for_each(|case| case.save(folder))
}

fn own_decoder() -> Result<()> {
    let request = Request::read(stdin().lock())?;
    let reply = match &request.work {
        Work::Decode(streams) => {
            match decode(Role::Decoder, &request.method, &request.blocks, streams) {
                Ok(memory) => Reply::Accepted(memory),
                Err(why) => Reply::Refused(format!("{why:#}")),
            }
        }
        Work::Encode { .. } => Reply::Unsupported("the suite has no encoder".to_owned()),
    };
    reply.write(stdout().lock())
}
