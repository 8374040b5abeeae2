//! The stand-in for the library, for tests that load it: each has its own, with its own switches.

use std::{
    ffi::{CString, c_char, c_long},
    path::PathBuf,
};

use super::super::*;

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
