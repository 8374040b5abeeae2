//! The processor: its model and the features that Vamoose's engines use or will use.

use std::{collections::BTreeMap, thread};

use serde::Serialize;

use super::{Lines, Root};

/// The processor.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Cpu {
    architecture: &'static str,
    model: Option<String>,
    /// Hardware threads of the host.
    cores: Option<usize>,
    /// Hardware threads that this process may use.
    pub(super) usable_cores: usize,
    /// Empty on other processors than x86.
    features: BTreeMap<&'static str, bool>,
}

/// Names as in `/proc/cpuinfo`, and what they are good for:
/// vectors (zero scan, ISA-L), carry-less multiplication (checksums), then what drives DSA and IAA from
/// user space: work submission to shared and dedicated queues, and sleeping until a descriptor is done.
const FEATURES: [&str; 8] = [
    "sse4_2",
    "avx2",
    "avx512f",
    "avx512bw",
    "pclmulqdq",
    "enqcmd",
    "movdir64b",
    "waitpkg",
];

impl Cpu {
    pub(super) fn probe(root: &Root) -> Self {
        let info = root.read("proc/cpuinfo").unwrap_or_default();
        Self {
            architecture: std::env::consts::ARCH,
            model: value(&info, "model name").map(str::to_owned),
            cores: match values(&info, "processor").count() {
                0 => None,
                cores => Some(cores),
            },
            usable_cores: thread::available_parallelism().map_or(1, usize::from),
            features: features(&info, IS_X86),
        }
    }

    pub(super) fn describe(&self, lines: &mut Lines) {
        let model = self.model.as_deref().unwrap_or("unknown model");
        lines.put("cpu", format_args!("{model} ({})", self.architecture));
        let usable = self.usable_cores;
        lines.put(
            "cores",
            match self.cores {
                Some(cores) => format!("{cores}, {usable} available to this process"),
                None => format!("{usable} available to this process"),
            },
        );
        if self.features.is_empty() {
            lines.put("features", "not x86");
            return;
        }
        let named = |wanted: bool| {
            let names: Vec<_> = self
                .features
                .iter()
                .filter(|(_, present)| **present == wanted)
                .map(|(name, _)| *name)
                .collect();
            match names.is_empty() {
                true => "none".to_owned(),
                false => names.join(" "),
            }
        };
        lines.put("features", format_args!("present: {}", named(true)));
        lines.put("features", format_args!("absent:  {}", named(false)));
    }
}

const IS_X86: bool = cfg!(any(target_arch = "x86", target_arch = "x86_64"));

/// A feature is there when the processor reports it (and the kernel has enabled its registers), or,
/// where the standard library cannot ask, when the kernel lists it.
fn features(info: &str, is_x86: bool) -> BTreeMap<&'static str, bool> {
    if !is_x86 {
        return BTreeMap::new();
    }
    let listed: Vec<_> = value(info, "flags")
        .unwrap_or_default()
        .split_ascii_whitespace()
        .collect();
    FEATURES
        .into_iter()
        .map(|name| (name, detected(name).unwrap_or(listed.contains(&name))))
        .collect()
}

#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
fn detected(name: &str) -> Option<bool> {
    use std::arch::is_x86_feature_detected as detected;

    Some(match name {
        "sse4_2" => detected!("sse4.2"),
        "avx2" => detected!("avx2"),
        "avx512f" => detected!("avx512f"),
        "avx512bw" => detected!("avx512bw"),
        "pclmulqdq" => detected!("pclmulqdq"),
        _ => return None,
    })
}

#[cfg(not(any(target_arch = "x86", target_arch = "x86_64")))]
fn detected(_name: &str) -> Option<bool> {
    None
}

/// The first value of `key` in the text of `/proc/cpuinfo`.
fn value<'a>(info: &'a str, key: &'a str) -> Option<&'a str> {
    values(info, key).next()
}

fn values<'a>(info: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    info.lines()
        .filter_map(|line| line.split_once(':'))
        .filter(move |(name, _)| name.trim() == key)
        .map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::{super::fake, *};

    const INFO: &str = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu enqcmd movdir64b\n\n\
                        processor\t: 1\nmodel name\t: Some Xeon\nflags\t\t: fpu enqcmd movdir64b\n";

    #[test]
    fn the_kernels_list_is_read() {
        let (_folder, root) = fake::root(&[("proc/cpuinfo", INFO)]);
        let cpu = Cpu::probe(&root);
        assert_eq!(cpu.model.as_deref(), Some("Some Xeon"));
        assert_eq!(cpu.cores, Some(2));
        let features = features(INFO, true);
        assert_eq!(features.len(), FEATURES.len());
        assert!(features["enqcmd"] && features["movdir64b"] && !features["waitpkg"]);
    }

    #[test]
    fn other_processors_have_no_x86_features() {
        assert!(features(INFO, false).is_empty());
        let cpu = Cpu {
            architecture: "aarch64",
            model: None,
            cores: None,
            usable_cores: 4,
            features: BTreeMap::new(),
        };
        let mut lines = Lines::default();
        cpu.describe(&mut lines);
        assert!(lines.0.contains("not x86"), "{}", lines.0);
        assert!(
            lines.0.contains("4 available to this process"),
            "{}",
            lines.0
        );
    }
}
