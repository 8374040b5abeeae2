//! A guest, from its first write to its proof.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    config::{Config, ConfigError, Kind},
    kvm::{KvmError, Slot, Vm},
    memory::Memory,
    pacer::Pacer,
    stamp::{self, Course, Progress},
    state::{self, LoadError},
    vcpu::{self, Control, Failure, Shared, Vcpu, Writer, lock},
};

/// A guest that writes memory, and can prove what it wrote.
///
/// All methods may be called from several threads. Dropping it ends its threads; clones of the memory stay.
pub struct Guest {
    config: Config,
    vm: Option<Vm>,
    vcpus: Vec<Shared>,
    control: Arc<Control>,
    threads: Vec<JoinHandle<()>>,
    /// An [`incoming`](Guest::incoming) guest that has not loaded its state.
    waiting: AtomicBool,
    /// Allows one change of state at a time.
    changing: Mutex<()>,
}

/// A guest that cannot be created, or cannot do what was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum GuestError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error("cannot start the thread of a vCPU")]
    Thread(#[source] io::Error),
    #[error("the guest is running: pause it first")]
    Running,
    #[error("the guest waits for its state: load it first")]
    Waiting,
    #[error("vCPU {vcpu} has failed: {reason}")]
    Failed { vcpu: u8, reason: String },
}

/// Memory that differs from what the guest wrote, or a guest that cannot be verified.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum VerifyError {
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// Some page is not what the vCPU last wrote to it.
    #[error(
        "the words of vCPU {vcpu} have the sum {memory:#x}, and it wrote {register:#x}: \
         pages were lost, are old, or in another place"
    )]
    Sum {
        vcpu: u8,
        memory: u64,
        register: u64,
    },
    /// vCPUs that wrote less or more than was requested.
    #[error("the vCPUs count {vcpus} writes, of {host} requested ones")]
    Writes { vcpus: u64, host: u64 },
}

/// Proof that the memory is what the vCPUs wrote. It is equal for a saved guest and the guest that loaded it, until one resumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// Writes of pages since the guest began, on any host.
    pub writes: u64,
    /// Each vCPU's sum over its words.
    pub sums: Vec<u64>,
}

impl Guest {
    /// A paused guest before its first write. Its sums begin with the present content of the working set.
    ///
    /// # Errors
    /// When the configuration is wrong, or the host does not have what it needs.
    pub fn new(config: &Config) -> Result<Self, GuestError> {
        Self::build(config, false)
    }

    /// A guest that waits for the memory and the state of another guest. From now on its memory may be written.
    ///
    /// # Errors
    /// As [`Guest::new`].
    pub fn incoming(config: &Config) -> Result<Self, GuestError> {
        Self::build(config, true)
    }

    /// Lets the vCPUs write, for the first time or again.
    ///
    /// # Errors
    /// When it waits for its state, or a vCPU has failed.
    pub fn resume(&self) -> Result<(), GuestError> {
        let _changing = lock(&self.changing);
        self.check_whole()?;
        self.control.resume();
        Ok(())
    }

    /// Returns when all vCPUs have left guest mode and nothing writes any more: within milliseconds, or at once if the guest is
    /// already paused.
    pub fn pause(&self) {
        let _changing = lock(&self.changing);
        self.control.pause();
    }

    /// Whether it may write: from [`resume`](Self::resume) to [`pause`](Self::pause).
    pub fn is_running(&self) -> bool {
        self.control.is_running()
    }

    /// Keeps the vCPUs from running for `percent` of the time, at most 99, in slices of milliseconds. 0 is full speed. The throttle
    /// is not part of a saved state.
    pub fn throttle(&self, percent: u8) {
        let percent = percent.min(99);
        self.control.throttle.store(percent, Ordering::Relaxed);
    }

    /// The throttle in percent.
    pub fn throttled(&self) -> u8 {
        self.control.throttle.load(Ordering::Relaxed)
    }

    /// Writes of pages since the guest began, on any host: exact while it is paused, up to a batch per vCPU behind while it runs.
    pub fn written(&self) -> u64 {
        self.control.written.load(Ordering::Relaxed)
    }

