//! QAT hardware, through Intel's libqatzip if the machine has that.
//!
//! The program builds and starts without the library: [`Library::open`] loads it on first use, [`hardware`] reports whether it
//! has a device, and a [`Session`] compresses and decompresses packets with that. A missing library, symbol or device is
//! [`Absent`], which is not an error as long as software serves. The library's own software is never used: every session is
//! opened without it, and a result that did not come from hardware is a [`Failure`]. Only tests of this crate allow it.
//!
//! Four rules make the unsafe blocks below sound:
//! 1. **The interface is that of libqatzip.so.3.** Signatures and layouts are written down here once, without C headers.
//! 2. **The library is never unloaded**, so its functions stay where they are. Its thread-local data has destructors, which would
//!    otherwise be called in memory that is gone.
//! 3. **A session is used only by the thread that opened it.** From any other thread calls are refused, and drops leak.
//! 4. **The library works in memory of its own**: pages and payloads are copied to and from buffers of known sizes, so it never
//!    gets a pointer to ours, and the lengths that it returns are checked. The copy is needed anyway: a device can reach only
//!    special memory, and a running guest changes its pages meanwhile.

#[cfg(test)]
pub(crate) mod tests;

use std::{
    ffi::{CStr, OsStr, c_int, c_uint, c_void},
    fmt, fs,
    mem::{ManuallyDrop, MaybeUninit},
    ops::RangeInclusive,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    ptr::{self, NonNull},
    sync::Arc,
    thread::{self, ThreadId},
};

use libloading::os::unix as dl;
use thiserror::Error;

/// File name of the installed library.
pub(crate) const NAME: &str = "libqatzip.so.3";

/// The loaded library, for all threads.
#[derive(Debug)]
pub(crate) struct Library {
    file: PathBuf,
    /// Whether it reaches devices through Intel's qatlib, as distributions build it.
    is_on_qatlib: bool,
    /// `sw_backup`: 0, devices or nothing. Tests of this module set it to 1: the library's software, where it has no device.
    sw_backup: u8,
    init: unsafe extern "C" fn(*mut QzSession, u8) -> c_int,
    defaults: unsafe extern "C" fn(*mut QzSessionParamsDeflate) -> c_int,
    set_up: unsafe extern "C" fn(*mut QzSession, *mut QzSessionParamsDeflate) -> c_int,
    bound: unsafe extern "C" fn(c_uint, *mut QzSession) -> c_uint,
    malloc: unsafe extern "C" fn(usize, c_int, c_int) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
    compress:
        unsafe extern "C" fn(*mut QzSession, *const u8, *mut u32, *mut u8, *mut u32, u32) -> c_int,
    decompress:
        unsafe extern "C" fn(*mut QzSession, *const u8, *mut u32, *mut u8, *mut u32) -> c_int,
    tear_down: unsafe extern "C" fn(*mut QzSession) -> c_int,
    close: unsafe extern "C" fn(*mut QzSession) -> c_int,
}

impl Library {
    /// Loads the library `name`, a path or what the system's loader knows.
    pub(crate) fn open(name: &OsStr) -> Result<Self, Absent> {
        // Everything is resolved now: with lazy binding a library that lacks something itself would
        // end the process in the middle of a migration.
        // SAFETY: loading runs the library's constructors; rule 1.
        let library = unsafe { dl::Library::open(Some(name), dl::RTLD_NOW | dl::RTLD_LOCAL) };
        let name = name.to_string_lossy();
        let library = library.map_err(|error| {
            let why = error.to_string();
            let why = why.strip_prefix(&format!("{name}: ")).unwrap_or(&why);
            Absent::Load {
                name: name.to_string(),
                why: why.to_owned(),
            }
        })?;
        // Rule 2.
        let library = ManuallyDrop::new(library);
        // SAFETY: the fields' types are those of the functions (rule 1).
        let library = unsafe {
            let init: unsafe extern "C" fn(*mut QzSession, u8) -> c_int =
                symbol(&library, &name, c"qzInit")?;
            silence(&library, &name);
            Self {
                file: file_of(init as *const c_void).unwrap_or_else(|| PathBuf::from(&*name)),
                is_on_qatlib: is_on_qatlib(&library, &name),
                sw_backup: 0,
                init,
                defaults: symbol(&library, &name, c"qzGetDefaultsDeflate")?,
                set_up: symbol(&library, &name, c"qzSetupSessionDeflate")?,
                bound: symbol(&library, &name, c"qzMaxCompressedLength")?,
                malloc: symbol(&library, &name, c"qzMalloc")?,
                free: symbol(&library, &name, c"qzFree")?,
                compress: symbol(&library, &name, c"qzCompress")?,
                decompress: symbol(&library, &name, c"qzDecompress")?,
                tear_down: symbol(&library, &name, c"qzTeardownSession")?,
                close: symbol(&library, &name, c"qzClose")?,
            }
        };
        Ok(library)
    }

