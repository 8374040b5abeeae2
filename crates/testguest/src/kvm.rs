//! vCPUs under KVM: a virtual machine that has memory, vCPUs in 64-bit mode, and nothing else.
//!
//! The guest's memory begins with an image that never changes, all of it below the working set:
//!
//! ```text
//!  0x0000  code          0x2000  PDPT
//!  0x1000  PML4          0x3000  page directories, one for each GiB of memory
//! ```
//!
//! The page tables map all blocks one after another (see the [crate](crate#addresses)), in pages of 2 MiB that are already marked
//! as accessed and dirty, so that the CPU writes nothing there. All state of a vCPU is in its registers. A batch begins after the
//! HLT that ended the previous one, with the number of writes in RCX. HLT is a vCPU's only exit, so no instruction is incomplete.
//!
//! A KVM without hardware virtualisation (`kvm_pvm`) emulates the code instruction by instruction, correctly but slowly: a write
//! takes some 50 microseconds of CPU.

#![allow(
    unsafe_code,
    reason = "machine code as bytes, and memory that is given to KVM: the proofs are at the blocks"
)]

use std::{
    arch::global_asm,
    os::fd::{AsRawFd, BorrowedFd},
    slice,
};

use anyhow::{Context as _, Result, ensure};
use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::{
    memory::{LARGE_PAGE, Memory, PAGE},
    stamp::{Course, INCREMENT, MULTIPLIER, Progress, WORD_SHIFT},
    vcpu::Vcpu,
};

const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const DIRECTORIES: u64 = 0x3000;

/// Bytes mapped by a page directory.
const DIRECTORY: u64 = 1 << 30;

/// Where guest physical memory continues above a PC's hole for devices.
const HIGH: u64 = 4 << 30;

/// Where the hole begins.
const HOLE: u64 = 3 << 30;

/// The address after the HLT, which has one byte.
const BATCH_ENTRY: u64 = 1;

// `Course::write` in machine code. It is short because the KVM of some hosts emulates every instruction. Registers:
//   rcx  writes left in this batch           rsi  Course::first_word + 1   rbx  Progress::stamp
//   rax, rdx  scratch                        rdi  Course::pages            r12  Progress::cursor
//   r8   MULTIPLIER                          r13  Course::word_mask        r10  Progress::sum
//   r9   INCREMENT                           rbp  Course::sequential       r11  Progress::writes
global_asm!(
    ".pushsection .rodata.testguest, \"a\"",
    "TESTGUEST_CODE:",
    "    hlt", // the end of a batch
    "2:",      // BATCH_ENTRY
    "    imul rbx, r8",
    "    add  rbx, r9",
    "    test rbp, rbp",
    "    jz   3f",
    "    inc  r12", // sequential: the next page, behind the last one the first
    "    mov  rdx, r12",
    "    cmp  r12, rdi",
    "    jb   4f",
    "    xor  edx, edx",
    "    mov  r12, rdx",
    "    jmp  4f",
    "3:", // random: stamp × pages / 2⁶⁴
    "    mov  rax, rbx",
    "    mul  rdi",
    "4:",
    "    shl  rdx, 12",
    "    mov  rax, rbx",
    "    shr  rax, {word_shift}",
    "    and  rax, r13",
    "    add  rdx, rax",
    "    add  rdx, rsi", // rdx = address + 1
    "    mov  rax, [rdx - 1]",
    "    mov  [rdx - 1], rbx",
    "    sub  rax, rbx", // old - new
    "    imul rax, rdx",
    "    sub  r10, rax",
    "    inc  r11",
    "    dec  rcx",
    "    jnz  2b",
    "    jmp  TESTGUEST_CODE",
    "TESTGUEST_CODE_END:",
    ".popsection",
    word_shift = const WORD_SHIFT,
);

/// Checks that this host has KVM.
///
/// # Errors
/// What is missing.
pub fn kvm_available() -> Result<(), String> {
    create_vm().map(drop).map_err(|error| format!("{error:#}"))
}

/// A piece of a KVM guest's memory: the arguments of `KVM_SET_USER_MEMORY_REGION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its number.
    pub slot: u32,
    /// Its first guest physical address.
    pub guest_address: u64,
    /// The index of its block in [`Memory::blocks`].
    pub block: usize,
    /// Where in the block it begins, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Where it is mapped in this process.
    pub host_address: u64,
    /// `KVM_MEM_*`: none. A dirty log sets the slot again with its own flag.
    pub flags: u32,
}

/// A virtual machine.
pub(crate) struct Vm {
    fd: VmFd,
    slots: Vec<Slot>,
    /// Mapped for as long as KVM may use it.
    memory: Memory,
}

