//! libvirt's client library, as far as an evacuation needs it: connections to hosts, their guests, and migrations.
//!
//! Nothing of it is needed to build or to start this program: [`load`] looks for libvirt.so.0 when it is first asked for. What is
//! used is there since libvirt 4.5. Where that is not installed, there is no libvirt to talk to either.
//!
//! Five rules make the unsafe blocks below sound:
//! 1. **The interface is that of libvirt.so.0**, which has not changed a function or a structure since it exists. Signatures and
//!    layouts are written down here once, without C headers.
//! 2. **The library is never unloaded**, so its functions stay where they are.
//! 3. **Connections and guests may be used by all threads** at once: libvirt promises that. Errors belong to the thread.
//! 4. **A guest holds its connection** by libvirt's own counting, so each is freed when it is dropped, in any order.
//! 5. **What libvirt gives is copied**, and freed as its documentation says, before a function here returns.

#![allow(
    unsafe_code,
    reason = "the boundary to a C library, loaded at run time"
)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_ulong, c_ulonglong, c_void},
    mem::ManuallyDrop,
    ptr::{self, NonNull},
    sync::OnceLock,
    thread,
};

use libloading::os::unix as dl;
use thiserror::Error;

/// What the library is called where it is installed.
const NAME: &str = "libvirt.so.0";

/// It cannot be loaded.
#[derive(Clone, Debug, Error)]
#[error(
    "libvirt's client library cannot be loaded ({0}): Debian has it in libvirt0, Fedora in libvirt-libs"
)]
pub(super) struct Absent(String);

/// A call of libvirt failed.
#[derive(Clone, Debug, Error)]
#[error("{message}")]
pub(super) struct Error {
    code: c_int,
    message: String,
}

pub(super) type Result<T> = std::result::Result<T, Error>;

/// What matters of an error to the one who decides what comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// There is no such guest.
    NoDomain,
    /// The migration was cancelled.
    Aborted,
    /// It fails in the same way each time.
    Permanent,
    Other,
}

impl Error {
    /// By the numbers of libvirt's `virErrorNumber`.
    pub(super) fn kind(&self) -> Kind {
        const NO_SUPPORT: c_int = 3;
        const INVALID_ARG: c_int = 8;
        const NO_DOMAIN: c_int = 42;
        const CONFIG_UNSUPPORTED: c_int = 67;
        const OPERATION_ABORTED: c_int = 78;
        const MIGRATE_UNSAFE: c_int = 81;
        match self.code {
            NO_DOMAIN => Kind::NoDomain,
            OPERATION_ABORTED => Kind::Aborted,
            NO_SUPPORT | INVALID_ARG | CONFIG_UNSUPPORTED | MIGRATE_UNSAFE => Kind::Permanent,
            _ => Kind::Other,
        }
    }
}

type Raw = *mut c_void;