    /// The file that it was loaded from, links resolved. The end of its name is the only sign of its version (`.3.2.0` is
    /// QATzip 1.3.1): on Linux, QATzip does not implement its functions for that (qzGetSoftwareComponent*).
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }
}

/// Makes the library print nothing: its return codes are logged. Older libraries do not have this function.
///
/// # Safety
/// `library` must be libqatzip.
unsafe fn silence(library: &dl::Library, name: &str) {
    type SetLogLevel = unsafe extern "C" fn(c_int) -> c_int;
    // SAFETY: the function's type, by qatzip.h of QATzip 1.3.1; it stores the level and returns the one before.
    unsafe {
        if let Ok(set_log_level) = symbol::<SetLogLevel>(library, name, c"qzSetLogLevel") {
            set_log_level(NO_LOG);
        }
    }
}

/// Whether the library's functions for devices are those of libqat.so, which is qatlib's: the out-of-tree driver has others.
fn is_on_qatlib(library: &dl::Library, name: &str) -> bool {
    type Function = unsafe extern "C" fn();
    // SAFETY: only its address is looked at.
    let found = unsafe { symbol::<Function>(library, name, c"icp_sal_userIsQatAvailable") };
    let file = found
        .ok()
        .and_then(|function| file_of(function as *const c_void));
    let name = file.as_deref().and_then(Path::file_name);
    name.is_some_and(|name| name.as_bytes().starts_with(b"libqat.so."))
}

/// The file of the library that the address `at` belongs to, links resolved.
fn file_of(at: *const c_void) -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and writes to `info`, for which zero is a valid value; the name that it gives
    // is the loader's own, which stays as long as the library, so for ever (rule 2: it loads what it needs).
    let name = unsafe {
        let found = libc::dladdr(at, info.as_mut_ptr()) != 0;
        let name = info.assume_init().dli_fname;
        (found && !name.is_null()).then(|| CStr::from_ptr(name))?
    };
    fs::canonicalize(OsStr::from_bytes(name.to_bytes())).ok()
}

/// Whether the library finds hardware, and if not, why. Opens the devices and closes them again.
///
/// The result of qzInit is not enough: later QATzips return "done before" from it once they have found nothing. Only a session
/// that can be set up proves that there is hardware.
pub(crate) fn hardware(library: &Arc<Library>) -> Result<(), Absent> {
    if library.is_on_qatlib && !has_group(Path::new(VFIO)) {
        return Err(Absent::Unbound);
    }
    Handle::open(Arc::clone(library))?.set_up(FASTEST)
}

/// Where qatlib looks for devices (its vfio_mgr_lib.c). If there are none, it prints a line to stderr at every call, whatever the
/// log level. So it is not called then.
const VFIO: &str = "/dev/vfio";

/// Prefix of the name of a group whose devices are not behind an IOMMU.
const NO_IOMMU: &str = "noiommu-";

/// Whether `vfio` has a group of devices. The names of groups are numbers.
fn has_group(vfio: &Path) -> bool {
    let is_group = |name: &OsStr| {
        let name = name.to_str().unwrap_or_default();
        let number = name.strip_prefix(NO_IOMMU).unwrap_or(name);
        number.parse::<u32>().is_ok()
    };
    fs::read_dir(vfio).is_ok_and(|mut entries| {
        entries.any(|entry| entry.is_ok_and(|entry| is_group(&entry.file_name())))
    })
}

