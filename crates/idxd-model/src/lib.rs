//! Devices in software that misbehave in every way hardware can, for tests of what drives them.
//!
//! A [`Model`] has DSA and IAA devices with groups, engines and work queues. [`Model::queue`] opens one, as
//! [`Submit`]: from there on nothing knows that no hardware is behind it. Descriptors are copied at submission,
//! validated field by field, executed on this process's memory, and answered in completion records, in which
//! everything that has no meaning is noise.
//!
//! ```text
//!             virtual time                      real time
//!   Model::deterministic(config)   Model::timed(config)           Model::threaded(config)
//!   one action at a time, chosen   no threads: what is due is     a thread per engine
//!   by random numbers of a seed;   done by the caller of submit,
//!   runs inside of pause           pause or now
//!   property tests, replay         benchmarks                     races
//! ```
//!
//! What goes wrong is in [`Faults`] (by chance), in [`Model::inject`] (exactly there), in [`Model::pages`] (page
//! faults), and in the methods of [`Model`] for whole queues and devices.
//!
//! The model follows Intel's specifications: DSA, 341204-006, revision 3.0, and IAA, revision 2.1. It assumes what no
//! public document states:
//!
//! - an entry of a work queue is free when an engine has fetched its descriptor, not when that completes (check
//!   `freed-at-fetch` of the [conformance checks](selftest));
//! - a batch's list is read member by member, as engines become free (check `batch-list-read-late`);
//! - an engine has up to four batches in progress (DSA 3.0, 4.4, says several).
//!
//! What a model cannot show: real speed, ENQCMD under contention, the cost of page faults, stores that become
//! visible late, effects on caches, and what is undocumented about the hardware.
//!
//! # Example
//! ```
//! use std::time::Duration;
//!
//! use idxd::{Descriptor, Flags, Record, opcode};
//! use idxd_model::{Config, PortalKind, Model};
//!
//! let model = Model::deterministic(&Config::dsa());
//! let queue = model.queue(0, 0, PortalKind::Enqcmd);
//!
//! let (page, record) = (vec![0u64; 512], Record::default());
//! let wanted = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
//! let is_zero = Descriptor {
//!     control: u32::from(opcode::COMPARE_PATTERN) << 24 | wanted.0,
//!     record: record.address(),
//!     address_1: page.as_ptr() as u64,
//!     size: 4096,
//!     ..Descriptor::default()
//! };
//! // SAFETY: page and record live until the record is complete.
//! let submitted = unsafe { queue.submit(&[is_zero]) };
//! assert_eq!(submitted.accepted, 1);
//! let image = loop {
//!     match record.image() {
//!         Some(image) => break image,
//!         None => queue.pause(&record, queue.now() + Duration::from_millis(1)),
//!     }
//! };
//! assert_eq!((image.status(), image.result()), (1, 0));
//! ```

mod config;
mod devices;
mod driver;
mod dsa;
mod faults;
mod handle;
mod iaa;
mod machine;
mod memory;
mod random;
pub mod selftest;
mod validate;

use std::{io, sync::Arc, time::Duration};

use thiserror::Error;

pub use config::{Config, DeviceConfig, GroupConfig, QueueConfig, Speeds, Work};
pub use devices::devices;
pub use faults::{At, Chance, Faults, InjectedFault, On, Order};
pub use memory::{PAGE, Page, Pages};

use driver::{Driver, Time};
use handle::{Handle, Refusing};
use idxd::{Limits, Mode, Submit};
use machine::{Client, Machine};

/// Version of the model: grows when its devices behave differently.
pub const VERSION: u32 = 4;

/// Devices, and the time in which they live. Dropping it ends the threads, if it has any: what is in flight then
/// never completes.
#[derive(Debug)]
pub struct Model {
    driver: Arc<Driver>,
    workers: Vec<std::thread::JoinHandle<()>>,
}

/// How descriptors get into a work queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortalKind {
    /// A portal of a shared queue: answers whether the descriptor was accepted.
    Enqcmd,
    /// A portal of a dedicated queue: what is too much is dropped in silence.
    Movdir,
    /// The kernel's `write`: refuses misaligned records, and batches too where the device is of those that
    /// are unsafe for user space and of version 1 (all in the field so far).
    Write {
        /// Batches are refused.
        unsafe_v1: bool,
    },
}

