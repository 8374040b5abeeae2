//! Tools for checks: memory that stays mapped while a device may access it, and submissions with a deadline.

use std::{
    cell::{Cell, RefCell},
    fmt,
    ptr::{self, NonNull},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap},
};

use super::{Verdict, size};
use idxd::{Descriptor, Limits, Record, RecordImage, Refusal, Submit, dsa, opcode};

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;

/// A work queue under test. All memory that a device may access is kept until the queue is closed, when the rig is dropped,
/// so that a late answer does no harm.
pub(super) struct Rig {
    submit: Arc<dyn Submit>,
    timeout: Duration,
    areas: RefCell<Vec<Rc<Area>>>,
    state: Cell<State>,
    last_record: Cell<Option<RecordImage>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Alive,
    /// A submission was not answered since the queue last answered a NOOP.
    Doubtful,
    /// A NOOP was not answered either: nothing more is submitted.
    Dead,
}

/// Answer to a descriptor.
#[derive(Debug)]
pub(super) enum Answer {
    Done(RecordImage),
    Refused(Refusal),
    /// It was accepted, but there is no record.
    None,
}

/// Answer to a batch.
#[derive(Debug)]
pub(super) struct BatchAnswer {
    pub(super) parent: Answer,
    /// The members' records at the time when that of the batch was read.
    members: Vec<Option<RecordImage>>,
}

/// Longest real time beyond the timeout by the queue's own clock, which may stand still.
const REAL: Duration = Duration::from_secs(5);

/// Time between two submissions to a full queue.
const BETWEEN_TRIES: Duration = Duration::from_micros(10);

impl Rig {
    pub(super) fn new(submit: Arc<dyn Submit>, timeout: Duration) -> Self {
        Self {
            submit,
            timeout,
            areas: RefCell::default(),
            state: Cell::new(State::Alive),
            last_record: Cell::new(None),
        }
    }

    pub(super) fn limits(&self) -> &Limits {
        self.submit.limits()
    }

    /// The last record that was read since [`forget_records`](Self::forget_records).
    pub(super) fn last_record(&self) -> Option<RecordImage> {
        self.last_record.get()
    }

    pub(super) fn forget_records(&self) {
        self.last_record.set(None);
    }

    /// Whether the queue still answers; checked with a NOOP if in doubt.
    pub(super) fn is_alive(&self) -> bool {
        if self.state.get() == State::Doubtful {
            let alive = self.ask(plain(opcode::NOOP)).is_ok_and(
                |answer| matches!(answer, Answer::Done(image) if image.status() == SUCCESS),
            );
            // The NOOP's record belongs to no check.
            self.forget_records();
            self.state.set(match alive {
                true => State::Alive,
                false => State::Dead,
            });
        }
        self.state.get() == State::Alive
    }

    /// Memory of so many pages, zero and populated.
    pub(super) fn pages(&self, count: usize) -> Result<Rc<Area>, Verdict> {
        self.keep(Area::new(count, MapFlags::POPULATE))
    }

    /// A page that was never touched.
    pub(super) fn untouched(&self) -> Result<Rc<Area>, Verdict> {
        self.keep(Area::new(1, MapFlags::empty()))
    }

    /// A page, and one behind it that is `hole`.
    pub(super) fn before_hole(&self, hole: Hole) -> Result<Rc<Area>, Verdict> {
        self.keep(Area::new(2, MapFlags::POPULATE).and_then(|mut area| {
            area.protect_second(hole)?;
            Ok(area)
        }))
    }

    /// A page with `bytes` at its start.
    pub(super) fn holding(&self, bytes: &[u8]) -> Result<Rc<Area>, Verdict> {
        let area = self.pages(bytes.len().div_ceil(PAGE).max(1))?;
        area.write(0, bytes);
        Ok(area)
    }

    fn keep(&self, area: Result<Area, Errno>) -> Result<Rc<Area>, Verdict> {
        let area = area.map_err(|error| Verdict::Skipped(format!("no memory for it: {error}")))?;
        let area = Rc::new(area);
        self.areas.borrow_mut().push(Rc::clone(&area));
        Ok(area)
    }

