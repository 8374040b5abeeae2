//! A guest, from its first write to its proof.

use std::{
    mem,
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, MutexGuard, atomic::Ordering},
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Error, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::{
    config::{Config, Kind},
    kvm::{Slot, Vm},
    memory::Memory,
    pacer::Pacer,
    stamp::{self, Course, Progress},
    state,
    vcpu::{self, Control, Shared, Vcpu, Writer, lock},
};

/// A guest that writes memory, and can prove what it wrote.
///
/// All methods may be called from several threads. The threads of the vCPUs end on drop; clones of the memory stay valid.
pub struct Guest {
    config: Config,
    vm: Option<Vm>,
    vcpus: Vec<Shared>,
    control: Arc<Control>,
    /// Locked during a change of phase, one at a time.
    phase: Mutex<Phase>,
}

enum Phase {
    /// An [`incoming`](Guest::incoming) guest that has not loaded its state.
    Waiting,
    Paused,
    /// With the threads of its vCPUs.
    Running(Vec<JoinHandle<()>>),
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
    /// Creates a paused guest. Its sums begin with the present content of the working set.
    ///
    /// # Errors
    /// If the configuration is not valid, or the host lacks something that the guest needs.
    pub fn new(config: &Config) -> Result<Self> {
        Self::build(config, Phase::Paused)
    }

    /// Creates a guest that waits for the memory and the state of another guest. From now on its memory may be written.
    ///
    /// # Errors
    /// As [`Guest::new`].
    pub fn incoming(config: &Config) -> Result<Self> {
        Self::build(config, Phase::Waiting)
    }

    /// Lets the vCPUs write, for the first time or again.
    ///
    /// # Errors
    /// If the guest waits for its state, or a vCPU has failed.
    pub fn resume(&self) -> Result<()> {
        let mut phase = lock(&self.phase);
        ensure!(!matches!(*phase, Phase::Waiting), WAITING);
        self.failure().map_or(Ok(()), Err)?;
        if matches!(*phase, Phase::Paused) {
            *phase = Phase::Running(self.start()?);
        }
        Ok(())
    }

    /// Returns when all vCPUs have left guest mode and nothing writes any more: within milliseconds, or at once if the guest is
    /// already paused.
    pub fn pause(&self) {
        let mut phase = lock(&self.phase);
        if let Phase::Running(threads) = &mut *phase {
            self.stop(mem::take(threads));
            *phase = Phase::Paused;
        }
    }

