//! QAT hardware, through Intel's libqatzip if the machine has that.
//!
//! Nothing of it is needed to build or to start this program: [`Library::open`] looks for the
//! library when somebody asks for it, [`hardware`] says whether there is a device behind it, and a
//! [`Session`] compresses and decompresses packets on that. A library, symbol or device that is
//! missing is [`Absent`], which is no error as long as our own software twin of the format serves.
//! The library's own software path is never used: every session is opened without it, and a result
//! that did not come from hardware is a [`Failure`].
//!
//! Four rules make the unsafe blocks below sound:
//! 1. **The interface is that of libqatzip.so.3.** Signatures and layouts are written down here
//!    once, without C headers. Whoever names another file vouches for it, as for any program.
//! 2. **The library is never unloaded**, so its functions stay where they are. It leaves
//!    thread-local data with destructors behind, which would otherwise be called in memory that is
//!    gone.
//! 3. **What belongs to a session is used by one thread**, the one that opened it. From any other
//!    thread calls are refused and drops leave everything as it is.
//! 4. **The library works in memory of its own**: pages and payloads are copied in and out, to and
//!    from buffers whose sizes we know, so it gets no pointer to ours, and what it says about
//!    lengths is checked before it is used. The copy is no waste: a device needs memory that it can
//!    reach, and pages of a running guest change under its hands.

use std::{
    ffi::{CStr, OsStr, c_int, c_uint, c_void},
    fmt,
    mem::{ManuallyDrop, offset_of},
    ops::RangeInclusive,
    ptr::{self, NonNull},
    sync::Arc,
    thread::{self, ThreadId},
};

use libloading::os::unix as dl;
use thiserror::Error;

/// What the library is called where it is installed.
pub(crate) const NAME: &str = "libqatzip.so.3";

/// The loaded library, for all threads.
#[derive(Debug)]
pub(crate) struct Library {
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
        unsafe {
            Ok(Self {
                init: symbol(&library, &name, c"qzInit")?,
                defaults: symbol(&library, &name, c"qzGetDefaultsDeflate")?,
                set_up: symbol(&library, &name, c"qzSetupSessionDeflate")?,
                bound: symbol(&library, &name, c"qzMaxCompressedLength")?,
                malloc: symbol(&library, &name, c"qzMalloc")?,
                free: symbol(&library, &name, c"qzFree")?,
                compress: symbol(&library, &name, c"qzCompress")?,
                decompress: symbol(&library, &name, c"qzDecompress")?,
                tear_down: symbol(&library, &name, c"qzTeardownSession")?,
                close: symbol(&library, &name, c"qzClose")?,
            })
        }
    }
}

/// Whether the library finds hardware, and if not, why. Opens the devices and closes them again.
pub(crate) fn hardware(library: &Arc<Library>) -> Result<(), Absent> {
    Handle::open(Arc::clone(library)).map(drop)
}

/// Why there is no QAT here.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum Absent {
    /// There is no such file, or it is not a library.
    #[error("{name} cannot be loaded: {why}")]
    Load {
        /// The library asked for.
        name: String,
        /// The loader's words.
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
    /// The library found no hardware that it can use.
    #[error("libqatzip finds no usable QAT hardware: {0}")]
    Hardware(Status),
    /// The library did not start, without saying anything of hardware.
    #[error("libqatzip does not start: qzInit returns {0}")]
    Init(Code),
}

/// Why a session could not be opened, or a packet not be handled. Never a reason to end a
/// migration: what hardware cannot do, software can.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum Failure {
    /// There is no hardware.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// The library returned something else than success. From [`Session::decompress`] that may as
    /// well be the payload's fault, and [`Code::DATA`] most likely is.
    #[error("libqatzip's {call} returns {code}")]
    Code {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: Code,
    },
    /// The library has no memory for a session's buffers.
    #[error("libqatzip has no {len} bytes of memory")]
    Memory {
        /// Bytes asked for.
        len: u32,
    },
    /// The library did not take all that it was given; or, from [`Session::decompress`], the
    /// payload goes on after the pages.
    #[error("libqatzip's {call} claims to have taken {claimed} of {given} bytes")]
    Taken {
        /// The function.
        call: &'static str,
        /// Bytes that it says it has taken.
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
        /// Bytes that it says it has made, or may make.
        claimed: u32,
        /// Bytes that it may have made.
        allowed: RangeInclusive<u32>,
    },
    /// The caller gave more than the session was opened for.
    #[error("{len} bytes were given to a QAT session for {max}")]
    Input {
        /// Bytes given.
        len: usize,
        /// Most bytes that fit.
        max: usize,
    },
    /// The caller's output is too small for the result.
    #[error("a QAT session has {len} bytes for an output of {room}")]
    Room {
        /// Bytes of the result.
        len: usize,
        /// Bytes that fit.
        room: usize,
    },
    /// The caller used a session on another thread than the one that opened it.
    #[error("a QAT session was used by a thread that did not open it")]
    WrongThread,
    /// An earlier call on this session ended without an answer from the device.
    #[error("a QAT session was used after its device had not answered")]
    Lost,
}

/// What a library function returned, other than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