/// Why there is no QAT here.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum Absent {
    /// There is no such file, or it is not a library.
    #[error("{name} cannot be loaded: {why}")]
    Load {
        /// The library asked for.
        name: String,
        /// The loader's message.
        why: String,
    },
    /// The file is a library, but not this one.
    #[error("{name} has no symbol {symbol}")]
    Symbol {
        /// The library asked for.
        name: String,
        /// What it lacks.
        symbol: String,
    },
    /// No device is where qatlib looks for them.
    #[error("no QAT device is bound to vfio-pci: {VFIO} has no group of devices")]
    Unbound,
    /// The library refused to start, or to set up a session.
    #[error("libqatzip finds no usable QAT hardware: {call} returns {code}")]
    Refused {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: Code,
    },
    /// The library has set up a session without hardware.
    #[error("libqatzip finds no usable QAT hardware: {0}")]
    Hardware(Status),
}

/// Why a session could not be opened, or a packet not be processed. Never a reason to end a migration: software processes what
/// hardware does not.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum Failure {
    /// There is no hardware.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// The library did not return success. From [`Session::decompress`], the payload may be corrupt.
    #[error("libqatzip's {call} returns {code}")]
    Code {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: Code,
    },
    /// The library has no memory for a session's buffers.
    #[error("libqatzip has no {len} bytes of memory")]
    Memory { len: u32 },
    /// The library did not consume all of its input; or, from [`Session::decompress`], the payload continues after the pages.
    #[error("libqatzip's {call} claims to have taken {claimed} of {given} bytes")]
    Taken {
        /// The function.
        call: &'static str,
        /// Bytes that it claims to have taken.
        claimed: u32,
        /// Bytes that it was given.
        given: u32,
    },
    /// The library claims a number of bytes that is impossible or wrong; or, from
    /// [`Session::decompress`], the payload holds more or fewer bytes than the pages have.
    #[error("libqatzip's {call} claims {claimed} bytes, where {allowed:?} can be")]
    Made {
        /// The function.
        call: &'static str,
        /// Bytes that it claims to have made, or may make.
        claimed: u32,
        /// Bytes that it may have made.
        allowed: RangeInclusive<u32>,
    },
    /// The caller has not kept to the session's rules.
    #[error("{0}")]
    Misuse(&'static str),
}

impl Failure {
    const INPUT: Self =
        Self::Misuse("more bytes were given to a QAT session than it was opened for");
    const OUTPUT_FULL: Self =
        Self::Misuse("the output of a QAT session has no room for the result");
    const WRONG_THREAD: Self =
        Self::Misuse("a QAT session was used by a thread that did not open it");
    const SPENT: Self = Self::Misuse("a QAT session was used after a call on it had failed");
}

/// What a library function returned, other than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

impl Code {
    /// The devices are open already: success, where they are opened.
    pub(crate) const DUPLICATE: Self = Self(1);
    const FAILED: Self = Self(-2);
    /// The device did not answer in time.
    pub(crate) const TIMEOUT: Self = Self(-5);
    /// There is hardware, but no free instance of it, and software is not allowed.
    pub(crate) const NO_INSTANCE: Self = Self(-103);

    fn meaning(self) -> &'static str {
        meaning(self.0.into()).unwrap_or("unknown code")
    }

    /// Whether the library knows what became of the request. If not, the device may still work on it.
    fn is_settled(self) -> bool {
        !matches!(self, Self::FAILED | Self::TIMEOUT) && meaning(self.0.into()).is_some()
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.meaning())
    }
}

/// The hardware's state in `hw_session_stat`; never 0, which is a session with hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) i64);

impl Status {
    /// Other processes have all instances of the devices.
    pub(crate) const NO_INSTANCE: Self = Self(13);

    const NO_DEVICE: Self = Self(11);
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = meaning(self.0).unwrap_or("unknown status");
        write!(f, "{meaning} (hw_session_stat {})", self.0)
    }
}

/// The meaning of a return code or of a hardware state; QATzip numbers both together.
fn meaning(value: i64) -> Option<&'static str> {
    Some(match value {
        1 => "done before",
        2 => "done in software",
        11 => "no device",
        12 => "no driver",
        13 => "no free instance",
        14 => "too little memory",
        15 => "too little memory for results",
        16 => "a format that the device does not have",
        100 => "not opened",
        -1 => "invalid parameters",
        -2 => "failed",
        -3 => "output too small",
        -4 => "invalid data",
        -5 => "timed out",
        -100 => "integrity check failed",
        -101 => "no hardware, and no software either",
        -102 => "no driver, and no software either",
        -103 => "no free instance, and no software either",
        -104 => "too little memory, and no software either",
        -105 => "not for hardware, and no software either",
        -116 => "a format that the device does not have, and no software either",
        -117 => "failed after the device was done",
        -118 => "too little memory for metadata",
        -119 => "metadata of a missing block",
        -200 => "not supported",
        _ => return None,
    })
}