macro_rules! functions {
    ($($function:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library, by their names there.
        #[allow(non_snake_case, reason = "the library's names")]
        #[derive(Debug)]
        struct Library {
            $($function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            /// # Safety
            /// `library` must be libvirt.so.0.
            unsafe fn resolve(library: &dl::Library) -> std::result::Result<Self, libloading::Error> {
                Ok(Self {
                    $(
                        // SAFETY: the field's type is that of the function (rule 1).
                        $function: *unsafe { library.get(stringify!($function).as_bytes()) }?,
                    )*
                })
            }
        }
    };
}

functions! {
    virInitialize() -> c_int;
    virSetErrorFunc(Raw, Option<unsafe extern "C" fn(Raw, Raw)>);
    virGetLastErrorMessage() -> *const c_char;
    virGetLastErrorCode() -> c_int;
    virEventRegisterDefaultImpl() -> c_int;
    virEventRunDefaultImpl() -> c_int;
    virConnectOpen(*const c_char) -> Raw;
    virConnectClose(Raw) -> c_int;
    virConnectIsAlive(Raw) -> c_int;
    virConnectSetKeepAlive(Raw, c_int, c_uint) -> c_int;
    virConnectGetCapabilities(Raw) -> *mut c_char;
    virConnectCompareCPU(Raw, *const c_char, c_uint) -> c_int;
    virConnectCompareHypervisorCPU(
        Raw, *const c_char, *const c_char, *const c_char, *const c_char, *const c_char, c_uint
    ) -> c_int;
    virConnectListAllDomains(Raw, *mut *mut Raw, c_uint) -> c_int;
    virNodeGetInfo(Raw, *mut NodeInfo) -> c_int;
    virNodeGetMemoryStats(Raw, c_int, *mut MemoryStat, *mut c_int, c_uint) -> c_int;
    virDomainLookupByUUIDString(Raw, *const c_char) -> Raw;
    virDomainFree(Raw) -> c_int;
    virDomainGetName(Raw) -> *const c_char;
    virDomainGetUUIDString(Raw, *mut c_char) -> c_int;
    virDomainGetState(Raw, *mut c_int, *mut c_int, c_uint) -> c_int;
    virDomainIsPersistent(Raw) -> c_int;
    virDomainGetMaxMemory(Raw) -> c_ulong;
    virDomainGetVcpusFlags(Raw, c_uint) -> c_int;
    virDomainGetXMLDesc(Raw, c_uint) -> *mut c_char;
    virDomainGetJobStats(Raw, *mut c_int, *mut Raw, *mut c_int, c_uint) -> c_int;
    virDomainAbortJob(Raw) -> c_int;
    virDomainMigrateSetMaxSpeed(Raw, c_ulong, c_uint) -> c_int;
    virDomainMigrate3(Raw, Raw, Raw, c_uint, c_uint) -> Raw;
    virDomainMigrateToURI3(Raw, *const c_char, Raw, c_uint, c_uint) -> c_int;
    virTypedParamsAddInt(*mut Raw, *mut c_int, *mut c_int, *const c_char, c_int) -> c_int;
    virTypedParamsAddULLong(*mut Raw, *mut c_int, *mut c_int, *const c_char, c_ulonglong) -> c_int;
    virTypedParamsGetULLong(Raw, c_int, *const c_char, *mut c_ulonglong) -> c_int;
    virTypedParamsFree(Raw, c_int);
}

/// `virNodeInfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct NodeInfo {
    model: [c_char; 32],
    memory: c_ulong,
    cpus: c_uint,
    mhz: c_uint,
    nodes: c_uint,
    sockets: c_uint,
    cores: c_uint,
    threads: c_uint,
}

/// `virNodeMemoryStats`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct MemoryStat {
    field: [c_char; 80],
    value: c_ulonglong,
}

/// Loads the library, if it is not yet.
pub(super) fn load() -> std::result::Result<(), Absent> {
    library().map(drop)
}

fn library() -> std::result::Result<&'static Library, Absent> {
    static LIBRARY: OnceLock<std::result::Result<Library, Absent>> = OnceLock::new();
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open() -> std::result::Result<Library, Absent> {
    let absent = |error: libloading::Error| Absent(error.to_string());
    // SAFETY: loading runs the library's constructors; rule 1. All is resolved now: what is missing must not end the process in
    // the middle of a migration.
    let library = unsafe { dl::Library::open(Some(NAME), dl::RTLD_NOW | dl::RTLD_LOCAL) };
    // Rule 2.
    let library = ManuallyDrop::new(library.map_err(absent)?);
    // SAFETY: it is libvirt.so.0 (rule 1).
    let library = unsafe { Library::resolve(&library) }.map_err(absent)?;
    // SAFETY: these take no pointers, but for that of a function that does nothing with what it is given.
    let is_ready = unsafe {
        (library.virSetErrorFunc)(ptr::null_mut(), Some(silent));
        (library.virInitialize)() == 0 && (library.virEventRegisterDefaultImpl)() == 0
    };
    if !is_ready {
        return Err(Absent(library.error().message));
    }
    let run = library.virEventRunDefaultImpl;
    // Keepalives of all connections, as long as the process lives.
    // SAFETY: the implementation has been registered, and this is the only thread that runs it.
    let events = move || while unsafe { run() } == 0 {};
    let thread = thread::Builder::new().name("libvirt events".to_owned());
    let started = thread.spawn(events);
    started.map_err(|error| Absent(format!("its events need a thread: {error}")))?;
    Ok(library)
}

/// libvirt's own handler prints to standard error what is an [`Error`] here.
unsafe extern "C" fn silent(_: Raw, _: Raw) {}

