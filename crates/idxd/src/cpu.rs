//! Detects the instructions that the processor has and the kernel enables.

use std::{fs, path::Path};

/// The instructions that work queues and waiting need, by the flags of `/proc/cpuinfo`. The kernel leaves out those that it
/// has not enabled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// ENQCMD, for shared work queues. If the kernel has not enabled it, it ends in a general protection fault.
    pub enqcmd: bool,
    /// MOVDIR64B, for dedicated work queues.
    pub movdir64b: bool,
    /// UMONITOR, UMWAIT and TPAUSE.
    pub waitpkg: bool,
}

impl Features {
    /// Features of this machine.
    pub fn of_host() -> Self {
        Self::of_file(Path::new("/proc/cpuinfo"))
    }

    /// Features in a file like `/proc/cpuinfo`; none if it cannot be read.
    pub fn of_file(cpuinfo: &Path) -> Self {
        let text = fs::read_to_string(cpuinfo).unwrap_or_default();
        // All processors have the same flags.
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        let flags = lines.find(|(key, _)| key.trim() == "flags");
        let has = |name| flags.is_some_and(|(_, flags)| flags.split(' ').any(|flag| flag == name));
        Self {
            enqcmd: has("enqcmd"),
            movdir64b: has("movdir64b"),
            waitpkg: has("waitpkg"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_whole_words_among_the_flags() {
        let none = Features::default();
        for (text, expected) in [
            ("", none),
            ("enqcmd", none),
            ("flags\t\t: fpu enqcmds xenqcmd movdir64\n", none),
            ("bugs\t\t: enqcmd\nflags\t\t: fpu\n", none),
            (
                "processor\t: 0\nflags\t\t: fpu enqcmd waitpkg\n",
                Features {
                    enqcmd: true,
                    waitpkg: true,
                    ..none
                },
            ),
            (
                "flags\t\t: movdir64b\n",
                Features {
                    movdir64b: true,
                    ..none
                },
            ),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), text).unwrap();
            assert_eq!(Features::of_file(file.path()), expected, "{text:?}");
        }
        assert_eq!(Features::of_file(Path::new("/dev/null/cpuinfo")), none);
    }
}
