//! Detects ENQCMD, the instruction that submits to a mapped work queue.

use std::{fs, path::Path};

/// Whether the processor has it and the kernel has enabled it, by the flags in a file like `/proc/cpuinfo`. If the kernel has not,
/// it ends in a general protection fault.
pub(crate) fn has_enqcmd(cpuinfo: &Path) -> bool {
    let text = fs::read_to_string(cpuinfo).unwrap_or_default();
    // All processors have the same flags.
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let flags = lines.find(|(key, _)| key.trim() == "flags");
    flags.is_some_and(|(_, flags)| flags.split(' ').any(|flag| flag.trim() == "enqcmd"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_whole_word_among_the_flags() {
        for (text, expected) in [
            ("", false),
            ("enqcmd", false),
            ("flags\t\t: fpu enqcmds xenqcmd movdir64\n", false),
            ("bugs\t\t: enqcmd\nflags\t\t: fpu\n", false),
            ("processor\t: 0\nflags\t\t: fpu enqcmd waitpkg\n", true),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), text).unwrap();
            assert_eq!(has_enqcmd(file.path()), expected, "{text:?}");
        }
        assert!(!has_enqcmd(Path::new("/dev/null/cpuinfo")));
    }
}