impl Code {
    /// The devices are open already: as good as success where they are opened.
    pub(crate) const DUPLICATE: Self = Self(1);
    /// The library fell back to software, which it was told not to.
    pub(crate) const FORCED_SOFTWARE: Self = Self(2);
    /// Something is wrong with the input.
    pub(crate) const DATA: Self = Self(-4);
    /// The device did not answer in time.
    pub(crate) const TIMEOUT: Self = Self(-5);

    /// There is hardware, but no free instance of it, and software is not wanted.
    pub(crate) const NO_INSTANCE: Self = Self(-103);

    /// What it means.
    pub(crate) fn meaning(self) -> &'static str {
        match self {
            Self::DUPLICATE => "done before",
            Self::FORCED_SOFTWARE => "done in software",
            Self(-1) => "invalid parameters",
            Self(-2) => "failed",
            Self(-3) => "output too small",
            Self::DATA => "invalid data",
            Self::TIMEOUT => "timed out",
            Self(-100) => "integrity check failed",
            Self(-101) => "no hardware, and no software either",
            Self(-102) => "no driver, and no software either",
            Self::NO_INSTANCE => "no free instance, and no software either",
            Self(-104) => "too little memory, and no software either",
            Self(-105) => "not for hardware, and no software either",
            _ => "unknown code",
        }
    }

    /// Whether the library knows what became of the request. If not, the device may still be at it.
    fn is_settled(self) -> bool {
        matches!(
            self.0,
            1 | 2 | -1 | -3 | -4 | -100 | -105..=-101 // All of the known ones but -2 and -5.
        )
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.meaning())
    }
}

/// What `hw_session_stat` says about the hardware; 0, for a session that has some, is never in
/// here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) i64);

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = match self.0 {
            11 => "no device",
            12 => "no driver",
            13 => "no free instance",
            14 => "too little memory",
            _ => "unknown status",
        };
        write!(f, "{meaning} (hw_session_stat {})", self.0)
    }
}

/// A way to the hardware for one thread: both directions, one packet at a time, nothing carried
/// over from one packet to the next.
///
/// It may be moved to another thread, but is of no use there: everything fails with
/// [`Failure::WrongThread`]. Dropped there, it is leaked, memory and all, since the library's
/// functions that would free it must not be called there. After a `fork` the child must not touch
/// it.
pub(crate) struct Session {
    // In this order: buffers go before the session does.
    plain: Memory,
    packed: Memory,
    handle: Handle,
    /// Set once a call had no answer.
    lost: bool,
}

// SAFETY: nothing behind the pointers in here is reached from any thread but the one that opened
// the session, wherever the session itself is (rule 3): `compress` and `decompress` begin by asking
// `Handle::check`, and the drops of `Memory` and `Handle` ask for the thread too. `Session` has no
// other functions than these, and ids of threads are not reused. The rest of it is `Send`.
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
        // It wants as much room as its bound says, even if it needs less.
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
            lost: false,
        })
    }

    /// Compresses `pages` to the start of `out`, and says to how many bytes. They are what the
    /// device wrote: nobody has looked at them.
    pub(crate) fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, Failure> {
        self.check()?;
        let given = self.plain.fill(pages)?;
        let room = self.packed.len;
        let (mut taken, mut made) = (given, room);
        // SAFETY: on the thread that opened the session and set it up, says `check`. The buffers
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
        let answer = Answer { code, taken, made };
        let made = self.judge("qzCompress", answer, given, 1..=room)?;
        let most = out.len();
        let Some(out) = out.get_mut(..made) else {
            return Err(Failure::Room {
                len: made,
                room: most,
            });
        };
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
        let answer = Answer { code, taken, made };
        self.judge("qzDecompress", answer, given, wanted..=wanted)?;
        self.plain.copy_to(pages)
    }

    fn check(&self) -> Result<(), Failure> {
        self.handle.check()?;
        if self.lost {
            return Err(Failure::Lost);
        }
        Ok(())
    }

    /// How many bytes a call has made, if it took all that was `given` and made as many as
    /// `allowed`.
    fn judge(
        &mut self,
        call: &'static str,
        answer: Answer,
        given: u32,
        allowed: RangeInclusive<u32>,
    ) -> Result<usize, Failure> {
        let code = Code(answer.code);
        let (taken, made) = (answer.taken, answer.made);
        if answer.code != 0 {
            self.lost = !code.is_settled();
            return Err(Failure::Code { call, code });
        }
        if taken != given {
            return Err(Failure::Taken {
                call,
                claimed: taken,
                given,
            });
        }
        if !allowed.contains(&made) {
            return Err(Failure::Made {
                call,
                claimed: made,
                allowed,
            });
        }
        Ok(made as usize)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.lost {
            // The device may yet write there: whoever got the memory next would find it changed.
            self.plain.abandoned = true;
            self.packed.abandoned = true;
        }
    }
}

/// What the library says about a call.
struct Answer {
    code: c_int,
    taken: u32,
    made: u32,
}