/// One of its vCPUs, between two batches.
struct KvmVcpu {
    fd: VcpuFd,
    /// Its registers; in KVM only while it runs.
    regs: kvm_regs,
    course: Course,
    /// Mapped for as long as the vCPU may run.
    _memory: Memory,
}

/// Size of the image in a guest's memory, in bytes.
pub(crate) fn reserved_bytes(memory: &Memory) -> u64 {
    DIRECTORIES + memory.len().div_ceil(DIRECTORY) * PAGE
}

impl Vm {
    /// Creates a machine with `memory`, and writes the image into the memory.
    pub(crate) fn new(memory: &Memory) -> Result<Self> {
        let least = reserved_bytes(memory);
        let len = memory.blocks().first().map_or(0, |block| block.range().end);
        ensure!(
            (least..=HOLE).contains(&len),
            "a KVM guest needs a first block of {least:#x} to {HOLE:#x} bytes, not of {len:#x}"
        );
        let vm = Self {
            fd: create_vm()?,
            slots: slots(memory),
            memory: memory.clone(),
        };
        for slot in &vm.slots {
            vm.set(slot)?;
        }
        for (address, word) in image(memory) {
            let stored = vm.memory.store(address, word);
            stored.context("the image is outside of the memory")?;
        }
        Ok(vm)
    }

    /// Creates vCPU `index`, on `course` and with this `progress`.
    pub(crate) fn vcpu(
        &self,
        index: u8,
        course: Course,
        progress: &Progress,
    ) -> Result<Box<dyn Vcpu>> {
        let fd = self.fd.create_vcpu(index.into());
        let fd = fd.context("KVM_CREATE_VCPU")?;
        // Without CPUID, a vCPU has 36 bits of physical addresses.
        let cpuid = open()?.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let cpuid = cpuid.context("KVM_GET_SUPPORTED_CPUID")?;
        fd.set_cpuid2(&cpuid).context("KVM_SET_CPUID2")?;
        let mut sregs = fd.get_sregs().context("KVM_GET_SREGS")?;
        enter_long_mode(&mut sregs);
        fd.set_sregs(&sregs).context("KVM_SET_SREGS")?;
        Ok(Box::new(KvmVcpu {
            fd,
            regs: registers(&course, progress),
            course,
            _memory: self.memory.clone(),
        }))
    }

    /// Its file descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open for as long as `self`, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.fd.as_raw_fd()) }
    }

    /// Its memory.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The first address at which the image is damaged.
    pub(crate) fn damaged_image(&self) -> Option<u64> {
        image(&self.memory)
            .into_iter()
            .find(|(address, word)| self.memory.load(*address) != Some(*word))
            .map(|(address, _)| address)
    }

    fn set(&self, slot: &Slot) -> Result<()> {
        let region = kvm_userspace_memory_region {
            slot: slot.slot,
            flags: slot.flags,
            guest_phys_addr: slot.guest_address,
            memory_size: slot.len,
            userspace_addr: slot.host_address,
        };
        // SAFETY: the slot is a mapping of `self.memory`, all of it, and there are no Rust references to its content.
        // Only vCPUs write to it through KVM, and each of them holds the mapping too.
        unsafe { self.fd.set_user_memory_region(region) }.context("KVM_SET_USER_MEMORY_REGION")
    }
}

impl Vcpu for KvmVcpu {
    fn run(&mut self, writes: u32) -> Result<()> {
        self.regs.rcx = writes.into();
        self.fd.set_regs(&self.regs).context("KVM_SET_REGS")?;
        let exit = loop {
            match self.fd.run() {
                Ok(VcpuExit::Hlt) => break None,
                Ok(exit) => break Some(format!("{exit:?}")),
                // A signal for this thread.
                Err(error) if matches!(error.errno(), INTERRUPTED | AGAIN) => {}
                Err(error) => return Err(error).context("KVM_RUN"),
            }
        };
        self.regs = self.fd.get_regs().context("KVM_GET_REGS")?;
        let (rip, left) = (self.regs.rip, self.regs.rcx);
        ensure!(
            exit.is_none() && rip == BATCH_ENTRY && left == 0,
            "the vCPU is out of its code, with {} at {rip:#x}: its memory or registers are damaged",
            exit.as_deref().unwrap_or("Hlt")
        );
        Ok(())
    }

    fn progress(&self) -> Progress {
        progress(&self.regs)
    }

    fn save(&self) -> Result<Vec<u8>> {
        let sregs = self.fd.get_sregs().context("KVM_GET_SREGS")?;
        Ok([self.regs.as_bytes(), sregs.as_bytes()].concat())
    }