impl Library {
    /// Why the last call of this thread failed.
    fn error(&self) -> Error {
        // SAFETY: they take nothing; the text is this thread's, and copied before its next call (rule 5).
        unsafe {
            Error {
                code: (self.virGetLastErrorCode)(),
                message: text((self.virGetLastErrorMessage)()),
            }
        }
    }

    /// What a call returned that is negative if it failed.
    fn checked(&self, result: c_int) -> Result<u32> {
        u32::try_from(result).map_err(|_| self.error())
    }

    fn pointer(&self, result: Raw) -> Result<NonNull<c_void>> {
        NonNull::new(result).ok_or_else(|| self.error())
    }

    /// # Safety
    /// `result` must be what a call returned that gives a string to be freed, or null.
    unsafe fn owned_text(&self, result: *mut c_char) -> Result<String> {
        let result = NonNull::new(result).ok_or_else(|| self.error())?;
        // SAFETY: by the caller, it is a string that nobody else has, allocated by malloc.
        unsafe {
            let copy = text(result.as_ptr());
            libc::free(result.as_ptr().cast());
            Ok(copy)
        }
    }
}

/// # Safety
/// `text` must be null or a string that stays as it is meanwhile.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return "no reason was given".to_owned();
    }
    // SAFETY: by the caller.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error {
        code: 0,
        message: format!("{text:?} has a zero byte in it"),
    })
}

/// What a host has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    /// Bytes.
    pub(super) memory: u64,
    /// Bytes that are free, or are made free when they are needed.
    pub(super) available: u64,
    pub(super) cpus: u32,
}

/// A guest's CPU, and what makes it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Cpu {
    /// The element `cpu` of its description.
    pub(super) xml: String,
    pub(super) arch: String,
    pub(super) machine: String,
    /// Such as `kvm`.
    pub(super) kind: String,
}

/// A connection to the libvirt of a host. Closed when it is dropped.
#[derive(Debug)]
pub(super) struct Connection {
    library: &'static Library,
    raw: NonNull<c_void>,
}

// SAFETY: rule 3.
unsafe impl Send for Connection {}
// SAFETY: rule 3.
unsafe impl Sync for Connection {}

impl Connection {
    pub(super) fn open(uri: &str) -> anyhow::Result<Self> {
        /// Seconds between keepalives, and how many may remain unanswered.
        const KEEPALIVE: (c_int, c_uint) = (5, 5);
        let library = library()?;
        let uri = c_string(uri)?;
        // SAFETY: the string is one; libvirt copies it.
        let raw = library.pointer(unsafe { (library.virConnectOpen)(uri.as_ptr()) })?;
        // An old libvirt has none: then a host that is cut off is noticed later.
        // SAFETY: the connection is open.
        unsafe { (library.virConnectSetKeepAlive)(raw.as_ptr(), KEEPALIVE.0, KEEPALIVE.1) };
        Ok(Self { library, raw })
    }

    pub(super) fn is_alive(&self) -> bool {
        // SAFETY: the connection is open.
        unsafe { (self.library.virConnectIsAlive)(self.raw.as_ptr()) == 1 }
    }

    pub(super) fn node(&self) -> Result<Node> {
        const ALL_CELLS: c_int = -1;
        const MOST: usize = 32;
        let mut info = NodeInfo {
            model: [0; 32],
            memory: 0,
            cpus: 0,
            mhz: 0,
            nodes: 0,
            sockets: 0,
            cores: 0,
            threads: 0,
        };
        let none = MemoryStat {
            field: [0; 80],
            value: 0,
        };
        let (mut stats, mut count) = ([none; MOST], 0);
        let stats_of = self.library.virNodeGetMemoryStats;
        // SAFETY: the connection is open, and both structures have the layout that the library writes (rule 1). Without a place
        // for statistics, the first of the two calls tells how many there are; the second one writes no more than that, and is
        // not made if the array is shorter.
        unsafe {
            let raw = self.raw.as_ptr();
            self.library
                .checked((self.library.virNodeGetInfo)(raw, &mut info))?;
            let counted = stats_of(raw, ALL_CELLS, ptr::null_mut(), &mut count, 0);
            self.library.checked(counted)?;
            if usize::try_from(count).is_ok_and(|count| count > MOST) {
                return Err(Error {
                    code: 0,
                    message: format!("{count} statistics of memory are more than expected"),
                });
            }
            let found = stats_of(raw, ALL_CELLS, stats.as_mut_ptr(), &mut count, 0);
            self.library.checked(found)?;
        }
        let is_available = |stat: &&MemoryStat| {
            let name: Vec<u8> = stat.field.iter().map(|byte| byte.cast_unsigned()).collect();
            let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
            [c"free", c"buffers", c"cached"].contains(&name)
        };
        let available: u64 = stats
            .iter()
            .filter(is_available)
            .map(|stat| stat.value)
            .sum();
        Ok(Node {
            memory: info.memory.saturating_mul(1024),
            available: available.saturating_mul(1024),
            cpus: info.cpus,
        })
    }

