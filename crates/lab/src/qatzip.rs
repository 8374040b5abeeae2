//! The real libqatzip, which can run sessions in software, for tests of the code that calls it.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::{skipped, target_dir};

/// The name of the library.
const NAME: &str = "libqatzip.so.3";

/// The libraries that it needs, in load order.
const NEEDED: [&str; 6] = [
    "libcrypto.so.3",
    "libnuma.so.1",
    "liblz4.so.1",
    "libz.so.1",
    "libusdm.so.0",
    "libqat.so.4",
];

/// The folder with the library and what it needs: from `scripts/setup qatzip`, else the system's. If there is none, reports the
/// test as skipped and returns `None`.
pub fn folder_or_skip() -> Result<Option<PathBuf>> {
    let system = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(PathBuf::from);
    let mut folders = [target_dir().join("qatzip")].into_iter().chain(system);
    let found = folders.find(|folder| folder.join(NAME).exists());
    if found.is_none() {
        skipped("no libqatzip, run scripts/setup qatzip")?;
    }
    Ok(found)
}

/// The libraries in `folder` in load order, libqatzip last. The loader of a running process searches only the system's folders and
/// loaded libraries for what they need.
pub fn libraries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let libraries = NEEDED.into_iter().chain([NAME]);
    libraries
        .map(|name| folder.join(name))
        .filter(|path| path.exists())
}
