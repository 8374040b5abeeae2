//! Opening a work queue, and submitting to it.
//!
//! ```text
//!   usable? ─> open(2) ─> its node? ─> mmap ──────────────── Mapped   ENQCMD     ┐
//!                                        │ EPERM, or no such instruction         ├─> NOOP answered? ─> Portal
//!                                        └────────────────── Written  write(2)   ┘
//! ```
//! The kernel refuses the mapping where submission from processes is not safe (INTEL-SA-01084) and the process lacks
//! CAP_SYS_RAWIO; write(2) is what it offers instead (`drivers/dma/idxd/cdev.c`).

#![cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "no other processor has the devices")
)]

#[cfg(target_arch = "x86_64")]
mod instructions;
#[cfg(target_arch = "x86_64")]
mod mapped;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod written;

use std::{
    fmt,
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock, TryLockError},
    time::Duration,
};

use rustix::{
    fs::{Mode as FileMode, OFlags},
    io::Errno,
};
use thiserror::Error;

use crate::{
    Descriptor, Limits, Record, Refusal, Submit, Submitted,
    cpu::has_enqcmd,
    discovery::{Problem, QueueName, WorkQueue},
    fork::Mark,
    opcode,
    wait::Waiting,
};

/// Time for a NOOP, more than a working queue needs.
const PROBE: Duration = Duration::from_millis(10);
/// Time for a DRAIN, before the kernel drains the queue.
const DRAIN: Duration = Duration::from_millis(100);

/// How descriptors get to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Through the mapped portal, without a system call.
    Mapped,
    /// Through write(2).
    Written,
}

/// Why a work queue could not be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The processor is not an x86-64.
    #[error("work queues can be used on x86-64 alone")]
    Unsupported,
    /// The scan, or opening the queue, has found an obstacle.
    #[error("work queue {queue} cannot be used")]
    Unusable {
        /// The queue.
        queue: QueueName,
        /// The obstacle.
        #[source]
        problem: Problem,
    },
    /// A NOOP or a batch was not done in time: the device hangs, or the portal leads nowhere.
    #[error("work queue {0} does not answer")]
    NoAnswer(QueueName),
    /// A NOOP ended with an error.
    #[error("work queue {queue} answers a NOOP with status {status:#04x}")]
    Broken {
        /// The queue.
        queue: QueueName,
        /// The record's status.
        status: u8,
    },
    /// A NOOP or a batch was not accepted.
    #[error("work queue {queue} accepts nothing")]
    Refused {
        /// The queue.
        queue: QueueName,
        /// Why.
        #[source]
        refusal: Refusal,
    },
    /// Any other error of the system.
    #[error("cannot use {}", path.display())]
    System {
        /// The character device.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
}

#[cfg(target_arch = "x86_64")]
impl OpenError {
    fn unusable(queue: &WorkQueue, problem: Problem) -> Self {
        let queue = queue.name;
        Self::Unusable { queue, problem }
    }

    fn system(path: &Path, source: io::Error) -> Self {
        let path = path.to_path_buf();
        Self::System { path, source }
    }
}

/// Opens `queue` for this process, and tests it with a NOOP and, if it takes batches, with a batch: each takes
/// microseconds, and 10 ms at most.
///
/// Opening binds the process's address space to the device.
pub fn open(queue: &WorkQueue) -> Result<Portal, OpenError> {
    open_with(queue, has_enqcmd(Path::new("/proc/cpuinfo")))
}

/// An open work queue.
///
/// [`close`](Submit::close), or dropping the portal, drains the descriptors of this process, by the device and then by the
/// kernel, which takes as long as the device needs. In a forked child every submission is [`Refusal::Forked`], and closing
/// does nothing.
#[derive(Debug)]
pub struct Portal {
    queue: QueueName,
    limits: Limits,
    access: Access,
    waiting: Waiting,
    mark: Mark,
    /// Only `close` locks it for writing, so that no portal is unmapped during a submission.
    transport: RwLock<Option<Box<dyn Transport>>>,
}

/// A way to get descriptors to the device.
trait Transport: Send + Sync + fmt::Debug {
    /// As [`Submit::submit`].
    ///
    /// # Safety
    /// As there.
    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted;