    /// The host's description of itself.
    pub(super) fn capabilities(&self) -> Result<String> {
        // SAFETY: the connection is open; the string is to be freed.
        unsafe {
            let found = (self.library.virConnectGetCapabilities)(self.raw.as_ptr());
            self.library.owned_text(found)
        }
    }

    /// Whether this host has all that a CPU has, which is that of another host, by its capabilities.
    pub(super) fn has_cpu(&self, xml: &str) -> Result<bool> {
        let xml = c_string(xml)?;
        // SAFETY: the connection is open, and the string is one.
        let found =
            unsafe { (self.library.virConnectCompareCPU)(self.raw.as_ptr(), xml.as_ptr(), 0) };
        self.library.checked(found).map(|found| found > 0)
    }

    /// Whether the hypervisor of this host can give a guest this CPU.
    pub(super) fn can_make_cpu(&self, cpu: &Cpu) -> Result<bool> {
        let [arch, machine, kind, xml] = [
            c_string(&cpu.arch)?,
            c_string(&cpu.machine)?,
            c_string(&cpu.kind)?,
            c_string(&cpu.xml)?,
        ];
        // SAFETY: the connection is open, and the strings are some; null is for the default emulator.
        let found = unsafe {
            (self.library.virConnectCompareHypervisorCPU)(
                self.raw.as_ptr(),
                ptr::null(),
                arch.as_ptr(),
                machine.as_ptr(),
                kind.as_ptr(),
                xml.as_ptr(),
                0,
            )
        };
        self.library.checked(found).map(|found| found > 0)
    }

    /// All guests that the host knows, running or not.
    pub(super) fn domains(&self) -> Result<Vec<Domain>> {
        let mut list: *mut Raw = ptr::null_mut();
        // SAFETY: the connection is open; `list` becomes an array of so many guests, which belong to the caller, as the array
        // does, which was allocated by malloc.
        unsafe {
            let found = (self.library.virConnectListAllDomains)(self.raw.as_ptr(), &mut list, 0);
            let count = self.library.checked(found)? as usize;
            let domains = (0..count).filter_map(|at| {
                Some(Domain {
                    library: self.library,
                    raw: NonNull::new(*list.add(at))?,
                })
            });
            let domains = domains.collect();
            libc::free(list.cast());
            Ok(domains)
        }
    }

    /// The guest of this UUID, if the host knows it.
    pub(super) fn domain(&self, uuid: &str) -> Result<Option<Domain>> {
        let uuid = c_string(uuid)?;
        // SAFETY: the connection is open, and the string is one.
        let found =
            unsafe { (self.library.virDomainLookupByUUIDString)(self.raw.as_ptr(), uuid.as_ptr()) };
        match self.library.pointer(found) {
            Ok(raw) => Ok(Some(Domain {
                library: self.library,
                raw,
            })),
            Err(error) if error.kind() == Kind::NoDomain => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: it is open, and this is the last use of it here; guests of it hold it (rule 4).
        unsafe { (self.library.virConnectClose)(self.raw.as_ptr()) };
    }
}

/// A guest, as one host knows it. It may be gone by now.
#[derive(Debug)]
pub(super) struct Domain {
    library: &'static Library,
    raw: NonNull<c_void>,
}

// SAFETY: rule 3.
unsafe impl Send for Domain {}
// SAFETY: rule 3.
unsafe impl Sync for Domain {}

/// What libvirt says of a guest. Both are libvirt's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    state: c_int,
    reason: c_int,
}

