//! Tools for checks: memory that outlives whatever a device may still do to it, and questions with a deadline.

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

use super::{Ended, Options, Verdict};
use idxd::{Descriptor, Flags, Limits, Record, RecordImage, Refusal, Submit, opcode};

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;

/// A work queue under test. Everything whose address a device has is kept until the queue is closed, which is
/// when this is dropped: an answer that comes too late then does no harm.
pub(super) struct Rig<'a> {
    submit: Arc<dyn Submit>,
    options: &'a Options,
    areas: RefCell<Vec<Rc<Area>>>,
    records: RefCell<Vec<NonNull<Record>>>,
    state: Cell<State>,
    last_record: Cell<Option<RecordImage>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Alive,
    /// A question was not answered since the queue was last seen alive.
    Doubtful,
    /// Nor was a NOOP after it: nothing more is asked.
    Dead,
}

/// What became of a descriptor.
#[derive(Debug)]
pub(super) enum Answer {
    Done(RecordImage),
    Refused(Refusal),
    /// It was accepted, and that was all.
    None,
}

/// What became of a batch.
#[derive(Debug)]
pub(super) struct BatchAnswer {
    pub(super) parent: Answer,
    /// What the members' records held when the batch's was seen.
    pub(super) members: Vec<Option<RecordImage>>,
}

/// A batch to be asked for.
pub(super) struct Batch {
    pub(super) members: Vec<Descriptor>,
    /// What the batch states as their number; else it is right.
    pub(super) count: Option<u32>,
    /// Where the list begins; else it has an area of its own.
    pub(super) list: Option<(Rc<Area>, usize)>,
}

/// Longest real time beyond the timeout by the queue's own clock, which may stand still.
const REAL: Duration = Duration::from_secs(5);

/// How long a full queue is left alone between two tries.
const BETWEEN_TRIES: Duration = Duration::from_micros(10);

impl<'a> Rig<'a> {
    pub(super) fn new(submit: Arc<dyn Submit>, options: &'a Options) -> Self {
        Self {
            submit,
            options,
            areas: RefCell::default(),
            records: RefCell::default(),
            state: Cell::new(State::Alive),
            last_record: Cell::new(None),
        }
    }

    pub(super) fn limits(&self) -> &Limits {
        self.submit.limits()
    }

    pub(super) fn options(&self) -> &Options {
        self.options
    }

    /// The last record that was waited for and came since [`forget_records`](Self::forget_records).
    pub(super) fn last_record(&self) -> Option<RecordImage> {
        self.last_record.get()
    }

    pub(super) fn forget_records(&self) {
        self.last_record.set(None);
    }

    /// Whether the queue still does something, as far as one can know.
    pub(super) fn is_alive(&self) -> bool {
        if self.state.get() == State::Doubtful {
            let alive = self.ask(plain(opcode::NOOP)).is_ok_and(
                |answer| matches!(answer, Answer::Done(image) if image.status() == SUCCESS),
            );
            // It is no answer to a check.
            self.forget_records();
            self.state.set(match alive {
                true => State::Alive,
                false => State::Dead,
            });
        }
        self.state.get() == State::Alive
    }

    /// Memory of so many pages, zero and populated.
    pub(super) fn pages(&self, count: usize) -> Result<Rc<Area>, Ended> {
        self.keep(Area::new(count, MapFlags::POPULATE))
    }

    /// The same, untouched.
    pub(super) fn untouched(&self, count: usize) -> Result<Rc<Area>, Ended> {
        self.keep(Area::new(count, MapFlags::empty()))
    }

    /// `count` pages, and one behind them that is `hole`.
    pub(super) fn before_hole(&self, count: usize, hole: Hole) -> Result<Rc<Area>, Ended> {
        self.keep(
            Area::new(count + 1, MapFlags::POPULATE).and_then(|mut area| {
                area.protect(count, hole)?;
                area.usable = 0..count * PAGE;
                Ok(area)
            }),
        )
    }