/// Access to the hardware for one thread: both directions, one packet at a time, without history.
///
/// It may be moved to another thread, but cannot be used there: every call fails with [`Failure::WRONG_THREAD`]. If it is dropped
/// there, it leaks with its memory, since the library's functions that would free it must not be called there. After a
/// `fork`, the child must not use it.
pub(crate) struct Session {
    // In this order: buffers go before the session does.
    plain: Memory,
    packed: Memory,
    handle: Handle,
    state: State,
}

/// Whether a session can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// A call has failed, and its remains would affect the next packet: after a damaged payload, QATzip refuses every other one.
    Spent,
    /// The same, and the device may still be working on it.
    Lost,
}

// SAFETY: only the thread that opened the session reaches what these pointers lead to, wherever the session itself is
// (rule 3): `compress` and `decompress` begin with `Handle::check`, and so do the drops of `Session` (for `Memory`) and
// `Handle`. `Session` has no other functions, and ids of threads are not reused. The rest of it is `Send`.
unsafe impl Send for Session {}

impl Session {
    /// Opens a session for packets of at most `pages` bytes whose payload has at most `payload`.
    pub(crate) fn open(
        library: Arc<Library>,
        level: u32,
        pages: usize,
        payload: usize,
    ) -> Result<Self, Failure> {
        let [pages, payload] = [size(pages)?, size(payload)?];
        let mut handle = Handle::open(Arc::clone(&library))?;
        handle.set_up(level)?;

        // SAFETY: on the thread that has just opened and set up the session.
        let bound = unsafe { (library.bound)(pages, handle.at.as_ptr()) };
        // The library requires as much memory as its bound, even if it uses less.
        if bound > payload {
            return Err(Failure::Made {
                call: "qzMaxCompressedLength",
                claimed: bound,
                allowed: 0..=payload,
            });
        }
        Ok(Self {
            plain: Memory::new(Arc::clone(&library), pages)?,
            packed: Memory::new(library, payload)?,
            handle,
            state: State::Ready,
        })
    }

    /// Compresses `pages` to the start of `out`, and returns how many bytes that are. They are what the
    /// device wrote, unchecked.
    pub(crate) fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, Failure> {
        self.check()?;
        let given = self.plain.fill(pages)?;
        let room = self.packed.len;
        let (mut taken, mut made) = (given, room);
        // SAFETY: on the thread that opened the session and set it up, as `check` has found. The buffers
        // are valid for `given <= plain.len` reads and `room == packed.len` writes, belong to us
        // alone, and no reference to what is in them exists. The lengths are locals.
        let code = unsafe {
            (self.handle.library.compress)(
                self.handle.at.as_ptr(),
                self.plain.at.as_ptr(),
                &raw mut taken,
                self.packed.at.as_ptr(),
                &raw mut made,
                LAST,
            )
        };
        let made = self.checked_len("qzCompress", code, (taken, given), (made, 1..=room))?;
        let out = out.get_mut(..made).ok_or(Failure::OUTPUT_FULL)?;
        self.packed.copy_to(out)?;
        Ok(made)
    }

    /// Decompresses `payload`, which has to become exactly `pages`.
    pub(crate) fn decompress(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), Failure> {
        self.check()?;
        let room = self.plain.len;
        let wanted = self.plain.checked(pages.len())?;
        let given = self.packed.fill(payload)?;
        let (mut taken, mut made) = (given, room);
        // SAFETY: as in `compress`, with the two buffers in each other's place.
        let code = unsafe {
            (self.handle.library.decompress)(
                self.handle.at.as_ptr(),
                self.packed.at.as_ptr(),
                &raw mut taken,
                self.plain.at.as_ptr(),
                &raw mut made,
            )
        };
        let exactly = wanted..=wanted;
        self.checked_len("qzDecompress", code, (taken, given), (made, exactly))?;
        self.plain.copy_to(pages)
    }

    /// Whether it can be used for the next packet.
    pub(crate) fn is_ready(&self) -> bool {
        self.check().is_ok()
    }

    /// Whether dropping it leaves its memory behind.
    pub(crate) fn leaks(&self) -> bool {
        self.state == State::Lost || self.handle.check().is_err()
    }