    /// Releases it in a forked child, where dropping it may be wrong.
    fn abandon(self: Box<Self>);
}

impl Portal {
    /// How descriptors get to the device.
    pub fn access(&self) -> Access {
        self.access
    }

    fn new(
        transport: Box<dyn Transport>,
        access: Access,
        limits: Limits,
        waiting: Waiting,
        queue: QueueName,
    ) -> io::Result<Self> {
        Ok(Self {
            queue,
            limits,
            access,
            waiting,
            mark: Mark::new()?,
            transport: RwLock::new(Some(transport)),
        })
    }
}

impl Submit for Portal {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        let refused = |refusal| Submitted {
            accepted: 0,
            refusal: Some(refusal),
        };
        // Before the lock, which another thread of the parent may have held.
        if self.mark.is_in_child() {
            return refused(Refusal::Forked);
        }
        let transport = match self.transport.try_read() {
            Ok(transport) => transport,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Only closing excludes readers.
            Err(TryLockError::WouldBlock) => return refused(Refusal::Closed),
        };
        match &*transport {
            // SAFETY: the caller's promise.
            Some(transport) => unsafe { transport.submit(descriptors) },
            None => refused(Refusal::Closed),
        }
    }

    fn now(&self) -> Duration {
        self.waiting.now()
    }

    fn pause(&self, record: &Record, deadline: Duration) {
        self.waiting.pause(record, deadline);
    }

    fn close(&self) {
        if self.mark.is_in_child() {
            return;
        }
        // Held to the end, so that a second call waits for the draining as well.
        let mut transport = self
            .transport
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = &*transport
            && self.limits.operations.has(opcode::DRAIN)
        {
            // The kernel drains when the last copy of the file is closed, and a child that is about to execute another
            // program may have a copy for a moment. So the device drains first. Without an answer, the kernel's draining
            // has to suffice.
            let drain = Question::of(opcode::DRAIN);
            let _ = drain.ask(&**open, &self.waiting, self.queue, DRAIN);
        }
        *transport = None;
    }
}

impl Drop for Portal {
    fn drop(&mut self) {
        if !self.mark.is_in_child() {
            return self.close();
        }
        let transport = self
            .transport
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(transport) = transport.take() {
            transport.abandon();
        }
    }
}

/// Status of a completed descriptor.
const SUCCESS: u8 = 1;

/// A NOOP, a DRAIN or a batch of NOOPs, and all memory that the device may access because of it.
#[derive(Default)]
struct Question {
    record: Record,
    descriptor: Descriptor,
    /// Members of a batch, and their records.
    members: [Descriptor; 2],
    records: [Record; 2],
}

impl Question {
    fn of(opcode: u8) -> Box<Self> {
        let mut question = Box::<Self>::default();
        question.descriptor = Descriptor::new(opcode, question.record.address());
        question
    }

    /// The smallest batch that every device accepts.
    fn batch() -> Box<Self> {
        let mut question = Self::of(opcode::BATCH);
        for (member, record) in question.members.iter_mut().zip(&question.records) {
            *member = Descriptor::new(opcode::NOOP, record.address());
        }
        question.descriptor.address_1 = question.members.as_ptr().expose_provenance() as u64;
        question.descriptor.size = 2;
        question
    }

    /// Submits the question, repeatedly while the queue is full, and waits for the record. Returns its status.
    fn ask(
        self: Box<Self>,
        transport: &dyn Transport,
        waiting: &Waiting,
        queue: QueueName,
        timeout: Duration,
    ) -> Result<u8, OpenError> {
        let deadline = waiting.now() + timeout;
        loop {
            // SAFETY: the device accesses only the question, which is freed only when it is complete, or else leaked.
            let submitted = unsafe { transport.submit(std::slice::from_ref(&self.descriptor)) };
            match submitted.refusal {
                _ if submitted.accepted > 0 => break,
                Some(Refusal::Full) if waiting.now() < deadline => {
                    waiting.pause(&self.record, deadline)
                }
                refusal => {
                    let refusal = refusal.unwrap_or(Refusal::Full);
                    return Err(OpenError::Refused { queue, refusal });
                }
            }
        }
        while self.record.status() == 0 {
            if waiting.now() >= deadline {
                // The device may still process it at any time, so some hundred bytes are leaked.
                Box::leak(self);
                return Err(OpenError::NoAnswer(queue));
            }
            waiting.pause(&self.record, deadline);
        }
        Ok(self.record.status())
    }
}