    fn load(&mut self, state: &[u8]) -> Result<()> {
        /// The flags that arithmetic leaves behind.
        const ARITHMETIC: u64 = 0x8d5;
        let parts = kvm_regs::read_from_prefix(state).ok();
        let (regs, rest) = parts.context("no registers")?;
        let sregs = kvm_sregs::read_from_bytes(rest).ok();
        // With other registers, the vCPU would execute other instructions, or write elsewhere.
        let progress = progress(&regs);
        let expected = kvm_regs {
            rax: regs.rax,
            rdx: regs.rdx,
            rflags: regs.rflags,
            ..registers(&self.course, &progress)
        };
        ensure!(
            regs == expected && regs.rflags & !ARITHMETIC == RFLAGS,
            "the vCPU is not between two batches: {regs:x?}"
        );
        progress.check(&self.course)?;
        let own = self.fd.get_sregs().context("KVM_GET_SREGS")?;
        ensure!(
            sregs == Some(own),
            "the vCPU is in another mode than this crate's"
        );
        self.regs = regs;
        Ok(())
    }
}

/// The bit of RFLAGS that is always set; interrupts are off.
const RFLAGS: u64 = 2;

const INTERRUPTED: i32 = rustix::io::Errno::INTR.raw_os_error();
const AGAIN: i32 = rustix::io::Errno::AGAIN.raw_os_error();

fn open() -> Result<Kvm> {
    Kvm::new().context("opening /dev/kvm")
}

fn create_vm() -> Result<VmFd> {
    open()?.create_vm().context("KVM_CREATE_VM")
}

fn slots(memory: &Memory) -> Vec<Slot> {
    let mut high = HIGH;
    (0..)
        .zip(memory.blocks())
        .enumerate()
        .map(|(block, (slot, of_block))| {
            let len = of_block.region().size() as u64;
            let guest_address = if block == 0 { 0 } else { high };
            if block > 0 {
                high += len;
            }
            Slot {
                slot,
                guest_address,
                block,
                offset: 0,
                len,
                host_address: of_block.region().as_ptr().addr() as u64,
                flags: 0,
            }
        })
        .collect()
}

/// The words at the start of the memory that are not zero: code and page tables.
fn image(memory: &Memory) -> Vec<(u64, u64)> {
    /// Present, writable, accessed.
    const TABLE: u64 = 0b10_0011;
    /// The same, dirty, and a large page.
    const LEAF: u64 = 0b1110_0011;
    let mut image: Vec<_> = (0..)
        .step_by(8)
        .zip(code().chunks(8).map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        }))
        .collect();
    image.push((PML4, PDPT | TABLE));
    for number in 0..memory.len().div_ceil(DIRECTORY) {
        image.push((PDPT + number * 8, (DIRECTORIES + number * PAGE) | TABLE));
    }
    let frames = slots(memory).into_iter().flat_map(|slot| {
        (0..slot.len.div_ceil(LARGE_PAGE))
            .map(move |number| slot.guest_address + number * LARGE_PAGE)
    });
    // The directories are one array.
    image.extend(
        (DIRECTORIES..)
            .step_by(8)
            .zip(frames.map(|frame| frame | LEAF)),
    );
    image
}

fn code() -> &'static [u8] {
    unsafe extern "C" {
        static TESTGUEST_CODE: u8;
        static TESTGUEST_CODE_END: u8;
    }
    let start = &raw const TESTGUEST_CODE;
    let len = (&raw const TESTGUEST_CODE_END).addr() - start.addr();
    // SAFETY: the `global_asm!` above defines both symbols in one read-only section, with nothing but the code's
    // `len` bytes between them.
    unsafe { slice::from_raw_parts(start, len) }
}

/// 64-bit mode with the image's page tables. There is no GDT and no IDT: any fault is a triple fault, which ends the vCPU.
fn enter_long_mode(sregs: &mut kvm_sregs) {
    const CR0_PE_WP_PG: u64 = 1 | 1 << 16 | 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    const CODE: u8 = 0xb;
    const DATA: u8 = 0x3;
    let segment = |type_, long: bool| kvm_segment {
        limit: u32::MAX,
        type_,
        present: 1,
        s: 1,
        l: long.into(),
        db: (!long).into(),
        g: 1,
        ..kvm_segment::default()
    };
    sregs.cs = segment(CODE, true);
    sregs.ds = segment(DATA, false);
    sregs.es = sregs.ds;
    sregs.fs = sregs.ds;
    sregs.gs = sregs.ds;
    sregs.ss = sregs.ds;
    sregs.cr0 |= CR0_PE_WP_PG;
    sregs.cr3 = PML4;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME_LMA;
}