    /// The state of a paused guest without its memory: less than 3 KiB for each vCPU.
    ///
    /// # Errors
    /// When it is running, waits for its state itself, or a vCPU has failed.
    pub fn save(&self) -> Result<Vec<u8>, GuestError> {
        let _changing = lock(&self.changing);
        self.check_at_rest()?;
        let states: Result<Vec<_>, _> = self.vcpus.iter().map(|vcpu| lock(vcpu).save()).collect();
        Ok(state::encode(state::describe(&self.config), states?))
    }

    /// Loads the `state` of a guest whose memory is already in this one's. Then this guest is paused where the other one was. After
    /// an error it still waits.
    ///
    /// # Errors
    /// When it does not wait for a state, when `state` is from a guest of another configuration (rate and backing may differ), or
    /// when the memory is not that guest's.
    pub fn load(&self, state: &[u8]) -> Result<(), LoadError> {
        let _changing = lock(&self.changing);
        if !self.waiting.load(Ordering::Relaxed) {
            return Err(LoadError::NotWaiting);
        }
        let states = state::decode(state, state::describe(&self.config))?;
        if states.len() != self.vcpus.len() {
            return Err(LoadError::Damaged);
        }
        if let Some(address) = self.vm.as_ref().and_then(Vm::damaged_image) {
            return Err(LoadError::Code { address });
        }
        let mut writes = 0_u64;
        for (index, (vcpu, state)) in (0..).zip(self.vcpus.iter().zip(states)) {
            let mut vcpu = lock(vcpu);
            vcpu.load(&state).map_err(|reason| LoadError::Vcpu {
                vcpu: index,
                reason,
            })?;
            writes = writes.wrapping_add(vcpu.progress().writes);
        }
        self.control.written.store(writes, Ordering::Relaxed);
        self.waiting.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Reads the working set of a paused guest, and compares it with what the vCPUs have recorded.
    ///
    /// # Errors
    /// When they differ, the guest is running, waits for its state, or a vCPU has failed.
    pub fn verify(&self) -> Result<Proof, VerifyError> {
        let _changing = lock(&self.changing);
        self.check_at_rest()?;
        let sums = stamp::sums(&self.config);
        let mut writes = 0_u64;
        for (index, (vcpu, memory)) in (0..).zip(self.vcpus.iter().zip(&sums)) {
            let progress = lock(vcpu).progress();
            if *memory != progress.sum {
                return Err(VerifyError::Sum {
                    vcpu: index,
                    memory: *memory,
                    register: progress.sum,
                });
            }
            writes = writes.wrapping_add(progress.writes);
        }
        let host = self.written();
        if writes != host {
            return Err(VerifyError::Writes {
                vcpus: writes,
                host,
            });
        }
        Ok(Proof { writes, sums })
    }

    /// Why a vCPU has ended, if one has. The others run until they are paused.
    pub fn failure(&self) -> Option<GuestError> {
        let Failure { vcpu, reason } = self.control.failure()?;
        Some(GuestError::Failed { vcpu, reason })
    }

    /// Its memory, whose blocks are to be migrated.
    pub fn memory(&self) -> &Memory {
        &self.config.memory
    }

    /// The virtual machine's descriptor, for a dirty log; `None` without KVM.
    pub fn vm_fd(&self) -> Option<BorrowedFd<'_>> {
        self.vm.as_ref().map(Vm::fd)
    }

    /// The virtual machine's memory slots, for a dirty log; empty without KVM.
    pub fn slots(&self) -> &[Slot] {
        self.vm.as_ref().map_or(&[], Vm::slots)
    }