impl State {
    const RUNNING: c_int = 1;
    const BLOCKED: c_int = 2;
    const PAUSED: c_int = 3;
    const SHUT_OFF: c_int = 5;
    const CRASHED: c_int = 6;
    const SUSPENDED: c_int = 7;
    /// Of paused ones.
    const BY_USER: c_int = 1;
    const MIGRATING: c_int = 2;
    /// Of those that are shut off.
    const SHUT_DOWN: c_int = 1;
    const DESTROYED: c_int = 2;
    const HAS_CRASHED: c_int = 3;
    const MIGRATED: c_int = 4;
    const SAVED: c_int = 5;

    #[cfg(test)]
    pub(super) fn new(state: c_int, reason: c_int) -> Self {
        Self { state, reason }
    }

    /// Whether it has a process.
    pub(super) fn is_active(self) -> bool {
        self.state != Self::SHUT_OFF
    }

    pub(super) fn runs(self) -> bool {
        matches!(self.state, Self::RUNNING | Self::BLOCKED)
    }

    /// Whether somebody has paused it, and not a failure.
    pub(super) fn is_paused_by_user(self) -> bool {
        (self.state, self.reason) == (Self::PAUSED, Self::BY_USER)
    }

    /// Whether it waits for its memory, or for the end of its migration away.
    pub(super) fn is_migrating(self) -> bool {
        (self.state, self.reason) == (Self::PAUSED, Self::MIGRATING)
    }

    /// Whether it ran on this host and has ended there.
    pub(super) fn has_ended(self) -> bool {
        let ends = [
            Self::SHUT_DOWN,
            Self::DESTROYED,
            Self::HAS_CRASHED,
            Self::SAVED,
        ];
        self.state == Self::SHUT_OFF && ends.contains(&self.reason)
    }

    /// Whether it has left this host for another.
    pub(super) fn has_left(self) -> bool {
        (self.state, self.reason) == (Self::SHUT_OFF, Self::MIGRATED)
    }

    pub(super) fn name(self) -> &'static str {
        match (self.state, self.reason) {
            (Self::RUNNING | Self::BLOCKED, _) => "running",
            (Self::PAUSED, Self::BY_USER) => "paused",
            (Self::PAUSED, Self::MIGRATING) => "paused for a migration",
            (Self::PAUSED, 5) => "paused by an I/O error",
            (Self::PAUSED, 6) => "paused by its watchdog",
            (Self::PAUSED, 10) => "paused, as it has crashed",
            (Self::PAUSED, 12 | 13) => "paused in a post-copy migration",
            (Self::PAUSED, _) => "paused for another reason",
            (Self::SHUT_OFF, Self::SHUT_DOWN) => "shut down",
            (Self::SHUT_OFF, Self::DESTROYED) => "destroyed",
            (Self::SHUT_OFF | Self::CRASHED, Self::HAS_CRASHED) => "crashed",
            (Self::SHUT_OFF, Self::SAVED) => "saved",
            (Self::SHUT_OFF, _) => "shut off",
            (Self::CRASHED, _) => "crashed",
            (Self::SUSPENDED, _) => "suspended",
            _ => "in an unknown state",
        }
    }
}

/// What libvirt accounts of a migration.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Job {
    /// Whether there is one.
    pub(super) is_active: bool,
    /// Bytes.
    pub(super) processed: u64,
    pub(super) remaining: u64,
    /// Bytes a second that the guest writes.
    pub(super) dirty_rate: u64,
    pub(super) downtime_ms: Option<u64>,
}

/// How a guest is to be migrated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Migration {
    pub(super) is_persistent: bool,
    pub(super) copies_storage: bool,
    pub(super) converges: bool,
    pub(super) channels: u8,
    /// MiB a second; none is without a limit.
    pub(super) rate: Option<u64>,
}

