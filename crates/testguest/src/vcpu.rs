//! The threads of vCPUs, which the guest's owner starts, pauses and ends.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
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

/// State shared by the threads and the guest's owner.
#[derive(Debug)]
pub(crate) struct Control {
    vcpus: u8,
    state: Mutex<State>,
    changed: Condvar,
    /// Percent, 0 to 99.
    pub(crate) throttle: AtomicU8,
    /// Writes of pages.
    pub(crate) written: AtomicU64,
}

#[derive(Debug)]
struct State {
    wanted: Wanted,
    /// Number of threads that do not write: paused or ended.
    parked: u8,
    /// Why a vCPU has ended.
    failure: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Pause,
    Run,
    End,
}

impl Control {
    /// Creates the state for `vcpus` threads, paused.
    pub(crate) fn new(vcpus: u8) -> Self {
        Self {
            vcpus,
            state: Mutex::new(State {
                wanted: Wanted::Pause,
                parked: vcpus,
                failure: None,
            }),
            changed: Condvar::new(),
            throttle: AtomicU8::new(0),
            written: AtomicU64::new(0),
        }
    }

    pub(crate) fn resume(&self) {
        self.want(Wanted::Run);
    }

    /// Returns when no vCPU writes any more.
    pub(crate) fn pause(&self) {
        self.want(Wanted::Pause);
        let state = lock(&self.state);
        let _state = self
            .changed
            .wait_while(state, |state| state.parked < self.vcpus);
    }

    /// Makes the threads end.
    pub(crate) fn end(&self) {
        self.want(Wanted::End);
    }

    pub(crate) fn is_running(&self) -> bool {
        lock(&self.state).wanted == Wanted::Run
    }

    pub(crate) fn failure(&self) -> Option<String> {
        lock(&self.state).failure.clone()
    }

    fn want(&self, wanted: Wanted) {
        lock(&self.state).wanted = wanted;
        self.changed.notify_all();
    }
}

/// The thread of vCPU `index`: runs batches until the owner ends it or a batch fails.
pub(crate) fn run(index: u8, vcpu: &Mutex<Box<dyn Vcpu>>, control: &Control, mut pacer: Pacer) {
    let mut state = lock(&control.state);
    // `Control::new` has counted this thread as parked.
    loop {
        let waited = control
            .changed
            .wait_while(state, |state| state.wanted == Wanted::Pause);
        state = waited.unwrap_or_else(PoisonError::into_inner);
        if state.wanted == Wanted::End {
            return;
        }
        state.parked -= 1;
        while state.wanted == Wanted::Run {
            if let Some(delay) = pacer.delay(Instant::now()) {
                state = control
                    .changed
                    .wait_timeout(state, delay)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            drop(state);
            let done = batch(vcpu, control, &mut pacer);
            state = lock(&control.state);
            if let Err(error) = done {
                let failure = || format!("vCPU {index} has failed: {error:#}");
                state.failure.get_or_insert_with(failure);
                park(&mut state, control);
                return;
            }
        }
        park(&mut state, control);
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

fn park(state: &mut State, control: &Control) {
    state.parked += 1;
    control.changed.notify_all();
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