    /// Whether the guest may write: from [`resume`](Self::resume) to [`pause`](Self::pause).
    pub fn is_running(&self) -> bool {
        matches!(*lock(&self.phase), Phase::Running(_))
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
    /// If the guest is running, waits for its state itself, or a vCPU has failed.
    pub fn save(&self) -> Result<Vec<u8>> {
        let _phase = self.at_rest()?;
        let states: Result<Vec<_>, _> = self.vcpus.iter().map(|vcpu| lock(vcpu).save()).collect();
        Ok(state::encode(state::describe(&self.config), states?))
    }

    /// Loads the `state` of another guest, whose memory this guest's memory already contains. This guest is then paused where the
    /// other guest was. After an error it still waits.
    ///
    /// # Errors
    /// If this guest does not wait for a state, `state` is from a guest with another configuration (rate and backing may differ),
    /// or the memory is not that guest's.
    pub fn load(&self, state: &[u8]) -> Result<()> {
        let mut phase = lock(&self.phase);
        let is_waiting = matches!(*phase, Phase::Waiting);
        ensure!(is_waiting, "this guest does not wait for a state");
        let states = state::decode(state, &state::describe(&self.config))?;
        ensure!(
            states.len() == self.vcpus.len(),
            "a state of {} vCPUs",
            states.len()
        );
        if let Some(address) = self.vm.as_ref().and_then(Vm::damaged_image) {
            bail!(
                "the memory at {address:#x} does not hold the guest's code and page tables: migrate the memory first"
            );
        }
        let mut writes = 0_u64;
        for (index, (vcpu, state)) in self.vcpus.iter().zip(states).enumerate() {
            let mut vcpu = lock(vcpu);
            let loaded = vcpu.load(&state);
            loaded.with_context(|| format!("the state of vCPU {index} does not fit"))?;
            writes = writes.wrapping_add(vcpu.progress().writes);
        }
        self.control.written.store(writes, Ordering::Relaxed);
        *phase = Phase::Paused;
        Ok(())
    }

    /// Reads the working set of a paused guest, and compares it with the sums of the vCPUs.
    ///
    /// # Errors
    /// If they differ, the guest is running or waits for its state, or a vCPU has failed.
    pub fn verify(&self) -> Result<Proof> {
        let _phase = self.at_rest()?;
        let sums = stamp::sums(&self.config);
        let mut writes = 0_u64;
        for (index, (vcpu, memory)) in self.vcpus.iter().zip(&sums).enumerate() {
            let progress = lock(vcpu).progress();
            let register = progress.sum;
            ensure!(
                *memory == register,
                "the words of vCPU {index} have the sum {memory:#x}, and it wrote {register:#x}: \
                 pages were lost, are old, or in another place"
            );
            writes = writes.wrapping_add(progress.writes);
        }
        let host = self.written();
        ensure!(
            writes == host,
            "the vCPUs count {writes} writes, of {host} requested ones"
        );
        Ok(Proof { writes, sums })
    }

    /// Why a vCPU has ended, if one has. The others run until they are paused.
    pub fn failure(&self) -> Option<Error> {
        lock(&self.control.failure).clone().map(Error::msg)
    }

    /// The guest's memory, whose blocks are to be migrated.
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

    fn build(config: &Config, phase: Phase) -> Result<Self> {
        config.check()?;
        let vm = match config.kind {
            Kind::Kvm => Some(Vm::new(&config.memory)?),
            Kind::Threads => None,
        };
        let sums = match phase {
            Phase::Waiting => vec![0; config.vcpus.into()],
            _ => stamp::sums(config),
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
            .collect::<Result<Vec<Shared>>>()?;
        Ok(Self {
            config: config.clone(),
            control: Arc::default(),
            vm,
            vcpus,
            phase: Mutex::new(phase),
        })
    }

    /// Starts the threads of the vCPUs.
    fn start(&self) -> Result<Vec<JoinHandle<()>>> {
        let Config { rate, vcpus, .. } = self.config;
        let share = rate.map(|rate| rate.get() as f64 / f64::from(vcpus));
        self.control.stop.store(false, Ordering::Release);
        let mut threads = Vec::new();
        for (index, vcpu) in (0..).zip(&self.vcpus) {
            let (vcpu, control) = (Arc::clone(vcpu), Arc::clone(&self.control));
            let thread = thread::Builder::new()
                .name(format!("vcpu {index}"))
                .spawn(move || vcpu::run(index, &vcpu, &control, Pacer::new(share)));
            match thread {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    self.stop(threads);
                    return Err(error).context("cannot start the thread of a vCPU");
                }
            }
        }
        Ok(threads)
    }

    /// Returns when the threads have ended.
    fn stop(&self, threads: Vec<JoinHandle<()>>) {
        self.control.stop.store(true, Ordering::Release);
        threads.iter().for_each(|it| it.thread().unpark());
        for thread in threads {
            // A thread that panicked has printed the cause.
            let _ = thread.join();
        }
    }

    /// Checks that the guest is paused, and keeps it so.
    fn at_rest(&self) -> Result<MutexGuard<'_, Phase>> {
        let phase = lock(&self.phase);
        match *phase {
            Phase::Running(_) => bail!("the guest is running: pause it first"),
            Phase::Waiting => bail!(WAITING),
            Phase::Paused => self.failure().map_or(Ok(phase), Err),
        }
    }
}

const WAITING: &str = "the guest waits for its state: load it first";

impl Drop for Guest {
    fn drop(&mut self) {
        self.pause();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Backing, PAGE};

    #[test]
    fn untouched_memory_stays_untouched() {
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
            fn run(&mut self, _writes: u32) -> Result<()> {
                self.0 += 1;
                ensure!(self.0 < 3, "the third batch");
                Ok(())
            }
            fn progress(&self) -> Progress {
                unreachable!("a failed guest is not asked")
            }
            fn save(&self) -> Result<Vec<u8>> {
                unreachable!("a failed guest is not asked")
            }
            fn load(&mut self, _state: &[u8]) -> Result<()> {
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
        let errors = [
            guest.save().unwrap_err(),
            guest.resume().unwrap_err(),
            guest.verify().unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.to_string(), "vCPU 1 has failed: the third batch");
        }
    }
}
