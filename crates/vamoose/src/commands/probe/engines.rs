//! The accelerators on the PCI bus, and the engines that the registry has.

use std::{fmt, fs, ops::RangeInclusive, path::PathBuf};

use idxd::discovery::{self, Hardware};
use vamoose_codec::Registry;

use super::Root;

/// An accelerator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    /// Domain, bus, device and function.
    address: String,
    kind: Kind,
    model: &'static str,
    /// Absent on hosts without NUMA.
    numa_node: Option<u32>,
    /// The kernel's driver that has it.
    driver: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Qat,
    Dsa,
    Iaa,
}

impl From<idxd::Kind> for Kind {
    fn from(kind: idxd::Kind) -> Self {
        match kind {
            idxd::Kind::Dsa => Self::Dsa,
            idxd::Kind::Iaa => Self::Iaa,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qat => "QAT",
            Self::Dsa => "DSA",
            Self::Iaa => "IAA",
        })
    }
}

/// Device ids of QAT; idxd knows those of DSA and IAA.
const QAT: [(&str, &str); 8] = [
    ("0x4940", "4xxx"),
    ("0x4941", "4xxx (virtual function)"),
    ("0x4942", "401xx"),
    ("0x4943", "401xx (virtual function)"),
    ("0x4944", "402xx"),
    ("0x4945", "402xx (virtual function)"),
    ("0x4946", "420xx"),
    ("0x4947", "420xx (virtual function)"),
];

/// The accelerators of this host, by their addresses.
pub(super) fn devices(root: &Root) -> Vec<Device> {
    const BUS: &str = "sys/bus/pci/devices";
    let device = |address: String, kind: Kind, model| {
        let file = |name: &str| format!("{BUS}/{address}/{name}");
        let driver = fs::read_link(root.path(file("driver"))).ok();
        Device {
            kind,
            model,
            // -1 on hosts without NUMA.
            numa_node: root
                .read(file("numa_node"))
                .and_then(|node| node.parse().ok()),
            driver: driver.and_then(|it| Some(it.file_name()?.to_string_lossy().into_owned())),
            address,
        }
    };
    let qat = |address: String| {
        let read = |name: &str| root.read(format!("{BUS}/{address}/{name}"));
        let id = read("device").filter(|_| read("vendor").as_deref() == Some("0x8086"))?;
        let (_, model) = QAT.into_iter().find(|(known, _)| **known == id)?;
        Some(device(address, Kind::Qat, model))
    };
    let on_bus = fs::read_dir(root.path(BUS)).into_iter().flatten().flatten();
    let names = on_bus.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let offload = discovery::hardware(&root.of_idxd()).into_iter();
    let offload = offload.map(
        |Hardware {
             address,
             kind,
             model,
             ..
         }| device(address, kind.into(), model),
    );
    let mut found: Vec<_> = names.filter_map(qat).chain(offload).collect();
    found.sort_by(|one, other| one.address.cmp(&other.address));
    found
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} at {}", self.kind, self.model, self.address)?;
        if let Some(node) = self.numa_node {
            write!(f, ", node {node}")?;
        }
        match &self.driver {
            Some(driver) => write!(f, ", driver {driver}"),
            None => write!(f, ", no driver bound"),
        }
    }
}

/// An engine of the registry.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Engine {
    name: &'static str,
    method: &'static str,
    /// `None` if the method has no levels.
    levels: Option<RangeInclusive<i32>>,
    hardware: bool,
    present: bool,
    /// Why it is absent, and how many devices there are for it.
    reason: String,
    /// The file of the library that drives the hardware, with the version in its name.
    library: Option<PathBuf>,
}

