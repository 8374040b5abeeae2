//! The threads of vCPUs, which run while the guest does.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result};
use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::{
    memory::Memory,
    pacer::Pacer,
    stamp::{Course, Progress},
};

/// A vCPU between two batches.
pub(crate) trait Vcpu: Send {
    /// Writes to `writes` pages, at least 1.
    fn run(&mut self, writes: u32) -> Result<()>;

    /// Its progress.
    fn progress(&self) -> Progress;

    /// All of its state.
    fn save(&self) -> Result<Vec<u8>>;

    /// Restores the result of [`save`](Vcpu::save).
    fn load(&mut self, state: &[u8]) -> Result<()>;
}

/// A vCPU of [`Kind::Threads`](crate::Kind::Threads).
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) memory: Memory,
    pub(crate) course: Course,
    pub(crate) progress: Progress,
}

/// What the threads and the guest's owner share.
#[derive(Debug, Default)]
pub(crate) struct Control {
    /// The threads have to end.
    pub(crate) stop: AtomicBool,
    /// Percent, 0 to 99.
    pub(crate) throttle: AtomicU8,
    /// Writes of pages.
    pub(crate) written: AtomicU64,
    /// Why a vCPU has ended.
    pub(crate) failure: Mutex<Option<String>>,
}

/// The thread of vCPU `index` from a resume to a pause: runs batches until it has to stop or a batch fails.
pub(crate) fn run(index: u8, vcpu: &Mutex<Box<dyn Vcpu>>, control: &Control, mut pacer: Pacer) {
    while !control.stop.load(Ordering::Acquire) {
        if let Some(delay) = pacer.delay(Instant::now()) {
            // A pause unparks the thread.
            thread::park_timeout(delay);
        } else if let Err(error) = batch(vcpu, control, &mut pacer) {
            let failure = || format!("vCPU {index} has failed: {error:#}");
            lock(&control.failure).get_or_insert_with(failure);
            return;
        }
    }
}

fn batch(vcpu: &Mutex<Box<dyn Vcpu>>, control: &Control, pacer: &mut Pacer) -> Result<()> {
    let writes = pacer.batch();
    let started = Instant::now();
    lock(vcpu).run(writes)?;
    control
        .written
        .fetch_add(u64::from(writes), Ordering::Relaxed);
    let throttle = control.throttle.load(Ordering::Relaxed);
    pacer.ran(started, Instant::now(), throttle);
    Ok(())
}

/// Locks a mutex. A thread that panicked left nothing incomplete.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A vCPU, shared by its thread and the guest's owner.
pub(crate) type Shared = Arc<Mutex<Box<dyn Vcpu>>>;

impl Vcpu for Writer {
    fn run(&mut self, writes: u32) -> Result<()> {
        for _ in 0..writes {
            let written = self.course.write(&self.memory, &mut self.progress);
            written.context("a write outside of the memory: the vCPU's state is damaged")?;
        }
        Ok(())
    }

    fn progress(&self) -> Progress {
        self.progress
    }

    fn save(&self) -> Result<Vec<u8>> {
        Ok(self.progress.as_bytes().to_vec())
    }

    fn load(&mut self, state: &[u8]) -> Result<()> {
        let progress = Progress::read_from_bytes(state).ok();
        let progress = progress.context("no state of this kind of vCPU")?;
        progress.check(&self.course)?;
        self.progress = progress;
        Ok(())
    }
}