    /// One page that is missing, and `count` behind it.
    pub(super) fn behind_hole(&self, count: usize) -> Result<Rc<Area>, Ended> {
        self.keep(
            Area::new(count + 1, MapFlags::POPULATE).and_then(|mut area| {
                area.protect(0, Hole::Missing)?;
                area.usable = PAGE..(count + 1) * PAGE;
                Ok(area)
            }),
        )
    }

    /// A page with `bytes` at its start.
    pub(super) fn holding(&self, bytes: &[u8]) -> Result<Rc<Area>, Ended> {
        let area = self.pages(bytes.len().div_ceil(PAGE).max(1))?;
        area.write(0, bytes);
        Ok(area)
    }

    fn keep(&self, area: Result<Area, Errno>) -> Result<Rc<Area>, Ended> {
        let area = Rc::new(area.map_err(|error| Verdict::Skipped {
            why: format!("no memory for it: {error}"),
        })?);
        self.areas.borrow_mut().push(Rc::clone(&area));
        Ok(area)
    }

    /// A record of its own, until the end.
    pub(super) fn record(&self) -> Result<&Record, Ended> {
        let mut records = self.records.borrow_mut();
        if records.is_empty() {
            let area = self.pages(1)?;
            let first = area.start.cast::<Record>();
            let count = PAGE / size_of::<Record>();
            // SAFETY: `count` records are what fits the page.
            records.extend((0..count).map(|index| unsafe { first.add(index) }));
        }
        let record = records.pop().ok_or_else(|| Verdict::Skipped {
            why: "no memory for a record".to_owned(),
        })?;
        // SAFETY: it lies in an area that is kept as long as `self`, and only a device writes to it: records
        // are atomics for that. Zeros are a record.
        Ok(unsafe { record.as_ref() })
    }

    /// Submits a descriptor, with a record of its own, and waits for that.
    pub(super) fn ask(&self, mut descriptor: Descriptor) -> Result<Answer, Ended> {
        let record = self.record()?;
        descriptor.record = record.address();
        Ok(self.ask_with(descriptor, record))
    }

    /// Submits a descriptor and waits for `record`, whatever the descriptor states about it. Its addresses are those of
    /// areas of this rig.
    pub(super) fn ask_with(&self, descriptor: Descriptor, record: &Record) -> Answer {
        match self.offer(&descriptor) {
            Ok(()) => self.wait(record),
            Err(refusal) => {
                self.state.set(State::Doubtful);
                Answer::Refused(refusal)
            }
        }
    }

    /// Submits a descriptor, again and again while the queue is full.
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

    /// Submits a descriptor, if the queue takes it.
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

    /// Submits a batch and waits for it.
    pub(super) fn ask_batch(&self, mut batch: Batch) -> Result<BatchAnswer, Ended> {
        let records: Vec<&Record> = batch
            .members
            .iter()
            .map(|_| self.record())
            .collect::<Result<_, _>>()?;
        for (member, record) in batch.members.iter_mut().zip(&records) {
            member.record = record.address();
        }
        let (list, offset) = match batch.list.take() {
            Some(place) => place,
            None => {
                let bytes = batch.members.len() * size_of::<Descriptor>();
                (self.pages(bytes.div_ceil(PAGE).max(1))?, 0)
            }
        };
        for (index, member) in batch.members.iter().enumerate() {
            list.write(offset + index * size_of::<Descriptor>(), &member.bytes());
        }
        let count = u32::try_from(batch.members.len()).unwrap_or(u32::MAX);
        let parent = self.ask(Descriptor {
            address_1: list.address(offset),
            size: batch.count.unwrap_or(count),
            ..plain(opcode::BATCH)
        })?;
        if let Answer::Refused(Refusal::Invalid) = parent {
            // Nothing is wrong with the queue.
            self.state.set(State::Alive);
            return Err(Verdict::Skipped {
                why: "the kernel takes no batches through write(2) for this device".to_owned(),
            });
        }
        Ok(BatchAnswer {
            parent,
            members: records.iter().map(|record| record.image()).collect(),
        })
    }

