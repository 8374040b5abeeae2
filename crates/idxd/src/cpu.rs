//! Detects the instructions that the processor has and the kernel enables.

use std::{fs, path::Path};

/// The instructions that work queues and waiting need.
///
/// Source: Intel's instruction set reference, CPUID leaf 7, subleaf 0, ECX: WAITPKG is bit 5, MOVDIR64B bit 28,
/// ENQCMD bit 29.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// The processor has ENQCMD, for shared work queues.
    pub enqcmd: bool,
    /// The kernel lets processes use it: `enqcmd` is among the flags of `/proc/cpuinfo`. Where it does not, the
    /// instruction ends in a general protection fault.
    pub enqcmd_enabled: bool,
    /// The processor has MOVDIR64B, for dedicated work queues. It needs no support by the kernel.
    pub movdir64b: bool,
    /// The processor has UMONITOR, UMWAIT and TPAUSE.
    pub waitpkg: bool,
}

impl Features {
    /// Features of this machine. `cpuinfo` is `/proc/cpuinfo`, or a test's replacement; an unreadable file counts as no
    /// features enabled.
    pub fn of_host(cpuinfo: &Path) -> Self {
        Self::decode(
            leaf_7_ecx(),
            &fs::read_to_string(cpuinfo).unwrap_or_default(),
        )
    }

    fn decode(ecx: u32, cpuinfo: &str) -> Self {
        let has = |bit: u32| ecx >> bit & 1 == 1;
        Self {
            enqcmd: has(29),
            enqcmd_enabled: flags(cpuinfo).any(|flag| flag == "enqcmd"),
            movdir64b: has(28),
            waitpkg: has(5),
        }
    }
}

/// The flags of the first processor: all have the same.
fn flags(cpuinfo: &str) -> impl Iterator<Item = &str> {
    cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "flags")
        .into_iter()
        .flat_map(|(_, flags)| flags.split_whitespace())
}

#[cfg(target_arch = "x86_64")]
fn leaf_7_ecx() -> u32 {
    use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};

    let (leaves, _) = __get_cpuid_max(0);
    if leaves < 7 {
        return 0;
    }
    __cpuid_count(7, 0).ecx
}

#[cfg(not(target_arch = "x86_64"))]
fn leaf_7_ecx() -> u32 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_where_the_manual_has_them() {
        let none = Features::default();
        assert_eq!(Features::decode(0, ""), none);
        assert_eq!(
            Features::decode(1 << 5, ""),
            Features {
                waitpkg: true,
                ..none
            }
        );
        assert_eq!(
            Features::decode(1 << 28, ""),
            Features {
                movdir64b: true,
                ..none
            }
        );
        assert_eq!(
            Features::decode(1 << 29, ""),
            Features {
                enqcmd: true,
                ..none
            }
        );
        assert_eq!(Features::decode(!(1 << 5 | 1 << 28 | 1 << 29), ""), none);
    }

    #[test]
    fn the_kernel_enables_enqcmd_by_its_whole_name() {
        let enabled = |text| Features::decode(0, text).enqcmd_enabled;
        assert!(enabled("processor\t: 0\nflags\t\t: fpu enqcmd waitpkg\n"));
        assert!(!enabled("flags\t\t: fpu enqcmds xenqcmd\n"));
        assert!(!enabled("bugs\t\t: enqcmd\nflags\t\t: fpu\n"));
        assert!(!enabled("enqcmd"));
    }

    #[test]
    fn an_unreadable_cpuinfo_enables_nothing() {
        assert!(!Features::of_host(Path::new("/dev/null/cpuinfo")).enqcmd_enabled);
    }
}
