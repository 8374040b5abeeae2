//! Does a work queue do what this crate expects of it?
//!
//! ```text
//!   a Portal or a model's queue ──> run ──> a Finding for each Check
//! ```
//! The checks ask questions that harm neither the device nor others who use it: operations of a few pages, mistakes
//! that have a status of their own, pages that are not there. Each reports what it found, and the section of the
//! specification that promises the answer. An open check asks what no document promises: against hardware it shows
//! whether the model's assumption is right. Against a [model](crate::Model) the checks test themselves and the model;
//! against hardware, they test whether the model is right about it. The list follows the tests of the accel-config
//! project (`dsa_test`, `iaa_test`).
//!
//! Sections are those of Intel's Data Streaming Accelerator Architecture Specification, revision 3.0 ("DSA 3.0"), and
//! In-Memory Analytics Accelerator Architecture Specification, revision 2.1 ("IAA 2.1"). A device may check a
//! descriptor in any order (DSA 3.0, 5.4; IAA 2.1, 4.1): no check submits one with two mistakes. What a device only
//! may do is not demanded.
//!
//! What a device does wrong is a finding and never a panic; no wait is without a deadline; memory that a device may
//! still write to is kept until the queue is closed.
//!
//! ```
//! use idxd_model::{Config, Model, PortalKind, selftest};
//!
//! let model = Model::deterministic(&Config::iaa());
//! let findings = selftest::run(model.queue(0, 0, PortalKind::Enqcmd), &selftest::Options::default());
//! assert!(findings.iter().all(|finding| !finding.is_failure()));
//! ```

mod batch;
mod dsa;
mod faults;
mod iaa;
mod malformed;
mod queue;
mod rig;

use std::{fmt, sync::Arc, time::Duration};

use idxd::{Kind, RecordImage, Submit};
use rig::Rig;

/// How the checks are done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long a descriptor may take.
    pub timeout: Duration,
    /// Also checks that leave a trace in the device's register of errors, which others may watch: descriptors whose
    /// records cannot be written.
    pub hazards: bool,
}

impl Default for Options {
    /// 200 ms, and nothing that others could see.
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(200),
            hazards: false,
        }
    }
}

/// One question to a work queue.
#[derive(Clone, Copy)]
pub struct Check {
    /// Its number, which stays.
    pub number: u32,
    /// Its name, which stays.
    pub name: &'static str,
    /// What is expected.
    pub what: &'static str,
    /// Where the specification promises it, as "DSA 3.0, 8.3.7"; `None` where nothing does.
    pub section: Option<&'static str>,
    /// The kind of device that it is for; `None` for both.
    pub kind: Option<Kind>,
    /// The expected answer is not promised: another one is no failure.
    pub is_open: bool,
    /// It leaves a trace in the device's register of errors, see [`Options::hazards`].
    pub is_hazard: bool,
    /// Operations that it needs.
    needs: &'static [u8],
    run: Run,
}

type Run = fn(&Rig<'_>) -> Result<Verdict, Ended>;

/// A verdict that ends a check before its end.
type Ended = Verdict;

/// What came of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All as expected.
    Holds,
    /// Something else.
    Differs {
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// Nothing was expected, and this was found.
    Found(String),
    /// It was not done.
    Skipped {
        /// Why.
        why: String,
    },
}

/// A check and what came of it.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The check.
    pub check: &'static Check,
    /// What came of it.
    pub verdict: Verdict,
    /// The last record that it read, on which a difference rests; `None` if it read none.
    pub record: Option<RecordImage>,
}

impl Finding {
    /// Whether the queue does something else than it must.
    pub fn is_failure(&self) -> bool {
        matches!(self.verdict, Verdict::Differs { .. }) && !self.check.is_open
    }
}

/// All checks, in the order in which they are done.
pub fn checks() -> impl Iterator<Item = &'static Check> {
    [
        queue::CHECKS,
        dsa::CHECKS,
        malformed::CHECKS,
        faults::CHECKS,
        batch::CHECKS,
        iaa::CHECKS,
        // What may cost a queue its life.
        queue::LAST,
    ]
    .into_iter()
    .flatten()
}

/// Does the checks for this kind of device with an open work queue, and closes it.
///
/// A queue that no longer answers at all is asked nothing more: the remaining checks are skipped.
pub fn run(submit: Arc<dyn Submit>, options: &Options) -> Vec<Finding> {
    let kind = submit.limits().kind;
    let rig = Rig::new(submit, options);
    checks()
        .filter(|check| check.kind.is_none_or(|wanted| wanted == kind))
        .map(|check| Finding {
            check,
            verdict: check.verdict(&rig),
            record: rig.last_record(),
        })
        .collect()
}

impl Check {
    const fn new(number: u32, name: &'static str, what: &'static str, run: Run) -> Self {
        Self {
            number,
            name,
            what,
            section: None,
            kind: None,
            is_open: false,
            is_hazard: false,
            needs: &[],
            run,
        }
    }

    const fn of(mut self, kind: Kind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Where the specification promises the answer.
    const fn by(mut self, section: &'static str) -> Self {
        self.section = Some(section);
        self
    }

    const fn open(mut self) -> Self {
        self.is_open = true;
        self
    }

    const fn hazard(mut self) -> Self {
        self.is_hazard = true;
        self
    }

    const fn needs(mut self, opcodes: &'static [u8]) -> Self {
        self.needs = opcodes;
        self
    }

    fn verdict(&self, rig: &Rig<'_>) -> Verdict {
        rig.forget_records();
        if self.is_hazard && !rig.options().hazards {
            return skipped("it would leave a trace in the device's register of errors");
        }
        let operations = &rig.limits().operations;
        if let Some(missing) = self.needs.iter().find(|opcode| !operations.has(**opcode)) {
            return skipped(format!("the queue does not take opcode {missing:#04x}"));
        }
        if !rig.is_alive() {
            return skipped("the queue does not answer, not even to a NOOP");
        }
        (self.run)(rig).unwrap_or_else(|ended| ended)
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.number, self.name)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Holds => f.write_str("holds"),
            Self::Differs { expected, found } => {
                write!(f, "differs: expected {expected}, found {found}")
            }
            Self::Found(what) => write!(f, "found: {what}"),
            Self::Skipped { why } => write!(f, "skipped: {why}"),
        }
    }
}

/// Goes on if what was found is what was expected.
fn same(expected: impl Into<String>, found: impl Into<String>) -> Result<(), Ended> {
    let (expected, found) = (expected.into(), found.into());
    match expected == found {
        true => Ok(()),
        false => Err(Verdict::Differs { expected, found }),
    }
}

/// Goes on if `is` so.
fn is_so(is: bool, expected: impl Into<String>, otherwise: impl Into<String>) -> Result<(), Ended> {
    match is {
        true => Ok(()),
        false => Err(Verdict::Differs {
            expected: expected.into(),
            found: otherwise.into(),
        }),
    }
}

fn skipped(why: impl Into<String>) -> Verdict {
    Verdict::Skipped { why: why.into() }
}