    fn check(&self) -> Result<(), Failure> {
        self.handle.check()?;
        match self.state {
            State::Ready => Ok(()),
            State::Spent | State::Lost => Err(Failure::SPENT),
        }
    }

    /// How many bytes a call has made, if it `took` all that was `given` and made as many as `allowed`.
    fn checked_len(
        &mut self,
        call: &'static str,
        code: c_int,
        (taken, given): (u32, u32),
        (made, allowed): (u32, RangeInclusive<u32>),
    ) -> Result<usize, Failure> {
        let code = Code(code);
        let failure = match code {
            Code(0) if taken != given => Failure::Taken {
                call,
                claimed: taken,
                given,
            },
            Code(0) if !allowed.contains(&made) => Failure::Made {
                call,
                claimed: made,
                allowed,
            },
            Code(0) => return Ok(made as usize),
            code => Failure::Code { call, code },
        };
        self.state = match code {
            // Nothing has begun, and the library tries again at the next call.
            Code::NO_INSTANCE => State::Ready,
            code if code == Code(0) || code.is_settled() => State::Spent,
            _ => State::Lost,
        };
        Err(failure)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The device of a lost session may still write there: freed memory could change under its next owner. On another
        // thread the library must not be called (rule 3).
        let leaks = self.leaks();
        self.plain.abandoned = leaks;
        self.packed.abandoned = leaks;
    }
}

/// An opened session at a fixed address, which the library may keep.
struct Handle {
    library: Arc<Library>,
    at: NonNull<QzSession>,
    thread: ThreadId,
    is_set_up: bool,
}

impl Handle {
    fn open(library: Arc<Library>) -> Result<Self, Absent> {
        // From here on drop cleans up, however far this gets.
        let handle = Self {
            library,
            at: NonNull::from(Box::leak(Box::<QzSession>::default())),
            thread: thread::current().id(),
            is_set_up: false,
        };
        // SAFETY: `at` is a session in its initial state, which belongs to this thread from now on.
        let code = unsafe { (handle.library.init)(handle.at.as_ptr(), handle.library.sw_backup) };
        match Code(code) {
            Code(0) | Code::DUPLICATE => Ok(handle),
            code => Err(Absent::Refused {
                call: "qzInit",
                code,
            }),
        }
    }

    /// Only for its own thread.
    fn set_up(&mut self, level: u32) -> Result<(), Absent> {
        let mut params = QzSessionParamsDeflate::default();
        // SAFETY: the function fills in the parameters and knows nothing else.
        let code = unsafe { (self.library.defaults)(&raw mut params) };
        succeeded("qzGetDefaultsDeflate", code)?;
        params.level = level;
        params.sw_backup = self.library.sw_backup;
        params.hw_buff_sz = MEMBER;
        params.data_format = GZIP_WITH_EXTRA_FIELD;
        self.is_set_up = true;
        // SAFETY: on the thread that opened the session, as the caller promises; the parameters are copied.
        let code = unsafe { (self.library.set_up)(self.at.as_ptr(), &raw mut params) };
        succeeded("qzSetupSessionDeflate", code)?;
        // SAFETY: the session is there for as long as its handle, and the library, which may write
        // to it, does so only when this thread calls it.
        let status = Status(unsafe { (*self.at.as_ptr()).hw_session_stat });
        match status {
            Status(0) => Ok(()),
            Status::NO_DEVICE if self.library.sw_backup == 1 => Ok(()),
            status => Err(Absent::Hardware(status)),
        }
    }

    fn check(&self) -> Result<(), Failure> {
        if thread::current().id() == self.thread {
            Ok(())
        } else {
            Err(Failure::WRONG_THREAD)
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.check().is_err() {
            // Rule 3. The library may have kept the address: what is there stays.
            return;
        }
        // Nothing could be done about errors here, so the codes are not looked at.
        // SAFETY: on the thread that opened the session, which is not used after this. It came
        // from a box, and the library has no more use for it once it is closed.
        unsafe {
            if self.is_set_up {
                (self.library.tear_down)(self.at.as_ptr());
            }
            (self.library.close)(self.at.as_ptr());
            drop(Box::from_raw(self.at.as_ptr()));
        }
    }
}

/// Memory from the library: a device's if possible, any if not. Always initialised.
struct Memory {
    library: Arc<Library>,
    at: NonNull<u8>,
    len: u32,
    /// Whether it must not be freed: see [`Session`]'s drop.
    abandoned: bool,
}

impl Memory {
    fn new(library: Arc<Library>, len: u32) -> Result<Self, Failure> {
        let allocate = |pinned| {
            // SAFETY: asks for memory and nothing else.
            NonNull::new(unsafe { (library.malloc)(len as usize, NUMA_NODE, pinned) })
        };
        let at = allocate(PINNED).or_else(|| allocate(ANY_MEMORY));
        let at = at.ok_or(Failure::Memory { len })?.cast::<u8>();
        // SAFETY: `at` is valid for writes of `len` bytes, and only ours.
        unsafe { at.as_ptr().write_bytes(0, len as usize) };
        Ok(Self {
            library,
            at,
            len,
            abandoned: false,
        })
    }

