//! A work queue under test, and memory that stays mapped while a device may access it.

use std::{
    cell::{Cell, RefCell},
    ptr::{self, NonNull},
    sync::Arc,
    time::Duration,
};

use rustix::{
    io::Errno,
    mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap},
};

use super::Verdict;
use idxd::{
    Descriptor, Limits, OpenQueueError, Outcome, Queue, RecordImage, Shape, Submit, SubmitError,
    Tuning, opcode, status::SUCCESS,
};

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;

/// A work queue under test. All memory that a device may access is kept until the queue is closed, when the rig is dropped,
/// so that a late answer does no harm.
pub(super) struct Rig {
    queue: Queue,
    timeout: Duration,
    areas: RefCell<Vec<Area>>,
    /// A submission was not answered since the queue last answered a NOOP.
    is_doubtful: Cell<bool>,
    last_record: Cell<Option<RecordImage>>,
}

/// Pages of this process, the first of which may be accessed at any time by a device, so never by reference. Copies are the
/// same memory.
#[derive(Clone, Copy)]
pub(super) struct Area {
    start: NonNull<u8>,
    bytes: usize,
    /// Bytes at the beginning that may be read and written.
    usable: usize,
}

impl Rig {
    pub(super) fn new(submit: Arc<dyn Submit>, timeout: Duration) -> Result<Self, OpenQueueError> {
        let shape = Shape {
            members: submit.limits().max_batch.map_or(1, |most| most.get()),
            buffer_bytes: 0,
        };
        let tuning = Tuning {
            most_timed_out: u32::MAX,
            ..Tuning::default()
        };
        Ok(Self {
            queue: Queue::new(submit, shape, tuning)?,
            timeout,
            areas: RefCell::default(),
            is_doubtful: Cell::new(false),
            last_record: Cell::new(None),
        })
    }

    pub(super) fn limits(&self) -> &Limits {
        self.queue.limits()
    }

    /// The last record that was read in the current check.
    pub(super) fn last_record(&self) -> Option<RecordImage> {
        self.last_record.get()
    }

    /// Whether the queue still answers; checked with a NOOP if in doubt. Begins the next check.
    pub(super) fn is_alive(&self) -> bool {
        if self.is_doubtful.get() && !self.queue.is_dead() {
            let answer = self.ask(Descriptor::new(opcode::NOOP, 0));
            let is_alive = answer.is_ok_and(|image| image.status() == SUCCESS);
            self.is_doubtful.set(!is_alive);
        }
        self.last_record.set(None);
        !self.is_doubtful.get() && !self.queue.is_dead()
    }

    /// Memory of so many pages, zero and populated.
    pub(super) fn pages(&self, count: usize) -> Result<Area, Verdict> {
        self.keep(Area::new(count, MapFlags::POPULATE))
    }

    /// A page that was never touched.
    pub(super) fn untouched(&self) -> Result<Area, Verdict> {
        self.keep(Area::new(1, MapFlags::empty()))
    }

    /// A page, and one behind it that may be neither read nor written.
    pub(super) fn before_hole(&self) -> Result<Area, Verdict> {
        self.keep(Area::new(2, MapFlags::POPULATE).and_then(Area::with_hole))
    }

    /// A page or more with `bytes` at the start.
    pub(super) fn holding(&self, bytes: &[u8]) -> Result<Area, Verdict> {
        let area = self.pages(bytes.len().div_ceil(PAGE).max(1))?;
        area.write(0, bytes);
        Ok(area)
    }

    fn keep(&self, area: Result<Area, Errno>) -> Result<Area, Verdict> {
        let area = area.map_err(|error| Verdict::Skipped(format!("no memory for it: {error}")))?;
        self.areas.borrow_mut().push(area);
        Ok(area)
    }

    /// Submits a descriptor whose addresses are those of areas of this rig, and waits for its record.
    pub(super) fn ask(&self, descriptor: Descriptor) -> Result<RecordImage, Verdict> {
        let image = self.ask_all(&[descriptor])?.image(0);
        let image = image.ok_or_else(|| self.no_answer("no answer"))?;
        self.last_record.set(Some(image));
        Ok(image)
    }

    /// Submits several descriptors as one batch, and waits for it.
    pub(super) fn ask_batch(&self, members: &[Descriptor]) -> Result<Outcome, Verdict> {
        let before = self.queue.statistics().batches;
        let outcome = self.ask_all(members)?;
        if self.queue.statistics().batches == before {
            let why = "the kernel accepts no batches through write(2) for this device";
            return Err(Verdict::Skipped(why.to_owned()));
        }
        Ok(outcome)
    }

    fn ask_all(&self, descriptors: &[Descriptor]) -> Result<Outcome, Verdict> {
        let slot = self.queue.slot();
        let mut slot = slot.ok_or_else(|| self.no_answer("no free entry of the queue"))?;
        let list = slot.descriptors_mut().get_mut(..descriptors.len());
        let list = list.ok_or_else(|| Verdict::Skipped("the queue has too few entries".into()))?;
        list.copy_from_slice(descriptors);
        // SAFETY: descriptors of checks name areas of this rig, to which there are no references, and which stay mapped until
        // the queue is closed; or addresses that a device may not write to.
        let flight = unsafe { slot.submit(descriptors.len()) };
        let flight = flight.map_err(|(_, error)| match error {
            SubmitError::Refused(refusal) => self.no_answer(&format!("refused: {refusal}")),
            error => self.no_answer(&format!("refused: {error}")),
        })?;
        let deadline = self.queue.now().saturating_add(self.timeout);
        flight
            .wait(deadline)
            .map_err(|_| self.no_answer("no answer"))
    }

    fn no_answer(&self, found: &str) -> Verdict {
        self.is_doubtful.set(true);
        Verdict::Differs {
            expected: "an answer".to_owned(),
            found: found.to_owned(),
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.queue.close();
        for area in self.areas.borrow().iter() {
            // SAFETY: a mapping of this rig; the queue is closed. Fails only for ranges that are none.
            let _ = unsafe { munmap(area.start.as_ptr().cast(), area.bytes) };
        }
    }
}

impl Area {
    fn new(pages: usize, flags: MapFlags) -> Result<Self, Errno> {
        let bytes = pages * PAGE;
        // SAFETY: a new mapping.
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

    fn with_hole(self) -> Result<Self, Errno> {
        // SAFETY: the second page of the mapping, to which nothing refers.
        unsafe {
            let second = self.start.as_ptr().add(PAGE).cast();
            mprotect(second, PAGE, MprotectFlags::empty())?;
        }
        Ok(Self {
            usable: PAGE,
            ..self
        })
    }

    /// Address of a byte for a descriptor; it may be beyond the usable part.
    pub(super) fn address(&self, offset: usize) -> u64 {
        self.start.as_ptr().addr() as u64 + offset as u64
    }

    /// Writes `bytes` as far as they lie in the usable part.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, byte) in (offset..self.usable).zip(bytes) {
            // SAFETY: a byte of the mapping that may be written, and that no one has a reference to. A device that has not
            // answered may write it too: hence volatile, and no conclusions.
            unsafe { self.start.as_ptr().add(at).write_volatile(*byte) };
        }
    }

    /// Reads bytes as far as they lie in the usable part.
    pub(super) fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        let range = offset..(offset + length).min(self.usable);
        // SAFETY: as for writing.
        let byte = |at: usize| unsafe { self.start.as_ptr().add(at).read_volatile() };
        range.map(byte).collect()
    }
}