/// An opened session, at a place of its own where the library may point to.
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
            at: NonNull::from(Box::leak(Box::new(QzSession::ZERO))),
            thread: thread::current().id(),
            is_set_up: false,
        };
        // SAFETY: `at` is a session in its initial state, which belongs to this thread from now on.
        let code = unsafe { (handle.library.init)(handle.at.as_ptr(), WITHOUT_SOFTWARE) };
        // The status first: it says why, where the code only says that it failed.
        handle.status()?;
        match Code(code) {
            Code(0) | Code::DUPLICATE => Ok(handle),
            code => Err(Absent::Init(code)),
        }
    }

    fn set_up(&mut self, level: u32) -> Result<(), Failure> {
        self.check()?;
        let mut params = QzSessionParamsDeflate::ZERO;
        // SAFETY: the function fills in the parameters and knows nothing else.
        let code = unsafe { (self.library.defaults)(&raw mut params) };
        succeeded("qzGetDefaultsDeflate", code)?;
        params.level = level;
        params.sw_backup = WITHOUT_SOFTWARE;
        params.hw_buff_sz = MEMBER;
        params.data_format = GZIP_WITH_EXTRA_FIELD;
        self.is_set_up = true;
        // SAFETY: on the thread that opened the session, says `check`; the parameters are copied.
        let code = unsafe { (self.library.set_up)(self.at.as_ptr(), &raw mut params) };
        succeeded("qzSetupSessionDeflate", code)?;
        Ok(self.status()?)
    }

    /// Whether there is hardware behind the session. Only for its own thread.
    fn status(&self) -> Result<(), Absent> {
        // SAFETY: the session is there for as long as its handle, and the library, which may write
        // to it, does so only when this thread calls it.
        match unsafe { (*self.at.as_ptr()).hw_session_stat } {
            0 => Ok(()),
            other => Err(Absent::Hardware(Status(other))),
        }
    }

    fn check(&self) -> Result<(), Failure> {
        if thread::current().id() == self.thread {
            Ok(())
        } else {
            Err(Failure::WrongThread)
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
        // SAFETY: on the thread that opened the session, which nobody can use after this. It came
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
    thread: ThreadId,
    /// Whether it must not be freed.
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
        // SAFETY: `at` is valid for writes of `len` bytes, and nobody else's.
        unsafe { at.as_ptr().write_bytes(0, len as usize) };
        Ok(Self {
            library,
            at,
            len,
            thread: thread::current().id(),
            abandoned: false,
        })
    }

    /// `len`, if that many bytes fit.
    fn checked(&self, len: usize) -> Result<u32, Failure> {
        match u32::try_from(len) {
            Ok(len) if len <= self.len => Ok(len),
            _ => Err(Failure::Input {
                len,
                max: self.len as usize,
            }),
        }
    }

    /// Puts `bytes` at the start, and says how many there are.
    fn fill(&mut self, bytes: &[u8]) -> Result<u32, Failure> {
        let len = self.checked(bytes.len())?;
        // SAFETY: `at` is valid for writes of `self.len` bytes, and `checked` says that these are
        // not more. The two do not overlap, as this memory is the library's.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.as_ptr(), bytes.len()) };
        Ok(len)
    }

    /// Fills `bytes` from the start.
    fn copy_to(&self, bytes: &mut [u8]) -> Result<(), Failure> {
        self.checked(bytes.len())?;
        // SAFETY: `at` is valid for reads of `self.len` bytes, and `checked` says that these are
        // not more. All were initialised by `new`, so it does not matter how many the library has
        // really written. The two do not overlap, as this memory is the library's.
        unsafe { ptr::copy_nonoverlapping(self.at.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.abandoned || thread::current().id() != self.thread {
            return;
        }
        // SAFETY: from the library's `malloc`, freed only here, on the thread that got it.
        unsafe { (self.library.free)(self.at.as_ptr().cast()) };
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

fn succeeded(call: &'static str, code: c_int) -> Result<(), Failure> {
    match Code(code) {
        Code(0) => Ok(()),
        code => Err(Failure::Code { call, code }),
    }
}

/// A length as the library counts.
fn size(len: usize) -> Result<u32, Failure> {
    u32::try_from(len).map_err(|_| Failure::Input {
        len,
        max: u32::MAX as usize,
    })
}

/// `sw_backup`.
const WITHOUT_SOFTWARE: u8 = 0;
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
struct QzSession {
    hw_session_stat: i64,
    thread_state: i32,
    internal: *mut c_void,
    total_in: u64,
    total_out: u64,
}

impl QzSession {
    const ZERO: Self = Self {
        hw_session_stat: 0,
        thread_state: 0,
        internal: ptr::null_mut(),
        total_in: 0,
        total_out: 0,
    };
}

const _: () = assert!(
    size_of::<QzSession>() == 40
        && align_of::<QzSession>() == 8
        && offset_of!(QzSession, hw_session_stat) == 0
        && offset_of!(QzSession, thread_state) == 8
        && offset_of!(QzSession, internal) == 16
        && offset_of!(QzSession, total_in) == 24
        && offset_of!(QzSession, total_out) == 32
);

/// The library's parameters of a session.
#[repr(C)]
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

impl QzSessionParamsDeflate {
    const ZERO: Self = Self {
        direction: 0,
        level: 0,
        algorithm: 0,
        max_forks: 0,
        sw_backup: 0,
        hw_buff_sz: 0,
        strm_buff_sz: 0,
        input_threshold: 0,
        request_threshold: 0,
        wait_threshold: 0,
        polling: 0,
        sensitive_mode: 0,
        huffman_header: 0,
        data_format: 0,
    };
}

const _: () = assert!(
    size_of::<QzSessionParamsDeflate>() == 56
        && align_of::<QzSessionParamsDeflate>() == 4
        && offset_of!(QzSessionParamsDeflate, direction) == 0
        && offset_of!(QzSessionParamsDeflate, level) == 4
        && offset_of!(QzSessionParamsDeflate, algorithm) == 8
        && offset_of!(QzSessionParamsDeflate, max_forks) == 12
        && offset_of!(QzSessionParamsDeflate, sw_backup) == 16
        && offset_of!(QzSessionParamsDeflate, hw_buff_sz) == 20
        && offset_of!(QzSessionParamsDeflate, strm_buff_sz) == 24
        && offset_of!(QzSessionParamsDeflate, input_threshold) == 28
        && offset_of!(QzSessionParamsDeflate, request_threshold) == 32
        && offset_of!(QzSessionParamsDeflate, wait_threshold) == 36
        && offset_of!(QzSessionParamsDeflate, polling) == 40
        && offset_of!(QzSessionParamsDeflate, sensitive_mode) == 44
        && offset_of!(QzSessionParamsDeflate, huffman_header) == 48
        && offset_of!(QzSessionParamsDeflate, data_format) == 52
);

/// The stand-in for the library, for tests that load it: each has its own, with its own switches.
#[cfg(test)]
pub(crate) mod stand_in {
    use std::{
        ffi::{CString, c_char, c_long},
        path::PathBuf,
    };

    use super::*;

    /// A stand-in of this test's own; `crates/lab/stand_in/libqatzip.c` lists its switches.
    pub(crate) struct StandIn {
        pub(crate) library: Arc<Library>,
        set: unsafe extern "C" fn(*const c_char, c_long),
        get: unsafe extern "C" fn(*const c_char) -> c_long,
        _file: File,
    }

    impl StandIn {
        /// `None` where it cannot be compiled; the test is then reported as skipped.
        pub(crate) fn new() -> Option<Self> {
            let file = File::new(None)?;
            let library = Library::open(file.path.as_os_str()).unwrap();
            // SAFETY: our own file, and the types that it has. It has been loaded already, and
            // stays (rule 2).
            let (set, get) = unsafe {
                let library = dl::Library::new(&file.path).unwrap();
                (
                    symbol(&library, "", c"stand_in_set").unwrap(),
                    symbol(&library, "", c"stand_in_get").unwrap(),
                )
            };
            Some(Self {
                library: Arc::new(library),
                set,
                get,
                _file: file,
            })
        }

        pub(crate) fn set(&self, name: &str, value: i64) {
            let name = CString::new(name).unwrap();
            // SAFETY: the name ends with a zero and outlives the call.
            unsafe { (self.set)(name.as_ptr(), value) };
        }

        pub(crate) fn get(&self, name: &str) -> i64 {
            let name = CString::new(name).unwrap();
            // SAFETY: as above.
            unsafe { (self.get)(name.as_ptr()) }
        }
    }

    /// The compiled file.
    pub(crate) struct File {
        pub(crate) path: PathBuf,
        _folder: tempfile::TempDir,
    }

    impl File {
        pub(crate) fn new(without: Option<&str>) -> Option<Self> {
            let folder = tempfile::tempdir().unwrap();
            let path = lab::stand_in::libqatzip_or_skip(folder.path(), without).unwrap()?;
            Some(Self {
                path,
                _folder: folder,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read as _};

    use super::{
        stand_in::{File, StandIn},
        *,
    };

    const PAGES: usize = 512 << 10;
    const PAYLOAD: usize = 1 << 20;

    /// Bytes that compress a little, differently for each seed.
    fn pages(len: usize, seed: usize) -> Vec<u8> {
        let bytes = (0..len).map(|at| ((at * at + seed * 977) >> 5) ^ (at >> 3));
        bytes.map(|byte| byte.to_le_bytes()[0]).collect()
    }

    fn open(stand_in: &StandIn) -> Result<Session, Failure> {
        Session::open(Arc::clone(&stand_in.library), 1, PAGES, PAYLOAD)
    }

    fn compress(session: &mut Session, pages: &[u8]) -> Result<Vec<u8>, Failure> {
        let mut payload = vec![0; PAYLOAD];
        let len = session.compress(pages, &mut payload)?;
        payload.truncate(len);
        Ok(payload)
    }

    fn decompress(session: &mut Session, payload: &[u8], len: usize) -> Result<Vec<u8>, Failure> {
        let mut pages = vec![0; len];
        session.decompress(payload, &mut pages)?;
        Ok(pages)
    }

    /// The members' sizes before compression, by their headers.
    fn members(mut payload: &[u8]) -> Vec<u32> {
        let mut sizes = Vec::new();
        while !payload.is_empty() {
            assert_eq!(payload[..4], [0x1f, 0x8b, 8, 4]);
            assert_eq!(payload[10..16], [12, 0, b'Q', b'Z', 8, 0]);
            let number = |at| u32::from_le_bytes(payload[at..at + 4].try_into().unwrap());
            sizes.push(number(16));
            payload = &payload[24 + number(20) as usize + 8..];
        }
        sizes
    }

    fn is_balanced(stand_in: &StandIn) -> bool {
        stand_in.get("qzInit_calls") == stand_in.get("qzClose_calls")
            && stand_in.get("qzSetupSessionDeflate_calls")
                == stand_in.get("qzTeardownSession_calls")
            && stand_in.get("mallocs") == stand_in.get("frees")
            && stand_in.get("misuse") == 0
    }

    #[test]
    fn packets_of_one_to_eight_members_come_back() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        assert_eq!(hardware(&stand_in.library), Ok(()));
        let mut session = open(&stand_in).unwrap();
        for parts in 1..=8 {
            stand_in.set("members", parts.try_into().unwrap());
            for len in [PAGES, 3 * 65536 + 4096, 8 * 4096] {
                let pages = pages(len, parts);
                let payload = compress(&mut session, &pages).unwrap();
                let sizes = members(&payload);
                assert!(sizes.len() <= parts);
                assert_eq!(sizes.iter().sum::<u32>() as usize, len);

                let mut other = Vec::new();
                let mut decoder = flate2::read::MultiGzDecoder::new(&payload[..]);
                decoder.read_to_end(&mut other).unwrap();
                assert!(other == pages);
                assert!(decompress(&mut session, &payload, len).unwrap() == pages);
            }
        }
        // What the device's own size makes of it.
        stand_in.set("members", 0);
        stand_in.set("strict", 1);
        let pages = pages(PAGES - 4096, 9);
        let payload = compress(&mut session, &pages).unwrap();
        let mut sizes = [MEMBER; 8];
        sizes[7] -= 4096;
        assert_eq!(members(&payload), sizes);
        assert!(decompress(&mut session, &payload, pages.len()).unwrap() == pages);

        drop(session);
        assert!(is_balanced(&stand_in));
        assert_eq!(stand_in.get("qzInit_calls"), 2);
        assert_eq!(stand_in.get("mallocs"), 2);
    }

    #[test]
    fn every_level_is_told_to_the_library() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let pages = pages(PAGES, 1);
        let mut sizes = Vec::new();
        for level in 1..=9 {
            let library = Arc::clone(&stand_in.library);
            let mut session = Session::open(library, level, PAGES, PAYLOAD).unwrap();
            assert_eq!(stand_in.get("seen_level"), i64::from(level));
            sizes.push(compress(&mut session, &pages).unwrap().len());
        }
        assert!(sizes[8] < sizes[0], "{sizes:?}");
        for level in [0, 10] {
            let library = Arc::clone(&stand_in.library);
            let failure = Session::open(library, level, PAGES, PAYLOAD).err().unwrap();
            let call = "qzSetupSessionDeflate";
            let code = Code(-1);
            assert_eq!(failure, Failure::Code { call, code });
        }
        assert!(is_balanced(&stand_in));
    }

    #[test]
    fn the_librarys_own_software_is_never_allowed() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        stand_in.set("seen_init_sw_backup", 99);
        assert_eq!(hardware(&stand_in.library), Ok(()));
        assert_eq!(stand_in.get("seen_init_sw_backup"), 0);
        stand_in.set("seen_init_sw_backup", 99);
        stand_in.set("seen_sw_backup", 99);
        open(&stand_in).unwrap();
        assert_eq!(stand_in.get("seen_init_sw_backup"), 0);
        assert_eq!(stand_in.get("seen_sw_backup"), 0);
    }

    #[test]
    fn what_cannot_be_loaded_is_absent() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join(NAME);
        let nonsense = folder.path().join("nonsense.so");
        fs::write(&nonsense, "This is no library.").unwrap();
        for path in [&missing, &nonsense] {
            let absent = Library::open(path.as_os_str()).unwrap_err();
            let Absent::Load { name, why } = &absent else {
                panic!("{absent}");
            };
            assert_eq!(name.as_str(), path.to_str().unwrap());
            assert!(!why.is_empty() && !why.contains(name.as_str()), "{why}");
            let text = absent.to_string();
            assert_eq!(text, format!("{name} cannot be loaded: {why}"));
        }
        let absent = Library::open(OsStr::new("no\0name")).unwrap_err();
        assert!(matches!(absent, Absent::Load { .. }), "{absent}");
    }

    #[test]
    fn a_library_without_one_of_the_functions_is_absent() {
        for without in lab::stand_in::LIBQATZIP_SYMBOLS {
            let Some(file) = File::new(Some(without)) else {
                return;
            };
            let absent = Library::open(file.path.as_os_str()).unwrap_err();
            let name = file.path.to_str().unwrap();
            let text = format!("{name} has no symbol {without}");
            assert_eq!(absent.to_string(), text);
            assert!(matches!(absent, Absent::Symbol { symbol, .. } if symbol == without));
        }
    }

    #[test]
    fn a_library_that_is_another_one_is_absent() {
        // Any process has loaded this one.
        let absent = Library::open(OsStr::new("libc.so.6")).unwrap_err();
        assert_eq!(absent.to_string(), "libc.so.6 has no symbol qzInit");
    }

    #[test]
    fn hardware_is_absent_with_its_reason() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let reasons = [
            (11, "no device"),
            (12, "no driver"),
            (13, "no free instance"),
            (14, "too little memory"),
            (15, "unknown status"),
            (-1, "unknown status"),
        ];
        for (stat, reason) in reasons {
            stand_in.set("hw_session_stat", stat);
            let absent = hardware(&stand_in.library).unwrap_err();
            assert_eq!(absent, Absent::Hardware(Status(stat)));
            let text = format!(
                "libqatzip finds no usable QAT hardware: {reason} (hw_session_stat {stat})"
            );
            assert_eq!(absent.to_string(), text);
            assert_eq!(open(&stand_in).err().unwrap(), Failure::Absent(absent));
        }
        stand_in.set("hw_session_stat", 0);
        assert_eq!(hardware(&stand_in.library), Ok(()));
        assert!(is_balanced(&stand_in));
        assert_eq!(stand_in.get("mallocs"), 0);
    }

    /// Every code that the library is known to return, but 0, and one that it is not.
    const CODES: [i32; 15] = [
        1,
        2,
        -1,
        -2,
        -3,
        -4,
        -5,
        -100,
        -101,
        -102,
        -103,
        -104,
        -105,
        77,
        i32::MIN,
    ];

    #[test]
    fn codes_of_opening_a_session() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        for code in CODES.map(Code) {
            stand_in.set("qzInit_code", code.0.into());
            if code == Code::DUPLICATE {
                assert_eq!(hardware(&stand_in.library), Ok(()));
                assert!(compress(&mut open(&stand_in).unwrap(), &[7; 4096]).is_ok());
            } else {
                let absent = Absent::Init(code);
                assert_eq!(hardware(&stand_in.library), Err(absent.clone()));
                assert_eq!(open(&stand_in).err().unwrap(), Failure::Absent(absent));
            }
            stand_in.set("qzInit_code", 0);

            for call in ["qzGetDefaultsDeflate", "qzSetupSessionDeflate"] {
                let switch = format!("{call}_code");
                stand_in.set(&switch, code.0.into());
                assert_eq!(hardware(&stand_in.library), Ok(()));
                let failure = open(&stand_in).err().unwrap();
                assert_eq!(failure, Failure::Code { call, code });
                stand_in.set(&switch, 0);
            }
        }
        assert!(open(&stand_in).is_ok());
        assert!(is_balanced(&stand_in));
    }

    #[test]
    fn codes_of_packets() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let pages = pages(8 * 4096, 3);
        let payload = compress(&mut open(&stand_in).unwrap(), &pages).unwrap();
        for code in CODES.map(Code) {
            for call in ["qzCompress", "qzDecompress"] {
                let mut session = open(&stand_in).unwrap();
                let run = |session: &mut Session| match call {
                    "qzCompress" => compress(session, &pages).map(|made| made == payload),
                    _ => decompress(session, &payload, pages.len()).map(|made| made == pages),
                };
                let switch = format!("{call}_code");
                stand_in.set(&switch, code.0.into());
                assert_eq!(run(&mut session), Err(Failure::Code { call, code }));
                stand_in.set(&switch, 0);

                // Only where nothing can come from the device any more may the session be used.
                let (calls, frees) = (
                    stand_in.get(&format!("{call}_calls")),
                    stand_in.get("frees"),
                );
                if [-2, -5, 77, i32::MIN].contains(&code.0) {
                    assert_eq!(run(&mut session), Err(Failure::Lost));
                    assert_eq!(stand_in.get(&format!("{call}_calls")), calls);
                    drop(session);
                    assert_eq!(stand_in.get("frees"), frees);
                } else {
                    assert_eq!(run(&mut session), Ok(true));
                    drop(session);
                    assert_eq!(stand_in.get("frees"), frees + 2);
                }
            }
        }
        assert_eq!(stand_in.get("qzInit_calls"), stand_in.get("qzClose_calls"));
        assert_eq!(stand_in.get("misuse"), 0);
    }

    #[test]
    fn codes_say_what_they_mean() {
        let mut meanings = CODES.map(|code| Code(code).meaning()).to_vec();
        // The last two are unknown.
        meanings.pop();
        meanings.sort_unstable();
        meanings.dedup();
        assert_eq!(meanings.len(), CODES.len() - 1);
        let failure = Failure::Code {
            call: "qzCompress",
            code: Code::TIMEOUT,
        };
        let text = "libqatzip's qzCompress returns -5 (timed out)";
        assert_eq!(failure.to_string(), text);
    }

    #[test]
    fn calls_fail_only_when_told_to() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let mut session = open(&stand_in).unwrap();
        let outcomes = |session: &mut Session| -> Vec<bool> {
            let run = |_| compress(session, &[1; 4096]).is_ok();
            (0..6).map(run).collect()
        };
        stand_in.set("qzCompress_code", Code::FORCED_SOFTWARE.0.into());
        stand_in.set("qzCompress_first", 2);
        let first_two = [false, false, true, true, true, true];
        assert_eq!(outcomes(&mut session), first_two);
        stand_in.set("qzCompress_first", 0);
        stand_in.set("qzCompress_every", 3);
        let each_third = [true, true, false, true, true, false];
        assert_eq!(outcomes(&mut session), each_third);
    }

    #[test]
    fn a_slow_device_is_waited_for() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        stand_in.set("delay_us", 20_000);
        let mut session = open(&stand_in).unwrap();
        let start = std::time::Instant::now();
        compress(&mut session, &[1; 4096]).unwrap();
        assert!(start.elapsed().as_micros() >= 20_000);
    }

    #[test]
    fn memory_need_not_be_a_devices() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        stand_in.set("no_pinned", 1);
        let mut session = open(&stand_in).unwrap();
        let pages = pages(PAGES, 4);
        let payload = compress(&mut session, &pages).unwrap();
        assert!(decompress(&mut session, &payload, PAGES).unwrap() == pages);
        drop(session);

        stand_in.set("no_memory", 1);
        let len = PAGES.try_into().unwrap();
        let failure = open(&stand_in).err().unwrap();
        assert_eq!(failure, Failure::Memory { len });
        assert!(is_balanced(&stand_in));
        assert_eq!(stand_in.get("mallocs"), 2);
    }

    #[test]
    fn a_bound_beyond_what_a_payload_may_have_is_refused() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let payload = u32::try_from(PAYLOAD).unwrap();
        for bound in [payload + 1, u32::MAX] {
            stand_in.set("bound", bound.into());
            let failure = Failure::Made {
                call: "qzMaxCompressedLength",
                claimed: bound,
                allowed: 0..=payload,
            };
            assert_eq!(open(&stand_in).err().unwrap(), failure);
        }
        stand_in.set("bound", payload.into());
        assert!(open(&stand_in).is_ok());
        assert!(is_balanced(&stand_in));
    }

    #[test]
    fn lengths_that_the_library_claims_are_not_believed() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let pages = pages(8 * 4096, 5);
        let given = u32::try_from(pages.len()).unwrap();
        let room = u32::try_from(PAYLOAD).unwrap();
        let mut session = open(&stand_in).unwrap();
        let payload = compress(&mut session, &pages).unwrap();
        let packed = u32::try_from(payload.len()).unwrap();

        let call = "qzCompress";
        for (by, claimed) in [
            (-1, given - 1),
            (-1 << 40, 0),
            (1, given + 1),
            (1 << 40, u32::MAX),
        ] {
            stand_in.set("qzCompress_src_len", by);
            let failure = Failure::Taken {
                call,
                claimed,
                given,
            };
            assert_eq!(compress(&mut session, &pages), Err(failure));
        }
        stand_in.set("qzCompress_src_len", 0);
        let over = i64::from(room - packed) + 1;
        for (by, claimed) in [(over, room + 1), (1 << 40, u32::MAX), (-1 << 40, 0)] {
            stand_in.set("qzCompress_dst_len", by);
            let allowed = 1..=room;
            let failure = Failure::Made {
                call,
                claimed,
                allowed,
            };
            assert_eq!(compress(&mut session, &pages), Err(failure));
        }
        // A claim that is possible is taken for true; what it adds is none of our secrets.
        stand_in.set("qzCompress_dst_len", over - 1);
        let claimed = compress(&mut session, &pages).unwrap();
        assert_eq!(claimed.len(), PAYLOAD);
        assert!(claimed[..payload.len()] == payload);
        assert!(claimed[payload.len()..].iter().all(|&byte| byte == 0));
        stand_in.set("qzCompress_dst_len", 0);

        let call = "qzDecompress";
        for (by, claimed) in [(-1, packed - 1), (1, packed + 1), (1 << 40, u32::MAX)] {
            stand_in.set("qzDecompress_src_len", by);
            let given = packed;
            let failure = Failure::Taken {
                call,
                claimed,
                given,
            };
            assert_eq!(
                decompress(&mut session, &payload, pages.len()),
                Err(failure)
            );
        }
        stand_in.set("qzDecompress_src_len", 0);
        for (by, claimed) in [
            (-1, given - 1),
            (1, given + 1),
            (1 << 40, u32::MAX),
            (-1 << 40, 0),
        ] {
            stand_in.set("qzDecompress_dst_len", by);
            let allowed = given..=given;
            let failure = Failure::Made {
                call,
                claimed,
                allowed,
            };
            assert_eq!(
                decompress(&mut session, &payload, pages.len()),
                Err(failure)
            );
        }
        stand_in.set("qzDecompress_dst_len", 0);
        assert!(decompress(&mut session, &payload, pages.len()).unwrap() == pages);
        drop(session);
        assert!(is_balanced(&stand_in));
    }

    #[test]
    fn payloads_must_become_exactly_the_pages() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let mut session = open(&stand_in).unwrap();
        let pages = pages(PAGES, 6);
        let payload = compress(&mut session, &pages).unwrap();
        let call = "qzDecompress";
        for len in [0, 4096, PAGES - 1] {
            let wanted = u32::try_from(len).unwrap();
            let failure = Failure::Made {
                call,
                claimed: PAGES.try_into().unwrap(),
                allowed: wanted..=wanted,
            };
            assert_eq!(decompress(&mut session, &payload, len), Err(failure));
        }
        // Damaged or cut: for the library to find out, without harm to the session.
        for payload in [&payload[..payload.len() - 1], &payload[1..], &[0; 4096]] {
            let code = Code::DATA;
            let failure = Failure::Code { call, code };
            assert_eq!(decompress(&mut session, payload, PAGES), Err(failure));
        }
        assert!(decompress(&mut session, &payload, PAGES).unwrap() == pages);
    }

    #[test]
    fn more_than_a_session_is_for_does_not_reach_the_library() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let mut session = open(&stand_in).unwrap();
        let too_much = |len, max| Err(Failure::Input { len, max });
        let result = session.compress(&vec![0; PAGES + 1], &mut []);
        assert_eq!(result.map(drop), too_much(PAGES + 1, PAGES));
        let result = session.decompress(&[0], &mut vec![0; PAGES + 1]);
        assert_eq!(result, too_much(PAGES + 1, PAGES));
        let result = session.decompress(&vec![0; PAYLOAD + 1], &mut [0]);
        assert_eq!(result, too_much(PAYLOAD + 1, PAYLOAD));
        assert_eq!(stand_in.get("qzCompress_calls"), 0);
        assert_eq!(stand_in.get("qzDecompress_calls"), 0);

        // Too little room for the result, on the other hand, is only known afterwards.
        let len = compress(&mut session, &[1; 4096]).unwrap().len();
        let mut out = vec![0xa5; len - 1];
        let failure = session.compress(&[1; 4096], &mut out).unwrap_err();
        let room = len - 1;
        assert_eq!(failure, Failure::Room { len, room });
        assert!(out.iter().all(|&byte| byte == 0xa5));
    }

    #[test]
    fn what_the_library_does_to_the_bytes_is_not_looked_at() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let mut session = open(&stand_in).unwrap();
        let pages = pages(PAGES, 7);
        let good = compress(&mut session, &pages).unwrap();
        for (switch, differences) in [("qzCompress_corrupt", 1), ("header_byte", 8)] {
            stand_in.set(switch, 1);
            let bad = compress(&mut session, &pages).unwrap();
            let different = good.iter().zip(&bad).filter(|(good, bad)| good != bad);
            assert_eq!((bad.len(), different.count()), (good.len(), differences));
            stand_in.set(switch, 0);
        }
        stand_in.set("plain_gzip", 1);
        let plain = compress(&mut session, &pages).unwrap();
        assert_eq!(plain.len(), good.len() - 8 * 14);
        assert!(decompress(&mut session, &plain, PAGES).unwrap() == pages);

        stand_in.set("qzDecompress_corrupt", 1);
        let bad = decompress(&mut session, &good, PAGES).unwrap();
        let different = bad.iter().zip(&pages).filter(|(bad, good)| bad != good);
        assert_eq!(different.count(), 1);
    }

    #[test]
    fn no_thread_but_its_own_uses_a_session() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let pages = pages(4096, 8);
        let mut session = open(&stand_in).unwrap();
        let payload = compress(&mut session, &pages).unwrap();
        let session = thread::scope(|scope| {
            let use_it = || {
                let result = compress(&mut session, &pages);
                assert_eq!(result, Err(Failure::WrongThread));
                let result = decompress(&mut session, &payload, 4096);
                assert_eq!(result, Err(Failure::WrongThread));
                session
            };
            scope.spawn(use_it).join().unwrap()
        });
        assert_eq!(stand_in.get("qzCompress_calls"), 1);
        assert_eq!(stand_in.get("qzDecompress_calls"), 0);

        // Back home it is what it was.
        let mut session = session;
        assert!(decompress(&mut session, &payload, 4096).unwrap() == pages);

        // Dropped elsewhere, nothing is done to it.
        thread::scope(|scope| scope.spawn(|| drop(session)).join().unwrap());
        for call in [
            "frees",
            "qzTeardownSession_calls",
            "qzClose_calls",
            "misuse",
        ] {
            assert_eq!(stand_in.get(call), 0, "{call}");
        }
    }

    #[test]
    fn threads_with_sessions_of_their_own_do_not_meet() {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        thread::scope(|scope| {
            for seed in 0..4 {
                let stand_in = &stand_in;
                scope.spawn(move || {
                    let mut session = open(stand_in).unwrap();
                    for round in 0..8 {
                        let pages = pages((round + 1) * 4096, seed * 100 + round);
                        let payload = compress(&mut session, &pages).unwrap();
                        let back = decompress(&mut session, &payload, pages.len()).unwrap();
                        assert!(back == pages);
                    }
                });
            }
        });
        assert_eq!(stand_in.get("qzClose_calls"), 4);
        assert!(is_balanced(&stand_in));
    }
}
