//! DSA and IAA devices in software that misbehave in every way hardware can, for tests of the driver.
//!
//! A [`Model`] has DSA and IAA devices with engines and work queues. [`Model::queue`] opens a queue as [`Submit`], which
//! users cannot tell from hardware. Descriptors are copied at submission,
//! validated field by field, executed on this process's memory, and answered by completion records, in which all
//! undefined fields are noise.
//!
//! ```text
//!             virtual time                      real time
//!   Model::deterministic(config)      Model::timed(config)
//!   one action at a time, chosen      what is due is done by the
//!   by random numbers of a seed;      caller of submit, pause or now
//!   runs inside of pause
//!   property tests, replay            benchmarks, threads
//! ```
//!
//! Faults happen at random ([`Faults`]), to chosen descriptors ([`Model::inject`]), at chosen pages ([`Model::pages`]), and
//! to whole queues and devices (other methods of [`Model`]).
//!
//! The model follows Intel's specifications: DSA, 341204-006, revision 3.0, and IAA, revision 2.1. It has what the driver
//! uses and rejects everything else, even what a device has: fences, predicates, fills, blocking on page faults, and the
//! continuation of batches among them. Assumptions, which no public document confirms:
//!
//! - an entry of a work queue is free when an engine has fetched its descriptor, not when that completes;
//! - a batch's list is read member by member, as engines become free;
//! - an engine has up to four batches in progress (DSA 3.0, 4.4, says several).
//!
//! A model cannot show real speed, ENQCMD under contention, the cost of page faults, stores that become visible late,
//! effects on caches, and what is undocumented about the hardware.
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
pub mod selftest;
mod validate;

use std::{hash::Hasher as _, sync::Arc, time::Duration};

pub use config::{Config, DeviceConfig, Speeds, Work};
pub use devices::devices;
pub use faults::{At, Chance, Faults, InjectedFault, On};
pub use memory::{PAGE, Page, Pages};

use driver::{Driver, Time};
use handle::Handle;
use idxd::{Kind, Submit};
use machine::Machine;

/// Version of the model. It is incremented when the devices behave differently.
pub const VERSION: u32 = 6;

/// Devices and their clock.
#[derive(Debug)]
pub struct Model {
    driver: Arc<Driver>,
}

/// How descriptors get into a work queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortalKind {
    /// A portal: answers whether the descriptor was accepted.
    Enqcmd,
    /// The kernel's `write`: refuses misaligned records, and batches for devices of version 0x100.
    Write,
}

/// Counters of a model, without the members of batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Descriptors that were accepted.
    pub accepted: u64,
    /// Descriptors that completed, with a record if they requested one.
    pub completed: u64,
    /// Descriptors that were done, but whose record could not be written.
    pub unrecorded: u64,
    /// Descriptors that never completed, because their device was reset or their queue closed.
    pub aborted: u64,
}

impl Model {
    /// Virtual time, with one order of events for each seed: the same submissions and pauses of one thread give the same
    /// [`trace`](Self::trace). Time advances in [`Submit::pause`], to what happens next but not beyond
    /// its deadline, and a little (100 ns) with each descriptor in [`Submit::submit`]; [`Submit::now`] only reads it.
    pub fn deterministic(config: &Config) -> Self {
        Self::new(config, Time::Virtual)
    }

    /// Real time. What is due is done in calls of `submit`, `pause` and `now`, by whichever thread calls; nothing
    /// completes without such calls.
    pub fn timed(config: &Config) -> Self {
        Self::new(config, Time::Real)
    }

    fn new(config: &Config, time: Time) -> Self {
        Self {
            driver: Arc::new(Driver::new(Machine::new(config), time)),
        }
    }

    /// Opens a work queue. Each call is another process on it; dropping the handle closes it. The handle of a queue
    /// that cannot be opened (it does not exist, or its device is disabled or gone)
    /// refuses everything with [`Refusal::System`](idxd::Refusal::System).
    pub fn queue(&self, device: usize, queue: usize, portal: PortalKind) -> Arc<dyn Submit> {
        let (client, limits) = match self.driver.lock().open(device, queue) {
            Some((client, limits)) => (Some(client), limits),
            None => (None, config::typical(Kind::Dsa)),
        };
        Arc::new(Handle {
            driver: Arc::clone(&self.driver),
            client,
            portal,
            limits,
        })
    }

    /// Pages of this process's memory, as devices see them.
    pub fn pages(&self) -> &Pages {
        self.driver.pages()
    }

    /// Injects `fault` into descriptors that match `on`: not into the first `skip`, but into the `times` after them, counted
    /// when an engine fetches them. Earlier injections take precedence.
    pub fn inject(&self, on: On, skip: u32, times: u32, fault: InjectedFault) {
        self.driver.lock().script(on, skip, times, fault);
    }

    /// Makes a work queue report `times` times that it is full; [`u32::MAX`] is for ever, 0 ends it. With
    /// [`PortalKind::Write`] each of the kernel's tries counts.
    pub fn refuse(&self, device: usize, queue: usize, times: u32) {
        let mut machine = self.driver.lock();
        let device = machine.devices.get_mut(device);
        if let Some(queue) = device.and_then(|device| device.queues.get_mut(queue)) {
            queue.full = times;
        }
    }

    /// Resets and disables a device, as after an error that halts it. Outstanding descriptors are dropped, and their records
    /// are never written. Earlier handles stay dead: their queues look full.
    pub fn reset(&self, device: usize) {
        let mut machine = self.driver.lock();
        if let Some(here) = machine.devices.get_mut(device) {
            here.enabled = false;
            machine.reset(device);
        }
    }

    /// Enables a device again, whose work queues can then be opened again.
    pub fn enable(&self, device: usize) {
        if let Some(here) = self.driver.lock().devices.get_mut(device) {
            here.enabled = true;
        }
    }

    /// Removes the device, which never answers and cannot be opened again. Submissions end with
    /// [`Refusal::System`](idxd::Refusal::System) (ENODEV).
    pub fn unplug(&self, device: usize) {
        let mut machine = self.driver.lock();
        if let Some(here) = machine.devices.get_mut(device) {
            here.unplugged = true;
            machine.reset(device);
        }
    }

    /// Makes this process a forked child with regard to all open queues: their submissions end with
    /// [`Refusal::Forked`](idxd::Refusal::Forked).
    pub fn fork(&self) {
        for client in &mut self.driver.lock().clients {
            client.forked = true;
        }
    }

    /// Counters.
    pub fn statistics(&self) -> Statistics {
        self.driver.lock().statistics
    }

    /// A hash of all events in their order: the same for the same configuration and the same calls, if the model is
    /// [`deterministic`](Self::deterministic).
    pub fn trace(&self) -> u64 {
        self.driver.lock().trace.finish()
    }

    /// The time of the queues' [`Submit::now`].
    pub fn now(&self) -> Duration {
        self.driver.now()
    }
}

/// A time in nanoseconds, at most 584 years.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