/// Why a work queue cannot be opened.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum OpenError {
    /// The model has no such device or queue.
    #[error("the model has no such work queue")]
    Missing,
    /// Its device is disabled.
    #[error("the device is disabled")]
    Disabled,
    /// The device is gone.
    #[error("the device has been unplugged")]
    Unplugged,
    /// A dedicated queue has one user.
    #[error("the work queue is dedicated, and in use")]
    Busy,
}

impl OpenError {
    /// The system's error number.
    fn errno(self) -> i32 {
        match self {
            Self::Missing => libc::ENOENT,
            Self::Disabled => libc::ENXIO,
            Self::Unplugged => libc::ENODEV,
            Self::Busy => libc::EBUSY,
        }
    }
}

/// What a model has seen. Members of batches do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Descriptors that were accepted, without those that were dropped.
    pub accepted: u64,
    /// Those that completed, with a record if they wanted one.
    pub completed: u64,
    /// Those that were done, but whose record could not be written.
    pub unrecorded: u64,
    /// Those that never completed, as their device was reset or their queue closed.
    pub aborted: u64,
    /// Descriptors that were lost without a refusal: a dedicated queue was full or dead, a shared one got a MOVDIR64B.
    pub dropped: u64,
}

impl Model {
    /// Virtual time, and one order of everything for each seed: submissions and pauses of one thread give the same
    /// [`trace`](Self::trace) each time. Time advances in [`Submit::pause`], to what happens next but not beyond
    /// its deadline, and a little (100 ns) with each descriptor in [`Submit::submit`]; [`Submit::now`] only reads it.
    pub fn deterministic(config: &Config) -> Self {
        Self::new(config, Time::Virtual)
    }

    /// Real time without threads: what is due is done in calls of `submit`, `pause` and `now`. Nothing
    /// completes without such calls.
    pub fn timed(config: &Config) -> Self {
        Self::new(config, Time::Real)
    }

    /// Real time, and a thread for each engine. Engines are as slow as configured, or as the processor
    /// that does their work.
    pub fn threaded(config: &Config) -> Self {
        let mut model = Self::new(config, Time::Threads);
        model.workers = driver::workers(&model.driver, config);
        model
    }

    fn new(config: &Config, time: Time) -> Self {
        let driver = Arc::new(Driver::new(Machine::new(config), time));
        Self {
            driver,
            workers: Vec::new(),
        }
    }

    /// Opens a work queue, counted from 0 through the device's groups. Each call is another process on it;
    /// dropping the handle closes it. If it cannot be opened, the handle refuses everything with the error that
    /// opening would have had.
    pub fn queue(&self, device: usize, queue: usize, portal: PortalKind) -> Arc<dyn Submit> {
        self.open(device, queue, portal)
            .unwrap_or_else(|error| Arc::new(Refusing::new(error.errno())))
    }