    /// `len`, if that many bytes fit.
    fn checked(&self, len: usize) -> Result<u32, Failure> {
        let len = size(len)?;
        if len > self.len {
            return Err(Failure::INPUT);
        }
        Ok(len)
    }

    /// Puts `bytes` at the start, and returns how many there are.
    fn fill(&mut self, bytes: &[u8]) -> Result<u32, Failure> {
        let len = self.checked(bytes.len())?;
        // SAFETY: `at` is valid for writes of `self.len` bytes, and `checked` has found that these are
        // not more. The two do not overlap, as this memory is the library's.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.as_ptr(), bytes.len()) };
        Ok(len)
    }

    /// Fills `bytes` from the start.
    fn copy_to(&self, bytes: &mut [u8]) -> Result<(), Failure> {
        self.checked(bytes.len())?;
        // SAFETY: `at` is valid for reads of `self.len` bytes, and `checked` has found that these are
        // not more. All were initialised by `new`, so it does not matter how many the library has
        // really written. The two do not overlap, as this memory is the library's.
        unsafe { ptr::copy_nonoverlapping(self.at.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.abandoned {
            // SAFETY: from the library's `malloc`, freed only here, on the thread that allocated it: `Session` sees to that.
            unsafe { (self.library.free)(self.at.as_ptr().cast()) };
        }
    }
}

/// Resolves a function.
///
/// # Safety
/// `F` must be a function pointer of the type that the function has.
unsafe fn symbol<F: Copy>(library: &dl::Library, name: &str, symbol: &CStr) -> Result<F, Absent> {
    // SAFETY: an `Option` of a function pointer is the pointer itself, or null; the caller promises
    // the type.
    let found = unsafe { library.get::<Option<F>>(symbol.to_bytes_with_nul()) };
    let found = found.ok().and_then(|found| *found);
    found.ok_or_else(|| Absent::Symbol {
        name: name.to_owned(),
        symbol: symbol.to_string_lossy().into_owned(),
    })
}

fn succeeded(call: &'static str, code: c_int) -> Result<(), Absent> {
    match Code(code) {
        Code(0) => Ok(()),
        code => Err(Absent::Refused { call, code }),
    }
}

/// A length as the library counts.
fn size(len: usize) -> Result<u32, Failure> {
    u32::try_from(len).map_err(|_| Failure::INPUT)
}

/// `QzLogLevel_T`: nothing is printed.
const NO_LOG: c_int = 0;
/// The level at which a session is set up to see whether there is hardware.
const FASTEST: u32 = 1;
/// `hw_buff_sz`: the most that receivers with hardware take in one gzip member.
const MEMBER: u32 = 65536;
/// `data_format`.
const GZIP_WITH_EXTRA_FIELD: u32 = 2;
/// `last` of qzCompress: a packet is complete in itself.
const LAST: u32 = 1;
const PINNED: c_int = 1;
const ANY_MEMORY: c_int = 0;
const NUMA_NODE: c_int = 0;

/// The library's session.
#[repr(C)]
#[derive(Default)]
struct QzSession {
    hw_session_stat: i64,
    thread_state: i32,
    internal: Option<NonNull<c_void>>,
    total_in: u64,
    total_out: u64,
}

/// The library's parameters of a session.
#[repr(C)]
#[derive(Default)]
struct QzSessionParamsDeflate {
    direction: u32,
    level: u32,
    algorithm: u8,
    max_forks: u32,
    sw_backup: u8,
    hw_buff_sz: u32,
    strm_buff_sz: u32,
    input_threshold: u32,
    request_threshold: u32,
    wait_threshold: u32,
    polling: u32,
    sensitive_mode: u32,
    huffman_header: u32,
    data_format: u32,
}