fn progress(regs: &kvm_regs) -> Progress {
    Progress {
        stamp: regs.rbx,
        cursor: regs.r12,
        sum: regs.r10,
        writes: regs.r11,
    }
}

/// The registers of a vCPU between two batches.
fn registers(course: &Course, progress: &Progress) -> kvm_regs {
    kvm_regs {
        rip: BATCH_ENTRY,
        rflags: RFLAGS,
        rsi: course.first_word + 1,
        rdi: course.pages,
        r8: MULTIPLIER,
        r9: INCREMENT,
        r13: course.word_mask,
        rbp: course.sequential.into(),
        rbx: progress.stamp,
        r12: progress.cursor,
        r10: progress.sum,
        r11: progress.writes,
        ..kvm_regs::default()
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;

    use super::*;
    use crate::{
        config::{Config, Kind, Pattern},
        memory::{Backing, PAGE_BYTES},
        stamp,
        vcpu::Writer,
    };

    /// Whether there is KVM. Without, says so.
    fn kvm() -> bool {
        let Err(reason) = kvm_available() else {
            return true;
        };
        lab::skipped(&format!("no KVM: {reason}")).unwrap();
        false
    }

    fn config(bytes: u64, pattern: Pattern, vcpus: u8) -> Config {
        let memory = Memory::new(Backing::Anonymous, bytes).unwrap();
        Config {
            pattern,
            vcpus,
            ..Config::new(Kind::Kvm, memory)
        }
    }

    fn progress(config: &Config, index: u8) -> (Course, Progress) {
        config.check().unwrap();
        let course = Course::new(config, index);
        let sum = stamp::sums(config)[usize::from(index)];
        (course, Progress::new(&course, index, config.vcpus, sum))
    }

    #[test]
    fn the_machine_code_does_what_the_rust_code_does() {
        if !kvm() {
            return;
        }
        for pattern in [Pattern::Sequential, Pattern::Random] {
            for vcpus in [1, 3, 8] {
                // Few pages around the border of the blocks, so that the sequence comes round.
                let around = |mut config: Config| {
                    config.working_set = Some((2 << 20) - 50 * PAGE..(2 << 20) + 50 * PAGE);
                    config
                };
                let ours = around(config(8 << 20, pattern, vcpus));
                let model = around(config(8 << 20, pattern, vcpus));
                let vm = Vm::new(&ours.memory).unwrap();
                // The image is no writer's.
                Vm::new(&model.memory).unwrap();
                for index in 0..vcpus {
                    let (course, before) = progress(&ours, index);
                    let mut vcpu = vm.vcpu(index, course, &before).unwrap();
                    let mut writer = Writer {
                        memory: model.memory.clone(),
                        course,
                        progress: before,
                    };
                    for writes in [1, 2, 300] {
                        vcpu.run(writes).unwrap();
                        writer.run(writes).unwrap();
                        assert_eq!(vcpu.progress(), writer.progress(), "{pattern:?} {vcpus}");
                    }
                }
                let words = (0..ours.memory.len()).step_by(8);
                let different = words
                    .map(|at| (at, ours.memory.load(at), model.memory.load(at)))
                    .find(|(_, a, b)| a != b);
                assert_eq!(different, None, "{pattern:?} {vcpus}");
            }
        }
    }

    #[test]
    fn a_dirty_log_on_the_slots_finds_the_pages_written_and_no_others() {
        if !kvm() {
            return;
        }
        let config = config(16 << 20, Pattern::Random, 1);
        let mut vm = Vm::new(&config.memory).unwrap();
        assert_eq!(vm.slots().len(), 2);
        let (course, before) = progress(&config, 0);
        let mut vcpu = vm.vcpu(0, course, &before).unwrap();
        // Its pages are mapped for writing before the log begins.
        vcpu.run(500).unwrap();
        for slot in &mut vm.slots {
            slot.flags = KVM_MEM_LOG_DIRTY_PAGES;
        }
        for slot in vm.slots() {
            vm.set(slot).unwrap();
        }
        let before: Vec<_> = pages(&config.memory);
        vcpu.run(500).unwrap();
        let after = pages(&config.memory);
        let changed: Vec<_> = (0..after.len())
            .filter(|page| before[*page] != after[*page])
            .collect();
        let mut logged = Vec::new();
        for slot in vm.slots() {
            let len = usize::try_from(slot.len).unwrap();
            let first = usize::try_from(config.memory.blocks()[slot.block].range().start / PAGE);
            let bitmap = vm.fd.get_dirty_log(slot.slot, len).unwrap();
            let pages = (0..len / 4096).filter(|page| bitmap[page / 64] >> (page % 64) & 1 == 1);
            logged.extend(pages.map(|page| first.unwrap() + page));
        }
        assert!(changed.len() > 400);
        assert_eq!(logged, changed);
    }

    fn pages(memory: &Memory) -> Vec<Vec<u8>> {
        (0..memory.len())
            .step_by(4096)
            .map(|at| {
                let mut page = vec![0; 4096];
                memory.slice(at, 4096).unwrap().copy_to(&mut page);
                page
            })
            .collect()
    }

    #[test]
    fn damaged_code_ends_the_vcpu_with_an_error() {
        if !kvm() {
            return;
        }
        let config = config(8 << 20, Pattern::Random, 1);
        let vm = Vm::new(&config.memory).unwrap();
        let (course, before) = progress(&config, 0);
        let mut vcpu = vm.vcpu(0, course, &before).unwrap();
        assert_eq!(vm.damaged_image(), None);
        // UD2, without an IDT.
        config.memory.store(0, 0x0b0f_0b0f_0b0f_0b0f).unwrap();
        assert_eq!(vm.damaged_image(), Some(0));
        let error = vcpu.run(1).unwrap_err();
        assert!(error.to_string().contains("out of its code"), "{error}");
    }

    #[test]
    fn registers_that_lead_elsewhere_are_refused() {
        if !kvm() {
            return;
        }
        let config = config(8 << 20, Pattern::Sequential, 2);
        let vm = Vm::new(&config.memory).unwrap();
        let (course, before) = progress(&config, 0);
        let mut vcpu = vm.vcpu(0, course, &before).unwrap();
        vcpu.run(100).unwrap();
        let (mut regs, sregs) = {
            let state = vcpu.save().unwrap();
            let (regs, rest) = kvm_regs::read_from_prefix(&state).unwrap();
            (regs, kvm_sregs::read_from_bytes(rest).unwrap())
        };
        let mut load = |regs: &kvm_regs, sregs: &kvm_sregs| {
            vcpu.load(&[regs.as_bytes(), sregs.as_bytes()].concat())
        };
        load(&regs, &sregs).unwrap();
        let changes: [fn(&mut kvm_regs); 6] = [
            |regs| regs.rip = 0,
            |regs| regs.rsi += 8,
            |regs| regs.rdi += 1,
            |regs| regs.r12 = regs.rdi,
            |regs| regs.rcx = u64::MAX,
            |regs| regs.rflags |= 1 << 8,
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut changed = regs;
            change(&mut changed);
            assert!(load(&changed, &sregs).is_err(), "change {number}");
        }
        assert!(load(&regs, &kvm_sregs { cr3: 0, ..sregs }).is_err());
        regs.rax = 17;
        load(&regs, &sregs).unwrap();
    }

    #[test]
    fn memory_beyond_4_gib_has_one_range_of_addresses() {
        if !kvm() {
            return;
        }
        // Never touched but for the pages that are written.
        let mut config = config(6 << 30, Pattern::Sequential, 1);
        config.working_set = Some((1 << 30) - 8 * PAGE..(1 << 30) + 8 * PAGE);
        let vm = Vm::new(&config.memory).unwrap();
        assert_eq!(vm.slots()[1].guest_address, 4 << 30);
        let (course, before) = progress(&config, 0);
        let mut vcpu = vm.vcpu(0, course, &before).unwrap();
        vcpu.run(16).unwrap();
        let written = |address| {
            let mut page = [0; PAGE_BYTES];
            let slice = config.memory.slice(address, page.len()).unwrap();
            slice.copy_to(&mut page);
            page != [0; PAGE_BYTES]
        };
        for page in 0..16 {
            assert!(written((1 << 30) - 8 * PAGE + page * PAGE), "{page}");
        }
        let last = (6 << 30) - PAGE;
        let mut config = config.clone();
        config.working_set = Some(last..6 << 30);
        let (course, before) = progress(&config, 0);
        let mut vcpu = vm.vcpu(1, course, &before).unwrap();
        vcpu.run(1).unwrap();
        assert!(written(last));
    }

    #[test]
    fn memory_too_small_for_the_image_is_refused() {
        let memory = Memory::new(Backing::Anonymous, PAGE).unwrap();
        let error = Config::new(Kind::Kvm, memory.clone()).check().unwrap_err();
        assert!(error.to_string().contains("working set"), "{error}");
        let error = Vm::new(&memory).err().unwrap();
        assert!(error.to_string().contains("not of 0x1000"), "{error}");
    }
}
