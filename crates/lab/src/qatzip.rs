//! The real libqatzip, which does a session's work in software if it is allowed to: for tests of what is written
//! against it.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::{skipped, target_dir};

/// What the library is called.
const NAME: &str = "libqatzip.so.3";

/// The libraries that it needs, each before those that need it.
const NEEDED: [&str; 6] = [
    "libcrypto.so.3",
    "libnuma.so.1",
    "liblz4.so.1",
    "libz.so.1",
    "libusdm.so.0",
    "libqat.so.4",
];

/// The folder that has the library and what it needs: that of `scripts/setup qatzip`, else the system's. Where there is
/// none, says loudly that the test is skipped, and gives `None`.
pub fn folder_or_skip() -> Result<Option<PathBuf>> {
    let system = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(PathBuf::from);
    let mut folders = [target_dir().join("qatzip")].into_iter().chain(system);
    let found = folders.find(|folder| folder.join(NAME).exists());
    if found.is_none() {
        skipped("no libqatzip, run scripts/setup qatzip")?;
    }
    Ok(found)
}

/// The libraries in `folder` in the order in which a process can load them, libqatzip last: the loader of a process
/// that has started looks for what they need in the system's folders only, and among what has been loaded.
pub fn libraries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let libraries = NEEDED.into_iter().chain([NAME]);
    libraries
        .map(|name| folder.join(name))
        .filter(|path| path.exists())
}