/// The engines, method by method, the preferred one first.
pub(super) fn engines(registry: &Registry, devices: &[Device]) -> Vec<Engine> {
    let count = |kind: Kind| {
        let found = devices.iter().filter(|device| device.kind == kind).count();
        match found {
            0 => format!("no {kind} device found"),
            found => format!("{kind} devices found: {found}"),
        }
    };
    let engine = |row: vamoose_codec::EngineInfo| {
        let found = match row.name {
            "qat" => Some(count(Kind::Qat)),
            "iaa" => Some(count(Kind::Iaa)),
            _ => None,
        };
        Engine {
            name: row.name,
            method: row.method.name(),
            levels: row.levels,
            hardware: row.hardware,
            present: row.absent.is_none(),
            reason: [row.absent, found]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join("; "),
            library: row.library,
        }
    };
    registry.engines().into_iter().map(engine).collect()
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let presence = if self.present { "present" } else { "absent" };
        let library = self.library.as_ref();
        let library = library.map(|file| format!("library {}", file.display()));
        // The line of hardware is long already.
        let levels = self.levels.as_ref().filter(|_| !self.hardware);
        let levels = levels.map(|it| format!("levels {} to {}", it.start(), it.end()));
        let reason = Some(self.reason.clone()).filter(|reason| !reason.is_empty());
        let details: Vec<_> = [reason, library, levels].into_iter().flatten().collect();
        let (name, method, details) = (self.name, self.method, details.join("; "));
        write!(f, "{name:<11}{method:<12}{presence:<9}{details}")
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{super::fake, *};

    #[test]
    fn accelerators_are_told_from_the_rest() {
        let (_folder, root) = fake::root(&[
            ("sys/bus/pci/devices/0000:00:01.0/vendor", "0x8086\n"),
            ("sys/bus/pci/devices/0000:00:01.0/device", "0x1237\n"),
            ("sys/bus/pci/devices/0000:6d:00.0/vendor", "0x1af4\n"),
            ("sys/bus/pci/devices/0000:6d:00.0/device", "0x4940\n"),
            ("sys/bus/pci/devices/0000:6b:00.0/vendor", "0x8086\n"),
            ("sys/bus/pci/devices/0000:6b:00.0/device", "0x4940\n"),
            ("sys/bus/pci/devices/0000:6b:00.0/numa_node", "1\n"),
            ("sys/bus/pci/devices/0000:6a:02.0/vendor", "0x8086\n"),
            ("sys/bus/pci/devices/0000:6a:02.0/device", "0x0cfe\n"),
            ("sys/bus/pci/devices/0000:6a:02.0/numa_node", "-1\n"),
            ("sys/bus/pci/drivers/4xxx/bind", ""),
            // Files that a hostile or broken sysfs might hold.
            ("sys/bus/pci/devices/0000:ff:00.0/vendor", "Intel\n"),
            ("sys/bus/pci/devices/0000:ff:00.0/device", "\n"),
        ]);
        std::os::unix::fs::symlink(
            "../../drivers/4xxx",
            root.path("sys/bus/pci/devices/0000:6b:00.0/driver"),
        )
        .unwrap();
        let found: Vec<_> = devices(&root).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "IAA Sapphire or Emerald Rapids at 0000:6a:02.0, no driver bound",
                "QAT 4xxx at 0000:6b:00.0, node 1, driver 4xxx",
            ]
        );
    }

    #[test]
    fn no_bus_is_no_device() {
        let (_folder, root) = fake::root(&[]);
        assert_eq!(devices(&root), []);
    }

    #[test]
    fn absent_hardware_says_why_and_what_is_on_the_bus() {
        let bus = "sys/bus/pci/devices";
        let (_folder, root) = fake::root(&[
            (&format!("{bus}/0000:6b:00.0/vendor"), "0x8086"),
            (&format!("{bus}/0000:6b:00.0/device"), "0x4944"),
            (&format!("{bus}/0000:70:00.0/vendor"), "0x8086"),
            (&format!("{bus}/0000:70:00.0/device"), "0x4946"),
        ]);
        let registry = Registry::with_libqatzip(Path::new("/nowhere/libqatzip.so"));
        let engines = engines(&registry, &devices(&root));
        assert_eq!(engines.len(), registry.engines().len());
        let named = |name| engines.iter().find(|engine| engine.name == name).unwrap();
        let qat = named("qat");
        assert!(qat.hardware && !qat.present);
        let reason = &qat.reason;
        assert!(
            reason.contains("/nowhere/libqatzip.so cannot be loaded"),
            "{reason}"
        );
        assert!(reason.ends_with("; QAT devices found: 2"), "{reason}");
        let zstd = named("zstd").to_string();
        assert!(zstd.contains("present  levels "), "{zstd}");
    }
}