    fn build(config: &Config, waiting: bool) -> Result<Self, GuestError> {
        config.check()?;
        let vm = match config.kind {
            Kind::Kvm => Some(Vm::new(&config.memory)?),
            Kind::Threads => None,
        };
        let sums = match waiting {
            true => vec![0; config.vcpus.into()],
            false => stamp::sums(config),
        };
        let vcpus = (0..)
            .zip(sums)
            .map(|(index, sum)| {
                let course = Course::new(config, index);
                let progress = Progress::new(&course, index, config.vcpus, sum);
                let vcpu: Box<dyn Vcpu> = match &vm {
                    Some(vm) => vm.vcpu(index, course, &progress)?,
                    None => Box::new(Writer {
                        memory: config.memory.clone(),
                        course,
                        progress,
                    }),
                };
                Ok(Arc::new(Mutex::new(vcpu)))
            })
            .collect::<Result<Vec<Shared>, KvmError>>()?;
        let mut guest = Self {
            config: config.clone(),
            control: Arc::new(Control::new(config.vcpus)),
            vm,
            vcpus,
            threads: Vec::new(),
            waiting: AtomicBool::new(waiting),
            changing: Mutex::new(()),
        };
        guest.spawn()?;
        Ok(guest)
    }

    #[allow(
        clippy::cast_precision_loss,
        reason = "a rate of more than 2⁵³ writes per second is none"
    )]
    fn spawn(&mut self) -> Result<(), GuestError> {
        let share = self
            .config
            .rate
            .map(|rate| rate.get() as f64 / f64::from(self.config.vcpus));
        for (index, vcpu) in (0..).zip(&self.vcpus) {
            let (vcpu, control) = (Arc::clone(vcpu), Arc::clone(&self.control));
            let thread = thread::Builder::new()
                .name(format!("vcpu {index}"))
                .spawn(move || vcpu::run(index, &vcpu, &control, Pacer::new(share)))
                .map_err(GuestError::Thread)?;
            self.threads.push(thread);
        }
        Ok(())
    }

    fn check_at_rest(&self) -> Result<(), GuestError> {
        if self.is_running() {
            return Err(GuestError::Running);
        }
        self.check_whole()
    }

    fn check_whole(&self) -> Result<(), GuestError> {
        if self.waiting.load(Ordering::Relaxed) {
            return Err(GuestError::Waiting);
        }
        self.failure().map_or(Ok(()), Err)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.control.end();
        for thread in self.threads.drain(..) {
            // A thread that panicked has printed why.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Backing, PAGE};

    #[test]
    fn memory_that_was_never_touched_stays_so() {
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let memory = Memory::new(backing, 64 << 20).unwrap();
            let guest = Guest::new(&Config::new(Kind::Threads, memory.clone())).unwrap();
            guest.verify().unwrap();
            assert_eq!(memory.touched(&(0..memory.len())), [], "{backing:?}");
        }
    }

    #[test]
    fn a_vcpu_that_ended_is_reported_and_does_not_block_the_others() {
        /// Fails at its third batch.
        struct Failing(u32);
        impl Vcpu for Failing {
            fn run(&mut self, _writes: u32) -> Result<(), KvmError> {
                self.0 += 1;
                if self.0 < 3 {
                    Ok(())
                } else {
                    Err(KvmError::OutsideMemory)
                }
            }
            fn progress(&self) -> Progress {
                unreachable!("a failed guest is not asked")
            }
            fn save(&self) -> Result<Vec<u8>, KvmError> {
                unreachable!("a failed guest is not asked")
            }
            fn load(&mut self, _state: &[u8]) -> Result<(), String> {
                unreachable!("a failed guest is not asked")
            }
        }
        let memory = Memory::new(Backing::Anonymous, 16 * PAGE).unwrap();
        let mut config = Config::new(Kind::Threads, memory);
        config.vcpus = 2;
        let guest = Guest::new(&config).unwrap();
        *lock(&guest.vcpus[1]) = Box::new(Failing(0));
        guest.resume().unwrap();
        while guest.failure().is_none() {
            thread::yield_now();
        }
        guest.pause();
        let failed =
            |error: &GuestError| matches!(error, GuestError::Failed { vcpu: 1, reason: _ });
        assert!(failed(&guest.save().unwrap_err()));
        assert!(failed(&guest.resume().unwrap_err()));
        assert!(matches!(guest.verify(), Err(VerifyError::Guest(error)) if failed(&error)));
    }
}