impl Migration {
    /// By libvirt's `virDomainMigrateFlags`.
    fn flags(&self) -> c_uint {
        const LIVE: c_uint = 1;
        const PERSIST_DEST: c_uint = 1 << 3;
        const UNDEFINE_SOURCE: c_uint = 1 << 4;
        const NON_SHARED_DISK: c_uint = 1 << 6;
        const AUTO_CONVERGE: c_uint = 1 << 13;
        const PARALLEL: c_uint = 1 << 17;
        let all = [
            (true, LIVE | PARALLEL),
            (self.is_persistent, PERSIST_DEST | UNDEFINE_SOURCE),
            (self.copies_storage, NON_SHARED_DISK),
            (self.converges, AUTO_CONVERGE),
        ];
        let set = all.into_iter().filter(|(is_set, _)| *is_set);
        set.fold(0, |flags, (_, flag)| flags | flag)
    }
}

impl Domain {
    pub(super) fn name(&self) -> String {
        // SAFETY: the guest is one; its name is copied as long as it is there (rule 5).
        unsafe { text((self.library.virDomainGetName)(self.raw.as_ptr())) }
    }

    pub(super) fn uuid(&self) -> Result<String> {
        const LENGTH: usize = 37;
        let mut uuid: [c_char; LENGTH] = [0; LENGTH];
        // SAFETY: the guest is one; a UUID and its end are of this length.
        unsafe {
            let found = (self.library.virDomainGetUUIDString)(self.raw.as_ptr(), uuid.as_mut_ptr());
            self.library.checked(found)?;
            Ok(text(uuid.as_ptr()))
        }
    }

    pub(super) fn state(&self) -> Result<State> {
        let (mut state, mut reason) = (0, 0);
        // SAFETY: the guest is one, and both are written to.
        let found = unsafe {
            (self.library.virDomainGetState)(self.raw.as_ptr(), &mut state, &mut reason, 0)
        };
        self.library.checked(found)?;
        Ok(State { state, reason })
    }

    pub(super) fn is_persistent(&self) -> Result<bool> {
        // SAFETY: the guest is one.
        let found = unsafe { (self.library.virDomainIsPersistent)(self.raw.as_ptr()) };
        self.library.checked(found).map(|found| found == 1)
    }

    /// The most that it may have, in bytes.
    pub(super) fn memory(&self) -> Result<u64> {
        // SAFETY: the guest is one.
        let kib = unsafe { (self.library.virDomainGetMaxMemory)(self.raw.as_ptr()) };
        match kib {
            0 => Err(self.library.error()),
            kib => Ok(kib.saturating_mul(1024)),
        }
    }

    pub(super) fn cpus(&self) -> Result<u32> {
        const CURRENT: c_uint = 0;
        // SAFETY: the guest is one.
        let found = unsafe { (self.library.virDomainGetVcpusFlags)(self.raw.as_ptr(), CURRENT) };
        self.library.checked(found)
    }

    /// Its description, as it would be migrated, with a CPU that has all its features named.
    pub(super) fn description(&self) -> Result<String> {
        const UPDATE_CPU: c_uint = 1 << 2;
        const MIGRATABLE: c_uint = 1 << 3;
        // SAFETY: the guest is one; the string is to be freed.
        unsafe {
            let found =
                (self.library.virDomainGetXMLDesc)(self.raw.as_ptr(), UPDATE_CPU | MIGRATABLE);
            self.library.owned_text(found)
        }
    }

    /// What is under way.
    pub(super) fn job(&self) -> Result<Job> {
        self.job_of(0)
    }

    /// The last one that has completed. At the destination it has the downtime.
    pub(super) fn completed_job(&self) -> Result<Job> {
        const COMPLETED: c_uint = 1;
        self.job_of(COMPLETED)
    }

    fn job_of(&self, flags: c_uint) -> Result<Job> {
        const NONE: c_int = 0;
        let mut kind = 0;
        let mut params = Params::new(self.library);
        // SAFETY: the guest is one; `params` becomes an array that `Params` frees.
        let found = unsafe {
            let (list, count) = (&mut params.list, &mut params.count);
            (self.library.virDomainGetJobStats)(self.raw.as_ptr(), &mut kind, list, count, flags)
        };
        self.library.checked(found)?;
        let page = params.number(c"memory_page_size").unwrap_or(4096);
        let pages = params.number(c"memory_dirty_rate").unwrap_or(0);
        Ok(Job {
            is_active: kind != NONE,
            processed: params.number(c"data_processed").unwrap_or(0),
            remaining: params.number(c"data_remaining").unwrap_or(0),
            dirty_rate: pages.saturating_mul(page),
            downtime_ms: params.number(c"downtime"),
        })
    }

