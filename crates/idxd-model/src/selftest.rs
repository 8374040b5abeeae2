//! Conformance checks of what the offloads rely on.
//!
//! ```text
//!   a Portal or a model's queue ──> run ──> a Finding for each Check
//! ```
//! The checks submit through a [`Queue`](idxd::Queue) what the offloads submit, and examine the answers that those act on. They
//! harm neither the device nor its other users: they use a few pages, and pages that are not mapped. Each check names the
//! section of the specification that promises the answer. An open check has no section: against hardware it shows whether an
//! assumption is right. Against a [model](crate::Model) the checks test themselves and the model.
//!
//! Sections are those of Intel's Data Streaming Accelerator Architecture Specification, revision 3.0 ("DSA 3.0"), and
//! In-Memory Analytics Accelerator Architecture Specification, revision 2.1 ("IAA 2.1"). The checks do
//! not require what a device may do but need not.
//!
//! A device that does something wrong is a finding and never a panic; every wait has a deadline; memory that a device may
//! still write to is kept until the queue is closed.
//!
//! ```
//! use std::time::Duration;
//!
//! use idxd_model::{Config, Model, PortalKind, selftest};
//!
//! let model = Model::deterministic(&Config::iaa());
//! let findings = selftest::run(model.queue(0, 0, PortalKind::Enqcmd), Duration::from_millis(200));
//! assert!(findings.iter().all(|finding| !finding.is_failure()));
//! ```

mod dsa;
mod iaa;
mod rig;

use std::{fmt, sync::Arc, time::Duration};

use idxd::{Descriptor, Kind, RecordImage, Submit, opcode};
use rig::Rig;

/// One question to a work queue.
#[derive(Clone, Copy)]
pub struct Check {
    /// Its name, which stays.
    pub name: &'static str,
    /// What is expected.
    pub what: &'static str,
    /// Where the specification promises it, as "DSA 3.0, 8.3.7". `None` for an open check, for which another answer is no
    /// failure.
    pub section: Option<&'static str>,
    /// Operations that it needs.
    needs: &'static [u8],
    run: fn(&Rig) -> Result<(), Verdict>,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The answer is the expected one.
    Holds,
    /// The answer is another one.
    Differs {
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// It was not run, for this reason.
    Skipped(String),
}

/// A check and its result.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The check.
    pub check: &'static Check,
    /// Its result.
    pub verdict: Verdict,
    /// The last record that it read, on which a difference rests; `None` if it read none.
    pub record: Option<RecordImage>,
}

impl Finding {
    /// Whether the answer is another one than the specification promises.
    pub fn is_failure(&self) -> bool {
        matches!(self.verdict, Verdict::Differs { .. }) && !self.check.is_open()
    }
}

/// All checks, in their order.
pub fn checks() -> impl Iterator<Item = &'static Check> {
    [COMMON, dsa::CHECKS, iaa::CHECKS].into_iter().flatten()
}

/// The checks for both kinds of device.
const COMMON: &[Check] = &[
    Check {
        name: "noop",
        what: "a NOOP is done",
        section: Some("DSA 3.0, 8.3.1; IAA 2.1, 6.3.1"),
        needs: &[opcode::NOOP],
        run: |rig| status(rig, opcode::NOOP, 0x01),
    },
    Check {
        name: "drain",
        what: "a DRAIN is done",
        section: Some("DSA 3.0, 3.12; IAA 2.1, 6.3.1"),
        needs: &[opcode::DRAIN],
        run: |rig| status(rig, opcode::DRAIN, 0x01),
    },
    Check {
        name: "opcode-unknown",
        what: "an unknown opcode is status 0x10",
        section: Some("DSA 3.0, 5.8.1; IAA 2.1, 4.4.1"),
        needs: &[],
        run: |rig| status(rig, UNKNOWN, 0x10),
    },
];

/// An operation code that no device has.
const UNKNOWN: u8 = 0x3f;

fn status(rig: &Rig, opcode: u8, expected: u8) -> Result<(), Verdict> {
    let image = rig.ask(Descriptor::new(opcode, 0))?;
    expect_equal(
        format!("status {expected:#04x}"),
        format!("status {:#04x}", image.status()),
    )
}

/// Runs the checks for this kind of device on an open work queue, and closes the queue. A descriptor may take as long as
/// `timeout`.
///
/// If a queue no longer answers at all, the remaining checks are skipped.
pub fn run(submit: Arc<dyn Submit>, timeout: Duration) -> Vec<Finding> {
    let kind = submit.limits().kind;
    let rig = Rig::new(submit, timeout);
    let verdict = |check: &Check| match &rig {
        Ok(rig) => (check.verdict(rig), rig.last_record()),
        Err(error) => (Verdict::Skipped(error.to_string()), None),
    };
    checks()
        .filter(|check| check.kind().is_none_or(|wanted| wanted == kind))
        .map(|check| {
            let (verdict, record) = verdict(check);
            Finding {
                check,
                verdict,
                record,
            }
        })
        .collect()
}

impl Check {
    /// Whether no document promises the expected answer.
    pub fn is_open(&self) -> bool {
        self.section.is_none()
    }

    /// The kind of device that it is for; `None` for both.
    fn kind(&self) -> Option<Kind> {
        self.needs.iter().find_map(|needed| match *needed {
            opcode::NOOP | opcode::DRAIN => None,
            opcode::COMPRESS | opcode::DECOMPRESS => Some(Kind::Iaa),
            _ => Some(Kind::Dsa),
        })
    }

    fn verdict(&self, rig: &Rig) -> Verdict {
        let operations = &rig.limits().operations;
        if let Some(missing) = self.needs.iter().find(|opcode| !operations.has(**opcode)) {
            return Verdict::Skipped(format!("the queue does not accept opcode {missing:#04x}"));
        }
        if !rig.is_alive() {
            return Verdict::Skipped("the queue does not answer, not even to a NOOP".to_owned());
        }
        (self.run)(rig).err().unwrap_or(Verdict::Holds)
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Holds => f.write_str("holds"),
            Self::Differs { expected, found } => {
                write!(f, "differs: expected {expected}, found {found}")
            }
            Self::Skipped(why) => write!(f, "skipped: {why}"),
        }
    }
}

/// Fails unless the answer is the expected one.
fn expect_equal(expected: impl Into<String>, found: impl Into<String>) -> Result<(), Verdict> {
    let (expected, found) = (expected.into(), found.into());
    expect(expected == found, expected, found)
}

/// Fails with a difference unless `is`.
fn expect(
    is: bool,
    expected: impl Into<String>,
    otherwise: impl Into<String>,
) -> Result<(), Verdict> {
    match is {
        true => Ok(()),
        false => Err(Verdict::Differs {
            expected: expected.into(),
            found: otherwise.into(),
        }),
    }
}

/// Bytes without a pattern, always the same.
fn noise(length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(length as u64);
    (0..length).map(|_| random.u8(..)).collect()
}

fn size(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}