/// Tests a queue with a NOOP, and with a batch if it seems to accept batches: its administrator may have excluded that
/// opcode, which the attributes do not always show. Returns the limits of the queue.
fn probe(
    transport: &dyn Transport,
    limits: Limits,
    waiting: &Waiting,
    queue: QueueName,
    timeout: Duration,
) -> Result<Limits, OpenError> {
    let ask = |question: Box<Question>| question.ask(transport, waiting, queue, timeout);
    match ask(Question::of(opcode::NOOP))? {
        SUCCESS => {}
        status => return Err(OpenError::Broken { queue, status }),
    }
    if limits.max_batch.is_none() {
        return Ok(limits);
    }
    match ask(Question::batch()) {
        Ok(SUCCESS) => Ok(limits),
        Ok(_)
        | Err(OpenError::Refused {
            refusal: Refusal::Invalid,
            ..
        }) => Ok(limits.without_batches()),
        Err(error) => Err(error),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn open_with(_queue: &WorkQueue, _enqcmd: bool) -> Result<Portal, OpenError> {
    Err(OpenError::Unsupported)
}

#[cfg(target_arch = "x86_64")]
fn open_with(queue: &WorkQueue, enqcmd: bool) -> Result<Portal, OpenError> {
    use self::{mapped::Mapped, written::Written};

    let unusable = |problem| OpenError::unusable(queue, problem);
    let limits = queue.usable().map_err(unusable)?.clone();
    let path = queue.node().map_err(unusable)?;
    let system = |source| OpenError::system(path, source);

    let file = open_node(queue, path)?;
    let mapped = match enqcmd {
        true => Mapped::of(&file).map_err(system)?,
        false => None,
    };
    let (transport, access, limits): (Box<dyn Transport>, _, _) = match mapped {
        Some(mapped) => {
            // The mapping keeps the queue. A child that is forked has no mapping, but would have the file.
            drop(file);
            (
                Box::new(mapped),
                Access::Mapped,
                queue.limits_mapped(limits),
            )
        }
        None => (
            Box::new(Written::of(file)),
            Access::Written,
            limits.written(),
        ),
    };
    let waiting = Waiting::new();
    let limits = probe(&*transport, limits, &waiting, queue.name, PROBE)?;
    Portal::new(transport, access, limits, waiting, queue.name).map_err(system)
}

/// Opens the character device, and checks that it is the queue's: a descriptor must not get to another file.
#[cfg(target_arch = "x86_64")]
fn open_node(queue: &WorkQueue, path: &Path) -> Result<File, OpenError> {
    let unusable = |problem| OpenError::unusable(queue, problem);
    let system = |source| OpenError::system(path, source);
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, FileMode::empty()).map_err(|error| match error {
        Errno::ACCESS | Errno::PERM => unusable(Problem::Denied(path.to_path_buf())),
        Errno::NOENT | Errno::NXIO | Errno::NODEV => unusable(Problem::Gone),
        Errno::OPNOTSUPP => unusable(Problem::NoAddressSpace),
        error => system(error.into()),
    })?;
    let file = File::from(file);
    let metadata = file.metadata().map_err(system)?;
    match queue.is_node(&metadata) {
        true => Ok(file),
        false => Err(unusable(Problem::OtherNode(path.to_path_buf()))),
    }
}

impl Limits {
    /// The same queue through write(2), which accepts no batches for a device of the first version.
    fn written(self) -> Self {
        match self.version > 0x100 && self.operations.has(opcode::BATCH) {
            true => self,
            false => self.without_batches(),
        }
    }

    fn without_batches(mut self) -> Self {
        self.operations = self.operations.without(opcode::BATCH);
        self.max_batch = None;
        self
    }
}
