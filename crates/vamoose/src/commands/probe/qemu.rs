//! The QEMUs on PATH.

use std::{
    collections::HashSet,
    ffi::OsStr,
    fmt,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde::Serialize;

/// A QEMU on PATH.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Qemu {
    path: PathBuf,
    version: Option<String>,
}

/// The system emulators in the folders of `path`, each once.
pub(super) fn on_path(path: Option<&OsStr>) -> Vec<Qemu> {
    let mut seen = HashSet::new();
    let mut found = Vec::new();
    for folder in path.into_iter().flat_map(std::env::split_paths) {
        let Ok(entries) = folder.read_dir() else {
            continue;
        };
        let mut programs: Vec<_> = entries
            .flatten()
            .filter(|entry| is_qemu(&entry.file_name().to_string_lossy()))
            .map(|entry| entry.path())
            .filter(|program| is_executable(program))
            .collect();
        programs.sort();
        // /bin and /usr/bin are often one folder, and names often links.
        programs.retain(|program| seen.insert(program.canonicalize().unwrap_or(program.clone())));
        found.extend(programs.into_iter().map(|path| Qemu {
            version: version(&path),
            path,
        }));
    }
    found
}

fn is_qemu(name: &str) -> bool {
    name.starts_with("qemu-system-") || name == "qemu-kvm"
}

fn is_executable(program: &Path) -> bool {
    program
        .metadata()
        .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

fn version(program: &Path) -> Option<String> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let first = text.lines().next()?.trim();
    (!first.is_empty()).then(|| first.to_owned())
}

impl fmt::Display for Qemu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.version.as_deref().unwrap_or("unknown version");
        write!(f, "{}: {version}", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn only_programs_of_the_right_name_are_called_each_once() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("a"), folder.path().join("b"));
        fs::create_dir(&first).unwrap();
        fs::create_dir(&second).unwrap();
        // Any program that answers; writing one here could be busy when it is called.
        symlink("/bin/echo", first.join("qemu-system-x86_64")).unwrap();
        symlink("/bin/echo", second.join("qemu-system-x86_64")).unwrap();
        symlink("/bin/echo", first.join("qemu-img")).unwrap();
        fs::write(second.join("qemu-system-notes"), "no program").unwrap();
        let absent = folder.path().join("absent");
        let path = std::env::join_paths([&first, &absent, &second]).unwrap();
        let found = on_path(Some(&path));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, first.join("qemu-system-x86_64"));
        assert!(found[0].version.is_some());
        assert!(on_path(None).is_empty());
    }
}