    /// A new record, valid until the rig is dropped.
    pub(super) fn record(&self) -> Result<&Record, Verdict> {
        let area = self.pages(1)?;
        // SAFETY: it lies in an area that is kept as long as `self`, and only a device writes to it: records are atomics
        // for that. Zeros are a record.
        Ok(unsafe { area.start.cast().as_ref() })
    }

    /// Submits a descriptor, with a record of its own, and waits for that. Its addresses are those of areas of this rig.
    pub(super) fn ask(&self, mut descriptor: Descriptor) -> Result<Answer, Verdict> {
        let record = self.record()?;
        descriptor.record = record.address();
        Ok(match self.offer(&descriptor) {
            Ok(()) => self.wait(record),
            Err(refusal) => {
                self.state.set(State::Doubtful);
                Answer::Refused(refusal)
            }
        })
    }

    /// Submits a descriptor, repeatedly while the queue is full.
    pub(super) fn offer(&self, descriptor: &Descriptor) -> Result<(), Refusal> {
        let idle = Record::default();
        let limit = self.limit();
        loop {
            match self.try_once(descriptor) {
                Err(Refusal::Full) if limit.is_left(self) => {
                    self.submit
                        .pause(&idle, self.submit.now().saturating_add(BETWEEN_TRIES));
                }
                result => return result,
            }
        }
    }

    /// Submits a descriptor once.
    pub(super) fn try_once(&self, descriptor: &Descriptor) -> Result<(), Refusal> {
        // SAFETY: descriptors of checks name areas and records of this rig, to which there are no references (but to
        // records, as `Record`), and which stay mapped until the queue is closed; or addresses that a device may not
        // write to.
        let submitted = unsafe { self.submit.submit(std::slice::from_ref(descriptor)) };
        match submitted.refusal {
            _ if submitted.accepted > 0 => Ok(()),
            refusal => Err(refusal.unwrap_or(Refusal::Full)),
        }
    }

    /// Waits for a record.
    pub(super) fn wait(&self, record: &Record) -> Answer {
        let limit = self.limit();
        loop {
            if let Some(image) = record.image() {
                self.last_record.set(Some(image));
                return Answer::Done(image);
            }
            if !limit.is_left(self) {
                self.state.set(State::Doubtful);
                return Answer::None;
            }
            self.submit.pause(record, limit.deadline);
        }
    }

    /// Submits a batch and waits for it. The list is at this offset of an area, or else in an area of its own.
    pub(super) fn ask_batch(
        &self,
        mut members: Vec<Descriptor>,
        list: Option<(Rc<Area>, usize)>,
    ) -> Result<BatchAnswer, Verdict> {
        const STEP: usize = size_of::<Descriptor>();
        let records: Vec<&Record> = members
            .iter()
            .map(|_| self.record())
            .collect::<Result<_, _>>()?;
        let (list, offset) = match list {
            Some(place) => place,
            None => (self.pages((members.len() * STEP).div_ceil(PAGE))?, 0),
        };
        for (index, (member, record)) in members.iter_mut().zip(&records).enumerate() {
            member.record = record.address();
            list.write(offset + index * STEP, &member.bytes());
        }
        let parent = self.ask(dsa::batch(list.address(offset), size(members.len()), 0))?;
        if let Answer::Refused(Refusal::Invalid) = parent {
            // Nothing is wrong with the queue.
            self.state.set(State::Alive);
            return Err(Verdict::Skipped(
                "the kernel accepts no batches through write(2) for this device".to_owned(),
            ));
        }
        Ok(BatchAnswer {
            parent,
            members: records.iter().map(|record| record.image()).collect(),
        })
    }