    /// Opens a work queue.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(
        &self,
        device: usize,
        queue: usize,
        portal: PortalKind,
    ) -> Result<Arc<dyn Submit>, OpenError> {
        let mut machine = self.driver.lock();
        let here = machine.devices.get_mut(device).ok_or(OpenError::Missing)?;
        let (enabled, unplugged) = (here.enabled, here.unplugged);
        let there = here.queues.get_mut(queue).ok_or(OpenError::Missing)?;
        if unplugged {
            return Err(OpenError::Unplugged);
        }
        if !enabled {
            return Err(OpenError::Disabled);
        }
        if there.limits.mode == Mode::Dedicated && there.opened > 0 {
            return Err(OpenError::Busy);
        }
        there.opened += 1;
        let (limits, generation) = (there.limits.clone(), there.generation);
        let client = machine.clients.len();
        machine.clients.push(Client {
            device,
            queue,
            generation,
            in_flight: 0,
            closed: false,
            forked: false,
        });
        drop(machine);
        let portal = match portal {
            PortalKind::Write { unsafe_v1 } => PortalKind::Write {
                unsafe_v1: unsafe_v1 && limits.version == 0x100,
            },
            mapped => mapped,
        };
        Ok(Arc::new(Handle::new(
            Arc::clone(&self.driver),
            client,
            portal,
            limits,
        )))
    }

    /// What devices find in this process's memory.
    pub fn pages(&self) -> &Pages {
        self.driver.pages()
    }

    /// Lets `fault` happen to descriptors that fit `on`: not to the first `skip`, but to the `times` after them.
    /// Counted when an engine takes the descriptor; what was injected first comes first.
    pub fn inject(&self, on: On, skip: u32, times: u32, fault: InjectedFault) {
        self.driver.lock().script(on, skip, times, fault);
    }

    /// Another client takes `entries` of a work queue, until the next call.
    pub fn occupy(&self, device: usize, queue: usize, entries: u32) {
        let mut machine = self.driver.lock();
        if let Some(queue) = queue_of(&mut machine, device, queue) {
            queue.held = entries;
        }
    }

    /// A shared work queue reports so many times that it is full; [`u32::MAX`] is for ever, 0 ends it. With
    /// [`PortalKind::Write`] each of the kernel's tries counts.
    pub fn refuse(&self, device: usize, queue: usize, times: u32) {
        let mut machine = self.driver.lock();
        if let Some(queue) = queue_of(&mut machine, device, queue) {
            queue.full = times;
        }
    }

    /// Disables a device as an administrator does, and returns when what is outstanding is done; what is stuck is
    /// dropped. Handles from before are dead for ever: shared queues are full, through a portal and by `write`, and
    /// dedicated ones lose everything in silence.
    pub fn disable(&self, device: usize) {
        self.driver.disable(device);
    }

    /// Resets a device in mid-run, as an error that halts it makes necessary: as [`disable`](Self::disable), but what
    /// is outstanding is dropped, and its records are never written.
    pub fn reset(&self, device: usize) {
        self.driver.reset(device, |device| device.enabled = false);
    }

    /// Enables a device again, after either. Its work queues can be opened again.
    pub fn enable(&self, device: usize) {
        if let Some(here) = self.driver.lock().devices.get_mut(device) {
            here.enabled = true;
        }
    }

    /// Changes what a work queue of a disabled device takes, as an administrator may.
    pub fn reconfigure(&self, device: usize, queue: usize, limits: Limits) {
        let mut machine = self.driver.lock();
        if machine
            .devices
            .get(device)
            .is_some_and(|device| !device.enabled)
            && let Some(queue) = queue_of(&mut machine, device, queue)
        {
            queue.limits = limits;
        }
    }

    /// Takes the device away: it answers nothing any more and can never be opened again. Submissions end with
    /// [`Refusal::System`](idxd::Refusal::System) (ENODEV).
    pub fn unplug(&self, device: usize) {
        self.driver.reset(device, |device| device.unplugged = true);
    }

    /// Makes this process the child of a fork, as far as the queues go that are open now: they are
    /// [`Refusal::Forked`](idxd::Refusal::Forked).
    pub fn fork(&self) {
        for client in &mut self.driver.lock().clients {
            client.forked = true;
        }
    }

    /// Whether the device's register of software errors has something: a dedicated queue was full, a record could
    /// not be written. A real device's file becomes readable then.
    pub fn error_latched(&self, device: usize) -> bool {
        self.driver
            .lock()
            .devices
            .get(device)
            .is_some_and(|device| device.latched)
    }

    /// What happened so far.
    pub fn statistics(&self) -> Statistics {
        self.driver.lock().statistics
    }

    /// A hash of everything that happened in its order: the same for the same configuration and the same calls, if
    /// the model is [`deterministic`](Self::deterministic).
    pub fn trace(&self) -> u64 {
        self.driver.lock().trace.0
    }

    /// The time of the queues' [`Submit::now`].
    pub fn now(&self) -> Duration {
        self.driver.now()
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.driver.shut_down();
        for worker in self.workers.drain(..) {
            // A worker that panicked has printed that.
            let _ = worker.join();
        }
    }
}

fn queue_of(machine: &mut Machine, device: usize, queue: usize) -> Option<&mut machine::Queue> {
    machine.devices.get_mut(device)?.queues.get_mut(queue)
}

fn gone() -> io::Error {
    io::Error::from_raw_os_error(libc::ENODEV)
}

/// A time in the machine's unit; what is longer than 584 years is that.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
