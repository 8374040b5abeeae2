//! All cases against one implementation.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt::Write as _,
    io::Read as _,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde::Deserialize;

use crate::{Block, Case, Expect, Memory, PAGE, Reply, Request, Role, Task, decode};

/// How long a driver may take for a case.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A program around an implementation. It runs once for each case.
#[derive(Clone, Debug)]
pub struct Driver {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// A case's outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The case's name.
    pub case: String,
    /// What came of it.
    pub verdict: Verdict,
}

/// What came of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The implementation does what the case expects.
    Passed,
    /// It does something else.
    Failed(String),
    /// It was not asked, or cannot do what the case needs.
    Excluded(String),
}

/// Cases that an implementation need not pass. Those of all implementations are a map by name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exclusion {
    /// Names, or `KIND/*`.
    pub cases: Vec<String>,
    /// Why.
    pub reason: String,
}

/// By implementation.
pub type Exclusions = BTreeMap<String, Vec<Exclusion>>;

/// Whether a pattern, which may end with `*`, fits a case.
pub fn fits(pattern: &str, case: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => case.starts_with(start),
        None => case == pattern,
    }
}

/// Runs all cases, `jobs` at a time.
///
/// # Errors
/// When an exclusion is about no case.
pub fn run(
    driver: &Driver,
    cases: &[Case],
    exclusions: &[Exclusion],
    jobs: usize,
) -> Result<Vec<Outcome>> {
    for pattern in exclusions.iter().flat_map(|exclusion| &exclusion.cases) {
        let known = cases.iter().any(|case| fits(pattern, &case.name));
        ensure!(known, "the exclusion '{pattern}' is about no case");
    }
    let verdict = |case: &Case| {
        let excludes = |exclusion: &&Exclusion| {
            exclusion
                .cases
                .iter()
                .any(|pattern| fits(pattern, &case.name))
        };
        match exclusions.iter().find(excludes) {
            Some(exclusion) => Verdict::Excluded(exclusion.reason.clone()),
            None => driver
                .judge(case)
                .unwrap_or_else(|why| Verdict::Failed(format!("{why:#}"))),
        }
    };
    let next = AtomicUsize::new(0);
    let mut outcomes = thread::scope(|scope| {
        let work = || {
            let cases = || cases.get(next.fetch_add(1, Ordering::Relaxed));
            let outcome = |case: &Case| (case.name.clone(), verdict(case));
            std::iter::from_fn(|| cases().map(outcome)).collect::<Vec<_>>()
        };
        let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        let all = threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_default());
        all.map(|(case, verdict)| Outcome { case, verdict })
            .collect::<Vec<_>>()
    });
    ensure!(
        outcomes.len() == cases.len(),
        "a thread of the runner has failed"
    );
    outcomes.sort_by(|a, b| a.case.cmp(&b.case));
    Ok(outcomes)
}

impl Driver {
    /// Of a command line.
    ///
    /// # Errors
    /// When it is empty.
    pub fn of(words: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let mut words = words.into_iter();
        let program = words.next().context("no driver")?.into();
        Ok(Self {
            program,
            arguments: words.collect(),
        })
    }

    /// Asks for a case, and compares.
    fn judge(&self, case: &Case) -> Result<Verdict> {
        let reply = self.ask(&Request::of(case)?, &case.blocks)?;
        match (&case.task, reply) {
            (_, Reply::Unsupported(why)) => return Ok(Verdict::Excluded(why)),
            (
                Task::Decode {
                    expect: Expect::Refused,
                    ..
                },
                Reply::Refused(_),
            ) => {}
            (
                Task::Decode {
                    expect: Expect::Refused,
                    ..
                },
                _,
            ) => bail!("it accepts the streams"),
            (
                Task::Decode {
                    expect: Expect::Accepted(pages),
                    ..
                },
                Reply::Accepted(memory),
            ) => {
                compare(&case.blocks, &case.memory(pages)?, &memory)?;
            }
            (Task::Encode { rounds, .. }, Reply::Encoded(streams)) => {
                let memory = decode(Role::Encoder, &case.method, &case.blocks, &streams)?;
                let pages = rounds.last().map_or(&[][..], |pages| pages);
                compare(&case.blocks, &case.memory(pages)?, &memory)?;
            }
            (_, Reply::Refused(why)) => bail!("it refuses: {why}"),
            (_, Reply::Accepted(_) | Reply::Encoded(_)) => bail!("it answers another question"),
        }
        Ok(Verdict::Passed)
    }