    /// A deadline by the queue's clock and by the real one.
    fn limit(&self) -> Limit {
        Limit {
            deadline: self.submit.now().saturating_add(self.timeout),
            end: Instant::now() + self.timeout + REAL,
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // Before any area is unmapped.
        self.submit.close();
    }
}

struct Limit {
    deadline: Duration,
    end: Instant,
}

impl Limit {
    fn is_left(&self, rig: &Rig) -> bool {
        rig.submit.now() < self.deadline && Instant::now() < self.end
    }
}

/// Protection of the page that ends an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hole {
    /// Neither to be read nor to be written.
    Missing,
    /// To be read only.
    ReadOnly,
}

/// Anonymous memory, which its rig keeps until no device can write to it.
pub(super) struct Area {
    start: NonNull<u8>,
    bytes: usize,
    /// Bytes from the start that this process may read and write.
    usable: usize,
}

impl Area {
    fn new(pages: usize, flags: MapFlags) -> Result<Self, Errno> {
        let bytes = pages.checked_mul(PAGE).ok_or(Errno::NOMEM)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | flags,
            )
        }?;
        // The device uses the address as a number.
        start.expose_provenance();
        Ok(Self {
            start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?,
            bytes,
            usable: bytes,
        })
    }

    fn protect_second(&mut self, hole: Hole) -> Result<(), Errno> {
        let flags = match hole {
            Hole::Missing => MprotectFlags::empty(),
            Hole::ReadOnly => MprotectFlags::READ,
        };
        self.usable = PAGE;
        // SAFETY: the second page of the mapping, to which nothing refers.
        unsafe { mprotect(self.start.as_ptr().add(PAGE).cast(), PAGE, flags) }
    }

    /// Address of a byte for a descriptor; it may be beyond the usable part.
    pub(super) fn address(&self, offset: usize) -> u64 {
        self.start.as_ptr().addr() as u64 + offset as u64
    }

    /// Writes `bytes` as far as they lie in the usable part.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, byte) in (offset..).zip(bytes) {
            if at < self.usable {
                // SAFETY: a byte of the mapping that may be written, and that no one has a reference to. A device
                // that has not answered may write it too: hence volatile, and no conclusions.
                unsafe { self.start.as_ptr().add(at).write_volatile(*byte) };
            }
        }
    }

    /// Reads bytes; zeros beyond the usable part.
    pub(super) fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        (offset..offset + length)
            .map(|at| match at < self.usable {
                // SAFETY: as for writing.
                true => unsafe { self.start.as_ptr().add(at).read_volatile() },
                false => 0,
            })
            .collect()
    }

    /// Whether the area begins with these bytes.
    pub(super) fn holds(&self, expected: &[u8]) -> Result<(), Verdict> {
        let found = self.read(0, expected.len());
        let mut pairs = found.iter().zip(expected);
        match pairs.position(|(found, expected)| found != expected) {
            None => Ok(()),
            Some(at) => Err(Verdict::Differs {
                expected: format!("byte {at} to be {:#04x}", expected[at]),
                found: format!("{:#04x}", found[at]),
            }),
        }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the mapping's own range; its rig has closed the queue. Fails only for ranges that are none.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A status: success.
pub(super) const SUCCESS: u8 = 1;

/// A descriptor with an operation code only, which requests a record.
pub(super) fn plain(opcode: u8) -> Descriptor {
    Descriptor::new(opcode, 0)
}

impl BatchAnswer {
    /// The members' statuses, 0 where there is no record.
    pub(super) fn statuses(&self) -> impl Iterator<Item = u8> {
        let members = self.members.iter();
        members.map(|member| member.map_or(0, |image| image.status()))
    }
}

impl Answer {
    /// The record, or a verdict that something else was found than what is `expected`.
    pub(super) fn image(&self, expected: &str) -> Result<RecordImage, Verdict> {
        match self {
            Self::Done(image) => Ok(*image),
            other => Err(Verdict::Differs {
                expected: expected.to_owned(),
                found: other.to_string(),
            }),
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(image) => write!(f, "status {:#04x}", image.status()),
            Self::Refused(Refusal::System(error)) => write!(f, "refused: {error}"),
            Self::Refused(refusal) => write!(f, "refused: {refusal}"),
            Self::None => f.write_str("no answer"),
        }
    }
}
