//! Files that get their names when they are complete and on the disk.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use crate::random_id;

/// A file that is being written, which only its owner may read: until it is complete, in the same folder under a name that nobody
/// else chooses, in whatever container. Removed unless it gets its name.
pub struct NewFile {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    folder: File,
}

impl NewFile {
    /// Begins the file `path`.
    ///
    /// # Errors
    /// When the folder cannot be opened or allows no new file, or `path` has no name.
    pub fn create(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut temporary = OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{:016x}", u64::from_ne_bytes(random_id()?)));
        let temporary = path.with_file_name(temporary);
        let folder = path.parent().filter(|it| !it.as_os_str().is_empty());
        // Opened first, as there may be no descriptor left later.
        let folder = File::open(folder.unwrap_or(Path::new(".")))?;
        let mut options = OpenOptions::new();
        let options = options.write(true).create_new(true).mode(0o600);
        Ok(Self {
            file: options.open(&temporary)?,
            temporary,
            path: path.to_owned(),
            folder,
        })
    }

    /// The file, to be written.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The path that it is to have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the file its name, in place of another file that has the name.
    ///
    /// # Errors
    /// When it cannot be written to the disk, or named.
    pub fn replace(self) -> io::Result<()> {
        self.give_name(|from, to| fs::rename(from, to))
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// When there is a file of the name, or this one cannot be written to the disk, or named.
    pub fn add(self) -> io::Result<()> {
        // A rename would replace the other one.
        self.give_name(|from, to| fs::hard_link(from, to))
    }

    fn give_name(self, give: impl FnOnce(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
        self.file.sync_all()?;
        give(&self.temporary, &self.path)?;
        self.folder.sync_all()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // The name may have been changed.
        let _ = fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn a_file_has_its_name_when_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("name");
        let names = || {
            let names = fs::read_dir(folder.path()).unwrap();
            names.map(|it| it.unwrap().file_name()).collect::<Vec<_>>()
        };
        let begin = |text: &str| {
            let new = NewFile::create(&path).unwrap();
            write!(new.file(), "{text}").unwrap();
            new
        };
        // Two at once, as of two containers in which processes have the same number.
        let (one, other) = (begin("one"), begin("other"));
        assert!(!path.exists());
        one.add().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        other.replace().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "other");
        let refused = begin("a third").add().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        drop(begin("incomplete"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "other");
        assert_eq!(names(), ["name"]);
    }
}