    /// Runs the program for one request about `blocks`.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn ask(&self, request: &Request, blocks: &[Block]) -> Result<Reply> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let started = command.spawn();
        let mut child = started.with_context(|| format!("starting {}", self.program.display()))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (stdin, mut stdout) = stdin.zip(stdout).context("no pipes")?;
        let (said, hear) = mpsc::channel();
        thread::scope(|scope| {
            // A driver may answer before it has read everything, or end.
            scope.spawn(|| request.write(stdin));
            scope.spawn(move || {
                let mut bytes = Vec::new();
                let _ = said.send(stdout.read_to_end(&mut bytes).map(|_| bytes));
            });
            let heard = hear.recv_timeout(TIMEOUT);
            if heard.is_err() {
                child.kill()?;
            }
            let status = child.wait()?;
            let bytes = heard.map_err(|_| anyhow!("no answer within {TIMEOUT:?}"))??;
            ensure!(
                !bytes.is_empty(),
                "no answer; the driver ended with {status}"
            );
            Reply::read(&*bytes, blocks)
        })
    }
}

fn compare(blocks: &[Block], expected: &Memory, found: &Memory) -> Result<()> {
    for (block, (expected, found)) in blocks.iter().zip(expected.iter().zip(found)) {
        let pages = expected.chunks(PAGE).zip(found.chunks(PAGE));
        let differ = pages
            .enumerate()
            .filter(|(_, (expected, found))| expected != found);
        let differ: Vec<_> = differ.map(|(page, _)| page).collect();
        ensure!(
            differ.is_empty(),
            "pages {differ:?} of {} differ",
            block.name
        );
    }
    Ok(())
}

/// Outcomes of several implementations as Markdown: counts by kind, failures, and exclusions with their reasons.
pub fn table(results: &[(String, Vec<Outcome>)]) -> String {
    let mut kinds: BTreeMap<&str, Vec<[usize; 3]>> = BTreeMap::new();
    let (mut failures, mut reasons) = (String::new(), BTreeMap::<_, Vec<_>>::new());
    for (index, (name, outcomes)) in results.iter().enumerate() {
        for Outcome { case, verdict } in outcomes {
            let column = match verdict {
                Verdict::Passed => 0,
                Verdict::Failed(why) => {
                    let _ = writeln!(failures, "- {name}: `{case}`: {why}");
                    1
                }
                Verdict::Excluded(why) => {
                    reasons
                        .entry((name, why))
                        .or_default()
                        .push(format!("`{case}`"));
                    2
                }
            };
            for kind in [case.split('/').next().unwrap_or_default(), "**all**"] {
                let counts = kinds
                    .entry(kind)
                    .or_insert_with(|| vec![[0; 3]; results.len()]);
                counts[index][column] += 1;
            }
        }
    }
    let names: Vec<_> = results.iter().map(|(name, _)| name.as_str()).collect();
    let mut text = format!(
        "| kind | {} |\n|---|{}\n",
        names.join(" | "),
        "---:|".repeat(names.len())
    );
    let (all, kinds): (Vec<_>, Vec<_>) = kinds.iter().partition(|(kind, _)| kind.starts_with('*'));
    for (kind, counts) in kinds.iter().chain(&all) {
        let _ = write!(text, "| {kind} |");
        for [passed, failed, excluded] in *counts {
            let _ = write!(text, " {passed} / {failed} / {excluded} |");
        }
        text.push('\n');
    }
    if !failures.is_empty() {
        let _ = write!(text, "\nFailed:\n\n{failures}");
    }
    if !reasons.is_empty() {
        text.push_str("\nExcluded:\n\n");
    }
    for ((name, why), cases) in reasons {
        let _ = writeln!(text, "- {name}: {why}: {}", cases.join(", "));
    }
    text
}
