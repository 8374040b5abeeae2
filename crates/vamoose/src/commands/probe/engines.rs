//! The registered engines, what they do, and why some are absent.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive, path::PathBuf};

use multifd::Method;
use serde::Serialize;
use vamoose_codec::{EngineInfo, Registry, info};

use super::pci::{Device, Kind};

/// A way to do a method's work.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Engine {
    name: &'static str,
    method: &'static str,
    /// Nothing where the method has none.
    levels: Option<Levels>,
    hardware: bool,
    present: bool,
    /// Why it is absent, or what it serves.
    reason: String,
    /// The file of the library that drives the hardware, with the version in its name.
    library: Option<PathBuf>,
}

/// The levels that an engine can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Levels {
    min: i32,
    max: i32,
}

/// The engines, method by method, the preferred one first, given the accelerators of this host.
pub(super) fn engines(registry: &Registry, devices: &[Device]) -> Vec<Engine> {
    let rows = registry.engines();
    rows.iter()
        .enumerate()
        .map(|(index, row)| {
            let has_better = rows[..index]
                .iter()
                .any(|better| better.method == row.method && !better.hardware);
            engine(row, has_better, devices)
        })
        .collect()
}

/// `has_better` means that other software comes before this one, where both can.
fn engine(row: &EngineInfo, has_better: bool, devices: &[Device]) -> Engine {
    let levels = row.levels.as_ref();
    Engine {
        name: row.name,
        method: row.method.name(),
        levels: levels.map(|levels| Levels {
            min: *levels.start(),
            max: *levels.end(),
        }),
        hardware: row.hardware,
        present: row.absent.is_none(),
        reason: match (&row.absent, kind(row)) {
            (Some(why), Some(kind)) => format!("{why}; {}", seen(kind, devices)),
            (Some(why), None) => why.clone(),
            (None, Some(kind)) => seen(kind, devices),
            (None, None) => match levels {
                None => "uncompressed pages",
                Some(_) if has_better => "the other levels",
                Some(levels) if all_levels(row.method).as_ref() == Some(levels) => "all levels",
                Some(_) => "the levels at which it is faster",
            }
            .to_owned(),
        },
        library: row.library.clone(),
    }
}

fn all_levels(method: Method) -> Option<RangeInclusive<i32>> {
    Some(info(method)?.levels?.range)
}

/// The devices that hardware engines drive.
fn kind(row: &EngineInfo) -> Option<Kind> {
    match row.name {
        "qat" => Some(Kind::Qat),
        "iaa" => Some(Kind::Iaa),
        _ => None,
    }
}

/// How many there are on PCI, and where.
fn seen(kind: Kind, devices: &[Device]) -> String {
    let mut nodes = BTreeMap::new();
    for device in devices.iter().filter(|device| device.kind == kind) {
        *nodes.entry(device.numa_node).or_insert(0) += 1_usize;
    }
    let places: Vec<_> = nodes
        .iter()
        .map(|(node, devices)| match node {
            Some(node) => format!("{devices} on node {node}"),
            None => format!("{devices} on unknown node"),
        })
        .collect();
    let name = kind.name();
    match nodes.values().sum::<usize>() {
        0 => format!("no {name} device found"),
        1 => format!("1 {name} device found: {}", places.join(", ")),
        more => format!("{more} {name} devices found: {}", places.join(", ")),
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let presence = if self.present { "present" } else { "absent" };
        let (name, method, reason) = (self.name, self.method, &self.reason);
        write!(f, "{name:<11}{method:<12}{presence:<9}{reason}")?;
        if let Some(library) = &self.library {
            write!(f, "; library {}", library.display())?;
        }
        match self.levels {
            // The line of hardware is long already.
            Some(_) if self.hardware => Ok(()),
            Some(Levels { min, max }) if min == max => write!(f, " ({min})"),
            Some(Levels { min, max }) => write!(f, " ({min} to {max})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{
        super::{fake, pci},
        *,
    };

    #[test]
    fn absent_hardware_says_why_and_what_is_on_the_bus() {
        let bus = "sys/bus/pci/devices";
        let (_folder, root) = fake::root(&[
            (&format!("{bus}/0000:6b:00.0/vendor"), "0x8086"),
            (&format!("{bus}/0000:6b:00.0/device"), "0x4944"),
            (&format!("{bus}/0000:6b:00.0/numa_node"), "0"),
            (&format!("{bus}/0000:70:00.0/vendor"), "0x8086"),
            (&format!("{bus}/0000:70:00.0/device"), "0x4946"),
            (&format!("{bus}/0000:70:00.0/numa_node"), "1"),
        ]);
        let devices = pci::devices(&root);
        let registry = Registry::with_libqatzip(Path::new("/nowhere/libqatzip.so"));
        let engines = engines(&registry, &devices);
        let qat = engines.iter().find(|engine| engine.name == "qat").unwrap();
        assert!(qat.hardware && !qat.present);
        let reason = &qat.reason;
        assert!(
            reason.contains("/nowhere/libqatzip.so cannot be loaded"),
            "{reason}"
        );
        assert!(
            reason.ends_with("; 2 QAT devices found: 1 on node 0, 1 on node 1"),
            "{reason}"
        );
        assert_eq!(seen(Kind::Iaa, &devices), "no IAA device found");
        assert_eq!(
            seen(Kind::Qat, &devices[..1]),
            "1 QAT device found: 1 on node 0"
        );
    }

    #[test]
    fn every_row_of_the_registry_is_there_with_what_it_serves() {
        let registry = Registry::new();
        let engines = engines(&registry, &[]);
        assert_eq!(engines.len(), registry.engines().len());
        let reason = |name, method| {
            let engine = engines
                .iter()
                .find(|engine| (engine.name, engine.method) == (name, method));
            engine.unwrap().reason.as_str()
        };
        assert_eq!(reason("copy", "none"), "uncompressed pages");
        assert_eq!(reason("zstd", "zstd"), "all levels");
        if cfg!(feature = "isal") {
            assert_eq!(reason("zlib-rs", "zlib"), "the other levels");
        }
    }
}