    /// Time by the queue's clock and by the real one.
    fn limit(&self) -> Limit {
        Limit {
            deadline: self.submit.now().saturating_add(self.options.timeout),
            end: Instant::now() + self.options.timeout + REAL,
        }
    }
}

impl Drop for Rig<'_> {
    fn drop(&mut self) {
        // Before any area goes.
        self.submit.close();
        for area in self.areas.take() {
            if let Some(mut area) = Rc::into_inner(area) {
                area.unmap();
            }
        }
    }
}

struct Limit {
    deadline: Duration,
    end: Instant,
}

impl Limit {
    fn is_left(&self, rig: &Rig<'_>) -> bool {
        rig.submit.now() < self.deadline && Instant::now() < self.end
    }
}

/// What a page that ends an area is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hole {
    /// Neither to be read nor to be written.
    Missing,
    /// To be read only.
    ReadOnly,
}

/// Anonymous memory. It stays mapped unless its rig unmaps it: while a device may write to it, nothing else may have it.
pub(super) struct Area {
    start: NonNull<u8>,
    bytes: usize,
    /// The part that this process may read and write.
    usable: std::ops::Range<usize>,
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
        // For the device, which will come back with it as a number.
        start.expose_provenance();
        Ok(Self {
            start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?,
            bytes,
            usable: 0..bytes,
        })
    }

    fn protect(&mut self, page: usize, hole: Hole) -> Result<(), Errno> {
        let flags = match hole {
            Hole::Missing => MprotectFlags::empty(),
            Hole::ReadOnly => MprotectFlags::READ,
        };
        // SAFETY: a page of the mapping, to which nothing refers.
        unsafe { mprotect(self.start.as_ptr().add(page * PAGE).cast(), PAGE, flags) }
    }

    /// The number that a descriptor has for a byte; it may be beyond the usable ones.
    pub(super) fn address(&self, offset: usize) -> u64 {
        self.start.as_ptr().addr() as u64 + offset as u64
    }

    /// Where an address lies, from the start.
    pub(super) fn offset_of(&self, address: u64) -> i128 {
        i128::from(address) - i128::from(self.address(0))
    }

    /// Writes what of `bytes` falls on the usable part.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, byte) in (offset..).zip(bytes) {
            if self.usable.contains(&at) {
                // SAFETY: a byte of the mapping that may be written, and that no one has a reference to. A device
                // that has not answered may write it too: hence volatile, and no conclusions.
                unsafe { self.start.as_ptr().add(at).write_volatile(*byte) };
            }
        }
    }

    /// Bytes as they are now; zeros beyond the usable part.
    pub(super) fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        (offset..offset + length)
            .map(|at| match self.usable.contains(&at) {
                // SAFETY: as for writing.
                true => unsafe { self.start.as_ptr().add(at).read_volatile() },
                false => 0,
            })
            .collect()
    }

    fn unmap(&mut self) {
        // SAFETY: the mapping's own range, once: its rig has closed the queue, and takes the area apart.
        // That fails only for ranges that are none.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl fmt::Debug for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes)
    }
}

/// A status: success.
pub(super) const SUCCESS: u8 = 1;

/// A descriptor that has nothing but its operation, and wants a record.
pub(super) fn plain(opcode: u8) -> Descriptor {
    Descriptor {
        control: Descriptor::control_of(opcode, RECORD),
        ..Descriptor::default()
    }
}

/// A record is wanted in any case.
pub(super) const RECORD: Flags = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);

/// `descriptor` with further flags.
pub(super) fn flagged(mut descriptor: Descriptor, flags: Flags) -> Descriptor {
    descriptor.control |= flags.0;
    descriptor
}

impl Batch {
    /// A batch as it should be.
    pub(super) fn of(members: Vec<Descriptor>) -> Self {
        Self {
            members,
            count: None,
            list: None,
        }
    }
}

impl Answer {
    /// The record, or a verdict: that it is `expected`, and what was there instead.
    pub(super) fn image(&self, expected: &str) -> Result<RecordImage, Ended> {
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