    pub(super) fn abort(&self) -> Result<()> {
        // SAFETY: the guest is one.
        let found = unsafe { (self.library.virDomainAbortJob)(self.raw.as_ptr()) };
        self.library.checked(found).map(drop)
    }

    /// Changes the rate of its migration, in MiB a second.
    pub(super) fn set_rate(&self, rate: u64) -> Result<()> {
        // SAFETY: the guest is one.
        let found =
            unsafe { (self.library.virDomainMigrateSetMaxSpeed)(self.raw.as_ptr(), rate, 0) };
        self.library.checked(found).map(drop)
    }

    /// Migrates it by this process, which talks to both hosts. Returns when it has ended.
    pub(super) fn migrate(&self, to: &Connection, migration: &Migration) -> Result<()> {
        let params = self.params(migration)?;
        // SAFETY: the guest is one, the connection is open, and so many parameters are in the array.
        let found = unsafe {
            (self.library.virDomainMigrate3)(
                self.raw.as_ptr(),
                to.raw.as_ptr(),
                params.list,
                params.count.cast_unsigned(),
                migration.flags(),
            )
        };
        // The guest at the destination.
        let raw = self.library.pointer(found)?;
        drop(Domain {
            library: self.library,
            raw,
        });
        Ok(())
    }

    /// Migrates it by its host, which connects to `uri` itself. Returns when it has ended.
    pub(super) fn migrate_by_host(&self, uri: &str, migration: &Migration) -> Result<()> {
        const PEER2PEER: c_uint = 1 << 1;
        let (params, uri) = (self.params(migration)?, c_string(uri)?);
        // SAFETY: the guest is one, the string is one, and so many parameters are in the array.
        let found = unsafe {
            (self.library.virDomainMigrateToURI3)(
                self.raw.as_ptr(),
                uri.as_ptr(),
                params.list,
                params.count.cast_unsigned(),
                migration.flags() | PEER2PEER,
            )
        };
        self.library.checked(found).map(drop)
    }

    fn params(&self, migration: &Migration) -> Result<Params> {
        let mut params = Params::new(self.library);
        params.add_int(c"parallel.connections", migration.channels.into())?;
        if let Some(rate) = migration.rate {
            params.add_number(c"bandwidth", rate)?;
        }
        Ok(params)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: the guest is one, and this is the last use of it (rule 4).
        unsafe { (self.library.virDomainFree)(self.raw.as_ptr()) };
    }
}

/// Named values, in an array of libvirt's.
struct Params {
    library: &'static Library,
    list: Raw,
    count: c_int,
    capacity: c_int,
}

impl Params {
    fn new(library: &'static Library) -> Self {
        Self {
            library,
            list: ptr::null_mut(),
            count: 0,
            capacity: 0,
        }
    }

    fn add_int(&mut self, name: &CStr, value: c_int) -> Result<()> {
        let Self {
            library,
            list,
            count,
            capacity,
        } = self;
        // SAFETY: the three describe an array of libvirt's, or none, and the name is copied.
        let found =
            unsafe { (library.virTypedParamsAddInt)(list, count, capacity, name.as_ptr(), value) };
        self.library.checked(found).map(drop)
    }

    fn add_number(&mut self, name: &CStr, value: u64) -> Result<()> {
        let Self {
            library,
            list,
            count,
            capacity,
        } = self;
        // SAFETY: as above.
        let found = unsafe {
            (library.virTypedParamsAddULLong)(list, count, capacity, name.as_ptr(), value)
        };
        self.library.checked(found).map(drop)
    }

    /// A value of this name and of this kind.
    fn number(&self, name: &CStr) -> Option<u64> {
        let mut value = 0;
        // SAFETY: so many values are in the array, and one is written to.
        let found = unsafe {
            (self.library.virTypedParamsGetULLong)(self.list, self.count, name.as_ptr(), &mut value)
        };
        (found == 1).then_some(value)
    }
}

impl Drop for Params {
    fn drop(&mut self) {
        // SAFETY: the array is libvirt's, or none, and this is the last use of it.
        unsafe { (self.library.virTypedParamsFree)(self.list, self.count) };
    }
}
