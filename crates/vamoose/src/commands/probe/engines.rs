//! The accelerators on the PCI bus, and the engines that the registry has.

use std::{fs, path::Path};

use idxd::discovery::{self, Root};
use vamoose_codec::EngineInfo;

use super::read;

/// An accelerator on the PCI bus.
pub(super) struct Accelerator {
    kind: &'static str,
    /// Model, PCI address, NUMA node and the kernel driver that is bound to it.
    pub(super) description: String,
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

/// The accelerators of this host, by address.
pub(super) fn accelerators(root: &Root) -> Vec<Accelerator> {
    let accelerator = |(address, id): (String, String)| {
        let (kind, model) = match discovery::identify(&id) {
            Some((idxd::Kind::Dsa, model)) => ("DSA", model),
            Some((idxd::Kind::Iaa, model)) => ("IAA", model),
            None => ("QAT", QAT.into_iter().find(|(known, _)| *known == id)?.1),
        };
        let folder = root.sys.join("bus/pci/devices").join(&address);
        // -1 on hosts without NUMA.
        let node = read(folder.join("numa_node")).and_then(|node| node.parse::<u32>().ok());
        let node = node.map_or(String::new(), |node| format!(", node {node}"));
        let driver = fs::read_link(folder.join("driver")).ok();
        let driver = match driver.as_deref().and_then(Path::file_name) {
            Some(name) => format!("driver {}", name.display()),
            None => "no driver bound".to_owned(),
        };
        let description = format!("{kind} {model} at {address}{node}, {driver}");
        Some(Accelerator { kind, description })
    };
    let devices = discovery::pci_devices(root).into_iter();
    devices.filter_map(accelerator).collect()
}

/// The line of an engine: whether it is present or why not, and the number of devices for it.
pub(super) fn describe(engine: &EngineInfo, accelerators: &[Accelerator]) -> String {
    let presence = match &engine.absent {
        None => "present",
        Some(_) => "absent",
    };
    let kind = match engine.name {
        "qat" => Some("QAT"),
        "iaa" => Some("IAA"),
        _ => None,
    };
    let devices = kind.map(|kind| {
        let found = accelerators.iter().filter(|device| device.kind == kind);
        match found.count() {
            0 => format!("no {kind} device found"),
            found => format!("{kind} devices found: {found}"),
        }
    });
    let library = engine
        .library
        .as_ref()
        .map(|file| format!("library {}", file.display()));
    // The line of hardware is long already.
    let levels = engine.levels.as_ref().filter(|_| !engine.hardware);
    let levels = levels.map(|it| format!("levels {} to {}", it.start(), it.end()));
    let details: Vec<_> = [engine.absent.clone(), devices, library, levels]
        .into_iter()
        .flatten()
        .collect();
    let (name, method, details) = (engine.name, engine.method.name(), details.join("; "));
    format!("{name:<11}{method:<12}{presence:<9}{details}")
}

#[cfg(test)]
mod tests {
    use vamoose_codec::Registry;

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
            root.sys.join("bus/pci/devices/0000:6b:00.0/driver"),
        )
        .unwrap();
        let found = accelerators(&root).into_iter();
        let found: Vec<_> = found.map(|accelerator| accelerator.description).collect();
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
        assert!(accelerators(&root).is_empty());
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
        let devices = accelerators(&root);
        let engine = |name| {
            let mut engines = registry.engines().into_iter();
            describe(
                &engines.find(|engine| engine.name == name).unwrap(),
                &devices,
            )
        };
        let qat = engine("qat");
        for part in [
            " absent ",
            "/nowhere/libqatzip.so cannot be loaded",
            "; QAT devices found: 2",
        ] {
            assert!(qat.contains(part), "{qat}");
        }
        let zstd = engine("zstd");
        assert!(zstd.contains("present  levels "), "{zstd}");
    }
}
